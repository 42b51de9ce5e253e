/*
 * registers_aarch64.h - a call with all registers; see registers.c. There is no red zone (AAPCS64, 6.4.5.1), but Go keeps words below
 * its stack pointer, and handles signals on another stack.
 */
#include <stdint.h>
#include <string.h>

struct state {
	uint64_t general[31]; /* x0 to x30 */
	uint64_t flags, control, status; /* nzcv, fpcr, fpsr */
	uint8_t vectors[32][16] __attribute__((aligned(16)));
	uint64_t below[5]; /* the stack pointer */
};
_Static_assert(__builtin_offsetof(struct state, flags) == 248 && __builtin_offsetof(struct state, vectors) == 272 &&
                   __builtin_offsetof(struct state, below) == 784,
               "the offsets below");

#define HANDLED_ON SA_ONSTACK

/* Loads everything from `from`, makes the call, and stores everything to `to`. */
void call_with(const struct state *from, struct state *to);
__asm__(
	".text\n"
	".p2align 4\n"
	"call_with:\n"
	"	stp x29, x30, [sp, #-192]!\n"
	"	stp x19, x20, [sp, #16]\n"
	"	stp x21, x22, [sp, #32]\n"
	"	stp x23, x24, [sp, #48]\n"
	"	stp x25, x26, [sp, #64]\n"
	"	stp x27, x28, [sp, #80]\n"
	"	stp d8, d9, [sp, #96]\n"
	"	stp d10, d11, [sp, #112]\n"
	"	stp d12, d13, [sp, #128]\n"
	"	stp d14, d15, [sp, #144]\n"
	"	mrs x2, fpcr\n"
	"	stp x1, x2, [sp, #160]\n"
	"	.irp n, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31\n"
	"	ldr q\\n, [x0, #272+\\n*16]\n"
	"	.endr\n"
	"	ldr x2, [x0, #248]\n"
	"	msr nzcv, x2\n"
	"	ldr x2, [x0, #256]\n"
	"	msr fpcr, x2\n"
	"	ldr x2, [x0, #264]\n"
	"	msr fpsr, x2\n"
	"	.irp n, 0, 1, 2, 3, 4\n"
	"	ldr x2, [x0, #784+\\n*8]\n"
	"	str x2, [sp, #-40+\\n*8]\n"
	"	.endr\n"
	"	.irp n, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30\n"
	"	ldr x\\n, [x0, #\\n*8]\n"
	"	.endr\n"
	"	ldr x8, [x0, #64]\n" /* near its call, by which that is known for one */
	"	ldr x0, [x0]\n"
	"	svc #0\n"
	"	str x1, [sp, #176]\n"
	"	ldr x1, [sp, #160]\n"
	"	str x0, [x1]\n"
	"	.irp n, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30\n"
	"	str x\\n, [x1, #\\n*8]\n"
	"	.endr\n"
	"	ldr x2, [sp, #176]\n"
	"	str x2, [x1, #8]\n"
	"	mrs x2, nzcv\n"
	"	str x2, [x1, #248]\n"
	"	mrs x2, fpcr\n"
	"	str x2, [x1, #256]\n"
	"	mrs x2, fpsr\n"
	"	str x2, [x1, #264]\n"
	"	.irp n, 0, 1, 2, 3, 4\n"
	"	ldr x2, [sp, #-40+\\n*8]\n"
	"	str x2, [x1, #784+\\n*8]\n"
	"	.endr\n"
	"	.irp n, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31\n"
	"	str q\\n, [x1, #272+\\n*16]\n"
	"	.endr\n"
	"	ldr x2, [sp, #168]\n"
	"	msr fpcr, x2\n"
	"	ldp d14, d15, [sp, #144]\n"
	"	ldp d12, d13, [sp, #128]\n"
	"	ldp d10, d11, [sp, #112]\n"
	"	ldp d8, d9, [sp, #96]\n"
	"	ldp x27, x28, [sp, #80]\n"
	"	ldp x25, x26, [sp, #64]\n"
	"	ldp x23, x24, [sp, #48]\n"
	"	ldp x21, x22, [sp, #32]\n"
	"	ldp x19, x20, [sp, #16]\n"
	"	ldp x29, x30, [sp], #192\n"
	"	ret\n");

static void state_prepare(struct state *from, long a, long b, long c)
{
	from->general[0] = (uint64_t)a;
	from->general[1] = (uint64_t)b;
	from->general[2] = (uint64_t)c;
	from->general[3] = from->general[4] = from->general[5] = 0;
	from->flags &= 0xf0000000;
	from->control &= 3 << 22;   /* how is rounded */
	from->status &= 0x0800009f; /* what has happened */
}

static long call_kept(long number, struct state *from, struct state *to)
{
	from->general[8] = (uint64_t)number;
	call_with(from, to);
	NEED(memcmp(&from->general[1], &to->general[1], sizeof(from->general) - sizeof(*from->general)) == 0);
	NEED(from->flags == to->flags && from->control == to->control && from->status == to->status);
	NEED(memcmp(from->vectors, to->vectors, sizeof(from->vectors)) == 0);
	NEED(memcmp(from->below, to->below, sizeof(from->below)) == 0);
	return (long)to->general[0];
}
