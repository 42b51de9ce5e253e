/*
 * shim_io.c - the calls that move bytes. Each finds the connection, or makes the real call.
 *
 * A native connection's call goes to the kernel as it came, counted; a managed one's goes to conn_send or conn_recv.
 */
#include "shim_call.h"
#include "shim_number.h"
#include "shim_switch.h"
#include "shim_tcp_wait.h"
#include "shim_travel.h"

#include <fcntl.h>
#include <limits.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/sendfile.h>
#include <sys/stat.h>

#define FILE_STEP (256 << 10) /* bytes of a file after which a call by TCP looks for its peer */
#define PASS_CHUNK 16384 /* bytes of stack */

#define TRACKED __attribute__((noinline)) /* keeps frames and clean-up out of the common path */

extern void __chk_fail(void) __attribute__((noreturn));

/*
 * A number that is not tracked goes straight to the kernel: a load, a comparison and a jump. All else is in tracked_*().
 */
#define HOOK(result, name, params, args) \
	EXPORT result name params \
	{ \
		return likely(!file_get(fd)) ? real.name args : tracked_##name args; \
	}
/* the functions that the compiler calls if it knows the size of the buffer: `room` */
#define HOOK_CHECKED(name, params, args) \
	EXPORT ssize_t __##name##_chk params \
	{ \
		if (n > room) \
			__chk_fail(); \
		return name args; \
	}

/* ---- receiving ---- */
static TRACKED ssize_t tracked_read(int fd, void *buf, size_t n)
{
	HELD conn = conn_hold(fd);

	if (likely(!conn))
		return real.read(fd, buf, n);
	if (kernel_rx_begin(conn)) {
		ssize_t got = KERNEL_RX(conn, fd, n ? tcp_wait_receive(conn, fd, buf, n) : real.read(fd, buf, n), 0);
		bool other = unlikely(got < 0 && errno == ENOTSOCK) && conn_fd_stale(conn, fd) && conn_drop_stale(conn, fd);
		return other ? real.read(fd, buf, n) : got;
	}
	if (n == 0)
		return 0;
	return conn_recv(conn, fd, &(struct iovec){buf, n}, 1, 0);
}

HOOK(ssize_t, read, (int fd, void *buf, size_t n), (fd, buf, n))
HOOK_CHECKED(read, (int fd, void *buf, size_t n, size_t room), (fd, buf, n))

/* The kernel does not ask the socket then: sock_read_iter(), do_iter_write(). */
static bool moves_nothing(const struct iovec *iov, int len)
{
	if (likely(len > 0 && (uintptr_t)iov >= 4096 && iov->iov_len))
		return false;
	return len >= 0 && len <= IOV_MAX && (!len || (uintptr_t)iov >= 4096) && iov_total(iov, len) == 0;
}

/* Flags of a receive for TCP_WAIT: the kernel's own call of nothing ends otherwise than a wait in front of it. */
static int wait_flags(const struct iovec *iov, int len, int flags)
{
	return unlikely(moves_nothing(iov, len)) ? MSG_DONTWAIT : flags;
}

static TRACKED ssize_t tracked_readv(int fd, const struct iovec *iov, int len)
{
	HELD conn = conn_hold(fd);

	if (likely(!conn))
		return real.readv(fd, iov, len);
	if (kernel_rx_begin(conn))
		return KERNEL_RX(conn, fd, TCP_WAIT(fd, wait_flags(iov, len, 0), real.readv(fd, iov, len)), 0);
	if (unlikely(moves_nothing(iov, len)))
		return 0;
	return conn_recv(conn, fd, iov, len, 0);
}

HOOK(ssize_t, readv, (int fd, const struct iovec *iov, int len), (fd, iov, len))

EXPORT ssize_t preadv2(int fd, const struct iovec *iov, int len, off_t offset, int flags)
{
	HELD conn = conn_hold(fd);

	if (likely(!conn || offset != -1))
		return real.preadv2(fd, iov, len, offset, flags);
	if (kernel_rx_begin(conn))
		return KERNEL_RX(conn, fd,
		                 TCP_WAIT(fd, wait_flags(iov, len, flags & RWF_NOWAIT ? MSG_DONTWAIT : 0),
		                          real.preadv2(fd, iov, len, offset, flags)),
		                 0);
	if (unlikely(moves_nothing(iov, len)))
		return 0;
	return conn_recv(conn, fd, iov, len, flags & RWF_NOWAIT ? MSG_DONTWAIT : 0);
}

