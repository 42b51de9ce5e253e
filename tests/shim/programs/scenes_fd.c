/* Descriptors: copies, numbers used again, ranges closed, flags, passing to others. */
#include "scene.h"

#include <dirent.h>
#include <linux/close_range.h>
#include <sys/inotify.h>
#include <sys/signalfd.h>

static uint8_t data[1 << 20];

static void copies(void)
{
	struct pair *pair = open_pair();
	int fds[5] = {dup(pair->fd), dup2(pair->fd, 200), dup3(pair->fd, 201, O_CLOEXEC), fcntl(pair->fd, F_DUPFD, 202),
	              fcntl(pair->fd, F_DUPFD_CLOEXEC, 203)};
	say("numbers %d %d %d %d", fds[1], fds[2], fds[3], fds[4]);
	for (int i = 0; i < 5; i++) {
		say("copy %d: FD_CLOEXEC %d", i, fcntl(fds[i], F_GETFD) & FD_CLOEXEC);
		sent(pair, say_ret("write", write(fds[i], pattern_out(pair, 7), 7)));
		peer_get(pair, 7);
		peer_put(pair, 9);
		arrived(pair, 9);
		say_bytes("recv", pair, data, recv(fds[i], data, 4, 0));
		say_bytes("read on the next", pair, data, read(fds[(i + 1) % 5], data, 100));
	}
	say_ret("dup2 onto itself", dup2(pair->fd, pair->fd) == pair->fd);
	say_ret("dup3 onto itself", dup3(pair->fd, pair->fd, 0));
	NEED(close(pair->fd) == 0);
	pair->fd = fds[2];
	for (int i = 0; i < 5; i++) {
		if (i == 2)
			continue;
		NEED(close(fds[i]) == 0);
		put(pair, 5);
		peer_get(pair, 5);
		peer_put(pair, 5);
		get(pair, 5);
	}
	stays(pair);
	peer_now(pair, ACT_DRAIN, 0, 0);
	NEED(close(pair->fd) == 0);
	say_reply("the end, with the last copy", peer_done());
}

static void copy_closed_keeps(void)
{
	struct pair *pair = open_pair();
	int copy = dup(pair->fd);
	NEED(close(copy) == 0);
	say_reply("no end yet", peer(pair, ACT_POLL, POLLIN | POLLRDHUP, 20));
	put(pair, 5);
	peer_get(pair, 5);
	copy = dup(pair->fd);
	NEED(shutdown(copy, SHUT_WR) == 0);
	NEED(close(copy) == 0);
	say_reply("shut down through a copy", peer(pair, ACT_RECV_ONCE, 10, 0));
	peer_put(pair, 5);
	get(pair, 5);
}

static void dup2_over(void)
{
	/* dup2 closes what was there before. */
	struct pair *pair = open_pair(), *other = open_pair();
	NEED(dup2(pair->fd, other->fd) == other->fd);
	say_reply("the one replaced has ended", peer(other, ACT_RECV_ONCE, 10, 0));
	sent(pair, say_ret("write to the one in its place", write(other->fd, pattern_out(pair, 5), 5)));
	peer_get(pair, 5);
	peer_put(pair, 5);
	arrived(pair, 5);
	say_bytes("read from it", pair, data, read(other->fd, data, 10));
	int null = open("/dev/null", O_RDWR);
	NEED(dup2(null, other->fd) == other->fd);
	say_ret("read from a file in its place", read(other->fd, data, 10));
	put(pair, 5);
	peer_get(pair, 5);
	stays(pair);
	NEED(dup2(null, pair->fd) == pair->fd);
	say_reply("the end", peer(pair, ACT_RECV_ONCE, 10, 0));
}

static void number_reused(void)
{
	/* The number of a closed connection goes to a file, a pipe, a datagram socket, another connection. */
	struct pair *pair = open_pair();
	int number = pair->fd, pipes[2];
	char byte;
	int low; /* whatever lower number was free is taken first */
	while ((low = open("/dev/null", O_RDONLY)) < number)
		NEED(low >= 0);
	NEED(close(low) == 0);
	NEED(close(number) == 0);
	NEED(open("/dev/zero", O_RDWR) == number);
	say_ret("read of a file", read(number, data, 10));
	say_ret("recv of a file", recv(number, data, 10, MSG_DONTWAIT));
	NEED(close(number) == 0);
	NEED(pipe(pipes) == 0);
	say("a pipe in its place: %d", pipes[0] == number);
	NEED(write(pipes[1], "ab", 2) == 2);
	say_ret("read of a pipe", read(pipes[0], &byte, 1));
	close(pipes[0]);
	close(pipes[1]);
	int datagram = socket(AF_INET, SOCK_DGRAM, 0);
	say("a datagram socket in its place: %d", datagram == number);
	say_ret("recv of it", recv(datagram, data, 10, MSG_DONTWAIT));
	close(datagram);
	NEED(socketpair(AF_UNIX, SOCK_STREAM, 0, pipes) == 0);
	say("a socket pair in its place: %d", pipes[0] == number);
	say_ret("send", send(pipes[0], "abc", 3, 0));
	say_ret("recv", recv(pipes[1], data, 10, 0));
	close(pipes[0]);
	close(pipes[1]);
	for (int i = 0; i < 3; i++) {
		struct pair *next = open_pair();
		put(next, 10);
		peer_get(next, 10);
		peer_put(next, 10);
		get(next, 10);
		stays(next);
		NEED(close(next->fd) == 0);
		say_reply("end", peer(next, ACT_RECV_ONCE, 1, 0));
		peer(next, ACT_CLOSE, 0, 0);
	}
}

