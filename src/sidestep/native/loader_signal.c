/*
 * loader_signal.c - the program's signal handlers stand behind the shim's trampoline, as those of any program with the shim do:
 *
 *     kernel ─► loader_signal_entry ─► loader_signal ─► the shim's trampoline ─► loader_handler ─► the program's handler
 *
 * The first two make the thread pointer ours, the last one makes it the program's again.
 */
#include "loader.h"

#include <errno.h>
#include <string.h>
#include <sys/syscall.h>

#define SIGNALS 65
#define RESTORER 0x04000000 /* SA_RESTORER */

static struct kernel_action programs[SIGNALS];
const struct kernel_action *program_actions = programs;
static void (*_Atomic to_call[SIGNALS])(int, siginfo_t *, void *); /* what the shim has told the kernel to call */

static bool is_function(uint64_t handler)
{
	return handler != (uint64_t)SIG_DFL && handler != (uint64_t)SIG_IGN;
}

__attribute__((used, visibility("hidden"))) void loader_signal(int sig, siginfo_t *info, void *context)
{
	to_call[sig](sig, info, context);
}

/* As the shim wants it: the sigaction(2) of our C library, but for the way in. */
int kernel_action(int sig, const struct sigaction *act, struct sigaction *old)
{
	struct kernel_action mine = {0}, before;

	if (sig < 1 || sig >= SIGNALS) {
		errno = EINVAL;
		return -1;
	}
	void (*was)(int, siginfo_t *, void *) = to_call[sig];
	if (act) {
		mine.handler = (uint64_t)act->sa_handler;
		mine.flags = (uint64_t)(unsigned)act->sa_flags | RESTORER;
		mine.restorer = (uint64_t)loader_restorer;
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
	if (old && before.sa_sigaction == loader_handler && (before.sa_flags & SA_SIGINFO)) {
		memcpy(old, &was, sizeof(was));
	} else if (old) {
		struct kernel_action told = {.handler = (uint64_t)before.sa_handler, .flags = (uint64_t)(unsigned)before.sa_flags};
		memcpy(&told.mask, &before.sa_mask, sizeof(told.mask));
		memcpy(old, &told, sizeof(told));
	}
	return 0;
}
