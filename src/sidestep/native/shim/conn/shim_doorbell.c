/*
 * shim_doorbell.c - doorbells.
 *
 * A peer rings a doorbell to wake a waiter: a word in a page that the peer maps read-only, and an eventfd. The word counts
 * the sleepers (low 16 bits) and carries a generation that every sleeper moves on. A peer rings if a thread sleeps and it has
 * not rung this generation yet. So one set with 50 busy connections is rung once a sleep, and no peer can spoil the word for
 * another. The eventfd sits edge-triggered in epoll sets, and each ring wakes every set that holds it. No process can take
 * the wake-up of another away, nor make the ringing one wait; doorbell.h says why.
 */
#include "shim.h"

#include <linux/futex.h>
#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>

#define REMOTES_KEPT_MAX 256

static struct {
	uint8_t *base;
	int fd;
	uint8_t id[16];
	uint32_t used; /* lines ever handed out; freed ones are kept in free_lines */
	uint64_t free_lines;
} page = {.fd = -1};
static struct remote_doorbell *remote_doorbells;
static uint32_t remotes_kept; /* pages that are open for the next program; see shim_travel.c */
static uint64_t serials;

static bool page_ready(void)
{
	if (page.base && (page.free_lines || page.used < DOORBELLS_PER_PAGE))
		return true;
	/* full, or none yet (or the parent's): doorbells keep their own page descriptor number, so the old page lives on */
	int fd = channel_memory("sidestep-doorbells", DOORBELL_PAGE_LEN);
	if (fd < 0)
		return false;
	uint8_t *base = mmap(NULL, DOORBELL_PAGE_LEN, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (base == MAP_FAILED ||
	    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) < 0 ||
	    getrandom(page.id, sizeof(page.id), GRND_NONBLOCK) != sizeof(page.id)) {
		if (base != MAP_FAILED)
			munmap(base, DOORBELL_PAGE_LEN);
		raw_close(fd);
		return false;
	}
	page.fd = own_fd(fd);
	if (page.fd < 0) {
		munmap(base, DOORBELL_PAGE_LEN);
		return false;
	}
	page.base = base;
	page.used = 0;
	page.free_lines = 0;
	return true;
}

/* A doorbell that cannot be rung (before Linux 5.8) is none: its connections stay on TCP. */
static int doorbell_eventfd(void)
{
	uint64_t rings = DOORBELL_RINGS;
	int fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);

	if (fd >= 0 && (raw_write(fd, &rings, sizeof(rings)) != sizeof(rings) || !raw_doorbell_ring(fd))) {
		shim_log("no doorbell can be made: %d", errno);
		raw_close(fd);
		return -1;
	}
	return fd;
}

struct doorbell *doorbell_new_locked(void)
{
	struct doorbell *doorbell = NULL;
	int fd = own_fd(doorbell_eventfd());

	if (fd >= 0 && page_ready())
		doorbell = calloc(1, sizeof(*doorbell));
	if (!doorbell) {
		own_fd_close(fd);
		return NULL;
	}
	if (page.free_lines) {
		doorbell->index = (uint32_t)__builtin_ctzll(page.free_lines);
		page.free_lines &= page.free_lines - 1;
	} else {
		doorbell->index = page.used++;
	}
	doorbell->word = doorbell_word_at(page.base, doorbell->index);
	doorbell->hints = doorbell_hints_at(page.base, doorbell->index);
	doorbell->fd = doorbell->wait_fd = fd;
	doorbell->old_fd = -1;
	doorbell->page_fd = page.fd;
	doorbell->serial = ++serials;
	/* A line is handed out again with another eventfd, so what peers know a doorbell by is an id of its own. */
	memcpy(doorbell->id, page.id, sizeof(page.id));
	for (int i = 0; i < 8; i++)
		doorbell->id[i] ^= (uint8_t)(doorbell->serial >> 8 * i);
	doorbell->refs = 1;
	return doorbell;
}

static bool doorbell_waits_on(int set, int fd)
{
	struct epoll_event event = {.events = DOORBELL_EDGES};

	return set >= 0 && real.epoll_ctl(set, EPOLL_CTL_ADD, fd, &event) == 0;
}

struct doorbell *doorbell_successor_locked(int old_fd)
{
	struct doorbell *doorbell = doorbell_new_locked();
	int set = doorbell ? own_fd(real.epoll_create1(EPOLL_CLOEXEC)) : -1;
	int old = set < 0 ? -1 : own_fd(old_fd);

	if (old >= 0 && doorbell_waits_on(set, doorbell->fd) && doorbell_waits_on(set, old)) {
		doorbell->wait_fd = set;
		doorbell->old_fd = old;
		return doorbell;
	}
	own_fd_close(set);
	if (doorbell)
		doorbell_unref(doorbell);
	if (old >= 0)
		own_fd_close(old);
	else
		raw_close(old_fd);
	return NULL;
}

