/* shim_slot_lock.c - the locks of slots when they are not free at once: the holder may be a process that has died. */
#include "shim.h"

#include <sched.h>

#define LOCK_YIELDS 1024 /* before a waiting thread begins to nap */
#define LOCK_NAPS 5000 /* of a millisecond; then it takes the lock, if others can write the memory */

bool slot_trylock(_Atomic uint32_t *lock)
{
	uint32_t expected = 0, tid = self.tid ? self.tid : thread_init();

	critical_enter();
	if (atomic_compare_exchange_strong(lock, &expected, tid))
		return true;
	critical_leave();
	return false;
}

/* A lock was taken from a holder that keeps it for ever: the state that it guards may be inconsistent. */
static void lock_broken(const void *lock)
{
	for (uint32_t fd = 0; fd < atomic_load(&fd_end); fd++) {
		struct conn *conn = conn_get((int)fd); /* the thread that asked for the lock holds a reference */
		if (conn && lock >= (void *)conn->slot && lock < (void *)(conn->slot + 1)) {
			conn_violation(conn, (int)fd);
			return;
		}
	}
}

/*
 * Sections are short: only a debugger, a signal or a page fault stops a thread in one for seconds. A longer wait may be for a
 * word that a child of another user wrote, so it ends with a reset of the connection. The waiter counts naps instead of time,
 * as a clock would go on while it is stopped itself.
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
			KEEP_ERRNO;
			raw_poll(NULL, 0, 1);
			if (turn > LOCK_YIELDS + LOCK_NAPS && arena_shared) {
				atomic_store(lock, self.tid);
				lock_broken(lock);
				return;
			}
		}
	}
}
