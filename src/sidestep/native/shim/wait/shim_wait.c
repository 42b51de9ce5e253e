/* shim_wait.c - how a blocking call waits: it spins, then sleeps until a doorbell rings or the socket has something. */
#include "shim_switch.h"
#include "shim_wait.h"

#include <linux/futex.h>

#define RESEND_EVERY_NS 1000000 /* recalled bytes are tried again this often while a call waits */
#define NO_DOORBELL_POLL_NS 1000000 /* interval of short naps, without descriptors for a doorbell */
#define LINGER_NS 5000 /* cost of a goroutine's way from EAGAIN through the poller and back */
#define LINGER_ALONE 16 /* answers of EAGAIN to one connection and no other, before it is looked at longer */
#define LINGER_PAUSE_MAX 1024 /* answers without such a look after one in vain, at most */

/* ---- the clock of one call ---- */
void wait_clock_start(struct wait_clock *clock)
{
	clock->began = now_ns();
	clock->deadline = INT64_MAX;
	clock->signals = self.signals;
	clock->signals_interrupting = self.signals_interrupting;
	clock->timed = clock->brief = clock->moved = false;
}

/* True if a signal ends the wait. SA_RESTART restarts no call with a timeout (signal(7)), and none that has moved bytes. */
static bool interrupted(const struct wait_clock *clock)
{
	return self.signals_interrupting != clock->signals_interrupting ||
	       ((clock->timed || clock->moved) && self.signals != clock->signals);
}

static bool ready_now(const struct conn *conn, int want, size_t space)
{
	const struct conn_slot *slot = conn->slot;

	if (unlikely(conn_tcp_requested(conn) || (conn_notice(conn) && conn_recalled_since(conn))))
		return true;
	if (conn_relay_news(conn))
		return true;
	if (want == WAIT_TX && tx_is(slot, TX_RESEND))
		return slot_has(slot, SLOT_FIN_OWED);
	if (want == WAIT_TX)
		return conn_room(conn) >= space || !tx_by_ring(slot) || (conn_notice(conn) & CHANNEL_CLOSED) ||
		       slot_has(slot, SLOT_PEER_GONE | SLOT_RESET | SLOT_WR_SHUT);
	if (!rx_by_ring(slot))
		/* bytes of TCP before the offset are still on their way, and wake by themselves */
		return rx_watches(slot) && conn_tcp_read(conn);
	return channel_rx_peek(&conn->channel) >= space || (conn_peer_back(conn) && !rx_spaced(conn)) ||
	       slot_has(slot, SLOT_FIN | SLOT_RESET | SLOT_RD_SHUT);
}

/*
 * A thread that gets EAGAIN may have other work, or none. Without any it comes back by a set. If a scheduler stands between,
 * as Go's, that takes longer than an answer from another CPU. The shim cannot know which; but with other work, other
 * connections get EAGAIN as well. Else a look of some microseconds is tried now and then, and goes on as long as it pays.
 */
bool conn_lingers(struct conn *conn)
{
	static _Atomic uint64_t
		repeats; /* serial of the connection that got it last, and how often, in steps of their number */
	const uint64_t first = word_load(conn->serial) * (LINGER_ALONE + 1), times = word_load(repeats) - first;
	const uint32_t skips = word_load(conn->linger_skips), pause = word_load(conn->linger_pause);
	const uint64_t signals = self.signals;
	struct spin spin;
	bool won = false;

	if (times != LINGER_ALONE) {
		word_store(repeats, times < LINGER_ALONE ? first + times + 1 : first);
		return false;
	}
	if (skips) {
		word_store(conn->linger_skips, skips - 1);
		return false;
	}
	if (!config.spin_ns || !spin_begin(&spin, LINGER_NS, word_load(conn->channel.rx_peer_line->cpu)) || spin.shares) {
		word_store(repeats, first);
		return false;
	}
	do {
		for (int i = 0; i < 8 && !won; i++) {
			cpu_relax();
			won = ready_now(conn, WAIT_RX, 1);
		}
	} while (!won && self.signals == signals && now_ns() < spin.end);
	word_add(*(won ? &conn->slot->spins_won : &conn->slot->spins_lost), 1);
	const uint32_t next = won ? pause / 2 : 2 * pause + 1;
	word_store(conn->linger_pause, next < LINGER_PAUSE_MAX ? next : LINGER_PAUSE_MAX);
	word_store(conn->linger_skips, won ? 0 : next);
	return won;
}

