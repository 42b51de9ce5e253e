/* epoll: sets in sets */
#include "scene.h"

static uint8_t data[1 << 16];

static void epoll_nested(void)
{
	struct pair *pair = open_pair();
	int inner = set_new(), outer = set_new();
	NEED(set_ctl(inner, EPOLL_CTL_ADD, pair->fd, EPOLLIN, 1) == 0);
	NEED(set_ctl(outer, EPOLL_CTL_ADD, inner, EPOLLIN, 2) == 0);
	struct pollfd item = {.fd = inner, .events = POLLIN};
	int ready = poll(&item, 1, 0);
	say_poll("poll of the set, idle", ready, item.revents);
	say_wait("outer, idle", outer, 8, 0);
	peer_when_asleep(pair, ACT_SEND, 5, 0);
	say_wait("outer", outer, 8, 5000);
	peer_done();
	say_wait("inner", inner, 8, 0);
	ready = poll(&item, 1, 0);
	say_poll("poll of the set", ready, item.revents);
	get(pair, 5);
	ready = poll(&item, 1, 0);
	say_poll("poll of the set, idle", ready, item.revents);
	say_wait("outer, idle", outer, 8, 0);
	peer_when_asleep(pair, ACT_SEND, 5, 0);
	ready = poll(&item, 1, 5000);
	say_poll("poll of the set that waits", ready, item.revents);
	peer_done();
	get(pair, 5);
	fd_set in;
	FD_ZERO(&in);
	FD_SET(inner, &in);
	peer_when_asleep(pair, ACT_SEND, 5, 0);
	say_ret("select on the set", select(inner + 1, &in, NULL, NULL, NULL));
	peer_done();
	get(pair, 5);
	put(pair, 10);
	peer_get(pair, 10);
	stays(pair);
}

static void epoll_nested_before(void)
{
	/* The set is watched by another before the connection comes into it. */
	struct pair *pair = open_pair_raw();
	int inner = set_new(), outer = set_new();
	NEED(set_ctl(outer, EPOLL_CTL_ADD, inner, EPOLLIN | EPOLLET, 2) == 0);
	NEED(set_ctl(inner, EPOLL_CTL_ADD, pair->fd, EPOLLIN, 1) == 0);
	for (int i = 0; i < 100; i++) {
		struct epoll_event event;
		peer_put(pair, 5);
		NEED(epoll_wait(outer, &event, 1, 5000) == 1 && event.data.u64 == 2);
		NEED(epoll_wait(inner, &event, 1, 0) == 1 && event.data.u64 == 1);
		get(pair, 5);
		put(pair, 5);
		peer_get(pair, 5);
	}
	say_wait("outer, idle", outer, 8, 0);
}

/* A set in a set, with bytes that the peer sent before, who makes no call from now on. */
static struct pair *nest_unread(int *inner, int *outer, uint32_t inner_events, uint32_t outer_events)
{
	struct pair *pair = open_pair();
	*inner = set_new();
	*outer = set_new();
	NEED(set_ctl(*inner, EPOLL_CTL_ADD, pair->fd, inner_events, 1) == 0);
	peer_put(pair, 6);
	arrived(pair, 6);
	NEED(set_ctl(*outer, EPOLL_CTL_ADD, *inner, outer_events, 2) == 0);
	return pair;
}

