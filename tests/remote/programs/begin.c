/*
 * begin.c - a connection that begins with SDP, as a C program makes it.
 *
 * begin serve ADDRESS PORT   listens as AF_INET6_OFFLOAD or AF_INET_OFFLOAD, takes one by accept4() without asking for its
 *                            address, and says who it is; echoes one message
 * begin call ADDRESS PORT    connects without blocking, waits by epoll, sends a message and compares what comes back
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "sidestep.h"

#define NEED(what) \
	do { \
		if (!(what)) { \
			printf("%s: %s\n", #what, strerror(errno)); \
			exit(1); \
		} \
	} while (0)

static socklen_t address_of(const char *text, const char *port, struct sockaddr_storage *to)
{
	struct sockaddr_in *in = (struct sockaddr_in *)to;
	struct sockaddr_in6 *in6 = (struct sockaddr_in6 *)to;

	memset(to, 0, sizeof(*to));
	if (inet_pton(AF_INET, text, &in->sin_addr) == 1) {
		in->sin_family = AF_INET_OFFLOAD;
		in->sin_port = htons((uint16_t)atoi(port));
		return sizeof(*in);
	}
	NEED(inet_pton(AF_INET6, text, &in6->sin6_addr) == 1);
	in6->sin6_family = AF_INET6_OFFLOAD;
	in6->sin6_port = htons((uint16_t)atoi(port));
	return sizeof(*in6);
}

static void say(const char *what, const struct sockaddr_storage *address)
{
	char text[INET6_ADDRSTRLEN];
	const void *addr = address->ss_family == AF_INET ? (const void *)&((const struct sockaddr_in *)address)->sin_addr
	                                                 : (const void *)&((const struct sockaddr_in6 *)address)->sin6_addr;

	NEED(inet_ntop(address->ss_family, addr, text, sizeof(text)));
	printf("%s %s\n", what, text);
	fflush(stdout);
}

static int nonblocking(int fd, int on)
{
	return ioctl(fd, FIONBIO, &on);
}

int main(int argc, char **argv)
{
	struct sockaddr_storage address, seen;
	socklen_t seen_len = sizeof(seen);
	char message[5000], back[5000];

	NEED(argc == 4);
	socklen_t len = address_of(argv[2], argv[3], &address);
	int fd = socket(address.ss_family, SOCK_STREAM, IPPROTO_SDP);
	NEED(fd >= 0);
	memset(message, 'm', sizeof(message));
	if (strcmp(argv[1], "serve") == 0) {
		NEED(bind(fd, (struct sockaddr *)&address, len) == 0);
		NEED(listen(fd, 5) == 0);
		puts("listens");
		fflush(stdout);
		int connection = accept4(fd, NULL, NULL, SOCK_CLOEXEC);
		NEED(connection >= 0);
		NEED(getpeername(connection, (struct sockaddr *)&seen, &seen_len) == 0);
		say("peer", &seen);
		NEED(recv(connection, back, sizeof(back), MSG_WAITALL) == sizeof(back));
		NEED(send(connection, back, sizeof(back), 0) == sizeof(back));
		NEED(recv(connection, back, sizeof(back), 0) == 0);
		return 0;
	}
	int ends = epoll_create1(EPOLL_CLOEXEC), error = 0;
	socklen_t error_len = sizeof(error);
	struct epoll_event event = {.events = EPOLLOUT};
	NEED(ends >= 0);
	NEED(nonblocking(fd, 1) == 0);
	NEED(connect(fd, (struct sockaddr *)&address, len) == 0 || errno == EINPROGRESS);
	NEED(epoll_ctl(ends, EPOLL_CTL_ADD, fd, &event) == 0);
	NEED(epoll_wait(ends, &event, 1, 30000) == 1);
	NEED(getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &error_len) == 0);
	errno = error;
	NEED(error == 0);
	NEED(getpeername(fd, (struct sockaddr *)&seen, &seen_len) == 0);
	say("connected", &seen);
	NEED(nonblocking(fd, 0) == 0);
	NEED(send(fd, message, sizeof(message), 0) == sizeof(message));
	NEED(recv(fd, back, sizeof(back), MSG_WAITALL) == sizeof(back));
	NEED(memcmp(message, back, sizeof(back)) == 0);
	puts("right");
	return close(fd);
}
