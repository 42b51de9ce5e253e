/*
 * All registers that the kernel keeps over a system call stay what they are: those of the C ABI, flags aside, all vector and mask
 * registers that this machine has, and what may be kept below the stack pointer; while signals come at 1 kHz. PORT has an echo server.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#define TIMES 20000

#define NEED(condition) ((condition) ? (void)0 : failed(__LINE__, #condition))

static void failed(int line, const char *what)
{
	fprintf(stderr, "line %d: %s: %s\n", line, what, strerror(errno));
	_exit(1);
}

#if defined(__x86_64__)
#include "registers_x86_64.h"
#elif defined(__aarch64__)
#include "registers_aarch64.h"
#endif

static volatile sig_atomic_t signals;

/* Makes use of registers itself. */
static void handler(int sig)
{
	char text[256];

	signals++;
	memset(text, sig, sizeof(text));
	NEED(text[signals % 256] == sig);
}

static long checked(long number, long a, long b, long c, uint64_t seed)
{
	static struct state from, to;
	uint8_t *bytes = (uint8_t *)&from;

	for (size_t i = 0; i < sizeof(from); i++)
		bytes[i] = (uint8_t)((seed = seed * 6364136223846793005u + 1442695040888963407u) >> 56);
	state_prepare(&from, a, b, c);
	return call_kept(number, &from, &to);
}

int main(int argc, char **argv)
{
	static char stack[64 << 10];
	struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	struct itimerval often = {{0, 1000}, {0, 1000}};
	struct sigaction act = {.sa_handler = handler, .sa_flags = SA_RESTART | HANDLED_ON};
	const stack_t other = {.ss_sp = stack, .ss_size = sizeof(stack)};
	uint64_t sent, heard;
	int fd = socket(AF_INET, SOCK_STREAM, 0);

	NEED(argc == 2);
	to.sin_port = htons((uint16_t)atoi(argv[1]));
	NEED(connect(fd, (struct sockaddr *)&to, sizeof(to)) == 0);
	NEED(sigaltstack(&other, NULL) == 0);
	NEED(sigaction(SIGPROF, &act, NULL) == 0 && setitimer(ITIMER_PROF, &often, NULL) == 0);
	for (uint64_t i = 0; i < TIMES; i++) {
		sent = i * 0x9e3779b97f4a7c15u;
		NEED(checked(SYS_write, fd, (long)&sent, sizeof(sent), i) == sizeof(sent));
		NEED(checked(SYS_getppid, fd, 1, 2, ~i) > 0); /* which nobody takes */
		NEED(checked(SYS_recvfrom, fd, (long)&heard, sizeof(heard), i + 1) == sizeof(heard));
		NEED(heard == sent);
	}
	NEED(signals > 10);
	return 0;
}
