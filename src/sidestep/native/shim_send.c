/*
 * shim_send.c - sending, by the path that the direction is on.
 */
#include "shim_call.h"

#include <errno.h>
#include <limits.h>

#define PUBLISH_CHUNK 32768u  /* bytes of a long write the peer may start on while we copy the next */

/* Whether a process that lives has reserved the room behind the tail. One that was killed has not. */
bool conn_reserved(const struct conn *conn)
{
	struct conn_slot *slot = conn->slot;
	uint32_t pid = (uint32_t)(atomic_load(&slot->tx_reserver) >> 32);

	if (pid == shim_pid || !task_dead(pid, true))
		return true;
	slot_clear(slot, SLOT_RESERVED);
	return false;
}

bool reserved_by_self(const struct conn *conn)
{
	return atomic_load(&conn->slot->tx_reserver) == ((uint64_t)shim_pid << 32 | self.tid);
}

/* tx_lock held. STEP_DONE: what comes next goes by ring, and there is *room. Inline: it is half of each send. */
static inline __attribute__((always_inline)) enum step tx_room(struct conn *conn, int fd, size_t wanted, size_t *room)
{
	struct conn_slot *slot = conn->slot;
	uint32_t flags;

again:
	if (unlikely(conn_recalled_since(conn)))
		tx_recalled(conn, fd);
	flags = word_load(slot->flags);
	if (unlikely(tx_is(slot, TX_RESEND)) && !tx_resend(conn, fd)) /* these come first, whatever has happened since */
		return STEP_EMPTY;
	if (unlikely(flags & (SLOT_WR_SHUT | SLOT_RESET | SLOT_PEER_GONE) || word_load(slot->error))) {
		if (!tx_by_ring(slot) && !(flags & SLOT_RESET))
			return STEP_NATIVE;
		int error = take_error(conn);
		socklen_t len = sizeof(error);
		if (!error && (flags & SLOT_WR_SHUT) && !(flags & SLOT_RESET))
			real.getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &len); /* told before EPIPE: sk_stream_error */
		if (!error && (flags & SLOT_PEER_GONE) && !(flags & (SLOT_RESET | SLOT_WR_SHUT)))
			return STEP_NATIVE; /* nobody is there: the kernel's answers are the right ones */
		errno = error ? error : EPIPE;
		return STEP_ERROR;
	}
	if (unlikely(!tx_by_ring(slot) && !tx_switch(conn, fd)))
		return STEP_NATIVE;
	if (unlikely(conn_notice(conn) || --conn->probe_countdown == 0)) {
		conn->probe_countdown = PROBE_EVERY;
		conn_probe(conn, fd);
		if (asked(conn))
			obey(conn, fd);
		if (slot_has(slot, SLOT_RESET | SLOT_PEER_GONE) || !tx_by_ring(slot))
			goto again;
	}
	if (unlikely(flags & SLOT_RESERVED) && conn_reserved(conn))
		return STEP_EMPTY;
	int64_t space = channel_tx_space(&conn->channel, wanted);
	if (unlikely(space < 0)) {
		conn_violation(conn, fd);
		errno = take_error(conn);
		return STEP_ERROR;
	}
	*room = (size_t)space;
	return space ? STEP_DONE : STEP_EMPTY;
}

enum step tx_room_look(struct conn *conn, int fd, size_t wanted, size_t *room)
{
	return tx_room(conn, fd, wanted, room);
}

void tx_cpu(struct conn *conn)
{
	uint32_t cpu = cpu_now();

	if (word_load(conn->channel.tx_line->cpu) != cpu)
		atomic_store_explicit(&conn->channel.tx_line->cpu, cpu, memory_order_relaxed);
}

