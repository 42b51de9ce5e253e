/* crc32c.c - CRC32C by tables, by the CPU's instruction, and by folding; see crc_fold.h. */
#include "crc32c.h"

#define REFLECTED 0x82F63B78u /* of the polynomial 0x1EDC6F41 */
#include "crc_fold.h"

#include <stdbool.h>

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

CPU_CRC static inline uint32_t update_short(uint32_t state, const uint8_t *data, size_t len)
{
	for (; len >= 8; data += 8, len -= 8)
		state = crc_8(state, load_le64(data));
	while (len--)
		state = crc_1(state, *data++);
	return state;
}
#endif

#ifdef __x86_64__
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
		*next++ = (struct crc32c_implementation){"crc32", update_short};
#elif defined(CPU_FOLDS)
	unsigned long found = getauxval(AT_HWCAP);

	if (found & HWCAP_CRC32 && found & HWCAP_PMULL)
		*next++ = (struct crc32c_implementation){"pmull", update_folded};
	if (found & HWCAP_CRC32)
		*next++ = (struct crc32c_implementation){"crc32", update_short};
#endif
	*next = (struct crc32c_implementation){"portable", update_portable};
	crc32c_update = usable[0].update;
}

void crc32c_init(void)
{
	if (usable[0].name)
		return;
	make_tables();
	find_usable();
}
