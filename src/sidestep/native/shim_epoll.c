/*
 * shim_epoll.c - epoll sets whose members may be promoted.
 *
 * A set without managed members is the kernel's alone: calls pass through. When a member is managed, its kernel entry
 * keeps its place (so that FIN and RST arrive) without OUT once it sends by ring, and carries the shim's own data; the
 * set's bell is one more entry, edge-triggered. Every event of such a set is then read, translated and merged here:
 * exactly one a registration, with the events and the data the program gave.
 *
 * The shim's data is `secret << 32 | age << 24 | index`; a program's value that looks like it makes the set choose another secret
 * (before the kernel has any entry with it) or pins the registration's set (after).
 */
#include "shim.h"

#include <errno.h>
#include <string.h>
#include <sys/random.h>
#include <sys/syscall.h>

#define LOOK_EVERY_NS 20000        /* the kernel's events are asked for at least this often while rings are busy */
#define SCAN_MAX 256               /* more managed members than these are not looked at one by one: peers give hints */
#define INDEX_BITS 24
#define AGE_BITS 8 /* an index is given anew with the next one: the kernel may still hold events of the last */
#define NAME_BITS (INDEX_BITS + AGE_BITS)
#define BELL_INDEX 0
#define TOLD_MAX 128 /* events taken from the kernel at a time */
#define BELLS_MAX 64 /* bells of one set that a thread can sleep on; with more it naps */

struct member {
	struct set *set;
	struct conn *conn;
	struct member *next; /* of the conn */
	int fd;
	uint32_t index; /* in set->members; 0 is the bell */
	uint8_t age;
	uint32_t events;
	uint64_t data;
	bool managed;
	bool hot;          /* in set->hot */
	bool hinted;       /* its peer names it when there is news */
	bool disabled;     /* one-shot has fired */
	bool rx_ring;      /* receiving was by ring when it was last looked at */
	bool by_tcp;       /* a direction was on TCP then */
	uint32_t in_kernel; /* events of the kernel's entry */
	bool armed;        /* edge: report what is true once, whatever has been seen */
	bool out_armed;    /* edge: room is news */
	uint32_t at;       /* in set->managed */
	uint32_t reported; /* edge: RDHUP, HUP and ERR told already */
	uint64_t seen_tail;
	uint64_t pass;
};

struct set_bell {
	struct bell *bell;
	uint32_t refs;
};

struct feed {
	struct remote_bell *bell;
	uint64_t seen;
	uint32_t refs;
};

struct set {
	struct file file;
	_Atomic uint32_t managed_len;
	_Atomic uint32_t sitters; /* threads in the kernel's wait that do not know of any managed member */
	uint32_t refs;            /* descriptor numbers */
	_Atomic uint32_t users;   /* threads inside a call on it */
	struct set *next_free;
	pthread_mutex_t lock;
	_Atomic uint32_t sleepers; /* threads asleep that know, but only of the bells of that moment */
	_Atomic bool managed_ever; /* the kernel may hold events with our data */
	uint32_t owner_pid;        /* a forked child shares the kernel's set and takes nothing out of it */
	_Atomic uint32_t user_pid; /* who has used it last; a child that has not does not change it */
	int cancel_state;
	int epfd;
	uint64_t secret; /* 32 bits */
	uint8_t age;
	bool nested, shared;
	struct member **members; /* by index */
	_Atomic uint32_t members_len, members_live;
	uint32_t members_cap;
	uint32_t next_index; /* an index is given anew as late as can be */
	struct member **managed;
	uint32_t managed_cap;
	uint32_t by_tcp; /* managed members of which the kernel has to be asked at each wait */
	bool told_level; /* in this pass: what stays true if the program does nothing */
	struct bell *bell;
	struct set_bell *bells; /* every bell with an entry in the kernel's set */
	uint32_t bells_len, bells_cap;
	/* with more than SCAN_MAX managed members */
	bool hinting;           /* peers have been asked for hints */
	bool scan_all;          /* hints were lost or are young: look at every member once */
	uint32_t unhinted;      /* managed members nobody gives hints for */
	struct member **hot;    /* members that were ready, or named, and may still be */
	uint32_t hot_len, hot_cap;
	struct feed *feeds;     /* the hint rings of the members' peers */
	uint32_t feeds_len, feeds_cap;
	uint32_t cursor;
	bool kernel_filled;     /* the last look left no room for the rings */
	_Atomic uint32_t watched; /* of the provider's socket; see rpc_watch() */
	uint64_t pass;
	_Atomic int64_t looked_at;
	_Atomic uint32_t spin_ns;
	_Atomic uint32_t last_cpu; /* of the peer that was heard last, + 1 */
	enum { SPENT_NOTHING, SPENT_SPUN, SPENT_SLEPT } spent;
};

static struct set *free_sets; /* guarded by shim_lock; type-stable, as conns are */

static struct set *set_get(int epfd)
{
	struct file *file = file_get(epfd);

	return file && file->kind == FILE_SET ? (struct set *)file : NULL;
}

/* The set behind a number, not to be used for another one before set_release(), though the number may be closed. */
static struct set *set_hold(int epfd)
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

static void set_release(struct set **set)
{
	if (*set)
		atomic_fetch_sub(&(*set)->users, 1);
}
#define HELD_SET struct set *__attribute__((cleanup(set_release)))

/* Nothing that runs under the lock may be cancelled in the middle. */
static void set_lock(struct set *set)
{
	int before;

	critical_enter();
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
	pthread_mutex_lock(&set->lock);
	set->cancel_state = before;
}

static void set_unlock(struct set *set)
{
	int before = set->cancel_state;

	pthread_mutex_unlock(&set->lock);
	pthread_setcancelstate(before, &before);
	critical_leave();
}

static uint64_t new_secret(void)
{
	uint64_t value = 0;

	if (getrandom(&value, sizeof(value), GRND_NONBLOCK) != sizeof(value))
		value = (uint64_t)now_ns() * 0x9E3779B97F4A7C15ull;
	return value >> NAME_BITS;
}

