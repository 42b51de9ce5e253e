/*
 * Calls on descriptors that are no TCP connections: what they cost with and without a shim before them. One round reads a
 * byte of /dev/zero, writes and reads a pipe, sends and receives a datagram, and polls; a histogram entry is a hundred
 * rounds.
 */
#include "bench.h"

#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

enum { ROUNDS = 100, CALLS = 6 };

static void need(bool held, const char *what)
{
	if (!held)
		bench_fail(what);
}

int main(int argc, char **argv)
{
	struct bench_options options = bench_options(argc, argv, (struct bench_options){
		.size = 64, .connections = 1, .addresses = 1, .warmup_s = 0.2, .measure_s = 1});
	struct bench_hist *hist = bench_alloc(1, sizeof(*hist));
	unsigned char *data = bench_alloc(1, options.size);
	int zero = open("/dev/zero", O_RDONLY | O_CLOEXEC), ends[2], sockets[2];
	ssize_t size = (ssize_t)options.size;

	need(zero >= 0 && pipe(ends) == 0 && socketpair(AF_UNIX, SOCK_DGRAM, 0, sockets) == 0, "descriptors");
	struct pollfd item = {.fd = ends[0], .events = POLLIN};
	uint64_t start = bench_now_ns() + bench_seconds_ns(options.warmup_s);
	uint64_t end = start + bench_seconds_ns(options.measure_s);
	uint64_t now = bench_now_ns(), began = 0;

	while (now < end) {
		uint64_t before = now;

		for (int i = 0; i < ROUNDS; i++) {
			need(read(zero, data, 1) == 1, "read");
			need(write(ends[1], data, options.size) == size && read(ends[0], data, options.size) == size, "pipe");
			need(send(sockets[0], data, options.size, 0) == size, "send");
			need(recv(sockets[1], data, options.size, 0) == size, "recv");
			need(poll(&item, 1, 0) == 0, "poll");
		}
		now = bench_now_ns();
		if (before < start)
			continue;
		if (!began)
			began = before;
		bench_hist_add(hist, (now - before) / (ROUNDS * CALLS));
	}
	bench_report("untouched", &options, hist->count * ROUNDS * CALLS, now - began, hist);
	free(data);
	free(hist);
	return 0;
}
