/* Every call by which a program reads and writes a socket, and its flags. */
#include "scene.h"

#include <aio.h>
#include <linux/aio_abi.h>

#include <linux/errqueue.h>

static uint8_t data[1 << 20];

static void write_read(void)
{
	struct pair *pair = open_pair();
	sent(pair, say_ret("write", write(pair->fd, pattern_out(pair, 100), 100)));
	peer_get(pair, 100);
	peer_put(pair, 100);
	arrived(pair, 100);
	say_bytes("read 30", pair, data, read(pair->fd, data, 30));
	say_bytes("read more than there is", pair, data, read(pair->fd, data, sizeof data));
	peer_when_asleep(pair, ACT_SEND, 10, 0);
	say_bytes("read that waits", pair, data, read(pair->fd, data, 10));
	peer_done();
	stays(pair);
}

static void send_recv(void)
{
	struct pair *pair = open_pair();
	sent(pair, say_ret("send", send(pair->fd, pattern_out(pair, 1000), 1000, 0)));
	sent(pair, say_ret("send DONTWAIT", send(pair->fd, pattern_out(pair, 10), 10, MSG_DONTWAIT)));
	sent(pair, say_ret("send NOSIGNAL", send(pair->fd, pattern_out(pair, 10), 10, MSG_NOSIGNAL)));
	sent(pair, say_ret("send MORE", send(pair->fd, pattern_out(pair, 10), 10, MSG_MORE)));
	sent(pair, say_ret("send EOR", send(pair->fd, pattern_out(pair, 10), 10, MSG_EOR)));
	sent(pair, say_ret("send CONFIRM", send(pair->fd, pattern_out(pair, 10), 10, MSG_CONFIRM)));
	sent(pair, say_ret("send DONTROUTE", send(pair->fd, pattern_out(pair, 10), 10, MSG_DONTROUTE)));
	peer_get(pair, 1060);
	peer_put(pair, 20);
	arrived(pair, 20);
	say_bytes("recv", pair, data, recv(pair->fd, data, 5, 0));
	say_bytes("recv DONTWAIT", pair, data, recv(pair->fd, data, 5, MSG_DONTWAIT));
	say_bytes("recv the rest", pair, data, recv(pair->fd, data, 500, 0));
	say_bytes("recv DONTWAIT of nothing", pair, data, recv(pair->fd, data, 5, MSG_DONTWAIT));
	say_bytes("recv CMSG_CLOEXEC|NOSIGNAL|DONTWAIT", pair, data,
	          recv(pair->fd, data, 5, MSG_DONTWAIT | MSG_CMSG_CLOEXEC | MSG_NOSIGNAL));
	stays(pair);
}

static void vectors(void)
{
	struct pair *pair = open_pair();
	const uint8_t *bytes = pattern_out(pair, 1000);
	struct iovec out[4] = {
		{.iov_base = (void *)(uintptr_t)bytes, .iov_len = 1},
		{.iov_base = (void *)(uintptr_t)(bytes + 1), .iov_len = 0},
		{.iov_base = (void *)(uintptr_t)(bytes + 1), .iov_len = 900},
		{.iov_base = (void *)(uintptr_t)(bytes + 901), .iov_len = 99},
	};
	sent(pair, say_ret("writev", writev(pair->fd, out, 4)));
	peer_get(pair, 1000);
	peer_put(pair, 150);
	arrived(pair, 150);
	struct iovec in[3] = {
		{.iov_base = data, .iov_len = 50},
		{.iov_base = NULL, .iov_len = 0},
		{.iov_base = data + 50, .iov_len = 200},
	};
	say_bytes("readv", pair, data, readv(pair->fd, in, 3));
	say_ret("writev of no vectors", writev(pair->fd, out, 0));
	say_ret("readv of no vectors", readv(pair->fd, in, 0));
	volatile int negative = -1; /* the compiler need not see it */
	say_ret("writev of negative count", writev(pair->fd, out, negative));
	say_ret("preadv", preadv(pair->fd, in, 1, 0));
	say_ret("pwritev", pwritev(pair->fd, out, 1, 0));
	say_ret("pread", pread(pair->fd, data, 1, 0));
	say_ret("pwrite", pwrite(pair->fd, data, 1, 0));
	say_ret("lseek", lseek(pair->fd, 0, SEEK_CUR));
	(void)pattern_out(pair, 1); /* where out[0] points */
	sent(pair, say_ret("pwritev2 at -1", pwritev2(pair->fd, out, 1, -1, 0)));
	peer_get(pair, 1);
	peer_put(pair, 7);
	arrived(pair, 7);
	say_bytes("preadv2 at -1", pair, data, preadv2(pair->fd, in, 3, -1, 0));
	stays(pair);
}

static void vectors_many(void)
{
	struct pair *pair = open_pair();
	static struct iovec vectors[1025];
	const uint8_t *bytes = pattern_out(pair, 3 * 1025);
	for (int i = 0; i < 1025; i++)
		vectors[i] = (struct iovec){.iov_base = (void *)(uintptr_t)(bytes + 3 * i), .iov_len = 3};
	say_ret("writev of 1025", writev(pair->fd, vectors, 1025));
	sent(pair, say_ret("writev of 1024", writev(pair->fd, vectors, 1024)));
	peer_get(pair, 3072);
	struct msghdr header = {.msg_iov = vectors, .msg_iovlen = 1025};
	say_ret("sendmsg of 1025", sendmsg(pair->fd, &header, 0));
	peer_put(pair, 3072);
	arrived(pair, 3072);
	for (int i = 0; i < 1025; i++)
		vectors[i] = (struct iovec){.iov_base = data + 3 * i, .iov_len = 3};
	say_ret("readv of 1025", readv(pair->fd, vectors, 1025));
	say_bytes("readv of 1024", pair, data, readv(pair->fd, vectors, 1024));
	stays(pair);
}