static int set_created(int epfd)
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
		set->managed_len = set->sitters = set->refs = 0;
	}
	shim_lock_drop();
	if (!set) {
		set = calloc(1, sizeof(*set));
		if (!set)
			return epfd; /* untracked: connections added to it are pinned */
		set->file.kind = FILE_SET; /* for ever: a thread that comes late may look at it while it is given out anew */
	}
	set->epfd = epfd;
	set->owner_pid = shim_pid;
	set->user_pid = shim_pid;
	set->refs = 1;
	set->secret = new_secret();
	set->spin_ns = config.spin_ns;
	set->last_cpu = 0;
	pthread_mutex_init(&set->lock, NULL);
	file_put(epfd, &set->file);
	return epfd;
}

EXPORT int epoll_create(int size)
{
	return set_created(real.epoll_create(size));
}

EXPORT int epoll_create1(int flags)
{
	return set_created(real.epoll_create1(flags));
}

/* Whether an entry that the kernel's set has already carries data which would be taken for ours. */
static bool secret_taken(int epfd, uint64_t secret)
{
	char path[40], line[256];
	bool taken = false;

	snprintf(path, sizeof(path), "/proc/self/fdinfo/%d", epfd);
	FILE *entries = fopen(path, "re");
	while (entries && !taken && fgets(line, sizeof(line), entries)) {
		const char *data = strncmp(line, "tfd:", 4) == 0 ? strstr(line, "data:") : NULL;
		taken = data && strtoull(data + strlen("data:"), NULL, 16) >> NAME_BITS == secret;
	}
	if (entries)
		fclose(entries);
	return taken;
}

/*
 * Tracks a set that was made where we could not see it. The caller answers for it that no thread waits in it, as that one
 * would see events of ours, and that it is in no other set. What it holds already stays the kernel's.
 */
int set_adopt(int epfd)
{
	char path[40], target[64] = "";

	snprintf(path, sizeof(path), "/proc/self/fd/%d", epfd);
	if (set_get(epfd))
		return 0;
	if (readlink(path, target, sizeof(target) - 1) < 0)
		return -EBADF;
	if (strcmp(target, "anon_inode:[eventpoll]") != 0)
		return -EINVAL;
	set_created(epfd);
	struct set *set = set_get(epfd);
	if (!set)
		return -ENOMEM;
	while (secret_taken(epfd, set->secret))
		set->secret = new_secret();
	return 0;
}

/* ---- membership (shim_lock and set lock held) ---- */
static bool grow(void *array, uint32_t *cap, uint32_t wanted, size_t size)
{
	void **at = array;

	if (wanted <= *cap)
		return true;
	uint32_t larger = *cap ? *cap * 2 : 16;
	void *bigger = realloc(*at, (size_t)larger * size);
	if (!bigger)
		return false;
	memset((uint8_t *)bigger + *cap * size, 0, (larger - *cap) * size);
	*at = bigger;
	*cap = larger;
	return true;
}

static uint32_t kernel_events(const struct member *member)
{
	struct conn_slot *slot = member->conn->slot;
	uint32_t events = member->events & ~(uint32_t)(EPOLLONESHOT | EPOLLEXCLUSIVE);

	if (member->disabled)
		return EPOLLONESHOT; /* not even HUP, again and again */
	bool withheld = conn_end_withheld(member->conn); /* the kernel would tell it for as long, and nobody could be told */
	if (withheld)
		events &= ~(uint32_t)EPOLLRDHUP;
	if (conn_fin_waits(member->conn, member->fd))
		events &= ~(uint32_t)(EPOLLIN | EPOLLRDNORM);
	if (tx_is(slot, TX_RESEND))
		return events | EPOLLOUT; /* TCP's room is what recalled bytes wait for */
	/* who waits for room, or for a reset alone, must hear of the peer's end: what it means is judged here */
	if (conn_judges_end(member->conn) && !withheld && !slot_has(slot, SLOT_FIN | SLOT_RD_SHUT))
		events |= EPOLLRDHUP;
	if (tx_by_ring(slot)) {
		events &= ~(uint32_t)(EPOLLOUT | EPOLLWRNORM | EPOLLWRBAND);
	}
	if (withheld && !(events & (EPOLLIN | EPOLLRDNORM | EPOLLOUT | EPOLLWRNORM)))
		events |= EPOLLET; /* HUP and ERR cannot be declined; nothing but a reset can follow */
	return events;
}

static uint32_t member_name(const struct member *member)
{
	return (uint32_t)member->age << INDEX_BITS | member->index;
}

static int kernel_set(struct member *member, int op)
{
	/* The set of a parent is the parent's to change until the child uses it; a number that was closed, with a copy left, may
	 * name another file. */
	member->in_kernel = kernel_events(member);
	if (member->set->user_pid != shim_pid || conn_get(member->fd) != member->conn)
		return 0;
	struct epoll_event event = {.events = member->in_kernel,
	                            .data.u64 = member->set->secret << NAME_BITS | member_name(member)};

	return real.epoll_ctl(member->set->epfd, op, member->fd, &event);
}

/*
 * The entry of a member whose connection is not managed, as the program gave it. But a one-shot entry that has fired must
 * not be armed by member_manage(), and only who translates its event knows that it has: it carries our data from the start.
 * Each arming has a name of its own, so that an event of the last one, still on its way, does not count for this one.
 */
static int kernel_plain(struct member *member, int op)
{
	struct set *set = member->set;
	struct epoll_event event = {.events = member->events, .data.u64 = member->data};

	if (member->events & EPOLLONESHOT) {
		atomic_store(&set->managed_ever, true);
		event.data.u64 = set->secret << NAME_BITS | member_name(member);
	}
	return real.epoll_ctl(set->epfd, op, member->fd, &event);
}

