/* shim_demote.c - a connection as a whole: it is attached, goes back to TCP, and may come again. */
#include "shim_switch.h"

#include <fcntl.h>
#include <signal.h>

/* Milliseconds that a call waits: */
#define ACK_TURNS 10000    /* for an answer by TCP, until the provider between has reported our offset to the peer */
#define SUCCESSOR_TURNS 200   /* milliseconds that exec waits for who else holds an inherited connection */
#define REQUEST_TURNS 1000 /* for the request that the peer returns to TCP, which is made in any case */
#define ANSWER_TURNS 3     /* for the answer of a peer to a recall, if it was asleep on its doorbell */
#define READ_TURNS 200     /* for the peer to read its ring, whose bytes no process can send again */
#define COUNT_LOOKS 8 /* Looks at counts that change meanwhile */
#define SETTLE_TURNS 11000 /* that reads what a ring held last, until a provider between has brought what it has */

/* All calls still come here, so one of the next can go back; and the connection may be promoted again. */
static bool gentle(enum reason_code reason)
{
	return reason == REASON_DEMOTED || reason == REASON_LATENCY;
}

bool process_confined; /* This process can neither hand a socket on nor change it; see shim_sandbox.c */

/* True if no byte has passed us by until now. The other end may just be reading or sending. */
static bool all_counted(struct conn *conn, int fd)
{
	enum count rx = COUNT_UNSTABLE, tx = COUNT_UNSTABLE;

	for (int look = 0; look < COUNT_LOOKS && (rx == COUNT_UNSTABLE || tx == COUNT_UNSTABLE); look++) {
		rx = rx_count(conn, fd);
		tx = tx_count(conn, fd);
	}
	return rx == COUNT_EQUAL && tx == COUNT_EQUAL;
}

/* No lock is held, before the filter holds. Whether another process may go on with the connection when this one has ended. */
static bool confines(struct conn *conn)
{
	const int fd = process_confined ? conn_fd(conn) : -1;

	return !slot_has(conn->slot, SLOT_PIN) && fd >= 0 && !slot_is_guest(conn->slot) &&
	       !foreign_pids && /* else nobody learns of the end */
	       word_load(conn->slot->holders) > 1 && (slot_has(conn->slot, SLOT_CONFINED) || all_counted(conn, fd));
}

void conn_pin(struct conn *conn, enum reason_code reason)
{
	struct conn_slot *slot = conn->slot;
	uint32_t stays = gentle(reason)                               ? SLOT_DEMOTED
	                 : reason == REASON_INHERITED                 ? SLOT_INHERITED
	                 : reason == REASON_SANDBOX && confines(conn) ? SLOT_CONFINED
	                                                              : SLOT_PIN;

	if (stays == SLOT_INHERITED)
		atomic_store(&slot->inherited_ns, (uint64_t)now_ns()); /* the time before the flag: see inherited_released() */
	uint32_t passed = reason == REASON_PASSED || reason == REASON_INHERITED ? SLOT_PASSED : 0;
	if (atomic_fetch_or(&slot->flags, stays | passed) & (SLOT_PIN | stays))
		return;
	word_store(slot->reason, reason);
	if (word_load(slot->state) == STATE_OFFERED) {
		/* The other end may hold the channel already and can have no second one, so we take this one and do not use it. */
		if (stays != SLOT_PIN)
			return;
		rpc_withdraw(conn);
	}
	if (!atomic_load(&conn->managed))
		word_store(slot->state, STATE_PINNED);
}

_Atomic bool rings_ever;

int conn_attach(struct conn *conn, int fd, int segment_fd, int side, struct remote_doorbell *remote,
                struct doorbell *local)
{
	struct conn_slot *slot = conn->slot;
	struct channel_own own = channel_own_of(slot);
	int failed = channel_map_as(&conn->channel, segment_fd, side, &own, true);

