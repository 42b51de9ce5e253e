/*
 * shim_relayed.c - a provider between the two ends of a connection.
 *
 * With SLOT_RELAYED the segment's other side is a provider. It passes bytes and words on to the peer's segment
 * (provider/carry/remote_relay.py), later than TCP delivers its own. Rules for what depends on the order of the two:
 *   - TCP's end counts only once the provider has published tx_fin. We ask for it by fin_seen, and it always answers. Until
 *     then nobody judges how the peer ended (shut_wr, CHANNEL_CLOSED), and a reset waits, too.
 *   - A direction goes back to TCP only after the provider has acknowledged our offset (acked). A peer that does not know of
 *     the ring yet would read TCP's bytes before the ring's. Until then we stay on the ring, and one of our next calls goes
 *     back. Only a call without a successor, or one that the kernel has to answer, waits for it.
 *   - A request to go back waits for its acknowledgement, too: else the peer's next bytes would still go to the ring, and come
 *     again only with its next call.
 *   - A recall is open until the provider has announced that the bytes come again: see recall_open().
 *   - A reset that has lost bytes from before the ring ends the stream where TCP ends. The ring will never be read, so the
 *     provider may have no room to bring its end.
 *   - Bytes on TCP are no violation: the peer may have gone back, and its word may be on its way behind the ring's bytes.
 *   - A provider that dies, or sets CHANNEL_RESET, has lost bytes. The connection is reset, unless neither direction can have
 *     bytes there. A provider that lets go of the connection sets CHANNEL_OVER, as a consent or a question may cross that.
 *   - There is one round, and a direction that has gone back stays on TCP, unless the two providers pass on the words of more
 *     (CHANNEL_ACKED_ROUNDS). An acknowledgement is of one round alone. The provider takes SWITCH and REQUEST back before it
 *     shows an invitation, and READY before it shows that a round is over.
 */
#include "shim_switch.h"

#include <sys/ioctl.h>

#define SPACER_TURNS 10000 /* milliseconds that an urgent byte waits for the answer of the reader's provider */
#define RECALL_TURNS 11000 /* milliseconds that a call waits whose successor reads what TCP brings */

bool relay_gone(const struct conn *conn)
{
	return word_load(conn->remote_doorbell->dead) ||
	       (atomic_load_explicit(&conn->channel.remote->notice, memory_order_acquire) & (CHANNEL_RESET | CHANNEL_OVER));
}

/* The provider passes on the words of one round only. */
bool relay_once(const struct conn *conn)
{
	return conn_relayed(conn) &&
	       !(atomic_load_explicit(&conn->channel.remote->acked, memory_order_acquire) & CHANNEL_ACKED_ROUNDS);
}

/* TCP's end has come: whether bytes from before the ring are lost, so that nothing follows any more. */
bool rx_lost(const struct conn *conn)
{
	return rx_is(conn->slot, RX_CONSENTED) && conn_peer_switched(conn) &&
	       kernel_lost(conn_fd(conn), word_load(conn->channel.remote->tx_switch_offset));
}

bool conn_relay_news(const struct conn *conn)
{
	const struct conn_slot *slot = conn->slot;

	if (!conn_relayed(conn) || slot_has(slot, SLOT_RESET))
		return false;
	return relay_gone(conn) ||
	       (slot_has(slot, SLOT_TCP_FIN) && !slot_has(slot, SLOT_FIN) &&
	        (atomic_load_explicit(&conn->channel.remote->tx_fin, memory_order_acquire) || rx_lost(conn)));
}

/* Checks whether the provider is alive; connections in a row with the same provider share one check. */
void conn_liveness_check(const struct conn *conn, const struct remote_doorbell **last)
{
	struct remote_doorbell *doorbell = conn->remote_doorbell;

	if (!conn_relayed(conn) || doorbell == *last)
		return;
	*last = doorbell;
	struct pollfd life = {.fd = doorbell->liveness_fd};
	if (raw_poll(&life, 1, 0) > 0)
		atomic_store(&doorbell->dead, true);
}

/*
 * We have recalled the ring's bytes, and do not know yet if they come again. The peer may just have gone back by itself, or
 * ended, and then TCP's bytes stand behind them. No thread may read TCP before the provider has answered.
 */
