/*
 * Calls that no connection has a part in: what they cost with and without a shim before them. One round reads a byte of
 * /dev/zero, writes and reads a pipe, sends and receives a datagram; polls, of which a shim has to look at each descriptor;
 * and makes calls that it has no part in. Their least cost of many rounds is reported, each by itself.
 */
#include "bench.h"

#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { ROUNDS = 100, CALLS = 5 };

static void need(bool held, const char *what)
{
	if (!held)
		bench_fail(what);
}

struct ends {
	int zero, pipe[2], sockets[2];
	size_t size;
	unsigned char *data;
};

static void calls(const struct ends *ends)
{
	ssize_t size = (ssize_t)ends->size;

	need(read(ends->zero, ends->data, 1) == 1, "read");
	need(write(ends->pipe[1], ends->data, ends->size) == size && read(ends->pipe[0], ends->data, ends->size) == size,
	     "pipe");
	need(send(ends->sockets[0], ends->data, ends->size, 0) == size, "send");
	need(recv(ends->sockets[1], ends->data, ends->size, 0) == size, "recv");
}

static void polls(const struct ends *ends)
{
	struct pollfd item = {.fd = ends->pipe[0], .events = POLLIN};

	need(poll(&item, 1, 0) == 0, "poll");
}

static void others(const struct ends *ends)
{
	(void)ends;
	need(syscall(SYS_getppid) > 0, "getppid");
}

/* Adds what one call costs; the least of all is what it costs where nothing else ran. */
static uint64_t measure(void (*what)(const struct ends *), const struct ends *ends, uint64_t each, uint64_t *least)
{
	uint64_t before = bench_now_ns();

	for (int i = 0; i < ROUNDS; i++)
		what(ends);
	uint64_t now = bench_now_ns(), took = (now - before) / (ROUNDS * each);
	if (took < *least)
		*least = took;
	return now;
}

int main(int argc, char **argv)
{
	struct bench_options options = bench_options(
		argc, argv,
		(struct bench_options){.size = 64, .connections = 1, .addresses = 1, .warmup_s = 0.2, .measure_s = 1});
	struct ends ends = {.size = options.size, .data = bench_alloc(1, options.size)};
	uint64_t call_ns = UINT64_MAX, poll_ns = UINT64_MAX, other_ns = UINT64_MAX;

	ends.zero = open("/dev/zero", O_RDONLY | O_CLOEXEC);
	need(ends.zero >= 0 && pipe(ends.pipe) == 0 && socketpair(AF_UNIX, SOCK_DGRAM, 0, ends.sockets) == 0,
	     "descriptors");
	uint64_t end = bench_now_ns() + bench_seconds_ns(options.warmup_s) + bench_seconds_ns(options.measure_s);
	do {
		measure(calls, &ends, CALLS, &call_ns);
		measure(polls, &ends, 1, &poll_ns);
	} while (measure(others, &ends, 1, &other_ns) < end);
	printf("{\"call_ns\": %llu, \"poll_ns\": %llu, \"other_ns\": %llu}\n", (unsigned long long)call_ns,
	       (unsigned long long)poll_ns, (unsigned long long)other_ns);
	free(ends.data);
	return 0;
}
