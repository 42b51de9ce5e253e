/* shim_proc.c - what proc(5) tells of processes and descriptors. */
#include "shim_proc.h"

#include <fcntl.h>

int proc_open(const char *path, int flags)
{
	return (int)real.syscall(SYS_openat, AT_FDCWD, (long)path, flags | O_CLOEXEC, 0, 0, 0);
}

bool proc_process(uint32_t pid, struct process *process)
{
	char path[32], text[512];
	long ticks = sysconf(_SC_CLK_TCK);
	unsigned long long began;

	snprintf(path, sizeof(path), "/proc/%u/stat", pid);
	int fd = proc_open(path, O_RDONLY);
	if (fd < 0)
		return false;
	ssize_t n = real.syscall(SYS_read, fd, (long)text, sizeof(text) - 1, 0, 0, 0);
	raw_close(fd);
	if (n <= 0)
		return false;
	text[n] = '\0';
	const char *at = strrchr(text, ')'); /* a name may hold anything */
	if (!at || sscanf(at + 1, " %*c %u %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
	                  &process->parent, &began) != 2)
		return false;
	process->began_ns = began * (1000000000ull / (unsigned long)ticks);
	return true;
}

long proc_number(const char *name)
{
	char *end;
	long value = strtol(name, &end, 10);

	return *name >= '0' && *name <= '9' && !*end ? value : -1;
}

bool proc_numbers(int dir, bool (*each)(int dir, long number, void *argument), void *argument)
{
	struct entry {
		uint64_t inode, offset;
		uint16_t len;
		uint8_t type;
		char name[];
	};
	_Alignas(struct entry) char entries[4096];
	long n;

	while ((n = real.syscall(SYS_getdents64, dir, (long)entries, sizeof(entries), 0, 0, 0)) > 0)
		for (long at = 0; at < n;) {
			const struct entry *entry = (const struct entry *)(entries + at);
			long number = proc_number(entry->name);
			if (number >= 0 && !each(dir, number, argument))
				return true;
			at += entry->len;
		}
	return n == 0;
}
