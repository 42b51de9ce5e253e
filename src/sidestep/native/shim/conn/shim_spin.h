/* shim_spin.h - how long a wait looks again and again before it sleeps, and what waits cost. */
#ifndef SIDESTEP_SHIM_SPIN_H
#define SIDESTEP_SHIM_SPIN_H

#include "shim.h"

#define LOOK_EVERY_NS 20000 /* the kernel's events are asked for at least this often while rings are busy */
#define NAP_NS 1000000      /* a sleep that cannot hear all of its doorbells */
#define SELDOM_NS 10000000  /* A thread that waits so long, or spins so seldom, lies on its peer's CPU. */

struct spin {
	int64_t now, end, len;
	int64_t alone_until; /* end of the time in which no other thread wanted this CPU */
	int64_t away;        /* time for which another thread had the CPU just now */
	int64_t given;       /* time in which the CPU was offered, to any thread */
	bool crowded;        /* true if there are more runnable threads than CPUs */
	bool seldom;         /* True if this thread has not spun for a while. */
	bool shares;         /* the next spin_on() offers the CPU: one look is enough before it */
};
bool spin_begin(struct spin *spin, uint32_t budget, uint32_t peer_cpu); /* false: this wait had better sleep */
bool spin_on(struct spin *spin, uint32_t peer_cpu, bool may_move); /* one step; false: it is time to sleep */
/* CPU on which the peer last sent, for a thread that receives, or received; 0: unknown. */
static inline uint32_t conn_peer_cpu(const struct conn *conn, int want)
{
	return want == WAIT_RX ? word_load(conn->channel.rx_peer_line->cpu) : word_load(conn->channel.tx_peer_line->cpu);
}

/* The peer learns which CPU its bytes are to come to. */
static inline void conn_reads_here(struct conn *conn)
{
	uint32_t cpu = cpu_now();

	if (word_load(conn->channel.rx_line->cpu) != cpu)
		word_store(conn->channel.rx_line->cpu, cpu);
}

/* The peer learns where they come from. */
static inline void conn_sends_here(struct conn *conn)
{
	uint32_t cpu = cpu_now();

	if (word_load(conn->channel.tx_line->cpu) != cpu)
		word_store(conn->channel.tx_line->cpu, cpu);
}

/* The thread is about to sleep. No lock is held. */
bool spin_apart(const struct conn *conn, int want, int64_t now); /* true if spin_stack() is to be asked */
void spin_stack(struct conn *conn, int want, int64_t now);

/*
 * State after a loss: others want a CPU, and none has taken this one while it was offered, or hardly. With a CPU for each
 * thread a lost spin takes it from no thread. A pair that is stacked on one CPU moves apart only by spinning.
 */
static inline bool spin_was_wasted(const struct spin *spin)
{
	return spin->crowded && spin->given < spin->len / 8;
}

#define SPIN_REST_FACTOR 64 /* a loss is followed by so many times its length without a spin */
#define SPIN_WASTED_MAX 4 /* wasted spins, less those that won, until one more is followed by a pause */

/* Length that a wait may spin now. */
static inline uint32_t spin_budget_now(const struct spin_budget *budget)
{
	int64_t rests_until = word_load(budget->rests_until);

	return unlikely(rests_until) && now_ns() < rests_until ? 0 : word_load(budget->ns);
}

static inline void spin_won(struct spin_budget *budget)
{
	uint32_t wasted = word_load(budget->wasted);

	if (unlikely(wasted))
		word_store(budget->wasted, wasted - 1);
	if (word_load(budget->ns) != config.spin_ns) {
		word_store(budget->ns, config.spin_ns);
		word_store(budget->idle, false);
	}
}

/*
 * Adapts a budget to a wait that ended in the kernel. If it was so soon that full spinning would have caught it (a wake-up
 * itself costs tens of microseconds), it asks for the full budget. Any other wait halves it, to nothing at last. A wasted
 * spin may mean that the answer had to wait for our sleep. The peer may need this CPU, and be of another control group or
 * session, to which no yield gives it. So if more such spins are lost than are won, the next waits sleep at once.
 */
static inline void spin_adapt(struct spin_budget *budget, int64_t waited_ns, bool wasted_spin)
{
	uint32_t now = word_load(budget->ns), wasted = word_load(budget->wasted), full = config.spin_ns;
	bool soon = waited_ns < 2 * (int64_t)full;

	if (wasted_spin && (soon || now == full)) {
		if (wasted < SPIN_WASTED_MAX)
			word_store(budget->wasted, wasted + 1);
		else
			word_store(budget->rests_until, now_ns() + SPIN_REST_FACTOR * (int64_t)full);
	}
	if (word_load(budget->idle) != (waited_ns > SELDOM_NS))
		word_store(budget->idle, waited_ns > SELDOM_NS);
	if (soon && now != full)
		word_store(budget->ns, full);
	else if (!soon && now)
		word_store(budget->ns, now > full / 16 ? now / 2 : 0);
}

/* A wait has ended by this connection: what the thread has called by itself since the last one is put down to it. */
static inline void calls_count(struct conn_slot *slot)
{
	if (self.calls)
		word_add(slot->wait_calls, self.calls);
	self.calls = 0;
}

/* ---- one connection's wait (shim_wait.c) ---- */
struct wait_clock {
	int64_t began, deadline; /* ns; INT64_MAX: none */
	uint64_t signals;
	uint64_t signals_interrupting;
	bool timed; /* limit by SO_RCVTIMEO or SO_SNDTIMEO */
	bool moved; /* the call has moved bytes */
	bool brief; /* the number is not asked whose it is */
};
void wait_clock_start(struct wait_clock *clock);
/*
 * Waits until the ring may serve `want`, or something else asks for a look. 0, -EINTR or -ETIMEDOUT. The caller is counted
 * among conn->waiters from its first wait until it returns: such a call outlives close(). Cancelled, it is taken out here.
 */
int conn_wait(struct conn *conn, int fd, int want, size_t space, const struct wait_clock *clock);
/* True if bytes have come to a call that would not wait for them, if a short look for them is likely to pay. */
bool conn_lingers(struct conn *conn);

#endif
