/*
 * shim_switch.c - the switch-over: directions go to the ring, and back.
 *
 * Switch-over of one direction, by consent:
 *   receiver: RX_OPENING, fence, no thread in an unwatched kernel read or wait (rx_kernel_waiters), kernel's byte count equal
 *             to ours -> publishes rx_ready. From then on its reads look at TCP and at the segment, both.
 *   sender:   sees rx_ready; TX_SWITCHING, fence, no thread in a kernel write (tx_kernel_waiters), counts equal -> publishes
 *             the offset, then tx_switched; bytes from that offset go to the ring.
 *   receiver: TCP holds only bytes before the offset. It reads TCP until its count equals the offset, then the ring.
 * A thread that enters the kernel counts itself first and looks at the flag second. The declarer sets the flag first and
 * looks at the count second. With a full fence between, one of them sees the other.
 *
 * The way back ends a *round* of the direction. The receiver consents to the next round, in the same segment, when it has
 * read the last one to its end (rx_open); nothing is unmapped, so no thread can be caught inside.
 */
#include "shim_switch.h"

#include <sys/ioctl.h>

#define RETRY_AFTER_NS 1000000000ll /* a direction that left the ring of its own accord may return after this */

static void waits_for(struct conn_slot *slot, enum reason_code reason)
{
	if (word_load(slot->state) == STATE_ATTACHED)
		word_store(slot->reason, reason);
}

/* True if neither we nor the peer have a reason against our receiving by ring. */
static bool rx_willing(const struct conn *conn)
{
	if (word_load(conn->slot->rx_round) && relay_once(conn))
		return false;
	return !slot_has(conn->slot, SLOT_STAYS | SLOT_RELAY_OVER | SLOT_FIN | SLOT_RD_SHUT | SLOT_RESET) &&
	       peer_attached(conn) && !(conn_notice(conn) & (CHANNEL_DEMOTE | CHANNEL_RECALL | CHANNEL_CLOSED)) &&
	       word_load(conn->slot->rx_round) < CHANNEL_ROUNDS;
}

/* rx_lock held. Whether no thread of ours is in a kernel read, and the kernel's count of bytes is ours. */
static enum rx_event_code rx_settled(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;

	if (atomic_load(&slot->rx_kernel_waiters) != 0) {
		waits_for(slot, REASON_WAITER_IN_KERNEL);
		return RX_ON_UNSETTLED;
	}
	enum count count = rx_count(conn, fd);
	if (count == COUNT_DIFFERS) {
		word_store(slot->reason, REASON_COUNT_MISMATCH);
		word_store(slot->state, STATE_PINNED);
		shim_log("fd %d: read count differs from the kernel's", fd);
		return RX_ON_MISCOUNT;
	}
	return count == COUNT_EQUAL ? RX_ON_SETTLED : RX_ON_UNSETTLED;
}

/*
 * rx_lock held, receiving by TCP. Consents to the next round, unless a thread of ours would miss the ring. The last round
 * must be over, and read to its end.
 */
static void rx_open(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;
	struct channel_side *local = conn->channel.local;
	uint32_t round = word_load(slot->rx_round);

	if (!rx_willing(conn) || atomic_load_explicit(&conn->channel.remote->tx_ended, memory_order_acquire) != round ||
	    channel_rx_avail(&conn->channel) != 0)
		return;
	if (zerocopy_in_kernel(slot)) { /* reports of the kernel on these sends look like an error of the connection */
		option_reason(conn, SOL_SOCKET, SO_ZEROCOPY);
		waits_for(slot, REASON_UNUSUAL_OPTION);
		return;
	}
	rx_move(slot, RX_ON_WILLING); /* full fence; see kernel_recv() */
	enum rx_event_code settled = rx_settled(conn, fd);
	rx_move(slot, settled);
	if (settled != RX_ON_SETTLED)
		return;
	waits_for(slot, REASON_WAITING_FOR_PEER);
	word_store(slot->rx_round, ++round);
	/* The requests of our last round are fulfilled; a peer that sees rx_ready sees this, too. */
	atomic_fetch_and(&local->notice, ~(uint32_t)(CHANNEL_DEMOTE | CHANNEL_RECALL));
	atomic_store_explicit(&local->rx_ready, round, memory_order_release);
	peer_wake(conn);
}

/*
 * rx_lock held. Whether all that we recalled has come by TCP, and was read here: then the ring holds nothing of the stream any
 * more. Not before: the sender still needs its ring, and a stranger may have read the bytes.
 */
