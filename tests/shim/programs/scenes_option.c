/* Socket options, descriptor flags and ioctls that change how calls behave. */
#include "scene.h"

#include <linux/errqueue.h>
#include <linux/sockios.h>

static uint8_t data[1 << 20];

static void set_timeout(int fd, int option, int ms)
{
	struct timeval timeout = {.tv_sec = ms / 1000, .tv_usec = ms % 1000 * 1000};
	NEED(setsockopt(fd, SOL_SOCKET, option, &timeout, sizeof timeout) == 0);
}

static void rcvtimeo(void)
{
	struct pair *pair = open_pair();
	struct iovec one = {.iov_base = data, .iov_len = 100};
	struct msghdr header = {.msg_iov = &one, .msg_iovlen = 1};
	struct mmsghdr messages = {.msg_hdr = header};
	set_timeout(pair->fd, SO_RCVTIMEO, 60);
	int64_t began = now_ms();
	say_ret("recv", recv(pair->fd, data, 100, 0));
	say_near("recv", now_ms() - began, 60);
	began = now_ms();
	say_ret("read", read(pair->fd, data, 100));
	say_near("read", now_ms() - began, 60);
	began = now_ms();
	say_ret("recvmsg", recvmsg(pair->fd, &header, 0));
	say_near("recvmsg", now_ms() - began, 60);
	began = now_ms();
	say_ret("recvmmsg", recvmmsg(pair->fd, &messages, 1, 0, NULL));
	say_near("recvmmsg", now_ms() - began, 60);
	began = now_ms();
	say_ret("recv PEEK", recv(pair->fd, data, 100, MSG_PEEK));
	say_near("recv PEEK", now_ms() - began, 60);
	peer_put(pair, 10);
	arrived(pair, 10); /* a provider between may want a CPU for longer than the time */
	began = now_ms();
	say_bytes("recv WAITALL", pair, data, recv(pair->fd, data, 100, MSG_WAITALL));
	say_near("recv WAITALL", now_ms() - began, 60);
	set_timeout(pair->fd, SO_RCVTIMEO, 5000);
	began = now_ms();
	say_ret("recv DONTWAIT", recv(pair->fd, data, 100, MSG_DONTWAIT));
	say("%s", now_ms() - began < 4000 ? "at once" : "LATE");
	peer_when_asleep(pair, ACT_SEND, 10, 0);
	say_bytes("recv within the time", pair, data, recv(pair->fd, data, 100, 0));
	peer_done();
	set_timeout(dup(pair->fd), SO_RCVTIMEO, 40);
	began = now_ms();
	say_ret("readv, set through a duplicate", readv(pair->fd, &one, 1));
	say_near("readv", now_ms() - began, 40);
	set_timeout(pair->fd, SO_RCVTIMEO, 0);
	peer_when_asleep(pair, ACT_SEND, 10, 0);
	say_bytes("recv without a time", pair, data, recv(pair->fd, data, 100, 0));
	peer_done();
	struct timeval timeout = {.tv_sec = 7};
	socklen_t len = sizeof timeout;
	NEED(getsockopt(pair->fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, &len) == 0);
	say("timeout %ld.%06ld", (long)timeout.tv_sec, (long)timeout.tv_usec);
	stays(pair);
}

