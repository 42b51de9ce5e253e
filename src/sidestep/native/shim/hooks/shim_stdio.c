/*
 * shim_stdio.c - the C library's streams, and what else reads and writes inside the C library.
 *
 * A stream reads, writes and closes its number through a table of functions. The linker has made the few tables read-only;
 * ours stand in them. So each call looks at the number as it is now. If dup2() has made standard input a connection, it is
 * read from its ring.
 */
#include "shim_fd.h"
#include "shim_object.h"

static struct {
	ssize_t (*read)(FILE *, void *, ssize_t);
	ssize_t (*write)(FILE *, const void *, ssize_t);
	int (*close)(FILE *);
} next;

static ssize_t stream_read(FILE *file, void *to, ssize_t len)
{
	return likely(!file_get(file->_fileno)) ? next.read(file, to, len) : read(file->_fileno, to, (size_t)len);
}

/* Like _IO_new_file_write() of glibc. */
static ssize_t stream_write(FILE *file, const void *from, ssize_t len)
{
	ssize_t done = 0;

	if (likely(!file_get(file->_fileno)))
		return next.write(file, from, len);
	while (done < len) {
		ssize_t put = write(file->_fileno, (const uint8_t *)from + done, (size_t)(len - done));
		if (put < 0) {
			file->_flags |= _IO_ERR_SEEN;
			break;
		}
		done += put;
	}
	if (file->_offset >= 0)
		file->_offset += done;
	return done;
}

static int stream_close(FILE *file)
{
	return likely(!file_get(file->_fileno)) ? next.close(file) : close(file->_fileno);
}

/* ---- the tables ---- */
/* libioP.h, struct _IO_FILE_plus: the stream, and behind it the table. */
static void *const *functions_of(const FILE *stream)
{
	return *(void *const *const *)(stream + 1);
}

static void function_replace(void **at, void *old, void *ours)
{
	if (*at == old)
		__atomic_store_n(at, ours, __ATOMIC_RELEASE);
}

static bool has_function(void *const *table, const void *function)
{
	enum { FUNCTIONS = 21 }; /* libioP.h: struct _IO_jump_t */

	for (int i = 0; i < FUNCTIONS; i++)
		if (table[i] == function)
			return true;
	return false;
}

static void *function_of(const struct object *object, const char *text)
{
	const ElfW(Sym) *symbol = object_find(object, text, name_hash(text));

	return symbol ? (void *)(object->base + symbol->st_value) : NULL;
}

static int tables_of_libc(struct dl_phdr_info *info, size_t size, void *unused)
{
	struct object object;
	void *const *table = functions_of(stdin);

	(void)size;
	(void)unused;
	if (!object_read(info, &object) || !object_is(&object, LIBC))
		return 0;
	void *reads = function_of(&object, "_IO_file_read"), *writes = function_of(&object, "_IO_file_write");
	void *closes = function_of(&object, "_IO_file_close");
	if (!reads || !writes || !closes || (uintptr_t)table < object.relro || (uintptr_t)table >= object.relro_end ||
	    !has_function(table, reads) || !has_function(table, writes) || !has_function(table, closes) ||
	    !pages_open(object.relro, object.relro_end))
		return 1;
	next.read = (__typeof__(next.read))reads;
	next.write = (__typeof__(next.write))writes;
	next.close = (__typeof__(next.close))closes;
	for (void **at = (void **)object.relro; at < (void **)object.relro_end; at++) {
		function_replace(at, reads, (void *)stream_read);
		function_replace(at, writes, (void *)stream_write);
		function_replace(at, closes, (void *)stream_close);
	}
	pages_shut(object.relro, object.relro_end);
	stdio_seen = true;
	return 1;
}

void streams_redirect(void)
{
	dl_iterate_phdr(tables_of_libc, NULL);
}

/* ---- calls ---- */
EXPORT FILE *fdopen(int fd, const char *mode)
{
	conn_streams(fd);
	return real.fdopen(fd, mode);
}

/* libc puts the new file under the stream's number by calls of its own. */
EXPORT FILE *freopen(const char *path, const char *mode, FILE *file)
{
	const int fd = file->_fileno;
	const bool known = file_get(fd);

	if (unlikely(known)) {
		fflush(file);
		fd_forget(fd, true);
	}
	FILE *again = real.freopen(path, mode, file);
	if (unlikely(known))
		file_closed(fd);
	else if (again)
		fd_new(again->_fileno);
	return again;
}

ALIAS(freopen64, freopen);

/* libc writes to a copy of the number, of which only it knows. */
EXPORT void perror(const char *text)
{
	const char *error = strerror(errno);

	if (likely(!conn_get(STDERR_FILENO)))
		real.perror(text);
	else if (text && *text)
		dprintf(STDERR_FILENO, "%s: %s\n", text, error);
	else
		dprintf(STDERR_FILENO, "%s\n", error);
}

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

/* Declarations of glibc's header, which has them only for programs that are compiled with _FORTIFY_SOURCE. */
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
