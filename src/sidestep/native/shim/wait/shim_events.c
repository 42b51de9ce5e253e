/* shim_events.c - which events are true of a connection, and how much a call could move. */
#include "shim_switch.h"

#include <sys/ioctl.h>

/* Events of the kernel that are true of the connection: its end does not come before the ring's. */
static uint32_t relay_mask(struct conn *conn, int fd, uint32_t kernel_bits)
{
	struct conn_slot *slot = conn->slot;
	bool ended = kernel_bits & (EPOLLRDHUP | EPOLLHUP | EPOLLERR);
	int queued = 0;

	/* an event IN alone, without a request for RDHUP, reports the end: then there is nothing to read */
	if ((kernel_bits & EPOLLIN) && !rx_by_ring(slot) && rx_consented(slot))
		ended |= real.ioctl(fd, FIONREAD, &queued) == 0 && queued == 0;
	bool unprocessed = ended && !slot_has(slot, SLOT_TCP_FIN | SLOT_RESET);
	unprocessed |= (kernel_bits & EPOLLERR) && !slot_has(slot, SLOT_TCP_RESET | SLOT_RESET); /* a reset behind a FIN */
	if (conn_relay_news(conn) || unprocessed)
		conn_probe(conn, fd);
	if (conn_end_withheld(conn)) {
		bool reset = slot_has(slot, SLOT_TCP_RESET) || recall_open(conn);
		kernel_bits &= ~(uint32_t)(EPOLLRDHUP | EPOLLHUP | (reset ? EPOLLERR : 0u));
		if (conn_fin_waits(conn, fd))
			kernel_bits &= ~(uint32_t)(EPOLLIN | EPOLLRDNORM);
	}
	return kernel_bits;
}

/* Below SO_RCVLOWAT the kernel wakes nobody for TCP's bytes, and does not know of those that the ring has beside them. */
bool rx_unreported(const struct conn *conn)
{
	return unlikely(word_load(conn->slot->rx_low_water) > 1) && rx_divided(conn);
}

size_t low_water(struct conn *conn)
{
	uint64_t low = word_load(conn->slot->rx_low_water);

	/* more than half of the room might never come together, as the sender waits for room */
	return low > conn->channel.rx.spill_size / 2 ? conn->channel.rx.spill_size / 2 : low;
}

#define UNREPORTED_LOOK_NS 1000000
#define READABLE (EPOLLIN | EPOLLRDNORM)
#define WRITABLE (EPOLLOUT | EPOLLWRNORM)

/* True if ring and TCP together hold enough to be reported; if not, it is looked at again. */
static bool rx_enough(struct conn *conn, int fd)
{
	int queued = 0;
	bool split = word_load(conn->slot->rx_low_water) > 1 && channel_rx_peek(&conn->channel) != 0;

	if (!split)
		real.ioctl(fd, FIONREAD, &queued);
	if (conn_unread(conn, split ? tcp_unread(conn, fd) : (size_t)queued) >= low_water(conn))
		return true;
	if (rx_unreported(conn))
		look_again_until(now_ns() + UNREPORTED_LOOK_NS);
	return false;
}

/* Events of receiving, by ring or by TCP, but for the end. */
static uint32_t rx_events(struct conn *conn, int fd, uint32_t kernel_bits)
{
	struct conn_slot *slot = conn->slot;
	uint32_t ready;

	if (rx_by_ring(slot)) {
		ready = kernel_bits & EPOLLPRI;
		if ((kernel_bits & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) && !slot_has(slot, SLOT_RESET))
			conn_probe(conn, fd);
		if (channel_rx_report(&conn->channel) >= low_water(conn)) {
			ready |= READABLE;
		} else if (unlikely(conn_peer_back(conn)) && slot_trylock(&slot->rx_lock)) {
			struct pollfd tcp = {.fd = fd, .events = POLLIN | POLLRDNORM};
			bool spaced = rx_spaced(conn); /* the spacer alone may have set these bits */
			if (conn->managed && rx_by_ring(slot) && rx_back(conn, fd) && (likely(!spaced) || raw_poll(&tcp, 1, 0) > 0))
				ready |= kernel_bits & READABLE;
			slot_unlock(&slot->rx_lock);
			if (rx_by_ring(slot) && rx_enough(conn, fd))
				ready |= READABLE;
		}
		return ready;
	}
	ready = kernel_bits & (READABLE | EPOLLRDHUP | EPOLLPRI);
	/* a reader meets the end in the kernel, but a thread that sends by ring must hear of it, too */
	if ((kernel_bits & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) && conn_judges_end(conn))
		conn_probe(conn, fd);
	if (rx_consented(slot) && !ready && slot_trylock(&slot->rx_lock)) {
		bool moved = conn->managed && !rx_by_ring(slot) && rx_follow(conn, fd);
		slot_unlock(&slot->rx_lock);
		if (moved || rx_divided(conn) ? rx_enough(conn, fd) : false)
			ready |= READABLE;
	}
	return ready;
}