static void epoll_nested_unread(void)
{
	int inner, outer, queued = 0;
	struct pair *pair = nest_unread(&inner, &outer, EPOLLIN, EPOLLIN);
	say_ret("FIONREAD", ioctl(pair->fd, FIONREAD, &queued));
	say("%d bytes", queued);
	say_wait("outer", outer, 8, 0);
	say_wait("inner", inner, 8, 0);
	get(pair, 2);
	say_wait("outer, some are left", outer, 8, 5000);
	say_wait("inner, some are left", inner, 8, -1);
	NEED(set_ctl(inner, EPOLL_CTL_MOD, pair->fd, EPOLLPRI, 1) == 0);
	say_wait("outer, not asked for", outer, 8, 0);
	NEED(set_ctl(inner, EPOLL_CTL_MOD, pair->fd, EPOLLIN, 1) == 0);
	say_wait("outer, asked for again", outer, 8, 0);
	int copy = dup(inner);
	NEED(copy >= 0 && close(inner) == 0);
	say_wait("outer, by a copy's number", outer, 8, 0);
	get(pair, 4);
	say_wait("outer, idle", outer, 8, 0);
	say_wait("inner, idle", copy, 8, 0);
	peer_when_asleep(pair, ACT_SEND, 5, 0);
	say_wait("outer, waited for", outer, 8, 5000);
	peer_done();
	say_wait("inner", copy, 8, 0);
	NEED(close(copy) == 0);
	say_wait("outer without it", outer, 8, 0);
	get(pair, 5);
}

static void epoll_nested_unread_edges(void)
{
	int inner, outer;
	struct pair *pair = nest_unread(&inner, &outer, EPOLLIN | EPOLLET, EPOLLIN);
	say_wait("outer", outer, 8, 0);
	say_wait("inner", inner, 8, 0);
	if (!choice.warm || choice.shaken) { /* then an edge may be told once more */
		get(pair, 6);
		return;
	}
	say_wait("outer, told", outer, 8, 0);
	say_wait("inner, told", inner, 8, 0);
	NEED(set_ctl(inner, EPOLL_CTL_MOD, pair->fd, EPOLLIN | EPOLLET | EPOLLONESHOT, 1) == 0);
	say_wait("outer, armed anew", outer, 8, 0);
	say_wait("inner, armed anew", inner, 8, 0);
	say_wait("outer, fired", outer, 8, 0);
	NEED(set_ctl(inner, EPOLL_CTL_MOD, pair->fd, EPOLLIN, 1) == 0);
	say_wait("outer, by level", outer, 8, 0);
	NEED(epoll_ctl(inner, EPOLL_CTL_DEL, pair->fd, NULL) == 0);
	say_wait("outer, taken out", outer, 8, 0);
	NEED(set_ctl(inner, EPOLL_CTL_ADD, pair->fd, EPOLLIN, 1) == 0);
	say_wait("outer, in again", outer, 8, 0);
	get(pair, 6);
	say_wait("outer, idle", outer, 8, 0);
	peer_put(pair, 5);
	say_wait("outer, new data", outer, 8, 5000);
	NEED(close(pair->fd) == 0);
	say_wait("outer, closed unread", outer, 8, 0);
}

static void epoll_nested_then_added(void)
{
	/* The connection has its ring, and bytes in it, when it comes into the inner set. */
	struct pair *pair = open_pair();
	int inner = set_new(), outer = set_new();
	NEED(set_ctl(outer, EPOLL_CTL_ADD, inner, EPOLLIN | EPOLLET, 2) == 0);
	peer_put(pair, 6);
	arrived(pair, 6);
	NEED(set_ctl(inner, EPOLL_CTL_ADD, pair->fd, EPOLLIN, 1) == 0);
	say_wait("outer", outer, 8, 0);
	say_wait("inner", inner, 8, 0);
	get(pair, 6);
	say_wait("outer, idle", outer, 8, 0);
	peer_put(pair, 5);
	say_wait("outer, new data", outer, 8, 5000);
	say_wait("inner, new data", inner, 8, 0);
	get(pair, 5);
}

static void epoll_nested_forked(void)
{
	int inner, outer;
	struct pair *pair = nest_unread(&inner, &outer, EPOLLIN, EPOLLIN);
	pid_t child = fork();
	if (child == 0) {
		forget_peer();
		_exit(close(inner) || recv(pair->fd, data, 2, 0) != 2);
	}
	say_child(child);
	pair->in += 2;
	say_wait("outer, a child has read some", outer, 8, 0);
	child = fork();
	if (child == 0) {
		struct epoll_event event;
		forget_peer();
		if (epoll_wait(outer, &event, 1, 0) != 1 || recv(pair->fd, data, 4, MSG_WAITALL) != 4)
			_exit(1);
		_exit(epoll_wait(outer, &event, 1, 0));
	}
	say_child(child);
	pair->in += 4;
	say_wait("outer, a child has read all", outer, 8, 0);
	peer_put(pair, 5);
	say_wait("outer, new data", outer, 8, 5000);
	get(pair, 5);
	say_wait("outer, idle", outer, 8, 0);
}

