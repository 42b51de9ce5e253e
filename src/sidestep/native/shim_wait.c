/*
 * shim_wait.c - bells, spinning, sleeping.
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
#include <sched.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#define LOAD_REFRESH_NS 4000000   /* how old the count of runnable threads may be */
#define SPREAD_EVERY_NS 100000000 /* a thread moves away from its peer's CPU at most this often */
#define STUCK_AFTER_NS 50000000   /* both rings full and nobody has moved for so long: one waits for what TCP has room for */
#define RESEND_EVERY_NS 1000000   /* recalled bytes are tried again this often while a call waits */
#define NO_BELL_POLL_NS 1000000   /* without descriptors for a bell, sleep by short naps */

static struct {
	uint8_t *base;
	int fd;
	uint8_t id[16];
	uint32_t used; /* lines ever handed out; freed ones are kept in free_lines */
	uint64_t free_lines;
} page = {.fd = -1};
static struct remote_bell *remote_bells;
static uint64_t serials;

/* ---- bells ---- */
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

struct bell *bell_new(void)
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

int self_bell_fd(struct bell *const *bells, int bells_len)
{
	if (self.bell_epfd <= 0) {
		self.bell_epfd = own_fd(real.epoll_create1(EPOLL_CLOEXEC));
		self.bells_len = 0;
		self.bell_watched = 0;
		thread_register();
		if (self.bell_epfd < 0)
			return -1;
	}
	rpc_watch(self.bell_epfd, &self.bell_watched, 0);
	for (int i = 0; i < bells_len; i++) {
		uint32_t at = 0;
		while (at < self.bells_len && self.bells[at] != bells[i]->serial)
			at++;
		if (at < self.bells_len)
			continue;
		if (self.bells_len == sizeof(self.bells) / sizeof(*self.bells)) {
			/* too many to remember: start over with those of this wait */
			if (bells_len > (int)self.bells_len)
				return -1;
			own_fd_close(self.bell_epfd);
			self.bell_epfd = 0;
			return self_bell_fd(bells, bells_len);
		}
		struct epoll_event event = {.events = BELL_EDGES};
		if (real.epoll_ctl(self.bell_epfd, EPOLL_CTL_ADD, bells[i]->fd, &event) < 0 && errno != EEXIST)
			return -1;
		self.bells[self.bells_len++] = bells[i]->serial;
	}
	return self.bell_epfd;
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

void self_life_watch(const struct conn *conn)
{
	if (!conn_watch_life(conn, self.bell_epfd, 0))
		shim_log("the end of a provider will be heard late: %d", errno);
}

void self_bells_clear(void)
{
	struct epoll_event events[32];

	raw_epoll_look(self.bell_epfd, events, 32);
}

/* ---- the clock of one call ---- */
void wait_clock_start(struct wait_clock *clock, int64_t timeout_ns)
{
	clock->deadline = deadline_after(timeout_ns);
	clock->signals = self.signals;
	clock->signals_interrupting = self.signals_interrupting;
}

/* ---- spinning ---- */
static uint32_t runnable_threads(void)
{
	static _Atomic int64_t read_at;
	static _Atomic uint32_t runnable;
	static _Atomic int opened = -2;
	int fd = atomic_load_explicit(&opened, memory_order_relaxed);
	int64_t now = now_ns();

	if (now - atomic_load_explicit(&read_at, memory_order_relaxed) < LOAD_REFRESH_NS)
		return atomic_load_explicit(&runnable, memory_order_relaxed);
	atomic_store_explicit(&read_at, now, memory_order_relaxed);
	if (fd == -2) {
		int mine = own_fd(open("/proc/loadavg", O_RDONLY | O_CLOEXEC));
		if (atomic_compare_exchange_strong(&opened, &fd, mine))
			fd = mine;
		else
			own_fd_close(mine); /* another thread was first; fd is its */
	}
	char text[64] = "";
	if (fd < 0 || real.pread64(fd, text, sizeof(text) - 1, 0) <= 0) {
		atomic_store(&runnable, UINT32_MAX); /* blind: never spin hard */
		return UINT32_MAX;
	}
	/* proc(5): "0.20 0.18 0.12 RUNNING/TOTAL LASTPID"; RUNNING counts us */
	const char *slash = strchr(text, '/');
	uint32_t count = 0, unit = 1;
	for (const char *at = slash; at && at > text && at[-1] >= '0' && at[-1] <= '9'; at--, unit *= 10)
		count += (uint32_t)(at[-1] - '0') * unit;
	atomic_store_explicit(&runnable, count, memory_order_relaxed);
	return count;
}

bool spin_allowed(void)
{
	return runnable_threads() <= (uint32_t)config.ncpus;
}

/* Moves this thread off the CPU it shares with its peer: the kernel puts a sleeping pair on one, for good. */
static void spread(uint32_t cpu)
{
	static __thread int64_t spread_at;
	cpu_set_t all, others;
	int64_t now = now_ns();

	if (now - spread_at < SPREAD_EVERY_NS)
		return;
	spread_at = now;
	if (sched_getaffinity(0, sizeof(all), &all) < 0 || CPU_COUNT(&all) < 2)
		return;
	others = all;
	CPU_CLR((int)cpu - 1, &others);
	if (sched_setaffinity(0, sizeof(others), &others) == 0)
		sched_setaffinity(0, sizeof(all), &all);
}

void spin_share(bool may_move, uint32_t cpu)
{
	if (may_move)
		spread(cpu);
	sched_yield();
}

static bool rx_ready_now(const struct conn *conn, size_t wanted)
{
	return channel_rx_peek(&conn->channel) >= wanted;
}

static bool tx_ready_now(const struct conn *conn, size_t wanted)
{
	return conn_room(conn) >= wanted;
}

static bool ready_now(const struct conn *conn, int want, size_t space)
{
	const struct conn_slot *slot = conn->slot;

	if (unlikely(conn_asked(conn) || (conn_notice(conn) && conn_recalled_since(conn))))
		return true;
	if (conn_relay_news(conn))
		return true;
	if (want == WAIT_TX && tx_is(slot, TX_RESEND))
		return false;
	if (want == WAIT_TX)
		return tx_ready_now(conn, space) || !tx_by_ring(slot) ||
		       (conn_notice(conn) & CHANNEL_CLOSED) ||
		       slot_has(slot, SLOT_PEER_GONE | SLOT_RESET | SLOT_WR_SHUT);
	if (!rx_by_ring(slot))
		/* before the offset TCP's bytes are still on their way, and wake by themselves */
		return rx_watches(slot) && conn_tcp_read(conn);
	return rx_ready_now(conn, space) || conn_peer_back(conn) || slot_has(slot, SLOT_FIN | SLOT_RESET | SLOT_RD_SHUT);
}

static bool spin(struct conn *conn, int want, size_t space, uint64_t signals)
{
	uint32_t budget = atomic_load_explicit(&conn->spin_ns, memory_order_relaxed);
	uint32_t peer_cpu = want == WAIT_RX ? word_load(conn->channel.rx_peer_line->cpu)
	                                    : word_load(conn->channel.tx_peer_line->cpu);
	bool crowded = !spin_allowed(), won = false;
	int64_t start = now_ns(), now = start;

	if (want == WAIT_RX && word_load(conn->channel.rx_line->cpu) != cpu_now())
		atomic_store_explicit(&conn->channel.rx_line->cpu, cpu_now(), memory_order_relaxed);
	do {
		uint32_t cpu = cpu_now();
		if (crowded || cpu == peer_cpu) {
			/* the peer cannot run while we do */
			if (ready_now(conn, want, space)) {
				won = true;
				break;
			}
			spin_share(!crowded && conn->channel.local == &conn->channel.seg->side[0], cpu);
		} else {
			for (int i = 0; i < 32 && !won; i++) {
				won = ready_now(conn, want, space);
				cpu_relax();
			}
		}
		now = now_ns();
	} while (!won && now - start < budget && signals == self.signals);
	if (won)
		word_add(conn->slot->spins_won, 1);
	else
		word_add(conn->slot->spins_lost, 1);
	return won;
}

/*
 * ---- waiting on TCP ----
 *
 * Between two ends on one host the kernel's wake-up costs more than what it waits for: an idle CPU has to be interrupted.
 * So a blocking call of a connection that is not promoted, or of a listener, asks a few times before it sleeps; how long
 * that paid lately decides, for each thread. Only tracked connections, whose peers are near, come here.
 */
#define NATIVE_SPIN_NS 30000

struct native_spin {
	uint32_t budget;
	bool known;
};
static __thread struct native_spin spin_receiving, spin_accepting;

static uint32_t native_budget(struct native_spin *spin)
{
	uint32_t most = config.spin_ns < NATIVE_SPIN_NS ? config.spin_ns : NATIVE_SPIN_NS;

	if (!spin->known)
		*spin = (struct native_spin){most, true};
	return most && spin_allowed() ? spin->budget : 0;
}

static void native_learn(struct native_spin *spin, int64_t waited_ns)
{
	uint32_t most = config.spin_ns < NATIVE_SPIN_NS ? config.spin_ns : NATIVE_SPIN_NS;

	/* a wait that a sleep made long by its wake-up alone still counts as short */
	if (waited_ns < 4 * (int64_t)most)
		spin->budget = most;
	else if (spin->budget > most / 16)
		spin->budget /= 2;
}

/* Between two questions: the other side needs the socket's lock, or this very CPU. */
static void native_pause(void)
{
	sched_yield();
}

/* recv() with no flags, of a native connection. */
ssize_t native_receive(struct conn *conn, int fd, void *buf, size_t n)
{
	uint32_t budget;
	uint64_t signals = self.signals_interrupting;

	if (n == 0 || word_load(conn->nonblock) || conn->slot->rx_low_water != 1 || !(budget = native_budget(&spin_receiving)))
		return real.recv(fd, buf, n, 0);
	pthread_testcancel();
	int saved = errno;
	int64_t start = 0, now;
	for (;;) {
		ssize_t got = raw_recv(fd, buf, n, MSG_DONTWAIT);
		bool waits = got < 0 && errno == EAGAIN;
		if (waits || start)
			now = now_ns();
		if (!waits) {
			if (start)
				native_learn(&spin_receiving, now - start);
			if (got >= 0)
				errno = saved;
			return got;
		}
		if (!start)
			start = now;
		if (self.signals_interrupting != signals) {
			errno = EINTR;
			return -1;
		}
		if (now - start >= budget)
			break;
		native_pause();
	}
	errno = saved;
	ssize_t got = real.recv(fd, buf, n, 0);
	saved = errno;
	native_learn(&spin_receiving, now_ns() - start);
	errno = saved;
	return got;
}

int native_accept(int fd, struct sockaddr *address, socklen_t *len, int flags)
{
	uint32_t budget = native_budget(&spin_accepting);
	uint64_t signals = self.signals_interrupting;
	struct pollfd in = {.fd = fd, .events = POLLIN};

	if (!budget || raw_poll(&in, 1, 0) != 0 || (real.fcntl64(fd, F_GETFL, 0) & O_NONBLOCK))
		return real.accept4(fd, address, len, flags);
	int64_t start = now_ns(), now = start;
	while (now - start < budget && raw_poll(&in, 1, 0) == 0) {
		if (self.signals_interrupting != signals) {
			errno = EINTR;
			return -1;
		}
		native_pause();
		now = now_ns();
	}
	int got = real.accept4(fd, address, len, flags), saved = errno;
	native_learn(&spin_accepting, now_ns() - start);
	errno = saved;
	return got;
}

/* ---- sleeping ---- */
static void sleep_cancelled(void *argument)
{
	struct conn *conn = argument;

	bell_sleep_end(conn->bell);
	atomic_fetch_sub(&conn->waiters, 1);
}

/*
 * ppoll that a signal cannot slip past: a handler zeroes self.sleep, so one that runs after the last look and before the
 * kernel reads the timeout makes the call return at once. libc's wrapper would copy the timeout first, hence syscall();
 * asynchronous cancellation around it makes it the cancellation point that recv and send are.
 */
static void sleep_time(int64_t deadline, uint64_t signals)
{
	int64_t left = deadline == INT64_MAX ? (int64_t)1 << 60 : deadline - now_ns();

	if (left < 0)
		left = 0;
	self.sleep = (struct timespec){left / 1000000000, left % 1000000000};
	atomic_signal_fence(memory_order_seq_cst);
	if (self.signals != signals)
		self.sleep = (struct timespec){0, 0};
}

int sleep_epoll(int epfd, struct epoll_event *events, int max, int64_t deadline, uint64_t signals)
{
	static _Atomic bool old_kernel; /* before 5.11 there is no epoll_pwait2 */
	int cancel, n = -1;

	sleep_time(deadline, signals);
	pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, &cancel);
	if (!atomic_load_explicit(&old_kernel, memory_order_relaxed)) {
		n = (int)real.syscall(SYS_epoll_pwait2, epfd, (long)events, max, (long)&self.sleep, 0, 0);
		if (n < 0 && errno == ENOSYS)
			atomic_store(&old_kernel, true);
	}
	if (atomic_load_explicit(&old_kernel, memory_order_relaxed)) {
		struct pollfd fd = {.fd = epfd, .events = POLLIN};
		n = (int)real.syscall(SYS_ppoll, (long)&fd, 1, (long)&self.sleep, 0, _NSIG / 8, 0);
		if (n > 0)
			n = real.epoll_wait(epfd, events, max, 0);
	}
	pthread_setcanceltype(cancel, &cancel);
	return n;
}

