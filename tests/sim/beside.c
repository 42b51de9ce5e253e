/* beside.c - what the shim calls beside the table of the kernel's functions: the C library, and, by its compiler, memory. */
#include "kernel.h"
#include "process.h"
#include "program.h"
#include "scenario.h"

#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

/* ---- what the shim asks of the C library directly; the linker's --wrap leads here ---- */
#define WRAP(result, name, ...) \
	result __wrap_##name(__VA_ARGS__); \
	result __wrap_##name(__VA_ARGS__)

WRAP(void *, dlsym, void *scope, const char *name)
{
	(void)scope;
	return kernel_find(name);
}

WRAP(void *, dlopen, const char *path, int flags)
{
	(void)path;
	(void)flags;
	return NULL;
}

/* The simulator's own C library is to call nobody in its place. */
WRAP(int, dl_iterate_phdr, int (*each)(struct dl_phdr_info *, size_t, void *), void *argument)
{
	(void)each;
	(void)argument;
	return 0;
}

WRAP(int, clock_gettime, clockid_t clock, struct timespec *at)
{
	(void)clock;
	point();
	now += 100;
	*at = (struct timespec){now / (1000 * MS), now % (1000 * MS)};
	return 0;
}

/* Each process has an environment, and the C library one: another's exec is not to change what the next program finds. */
WRAP(char *, getenv, const char *name)
{
	return strcmp(name, EXEC_VARIABLE) ? getenv(name) : exec_variable();
}

WRAP(int, unsetenv, const char *name)
{
	char *text = strcmp(name, EXEC_VARIABLE) ? NULL : exec_variable();

	if (text)
		*text = '\0';
	return 0;
}

WRAP(int, sched_yield, void)
{
	point();
	return 0;
}

WRAP(pid_t, getpid, void)
{
	return 1000 + current_end();
}

WRAP(int, kill, pid_t pid, int number)
{
	(void)number;
	return pid >= 1000 && pid < 1000 + ENDS && ends[pid - 1000].over ? failed(ESRCH) : 0;
}

WRAP(int, raise, int number)
{
	(void)number;
	return 0;
}

WRAP(int, sched_getcpu, void)
{
	static int cpus[ENDS] = {0, 1, 0, 1};

	if (!scenario && chance(16))
		cpus[current_end()] = (int)choose(2);
	return cpus[current_end()];
}

WRAP(int, sched_getaffinity, pid_t pid, size_t len, uint8_t *set)
{
	(void)pid;
	memset(set, 0, len);
	set[0] = 3;
	return 0;
}

WRAP(int, sched_setaffinity, pid_t pid, size_t len, const uint8_t *set)
{
	(void)pid;
	(void)len;
	(void)set;
	return 0;
}

WRAP(int, pthread_atfork, void (*before)(void), void (*parent)(void), void (*child)(void))
{
	process_atfork(before, parent, child);
	return 0;
}

WRAP(int, __register_atfork, void (*before)(void), void (*parent)(void), void (*child)(void), void *handle)
{
	(void)handle;
	return __wrap_pthread_atfork(before, parent, child);
}

WRAP(ssize_t, getrandom, void *to, size_t len, unsigned flags)
{
	(void)flags;
	return sim_syscall(SYS_getrandom, (long)to, (long)len, 0, 0, 0, 0);
}

WRAP(int, eventfd, unsigned count, int flags)
{
	struct object *object = object_new(KIND_DOORBELL);

	object->count = count;
	object->whole = !(flags & EFD_SEMAPHORE);
	return fd_new(object, 0, current_end(), true);
}

WRAP(int, memfd_create, const char *name, unsigned flags)
{
	struct object *object = object_new(KIND_MEMORY);

	(void)flags;
	snprintf(object->name, sizeof(object->name), "%s", name);
	return fd_new(object, 0, current_end(), true);
}

