/*
 * Idle connections: -n of them are made and used for -w seconds, a group after the other, and then nothing happens. The
 * server and the client both sit in epoll_wait with all of them, as servers do. Who runs this reads their CPU time and memory.
 * A line to the client has it use them all once more: some may have been idle before both ends were ready for a ring.
 */
#include "bench.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

enum {
	EVENTS = 256,
	BURST = 4,  /* exchanges in a row on a connection */
	GROUP = 64, /* connections that are in use at a time, as if the others were idle already */
};

static void watch(int epoll_fd, int fd)
{
	struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};

	if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event))
		bench_fail(fd == STDIN_FILENO ? "standard input must be a pipe or a terminal" : "EPOLL_CTL_ADD");
}

static int make_epoll(void)
{
	int epoll_fd = epoll_create1(EPOLL_CLOEXEC);

	if (epoll_fd < 0)
		bench_fail("epoll_create1");
	return epoll_fd;
}

static int wait_events(int epoll_fd, struct epoll_event *events)
{
	int count;

	do {
		count = epoll_wait(epoll_fd, events, EVENTS, -1);
	} while (count < 0 && errno == EINTR);
	if (count < 0)
		bench_fail("epoll_wait");
	return count;
}

static _Noreturn void serve(const struct bench_options *options)
{
	struct epoll_event events[EVENTS];
	unsigned char *message = bench_alloc(1, options->size);
	int listener = bench_listen(options);
	int epoll_fd = make_epoll();

	watch(epoll_fd, listener);
	for (;;) {
		int count = wait_events(epoll_fd, events);

		for (int i = 0; i < count; i++) {
			int fd = events[i].data.fd;

			if (fd == listener) {
				fd = bench_accept(listener);
				if (fd < 0)
					bench_fail("accept");
				watch(epoll_fd, fd);
			} else if (bench_read_all(fd, message, options->size)) {
				bench_write_all(fd, message, options->size);
			} else {
				close(fd);
			}
		}
	}
}

/* Sleeps with all connections until standard input ends, or says something: true. Nothing may arrive on a connection. */
static bool stay_idle(int epoll_fd)
{
	struct epoll_event events[EVENTS];
	char buffer[64];

	puts("holding");
	fflush(stdout);
	int count = wait_events(epoll_fd, events);

	for (int i = 0; i < count; i++)
		if (events[i].data.fd != STDIN_FILENO)
			bench_refuse("something came on an idle connection");
	return read(STDIN_FILENO, buffer, sizeof(buffer)) > 0;
}

static void exchange(int fd, unsigned char *message, uint32_t size)
{
	for (int i = 0; i < BURST; i++) {
		bench_write_all(fd, message, size);
		if (!bench_read_all(fd, message, size))
			bench_refuse("the server closed a connection");
	}
}

/* Uses the connections of a group in turn until its time is over; returns how many messages that were. */
static uint64_t use_group(const int *fds, uint32_t count, double seconds, unsigned char *message, uint32_t size)
{
	uint64_t end = bench_now_ns() + bench_seconds_ns(seconds);
	uint64_t messages = 0;

	do {
		for (uint32_t i = 0; i < count; i++, messages += BURST)
			exchange(fds[i], message, size);
	} while (bench_now_ns() < end);
	return messages;
}

static void ask(const struct bench_options *options)
{
	uint32_t connections = options->connections;
	unsigned char *message = bench_alloc(1, options->size);
	int *fds = bench_alloc(connections, sizeof(*fds));
	int epoll_fd = make_epoll();
	uint64_t messages = 0, elapsed = 0, began = bench_now_ns();

	for (uint32_t i = 0; i < connections; i++) {
		fds[i] = bench_connect(INADDR_LOOPBACK, options->port);
		watch(epoll_fd, fds[i]);
	}
	watch(epoll_fd, STDIN_FILENO);
	do {
		for (uint32_t first = 0; first < connections; first += GROUP) {
			uint32_t count = connections - first < GROUP ? connections - first : GROUP;
			double share_s = options->warmup_s * count / connections;

			messages += use_group(fds + first, count, share_s, message, options->size);
		}
		elapsed += bench_now_ns() - began;
	} while (stay_idle(epoll_fd) && (began = bench_now_ns()));
	if (connections)
		bench_report("idle", options, messages, elapsed, NULL);
	for (uint32_t i = 0; i < connections; i++)
		close(fds[i]);
	free(fds);
	free(message);
	close(epoll_fd);
}

int main(int argc, char **argv)
{
	struct bench_options options = bench_options(
		argc, argv,
		(struct bench_options){
			.mode = BENCH_EPOLL, .size = 64, .connections = 100, .addresses = 1, .warmup_s = 1, .measure_s = 1});

	bench_raise_file_limit();
	if (options.server)
		serve(&options);
	ask(&options);
	return 0;
}
