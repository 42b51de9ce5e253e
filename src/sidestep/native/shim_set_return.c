/*
 * shim_set_return.c - epoll registrations of a connection that the process passes to itself, and closes before it receives it.
 *
 * The kernel keeps a registration while the socket is on its way, as the message holds the file. Members of our sets end with the
 * last number. So a copy is kept here, and comes back with the socket.
 */
#include "shim_set.h"
#include "shim_travel.h"

#define KEPT_REGISTRATIONS 16 /* of more, the oldest goes */

_Atomic bool passes_to_self;

/* Guarded by shim_lock. */
static struct {
	const struct conn_slot *slot; /* NULL: none */
	uint32_t generation;
	uint64_t secret; /* secret of the set, whose number may be another's by then */
	int epfd;
	struct member was;
} kept[KEPT_REGISTRATIONS];
static uint32_t next;

/* The last number of the connection is being closed; no lock is held. */
void set_conn_goes(struct conn *conn, int fd)
{
	shim_lock_take();
	for (const struct member *member = conn->members; member; member = member->next) {
		if (!member->managed || member->away || member->fd != fd || member->set->owner_pid != shim_pid)
			continue;
		kept[next].slot = conn->slot;
		kept[next].generation = conn->generation;
		kept[next].secret = member->set->secret;
		kept[next].epfd = member->set->epfd;
		kept[next].was = *member;
		next = (next + 1) % KEPT_REGISTRATIONS;
	}
	shim_lock_drop();
}

/* Events reported already are not reported again: the kernel's edges belong to the file. */
static void member_restore(struct set *set, struct conn *conn, int fd, const struct member *was)
{
	shim_lock_take();
	set_lock(set);
	struct member *member = member_find(set, conn, fd);
	if (member) {
		member->disabled = was->disabled;
		member->armed = was->armed;
		member->out_armed = was->out_armed;
		member->reported = was->reported;
		member->seen_tail = was->seen_tail;
		member->seen_tcp = was->seen_tcp;
	}
	set_unlock(set);
	shim_lock_drop();
}

/* The connection has come back under the number `fd`; no lock is held. */
void set_conn_returned(struct conn *conn, int fd)
{
	KEEP_ERRNO;

	for (int i = 0; word_load(passes_to_self) && i < KEPT_REGISTRATIONS; i++) {
		shim_lock_take();
		const bool its = kept[i].slot == conn->slot && kept[i].generation == conn->generation;
		const struct member was = kept[i].was;
		const uint64_t secret = kept[i].secret;
		const int epfd = kept[i].epfd;
		if (its)
			kept[i].slot = NULL;
		shim_lock_drop();
		if (!its)
			continue;
		HELD_SET set = set_hold(epfd);
		struct epoll_event event = {.events = was.events, .data.u64 = was.data};
		if (set && set == was.set && set->secret == secret && epoll_ctl(epfd, EPOLL_CTL_ADD, fd, &event) == 0)
			member_restore(set, conn, fd, &was);
	}
}
