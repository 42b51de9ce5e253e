/*
 * loader_sites_aarch64.c - replaces a piece of code's calls of the kernel and uses of the thread pointer, before any of it
 * runs.
 *
 * An instruction has four bytes, and so has a branch. So each is replaced in place, and nothing but it: code that jumps at it
 * finds its replacement.
 *
 *     svc #0             ─►  b to a trampoline, which comes to loader_entry, or makes the call itself
 *     mrs xN, tpidr_el0  ─►  b to one that reads block.program_tp
 *     msr tpidr_el0, xN  ─►  b to one that writes it
 *
 * A word of data that looks like one of these must be left as it is. Compilers keep constants elsewhere, but those of
 * assembly may stand between functions. What an instruction loads from the code is data. Else a word is a call if the code
 * before leads to it and brings a number or arguments, or if later code looks at its result. The other two are each one word
 * of 2^27, and are always taken as instructions.
 */
#include "loader.h"

#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>

#define SVC 0xd4000001u
#define IMMEDIATE 0x001fffe0u /* bits of svc that the kernel takes no notice of */
#define MRS_TPIDR 0xd53bd040u
#define MSR_TPIDR 0xd51bd040u
#define REGISTER 31u        /* bits of an instruction that name the first one */
#define SPILLS 0xa9bc47f0u   /* stp x16, x17, [sp, #-SPILL]! */
#define UNSPILLS 0xa8c447f0u /* ldp x16, x17, [sp], #SPILL */
#define NUMBER 8u           /* the register of a call's number */
#define ARGUMENTS 0x3fu     /* registers of its arguments */
#define LOOKED_AT 16        /* instructions before a call */
#define LEADING 4           /* number of these that may bring its number */
#define UNKNOWN -1
#define TRAMPOLINE_MAX 64
#define TRAMPOLINE_BACK 40u   /* offset in a trampoline of a call */
#ifndef HWCAP2_SME /* asm/hwcap.h, from Linux 5.19 on */
#define HWCAP2_SME (1 << 23)
#endif

const void *loader_known;
uint32_t loader_known_len;
uint8_t intercepted[CALLS_MAX];

/* ---- trampolines ---- */
struct writer {
	uint8_t *at;
};

static void put(struct writer *writer, uint32_t word)
{
	memcpy(writer->at, &word, sizeof(word));
	writer->at += sizeof(word);
}

static uint32_t branch(const uint8_t *from, const uint8_t *to)
{
	return 0x14000000u | ((uint32_t)((to - from) / 4) & 0x3ffffff);
}

static void put_address(struct writer *writer, const void *address)
{
	memcpy(writer->at, &address, sizeof(address));
	writer->at += sizeof(address);
}

/*
 * Registers are saved some bytes below the program's stack pointer. The program may have a word (Go: its frame pointer) or a
 * few (Go's clone) right below it. The first store moves the stack pointer, so a signal's frame comes below them.
 */
static void put_call(struct writer *writer, const uint8_t *site)
{
	put(writer, SPILLS);
	put(writer, 0x10000131);                /* adr x17, 40: where it comes back to */
	put(writer, 0xf9000bf1);                /* str x17, [sp, #SPILL_BACK] */
	put(writer, 0x58000070);                /* ldr x16, 24 */
	put(writer, 0xd61f0200);                /* br x16 */
	put(writer, 0);
	put_address(writer, getauxval(AT_HWCAP2) & HWCAP2_SME ? loader_entry_sme : loader_entry);
	put_address(writer, site);              /* SITE() */
	put(writer, UNSPILLS);
	put(writer, branch(writer->at, site + 4));
	put(writer, UNSPILLS);                  /* PLAIN */
	put(writer, SVC);
	put(writer, branch(writer->at, site + 4));
}

/* exit(2), of a thread that may have no stack any more (musl's __unmapself) and needs no registers. */
static void put_exit(struct writer *writer)
{
	put(writer, 0x58000050);                /* ldr x16, 8 */
	put(writer, 0xd61f0200);                /* br x16 */
	put_address(writer, loader_entry_exit);
}