bool recall_open(const struct conn *conn)
{
	if (likely(!conn_relayed(conn)) || !rx_is(conn->slot, RX_RECALLED) || slot_has(conn->slot, SLOT_RESET))
		return false;
	bool over = atomic_load_explicit(&conn->channel.remote->notice, memory_order_acquire) & CHANNEL_OVER;
	uint32_t acked =
		atomic_load_explicit(&conn->channel.remote->acked, memory_order_acquire); /* last words of the provider */

	/* an application whose consent was not passed on when the provider let go has never been sent to by ring */
	return !(acked & CHANNEL_ACKED_RECALL) && !(over && !(acked & CHANNEL_ACKED_READY));
}

/* Bytes may come by ring, or what TCP brings may not be what follows: then its end, too, waits for the provider's word. */
bool rx_depends(const struct conn *conn)
{
	return rx_watches(conn->slot) || recall_open(conn);
}

/* TCP's end has come: whether the provider has published the ring's end as well. Asks it to look. */
bool relay_ended(struct conn *conn)
{
	uint32_t seen = CHANNEL_SEEN_END | (slot_has(conn->slot, SLOT_TCP_RESET) ? CHANNEL_SEEN_RESET : 0u);

	slot_set(conn->slot, SLOT_TCP_FIN);
	if (~atomic_fetch_or(&conn->channel.local->fin_seen, seen) & seen) {
		peer_wake(conn);
	}
	return atomic_load_explicit(&conn->channel.remote->tx_fin, memory_order_acquire);
}

/* TCP reports a reset. True: bytes that were sent before it may still be on their way, so it has to wait. */
bool relay_reset_waits(struct conn *conn)
{
	if (slot_has(conn->slot, SLOT_RD_SHUT) || !rx_depends(conn))
		return false;
	slot_set(conn->slot, SLOT_TCP_RESET);
	return !relay_ended(conn) && !rx_lost(conn);
}

/* The same for a reader at the end of TCP's bytes, whose next read would take the error out of the kernel. */
bool rx_reset_waits(struct conn *conn, int fd)
{
	struct pollfd tcp = {.fd = fd};
	int queued = 0;

	return conn_relayed(conn) && raw_poll(&tcp, 1, 0) > 0 && kernel_failed(fd, (unsigned short)tcp.revents) &&
	       !zerocopy_in_kernel(conn->slot) && real.ioctl(fd, FIONREAD, &queued) == 0 && queued == 0 &&
	       relay_reset_waits(conn);
}

/* True if the kernel has reported the end, or may, but the ring's has not come yet. */
bool conn_end_withheld(const struct conn *conn)
{
	const struct conn_slot *slot = conn->slot;

	return conn_relayed(conn) && !slot_has(slot, SLOT_FIN | SLOT_RESET) &&
	       ((slot_has(slot, SLOT_TCP_FIN) && rx_watches(slot) && !rx_lost(conn)) || recall_open(conn));
}

/* True in that state, if the kernel has no bytes left that may be read: then it has nothing more to report. */
bool conn_fin_waits(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;
	int queued = 0;

	if (!conn_end_withheld(conn))
		return false;
	if (recall_open(conn))
		return true;
	return rx_by_ring(slot) || real.ioctl(fd, FIONREAD, &queued) < 0 || queued == 0;
}

/* True if bytes sent by TCP now are read behind the ring's: our offset is acknowledged, or the ring's bytes are recalled. */
bool tx_acked(const struct conn *conn)
{
	return likely(!conn_relayed(conn)) ||
	       (atomic_load_explicit(&conn->channel.remote->acked, memory_order_acquire) & CHANNEL_ACKED_SWITCH) ||
	       atomic_load(&conn->channel.local->tx_back) == (word_load(conn->slot->tx_round) << 2 | CHANNEL_RECALLED);
}

/*
 * True if bytes that we send depend on the provider. The peer judges how many arrived after an end, or once it is decided
 * that we go back or end. Another thread may just be deciding. Recalled bytes are sent again by TCP.
 */
static bool tx_relayed(const struct conn *conn)
{
	return tx_by_ring(conn->slot) && !slot_has(conn->slot, SLOT_WR_SHUT | SLOT_PEER_GONE) &&
	       atomic_load(&conn->channel.local->tx_back) >> 2 != word_load(conn->slot->tx_round);
}

