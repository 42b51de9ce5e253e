/* shim_epoll.c - epoll_create, epoll_ctl, epoll_wait and their kin, for sets whose members may be promoted. */
#include "shim_number.h"
#include "shim_set.h"

#define REPORT_MAX 128 /* events taken from the kernel at a time */
#define QUIET_MAX 8 /* managed members that are looked at twice for the sake of a system call */

EXPORT int epoll_create(int size)
{
	return set_created(fd_new(real.epoll_create(size)));
}

EXPORT int epoll_create1(int flags)
{
	return set_created(fd_new(real.epoll_create1(flags)));
}

/* ---- epoll_ctl: shim_lock and set lock held ---- */
static int ctl_add(struct set *set, struct conn *conn, struct member *member, int fd, struct epoll_event *event)
{
	int result;

	if (member && member->away && (event->events & EPOLLEXCLUSIVE)) {
		member_drop(member);
		member = NULL;
	}
	if (member && !member->away)
		return fail_with(EEXIST);
	if (member)
		return member_return(member, event);
	member = member_new(set, conn, fd, event);
	if (!member)
		return set_ctl(set, EPOLL_CTL_ADD, fd, event);
	if (!conn->managed) {
		result = kernel_unmanaged(member, EPOLL_CTL_ADD);
	} else {
		result = member_manage(member, EPOLL_CTL_ADD) ? 0 : -1;
		if (result == 0)
			wake_set(set);
	}
	if (result < 0) {
		int failed = errno;
		member_free(member);
		errno = failed;
	}
	return result;
}

static int ctl_mod(struct set *set, struct member *member, int fd, struct epoll_event *event)
{
	if (!member)
		return set_ctl(set, EPOLL_CTL_MOD, fd, event);
	if (member->away)
		return fail_with(ENOENT);
	if (!member->managed) {
		struct member before = *member;
		member->events = event->events;
		member->data = event->data.u64;
		member->disabled = false;
		member->age++;
		int result = kernel_unmanaged(member, EPOLL_CTL_MOD);
		if (result < 0)
			*member = before;
		return result;
	}
	if (member->events & EPOLLEXCLUSIVE)
		return fail_with(EINVAL);
	return member_change(member, event);
}

static int ctl_other(struct set *set, struct member *member, int op, int fd, struct epoll_event *event)
{
	if (op == EPOLL_CTL_DEL && member && member->away)
		return fail_with(ENOENT);
	if (op == EPOLL_CTL_DEL && member && member_leave(member))
		return 0;
	int result = set_ctl(set, op, fd, event);
	if (result == 0 && member)
		member_free(member);
	return result;
}

/* The program's call for one of our connections, in one of our sets. */
static int set_change(struct set *set, struct conn *conn, int epfd, int op, int fd, struct epoll_event *event)
{
	int result;

	shim_lock_take();
	if (set_get(epfd) != set) {
		shim_lock_drop();
		return fail_with(EBADF);
	}
	set_lock(set);
	uint32_t calls = self.calls;
	struct member *member = member_find(set, conn, fd);
	switch (op) {
	case EPOLL_CTL_ADD: result = ctl_add(set, conn, member, fd, event); break;
	case EPOLL_CTL_MOD: result = ctl_mod(set, member, fd, event); break;
	default: result = ctl_other(set, member, op, fd, event);
	}
	int failed = errno;
	self.calls -= self.calls != calls; /* one of the calls is the program's */
	set_unlock(set);
	shim_lock_drop();
	errno = failed;
	return result;
}

/* A program's data that looks like ours. */
static void secret_met(struct set *set)
{
	set_lock(set);
	if (!atomic_load(&set->managed_ever))
		set->secret = new_secret();
	else
		set->shared = true;
	set_unlock(set);
}

/* The kernel alone waits on that set, or other processes do as well. */
static int add(struct set *set, struct conn *conn, int epfd, int fd, struct epoll_event *event)
{
	const bool shared = set->shared;

	if (conn->managed && unlikely(shared))
		conn_demote(conn, fd, REASON_EPOLL_UNSUPPORTED, true);
	int result = set_change(set, conn, epfd, EPOLL_CTL_ADD, fd, event);
	/* Looked at behind it: set_leave() finds the member, or we find that its members leave. */
	if (result == 0 && unlikely(set->leaves) && conn->managed) {
		KEEP_ERRNO;
		if (shared)
			set_leave(set);
		else
			conn_leave(conn, fd, REASON_EPOLL_UNSUPPORTED);
	}
	return result;
}

