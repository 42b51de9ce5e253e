/*
 * shim_idle.c - connections that stand still: their rings' pages are given back.
 */
#include "shim_switch.h"

_Atomic bool trim_due;

/*
 * Has it no room, and does it not read what is there? Then how far it has read, as in conn_stuck(); else 0. By TCP there may
 * be bytes as well, behind which the peer's FIN would stand.
 */
static uint64_t unread(const struct conn *conn, int fd)
{
	struct pollfd native = {.fd = fd, .events = POLLIN};

	if (channel_tx_peek(&conn->channel) >= room_wanted(conn))
		return 0;
	if (raw_poll(&native, 1, 0) > 0 && (native.revents & POLLIN))
		return word_load(conn->slot->rx_tcp_bytes) + 1;
	return conn_stuck(conn);
}

/* False: it has sent since the last time, or its peer has not read all: it is to be looked at again. */
static bool trim(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;

	if (!conn->managed || tx_is(slot, TX_RESEND) || !slot_trylock(&slot->tx_lock))
		return true;
	uint64_t tail = conn->managed ? atomic_load(conn->channel.own_tail) : conn->idle_tail;
	bool idle = tail == conn->idle_tail;
	/* what was recalled has gone out by TCP: nobody reads it here */
	bool recalled = conn->managed && tx_is(slot, TX_TCP) &&
	                (atomic_load(&conn->channel.local->tx_back) == (word_load(slot->tx_round) << 2 | CHANNEL_RECALLED) ||
	                 atomic_load(&conn->channel.local->tx_follows) == (word_load(slot->tx_round) << 2 | CHANNEL_RECALLED));
	if (idle && tail != conn->trimmed_tail && !slot_has(slot, SLOT_RESERVED) &&
	    (recalled || channel_tx_unread(&conn->channel) == 0)) {
		channel_trim(&conn->channel);
		conn->trimmed_tail = tail;
	}
	conn->idle_tail = tail;
	bool trimmed = idle && tail == conn->trimmed_tail;
	uint64_t before = conn->unread, now = conn->managed && !trimmed ? unread(conn, fd) : 0;
	conn->unread = now;
	slot_unlock(&slot->tx_lock);
	/* for a second it has neither sent nor read; who reads may have to wait for nothing but a link between hosts */
	if (idle && unlikely(now && now == before) && leave(conn, fd, REASON_BOTH_WAYS_FULL))
		set_conn_switched(conn);
	return trimmed;
}

/* Who has sent nothing for a second gives its ring's pages back. For threads that are about to sleep; no lock is held. */
void conns_trim(int64_t now)
{
	static _Atomic int64_t trimmed_at;
	int64_t last = atomic_load_explicit(&trimmed_at, memory_order_relaxed);
	bool again = false;

	if (likely(!atomic_load_explicit(&trim_due, memory_order_relaxed) || now - last < TRIM_AFTER_NS) ||
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
