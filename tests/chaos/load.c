/* Two programs under load, every byte of which is accounted for.
 *
 *   load serve LEDGER [ADDRESS]                prints its port, serves until stdin ends
 *   load drive LEDGER PORT SEED THREADS EACH MOST [ADDRESS]   THREADS threads make EACH connections, of at most MOST
 *                                              bytes a direction; when stdin ends, no more are begun
 *   load echo                                  prints its port, serves until it is killed
 *   load calls PORT                            makes and ends connections to it as stdin says
 *
 * The ledger is a file shared by both and by the test: for each connection and side, the bytes handed to send(), the bytes
 * that send() took, the bytes received, and how the stream ended. It is kept up to date while bytes move, so that it is
 * right when a program is killed. Bytes follow a pattern by offset, and every one received is checked.
 */
#include "../support/pattern.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

enum { CONNECTIONS_MAX = 1 << 13, ENDED = 1, PATIENCE_MS = 60000, PAUSE_US = 20000 };

struct side { /* 48 bytes; read by the test */
	_Atomic uint64_t submitted, taken, received;
	_Atomic uint32_t wrong;      /* a byte was not the expected one */
	_Atomic uint32_t read_end;   /* ENDED: end of stream; else the errno that recv met */
	_Atomic uint32_t write_end;  /* ENDED: all was sent; else the errno that send met */
	_Atomic uint32_t done;
	_Atomic uint64_t goal;      /* bytes this side means to send */
};

struct entry {
	struct side driver, server;
};

struct hello { /* what the driver says first */
	uint32_t id, seed;
	uint64_t to_server, to_driver;
};

static struct entry *ledger;
static const char *address_text = "127.0.0.1";

#define NEED(condition) ((condition) ? (void)0 : need_failed(#condition, __LINE__))

static void need_failed(const char *text, int line)
{
	fprintf(stderr, "load:%d: %s: %s\n", line, text, strerror(errno));
	exit(3);
}

static uint32_t next(uint32_t *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 17;
	*state ^= *state << 5;
	return *state;
}

struct stream {
	int fd;
	struct side *side;
	uint32_t key_out, key_in, random_out, random_in;
	bool small; /* mostly short messages */
	uint64_t out_left;
};

static size_t piece(uint32_t *random, bool small)
{
	uint32_t choice = next(random);
	if (choice % 8 == 0)
		return 1 + choice / 8 % 60000;
	return 1 + choice / 8 % (small ? 120 : 9000);
}

/* Sends one piece; false when there is nothing more to do in this direction, true with errno EAGAIN for "not now". */
static bool send_piece(struct stream *stream, int flags)
{
	static _Thread_local uint8_t data[65536];
	size_t len = piece(&stream->random_out, stream->small);
	uint64_t at = stream->side->taken;
	errno = 0;
	if (stream->out_left == 0)
		return false;
	len = len < stream->out_left ? len : stream->out_left;
	fill_pattern(stream->key_out, at, data, len);
	if (at + len > stream->side->submitted)
		stream->side->submitted = at + len;
	ssize_t wrote = send(stream->fd, data, len, flags | MSG_NOSIGNAL);
	if (wrote < 0 && (errno == EAGAIN || errno == EINTR))
		return true;
	if (wrote < 0) {
		stream->side->write_end = (uint32_t)errno;
		return false;
	}
	errno = 0;
	stream->side->taken = at + (uint64_t)wrote;
	stream->out_left -= (uint64_t)wrote;
	if (stream->out_left == 0) {
		stream->side->write_end = ENDED;
		shutdown(stream->fd, SHUT_WR);
		errno = 0;
		return false;
	}
	return true;
}

static bool recv_piece(struct stream *stream, int flags)
{
	static _Thread_local uint8_t data[65536];
	uint64_t at = stream->side->received;
	errno = 0;
	ssize_t got = recv(stream->fd, data, piece(&stream->random_in, stream->small), flags);
	if (got < 0 && (errno == EAGAIN || errno == EINTR))
		return true;
	if (got <= 0) {
		stream->side->read_end = got ? (uint32_t)errno : ENDED;
		return false;
	}
	errno = 0;
	stream->side->wrong |= !check_pattern(stream->key_in, at, data, (size_t)got);
	stream->side->received = at + (uint64_t)got;
	return true;
}

