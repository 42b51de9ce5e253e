/* Connections that are sent back to TCP by command, and promoted again, in every state a program can have them in.
 *
 * The runner gives the orders: the scene's process and the peer's hear of them from the provider. Over kernel TCP nothing is
 * ordered, and the bytes are the same. */
#include "scene.h"

enum { TURNS = 3, SOME = 300, MUCH = 3 << 20 };

static uint8_t data[MUCH];

/* Which ends an order is for. */
enum whose { OURS = 1, PEERS = 2, BOTH = 3 };

static void order(const char *word, struct pair *pair, enum whose whose)
{
	struct pair turned = {.port = pair->peer_port, .peer_port = pair->port};
	if (whose & OURS)
		ask_runner(word, pair);
	if (whose & PEERS)
		ask_runner(word, &turned);
}

static void exchange_marks(struct pair *pair)
{
	peer_now(pair, ACT_ECHO, 16, MARK_LEN);
	for (int i = 0; i < 16; i++) {
		put(pair, MARK_LEN);
		get(pair, MARK_LEN);
	}
	struct reply reply = peer_done();
	NEED(reply.result == 16 && !reply.wrong);
}

/* Until both directions are where they were ordered to; a connection that was never promoted is only used. */
static void until(const char *word, struct pair *pair)
{
	do
		exchange_marks(pair);
	while (choice.warm && !ask_runner(word, pair));
}

static void to_tcp(struct pair *pair, enum whose whose)
{
	order("demote", pair, whose);
	until("tcp", pair);
}

static void to_ring(struct pair *pair, enum whose whose)
{
	order("promote", pair, whose);
	until("again", pair);
}

static void use(struct pair *pair)
{
	put(pair, SOME);
	peer_put(pair, SOME + 1);
	peer_get(pair, SOME);
	get(pair, SOME + 1);
}

static void to_and_fro(enum whose whose)
{
	struct pair *pair = open_pair();
	for (int turn = 0; turn < TURNS; turn++) {
		to_tcp(pair, whose);
		use(pair);
		to_ring(pair, whose);
		use(pair);
	}
	say_ret("close", close(pair->fd));
	say_reply("the peer's end", peer(pair, ACT_RECV_ONCE, 1, 0));
}

static void demoted_here(void)
{
	to_and_fro(OURS);
}

static void demoted_there(void)
{
	to_and_fro(PEERS);
}

static void demoted_at_both_ends(void)
{
	to_and_fro(BOTH);
}

/* -- threads that sleep when the order comes: they hear it, and nobody calls anything -- */

struct sleeper {
	struct pair *pair;
	void (*sleep)(struct pair *);
	pid_t tid;
	pthread_t thread;
};

static void sleep_in_recv(struct pair *pair)
{
	get(pair, SOME);
}

static void sleep_in_poll(struct pair *pair)
{
	struct pollfd item = {.fd = pair->fd, .events = POLLIN};
	say_poll("poll", poll(&item, 1, -1), item.revents);
	get(pair, SOME);
}

static void sleep_in_select(struct pair *pair)
{
	fd_set set;
	FD_ZERO(&set);
	FD_SET(pair->fd, &set);
	say_ret("select", select(pair->fd + 1, &set, NULL, NULL, NULL));
	get(pair, SOME);
}

static void sleep_in_epoll(struct pair *pair, uint32_t events)
{
	struct epoll_event event = {.events = events};
	int set = epoll_create1(0);
	NEED(set >= 0 && epoll_ctl(set, EPOLL_CTL_ADD, pair->fd, &event) == 0);
	do {
		int count = epoll_wait(set, &event, 1, -1);
		if (!(event.events & EPOLLIN)) /* room alone, while it goes to and fro */
			continue;
		say("epoll_wait = %d %s", count, poll_names(event.events & ~(uint32_t)EPOLLOUT));
		break;
	} while (true);
	get(pair, SOME);
	NEED(close(set) == 0);
}

static void sleep_in_epoll_level(struct pair *pair)
{
	sleep_in_epoll(pair, EPOLLIN);
}

static void sleep_in_epoll_edge(struct pair *pair)
{
	sleep_in_epoll(pair, EPOLLIN | EPOLLOUT | EPOLLET);
}

static void *sleeper_run(void *argument)
{
	struct sleeper *self = argument;
	__atomic_store_n(&self->tid, gettid(), __ATOMIC_RELEASE);
	self->sleep(self->pair);
	return NULL;
}

