/*
 * short_reads.c - an edge-triggered reader that stops at each short read, as epoll(7) allows it ("Questions and answers" 9),
 * of connections whose bytes go from TCP to the ring in their midst.
 *
 * usage: short_reads ROUNDS: prints the short reads of all, or where one hung.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define QUIET_MS 5000 /* an edge that has not come by then does not come */
#define MESSAGES 20   /* of one byte, until the connection is worth a channel */
#define PIECE_MAX 90000
#define TOTAL_MAX 3000000

static void check(int holds, const char *what)
{
	if (holds)
		return;
	perror(what);
	exit(1);
}

static uint32_t dice(void)
{
	static uint64_t state = 88172645463325252ull;

	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return (uint32_t)(state >> 16);
}

static void write_all(const struct sockaddr_in *to, size_t total)
{
	static char bytes[PIECE_MAX];
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	char last = 0;

	check(connect(fd, (const struct sockaddr *)to, sizeof(*to)) == 0, "connect");
	for (int i = 0; i < MESSAGES; i++) {
		check(send(fd, bytes, 1, 0) == 1, "send");
		usleep(dice() % 800);
		recv(fd, bytes, 1, MSG_DONTWAIT);
	}
	for (size_t sent = MESSAGES; sent < total;) {
		size_t len = 1 + dice() % PIECE_MAX;
		ssize_t n = send(fd, bytes, len < total - sent ? len : total - sent, 0);
		check(n > 0, "send");
		sent += (size_t)n;
	}
	while (last != 'k')
		check(recv(fd, &last, 1, 0) == 1, "recv");
}

/* The number of short reads. */
static unsigned long read_all(int fd, size_t total)
{
	static char bytes[65536];
	struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP | EPOLLET};
	int set = epoll_create1(0);
	unsigned long found = 0;
	size_t got = 0;

	fcntl(fd, F_SETFL, O_NONBLOCK);
	check(epoll_ctl(set, EPOLL_CTL_ADD, fd, &event) == 0, "epoll_ctl");
	for (int turn = 0; got < total; turn++) {
		if (epoll_wait(set, &event, 1, QUIET_MS) != 1) {
			printf("hung after %zu of %zu\n", got, total);
			exit(1);
		}
		if (turn < 4)
			check(send(fd, "a", 1, 0) == 1, "send");
		ssize_t n = sizeof(bytes);
		while (n == sizeof(bytes)) {
			n = recv(fd, bytes, sizeof(bytes), 0);
			check(n > 0 || (n < 0 && errno == EAGAIN), "recv");
			got += n > 0 ? (size_t)n : 0;
		}
		found += n > 0;
		if (dice() % 8 == 0)
			usleep(dice() % 2000);
	}
	check(send(fd, "k", 1, 0) == 1, "send");
	close(set);
	return found;
}

int main(int argc, char **argv)
{
	int rounds = argc == 2 ? atoi(argv[1]) : 1, status;
	unsigned long found = 0;

	while (rounds--) {
		struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
		socklen_t len = sizeof(address);
		size_t total = MESSAGES + dice() % TOTAL_MAX;
		int listener = socket(AF_INET, SOCK_STREAM, 0);

		check(listen(listener, 1) == 0 && getsockname(listener, (struct sockaddr *)&address, &len) == 0, "listen");
		address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
		pid_t writer = fork();
		if (writer == 0) {
			close(listener);
			write_all(&address, total);
			_exit(0);
		}
		int fd = accept(listener, NULL, NULL);
		check(fd >= 0, "accept");
		found += read_all(fd, total);
		close(fd);
		close(listener);
		check(waitpid(writer, &status, 0) == writer && status == 0, "writer");
	}
	printf("short reads %lu\n", found);
}
