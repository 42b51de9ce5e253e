/* shim_poll.c - poll, ppoll, select, pselect with promoted members. */
#include "shim_set.h"
#include "shim_tcp_wait.h"

#define SMALL 64 /* descriptors a call handles without allocating */

extern void __chk_fail(void) __attribute__((noreturn));

struct poller {
	struct pollfd *fds;
	nfds_t len;
	struct pollfd *kernel; /* the same with what the kernel is to watch, and one more entry for the doorbells */
	struct conn **conns;   /* NULL: the kernel's alone */
	struct set **sets;
	bool others; /* the kernel has some of them, or a direction: it is asked every time */
};

/* The number may have been closed and reused meanwhile; the kernel's poll keeps the socket it began with. */
static int poller_fd(const struct poller *poller, nfds_t i)
{
	struct conn *conn = poller->conns[i];
	int fd = poller->fds[i].fd;

	return !conn || likely(conn_get(fd) == conn) ? fd : conn_fd(conn);
}

/* The number is another file's, which the kernel alone knows. */
static uint32_t other_revents(struct poller *poller, nfds_t i)
{
	poller->kernel[i] = poller->fds[i];
	conn_unref(poller->conns[i]);
	poller->conns[i] = NULL;
	poller->others = true;
	return raw_poll(&poller->kernel[i], 1, 0) > 0 ? (unsigned short)poller->kernel[i].revents : 0;
}

/* `ready_kernel`: poller->kernel holds what the kernel was asked for, or will be. */
static uint32_t conn_revents(struct poller *poller, nfds_t i, uint32_t kernel_bits, bool ready_kernel)
{
	struct conn *conn = poller->conns[i];
	int fd = poller_fd(poller, i);

	conn_advance(conn, fd);
	bool on_ring = tx_by_ring(conn->slot);
	uint32_t ready = conn_ready(conn, fd, kernel_bits, (unsigned short)poller->fds[i].events);
	if (unlikely(kernel_bits & POLLNVAL))
		conn_fd_stale(conn, fd);
	if (conn_drop_stale(conn, fd))
		return other_revents(poller, i);
	if (unlikely(on_ring && !tx_by_ring(conn->slot))) {
		/* the kernel reports room from now on: to this call, which may be about to sleep, and to sets */
		poller->kernel[i].events |= poller->fds[i].events & (POLLOUT | POLLWRNORM | POLLWRBAND);
		set_conn_switched(conn);
	}
	/*
	 * room of a direction that went back to TCP after the kernel had been asked, maybe for another entry of the same
	 * descriptor
	 */
	uint32_t room = (unsigned short)poller->fds[i].events & (POLLOUT | POLLWRNORM | POLLWRBAND);
	if (unlikely(room && ready_kernel && !on_ring && !((unsigned short)poller->kernel[i].events & room)) &&
	    !tx_is(conn->slot, TX_RESEND)) {
		struct pollfd tcp = {.fd = fd, .events = (short)room};
		poller->kernel[i].events |= (short)room; /* it may sleep next */
		if (raw_poll(&tcp, 1, 0) > 0)
			ready |= (unsigned short)tcp.revents & room;
	}
	/* EPOLL* and POLL* are the same bits on Linux */
	return ready & ((uint32_t)(unsigned short)poller->fds[i].events | POLLERR | POLLHUP);
}

/* Events that the kernel is to watch. */
static void poller_ask(struct poller *poller)
{
	for (nfds_t i = 0; i < poller->len; i++) {
		poller->kernel[i] = (struct pollfd){.fd = poller_fd(poller, i), .events = poller->fds[i].events};
		struct conn *conn = poller->conns[i];
		if (!conn)
			continue;
		const bool withheld = conn_end_withheld(conn);
		uint32_t events = conn_watched(conn, poller->kernel[i].fd, (unsigned short)poller->fds[i].events, withheld);
		poller->kernel[i].events = (short)events;
		if (withheld && !(events & (POLLIN | POLLRDNORM | POLLOUT | POLLWRNORM)) &&
		    slot_has(conn->slot, SLOT_WR_SHUT | SLOT_TCP_RESET))
			poller->kernel[i].fd = -1; /* HUP cannot be declined, and no reset can follow it */
	}
}

enum look { LOOK_RINGS, LOOK_ASKED, LOOK_REPORTED }; /* the kernel: does not count, will be asked, has answered */

