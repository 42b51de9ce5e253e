/*
 * shim_set.c - epoll sets whose members may be promoted.
 *
 * A set without managed members is the kernel's alone: calls pass through. When a member is managed, its kernel entry keeps
 * its place, so that FIN and RST arrive. It has no OUT once the member sends by ring, and carries the shim's own data. The
 * set's doorbell is one more entry, edge-triggered. Every event of such a set is then read, translated and merged here:
 * exactly one a registration, with the events and the data the program gave.
 *
 * The shim's data is `secret << 32 | age << 24 | index`. A program's value may look like it. Before the kernel has any entry
 * with that value, the set chooses another secret. Later it pins the registration's set.
 */
#include "shim_set.h"

#include <sys/random.h>

_Atomic uint32_t fork_count;
static struct set *free_sets; /* guarded by shim_lock; type-stable, as conns are */

struct set *set_get(int epfd)
{
	struct file *file = file_get(epfd);

	return file && file->kind == FILE_SET ? (struct set *)file : NULL;
}

/* The set behind a number: it is not reused before set_release(), even if the number is closed. */
struct set *set_hold(int epfd)
{
	struct set *set = set_get(epfd);

	if (!set)
		return NULL;
	atomic_fetch_add(&set->users, 1);
	if (likely(set_get(epfd) == set))
		return set;
	atomic_fetch_sub(&set->users, 1);
	return NULL;
}

void set_release(struct set **set)
{
	if (*set)
		atomic_fetch_sub(&(*set)->users, 1);
}

/* The lock's owner may not be cancelled in the middle. */
void set_lock(struct set *set)
{
	int before;

	critical_enter();
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
	pthread_mutex_lock(&set->lock);
	set->cancel_state = before;
}

void set_unlock(struct set *set)
{
	int before = set->cancel_state;

	pthread_mutex_unlock(&set->lock);
	pthread_setcancelstate(before, &before);
	critical_leave();
}

uint64_t new_secret(void)
{
	uint64_t value = 0;

	if (getrandom(&value, sizeof(value), GRND_NONBLOCK) != sizeof(value))
		value = (uint64_t)now_ns() * 0x9E3779B97F4A7C15ull;
	return value >> NAME_BITS;
}

int set_created(int epfd)
{
	if (epfd < 0 || (uint32_t)epfd >= fd_table_len)
		return epfd;
	shim_lock_take();
	struct set **at = &free_sets;
	while (*at && atomic_load(&(*at)->users)) /* a thread has not yet noticed that it was closed */
		at = &(*at)->next_free;
	struct set *set = *at;
	if (set) {
		*at = set->next_free;
		memset((uint8_t *)set + offsetof(struct set, next_free), 0, sizeof(*set) - offsetof(struct set, next_free));
		set->ours = set->managed_len = set->kernel_waiters = set->refs = 0;
	}
	shim_lock_drop();
	if (!set) {
		set = calloc(1, sizeof(*set));
		if (!set)
			return epfd; /* untracked: connections added to it are pinned */
		set->file.kind = FILE_SET; /* never changes: a late thread may look at it while the set is reused */
	}
	set->epfd = epfd;
	set->owner_pid = shim_pid;
	set->user_pid = shim_pid;
	set->forks = fork_count;
	set->refs = 1;
	set->secret = new_secret();
	set->budget = (struct spin_budget){.ns = config.spin_ns};
	set->last_cpu = 0;
	pthread_mutex_init(&set->lock, NULL);
	file_put(epfd, &set->file);
	return epfd;
}

