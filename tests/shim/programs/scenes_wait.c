/* poll, ppoll, select, pselect: readiness of every kind, alone and among other descriptors. */
#include "scene.h"

static void poll_states(void)
{
	struct pair *pair = open_pair();
	static const short wishes[] = {POLLIN,
	                               POLLOUT,
	                               POLLIN | POLLOUT,
	                               0,
	                               POLLPRI,
	                               POLLRDNORM | POLLWRNORM,
	                               POLLRDBAND | POLLWRBAND,
	                               POLLRDHUP,
	                               POLLIN | POLLOUT | POLLPRI | POLLRDNORM | POLLWRNORM | POLLRDBAND | POLLWRBAND |
	                                   POLLRDHUP};
	for (int step = 0; step < 4; step++) {
		static const char *const steps[] = {"idle", "data", "data and end", "end"};
		if (step == 1) {
			peer_put(pair, 10);
			arrived(pair, 10);
		} else if (step == 2) {
			peer(pair, ACT_SHUTDOWN, SHUT_WR, 0);
			await_fin(pair);
		} else if (step == 3) {
			get(pair, 10);
		}
		for (size_t i = 0; i < sizeof wishes / sizeof *wishes; i++) {
			struct pollfd item = {.fd = pair->fd, .events = wishes[i], .revents = -1};
			int ready = poll(&item, 1, 0);
			say("%s: asked %s", steps[step], poll_names((uint16_t)wishes[i]));
			say_poll("poll", ready, item.revents);
		}
	}
}

static void poll_sets(void)
{
	struct pair *pair = open_pair(), *other = open_pair();
	int pipes[2], closed = dup(pair->fd);
	NEED(pipe(pipes) == 0);
	close(closed);
	peer_put(pair, 10);
	arrived(pair, 10);
	NEED(write(pipes[1], "x", 1) == 1);
	struct pollfd items[] = {
		{.fd = pair->fd, .events = POLLIN},   {.fd = -1, .events = POLLIN, .revents = 7},
		{.fd = pipes[0], .events = POLLIN},   {.fd = closed, .events = POLLIN},
		{.fd = other->fd, .events = POLLIN},  {.fd = pair->fd, .events = POLLIN | POLLOUT},
		{.fd = other->fd, .events = POLLOUT}, {.fd = -7, .events = POLLIN, .revents = 7},
		{.fd = pair->fd, .events = 0},        {.fd = pipes[1], .events = POLLOUT},
	};
	enum { COUNT = sizeof items / sizeof *items };
	say_ret("poll", poll(items, COUNT, 1000));
	for (int i = 0; i < COUNT; i++)
		say("item %d: %s", i, poll_names((uint16_t)items[i].revents));
	say_ret("poll of none", poll(NULL, 0, 0));
	say_ret("poll of negative ones", poll(&items[7], 1, 1));
	say("revents %d", items[7].revents);
	struct timespec none = {0};
	items[0].revents = -1;
	say_ret("ppoll", ppoll(items, COUNT, &none, NULL));
	for (int i = 0; i < COUNT; i++)
		say("item %d: %s", i, poll_names((uint16_t)items[i].revents));
	stays(pair);
	stays(other);
}

static void poll_times(void)
{
	struct pair *pair = open_pair();
	struct pollfd item = {.fd = pair->fd, .events = POLLIN};
	int64_t began = now_ms();
	say_ret("poll 0", poll(&item, 1, 0));
	say_near("poll 0", now_ms() - began, 0);
	began = now_ms();
	say_ret("poll 50", poll(&item, 1, 50));
	say_near("poll", now_ms() - began, 50);
	struct timespec pause = {.tv_nsec = 40000000};
	began = now_ms();
	say_ret("ppoll 40", ppoll(&item, 1, &pause, NULL));
	say_near("ppoll", now_ms() - began, 40);
	say("the timeout is %s", pause.tv_nsec == 40000000 ? "kept" : "CHANGED");
	peer_when_asleep(pair, ACT_SEND, 5, 0);
	int ready = poll(&item, 1, -1);
	say_poll("poll forever", ready, item.revents);
	peer_done();
	get(pair, 5);
	peer_when_asleep(pair, ACT_SEND, 5, 0);
	ready = ppoll(&item, 1, NULL, NULL);
	say_poll("ppoll forever", ready, item.revents);
	peer_done();
	get(pair, 5);
	pause.tv_nsec = -1;
	say_ret("ppoll with a bad time", ppoll(&item, 1, &pause, NULL));
	stays(pair);
}

