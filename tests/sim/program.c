/*
 * program.c - the programs at the two ends of one connection.
 *
 * Each does some operations at random and then sends no more, but reads to the end, waiting in its own way.
 */
#include "program.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/ioctl.h>

#include "operation.h"
#include "provider.h"
#include "relay.h"
#include "scenario.h"

#define NAP (2 * MS)
#define NAPS_MAX 10

struct program programs[ENDS];
uint64_t operations;
uint32_t stimuli;
bool seen[SEEN];

<<<<<<< HEAD
static void program_live(struct program *mine);
static void child_run(struct program *mine);
=======
/* A call of this program: the shim's, or the kernel's own for a program without a shim. */
#define CALL(program, result, name, types) \
	((result(*) types)((program)->stranger ? kernel_find(#name) : dlsym((program)->library, #name)))

static struct program *peer_of(const struct program *program)
{
	return &programs[program == &programs[0]];
}

static int index_of(const struct program *program)
{
	return program == &programs[1];
}

static uint8_t pattern(int end, uint64_t at)
{
	return (uint8_t)((at * 0x9E3779B97F4A7C15ull >> 56) + (uint64_t)end);
}

/* ---- what may be told ---- */

/* The connection may end by a reset for this end: the peer did what makes one, or left bytes unread. */
static bool reset_excused(const struct program *mine)
{
	const struct program *peer = peer_of(mine);

	/* who gets the socket next cannot read what a ring holds that nobody can be asked for any more: see conn_abandon() */
	if (mine->passed || peer->passed || peer->hostile)
		return true;
	return peer->aborted || mine->aborted || (mine->shut_rd && mine->shut_wr && peer->offered > mine->received) ||
	       ((peer->closing || peer->killed || (peer->shut_rd && peer->shut_wr)) && mine->offered > peer->received);
}

static void judge_error(struct program *mine, const char *call, int error)
{
	int i = index_of(mine);

	if (error == EAGAIN || (error == EPIPE && mine->shut_wr))
		return;
	if ((error == EPIPE || error == ENOTCONN) && mine->told_reset)
		return;
	if ((error == ECONNRESET || error == EPIPE) && reset_excused(mine)) {
		mine->told_reset = seen[SEEN_RESET] = true;
		return;
	}
	if (error == ENOTCONN && (mine->aborted || (mine->passed && reset_excused(mine)))) {
		mine->told_reset = seen[SEEN_RESET] = true;
		return;
	}
	fail("end %d: %s fails: %s", i, call, strerrorname_np(error));
}

static void judge_end(struct program *mine)
{
	const struct program *peer = peer_of(mine);

	if (mine->shut_rd || mine->told_reset || mine->aborted)
		return;
	if (!peer->shut_wr && !peer->closing && !peer->killed)
		fail("end %d: end of stream, and the peer has not ended", index_of(mine));
	if (connection[index_of(mine)]->tcp.was_reset)
		fail("end %d: end of stream, and it was a reset", index_of(mine));
	/* Known: who is killed cannot send again what an end that passed its socket on had not read. */
	if (mine->received != peer->sent && !(mine->passed && peer->killed))
		fail("end %d: false end of stream at %llu of %llu", index_of(mine), (unsigned long long)mine->received,
		     (unsigned long long)peer->sent);
	mine->told_end = true;
}

static void judge_bytes(struct program *mine, const uint8_t *data, size_t len, bool is_short, bool peek)
{
	const struct program *peer = peer_of(mine);
	int i = index_of(mine);

	if (mine->told_end)
		fail("end %d: bytes after the end of stream", i);
	if (mine->received + len > peer->offered)
		fail("end %d: %zu bytes at %llu, and only %llu were sent", i, len, (unsigned long long)mine->received,
		     (unsigned long long)peer->offered);
	for (size_t at = 0; at < len; at++)
		if (data[at] != pattern(1 - i, mine->received + at))
			fail("end %d: wrong byte at %llu", i, (unsigned long long)(mine->received + at));
	if (peek)
		return;
	mine->received += len;
	/* libuv takes a short read for the end once it has been told of a hang-up */
	if (is_short && mine->hung_up && mine->received < peer->sent && !reset_excused(mine))
		fail("end %d: false end of stream: hung up, and a short read at %llu of %llu", i,
		     (unsigned long long)mine->received, (unsigned long long)peer->sent);
}

/* `asked` of poll, or of a set, and what was told. */
static void judge_told(struct program *mine, uint32_t asked, uint32_t told)
{
	mine->ending |= told & (POLLRDHUP | POLLHUP | POLLERR);
	mine->hung_up |= told & POLLHUP;
	if (told & ~(asked | POLLHUP | POLLERR))
		fail("end %d: told of %#x, asked for %#x", index_of(mine), told, asked);
	/* tcp_poll: only a socket that was disconnected hangs up and has nothing to read */
	if ((told & POLLHUP) && (asked & POLLIN) && !(told & POLLIN) && !mine->aborted && !mine->passed)
		fail("end %d: told of a hang-up, and not that it can be read: %#x", index_of(mine), told);
}

/* ---- operations ---- */

/* How far the connection has come. */
static void look(const struct program *mine)
{
	const struct conn_slot *slot = provider_slot(index_of(mine));
	static bool promoted[2], back[2];
	int i = index_of(mine);

	if (!slot || mine->stranger)
		return;
	bool now_promoted = slot->state == STATE_PROMOTED;
	seen[SEEN_AGAIN] |= now_promoted && back[i];
	promoted[i] |= now_promoted;
	back[i] |= promoted[i] && !now_promoted;
	seen[SEEN_PROMOTED] |= promoted[i];
	seen[SEEN_BACK] |= back[i];
	seen[SEEN_PASSED] |= promoted[i] && mine->passed;
}

static size_t some_size(void)
{
	switch (choose(5)) {
	case 0: return 1;
	case 1: return 1 + choose(100);
	case 2: return 1 + choose(5000);
	default: return 1 + choose(SIZE_LARGEST);
	}
}

static int pieces(uint8_t *buf, size_t len, struct iovec iov[4])
{
	int n = 0;

	while (len && n < 3) {
		size_t part = choose(2) ? len : choose((uint32_t)len + 1);
		iov[n++] = (struct iovec){buf, part};
		buf += part;
		len -= part;
	}
	iov[n++] = (struct iovec){buf, len};
	return n;
}

/* What was sent, or -1 with errno. */
static ssize_t do_send(struct program *mine, size_t len, bool quiet)
{
	int i = index_of(mine), flags = MSG_NOSIGNAL | (quiet ? MSG_DONTWAIT : 0);
	uint8_t *buf = buffers[i];
	struct iovec iov[4];
	ssize_t n;

	for (size_t at = 0; at < len; at++)
		buf[at] = pattern(i, mine->sent + at);
	mine->offered = mine->sent + len;
	trace("%d: send %zu%s", i, len, quiet ? " quiet" : "");
	if (!quiet)
		mine->waits_for = POLLOUT;
	if (choose(2)) {
		n = CALL(mine, ssize_t, send, (int, const void *, size_t, int))(mine->fd, buf, len, flags);
	} else {
		int iov_len = pieces(buf, len, iov);
		struct msghdr message = {.msg_iov = iov, .msg_iovlen = (size_t)iov_len};
		n = CALL(mine, ssize_t, sendmsg, (int, const struct msghdr *, int))(mine->fd, &message, flags);
	}
	mine->waits_for = 0;
	trace("%d: sent %zd%s%s", i, n, n < 0 ? " " : "", n < 0 ? strerrorname_np(errno) : "");
	if (n > 0)
		mine->sent += (uint64_t)n;
	mine->offered = mine->sent;
	if (peer_of(mine)->received > mine->sent)
		fail("end %d: the peer has read more than was sent", i);
	if (n < 0)
		judge_error(mine, "send", errno);
	if (n == 0)
		fail("end %d: send returns 0", i);
	return n;
}

/* What was received; 0 the end, or -1 with errno. */
static ssize_t do_recv(struct program *mine, size_t len, int flags)
{
	int i = index_of(mine);
	uint8_t *buf = buffers[i];
	struct iovec iov[4];
	bool quiet = mine->nonblock || (flags & MSG_DONTWAIT), whole = choose(2);
	ssize_t n;
	int iov_len = whole ? 1 : pieces(buf, len, iov);

	memset(buf, 0xee, len);
	trace("%d: recv %zu%s%s", i, len, quiet ? " quiet" : "", flags & MSG_PEEK ? " peek" : "");
	if (!quiet)
		mine->waits_for = POLLIN;
	if (whole && !flags) {
		n = CALL(mine, ssize_t, read, (int, void *, size_t))(mine->fd, buf, len);
	} else if (whole) {
		n = CALL(mine, ssize_t, recv, (int, void *, size_t, int))(mine->fd, buf, len, flags);
	} else {
		struct msghdr message = {.msg_iov = iov, .msg_iovlen = (size_t)iov_len};
		n = CALL(mine, ssize_t, recvmsg, (int, struct msghdr *, int))(mine->fd, &message, flags);
	}
	mine->waits_for = 0;
	trace("%d: received %zd%s%s, %llu in all", i, n, n < 0 ? " " : "", n < 0 ? strerrorname_np(errno) : "",
	      (unsigned long long)(mine->received + (n > 0 && !(flags & MSG_PEEK) ? (uint64_t)n : 0)));
	if (n > 0)
		judge_bytes(mine, buf, (size_t)n, (size_t)n < len, flags & MSG_PEEK);
	else if (n == 0)
		judge_end(mine);
	else
		judge_error(mine, "recv", errno);
	return n;
}

static void do_shutdown(struct program *mine, int how)
{
	int i = index_of(mine);

	mine->shut_wr |= how != SHUT_RD;
	mine->shut_rd |= how != SHUT_WR;
	trace("%d: shutdown %d", i, how);
	if (CALL(mine, int, shutdown, (int, int))(mine->fd, how) < 0 && errno != ENOTCONN)
		fail("end %d: shutdown: %s", i, strerrorname_np(errno));
}

static void do_close(struct program *mine)
{
	trace("%d: close", index_of(mine));
	mine->closing = true;
	mine->no_more = true;
	if (CALL(mine, int, close, (int))(mine->fd) < 0)
		fail("end %d: close: %s", index_of(mine), strerrorname_np(errno));
	mine->fd = -1;
}

static short do_poll(struct program *mine, short events, int timeout)
{
	struct pollfd item = {.fd = mine->fd, .events = events};
	int n = CALL(mine, int, poll, (struct pollfd *, nfds_t, int))(&item, 1, timeout);

	trace("%d: poll %#x for %d: %#x", index_of(mine), (unsigned)events, timeout, (unsigned)item.revents);
	if (n < 0 || (n == 0) != (item.revents == 0) || (item.revents & POLLNVAL))
		fail("end %d: poll returns %d with %#x", index_of(mine), n, (unsigned)item.revents);
	judge_told(mine, (uint16_t)events, (uint16_t)item.revents);
	return item.revents;
}

static const uint32_t set_flags[WAYS] = {
	[BY_EDGE] = EPOLLET, [BY_EDGE_ONESHOT] = EPOLLET | EPOLLONESHOT, [BY_LEVEL_ONESHOT] = EPOLLONESHOT};

static void set_register(struct program *mine, int op, uint32_t events)
{
	struct epoll_event event = {.events = events | set_flags[mine->way], .data.u64 = 0x1234567800000000ull};

	mine->events = events;
	trace("%d: epoll_ctl %d %#x", index_of(mine), op, event.events);
	if (CALL(mine, int, epoll_ctl, (int, int, int, struct epoll_event *))(mine->epfd, op, mine->fd, &event) < 0)
		fail("end %d: epoll_ctl: %s", index_of(mine), strerrorname_np(errno));
}

static uint32_t set_wait(struct program *mine, int timeout)
{
	struct epoll_event event = {0};
	int n = CALL(mine, int, epoll_wait, (int, struct epoll_event *, int, int))(mine->epfd, &event, 1, timeout);

	trace("%d: epoll_wait for %d: %d, %#x", index_of(mine), timeout, n, event.events);
	if (n < 0 || n > 1 || (n == 1 && event.data.u64 != 0x1234567800000000ull))
		fail("end %d: epoll_wait returns %d", index_of(mine), n);
	judge_told(mine, mine->events, event.events);
	return n ? event.events : 0;
}

/* Whether nothing of what the peer has sent is still with TCP, nor waits to be sent again. */
static bool all_arrived(const struct program *mine)
{
	const struct program *peer = peer_of(mine);

	return connection[index_of(peer)]->tcp.out.len == 0 && !mine->passed && !peer->passed && !mine->shut_rd &&
	       !peer->hostile && !peer->killed && !reset_excused(mine);
}

/* What poll and a set say, and FIONREAD counts, is what the next call does; nothing else happens in between. */
static void do_agree(struct program *mine)
{
	int number = 0;

	calm++;
	now += LOOK_EVERY; /* the shim need not have asked TCP just now */
	short told = do_poll(mine, POLLIN | POLLOUT | POLLRDHUP, 0);
	if (mine->way == BY_LEVEL) {
		set_register(mine, EPOLL_CTL_MOD, EPOLLIN);
		uint32_t by_set = set_wait(mine, 0);
		if ((by_set & POLLIN) != (told & POLLIN))
			fail("end %d: poll tells %#x, and the set %#x", index_of(mine), (unsigned)told, by_set);
	}
	/* who sends to a peer that is gone is told of room, and hears from TCP in a moment what became of it */
	bool gone = peer_of(mine)->closing || peer_of(mine)->killed;
	if ((told & POLLOUT) && !gone && !mine->no_more && choose(2)) {
		if (do_send(mine, 1, true) < 0 && errno == EAGAIN)
			fail("end %d: poll tells %#x, and send waits", index_of(mine), (unsigned)told);
		calm--;
		return;
	}
	CALL(mine, int, ioctl, (int, unsigned long, ...))(mine->fd, FIONREAD, &number);
	ssize_t n = CALL(mine, ssize_t, recv, (int, void *, size_t, int))(mine->fd, buffers[index_of(mine)], SIZE_LARGEST,
	                                                                  MSG_PEEK | MSG_DONTWAIT);
	bool waits = n < 0 && (errno == EAGAIN || errno == ENOTCONN);
	trace("%d: poll says %#x, FIONREAD %d, recv %zd", index_of(mine), (unsigned)told, number, n);
	if (n < 0)
		judge_error(mine, "recv", errno);
	if (waits == (bool)(told & (POLLIN | POLLERR)))
		fail("end %d: poll tells %#x, and recv %s", index_of(mine), (unsigned)told, waits ? "waits" : "does not");
	if ((n >= 0 || waits) && (n > 0 ? n : 0) != (number < SIZE_LARGEST ? number : SIZE_LARGEST))
		fail("end %d: FIONREAD %d, and a look sees %zd", index_of(mine), number, n);
	if (n > 0)
		judge_bytes(mine, buffers[index_of(mine)], (size_t)n, false, true);
	if ((n > 0 || waits) && all_arrived(mine) && mine->received + (uint64_t)number < peer_of(mine)->sent)
		fail("end %d: FIONREAD %d at %llu, and all %llu have arrived", index_of(mine), number,
		     (unsigned long long)mine->received, (unsigned long long)peer_of(mine)->sent);
	calm--;
}

/* Waits for POLLIN, POLLOUT or both in its own way; what was told. */
static uint32_t do_wait(struct program *mine, short events, int timeout)
{
	uint32_t told;

	if (timeout < 0)
		mine->waits_for = events;
	if (mine->way == BY_RECV || mine->way == BY_POLL) {
		told = (uint32_t)(uint16_t)do_poll(mine, events | (choose(2) ? POLLRDHUP : 0), timeout);
	} else {
		if (mine->way == BY_LEVEL || mine->way == BY_LEVEL_ONESHOT || mine->way == BY_EDGE_ONESHOT)
			set_register(mine, EPOLL_CTL_MOD, (uint32_t)events | (choose(2) ? EPOLLRDHUP : 0));
		told = set_wait(mine, timeout);
	}
	mine->waits_for = 0;
	return told;
}

/* From now on a program without a shim has the socket. */
static void is_strangers(struct program *mine)
{
	mine->stranger = true;
	if (mine->way > BY_POLL)
		mine->way = BY_POLL;
}

static void do_pass(struct program *mine)
{
	union {
		struct cmsghdr header;
		char bytes[CMSG_SPACE(sizeof(int))];
	} control = {.header = {.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof(int))}};
	struct iovec iov = {"x", 1};
	struct msghdr message = {
		.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};
	int line = fd_new(object_new(KIND_LINE), 0, index_of(mine), true);

	trace("%d: passes the socket on", index_of(mine));
	mine->passed = true;
	look(mine);
	memcpy(CMSG_DATA(&control.header), &mine->fd, sizeof(int));
	if (CALL(mine, ssize_t, sendmsg, (int, const struct msghdr *, int))(line, &message, 0) != 1)
		fail("end %d: sendmsg: %s", index_of(mine), strerrorname_np(errno));
	int theirs = fd_new(connection[index_of(mine)], 0, index_of(mine), false);
	object_put(connection[index_of(mine)]); /* the message's */
	if (CALL(mine, int, close, (int))(mine->fd) < 0)
		fail("end %d: close: %s", index_of(mine), strerrorname_np(errno));
	mine->fd = theirs;
	is_strangers(mine);
}

static void do_exec(struct program *mine)
{
	static char *const none[] = {NULL};

	trace("%d: exec", index_of(mine));
	mine->passed = true;
	look(mine);
	if (setjmp(exec_place[index_of(mine)]) == 0)
		CALL(mine, int, execve, (const char *, char *const *, char *const *))("/bin/true", none, none);
	fds_close(index_of(mine), true);
	is_strangers(mine);
}

void exec_done(void)
{
	longjmp(exec_place[current->index], 1);
}

static bool never(void *unused)
{
	return unused != NULL;
}

static void do_kill(struct program *mine)
{
	trace("%d: is killed", index_of(mine));
	mine->killed = mine->no_more = true;
	kill_end(current);
	block(never, NULL, NEVER);
}

static void do_abort(struct program *mine, bool by_linger)
{
	const struct linger reset = {.l_onoff = 1};
	struct sockaddr none = {.sa_family = AF_UNSPEC};

	mine->aborted = true;
	mine->no_more = true;
	if (by_linger) {
		trace("%d: SO_LINGER 0", index_of(mine));
		CALL(mine, int, setsockopt, (int, int, int, const void *, socklen_t))
		(mine->fd, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
	} else {
		trace("%d: connect(AF_UNSPEC)", index_of(mine));
		CALL(mine, int, connect, (int, const struct sockaddr *, socklen_t))(mine->fd, &none, sizeof(none));
	}
	do_close(mine);
}
>>>>>>> hang

static void rare(struct program *mine)
{
	uint32_t which = choose(12);

	if (which < 5 && (stimuli & MAY_ORDER))
		provider_order((int)choose(2), choose(2));
	else if (which == 5 && (stimuli & MAY_SHUT))
		do_shutdown(mine, SHUT_WR);
	else if (which == 6 && (stimuli & MAY_SHUT) && chance(3))
		do_shutdown(mine, choose(2) ? SHUT_RD : SHUT_RDWR);
	else if (which == 7 && (stimuli & MAY_CLOSE) && chance(3))
		(choose(3) ? do_close : do_exit)(mine);
	else if (which == 8 && (stimuli & MAY_ABORT) && chance(4))
		do_abort(mine, choose(2));
	else if (which == 9 && (stimuli & MAY_KILL) && chance(4))
		do_kill(mine);
	else if (which == 11 && (stimuli & MAY_RELAY) && chance(4))
		relay_leave();
	else if (which == 11 && (stimuli & MAY_LOSE) && chance(2))
		provider_dies();
	else if ((which == 6 || seen[SEEN_PROMOTED]) && (stimuli & MAY_FORK) && !mine->stranger && !mine->side->forked && choose(2))
		do_fork(mine, child_run);
	else if (which == 10 && (stimuli & MAY_PASS) && !mine->stranger && chance(4))
		do_pass(mine);
	else if (which == 10 && (stimuli & MAY_EXEC) && !mine->stranger && chance(4))
		do_exec(mine);
}

/* The other process of its side, if there is one, is not in the midst of a call. */
static bool undisturbed(const struct program *mine)
{
	const struct program *other = &programs[mine->index ^ 2];

	if (mine->side->forked && mine->side->aborted)
		return false;
	return !other->ready || ends[other->index].over || other->between;
}

static void operate(struct program *mine)
{
	const struct side *side = mine->side, *peer = &sides[1 - (mine->index & 1)];
	uint64_t unread = side_sent(peer) > side->received ? side_sent(peer) - side->received : 0;
	/* unless the peer ends by a reset */
	bool comes = unread && !mine->told_end && !side->blind && (!side->forked || programs[mine->index ^ 2].closed);
	int all = choose(8) ? 0 : MSG_WAITALL;

	operations++;
	look(mine);
	switch (choose(12)) {
	case 0:
	case 1:
	case 2:
		do_send(mine, some_size(), true);
		break;
	case 3:
	case 4:
	case 5: do_recv(mine, some_size(), MSG_DONTWAIT | all); break;
	case 6:
		if (comes && unread >= side->low_water && unread <= SIZE_LARGEST)
			do_recv(mine, all ? 1 + choose((uint32_t)unread) : some_size(), all);
		else
			do_recv(mine, some_size(), MSG_DONTWAIT);
		break;
	case 7: do_recv(mine, some_size(), MSG_DONTWAIT | MSG_PEEK | all); break;
	case 8:
		if (undisturbed(mine))
			do_agree(mine);
		break;
	case 9:
		do_wait(mine, (short)(choose(2) ? POLLIN : POLLIN | POLLOUT), choose(2) ? 0 : (int)choose(30));
		break;
	case 10:
		if (choose(8))
			do_count(mine);
		else if (mine->way <= BY_POLL)
			do_dup(mine);
		break;
	default: rare(mine);
	}
}

bool side_no_more(const struct side *side)
{
	for (int i = 0; i < 2; i++)
		if (programs[i].side == side && !programs[i].no_more)
			return false;
	return true;
}

/* ---- to the end ---- */
static void between_calls(struct program *mine)
{
	mine->between = true;
	give_way();
	mine->between = false;
}

static void finish_reading(struct program *mine)
{
	const struct side *side = mine->side, *peer = &sides[1 - (mine->index & 1)];
	size_t left = mine->way == BY_RECV || side->shut_wr ? 0 : (choose(2) ? some_size() : 0);
	bool readable = true, writable = true;

	for (;;) {
		operations++;
		between_calls(mine);
		if (mine->told_end || mine->told_reset || (side->shut_rd && side_no_more(peer)))
			break;
		if (!left) {
			mine->no_more = true;
			if (side_no_more(peer) && (side->blind || side->received >= side_sent(peer)) && !peer->shut_wr && !peer->closing && !peer->killed)
				break;
		}
		if (mine->way == BY_RECV) {
			size_t wanted = some_size(); /* of more than was sent all would wait for each other */
			if (do_recv(mine, wanted, side_sent(peer) >= side->received + wanted && choose(2) ? MSG_WAITALL : 0) == 0)
				break;
			continue;
		}
		if (left && writable) {
			ssize_t n = do_send(mine, left, true);
			if (n < 0 && errno != EAGAIN)
				left = 0;
			writable = n == (ssize_t)left;
			left -= n > 0 ? (size_t)n : 0;
			continue;
		}
		if (readable) {
			size_t wanted = some_size();
			ssize_t n = do_recv(mine, wanted, mine->nonblock ? 0 : MSG_DONTWAIT);
			if (n == 0)
				break;
			readable = n > 0 && (n == (ssize_t)wanted || !mine->until_short || mine->ending);
			continue;
		}
		uint32_t told = do_wait(mine, left ? POLLIN | POLLOUT : POLLIN, -1);
		if (!told)
			fail("end %d: waits for ever, and is told nothing", mine->index);
		readable = told & (POLLIN | POLLERR | POLLHUP | POLLRDHUP);
		writable = told & (POLLOUT | POLLERR | POLLHUP);
	}
	mine->no_more = true;
}

static bool could_read_all(const struct program *mine, size_t len)
{
	return side_sent(&sides[1 - (mine->index & 1)]) >= mine->side->received + len;
}

/* A command of a scenario; none that would need something of a connection that has ended here. */
void program_do(struct program *mine, const char *command)
{
	static const struct {
		const char *name;
		size_t len;
	} sizes[] = {{"byte", 1}, {"send", 3000}, {"big", 20000}, {"more", 700}};

	operations++;
	for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++)
		if (strcmp(command, sizes[i].name) == 0) {
			do_send(mine, sizes[i].len, true);
			return;
		}
	if (strcmp(command, "recv") == 0)
		while (do_recv(mine, 2000, MSG_DONTWAIT) == 2000)
			;
	else if (strcmp(command, "all") == 0)
		do_recv(mine, SIZE_LARGEST, MSG_DONTWAIT);
	else if (strcmp(command, "some") == 0)
		do_recv(mine, 1000, MSG_DONTWAIT);
	else if (strcmp(command, "block") == 0)
		do_recv(mine, 1000, 0);
	else if (strcmp(command, "peek") == 0)
		do_recv(mine, SIZE_LARGEST, MSG_DONTWAIT | MSG_PEEK);
	else if (strcmp(command, "poll") == 0 && undisturbed(mine))
		do_agree(mine);
	else if (strcmp(command, "wait") == 0)
		do_wait(mine, POLLIN, 0);
	else if (strcmp(command, "nap") == 0)
		do_nap(mine);
	else if (strcmp(command, "both") == 0)
		do_wait(mine, POLLIN | POLLOUT, 0);
	else if (strcmp(command, "shut") == 0)
		do_shutdown(mine, SHUT_WR);
	else if (strcmp(command, "shutrd") == 0)
		do_shutdown(mine, SHUT_RD);
	else if (strcmp(command, "close") == 0)
		do_close(mine);
	else if (strcmp(command, "linger") == 0 || strcmp(command, "abort") == 0)
		do_abort(mine, *command == 'l');
	else if (strcmp(command, "first") == 0)
		do_recv(mine, 1, 0);
	else if (strcmp(command, "whole") == 0)
		do_recv(mine, 2000, MSG_WAITALL | (could_read_all(mine, 2000) && !mine->side->forked ? 0 : MSG_DONTWAIT));
	else if (strcmp(command, "water") == 0)
		do_low_water(mine, 400);
	else if (strcmp(command, "exit") == 0)
		do_exit(mine);
	else if (strcmp(command, "fork") == 0 && !mine->side->forked)
		do_fork(mine, child_run);
	else if (strcmp(command, "dup") == 0)
		do_dup(mine);
	else if (strcmp(command, "kill") == 0)
		do_kill(mine);
	else if (strcmp(command, "pass") == 0 && !mine->stranger)
		do_pass(mine);
	else if (strcmp(command, "exec") == 0 && !mine->stranger)
		do_exec(mine);
	else if (!mine->stranger && strcmp(command, "poll") != 0 && strcmp(command, "fork") != 0)
		fail("what is %s?", command);
}

/* A child does some operations of its own, or runs another program. */
static void child_run(struct program *mine)
{
	static const enum way ways[] = {BY_RECV, BY_POLL, BY_LEVEL, BY_EDGE};

	if (!scenario) {
		mine->way = ways[choose(4)];
		mine->operations = choose(40);
	}
	if (mine->way > BY_POLL) { /* the parent's set stays open and unused */
		mine->epfd = CALL(mine, int, epoll_create1, (int))(0);
		set_register(mine, EPOLL_CTL_ADD, EPOLLIN | EPOLLOUT | EPOLLRDHUP);
	}
	if (!scenario && chance(6) && (stimuli & MAY_EXEC))
		do_exec(mine);
	if (!scenario && chance(6))
		do_close(mine);
	program_live(mine);
}

static void program_live(struct program *mine)
{
	if (scenario)
		scenario_program(mine, &ends[mine->index]);
	for (uint32_t i = 0; i < mine->operations && mine->fd >= 0; i++) {
		if (mine->side->forked)
			between_calls(mine);
		operate(mine);
	}
	if (mine->fd < 0)
		return;
	/* what is below the other's low-water mark is told with the end only */
	bool shut = (choose(2) || sides[0].low_water || sides[1].low_water) && !mine->side->shut_wr;
	if (shut && mine->side->holders == 1) {
		mine->no_more = true;
		do_shutdown(mine, SHUT_WR);
	}
	finish_reading(mine);
	/* others may wait for the end, and it would not come with this close */
	if (mine->side->holders > 1 && side_no_more(mine->side) && !mine->side->shut_wr)
		do_shutdown(mine, SHUT_WR);
	do_close(mine);
}

void program_run(struct end *end)
{
	struct program *mine = &programs[end->index];
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = 1, .sin_addr = {htonl(INADDR_LOOPBACK)}};
	socklen_t len = sizeof(address);

	if (end->index == 0) {
		mine->fd = CALL(mine, int, socket, (int, int, int))(AF_INET, SOCK_STREAM, 0);
		CALL(mine, int, connect, (int, const struct sockaddr *, socklen_t))(mine->fd, (struct sockaddr *)&address, len);
	} else {
		int listener = fd_new(object_new(KIND_LISTENER), 0, end->index, false);
		mine->fd = CALL(mine, int, accept, (int, struct sockaddr *, socklen_t *))(listener, (struct sockaddr *)&address, &len);
	}
	if (mine->nonblock)
		CALL(mine, int, fcntl64, (int, int, ...))(mine->fd, F_SETFL, (long)O_NONBLOCK);
	if (mine->way > BY_POLL) {
		mine->epfd = CALL(mine, int, epoll_create1, (int))(0);
		set_register(mine, EPOLL_CTL_ADD, EPOLLIN | EPOLLOUT | EPOLLRDHUP);
	}
	mine->ready = true;
	if (!scenario && (stimuli & MAY_ANY) && choose(2))
		do_low_water(mine, 1 + (int)choose(500));
	program_live(mine);
}

static bool is_passing(int side)
{
	return programs[side].passing || programs[side + 2].passing;
}

/* Who only naps finds in a moment what there is, or frees the other; see NO_BELL_POLL_NS, LOCK_NAPS. */
static bool somebody_naps(void)
{
	bool naps = false;

	for (int i = 0; i < ENDS; i++)
		naps |= ends[i].started && !ends[i].over && ends[i].deadline - now <= NAP && programs[i].naps++ < NAPS_MAX;
	return naps;
}

/* Nobody waits for what is there. */
void program_idle(void)
{
	if (somebody_naps())
		return;
	for (int i = 0; i < ENDS; i++) {
		const struct program *mine = &programs[i];
		const struct side *peer = &sides[1 - (i & 1)];
		if (!ends[i].started || ends[i].over || !mine->waits_for || is_passing(1 - (i & 1)))
			continue; /* who passes its socket on waits for a moment itself */
		bool in = (mine->waits_for & POLLIN) && could_read(mine), out = (mine->waits_for & POLLOUT) && could_write(mine);
		if (in || out)
			fail("end %d sleeps, and there is %s (%llu bytes)", i, in ? "something to read" : "room",
			     (unsigned long long)(side_sent(peer) - mine->side->received));
	}
}

void programs_check(void)
{
	for (int i = 0; i < ENDS; i++)
		/* who waits for more than comes, as it counted on a process that was killed since, waits rightly */
		if (ends[i].started && !ends[i].over && !(seen[SEEN_FORKED] && programs[i].waits_for))
			fail("end %d waits for ever", i);
}