static void ranges_closed(void)
{
	struct pair *pair = open_pair(), *other = open_pair();
	NEED(dup2(pair->fd, 300) == 300);
	NEED(dup2(pair->fd, 301) == 301);
	NEED(close(pair->fd) == 0);
	pair->fd = 301;
	say_ret("close_range CLOEXEC", close_range(300, 302, CLOSE_RANGE_CLOEXEC));
	say("FD_CLOEXEC %d", fcntl(301, F_GETFD));
	put(pair, 5);
	peer_get(pair, 5);
	say_ret("close_range", close_range(300, 300, 0));
	put(pair, 5);
	peer_get(pair, 5);
	stays(pair);
	say_ret("close_range backwards", close_range(302, 300, 0));
	say_ret("close_range of the rest", close_range(300, ~0u, 0));
	say_reply("the end", peer(pair, ACT_RECV_ONCE, 10, 0));
	put(other, 5);
	peer_get(other, 5);
	peer_put(other, 5);
	get(other, 5);
	stays(other);
	struct pair *later = open_pair(); /* and new ones are still promoted */
	put(later, 5);
	peer_get(later, 5);
	stays(later);
}

static void everything_closed(void)
{
	/* What a daemon does when it begins: closes all it does not know, one by one or at once; then it goes on. */
	for (int way = 0; way < 3; way++) {
		struct pair *pair = open_pair();
		NEED(dup2(pair->fd, 60) == 60);
		NEED(close(pair->fd) == 0);
		pair->fd = 60;
		if (way == 0)
			closefrom(60);
		else if (way == 1)
			for (int fd = 60; fd < 2048; fd++)
				close(fd);
		else
			NEED(close_range(60, ~0u, CLOSE_RANGE_UNSHARE) == 0);
		say_ret("read of the closed one", read(60, data, 1));
		say_reply("the end", peer(pair, ACT_RECV_ONCE, 10, 0));
		struct pair *later = open_pair();
		peer_put(later, 10);
		get(later, 10);
		put(later, 10);
		peer_get(later, 10);
		stays(later);
	}
}

static void lowest_number(void)
{
	/* A program counts on open() giving the lowest free number, whatever else lives in the process. */
	struct pair *pair = open_pair();
	int null = open("/dev/null", O_RDONLY), next = open("/dev/null", O_RDONLY);
	say("next to each other: %d", next == null + 1);
	NEED(close(null) == 0);
	say("the lowest one: %d", open("/dev/null", O_RDONLY) == null);
	put(pair, 1);
	peer_get(pair, 1);
	say("all below 40: %d", null < 40 && next < 40 && pair->fd < 40);
}