static void *send_all(void *argument)
{
	while (send_piece(argument, 0))
		;
	return NULL;
}

static void run_threads(struct stream *stream)
{
	pthread_t sender;
	NEED(pthread_create(&sender, NULL, send_all, stream) == 0);
	while (recv_piece(stream, 0))
		;
	if (stream->side->read_end != ENDED)
		shutdown(stream->fd, SHUT_RDWR); /* the sender may be waiting for room */
	NEED(pthread_join(sender, NULL) == 0);
}

static void run_poll(struct stream *stream)
{
	bool out = stream->out_left > 0, in = true;
	while (out || in) {
		struct pollfd item = {.fd = stream->fd, .events = (short)((out ? POLLOUT : 0) | (in ? POLLIN : 0))};
		int ready = poll(&item, 1, PATIENCE_MS);
		NEED(ready == 1 || (ready < 0 && errno == EINTR));
		if (in && item.revents & (POLLIN | POLLHUP | POLLERR))
			in = recv_piece(stream, MSG_DONTWAIT);
		if (out && item.revents & (POLLOUT | POLLHUP | POLLERR))
			out = send_piece(stream, MSG_DONTWAIT);
	}
}

/* A direction that has ended stays ready, and a set by levels would report it again and again. */
static uint32_t wanted(bool in, bool out)
{
	return (in ? EPOLLIN : 0u) | (out ? EPOLLOUT : 0u);
}

static void run_epoll(struct stream *stream, bool edge)
{
	bool out = stream->out_left > 0, in = true;
	int set = epoll_create1(EPOLL_CLOEXEC);
	struct epoll_event event = {.events = wanted(in, out) | (edge ? (uint32_t)EPOLLET : 0u), .data.ptr = stream};
	NEED(set >= 0 && epoll_ctl(set, EPOLL_CTL_ADD, stream->fd, &event) == 0);
	while (out || in) {
		int ready = epoll_wait(set, &event, 1, PATIENCE_MS);
		NEED(ready == 1 || (ready < 0 && errno == EINTR));
		if (ready < 0)
			continue;
		NEED(event.data.ptr == stream);
		uint32_t before = wanted(in, out);
		if (event.events & (EPOLLIN | EPOLLHUP | EPOLLERR))
			do
				in = in && recv_piece(stream, MSG_DONTWAIT);
			while (edge && in && errno != EAGAIN);
		if (event.events & (EPOLLOUT | EPOLLHUP | EPOLLERR))
			do
				out = out && send_piece(stream, MSG_DONTWAIT);
			while (edge && out && errno != EAGAIN);
		if (!edge && wanted(in, out) != before) {
			event.events = wanted(in, out);
			NEED(epoll_ctl(set, EPOLL_CTL_MOD, stream->fd, &event) == 0);
		}
	}
	close(set);
}

static void run_stream(struct stream *stream, uint32_t style)
{
	stream->side->goal = stream->out_left;
	if (stream->out_left == 0) {
		stream->side->write_end = ENDED;
		shutdown(stream->fd, SHUT_WR);
	}
	switch (style % 4) {
	case 0: run_threads(stream); break;
	case 1: run_poll(stream); break;
	default: run_epoll(stream, style % 4 == 2);
	}
	close(stream->fd);
	stream->side->done = 1;
}

/* -- the server --------------------------------------------------------------------------------------------------- */

static void *serve_one(void *argument)
{
	int fd = (int)(intptr_t)argument;
	struct hello hello;
	if (recv(fd, &hello, sizeof hello, MSG_WAITALL) != sizeof hello) {
		close(fd); /* the driver was killed before it said what it wants */
		return NULL;
	}
	NEED(hello.id < CONNECTIONS_MAX);
	struct stream stream = {.fd = fd,
	                        .side = &ledger[hello.id].server,
	                        .key_out = 2 * hello.id + 1,
	                        .key_in = 2 * hello.id,
	                        .random_out = hello.seed * 3 + 1,
	                        .random_in = hello.seed * 5 + 1,
	                        .small = hello.seed & 16,
	                        .out_left = hello.to_driver};
	run_stream(&stream, hello.seed >> 8);
	return NULL;
}

