/* shim_spin.c - whether to spin before a sleep, and spinning on TCP. */
#include "shim_spin.h"

#include <fcntl.h>
#include <sched.h>

#define LOAD_REFRESH_NS 4000000   /* how old the count of runnable threads may be */
#define AWAY_NS 100000            /* between two looks; less is an interrupt */
#define SHARED_NS 20000 /* the same for a CPU that was offered to others: the cost of a sleep and its wake-up */
#define NOBODY_NS 1000 /* a CPU that is back so soon was wanted by nobody ... */
#define ALONE_NS 10000 /* ... and is not offered for a while */
#define SPREAD_EVERY_NS 100000000 /* a thread moves away from its peer's CPU at most this often */

static uint32_t runnable_threads(void)
{
	static _Atomic int64_t read_at;
	static _Atomic uint32_t runnable;
	static _Atomic int opened = -2;
	int fd = word_load(opened);
	int64_t now = now_ns();

	if (now - word_load(read_at) < LOAD_REFRESH_NS)
		return word_load(runnable);
	word_store(read_at, now);
	self.calls++;
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
	word_store(runnable, count);
	return count;
}

/* Moves this thread off the CPU it shares with its peer: the kernel puts a sleeping pair on one, for good. */
static void spread(uint32_t cpu)
{
	static __thread int64_t spread_at;
	cpu_set_t all, others;
	int64_t now = now_ns();

	if (config.stay || now - spread_at < SPREAD_EVERY_NS)
		return;
	spread_at = now;
	if (sched_getaffinity(0, sizeof(all), &all) < 0 || CPU_COUNT(&all) < 2)
		return;
	others = all;
	CPU_CLR((int)cpu - 1, &others);
	if (sched_setaffinity(0, sizeof(others), &others) == 0)
		sched_setaffinity(0, sizeof(all), &all);
}

/*
 * ---- one wait's spin ----
 *
 * If the peer can run beside us, a spin is a loop over the words that it writes. Else the CPU is offered to other threads
 * between two looks: if nobody wants it, it is back soon, and the loop goes on without offers for a while. The cost is
 * measured: a thread that lost its CPU for longer than a sleep and a wake-up take should have slept, so no thread of the
 * process spins again until the loss is small against the time that has passed. No count of threads tells this: CPU masks,
 * quotas and a host under this one are not in it.
 */
static _Atomic int64_t rests_until;

static bool spin_lost(const struct spin *spin, int64_t away)
{
	word_store(rests_until, spin->now + SPIN_REST_FACTOR * away);
	return false;
}

bool spin_begin(struct spin *spin, uint32_t budget, uint32_t peer_cpu)
{
	if (!budget)
		return false;
	spin->now = now_ns();
	if (unlikely(spin->now < word_load(rests_until)))
		return false;
	spin->end = spin->now + budget;
	spin->crowded = runnable_threads() > (uint32_t)config.ncpus;
	spin->alone_until = spin->away = 0;
	spin->given = 0;
	spin->len = budget;
	spin->shares = spin->crowded || cpu_now() == peer_cpu;
	return true;
}

bool spin_on(struct spin *spin, uint32_t peer_cpu, bool may_move)
{
	uint32_t cpu = cpu_now();
	int64_t before = spin->now;

	if (unlikely(spin->away)) /* and the peer has not used the time */
		return spin_lost(spin, spin->away);
	if (!spin->shares) {
		for (int i = 0; i < 8; i++)
			cpu_relax();
	} else {
		if (!spin->crowded && may_move)
			spread(cpu);
		before = now_ns();
		sched_yield();
		self.calls++;
	}
	spin->now = now_ns();
	int64_t away = spin->now - before;
	if (spin->shares)
		spin->given += away;
	if (unlikely(away > AWAY_NS))
		return spin_lost(spin, away);
	if (spin->shares && away < NOBODY_NS)
		spin->alone_until = spin->now + ALONE_NS;
	else if (spin->shares && away > SHARED_NS)
		spin->away = away;
	spin->shares = (spin->crowded || cpu == peer_cpu) && spin->now >= spin->alone_until;
	return spin->away || spin->now < spin->end;
}

/*
 * ---- waiting on TCP ----
 *
 * Between two ends on one host the kernel's wake-up costs more than the wait itself: an idle CPU has to be interrupted. So a
 * blocking call of a native connection, or of a listener, asks a few times before it sleeps. How long depends on what paid
 * lately for this thread. Only tracked connections, whose peers are near, come here.
 */
#define NATIVE_SPIN_NS 30000

struct native_spin {
	uint32_t budget;
	bool known;
};
static __thread struct native_spin spin_receiving, spin_accepting;

static bool native_begin(struct native_spin *native, struct spin *spin)
{
	uint32_t most = config.spin_ns < NATIVE_SPIN_NS ? config.spin_ns : NATIVE_SPIN_NS;

	if (!native->known)
		*native = (struct native_spin){most, true};
	/* Between two questions the CPU is given away: the other side needs the socket's lock, or this very CPU. */
	return spin_begin(spin, native->budget, cpu_now()) && !spin->crowded;
}

static void native_learn(struct native_spin *native, int64_t waited_ns)
{
	uint32_t most = config.spin_ns < NATIVE_SPIN_NS ? config.spin_ns : NATIVE_SPIN_NS;

	/* a wait counts as short even if the wake-up from its sleep made it long */
	if (waited_ns < 4 * (int64_t)most)
		native->budget = most;
	else if (native->budget > most / 16)
		native->budget /= 2;
}

static bool native_on(struct spin *spin)
{
	uint32_t calls = self.calls;

	spin->shares = true;
	bool on = spin_on(spin, cpu_now(), false);
	self.calls = calls; /* of no connection that goes by ring */
	return on;
}

/* recv() with no flags, of a native connection. */
ssize_t native_receive(struct conn *conn, int fd, void *buf, size_t n)
{
	uint64_t signals = self.signals_interrupting;
	struct spin spin;

	if (n == 0 || word_load(conn->nonblock) || conn->slot->rx_low_water != 1 || !native_begin(&spin_receiving, &spin))
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
		if (self.signals_interrupting != signals)
			return fail_with(EINTR);
		if (!native_on(&spin))
			break;
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
	uint64_t signals = self.signals_interrupting;
	struct pollfd in = {.fd = fd, .events = POLLIN};
	struct spin spin;

	if (!native_begin(&spin_accepting, &spin) || raw_poll(&in, 1, 0) != 0 ||
	    (real.fcntl64(fd, F_GETFL, 0) & O_NONBLOCK))
		return real.accept4(fd, address, len, flags);
	int64_t start = now_ns();
	do {
		if (self.signals_interrupting != signals)
			return fail_with(EINTR);
	} while (native_on(&spin) && raw_poll(&in, 1, 0) == 0);
	int got = real.accept4(fd, address, len, flags), saved = errno;
	native_learn(&spin_accepting, now_ns() - start);
	errno = saved;
	return got;
}
