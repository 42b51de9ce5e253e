/*
 * loader_sites_x86_64.c - replaces the system calls of a piece of code by jumps, before any of it runs.
 *
 * A call is two bytes, a jump takes five, so there are four ways, tried in this order:
 *
 *   1. `mov $number, %eax; syscall`: the mov becomes the jump. The call stays as it is, for code that jumps at it.
 *   2. The call becomes a short jump to padding nearby, which holds the long one.
 *   3. The jump covers instructions before the call as well: they are done in the trampoline first. A jump between them would
 *      fail, but code has no reason for one: they bring the arguments.
 *   4. The jump covers instructions behind the call. The first of them must look at the result, as it might else begin a
 *      branch of a jump table, which we do not see.
 *
 * A call whose number is known and of no interest is left alone, and costs nothing. Where the number is known only when it
 * runs, the trampoline looks it up in `intercepted`. What moves bytes of a descriptor that the shim does not know goes to the
 * kernel from there.
 */
#include "loader.h"

#include <stdlib.h>
#include <string.h>

#define DOUBT 8        /* instructions behind bytes that are none */
#define BEFORE_MAX 16  /* instructions before a call that are looked at */
#define JUMP_LENGTH 5
#define MOVED_MAX 32

uint8_t intercepted[CALLS_MAX];

/* ---- a sweep over the code ---- */
struct site {
	uint8_t *at;
	uint8_t *before[BEFORE_MAX]; /* instructions that lead to it, the nearest first */
	uint32_t before_len;
	bool doubted; /* shortly behind what is no code */
	long number;  /* or UNKNOWN */
	uint8_t *loads; /* the instruction that brings the number, if that stands right before the call */
};

struct hole {
	uint8_t *at;
	uint32_t length;
};

struct sweep {
	const struct code *code;
	uint8_t *targets; /* a bit for each byte: a jump goes there */
	struct site *sites;
	struct hole *holes;
	const uint8_t *written; /* end of the code that has been replaced */
	uint32_t sites_len, holes_len, sites_room, holes_room;
};

static bool is_target(const struct sweep *sweep, const uint8_t *at)
{
	size_t i = (size_t)(at - sweep->code->begin);

	return sweep->targets[i / 8] >> i % 8 & 1;
}

static void target(struct sweep *sweep, const uint8_t *at)
{
	if (at >= sweep->code->begin && at < sweep->code->end) {
		size_t i = (size_t)(at - sweep->code->begin);
		sweep->targets[i / 8] |= (uint8_t)(1u << i % 8);
	}
}

static bool is_padding(const uint8_t *at, const struct instruction *is)
{
	const uint8_t *opcode = at + is->opcode;

	return *opcode == 0x90 || *opcode == 0xcc || (*opcode == 0x0f && opcode[1] == 0x1f);
}

static void *grown(void *array, uint32_t length, uint32_t *room, size_t size)
{
	if (length < *room)
		return array;
	*room = *room ? 2 * *room : 64;
	return memory_there(realloc(array, *room * size));
}

static void note_site(struct sweep *sweep, uint8_t *at, uint8_t *const *recent, uint32_t recent_len, bool doubted)
{
	sweep->sites = grown(sweep->sites, sweep->sites_len, &sweep->sites_room, sizeof(*sweep->sites));
	struct site *site = &sweep->sites[sweep->sites_len++];
	*site = (struct site){.at = at, .number = UNKNOWN, .doubted = doubted};
	for (; site->before_len < recent_len && site->before_len < BEFORE_MAX; site->before_len++)
		site->before[site->before_len] = recent[(recent_len - 1 - site->before_len) % BEFORE_MAX];
}

static void note_padding(struct sweep *sweep, uint8_t *at, uint32_t length, bool goes_on)
{
	if (goes_on) {
		sweep->holes[sweep->holes_len - 1].length += length;
		return;
	}
	sweep->holes = grown(sweep->holes, sweep->holes_len, &sweep->holes_room, sizeof(*sweep->holes));
	sweep->holes[sweep->holes_len++] = (struct hole){at, length};
}

/* ---- %gs ---- */
#define NEAR 64
/* True if the number of arch_prctl(2) is loaded near an instruction, for the kernel or for syscall(3). */
static bool near_arch_prctl(const struct sweep *sweep, const uint8_t *at)
{
	const uint8_t *begin = at - sweep->code->begin > NEAR ? at - NEAR : sweep->code->begin,
				  *end = sweep->code->end - at > NEAR ? at + NEAR : sweep->code->end;

	return memmem(begin, (size_t)(end - begin), "\xb8\x9e\0\0\0", 5) ||
	       memmem(begin, (size_t)(end - begin), "\xbf\x9e\0\0\0", 5);
}

