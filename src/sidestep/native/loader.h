/*
 * loader.h - starts a program that has no C library of ours to preload the shim into: static, Go, musl.
 *
 * The loader is a small program of its own C library, with the shim. It maps the program beside itself, replaces the system
 * calls in its code by jumps to loader_entry, and enters it. There the stack and the thread pointer become those of the
 * loader's thread, and loader_call() makes the call by the shim, as if it came from a program of this C library.
 *
 *     program's code ── jmp ──► trampoline ──► loader_entry ──► loader_call() ──► syscall() of the shim
 *                     kernel ──► loader_signal_entry ──► the shim's trampoline ──► loader_handler ──► program's handler
 *
 * %gs names a block for each thread, of which the entry takes stack and thread pointer: the program's libraries leave %gs alone.
 */
#ifndef SIDESTEP_LOADER_H
#define SIDESTEP_LOADER_H

/* struct frame and struct block, for loader_entry.S */
#define FRAME_RAX 96
#define FRAME_FS 104
#define BLOCK_TOP 8
#define BLOCK_FS 16
#define BLOCK_INSIDE 24
#define BLOCK_PROGRAM_FS 32
#define BLOCK_PROGRAM_SP 40
#define BLOCK_LOW 48
#define BLOCK_HIGH 56
#define BLOCK_EXIT_SP 64
#define CONTEXT_RSP 160 /* of a ucontext_t: uc_mcontext.gregs[REG_RSP] */
#define INSIDE_SIGNAL 1 /* else, or 0, `inside` is a frame */
#define SYSCALL_LENGTH 2
#define CALLS_MAX 512   /* system calls with a larger number are not looked at */

#ifndef __ASSEMBLER__
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <assert.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <ucontext.h>

#include "loaded.h"

/* The program's registers at a call, as loader_entry pushes them. */
struct frame {
	uint64_t r15, r14, r13, r12, rbp, rbx, r9, r8, r10, rdx, rsi, rdi, rax;
	uint64_t fs, back, rsp;
};
static_assert(offsetof(struct frame, rax) == FRAME_RAX && offsetof(struct frame, fs) == FRAME_FS, "loader_entry.S");

/*
 * A handler that came into a call of ours, and makes calls of its own below it. It may never return (siglongjmp): then that call
 * is over, too, as a call that is made above the handler's stack tells.
 */
#define LEVELS_MAX 8
struct level {
	uint64_t top;       /* of our stack, as it was */
	uint64_t low, high; /* where the stack pointer is while the handler runs */
};

/* What %gs names. */
struct block {
	struct block *self;
	uint64_t top;        /* where the stack of the next call begins */
	uint64_t fs;         /* the thread pointer of our C library */
	volatile uint64_t inside; /* our code runs: the frame of a call, or INSIDE_SIGNAL; the next two are the program's */
	uint64_t program_fs;
	uint64_t program_sp;
	uint64_t low, high;  /* our stack */
	uint64_t exit_sp;    /* where a thread that ends goes back to */
	uint32_t *clear_tid; /* as set_tid_address(2) has it */
	bool bare;           /* a child in its parent's memory: its calls go to the kernel, not to the shim */
	bool lends;          /* and its parent waits, so that the parent's connections can be spoken for */
	uint64_t mask;       /* of signals, for a bare child's beginning */
	struct frame *interrupted; /* the call that a signal has come into, as its handler is to see it */
	struct frame *volatile diverted; /* a call that a handler has told to go on elsewhere, if it has done nothing yet: there */
	int64_t diverted_to[NGREG];
	uint32_t levels_len;
	struct level levels[LEVELS_MAX];
};
static_assert(offsetof(struct block, top) == BLOCK_TOP && offsetof(struct block, fs) == BLOCK_FS &&
              offsetof(struct block, inside) == BLOCK_INSIDE && offsetof(struct block, program_fs) == BLOCK_PROGRAM_FS &&
              offsetof(struct block, program_sp) == BLOCK_PROGRAM_SP && offsetof(struct block, low) == BLOCK_LOW &&
              offsetof(struct block, high) == BLOCK_HIGH && offsetof(struct block, exit_sp) == BLOCK_EXIT_SP, "loader_entry.S");

static inline long raw(long number, long a, long b, long c, long d, long e, long f)
{
	register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;
	long result;

	__asm__ volatile("syscall"
	                 : "=a"(result)
	                 : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
	                 : "rcx", "r11", "memory");
	return result;
}

