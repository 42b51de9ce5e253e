/* Threads that share a connection. */
#include "scene.h"

#include <stdatomic.h>

enum { THREADS = 4 };

struct worker {
	int fd;
	uint8_t mark;
	uint32_t rounds, len;
	uint64_t count;
	uint64_t sums[256];
	long result;
	int error;
	pid_t tid;
	pthread_t thread;
};

static void begin(struct worker *worker, void *(*run)(void *))
{
	NEED(pthread_create(&worker->thread, NULL, run, worker) == 0);
}

static void *send_marks(void *argument)
{
	struct worker *self = argument;
	uint8_t record[4096];
	memset(record, self->mark, sizeof record);
	for (uint32_t i = 0; i < self->rounds; i++) {
		size_t left = self->len;
		while (left > 0) {
			ssize_t wrote = send(self->fd, record, left, MSG_NOSIGNAL);
			NEED(wrote > 0);
			left -= (size_t)wrote;
		}
		self->count += self->len;
	}
	return NULL;
}

static void *take_marks(void *argument)
{
	struct worker *self = argument;
	uint8_t bytes[4096];
	for (;;) {
		ssize_t got = recv(self->fd, bytes, self->len, 0);
		NEED(got >= 0);
		if (got == 0)
			return NULL;
		for (ssize_t i = 0; i < got; i++)
			self->sums[bytes[i]]++;
		self->count += (uint64_t)got;
	}
}

static void many_senders(void)
{
	int fds[2];
	both_ends(fds);
	struct worker senders[THREADS], taker = {.fd = fds[1], .len = 3000};
	begin(&taker, take_marks);
	for (int i = 0; i < THREADS; i++) {
		senders[i] = (struct worker){.fd = fds[0], .mark = (uint8_t)('a' + i), .rounds = 2000, .len = 64};
		begin(&senders[i], send_marks);
	}
	for (int i = 0; i < THREADS; i++)
		NEED(pthread_join(senders[i].thread, NULL) == 0);
	NEED(shutdown(fds[0], SHUT_WR) == 0);
	NEED(pthread_join(taker.thread, NULL) == 0);
	for (int i = 0; i < THREADS; i++)
		say("from %c: %lu", 'a' + i, (unsigned long)taker.sums['a' + i]);
	say("in all %lu", (unsigned long)taker.count);
}

static void many_receivers(void)
{
	int fds[2];
	both_ends(fds);
	struct worker takers[THREADS], sender = {.fd = fds[0], .mark = 'x', .rounds = 4000, .len = 100};
	uint64_t total = 0;
	for (int i = 0; i < THREADS; i++) {
		takers[i] = (struct worker){.fd = fds[1], .len = 77};
		begin(&takers[i], take_marks);
	}
	begin(&sender, send_marks);
	NEED(pthread_join(sender.thread, NULL) == 0);
	NEED(shutdown(fds[0], SHUT_WR) == 0);
	for (int i = 0; i < THREADS; i++) {
		NEED(pthread_join(takers[i].thread, NULL) == 0); /* the end wakes them all */
		NEED(takers[i].sums['x'] == takers[i].count);
		total += takers[i].count;
	}
	say("in all %lu", (unsigned long)total);
}

static void many_both_ways(void)
{
	int fds[2];
	both_ends(fds);
	struct worker senders[2][THREADS], takers[2][THREADS];
	for (int side = 0; side < 2; side++)
		for (int i = 0; i < THREADS; i++) {
			takers[side][i] = (struct worker){.fd = fds[side], .len = 500};
			begin(&takers[side][i], take_marks);
		}
	for (int side = 0; side < 2; side++)
		for (int i = 0; i < THREADS; i++) {
			senders[side][i] = (struct worker){
				.fd = fds[side], .mark = (uint8_t)('a' + i), .rounds = 300, .len = (uint32_t)(1 + i * 777)};
			begin(&senders[side][i], send_marks);
		}
	for (int side = 0; side < 2; side++) {
		for (int i = 0; i < THREADS; i++)
			NEED(pthread_join(senders[side][i].thread, NULL) == 0);
		NEED(shutdown(fds[side], SHUT_WR) == 0);
	}
	for (int side = 0; side < 2; side++) {
		uint64_t sums[THREADS] = {0}, total = 0;
		for (int i = 0; i < THREADS; i++) {
			NEED(pthread_join(takers[side][i].thread, NULL) == 0);
			total += takers[side][i].count;
			for (int j = 0; j < THREADS; j++)
				sums[j] += takers[side][i].sums['a' + j];
		}
		say("side %d: %lu %lu %lu %lu, in all %lu", side, (unsigned long)sums[0], (unsigned long)sums[1],
		    (unsigned long)sums[2], (unsigned long)sums[3], (unsigned long)total);
	}
}

