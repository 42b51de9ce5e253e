/* loader_machine_x86_64.c - what of calls and signals depends on this machine; see loader_x86_64.h. */
#include "loader.h"

#include <asm/prctl.h>
#include <errno.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/syscall.h>

#define HWCAP2_FSGSBASE 2 /* asm/hwcap2.h */

extern char loader_entry_zmm[], loader_entry_ymm[], loader_entry_xmm[];
extern char loader_entry_zmm_inside[], loader_entry_ymm_inside[], loader_entry_xmm_inside[];

static const int arguments[] = {REG_RDI, REG_RSI, REG_RDX, REG_R10, REG_R8, REG_R9};

const char *machine_missing(void)
{
	if (!(getauxval(AT_HWCAP2) & HWCAP2_FSGSBASE))
		return "the CPU or the kernel lacks FSGSBASE, by which a program's thread pointer is kept";
	__builtin_cpu_init();
	if (__builtin_cpu_supports("avx512bw")) {
		loader_entry = loader_entry_zmm;
		loader_inside = loader_entry_zmm_inside;
	} else if (__builtin_cpu_supports("avx512f")) {
		return "the CPU has AVX-512 without BW";
	} else if (__builtin_cpu_supports("avx")) {
		loader_entry = loader_entry_ymm;
		loader_inside = loader_entry_ymm_inside;
	} else {
		loader_entry = loader_entry_xmm;
		loader_inside = loader_entry_xmm_inside;
	}
	return NULL;
}

long thread_pointers(struct frame *frame)
{
	const long code = (long)frame->argument[0];
	const uint64_t address = frame->argument[1];

	switch (code) {
	case ARCH_SET_FS: frame->thread_pointer = address; return 0;
	case ARCH_GET_FS: *(uint64_t *)address = frame->thread_pointer; return 0;
	case ARCH_SET_GS: return -EPERM;
	case ARCH_GET_GS: *(uint64_t *)address = 0; return 0;
	}
	return raw(SYS_arch_prctl, code, (long)address, 0, 0, 0, 0);
}

long machine_clone3(struct clone_args *with, struct block *block)
{
	long result;

	__asm__ volatile("syscall\n\t"
	                 "testq %%rax, %%rax\n\t"
	                 "jnz 1f\n\t"
	                 "movq %%rbx, %%rdi\n\t"
	                 "call loader_bare_run\n"
	                 "1:"
	                 : "=a"(result)
	                 : "a"(SYS_clone3), "D"(with), "S"(sizeof(*with)), "b"(block)
	                 : "rcx", "r11", "memory");
	return result;
}

/* ---- what handlers see ---- */
static uint64_t trampoline_site(uint64_t at)
{
	const struct made *made = pool_find(at);
	const uint8_t *here = (const uint8_t *)at;

	return !made ? 0 : (uint64_t)made->site + (here == made->plain || here >= made->behind ? SYSCALL_LENGTH : 0);
}

bool trampoline_left(struct registers *now)
{
	return !pool_find(program_counter(now));
}

void call_ends(struct registers *registers)
{
	greg_t *now = registers->at;

	if (memcmp((const void *)now[REG_RIP], "\x0f\x05", SYSCALL_LENGTH) == 0) {
		now[REG_RIP] += SYSCALL_LENGTH;
		now[REG_RAX] = -EINTR;
	}
}

/*
 * The registers that the kernel would show of a call that a signal interrupted. They are the program's, at its call, which
 * begins again after a handler with SA_RESTART. Handlers read them to sample the program or, as musl's for pthread_cancel(3),
 * to leave the call.
 */
bool program_shown(const struct block *block, bool restarts, struct registers *registers)
{
	greg_t *now = registers->at;
	const struct frame *frame = block->interrupted;

	if (!frame && (now[REG_RIP] <= (greg_t)loader_entry || now[REG_RIP] >= (greg_t)loader_inside)) {
		greg_t at = (greg_t)trampoline_site((uint64_t)now[REG_RIP]);
		if (at)
			now[REG_RIP] = at; /* the registers are the program's in a trampoline */
		return at;
	}
	if (frame) {
		const uint64_t values[][2] = {
			{REG_R15, frame->r15}, {REG_R14, frame->r14}, {REG_R13, frame->r13}, {REG_R12, frame->r12},
			{REG_RBP, frame->rbp}, {REG_RBX, frame->rbx}, {REG_RAX, frame->rax}, {REG_RCX, frame->back},
		};
		for (size_t i = 0; i < sizeof(values) / sizeof(*values); i++)
			now[values[i][0]] = (greg_t)values[i][1];
		for (size_t i = 0; i < sizeof(arguments) / sizeof(*arguments); i++)
			now[arguments[i]] = (greg_t)frame->argument[i];
	}
	now[REG_RSP] = (greg_t)(frame ? frame->sp : block->program_sp);
	now[REG_RIP] = (greg_t)SITE(now[REG_RCX]);
	now[REG_R11] = now[REG_EFL];
	if (!restarts) {
		now[REG_RIP] += SYSCALL_LENGTH;
		now[REG_RAX] = -EINTR;
	}
	return true;
}

void call_divert(struct frame *frame, struct block *block)
{
	const greg_t *to = block->diverted_to.at;

	*frame = (struct frame){
		.r15 = (uint64_t)to[REG_R15],
		.r14 = (uint64_t)to[REG_R14],
		.r13 = (uint64_t)to[REG_R13],
		.r12 = (uint64_t)to[REG_R12],
		.rbp = (uint64_t)to[REG_RBP],
		.rbx = (uint64_t)to[REG_RBX],
		.rax = (uint64_t)to[REG_RAX],
		.thread_pointer = frame->thread_pointer,
		.back = (uint64_t)to[REG_RIP],
		.sp = (uint64_t)to[REG_RSP],
	};
	for (size_t i = 0; i < sizeof(arguments) / sizeof(*arguments); i++)
		frame->argument[i] = (uint64_t)to[arguments[i]];
}