/* ---- what a thread sleeps on ---- */
int self_doorbell_fd(struct doorbell *const *doorbells, int doorbells_len)
{
	if (self.doorbell_epfd <= 0) {
		self.doorbell_epfd = own_fd(real.epoll_create1(EPOLL_CLOEXEC));
		self.doorbells_len = 0;
		self.doorbell_watched = 0;
		thread_register();
		if (self.doorbell_epfd < 0)
			return -1;
	}
	rpc_watch(self.doorbell_epfd, &self.doorbell_watched, 0);
	for (int i = 0; i < doorbells_len; i++) {
		uint32_t at = 0;
		while (at < self.doorbells_len && self.doorbells[at] != doorbells[i]->serial)
			at++;
		if (at < self.doorbells_len)
			continue;
		if (self.doorbells_len == sizeof(self.doorbells) / sizeof(*self.doorbells)) {
			/* too many to remember: start over with those of this wait */
			if (doorbells_len > (int)self.doorbells_len)
				return -1;
			own_fd_close(self.doorbell_epfd);
			self.doorbell_epfd = 0;
			return self_doorbell_fd(doorbells, doorbells_len);
		}
		struct epoll_event event = {.events = DOORBELL_EDGES};
		if (real.epoll_ctl(self.doorbell_epfd, EPOLL_CTL_ADD, doorbells[i]->wait_fd, &event) < 0 && errno != EEXIST)
			return -1;
		self.doorbells[self.doorbells_len++] = doorbells[i]->serial;
	}
	return self.doorbell_epfd;
}

void self_liveness_watch(const struct conn *conn)
{
	if (!conn_liveness_watch(conn, self.doorbell_epfd, 0))
		shim_log("the end of a provider will be heard late: %d", errno);
}

void self_doorbells_clear(void)
{
	struct epoll_event events[32];

	raw_epoll_look(self.doorbell_epfd, events, 32);
}

/* ---- sleeping ---- */
/*
 * ppoll that no signal can slip past. A handler zeroes self.sleep, so if it runs after the last look and before the kernel
 * reads the timeout, the call returns at once. libc's wrapper would copy the timeout first, hence syscall(). Asynchronous
 * cancellation around it makes it the cancellation point that recv and send are.
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
	static _Atomic bool old_kernel; /* true before 5.11, which has no epoll_pwait2 */
	int cancel, n = -1;

	sleep_time(deadline, signals);
	pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, &cancel);
	if (!word_load(old_kernel)) {
		n = (int)real.syscall(SYS_epoll_pwait2, epfd, (long)events, max, (long)&self.sleep, 0, 0);
		if (n < 0 && errno == ENOSYS)
			atomic_store(&old_kernel, true);
	}
	if (word_load(old_kernel)) {
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

/* Sleeps on a futex; see wakes_by_futex(). errno's value, or 0. */
static int sleep_alone(_Atomic uint32_t *futex, int64_t deadline, uint64_t signals)
{
	int cancel;

	sleep_time(deadline, signals);
	pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, &cancel);
	long result = real.syscall(SYS_futex, (long)futex, FUTEX_WAIT, ASLEEP_FUTEX, (long)&self.sleep, 0, 0);
	pthread_setcanceltype(cancel, &cancel);
	return result < 0 && errno == EINTR ? EINTR : 0;
}

/* True if the number of an entry is still its socket's. It may be that of another, which has an entry of its own. */
static bool still_watched(uint32_t at)
{
	struct conn *conn = self.watched[at].serial ? conn_get(self.watched[at].fd) : NULL;

	return conn && word_load(conn->serial) == self.watched[at].serial;
}

