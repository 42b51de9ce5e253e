/* shim_sandbox.c - a program puts itself under a seccomp filter, or into the strict mode. */
#include "shim_plain.h"
#include "shim_process.h"

#include <linux/seccomp.h>
#include <sys/prctl.h>

/*
 * What is accepted or opened from now on passes us by: to look after it takes calls that the program may not make. A connection
 * that has a channel still makes calls of its own: sendmsg, recvmsg, getsockopt, ioctl, ppoll, futex, preadv2.
 */
static void filtered(void)
{
	plain_from_now(REASON_SANDBOX);
	config.opt_in = true;
}

EXPORT int prctl(int option, ...)
{
	va_list args;
	long a[4];

	va_start(args, option);
	for (int i = 0; i < 4; i++)
		a[i] = va_arg(args, long);
	va_end(args);
	if (option == PR_SET_SECCOMP && a[0] == SECCOMP_MODE_STRICT)
		conns_release(REASON_SANDBOX,
		              true); /* the kernel ends a thread that makes another call, or looks at the clock (PR_TSC) */
	else if (option == PR_SET_SECCOMP)
		filtered();
	return (int)real.syscall(SYS_prctl, option, a[0], a[1], a[2], a[3], 0);
}

long raw_seccomp(long operation, long flags, long argument)
{
	if (operation == SECCOMP_SET_MODE_STRICT)
		conns_release(REASON_SANDBOX, true);
	else if (operation == SECCOMP_SET_MODE_FILTER)
		filtered();
	return real.syscall(SYS_seccomp, operation, flags, argument, 0, 0, 0);
}