static void sleeper_begin(struct sleeper *sleeper, struct pair *pair, void (*sleep)(struct pair *))
{
	*sleeper = (struct sleeper){.pair = pair, .sleep = sleep};
	NEED(pthread_create(&sleeper->thread, NULL, sleeper_run, sleeper) == 0);
	while (!__atomic_load_n(&sleeper->tid, __ATOMIC_ACQUIRE))
		sched_yield();
	await_asleep(getpid(), sleeper->tid);
}

/* Demoted and promoted again while a thread sleeps: it hears each order, and then the bytes, whatever they come by. */
static void told_asleep(void (*sleep)(struct pair *))
{
	struct pair *pair = open_pair();
	for (int turn = 0; turn < TURNS; turn++) {
		struct sleeper sleeper;
		sleeper_begin(&sleeper, pair, sleep);
		order("demote", pair, OURS);
		if (choice.warm)
			ask_runner("rests", pair);
		peer_put(pair, SOME);
		NEED(pthread_join(sleeper.thread, NULL) == 0);
		until("tcp", pair);
		sleeper_begin(&sleeper, pair, sleep);
		order("promote", pair, OURS);
		if (choice.warm)
			ask_runner("moves", pair);
		peer_put(pair, SOME);
		NEED(pthread_join(sleeper.thread, NULL) == 0);
		until("again", pair);
	}
	use(pair);
	say("all arrived");
}

static void demoted_in_recv(void)
{
	told_asleep(sleep_in_recv);
}

static void demoted_in_poll(void)
{
	told_asleep(sleep_in_poll);
}

static void demoted_in_select(void)
{
	told_asleep(sleep_in_select);
}

static void demoted_in_epoll(void)
{
	told_asleep(sleep_in_epoll_level);
}

static void demoted_in_epoll_edge(void)
{
	told_asleep(sleep_in_epoll_edge);
}

/* Both ends sleep: the connection goes all the way to TCP, and all the way back, without a call of either. */
static void idle_both_ways(void)
{
	struct pair *pair = open_pair();
	for (int turn = 0; turn < TURNS; turn++) {
		struct sleeper sleeper;
		peer_now(pair, ACT_RECV, SOME, 0);
		sleeper_begin(&sleeper, pair, turn % 2 ? sleep_in_recv : sleep_in_epoll_edge);
		if (choice.warm) {
			order("demote", pair, turn % 3 + 1);
			ask_runner("tcp!", pair);
			order("promote", pair, turn % 3 + 1);
			ask_runner("again!", pair);
		}
		put(pair, SOME);
		say_reply("the peer's recv", peer_done());
		peer_put(pair, SOME);
		NEED(pthread_join(sleeper.thread, NULL) == 0);
	}
	use(pair);
	say("all arrived");
}

/* -- bytes under way -- */

static void sleep_in_send(struct pair *pair)
{
	put(pair, MUCH);
}

static void blocked_sender(enum whose whose)
{
	struct pair *pair = open_pair();
	int small = 65536;
	NEED(setsockopt(pair->fd, SOL_SOCKET, SO_SNDBUF, &small, sizeof small) == 0); /* else it does not sleep */
	for (int turn = 0; turn < TURNS; turn++) {
		struct sleeper sleeper;
		sleeper_begin(&sleeper, pair, sleep_in_send);
		order("demote", pair, whose);
		if (choice.warm && whose == OURS)
			ask_runner("rests", pair);
		peer_get(pair, MUCH / 2);
		order("promote", pair, whose);
		peer_get(pair, MUCH - MUCH / 2);
		NEED(pthread_join(sleeper.thread, NULL) == 0);
		until("on", pair);
	}
	use(pair);
	say("all arrived");
}

static void demoted_in_send(void)
{
	blocked_sender(OURS);
}

static void peer_demoted_in_send(void)
{
	blocked_sender(PEERS);
}