static bool recall_over(struct conn *conn)
{
	const struct channel_side *remote = conn->channel.remote;

	if (!rx_willing(conn) ||
	    atomic_load_explicit(&remote->tx_ended, memory_order_acquire) != word_load(conn->slot->rx_round))
		return false;
	int64_t recalled = channel_rx_avail(&conn->channel);
	if (recalled < 0 ||
	    (recalled > 0 && (!conn_peer_switched(conn) || word_load(conn->slot->rx_tcp_bytes) <
	                                                       word_load(remote->tx_switch_offset) + (uint64_t)recalled)))
		return false;
	channel_rx_consume(&conn->channel, (size_t)recalled);
	return true;
}

/* rx_lock held. Declares rx_ready if possible. True: both TCP and the segment are watched. */
bool rx_consent(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;

	if (rx_is(slot, RX_OPENING) || rx_is(slot, RX_REOPENING))
		rx_move(slot, RX_ON_UNSETTLED); /* a process of ours was killed in there */
	/* The order matters: the peer never switches to a round that has ended before it began. */
	if ((rx_is(slot, RX_CONSENTED) && conn_peer_back(conn) && !conn_peer_switched(conn)) ||
	    (rx_is(slot, RX_RECALLED) && recall_over(conn)))
		rx_move(slot, RX_ON_DRAINED);
	if (rx_is(slot, RX_TCP) || rx_is(slot, RX_BACK))
		rx_open(conn, fd);
	return rx_consented(slot);
}

/* True if the peer consents to a round that we have not begun. */
static bool tx_invited(const struct conn *conn)
{
	return atomic_load_explicit(&conn->channel.remote->rx_ready, memory_order_acquire) ==
	       word_load(conn->slot->tx_round) + 1;
}

/* A direction that left the ring of its own accord has to wait until it may return. */
static bool tx_waits(struct conn_slot *slot)
{
	uint64_t retry = word_load(slot->tx_retry_ns);

	if (likely(!retry))
		return false;
	if (retry == RETRY_NEVER || (uint64_t)now_ns() < retry)
		return true;
	word_store(slot->tx_retry_ns, 0);
	return false;
}

/* tx_lock held. Moves our sending direction to the ring if the peer consents. */
bool tx_switch(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;

	if (unlikely(tx_is(slot, TX_SWITCHING))) { /* a process of ours was killed in there */
		uint32_t spacer = atomic_load(&conn->channel.local->tx_spacer);
		if (spacer >> 2 == word_load(slot->tx_round) && (spacer & 3) != SPACER_NONE &&
		    word_load(slot->tx_tcp_bytes) == word_load(slot->tx_switch_offset))
			tcp_reset(fd); /* nobody knows whether its spacer has gone */
		tx_move(slot, TX_ON_UNSETTLED);
	}
	if (!peer_attached(conn) || !tx_invited(conn))
		return false;
	if (!rx_watches(slot))
		return false; /* a thread of ours may sit in the kernel's recv, where it would never hear of a recall */
	if (!(tx_is(slot, TX_TCP) || tx_is(slot, TX_LEFT)) ||
	    slot_has(slot, SLOT_STAYS | SLOT_RELAY_OVER | SLOT_WR_SHUT | SLOT_PEER_GONE | SLOT_RESET) || tx_waits(slot) ||
	    (conn_notice(conn) & (CHANNEL_DEMOTE | CHANNEL_RECALL)))
		return false;
	tx_move(slot, TX_ON_INVITED); /* full fence */
	bool settled = atomic_load(&slot->tx_kernel_waiters) == 0 && !zerocopy_in_kernel(slot);
	enum count count = settled ? tx_count(conn, fd) : COUNT_UNSTABLE;
	if (count != COUNT_EQUAL) {
		tx_move(slot, TX_ON_UNSETTLED);
		if (count == COUNT_DIFFERS) {
			word_store(slot->tx_retry_ns, RETRY_NEVER);
			word_store(slot->reason, REASON_COUNT_MISMATCH);
			word_store(slot->state, STATE_PINNED);
			shim_log("fd %d: written count differs from the kernel's", fd);
		}
		return false;
	}
	uint32_t round = word_load(slot->tx_round) + 1;
	conn_bound(conn, fd);
	slot_set(slot, SLOT_NUMBERS);
	word_store(slot->tx_round, round);
	word_store(slot->tx_switch_offset, word_load(slot->tx_tcp_bytes));
	word_store(conn->channel.local->tx_switch_offset, word_load(slot->tx_tcp_bytes));
	atomic_store_explicit(&conn->channel.local->tx_switched, round, memory_order_release);
	tx_move(slot, TX_ON_SETTLED); /* full fence */
	if (unlikely(slot_has(slot, SLOT_RELAY_OVER))) { /* Its end came since the question above; see relay_lost() */
		tx_move(slot, TX_ON_UNSETTLED);
		return false;
	}
	mark_promoted(conn);
	peer_wake(conn);
	shim_log("fd %d: sends by ring from byte %llu, round %u", fd, (unsigned long long)slot->tx_switch_offset, round);
	return true;
}

