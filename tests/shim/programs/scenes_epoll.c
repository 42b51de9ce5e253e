/* epoll: level and edge, user data, one event a registration, sets over fork. */
#include "scene.h"

static uint8_t data[1 << 20];

/* What still holds is not told again, but once more when a connection is promoted in the midst, or goes to TCP and back:
 * the kernel does not say whether it has told it. */
static void say_no_edge(const char *name, int set)
{
	struct epoll_event event;
	if (choice.warm && !choice.shaken)
		say_wait(name, set, 8, 0);
	else
		epoll_wait(set, &event, 1, 0);
}

/* New data is told; what still holds may have been told once more before it. */
static void say_edge_in(const char *name, int set)
{
	struct epoll_event event;
	int count;
	do
		count = epoll_wait(set, &event, 1, 5000);
	while ((choice.shaken || !choice.warm) && count == 1 && !(event.events & EPOLLIN));
	say("%s = %d %s", name, count, count == 1 ? poll_names(event.events) : "");
}

static void epoll_level(void)
{
	struct pair *pair = open_pair();
	int set = set_new();
	say_ret("wait, empty set", epoll_wait(set, (struct epoll_event[1]){{0}}, 1, 0));
	say_ret("add", set_ctl(set, EPOLL_CTL_ADD, pair->fd, EPOLLIN, 0x1122334455667788));
	say_wait("nothing", set, 8, 0);
	peer_put(pair, 10);
	arrived(pair, 10);
	say_wait("data", set, 8, 1000);
	say_wait("data still", set, 8, 0);
	get(pair, 4);
	say_wait("some data still", set, 8, 0);
	get(pair, 6);
	say_wait("none", set, 8, 0);
	say_ret("mod", set_ctl(set, EPOLL_CTL_MOD, pair->fd, EPOLLIN | EPOLLOUT | EPOLLRDHUP, 2));
	say_wait("room", set, 8, 0);
	peer_put(pair, 10);
	arrived(pair, 10);
	say_wait("room and data", set, 8, 0);
	say_ret("mod", set_ctl(set, EPOLL_CTL_MOD, pair->fd, EPOLLRDHUP, 3));
	say_wait("neither asked for", set, 8, 0);
	say_ret("mod", set_ctl(set, EPOLL_CTL_MOD, pair->fd, 0, 4));
	say_wait("nothing asked for", set, 8, 0);
	say_ret("mod", set_ctl(set, EPOLL_CTL_MOD, pair->fd, EPOLLIN | EPOLLRDNORM | EPOLLRDHUP, 5));
	say_wait("in two words", set, 8, 0);
	stays(pair);
	peer(pair, ACT_SHUTDOWN, SHUT_WR, 0);
	await_fin(pair);
	say_wait("data and end", set, 8, 0);
	get(pair, 10);
	say_wait("end", set, 8, 0);
	say_wait("end still", set, 8, 0);
	NEED(shutdown(pair->fd, SHUT_WR) == 0);
	say_wait("both ends", set, 8, 0);
	say_ret("del", epoll_ctl(set, EPOLL_CTL_DEL, pair->fd, NULL));
	say_wait("gone", set, 8, 0);
}

static void epoll_ctl_errors(void)
{
	struct pair *pair = open_pair();
	int set = set_new(), pipes[2], closed = dup(pair->fd);
	close(closed);
	NEED(pipe(pipes) == 0);
	int file = open("/proc/self/exe", O_RDONLY);
	say_ret("mod before add", set_ctl(set, EPOLL_CTL_MOD, pair->fd, EPOLLIN, 0));
	say_ret("del before add", set_ctl(set, EPOLL_CTL_DEL, pair->fd, EPOLLIN, 0));
	say_ret("add", set_ctl(set, EPOLL_CTL_ADD, pair->fd, EPOLLIN, 0));
	say_ret("add again", set_ctl(set, EPOLL_CTL_ADD, pair->fd, EPOLLIN, 0));
	say_ret("add a closed one", set_ctl(set, EPOLL_CTL_ADD, closed, EPOLLIN, 0));
	say_ret("add a file", set_ctl(set, EPOLL_CTL_ADD, file, EPOLLIN, 0));
	say_ret("add itself", set_ctl(set, EPOLL_CTL_ADD, set, EPOLLIN, 0));
	say_ret("add to a socket", set_ctl(pair->fd, EPOLL_CTL_ADD, pipes[0], EPOLLIN, 0));
	say_ret("bad op", set_ctl(set, 77, pair->fd, EPOLLIN, 0));
	say_ret("del", set_ctl(set, EPOLL_CTL_DEL, pair->fd, EPOLLIN, 0));
	say_ret("del again", set_ctl(set, EPOLL_CTL_DEL, pair->fd, EPOLLIN, 0));
	say_ret("wait for none", epoll_wait(set, (struct epoll_event[1]){{0}}, 0, 0));
	volatile int less = -1; /* the compiler need not see it */
	say_ret("wait for less", epoll_wait(set, (struct epoll_event[1]){{0}}, less, 0));
	say_ret("wait on a socket", epoll_wait(pair->fd, (struct epoll_event[1]){{0}}, 1, 0));
	say_ret("wait on a closed one", epoll_wait(closed, (struct epoll_event[1]){{0}}, 1, 0));
	put(pair, 1);
	peer_get(pair, 1);
	stays(pair);
}

