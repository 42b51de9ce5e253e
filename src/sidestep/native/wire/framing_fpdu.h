/*
 * framing_fpdu.h - what an FPDU is made of, and the rows and spans that both sides of a direction work with.
 *
 * An FPDU is the length of the ULPDU, the ULPDU (one DDP segment), 0 to 3 bytes of padding and a checksum. With markers, 4
 * bytes stand at every 512th byte of the stream, wherever that is, and say how far before them the length field of
 * their FPDU is; one right before a length field belongs to the FPDU that follows (RFC 5044 4.1 to 4.4).
 */
#ifndef SIDESTEP_FRAMING_FPDU_H
#define SIDESTEP_FRAMING_FPDU_H

#include <assert.h>
#include <endian.h>
#include <stdlib.h>
#include <string.h>

#include "framing.h"

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

static_assert(FRAMING_HEADER_MAX == UNTAGGED_LEN, "the longer of the two");

static inline size_t min_size(size_t a, size_t b)
{
	return a < b ? a : b;
}

static inline void put_be32(uint8_t *at, uint32_t value)
{
	value = htobe32(value);
	memcpy(at, &value, sizeof(value));
}

static inline void put_be64(uint8_t *at, uint64_t value)
{
	value = htobe64(value);
	memcpy(at, &value, sizeof(value));
}

static inline uint16_t get_be16(const uint8_t *at)
{
	uint16_t value;

	memcpy(&value, at, sizeof(value));
	return be16toh(value);
}

static inline uint32_t get_be32(const uint8_t *at)
{
	uint32_t value;

	memcpy(&value, at, sizeof(value));
	return be32toh(value);
}

static inline uint64_t get_be64(const uint8_t *at)
{
	uint64_t value;

	memcpy(&value, at, sizeof(value));
	return be64toh(value);
}

static inline uint32_t pad_len(uint32_t ulpdu_len)
{
	return -(LENGTH_LEN + ulpdu_len) % 4; /* RFC 5044 4.1 */
}

/* Room for `more` items of `item` bytes behind the last, moving those that are there to the front if need be. */
static inline int row_reserve(struct framing_row *row, size_t item, size_t more)
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

static inline void row_free(struct framing_row *row)
{
	free(row->items);
	*row = (struct framing_row){0};
}

/* The sum of the lengths, or the most there can be. */
static inline uint64_t spans_total(const struct framing_span *spans, size_t len)
{
	uint64_t total = 0;

	for (size_t n = 0; n < len; n++)
		if (__builtin_add_overflow(total, spans[n].len, &total))
			return UINT64_MAX;
	return total;
}

#endif