/* Puts the socket and the doorbell into the set a blocking receive sleeps on; the index of the socket there, or -1. */
static int wait_set(struct conn *conn, int fd)
{
	uint32_t at = 0;

	if (self.wait_epfd <= 0) {
		self.wait_epfd = own_fd(real.epoll_create1(EPOLL_CLOEXEC));
		self.wait_doorbells_len = 0;
		self.wait_watched = 0;
		memset(self.watched, 0, sizeof(self.watched));
		thread_register();
		if (self.wait_epfd < 0)
			return -1;
	}
	rpc_watch(self.wait_epfd, &self.wait_watched, UINT32_MAX);
	while (at < self.wait_doorbells_len && self.wait_doorbells[at] != conn->doorbell->serial)
		at++;
	if (at == self.wait_doorbells_len) {
		struct epoll_event event = {.events = DOORBELL_EDGES, .data.u32 = UINT32_MAX};
		if (at == sizeof(self.wait_doorbells) / sizeof(*self.wait_doorbells) ||
		    (real.epoll_ctl(self.wait_epfd, EPOLL_CTL_ADD, conn->doorbell->wait_fd, &event) < 0 && errno != EEXIST)) {
			own_fd_close(self.wait_epfd); /* start over with the next wait */
			self.wait_epfd = 0;
			return -1;
		}
		self.wait_doorbells[self.wait_doorbells_len++] = conn->doorbell->serial;
	}
	if (!conn_liveness_watch(conn, self.wait_epfd, UINT32_MAX))
		return -1;
	/*
	 * Only edges are wanted if a provider stands between. TCP's bytes (an end, or data sent after it went back to TCP) may
	 * have to stay there for a while. Once they can be read they are to wake a thread all the same, though their edge was
	 * taken. By now the provider may have sent the awaited word, and another process may have received that.
	 */
	bool edges = conn_relayed(conn) && (rx_by_ring(conn->slot) || conn_fin_waits(conn, fd));
	for (at = 0; at < 4 && !(self.watched[at].serial == conn->serial && self.watched[at].fd == fd); at++)
		;
	if (at < 4 && self.watched[at].edges == edges)
		return (int)at;
	if (at == 4) {
		at = self.watched_next++ % 4;
		if (still_watched(at))
			real.epoll_ctl(self.wait_epfd, EPOLL_CTL_DEL, self.watched[at].fd, NULL);
	}
	struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP | (edges ? EPOLLET : 0), .data.u32 = at};
	self.watched[at].serial = 0;
	if (real.epoll_ctl(self.wait_epfd, EPOLL_CTL_ADD, fd, &event) < 0 &&
	    (errno != EEXIST || real.epoll_ctl(self.wait_epfd, EPOLL_CTL_MOD, fd, &event) < 0))
		return -1;
	self.watched[at].serial = conn->serial;
	self.watched[at].fd = fd;
	self.watched[at].edges = edges;
	return (int)at;
}

/* Sleeps until the doorbell rings or the socket has something. >0: the socket has. */
int sleep_receiving(struct conn *conn, int fd, int64_t deadline, uint64_t signals, int *error)
{
	struct epoll_event events[8];
	/* below the low-water mark the kernel tells no set of bytes, and a call may want fewer, or the last few of many */
	bool unreported = word_load(conn->slot->rx_low_water) > 1 && !rx_by_ring(conn->slot);
	int at = unreported ? -1 : wait_set(conn, fd), tcp = 0;

	if (at < 0) {
		/* an end that is withheld stays true, and would keep us awake */
		struct pollfd pollfd = {.fd = conn_end_withheld(conn) ? -1 : fd, .events = POLLIN | POLLRDHUP};
		int64_t nap = now_ns() + NO_DOORBELL_POLL_NS;
		int n = sleep_poll(&pollfd, 1, deadline < nap ? deadline : nap, signals, NULL);
		*error = n < 0 ? errno : 0;
		return n > 0;
	}
	int n = sleep_epoll(self.wait_epfd, events, 8, deadline, signals);
	*error = n < 0 ? errno : 0;
	for (int i = 0; i < n; i++) {
		uint32_t which = events[i].data.u32;
		if (which == (uint32_t)at) {
			tcp = 1;
		} else if (which < 4) {
			/* a socket this thread waited on before: not of interest now */
			if (self.wait_epfd > 0 && (!still_watched(which) || real.epoll_ctl(self.wait_epfd, EPOLL_CTL_DEL,
			                                                                   self.watched[which].fd, NULL) < 0)) {
				own_fd_close(self.wait_epfd); /* an entry that cannot be named any more would wake us for ever */
				self.wait_epfd = 0;
			}
			self.watched[which].serial = 0;
		}
	}
	return tcp;
}