/* Events of sending. `was_ring`: the kernel was not asked. */
static uint32_t tx_events(struct conn *conn, int fd, uint32_t kernel_bits, bool wanted, bool was_ring)
{
	struct conn_slot *slot = conn->slot;
	uint32_t ready = 0;

	if (tx_by_ring(slot)) {
		size_t room = conn_room(conn);
		if (room < room_wanted(conn) && wanted) {
			/* a program waits for room: the consumer must ring when there is some; then look once more */
			atomic_fetch_or(&conn->channel.tx_line->want_space, WANT_STICKY);
			full_fence();
			if (conn_room(conn) < room_wanted(conn))
				conn_make_room(conn, false);
			room = conn_room(conn);
		}
		if (room >= room_wanted(conn) && wanted)
			room = channel_tx_report(&conn->channel);
		if (room >= room_wanted(conn))
			ready |= WRITABLE;
	}
	if (unlikely(!tx_by_ring(slot) && !tx_is(slot, TX_RESEND))) {
		struct pollfd tcp = {.fd = fd, .events = POLLOUT | POLLWRNORM};
		if (was_ring && wanted && raw_poll(&tcp, 1, 0) > 0)
			ready |= (uint32_t)tcp.revents & WRITABLE;
		ready |= kernel_bits & WRITABLE;
	}
	return ready;
}

/* Events that the kernel watches for a caller that wants these. A `withheld` end would be reported again and again, to no use. */
uint32_t conn_watched(struct conn *conn, int fd, uint32_t events, bool withheld)
{
	if (tx_is(conn->slot, TX_RESEND)) {
		events |= EPOLLOUT; /* TCP's room is what recalled bytes wait for */
	} else {
		/* a wait for room, or for a reset alone, must hear of the peer's end: we judge what it means */
		if (conn_judges_end(conn) && !slot_has(conn->slot, SLOT_FIN | SLOT_RD_SHUT))
			events |= EPOLLRDHUP;
		if (tx_by_ring(conn->slot))
			events &= ~(uint32_t)(EPOLLOUT | EPOLLWRNORM | EPOLLWRBAND);
	}
	if (withheld)
		events &= ~(uint32_t)EPOLLRDHUP;
	return conn_fin_waits(conn, fd) ? events & ~(uint32_t)(READABLE | EPOLLRDHUP) : events;
}

static uint32_t end_events(const struct conn *conn)
{
	/* the order matters: an end that is seen has its error */
	uint32_t flags = atomic_load_explicit(&conn->slot->flags, memory_order_acquire);
	/* a read reports no error that we have met in passing before the provider between has announced the end */
	bool reported =
		word_load(conn->slot->error) && !(conn_relayed(conn) && !(flags & (SLOT_FIN | SLOT_RESET)) && rx_depends(conn));
	uint32_t ready = reported || zerocopy_unreported(conn->slot) ? EPOLLERR : 0;

	if (flags & (SLOT_FIN | SLOT_RD_SHUT | SLOT_RESET))
		ready |= READABLE | EPOLLRDHUP;
	if ((flags & (SLOT_WR_SHUT | SLOT_RESET)) || ((flags & SLOT_PEER_GONE) && tx_by_ring(conn->slot)))
		ready |= WRITABLE;
	if ((flags & SLOT_RESET) || ((flags & (SLOT_FIN | SLOT_RD_SHUT)) && (flags & SLOT_WR_SHUT)))
		ready |= EPOLLHUP;
	return ready;
}

