/* engine_stream.c - iWARP over a TCP socket, as a wire of the engine: RFC 5040, 5041 and 5044, by framing.h. */
#include "engine_wire.h"

#include <errno.h>
#include <sys/socket.h>
#include <sys/uio.h>

#define RDMAP_SEND 0x43u /* RFC 5040 4.1: version 1, Send */
#define DDP_VERSION 1u
#define QUEUE_SEND 0u    /* RFC 5040 5.1 */
#define WRITE_PIECES 256
#define QUEUE_MAX (256u << 10)
#define MESSAGE_MAX (QUEUE_MAX / 2) /* within FRAMING_CALL_MAX and, with what waits, FRAMING_WAITING_MAX */

static struct wire_stream *stream_of(struct wire *wire)
{
	return (struct wire_stream *)(void *)wire;
}

static const struct wire_stream *stream_seen(const struct wire *wire)
{
	return (const struct wire_stream *)(const void *)wire;
}

/* Reads once. 1: something has come, 0: nothing has; or minus a reason. */
static int stream_fill(struct wire_stream *stream)
{
	uint8_t *at;
	size_t len;

	if (!stream->wire.readable)
		return 0;
	if (framing_in_room(stream->in, &at, &len) < 0)
		return -ENGINE_MEMORY;
	if (!len) /* a message in more segments than are staged; Python takes each by itself */
		return -ENGINE_MESSAGE;
	ssize_t got = recv(stream->fd, at, len, MSG_DONTWAIT);
	if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
		stream->wire.readable = errno == EINTR;
		return 0;
	}
	if (got < 0) {
		stream->wire.error = errno;
		return -ENGINE_BROKEN;
	}
	if (got == 0)
		return -ENGINE_ENDED;
	/* epoll(7), Q9: else all was read, and an edge tells of more. The one that told of the end was the last. */
	stream->wire.readable = (size_t)got == len || stream->wire.ended;
	framing_in_commit(stream->in, (size_t)got);
	if (framing_in_parse(stream->in) < 0)
		return -ENGINE_MEMORY;
	stream->at = 0;
	return 1;
}

static bool is_send(const struct wire_stream *stream, const struct framing_run *run)
{
	return !run->tagged && run->control == DDP_VERSION && run->rdmap == RDMAP_SEND && run->queue == QUEUE_SEND &&
	       run->msn == stream->rx_msn && run->offset == 0;
}

static int stream_next(struct wire *wire, uint32_t most)
{
	struct wire_stream *stream = stream_of(wire);

	for (;;) {
		const struct framing_run *runs;
		size_t count = framing_in_runs(stream->in, &runs);

		if (stream->at < count) {
			const struct framing_run *run = runs + stream->at;
			if (!is_send(stream, run) || run->len > most)
				return -ENGINE_MESSAGE;
			if (run->last) {
				wire->len = run->len;
				return 1;
			}
			if (stream->at != count - 1)
				return -ENGINE_MESSAGE; /* a message that does not go on */
		}
		if (stream->in->fault)
			return -ENGINE_MESSAGE; /* Python judges it, and says so to the other end */
		if (stream->at < count) {
			framing_in_keep(stream->in);
		} else if (stream->at) { /* all were taken; without memory some were left */
			if (framing_in_parse(stream->in) < 0)
				return -ENGINE_MEMORY;
			stream->at = 0;
			continue;
		}
		int filled = stream_fill(stream);
		if (filled <= 0) { /* what is left is the one that is kept, or nothing */
			stream->at = stream->in->kept ? 0 : framing_in_runs(stream->in, &runs);
			return filled;
		}
	}
}

static void stream_copy(const struct wire *wire, uint32_t from, uint8_t *to, uint32_t len)
{
	const struct wire_stream *stream = stream_seen(wire);
	const struct framing_run *runs;
	struct framing_span span = {.base = to, .len = len};

	framing_in_runs(stream->in, &runs);
	framing_in_place(stream->in, runs + stream->at, from, &span, 1, 0, len);
}

static void stream_taken(struct wire *wire)
{
	struct wire_stream *stream = stream_of(wire);

	stream->at++;
	stream->rx_msn++;
}

static int stream_put(struct wire *wire, const uint8_t *header, uint32_t header_len, const struct iovec *pieces,
                      int pieces_len)
{
	struct wire_stream *stream = stream_of(wire);
	const struct framing_message message = {.rdmap = RDMAP_SEND, .queue = QUEUE_SEND, .msn = stream->tx_msn};
	struct framing_span spans[1 + CHANNEL_PIECES] = {
		{.base = (uint8_t *)(uintptr_t)header, .len = header_len, .copied = true}};
	uint64_t len = header_len;

	for (int i = 0; i < pieces_len; i++) {
		spans[1 + i] = (struct framing_span){.base = pieces[i].iov_base, .len = pieces[i].iov_len};
		len += pieces[i].iov_len;
	}
	if (framing_out_put(stream->out, &message, spans, 1 + (size_t)pieces_len, 0, len, true, false) < 0)
		return -ENGINE_MEMORY;
	stream->tx_msn++;
	return 0;
}

static uint64_t stream_waiting(const struct wire *wire)
{
	return framing_out_waiting(stream_seen(wire)->out);
}

static int stream_flush(struct wire *wire)
{
	struct wire_stream *stream = stream_of(wire);
	struct iovec pieces[WRITE_PIECES];

	while (framing_out_waiting(stream->out) && !wire->blocked) {
		size_t bytes;
		struct msghdr message = {.msg_iov = pieces,
		                         .msg_iovlen = framing_out_peek(stream->out, pieces, WRITE_PIECES, &bytes)};
		ssize_t wrote = sendmsg(stream->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
		if (wrote < 0 && errno == EINTR)
			continue;
		if (wrote < 0 && errno != EAGAIN) {
			wire->error = errno;
			return -ENGINE_BROKEN;
		}
		wire->blocked = wrote < (ssize_t)bytes;
		if (wrote > 0)
			framing_out_advance(stream->out, (size_t)wrote);
	}
	return 0;
}

static int stream_give_back(struct wire *wire)
{
	struct wire_stream *stream = stream_of(wire);

	framing_in_unread(stream->in, stream->at);
	if (framing_out_own(stream->out) == 0)
		return 0;
	framing_out_advance(stream->out, framing_out_waiting(stream->out)); /* the ring may go at any moment from now on */
	wire->error = ENOMEM;
	return -ENOMEM;
}

static const struct wire_ops stream_ops = {
	.next = stream_next,
	.copy = stream_copy,
	.taken = stream_taken,
	.put = stream_put,
	.waiting = stream_waiting,
	.flush = stream_flush,
	.give_back = stream_give_back,
};

void wire_stream_init(struct wire_stream *stream, struct framing_in *in, struct framing_out *out, int fd,
                      uint32_t tx_msn, uint32_t rx_msn)
{
	const struct framing_run *runs;

	*stream = (struct wire_stream){
		.wire = {.ops = &stream_ops,
	             .readable = true,
	             .receive_fd = fd,
	             .send_fd = fd,
	             .queue_max = QUEUE_MAX,
	             .message_max = MESSAGE_MAX},
		.in = in,
		.out = out,
		.fd = fd,
		.tx_msn = tx_msn,
		.rx_msn = rx_msn,
		.at = framing_in_runs(in, &runs), /* those were taken by who lends it */
	};
}
