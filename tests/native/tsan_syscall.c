/*
 * tsan_syscall.c - preloaded between the shim and TSan's runtime: tells the runtime of descriptors that the shim closes by
 * a raw system call. It would otherwise take the next use of the number for a race with the last.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/syscall.h>

void __sanitizer_syscall_pre_impl_close(long fd);
long syscall(long number, long a, long b, long c, long d, long e, long f);

long syscall(long number, long a, long b, long c, long d, long e, long f)
{
	static long (*_Atomic next)(long, ...);

	if (!next)
		next = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
	if (number == SYS_close)
		__sanitizer_syscall_pre_impl_close(a);
	return next(number, a, b, c, d, e, f);
}