/* tx_lock held. Copies from iov, from byte `done` on, as much as fits; publishes in chunks. */
static enum step tx_step(struct conn *conn, int fd, const struct iovec *iov, int iov_len, size_t done, size_t wanted,
                         size_t *moved)
{
	struct conn_slot *slot = conn->slot;
	size_t room = 0;
	enum step step = tx_room(conn, fd, wanted, &room);

	if (unlikely(step != STEP_DONE))
		return step;
	size_t len = room < wanted ? room : wanted, sent = 0, skip = done;
	tx_cpu(conn);
	for (int i = 0; i < iov_len && sent < len; i++) {
		if (skip >= iov[i].iov_len) {
			skip -= iov[i].iov_len;
			continue;
		}
		const uint8_t *from = (const uint8_t *)iov[i].iov_base + skip;
		size_t part = iov[i].iov_len - skip < len - sent ? iov[i].iov_len - skip : len - sent;
		skip = 0;
		sent += part;
		while (part > PUBLISH_CHUNK) {
			channel_tx_put(&conn->channel, 0, from, PUBLISH_CHUNK);
			channel_tx_publish(&conn->channel, PUBLISH_CHUNK);
			full_fence();
			conn_ring(conn);
			from += PUBLISH_CHUNK;
			part -= PUBLISH_CHUNK;
		}
		channel_tx_put(&conn->channel, 0, from, part);
		/* one message becomes visible as one: pieces of a vector are published with the last of them */
		if (sent == len || part >= PUBLISH_CHUNK / 2) {
			channel_tx_publish(&conn->channel, part);
		} else {
			/* small piece: advance our tail without showing it */
			atomic_store_explicit(conn->channel.own_tail, *conn->channel.own_tail + part, memory_order_relaxed);
		}
	}
	atomic_store_explicit(&conn->channel.tx_line->tail, *conn->channel.own_tail, memory_order_release); /* W1 */
	word_store(slot->tx_ring_bytes, slot->tx_ring_bytes + len);
	word_store(slot->tx_ring_msgs, slot->tx_ring_msgs + 1);
	*moved = len;
	return STEP_DONE;
}

/* -2: the bytes do not go by TCP any more. */
static ssize_t native_send(struct conn *conn, int fd, const struct iovec *iov, int iov_len, int flags)
{
	struct conn_slot *slot = conn->slot;
	struct msghdr message = {.msg_iov = (struct iovec *)iov, .msg_iovlen = (size_t)iov_len};

	atomic_fetch_add(&slot->tx_sitters, 1);
	full_fence();
	uint32_t state = word_load(slot->tx_state);
	if (state == TX_RESEND || (state == TX_LEFT && !tx_follows(conn)) ||
	    ((state == TX_SWITCHING || tx_by_ring(slot)) && !slot_has(slot, SLOT_PEER_GONE))) {
		atomic_fetch_sub(&slot->tx_sitters, 1);
		return -2;
	}
	ssize_t n = real.sendmsg(fd, &message, flags);
	return native_tx_end(conn, fd, n);
}

static ssize_t send_failed(int error, int flags)
{
	if (error == EPIPE && !(flags & MSG_NOSIGNAL))
		raise(SIGPIPE); /* to this thread, as the kernel does */
	errno = error;
	return -1;
}

