/*
 * check.h - what the C tests of the channel share: checks that name themselves, seeded randomness, and segments mapped
 * between two pages that nobody may touch, so that an access outside of a mapping is a crash and not luck.
 *
 * Link with -Wl,--wrap=mmap,--wrap=munmap: channel.c then maps through the guards too.
 */
#ifndef SIDESTEP_CHECK_H
#define SIDESTEP_CHECK_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "channel.h"

#define CHECK(condition, ...) \
	do { \
		if (!(condition)) \
			check_failed(__FILE__, __LINE__, #condition, " " __VA_ARGS__); \
	} while (0)

extern bool mappings_unguarded; /* set before the first mapping: they are made as they are asked for */

_Noreturn void check_failed(const char *file, int line, const char *condition, const char *format, ...)
	__attribute__((format(printf, 4, 5)));

/* Runs the test of that name; without an argument their names are listed. What main() is to return. */
struct test {
	const char *name;
	void (*run)(void);
};
int tests_run(const struct test *tests, size_t len, int argc, char **argv);

/* splitmix64: small, seeded, the same everywhere */
struct dice {
	uint64_t state;
};
uint64_t dice_roll(struct dice *dice);
uint64_t dice_below(struct dice *dice, uint64_t bound);

/* What a fuzzer has given and nobody has taken yet: zeros follow. */
struct input {
	const uint8_t *at;
	size_t left;
};

static inline uint64_t input_take(struct input *input, size_t n)
{
	uint64_t value = 0;

	for (; n && input->left; n--, input->at++, input->left--)
		value = value << 8 | *input->at;
	return value;
}

/* The byte that belongs at a position of a stream: a hole, a repeat or a shift shows at once. */
static inline uint8_t stream_byte(uint64_t seed, uint64_t position)
{
	uint64_t mixed = (position + seed) * 0x9E3779B97F4A7C15ull;

	return (uint8_t)(mixed >> 56);
}

/* One side's own words, which the peer cannot reach. */
struct own_words {
	_Atomic uint64_t tail, head, head_seen, ring_from, ring_to, spill_base, limit, room_max;
};
struct channel_own own_of(struct own_words *words);

struct end {
	struct channel_end channel;
	struct own_words own;
};

/* Two ends of a new segment, each with a mapping of its own; `fd` may be NULL. */
void ends_open(struct end ends[2], uint32_t size0, uint32_t size1, int *fd);
void ends_close(struct end ends[2]);

/*
 * Makes `end` the other side of the mapping that `of` has: both then use the same addresses, which a race detector needs
 * to see that they touch the same memory.
 */
void end_mirror(struct end *end, const struct end *of);

/* Sends or receives as much as goes, at most len bytes of the stream `seed` from `position` on; the bytes moved. */
size_t end_send(struct end *end, uint64_t seed, uint64_t position, size_t len);
size_t end_receive(struct end *end, uint64_t seed, uint64_t position, size_t len);

/* The words of the header that a peer can write, by name. */
struct header_word {
	const char *name;
	size_t offset, size;
};
extern const struct header_word header_words[];
extern const size_t header_words_len;
void header_poke(struct channel_segment *seg, const struct header_word *word, uint64_t value);

#endif
