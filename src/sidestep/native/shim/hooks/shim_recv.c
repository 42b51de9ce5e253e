/* shim_recv.c - receiving, from whichever path has the next bytes. */
#include "shim_call.h"
#include "shim_spin.h"
#include "shim_tcp_wait.h"

#include <sys/ioctl.h>

#define LISTEN_EVERY 64 /* ring reads between two looks for commands of the provider */

/* rx_lock held. Copies `len` bytes from the ring to where byte `at` of the call belongs. */
static size_t ring_read(const struct call *call, size_t at, size_t len)
{
	struct conn *conn = call->conn;
	const struct iovec *iov = call->iov;
	size_t from = 0, skip = at;

	if (call->flags & MSG_TRUNC) {
		from = len; /* TCP: the bytes are thrown away, see recv(2) */
	} else if (likely(call->iov_len == 1)) {
		channel_rx_get(&conn->channel, 0, (uint8_t *)iov->iov_base + at, len);
		from = len;
	} else {
		for (int i = 0; i < call->iov_len && from < len; i++) {
			if (skip >= iov[i].iov_len) {
				skip -= iov[i].iov_len;
				continue;
			}
			size_t part = iov[i].iov_len - skip < len - from ? iov[i].iov_len - skip : len - from;
			channel_rx_get(&conn->channel, from, (uint8_t *)iov[i].iov_base + skip, part);
			from += part;
			skip = 0;
		}
	}
	if (!(call->flags & MSG_PEEK)) {
		channel_rx_consume(&conn->channel, len);
		word_store(conn->slot->rx_ring_bytes, conn->slot->rx_ring_bytes + len);
		word_store(conn->slot->rx_ring_msgs, conn->slot->rx_ring_msgs + 1);
		if (unlikely(len >= PAST_MIN))
			conn_reads_here(conn);
		if (unlikely(word_load(conn->message_ns)))
			count_turn(conn->slot);
	}
	return len;
}

/* Reads TCP by `receive`, with what comes beside the bytes. */
static ssize_t tcp_message(const struct call *call, struct iovec *iov, size_t iov_len, int flags,
                           ssize_t (*receive)(int fd, struct msghdr *message, int flags))
{
	struct beside *beside = call->beside;
	struct msghdr message = {.msg_iov = iov, .msg_iovlen = iov_len};

	if (likely(!beside))
		return receive(call->fd, &message, flags);
	message.msg_control = beside->control;
	message.msg_controllen = beside->room;
	ssize_t n = receive(call->fd, &message, flags);
	if (n >= 0) {
		beside->len = message.msg_controllen;
		beside->flags = message.msg_flags;
	}
	return n;
}

/*
 * rx_lock held, consent declared. Reads TCP, but never past the offset at which the sender moved to the ring. It may be back
 * on TCP already, with bytes that come behind the ring's. Bytes that the kernel held while tx_switched was still unset were
 * sent before the switch. So tx_switched is read between the count and the read. Returns as recvmsg.
 */
static ssize_t rx_tcp(const struct call *call, size_t at)
{
	struct conn *conn = call->conn;
	struct conn_slot *slot = conn->slot;
	int fd = call->fd, flags = (call->flags & (MSG_PEEK | MSG_TRUNC)) | MSG_DONTWAIT;
	const struct channel_side *remote = conn->channel.remote;
	struct iovec rest[64];

	for (int again = 0;;) {
		size_t most = SIZE_MAX;
		if (!rx_over(slot)) {
			int queued = 0;
			real.ioctl(fd, FIONREAD, &queued);
			if (atomic_load(&remote->tx_switched) == word_load(slot->rx_round)) {
				uint64_t offset = word_load(remote->tx_switch_offset);
				uint64_t read = word_load(slot->rx_tcp_bytes);
				most = offset > read ? (size_t)(offset - read) : 0;
				if (!most)
					return fail_with(EAGAIN); /* rx_follow() judges it */
			} else if (queued > 0) {
				most = (size_t)queued;
			} else {
				char byte;
				int marked = 0;
				ssize_t n = raw_recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
				if ((n == 0 || (n < 0 && errno == EAGAIN)) && !(flags & MSG_PEEK))
					tcp_pass_mark(fd); /* the look has not */
				if (n <= 0)
					return n;
				if (again++ == 0)
					continue; /* a word that has come since */
				/* FIONREAD stops at an urgent mark. Its sender has left the ring for good before it set that. */
				if (real.ioctl(fd, SIOCATMARK, &marked) < 0 || !marked)
					most = 1;
			}
		}
		/* more than 64 pieces: as many calls as fill them */
		for (size_t got = 0;;) {
			int rest_len = iov_from(call->iov, call->iov_len, at + got, most - got, rest);
			if (got && rest_len == 0)
				return (ssize_t)got;
			ssize_t n = tcp_message(call, rest, (size_t)rest_len, flags, raw_recvmsg);
			if (got)
				keep_error(conn, n);
			if (n <= 0 || (flags & MSG_PEEK) || (size_t)n < iov_total(rest, rest_len))
				return got ? (ssize_t)(got + (n > 0 ? (size_t)n : 0)) : n;
			got += (size_t)n;
		}
	}
}

