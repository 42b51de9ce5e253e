/* loader_entry_x86_64.S - between a program's calling convention and ours; see loader.h. x86-64, with FSGSBASE (Linux 5.9). */
#include "loader.h"

	.text

#define HIGHER 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31

	.macro EACH operation, vector, size, numbers:vararg
	.irp number, \numbers
	.ifc \operation, save
	MOVE_\vector %\vector\number, (\number*\size)(%rsp)
	.else
	MOVE_\vector (\number*\size)(%rsp), %\vector\number
	.endif
	.endr
	.endm
	.macro MOVE_zmm from, to
	vmovdqu64 \from, \to
	.endm
	.macro MOVE_ymm from, to
	vmovdqu \from, \to
	.endm
	.macro MOVE_xmm from, to
	movups \from, \to
	.endm

/*
 * ZF: all is zero above xmm0 to xmm15, which are saved by now. Then vzeroupper is to leave it so. Zeros that are loaded are
 * values to the CPU, and each instruction of SSE waits for them. Go's AES and SHA consist of such instructions (Intel's
 * optimization manual, "Mixing AVX Code with SSE Code").
 */
	.macro UPPER_zmm
	.irp number, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
	vporq %zmm\number, %zmm0, %zmm0
	.endr
	vextracti64x4 $1, %zmm0, %ymm1
	vextracti128 $1, %ymm0, %xmm0
	vpor %ymm1, %ymm0, %ymm0
	vptest %ymm0, %ymm0
	.endm
	.macro UPPER_ymm
	.irp number, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
	vorps %ymm\number, %ymm0, %ymm0
	.endr
	vextractf128 $1, %ymm0, %xmm0
	vptest %xmm0, %xmm0
	.endm

	.macro LOWER operation, vector, size
	EACH \operation, \vector, \size, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
	.endm

	.macro MASKS operation
	.irp number, 0, 1, 2, 3, 4, 5, 6, 7
	.ifc \operation, save
	kmovq %k\number, (2048+\number*8)(%rsp)
	.else
	kmovq (2048+\number*8)(%rsp), %k\number
	.endif
	.endr
	.endm

/*
 * Entry by jmp from a trampoline: rax number; rdi, rsi, rdx, r10, r8, r9 arguments; rcx where to go back; r11 free, as the
 * kernel leaves it. Nothing is written to the program's stack, which may be a small one, or have a red zone. All vector
 * registers are kept, as by the kernel.
 *
 * A signal may come at any place. Up to where `inside` is set the registers are the program's, but for r11 and the stack
 * pointer: block.program_sp has that.
 */
	.macro ENTRY vector, size, room
	.globl loader_entry_\vector, loader_entry_\vector\()_inside
	.p2align 6
loader_entry_\vector:
	movq %rsp, %gs:BLOCK_PROGRAM_SP
	movq %rsp, %r11
	movq %gs:BLOCK_TOP, %rsp
	pushq %r11
	pushq %rcx
	rdfsbase %r11
	pushq %r11
	movq %r11, %gs:BLOCK_PROGRAM_TP
	pushq %rax
	pushq %r9
	pushq %r8
	pushq %r10
	pushq %rdx
	pushq %rsi
	pushq %rdi
	pushq %rbx
	pushq %rbp
	pushq %r12
	pushq %r13
	pushq %r14
	pushq %r15
	movq %rsp, %gs:BLOCK_INSIDE
loader_entry_\vector\()_inside:
	movq %gs:BLOCK_THREAD_POINTER, %rcx
	wrfsbase %rcx
	movq %rsp, %rdi
	movq %rsp, %rbp
	subq $\room, %rsp
	andq $-64, %rsp
	LOWER save, \vector, \size
	.ifc \vector, zmm
	EACH save, zmm, 64, HIGHER
	MASKS save
	.endif
	.ifnc \vector, xmm
	UPPER_\vector
	setnz %bl
	vzeroupper
	.endif
	cld
	call loader_call
	movq %rax, FRAME_RAX(%rbp)
	.ifc \vector, zmm
	EACH restore, zmm, 64, HIGHER
	MASKS restore
	.endif
	.ifnc \vector, xmm
	vzeroupper
	testb %bl, %bl
	jz 1f
	LOWER restore, \vector, \size
	jmp to_program
	.endif
1:	LOWER restore, xmm, \size
	jmp to_program
	.endm

	ENTRY zmm, 64, 2112
	ENTRY ymm, 32, 512
	ENTRY xmm, 16, 256

	.p2align 4
to_program:                     /* rbp: the frame */
	movq %rbp, %rsp
	movq FRAME_FS(%rsp), %rcx
	movq %rcx, %gs:BLOCK_PROGRAM_TP /* the call may have changed it */
	wrfsbase %rcx
	movq $0, %gs:BLOCK_INSIDE
	popq %r15
	popq %r14
	popq %r13
	popq %r12
	popq %rbp
	popq %rbx
	popq %rdi
	popq %rsi
	popq %rdx
	popq %r10
	popq %r8
	popq %r9
	popq %rax
	popq %rcx
	popq %rcx
	popq %rsp
	jmp *%rcx

