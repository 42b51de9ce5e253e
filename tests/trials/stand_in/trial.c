#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#define NEED(c) ((c) ? (void)0 : fail(__LINE__, #c))
static void fail(int l, const char *w) { printf("line %d: %s (%s)\n", l, w, strerror(errno)); fflush(stdout); _exit(1); }
static int to_peer[2], from_peer[2], fd; static pid_t peer_pid;
static char buf[1 << 20];
static void all(int f, size_t n) { size_t d = 0; while (d < n) { ssize_t r = recv(f, buf, n - d < sizeof buf ? n - d : sizeof buf, 0); NEED(r > 0); d += r; } }
static void peer_loop(int s) {
	struct { char c; int n; } cmd;
	while (read(to_peer[0], &cmd, sizeof cmd) == sizeof cmd) {
		int r = 0;
		if (cmd.c == 's') r = send(s, buf, cmd.n, 0);
		if (cmd.c == 'r') { all(s, cmd.n); r = cmd.n; }
		if (cmd.c == 'd') { r = 0; ssize_t k; while ((k = recv(s, buf, sizeof buf, MSG_DONTWAIT)) > 0) r += k; }
		if (cmd.c == 'w') r = shutdown(s, SHUT_WR);
		if (cmd.c == 'e') { for (int i = 0; i < cmd.n; i++) { all(s, 3); NEED(send(s, "abc", 3, 0) == 3); } }
		if (cmd.c == 'n') { int v = 1; r = setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &v, sizeof v); }
		NEED(write(from_peer[1], &r, sizeof r) == sizeof r);
	}
	_exit(0);
}
static void peer_start(char c, int n) { struct { char c; int n; } cmd; memset(&cmd, 0, sizeof cmd); cmd.c = c; cmd.n = n; NEED(write(to_peer[1], &cmd, sizeof cmd) == sizeof cmd); }
static int peer_done(void) { int r; NEED(read(from_peer[0], &r, sizeof r) == sizeof r); return r; }
static int peer(char c, int n) { peer_start(c, n); return peer_done(); }
static void warm(void) { for (int k = 0; k < 20; k++) { peer_start('e', 50); for (int i = 0; i < 50; i++) { NEED(send(fd, "abc", 3, 0) == 3); all(fd, 3); } peer_done(); usleep(10000); } }
static void arrived(int n) { int q = 0; while (q < n) { NEED(ioctl(fd, FIONREAD, &q) == 0); } }
static void connect_up(void) {
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)}; socklen_t l = sizeof a;
	int ls = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	NEED(pipe(to_peer) == 0 && pipe(from_peer) == 0 && bind(ls, (void *)&a, l) == 0 && listen(ls, 5) == 0 && getsockname(ls, (void *)&a, &l) == 0);
	if (!(peer_pid = fork())) { close(to_peer[1]); int s = socket(AF_INET, SOCK_STREAM, 0); NEED(connect(s, (void *)&a, sizeof a) == 0); peer_loop(s); }
	close(to_peer[0]);
	fd = accept(ls, NULL, NULL); NEED(fd >= 0); close(ls);
}
static int ctl(int s, int op, int f, uint32_t ev, int d) { struct epoll_event e = {.events = ev, .data.u64 = d}; return epoll_ctl(s, op, f, &e); }
static void say(const char *what, int s, int ms) { struct epoll_event e[8]; struct timespec a, b; clock_gettime(CLOCK_MONOTONIC, &a); int n = epoll_wait(s, e, 8, ms); clock_gettime(CLOCK_MONOTONIC, &b);
	printf("%s: %d", what, n); for (int i = 0; i < n; i++) printf(" [%llu %x]", (unsigned long long)e[i].data.u64, e[i].events); 
	printf("\n"); fflush(stdout); }
