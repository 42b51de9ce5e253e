/*
 * loader.h - starts a program that has no C library of ours to preload the shim into: static, Go, musl.
 *
 * The loader is a small program of its own C library, with the shim. It maps the program beside itself, replaces the system
 * calls in its code by jumps to loader_entry, and enters it. There the stack and the thread pointer become those of the
 * loader's thread, and loader_call() makes the call by the shim, as if it came from a program of this C library.
 *
 *     program's code ── jump ─► trampoline ──► loader_entry ──► loader_call() ──► syscall() of the shim
 *                     kernel ──► loader_signal_entry ──► the shim's trampoline ──► loader_handler ──► program's handler
 *
 * Each thread has a block, whose stack the entry takes. The rest depends on the machine: see loader_x86_64.h,
 * loader_aarch64.h, and files with such names.
 */
#ifndef SIDESTEP_LOADER_H
#define SIDESTEP_LOADER_H

#ifndef __ASSEMBLER__
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <assert.h>
#include <linux/sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <ucontext.h>
#endif

#if defined(__x86_64__)
#include "loader_x86_64.h"
#elif defined(__aarch64__)
#include "loader_aarch64.h"
#endif

/* struct block, for loader_entry_*.S */
#define BLOCK_TOP 8
#define BLOCK_THREAD_POINTER 16
#define BLOCK_INSIDE 24
#define BLOCK_PROGRAM_TP 32
#define BLOCK_PROGRAM_SP 40
#define BLOCK_LOW 48
#define BLOCK_HIGH 56
#define BLOCK_EXIT_SP 64
#define BLOCK_KEPT 72
#define INSIDE_SIGNAL 1 /* else, or 0, `inside` is a frame */
#define CALLS_MAX 512   /* system calls with a larger number are not looked at */
#define INTERCEPTED_IF_KNOWN 1 /* value: if its first argument is a descriptor that the shim knows; 0: never */
#define INTERCEPTED_ALWAYS 2

#ifndef __ASSEMBLER__
#include "loaded.h"

/*
 * A handler that came into a call of ours, and makes calls of its own below it. It may never return (siglongjmp): then that call
 * is over, too, as a call that is made above the handler's stack tells.
 */
#define LEVELS_MAX 8
struct level {
	uint64_t top;       /* top of our stack, as it was */
	uint64_t low, high; /* bounds of the stack while the handler runs */
};

struct block {
	struct block *self;
	uint64_t top;        /* place where the stack of the next call begins */
	uint64_t thread_pointer; /* thread pointer of our C library */
	volatile uint64_t inside; /* the frame of a call of ours, or INSIDE_SIGNAL; the next two are the program's */
	uint64_t program_tp;
	uint64_t program_sp;
	uint64_t low, high; /* bounds of our stack */
	uint64_t exit_sp; /* stack pointer to which a thread that ends goes back */
	const uint64_t *kept; /* registers that a handler finds as they were; NULL: they are in its context (aarch64) */
	const struct frame *leaving; /* the last call, which has been made, or what a thread begins with */
	uint32_t *clear_tid; /* address of set_tid_address(2) */
	bool bare; /* a child in its parent's memory: its calls go to the kernel, not to the shim */
	bool vforked; /* and its parent waits, so that the parent's connections can be spoken for */
	bool strict; /* true if it ends by the kernel's exit(2), before which nothing can be done */
	uint64_t mask; /* mask of signals, for a bare child's beginning */
	struct frame *interrupted; /* the call that a signal has come into, as its handler is to see it */
	struct frame
		*volatile diverted; /* a call that a handler has sent elsewhere, if it has done nothing yet: its new place */
	struct registers diverted_to;
	uint32_t levels_len;
	struct level levels[LEVELS_MAX];
};
static_assert(offsetof(struct block, top) == BLOCK_TOP &&
                  offsetof(struct block, thread_pointer) == BLOCK_THREAD_POINTER &&
                  offsetof(struct block, inside) == BLOCK_INSIDE &&
                  offsetof(struct block, program_tp) == BLOCK_PROGRAM_TP &&
                  offsetof(struct block, program_sp) == BLOCK_PROGRAM_SP && offsetof(struct block, low) == BLOCK_LOW &&
                  offsetof(struct block, high) == BLOCK_HIGH && offsetof(struct block, exit_sp) == BLOCK_EXIT_SP &&
                  offsetof(struct block, kept) == BLOCK_KEPT,
              "loader_entry_*.S");