/* void loader_enter(struct frame *, struct block *) */
	.globl loader_enter, loader_leave
loader_enter:
	pushq %rbp
	pushq %rbx
	pushq %r12
	pushq %r13
	pushq %r14
	pushq %r15
	movq %rsp, BLOCK_EXIT_SP(%rsi)
	movq %rdi, %rbp
	jmp to_program

/* void loader_leave(struct block *): returns from loader_enter */
loader_leave:
	movq BLOCK_EXIT_SP(%rdi), %rsp
	popq %r15
	popq %r14
	popq %r13
	popq %r12
	popq %rbx
	popq %rbp
	ret

/* long loader_clone(flags, frame, parent_tid, child_tid, block): signals are blocked */
	.globl loader_clone
loader_clone:
	pushq %rbx
	pushq %rbp
	movq %rsi, %rbp
	movq %r8, %rbx
	movq %rcx, %r10
	xorl %r8d, %r8d
	andq $-64, %rsi
	movl $56, %eax /* clone */
	syscall
	testq %rax, %rax
	jz 1f
	popq %rbp
	popq %rbx
	ret
1:	wrgsbase %rbx
	movq %rbx, %rdi
	call loader_bare_start
	jmp to_program

/*
 * The kernel calls this for every signal that the program handles, on the stack that was registered: (sig, info, context).
 * The current thread pointer and the state of a call under way are saved and restored.
 */
	.globl loader_signal_entry, loader_restorer
	.p2align 4
loader_signal_entry:
	pushq %rbp
	movq %rsp, %rbp
	pushq %rbx
	pushq %r12
	pushq %r13
	pushq %r14
	pushq %r15
	pushq %rdi
	pushq %rsi
	pushq %rdx
	rdfsbase %rbx
	movq %gs:BLOCK_TOP, %r12
	movq %gs:BLOCK_INSIDE, %r13
	movq %gs:BLOCK_PROGRAM_TP, %r14
	movq %gs:BLOCK_PROGRAM_SP, %r15
	movq CONTEXT_RSP(%rdx), %rax
	cmpq %gs:BLOCK_LOW, %rax
	jb 1f
	cmpq %gs:BLOCK_HIGH, %rax
	ja 1f
	leaq -1024(%rax), %rcx  /* end of the part of our stack that is in use */
	andq $-64, %rcx
	movq %rcx, %gs:BLOCK_TOP
	jmp 2f
1:	testq %r13, %r13
	jnz 3f
	movq %rax, %gs:BLOCK_PROGRAM_SP
2:	testq %r13, %r13
	jnz 3f
	movq %rbx, %gs:BLOCK_PROGRAM_TP
3:	movq $INSIDE_SIGNAL, %gs:BLOCK_INSIDE
	movq %gs:BLOCK_THREAD_POINTER, %rax
	wrfsbase %rax
	andq $-64, %rsp
	movq %r12, %rcx
	movq %r13, %r8
	cld
	call loader_signal
	wrfsbase %rbx
	movq %r13, %gs:BLOCK_INSIDE
	movq %r15, %gs:BLOCK_PROGRAM_SP
	movq %r14, %gs:BLOCK_PROGRAM_TP
	movq %r12, %gs:BLOCK_TOP
	leaq -64(%rbp), %rsp
	popq %rdx
	popq %rsi
	popq %rdi
	popq %r15
	popq %r14
	popq %r13
	popq %r12
	popq %rbx
	popq %rbp
	movq %rax, %rcx
	xorl %eax, %eax
	testq %rcx, %rcx
	jz 4f
	jmp *%rcx
4:	ret

/* Debuggers and unwinders know a signal's frame by these bytes. */
	.p2align 4
	nop
loader_restorer:
	movq $15, %rax
	syscall

/* void loader_to_handler(handler, sig, info, context, stack): it may never return */
	.globl loader_to_handler
	.p2align 4
loader_to_handler:
	pushq %rbp
	movq %rsp, %rbp
	testq %r8, %r8
	jz 1f
	leaq -1024(%rsp), %rax  /* end of the part of our stack that is in use */
	andq $-64, %rax
	movq %rax, %gs:BLOCK_TOP
	movq %r8, %rsp
1:	andq $-64, %rsp
	movq %gs:BLOCK_PROGRAM_TP, %rax
	wrfsbase %rax
	movq $0, %gs:BLOCK_INSIDE
	movq %rdi, %rax
	movl %esi, %edi
	movq %rdx, %rsi
	movq %rcx, %rdx
	call *%rax
	movq $INSIDE_SIGNAL, %gs:BLOCK_INSIDE
	movq %gs:BLOCK_THREAD_POINTER, %rax
	wrfsbase %rax
	movq %rbp, %rsp
	popq %rbp
	ret

	.section .note.GNU-stack, "", @progbits