static void sendto_recvfrom(void)
{
	struct pair *pair = open_pair();
	struct sockaddr_storage address;
	socklen_t len = sizeof address;
	sent(pair, say_ret("sendto nobody", sendto(pair->fd, pattern_out(pair, 20), 20, 0, NULL, 0)));
	NEED(getpeername(pair->fd, (struct sockaddr *)&address, &len) == 0);
	sent(pair,
	     say_ret("sendto the peer", sendto(pair->fd, pattern_out(pair, 20), 20, 0, (struct sockaddr *)&address, len)));
	peer_get(pair, 40);
	peer_put(pair, 40);
	arrived(pair, 40);
	say_bytes("recvfrom", pair, data, recvfrom(pair->fd, data, 20, 0, NULL, NULL));
	memset(&address, 0xee, sizeof address);
	len = sizeof address;
	say_bytes("recvfrom with address", pair, data, recvfrom(pair->fd, data, 20, 0, (struct sockaddr *)&address, &len));
	say("address length %u, first byte %#x", len, *(uint8_t *)&address);
	len = sizeof address;
	say_ret("recvfrom of nothing", recvfrom(pair->fd, data, 20, MSG_DONTWAIT, (struct sockaddr *)&address, &len));
	stays(pair);
}

static void sendmsg_recvmsg(void)
{
	struct pair *pair = open_pair();
	struct sockaddr_storage address;
	uint8_t control[64];
	const uint8_t *bytes = pattern_out(pair, 60);
	struct iovec out[2] = {{.iov_base = (void *)(uintptr_t)bytes, .iov_len = 20},
	                       {.iov_base = (void *)(uintptr_t)(bytes + 20), .iov_len = 40}};
	struct iovec in[2] = {{.iov_base = data, .iov_len = 10}, {.iov_base = data + 10, .iov_len = 80}};
	struct msghdr header = {.msg_iov = out, .msg_iovlen = 2};
	sent(pair, say_ret("sendmsg", sendmsg(pair->fd, &header, 0)));
	peer_get(pair, 60);
	peer_put(pair, 60);
	arrived(pair, 60);
	header = (struct msghdr){.msg_iov = in,
	                         .msg_iovlen = 2,
	                         .msg_name = &address,
	                         .msg_namelen = sizeof address,
	                         .msg_control = control,
	                         .msg_controllen = sizeof control,
	                         .msg_flags = -1};
	say_bytes("recvmsg PEEK|TRUNC-free", pair, data, recvmsg(pair->fd, &header, 0));
	say("namelen %u controllen %zu flags %#x iovlen %zu", header.msg_namelen, (size_t)header.msg_controllen,
	    header.msg_flags, (size_t)header.msg_iovlen);
	say_ret("recvmsg of nothing", recvmsg(pair->fd, &header, MSG_DONTWAIT));
	header = (struct msghdr){.msg_iov = NULL, .msg_iovlen = 0};
	say_ret("sendmsg of no vectors", sendmsg(pair->fd, &header, 0));
	say_ret("recvmsg of no vectors", recvmsg(pair->fd, &header, MSG_DONTWAIT));
	peer_put(pair, 1);
	arrived(pair, 1);
	say_ret("recvmsg of no vectors, a byte waits", recvmsg(pair->fd, &header, MSG_DONTWAIT));
	get(pair, 1);
	stays(pair);
}

static void sendmmsg_recvmmsg(void)
{
	struct pair *pair = open_pair();
	const uint8_t *bytes = pattern_out(pair, 60);
	struct iovec vectors[4];
	struct mmsghdr messages[4];
	memset(messages, 0, sizeof messages);
	for (int i = 0; i < 4; i++) {
		vectors[i] = (struct iovec){.iov_base = (void *)(uintptr_t)(bytes + 10 * i), .iov_len = 10};
		messages[i].msg_hdr = (struct msghdr){.msg_iov = &vectors[i], .msg_iovlen = 1};
	}
	say_ret("sendmmsg", sendmmsg(pair->fd, messages, 4, 0));
	say("lengths %u %u %u %u", messages[0].msg_len, messages[1].msg_len, messages[2].msg_len, messages[3].msg_len);
	sent(pair, 40);
	peer_get(pair, 40);
	say_ret("sendmmsg of none", sendmmsg(pair->fd, messages, 0, 0));

	peer_put(pair, 35);
	arrived(pair, 35);
	for (int i = 0; i < 4; i++) {
		vectors[i] = (struct iovec){.iov_base = data + 10 * i, .iov_len = 10};
		messages[i].msg_len = 99;
	}
	say_ret("recvmmsg", recvmmsg(pair->fd, messages, 4, 0, NULL));
	say("lengths %u %u %u %u", messages[0].msg_len, messages[1].msg_len, messages[2].msg_len, messages[3].msg_len);
	say("bytes %s", took(pair, data, 35) ? "right" : "WRONG");
	say_ret("recvmmsg of nothing", recvmmsg(pair->fd, messages, 4, MSG_DONTWAIT, NULL));

	peer_put(pair, 15);
	arrived(pair, 15);
	say_ret("recvmmsg WAITFORONE", recvmmsg(pair->fd, messages, 4, MSG_WAITFORONE, NULL));
	say("lengths %u %u", messages[0].msg_len, messages[1].msg_len);
	say("bytes %s", took(pair, data, 15) ? "right" : "WRONG");

	peer_put(pair, 5);
	arrived(pair, 5);
	struct timespec timeout = {.tv_nsec = 1};
	say_ret("recvmmsg with a timeout", recvmmsg(pair->fd, messages, 4, 0, &timeout));
	say("bytes %s", took(pair, data, 5) ? "right" : "WRONG");

	peer(pair, ACT_SHUTDOWN, SHUT_WR, 0);
	await_fin(pair);
	messages[0].msg_len = 99;
	say_ret("recvmmsg at the end", recvmmsg(pair->fd, messages, 2, 0, NULL));
	say("length %u", messages[0].msg_len);
}

static int pattern_file(struct pair *pair, size_t len)
{
	char name[] = "/tmp/scene.XXXXXX";
	int fd = mkstemp(name);
	NEED(fd >= 0);
	NEED(unlink(name) == 0);
	NEED(write(fd, pattern_out(pair, len), len) == (ssize_t)len);
	return fd;
}

