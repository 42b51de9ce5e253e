/*
 * A server whose epoll set is made and asked by system calls of its own code, as Rust's rustix does it, and a client that gets
 * everything back. The server's sockets are the C library's. raw_epoll: prints "whole".
 */
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { ROUNDS = 500, SIZE = 700 };

#define NEED(condition) ((condition) ? (void)0 : need_failed(__LINE__, #condition))

static void need_failed(int line, const char *what)
{
	printf("line %d: %s (%s)\n", line, what, strerror(errno));
	fflush(stdout);
	_exit(1);
}

static long own_call(long number, long a, long b, long c, long d)
{
#if defined(__x86_64__)
	register long fourth __asm__("r10") = d;
	register long fifth __asm__("r8") = 0, sixth __asm__("r9") = 0;
	__asm__ volatile("syscall"
	                 : "+a"(number)
	                 : "D"(a), "S"(b), "d"(c), "r"(fourth), "r"(fifth), "r"(sixth)
	                 : "rcx", "r11", "memory");
	return number;
#else
	register long call __asm__("x8") = number;
	register long first __asm__("x0") = a, second __asm__("x1") = b, third __asm__("x2") = c, fourth __asm__("x3") = d;
	register long fifth __asm__("x4") = 0, sixth __asm__("x5") = 0;
	__asm__ volatile("svc 0"
	                 : "+r"(first)
	                 : "r"(call), "r"(second), "r"(third), "r"(fourth), "r"(fifth), "r"(sixth)
	                 : "memory");
	return first;
#endif
}

static void serve(int listener)
{
	struct epoll_event event = {.events = EPOLLIN};
	char bytes[SIZE];
	int fd = accept(listener, NULL, NULL);
	long set = own_call(SYS_epoll_create1, 0, 0, 0, 0);

	NEED(fd >= 0 && set >= 0 && own_call(SYS_epoll_ctl, set, EPOLL_CTL_ADD, fd, (long)&event) == 0);
	for (;;) {
		NEED(own_call(SYS_epoll_pwait, set, (long)&event, 1, -1) == 1);
		ssize_t got = recv(fd, bytes, sizeof(bytes), 0);
		if (got == 0)
			return;
		NEED(got > 0 && send(fd, bytes, (size_t)got, 0) == got);
	}
}

int main(void)
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof(address);
	int listener = socket(AF_INET, SOCK_STREAM, 0), status;
	char sent[SIZE], back[SIZE];

	NEED(bind(listener, (struct sockaddr *)&address, len) == 0 && listen(listener, 1) == 0);
	NEED(getsockname(listener, (struct sockaddr *)&address, &len) == 0);
	pid_t server = fork();
	if (server == 0) {
		alarm(60);
		serve(listener);
		_exit(0);
	}
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	NEED(connect(fd, (struct sockaddr *)&address, len) == 0);
	for (int i = 0; i < ROUNDS; i++) {
		memset(sent, i, sizeof(sent));
		NEED(send(fd, sent, sizeof(sent), 0) == SIZE);
		NEED(recv(fd, back, sizeof(back), MSG_WAITALL) == SIZE && memcmp(sent, back, SIZE) == 0);
	}
	NEED(close(fd) == 0);
	NEED(waitpid(server, &status, 0) == server && status == 0);
	printf("whole\n");
	return 0;
}