/* rx_lock held. Follows the sender onto the ring once every TCP byte before its offset has been read. 1 moved, 0 not yet. */
int rx_follow(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;
	const struct channel_side *remote = conn->channel.remote;

	if (!rx_is(slot, RX_CONSENTED) || !conn_peer_switched(conn))
		return 0;
	uint64_t offset = word_load(remote->tx_switch_offset);
	uint64_t read = word_load(slot->rx_tcp_bytes);
	if (offset > read)
		return 0;
	if (offset < read) {
		conn_violation(conn, fd);
		return 0;
	}
	word_store(slot->rx_switch_offset, offset);
	/* The kernel knew until now how the stream ends; conn_probe() finds out anew. Another thread may just be setting it. */
	bool ended = atomic_fetch_and(&slot->flags, ~(uint32_t)SLOT_FIN) & SLOT_FIN;
	rx_move(slot, RX_ON_SWITCHED);
	mark_promoted(conn);
	if (ended)
		conn_probe(conn, fd); /* the edge may not come again */
	return 1;
}

/* True if TCP's first byte behind the ring is, or will be, none of the stream: see tx_space(). */
bool rx_spaced(const struct conn *conn)
{
	return !rx_over(conn->slot) && unlikely(atomic_load(&conn->channel.remote->tx_spacer) ==
	                                        (word_load(conn->slot->rx_round) << 2 | SPACER_SENT));
}

/* The first to decide: the ring has been read to its end before a spacer went. False: one has gone, or is just going. */
static bool rx_spaceless(const struct conn *conn)
{
	return channel_decide(&conn->channel.remote->tx_spacer, word_load(conn->slot->rx_round), SPACER_NONE) !=
	       SPACER_SENT;
}

/*
 * rx_lock held, and the ring has been read to its end. Takes the spacer out of TCP; false: it has not come yet. A sender to which
 * TCP leaves no room takes its word back, and other bytes may come. So the word is looked at behind the count, too.
 */
static bool rx_pass_spacer(struct conn *conn, int fd)
{
	int queued = 0;
	char byte;
	KEEP_ERRNO;

	if (likely(rx_spaceless(conn)))
		return true;
	real.ioctl(fd, FIONREAD, &queued);
	if (rx_spaceless(conn))
		return true;
	if (queued <= 0 || raw_recv(fd, &byte, 1, MSG_DONTWAIT) != 1)
		return false;
	word_add(conn->slot->rx_tcp_bytes, 1);
	return true;
}

/* rx_lock held, ring empty. Follows a demoted sender back to TCP. True: receiving is on TCP again. */
bool rx_back(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;
	const struct channel_side *remote = conn->channel.remote;

	if (!conn_peer_back(conn))
		return false;
	if (channel_rx_avail(&conn->channel) > 0)
		return false; /* these bytes come first */
	if (word_load(remote->tx_back_at) != atomic_load(conn->channel.own.head)) {
		conn_violation(conn, fd);
		return false;
	}
	if (!rx_pass_spacer(conn, fd))
		return false;
	rx_move(slot, RX_ON_DRAINED);
	if (word_load(slot->state) == STATE_PROMOTED)
		word_store(slot->state, STATE_PINNED);
	return true;
}

/* The next bytes are on one path and those after them on the other, so a wait cannot be for both together. */
bool rx_divided(const struct conn *conn)
{
	const struct conn_slot *slot = conn->slot;

	return conn_peer_back(conn) || (!rx_by_ring(slot) && rx_watches(slot) && conn_peer_switched(conn));
}

