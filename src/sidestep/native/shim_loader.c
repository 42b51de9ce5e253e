/*
 * shim_loader.c - programs that are executed here and whose loader cannot bring the shim in: musl's ends the program over it. They
 * get an environment without.
 */
#include "shim_proc.h"

#include <elf.h>
#include <fcntl.h>

#define INTERPRETERS_MAX 4 /* as the kernel's own limit */
#define SEGMENTS_MAX 64

static bool read_at(int fd, void *to, size_t n, uint64_t at)
{
	return real.pread64(fd, to, n, (off_t)at) == (ssize_t)n;
}

/* The loader that an ELF file names, or the interpreter of a script. False: neither. */
static bool interpreter_of(int fd, char *path, size_t size, bool *script)
{
	Elf64_Ehdr header;
	Elf64_Phdr segment;
	ssize_t n = real.pread64(fd, path, size - 1, 0);

	path[n > 0 ? n : 0] = '\0';
	*script = strncmp(path, "#!", 2) == 0;
	if (*script) {
		char *begin = path + 2 + strspn(path + 2, " \t");
		begin[strcspn(begin, " \t\n")] = '\0';
		memmove(path, begin, strlen(begin) + 1);
		return *path;
	}
	if (!read_at(fd, &header, sizeof(header), 0) || memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 ||
	    header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_phentsize != sizeof(segment))
		return false;
	for (int i = 0; i < header.e_phnum && i < SEGMENTS_MAX; i++) {
		if (!read_at(fd, &segment, sizeof(segment), header.e_phoff + (uint64_t)i * sizeof(segment)))
			return false;
		if (segment.p_type == PT_INTERP && segment.p_filesz && segment.p_filesz <= size) {
			path[segment.p_filesz - 1] = '\0';
			return read_at(fd, path, segment.p_filesz - 1, segment.p_offset);
		}
	}
	return false;
}

bool loader_refuses(int dir, const char *file)
{
	KEEP_ERRNO;
	char path[256];
	bool script = true;

	for (int i = 0; i < INTERPRETERS_MAX && script; i++) {
		int fd = (int)real.syscall(SYS_openat, dir, (long)file, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, 0, 0, 0);
		bool found = fd >= 0 && interpreter_of(fd, path, sizeof(path), &script);
		if (fd >= 0)
			raw_close(fd);
		if (!found)
			return false;
		file = path;
	}
	const char *name = strrchr(path, '/');
	return !script && strncmp(name ? name + 1 : path, "ld-musl", 7) == 0;
}

static const char preload[] = "LD_PRELOAD=", ours[] = "libsidestep.so";

size_t env_room(char *const env[])
{
	size_t count = 1, text = 0;

	for (; *env; env++, count++)
		if (strncmp(*env, preload, sizeof(preload) - 1) == 0)
			text += strlen(*env) + 1;
	return count * sizeof(*env) + text;
}

/* The other libraries that are to be loaded first; an empty name is none. */
static void without_ours(char *to, const char *list)
{
	to += sprintf(to, "%s", preload);
	for (list += sizeof(preload) - 1; *list; list += strspn(list, " :")) {
		size_t len = strcspn(list, " :"), name = sizeof(ours) - 1;
		bool our = len >= name && memcmp(list + len - name, ours, name) == 0 && (len == name || list[len - name - 1] == '/');
		if (!our)
			to += sprintf(to, "%.*s:", (int)len, list);
		list += len;
	}
}

char **env_without_shim(char *const env[], void *room)
{
	size_t count = 1, at = 0;

	for (char *const *each = env; *each; each++)
		count++;
	char **made = room, *text = (char *)(made + count);
	for (; *env; env++) {
		made[at++] = *env;
		if (strncmp(*env, preload, sizeof(preload) - 1) == 0) {
			made[at - 1] = text;
			without_ours(text, *env);
			text += strlen(*env) + 1;
		}
	}
	made[at] = NULL;
	return made;
}