static int sleep_sending(struct conn *conn, int fd, int64_t deadline, uint64_t signals, int *error)
{
	struct pollfd fds[3] = {{.fd = fd}, {.events = POLLIN}, {.fd = -1}};

	/* News by TCP concerns this wait as well: one call reports socket and doorbell. An end that stays true would keep it awake. */
	if (rx_by_ring(conn->slot) && !conn_relayed(conn) && !conn_peer_back(conn) &&
	    !slot_has(conn->slot, SLOT_FIN | SLOT_RD_SHUT | SLOT_TCP_FIN | SLOT_RESET | SLOT_PEER_GONE))
		return sleep_receiving(conn, fd, deadline, signals, error);
	if (conn_relayed(conn)) {
		fds[2].fd = conn->remote_doorbell->liveness_fd;
		if (slot_has(conn->slot, SLOT_TCP_RESET))
			fds[0].fd = -1;
	}
	if (!slot_has(conn->slot, SLOT_FIN | SLOT_RD_SHUT | SLOT_TCP_FIN))
		fds[0].events = POLLRDHUP;
	fds[1].fd = self_doorbell_fd(&conn->doorbell, 1);
	if (fds[1].fd < 0 && deadline - NO_DOORBELL_POLL_NS > now_ns())
		deadline = now_ns() + NO_DOORBELL_POLL_NS;
	int n = sleep_poll(fds, 3, deadline, signals, NULL);
	*error = n < 0 ? errno : 0;
	if (n > 0 && fds[1].revents)
		self_doorbells_clear();
	return n > 0 && fds[0].revents;
}

/* ---- one call's wait ---- */
struct conn_wait {
	struct wait base;
	struct conn *conn;
	int fd, want;
	size_t space;
	const struct wait_clock *clock;
	int error; /* errno of its sleep */
	bool on_ring, by_futex;
};

static int conn_spin_look(void *of)
{
	const struct conn_wait *wait = of;
	bool won = ready_now(wait->conn, wait->want, wait->space);

	for (int i = 0; i < 32 && !won && !wait->base.shares; i++) {
		cpu_relax();
		won = ready_now(wait->conn, wait->want, wait->space);
	}
	return won;
}

static bool conn_begin(void *of)
{
	struct conn_wait *wait = of;
	struct conn *conn = wait->conn;

	if (!wait->clock->brief && unlikely(conn_fd_stale(conn, wait->fd)))
		return false;
	if (wait->want == WAIT_TX && conn_make_room(conn, false))
		return false;
	if (unlikely(tx_is(conn->slot, TX_RESEND)) && wait->base.deadline - RESEND_EVERY_NS > wait->base.now)
		wait->base.deadline = wait->base.now + RESEND_EVERY_NS;
	spin_stack(conn, wait->want, wait->base.now);
	return true;
}

/*
 * A futex costs less than an eventfd in an epoll set, at both ends. But it hears nothing of TCP, nor of the provider. So a read
 * sleeps on it only where the wait is brief, and ends soon by itself: see call_blocks(). Another thread that does so already
 * keeps the futex for itself.
 */
static bool wakes_by_futex(const struct conn_wait *wait)
{
	const struct conn *conn = wait->conn;

	return wait->clock->brief && wait->want == WAIT_RX && rx_by_ring(conn->slot) && !conn_relayed(conn) &&
	       !conn_peer_back(conn) &&
	       !slot_has(conn->slot, SLOT_FIN | SLOT_RD_SHUT | SLOT_TCP_FIN | SLOT_RESET | SLOT_PEER_GONE);
}