#define EXCLUSIVE_OK (EPOLLIN | EPOLLOUT | EPOLLERR | EPOLLHUP | EPOLLWAKEUP | EPOLLET | EPOLLEXCLUSIVE)

EXPORT int epoll_ctl(int epfd, int op, int fd, struct epoll_event *event)
{
	HELD_SET set = set_hold(epfd);
	struct file *file = file_get(fd);

	if (unlikely(file && file->kind == FILE_OWN))
		return fail_with(EBADF);
	if (set && event && unlikely(event->data.u64 >> NAME_BITS == set->secret))
		secret_met(set);
	if (likely(!file))
		return real.epoll_ctl(epfd, op, fd, event);
	if (file->kind == FILE_SET) {
		HELD_SET inner = set_hold(fd);
		int result = real.epoll_ctl(epfd, op, fd, event);
		if (op == EPOLL_CTL_ADD && result == 0 && inner)
			set_nest(set, inner);
		return result;
	}
	HELD conn = conn_hold(fd);
	if (!conn || !set || (!event && op != EPOLL_CTL_DEL)) {
		if (conn && !set) /* a set that was made elsewhere: the kernel alone waits in it */
			conn_demote(conn, fd, REASON_EPOLL_UNSUPPORTED, true);
		return real.epoll_ctl(epfd, op, fd, event);
	}
	if (op == EPOLL_CTL_ADD && conn->managed && !word_load(set->away_len) && conn_fd_stale(conn, fd) &&
	    conn_drop_stale(conn, fd))
		return real.epoll_ctl(epfd, op, fd, event);
	word_store(conn->waited, true);
	set->user_pid = shim_pid;
	/* epoll_ctl(2): what EPOLLEXCLUSIVE goes with */
	if (event && (event->events & EPOLLEXCLUSIVE) &&
	    (op == EPOLL_CTL_MOD || (op == EPOLL_CTL_ADD && (event->events & ~(uint32_t)EXCLUSIVE_OK))))
		return fail_with(EINVAL);
	if (op == EPOLL_CTL_ADD)
		return add(set, conn, epfd, fd, event);
	return set_change(set, conn, epfd, op, fd, event);
}

/* ---- waiting ---- */
struct set_wait {
	struct wait base;
	struct set *set;
	int epfd;
	struct epoll_event *events; /* the program's: it holds nothing but what is reported */
	int max;
	uint32_t manages; /* the set's, from before the last question to the kernel */
	bool within; /* the set's own entries report all doorbells */
	bool others; /* threads asleep in the set are to look as well */
	struct epoll_event reported[REPORT_MAX];
};

/*
 * Events that the kernel has now, as many as the program has room for. The stand-in of an inner set may take the place of an
 * event. The set above tells of that event's edge no more: so there is one beyond that room.
 */
static int kernel_look(struct set_wait *wait)
{
	const struct set *set = wait->set;
	const int max = wait->max < REPORT_MAX ? wait->max : REPORT_MAX;
	int k = raw_epoll_look(wait->epfd, wait->reported, max);

	if (likely(!(set->nest & NEST_INNER)) || k < max || k == REPORT_MAX)
		return k;
	for (int i = 0; i < max; i++)
		if (wait->reported[i].data.u64 == (set->secret << NAME_BITS | DOORBELL_INDEX)) {
			self.calls++;
			return k + (raw_epoll_look(wait->epfd, wait->reported + k, 1) > 0);
		}
	return k;
}

/* Events that the kernel has now; -1: it cannot report. */
static int set_look(struct set_wait *wait)
{
	word_store(wait->set->looked_at, wait->base.now);
	wait->manages = word_load(wait->set->manages);
	self.calls += wait->base.looks++ != 0;
	int k = kernel_look(wait);
	wait->set->kernel_last = k ? KERNEL_SAID : KERNEL_QUIET;
	wait->base.asked = true;
	return k;
}

/* set lock held. Turns `reported` events of the kernel's, and the rings' state, into the program's; returns their number. */
static int set_report(struct set_wait *wait, int reported)
{
	struct set *set = wait->set;
	int n = reported > 0 ? translate(set, wait->reported, reported, wait->manages, wait->events) : 0;

	if (reported > 0 && !n)
		set->kernel_last = KERNEL_QUIET;
	/* the rings come first the next time, if the kernel's events alone have filled the room */
	set->kernel_filled |= reported > 0 && n == wait->max;
	return n < wait->max ? n + collect(set, wait->events + n, wait->max - n) : n;
}

/* Ends a pass, and drops the lock. */
static int set_pass_end(struct set_wait *wait, int n)
{
	if (concerns_others(wait->set, n, wait->max))
		wake_set(wait->set);
	set_unlock(wait->set);
	return n;
}

