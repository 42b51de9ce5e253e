/* framing_in.c - runs of segments out of FPDUs. framing.h tells what for. */
#include "framing_fpdu.h"

#include "crc32c.h"

#define MOVED 4096u           /* staged bytes that are moved to the front whenever room is made */
#define READ_ROOM (64u << 10) /* room at the end with which more are not */

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

/* Bytes of the stream that an FPDU takes which begins at `phase` after a marker's place: with its markers. */
static uint32_t fpdu_span(uint32_t phase, bool markers, uint32_t ulpdu_len)
{
	uint32_t content = LENGTH_LEN + ulpdu_len + pad_len(ulpdu_len) + CRC_LEN;
	uint32_t first = phase ? SPACING - phase : 0; /* bytes before the first marker */

	if (!markers || content <= first)
		return content;
	return content + MARKER_LEN * ((content - first + BETWEEN - 1) / BETWEEN);
}

static struct framing_run *runs_of(const struct framing_in *in)
{
	return (struct framing_run *)(void *)in->runs.items;
}

static struct framing_segment *segments_of(const struct framing_in *in)
{
	return (struct framing_segment *)(void *)in->segments.items;
}

/* All but one that is kept. */
static void runs_end(struct framing_in *in)
{
	if (!in->kept)
		in->runs.tail = in->segments.tail = 0;
}

/* Where the bytes begin that are still needed. */
static uint32_t needed_from(const struct framing_in *in)
{
	return in->kept ? segments_of(in)->at : in->head;
}

void framing_in_keep(struct framing_in *in)
{
	struct framing_run *last = runs_of(in) + in->runs.tail - 1;

	memmove(segments_of(in), segments_of(in) + last->first, last->count * sizeof(struct framing_segment));
	*runs_of(in) = *last;
	runs_of(in)->first = 0;
	in->segments.tail = last->count;
	in->runs.tail = 1;
	in->kept = true;
}

void framing_in_unread(struct framing_in *in, size_t index)
{
	if (index < in->runs.tail && in->fault) { /* which is found again, behind what came before it */
		const struct framing_segment *last = segments_of(in) + in->segments.tail - 1;

		in->head = last->at + fpdu_span(0, false, last->ulpdu_len);
		in->fault = FRAMING_OK;
	}
	uint32_t at = index < in->runs.tail ? segments_of(in)[runs_of(in)[index].first].at : in->head;

	in->position -= in->head - at;
	in->head = at;
	in->kept = false;
	runs_end(in);
}

int framing_in_room(struct framing_in *in, uint8_t **at, size_t *len)
{
	runs_end(in);
	uint32_t from = needed_from(in), pending = in->tail - from, room = in->size - in->tail;
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
	if (from && (pending < MOVED || room < READ_ROOM)) {
		memmove(in->staging, in->staging + from, pending);
		in->head -= from;
		in->tail = pending;
		for (size_t n = 0; n < in->segments.tail; n++)
			segments_of(in)[n].at -= from;
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

/* Copies what follows `skip` bytes after the length field begins, without the markers in between. */
static void content_copy(const struct framing_in *in, const struct framing_segment *segment, size_t skip, uint8_t *to,
                         size_t len)
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
	uint32_t received;

	memcpy(&received, raw + span - CRC_LEN, CRC_LEN);
	return ~crc32c_update(CRC32C_START, raw, span - CRC_LEN) == le32toh(received);
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
	in->kept = false;
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

	if (spans_len > FRAMING_BUFFERS_MAX || len > run->len || begin > run->len - len || len > total ||
	    offset > total - len)
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