/*
 * True if an instruction sets the base of %gs, or loads ARCH_SET_GS as arch_prctl(2) is to get it. Its use need not be looked
 * for, as data between code may look like one.
 */
static bool takes_gs(const struct sweep *sweep, const uint8_t *at, const struct instruction *is)
{
	static const uint8_t set_gs[] = {0x01, 0x10, 0, 0};
	const uint8_t *opcode = at + is->opcode;

	if (*opcode == 0x0f && opcode[1] == 0xae && at[is->modrm] >> 3 == (0xc0 >> 3 | 3))
		return memchr(at, 0xf3, is->opcode); /* wrgsbase */
	return (*opcode == 0xbe || *opcode == 0xbf) && !is->opcode && memcmp(at + 1, set_gs, sizeof(set_gs)) == 0 &&
	       near_arch_prctl(sweep, at);
}

static void sweep_code(struct sweep *sweep, struct sites *sites)
{
	uint8_t *recent[BEFORE_MAX];
	uint32_t recent_len = 0, decoded = DOUBT;
	bool ended = false, padding = false; /* state behind an instruction without a successor; in padding behind that */
	struct instruction is;

	for (uint8_t *at = sweep->code->begin; at < sweep->code->end; at += is.length) {
		const uint8_t *to;
		if (!decode(at, sweep->code->end, &is)) {
			is.length = 1;
			recent_len = decoded = 0;
			ended = padding = false;
			continue;
		}
		if (++decoded > DOUBT)
			sites->takes_block |= takes_gs(sweep, at, &is);
		bool is_syscall = at[is.opcode] == 0x0f && at[is.opcode + 1] == 0x05;
		if (is_syscall || (at[is.opcode] == 0xcd && at[is.opcode + 1] == 0x80))
			note_site(sweep, at, recent, recent_len, !is_syscall || decoded < DOUBT);
		if (ended && is_padding(at, &is)) {
			note_padding(sweep, at, is.length, padding);
			padding = true;
			continue;
		}
		padding = false;
		enum flow flow = flow_of(at, &is, &to);
		if (to)
			target(sweep, to);
		ended = flow == FLOW_END;
		if (flow == FLOW_ON && !is_syscall)
			recent[recent_len++ % BEFORE_MAX] = at;
		else
			recent_len = 0;
	}
}

/* ---- the number of a call ---- */

/* True if an instruction leaves eax alone: those that bring arguments. */
static bool spares_eax(const uint8_t *at, const struct instruction *is)
{
	uint8_t rex = is->opcode && (at[is->opcode - 1] & 0xf0) == 0x40 ? at[is->opcode - 1] : 0, opcode = at[is->opcode];

	if (opcode >= 0xb9 && opcode <= 0xbf)
		return true;
	if (opcode == 0xb8)
		return rex & 1;
	if (!is->modrm)
		return false;
	uint8_t modrm = at[is->modrm];
	bool rm_is_eax = modrm >> 6 == 3 && (modrm & 7) == 0 && !(rex & 1),
		 reg_is_eax = (modrm >> 3 & 7) == 0 && !(rex & 4);
	switch (opcode) {
	case 0x89:
	case 0x31:
	case 0xc7:
	case 0x83:
	case 0x01: return !rm_is_eax;
	case 0x8b:
	case 0x8d:
	case 0x63:
	case 0x33: return !reg_is_eax;
	case 0x85:
	case 0x39:
	case 0x3b: return true; /* test, cmp */
	}
	return false;
}

/* The number that an instruction brings, or UNKNOWN. */
static long loaded(const uint8_t *at, const struct instruction *is)
{
	int32_t value;

	if (is->length == 5 && at[0] == 0xb8)
		memcpy(&value, at + 1, sizeof(value));
	else if (is->length == 7 && memcmp(at, "\x48\xc7\xc0", 3) == 0)
		memcpy(&value, at + 3, sizeof(value));
	else if (is->length == 2 && (at[0] == 0x31 || at[0] == 0x33) && at[1] == 0xc0)
		value = 0;
	else
		return UNKNOWN;
	return value >= 0 && value < CALLS_MAX ? value : UNKNOWN;
}

/* True if an instruction brings eax some value or other. */
static bool loads_eax(const uint8_t *at, const struct instruction *is)
{
	uint8_t rex = is->opcode && (at[is->opcode - 1] & 0xf0) == 0x40 ? at[is->opcode - 1] : 0, opcode = at[is->opcode];

	if (opcode == 0xb8 || opcode == 0xb0 || opcode == 0x58)
		return !(rex & 1);
	if (!is->modrm)
		return false;
	uint8_t modrm = at[is->modrm];
	if (opcode == 0x89 || opcode == 0xc7)
		return modrm >> 6 == 3 && (modrm & 7) == 0 && !(rex & 1);
	return (opcode == 0x8b || opcode == 0x8d || opcode == 0x63 ||
	        (opcode == 0x0f && (at[is->opcode + 1] & 0xf6) == 0xb6)) &&
	       (modrm >> 3 & 7) == 0 && !(rex & 4);
}

