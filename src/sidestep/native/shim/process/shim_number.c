/*
 * shim_number.c - calls that return a new number. What the table holds of it is of a descriptor that was closed where no hook
 * is: within the C library, or by a system call of the program's own. It is dropped.
 */
#include "shim_number.h"

#include <dirent.h>

void fd_forget(int fd, bool closing)
{
	struct file *file = file_get(fd);

	if (likely(!file))
		return;
	if (file->kind == FILE_CONN)
		conn_forget(fd, closing);
	else if (file->kind == FILE_SET)
		set_forget(fd);
	else if (file->kind == FILE_EXPLICIT)
		explicit_forget(fd);
	else if (file->kind == FILE_LISTENER || file->kind == FILE_RING)
		file_put(fd, NULL);
	else if (file->kind == FILE_CLOSING && !closing)
		file_closed(fd);
}

/* A call of our own under a lock of ours gets numbers as well, and gives them back. */
void fd_fresh(int fd)
{
	KEEP_ERRNO;

	if (!self.critical)
		fd_forget(fd, false);
}

static int fd_new_pair(int result, const int pair[2])
{
	if (result == 0) {
		fd_new(pair[0]);
		fd_new(pair[1]);
	}
	return result;
}

#define NUMBER(result, name, params, args) \
	EXPORT result name params \
	{ \
		return fd_new(real.name args); \
	}
#define PAIR(result, name, params, args) \
	EXPORT result name params \
	{ \
		return fd_new_pair(real.name args, pair); \
	}
#define STREAM(result, name, params, args) \
	EXPORT result name params \
	{ \
		result stream = real.name args; \
		if (likely(stream)) \
			fd_new(fileno(stream)); \
		return stream; \
	}
NUMBER_FUNCTIONS(NUMBER)
PAIR_FUNCTIONS(PAIR)
STREAM_FUNCTIONS(STREAM)

EXPORT DIR *opendir(const char *path)
{
	DIR *directory = real.opendir(path);

	if (likely(directory))
		fd_new(dirfd(directory));
	return directory;
}

/* The mode is there only where a file may be made; else what is read is nobody's, and ignored. */
EXPORT int open64(const char *path, int flags, ...)
{
	va_list args;

	va_start(args, flags);
	mode_t mode = va_arg(args, mode_t);
	va_end(args);
	return fd_new(real.open64(path, flags, mode));
}

EXPORT int openat64(int directory, const char *path, int flags, ...)
{
	va_list args;

	va_start(args, flags);
	mode_t mode = va_arg(args, mode_t);
	va_end(args);
	return fd_new(real.openat64(directory, path, flags, mode));
}

/* one function, where off_t has 64 bits */
ALIAS(open, open64);
ALIAS(openat, openat64);
ALIAS(creat64, creat);
ALIAS(fopen64, fopen);
ALIAS(mkostemp64, mkostemp);
ALIAS(mkostemps64, mkostemps);
ALIAS(mkstemp64, mkstemp);
ALIAS(mkstemps64, mkstemps);
ALIAS(tmpfile64, tmpfile);
ALIAS(__open64_2, __open_2);
ALIAS(__openat64_2, __openat_2);
ALIAS(__open, open64);
ALIAS(__open64, open64);
