/* engine.c - the thread, its waits, and who has which connection. engine.h tells what for. */
#define _GNU_SOURCE
#include "engine_loan.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define EVENTS 64
#define SPIN_MIN_NS 1000
#define SPIN_MAX_NS 50000
#define AWAY_NS 100000
#define SHARED_NS 20000
#define SPIN_REST_FACTOR 64
#define DUE_MIN_NS 1000000
#define NEWS_MAX 1024u /* numbers that wait for Python; more: it looks at all */
#define FEEDS_MAX 4096u
#define LOOKS_MAX 1000u /* at a wire, with nothing to be done; then its descriptor tells */
#define LOANS 4096u    /* places for numbers of channels; a power of two, and more than there can be relays */

/* Numbers of what epoll tells. */
enum { EVENT_DOORBELL, EVENT_COMMAND, EVENT_LOANS };

struct feed {
	const struct hint_ring *hints;
	uint64_t *seen;
};

struct engine {
	pthread_mutex_t lock; /* of all that follows, and of what is lent */
	_Atomic uint32_t waiters; /* threads that wait for it */
	int epfd, notify_fd, command_fd;
	_Atomic uint64_t *doorbell_word; /* NULL: nobody rings yet */
	int doorbell_fd;
	struct feed *feeds;
	size_t feeds_len;
	struct engine_loan *by_number[LOANS]; /* chains */
	struct engine_loan *ready, **ready_end; /* to be served */
	struct engine_loan *polled; /* whose wires are looked at */
	struct engine_loan *returned, **returned_end;
	int64_t due_ns; /* no loan has a deadline before this; 0: none has one */
	uint32_t news[NEWS_MAX];
	size_t news_len;
	bool news_all;
	bool stop, started;
	pthread_t thread;
};

/* ---- the lock ---- */
static void engine_lock(struct engine *engine)
{
	atomic_fetch_add(&engine->waiters, 1);
	pthread_mutex_lock(&engine->lock);
	atomic_fetch_sub(&engine->waiters, 1);
}

static void engine_unlock(struct engine *engine)
{
	pthread_mutex_unlock(&engine->lock);
}

static void wake(int fd)
{
	uint64_t one = 1;

	if (write(fd, &one, sizeof(one)) < 0)
		return; /* full: then it is readable */
}

static void drain(int fd)
{
	uint64_t count;

	while (read(fd, &count, sizeof(count)) < 0 && errno == EINTR)
		;
}

/* ---- lists; the lock is held ---- */
static void make_ready(struct engine *engine, struct engine_loan *loan)
{
	if (loan->ready || loan->reason)
		return;
	loan->ready = true;
	loan->next_ready = NULL;
	*engine->ready_end = loan;
	engine->ready_end = &loan->next_ready;
}

static struct engine_loan *next_ready(struct engine *engine)
{
	struct engine_loan *loan = engine->ready;

	if (!loan)
		return NULL;
	engine->ready = loan->next_ready;
	if (!engine->ready)
		engine->ready_end = &engine->ready;
	loan->ready = false;
	return loan;
}

static struct engine_loan **place_of(struct engine *engine, uint32_t number)
{
	return &engine->by_number[number % LOANS];
}

static struct engine_loan *loan_of(struct engine *engine, uint32_t number)
{
	struct engine_loan *loan = *place_of(engine, number);

	while (loan && loan->number != number)
		loan = loan->next_number;
	return loan;
}

static void unlink_ready(struct engine *engine, struct engine_loan *loan)
{
	struct engine_loan **at = &engine->ready;

	if (!loan->ready)
		return;
	while (*at != loan)
		at = &(*at)->next_ready;
	*at = loan->next_ready;
	if (!*at)
		engine->ready_end = at;
	loan->ready = false;
}

/* ---- what the set watches of a wire ---- */
static void forget(struct engine *engine, const struct wire *wire)
{
	epoll_ctl(engine->epfd, EPOLL_CTL_DEL, wire->receive_fd, NULL);
	if (wire->send_fd != wire->receive_fd)
		epoll_ctl(engine->epfd, EPOLL_CTL_DEL, wire->send_fd, NULL);
}

