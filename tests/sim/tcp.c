/*
 * tcp.c - the simulated kernel's TCP, as far as a program can see it.
 *
 * What is sent stays in `out` until a move of the network brings it to the peer's `in`, as much as that has room for; FIN,
 * acknowledgements and RST are moves of their own. The names of Linux's functions stand where its ways were taken from.
 */
#include "kernel.h"
#include "scenario.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>

size_t tcp_out_max = 16384, tcp_in_max = 16384;
struct object *connection[2];

/* ---- queues of bytes ---- */
static void fifo_put(struct fifo *fifo, const uint8_t *data, size_t len)
{
	if (fifo->head + fifo->len + len > fifo->cap) {
		fifo->cap = 2 * (fifo->len + len);
		uint8_t *larger = malloc(fifo->cap);
		if (fifo->len)
			memcpy(larger, fifo->data + fifo->head, fifo->len);
		free(fifo->data);
		fifo->data = larger;
		fifo->head = 0;
	}
	memcpy(fifo->data + fifo->head + fifo->len, data, len);
	fifo->len += len;
}

static void fifo_drop(struct fifo *fifo, size_t len)
{
	fifo->head += len;
	fifo->len -= len;
}

/* ---- TCP ---- */
size_t tcp_queued(const struct tcp *tcp)
{
	return tcp->out.len + tcp->unacked;
}

static bool tcp_writable(const struct tcp *tcp) /* sk_stream_is_writeable */
{
	return tcp_queued(tcp) * 3 <= tcp->out_max * 2;
}

static void tcp_done(struct tcp *tcp)
{
	tcp->dead = true;
	tcp->half_reset = false;
	tcp->shut_rd = tcp->shut_wr = true;
	tcp->out.len = tcp->unacked = 0;
	wake(tcp->object, WAKES_ALL);
}

static void tcp_space(struct tcp *tcp) /* sk_stream_write_space */
{
	if (tcp->no_space && tcp_writable(tcp)) {
		tcp->no_space = false;
		wake(tcp->object, EPOLLOUT | EPOLLWRNORM | EPOLLWRBAND);
	}
}

int tcp_state(const struct tcp *tcp)
{
	if (tcp->dead)
		return TCP_CLOSE;
	if (!tcp->fin_out)
		return tcp->fin_in ? TCP_CLOSE_WAIT : TCP_ESTABLISHED;
	if (!tcp->fin_in)
		return tcp->fin_acked ? TCP_FIN_WAIT2 : TCP_FIN_WAIT1;
	return tcp->fin_in_first ? TCP_LAST_ACK : TCP_CLOSING;
}

/* tcp_reset: one has come. In two steps: who looks between them finds the error alone, who sleeps is woken after both. */
static void tcp_reset_begins(struct tcp *tcp)
{
	if (tcp->dead || tcp->half_reset)
		return;
	tcp->error = tcp_state(tcp) == TCP_CLOSE_WAIT ? EPIPE : ECONNRESET;
	tcp->was_reset = !tcp->fin_in;
	tcp->half_reset = true;
}

static void tcp_reset(struct tcp *tcp)
{
	tcp_reset_begins(tcp);
	if (!tcp->dead)
		tcp_done(tcp);
}

void tcp_lock(struct tcp *tcp)
{
	if (tcp->half_reset)
		tcp_reset(tcp);
}

static void tcp_send_reset(struct tcp *tcp)
{
	if (!tcp->peer->tcp.dead)
		tcp->peer->tcp.reset_coming = true;
}

static void tcp_fin(struct tcp *tcp)
{
	if (!tcp->fin_out) {
		tcp->fin_out = true;
		tcp->fin_in_first = tcp->fin_in;
	}
}

static void tcp_both_fins(struct tcp *tcp)
{
	if (tcp->fin_in && tcp->fin_acked && !tcp->dead)
		tcp_done(tcp);
}

void tcp_disconnect(struct tcp *tcp)
{
	int state = tcp_state(tcp);

	if (state == TCP_ESTABLISHED || state == TCP_CLOSE_WAIT || state == TCP_FIN_WAIT1 || state == TCP_FIN_WAIT2 ||
	    (state != TCP_CLOSE && !tcp->fin_there)) {
		tcp_send_reset(tcp);
		tcp->error = ECONNRESET;
	}
	tcp_done(tcp);
	tcp->in.len = 0;
	tcp->shut_rd = tcp->shut_wr = tcp->done = false;
}

void tcp_closed(struct tcp *tcp) /* tcp_close */
{
	tcp->orphan = true;
	if (tcp->dead || !tcp->peer)
		return;
	if (tcp->in.len || (tcp->linger.l_onoff && !tcp->linger.l_linger)) {
		tcp_send_reset(tcp);
		tcp_done(tcp);
		return;
	}
	tcp->shut_rd = tcp->shut_wr = true;
	tcp_fin(tcp);
}

