/*
 * promised.c - an echo of one connection that is told, in between, to take the kernel's word: what it was told to be there
 * it reads, or sends, without a bound. Prints "listening PORT"; after the line HOW on its standard input it asks by that
 * until it is told yes, prints "promised", waits for one more line, makes the blocking call, and prints its result or errno.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

static bool asked(const char *how, int fd, short events)
{
	struct epoll_event event = {.events = (uint32_t)events};
	struct pollfd one = {.fd = fd, .events = events};
	int count = 0;
	char byte;

	if (strstr(how, "epoll")) {
		int set = epoll_create1(0);
		bool yes = epoll_ctl(set, EPOLL_CTL_ADD, fd, &event) == 0 && epoll_wait(set, &event, 1, -1) == 1;
		close(set);
		return yes;
	}
	if (strstr(how, "count"))
		return ioctl(fd, FIONREAD, &count) == 0 && count > 0;
	if (strstr(how, "peek"))
		return recv(fd, &byte, 1, MSG_PEEK) == 1;
	return poll(&one, 1, -1) == 1;
}

static void say(const char *what, long number)
{
	printf("%s %ld\n", what, number);
	fflush(stdout);
}

static void trust(const char *how, int fd)
{
	bool sends = strstr(how, "send");
	char line[64], bytes[64] = {0};

	while (sends && send(fd, bytes, sizeof(bytes), MSG_DONTWAIT) > 0)
		;
	say("asking", 0);
	while (!asked(how, fd, sends ? POLLOUT : POLLIN))
		;
	say("promised", 0);
	if (!fgets(line, sizeof(line), stdin))
		return;
	ssize_t done = sends ? send(fd, bytes, sizeof(bytes), MSG_NOSIGNAL) : recv(fd, bytes, sizeof(bytes), 0);
	say("result", done < 0 ? -errno : done);
}

int main(void)
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof(address);
	int listener = socket(AF_INET, SOCK_STREAM, 0);
	char bytes[4096];

	/* so little that it waits for its reader, and for nothing behind the ring */
	if (listener < 0 || setsockopt(listener, SOL_SOCKET, SO_SNDBUF, &(int){1}, sizeof(int)) < 0 ||
	    bind(listener, (struct sockaddr *)&address, len) < 0 || listen(listener, 64) < 0 ||
	    getsockname(listener, (struct sockaddr *)&address, &len) < 0) {
		perror("listen");
		return 1;
	}
	say("listening", ntohs(address.sin_port));
	struct pollfd both[] = {{.fd = accept(listener, NULL, NULL), .events = POLLIN}, {.fd = 0, .events = POLLIN}};
	for (;;) {
		if (poll(both, 2, -1) < 0)
			return 1;
		if (both[1].revents) {
			if (!fgets(bytes, sizeof(bytes), stdin))
				return 0;
			trust(bytes, both[0].fd);
			return 0;
		}
		ssize_t got = recv(both[0].fd, bytes, sizeof(bytes), 0);
		if (got <= 0 || send(both[0].fd, bytes, (size_t)got, 0) != got)
			return 1;
	}
}
