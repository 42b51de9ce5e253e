/* shim_idle.c - connections that stand still: the pages of their rings are released. */
#include "shim_switch.h"

_Atomic bool trim_due;

/*
 * Not 0: there is no room, and the peer's death would go unnoticed. Its FIN has come already, or would stand behind bytes
 * that the program does not read. The value is the position of both readers: if it is the same later, neither has moved. A
 * provider between reports the peer's death, and its own is noticed by the pipe.
 */
static uint64_t stalled_at(const struct conn *conn, int fd)
{
	struct pollfd tcp = {.fd = fd, .events = POLLIN};

	if (slot_has(conn->slot, SLOT_RELAYED) || !tx_by_ring(conn->slot) || !tx_full(conn) ||
	    !(slot_has(conn->slot, SLOT_FIN | SLOT_RD_SHUT) || (raw_poll(&tcp, 1, 0) > 0 && (tcp.revents & POLLIN))))
		return 0;
	return word_load(conn->slot->rx_tcp_bytes) + word_load(conn->channel.tx_peer_line->head) + 1;
}

/* False: it has sent since the last time, or its peer has not read everything, so another look is needed. */
static bool trim(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;

	if (!conn->managed || tx_is(slot, TX_RESEND) || !slot_trylock(&slot->tx_lock))
		return true;
	uint64_t tail = conn->managed ? atomic_load(conn->channel.own.tail) : conn->idle_tail;
	bool idle = tail == conn->idle_tail;
	/* recalled bytes have gone out by TCP: nobody reads them here */
	bool recalled =
		conn->managed && tx_is(slot, TX_TCP) &&
		(atomic_load(&conn->channel.local->tx_back) == (word_load(slot->tx_round) << 2 | CHANNEL_RECALLED) ||
	     atomic_load(&conn->channel.local->tx_follows) == (word_load(slot->tx_round) << 2 | CHANNEL_RECALLED));
	if (idle && tail != conn->trimmed_tail && !slot_has(slot, SLOT_RESERVED) &&
	    (recalled || channel_tx_unread(&conn->channel) == 0)) {
		channel_trim(&conn->channel);
		word_store(slot->tx_spilled, 0);
		conn->trimmed_tail = tail;
	} else if (conn->managed && word_load(slot->tx_spilled) && word_load(slot->tx_ring_from) == conn->idle_from &&
	           !slot_has(slot, SLOT_RESERVED) && channel_trim_spill(&conn->channel)) {
		word_store(slot->tx_spilled, 0);
	}
	conn->idle_from = word_load(slot->tx_ring_from);
	conn->idle_tail = tail;
	bool trimmed = idle && tail == conn->trimmed_tail;
	uint64_t before = conn->stalled_at, now = conn->managed && !trimmed ? stalled_at(conn, fd) : 0;
	conn->stalled_at = now;
	slot_unlock(&slot->tx_lock);
	if (idle && unlikely(now && now == before) && leave_ring(conn, fd))
		set_conn_switched(conn);
	return trimmed;
}

/* Gives back the pages of rings that were idle for a second. For threads that are about to sleep; no lock is held. */
void conns_trim(int64_t now)
{
	static _Atomic int64_t trimmed_at;
	int64_t last = word_load(trimmed_at);
	bool again = false;

	if (likely(!word_load(trim_due) || now - last < TRIM_AFTER_NS) ||
	    !atomic_compare_exchange_strong(&trimmed_at, &last, now))
		return;
	atomic_store(&trim_due, false);
	for (uint32_t fd = 0; fd < atomic_load(&fd_end); fd++) {
		HELD conn = conn_hold((int)fd);
		if (conn)
			again |= !trim(conn, (int)fd);
	}
	if (again)
		atomic_store(&trim_due, true);
}