void doorbell_known(struct doorbell *doorbell)
{
	if (doorbell->old_fd < 0 || --doorbell->old_users)
		return;
	real.epoll_ctl(doorbell->wait_fd, EPOLL_CTL_DEL, doorbell->old_fd, NULL);
	own_fd_close(doorbell->old_fd);
	doorbell->old_fd = -1;
}

/* shim_lock held */
void doorbell_unref(struct doorbell *doorbell)
{
	if (atomic_fetch_sub(&doorbell->refs, 1) != 1)
		return;
	if (doorbell->wait_fd != doorbell->fd)
		own_fd_close(doorbell->wait_fd);
	own_fd_close(doorbell->old_fd);
	own_fd_close(doorbell->fd);
	/* The line is handed out again: generations go on, so a peer's memory of the last one rung stays right. */
	if (doorbell->page_fd == page.fd)
		page.free_lines |= 1ull << doorbell->index;
	free(doorbell);
}

struct doorbell *doorbell_self(void)
{
	if (!self.doorbell) {
		shim_lock_take();
		self.doorbell = doorbell_new_locked();
		shim_lock_drop();
		thread_register();
	}
	return self.doorbell;
}

void doorbells_wake(struct doorbell *const *doorbells, uint32_t len)
{
	for (uint32_t i = 0; i < len; i++)
		doorbell_word_wake(doorbells[i]->word);
	shim_lock_take();
	for (uint32_t i = 0; i < len; i++)
		doorbell_unref(doorbells[i]);
	shim_lock_drop();
}

void self_sets_close(void)
{
	if (self.doorbell_epfd > 0)
		own_fd_close(self.doorbell_epfd);
	if (self.wait_epfd > 0)
		own_fd_close(self.wait_epfd);
	self.doorbell_epfd = self.wait_epfd = 0;
	self.doorbells_len = 0;
}

void doorbells_after_fork(void)
{
	/* Inherited connections keep their doorbells, shared with the parent; new doorbells need a page of our own. */
	self.doorbell = NULL;
	self_sets_close(); /* shared with the parent's thread */
	page.base = NULL;
	page.fd = -1;
	page.used = 0;
	page.free_lines = 0;
}

void conn_loose(struct conn *conn)
{
	struct doorbell *doorbell = conn->doorbell;

	if (conn->loose_at || !doorbell || !conn->managed || has_members(conn))
		return;
	conn->loose_next = doorbell->loose;
	if (conn->loose_next)
		__atomic_store_n(&conn->loose_next->loose_at, &conn->loose_next, __ATOMIC_RELAXED);
	doorbell->loose = conn;
	__atomic_store_n(&conn->loose_at, &doorbell->loose, __ATOMIC_RELAXED); /* see conn_is_loose() */
	word_store(doorbell->loose_len, word_load(doorbell->loose_len) + 1);
}

void conn_unloose(struct conn *conn)
{
	if (!conn->loose_at)
		return;
	*conn->loose_at = conn->loose_next;
	if (conn->loose_next)
		__atomic_store_n(&conn->loose_next->loose_at, conn->loose_at, __ATOMIC_RELAXED);
	__atomic_store_n(&conn->loose_at, NULL, __ATOMIC_RELAXED);
	word_store(conn->doorbell->loose_len, word_load(conn->doorbell->loose_len) - 1);
}

/* Takes over the descriptors but for the page's. */
static struct remote_doorbell *remote_doorbell_new(const uint8_t id[16], uint32_t index, int event_fd, int page_fd,
                                                   int liveness_fd)
{
	struct stat st = {0};
	bool good = index < DOORBELLS_PER_PAGE && channel_stays(page_fd) && fstat(page_fd, &st) == 0 && st.st_size >= 4096;
	struct remote_doorbell *doorbell = good ? calloc(1, sizeof(*doorbell)) : NULL;
	size_t len = st.st_size >= (off_t)DOORBELL_PAGE_LEN ? DOORBELL_PAGE_LEN : 4096;
	void *at = doorbell ? mmap(NULL, len, PROT_READ, MAP_SHARED, page_fd, 0) : MAP_FAILED;
	int fd = own_fd(event_fd), own_liveness_fd = own_fd(liveness_fd);
	int own_page_fd = -1;
	struct rlimit limit;

	if (at == MAP_FAILED || fd < 0 || (liveness_fd >= 0 && own_liveness_fd < 0)) {
		own_fd_close(fd);
		own_fd_close(own_liveness_fd);
		if (at != MAP_FAILED)
			munmap(at, len);
		free(doorbell);
		errno = good ? EMFILE : EPROTO; /* we have no room for it, or the peer's page is none */
		return NULL;
	}
	/* remotes take at most a quarter of the numbers that are ours, as conn_keep_segment() */
	if (remotes_kept < REMOTES_KEPT_MAX && getrlimit(RLIMIT_NOFILE, &limit) == 0 && remotes_kept < limit.rlim_cur / 32)
		own_page_fd = own_fd(real.fcntl64(page_fd, F_DUPFD_CLOEXEC, 0));
	remotes_kept += own_page_fd >= 0;
	*doorbell = (struct remote_doorbell){
		.word = doorbell_word_at(at, index),
		.hints = len == DOORBELL_PAGE_LEN ? doorbell_hints_at(at, index) : NULL,
		.fd = fd,
		.liveness_fd = own_liveness_fd,
		.index = index,
		.refs = 1,
		.rung = UINT64_MAX,
		.page_fd = own_page_fd,
		.page_inode = (uint64_t)st.st_ino,
		.page = at,
		.page_len = len,
		.next = remote_doorbells,
	};
	memcpy(doorbell->id, id, 16);
	return remote_doorbells = doorbell;
}