/* 0 or -errno */
static int watch(struct engine *engine, const struct wire *wire, uint32_t number)
{
	bool one = wire->send_fd == wire->receive_fd;
	struct epoll_event in = {.events = EPOLLIN | EPOLLRDHUP | EPOLLET, .data.u64 = EVENT_LOANS + number};
	struct epoll_event out = {.events = EPOLLOUT | EPOLLET, .data.u64 = EVENT_LOANS + number};

	if (one)
		in.events |= EPOLLOUT;
	if (epoll_ctl(engine->epfd, EPOLL_CTL_ADD, wire->receive_fd, &in) < 0)
		return -errno;
	if (one || epoll_ctl(engine->epfd, EPOLL_CTL_ADD, wire->send_fd, &out) == 0)
		return 0;
	int failed = errno;
	epoll_ctl(engine->epfd, EPOLL_CTL_DEL, wire->receive_fd, NULL);
	return -failed;
}

/* ---- wires whose descriptor tells nothing unless it is asked to ---- */
static void keep_polled(struct engine *engine, struct engine_loan *loan)
{
	loan->looks = 0;
	if (loan->polled || !loan->by.wire.ops->look)
		return;
	loan->polled = true;
	loan->next_polled = engine->polled;
	engine->polled = loan;
}

static void unlink_polled(struct engine *engine, struct engine_loan *loan)
{
	struct engine_loan **at = &engine->polled;

	if (!loan->polled)
		return;
	while (*at != loan)
		at = &(*at)->next_polled;
	*at = loan->next_polled;
	loan->polled = false;
}

/* Looks at each; one that has had nothing for long, or all if the wait `sleeps`, is woken by its descriptor from now on. */
static void look_at_wires(struct engine *engine, bool sleeps)
{
	struct engine_loan *next;

	for (struct engine_loan *loan = engine->polled; loan; loan = next) {
		struct wire *wire = &loan->by.wire;
		next = loan->next_polled;
		if (wire->ops->look(wire)) {
			make_ready(engine, loan);
		} else if (sleeps || ++loan->looks > LOOKS_MAX) {
			if (wire->ops->arm(wire))
				unlink_polled(engine, loan);
			else
				make_ready(engine, loan);
		}
	}
}

/* It is Python's from now on, though nobody has looked yet. */
static void give_back(struct engine *engine, struct engine_loan *loan, enum engine_reason reason)
{
	struct engine_loan **at = place_of(engine, loan->number);

	if (loan->reason)
		return;
	forget(engine, &loan->by.wire);
	while (*at != loan)
		at = &(*at)->next_number;
	*at = loan->next_number;
	unlink_ready(engine, loan);
	unlink_polled(engine, loan);
	loan->reason = loan_end(loan) ? reason : ENGINE_BROKEN;
}

static void tell_returned(struct engine *engine, struct engine_loan *loan)
{
	loan->next_returned = NULL;
	*engine->returned_end = loan;
	engine->returned_end = &loan->next_returned;
	wake(engine->notify_fd);
}

/* ---- making ---- */
struct engine *engine_new(void)
{
	struct engine *engine = calloc(1, sizeof(*engine));
	struct epoll_event event = {.events = EPOLLIN, .data.u64 = EVENT_COMMAND};

	if (!engine)
		return NULL;
	pthread_mutex_init(&engine->lock, NULL);
	engine->ready_end = &engine->ready;
	engine->returned_end = &engine->returned;
	engine->doorbell_fd = -1;
	engine->epfd = epoll_create1(EPOLL_CLOEXEC);
	engine->notify_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	engine->command_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (engine->epfd >= 0 && engine->notify_fd >= 0 && engine->command_fd >= 0 &&
	    epoll_ctl(engine->epfd, EPOLL_CTL_ADD, engine->command_fd, &event) == 0)
		return engine;
	int failed = errno;
	engine_free(engine);
	errno = failed;
	return NULL;
}

void engine_free(struct engine *engine)
{
	int fds[] = {engine->epfd, engine->notify_fd, engine->command_fd};

	if (engine->started) {
		engine_lock(engine);
		engine->stop = true;
		engine_unlock(engine);
		wake(engine->command_fd);
		pthread_join(engine->thread, NULL);
	}
	for (int i = 0; i < 3; i++)
		if (fds[i] >= 0)
			close(fds[i]);
	pthread_mutex_destroy(&engine->lock);
	free(engine->feeds);
	free(engine);
}

