#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
static unsigned long seed; static unsigned R(unsigned n) { seed = seed * 6364136223846793005ul + 1442695040888963407ul; return (seed >> 33) % n; }
static int f[2][2]; /* connection, end */ static unsigned sent[2][2], got[2][2]; static char buf[100000];
static int in[2], mid, out, listener; static struct sockaddr_in a = {.sin_family = AF_INET};
static void settle(void) { for (int t = 0; t < 2000; t++) { int ok = 1; for (int c = 0; c < 2; c++) for (int e = 0; e < 2; e++) { int q = 0; if (f[c][e] >= 0 && f[c][!e] >= 0) { ioctl(f[c][e], FIONREAD, &q); ok &= (unsigned)q == sent[c][!e] - got[c][e]; } } if (ok) return; usleep(100); } printf("not settled\n"); }
static void wait_one(const char *n, int s) { struct epoll_event e[8]; int k = epoll_wait(s, e, 8, 3); printf("%s %d", n, k); unsigned m[16] = {0}; for (int i = 0; i < k; i++) m[e[i].data.u32 & 15] |= e[i].events; for (int i = 0; i < 16; i++) if (m[i]) printf(" %d/%x", i, m[i]); printf("\n"); }
int main(int argc, char **argv) {
	seed = atoi(argv[1]) * 7919 + 13; int steps = argc > 2 ? atoi(argv[2]) : 40; socklen_t l = sizeof a; a.sin_addr.s_addr = htonl(INADDR_LOOPBACK); alarm(40); setvbuf(stdout, NULL, _IOLBF, 0); signal(SIGIO, SIG_IGN); signal(SIGPIPE, SIG_IGN);
	listener = socket(AF_INET, SOCK_STREAM, 0); bind(listener, (void *)&a, l); listen(listener, 5); getsockname(listener, (void *)&a, &l); int one = 1;
	for (int c = 0; c < 2; c++) { f[c][0] = socket(AF_INET, SOCK_STREAM, 0); connect(f[c][0], (void *)&a, l); f[c][1] = accept(listener, 0, 0); for (int e = 0; e < 2; e++) { setsockopt(f[c][e], IPPROTO_TCP, TCP_NODELAY, &one, 4); }
		for (int i = 0; i < 60; i++) for (int e = 0; e < 2; e++) { send(f[c][e], "abcd", 4, 0); recv(f[c][!e], buf, 4, MSG_WAITALL); if (i < 40) usleep(150); } }
	in[0] = epoll_create1(0); in[1] = epoll_create1(0); mid = epoll_create1(0); out = epoll_create1(0); int nested = 0;
	uint32_t evs[] = {EPOLLIN, EPOLLIN, EPOLLIN | EPOLLRDHUP, EPOLLOUT, EPOLLIN | EPOLLEXCLUSIVE, EPOLLIN | EPOLLOUT, EPOLLIN, EPOLLPRI};
	for (int i = 0; i < steps; i++) {
		int op = R(100), c = R(2), e = R(2), s = R(2); if (f[c][e] < 0) continue; printf("%d ", i); errno = 0;
		if (op < 20) { int n = R(3) ? 1 + R(40) : 1 + R(20000); int r = f[c][!e] < 0 ? -2 : send(f[c][e], buf, n, MSG_DONTWAIT | MSG_NOSIGNAL); if (r > 0) sent[c][e] += r; printf("send %d%d %d\n", c, e, r); settle(); }
		else if (op < 42) { int n = 1 + R(R(2) ? 30 : 30000); int r = recv(f[c][e], buf, n, MSG_DONTWAIT | (R(5) ? 0 : MSG_PEEK)); (void)r; if (r > 0 && !0) { int q = 0; ioctl(f[c][e], FIONREAD, &q); if ((unsigned)q != sent[c][!e] - got[c][e]) got[c][e] = sent[c][!e] - q; } printf("recv %d%d %d of %d %s\n", c, e, r, n, r < 0 ? strerror(errno) : ""); }
		else if (op < 52) { struct epoll_event v = {.events = evs[R(8)], .data.u32 = 1 + c * 2 + e + 4 * s}; int how = R(4); int o = how < 2 ? EPOLL_CTL_ADD : how == 2 ? EPOLL_CTL_MOD : EPOLL_CTL_DEL; int r = epoll_ctl(in[s], o, f[c][e], &v); printf("ctl in%d op %d %d%d %x = %d %s\n", s, o, c, e, v.events, r, r ? strerror(errno) : ""); }
		else if (op < 58) { struct epoll_event v = {.events = EPOLLIN, .data.u32 = 10 + s}; int r = epoll_ctl(mid, R(5) ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, in[s], &v); printf("nest %d %d\n", s, r); }
		else if (op < 61) { struct epoll_event v = {.events = EPOLLIN, .data.u32 = 12}; int r = epoll_ctl(out, EPOLL_CTL_ADD, mid, &v); printf("nest mid %d\n", r); nested = 1; }
		else if (op < 68) { printf("in "); wait_one(s ? "in1" : "in0", in[s]); }
		else if (op < 84) { wait_one("mid", mid); printf("  "); wait_one("out", out); }
		else if (op < 87) { struct pollfd p[4] = {{in[0], POLLIN, 0}, {in[1], POLLIN, 0}, {mid, POLLIN, 0}, {out, POLLIN, 0}}; poll(p, 4, 0); printf("poll\n"); }
		else if (op < 88) { int fl = fcntl(f[c][e], F_GETFL); printf("async %d\n", fcntl(f[c][e], F_SETFL, fl ^ O_ASYNC)); }
		else if (op < 89) { int low = R(2) ? 1 : 1; printf("lowat %d\n", setsockopt(f[c][e], SOL_SOCKET, SO_RCVLOWAT, &low, 4)); }
		else if (op < 92) { int n = dup(in[s]); close(in[s]); in[s] = n; printf("dup set\n"); }
		else if (op < 94) { pid_t p = fork(); if (!p) { int q = R(3); if (q == 0) { recv(f[c][e], buf, 5, MSG_DONTWAIT); } if (q == 1) { struct epoll_event v; epoll_wait(mid, &v, 1, 0); } _exit(0); } waitpid(p, 0, 0); unsigned q = 0; ioctl(f[c][e], FIONREAD, &q); got[c][e] = sent[c][!e] - q; R(3); printf("fork %u\n", q); }
		else if (op < 95) { printf("shut %d%d %d\n", c, e, shutdown(f[c][e], SHUT_WR)); usleep(3000); }
		else if (op < 97 && f[c][!e] >= 0) { close(f[c][e]); f[c][e] = -1; printf("close %d%d\n", c, e); usleep(3000); }
		else { int q = -1; ioctl(f[c][e], FIONREAD, &q); printf("unread %d\n", q); }
		usleep(300);
	}
	for (int s = 0; s < 2; s++) { wait_one("end in", in[s]); } wait_one("end mid", mid); wait_one("end out", out); (void)nested;
	return 0; }