static bool bell_enter(struct set *set, struct bell *bell)
{
	for (uint32_t i = 0; i < set->bells_len; i++)
		if (set->bells[i].bell == bell) {
			set->bells[i].refs++;
			return true;
		}
	struct epoll_event event = {.events = BELL_EDGES, .data.u64 = set->secret << NAME_BITS | BELL_INDEX};
	if (!grow(&set->bells, &set->bells_cap, set->bells_len + 1, sizeof(*set->bells)) ||
	    (real.epoll_ctl(set->epfd, EPOLL_CTL_ADD, bell->fd, &event) < 0 && errno != EEXIST))
		return false;
	set->bells[set->bells_len++] = (struct set_bell){bell, 1};
	atomic_fetch_add(&bell->refs, 1);
	return true;
}

static void bell_exit(struct set *set, struct bell *bell)
{
	for (uint32_t i = 0; i < set->bells_len; i++)
		if (set->bells[i].bell == bell && --set->bells[i].refs == 0) {
			if (set->owner_pid == shim_pid)
				real.epoll_ctl(set->epfd, EPOLL_CTL_DEL, bell->fd, NULL);
			set->bells[i] = set->bells[--set->bells_len];
			bell_unref(bell);
			return;
		}
}

/* ---- hints ---- */
static void hot_add(struct set *set, struct member *member)
{
	if (!set->hinting || member->hot)
		return;
	if (!grow(&set->hot, &set->hot_cap, set->hot_len + 1, sizeof(*set->hot))) {
		set->scan_all = true;
		return;
	}
	member->hot = true;
	set->hot[set->hot_len++] = member;
}

static void hot_drop(struct set *set, struct member *member)
{
	for (uint32_t i = 0; member->hot && i < set->hot_len; i++)
		if (set->hot[i] == member) {
			set->hot[i] = set->hot[--set->hot_len];
			member->hot = false;
		}
}

static void feed_enter(struct set *set, struct member *member)
{
	struct remote_bell *bell = member->conn->remote_bell;
	uint32_t expected = 0, at = 0;

	while (at < set->feeds_len && set->feeds[at].bell != bell)
		at++;
	/* A connection in several sets gives its hints to one of them. */
	if (!bell->hints || (at == set->feeds_len && !grow(&set->feeds, &set->feeds_cap, at + 1, sizeof(*set->feeds))) ||
	    !atomic_compare_exchange_strong(&member->conn->channel.local->hint, &expected, member->index)) {
		set->unhinted++;
		return;
	}
	if (at == set->feeds_len)
		set->feeds[set->feeds_len++] = (struct feed){bell, atomic_load(&bell->hints->tail), 0};
	set->feeds[at].refs++;
	member->hinted = true;
	/* What was published before the peer could see the request is found by looking. */
	hot_add(set, member);
}

static void feed_exit(struct set *set, struct member *member)
{
	if (!set->hinting)
		return;
	hot_drop(set, member);
	if (!member->hinted) {
		set->unhinted--;
		return;
	}
	member->hinted = false;
	if (set->owner_pid == shim_pid)
		atomic_store(&member->conn->channel.local->hint, 0);
	for (uint32_t i = 0; i < set->feeds_len; i++)
		if (set->feeds[i].bell == member->conn->remote_bell && --set->feeds[i].refs == 0) {
			set->feeds[i] = set->feeds[--set->feeds_len];
			return;
		}
}

/* Marks the members that peers have named since the last time. Every word read here is a peer's: it may only cost time. */
static void feeds_read(struct set *set)
{
	for (uint32_t i = 0; i < set->feeds_len; i++) {
		struct feed *feed = &set->feeds[i];
		uint64_t tail = atomic_load_explicit(&feed->bell->hints->tail, memory_order_acquire);

		if (likely(tail == feed->seen))
			continue;
		if (tail - feed->seen > HINTS) {
			set->scan_all = true;
			feed->seen = tail;
			continue;
		}
		for (; feed->seen != tail; feed->seen++) {
			uint64_t entry = atomic_load_explicit(&feed->bell->hints->entry[feed->seen % HINTS], memory_order_acquire);
			uint32_t index = (uint32_t)entry;
			if (!hint_valid(entry, feed->seen)) {
				set->scan_all = true; /* what it names was published before */
			} else if (index < set->members_len && set->members[index] && set->members[index]->managed &&
			           set->members[index]->conn->remote_bell == feed->bell) {
				hot_add(set, set->members[index]);
			}
		}
	}
}

static void member_by_tcp(struct member *member, bool by_tcp)
{
	if (member->by_tcp == by_tcp)
		return;
	member->by_tcp = by_tcp;
	member->set->by_tcp += by_tcp ? 1 : UINT32_MAX;
}

static bool member_manage(struct member *member, int op)
{
	struct set *set = member->set;
	struct conn *conn = member->conn;

	/* before the kernel can report our data to a thread that is just returning from it */
	atomic_store(&set->managed_ever, true);
	if (!grow(&set->managed, &set->managed_cap, set->managed_len + 1, sizeof(*set->managed)) ||
	    !bell_enter(set, conn->bell))
		return false;
	if (kernel_set(member, op) < 0) {
		int failed = errno;
		bell_exit(set, conn->bell);
		errno = failed;
		return false;
	}
	/* its death is an edge, as a bell's ring is; the entry goes with the descriptor */
	if (!conn_watch_life(conn, set->epfd, set->secret << NAME_BITS | BELL_INDEX))
		shim_log("the end of a provider will be heard late: %d", errno);
	member->managed = true;
	member_by_tcp(member, !conn_switched(conn));
	member->armed = member->out_armed = true;
	member->reported = 0;
	member->at = set->managed_len;
	set->managed[set->managed_len] = member;
	atomic_fetch_add(&set->managed_len, 1);
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
	set->managed[member->at] = set->managed[last];
	set->managed[member->at]->at = member->at;
	member->managed = false;
	bell_exit(set, member->conn->bell);
}