static bool is_to_stop(struct engine *engine)
{
	engine_lock(engine);
	bool stop = engine->stop;
	engine_unlock(engine);
	return stop;
}

/*
 * What comes often comes soon: to look again for a moment is cheaper than to be woken. The budget doubles when something came
 * while it lasted, and halves when not. The CPU is offered to others between two looks, and what that costs is measured, as in
 * shim_spin.c: who lost it for longer than a sleep and a wake-up take should have slept, and does so for a while.
 */
struct spin {
	int64_t budget, until, rests_until;
	int64_t away; /* for how long the CPU was with others before this look, if that was long */
	bool begun;
};

static bool spin_lost(struct spin *spin, int64_t now, int64_t away)
{
	spin->rests_until = now + SPIN_REST_FACTOR * away;
	spin->begun = false;
	return false;
}

static bool spins(struct spin *spin, bool any)
{
	int64_t now = loan_clock();

	if (any) {
		if (spin->begun && spin->budget < SPIN_MAX_NS)
			spin->budget *= 2;
		spin->begun = false;
		return true;
	}
	if (!spin->begun) {
		if (now < spin->rests_until)
			return false;
		spin->begun = true;
		spin->until = now + spin->budget;
	} else if (spin->away) { /* and nothing has come of it */
		return spin_lost(spin, now, spin->away);
	}
	if (now >= spin->until) {
		if (spin->budget > SPIN_MIN_NS)
			spin->budget /= 2;
		spin->begun = false;
		return false;
	}
	sched_yield();
	int64_t away = loan_clock() - now;
	if (away > AWAY_NS)
		return spin_lost(spin, now + away, away);
	spin->away = away > SHARED_NS ? away : 0;
	return true;
}

static void *run(void *argument)
{
	struct engine *engine = argument;
	struct spin spin = {.budget = SPIN_MIN_NS};

	while (!is_to_stop(engine)) {
		if (!spins(&spin, engine_step(engine, 0)))
			engine_step(engine, -1);
	}
	return NULL;
}

int engine_start(struct engine *engine, const cpu_set_t *cpus)
{
	sigset_t all, before;
	pthread_attr_t how;

	if (engine->started)
		return 0;
	pthread_attr_init(&how);
	sigfillset(&all); /* signals are Python's */
	pthread_sigmask(SIG_SETMASK, &all, &before);
	int failed = cpus ? pthread_attr_setaffinity_np(&how, sizeof(*cpus), cpus) : 0;
	if (!failed)
		failed = pthread_create(&engine->thread, &how, run, engine);
	pthread_attr_destroy(&how);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	engine->started = !failed;
	return -failed;
}

int engine_fd(const struct engine *engine)
{
	return engine->notify_fd;
}

void engine_clear_notify(struct engine *engine)
{
	drain(engine->notify_fd);
}

/* ---- who rings ---- */
int engine_doorbell(struct engine *engine, _Atomic uint64_t *word, int wait_fd)
{
	struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.u64 = EVENT_DOORBELL};
	int result = 0;

	engine_lock(engine);
	if (engine->doorbell_word)
		epoll_ctl(engine->epfd, EPOLL_CTL_DEL, engine->doorbell_fd, NULL);
	if (word && epoll_ctl(engine->epfd, EPOLL_CTL_ADD, wait_fd, &event) < 0)
		result = -errno;
	engine->doorbell_word = result ? NULL : word;
	engine->doorbell_fd = wait_fd;
	engine_unlock(engine);
	wake(engine->command_fd);
	return result;
}

int engine_feed_add(struct engine *engine, const struct hint_ring *hints, uint64_t *seen)
{
	int result = -ENOMEM;

	engine_lock(engine);
	struct feed *feeds =
		engine->feeds_len < FEEDS_MAX ? realloc(engine->feeds, (engine->feeds_len + 1) * sizeof(*feeds)) : NULL;
	if (feeds) {
		engine->feeds = feeds;
		feeds[engine->feeds_len++] = (struct feed){hints, seen};
		result = 0;
	}
	engine_unlock(engine);
	return result;
}

void engine_feed_remove(struct engine *engine, const struct hint_ring *hints)
{
	engine_lock(engine);
	for (size_t i = 0; i < engine->feeds_len; i++)
		if (engine->feeds[i].hints == hints) {
			engine->feeds[i] = engine->feeds[--engine->feeds_len];
			break;
		}
	engine_unlock(engine);
}

