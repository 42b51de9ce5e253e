/* framing_out.c - FPDUs out of messages, kept until they are written. framing.h tells what for. */
#include "framing_fpdu.h"

#include "crc32c.h"

#define COPIED 256u /* payload this short is cheaper to copy than to refer to */

/* Own bytes are named by their count from the beginning, as they move when room is made. */
struct piece {
	union {
		const uint8_t *base;
		uint64_t count;
	};
	uint32_t len;
	bool own, ends; /* ends: the last of its FPDU */
};

int framing_out_init(struct framing_out *out, uint32_t mulpdu, bool crc, bool markers)
{
	if (mulpdu < FRAMING_MULPDU_MIN || mulpdu > FRAMING_MULPDU_MAX)
		return -EINVAL;
	*out = (struct framing_out){.crc = crc, .markers = markers, .mulpdu = mulpdu};
	return 0;
}

void framing_out_free(struct framing_out *out)
{
	row_free(&out->pieces);
	row_free(&out->arena);
}

static struct piece *pieces_of(const struct framing_out *out)
{
	return (struct piece *)(void *)out->pieces.items;
}

static const uint8_t *piece_base(const struct framing_out *out, const struct piece *piece)
{
	return piece->own ? out->arena.items + (piece->count - out->arena_start) : piece->base;
}

static int arena_reserve(struct framing_out *out, size_t more)
{
	size_t head = out->arena.head;
	int result = row_reserve(&out->arena, 1, more);

	out->arena_start += head - out->arena.head;
	return result;
}

/* An FPDU in the making. */
struct fpdu {
	struct framing_out *out;
	uint64_t start; /* where in the stream its length field is, */
	bool started;   /* once that is known */
	uint32_t state; /* of the checksum */
};

/* Room for `len` bytes of our own at the end of the stream. All that is needed has been reserved. */
static uint8_t *append_own(struct framing_out *out, size_t len)
{
	uint64_t count = out->arena_start + out->arena.tail;
	uint8_t *at = out->arena.items + out->arena.tail;
	struct piece *last = out->pieces.tail > out->pieces.head ? pieces_of(out) + out->pieces.tail - 1 : NULL;

	if (last && last->own && !last->ends && last->count + last->len == count)
		last->len += (uint32_t)len;
	else
		pieces_of(out)[out->pieces.tail++] = (struct piece){.count = count, .len = (uint32_t)len, .own = true};
	out->arena.tail += len;
	out->position += len;
	return at;
}

static void fpdu_sum(struct fpdu *fpdu, const uint8_t *bytes, size_t len)
{
	if (fpdu->out->crc)
		fpdu->state = crc32c_update(fpdu->state, bytes, len);
}

/* Bytes until the next marker; one that is due is written. */
static size_t fpdu_to_marker(struct fpdu *fpdu)
{
	struct framing_out *out = fpdu->out;

	if (!out->markers)
		return SIZE_MAX;
	if (out->position % SPACING == 0) {
		uint8_t *at = append_own(out, MARKER_LEN);

		put_be32(at, fpdu->started ? (uint32_t)(out->position - MARKER_LEN - fpdu->start) : 0);
		fpdu_sum(fpdu, at, MARKER_LEN); /* RFC 5044 4.4: it is covered */
	}
	return SPACING - out->position % SPACING;
}

/* The next bytes of an FPDU, into our own memory. */
static void fpdu_copy(struct fpdu *fpdu, const uint8_t *bytes, size_t len)
{
	while (len) {
		size_t some = min_size(fpdu_to_marker(fpdu), len);
		uint8_t *at = append_own(fpdu->out, some);

		if (fpdu->out->crc)
			fpdu->state = crc32c_copy(fpdu->state, at, bytes, some);
		else
			memcpy(at, bytes, some);
		bytes += some;
		len -= some;
	}
}

/* The next bytes, where they are. */
static void fpdu_refer(struct fpdu *fpdu, const uint8_t *bytes, size_t len)
{
	struct framing_out *out = fpdu->out;

	while (len) {
		size_t some = min_size(fpdu_to_marker(fpdu), len);

		pieces_of(out)[out->pieces.tail++] = (struct piece){.base = bytes, .len = (uint32_t)some};
		out->position += some;
		fpdu_sum(fpdu, bytes, some);
		bytes += some;
		len -= some;
	}
}