static void epoll_user_data(void)
{
	static const uint64_t users[] = {
		0, 1, UINT64_MAX, 0x8000000000000000, 0x7fffffffffffffff, 0xdeadbeefcafebabe, 0xffffffff, 0xffffffff00000000,
	};
	enum { COUNT = sizeof users / sizeof *users };
	struct pair *pairs[COUNT];
	int set = set_new();
	for (int i = 0; i < COUNT; i++) {
		pairs[i] = open_pair();
		NEED(set_ctl(set, EPOLL_CTL_ADD, pairs[i]->fd, EPOLLIN | EPOLLOUT, users[i]) == 0);
	}
	say_wait("all writable", set, 64, 0);
	for (int i = 0; i < COUNT; i++) {
		peer_put(pairs[i], 1);
		arrived(pairs[i], 1);
	}
	say_wait("all readable too, one event each", set, 64, 0);
	for (int i = 0; i < COUNT; i++)
		NEED(set_ctl(set, EPOLL_CTL_MOD, pairs[i]->fd, EPOLLIN, 42) == 0);
	say_wait("the same user data for all", set, 64, 0);
	for (int i = 0; i < COUNT; i++) {
		get(pairs[i], 1);
		NEED(set_ctl(set, EPOLL_CTL_MOD, pairs[i]->fd, EPOLLIN, users[COUNT - 1 - i]) == 0);
	}
	say_wait("none", set, 64, 0);
	peer_put(pairs[2], 1);
	say_wait("one", set, 64, 1000);
	stays(pairs[0]);
}

static void epoll_edge(void)
{
	struct pair *pair = open_pair();
	int set = set_new();
	peer_put(pair, 10);
	arrived(pair, 10);
	NEED(set_ctl(set, EPOLL_CTL_ADD, pair->fd, EPOLLIN | EPOLLET, 9) == 0);
	say_wait("data from before the add", set, 8, 1000);
	say_no_edge("not twice", set);
	get(pair, 4);
	say_no_edge("nor after a partial read", set);
	peer_put(pair, 5);
	arrived(pair, 11);
	say_wait("new data, the old not all read", set, 8, 1000);
	say_no_edge("not twice", set);
	get(pair, 11);
	say_wait("nor when empty", set, 8, 0);
	peer_put(pair, 5);
	say_wait("new data", set, 8, 1000);
	say_ret("mod", set_ctl(set, EPOLL_CTL_MOD, pair->fd, EPOLLIN | EPOLLET, 10));
	say_wait("a mod looks anew", set, 8, 0);
	say_no_edge("not twice", set);
	get(pair, 5);
	peer_when_asleep(pair, ACT_SEND, 5, 0);
	say_wait("waited for", set, 8, 5000);
	peer_done();
	get(pair, 5);
	for (int i = 0; i < 100; i++) {
		struct epoll_event event;
		peer_put(pair, 3);
		NEED(epoll_wait(set, &event, 1, 5000) == 1 && event.events == EPOLLIN && event.data.u64 == 10);
		get(pair, 3);
	}
	stays(pair);
	peer(pair, ACT_SHUTDOWN, SHUT_WR, 0);
	say_wait("end", set, 8, 5000);
	say_no_edge("not twice", set);
}

static void epoll_edge_out(void)
{
	struct pair *pair = open_pair();
	int set = set_new();
	NEED(set_ctl(set, EPOLL_CTL_ADD, pair->fd, EPOLLIN | EPOLLOUT | EPOLLET | EPOLLRDHUP, 9) == 0);
	say_wait("room at the add", set, 8, 1000);
	say_no_edge("not twice", set);
	long total = flood(pair);
	struct epoll_event event;
	while (epoll_wait(set, &event, 1, 0) > 0)
		; /* while filling, room may have come and gone */
	say_wait("full", set, 8, 20);
	peer_when_asleep(pair, ACT_RECV, total, 0);
	say_wait("room again", set, 8, 10000);
	peer_done();
	while (epoll_wait(set, &event, 1, 0) > 0)
		;
	total = flood(pair);
	while (epoll_wait(set, &event, 1, 0) > 0)
		;
	peer_get(pair, (size_t)total);
	say_wait("room while not waiting", set, 8, 5000);
	peer_put(pair, 4);
	arrived(pair, 4);
	say_wait("data", set, 8, 5000);
	get(pair, 4);
	peer_put(pair, 5);
	arrived(pair, 5);
	get(pair, 5);
	say_wait("room, as bytes came that were read", set, 8, 5000);
	stays(pair);
}

