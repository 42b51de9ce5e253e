/*
 * shim_stand_in.c - what an epoll set inside another holds for its members' rings.
 *
 * The kernel alone waits on such a set, and does not look at rings: members leave theirs (shim_nest.c). What has arrived there is
 * read from there; as long as it lasts, a *stand-in* is among the set's entries: a descriptor that can always be read. By it the
 * kernel tells the outer set, and a wait in the inner one tells the member itself.
 *
 * The entries are the kernel's, and so are those of parent and child after a fork, who have copies of one stand-in. Each puts it
 * in, or takes it out, as it finds the rings, whatever the other did last. A child that has closed its copy of a member does not
 * see that ring any more, and takes nothing out. With its last copy it goes by itself.
 */
#include "shim_set.h"
#include "shim_switch.h"

#include <sys/eventfd.h>

/* Whether it has something that the kernel would tell now: what its ring holds, if it had come by TCP, or sends that are done. */
static bool stands_for(const struct member *member)
{
	struct conn *conn = member->conn;
	uint32_t wanted = member->events & (EPOLLIN | EPOLLRDNORM);

	if (unlikely(zerocopy_untold(conn->slot)) && !member->disabled && conn->managed)
		return !(member->events & EPOLLET) || member->armed || !(member->reported & EPOLLERR);
	if (!wanted || member->disabled || !conn->managed || rx_over(conn->slot) || !channel_rx_peek(&conn->channel) ||
	    !(rx_by_ring(conn->slot) || conn_tcp_read(conn)))
		return false;
	if ((member->events & EPOLLET) && !member->armed &&
	    atomic_load_explicit(&conn->channel.rx_peer_line->tail, memory_order_acquire) == member->seen_tail)
		return false;
	return conn_ready(conn, member_fd(member), 0, member->events) & wanted;
}

void stand_in_change(struct set *set, int op)
{
	struct epoll_event event = {.events = EPOLLIN, .data.u64 = set->secret << NAME_BITS | DOORBELL_INDEX};

	if (set->stand_in > 0 && set_ctl(set, op, set->stand_in, &event) < 0 && errno != EEXIST && errno != ENOENT)
		shim_log("set %d: its stand-in is not as it should be: %d", set->epfd, errno);
}

void set_stand_in(struct set *set)
{
	bool wanted = false;
	KEEP_ERRNO;

	for (uint32_t i = 0; i < set->managed_len && !wanted; i++)
		wanted = stands_for(set->managed[i]);
	if (wanted && set->stand_in <= 0) {
		set->stand_in = own_fd(eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK));
		if (set->stand_in < 0)
			shim_log("set %d: what its members have unread is not told to the set that it is in: %d", set->epfd, errno);
	}
	if (wanted || !set->partial)
		stand_in_change(set, wanted ? EPOLL_CTL_ADD : EPOLL_CTL_DEL);
}
