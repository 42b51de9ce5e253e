/*
 * shim_bell.c - bells.
 *
 * A bell is what a peer rings to wake a waiter: a word in a page the peer maps read-only, and an eventfd. The word counts
 * the sleepers (low 16 bits) and carries a generation that every sleeper moves on. A peer rings if somebody sleeps and it
 * has not rung this generation yet. So one set with 50 busy connections is rung once a sleep, and no peer can spoil the
 * word for another.
 *
 * The eventfd sits edge-triggered in epoll sets, each ring wakes every set that holds it, and nobody can take the wake-up
 * of another away, nor make who rings wait; bell.h says why.
 */
#include "shim.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>

static struct {
	uint8_t *base;
	int fd;
	uint8_t id[16];
	uint32_t used; /* lines ever handed out; freed ones are kept in free_lines */
	uint64_t free_lines;
} page = {.fd = -1};
static struct remote_bell *remote_bells;
static uint64_t serials;

static bool page_ready(void)
{
	if (page.base && (page.free_lines || page.used < BELL_PAGE_BELLS))
		return true;
	/* full, or none yet (or the parent's): bells keep their own page descriptor number, so the old page lives on */
	int fd = channel_memory("sidestep-bells", BELL_PAGE_LEN);
	if (fd < 0)
		return false;
	uint8_t *base = mmap(NULL, BELL_PAGE_LEN, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (base == MAP_FAILED ||
	    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) < 0 ||
	    getrandom(page.id, sizeof(page.id), GRND_NONBLOCK) != sizeof(page.id)) {
		if (base != MAP_FAILED)
			munmap(base, BELL_PAGE_LEN);
		raw_close(fd);
		return false;
	}
	page.fd = own_fd(fd);
	if (page.fd < 0) {
		munmap(base, BELL_PAGE_LEN);
		return false;
	}
	page.base = base;
	page.used = 0;
	page.free_lines = 0;
	return true;
}

/* One that cannot be rung (before Linux 5.8) is none: its connections stay on TCP. */
static int bell_eventfd(void)
{
	uint64_t rings = BELL_RINGS;
	int fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);

	if (fd >= 0 && (raw_write(fd, &rings, sizeof(rings)) != sizeof(rings) || !raw_ring(fd))) {
		shim_log("no doorbell can be made: %d", errno);
		raw_close(fd);
		return -1;
	}
	return fd;
}

struct bell *bell_new_locked(void)
{
	struct bell *bell = NULL;
	int fd = bell_eventfd();

	if (fd < 0)
		return NULL;
	fd = own_fd(fd);
	if (fd >= 0 && page_ready())
		bell = calloc(1, sizeof(*bell));
	if (!bell) {
		own_fd_close(fd);
		return NULL;
	}
	if (page.free_lines) {
		bell->index = (uint32_t)__builtin_ctzll(page.free_lines);
		page.free_lines &= page.free_lines - 1;
	} else {
		bell->index = page.used++;
	}
	bell->word = bell_word_at(page.base, bell->index);
	bell->hints = bell_hints_at(page.base, bell->index);
	bell->fd = fd;
	bell->page_fd = page.fd;
	bell->serial = ++serials;
	/* A line is handed out again with another eventfd, so what peers know a bell by is an id of its own. */
	memcpy(bell->id, page.id, sizeof(page.id));
	for (int i = 0; i < 8; i++)
		bell->id[i] ^= (uint8_t)(bell->serial >> 8 * i);
	bell->refs = 1;
	return bell;
}

static struct bell *bell_new(void)
{
	shim_lock_take();
	struct bell *bell = bell_new_locked();
	shim_lock_drop();
	return bell;
}

/* shim_lock held */
void bell_unref(struct bell *bell)
{
	if (atomic_fetch_sub(&bell->refs, 1) != 1)
		return;
	own_fd_close(bell->fd);
	/* The line is handed out again: generations go on, so a peer's memory of the last one rung stays right. */
	if (bell->page_fd == page.fd)
		page.free_lines |= 1ull << bell->index;
	free(bell);
}

struct bell *bell_self(void)
{
	if (!self.bell) {
		self.bell = bell_new();
		thread_register();
	}
	return self.bell;
}

void bells_after_fork(void)
{
	/* Inherited connections keep their bells, shared with the parent; new bells need a page of our own. */
	self.bell = NULL;
	if (self.bell_epfd > 0)
		own_fd_close(self.bell_epfd); /* the set is shared with the parent's thread */
	self.bell_epfd = 0;
	self.bells_len = 0;
	if (self.wait_epfd > 0)
		own_fd_close(self.wait_epfd);
	self.wait_epfd = 0;
	page.base = NULL;
	page.fd = -1;
	page.used = 0;
	page.free_lines = 0;
}