ALIAS(preadv64v2, preadv2);

static TRACKED ssize_t tracked_recv(int fd, void *buf, size_t n, int flags)
{
	HELD conn = conn_hold(fd);

	if (likely(!conn))
		return real.recv(fd, buf, n, flags);
	if (kernel_rx_begin(conn))
		return KERNEL_RX(conn, fd,
		                 flags ? TCP_WAIT(fd, n ? flags : MSG_DONTWAIT, real.recv(fd, buf, n, flags))
		                       : tcp_wait_receive(conn, fd, buf, n),
		                 flags);
	return conn_recv(conn, fd, &(struct iovec){buf, n}, 1, flags);
}

HOOK(ssize_t, recv, (int fd, void *buf, size_t n, int flags), (fd, buf, n, flags))
HOOK_CHECKED(recv, (int fd, void *buf, size_t n, size_t room, int flags), (fd, buf, n, flags))

static TRACKED ssize_t tracked_recvfrom(int fd, void *buf, size_t n, int flags, struct sockaddr *address,
                                        socklen_t *len)
{
	HELD conn = conn_hold(fd);

	if (likely(!conn))
		return real.recvfrom(fd, buf, n, flags, address, len);
	if (kernel_rx_begin(conn))
		return KERNEL_RX(conn, fd,
		                 TCP_WAIT(fd, n ? flags : MSG_DONTWAIT, real.recvfrom(fd, buf, n, flags, address, len)), flags);
	ssize_t got = conn_recv(conn, fd, &(struct iovec){buf, n}, 1, flags);
	if (got >= 0 && address && len)
		*len = 0; /* a stream tells no address, as the kernel's TCP does */
	return got;
}

HOOK(ssize_t, recvfrom, (int fd, void *buf, size_t n, int flags, struct sockaddr *address, socklen_t *len),
     (fd, buf, n, flags, address, len))
HOOK_CHECKED(recvfrom, (int fd, void *buf, size_t n, size_t room, int flags, struct sockaddr *address, socklen_t *len),
             (fd, buf, n, flags, address, len))

/* A TCP socket that arrives in a message, and not by its ring, has an unknown history of bytes: it stays untracked, on TCP. */
static TRACKED ssize_t tracked_recvmsg(int fd, struct msghdr *message, int flags)
{
	HELD conn = conn_hold(fd);

	if (likely(!conn || !message))
		return message && fd_table_len ? rights_receive(fd, message, flags) : real.recvmsg(fd, message, flags);
	if (unlikely(flags & MSG_ERRQUEUE))
		return message_errors(conn, fd, message, flags);
	if (kernel_rx_begin(conn))
		return KERNEL_RX(conn, fd,
		                 TCP_WAIT(fd, wait_flags(message->msg_iov, (int)message->msg_iovlen, flags),
		                          real.recvmsg(fd, message, flags)),
		                 flags);
	if (flags & MSG_OOB)
		return real.recvmsg(fd, message, flags);
	if (message->msg_iovlen > IOV_MAX)
		return fail_with(EMSGSIZE);
	struct beside beside = {.control = message->msg_control, .room = message->msg_controllen};
	ssize_t got = conn_recv_beside(conn, fd, message->msg_iov, (int)message->msg_iovlen, flags, &beside);
	if (got >= 0 && beside.len && slot_has(conn->slot, SLOT_PIN)) { /* else it counts TCP's bytes alone */
		message->msg_namelen = 0;
		message->msg_controllen = beside.len;
		message->msg_flags = beside.flags | (flags & MSG_CMSG_CLOEXEC);
	} else if (got >= 0) {
		message_received(conn, fd, message, flags);
	}
	return got;
}

EXPORT ssize_t recvmsg(int fd, struct msghdr *message, int flags)
{
	return likely(!file_get(fd) && !(message && message->msg_control)) ? real.recvmsg(fd, message, flags)
	                                                                   : tracked_recvmsg(fd, message, flags);
}

