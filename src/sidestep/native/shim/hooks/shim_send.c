/* shim_send.c - sending, by the path that the direction is on. */
#include "shim_call.h"

#define LONG_CALL 65536u      /* bytes from which on a call counts signals from its beginning */
#define PUBLISH_CHUNK 32768u  /* bytes of a long write the peer may start on while we copy the next */
#define PAST_PIECE 256u       /* bytes of a piece of such a message, from which on it gains */

bool reserved_by_self(const struct conn *conn)
{
	return atomic_load(&conn->slot->tx_reserver) == ((uint64_t)shim_pid << 32 | self.tid);
}

/* tx_lock held. STEP_DONE: the next bytes go by ring, and there is *room. Inline: it is half of each send. */
static inline __attribute__((always_inline)) enum step tx_room(struct conn *conn, int fd, size_t wanted, size_t *room)
{
	struct conn_slot *slot = conn->slot;
	uint32_t flags;

again:
	if (unlikely(conn_recalled_since(conn)))
		tx_recalled(conn, fd);
	flags = word_load(slot->flags);
	if (unlikely(tx_is(slot, TX_RESEND)) && !tx_resend(conn, fd)) { /* these come first, whatever has happened since */
		errno = EPIPE;
		return flags & SLOT_FIN_OWED ? STEP_ERROR : STEP_EMPTY;
	}
	if (unlikely(flags & (SLOT_WR_SHUT | SLOT_RESET | SLOT_PEER_GONE) || word_load(slot->error))) {
		/* The FIN may be from a process without a shim that was passed the socket: recalled bytes go first. */
		if ((flags & SLOT_PEER_GONE) && !(flags & (SLOT_RESET | SLOT_WR_SHUT)) && conn_tcp_requested(conn)) {
			tx_handle_notice(conn, fd);
			goto again;
		}
		int error = take_error(conn);
		if (!error && !tx_by_ring(slot) && !(flags & SLOT_RESET))
			return STEP_KERNEL;
		if (!error && (flags & SLOT_WR_SHUT) && !(flags & SLOT_RESET))
			option_get(fd, SOL_SOCKET, SO_ERROR, &error, sizeof(error)); /* reported before EPIPE: sk_stream_error */
		if (!error && (flags & SLOT_PEER_GONE) && !(flags & (SLOT_RESET | SLOT_WR_SHUT)))
			return STEP_KERNEL; /* the kernel's answers are the right ones without a peer */
		if (!conn_relayed(conn)) /* else the recalled bytes may still have to go out */
			error_delivered(conn, error);
		errno = error ? error : EPIPE;
		return STEP_ERROR;
	}
	if (unlikely(!tx_by_ring(slot) && !tx_switch(conn, fd)))
		return STEP_KERNEL;
	if (unlikely(conn_notice(conn) || --conn->probe_countdown == 0)) {
		conn->probe_countdown = PROBE_EVERY;
		conn_probe(conn, fd);
		if (word_load(conn->stale_fd) == fd + 1)
			return STEP_CLOSED;
		if (tx_request_pending(conn))
			tx_handle_notice(conn, fd);
		if (slot_has(slot, SLOT_RESET | SLOT_PEER_GONE) || !tx_by_ring(slot))
			goto again;
	}
	if (unlikely(flags & SLOT_RESERVED) && conn_reserved(conn))
		return STEP_EMPTY;
	if (unlikely(word_load(slot->tx_ring_to)))
		channel_tx_settle(&conn->channel);
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

/* True if what is sent is read by another CPU: one that both ends share has it in its cache. */
static bool peer_apart(const struct conn *conn)
{
	return word_load(conn->channel.tx_peer_line->cpu) != word_load(conn->channel.tx_line->cpu);
}

/* tx_lock held. Puts a piece of a message behind the tail; it is published in chunks, and with the `last` of them. */
static void tx_put(struct conn *conn, const uint8_t *from, size_t len, bool last, bool past)
{
	while (len > PUBLISH_CHUNK) {
		channel_tx_put(&conn->channel, 0, from, PUBLISH_CHUNK, past);
		channel_tx_publish(&conn->channel, PUBLISH_CHUNK);
		peer_wake(conn);
		from += PUBLISH_CHUNK;
		len -= PUBLISH_CHUNK;
	}
	channel_tx_put(&conn->channel, 0, from, len, past && len >= PAST_PIECE);
	/* one message becomes visible as one: pieces of a vector are published with the last of them */
	if (last || len >= PUBLISH_CHUNK / 2)
		channel_tx_publish(&conn->channel, len);
	else /* small piece: advance our tail without showing it */
		word_store(*conn->channel.own.tail, *conn->channel.own.tail + len);
}

/* tx_lock held. Copies what the call still has, as much as fits. */
static inline enum step tx_step(const struct call *call, size_t *moved)
{
	struct conn *conn = call->conn;
	struct conn_slot *slot = conn->slot;
	size_t room = 0, wanted = call->total - call->done;
	enum step step = tx_room(conn, call->fd, wanted, &room);

	if (unlikely(step != STEP_DONE))
		return step;
	size_t len = room < wanted ? room : wanted, sent = 0, skip = call->done;
	conn_sends_here(conn);
	const bool past = unlikely(len >= PAST_MIN) && peer_apart(conn);
	for (int i = 0; i < call->iov_len && sent < len; i++) {
		const struct iovec *piece = &call->iov[i];
		if (skip >= piece->iov_len) {
			skip -= piece->iov_len;
			continue;
		}
		size_t part = piece->iov_len - skip < len - sent ? piece->iov_len - skip : len - sent;
		sent += part;
		tx_put(conn, (const uint8_t *)piece->iov_base + skip, part, sent == len, past);
		skip = 0;
	}
	channel_tx_show(&conn->channel);
	word_store(slot->tx_ring_bytes, slot->tx_ring_bytes + len);
	word_store(slot->tx_ring_msgs, slot->tx_ring_msgs + 1);
	*moved = len;
	return STEP_DONE;
}

/*
 * Sends the remaining bytes of the call by TCP. Bytes that went by ring count for the same call, so a blocking one is not cut
 * short.
 */
static enum turn kernel_send(struct call *call)
{
	struct conn *conn = call->conn;
	struct conn_slot *slot = conn->slot;
	struct iovec rest[64];
	struct msghdr message = {.msg_iov = (struct iovec *)call->iov, .msg_iovlen = (size_t)call->iov_len};
	size_t most = call->total;

	if (unlikely(word_load(kernel_strict)) && slot_has(slot, SLOT_LEAVES) && tx_follows(conn)) {
		ssize_t written = real.write(call->fd, call->iov->iov_base, call->iov->iov_len);
		return call_over(call, written, errno);
	}
	atomic_fetch_add(&slot->tx_kernel_waiters, 1);
	full_fence();
	uint32_t state = word_load(slot->tx_state);
	if (state == TX_RESEND || (state == TX_LEFT && !tx_follows(conn)) ||
	    ((state == TX_SWITCHING || tx_by_ring(slot)) && !slot_has(slot, SLOT_PEER_GONE))) {
		atomic_fetch_sub(&slot->tx_kernel_waiters, 1);
		return TURN_AGAIN; /* the bytes do not go by TCP any more */
	}
	if (unlikely(call->done)) {
		message.msg_iov = rest;
		message.msg_iovlen = (size_t)iov_from(call->iov, call->iov_len, call->done, SIZE_MAX, rest);
		most = iov_total(rest, (int)message.msg_iovlen);
	}
	int flags = call->flags | (call->done ? MSG_NOSIGNAL : 0);
	if (unlikely(flags & MSG_ZEROCOPY)) /* numbered by the kernel or by us; see zerocopy_in_kernel() */
		*(slot_has(slot, SLOT_NUMBERS) ? &flags : &call->flags) &= ~MSG_ZEROCOPY;
	ssize_t n = kernel_tx_end(conn, call->fd, zerocopy_counted(conn, flags, real.sendmsg(call->fd, &message, flags)));
	if (n < 0 && unlikely(errno == ENOTSOCK) && conn_fd_stale(conn, call->fd) && conn_drop_stale(conn, call->fd))
		return call_elsewhere(call, WAIT_TX);
	if (unlikely(n < 0 && !call->done) && !conn_relayed(conn))
		error_delivered(conn, errno);
	if (likely(!call->done))
		return call_over(call, n, errno);
	keep_error(conn, n);
	call->done += n > 0 ? (size_t)n : 0;
	if (n == (ssize_t)most && call->done < call->total)
		return TURN_AGAIN; /* more than 64 pieces */
	return call_over(call, (ssize_t)call->done, call->saved);
}

/* The end of a call that can send no more: because of `error`, or as the number was closed. */
static enum turn send_ended(struct call *call, enum step step, int error)
{
	if (conn_drop_stale(call->conn, call->fd))
		return call_elsewhere(call, WAIT_TX);
	if (!call->done)
		return call_over(call, -1, step == STEP_CLOSED ? EBADF : error);
	if (step == STEP_ERROR && error != EPIPE)
		word_store(call->conn->slot->error, (uint32_t)error); /* an error for the next call */
	return call_over(call, (ssize_t)call->done, call->saved);
}

/* A call that would not wait finds no room: from now on that is an edge. Returns the room that came while this was noted. */
size_t send_put_off(struct conn *conn)
{
	atomic_fetch_or(&conn->channel.tx_line->want_space, WANT_STICKY);
	full_fence();
	set_conn_arm(conn, false);
	return tx_is(conn->slot, TX_RESEND) ? 0 : conn_room(conn);
}

static enum turn send_short(struct call *call)
{
	struct conn *conn = call->conn;
	struct conn_slot *slot = conn->slot;
	size_t left = call->total - call->done;

	conn_check(conn, call->fd);
	if (!call_blocks(call, WAIT_TX)) {
		if (unlikely(conn_make_room(conn, true)))
			return TURN_AGAIN;
		size_t room = send_put_off(conn);
		if (call->done)
			return call_over(call, (ssize_t)call->done, call->saved);
		if (room)
			return TURN_AGAIN;
		conn_probe(conn, call->fd);
		if (conn_drop_stale(conn, call->fd))
			return call_elsewhere(call, WAIT_TX);
		if (slot_has(slot, SLOT_PEER_GONE | SLOT_RESET) && !tx_is(slot, TX_RESEND))
			return TURN_AGAIN;
		return call_over(call, -1, EAGAIN);
	}
	if (unlikely(slot_has(slot, SLOT_RESERVED)) && reserved_by_self(conn)) /* a call that would wait for itself */
		return call->done ? call_over(call, (ssize_t)call->done, call->saved) : call_over(call, -1, EDEADLK);
	return call_wait(call, WAIT_TX, left < room_wanted(conn) ? left : room_wanted(conn));
}

static inline enum turn send_turn(struct call *call)
{
	struct conn *conn = call->conn;
	struct conn_slot *slot = conn->slot;
	enum step step = STEP_CLOSED;
	bool moved_over = false;
	size_t moved = 0;

	slot_lock(&slot->tx_lock);
	if (likely(word_load(conn->managed))) {
		bool on_ring = tx_by_ring(slot);
		step = tx_step(call, &moved);
		moved_over = on_ring != tx_by_ring(slot);
		if (likely(step == STEP_DONE)) {
			peer_wake(conn);
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
	if (unlikely(notice) && conn_stays(conn, &call->fd))
		conn_check(conn, call->fd);
	if (likely(step == STEP_DONE)) {
		if (unlikely(!word_load(trim_due)))
			word_store(trim_due, true);
		call->done += moved;
		return likely(call->done == call->total) ? call_over(call, (ssize_t)call->done, call->saved) : TURN_AGAIN;
	}
	if (step == STEP_KERNEL)
		return kernel_send(call);
	if (step != STEP_EMPTY) {
		call->broken = step == STEP_ERROR && error == EPIPE && !call->done;
		return send_ended(call, step, error);
	}
	return send_short(call);
}

ssize_t conn_send(struct conn *conn, int fd, const struct iovec *iov, int iov_len, int flags)
{
	if (unlikely(iov_refused(iov, iov_len, flags)))
		return -1;
	struct call call = call_of(conn, fd, iov, iov_len, flags);

	pthread_testcancel();
	if (unlikely(call.total - 1 >= LONG_CALL)) {
		if (call.total) {
			call_count_signals(&call);
		} else if (tx_by_ring(conn->slot)) {
			conn_probe(conn, fd); /* the look reports a reset all the same */
			if (!word_load(conn->slot->error) && !slot_has(conn->slot, SLOT_WR_SHUT | SLOT_PEER_GONE | SLOT_RESET))
				return 0;
		}
	}
	do
		conn_advance(conn, call.fd);
	while (unlikely(send_turn(&call) == TURN_AGAIN));
	ssize_t result = call_end(&call);
	if (unlikely(call.flags & MSG_ZEROCOPY) && result > 0)
		message_copied(conn);
	if (unlikely(call.broken) && !(flags & MSG_NOSIGNAL)) {
		raise(SIGPIPE); /* a signal to this thread, as by the kernel */
		errno = EPIPE;
	}
	return result;
}
