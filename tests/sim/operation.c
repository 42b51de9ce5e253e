/*
 * operation.c - what a program can do with its end of the connection: one call each, or a few that belong together, and what
 * must come of it.
 */
#include "operation.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include "channel.h"
#include "layout.h"
#include "process.h"
#include "provider.h"
#include "scenario.h"
#include "shim_slot.h"

#define DUP_TO 5 /* no standard stream: the simulated C library reads and writes none */
#define LOOK_EVERY 30000 /* ns; more than LOOK_EVERY_NS of the shim */

static uint8_t buffers[ENDS][SIZE_LARGEST];

bool promoted_now(const struct program *mine)
{
	const struct conn_slot *slot = provider_slot(mine->index & 1);

	return slot && slot->state == STATE_PROMOTED;
}

/* How far the connection has come. */
void look(const struct program *mine)
{
	int i = mine->index & 1;
	const struct conn_slot *slot = provider_slot(i);
	static bool promoted[2], back[2], confined[2];

	if (!slot || mine->stranger)
		return;
	bool now_promoted = slot->state == STATE_PROMOTED;
	seen[SEEN_AGAIN] |= now_promoted && back[i];
	promoted[i] |= now_promoted;
	back[i] |= promoted[i] && !now_promoted;
	seen[SEEN_PROMOTED] |= promoted[i];
	seen[SEEN_BACK] |= back[i];
	seen[SEEN_RELAYED] |= now_promoted && provider_relays;
	seen[SEEN_ROUNDS] |= provider_relays && slot->tx_switch_offset && slot->tx_round > 2;
	seen[SEEN_PASSED] |= promoted[i] && side_passes(mine->side);
	confined[i] |= slot_has(slot, SLOT_CONFINED);
	seen[SEEN_CONFINED] |= now_promoted && confined[i];
	seen[SEEN_SHARED] |= promoted[i] && mine->side->holders > 1;
}

/* ---- bytes ---- */
size_t some_size(void)
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
ssize_t do_send(struct program *mine, size_t len, bool quiet)
{
	int i = mine->index, flags = MSG_NOSIGNAL | (quiet ? MSG_DONTWAIT : 0);
	struct stream *stream = &mine->side->streams[mine->process];
	uint8_t *buf = buffers[i];
	struct iovec iov[4];
	ssize_t n;
	uint32_t how = choose(quiet && !mine->nonblock ? 2 : 4);

	for (size_t at = 0; at < len; at++)
		buf[at] = pattern(i & 1, mine->process, stream->sent + at);
	stream_begins(mine->side, mine->process, len);
	trace("%d: send %zu%s", i, len, quiet ? " quiet" : "");
	mine->naps = 0;
	if (!quiet && !mine->nonblock)
		mine->waits_for = POLLOUT;
	if (how == 0) {
		n = CALL(mine, ssize_t, send, (int, const void *, size_t, int))(mine->fd, buf, len, flags);
	} else if (how == 2) {
		n = CALL(mine, ssize_t, write, (int, const void *, size_t))(mine->fd, buf, len);
	} else {
		int iov_len = pieces(buf, len, iov);
		struct msghdr message = {.msg_iov = iov, .msg_iovlen = (size_t)iov_len};
		n = how == 1 ? CALL(mine, ssize_t, sendmsg, (int, const struct msghdr *, int))(mine->fd, &message, flags)
		             : CALL(mine, ssize_t, writev, (int, const struct iovec *, int))(mine->fd, iov, iov_len);
	}
	mine->waits_for = 0;
	trace("%d: sent %zd%s%s", i, n, n < 0 ? " " : "", n < 0 ? strerrorname_np(errno) : "");
	stream_moved(mine->side, mine->process, n > 0 ? (size_t)n : 0);
	if (n < 0)
		judge_error(mine, "send", errno);
	if (n == 0)
		fail("end %d: send returns 0", i);
	return n;
}

