/*
 * shim_steps.c - long calls that send by TCP. One call of the kernel would last until its end, and nothing be promoted meanwhile.
 * The kernel gets a step at a time while the connection may be promoted. Another thread could close the number between two steps,
 * or put another file in its place: a process with threads has the kernel's call.
 */
#include "shim_call.h"
#include "shim_switch.h"

#include <netinet/in.h>
#include <netinet/tcp.h>

#define NUMBER_MS 1000 /* time after which a wait looks if the number is still the connection's */

/* True while sending is by TCP, and may be by ring soon. */
static bool may_be_promoted(int fd)
{
	HELD conn = conn_hold(fd);

	return conn && !slot_has(conn->slot, SLOT_PIN) && !(conn->managed && tx_by_ring(conn->slot));
}

/* The size of the kernel's next call. */
size_t step_size(int fd, size_t left)
{
	return left > TCP_STEP && *one_thread && may_be_promoted(fd) ? TCP_STEP : left;
}

/* The socket's own timeout; -1: none. The number of another file has 0. */
static int64_t send_limit_ms(int fd)
{
	struct timeval limit = {0};

	if (!option_get(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit)))
		return 0;
	const int64_t ms = limit.tv_sec * 1000ll + (limit.tv_usec + 999) / 1000;
	return ms && ms < INT32_MAX ? ms : -1;
}

/*
 * Waits for room after some bytes have gone. True: a signal, or the socket's timeout, ends the call with what it has sent, as it
 * ends the kernel's.
 */
bool step_is_last(int fd, uint64_t signals)
{
	struct pollfd room = {.fd = fd, .events = POLLOUT};

	if (would_not_block(fd, 0))
		return false;
	const int64_t limit_ms = send_limit_ms(fd);
	int ready;
	do
		ready = (conn_get(fd) ? poll : real.poll)(&room, 1, limit_ms >= 0 ? (int)limit_ms : NUMBER_MS);
	while (ready == 0 && limit_ms < 0 && self.signals == signals);
	return self.signals != signals || ready <= 0;
}

/* True if a message is to go by steps: its call may sleep, and no timeout counts for all of it. */
bool sent_by_steps(int fd, size_t n, int flags)
{
	return step_size(fd, n) < n && !(flags & (MSG_DONTWAIT | MSG_OOB | MSG_FASTOPEN | MSG_ZEROCOPY)) &&
	       !would_not_block(fd, flags) && send_limit_ms(fd) < 0;
}

/* True if the connection has failed. The error is the next call's: the kernel leaves it there behind bytes that have gone. */
static bool tcp_failed(int fd)
{
	struct tcp_info info = {0};

	return option_get(fd, IPPROTO_TCP, TCP_INFO, &info, sizeof(info)) && info.tcpi_state == TCP_CLOSE;
}

/*
 * A call that kernel_tx_begin() has let through. What is left once the connection is promoted goes by ring. Only the first step
 * raises SIGPIPE: one behind it fails in the next call.
 */
ssize_t kernel_send_steps(struct conn *conn, int fd, const uint8_t *bytes, size_t n, int flags)
{
	const int saved = errno;
	size_t step = TCP_STEP, done = 0;
	ssize_t sent = KERNEL_TX(conn, fd, real.send(fd, bytes, step, flags));
	const uint64_t signals = self.signals; /* see sendfile64() */

	while (sent == (ssize_t)step && (done += step) < n && !step_is_last(fd, signals)) {
		HELD still = conn_hold(fd);
		const int quiet = flags | MSG_NOSIGNAL;

		sent = 0;
		if (still != conn || tcp_failed(fd))
			break;
		step = step_size(fd, n - done);
		if (kernel_tx_begin(conn))
			sent = KERNEL_TX(conn, fd, real.send(fd, bytes + done, step, quiet));
		else
			sent = conn_send(conn, fd, &(struct iovec){(void *)(bytes + done), step}, 1, quiet);
	}
	if (!done)
		return sent;
	done += sent > 0 && sent != (ssize_t)step ? (size_t)sent : 0;
	errno = saved;
	return (ssize_t)done;
}
