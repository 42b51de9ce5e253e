/* shim_ready.c - what a set has to report: the events of its members, computed from rings, state and the kernel. */
#include "shim_set.h"
#include "shim_switch.h"

#include <sys/ioctl.h>

#define INLINE static inline __attribute__((always_inline)) /* code on the way of every wait */

/* True if ring bytes have come since the last report. As in Linux, those that were read make an edge of what else is ready. */
static bool edge_came(const struct member *member, uint32_t reported, uint64_t tail)
{
	return tail != member->seen_tail && ((reported & EPOLLIN) || (member->rx_ring && (member->events & EPOLLIN) &&
	                                                              channel_rx_peek(&member->conn->channel) == 0));
}

/*
 * True if readiness is an edge that has not been reported. `tail` is from before the look. A byte on one path is an edge even
 * if bytes of the other path, reported long ago, stand before it.
 */
static bool edge_new(const struct member *member, uint32_t ready, uint32_t kernel_bits, uint64_t tail)
{
	const struct conn *conn = member->conn;
	uint32_t reported = ready & (member->events | EPOLLERR | EPOLLHUP);
	uint32_t ends = ready & (EPOLLRDHUP | EPOLLHUP | EPOLLERR); /* IN alone is reported for an end, too */
	bool rx_by_tcp = !member->rx_ring || conn_peer_back(conn), tx_by_tcp = !tx_by_ring(conn->slot);

	return member->armed || (ends & ~member->reported) || edge_came(member, reported, tail) ||
	       ((reported & EPOLLOUT) && !tx_by_tcp && member->out_armed) ||
	       (kernel_bits & ((member->events & EPOLLPRI) | (rx_by_tcp ? EPOLLIN : 0) | (tx_by_tcp ? EPOLLOUT : 0)));
}

/* Likewise; from now on it has been reported. */
static bool edge_taken(struct member *member, uint32_t ready, uint32_t kernel_bits, uint64_t tail)
{
	uint32_t reported = ready & (member->events | EPOLLERR | EPOLLHUP);

	if (!edge_new(member, ready, kernel_bits, tail))
		return false;
	if (edge_came(member, reported, tail))
		member->seen_tail = tail;
	member->reported = ready & (EPOLLRDHUP | EPOLLHUP | EPOLLERR);
	member->armed = false;
	if (reported & EPOLLOUT)
		member->out_armed = false;
	return true;
}

/* Completes an end that the kernel reports with the bits that its entry did not ask for: a hang-up can also be read. */
INLINE uint32_t end_whole(const struct member *member, int fd, uint32_t kernel_bits)
{
	struct pollfd tcp = {.fd = fd, .events = POLLIN | POLLRDHUP};

	if (likely(!(kernel_bits & (EPOLLHUP | EPOLLERR))) || (member->in_kernel & EPOLLIN) || raw_poll(&tcp, 1, 0) <= 0)
		return kernel_bits;
	return kernel_bits | ((unsigned short)tcp.revents & ~(uint32_t)POLLNVAL);
}

/* Room of TCP's that the kernel was not asked for: another process has moved the direction there. */
static uint32_t room_unreported(const struct member *member, int fd, uint32_t ready)
{
	const struct conn_slot *slot = member->conn->slot;
	struct pollfd tcp = {.fd = fd, .events = POLLOUT};

	if (tx_by_ring(slot) || tx_is(slot, TX_RESEND) || (ready & EPOLLOUT) || !(member->events & EPOLLOUT) ||
	    raw_poll(&tcp, 1, 0) <= 0)
		return 0;
	return (unsigned short)tcp.revents & (uint32_t)EPOLLOUT;
}

/*
 * True if TCP has brought bytes since the last look that the kernel does not report. They are few, or an urgent one alone, which
 * FIONREAD does not count.
 */
INLINE bool came_unreported(struct member *member, int fd)
{
	const struct conn *conn = member->conn;
	bool few = rx_unreported(conn);
	uint64_t before = member->seen_tcp;
	int queued = 0;

	if (likely(!few && !((member->events & EPOLLET) && conn_peer_back(conn) && rx_by_ring(conn->slot))))
		return false;
	if (real.ioctl(fd, FIONREAD, &queued) < 0 || (queued && !few))
		return false;
	size_t came = queued ? (size_t)queued : tcp_unread(conn, fd);
	member->seen_tcp = word_load(conn->slot->rx_tcp_bytes) + came;
	return came && member->seen_tcp != before;
}

/* True once our end is acknowledged: an edge of whatever is true, by tcp_rcv_state_process() in Linux. The kernel knows no ring. */
INLINE bool fin_acked(struct member *member, int fd)
{
	if (likely(!slot_has(member->conn->slot, SLOT_WR_SHUT)) || member->fin_acked || !(member->events & EPOLLET) ||
	    !kernel_fin_acked(fd))
		return false;
	member->fin_acked = true;
	return true;
}