/* The stream has ended: an error that was kept, or the end of file. */
static enum step rx_ended(struct conn *conn)
{
	errno = take_error(conn);
	return errno ? STEP_ERROR : STEP_END;
}

/* True if a read would take the error of a dead connection, which is the next call's behind bytes that this one has. */
static bool error_next(int fd)
{
	struct pollfd tcp = {.fd = fd};
	int queued = 0;

	return raw_poll(&tcp, 1, 0) > 0 && (tcp.revents & POLLERR) && (real.ioctl(fd, FIONREAD, &queued) < 0 || !queued) &&
	       kernel_closed(fd);
}

/*
 * rx_lock held. A look (MSG_PEEK) has seen `first` bytes of TCP and `ringed` bytes of the ring behind them. If the ring ends
 * there, it goes on in TCP, whose queue still begins with the `first`. Returns how many more bytes it sees.
 */
static size_t look_behind(const struct call *call, size_t at, size_t first, size_t ringed)
{
	struct conn *conn = call->conn;
	size_t seen = first + ringed, wanted = call->total - at - seen;

	/* the peer may have written more before it went back */
	if (!wanted || !conn_peer_back(conn) ||
	    atomic_load(&conn->channel.remote->tx_back_at) != atomic_load(conn->channel.own.head) + ringed)
		return 0;
	int marked = 0;
	if (!first && real.ioctl(call->fd, SIOCATMARK, &marked) == 0 && marked)
		return 0; /* nor does it go over the urgent mark */
	if (error_next(call->fd))
		return 0;
	struct iovec rest[129];
	char spacer;
	int front = iov_from(call->iov, call->iov_len, at, first, rest);
	if (rx_spaced(conn)) {
		rest[front++] = (struct iovec){&spacer, 1};
		first++;
	}
	int back = iov_from(call->iov, call->iov_len, at + seen, wanted, rest + front);
	struct msghdr message = {.msg_iov = rest, .msg_iovlen = (size_t)(front + back)};
	ssize_t n = raw_recvmsg(call->fd, &message, (call->flags & (MSG_PEEK | MSG_TRUNC)) | MSG_DONTWAIT);
	keep_error(conn, n);
	return n > (ssize_t)first ? (size_t)n - first : 0;
}

/* rx_lock held. `len` bytes have come by TCP; a look goes on into the ring, and behind it. */
static enum step tcp_taken(const struct call *call, size_t at, size_t len, size_t *moved)
{
	struct conn *conn = call->conn;
	struct conn_slot *slot = conn->slot;
	size_t wanted = call->total - at - len;

	*moved = len;
	if (!(call->flags & MSG_PEEK)) {
		word_add(slot->rx_tcp_bytes, len);
		word_add(slot->rx_tcp_msgs, 1);
		count_turn(slot);
		full_fence();
		if (unlikely(conn_tcp_read(conn)))
			conn_wake_own(conn); /* the ring is next, and another reader did not know it; see ready_now() */
	} else if (wanted && rx_ring_among(conn, len)) {
		int64_t there = channel_rx_avail(&conn->channel);
		size_t ringed = there > 0 ? ring_read(call, at + len, (size_t)there < wanted ? (size_t)there : wanted) : 0;
		*moved += ringed + look_behind(call, at, len, ringed);
	}
	return STEP_DONE;
}

/*
 * rx_lock held. Nothing has come by TCP: `n` and errno are its answer, if it was asked. Its end is the stream's only if the
 * sender had not moved to the ring before it. STEP_AGAIN: it had.
 */