/* shim_lock held. Takes over the descriptors; liveness_fd may be -1. */
struct remote_doorbell *remote_doorbell_get(const uint8_t id[16], uint32_t index, int event_fd, int page_fd,
                                            int liveness_fd)
{
	struct remote_doorbell *doorbell = remote_doorbells;

	while (doorbell && (doorbell->index != index || memcmp(doorbell->id, id, 16) != 0))
		doorbell = doorbell->next;
	if (doorbell) {
		doorbell->refs++;
		raw_close(event_fd);
		if (liveness_fd >= 0)
			raw_close(liveness_fd);
	} else {
		doorbell = remote_doorbell_new(id, index, event_fd, page_fd, liveness_fd);
	}
	raw_close(page_fd);
	return doorbell;
}

/* shim_lock held */
void remote_doorbell_unref(struct remote_doorbell *doorbell)
{
	struct remote_doorbell **at = &remote_doorbells;

	if (--doorbell->refs)
		return;
	while (*at && *at != doorbell)
		at = &(*at)->next;
	if (*at)
		*at = doorbell->next;
	own_fd_close(doorbell->fd);
	own_fd_close(doorbell->liveness_fd);
	remotes_kept -= doorbell->page_fd >= 0;
	own_fd_close(doorbell->page_fd);
	munmap(doorbell->page, doorbell->page_len);
	free(doorbell);
}

/* Wakes the thread that sleeps on this futex. False: none does. One that died asleep has left its mark. */
bool futex_ring(_Atomic uint32_t *asleep)
{
	uint32_t state = ASLEEP_FUTEX;

	if (word_load(*asleep) != state || !atomic_compare_exchange_strong(asleep, &state, ASLEEP_RUNG))
		return false;
	return real.syscall(SYS_futex, (long)asleep, FUTEX_WAKE, 1, 0, 0, 0) > 0;
}

/* Names the connection to a peer that holds too many to look at each. Ends with a full fence. */
void conn_hint(struct conn *conn, uint32_t number)
{
	struct hint_ring *hints = conn->doorbell->hints;

	if (number & HINT_RING_ALWAYS) { /* the word that we look at is not the one that it sleeps by */
		KEEP_ERRNO;
		futex_ring(&conn->channel.tx_peer_line->asleep);
		raw_doorbell_ring(__atomic_load_n(&conn->remote_doorbell, __ATOMIC_ACQUIRE)->fd);
		word_add(conn->slot->doorbells_sent, 1);
	}
	number &= ~HINT_RING_ALWAYS;
	if (!number)
		return;
	uint64_t count = atomic_fetch_add(&hints->tail, 1);

	/* The place is counted first, then written: a reader that comes in between sees an entry of another round. */
	atomic_store(&hints->entry[count % HINTS], count << 32 | number);
	full_fence();
}

void doorbell_ring_slow(struct conn *conn, struct remote_doorbell *doorbell, uint64_t word)
{
	const uint64_t generation = word >> 16;
	KEEP_ERRNO;

	atomic_thread_fence(memory_order_acquire); /* a sleeper that the word counts has set its futex before */
	if (futex_ring(&conn->channel.tx_peer_line->asleep)) {
		word_add(conn->slot->doorbells_sent, 1);
		if ((word & 0xffff) == 1)
			return;
	}
	if (atomic_exchange_explicit(&doorbell->rung, generation, memory_order_relaxed) == generation)
		return;
	if (!raw_doorbell_ring(doorbell->fd))
		shim_log("doorbell failed: %d", errno); /* the owner has made it so, and does not wake */
	word_add(conn->slot->doorbells_sent, 1);
}

/*
 * Lets the death of a provider wake a set, too: once, so that it disturbs no other wait. A death that was reported already is
 * reported again (a MOD does that): a wait for something else may have taken the edge without a look.
 */
bool conn_liveness_watch(const struct conn *conn, int epfd, uint64_t data)
{
	struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.u64 = data};
	const struct remote_doorbell *doorbell = conn->remote_doorbell;

	return !conn_relayed(conn) || word_load(doorbell->dead) ||
	       real.epoll_ctl(epfd, EPOLL_CTL_MOD, doorbell->liveness_fd, &event) == 0 ||
	       real.epoll_ctl(epfd, EPOLL_CTL_ADD, doorbell->liveness_fd, &event) == 0 || errno == EEXIST;
}
