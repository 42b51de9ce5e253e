/* icrc.c - the CRC-32 of Ethernet by tables, by the instruction of aarch64, and by folding, which crc32c.c explains. */
#include "icrc.h"

#include "crc_fold.h"

#include <stdbool.h>
#include <string.h>

#define REFLECTED 0xEDB88320u /* of the polynomial 0x04C11DB7 */
#define SLICES 8
#define LENGTHS 32 /* bits of a length */

struct factors {
	uint64_t first, second; /* for the halves of a 16-byte block */
};

static uint32_t table[SLICES][256]; /* table[n][b]: the byte b, and n bytes of zeros behind it */
static uint32_t powers[LENGTHS];    /* x^(8 << n) */
static uint32_t inverses[LENGTHS];  /* of these */
#ifdef CPU_FOLDS
static struct factors by16, by64; /* to move a block by so many bytes */
#endif
#ifdef __x86_64__
static struct factors by256;
static struct factors to_last[4]; /* to move the blocks of a 64-byte register onto the last, which stays */
#endif

static uint32_t times_x(uint32_t value)
{
	return value >> 1 ^ (value & 1 ? REFLECTED : 0);
}

static uint32_t over_x(uint32_t value)
{
	return value >> 31 ? (value ^ REFLECTED) << 1 | 1 : value << 1;
}

uint32_t icrc_product(uint32_t a, uint32_t b)
{
	uint32_t sum = 0;

	for (unsigned bit = 0; bit < 32; bit++, a <<= 1) {
		sum ^= b & -(a >> 31);
		b = b >> 1 ^ (REFLECTED & -(b & 1));
	}
	return sum;
}

static uint32_t factor(const uint32_t *of, size_t len)
{
	uint32_t value = 1u << 31;

	for (unsigned n = 0; len && n < LENGTHS; n++, len >>= 1)
		if (len & 1)
			value = icrc_product(value, of[n]);
	return value;
}

uint32_t icrc_behind(size_t len)
{
	return factor(powers, len);
}

uint32_t icrc_before(size_t len)
{
	return factor(inverses, len);
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

static uint32_t update_8(uint32_t state, uint64_t bytes)
{
	bytes ^= state;
	return table[7][bytes & 0xFF] ^ table[6][bytes >> 8 & 0xFF] ^ table[5][bytes >> 16 & 0xFF] ^
	       table[4][bytes >> 24 & 0xFF] ^ table[3][bytes >> 32 & 0xFF] ^ table[2][bytes >> 40 & 0xFF] ^
	       table[1][bytes >> 48 & 0xFF] ^ table[0][bytes >> 56];
}

static uint32_t update_portable(uint32_t state, const uint8_t *data, size_t len)
{
	for (; len >= 8; data += 8, len -= 8)
		state = update_8(state, load_le64(data));
	while (len--)
		state = state >> 8 ^ table[0][(state ^ *data++) & 0xFF];
	return state;
}

#ifdef CPU_FOLDS
#ifdef __aarch64__
CPU_CRC static uint32_t update_short(uint32_t state, const uint8_t *data, size_t len)
{
	for (; len >= 8; data += 8, len -= 8)
		state = __crc32d(state, load_le64(data));
	while (len--)
		state = __crc32b(state, *data++);
	return state;
}
#else
#define update_short update_portable /* x86-64 has an instruction for the other polynomial only */
#endif

/* The last block, and what is too short to be one. */
CPU_FOLD static inline uint32_t fold_end(block sum, const uint8_t *data, size_t len)
{
	block factors = block_load(&by16);

	for (; len >= 16; data += 16, len -= 16)
		sum = block_fold(sum, factors, block_load(data));
	return update_short(update_8(update_8(0, block_first(sum)), block_second(sum)), data, len);
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
CPU_WIDE static uint32_t update_wide(uint32_t state, const uint8_t *data, size_t len)
{
	uint8_t *nowhere = NULL;

	if (len < 128)
		return update_folded(state, data, len);
	__m512i sum = _mm512_xor_si512(wide_load(data, &nowhere), _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)state)));
	__m512i factors = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)&by64));
	data += 64;
	len -= 64;
	if (len >= 448) {
		__m512i second = wide_load(data, &nowhere), third = wide_load(data + 64, &nowhere);
		__m512i fourth = wide_load(data + 128, &nowhere);
		__m512i far = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)&by256));
		for (data += 192, len -= 192; len >= 256; data += 256, len -= 256) {
			sum = wide_fold(sum, far, wide_load(data, &nowhere));
			second = wide_fold(second, far, wide_load(data + 64, &nowhere));
			third = wide_fold(third, far, wide_load(data + 128, &nowhere));
			fourth = wide_fold(fourth, far, wide_load(data + 192, &nowhere));
		}
		sum = wide_fold(wide_fold(wide_fold(sum, factors, second), factors, third), factors, fourth);
	}
	for (; len >= 64; data += 64, len -= 64)
		sum = wide_fold(sum, factors, wide_load(data, &nowhere));
	/* All four blocks onto the last: the factors of that one are 0, so it is put back as it was. */
	sum = wide_fold(sum, _mm512_loadu_si512(to_last), _mm512_maskz_mov_epi64(0xC0, sum));
	__m256i half = _mm256_xor_si256(_mm512_castsi512_si256(sum), _mm512_extracti64x4_epi64(sum, 1));
	return fold_end(_mm_xor_si128(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)), data, len);
}
#endif

static struct icrc_implementation usable[4];
const struct icrc_implementation *icrc_implementations = usable;
icrc_update_fn *icrc_update = update_portable;

static void find_usable(void)
{
	struct icrc_implementation *next = usable;

#if defined(__x86_64__)
	__builtin_cpu_init();
	bool folds = __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
	bool wide_registers = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl");

	if (folds && wide_registers && __builtin_cpu_supports("vpclmulqdq"))
		*next++ = (struct icrc_implementation){"vpclmulqdq", update_wide};
	if (folds)
		*next++ = (struct icrc_implementation){"pclmulqdq", update_folded};
#elif defined(CPU_FOLDS)
	unsigned long found = getauxval(AT_HWCAP);

	if (found & HWCAP_CRC32 && found & HWCAP_PMULL)
		*next++ = (struct icrc_implementation){"pmull", update_folded};
	if (found & HWCAP_CRC32)
		*next++ = (struct icrc_implementation){"crc32", update_short};
#endif
	*next = (struct icrc_implementation){"portable", update_portable};
	icrc_update = usable[0].update;
}

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

void icrc_init(void)
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
	powers[0] = 1u << (31 - 8);
	inverses[0] = 1u << 31;
	for (unsigned bit = 0; bit < 8; bit++)
		inverses[0] = over_x(inverses[0]);
	for (unsigned n = 1; n < LENGTHS; n++) {
		powers[n] = icrc_product(powers[n - 1], powers[n - 1]);
		inverses[n] = icrc_product(inverses[n - 1], inverses[n - 1]);
	}
#ifdef CPU_FOLDS
	by16 = moved_by(16);
	by64 = moved_by(64);
#endif
#ifdef __x86_64__
	by256 = moved_by(256);
	for (unsigned n = 0; n < 3; n++)
		to_last[n] = moved_by(16 * (3 - n));
#endif
	find_usable();
}