	if (failed)
		return failed;
	/* The provider between has left already. No byte has gone this way, so the connection may be offered another channel. */
	if (conn_relayed(conn) && (conn_notice(conn) & (CHANNEL_RESET | CHANNEL_OVER)) == CHANNEL_OVER) {
		channel_unmap(&conn->channel);
		conn->channel = (struct channel_end){0};
		return -ENOTCONN;
	}
	conn_keep_segment(conn, segment_fd);
	word_store(conn->channel.local->slot, slot_index(slot));
	word_store(conn->channel.local->generation, conn->generation);
	memcpy(conn->channel.local->family_id, slot_family(slot), sizeof(family_id));
	atomic_store(&conn->channel.local->knows, KNOWS_RING_ALWAYS | KNOWS_NEW_DOORBELL | KNOWS_SPACER);
	conn->remote_doorbell = remote;
	conn->doorbell = local;
	conn->probe_countdown = PROBE_EVERY;
	word_store(slot->state, STATE_ATTACHED);
	word_store(slot->reason, REASON_WAITING_FOR_PEER);
	atomic_store(&conn->managed, 1);
	word_store(rings_ever, true);
	/* Set since the offer; conn_demote() sets this first and reads `managed` afterwards */
	if (slot_has(slot, SLOT_STAYS & ~SLOT_PIN)) {
		word_store(slot->state, STATE_PINNED);
		word_store(slot->reason, slot_has(slot, SLOT_DEMOTED)     ? REASON_DEMOTED
		                         : slot_has(slot, SLOT_INHERITED) ? REASON_INHERITED
		                                                          : REASON_SANDBOX);
		atomic_fetch_or(&conn->channel.local->notice, CHANNEL_DEMOTE);
	}
	conn_bound(conn, fd);
	conn_loose(conn);
	set_conn_attached(conn); /* waits must be able to wake us before we tell the peer that we are there */
	if (slot_has(slot,
	             SLOT_WR_SHUT)) /* else the FIN that the peer has, or will have, looks like a close; see shutdown() */
		atomic_store(&conn->channel.local->shut_wr, 1);
	atomic_store_explicit(&conn->channel.local->attached, 1, memory_order_release);
	peer_wake(conn);
	shim_log("fd %d attached as side %d", fd, side);
	return 0;
}

/*
 * Called before the socket is passed on: ends our round, and gives the peer a moment to read the ring. If the peer passes its
 * socket on as well, no process is left that could send these bytes again.
 */
static void conn_drain_ring(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;

	slot_lock(&slot->tx_lock);
	bool moved = conn->managed && tx_by_ring(slot) && tx_acked(conn);
	if (moved) {
		tx_back(conn, fd);
		peer_wake(conn);
	}
	slot_unlock(&slot->tx_lock);
	for (int turn = 0; moved && turn < READ_TURNS && channel_tx_unread(&conn->channel) && !conn_recalled_since(conn) &&
	                   !slot_has(slot, SLOT_RESET | SLOT_PEER_GONE);
	     turn++)
		raw_poll(NULL, 0, 1);
}

/*
 * rx_lock held. Recalls what is not read of the ring, and what a send may put there across our request: it comes again by TCP.
 * Such a send looks for requests once more before it returns, so no other call of the peer is needed. False: the ring is read to
 * its end, as the peer is gone, has ended, or has gone back. With `follows` the last holds only if it may have sent by TCP since.
 */
bool ring_recall(struct conn *conn, bool follows)
{
	struct conn_slot *slot = conn->slot;
	struct channel_side *local = conn->channel.local, *remote = conn->channel.remote;
	const uint32_t round = word_load(slot->rx_round);

	if (slot_has(slot, SLOT_FIN))
		return false;
	atomic_store(&local->rx_frozen, atomic_load(conn->channel.own.head));
	uint32_t how = channel_decide(&remote->tx_back, round, CHANNEL_RECALLED);
	if (follows && how == CHANNEL_BACK && !slot_has(slot, SLOT_RELAYED | SLOT_RELAY_OVER))
		how = channel_decide(&remote->tx_follows, round, CHANNEL_RECALLED);
	if (how != CHANNEL_RECALLED)
		return false;
	rx_move(slot, RX_ON_RECALL);
	atomic_fetch_or(&local->notice, CHANNEL_RECALL);
	return true;
}

