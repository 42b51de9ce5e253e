/* shim_files.c - files and pipes that the kernel would pass to a connection, and from it: sendfile(2), splice(2). */
#include "shim_call.h"
#include "shim_switch.h"
#include "shim_travel.h"

#include <fcntl.h>
#include <limits.h>
#include <sys/ioctl.h>
#include <sys/sendfile.h>

#define PASS_CHUNK 16384 /* bytes of stack */
#define PASS_LARGE 65536 /* bytes of each buffer that threads take in turns, as their stacks may be small */

static struct {
	atomic_flag taken;
	uint8_t bytes[PASS_LARGE];
} large_buffers[4];

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

/* A file on its way to a ring. The call keeps both files until it returns, though another thread closes their numbers. */
struct passage {
	struct conn *conn; /* counted among its waiters: see close_deferred() */
	int fd, in;
	int own_in; /* the file under a number of ours, or -1 */
	int large; /* index of the large buffer that it has, or -1 */
	bool whole; /* true if what has been read must go out, as it cannot be put back */
	struct wait_clock clock;
};

static struct passage passage_begin(struct conn *conn, int fd, int in, bool whole, size_t count)
{
	struct passage passage = {.conn = conn, .fd = fd, .in = in, .own_in = -1, .large = -1, .whole = whole};

	wait_clock_start(&passage.clock);
	atomic_fetch_add(&conn->waiters, 1);
	if (count > PASS_CHUNK && !*one_thread)
		passage.own_in = own_fd(real.fcntl64(in, F_DUPFD_CLOEXEC, 0));
	if (passage.own_in >= 0)
		passage.in = passage.own_in;
	for (int i = 0;
	     count > PASS_CHUNK && passage.large < 0 && i < (int)(sizeof(large_buffers) / sizeof(*large_buffers)); i++)
		passage.large = atomic_flag_test_and_set(&large_buffers[i].taken) ? -1 : i;
	return passage;
}

static void passage_end(struct passage *passage)
{
	KEEP_ERRNO;

	own_fd_close(passage->own_in);
	if (passage->large >= 0)
		atomic_flag_clear(&large_buffers[passage->large].taken);
	atomic_fetch_sub(&passage->conn->waiters, 1);
}

/* Waits for room after some of the file has gone. False: a signal or the socket's timeout comes first. */
static bool passage_wait(struct passage *passage, size_t len)
{
	struct conn *conn = passage->conn;

	if (!tx_by_ring(conn->slot))
		return !step_is_last(passage->fd, passage->clock.signals) || passage->whole;
	passage->clock.began = now_ns();
	passage->clock.moved = true;
	wait_clock_limit(&passage->clock, passage->fd, WAIT_TX);
	if (passage->whole)
		wait_clock_start(&passage->clock);
	atomic_fetch_add(&conn->waiters, 1); /* conn_wait() takes one out where the thread is cancelled */
	int waited =
		conn_wait(conn, passage->fd, WAIT_TX, len < room_wanted(conn) ? len : room_wanted(conn), &passage->clock);
	atomic_fetch_sub(&conn->waiters, 1);
	return waited == 0 || passage->whole;
}

/* Sends what has been read; how much went out. */
static size_t passage_send(struct passage *passage, const uint8_t *bytes, size_t len, bool first)
{
	size_t sent = 0;

	errno = EBADF;
	while (sent < len && conn_stays(passage->conn, &passage->fd)) {
		const struct iovec left = {(void *)(bytes + sent), len - sent};
		const bool quiet = !first || sent;
		ssize_t n = conn_send(passage->conn, passage->fd, &left, 1, quiet ? MSG_DONTWAIT : 0);
		sent += n > 0 ? (size_t)n : 0;
		if (n < 0 && (errno != EAGAIN || (!passage->whole && (!quiet || would_not_block(passage->fd, 0))) ||
		              !passage_wait(passage, left.iov_len)))
			break;
	}
	return sent;
}

/* sendfile onto a ring: the file is read into a buffer and sent; what was not sent is not consumed. */
static ssize_t file_to_conn(struct conn *conn, int fd, int in, off_t *offset, size_t count)
{
	uint8_t small[PASS_CHUNK];
	size_t done = 0, sent, part;
	const bool nonblock = real.fcntl64(fd, F_GETFL, 0) & O_NONBLOCK;
	off_t own = lseek(in, 0, SEEK_CUR);
	const bool seekable = own >= 0; /* an input that cannot be put back must go out whole */

	if (offset && (*offset < 0 || !seekable))
		return fail_with(*offset < 0 ? EINVAL : ESPIPE);
	if (offset)
		own = *offset;
	__attribute__((cleanup(passage_end))) struct passage passage = passage_begin(conn, fd, in, !seekable, count);
	uint8_t *buf = passage.large < 0 ? small : large_buffers[passage.large].bytes;
	const size_t len = passage.large < 0 ? sizeof(small) : PASS_LARGE;
	do {
		part = count - done < len ? count - done : len;
		ssize_t there = seekable ? real.pread64(passage.in, buf, part, own) : real.read(passage.in, buf, part);
		if (there < 0 && !done)
			return -1;
		if (there <= 0)
			break;
		part = (size_t)there;
		sent = passage_send(&passage, buf, part, !done);
		if (!sent && !done)
			return -1;
		done += sent;
		own += (off_t)sent;
	} while (done < count && sent == part && (seekable || !nonblock));
	if (offset)
		*offset = own;
	else if (seekable)
		lseek(passage.in, own, SEEK_SET);
	return (ssize_t)done;
}

static ssize_t sendfile_step(int out, int in, off_t *offset, size_t count)
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
	return file_to_conn(conn, out, in, offset, count);
}

/* A long file goes to TCP by steps. */
EXPORT ssize_t sendfile64(int out, int in, off_t *offset, size_t count)
{
	const int saved = errno;
	uint64_t signals = 0;
	size_t done = 0, step;
	ssize_t n;

	do {
		if (done && step_is_last(out, signals))
			break;
		step = step_size(out, count - done);
		n = sendfile_step(out, in, offset, step);
		if (!done)
			signals = self.signals; /* a signal before the first byte has restarted the kernel's call */
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
