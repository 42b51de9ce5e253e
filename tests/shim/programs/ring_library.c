/* As liburing makes a ring, and libaio submits: by system calls that the C library does not see. */
#include <linux/aio_abi.h>
#include <linux/io_uring.h>
#include <sys/syscall.h>

int io_uring_setup(unsigned entries, struct io_uring_params *setup);
int io_submit(aio_context_t context, long len, struct iocb *list[]);

static int unseen(long number, long first, long second, long third)
{
#if defined(__x86_64__)
	long result;
	__asm__ volatile("syscall"
	                 : "=a"(result)
	                 : "a"(number), "D"(first), "S"(second), "d"(third)
	                 : "rcx", "r11", "memory");
	return (int)result;
#elif defined(__aarch64__)
	register long x8 __asm__("x8") = number, x0 __asm__("x0") = first, x1 __asm__("x1") = second,
					 x2 __asm__("x2") = third;
	__asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2) : "memory");
	return (int)x0;
#endif
}

int io_uring_setup(unsigned entries, struct io_uring_params *setup)
{
	return unseen(SYS_io_uring_setup, (long)entries, (long)setup, 0);
}

int io_submit(aio_context_t context, long len, struct iocb *list[])
{
	return unseen(SYS_io_submit, (long)context, len, (long)list);
}
