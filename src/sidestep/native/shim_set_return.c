/*
 * shim_set_return.c - epoll registrations of a connection whose last number is closed while a message holds its socket.
 *
 * The kernel keeps a registration while any file of the socket is left, and reports it. If the message is for this process,
 * the registration waits here, and is put back when the socket comes. Until then the kernel's entry alone is reported. If it
 * comes under another number, no call can change the kernel's entry any more, so the connection goes to TCP.
 *
 * A socket that strangers may have goes on by TCP alone. The kernel's entry then becomes what the program asked for.
 */
#include "shim_set.h"
#include "shim_travel.h"

#define KEPT_REGISTRATIONS 64 /* of more, the oldest is forgotten */

/* Guarded by shim_lock; `was` by the lock of its set as well. */
static struct kept {
	const struct conn_slot *slot; /* NULL: none */
	uint32_t generation;
	struct member was; /* a member without a connection, in its place in the set; that is NULL if the set has ended */
} kept[KEPT_REGISTRATIONS];
static uint32_t next;

/* shim_lock and set lock held, unless the set has ended */
static void kept_end(struct kept *one)
{
	one->slot = NULL;
	if (!one->was.set)
		return;
	one->was.set->members[one->was.index] = NULL;
	one->was.set->members_live--;
}

/* shim_lock held, and no lock of a set */
static struct kept *kept_new(void)
{
	for (uint32_t i = 0; i < KEPT_REGISTRATIONS; i++)
		if (!kept[i].slot || !kept[i].was.set)
			return &kept[i];
	struct kept *oldest = &kept[next++ % KEPT_REGISTRATIONS];
	struct set *set = oldest->was.set;
	set_lock(set);
	kept_end(oldest);
	set_unlock(set);
	return oldest;
}

/* Both locks held. The number `fd` still has the socket, for the last time. */
static void member_keep(struct kept *one, struct member *member, int fd)
{
	struct set *set = member->set;

	/* The kernel has to report all that is wanted: nobody may be able to change its entry. */
	if (member->managed && member->fd == fd && !member->disabled) {
		member->in_kernel |= member->events & ~(uint32_t)(EPOLLONESHOT | EPOLLEXCLUSIVE);
		struct epoll_event event = {.events = member->in_kernel,
		                            .data.u64 = set->secret << NAME_BITS | member_name(member)};
		set_ctl(set, EPOLL_CTL_MOD, fd, &event);
	}
	one->slot = member->conn->slot;
	one->generation = member->conn->generation;
	one->was = *member;
	member_free(member);
	one->was.managed = one->was.hot = one->was.hinted = one->was.by_tcp = false;
	one->was.conn = NULL;
	one->was.next = NULL;
	set->members[one->was.index] = &one->was;
	set->members_live++;
}

/* Both locks held. From now on the kernel reports it to the program. */
static void member_hand_over(struct member *member, int fd)
{
	struct set *set = member->set;
	struct epoll_event event = {.events = member->events, .data.u64 = member->data};
	const bool ours = member->managed || (member->events & EPOLLONESHOT);

	if (ours && member->fd == fd && !member->disabled) {
		if (member->events & EPOLLEXCLUSIVE)
			set_ctl(set, EPOLL_CTL_DEL, fd, NULL);
		set_ctl(set, member->events & EPOLLEXCLUSIVE ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, fd, &event);
	}
	member_free(member);
}

/* No lock is held. The last number of the connection is being closed. */
void set_conn_goes(struct conn *conn, int fd)
{
	KEEP_ERRNO;

	shim_lock_take();
	for (struct member *member = conn->members, *after; member; member = after) {
		struct set *set = member->set;
		after = member->next;
		if (member->away || set->owner_pid != shim_pid)
			continue;
		struct kept *one = word_load(conn->in_message) ? kept_new() : NULL;
		set_lock(set);
		if (one)
			member_keep(one, member, fd);
		else
			member_hand_over(member, fd);
		set_unlock(set);
	}
	shim_lock_drop();
}

/* Both locks held. No edge that was reported is reported again: the kernel's edges are of the file. */
static void member_restore(struct kept *one, struct conn *conn, int fd)
{
	const struct member was = one->was;
	struct set *set = was.set;
	struct member *member = calloc(1, sizeof(*member));

	kept_end(one);
	if (!member)
		return;
	*member = was;
	member->conn = conn;
	member->next = conn->members;
	member->disabled = was.disabled && (was.events & EPOLLONESHOT);
	__atomic_store_n(&conn->members, member, __ATOMIC_RELAXED);
	conn_unloose(conn);
	set->members[was.index] = member;
	set->members_live++;
	if (!conn->managed)
		return;
	if (!member_manage(member, was.fd == fd ? EPOLL_CTL_MOD : 0)) {
		member_free(member);
		return;
	}
	member->armed = was.armed;
	member->out_armed = was.out_armed;
	member->reported = was.reported;
	wake_set(set);
}

/* No lock is held. The connection has come back under the number `fd`. */
void set_conn_returned(struct conn *conn, int fd)
{
	KEEP_ERRNO;
	bool elsewhere = false;

	shim_lock_take();
	for (uint32_t i = 0; i < KEPT_REGISTRATIONS; i++) {
		struct set *set = kept[i].was.set;
		if (kept[i].slot != conn->slot || kept[i].generation != conn->generation || !set)
			continue;
		elsewhere |= kept[i].was.fd != fd;
		set_lock(set);
		member_restore(&kept[i], conn, fd);
		set_unlock(set);
	}
	shim_lock_drop();
	if (elsewhere)
		conn_demote(conn, fd, REASON_EPOLL_UNSUPPORTED, false);
}