/* As Go copies from a connection: what a pipe holds goes out by calls that do not wait, and then an edge is waited for. */
static void epoll_edge_out_splice(void)
{
	struct pair *pair = open_pair();
	struct epoll_event event;
	int set = set_new(), pipes[2];
	long total = 0, held = 0;
	bool full = false;
	NEED(pipe(pipes) == 0);
	nonblocking(pair->fd, true);
	NEED(set_ctl(set, EPOLL_CTL_ADD, pair->fd, EPOLLIN | EPOLLOUT | EPOLLET, 9) == 0);
	say_wait("room at the add", set, 8, 1000);
	for (;;) {
		if (!held) {
			held = 8192;
			NEED(write(pipes[1], pattern_out(pair, (size_t)held), (size_t)held) == held);
		}
		ssize_t wrote = splice(pipes[0], NULL, pair->fd, NULL, (size_t)held, SPLICE_F_NONBLOCK);
		if (wrote < 0 && errno == EAGAIN) {
			if (full)
				break;
			struct pollfd item = {.fd = pair->fd, .events = POLLOUT};
			full = poll(&item, 1, 100) == 0; /* see flood() */
			continue;
		}
		NEED(wrote > 0);
		full = false;
		sent(pair, wrote);
		held -= wrote;
		total += wrote;
	}
	while (epoll_wait(set, &event, 1, 0) > 0)
		; /* while filling, room may have come and gone */
	say_ret("full", splice(pipes[0], NULL, pair->fd, NULL, (size_t)held, SPLICE_F_NONBLOCK));
	peer_when_asleep(pair, ACT_RECV, total, 0);
	say_wait("room again", set, 8, 10000);
	peer_done();
	sent(pair, say_ret("the rest", splice(pipes[0], NULL, pair->fd, NULL, 1, SPLICE_F_NONBLOCK)));
	peer_get(pair, 1);
	stays(pair);
}

static void epoll_level_out(void)
{
	struct pair *pair = open_pair();
	int set = set_new();
	NEED(set_ctl(set, EPOLL_CTL_ADD, pair->fd, EPOLLOUT, 9) == 0);
	say_wait("room", set, 8, 0);
	say_wait("room still", set, 8, 0);
	long total = flood(pair);
	say_wait("full", set, 8, 20);
	peer_when_asleep(pair, ACT_RECV, total, 0);
	say_wait("room again", set, 8, 10000);
	peer_done();
	say_wait("and again", set, 8, 0);
	NEED(set_ctl(set, EPOLL_CTL_MOD, pair->fd, EPOLLIN, 9) == 0);
	total = flood(pair);
	NEED(set_ctl(set, EPOLL_CTL_MOD, pair->fd, EPOLLIN | EPOLLOUT, 9) == 0);
	say_wait("full", set, 8, 20);
	peer_get(pair, (size_t)total);
	say_wait("asked for when full", set, 8, 5000);
	stays(pair);
}

static void epoll_hup(void)
{
	struct pair *pair = open_pair(), *reset = open_pair(), *shut = open_pair();
	int set = set_new();
	NEED(set_ctl(set, EPOLL_CTL_ADD, pair->fd, EPOLLIN | EPOLLRDHUP, 1) == 0);
	NEED(set_ctl(set, EPOLL_CTL_ADD, reset->fd, 0, 2) == 0);
	NEED(set_ctl(set, EPOLL_CTL_ADD, shut->fd, EPOLLIN | EPOLLET, 3) == 0);
	say_wait("nothing", set, 8, 0);
	peer_when_asleep(pair, ACT_SHUTDOWN, SHUT_WR, 0);
	say_wait("end", set, 8, 5000);
	peer_done();
	NEED(set_ctl(set, EPOLL_CTL_DEL, pair->fd, 0, 1) == 0);
	peer_when_asleep(reset, ACT_ABORT, 0, 0);
	say_wait("reset", set, 8, 5000);
	peer_done();
	NEED(close(reset->fd) == 0);
	say_wait("closed", set, 8, 0);
	NEED(shutdown(shut->fd, SHUT_RDWR) == 0);
	say_wait("shut down here", set, 8, 1000);
}

static void epoll_oneshot(void)
{
	struct pair *pair = open_pair();
	int set = set_new();
	NEED(set_ctl(set, EPOLL_CTL_ADD, pair->fd, EPOLLIN | EPOLLONESHOT, 1) == 0);
	peer_put(pair, 5);
	say_wait("once", set, 8, 5000);
	say_wait("and no more", set, 8, 0);
	peer_put(pair, 5);
	arrived(pair, 10);
	say_wait("not for new data either", set, 8, 0);
	NEED(set_ctl(set, EPOLL_CTL_MOD, pair->fd, EPOLLIN | EPOLLONESHOT, 2) == 0);
	say_wait("armed again", set, 8, 5000);
	say_wait("once", set, 8, 0);
	get(pair, 10);
	NEED(set_ctl(set, EPOLL_CTL_MOD, pair->fd, EPOLLIN | EPOLLOUT | EPOLLET | EPOLLONESHOT, 3) == 0);
	say_wait("room", set, 8, 5000);
	peer_put(pair, 5);
	arrived(pair, 5);
	say_wait("nothing", set, 8, 0);
	get(pair, 5);
	for (int i = 0; i < 100; i++) {
		struct epoll_event event;
		NEED(set_ctl(set, EPOLL_CTL_MOD, pair->fd, EPOLLIN | EPOLLONESHOT, 4) == 0);
		peer_put(pair, 3);
		NEED(epoll_wait(set, &event, 1, 5000) == 1 && event.data.u64 == 4);
		get(pair, 3);
	}
	put(pair, 10);
	peer_get(pair, 10);
}