static TRACKED int tracked_recvmmsg(int fd, struct mmsghdr *messages, unsigned len, int flags, struct timespec *timeout)
{
	HELD conn = conn_hold(fd);
	unsigned done = 0;

	if (likely(!conn && !rights_may_come(fd, messages, len)))
		return real.recvmmsg(fd, messages, len, flags, timeout);
	/* the kernel asks for the socket's error before it looks for data (do_recvmmsg) */
	int error = 0;
	socklen_t error_len = sizeof(error);
	if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &error_len) == 0 && error)
		return fail_with(error);
	int64_t deadline = timeout ? now_ns() + timeout->tv_sec * 1000000000ll + timeout->tv_nsec : INT64_MAX;
	while (done < len && done < 1024) {
		ssize_t got = recvmsg(fd, &messages[done].msg_hdr, flags & ~MSG_WAITFORONE);
		if (got < 0)
			return done ? (int)done : -1;
		messages[done++].msg_len = (unsigned)got;
		if (timeout && now_ns() >= deadline)
			break;
		if (flags & MSG_WAITFORONE)
			flags |= MSG_DONTWAIT;
	}
	return (int)done;
}

EXPORT int recvmmsg(int fd, struct mmsghdr *messages, unsigned len, int flags, struct timespec *timeout)
{
	return tracked_recvmmsg(fd, messages, len, flags, timeout);
}

/*
 * ---- sending ----
 * EBADF while a promoted connection's number is being closed: a byte sent by TCP then would break the stream's order.
 */

static TRACKED ssize_t tracked_write(int fd, const void *buf, size_t n)
{
	HELD conn = conn_hold(fd);

	if (likely(!conn))
		return file_closing(fd) ? fail_with(EBADF) : real.write(fd, buf, n);
	if (kernel_tx_begin(conn))
		return KERNEL_TX(conn, fd, real.write(fd, buf, n));
	return conn_send(conn, fd, &(struct iovec){(void *)buf, n}, 1, 0);
}

HOOK(ssize_t, write, (int fd, const void *buf, size_t n), (fd, buf, n))

static TRACKED ssize_t tracked_writev(int fd, const struct iovec *iov, int len)
{
	HELD conn = conn_hold(fd);

	if (likely(!conn))
		return file_closing(fd) ? fail_with(EBADF) : real.writev(fd, iov, len);
	if (kernel_tx_begin(conn))
		return KERNEL_TX(conn, fd, real.writev(fd, iov, len));
	if (unlikely(moves_nothing(iov, len)))
		return 0;
	return conn_send(conn, fd, iov, len, 0);
}

HOOK(ssize_t, writev, (int fd, const struct iovec *iov, int len), (fd, iov, len))

EXPORT ssize_t pwritev2(int fd, const struct iovec *iov, int len, off_t offset, int flags)
{
	HELD conn = conn_hold(fd);

	if (likely(!conn || offset != -1))
		return file_closing(fd) ? fail_with(EBADF) : real.pwritev2(fd, iov, len, offset, flags);
	if (kernel_tx_begin(conn))
		return KERNEL_TX(conn, fd, real.pwritev2(fd, iov, len, offset, flags));
	if (unlikely(moves_nothing(iov, len)))
		return 0;
	return conn_send(conn, fd, iov, len, flags & RWF_NOWAIT ? MSG_DONTWAIT : 0);
}

ALIAS(pwritev64v2, pwritev2);

/* The kernel alone sends urgent data, and opens a connection by its first bytes. */
static TRACKED void flags_demote(struct conn *conn, int fd, int flags)
{
	const bool urgent = flags & MSG_OOB;

	if (!slot_has(conn->slot, SLOT_PIN))
		option_reason(conn, SOL_TCP, urgent ? 0 : TCP_FASTOPEN_CONNECT);
	conn_demote(conn, fd, urgent ? REASON_URGENT_DATA : REASON_UNUSUAL_OPTION, false);
}

