#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#define NEED(c) ((c) ? (void)0 : (printf("line %d %s\n", __LINE__, strerror(errno)), fflush(stdout), _exit(1)))
static struct sockaddr_in a = {.sin_family = AF_INET}; static int ls;
static pid_t client(int *way, char id) { int p[2]; NEED(pipe(p) == 0); pid_t c = fork(); if (!c) { char b[4]; close(p[1]); int s = socket(AF_INET, SOCK_STREAM, 0); NEED(connect(s, (void *)&a, sizeof a) == 0); NEED(send(s, &id, 1, 0) == 1);
	for (int i = 0; i < 300; i++) { NEED(recv(s, b, 4, MSG_WAITALL) == 4); NEED(send(s, b, 4, 0) == 4); }
	while (read(p[0], b, 1) == 1) NEED(send(s, "abcd", 4, 0) == 4); _exit(0); } close(p[0]); *way = p[1]; return c; }
int main(int argc, char **argv) {
	socklen_t l = sizeof a; char b[4]; (void)argc; a.sin_addr.s_addr = htonl(INADDR_LOOPBACK); alarm(30);
	ls = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0); NEED(bind(ls, (void *)&a, l) == 0 && listen(ls, 5) == 0 && getsockname(ls, (void *)&a, &l) == 0);
	int wa, wb; client(&wa, 65); client(&wb, 66); int A = accept(ls, 0, 0), B = accept(ls, 0, 0); char ia, ib; NEED(recv(A, &ia, 1, 0) == 1 && recv(B, &ib, 1, 0) == 1); if (ia == 66) { int t = A; A = B; B = t; } int S = epoll_create1(0); struct epoll_event e = {.events = EPOLLIN, .data.fd = A}; NEED(epoll_ctl(S, EPOLL_CTL_ADD, A, &e) == 0); e.data.fd = B; NEED(epoll_ctl(S, EPOLL_CTL_ADD, B, &e) == 0);
	for (int k = 0; k < 300; k++) { int f[2] = {A, B}; for (int i = 0; i < 2; i++) { NEED(send(f[i], "abcd", 4, 0) == 4); NEED(epoll_wait(S, &e, 1, 5000) == 1 && e.data.fd == f[i]); NEED(recv(f[i], b, 4, MSG_WAITALL) == 4); } if (k < 50) usleep(1000); }
	pid_t c = fork(); if (!c) { if (argv[1][0] == 'n') { close(B); int O = epoll_create1(0); NEED(epoll_ctl(O, EPOLL_CTL_ADD, S, &e) == 0); } else { close(B); } _exit(0); } waitpid(c, NULL, 0);
	pid_t w = fork(); if (!w) { usleep(300000); NEED(write(wb, "x", 1) == 1); _exit(0); }
	int n = epoll_wait(S, &e, 1, 3000); printf("B after the child: %d\n", n); waitpid(w, NULL, 0); close(wa); close(wb);
	return 0; }
