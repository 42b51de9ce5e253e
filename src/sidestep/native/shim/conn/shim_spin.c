/* shim_spin.c - whether to spin before a sleep, and spinning on TCP. */
#include "shim_spin.h"

#include <fcntl.h>
#include <sched.h>

#define LOAD_REFRESH_NS 4000000   /* greatest age of the count of runnable threads */
#define AWAY_NS 100000            /* time between two looks; less is an interrupt */
#define SHARED_NS 20000 /* the same for a CPU that was offered to others: the cost of a sleep and its wake-up */
#define NOBODY_NS 1000 /* a CPU that is back so soon was wanted by nobody ... */
#define ALONE_NS 10000 /* ... and is not offered for a while */
#define SPREAD_EVERY_NS 100000000 /* a thread moves away from its peer's CPU at most this often */
#define STACK_EVERY_NS 20000000   /* and to it */
#define TURNS_MIN 16 /* messages, or sleeps, from which it shows how two work */
#define TURN_BULK 16384u /* bytes of a stream that moves by turns, from one sleep to the next */

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

/*
 * Moves this thread to one of these CPUs, and lets it go where it might before. A thread with all CPUs of its cpuset gets the widest
 * mask. A narrower one would keep it from CPUs that the cpuset gets later. No handler of the program runs in between: it
 * might see the mask, or not return. A mask that another process sets meanwhile stays.
 */
static void move(const cpu_set_t *to, const cpu_set_t *before)
{
	static __thread bool masked; /* True if it has a mask of its own */
	cpu_set_t all, now, common;

	critical_enter();
	if (sched_setaffinity(0, sizeof(*to), to) == 0 && sched_getaffinity(0, sizeof(now), &now) == 0) {
		CPU_AND(&common, &now, to);
		bool ours = CPU_EQUAL(&common, &now);
		memset(&all, 0xff, sizeof(all));
		if (ours && !masked && sched_setaffinity(0, sizeof(all), &all) == 0)
			masked = sched_getaffinity(0, sizeof(now), &now) < 0 || !CPU_EQUAL(&now, before);
		if (ours && masked && sched_setaffinity(0, sizeof(*before), before) < 0)
			sched_setaffinity(0, sizeof(all), &all); /* The cpuset has none of them any more. */
	}
	critical_leave();
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
	move(&others, &all);
}

static __thread int64_t stacked_at; /* this thread has moved to a peer's CPU */

/*
 * A pair of which one end answers each message, and sleeps for each, runs in turns. So does a stream whose reader and writer
 * sleep for each other. On two CPUs that others want as well, each wake-up interrupts a CPU, which costs several times the
 * message. A thread that has slept has not had its share. On one CPU it is a switch. The kernel brings a pair together if
 * the waker is about to sleep, as TCP's is by its call. A doorbell's call does not say so. This thread therefore goes to the CPU
 * of its peer. An idle pair does so too: its first message would wake a halted CPU, and the answer another.
 */
bool spin_apart(const struct conn *conn, int want, int64_t now)
{
	uint32_t peer_cpu = conn_peer_cpu(conn, want);

	/* one end alone moves, or the two would change places */
	return unlikely(peer_cpu != cpu_now()) && peer_cpu && conn->channel.local == &conn->channel.seg->side[0] &&
	       now - word_load(conn->turns_at) >= STACK_EVERY_NS && now - stacked_at >= STACK_EVERY_NS;
}

/* True if the two work in turns, by what has come and gone since the last look. */
static bool takes_turns(struct conn *conn, int64_t now)
{
	const struct conn_slot *slot = conn->slot;
	uint64_t msgs = word_load(slot->rx_ring_msgs), sent = word_load(slot->tx_ring_msgs);
	uint64_t sleeps = word_load(slot->sleeps) + word_load(slot->tx_sleeps);
	uint64_t bytes = word_load(slot->rx_ring_bytes) + word_load(slot->tx_ring_bytes);
	uint64_t turns = msgs - word_load(conn->turn_msgs), slept = sleeps - word_load(conn->turn_sleeps);
	uint64_t answered = sent - word_load(conn->turn_sent), most = turns - turns / 8;
	uint64_t moved = bytes - word_load(conn->turn_bytes);

	word_store(conn->turns_at, now);
	word_store(conn->turn_msgs, msgs);
	word_store(conn->turn_sleeps, sleeps);
	word_store(conn->turn_sent, sent);
	word_store(conn->turn_bytes, bytes);
	return slept >= TURNS_MIN &&
	       ((turns >= TURNS_MIN && slept >= most && answered >= most) || moved / slept >= TURN_BULK);
}

/* True if two that share a crowded machine work in turns, or this one is idle and answers. */
static bool better_together(struct conn *conn, int want, int64_t now)
{
	if (want == WAIT_RX && word_load(conn->budget.idle)) {
		uint64_t sent = word_load(conn->slot->tx_ring_msgs);
		bool answers = sent != word_load(conn->turn_sent);
		word_store(conn->turn_sent, sent);
		return answers && now - stacked_at >= STACK_EVERY_NS;
	}
	return spin_apart(conn, want, now) && takes_turns(conn, now) && runnable_threads() > (uint32_t)config.ncpus;
}

void spin_stack(struct conn *conn, int want, int64_t now)
{
	uint32_t peer_cpu = conn_peer_cpu(conn, want);
	cpu_set_t all, one;

	if (likely(!peer_cpu || peer_cpu == cpu_now()) || !better_together(conn, want, now))
		return;
	if (config.stay || peer_cpu > CPU_SETSIZE)
		return;
	CPU_ZERO(&one);
	CPU_SET((int)peer_cpu - 1, &one);
	if (sched_getaffinity(0, sizeof(all), &all) < 0 || !CPU_ISSET((int)peer_cpu - 1, &all))
		return;
	shim_log("goes to CPU %u, where its peer is", peer_cpu - 1);
	stacked_at = now;
	move(&one, &all);
	conn_sends_here(conn);
	conn_reads_here(conn);
}

/*
 * ---- one wait's spin ----
 *
 * If the peer can run beside us, a spin is a loop over the words that it writes. Else the CPU is offered to other threads
 * between two looks. If no thread wants it, it is back soon, and the loop goes on without offers for a while. The cost is
 * measured. A thread that lost its CPU for longer than a sleep and a wake-up take should have slept. So no thread of the
 * process spins again until the loss is small against the time that has passed. No count of threads shows this: CPU masks,
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
	static __thread int64_t spun_at;

	if (!budget)
		return false;
	spin->now = now_ns();
	spin->seldom = spin->now - spun_at > SELDOM_NS;
	spun_at = spin->now;
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
		if (!spin->crowded && may_move && !spin->seldom)
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
