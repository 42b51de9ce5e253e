/*
 * shim_stand_in.c - an entry for the rings of members, in an epoll set inside another.
 *
 * The kernel does not look at rings. A *stand-in* is among the entries of an inner set: an eventfd that can be read while a
 * member has something to report. By it the kernel reports to the outer set, by level or by edge, as the outer entry asks,
 * however deep sets are nested. A wait in the inner set reports the member itself. Every wait that looks at an outer set
 * brings the stand-ins below it up to date first (shim_nest.c), so in between a stand-in may be out of date. If the kernel
 * alone waits on the outer set, no call does that. The members leave their rings then, and the stand-in follows each change
 * until the last byte has been read (set->leaves).
 *
 * The entries are the kernel's. After a fork, parent and child have copies of one stand-in. Each sets it as it finds the
 * rings. A child that has closed its copy of a member does not see that ring any more, and takes nothing back. With its last
 * copy the stand-in's entry goes by itself.
 */
#include "shim_set.h"
#include "shim_switch.h"

#include <sys/eventfd.h>

_Atomic uint32_t nest_sleepers;

/* False: there is none. */
bool stand_in_enter(struct set *set)
{
	struct epoll_event event = {.events = EPOLLIN, .data.u64 = set->secret << NAME_BITS | DOORBELL_INDEX};

	if (set->stand_in > 0)
		return true;
	set->stand_in = own_fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
	if (set->stand_in >= 0 && set_ctl(set, EPOLL_CTL_ADD, set->stand_in, &event) == 0)
		return true;
	shim_log("set %d: what its members have unread is not told to the set that it is in: %d", set->epfd, errno);
	own_fd_close(set->stand_in);
	set->stand_in = 0;
	return false;
}

/* Makes it readable or not; `news`: an outer set that waits for edges hears of one. */
void stand_in_put(struct set *set, bool stands, bool news)
{
	uint64_t count = 1;
	KEEP_ERRNO;

	if (set->stand_in <= 0)
		return;
	if (unlikely(!set_private(set))) {
		struct pollfd now = {.fd = set->stand_in, .events = POLLIN};
		set->stands = raw_poll(&now, 1, 0) > 0;
	}
	if (stands ? set->stands && !news : !set->stands || set->partial)
		return;
	self.calls++;
	if (stands)
		raw_write(set->stand_in, &count, sizeof(count));
	else
		raw_read(set->stand_in, &count, sizeof(count));
	set->stands = stands;
}

/* True if it has bytes in its ring, or sends that are done, which the kernel would report of TCP. */
static bool stands_for(const struct member *member)
{
	struct conn *conn = member->conn;
	uint32_t wanted = member->events & (EPOLLIN | EPOLLRDNORM);

	if (unlikely(zerocopy_unreported(conn->slot)) && !member->disabled && conn->managed)
		return !(member->events & EPOLLET) || member->armed || !(member->reported & EPOLLERR);
	if (!wanted || member->disabled || !conn->managed || rx_over(conn->slot) || !channel_rx_peek(&conn->channel) ||
	    !(rx_by_ring(conn->slot) || conn_tcp_read(conn)))
		return false;
	if ((member->events & EPOLLET) && !member->armed &&
	    atomic_load_explicit(&conn->channel.rx_peer_line->tail, memory_order_acquire) == member->seen_tail)
		return false;
	/* no later look would find bytes that come to those of the ring, and are too few for the kernel */
	return (conn_ready(conn, member_fd(member), 0, member->events) & wanted) || rx_unreported(conn);
}

/* The stand-in of a set whose members leave their rings follows what these still hold. */
void set_stand_in(struct set *set, bool news)
{
	bool stands = false;
	KEEP_ERRNO;

	for (uint32_t i = 0; i < set->managed_len && !stands; i++)
		stands = stands_for(set->managed[i]);
	stand_in_put(set, stands, news);
}
