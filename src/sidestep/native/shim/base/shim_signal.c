/*
 * shim_signal.c - lets a spinning or sleeping call answer signals as the kernel's would. A trampoline before each handler
 * counts its runs. So a call knows that a handler ran while it spun, and if it was installed with SA_RESTART. A handler that
 * arrives inside a critical section of the shim is queued again for the end of the section. So handlers may call any hooked
 * function.
 */
#include "shim.h"

#include <sys/mman.h>

static struct handler {
	void (*function)(int);
	int flags;
} handlers[_NSIG];
static sigset_t interrupting; /* siginterrupt(3): signal() leaves SA_RESTART out for these */

static bool synchronous(int sig, const siginfo_t *info)
{
	return info->si_code > 0 &&
	       (sig == SIGSEGV || sig == SIGBUS || sig == SIGFPE || sig == SIGILL || sig == SIGTRAP || sig == SIGSYS);
}

static bool deferral_room(void)
{
	if (likely(self.deferred))
		return true;
	KEEP_ERRNO;
	void *room =
		mmap(NULL, DEFERRED_MAX * sizeof(*self.deferred), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	self.deferred = room == MAP_FAILED ? NULL : room;
	return self.deferred;
}

static void trampoline(int sig, siginfo_t *info, void *context)
{
	struct handler handler = handlers[sig];

	if (self.critical && !synchronous(sig, info) && self.signals_deferred < DEFERRED_MAX && deferral_room()) {
		self.deferred[self.signals_deferred++] = *info;
		return;
	}
	if (handler.flags &
	    (int)SA_RESETHAND) { /* the kernel's handler is unchanged: a deferred signal must still find it */
		struct sigaction none = {.sa_handler = SIG_DFL};
		real.sigaction(sig, &none, NULL);
	}
	/* a fault in a locked section: its handler may never come back, and locks of ours are taken over by number */
	uint32_t critical = self.critical;
	self.critical = 0;
	self.signals++;
	if (!(handler.flags & SA_RESTART))
		self.signals_interrupting++;
	self.sleep = (struct timespec){0, 0};
	if (handler.flags & SA_SIGINFO)
		((void (*)(int, siginfo_t *, void *))(void *)handler.function)(sig, info, context);
	else
		handler.function(sig);
	self.sleep = (struct timespec){0, 0}; /* again: the handler may have slept, and left its own time there */
	self.critical = critical;
}

void signal_interrupts(void)
{
	self.signals++;
	self.signals_interrupting++;
	self.sleep = (struct timespec){0, 0};
}

EXPORT int sigaction(int sig, const struct sigaction *act, struct sigaction *old)
{
	struct sigaction mine, before;

	if (sig < 1 || sig >= _NSIG || !fd_table_len)
		return real.sigaction(sig, act, old);
	struct handler previous = handlers[sig];
	bool ours = act && act->sa_handler != SIG_DFL && act->sa_handler != SIG_IGN;
	if (ours) {
		mine = *act;
		handlers[sig] = (struct handler){act->sa_handler, act->sa_flags};
		mine.sa_sigaction = trampoline;
		mine.sa_flags = (mine.sa_flags | SA_SIGINFO) & ~(int)SA_RESETHAND;
	}
	int result = real.sigaction(sig, ours ? &mine : act, &before);
	if (result < 0) {
		handlers[sig] = previous;
		return result;
	}
	if (before.sa_sigaction == trampoline) {
		before.sa_handler = previous.function;
		if (!(previous.flags & SA_SIGINFO))
			before.sa_flags &= ~SA_SIGINFO;
		before.sa_flags |= previous.flags & (int)SA_RESETHAND;
	}
	if (old)
		*old = before;
	return result;
}

typedef void (*handler_function)(int);

static handler_function install(int sig, handler_function function, int flags)
{
	struct sigaction act = {.sa_handler = function, .sa_flags = flags}, old;

	sigemptyset(&act.sa_mask);
	if (sig > 0 && sig < _NSIG && !(flags & SA_NODEFER))
		sigaddset(&act.sa_mask, sig);
	return sigaction(sig, &act, &old) < 0 ? SIG_ERR : old.sa_handler;
}

EXPORT handler_function signal(int sig, handler_function function)
{
	if (sig < 1 || sig >= _NSIG || function == SIG_ERR) {
		errno = EINVAL;
		return SIG_ERR;
	}
	return install(sig, function, sigismember(&interrupting, sig) == 1 ? 0 : SA_RESTART);
}

ALIAS(bsd_signal, signal);
ALIAS(ssignal, signal);

EXPORT handler_function __sysv_signal(int sig, handler_function function)
{
	return install(sig, function, (int)(SA_RESETHAND | SA_NODEFER));
}

ALIAS(sysv_signal, __sysv_signal);

/* sigset(3p): besides the handler it moves the signal in or out of the mask */
EXPORT handler_function sigset(int sig, handler_function function)
{
	const handler_function hold = (handler_function)2; /* SIG_HOLD, of which glibc tells XSI programs alone */
	sigset_t only, before;
	struct sigaction old;

	sigemptyset(&only);
	if (sigaddset(&only, sig) < 0 || function == SIG_ERR || sigaction(sig, NULL, &old) < 0) {
		errno = EINVAL;
		return SIG_ERR;
	}
	if (function != hold && install(sig, function, 0) == SIG_ERR)
		return SIG_ERR;
	pthread_sigmask(function == hold ? SIG_BLOCK : SIG_UNBLOCK, &only, &before);
	return sigismember(&before, sig) == 1 ? hold : old.sa_handler;
}

EXPORT int siginterrupt(int sig, int on)
{
	struct sigaction act;

	if (sigaction(sig, NULL, &act) < 0)
		return -1;
	if (on) {
		sigaddset(&interrupting, sig);
		act.sa_flags &= ~SA_RESTART;
	} else {
		sigdelset(&interrupting, sig);
		act.sa_flags |= SA_RESTART;
	}
	return sigaction(sig, &act, NULL);
}

void signals_init(void)
{
	sigemptyset(&interrupting);
	/* Handlers installed before us (by another preloaded library) are put behind the trampoline too. */
	for (int sig = 1; sig < _NSIG; sig++) {
		struct sigaction act;
		if (real.sigaction(sig, NULL, &act) == 0 && act.sa_handler != SIG_DFL && act.sa_handler != SIG_IGN)
			sigaction(sig, &act, NULL);
	}
}

ALIAS(__sigaction, sigaction);