/* Bytes of TCP are unread, and bytes of the ring behind them, when the inner set comes into another. */
static void epoll_nested_both_ways(void)
{
	enum { PIECES = 200 };
	struct pair *pair = open_pair_raw();
	int inner = set_new(), outer = set_new(), silent = 0;
	for (int i = 0; i < 2; i++) {
		put(pair, 3);
		peer_get(pair, 3);
		peer_put(pair, 3);
		get(pair, 3);
	}
	for (int i = 0; i < PIECES; i++) {
		struct pollfd item = {.fd = pair->fd, .events = POLLIN};
		peer_put(pair, 10);
		NEED(poll(&item, 1, 0) >= 0);
	}
	arrived(pair, (size_t)PIECES * 10);
	NEED(set_ctl(inner, EPOLL_CTL_ADD, pair->fd, EPOLLIN, 1) == 0);
	NEED(set_ctl(outer, EPOLL_CTL_ADD, inner, EPOLLIN, 2) == 0);
	for (int i = 0; i < PIECES; i++) {
		struct epoll_event event;
		silent += epoll_wait(outer, &event, 1, 100) != 1;
		get(pair, 10);
	}
	say("silent %d times", silent);
	say_wait("outer, idle", outer, 8, 0);
}

/* What keeps it on TCP came before the sets: it still reads its ring. */
static void epoll_nested_pinned(void)
{
	struct pair *pair = open_pair();
	int inner = set_new(), outer = set_new(), on = 1;
	peer_put(pair, 6);
	arrived(pair, 6);
	NEED(setsockopt(pair->fd, SOL_SOCKET, SO_TIMESTAMP, &on, sizeof on) == 0);
	NEED(set_ctl(inner, EPOLL_CTL_ADD, pair->fd, EPOLLIN, 1) == 0);
	NEED(set_ctl(outer, EPOLL_CTL_ADD, inner, EPOLLIN, 2) == 0);
	say_wait("outer", outer, 8, 0);
	say_wait("inner", inner, 8, 0);
	get(pair, 6);
	say_wait("outer, all read", outer, 8, 0);
	peer_put(pair, 5);
	say_wait("outer, more", outer, 8, 5000);
	say_wait("inner, more", inner, 8, 5000);
	get(pair, 5);
}

static void epoll_nested_low_water(void)
{
	int inner, outer, low = 10;
	struct pair *pair = open_pair();
	inner = set_new();
	outer = set_new();
	NEED(setsockopt(pair->fd, SOL_SOCKET, SO_RCVLOWAT, &low, sizeof low) == 0);
	peer_put(pair, 15);
	arrived(pair, 15);
	NEED(set_ctl(inner, EPOLL_CTL_ADD, pair->fd, EPOLLIN, 1) == 0);
	NEED(set_ctl(outer, EPOLL_CTL_ADD, inner, EPOLLIN, 2) == 0);
	say_wait("outer", outer, 8, 0);
	get(pair, 10);
	say_wait("outer, less than that is left", outer, 8, 0);
	low = 5;
	NEED(setsockopt(pair->fd, SOL_SOCKET, SO_RCVLOWAT, &low, sizeof low) == 0);
	say_wait("outer, less is wanted", outer, 8, 5000);
	get(pair, 5);
}