/* ---- membership (shim_lock and set lock held) ---- */
static uint32_t kernel_events(const struct member *member)
{
	const bool withheld = conn_end_withheld(member->conn);
	struct conn_slot *slot = member->conn->slot;

	if (member->disabled || member->away)
		return EPOLLONESHOT; /* an entry that reports not even HUP again and again */
	uint32_t events =
		conn_watched(member->conn, member->fd, member->events & ~(uint32_t)(EPOLLONESHOT | EPOLLEXCLUSIVE), withheld);
	/* edges by which the ring's bytes are news: an urgent byte, and what our end brings; see member_look() */
	if ((events & EPOLLET) && !(member->set->nest & NEST_INNER) && !tx_is(slot, TX_RESEND))
		events |= EPOLLPRI | (tx_is(slot, TX_ENDED) ? EPOLLOUT : 0u);
	if (withheld && !(events & (EPOLLIN | EPOLLRDNORM | EPOLLOUT | EPOLLWRNORM)))
		events |= EPOLLET; /* HUP and ERR cannot be declined; nothing but a reset can follow */
	/* bytes of TCP may have to stay there for a while, and an outer set would report them again and again */
	if (conn_relayed(member->conn) && (member->set->nest & NEST_INNER) && rx_by_ring(slot) &&
	    !(events & (EPOLLPRI | EPOLLOUT | EPOLLWRNORM | EPOLLWRBAND)))
		events |= EPOLLET;
	return events;
}

uint32_t member_name(const struct member *member)
{
	return (uint32_t)member->age << INDEX_BITS | member->index;
}

/*
 * True if the kernel's entry, which has just reported `bits`, has to be changed. It may hold more than is wanted until that
 * is reported. Programs change their interest more often than the kernel has events of a connection on the ring.
 */
bool kernel_differs(const struct member *member, uint32_t bits)
{
	uint32_t wanted = kernel_events(member), has = member->in_kernel;

	if ((wanted | has) & (EPOLLET | EPOLLONESHOT))
		return wanted != has;
	return (wanted & ~has) || (bits & ~(wanted | EPOLLERR | EPOLLHUP));
}

int kernel_set(struct member *member, int op)
{
	struct set *set = member->set;

	/*
	 * The set of a parent is the parent's to change until the child uses it. A number that was closed, with a copy left, may
	 * name another file.
	 */
	member->in_kernel = kernel_events(member);
	member->known = false;
	if (set->user_pid != shim_pid || conn_get(member->fd) != member->conn)
		return 0;
	struct epoll_event event = {.events = member->in_kernel,
	                            .data.u64 = set->secret << NAME_BITS | member_name(member)};
	/* epoll_ctl(2): an exclusive entry cannot be changed. Ours is not one: "one or more" of its sets are to be woken. */
	if (unlikely(member->exclusive) && op == EPOLL_CTL_MOD) {
		set_ctl(set, EPOLL_CTL_DEL, member->fd, NULL);
		op = EPOLL_CTL_ADD;
	}
	member->exclusive = false;
	int result = set_ctl(set, op, member->fd, &event);

	member->known = result == 0;
	if (unlikely(set->leaves))
		set_stand_in(set, false);
	return result;
}

/*
 * The entry of a member whose connection is not managed, as the program gave it. But member_manage() must not arm a one-shot
 * entry that has fired, and only translate() knows that. So such an entry carries our data from the start. Each arming has a
 * name of its own, so that a late event of the last one does not count for this one.
 */
int kernel_unmanaged(struct member *member, int op)
{
	struct set *set = member->set;
	struct epoll_event event = {.events = member->events, .data.u64 = member->data};

	if (member->events & EPOLLONESHOT) {
		atomic_store(&set->managed_ever, true);
		event.data.u64 = set->secret << NAME_BITS | member_name(member);
	}
	member->known = false;
	member->exclusive |= op == EPOLL_CTL_ADD && (member->events & EPOLLEXCLUSIVE);
	return set_ctl(set, op, member->fd, &event);
}

static bool doorbell_enter(struct set *set, struct doorbell *doorbell)
{
	for (uint32_t i = 0; i < set->doorbells_len; i++)
		if (set->doorbells[i].doorbell == doorbell) {
			set->doorbells[i].refs++;
			return true;
		}
	struct epoll_event event = {.events = DOORBELL_EDGES, .data.u64 = set->secret << NAME_BITS | DOORBELL_INDEX};
	/* the outer set would report a doorbell that has ever rung as something to read */
	if (!grow(&set->doorbells, &set->doorbells_cap, set->doorbells_len + 1, sizeof(*set->doorbells)) ||
	    (!(set->nest & NEST_INNER) && set_ctl(set, EPOLL_CTL_ADD, doorbell->wait_fd, &event) < 0 && errno != EEXIST))
		return false;
	set->doorbells[set->doorbells_len++] = (struct set_doorbell){doorbell, 1};
	atomic_fetch_add(&doorbell->refs, 1);
	return true;
}

