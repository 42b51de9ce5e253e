/* shim_spin.c - whether to spin before a sleep, and spinning on TCP. */
#include "shim.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <string.h>
#include <sys/syscall.h>

#define LOAD_REFRESH_NS 4000000   /* how old the count of runnable threads may be */
#define SPREAD_EVERY_NS 100000000 /* a thread moves away from its peer's CPU at most this often */

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