/*
 * True if the ring's bytes come behind the `queued` bytes that TCP holds, or among them. Then they come before bytes that the
 * peer has sent since it went back.
 */
bool rx_ring_among(const struct conn *conn, size_t queued)
{
	const struct channel_side *remote = conn->channel.remote;

	return !rx_over(conn->slot) && conn_peer_switched(conn) &&
	       word_load(remote->tx_switch_offset) - word_load(conn->slot->rx_tcp_bytes) <= queued;
}

/*
 * rx_lock held. True if the stream goes on by the other path, with bytes that the same call has to return. A short read would
 * mean that nothing is left. Edge-triggered readers then wait for the next edge (epoll(7), "Questions and answers" 9). libuv
 * takes it together with HUP for the end of the stream.
 */
bool rx_goes_on(struct conn *conn, int fd)
{
	int queued = 0, marked = 0;

	if (!rx_by_ring(conn->slot)) {
		if (!rx_follow(conn, fd))
			return false;
		if (channel_rx_avail(&conn->channel) > 0)
			return true;
	}
	/* a way back, also from a round in which nothing went by ring */
	if (!conn_peer_back(conn) || !rx_back(conn, fd) || real.ioctl(fd, FIONREAD, &queued) < 0 || queued <= 0)
		return false;
	/* sockatmark(3): no read goes over the urgent mark */
	return real.ioctl(fd, SIOCATMARK, &marked) < 0 || !marked;
}

/* tx_lock held. The peer decided first, and wants its unread bytes by TCP. */
void tx_recalled(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;
	uint64_t tail = atomic_load(conn->channel.own.tail), frozen = atomic_load(&conn->channel.remote->rx_frozen);

	if (tail - frozen > conn->channel.tx.spill_size) { /* the peer can write this word: it is a lie */
		conn_violation(conn, fd);
		frozen = tail;
	}
	slot->tx_resend = frozen;
	tx_move(slot, TX_ON_RECALLED);
	if (frozen == tail)
		tx_move(slot, TX_ON_RESENT);
}

/*
 * tx_lock held. Ends the round of our sending direction, which goes back to TCP: behind the ring's bytes or, if these were
 * recalled, with them. A round that the peer has consented to and that has not begun ends unused.
 */
void tx_back(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;
	bool unused = !tx_by_ring(slot);

	if (unused && (tx_is(slot, TX_RESEND) || !tx_invited(conn)))
		return;
	if (!unused && unlikely(!tx_acked(conn))) { /* conn_demote() has waited long enough */
		relay_lost(conn, fd);
		return;
	}
	uint32_t round = word_load(slot->tx_round) + unused;
	uint64_t tail = atomic_load(conn->channel.own.tail);
	word_store(slot->tx_round, round);
	channel_tx_show(&conn->channel); /* a process of ours that was killed may have moved its tail and not shown it */
	word_store(conn->channel.local->tx_back_at, tail);
	uint32_t how = channel_decide(&conn->channel.local->tx_back, round, CHANNEL_BACK);
	if (!how)
		conn_violation(conn, fd);
	if (how == CHANNEL_RECALLED && tx_is(slot, TX_RING))
		tx_recalled(conn, fd);
	else
		tx_move(slot, TX_ON_LEAVE);
	atomic_store_explicit(&conn->channel.local->tx_ended, round, memory_order_release);
	if (word_load(slot->state) == STATE_PROMOTED)
		word_store(slot->state, STATE_PINNED);
}

/* tx_lock held. The end that stood behind recalled bytes; shutdown() has returned to the program. */
static void tx_end_owed(struct conn *conn, int fd)
{
	atomic_store(&conn->channel.local->shut_wr, 1); /* before the FIN, as there */
	real.shutdown(fd, SHUT_WR);
	slot_clear(conn->slot, SLOT_FIN_OWED);
}

