/* icrc.c - the CRC-32 of Ethernet by tables, by the instruction of aarch64, and by folding; see crc_fold.h. */
#include "icrc.h"

#define REFLECTED 0xEDB88320u /* of the polynomial 0x04C11DB7 */
#include "crc_fold.h"

#include <stdbool.h>

#define LENGTHS 32 /* bits of a length */

static uint32_t powers[LENGTHS];   /* x^(8 << n) */
static uint32_t inverses[LENGTHS]; /* of these */

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

#ifdef CPU_FOLDS
CPU_CRC static inline uint32_t crc_8(uint32_t state, uint64_t bytes)
{
	return table_8(state, bytes);
}

/* x86-64 has an instruction for the other polynomial only. */
CPU_CRC static inline uint32_t update_short(uint32_t state, const uint8_t *data, size_t len)
{
#ifdef __aarch64__
	for (; len >= 8; data += 8, len -= 8)
		state = __crc32d(state, load_le64(data));
	while (len--)
		state = __crc32b(state, *data++);
	return state;
#else
	return update_portable(state, data, len);
#endif
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

void icrc_init(void)
{
	if (usable[0].name)
		return;
	make_tables();
	powers[0] = 1u << (31 - 8);
	inverses[0] = 1u << 31;
	for (unsigned bit = 0; bit < 8; bit++)
		inverses[0] = over_x(inverses[0]);
	for (unsigned n = 1; n < LENGTHS; n++) {
		powers[n] = icrc_product(powers[n - 1], powers[n - 1]);
		inverses[n] = icrc_product(inverses[n - 1], inverses[n - 1]);
	}
	find_usable();
}