static void sendfile_(void)
{
	struct pair *pair = open_pair();
	int file = pattern_file(pair, 100000);
	off_t offset = 0;
	sent(pair, say_ret("sendfile", sendfile(pair->fd, file, &offset, 1000)));
	say("offset %ld, file position %ld", (long)offset, (long)lseek(file, 0, SEEK_CUR));
	peer_get(pair, 1000);
	NEED(lseek(file, 1000, SEEK_SET) == 1000);
	sent(pair, say_ret("sendfile at the position", sendfile(pair->fd, file, NULL, 4096)));
	say("file position %ld", (long)lseek(file, 0, SEEK_CUR));
	peer_get(pair, 4096);
	offset = 5096;
	peer_now(pair, ACT_RECV, 94904, 0);
	while (offset < 100000) {
		ssize_t wrote = sendfile(pair->fd, file, &offset, 1000000);
		if (wrote <= 0)
			fail("sendfile = %zd %s", wrote, strerrorname_np(errno));
		sent(pair, wrote);
	}
	say_reply("the rest", peer_done());
	say("offset %ld", (long)offset);
	say_ret("sendfile at the end of the file", sendfile(pair->fd, file, &offset, 10));
	say_ret("sendfile of nothing", sendfile(pair->fd, file, NULL, 0));
	offset = -1;
	say_ret("sendfile at a negative offset", sendfile(pair->fd, file, &offset, 10));
	say_ret("sendfile from a closed descriptor", sendfile(pair->fd, -1, NULL, 10));
	say_ret("sendfile from the socket to itself", sendfile(pair->fd, pair->fd, NULL, 10));
	int write_only = open("/dev/null", O_WRONLY);
	say_ret("sendfile from a write-only file", sendfile(pair->fd, write_only, NULL, 10));
	stays(pair);
}

/* A signal ends a call that has sent something, though its handler restarts calls. The peer reads nothing meanwhile. */
static void sendfile_interrupted(void)
{
	enum { LEN = 30 << 20 };
	struct pair *pair = open_pair();
	char path[] = "/tmp/sidestep-scene-XXXXXX";
	int file = mkstemp(path);
	NEED(file >= 0 && unlink(path) == 0 && ftruncate(file, LEN) == 0);
	alarms(300);
	ssize_t wrote = sendfile(pair->fd, file, NULL, LEN);
	alarms(0);
	say("a part: %d", wrote > 0 && wrote < LEN);
	say("position: %d", lseek(file, 0, SEEK_CUR) == wrote);
	struct timeval limit = {.tv_usec = 200000};
	NEED(setsockopt(pair->fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit) == 0);
	while ((wrote = sendfile(pair->fd, file, NULL, LEN)) > 0)
		;
	say_ret("no room for more", wrote);
	NEED(close(file) == 0);
}

static void sendfile_nonblocking(void)
{
	struct pair *pair = open_pair();
	enum { LEN = 4 << 20 };
	int file = pattern_file(pair, LEN);
	off_t offset = 0;
	bool waited = false;
	nonblocking(pair->fd, true);
	while (offset < LEN) {
		ssize_t wrote = sendfile(pair->fd, file, &offset, (size_t)(LEN - offset));
		if (wrote < 0 && errno == EAGAIN) {
			if (!waited)
				peer_now(pair, ACT_RECV, LEN, 0); /* full before anybody reads */
			waited = true;
			struct pollfd item = {.fd = pair->fd, .events = POLLOUT};
			NEED(poll(&item, 1, 5000) == 1);
			continue;
		}
		NEED(wrote > 0);
		sent(pair, wrote);
	}
	if (!waited)
		peer_now(pair, ACT_RECV, LEN, 0);
	say_reply("all of it", peer_done());
	say("offset %ld", (long)offset);
	stays(pair);
}

static void splice_(void)
{
	struct pair *pair = open_pair();
	int pipes[2];
	NEED(pipe(pipes) == 0);
	NEED(write(pipes[1], pattern_out(pair, 1000), 1000) == 1000);
	sent(pair, say_ret("splice to the socket", splice(pipes[0], NULL, pair->fd, NULL, 600, 0)));
	sent(pair, say_ret("splice MORE to the socket",
	                   splice(pipes[0], NULL, pair->fd, NULL, 4096, SPLICE_F_MORE | SPLICE_F_MOVE)));
	peer_get(pair, 1000);
	say_ret("splice from an empty pipe", splice(pipes[0], NULL, pair->fd, NULL, 10, SPLICE_F_NONBLOCK));
	peer_put(pair, 500);
	arrived(pair, 500);
	say_ret("splice from the socket", splice(pair->fd, NULL, pipes[1], NULL, 300, 0));
	say_bytes("read the pipe", pair, data, read(pipes[0], data, 1000));
	say_ret("splice the rest", splice(pair->fd, NULL, pipes[1], NULL, 4096, SPLICE_F_NONBLOCK));
	say_bytes("read the pipe", pair, data, read(pipes[0], data, 1000));
	nonblocking(pair->fd, true);
	say_ret("splice from an empty O_NONBLOCK socket", splice(pair->fd, NULL, pipes[1], NULL, 10, 0));
	nonblocking(pair->fd, false);
	peer_when_asleep(pair, ACT_SEND, 20, 0);
	say_ret("splice that waits", splice(pair->fd, NULL, pipes[1], NULL, 20, 0));
	peer_done();
	say_bytes("read the pipe", pair, data, read(pipes[0], data, 1000));
	loff_t offset = 0;
	say_ret("splice with a socket offset", splice(pair->fd, &offset, pipes[1], NULL, 10, 0));
	say_ret("splice of nothing", splice(pair->fd, NULL, pipes[1], NULL, 0, 0));
	say_ret("splice without a pipe", splice(pair->fd, NULL, pair->fd, NULL, 10, 0));
	stays(pair);
	peer(pair, ACT_SHUTDOWN, SHUT_WR, 0);
	say_ret("splice at the end", splice(pair->fd, NULL, pipes[1], NULL, 10, 0));
}

/* The peer has closed, and its refusal comes behind what the kernel takes in one call. */
static void file_to_nobody(bool by_pipe)
{
	static const uint8_t bytes[50000];
	struct pair *pair = open_pair();
	int file = memfd_create("file", MFD_CLOEXEC), pipes[2];
	NEED(signal(SIGPIPE, SIG_IGN) != SIG_ERR);
	NEED(pipe(pipes) == 0 && write(pipes[1], bytes, sizeof bytes) == sizeof bytes);
	NEED(write(file, bytes, sizeof bytes) == sizeof bytes);
	peer(pair, ACT_CLOSE, 0, 0);
	await_fin(pair);
	for (int i = 0; i < 2; i++) {
		off_t from = 0;
		if (by_pipe)
			say_ret("splice", splice(pipes[0], NULL, pair->fd, NULL, sizeof bytes, 0));
		else
			say_ret("sendfile", sendfile(pair->fd, file, &from, sizeof bytes));
		NEED(write(pipes[1], bytes, 100) == 100);
		await_reset(pair);
	}
}