int sleep_poll(struct pollfd *fds, nfds_t fds_len, int64_t deadline, uint64_t signals, const sigset_t *mask)
{
	int old;

	sleep_time(deadline, signals);
	pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, &old);
	int n = (int)real.syscall(SYS_ppoll, (long)fds, (long)fds_len, (long)&self.sleep, (long)mask, _NSIG / 8, 0);
	pthread_setcanceltype(old, &old);
	return n;
}

/* Whether the number of an entry is still its socket's. It may be that of another, which has an entry of its own. */
static bool still_watched(uint32_t at)
{
	struct conn *conn = self.watched[at].serial ? conn_get(self.watched[at].fd) : NULL;

	return conn && word_load(conn->serial) == self.watched[at].serial;
}

/* Puts the socket and the bell into the set a blocking receive sleeps on; the index of the socket there, or -1. */
static int wait_set(struct conn *conn, int fd)
{
	uint32_t at = 0;

	if (self.wait_epfd <= 0) {
		self.wait_epfd = own_fd(real.epoll_create1(EPOLL_CLOEXEC));
		self.wait_bells_len = 0;
		self.wait_watched = 0;
		memset(self.watched, 0, sizeof(self.watched));
		thread_register();
		if (self.wait_epfd < 0)
			return -1;
	}
	rpc_watch(self.wait_epfd, &self.wait_watched, UINT32_MAX);
	while (at < self.wait_bells_len && self.wait_bells[at] != conn->bell->serial)
		at++;
	if (at == self.wait_bells_len) {
		struct epoll_event event = {.events = BELL_EDGES, .data.u32 = UINT32_MAX};
		if (at == sizeof(self.wait_bells) / sizeof(*self.wait_bells) ||
		    (real.epoll_ctl(self.wait_epfd, EPOLL_CTL_ADD, conn->bell->fd, &event) < 0 && errno != EEXIST)) {
			own_fd_close(self.wait_epfd); /* start over with the next wait */
			self.wait_epfd = 0;
			return -1;
		}
		self.wait_bells[self.wait_bells_len++] = conn->bell->serial;
	}
	if (!conn_watch_life(conn, self.wait_epfd, UINT32_MAX))
		return -1;
	for (at = 0; at < 4; at++)
		if (self.watched[at].serial == conn->serial && self.watched[at].fd == fd)
			return (int)at;
	at = self.watched_next++ % 4;
	if (still_watched(at))
		real.epoll_ctl(self.wait_epfd, EPOLL_CTL_DEL, self.watched[at].fd, NULL);
	/* Only its edges where a provider stands between: what TCP holds, an end or what was sent after it went back to TCP,
	 * may have to stay there for a while. */
	struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP | (conn_relayed(conn) ? EPOLLET : 0), .data.u32 = at};
	self.watched[at].serial = 0;
	if (real.epoll_ctl(self.wait_epfd, EPOLL_CTL_ADD, fd, &event) < 0 &&
	    (errno != EEXIST || real.epoll_ctl(self.wait_epfd, EPOLL_CTL_MOD, fd, &event) < 0))
		return -1;
	self.watched[at].serial = conn->serial;
	self.watched[at].fd = fd;
	return (int)at;
}

