/*
 * shim_set_return.c - epoll registrations that outlive their connection.
 *
 * The kernel keeps a registration while any file of the socket is left, and reports it. A message to this process may hold the
 * socket when its last number is closed. The registration then waits here, and is put back when the socket comes. Until then
 * the kernel's entry alone is reported. If the socket comes under another number, no call can change that entry any more. So
 * the connection goes to TCP.
 *
 * A socket that strangers may have goes on by TCP alone, as one whose peer is forgotten does. The kernel's entry then becomes
 * what the program asked for. If its number has been closed before, the registration stays here for its data.
 */
#include "shim_set.h"
#include "shim_travel.h"

/* A registration that waits; `was` is also guarded by the lock of its set. */
struct kept {
	struct kept *next;
	const struct conn_slot *slot; /* NULL: it does not come back */
	uint32_t generation;
	uint32_t in_messages; /* messages that held the socket then */
	struct member was; /* a member without a connection, in its place in the set; that is NULL if the set has ended */
};
static struct kept *kept; /* guarded by shim_lock */

/* shim_lock held, and the lock of its set, if that has not ended. */
static void kept_end(struct kept **at)
{
	struct kept *one = *at;

	*at = one->next;
	if (one->was.set) {
		one->was.set->members[one->was.index] = NULL;
		one->was.set->members_live--;
	}
	free(one);
}

/* shim_lock held, and no lock of a set. Ends those that can wait for nothing: the set has ended, or the slot is another's. */
static void kept_prune(const struct conn *conn)
{
	for (struct kept **at = &kept; *at;) {
		struct set *set = (*at)->was.set;
		if (set && ((*at)->slot != conn->slot || (*at)->generation == conn->generation)) {
			at = &(*at)->next;
			continue;
		}
		if (set)
			set_lock(set);
		kept_end(at);
		if (set)
			set_unlock(set);
	}
}

/* Both locks held. `named`: its number still has the socket. */
static void member_keep(struct kept *one, struct member *member, bool named, uint32_t in_messages)
{
	struct set *set = member->set;

	/* The kernel has to report all that is wanted: nobody may be able to change its entry. A one-shot one reports no more. */
	const uint32_t wanted = member->events & ~(uint32_t)EPOLLEXCLUSIVE;
	const uint32_t all = wanted & EPOLLONESHOT ? wanted : member->in_kernel | wanted;
	if (member->managed && named && !member->disabled && member->in_kernel != all) {
		struct epoll_event event = {.events = all, .data.u64 = set->secret << NAME_BITS | member_name(member)};
		member->in_kernel = all;
		set_ctl(set, EPOLL_CTL_MOD, member->fd, &event);
	}
	*one = (struct kept){kept, in_messages ? member->conn->slot : NULL, member->conn->generation, in_messages, *member};
	kept = one;
	member_free(member);
	one->was.managed = one->was.hot = one->was.hinted = one->was.by_tcp = false;
	one->was.conn = NULL;
	one->was.next = NULL;
	set->members[one->was.index] = &one->was;
	set->members_live++;
}

/* True if the kernel's entry has our data; see kernel_unmanaged() */
static bool is_ours(const struct member *member)
{
	return member->managed || (member->events & EPOLLONESHOT);
}

/* Both locks held. The registration is the kernel's from now on, as the program has made it. */
static void give_back(struct member *member, bool named)
{
	struct set *set = member->set;
	struct epoll_event event = {.events = member->events, .data.u64 = member->data};

	if (member->away) {
		member_drop(member);
		return;
	}
	/* a one-shot that has fired: our name has no meaning any more, so its one event is left out */
	if (member->disabled)
		event =
			(struct epoll_event){.events = EPOLLONESHOT, .data.u64 = set->secret << NAME_BITS | member_name(member)};
	if (named && !member->exclusive && is_ours(member)) {
		const bool exclusive = event.events & EPOLLEXCLUSIVE;
		if (exclusive)
			set_ctl(set, EPOLL_CTL_DEL, member->fd, NULL);
		set_ctl(set, exclusive ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, member->fd, &event);
	}
	wake_set(set);
	member_free(member);
}

