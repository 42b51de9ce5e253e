/* shim_fd.c - the calls that duplicate, change and end descriptors. */
#include "shim_fd.h"

#include <fcntl.h>
#include <linux/close_range.h>
#include <sched.h>
#include <sys/stat.h>

/* A program that checks all numbers for inherited descriptors does not see ours. */
EXPORT int fstat(int fd, struct stat *found)
{
	return own(fd) ? fail_with(EBADF) : real.fstat(fd, found);
}

EXPORT int fstat64(int fd, struct stat64 *found)
{
	static_assert(sizeof(struct stat64) == sizeof(struct stat), "on 64-bit machines they are the same");
	return fstat(fd, (struct stat *)found);
}

/* ---- closing ---- */

/*
 * Closes the file behind a number, and keeps the number: calls on it fail with EBADF, as on an O_PATH descriptor (open(2)).
 * So the kernel does not reuse the number while our entry says that it is being closed: that would be wrong of a new file.
 */
static bool close_in_place(int fd)
{
	static _Atomic int nobody = -1;
	int path = atomic_load(&nobody), none = -1, saved = errno;

	if (unlikely(path < 0)) {
		path = own_fd(arena_path_fd());
		if (!atomic_compare_exchange_strong(&nobody, &none, path)) {
			own_fd_close(path); /* another thread was first */
			path = none;
		}
	}
	bool done = path >= 0 && real.dup3(path, fd, O_CLOEXEC) == fd;
	errno = saved;
	return done;
}

EXPORT int close(int fd)
{
	struct file *file = file_get(fd);

	if (likely(!file))
		return real.close(fd);
	if (file->kind == FILE_OWN)
		return fail_with(EBADF); /* a loop over all numbers must not take the ground from under us */
	fd_forget(fd, true);
	if (file_closing(fd) && !*one_thread && close_in_place(fd)) {
		file_closed(fd);
		return real.close(fd);
	}
	int result = real.close(fd);
	file_closed(fd);
	return result;
}

/* glibc's own name for it; some programs call it */
ALIAS(__close, close);

static int range_apply(unsigned first, unsigned last, int flags)
{
	/* loop around our own descriptors, which the program does not know */
	unsigned start = first;
	int result = 0;

	for (unsigned fd = first; !(flags & CLOSE_RANGE_CLOEXEC) && fd <= last && fd < atomic_load(&fd_end); fd++) {
		struct file *file = file_get((int)fd);
		if (file && file->kind != FILE_OWN)
			fd_forget((int)fd, true);
	}
	unsigned own_low = atomic_load(&own_first);
	for (unsigned fd = first > own_low ? first : own_low; fd <= last && fd < atomic_load(&own_end); fd++) {
		if (!own((int)fd))
			continue;
		if (fd > start && real.close_range(start, fd - 1, flags) < 0)
			result = -1;
		start = fd + 1;
	}
	if (start <= last && real.close_range(start, last, flags) < 0)
		result = -1;
	for (unsigned fd = first; fd <= last && fd < atomic_load(&fd_end); fd++)
		if (file_closing((int)fd))
			file_closed((int)fd);
	return result;
}

EXPORT int close_range(unsigned first, unsigned last, int flags)
{
	if (!fd_table_len || first > last || (flags & ~(CLOSE_RANGE_UNSHARE | CLOSE_RANGE_CLOEXEC)))
		return real.close_range(first, last, flags);
	if (flags & CLOSE_RANGE_UNSHARE) {
		struct stat tasks;
		/* The thread leaves the shared descriptors to its siblings, and our table stays theirs; alone, it shares none. */
		if (stat("/proc/self/task", &tasks) < 0 || tasks.st_nlink > 3)
			return real.close_range(first, last, flags);
		if (unshare(CLONE_FILES) < 0) /* a descriptor of a process of vfork() or clone() */
			return -1;
		flags &= ~CLOSE_RANGE_UNSHARE;
	}
	return range_apply(first, last, flags);
}

EXPORT void closefrom(int first)
{
	if (!fd_table_len)
		real.closefrom(first);
	else
		range_apply(first < 0 ? 0 : (unsigned)first, ~0u, 0);
}

/* ---- duplicating ---- */
bool stdio_seen;

static void duplicated(int from, int to)
{
	struct file *file = file_get(from);

	if (likely(!file))
		return;
	if (file->kind == FILE_CONN) {
		HELD conn = conn_hold(from);
		if (!conn || (conn_fd_stale(conn, from) && conn_drop_stale(conn, from)))
			return;
		conn_join(conn, to);
		if (to <= STDERR_FILENO)
			conn_streams(to);
	} else if (file->kind == FILE_SET) {
		set_dup(from, to);
	} else if (file->kind == FILE_EXPLICIT) {
		explicit_dup(from, to);
	} else if (file->kind == FILE_LISTENER) {
		file_put(to, file);
	}
}

EXPORT int dup(int fd)
{
	if (own(fd))
		return fail_with(EBADF);
	int copy = fd_new(real.dup(fd));
	if (copy >= 0)
		duplicated(fd, copy);
	return copy;
}

static int dup_onto(int from, int to, int flags, bool three)
{
	if (own(from))
		return fail_with(EBADF);
	if (own(to)) /* too many places know ours by its number to move it; programs do not name such high numbers */
		return fail_with(EMFILE);
	struct file *target = file_get(to), *source = file_get(from);
	/* a number that names the connection already stays the same; other threads may be using it */
	if (from == to || target == source || (flags & ~O_CLOEXEC))
		return three ? real.dup3(from, to, flags) : real.dup2(from, to);
	if (real.fcntl64(from, F_GETFD, 0) < 0)
		return three ? real.dup3(from, to, flags) : real.dup2(from, to); /* EBADF: `to` must stay as it is */
	fd_forget(to, true);
	int result = three ? real.dup3(from, to, flags) : real.dup2(from, to);
	file_closed(to);
	if (result >= 0)
		duplicated(from, to);
	return result;
}

EXPORT int dup2(int from, int to)
{
	return dup_onto(from, to, 0, false);
}

EXPORT int dup3(int from, int to, int flags)
{
	return dup_onto(from, to, flags, true);
}

EXPORT int fcntl64(int fd, int command, ...)
{
	va_list args;

	va_start(args, command);
	long argument = va_arg(args, long);
	va_end(args);
	struct file *file = file_get(fd);
	if (likely(!file)) {
		int plain = real.fcntl64(fd, command, argument);
		return unlikely(command == F_DUPFD || command == F_DUPFD_CLOEXEC) ? fd_new(plain) : plain;
	}
	if (file->kind == FILE_OWN)
		return fail_with(EBADF);
	int result = real.fcntl64(fd, command, argument);
	if (result >= 0 && (command == F_DUPFD || command == F_DUPFD_CLOEXEC)) {
		duplicated(fd, fd_new(result));
	} else if (result >= 0 && command == F_SETFD && file->kind == FILE_CONN) {
		word_store(((struct conn *)file)->heritable, !(argument & FD_CLOEXEC));
	} else if (result >= 0 && command == F_SETFL && file->kind == FILE_CONN) {
		noted((struct conn *)file, argument & O_NONBLOCK);
		if (argument & O_ASYNC)
			conn_leave((struct conn *)file, fd, REASON_ASYNC_SIGNAL_IO);
	}
	return result;
}

/* one function, where off_t has 64 bits */
ALIAS(fcntl, fcntl64);
ALIAS(__fcntl, fcntl64);

ALIAS(__dup2, dup2);