static int pass_in(int channel, int fd)
{
	char byte = 'f';
	union {
		struct cmsghdr header;
		char room[CMSG_SPACE(sizeof(int))];
	} control = {0};
	struct iovec one = {.iov_base = &byte, .iov_len = 1};
	struct msghdr message = {
		.msg_iov = &one, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
	struct cmsghdr *header = CMSG_FIRSTHDR(&message);
	header->cmsg_level = SOL_SOCKET;
	header->cmsg_type = SCM_RIGHTS;
	header->cmsg_len = CMSG_LEN(sizeof fd);
	memcpy(CMSG_DATA(header), &fd, sizeof fd);
	return (int)sendmsg(channel, &message, 0);
}

static int pass_out(int channel, int flags)
{
	char byte;
	int fd = -1;
	union {
		struct cmsghdr header;
		char room[CMSG_SPACE(sizeof(int))];
	} control = {0};
	struct iovec one = {.iov_base = &byte, .iov_len = 1};
	struct msghdr message = {
		.msg_iov = &one, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
	if (recvmsg(channel, &message, flags) != 1)
		return -1;
	struct cmsghdr *header = CMSG_FIRSTHDR(&message);
	if (!header || header->cmsg_type != SCM_RIGHTS)
		return -1;
	memcpy(&fd, CMSG_DATA(header), sizeof fd);
	return fd;
}

static void passed_within(void)
{
	struct pair *pair = open_pair();
	int channel[2];
	NEED(socketpair(AF_UNIX, SOCK_STREAM, 0, channel) == 0);
	say_ret("send it", pass_in(channel[0], pair->fd));
	int copy = pass_out(channel[1], MSG_CMSG_CLOEXEC);
	NEED(copy >= 0);
	say("FD_CLOEXEC %d", fcntl(copy, F_GETFD));
	sent(pair, say_ret("write to the copy", write(copy, pattern_out(pair, 10), 10)));
	put(pair, 10);
	peer_get(pair, 20);
	peer_put(pair, 10);
	arrived(pair, 10);
	say_bytes("read from the copy", pair, data, read(copy, data, 4));
	get(pair, 6);
	NEED(close(pair->fd) == 0);
	pair->fd = copy;
	put(pair, 10);
	peer_get(pair, 10);
	/* in flight: closed here before it is taken out there */
	NEED(pass_in(channel[0], pair->fd) == 1);
	NEED(close(pair->fd) == 0);
	say_reply("no end while it is on its way", peer(pair, ACT_POLL, POLLIN | POLLRDHUP, 20));
	peer_put(pair, 10);
	pair->fd = pass_out(channel[1], 0);
	NEED(pair->fd >= 0);
	get(pair, 10);
	put(pair, 10);
	peer_get(pair, 10);
	/* thrown away with the channel it was on */
	NEED(pass_in(channel[0], pair->fd) == 1);
	NEED(close(pair->fd) == 0);
	NEED(close(channel[0]) == 0 && close(channel[1]) == 0);
	say_reply("the end", peer(pair, ACT_RECV_ONCE, 10, 0));
}

/* epoll(7): the registration stays, and goes by the number under which it was made, which is another file's then. */
static void passed_registered(void)
{
	struct pair *pair = open_pair();
	int channel[2], null = open("/dev/null", O_RDONLY), set = epoll_create1(0), once = epoll_create1(0);
	const int old = pair->fd;
	NEED(socketpair(AF_UNIX, SOCK_STREAM, 0, channel) == 0 && null >= 0 && set >= 0 && once >= 0);
	NEED(set_ctl(set, EPOLL_CTL_ADD, old, EPOLLIN, 1) == 0);
	NEED(set_ctl(once, EPOLL_CTL_ADD, old, EPOLLIN | EPOLLONESHOT, 2) == 0);
	NEED(pass_in(channel[0], old) == 1 && dup2(null, old) == old);
	pair->fd = pass_out(channel[1], 0);
	NEED(pair->fd >= 0 && pair->fd != old);
	say_wait("nothing has come", set, 8, 0);
	peer_put(pair, 10);
	arrived(pair, 10);
	say_wait("bytes", set, 8, 0);
	say_wait("once", once, 8, 0);
	say_wait("and no more", once, 8, 0);
	say_ret("changed by the new number", set_ctl(set, EPOLL_CTL_MOD, pair->fd, EPOLLIN, 3));
	say_ret("out by the new number", set_ctl(set, EPOLL_CTL_DEL, pair->fd, 0, 0));
	say_ret("in by the new number", set_ctl(set, EPOLL_CTL_ADD, pair->fd, EPOLLIN, 1));
	say_wait("twice", set, 8, 0);
	say_ret("and out", set_ctl(set, EPOLL_CTL_DEL, pair->fd, 0, 0));
	get(pair, 10);
	say_wait("all is read", set, 8, 0);
	put(pair, 10);
	peer_get(pair, 10);
	NEED(dup2(pair->fd, old) == old);
	say_ret("changed by the old number", set_ctl(set, EPOLL_CTL_MOD, old, EPOLLIN | EPOLLOUT, 4));
	say_wait("room", set, 8, 0);
	say_ret("armed anew", set_ctl(once, EPOLL_CTL_MOD, old, EPOLLIN | EPOLLONESHOT, 5));
	peer_put(pair, 10);
	arrived(pair, 10);
	say_wait("bytes and room", set, 8, 0);
	say_wait("once more", once, 8, 0);
	say_ret("out by the old number", set_ctl(set, EPOLL_CTL_DEL, old, 0, 0));
	say_wait("it has gone", set, 8, 0);
	get(pair, 10);
}

/* Bytes are unread, and the other end makes no call meanwhile. */
static void passed_unread(void)
{
	struct pair *pair = open_pair();
	int channel[2], null = open("/dev/null", O_RDONLY), set = set_new(), edges = set_new(), once = set_new();
	const int old = pair->fd;
	NEED(socketpair(AF_UNIX, SOCK_STREAM, 0, channel) == 0 && null >= 0);
	NEED(set_ctl(set, EPOLL_CTL_ADD, old, EPOLLIN, 1) == 0);
	NEED(set_ctl(edges, EPOLL_CTL_ADD, old, EPOLLIN | EPOLLET, 2) == 0);
	NEED(set_ctl(once, EPOLL_CTL_ADD, old, EPOLLIN | EPOLLONESHOT, 3) == 0);
	peer_put(pair, 10);
	arrived(pair, 10);
	NEED(pass_in(channel[0], old) == 1 && dup2(null, old) == old);
	pair->fd = pass_out(channel[1], 0);
	NEED(pair->fd >= 0 && pair->fd != old);
	say_wait("bytes", set, 8, 5000);
	say_wait("an edge", edges, 8, 5000);
	say_wait("and no more", edges, 8, 0);
	say_wait("once", once, 8, 5000);
	say_wait("once alone", once, 8, 0);
	get(pair, 10);
	say_wait("all is read", set, 8, 0);
	peer_put(pair, 10);
	arrived(pair, 10);
	say_wait("bytes again", set, 8, 5000);
	say_wait("an edge again", edges, 8, 5000);
	get(pair, 10);
}

/* Its taker is a process that was there before. The peer makes no call until the taker has read. */
static void passed_unread_to_another(void)
{
	int channel[2];
	NEED(socketpair(AF_UNIX, SOCK_STREAM, 0, channel) == 0);
	pid_t child = fork();
	if (child == 0) {
		NEED(close(channel[0]) == 0);
		struct pollfd one = {.fd = pass_out(channel[1], 0), .events = POLLIN};
		_exit(poll(&one, 1, 5000) != 1 || recv(one.fd, data, 10, MSG_WAITALL) != 10);
	}
	NEED(close(channel[1]) == 0);
	struct pair *pair = open_pair();
	peer_put(pair, 10);
	arrived(pair, 10);
	NEED(pass_in(channel[0], pair->fd) == 1 && close(pair->fd) == 0);
	say_child(child);
}

/* The second message holds the socket when the first has been read and both numbers are closed. */
static void passed_twice(void)
{
	struct pair *pair = open_pair();
	int channel[2], set = set_new();
	NEED(socketpair(AF_UNIX, SOCK_STREAM, 0, channel) == 0);
	NEED(set_ctl(set, EPOLL_CTL_ADD, pair->fd, EPOLLIN, 1) == 0);
	NEED(pass_in(channel[0], pair->fd) == 1 && pass_in(channel[0], pair->fd) == 1);
	NEED(close(pair->fd) == 0);
	pair->fd = pass_out(channel[1], 0);
	NEED(pair->fd >= 0);
	peer_put(pair, 10);
	arrived(pair, 10);
	say_wait("bytes", set, 8, 0);
	get(pair, 10);
	NEED(close(pair->fd) == 0);
	pair->fd = pass_out(channel[1], 0);
	NEED(pair->fd >= 0);
	peer_put(pair, 10);
	arrived(pair, 10);
	say_wait("bytes again", set, 8, 0);
	get(pair, 10);
}

/* The same, and the first leaves a copy behind that closes without a registration of its own. */
static void passed_twice_and_kept(void)
{
	struct pair *pair = open_pair();
	int channel[2], set = set_new();
	NEED(socketpair(AF_UNIX, SOCK_STREAM, 0, channel) == 0);
	NEED(set_ctl(set, EPOLL_CTL_ADD, pair->fd, EPOLLIN, 1) == 0);
	NEED(pass_in(channel[0], pair->fd) == 1 && pass_in(channel[0], pair->fd) == 1);
	int copy = pass_out(channel[1], 0);
	NEED(copy >= 0 && close(copy) == 0 && close(pair->fd) == 0);
	pair->fd = pass_out(channel[1], 0);
	NEED(pair->fd >= 0);
	peer_put(pair, 10);
	arrived(pair, 10);
	say_wait("bytes", set, 8, 0);
	get(pair, 10);
}

/* Sets are more than registrations were remembered once; some end meanwhile, and others begin in their place. */
static void passed_in_many_sets(void)
{
	enum { SETS = 80, ENDED = 8 };
	struct pair *pair = open_pair();
	int channel[2], sets[SETS];
	NEED(socketpair(AF_UNIX, SOCK_STREAM, 0, channel) == 0);
	for (int i = 0; i < SETS; i++) {
		sets[i] = set_new();
		NEED(set_ctl(sets[i], EPOLL_CTL_ADD, pair->fd, EPOLLIN, (uint64_t)i + 1) == 0);
	}
	NEED(pass_in(channel[0], pair->fd) == 1 && close(pair->fd) == 0);
	for (int i = 0; i < ENDED; i++)
		NEED(close(sets[i]) == 0);
	pair->fd = pass_out(channel[1], 0);
	NEED(pair->fd >= 0);
	for (int i = 0; i < ENDED; i++)
		sets[i] = set_new();
	peer_put(pair, 10);
	arrived(pair, 10);
	int told = 0, wrong = 0;
	for (int i = 0; i < SETS; i++) {
		struct epoll_event event;
		int n = epoll_wait(sets[i], &event, 1, 0);
		told += n;
		wrong += n == 1 && event.data.u64 != (uint64_t)i + 1;
	}
	say("%d sets tell, %d wrong", told, wrong);
	get(pair, 10);
}

/* The old number is another connection's meanwhile, which is in the same set by it. */
static void passed_and_replaced(void)
{
	struct pair *pair = open_pair(), *other = open_pair();
	int channel[2], set = set_new();
	const int old = pair->fd;
	NEED(socketpair(AF_UNIX, SOCK_STREAM, 0, channel) == 0);
	NEED(set_ctl(set, EPOLL_CTL_ADD, old, EPOLLIN, 1) == 0);
	NEED(pass_in(channel[0], old) == 1 && dup2(other->fd, old) == old);
	say_ret("changed by the old number", set_ctl(set, EPOLL_CTL_MOD, old, EPOLLIN, 2));
	say_ret("in by the old number", set_ctl(set, EPOLL_CTL_ADD, old, EPOLLIN, 2));
	peer_put(other, 10);
	arrived(other, 10);
	say_wait("the other alone", set, 8, 0);
	pair->fd = pass_out(channel[1], 0);
	NEED(pair->fd >= 0);
	peer_put(pair, 10);
	arrived(pair, 10);
	say_wait("both", set, 8, 0);
	say_ret("changed", set_ctl(set, EPOLL_CTL_MOD, old, EPOLLPRI, 3));
	say_wait("the one alone", set, 8, 0);
	say_ret("out", set_ctl(set, EPOLL_CTL_DEL, old, 0, 0));
	say_wait("one is left", set, 8, 0);
	NEED(close(old) == 0);
	say_wait("and stays", set, 8, 0);
	get(pair, 10);
	get(other, 10);
	say_wait("all is read", set, 8, 0);
	NEED(close(pair->fd) == 0);
	say_wait("it has gone", set, 8, 0);
}

/* A set that the shim does not see: the kernel alone waits on it. */
static int set_unseen(void)
{
	long set = epoll_create1(0);
#ifdef __x86_64__
	NEED(close((int)set) == 0);
	__asm__ volatile("syscall" : "=a"(set) : "a"((long)SYS_epoll_create1), "D"(0l) : "rcx", "r11", "memory");
#endif
	return (int)set;
}

/* The sets come into another one while the socket is in the message. */
static void passed_into(int outer)
{
	struct pair *pair = open_pair();
	int channel[2], set = set_new(), edges = set_new();
	NEED(socketpair(AF_UNIX, SOCK_STREAM, 0, channel) == 0);
	NEED(set_ctl(set, EPOLL_CTL_ADD, pair->fd, EPOLLIN, 1) == 0);
	NEED(set_ctl(edges, EPOLL_CTL_ADD, pair->fd, EPOLLIN | EPOLLET, 2) == 0);
	peer_put(pair, 10);
	arrived(pair, 10);
	say_wait("an edge", edges, 8, 0);
	get(pair, 10);
	NEED(pass_in(channel[0], pair->fd) == 1 && close(pair->fd) == 0);
	NEED(set_ctl(outer, EPOLL_CTL_ADD, set, EPOLLIN, 3) == 0);
	NEED(set_ctl(outer, EPOLL_CTL_ADD, edges, EPOLLIN, 4) == 0);
	pair->fd = pass_out(channel[1], 0);
	NEED(pair->fd >= 0);
	say_wait("nothing has come", outer, 8, 0);
	peer_put(pair, 10);
	arrived(pair, 10);
	say_wait("the sets", outer, 8, 0);
	say_wait("bytes", set, 8, 0);
	say_wait("a new edge", edges, 8, 0);
	get(pair, 10);
	say_wait("all is read", outer, 8, 0);
}

static void passed_and_nested(void)
{
	passed_into(set_new());
}

static void passed_and_nested_unseen(void)
{
	passed_into(set_unseen());
}

/* The peer's end, of which the program has not asked, comes meanwhile: a one-shot registration still has to tell the hang-up. */
static void passed_and_ended(void)
{
	struct pair *pair = open_pair();
	int channel[2], set = set_new();
	NEED(socketpair(AF_UNIX, SOCK_STREAM, 0, channel) == 0);
	NEED(set_ctl(set, EPOLL_CTL_ADD, pair->fd, EPOLLPRI | EPOLLONESHOT, 1) == 0);
	NEED(pass_in(channel[0], pair->fd) == 1 && close(pair->fd) == 0);
	say_reply("the peer's end", peer(pair, ACT_SHUTDOWN, SHUT_WR, 0));
	say_wait("on its way", set, 8, 0);
	pair->fd = pass_out(channel[1], 0);
	NEED(pair->fd >= 0);
	await_fin(pair);
	say_wait("nothing yet", set, 8, 0);
	NEED(shutdown(pair->fd, SHUT_WR) == 0);
	say_wait("a hang-up", set, 8, 5000);
	say_wait("once", set, 8, 0);
}

/* A one-shot registration has told the peer's end: a wait on the set sleeps. */
static void passed_and_told_once(void)
{
	enum { WAIT_MS = 300 };
	struct pair *pair = open_pair();
	struct timespec before, after;
	struct epoll_event event;
	int channel[2], set = set_new();
	NEED(socketpair(AF_UNIX, SOCK_STREAM, 0, channel) == 0);
	NEED(set_ctl(set, EPOLL_CTL_ADD, pair->fd, EPOLLIN | EPOLLONESHOT, 1) == 0);
	NEED(pass_in(channel[0], pair->fd) == 1 && close(pair->fd) == 0);
	say_reply("the peer's end", peer(pair, ACT_SHUTDOWN, SHUT_WR, 0));
	say_wait("on its way", set, 8, 5000);
	NEED(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before) == 0);
	say_ret("no more", epoll_wait(set, &event, 1, WAIT_MS));
	NEED(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after) == 0);
	int64_t used_ms = (after.tv_sec - before.tv_sec) * 1000 + (after.tv_nsec - before.tv_nsec) / 1000000;
	say("asleep: %d", used_ms < WAIT_MS / 2);
	pair->fd = pass_out(channel[1], 0);
	NEED(pair->fd >= 0);
	say_wait("it has told", set, 8, 0);
	NEED(set_ctl(set, EPOLL_CTL_MOD, pair->fd, EPOLLIN | EPOLLONESHOT, 2) == 0);
	say_wait("armed again", set, 8, 5000);
}