/* shim_lock held. The connection goes, and the registration stays: here, if no call can make the kernel's entry the program's. */
static void member_goes(struct member *member, bool named, uint32_t in_messages)
{
	struct set *set = member->set;
	const bool waits = in_messages || (is_ours(member) && !named);
	struct kept *one = waits && !member->away ? malloc(sizeof(*one)) : NULL;

	set_lock(set);
	if (one)
		member_keep(one, member, named, in_messages);
	else
		give_back(member, named);
	set_unlock(set);
}

/* The kernel's socket starts over, and stays in its sets. False: a registration is another process's, and is left as it is. */
bool set_conn_dissolved(struct conn *conn)
{
	bool ours = true;
	KEEP_ERRNO;

	shim_lock_take();
	for (struct member *member = conn->members; member; member = member->next)
		ours &= member->set->user_pid == shim_pid;
	while (ours && conn->members)
		member_goes(conn->members, conn_get(conn->members->fd) == conn, 0);
	shim_lock_drop();
	return ours;
}

/* Both locks held. No edge that was reported is reported again: the kernel's edges are of the file. */
static void member_restore(struct kept **at, struct conn *conn, int fd)
{
	const struct member was = (*at)->was;
	struct set *set = was.set;
	struct member *member = malloc(sizeof(*member));

	kept_end(at);
	if (!member)
		return;
	*member = was;
	member->conn = conn;
	member->next = conn->members;
	__atomic_store_n(&conn->members, member, __ATOMIC_RELAXED);
	conn_unloose(conn);
	set->members[was.index] = member;
	set->members_live++;
	if (!conn->managed)
		return;
	/* a MOD makes the kernel report an edge anew */
	member->known &= was.fd == fd && set_private(set) && !kernel_differs(member, 0);
	if (!member_manage(member, was.fd == fd && !member->known ? EPOLL_CTL_MOD : 0)) {
		member_free(member);
		return;
	}
	member->armed = was.armed;
	member->out_armed = was.out_armed;
	member->reported = was.reported;
	wake_set(set);
}

/* No lock is held. The connection has come back under the number `fd`. `taking`: another thread takes its ring up, then calls this. */
void set_conn_returned(struct conn *conn, int fd, bool taking)
{
	bool fixed = false, shared = false, leaves = false;
	uint32_t in_messages = 0;
	KEEP_ERRNO;

	shim_lock_take();
	for (struct kept **at = &kept; *at;) {
		struct set *set = (*at)->was.set;
		if (!set || (*at)->slot != conn->slot || (*at)->generation != conn->generation) {
			at = &(*at)->next;
			continue;
		}
		in_messages = (*at)->in_messages - 1;
		set_lock(set);
		member_restore(at, conn, fd);
		set_unlock(set);
	}
	if (conn->managed) /* another thread may have put some back while it was being taken up */
		set_conn_attached(conn);
	for (struct member *member = conn->members; member; member = member->next) {
		fixed |= member->fd != fd;
		shared |= member->set->shared;
		leaves |= member->set->leaves;
	}
	shim_lock_drop();
	atomic_fetch_add(&conn->in_messages, in_messages);
	/* The kernel alone waits on such a set, or another process does as well: see add() in shim_epoll.c. */
	if ((fixed || shared) && !(taking && !conn->managed))
		conn_demote(conn, fd, REASON_EPOLL_UNSUPPORTED, shared);
	if (leaves && conn->managed)
		conn_leave(conn, fd, REASON_EPOLL_UNSUPPORTED);
}

/* No lock is held. The last number of the connection is being closed, and the socket lives on. */
void set_conn_goes(struct conn *conn, int fd)
{
	const uint32_t in_messages = word_load(conn->in_messages);
	int taken;
	KEEP_ERRNO;

	shim_lock_take();
	kept_prune(conn);
	for (struct member *member = conn->members, *after; member; member = after) {
		after = member->next;
		if (member->set->owner_pid == shim_pid)
			member_goes(member, member->fd == fd, in_messages);
	}
	shim_lock_drop();
	/* Another thread has taken it out of the message before it was known to have gone. */
	HELD back = in_messages ? conn_find(conn->slot, conn->generation, &taken) : NULL;
	if (back)
		set_conn_returned(back, taken, conn->managed);
}