static enum step tcp_ended(struct conn *conn, int fd, ssize_t n, bool waits)
{
	struct conn_slot *slot = conn->slot;
	int error = n < 0 ? errno : 0;
	/* a look before rx_follow(): the words of bytes sent before an end are published before it */
	bool alone = n != 0 || !conn_relayed(conn) || rx_over(slot);
	/*
	 * a program that has shut it down here reads the end as soon as no byte is there, as by ring. A FIN of the peer's is
	 * passed on
	 */
	bool shut = slot_has(slot, SLOT_RD_SHUT);
	bool known = !waits && (alone || (shut && !kernel_fin(fd)) || relay_ended(conn) || shut || rx_lost(conn));

	if (rx_follow(conn, fd)) {
		if (n == 0) {
			conn_probe(conn, fd);
		} else if (error != EAGAIN) {
			word_store(slot->error, (uint32_t)error);
			slot_set(slot, SLOT_RESET | SLOT_FIN | SLOT_PEER_GONE);
		}
		return STEP_AGAIN;
	}
	if (!known) {
		conn_probe(conn, fd); /* the provider may be gone */
		return slot_has(slot, SLOT_RESET) ? rx_ended(conn) : STEP_EMPTY;
	}
	if (n == 0 && conn_tcp_ended(conn, fd))
		return STEP_ERROR;
	if (error == EAGAIN && slot_has(slot, SLOT_RESET)) /* rx_follow() has just judged so, or long ago */
		error = take_error(conn);
	/* The kernel reports it once, maybe to a sender, and a provider between does not know of it. */
	error_delivered(conn, error == 0 && conn_relayed(conn) && rx_lost(conn) ? ECONNRESET : error);
	errno = error;
	return error == 0 ? STEP_END : error == EAGAIN ? STEP_EMPTY : STEP_ERROR;
}

/* rx_lock held, and the connection is reset. Behind the ring, TCP may hold bytes that came ahead of it, as in the kernel. */
static enum step tcp_left(const struct call *call, size_t at, size_t *moved)
{
	struct conn *conn = call->conn;
	int queued = 0;

	if (rx_follow(conn, call->fd))
		return STEP_AGAIN;
	if (!rx_is(conn->slot, RX_BACK) || real.ioctl(call->fd, FIONREAD, &queued) < 0 || !queued)
		return rx_ended(conn);
	ssize_t n = rx_tcp(call, at);
	return n > 0 ? tcp_taken(call, at, (size_t)n, moved) : rx_ended(conn);
}

/* rx_lock held, receiving by TCP. STEP_AGAIN: receiving is by ring now. */
static enum step tcp_step(const struct call *call, size_t at, size_t *moved)
{
	struct conn *conn = call->conn;
	int fd = call->fd, marked = 0;

	/* sockatmark(3): no read goes over the urgent mark */
	if (at && (rx_over(conn->slot) || !conn_tcp_read(conn)) && real.ioctl(fd, SIOCATMARK, &marked) == 0 && marked)
		return STEP_END;
	if (!rx_consent(conn, fd))
		return STEP_KERNEL;
	if (conn_relay_news(conn))
		conn_probe(conn, fd);
	if (conn_relayed(conn) && slot_has(conn->slot, SLOT_RESET))
		return tcp_left(call, at, moved);
	if (recall_open(conn))
		return slot_has(conn->slot, SLOT_RD_SHUT) ? rx_ended(conn) : STEP_EMPTY;
	if (at && error_next(fd))
		return rx_follow(conn, fd) ? STEP_AGAIN : STEP_END;
	bool waits = rx_reset_waits(conn, fd);
	errno = EAGAIN;
	ssize_t n = waits ? -1 : rx_tcp(call, at);
	if (n < 0 && unlikely(errno == ENOTSOCK || errno == EBADF) && conn_fd_stale(conn, fd))
		return STEP_EMPTY;
	return n > 0 ? tcp_taken(call, at, (size_t)n, moved) : tcp_ended(conn, fd, n, waits);
}

/* rx_lock held. `there` bytes are in the ring. A look goes on in TCP behind the ring's last byte. */
static enum step ring_taken(const struct call *call, size_t at, size_t there, size_t *moved)
{
	struct conn *conn = call->conn;
	size_t wanted = call->total - at, taken = ring_read(call, at, there < wanted ? there : wanted);