static void epoll_oneshot_before(void)
{
	/* What a one-shot registration has told, or has not, is as it was when the connection is promoted. */
	struct pair *told = open_pair_raw(), *armed = open_pair_raw(), *again = open_pair_raw();
	int set = set_new();
	NEED(set_ctl(set, EPOLL_CTL_ADD, told->fd, EPOLLIN | EPOLLONESHOT, 1) == 0);
	NEED(set_ctl(set, EPOLL_CTL_ADD, armed->fd, EPOLLIN | EPOLLONESHOT, 2) == 0);
	NEED(set_ctl(set, EPOLL_CTL_ADD, again->fd, EPOLLIN | EPOLLOUT | EPOLLONESHOT, 3) == 0);
	peer_put(told, 5);
	say_wait("data, and room", set, 8, 5000);
	NEED(set_ctl(set, EPOLL_CTL_MOD, again->fd, EPOLLIN | EPOLLONESHOT, 4) == 0);
	get(told, 5);
	if (choice.warm) {
		warm_up(told);
		warm_up(armed);
		warm_up(again);
	}
	peer_put(told, 5);
	arrived(told, 5);
	say_wait("not armed", set, 8, 0);
	peer_put(armed, 5);
	say_wait("armed", set, 8, 5000);
	say_wait("once", set, 8, 0);
	peer_put(again, 5);
	say_wait("armed again", set, 8, 5000);
	say_wait("once", set, 8, 0);
	NEED(set_ctl(set, EPOLL_CTL_MOD, told->fd, EPOLLIN | EPOLLONESHOT, 5) == 0);
	say_wait("at last", set, 8, 5000);
	get(told, 5);
	get(armed, 5);
	get(again, 5);
}

static void epoll_exclusive(void)
{
	struct pair *pair = open_pair();
	int set = set_new();
	say_ret("add exclusive", set_ctl(set, EPOLL_CTL_ADD, pair->fd, EPOLLIN | EPOLLEXCLUSIVE, 1));
	peer_put(pair, 5);
	say_wait("data", set, 8, 5000);
	say_ret("mod of it", set_ctl(set, EPOLL_CTL_MOD, pair->fd, EPOLLIN, 1));
	get(pair, 5);
	say_ret("del", set_ctl(set, EPOLL_CTL_DEL, pair->fd, 0, 0));
	say_ret("exclusive and one-shot",
	        set_ctl(set, EPOLL_CTL_ADD, pair->fd, EPOLLIN | EPOLLEXCLUSIVE | EPOLLONESHOT, 1));
	say_ret("add exclusive edge", set_ctl(set, EPOLL_CTL_ADD, pair->fd, EPOLLIN | EPOLLEXCLUSIVE | EPOLLET, 1));
	peer_when_asleep(pair, ACT_SEND, 5, 0);
	say_wait("data", set, 8, 5000);
	peer_done();
	get(pair, 5);
	put(pair, 10);
	peer_get(pair, 10);
	stays(pair);
}

static void epoll_exclusive_before(void)
{
	/* The entry is exclusive in the kernel when the connection is promoted, and in two sets. */
	struct pair *pair = open_pair_raw();
	int one = set_new(), other = set_new();
	NEED(set_ctl(one, EPOLL_CTL_ADD, pair->fd, EPOLLIN | EPOLLEXCLUSIVE, 1) == 0);
	NEED(set_ctl(other, EPOLL_CTL_ADD, pair->fd, EPOLLIN | EPOLLEXCLUSIVE, 2) == 0);
	if (choice.warm)
		warm_up(pair);
	for (int i = 0; i < 100; i++) {
		peer_put(pair, 5);
		arrived(pair, 5);
		say_wait("one", one, 8, 0);
		say_wait("other", other, 8, 0);
		get(pair, 5);
		put(pair, 5);
		peer_get(pair, 5);
	}
	say_ret("mod of it", set_ctl(one, EPOLL_CTL_MOD, pair->fd, EPOLLIN, 1));
	NEED(epoll_ctl(one, EPOLL_CTL_DEL, pair->fd, NULL) == 0);
	NEED(set_ctl(one, EPOLL_CTL_ADD, pair->fd, EPOLLIN | EPOLLEXCLUSIVE, 3) == 0);
	peer_when_asleep(pair, ACT_SEND, 5, 0);
	say_wait("once more", one, 8, 5000);
	peer_done();
	get(pair, 5);
	peer(pair, ACT_CLOSE, 0, 0);
	say_wait("the end in one", one, 8, 5000);
	say_wait("the end in the other", other, 8, 5000);
}