static int conn_arm(void *of)
{
	struct conn_wait *wait = of;
	struct conn *conn = wait->conn;

	if (wait->want == WAIT_TX)
		atomic_fetch_add(&conn->channel.tx_line->want_space, 1);
	_Atomic uint32_t *futex = &conn->channel.rx_line->asleep;
	uint32_t state = ASLEEP_NOT;
	wait->by_futex = wakes_by_futex(wait) && atomic_compare_exchange_strong(futex, &state, ASLEEP_FUTEX);
	wait_arm(&wait->base, 0, 1); /* full fence */
	conn_advance(conn, wait->fd); /* the peer may have consented since, unheard */
	wait->base.loose = conn_is_loose(conn);
	return ready_now(conn, wait->want, wait->space) || !conn_stays(conn, &wait->fd);
}

static int conn_sleep(void *of, int64_t until)
{
	struct conn_wait *wait = of;
	struct conn *conn = wait->conn;

	if (wait->by_futex) {
		wait->error = sleep_alone(&conn->channel.rx_line->asleep, until, wait->base.signals);
		return false;
	}
	return (wait->want == WAIT_RX ? sleep_receiving : sleep_sending)(conn, wait->fd, until, wait->base.signals,
	                                                                 &wait->error);
}

static void conn_disarm(void *of)
{
	struct conn_wait *wait = of;

	if (wait->by_futex)
		atomic_store(&wait->conn->channel.rx_line->asleep, ASLEEP_NOT);
	doorbell_word_wake(wait->base.doorbells[0]->word);
	if (wait->want == WAIT_TX)
		atomic_fetch_sub(&wait->conn->channel.tx_line->want_space, 1);
}

static void conn_cancelled(void *of)
{
	struct conn_wait *wait = of;

	conn_disarm(wait);
	atomic_fetch_sub(&wait->conn->waiters, 1);
}

static int conn_woken(void *of, int tcp)
{
	struct conn_wait *wait = of;
	const struct wait_clock *clock = wait->clock;
	struct conn *conn = wait->conn;

	word_add(*(wait->want == WAIT_RX ? &conn->slot->sleeps : &conn->slot->tx_sleeps), 1);
	if (((tcp && wait->on_ring) || conn_relayed(conn)) && conn_stays(conn, &wait->fd))
		conn_probe(conn, wait->fd);
	calls_count(conn->slot);
	if (wait->error && wait->error != EINTR)
		return -wait->error;
	if (interrupted(clock))
		return ready_now(conn, wait->want, wait->space) ? 0 : -EINTR;
	bool over = clock->deadline != INT64_MAX && wait->base.now >= clock->deadline;
	return over && !ready_now(conn, wait->want, wait->space) ? -ETIMEDOUT : 0;
}

static const struct wait_kind conn_kind = {conn_spin_look, conn_begin,     conn_arm,  conn_sleep,
                                           conn_disarm,    conn_cancelled, conn_woken};

static bool conn_spin(struct conn_wait *wait)
{
	struct conn *conn = wait->conn;
	bool may_move = conn->channel.local == &conn->channel.seg->side[0];

	if (wait->want == WAIT_RX)
		conn_reads_here(conn);
	bool won = wait_spin(&wait->base, &conn_kind, conn_peer_cpu(conn, wait->want), may_move) != 0;
	if (wait->base.spun)
		word_add(*(won ? &conn->slot->spins_won : &conn->slot->spins_lost), 1);
	return won;
}

int conn_wait(struct conn *conn, int fd, int want, size_t space, const struct wait_clock *clock)
{
	const uint64_t signals =
		self.signals; /* a handler that runs from here on ends the sleep; before, it is judged below */
	struct conn_wait wait;

	if (ready_now(conn, want, space)) {
		if (conn_relay_news(conn)) /* a peer that sends again by TCP has not looked */
			conn_probe(conn, fd);
		return 0;
	}
	if (interrupted(clock))
		return -EINTR;
	wait_start(&wait.base, clock->deadline, signals, &conn->budget);
	wait.base.doorbells[0] = conn->doorbell;
	wait.conn = conn;
	wait.fd = fd;
	wait.want = want;
	wait.space = space;
	wait.clock = clock;
	wait.on_ring = want == WAIT_TX || rx_by_ring(conn->slot);
	if (wait.on_ring && config.spin_ns && conn_spin(&wait)) {
		calls_count(conn->slot);
		return 0;
	}
	int n = wait_sleep(&wait.base, &conn_kind);
	return n < 0 ? n : 0;
}