static void sndtimeo(void)
{
	struct pair *pair = open_pair();
	long total = flood(pair);
	set_timeout(pair->fd, SO_SNDTIMEO, 80);
	total += send_until_error("send", pair, 0);
	int64_t began;
	ssize_t wrote;
	do { /* the kernel may find a little room where there was none */
		began = now_ms();
		wrote = write(pair->fd, pattern_out(pair, CHUNK), CHUNK);
		sent(pair, wrote);
		total += wrote > 0 ? wrote : 0;
	} while (wrote > 0);
	say_ret("write", wrote);
	say_near("write", now_ms() - began, 80);
	total += send_until_error("send DONTWAIT", pair, MSG_DONTWAIT);
	set_timeout(pair->fd, SO_SNDTIMEO, 5000);
	struct reply reply = peer(pair, ACT_RECV, total, 0);
	say("the peer took %s", reply.result == total && !reply.wrong ? "all that was sent" : "SOMETHING ELSE");
	sent(pair, say_ret("send into room", send(pair->fd, pattern_out(pair, 100), 100, 0)));
	peer_get(pair, 100);
	set_timeout(pair->fd, SO_SNDTIMEO, 100);
	enum { LEN = 64 << 20 };
	uint8_t *much = mmap(NULL, LEN, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	NEED(much != MAP_FAILED);
	fill_pattern(KEY_OUT, pair->out, much, LEN);
	wrote = send(pair->fd, much, LEN, 0);
	say("send of more than fits: %s", wrote > 0 && wrote < LEN ? "a part" : "NOT A PART");
	sent(pair, wrote);
	reply = peer(pair, ACT_RECV, wrote, 0);
	say("the peer took %s", reply.result == wrote && !reply.wrong ? "all that was sent" : "SOMETHING ELSE");
	stays(pair);
}

/* A direction that goes back to TCP with bytes left in the ring is told to be readable below the mark: the kernel would not
 * wake anybody for the few that may be missing. */
static int below_mark(int ready)
{
	return choice.shaken && ready == 1 ? 0 : ready;
}

static void rcvlowat(void)
{
	struct pair *pair = open_pair();
	int low = 10;
	struct pollfd item = {.fd = pair->fd, .events = POLLIN};
	NEED(setsockopt(pair->fd, SOL_SOCKET, SO_RCVLOWAT, &low, sizeof low) == 0);
	peer_put(pair, 5);
	arrived(pair, 5);
	int ready = poll(&item, 1, 30);
	say_poll("poll with 5 of 10", below_mark(ready), item.revents * below_mark(ready));
	int epoll = epoll_create1(0);
	struct epoll_event event = {.events = EPOLLIN, .data.u64 = 1};
	NEED(epoll_ctl(epoll, EPOLL_CTL_ADD, pair->fd, &event) == 0);
	ready = epoll_wait(epoll, &event, 1, 0);
	say_ret("epoll with 5 of 10", below_mark(ready));
	say_bytes("recv DONTWAIT takes what is there", pair, data, recv(pair->fd, data, 100, MSG_DONTWAIT));
	peer_when_asleep(pair, ACT_SEND, 10, 5);
	long got = recv(pair->fd, data, 100, 0);
	if (choice.shaken && got == 5)
		got += recv(pair->fd, data + got, 5, MSG_WAITALL);
	say_bytes("recv waits for 10", pair, data, got);
	peer_done();
	peer_put(pair, 10);
	arrived(pair, 10);
	ready = poll(&item, 1, 1000);
	say_poll("poll with 10 of 10", ready, item.revents);
	say_ret("epoll with 10 of 10", epoll_wait(epoll, &event, 1, 0));
	say_bytes("recv 3 asks for no more than 3", pair, data, recv(pair->fd, data, 3, 0));
	ready = poll(&item, 1, 0);
	say_poll("poll with 7 of 10", below_mark(ready), item.revents * below_mark(ready));
	peer_when_asleep(pair, ACT_SHUTDOWN, SHUT_WR, 0);
	ready = poll(&item, 1, 5000);
	say_poll("poll at the end with 7 of 10", ready, item.revents);
	peer_done();
	say_bytes("recv", pair, data, recv(pair->fd, data, 100, 0));
	say_ret("recv at the end", recv(pair->fd, data, 100, 0));
}

static void fionread(void)
{
	struct pair *pair = open_pair();
	int value = -1;
	say_ret("FIONREAD", ioctl(pair->fd, FIONREAD, &value));
	say("empty: %d", value);
	peer_put(pair, 100);
	arrived(pair, 100);
	get(pair, 30);
	NEED(ioctl(dup(pair->fd), FIONREAD, &value) == 0);
	say("through a duplicate: %d", value);
	NEED(ioctl(pair->fd, SIOCINQ, &value) == 0);
	say("SIOCINQ: %d", value);
	recv(pair->fd, data, 10, MSG_PEEK);
	NEED(ioctl(pair->fd, FIONREAD, &value) == 0);
	say("after a peek: %d", value);
	peer_put(pair, 3500);
	arrived(pair, 3570);
	get(pair, 3570);
	NEED(ioctl(pair->fd, FIONREAD, &value) == 0);
	say("empty again: %d", value);
	stays(pair);
	peer_put(pair, 9);
	peer(pair, ACT_SHUTDOWN, SHUT_WR, 0);
	await_fin(pair);
	NEED(ioctl(pair->fd, FIONREAD, &value) == 0);
	say("with the end behind: %d", value);
	get(pair, 9);
	NEED(ioctl(pair->fd, FIONREAD, &value) == 0);
	say("at the end: %d", value);
}

static bool outq_becomes(int fd, bool zero)
{
	int64_t deadline = now_ms() + 5000;
	int value = -1;
	do {
		NEED(ioctl(fd, SIOCOUTQ, &value) == 0);
		if ((value == 0) == zero)
			return true;
		sched_yield();
	} while (now_ms() < deadline);
	return false;
}

static void siocoutq(void)
{
	struct pair *pair = open_pair();
	put(pair, 1000);
	say("nothing is on its way once the peer's side has it: %d", outq_becomes(pair->fd, true));
	peer_get(pair, 1000);
	long total = flood(pair);
	int value = 0;
	say_ret("SIOCOUTQ", ioctl(pair->fd, SIOCOUTQ, &value));
	say("a full connection has bytes on the way: %d", value > 0);
	NEED(ioctl(pair->fd, TIOCOUTQ, &value) == 0);
	say("TIOCOUTQ: %d", value > 0);
	peer_get(pair, (size_t)total);
	say("none when the peer has read all: %d", outq_becomes(pair->fd, true));
	stays(pair);
}

static void nonblock_toggled(void)
{
	struct pair *pair = open_pair();
	int copy = dup(pair->fd), on = 1, off = 0;
	nonblocking(copy, true);
	say("O_NONBLOCK seen: %d", !!(fcntl(pair->fd, F_GETFL) & O_NONBLOCK));
	say_ret("recv", recv(pair->fd, data, 10, 0));
	say_ret("read", read(pair->fd, data, 10));
	nonblocking(pair->fd, false);
	peer_when_asleep(pair, ACT_SEND, 10, 0);
	say_bytes("recv blocks again", pair, data, recv(copy, data, 10, 0));
	peer_done();
	NEED(ioctl(pair->fd, FIONBIO, &on) == 0);
	say("O_NONBLOCK seen: %d", !!(fcntl(copy, F_GETFL) & O_NONBLOCK));
	say_ret("recv", recv(copy, data, 10, 0));
	NEED(ioctl(copy, FIONBIO, &off) == 0);
	peer_when_asleep(pair, ACT_SEND, 10, 0);
	say_bytes("read blocks again", pair, data, read(pair->fd, data, 10));
	peer_done();
	pid_t child = fork();
	if (child == 0) {
		nonblocking(copy, true); /* shared by the fork too */
		_exit(0);
	}
	NEED(waitpid(child, NULL, 0) == child);
	say_ret("recv after a child set it", recv(pair->fd, data, 10, 0));
	flood(pair);
	send_until_error("send when full", pair, 0);
	nonblocking(pair->fd, false);
	send_until_error("send DONTWAIT when full", pair, MSG_DONTWAIT);
}

static void linger_zero(void)
{
	struct pair *pair = open_pair();
	struct linger linger = {.l_onoff = 1, .l_linger = 0};
	NEED(setsockopt(pair->fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger) == 0);
	put(pair, 10);
	peer_when_asleep(pair, ACT_POLL, 0, 5000);
	say_ret("close", close(pair->fd));
	struct reply reply = peer_done();
	say("the peer polls %s", poll_names((uint32_t)reply.result));
	say_reply("the peer reads what came before", peer(pair, ACT_RECV_ONCE, 10, 0));
	say_reply("the peer reads", peer(pair, ACT_RECV_ONCE, 10, 0));
	say_reply("the peer reads again", peer(pair, ACT_RECV_ONCE, 10, 0));
	say_reply("the peer sends", peer(pair, ACT_SEND, 10, 0));
}

static void linger_some(void)
{
	struct pair *pair = open_pair();
	struct linger linger = {.l_onoff = 1, .l_linger = 5};
	NEED(setsockopt(pair->fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger) == 0);
	put(pair, 4000);
	peer_when_asleep(pair, ACT_RECV, 4000, 0);
	say_ret("close", close(pair->fd));
	say_reply("the peer reads all", peer_done());
	say_reply("the peer reads the end", peer(pair, ACT_RECV_ONCE, 10, 0));
}

static void options_hold(void)
{
	struct pair *pair = open_pair();
	static const struct {
		const char *name;
		int level, option, value;
	} options[] = {
		{"TCP_NODELAY", IPPROTO_TCP, TCP_NODELAY, 1},   {"SO_KEEPALIVE", SOL_SOCKET, SO_KEEPALIVE, 1},
		{"TCP_KEEPIDLE", IPPROTO_TCP, TCP_KEEPIDLE, 7}, {"TCP_KEEPINTVL", IPPROTO_TCP, TCP_KEEPINTVL, 8},
		{"SO_REUSEADDR", SOL_SOCKET, SO_REUSEADDR, 1},  {"SO_PRIORITY", SOL_SOCKET, SO_PRIORITY, 3},
		{"TCP_QUICKACK", IPPROTO_TCP, TCP_QUICKACK, 1}, {"TCP_USER_TIMEOUT", IPPROTO_TCP, TCP_USER_TIMEOUT, 9000},
		{"TCP_LINGER2", IPPROTO_TCP, TCP_LINGER2, 9},   {"SO_SNDBUF", SOL_SOCKET, SO_SNDBUF, 40000},
		{"SO_RCVBUF", SOL_SOCKET, SO_RCVBUF, 40000},
	};
	static const struct {
		const char *name;
		int option;
	} questions[] = {
		{"SO_TYPE", SO_TYPE},         {"SO_DOMAIN", SO_DOMAIN},
		{"SO_PROTOCOL", SO_PROTOCOL}, {"SO_ACCEPTCONN", SO_ACCEPTCONN},
		{"SO_ERROR", SO_ERROR},
	};
	int value;
	socklen_t len;
	for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
		value = options[i].value;
		say_ret(options[i].name, setsockopt(pair->fd, options[i].level, options[i].option, &value, sizeof value));
		len = sizeof value;
		NEED(getsockopt(pair->fd, options[i].level, options[i].option, &value, &len) == 0);
		say("%s is %d (%u bytes)", options[i].name, value, len);
		put(pair, 3);
		peer_get(pair, 3);
	}
	for (size_t i = 0; i < sizeof questions / sizeof *questions; i++) {
		len = sizeof value;
		NEED(getsockopt(pair->fd, SOL_SOCKET, questions[i].option, &value, &len) == 0);
		say("%s is %d", questions[i].name, value);
	}
	struct tcp_info info;
	len = sizeof info;
	NEED(getsockopt(pair->fd, IPPROTO_TCP, TCP_INFO, &info, &len) == 0);
	say("state %u", info.tcpi_state);
	struct stat status;
	NEED(fstat(pair->fd, &status) == 0);
	say("it is a socket: %d", S_ISSOCK(status.st_mode));
	peer_put(pair, 30);
	get(pair, 30);
}

