/* shim_sandbox.c - a program puts itself under a seccomp filter, or into the strict mode. */
#include "shim_tcp_only.h"
#include "shim_process.h"

#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>

#if defined(__x86_64__)
#define OWN_ARCH AUDIT_ARCH_X86_64
#else
#define OWN_ARCH AUDIT_ARCH_AARCH64
#endif

/* The filter's verdict on a call, by its program in classic BPF (linux/filter.h); see seccomp_check_filter() in Linux. */
static uint32_t filter_says(const struct sock_fprog *filter, const struct seccomp_data *call)
{
	uint32_t a = 0, x = 0, memory[BPF_MEMWORDS] = {0};

	for (uint32_t at = 0; at < filter->len; at++) {
		const struct sock_filter now = filter->filter[at];
		const uint32_t operand = BPF_SRC(now.code) == BPF_X ? x : now.k, cell = now.k % BPF_MEMWORDS;
		uint32_t loaded = now.k; /* BPF_IMM */
		if (BPF_MODE(now.code) == BPF_MEM)
			loaded = memory[cell];
		else if (BPF_MODE(now.code) == BPF_LEN)
			loaded = sizeof(*call);
		else if (BPF_MODE(now.code) == BPF_ABS && now.k <= sizeof(*call) - sizeof(loaded))
			memcpy(&loaded, (const uint8_t *)call + now.k, sizeof(loaded));
		switch (BPF_CLASS(now.code)) {
		case BPF_LD: a = loaded; break;
		case BPF_LDX: x = loaded; break;
		case BPF_ST: memory[cell] = a; break;
		case BPF_STX: memory[cell] = x; break;
		case BPF_RET: return BPF_RVAL(now.code) == BPF_A ? a : now.k;
		case BPF_MISC: *(BPF_MISCOP(now.code) == BPF_TXA ? &a : &x) = BPF_MISCOP(now.code) == BPF_TXA ? x : a; break;
		case BPF_ALU:
			switch (BPF_OP(now.code)) {
			case BPF_ADD: a += operand; break;
			case BPF_SUB: a -= operand; break;
			case BPF_MUL: a *= operand; break;
			case BPF_DIV: a = operand ? a / operand : 0; break;
			case BPF_AND: a &= operand; break;
			case BPF_OR: a |= operand; break;
			case BPF_XOR: a ^= operand; break;
			case BPF_LSH: a <<= operand & 31; break;
			case BPF_RSH: a >>= operand & 31; break;
			case BPF_NEG: a = -a; break;
			default: return SECCOMP_RET_KILL_PROCESS;
			}
			break;
		case BPF_JMP: {
			const uint32_t op = BPF_OP(now.code);
			const bool holds = op == BPF_JEQ   ? a == operand
			                   : op == BPF_JGT ? a > operand
			                   : op == BPF_JGE ? a >= operand
			                                   : a & operand; /* BPF_JSET */
			at += op == BPF_JA ? now.k : holds ? now.jt : now.jf;
			break;
		}
		default: return SECCOMP_RET_KILL_PROCESS;
		}
	}
	return SECCOMP_RET_KILL_PROCESS;
}

/* System calls of a connection that has a channel: to read and write, to wait, and to see what TCP has. */
static const struct {
	int number;
	uint64_t second;
} needed[] = {{SYS_sendmsg, 0},
              {SYS_recvmsg, 0},
              {SYS_preadv2, 0},
              {SYS_getsockopt, SOL_SOCKET},
              {SYS_getsockopt, IPPROTO_TCP},
              {SYS_ioctl, FIONREAD},
              {SYS_ioctl, SIOCOUTQ},
              {SYS_ppoll, 0},
              {SYS_futex, 0},
              {SYS_write, 0},
              {SYS_read, 0}};

/* `filter`: NULL allows hardly anything (strict mode). */
static bool filter_bears_us(const struct sock_fprog *filter)
{
	struct seccomp_data call = {.arch = OWN_ARCH};
	bool bears = filter && filter->filter;

	for (size_t i = 0; bears && i < sizeof(needed) / sizeof(*needed); i++) {
		call.nr = needed[i].number;
		call.args[1] = needed[i].second;
		bears = (filter_says(filter, &call) & SECCOMP_RET_ACTION_FULL) == SECCOMP_RET_ALLOW;
	}
	return bears;
}

/*
 * What is accepted or opened from now on passes us by: to look after it takes calls that the program may not make. A connection
 * that has a channel still makes calls of its own: sendmsg, recvmsg, getsockopt, ioctl, ppoll, futex, preadv2.
 */
static void filtered(const struct sock_fprog *filter)
{
	if (!filter_bears_us(filter)) { /* it would end the process for what a connection with a channel calls */
		conns_release(REASON_SANDBOX, true);
		return;
	}
	tcp_only_begin(REASON_SANDBOX);
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
		filtered((const struct sock_fprog *)a[1]);
	return (int)real.syscall(SYS_prctl, option, a[0], a[1], a[2], a[3], 0);
}

long raw_seccomp(long operation, long flags, long argument)
{
	if (operation == SECCOMP_SET_MODE_STRICT)
		conns_release(REASON_SANDBOX, true);
	else if (operation == SECCOMP_SET_MODE_FILTER)
		filtered((const struct sock_fprog *)argument);
	return real.syscall(SYS_seccomp, operation, flags, argument, 0, 0, 0);
}