/* The peer goes back to TCP while bytes of the ring are unread: those of both ways count together. */
static void epoll_nested_low_water_both_ways(void)
{
	int inner = set_new(), outer = set_new(), alone = set_new(), low = 10;
	struct pair *pair = open_pair();
	struct pollfd item = {.fd = pair->fd, .events = POLLIN};
	NEED(setsockopt(pair->fd, SOL_SOCKET, SO_RCVLOWAT, &low, sizeof low) == 0);
	for (int i = 0; i < 3; i++) {
		peer_put(pair, 15);
		arrived(pair, 15);
		if (i == 0)
			say_reply("the peer's timestamps", peer(pair, ACT_SET_INT, SO_TIMESTAMP, 1));
		get(pair, 10);
		if (i == 0)
			NEED(set_ctl(alone, EPOLL_CTL_ADD, pair->fd, EPOLLIN, 3) == 0 &&
			     set_ctl(inner, EPOLL_CTL_ADD, pair->fd, EPOLLIN, 1) == 0 &&
			     set_ctl(outer, EPOLL_CTL_ADD, inner, EPOLLIN, 2) == 0);
		say_wait("outer, 5 of 10", outer, 8, 0);
		say_wait("alone, 5 of 10", alone, 8, 0);
		say_ret("poll, 5 of 10", poll(&item, 1, 0));
		peer_put(pair, 3);
		arrived(pair, 8);
		say_wait("outer, 8 of 10", outer, 8, 0);
		peer_when_asleep(pair, ACT_SEND, 2, 0);
		say_wait("outer, 10 of 10", outer, 8, 5000);
		peer_done();
		say_wait("alone, 10 of 10", alone, 8, 5000);
		say_ret("poll, 10 of 10", poll(&item, 1, 5000));
		get(pair, 10);
	}
}

static void epoll_nested_zerocopy(void)
{
	struct pair *pair = open_pair();
	int inner = set_new(), outer = set_new(), on = 1;
	char control[200];
	struct msghdr message = {.msg_control = control, .msg_controllen = sizeof control};
	NEED(setsockopt(pair->fd, SOL_SOCKET, SO_ZEROCOPY, &on, sizeof on) == 0);
	sent(pair, send(pair->fd, pattern_out(pair, 20000), 20000, MSG_ZEROCOPY));
	peer_get(pair, 20000);
	NEED(set_ctl(inner, EPOLL_CTL_ADD, pair->fd, EPOLLIN, 1) == 0);
	NEED(set_ctl(outer, EPOLL_CTL_ADD, inner, EPOLLIN, 2) == 0);
	say_wait("outer, it is done", outer, 8, 5000);
	say_wait("inner, it is done", inner, 8, 0);
	say_ret("told", recvmsg(pair->fd, &message, MSG_ERRQUEUE | MSG_DONTWAIT));
	say_wait("outer, idle", outer, 8, 0);
}

/* A member's number was closed unseen, and is another file's. */
static void epoll_nested_misnamed(void)
{
	struct pair *pair = open_pair();
	int inner = set_new(), outer = set_new(), other = open("/dev/null", O_RDONLY | O_CLOEXEC);
	NEED(set_ctl(inner, EPOLL_CTL_ADD, pair->fd, EPOLLIN, 1) == 0);
#ifdef __x86_64__
	long result;
	__asm__ volatile("syscall"
	                 : "=a"(result)
	                 : "a"((long)SYS_dup2), "D"((long)other), "S"((long)pair->fd)
	                 : "rcx", "r11", "memory");
	NEED(result == pair->fd);
#else
	NEED(dup2(other, pair->fd) == pair->fd);
#endif
	NEED(set_ctl(outer, EPOLL_CTL_ADD, inner, EPOLLIN, 2) == 0);
	say_wait("outer", outer, 8, 0);
}

static void epoll_nested_copy_closed(void)
{
	int inner, outer;
	struct pair *pair = nest_unread(&inner, &outer, EPOLLIN, EPOLLIN);
	say_wait("outer", outer, 8, 0);
	pid_t child = fork();
	if (child == 0) {
		forget_peer();
		_exit(close(pair->fd));
	}
	say_child(child);
	say_wait("outer, a child has closed its copy", outer, 8, 0);
	say_wait("inner", inner, 8, 0);
	get(pair, 6);
	say_wait("outer, idle", outer, 8, 0);
}