static void small_buffers(void)
{
	/* A program that sets its buffers small must still get its stream through. */
	struct pair *pair = open_pair_raw();
	int small = 4096;
	NEED(setsockopt(pair->fd, SOL_SOCKET, SO_SNDBUF, &small, sizeof small) == 0);
	NEED(setsockopt(pair->fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof small) == 0);
	if (choice.warm)
		warm_up(pair);
	peer_now(pair, ACT_RECV, 300000, 0);
	put(pair, 300000);
	say_reply("out", peer_done());
	peer_now(pair, ACT_SEND, 300000, 0);
	get(pair, 300000);
	say_reply("in", peer_done());
}

static void cork(void)
{
	struct pair *pair = open_pair();
	int on = 1, off = 0;
	NEED(setsockopt(pair->fd, IPPROTO_TCP, TCP_CORK, &on, sizeof on) == 0);
	put(pair, 100);
	put(pair, 100);
	NEED(setsockopt(pair->fd, IPPROTO_TCP, TCP_CORK, &off, sizeof off) == 0);
	peer_get(pair, 200);
	sent(pair, say_ret("send MORE", send(pair->fd, pattern_out(pair, 50), 50, MSG_MORE)));
	put(pair, 50);
	peer_get(pair, 100);
	stays(pair);
}