static void *blocked_recv(void *argument)
{
	struct worker *self = argument;
	uint8_t bytes[100];
	__atomic_store_n(&self->tid, gettid(), __ATOMIC_RELEASE);
	self->result = recv(self->fd, bytes, sizeof bytes, 0);
	self->error = errno;
	return NULL;
}

static void *blocked_poll(void *argument)
{
	struct worker *self = argument;
	struct pollfd item = {.fd = self->fd, .events = POLLIN};
	__atomic_store_n(&self->tid, gettid(), __ATOMIC_RELEASE);
	self->result = poll(&item, 1, 10000);
	self->error = (uint16_t)item.revents;
	return NULL;
}

static void *blocked_send(void *argument)
{
	struct worker *self = argument;
	static uint8_t bytes[65536];
	__atomic_store_n(&self->tid, gettid(), __ATOMIC_RELEASE);
	do
		self->result = send(self->fd, bytes, sizeof bytes, MSG_NOSIGNAL);
	while (self->result > 0);
	self->error = errno;
	return NULL;
}

static void begin_asleep(struct worker *worker, void *(*run)(void *))
{
	worker->tid = 0;
	begin(worker, run);
	while (__atomic_load_n(&worker->tid, __ATOMIC_ACQUIRE) == 0)
		sched_yield();
	await_asleep(getpid(), worker->tid);
}

static void say_worker(const char *name, struct worker *worker)
{
	NEED(pthread_join(worker->thread, NULL) == 0);
	say("%s = %ld %s", name, worker->result, worker->result < 0 ? strerrorname_np(worker->error) : "");
}

static void shutdown_wakes_reader(void)
{
	static const int ways[] = {SHUT_RD, SHUT_RDWR};
	for (int i = 0; i < 2; i++) {
		struct pair *pair = open_pair();
		struct worker readers[2] = {{.fd = pair->fd}, {.fd = pair->fd}};
		begin_asleep(&readers[0], blocked_recv);
		begin_asleep(&readers[1], blocked_recv);
		NEED(shutdown(pair->fd, ways[i]) == 0);
		say_worker("recv", &readers[0]);
		say_worker("recv", &readers[1]);
	}
}

static void shutdown_wakes_poll(void)
{
	struct pair *pair = open_pair();
	struct worker waiter = {.fd = pair->fd};
	begin_asleep(&waiter, blocked_poll);
	NEED(shutdown(pair->fd, SHUT_RDWR) == 0);
	NEED(pthread_join(waiter.thread, NULL) == 0);
	say("poll = %ld %s", waiter.result, poll_names((uint32_t)waiter.error));
}

static void *blocked_set(void *argument)
{
	struct worker *self = argument;
	struct epoll_event told = {0};
	__atomic_store_n(&self->tid, gettid(), __ATOMIC_RELEASE);
	self->result = epoll_wait((int)self->rounds, &told, 1, 10000);
	self->error = (int)told.events;
	return NULL;
}

