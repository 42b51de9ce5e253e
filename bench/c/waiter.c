#include "waiter.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

void waiter_init(struct waiter *waiter, enum bench_mode mode, bool edge)
{
	*waiter = (struct waiter){.mode = mode, .edge = edge, .epoll_fd = -1};
	if (mode == BENCH_EPOLL)
		waiter->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	if (mode == BENCH_EPOLL && waiter->epoll_fd < 0)
		bench_fail("epoll_create1");
}

void waiter_add(struct waiter *waiter, int fd, void *owner)
{
	if (waiter->mode == BENCH_EPOLL) {
		struct epoll_event event = {.events = EPOLLIN, .data.ptr = owner};

		if (waiter->edge)
			event.events |= EPOLLOUT | EPOLLET;
		if (epoll_ctl(waiter->epoll_fd, EPOLL_CTL_ADD, fd, &event))
			bench_fail("EPOLL_CTL_ADD");
		return;
	}
	if (waiter->used == waiter->room) {
		waiter->room = waiter->room ? 2 * waiter->room : 64;
		waiter->fds = realloc(waiter->fds, waiter->room * sizeof(*waiter->fds));
		waiter->owners = realloc(waiter->owners, waiter->room * sizeof(*waiter->owners));
		if (!waiter->fds || !waiter->owners)
			bench_fail("realloc");
	}
	waiter->fds[waiter->used] = (struct pollfd){.fd = fd, .events = POLLIN};
	waiter->owners[waiter->used++] = owner;
}

static size_t find(const struct waiter *waiter, const void *owner)
{
	for (size_t i = 0; i < waiter->used; i++)
		if (waiter->owners[i] == owner)
			return i;
	bench_refuse("a socket is not in the poll set");
}

void waiter_want_output(struct waiter *waiter, int fd, void *owner, bool wanted)
{
	if (waiter->edge)
		return;
	if (waiter->mode == BENCH_EPOLL) {
		struct epoll_event event = {.events = EPOLLIN | (wanted ? EPOLLOUT : 0u), .data.ptr = owner};

		if (epoll_ctl(waiter->epoll_fd, EPOLL_CTL_MOD, fd, &event))
			bench_fail("EPOLL_CTL_MOD");
		return;
	}
	waiter->fds[find(waiter, owner)].events = (short)(POLLIN | (wanted ? POLLOUT : 0));
}

void waiter_remove(struct waiter *waiter, int fd, void *owner)
{
	if (waiter->mode == BENCH_EPOLL) {
		if (epoll_ctl(waiter->epoll_fd, EPOLL_CTL_DEL, fd, NULL))
			bench_fail("EPOLL_CTL_DEL");
		for (size_t i = waiter->next; i < waiter->ready_count; i++)
			if (waiter->ready[i].data.ptr == owner)
				waiter->ready[i].data.ptr = NULL;
		return;
	}
	size_t at = find(waiter, owner);

	waiter->used--;
	waiter->fds[at] = waiter->fds[waiter->used];
	waiter->owners[at] = waiter->owners[waiter->used];
	if (at < waiter->next)
		waiter->next = at; /* the entry moved here has not been looked at */
}

static void wait_epoll(struct waiter *waiter)
{
	int count = epoll_wait(waiter->epoll_fd, waiter->ready, sizeof(waiter->ready) / sizeof(waiter->ready[0]), -1);

	if (count < 0 && errno != EINTR)
		bench_fail("epoll_wait");
	waiter->ready_count = count < 0 ? 0 : (size_t)count;
	waiter->next = 0;
}

static void *next_epoll(struct waiter *waiter)
{
	for (;;) {
		while (waiter->next < waiter->ready_count) {
			void *owner = waiter->ready[waiter->next++].data.ptr;

			if (owner)
				return owner;
		}
		wait_epoll(waiter);
	}
}

static void *next_poll(struct waiter *waiter)
{
	for (;;) {
		for (; waiter->ready_count && waiter->next < waiter->used; waiter->next++) {
			if (waiter->fds[waiter->next].revents) {
				waiter->fds[waiter->next].revents = 0;
				waiter->ready_count--;
				return waiter->owners[waiter->next++];
			}
		}
		int count = poll(waiter->fds, waiter->used, -1);

		if (count < 0 && errno != EINTR)
			bench_fail("poll");
		waiter->ready_count = count < 0 ? 0 : (size_t)count;
		waiter->next = 0;
	}
}

void *waiter_next(struct waiter *waiter)
{
	return waiter->mode == BENCH_EPOLL ? next_epoll(waiter) : next_poll(waiter);
}