static void unread(enum whose whose)
{
	struct pair *pair = open_pair();
	for (int turn = 0; turn < TURNS; turn++) {
		put(pair, 2 * SOME);
		peer_put(pair, 2 * SOME);
		NEED(arrived(pair, 2 * SOME));
		order("demote", pair, whose);
		get(pair, SOME);
		peer_put(pair, SOME); /* behind what the ring holds */
		say_bytes("peek", &(struct pair){.in = pair->in}, data, recv(pair->fd, data, SOME, MSG_PEEK | MSG_WAITALL));
		order("promote", pair, whose);
		peer_get(pair, 2 * SOME);
		get(pair, SOME);
		get(pair, SOME);
		until("on", pair);
	}
	use(pair);
	say("all arrived");
}

static void demoted_with_bytes_unread(void)
{
	unread(OURS);
}

static void peer_demoted_with_bytes_unread(void)
{
	unread(PEERS);
}

static void demoted_at_both_ends_with_bytes_unread(void)
{
	unread(BOTH);
}

/* The peer sends by TCP from now on, and has not sent a byte yet. */
static void peer_leaves(struct pair *pair)
{
	struct pair turned = {.port = pair->peer_port, .peer_port = pair->port};
	order("demote", pair, PEERS);
	do
		peer(pair, ACT_POLL, POLLIN, 1); /* it hears of it in a call that sends nothing */
	while (choice.warm && !choice.shaken && !ask_runner("left", &turned));
}

/* The peer sends by ring from now on, and has not sent a byte yet. */
static void peer_joins(struct pair *pair)
{
	struct pair turned = {.port = pair->peer_port, .peer_port = pair->port};
	int unread;
	order("promote", pair, PEERS);
	do {
		peer(pair, ACT_POLL, POLLIN, 1);
		NEED(ioctl(pair->fd, FIONREAD, &unread) == 0); /* we consent to it in a call that reads nothing */
	} while (choice.warm && !choice.shaken && !ask_runner("joined", &turned));
}

/* Nothing is read while the peer goes to the ring and back: bytes of TCP, of the ring, and of TCP again are one queue. */
static void unread_of_both_ways(void)
{
	struct pair *pair = open_pair();
	for (int turn = 0; turn < TURNS; turn++) {
		to_tcp(pair, PEERS);
		peer_put(pair, SOME);
		say("of TCP: %d", arrived(pair, SOME));
		peer_joins(pair);
		peer_put(pair, SOME);
		say("and of the ring: %d", arrived(pair, 2 * SOME));
		peer_leaves(pair);
		peer_put(pair, SOME);
		say("and of TCP again: %d", arrived(pair, 3 * SOME));
		say_bytes("a look", &(struct pair){.in = pair->in}, data, recv(pair->fd, data, sizeof data, MSG_PEEK));
		struct iovec parts[] = {{data, SOME / 2}, {data + SOME / 2, SOME}, {data + SOME / 2 + SOME, SOME}};
		struct msghdr some = {.msg_iov = parts, .msg_iovlen = 3};
		memset(data, 0, 3 * SOME);
		say_bytes("in pieces", &(struct pair){.in = pair->in}, data, recvmsg(pair->fd, &some, MSG_PEEK));
		say_bytes("all of it", pair, data, recv(pair->fd, data, sizeof data, MSG_DONTWAIT));
		to_ring(pair, PEERS);
	}
	use(pair);
}

static void demoted_in_a_large_read(void)
{
	struct pair *pair = open_pair();
	for (int turn = 0; turn < TURNS; turn++) {
		peer_now(pair, ACT_SEND, MUCH, 1000);
		ssize_t got = recv(pair->fd, data, MUCH / 3, MSG_WAITALL);
		say_bytes("a third", pair, data, got);
		order("demote", pair, turn % 3 + 1);
		say_bytes("a third", pair, data, recv(pair->fd, data, MUCH / 3, MSG_WAITALL));
		order("promote", pair, turn % 3 + 1);
		say_bytes("the rest", pair, data, recv(pair->fd, data, MUCH - 2 * (MUCH / 3), MSG_WAITALL));
		say_reply("the peer sent", peer_done());
		until("on", pair);
	}
}

/* Orders that do not wait for each other, while both ends send and receive all the time. */
static void orders_amid_traffic(void)
{
	struct pair *pair = open_pair();
	peer_now(pair, ACT_SEND, MUCH, 0);
	for (int turn = 0; turn < 12; turn++) {
		order("demote", pair, turn % 3 + 1);
		get(pair, MUCH / 24);
		order("promote", pair, BOTH);
		get(pair, MUCH / 24);
	}
	say_reply("the peer sent", peer_done());
	until("on", pair);
	use(pair);
}