/*
 * The next owner of the socket does not know of bytes to be sent again, nor of a reset that the kernel has reported to us
 * alone.
 */
static void leave_nothing_owed(struct conn *conn, int fd)
{
	if (tx_is(conn->slot, TX_RESEND))
		conn_flush(conn, fd);
	uint32_t unreported = word_load(conn->slot->error);
	if (unreported && unreported != EPIPE && !(unreported & ERROR_IN_KERNEL))
		tcp_reset(fd); /* a reset lets its reads fail, instead of ending as if nothing were missing */
}

/*
 * No lock is held. The peer is to send again the bytes in the ring. If it is asleep elsewhere, the provider wakes its
 * process.
 */
static void press_recall(struct conn *conn)
{
	struct conn_slot *slot = conn->slot;
	const struct channel_side *remote = conn->channel.remote;
	const uint32_t round = word_load(slot->rx_round);

	if (conn_relayed(conn) || !rx_is(slot, RX_RECALLED) || channel_rx_avail(&conn->channel) <= 0)
		return;
	for (int turn = 0; word_load(remote->tx_ended) != round; turn++) {
		if (turn == ANSWER_TURNS || !(word_load(*conn->remote_doorbell->word) & 0xffff)) {
			rpc_serve(conn);
			return;
		}
		raw_poll(NULL, 0, 1);
	}
}

/*
 * Takes both directions back to TCP, and loses nothing. Ours goes at once: the peer reads the ring to its end, then TCP. The
 * peer's goes when it sees the request, with its next call or wait. With `recall`, bytes that it sent by ring and we have not
 * read come again by TCP, as the next reader of the socket has no shim.
 */
void conn_demote(struct conn *conn, int fd, enum reason_code reason, bool recall)
{
	struct conn_slot *slot = conn->slot;
	int saved = errno;
	bool moved = false, requested = false, relayed = false;
	bool waits = !gentle(reason);

	if (conn->managed && unlikely(conn_fd_stale(conn, fd)))
		return;
	conn_pin(conn, reason);
	if (!waits && slot_has(slot, SLOT_PIN))
		return; /* a connection on TCP, or on its way there, has a better reason */
	if (!conn->managed)
		return;
	if (conn_relayed(conn) && waits) {
		slot_lock(&slot->tx_lock); /* a thread that was just switching to the ring has finished */
		bool unacknowledged = conn->managed && tx_by_ring(slot) && !tx_acked(conn);
		slot_unlock(&slot->tx_lock);
		if (unacknowledged && !slot_has(slot, SLOT_RESET)) /* no lock is held: other calls on the connection go on */
			relay_acked(conn, CHANNEL_ACKED_SWITCH, ACK_TURNS);
	}
	slot_lock(&slot->rx_lock);
	slot_lock(&slot->tx_lock);
	if (conn->managed) {
		moved = tx_by_ring(slot) && (waits || tx_acked(conn));
		if (moved)
			tx_back(conn, fd);
		/* else the kernel, or a process without a shim, sends bytes that we do not see */
		if (waits && !tx_follows(conn))
			tx_recalled(conn, fd);
		else if (reason == REASON_URGENT_DATA)
			tx_space(conn, fd);
		relayed = conn_relayed(conn);
		requested = rx_watches(slot);
		if (requested && recall)
			ring_recall(conn, true);
		atomic_fetch_or(&conn->channel.local->notice, CHANNEL_DEMOTE); /* and it must not come back by itself */
		if (!slot_has(slot, SLOT_PIN) || (waits && reason != REASON_INHERITED)) /* else there is a better one */
			word_store(slot->reason, reason);
		word_store(slot->state, STATE_PINNED);
		peer_wake(conn);
		shim_log("fd %d: demoted (%d)", fd, (int)reason);
	}
	slot_unlock(&slot->tx_lock);
	slot_unlock(&slot->rx_lock);
	if (recall && recall_open(conn)) /* maybe by another process */
		recall_settle(conn, fd);
	else if (requested && waits && relayed && !slot_has(slot, SLOT_RESET))
		relay_acked(conn, CHANNEL_ACKED_REQUEST, REQUEST_TURNS);
	if (recall) {
		press_recall(conn);
		leave_nothing_owed(conn, fd);
	}
	if (moved)
		conn_wake_own(conn); /* a wake-up for threads that wait for room in the ring: TCP's buffer may have some */
	set_conn_switched(conn);
	errno = saved;
}