/* set lock held. Events that are true of a member, and may not be wanted; *tail is the ring's from before. */
INLINE uint32_t member_look(struct set *set, struct member *member, uint32_t kernel_bits, uint64_t *tail)
{
	struct conn *conn = member->conn;
	int fd = member_fd(member);

	if (unlikely(!conn_switched(conn)))
		conn_progress(conn, fd);
	/* the mark before the look: later bytes are an edge that has not been reported */
	*tail = atomic_load_explicit(&conn->channel.rx_peer_line->tail, memory_order_acquire);
	member->armed |= came_unreported(member, fd);
	member->armed |= fin_acked(member, fd);
	self.full_until = set->full_until;
	uint32_t ready = conn_ready(conn, fd, end_whole(member, fd, kernel_bits), member->events);
	if (unlikely(self.full_until))
		set->full_until = self.full_until; /* this member may be looked at by nobody else until then */
	bool rx_ring = rx_by_ring(conn->slot);
	member_by_tcp(member, !conn_switched(conn));
	if (unlikely(kernel_differs(member, kernel_bits) || (member->rx_ring && !rx_ring))) {
		/* a MOD also makes the kernel tell an edge again that was taken for the ring's */
		kernel_set(member, EPOLL_CTL_MOD);
		member->out_armed = true;
		member->armed |= member->rx_ring && !rx_ring;
		ready |= room_unreported(member, fd, ready);
	}
	/*
	 * A read that went over to the ring has taken the bytes that TCP had still to report. A program that counts by FIONREAD,
	 * as nginx does, knew only of TCP's bytes, and waits for an event of the others.
	 */
	member->armed |= rx_ring && !member->rx_ring;
	member->rx_ring = rx_ring;
	return ready;
}

/* set lock held. Fills *event if the member has something to report now. */
static bool member_report(struct set *set, struct member *member, uint32_t kernel_bits, struct epoll_event *event)
{
	struct conn *conn = member->conn;
	uint64_t tail;

	if (member->disabled || member->away || !conn->managed)
		return false;
	uint32_t ready = member_look(set, member, kernel_bits, &tail);
	uint32_t reported = ready & (member->events | EPOLLERR | EPOLLHUP);

	if (!reported)
		return false;
	if ((member->events & EPOLLET) && !edge_taken(member, ready, kernel_bits, tail))
		return false;
	event->events = reported;
	event->data.u64 = member->data;
	/* the first member that ends a wait gets the statistics of it */
	if (set->spent == SPENT_SPUN)
		word_add(conn->slot->spins_won, 1);
	if (set->spent == SPENT_BOTH)
		word_add(conn->slot->spins_lost, 1);
	if (set->spent >= SPENT_SLEPT)
		word_add(conn->slot->sleeps, 1);
	set->spent = SPENT_NOTHING;
	calls_count(conn->slot);
	member->pass = set->pass;
	word_store(set->last_cpu, word_load(conn->channel.rx_peer_line->cpu));
	if (member->events & EPOLLONESHOT) {
		member->disabled = true;
		kernel_set(member, EPOLL_CTL_MOD);
	}
	set->level_reported |= !(member->events & (EPOLLET | EPOLLONESHOT));
	return true;
}

/* set lock held. Members with something to report that have not been in this pass; starts where the last one stopped. */
int collect(struct set *set, struct epoll_event *events, int room)
{
	uint32_t len = set->managed_len, looked = 0;
	int n = 0;

	if (set->hinting) {
		feeds_read(set);
		if (likely(!set->scan_all && !set->unhinted)) {
			for (uint32_t left = set->hot_len; left && n < room; left--) {
				if (set->cursor >= set->hot_len)
					set->cursor = 0;
				struct member *member = set->hot[set->cursor];
				if (member->pass == set->pass) {
					set->cursor++;
				} else if (member_report(set, member, 0, &events[n])) {
					n++;
					set->cursor++;
				} else { /* the next news of it comes with a hint */
					set->hot[set->cursor] = set->hot[--set->hot_len];
					member->hot = false;
				}
			}
			return n;
		}
		set->scan_all = false;
	}
	if (set->cursor >= len)
		set->cursor = 0;
	while (n < room && looked < len) {
		struct member *member = set->managed[set->cursor];
		if (member->pass != set->pass && member_report(set, member, 0, &events[n])) {
			n++;
			hot_add(set, member);
		}
		looked++;
		if (++set->cursor >= len)
			set->cursor = 0;
	}
	if (looked < len && set->hinting)
		set->scan_all = true; /* the events' room ended first: the others come next time */
	return n;
}

/*
 * The member of whose entry, from before it was managed, the kernel may have reported this event: others may have the same
 * data.
 */
static struct member *member_of_unmanaged(const struct set *set, uint64_t data)
{
	for (uint32_t i = 0; i < set->managed_len; i++)
		if (set->managed[i]->data == data && set->managed[i]->pass != set->pass)
			return set->managed[i];
	return NULL;
}

/*
 * An event with the program's data. If a thread has begun to manage the member since, the event would be reported twice, here
 * and by collect(). Apache then gives the connection to two of its threads at once.
 */
static struct epoll_event unmanaged_report(struct set *set, struct epoll_event reported, bool known)
{
	struct member *member = likely(known) ? NULL : member_of_unmanaged(set, reported.data.u64);
	struct epoll_event event;

