/* shim_end.c - how the peer's stream ends: what its kernel says, and what the ring and its words add to that. */
#include "shim_switch.h"

#include <sys/ioctl.h>

/* True if the bytes that the peer has not read yet are in the ring. */
static bool tx_in_ring(const struct conn *conn)
{
	uint32_t round = word_load(conn->slot->tx_round);

	if (slot_has(conn->slot, SLOT_RELAY_OVER))
		return false; /* the head that we see is the provider's last, not the peer's */
	if (tx_by_ring(conn->slot))
		return true;
	uint32_t follows = atomic_load(&conn->channel.local->tx_follows);
	return atomic_load(&conn->channel.local->tx_back) == (round << 2 | CHANNEL_BACK) &&
	       (follows >> 2 != round || (follows & 3) == CHANNEL_BACK);
}

/* True if we have to judge how the peer ends: its kernel does not know of bytes that it leaves in the ring. */
bool conn_judges_end(const struct conn *conn)
{
	return tx_by_ring(conn->slot) || (tx_in_ring(conn) && channel_tx_unread(&conn->channel) != 0);
}

/*
 * Bytes are on TCP while we read the ring, in round `round`: the peer has gone back, or breaks the rules. A recall of ours
 * would explain them, but is the peer's word alone. If the thread that holds the lock is just recalling, it looks itself.
 */
static bool rx_astray(struct conn *conn, uint32_t round)
{
	struct conn_slot *slot = conn->slot;
	bool held = word_load(slot->rx_lock) == self.tid;

	if (!held && !slot_trylock(&slot->rx_lock))
		return false;
	bool astray = rx_by_ring(slot) && word_load(slot->rx_round) == round && !conn_peer_back(conn);
	if (!held)
		slot_unlock(&slot->rx_lock);
	return astray;
}

/*
 * The kernel's error as far as it shows from outside; 0: it does not. The kernel keeps it for the call that takes it, as the program
 * may ask in ways that go past us, or dissolve the connection.
 */
static uint32_t error_seen(const struct conn *conn, int fd)
{
	int queued = 0, marked = 0;

	if (slot_has(conn->slot, SLOT_FIN))
		return EPIPE;
	real.ioctl(fd, FIONREAD, &queued);
	const uint64_t known = word_load(conn->slot->rx_tcp_bytes) + (uint64_t)queued;
	/* One byte of the kernel's count that we do not know is a FIN, or an urgent byte. A close over unread bytes sends no FIN. */
	const bool finless = (conn_notice(conn) & CHANNEL_CLOSED) && !word_load(conn->channel.remote->shut_wr) &&
	                     tx_in_ring(conn) && channel_tx_unread(&conn->channel);
	if (kernel_lost(fd, known + 1 + finless))
		return ECONNRESET;
	real.ioctl(fd, SIOCATMARK, &marked);
	return !queued && !marked && kernel_lost(fd, known + 2) ? EPIPE : 0;
}

/* tx_lock held. True if the connection is dead, with an error: it is known then. The kernel keeps it if it shows from outside. */
bool error_met(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;
	struct pollfd tcp = {.fd = fd};
	int error = 0;

	if (raw_poll(&tcp, 1, 0) <= 0 || !(tcp.revents & POLLERR))
		return false;
	if (word_load(slot->error) & ERROR_IN_KERNEL)
		return true;
	uint32_t seen = kernel_closed(fd) ? error_seen(conn, fd) : 0;
	if (!seen && (!option_get(fd, SOL_SOCKET, SO_ERROR, &error, sizeof(error)) || !error))
		return false; /* an error of a send that is done */
	word_store(slot->error, seen ? seen | ERROR_IN_KERNEL : (uint32_t)error);
	return true;
}

/* The native socket has an error. `reset`: the connection was dead before it was asked. */
static void error_received(struct conn *conn, int fd, bool on_ring, bool reset)
{
	struct conn_slot *slot = conn->slot;
	int error = 0;

	if (!on_ring) {
		slot_set(slot, SLOT_PEER_GONE); /* bytes may be left on TCP: the kernel tells data and error in order */
		return;
	}
	uint32_t seen = reset ? 0 : error_seen(conn, fd);
	if (!seen)
		option_get(fd, SOL_SOCKET, SO_ERROR, &error, sizeof(error));
	if (reset && error == EPIPE)
		error = 0; /* a reset behind a FIN, which came without the lost bytes */
	if (error || !slot_has(slot, SLOT_RESET)) /* else another thread has asked just now */
		word_store(slot->error, seen ? seen | ERROR_IN_KERNEL : error ? (uint32_t)error : ECONNRESET);
	slot_set(slot, SLOT_RESET | SLOT_FIN | SLOT_PEER_GONE);
}

