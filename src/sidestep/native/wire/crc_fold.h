/*
 * crc_fold.h - a CRC of 32 bits by tables and by folding, of whatever polynomial: bits reflected, REFLECTED is its low half.
 *
 * Folding (Intel, "Fast CRC computation for generic polynomials using PCLMULQDQ", 2009): a block of the message is a
 * polynomial. To move it D bits towards the end means to multiply it by x^D modulo P, which leaves the checksum of the whole
 * as it was. So a few wide registers run through the message, each added onto the block so many bytes further on, until
 * 16 bytes are left, and what takes short pieces takes these like any others.
 *
 * Bits are reflected: bit i of a 32-bit factor stands for x^(31-i), and a carry-less product of 64 and 32 bits, seen as a
 * 128-bit block, is too high by x^33. So the factors for D bits are x^(D+31) for the first half of a block, which
 * is 64 bits further from the end, and x^(D-33) for the second. The constants are computed, not copied from a table.
 *
 * Whoever includes it has defined REFLECTED, and defines crc_8() and update_short() where CPU_FOLDS is.
 */
#ifndef SIDESTEP_CRC_FOLD_H
#define SIDESTEP_CRC_FOLD_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define SLICES 8

struct factors {
	uint64_t first, second; /* for the halves of a 16-byte block */
};

static uint32_t table[SLICES][256]; /* table[n][b]: the byte b, and n bytes of zeros behind it */

static uint32_t times_x(uint32_t value)
{
	return value >> 1 ^ (value & 1 ? REFLECTED : 0);
}

static uint64_t load_le64(const uint8_t *at)
{
	uint64_t value;

	memcpy(&value, at, sizeof(value));
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
	value = __builtin_bswap64(value);
#endif
	return value;
}

static uint32_t table_8(uint32_t state, uint64_t bytes)
{
	bytes ^= state;
	return table[7][bytes & 0xFF] ^ table[6][bytes >> 8 & 0xFF] ^ table[5][bytes >> 16 & 0xFF] ^
	       table[4][bytes >> 24 & 0xFF] ^ table[3][bytes >> 32 & 0xFF] ^ table[2][bytes >> 40 & 0xFF] ^
	       table[1][bytes >> 48 & 0xFF] ^ table[0][bytes >> 56];
}

static uint32_t update_portable(uint32_t state, const uint8_t *data, size_t len)
{
	for (; len >= 8; data += 8, len -= 8)
		state = table_8(state, load_le64(data));
	while (len--)
		state = state >> 8 ^ table[0][(state ^ *data++) & 0xFF];
	return state;
}

#if defined(__x86_64__)
#include <immintrin.h>
#ifdef __clang__
#define CPU_CRC __attribute__((target("sse4.2,crc32")))
#define CPU_FOLD __attribute__((target("sse4.2,crc32,pclmul")))
#else
#define CPU_CRC __attribute__((target("sse4.2")))
#define CPU_FOLD __attribute__((target("sse4.2,pclmul")))
#endif
#define CPU_FOLDS 1
typedef __m128i block;

CPU_FOLD static inline block block_load(const void *at)
{
	return _mm_loadu_si128(at);
}

CPU_FOLD static inline block block_of(uint64_t first)
{
	return _mm_cvtsi64_si128((long long)first);
}

CPU_FOLD static inline block block_xor(block a, block b)
{
	return _mm_xor_si128(a, b);
}

CPU_FOLD static inline uint64_t block_first(block a)
{
	return (uint64_t)_mm_cvtsi128_si64(a);
}

CPU_FOLD static inline uint64_t block_second(block a)
{
	return (uint64_t)_mm_extract_epi64(a, 1);
}

/* `a`, moved, onto `b`. */
CPU_FOLD static inline block block_fold(block a, block factors, block b)
{
	return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(a, factors, 0x00), b),
	                     _mm_clmulepi64_si128(a, factors, 0x11));
}

