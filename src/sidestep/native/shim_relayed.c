/*
 * shim_relayed.c - a provider between the two ends of a connection.
 *
 * A provider between (SLOT_RELAYED): the segment's other side is a provider, which hands bytes and words on to the peer's
 * segment (provider/carry/remote_relay.py), later than TCP does its own. What depends on the order of the two is settled thus:
 *   - TCP's end is the end only once the provider has published tx_fin; it is asked by fin_seen, and answers always.
 *     How the peer ended (shut_wr, CHANNEL_CLOSED) is not judged before that either. A reset waits the same way.
 *   - Going back to TCP has to wait until the provider has handed our offset on (acked): else the peer, who does not
 *     know of the ring yet, would read what TCP brings before what the ring holds. Until then we stay on the ring, and one
 *     of our next calls goes back. Only a call that nothing of ours follows, or that the kernel has to answer, waits itself.
 *   - Who asks the peer back to TCP waits the same way: else the peer's next bytes would still go to the ring, and come
 *     again only with its next call.
 *   - Bytes on TCP are no violation: the peer may have gone back, and the word of it is on its way behind the ring's bytes.
 *   - A provider that dies, or says CHANNEL_RESET, has lost bytes: the connection is reset, unless neither direction can
 *     have any there. One that lets go of the connection says CHANNEL_OVER, as a consent or a question may cross that.
 *   - There is one round: a direction that has gone back stays on TCP.
 */
#include "shim_switch.h"

#include <sys/ioctl.h>

bool relay_gone(const struct conn *conn)
{
	return word_load(conn->remote_doorbell->dead) ||
	       (atomic_load_explicit(&conn->channel.remote->notice, memory_order_acquire) & (CHANNEL_RESET | CHANNEL_OVER));
}

bool conn_relay_news(const struct conn *conn)
{
	const struct conn_slot *slot = conn->slot;

	if (!conn_relayed(conn) || slot_has(slot, SLOT_RESET))
		return false;
	return relay_gone(conn) ||
	       (slot_has(slot, SLOT_NATIVE_FIN) && !slot_has(slot, SLOT_FIN) &&
	        atomic_load_explicit(&conn->channel.remote->tx_fin, memory_order_acquire));
}

/* Asks whether the provider is still there; once for those that follow each other with the same one. */
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

/* TCP's end has come: has the provider said that the ring's has, too? It is told to look. */
bool relay_ended(struct conn *conn)
{
	uint32_t seen = CHANNEL_SEEN_END | (slot_has(conn->slot, SLOT_NATIVE_RESET) ? CHANNEL_SEEN_RESET : 0u);

	slot_set(conn->slot, SLOT_NATIVE_FIN);
	if (~atomic_fetch_or(&conn->channel.local->fin_seen, seen) & seen) {
		full_fence();
		doorbell_ring(conn);
	}
	return atomic_load_explicit(&conn->channel.remote->tx_fin, memory_order_acquire);
}

/* TCP has told a reset: are bytes that were sent before it still on their way? Then it is not heard yet. */
bool relay_reset_waits(struct conn *conn)
{
	if (slot_has(conn->slot, SLOT_RD_SHUT) || !rx_watches(conn->slot))
		return false;
	slot_set(conn->slot, SLOT_NATIVE_RESET);
	return !relay_ended(conn);
}

/* The same for a reader that has come to the end of TCP's bytes, and would take the error out of the kernel. */
bool rx_reset_waits(struct conn *conn, int fd)
{
	struct pollfd native = {.fd = fd};
	int queued = 0;

	return conn_relayed(conn) && raw_poll(&native, 1, 0) > 0 && (native.revents & POLLERR) &&
	       real.ioctl(fd, FIONREAD, &queued) == 0 && queued == 0 && relay_reset_waits(conn);
}

/* Whether the ring's end is still to be told, though the kernel's has been. */
bool conn_end_withheld(const struct conn *conn)
{
	const struct conn_slot *slot = conn->slot;

	return conn_relayed(conn) && slot_has(slot, SLOT_NATIVE_FIN) && rx_watches(slot) &&
	       !slot_has(slot, SLOT_FIN | SLOT_RESET);
}

/* And no byte is left there: then the kernel has nothing more to say. */
bool conn_fin_waits(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;
	int queued = 0;

	if (!conn_end_withheld(conn))
		return false;
	return rx_by_ring(slot) || real.ioctl(fd, FIONREAD, &queued) < 0 || queued == 0;
}

/*
 * Whether bytes that go by TCP from now on are read behind those of the ring: a provider between has handed our offset on,
 * or nobody reads the ring, as it was recalled.
 */
bool tx_acked(const struct conn *conn)
{
	return likely(!conn_relayed(conn)) ||
	       (atomic_load_explicit(&conn->channel.remote->acked, memory_order_acquire) & CHANNEL_ACKED_SWITCH) ||
	       atomic_load(&conn->channel.local->tx_back) == (word_load(conn->slot->tx_round) << 2 | CHANNEL_RECALLED);
}

/*
 * Whether what we send goes through the provider. How much of it arrived before an end is for the peer to judge, and so once
 * it is decided that we go back or end, which another thread may just be doing; what was recalled comes again by TCP.
 */
static bool tx_relayed(const struct conn *conn)
{
	return tx_by_ring(conn->slot) && !slot_has(conn->slot, SLOT_WR_SHUT | SLOT_PEER_GONE) &&
	       atomic_load(&conn->channel.local->tx_back) >> 2 != word_load(conn->slot->tx_round);
}

/*
 * What the provider held is gone. Any thread, any lock. The peer hears a reset as well: it must not take what it got for
 * all. Where neither direction depends on the provider any more, it is forgotten: from then on the kernel alone knows how
 * the connection ends, as what the segment says of the peer has stood still since.
 */
void relay_lost(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;
	/* all of it is in our ring once the provider has published how that ends */
	bool ended = atomic_load_explicit(&conn->channel.remote->tx_fin, memory_order_acquire);
	bool invited = atomic_load(&conn->channel.remote->acked) & CHANNEL_ACKED_READY;
	/* or it is decided how it ends; who is just recalling the rest looks himself whether it comes: conn_demote() */
	bool decided = atomic_load(&conn->channel.remote->tx_back) >> 2 == word_load(slot->rx_round);
	bool receives = rx_watches(slot) && !slot_has(slot, SLOT_RD_SHUT) && invited && !decided && !ended;

	if (!receives && !tx_relayed(conn) && !(conn_notice(conn) & CHANNEL_RESET)) {
		slot_set(slot, SLOT_RELAY_OVER); /* full fence; before the second look: tx_switch() does it the other way round */
		if (!tx_relayed(conn)) {
			slot_clear(slot, SLOT_RELAYED);
			return;
		}
		slot_clear(slot, SLOT_RELAY_OVER);
	}
	conn_abort(conn, fd, ended ? EPIPE : ECONNRESET, REASON_RELAY_LOST); /* as the kernel has it, after a FIN and before */
}

/* No lock held. Waits until the provider has handed on to the peer what we told it. False: it did not, and may be dead. */
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
