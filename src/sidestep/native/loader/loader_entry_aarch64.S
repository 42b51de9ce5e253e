/* loader_entry_aarch64.S - between a program's calling convention and ours; see loader.h. */
#include "loader.h"

	.text

	.macro BLOCK register
	mrs \register, tpidr_el0
	add \register, \register, #:tprel_hi12:loader_block, lsl #12
	ldr \register, [\register, #:tprel_lo12_nc:loader_block]
	.endm

/* x0 to x15 and x18 to x30, to a frame or from it; those between take us there and back. */
	.macro REGISTERS pair, single, frame
	.irp number, 0, 2, 4, 6, 8, 10, 12, 14
	PAIR \pair, \number, \frame
	.endr
	.irp number, 18, 20, 22, 24, 26, 28
	PAIR \pair, \number, \frame
	.endr
	\single x30, [\frame, #240]
	.endm
	.altmacro
	.macro PAIR operation, number, frame
	PAIR_OF \operation, \number, %(\number + 1), \frame
	.endm
	.macro PAIR_OF operation, number, next, frame
	\operation x\number, x\next, [\frame, #(\number * 8)]
	.endm
	.macro VECTORS operation
	.irp number, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
	VECTOR_PAIR \operation, \number, %(\number + 1)
	.endr
	.endm
	.macro VECTOR_PAIR operation, number, next
	\operation q\number, q\next, [sp, #(\number * 16)]
	.endm

/*
 * Entry by br from a trampoline, which has spilled x16 and x17, and where to go back, below the program's stack pointer. All
 * other registers are the program's: those, x0 apart, and v0 to v31 are kept, as by the kernel. The kernel does not keep the
 * further bits of SVE, nor streaming mode (Documentation/arch/arm64/sve.rst and sme.rst, "System call behaviour").
 *
 * A signal may come at any place. Up to where `inside` is set the call has not begun: it begins again, after the handler.
 */
	.globl loader_entry, loader_entry_sme, loader_entry_switched, loader_entry_filled, loader_entry_inside
	.p2align 6
loader_entry_sme:
	.inst 0xd503427f                /* smstop sm: our code is none for that mode; the kernel would do the same */
loader_entry:
	ldr x17, [sp, #SPILL_BACK]
	lsr x16, x8, #9
	cbnz x16, plain                 /* numbers from CALLS_MAX on */
	adrp x16, intercepted
	add x16, x16, :lo12:intercepted
	ldrb w16, [x16, x8]
	cbz w16, plain
	tbnz w16, #1, hooked            /* INTERCEPTED_ALWAYS */
	adrp x16, loader_known_len
	ldr w16, [x16, :lo12:loader_known_len]
	mov w17, w0
	sub x16, x17, x16               /* flags are kept, so none is used */
	ldr x17, [sp, #SPILL_BACK]
	tbz x16, #63, plain
	adrp x16, loader_known
	ldr x16, [x16, :lo12:loader_known]
	mov w17, w0
	ldr x16, [x16, x17, lsl #3]
	ldr x17, [sp, #SPILL_BACK]
	cbnz x16, hooked
plain:
	add x17, x17, #PLAIN
	br x17
hooked:
	BLOCK x16
	ldr x17, [x16, #BLOCK_TOP]
	sub x17, x17, #FRAME_LENGTH
	mov x16, sp
	mov sp, x17
loader_entry_switched:          /* x16: the program's stack pointer, less SPILL */
	REGISTERS stp, str, sp
	ldr x17, [x16]
	str x17, [sp, #FRAME_X16]
	ldr x17, [x16, #8]
	str x17, [sp, #FRAME_X16 + 8]
	ldr x17, [x16, #SPILL_BACK]
	str x17, [sp, #FRAME_BACK]
	add x17, x16, #SPILL
	str x17, [sp, #FRAME_SP]
	BLOCK x17
loader_entry_filled:            /* sp: the frame */
	mov x16, sp
	str x16, [x17, #BLOCK_INSIDE]
loader_entry_inside:
	mov x19, sp
	mov x20, x17
	ldr x0, [x20, #BLOCK_PROGRAM_TP]
	str x0, [x19, #FRAME_TP]
	ldr x0, [x19, #FRAME_SP]
	str x0, [x20, #BLOCK_PROGRAM_SP]
	mrs x21, fpsr
	mrs x22, nzcv
	sub sp, sp, #512
	VECTORS stp
	mov x0, x19
	mov x29, xzr
	mov x30, xzr
	bl loader_call
	str x0, [x19]
	VECTORS ldp
	msr fpsr, x21
	msr nzcv, x22

to_program:                     /* x19: the frame, x20: the block */
	ldr x0, [x19, #FRAME_TP]
	str x0, [x20, #BLOCK_PROGRAM_TP] /* the call may have changed it */
	ldr x16, [x19, #FRAME_SP]
	sub x16, x16, #SPILL
	ldp x0, x1, [x19, #FRAME_X16]
	stp x0, x1, [x16]
	ldr x0, [x19, #FRAME_BACK]
	str x0, [x16, #SPILL_BACK]
	mov sp, x19
	REGISTERS ldp, ldr, sp
	mov sp, x16
	BLOCK x17                       /* no earlier place: a handler is to find the program's registers, see block.leaving */
	str xzr, [x17, #BLOCK_INSIDE]
	ldr x17, [sp, #SPILL_BACK]
	br x17

	.globl loader_elsewhere
loader_elsewhere:
	ldp x16, x17, [sp], #SPILL
	br x17

/* Code from put_exit(). */
	.globl loader_entry_exit
loader_entry_exit:
	BLOCK x16
	ldr x17, [x16, #BLOCK_TOP]
	mov sp, x17
	mov x17, #INSIDE_SIGNAL
	str x17, [x16, #BLOCK_INSIDE]
	mov x29, xzr
	bl thread_exit

/* void loader_enter(struct frame *, struct block *) */
	.globl loader_enter, loader_leave
loader_enter:
	stp x29, x30, [sp, #-160]!
	stp x19, x20, [sp, #16]
	stp x21, x22, [sp, #32]
	stp x23, x24, [sp, #48]
	stp x25, x26, [sp, #64]
	stp x27, x28, [sp, #80]
	stp d8, d9, [sp, #96]
	stp d10, d11, [sp, #112]
	stp d12, d13, [sp, #128]
	stp d14, d15, [sp, #144]
	mov x16, sp
	str x16, [x1, #BLOCK_EXIT_SP]
	mov x19, x0
	mov x20, x1
	b to_program

/* void loader_leave(struct block *): returns from loader_enter */
loader_leave:
	ldr x16, [x0, #BLOCK_EXIT_SP]
	mov sp, x16
	ldp d14, d15, [sp, #144]
	ldp d12, d13, [sp, #128]
	ldp d10, d11, [sp, #112]
	ldp d8, d9, [sp, #96]
	ldp x27, x28, [sp, #80]
	ldp x25, x26, [sp, #64]
	ldp x23, x24, [sp, #48]
	ldp x21, x22, [sp, #32]
	ldp x19, x20, [sp, #16]
	ldp x29, x30, [sp], #160
	ret

/* long loader_clone(flags, frame, parent_tid, child_tid, block): signals are blocked */
	.globl loader_clone, machine_clone3
loader_clone:
	stp x19, x20, [sp, #-16]!
	mov x19, x1
	mov x20, x4
	and x1, x1, #~63
	mov x4, x3
	mov x3, xzr
	mov x8, #220 /* clone */
	svc #0
	cbz x0, 1f
	ldp x19, x20, [sp], #16
	ret
1:	mov x29, xzr
	mov x0, x20
	bl loader_bare_start
	b to_program

/* long machine_clone3(with, block) */
machine_clone3:
	stp x19, x20, [sp, #-16]!
	mov x20, x1
	mov x1, #CLONE_ARGS_LENGTH
	mov x8, #435 /* clone3 */
	svc #0
	cbz x0, 1f
	ldp x19, x20, [sp], #16
	ret
1:	mov x29, xzr
	mov x0, x20
	bl loader_bare_run

/*
 * The kernel calls this for every signal that the program handles, on the stack that was registered: (sig, info, context).
 * The handler that loader_signal_begin() names is called on its frame, and finds all as it would without us.
 */
	.globl loader_signal_entry
	.p2align 4
loader_signal_entry:
	stp x29, x30, [sp, #-48]!
	mov x29, sp
	stp x0, x1, [sp, #16]
	str x2, [sp, #32]
	bl loader_signal_begin
	mov x16, x0
	ldr x2, [sp, #32]
	ldp x0, x1, [sp, #16]
	ldp x29, x30, [sp], #48
	cbz x16, 1f
	br x16
1:	ret

/*
 * void loader_to_handler(handler, sig, info, context, stack): it may never return. In x18 to x28 a handler finds what the
 * program had there, as by the kernel: Go's has its thread in x28.
 */
	.globl loader_to_handler
	.p2align 4
loader_to_handler:
	stp x29, x30, [sp, #-112]!
	stp x19, x20, [sp, #16]
	stp x21, x22, [sp, #32]
	stp x23, x24, [sp, #48]
	stp x25, x26, [sp, #64]
	stp x27, x28, [sp, #80]
	str x18, [sp, #96]
	mov x29, sp
	BLOCK x5
	cbz x4, 1f
	sub x6, sp, #64
	and x6, x6, #~63
	str x6, [x5, #BLOCK_TOP]        /* end of the part of our stack that is in use */
	and x4, x4, #~15
	mov sp, x4
1:	ldr x6, [x5, #BLOCK_KEPT]
	cbnz x6, 2f
	add x6, x3, #CONTEXT_X
2:	str x29, [sp, #-16]!
	str xzr, [x5, #BLOCK_INSIDE]
	mov x16, x0
	mov w0, w1
	mov x1, x2
	mov x2, x3
	.irp number, 18, 20, 22, 24, 26
	PAIR ldp, \number, x6
	.endr
	ldr x28, [x6, #224]
	blr x16
	BLOCK x5
	mov x6, #INSIDE_SIGNAL
	str x6, [x5, #BLOCK_INSIDE]
	ldr x6, [sp]
	mov sp, x6
	ldr x18, [sp, #96]
	ldp x27, x28, [sp, #80]
	ldp x25, x26, [sp, #64]
	ldp x23, x24, [sp, #48]
	ldp x21, x22, [sp, #32]
	ldp x19, x20, [sp, #16]
	ldp x29, x30, [sp], #112
	ret

	.section .note.GNU-stack, "", @progbits