static void names(void)
{
	struct pair *pair = open_pair();
	struct sockaddr_storage address;
	char text[INET6_ADDRSTRLEN];
	for (int i = 0; i < 2; i++) {
		socklen_t len = sizeof address;
		NEED((i ? getpeername : getsockname)(pair->fd, (struct sockaddr *)&address, &len) == 0);
		const void *where = address.ss_family == AF_INET ? (void *)&((struct sockaddr_in *)&address)->sin_addr
		                                                 : (void *)&((struct sockaddr_in6 *)&address)->sin6_addr;
		NEED(inet_ntop(address.ss_family, where, text, sizeof text));
		say("%s %s, %u bytes, the right port: %d", i ? "remote" : "local", text, len,
		    ntohs(((struct sockaddr_in *)&address)->sin_port) == (i ? pair->peer_port : pair->port));
	}
	stays(pair);
}

static void message_options(void)
{
	/* Options that make recvmsg deliver more than bytes. */
	struct pair *pair = open_pair();
	int on = 1;
	uint8_t control[256];
	struct iovec one = {.iov_base = data, .iov_len = 100};
	struct msghdr header = {.msg_iov = &one, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
	NEED(setsockopt(pair->fd, IPPROTO_TCP, TCP_INQ, &on, sizeof on) == 0);
	peer_put(pair, 30);
	arrived(pair, 30);
	one.iov_len = 10;
	say_bytes("recvmsg", pair, data, recvmsg(pair->fd, &header, 0));
	for (struct cmsghdr *message = CMSG_FIRSTHDR(&header); message; message = CMSG_NXTHDR(&header, message)) {
		int left;
		memcpy(&left, CMSG_DATA(message), sizeof left);
		say("message level %d type %d: %d", message->cmsg_level, message->cmsg_type, left);
	}
	get(pair, 20);
	NEED(setsockopt(pair->fd, SOL_SOCKET, SO_TIMESTAMPNS, &on, sizeof on) == 0);
	/* The kernel begins to stamp when a worker of its own has had a turn since the first socket asked for it. */
	bool stamped = false;
	for (time_t until = time(NULL) + 10; !stamped && time(NULL) < until;) {
		peer_put(pair, 30);
		arrived(pair, 30);
		header.msg_control = control;
		header.msg_controllen = sizeof control;
		one.iov_len = 100;
		NEED(recvmsg(pair->fd, &header, 0) == 30 && took(pair, data, 30));
		for (struct cmsghdr *message = CMSG_FIRSTHDR(&header); message; message = CMSG_NXTHDR(&header, message))
			stamped |= message->cmsg_level == SOL_SOCKET && message->cmsg_type == SCM_TIMESTAMPNS;
	}
	say("stamped %d", stamped);
	put(pair, 10);
	peer_get(pair, 10);
}

/* recvmsg with `room` bytes for messages: what TCP_INQ counts. */
static void say_inq(const char *name, struct pair *pair, size_t len, int flags, size_t room)
{
	union {
		struct cmsghdr header;
		uint8_t bytes[64];
	} control;
	struct iovec one = {data, len};
	struct msghdr header = {
		.msg_iov = &one, .msg_iovlen = 1, .msg_control = room ? &control : NULL, .msg_controllen = room};
	ssize_t got = recvmsg(pair->fd, &header, flags);
	if (flags & MSG_PEEK)
		say_ret(name, got);
	else
		say_bytes(name, pair, data, got);
	if (got < 0)
		return;
	say("%zu bytes of messages, flags %#x", (size_t)header.msg_controllen, (unsigned)header.msg_flags);
	for (struct cmsghdr *message = CMSG_FIRSTHDR(&header); message; message = CMSG_NXTHDR(&header, message)) {
		int left = -1;
		memcpy(&left, CMSG_DATA(message), message->cmsg_len >= CMSG_LEN(sizeof left) ? sizeof left : 0);
		say("level %d type %d, %zu bytes: %d", message->cmsg_level, message->cmsg_type, (size_t)message->cmsg_len,
		    left);
	}
}

static void inq(void)
{
	/* As gRPC reads: each recvmsg says how much is left. */
	struct pair *pair = open_pair();
	int on = 1, off = 0, wrong = 2, timeout = 9000;
	say_ret("TCP_USER_TIMEOUT", setsockopt(pair->fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout, sizeof timeout));
	say_ret("TCP_INQ 2", setsockopt(pair->fd, IPPROTO_TCP, TCP_INQ, &wrong, sizeof wrong));
	peer_put(pair, 10);
	arrived(pair, 10);
	say_inq("before it is asked for", pair, 5, 0, 64);
	say_ret("TCP_INQ 1", setsockopt(pair->fd, IPPROTO_TCP, TCP_INQ, &on, sizeof on));
	for (int i = 0; i < 100; i++) { /* one that is promoted in the midst meets both ways */
		peer_put(pair, 25);
		arrived(pair, 30);
		say_inq("10 of 30", pair, 10, 0, 64);
		say_inq("15 of 20", pair, 15, 0, 64);
		put(pair, 3);
		peer_get(pair, 3);
	}
	say_inq("a look", pair, 3, MSG_PEEK, 64);
	say_inq("no room", pair, 1, 0, 0);
	say_inq("little room", pair, 1, 0, 18);
	say_inq("too little", pair, 1, 0, 8);
	say_inq("just enough", pair, 1, MSG_CMSG_CLOEXEC, CMSG_LEN(sizeof(int)));
	say_inq("the last one", pair, 100, 0, 64);
	say_inq("nothing", pair, 100, MSG_DONTWAIT, 64);
	peer_put(pair, 3500);
	arrived(pair, 3500);
	say_inq("3000 of 3500", pair, 3000, 0, 64);
	struct iovec one = {data, 500};
	struct mmsghdr messages = {.msg_hdr = {.msg_iov = &one, .msg_iovlen = 1}};
	say_ret("recvmmsg", recvmmsg(pair->fd, &messages, 1, 0, NULL));
	NEED(took(pair, data, 500));
	peer_when_asleep(pair, ACT_SEND, 10, 0);
	say_inq("waits", pair, 4, 0, 64);
	peer_done();
	get(pair, 6);
	stays(pair);
	NEED(setsockopt(pair->fd, IPPROTO_TCP, TCP_INQ, &off, sizeof off) == 0);
	peer_put(pair, 9);
	arrived(pair, 9);
	say_inq("no more asked for", pair, 2, 0, 64);
	NEED(setsockopt(pair->fd, IPPROTO_TCP, TCP_INQ, &on, sizeof on) == 0);
	peer(pair, ACT_SHUTDOWN, SHUT_WR, 0);
	await_fin(pair);
	say_inq("with the end behind", pair, 4, 0, 64);
	say_inq("up to the end", pair, 3, 0, 64);
	say_inq("the end", pair, 3, 0, 64);
	say_inq("the end again", pair, 3, 0, 64);
}

/* Takes completions until `wanted` sends have been told: the range, and that each message was as it should be. */
static void say_completions(const char *name, int fd, uint32_t wanted)
{
	uint32_t from = 0, told = 0, odd = 0;
	while (told < wanted) {
		union {
			struct cmsghdr header;
			uint8_t bytes[128];
		} control;
		char byte;
		struct iovec one = {&byte, 1};
		struct msghdr header = {
			.msg_iov = &one, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
		struct pollfd item = {.fd = fd};
		int ready = poll(&item, 1, 5000);
		if (ready != 1 || item.revents != POLLERR)
			fail("%s: poll says %d %s", name, ready, poll_names((uint32_t)item.revents));
		NEED(recvmsg(fd, &header, MSG_ERRQUEUE) == 0);
		struct cmsghdr *message = CMSG_FIRSTHDR(&header);
		struct sock_extended_err error;
		NEED(message && header.msg_namelen == 0);
		memcpy(&error, CMSG_DATA(message), sizeof error);
		if (!told)
			say("%s: level %d type %d, %zu bytes of %zu, flags %#x", name, message->cmsg_level, message->cmsg_type,
			    (size_t)message->cmsg_len, (size_t)header.msg_controllen, (unsigned)header.msg_flags);
		odd += error.ee_errno != 0 || error.ee_origin != SO_EE_ORIGIN_ZEROCOPY || error.ee_type != 0 ||
		       error.ee_code != SO_EE_CODE_ZEROCOPY_COPIED || (told && error.ee_info != from + told);
		from = told ? from : error.ee_info;
		told += error.ee_data - error.ee_info + 1;
	}
	struct pollfd item = {.fd = fd};
	say("%s: %u from %u, %u odd; then %d and %d", name, told, from, odd, poll(&item, 1, 0),
	    recv(fd, data, 1, MSG_ERRQUEUE | MSG_DONTWAIT) < 0 && errno == EAGAIN);
}

static void zerocopy_send(struct pair *pair, size_t len, int flags)
{
	sent(pair, say_ret("send ZEROCOPY", send(pair->fd, pattern_out(pair, len), len, MSG_ZEROCOPY | flags)));
	peer_get(pair, len);
}

static void zerocopy_told(void)
{
	/* Whatever was copied is told to have been sent. */
	struct pair *pair = open_pair();
	int on = 1, wrong = 2, off = 0;
	zerocopy_send(pair, 100, 0);
	say_ret("nothing is told of it", recv(pair->fd, data, 1, MSG_ERRQUEUE));
	say_ret("SO_ZEROCOPY 2", setsockopt(pair->fd, SOL_SOCKET, SO_ZEROCOPY, &wrong, sizeof wrong));
	say_ret("SO_ZEROCOPY 1", setsockopt(pair->fd, SOL_SOCKET, SO_ZEROCOPY, &on, sizeof on));
	put(pair, 100);
	peer_get(pair, 100);
	say_ret("nothing is told of a plain send", recv(pair->fd, data, 1, MSG_ERRQUEUE));
	for (int i = 0; i < 100; i++) { /* one that is promoted in the midst goes on counting */
		zerocopy_send(pair, 1000, 0);
		say_completions("one", pair->fd, 1);
		peer_put(pair, 10);
		get(pair, 10);
	}
	for (int i = 0; i < 3; i++)
		zerocopy_send(pair, 1000, i ? MSG_DONTWAIT : 0);
	struct iovec pieces[2] = {{(void *)pattern_out(pair, 500), 200}, {(void *)(pattern_out(pair, 500) + 200), 300}};
	struct msghdr header = {.msg_iov = pieces, .msg_iovlen = 2};
	sent(pair, say_ret("sendmsg ZEROCOPY", sendmsg(pair->fd, &header, MSG_ZEROCOPY)));
	peer_get(pair, 500);
	say_completions("four", pair->fd, 4);
	say_ret("send of nothing", send(pair->fd, data, 0, MSG_ZEROCOPY));
	int epoll = epoll_create1(EPOLL_CLOEXEC);
	struct epoll_event event = {.events = EPOLLIN | EPOLLET};
	NEED(epoll_ctl(epoll, EPOLL_CTL_ADD, pair->fd, &event) == 0);
	say_ret("nothing to tell", epoll_wait(epoll, &event, 1, 0));
	for (int i = 0; i < 2; i++) { /* the second is an edge, too, though the first has not been taken */
		zerocopy_send(pair, 100, 0);
		say_ret("an edge", epoll_wait(epoll, &event, 1, 5000));
		say("%s", poll_names(event.events));
	}
	NEED(close(epoll) == 0);
	say_completions("two", pair->fd, 2);
	NEED(setsockopt(pair->fd, SOL_SOCKET, SO_ZEROCOPY, &off, sizeof off) == 0);
	zerocopy_send(pair, 100, 0);
	say_ret("nothing is told once it is off", recv(pair->fd, data, 1, MSG_ERRQUEUE));
	peer_put(pair, 10);
	get(pair, 10);
	stays(pair);
}

static void sigio(void)
{
	struct pair *pair = open_pair();
	sigset_t set;
	sigemptyset(&set);
	sigaddset(&set, SIGIO);
	NEED(sigprocmask(SIG_BLOCK, &set, NULL) == 0);
	NEED(fcntl(pair->fd, F_SETOWN, getpid()) == 0);
	NEED(fcntl(pair->fd, F_SETFL, O_RDWR | O_ASYNC) == 0);
	struct timespec limit = {.tv_sec = 5};
	while (sigtimedwait(&set, NULL, &(struct timespec){0}) == SIGIO)
		; /* setting it up may signal by itself */
	peer_put(pair, 10);
	say_ret("SIGIO came", sigtimedwait(&set, NULL, &limit) == SIGIO);
	get(pair, 10);
	put(pair, 10);
	peer_get(pair, 10);
}

/* What has arrived is there, and what comes signals, though the peer makes no call of its own for it. */
static void sigio_unread(void)
{
	struct pair *pair = open_pair();
	struct timespec limit = {.tv_sec = 5};
	int queued = 0;
	sigset_t set;
	sigemptyset(&set);
	sigaddset(&set, SIGIO);
	NEED(sigprocmask(SIG_BLOCK, &set, NULL) == 0);
	peer_put(pair, 10);
	arrived(pair, 10);
	NEED(fcntl(pair->fd, F_SETOWN, getpid()) == 0);
	NEED(fcntl(pair->fd, F_SETFL, O_RDWR | O_ASYNC) == 0);
	NEED(ioctl(pair->fd, FIONREAD, &queued) == 0);
	struct pollfd item = {.fd = pair->fd, .events = POLLIN};
	int ready = poll(&item, 1, 0);
	say_poll("poll", ready, item.revents);
	say("%d bytes", queued);
	get(pair, 4);
	get(pair, 6);
	while (sigtimedwait(&set, NULL, &(struct timespec){0}) == SIGIO)
		;
	peer_put(pair, 10);
	say_ret("SIGIO came", sigtimedwait(&set, NULL, &limit) == SIGIO);
	get(pair, 10);
	put(pair, 10);
	peer_get(pair, 10);
}

static void disconnect(void)
{
	/* connect to AF_UNSPEC cuts the connection and frees the socket for another. */
	struct pair *pair = open_pair();
	if (!choice.active)
		return; /* the other end keeps no listener to come back to */
	struct sockaddr nobody = {.sa_family = AF_UNSPEC};
	say_ret("connect to AF_UNSPEC", connect(pair->fd, &nobody, sizeof nobody));
	say_reply("the peer", peer(pair, ACT_RECV_ONCE, 10, 0));
	say_ret("recv", recv(pair->fd, data, 10, 0));
	signal(SIGPIPE, SIG_IGN);
	say_ret("send", send(pair->fd, data, 10, 0));
	uint16_t port;
	int listener = loopback_listener(choice.family, &port, 0);
	struct sockaddr_storage address;
	socklen_t len = loopback_address(choice.family, port, true, &address);
	say_ret("connect elsewhere", connect(pair->fd, (struct sockaddr *)&address, len));
	int other = accept(listener, NULL, NULL);
	for (int i = 0; i < 500; i++) {
		NEED(send(pair->fd, "abcd", 4, 0) == 4 && recv(other, data, 4, MSG_WAITALL) == 4);
		NEED(send(other, "efgh", 4, 0) == 4 && recv(pair->fd, data, 4, MSG_WAITALL) == 4);
	}
	say("%.4s", (char *)data);
}

/* A connection whose accepted end is here, and whose listener has had an option set. */
static int accepted_with(int level, int option, int value, int *other)
{
	uint16_t port;
	struct sockaddr_storage address;
	int listener = loopback_listener('4', &port, SOCK_CLOEXEC);
	NEED(setsockopt(listener, level, option, &value, sizeof value) == 0);
	socklen_t len = loopback_address('4', port, true, &address);
	*other = socket(address.ss_family, SOCK_STREAM, 0);
	NEED(connect(*other, (struct sockaddr *)&address, len) == 0);
	int fd = accept(listener, NULL, NULL);
	NEED(fd >= 0 && close(listener) == 0);
	for (int i = 0; i < 400; i++) { /* long enough for what may be promoted */
		NEED(send(*other, data, 64, 0) == 64 && recv(fd, data, 64, MSG_WAITALL) == 64);
		NEED(send(fd, data, 64, 0) == 64 && recv(*other, data, 64, MSG_WAITALL) == 64);
	}
	return fd;
}

static void inherited_options(void)
{
	int other, fd = accepted_with(SOL_SOCKET, SO_RCVLOWAT, 10, &other);
	struct pollfd item = {.fd = fd, .events = POLLIN};
	NEED(send(other, data, 5, 0) == 5);
	say_ret("poll below the low-water mark", poll(&item, 1, 100));
	NEED(send(other, data, 5, 0) == 5);
	say_ret("poll at it", poll(&item, 1, 5000));
	int options[][2] = {{SOL_SOCKET, SO_TIMESTAMP}, {IPPROTO_TCP, 36 /* TCP_INQ */}};
	for (int i = 0; i < 2; i++) {
		char control[256];
		struct iovec one = {data, 64};
		struct msghdr header = {
			.msg_iov = &one, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
		fd = accepted_with(options[i][0], options[i][1], 1, &other);
		ssize_t got;
		int64_t deadline = now_ms() + 5000;
		do { /* the kernel begins to stamp what arrives some time after somebody has asked for it */
			header.msg_controllen = sizeof control;
			NEED(send(other, data, 3, 0) == 3);
			NEED(arrived_at(fd, 3));
			got = recvmsg(fd, &header, 0);
		} while (!header.msg_controllen && now_ms() < deadline);
		say_ret("recvmsg", got);
		say("%zu bytes of messages", (size_t)header.msg_controllen);
	}
}

static volatile sig_atomic_t io_signals;

static void on_io(int signal)
{
	(void)signal;
	io_signals++;
}

static void fioasync(void)
{
	struct pair *pair = open_pair_raw();
	int on = 1;
	signal(SIGIO, on_io);
	NEED(fcntl(pair->fd, F_SETOWN, getpid()) == 0);
	NEED(ioctl(pair->fd, FIOASYNC, &on) == 0);
	if (choice.warm)
		for (int i = 0; i < 200; i++) {
			peer_now(pair, ACT_ECHO, 1, 16);
			put(pair, 16);
			get(pair, 16);
			peer_done();
		}
	io_signals = 0;
	peer_put(pair, 10);
	arrived(pair, 10);
	say("a signal for bytes that came: %d", io_signals > 0);
}

const struct scene scenes_option[] = {
	SCENE(rcvtimeo),
	SCENE(sndtimeo),
	SCENE(rcvlowat),
	SCENE(fionread),
	SCENE(siocoutq),
	SCENE(nonblock_toggled),
	SCENE(linger_zero),
	SCENE(linger_some),
	SCENE(options_hold),
	SCENE(small_buffers),
	SCENE(cork),
	SCENE(names),
	SCENE(message_options),
	SCENE(sigio),
	SCENE(sigio_unread),
	SCENE(disconnect),
	SCENE(inherited_options),
	SCENE(fioasync),
	SCENE(inq),
	SCENE(zerocopy_told),
	{NULL, NULL},
};
