/* shim_slot_lock.c - the locks of slots when they are not free at once: the holder may be a process that has died. */
#include "shim_switch.h"

#include <sched.h>

#define LOCK_YIELDS 1024 /* yields of a waiting thread before it begins to nap */
#define LOCK_NAPS 5000 /* naps of a millisecond; then it takes the lock, if others can write the memory */

bool slot_trylock(_Atomic uint32_t *lock)
{
	uint32_t expected = 0, tid = self.tid ? self.tid : thread_init();

	critical_enter();
	if (atomic_compare_exchange_strong(lock, &expected, tid))
		return true;
	critical_leave();
	return false;
}

/* The connection of whose slot this lock is, and a number of it. The thread that asked for the lock holds a reference. */
static struct conn *conn_of_lock(const void *lock, int *number)
{
	for (uint32_t fd = 0; fd < atomic_load(&fd_end); fd++) {
		struct conn *conn = conn_get((int)fd);
		if (conn && lock >= (void *)conn->slot && lock < (void *)(conn->slot + 1)) {
			*number = (int)fd;
			return conn;
		}
	}
	return NULL;
}

/* A lock was taken from a holder that keeps it for ever: the state that it guards may be inconsistent. */
static void lock_broken(const void *lock)
{
	int fd;
	struct conn *conn = conn_of_lock(lock, &fd);

	if (conn)
		conn_violation(conn, fd);
}

/* A lock was taken from a process that has died: the kernel may have moved bytes for it that it has not counted. */
static void lock_inherited(const void *lock)
{
	int fd;
	struct conn *conn = conn_of_lock(lock, &fd);

	if (conn && lock == &conn->slot->rx_lock)
		rx_recount(conn, fd);
	else if (conn && lock == &conn->slot->tx_lock)
		tx_recount(conn, fd);
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
			if (task_dead(holder, false) && atomic_compare_exchange_strong(lock, &holder, self.tid)) {
				lock_inherited(lock);
				return;
			}
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