ssize_t conn_send(struct conn *conn, int fd, const struct iovec *iov, int iov_len, int flags)
{
	if (unlikely(iov_refused(iov, iov_len, flags)))
		return -1;
	size_t total = iov_total(iov, iov_len), done = 0, moved = 0;
	struct wait_clock clock;
	bool started = false, timed = false;
	int saved = errno;

	pthread_testcancel();
	if (total == 0 && tx_by_ring(conn->slot) && !word_load(conn->slot->error) &&
	    !slot_has(conn->slot, SLOT_WR_SHUT | SLOT_PEER_GONE | SLOT_RESET))
		return 0;
	struct conn_slot *slot = conn->slot;
	ssize_t result;
	int signal_error = 0;
	for (;;) {
		enum step step = STEP_CLOSED;
		bool moved_over = false;

		conn_advance(conn, fd);
		slot_lock(&slot->tx_lock);
		if (likely(atomic_load_explicit(&conn->managed, memory_order_relaxed))) {
			bool on_ring = tx_by_ring(slot);
			step = tx_step(conn, fd, iov, iov_len, done, total - done, &moved);
			moved_over = on_ring != (tx_by_ring(slot));
			if (likely(step == STEP_DONE)) {
				full_fence(); /* between publishing tail and reading the bell */
				conn_ring(conn);
			}
		}
		int error = errno;
		bool notice = step == STEP_DONE && conn_notice(conn);
		bool listen = conn->probe_countdown == PROBE_EVERY;
		slot_unlock(&slot->tx_lock);
		if (unlikely(listen))
			rpc_listen();
		if (unlikely(moved_over))
			set_conn_switched(conn);
		/* a recall may have crossed this message: it must go out again */
		if (unlikely(notice) && conn_stays(conn, &fd))
			conn_heed(conn, fd);
		if (likely(step == STEP_DONE)) {
			if (unlikely(!atomic_load_explicit(&trim_due, memory_order_relaxed)))
				atomic_store_explicit(&trim_due, true, memory_order_relaxed);
			done += moved;
			if (likely(done == total)) {
				result = (ssize_t)done;
				break;
			}
			continue;
		} else if (step == STEP_ERROR) {
			result = (ssize_t)done;
			if (!done) {
				result = -1;
				signal_error = error;
			} else if (error != EPIPE) {
				word_store(slot->error, (uint32_t)error); /* for the next call */
			}
			break;
		} else if (step == STEP_CLOSED) {
			result = done ? (ssize_t)done : -1;
			saved = done ? saved : EBADF;
			break;
		} else if (step == STEP_NATIVE) {
			if (likely(!done)) {
				result = native_send(conn, fd, iov, iov_len, flags);
				if (result == -2)
					continue;
				saved = errno;
				break;
			}
			/* what has gone by ring is of the same call: one that blocks is not short because of that */
			struct iovec rest[64];
			int rest_len = iov_from(iov, iov_len, done, SIZE_MAX, rest);
			result = native_send(conn, fd, rest, rest_len, flags | MSG_NOSIGNAL);
			if (result == -2)
				continue;
			if (result < 0 && errno != EAGAIN && errno != EINTR && errno != EPIPE)
				word_store(slot->error, (uint32_t)errno); /* for the next call */
			done += result > 0 ? (size_t)result : 0;
			if (result == (ssize_t)iov_total(rest, rest_len) && done < total)
				continue; /* more than 64 pieces */
			result = (ssize_t)done;
			break;
		}
		conn_heed(conn, fd);
		if (unlikely(leave_half_closed(conn, fd))) {
			set_conn_switched(conn);
			continue;
		}
		if (would_not_block(fd, flags)) {
			/* remember that somebody waits for room, then look once more */
			atomic_fetch_or(&conn->channel.tx_line->want_space, WANT_STICKY);
			full_fence();
			set_conn_arm(conn, false);
			result = (ssize_t)done;
			if (done)
				break;
			if (conn_room(conn) > 0 && !tx_is(slot, TX_RESEND))
				continue;
			conn_probe(conn, fd);
			if (slot_has(slot, SLOT_PEER_GONE | SLOT_RESET) && !tx_is(slot, TX_RESEND))
				continue;
			result = -1;
			saved = EAGAIN;
			break;
		}
		if (unlikely(slot_has(slot, SLOT_RESERVED)) && reserved_by_self(conn)) {
			result = done ? (ssize_t)done : -1; /* it would wait for itself */
			saved = done ? saved : EDEADLK;
			break;
		}
		if (!started) {
			struct timeval limit = {0};
			socklen_t len = sizeof(limit);
			real.getsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, &len);
			timed = limit.tv_sec || limit.tv_usec;
			wait_clock_start(&clock, timed ? timeval_ns(&limit) : -1);
			atomic_fetch_add(&conn->waiters, 1);
			started = true;
		}
		size_t want = total - done < room_wanted(conn) ? total - done : room_wanted(conn);
		int waited = conn_wait(conn, fd, WAIT_TX, want, &clock, timed);
		if (waited == 0 && conn_stays(conn, &fd))
			continue;
		result = (ssize_t)done;
		if (!done) {
			result = -1;
			saved = waited == 0 ? EBADF : waited == -ETIMEDOUT ? EAGAIN : -waited;
		}
		break;
	}
	if (started)
		atomic_fetch_sub(&conn->waiters, 1);
	if (signal_error)
		return send_failed(signal_error, flags);
	errno = saved;
	return result;
}
