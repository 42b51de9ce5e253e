/* files.c - what the simulated kernel tells of files, and of processes and their descriptors as proc(5) does. */
#include "kernel.h"

#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <linux/unix_diag.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define PROGRAM "/bin/program" /* the one that is executed: of this C library, as far as can be seen */

#if defined(__x86_64__)
#define MACHINE EM_X86_64
#else
#define MACHINE EM_AARCH64
#endif

static const struct program_file {
	Elf64_Ehdr header;
	Elf64_Phdr segment;
	char loader[32];
} program_file = {
	.header = {.e_ident = {ELFMAG0, ELFMAG1, ELFMAG2, ELFMAG3, ELFCLASS64},
               .e_type = ET_DYN,
               .e_machine = MACHINE,
               .e_phoff = offsetof(struct program_file, segment),
               .e_phentsize = sizeof(Elf64_Phdr),
               .e_phnum = 1},
	.segment = {.p_type = PT_INTERP,
                .p_offset = offsetof(struct program_file, loader),
                .p_filesz = sizeof("/lib/ld-linux.so")},
	.loader = "/lib/ld-linux.so",
};

int sim_fstat(int fd, struct stat *found)
{
	static const mode_t modes[] = {
		[KIND_MEMORY] = S_IFREG | 0600,   [KIND_PROGRAM] = S_IFREG | 0755,   [KIND_FILE] = S_IFREG | 0600,
		[KIND_TCP] = S_IFSOCK | 0600,     [KIND_LISTENER] = S_IFSOCK | 0600, [KIND_LINE] = S_IFSOCK | 0600,
		[KIND_LIVENESS] = S_IFIFO | 0600, [KIND_DIRECTORY] = S_IFDIR | 0500, [KIND_OTHER] = 0};
	struct object *object = fd_object(fd);

	if (!object)
		return failed(EBADF);
	*found = (struct stat){.st_mode = modes[object->kind],
	                       .st_size = (off_t)object->len,
	                       .st_ino = (ino_t)object->inode,
	                       .st_uid = geteuid(),
	                       .st_gid = getegid()};
	return 0;
}

static ssize_t bytes_at(void *to, size_t n, off_t offset, const void *from, size_t len)
{
	if ((size_t)offset >= len)
		return 0;
	n = n < len - (size_t)offset ? n : len - (size_t)offset;
	memcpy(to, (const uint8_t *)from + offset, n);
	return (ssize_t)n;
}

ssize_t sim_pread64(int fd, void *buf, size_t n, off_t offset)
{
	static const char load[] = "0.20 0.18 0.12 1/80 11206\n";
	const struct object *object = fd_object(fd);

	if (object && object->kind == KIND_MEMORY)
		return bytes_at(buf, n, offset, object->memory, object->len);
	if (object && object->kind == KIND_PROGRAM)
		return bytes_at(buf, n, offset, &program_file, sizeof(program_file));
	return bytes_at(buf, n, 0, load, sizeof(load));
}

static int directory_new(int process)
{
	struct object *object = object_new(KIND_DIRECTORY);

	object->process = process;
	return fd_new(object, 0, current_end(), true);
}

/* What else there is of proc(5) nobody is told. */
static int file_open(const char *path)
{
	char rest[8] = "";
	int pid;

	if (strcmp(path, "/proc") == 0)
		return directory_new(-1);
	if (strcmp(path, "/proc/self/fd") == 0)
		return directory_new(current_end());
	if (strcmp(path, PROGRAM) == 0)
		return fd_new(object_new(KIND_PROGRAM), 0, current_end(), true);
	if (sscanf(path, "/proc/%d/%7s", &pid, rest) != 2 || pid < 1000 || pid >= 1000 + ENDS ||
	    !ends[pid - 1000].started || ends[pid - 1000].over)
		return failed(ENOENT);
	if (strcmp(rest, "status") == 0)
		return fd_new(object_new(KIND_OTHER), 0, current_end(), true);
	return strcmp(rest, "fd") == 0 ? directory_new(pid - 1000) : failed(ENOENT);
}

/* The next number that a directory names; -1: there is none. */
static int next_number(struct object *directory)
{
	for (; directory->count < FDS_MAX; directory->count++) {
		int at = (int)directory->count;
		if (directory->process >= 0 ? fds[directory->process][at].object != NULL
		                            : at < ENDS && ends[at].started && !ends[at].over)
			return directory->process >= 0 ? at : 1000 + at;
	}
	return -1;
}

