/* shim_nest.c - epoll sets inside others, on which the kernel alone waits: their members leave their rings. */
#include "shim_provider.h"
#include "shim_set.h"

void set_stand_in_look(struct set *set)
{
	set_lock(set);
	set_stand_in(set);
	set_unlock(set);
}

/* Whether it receives, or may yet, by a ring of which the kernel tells nothing, and has not been asked to leave it. */
static bool stays_on_ring(const struct conn_slot *slot)
{
	return !slot_has(slot, SLOT_PIN) || (rx_watches(slot) && !slot_has(slot, SLOT_LEAVES));
}

/* From now on the set is in another one. */
void set_nest(struct set *set)
{
	struct conn *conns[64];
	int fds[64], n;
	uint32_t at = 1;

	set->nested = true;
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
	/* The outer set would report a doorbell that has ever rung as something to read, and what the provider says. */
	shim_lock_take();
	set_lock(set);
	for (uint32_t i = 0; i < set->doorbells_len; i++)
		real.epoll_ctl(set->epfd, EPOLL_CTL_DEL, set->doorbells[i].doorbell->heard_fd, NULL);
	if (word_load(provider.fd) >= 0)
		real.epoll_ctl(set->epfd, EPOLL_CTL_DEL, provider.fd, NULL);
	set_stand_in(set);
	set_unlock(set);
	shim_lock_drop();
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
			stand_in_change(set, EPOLL_CTL_DEL);
		else
			set_stand_in(set);
		set_unlock(set);
	}
}