static ssize_t receive(struct program *mine, uint8_t *buf, size_t len, int flags)
{
	struct iovec iov[4];

	if (choose(2))
		return flags ? CALL(mine, ssize_t, recv, (int, void *, size_t, int))(mine->fd, buf, len, flags)
		             : CALL(mine, ssize_t, read, (int, void *, size_t))(mine->fd, buf, len);
	int iov_len = pieces(buf, len, iov);
	struct msghdr message = {.msg_iov = iov, .msg_iovlen = (size_t)iov_len};
	return flags ? CALL(mine, ssize_t, recvmsg, (int, struct msghdr *, int))(mine->fd, &message, flags)
	             : CALL(mine, ssize_t, readv, (int, const struct iovec *, int))(mine->fd, iov, iov_len);
}

/* The peer has ended, or the connection has: a read of all need not get all. */
static bool could_end(const struct program *mine)
{
	const struct side *peer = &sides[1 - (mine->index & 1)];

	return peer->shut_wr || peer->closing || peer->killed || peer->aborted || mine->side->shut_rd ||
	       mine->side->told_reset || reset_excused(mine->side);
}

/* What was received; 0 the end, or -1 with errno. */
ssize_t do_recv(struct program *mine, size_t len, int flags)
{
	int i = mine->index;
	uint8_t *buf = buffers[i];
	bool quiet = mine->nonblock || (flags & MSG_DONTWAIT), whole = (flags & MSG_WAITALL) && !quiet;

	if (mine->side->forked) { /* another process may read in the midst of it */
		flags &= ~MSG_WAITALL;
		whole = false;
	}

	memset(buf, 0xee, len);
	trace("%d: recv %zu%s%s%s", i, len, quiet ? " quiet" : "", flags & MSG_PEEK ? " peek" : "",
	      flags & MSG_WAITALL ? " all" : "");
	mine->naps = 0;
	if (!quiet)
		mine->waits_for = POLLIN;
	mine->wanted = whole ? len : mine->side->low_water && len < mine->side->low_water ? len : 0;
	mine->asks = flags & MSG_PEEK ? 0 : len;
	judge_read_begins(mine);
	ssize_t n = receive(mine, buf, len, flags);
	mine->waits_for = 0;
	mine->wanted = 0;
	trace("%d: received %zd%s%s, %llu in all", i, n, n < 0 ? " " : "", n < 0 ? strerrorname_np(errno) : "",
	      (unsigned long long)(mine->side->received + (n > 0 && !(flags & MSG_PEEK) ? (uint64_t)n : 0)));
	if (n > 0)
		judge_bytes(mine, buf, (size_t)n, (size_t)n < len, flags & MSG_PEEK);
	else if (n == 0)
		judge_end(mine);
	else
		judge_error(mine, "recv", errno);
	if (n > 0 && whole && (size_t)n < len && !(flags & MSG_PEEK) && !could_end(mine))
		fail("end %d: %zd of %zu bytes that are all waited for", i, n, len);
	judge_read_over(mine);
	return n;
}

/* How many bytes FIONREAD counts. */
int do_count(struct program *mine)
{
	const struct side *peer = &sides[1 - (mine->index & 1)];
	/* Another process may read or count meanwhile. */
	uint64_t before = mine->side->received, arrived = mine->side->arrived;
	int number = 0;

	CALL(mine, int, ioctl, (int, unsigned long, ...))(mine->fd, FIONREAD, &number);
	if ((uint64_t)number > side_offered(peer) - before + mine->told_end)
		fail("end %d: FIONREAD %d", mine->index, number);
	trace("%d: FIONREAD %d", mine->index, number);
	judge_counted(mine, before, arrived, number);
	return number;
}

void do_low_water(struct program *mine, int low)
{
	trace("%d: SO_RCVLOWAT %d", mine->index, low);
	mine->side->low_water = (size_t)low;
	if (CALL(mine, int, setsockopt, (int, int, int, const void *, socklen_t))(mine->fd, SOL_SOCKET, SO_RCVLOWAT, &low,
	                                                                          sizeof(low)) < 0)
		fail("end %d: setsockopt: %s", mine->index, strerrorname_np(errno));
}

/* ---- ends ---- */
void do_shutdown(struct program *mine, int how)
{
	mine->side->shut_wr |= how != SHUT_RD;
	mine->side->shut_rd |= how != SHUT_WR;
	mine->naps = 0;
	trace("%d: shutdown %d", mine->index, how);
	if (CALL(mine, int, shutdown, (int, int))(mine->fd, how) < 0 && errno != ENOTCONN)
		fail("end %d: shutdown: %s", mine->index, strerrorname_np(errno));
}

