/*
 * loader_trampoline.c - what stands for a call that was replaced: code that comes to loader_entry, or makes the call itself where
 * its number, or its descriptor, is none of ours.
 */
#include "loader.h"

#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#define POOL_SIZE 65536ul
#define POOLS_MAX 64
#define TRAMPOLINE_MAX 192
#define REACH 0x7fff0000l /* of a jump with 32 bits, and some less */

const char *loader_entry, *loader_inside;

/* ---- room for trampolines, near the code; at its end is told what they stand for, from the last one on ---- */
struct made {
	const uint8_t *site;
	const uint8_t *begin, *plain, *behind; /* the trampoline; in it what follows the call: one that is none of ours, and any */
};

static struct pool {
	uint8_t *begin, *free;
	struct made *made;
} pools[POOLS_MAX];
static size_t pools_len, pools_done;

static bool pool_has_room(const struct pool *pool)
{
	return pool->free + TRAMPOLINE_MAX <= (const uint8_t *)(pool->made - 1);
}

static bool near_to(const uint8_t *a, const uint8_t *b)
{
	return a - b < REACH && b - a < REACH;
}

static struct pool *pool_at(uintptr_t hint)
{
	void *at = (void *)raw(SYS_mmap, (long)hint, POOL_SIZE, PROT_READ | PROT_WRITE,
	                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);

	if ((uintptr_t)at > -4096ul)
		return NULL;
	if (at != (void *)hint) { /* a kernel that does not know the flag */
		raw(SYS_munmap, (long)at, POOL_SIZE, 0, 0, 0, 0);
		return NULL;
	}
	pools[pools_len] = (struct pool){at, at, (struct made *)((uint8_t *)at + POOL_SIZE)};
	return &pools[pools_len++];
}

static struct pool *pool_near(const uint8_t *site)
{
	for (size_t i = pools_done; i < pools_len; i++)
		if (near_to(pools[i].begin, site) && pool_has_room(&pools[i]))
			return &pools[i];
	if (pools_len == POOLS_MAX)
		return NULL;
	/* not close by: a program's heap grows there */
	for (long distance = 16l << 20; distance < REACH - (16l << 20); distance += 8l << 20)
		for (int sign = 1; sign >= -1; sign -= 2) {
			uintptr_t hint = ((uintptr_t)site + (uintptr_t)(sign * distance)) & ~(POOL_SIZE - 1);
			struct pool *pool = hint > POOL_SIZE && hint < 1ul << 47 ? pool_at(hint) : NULL;
			if (pool)
				return pool;
		}
	return NULL;
}

uint64_t trampoline_site(uint64_t at)
{
	const uint8_t *here = (const uint8_t *)at;

	for (size_t i = 0; i < pools_len; i++) {
		const struct pool *pool = &pools[i];
		if (here < pool->begin || here >= pool->free)
			continue;
		const struct made *made = pool->made;
		while (here < made->begin)
			made++;
		return (uint64_t)made->site + (here == made->plain || here >= made->behind ? SYSCALL_LENGTH : 0);
	}
	return 0;
}

bool trampolines_finish(void)
{
	for (; pools_done < pools_len; pools_done++)
		if (raw(SYS_mprotect, (long)pools[pools_done].begin, POOL_SIZE, PROT_READ | PROT_EXEC, 0, 0, 0))
			return false;
	return true;
}

/* ---- what is written there ---- */
struct writer {
	uint8_t *at;
};

static void put(struct writer *writer, const void *bytes, size_t length)
{
	memcpy(writer->at, bytes, length);
	writer->at += length;
}

static void put32(struct writer *writer, int64_t value)
{
	int32_t low = (int32_t)value;

	put(writer, &low, sizeof(low));
}

static void put_jump(struct writer *writer, const uint8_t *to)
{
	put(writer, "\xe9", 1);
	put32(writer, to - (writer->at + 4));
}

void jump_write(uint8_t *at, const uint8_t *to)
{
	struct writer writer = {.at = at};

	put_jump(&writer, to);
}

/* An instruction does the same at another place. False: it cannot. */
static bool put_moved(struct writer *writer, const uint8_t *from, const struct instruction *is)
{
	const uint8_t *to, *opcode = from + is->opcode;
	enum flow flow = flow_of(from, is, &to);

	if (flow != FLOW_ON && (!to || is->opcode))
		return false;
	if (flow == FLOW_ON) {
		uint8_t *at = writer->at;
		put(writer, from, is->length);
		if (is->relative) {
			int32_t by;
			memcpy(&by, at + is->modrm + 1, sizeof(by));
			int64_t moved = from + by - at;
			if (moved != (int32_t)moved)
				return false;
			by = (int32_t)moved;
			memcpy(at + is->modrm + 1, &by, sizeof(by));
		}
		return true;
	}
	if (!near_to(to, writer->at) || (*opcode >= 0xe0 && *opcode <= 0xe3)) /* loop, jrcxz: short only */
		return false;
	if (*opcode == 0xe8) { /* its return address is here, which an unwinder does not know: as it is with all that runs here */
		put(writer, "\xe8", 1);
	} else if (flow == FLOW_END) {
		put(writer, "\xe9", 1);
	} else {
		uint8_t condition = (uint8_t)(0x80 | ((*opcode == 0x0f ? opcode[1] : opcode[0]) & 0xf));
		put(writer, "\x0f", 1);
		put(writer, &condition, 1);
	}
	put32(writer, to - (writer->at + 4));
	return true;
}

