/* epoll: registrations that are taken out and put back, and changed, while bytes go by ring. */
#include "scene.h"

static uint8_t data[64];

static void say_told(const char *name, int set, int timeout_ms)
{
	struct epoll_event event = {0};
	int n = epoll_wait(set, &event, 1, timeout_ms);

	if (n == 1)
		say("%s = %#lx: %s", name, (unsigned long)event.data.u64, poll_names(event.events));
	else
		say_ret(name, n);
}

static struct pair *member(int *set, uint32_t events)
{
	struct pair *pair = open_pair();
	*set = epoll_create1(EPOLL_CLOEXEC);
	NEED(*set >= 0 && set_ctl(*set, EPOLL_CTL_ADD, pair->fd, events, 1) == 0);
	return pair;
}

static void interest_out_and_in(void)
{
	int set;
	struct pair *pair = member(&set, EPOLLIN);
	for (int i = 0; i < 20; i++) { /* as redis-benchmark does */
		NEED(set_ctl(set, EPOLL_CTL_DEL, pair->fd, 0, 0) == 0);
		NEED(set_ctl(set, EPOLL_CTL_ADD, pair->fd, EPOLLOUT, 2) == 0);
		say_told("room", set, 5000);
		put(pair, 5);
		NEED(set_ctl(set, EPOLL_CTL_DEL, pair->fd, 0, 0) == 0);
		NEED(set_ctl(set, EPOLL_CTL_ADD, pair->fd, EPOLLIN, 3) == 0);
		peer_now(pair, ACT_ECHO, 1, 5);
		say_told("answer", set, 5000);
		get(pair, 5);
		peer_done();
	}
	stays(pair);
}

static void interest_while_out(void)
{
	int set;
	struct pair *pair = member(&set, EPOLLIN);
	NEED(set_ctl(set, EPOLL_CTL_DEL, pair->fd, 0, 0) == 0);
	peer_put(pair, 5);
	arrived(pair, 5);
	say_told("nothing is told", set, 0);
	say_ret("nor out again", set_ctl(set, EPOLL_CTL_DEL, pair->fd, 0, 0));
	say_ret("nor changed", set_ctl(set, EPOLL_CTL_MOD, pair->fd, EPOLLIN, 0));
	say_told("nor when it sleeps", set, 20);
	NEED(set_ctl(set, EPOLL_CTL_ADD, pair->fd, EPOLLIN | EPOLLET, 2) == 0);
	say_ret("but once in", set_ctl(set, EPOLL_CTL_ADD, pair->fd, EPOLLIN, 2));
	say_told("back", set, 5000);
	NEED(set_ctl(set, EPOLL_CTL_DEL, pair->fd, 0, 0) == 0);
	NEED(set_ctl(set, EPOLL_CTL_ADD, pair->fd, EPOLLIN | EPOLLET, 3) == 0);
	say_told("an edge anew", set, 5000);
	get(pair, 5);
	NEED(set_ctl(set, EPOLL_CTL_DEL, pair->fd, 0, 0) == 0);
	struct pollfd in = {.fd = set, .events = POLLIN};
	peer_put(pair, 5);
	arrived(pair, 5);
	say_ret("the set has nothing", poll(&in, 1, 0));
	stays(pair);
}

/* The end comes by the kernel, whose entry may still be there. */
static void interest_end_while_out(void)
{
	int set;
	struct pair *pair = member(&set, EPOLLIN | EPOLLRDHUP);
	NEED(set_ctl(set, EPOLL_CTL_DEL, pair->fd, 0, 0) == 0);
	peer(pair, ACT_SHUTDOWN, SHUT_WR, 0);
	await_fin(pair);
	say_told("the end is not told", set, 0);
	say_told("nor in a sleep", set, 20);
	NEED(set_ctl(set, EPOLL_CTL_ADD, pair->fd, EPOLLIN | EPOLLRDHUP, 2) == 0);
	say_told("but then", set, 5000);
	NEED(set_ctl(set, EPOLL_CTL_DEL, pair->fd, 0, 0) == 0);
	say_told("gone again", set, 20);
}