static void low_water_wakes(void)
{
	/* Bytes below the mark are no news until the mark falls: then they wake, as tcp_set_rcvlowat() does. */
	if (choice.shaken)
		return;
	struct pair *pair = open_pair();
	int set = epoll_create1(0), marks[] = {10, 5, 10, 1};
	struct epoll_event event = {.events = EPOLLIN | EPOLLET};
	struct worker polls = {.fd = pair->fd}, waits = {.fd = pair->fd, .rounds = (uint32_t)set};
	NEED(epoll_ctl(set, EPOLL_CTL_ADD, pair->fd, &event) == 0);
	NEED(setsockopt(pair->fd, SOL_SOCKET, SO_RCVLOWAT, &marks[0], sizeof marks[0]) == 0);
	peer_put(pair, 5);
	arrived(pair, 5);
	begin_asleep(&polls, blocked_poll);
	NEED(setsockopt(pair->fd, SOL_SOCKET, SO_RCVLOWAT, &marks[1], sizeof marks[1]) == 0);
	NEED(pthread_join(polls.thread, NULL) == 0);
	say("poll = %ld %s", polls.result, poll_names((uint32_t)polls.error));
	say_ret("the set was told as well", epoll_wait(set, &event, 1, 0));
	NEED(setsockopt(pair->fd, SOL_SOCKET, SO_RCVLOWAT, &marks[2], sizeof marks[2]) == 0);
	begin_asleep(&waits, blocked_set);
	NEED(setsockopt(pair->fd, SOL_SOCKET, SO_RCVLOWAT, &marks[3], sizeof marks[3]) == 0);
	NEED(pthread_join(waits.thread, NULL) == 0);
	say("epoll_wait = %ld %s", waits.result, poll_names((uint32_t)waits.error));
	get(pair, 5);
	stays(pair);
}

static void shutdown_wakes_writer(void)
{
	struct pair *pair = open_pair();
	struct worker writer = {.fd = pair->fd};
	flood(pair);
	begin_asleep(&writer, blocked_send);
	NEED(shutdown(pair->fd, SHUT_WR) == 0);
	say_worker("send", &writer);
}

static void close_under_reader(void)
{
	/* close does not wake a reader; bytes that come later still reach it, and the end comes after it. */
	struct pair *pair = open_pair();
	struct worker reader = {.fd = pair->fd};
	begin_asleep(&reader, blocked_recv);
	NEED(close(pair->fd) == 0);
	say_reply("no end yet", peer(pair, ACT_POLL, POLLIN | POLLRDHUP, 30));
	peer_put(pair, 5);
	say_worker("recv", &reader);
	say_reply("the end", peer(pair, ACT_RECV_ONCE, 5, 0));
}

static void data_wakes_one_of_two(void)
{
	struct pair *pair = open_pair();
	struct worker readers[2] = {{.fd = pair->fd}, {.fd = pair->fd}};
	begin_asleep(&readers[0], blocked_recv);
	begin_asleep(&readers[1], blocked_recv);
	peer_put(pair, 100);
	peer_put(pair, 100);
	NEED(pthread_join(readers[0].thread, NULL) == 0);
	NEED(pthread_join(readers[1].thread, NULL) == 0);
	say("%ld and %ld", readers[0].result, readers[1].result);
}

struct echo_worker {
	int fd;
	pthread_t thread;
};

static void *echo_run(void *argument)
{
	struct echo_worker *self = argument;
	uint8_t bytes[4096];
	ssize_t got;
	while ((got = recv(self->fd, bytes, sizeof bytes, 0)) > 0)
		NEED(send(self->fd, bytes, (size_t)got, 0) == got);
	NEED(got == 0);
	return NULL;
}

static void *call_run(void *argument)
{
	struct worker *self = argument;
	uint8_t out[512], in[512];
	for (uint32_t i = 0; i < self->rounds; i++) {
		size_t len = 1 + (i * 37 + self->mark) % sizeof out;
		fill_pattern(self->mark, i, out, len);
		NEED(send(self->fd, out, len, 0) == (ssize_t)len);
		NEED(recv(self->fd, in, len, MSG_WAITALL) == (ssize_t)len);
		NEED(memcmp(in, out, len) == 0);
		self->count += len;
	}
	return NULL;
}

