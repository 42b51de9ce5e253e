/* shim_spin.h - how long a wait looks again and again before it sleeps, and what waits cost. */
#ifndef SIDESTEP_SHIM_SPIN_H
#define SIDESTEP_SHIM_SPIN_H

#include "shim.h"

#define LOOK_EVERY_NS 20000 /* the kernel's events are asked for at least this often while rings are busy */
#define NAP_NS 1000000      /* a sleep that cannot hear all of its doorbells */

struct spin {
	int64_t now, end;
	int64_t alone_until; /* nobody else wanted this CPU */
	int64_t away;        /* how long another thread had the CPU just now */
	bool crowded;        /* there are more runnable threads than CPUs */
	bool shares;         /* the next spin_on() offers the CPU: one look is enough before it */
};
bool spin_begin(struct spin *spin, uint32_t budget, uint32_t peer_cpu); /* false: this wait had better sleep */
bool spin_on(struct spin *spin, uint32_t peer_cpu, bool may_move);      /* between two looks; false: it is time to sleep */
/*
 * Adapts a spin budget. A wait that ended while spinning, or in the kernel so soon that full spinning would have caught
 * it (a wake-up itself costs tens of microseconds), asks for the full budget; any other halves it, to nothing at last.
 */
static inline void spin_adapt(_Atomic uint32_t *budget, int64_t waited_ns)
{
	uint32_t now = word_load(*budget);

	if (waited_ns < 2 * (int64_t)config.spin_ns) {
		if (now != config.spin_ns)
			word_store(*budget, config.spin_ns);
	} else if (now) {
		word_store(*budget, now > config.spin_ns / 16 ? now / 2 : 0);
	}
}

/* A wait has ended by this connection: what the thread has called by itself since the last one is put down to it. */
static inline void calls_count(struct conn_slot *slot)
{
	if (self.calls)
		word_add(slot->wait_calls, self.calls);
	self.calls = 0;
}

#endif