/* The kernel would have signalled bytes that have come just now. */
static void signal_io(int fd)
{
	struct f_owner_ex owner;

	if (!(real.fcntl64(fd, F_GETFL, 0) & O_ASYNC) || real.fcntl64(fd, F_GETOWN_EX, (long)&owner) < 0 || !owner.pid)
		return;
	long number = real.fcntl64(fd, F_GETSIG, 0);
	if (number <= 0)
		number = SIGIO;
	if (owner.type == F_OWNER_TID)
		real.syscall(SYS_tkill, owner.pid, number, 0, 0, 0, 0);
	else
		real.syscall(SYS_kill, owner.type == F_OWNER_PGRP ? -owner.pid : owner.pid, number, 0, 0, 0, 0);
}

/* Rings count for the kernel's low-water mark, too, where it alone is to tell of what comes. Else it is as the program has set it. */
void low_water_left(struct conn *conn, int fd)
{
	uint64_t low = word_load(conn->slot->rx_low_water);

	if (likely(low <= 1))
		return;
	size_t there = slot_has(conn->slot, SLOT_LEAVES) ? channel_rx_peek(&conn->channel) : 0;
	int left = low > there ? (int)(low - there) : 1;
	real.setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &left, sizeof(left));
}

static bool relay_leaves(const struct conn *conn)
{
	return conn_relayed(conn) && (word_load(conn->channel.remote->knows) & KNOWS_LEAVE);
}

/* True if the ring is at its end, or has bytes. */
static bool ring_settled(const struct conn *conn)
{
	return !rx_watches(conn->slot) || conn_peer_back(conn) ||
	       atomic_load_explicit(&conn->channel.remote->tx_fin, memory_order_acquire) ||
	       channel_rx_avail(&conn->channel) != 0 || slot_has(conn->slot, SLOT_RESET);
}

/*
 * No lock is held. A provider between ends the ring, whatever the peer does. Until it has, it may bring bytes of which the kernel
 * tells nothing: this waits for them, or for the end.
 */
static void relay_settle(struct conn *conn, int fd)
{
	if (!(atomic_fetch_or(&conn->channel.local->notice, CHANNEL_LEAVE) & CHANNEL_LEAVE))
		peer_wake(conn);
	for (int turn = 0; turn < SETTLE_TURNS && !ring_settled(conn) && !relay_gone(conn); turn++)
		relay_acked(conn, 0, 1);
	if (relay_gone(conn))
		conn_probe(conn, fd);
	else if (!ring_settled(conn))
		conn_abort(conn, fd, ECONNRESET, REASON_RELAY_LOST);
}

/*
 * No lock is held, with SLOT_LEAVES, behind a read. If the ring is empty, all later bytes come by TCP, and the kernel reports
 * them. Bytes that a send has put there across our request are reported anew.
 */