static void poll_writable(void)
{
	struct pair *pair = open_pair();
	struct pollfd item = {.fd = pair->fd, .events = POLLOUT};
	int ready = poll(&item, 1, 0);
	say_poll("with room", ready, item.revents);
	long total = flood(pair);
	ready = poll(&item, 1, 20);
	say_poll("full", ready, item.revents);
	peer_when_asleep(pair, ACT_RECV, total, 0);
	ready = poll(&item, 1, 10000);
	say_poll("blocked until the peer reads", ready, item.revents);
	sent(pair, say_ret("send", send(pair->fd, pattern_out(pair, 1), 1, MSG_DONTWAIT)));
	say_reply("the peer", (struct reply){.result = peer_done().result == total});
	peer_get(pair, 1);
	stays(pair);
}

static void poll_both_ways(void)
{
	/* Full in one direction, something to read in the other. */
	struct pair *pair = open_pair();
	struct pollfd item = {.fd = pair->fd, .events = POLLIN | POLLOUT};
	long total = flood(pair);
	peer_when_asleep(pair, ACT_SEND, 10, 0);
	int ready = poll(&item, 1, 10000);
	say_poll("full, then data", ready, item.revents);
	peer_done();
	get(pair, 10);
	peer_when_asleep(pair, ACT_RECV, total, 0);
	ready = poll(&item, 1, 10000);
	say_poll("full, then room", ready, item.revents);
	peer_done();
	stays(pair);
}

static void select_states(void)
{
	struct pair *pair = open_pair();
	int pipes[2], full = pair->fd + 1;
	NEED(pipe(pipes) == 0);
	full = (pipes[1] > pair->fd ? pipes[1] : pair->fd) + 1;
	for (int step = 0; step < 3; step++) {
		fd_set in, out, except;
		struct timeval none = {0};
		FD_ZERO(&in);
		FD_ZERO(&out);
		FD_ZERO(&except);
		FD_SET(pair->fd, &in);
		FD_SET(pipes[0], &in);
		FD_SET(pair->fd, &out);
		FD_SET(pipes[1], &out);
		FD_SET(pair->fd, &except);
		if (step == 1) {
			peer_put(pair, 5);
			arrived(pair, 5);
		} else if (step == 2) {
			get(pair, 5);
			peer(pair, ACT_SHUTDOWN, SHUT_WR, 0);
			await_fin(pair);
		}
		say_ret("select", select(full, &in, &out, &except, &none));
		say("socket %d%d%d pipe %d%d", !!FD_ISSET(pair->fd, &in), !!FD_ISSET(pair->fd, &out),
		    !!FD_ISSET(pair->fd, &except), !!FD_ISSET(pipes[0], &in), !!FD_ISSET(pipes[1], &out));
	}
}