/* Fills revents; the number of descriptors that have some. */
static int poller_report(struct poller *poller, enum look look)
{
	int ready = 0;

	for (nfds_t i = 0; i < poller->len; i++) {
		uint32_t bits = look == LOOK_REPORTED ? (unsigned short)poller->kernel[i].revents : 0;
		if (poller->conns[i])
			bits = conn_revents(poller, i, bits, look != LOOK_RINGS);
		else if (poller->sets[i] && !(bits & POLLIN) && (poller->fds[i].events & POLLIN) &&
		         set_has_ready(poller->sets[i]))
			bits |= POLLIN;
		poller->fds[i].revents = (short)bits;
		ready += bits != 0;
	}
	return ready;
}

/* The first connection that ended a wait gets the statistics of it. */
static void count_wait(struct poller *poller, bool won, bool lost, bool slept)
{
	for (nfds_t i = 0; i < poller->len; i++) {
		if (!poller->conns[i] || !poller->fds[i].revents)
			continue;
		struct conn_slot *slot = poller->conns[i]->slot;
		word_add(slot->spins_won, won);
		word_add(slot->spins_lost, lost);
		word_add(slot->sleeps, slept);
		calls_count(slot);
		return;
	}
}

struct poll_wait {
	struct wait base;
	struct poller *poller;
};

static __thread struct spin_budget budget = {.ns = UINT32_MAX};
static __thread int64_t looked_at; /* the kernel was */

/* Checks if providers between are still alive: a thread that never sleeps would not notice their death. */
static void liveness_check(struct poller *poller)
{
	const struct remote_doorbell *last = NULL;

	for (nfds_t i = 0; i < poller->len; i++)
		if (poller->conns[i])
			conn_liveness_check(poller->conns[i], &last);
}

/* Sets in sets are looked at before the kernel is asked of them. */
static void sets_look(struct poller *poller)
{
	for (nfds_t i = 0; i < poller->len; i++)
		if (poller->sets[i] && poller->sets[i]->nest)
			nest_look(poller->sets[i]);
}

/* Looks at the rings, and with `kernel` asks the kernel, too. How many descriptors are ready, or -1. */
static int poll_look(struct poll_wait *wait, bool kernel)
{
	struct poller *poller = wait->poller;

	if (!kernel)
		return poller_report(poller, LOOK_RINGS);
	looked_at = wait->base.now;
	self.calls += wait->base.looks++ != 0;
	liveness_check(poller);
	sets_look(poller);
	poller_ask(poller);
	return raw_poll(poller->kernel, poller->len, 0) < 0 ? -1 : poller_report(poller, LOOK_REPORTED);
}

static bool look_is_due(const struct poll_wait *wait)
{
	return wait->base.now - looked_at > LOOK_EVERY_NS;
}

static int poll_spin_look(void *of)
{
	struct poll_wait *wait = of;

	return poll_look(wait, look_is_due(wait));
}

static bool poll_begin(void *of)
{
	const struct poll_wait *wait = of;
	const struct poller *poller = wait->poller;

	if (poller->len == 1 && poller->conns[0])
		spin_stack(poller->conns[0], WAIT_RX, wait->base.now);
	return true;
}

static int poll_arm(void *of)
{
	struct poll_wait *wait = of;
	struct poller *poller = wait->poller;
	struct doorbell **doorbells = wait->base.doorbells;
	uint32_t n = 0;

	wait->base.loose = 0;
	for (nfds_t i = 0; i < poller->len && n <= WAIT_DOORBELLS_MAX; i++) {
		if (poller->conns[i]) {
			wait->base.loose += conn_is_loose(poller->conns[i]);
			n = doorbell_add(doorbells, n, WAIT_DOORBELLS_MAX, poller->conns[i]->doorbell);
		} else if (poller->sets[i]) {
			wait->base.aware = true;
			n = nest_doorbells(poller->sets[i], doorbells, n, WAIT_DOORBELLS_MAX);
		}
	}
	atomic_fetch_add(&nest_sleepers, wait->base.aware);
	wait_arm(&wait->base, 0, n);
	sets_look(poller);
	poller_ask(poller);
	return poller_report(poller, LOOK_ASKED);
}

static void poll_disarm(void *of)
{
	struct poll_wait *wait = of;

	doorbells_wake(wait->base.doorbells, wait->base.len);
	atomic_fetch_sub(&nest_sleepers, wait->base.aware);
}