/*
 * The provider is gone, with the bytes that it held. Any thread, any lock. The peer gets a reset, as it must not take its
 * bytes for the whole stream. If neither direction depends on the provider any more, it is forgotten instead. From then on
 * the kernel alone knows how the connection ends, as the segment's words stand still.
 */
void relay_lost(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;
	/* a ring that holds everything once the provider has published its end */
	bool ended = atomic_load_explicit(&conn->channel.remote->tx_fin, memory_order_acquire);
	bool invited = atomic_load(&conn->channel.remote->acked) & CHANNEL_ACKED_READY;
	/* or the round's end is decided, and not by a recall that nobody has answered */
	bool decided = atomic_load(&conn->channel.remote->tx_back) >> 2 == word_load(slot->rx_round);
	bool receives =
		(rx_watches(slot) && !slot_has(slot, SLOT_RD_SHUT) && invited && !decided && !ended) || recall_open(conn);
	/* bytes of TCP, before the ring's bytes or behind them, are lost with a reset */
	int queued = 0;
	bool whole = ended && real.ioctl(fd, FIONREAD, &queued) == 0 && queued == 0;

	if (!receives && !tx_relayed(conn) && !(conn_notice(conn) & CHANNEL_RESET)) {
		slot_set(slot,
		         SLOT_RELAY_OVER); /* full fence; before the second look: tx_switch() does it the other way round */
		if (!tx_relayed(conn)) {
			slot_clear(slot, SLOT_RELAYED);
			return;
		}
		slot_clear(slot, SLOT_RELAY_OVER);
	}
	conn_abort(conn, fd, whole ? EPIPE : ECONNRESET,
	           REASON_RELAY_LOST); /* the kernel's own choice, after a FIN and before */
}

/* No lock held. Waits until the provider has acknowledged that the peer knows our words. False: it did not; it may be dead. */
bool relay_acked(struct conn *conn, uint32_t what, int turns)
{
	struct remote_doorbell *doorbell = conn->remote_doorbell;
	struct pollfd life = {.fd = doorbell->liveness_fd};

	for (int turn = 0; turn < turns; turn++) {
		if (likely(atomic_load_explicit(&conn->channel.remote->acked, memory_order_acquire) & what))
			return true;
		if (raw_poll(&life, 1, 1) > 0)
			atomic_store(&doorbell->dead, true);
		if (relay_gone(conn))
			break;
	}
	return false;
}

/*
 * tx_lock held, in tx_space(), and no thread sends by TCP. Asks the reader's provider: the reader may have read the ring, and its
 * consent to TCP crosses our question. Without an answer nobody knows what it takes TCP's first byte for.
 */
bool relay_spaces(struct conn *conn, int fd)
{
	_Atomic uint32_t *word = &conn->channel.local->tx_spacer;
	const uint32_t round = word_load(conn->slot->tx_round) << 2, asked = round | SPACER_ASKED;
	struct pollfd room = {.fd = fd, .events = POLLOUT};

	if (atomic_load(word) == (round | SPACER_NONE) || raw_poll(&room, 1, 0) != 1 || !(room.revents & POLLOUT))
		return false;
	atomic_store(word, asked);
	peer_wake(conn);
	for (int turn = 0; turn < SPACER_TURNS && atomic_load(word) == asked && !relay_gone(conn); turn++)
		relay_acked(conn, 0, 1);
	if (atomic_load(word) == asked)
		conn_abort(conn, fd, ECONNRESET, REASON_RELAY_LOST);
	return atomic_load(word) == (round | SPACER_SENT);
}

/*
 * No lock held. Before a program without a shim gets the socket: waits until the provider has answered a recall. If it does not,
 * nobody knows what TCP's next byte is, and nobody is to read it.
 */
void recall_settle(struct conn *conn, int fd)
{
	for (int turn = 0; turn < RECALL_TURNS && recall_open(conn) && !relay_gone(conn); turn++)
		relay_acked(conn, CHANNEL_ACKED_RECALL, 1);
	if (recall_open(conn)) {
		conn_abort(conn, fd, ECONNRESET, REASON_RELAY_LOST);
		conn_wake_own(conn);
	}
}