static long directory_read(struct object *directory, uint8_t *to, size_t room)
{
	struct entry {
		uint64_t inode, offset;
		uint16_t len;
		uint8_t type;
		char name[13];
	} entry = {.inode = 1, .len = sizeof(entry)};
	size_t len = 0;
	int number;

	while (len + sizeof(entry) <= room && (number = next_number(directory)) >= 0) {
		snprintf(entry.name, sizeof(entry.name), "%d", number);
		entry.offset = ++directory->count;
		memcpy(to + len, &entry, sizeof(entry));
		len += sizeof(entry);
	}
	return (long)len;
}

static long link_read(const struct object *directory, const char *path, char *to, size_t room)
{
	int process = directory ? directory->process : current_end(), fd;

	if (sscanf(path, directory ? "%d" : "/proc/self/fd/%d", &fd) != 1 || fd < 0 || fd >= FDS_MAX || process < 0 ||
	    !fds[process][fd].object)
		return failed(ENOENT);
	const struct object *object = fds[process][fd].object;
	switch (object->kind) {
	case KIND_TCP:
	case KIND_LISTENER:
	case KIND_LINE: return snprintf(to, room, "socket:[%llu]", (unsigned long long)object->inode);
	case KIND_MEMORY: return snprintf(to, room, "/memfd:%s (deleted)", object->name);
	case KIND_PROGRAM: return snprintf(to, room, PROGRAM);
	default: return snprintf(to, room, "anon_inode:[other]");
	}
}

/* unix_diag(7): which is the other end of a socket. */
static long diag_answer(const struct object *diag, void *to, size_t room)
{
	struct {
		struct nlmsghdr header;
		struct unix_diag_msg said;
		struct nlattr attribute;
		uint32_t other;
	} answer = {.header = {.nlmsg_len = sizeof(answer), .nlmsg_type = SOCK_DIAG_BY_FAMILY},
	            .attribute = {sizeof(struct nlattr) + sizeof(uint32_t), UNIX_DIAG_PEER}};

	for (const struct object *line = objects; line; line = line->next)
		if (line->kind == KIND_LINE && line->inode == diag->count && line->line.mate && line->line.mate->refs)
			answer.other = (uint32_t)line->line.mate->inode;
	if (!answer.other)
		answer.header.nlmsg_len -= (uint32_t)(sizeof(answer.attribute) + sizeof(answer.other));
	if (room < sizeof(answer))
		fail("no room for what sock_diag answers");
	memcpy(to, &answer, sizeof(answer));
	return (long)answer.header.nlmsg_len;
}

static struct futex {
	const uint32_t *word;
	uint32_t value;
} futexes[ENDS];

static bool futex_changed(void *argument)
{
	const struct futex *futex = argument;

	return *futex->word != futex->value;
}

static long futex(const uint32_t *word, long op, uint32_t value, const struct timespec *limit)
{
	struct futex *mine = &futexes[current_end()];

	long woken = 0;

	for (int i = 0; i < ENDS && op == FUTEX_WAKE; i++)
		woken += futexes[i].word == word;
	if (op != FUTEX_WAIT || *word != value)
		return woken;
	*mine = (struct futex){word, value};
	bool over = !block(futex_changed, mine, limit ? now + limit->tv_sec * 1000 * MS + limit->tv_nsec : NEVER);
	mine->word = NULL;
	return over ? failed(ETIMEDOUT) : 0;
}

bool futex_sleeps(int end)
{
	return futexes[end].word != NULL;
}

long files_syscall(long number, long a, long b, long c, long d)
{
	struct object *object = fd_object((int)a);

	switch (number) {
	case SYS_openat: return file_open((const char *)b);
	case SYS_getdents64: return directory_read(object, (uint8_t *)b, (size_t)c);
	case SYS_readlinkat:
		return link_read(object && object->kind == KIND_DIRECTORY ? object : NULL, (const char *)b, (char *)c,
		                 (size_t)d);
	case SYS_socket: return fd_new(object_new(KIND_DIAG), 0, current_end(), true);
	case SYS_sendto: {
		const struct {
			struct nlmsghdr header;
			struct unix_diag_req request;
		} *asked = (const void *)b;
		object->count = asked->request.udiag_ino;
		return c;
	}
	case SYS_recvfrom: return diag_answer(object, (void *)b, (size_t)c);
	case SYS_read: return snprintf((char *)b, (size_t)c, "Name:\tp\nUid:\t%1$u\t%1$u\t%1$u\t%1$u\n", geteuid());
	case SYS_futex: return futex((const uint32_t *)a, b, (uint32_t)c, (const struct timespec *)d);
	default: fail("system call %ld", number);
	}
}
