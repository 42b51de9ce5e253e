/*
 * framing.c - FPDUs out of messages, and runs of segments out of FPDUs. framing.h tells what for.
 *
 * An FPDU is the length of the ULPDU, the ULPDU (one DDP segment), 0 to 3 bytes of padding and a checksum. With markers, 4
 * bytes stand at every 512th byte of the stream, wherever that is, and say how far before them the length field of
 * their FPDU is; one right before a length field belongs to the FPDU that follows (RFC 5044 4.1 to 4.4).
 */
#include "framing.h"

#include <assert.h>
#include <endian.h>
#include <stdlib.h>
#include <string.h>

#include "crc32c.h"

#define SPACING 512u /* bytes of the stream from marker to marker */
#define MARKER_LEN 4u
#define BETWEEN (SPACING - MARKER_LEN)
#define LENGTH_LEN 2u
#define CRC_LEN 4u
#define PAD_MAX 3u
#define TAGGED_LEN 14u /* RFC 5041 4.2 */
#define UNTAGGED_LEN 18u
#define DDP_TAGGED 0x80u
#define DDP_LAST 0x40u
#define DDP_VERSION 1u
#define COPIED 256u          /* payload this short is cheaper to copy than to refer to */
#define MOVED 4096u          /* staged bytes that are moved to the front whenever room is made */
#define READ_ROOM (64u << 10) /* room at the end with which more are not */

static_assert(FRAMING_HEADER_MAX == UNTAGGED_LEN, "the longer of the two");

/* Own bytes are named by their count from the beginning, as they move when room is made. */
struct piece {
	union {
		const uint8_t *base;
		uint64_t count;
	};
	uint32_t len;
	bool own, ends; /* ends: the last of its FPDU */
};

static size_t min_size(size_t a, size_t b)
{
	return a < b ? a : b;
}

static void put_be32(uint8_t *at, uint32_t value)
{
	value = htobe32(value);
	memcpy(at, &value, sizeof(value));
}

static void put_be64(uint8_t *at, uint64_t value)
{
	value = htobe64(value);
	memcpy(at, &value, sizeof(value));
}

static uint16_t get_be16(const uint8_t *at)
{
	uint16_t value;

	memcpy(&value, at, sizeof(value));
	return be16toh(value);
}

static uint32_t get_be32(const uint8_t *at)
{
	uint32_t value;

	memcpy(&value, at, sizeof(value));
	return be32toh(value);
}

static uint64_t get_be64(const uint8_t *at)
{
	uint64_t value;

	memcpy(&value, at, sizeof(value));
	return be64toh(value);
}

static uint32_t pad_len(uint32_t ulpdu_len)
{
	return -(LENGTH_LEN + ulpdu_len) % 4; /* RFC 5044 4.1 */
}

/* ---- rows ---- */

/* Room for `more` items of `item` bytes behind the last, moving those that are there to the front if need be. */
static int row_reserve(struct framing_row *row, size_t item, size_t more)
{
	size_t len = row->tail - row->head;

	if (row->size - row->tail >= more)
		return 0;
	if (row->size - len < more || row->head < len) { /* else at least as much is free as has to be moved */
		size_t size = 2 * row->size > len + more ? 2 * row->size : len + more;
		uint8_t *items = malloc(size * item);

		if (!items)
			return -ENOMEM;
		if (len)
			memcpy(items, row->items + row->head * item, len * item);
		free(row->items);
		row->items = items;
		row->size = size;
	} else if (len) {
		memmove(row->items, row->items + row->head * item, len * item);
	}
	row->head = 0;
	row->tail = len;
	return 0;
}

static void row_free(struct framing_row *row)
{
	free(row->items);
	*row = (struct framing_row){0};
}

/* ---- out ---- */

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