/* It is about to let go of the socket. */
static void lets_go(struct program *mine)
{
	int unread = 0;

	if (!--mine->side->holders) {
		calm++;
		if (!side_passes(mine->side) && !mine->side->forked && !mine->side->aborted)
			CALL(mine, int, ioctl, (int, unsigned long, ...))(mine->fd, FIONREAD, &unread);
		calm--;
		mine->side->left_unread = unread > 0;
		mine->side->closing = true;
		mine->side->closing_at = now;
	}
	mine->no_more = mine->closed = true;
	mine->naps = 0;
}

void do_close(struct program *mine)
{
	trace("%d: close", mine->index);
	lets_go(mine);
	if (CALL(mine, int, close, (int))(mine->fd) < 0)
		fail("end %d: close: %s", mine->index, strerrorname_np(errno));
	mine->fd = -1;
}

void do_exit(struct program *mine)
{
	trace("%d: exit", mine->index);
	lets_go(mine);
	CALL(mine, void, _exit, (int))(0);
}

/* Another number, and the first is closed. */
void do_dup(struct program *mine)
{
	int copy = choose(2) || mine->fd == DUP_TO ? CALL(mine, int, dup, (int))(mine->fd)
	                                           : CALL(mine, int, dup2, (int, int))(mine->fd, DUP_TO);

	trace("%d: %d is %d now", mine->index, mine->fd, copy);
	if (copy < 0 || CALL(mine, int, close, (int))(mine->fd) < 0)
		fail("end %d: dup: %s", mine->index, strerrorname_np(errno));
	mine->fd = copy;
}

/* By a call that the shim does not see. A file gets the number, and what is written to it is the file's. */
void do_hidden_close(struct program *mine)
{
	const char text[] = "the file's";

	trace("%d: closes the socket unseen", mine->index);
	if (!--mine->side->holders)
		mine->side->closing = mine->side->closed_unseen = true;
	mine->no_more = mine->closed = true;
	seen[SEEN_UNSEEN] |= promoted_now(mine);
	sim_close(mine->fd);
	int fd = CALL(mine, int, open64, (const char *, int, ...))("/file", O_RDWR);
	if (fd != mine->fd) { /* the lowest that is free is another */
		int copy = CALL(mine, int, dup2, (int, int))(fd, mine->fd);
		CALL(mine, int, close, (int))(fd);
		fd = copy;
	}
	ssize_t n = CALL(mine, ssize_t, write, (int, const void *, size_t))(fd, text, sizeof(text));
	if (n != sizeof(text) || fd_object(fd)->kind != KIND_FILE || fd_object(fd)->count != sizeof(text))
		fail("end %d: %zd bytes were written to a file that has the number of a socket", mine->index, n);
	CALL(mine, int, close, (int))(fd);
	mine->fd = -1;
}

/* ---- waiting ---- */
static short by_select(struct program *mine, short events, int timeout)
{
	fd_set in, out;
	struct timeval limit = {timeout / 1000, timeout % 1000 * 1000};

	FD_ZERO(&in);
	FD_ZERO(&out);
	if (events & POLLIN)
		FD_SET(mine->fd, &in);
	if (events & POLLOUT)
		FD_SET(mine->fd, &out);
	int n = CALL(mine, int, select, (int, fd_set *, fd_set *, fd_set *, struct timeval *))(
		mine->fd + 1, &in, &out, NULL, timeout < 0 ? NULL : &limit);
	short told = (short)((FD_ISSET(mine->fd, &in) ? POLLIN : 0) | (FD_ISSET(mine->fd, &out) ? POLLOUT : 0));
	trace("%d: select %#x for %d: %d, %#x", mine->index, (unsigned)events, timeout, n, (unsigned)told);
	if (n != ((told & POLLIN) != 0) + ((told & POLLOUT) != 0))
		fail("end %d: select returns %d with %#x", mine->index, n, (unsigned)told);
	judge_told(mine, (uint16_t)events, (uint16_t)told);
	return told;
}

