/*
 * shim_sandbox.c - a program puts itself under a seccomp filter, or into the strict mode.
 *
 * The filter says what the process may call. Where that is less than a connection with a ring needs, the process forgets its
 * connections, and the kernel has all calls on them. A server of several processes goes on with such a connection in another
 * one, when the confined one has ended (SLOT_CONFINED). The confined process stays a holder until then, though it counts nothing.
 * Its filter allows only calls that leave a socket as it is: nobody gets the socket from it, and no option changes. So with its
 * end the kernel's counts are right, and the connection may be promoted where it is held.
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
#define OTHER_ARCH AUDIT_ARCH_I386 /* Bit of calls that the same process can make, by other numbers */
#define OTHER_NUMBERS 0x40000000u /* __X32_SYSCALL_BIT */
#else
#define OWN_ARCH AUDIT_ARCH_AARCH64
#define OTHER_ARCH AUDIT_ARCH_ARM
#define OTHER_NUMBERS 0u
#endif
#define CALLS_MAX 1024u /* Linux has no numbers beyond it */

/* Fields that a filter has looked at. */
enum { READS_NUMBER = 1, READS_MORE = 2 };

/*
 * The filter's verdict on a call, by its program in classic BPF (linux/filter.h); see seccomp_check_filter() in Linux. The filter's
 * look at the call is added to `reads`.
 */
static uint32_t filter_says(const struct sock_fprog *filter, const struct seccomp_data *call, uint32_t *reads)
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
		else if (BPF_CLASS(now.code) == BPF_LD && BPF_MODE(now.code) == BPF_ABS &&
		         now.k <= sizeof(*call) - sizeof(loaded)) {
			memcpy(&loaded, (const uint8_t *)call + now.k, sizeof(loaded));
			if (now.k != offsetof(struct seccomp_data, arch))
				*reads |= now.k == offsetof(struct seccomp_data, nr) ? READS_NUMBER : READS_MORE;
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
			if (op == BPF_JA && now.k >= filter->len)
				return SECCOMP_RET_KILL_PROCESS; /* the kernel refuses it */
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
	uint32_t reads;

	for (size_t i = 0; bears && i < sizeof(needed) / sizeof(*needed); i++) {
		call.nr = needed[i].number;
		call.args[1] = needed[i].second;
		bears = (filter_says(filter, &call, &reads) & SECCOMP_RET_ACTION_FULL) == SECCOMP_RET_ALLOW;
	}
	return bears;
}

/* True if it allows a thread to be moved to another CPU. */
static bool filter_moves_us(const struct sock_fprog *filter)
{
	const struct seccomp_data asks = {.arch = OWN_ARCH, .nr = SYS_sched_getaffinity};
	const struct seccomp_data moves = {.arch = OWN_ARCH, .nr = SYS_sched_setaffinity};
	uint32_t reads;

	return (filter_says(filter, &asks, &reads) & SECCOMP_RET_ACTION_FULL) == SECCOMP_RET_ALLOW &&
	       (filter_says(filter, &moves, &reads) & SECCOMP_RET_ACTION_FULL) == SECCOMP_RET_ALLOW;
}

/*
 * Calls that leave a socket as it is, and with the processes that have it. All others may hand it on, change it, or have its bytes
 * moved when the process has ended.
 */
/* clang-format off */
static const uint16_t harmless[] = {
	SYS_read, SYS_write, SYS_readv, SYS_writev, SYS_recvfrom, SYS_recvmsg, SYS_close, SYS_shutdown, SYS_ppoll,
	SYS_pselect6, SYS_epoll_pwait, SYS_getsockopt, SYS_getsockname, SYS_getpeername, SYS_lseek, SYS_fstat, SYS_dup,
	SYS_dup3, SYS_brk, SYS_mmap, SYS_munmap, SYS_mremap, SYS_mprotect, SYS_madvise, SYS_futex,
	SYS_nanosleep, SYS_clock_nanosleep, SYS_clock_gettime, SYS_clock_getres, SYS_gettimeofday, SYS_getrusage,
	SYS_getpid, SYS_getppid, SYS_gettid, SYS_getpgid, SYS_getsid, SYS_getuid, SYS_geteuid, SYS_getgid, SYS_getegid,
	SYS_getrandom, SYS_sched_yield, SYS_rt_sigaction, SYS_rt_sigprocmask, SYS_rt_sigreturn, SYS_rt_sigpending,
	SYS_rt_sigsuspend, SYS_sigaltstack, SYS_set_robust_list, SYS_restart_syscall, SYS_tgkill, SYS_exit,
	SYS_exit_group,
#if defined(__x86_64__)
	SYS_poll, SYS_select, SYS_epoll_wait, SYS_dup2, SYS_time, SYS_alarm,
#endif
};
/* clang-format on */

static bool is_harmless(uint32_t number)
{
	for (size_t i = 0; i < sizeof(harmless) / sizeof(*harmless); i++)
		if (harmless[i] == number)
			return true;
	return false;
}

/* True if the kernel never makes that call for the process. The filter may look only at what is in `may_read`. */
static bool filter_denies(const struct sock_fprog *filter, uint32_t arch, uint32_t number, uint32_t may_read)
{
	const struct seccomp_data call = {.arch = arch, .nr = (int)number};
	uint32_t reads = 0;
	const uint32_t action = filter_says(filter, &call, &reads) & SECCOMP_RET_ACTION_FULL;

	return !(reads & ~may_read) && (action == SECCOMP_RET_KILL_PROCESS || action == SECCOMP_RET_KILL_THREAD ||
	                                action == SECCOMP_RET_TRAP || action == SECCOMP_RET_ERRNO);
}

/* True if it allows harmless calls alone. */
static bool filter_confines(const struct sock_fprog *filter)
{
	bool confines = filter->filter && filter_denies(filter, OTHER_ARCH, 0, 0);

	for (uint32_t number = 0; confines && number < CALLS_MAX; number++)
		confines = (is_harmless(number) || filter_denies(filter, OWN_ARCH, number, READS_NUMBER)) &&
		           (!OTHER_NUMBERS || filter_denies(filter, OWN_ARCH, number | OTHER_NUMBERS, READS_NUMBER));
	return confines;
}

/* Calls on all that it has are the kernel's from now on. */
static void confine(bool for_good)
{
	process_confined = for_good && fd_table_len && *one_thread && !tcp_only_why(); /* an io_uring goes on by itself */
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
	if (!filter_bears_us(filter)) { /* The filter would end the process for calls of a connection with a channel */
		confine(filter && filter_confines(filter));
		return;
	}
	tcp_only_begin(REASON_SANDBOX);
	config.opt_in = true;
	config.stay |= !filter_moves_us(filter);
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