static struct member *member_find(struct set *set, struct conn *conn, int fd)
{
	for (struct member *member = conn->members; member; member = member->next)
		if (member->set == set && member->fd == fd)
			return member;
	return NULL;
}

static struct member *member_new(struct set *set, struct conn *conn, int fd, const struct epoll_event *event)
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
	*member = (struct member){.set = set,
	                          .conn = conn,
	                          .next = conn->members,
	                          .fd = fd,
	                          .index = index,
	                          .age = set->age++,
	                          .events = event->events,
	                          .data = event->data.u64,
	                          .armed = true,
	                          .out_armed = true};
	__atomic_store_n(&conn->members, member, __ATOMIC_RELAXED);
	set->members[index] = member;
	set->members_live++;
	if (index >= set->members_len)
		set->members_len = index + 1;
	return member;
}

static void member_free(struct member *member)
{
	struct member **at = &member->conn->members;

	member_unmanage(member);
	member->set->members[member->index] = NULL;
	member->set->members_live--;
	while (*at != member)
		at = &(*at)->next;
	__atomic_store_n(at, member->next, __ATOMIC_RELAXED); /* see has_members() */
	free(member);
}

/* ---- what connections tell their sets ---- */

/* set lock held. Threads that sleep in the set do not know of a change: one of them looks, and wakes the next. */
static void wake_set(struct set *set)
{
	full_fence();
	if ((atomic_load(&set->sitters) || atomic_load(&set->sleepers)) && set->bells_len &&
	    !raw_ring(set->bells[0].bell->fd))
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
			member_free(member); /* the kernel does not know it either: it was closed behind our back */
		wake_set(set);
		set_unlock(set);
	}
}

void set_conn_switched(struct conn *conn)
{
	if (!has_members(conn))
		return;
	int saved = errno;
	shim_lock_take();
	for (struct member *member = conn->members; member; member = member->next) {
		set_lock(member->set);
		if (member->managed) {
			kernel_set(member, EPOLL_CTL_MOD);
			member->out_armed = true;
			hot_add(member->set, member);
			wake_set(member->set);
		}
		set_unlock(member->set);
	}
	shim_lock_drop();
	errno = saved;
}

/* Room is news from now on, or with `all` whatever is true: then a waiting thread is told at once. */
void set_conn_arm(struct conn *conn, bool all)
{
	if (!has_members(conn))
		return;
	shim_lock_take();
	for (struct member *member = conn->members; member; member = member->next) {
		set_lock(member->set);
		member->out_armed = true;
		member->armed |= all;
		if (member->managed) {
			hot_add(member->set, member);
			if (all) {
				kernel_set(member, EPOLL_CTL_MOD);
				wake_set(member->set);
			}
		}
		set_unlock(member->set);
	}
	shim_lock_drop();
}

void set_conn_closed(struct conn *conn, int fd, bool last)
{
	if (!last)
		return; /* epoll(7): a registration lives as long as any descriptor of the socket */
	int saved = errno;
	shim_lock_take();
	while (conn->members) {
		struct set *set = conn->members->set;
		set_lock(set);
		/* a number that was closed before may be another file's by now */
		if (conn->members->managed && set->owner_pid == shim_pid && conn->members->fd == fd)
			real.epoll_ctl(set->epfd, EPOLL_CTL_DEL, conn->members->fd, NULL);
		member_free(conn->members);
		set_unlock(set);
	}
	shim_lock_drop();
	errno = saved;
}

/* shim_lock held. The one set's bell, made on first use: a busy server is then rung once, not once a connection. */
struct bell *set_bell_for(struct conn *conn)
{
	struct member *member = conn->members;

	if (!member || member->next)
		return NULL;
	if (!member->set->bell)
		member->set->bell = bell_new_locked();
	return member->set->bell;
}

bool set_wants_pin(struct conn *conn)
{
	for (struct member *member = conn->members; member; member = member->next)
		if (member->set->nested || member->set->shared || (member->events & EPOLLEXCLUSIVE))
			return true;
	return false;
}

