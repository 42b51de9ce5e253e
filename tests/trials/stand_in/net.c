#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
#define NEED(c) ((c) ? (void)0 : (printf("line %d %s\n", __LINE__, strerror(errno)), fflush(stdout), _exit(1)))
static char big[1 << 20];
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec / 1e9; }
int main(int argc, char **argv) { /* net serve PORT MODE SIZE | net call ADDR PORT SIZE */
	char b[4]; struct sockaddr_in a = {.sin_family = AF_INET}; int one = 1; NEED(argc >= 5); int size = atoi(argv[4]); alarm(60); signal(SIGIO, SIG_IGN); setvbuf(stdout, NULL, _IOLBF, 0);
	if (*argv[1] == 'c') {
		a.sin_port = htons(atoi(argv[3])); inet_pton(AF_INET, argv[2], &a.sin_addr); int s; do { s = socket(AF_INET, SOCK_STREAM, 0); if (connect(s, (void *)&a, sizeof a) == 0) break; close(s); usleep(100000); } while (1);
		for (int i = 0; i < 2000; i++) { NEED(send(s, "abcd", 4, 0) == 4); NEED(recv(s, b, 4, MSG_WAITALL) == 4); usleep(1000); }
		for (int d = 0; d < size;) { ssize_t n = send(s, big, size - d < (int)sizeof big ? size - d : (int)sizeof big, 0); NEED(n > 0); d += n; }
		fprintf(stderr, "sent all\n"); for (;;) pause(); /* no call any more */
	}
	int l = socket(AF_INET, SOCK_STREAM, 0); setsockopt(l, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one); a.sin_port = htons(atoi(argv[2])); NEED(bind(l, (void *)&a, sizeof a) == 0 && listen(l, 5) == 0);
	int s = accept(l, NULL, NULL); for (int i = 0; i < 2000; i++) { NEED(recv(s, b, 4, MSG_WAITALL) == 4); NEED(send(s, b, 4, 0) == 4); }
	int q = 0, got = 0; double t0 = now(), worst = 0;
	while (q == 0) NEED(ioctl(s, FIONREAD, &q) == 0);
	usleep(atoi(argv[5]) * 1000);
	int in = epoll_create1(0), out = epoll_create1(0); struct epoll_event e = {.events = EPOLLIN};
	t0 = now();
	if (!strcmp(argv[3], "async")) NEED(fcntl(s, F_SETFL, O_ASYNC) == 0);
	if (!strcmp(argv[3], "nested")) { NEED(epoll_ctl(in, EPOLL_CTL_ADD, s, &e) == 0 && epoll_ctl(out, EPOLL_CTL_ADD, in, &e) == 0); }
	printf("%s took %.3f s\n", argv[3], now() - t0);
	while (got < size) {
		int n; if (!strcmp(argv[3], "nested")) n = epoll_wait(out, &e, 1, 8000); else { struct pollfd p = {s, POLLIN, 0}; n = poll(&p, 1, 8000); }
		if (n != 1) { printf("silent at %d of %d\n", got, size); return 1; }
		t0 = now(); ssize_t r = recv(s, big, sizeof big, MSG_DONTWAIT); double d = now() - t0; if (d > worst) worst = d;
		if (r < 0 && errno == EAGAIN) continue; if (r <= 0) { printf("recv %zd %s at %d\n", r, strerror(errno), got); return 1; } got += r; }
	printf("whole, %d bytes, longest recv %.3f s\n", got, worst); return 0;
}
