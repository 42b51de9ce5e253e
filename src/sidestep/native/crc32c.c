/*
 * crc32c.c - CRC32C by tables, by the CPU's instruction, and by folding.
 *
 * Folding (Intel, "Fast CRC computation for generic polynomials using PCLMULQDQ", 2009): a block of the message is a
 * polynomial. To move it D bits towards the end means to multiply it by x^D modulo P, which leaves the checksum of the whole
 * as it was. So a few wide registers run through the message, each added onto the block so many bytes further on, until
 * 16 bytes are left, and the CRC32 instruction takes these like any others.
 *
 * Bits are reflected: bit i of a 32-bit factor stands for x^(31-i), and a carry-less product of 64 and 32 bits, seen as a
 * 128-bit block, is too high by x^33. So the factors for D bits are x^(D+31) for the first half of a block, which
 * is 64 bits further from the end, and x^(D-33) for the second. The constants are computed, not copied from a table.
 */
#include "crc32c.h"

#include "crc_fold.h"

#include <stdbool.h>
#include <string.h>

#define REFLECTED 0x82F63B78u /* of the polynomial 0x1EDC6F41 */
#define SLICES 8

struct factors {
	uint64_t first, second; /* for the halves of a 16-byte block */
};

static uint32_t table[SLICES][256]; /* table[n][b]: the byte b, and n bytes of zeros behind it */
static struct factors by16, by64;   /* to move a block by so many bytes */
#ifdef __x86_64__
static struct factors by256;
static struct factors to_last[4]; /* to move the blocks of a 64-byte register onto the last, which stays */
#endif

static uint32_t times_x(uint32_t value)
{
	return value >> 1 ^ (value & 1 ? REFLECTED : 0);
}

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

static uint64_t load_le64(const uint8_t *at)
{
	uint64_t value;

	memcpy(&value, at, sizeof(value));
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
	value = __builtin_bswap64(value);
#endif
	return value;
}

static uint32_t update_portable(uint32_t state, const uint8_t *data, size_t len)
{
	for (; len >= 8; data += 8, len -= 8) {
		uint64_t next = load_le64(data) ^ state;

		state = table[7][next & 0xFF] ^ table[6][next >> 8 & 0xFF] ^ table[5][next >> 16 & 0xFF] ^
		        table[4][next >> 24 & 0xFF] ^ table[3][next >> 32 & 0xFF] ^ table[2][next >> 40 & 0xFF] ^
		        table[1][next >> 48 & 0xFF] ^ table[0][next >> 56];
	}
	while (len--)
		state = state >> 8 ^ table[0][(state ^ *data++) & 0xFF];
	return state;
}

#ifdef CPU_FOLDS
#ifdef __x86_64__
CPU_CRC static inline uint32_t crc_8(uint32_t state, uint64_t bytes)
{
	return (uint32_t)_mm_crc32_u64(state, bytes);
}

CPU_CRC static inline uint32_t crc_1(uint32_t state, uint8_t byte)
{
	return _mm_crc32_u8(state, byte);
}
#else
CPU_CRC static inline uint32_t crc_8(uint32_t state, uint64_t bytes)
{
	return __crc32cd(state, bytes);
}

CPU_CRC static inline uint32_t crc_1(uint32_t state, uint8_t byte)
{
	return __crc32cb(state, byte);
}
#endif

CPU_CRC static uint32_t update_instruction(uint32_t state, const uint8_t *data, size_t len)
{
	for (; len >= 8; data += 8, len -= 8)
		state = crc_8(state, load_le64(data));
	while (len--)
		state = crc_1(state, *data++);
	return state;
}

/* The last block, and what is too short to be one. */
CPU_FOLD static inline uint32_t fold_end(block sum, const uint8_t *data, size_t len)
{
	block factors = block_load(&by16);

	for (; len >= 16; data += 16, len -= 16)
		sum = block_fold(sum, factors, block_load(data));
	return update_instruction(crc_8(crc_8(0, block_first(sum)), block_second(sum)), data, len);
}

CPU_FOLD static uint32_t update_folded(uint32_t state, const uint8_t *data, size_t len)
{
	if (len < 64)
		return update_instruction(state, data, len);
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

CPU_WIDE static uint32_t copy_wide(uint32_t state, uint8_t *to, const uint8_t *from, size_t len)
{
	return len < 128 ? update_folded(state, memcpy(to, from, len), len) : wide(state, from, len, to);
}
#endif

static uint32_t copy_first(uint32_t state, uint8_t *to, const uint8_t *from, size_t len)
{
	return crc32c_update(state, memcpy(to, from, len), len);
}

static struct crc32c_implementation usable[5];
const struct crc32c_implementation *crc32c_implementations = usable;
crc32c_update_fn *crc32c_update = update_portable;
crc32c_copy_fn *crc32c_copy = copy_first;

static void find_usable(void)
{
	struct crc32c_implementation *next = usable;

#if defined(__x86_64__)
	__builtin_cpu_init();
	bool crc = __builtin_cpu_supports("sse4.2"), folds = crc && __builtin_cpu_supports("pclmul");
	bool wide_registers = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl");

	if (folds && wide_registers && __builtin_cpu_supports("vpclmulqdq")) {
		*next++ = (struct crc32c_implementation){"vpclmulqdq", update_wide};
		crc32c_copy = copy_wide;
	}
	if (folds)
		*next++ = (struct crc32c_implementation){"pclmulqdq", update_folded};
	if (crc)
		*next++ = (struct crc32c_implementation){"crc32", update_instruction};
#elif defined(CPU_FOLDS)
	unsigned long found = getauxval(AT_HWCAP);

	if (found & HWCAP_CRC32 && found & HWCAP_PMULL)
		*next++ = (struct crc32c_implementation){"pmull", update_folded};
	if (found & HWCAP_CRC32)
		*next++ = (struct crc32c_implementation){"crc32", update_instruction};
#endif
	*next = (struct crc32c_implementation){"portable", update_portable};
	crc32c_update = usable[0].update;
}

void crc32c_init(void)
{
	if (usable[0].name)
		return;
	for (unsigned byte = 0; byte < 256; byte++) {
		table[0][byte] = byte;
		for (unsigned bit = 0; bit < 8; bit++)
			table[0][byte] = times_x(table[0][byte]);
	}
	for (unsigned n = 1; n < SLICES; n++)
		for (unsigned byte = 0; byte < 256; byte++)
			table[n][byte] = table[n - 1][byte] >> 8 ^ table[0][table[n - 1][byte] & 0xFF];
	by16 = moved_by(16);
	by64 = moved_by(64);
#ifdef __x86_64__
	by256 = moved_by(256);
	for (unsigned n = 0; n < 3; n++)
		to_last[n] = moved_by(16 * (3 - n));
#endif
	find_usable();
}
