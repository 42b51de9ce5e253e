/*
 * What the benchmark programs share: a TCP socket opened as most programs open it, whole reads and writes, a clock and a
 * histogram. The programs are ordinary TCP programs; nothing here knows what carries the bytes.
 *
 * Talk between a program and who runs it: a server prints "listening PORT"; a client prints one JSON object when it is
 * done. With -H a client prints "holding" after measuring and keeps its connections open until standard input ends.
 */
#ifndef BENCH_H
#define BENCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

enum {
	BENCH_SIZE_MAX = 16 << 20,  /* bytes a message */
	BENCH_CONNECTIONS_MAX = 60000,
	BENCH_HIST_SUB_BITS = 7,    /* 128 steps an octave: under 1 % error */
	BENCH_HIST_BUCKETS = (64 - BENCH_HIST_SUB_BITS + 1) << BENCH_HIST_SUB_BITS,
};

/* How a program waits for its sockets. */
enum bench_mode { BENCH_BLOCKING, BENCH_POLL, BENCH_EPOLL };

struct bench_options {
	bool server;
	bool hold;
	bool edge;              /* epoll: edge-triggered */
	bool verify;            /* check every byte, not a sample */
	enum bench_mode mode;
	uint16_t port;          /* server: 0 picks one */
	uint32_t host;          /* where it is, in host order; 127.0.0.1 if none is given */
	uint32_t size;          /* bytes a message */
	uint32_t connections;
	uint32_t addresses;     /* short: rotate over 127.0.0.1 ... 127.0.0.N */
	double warmup_s;
	double measure_s;
	double pause_s;         /* blocking ping-pong: before each measured message */
	uint64_t count;         /* messages; 0: as many as fit in measure_s */
};

struct bench_hist {
	uint64_t count;
	uint64_t sum_ns;
	uint64_t min_ns;
	uint64_t max_ns;
	uint64_t bucket[BENCH_HIST_BUCKETS];
};

/*
 * Reads "server|client [-m MODE] [-e] [-V] [-H] [-h HOST] [-p PORT] [-s SIZE] [-n N] [-a N] [-w S] [-S AT] [-t S]
 * [-r PAUSE] [-c COUNT]". -S is when to measure, in seconds of CLOCK_MONOTONIC: programs given the same one measure together.
 */
struct bench_options bench_options(int argc, char **argv, struct bench_options defaults);

_Noreturn void bench_fail(const char *what);                    /* prints errno and exits with 1 */
_Noreturn void bench_refuse(const char *format, ...) __attribute__((format(printf, 1, 2)));
void *bench_alloc(size_t count, size_t size);                   /* zeroed; ends the program when there is none */

uint64_t bench_now_ns(void);
uint64_t bench_seconds_ns(double seconds);

int bench_listen(const struct bench_options *options);          /* prints "listening PORT" */
int bench_accept(int listener);         /* TCP_NODELAY set; retries EINTR */
int bench_connect(uint32_t host, uint16_t port);                /* host in host order; TCP_NODELAY set */
void bench_nonblocking(int fd);
void bench_raise_file_limit(void);

void bench_write_all(int fd, const void *data, size_t size);
bool bench_read_all(int fd, void *data, size_t size);           /* false: the end came first */
bool bench_gone(int error);          /* errno values that only mean the peer left */

void bench_hold(const struct bench_options *options);

void bench_hist_add(struct bench_hist *hist, uint64_t value_ns);
void bench_hist_merge(struct bench_hist *into, const struct bench_hist *from);
uint64_t bench_hist_quantile(const struct bench_hist *hist, double quantile);

/* One JSON object on a line: the run's numbers and, where `hist` is not null, its percentiles. */
void bench_report(const char *program, const struct bench_options *options, uint64_t messages, uint64_t elapsed_ns,
                  const struct bench_hist *hist);

#endif
