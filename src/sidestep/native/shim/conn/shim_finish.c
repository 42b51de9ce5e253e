/* shim_finish.c - how our own direction ends: recalled bytes go out first, and a close is announced. */
#include "shim_switch.h"

#define FLUSH_TURNS 20 /* number and length of the turns in which the end waits for recalled bytes to go out */
#define FLUSH_TURN_MS 100

/* Sends recalled bytes, waiting a little if TCP's buffer is full. */
static void flush_turns(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;

	for (int turn = 0; turn < FLUSH_TURNS && tx_is(slot, TX_RESEND); turn++) {
		uint64_t from = word_load(slot->tx_resend);
		slot_lock(&slot->tx_lock);
		/* another process may have sent them since, and be on the ring again */
		bool done = !conn->managed || !tx_is(slot, TX_RESEND) || tx_resend(conn, fd);
		slot_unlock(&slot->tx_lock);
		struct pollfd room = {.fd = fd, .events = POLLOUT};
		if (word_load(slot->tx_resend) != from)
			turn = 0; /* the peer reads on: nothing is to be lost because it is much */
		if (!done)
			raw_poll(&room, 1, FLUSH_TURN_MS);
	}
}

/* No process goes on with recalled bytes: the stream must not look whole. */
static void cut_off(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;

	if (tx_is(slot, TX_RESEND) && !conn_fd_stale(conn, fd)) {
		tcp_reset(fd); /* and nothing is read after what is missing */
		slot_lock(&slot->tx_lock);
		if (tx_is(slot, TX_RESEND))
			tx_move(slot, TX_ON_RESENT);
		slot_unlock(&slot->tx_lock);
		word_store(slot->error, ECONNRESET); /* an error for another process that has the socket, too */
		slot_set(slot, SLOT_RESET | SLOT_FIN | SLOT_PEER_GONE);
		shim_log("fd %d: reset, the bytes that the peer asked for again would not go out", fd);
	}
}

/* Called before a process takes over that does not know of recalled bytes. */
void conn_flush(struct conn *conn, int fd)
{
	flush_turns(conn, fd);
	cut_off(conn, fd);
}

/* Called before the end of our direction is announced: recalled bytes go first, and the peer can recall nothing from then on. */
void conn_end_sending(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;

	slot_lock(&slot->tx_lock);
	if (conn->managed && tx_is(slot, TX_RING)) {
		if (channel_decide(&conn->channel.local->tx_back, word_load(slot->tx_round), CHANNEL_ENDED) == CHANNEL_RECALLED)
			tx_back(conn, fd);
		else
			tx_move(slot, TX_ON_END);
	} else if (conn->managed && !tx_follows(conn)) {
		tx_recalled(conn, fd);
	}
	slot_unlock(&slot->tx_lock);
	flush_turns(conn, fd);
}

/* The last holder closes, and announces that to the peer, as the FIN may stand behind bytes that it does not read. */
void announce_close(struct conn *conn, int fd)
{
	const struct linger reset = {.l_onoff = 1};

	if (!atomic_load(&conn->managed) || !conn_alone(conn))
		return;
	/* Data left unread makes TCP reset (RFC 1122 4.2.2.13). The kernel sees that of its own; ring bytes count even while
	 * receiving is still on TCP. */
	if (!rx_over(conn->slot) && channel_rx_peek(&conn->channel) != 0)
		real.setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
	conn_end_sending(conn, fd);
	cut_off(conn, fd);
	atomic_fetch_or(&conn->channel.local->notice, CHANNEL_CLOSED);
	peer_wake(conn); /* the FIN is long gone after a shutdown: this wakes a sender that waits for room */
}