static short do_poll(struct program *mine, short events, int timeout)
{
	struct pollfd item = {.fd = mine->fd, .events = events};
	int n = CALL(mine, int, poll, (struct pollfd *, nfds_t, int))(&item, 1, timeout);

	trace("%d: poll %#x for %d: %#x", mine->index, (unsigned)events, timeout, (unsigned)item.revents);
	if (n < 0 || (n == 0) != (item.revents == 0) || (item.revents & POLLNVAL))
		fail("end %d: poll returns %d with %#x", mine->index, n, (unsigned)item.revents);
	judge_told(mine, (uint16_t)events, (uint16_t)item.revents);
	return item.revents;
}

/* Who goes to sleep hears the provider. */
void do_nap(struct program *mine, short events)
{
	do_poll(mine, events, 1);
}

static const uint32_t set_flags[WAYS] = {
	[BY_EDGE] = EPOLLET, [BY_EDGE_ONESHOT] = EPOLLET | EPOLLONESHOT, [BY_LEVEL_ONESHOT] = EPOLLONESHOT};

void set_register(struct program *mine, int op, uint32_t events)
{
	struct epoll_event event = {.events = events | set_flags[mine->way], .data.u64 = 0x1234567800000000ull};

	mine->events = events;
	trace("%d: epoll_ctl %d %#x", mine->index, op, event.events);
	if (CALL(mine, int, epoll_ctl, (int, int, int, struct epoll_event *))(mine->epfd, op, mine->fd, &event) < 0)
		fail("end %d: epoll_ctl: %s", mine->index, strerrorname_np(errno));
}

/* The kernel tells it of the inner set, which is then asked. */
static bool outer_tells(struct program *mine, int timeout)
{
	struct epoll_event event = {0};
	int n = CALL(mine, int, epoll_wait, (int, struct epoll_event *, int, int))(mine->outer, &event, 1, timeout);

	trace("%d: the outer set for %d: %d", mine->index, timeout, n);
	if (n < 0 || (n == 1 && event.data.u64 != 1))
		fail("end %d: epoll_wait of the outer set returns %d", mine->index, n);
	return n == 1;
}

static uint32_t inner_tells(struct program *mine, int timeout)
{
	struct epoll_event event = {0};
	int n = CALL(mine, int, epoll_wait, (int, struct epoll_event *, int, int))(mine->epfd, &event, 1, timeout);

	trace("%d: epoll_wait for %d: %d, %#x", mine->index, timeout, n, event.events);
	if (n < 0 || n > 1 || (n == 1 && event.data.u64 != 0x1234567800000000ull))
		fail("end %d: epoll_wait returns %d", mine->index, n);
	judge_told(mine, mine->events, event.events);
	return n ? event.events : 0;
}

/* What its side has taken by now, whichever process: bytes, and room for them, of TCP and of the ring. */
static uint64_t taken_by(int side)
{
	const struct tcp *tcp = &connection[side]->tcp;
	int place;
	const struct channel_segment *segment = provider_segment(side, &place);
	uint64_t taken = tcp->received - tcp->in.len + tcp->acked + tcp->unacked + tcp->out.len;

	return segment ? taken + segment->consumer[1 - place].head + segment->producer[place].tail : taken;
}

/*
 * Where another process of its end has taken what the outer set tells of, the inner one has nothing, and it waits again, however
 * often it comes too late. It waits again a few times where a provider stands between: an end that the kernel knows and that is
 * withheld makes the inner set ready, once.
 */
static uint32_t set_wait(struct program *mine, int timeout)
{
	uint64_t before = taken_by(mine->index & 1);

	for (int vain = 0; mine->outer;) {
		if (!outer_tells(mine, timeout))
			return 0;
		if (vain > 8 ||
		    CALL(mine, int, poll, (struct pollfd *, nfds_t, int))(&(struct pollfd){mine->epfd, POLLIN, 0}, 1, 0)) {
			uint32_t told = inner_tells(mine, 0);
			if (told || vain > 8 || !(mine->side->forked || provider_relays))
				return told;
		}
		if (timeout == 0)
			return 0;
		uint64_t now_taken = taken_by(mine->index & 1);
		vain += now_taken == before;
		before = now_taken;
	}
	return inner_tells(mine, timeout);
}

