/* pattern.h - what the programs of several suites share: bytes that tell where they belong, and a clock. */
#ifndef SIDESTEP_TESTS_PATTERN_H
#define SIDESTEP_TESTS_PATTERN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

/* The byte at `offset` of a stream; streams with different keys differ. */
static inline uint8_t pattern_byte(uint32_t key, uint64_t offset)
{
	uint32_t mixed = ((uint32_t)offset + key * 0x01000193u) * 0x9E3779B1u;
	return (uint8_t)(mixed >> 24 ^ offset >> 20);
}

static inline void fill_pattern(uint32_t key, uint64_t offset, void *data, size_t len)
{
	uint8_t *bytes = data;
	for (size_t i = 0; i < len; i++)
		bytes[i] = pattern_byte(key, offset + i);
}

static inline bool check_pattern(uint32_t key, uint64_t offset, const void *data, size_t len)
{
	const uint8_t *bytes = data;
	for (size_t i = 0; i < len; i++)
		if (bytes[i] != pattern_byte(key, offset + i))
			return false;
	return true;
}

static inline int64_t now_ms(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

#endif