/* The number of the registration is closed already, and no call can change it. */
static void passed_by_copy(void)
{
	struct pair *pair = open_pair();
	int channel[2], set = set_new(), once = set_new();
	NEED(socketpair(AF_UNIX, SOCK_STREAM, 0, channel) == 0);
	NEED(set_ctl(set, EPOLL_CTL_ADD, pair->fd, EPOLLIN, 1) == 0);
	NEED(set_ctl(once, EPOLL_CTL_ADD, pair->fd, EPOLLIN | EPOLLONESHOT, 2) == 0);
	int copy = fcntl(pair->fd, F_DUPFD, 200);
	NEED(copy == 200 && close(pair->fd) == 0);
	for (int turn = 0; turn < 2; turn++) {
		NEED(pass_in(channel[0], copy) == 1 && close(copy) == 0);
		int held = pass_out(channel[1], 0);
		NEED(held >= 0 && dup2(held, copy) == copy && (held == copy || close(held) == 0));
		pair->fd = copy;
	}
	peer_put(pair, 10);
	arrived(pair, 10);
	say_wait("bytes", set, 8, 0);
	say_wait("once", once, 8, 0);
	say_wait("and no more", once, 8, 0);
	get(pair, 10);
	say_wait("all is read", set, 8, 0);
}