/* Waiting for one connection to be read, by ring: the set of a blocking receive reports socket and doorbell in one call. */
static bool sleeps_as_receive(const struct poller *poller)
{
	const struct conn *conn = poller->len == 1 ? poller->conns[0] : NULL;

	return conn && !conn_relayed(conn) && rx_by_ring(conn->slot) && poller->kernel[0].fd >= 0 &&
	       (poller->kernel[0].events & POLLIN) && !(poller->kernel[0].events & ~(POLLIN | POLLRDNORM | POLLRDHUP));
}

/* Returns as the kernel's poll does, but a doorbell alone may have woken us. */
static int poll_sleep(void *of, int64_t until)
{
	struct poll_wait *wait = of;
	struct poller *poller = wait->poller;

	self.calls += wait->base.looks++ != 0;
	if (sleeps_as_receive(poller)) {
		int error = 0;
		bool tcp = sleep_receiving(poller->conns[0], poller->kernel[0].fd, until, wait->base.signals, &error);
		poller->kernel[0].revents = 0;
		if (tcp)
			raw_poll(poller->kernel, 1, 0);
		errno = error;
		if (error == EINTR && self.signals == wait->base.signals)
			return 0; /* stopped and continued: poll(2) goes on then, epoll_wait(2) does not */
		return error ? -1 : 1;
	}
	int doorbell_fd = self_doorbell_fd(wait->base.doorbells, (int)wait->base.len);
	for (nfds_t i = 0; i < poller->len && doorbell_fd >= 0; i++)
		if (poller->conns[i])
			self_liveness_watch(poller->conns[i]);
	poller->kernel[poller->len] = (struct pollfd){.fd = doorbell_fd, .events = POLLIN};
	if ((doorbell_fd < 0 || wait->base.truncated) && until - wait->base.now > NAP_NS)
		until = wait->base.now + NAP_NS; /* no descriptor for the doorbells, or too many of them */
	int k = sleep_poll(poller->kernel, poller->len + 1, until, wait->base.signals, NULL);
	int failed = errno;
	if (k > 0 && poller->kernel[poller->len].revents) {
		self_doorbells_clear();
		liveness_check(poller);
	}
	errno = failed;
	return k;
}

/* Number of descriptors that are ready. 0: look again; -1: as the kernel's poll, with errno. */
static int poll_woken(void *of, int k)
{
	struct poll_wait *wait = of;
	int n = 0;

	if (k < 0 && errno != EINTR)
		return -1;
	looked_at = wait->base.now;
	if (k > 0)
		n = poller_report(wait->poller, LOOK_REPORTED);
	if (!n && (k < 0 || self.signals != wait->base.signals)) {
		n = poll_look(wait, true);
		errno = EINTR;
		return n ? n : -1;
	}
	return n;
}

static const struct wait_kind poll_kind = {poll_spin_look, poll_begin,  poll_arm,  poll_sleep,
                                           poll_disarm,    poll_disarm, poll_woken};

/* Number of descriptors that are ready; 0: it is time to sleep. */
static int poll_spin(struct poll_wait *wait)
{
	struct poller *poller = wait->poller;
	uint32_t peer_cpu = 0;
	bool may_move = false;

	for (nfds_t i = 0; i < poller->len && !peer_cpu; i++)
		if (poller->conns[i]) {
			peer_cpu = word_load(poller->conns[i]->channel.rx_peer_line->cpu);
			may_move = poller->conns[i]->channel.local == &poller->conns[i]->channel.seg->side[0];
		}
	if (budget.ns > config.spin_ns)
		budget.ns = config.spin_ns;
	int n = wait_spin(&wait->base, &poll_kind, peer_cpu, may_move);
	if (n)
		count_wait(poller, true, false, false);
	return n;
}

static int poll_managed(struct poller *poller, int64_t timeout_ns, uint64_t signals)
{
	struct poll_wait wait;

	wait_start(&wait.base, deadline_after(timeout_ns), signals, &budget);
	wait.poller = poller;
	pthread_testcancel();
	if (word_load(rpc_pending))
		rpc_poll();
	/* rings first: an answer that is there costs no call at all */
	int n = poll_look(&wait, poller->others);
	if (!poller->others && (n ? look_is_due(&wait) : timeout_ns == 0))
		n = poll_look(&wait, true);
	if (!n && timeout_ns == 0)
		rpc_listen_passing();
	if (n || timeout_ns == 0 || (n = poll_spin(&wait)))
		return n;
	while (self.signals == signals) {
		if (wait.base.now >=
		    wait.base.deadline) /* the time is over: another thread's turn on this CPU can outlast a short timeout */
			return poll_look(&wait, true);
		n = wait_sleep(&wait.base, &poll_kind);
		if (n > 0 && wait.base.asked)
			count_wait(poller, false, wait.base.spun, true);
		if (n)
			return n;
	}
	return fail_with(EINTR);
}

