#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#define NEED(c) ((c) ? (void)0 : fail(__LINE__, #c))
static void fail(int l, const char *w) { printf("line %d: %s (%s)\n", l, w, strerror(errno)); fflush(stdout); _exit(1); }
static int K = 400;
static void all(int f, size_t n) { char b[4096]; size_t d = 0; while (d < n) { ssize_t r = recv(f, b, n - d, 0); NEED(r > 0); d += r; } }
static void peer_run(struct sockaddr_in *a, const char *mode, int rounds) {
	for (int i = 0; i < rounds; i++) {
		int s = socket(AF_INET, SOCK_STREAM, 0), one = 1; NEED(connect(s, (void *)a, sizeof *a) == 0); setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
		for (int k = 0; k < 30; k++) { NEED(send(s, "abcd", 4, 0) == 4); all(s, 4); if (k > 2 && k < 20) usleep(200); }
		char go;
		if (*mode == 'A') { all(s, 1); NEED(send(s, "abcdef", 6, 0) == 6); }
		else for (int k = 0; k < K; k++) { unsigned v = k; NEED(send(s, &v, 4, 0) == 4); if (k % 16 == 0) for (volatile int z = 0; z < 300; z++); }
		/* no further socket call until told by a pipe-like: just sleep in read of stdin-less: use poll on nothing */
		(void)go; struct pollfd none = {.fd = -1}; 
		int fd2 = s; char c; (void)none;
		/* wait unhooked: pipe */
		extern int way[2]; NEED(read(way[0], &c, 1) == 1); close(fd2);
	}
	_exit(0);
}
int way[2];
static atomic_int start; static int inner, outer, fd; static uint32_t ev_in = EPOLLIN;
static void *adder(void *x) { (void)x; atomic_fetch_add(&start, 1); while (atomic_load(&start) < 2); struct epoll_event e = {.events = ev_in}; NEED(epoll_ctl(inner, EPOLL_CTL_ADD, fd, &e) == 0); return NULL; }
static atomic_int stalled; static unsigned total_got;
static void *reader(void *x) { (void)x; char b[4]; for (int k = 0; k < K; k++) { NEED(recv(fd, b, 4, MSG_WAITALL) == 4); unsigned v; memcpy(&v, b, 4); NEED(v == (unsigned)k); } return NULL; }
static void *worker(void *x) { char kind = *(char *)x; char b[4]; size_t part = 0; total_got = 0; struct epoll_event e;
	while (total_got < (unsigned)K) { int n = epoll_wait(inner, &e, 1, 2000); if (n <= 0) { int q; ioctl(fd, FIONREAD, &q); printf("worker silent at %u of %d, %d there\n", total_got, K, q); stalled++; return NULL; }
		for (;;) { ssize_t r = recv(fd, b + part, 4 - part, MSG_DONTWAIT); if (r < 0) { NEED(errno == EAGAIN); break; } part += r; if (part == 4) { unsigned v; memcpy(&v, b, 4); NEED(v == total_got); total_got++; part = 0; if (total_got == (unsigned)K || kind == 'l') break; } }
		if (kind == 'o') { struct epoll_event m = {.events = EPOLLIN | EPOLLET | EPOLLONESHOT}; NEED(epoll_ctl(inner, EPOLL_CTL_MOD, fd, &m) == 0); } }
	return NULL; }
