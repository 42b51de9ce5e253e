/* served: B accepts ctl (main thread) and data (a second thread), sends 1000 bytes on data, executes itself and sleeps in recv(ctl).
 * A starts a stranger (SIDESTEP_DISABLE=1) that is to read data. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#define NEED(c) ((c) ? (void)0 : (printf("%d: line %d %s: %s\n", getpid(), __LINE__, #c, strerror(errno)), fflush(stdout), _exit(9)))
static struct sockaddr_in a = {.sin_family = AF_INET};
static int ctl, data;
static int dial(int flags) { int fd = socket(AF_INET, SOCK_STREAM | flags, 0); NEED(connect(fd, (void *)&a, sizeof a) == 0); return fd; }
static void ping(int fd) { char c[1]; for (int i = 0; i < 100; i++) { NEED(send(fd, c, 1, 0) == 1); NEED(recv(fd, c, 1, 0) == 1); usleep(1000); } }
static void pong(int fd) { char c[1]; for (int i = 0; i < 100; i++) { NEED(recv(fd, c, 1, 0) == 1); NEED(send(fd, c, 1, 0) == 1); } }
static void *second(void *x) { pong(data); return 0; }
static int client(int noexec)
{
	char c[1];
	ctl = dial(SOCK_CLOEXEC); data = dial(0);
	ping(ctl); ping(data);
	usleep(700000);
	pid_t p = fork();
	if (!p) {
		char n[16]; snprintf(n, 16, "%d", data);
		setenv("SIDESTEP_DISABLE", "1", 1);
		execl("/proc/self/exe", "served", "stranger", n, NULL);
	}
	waitpid(p, 0, 0);
	send(ctl, c, 1, 0);
	_exit(0);
}
int main(int argc, char **argv)
{
	char c[1000] = "";
	if (argc > 1 && !strcmp(argv[1], "stranger")) {
		int fd = atoi(argv[2]); ssize_t got = 0;
		while (got < 1000) {
			struct pollfd p = {fd, POLLIN};
			if (poll(&p, 1, 4000) != 1) { printf("stranger: HANG after %zd bytes\n", got); fflush(stdout); return 1; }
			ssize_t n = recv(fd, c, sizeof c, 0);
			if (n <= 0) { printf("stranger: %zd %s after %zd\n", n, strerror(errno), got); fflush(stdout); return 1; }
			got += n;
		}
		printf("stranger: whole\n"); fflush(stdout);
		return 0;
	}
	if (argc > 2) { NEED(recv(atoi(argv[2]), c, 1, 0) >= 0); return 0; }
	socklen_t len = sizeof a; a.sin_port = htons(20777); int one = 1; a.sin_addr.s_addr = htonl(INADDR_LOOPBACK); if (argc > 1 && !strcmp(argv[1], "client")) client(0);
	a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	int l = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	setsockopt(l, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one); NEED(bind(l, (void *)&a, len) == 0 && listen(l, 5) == 0 && getsockname(l, (void *)&a, &len) == 0);
	pid_t k = 1;
	
	ctl = accept(l, 0, 0); data = accept(l, 0, 0);
	pong(ctl);
	pthread_t t;
	pthread_create(&t, 0, second, 0);
	pthread_join(t, 0);
	usleep(50000);
	NEED(send(data, c, 1000, 0) == 1000);
	char n[16]; snprintf(n, 16, "%d", ctl);
	if (argc > 1) recv(ctl, c, 1, 0);
	else execl("/proc/self/exe", "served", "next", n, NULL);
}