static void find_number(const struct sweep *sweep, struct site *site)
{
	if (is_target(sweep, site->at))
		return;
	for (uint32_t i = 0; i < site->before_len; i++) {
		struct instruction is;
		decode(site->before[i], sweep->code->end, &is);
		site->number = loaded(site->before[i], &is);
		if (site->number != UNKNOWN && i == 0 && is.length >= JUMP_LENGTH)
			site->loads = site->before[i];
		if (site->number != UNKNOWN || !spares_eax(site->before[i], &is) || is_target(sweep, site->before[i]))
			return;
	}
}

static bool looks_at_result(const uint8_t *at, const struct instruction *is)
{
	uint8_t rex = is->opcode && (at[is->opcode - 1] & 0xf0) == 0x40 ? at[is->opcode - 1] : 0, opcode = at[is->opcode];

	if (opcode == 0x3d || opcode == 0xa9 || opcode == 0x98) /* cmp, test, cltq */
		return true;
	if (!is->modrm)
		return false;
	uint8_t modrm = at[is->modrm];
	bool rm = modrm >> 6 == 3 && (modrm & 7) == 0 && !(rex & 1), reg = (modrm >> 3 & 7) == 0 && !(rex & 4);
	switch (opcode) {
	case 0x89:
	case 0x39: return reg;
	case 0x8b:
	case 0x83:
	case 0x81:
	case 0x3b:
	case 0x63: return rm;
	case 0x85: return reg || rm;
	}
	return false;
}

/* ---- the four ways ---- */
static bool by_number(struct sweep *sweep, struct site *site)
{
	uint8_t *made = site->loads ? trampoline(site->at, site->number, site->at, site->at + SYSCALL_LENGTH, true) : NULL;

	if (!made)
		return false;
	jump_write(site->loads, made);
	sweep->written = site->at;
	return true;
}

static bool by_hole(struct sweep *sweep, struct site *site)
{
	uint8_t *next = site->at + SYSCALL_LENGTH;

	for (uint32_t i = 0; i < sweep->holes_len; i++) {
		struct hole *hole = &sweep->holes[i];
		if (hole->length < JUMP_LENGTH || hole->at - next > INT8_MAX || hole->at - next < INT8_MIN)
			continue;
		bool entered = false;
		for (uint32_t at = 0; at < JUMP_LENGTH; at++)
			entered |= is_target(sweep, hole->at + at);
		uint8_t *made = entered ? NULL : trampoline(site->at, site->number, site->at, next, false);
		if (!made)
			continue;
		jump_write(hole->at, made);
		site->at[0] = 0xeb;
		site->at[1] = (uint8_t)(hole->at - next);
		hole->at += JUMP_LENGTH;
		hole->length -= JUMP_LENGTH;
		sweep->written = next;
		return true;
	}
	return false;
}

static void replace(struct sweep *sweep, uint8_t *at, const uint8_t *end, const uint8_t *made)
{
	jump_write(at, made);
	sweep->written = end;
	at += JUMP_LENGTH;
	while (at < end)
		*at++ = 0xcc; /* no code jumps here; a thread that does had better stop */
}

static bool from_before(struct sweep *sweep, struct site *site)
{
	uint8_t *end = site->at + SYSCALL_LENGTH;

	for (uint32_t i = 0; i < site->before_len; i++) {
		uint8_t *begin = site->before[i];
		if (is_target(sweep, i ? site->before[i - 1] : site->at))
			return false;
		if (end - begin > MOVED_MAX)
			return false;
		if (end - begin < JUMP_LENGTH)
			continue;
		uint8_t *made = trampoline(site->at, site->number, begin, end, false);
		if (!made)
			return false;
		replace(sweep, begin, end, made);
		return true;
	}
	return false;
}

static bool from_behind(struct sweep *sweep, struct site *site)
{
	uint8_t *begin = site->at, *end = begin + SYSCALL_LENGTH;
	struct instruction is;

	if (begin < sweep->written || !decode(end, sweep->code->end, &is) || !looks_at_result(end, &is))
		return false;
	for (; end < begin + JUMP_LENGTH; end += is.length)
		if (!decode(end, sweep->code->end, &is) || is_target(sweep, end))
			return false;
	uint8_t *made = trampoline(site->at, site->number, begin, end, false);
	if (!made)
		return false;
	replace(sweep, begin, end, made);
	return true;
}

