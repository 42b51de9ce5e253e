#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
static int pair(int port, int *l)
{
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	int one = 1;
	*l = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	setsockopt(*l, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
	if (bind(*l, (void *)&a, sizeof a) || listen(*l, 5)) perror("bind");
}
static int dial(int port)
{
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	while (connect(fd, (void *)&a, sizeof a)) { close(fd); usleep(50000); fd = socket(AF_INET, SOCK_STREAM, 0); }
	return fd;
}
static double now(void){struct timespec t;clock_gettime(CLOCK_MONOTONIC,&t);return t.tv_sec+t.tv_nsec/1e9;}
int main(int argc, char **argv)
{
	int port = atoi(argv[2]), l; char c[8] = "";
	if (!strcmp(argv[1], "server")) {
		int workers = atoi(argv[3]);
		pair(port, &l);
		for (int i = 0; i < workers; i++) if (!fork()) {
			int l2, fd; prctl(PR_SET_PDEATHSIG, SIGKILL);
			close(l); pair(port + 1 + i, &l2);
			fd = dial(port + 1 + i); int s = accept(l2, 0, 0);
			for (int k = 0; k < 50; k++) { write(fd, c, 1); read(s, c, 1); write(s, c, 1); read(fd, c, 1); usleep(5000); }
			for (;;) pause();
		}
		sleep(1);
		int fd = accept(l, 0, 0);
		while (recv(fd, c, 1, 0) == 1) send(fd, c, 1, 0);
		puts("server: end"); fflush(stdout);
		if (argc > 4) sleep(atoi(argv[4]));
		kill(0, SIGTERM);
	} else {
		int left = atoi(argv[3]), fd = argc > 4 ? atoi(argv[4]) : dial(port); char n[16], lf[16];
		double end = now() + (argc > 4 ? 0.06 : 1);
		while (now() < end) { send(fd, c, 1, 0); if (recv(fd, c, 1, 0) != 1) { perror("client"); return 1; } usleep(1000); }
		if (!left) { puts("client: done"); return 0; }
		snprintf(n, 16, "%d", fd); snprintf(lf, 16, "%d", left - 1);
		execl("/proc/self/exe", "bells", "client", argv[2], lf, n, NULL);
	}
}
