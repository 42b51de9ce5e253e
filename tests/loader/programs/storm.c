/*
 * Threads come and go, children are forked and executed, and signals come at 1 kHz each, on other stacks and not, while every
 * thread sends patterns and compares what comes back. PORT has an echo server; for SECONDS. Prints the exchanges. The main
 * thread's connection lasts all the time, so it is promoted however late the provider comes to it.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define WORKERS 4
#define LARGEST 20000
#define EXCHANGES 40 /* of a thread */
#define CHECK(true_) \
	do { \
		if (!(true_)) { \
			fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #true_, strerror(errno)); \
			_exit(1); \
		} \
	} while (0)

extern char **environ;
static _Atomic pid_t workers[WORKERS];
static _Atomic unsigned long exchanges, signals;
static _Atomic int over;
static uint16_t port;

static void on_signal(int sig, siginfo_t *info, void *context)
{
	int before = errno;

	(void)sig, (void)info, (void)context;
	atomic_fetch_add(&signals, 1);
	raise(SIGWINCH); /* a call of its own, and a handler in a handler */
	errno = before;
}

static void on_inner(int sig)
{
	(void)sig;
}

static void all(ssize_t (*call)(int, void *, size_t), int fd, void *at, size_t length)
{
	for (size_t done = 0; done < length;) {
		ssize_t n = call(fd, (uint8_t *)at + done, length - done);
		CHECK(n > 0 || (n < 0 && errno == EINTR));
		done += n > 0 ? (size_t)n : 0;
	}
}

static ssize_t send_some(int fd, void *at, size_t length)
{
	return send(fd, at, length, MSG_NOSIGNAL);
}

static int connected(void)
{
	struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	CHECK(fd >= 0);
	CHECK(connect(fd, (struct sockaddr *)&to, sizeof(to)) == 0);
	return fd;
}

static void exchange(int fd, unsigned *seed, size_t length)
{
	uint8_t sent[LARGEST], got[LARGEST];

	for (size_t at = 0; at < length; at++)
		sent[at] = (uint8_t)rand_r(seed);
	all(send_some, fd, sent, length);
	all(read, fd, got, length);
	CHECK(memcmp(sent, got, length) == 0);
	atomic_fetch_add(&exchanges, 1);
}

static void *work(void *argument)
{
	_Atomic pid_t *self = argument;
	uint8_t *stack = malloc(65536);
	unsigned seed = (unsigned)syscall(SYS_gettid);
	const int on_other = seed % 2;

	if (on_other)
		CHECK(sigaltstack(&(stack_t){.ss_sp = stack, .ss_size = 65536}, NULL) == 0);
	*self = (pid_t)seed;
	int fd = connected();
	for (int i = 0; i < EXCHANGES; i++)
		exchange(fd, &seed, 1 + (size_t)rand_r(&seed) % (i % 4 ? 200 : LARGEST));
	*self = 0;
	close(fd);
	if (on_other)
		CHECK(sigaltstack(&(stack_t){.ss_flags = SS_DISABLE}, NULL) == 0);
	free(stack);
	return NULL;
}

static void *pester(void *nothing)
{
	for (unsigned i = 0; !over; i++) {
		pid_t worker = workers[i % WORKERS];
		if (worker)
			syscall(SYS_tgkill, getpid(), worker, SIGURG);
		nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL); /* the storm's clock, 1 kHz: nothing is waited for */
	}
	return nothing;
}

static void have_child(unsigned number)
{
	char *const argv[] = {"/bin/true", NULL};
	pid_t child;
	int status;

	if (number % 2) {
		CHECK(posix_spawn(&child, argv[0], NULL, NULL, argv, environ) == 0);
	} else {
		child = fork();
		CHECK(child >= 0);
		if (child == 0)
			_exit(0);
	}
	while (waitpid(child, &status, 0) < 0)
		CHECK(errno == EINTR);
	CHECK(status == 0);
}

int main(int argc, char **argv)
{
	pthread_t threads[WORKERS], pesterer;
	struct sigaction inner = {.sa_handler = on_inner}, action = {.sa_sigaction = on_signal};
	struct itimerval each = {{0, 1000}, {0, 1000}};

	CHECK(argc == 3);
	port = (uint16_t)atoi(argv[1]);
	const time_t end = time(NULL) + atoi(argv[2]);
	const int steady = connected();
	unsigned seed = (unsigned)getpid();
	action.sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK;
	inner.sa_flags = SA_RESTART;
	CHECK(sigaction(SIGWINCH, &inner, NULL) == 0);
	CHECK(sigaction(SIGURG, &action, NULL) == 0);
	CHECK(sigaction(SIGALRM, &action, NULL) == 0);
	CHECK(setitimer(ITIMER_REAL, &each, NULL) == 0);
	CHECK(pthread_create(&pesterer, NULL, pester, NULL) == 0);
	for (unsigned round = 0; time(NULL) < end; round++) {
		for (int i = 0; i < WORKERS; i++)
			CHECK(pthread_create(&threads[i], NULL, work, (void *)&workers[i]) == 0);
		have_child(round);
		exchange(steady, &seed, 1 + round % LARGEST);
		for (int i = 0; i < WORKERS; i++)
			CHECK(pthread_join(threads[i], NULL) == 0);
	}
	over = 1;
	CHECK(pthread_join(pesterer, NULL) == 0);
	printf("%lu exchanges, %lu signals\n", exchanges, signals);
	return exchanges < 100 || signals < 100;
}
