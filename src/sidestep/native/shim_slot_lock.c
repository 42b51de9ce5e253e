/*
 * shim_slot_lock.c - the locks of slots, for who does not get one at once: their holder may be a process that has died.
 */
#include "shim.h"

#include <sched.h>

#define LOCK_YIELDS 1024 /* before a waiting thread begins to nap */
#define LOCK_NAPS 5000 /* of a millisecond, after which it takes the lock of a connection in memory that others can write */

bool slot_trylock(_Atomic uint32_t *lock)
{
	uint32_t expected = 0, tid = self.tid ? self.tid : thread_init();

	critical_enter();
	if (atomic_compare_exchange_strong(lock, &expected, tid))
		return true;
	critical_leave();
	return false;
}

/* A lock of the arena was taken from a holder that keeps it for ever: what it guards may be half done. */
static void lock_broken(const void *lock)
{
	for (uint32_t fd = 0; fd < atomic_load(&fd_end); fd++) {
		struct conn *conn = conn_get((int)fd); /* who has asked for the lock holds it */
		if (conn && lock >= (void *)conn->slot && lock < (void *)(conn->slot + 1)) {
			conn_violation(conn, (int)fd);
			return;
		}
	}
}

/*
 * Sections are short, and no thread is stopped in one for seconds but by a debugger, a signal or a page fault: who waits
 * longer may wait for a word that a child of another user wrote, and goes on with a connection that is reset. It naps a
 * bounded number of times, as a clock would go on while it is stopped itself.
 */
void slot_lock_slow(_Atomic uint32_t *lock)
{
	for (uint32_t turn = 0;; turn++) {
		uint32_t holder = 0;
		if (atomic_compare_exchange_strong(lock, &holder, self.tid))
			return;
		/* Ours already: a handler jumped out of the section that held it. What it left is consistent: positions move last. */
		if (holder == self.tid)
			return;
		if (turn < 100) {
			cpu_relax();
		} else {
			bool naps = turn > LOCK_YIELDS;
			if (!naps)
				sched_yield();
			if (turn % 64 && !naps)
				continue;
			if (task_dead(holder, false) && atomic_compare_exchange_strong(lock, &holder, self.tid))
				return;
			if (!naps)
				continue;
			int saved = errno;
			raw_poll(NULL, 0, 1);
			errno = saved;
			if (turn > LOCK_YIELDS + LOCK_NAPS && arena_shared) {
				atomic_store(lock, self.tid);
				lock_broken(lock);
				return;
			}
		}
	}
}