	if (likely(!member))
		return reported;
	if (member_report(set, member, reported.events, &event))
		reported.events |= event.events;
	member->pass = set->pass;
	hot_add(set, member);
	return reported;
}

/*
 * set lock held. Turns what the kernel reported into what the program is to see; may be done in place. `manages` is the set's
 * from before the kernel was asked.
 */
int translate(struct set *set, const struct epoll_event *reported, int len, uint32_t manages,
              struct epoll_event *events)
{
	int n = 0;
	bool rung = false;
	const struct remote_doorbell *last = NULL;

	for (int i = 0; i < len; i++) {
		if (reported[i].data.u64 >> NAME_BITS != set->secret) {
			events[n++] = unmanaged_report(set, reported[i], manages == word_load(set->manages));
			set->kernel_last = KERNEL_READY;
			continue;
		}
		uint32_t index = (uint32_t)(reported[i].data.u64 & ((1u << INDEX_BITS) - 1));
		struct member *member = index < set->members_len ? set->members[index] : NULL;
		rung |= index == DOORBELL_INDEX;
		if (index == DOORBELL_INDEX || !member || member->pass == set->pass ||
		    member_name(member) != (uint32_t)reported[i].data.u64)
			continue;
		struct epoll_event event;
		if (member->away) {
			kernel_set(member, EPOLL_CTL_MOD);
			continue;
		}
		if (!member->managed) { /* see kernel_unmanaged() and shim_set_return.c */
			event.events = reported[i].events & (member->events | EPOLLERR | EPOLLHUP);
			event.data.u64 = member->data;
			if (!event.events || member->disabled)
				continue;
			member->disabled = member->events & EPOLLONESHOT;
			events[n++] = event;
			set->kernel_last = KERNEL_READY;
			continue;
		}
		if (member_report(set, member, reported[i].events, &event)) {
			events[n++] = event;
			hot_add(set, member);
		}
	}
	for (uint32_t i = 0; rung && i < set->managed_len; i++)
		conn_liveness_check(set->managed[i]->conn, &last);
	/* We alone have taken the edge. Sleeping threads must be rung again for what comes after the look that follows. */
	if (rung && atomic_load(&set->sleepers)) {
		for (uint32_t i = 0; i < set->doorbells_len; i++)
			atomic_fetch_add(set->doorbells[i].doorbell->word, 1u << 16);
		full_fence();
	}
	/*
	 * The ring may have been for a thread that waits in the kernel since before any member was managed: peers do not ring for
	 * that.
	 */
	if (rung && atomic_load(&set->kernel_waiters))
		wake_set(set);
	return n;
}

/*
 * set lock held; `n` events of at most `max` are reported. Whether a sleeping thread has to look as well: there may be more
 * events, and a level is true for every thread. Only one thread has taken the doorbell's edge, and it may read less than all
 * and not come back.
 */
bool concerns_others(struct set *set, int n, int max)
{
	bool level = set->level_reported;

	set->level_reported = false;
	return (n == max || (n && level)) && atomic_load(&set->sleepers);
}

/* set lock held. Events that the member has to report, without taking edges; *tail as by member_look(). */
static uint32_t member_tells(struct set *set, struct member *member, uint64_t *tail)
{
	if (member->disabled || member->away || !member->conn->managed)
		return 0;
	uint32_t ready = member_look(set, member, 0, tail);
	if ((member->events & EPOLLET) && !edge_new(member, ready, 0, *tail))
		return 0;
	return ready & (member->events | EPOLLERR | EPOLLHUP);
}

/* True if any managed member has something to report. */
bool set_tells(struct set *set)
{
	bool found = false;
	uint64_t tail;

	for (uint32_t i = 0; i < set->managed_len && !found; i++)
		found = member_tells(set, set->managed[i], &tail) != 0;
	return found;
}

/* poll() on an epoll descriptor: whether any managed member has something to report. */
bool set_has_ready(struct set *set)
{
	set_lock(set);
	bool found = set_tells(set);
	set_unlock(set);
	return found;
}

/* The stand-in of a set in another one is as the rings are now; what has come since the last time is an edge. */
void set_keep(struct set *set)
{
	const int64_t until = self.full_until;
	bool stands = false, news = false;

	if (set->leaves) {
		set_stand_in(set, false);
		return;
	}
	if (set->full_until && now_ns() >= set->full_until) {
		set->full_until = 0;
		set->scan_all = true;
	}
	for (uint32_t i = 0; i < set->managed_len; i++) {
		struct member *member = set->managed[i];
		uint64_t tail = member->stood_tail;
		uint32_t reported = member_tells(set, member, &tail);
		news |= (reported & ~member->stood) || ((reported & EPOLLIN) && tail != member->stood_tail);
		stands |= reported != 0;
		member->stood = reported;
		member->stood_tail = tail;
	}
	stand_in_put(set, stands, news);
	self.full_until = until;
	if (unlikely(set->full_until))
		look_again_until(set->full_until);
}