	*moved = taken;
	if (likely(!(call->flags & MSG_PEEK)))
		return STEP_DONE;
	uint64_t head = atomic_load(conn->channel.own.head);
	channel_report(&conn->channel.tail_reported, head + there);
	*moved += look_behind(call, at, 0, taken);
	return STEP_DONE;
}

/* rx_lock held. `look`: also asks the native socket before it says that there is nothing. */
static enum step ring_step(const struct call *call, size_t at, bool look, size_t *moved)
{
	struct conn *conn = call->conn;
	struct conn_slot *slot = conn->slot;
	int fd = call->fd;

	for (int turn = 0;; turn++) {
		if (conn_relay_news(conn))
			conn_probe(conn, fd);
		/* Loaded before the ring is looked at: an end seen after it may stand behind bytes not seen. */
		uint32_t ended = atomic_load(&slot->flags) & (SLOT_FIN | SLOT_RD_SHUT | SLOT_RESET);
		bool failed = atomic_load(&slot->error) != 0;
		int64_t there = channel_rx_avail(&conn->channel);
		if (unlikely(there < 0))
			conn_violation(conn, fd);
		if (likely(there > 0))
			return ring_taken(call, at, (size_t)there, moved);
		/* the ring before a reset is reported: bytes of TCP ahead of it can still be read, as in the kernel */
		if (unlikely(conn_peer_back(conn)) && rx_back(conn, fd))
			return STEP_AGAIN;
		/* EPIPE (reset after FIN) is for senders; a reader has had its end of file */
		int error = failed && slot_error(slot) != EPIPE ? take_error(conn) : 0;
		if (error) {
			errno = error;
			return STEP_ERROR;
		}
		if (ended && conn_relayed(conn) && !(ended & (SLOT_RD_SHUT | SLOT_RESET)) &&
		    atomic_load(&conn->channel.remote->tx_fin_at) != atomic_load(conn->channel.own.head)) {
			conn_violation(conn, fd);
			errno = take_error(conn);
			return STEP_ERROR;
		}
		if (unlikely(ended == SLOT_RD_SHUT) && turn == 0) {
			conn_probe(conn, fd); /* a reset is reported before an end of our own: tcp_recvmsg() in Linux */
			continue;
		}
		if (ended)
			return STEP_END;
		if (turn >= 2 || (!look && !slot_has(slot, SLOT_FIN | SLOT_RESET)))
			return STEP_EMPTY;
		if (look && call->unasked)
			conn_probe_known(conn, fd);
		else if (look)
			conn_probe(conn, fd); /* a probe, then a second look at the ring: bytes sent before the FIN are there now */
		look = false;
	}
}

/* rx_lock held. */
static inline enum step rx_step(const struct call *call, size_t at, bool look, size_t *moved)
{
	enum step step = likely(rx_by_ring(call->conn->slot)) ? STEP_AGAIN : tcp_step(call, at, moved);

	return step == STEP_AGAIN ? ring_step(call, at, look, moved) : step;
}

static enum turn kernel_recv(struct call *call)
{
	struct conn_slot *slot = call->conn->slot;

	atomic_fetch_add(&slot->rx_kernel_waiters, 1);
	full_fence();
	if (rx_consented(slot)) { /* declared meanwhile: back to watching both */
		atomic_fetch_sub(&slot->rx_kernel_waiters, 1);
		return TURN_AGAIN;
	}
	ssize_t n =
		TCP_WAIT(call->fd, call->flags,
	             tcp_message(call, (struct iovec *)call->iov, (size_t)call->iov_len, call->flags, real.recvmsg));
	if (n < 0 && unlikely(errno == ENOTSOCK) && conn_fd_stale(call->conn, call->fd)) {
		atomic_fetch_sub(&slot->rx_kernel_waiters, 1);
		conn_drop_stale(call->conn, call->fd);
		return call_elsewhere(call, WAIT_RX);
	}
	if (n == 0 && conn_tcp_ended(call->conn, call->fd))
		n = -1;
	if (n < 0)
		error_delivered(call->conn, errno);
	n = kernel_rx_end(call->conn, call->fd, n, call->flags);
	return call_over(call, n, errno);
}

/* rx_lock held: the conn may be gone without it. */
void rx_finish(struct conn *conn)
{
	full_fence(); /* fence between publishing head and reading want_space */
	if (unlikely(word_load(conn->channel.rx_peer_line->want_space)))
		doorbell_ring(conn);
}

