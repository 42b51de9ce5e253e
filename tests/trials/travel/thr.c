/* thr SECONDS_MS: a thread reads and another writes a promoted connection; a third executes. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#define NEED(c) ((c) ? (void)0 : (printf("%d: line %d %s: %s\n", getpid(), __LINE__, #c, strerror(errno)), fflush(stdout), _exit(9)))
static int fd;
static unsigned long *at; /* shared */
static void *reads(void *x)
{
	unsigned char buf[3000];
	for (;;) {
		ssize_t n = recv(fd, buf, 1 + at[0] % sizeof buf, 0);
		if (n <= 0) return 0;
		for (int i = 0; i < n; i++) if (buf[i] != (at[0] + i) % 251) { printf("BAD read at %lu\n", at[0]); _exit(3); }
		at[0] += n;
	}
}
static void *writes(void *x)
{
	unsigned char buf[3000];
	for (;;) {
		size_t want = 1 + at[1] % sizeof buf;
		for (size_t i = 0; i < want; i++) buf[i] = (at[1] + i) % 251;
		ssize_t n = send(fd, buf, want, MSG_NOSIGNAL);
		if (n <= 0) return 0;
		at[1] += n;
	}
}
static void client(int port)
{
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = port, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	char c[64];
	NEED(connect(fd, (void *)&a, sizeof a) == 0);
	for (int i = 0; i < 100; i++) { NEED(send(fd, c, 64, 0) == 64); NEED(recv(fd, c, 64, MSG_WAITALL) == 64); usleep(300); }
	at = mmap(0, 4096, 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	pthread_t t;
	pthread_create(&t, 0, writes, 0);
	unsigned char buf[5000];
	unsigned long n = 0, ff = 0;
	for (;;) {
		struct pollfd p = {fd, POLLIN};
		if (poll(&p, 1, 8000) != 1) { printf("client: HANG at %lu+%lu\n", n, ff); fflush(stdout); _exit(1); }
		ssize_t m = recv(fd, buf, sizeof buf, 0);
		if (m <= 0) { printf("client: %zd %s at %lu+%lu\n", m, m ? strerror(errno) : "end", n, ff); fflush(stdout); _exit(m < 0); }
		for (int i = 0; i < m; i++) {
			if (!ff && buf[i] == n % 251) n++;
			else if (buf[i] == 255) ff++;
			else { printf("client: BAD byte %d at %lu+%lu\n", buf[i], n, ff); fflush(stdout); _exit(2); }
		}
		if (ff == 6400) { printf("client: whole %lu\n", n); fflush(stdout); _exit(0); }
	}
}
static void next(void)
{
	unsigned char buf[5000];
	at = mmap(0, 4096, 3, MAP_SHARED, 9, 0);
	unsigned long from = at[0], pos = 0, got = 0;
	memset(buf, 255, 64);
	for (int i = 0; i < 100; i++) NEED(send(fd, buf, 64, MSG_NOSIGNAL) == 64);
	int first = 1;
	while (got < 100000) {
		struct pollfd p = {fd, POLLIN};
		if (poll(&p, 1, 8000) != 1) { printf("server: HANG after %lu\n", got); fflush(stdout); _exit(1); }
		ssize_t m = recv(fd, buf, sizeof buf, 0);
		if (m <= 0) { if (m<0 && errno==ECONNRESET) break; printf("server: %zd %s\n", m, m ? strerror(errno) : "end"); fflush(stdout); _exit(1); }
		if (first) { pos = from; while (buf[0] != pos % 251 && pos < from + 251) pos++; first = 0; if (pos - from) printf("server: ahead %lu mod 251\n", pos - from); }
		for (int i = 0; i < m; i++, pos++) if (buf[i] != pos % 251) { printf("server: BAD at +%lu\n", got + i); fflush(stdout); _exit(2); }
		got += m;
	}
	printf("server: fine %lu\n", got); fflush(stdout);
}
static void *execs(void *ms)
{
	char n[16];
	usleep((long)ms * 1000);
	snprintf(n, 16, "%d", fd);
	fcntl(9, F_SETFD, 0);
	execl("/proc/self/exe", "thr", "next", n, NULL);
	_exit(4);
}
int main(int argc, char **argv)
{
	if (argc > 2) { fd = atoi(argv[2]); next(); return 0; }
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof a;
	int l = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	NEED(bind(l, (void *)&a, len) == 0 && listen(l, 5) == 0 && getsockname(l, (void *)&a, &len) == 0);
	pid_t c = fork();
	if (!c) { close(l); client(a.sin_port); }
	char w[64];
	fd = accept(l, NULL, NULL);
	for (int i = 0; i < 100; i++) { NEED(recv(fd, w, 64, MSG_WAITALL) == 64); NEED(send(fd, w, 64, 0) == 64); }
	int m = memfd_create("at", 0);
	ftruncate(m, 4096); dup2(m, 9);
	at = mmap(0, 4096, 3, MAP_SHARED, 9, 0);
	pthread_t t;
	pthread_create(&t, 0, reads, 0);
	pthread_create(&t, 0, writes, 0);
	pthread_create(&t, 0, execs, (void *)(long)atoi(argv[1]));
	pause();
}
