#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
int main(int argc, char **argv)
{
	int n = atoi(argv[1]), m = 1; long msgs = 0;
	struct pollfd p[1000];
	if (argc > 2) {
		m = n + 1;
		for (int i = 1; i <= n; i++) p[i] = (struct pollfd){atoi(argv[2]) + i - 1, POLLIN};
		p[0] = (struct pollfd){-1};
	} else {
		struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
		socklen_t len = sizeof a;
		int l = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
		bind(l, (void *)&a, len); listen(l, 200); getsockname(l, (void *)&a, &len);
		for (int i = 0; i < n; i++) if (!fork()) {
			int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0); char c[8];
			close(l);
			if (connect(fd, (void *)&a, sizeof a)) _exit(1);
			for (int k = 0; k < 100; k++) { if (send(fd, c, 8, MSG_NOSIGNAL) != 8 || recv(fd, c, 8, MSG_WAITALL) != 8) { printf("client %d at %d: %s\n", i, k, strerror(errno)); fflush(stdout); _exit(2); } usleep(10000); }
			_exit(0);
		}
		p[0] = (struct pollfd){l, POLLIN};
	}
	int open = 0, first = 0;
	while ((argc > 2 ? open < n : (m < n + 1 || msgs < 40 * n))) {
		poll(p, m, -1);
		for (int i = m - 1; i > 0; i--) if (p[i].revents) { char c[8]; if (recv(p[i].fd, c, 8, 0) > 0) { send(p[i].fd, c, 8, MSG_NOSIGNAL); msgs++; } else { open++; p[i].fd = -1; } }
		if (p[0].revents) { p[m].fd = accept(p[0].fd, 0, 0); if (m == 1) first = p[m].fd; p[m++].events = POLLIN; }
	}
	if (argc > 2) { int st, bad = 0; while (wait(&st) > 0) bad += st != 0; printf("next: %ld messages, %d clients failed\n", msgs, bad); return 0; }
	char f[16]; sprintf(f, "%d", first);
	execl("/proc/self/exe", "many2", argv[1], f, NULL);
}