/* The kernel tells of each arrival once by an outer entry for edges, whatever is left of those before. */
static void epoll_nested_outer_edges(void)
{
	struct pair *pair = open_pair();
	int inner = set_new(), outer = set_new();
	NEED(set_ctl(inner, EPOLL_CTL_ADD, pair->fd, EPOLLIN, 1) == 0);
	NEED(set_ctl(outer, EPOLL_CTL_ADD, inner, EPOLLIN | EPOLLET, 2) == 0);
	for (int i = 0; i < 20; i++) {
		peer_when_asleep(pair, ACT_SEND, 5, 0);
		say_wait("outer", outer, 8, 5000);
		peer_done();
		if (choice.warm && !choice.shaken) /* else what still holds may be told once more */
			say_wait("outer, told", outer, 8, 0);
		if (i & 1) /* the others leave something */
			get(pair, 7);
	}
	get(pair, 30);
	if (choice.warm && !choice.shaken)
		say_wait("outer, idle", outer, 8, 0);
	stays(pair);
}

static void epoll_nested_outer_once(void)
{
	struct pair *pair = open_pair();
	int inner = set_new(), outer = set_new();
	NEED(set_ctl(inner, EPOLL_CTL_ADD, pair->fd, EPOLLIN, 1) == 0);
	NEED(set_ctl(outer, EPOLL_CTL_ADD, inner, EPOLLIN | EPOLLONESHOT, 2) == 0);
	peer_when_asleep(pair, ACT_SEND, 5, 0);
	say_wait("outer", outer, 8, 5000);
	peer_done();
	say_wait("outer, fired", outer, 8, 0);
	peer_put(pair, 5);
	arrived(pair, 10);
	say_wait("outer, fired, and more has come", outer, 8, 0);
	NEED(set_ctl(outer, EPOLL_CTL_MOD, inner, EPOLLIN | EPOLLONESHOT, 3) == 0);
	say_wait("outer, armed anew", outer, 8, 0);
	get(pair, 10);
	NEED(set_ctl(outer, EPOLL_CTL_MOD, inner, EPOLLIN | EPOLLONESHOT, 4) == 0);
	say_wait("outer, armed and idle", outer, 8, 0);
	peer_when_asleep(pair, ACT_SEND, 5, 0);
	say_wait("outer, armed while idle", outer, 8, 5000);
	peer_done();
	NEED(set_ctl(outer, EPOLL_CTL_MOD, inner, 0, 5) == 0);
	say_wait("outer, not asked for", outer, 8, 0);
	NEED(epoll_ctl(outer, EPOLL_CTL_DEL, inner, NULL) == 0);
	say_wait("outer, taken out", outer, 8, 0);
	NEED(set_ctl(outer, EPOLL_CTL_ADD, inner, EPOLLIN, 6) == 0);
	say_wait("outer, in again", outer, 8, 0);
	get(pair, 5);
	stays(pair);
}

/* As deep as the kernel lets sets be in sets; loops are refused. */
static void epoll_nested_deep(void)
{
	enum { DEPTH = 6 };
	struct pair *pair = open_pair();
	int sets[DEPTH], other = set_new(), ends[2];
	for (int i = 0; i < DEPTH; i++)
		sets[i] = set_new();
	NEED(set_ctl(sets[0], EPOLL_CTL_ADD, pair->fd, EPOLLIN, 1) == 0);
	say_ret("itself", set_ctl(sets[0], EPOLL_CTL_ADD, sets[0], EPOLLIN, 1));
	for (int i = 1; i < DEPTH; i++)
		say_ret("one more", set_ctl(sets[i], EPOLL_CTL_ADD, sets[i - 1], EPOLLIN, (uint64_t)i + 1));
	say_ret("a loop", set_ctl(sets[0], EPOLL_CTL_ADD, sets[2], EPOLLIN, 1));
	NEED(set_ctl(other, EPOLL_CTL_ADD, sets[1], EPOLLIN | EPOLLET, 9) == 0);
	NEED(pipe(ends) == 0 && set_ctl(sets[2], EPOLL_CTL_ADD, ends[0], EPOLLIN, 8) == 0);
	for (int i = 0; i < 10; i++) {
		struct pollfd item = {.fd = sets[i % 5], .events = POLLIN};
		peer_when_asleep(pair, ACT_SEND, 5, 0);
		if (i < 5)
			say_wait("one of them", sets[i], 8, 5000);
		else
			say_ret("poll of one of them", poll(&item, 1, 5000));
		peer_done();
		for (int j = 0; j < 5; j++)
			say_wait("each", sets[j], 8, 0);
		say_wait("by edge", other, 8, 0);
		NEED(write(ends[1], "x", 1) == 1);
		say_wait("with a pipe", sets[2], 8, 0);
		get(pair, 5);
		say_wait("a pipe alone", sets[3], 8, 0);
		say_wait("below the pipe", sets[1], 8, 0);
		NEED(read(ends[0], data, 1) == 1);
		say_wait("all read", sets[4], 8, 0);
	}
	stays(pair);
}

