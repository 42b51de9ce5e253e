/* sched.c - coroutines, one for each end, and what else can happen in between. */
#include "sim.h"

#include <errno.h>
#include <stdlib.h>

#include "process.h"
#include "provider.h"
#include "relay.h"

#define TURN_MAX 20000

struct end ends[ENDS] = {{.index = 0}, {.index = 1}, {.index = 2}, {.index = 3}};
struct end *current;
int64_t now = 1000ll * 1000 * MS;
uint32_t preempt_one_in, death_one_in, calm;
void (*dies)(void);
int points_left = -1;
uint64_t moves;
static ucontext_t scheduler;
static uint32_t points; /* since somebody else has had a turn */

static void switch_away(void)
{
	struct end *end = current;
	int saved = errno; /* a process has its own */

	current = NULL;
	points = 0;
	swapcontext(&end->context, &scheduler);
	current = end;
	errno = saved;
}

void point(void)
{
	if (!current || calm)
		return;
	if (death_one_in && chance(death_one_in))
		dies();
	/* nobody has a CPU for ever: what it looks for so busily may be another's to do */
	if (points_left >= 0 ? points_left-- == 0 : ++points == TURN_MAX || chance(preempt_one_in))
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

void end_over(void)
{
	current->over = true;
	switch_away();
	abort(); /* nobody resumes it */
}

static void begin(int index)
{
	ends[index].run(&ends[index]);
	end_over();
}

void end_resume(struct end *end)
{
	if (!end->started) {
		end->started = true;
		getcontext(&end->context);
		end->stack = malloc(STACK);
		end->context.uc_stack.ss_sp = end->stack;
		end->context.uc_stack.ss_size = STACK;
		end->context.uc_link = NULL;
		makecontext(&end->context, (void (*)(void))begin, 1, end->index);
	}
	process_enter(end);
	current = end;
	swapcontext(&scheduler, &end->context);
	current = NULL;
}

bool end_can_run(const struct end *end)
{
	return (end->started || end->index < 2) && !end->over &&
	       (!end->ready || now >= end->deadline || end->ready(end->argument));
}

void schedule(void (*idle)(void))
{
	for (;;) {
		int able[ENDS + NETWORK_MOVES + ENDS + 1], n = 0, alive = 0;

		for (int i = 0; i < ENDS; i++) {
			alive += (ends[i].started || i < 2) && !ends[i].over;
			if (end_can_run(&ends[i]))
				able[n++] = i;
		}
		if (!alive)
			return;
		for (int i = 0; i < NETWORK_MOVES; i++)
			if (network_can(i))
				able[n++] = ENDS + i;
		for (int i = 0; i < ENDS; i++)
			if (provider_can(i))
				able[n++] = ENDS + NETWORK_MOVES + i;
		if (relay_can())
			able[n++] = ENDS + NETWORK_MOVES + ENDS;
		moves++;
		if (!n) {
			idle();
			int64_t next = NEVER;
			for (int i = 0; i < ENDS; i++)
				if (ends[i].started && !ends[i].over && ends[i].deadline < next)
					next = ends[i].deadline;
			for (int i = 0; i < ENDS; i++)
				next = end_can_run(&ends[i]) ? now : next; /* somebody was woken */
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
		if (which < ENDS)
			end_resume(&ends[which]);
		else if (which < ENDS + NETWORK_MOVES)
			network_move(which - ENDS);
		else if (which == ENDS + NETWORK_MOVES + ENDS)
			relay_move();
		else
			provider_move(which - ENDS - NETWORK_MOVES);
	}
}