static TRACKED ssize_t tracked_send(int fd, const void *buf, size_t n, int flags)
{
	HELD conn = conn_hold(fd);

	if (likely(!conn))
		return file_closing(fd) ? fail_with(EBADF) : real.send(fd, buf, n, flags);
	if (unlikely(flags & (MSG_OOB | MSG_FASTOPEN)))
		flags_demote(conn, fd, flags);
	if (kernel_tx_begin(conn))
		return KERNEL_TX(conn, fd, zerocopy_counted(conn, flags, real.send(fd, buf, n, flags)));
	return conn_send(conn, fd, &(struct iovec){(void *)buf, n}, 1, flags);
}

HOOK(ssize_t, send, (int fd, const void *buf, size_t n, int flags), (fd, buf, n, flags))

static TRACKED ssize_t tracked_sendto(int fd, const void *buf, size_t n, int flags, const struct sockaddr *address,
                                      socklen_t len)
{
	HELD conn = conn_hold(fd);
	struct sockaddr_storage copy;

	address = explicit_address(address, len, &copy);
	if (likely(!conn))
		return file_closing(fd) ? fail_with(EBADF) : real.sendto(fd, buf, n, flags, address, len);
	if (explicit_bars_fast_open(conn, flags))
		return -1;
	if (unlikely(flags & (MSG_OOB | MSG_FASTOPEN)))
		flags_demote(conn, fd, flags);
	if (kernel_tx_begin(conn))
		return KERNEL_TX(conn, fd, zerocopy_counted(conn, flags, real.sendto(fd, buf, n, flags, address, len)));
	return conn_send(conn, fd, &(struct iovec){(void *)buf, n}, 1, flags);
}

HOOK(ssize_t, sendto, (int fd, const void *buf, size_t n, int flags, const struct sockaddr *address, socklen_t len),
     (fd, buf, n, flags, address, len))

static TRACKED ssize_t tracked_sendmsg(int fd, const struct msghdr *message, int flags)
{
	HELD conn = conn_hold(fd);
	struct sockaddr_storage copy;
	struct msghdr plain;

	if (unlikely(message && message->msg_name && explicit_any)) {
		plain = *message;
		plain.msg_name = (void *)explicit_address(message->msg_name, message->msg_namelen, &copy);
		message = &plain;
	}
	if (likely(!conn || !message)) {
		if (file_closing(fd))
			return fail_with(EBADF);
		return message && message->msg_control ? rights_send(fd, message, flags) : real.sendmsg(fd, message, flags);
	}
	if (explicit_bars_fast_open(conn, flags))
		return -1;
	if (unlikely(flags & (MSG_OOB | MSG_FASTOPEN)))
		flags_demote(conn, fd, flags);
	if (kernel_tx_begin(conn))
		return KERNEL_TX(conn, fd, zerocopy_counted(conn, flags, real.sendmsg(fd, message, flags)));
	if (message->msg_iovlen > IOV_MAX)
		return fail_with(EMSGSIZE);
	return conn_send(conn, fd, message->msg_iov, (int)message->msg_iovlen, flags);
}

EXPORT ssize_t sendmsg(int fd, const struct msghdr *message, int flags)
{
	return likely(!file_get(fd) && !(message && message->msg_control)) ? real.sendmsg(fd, message, flags)
	                                                                   : tracked_sendmsg(fd, message, flags);
}

EXPORT int sendmmsg(int fd, struct mmsghdr *messages, unsigned len, int flags)
{
	HELD conn = conn_hold(fd);
	unsigned done = 0;

	if (likely(!conn && !explicit_named(fd) && !rights_among(messages, len)))
		return real.sendmmsg(fd, messages, len, flags);
	while (done < len && done < 1024) {
		ssize_t sent = sendmsg(fd, &messages[done].msg_hdr, flags);
		if (sent < 0)
			return done ? (int)done : -1;
		messages[done++].msg_len = (unsigned)sent;
		const struct msghdr *header = &messages[done - 1].msg_hdr;
		if ((size_t)sent < iov_total(header->msg_iov, (int)header->msg_iovlen))
			break;
	}
	return (int)done;
}

