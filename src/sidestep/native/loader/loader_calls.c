/* loader_calls.c - what becomes of each system call of the program; see loader.h. */
#include "loader.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#define HEAP_SIZE (4ul << 30)
#define HEAP_SIZE_LIMITED (64ul << 20) /* if address space is limited */

const char *program_path;
const struct loaded *shim;

/* The shim's call in our place. A result of -1 is an error of our C library's, which the kernel never returns here. */
#define BY_SHIM(call) \
	do { \
		long result_ = (long)(call); \
		return (uint64_t)(result_ == -1 ? -errno : result_); \
	} while (0)

/* ---- brk(2): of an area of the program's own, since our C library has the process's ---- */
static uint64_t heap_begin, heap_end, heap_now;
static pthread_mutex_t heap_lock = PTHREAD_MUTEX_INITIALIZER;

static uint64_t heap_move(uint64_t to)
{
	if (!heap_begin) {
		struct rlimit limit;
		size_t size =
			getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur == RLIM_INFINITY ? HEAP_SIZE : HEAP_SIZE_LIMITED;
		void *at = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		if (at == MAP_FAILED)
			return 0;
		heap_begin = heap_now = (uint64_t)at;
		heap_end = heap_begin + size;
	}
	if (to < heap_begin || to > heap_end)
		return heap_now;
	uint64_t mapped = (heap_now + PAGE - 1) & ~(PAGE - 1), wants = (to + PAGE - 1) & ~(PAGE - 1);
	if (wants > mapped && mprotect((void *)mapped, wants - mapped, PROT_READ | PROT_WRITE) < 0)
		return heap_now;
	if (wants < mapped && mmap((void *)wants, mapped - wants, PROT_NONE,
	                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED)
		return heap_now;
	if (to < heap_now) /* the upper part is zero */
		memset((void *)to, 0, (wants < heap_now ? wants : heap_now) - to);
	return heap_now = to;
}

static uint64_t heap_set(uint64_t to)
{
	pthread_mutex_lock(&heap_lock);
	uint64_t result = heap_move(to);
	pthread_mutex_unlock(&heap_lock);
	return result;
}

/* ---- /proc/self/exe: the program, not the loader ---- */
static bool names_self(const char *path)
{
	char own[32];

	if (!path || strncmp(path, "/proc/", 6) != 0)
		return false;
	snprintf(own, sizeof(own), "/proc/%d/exe", (int)getpid());
	return strcmp(path, "/proc/self/exe") == 0 || strcmp(path, "/proc/thread-self/exe") == 0 || strcmp(path, own) == 0;
}

static const char *path_meant(const char *path)
{
	return names_self(path) ? program_path : path;
}

static long link_read(long directory, const char *path, char *to, long size)
{
	if (!names_self(path))
		return raw(SYS_readlinkat, directory, (long)path, (long)to, size, 0, 0);
	if (size <= 0)
		return -EINVAL;
	long length = (long)strlen(program_path);
	if (length > size)
		length = size;
	memcpy(to, program_path, (size_t)length);
	return length;
}

/* ---- memory that can be executed ---- */
static long memory_map(struct frame *frame)
{
	long prot = (long)frame->argument[2], flags = (long)frame->argument[3];
	long at = raw(SYS_mmap, (long)frame->argument[0], (long)frame->argument[1], prot, flags, (long)frame->argument[4],
	              (long)frame->argument[5]);

	if (at > 0 && (prot & PROT_EXEC) && !(flags & (MAP_ANONYMOUS | MAP_SHARED)))
		code_mapped((uint8_t *)at, frame->argument[1], (int)frame->argument[4], frame->argument[5], (int)prot);
	else if (at > 0 && (prot & PROT_EXEC))
		code_made((const uint8_t *)at, frame->argument[1], (prot & PROT_WRITE) || (flags & MAP_SHARED));
	return at;
}

static long memory_protect(long number, uint64_t at, uint64_t length, long prot, long key)
{
	long result = raw(number, (long)at, (long)length, prot, key, 0, 0);

	if (result == 0 && (prot & PROT_EXEC) && (prot & PROT_READ))
		code_made((const uint8_t *)at, length, prot & PROT_WRITE);
	return result;
}

static long tid_address(uint32_t *at)
{
	this_block()->clear_tid = at;
	return raw(SYS_gettid, 0, 0, 0, 0, 0, 0);
}

static long clone_call(struct frame *frame)
{
	const uint64_t *with = frame->argument;

	return thread_clone(frame, with[0], with[1], (uint32_t *)with[2], (uint32_t *)with[CLONE_CHILD_TID],
	                    with[CLONE_TLS]);
}

/* A call of a child in its parent's memory: see bare_make(). */
static long bare_call(struct frame *frame)
{
	const long a = (long)frame->argument[0], b = (long)frame->argument[1], c = (long)frame->argument[2];
	const long number = frame_number(frame);

#ifdef SYS_vfork
	if (number == SYS_vfork)
		return thread_clone(frame, CLONE_VM | CLONE_VFORK | SIGCHLD, 0, NULL, NULL, 0);
#endif
	if (number == SYS_clone && (a & CLONE_VM) && !(a & CLONE_THREAD))
		return clone_call(frame);
	if (number == SYS_clone3)
		return -ENOSYS;
	if (number == SYS_execve)
		return shim->execute_bare(AT_FDCWD, path_meant((const char *)a), (char **)b, (char **)c, 0);
	if (number == SYS_execveat)
		return shim->execute_bare((int)a, (const char *)b, (char **)c, (char **)frame->argument[3],
		                          (int)frame->argument[4]);
#ifdef SYS_dup2
	const bool duplicates = number == SYS_dup || number == SYS_dup2 || number == SYS_dup3;
#else
	const bool duplicates = number == SYS_dup || number == SYS_dup3;
#endif
	if (this_block()->vforked && (duplicates || (number == SYS_fcntl && (b == F_DUPFD || b == F_SETFD))))
		shim->inherit_fd((int)a);
	return raw(number, a, b, c, (long)frame->argument[3], (long)frame->argument[4], (long)frame->argument[5]);
}

/* A call by the shim, which looks at the number; but a child in its parent's memory has numbers of its own. */
static uint64_t file_open(const struct block *block, long number, long directory, const char *path, long flags,
                          long mode)
{
	path = path_meant(path);
	if (block->bare)
		return (uint64_t)raw(number, directory, (long)path, flags, mode, 0, 0);
	BY_SHIM(syscall(number, directory, path, flags, mode));
}

/* The strict mode of seccomp kills a thread that makes another call than read(2), write(2) and exit(2). */
static uint64_t strict_enter(const struct frame *frame)
{
	struct block *block = this_block();

	raw(SYS_set_tid_address, (long)block->clear_tid, 0, 0, 0, 0, 0); /* thread_exit() does this, but may not any more */
	long result = syscall(frame_number(frame), frame->argument[0], frame->argument[1], frame->argument[2],
	                      frame->argument[3], frame->argument[4], frame->argument[5]);
	block->strict = result == 0;
	BY_SHIM(result);
}

static uint64_t call_make(struct frame *frame, const struct block *block)
{
	const long a = (long)frame->argument[0], b = (long)frame->argument[1], c = (long)frame->argument[2];
	const long number = frame_number(frame);

	switch (number) {
	case SYS_exit: thread_exit(a); break;
	case SYS_brk: return heap_set((uint64_t)a);
	case SYS_readlinkat: return (uint64_t)link_read(a, (const char *)b, (char *)c, (long)frame->argument[3]);
	case SYS_openat: return file_open(block, number, a, (const char *)b, c, (long)frame->argument[3]);
#ifdef SYS_open /* and others that newer machines do not have */
	case SYS_arch_prctl: return (uint64_t)thread_pointers(frame);
	case SYS_readlink: return (uint64_t)link_read(AT_FDCWD, (const char *)a, (char *)b, c);
	case SYS_open: return file_open(block, SYS_openat, AT_FDCWD, (const char *)a, b, c);
#endif
	}
	if (block->bare)
		return (uint64_t)bare_call(frame);
	switch (number) {
	case SYS_read: BY_SHIM(read((int)a, (void *)b, (size_t)c));
	case SYS_write: BY_SHIM(write((int)a, (const void *)b, (size_t)c));
#ifdef SYS_fork
	case SYS_fork: return (uint64_t)thread_clone(frame, SIGCHLD, 0, NULL, NULL, 0);
	case SYS_vfork: return (uint64_t)thread_clone(frame, CLONE_VM | CLONE_VFORK | SIGCHLD, 0, NULL, NULL, 0);
#endif
	case SYS_clone: return (uint64_t)clone_call(frame);
	case SYS_clone3: return (uint64_t)thread_clone3(frame, (const void *)a, (uint64_t)b);
	case SYS_set_tid_address: return (uint64_t)tid_address((uint32_t *)a);
	case SYS_rt_sigaction: return (uint64_t)signal_action((int)a, (const void *)b, (void *)c, frame->argument[3]);
	case SYS_mmap: return (uint64_t)memory_map(frame);
	case SYS_mprotect:
	case SYS_pkey_mprotect:
		return (uint64_t)memory_protect(number, (uint64_t)a, (uint64_t)b, c, (long)frame->argument[3]);
	case SYS_prctl:
		if (a == PR_SET_SECCOMP && b == SECCOMP_MODE_STRICT)
			return strict_enter(frame);
		break;
	case SYS_seccomp:
		if (a == SECCOMP_SET_MODE_STRICT)
			return strict_enter(frame);
		break;
	case SYS_execve: BY_SHIM(execve(path_meant((const char *)a), (char *const *)b, (char *const *)c));
	}
	BY_SHIM(syscall(number, a, b, c, frame->argument[3], frame->argument[4], frame->argument[5]));
}

/* Handlers that never returned have ended the calls that they came into. */
static bool levels_forget(struct block *block, uint64_t stack)
{
	const uint32_t before = block->levels_len;

	for (; block->levels_len; block->levels_len--) {
		const struct level *level = &block->levels[block->levels_len - 1];
		if (stack >= level->low && stack <= level->high)
			break;
		block->top = level->top;
		block->diverted = NULL;
	}
	return block->levels_len < before;
}

__attribute__((used, visibility("hidden"))) uint64_t loader_call(struct frame *frame)
{
	struct block *block = this_block();

	if (__builtin_expect(block->levels_len, 0) && levels_forget(block, frame->sp)) {
		frame->back -= HOOKED_LENGTH; /* the call is made again, from higher up on our stack */
		return frame_unchanged(frame);
	}
	uint64_t result = block->diverted == frame ? (uint64_t)-EINTR : call_make(frame, block);
	if (HANDLERS_FIND_REGISTERS)
		block->leaving = frame;
	block->inside = INSIDE_SIGNAL; /* no handler sees this call any more */
	if (__builtin_expect(block->diverted != frame, 1))
		return result;
	block->diverted = NULL;
	if (result != (uint64_t)-EINTR)
		return result; /* too late: it has been made */
	call_divert(frame, block);
	return frame_unchanged(frame);
}