static void select_times(void)
{
	struct pair *pair = open_pair();
	fd_set in;
	struct timeval pause = {.tv_usec = 50000};
	FD_ZERO(&in);
	FD_SET(pair->fd, &in);
	int64_t began = now_ms();
	say_ret("select 50", select(pair->fd + 1, &in, NULL, NULL, &pause));
	say_near("select", now_ms() - began, 50);
	say("left %ld, set %d", (long)(pause.tv_sec * 1000000 + pause.tv_usec), !!FD_ISSET(pair->fd, &in));
	FD_SET(pair->fd, &in);
	pause = (struct timeval){.tv_sec = 5};
	peer_when_asleep(pair, ACT_SEND, 5, 0);
	say_ret("select 5 s", select(pair->fd + 1, &in, NULL, NULL, &pause));
	peer_done();
	say("set %d, time is %s", !!FD_ISSET(pair->fd, &in),
	    pause.tv_sec * 1000000 + pause.tv_usec < 5000000 ? "counted down" : "NOT COUNTED DOWN");
	get(pair, 5);
	struct timespec time = {.tv_sec = 5};
	FD_SET(pair->fd, &in);
	peer_when_asleep(pair, ACT_SEND, 5, 0);
	say_ret("pselect 5 s", pselect(pair->fd + 1, &in, NULL, NULL, &time, NULL));
	peer_done();
	say("set %d, time %ld", !!FD_ISSET(pair->fd, &in), (long)time.tv_sec);
	get(pair, 5);
	FD_SET(pair->fd, &in);
	peer_when_asleep(pair, ACT_SEND, 5, 0);
	say_ret("select forever", select(pair->fd + 1, &in, NULL, NULL, NULL));
	peer_done();
	get(pair, 5);
	int closed = dup(pair->fd);
	close(closed);
	FD_ZERO(&in);
	FD_SET(closed, &in);
	say_ret("select of a closed one", select(closed + 1, &in, NULL, NULL, &pause));
	say_ret("select of a negative count", select(-1, &in, NULL, NULL, &pause));
	pause = (struct timeval){.tv_usec = 1000};
	say_ret("select of none", select(0, NULL, NULL, NULL, &pause));
	stays(pair);
}

static void select_writable(void)
{
	struct pair *pair = open_pair();
	fd_set out;
	long total = flood(pair);
	struct timeval pause = {.tv_usec = 10000};
	FD_ZERO(&out);
	FD_SET(pair->fd, &out);
	say_ret("select, full", select(pair->fd + 1, NULL, &out, NULL, &pause));
	FD_SET(pair->fd, &out);
	peer_when_asleep(pair, ACT_RECV, total, 0);
	say_ret("select until the peer reads", select(pair->fd + 1, NULL, &out, NULL, NULL));
	say("set %d", !!FD_ISSET(pair->fd, &out));
	peer_done();
	stays(pair);
}

static void wait_for_others(void)
{
	/* A wait over a silent connection and another descriptor that wakes it. */
	struct pair *pair = open_pair(), *other = open_pair_raw();
	int timer = timerfd_create(CLOCK_MONOTONIC, 0);
	struct itimerspec time = {.it_value = {.tv_nsec = 30000000}};
	uint64_t ticks;
	struct pollfd items[3] = {
		{.fd = pair->fd, .events = POLLIN}, {.fd = timer, .events = POLLIN}, {.fd = other->fd, .events = POLLIN}};
	NEED(timerfd_settime(timer, 0, &time, NULL) == 0);
	say_ret("poll", poll(items, 3, 5000));
	say("%s %s %s", poll_names((uint16_t)items[0].revents), poll_names((uint16_t)items[1].revents),
	    poll_names((uint16_t)items[2].revents));
	NEED(read(timer, &ticks, sizeof ticks) == sizeof ticks);
	peer_when_asleep(other, ACT_SEND, 4, 0);
	say_ret("poll", poll(items, 3, 5000));
	say("%s %s %s", poll_names((uint16_t)items[0].revents), poll_names((uint16_t)items[1].revents),
	    poll_names((uint16_t)items[2].revents));
	peer_done();
	get(other, 4);
	peer_when_asleep(pair, ACT_SEND, 4, 0);
	say_ret("poll", poll(items, 3, 5000));
	say("%s %s %s", poll_names((uint16_t)items[0].revents), poll_names((uint16_t)items[1].revents),
	    poll_names((uint16_t)items[2].revents));
	peer_done();
	get(pair, 4);
	NEED(timerfd_settime(timer, 0, &time, NULL) == 0);
	fd_set in;
	FD_ZERO(&in);
	FD_SET(pair->fd, &in);
	FD_SET(timer, &in);
	say_ret("select", select((timer > pair->fd ? timer : pair->fd) + 1, &in, NULL, NULL, NULL));
	say("timer %d socket %d", !!FD_ISSET(timer, &in), !!FD_ISSET(pair->fd, &in));
	stays(pair);
}