static void doorbell_exit(struct set *set, struct doorbell *doorbell)
{
	for (uint32_t i = 0; i < set->doorbells_len; i++)
		if (set->doorbells[i].doorbell == doorbell && --set->doorbells[i].refs == 0) {
			if (set->owner_pid == shim_pid)
				set_ctl(set, EPOLL_CTL_DEL, doorbell->wait_fd, NULL);
			set->doorbells[i] = set->doorbells[--set->doorbells_len];
			doorbell_unref(doorbell);
			return;
		}
}

void member_by_tcp(struct member *member, bool by_tcp)
{
	if (member->by_tcp == by_tcp)
		return;
	member->by_tcp = by_tcp;
	member->set->by_tcp += by_tcp ? 1 : UINT32_MAX;
}

bool member_manage(struct member *member, int op)
{
	struct set *set = member->set;
	struct conn *conn = member->conn;

	/* order: before the kernel can report our data to a thread that is just returning from it */
	atomic_store(&set->managed_ever, true);
	if (!grow(&set->managed, &set->managed_cap, set->managed_len + 1, sizeof(*set->managed)) ||
	    !doorbell_enter(set, conn->doorbell))
		return false;
	int result = op ? kernel_set(member, op) : 0; /* 0: no call can change the kernel's entry */
	/* Another thread is just closing it: the kernel's entry stays as it was, and would be reported beside our events. */
	bool closing = op && result == 0 && !member->known && set->user_pid == shim_pid;
	if (result < 0 || closing) {
		int failed = closing ? EBADF : errno;
		doorbell_exit(set, conn->doorbell);
		errno = failed;
		return false;
	}
	/* the death of the provider is an edge, as a doorbell's ring is; the entry goes with the descriptor */
	if (!conn_liveness_watch(conn, set->epfd, set->secret << NAME_BITS | DOORBELL_INDEX))
		shim_log("the end of a provider will be heard late: %d", errno);
	member->managed = true;
	word_add(set->manages, 1);
	member_by_tcp(member, !conn_switched(conn));
	member->armed = member->out_armed = true;
	member->reported = 0;
	member->at = set->managed_len;
	set->managed[set->managed_len] = member;
	atomic_fetch_add(&set->managed_len, 1);
	atomic_fetch_add(&set->ours, 1);
	if (set->hinting) {
		feed_enter(set, member);
	} else if (set->managed_len > SCAN_MAX) {
		set->hinting = true;
		for (uint32_t i = 0; i < set->managed_len; i++)
			feed_enter(set, set->managed[i]);
		set->scan_all = true;
	}
	return true;
}

static void member_unmanage(struct member *member)
{
	struct set *set = member->set;

	if (!member->managed)
		return;
	feed_exit(set, member);
	member_by_tcp(member, false);
	uint32_t last = atomic_fetch_sub(&set->managed_len, 1) - 1;
	atomic_fetch_sub(&set->ours, 1);
	set->managed[member->at] = set->managed[last];
	set->managed[member->at]->at = member->at;
	member->managed = false;
	doorbell_exit(set, member->conn->doorbell);
	set->partial |= set->owner_pid != shim_pid;
	if (unlikely(set->leaves))
		set_stand_in(set, false);
}

struct member *member_find(struct set *set, struct conn *conn, int fd)
{
	for (struct member *member = conn->members; member; member = member->next)
		if (member->set == set && member->fd == fd)
			return member;
	return NULL;
}

struct member *member_new(struct set *set, struct conn *conn, int fd, const struct epoll_event *event)
{
	uint32_t index = set->next_index ? set->next_index : 1;