static void news_of(struct engine *engine, uint32_t number)
{
	struct engine_loan *loan = loan_of(engine, number);

	if (loan) {
		make_ready(engine, loan);
		return;
	}
	if (engine->news_len < NEWS_MAX)
		engine->news[engine->news_len++] = number;
	else
		engine->news_all = true;
	wake(engine->notify_fd);
}

static void all_news(struct engine *engine)
{
	for (size_t i = 0; i < LOANS; i++)
		for (struct engine_loan *loan = engine->by_number[i]; loan; loan = loan->next_number)
			make_ready(engine, loan);
	engine->news_all = true;
	wake(engine->notify_fd);
}

/* What applications have named since the last look. */
static void feeds_look(struct engine *engine)
{
	for (size_t i = 0; i < engine->feeds_len; i++) {
		struct feed *feed = engine->feeds + i;
		uint64_t tail = atomic_load_explicit(&feed->hints->tail, memory_order_acquire);
		bool lost = tail - *feed->seen > HINTS; /* a stranger's count: it costs him and us one look at all */

		if (lost)
			*feed->seen = tail;
		for (; *feed->seen != tail; ++*feed->seen) {
			uint64_t entry = atomic_load_explicit(&feed->hints->entry[*feed->seen % HINTS], memory_order_acquire);
			if (hint_valid(entry, *feed->seen))
				news_of(engine, (uint32_t)entry);
			else
				lost = true;
		}
		if (lost)
			all_news(engine);
	}
}

size_t engine_news(struct engine *engine, uint32_t *numbers, size_t len, bool *all)
{
	engine_lock(engine);
	size_t count = engine->news_len < len ? engine->news_len : len;

	memcpy(numbers, engine->news, count * sizeof(*numbers));
	*all = engine->news_all || count < engine->news_len;
	engine->news_len = 0;
	engine->news_all = false;
	engine_unlock(engine);
	return count;
}

/* ---- lending ---- */
struct engine_loan *engine_lend(struct engine *engine, const struct engine_record *record, struct channel_end *end,
                                const struct channel_side *words, const struct engine_peer_doorbell *doorbell,
                                uint32_t number, const struct engine_way *way, void *user)
{
	struct engine_loan *loan = calloc(1, sizeof(*loan));

	if (!loan)
		return NULL;
	loan_begin(loan, record, end, words, doorbell, number, way, user);
	engine_lock(engine);
	int failed = watch(engine, &loan->by.wire, number);
	if (failed) {
		engine_unlock(engine);
		free(loan);
		errno = -failed;
		return NULL;
	}
	loan->next_number = *place_of(engine, number);
	*place_of(engine, number) = loan;
	make_ready(engine, loan);
	engine_unlock(engine);
	wake(engine->command_fd);
	return loan;
}

enum engine_reason engine_take(struct engine *engine, struct engine_loan *loan, struct engine_record *record,
                               int *error)
{
	engine_lock(engine);
	give_back(engine, loan, ENGINE_ASKED);
	for (struct engine_loan **at = &engine->returned; *at; at = &(*at)->next_returned)
		if (*at == loan) {
			*at = loan->next_returned;
			if (!*at)
				engine->returned_end = at;
			break;
		}
	engine_unlock(engine);
	enum engine_reason reason = loan->reason;
	*record = loan->record;
	*error = loan->by.wire.error;
	free(loan);
	return reason;
}

void *engine_returned(struct engine *engine)
{
	void *user = NULL;

	engine_lock(engine);
	struct engine_loan *loan = engine->returned;
	if (loan) {
		user = loan->user;
		engine->returned = loan->next_returned;
		if (!engine->returned)
			engine->returned_end = &engine->returned;
	}
	engine_unlock(engine);
	return user;
}

void engine_look(struct engine *engine, const struct engine_loan *loan, struct engine_record *record)
{
	engine_lock(engine);
	*record = loan->record;
	engine_unlock(engine);
}

/* ---- a turn ---- */
/* Nothing is ready. Whether the wait may sleep: from here on applications ring. */
static bool falls_asleep(struct engine *engine)
{
	if (engine->doorbell_word) {
		doorbell_word_sleep(engine->doorbell_word); /* full fence */
		feeds_look(engine);
	}
	look_at_wires(engine, true);
	return !engine->ready;
}