static void epoll_polled_edge(void)
{
	struct pair *pair = open_pair();
	int set = set_new();
	NEED(set_ctl(set, EPOLL_CTL_ADD, pair->fd, EPOLLIN | EPOLLET, 1) == 0);
	peer_put(pair, 6);
	arrived(pair, 6);
	struct pollfd item = {.fd = set, .events = POLLIN};
	int ready = poll(&item, 1, 0);
	say_poll("poll", ready, item.revents);
	say_wait("set", set, 8, 0);
	if (!choice.shaken) { /* then an edge may be told once more */
		ready = poll(&item, 1, 0);
		say_poll("poll, told", ready, item.revents);
	}
	get(pair, 6);
}

static void epoll_two_sets(void)
{
	struct pair *pair = open_pair();
	int level = set_new(), edge = set_new();
	NEED(set_ctl(level, EPOLL_CTL_ADD, pair->fd, EPOLLIN, 1) == 0);
	NEED(set_ctl(edge, EPOLL_CTL_ADD, pair->fd, EPOLLIN | EPOLLOUT | EPOLLET, 2) == 0);
	say_wait("edge", edge, 8, 0);
	for (int i = 0; i < 3; i++) {
		peer_put(pair, 5);
		say_wait("level", level, 8, 5000);
		say_wait("edge", edge, 8, 5000);
		say_wait("level again", level, 8, 0);
		say_no_edge("edge again", edge);
		get(pair, 5);
		say_wait("level after", level, 8, 0);
	}
	NEED(epoll_ctl(level, EPOLL_CTL_DEL, pair->fd, NULL) == 0);
	peer_when_asleep(pair, ACT_SEND, 5, 0);
	say_edge_in("edge alone", edge);
	peer_done();
	say_wait("level left", level, 8, 0);
	stays(pair);
}

static void epoll_dup(void)
{
	struct pair *pair = open_pair();
	int set = set_new(), copy = dup(pair->fd);
	NEED(set_ctl(set, EPOLL_CTL_ADD, pair->fd, EPOLLIN, 1) == 0);
	NEED(set_ctl(set, EPOLL_CTL_ADD, copy, EPOLLIN | EPOLLOUT, 2) == 0);
	say_wait("idle", set, 8, 0);
	peer_put(pair, 5);
	arrived(pair, 5);
	say_wait("data: one event for each", set, 8, 5000);
	NEED(epoll_ctl(set, EPOLL_CTL_DEL, copy, NULL) == 0);
	say_wait("one left", set, 8, 0);
	NEED(close(pair->fd) == 0);
	pair->fd = copy;
	say_wait("its descriptor closed, the socket open through the other", set, 8, 0);
	get(pair, 5);
	say_wait("read", set, 8, 0);
	peer_put(pair, 5);
	say_wait("it still reports", set, 8, 5000);
	NEED(close(copy) == 0);
	say_wait("the last one closed", set, 8, 0);
}

static void epoll_close_and_reuse(void)
{
	struct pair *pair = open_pair();
	int set = set_new(), fd = pair->fd;
	NEED(set_ctl(set, EPOLL_CTL_ADD, fd, EPOLLIN | EPOLLOUT, 1) == 0);
	peer_put(pair, 5);
	arrived(pair, 5);
	NEED(close(fd) == 0);
	say_wait("closed", set, 8, 0);
	struct pair *next = open_pair();
	if (next->fd != fd) {
		NEED(dup2(next->fd, fd) == fd);
		NEED(close(next->fd) == 0);
		next->fd = fd;
	}
	peer_put(next, 5);
	arrived(next, 5);
	say_wait("another connection under its number", set, 8, 0);
	say_ret("mod", set_ctl(set, EPOLL_CTL_MOD, fd, EPOLLIN, 2));
	say_ret("add", set_ctl(set, EPOLL_CTL_ADD, fd, EPOLLIN, 3));
	say_wait("added", set, 8, 1000);
	stays(next);
}

static void epoll_one_slot(void)
{
	/* Room for one event, three descriptors ready: each has its turn. */
	struct pair *pairs[3];
	int set = set_new();
	for (int i = 0; i < 3; i++) {
		pairs[i] = open_pair();
		NEED(set_ctl(set, EPOLL_CTL_ADD, pairs[i]->fd, EPOLLIN, (uint64_t)i) == 0);
	}
	for (int i = 0; i < 3; i++) {
		peer_put(pairs[i], 5);
		arrived(pairs[i], 5);
	}
	for (int slow = 0; slow < 2; slow++) {
		int seen[3] = {0};
		/* some by ring, some by TCP: the two take turns, but not call by call */
		for (int i = 0; i < (choice.shaken ? 600 : 12); i++) {
			struct epoll_event event;
			NEED(epoll_wait(set, &event, 1, 1000) == 1);
			NEED(event.data.u64 < 3);
			seen[event.data.u64]++;
			if (slow)
				usleep(40);
		}
		say("each had its turn: %d", seen[0] >= 2 && seen[1] >= 2 && seen[2] >= 2);
	}
	stays(pairs[0]);
}