static void set_pass_begin(struct set *set, enum set_spent spent)
{
	set_lock(set);
	set->pass++;
	set->spent = spent;
}

static bool look_is_due(const struct set_wait *wait)
{
	return wait->base.now - word_load(wait->set->looked_at) > LOOK_EVERY_NS;
}

/* set lock held, and dropped in between. Nothing has been reported in this pass. */
static void set_look_below(struct set *set)
{
	set_unlock(set);
	nest_look(set);
	set_pass_begin(set, SPENT_NOTHING);
}

/* The kernel had as much to tell as there was room for: with little, a doorbell's edge or a non-event may take an event's place. */
static int set_look_more(struct set_wait *wait)
{
	struct set *set = wait->set;
	int n = 0, k, max = wait->max < REPORT_MAX ? wait->max : REPORT_MAX;

	if (unlikely(set->nest & NEST_OUTER))
		set_look_below(set);
	for (uint32_t turns = set->doorbells_len + set->managed_len + 2; !n && turns; turns--) { /* turns are bounded */
		if ((k = set_look(wait)) <= 0)
			break;
		n = set_report(wait, k);
		if (k < max)
			break; /* the kernel has no more */
	}
	return n;
}

/* set lock held, which is dropped. The first look of a wait, at the kernel's events as well. */
static int set_first_asked(struct set_wait *wait, bool once)
{
	struct set *set = wait->set;

	if (unlikely(set->nest & NEST_OUTER))
		set_look_below(set);
	int k = set_look(wait);

	if (k < 0) {
		set_unlock(set);
		return -1;
	}
	int n = set_report(wait, k);
	if (!n && once && k >= (wait->max < REPORT_MAX ? wait->max : REPORT_MAX))
		n = set_look_more(wait);
	return set_pass_end(wait, n);
}

/* set lock held. `n` events of the rings are reported. Those of the kernel's go behind them; how many there are then. */
static int set_add_asked(struct set_wait *wait, int n)
{
	const int room = wait->max - n;

	if (!room)
		return n;
	wait->max = room;
	int k = set_look(wait);
	wait->max = n + room;
	return k > 0 ? n + translate(wait->set, wait->reported, k, wait->manages, wait->events + n) : n;
}

/*
 * set lock held. True if the sleep that follows may ask the kernel: it had nothing to report the last time, and the rings have
 * nothing now. What is reported together is asked for together, as the kernel reports an edge once. A wait whose time is over
 * does not sleep.
 */
static bool set_sleeps(const struct set_wait *wait)
{
	struct set *set = wait->set;

	return set->kernel_last == KERNEL_QUIET && set->managed_len <= QUIET_MAX && !set->by_tcp && !set->nest &&
	       wait->base.now < wait->base.deadline && self.signals == wait->base.signals && !set_tells(set);
}

/* The first look of a wait. It reports all that is ready at once. -1: the kernel has failed. */
static int set_first(struct set_wait *wait, bool once)
{
	struct set *set = wait->set;

	set_pass_begin(set, SPENT_NOTHING);
	const bool filled = set->kernel_filled;
	set->kernel_filled = false;
	/* a set above reports an edge once: what the kernel has comes with the rings' events */
	bool look = (set->by_tcp || set->nest || set->kernel_last == KERNEL_READY || look_is_due(wait)) && !filled;
	if (look && !once && set_sleeps(wait))
		return set_pass_end(wait, 0);
	if (look)
		return set_first_asked(wait, once);
	int n = set_report(wait, 0);
	if (unlikely(filled && n))
		n = set_add_asked(wait, n); /* the kernel may have more than the last wait had room for */
	if (unlikely(!n && once))
		n = set_look_more(wait);
	return set_pass_end(wait, n);
}

/* Looks at the rings and, every so often, at what the kernel has. How many events were found. */
static int set_spin_look(void *of)
{
	struct set_wait *wait = of;

	set_pass_begin(wait->set, SPENT_SPUN);
	int n = set_report(wait, 0);
	if (!n && look_is_due(wait))
		n = set_report(wait, set_look(wait));
	return set_pass_end(wait, n);
}

/* No lock is held. The doorbells of sets below as well; then what their rings hold is seen by the kernel. */
static void set_sleep_below(struct set_wait *wait)
{
	const uint32_t before = wait->base.len;

	wait_arm(&wait->base, before, nest_doorbells(wait->set, wait->base.doorbells, before, WAIT_DOORBELLS_MAX));
	nest_look(wait->set);
}