/* Number of descriptors that need us. *tcp: there are connections that may still be promoted. */
static uint32_t classify(struct pollfd *fds, nfds_t len, bool *tcp)
{
	uint32_t managed = 0;

	*tcp = false;
	for (nfds_t i = 0; i < len; i++) {
		struct file *file = file_get(fds[i].fd);
		if (likely(!file))
			continue;
		if (file->kind == FILE_CONN) {
			word_store(((struct conn *)file)->waited, true);
			if (((struct conn *)file)->managed)
				managed++;
			else if (!slot_has(((struct conn *)file)->slot, SLOT_PIN))
				*tcp = true;
		} else if (file->kind == FILE_SET && set_is_managed(file)) {
			managed++;
		}
	}
	return managed;
}

/* Like ppoll(2), if the kernel alone knows the end of the wait. */
static int kernel_poll(struct pollfd *fds, nfds_t len, const struct timespec *timeout, const sigset_t *mask,
                       uint64_t signals)
{
	struct pollfd small[SMALL + 1], *watched = small;

	if (likely(!word_load(rings_ever)))
		return real.ppoll(fds, len, timeout, mask);
	if (timeout && !timeout->tv_sec && !timeout->tv_nsec) {
		rpc_listen_passing();
		return real.ppoll(fds, len, timeout, mask);
	}
	if (len > SMALL && !(watched = malloc((len + 1) * sizeof(*watched))))
		return real.ppoll(fds, len, timeout, mask);
	for (nfds_t i = 0; i < len; i++)
		watched[i] = fds[i];
	int result = tcp_wait_poll(watched, len, deadline_after(timeout ? timespec_ns(timeout) : -1), signals, mask);
	const int saved = errno;
	for (nfds_t i = 0; i < len && result >= 0; i++)
		fds[i].revents = watched[i].revents;
	if (watched != small)
		free(watched);
	errno = saved;
	return result;
}

static int kernel_poll_counted(struct pollfd *fds, nfds_t len, const struct timespec *timeout, const sigset_t *mask,
                               uint64_t signals, bool *retry)
{
	struct conn *small[SMALL], **waiting = small;
	nfds_t n = 0;
	int result = -1;

	*retry = false;
	if (len > SMALL && !(waiting = malloc(len * sizeof(*waiting))))
		return real.ppoll(fds, len, timeout, mask);
	for (nfds_t i = 0; i < len; i++) {
		struct conn *conn = conn_hold(fds[i].fd);
		if (!conn)
			continue;
		atomic_fetch_add(&conn->slot->rx_kernel_waiters, 1);
		waiting[n++] = conn;
		*retry |= atomic_load(&conn->managed) != 0;
	}
	if (!*retry)
		result = kernel_poll(fds, len, timeout, mask, signals);
	int saved = errno;
	for (nfds_t i = 0; i < n; i++) {
		atomic_fetch_sub(&waiting[i]->slot->rx_kernel_waiters, 1);
		conn_unref(waiting[i]);
	}
	if (waiting != small)
		free(waiting);
	errno = saved;
	return result;
}

