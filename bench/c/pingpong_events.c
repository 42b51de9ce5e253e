/* Ping-pong by poll or epoll: one thread, non-blocking sockets, one message under way on each connection. */
#include "pingpong.h"
#include "waiter.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

struct talk {
	int fd;
	bool wants_output;
	uint32_t done;          /* bytes of the message moved in the present direction */
	uint64_t number;
	uint64_t sent_ns;
	unsigned char *message;
};

enum progress { BLOCKED, WHOLE, ENDED };

/* Moves bytes until the message is whole or the socket would block. */
static enum progress move(struct talk *talk, uint32_t size, bool sending)
{
	while (talk->done < size) {
		unsigned char *at = talk->message + talk->done;
		size_t left = size - talk->done;
		ssize_t moved = sending ? send(talk->fd, at, left, MSG_NOSIGNAL) : recv(talk->fd, at, left, 0);

		if (moved < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
			return BLOCKED;
		if (moved < 0 && errno == EINTR)
			continue;
		if (moved < 0 && !bench_gone(errno))
			bench_fail(sending ? "send" : "recv");
		if (moved <= 0)
			return ENDED;
		talk->done += (uint32_t)moved;
	}
	talk->done = 0;
	return WHOLE;
}

static void output_wanted(struct waiter *waiter, struct talk *talk, bool wanted)
{
	if (talk->wants_output == wanted)
		return;
	talk->wants_output = wanted;
	waiter_want_output(waiter, talk->fd, talk, wanted);
}

/* Echoes what has come; false when the client has gone. */
static bool echo(struct waiter *waiter, struct talk *talk, uint32_t size)
{
	for (;;) {
		enum progress progress;

		if (!talk->wants_output) {
			progress = move(talk, size, false);
			if (progress != WHOLE)
				return progress == BLOCKED;
		}
		progress = move(talk, size, true);
		output_wanted(waiter, talk, progress == BLOCKED);
		if (progress != WHOLE)
			return progress == BLOCKED;
		if (!waiter->edge)
			return true; /* one outstanding message: the next wait tells of more */
	}
}

static void welcome(struct waiter *waiter, int listener, uint32_t size)
{
	int fd;

	while ((fd = bench_accept(listener)) >= 0) {
		struct talk *talk = bench_alloc(1, sizeof(*talk));

		bench_nonblocking(fd);
		*talk = (struct talk){.fd = fd, .message = bench_alloc(1, size)};
		waiter_add(waiter, fd, talk);
	}
	if (errno != EAGAIN && errno != EWOULDBLOCK)
		bench_fail("accept");
}

void pingpong_serve_events(const struct bench_options *options, int listener)
{
	static struct waiter waiter;

	bench_nonblocking(listener);
	waiter_init(&waiter, options->mode, options->edge);
	waiter_add(&waiter, listener, &waiter);
	for (;;) {
		void *owner = waiter_next(&waiter);

		if (owner == &waiter) {
			welcome(&waiter, listener, options->size);
			continue;
		}
		struct talk *talk = owner;

		if (echo(&waiter, talk, options->size))
			continue;
		waiter_remove(&waiter, talk->fd, talk);
		close(talk->fd);
		free(talk->message);
		free(talk);
	}
}

static void ask_next(struct waiter *waiter, struct talk *talk, uint32_t size, uint64_t now)
{
	talk->sent_ns = now;
	pingpong_stamp(talk->message, talk->number);
	output_wanted(waiter, talk, move(talk, size, true) == BLOCKED);
}

/* Goes on where the socket had blocked; true when the answer is whole. */
static bool answered(struct waiter *waiter, struct talk *talk, uint32_t size)
{
	enum progress progress;

	if (talk->wants_output) {
		progress = move(talk, size, true);
		if (progress == ENDED)
			bench_refuse("the server closed a connection");
		if (progress == BLOCKED)
			return false;
		output_wanted(waiter, talk, false);
	}
	progress = move(talk, size, false);
	if (progress == ENDED)
		bench_refuse("the server closed a connection");
	if (progress == WHOLE)
		pingpong_check(talk->message, talk->number++);
	return progress == WHOLE;
}

void pingpong_ask_events(const struct bench_options *options, const int *fds, const struct pingpong_window *window,
                         struct pingpong_result *result)
{
	static struct waiter waiter;
	struct talk *talks = bench_alloc(options->connections, sizeof(*talks));
	uint32_t busy = options->connections;
	uint64_t wanted = window->count > UINT64_MAX / busy ? UINT64_MAX : window->count * busy;
	struct pingpong_window all = {.start_ns = window->start_ns, .end_ns = window->end_ns, .count = wanted};

	waiter_init(&waiter, options->mode, options->edge);
	for (uint32_t i = 0; i < options->connections; i++) {
		talks[i] = (struct talk){.fd = fds[i], .message = bench_alloc(1, options->size)};
		waiter_add(&waiter, fds[i], &talks[i]);
	}
	for (uint32_t i = 0; i < options->connections; i++)
		ask_next(&waiter, &talks[i], options->size, bench_now_ns());
	while (busy) {
		struct talk *talk = waiter_next(&waiter);

		if (!answered(&waiter, talk, options->size))
			continue;
		uint64_t now = bench_now_ns();

		pingpong_record(result, &all, talk->sent_ns, now);
		if (pingpong_over(&all, now, result->hist.count))
			busy--; /* every connection ends with its answer read */
		else
			ask_next(&waiter, talk, options->size, now);
	}
	for (uint32_t i = 0; i < options->connections; i++)
		free(talks[i].message);
	free(talks);
	free(waiter.fds);
	free(waiter.owners);
	if (waiter.epoll_fd >= 0)
		close(waiter.epoll_fd);
}