static void put_pointer(struct writer *writer, const uint8_t *site, uint32_t word)
{
	const uint32_t offset = (uint32_t)((uint64_t)&loader_block - thread_pointer()) / 8, field = BLOCK_PROGRAM_TP / 8;
	const uint32_t to = word & REGISTER, with = to == 16 ? 17 : 16;

	if ((word & ~REGISTER) == MRS_TPIDR) {
		put(writer, MRS_TPIDR | to);
		put(writer, 0xf9400000 | offset << 10 | to << 5 | to); /* ldr xN, [xN, #offset] */
		put(writer, 0xf9400000 | field << 10 | to << 5 | to);
	} else {
		put(writer, SPILLS);
		put(writer, MRS_TPIDR | with);
		put(writer, 0xf9400000 | offset << 10 | with << 5 | with);
		put(writer, 0xf9000000 | field << 10 | with << 5 | to); /* str */
		put(writer, UNSPILLS);
	}
	put(writer, branch(writer->at, site + 4));
}

static bool replace(uint8_t *site, uint32_t word, long number)
{
	uint8_t *room = pool_room(site, TRAMPOLINE_MAX);
	struct writer writer = {room}, here = {site};

	if (!room)
		return false;
	if (word == SVC && number == SYS_exit)
		put_exit(&writer);
	else if (word == SVC)
		put_call(&writer, site);
	else
		put_pointer(&writer, site, word);
	pool_take(&(struct made){site, room, word == SVC ? room : NULL, NULL}, writer.at);
	put(&here, branch(site, room));
	return true;
}

static uint32_t word_at(const uint8_t *at)
{
	uint32_t word;

	memcpy(&word, at, sizeof(word));
	return word;
}

enum place trampoline_place(uint64_t at, uint64_t *site)
{
	const struct made *made = pool_find(at);

	if (!made)
		return PLACE_NONE;
	*site = (uint64_t)made->site;
	const uint64_t within = at - (uint64_t)made->begin;
	const uint32_t word = word_at((const uint8_t *)at);
	const bool spills = word_at(made->begin) == SPILLS;
	const bool spilled = spills && within && (within <= 16 || word == UNSPILLS);
	const bool behind =
		made->plain && (within == TRAMPOLINE_BACK || within == TRAMPOLINE_BACK + 4 || within == TRAMPOLINE_BACK + 16);
	return (behind ? PLACE_BEHIND : PLACE_BEFORE) | (spilled ? PLACE_SPILLED : 0);
}

/* ---- what is a call, and what is data ---- */
struct sweep {
	const struct code *code;
	uint8_t *loaded; /* a bit for each word: an instruction loads it */
};

static bool is_loaded(const struct sweep *sweep, const uint8_t *at)
{
	const size_t i = (size_t)(at - sweep->code->begin) / 4;

	return sweep->loaded[i / 8] >> i % 8 & 1;
}

/* Load register (literal), and its vector forms: of 4 to 16 bytes (Arm ARM, C4.1, "Loads and stores"). */
static void note_loaded(struct sweep *sweep, const uint8_t *at, uint32_t word)
{
	if ((word & 0x3b000000) != 0x18000000)
		return;
	const int64_t by = (int64_t)((int32_t)(word << 8) >> 13) * 4;
	const uint32_t words = word & 0x04000000 ? 1u << (word >> 30) : word >> 30 == 1 ? 2 : 1;
	for (uint32_t i = 0; i < words; i++) {
		const uint8_t *to = at + by + 4 * i;
		if (to >= sweep->code->begin && to < sweep->code->end)
			sweep->loaded[(to - sweep->code->begin) / 32] |= (uint8_t)(1u << (to - sweep->code->begin) / 4 % 8);
	}
}

/* The general registers that an instruction writes, as far as they matter here. */
static uint32_t writes(uint32_t word)
{
	const uint32_t one = 1u << (word & REGISTER);

	if ((word >> 26 & 7) == 4 || (word >> 25 & 7) == 5) /* data processing: immediate, register */
		return one;
	if ((word >> 25 & 5) != 4 || word >> 26 & 1) /* loads and stores, but those of vectors */
		return 0;
	if ((word & 0x3b000000) == 0x18000000) /* literal */
		return one;
	if (!(word >> 22 & 3))
		return 0;
	return (word >> 27 & 7) == 5 && !(word >> 28 & 1) ? 0
	       : (word & 0x3a000000) == 0x28000000        ? one | 1u << (word >> 10 & 31)
	                                                  : one;
}