/* ---- loader_entry_*.S ---- */
extern char loader_signal_entry[];
void loader_enter(struct frame *frame, struct block *block); /* enters the program; returns when its thread ends */
void loader_leave(struct block *block) __attribute__((noreturn));
/* Calls the program's handler, on its own stack unless that is 0. */
void loader_to_handler(uint64_t handler, int sig, siginfo_t *info, void *context, uint64_t stack);
/* clone(2) without CLONE_THREAD, in our memory; the child goes to the program by `frame`, on the stack below it */
long loader_clone(long flags, struct frame *frame, uint32_t *parent_tid, uint32_t *child_tid, struct block *block);

/* ---- loader_sites_*.c ---- */
struct code {
	uint8_t *begin, *end; /* bounds of code and nothing else */
	bool padded; /* functions are aligned, and have padding between them, as Go's */
};
#define LEFT_MAX 16
struct sites {
	uint32_t found, idle, patched; /* numbers of calls: in all, without effect, replaced */
	uint32_t left_len; /* and so many could not be replaced */
	bool takes_block; /* the code uses the register that names a thread's block */
	const uint8_t *left[LEFT_MAX]; /* the first of them */
};
extern uint8_t intercepted[CALLS_MAX];
void sites_patch(const struct code *code, struct sites *sites); /* writes to it: to be writable, and not run yet */
bool calls_in(const uint8_t *at, uint64_t length); /* true by its bytes, which may be others' */

/* ---- loader_pool.c ---- */
struct made {
	const uint8_t *site;
	const uint8_t *begin, *plain,
		*behind; /* the trampoline; in it what follows the call: one that is none of ours, and any */
};
#define POOL_SIZE 65536ul /* a multiple of all pages */
#define SITE(back) (((uint64_t *)(back))[-1]) /* site of the call that goes back there */
uint8_t *pool_room(const uint8_t *site, size_t length); /* room for a trampoline; NULL: none, near enough for a jump */
void pool_take(const struct made *made, const uint8_t *end); /* the trampoline, in the room that was given last */
const struct made *pool_find(uint64_t at); /* the trampoline that is there, for handlers; NULL: none */
bool trampolines_finish(void); /* makes new code executable, and no longer writable; false: it cannot */

/* ---- loader_machine_*.c ---- */
void *memory_there(void *memory); /* the memory that was asked for; without it nothing can be started */
const char *machine_missing(void); /* NULL, or what it takes */
/* clone3(2), else as loader_clone() */
long machine_clone3(struct clone_args *with, struct block *block);
/* Makes the context one of the program. True: ours is to be put back, unless the handler tells it to go on elsewhere. */
bool program_shown(const struct block *block, bool restarts, struct registers *now);
bool trampoline_left(
	struct registers *now); /* registers as before or behind it, if they were in one; false: they cannot be */
void call_ends(struct registers *now); /* called if the kernel would begin it again */
void call_divert(struct frame *frame, struct block *block); /* sets its frame to the values in block.diverted_to */

/* ---- loader_image.c ---- */
struct image {
	const char *path;
	uint64_t bias, entry, headers;
	uint16_t headers_count;
	char interpreter[256];
};
const char *image_load(struct image *image, struct sites *sites); /* NULL, or why not */
/* The program itself has mapped a file to execute, or has made code: where that is not covered, nothing leaves TCP any more. */
void code_mapped(uint8_t *at, uint64_t length, int fd, uint64_t offset, int protection);
void code_made(const uint8_t *at, uint64_t length, bool writable);

/* ---- loader_thread.c ---- */
long thread_clone(struct frame *frame, uint64_t flags, uint64_t stack, uint32_t *parent_tid, uint32_t *child_tid,
                  uint64_t tls);
long thread_clone3(struct frame *frame, const void *arguments, uint64_t size);
void thread_exit(long status);
void thread_block_init(struct block *block, uint64_t low, uint64_t high);

/* ---- loader_signal.c ---- */
uint64_t loader_signal(int sig, siginfo_t *info, void *context, uint64_t top, struct frame *interrupted);
long signal_action(int sig, const void *act, void *old, size_t size);
int kernel_action(int sig, const struct sigaction *act, struct sigaction *old);

/* ---- loader_calls.c ---- */
extern const char *program_path; /* resolved */
extern const struct loaded *shim;

#endif
#endif