static void *accept_all(void *argument)
{
	int listener = (int)(intptr_t)argument;
	for (;;) {
		pthread_t thread;
		int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
		if (fd < 0 && (errno == EINTR || errno == ECONNABORTED))
			continue;
		NEED(fd >= 0);
		NEED(pthread_create(&thread, NULL, serve_one, (void *)(intptr_t)fd) == 0);
		NEED(pthread_detach(thread) == 0);
	}
	return NULL;
}

static struct sockaddr_in address_of(uint16_t port)
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
	NEED(inet_pton(AF_INET, address_text, &address.sin_addr) == 1);
	return address;
}

static int listen_anywhere(void)
{
	struct sockaddr_in address = address_of(0);
	socklen_t len = sizeof address;
	int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	NEED(listener >= 0 && bind(listener, (struct sockaddr *)&address, len) == 0 && listen(listener, 1024) == 0);
	NEED(getsockname(listener, (struct sockaddr *)&address, &len) == 0);
	printf("%u\n", ntohs(address.sin_port));
	NEED(fflush(stdout) == 0);
	return listener;
}

static int serve(void)
{
	char byte;
	pthread_t thread;
	int listener = listen_anywhere();
	NEED(pthread_create(&thread, NULL, accept_all, (void *)(intptr_t)listener) == 0);
	while (read(STDIN_FILENO, &byte, 1) > 0)
		;
	return 0;
}

/* -- the driver --------------------------------------------------------------------------------------------------- */

struct driver {
	pthread_t thread;
	uint16_t port;
	uint32_t first_id, count, seed, most;
};

static int connect_to(uint16_t port)
{
	struct sockaddr_in address = address_of(port);
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	NEED(fd >= 0);
	if (connect(fd, (struct sockaddr *)&address, sizeof address) < 0) {
		int error = errno;
		close(fd);
		errno = error;
		return -1;
	}
	return fd;
}

static atomic_bool enough;

static void *wait_for_enough(void *unused)
{
	char byte;
	(void)unused;
	while (read(STDIN_FILENO, &byte, 1) > 0)
		;
	enough = true;
	return NULL;
}

static void *drive_some(void *argument)
{
	struct driver *self = argument;
	for (uint32_t i = 0; i < self->count && !enough; i++) {
		uint32_t random = self->seed * 2654435761u + (self->first_id + i) * 40503u + 1;
		for (int j = 0; j < 4; j++)
			next(&random);
		struct hello hello = {.id = self->first_id + i, .seed = next(&random)};
		hello.to_server = next(&random) % 5 ? next(&random) % self->most : 0;
		hello.to_driver = next(&random) % 5 ? next(&random) % self->most : 0;
		int fd;
		while ((fd = connect_to(self->port)) < 0 && errno != ECONNREFUSED && !enough)
			usleep(PAUSE_US); /* there is no way to the server now */
		if (fd < 0)
			return NULL; /* the server is gone */
		struct side *side = &ledger[hello.id].driver;
		if (send(fd, &hello, sizeof hello, MSG_NOSIGNAL) != sizeof hello) {
			close(fd);
			continue;
		}
		struct stream stream = {.fd = fd,
		                        .side = side,
		                        .key_out = 2 * hello.id,
		                        .key_in = 2 * hello.id + 1,
		                        .random_out = hello.seed * 7 + 1,
		                        .random_in = hello.seed * 11 + 1,
		                        .small = hello.seed & 16,
		                        .out_left = hello.to_server};
		run_stream(&stream, hello.seed);
	}
	return NULL;
}

