/*
 * shim_wait.h - one wait: of a call that blocks on a connection, of poll(), or on an epoll set.
 *
 * It looks at the rings for a while, as long as that is likely to pay. Then it sleeps on doorbells and on what the kernel
 * watches. What is true of all three stands here; a `struct wait_kind` has what differs. Its functions are inlined.
 */
#ifndef SIDESTEP_SHIM_WAIT_H
#define SIDESTEP_SHIM_WAIT_H

#include "shim_spin.h"

#include <pthread.h>

#define WAIT_DOORBELLS_MAX 64 /* doorbells that a thread can sleep on */

/* The first member of each kind's own struct. */
struct wait {
	int64_t start, deadline, now;
	uint64_t signals; /* count of the thread's, from before */
	struct spin_budget *budget;
	uint32_t looks; /* questions to the kernel: one is the program's own */
	bool asked;     /* the kernel was, by its sleep at the latest */
	bool spun, wasted, shares; /* flags of its struct spin */
	bool truncated; /* more doorbells than a thread can sleep on: a nap */
	bool aware;     /* True if it hears of sets in others, by their stand-ins. */
	uint32_t loose; /* connections in no set that it looks at by itself */
	uint32_t len;
	struct doorbell
		*doorbells[WAIT_DOORBELLS_MAX]; /* doorbells on which it sleeps, each with a reference where several may be */
};

static inline void wait_start(struct wait *wait, int64_t deadline, uint64_t signals, struct spin_budget *budget)
{
	memset(wait, 0, offsetof(struct wait, doorbells));
	wait->now = wait->start = now_ns();
	wait->deadline = deadline;
	wait->signals = signals;
	wait->budget = budget;
}

/* Announces the sleep on the doorbells from `first` on. There are `len` by now, as far as there is room for them. */
static inline void wait_arm(struct wait *wait, uint32_t first, uint32_t len)
{
	wait->truncated |= len > WAIT_DOORBELLS_MAX;
	wait->len = len > WAIT_DOORBELLS_MAX ? WAIT_DOORBELLS_MAX : len;
	for (uint32_t i = first; i < wait->len; i++)
		doorbell_word_sleep(wait->doorbells[i]->word);
}

struct wait_kind { /* functions of a wait, which they get */
	int (*look)(void *); /* Looks at the rings while it spins: how much is ready. */
	bool (*begin)(void *); /* Prepares to sleep. False: it had better look again. */
	int (*arm)(void *); /* Announces the sleep to peers, with a full fence, then looks once more. */
	int (*sleep)(void *, int64_t until); /* Sleeps in the kernel, and sets errno. */
	void (*disarm)(void *);
	void (*cancelled)(void *); /* The thread ends in its sleep. */
	int (*woken)(void *, int result); /* Tells what is ready after sleep() has returned `result`. */
};

/* Tells how much is ready; 0: it is time to sleep. */
static inline __attribute__((always_inline)) int wait_spin(struct wait *wait, const struct wait_kind *kind,
                                                           uint32_t peer_cpu, bool may_move)
{
	struct spin spin;
	int n;

	if (!spin_begin(&spin, spin_budget_now(wait->budget), peer_cpu))
		return 0;
	wait->spun = true;
	do {
		wait->now = spin.now;
		if (spin.now >= wait->deadline)
			return 0;
		wait->shares = spin.shares;
		n = kind->look(wait);
	} while (!n && self.signals == wait->signals && spin_on(&spin, peer_cpu, may_move));
	wait->now = spin.now;
	wait->wasted = !n && spin_was_wasted(&spin);
	if (n)
		spin_won(wait->budget);
	return n;
}

/* Sleeps once, unless something is ready: how much, or what woken() returns. 0: look again. */
static inline int wait_sleep(struct wait *wait, const struct wait_kind *kind)
{
	volatile int result = 0, failed = 0; /* live across the cleanup handler's setjmp */

	rpc_listen();
	conns_trim(wait->now);
	self.full_until = 0;
	wait->truncated = wait->aware = false;
	if (!kind->begin(wait))
		return 0;
	int n = kind->arm(wait);
	if (!n) {
		int64_t until = sleep_deadline(wait->deadline, wait->now);
		until = conns_serve(wait->doorbells, wait->len, wait->loose, until);
		pthread_cleanup_push(kind->cancelled, wait);
		result = kind->sleep(wait, until);
		failed = errno;
		pthread_cleanup_pop(0);
		conns_serve(wait->doorbells, wait->len, wait->loose, INT64_MAX);
		wait->asked = true;
	}
	kind->disarm(wait);
	if (n)
		return n;
	wait->now = now_ns();
	spin_adapt(wait->budget, wait->now - wait->start, wait->wasted);
	wait->wasted = false;
	errno = failed;
	return kind->woken(wait, result);
}

#endif