/* On TCP, and under the same number again: an edge that has been told is not told once more. */
static void passed_and_told(void)
{
	struct pair *pair = open_pair();
	int channel[2], null = open("/dev/null", O_RDONLY), set = set_new();
	const int old = pair->fd;
	NEED(socketpair(AF_UNIX, SOCK_STREAM, 0, channel) == 0 && null >= 0);
	NEED(set_ctl(set, EPOLL_CTL_ADD, old, EPOLLIN | EPOLLOUT | EPOLLET, 1) == 0);
	NEED(pass_in(channel[0], old) == 1 && dup2(null, old) == old);
	int other = pass_out(channel[1], 0);
	NEED(other >= 0 && dup2(other, old) == old && close(other) == 0);
	int lower = 0;
	while (lower < old) /* the next one gets the number that is closed */
		lower = dup(null);
	NEED(close(lower) == 0);
	put(pair, 10);
	peer_get(pair, 10);
	peer_put(pair, 10);
	arrived(pair, 10);
	NEED(set_ctl(set, EPOLL_CTL_MOD, old, EPOLLIN | EPOLLOUT | EPOLLET, 2) == 0);
	say_wait("bytes and room", set, 8, 0);
	say_wait("once", set, 8, 0);
	NEED(pass_in(channel[0], old) == 1 && close(old) == 0);
	NEED(pass_out(channel[1], 0) == old);
	say_wait("not again", set, 8, 0);
	peer_put(pair, 10);
	arrived(pair, 20);
	say_wait("more bytes", set, 8, 0);
	get(pair, 20);
}