static inline struct block *this_block(void)
{
	struct block *block;

	__asm__ volatile("movq %%gs:0, %0" : "=r"(block));
	return block;
}

static inline uint64_t thread_pointer(void)
{
	uint64_t at;

	__asm__ volatile("rdfsbase %0" : "=r"(at));
	return at;
}

/* ---- loader_entry.S ---- */
extern char loader_entry_zmm[], loader_entry_ymm[], loader_entry_xmm[], loader_signal_entry[], loader_restorer[];
extern char loader_entry_zmm_inside[], loader_entry_ymm_inside[], loader_entry_xmm_inside[]; /* `inside` has just been set */
void loader_enter(struct frame *frame, struct block *block); /* into the program; returns when its thread ends */
void loader_leave(struct block *block) __attribute__((noreturn));
/* Calls the program's handler, on its own stack unless that is 0. */
void loader_to_handler(uint64_t handler, int sig, siginfo_t *info, void *context, uint64_t stack);
/* clone(2) without CLONE_THREAD, in our memory; the child goes to the program by `frame`, on the stack below it */
long loader_clone(long flags, struct frame *frame, uint32_t *parent_tid, uint32_t *child_tid, struct block *block);

/* ---- loader_decode.c ---- */
struct instruction {
	uint8_t length;
	uint8_t opcode; /* offset of its first byte behind the prefixes */
	uint8_t modrm;  /* offset; 0: none */
	bool relative;  /* to its own address, by the four bytes behind modrm */
};
bool decode(const uint8_t *at, const uint8_t *end, struct instruction *found); /* false: it is none */
enum flow { FLOW_ON, FLOW_BRANCH, FLOW_CALL, FLOW_END };
/* What an instruction does to the flow, and where it goes; NULL: that is not known, or nowhere. */
enum flow flow_of(const uint8_t *at, const struct instruction *is, const uint8_t **to);

/* ---- loader_sites.c ---- */
struct code {
	uint8_t *begin, *end; /* of code and nothing else */
	bool padded;          /* its functions are aligned, and have int3 between them, as Go's */
};
#define LEFT_MAX 16
struct sites {
	uint32_t found, idle, patched; /* of `found` so many make no call that matters */
	uint32_t left_len;              /* and so many could not be replaced */
	const uint8_t *left[LEFT_MAX];  /* the first of them */
};
enum { WANTED_OF_KNOWN = 1, WANTED_ALWAYS }; /* only if its first argument is a descriptor that the shim knows; 0: never */
extern uint8_t wanted[CALLS_MAX];
void sites_patch(const struct code *code, struct sites *sites); /* writes to it: to be writable, and not run yet */

/* ---- loader_trampoline.c ---- */
extern const char *loader_entry, *loader_inside; /* for this machine's registers */
#define UNKNOWN -1 /* the number of a call */
#define SITE(back) (((uint64_t *)(back))[-1]) /* of the call that goes back there */
#define HOOKED_LENGTH 29 /* before there, the trampoline comes in */
void jump_write(uint8_t *at, const uint8_t *to);
/*
 * What stands for the call at `site`: instructions from `begin` to it, the call, those from behind it up to `end`, and the
 * way back. With `set` it brings the number, too, whose instruction was replaced. NULL: no room, or they cannot be moved.
 */
uint8_t *trampoline(uint8_t *site, long number, const uint8_t *begin, const uint8_t *end, bool set);
/* For handlers: the call that a program seems to be in while it is in a trampoline, or what is behind that; 0: it is in none. */
uint64_t trampoline_site(uint64_t at);
bool trampolines_finish(void); /* what has been written can be executed, and no more be written; false: it cannot */

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
long thread_clone(struct frame *frame, uint64_t flags, uint64_t stack, uint32_t *parent_tid, uint32_t *child_tid, uint64_t tls);
long thread_clone3(struct frame *frame, const void *arguments, uint64_t size);
void thread_exit(long status);
void thread_block_init(struct block *block, uint64_t low, uint64_t high);

/* ---- loader_signal.c ---- */
long signal_action(int sig, const void *act, void *old, size_t size);
int kernel_action(int sig, const struct sigaction *act, struct sigaction *old);
void call_divert(struct frame *frame, struct block *block); /* its frame becomes what block.diverted_to says */

/* ---- loader_calls.c ---- */
extern const char *program_path; /* resolved */
extern const struct loaded *shim;

#endif
#endif
