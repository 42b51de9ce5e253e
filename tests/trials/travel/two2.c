/* two [CHILDREN]: parent and executed children share one connection; all read and write. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#define NEED(c) ((c) ? (void)0 : (printf("%d: line %d %s: %s\n", getpid(), __LINE__, #c, strerror(errno)), fflush(stdout), _exit(9)))
enum { N = 3000 };
static int fd, kids;
static void client(int port)
{
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = port, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	char c[64];
	NEED(connect(fd, (void *)&a, sizeof a) == 0);
	for (int i = 0; i < 100; i++) { NEED(send(fd, c, 64, 0) == 64); NEED(recv(fd, c, 64, MSG_WAITALL) == 64); usleep(300); }
	unsigned char buf[64];
	unsigned long got = 0, want = 64ul * 500 * (kids + 1), sum = 0;
	srand(getpid());
	for (int i = 0; i < N; i++) {
		memset(buf, i % 256, 64);
		NEED(send(fd, buf, 64, MSG_NOSIGNAL) == 64);
		if (rand() % 10 == 0) usleep(rand() % 4000);
		char b[8192];
		ssize_t m = recv(fd, b, sizeof b, MSG_DONTWAIT);
		if (m > 0) got += m;
	}
	shutdown(fd, SHUT_WR);
	while (got < want) {
		struct pollfd p = {fd, POLLIN};
		char b[8192];
		if (poll(&p, 1, 8000) != 1) { printf("client: HANG at %lu of %lu\n", got, want); fflush(stdout); _exit(1); }
		ssize_t m = recv(fd, b, sizeof b, 0);
		if (m <= 0) { printf("client: %zd %s at %lu of %lu\n", m, m ? strerror(errno) : "end", got, want); fflush(stdout); _exit(1); }
		got += m;
	}
	printf("client: %lu of %lu\n", got, want); fflush(stdout);
	_exit(0);
}
static unsigned long *shared;
static void holder(int who)
{
	unsigned char b[64 * 3];
	int sent = getenv("SENT") ? 500 : 0, set = epoll_create1(EPOLL_CLOEXEC);
	struct epoll_event e = {.events = EPOLLIN};
	NEED(epoll_ctl(set, EPOLL_CTL_ADD, fd, &e) == 0);
	int stop = who == (int)shared[3] ? 1 << 30 : 20 + rand() % 400; srand(getpid()); stop = who == (int)shared[3] ? 1 << 30 : 20 + rand() % 800;
	for (int turn = 0;; turn++) {
		if (turn == stop && sent >= 0) { for (; sent < 500; sent++) NEED(send(fd, b, 64, MSG_NOSIGNAL) == 64); if (who) _exit(0); close(fd); return; }
		if (turn && turn % 500 == 0 && who && sent >= 500) { char n[16], wh[16]; snprintf(n, 16, "%d", fd); snprintf(wh, 16, "%d", who); setenv("SENT", "1", 1); execl("/proc/self/exe", "two", "h", n, wh, NULL); }
		struct pollfd p = {fd, POLLIN};
		int r = who % 2 ? poll(&p, 1, 8000) : epoll_wait(set, &e, 1, 8000);
		if (r != 1) { printf("holder %d: HANG, %lu bytes in all\n", who, shared[0]); fflush(stdout); _exit(1); }
		ssize_t m = recv(fd, b, 1 + turn % sizeof b, MSG_DONTWAIT);
		if (m < 0 && errno == EAGAIN) continue;
		if (m < 0) { printf("holder %d: %s\n", who, strerror(errno)); fflush(stdout); _exit(1); }
		if (m == 0) break; 
		unsigned long s = 0;
		for (int i = 0; i < m; i++) s += b[i];
		__sync_fetch_and_add(&shared[0], m);
		__sync_fetch_and_add(&shared[1], s);
		if (sent < 500) { memset(b, who, 64); NEED(send(fd, b, 64, MSG_NOSIGNAL) == 64); sent++; }
	}
	for (; sent < 500; sent++) NEED(send(fd, b, 64, MSG_NOSIGNAL) == 64);
	__sync_fetch_and_add(&shared[2], 1);
}
int main(int argc, char **argv)
{
	if (argc > 3) { fd = atoi(argv[2]); shared = mmap(0, 4096, 3, MAP_SHARED, 9, 0); holder(atoi(argv[3])); return 0; }
	kids = argc > 1 ? atoi(argv[1]) : 1;
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof a;
	int l = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	NEED(bind(l, (void *)&a, len) == 0 && listen(l, 5) == 0 && getsockname(l, (void *)&a, &len) == 0);
	int m = memfd_create("at", 0);
	ftruncate(m, 4096); dup2(m, 9);
	shared = mmap(0, 4096, 3, MAP_SHARED, 9, 0);
	shared[3] = argc > 2 ? atoi(argv[2]) : 1; pid_t c = fork();
	if (!c) { close(l); client(a.sin_port); }
	char w[64];
	fd = accept(l, NULL, NULL);
	for (int i = 0; i < 100; i++) { NEED(recv(fd, w, 64, MSG_WAITALL) == 64); NEED(send(fd, w, 64, 0) == 64); }
	for (int k = 1; k <= kids; k++) {
		if (!fork()) {
			char n[16], wh[16];
			snprintf(n, 16, "%d", fd); snprintf(wh, 16, "%d", k);
			execl("/proc/self/exe", "two", "h", n, wh, NULL);
			_exit(3);
		}
	}
	holder(0);
	for (int k = 0; k < kids + 1; k++) wait(0);
	unsigned long s = 0;
	for (int i = 0; i < N; i++) s += 64 * (i % 256);
	printf("all: %lu of %d bytes, sum %s, %lu holders\n", shared[0], N * 64, s == shared[1] ? "right" : "WRONG", shared[2]);
	return 0;
}