static void poll_only_reader(void)
{
	/* It only ever asks; the bytes wait for it. */
	struct pair *pair = open_pair();
	struct pollfd item = {.fd = pair->fd, .events = POLLIN};
	for (int i = 0; i < 50; i++) {
		peer_put(pair, 11);
		if (poll(&item, 1, 5000) != 1 || item.revents != POLLIN)
			say("round %d: %s", i, poll_names((uint16_t)item.revents));
	}
	arrived(pair, 550);
	for (int i = 0; i < 50; i++)
		get(pair, 11);
	int ready = poll(&item, 1, 0);
	say_poll("all read", ready, item.revents);
	stays(pair);
}

static void one_wait_many(void)
{
	/* Twenty connections in one poll; each is woken, alone and in turn. */
	struct pair *pairs[20];
	struct pollfd items[20];
	for (int i = 0; i < 20; i++) {
		pairs[i] = open_pair();
		items[i] = (struct pollfd){.fd = pairs[i]->fd, .events = POLLIN};
	}
	for (int i = 0; i < 20; i++) {
		int which = i * 7 % 20;
		peer_when_asleep(pairs[which], ACT_SEND, 3, 0);
		int ready = poll(items, 20, 5000);
		say("woken for %d: %d %s", which, ready, poll_names((uint16_t)items[which].revents));
		peer_done();
		get(pairs[which], 3);
	}
	for (int i = 0; i < 20; i++)
		peer_put(pairs[i], 3);
	for (int i = 0; i < 20; i++)
		arrived(pairs[i], 3);
	say_ret("all at once", poll(items, 20, 5000));
	stays(pairs[19]);
}

static void take_asleep(struct pair *pair)
{
	peer_when_asleep(pair, ACT_SEND, 1, 0);
	get(pair, 1);
	peer_done();
}

static void number_again(void)
{
	/* A thread that sleeps in recv on one connection after the other, one under the number of an earlier one. */
	struct pair *pair = open_pair(), *again = NULL;
	take_asleep(pair);
	int number = pair->fd;
	NEED(close(number) == 0 && dup2(STDERR_FILENO, number) == number); /* kept, lest the peer's end gets it */
	for (int i = 0; i < 4; i++) {
		pair = open_pair();
		if (i == 0) {
			NEED(dup2(pair->fd, number) == number && close(pair->fd) == 0);
			pair->fd = number;
		}
		take_asleep(pair);
		again = again ? again : pair;
	}
	char byte;
	peer_when_asleep(again, ACT_SHUTDOWN, SHUT_WR, 0);
	say_ret("recv at the end", recv(again->fd, &byte, 1, 0));
	peer_done();
}

/* One connection is on TCP for good, the other is not: a poll right behind another leaves neither out. */
static void tcp_beside_rings(void)
{
	struct pair *ring = open_pair(), *tcp = open_pair();
	struct pollfd items[2] = {{.fd = ring->fd, .events = POLLIN}, {.fd = tcp->fd, .events = POLLIN}};
	int both = 0;
	char urgent_byte;
	say_reply("urgent byte", peer(tcp, ACT_OOB, 'X', 0));
	struct pollfd urgent = {.fd = tcp->fd, .events = POLLPRI};
	int ready = poll(&urgent, 1, 5000);
	say_poll("poll PRI", ready, urgent.revents);
	peer_put(tcp, 5);
	peer_put(ring, 5);
	arrived(ring, 5);
	say_ret("recv OOB", recv(tcp->fd, &urgent_byte, 1, MSG_OOB));
	poll(&items[1], 1, 5000);
	for (int i = 0; i < 1000; i++)
		both += poll(items, 2, 0) == 2;
	say("%d of 1000 tell of both", both);
	get(ring, 5);
	get(tcp, 5);
}

const struct scene scenes_wait[] = {
	SCENE(poll_states),      SCENE(poll_sets),
	SCENE(poll_times),       SCENE(poll_writable),
	SCENE(poll_both_ways),   SCENE(select_states),
	SCENE(select_times),     SCENE(select_writable),
	SCENE(wait_for_others),  SCENE(poll_only_reader),
	SCENE(tcp_beside_rings), SCENE(one_wait_many),
	SCENE(number_again),     {NULL, NULL},
};
