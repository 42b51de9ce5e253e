/*
 * loader_x86_64.h - what the loader's files share that depends on this machine; see loader.h.
 *
 * %gs names the block of a thread: the program's libraries leave it alone. The thread pointer, %fs, is the program's while its own
 * code runs, and ours in a call.
 */
#ifndef SIDESTEP_LOADER_X86_64_H
#define SIDESTEP_LOADER_X86_64_H

/* struct frame, for loader_entry_x86_64.S */
#define FRAME_RAX 96
#define FRAME_FS 104
#define CONTEXT_RSP 160 /* offset in a ucontext_t: uc_mcontext.gregs[REG_RSP] */
#define SYSCALL_LENGTH 2
#define RED_ZONE 128 /* below its stack pointer, which a program may use (System V ABI, 3.2.2) */

#ifndef __ASSEMBLER__
#define MACHINE EM_X86_64
#define PAGE 4096ul
#define CLONE_TLS 4 /* number of the argument of clone(2) */
#define CLONE_CHILD_TID 3
#define HANDLERS_FIND_REGISTERS 0 /* a program's handler needs none that the C library's does not keep */
#define CLONE_WITH_VM 0 /* flags that a child in our memory must have, too */
#define REACH 0x7fff0000l /* reach of a jump with 32 bits, and some less */
#define RESTORER_FLAG 0x04000000 /* SA_RESTORER */
#define RESTORER_OURS (uint64_t)loader_restorer
#define CALLS_OF_MACHINE \
	SYS_arch_prctl, SYS_dup2, SYS_epoll_create, SYS_epoll_wait, SYS_fork, SYS_open, SYS_poll, SYS_readlink, \
		SYS_select, SYS_vfork,

/* The program's registers at a call, as loader_entry pushes them. */
struct frame {
	uint64_t r15, r14, r13, r12, rbp, rbx;
	uint64_t argument[6]; /* rdi, rsi, rdx, r10, r8, r9 */
	uint64_t rax;
	uint64_t thread_pointer, back, sp;
};
static_assert(offsetof(struct frame, rax) == FRAME_RAX && offsetof(struct frame, thread_pointer) == FRAME_FS,
              "loader_entry_x86_64.S");

struct registers {
	greg_t at[NGREG];
};

extern char loader_restorer[];

static inline struct registers *registers_of(void *context)
{
	return (struct registers *)((ucontext_t *)context)->uc_mcontext.gregs;
}

static inline uint64_t program_counter(const struct registers *registers)
{
	return (uint64_t)registers->at[REG_RIP];
}

static inline long frame_number(const struct frame *frame)
{
	return (long)frame->rax;
}

static inline void frame_result(struct frame *frame, uint64_t result)
{
	frame->rax = result;
}

/* The register that loader_call() gives a value to. */
static inline uint64_t frame_unchanged(const struct frame *frame)
{
	return frame->rax;
}

static inline void frame_begin(struct frame *frame, uint64_t at, uint64_t stack)
{
	frame->back = at;
	frame->sp = stack;
}

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

static inline void block_set(struct block *block)
{
	__asm__ volatile("wrgsbase %0" : : "r"(block) : "memory");
}

static inline uint64_t thread_pointer(void)
{
	uint64_t at;

	__asm__ volatile("rdfsbase %0" : "=r"(at));
	return at;
}

#include "loader_decode_x86_64.h"

/* ---- loader_machine_x86_64.c ---- */
long thread_pointers(struct frame *frame); /* arch_prctl(2) */

/* ---- loader_trampoline_x86_64.c ---- */
extern const char *loader_entry, *loader_inside; /* entry for this CPU's registers; place where `inside` is just set */
#define UNKNOWN -1 /* the number of a call */
#define HOOKED_LENGTH 29 /* a trampoline comes in before that place */
void jump_write(uint8_t *at, const uint8_t *to);
/*
 * The trampoline of the call at `site`: instructions from `begin` to it, the call, those from behind it up to `end`, and the
 * way back. With `set` it brings the number, too, whose instruction was replaced. NULL: no room, or they cannot be moved.
 */
uint8_t *trampoline(uint8_t *site, long number, const uint8_t *begin, const uint8_t *end, bool set);
#endif
#endif