/* The stream, or the connection, has ended behind the call's bytes. */
static enum turn recv_ended(struct call *call, enum step step, int error)
{
	int left = call->fd;

	if (step == STEP_ERROR && error == EBADF && call->started && conn_stays(call->conn, &left) && left != call->fd) {
		call->fd = left; /* closed in the midst of this turn */
		return TURN_AGAIN;
	}
	if (step == STEP_END || call->done) {
		if (step == STEP_ERROR) /* an error for the next call, which would take the end for a good one */
			word_store(call->conn->slot->error, (uint32_t)error);
		return call_over(call, (ssize_t)call->done, call->saved);
	}
	return call_over(call, -1, step == STEP_CLOSED ? EBADF : error);
}

/* Too little is there; a look has seen `seen` bytes. A caller that does not wait hears of it after a look at the socket. */
static enum turn recv_short(struct call *call, size_t seen)
{
	ssize_t has = (ssize_t)(seen ? seen : call->done);

	if (conn_drop_stale(call->conn, call->fd))
		return call_elsewhere(call, WAIT_RX);
	if (call->look && !has)
		rpc_listen_passing();
	if (call->look)
		return call_over(call, has ? has : -1, has ? call->saved : EAGAIN);
	conn_check(call->conn, call->fd);
	/* an end that the peer has announced concerns no wait */
	if (unlikely((conn_notice(call->conn) & CHANNEL_CLOSED) || word_load(call->conn->channel.remote->shut_wr)) &&
	    !slot_has(call->conn->slot, SLOT_FIN))
		conn_probe(call->conn, call->fd);
	if (!call_blocks(call, WAIT_RX)) {
		call->look = call->flags || !rx_by_ring(call->conn->slot) || !conn_lingers(call->conn);
		return TURN_AGAIN;
	}
	call->seen = seen;
	return call_wait(call, WAIT_RX, seen + 1);
}

static inline __attribute__((always_inline)) enum turn recv_turn(struct call *call, size_t target)
{
	struct conn *conn = call->conn;
	struct conn_slot *slot = conn->slot;
	enum step step = STEP_CLOSED;
	bool peek = call->flags & MSG_PEEK;
	size_t moved = 0;

	slot_lock(&slot->rx_lock);
	if (likely(word_load(conn->managed))) {
		step = rx_step(call, call->done, call->look, &moved);
		while (step == STEP_DONE && moved < call->total - call->done && !peek && rx_goes_on(conn, call->fd)) {
			size_t more = 0;
			enum step next = rx_step(call, call->done + moved, false, &more);
			if (next == STEP_ERROR) /* an error for the next call, which would take the end for a good one */
				word_store(slot->error, (uint32_t)errno);
			if (next != STEP_DONE)
				break;
			moved += more;
		}
		if (likely(step == STEP_DONE && !peek))
			rx_finish(conn);
	}
	int error = errno;
	bool ended = slot_has(slot, SLOT_FIN | SLOT_RD_SHUT | SLOT_RESET) || rx_over(slot);
	bool listen = !(word_load(slot->rx_ring_msgs) % LISTEN_EVERY);
	bool notice = step == STEP_DONE && conn_notice(conn);
	slot_unlock(&slot->rx_lock);
	if (step == STEP_AGAIN)
		return TURN_AGAIN;
	if (step == STEP_KERNEL && !call->done)
		return kernel_recv(call);
	if (unlikely(step != STEP_DONE))
		return step == STEP_EMPTY ? recv_short(call, 0) : recv_ended(call, step, error);
	if (unlikely(listen)) {
		rpc_listen();
		if (conn_fd_stale(conn, call->fd))
			conn_drop_stale(conn, call->fd); /* the next call is the other file's */
		if (word_load(conn->message_ns) && conn_stays(conn, &call->fd))
			rpc_reconsider(conn, call->fd);
	}
	if (unlikely(notice) && conn_stays(conn, &call->fd)) {
		/* a peer that waits for bytes by TCP need not wait until we wait, or send */
		conn_check(conn, call->fd);
		/* the kernel has to know at once that the ring has been read: see tx_space() */
		if (unlikely(rx_spaced(conn)))
			conn_advance(conn, call->fd);
	}
	if (peek)
		return moved >= target || ended || rx_divided(conn) ? call_over(call, (ssize_t)moved, call->saved)
		                                                    : recv_short(call, moved);
	call->done += moved;
	return likely(call->done >= target) ? call_over(call, (ssize_t)call->done, call->saved) : TURN_AGAIN;
}