#elif defined(__aarch64__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#include <arm_acle.h>
#include <arm_neon.h>
#include <sys/auxv.h>
/* A clang before 16 has the intrinsics only where the whole file is compiled for them. */
#if !defined(__clang__) || __clang_major__ >= 16 || (defined(__ARM_FEATURE_CRC32) && defined(__ARM_FEATURE_AES))
#ifdef __clang__
#define CPU_CRC __attribute__((target("crc")))
#define CPU_FOLD __attribute__((target("crc,aes")))
#else
#define CPU_CRC __attribute__((target("+crc")))
#define CPU_FOLD __attribute__((target("+crc+crypto")))
#endif
#define CPU_FOLDS 1
typedef poly64x2_t block;

CPU_FOLD static inline block block_load(const void *at)
{
	return vreinterpretq_p64_u8(vld1q_u8(at));
}

CPU_FOLD static inline block block_of(uint64_t first)
{
	return vreinterpretq_p64_u64(vsetq_lane_u64(first, vdupq_n_u64(0), 0));
}

CPU_FOLD static inline block block_xor(block a, block b)
{
	return vreinterpretq_p64_u64(veorq_u64(vreinterpretq_u64_p64(a), vreinterpretq_u64_p64(b)));
}

CPU_FOLD static inline uint64_t block_first(block a)
{
	return vgetq_lane_u64(vreinterpretq_u64_p64(a), 0);
}

CPU_FOLD static inline uint64_t block_second(block a)
{
	return vgetq_lane_u64(vreinterpretq_u64_p64(a), 1);
}

CPU_FOLD static inline block block_fold(block a, block factors, block b)
{
	block first = vreinterpretq_p64_p128(vmull_p64(vgetq_lane_p64(a, 0), vgetq_lane_p64(factors, 0)));
	block second = vreinterpretq_p64_p128(vmull_high_p64(a, factors));

	return block_xor(block_xor(first, b), second);
}
#endif
#endif

#ifdef CPU_FOLDS
static struct factors by16, by64; /* to move a block by so many bytes */

CPU_CRC static inline uint32_t crc_8(uint32_t state, uint64_t bytes);
CPU_CRC static inline uint32_t update_short(uint32_t state, const uint8_t *data, size_t len);

/* The last block, and what is too short to be one. */
CPU_FOLD static inline uint32_t fold_end(block sum, const uint8_t *data, size_t len)
{
	block factors = block_load(&by16);

	for (; len >= 16; data += 16, len -= 16)
		sum = block_fold(sum, factors, block_load(data));
	return update_short(crc_8(crc_8(0, block_first(sum)), block_second(sum)), data, len);
}

CPU_FOLD static uint32_t update_folded(uint32_t state, const uint8_t *data, size_t len)
{
	if (len < 64)
		return update_short(state, data, len);
	block a = block_xor(block_load(data), block_of(state)), b = block_load(data + 16);
	block c = block_load(data + 32), d = block_load(data + 48);
	block factors = block_load(&by64);

	for (data += 64, len -= 64; len >= 64; data += 64, len -= 64) {
		a = block_fold(a, factors, block_load(data));
		b = block_fold(b, factors, block_load(data + 16));
		c = block_fold(c, factors, block_load(data + 32));
		d = block_fold(d, factors, block_load(data + 48));
	}
	factors = block_load(&by16);
	b = block_fold(a, factors, b);
	c = block_fold(b, factors, c);
	d = block_fold(c, factors, d);
	return fold_end(d, data, len);
}
#endif

#ifdef __x86_64__
static struct factors by256;
static struct factors to_last[4]; /* to move the blocks of a 64-byte register onto the last, which stays */

#define CPU_WIDE __attribute__((target("sse4.2,pclmul,avx512f,avx512vl,vpclmulqdq")))