static int poll_common(struct pollfd *fds, nfds_t len, const struct timespec *timeout, const sigset_t *mask)
{
	bool tcp, retry;
	uint64_t signals = self.signals; /* count from before the mask lets any in */

	if (timeout && (timeout->tv_sec < 0 || timeout->tv_nsec < 0 || timeout->tv_nsec >= 1000000000))
		return real.ppoll(fds, len, timeout, mask);
	if (unlikely(word_load(rpc_pending)))
		rpc_poll();
	if (likely(!classify(fds, len, &tcp))) {
		if (!tcp || (timeout && !timeout->tv_sec && !timeout->tv_nsec))
			return kernel_poll(fds, len, timeout, mask, signals);
		int result = kernel_poll_counted(fds, len, timeout, mask, signals, &retry);
		if (!retry)
			return result;
	}
	struct pollfd small_kernel[SMALL + 1];
	struct conn *small_conns[SMALL];
	struct set *small_sets[SMALL];
	struct poller poller = {fds, len, small_kernel, small_conns, small_sets, false};
	void *large = NULL;
	if (len > SMALL) {
		large = malloc((len + 1) * (sizeof(struct pollfd) + 2 * sizeof(void *)));
		if (!large)
			return -1;
		poller.conns = large;
		poller.sets = (struct set **)(poller.conns + len);
		poller.kernel = (struct pollfd *)(poller.sets + len);
	}
	for (nfds_t i = 0; i < len; i++) {
		struct file *file = file_get(fds[i].fd);
		poller.conns[i] = NULL;
		poller.sets[i] = NULL;
		if (file && file->kind == FILE_CONN && (poller.conns[i] = conn_hold(fds[i].fd))) {
			if (poller.conns[i]->managed) {
				poller.others |= !conn_switched(poller.conns[i]) || conn_peer_back(poller.conns[i]);
				continue;
			}
			conn_unref(poller.conns[i]);
			poller.conns[i] = NULL;
		}
		poller.others |= fds[i].fd >= 0;
		if (file && file->kind == FILE_SET && set_is_managed(file)) {
			poller.sets[i] = (struct set *)file;
			set_polled(poller.sets[i]);
		}
	}
	sigset_t old;
	if (mask)
		pthread_sigmask(SIG_SETMASK, mask, &old);
	int result = poll_managed(&poller, timeout ? timespec_ns(timeout) : -1, signals);
	int saved = errno;
	if (mask)
		pthread_sigmask(SIG_SETMASK, &old, NULL);
	for (nfds_t i = 0; i < len; i++)
		if (poller.conns[i])
			conn_unref(poller.conns[i]);
	free(large);
	errno = saved;
	return result;
}

static int tracked_poll(struct pollfd *fds, nfds_t len, int timeout)
{
	struct timespec limit = {timeout / 1000, timeout % 1000 * 1000000l};
	bool tcp;

	if (!word_load(rings_ever) && !classify(fds, len, &tcp) && !tcp)
		return real.poll(fds, len, timeout);
	return poll_common(fds, len, timeout < 0 ? NULL : &limit, NULL);
}

/* The kernel's own poll serves a call without a descriptor of ours, with its own faults for bad pointers. */
EXPORT int poll(struct pollfd *fds, nfds_t len, int timeout)
{
	if (unlikely(word_load(rings_ever)) && timeout && (fds || !len))
		return tracked_poll(fds, len, timeout);
	for (nfds_t i = 0; fds && i < len; i++)
		if (unlikely(file_get(fds[i].fd) != NULL))
			return tracked_poll(fds, len, timeout);
	return real.poll(fds, len, timeout);
}

EXPORT int __poll_chk(struct pollfd *fds, nfds_t len, int timeout, size_t room)
{
	if (room / sizeof(*fds) < len)
		__chk_fail();
	return poll(fds, len, timeout);
}

EXPORT int ppoll(struct pollfd *fds, nfds_t len, const struct timespec *timeout, const sigset_t *mask)
{
	if (!fd_table_len || !fds)
		return real.ppoll(fds, len, timeout, mask);
	return poll_common(fds, len, timeout, mask);
}

EXPORT int __ppoll_chk(struct pollfd *fds, nfds_t len, const struct timespec *timeout, const sigset_t *mask,
                       size_t room)
{
	if (room / sizeof(*fds) < len)
		__chk_fail();
	return ppoll(fds, len, timeout, mask);
}

/* ---- select: the same, by bits ---- */
static bool select_concerns(int len, const fd_set *r, const fd_set *w, const fd_set *e)
{
	if (!fd_table_len || len < 0)
		return false;
	if (unlikely(word_load(rings_ever)))
		return true;
	for (int at = 0; at < len; at += 64) {
		uint64_t bits = 0;
		const fd_set *sets[3] = {r, w, e};
		for (int i = 0; i < 3; i++)
			if (sets[i])
				bits |= (uint64_t)sets[i]->fds_bits[at / 64];
		while (bits) {
			int fd = at + __builtin_ctzll(bits);
			bits &= bits - 1;
			struct file *file = fd < len ? file_get(fd) : NULL;
			if (file && ((file->kind == FILE_CONN &&
			              !(slot_has(((struct conn *)file)->slot, SLOT_PIN) && !((struct conn *)file)->managed)) ||
			             (file->kind == FILE_SET && set_is_managed(file))))
				return true;
		}
	}
	return false;
}