static void fpdu_begin(struct fpdu *fpdu, const struct framing_message *message, uint64_t offset, size_t ulpdu_len,
                       bool last)
{
	struct framing_out *out = fpdu->out;
	uint32_t control = (message->tagged ? DDP_TAGGED : 0) | (last ? DDP_LAST : 0) | DDP_VERSION;
	uint64_t first =
		(uint64_t)ulpdu_len << 48 | (uint64_t)control << 40 | (uint64_t)message->rdmap << 32 | message->stag;
	uint64_t second = message->tagged ? message->to + offset : (uint64_t)message->queue << 32 | message->msn;
	size_t len = LENGTH_LEN + (message->tagged ? TAGGED_LEN : UNTAGGED_LEN);
	uint8_t header[LENGTH_LEN + UNTAGGED_LEN];

	fpdu_to_marker(fpdu); /* the one before the length field, which says 0 */
	fpdu->started = true;
	fpdu->start = out->position;
	uint8_t *at = out->markers ? header : append_own(out, len);
	put_be64(at, first);
	put_be64(at + 8, second);
	if (!message->tagged)
		put_be32(at + 16, (uint32_t)offset);
	if (out->markers)
		fpdu_copy(fpdu, header, len);
	else
		fpdu_sum(fpdu, at, len);
}

static void fpdu_end(struct fpdu *fpdu, uint32_t ulpdu_len)
{
	static const uint8_t zeros[PAD_MAX];

	fpdu_copy(fpdu, zeros, pad_len(ulpdu_len));
	fpdu_to_marker(fpdu);
	/* The field is there in any case (RFC 5044 4.1); least significant byte first (4.4, RFC 3720 B.4). */
	uint32_t value = fpdu->out->crc ? htole32(~fpdu->state) : 0;
	memcpy(append_own(fpdu->out, CRC_LEN), &value, CRC_LEN);
	pieces_of(fpdu->out)[fpdu->out->pieces.tail - 1].ends = true;
}

/* Where in a message the next byte is. */
struct cursor {
	struct framing_span *span;
	size_t skip; /* bytes of the span before it */
};

static void fpdu_payload(struct fpdu *fpdu, struct cursor *cursor, size_t len, bool copy)
{
	while (len) {
		struct framing_span *span = cursor->span;
		size_t some = min_size(len, span->len - cursor->skip);

		if (!some) {
			*cursor = (struct cursor){span + 1, 0};
			continue;
		}
		if (copy || span->copied) {
			fpdu_copy(fpdu, span->base + cursor->skip, some);
		} else {
			fpdu_refer(fpdu, span->base + cursor->skip, some);
			span->until = fpdu->out->position;
		}
		cursor->skip += some;
		len -= some;
	}
}

/* Room for a part of `len` bytes in `count` segments. */
static int out_reserve(struct framing_out *out, size_t header_len, size_t len, size_t count, size_t spans_len,
                       size_t copied)
{
	size_t added = count * (LENGTH_LEN + header_len + PAD_MAX + CRC_LEN);
	size_t markers = out->markers ? (len + added) / BETWEEN + 2 : 0;
	/* In an FPDU are a piece before the payload and one behind it; a marker or the end of a span divides one. */
	size_t pieces = 3 * count + spans_len + 2 * markers;

	added += markers * MARKER_LEN;
	if (framing_out_waiting(out) + len + added > FRAMING_WAITING_MAX)
		return -ENOBUFS;
	if (row_reserve(&out->pieces, sizeof(struct piece), pieces) < 0)
		return -ENOMEM;
	return arena_reserve(out, added + copied);
}

int framing_out_put(struct framing_out *out, const struct framing_message *message, struct framing_span *spans,
                    size_t spans_len, uint64_t begin, uint64_t end, bool last, bool copy)
{
	if (spans_len > FRAMING_BUFFERS_MAX || begin > end || end - begin > FRAMING_CALL_MAX)
		return -EINVAL;
	if (end > spans_total(spans, spans_len) || (!message->tagged && end > UINT32_MAX))
		return -EINVAL;
	size_t len = (size_t)(end - begin), header_len = message->tagged ? TAGGED_LEN : UNTAGGED_LEN;
	size_t payload_max = out->mulpdu - header_len;
	size_t count = len ? (len + payload_max - 1) / payload_max : 1; /* RFC 5041 5.2: of nothing, one segment */

	copy = copy || len <= COPIED;
	size_t copied = copy ? len : 0;
	for (size_t n = 0; n < spans_len; n++) {
		spans[n].until = 0;
		copied += spans[n].copied && !copy ? min_size(spans[n].len, len) : 0;
	}
	int result = out_reserve(out, header_len, len, count, spans_len, copied);
	if (result < 0)
		return result;

	struct cursor cursor = {spans, 0};
	if (len) {
		uint64_t skip = begin;

		for (; skip >= cursor.span->len; cursor.span++)
			skip -= cursor.span->len;
		cursor.skip = (size_t)skip;
	}
	uint64_t at = begin;
	do {
		struct fpdu fpdu = {.out = out, .state = CRC32C_START};
		size_t some = min_size(payload_max, (size_t)(end - at));
		uint32_t ulpdu_len = (uint32_t)(header_len + some);

		fpdu_begin(&fpdu, message, at, ulpdu_len, last && at + some == end);
		fpdu_payload(&fpdu, &cursor, some, copy);
		fpdu_end(&fpdu, ulpdu_len);
		at += some;
	} while (at < end);
	return 0;
}

