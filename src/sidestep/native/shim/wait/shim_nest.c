/*
 * shim_nest.c - epoll sets inside others: a look at an outer set sees the bytes in the rings below it.
 *
 * The kernel decides which events of an inner set an outer one reports. Before it is asked, and before a thread sleeps, the
 * stand-ins of all sets below are brought up to date (nest_look()). The thread sleeps on the outer set and on the doorbells
 * of all sets below. If those were entries of the inner sets, the outer set would report each that has ever rung.
 *
 * A record of a set in another lasts until one of the two ends. One that is out of date costs a look, and changes no answer.
 */
#include "shim_provider.h"
#include "shim_set.h"

#define NESTS_MAX 5 /* depth to which the kernel lets sets be in sets: EP_MAX_NESTS, fs/eventpoll.c */
#define AWARE_TURNS 1000 /* milliseconds for threads asleep to hear that their set has come into another */

/* True if it receives, or may yet, by a ring of which the kernel tells nothing, and has not been asked to leave it. */
static bool stays_on_ring(const struct conn_slot *slot)
{
	return !slot_has(slot, SLOT_PIN) || (rx_watches(slot) && !slot_has(slot, SLOT_LEAVES));
}

/* Neither lock is held. The kernel alone may wait on a set that it is in: its members leave their rings. */
void set_leave(struct set *set)
{
	struct conn *conns[64];
	int fds[64], n;
	uint32_t at = 1;

	set->leaves = true;
	set_sweep(set);
	do {
		n = 0;
		shim_lock_take();
		set_lock(set);
		for (; at < set->members_len && n < 64; at++) {
			const struct member *member = set->members[at];
			if (!member || !member->managed || !stays_on_ring(member->conn->slot))
				continue;
			conns[n] = member->conn;
			fds[n] = member->fd;
			conn_ref(conns[n++]);
		}
		set_unlock(set);
		shim_lock_drop();
		for (int i = 0; i < n; i++) {
			conn_leave(conns[i], fds[i], REASON_EPOLL_UNSUPPORTED);
			conn_unref(conns[i]);
		}
	} while (n);
	set_lock(set);
	set_stand_in(set, false);
	set_unlock(set);
}

/* shim_lock held. The first of the set itself and those below it that is `wrong`. */
static struct set *find_below(struct set *set, int depth, bool (*wrong)(const struct set *set))
{
	struct set *found = wrong(set) ? set : NULL;

	for (struct nest *nest = set->inners; nest && !found && depth < NESTS_MAX; nest = nest->next)
		found = find_below(nest->inner, depth + 1, wrong);
	return found;
}

/* Neither lock is held. The members of all that are `wrong`, the set itself and those below it, leave their rings. */
static void leave_below(struct set *set, bool (*wrong)(const struct set *set))
{
	for (;;) {
		shim_lock_take();
		HELD_SET found = find_below(set, 0, wrong);
		if (found)
			atomic_fetch_add(&found->users, 1);
		shim_lock_drop();
		if (!found)
			return;
		set_leave(found);
	}
}

static bool stays(const struct set *set)
{
	return (set->nest & NEST_INNER) && !set->leaves;
}

/* A forked child shares the kernel's sets with its parent, and neither hears what the other does with them. */
static bool stays_shared(const struct set *set)
{
	return stays(set) && set->shared;
}

/* shim_lock held */
static void keep_below(struct set *set, int depth)
{
	if (set->nest & NEST_INNER) {
		set_lock(set);
		set_keep(set);
		set_unlock(set);
	}
	for (struct nest *nest = set->inners; nest && depth < NESTS_MAX; nest = nest->next)
		keep_below(nest->inner, depth + 1);
}

/* Neither lock is held. The kernel is about to be asked of the set, by whatever call: its answer counts from here on. */
void nest_look(struct set *set)
{
	KEEP_ERRNO;

	if (unlikely(set->shared))
		leave_below(set, stays_shared);
	shim_lock_take();
	keep_below(set, 0);
	shim_lock_drop();
}

/* shim_lock held */
static uint32_t doorbells_below(struct set *set, int depth, struct doorbell **doorbells, uint32_t len, uint32_t max)
{
	set_lock(set);
	for (uint32_t i = 0; i < set->doorbells_len && len <= max; i++)
		len = doorbell_add(doorbells, len, max, set->doorbells[i].doorbell);
	set_unlock(set);
	for (struct nest *nest = set->inners; nest && depth < NESTS_MAX && len <= max; nest = nest->next)
		len = doorbells_below(nest->inner, depth + 1, doorbells, len, max);
	return len;
}

/*
 * Neither lock is held. Adds the doorbells of the set and of those below it to the first `len`, each with a reference. How many
 * there are by then; more than `max`: not all.
 */
