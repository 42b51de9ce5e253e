#define _GNU_SOURCE
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <errno.h>
#define NEED(c) ((c) ? (void)0 : (printf("line %d %s\n", __LINE__, strerror(errno)), fflush(stdout), _exit(1)))
int main(int argc, char **argv) {
	int n = atoi(argv[1]); struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)}; socklen_t l = sizeof a; (void)argc;
	int ls = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0); NEED(bind(ls, (void *)&a, l) == 0 && listen(ls, 500) == 0 && getsockname(ls, (void *)&a, &l) == 0);
	static int fds[1000]; char b[4];
	if (fork() == 0) { /* the clients' parent: no connection of the server's in them */
		for (int i = 0; i < n; i++) if (fork() == 0) { int s = socket(AF_INET, SOCK_STREAM, 0); NEED(connect(s, (void *)&a, sizeof a) == 0);
			while (recv(s, b, 4, MSG_WAITALL) == 4) NEED(send(s, b, 4, 0) == 4); 
			_exit(0); }
		while (wait(NULL) > 0); _exit(0); }
	for (int i = 0; i < n; i++) NEED((fds[i] = accept(ls, NULL, NULL)) >= 0);
	for (int k = 0; k < 12; k++) { for (int i = 0; i < n; i++) { NEED(send(fds[i], "abcd", 4, 0) == 4); NEED(recv(fds[i], b, 4, MSG_WAITALL) == 4); } }
	printf("done\n"); fflush(stdout); return 0;
}