/* -- the end of the stream -- */

static void half_closed_here(void)
{
	struct pair *pair = open_pair();
	put(pair, SOME);
	say_ret("shutdown", shutdown(pair->fd, SHUT_WR));
	order("demote", pair, OURS);
	peer_put(pair, SOME);
	get(pair, SOME);
	order("promote", pair, OURS);
	peer_put(pair, SOME);
	get(pair, SOME);
	peer_get(pair, SOME);
	say_reply("the peer's end", peer(pair, ACT_RECV_ONCE, 1, 0));
	say_reply("the peer closes", peer(pair, ACT_CLOSE, 0, 0));
	say_ret("the end", recv(pair->fd, data, 1, 0));
}

static void half_closed_there(void)
{
	struct pair *pair = open_pair();
	peer_put(pair, SOME);
	say_reply("the peer's shutdown", peer(pair, ACT_SHUTDOWN, SHUT_WR, 0));
	order("demote", pair, OURS);
	get(pair, SOME);
	say_ret("the end", recv(pair->fd, data, 1, 0));
	put(pair, SOME);
	peer_get(pair, SOME);
	order("promote", pair, OURS);
	put(pair, SOME);
	peer_get(pair, SOME);
	say_ret("close", close(pair->fd));
	say_reply("the peer's end", peer(pair, ACT_RECV_ONCE, 1, 0));
}

static void closed_amid_demotion(void)
{
	for (enum whose whose = OURS; whose <= BOTH; whose++) {
		struct pair *pair = open_pair();
		order("demote", pair, whose);
		peer_now(pair, ACT_SEND_CLOSE, 3 * SOME, 0);
		say_ret("all", get_all(pair));
		say_reply("the peer sent", peer_done());
		say_ret("close", close(pair->fd));
	}
}

static void reset_when_demoted(void)
{
	struct pair *pair = open_pair();
	to_tcp(pair, OURS);
	say_reply("the peer aborts", peer(pair, ACT_ABORT, 0, 0));
	await_reset(pair);
	say_ret("recv", recv(pair->fd, data, 1, 0));
}

/* Bytes in the ring, bytes by TCP behind them, a reset behind those: what came before the reset can be read. */
static void reset_behind_bytes_of_both_ways(void)
{
	struct pair *pair = open_pair();
	peer_put(pair, SOME);
	arrived(pair, SOME);
	peer_leaves(pair);
	peer_put(pair, SOME);
	arrived(pair, SOME + SOME); /* Nagle may hold them up, and a reset throws away what was not sent */
	say_reply("the peer aborts", peer(pair, ACT_ABORT, 0, 0));
	await_reset(pair);
	get(pair, SOME);
	get(pair, SOME);
	say_ret("recv", recv(pair->fd, data, 1, 0));
}

/* -- processes -- */

static void child_hears(void)
{
	/* The child holds what its parent had promoted; the provider has never heard of the child. */
	struct pair *pair = open_pair();
	int pipes[2];
	NEED(pipe(pipes) == 0);
	pid_t child = fork();
	NEED(child >= 0);
	if (child == 0) {
		forget_peer();
		close(pipes[0]);
		get(pair, SOME);
		NEED(write(pipes[1], "", 1) == 1);
		get(pair, SOME);
		put(pair, SOME);
		_exit(0);
	}
	NEED(close(pair->fd) == 0 && close(pipes[1]) == 0);
	peer_put(pair, SOME);
	NEED(read(pipes[0], data, 1) == 1);
	await_asleep(child, child);
	order("demote", pair, OURS);
	if (choice.warm)
		ask_runner("rests", pair);
	peer_put(pair, SOME);
	peer_get(pair, SOME);
	int status;
	NEED(waitpid(child, &status, 0) == child);
	say("the child ended with %d", WEXITSTATUS(status));
	say_reply("the end", peer(pair, ACT_RECV_ONCE, 1, 0));
}

/* -- what the ring holds when its reader goes on without a shim -- */