static void handle_epoll_event(struct engine *engine, const struct epoll_event *event)
{
	if (event->data.u64 == EVENT_COMMAND) {
		drain(engine->command_fd);
	} else if (event->data.u64 == EVENT_DOORBELL) {
		struct epoll_event edge;
		epoll_wait(engine->doorbell_fd, &edge, 1, 0);
	} else {
		/* by its number: it may have been taken back since */
		struct engine_loan *loan = loan_of(engine, (uint32_t)(event->data.u64 - EVENT_LOANS));
		if (!loan)
			return;
		loan->by.wire.readable |= (event->events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0;
		loan->by.wire.ended |= (event->events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0;
		loan->by.wire.blocked &= !(event->events & (EPOLLOUT | EPOLLHUP | EPOLLERR));
		make_ready(engine, loan);
	}
}

static void comes_due(struct engine *engine, const struct engine_loan *loan, int64_t now)
{
	int64_t due = loan_deadline(loan);

	if (due && due < now + DUE_MIN_NS) /* who cannot do what was due is asked again, but not at once */
		due = now + DUE_MIN_NS;
	if (due && (!engine->due_ns || due < engine->due_ns))
		engine->due_ns = due;
}

static void serve(struct engine *engine, struct engine_loan *loan, int64_t now)
{
	enum engine_reason reason = loan_turn(loan, now);

	if (reason) {
		give_back(engine, loan, reason);
		tell_returned(engine, loan);
		return;
	}
	if (loan->more)
		make_ready(engine, loan);
	keep_polled(engine, loan);
	comes_due(engine, loan, now);
}

/* Those whose time has come are looked at anew. */
static void look_at_due(struct engine *engine, int64_t now)
{
	if (!engine->due_ns || now < engine->due_ns)
		return;
	engine->due_ns = 0;
	for (size_t i = 0; i < LOANS; i++)
		for (struct engine_loan *loan = engine->by_number[i]; loan; loan = loan->next_number) {
			int64_t due = loan_deadline(loan);
			if (due && due <= now)
				make_ready(engine, loan);
			else
				comes_due(engine, loan, now);
		}
}

/* For how long it may wait, in milliseconds, of at most so many. */
static int may_wait(const struct engine *engine, int timeout_ms)
{
	if (!engine->due_ns || !timeout_ms)
		return timeout_ms;
	int64_t left = engine->due_ns - loan_clock(), left_ms = left > 0 ? left / 1000000 + 1 : 0;

	return timeout_ms < 0 || left_ms < timeout_ms ? (int)left_ms : timeout_ms;
}

bool engine_step(struct engine *engine, int timeout_ms)
{
	struct epoll_event events[EVENTS];

	engine_lock(engine);
	int most = may_wait(engine, timeout_ms);
	feeds_look(engine);
	look_at_wires(engine, false);
	bool busy = engine->ready != NULL;
	_Atomic uint64_t *asleep = !busy && timeout_ms ? engine->doorbell_word : NULL;
	if (!busy && timeout_ms && !falls_asleep(engine))
		busy = true;
	engine_unlock(engine);
	int count = epoll_wait(engine->epfd, events, EVENTS, busy ? 0 : most);
	engine_lock(engine);
	if (asleep && engine->doorbell_word == asleep) {
		doorbell_word_wake(asleep);
		feeds_look(engine);
	}
	for (int i = 0; i < count; i++)
		handle_epoll_event(engine, events + i);
	int64_t now = loan_clock();
	look_at_due(engine, now);
	/* those that are ready now, once each: what they make ready comes with the next turn */
	bool any = engine->ready != NULL;
	size_t turns = 0;
	for (struct engine_loan *loan = engine->ready; loan; loan = loan->next_ready)
		turns++;
	while (turns--) {
		struct engine_loan *loan = next_ready(engine);
		if (!loan)
			break; /* taken back meanwhile */
		serve(engine, loan, now);
		if (atomic_load(&engine->waiters)) {
			engine_unlock(engine);
			sched_yield();
			engine_lock(engine);
		}
	}
	engine_unlock(engine);
	return any || count > 0;
}