static void sendfile_to_nobody(void)
{
	file_to_nobody(false);
}

static void splice_to_nobody(void)
{
	file_to_nobody(true);
}

/* splice(2) stops at an urgent byte, and does not wait there. */
static void splice_urgent(void)
{
	struct timeval limit = {.tv_sec = 2};
	int fds[2], pipes[2];
	both_ends(fds);
	struct pollfd item = {.fd = fds[0], .events = POLLIN};
	NEED(pipe(pipes) == 0 && setsockopt(fds[0], SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0);
	NEED(send(fds[1], "before", 6, 0) == 6 && arrived_at(fds[0], 6));
	NEED(send(fds[1], "!", 1, MSG_OOB) == 1 && send(fds[1], "behind", 6, 0) == 6);
	say_ret("before it", splice(fds[0], NULL, pipes[1], NULL, 100, SPLICE_F_NONBLOCK));
	NEED(poll(&item, 1, 5000) == 1); /* what is behind it has arrived */
	nonblocking(fds[0], true);
	say_ret("at it", splice(fds[0], NULL, pipes[1], NULL, 100, SPLICE_F_NONBLOCK));
	nonblocking(fds[0], false);
	say_ret("at it, waiting", splice(fds[0], NULL, pipes[1], NULL, 100, 0));
	NEED(shutdown(fds[1], SHUT_WR) == 0);
	item.events = POLLRDHUP;
	NEED(poll(&item, 1, 5000) == 1);
	nonblocking(fds[0], true);
	say_ret("at it, ended", splice(fds[0], NULL, pipes[1], NULL, 100, 0));
	say_ret("recv", recv(fds[0], data, 3, 0));
	say_ret("behind it", splice(fds[0], NULL, pipes[1], NULL, 100, 0));
}

static void splice_proxy(void)
{
	/* What a proxy does: from one connection to another through a pipe. */
	struct pair *from = open_pair(), *to = open_pair();
	enum { ROUNDS = 10, LEN = 3000 };
	int pipes[2];
	NEED(pipe(pipes) == 0);
	for (int i = 0; i < ROUNDS; i++) {
		long moved = 0;
		peer_put(from, LEN);
		while (moved < LEN) {
			ssize_t got = splice(from->fd, NULL, pipes[1], NULL, 65536, SPLICE_F_MOVE);
			NEED(got > 0);
			for (ssize_t left = got; left > 0;) {
				ssize_t wrote = splice(pipes[0], NULL, to->fd, NULL, (size_t)left, SPLICE_F_MOVE);
				NEED(wrote > 0);
				left -= wrote;
			}
			moved += got;
		}
		fill_pattern(KEY_IN, from->in, data, LEN);
		from->in += LEN;
		say_reply("arrived", peer(to, ACT_SUM, LEN, sum_of(data, LEN)));
	}
	stays(from);
	stays(to);
}

static void peek(void)
{
	struct pair *pair = open_pair();
	say_ret("peek of nothing", recv(pair->fd, data, 10, MSG_PEEK | MSG_DONTWAIT));
	peer_put(pair, 100);
	arrived(pair, 100);
	for (int i = 0; i < 2; i++) {
		ssize_t got = say_ret("peek 10", recv(pair->fd, data, 10, MSG_PEEK));
		say("%s", check_pattern(KEY_IN, pair->in, data, (size_t)got) ? "right" : "WRONG");
	}
	ssize_t got = say_ret("peek all", recv(pair->fd, data, 1000, MSG_PEEK));
	say("%s", check_pattern(KEY_IN, pair->in, data, (size_t)got) ? "right" : "WRONG");
	say_bytes("recv 40", pair, data, recv(pair->fd, data, 40, 0));
	got = say_ret("peek again", recv(pair->fd, data, 1000, MSG_PEEK));
	say("%s", check_pattern(KEY_IN, pair->in, data, (size_t)got) ? "right" : "WRONG");
	got = say_ret("peek WAITALL of what is there", recv(pair->fd, data, 60, MSG_PEEK | MSG_WAITALL));
	say("%s", check_pattern(KEY_IN, pair->in, data, (size_t)got) ? "right" : "WRONG");
	struct iovec in[2] = {{.iov_base = data, .iov_len = 7}, {.iov_base = data + 7, .iov_len = 30}};
	struct msghdr header = {.msg_iov = in, .msg_iovlen = 2};
	got = say_ret("peek by recvmsg", recvmsg(pair->fd, &header, MSG_PEEK));
	say("%s", check_pattern(KEY_IN, pair->in, data, (size_t)got) ? "right" : "WRONG");
	got = say_ret("peek by recvfrom", recvfrom(pair->fd, data, 1, MSG_PEEK, NULL, NULL));
	arrived(pair, 60);
	say_bytes("recv the rest", pair, data, recv(pair->fd, data, 1000, 0));
	peer_when_asleep(pair, ACT_SEND, 5, 0);
	say_ret("peek that waits", recv(pair->fd, data, 5, MSG_PEEK));
	peer_done();
	get(pair, 5);
	stays(pair);
	peer(pair, ACT_SHUTDOWN, SHUT_WR, 0);
	say_ret("peek at the end", recv(pair->fd, data, 5, MSG_PEEK));
	say_ret("recv at the end", recv(pair->fd, data, 5, 0));
}

static void waitall(void)
{
	struct pair *pair = open_pair();
	peer_put(pair, 40);
	peer_when_asleep(pair, ACT_SEND, 60, 0);
	say_bytes("recv WAITALL 100", pair, data, recv(pair->fd, data, 100, MSG_WAITALL));
	peer_done();
	peer_when_asleep(pair, ACT_SEND, 5000, 100);
	struct iovec in[3] = {{.iov_base = data, .iov_len = 7},
	                      {.iov_base = data + 7, .iov_len = 3000},
	                      {.iov_base = data + 3007, .iov_len = 1993}};
	struct msghdr header = {.msg_iov = in, .msg_iovlen = 3};
	say_bytes("recvmsg WAITALL 5000 in pieces", pair, data, recvmsg(pair->fd, &header, MSG_WAITALL));
	peer_done();
	peer_put(pair, 20);
	arrived(pair, 20);
	say_bytes("recv WAITALL|DONTWAIT", pair, data, recv(pair->fd, data, 100, MSG_WAITALL | MSG_DONTWAIT));
	nonblocking(pair->fd, true);
	peer_put(pair, 20);
	arrived(pair, 20);
	say_bytes("recv WAITALL, O_NONBLOCK", pair, data, recv(pair->fd, data, 100, MSG_WAITALL));
	nonblocking(pair->fd, false);
	peer_now(pair, ACT_SEND, 700000, 0);
	say_bytes("recv WAITALL 700000", pair, data, recv(pair->fd, data, 700000, MSG_WAITALL));
	peer_done();
	stays(pair);
	peer_put(pair, 30);
	peer_when_asleep(pair, ACT_SHUTDOWN, SHUT_WR, 0);
	say_bytes("recv WAITALL 100 cut short by the end", pair, data, recv(pair->fd, data, 100, MSG_WAITALL));
	peer_done();
	say_ret("recv WAITALL at the end", recv(pair->fd, data, 100, MSG_WAITALL));
}

static void trunc_(void)
{
	struct pair *pair = open_pair();
	peer_put(pair, 100);
	arrived(pair, 100);
	memset(data, 0xAA, 100);
	say_ret("recv TRUNC discards", recv(pair->fd, data, 10, MSG_TRUNC));
	pair->in += 10;
	say("the buffer is %s", data[0] == 0xAA && data[9] == 0xAA ? "untouched" : "written");
	say_bytes("recv after it", pair, data, recv(pair->fd, data, 10, 0));
	say_ret("recv TRUNC without a buffer", recv(pair->fd, NULL, 30, MSG_TRUNC));
	pair->in += 30;
	say_bytes("recv after it", pair, data, recv(pair->fd, data, 10, 0));
	say_ret("recv TRUNC|PEEK", recv(pair->fd, data, 5, MSG_TRUNC | MSG_PEEK));
	arrived(pair, 40);
	say_ret("recv TRUNC of more than there is", recv(pair->fd, NULL, 4000, MSG_TRUNC));
	pair->in += 40;
	say_ret("recv TRUNC of nothing", recv(pair->fd, NULL, 4000, MSG_TRUNC | MSG_DONTWAIT));
	peer_put(pair, 3);
	get(pair, 3);
	stays(pair);
}

static void zero_length(void)
{
	struct pair *pair = open_pair();
	say_ret("send 0", send(pair->fd, data, 0, 0));
	say_ret("write 0", write(pair->fd, data, 0));
	say_ret("write 0 of NULL", write(pair->fd, NULL, 0));
	struct iovec empty = {.iov_base = data, .iov_len = 0};
	say_ret("writev 0", writev(pair->fd, &empty, 1));
	say_ret("read 0, empty", read(pair->fd, data, 0));
	say_ret("readv 0, empty", readv(pair->fd, &empty, 1));
	say_ret("preadv2 0, empty", preadv2(pair->fd, &empty, 1, -1, 0));
	say_ret("recv 0 DONTWAIT, empty", recv(pair->fd, data, 0, MSG_DONTWAIT));
	peer_put(pair, 10);
	arrived(pair, 10);
	say_ret("read 0", read(pair->fd, data, 0));
	say_ret("recv 0", recv(pair->fd, data, 0, 0));
	say_ret("recv 0 DONTWAIT", recv(pair->fd, data, 0, MSG_DONTWAIT));
	say_ret("recv 0 PEEK", recv(pair->fd, data, 0, MSG_PEEK | MSG_DONTWAIT));
	arrived(pair, 10);
	get(pair, 10);
	put(pair, 1); /* what arrives is this byte and nothing before it */
	peer_get(pair, 1);
	stays(pair);
	peer(pair, ACT_SHUTDOWN, SHUT_WR, 0);
	await_fin(pair);
	say_ret("recv 0 at the end", recv(pair->fd, data, 0, 0));
	shutdown(pair->fd, SHUT_WR);
	signal(SIGPIPE, SIG_IGN);
	say_ret("send 0 after shutdown", send(pair->fd, data, 0, 0));
	say_ret("write 0 after shutdown", write(pair->fd, data, 0));
	say_ret("writev 0 after shutdown", writev(pair->fd, &empty, 1));
	say_ret("writev of no piece", writev(pair->fd, NULL, 0));
	say_ret("pwritev2 0 after shutdown", pwritev2(pair->fd, &empty, 1, -1, 0));
}

static void errors(void)
{
	struct pair *pair = open_pair();
	int closed = dup(pair->fd);
	struct iovec one = {.iov_base = data, .iov_len = 1};
	struct msghdr header = {.msg_iov = &one, .msg_iovlen = 1};
	struct mmsghdr messages = {.msg_hdr = header};
	int value;
	close(closed);
	int bad[2] = {closed, -1};
	for (int i = 0; i < 2; i++) {
		say("bad descriptor %d", i);
		say_ret("read", read(bad[i], data, 1));
		say_ret("write", write(bad[i], data, 1));
		say_ret("readv", readv(bad[i], &one, 1));
		say_ret("writev", writev(bad[i], &one, 1));
		say_ret("send", send(bad[i], data, 1, 0));
		say_ret("recv", recv(bad[i], data, 1, 0));
		say_ret("sendto", sendto(bad[i], data, 1, 0, NULL, 0));
		say_ret("recvfrom", recvfrom(bad[i], data, 1, 0, NULL, NULL));
		say_ret("sendmsg", sendmsg(bad[i], &header, 0));
		say_ret("recvmsg", recvmsg(bad[i], &header, 0));
		say_ret("sendmmsg", sendmmsg(bad[i], &messages, 1, 0));
		say_ret("recvmmsg", recvmmsg(bad[i], &messages, 1, 0, NULL));
		say_ret("shutdown", shutdown(bad[i], SHUT_WR));
		say_ret("close", close(bad[i]));
		say_ret("dup", dup(bad[i]));
		say_ret("ioctl", ioctl(bad[i], FIONREAD, &value));
		say_ret("fcntl", fcntl(bad[i], F_GETFL));
		say_ret("accept", accept(bad[i], NULL, NULL));
		say_ret("listen", listen(bad[i], 1));
	}
	int file = open("/dev/zero", O_RDWR);
	say_ret("send on a file", send(file, data, 1, 0));
	say_ret("recv on a file", recv(file, data, 1, 0));
	say_ret("shutdown of a file", shutdown(file, SHUT_RD));
	say_ret("read of a file", read(file, data, 1));
	int fresh = socket(choice.family == '4' ? AF_INET : AF_INET6, SOCK_STREAM, 0);
	signal(SIGPIPE, SIG_IGN);
	say_ret("recv, never connected", recv(fresh, data, 1, 0));
	say_ret("send, never connected", send(fresh, data, 1, 0));
	say_ret("write, never connected", write(fresh, data, 1));
	say_ret("read, never connected", read(fresh, data, 1));
	say_ret("shutdown, never connected", shutdown(fresh, SHUT_WR));
	say_ret("accept, not listening", accept(fresh, NULL, NULL));
	say_ret("listen on a connection", listen(pair->fd, 1));
	say_ret("accept on a connection", accept(pair->fd, NULL, NULL));
	struct sockaddr_storage address;
	socklen_t len = loopback_address(choice.family, pair->peer_port, true, &address);
	say_ret("connect again", connect(pair->fd, (struct sockaddr *)&address, len));
	say_ret("bind again", bind(pair->fd, (struct sockaddr *)&address, len));
	say_ret("shutdown with a bad how", shutdown(pair->fd, 7));
	say_ret("recv ERRQUEUE", recv(pair->fd, data, 1, MSG_ERRQUEUE | MSG_DONTWAIT));
	put(pair, 5);
	peer_get(pair, 5);
	stays(pair);
}

static void bad_pointers(void)
{
	struct pair *pair = open_pair();
	uint8_t *nowhere = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	NEED(nowhere != MAP_FAILED);
	say_ret("send from nowhere", send(pair->fd, nowhere, 10, 0));
	say_ret("write from nowhere", write(pair->fd, nowhere, 10));
	peer_put(pair, 10);
	arrived(pair, 10);
	say_ret("recv to nowhere", recv(pair->fd, nowhere, 10, 0));
	say_ret("read to nowhere", read(pair->fd, nowhere, 10));
	struct iovec one = {.iov_base = nowhere, .iov_len = 10};
	say_ret("readv to nowhere", readv(pair->fd, &one, 1));
	say_ret("readv with vectors nowhere", readv(pair->fd, (struct iovec *)(void *)nowhere, 1));
	say_ret("sendmsg with a header nowhere", sendmsg(pair->fd, (struct msghdr *)(void *)nowhere, 0));
	say_bytes("recv, the bytes are still there", pair, data, recv(pair->fd, data, 10, 0));
	put(pair, 10);
	peer_get(pair, 10);
}

static volatile sig_atomic_t pipes_broken;

static void on_sigpipe(int signal_number)
{
	(void)signal_number;
	pipes_broken++;
}

static void sigpipe(void)
{
	struct pair *pair = open_pair();
	struct sigaction action = {.sa_handler = on_sigpipe};
	struct iovec one = {.iov_base = data, .iov_len = 1};
	struct msghdr header = {.msg_iov = &one, .msg_iovlen = 1};
	struct mmsghdr messages = {.msg_hdr = header};
	int file = pattern_file(pair, 10), pipes[2];
	NEED(pipe(pipes) == 0 && write(pipes[1], "x", 1) == 1);
	NEED(sigaction(SIGPIPE, &action, NULL) == 0);
	NEED(shutdown(pair->fd, SHUT_WR) == 0);
	say_ret("send", send(pair->fd, data, 1, 0));
	say("signals %d", (int)pipes_broken);
	say_ret("send NOSIGNAL", send(pair->fd, data, 1, MSG_NOSIGNAL));
	say("signals %d", (int)pipes_broken);
	say_ret("write", write(pair->fd, data, 1));
	say("signals %d", (int)pipes_broken);
	say_ret("writev", writev(pair->fd, &one, 1));
	say("signals %d", (int)pipes_broken);
	say_ret("sendmsg", sendmsg(pair->fd, &header, 0));
	say("signals %d", (int)pipes_broken);
	say_ret("sendmsg NOSIGNAL", sendmsg(pair->fd, &header, MSG_NOSIGNAL));
	say("signals %d", (int)pipes_broken);
	say_ret("sendmmsg", sendmmsg(pair->fd, &messages, 1, 0));
	say("signals %d", (int)pipes_broken);
	say_ret("sendto", sendto(pair->fd, data, 1, 0, NULL, 0));
	say("signals %d", (int)pipes_broken);
	say_ret("send DONTWAIT", send(pair->fd, data, 1, MSG_DONTWAIT));
	say("signals %d", (int)pipes_broken);
	off_t offset = 0;
	say_ret("sendfile", sendfile(pair->fd, file, &offset, 10));
	say("signals %d, offset %ld", (int)pipes_broken, (long)offset);
	say_ret("splice", splice(pipes[0], NULL, pair->fd, NULL, 1, 0));
	say("signals %d", (int)pipes_broken);
	signal(SIGPIPE, SIG_IGN);
	say_ret("write, ignored", write(pair->fd, data, 1));
	sigset_t set, pending;
	sigemptyset(&set);
	sigaddset(&set, SIGPIPE);
	NEED(sigaction(SIGPIPE, &action, NULL) == 0);
	NEED(sigprocmask(SIG_BLOCK, &set, NULL) == 0);
	say_ret("write, blocked", write(pair->fd, data, 1));
	NEED(sigpending(&pending) == 0);
	say("pending %d, signals %d", sigismember(&pending, SIGPIPE), (int)pipes_broken);
	struct timespec none = {0};
	say_ret("sigtimedwait", sigtimedwait(&set, NULL, &none) == SIGPIPE);
}

static void sigpipe_kills(void)
{
	struct pair *pair = open_pair();
	NEED(shutdown(pair->fd, SHUT_WR) == 0);
	pid_t child = fork();
	if (child == 0) {
		forget_peer();
		signal(SIGPIPE, SIG_DFL);
		send(pair->fd, data, 1, 0);
		_exit(0);
	}
	int status;
	NEED(waitpid(child, &status, 0) == child);
	say("the child %s %d", WIFSIGNALED(status) ? "died of" : "exited with",
	    WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
}

static void urgent(void)
{
	struct pair *pair = open_pair();
	int mark = -1;
	peer_put(pair, 1307);
	arrived(pair, 1307);
	say_reply("urgent byte", peer(pair, ACT_OOB, 'X', 0));
	peer_put(pair, 3);
	struct pollfd item = {.fd = pair->fd, .events = POLLPRI};
	int ready = poll(&item, 1, 5000);
	say_poll("poll PRI", ready, item.revents);
	fd_set except;
	FD_ZERO(&except);
	FD_SET(pair->fd, &except);
	struct timeval none = {0};
	say_ret("select except", select(pair->fd + 1, NULL, NULL, &except, &none));
	say("before the mark %d", sockatmark(pair->fd));
	say_bytes("recv", pair, data, recv(pair->fd, data, 1000, 0));
	say("before the mark %d", sockatmark(pair->fd));
	say_bytes("recv stops at the mark", pair, data, recv(pair->fd, data, 1000, 0));
	mark = sockatmark(pair->fd);
	say("at the mark %d", mark);
	say_ret("recv OOB", recv(pair->fd, data, 1, MSG_OOB));
	say("urgent byte %c", data[0]);
	say_ret("recv OOB again", recv(pair->fd, data, 1, MSG_OOB));
	get(pair, 3);
	say_bytes("nothing more", pair, data, recv(pair->fd, data, 1, MSG_DONTWAIT));
	say_ret("send OOB", send(pair->fd, "abc", 3, MSG_OOB));
	put(pair, 5);
	struct pair *other = open_pair(); /* the next connection is none the worse for it */
	put(other, 5);
	peer_get(other, 5);
	stays(other);
}

/* Sends an urgent byte, which arrives: it may be another one than that of before. */
static void urgent_put(const int fds[2], char byte)
{
	char got = 0;
	NEED(send(fds[1], &byte, 1, MSG_OOB) == 1);
	while (recv(fds[0], &got, 1, MSG_OOB | MSG_PEEK) != 1 || got != byte)
		NEED(errno == EAGAIN || errno == EINVAL || got);
}

/* Looks and reads, up to where nothing is left. */
static void urgent_rest(int fd)
{
	ssize_t len;
	do {
		char seen[20] = "", got[20] = "";
		int unread = 0;
		NEED(ioctl(fd, FIONREAD, &unread) == 0);
		say("unread %d, at the mark %d", unread, sockatmark(fd));
		ssize_t look = recv(fd, seen, sizeof seen - 1, MSG_PEEK | MSG_DONTWAIT);
		len = say_ret("recv", recv(fd, got, sizeof got - 1, MSG_DONTWAIT));
		say("looked at %zd: %s, read %s", look, seen, got);
	} while (len > 0);
	say_ret("recv OOB", recv(fd, data, 1, MSG_OOB));
}

/* The next urgent byte makes an ordinary one of the last, unless the reader stands before that: tcp_check_urg() in Linux. */
static void urgent_twice(void)
{
	for (int before = 0; before <= 3; before++)
		for (int between = 0; between <= 2; between += 2) {
			int fds[2];
			both_ends(fds);
			NEED(send(fds[1], "abc", 3, 0) == 3 && arrived_at(fds[0], 3));
			urgent_put(fds, 'X');
			NEED(!before || recv(fds[0], data, (size_t)before, 0) == before);
			NEED(send(fds[1], "de", (size_t)between, 0) == between);
			urgent_put(fds, 'Y');
			if (before == 2)
				urgent_put(fds, 'Z');
			say("%d read before, %d sent between", before, between);
			urgent_rest(fds[0]);
		}
}

static void urgent_twice_inline(void)
{
	for (int late = 0; late <= 1; late++) {
		int fds[2], on = 1;
		both_ends(fds);
		NEED(late || setsockopt(fds[0], SOL_SOCKET, SO_OOBINLINE, &on, sizeof on) == 0);
		NEED(send(fds[1], "abc", 3, 0) == 3 && arrived_at(fds[0], 3));
		NEED(send(fds[1], "X", 1, MSG_OOB) == 1 && arrived_at(fds[0], late ? 3 : 4));
		NEED(!late || setsockopt(fds[0], SOL_SOCKET, SO_OOBINLINE, &on, sizeof on) == 0);
		NEED(send(fds[1], "Y", 1, MSG_OOB) == 1 && arrived_at(fds[0], 5));
		say("inline from %s on", late ? "the first" : "the beginning");
		urgent_rest(fds[0]);
	}
}

/* Bytes by ring, and behind them others by TCP: one stream all the same. */
static void urgent_low_water(void)
{
	struct pair *pair = open_pair();
	struct pollfd item = {.fd = pair->fd, .events = POLLIN};
	int low = 10;
	NEED(setsockopt(pair->fd, SOL_SOCKET, SO_RCVLOWAT, &low, sizeof low) == 0);
	peer_put(pair, 4);
	arrived(pair, 4);
	say_reply("urgent byte", peer(pair, ACT_OOB, 'X', 0));
	item.events = POLLPRI;
	int ready = poll(&item, 1, 5000);
	say_poll("poll PRI", ready, item.revents);
	item.events = POLLIN;
	ready = poll(&item, 1, 0);
	say_poll("poll with 5 of 10", ready, item.revents);
	peer_put(pair, 5);
	ready = poll(&item, 1, 5000);
	say_poll("poll with 10 of 10", ready, item.revents);
	say_bytes("recv stops at the mark", pair, data, recv(pair->fd, data, 1000, 0));
	get(pair, 5);
}

/* The byte is refused with the reset that it brings: nothing is there to be received. */
static void urgent_refused(void)
{
	int fds[2];
	both_ends(fds);
	struct pair pair = {.fd = fds[0]};
	NEED(shutdown(fds[0], SHUT_RDWR) == 0);
	say_ret("urgent byte", send(fds[1], "!", 1, MSG_OOB));
	await_reset(&pair);
	say_ret("recv of nothing", recv(fds[0], data, 0, 0));
	say_ret("recv of nothing again", recv(fds[0], data, 0, 0));
}

static void urgent_inline(void)
{
	struct pair *pair = open_pair();
	int on = 1;
	NEED(setsockopt(pair->fd, SOL_SOCKET, SO_OOBINLINE, &on, sizeof on) == 0);
	peer_put(pair, 3);
	say_reply("urgent byte", peer(pair, ACT_OOB, 'Y', 0));
	struct pollfd item = {.fd = pair->fd, .events = POLLPRI};
	int ready = poll(&item, 1, 5000);
	say_poll("poll PRI", ready, item.revents);
	say_bytes("recv stops at the mark", pair, data, recv(pair->fd, data, 100, 0));
	say("at the mark %d", sockatmark(pair->fd));
	say_ret("recv", recv(pair->fd, data, 100, 0));
	say("urgent byte %c", data[0]);
	put(pair, 100);
	peer_get(pair, 100);
}

static void zerocopy(void)
{
	struct pair *pair = open_pair();
	int on = 1;
	say_ret("SO_ZEROCOPY", setsockopt(pair->fd, SOL_SOCKET, SO_ZEROCOPY, &on, sizeof on));
	static uint8_t page[8192] __attribute__((aligned(4096)));
	memcpy(page, pattern_out(pair, sizeof page), sizeof page);
	sent(pair, say_ret("send ZEROCOPY", send(pair->fd, page, sizeof page, MSG_ZEROCOPY)));
	peer_get(pair, sizeof page);
	struct pollfd item = {.fd = pair->fd, .events = 0};
	int ready = poll(&item, 1, 5000);
	say_poll("the completion", ready, item.revents);
	uint8_t control[128];
	struct msghdr header = {.msg_control = control, .msg_controllen = sizeof control};
	say_ret("recvmsg ERRQUEUE", recvmsg(pair->fd, &header, MSG_ERRQUEUE));
	struct cmsghdr *message = CMSG_FIRSTHDR(&header);
	struct sock_extended_err error;
	NEED(message);
	memcpy(&error, CMSG_DATA(message), sizeof error);
	say("origin %u, range %u to %u", error.ee_origin, error.ee_info, error.ee_data);
	put(pair, 10);
	peer_get(pair, 10);
}

static void asynchronous(void)
{
	struct pair *pair = open_pair();
	struct aiocb block = {.aio_fildes = pair->fd, .aio_buf = (void *)pattern_out(pair, 50), .aio_nbytes = 50};
	const struct aiocb *list[] = {&block};
	struct timespec limit = {.tv_sec = 5};
	NEED(aio_write(&block) == 0 && aio_suspend(list, 1, &limit) == 0);
	say_ret("aio_error", aio_error(&block));
	long wrote = aio_return(&block);
	say_ret("aio_return", wrote);
	sent(pair, wrote);
	peer_get(pair, 50);
	put(pair, 10);
	peer_get(pair, 10);
	peer_put(pair, 30);
	arrived(pair, 30);
	block = (struct aiocb){.aio_fildes = pair->fd, .aio_buf = data, .aio_nbytes = 30};
	NEED(aio_read(&block) == 0 && aio_suspend(list, 1, &limit) == 0);
	say_bytes("aio_read", pair, data, aio_return(&block));
}

static long kernel_result(aio_context_t context, struct iocb *block)
{
	struct io_event event;
	struct timespec limit = {.tv_sec = 5};
	NEED(syscall(SYS_io_submit, context, 1, &block) == 1);
	NEED(syscall(SYS_io_getevents, context, 1, 1, &event, &limit) == 1);
	if (event.res >= 0)
		return (long)event.res;
	errno = (int)-event.res;
	return -1;
}

static void kernel_asynchronous(void)
{
	/* io_submit(2): the kernel reads and writes the socket by itself. */
	struct pair *pair = open_pair();
	aio_context_t context = 0;
	NEED(syscall(SYS_io_setup, 4, &context) == 0);
	struct iocb block = {.aio_fildes = (uint32_t)pair->fd, .aio_nbytes = 50, .aio_lio_opcode = IOCB_CMD_PWRITE};
	put(pair, 20);
	block.aio_buf = (uintptr_t)pattern_out(pair, 50);
	sent(pair, say_ret("write", kernel_result(context, &block)));
	peer_get(pair, 70);
	put(pair, 10);
	peer_get(pair, 10);
	peer_put(pair, 30);
	arrived(pair, 30);
	block.aio_buf = (uintptr_t)data;
	block.aio_lio_opcode = IOCB_CMD_PREAD;
	say_bytes("read", pair, data, kernel_result(context, &block));
	NEED(syscall(SYS_io_destroy, context) == 0);
}

#ifdef __GLIBC__
extern int __poll(struct pollfd *fds, nfds_t len, int timeout);
extern int __select(int len, fd_set *r, fd_set *w, fd_set *e, struct timeval *timeout);
extern int __fcntl(int fd, int command, ...);
#endif

static void libc_aliases(void)
{
	struct pair *pair = open_pair();
	struct pollfd item = {.fd = pair->fd, .events = POLLIN};
	struct timeval limit = {.tv_sec = 5};
	fd_set in;
	FD_ZERO(&in);
	FD_SET(pair->fd, &in);
	peer_put(pair, 10);
	arrived(pair, 10);
	say_ret("__poll", __poll(&item, 1, 5000));
	say_ret("__select", __select(pair->fd + 1, &in, NULL, NULL, &limit));
	int copy = __fcntl(pair->fd, F_DUPFD_CLOEXEC, 100);
	say_bytes("recv by the copy", pair, data, recv(copy, data, 10, 0));
}

const struct scene scenes_io[] = {
	SCENE(write_read),
	SCENE(send_recv),
	SCENE(vectors),
	SCENE(vectors_many),
	SCENE(sendto_recvfrom),
	SCENE(sendmsg_recvmsg),
	SCENE(sendmmsg_recvmmsg),
	{"sendfile", sendfile_},
	SCENE(sendfile_nonblocking),
	SCENE(sendfile_interrupted),
	{"splice", splice_},
	SCENE(splice_proxy),
	SCENE(sendfile_to_nobody),
	SCENE(splice_to_nobody),
	SCENE(splice_urgent),
	SCENE(peek),
	SCENE(waitall),
	{"trunc", trunc_},
	SCENE(zero_length),
	SCENE(errors),
	SCENE(bad_pointers),
	SCENE(sigpipe),
	SCENE(sigpipe_kills),
	SCENE(urgent),
	SCENE(urgent_twice),
	SCENE(urgent_twice_inline),
	SCENE(urgent_low_water),
	SCENE(urgent_inline),
	SCENE(urgent_refused),
	SCENE(zerocopy),
	SCENE(asynchronous),
	SCENE(kernel_asynchronous),
	SCENE(libc_aliases),
	{NULL, NULL},
};