/* read(2) in the strict mode of seccomp, which takes no call of ours. Behind the ring's last byte the number is the kernel's. */
static ssize_t recv_strictly(struct call *call)
{
	struct conn *conn = call->conn;
	struct conn_slot *slot = conn->slot;
	size_t taken = 0;

	slot_lock(&slot->rx_lock);
	int64_t there = channel_rx_avail(&conn->channel);
	if (there > 0)
		taken = ring_read(call, 0, (size_t)there < call->total ? (size_t)there : call->total);
	if (channel_rx_avail(&conn->channel) <= 0) {
		char spacer;
		if (rx_spaced(conn))
			real.read(call->fd, &spacer, 1);
		ring_recall(conn, false);
		if (channel_rx_avail(&conn->channel) <= 0 || rx_is(slot, RX_RECALLED))
			file_put(call->fd, NULL);
	}
	slot_unlock(&slot->rx_lock);
	return taken ? (ssize_t)taken : real.read(call->fd, call->iov->iov_base, call->iov->iov_len);
}

/* A receive from a ring that is being left: it may take the last byte. */
__attribute__((noinline)) static ssize_t recv_leaving(struct call *call, size_t target)
{
	if (unlikely(word_load(kernel_strict)))
		return recv_strictly(call);
	do
		conn_advance(call->conn, call->fd);
	while (unlikely(recv_turn(call, target) == TURN_AGAIN));
	if (conn_stays(call->conn, &call->fd))
		conn_leave_drained(call->conn, call->fd);
	return call_end(call);
}

/*
 * recv(2) of nothing waits for something all the same, but once: a wait that comes to nothing is no error, as in tcp_recvmsg() in
 * Linux. read(2) of nothing does not come here.
 */
static ssize_t recv_nothing(struct conn *conn, int fd, int flags)
{
	const int saved = errno;
	int marked = 0;
	char byte;

	if (ioctl(fd, SIOCATMARK, &marked) == 0 && marked) {
		/* an urgent byte is something, unless it was refused */
		if (raw_recv(fd, &byte, 0, (flags & ~MSG_WAITALL) | MSG_DONTWAIT) < 0 && errno != EAGAIN) {
			error_delivered(conn, errno);
			return -1;
		}
		errno = saved;
		return 0;
	}
	errno = saved;
	ssize_t n = conn_recv(conn, fd, &(struct iovec){&byte, 1}, 1, (flags & MSG_DONTWAIT) | MSG_PEEK);
	if (n < 0 && errno == EAGAIN && would_not_block(fd, flags))
		return fail_with(EAGAIN);
	if (n < 0 && errno != EINTR && errno != EAGAIN)
		return n;
	errno = saved;
	return 0;
}

ssize_t conn_recv_beside(struct conn *conn, int fd, const struct iovec *iov, int iov_len, int flags,
                         struct beside *beside)
{
	if (unlikely(iov_refused(iov, iov_len, flags)))
		return -1;
	struct call call = call_of(conn, fd, iov, iov_len, flags);

	call.beside = beside;
	if (unlikely(flags & (MSG_OOB | MSG_ERRQUEUE))) {
		struct msghdr message = {.msg_iov = (struct iovec *)iov, .msg_iovlen = (size_t)iov_len};
		return flags & MSG_ERRQUEUE ? message_errors(conn, fd, &message, flags) : real.recvmsg(fd, &message, flags);
	}
	pthread_testcancel();
	if (unlikely(call.total == 0))
		return recv_nothing(conn, fd, flags);
	size_t target = flags & MSG_WAITALL ? call.total : low_water(conn);
	if (target > call.total)
		target = call.total;
	if ((flags & MSG_PEEK) && target > conn->channel.rx.spill_size)
		target = conn->channel.rx.spill_size;
	do {
		if (unlikely(!conn_switched(conn))) {
			if (unlikely(slot_has(conn->slot, SLOT_LEAVES)))
				return recv_leaving(&call, target);
			conn_advance(conn, call.fd);
		}
	} while (unlikely(recv_turn(&call, target) == TURN_AGAIN));
	return call_end(&call);
}
