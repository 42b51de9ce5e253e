/* shim_stdio.c - libc's streams read and write inside libc, where no shim is: a stream on a socket gets ours instead. */
#include "shim.h"

#include <fcntl.h>
#include <stdio_ext.h>

struct stream {
	FILE *file;
	int fd;
	struct stream *next;
};
static struct stream *streams; /* guarded by shim_lock */

static ssize_t stream_read(void *cookie, char *buf, size_t n)
{
	return read(((struct stream *)cookie)->fd, buf, n);
}

static ssize_t stream_write(void *cookie, const char *buf, size_t n)
{
	size_t done = 0;

	while (done < n) { /* stdio takes a short count for an error */
		ssize_t put = write(((struct stream *)cookie)->fd, buf + done, n - done);
		if (put < 0)
			return done ? (ssize_t)done : 0;
		done += (size_t)put;
	}
	return (ssize_t)done;
}

static int stream_seek(void *cookie, off64_t *offset, int whence)
{
	off64_t at = lseek64(((struct stream *)cookie)->fd, *offset, whence);

	if (at < 0)
		return -1; /* ESPIPE until freopen() puts a file there */
	*offset = at;
	return 0;
}

static int stream_close(void *cookie)
{
	struct stream *stream = cookie, **at = &streams;
	int fd = stream->fd;

	shim_lock_take();
	while (*at != stream)
		at = &(*at)->next;
	*at = stream->next;
	shim_lock_drop();
	free(stream);
	return fd < 0 ? 0 : close(fd);
}

EXPORT FILE *fdopen(int fd, const char *mode)
{
	if (likely(!conn_get(fd)))
		return real.fdopen(fd, mode);
	cookie_io_functions_t io = {.read = stream_read, .write = stream_write, .seek = stream_seek, .close = stream_close};
	if (!mode || !strchr("rwa", mode[0]) || !mode[0]) {
		errno = EINVAL;
		return NULL;
	}
	struct stream *stream = calloc(1, sizeof(*stream));
	FILE *file = stream ? fopencookie(stream, mode, io) : NULL;
	if (!file) {
		free(stream);
		return NULL;
	}
	file->_fileno = fd; /* so that fileno() answers */
	stream->fd = fd;
	stream->file = file;
	shim_lock_take();
	stream->next = streams;
	streams = stream;
	shim_lock_drop();
	return file;
}

/* libc's freopen() knows its own kind of stream alone, and crashes with ours. */
static FILE *stream_reopen(struct stream *stream, const char *path, const char *mode)
{
	/* libio.h: what a stream may not do */
	enum { NO_READS = 4, NO_WRITES = 8 };
	FILE *file = stream->file;
	int how = !mode            ? -1
	          : mode[0] == 'r' ? 0
	          : mode[0] == 'w' ? O_CREAT | O_TRUNC
	          : mode[0] == 'a' ? O_CREAT | O_APPEND
	                           : -1;
	bool both = mode && strchr(mode, '+');

	fflush(file);
	__fpurge(file);
	clearerr(file);
	if (stream->fd >= 0)
		close(stream->fd); /* freopen(3): in any case */
	stream->fd = file->_fileno = -1;
	if (how >= 0 && path) {
		how |= both ? O_RDWR : mode[0] == 'r' ? O_RDONLY : O_WRONLY;
		how |= (strchr(mode, 'e') ? O_CLOEXEC : 0) | (strchr(mode, 'x') ? O_EXCL : 0);
		stream->fd = file->_fileno = open(path, how, 0666);
	} else {
		errno = how < 0 ? EINVAL : ENXIO; /* without a path it is opened anew by its number, which a socket cannot be */
	}
	if (stream->fd < 0) {
		int failed = errno;
		fclose(file);
		errno = failed;
		return NULL;
	}
	file->_flags &= ~(NO_READS | NO_WRITES);
	file->_flags |= both ? 0 : mode[0] == 'r' ? NO_WRITES : NO_READS;
	return file;
}

EXPORT FILE *freopen(const char *path, const char *mode, FILE *file)
{
	shim_lock_take();
	struct stream *stream = streams;
	while (stream && stream->file != file)
		stream = stream->next;
	shim_lock_drop();
	return likely(!stream) ? real.freopen(path, mode, file) : stream_reopen(stream, path, mode);
}

ALIAS(freopen64, freopen);

EXPORT int vdprintf(int fd, const char *format, va_list args)
{
	char *text;
	int len = vasprintf(&text, format, args), done = 0;

	while (len >= 0 && done < len) {
		ssize_t put = write(fd, text + done, (size_t)(len - done));
		if (put < 0)
			break;
		done += (int)put;
	}
	if (len >= 0)
		free(text);
	return len < 0 || done < len ? -1 : len;
}

EXPORT int dprintf(int fd, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	int result = vdprintf(fd, format, args);
	va_end(args);
	return result;
}

/* As glibc's header declares them, which does so only for programs that are compiled with _FORTIFY_SOURCE. */
int __vdprintf_chk(int fd, int level, const char *format, va_list args) __attribute__((format(printf, 3, 0)));
int __dprintf_chk(int fd, int level, const char *format, ...) __attribute__((format(printf, 3, 4)));

EXPORT int __vdprintf_chk(int fd, int level, const char *format, va_list args)
{
	(void)level;
	return vdprintf(fd, format, args);
}

EXPORT int __dprintf_chk(int fd, int level, const char *format, ...)
{
	va_list args;

	(void)level;
	va_start(args, format);
	int result = vdprintf(fd, format, args);
	va_end(args);
	return result;
}

ALIAS(_IO_fdopen, fdopen);