static int drive(char **words)
{
	uint32_t threads = (uint32_t)atoi(words[2]), each = (uint32_t)atoi(words[3]);
	struct driver drivers[64];
	pthread_t listener;
	NEED(pthread_create(&listener, NULL, wait_for_enough, NULL) == 0);
	NEED(threads <= 64 && threads * each <= CONNECTIONS_MAX);
	for (uint32_t i = 0; i < threads; i++) {
		drivers[i] = (struct driver){.port = (uint16_t)atoi(words[0]),
		                             .first_id = i * each,
		                             .count = each,
		                             .seed = (uint32_t)atoi(words[1]),
		                             .most = (uint32_t)atoi(words[4])};
		NEED(pthread_create(&drivers[i].thread, NULL, drive_some, &drivers[i]) == 0);
	}
	for (uint32_t i = 0; i < threads; i++)
		NEED(pthread_join(drivers[i].thread, NULL) == 0);
	return 0;
}

/* -- leaks: one program at each end, told on stdin how many connections to make next ------------------------------- */

static _Noreturn void echo(void)
{
	/* An epoll server, as servers are. */
	static uint8_t data[4096];
	int listener = listen_anywhere(), set = epoll_create1(EPOLL_CLOEXEC);
	struct epoll_event event = {.events = EPOLLIN, .data.fd = listener};
	NEED(epoll_ctl(set, EPOLL_CTL_ADD, listener, &event) == 0);
	for (;;) {
		struct epoll_event events[64];
		int count = epoll_wait(set, events, 64, -1);
		NEED(count > 0 || errno == EINTR);
		for (int i = 0; i < count; i++) {
			int fd = events[i].data.fd;
			if (fd == listener) {
				fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
				NEED(fd >= 0);
				event = (struct epoll_event){.events = EPOLLIN, .data.fd = fd};
				NEED(epoll_ctl(set, EPOLL_CTL_ADD, fd, &event) == 0);
				continue;
			}
			ssize_t got = recv(fd, data, sizeof data, 0);
			NEED(got >= 0); /* readiness is a promise */
			if (got == 0)
				close(fd);
			else
				NEED(send(fd, data, (size_t)got, 0) == got);
		}
	}
}

static void call(int fd)
{
	uint8_t out[64], in[64];
	memset(out, fd, sizeof out);
	NEED(send(fd, out, sizeof out, 0) == sizeof out);
	NEED(recv(fd, in, sizeof in, MSG_WAITALL) == sizeof in && !memcmp(in, out, sizeof in));
}

static int calls(uint16_t port)
{
	/* "short N": N connections, one call each. "open N": N connections held. "call": one call on each of them. "close" */
	static int held[65536];
	int held_count = 0;
	char line[64];
	while (fgets(line, sizeof line, stdin)) {
		int count = atoi(strchr(line, ' ') ? strchr(line, ' ') : "0");
		if (!strncmp(line, "short", 5)) {
			for (int i = 0; i < count; i++) {
				int fd = connect_to(port);
				NEED(fd >= 0);
				call(fd);
				NEED(close(fd) == 0);
			}
		} else if (!strncmp(line, "open", 4)) {
			for (int i = 0; i < count; i++)
				NEED((held[held_count++] = connect_to(port)) >= 0);
		} else if (!strncmp(line, "call", 4)) {
			for (int i = 0; i < held_count; i++)
				call(held[i]);
		} else {
			while (held_count > 0)
				NEED(close(held[--held_count]) == 0);
		}
		printf("done\n");
		NEED(fflush(stdout) == 0);
	}
	return 0;
}

int main(int argc, char **argv)
{
	signal(SIGPIPE, SIG_IGN);
	if (argc == 2 && !strcmp(argv[1], "echo"))
		echo();
	if (argc == 3 && !strcmp(argv[1], "calls"))
		return calls((uint16_t)atoi(argv[2]));
	NEED(argc >= 3);
	int fd = open(argv[2], O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	size_t len = sizeof(struct entry) * CONNECTIONS_MAX;
	NEED(fd >= 0 && ftruncate(fd, (off_t)len) == 0);
	ledger = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	NEED(ledger != MAP_FAILED && close(fd) == 0);
	if (argc == 4 || argc == 9)
		address_text = argv[argc - 1];
	if ((argc == 3 || argc == 4) && !strcmp(argv[1], "serve"))
		return serve();
	NEED((argc == 8 || argc == 9) && !strcmp(argv[1], "drive"));
	return drive(argv + 3);
}
