/* What a handler finds above itself: the frame by which debuggers and unwinders go on to what the signal came into. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#if defined(__x86_64__)
#define PROGRAM_COUNTER(context) ((context)->uc_mcontext.gregs[REG_RIP])
#define FRAME_BEGIN(info, context) ((const void *)(context)) /* what is right above what a handler returns to */
#define SIGRETURN "\x48\xc7\xc0\x0f\0\0\0\x0f\x05"
#define IS_BEHIND_CALL(at) (memcmp((at) - 2, "\x0f\x05", 2) == 0)
#elif defined(__aarch64__)
#define PROGRAM_COUNTER(context) ((context)->uc_mcontext.pc)
#define FRAME_BEGIN(info, context) ((const void *)(info))
#define SIGRETURN "\x68\x11\x80\xd2\x01\0\0\xd4"
#define IS_BEHIND_CALL(at) ((at)[-1] == 0xd4 || (at)[-1] >> 2 == 5) /* svc, or the b that stands in its place */
#endif

static volatile int *nowhere;
static char other[64 << 10];
static volatile int inner;

__attribute__((noinline)) static void tell(const char *name, int found)
{
	char line[64];

	if (write(1, line, (size_t)snprintf(line, sizeof(line), "%s %d\n", name, found)) < 0)
		_exit(1);
}

__attribute__((noinline)) static void look(int sig, const char *restorer, void *after, const siginfo_t *info,
                                           void *context)
{
	const unsigned char *at = (const unsigned char *)PROGRAM_COUNTER((ucontext_t *)context);
	extern const unsigned char __executable_start[], etext[];
	const char local = 0;

	tell("signal", sig);
	tell("sent by", info->si_code);
	tell("returns by sigreturn", memcmp(restorer, SIGRETURN, sizeof(SIGRETURN) - 1) == 0);
	tell("context above", after == FRAME_BEGIN(info, context));
	tell("on the other stack", &local >= other && &local < other + sizeof(other));
	tell("in the program", at >= __executable_start && at < etext);
	tell("behind a call", IS_BEHIND_CALL(at));
}

/* Both are of this function's frame, whatever it is compiled to. */
__attribute__((noinline)) static void handler(int sig, siginfo_t *info, void *context)
{
	look(sig, __builtin_return_address(0), __builtin_dwarf_cfa(), info, context);
	if (sig == SIGUSR1 && !inner++)
		raise(SIGUSR2);
	if (sig == SIGSEGV)
		_exit(5);
}

int main(void)
{
	static const int signals[] = {SIGUSR1, SIGUSR2, SIGSEGV, SIGTERM};
	const stack_t stack = {.ss_sp = other, .ss_size = sizeof(other)};

	sigaltstack(&stack, NULL);
	for (size_t i = 0; i < sizeof(signals) / sizeof(*signals); i++) {
		struct sigaction act = {.sa_sigaction = handler,
		                        .sa_flags = SA_SIGINFO | (signals[i] == SIGUSR2 ? SA_ONSTACK : 0)};
		if (signals[i] == SIGTERM)
			act.sa_flags |= (int)SA_RESETHAND;
		sigaction(signals[i], &act, NULL);
	}
	raise(SIGUSR1);
	raise(SIGUSR2);
	struct sigaction now;
	sigaction(SIGUSR1, NULL, &now);
	tell("kept", now.sa_sigaction == handler);
	signal(SIGUSR1, SIG_IGN);
	raise(SIGUSR1);
	raise(SIGTERM);
	sigaction(SIGTERM, NULL, &now);
	tell("gone", now.sa_handler == SIG_DFL);
	*nowhere = 1;
	return 0;
}