/* A child takes the socket out of the message: the set, which both have, tells either. */
static void passed_to_child(void)
{
	struct pair *pair = open_pair();
	int channel[2], told[2], go[2], set = set_new();
	char byte = 0;
	NEED(socketpair(AF_UNIX, SOCK_STREAM, 0, channel) == 0 && pipe(told) == 0 && pipe(go) == 0);
	NEED(set_ctl(set, EPOLL_CTL_ADD, pair->fd, EPOLLIN, 1) == 0);
	NEED(pass_in(channel[0], pair->fd) == 1 && close(pair->fd) == 0);
	pid_t child = fork();
	if (child == 0) {
		forget_peer();
		int fd = pass_out(channel[1], 0);
		struct epoll_event event;
		if (fd < 0 || write(told[1], &byte, 1) != 1 || epoll_wait(set, &event, 1, 5000) != 1)
			_exit(1);
		_exit(read(go[0], &byte, 1) == 1 && recv(fd, data, 10, MSG_WAITALL) == 10 ? 0 : 2);
	}
	NEED(read(told[0], &byte, 1) == 1);
	peer_now(pair, ACT_SEND, 10, 0);
	say_wait("bytes for the child", set, 8, 5000);
	peer_done();
	NEED(write(go[1], &byte, 1) == 1);
	say_child(child);
}

struct taker {
	int channel, fd;
	pthread_barrier_t taken;
};

static void *take_out(void *argument)
{
	struct taker *taker = argument;
	taker->fd = pass_out(taker->channel, 0);
	pthread_barrier_wait(&taker->taken);
	return NULL;
}

/* Another thread takes it out while the last number is being closed here. */
static void passed_between_threads(void)
{
	enum { TURNS = 6 };
	for (int turn = 0; turn < TURNS; turn++) {
		struct pair *pair = open_pair();
		struct taker taker;
		pthread_t thread;
		int channel[2], set = set_new();
		NEED(socketpair(AF_UNIX, SOCK_STREAM, 0, channel) == 0);
		NEED(set_ctl(set, EPOLL_CTL_ADD, pair->fd, EPOLLIN, 1) == 0);
		taker.channel = channel[1];
		NEED(pthread_barrier_init(&taker.taken, NULL, 2) == 0);
		NEED(pthread_create(&thread, NULL, take_out, &taker) == 0);
		NEED(pass_in(channel[0], pair->fd) == 1 && close(pair->fd) == 0);
		pthread_barrier_wait(&taker.taken);
		NEED(pthread_join(thread, NULL) == 0);
		NEED(taker.fd >= 0);
		pair->fd = taker.fd;
		peer_put(pair, 10);
		arrived(pair, 10);
		say_wait("bytes", set, 8, 0);
		get(pair, 10);
		NEED(close(pair->fd) == 0 && close(set) == 0 && close(channel[0]) == 0 && close(channel[1]) == 0);
		pthread_barrier_destroy(&taker.taken);
	}
}