/* Sleeps until the bell rings or the socket has something. >0: the socket has. */
static int sleep_receiving(struct conn *conn, int fd, int64_t deadline, uint64_t signals, int *error)
{
	struct epoll_event events[8];
	int at = wait_set(conn, fd), native = 0;

	if (at < 0) {
		struct pollfd pollfd = {.fd = fd, .events = POLLIN | POLLRDHUP};
		int64_t nap = now_ns() + NO_BELL_POLL_NS;
		int n = sleep_poll(&pollfd, 1, deadline < nap ? deadline : nap, signals, NULL);
		*error = n < 0 ? errno : 0;
		return n > 0;
	}
	int n = sleep_epoll(self.wait_epfd, events, 8, deadline, signals);
	*error = n < 0 ? errno : 0;
	for (int i = 0; i < n; i++) {
		uint32_t which = events[i].data.u32;
		if (which == (uint32_t)at) {
			native = 1;
		} else if (which < 4) {
			/* a socket this thread waited on before: not of interest now */
			if (self.wait_epfd > 0 &&
			    (!still_watched(which) ||
			     real.epoll_ctl(self.wait_epfd, EPOLL_CTL_DEL, self.watched[which].fd, NULL) < 0)) {
				own_fd_close(self.wait_epfd); /* an entry that cannot be named any more would wake us for ever */
				self.wait_epfd = 0;
			}
			self.watched[which].serial = 0;
		}
	}
	return native;
}