static void fpdu_begin(struct fpdu *fpdu, const struct framing_message *message, uint64_t offset, size_t ulpdu_len, bool last)
{
	struct framing_out *out = fpdu->out;
	uint32_t control = (message->tagged ? DDP_TAGGED : 0) | (last ? DDP_LAST : 0) | DDP_VERSION;
	uint64_t first = (uint64_t)ulpdu_len << 48 | (uint64_t)control << 40 | (uint64_t)message->rdmap << 32 | message->stag;
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

/* The sum of the lengths, or the most there can be. */
static uint64_t spans_total(const struct framing_span *spans, size_t len)
{
	uint64_t total = 0;

	for (size_t n = 0; n < len; n++)
		if (__builtin_add_overflow(total, spans[n].len, &total))
			return UINT64_MAX;
	return total;
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
		if (copy) {
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
static int out_reserve(struct framing_out *out, size_t header_len, size_t len, size_t count, size_t spans_len, bool copy)
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
	return arena_reserve(out, added + (copy ? len : 0));
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
	int result = out_reserve(out, header_len, len, count, spans_len, copy);
	if (result < 0)
		return result;
	for (size_t n = 0; n < spans_len; n++)
		spans[n].until = 0;

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

void framing_out_trim(struct framing_out *out)
{
	if (framing_out_waiting(out))
		return;
	row_free(&out->pieces);
	out->arena_start += out->arena.tail;
	row_free(&out->arena);
}

/* ---- in ---- */

int framing_in_init(struct framing_in *in, bool crc, bool markers, uint32_t size)
{
	if (size < FRAMING_FPDU_MAX || size > FRAMING_STAGED_MAX)
		return -EINVAL;
	*in = (struct framing_in){.crc = crc, .markers = markers, .size = size};
	return 0;
}

void framing_in_free(struct framing_in *in)
{
	free(in->staging);
	in->staging = NULL;
	row_free(&in->segments);
	row_free(&in->runs);
}

static void runs_end(struct framing_in *in)
{
	in->runs.tail = in->segments.tail = 0;
}

void framing_in_trim(struct framing_in *in)
{
	runs_end(in);
	row_free(&in->segments);
	row_free(&in->runs);
	if (in->head != in->tail)
		return;
	free(in->staging);
	in->staging = NULL;
	in->head = in->tail = 0;
}

int framing_in_room(struct framing_in *in, uint8_t **at, size_t *len)
{
	uint32_t pending = in->tail - in->head, room = in->size - in->tail;

	runs_end(in);
	if (!in->staging) {
		in->staging = malloc(in->size);
		if (!in->staging)
			return -ENOMEM;
	}
	/*
	 * What is at the front stays until it is read, so no byte is moved twice; and of a long FPDU none is unless need be. It
	 * is completed in any case: what is pending and the room together are more than any FPDU.
	 */
	static_assert(MOVED + READ_ROOM >= FRAMING_FPDU_MAX, "room for the rest of any FPDU that is not moved");
	if (in->head && (pending < MOVED || room < READ_ROOM)) {
		memmove(in->staging, in->staging + in->head, pending);
		in->head = 0;
		in->tail = pending;
	}
	*at = in->staging + in->tail;
	*len = in->size - in->tail;
	return 0;
}

void framing_in_commit(struct framing_in *in, size_t len)
{
	if (!in->fault) /* RFC 5044 8: after an error nothing more is delivered */
		in->tail += (uint32_t)len;
}

static const uint8_t *raw_of(const struct framing_in *in)
{
	return in->staging + in->head;
}

/* Bytes of the stream that an FPDU takes which begins at `phase` after a marker's place: with its markers. */
static uint32_t fpdu_span(uint32_t phase, bool markers, uint32_t ulpdu_len)
{
	uint32_t content = LENGTH_LEN + ulpdu_len + pad_len(ulpdu_len) + CRC_LEN;
	uint32_t first = phase ? SPACING - phase : 0; /* bytes before the first marker */

	if (!markers || content <= first)
		return content;
	return content + MARKER_LEN * ((content - first + BETWEEN - 1) / BETWEEN);
}

/* Copies what follows `skip` bytes after the length field begins, without the markers in between. */
static void content_copy(const struct framing_in *in, const struct framing_segment *segment, size_t skip, uint8_t *to, size_t len)
{
	const uint8_t *from = in->staging + segment->at + skip;
	size_t left = SIZE_MAX; /* bytes before the next marker */

	if (in->markers) {
		size_t first = SPACING - segment->phase;

		left = first - skip;
		if (skip >= first) {
			from += MARKER_LEN * (1 + (skip - first) / BETWEEN);
			left = BETWEEN - (skip - first) % BETWEEN;
		}
	}
	for (; len > left; left = BETWEEN) {
		memcpy(to, from, left);
		to += left;
		from += left + MARKER_LEN;
		len -= left;
	}
	memcpy(to, from, len);
}

static bool crc_is_right(const uint8_t *raw, uint32_t span)
{
	uint32_t told;

	memcpy(&told, raw + span - CRC_LEN, CRC_LEN);
	return ~crc32c_update(CRC32C_START, raw, span - CRC_LEN) == le32toh(told);
}

/* RFC 5044 4.3: how far before it the length field is; of the two low bits nothing is said. */
static bool markers_are_right(const uint8_t *raw, uint32_t phase, uint32_t span)
{
	uint32_t lead = phase ? 0 : MARKER_LEN;

	for (uint32_t at = phase ? SPACING - phase : 0; at < span; at += SPACING)
		if ((get_be16(raw + at + 2) & 0xFFFC) != ((at < lead ? 0 : at - lead) & 0xFFFC))
			return false;
	return true;
}

static bool run_goes_on(const struct framing_run *run, const struct framing_run *next)
{
	if (run->last || run->control != next->control || run->rdmap != next->rdmap || run->stag != next->stag)
		return false;
	if (run->queue != next->queue || run->msn != next->msn)
		return false;
	return run->offset <= UINT64_MAX - run->len && run->offset + run->len == next->offset;
}

static struct framing_run *runs_of(const struct framing_in *in)
{
	return (struct framing_run *)(void *)in->runs.items;
}

static struct framing_segment *segments_of(const struct framing_in *in)
{
	return (struct framing_segment *)(void *)in->segments.items;
}

/* What the header says; its fields that a segment of this kind does not have are 0. */
static struct framing_run run_of(const uint8_t *header, uint32_t payload_len, uint32_t segment)
{
	struct framing_run run = {
		.tagged = (header[0] & DDP_TAGGED) != 0,
		.last = (header[0] & DDP_LAST) != 0,
		.control = (uint8_t)(header[0] & ~DDP_LAST),
		.rdmap = header[1],
		.stag = get_be32(header + 2),
		.first = segment,
		.count = 1,
		.len = payload_len,
	};

	if (run.tagged) {
		run.offset = get_be64(header + 6);
	} else {
		run.queue = get_be32(header + 6);
		run.msn = get_be32(header + 10);
		run.offset = get_be32(header + 14);
	}
	return run;
}

/* Takes the FPDU at head, all of which is there. */
static void fpdu_take(struct framing_in *in, uint32_t phase, uint32_t span, uint32_t ulpdu_len)
{
	const uint8_t *raw = raw_of(in);
	uint32_t lead = in->markers && !phase ? MARKER_LEN : 0;
	struct framing_segment segment = {
		.at = in->head + lead,
		.ulpdu_len = (uint16_t)ulpdu_len,
		.phase = (uint16_t)(phase + lead),
	};
	uint8_t header[UNTAGGED_LEN];
	uint32_t header_len = (uint32_t)min_size(ulpdu_len, UNTAGGED_LEN);

	content_copy(in, &segment, LENGTH_LEN, header, header_len);
	if (header_len && header[0] & DDP_TAGGED)
		header_len = (uint32_t)min_size(header_len, TAGGED_LEN);
	if (in->crc && !crc_is_right(raw, span))
		in->fault = FRAMING_CRC;
	else if (in->markers && !markers_are_right(raw, phase, span))
		in->fault = FRAMING_MARKER;
	else if (header_len < TAGGED_LEN || (header_len < UNTAGGED_LEN && !(header[0] & DDP_TAGGED)))
		in->fault = FRAMING_SHORT;
	if (in->fault)
		return;
	struct framing_run next = run_of(header, ulpdu_len - header_len, (uint32_t)in->segments.tail);
	struct framing_run *run = in->runs.tail ? runs_of(in) + in->runs.tail - 1 : NULL;

	if (run && run_goes_on(run, &next)) {
		segment.before = run->len;
		run->len += next.len;
		run->count++;
		run->last = next.last;
	} else {
		runs_of(in)[in->runs.tail++] = next;
	}
	segments_of(in)[in->segments.tail++] = segment;
	in->head += span;
	in->position += span;
}

int framing_in_parse(struct framing_in *in)
{
	runs_end(in);
	while (!in->fault) {
		uint32_t there = in->tail - in->head, phase = in->position % SPACING;
		uint32_t lead = in->markers && !phase ? MARKER_LEN : 0;

		if (there < lead + LENGTH_LEN)
			break;
		/* Every FPDU begins at a multiple of 4 in the stream, so no marker divides the length field. */
		uint32_t ulpdu_len = get_be16(raw_of(in) + lead);
		uint32_t span = fpdu_span(phase, in->markers, ulpdu_len);
		if (there < span)
			break;
		if (row_reserve(&in->runs, sizeof(struct framing_run), 1) ||
		    row_reserve(&in->segments, sizeof(struct framing_segment), 1))
			return in->runs.tail ? 0 : -ENOMEM; /* what was found stays; the rest is left for the next call */
		fpdu_take(in, phase, span, ulpdu_len);
	}
	if (in->fault)
		in->head = in->tail; /* nothing of it is ever looked at */
	return 0;
}

size_t framing_in_runs(const struct framing_in *in, const struct framing_run **runs)
{
	*runs = runs_of(in);
	return in->runs.tail;
}

static uint32_t header_len_of(const struct framing_run *run)
{
	return run->tagged ? TAGGED_LEN : UNTAGGED_LEN;
}

/* The last segment of the run that begins at this byte of its payload or before. */
static uint32_t segment_at(const struct framing_in *in, const struct framing_run *run, uint32_t begin)
{
	uint32_t low = 0, high = run->count;

	while (high - low > 1) {
		uint32_t middle = low + (high - low) / 2;

		if (segments_of(in)[run->first + middle].before <= begin)
			low = middle;
		else
			high = middle;
	}
	return run->first + low;
}

int framing_in_place(const struct framing_in *in, const struct framing_run *run, uint64_t begin,
                     const struct framing_span *spans, size_t spans_len, uint64_t offset, uint64_t len)
{
	uint64_t total = spans_total(spans, spans_len);
	size_t header_len = LENGTH_LEN + header_len_of(run);

	if (spans_len > FRAMING_BUFFERS_MAX || len > run->len || begin > run->len - len || len > total || offset > total - len)
		return -EINVAL;
	if (!len)
		return 0;
	for (; offset >= spans->len; spans++)
		offset -= spans->len;
	const struct framing_segment *segment = segments_of(in) + segment_at(in, run, (uint32_t)begin);
	while (len) {
		size_t skip = (size_t)(begin - segment->before);
		size_t there = LENGTH_LEN + segment->ulpdu_len - header_len - skip;
		size_t some = min_size(min_size(there, (size_t)len), (size_t)(spans->len - offset));

		content_copy(in, segment, header_len + skip, spans->base + offset, some);
		begin += some;
		offset += some;
		len -= some;
		if (some == there)
			segment++;
		if (offset == spans->len && len) {
			spans++;
			offset = 0;
		}
	}
	return 0;
}

size_t framing_in_header(const struct framing_in *in, const struct framing_run *run, uint32_t index,
                         uint8_t header[FRAMING_HEADER_MAX], uint16_t *ulpdu_len)
{
	const struct framing_segment *segment = segments_of(in) + run->first + index;
	size_t len = header_len_of(run);

	content_copy(in, segment, LENGTH_LEN, header, len);
	*ulpdu_len = segment->ulpdu_len;
	return len;
}