/*
 * A reset becomes known in steps, by the kernel and by us. A thread that looks in between gets all of it, as does one that
 * sleeps on TCP.
 */
static uint32_t reset_whole(int fd, uint32_t ready)
{
	return unlikely(ready & EPOLLERR) && kernel_failed(fd, ready) ? ready | READABLE | WRITABLE | EPOLLRDHUP | EPOLLHUP
	                                                              : ready;
}

uint32_t conn_ready(struct conn *conn, int fd, uint32_t kernel_bits, uint32_t interest)
{
	struct conn_slot *slot = conn->slot;
	uint32_t notice = conn_notice(conn);
	bool was_ring = tx_by_ring(slot);

	if (conn_relayed(conn))
		kernel_bits = relay_mask(conn, fd, kernel_bits);
	if (conn_must_check(conn)) {
		conn_handle_notice(conn, fd);
		if ((notice & CHANNEL_CLOSED) && !slot_has(slot, SLOT_PEER_GONE))
			conn_probe(conn, fd);
	}
	/* a look at the rings alone must not leave out an end that the peer has announced */
	if (unlikely(atomic_load_explicit(&conn->channel.remote->shut_wr, memory_order_acquire)) &&
	    !slot_has(slot, SLOT_FIN))
		conn_probe(conn, fd);
	uint32_t ready = rx_events(conn, fd, kernel_bits);
	ready |= tx_events(conn, fd, kernel_bits, interest & WRITABLE, was_ring);
	/* read before end_events(): an end that another thread hears in between is reported whole the next time */
	uint32_t flags = word_load(slot->flags);
	ready |= end_events(conn);
	/*
	 * An event is reported whole. A look at the rings alone leaves out the kernel's part of the end, and a direction that is
	 * on TCP.
	 */
	uint32_t by_tcp = !rx_by_ring(slot) ? READABLE | EPOLLRDHUP | EPOLLPRI : 0;
	if (!tx_by_ring(slot) && !tx_is(slot, TX_RESEND))
		by_tcp |= WRITABLE;
	if (!kernel_bits && unlikely((by_tcp && (ready & interest)) || flags & (SLOT_FIN | SLOT_PEER_GONE))) {
		struct pollfd tcp = {.fd = fd, .events = (short)by_tcp};
		if (raw_poll(&tcp, 1, 0) > 0)
			kernel_bits = (unsigned short)tcp.revents & ~(uint32_t)POLLNVAL;
		if (conn_relayed(conn))
			kernel_bits = relay_mask(conn, fd, kernel_bits);
		if (unlikely(kernel_bits & (EPOLLERR | EPOLLHUP)) && !(flags & (SLOT_FIN | SLOT_RESET)))
			return conn_ready(conn, fd, kernel_bits, interest); /* the reset or the end has come just now */
		ready |= kernel_bits & by_tcp;
	}
	return reset_whole(fd, ready | (kernel_bits & (EPOLLHUP | EPOLLERR)));
}

/* TCP's bytes before the ring's. Another process may just have read those, and what TCP brought behind them. */
static size_t switch_ahead(const struct conn *conn)
{
	uint64_t offset = word_load(conn->channel.remote->tx_switch_offset), taken = word_load(conn->slot->rx_tcp_bytes);

	return offset > taken ? (size_t)(offset - taken) : 0;
}

/*
 * Bytes that a read can return, of which `queued` are in TCP's queue: before the ring's, behind them, or both. Those behind can be
 * read only once the peer is known to be back, of which a provider between tells later than TCP.
 */
size_t conn_unread(struct conn *conn, size_t queued)
{
	bool by_ring = rx_by_ring(conn->slot), among = rx_ring_among(conn, queued);
	size_t there = by_ring || among ? channel_rx_report(&conn->channel) : 0;

	if (recall_open(conn) || (by_ring && !conn_peer_back(conn)))
		queued = 0;
	else if (among && !conn_peer_back(conn))
		queued = switch_ahead(conn);
	else if (rx_spaced(conn) && queued > switch_ahead(conn))
		queued--;
	return queued + (there == SIZE_MAX ? 0 : there);
}