/* Whether a set of this process has the connection under this number. */
bool set_names(struct conn *conn, int fd)
{
	bool found = false;

	if (!has_members(conn))
		return false;
	shim_lock_take();
	for (struct member *member = conn->members; member && !found; member = member->next)
		found = member->fd == fd && member->set->user_pid == shim_pid;
	shim_lock_drop();
	return found;
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
		for (uint32_t i = 1; i < set->members_len; i++)
			if (set->members[i])
				member_free(set->members[i]);
		if (set->bell)
			bell_unref(set->bell);
		free(set->members);
		free(set->managed);
		free(set->bells);
		free(set->hot);
		free(set->feeds);
		set_unlock(set);
		pthread_mutex_destroy(&set->lock);
		/* A thread may still sit in epoll_wait on it: the struct itself is kept for a later set. */
		set->members_len = set->bells_len = 0;
		set->members = set->managed = set->hot = NULL;
		set->hot_len = set->feeds_len = 0;
		set->feeds = NULL;
		set->bells = NULL;
		set->bell = NULL;
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

void sets_after_fork(void)
{
	/* The kernel's set is shared with the parent now: entries of either are seen by both. New members stay on TCP. */
	for (uint32_t fd = 0; fd < atomic_load(&fd_end); fd++) {
		struct set *set = set_get((int)fd);
		if (set) {
			set->lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
			set->shared = true;
			set->sitters = set->users = 0;
		}
	}
}

/* The kernel waits on a set inside a set, where nobody looks at rings: its members go back to TCP. */
static void set_nest(struct set *set)
{
	struct conn *conns[64];
	int fds[64], n;

	set->nested = true;
	do {
		n = 0;
		shim_lock_take();
		set_lock(set);
		for (uint32_t i = 0; i < set->managed_len && n < 64; i++)
			if (!slot_has(set->managed[i]->conn->slot, SLOT_PIN)) {
				conns[n] = set->managed[i]->conn;
				fds[n] = set->managed[i]->fd;
				conn_ref(conns[n++]);
			}
		set_unlock(set);
		shim_lock_drop();
		for (int i = 0; i < n; i++) {
			conn_demote(conns[i], fds[i], REASON_EPOLL_UNSUPPORTED, true);
			conn_unref(conns[i]);
		}
	} while (n);
	/* The outer set would take a bell, which has rung sometime, for something to read. */
	shim_lock_take();
	set_lock(set);
	for (uint32_t i = 0; i < set->bells_len; i++)
		real.epoll_ctl(set->epfd, EPOLL_CTL_DEL, set->bells[i].bell->fd, NULL);
	set_unlock(set);
	shim_lock_drop();
}

EXPORT int epoll_ctl(int epfd, int op, int fd, struct epoll_event *event)
{
	HELD_SET set = set_hold(epfd);
	struct file *file = file_get(fd);
	int result;

	if (unlikely(file && file->kind == FILE_OWN)) {
		errno = EBADF;
		return -1;
	}
	if (set && event && unlikely(event->data.u64 >> NAME_BITS == set->secret)) {
		set_lock(set);
		if (!atomic_load(&set->managed_ever))
			set->secret = new_secret();
		else
			set->shared = true;
		set_unlock(set);
	}
	if (likely(!file))
		return real.epoll_ctl(epfd, op, fd, event);
	if (file->kind == FILE_SET) {
		result = real.epoll_ctl(epfd, op, fd, event);
		if (set && op == EPOLL_CTL_ADD && result == 0)
			set_nest((struct set *)file);
		return result;
	}
	HELD conn = conn_hold(fd);
	if (!conn || !set || (!event && op != EPOLL_CTL_DEL)) {
		if (conn && !set) /* a set that was made elsewhere: the kernel alone waits in it */
			conn_demote(conn, fd, REASON_EPOLL_UNSUPPORTED, true);
		return real.epoll_ctl(epfd, op, fd, event);
	}
	word_store(conn->waited, true);
	set->user_pid = shim_pid;
	/* epoll_ctl(2): what EPOLLEXCLUSIVE goes with */
	if (op == EPOLL_CTL_ADD && (event->events & EPOLLEXCLUSIVE) &&
	    (event->events & ~(uint32_t)(EPOLLIN | EPOLLOUT | EPOLLERR | EPOLLHUP | EPOLLWAKEUP | EPOLLET | EPOLLEXCLUSIVE))) {
		errno = EINVAL;
		return -1;
	}
	if (op == EPOLL_CTL_ADD && conn->managed && (set->nested || set->shared || (event->events & EPOLLEXCLUSIVE)))
		conn_demote(conn, fd, REASON_EPOLL_UNSUPPORTED, true);
	shim_lock_take();
	if (set_get(epfd) != set) {
		shim_lock_drop();
		errno = EBADF;
		return -1;
	}
	set_lock(set);
	struct member *member = member_find(set, conn, fd);
	switch (op) {
	case EPOLL_CTL_ADD:
		if (member) {
			result = -1;
			errno = EEXIST;
			break;
		}
		member = member_new(set, conn, fd, event);
		if (!member) {
			result = real.epoll_ctl(epfd, op, fd, event);
		} else if (!conn->managed) {
			result = kernel_plain(member, op);
		} else {
			result = member_manage(member, EPOLL_CTL_ADD) ? 0 : -1;
			if (result == 0)
				wake_set(set);
		}
		if (result < 0 && member) {
			int failed = errno;
			member_free(member);
			errno = failed;
		}
		break;
	case EPOLL_CTL_MOD:
		if (!member) {
			result = real.epoll_ctl(epfd, op, fd, event);
			break;
		}
		if (!member->managed) {
			struct member before = *member;
			member->events = event->events;
			member->data = event->data.u64;
			member->disabled = false;
			member->age++;
			result = kernel_plain(member, op);
			if (result < 0)
				*member = before;
			break;
		}
		if (event->events & EPOLLEXCLUSIVE || member->events & EPOLLEXCLUSIVE) {
			result = -1;
			errno = EINVAL;
			break;
		}
		member->events = event->events;
		member->data = event->data.u64;
		member->disabled = false;
		member->armed = member->out_armed = true;
		member->reported = 0;
		result = kernel_set(member, EPOLL_CTL_MOD);
		hot_add(set, member);
		wake_set(set);
		break;
	default:
		result = real.epoll_ctl(epfd, op, fd, event);
		if (result == 0 && member)
			member_free(member);
	}
	int failed = errno;
	set_unlock(set);
	shim_lock_drop();
	errno = failed;
	return result;
}

/* ---- waiting ---- */

/* epoll(7): a registration outlives the number it was made with while the socket has others. */
static int member_fd(const struct member *member)
{
	return likely(conn_get(member->fd) == member->conn) ? member->fd : conn_fd(member->conn);
}

/* set lock held. Fills *event if the member has something to report now. */
static bool member_report(struct set *set, struct member *member, uint32_t kernel_bits, struct epoll_event *event)
{
	struct conn *conn = member->conn;
	int fd = member_fd(member);

	if (member->disabled || !conn->managed)
		return false;
	if (unlikely(!conn_switched(conn)))
		conn_progress(conn, fd);
	/* before the look: what comes after it is an edge that has not been told */
	uint64_t tail = atomic_load_explicit(&conn->channel.rx_peer_line->tail, memory_order_acquire);
	uint32_t ready = conn_ready(conn, fd, kernel_bits, member->events);
	bool rx_ring = rx_by_ring(conn->slot);
	member_by_tcp(member, !conn_switched(conn));
	if (unlikely(member->in_kernel != kernel_events(member) || (member->rx_ring && !rx_ring))) {
		/* a MOD also makes the kernel tell an edge again that was taken for the ring's */
		kernel_set(member, EPOLL_CTL_MOD);
		member->out_armed = true;
		member->armed |= member->rx_ring && !rx_ring;
	}
	member->rx_ring = rx_ring;
	uint32_t told = ready & (member->events | EPOLLERR | EPOLLHUP);

	if (!told)
		return false;
	if (member->events & EPOLLET) {
		uint32_t ends = ready & (EPOLLRDHUP | EPOLLHUP | EPOLLERR); /* IN alone is told for an end, too */
		/* What comes on the one path is an edge though bytes of the other, told long ago, stand before it. */
		bool by_tcp = !rx_ring || conn_peer_back(conn);
		bool edge = member->armed || (ends & ~member->reported) ||
		            ((told & EPOLLIN) && tail != member->seen_tail) ||
		            ((told & EPOLLOUT) && tx_by_ring(conn->slot) && member->out_armed) ||
		            (kernel_bits & ((by_tcp ? EPOLLIN | EPOLLPRI : EPOLLPRI) |
		                            (!tx_by_ring(conn->slot) ? EPOLLOUT : 0)));
		if (!edge)
			return false;
		if (told & EPOLLIN)
			member->seen_tail = tail;
		member->reported = ends;
		member->armed = false;
		if (told & EPOLLOUT)
			member->out_armed = false;
	}
	event->events = told;
	event->data.u64 = member->data;
	/* how the wait that ends now was spent is put down to the first that ends it */
	switch (set->spent) {
	case SPENT_SPUN: word_add(conn->slot->spins_won, 1); break;
	case SPENT_SLEPT:
		word_add(conn->slot->spins_lost, config.spin_ns != 0);
		word_add(conn->slot->sleeps, 1);
		break;
	default: break;
	}
	set->spent = SPENT_NOTHING;
	member->pass = set->pass;
	atomic_store_explicit(&set->last_cpu, word_load(conn->channel.rx_peer_line->cpu), memory_order_relaxed);
	if (member->events & EPOLLONESHOT) {
		member->disabled = true;
		kernel_set(member, EPOLL_CTL_MOD);
	}
	set->told_level |= !(member->events & (EPOLLET | EPOLLONESHOT));
	return true;
}

/* set lock held. Members with something to report that have not been in this pass; starts where the last one stopped. */
static int collect(struct set *set, struct epoll_event *events, int room)
{
	uint32_t len = set->managed_len, looked = 0;
	int n = 0;

	if (set->hinting) {
		feeds_read(set);
		if (likely(!set->scan_all && !set->unhinted)) {
			for (uint32_t left = set->hot_len; left && n < room; left--) {
				if (set->cursor >= set->hot_len)
					set->cursor = 0;
				struct member *member = set->hot[set->cursor];
				if (member->pass == set->pass) {
					set->cursor++;
				} else if (member_report(set, member, 0, &events[n])) {
					n++;
					set->cursor++;
				} else { /* the next news of it comes with a hint */
					set->hot[set->cursor] = set->hot[--set->hot_len];
					member->hot = false;
				}
			}
			return n;
		}
		set->scan_all = false;
	}
	if (set->cursor >= len)
		set->cursor = 0;
	while (n < room && looked < len) {
		struct member *member = set->managed[set->cursor];
		if (member->pass != set->pass && member_report(set, member, 0, &events[n])) {
			n++;
			hot_add(set, member);
		}
		looked++;
		if (++set->cursor >= len)
			set->cursor = 0;
	}
	if (looked < len && set->hinting)
		set->scan_all = true; /* the events' room ended first: the rest next time */
	return n;
}

/* set lock held. Turns what the kernel reported into what the program is to see; may be done in place. */
static int translate(struct set *set, const struct epoll_event *told, int len, struct epoll_event *events)
{
	int n = 0;
	bool rung = false;
	const struct remote_bell *last = NULL;

	for (int i = 0; i < len; i++) {
		if (told[i].data.u64 >> NAME_BITS != set->secret) {
			events[n++] = told[i];
			continue;
		}
		uint32_t index = (uint32_t)(told[i].data.u64 & ((1u << INDEX_BITS) - 1));
		struct member *member = index < set->members_len ? set->members[index] : NULL;
		rung |= index == BELL_INDEX;
		if (index == BELL_INDEX || !member || member->pass == set->pass ||
		    member_name(member) != (uint32_t)told[i].data.u64)
			continue;
		struct epoll_event event;
		if (!member->managed) { /* see kernel_plain() */
			member->disabled = true;
			events[n++] = (struct epoll_event){.events = told[i].events, .data.u64 = member->data};
			continue;
		}
		if (member_report(set, member, told[i].events, &event)) {
			events[n++] = event;
			hot_add(set, member);
		}
	}
	for (uint32_t i = 0; rung && i < set->managed_len; i++)
		conn_life_look(set->managed[i]->conn, &last);
	/* The edge was ours alone. Threads that sleep on are rung again for what comes after the look that follows. */
	if (rung && atomic_load(&set->sleepers)) {
		for (uint32_t i = 0; i < set->bells_len; i++)
			atomic_fetch_add(set->bells[i].bell->word, 1u << 16);
		full_fence();
	}
	return n;
}

static void set_sleep_begin(struct set *set)
{
	for (uint32_t i = 0; i < set->bells_len; i++)
		bell_sleep_begin(set->bells[i].bell);
}

/*
 * set lock held; `n` events are told, of `max` that could be. Whether another thread that sleeps has to look: there may be
 * more than can be told, and what is told of a level is true for the others as well. The bell's edge was taken by one of
 * them only, who may read less than all and not come back.
 */
static bool concerns_others(struct set *set, int n, int max)
{
	bool level = set->told_level;

	set->told_level = false;
	return (n == max || (n && level)) && atomic_load(&set->sleepers);
}

struct set_sleep {
	struct set *set;
	struct bell **bells;
	uint32_t len;
};

static void set_sleep_undo(void *argument)
{
	struct set_sleep *sleep = argument;

	for (uint32_t i = 0; i < sleep->len; i++)
		bell_sleep_end(sleep->bells[i]);
	atomic_fetch_sub(&sleep->set->sleepers, 1);
	shim_lock_take();
	for (uint32_t i = 0; i < sleep->len; i++)
		bell_unref(sleep->bells[i]);
	shim_lock_drop();
}

static void set_wake(struct set *set)
{
	set_lock(set);
	wake_set(set);
	set_unlock(set);
}

/* Spins over the rings and, every so often, the kernel. Returns events found, 0 when the budget is spent, -1 on a signal. */
static int set_spin(struct set *set, int epfd, struct epoll_event *events, int max, int64_t deadline, uint64_t signals)
{
	struct epoll_event told[TOLD_MAX]; /* the program's array holds nothing but what is reported */
	int told_max = max < TOLD_MAX ? max : TOLD_MAX;
	uint32_t budget = atomic_load_explicit(&set->spin_ns, memory_order_relaxed);
	bool crowded = !spin_allowed();
	int64_t start = now_ns(), now = start;
	int n = 0;

	if (!config.spin_ns)
		return 0;
	while (now - start < budget && now < deadline) {
		uint32_t cpu = cpu_now();
		uint32_t peer = atomic_load_explicit(&set->last_cpu, memory_order_relaxed);
		set_lock(set);
		set->pass++;
		set->spent = SPENT_SPUN;
		n = collect(set, events, max);
		if (!n && now - atomic_load_explicit(&set->looked_at, memory_order_relaxed) > LOOK_EVERY_NS) {
			int k = raw_epoll_look(epfd, told, told_max);
			atomic_store_explicit(&set->looked_at, now, memory_order_relaxed);
			if (k > 0) {
				n = translate(set, told, k, events);
				n += collect(set, events + n, max - n);
			}
		}
		if (concerns_others(set, n, max))
			wake_set(set);
		set_unlock(set);
		if (n || self.signals != signals)
			break;
		if (crowded || cpu == peer)
			spin_share(!crowded, cpu);
		else
			for (int i = 0; i < 8; i++)
				cpu_relax();
		now = now_ns();
	}
	if (n)
		spin_adapt(&set->spin_ns, 0);
	return n ? n : self.signals != signals ? -1 : 0;
}

/* The wait of a set with managed members. timeout_ns < 0: for ever. */
static int set_wait(struct set *set, int epfd, struct epoll_event *events, int max, int64_t timeout_ns, uint64_t signals)
{
	struct epoll_event told[TOLD_MAX];
	int told_max = max < TOLD_MAX ? max : TOLD_MAX;
	int64_t start = now_ns(), now = start;
	int64_t deadline = deadline_after(timeout_ns);
	bool spun = false;

	pthread_testcancel();
	if (unlikely(atomic_load_explicit(&rpc_pending, memory_order_relaxed)))
		rpc_poll();
	for (;;) {
		set_lock(set);
		set->pass++;
		set->spent = SPENT_NOTHING;
		int n = 0;
		/* Who has several ready is told of all at once. Where the kernel alone has filled the room, the rings are first the
		 * next time. */
		bool look = (set->by_tcp || now - atomic_load_explicit(&set->looked_at, memory_order_relaxed) > LOOK_EVERY_NS) &&
		            !set->kernel_filled;
		set->kernel_filled = false;
		bool more = true; /* the kernel may have more to tell */
		if (look) {
			int k = raw_epoll_look(epfd, told, told_max);
			if (k < 0) {
				set_unlock(set);
				return -1;
			}
			atomic_store_explicit(&set->looked_at, now, memory_order_relaxed);
			more = k == told_max;
			n = translate(set, told, k, events);
			set->kernel_filled = n == max;
		}
		n += collect(set, events + n, max - n);
		/* where few are asked for, a bell's edge or what is no event may come in the place of one: so often at most */
		for (uint32_t turns = set->bells_len + set->managed_len + 2; !n && timeout_ns == 0 && more && turns; turns--) {
			int k = raw_epoll_look(epfd, told, told_max);
			if (k <= 0)
				break;
			more = k == told_max;
			n = translate(set, told, k, events);
			n += collect(set, events + n, max - n);
		}
		if (concerns_others(set, n, max))
			wake_set(set);
		set_unlock(set);
		if (n || timeout_ns == 0 || (deadline != INT64_MAX && now >= deadline))
			return n;
		if (!spun) {
			spun = true;
			n = set_spin(set, epfd, events, max, deadline, signals);
			if (n > 0)
				return n;
		}
		if (self.signals != signals) {
			errno = EINTR;
			return -1;
		}
		/* sleep */
		rpc_listen();
		rpc_watch(epfd, &set->watched, set->secret << NAME_BITS | BELL_INDEX);
		conns_trim(now);
		struct bell *asleep[BELLS_MAX];
		uint32_t asleep_len;
		set_lock(set);
		if (set->bells_len > BELLS_MAX) {
			/* too many kinds of bells for one sleep: nap instead */
			set_unlock(set);
			int k = real.epoll_wait(epfd, told, told_max, 1);
			set_lock(set);
			set->pass++;
			if (k > 0) {
				n = translate(set, told, k, events);
				n += collect(set, events + n, max - n);
			}
			if (concerns_others(set, n, max))
				wake_set(set);
			set_unlock(set);
			if (n || (k < 0 && errno == EINTR))
				return n ? n : -1;
			now = now_ns();
			continue;
		}
		atomic_fetch_add(&set->sleepers, 1);
		set_sleep_begin(set); /* full fence; then look once more, at all of them */
		asleep_len = set->bells_len;
		for (uint32_t i = 0; i < asleep_len; i++) {
			asleep[i] = set->bells[i].bell;
			atomic_fetch_add(&asleep[i]->refs, 1);
		}
		set->pass++;
		n = collect(set, events, max);
		bool others = concerns_others(set, n, max);
		set_unlock(set);
		volatile int k = 0, failed = 0; /* live across the cleanup handler's setjmp */
		if (!n) {
			struct set_sleep sleep = {set, asleep, asleep_len};
			pthread_cleanup_push(set_sleep_undo, &sleep);
			k = sleep_epoll(epfd, told, told_max, trim_deadline(deadline, now_ns()), signals);
			failed = errno;
			pthread_cleanup_pop(0);
		}
		set_sleep_undo(&(struct set_sleep){set, asleep, asleep_len});
		if (others)
			set_wake(set);
		if (n)
			return n;
		now = now_ns();
		if (config.spin_ns)
			spin_adapt(&set->spin_ns, now - start);
		atomic_store_explicit(&set->looked_at, now, memory_order_relaxed);
		if (k < 0) {
			errno = failed;
			return -1;
		}
		if (k > 0) {
			set_lock(set);
			set->pass++;
			set->spent = SPENT_SLEPT;
			n = translate(set, told, k, events);
			if (n < max)
				n += collect(set, events + n, max - n);
			if (concerns_others(set, n, max))
				wake_set(set);
			set_unlock(set);
			if (n)
				return n;
		}
		if (self.signals != signals) {
			errno = EINTR;
			return -1;
		}
	}
}

static int wait_common(int epfd, struct epoll_event *events, int max, int64_t timeout_ns, const sigset_t *mask,
                       int (*kernel)(int, struct epoll_event *, int, const void *, const sigset_t *),
                       const void *timeout)
{
	HELD_SET set = set_hold(epfd);
	sigset_t old;

	if (unlikely(!set || max <= 0 || !events))
		return kernel(epfd, events, max, timeout, mask);
	uint64_t signals = self.signals; /* before the mask lets any in */
	if (likely(!atomic_load_explicit(&set->managed_len, memory_order_relaxed))) {
		if (unlikely(atomic_load_explicit(&rpc_pending, memory_order_relaxed)))
			rpc_poll();
		int64_t start = set->members_len > 1 && timeout_ns > 0 ? now_ns() : 0;
		atomic_fetch_add(&set->sitters, 1);
		if (likely(!atomic_load(&set->managed_len))) {
			/* The program's array holds nothing but what is reported, and a bell may come to be among the events. */
			struct epoll_event told[TOLD_MAX], *at = set->members_live ? told : events;
			int n = kernel(epfd, at, at == told && max > TOLD_MAX ? TOLD_MAX : max, timeout, mask);
			atomic_fetch_sub(&set->sitters, 1);
			if (likely(!atomic_load_explicit(&set->managed_ever, memory_order_acquire)) || n < 0) {
				if (at == told && n > 0)
					memcpy(events, told, (size_t)n * sizeof(*events));
				return n;
			}
			int failed = errno;
			set_lock(set);
			set->pass++;
			n = translate(set, at, n, events);
			n += collect(set, events + n, max - n);
			wake_set(set); /* the next one that does not know yet */
			set_unlock(set);
			errno = failed;
			if (n || timeout_ns == 0)
				return n;
			if (timeout_ns > 0 && start) {
				timeout_ns -= now_ns() - start;
				if (timeout_ns < 0)
					timeout_ns = 0;
			}
		} else {
			atomic_fetch_sub(&set->sitters, 1);
		}
	}
	set->user_pid = shim_pid;
	if (mask)
		pthread_sigmask(SIG_SETMASK, mask, &old);
	int n = set_wait(set, epfd, events, max, timeout_ns, signals);
	int failed = errno;
	if (mask)
		pthread_sigmask(SIG_SETMASK, &old, NULL);
	errno = failed;
	return n;
}

static int kernel_wait(int epfd, struct epoll_event *events, int max, const void *timeout, const sigset_t *mask)
{
	return mask ? real.epoll_pwait(epfd, events, max, *(const int *)timeout, mask)
	            : real.epoll_wait(epfd, events, max, *(const int *)timeout);
}

static int kernel_wait2(int epfd, struct epoll_event *events, int max, const void *timeout, const sigset_t *mask)
{
	return real.epoll_pwait2(epfd, events, max, timeout, mask);
}

EXPORT int epoll_wait(int epfd, struct epoll_event *events, int max, int timeout)
{
	return wait_common(epfd, events, max, timeout < 0 ? -1 : timeout * 1000000ll, NULL, kernel_wait, &timeout);
}

EXPORT int epoll_pwait(int epfd, struct epoll_event *events, int max, int timeout, const sigset_t *mask)
{
	return wait_common(epfd, events, max, timeout < 0 ? -1 : timeout * 1000000ll, mask, kernel_wait, &timeout);
}

EXPORT int epoll_pwait2(int epfd, struct epoll_event *events, int max, const struct timespec *timeout,
                        const sigset_t *mask)
{
	int64_t ns = timeout ? timespec_ns(timeout) : -1;

	return wait_common(epfd, events, max, ns, mask, kernel_wait2, timeout);
}

/* poll() on an epoll descriptor: whether any managed member has something to report, without taking edges. */
bool set_has_ready(struct file *file)
{
	struct set *set = (struct set *)file;
	bool found = false;

	set_lock(set);
	for (uint32_t i = 0; i < set->managed_len && !found; i++) {
		struct member *member = set->managed[i];
		found = !member->disabled && (conn_ready(member->conn, member_fd(member), 0, member->events) &
		                              (member->events | EPOLLERR | EPOLLHUP));
	}
	set_unlock(set);
	return found;
}

bool set_is_managed(struct file *file)
{
	return atomic_load(&((struct set *)file)->managed_len) != 0;
}

/* Each comes with a reference. */
int set_bells(struct file *file, struct bell **out, int room)
{
	struct set *set = (struct set *)file;
	int n = 0;

	set_lock(set);
	for (uint32_t i = 0; i < set->bells_len && n < room; i++) {
		atomic_fetch_add(&set->bells[i].bell->refs, 1);
		out[n++] = set->bells[i].bell;
	}
	set_unlock(set);
	return n;
}