static void interest_number_closed(void)
{
	int set, pipes[2];
	struct pair *pair = member(&set, EPOLLIN);
	int number = pair->fd, copy = dup(number);
	NEED(pipe(pipes) == 0 && copy >= 0);
	NEED(set_ctl(set, EPOLL_CTL_DEL, number, 0, 0) == 0);
	NEED(dup2(pipes[0], number) == number); /* closes it; the connection has another */
	pair->fd = copy;
	peer_put(pair, 5);
	arrived(pair, 5);
	say_told("nothing", set, 20);
	say_ret("the number is another file's", set_ctl(set, EPOLL_CTL_ADD, number, EPOLLIN, 7));
	NEED(write(pipes[1], "x", 1) == 1);
	say_told("which is told", set, 5000);
	NEED(read(number, data, 1) == 1);
	say_ret("add", set_ctl(set, EPOLL_CTL_ADD, copy, EPOLLIN, 8));
	say_told("the connection", set, 5000);
	peer(pair, ACT_SHUTDOWN, SHUT_WR, 0);
	get(pair, 5);
	await_fin(pair);
	say_told("its end", set, 5000);
	struct pollfd in = {.fd = set, .events = POLLIN};
	NEED(set_ctl(set, EPOLL_CTL_DEL, copy, 0, 0) == 0);
	say_told("silence", set, 20);
	say_ret("nothing is left in the set", poll(&in, 1, 0));
}

static void interest_over_fork(void)
{
	int set, status;
	struct pair *pair = member(&set, EPOLLIN);
	NEED(set_ctl(set, EPOLL_CTL_DEL, pair->fd, 0, 0) == 0);
	pid_t child = fork();
	if (child == 0) {
		forget_peer();
		_exit(set_ctl(set, EPOLL_CTL_ADD, pair->fd, EPOLLIN, 2) < 0 ? errno : 0);
	}
	NEED(waitpid(child, &status, 0) == child);
	say("what the child takes back is out: %d", status);
	say_ret("and is the child's from then on", set_ctl(set, EPOLL_CTL_ADD, pair->fd, EPOLLIN, 3));
	NEED(set_ctl(set, EPOLL_CTL_DEL, pair->fd, 0, 0) == 0);
	NEED(set_ctl(set, EPOLL_CTL_ADD, pair->fd, EPOLLIN, 4) == 0);
	peer_put(pair, 5);
	say_told("the parent", set, 5000);
	get(pair, 5);
}

/* More may stand in the kernel's entry than is wanted. */
static void interest_less(void)
{
	int set;
	struct pair *pair = member(&set, EPOLLIN | EPOLLRDHUP);
	NEED(set_ctl(set, EPOLL_CTL_MOD, pair->fd, 0, 2) == 0);
	peer_put(pair, 5);
	arrived(pair, 5);
	say_told("bytes", set, 20);
	peer(pair, ACT_SHUTDOWN, SHUT_WR, 0);
	say_told("the end", set, 20);
	NEED(set_ctl(set, EPOLL_CTL_MOD, pair->fd, EPOLLIN, 3) == 0);
	say_told("wanted", set, 5000);
	get(pair, 5);
	await_fin(pair);
	NEED(set_ctl(set, EPOLL_CTL_MOD, pair->fd, EPOLLOUT, 4) == 0);
	say_told("room alone", set, 5000);
	NEED(set_ctl(set, EPOLL_CTL_MOD, pair->fd, 0, 5) == 0);
	say_told("one end is no HUP", set, 20);
	NEED(shutdown(pair->fd, SHUT_WR) == 0);
	say_told("both are", set, 5000);
}

static void *later_in(void *argument)
{
	const int *numbers = argument;
	await_asleep(getpid(), numbers[2]);
	NEED(set_ctl(numbers[0], EPOLL_CTL_DEL, numbers[1], 0, 0) == 0);
	NEED(set_ctl(numbers[0], EPOLL_CTL_ADD, numbers[1], EPOLLIN, 2) == 0);
	return NULL;
}

