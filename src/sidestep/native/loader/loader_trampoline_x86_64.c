/*
 * loader_trampoline_x86_64.c - replacements of calls: code that comes to loader_entry, or makes the call itself if its
 * number, or its descriptor, is none of ours.
 */
#include "loader.h"

#include <string.h>

#define TRAMPOLINE_MAX 192

const char *loader_entry, *loader_inside;

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
	if (to - writer->at >= REACH || writer->at - to >= REACH ||
	    (*opcode >= 0xe0 && *opcode <= 0xe3)) /* loop, jrcxz: short only */
		return false;
	if (*opcode ==
	    0xe8) { /* the return address of this call is here, which an unwinder does not know: as with all code that runs here */
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
	const uint8_t *intercepted_at = intercepted;
	uint8_t *large = NULL, *unwanted = NULL, *always = NULL;

	if (unknown) {
		put(writer, "\x3d", 1); /* cmp $CALLS_MAX, %eax */
		put32(writer, CALLS_MAX);
		large = put_branch(writer, JAE);
		put(writer, "\x49\xbb", 2); /* movabs $intercepted, %r11 */
		put(writer, &intercepted_at, sizeof(intercepted_at));
		put(writer, (uint8_t[]){0x41, 0x80, 0x3c, 0x03, INTERCEPTED_IF_KNOWN},
		    5); /* cmpb $INTERCEPTED_IF_KNOWN, (%r11,%rax) */
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
	uint8_t *room = pool_room(site, TRAMPOLINE_MAX), *lea, *plain = NULL;

	if (!room)
		return NULL;
	struct writer writer = {room};
	if (!put_moved_all(&writer, begin, site))
		return NULL;
	if (set) {
		put(&writer, "\xb8", 1);
		put32(&writer, number);
	}
	if (number == UNKNOWN || intercepted[number] == INTERCEPTED_IF_KNOWN) {
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
	pool_take(&(struct made){site, room, plain, behind}, writer.at);
	return room;
}