void conn_leave_drained(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;
	const bool relayed = conn->managed && slot_has(slot, SLOT_LEAVES) && relay_leaves(conn);
	bool recalled = false, crossed = false;
	KEEP_ERRNO;

	if (relayed && !ring_settled(conn))
		relay_settle(conn, fd);
	slot_lock(&slot->rx_lock);
	const bool leaves = conn->managed && slot_has(slot, SLOT_LEAVES);
	if (leaves) {
		bool watches = rx_watches(slot);
		bool over = !watches || channel_rx_avail(&conn->channel) <= 0;
		if (relayed && over && rx_by_ring(slot))
			rx_back(conn, fd);
		recalled = !relayed && over && watches && ring_recall(conn, false);
		if (recalled)
			peer_wake(conn);
		uint64_t tail = atomic_load(&conn->channel.rx_peer_line->tail);
		crossed = !recalled && watches && tail != word_load(conn->leave_tail);
		word_store(conn->leave_tail, tail);
		if (over)
			slot_clear(slot, SLOT_LEAVES);
	}
	slot_unlock(&slot->rx_lock);
	if (leaves)
		low_water_left(conn, fd);
	if (recalled)
		recall_settle(conn, fd);
	if (crossed)
		signal_io(fd);
	if (leaves) /* the read may have taken TCP's last byte before the ring's first, too */
		set_conn_leaves(conn, crossed);
}

/*
 * Like conn_demote(), for a program that reads on by calls of ours, but learns of new bytes from the kernel alone: by a
 * signal, or through a set in a set. Bytes that have arrived in the ring are read from there, and were reported; later ones
 * come by TCP. So the ring is left when it is empty: at once, or by the call that reads its last byte.
 */
void conn_leave(struct conn *conn, int fd, enum reason_code reason)
{
	struct conn_slot *slot = conn->slot;

	conn_demote(conn, fd, reason, false);
	if (!conn->managed || !rx_watches(slot))
		return;
	if (!slot_has(slot, SLOT_LEAVES))
		word_store(conn->leave_tail, atomic_load(&conn->channel.rx_peer_line->tail));
	slot_set(slot, SLOT_LEAVES); /* the flag follows the request: see ring_recall() */
	conn_leave_drained(conn, fd);
}

/* No lock of the slot is held. False: another reason keeps the connection on TCP. */
static bool kept_revoke(struct conn *conn, uint32_t kept)
{
	struct conn_slot *slot = conn->slot;

	slot_lock(&slot->rx_lock);
	slot_lock(&slot->tx_lock);
	refusing_ends(conn); /* another holder may have changed O_NONBLOCK */
	uint32_t state = word_load(slot->state);
	bool was_kept = slot_has(slot, kept);
	slot_clear(slot, kept);
	bool stays = slot_has(slot, SLOT_STAYS | SLOT_RESET | SLOT_RELAY_OVER) || relay_once(conn);
	if (was_kept && (word_load(slot->flags) & SLOT_STAYS) == SLOT_DEMOTED)
		word_store(slot->reason, REASON_DEMOTED);
	if (!stays && word_load(slot->tx_retry_ns) != RETRY_NEVER)
		word_store(slot->tx_retry_ns, 0);
	if (!stays && conn->managed) {
		/* The end of the round alone revokes the request while a recall stands; see rx_open(). */
		if (was_kept && !slot_has(slot, SLOT_RD_SHUT) && !(atomic_load(&conn->channel.local->notice) & CHANNEL_RECALL))
			atomic_fetch_and(&conn->channel.local->notice, ~(uint32_t)CHANNEL_DEMOTE);
		if (state == STATE_PINNED && !rx_is(slot, RX_BARRED) && !word_load(slot->tx_retry_ns)) {
			word_store(slot->state, STATE_ATTACHED);
			word_store(slot->reason, REASON_WAITING_FOR_PEER);
			mark_promoted(conn);
		}
		peer_wake(conn);
	} else if (!stays && was_kept && state == STATE_PINNED) {
		word_store(slot->state, STATE_NATIVE);
		word_store(slot->reason, REASON_YOUNG);
	}
	slot_unlock(&slot->tx_lock);
	slot_unlock(&slot->rx_lock);
	return !stays;
}

/* No lock is held, behind that. True: it has no channel, and may be offered at once. */
static bool conn_returns(struct conn *conn, int fd)
{
	bool managed = conn->managed;

	shim_log("fd %d: may be promoted again", fd);
	if (managed) {
		conn_progress(conn, fd);
		set_conn_switched(conn);
	}
	return !managed && word_load(conn->slot->state) == STATE_NATIVE;
}