/* ---- files and pipes ---- */
/* Like kernel_tx_begin(), if the peer has closed. The kernel then takes all at once, and hears of the refusal behind it. */
static bool nobody_begin(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;

	if (conn_notice(conn))
		conn_probe(conn, fd);
	if (likely(!slot_has(slot, SLOT_PEER_GONE)) || slot_has(slot, SLOT_RESET | SLOT_WR_SHUT) ||
	    word_load(slot->error) || tx_request_pending(conn) || !tx_follows(conn))
		return false;
	atomic_fetch_add(&slot->tx_kernel_waiters, 1);
	return true;
}

/* An error that the kernel has reported to the call. */
static ssize_t nobody_end(struct conn *conn, ssize_t n)
{
	if (n < 0 && conn->managed && !conn_relayed(conn))
		error_delivered(conn, errno);
	return n;
}

/*
 * Waits for room after some of the file has gone. True: a signal, or the socket's timeout, ends the call with what it has sent,
 * as it ends the kernel's.
 */
static bool step_is_last(int fd, uint64_t signals)
{
	struct pollfd room = {.fd = fd, .events = POLLOUT};
	struct timeval limit = {0};

	if (would_not_block(fd, 0))
		return false;
	option_get(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
	const int64_t limit_ms = limit.tv_sec * 1000ll + (limit.tv_usec + 999) / 1000;
	return self.signals != signals || poll(&room, 1, limit_ms && limit_ms < INT32_MAX ? (int)limit_ms : -1) <= 0;
}

/* sendfile onto a ring: the file is read into a stack buffer and sent; what was not sent is not consumed. */
static ssize_t file_to_conn(struct conn *conn, int fd, int in, off_t *offset, size_t count, uint64_t signals)
{
	uint8_t buf[PASS_CHUNK];
	size_t done = 0;
	bool nonblock = real.fcntl64(fd, F_GETFL, 0) & O_NONBLOCK;
	off_t own = lseek(in, 0, SEEK_CUR);
	bool seekable = own >= 0;

	if (offset && (*offset < 0 || !seekable))
		return fail_with(*offset < 0 ? EINVAL : ESPIPE);
	if (offset)
		own = *offset;

	while (done < count) {
		size_t part = count - done < sizeof(buf) ? count - done : sizeof(buf);
		ssize_t there = seekable ? real.pread64(in, buf, part, own) : real.read(in, buf, part);
		if (there < 0)
			return done ? (ssize_t)done : -1;
		if (there == 0)
			break;
		/* an input that cannot be put back must go out whole */
		ssize_t sent = 0;
		while (sent < there) {
			const int quiet = done + (size_t)sent ? MSG_DONTWAIT : 0;
			ssize_t n = conn_send(conn, fd, &(struct iovec){buf + sent, (size_t)(there - sent)}, 1, quiet);
			if (n < 0 && errno == EAGAIN && !seekable) {
				struct pollfd room = {.fd = fd, .events = POLLOUT};
				if (poll(&room, 1, -1) >= 0)
					continue;
			} else if (n < 0 && errno == EAGAIN && quiet && !nonblock && !step_is_last(fd, signals)) {
				continue;
			}
			if (n < 0)
				break;
			sent += n;
		}
		done += (size_t)sent;
		own += sent;
		if (sent < there) {
			if (!done)
				return -1;
			break;
		}
		if (nonblock && !seekable)
			break;
	}
	if (offset)
		*offset = own;
	else if (seekable)
		lseek(in, own, SEEK_SET);
	return (ssize_t)done;
}

static ssize_t sendfile_step(int out, int in, off_t *offset, size_t count, uint64_t signals)
{
	HELD conn = conn_hold(out);

	if (likely(!conn))
		return file_closing(out) ? fail_with(EBADF) : real.sendfile64(out, in, offset, count);
	if (kernel_tx_begin(conn))
		return KERNEL_TX(conn, out, real.sendfile64(out, in, offset, count));
	if (unlikely(nobody_begin(conn, out)))
		return nobody_end(conn, KERNEL_TX(conn, out, real.sendfile64(out, in, offset, count)));
	int mode = real.fcntl64(in, F_GETFL, 0);
	if (mode < 0 || (mode & O_ACCMODE) == O_WRONLY || conn_get(in))
		return fail_with(mode >= 0 && conn_get(in) ? EINVAL : EBADF);
	return file_to_conn(conn, out, in, offset, count, signals);
}

/* True while sending is by TCP, and may be by ring soon. */
static bool may_be_promoted(int fd)
{
	HELD conn = conn_hold(fd);

	return conn && !slot_has(conn->slot, SLOT_PIN) && !(conn->managed && tx_by_ring(conn->slot));
}

/* True unless another thread has closed the number meanwhile: what is left is not for the file that has it now. */
static bool still_names(int fd, struct conn *conn)
{
	return !conn || (conn_get(fd) == conn && !conn_fd_stale(conn, fd));
}

/* A long file goes to TCP by steps: one call of the kernel would last until its end, and nothing be promoted meanwhile. */
EXPORT ssize_t sendfile64(int out, int in, off_t *offset, size_t count)
{
	const int saved = errno;
	const uint64_t signals = self.signals;
	size_t done = 0, step;
	ssize_t n;

	HELD conn = conn_hold(out);
	do {
		if (done && (step_is_last(out, signals) || !still_names(out, conn)))
			break;
		step = count - done > FILE_STEP && may_be_promoted(out) ? FILE_STEP : count - done;
		n = sendfile_step(out, in, offset, step, signals);
		done += n > 0 ? (size_t)n : 0;
	} while (n > 0 && (size_t)n == step && done < count);
	if (!done)
		return n;
	errno = saved;
	return (ssize_t)done;
}

ALIAS(sendfile, sendfile64);

/* Writes PIPE_BUF bytes at a time: a pipe that polls writable takes so many without waiting (pipe(7)). Only the first may wait. */
static ssize_t pipe_fill(int out, const uint8_t *bytes, size_t len, bool quiet)
{
	struct pollfd room = {.fd = out, .events = POLLOUT};
	size_t put = 0;

	while (put < len) {
		if ((quiet || put) && real.poll(&room, 1, 0) != 1)
			return put ? (ssize_t)put : fail_with(EAGAIN);
		ssize_t n = real.write(out, bytes + put, len - put < PIPE_BUF ? len - put : PIPE_BUF);
		if (n <= 0)
			return put ? (ssize_t)put : n;
		put += (size_t)n;
	}
	return (ssize_t)put;
}

/*
 * True if an urgent byte is next, which splice(2) neither takes nor passes over: tcp_read_sock() in Linux. *result is what the call
 * returns, with errno. It does not wait.
 */
static bool splice_ends(struct conn *conn, int fd, ssize_t *result)
{
	int marked = 0, error = 0;
	const int saved = errno;

	if (likely(rx_by_ring(conn->slot) &&
	           !conn_peer_back(conn))) /* an urgent byte comes by TCP, behind the ring's last */
		return false;
	if (ioctl(fd, SIOCATMARK, &marked) < 0 || !marked)
		return false;
	option_get(fd, SOL_SOCKET, SO_ERROR, &error, sizeof(error));
	errno = saved;
	*result = 0;
	if (error) {
		error_delivered(conn, error);
		*result = fail_with(error);
		return true;
	}
	if ((real.fcntl64(fd, F_GETFL, 0) & O_NONBLOCK) && !slot_has(conn->slot, SLOT_RD_SHUT) && !kernel_fin(fd))
		*result = fail_with(EAGAIN);
	return true;
}

/* Bytes leave the ring only after the pipe has taken them. An error behind the first of them is for the next call. */
static ssize_t conn_to_pipe(struct conn *conn, int fd, int out, size_t count, unsigned flags)
{
	uint8_t buf[PASS_CHUNK];
	int quiet = flags & SPLICE_F_NONBLOCK ? MSG_DONTWAIT : 0, left = 1;
	size_t done = 0;
	ssize_t put;

	if (splice_ends(conn, fd, &put))
		return put;
	while (done < count && left > 0) {
		size_t part = count - done < sizeof(buf) ? count - done : sizeof(buf);
		ssize_t there = conn_recv(conn, fd, &(struct iovec){buf, part}, 1, quiet | MSG_PEEK);
		put = there <= 0 ? there : pipe_fill(out, buf, (size_t)there, quiet || done);
		if (put <= 0)
			return done ? (ssize_t)done : put;
		conn_recv(conn, fd, &(struct iovec){buf, (size_t)put}, 1, MSG_WAITALL);
		done += (size_t)put;
		if (put < there || ioctl(fd, FIONREAD, &left) < 0)
			break;
	}
	return (ssize_t)done;
}

/* Bytes taken from the pipe must go out, so a call that is not to wait takes no more than has room. */
static ssize_t pipe_part_to_conn(struct conn *conn, int fd, int in, size_t count, bool quiet)
{
	uint8_t buf[PASS_CHUNK];
	size_t part = count < sizeof(buf) ? count : sizeof(buf);
	struct pollfd room = {.fd = fd, .events = POLLOUT};
	int ready = poll(&room, 1, quiet ? 0 : -1);

	if (ready < 0)
		return -1;
	if (quiet && tx_by_ring(conn->slot)) {
		size_t space = ready ? conn_room(conn) : send_put_off(conn);
		if (!ready && !space)
			return fail_with(EAGAIN);
		if (space && space < part)
			part = space;
	} else if (!ready) {
		return fail_with(EAGAIN);
	}
	ssize_t n = real.read(in, buf, part);
	for (ssize_t sent = 0, put; n > 0 && sent < n; sent += put) {
		put = conn_send(conn, fd, &(struct iovec){buf + sent, (size_t)(n - sent)}, 1, 0);
		if (put < 0 && errno == EAGAIN && poll(&room, 1, -1) >= 0)
			put = 0;
		else if (put < 0)
			return sent ? sent : -1;
	}
	return n;
}

/* Sends all that the pipe holds, as there is room. Only the first of it is waited for. */
static ssize_t pipe_to_conn(struct conn *conn, int fd, int in, size_t count, unsigned flags)
{
	struct pollfd there = {.fd = in, .events = POLLIN};
	bool quiet = (flags & SPLICE_F_NONBLOCK) || (real.fcntl64(fd, F_GETFL, 0) & O_NONBLOCK);
	size_t done = 0;

	while (done < count) {
		if (((flags & SPLICE_F_NONBLOCK) || done) && real.poll(&there, 1, 0) == 0) {
			errno = EAGAIN;
			break;
		}
		ssize_t n = pipe_part_to_conn(conn, fd, in, count - done, quiet);
		if (n <= 0)
			return done ? (ssize_t)done : n;
		done += (size_t)n;
	}
	return done ? (ssize_t)done : -1;
}

EXPORT ssize_t splice(int in, off_t *in_offset, int out, off_t *out_offset, size_t count, unsigned flags)
{
	HELD from = conn_hold(in);
	HELD to = conn_hold(out);
	bool kernel_from = from && kernel_rx_begin(from), kernel_to = to && (kernel_tx_begin(to) || nobody_begin(to, out));

	if (likely((!from || kernel_from) && (!to || kernel_to))) {
		ssize_t n = real.splice(in, in_offset, out, out_offset, count, flags);
		if (kernel_from)
			kernel_rx_end(from, in, n, 0);
		if (kernel_to)
			nobody_end(to, kernel_tx_end(to, out, n));
		return n;
	}
	ssize_t n = -1;
	struct stat st;
	if (count == 0) {
		n = 0;
	} else if ((from && in_offset) || (to && out_offset) || fstat(from && !kernel_from ? out : in, &st) < 0 ||
	           !S_ISFIFO(st.st_mode)) {
		errno = EINVAL;
	} else if ((from && out_offset) || (to && in_offset)) {
		errno = ESPIPE;
	} else if (from && !kernel_from) {
		n = conn_to_pipe(from, in, out, count, flags);
	} else {
		n = pipe_to_conn(to, out, in, count, flags);
	}
	int saved = errno;
	if (kernel_from)
		kernel_rx_end(from, in, 0, 0);
	if (kernel_to)
		kernel_tx_end(to, out, 0);
	errno = saved;
	return n;
}

/* libc's own names for some of these; programs and other libraries link to them */
ALIAS(__read, read);
ALIAS(__write, write);
ALIAS(__send, send);
ALIAS(__recv, recv);
ALIAS(__sendmmsg, sendmmsg);