/* True if an instruction brings an argument: from a register or memory to rdi, rsi, rdx, r10, r8 or r9. */
static bool loads_argument(const uint8_t *at, const struct instruction *is)
{
	uint8_t rex = is->opcode && (at[is->opcode - 1] & 0xf0) == 0x40 ? at[is->opcode - 1] : 0, opcode = at[is->opcode];
	const uint32_t arguments = 1u << 2 | 1u << 6 | 1u << 7 | 1u << 8 | 1u << 9 | 1u << 10;

	if (!is->modrm || (opcode != 0x89 && opcode != 0x8b && opcode != 0x8d))
		return false;
	uint8_t modrm = at[is->modrm];
	if (opcode == 0x89 && modrm >> 6 != 3)
		return false;
	unsigned to = opcode == 0x89 ? (modrm & 7u) + (rex & 1u) * 8 : (modrm >> 3 & 7u) + (rex >> 2 & 1u) * 8;
	return arguments >> to & 1;
}

/*
 * Data between code may look like a call, and must not be written to. A call has a number, which is loaded nearby or comes
 * from the caller, as the arguments do.
 */
static bool is_call(const struct sweep *sweep, const struct site *site)
{
	struct instruction is;
	uint32_t arguments = 0;

	for (uint32_t i = 0; i < site->before_len; i++) {
		if (!decode(site->before[i], sweep->code->end, &is))
			return false;
		if (loads_eax(site->before[i], &is))
			return true;
		arguments += loads_argument(site->before[i], &is);
	}
	const uint8_t *next = site->at + SYSCALL_LENGTH;
	return site->number != UNKNOWN || arguments >= 2 ||
	       (decode(next, sweep->code->end, &is) && looks_at_result(next, &is));
}

static void leave(struct sites *sites, const uint8_t *at)
{
	if (sites->left_len++ < LEFT_MAX)
		sites->left[sites->left_len - 1] = at;
}

static void site_patch(struct sweep *sweep, struct site *site, struct sites *sites)
{
	while (site->before_len && site->before[site->before_len - 1] < sweep->written)
		site->before_len--;
	find_number(sweep, site);
	sites->found++;
	if (site->number != UNKNOWN && !intercepted[site->number])
		sites->idle++;
	else if (site->doubted || !is_call(sweep, site))
		leave(sites, site->at);
	else if (by_number(sweep, site) || by_hole(sweep, site) || from_before(sweep, site) || from_behind(sweep, site))
		sites->patched++;
	else
		leave(sites, site->at);
}

static void code_patch(const struct code *code, struct sites *sites)
{
	struct sweep sweep = {.code = code, .targets = memory_there(calloc((size_t)(code->end - code->begin) / 8 + 1, 1))};

	sweep_code(&sweep, sites);
	for (uint32_t i = 0; i < sweep.sites_len; i++)
		site_patch(&sweep, &sweep.sites[i], sites);
	free(sweep.targets);
	free(sweep.sites);
	free(sweep.holes);
}

static bool is_boundary(const uint8_t *at)
{
	static const uint8_t padding[] = {0xcc, 0xcc, 0xcc, 0xcc};

	return !((uintptr_t)at & 15) && memcmp(at - sizeof(padding), padding, sizeof(padding)) == 0;
}

/* The bytes of a call at or behind `at`, which may be others'; or the end. */
static uint8_t *call_bytes(uint8_t *at, const uint8_t *end)
{
	for (; at + SYSCALL_LENGTH <= end && (at = memchr(at, 0x0f, (size_t)(end - 1 - at))); at++)
		if (at[1] == 0x05)
			return at;
	return NULL;
}

/*
 * The padding before functions shows where they begin, and no function jumps into another. So most of the code need not be
 * looked at.
 */
static void functions_patch(const struct code *code, struct sites *sites)
{
	struct code part = {.end = code->begin};

	for (uint8_t *at = code->begin; (at = call_bytes(at, code->end)); at = part.end) {
		part.begin = (uint8_t *)((uintptr_t)at & ~(uintptr_t)15);
		while (part.begin > part.end + 16 && !is_boundary(part.begin))
			part.begin -= 16;
		if (part.begin <= part.end + 16)
			part.begin = part.end;
		part.end = (uint8_t *)((uintptr_t)(at + 16) & ~(uintptr_t)15);
		while (part.end < code->end && !is_boundary(part.end))
			part.end += 16;
		if (part.end > code->end)
			part.end = code->end;
		code_patch(&part, sites);
	}
}

void sites_patch(const struct code *code, struct sites *sites)
{
	if (code->padded)
		functions_patch(code, sites);
	else
		code_patch(code, sites);
}

bool calls_in(const uint8_t *at, uint64_t length)
{
	return memmem(at, length, "\x0f\x05", SYSCALL_LENGTH) || memmem(at, length, "\xcd\x80", SYSCALL_LENGTH);
}
