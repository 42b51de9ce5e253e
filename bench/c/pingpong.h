/* Ping-pong: the client sends a message, the server sends it back whole, the client sends the next. */
#ifndef PINGPONG_H
#define PINGPONG_H

#include "bench.h"

/* When to measure: from `start_ns` on, until `end_ns` or `count` messages a connection. */
struct pingpong_window {
	uint64_t start_ns;
	uint64_t end_ns;
	uint64_t count;
};

struct pingpong_result {
	struct bench_hist hist;
	uint64_t first_ns;
	uint64_t last_ns;
};

/* A message carries its number in its first 8 bytes; the answer must carry the same. */
void pingpong_stamp(unsigned char *message, uint64_t number);
void pingpong_check(const unsigned char *message, uint64_t number);

struct pingpong_window pingpong_window(const struct bench_options *options);
/* True once the window is over: `now_ns` is past it, or `measured` messages were wanted. */
bool pingpong_over(const struct pingpong_window *window, uint64_t now_ns, uint64_t measured);
void pingpong_record(struct pingpong_result *result, const struct pingpong_window *window, uint64_t sent_ns,
                     uint64_t now_ns);

_Noreturn void pingpong_serve_events(const struct bench_options *options, int listener);
void pingpong_ask_events(const struct bench_options *options, const int *fds, const struct pingpong_window *window,
                         struct pingpong_result *result);

#endif
