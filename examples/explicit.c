/*
 * explicit.c - an echo over explicit sockets.
 *
 *   cc -I"$(python3 -c 'import sidestep; print(sidestep.include_dir())')" -o explicit explicit.c
 *   sidestep run -- ./explicit serve 7007 &
 *   sidestep run -- ./explicit talk 7007 100000
 *   ./explicit talk 7007 10                        # without sidestep: over TCP, from the same accept queue
 *
 * The server takes whoever comes, by whatever way; the client wants an offload protocol and takes TCP where there is none.
 */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "sidestep.h"

enum { CLIENTS_MAX = 63 };

static int fail(const char *what)
{
	perror(what);
	return 1;
}

/* Addresses keep the family AF_INET, so that they serve without sidestep as well. */
static struct sockaddr_in loopback(const char *port)
{
	return (struct sockaddr_in){
		.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(port)), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
}

/* Echoes one piece; 0 at the end of the connection. */
static int echo(int fd)
{
	char bytes[4096];
	ssize_t got = read(fd, bytes, sizeof bytes);

	for (ssize_t sent = 0, n; got > 0 && sent < got; sent += n)
		if ((n = write(fd, bytes + sent, (size_t)(got - sent))) < 0)
			return 0;
	return got > 0;
}

static int serve(const char *port)
{
	struct sockaddr_in address = loopback(port);
	socklen_t len = sizeof address;
	struct pollfd items[1 + CLIENTS_MAX] = {{.events = POLLIN}};
	nfds_t count = 1;
	int listener = sidestep_socket(AF_INET_OFFLOAD, SOCK_STREAM, IPPROTO_OFFLOAD_ANY);

	if (listener < 0 || bind(listener, (struct sockaddr *)&address, len) < 0 || listen(listener, 16) < 0 ||
	    getsockname(listener, (struct sockaddr *)&address, &len) < 0)
		return fail("cannot serve");
	printf("port %d\n", ntohs(address.sin_port));
	fflush(stdout);
	items[0].fd = listener;
	while (poll(items, count, -1) >= 0) {
		for (nfds_t i = count; i-- > 1;)
			if (items[i].revents && !echo(items[i].fd)) {
				close(items[i].fd);
				items[i] = items[--count];
			}
		if (items[0].revents && count <= CLIENTS_MAX) {
			len = sizeof address;
			int client = accept(listener, (struct sockaddr *)&address, &len);
			if (client < 0)
				return fail("cannot accept");
			items[count++] = (struct pollfd){.fd = client, .events = POLLIN};
			printf("accepted %d\n", ntohs(address.sin_port));
			fflush(stdout);
		}
	}
	return fail("poll");
}

static int talk(const char *port, long rounds)
{
	struct sockaddr_in address = loopback(port);
	socklen_t len = sizeof address;
	char answer[8];
	int fd = sidestep_socket(AF_INET_OFFLOAD, SOCK_STREAM, IPPROTO_OFFLOAD_ANY);

	if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address) < 0 ||
	    getsockname(fd, (struct sockaddr *)&address, &len) < 0)
		return fail("cannot connect");
	printf("port %d\n", ntohs(address.sin_port));
	fflush(stdout);
	for (long i = 0; i < rounds; i++)
		if (send(fd, "question", 8, 0) != 8 || recv(fd, answer, 8, MSG_WAITALL) != 8 || memcmp(answer, "question", 8))
			return fail("wrong answer");
	printf("%ld rounds\n", rounds);
	return 0;
}

int main(int argc, char **argv)
{
	if (argc == 3 && !strcmp(argv[1], "serve"))
		return serve(argv[2]);
	if (argc == 4 && !strcmp(argv[1], "talk"))
		return talk(argv[2], atol(argv[3]));
	fprintf(stderr, "usage: %s serve PORT | talk PORT ROUNDS\n", argv[0]);
	return 2;
}