static bool has_bit(const fd_set *set, int fd)
{
	return set && (set->fds_bits[fd / 64] & (1l << (fd % 64)));
}

static int select_by_poll(int len, fd_set *r, fd_set *w, fd_set *e, const struct timespec *timeout,
                          const sigset_t *mask)
{
	/* the kernel's POLLIN_SET, POLLOUT_SET and POLLEX_SET: fs/select.c, select(2) "Correspondence" */
	const struct {
		fd_set *set;
		short asked, reported;
	} kinds[] = {
		{r, POLLIN | POLLRDNORM | POLLRDBAND, POLLIN | POLLRDNORM | POLLRDBAND | POLLHUP | POLLERR},
		{w, POLLOUT | POLLWRNORM | POLLWRBAND, POLLOUT | POLLWRNORM | POLLWRBAND | POLLERR},
		{e, POLLPRI, POLLPRI},
	};
	nfds_t n = 0;
	int found = 0;

	for (int fd = 0; fd < len; fd++)
		n += has_bit(r, fd) || has_bit(w, fd) || has_bit(e, fd);
	struct pollfd small[SMALL], *fds = small;
	if (n > SMALL && !(fds = malloc(n * sizeof(*fds))))
		return fail_with(ENOMEM);
	n = 0;
	for (int fd = 0; fd < len; fd++) {
		short events = 0;
		for (int i = 0; i < 3; i++)
			events |= has_bit(kinds[i].set, fd) ? kinds[i].asked : 0;
		if (events)
			fds[n++] = (struct pollfd){.fd = fd, .events = events};
	}
	int result = poll_common(fds, n, timeout, mask);
	int saved = errno;
	for (nfds_t i = 0; i < n && result >= 0; i++)
		if (fds[i].revents & POLLNVAL) {
			result = -1;
			saved = EBADF;
		}
	for (nfds_t i = 0; i < 3 * n && result >= 0; i++) {
		int fd = fds[i / 3].fd;
		fd_set *set = kinds[i % 3].set;
		if (has_bit(set, fd) && (fds[i / 3].revents & kinds[i % 3].reported))
			found++;
		else if (has_bit(set, fd))
			set->fds_bits[fd / 64] &= ~(1l << (fd % 64));
	}
	if (result >= 0)
		result = found;
	if (fds != small)
		free(fds);
	errno = saved;
	return result;
}

EXPORT int pselect(int len, fd_set *r, fd_set *w, fd_set *e, const struct timespec *timeout, const sigset_t *mask)
{
	if (likely(!select_concerns(len, r, w, e)))
		return real.pselect(len, r, w, e, timeout, mask);
	return select_by_poll(len, r, w, e, timeout, mask);
}

#define LONG_S 1000000000 /* longer than anybody waits */

/* Like the system call, it returns the time that is left. */
int pselect_counting(int len, fd_set *r, fd_set *w, fd_set *e, struct timespec *timeout, const sigset_t *mask)
{
	if (!timeout || timeout->tv_sec > LONG_S)
		return pselect(len, r, w, e, timeout, mask);
	const int64_t start = now_ns(), limit = timeout->tv_sec * 1000000000ll + timeout->tv_nsec;
	int result = pselect(len, r, w, e, timeout, mask);
	if (result < 0 && errno == EINVAL)
		return result;
	int64_t left = limit - (now_ns() - start);
	*timeout = (struct timespec){left > 0 ? left / 1000000000 : 0, left > 0 ? left % 1000000000 : 0};
	return result;
}

EXPORT int select(int len, fd_set *r, fd_set *w, fd_set *e, struct timeval *timeout)
{
	if (likely(!select_concerns(len, r, w, e)) || (timeout && (timeout->tv_sec < 0 || timeout->tv_usec < 0)))
		return real.select(len, r, w, e, timeout);
	if (!timeout)
		return select_by_poll(len, r, w, e, NULL, NULL);
	struct timespec limit = {timeout->tv_sec + timeout->tv_usec / 1000000, timeout->tv_usec % 1000000 * 1000};
	int result = pselect_counting(len, r, w, e, &limit, NULL);
	*timeout = (struct timeval){limit.tv_sec, limit.tv_nsec / 1000};
	return result;
}

/* libc's own names for some of these */
ALIAS(__poll, poll);
ALIAS(__select, select);