/* tcp_epollin_ready: enough, or no room for more */
static bool tcp_enough(const struct tcp *tcp, size_t target)
{
	return tcp->in.len && (tcp->in.len >= target || tcp->in.len >= tcp->in_max);
}

/* The moves of the network: data, FIN, acknowledgement and reset, from each of both. */
enum { MOVE_DATA, MOVE_FIN, MOVE_ACK, MOVE_RESET };

bool network_can(int which)
{
	struct object *object = connection[which & 1];

	if (!object)
		return false;
	struct tcp *tcp = &object->tcp, *to = &tcp->peer->tcp;
	switch (which >> 1) {
	case MOVE_DATA: return tcp->out.len && (to->dead || to->orphan || to->in.len < to->in_max);
	case MOVE_FIN: return tcp->fin_out && !tcp->fin_there && !tcp->out.len && !tcp->dead;
	case MOVE_ACK: return tcp->unacked && !tcp->dead;
	default: return tcp->reset_coming || tcp->half_reset;
	}
}

void network_half_reset(int which)
{
	struct tcp *tcp = &connection[which]->tcp;

	if (!tcp->reset_coming)
		return;
	trace("    network: half a RST to %d", which);
	tcp->reset_coming = false;
	tcp_reset_begins(tcp);
}

static void tcp_deliver(struct tcp *tcp)
{
	struct tcp *to = &tcp->peer->tcp;
	size_t room = to->in.len < to->in_max ? to->in_max - to->in.len : 0;
	size_t len = tcp->out.len < room ? tcp->out.len : room;

	if (to->dead) {
		tcp->reset_coming = true;
		tcp->out.len = 0;
		return;
	}
	if (to->orphan || (to->shut_rd && to->shut_wr)) { /* tcp_rcv_state_process: data behind the end */
		tcp_reset(to);
		tcp->reset_coming = true;
		tcp->out.len = 0;
		return;
	}
	switch (choose(4)) {
	case 0: len = 1; break;
	case 1: len = 1 + choose((uint32_t)len); break;
	}
	trace("    network: %zu bytes to %d", len, to->object == connection[1]);
	fifo_put(&to->in, tcp->out.data + tcp->out.head, len);
	fifo_drop(&tcp->out, len);
	to->received += len;
	if (choose(2)) {
		tcp->acked += len;
		tcp_space(tcp);
	} else {
		tcp->unacked += len;
	}
	if (tcp_enough(to, to->low_water)) /* tcp_data_ready */
		wake(to->object, EPOLLIN | EPOLLPRI | EPOLLRDNORM | EPOLLRDBAND);
}

static void tcp_deliver_fin(struct tcp *tcp)
{
	struct tcp *to = &tcp->peer->tcp;

	tcp->fin_there = tcp->fin_acked = true;
	tcp->acked += tcp->unacked + 1;
	tcp->unacked = 0;
	trace("    network: FIN to %d", to->object == connection[1]);
	if (!to->dead) {
		to->fin_in = to->done = to->shut_rd = true;
		to->received++;
		wake(to->object, WAKES_ALL);
	}
	wake(tcp->object, WAKES_ALL);
	tcp_both_fins(tcp);
	tcp_both_fins(to);
}

void network_move(int which)
{
	struct tcp *tcp = &connection[which & 1]->tcp;

	switch (which >> 1) {
	case MOVE_DATA: tcp_deliver(tcp); break;
	case MOVE_FIN: tcp_deliver_fin(tcp); break;
	case MOVE_ACK:
		tcp->acked += tcp->unacked;
		tcp->unacked = 0;
		tcp_space(tcp);
		break;
	default:
		if (tcp->reset_coming && !scenario && choose(2)) {
			network_half_reset(which & 1);
			break;
		}
		trace("    network: RST to %d", which & 1);
		tcp->reset_coming = false;
		tcp_reset(tcp);
	}
}

int tcp_take_error(struct tcp *tcp)
{
	int error = tcp->error;

	if (error)
		trace("    kernel: %d is told %s", tcp->object == connection[1], strerrorname_np(error));
	tcp->error = 0;
	return error;
}

struct awaited {
	const struct tcp *tcp;
	size_t more_than;
};

static bool tcp_readable(void *argument)
{
	const struct awaited *awaited = argument;
	const struct tcp *tcp = awaited->tcp;

	return tcp->in.len > awaited->more_than || tcp->done || tcp->error || tcp->shut_rd || tcp->dead;
}

