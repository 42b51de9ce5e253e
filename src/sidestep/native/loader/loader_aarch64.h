/*
 * loader_aarch64.h - what the loader's files share that depends on this machine; see loader.h.
 *
 * The thread pointer, TPIDR_EL0, is always ours. The program's own value is in the thread's block, which a thread-local
 * variable of ours names. Instructions of the program that read or write it are replaced, as its calls are.
 */
#ifndef SIDESTEP_LOADER_AARCH64_H
#define SIDESTEP_LOADER_AARCH64_H

/* struct frame, for loader_entry_aarch64.S */
#define FRAME_X16 128
#define FRAME_TP 248
#define FRAME_BACK 256
#define FRAME_SP 264
#define FRAME_LENGTH 272
#define SPILL 64 /* see put_call() in loader_sites_aarch64.c */
#define SPILL_BACK 16
#define PLAIN 8 /* bytes from where a trampoline comes back to where it makes the call itself */
#define CLONE_ARGS_LENGTH 88 /* struct clone_args */
#define CONTEXT_X 184 /* offset in a ucontext_t: uc_mcontext.regs */
#define SYSCALL_LENGTH 4
#define RED_ZONE 128 /* below its stack pointer: SPILL, and a word that Go keeps there */

#ifndef __ASSEMBLER__
#include <sys/auxv.h>

#define MACHINE EM_AARCH64
#define PAGE getauxval(AT_PAGESZ)
#define CLONE_TLS 3 /* number of the argument of clone(2): CONFIG_CLONE_BACKWARDS */
#define CLONE_CHILD_TID 4
#define HANDLERS_FIND_REGISTERS 1 /* registers are as the program had them: Go has its thread in x28 */
#define CLONE_WITH_VM CLONE_VFORK /* flag of a child in our memory: else both would have one loader_block */
#define REACH 0x7ff0000l /* reach of a branch, and some less */
#define RESTORER_FLAG 0 /* no flag: the restorer is that of the vDSO, which unwinders know */
#define RESTORER_OURS 0
#define CALLS_OF_MACHINE

/* The program's registers at a call. */
struct frame {
	union {
		uint64_t x[31];
		uint64_t argument[6];
	};
	uint64_t thread_pointer;
	uint64_t
		back; /* place in a trampoline, which expects x16 and x17 in SPILL bytes below the stack pointer; or loader_elsewhere */
	uint64_t sp;
};
static_assert(offsetof(struct frame, x[16]) == FRAME_X16 && offsetof(struct frame, thread_pointer) == FRAME_TP &&
                  offsetof(struct frame, back) == FRAME_BACK && offsetof(struct frame, sp) == FRAME_SP &&
                  sizeof(struct frame) == FRAME_LENGTH,
              "loader_entry_aarch64.S");

/* The beginning of a mcontext_t. */
struct registers {
	uint64_t fault_address, x[31], sp, pc;
};
static_assert(offsetof(struct registers, x) == offsetof(mcontext_t, regs) &&
                  offsetof(struct registers, pc) == offsetof(mcontext_t, pc),
              "asm/sigcontext.h");
static_assert(offsetof(ucontext_t, uc_mcontext.regs) == CONTEXT_X, "loader_entry_aarch64.S");

extern __thread struct block *loader_block;
extern const void *loader_known; /* shim->known */
extern uint32_t loader_known_len;
extern char loader_elsewhere[]; /* goes on at x17 */
extern char loader_entry_exit[];
extern char loader_entry[], loader_entry_sme[], loader_entry_switched[], loader_entry_filled[], loader_entry_inside[];

static inline struct registers *registers_of(void *context)
{
	return (struct registers *)(void *)&((ucontext_t *)context)->uc_mcontext;
}

static inline uint64_t program_counter(const struct registers *registers)
{
	return registers->pc;
}

static inline long frame_number(const struct frame *frame)
{
	return (long)frame->x[8];
}

static inline void frame_result(struct frame *frame, uint64_t result)
{
	frame->x[0] = result;
}

/* The register that loader_call() gives a value to. */
static inline uint64_t frame_unchanged(const struct frame *frame)
{
	return frame->x[0];
}

/* A value in x17 is lost there, as a veneer of the linker may do to what is called (AAPCS64, 6.1.1). */
static inline void frame_begin(struct frame *frame, uint64_t at, uint64_t stack)
{
	frame->x[17] = at;
	frame->back = (uint64_t)loader_elsewhere;
	frame->sp = stack;
}

static inline long raw(long number, long a, long b, long c, long d, long e, long f)
{
	register long x8 __asm__("x8") = number;
	register long x0 __asm__("x0") = a, x1 __asm__("x1") = b, x2 __asm__("x2") = c;
	register long x3 __asm__("x3") = d, x4 __asm__("x4") = e, x5 __asm__("x5") = f;

	__asm__ volatile("svc #0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
	return x0;
}

static inline struct block *this_block(void)
{
	return loader_block;
}

static inline void block_set(struct block *block)
{
	loader_block = block;
}

static inline uint64_t thread_pointer(void)
{
	return (uint64_t)__builtin_thread_pointer();
}

/* ---- loader_sites_aarch64.c ---- */
#define HOOKED_LENGTH 36 /* a trampoline has spilled before its end, and goes on */
enum place {
	PLACE_NONE, /* outside of trampolines */
	PLACE_BEFORE, /* the instruction that it stands for has not been done, or can be done again */
	PLACE_BEHIND,
	PLACE_SPILLED = 4 /* and x16 and x17 are on the stack */
};
enum place trampoline_place(uint64_t at, uint64_t *site);
#endif
#endif