static void passed_to_another(bool keep)
{
	int channel[2];
	NEED(socketpair(AF_UNIX, SOCK_STREAM, 0, channel) == 0);
	pid_t child = fork(); /* before there is a connection: a stranger to it */
	if (child == 0) {
		NEED(close(channel[0]) == 0);
		int fd = pass_out(channel[1], 0);
		for (;;) {
			uint8_t bytes[64];
			ssize_t got = recv(fd, bytes, sizeof bytes, 0);
			if (got <= 0)
				_exit(got < 0);
			if (send(fd, bytes, (size_t)got, 0) != got)
				_exit(2);
		}
	}
	NEED(close(channel[1]) == 0);
	struct pair *pair = open_pair();
	say_ret("send it", pass_in(channel[0], pair->fd));
	if (!keep)
		NEED(close(pair->fd) == 0);
	/* the child echoes the peer's own bytes: what comes back is what went */
	uint64_t at = pair->in;
	for (int i = 0; i < 100; i++)
		peer_put(pair, 8);
	struct reply reply = peer(pair, ACT_ARRIVED, 800, 0);
	say_reply("echoed by the one it was given to", reply);
	if (keep) {
		put(pair, 0);
		NEED(close(pair->fd) == 0);
	}
	NEED(at == pair->in);
	say_reply("the peer shuts down", peer(pair, ACT_SHUTDOWN, SHUT_WR, 0));
	int status;
	NEED(waitpid(child, &status, 0) == child);
	say("the child's status %d", status);
	say_reply("all echoed", peer(pair, ACT_ARRIVED, 800, 0));
}

static void passed_and_closed(void)
{
	passed_to_another(false);
}

static void passed_and_kept(void)
{
	passed_to_another(true);
}

static void taken_by_number(void)
{
	/* /proc/self/fd and fstat name it as before; open of a socket fails as before. */
	struct pair *pair = open_pair();
	char path[64], target[64];
	snprintf(path, sizeof path, "/proc/self/fd/%d", pair->fd);
	ssize_t len = readlink(path, target, sizeof target - 1);
	NEED(len > 0);
	say("%.8s", target);
	say_ret("open of it", open(path, O_RDWR));
	say_ret("fsync", fsync(pair->fd));
	say_ret("ftruncate", ftruncate(pair->fd, 0));
	put(pair, 1);
	peer_get(pair, 1);
	stays(pair);
}