/* True if an instruction has x0 as its first operand: one that looks at the result. */
static bool reads_result(uint32_t word)
{
	const bool computes = (word >> 26 & 7) == 4 || (word >> 25 & 7) == 5;

	return (computes && (word >> 5 & REGISTER) == 0) || (word & 0x7e00001f) == 0x34000000 ||
	       (word & 0x7e00001f) == 0x36000000;
}

/*
 * True if the code behind an instruction is not reached from it: b, br, ret. The b that we put in place of a call does not
 * count.
 */
static bool ends_flow(const uint8_t *at, uint32_t word)
{
	const int64_t by = (int64_t)((int32_t)(word << 6) >> 6) * 4;

	if ((word & 0xfc000000) == 0x14000000)
		return !pool_find((uint64_t)(at + by));
	return (word & 0xfffffc1f) == 0xd61f0000 || (word & 0xfffffc1f) == 0xd65f0000;
}

static bool is_call(const struct sweep *sweep, const uint8_t *at)
{
	uint32_t brought = 0;

	for (int i = 1; i <= LOOKED_AT && at - 4 * i >= sweep->code->begin; i++) {
		const uint32_t word = word_at(at - 4 * i);
		if (!(word >> 25 & 15)) /* no instruction (Arm ARM, C4.1: reserved) */
			break;
		if (ends_flow(at - 4 * i, word) && i == 1)
			return false; /* a table behind a function looks so */
		if (ends_flow(at - 4 * i, word))
			break;
		brought |= writes(word);
		if (brought >> NUMBER & 1)
			return true;
	}
	return __builtin_popcount(brought & ARGUMENTS) >= 2 ||
	       (at + 8 <= sweep->code->end && reads_result(word_at(at + 4)));
}

/* The number of a call, if that is brought right before it. */
static long number_at(const struct sweep *sweep, const uint8_t *at)
{
	for (int i = 1; i <= LEADING && at - 4 * i >= sweep->code->begin; i++) {
		const uint32_t word = word_at(at - 4 * i);
		if ((word & 0x7fe0001f) == (0x52800000 | NUMBER)) /* movz */
			return word >> 5 & 0xffff;
		if ((word >> 26 & 7) == 5 || writes(word) >> NUMBER & 1) /* a branch, or svc */
			break;
	}
	return UNKNOWN;
}

/* ---- a sweep over the code ---- */
static void leave(struct sites *sites, const uint8_t *at)
{
	if (sites->left_len++ < LEFT_MAX)
		sites->left[sites->left_len - 1] = at;
}

static void look(const struct sweep *sweep, uint8_t *at, struct sites *sites)
{
	const uint32_t word = word_at(at);
	const bool calls = (word & ~IMMEDIATE) == SVC;

	if ((!calls && (word & ~REGISTER) != MRS_TPIDR && (word & ~REGISTER) != MSR_TPIDR) || is_loaded(sweep, at))
		return;
	if (calls && word != SVC && !is_call(sweep, at))
		return; /* one word of 2^16 looks so, and nobody has a reason to write it */
	const long number = number_at(sweep, at);
	sites->found++;
	if (word == SVC && number == SYS_rt_sigreturn)
		sites->idle++; /* a signal's frame is known by this code */
	else if ((calls && (word != SVC || !is_call(sweep, at))) || !replace(at, word, number))
		leave(sites, at);
	else
		sites->patched++;
}

void sites_patch(const struct code *code, struct sites *sites)
{
	const struct code words = {(uint8_t *)(((uintptr_t)code->begin + 3) & ~3ul),
	                           (uint8_t *)((uintptr_t)code->end & ~3ul), false};
	struct sweep sweep = {.code = &words};

	if (words.begin >= words.end)
		return;
	loader_known = shim->known;
	loader_known_len = shim->known_len;
	sweep.loaded = memory_there(calloc((size_t)(words.end - words.begin) / 32 + 1, 1));
	for (const uint8_t *at = words.begin; at < words.end; at += 4)
		note_loaded(&sweep, at, word_at(at));
	for (uint8_t *at = words.begin; at < words.end; at += 4)
		look(&sweep, at, sites);
	free(sweep.loaded);
}

bool calls_in(const uint8_t *at, uint64_t length)
{
	for (uint64_t i = 0; i + 4 <= length; i += 4)
		if (word_at(at + i) == SVC)
			return true;
	return false;
}