/* set lock held, and dropped while the thread may wait for another CPU. */
static void set_stack(const struct set_wait *wait)
{
	struct set *set = wait->set;
	struct conn *conn = word_load(set->managed_len) == 1 ? set->managed[0]->conn : NULL;

	if (likely(!conn || !spin_apart(conn, WAIT_RX, wait->base.now)))
		return;
	conn_ref(conn);
	set_unlock(set);
	spin_stack(conn, WAIT_RX, wait->base.now);
	conn_unref(conn);
	set_pass_begin(set, SPENT_NOTHING);
}

/* Ends with the set lock held: set_arm() drops it. */
static bool set_begin(void *of)
{
	struct set_wait *wait = of;
	struct set *set = wait->set;

	wait->within = !set->nest && word_load(set->managed_len);
	if (likely(wait->within))
		rpc_watch(wait->epfd, &set->watched, set->secret << NAME_BITS | DOORBELL_INDEX);
	set_sweep(set);
	set_pass_begin(set, SPENT_NOTHING);
	set_stack(wait);
	return true;
}

static int set_arm(void *of)
{
	struct set_wait *wait = of;
	struct set *set = wait->set;
	uint32_t len = 0;

	for (uint32_t i = 0; i < set->doorbells_len && len <= WAIT_DOORBELLS_MAX; i++)
		len = doorbell_add(wait->base.doorbells, len, WAIT_DOORBELLS_MAX, set->doorbells[i].doorbell);
	atomic_fetch_add(&set->sleepers, 1);
	if (unlikely(set->nest != 0)) {
		wait->base.aware = true;
		atomic_fetch_add(&set->aware, 1);
		atomic_fetch_add(&nest_sleepers, 1);
	}
	wait_arm(&wait->base, 0, len);
	int n = set_report(wait, 0);
	wait->others = concerns_others(set, n, wait->max);
	if (n)
		set->kernel_last = KERNEL_SAID; /* the kernel has not been asked */
	wait->manages = word_load(set->manages);
	self.full_until = set->full_until;
	set_unlock(set);
	if (unlikely(!n && wait->base.aware))
		set_sleep_below(wait);
	return n;
}

static void set_cancelled(void *of)
{
	struct set_wait *wait = of;

	doorbells_wake(wait->base.doorbells, wait->base.len);
	if (unlikely(wait->base.aware)) {
		atomic_fetch_sub(&nest_sleepers, 1);
		atomic_fetch_sub(&wait->set->aware, 1);
	}
	atomic_fetch_sub(&wait->set->sleepers, 1);
}

static void set_disarm(void *of)
{
	struct set_wait *wait = of;

	set_cancelled(wait);
	if (unlikely(wait->others)) {
		set_lock(wait->set);
		wake_set(wait->set);
		set_unlock(wait->set);
	}
}

/*
 * Like sleep_epoll(), if not all doorbells are among the set's entries, nor the provider's socket. Such a set is inside
 * another, which would report them, has others in it, or has nothing of ours yet: another process may have that.
 */
static int sleep_beside(struct set_wait *wait, int64_t until)
{
	struct pollfd fds[2] = {{.fd = wait->epfd, .events = POLLIN}, {.events = POLLIN}};

	fds[1].fd = self_doorbell_fd(wait->base.doorbells, (int)wait->base.len);
	int ready = sleep_poll(fds, 2, until, wait->base.signals, NULL);
	if (ready > 0 && fds[1].revents) {
		self_doorbells_clear();
		rpc_listen_passing();
	}
	if (ready > 0 && wait->base.aware)
		nest_look(wait->set);
	return ready > 0 ? kernel_look(wait) : ready;
}

static int set_sleep(void *of, int64_t until)
{
	struct set_wait *wait = of;
	int max = wait->max < REPORT_MAX ? wait->max : REPORT_MAX;

	if (unlikely(wait->base.truncated) && until - now_ns() > NAP_NS)
		until = now_ns() + NAP_NS;
	return likely(wait->within && !wait->base.aware)
	           ? sleep_epoll(wait->epfd, wait->reported, max, until, wait->base.signals)
	           : sleep_beside(wait, until);
}

/* Members that were not looked at, as their rings were full, are once the time for that is over. */
static void set_full_over(const struct set_wait *wait)
{
	struct set *set = wait->set;

	if (likely(!set->full_until || wait->base.now < set->full_until))
		return;
	set_lock(set);
	set->full_until = 0;
	set->scan_all = true;
	set_unlock(set);
}