static void sig_block(int sig) { sigset_t s; sigemptyset(&s); sigaddset(&s, sig); sigprocmask(SIG_BLOCK, &s, NULL); }
static int sig_wait(int sig, int ms) { sigset_t s; siginfo_t i; sigemptyset(&s); sigaddset(&s, sig); struct timespec t = {ms / 1000, ms % 1000 * 1000000l}; int r = sigtimedwait(&s, &i, &t); if (r > 0) printf("  signal %d code %d\n", r, i.si_code); return r; }

int main(int argc, char **argv)
{
	const char *c = argv[1]; int inner = -1, outer = -1; (void)argc; for (int i = 0; i < 10; i++) open("/dev/null", O_RDONLY | O_CLOEXEC);
	setvbuf(stdout, NULL, _IOLBF, 0);
	alarm(40);
	connect_up();
	if (argc > 2) { for (int i = 3; i < 13; i++) if (i != fd) ; }
	if (strcmp(c, "tcpring") != 0) warm();
	if (!strcmp(c, "fullasync")) {
		sig_block(SIGIO); ssize_t k; size_t sent = 0; fcntl(fd, F_SETFL, O_NONBLOCK);
		for (int t = 0; t < 60; t++) { while ((k = send(fd, buf, 65536, 0)) > 0) sent += k; usleep(20000); }
		printf("full, errno %d\n", errno); fprintf(stderr, "sent %zu\n", sent);
		fcntl(fd, F_SETOWN, getpid()); fcntl(fd, F_SETFL, O_NONBLOCK | O_ASYNC);
		while (sig_wait(SIGIO, 0) > 0) printf("early\n");
				peer('d', 0); usleep(300000); peer('d', 0);
		printf("SIGIO for room: %s\n", sig_wait(SIGIO, 3000) > 0 ? "yes" : "no");
	} else if (!strcmp(c, "forkasync")) {
		int p[2]; NEED(pipe(p) == 0); sig_block(SIGIO);
		pid_t ch = fork();
		if (!ch) { char x; NEED(read(p[0], &x, 1) == 1); NEED(recv(fd, buf, 4, 0) == 4); NEED(recv(fd, buf, 2, 0) == 2); _exit(0); }
		peer('s', 10); arrived(10);
		fcntl(fd, F_SETOWN, getpid()); fcntl(fd, F_SETFL, O_ASYNC);
		while (sig_wait(SIGIO, 0) > 0) printf("early\n");
		NEED(write(p[1], "x", 1) == 1); waitpid(ch, NULL, 0);
		printf("SIGIO without news: %s\n", sig_wait(SIGIO, 500) > 0 ? "yes" : "no");
		all(fd, 4);
		peer('s', 10); printf("SIGIO for news: %s\n", sig_wait(SIGIO, 3000) > 0 ? "yes" : "no");
	} else if (!strcmp(c, "childclose")) {
		inner = epoll_create1(0); outer = epoll_create1(0);
		peer('s', 6); arrived(6);
		NEED(ctl(inner, EPOLL_CTL_ADD, fd, EPOLLIN, 1) == 0); NEED(ctl(outer, EPOLL_CTL_ADD, inner, EPOLLIN, 2) == 0);
		say("outer", outer, 0);
		pid_t ch = fork(); if (!ch) { close(fd); _exit(0); } waitpid(ch, NULL, 0);
		say("outer after a child has closed its copy", outer, 1000);
		say("inner", inner, 0);
	} else if (!strcmp(c, "childclose1") || !strcmp(c, "childloop")) {
		inner = epoll_create1(0); outer = epoll_create1(0);
		peer('s', 6); arrived(6);
		NEED(ctl(inner, EPOLL_CTL_ADD, fd, EPOLLIN, 1) == 0); NEED(ctl(outer, EPOLL_CTL_ADD, inner, EPOLLIN, 2) == 0);
		say("outer", outer, 0);
		pid_t ch = fork();
		if (!ch) { if (!strcmp(c, "childclose1")) close(fd); else for (int i = 3; i < 256; i++) close(i); execlp("true", "true", NULL); _exit(0); } waitpid(ch, NULL, 0);
		say("outer after a child has closed its copy", outer, 1000);
		say("inner", inner, 0);
	} else if (!strcmp(c, "childreads")) {
		inner = epoll_create1(0); outer = epoll_create1(0);
		peer('s', 6); arrived(6);
		NEED(ctl(inner, EPOLL_CTL_ADD, fd, EPOLLIN, 1) == 0); NEED(ctl(outer, EPOLL_CTL_ADD, inner, EPOLLIN, 2) == 0);
		pid_t ch = fork(); if (!ch) { close(inner); all(fd, 6); _exit(0); } waitpid(ch, NULL, 0);
		say("outer after a child has read all", outer, 0);
		say("inner", inner, 0);
		say("outer again", outer, 0);
	} else if (!strcmp(c, "tcpring")) {
		/* TCP's bytes unread, then the ring's */
		inner = epoll_create1(0); outer = epoll_create1(0);
		for (int i = 0; i < atoi(argv[2]); i++) { peer_start('e', 1); NEED(send(fd, "abc", 3, 0) == 3); all(fd, 3); peer_done(); }
		int total = 0;
		for (int k = 0; k < 200; k++) { total += peer('s', 10); struct pollfd q = {.fd = fd, .events = POLLIN}; poll(&q, 1, 0); int v; ioctl(fd, FIONREAD, &v); usleep(2000); }
		arrived(total);
		NEED(ctl(inner, EPOLL_CTL_ADD, fd, EPOLLIN, 1) == 0); NEED(ctl(outer, EPOLL_CTL_ADD, inner, EPOLLIN, 2) == 0);
		int lost = 0, at = -1;
		for (int k = 0; k < 200; k++) { struct epoll_event e; int n = epoll_wait(outer, &e, 1, 50); if (n != 1) { lost++; if (at < 0) at = k; } NEED(recv(fd, buf, 10, 0) == 10); }
		printf("outer silent %d times, before 200 reads of what is there, first at %d\n", lost, at);
		say("outer, idle", outer, 0);
	} else if (!strcmp(c, "lowat") || !strcmp(c, "lowatasync")) {
		int low = 100; NEED(setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &low, sizeof low) == 0);
		peer('s', 5); arrived(5);
		if (!strcmp(c, "lowat")) {
			inner = epoll_create1(0); outer = epoll_create1(0);
			NEED(ctl(inner, EPOLL_CTL_ADD, fd, EPOLLIN, 1) == 0); NEED(ctl(outer, EPOLL_CTL_ADD, inner, EPOLLIN, 2) == 0);
			say("outer, 5 of 100", outer, 0);
			peer('s', 95); arrived(100);
			say("outer, 100 of 100", outer, 1500);
			say("inner, 100 of 100", inner, 100);
		} else {
			sig_block(SIGIO); fcntl(fd, F_SETOWN, getpid()); fcntl(fd, F_SETFL, O_ASYNC);
			while (sig_wait(SIGIO, 0) > 0) printf("early\n");
			peer('s', 95);
			printf("SIGIO at the mark: %s\n", sig_wait(SIGIO, 1500) > 0 ? "yes" : "no");
		}
	} else if (!strcmp(c, "pinned") || !strcmp(c, "pinnedwait")) {
		peer('s', 6); arrived(6);
		int on = 1; NEED(setsockopt(fd, SOL_SOCKET, SO_TIMESTAMP, &on, sizeof on) == 0);
		inner = epoll_create1(0); outer = epoll_create1(0);
		NEED(ctl(inner, EPOLL_CTL_ADD, fd, EPOLLIN, 1) == 0); NEED(ctl(outer, EPOLL_CTL_ADD, inner, EPOLLIN, 2) == 0);
		say("outer", outer, 0); say("inner", inner, 0);
		all(fd, 6);
		say("outer, all read", outer, 0);
		peer('s', 5);
		say("outer, more", outer, 1000);
		say("inner, more", inner, 1000);
	} else if (!strcmp(c, "zerocopy")) {
		int on = 1; NEED(setsockopt(fd, SOL_SOCKET, SO_ZEROCOPY, &on, sizeof on) == 0);
		warm();
		NEED(send(fd, buf, 20000, MSG_ZEROCOPY) == 20000); peer('r', 20000); usleep(50000);
		inner = epoll_create1(0); outer = epoll_create1(0);
		NEED(ctl(inner, EPOLL_CTL_ADD, fd, EPOLLIN, 1) == 0); NEED(ctl(outer, EPOLL_CTL_ADD, inner, EPOLLIN, 2) == 0);
		say("outer, completion", outer, 500); 
		say("inner, completion", inner, 500); 
		struct msghdr m = {0}; char cb[200]; m.msg_control = cb; m.msg_controllen = sizeof cb; printf("errqueue %zd\n", recvmsg(fd, &m, MSG_ERRQUEUE | MSG_DONTWAIT));
		NEED(send(fd, buf, 20000, MSG_ZEROCOPY) == 20000); peer('r', 20000); usleep(50000);
		say("outer, second completion", outer, 500); 
		say("inner, second completion", inner, 500); 
	} else if (!strcmp(c, "misnamed")) {
		inner = epoll_create1(0); outer = epoll_create1(0);
		NEED(ctl(inner, EPOLL_CTL_ADD, fd, EPOLLIN, 1) == 0);
		long r_; __asm__ volatile("syscall" : "=a"(r_) : "a"(3L), "D"((long)fd) : "rcx", "r11", "memory"); __asm__ volatile("syscall" : "=a"(r_) : "a"(2L), "D"("/dev/null"), "S"(2L), "d"(0L) : "rcx", "r11", "memory"); NEED(r_ == fd);
		NEED(ctl(outer, EPOLL_CTL_ADD, inner, EPOLLIN, 2) == 0);
		printf("added\n");
	} else if (!strcmp(c, "twodeep")) {
		int mid = epoll_create1(0); inner = epoll_create1(0); outer = epoll_create1(0);
		NEED(ctl(outer, EPOLL_CTL_ADD, mid, EPOLLIN | EPOLLET, 3) == 0);
		NEED(ctl(inner, EPOLL_CTL_ADD, fd, EPOLLIN | EPOLLET, 1) == 0);
		peer('s', 6); arrived(6);
		NEED(ctl(mid, EPOLL_CTL_ADD, inner, EPOLLIN | EPOLLET, 2) == 0);
		say("outer", outer, 0); say("outer again", outer, 0); say("mid", mid, 0); say("mid again", mid, 0); say("inner", inner, 0); say("inner again", inner, 0);
		peer('s', 6); arrived(12);
		say("outer", outer, 500); say("mid", mid, 0); say("inner", inner, 0);
		all(fd, 4);
		say("outer", outer, 0); say("mid", mid, 0); say("inner", inner, 0);
		NEED(ctl(inner, EPOLL_CTL_MOD, fd, EPOLLIN | EPOLLET | EPOLLONESHOT, 1) == 0);
		say("outer", outer, 0); say("mid", mid, 0); say("inner", inner, 0);
		NEED(ctl(inner, EPOLL_CTL_MOD, fd, EPOLLIN | EPOLLET | EPOLLONESHOT, 1) == 0);
		say("outer", outer, 0); say("mid", mid, 0); say("inner", inner, 0);
		struct pollfd q[3] = {{outer, POLLIN, 0}, {mid, POLLIN, 0}, {inner, POLLIN, 0}};
		poll(q, 3, 0); printf("poll %x %x %x\n", q[0].revents, q[1].revents, q[2].revents);
		all(fd, 8);
		say("outer", outer, 0); say("mid", mid, 0); say("inner", inner, 0);
		poll(q, 3, 0); printf("poll %x %x %x\n", q[0].revents, q[1].revents, q[2].revents);
		NEED(ctl(inner, EPOLL_CTL_MOD, fd, EPOLLIN, 1) == 0);
		peer('w', 0); usleep(10000);
		say("outer, fin", outer, 500); say("mid", mid, 0); say("inner", inner, 0);
	} else if (!strcmp(c, "polldup")) {
		inner = epoll_create1(0);
		NEED(ctl(inner, EPOLL_CTL_ADD, fd, EPOLLIN | EPOLLET, 1) == 0);
		peer('s', 6); arrived(6);
		struct pollfd q = {inner, POLLIN, 0};
		printf("poll %d\n", poll(&q, 1, 0)); say("inner", inner, 0); printf("poll, told %d\n", poll(&q, 1, 0));
	} else if (!strcmp(c, "removed")) {
		/* the inner set leaves the outer one, and is waited on alone by a blocked thread */
		inner = epoll_create1(0); outer = epoll_create1(0);
		NEED(ctl(inner, EPOLL_CTL_ADD, fd, EPOLLIN, 1) == 0); NEED(ctl(outer, EPOLL_CTL_ADD, inner, EPOLLIN, 2) == 0);
		NEED(epoll_ctl(outer, EPOLL_CTL_DEL, inner, NULL) == 0);
		for (int i = 0; i < 5; i++) { peer('s', 6); say("inner", inner, 1000); all(fd, 6); }
	} else if (!strcmp(c, "closeinner")) {
		peer('s', 6); arrived(6);
		inner = epoll_create1(0); outer = epoll_create1(0);
		NEED(ctl(inner, EPOLL_CTL_ADD, fd, EPOLLIN, 1) == 0); NEED(ctl(outer, EPOLL_CTL_ADD, inner, EPOLLIN, 2) == 0);
		int copy = dup(inner); close(inner); say("outer by copy", outer, 0);
		int other = epoll_create1(0); NEED(ctl(other, EPOLL_CTL_ADD, copy, EPOLLIN | EPOLLET, 7) == 0);
		say("other", other, 0); say("other", other, 0); close(copy); say("outer", outer, 0); say("other", other, 0);
		all(fd, 6); peer('s', 5); all(fd, 5);
	}

	if (!strcmp(c, "exclfork")) {
		int p[2], q[2]; NEED(pipe(p) == 0 && pipe(q) == 0);
		pid_t ch = fork();
		int s = epoll_create1(0); NEED(ctl(s, EPOLL_CTL_ADD, fd, EPOLLIN | EPOLLEXCLUSIVE, 1) == 0);
		if (!ch) { struct epoll_event e; char x; for (int k = 0; k < 20; k++) { int n = epoll_wait(s, &e, 1, 3000); char m = n == 1 ? 'y' : 'n'; NEED(write(q[1], &m, 1) == 1); NEED(read(p[0], &x, 1) == 1); } _exit(0); }
		int both = 0, none = 0;
		for (int k = 0; k < 20; k++) { usleep(20000); struct epoll_event e; peer('s', 5); int n = epoll_wait(s, &e, 1, 1000); char m; NEED(read(q[0], &m, 1) == 1); both += n == 1 && m == 'y'; none += n != 1 && m != 'y'; all(fd, 5); NEED(write(p[1], "x", 1) == 1); }
		printf("none %d\n", none); waitpid(ch, NULL, 0);
	} else if (!strcmp(c, "exclrules")) {
		int s = epoll_create1(0);
		#define R(x) do { errno = 0; int r_ = (x); printf("%d %s\n", r_, r_ < 0 ? strerror(errno) : ""); } while (0)
		R(ctl(s, EPOLL_CTL_ADD, fd, EPOLLIN | EPOLLEXCLUSIVE | EPOLLONESHOT, 1));
		R(ctl(s, EPOLL_CTL_ADD, fd, EPOLLIN | EPOLLEXCLUSIVE | EPOLLRDHUP, 1));
		R(ctl(s, EPOLL_CTL_ADD, fd, EPOLLIN | EPOLLEXCLUSIVE | EPOLLET, 1)); R(ctl(s, EPOLL_CTL_ADD, fd, EPOLLIN, 1));
		R(ctl(s, EPOLL_CTL_MOD, fd, EPOLLIN, 1)); R(ctl(s, EPOLL_CTL_MOD, fd, EPOLLIN | EPOLLEXCLUSIVE, 1));
		peer('s', 5); say("edge", s, 500); say("edge told", s, 0); peer('s', 5); say("edge", s, 500); all(fd, 10);
		R(epoll_ctl(s, EPOLL_CTL_DEL, fd, NULL)); R(epoll_ctl(s, EPOLL_CTL_DEL, fd, NULL)); R(ctl(s, EPOLL_CTL_MOD, fd, EPOLLIN, 1));
		R(ctl(s, EPOLL_CTL_ADD, fd, EPOLLIN, 1)); R(ctl(s, EPOLL_CTL_MOD, fd, EPOLLIN | EPOLLEXCLUSIVE, 1)); R(ctl(s, EPOLL_CTL_MOD, fd, EPOLLIN | EPOLLOUT, 1)); say("w", s, 0);
		R(epoll_ctl(s, EPOLL_CTL_DEL, fd, NULL)); R(ctl(s, EPOLL_CTL_ADD, fd, EPOLLIN | EPOLLEXCLUSIVE, 1)); R(ctl(s, EPOLL_CTL_MOD, fd, EPOLLIN, 1)); peer('s', 5); say("level", s, 500); say("level", s, 0); all(fd, 5); say("none", s, 0);
		R(ctl(s, EPOLL_CTL_ADD, fd, EPOLLIN | EPOLLEXCLUSIVE, 1)); peer('w', 0); usleep(20000); say("fin", s, 500);
	} else if (!strcmp(c, "pollouter")) {
		inner = epoll_create1(0); outer = epoll_create1(0); int mid = epoll_create1(0);
		peer('s', 6); arrived(6);
		NEED(ctl(inner, EPOLL_CTL_ADD, fd, EPOLLIN, 1) == 0 && ctl(mid, EPOLL_CTL_ADD, inner, EPOLLIN, 2) == 0 && ctl(outer, EPOLL_CTL_ADD, mid, EPOLLIN, 3) == 0);
		struct pollfd q[4] = {{outer, POLLIN, 0}, {mid, POLLIN, 0}, {inner, POLLIN, 0}, {fd, POLLIN, 0}};
		printf("%d", poll(q, 4, 500)); printf(" %x %x %x %x\n", q[0].revents, q[1].revents, q[2].revents, q[3].revents);
		fd_set r; FD_ZERO(&r); FD_SET(outer, &r); FD_SET(inner, &r); struct timeval tv = {0, 500000}; printf("select %d\n", select(64, &r, NULL, NULL, &tv));
		all(fd, 6); printf("%d\n", poll(q, 4, 0)); FD_ZERO(&r); FD_SET(outer, &r); tv = (struct timeval){0, 0}; printf("select %d\n", select(64, &r, NULL, NULL, &tv));
		peer('s', 6); FD_ZERO(&r); FD_SET(outer, &r); tv = (struct timeval){1, 0}; printf("select %d\n", select(64, &r, NULL, NULL, &tv)); all(fd, 6);
	} else if (!strcmp(c, "dupmember")) {
		inner = epoll_create1(0); outer = epoll_create1(0); peer('s', 6); arrived(6); int copy = dup(fd);
		NEED(ctl(inner, EPOLL_CTL_ADD, fd, EPOLLIN, 1) == 0 && ctl(inner, EPOLL_CTL_ADD, copy, EPOLLIN | EPOLLET, 5) == 0 && ctl(outer, EPOLL_CTL_ADD, inner, EPOLLIN, 2) == 0);
		say("outer", outer, 0); say("inner", inner, 0); close(fd); fd = copy; say("outer", outer, 0); say("inner", inner, 0); all(fd, 2); say("outer", outer, 0); say("inner", inner, 0); all(fd, 4); say("outer", outer, 0); say("inner", inner, 0);
		peer('s', 6); say("outer", outer, 500); say("inner", inner, 0); all(fd, 6); say("outer", outer, 0);
	} else if (!strcmp(c, "shutrd")) {
		inner = epoll_create1(0); outer = epoll_create1(0); peer('s', 6); arrived(6);
		NEED(ctl(inner, EPOLL_CTL_ADD, fd, EPOLLIN | EPOLLET, 1) == 0 && ctl(outer, EPOLL_CTL_ADD, inner, EPOLLIN, 2) == 0);
		say("outer", outer, 0); say("inner", inner, 0); say("outer", outer, 0); shutdown(fd, SHUT_RD); say("outer", outer, 0); say("inner", inner, 0); printf("recv %zd\n", recv(fd, buf, 10, MSG_DONTWAIT)); printf("recv %zd\n", recv(fd, buf, 10, MSG_DONTWAIT)); say("outer", outer, 0); say("inner", inner, 0);
	} else if (!strcmp(c, "fin")) {
		inner = epoll_create1(0); outer = epoll_create1(0); peer('s', 6); arrived(6); peer('w', 0); usleep(20000);
		NEED(ctl(inner, EPOLL_CTL_ADD, fd, EPOLLIN | EPOLLRDHUP | EPOLLET, 1) == 0 && ctl(outer, EPOLL_CTL_ADD, inner, EPOLLIN | EPOLLET, 2) == 0);
		say("outer", outer, 0); say("inner", inner, 0); all(fd, 4); say("outer", outer, 0); all(fd, 2); say("outer", outer, 0); say("inner", inner, 0); printf("recv %zd\n", recv(fd, buf, 10, MSG_DONTWAIT)); say("outer", outer, 0); say("inner", inner, 0);
	} else if (!strcmp(c, "finlate")) {
		inner = epoll_create1(0); outer = epoll_create1(0); peer('s', 6); arrived(6); 
		NEED(ctl(inner, EPOLL_CTL_ADD, fd, EPOLLIN | EPOLLRDHUP | EPOLLET, 1) == 0 && ctl(outer, EPOLL_CTL_ADD, inner, EPOLLIN | EPOLLET, 2) == 0);
		say("outer", outer, 0); say("inner", inner, 0); peer('w', 0); say("outer", outer, 500); say("inner", inner, 0); say("outer", outer, 0); say("inner", inner, 0); all(fd, 6); say("outer", outer, 0); say("inner", inner, 0); printf("recv %zd\n", recv(fd, buf, 10, MSG_DONTWAIT)); 
	} else if (!strcmp(c, "outev")) {
		inner = epoll_create1(0); outer = epoll_create1(0); peer('s', 6); arrived(6);
		NEED(ctl(inner, EPOLL_CTL_ADD, fd, EPOLLOUT | EPOLLET, 1) == 0 && ctl(outer, EPOLL_CTL_ADD, inner, EPOLLIN, 2) == 0);
		say("outer", outer, 0); say("inner", inner, 0); say("outer", outer, 0); say("inner", inner, 0); peer('w', 0); usleep(20000); say("outer", outer, 0); say("inner", inner, 0);
		NEED(ctl(inner, EPOLL_CTL_MOD, fd, EPOLLPRI, 1) == 0); say("outer", outer, 0); say("inner", inner, 0);
	} else if (!strcmp(c, "setsig")) {
		int p[2], sg = SIGRTMIN + 2; NEED(pipe(p) == 0); sig_block(sg);
		pid_t ch = fork();
		if (!ch) { char x; NEED(read(p[0], &x, 1) == 1); NEED(recv(fd, buf, 4, 0) == 4); _exit(0); }
		peer('s', 10); arrived(10);
		fcntl(fd, F_SETOWN, getpid()); fcntl(fd, F_SETSIG, sg); fcntl(fd, F_SETFL, O_ASYNC);
		sigset_t s; siginfo_t in; sigemptyset(&s); sigaddset(&s, sg); struct timespec t = {0, 300000000};
		NEED(write(p[1], "x", 1) == 1); waitpid(ch, NULL, 0);
		int r = sigtimedwait(&s, &in, &t); if (r > 0) printf("signal, code %d, si_fd is the socket: %d\n", in.si_code, in.si_fd == fd); else printf("no signal\n"); all(fd, 6);
	}

	if (!strcmp(c, "lowatlater")) {
		int low = 100; NEED(setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &low, sizeof low) == 0);
		peer('s', 50); arrived(50); inner = epoll_create1(0); outer = epoll_create1(0);
		NEED(ctl(inner, EPOLL_CTL_ADD, fd, EPOLLIN, 1) == 0 && ctl(outer, EPOLL_CTL_ADD, inner, EPOLLIN, 2) == 0); say("outer, 50 of 100", outer, 0);
		low = 10; NEED(setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &low, sizeof low) == 0); say("outer, 50 of 10", outer, 500);
		low = 100; NEED(setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &low, sizeof low) == 0); say("outer, 50 of 100", outer, 0); say("inner", inner, 0);
	} else if (!strcmp(c, "lowatread")) {
		int low = 10; NEED(setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &low, sizeof low) == 0);
		peer('s', 15); arrived(15); inner = epoll_create1(0); outer = epoll_create1(0);
		NEED(ctl(inner, EPOLL_CTL_ADD, fd, EPOLLIN, 1) == 0 && ctl(outer, EPOLL_CTL_ADD, inner, EPOLLIN, 2) == 0); say("outer, 15 of 10", outer, 0);
		all(fd, 10); say("outer, 5 of 10", outer, 0); say("inner, 5 of 10", inner, 0);
	} else if (!strcmp(c, "sandbox")) {
		/* a filter first, then nested */
		peer('s', 6); arrived(6);
		struct { unsigned short code; unsigned char jt, jf; unsigned int k; } f = {6, 0, 0, 0x7fff0000}; struct { unsigned short len; void *filter; } p = {1, &f};
		extern int prctl(int, ...); NEED(prctl(38, 1, 0, 0, 0) == 0 && prctl(22, 2, &p) == 0);
		inner = epoll_create1(0); outer = epoll_create1(0);
		NEED(ctl(inner, EPOLL_CTL_ADD, fd, EPOLLIN, 1) == 0 && ctl(outer, EPOLL_CTL_ADD, inner, EPOLLIN, 2) == 0);
		say("outer", outer, 0); all(fd, 6); say("outer, all read", outer, 0); say("outer, all read", outer, 0);
	}

	if (!strcmp(c, "pollidle")) { int S = epoll_create1(0); NEED(ctl(S, EPOLL_CTL_ADD, fd, EPOLLIN, 1) == 0); struct pollfd q = {S, POLLIN, 0}; printf("poll idle %d\n", poll(&q, 1, 0)); say("S", S, 0); printf("poll idle %d\n", poll(&q, 1, 0)); 
		peer('s', 5); say("S", S, 500); all(fd, 5); printf("poll, read %d\n", poll(&q, 1, 0)); printf("poll, read %d\n", poll(&q, 1, 200)); }
	close(to_peer[1]); waitpid(peer_pid, NULL, 0);
	return 0;
}
