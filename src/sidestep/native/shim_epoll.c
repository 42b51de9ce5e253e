/* shim_epoll.c - epoll_create, epoll_ctl, epoll_wait and their kin, for sets whose members may be promoted. */
#include "shim_set.h"

#include <errno.h>
#include <string.h>

#define LOOK_EVERY_NS 20000        /* the kernel's events are asked for at least this often while rings are busy */
#define TOLD_MAX 128 /* events taken from the kernel at a time */
#define BELLS_MAX 64 /* bells of one set that a thread can sleep on; with more it naps */

EXPORT int epoll_create(int size)
{
	return set_created(real.epoll_create(size));
}

EXPORT int epoll_create1(int flags)
{
	return set_created(real.epoll_create1(flags));
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

static void set_sleep_begin(struct set *set)
{
	for (uint32_t i = 0; i < set->bells_len; i++)
		bell_sleep_begin(set->bells[i].bell);
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