/* shim_lock held. Takes over the descriptors; life_fd may be -1. */
struct remote_bell *remote_bell_get(const uint8_t id[16], uint32_t index, int event_fd, int page_fd, int life_fd)
{
	struct remote_bell *bell;
	struct stat st;

	for (bell = remote_bells; bell; bell = bell->next)
		if (bell->index == index && memcmp(bell->id, id, 16) == 0) {
			bell->refs++;
			raw_close(event_fd);
			raw_close(page_fd);
			if (life_fd >= 0)
				raw_close(life_fd);
			return bell;
		}
	bell = NULL;
	if (index < BELL_PAGE_BELLS && channel_stays(page_fd) && fstat(page_fd, &st) == 0 && st.st_size >= 4096)
		bell = calloc(1, sizeof(*bell));
	if (bell) {
		bell->page_len = st.st_size >= (off_t)BELL_PAGE_LEN ? BELL_PAGE_LEN : 4096;
		bell->page = mmap(NULL, bell->page_len, PROT_READ, MAP_SHARED, page_fd, 0);
		if (bell->page == MAP_FAILED) {
			free(bell);
			bell = NULL;
		}
	}
	raw_close(page_fd);
	if (!bell) {
		raw_close(event_fd);
		if (life_fd >= 0)
			raw_close(life_fd);
		return NULL;
	}
	bell->life_fd = life_fd >= 0 ? own_fd(life_fd) : -1;
	bell->word = bell_word_at(bell->page, index);
	if (bell->page_len == BELL_PAGE_LEN)
		bell->hints = bell_hints_at(bell->page, index);
	bell->fd = own_fd(event_fd);
	if (bell->fd < 0 || (life_fd >= 0 && bell->life_fd < 0)) {
		own_fd_close(bell->fd);
		own_fd_close(bell->life_fd);
		munmap(bell->page, bell->page_len);
		free(bell);
		return NULL;
	}
	memcpy(bell->id, id, 16);
	bell->index = index;
	bell->refs = 1;
	bell->rung = UINT64_MAX;
	bell->next = remote_bells;
	remote_bells = bell;
	return bell;
}

/* shim_lock held */
void remote_bell_unref(struct remote_bell *bell)
{
	struct remote_bell **at = &remote_bells;

	if (--bell->refs)
		return;
	while (*at && *at != bell)
		at = &(*at)->next;
	if (*at)
		*at = bell->next;
	own_fd_close(bell->fd);
	own_fd_close(bell->life_fd);
	munmap(bell->page, bell->page_len);
	free(bell);
}

/* Names the connection to a peer that holds too many to look at each. Ends with a full fence. */
void conn_hint(struct conn *conn, uint32_t number)
{
	struct hint_ring *hints = conn->bell->hints;
	uint64_t count = atomic_fetch_add(&hints->tail, 1);

	/* Its place first, then its content: a reader that comes in between sees an entry of another round. */
	atomic_store(&hints->entry[count % HINTS], count << 32 | number);
	full_fence();
}

void remote_bell_ring_slow(struct conn *conn, uint64_t generation)
{
	struct remote_bell *bell = conn->remote_bell;
	int saved = errno;

	if (atomic_exchange_explicit(&bell->rung, generation, memory_order_relaxed) == generation)
		return;
	if (!raw_ring(bell->fd))
		shim_log("doorbell failed: %d", errno); /* its owner has made it so, and is not woken */
	word_add(conn->slot->doorbells_sent, 1);
	errno = saved;
}

/*
 * Lets a set be woken by the death of a provider, too: once, so that it disturbs no other wait. One that has been is told
 * anew (a MOD does that), as a wait for something else, which knew of nothing to look at, may have taken the edge.
 */
bool conn_watch_life(const struct conn *conn, int epfd, uint64_t data)
{
	struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.u64 = data};
	const struct remote_bell *bell = conn->remote_bell;

	return !conn_relayed(conn) || atomic_load_explicit(&bell->dead, memory_order_relaxed) ||
	       real.epoll_ctl(epfd, EPOLL_CTL_MOD, bell->life_fd, &event) == 0 ||
	       real.epoll_ctl(epfd, EPOLL_CTL_ADD, bell->life_fd, &event) == 0 || errno == EEXIST;
}