/* Two connections in a set each, and one beside those sets. */
static void epoll_nested_beside(void)
{
	struct pair *pairs[3];
	int inner[2] = {set_new(), set_new()}, outer = set_new();
	for (int i = 0; i < 3; i++)
		pairs[i] = open_pair();
	for (int i = 0; i < 2; i++)
		NEED(set_ctl(inner[i], EPOLL_CTL_ADD, pairs[i]->fd, EPOLLIN | (i ? EPOLLET : 0), 1) == 0 &&
		     set_ctl(outer, EPOLL_CTL_ADD, inner[i], EPOLLIN, (uint64_t)i + 2) == 0);
	NEED(set_ctl(outer, EPOLL_CTL_ADD, pairs[2]->fd, EPOLLIN, 4) == 0);
	say_wait("idle", outer, 8, 0);
	for (int i = 0; i < 12; i++) {
		peer_when_asleep(pairs[i % 3], ACT_SEND, 5, 0);
		say_wait("outer", outer, 8, 5000);
		peer_done();
		if (i % 3 < 2)
			say_wait("inner", inner[i % 3], 8, 0);
		get(pairs[i % 3], 5);
		say_wait("read", outer, 8, 0);
	}
	for (int i = 0; i < 3; i++) {
		peer_put(pairs[i], 5);
		arrived(pairs[i], 5);
	}
	say_wait("all", outer, 8, 0);
	struct epoll_event event;
	unsigned seen = 0;
	for (int i = 0; i < 3; i++)
		seen |= epoll_wait(outer, &event, 1, 0) == 1 ? 1u << event.data.u64 : 0;
	say("one at a time %#x", seen);
	for (int i = 0; i < 3; i++) {
		get(pairs[i], 5);
		stays(pairs[i]);
	}
}

/* Sets end, and take nothing of their members' with them. */
static void epoll_nested_set_closed(void)
{
	struct pair *pair = open_pair();
	for (int i = 0; i < 6; i++) {
		int inner = set_new(), outer = set_new();
		NEED(set_ctl(inner, EPOLL_CTL_ADD, pair->fd, EPOLLIN, 1) == 0);
		NEED(set_ctl(outer, EPOLL_CTL_ADD, inner, EPOLLIN, 2) == 0);
		peer_when_asleep(pair, ACT_SEND, 5, 0);
		say_wait("outer", outer, 8, 5000);
		peer_done();
		NEED(close(i & 1 ? outer : inner) == 0);
		if (i & 1) {
			say_wait("inner, alone", inner, 8, 0);
			get(pair, 5);
			peer_when_asleep(pair, ACT_SEND, 5, 0);
			say_wait("inner, alone, waited for", inner, 8, 5000);
			peer_done();
			NEED(close(inner) == 0);
		} else {
			say_wait("outer, empty", outer, 8, 0);
			int again = set_new();
			NEED(set_ctl(again, EPOLL_CTL_ADD, pair->fd, EPOLLIN, 3) == 0);
			say_wait("another, alone", again, 8, 0);
			NEED(set_ctl(outer, EPOLL_CTL_ADD, again, EPOLLIN, 4) == 0);
			say_wait("outer, with another", outer, 8, 0);
			NEED(close(again) == 0 && close(outer) == 0);
		}
		get(pair, 5);
	}
	put(pair, 10);
	peer_get(pair, 10);
	stays(pair);
}