/* The sender has gone back to TCP before, and sent nothing there yet. */
static void demoted_then_executed(void)
{
	struct pair *pair = open_pair();
	peer_put(pair, SOME);
	arrived(pair, SOME);
	peer_leaves(pair);
	int pipes[2], executed[2];
	NEED(pipe(pipes) == 0 && pipe2(executed, O_CLOEXEC) == 0);
	pid_t child = fork();
	if (child == 0) {
		char count[32];
		forget_peer();
		NEED(dup2(pair->fd, 0) == 0 && dup2(pipes[1], 1) == 1);
		snprintf(count, sizeof count, "%d", SOME + SOME);
		execlp("head", "head", "-c", count, (char *)NULL);
		_exit(127);
	}
	NEED(child > 0 && close(pipes[1]) == 0 && close(executed[1]) == 0 && close(pair->fd) == 0);
	NEED(read(executed[0], data, 1) == 0);
	peer_put(pair, SOME);
	long got = 0, now;
	while ((now = read(pipes[0], data + got, sizeof data - (size_t)got)) > 0)
		got += now;
	say("the program read %ld, %s", got, took(pair, data, got) ? "right" : "WRONG BYTES");
	int status;
	NEED(waitpid(child, &status, 0) == child);
	say("the program ended with %d", WEXITSTATUS(status));
}

/* Bytes by TCP behind bytes of the ring that were told and not read: an edge. */
static void demoted_behind_an_edge(void)
{
	struct pair *pair = open_pair();
	int set = epoll_create1(0);
	struct epoll_event event = {.events = EPOLLIN | EPOLLET};
	NEED(set >= 0 && epoll_ctl(set, EPOLL_CTL_ADD, pair->fd, &event) == 0);
	peer_put(pair, SOME);
	arrived(pair, SOME);
	say_ret("an edge", epoll_wait(set, &event, 1, 1000));
	peer_leaves(pair);
	while (epoll_wait(set, &event, 1, 0) > 0) /* what holds may have been told once more */
		;
	peer_put(pair, SOME);
	say_ret("an edge of TCP's bytes", epoll_wait(set, &event, 1, 2000));
	order("promote", pair, PEERS);
	get(pair, 2 * SOME);
}

static void lent_for_a_while(void)
{
	/* Programs without the shim hold the socket beside us, and end: then all is as it was. */
	struct pair *pair = open_pair();
	NEED(setenv("SIDESTEP_DISABLE", "1", 1) == 0);
	for (int i = 0; i < 2; i++) {
		int done[2];
		NEED(pipe(done) == 0 && fcntl(done[1], F_SETFD, FD_CLOEXEC) == 0);
		pid_t child = fork();
		if (child == 0) {
			NEED(dup2(done[0], 0) == 0);
			execlp("cat", "cat", (char *)NULL); /* until the pipe ends */
			_exit(127);
		}
		peer_put(pair, 300); /* bytes wait in the ring while it goes back */
		put(pair, 200);
		say_ret("system", system(i ? ":" : "sleep 0.2"));
		peer_get(pair, 200); /* a call of the peer, which is asked to send what waits once more */
		get(pair, 300);
		for (int turn = 0; turn < 50; turn++) {
			put(pair, 70);
			peer_get(pair, 70);
			peer_put(pair, 90);
			get(pair, 90);
		}
		until("tcp", pair);
		NEED(close(done[0]) == 0 && close(done[1]) == 0);
		say_child(child);
		until("again", pair);
	}
	say("nothing is lost");
	stays(pair);
}

const struct scene scenes_demote[] = {
	SCENE(demoted_here),
	SCENE(demoted_there),
	SCENE(demoted_at_both_ends),
	SCENE(demoted_in_recv),
	SCENE(demoted_in_poll),
	SCENE(demoted_in_select),
	SCENE(demoted_in_epoll),
	SCENE(demoted_in_epoll_edge),
	SCENE(idle_both_ways),
	SCENE(demoted_in_send),
	SCENE(peer_demoted_in_send),
	SCENE(demoted_with_bytes_unread),
	SCENE(peer_demoted_with_bytes_unread),
	SCENE(demoted_at_both_ends_with_bytes_unread),
	SCENE(unread_of_both_ways),
	SCENE(demoted_in_a_large_read),
	SCENE(orders_amid_traffic),
	SCENE(half_closed_here),
	SCENE(half_closed_there),
	SCENE(closed_amid_demotion),
	SCENE(reset_when_demoted),
	SCENE(reset_behind_bytes_of_both_ways),
	SCENE(child_hears),
	SCENE(demoted_then_executed),
	SCENE(demoted_behind_an_edge),
	SCENE(lent_for_a_while),
	{NULL, NULL},
};