CPU_WIDE static inline __m512i wide_fold(__m512i a, __m512i factors, __m512i b)
{
	__m512i first = _mm512_clmulepi64_epi128(a, factors, 0x00);
	__m512i second = _mm512_clmulepi64_epi128(a, factors, 0x11);

	return _mm512_ternarylogic_epi64(first, second, b, 0x96); /* the sum of the three */
}

/* The next 64 bytes; they go to `*to` as well, if there is such a place. */
CPU_WIDE static inline __m512i wide_load(const uint8_t *at, uint8_t **to)
{
	__m512i bytes = _mm512_loadu_si512(at);

	if (*to) {
		__asm__("" : "+v"(bytes)); /* not to be loaded twice: they may change in between */
		_mm512_storeu_si512(*to, bytes);
		*to += sizeof(bytes);
	}
	return bytes;
}

/* Of 128 bytes or more; copies them to `to`, unless that is NULL. */
CPU_WIDE static inline uint32_t wide(uint32_t state, const uint8_t *data, size_t len, uint8_t *to)
{
	__m512i sum = _mm512_xor_si512(wide_load(data, &to), _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)state)));
	__m512i factors = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)&by64));

	if (len >= 512) {
		__m512i second = wide_load(data + 64, &to), third = wide_load(data + 128, &to);
		__m512i fourth = wide_load(data + 192, &to);
		__m512i far = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)&by256));

		for (data += 256, len -= 256; len >= 256; data += 256, len -= 256) {
			sum = wide_fold(sum, far, wide_load(data, &to));
			second = wide_fold(second, far, wide_load(data + 64, &to));
			third = wide_fold(third, far, wide_load(data + 128, &to));
			fourth = wide_fold(fourth, far, wide_load(data + 192, &to));
		}
		sum = wide_fold(wide_fold(wide_fold(sum, factors, second), factors, third), factors, fourth);
	} else {
		data += 64;
		len -= 64;
	}
	for (; len >= 64; data += 64, len -= 64)
		sum = wide_fold(sum, factors, wide_load(data, &to));

	/* All four blocks onto the last: the factors of that one are 0, so it is put back as it was. */
	__m512i last = _mm512_maskz_mov_epi64(0xC0, sum);
	sum = wide_fold(sum, _mm512_loadu_si512(to_last), last);
	__m256i half = _mm256_xor_si256(_mm512_castsi512_si256(sum), _mm512_extracti64x4_epi64(sum, 1));
	block all = _mm_xor_si128(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
	if (to)
		data = memcpy(to, data, len);
	return fold_end(all, data, len);
}

CPU_WIDE static uint32_t update_wide(uint32_t state, const uint8_t *data, size_t len)
{
	return len < 128 ? update_folded(state, data, len) : wide(state, data, len, NULL);
}
#endif

#ifdef CPU_FOLDS
static uint32_t power_of_x(unsigned exponent)
{
	uint32_t value = 1u << 31;

	while (exponent--)
		value = times_x(value);
	return value;
}

static struct factors moved_by(unsigned bytes)
{
	return (struct factors){power_of_x(8 * bytes + 31), power_of_x(8 * bytes - 33)};
}
#endif

static void make_tables(void)
{
	for (unsigned byte = 0; byte < 256; byte++) {
		table[0][byte] = byte;
		for (unsigned bit = 0; bit < 8; bit++)
			table[0][byte] = times_x(table[0][byte]);
	}
	for (unsigned n = 1; n < SLICES; n++)
		for (unsigned byte = 0; byte < 256; byte++)
			table[n][byte] = table[n - 1][byte] >> 8 ^ table[0][table[n - 1][byte] & 0xFF];
#ifdef CPU_FOLDS
	by16 = moved_by(16);
	by64 = moved_by(64);
#endif
#ifdef __x86_64__
	by256 = moved_by(256);
	for (unsigned n = 0; n < 3; n++)
		to_last[n] = moved_by(16 * (3 - n));
#endif
}

#endif