static void epoll_nested_room(void)
{
	struct pair *pair = open_pair();
	int inner = set_new(), outer = set_new();
	NEED(set_ctl(inner, EPOLL_CTL_ADD, pair->fd, EPOLLOUT, 1) == 0);
	NEED(set_ctl(outer, EPOLL_CTL_ADD, inner, EPOLLIN, 2) == 0);
	say_wait("outer, room", outer, 8, 0);
	for (int i = 0; i < 3; i++) {
		long filled = flood(pair);
		NEED(filled > 0);
		say_wait("outer, full", outer, 8, 0);
		peer_when_asleep(pair, ACT_RECV, filled, 0);
		say_wait("outer, room again", outer, 8, 10000);
		say("the peer has read all: %d", peer_done().result == filled);
	}
	stays(pair);
}

/* Room is an edge for an outer entry, too, whether or not the inner set is asked in between. */
static void epoll_nested_outer_edges_room(void)
{
	for (int i = 0; i < 4; i++) {
		struct pair *pair = open_pair();
		int inner = set_new(), outer = set_new();
		NEED(set_ctl(inner, EPOLL_CTL_ADD, pair->fd, EPOLLIN | EPOLLOUT | (i & 1 ? EPOLLET : 0), 1) == 0);
		NEED(set_ctl(outer, EPOLL_CTL_ADD, inner, EPOLLIN | EPOLLET, 2) == 0);
		say_wait("outer, room", outer, 8, 5000);
		if (i & 2)
			say_wait("inner, room", inner, 8, 0);
		peer_get(pair, (size_t)flood(pair));
		say_wait("outer, room again", outer, 8, 5000);
		stays(pair);
	}
}

static void epoll_nested_end(void)
{
	for (int i = 0; i < 3; i++) {
		struct pair *pair = open_pair();
		int inner = set_new(), outer = set_new();
		NEED(set_ctl(inner, EPOLL_CTL_ADD, pair->fd, EPOLLIN | EPOLLRDHUP | (i & 1 ? EPOLLET : 0), 1) == 0);
		NEED(set_ctl(outer, EPOLL_CTL_ADD, inner, EPOLLIN, 2) == 0);
		peer_put(pair, 5);
		say_wait("outer", outer, 8, 5000);
		get(pair, 5);
		peer_when_asleep(pair, i == 2 ? ACT_ABORT : ACT_CLOSE, 0, 0);
		say_wait("outer, the end", outer, 8, 5000);
		peer_done();
		if (i == 2)
			await_reset(pair);
		else
			await_fin(pair);
		say_wait("inner, the end", inner, 8, 0);
		NEED(close(pair->fd) == 0);
		say_wait("outer, closed", outer, 8, 0);
	}
}

static void waiter_start(struct epoll_thread *waiter, pthread_t *thread)
{
	static pthread_barrier_t ready;
	static bool made;
	if (!made)
		pthread_barrier_init(&ready, NULL, 2);
	made = true;
	waiter->ready = &ready;
	NEED(pthread_create(thread, NULL, epoll_waiter, waiter) == 0);
	pthread_barrier_wait(&ready);
	await_asleep(getpid(), waiter->tid);
}

static void waiter_end(const char *name, struct epoll_thread *waiter, pthread_t thread)
{
	NEED(pthread_join(thread, NULL) == 0);
	say("%s: %d, %#lx", name, waiter->count, (unsigned long)waiter->event.data.u64);
}