static void many_connections(void)
{
	/* Each of eight threads calls over its own connection, each answered by a thread of its own. */
	struct worker callers[8];
	struct echo_worker echoes[8];
	for (int i = 0; i < 8; i++) {
		int fds[2];
		both_ends(fds);
		callers[i] = (struct worker){.fd = fds[0], .mark = (uint8_t)i, .rounds = 400};
		echoes[i].fd = fds[1];
		NEED(pthread_create(&echoes[i].thread, NULL, echo_run, &echoes[i]) == 0);
		begin(&callers[i], call_run);
	}
	uint64_t total = 0;
	for (int i = 0; i < 8; i++) {
		NEED(pthread_join(callers[i].thread, NULL) == 0);
		total += callers[i].count;
		NEED(close(callers[i].fd) == 0);
		NEED(pthread_join(echoes[i].thread, NULL) == 0);
	}
	say("in all %lu", (unsigned long)total);
}

static void reader_and_writer(void)
{
	/* One thread only reads, one only writes, both ways at full speed. */
	int fds[2];
	both_ends(fds);
	struct worker workers[4] = {{.fd = fds[0], .mark = 'a', .rounds = 1000, .len = 4000},
	                            {.fd = fds[0], .len = 4096},
	                            {.fd = fds[1], .mark = 'b', .rounds = 1000, .len = 3000},
	                            {.fd = fds[1], .len = 4096}};
	begin(&workers[0], send_marks);
	begin(&workers[1], take_marks);
	begin(&workers[2], send_marks);
	begin(&workers[3], take_marks);
	NEED(pthread_join(workers[0].thread, NULL) == 0);
	NEED(shutdown(fds[0], SHUT_WR) == 0);
	NEED(pthread_join(workers[2].thread, NULL) == 0);
	NEED(shutdown(fds[1], SHUT_WR) == 0);
	NEED(pthread_join(workers[1].thread, NULL) == 0);
	NEED(pthread_join(workers[3].thread, NULL) == 0);
	say("%lu of b, %lu of a", (unsigned long)workers[1].sums['b'], (unsigned long)workers[3].sums['a']);
}

struct refused {
	int fd;
	atomic_bool blocks; /* the socket does, since before it is read here */
	atomic_bool begun, waits;
	unsigned wrong;
};

static void *read_refused(void *argument)
{
	struct refused *self = argument;
	uint8_t byte;
	for (;;) {
		bool blocks = self->blocks;
		self->begun = true;
		self->waits |= blocks;
		ssize_t got = recv(self->fd, &byte, 1, 0);
		if (got == 1)
			return NULL;
		NEED(got < 0 && errno == EAGAIN);
		self->wrong += blocks;
	}
}

static void blocking_ends_refusals(void)
{
	/* One thread reads what has nothing, and is refused, until another makes the socket block. */
	int fds[2];
	both_ends(fds);
	struct refused reader = {.fd = fds[1]};
	for (int i = 0; i < 60; i++) {
		pthread_t thread;
		reader.blocks = reader.begun = reader.waits = false;
		NEED(fcntl(fds[1], F_SETFL, O_NONBLOCK) == 0);
		NEED(pthread_create(&thread, NULL, read_refused, &reader) == 0);
		while (!reader.begun)
			;
		NEED(fcntl(fds[1], F_SETFL, 0) == 0);
		reader.blocks = true;
		/* it may wait since before that */
		for (int turns = 0; turns < 1000 && !reader.waits; turns++)
			;
		NEED(send(fds[0], "x", 1, MSG_NOSIGNAL) == 1);
		NEED(pthread_join(thread, NULL) == 0);
	}
	say("refused after that: %u", reader.wrong);
}

const struct scene scenes_thread[] = {
	SCENE(many_senders),
	SCENE(many_receivers),
	SCENE(many_both_ways),
	SCENE(shutdown_wakes_reader),
	SCENE(shutdown_wakes_poll),
	SCENE(low_water_wakes),
	SCENE(shutdown_wakes_writer),
	SCENE(close_under_reader),
	SCENE(data_wakes_one_of_two),
	SCENE(many_connections),
	SCENE(reader_and_writer),
	SCENE(blocking_ends_refusals),
	{NULL, NULL},
};