size_t framing_out_peek(const struct framing_out *out, struct iovec *pieces, size_t len, size_t *bytes)
{
	size_t count = 0;

	*bytes = 0;
	for (size_t n = out->pieces.head; n < out->pieces.tail; n++) {
		const struct piece *piece = pieces_of(out) + n;
		uint8_t *base = (uint8_t *)(uintptr_t)piece_base(out, piece);
		struct iovec *previous = count ? &pieces[count - 1] : NULL;

		/* The end of an FPDU and the beginning of the next are neighbours in the arena. */
		if (previous && (uint8_t *)previous->iov_base + previous->iov_len == base)
			previous->iov_len += piece->len;
		else if (count == len)
			break;
		else
			pieces[count++] = (struct iovec){base, piece->len};
		*bytes += piece->len;
	}
	return count;
}

void framing_out_copy(const struct framing_out *out, uint8_t *to, size_t len)
{
	for (size_t n = out->pieces.head; len; n++) {
		const struct piece *piece = pieces_of(out) + n;
		size_t some = min_size(len, piece->len);

		memcpy(to, piece_base(out, piece), some);
		to += some;
		len -= some;
	}
}

size_t framing_out_rest(const struct framing_out *out)
{
	size_t rest = 0, n = out->pieces.head;

	if (!out->partial)
		return 0;
	do
		rest += pieces_of(out)[n].len;
	while (!pieces_of(out)[n++].ends);
	return rest;
}

static void arena_give_back(struct framing_out *out, const struct piece *piece, size_t len)
{
	if (piece->own)
		out->arena.head = (size_t)(piece->count - out->arena_start) + len;
}

void framing_out_advance(struct framing_out *out, size_t bytes)
{
	out->written += bytes;
	while (bytes) {
		struct piece *piece = pieces_of(out) + out->pieces.head;
		size_t some = min_size(bytes, piece->len);

		arena_give_back(out, piece, some);
		bytes -= some;
		if (some == piece->len) {
			out->partial = !piece->ends;
			out->pieces.head++;
			continue;
		}
		out->partial = true;
		piece->len -= (uint32_t)some;
		if (piece->own)
			piece->count += some;
		else
			piece->base += some;
	}
	if (out->pieces.head == out->pieces.tail) {
		out->pieces.head = out->pieces.tail = 0;
		out->arena_start += out->arena.tail;
		out->arena.head = out->arena.tail = 0;
	}
}

int framing_out_own(struct framing_out *out)
{
	size_t len = (size_t)framing_out_waiting(out), tail = 0;
	bool all_own = true;

	for (size_t n = out->pieces.head; n < out->pieces.tail; n++)
		all_own &= pieces_of(out)[n].own;
	if (all_own)
		return 0;
	uint8_t *items = malloc(len);
	if (!items)
		return -ENOMEM;
	for (size_t n = out->pieces.head; n < out->pieces.tail; n++) {
		struct piece *piece = pieces_of(out) + n;

		memcpy(items + tail, piece_base(out, piece), piece->len);
		tail += piece->len;
	}
	tail = 0;
	for (size_t n = out->pieces.head; n < out->pieces.tail; n++) {
		struct piece *piece = pieces_of(out) + n;

		piece->own = true;
		piece->count = tail;
		tail += piece->len;
	}
	free(out->arena.items);
	out->arena = (struct framing_row){.items = items, .tail = len, .size = len};
	out->arena_start = 0;
	return 0;
}

void framing_out_clear(struct framing_out *out)
{
	size_t n = out->pieces.head;

	out->position = out->written + framing_out_rest(out);
	if (out->partial)
		while (!pieces_of(out)[n++].ends)
			;
	out->pieces.tail = n;
	if (n > out->pieces.head) { /* an FPDU ends with bytes of our own */
		const struct piece *last = pieces_of(out) + n - 1;

		out->arena.tail = (size_t)(last->count - out->arena_start) + last->len;
	} else {
		out->arena.tail = out->arena.head;
	}
}
