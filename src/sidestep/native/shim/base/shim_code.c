/*
 * shim_code.c - whether a program makes system calls by its own code, which no hook of the C library sees.
 *
 * The bytes of a call occur in other instructions as well. So the code before them is decoded, from several places: wherever one
 * begins, it comes to the true instructions after a few. If any comes to the bytes as an instruction, they are taken for one.
 *
 * A program that makes an epoll set so, as Rust's rustix does, waits where no ring wakes it. The kernel lists all sets.
 */
#include "shim_proc.h"

#include <elf.h>
#include <fcntl.h>

#include "loader_decode_x86_64.h"

#define CODE_MAX (64ull << 20) /* larger code is not read: it counts as if it made calls */
#define SEGMENTS_MAX 64
#define BEFORE_MAX 96 /* bytes before a call from which it is decoded */
#define BEFORE_MIN 64
#define PART 16384

#if defined(__x86_64__)
static bool is_call(const uint8_t *begin, const uint8_t *at, const uint8_t *end)
{
	struct instruction is;

	for (size_t before = BEFORE_MIN; before < BEFORE_MAX; before++) {
		const uint8_t *from = before < (size_t)(at - begin) ? at - before : begin;
		while (from < at && (!decode(from, end, &is) || from + is.opcode != at))
			from += is.length ? is.length : 1;
		if (from <= at)
			return true;
	}
	return false;
}

/* Calls that begin at `from` or behind it. */
static bool calls(const uint8_t *code, size_t len, size_t from)
{
	for (size_t at = from; at + 1 < len; at++)
		if (code[at] == 0x0f && code[at + 1] == 0x05 && is_call(code, code + at, code + len))
			return true;
	return false;
}
#else
static bool calls(const uint8_t *code, size_t len, size_t from)
{
	static const uint8_t svc[] = {0x01, 0x00, 0x00, 0xd4};

	for (size_t at = from & ~(size_t)3; at + sizeof(svc) <= len; at += sizeof(svc))
		if (memcmp(code + at, svc, sizeof(svc)) == 0)
			return true;
	return false;
}
#endif

static bool read_at(int fd, void *to, size_t len, uint64_t at)
{
	return real.pread64(fd, to, len, (off_t)at) == (ssize_t)len;
}

static bool segment_calls(int fd, const Elf64_Phdr *segment)
{
	uint8_t code[BEFORE_MAX + PART];
	size_t kept = 0;

	for (uint64_t at = 0; at < segment->p_filesz; at += PART) {
		size_t len = segment->p_filesz - at < PART ? segment->p_filesz - at : PART;
		if (!read_at(fd, code + kept, len, segment->p_offset + at) || calls(code, kept + len, kept ? kept - 1 : 0))
			return true;
		size_t next = kept + len < BEFORE_MAX ? kept + len : BEFORE_MAX;
		memmove(code, code + kept + len - next, next);
		kept = next;
	}
	return false;
}

bool program_calls(const char *file)
{
	Elf64_Ehdr header;
	Elf64_Phdr segment;
	uint64_t all = 0;
	int fd = proc_open(file, O_RDONLY);
	bool found = fd < 0 || !read_at(fd, &header, sizeof(header), 0) || header.e_phnum > SEGMENTS_MAX;

	for (int i = 0; !found && i < header.e_phnum; i++) {
		if (!read_at(fd, &segment, sizeof(segment), header.e_phoff + (uint64_t)i * sizeof(segment)))
			found = true;
		else if (segment.p_type == PT_LOAD && (segment.p_flags & PF_X))
			found = (all += segment.p_filesz) > CODE_MAX || segment_calls(fd, &segment);
	}
	if (fd >= 0)
		raw_close(fd);
	return found;
}

#define LOOKS_MAX 16 /* failed looks, after which only each 2^n-th is one: there may be thousands */

struct set_search {
	int fd;
	bool found;
};

/* proc(5), fdinfo: a line for each member of a set begins with its number. */
static bool set_lists(long set, int fd)
{
	static const char word[] = "tfd:";
	char path[48], part[512];
	ssize_t n;
	size_t at = 0; /* index in the word; the number is read behind it */
	long number = -1;
	bool found = false;

	snprintf(path, sizeof(path), "/proc/self/fdinfo/%ld", set);
	int info = proc_open(path, O_RDONLY);
	while (info >= 0 && !found && (n = real.read(info, part, sizeof(part))) > 0)
		for (ssize_t i = 0; i < n && !found; i++) {
			bool digit = part[i] >= '0' && part[i] <= '9';
			if (at < sizeof(word) - 1)
				at = part[i] == word[at] ? at + 1 : 0;
			else if (digit)
				number = (number < 0 ? 0 : number * 10) + (part[i] - '0');
			if (number < 0 || digit)
				continue;
			found = number == fd;
			number = -1;
			at = 0;
		}
	if (info >= 0)
		raw_close(info);
	return found;
}

static bool set_seen(int dir, long number, void *argument)
{
	static const char set[] = "anon_inode:[eventpoll]";
	struct set_search *search = argument;
	char name[16], target[64];

	if (file_get((int)number)) /* a connection, a set that was made by a call of ours, or a descriptor of ours */
		return true;
	snprintf(name, sizeof(name), "%ld", number);
	ssize_t n = real.syscall(SYS_readlinkat, dir, (long)name, (long)target, sizeof(target), 0, 0);
	search->found =
		n == (ssize_t)sizeof(set) - 1 && memcmp(target, set, (size_t)n) == 0 && set_lists(number, search->fd);
	return !search->found;
}

bool unseen_set_has(int fd)
{
	static _Atomic uint32_t looks;
	static _Atomic bool found_one;
	const uint32_t before = atomic_fetch_add(&looks, 1);
	struct set_search search = {.fd = fd};
	KEEP_ERRNO;

	if (before >= LOOKS_MAX && (before & (before - 1)) && !word_load(found_one))
		return false;
	int numbers = proc_open("/proc/self/fd", O_RDONLY | O_DIRECTORY);
	if (numbers < 0)
		return false;
	proc_numbers(numbers, set_seen, &search);
	raw_close(numbers);
	if (search.found)
		word_store(found_one, true);
	return search.found;
}