static void epoll_others_not_starved(void)
{
	/* A connection with bytes always waiting, beside a timer, a pipe and a listener. */
	struct pair *pair = open_pair();
	int set = set_new(), timer = timerfd_create(CLOCK_MONOTONIC, 0), pipes[2], seen = 0;
	uint16_t port;
	int listener = loopback_listener(choice.family, &port, 0);
	struct itimerspec time = {.it_value = {.tv_nsec = 1000000}};
	NEED(pipe(pipes) == 0);
	NEED(set_ctl(set, EPOLL_CTL_ADD, pair->fd, EPOLLIN, 0) == 0);
	NEED(set_ctl(set, EPOLL_CTL_ADD, timer, EPOLLIN, 1) == 0);
	NEED(set_ctl(set, EPOLL_CTL_ADD, pipes[0], EPOLLIN, 2) == 0);
	NEED(set_ctl(set, EPOLL_CTL_ADD, listener, EPOLLIN, 3) == 0);
	peer_put(pair, 5);
	arrived(pair, 5);
	NEED(timerfd_settime(timer, 0, &time, NULL) == 0);
	NEED(write(pipes[1], "x", 1) == 1);
	struct sockaddr_storage address;
	socklen_t len = loopback_address(choice.family, port, true, &address);
	int client = socket(address.ss_family, SOCK_STREAM, 0);
	NEED(connect(client, (struct sockaddr *)&address, len) == 0);
	int64_t deadline = now_ms() + 5000;
	while (seen != 15 && now_ms() < deadline) {
		struct epoll_event event;
		NEED(epoll_wait(set, &event, 1, 1000) == 1);
		seen |= 1 << event.data.u64;
	}
	say("seen %x", seen);
	stays(pair);
}

static void epoll_pwait_(void)
{
	struct pair *pair = open_pair();
	int set = set_new();
	struct epoll_event event;
	sigset_t none;
	sigemptyset(&none);
	NEED(set_ctl(set, EPOLL_CTL_ADD, pair->fd, EPOLLIN, 1) == 0);
	int64_t began = now_ms();
	say_ret("epoll_wait 30", epoll_wait(set, &event, 1, 30));
	say_near("epoll_wait", now_ms() - began, 30);
	began = now_ms();
	say_ret("epoll_pwait 30", epoll_pwait(set, &event, 1, 30, &none));
	say_near("epoll_pwait", now_ms() - began, 30);
	struct timespec pause = {.tv_nsec = 30000000};
	began = now_ms();
	say_ret("epoll_pwait2 30", epoll_pwait2(set, &event, 1, &pause, &none));
	say_near("epoll_pwait2", now_ms() - began, 30);
	peer_when_asleep(pair, ACT_SEND, 5, 0);
	say_ret("epoll_pwait", epoll_pwait(set, &event, 1, -1, &none));
	peer_done();
	get(pair, 5);
	peer_when_asleep(pair, ACT_SEND, 5, 0);
	say_ret("epoll_pwait2", epoll_pwait2(set, &event, 1, NULL, NULL));
	peer_done();
	get(pair, 5);
	peer_when_asleep(pair, ACT_SEND, 5, 0);
	say_ret("epoll_wait", epoll_wait(set, &event, 1, -1));
	peer_done();
	stays(pair);
}

static void epoll_over_fork(void)
{
	/* Parent and child wait on the same set. */
	struct pair *pair = open_pair();
	int set = set_new(), pipes[2];
	NEED(pipe(pipes) == 0);
	NEED(set_ctl(set, EPOLL_CTL_ADD, pair->fd, EPOLLIN, 1) == 0);
	pid_t child = fork();
	if (child == 0) {
		struct epoll_event event;
		forget_peer();
		for (int i = 0; i < 20; i++) {
			if (epoll_wait(set, &event, 1, 5000) != 1 || event.data.u64 != 1 || event.events != EPOLLIN)
				_exit(1);
			if (recv(pair->fd, data, 5, MSG_WAITALL) != 5)
				_exit(2);
			if (write(pipes[1], data, 5) != 5)
				_exit(3);
		}
		_exit(0);
	}
	for (int i = 0; i < 20; i++) {
		peer_put(pair, 5);
		NEED(read(pipes[0], data, 5) == 5);
		NEED(took(pair, data, 5));
	}
	int status;
	NEED(waitpid(child, &status, 0) == child);
	say("the child's status %d", status);
	peer_put(pair, 5);
	say_wait("the parent", set, 8, 5000);
	get(pair, 5);
	put(pair, 5);
	peer_get(pair, 5);
}

static void epoll_made_by_parent(void)
{
	/* What a daemon does: set and listener before fork, connections after it. */
	int set = set_new(), status, pipes[2];
	NEED(pipe(pipes) == 0);
	NEED(set_ctl(set, EPOLL_CTL_ADD, pipes[0], EPOLLIN, 7) == 0);
	pid_t child = fork();
	if (child == 0) {
		struct pair *pair = open_pair();
		NEED(set_ctl(set, EPOLL_CTL_ADD, pair->fd, EPOLLIN, 1) == 0);
		say_wait("idle", set, 8, 0);
		for (int i = 0; i < 20; i++) {
			struct epoll_event event;
			peer_when_asleep(pair, ACT_SEND, 5, 0);
			NEED(epoll_wait(set, &event, 1, 5000) == 1 && event.data.u64 == 1);
			peer_done();
			get(pair, 5);
		}
		NEED(write(pipes[1], "x", 1) == 1);
		say_wait("the pipe", set, 8, 1000);
		_exit(0);
	}
	NEED(waitpid(child, &status, 0) == child);
	say("the child's status %d", status);
}

