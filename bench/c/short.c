/*
 * Short connections: connect, send one message, read the answer, close. The client closes first and so keeps the ports in
 * TIME_WAIT; -a N spreads the connections over 127.0.0.1 ... 127.0.0.N, so that no run is slowed by the ports of the last.
 */
#include "bench.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static _Noreturn void serve(const struct bench_options *options)
{
	int listener = bench_listen(options);
	unsigned char *message = bench_alloc(1, options->size);

	for (;;) {
		int fd = bench_accept(listener);

		if (fd < 0)
			bench_fail("accept");
		while (bench_read_all(fd, message, options->size))
			bench_write_all(fd, message, options->size);
		close(fd);
	}
}

static void exchange(const struct bench_options *options, unsigned char *message, uint64_t number)
{
	uint64_t found;
	int fd = bench_connect(INADDR_LOOPBACK + (uint32_t)(number % options->addresses), options->port);

	memcpy(message, &number, sizeof(number));
	bench_write_all(fd, message, options->size);
	if (!bench_read_all(fd, message, options->size))
		bench_refuse("the server closed the connection without an answer");
	memcpy(&found, message, sizeof(found));
	if (found != number)
		bench_refuse("the answer is not what was sent");
	close(fd);
}

static void ask(const struct bench_options *options)
{
	struct bench_hist *hist = bench_alloc(1, sizeof(*hist));
	unsigned char *message = bench_alloc(1, options->size);
	uint64_t start = bench_now_ns() + bench_seconds_ns(options->warmup_s);
	uint64_t end = options->count ? UINT64_MAX : start + bench_seconds_ns(options->measure_s);
	uint64_t most = options->count ? options->count : UINT64_MAX;
	uint64_t now = bench_now_ns(), began = 0, number = 0;

	while (now < end && hist->count < most) {
		uint64_t before = now;

		exchange(options, message, number++);
		now = bench_now_ns();
		if (before < start)
			continue;
		if (!began)
			began = before;
		bench_hist_add(hist, now - before);
	}
	bench_hold(options);
	bench_report("short", options, hist->count, now - began, hist);
	free(message);
	free(hist);
}

int main(int argc, char **argv)
{
	struct bench_options options = bench_options(
		argc, argv,
		(struct bench_options){.size = 64, .connections = 1, .addresses = 1, .warmup_s = 0.2, .measure_s = 1});

	if (options.server)
		serve(&options);
	ask(&options);
	return 0;
}