/* tcp_recvmsg */
ssize_t tcp_receive(struct object *object, const struct iovec *iov, size_t iov_len, int flags)
{
	struct tcp *tcp = &object->tcp;
	bool quiet = object->nonblock || (flags & MSG_DONTWAIT);
	size_t done = 0, wanted = 0;

	tcp_lock(tcp);
	if (flags & ~(MSG_PEEK | MSG_DONTWAIT | MSG_TRUNC | MSG_WAITALL | MSG_NOSIGNAL | MSG_CMSG_CLOEXEC))
		fail("recv with flags %#x", (unsigned)flags);
	for (size_t i = 0; i < iov_len; i++)
		wanted += iov[i].iov_len;
	size_t target = flags & MSG_WAITALL || tcp->low_water > wanted ? wanted : tcp->low_water ? tcp->low_water : 1;
	for (;;) {
		size_t skip = flags & MSG_PEEK ? 0 : done, from = 0;
		for (size_t i = 0; i < iov_len && from < tcp->in.len; i++) {
			if (skip >= iov[i].iov_len) {
				skip -= iov[i].iov_len;
				continue;
			}
			size_t part = iov[i].iov_len - skip;
			part = part < tcp->in.len - from ? part : tcp->in.len - from;
			if (!(flags & MSG_TRUNC))
				memcpy((uint8_t *)iov[i].iov_base + skip, tcp->in.data + tcp->in.head + from, part);
			skip = 0;
			from += part;
		}
		if (!(flags & MSG_PEEK))
			fifo_drop(&tcp->in, from);
		done = flags & MSG_PEEK ? from : done + from;
		if (done && (done >= target || quiet))
			return (ssize_t)done;
		if (done && (tcp->error || tcp->dead || tcp->shut_rd))
			return (ssize_t)done;
		if (tcp->done)
			return 0;
		if (tcp->error)
			return failed(tcp_take_error(tcp));
		if (tcp->shut_rd)
			return 0;
		if (tcp->dead)
			return failed(ENOTCONN);
		if (quiet)
			return failed(EAGAIN);
		static struct awaited at_work[ENDS];
		at_work[current->index] = (struct awaited){tcp, tcp->in.len};
		block(tcp_readable, &at_work[current->index], NEVER);
	}
}

static bool tcp_has_room(void *argument)
{
	const struct tcp *tcp = argument;

	return tcp->error || tcp->shut_wr || tcp->dead || tcp_writable(tcp);
}

/* tcp_sendmsg */
ssize_t tcp_send(struct object *object, const struct iovec *iov, size_t iov_len, int flags)
{
	struct tcp *tcp = &object->tcp;
	bool quiet = object->nonblock || (flags & MSG_DONTWAIT);
	size_t done = 0;

	if (flags & ~(MSG_DONTWAIT | MSG_NOSIGNAL | MSG_MORE))
		fail("send with flags %#x", (unsigned)flags);
	for (size_t i = 0; i < iov_len; i++)
		for (size_t at = 0; at < iov[i].iov_len;) {
			if (tcp->error || tcp->shut_wr || tcp->dead) {
				int error = done ? 0 : tcp_take_error(tcp);
				return done ? (ssize_t)done : failed(error ? error : EPIPE);
			}
			size_t room = tcp->out_max > tcp_queued(tcp) ? tcp->out_max - tcp_queued(tcp) : 0;
			size_t part = iov[i].iov_len - at < room ? iov[i].iov_len - at : room;
			if (part) {
				fifo_put(&tcp->out, (const uint8_t *)iov[i].iov_base + at, part);
				at += part;
				done += part;
				continue;
			}
			tcp->no_space = true;
			if (quiet)
				return done ? (ssize_t)done : failed(EAGAIN);
			block(tcp_has_room, tcp, NEVER);
		}
	return (ssize_t)done;
}

uint32_t tcp_bits(struct tcp *tcp) /* tcp_poll */
{
	uint32_t bits = 0;

	if ((tcp->shut_rd && tcp->shut_wr) || tcp->dead)
		bits |= EPOLLHUP;
	if (tcp->shut_rd)
		bits |= EPOLLIN | EPOLLRDNORM | EPOLLRDHUP;
	if (tcp_enough(tcp, tcp->low_water))
		bits |= EPOLLIN | EPOLLRDNORM;
	if (tcp->shut_wr || tcp_writable(tcp))
		bits |= EPOLLOUT | EPOLLWRNORM;
	else
		tcp->no_space = true;
	if (tcp->error)
		bits |= EPOLLERR;
	return bits;
}

int tcp_shutdown(struct tcp *tcp, int how) /* inet_shutdown */
{
	int state = tcp_state(tcp);

	tcp->shut_rd |= how != SHUT_WR;
	tcp->shut_wr |= how != SHUT_RD;
	if (tcp->shut_wr && (state == TCP_ESTABLISHED || state == TCP_CLOSE_WAIT))
		tcp_fin(tcp);
	wake(tcp->object, WAKES_ALL);
	return state == TCP_CLOSE ? failed(ENOTCONN) : 0;
}