/* Another thread sleeps in the set meanwhile. */
static void interest_of_a_sleeper(void)
{
	int set;
	struct pair *pair = member(&set, 0);
	peer_put(pair, 5);
	arrived(pair, 5);
	int numbers[3] = {set, pair->fd, gettid()};
	pthread_t thread;
	NEED(pthread_create(&thread, NULL, later_in, numbers) == 0);
	say_told("it wakes", set, 5000);
	NEED(pthread_join(thread, NULL) == 0);
	get(pair, 5);
	NEED(set_ctl(set, EPOLL_CTL_DEL, pair->fd, 0, 0) == 0);
	int other = epoll_create1(EPOLL_CLOEXEC);
	NEED(set_ctl(other, EPOLL_CTL_ADD, pair->fd, EPOLLIN, 3) == 0);
	peer_when_asleep(pair, ACT_SEND, 5, 0);
	say_told("it has moved", other, 5000);
	peer_done();
	say_told("from here", set, 20);
	stays(pair);
}

static void interest_behind_a_full_wait(void)
{
	/* A wait for one event gets the kernel's. The next one has room for all, and gets all. */
	int set, pipes[2];
	struct pair *pair = member(&set, EPOLLIN);
	struct epoll_event events[8];
	NEED(pipe(pipes) == 0 && set_ctl(set, EPOLL_CTL_ADD, pipes[0], EPOLLIN, 2) == 0);
	NEED(write(pipes[1], "x", 1) == 1);
	for (int turn = 0; turn < 3; turn++) {
		say_told("the pipe", set, 5000);
		peer_put(pair, 5);
		arrived(pair, 5);
		say_ret("both", epoll_wait(set, events, 8, 5000));
		get(pair, 5);
	}
	stays(pair);
}

/* connect(2) with AF_UNSPEC: the socket has no peer any more. It has ended, and can be neither read nor written. */
static void interest_of_nobody(void)
{
	int set;
	struct pair *pair = member(&set, EPOLLIN | EPOLLOUT | EPOLLRDHUP);
	struct sockaddr nobody = {.sa_family = AF_UNSPEC};
	struct pollfd look = {.fd = pair->fd, .events = POLLIN | POLLOUT | POLLRDHUP};
	say_told("room", set, 5000);
	say_ret("it has no peer", connect(pair->fd, &nobody, sizeof nobody));
	say_told("the set", set, 0);
	NEED(poll(&look, 1, 0) == 1);
	say("poll: %s", poll_names((uint32_t)look.revents));
	say_ret("changed", set_ctl(set, EPOLL_CTL_MOD, pair->fd, EPOLLIN | EPOLLONESHOT, 3));
	say_told("once", set, 0);
	say_told("and no more", set, 0);
	say_ret("out", set_ctl(set, EPOLL_CTL_DEL, pair->fd, 0, 0));
}

/* The same by another number than that of the registration, which is closed. */
static void interest_of_nobody_by_copy(void)
{
	int set;
	struct pair *pair = member(&set, EPOLLIN | EPOLLOUT | EPOLLRDHUP);
	struct sockaddr nobody = {.sa_family = AF_UNSPEC};
	int copy = dup(pair->fd);
	NEED(copy >= 0 && close(pair->fd) == 0);
	pair->fd = copy;
	struct pollfd look = {.fd = copy, .events = POLLIN | POLLOUT | POLLRDHUP};
	peer_put(pair, 10);
	arrived(pair, 10);
	say_told("bytes and room", set, 5000);
	say_ret("it has no peer", connect(copy, &nobody, sizeof nobody));
	say_told("the set", set, 0);
	NEED(poll(&look, 1, 0) == 1);
	say("poll: %s", poll_names((uint32_t)look.revents));
	say_ret("changed", set_ctl(set, EPOLL_CTL_MOD, copy, EPOLLIN, 3));
	NEED(close(copy) == 0);
	say_told("it has gone", set, 0);
}

const struct scene scenes_interest[] = {
	SCENE(interest_out_and_in),
	SCENE(interest_while_out),
	SCENE(interest_end_while_out),
	SCENE(interest_number_closed),
	SCENE(interest_over_fork),
	SCENE(interest_less),
	SCENE(interest_of_a_sleeper),
	SCENE(interest_behind_a_full_wait),
	SCENE(interest_of_nobody),
	SCENE(interest_of_nobody_by_copy),
	{NULL, NULL},
};
