/*
 * loader_signal.c - the program's signal handlers stand behind the shim's trampoline, as those of any program with the shim do:
 *
 *     kernel ─► loader_signal_entry ─► loader_signal ─► the shim's trampoline ─► loader_handler ─► the program's handler
 *
 * The first two make the thread pointer ours, the last one makes it the program's again. A signal that comes while the
 * program's own code runs goes from the first to the program's handler, on the kernel's frame. Unwinders find the interrupted
 * code by that frame.
 */
#include "loader.h"

#include <errno.h>
#include <string.h>
#include <sys/syscall.h>

#define SIGNALS 65
#define RESTORER 0x04000000 /* SA_RESTORER */

struct kernel_action {
	uint64_t handler, flags, restorer, mask;
};

static struct kernel_action programs[SIGNALS];
static void (*_Atomic to_call[SIGNALS])(int, siginfo_t *, void *); /* the handler that the shim has registered */

static _Atomic uint64_t straight[SIGNALS]; /* the program's handler, once it is registered with the kernel */

static bool is_function(uint64_t handler)
{
	return handler != (uint64_t)SIG_DFL && handler != (uint64_t)SIG_IGN;
}

static bool in_programs_code(struct registers *now)
{
	extern const char __executable_start[], etext[];
	const uint64_t at = program_counter(now);

	return (at < (uint64_t)__executable_start || at >= (uint64_t)etext) && trampoline_left(now);
}

/*
 * `top` and `interrupted` are block.top and block.inside as they were. Returns 0, or the handler that is to be called as by the
 * kernel.
 */
__attribute__((used, visibility("hidden"))) uint64_t loader_signal(int sig, siginfo_t *info, void *context,
                                                                   uint64_t top, struct frame *interrupted)
{
	const uint64_t handler = straight[sig];

	if (!interrupted && handler && in_programs_code(registers_of(context))) {
		if (programs[sig].flags & SA_RESETHAND) /* the kernel does not know of these */
			kernel_action(sig, &(struct sigaction){.sa_handler = SIG_DFL}, NULL);
		return handler;
	}
	struct block *block = this_block();
	struct frame *before = block->interrupted;
	const uint32_t levels = block->levels_len;
	const stack_t *other = &((ucontext_t *)context)->uc_stack;
	const uint64_t here = (uint64_t)__builtin_frame_address(0), low = (uint64_t)other->ss_sp,
				   high = low + other->ss_size;

	if (block->top != top && levels < LEVELS_MAX) {
		bool on_other = here >= low && here < high;
		block->levels[block->levels_len++] =
			(struct level){top, on_other ? low : 0, on_other ? high : block->program_sp - RED_ZONE};
	}
	block->interrupted = (uint64_t)interrupted > INSIDE_SIGNAL ? interrupted : NULL;
	to_call[sig](sig, info, context);
	block->interrupted = before;
	block->levels_len = levels;
	return 0;
}

/* A fault at such a time is of our own code, and is reported as it is. */
static bool is_fault(int sig, const siginfo_t *info)
{
	return info->si_code > 0 && (sig == SIGSEGV || sig == SIGBUS || sig == SIGFPE || sig == SIGILL || sig == SIGTRAP);
}

/* The handler has changed where a call of ours goes on. The call is to end as soon as it can, if it has done nothing. */
static void divert(struct block *block, struct registers *now, const struct registers *real)
{
	if (!block->interrupted)
		return; /* the call has not begun */
	block->diverted = block->interrupted;
	block->diverted_to = *now;
	*now = *real;
	call_ends(now);
	shim->interrupt();
}

/* The shim's handler of the program, which may come back by siglongjmp. */
static void loader_handler(int sig, siginfo_t *info, void *context)
{
	struct block *block = this_block();
	struct registers *now = registers_of(context);
	const struct registers real = *now;
	const uint64_t top = block->top, inside = block->inside, pointer = block->program_tp, sp = block->program_sp;
	const uint64_t here = (uint64_t)__builtin_frame_address(0);
	const struct kernel_action *action = &programs[sig];

	bool shown = !is_fault(sig, info) && program_shown(block, action->flags & SA_RESTART, now);
	const uint64_t at = program_counter(now);
	loader_to_handler(action->handler, sig, info, context,
	                  here >= block->low && here <= block->high ? sp - RED_ZONE : 0);
	block->program_sp = sp;
	block->program_tp = pointer;
	block->inside = inside;
	block->top = top;
	if (shown && program_counter(now) == at)
		*now = real;
	else if (shown)
		divert(block, now, &real);
}

/* The call that the shim wants: the sigaction(2) of our C library, but for the way in. */
int kernel_action(int sig, const struct sigaction *act, struct sigaction *old)
{
	struct kernel_action mine = {0}, before;

	if (sig < 1 || sig >= SIGNALS) {
		errno = EINVAL;
		return -1;
	}
	void (*was)(int, siginfo_t *, void *) = to_call[sig];
	if (act) {
		straight[sig] = 0;
		mine.handler = (uint64_t)act->sa_handler;
		mine.flags = (uint64_t)(unsigned)act->sa_flags | RESTORER_FLAG;
		mine.restorer = RESTORER_OURS;
		memcpy(&mine.mask, &act->sa_mask, sizeof(mine.mask));
		if (is_function(mine.handler)) {
			to_call[sig] = act->sa_sigaction;
			mine.handler = (uint64_t)loader_signal_entry;
		}
	}
	long result = raw(SYS_rt_sigaction, sig, act ? (long)&mine : 0, (long)&before, sizeof(mine.mask), 0, 0);
	if (result < 0) {
		to_call[sig] = was;
		errno = (int)-result;
		return -1;
	}
	if (old) {
		memset(old, 0, sizeof(*old));
		old->sa_flags = (int)(before.flags & ~(uint64_t)RESTORER);
		memcpy(&old->sa_mask, &before.mask, sizeof(before.mask));
		if (before.handler == (uint64_t)loader_signal_entry)
			old->sa_sigaction = was;
		else
			old->sa_handler = (void (*)(int))before.handler;
	}
	return 0;
}

/* rt_sigaction(2) of the program. */
long signal_action(int sig, const void *act, void *old, size_t size)
{
	struct sigaction mine = {0}, before;
	struct kernel_action wants, was;

	if (sig < 1 || sig >= SIGNALS || size != sizeof(wants.mask))
		return -EINVAL;
	was = programs[sig];
	if (act) {
		memcpy(&wants, act, sizeof(wants));
		mine.sa_flags = (int)(wants.flags & ~(uint64_t)RESTORER);
		memcpy(&mine.sa_mask, &wants.mask, sizeof(wants.mask));
		mine.sa_handler = (void (*)(int))wants.handler;
		if (is_function(wants.handler)) {
			mine.sa_flags |= SA_SIGINFO; /* three arguments hurt nobody */
			mine.sa_sigaction = loader_handler;
			programs[sig] = wants;
		}
	}
	if (sigaction(sig, act ? &mine : NULL, &before) < 0) {
		programs[sig] = was;
		return -errno;
	}
	if (act && is_function(wants.handler))
		straight[sig] = wants.handler;
	if (old && before.sa_sigaction == loader_handler && (before.sa_flags & SA_SIGINFO)) {
		memcpy(old, &was, sizeof(was));
	} else if (old) {
		struct kernel_action reported = {.handler = (uint64_t)before.sa_handler,
		                                 .flags = (uint64_t)(unsigned)before.sa_flags};
		memcpy(&reported.mask, &before.sa_mask, sizeof(reported.mask));
		memcpy(old, &reported, sizeof(reported));
	}
	return 0;
}
