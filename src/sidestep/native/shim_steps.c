/*
 * shim_steps.c - long calls that send by TCP. One call of the kernel would last until its end, and nothing be promoted
 * meanwhile. So the kernel gets TCP_STEP bytes at a time while the connection may still be promoted.
 */
#include "shim_call.h"
#include "shim_switch.h"

#include <netinet/tcp.h>
#include <poll.h>

/* True while sending is by TCP, and may be by ring soon. */
bool may_be_promoted(int fd)
{
	HELD conn = conn_hold(fd);

	return conn && !slot_has(conn->slot, SLOT_PIN) && !(conn->managed && tx_by_ring(conn->slot));
}

/* The socket's own timeout; -1: none. */
static int limit_ms(int fd)
{
	struct timeval limit = {0};

	option_get(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
	const int64_t ms = limit.tv_sec * 1000ll + (limit.tv_usec + 999) / 1000;
	return ms && ms < INT32_MAX ? (int)ms : -1;
}

/*
 * Waits for room after some bytes have gone. True: a signal, the socket's timeout or an error ends the call with what it has
 * sent, as it ends the kernel's. The error is left to the next call.
 */
bool step_is_last(int fd, uint64_t signals)
{
	struct pollfd room = {.fd = fd, .events = POLLOUT};

	if (would_not_block(fd, 0))
		return false;
	return self.signals != signals || poll(&room, 1, limit_ms(fd)) <= 0 || room.revents & (POLLERR | POLLHUP);
}

/* True if a message is to go by steps. Its call may sleep, and no timeout counts for all of it. */
bool by_steps(int fd, size_t n, int flags)
{
	return n > TCP_STEP && !(flags & (MSG_DONTWAIT | MSG_OOB | MSG_FASTOPEN | MSG_ZEROCOPY)) && may_be_promoted(fd) &&
	       !would_not_block(fd, flags) && limit_ms(fd) < 0;
}

/* The kernel's part of the first step has begun. What is left once the connection is promoted goes by ring. */
ssize_t send_by_steps(struct conn *conn, int fd, const uint8_t *buf, size_t n, int flags)
{
	const int saved = errno;
	const uint64_t signals = self.signals;
	size_t done = 0, step = TCP_STEP;
	ssize_t sent = KERNEL_TX(conn, fd, real.send(fd, buf, step, flags));

	while (sent == (ssize_t)step && (done += step) < n && !step_is_last(fd, signals)) {
		HELD still = conn_hold(fd);
		if (still != conn)
			break;
		const int quiet = flags | MSG_NOSIGNAL;
		step = n - done > TCP_STEP && may_be_promoted(fd) ? TCP_STEP : n - done;
		if (kernel_tx_begin(conn))
			sent = KERNEL_TX(conn, fd, real.send(fd, buf + done, step, quiet));
		else
			sent = conn_send(conn, fd, &(struct iovec){(void *)(buf + done), step}, 1, quiet);
	}
	if (sent >= 0 && sent != (ssize_t)step)
		done += (size_t)sent;
	if (!done)
		return sent;
	if (conn->managed)
		keep_error(conn, sent);
	errno = saved;
	return (ssize_t)done;
}
