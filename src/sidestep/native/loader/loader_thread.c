/* loader_thread.c - threads and children of the program: each thread is one of our C library, too. */
#include "loader.h"

#include <errno.h>
#include <linux/futex.h>
#include <linux/sched.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define STACK_SIZE (512ul << 10)
#define BARE_STACK_SIZE (256ul << 10)
#define SPARE 2048 /* above the stack of calls, for what is on it already */
#define ALL_SIGNALS ~0ul
#define FORK_FLAGS (CSIGNAL | CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID | CLONE_PARENT_SETTID | CLONE_SETTLS)

#define SHARES (CLONE_VM | CLONE_VFORK)

struct birth {
	struct frame frame;
	uint64_t mask;
	uint32_t *parent_tid, *child_tid, *clear_tid;
	_Atomic uint32_t tid; /* the thread has taken all this */
};

static uint64_t signals_set(uint64_t mask)
{
	uint64_t before = 0;

	raw(SYS_rt_sigprocmask, SIG_SETMASK, (long)&mask, (long)&before, sizeof(mask), 0, 0);
	return before;
}

void thread_block_init(struct block *block, uint64_t low, uint64_t high)
{
	*block = (struct block){
		.self = block,
		.thread_pointer = thread_pointer(),
		.low = low,
		.high = high,
		.top = (high - SPARE) & ~63ul,
	};
}

static void enter(struct frame *frame, struct block *block, uint64_t mask)
{
	block->leaving = frame;
	block->inside = INSIDE_SIGNAL;
	block->program_tp = frame->thread_pointer;
	block->program_sp = frame->sp;
	block_set(block);
	signals_set(mask);
	loader_enter(frame, block);
}

/* Clears the word of a thread that has ended, like the kernel. */
static void tid_clear(struct block *block)
{
	if (!block->clear_tid)
		return;
	__atomic_store_n(block->clear_tid, 0, __ATOMIC_SEQ_CST);
	raw(SYS_futex, (long)block->clear_tid, FUTEX_WAKE, 1, 0, 0, 0);
}

static void *thread_run(void *argument)
{
	struct birth *birth = argument;
	struct frame frame = birth->frame;
	struct block block;
	uint32_t tid = (uint32_t)raw(SYS_gettid, 0, 0, 0, 0, 0, 0);
	uint64_t mask = birth->mask;

	thread_block_init(&block, (uint64_t)&frame - (STACK_SIZE - (64 << 10)), (uint64_t)&frame);
	block.clear_tid = birth->clear_tid;
	if (birth->parent_tid)
		*birth->parent_tid = tid;
	if (birth->child_tid)
		*birth->child_tid = tid;
	birth->tid = tid;
	raw(SYS_futex, (long)&birth->tid, FUTEX_WAKE_PRIVATE, 1, 0, 0, 0); /* the word may be gone: then no thread wakes */
	enter(&frame, &block, mask);
	tid_clear(&block);
	return NULL;
}

static long thread_make(const struct frame *frame, uint64_t flags, uint64_t stack, uint32_t *parent_tid,
                        uint32_t *child_tid, uint64_t tls)
{
	struct birth birth = {
		.frame = *frame,
		.parent_tid = flags & CLONE_PARENT_SETTID ? parent_tid : NULL,
		.child_tid = flags & CLONE_CHILD_SETTID ? child_tid : NULL,
		.clear_tid = flags & CLONE_CHILD_CLEARTID ? child_tid : NULL,
	};
	pthread_attr_t attributes;
	pthread_t thread;
	uint32_t tid = 0;

	frame_result(&birth.frame, 0);
	if (stack)
		birth.frame.sp = stack;
	if (flags & CLONE_SETTLS)
		birth.frame.thread_pointer = tls;
	birth.mask = signals_set(ALL_SIGNALS);
	pthread_attr_init(&attributes);
	pthread_attr_setstacksize(&attributes, STACK_SIZE);
	pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
	int error = pthread_create(&thread, &attributes, thread_run, &birth);
	pthread_attr_destroy(&attributes);
	while (!error && !(tid = birth.tid))
		raw(SYS_futex, (long)&birth.tid, FUTEX_WAIT_PRIVATE, 0, 0, 0, 0);
	signals_set(birth.mask);
	return error ? -error : (long)tid;
}

__attribute__((used, visibility("hidden"))) void loader_bare_start(struct block *block)
{
	block_set(block);
	signals_set(block->mask);
}