/* The peer's FIN has come. `known`: so has how it ended. `reported`: our kernel has seen a reset behind it. */
static void fin_received(struct conn *conn, bool known, bool reported)
{
	struct conn_slot *slot = conn->slot;
	const struct channel_side *remote = conn->channel.remote;
	bool closed = atomic_load_explicit(&remote->notice, memory_order_acquire) & CHANNEL_CLOSED;
	bool shut = atomic_load_explicit(&remote->shut_wr, memory_order_acquire);
	uint32_t bits = SLOT_FIN;

	/* The peer stores shut_wr before its kernel sends the FIN; a FIN without it means that nobody is left there. */
	if (known && peer_attached(conn) && (closed || !shut) && !slot_has(slot, SLOT_RELAY_OVER)) {
		bits |= SLOT_PEER_GONE;
		/*
		 * A peer that was killed could not make its kernel reset because of unread bytes; see announce_close(). One that has
		 * recalled them has passed the socket on, and the kernel judges the new holder.
		 */
		if (!slot_has(slot, SLOT_PEER_GONE) && tx_in_ring(conn) && !closed && !reported &&
		    !(conn_notice(conn) & CHANNEL_RECALL) && channel_tx_unread(&conn->channel) != 0) {
			/* a reset after a FIN is EPIPE in the kernel, and readers do not get it (tcp_reset) */
			word_store(slot->error, shut ? EPIPE : ECONNRESET);
			bits |= SLOT_RESET;
		}
	}
	slot_set(slot, bits);
}

/* Bytes are on TCP while we read the ring, in round `round`. */
static void tcp_bytes_received(struct conn *conn, int fd, uint32_t round)
{
	char byte;

	ssize_t n = raw_recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
	keep_error(conn, n);
	if (n > 0 && rx_astray(conn, round))
		conn_violation(conn, fd);
}

static void probe(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;
	bool relayed = conn_relayed(conn);
	struct pollfd asked_of[2] = {{.fd = fd, .events = POLLIN | POLLRDHUP},
	                             {.fd = relayed ? conn->remote_doorbell->liveness_fd : -1}};
	uint32_t round = atomic_load(&slot->rx_round); /* the round before the state, which is of that round */
	bool on_ring = rx_by_ring(slot), known = true;

	if (slot_has(slot, SLOT_RESET) ||
	    (slot_has(slot, SLOT_FIN) && slot_has(slot, SLOT_PEER_GONE) && !(relayed && relay_gone(conn))))
		return;
	/*
	 * The FIN may stand behind bytes that the program does not read. If the peer asked us back to TCP, another process may go
	 * on with the socket, and the kernel will know.
	 */
	if ((conn_notice(conn) & (CHANNEL_CLOSED | CHANNEL_DEMOTE | CHANNEL_RECALL)) == CHANNEL_CLOSED)
		slot_set(slot, SLOT_PEER_GONE);
	int ready_len = raw_poll(asked_of, 1 + relayed, 0);
	short events = asked_of[0].revents;
	if ((events & POLLERR) && zerocopy_in_kernel(slot) && !kernel_closed(fd))
		events &= ~POLLERR; /* an error of a send that is done */
	if (relayed && asked_of[1].revents)
		atomic_store(&conn->remote_doorbell->dead, true);
	if (relayed && relay_gone(conn)) {
		relay_lost(conn, fd);
		relayed =
			conn_relayed(conn); /* else we would wait for an end that has come already, and nobody would report it */
	}
	bool reset = slot_has(slot, SLOT_RESET), failed = ready_len > 0 && kernel_failed(fd, (unsigned short)events);
	if (ready_len <= 0 || (events & POLLNVAL) || (failed && relayed && !reset && relay_reset_waits(conn)))
		return;
	bool fin = events & (POLLRDHUP | POLLHUP);
	if (fin && slot_has(slot, SLOT_RD_SHUT))
		fin = kernel_fin(fd); /* a shutdown of our own reports the same */
	if (failed)
		error_received(conn, fd, on_ring, reset);
	else if (on_ring && !relayed && (events & POLLIN))
		tcp_bytes_received(conn, fd, round);
	if (fin && relayed && !slot_has(slot, SLOT_RESET)) {
		known = relay_ended(conn);
		fin = known || !rx_depends(conn) || rx_lost(conn);
	}
	if (fin && !slot_has(slot, SLOT_RESET))
		fin_received(conn, known, (events & POLLHUP) && !slot_has(slot, SLOT_WR_SHUT));
}

/* Asks the native socket whether the stream has ended. Any thread, any lock. */
void conn_probe(struct conn *conn, int fd)
{
	bool relayed = conn_relayed(conn);
	int saved = errno;

	if (unlikely(conn_fd_stale(conn, fd)))
		return;
	probe(conn, fd);
	/* A thread that waits for the ring's end has ignored TCP's, whose edge does not come again: nothing else wakes it now. */
	if (relayed && !conn_relayed(conn))
		conn_wake_own(conn);
	errno = saved;
}

/* The same for a number that was the connection's lately: it is asked about only where something is found. */
void conn_probe_known(struct conn *conn, int fd)
{
	struct pollfd tcp = {.fd = fd, .events = POLLIN | POLLRDHUP};
	KEEP_ERRNO;

	if (conn_relayed(conn) || conn_notice(conn) || raw_poll(&tcp, 1, 0) != 0)
		conn_probe(conn, fd);
}

/*
 * A read from TCP has met the end: everything that waits on the connection learns of it. True: it is an error, in errno, as
 * the peer has left bytes in the ring unread, which its kernel does not know.
 */
bool conn_tcp_ended(struct conn *conn, int fd)
{
	conn_probe(conn, fd);
	if (!slot_error(conn->slot) || slot_error(conn->slot) == EPIPE)
		return false;
	errno = take_error(conn);
	return errno != 0;
}
