#define _GNU_SOURCE
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
static double now(void){struct timespec t;clock_gettime(CLOCK_MONOTONIC,&t);return t.tv_sec+t.tv_nsec/1e9;}
int main(void)
{
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof a; char c[1];
	int l = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	bind(l, (void *)&a, len); listen(l, 5); getsockname(l, (void *)&a, &len);
	if (!fork()) { int fd = socket(AF_INET, SOCK_STREAM, 0); connect(fd, (void *)&a, len); while (send(fd, c, 1, 0) == 1 && recv(fd, c, 1, 0) == 1) ; _exit(0); }
	int fd = accept(l, 0, 0); double begin = now(), last = begin, worst = 0;
	while (now() < begin + 18) { recv(fd, c, 1, 0); send(fd, c, 1, 0); double t = now(); if (t - last > worst) { worst = t - last; if (worst > 1) printf("pause of %.2f s\n", worst), fflush(stdout); } last = t; usleep(500); }
	printf("worst pause %.2f s\n", worst);
}