static bool put_moved_all(struct writer *writer, const uint8_t *from, const uint8_t *end)
{
	struct instruction is;

	for (; from < end; from += is.length)
		if (!decode(from, end, &is) || !put_moved(writer, from, &is))
			return false;
	return true;
}

/* HOOKED_LENGTH bytes */
static void put_hooked(struct writer *writer, uint8_t *site, uint8_t **back)
{
	put(writer, "\x48\x8d\x0d", 3); /* lea back(%rip), %rcx */
	*back = writer->at;
	put32(writer, 0);
	put(writer, "\xff\x25\0\0\0\0", 6); /* jmp *entry */
	put(writer, &loader_entry, sizeof(loader_entry));
	put(writer, &site, sizeof(site)); /* SITE() */
}

/* A short jump if `condition`, to be given its end by lands(). */
static uint8_t *put_branch(struct writer *writer, uint8_t condition)
{
	put(writer, &condition, 1);
	return writer->at++;
}

static void lands(uint8_t *branch, const uint8_t *at)
{
	*branch = (uint8_t)(at - (branch + 1));
}

/*
 * The call itself, if it is none of ours: by its number, if that is `unknown`, and by its descriptor. Returns the branch over what
 * follows, to which a call of ours comes. r11 and rcx are free, as the kernel leaves them.
 */
static uint8_t *put_looks(struct writer *writer, bool unknown, uint8_t **plain)
{
	enum { JMP = 0xeb, JB = 0x72, JAE = 0x73, JNE = 0x75 };
	const uint8_t *wanted_at = wanted;
	uint8_t *large = NULL, *unwanted = NULL, *always = NULL;

	if (unknown) {
		put(writer, "\x3d", 1); /* cmp $CALLS_MAX, %eax */
		put32(writer, CALLS_MAX);
		large = put_branch(writer, JAE);
		put(writer, "\x49\xbb", 2); /* movabs $wanted, %r11 */
		put(writer, &wanted_at, sizeof(wanted_at));
		put(writer, (uint8_t[]){0x41, 0x80, 0x3c, 0x03, WANTED_OF_KNOWN}, 5); /* cmpb $WANTED_OF_KNOWN, (%r11,%rax) */
		unwanted = put_branch(writer, JB);
		always = put_branch(writer, JNE);
	}
	put(writer, "\x81\xff", 2); /* cmp $known_len, %edi */
	put32(writer, shim->known_len);
	uint8_t *beyond = put_branch(writer, JAE);
	put(writer, "\x89\xf9\x49\xbb", 4); /* mov %edi, %ecx; movabs $known, %r11 */
	put(writer, &shim->known, sizeof(shim->known));
	put(writer, "\x49\x83\x3c\xcb\x00", 5); /* cmpq $0, (%r11,%rcx,8) */
	uint8_t *known = put_branch(writer, JNE);
	if (unknown) {
		lands(large, writer->at);
		lands(unwanted, writer->at);
	}
	lands(beyond, writer->at);
	put(writer, "\x0f\x05", SYSCALL_LENGTH);
	*plain = writer->at;
	uint8_t *over = put_branch(writer, JMP);
	if (unknown)
		lands(always, writer->at);
	lands(known, writer->at);
	return over;
}

uint8_t *trampoline(uint8_t *site, long number, const uint8_t *begin, const uint8_t *end, bool set)
{
	struct pool *pool = pool_near(site);
	uint8_t *lea, *plain = NULL;

	if (!pool)
		return NULL;
	struct writer writer = {pool->free};
	if (!put_moved_all(&writer, begin, site))
		return NULL;
	if (set) {
		put(&writer, "\xb8", 1);
		put32(&writer, number);
	}
	if (number == UNKNOWN || wanted[number] == WANTED_OF_KNOWN) {
		uint8_t *over_hooked = put_looks(&writer, number == UNKNOWN, &plain);
		put_hooked(&writer, site, &lea);
		lands(over_hooked, writer.at);
	} else {
		put_hooked(&writer, site, &lea);
	}
	int32_t back = (int32_t)(writer.at - (lea + 4));
	memcpy(lea, &back, sizeof(back));
	const uint8_t *behind = writer.at;
	if (!put_moved_all(&writer, site + SYSCALL_LENGTH, end))
		return NULL;
	put_jump(&writer, end);
	pool->made[-1] = (struct made){site, pool->free, plain, behind};
	__atomic_store_n(&pool->made, pool->made - 1, __ATOMIC_RELEASE); /* handlers look at it */
	pool->free = writer.at + (-(uintptr_t)writer.at & 15);
	return (uint8_t *)pool->made->begin;
}