/* Number of events to tell; -1: it slept for nothing, with errno. */
static int set_woken(void *of, int k)
{
	struct set_wait *wait = of;
	struct set *set = wait->set;
	const int failed = errno;

	word_store(set->looked_at, wait->base.now);
	set_full_over(wait);
	errno = failed;
	if (k <= 0 && !wait->base.truncated)
		return k;
	set_pass_begin(set, wait->base.spun ? SPENT_BOTH : SPENT_SLEPT);
	set->kernel_last = k ? KERNEL_SAID : KERNEL_QUIET;
	int n = set_pass_end(wait, set_report(wait, k));
	errno = failed;
	return n || k > 0 ? n : k;
}

static const struct wait_kind set_kind = {set_spin_look, set_begin,     set_arm,  set_sleep,
                                          set_disarm,    set_cancelled, set_woken};

/* The wait of a set with managed members. timeout_ns < 0: for ever. */
static int set_wait(struct set *set, int epfd, struct epoll_event *events, int max, int64_t timeout_ns,
                    uint64_t signals)
{
	struct set_wait wait;
	bool first = true;
	int n;

	wait_start(&wait.base, deadline_after(timeout_ns), signals, &set->budget);
	wait.set = set;
	wait.epfd = epfd;
	wait.events = events;
	wait.max = max;
	pthread_testcancel();
	if (unlikely(word_load(rpc_pending)))
		rpc_poll();
	for (;; first = false) {
		n = set_first(&wait, timeout_ns == 0);
		if (!n && timeout_ns == 0)
			rpc_listen_passing();
		/* what the kernel has comes before the end of the time, and before EINTR: the sleep asks, and is none then */
		if (n || timeout_ns == 0 ||
		    (wait.base.deadline != INT64_MAX && wait.base.now >= wait.base.deadline && wait.base.asked))
			return n;
		if (first && word_load(set->managed_len) &&
		    (n = wait_spin(&wait.base, &set_kind, word_load(set->last_cpu), true)))
			return n;
		if (self.signals != signals && wait.base.asked)
			break;
		if ((n = wait_sleep(&wait.base, &set_kind)))
			return n;
		if (self.signals != signals && wait.base.asked)
			break;
	}
	return fail_with(EINTR);
}

static int wait_common(int epfd, struct epoll_event *events, int max, int64_t timeout_ns, const sigset_t *mask,
                       int (*kernel)(int, struct epoll_event *, int, const void *, const sigset_t *),
                       const void *timeout)
{
	HELD_SET set = set_hold(epfd);
	sigset_t old;

	if (unlikely(!set || max <= 0 || !events))
		return kernel(epfd, events, max, timeout, mask);
	uint64_t signals = self.signals; /* count from before the mask lets any in */
	/* a wait in a process with rings looks for the provider, as that of a set with managed members does */
	if (likely(!word_load(set->ours)) && (!timeout_ns || !word_load(rings_ever))) {
		if (unlikely(word_load(rpc_pending)))
			rpc_poll();
		if (!timeout_ns && unlikely(word_load(rings_ever)))
			rpc_listen_passing();
		int64_t start = set->members_len > 1 && timeout_ns > 0 ? now_ns() : 0;
		atomic_fetch_add(&set->kernel_waiters, 1);
		if (likely(!atomic_load(&set->ours))) {
			/* The program's array may hold nothing but reported events, and a doorbell may be among the kernel's. */
			struct epoll_event reported[REPORT_MAX], *at = set->members_live ? reported : events;
			const uint32_t manages = word_load(set->manages);
			const int room = at == reported && max > REPORT_MAX ? REPORT_MAX : max;
			int n = kernel(epfd, at, room, timeout, mask);
			const bool more = n == room; /* a doorbell's edge may have taken an event's place */
			atomic_fetch_sub(&set->kernel_waiters, 1);
			if (likely(!atomic_load_explicit(&set->managed_ever, memory_order_acquire)) || n < 0) {
				if (at == reported && n > 0)
					memcpy(events, reported, (size_t)n * sizeof(*events));
				return n;
			}
			int failed = errno;
			set_lock(set);
			set->pass++;
			n = translate(set, at, n, manages, events);
			n += collect(set, events + n, max - n);
			wake_set(set); /* the next one that does not know yet */
			set_unlock(set);
			errno = failed;
			if (n || (timeout_ns == 0 && !more))
				return n;
			if (timeout_ns > 0 && start) {
				timeout_ns -= now_ns() - start;
				if (timeout_ns < 0)
					timeout_ns = 0;
			}
		} else {
			atomic_fetch_sub(&set->kernel_waiters, 1);
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