/*
 * Revokes what kept the connection on TCP for a while (`kept`: SLOT_DEMOTED or SLOT_INHERITED), and ends the wait of a direction
 * that left the ring of its own accord. Another reason stays. True: it has no channel, and may be offered at once.
 */
bool conn_promote(struct conn *conn, int fd, uint32_t kept)
{
	return kept_revoke(conn, kept) && conn_returns(conn, fd);
}

/*
 * Likewise SLOT_CONFINED, once no other process has the connection. The process makes no other one under shim_lock: so the flag is
 * not a later child's.
 */
void conn_unconfine(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;
	bool revoked = false;

	shim_lock_take();
	if (conn_alone(conn)) {
		slot_lock(&slot->rx_lock);
		slot_lock(&slot->tx_lock);
		const enum count count = counts_take(conn, fd);
		slot_unlock(&slot->tx_lock);
		slot_unlock(&slot->rx_lock);
		if (count == COUNT_DIFFERS)
			slot_set(slot, SLOT_PIN);
		revoked = count == COUNT_EQUAL && kept_revoke(conn, SLOT_CONFINED);
	}
	shim_lock_drop();
	if (revoked)
		conn_returns(conn, fd);
}

/* True if the ring of a socket that was passed on holds bytes that nobody can send again: the peer has ended its direction. */
static bool leaves_hole(struct conn *conn, bool unseen)
{
	struct conn_slot *slot = conn->slot;

	/* the order matters: another process that is just going back (about to exec) sets the notice after its recall */
	if (!conn->managed || !(unseen || slot_has(slot, SLOT_PASSED)) || !rx_watches(slot) ||
	    !(atomic_load(&conn->channel.local->notice) & CHANNEL_DEMOTE) ||
	    (channel_rx_peek(&conn->channel) == 0 && !rx_spaced(conn)))
		return false;
	/* a program that has shut its reading down may meet the end at any time, but not bytes of TCP behind the hole */
	return !slot_has(slot, SLOT_RD_SHUT) || conn_peer_back(conn);
}

/*
 * The socket lives on in a process without a shim, or in this one, whose calls are `unseen` from now on. A stream with a hole must
 * not look whole, so it is reset.
 */
void conn_abandon(struct conn *conn, int fd, bool unseen)
{
	if (!leaves_hole(conn, unseen) || conn_fd_stale(conn, fd))
		return;
	tcp_reset(fd);
	shim_log("fd %d: reset, nobody can read what its ring still holds", fd);
}

/* True if no other process can read the ring. */
static bool last_reader(struct conn *conn)
{
	return conn_alone(conn) || holders_are_strangers(conn->slot);
}

/*
 * This process becomes a program that does not know the ring. Another that holds the connection may read it, or leave the socket to
 * that program: a moment shows which. If neither happens, a program was meant to read it for which FD_CLOEXEC was taken away, or
 * whose standard input it is.
 */
void conn_bequeath(struct conn *conn, int fd)
{
	holder_estrange(conn->slot, true); /* the count before the look: of two at once the later one knows of both */
	for (int turn = 0; turn < SUCCESSOR_TURNS && !last_reader(conn) && leaves_hole(conn, false); turn++)
		raw_poll(NULL, 0, 1);
	if (last_reader(conn) || fd <= STDERR_FILENO || conn->heritable)
		conn_abandon(conn, fd, false);
}

/*
 * A program whose calls no shim sees reads on, from now on. So unread bytes have to be in the kernel. Otherwise the stream is
 * broken before it is given away, as its next reader would take TCP's end for the stream's.
 */
void conn_leave_to_stranger(struct conn *conn, int fd, enum reason_code reason)
{
	conn_drain_ring(conn, fd);
	conn_demote(conn, fd, reason, true);
	conn_abandon(conn, fd, true);
}
