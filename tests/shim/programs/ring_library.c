/* As liburing makes a ring: by a system call that the C library does not see. */
#include <linux/io_uring.h>
#include <sys/syscall.h>

int io_uring_setup(unsigned entries, struct io_uring_params *setup);

int io_uring_setup(unsigned entries, struct io_uring_params *setup)
{
#if defined(__x86_64__)
	long result;
	__asm__ volatile("syscall"
	                 : "=a"(result)
	                 : "a"((long)SYS_io_uring_setup), "D"((long)entries), "S"(setup)
	                 : "rcx", "r11", "memory");
	return (int)result;
#elif defined(__aarch64__)
	register long number __asm__("x8") = SYS_io_uring_setup, first __asm__("x0") = (long)entries;
	register void *second __asm__("x1") = setup;
	__asm__ volatile("svc 0" : "+r"(first) : "r"(number), "r"(second) : "memory");
	return (int)first;
#endif
}
