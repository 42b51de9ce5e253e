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

/* Waits for what the call needs, as long as the socket's timeout lets it. */
enum turn call_wait(struct call *call, int way, size_t space)
{
	struct conn *conn = call->conn;
	struct timeval limit = {0};

	if (!call->started) {
		option_get(call->fd, SOL_SOCKET, way == WAIT_RX ? SO_RCVTIMEO : SO_SNDTIMEO, &limit, sizeof(limit));
		call->timed = limit.tv_sec || limit.tv_usec;
		wait_clock_start(&call->clock,
		                 call->timed ? timespec_ns(&(struct timespec){limit.tv_sec, limit.tv_usec * 1000}) : -1);
		atomic_fetch_add(&conn->waiters, 1);
		call->started = true;
	}
	int waited = conn_wait(conn, call->fd, way, space, &call->clock, call->timed);
	if (conn_drop_stale(conn, call->fd))
		return call_elsewhere(call, way);
	if (waited == 0 && conn_stays(conn, &call->fd))
		return TURN_AGAIN;
	if (call->done || (waited == 0 && way == WAIT_RX && slot_has(conn->slot, SLOT_RD_SHUT | SLOT_FIN | SLOT_RESET)))
		return call_over(call, (ssize_t)call->done, call->saved);
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
