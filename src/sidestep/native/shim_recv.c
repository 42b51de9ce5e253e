/*
 * shim_recv.c - receiving, from whichever path has the next bytes.
 */
#include "shim_call.h"

#include <errno.h>
#include <limits.h>
#include <sys/ioctl.h>

#define LISTEN_EVERY 64       /* ring reads between two looks whether the provider has something to say */

/* rx_lock held. Copies from the ring to iov from byte `done` on. */
static size_t ring_read(struct conn *conn, const struct iovec *iov, int iov_len, size_t done, size_t len, int flags)
{
	size_t from = 0, skip = done;

	if (flags & MSG_TRUNC) {
		from = len; /* TCP: the bytes are thrown away, see recv(2) */
	} else if (likely(iov_len == 1)) {
		channel_rx_get(&conn->channel, 0, (uint8_t *)iov->iov_base + done, len);
		from = len;
	} else {
		for (int i = 0; i < iov_len && from < len; i++) {
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
	if (!(flags & MSG_PEEK)) {
		channel_rx_consume(&conn->channel, len);
		word_store(conn->slot->rx_ring_bytes, conn->slot->rx_ring_bytes + len);
		word_store(conn->slot->rx_ring_msgs, conn->slot->rx_ring_msgs + 1);
	}
	return len;
}

/*
 * rx_lock held, consent declared. Reads TCP, but never past the offset at which the sender moved to the ring: it may be
 * back on TCP already, and what it sends there follows what the ring holds. What the kernel held before tx_switched was
 * still unset was sent before the switch; so the question comes between the count and the read. As recvmsg.
 */
static ssize_t rx_tcp(struct conn *conn, int fd, const struct iovec *iov, int iov_len, size_t done, int flags)
{
	struct conn_slot *slot = conn->slot;
	const struct channel_side *remote = conn->channel.remote;
	struct iovec rest[64];
	struct msghdr message = {.msg_iov = rest};

	flags = (flags & (MSG_PEEK | MSG_TRUNC)) | MSG_DONTWAIT;
	for (int again = 0;;) {
		size_t most = SIZE_MAX;
		if (!rx_over(slot)) {
			int queued = 0;
			real.ioctl(fd, FIONREAD, &queued);
			if (atomic_load(&remote->tx_switched) == word_load(slot->rx_round)) {
				uint64_t offset = atomic_load_explicit(&remote->tx_switch_offset, memory_order_relaxed);
				uint64_t read = word_load(slot->rx_tcp_bytes);
				most = offset > read ? (size_t)(offset - read) : 0;
				if (!most) {
					errno = EAGAIN; /* rx_follow() judges it */
					return -1;
				}
			} else if (queued > 0) {
				most = (size_t)queued;
			} else {
				char byte;
				ssize_t n = raw_recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
				if (n <= 0)
					return n;
				if (again++ == 0)
					continue; /* it has come since */
				most = 1; /* an urgent mark stands before it, which FIONREAD stops at */
			}
		}
		/* more than 64 pieces: as many calls as fill them */
		for (size_t got = 0;;) {
			message.msg_iovlen = (size_t)iov_from(iov, iov_len, done + got, most - got, rest);
			if (got && message.msg_iovlen == 0)
				return (ssize_t)got;
			ssize_t n = raw_recvmsg(fd, &message, flags);
			if (n <= 0 || (flags & MSG_PEEK) || (size_t)n < iov_total(rest, (int)message.msg_iovlen))
				return got ? (ssize_t)(got + (n > 0 ? (size_t)n : 0)) : n;
			got += (size_t)n;
		}
	}
}

/* rx_lock held. `look`: also ask the native socket before saying that there is nothing. */
static enum step rx_step(struct conn *conn, int fd, const struct iovec *iov, int iov_len, size_t done, size_t wanted,
                         int flags, bool look, size_t *moved)
{
	struct conn_slot *slot = conn->slot;

	if (unlikely(!rx_by_ring(slot))) {
		if (!rx_consent(conn, fd))
			return STEP_NATIVE;
		if (conn_relay_news(conn))
			conn_probe(conn, fd);
		ssize_t n = -1;
		bool reset = conn_relayed(conn) && slot_has(slot, SLOT_RESET), waits = !reset && rx_reset_waits(conn, fd);
		if (reset && !rx_follow(conn, fd)) {
			errno = take_error(conn);
			return errno ? STEP_ERROR : STEP_END;
		}
		errno = EAGAIN;
		if (!reset && !waits)
			n = rx_tcp(conn, fd, iov, iov_len, done, flags);
		if (n > 0) {
			*moved = (size_t)n;
			if (!(flags & MSG_PEEK)) {
				word_add(slot->rx_tcp_bytes, (uint64_t)n);
				word_add(slot->rx_tcp_msgs, 1);
				full_fence();
				if (unlikely(conn_tcp_read(conn)))
					conn_wake_own(conn); /* the ring is next, which another reader did not know; see ready_now() */
			} else if (*moved < wanted && rx_ring_next(conn, (size_t)n)) {
				int64_t there = channel_rx_avail(&conn->channel);
				if (there > 0)
					*moved += ring_read(conn, iov, iov_len, done + *moved,
					                    (size_t)there < wanted - *moved ? (size_t)there : wanted - *moved, flags);
			}
			return STEP_DONE;
		}
		/* An end on TCP is the end only if the sender had not moved to the ring before it. */
		int error = n < 0 ? errno : 0;
		/* asked before: what came before the end is published before it */
		bool alone = n != 0 || !conn_relayed(conn) || rx_over(slot);
		bool known = !waits && (alone || (slot_has(slot, SLOT_RD_SHUT) && !kernel_fin(fd)) || relay_ended(conn));
		if (!reset && !rx_follow(conn, fd)) {
			if (!known) {
				conn_probe(conn, fd); /* the provider may be gone */
				if (!slot_has(slot, SLOT_RESET))
					return STEP_EMPTY;
				errno = take_error(conn);
				return errno ? STEP_ERROR : STEP_END;
			}
			if (n == 0 && conn_tcp_ended(conn, fd))
				return STEP_ERROR;
			if (error == EAGAIN && slot_has(slot, SLOT_RESET)) /* rx_follow() has just judged so, or long ago */
				error = take_error(conn);
			errno = error;
			return error == 0 ? STEP_END : error == EAGAIN ? STEP_EMPTY : STEP_ERROR;
		}
		if (n == 0) {
			conn_probe(conn, fd);
		} else if (error != EAGAIN) {
			word_store(slot->error, (uint32_t)error);
			slot_set(slot, SLOT_RESET | SLOT_FIN | SLOT_PEER_GONE);
		}
	}
	for (int turn = 0;; turn++) {
		if (conn_relay_news(conn))
			conn_probe(conn, fd);
		/* Loaded before the ring is looked at: an end seen after it may stand behind bytes not seen. */
		uint32_t ended = atomic_load(&slot->flags) & (SLOT_FIN | SLOT_RD_SHUT | SLOT_RESET);
		bool failed = atomic_load(&slot->error) != 0;
		int64_t there = channel_rx_avail(&conn->channel);
		if (unlikely(there < 0)) {
			conn_violation(conn, fd);
			there = 0;
		}
		if (there > 0) {
			*moved = ring_read(conn, iov, iov_len, done, (size_t)there < wanted ? (size_t)there : wanted, flags);
			if (unlikely(flags & MSG_PEEK))
				channel_tell(&conn->channel.tail_told, atomic_load(conn->channel.own_head) + (uint64_t)there);
			/* where the ring ends TCP goes on, if it is all there: the peer may have written more before it went back */
			if (unlikely((flags & MSG_PEEK) && *moved < wanted && conn_peer_back(conn)) &&
			    atomic_load(&conn->channel.remote->tx_back_at) == atomic_load(conn->channel.own_head) + *moved) {
				struct iovec rest[64];
				struct msghdr message = {
					.msg_iov = rest,
					.msg_iovlen = (size_t)iov_from(iov, iov_len, done + *moved, wanted - *moved, rest)};
				ssize_t n = raw_recvmsg(fd, &message, (flags & (MSG_PEEK | MSG_TRUNC)) | MSG_DONTWAIT);
				*moved += n > 0 ? (size_t)n : 0;
			}
			return STEP_DONE;
		}
		/* before a reset is told: what came by TCP ahead of it can still be read, as in the kernel */
		if (unlikely(conn_peer_back(conn)) && rx_back(conn, fd))
			return STEP_AGAIN;
		/* EPIPE (reset after FIN) is told to senders; a reader has had its end of file */
		int error = failed && word_load(slot->error) != EPIPE ? take_error(conn) : 0;
		if (error) {
			errno = error;
			return STEP_ERROR;
		}
		if (ended && conn_relayed(conn) && !(ended & (SLOT_RD_SHUT | SLOT_RESET)) &&
		    atomic_load(&conn->channel.remote->tx_fin_at) != atomic_load(conn->channel.own_head)) {
			conn_violation(conn, fd);
			errno = take_error(conn);
			return STEP_ERROR;
		}
		if (ended)
			return STEP_END;
		if (turn >= 2 || (!look && !slot_has(slot, SLOT_FIN | SLOT_RESET)))
			return STEP_EMPTY;
		if (!look)
			continue;
		conn_probe(conn, fd); /* then look at the ring once more: what was sent before the FIN is there now */
	}
}

static ssize_t native_recv(struct conn *conn, int fd, const struct iovec *iov, int iov_len, int flags)
{
	struct conn_slot *slot = conn->slot;
	struct msghdr message = {.msg_iov = (struct iovec *)iov, .msg_iovlen = (size_t)iov_len};

	atomic_fetch_add(&slot->rx_sitters, 1);
	full_fence();
	if (rx_consented(slot)) { /* declared meanwhile: back to watching both */
		atomic_fetch_sub(&slot->rx_sitters, 1);
		return -2;
	}
	ssize_t n = real.recvmsg(fd, &message, flags);
	if (n == 0 && conn_tcp_ended(conn, fd))
		n = -1;
	return native_rx_end(conn, fd, n, flags);
}

/* rx_lock held: the conn may be gone without it. */
void rx_finish(struct conn *conn)
{
	full_fence(); /* between publishing head and reading want_space */
	if (unlikely(atomic_load_explicit(&conn->channel.rx_peer_line->want_space, memory_order_relaxed)))
		conn_ring(conn);
}

ssize_t conn_recv(struct conn *conn, int fd, const struct iovec *iov, int iov_len, int flags)
{
	if (unlikely(iov_refused(iov, iov_len, flags)))
		return -1;
	size_t total = iov_total(iov, iov_len), done = 0, moved = 0, target;
	struct wait_clock clock;
	bool started = false, look = false, timed = false, peek = flags & MSG_PEEK;
	int saved = errno;

	if (unlikely(flags & (MSG_OOB | MSG_ERRQUEUE))) {
		struct msghdr message = {.msg_iov = (struct iovec *)iov, .msg_iovlen = (size_t)iov_len};
		return real.recvmsg(fd, &message, flags);
	}
	pthread_testcancel();
	if (total == 0) { /* recv(2) of nothing waits for something all the same; read(2) of nothing does not come here */
		char byte;
		ssize_t n = conn_recv(conn, fd, &(struct iovec){&byte, 1}, 1, (flags & MSG_DONTWAIT) | MSG_PEEK);
		return n < 0 ? n : 0;
	}
	target = flags & MSG_WAITALL ? total : low_water(conn);
	if (target > total)
		target = total;
	if (peek && target > conn->channel.rx_size)
		target = conn->channel.rx_size;
	struct conn_slot *slot = conn->slot;
	ssize_t result;
	for (;;) {
		enum step step = STEP_CLOSED;

		conn_advance(conn, fd);
		slot_lock(&slot->rx_lock);
		if (likely(atomic_load_explicit(&conn->managed, memory_order_relaxed))) {
			step = rx_step(conn, fd, iov, iov_len, done, total - done, flags, look, &moved);
			while (step == STEP_DONE && moved < total - done && !peek && rx_goes_on(conn, fd)) {
				size_t more = 0;
				if (rx_step(conn, fd, iov, iov_len, done + moved, total - done - moved, flags, false, &more) != STEP_DONE)
					break;
				moved += more;
			}
			if (likely(step == STEP_DONE && !peek))
				rx_finish(conn);
		}
		int error = errno;
		bool ended = slot_has(slot, SLOT_FIN | SLOT_RD_SHUT | SLOT_RESET) || rx_over(slot);
		bool listen = !(word_load(slot->rx_ring_msgs) % LISTEN_EVERY);
		slot_unlock(&slot->rx_lock);
		if (likely(step == STEP_DONE)) {
			if (unlikely(listen))
				rpc_listen();
			if (likely((peek ? moved : done + moved) >= target) || (peek && (ended || rx_divided(conn)))) {
				result = (ssize_t)(peek ? moved : done + moved);
				break;
			}
			if (!peek) {
				done += moved;
				continue;
			}
		} else if (step == STEP_AGAIN) {
			continue;
		} else if (step == STEP_NATIVE && !done) {
			result = native_recv(conn, fd, iov, iov_len, flags);
			if (result != -2) {
				saved = errno;
				break;
			}
			continue;
		} else if (step != STEP_EMPTY) {
			int left = fd;
			if (step == STEP_ERROR && error == EBADF && started && conn_stays(conn, &left) && left != fd) {
				fd = left; /* closed in the midst of this turn */
				continue;
			}
			result = (ssize_t)done;
			if (done && step == STEP_ERROR) {
				word_store(slot->error, (uint32_t)error); /* for the next call, which would take the end for a good one */
			} else if (step != STEP_END && !done) {
				result = -1;
				saved = step == STEP_CLOSED ? EBADF : error;
			}
			break;
		}
		/* Not enough there. Before saying so to a caller that does not wait, ask the native socket for the end. */
		if (look) {
			result = step == STEP_DONE ? (ssize_t)moved : (ssize_t)done;
			if (!result) {
				result = -1;
				saved = EAGAIN;
			}
			break;
		}
		conn_heed(conn, fd);
		if (would_not_block(fd, flags)) {
			look = true;
			continue;
		}
		if (!started) {
			struct timeval limit = {0};
			socklen_t len = sizeof(limit);
			real.getsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, &len);
			timed = limit.tv_sec || limit.tv_usec;
			wait_clock_start(&clock, timed ? timeval_ns(&limit) : -1);
			atomic_fetch_add(&conn->waiters, 1);
			started = true;
		}
		int waited = conn_wait(conn, fd, WAIT_RX, peek ? target : 1, &clock, timed);
		if (waited == 0 && conn_stays(conn, &fd))
			continue;
		result = (ssize_t)done;
		if (!done) {
			bool over = waited == 0 && slot_has(slot, SLOT_RD_SHUT | SLOT_FIN | SLOT_RESET);
			result = over ? 0 : -1;
			saved = over ? saved : waited == 0 ? EBADF : waited == -ETIMEDOUT ? EAGAIN : -waited;
		}
		break;
	}
	if (started)
		atomic_fetch_sub(&conn->waiters, 1);
	errno = saved;
	return result;
}