static void epoll_ctl_by_another_thread(void)
{
	struct pair *pair = open_pair();
	int set = set_new();
	pthread_t thread;
	pthread_barrier_t ready;
	pthread_barrier_init(&ready, NULL, 2);
	peer_put(pair, 5);
	arrived(pair, 5);
	for (int i = 0; i < 2; i++) {
		struct epoll_thread waiter = {.set = set, .ready = &ready};
		if (i == 1)
			NEED(set_ctl(set, EPOLL_CTL_MOD, pair->fd, EPOLLRDHUP, 1) == 0);
		NEED(pthread_create(&thread, NULL, epoll_waiter, &waiter) == 0);
		pthread_barrier_wait(&ready);
		await_asleep(getpid(), waiter.tid);
		NEED(set_ctl(set, i ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, pair->fd, EPOLLIN, 5) == 0);
		NEED(pthread_join(thread, NULL) == 0);
		say("woken by %s: %d %s", i ? "mod" : "add", waiter.count, poll_names(waiter.event.events));
	}
	get(pair, 5);
	/* and new data reaches a thread that waits on a set the connection joined meanwhile */
	NEED(epoll_ctl(set, EPOLL_CTL_DEL, pair->fd, NULL) == 0);
	struct epoll_thread waiter = {.set = set, .ready = &ready};
	NEED(pthread_create(&thread, NULL, epoll_waiter, &waiter) == 0);
	pthread_barrier_wait(&ready);
	await_asleep(getpid(), waiter.tid);
	NEED(set_ctl(set, EPOLL_CTL_ADD, pair->fd, EPOLLIN, 6) == 0);
	peer_put(pair, 5);
	NEED(pthread_join(thread, NULL) == 0);
	say("woken by data: %d %s", waiter.count, poll_names(waiter.event.events));
	stays(pair);
}

static void epoll_edge_one_thread(void)
{
	/* Two threads wait on one edge-triggered registration: one event wakes one of them. */
	struct pair *pair = open_pair();
	int set = set_new(), told_again = 0;
	pthread_t threads[2];
	pthread_barrier_t ready;
	pthread_barrier_init(&ready, NULL, 3);
	NEED(set_ctl(set, EPOLL_CTL_ADD, pair->fd, EPOLLIN | EPOLLET, 1) == 0);
	for (int round = 0; round < 20; round++) {
		struct epoll_thread waiters[2];
		for (int i = 0; i < 2; i++) {
			waiters[i] = (struct epoll_thread){.set = set, .ready = &ready, .count = -7};
			NEED(pthread_create(&threads[i], NULL, epoll_waiter, &waiters[i]) == 0);
		}
		pthread_barrier_wait(&ready);
		for (int i = 0; i < 2; i++)
			await_asleep(getpid(), waiters[i].tid);
		peer_put(pair, 5);
		arrived(pair, 5);
		int64_t deadline = now_ms() + 5000;
		while (__atomic_load_n(&waiters[0].count, __ATOMIC_ACQUIRE) == -7 &&
		       __atomic_load_n(&waiters[1].count, __ATOMIC_ACQUIRE) == -7 && now_ms() < deadline)
			sched_yield();
		int first = (__atomic_load_n(&waiters[0].count, __ATOMIC_ACQUIRE) != -7) +
		            (__atomic_load_n(&waiters[1].count, __ATOMIC_ACQUIRE) != -7);
		peer_put(pair, 5); /* and the next wakes the other */
		for (int i = 0; i < 2; i++)
			NEED(pthread_join(threads[i], NULL) == 0);
		bool told = waiters[0].count == 1 && waiters[1].count == 1;
		bool one = told && (first == 1 || choice.shaken); /* what is told once more wakes the second, too */
		told_again += !one;
		if (!one &&
		    (choice.warm || told_again > 2)) /* see say_no_edge(): at the attachment, and when sending switches */
			say("round %d: %d woke first, counts %d %d", round, first, waiters[0].count, waiters[1].count);
		get(pair, 10);
		struct epoll_event event;
		while (epoll_wait(set, &event, 1, 0) > 0)
			;
	}
	say("done");
	stays(pair);
}

static void epoll_number_given_again(void)
{
	/* The number of a registration goes to another file, registered as well, before the socket's last copy is closed. */
	struct pair *pair = open_pair();
	int set = set_new(), number = pair->fd, other[2];
	NEED(set_ctl(set, EPOLL_CTL_ADD, number, EPOLLIN, 1) == 0);
	int copy = fcntl(number, F_DUPFD, 200);
	NEED(copy >= 200 && close(number) == 0);
	NEED(pipe(other) == 0 && (other[0] == number || dup2(other[0], number) == number));
	NEED(set_ctl(set, EPOLL_CTL_ADD, number, EPOLLIN, 2) == 0);
	NEED(close(copy) == 0);
	NEED(write(other[1], "x", 1) == 1);
	say_wait("the other file", set, 8, 1000);
	say_ret("mod", set_ctl(set, EPOLL_CTL_MOD, number, EPOLLIN, 3));
}