int main(int argc, char **argv) {
	const char *mode = argv[1]; int rounds = atoi(argv[2]); NEED(argc >= 3); if (argc > 3) K = atoi(argv[3]);
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)}; socklen_t l = sizeof a;
	int ls = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), miss = 0, spurious = 0, early = 0;
	NEED(pipe(way) == 0 && bind(ls, (void *)&a, l) == 0 && listen(ls, 5) == 0 && getsockname(ls, (void *)&a, &l) == 0);
	pid_t p = fork(); if (!p) peer_run(&a, mode, rounds);
	sigset_t ss; sigemptyset(&ss); sigaddset(&ss, SIGIO); sigprocmask(SIG_BLOCK, &ss, NULL);
	for (int i = 0; i < rounds; i++) {
		fd = accept(ls, NULL, NULL); NEED(fd >= 0); int one = 1; setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
		for (int k = 0; k < 30; k++) { all(fd, 4); NEED(send(fd, "abcd", 4, 0) == 4); }
		inner = epoll_create1(0); outer = epoll_create1(0); struct epoll_event e = {.events = EPOLLIN}; 
		ev_in = mode[1] == 'e' ? EPOLLIN | EPOLLET : EPOLLIN;
		if (*mode == 'A') {
			pthread_t t; atomic_store(&start, 0); pthread_create(&t, NULL, adder, NULL); atomic_fetch_add(&start, 1); while (atomic_load(&start) < 2);
			for (volatile int z = 0; z < (i * 7) % 500; z++);
			NEED(epoll_ctl(outer, EPOLL_CTL_ADD, inner, &e) == 0); pthread_join(t, NULL);
			NEED(send(fd, "x", 1, 0) == 1);
			int n = epoll_wait(outer, &e, 1, 500), q; ioctl(fd, FIONREAD, &q);
			if (n != 1) { miss++; printf("round %d: outer %d, %d bytes there\n", i, n, q); }
			all(fd, 6);
		} else if (*mode == 'C' || *mode == 'H') {
			if (*mode == 'H') ev_in = mode[1] == 'o' ? EPOLLIN | EPOLLET | EPOLLONESHOT : ev_in;
			struct epoll_event m = {.events = ev_in}; NEED(epoll_ctl(inner, EPOLL_CTL_ADD, fd, &m) == 0);
			pthread_t t; char kind = mode[1]; pthread_create(&t, NULL, *mode == 'C' ? reader : worker, &kind);
			for (volatile int z = 0; z < (i * 131) % 60000; z++);
			NEED(epoll_ctl(outer, EPOLL_CTL_ADD, inner, &e) == 0); pthread_join(t, NULL);
			int n = epoll_wait(outer, &e, 1, 0); if (n && ev_in == EPOLLIN) { early++; } miss = stalled;
		} else {
			unsigned got = 0; size_t part = 0; char b[4]; int done = 0;
			for (volatile int z = 0; z < (i * 131) % 20000; z++);
			if (*mode == 'B') { e.events = ev_in; NEED(epoll_ctl(inner, EPOLL_CTL_ADD, fd, &e) == 0); e.events = mode[2] == 'e' ? EPOLLIN | EPOLLET : EPOLLIN;
				NEED(epoll_ctl(outer, EPOLL_CTL_ADD, inner, &e) == 0); }
			else { fcntl(fd, F_SETOWN, getpid()); fcntl(fd, F_SETFL, O_ASYNC); }
			int first = *mode == 'D';
			while (!done) {
				if (*mode == 'B') { int n = epoll_wait(outer, &e, 1, 1000), q; 
					if (n == 0) { ioctl(fd, FIONREAD, &q); printf("round %d: silent at %u of %d, %d bytes there\n", i, got, K, q); miss++; break; }
					n = epoll_wait(inner, &e, 1, 0); if (n == 0) { spurious++; continue; } }
				else if (!first) { struct timespec t = {1, 0}; if (sigtimedwait(&ss, NULL, &t) < 0) { int q; ioctl(fd, FIONREAD, &q); printf("round %d: no SIGIO at %u of %d, %d bytes there\n", i, got, K, q); miss++; break; } }
				first = 0;
				for (;;) { ssize_t r = recv(fd, b + part, 4 - part, MSG_DONTWAIT); if (r < 0) { NEED(errno == EAGAIN); break; } NEED(r > 0); part += r;
					if (part == 4) { unsigned v; memcpy(&v, b, 4); if (v != got) { printf("round %d: %u in place of %u\n", i, v, got); _exit(1); } got++; part = 0; if (got == (unsigned)K) { done = 1; break; } }
					if (*mode == 'B' && !(ev_in & EPOLLET) && mode[2] != 'e') break; }
			}
			if (*mode == 'B' && done) { int n = epoll_wait(outer, &e, 1, 0); if (n && mode[2] != 'e') early++; }
			while (sigtimedwait(&ss, NULL, &(struct timespec){0}) > 0);
		}
		close(fd); close(inner); close(outer); NEED(write(way[1], "x", 1) == 1);
	}
	printf("%s: %d rounds, %d missed, %d spurious outer, %d outer ready when empty\n", mode, rounds, miss, spurious, early); fflush(stdout);
	waitpid(p, NULL, 0); return 0;
}
