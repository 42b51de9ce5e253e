#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#define NEED(c) ((c) ? (void)0 : (printf("line %d %s\n", __LINE__, strerror(errno)), fflush(stdout), _exit(1)))
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec / 1e9; }
int main(int argc, char **argv) {
	int n = atoi(argv[1]), unread = atoi(argv[2]); struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)}; socklen_t l = sizeof a; (void)argc; alarm(120);
	int ls = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), way[2], back[2]; NEED(bind(ls, (void *)&a, l) == 0 && listen(ls, 4000) == 0 && getsockname(ls, (void *)&a, &l) == 0 && pipe(way) == 0 && pipe(back) == 0);
	static int f[8000]; char b[8];
	if (fork() == 0) { for (int i = 0; i < n; i++) { f[i] = socket(AF_INET, SOCK_STREAM, 0); NEED(connect(f[i], (void *)&a, sizeof a) == 0); }
		for (int k = 0; k < 30; k++) for (int i = 0; i < n; i++) { NEED(recv(f[i], b, 4, MSG_WAITALL) == 4); NEED(send(f[i], b, 4, 0) == 4); }
		NEED(read(way[0], b, 1) == 1); for (int i = 0; i < n && unread; i++) NEED(send(f[i], "abcdef", 6, 0) == 6); NEED(write(back[1], b, 1) == 1); NEED(read(way[0], b, 1) >= 0); _exit(0); }
	for (int i = 0; i < n; i++) NEED((f[i] = accept(ls, NULL, NULL)) >= 0);
	for (int k = 0; k < 30; k++) for (int i = 0; i < n; i++) { NEED(send(f[i], "abcd", 4, 0) == 4); NEED(recv(f[i], b, 4, MSG_WAITALL) == 4); }
	int in = epoll_create1(0), out = epoll_create1(0); struct epoll_event e[64]; for (int i = 0; i < n; i++) { e->events = EPOLLIN; e->data.u32 = i; NEED(epoll_ctl(in, EPOLL_CTL_ADD, f[i], e) == 0); }
	NEED(write(way[1], "x", 1) == 1 && read(back[0], b, 1) == 1);
	double t = now(); e->events = EPOLLIN; NEED(epoll_ctl(out, EPOLL_CTL_ADD, in, e) == 0); printf("%d members: nested in %.3f s\n", n, now() - t); t = now();
	int left = unread ? n : 0, turns = 0; while (left) { turns++; int k = epoll_wait(out, e, 1, 2000); if (k != 1) { printf("outer silent, %d left\n", left); return 1; } k = epoll_wait(in, e, 64, 0); for (int i = 0; i < k; i++) { NEED(recv(f[e[i].data.u32], b, 8, MSG_DONTWAIT) == 6); left--; } }
	printf("read in %.3f s, %d turns; outer now %d\n", now() - t, turns, epoll_wait(out, e, 1, 0)); fflush(stdout); close(way[1]); return 0; }