static void say_edge(const char *name, int set, int timeout_ms)
{
	struct epoll_event event = {0};
	int count = epoll_wait(set, &event, 1, timeout_ms);

	say("%s: %d %s", name, count, poll_names(event.events));
}

/* A member of a set by edges, with unread bytes that were reported. */
static int edge_reported(int fds[2])
{
	int set = set_new();
	both_ends(fds);
	NEED(set_ctl(set, EPOLL_CTL_ADD, fds[0], EPOLLIN | EPOLLET, 1) == 0);
	NEED(send(fds[1], "0123456789", 10, 0) == 10 && arrived_at(fds[0], 10));
	say_edge("bytes", set, 5000);
	return set;
}

/* The peer's kernel acknowledges our end, some time after it: that is news of whatever is true. */
static void epoll_edge_acknowledged(void)
{
	int fds[2], set = edge_reported(fds);
	struct tcp_info info;
	socklen_t len = sizeof info;
	NEED(setsockopt(fds[1], IPPROTO_TCP, TCP_QUICKACK, &(int){0}, sizeof(int)) == 0);
	NEED(shutdown(fds[0], SHUT_WR) == 0);
	say_edge("shut", set, 5000);
	NEED(getsockopt(fds[0], IPPROTO_TCP, TCP_INFO, &info, &len) == 0);
	if (info.tcpi_state == TCP_FIN_WAIT1)
		say_edge("acknowledged", set, 5000);
	else /* too soon to see it come */
		say("acknowledged: 1 IN");
	say_ret("recv", recv(fds[0], data, sizeof data, 0));
}

/* Bytes of before are unread: the urgent one is news of them. */
static void epoll_edge_urgent(void)
{
	int fds[2], set = edge_reported(fds);
	struct pollfd item = {.fd = fds[0], .events = POLLPRI};
	NEED(send(fds[1], "!", 1, MSG_OOB) == 1);
	say_ret("poll", poll(&item, 1, 5000));
	say_ret("urgent", recv(fds[0], data, 1, MSG_OOB));
	say_edge("the others", set, 5000);
	say_ret("recv", recv(fds[0], data, sizeof data, 0));
}

static void epoll_edge_urgent_asleep(void)
{
	int fds[2], set = edge_reported(fds);
	pthread_t thread;
	pthread_barrier_t ready;
	struct epoll_thread waiter = {.set = set, .ready = &ready};
	pthread_barrier_init(&ready, NULL, 2);
	NEED(pthread_create(&thread, NULL, epoll_waiter, &waiter) == 0);
	pthread_barrier_wait(&ready);
	await_asleep(getpid(), waiter.tid);
	NEED(send(fds[1], "!", 1, MSG_OOB) == 1);
	NEED(pthread_join(thread, NULL) == 0);
	say("woken: %d %s", waiter.count, poll_names(waiter.event.events));
}

/* A level of the kernel's beside one of the ring: each wait tells both, however soon it comes. */
static void epoll_levels_of_both(void)
{
	enum { WAITS = 1000 };
	struct pair *pair = open_pair();
	struct epoll_event events[4];
	int pipes[2], set = set_new(), both = 0;
	NEED(pipe(pipes) == 0 && write(pipes[1], "x", 1) == 1);
	NEED(set_ctl(set, EPOLL_CTL_ADD, pair->fd, EPOLLIN, 1) == 0);
	NEED(set_ctl(set, EPOLL_CTL_ADD, pipes[0], EPOLLIN, 2) == 0);
	peer_put(pair, 10);
	arrived(pair, 10);
	for (int i = 0; i < WAITS; i++)
		both += epoll_wait(set, events, 4, 0) == 2;
	say("both: %d of %d", both, WAITS);
	get(pair, 10);
}

const struct scene scenes_epoll[] = {
	SCENE(epoll_level),
	SCENE(epoll_ctl_errors),
	SCENE(epoll_user_data),
	SCENE(epoll_edge),
	SCENE(epoll_edge_out),
	SCENE(epoll_edge_out_splice),
	SCENE(epoll_level_out),
	SCENE(epoll_hup),
	SCENE(epoll_oneshot),
	SCENE(epoll_oneshot_before),
	SCENE(epoll_exclusive),
	SCENE(epoll_polled_edge),
	SCENE(epoll_exclusive_before),
	SCENE(epoll_two_sets),
	SCENE(epoll_dup),
	SCENE(epoll_close_and_reuse),
	SCENE(epoll_one_slot),
	SCENE(epoll_others_not_starved),
	{"epoll_pwait", epoll_pwait_},
	SCENE(epoll_over_fork),
	SCENE(epoll_made_by_parent),
	SCENE(epoll_ctl_by_another_thread),
	SCENE(epoll_edge_one_thread),
	SCENE(epoll_number_given_again),
	SCENE(epoll_edge_acknowledged),
	SCENE(epoll_edge_urgent),
	SCENE(epoll_edge_urgent_asleep),
	SCENE(epoll_levels_of_both),
	{NULL, NULL},
};
