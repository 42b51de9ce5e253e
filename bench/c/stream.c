/*
 * The one-way stream: the client sends messages of one size, the server reads as much as it gets. The byte at offset N of
 * the stream is that at N % PERIOD of a fixed random pattern, so the server can tell a lost, doubled or moved byte: it
 * looks at both ends of everything it reads, or at all of it with -V. The client counts what it sent in the window; the
 * buffers are full when the window begins, so what leaves them in it is as much as what enters.
 */
#include "bench.h"

#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
	PERIOD = 4093,         /* prime: no message or buffer size divides it; both fit the first-level cache */
	READ_SIZE = 256 << 10, /* bytes the server asks for at once */
	SAMPLE = 32,           /* bytes looked at on either end of a read */
};

/* What the server answers when the stream has ended. */
struct verdict {
	uint64_t bytes;
	uint64_t wrong_reads;
	uint64_t reads;
};

/* `size` bytes of the pattern from any offset are found at pattern + offset % PERIOD. */
static unsigned char *make_pattern(size_t size)
{
	unsigned char *pattern = bench_alloc(PERIOD + size, 1);
	uint64_t state = 88172645463325252u;

	for (size_t i = 0; i < PERIOD; i++) {
		state ^= state << 13;
		state ^= state >> 7;
		state ^= state << 17;
		pattern[i] = (unsigned char)(state >> 32);
	}
	for (size_t i = 0; i < size; i++)
		pattern[PERIOD + i] = pattern[i % PERIOD];
	return pattern;
}

static bool as_sent(const unsigned char *pattern, uint64_t offset, const unsigned char *data, size_t size, bool all)
{
	if (all || size <= 2 * SAMPLE)
		return !memcmp(data, pattern + offset % PERIOD, size);
	return !memcmp(data, pattern + offset % PERIOD, SAMPLE) &&
	       !memcmp(data + size - SAMPLE, pattern + (offset + size - SAMPLE) % PERIOD, SAMPLE);
}

static struct verdict receive(int fd, const unsigned char *pattern, unsigned char *buffer, bool verify)
{
	struct verdict verdict = {0};

	for (;;) {
		ssize_t got = recv(fd, buffer, READ_SIZE, 0);

		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0)
			bench_fail("recv");
		if (!got)
			return verdict;
		verdict.wrong_reads += !as_sent(pattern, verdict.bytes, buffer, (size_t)got, verify);
		verdict.bytes += (uint64_t)got;
		verdict.reads++;
	}
}

static _Noreturn void serve(const struct bench_options *options)
{
	int listener = bench_listen(options);
	unsigned char *pattern = make_pattern(READ_SIZE);
	unsigned char *buffer = bench_alloc(1, READ_SIZE);

	for (;;) {
		int fd = bench_accept(listener);

		if (fd < 0)
			bench_fail("accept");
		struct verdict verdict = receive(fd, pattern, buffer, options->verify);

		bench_write_all(fd, &verdict, sizeof(verdict));
		close(fd);
	}
}

struct sent {
	uint64_t messages;
	uint64_t measured;
	uint64_t elapsed_ns;
};

static struct sent stream(const struct bench_options *options, int fd, const unsigned char *pattern)
{
	struct sent sent = {0};
	uint64_t look_every = options->size < 65536 ? 65536 / options->size : 1; /* a clock costs as much as a message */
	uint64_t start = bench_now_ns() + bench_seconds_ns(options->warmup_s);
	uint64_t end = options->count ? UINT64_MAX : start + bench_seconds_ns(options->measure_s);
	uint64_t most = options->count ? options->count : UINT64_MAX;
	uint64_t now = bench_now_ns(), began = 0, before = 0;

	for (; now < end && (!began || sent.messages - before < most); now = bench_now_ns()) {
		if (!began && now >= start) {
			began = now;
			before = sent.messages;
		}
		for (uint64_t i = 0; i < look_every; i++, sent.messages++)
			bench_write_all(fd, pattern + sent.messages * options->size % PERIOD, options->size);
	}
	if (began) {
		sent.measured = sent.messages - before;
		sent.elapsed_ns = now - began;
	}
	return sent;
}

static void check(const struct verdict *verdict, uint64_t bytes)
{
	if (verdict->bytes != bytes)
		bench_refuse("%llu bytes were sent, %llu arrived", (unsigned long long)bytes,
		             (unsigned long long)verdict->bytes);
	if (verdict->wrong_reads)
		bench_refuse("%llu of %llu reads did not hold what was sent", (unsigned long long)verdict->wrong_reads,
		             (unsigned long long)verdict->reads);
}

static void ask(const struct bench_options *options)
{
	unsigned char *pattern = make_pattern(options->size);
	int fd = bench_connect(options->host, options->port);
	struct sent sent = stream(options, fd, pattern);
	struct verdict verdict;

	bench_hold(options);
	if (shutdown(fd, SHUT_WR))
		bench_fail("shutdown");
	/* The peer of the benchmarks, BPF's sockmap: the acknowledged FIN wakes a blocking recv, which returns EAGAIN. */
	while (poll(&(struct pollfd){.fd = fd, .events = POLLIN}, 1, -1) < 0 && errno == EINTR)
		continue;
	if (!bench_read_all(fd, &verdict, sizeof(verdict)))
		bench_refuse("the server closed the connection without its verdict");
	check(&verdict, sent.messages * options->size);
	bench_report("stream", options, sent.measured, sent.elapsed_ns, NULL);
	close(fd);
	free(pattern);
}

int main(int argc, char **argv)
{
	struct bench_options options = bench_options(
		argc, argv,
		(struct bench_options){.size = 64, .connections = 1, .addresses = 1, .warmup_s = 0.3, .measure_s = 1});

	if (options.server)
		serve(&options);
	ask(&options);
	return 0;
}
