/* shim_call.c - what a receive and a send have in common. */
#include "shim_call.h"

#include <fcntl.h>
#include <limits.h>

bool would_not_block(int fd, int flags)
{
	return (flags & MSG_DONTWAIT) || (real.fcntl64(fd, F_GETFL, 0) & O_NONBLOCK);
}

/* The number is another file's: the call is made on that as it came, which read() and write() may be as well. */
enum turn call_elsewhere(struct call *call, int way)
{
	struct msghdr message = {.msg_iov = (struct iovec *)call->iov, .msg_iovlen = (size_t)call->iov_len};

	if (call->done)
		return call_over(call, (ssize_t)call->done, call->saved);
	ssize_t n =
		way == WAIT_RX ? real.recvmsg(call->fd, &message, call->flags) : real.sendmsg(call->fd, &message, call->flags);
	if (n < 0 && errno == ENOTSOCK && !call->flags)
		n = way == WAIT_RX ? real.readv(call->fd, call->iov, call->iov_len)
		                   : real.writev(call->fd, call->iov, call->iov_len);
	return call_over(call, n, n < 0 ? errno : call->saved);
}

/*
 * A wait has to know whether the number is still the connection's, whether it blocks, and for how long: three questions to the
 * kernel. Where the last wait of the kind was brief, and without a limit, the next begins without them. The answers may be others
 * by now, through a program that has the socket as well, or a system call that no hook sees. So such a wait ends soon, and the
 * kernel is asked before the call waits on or returns.
 */
#define BRIEF_NS 10000000 /* more than a tick: no timer has to be set for it where a CPU is busy */

/* A long call moves bytes for so long that a signal may come meanwhile. */
void call_count_signals(struct call *call)
{
	call->clock.signals = self.signals;
	call->clock.signals_interrupting = self.signals_interrupting;
	call->counted = true;
}

static void call_start(struct call *call)
{
	const struct wait_clock since = call->clock;

	wait_clock_start(&call->clock);
	if (call->counted) {
		call->clock.signals = since.signals;
		call->clock.signals_interrupting = since.signals_interrupting;
	}
	atomic_fetch_add(&call->conn->waiters, 1);
	call->started = true;
}

#define UNASKED_MAX (REFUSING_AGE - 1) /* answers in a row */

/*
 * True if a call that cannot go on does not wait either. A program that reads until nothing is left gets that answer once a
 * message. The kernel is asked with one answer in 64, as long as no other process has the socket. In between, only a system call
 * that no hook sees makes the socket block, or gives the number to another file.
 */
static bool refuses(struct call *call)
{
	struct conn *conn = call->conn;
	uint64_t refusing = atomic_load(&conn->refusing);
	/* The count is from before the question: a holder that has ended since may have changed the answer. */
	const bool alone = atomic_load(&conn->slot->holders) == 1 && !slot_has(conn->slot, SLOT_PASSED);

	if (call->flags & MSG_DONTWAIT)
		return true;
	call->unasked = alone && refusing >> 32 == (uint32_t)call->fd + 1 && refusing % REFUSING_AGE;
	if (!call->unasked && !would_not_block(call->fd, call->flags))
		return false;
	if (!alone)
		return true;
	const uint64_t age = (uint32_t)refusing & ~(REFUSING_AGE - 1);
	/* The word of another thread stays: the age has changed. */
	atomic_compare_exchange_strong(&conn->refusing, &refusing,
	                               call->unasked ? refusing - 1 : ((uint64_t)call->fd + 1) << 32 | age | UNASKED_MAX);
	return true;
}

/* True if a call that cannot go on waits. */
bool call_blocks(struct call *call, int way)
{
	if (call->blocks)
		return true;
	/* A socket that was last made not to block is asked, so that call_wait() knows of a change since. */
	if (!call->started && !(call->flags & MSG_DONTWAIT) &&
	    word_load(call->conn->brief_fd[way - WAIT_RX]) == call->fd + 1 && !word_load(call->conn->nonblock)) {
		call_start(call);
		call->clock.deadline = call->clock.began + BRIEF_NS;
		call->clock.brief = true;
		return call->blocks = true;
	}
	return call->blocks = !refuses(call);
}

