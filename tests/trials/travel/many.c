#define _GNU_SOURCE
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
int main(int argc, char **argv)
{
	int n = atoi(argv[1]);
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof a;
	int l = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	bind(l, (void *)&a, len); listen(l, 200); getsockname(l, (void *)&a, &len);
	for (int i = 0; i < n; i++) if (!fork()) {
		int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0); char c[8];
		close(l);
		if (connect(fd, (void *)&a, sizeof a)) _exit(1);
		for (int k = 0; k < 60; k++) { send(fd, c, 8, 0); recv(fd, c, 8, MSG_WAITALL); usleep(10000); }
		recv(fd, c, 1, 0);
		_exit(0);
	}
	struct pollfd p[1000] = {{l, POLLIN}};
	int m = 1; long msgs = 0;
	while (msgs < 60 * n) {
		poll(p, m, -1);
		for (int i = m - 1; i > 0; i--) if (p[i].revents) { char c[8]; if (recv(p[i].fd, c, 8, 0) > 0) { send(p[i].fd, c, 8, 0); msgs++; } }
		if (p[0].revents) { p[m].fd = accept(l, 0, 0); p[m++].events = POLLIN; }
	}
	printf("%ld\n", msgs);
}