	while (index < set->members_len && set->members[index])
		index++;
	if (index >= set->members_len && set->members_live < set->members_len / 2)
		for (index = 1; set->members[index]; index++)
			; /* more than half are holes: start over */
	set->next_index = index + 1;
	if (index >> INDEX_BITS || !grow(&set->members, &set->members_cap, index + 1, sizeof(*set->members)))
		return NULL;
	struct member *member = calloc(1, sizeof(*member));
	if (!member)
		return NULL;
	*member = (struct member){
		.set = set,
		.conn = conn,
		.next = conn->members,
		.fd = fd,
		.index = index,
		.age = set->age++,
		.events = event->events,
		.data = event->data.u64,
		.armed = true,
		.out_armed = true,
	};
	__atomic_store_n(&conn->members, member, __ATOMIC_RELAXED);
	conn_unloose(conn);
	set->members[index] = member;
	set->members_live++;
	if (index >= set->members_len)
		set->members_len = index + 1;
	return member;
}

void member_free(struct member *member)
{
	struct member **at = &member->conn->members;

	member_unmanage(member);
	if (member->away)
		word_store(member->set->away_len, word_load(member->set->away_len) - 1);
	member->set->members[member->index] = NULL;
	member->set->members_live--;
	while (*at != member)
		at = &(*at)->next;
	__atomic_store_n(at, member->next, __ATOMIC_RELAXED); /* see has_members() */
	conn_loose(member->conn);
	free(member);
}

/* A managed member as the program wants it from now on: whatever is true is reported anew. */
int member_change(struct member *member, const struct epoll_event *event)
{
	member->events = event->events;
	member->data = event->data.u64;
	member->disabled = false;
	member->armed = member->out_armed = true;
	member->reported = member->stood = 0;
	/* a MOD makes the kernel report an edge anew; an outer set would report events of the entry beyond those that are wanted */
	bool as_it_is = member->known && set_private(member->set) && conn_switched(member->conn) &&
	                !(member->events & EPOLLET) && !(member->set->nest & NEST_INNER) && !kernel_differs(member, 0);
	int result = as_it_is ? 0 : kernel_set(member, EPOLL_CTL_MOD);
	hot_add(member->set, member);
	wake_set(member->set);
	return result;
}

/*
 * ---- members that are away ----
 *
 * Some programs take a registration out with one call and put it back with another, several times a request. While all bytes
 * of a member go by ring the kernel has no events of it, so its entry stays. A member that is away reports nothing, and the
 * first event of the kernel's silences it. A thread that is about to sleep takes it out for good. False: not this one.
 */
bool member_leave(struct member *member)
{
	struct set *set = member->set;

	if (!member->managed || !member->known || (set->nest & NEST_INNER) || !set_private(set) ||
	    !conn_switched(member->conn))
		return false;
	member->away = true;
	word_store(set->away_len, word_load(set->away_len) + 1);
	member_by_tcp(member, false);
	return true;
}

int member_return(struct member *member, const struct epoll_event *event)
{
	member->away = false;
	word_store(member->set->away_len, word_load(member->set->away_len) - 1);
	member_by_tcp(member, !conn_switched(member->conn));
	int result = member_change(member, event);
	return result < 0 && errno == ENOENT ? kernel_set(member, EPOLL_CTL_ADD)
	                                     : result; /* a forked child has taken it out */
}

void member_drop(struct member *member)
{
	if (conn_get(member->fd) == member->conn || file_closing(member->fd))
		set_ctl(member->set, EPOLL_CTL_DEL, member->fd, NULL);
	member_free(member);
}

/* shim_lock held */
static void sweep(struct set *set)
{
	set_lock(set);
	for (uint32_t i = set->managed_len; i-- > 0;)
		if (set->managed[i]->away)
			member_drop(set->managed[i]);
	set_unlock(set);
}

/* Takes members that are away out for good: their doorbells would wake this set, though they may be in another by now. */
void set_sweep(struct set *set)
{
	if (likely(!word_load(set->away_len)))
		return;
	shim_lock_take();
	sweep(set);
	shim_lock_drop();
}