WRAP(int, ftruncate, int fd, off_t len)
{
	struct object *object = fd_object(fd);

	if (!object || object->memory)
		fail("ftruncate of something else than fresh memory");
	object->len = (size_t)len;
	object->memory =
		mmap(NULL, object->len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	return 0;
}

WRAP(ssize_t, fgetxattr, int fd, const char *name, void *value, size_t size)
{
	(void)fd;
	(void)name;
	(void)value;
	(void)size;
	return failed(ENODATA);
}

WRAP(int, getrlimit, int resource, struct rlimit *found)
{
	rlim_t limit = resource == RLIMIT_NOFILE ? 1024 : resource == RLIMIT_STACK ? 8u << 20 : RLIM_INFINITY;

	*found = (struct rlimit){limit, limit};
	return 0;
}

WRAP(ssize_t, pwrite, int fd, const void *from, size_t len, off_t offset)
{
	memcpy(fd_object(fd)->memory + offset, from, len);
	return (ssize_t)len;
}

WRAP(int, fstatfs, int fd, struct statfs *found)
{
	(void)fd;
	*found = (struct statfs){.f_type = 0x01021994}; /* TMPFS_MAGIC */
	return 0;
}

WRAP(int, fstat, int fd, struct stat *found)
{
	return sim_fstat(fd, found);
}

WRAP(int, stat, const char *path, struct stat *found)
{
	(void)path;
	*found = (struct stat){.st_mode = S_IFDIR | 0700, .st_uid = geteuid(), .st_ino = 1};
	return 0;
}

WRAP(int, access, const char *path, int mode)
{
	(void)path;
	(void)mode;
	return 0;
}

WRAP(int, open, const char *path, int flags, ...)
{
	int fd;

	(void)flags;
	if (sscanf(path, "/proc/self/fd/%d", &fd) == 1)
		return fd_dup(fd, 0, true);
	return fd_new(object_new(strncmp(path, "/proc/", 6) ? KIND_LOG : KIND_OTHER), 0, current_end(), true);
}

/* Memory that is shared is at the same place in both ends, so that all of it is private to this process. */
WRAP(void *, mmap, void *at, size_t len, int protection, int flags, int fd, off_t offset)
{
	struct object *object = fd_object(fd);

	if (fd < 0) {
		void *found = mmap(at, len, protection, flags, fd, offset);
		process_memory(found, len);
		return found;
	}
	if (!object || object->kind != KIND_MEMORY || (size_t)offset + len > object->len)
		fail("mmap of descriptor %d", fd);
	return object->memory + offset;
}

static struct object *memory_at(const void *address)
{
	for (struct object *object = objects; object; object = object->next)
		if (object->kind == KIND_MEMORY && (const uint8_t *)address >= object->memory &&
		    (const uint8_t *)address < object->memory + object->len)
			return object;
	return NULL;
}

bool memory_shared(const void *address)
{
	struct object *object = memory_at(address);

	return object && object->shared;
}

WRAP(int, munlock, const void *address, size_t len)
{
	(void)address;
	(void)len;
	return 0;
}

WRAP(int, mprotect, void *address, size_t len, int protection)
{
	(void)address;
	(void)len;
	(void)protection;
	return 0; /* it may be read and written */
}

WRAP(int, munmap, void *address, size_t len)
{
	(void)address;
	(void)len;
	return 0; /* another process may have it still */
}

WRAP(int, madvise, void *address, size_t len, int advice)
{
	if (advice == MADV_REMOVE)
		memset(address, 0, len);
	return 0;
}

WRAP(void *, malloc, size_t len)
{
	return process_allocate(len);
}

WRAP(void *, calloc, size_t count, size_t size)
{
	return process_allocate(count * size); /* never used before */
}

WRAP(void *, realloc, void *before, size_t len)
{
	uint8_t *at = process_allocate(len);

	if (before)
		memmove(at, before, len); /* and some of what lies behind it */
	return at;
}

WRAP(void, free, void *at)
{
	if (!process_allocated(at))
		free(at);
}

/* ---- what the compiler's -fsanitize=thread calls: a place to be interrupted at each word that both ends have ---- */
static void touched(const volatile void *address)
{
	if (current && !calm && (preempt_one_in || points_left >= 0) && memory_shared((const void *)address))
		point();
}

typedef unsigned __int128 uint128;
#define ATOMICS(bits, type) \
	type __tsan_atomic##bits##_load(const volatile type *at, int order); \
	type __tsan_atomic##bits##_load(const volatile type *at, int order) \
	{ \
		(void)order; \
		touched(at); \
		return *at; \
	} \
	void __tsan_atomic##bits##_store(volatile type *at, type value, int order); \
	void __tsan_atomic##bits##_store(volatile type *at, type value, int order) \
	{ \
		(void)order; \
		touched(at); \
		*at = value; \
	} \
	int __tsan_atomic##bits##_compare_exchange_strong(volatile type *at, type *expected, type value, int a, int b); \
	int __tsan_atomic##bits##_compare_exchange_strong(volatile type *at, type *expected, type value, int a, int b) \
	{ \
		(void)a; \
		(void)b; \
		touched(at); \
		if (*at == *expected) { \
			*at = value; \
			return 1; \
		} \
		*expected = *at; \
		return 0; \
	} \
	int __tsan_atomic##bits##_compare_exchange_weak(volatile type *at, type *expected, type value, int a, int b); \
	int __tsan_atomic##bits##_compare_exchange_weak(volatile type *at, type *expected, type value, int a, int b) \
	{ \
		return __tsan_atomic##bits##_compare_exchange_strong(at, expected, value, a, b); \
	} \
	CHANGE(bits, type, exchange, (void)before, value) \
	CHANGE(bits, type, fetch_add, (void)0, (type)(before + value)) \
	CHANGE(bits, type, fetch_sub, (void)0, (type)(before - value)) \
	CHANGE(bits, type, fetch_or, (void)0, (type)(before | value)) \
	CHANGE(bits, type, fetch_and, (void)0, (type)(before & value))
#define CHANGE(bits, type, name, unused, after) \
	type __tsan_atomic##bits##_##name(volatile type *at, type value, int order); \
	type __tsan_atomic##bits##_##name(volatile type *at, type value, int order) \
	{ \
		(void)order; \
		touched(at); \
		type before = *at; \
		unused; \
		*at = after; \
		return before; \
	}
ATOMICS(8, uint8_t)
ATOMICS(16, uint16_t)
ATOMICS(32, uint32_t)
ATOMICS(64, uint64_t)

#define NOTHING(name, ...) \
	void __tsan_##name(__VA_ARGS__); \
	void __tsan_##name(__VA_ARGS__) \
	{ \
	}
#define ACCESS(name) \
	void __tsan_##name(void *at); \
	void __tsan_##name(void *at) \
	{ \
		(void)at; \
	}
/* The first that a program calls, before what its compiler has initialized is changed. */
void __tsan_init(void);
void __tsan_init(void)
{
	process_loaded(__builtin_return_address(0));
}
NOTHING(func_exit, void)
ACCESS(func_entry)
ACCESS(read1)
ACCESS(read2)
ACCESS(read4)
ACCESS(read8)
ACCESS(read16)
ACCESS(write1)
ACCESS(write2)
ACCESS(write4)
ACCESS(write8)
ACCESS(write16)
ACCESS(unaligned_read2)
ACCESS(unaligned_read4)
ACCESS(unaligned_read8)
ACCESS(unaligned_read16)
ACCESS(unaligned_write2)
ACCESS(unaligned_write4)
ACCESS(unaligned_write8)
ACCESS(unaligned_write16)
ACCESS(volatile_read1)
ACCESS(volatile_read2)
ACCESS(volatile_read4)
ACCESS(volatile_read8)
ACCESS(volatile_write1)
ACCESS(volatile_write2)
ACCESS(volatile_write4)
ACCESS(volatile_write8)
void __tsan_read_range(void *at, size_t len);
void __tsan_read_range(void *at, size_t len)
{
	(void)at;
	(void)len;
}
void __tsan_write_range(void *at, size_t len);
void __tsan_write_range(void *at, size_t len)
{
	(void)at;
	(void)len;
}
void __tsan_atomic_thread_fence(int order);
void __tsan_atomic_thread_fence(int order)
{
	(void)order;
}
void __tsan_atomic_signal_fence(int order);
void __tsan_atomic_signal_fence(int order)
{
	(void)order;
}
