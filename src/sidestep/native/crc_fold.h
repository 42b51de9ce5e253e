/*
 * crc_fold.h - what folding needs of a CPU, in its own words; crc32c.c tells how it works. Of the files that fold only.
 */
#ifndef SIDESTEP_CRC_FOLD_H
#define SIDESTEP_CRC_FOLD_H

#include <stddef.h>
#include <stdint.h>

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
	return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(a, factors, 0x00), b), _mm_clmulepi64_si128(a, factors, 0x11));
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

#ifdef __x86_64__
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
#endif

#endif