/* ---- what connections tell their sets ---- */

/* set lock held. Threads asleep in the set do not know of a change: wakes one, which looks and wakes the next. */
void wake_set(struct set *set)
{
	full_fence();
	if (unlikely(set->nest & NEST_INNER) && !set->leaves && word_load(nest_sleepers))
		stand_in_put(set, true, true); /* news, until one of them has looked */
	if (!(atomic_load(&set->kernel_waiters) || atomic_load(&set->sleepers)) || !set->doorbells_len)
		return;
	self.calls++;
	if (!raw_doorbell_ring(set->doorbells[0].doorbell->fd))
		shim_log("cannot wake a waiting thread: %d", errno);
}

/* shim_lock held */
void set_conn_attached(struct conn *conn)
{
	for (struct member *member = conn->members, *next; member; member = next) {
		struct set *set = member->set;
		next = member->next;
		set_lock(set);
		if (!member->managed && !member_manage(member, EPOLL_CTL_MOD))
			member_free(member); /* a member that is being closed: the kernel does not know it either */
		wake_set(set);
		set_unlock(set);
	}
}

static void members_arm(struct conn *conn, bool all, bool at_once)
{
	if (!has_members(conn))
		return;
	KEEP_ERRNO;
	shim_lock_take();
	for (struct member *member = conn->members; member; member = member->next) {
		set_lock(member->set);
		member->out_armed = true;
		member->armed |= all;
		/* The stand-in shows it to a set above once more, though nobody has looked since it stood for it. */
		member->stood &= all ? 0 : ~(uint32_t)(EPOLLOUT | EPOLLWRNORM);
		if (member->managed) {
			hot_add(member->set, member);
			if (at_once) {
				kernel_set(member, EPOLL_CTL_MOD);
				wake_set(member->set);
			}
		}
		set_unlock(member->set);
	}
	shim_lock_drop();
}

void set_conn_switched(struct conn *conn)
{
	members_arm(conn, false, true);
}

/* Room is an edge from now on or, with `all`, whatever is true: then a waiting thread is woken at once. */
void set_conn_arm(struct conn *conn, bool all)
{
	members_arm(conn, all, all);
}

void set_conn_closed(struct conn *conn, int fd, bool last)
{
	KEEP_ERRNO;
	shim_lock_take();
	for (struct member *member = conn->members, *next; member && !last; member = next) {
		struct set *set = member->set;
		next = member->next;
		set_lock(set);
		if (member->away && member->fd == fd)
			member_drop(member);
		set_unlock(set);
	}
	/* epoll(7): a registration lives as long as any descriptor of the socket */
	while (last && conn->members) {
		struct set *set = conn->members->set;
		set_lock(set);
		/* a number that was closed before may be another file's by now */
		if (conn->members->managed && set->owner_pid == shim_pid && conn->members->fd == fd)
			set_ctl(set, EPOLL_CTL_DEL, conn->members->fd, NULL);
		member_free(conn->members);
		set_unlock(set);
	}
	shim_lock_drop();
}

/* shim_lock held. The one set's doorbell, made on first use: a busy server is then rung once, not once a connection. */
struct doorbell *set_doorbell_for(struct conn *conn)
{
	struct member *member = conn->members;

	if (!member || member->next)
		return NULL;
	if (!member->set->doorbell)
		member->set->doorbell = doorbell_new_locked();
	return member->set->doorbell;
}

void set_conn_leaves(struct conn *conn, bool anew)
{
	if (!has_members(conn))
		return;
	KEEP_ERRNO;
	shim_lock_take();
	for (struct member *member = conn->members; member; member = member->next) {
		struct set *set = member->set;
		if (!(set->nest & NEST_INNER))
			continue;
		set_lock(set);
		if (set->leaves)
			set_stand_in(set, anew); /* an outer set that waits for edges hears of it once more */
		else if (anew)
			wake_set(set);
		set_unlock(set);
	}
	shim_lock_drop();
}

