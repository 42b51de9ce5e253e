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
		return unlikely(n > TCP_STEP) && sent_by_steps(fd, n, 0) ? kernel_send_steps(conn, fd, buf, n, 0)
		                                                         : KERNEL_TX(conn, fd, real.write(fd, buf, n));
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
		return unlikely(n > TCP_STEP) && sent_by_steps(fd, n, flags)
		           ? kernel_send_steps(conn, fd, buf, n, flags)
		           : KERNEL_TX(conn, fd, zerocopy_counted(conn, flags, real.send(fd, buf, n, flags)));
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

/* libc's own names for some of these; programs and other libraries link to them */
ALIAS(__read, read);
ALIAS(__write, write);
ALIAS(__send, send);
ALIAS(__recv, recv);
ALIAS(__sendmmsg, sendmmsg);