static int sleep_sending(struct conn *conn, int fd, int64_t deadline, uint64_t signals, int *error)
{
	struct pollfd fds[3] = {{.fd = fd}, {.events = POLLIN}, {.fd = -1}};

	if (conn_relayed(conn)) {
		fds[2].fd = conn->remote_bell->life_fd;
		if (slot_has(conn->slot, SLOT_NATIVE_RESET))
			fds[0].fd = -1;
	}
	if (!slot_has(conn->slot, SLOT_FIN | SLOT_RD_SHUT | SLOT_NATIVE_FIN))
		fds[0].events = POLLRDHUP;
	fds[1].fd = self_bell_fd(&conn->bell, 1);
	if (fds[1].fd < 0 && deadline - NO_BELL_POLL_NS > now_ns())
		deadline = now_ns() + NO_BELL_POLL_NS;
	int n = sleep_poll(fds, 3, deadline, signals, NULL);
	*error = n < 0 ? errno : 0;
	if (n > 0 && fds[1].revents)
		self_bells_clear();
	return n > 0 && fds[0].revents;
}

int conn_wait(struct conn *conn, int fd, int want, size_t space, const struct wait_clock *clock, bool timed)
{
	struct conn_slot *slot = conn->slot;
	struct bell *bell = conn->bell;
	volatile int result = 0; /* lives across the cleanup handler's setjmp */

	uint64_t signals = self.signals; /* a handler that runs from here on ends the sleep; before, it is judged below */

	if (ready_now(conn, want, space)) {
		if (conn_relay_news(conn)) /* who sends again by TCP has not looked */
			conn_probe(conn, fd);
		return 0;
	}
	if (self.signals_interrupting != clock->signals_interrupting || (timed && self.signals != clock->signals))
		return -EINTR;
	bool on_ring = want == WAIT_TX || rx_by_ring(slot);
	int64_t start = config.spin_ns ? now_ns() : 0;
	if (on_ring && config.spin_ns && spin(conn, want, space, signals)) {
		spin_adapt(&conn->spin_ns, 0);
		return 0;
	}
	rpc_listen();
	int64_t deadline = clock->deadline;
	if (tx_is(slot, TX_RESEND) && deadline - RESEND_EVERY_NS > now_ns())
		deadline = now_ns() + RESEND_EVERY_NS;
	if (unlikely(atomic_load_explicit(&trim_due, memory_order_relaxed))) {
		int64_t now = now_ns();
		conns_trim(now);
		deadline = trim_deadline(deadline, now);
	}
	/* through a provider it may be a link that stands still for a while; and who has gone back stays there: see trim() */
	uint64_t stuck = want == WAIT_TX && !conn_relayed(conn) ? conn_stuck(conn) : 0;
	int64_t stuck_at = 0;
	if (unlikely(stuck) && deadline > (stuck_at = now_ns() + STUCK_AFTER_NS))
		deadline = stuck_at;
	if (want == WAIT_TX)
		atomic_fetch_add(&conn->channel.tx_line->want_space, 1);
	bell_sleep_begin(bell); /* full fence */
	if (unlikely(!conn_switched(conn)) && conn_progress(conn, fd)) /* the peer may have consented since, unheard */
		set_conn_switched(conn);
	pthread_cleanup_push(sleep_cancelled, conn);
	if (!ready_now(conn, want, space) && conn_stays(conn, &fd)) {
		int error;
		bool native = want == WAIT_RX ? sleep_receiving(conn, fd, deadline, signals, &error)
		                              : sleep_sending(conn, fd, deadline, signals, &error);
		word_add(*(want == WAIT_RX ? &slot->sleeps : &slot->tx_sleeps), 1);
		if (((native && on_ring) || conn_relayed(conn)) && conn_stays(conn, &fd))
			conn_probe(conn, fd);
		if (error && error != EINTR)
			result = -error;
		else if (self.signals_interrupting != clock->signals_interrupting ||
		         (timed && self.signals != clock->signals))
			result = -EINTR; /* signal(7): with a timeout set, SA_RESTART does not restart */
		else if (clock->deadline != INT64_MAX && now_ns() >= clock->deadline && !ready_now(conn, want, space))
			result = -ETIMEDOUT;
	}
	pthread_cleanup_pop(0);
	bell_sleep_end(bell);
	if (config.spin_ns)
		spin_adapt(&conn->spin_ns, now_ns() - start);
	if (want == WAIT_TX)
		atomic_fetch_sub(&conn->channel.tx_line->want_space, 1);
	if (unlikely(stuck) && result == 0 && now_ns() >= stuck_at && conn_stays(conn, &fd) && conn_unstick(conn, fd, stuck))
		set_conn_switched(conn);
	return result;
}