bool set_wants_pin(struct conn *conn)
{
	for (struct member *member = conn->members; member; member = member->next)
		if (member->set->leaves || member->set->shared)
			return true;
	return false;
}

/* True if a set of this process has the connection under this number. */
bool set_names(struct conn *conn, int fd)
{
	bool found = false;

	if (!has_members(conn))
		return false;
	shim_lock_take();
	for (struct member *member = conn->members; member && !found; member = member->next)
		found = member->fd == fd && member->set->user_pid == shim_pid && !member->away;
	shim_lock_drop();
	return found;
}

/* shim_lock and set lock held. */
static void nest_end(struct set *outer, const struct set *inner)
{
	struct nest **at = &outer->inners;

	while (*at) {
		struct nest *nest = *at;
		if (inner && nest->inner != inner) {
			at = &nest->next;
			continue;
		}
		*at = nest->next;
		free(nest);
	}
}

/* shim_lock and set lock held. The set ends: it is in no other any more, nor is one in it. */
static void nests_end(struct set *set)
{
	nest_end(set, NULL);
	for (uint32_t fd = 0; (set->nest & NEST_INNER) && fd < atomic_load(&fd_end); fd++) {
		struct set *outer = set_get((int)fd);
		if (outer)
			nest_end(outer, set);
	}
	set->nest = 0;
}

void set_forget(int fd)
{
	struct set *set = set_get(fd);

	if (!set)
		return;
	shim_lock_take();
	file_put(fd, NULL);
	if (--set->refs == 0) {
		set_lock(set);
		nests_end(set);
		set->leaves = false; /* the entries are left as they are to a process that has the kernel's set as well */
		own_fd_close(set->stand_in > 0 ? set->stand_in : -1);
		set->stand_in = 0;
		for (uint32_t i = 1; i < set->members_len; i++)
			if (set->members[i] && set->members[i]->conn)
				member_free(set->members[i]);
			else if (set->members[i])
				set->members[i]->set = NULL; /* see shim_set_return.c */
		if (set->doorbell)
			doorbell_unref(set->doorbell);
		free(set->members);
		free(set->managed);
		free(set->doorbells);
		free(set->hot);
		free(set->feeds);
		set_unlock(set);
		pthread_mutex_destroy(&set->lock);
		/* A thread may still sit in epoll_wait on it: the struct itself is kept for a later set. */
		set->members_len = set->doorbells_len = 0;
		set->members = set->managed = set->hot = NULL;
		set->hot_len = set->feeds_len = 0;
		set->feeds = NULL;
		set->doorbells = NULL;
		set->doorbell = NULL;
		set->next_free = free_sets;
		free_sets = set;
	} else if (set->epfd == fd) {
		for (uint32_t other = 0; other < atomic_load(&fd_end); other++)
			if (set_get((int)other) == set) {
				set->epfd = (int)other;
				break;
			}
	}
	shim_lock_drop();
}

void set_dup(int from, int to)
{
	struct set *set = set_get(from);

	if (!set)
		return;
	shim_lock_take();
	set->refs++;
	file_put(to, &set->file);
	shim_lock_drop();
}

/* Members that are away are taken out before the child has them, too; and the child may change the kernel's set. */
void sets_before_fork(void)
{
	fork_count++;
	for (uint32_t fd = 0; fd < atomic_load(&fd_end); fd++) {
		struct set *set = set_get((int)fd);
		if (set && word_load(set->away_len))
			sweep(set);
	}
}

void sets_after_fork(void)
{
	nest_sleepers = 0;
	/* The kernel's set is shared with the parent now: entries of either are seen by both. New members stay on TCP. */
	for (uint32_t fd = 0; fd < atomic_load(&fd_end); fd++) {
		struct set *set = set_get((int)fd);
		if (set) {
			set->lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
			set->shared = true;
			set->kernel_waiters = set->users = set->sleepers = set->aware = 0;
		}
	}
}

bool set_is_managed(struct file *file)
{
	return atomic_load(&((struct set *)file)->ours) != 0;
}
