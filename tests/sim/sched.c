/* sched.c - coroutines, one for each end, and what else can happen in between. */
#include "sim.h"

#include <errno.h>
#include <stdlib.h>

#include "provider.h"

#define STACK (512u << 10)

struct end ends[2] = {{.index = 0}, {.index = 1}};
struct end *current;
int64_t now = 1000ll * 1000 * MS;
uint32_t preempt_one_in, calm;
int points_left = -1;
uint64_t moves;
static ucontext_t scheduler;

static void switch_away(void)
{
	struct end *end = current;
	int saved = errno; /* a process has its own */

	current = NULL;
	swapcontext(&end->context, &scheduler);
	current = end;
	errno = saved;
}

void point(void)
{
	if (!current || calm)
		return;
	if (points_left >= 0 ? points_left-- == 0 : chance(preempt_one_in))
		switch_away();
}

void give_way(void)
{
	if (current && !calm && chance(4))
		switch_away();
}

bool block(bool (*ready)(void *argument), void *argument, int64_t deadline)
{
	if (!current)
		fail("the scheduler would block");
	while (!ready(argument)) {
		if (now >= deadline)
			return false;
		if (calm)
			fail("end %d blocks where it must not", current->index);
		current->ready = ready;
		current->argument = argument;
		current->deadline = deadline;
		switch_away();
		current->ready = NULL;
	}
	return true;
}

void kill_end(struct end *end)
{
	end->over = true;
	fds_close(end->index, false);
}

static void begin(int index)
{
	ends[index].run(&ends[index]);
	ends[index].over = true;
	switch_away();
}

void end_resume(struct end *end)
{
	if (!end->started) {
		end->started = true;
		getcontext(&end->context);
		end->context.uc_stack.ss_sp = malloc(STACK);
		end->context.uc_stack.ss_size = STACK;
		end->context.uc_link = NULL;
		makecontext(&end->context, (void (*)(void))begin, 1, end->index);
	}
	current = end;
	swapcontext(&scheduler, &end->context);
	current = NULL;
}

bool end_can_run(const struct end *end)
{
	return !end->over && (!end->ready || now >= end->deadline || end->ready(end->argument));
}

void schedule(void (*idle)(void))
{
	while (!ends[0].over || !ends[1].over) {
		int able[2 + NETWORK_MOVES + 2], n = 0;

		for (int i = 0; i < 2; i++)
			if (end_can_run(&ends[i]))
				able[n++] = i;
		for (int i = 0; i < NETWORK_MOVES; i++)
			if (network_can(i))
				able[n++] = 2 + i;
		for (int i = 0; i < 2; i++)
			if (provider_can(i))
				able[n++] = 2 + NETWORK_MOVES + i;
		moves++;
		if (!n) {
			idle();
			int64_t next = NEVER;
			for (int i = 0; i < 2; i++)
				if (!ends[i].over && ends[i].deadline < next)
					next = ends[i].deadline;
			if (next == NEVER)
				return;
			trace("    the clock: %lld us", (long long)(next - now) / 1000);
			now = next;
			continue;
		}
		if (chance(256)) {
			static const int64_t jumps[] = {1000, 50000, 2 * MS, 60 * MS, 1100 * MS};
			now += jumps[choose(5)];
			continue;
		}
		int which = able[choose((uint32_t)n)];
		if (which < 2)
			end_resume(&ends[which]);
		else if (which < 2 + NETWORK_MOVES)
			network_move(which - 2);
		else
			provider_move(which - 2 - NETWORK_MOVES);
	}
}