/* FIONREAD counts what a look sees. How many bytes that is. */
static int look_agrees(struct program *mine, ssize_t *n, bool *waits)
{
	uint8_t *buf = buffers[mine->index];
	int number = 0;

	CALL(mine, int, ioctl, (int, unsigned long, ...))(mine->fd, FIONREAD, &number);
	*n = CALL(mine, ssize_t, recv, (int, void *, size_t, int))(mine->fd, buf, SIZE_LARGEST, MSG_PEEK | MSG_DONTWAIT);
	*waits = *n < 0 && (errno == EAGAIN || errno == ENOTCONN);
	trace("%d: FIONREAD %d, recv %zd %s", mine->index, number, *n, *n < 0 ? strerrorname_np(errno) : "");
	if (*n < 0)
		judge_error(mine, "recv", errno);
	/* through a provider, what TCP holds may stand behind bytes that are still on their way */
	if (!provider_relays && (*n >= 0 || *waits) && (*n > 0 ? *n : 0) != (number < SIZE_LARGEST ? number : SIZE_LARGEST))
		fail("end %d: FIONREAD %d, and a look sees %zd", mine->index, number, *n);
	if (*n > 0)
		judge_bytes(mine, buf, (size_t)*n, false, true);
	return number;
}

/* What poll and a set say, and FIONREAD, is what the next call does; nothing else happens in between. */
void do_agree(struct program *mine)
{
	bool waits,
		midst =
			connection[mine->index & 1]->tcp.half_reset; /* of a reset: a read, which takes the lock, comes after it */
	ssize_t n;
	const struct side *peer = &sides[1 - (mine->index & 1)];

	calm++;
	now += LOOK_EVERY; /* the shim need not have asked TCP just now */
	by_select(mine, POLLIN,
	          0); /* a look that finds nothing carries out an order of the provider's, not one of those below */
	short told = do_poll(mine, POLLIN | POLLOUT | POLLRDHUP, 0);
	if ((by_select(mine, POLLIN, 0) & POLLIN) != (told & POLLIN) && !(told & (POLLERR | POLLHUP)))
		fail("end %d: poll tells %#x, and select does not agree", mine->index, (unsigned)told);
	if (mine->way == BY_LEVEL) {
		set_register(mine, EPOLL_CTL_MOD, EPOLLIN);
		uint32_t by_set = set_wait(mine, 0);
		if ((by_set & POLLIN) != (told & POLLIN))
			fail("end %d: poll tells %#x, and the set %#x", mine->index, (unsigned)told, by_set);
	}
	/* who sends to a peer that is gone is told of room, and hears from TCP in a moment what became of it */
	bool gone = peer->closing || peer->killed;
	if ((told & POLLOUT) && !gone && !mine->no_more && choose(2)) {
		if (do_send(mine, 1, true) < 0 && errno == EAGAIN)
			fail("end %d: poll tells %#x, and send waits", mine->index, (unsigned)told);
		calm--;
		return;
	}
	trace("%d: poll says %#x", mine->index, (unsigned)told);
	int number = look_agrees(mine, &n, &waits);
	/* below the low-water mark there is something to read, of which nothing is told; through a provider see look_agrees() */
	bool below = n > 0 && number > 0 && (size_t)(provider_relays ? n : number) < mine->side->low_water;
	/* a socket that was disconnected, maybe by the shim, fails at once, whether told of as readable or as hung up alone */
	bool either = midst || (n < 0 && errno == ENOTCONN && (told & POLLHUP));
	if (waits == (bool)(told & (POLLIN | POLLERR)) && !below && !either)
		fail("end %d: poll tells %#x, and recv %s", mine->index, (unsigned)told, waits ? "waits" : "does not");
	calm--;
}

void told_anew(struct program *mine)
{
	mine->readable = true;
	mine->counted = -1;
}

/* From now on SIGIO tells it of what comes. What came before, it looks for. */
void do_async(struct program *mine)
{
	int on = 1;

	trace("%d: FIOASYNC", mine->index);
	if (CALL(mine, int, ioctl, (int, unsigned long, ...))(mine->fd, FIOASYNC, &on) < 0)
		fail("end %d: FIOASYNC: %s", mine->index, strerrorname_np(errno));
	mine->by_signal = true;
	mine->until = UNTIL_NOTHING; /* a signal does not say whether an end has come with the bytes */
	mine->signals = connection[mine->index & 1]->signals;
	told_anew(mine);
}