/* A wait lasts until the socket's timeout, if it has one. */
void wait_clock_limit(struct wait_clock *clock, int fd, int way)
{
	struct timeval limit = {0};

	option_get(fd, SOL_SOCKET, way == WAIT_RX ? SO_RCVTIMEO : SO_SNDTIMEO, &limit, sizeof(limit));
	int64_t limit_ns = timespec_ns(&(struct timespec){limit.tv_sec, limit.tv_usec * 1000});
	clock->timed = limit_ns != 0;
	clock->deadline = !limit_ns || limit_ns > INT64_MAX - clock->began ? INT64_MAX : clock->began + limit_ns;
}

/* Waits for what the call needs, as long as the socket's timeout lets it. */
enum turn call_wait(struct call *call, int way, size_t space)
{
	struct conn *conn = call->conn;
	struct wait_clock *clock = &call->clock;

	if (!call->started) {
		call_start(call);
		wait_clock_limit(clock, call->fd, way);
	}
	const size_t has = way == WAIT_RX && (call->flags & MSG_PEEK) ? call->seen : call->done;
	clock->moved = has;
	int waited = conn_wait(conn, call->fd, way, space, clock);
	if (!clock->moved && !clock->timed)
		clock->signals = self.signals; /* calls that these interrupted were restarted */
	if (clock->brief && waited == -ETIMEDOUT) {
		word_store(conn->brief_fd[way - WAIT_RX], 0);
		clock->brief = false;
		wait_clock_limit(clock, call->fd, way);
		call->blocks = word_load(conn->nonblock); /* A change since the call began does not concern it. */
		waited = 0;
	} else if (!clock->brief && waited == 0) {
		word_store(conn->brief_fd[way - WAIT_RX],
		           !clock->timed && now_ns() - clock->began < BRIEF_NS ? call->fd + 1 : 0);
	}
	if (conn_drop_stale(conn, call->fd))
		return call_elsewhere(call, way);
	if (waited == 0 && conn_stays(conn, &call->fd))
		return TURN_AGAIN;
	if (has || (waited == 0 && way == WAIT_RX && slot_has(conn->slot, SLOT_RD_SHUT | SLOT_FIN | SLOT_RESET)))
		return call_over(call, (ssize_t)has, call->saved);
	return call_over(call, -1, waited == 0 ? EBADF : waited == -ETIMEDOUT ? EAGAIN : -waited);
}

/*
 * The pieces of an iovec array from byte `skip` on, `most` bytes of it. At most 64 pieces are returned, which is a short read
 * or write and allowed.
 */
int iov_from(const struct iovec *iov, int iov_len, size_t skip, size_t most, struct iovec out[64])
{
	int n = 0;

	for (int i = 0; i < iov_len && n < 64 && most; i++) {
		if (skip >= iov[i].iov_len) {
			skip -= iov[i].iov_len;
			continue;
		}
		size_t len = iov[i].iov_len - skip < most ? iov[i].iov_len - skip : most;
		out[n++] = (struct iovec){(uint8_t *)iov[i].iov_base + skip, len};
		most -= len;
		skip = 0;
	}
	return n;
}

/* True if the kernel would refuse it. A bad pointer beyond the first page faults here, where the kernel reports EFAULT. */
bool iov_refused(const struct iovec *iov, int iov_len, int flags)
{
	int error = iov_len < 0 || iov_len > IOV_MAX ? EINVAL : iov_len && (uintptr_t)iov < 4096 ? EFAULT : 0;

	for (int i = 0; i < iov_len && !error; i++) {
		if ((ssize_t)iov[i].iov_len < 0)
			error = EINVAL;
		else if (iov[i].iov_len && (uintptr_t)iov[i].iov_base < 4096 && !(flags & MSG_TRUNC))
			error = EFAULT;
	}
	if (error)
		errno = error;
	return error;
}
