/* loader_machine_aarch64.c - what of calls and signals depends on this machine; see loader_aarch64.h. */
#include "loader.h"

#include <errno.h>
#include <string.h>

#define SVC 0xd4000001u

__thread struct block *loader_block;
static_assert(sizeof(struct clone_args) == CLONE_ARGS_LENGTH, "loader_entry_aarch64.S");

const char *machine_missing(void)
{
	const uint64_t offset = (uint64_t)&loader_block - thread_pointer();

	return offset % 8 || offset / 8 > 4095 ? "thread-local variables lie too far from the thread pointer" : NULL;
}

/* ---- in the entry, before `inside` is set ---- */
static bool in_entry(const struct registers *now)
{
	return now->pc >= (uint64_t)loader_entry_sme && now->pc < (uint64_t)loader_entry_inside;
}

static uint64_t spilled_at(const struct registers *now)
{
	if (now->pc < (uint64_t)loader_entry_switched)
		return now->sp;
	return now->pc < (uint64_t)loader_entry_filled ? now->x[16] : ((const struct frame *)now->sp)->sp - SPILL;
}

/*
 * Like loader_signal_entry of x86-64, to loader_signal() and back: the handler that it returns is called on the kernel's
 * frame.
 */
__attribute__((used, visibility("hidden"))) uint64_t loader_signal_begin(int sig, siginfo_t *info, void *context)
{
	struct block *block = this_block();
	const struct registers *now = registers_of(context);
	const uint64_t top = block->top, inside = block->inside, sp = block->program_sp;
	const bool ours = now->sp >= block->low && now->sp <= block->high;

	if (ours)
		block->top = now->sp & ~63ul; /* end of the part of our stack that is in use */
	if (!inside && in_entry(now))
		block->program_sp = spilled_at(now) + SPILL;
	else if (!inside && !ours)
		block->program_sp = now->sp;
	const uint64_t *kept = block->kept;
	block->kept = inside > INSIDE_SIGNAL     ? ((const struct frame *)inside)->x
	              : inside && block->leaving ? block->leaving->x
	                                         : NULL;
	block->inside = INSIDE_SIGNAL;
	const uint64_t handler = loader_signal(sig, info, context, top, (struct frame *)inside);
	block->kept = kept;
	block->inside = inside;
	block->program_sp = sp;
	block->top = top;
	return handler;
}

/* ---- what handlers see ---- */
void call_ends(struct registers *now)
{
	if (*(const uint32_t *)now->pc == SVC) {
		now->pc += SYSCALL_LENGTH;
		now->x[0] = (uint64_t)-EINTR;
	}
}

/* A call that has done nothing: the program's registers, at its call, become the context for good. */
static void rewind_entry(struct registers *now)
{
	const uint64_t spilled = spilled_at(now);

	memcpy(&now->x[16], (const void *)spilled, 2 * sizeof(uint64_t));
	now->pc = SITE(*(const uint64_t *)(spilled + SPILL_BACK));
	now->sp = spilled + SPILL;
}

static void rewind_trampoline(struct registers *now)
{
	uint64_t site;
	const enum place place = trampoline_place(now->pc, &site);

	if (place == PLACE_NONE)
		return;
	if (place & PLACE_SPILLED) {
		memcpy(&now->x[16], (const void *)now->sp, 2 * sizeof(uint64_t));
		now->sp += SPILL;
	}
	now->pc = site + (place & PLACE_BEHIND ? SYSCALL_LENGTH : 0);
}

bool trampoline_left(struct registers *now)
{
	rewind_trampoline(now);
	return true;
}

bool program_shown(const struct block *block, bool restarts, struct registers *now)
{
	const struct frame *frame = block->interrupted;

	if (!frame) {
		if (in_entry(now))
			rewind_entry(now);
		else
			rewind_trampoline(now);
		return false;
	}
	memcpy(now->x, frame->x, sizeof(now->x));
	now->sp = frame->sp;
	now->pc = SITE(frame->back);
	if (!restarts) {
		now->pc += SYSCALL_LENGTH;
		now->x[0] = (uint64_t)-EINTR;
	}
	return true;
}

void call_divert(struct frame *frame, struct block *block)
{
	memcpy(frame->x, block->diverted_to.x, sizeof(frame->x));
	frame_begin(frame, block->diverted_to.pc, block->diverted_to.sp);
}