/* Its set comes into another one, in which it waits from now on. */
static void nest(struct program *mine, bool by_edge)
{
	struct epoll_event event = {.events = EPOLLIN | (by_edge ? EPOLLET : 0), .data.u64 = 1};

	trace("%d: nests its set, %#x", mine->index, event.events);
	mine->outer = CALL(mine, int, epoll_create1, (int))(0);
	if (CALL(mine, int, epoll_ctl, (int, int, int, struct epoll_event *))(mine->outer, EPOLL_CTL_ADD, mine->epfd,
	                                                                      &event) < 0)
		fail("end %d: epoll_ctl of the outer set: %s", mine->index, strerrorname_np(errno));
}

/* Who waits for edges may be told of them alone by the outer set, too. */
void do_nest(struct program *mine)
{
	if (mine->way > BY_POLL && !mine->outer)
		nest(mine, mine->way == BY_EDGE && choose(2));
}

void do_nest_edges(struct program *mine)
{
	if (mine->way == BY_EDGE && !mine->outer)
		nest(mine, true);
}

static bool signalled(void *argument)
{
	const struct program *mine = argument;

	return connection[mine->index & 1]->signals != mine->signals;
}

/* Sleeps as by sigwait(), where no shim hears anything. */
static uint32_t by_sigio(struct program *mine, int timeout)
{
	bool told = signalled(mine) || (timeout && block(signalled, mine, timeout < 0 ? NEVER : now + timeout * MS));

	trace("%d: SIGIO for %d: %d", mine->index, timeout, told);
	mine->signals = connection[mine->index & 1]->signals;
	return told ? POLLIN : 0;
}

static bool awake(void *argument)
{
	return !((const struct program *)argument)->asleep;
}

/* For ever, for all that the others know. */
void do_sleep(struct program *mine)
{
	trace("%d: sleeps", mine->index);
	mine->asleep = true;
	block(awake, mine, NEVER);
	trace("%d: wakes up", mine->index);
}

/* Waits for POLLIN, POLLOUT or both in its own way; what was told. */
uint32_t do_wait(struct program *mine, short events, int timeout)
{
	uint32_t told;

	mine->naps = 0;
	if (timeout < 0)
		mine->waits_for = events;
	if (mine->by_signal && events == POLLIN) {
		told = by_sigio(mine, timeout);
	} else if (mine->way == BY_RECV || mine->way == BY_POLL) {
		uint32_t how = choose(3);
		told = (uint32_t)(uint16_t)(how == 2 ? by_select(mine, events, timeout)
		                                     : do_poll(mine, events | (how ? POLLRDHUP : 0), timeout));
	} else {
		if (mine->way == BY_LEVEL || mine->way == BY_LEVEL_ONESHOT || mine->way == BY_EDGE_ONESHOT)
			set_register(mine, EPOLL_CTL_MOD, (uint32_t)events | (choose(2) ? EPOLLRDHUP : 0));
		told = set_wait(mine, timeout);
	}
	mine->waits_for = 0;
	if (told & (POLLIN | POLLERR | POLLHUP | POLLRDHUP))
		told_anew(mine);
	return told;
}

void do_abort(struct program *mine, bool by_linger)
{
	const struct linger reset = {.l_onoff = 1};
	struct sockaddr none = {.sa_family = AF_UNSPEC};

	mine->side->aborted = true;
	mine->side->disconnected |= !by_linger;
	mine->no_more = true;
	mine->naps = 0; /* it may have to wait for the provider */
	if (by_linger) {
		trace("%d: SO_LINGER 0", mine->index);
		CALL(mine, int, setsockopt, (int, int, int, const void *, socklen_t))
		(mine->fd, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
	} else {
		trace("%d: connect(AF_UNSPEC)", mine->index);
		CALL(mine, int, connect, (int, const struct sockaddr *, socklen_t))(mine->fd, &none, sizeof(none));
	}
	do_close(mine);
}
