/*
 * shim_sandbox.c - a program puts itself under a seccomp filter, or into the strict mode.
 *
 * What it may call is looked up in the filter. Where that is less than a connection with a ring needs, the process forgets its
 * connections, and the kernel has all calls on them. A server of several processes goes on with such a connection in another
 * one, when the confined one has ended (SLOT_CONFINED). It has stayed a holder until then, though it counts nothing; what it
 * could not do by its filter, it has not done: the socket has no other holders than those that are counted, and its options are as
 * they were. So with its end the kernel's counts are right, and the connection may be promoted where it is held.
 */
#include "shim_tcp_only.h"
#include "shim_process.h"
#include "shim_switch.h"

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

/*
 * The filter's verdict on a call, by its program in classic BPF (linux/filter.h); see seccomp_check_filter() in Linux. `depends`
 * becomes true if it looks at more than the number of the call.
 */
static uint32_t filter_says(const struct sock_fprog *filter, const struct seccomp_data *call, bool *depends)
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
		else if (BPF_MODE(now.code) == BPF_ABS && now.k <= sizeof(*call) - sizeof(loaded)) {
			memcpy(&loaded, (const uint8_t *)call + now.k, sizeof(loaded));
			*depends |= now.k >= offsetof(struct seccomp_data, instruction_pointer);
		}
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
	bool bears = filter && filter->filter, depends;

	for (size_t i = 0; bears && i < sizeof(needed) / sizeof(*needed); i++) {
		call.nr = needed[i].number;
		call.args[1] = needed[i].second;
		bears = (filter_says(filter, &call, &depends) & SECCOMP_RET_ACTION_FULL) == SECCOMP_RET_ALLOW;
	}
	return bears;
}

/* By these a process hands a socket on, changes it, or has others move its bytes when it has ended. */
static const int uncontrolled[] = {
	SYS_clone,    SYS_clone3,    SYS_execve,         SYS_execveat,       SYS_sendmsg,
	SYS_sendmmsg, SYS_sendto,    SYS_connect,        SYS_setsockopt,     SYS_ioctl,
	SYS_fcntl,    SYS_io_submit, SYS_io_uring_setup, SYS_io_uring_enter, SYS_epoll_ctl,
#ifdef SYS_fork
	SYS_fork,     SYS_vfork,
#endif
};

/* Whether no call of this process can do any of that, whatever it is given. */
static bool filter_confines(const struct sock_fprog *filter)
{
	struct seccomp_data call = {.arch = OWN_ARCH};
	bool confines = filter->filter;

	for (size_t i = 0; confines && i < sizeof(uncontrolled) / sizeof(*uncontrolled); i++) {
		bool depends = false;
		call.nr = uncontrolled[i];
		const uint32_t action = filter_says(filter, &call, &depends) & SECCOMP_RET_ACTION_FULL;
		confines = !depends && (action == SECCOMP_RET_KILL_PROCESS || action == SECCOMP_RET_KILL_THREAD ||
		                        action == SECCOMP_RET_TRAP || action == SECCOMP_RET_ERRNO);
	}
	return confines;
}

/* Calls on all that it has are the kernel's from now on. */
static void confine(bool for_good)
{
	process_confined = for_good && fd_table_len && *one_thread;
	conns_release(REASON_SANDBOX, true);
}

/* The call has returned. Without the filter nothing is certain; with it no call of the kernel is made here. */
static long confine_settled(long result)
{
	if (result != 0 && process_confined) {
		process_confined = false;
		slots_unconfine();
	}
	return result;
}

/*
 * What is accepted or opened from now on passes us by: to look after it takes calls that the program may not make. A connection
 * that has a channel still makes calls of its own: sendmsg, recvmsg, getsockopt, ioctl, ppoll, futex, preadv2.
 */
static void filtered(const struct sock_fprog *filter)
{
	if (!filter_bears_us(filter)) { /* it would end the process for what a connection with a channel calls */
		confine(filter && filter_confines(filter));
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
		confine(true); /* the kernel ends a thread that makes another call, or looks at the clock (PR_TSC) */
	else if (option == PR_SET_SECCOMP)
		filtered((const struct sock_fprog *)a[1]);
	long result = real.syscall(SYS_prctl, option, a[0], a[1], a[2], a[3], 0);
	return (int)(option == PR_SET_SECCOMP ? confine_settled(result) : result);
}

long raw_seccomp(long operation, long flags, long argument)
{
	if (operation == SECCOMP_SET_MODE_STRICT)
		confine(true);
	else if (operation == SECCOMP_SET_MODE_FILTER)
		filtered((const struct sock_fprog *)argument);
	long result = real.syscall(SYS_seccomp, operation, flags, argument, 0, 0, 0);
	return operation == SECCOMP_SET_MODE_STRICT || operation == SECCOMP_SET_MODE_FILTER ? confine_settled(result)
	                                                                                    : result;
}