uint32_t nest_doorbells(struct set *set, struct doorbell **doorbells, uint32_t len, uint32_t max)
{
	shim_lock_take();
	len = doorbells_below(set, 0, doorbells, len, max);
	shim_lock_drop();
	return len;
}

/* set lock held. Threads that sleep since before the nesting hear neither a stand-in nor the doorbells of sets below. */
static bool unaware(struct set *set)
{
	return atomic_load(&set->kernel_waiters) || atomic_load(&set->sleepers) != atomic_load(&set->aware);
}

/* Neither lock is held. Wakes the threads that are asleep in the set, each. False: not all have come in time. */
static bool all_aware(struct set *set)
{
	bool wait = true;

	for (int turn = 0; wait && turn < AWARE_TURNS; turn++) {
		if (turn)
			raw_poll(NULL, 0, 1);
		set_lock(set);
		wait = unaware(set) && stand_in_enter(set);
		stand_in_put(set, wait, true); /* anew: a thread that has taken the kernel's event may have known already */
		set_unlock(set);
	}
	return !unaware(set);
}

/* shim_lock held. From now on the set is in another one, or has one in it. False: it has no stand-in. */
static bool nest_begin(struct set *set, uint8_t kind)
{
	set_lock(set);
	bool done = kind == NEST_OUTER || stand_in_enter(set);
	if (!(set->nest & kind)) {
		atomic_store(&set->managed_ever, true); /* the kernel's events may be of ours from here on */
		set->nest |= kind;
		atomic_fetch_add(&set->ours, 1);
		set->by_tcp += kind == NEST_OUTER; /* the kernel is asked at each wait */
	}
	set_unlock(set);
	return done;
}

/* shim_lock held. The outer set would report a doorbell that has ever rung as something to read, and what the provider says. */
static void nest_clear(struct set *inner)
{
	set_lock(inner);
	for (uint32_t i = 0; i < inner->doorbells_len; i++)
		real.epoll_ctl(inner->epfd, EPOLL_CTL_DEL, inner->doorbells[i].doorbell->wait_fd, NULL);
	if (word_load(provider.fd) >= 0)
		real.epoll_ctl(inner->epfd, EPOLL_CTL_DEL, provider.fd, NULL);
	set_unlock(inner);
}

/* shim_lock held. False: it cannot be remembered. */
static bool nest_record(struct set *outer, struct set *inner)
{
	for (struct nest *nest = outer->inners; nest; nest = nest->next)
		if (nest->inner == inner)
			return true;
	struct nest *nest = malloc(sizeof(*nest));
	if (!nest)
		return false;
	*nest = (struct nest){outer->inners, inner};
	outer->inners = nest;
	return true;
}

/* The kernel is asked of the set from without from now on. False: its members have to leave their rings. */
static bool nest_inner(struct set *set, bool carried)
{
	set_sweep(set);
	carried = carried && !set->shared && all_aware(set);
	shim_lock_take();
	nest_clear(set);
	shim_lock_drop();
	return carried;
}

/* The kernel has put the inner set into the outer one; NULL: one that is not ours. */
void set_nest(struct set *outer, struct set *inner)
{
	KEEP_ERRNO;

	shim_lock_take();
	bool carried = nest_begin(inner, NEST_INNER);
	carried = outer && nest_record(outer, inner) && nest_begin(outer, NEST_OUTER) && carried;
	shim_lock_drop();
	if (!nest_inner(inner, carried && !outer->leaves && !outer->shared && all_aware(outer)))
		leave_below(inner, stays);
	nest_look(outer ? outer : inner);
	set_lock(inner);
	wake_set(inner); /* a thread that waits on a set above does not know of it */
	set_unlock(inner);
}

/* poll() is about to ask the kernel of the set, which would report a doorbell that has ever rung. */
void set_polled(struct set *set)
{
	KEEP_ERRNO;

	if (likely(set->nest & NEST_INNER) || set->shared)
		return;
	shim_lock_take();
	bool carried = nest_begin(set, NEST_INNER);
	shim_lock_drop();
	if (!nest_inner(set, carried))
		leave_below(set, stays);
}

/*
 * This process becomes another program, which may have inherited its sets, but knows nothing of stand-ins; or it does not. Those
 * of a parent are the parent's.
 */
void sets_on_exec(bool before)
{
	KEEP_ERRNO;

	for (uint32_t fd = 0; fd < atomic_load(&fd_end); fd++) {
		HELD_SET set = set_hold((int)fd);
		if (!set || set->stand_in <= 0 || set->owner_pid != shim_pid)
			continue;
		set_lock(set);
		if (before)
			stand_in_put(set, false, false);
		else if (set->leaves)
			set_stand_in(set, false);
		set_unlock(set);
	}
}