/* tx_lock held. Sends recalled ring bytes by TCP without blocking; true when none are left. */
bool tx_resend(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;
	uint64_t tail = atomic_load(conn->channel.own.tail), from = word_load(slot->tx_resend);

	if (unlikely(conn_fd_stale(conn, fd)))
		return false;
	if (tail - from > conn->channel.tx.spill_size) { /* a stranger wrote it; see slot_alloc() */
		conn_violation(conn, fd);
		from = tail;
	}
	while (from != tail) {
		size_t len = (size_t)(tail - from);
		if (error_met(conn, fd)) /* a send would take it, and not tell EPIPE from no error */
			break;
		const uint8_t *at = channel_tx_place(&conn->channel, from, &len);
		ssize_t n = raw_send(fd, at, len, MSG_DONTWAIT | MSG_NOSIGNAL);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && errno == EAGAIN)
			return false;
		if (n < 0) {
			keep_error(conn, n); /* the connection is gone */
			break;
		}
		from += (uint64_t)n;
		word_store(slot->tx_resend, from);
		word_add(slot->tx_tcp_bytes, (uint64_t)n);
	}
	if (unlikely(slot_has(slot, SLOT_FIN_OWED)))
		tx_end_owed(conn, fd);
	tx_move(slot, TX_ON_RESENT);
	return true;
}

/* True if our direction has left the ring, and the peer has recalled the ring's bytes before its first byte went by TCP. */
bool conn_recalled_since(const struct conn *conn)
{
	return tx_is(conn->slot, TX_LEFT) &&
	       atomic_load(&conn->channel.local->tx_follows) == (word_load(conn->slot->tx_round) << 2 | CHANNEL_RECALLED);
}

/*
 * Call this before bytes, or the end, go by TCP: from then on the peer cannot recall its unread bytes. False: it has done so,
 * and they go first.
 */
bool tx_follows(struct conn *conn)
{
	return !tx_is(conn->slot, TX_LEFT) ||
	       channel_decide(&conn->channel.local->tx_follows, word_load(conn->slot->tx_round), CHANNEL_BACK) !=
	           CHANNEL_RECALLED;
}

/*
 * tx_lock held, behind tx_follows(), before an urgent byte goes by TCP. The next such byte makes an ordinary one of it, or Linux drops
 * it, if its reader stands right before it (tcp_check_urg()). In the kernel's eyes a reader of the ring does. So a byte that is none of
 * the stream goes ahead, and leaves TCP with the ring's last. MSG_MORE: both arrive together.
 *
 * A reader whose ring is empty looks at the notice, and then at the spacer. So the order is theirs, and the ring is looked at last.
 */
void tx_space(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;
	struct channel_side *local = conn->channel.local;
	const uint32_t round = word_load(slot->tx_round), back = round << 2 | CHANNEL_BACK;
	const bool relayed = conn_relayed(conn);

	if (!(tx_is(slot, TX_LEFT) || tx_is(slot, TX_TCP)) ||
	    !(relayed ? atomic_load(&conn->channel.remote->acked) & CHANNEL_ACKED_SPACER
	              : atomic_load(&conn->channel.remote->knows) & KNOWS_SPACER) ||
	    word_load(local->tx_switched) != round || atomic_load(&local->tx_back) != back ||
	    atomic_load(&local->tx_follows) != back || !channel_tx_unread(&conn->channel) ||
	    error_met(conn, fd)) /* a send would take it */
		return;
	atomic_fetch_or(&local->notice, CHANNEL_DEMOTE);
	tx_move(slot, TX_ON_INVITED); /* full fence: no thread sends by TCP meanwhile */
	if (atomic_load(&slot->tx_kernel_waiters) == 0 &&
	    word_load(slot->tx_tcp_bytes) == word_load(slot->tx_switch_offset) &&
	    (relayed ? relay_spaces(conn, fd) : channel_decide(&local->tx_spacer, round, SPACER_SENT) == SPACER_SENT)) {
		full_fence();
		if ((relayed || channel_tx_unread(&conn->channel)) &&
		    raw_send(fd, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL | MSG_MORE) == 1)
			word_add(slot->tx_tcp_bytes, 1);
		else if (relayed)
			conn_abort(conn, fd, ECONNRESET, REASON_RELAY_LOST); /* the reader would take the next byte for it */
		else
			atomic_store(&local->tx_spacer, 0); /* the next call tries again if there was no room */
	}
	tx_move(slot, TX_ON_UNSETTLED);
}

/*
 * The peer asks us to send by TCP, and a round of ours goes on or could begin. Or we have to go back ourselves, and have waited
 * for a provider between to acknowledge our offset: it rings when it has.
 */
bool conn_tcp_requested(const struct conn *conn)
{
	bool by_peer = conn_notice(conn) & (CHANNEL_DEMOTE | CHANNEL_RECALL);

	if (likely(!by_peer && !(conn_relayed(conn) && slot_has(conn->slot, SLOT_STAYS))))
		return false;
	if (tx_by_ring(conn->slot))
		return tx_acked(conn);
	if (tx_is(conn->slot, TX_RESEND))
		return false;
	/* A second look after rx_ready: with a consent to the next round the peer revokes its requests of the last. */
	return tx_invited(conn) && (conn_notice(conn) & (CHANNEL_DEMOTE | CHANNEL_RECALL));
}