/* A thread that has been asleep in a set since before it came into another, or another came into it. */
static void epoll_nested_under_waiters(void)
{
	struct pair *pair = open_pair();
	int inner = set_new(), outer = set_new();
	struct epoll_thread in_outer = {.set = outer}, in_inner = {.set = inner};
	pthread_t threads[2];
	waiter_start(&in_outer, &threads[0]);
	NEED(set_ctl(outer, EPOLL_CTL_ADD, inner, EPOLLIN, 2) == 0);
	NEED(set_ctl(inner, EPOLL_CTL_ADD, pair->fd, EPOLLIN, 1) == 0);
	peer_put(pair, 5);
	waiter_end("the set in its set has a new member", &in_outer, threads[0]);
	get(pair, 5);
	int alone = set_new();
	NEED(epoll_ctl(inner, EPOLL_CTL_DEL, pair->fd, NULL) == 0);
	NEED(set_ctl(alone, EPOLL_CTL_ADD, pair->fd, EPOLLIN, 3) == 0);
	in_inner = (struct epoll_thread){.set = alone};
	waiter_start(&in_inner, &threads[1]);
	NEED(set_ctl(inner, EPOLL_CTL_ADD, alone, EPOLLIN, 4) == 0);
	in_outer = (struct epoll_thread){.set = outer};
	waiter_start(&in_outer, &threads[0]);
	peer_put(pair, 5);
	waiter_end("its set has come into another", &in_inner, threads[1]);
	waiter_end("above both", &in_outer, threads[0]);
	get(pair, 5);
	for (int i = 0; i < 2; i++) { /* bytes that are there already */
		peer_put(pair, 5);
		arrived(pair, 5);
		NEED(epoll_ctl(alone, EPOLL_CTL_DEL, pair->fd, NULL) == 0);
		in_outer = (struct epoll_thread){.set = outer};
		waiter_start(&in_outer, &threads[0]);
		if (i == 0) {
			NEED(set_ctl(alone, EPOLL_CTL_ADD, pair->fd, EPOLLIN, 5) == 0);
		} else {
			NEED(set_ctl(alone, EPOLL_CTL_ADD, pair->fd, EPOLLRDHUP, 5) == 0);
			NEED(set_ctl(alone, EPOLL_CTL_MOD, pair->fd, EPOLLIN, 5) == 0);
		}
		waiter_end("a member with bytes", &in_outer, threads[0]);
		get(pair, 5);
	}
	stays(pair);
}

/* It is promoted while a thread sleeps in the outer set. */
static void epoll_nested_promoted_under_waiter(void)
{
	struct pair *pair = open_pair_raw();
	int inner = set_new(), outer = set_new();
	struct epoll_thread waiter = {.set = outer};
	pthread_t thread;
	NEED(set_ctl(inner, EPOLL_CTL_ADD, pair->fd, EPOLLPRI, 1) == 0);
	NEED(set_ctl(outer, EPOLL_CTL_ADD, inner, EPOLLIN, 2) == 0);
	waiter_start(&waiter, &thread);
	if (choice.warm)
		warm_up(pair);
	NEED(set_ctl(inner, EPOLL_CTL_MOD, pair->fd, EPOLLIN, 1) == 0);
	peer_put(pair, 5);
	waiter_end("outer", &waiter, thread);
	get(pair, 5);
	say_wait("outer, idle", outer, 8, 0);
	stays(pair);
}

const struct scene scenes_nest[] = {
	SCENE(epoll_nested),
	SCENE(epoll_nested_before),
	SCENE(epoll_nested_unread),
	SCENE(epoll_nested_unread_edges),
	SCENE(epoll_nested_then_added),
	SCENE(epoll_nested_forked),
	SCENE(epoll_nested_both_ways),
	SCENE(epoll_nested_pinned),
	SCENE(epoll_nested_low_water),
	SCENE(epoll_nested_low_water_both_ways),
	SCENE(epoll_nested_zerocopy),
	SCENE(epoll_nested_misnamed),
	SCENE(epoll_nested_copy_closed),
	SCENE(epoll_nested_outer_edges),
	SCENE(epoll_nested_outer_once),
	SCENE(epoll_nested_deep),
	SCENE(epoll_nested_beside),
	SCENE(epoll_nested_set_closed),
	SCENE(epoll_nested_room),
	SCENE(epoll_nested_outer_edges_room),
	SCENE(epoll_nested_end),
	SCENE(epoll_nested_under_waiters),
	SCENE(epoll_nested_promoted_under_waiter),
	{NULL, NULL},
};