/* Beginning of a child of clone3_bare(). */
__attribute__((used, visibility("hidden"))) void loader_bare_run(struct block *block)
{
	block_set(block);
	signals_set(block->mask);
	loader_enter((struct frame *)block - 1, block);
}

static long clone3_bare(struct clone_args *with, struct block *block)
{
	with->flags &= ~(uint64_t)CLONE_SETTLS;
	with->stack = block->low;
	with->stack_size = (block->high & ~63ul) - block->low;
	return machine_clone3(with, block);
}

/*
 * A child in our memory that is no thread, as vfork(2) and posix_spawn(3) make. It runs on a stack of its own, as the parent
 * may go on. It must not touch the shim's records of its parent's descriptors: its own are others. It executes a program
 * soon.
 */
static long bare_make(const struct frame *frame, uint64_t flags, uint64_t stack, uint32_t *parent_tid,
                      uint32_t *child_tid, uint64_t tls, struct clone_args *with)
{
	if ((flags & CLONE_WITH_VM) != CLONE_WITH_VM)
		return -EINVAL;
	struct block *own = this_block();
	char *low = mmap(NULL, BARE_STACK_SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (low == MAP_FAILED)
		return -ENOMEM;
	struct block *block = (struct block *)(low + BARE_STACK_SIZE) - 1;
	struct frame *child = (struct frame *)block - 1;
	*child = *frame;
	frame_result(child, 0);
	if (stack)
		child->sp = stack;
	if (flags & CLONE_SETTLS)
		child->thread_pointer = tls;
	thread_block_init(block, (uint64_t)low, (uint64_t)child);
	block->bare = true;
	block->vforked = flags & CLONE_VFORK;
	block->program_tp = child->thread_pointer;
	block->program_sp = child->sp;
	block->leaving = child;
	block->inside = INSIDE_SIGNAL;
	(block->vforked ? shim->inherit_begin : shim->release)();
	block->mask = signals_set(ALL_SIGNALS);
	long result = with ? clone3_bare(with, block)
	                   : loader_clone((long)(flags & ~(uint64_t)CLONE_SETTLS), child, parent_tid, child_tid, block);
	block_set(own); /* the child has set it, where it is found by memory */
	signals_set(block->mask);
	if (block->vforked)
		shim->inherit_end();
	if (result < 0 || (flags & CLONE_VFORK))
		munmap(low, BARE_STACK_SIZE);
	return result;
}

static long clone3_fork(struct clone_args with)
{
	with.flags &= ~(uint64_t)(SHARES | CLONE_SETTLS | CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID);
	with.stack = with.stack_size = 0;
	return syscall(SYS_clone3, &with, sizeof(with));
}

static long fork_make(struct frame *frame, uint64_t flags, uint64_t stack, uint32_t *parent_tid, uint32_t *child_tid,
                      uint64_t tls, struct clone_args *with)
{
	struct block *block = this_block();
	pid_t child;

	if (with)
		child = (pid_t)clone3_fork(*with);
	else if (!(flags & ~(uint64_t)FORK_FLAGS) && (flags & CSIGNAL) == SIGCHLD)
		child = fork();
	else /* a call with namespaces and the like */
		child = (pid_t)syscall(
			SYS_clone,
			flags & ~(uint64_t)(CLONE_SETTLS | CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID | CLONE_PARENT_SETTID), 0,
			parent_tid, 0, 0);
	if (child < 0)
		return -errno;
	if (child) {
		if (flags & CLONE_PARENT_SETTID)
			*parent_tid = (uint32_t)child;
		return child;
	}
	block->clear_tid = NULL;
	if (flags & CLONE_CHILD_SETTID)
		*child_tid = (uint32_t)raw(SYS_gettid, 0, 0, 0, 0, 0, 0);
	if (flags & CLONE_CHILD_CLEARTID)
		block->clear_tid = child_tid;
	if (flags & CLONE_SETTLS)
		frame->thread_pointer = tls;
	if (stack)
		frame->sp = stack;
	return 0;
}

/*
 * A child of vfork(2), or of Go, which makes it as vfork(2) does, runs on its parent's stack until it executes. It duplicates
 * sockets and executes their reader, so the shim keeps records for it. posix_spawn(3) of C libraries has it report errors by
 * memory.
 */
static bool may_fork(uint64_t flags, uint64_t stack)
{
	return (flags & SHARES) == SHARES && !stack && !this_block()->bare &&
	       !(flags & (CLONE_FILES | CLONE_FS | CLONE_SIGHAND));
}

static long child_make(struct frame *frame, uint64_t flags, uint64_t stack, uint32_t *parent_tid, uint32_t *child_tid,
                       uint64_t tls, struct clone_args *with)
{
	if (may_fork(flags, stack) && shim->holds()) {
		long result = fork_make(frame, flags & ~(uint64_t)SHARES, stack, parent_tid, child_tid, tls, with);
		if (result != -ENOMEM) /* a child that shares unwritten memory has enough */
			return result;
	}
	if (flags & CLONE_VM)
		return bare_make(frame, flags, stack, parent_tid, child_tid, tls, with);
	return fork_make(frame, flags, stack, parent_tid, child_tid, tls, with);
}

long thread_clone(struct frame *frame, uint64_t flags, uint64_t stack, uint32_t *parent_tid, uint32_t *child_tid,
                  uint64_t tls)
{
	if (flags & CLONE_THREAD)
		return thread_make(frame, flags, stack, parent_tid, child_tid, tls);
	return child_make(frame, flags, stack, parent_tid, child_tid, tls, NULL);
}

/* The arguments, as the kernel takes them from a program that knows more, or fewer, of them than we do. */
static long clone_args_take(struct clone_args *with, const void *arguments, uint64_t size)
{
	const uint8_t *each = arguments;

	if (size < CLONE_ARGS_SIZE_VER0)
		return -EINVAL;
	for (uint64_t i = sizeof(*with); i < size; i++)
		if (each[i])
			return -E2BIG;
	*with = (struct clone_args){0};
	memcpy(with, arguments, size < sizeof(*with) ? size : sizeof(*with));
	return with->exit_signal & ~(uint64_t)CSIGNAL ? -EINVAL : 0;
}

/*
 * Like clone(2), if that can say it. Making a thread is our task, and the kernel must not reset handlers. In such a case the
 * caller is to try clone(2), as on a kernel without clone3(2).
 */
long thread_clone3(struct frame *frame, const void *arguments, uint64_t size)
{
	struct clone_args with;
	const long error = clone_args_take(&with, arguments, size);

	if (error)
		return error;
	const uint64_t flags = with.flags, stack = with.stack ? with.stack + with.stack_size : 0;
	uint32_t *parent_tid = (uint32_t *)with.parent_tid, *child_tid = (uint32_t *)with.child_tid;
	const bool more =
		flags >> 32 || flags & CSIGNAL || with.set_tid_size || (flags & CLONE_PIDFD && flags & CLONE_PARENT_SETTID);
	if (more && (flags & (CLONE_THREAD | CLONE_CLEAR_SIGHAND)))
		return -ENOSYS;
	if (more)
		return child_make(frame, flags, stack, parent_tid, child_tid, with.tls, &with);
	return thread_clone(frame, flags | with.exit_signal, stack,
	                    flags & CLONE_PIDFD ? (uint32_t *)with.pidfd : parent_tid, child_tid, with.tls);
}

/* True if the thread holds locks that the kernel is to hand on at its end: set_robust_list(2). */
static bool holds_robust(void)
{
	const struct robust_list_head *head = NULL;
	size_t length;

	return raw(SYS_get_robust_list, 0, (long)&head, (long)&length, 0, 0, 0) == 0 && head &&
	       (head->list.next != &head->list || head->list_op_pending);
}

/*
 * exit(2): of a thread that is not the first, by way of our C library, which frees what it has. It does not where the kernel is to
 * do more than to clear the thread's number.
 */
void thread_exit(long status)
{
	struct block *block = this_block();

	if (block->strict)
		raw(SYS_exit, status, 0, 0, 0, 0, 0);
	if (!block->bare && block->exit_sp && !holds_robust() &&
	    raw(SYS_gettid, 0, 0, 0, 0, 0, 0) != raw(SYS_getpid, 0, 0, 0, 0, 0, 0)) {
		signals_set(ALL_SIGNALS);
		raw(SYS_set_robust_list, 0, sizeof(struct robust_list_head), 0, 0, 0,
		    0); /* the program's, which it may free now */
		loader_leave(block);
	}
	if (!block->bare)
		raw(SYS_set_tid_address, (long)block->clear_tid, 0, 0, 0, 0, 0);
	raw(SYS_exit, status, 0, 0, 0, 0, 0);
}