/* ---- numbers that come anew after a close that no hook sees ---- */
/* A system call of our own, as some libraries make them. */
static long unseen(long number, long a, long b, long c)
{
#if defined(__x86_64__)
	__asm__ volatile("syscall" : "+a"(number) : "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
	return number;
#else
	register long first __asm__("x0") = a, second __asm__("x1") = b, third __asm__("x2") = c,
						call __asm__("x8") = number;
	__asm__ volatile("svc 0" : "+r"(first) : "r"(second), "r"(third), "r"(call) : "memory");
	return first;
#endif
}

static int null_fd, way[2], other_end = -1;

static int by_open(void)
{
	return open("/dev/zero", O_RDONLY);
}
static int by_openat(void)
{
	return openat(AT_FDCWD, "/dev/zero", O_RDONLY);
}
static int by_creat(void)
{
	return creat("/dev/null", 0600);
}
static int by_fopen(void)
{
	return fileno(fopen("/dev/zero", "r"));
}
static int by_opendir(void)
{
	return dirfd(opendir("/"));
}
static int by_temporary_file(void)
{
	char path[] = "/tmp/scene-XXXXXX";
	int fd = mkstemp(path);
	NEED(unlink(path) == 0);
	return fd;
}
static int by_pipe(void)
{
	int pipes[2];
	NEED(pipe(pipes) == 0);
	other_end = pipes[1];
	NEED(write(other_end, "ab", 2) == 2);
	return pipes[0];
}
static int by_pipe2(void)
{
	int pipes[2];
	NEED(pipe2(pipes, O_NONBLOCK) == 0);
	other_end = pipes[1];
	return pipes[0];
}
static int by_socketpair(void)
{
	int pipes[2];
	NEED(socketpair(AF_UNIX, SOCK_STREAM, 0, pipes) == 0);
	other_end = pipes[1];
	NEED(send(other_end, "abc", 3, 0) == 3);
	return pipes[0];
}
static int by_socket(void)
{
	return socket(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK, 0);
}
static int by_memfd(void)
{
	return memfd_create("scene", 0);
}
static int by_eventfd(void)
{
	return eventfd(1, 0);
}
static int by_timerfd(void)
{
	return timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
}
static int by_signalfd(void)
{
	sigset_t none;
	sigemptyset(&none);
	return signalfd(-1, &none, SFD_NONBLOCK);
}
static int by_inotify(void)
{
	return inotify_init1(IN_NONBLOCK);
}
static int by_epoll(void)
{
	return epoll_create1(0);
}
static int by_dup(void)
{
	return dup(null_fd);
}
static int by_fcntl(void)
{
	return fcntl(null_fd, F_DUPFD_CLOEXEC, 0);
}
static int by_message(void)
{
	char byte, control[CMSG_SPACE(sizeof(int))];
	struct iovec iov = {&byte, 1};
	struct msghdr message = {
		.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
	int fd;
	NEED(recvmsg(way[1], &message, 0) == 1);
	memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
	return fd;
}
static int by_syscall(void)
{
	return (int)syscall(SYS_openat, AT_FDCWD, "/dev/zero", O_RDONLY);
}
static int by_nobody(void)
{
	return (int)unseen(SYS_openat, AT_FDCWD, (long)"/dev/zero", O_RDONLY);
}

static void send_number(void)
{
	char control[CMSG_SPACE(sizeof(int))] = "";
	struct iovec iov = {"x", 1};
	struct msghdr message = {
		.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
	struct cmsghdr *header = CMSG_FIRSTHDR(&message);

	NEED(socketpair(AF_UNIX, SOCK_STREAM, 0, way) == 0);
	header->cmsg_level = SOL_SOCKET;
	header->cmsg_type = SCM_RIGHTS;
	header->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(header), &null_fd, sizeof null_fd);
	NEED(sendmsg(way[0], &message, 0) == 1);
}

static const struct {
	const char *name;
	int (*make)(void);
} makers[] = {
	{"open", by_open},          {"openat", by_openat},     {"creat", by_creat},
	{"fopen", by_fopen},        {"opendir", by_opendir},   {"mkstemp", by_temporary_file},
	{"pipe", by_pipe},          {"pipe2", by_pipe2},       {"socketpair", by_socketpair},
	{"socket", by_socket},      {"memfd", by_memfd},       {"eventfd", by_eventfd},
	{"timerfd", by_timerfd},    {"signalfd", by_signalfd}, {"inotify", by_inotify},
	{"epoll_create", by_epoll}, {"dup", by_dup},           {"fcntl", by_fcntl},
	{"SCM_RIGHTS", by_message}, {"syscall", by_syscall},
};

static void numbers_come_anew(void)
{
	/* Copies of a connection are closed unseen, and their numbers returned by calls: each is of its new file from then on. */
	struct pair *pair = open_pair();
	null_fd = open("/dev/null", O_RDONLY);
	send_number();
	for (size_t i = 0; i < sizeof makers / sizeof *makers; i++) {
		int copy = dup(pair->fd);
		peer_put(pair, 9);
		arrived(pair, 9);
		NEED(unseen(SYS_close, copy, 0, 0) == 0);
		int made = makers[i].make();
		say("%s: %s", makers[i].name, made == copy ? "its number" : "another");
		say_ret("read", read(made, data, 8));
		say_ret("write", write(made, "12345678", 8));
		get(pair, 9);
		put(pair, 5);
		peer_get(pair, 5);
		NEED(close(made) == 0);
		if (other_end >= 0)
			NEED(close(other_end) == 0);
		other_end = -1;
	}
	stays(pair);
	NEED(unseen(SYS_close, pair->fd, 0, 0) == 0);
	NEED(dup(null_fd) == pair->fd);
	say_reply("the end", peer(pair, ACT_RECV_ONCE, 10, 0));
	say_ret("read", read(pair->fd, data, 8));
}

static void number_of_a_file_opened_unseen(void)
{
	/* Nobody has seen the one or the other: a read asks whose number it is before it says that there is nothing. */
	struct pair *pair = open_pair();
	put(pair, 5);
	peer_get(pair, 5);
	int copy = dup(pair->fd);
	NEED(unseen(SYS_close, copy, 0, 0) == 0);
	NEED(by_nobody() == copy);
	say_ret("read", read(copy, data, 8));
	say_ret("read again", read(copy, data, 8));
	put(pair, 5);
	peer_get(pair, 5);
	peer_put(pair, 9);
	get(pair, 9);
	stays(pair);
	NEED(unseen(SYS_close, pair->fd, 0, 0) == 0);
	say_reply("the end", peer(pair, ACT_RECV_ONCE, 10, 0));
	say_ret("read of nothing", read(pair->fd, data, 8));
	NEED(by_nobody() == pair->fd);
	say_ret("read of a file", read(pair->fd, data, 8));
}

const struct scene scenes_fd[] = {
	SCENE(copies),
	SCENE(copy_closed_keeps),
	SCENE(dup2_over),
	SCENE(number_reused),
	SCENE(ranges_closed),
	SCENE(everything_closed),
	SCENE(lowest_number),
	SCENE(passed_within),
	SCENE(passed_registered),
	SCENE(passed_unread),
	SCENE(passed_unread_to_another),
	SCENE(passed_twice),
	SCENE(passed_twice_and_kept),
	SCENE(passed_in_many_sets),
	SCENE(passed_and_replaced),
	SCENE(passed_and_ended),
	SCENE(passed_by_copy),
	SCENE(passed_and_told),
	SCENE(passed_and_told_once),
	SCENE(passed_and_nested),
	SCENE(passed_and_nested_unseen),
	SCENE(passed_to_child),
	SCENE(passed_between_threads),
	SCENE(passed_and_closed),
	SCENE(passed_and_kept),
	SCENE(taken_by_number),
	SCENE(numbers_come_anew),
	SCENE(number_of_a_file_opened_unseen),
	{NULL, NULL},
};
