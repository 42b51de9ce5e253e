/*
 * Leaves calls by siglongjmp(3) from handlers, very often, in several threads: PLACE is where the handlers run, "stack" or "other"
 * (sigaltstack(2)). In between each thread talks over its connection, and checks what comes back.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define THREADS 3
#define WARM 5000 /* so that it is promoted by then: who leaves a call of TCP's keeps his connection there */
#define TIMES 3000

static __thread sigjmp_buf back;
static __thread int connection;
static bool other_stack;

#define NEED(condition) ((condition) ? (void)0 : failed(__LINE__, #condition))

static void failed(int line, const char *what)
{
	fprintf(stderr, "line %d: %s: %s\n", line, what, strerror(errno));
	_exit(1);
}

static void handler(int sig, siginfo_t *info, void *context)
{
	char none;

	(void)sig, (void)context;
	NEED(recv(connection, &none, 1, MSG_DONTWAIT) < 0 &&
	     errno == EAGAIN); /* a call of its own, below the one that it leaves */
	siglongjmp(back, info->si_value.sival_int);
}

static void echo(int fd, uint32_t number)
{
	uint32_t pattern[64], heard[64];

	for (int i = 0; i < 64; i++)
		pattern[i] = number * 2654435761u + (uint32_t)i;
	NEED(write(fd, pattern, sizeof(pattern)) == sizeof(pattern));
	for (size_t at = 0; at < sizeof(heard);) {
		ssize_t n = read(fd, (char *)heard + at, sizeof(heard) - at);
		NEED(n > 0);
		at += (size_t)n;
	}
	NEED(memcmp(pattern, heard, sizeof(heard)) == 0);
}

static void *client(void *port)
{
	struct sockaddr_in to = {
		.sin_family = AF_INET, .sin_port = htons((uint16_t)(uintptr_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	static __thread char stack[1 << 16];
	stack_t other = {.ss_sp = stack, .ss_size = sizeof(stack)};
	struct sigevent event = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGUSR1, .sigev_value.sival_int = 7};
	struct itimerspec soon = {.it_value.tv_nsec = 100000};
	timer_t timer;
	char byte;

	if (other_stack)
		NEED(sigaltstack(&other, NULL) == 0);
	connection = socket(AF_INET, SOCK_STREAM, 0);
	NEED(connection >= 0 && connect(connection, (struct sockaddr *)&to, sizeof(to)) == 0);
#ifdef sigev_notify_thread_id
	event.sigev_notify_thread_id = (int)syscall(SYS_gettid);
#else
	event._sigev_un._tid = (int)syscall(SYS_gettid);
#endif
	NEED(timer_create(CLOCK_MONOTONIC, &event, &timer) == 0);
	for (uint32_t i = 0; i < WARM; i++)
		echo(connection, i);
	for (volatile uint32_t i = 0; i < TIMES; i++) {
		echo(connection, i);
		int left = sigsetjmp(back, 1);
		if (!left) {
			NEED(timer_settime(timer, 0, &soon, NULL) == 0);
			NEED(read(connection, &byte, 1) == 12345); /* waits until it is left */
		}
		NEED(left == 7);
	}
	close(connection);
	return NULL;
}

static void *serve(void *argument)
{
	int fd = (int)(intptr_t)argument;
	char data[512];
	ssize_t n;

	while ((n = read(fd, data, sizeof(data))) > 0)
		NEED(write(fd, data, (size_t)n) == n);
	close(fd);
	return NULL;
}

int main(int argc, char **argv)
{
	struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t size = sizeof(at);
	pthread_t clients[THREADS], server;
	int listener = socket(AF_INET, SOCK_STREAM, 0);
	struct sigaction act = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO};

	NEED(argc == 2);
	other_stack = strcmp(argv[1], "other") == 0;
	if (other_stack)
		act.sa_flags |= SA_ONSTACK;
	NEED(sigaction(SIGUSR1, &act, NULL) == 0);
	NEED(bind(listener, (struct sockaddr *)&at, sizeof(at)) == 0 && listen(listener, THREADS) == 0);
	NEED(getsockname(listener, (struct sockaddr *)&at, &size) == 0);
	for (int i = 0; i < THREADS; i++) {
		NEED(pthread_create(&clients[i], NULL, client, (void *)(uintptr_t)ntohs(at.sin_port)) == 0);
		int fd = accept(listener, NULL, NULL);
		NEED(fd >= 0 && pthread_create(&server, NULL, serve, (void *)(intptr_t)fd) == 0);
	}
	for (int i = 0; i < THREADS; i++)
		NEED(pthread_join(clients[i], NULL) == 0);
	puts("done");
	return 0;
}
