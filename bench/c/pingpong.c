/* The ping-pong benchmark: options, the blocking mode (a thread a connection), and the report. */
#include "pingpong.h"

#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

void pingpong_stamp(unsigned char *message, uint64_t number)
{
	memcpy(message, &number, sizeof(number));
}

void pingpong_check(const unsigned char *message, uint64_t number)
{
	uint64_t found;

	memcpy(&found, message, sizeof(found));
	if (found != number)
		bench_refuse("the answer carries number %llu, not %llu", (unsigned long long)found, (unsigned long long)number);
}

struct pingpong_window pingpong_window(const struct bench_options *options)
{
	uint64_t start = bench_now_ns() + bench_seconds_ns(options->warmup_s);

	return (struct pingpong_window){
		.start_ns = start,
		.end_ns = options->count ? UINT64_MAX : start + bench_seconds_ns(options->measure_s),
		.count = options->count ? options->count : UINT64_MAX,
	};
}

bool pingpong_over(const struct pingpong_window *window, uint64_t now_ns, uint64_t measured)
{
	return now_ns >= window->end_ns || measured >= window->count;
}

void pingpong_record(struct pingpong_result *result, const struct pingpong_window *window, uint64_t sent_ns,
                     uint64_t now_ns)
{
	if (sent_ns < window->start_ns)
		return;
	if (!result->hist.count)
		result->first_ns = sent_ns;
	result->last_ns = now_ns;
	bench_hist_add(&result->hist, now_ns - sent_ns);
}

struct echo {
	int fd;
	uint32_t size;
};

static void *echo_thread(void *argument)
{
	struct echo echo = *(struct echo *)argument;
	unsigned char *message = bench_alloc(1, echo.size);

	free(argument);
	while (bench_read_all(echo.fd, message, echo.size))
		bench_write_all(echo.fd, message, echo.size);
	free(message);
	close(echo.fd);
	return NULL;
}

static _Noreturn void serve_blocking(const struct bench_options *options, int listener)
{
	for (;;) {
		struct echo *echo = bench_alloc(1, sizeof(*echo));
		pthread_t thread;

		*echo = (struct echo){.fd = bench_accept(listener), .size = options->size};
		if (echo->fd < 0)
			bench_fail("accept");
		if (pthread_create(&thread, NULL, echo_thread, echo) || pthread_detach(thread))
			bench_refuse("no thread for a connection");
	}
}

struct asker {
	const struct bench_options *options;
	const struct pingpong_window *window;
	struct pingpong_result *result;
	int fd;
	pthread_t thread;
};

static void pause_for(double seconds)
{
	struct timespec left = {.tv_sec = (time_t)seconds};

	left.tv_nsec = (long)((seconds - (double)left.tv_sec) * 1e9);
	while (nanosleep(&left, &left) && errno == EINTR)
		continue;
}

static void *ask_thread(void *argument)
{
	struct asker *asker = argument;
	uint32_t size = asker->options->size;
	unsigned char *message = bench_alloc(1, size);
	uint64_t now = bench_now_ns();
	uint64_t number = 0;

	while (!pingpong_over(asker->window, now, asker->result->hist.count)) {
		if (asker->options->pause_s > 0 && now >= asker->window->start_ns) {
			pause_for(asker->options->pause_s);
			now = bench_now_ns();
		}
		uint64_t sent = now;

		pingpong_stamp(message, number);
		bench_write_all(asker->fd, message, size);
		if (!bench_read_all(asker->fd, message, size))
			bench_refuse("the server closed the connection");
		pingpong_check(message, number++);
		now = bench_now_ns();
		pingpong_record(asker->result, asker->window, sent, now);
	}
	free(message);
	return NULL;
}

static void merge(struct pingpong_result *into, const struct pingpong_result *from)
{
	if (!into->hist.count || from->first_ns < into->first_ns)
		into->first_ns = from->first_ns;
	if (from->last_ns > into->last_ns)
		into->last_ns = from->last_ns;
	bench_hist_merge(&into->hist, &from->hist);
}

static void ask_blocking(const struct bench_options *options, const int *fds, const struct pingpong_window *window,
                         struct pingpong_result *result)
{
	struct asker *askers = bench_alloc(options->connections, sizeof(*askers));

	for (uint32_t i = 0; i < options->connections; i++) {
		askers[i] = (struct asker){.options = options, .window = window, .fd = fds[i]};
		askers[i].result = bench_alloc(1, sizeof(*askers[i].result));
		/* One connection is served by the main thread, as in a program without threads. */
		if (i && pthread_create(&askers[i].thread, NULL, ask_thread, &askers[i]))
			bench_refuse("no thread for a connection");
	}
	ask_thread(&askers[0]);
	for (uint32_t i = 0; i < options->connections; i++) {
		if (i)
			pthread_join(askers[i].thread, NULL);
		merge(result, askers[i].result);
		free(askers[i].result);
	}
	free(askers);
}

static void ask(const struct bench_options *options)
{
	int *fds = bench_alloc(options->connections, sizeof(*fds));
	struct pingpong_result *result = bench_alloc(1, sizeof(*result));

	if (!options->connections)
		bench_refuse("a ping-pong needs a connection: -n 1");
	for (uint32_t i = 0; i < options->connections; i++) {
		fds[i] = bench_connect(options->host, options->port);
		if (options->mode != BENCH_BLOCKING)
			bench_nonblocking(fds[i]);
	}
	struct pingpong_window window = pingpong_window(options);

	if (options->mode == BENCH_BLOCKING)
		ask_blocking(options, fds, &window, result);
	else
		pingpong_ask_events(options, fds, &window, result);
	bench_hold(options);
	bench_report("pingpong", options, result->hist.count, result->last_ns - result->first_ns, &result->hist);
	for (uint32_t i = 0; i < options->connections; i++)
		close(fds[i]);
	free(result);
	free(fds);
}

int main(int argc, char **argv)
{
	struct bench_options options = bench_options(
		argc, argv,
		(struct bench_options){.size = 64, .connections = 1, .addresses = 1, .warmup_s = 0.3, .measure_s = 1});

	bench_raise_file_limit();
	if (!options.server) {
		ask(&options);
		return 0;
	}
	int listener = bench_listen(&options);

	if (options.mode == BENCH_BLOCKING)
		serve_blocking(&options, listener);
	pingpong_serve_events(&options, listener);
}