/* True if a request of the peer is still to be handled. */
bool tx_request_pending(const struct conn *conn)
{
	return conn_tcp_requested(conn) || unlikely(tx_is(conn->slot, TX_RESEND)) || unlikely(conn_recalled_since(conn));
}

/* tx_lock held. Stops sending by ring, or sends the peer's unread bytes by TCP. */
void tx_handle_notice(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;

	if (conn_tcp_requested(conn)) {
		tx_back(conn, fd);
		if (!slot_has(slot, SLOT_STAYS | SLOT_RESET))
			word_store(slot->reason, conn_notice(conn) & CHANNEL_CROWDED ? REASON_CROWDED : REASON_PEER_LEFT);
		shim_log("fd %d: the peer asked for TCP", fd);
		peer_wake(conn);
	}
	if (conn_recalled_since(conn))
		tx_recalled(conn, fd);
	if (tx_is(slot, TX_RESEND))
		tx_resend(conn, fd);
}

/* Handles the peer's requests. True: the sending direction has moved, and the sets must learn of it. */
bool conn_handle_notice(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;
	KEEP_ERRNO;
	bool moved = false;

	if (!tx_request_pending(conn) || !slot_trylock(&slot->tx_lock))
		return false;
	if (conn->managed && tx_request_pending(conn)) {
		moved = tx_by_ring(slot);
		tx_handle_notice(conn, fd);
	}
	slot_unlock(&slot->tx_lock);
	return moved;
}

/*
 * The peer can be killed without a sign, and a sender without room would then wait for ever. So our direction goes back to TCP,
 * where the kernel knows of the death. True: it has just done so.
 */
bool leave_ring(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;
	bool moved = false;
	KEEP_ERRNO;

	if (slot_has(slot, SLOT_PEER_GONE | SLOT_RESET) || !tx_by_ring(slot) || !tx_acked(conn))
		return false;
	slot_lock(&slot->tx_lock);
	if (conn->managed && tx_by_ring(slot)) {
		tx_back(conn, fd);
		moved = true;
		bool noticed = !slot_has(slot, SLOT_FIN | SLOT_RD_SHUT);
		word_store(slot->tx_retry_ns, noticed ? (uint64_t)(now_ns() + RETRY_AFTER_NS) : RETRY_NEVER);
		word_store(slot->reason, REASON_UNHEARD);
		peer_wake(conn);
		conn_wake_own(conn);
		shim_log("fd %d: the peer's end would not be heard; ours goes on by TCP", fd);
	}
	slot_unlock(&slot->tx_lock);
	return moved;
}

/* Moves the switch along from any call or wait on the connection. True: something moved, tell the sets. */
bool conn_progress(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;
	bool moved = false;

	if (likely(conn_switched(conn)) || !peer_attached(conn))
		return false;
	if ((!rx_by_ring(slot) || conn_peer_back(conn)) && slot_trylock(&slot->rx_lock)) {
		if (conn->managed && rx_by_ring(slot) && channel_rx_avail(&conn->channel) == 0)
			moved = rx_back(conn, fd); /* a program that only sends would never follow */
		if (conn->managed && !rx_by_ring(slot) && rx_consent(conn, fd))
			rx_follow(conn, fd);
		slot_unlock(&slot->rx_lock);
	}
	if (!tx_by_ring(slot) && slot_trylock(&slot->tx_lock)) {
		moved |= conn->managed && !tx_by_ring(slot) && tx_switch(conn, fd);
		slot_unlock(&slot->tx_lock);
	}
	return moved;
}

/*
 * Neither direction goes on here: a socket in that state answers data with a reset (RFC 1122 4.2.2.13), which only the
 * kernel can send. What the ring holds already came in time.
 */
void conn_refuse(struct conn *conn)
{
	slot_lock(&conn->slot->rx_lock); /* or a consent that is being given would take it back */
	if (conn->managed) {
		atomic_fetch_or(&conn->channel.local->notice, CHANNEL_DEMOTE);
		peer_wake(conn);
	}
	slot_unlock(&conn->slot->rx_lock);
}
