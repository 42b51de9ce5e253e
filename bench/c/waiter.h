/* One wait for many sockets, by poll or by epoll, so that a program's loop is written once. */
#ifndef WAITER_H
#define WAITER_H

#include "bench.h"

#include <poll.h>
#include <sys/epoll.h>

struct waiter {
	enum bench_mode mode;
	bool edge;
	int epoll_fd;
	size_t used;     /* poll: entries in `fds` and `owners` */
	size_t room;
	struct pollfd *fds;
	void **owners;
	struct epoll_event ready[512];
	size_t ready_count;
	size_t next;
};

void waiter_init(struct waiter *waiter, enum bench_mode mode, bool edge);
/* Watches `fd` for input; `owner` comes back from waiter_next. With `edge` also for output, once and for all. */
void waiter_add(struct waiter *waiter, int fd, void *owner);
/* Also for output, or no longer. Nothing to do on an edge-triggered set. */
void waiter_want_output(struct waiter *waiter, int fd, void *owner, bool wanted);
/* No longer watches `fd`; `owner` will not come back, not even from the events at hand. */
void waiter_remove(struct waiter *waiter, int fd, void *owner);
/* The owner of the next ready socket; waits when there is none at hand. */
void *waiter_next(struct waiter *waiter);

#endif
