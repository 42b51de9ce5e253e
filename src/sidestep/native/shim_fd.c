/* shim_fd.c - the calls that make, change, duplicate and end descriptors, and those that make or replace processes. */
#include "shim.h"

#include <aio.h>
#include <alloca.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/close_range.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <limits.h>
#include <string.h>
#include <stdio_ext.h>
#include <sys/ioctl.h>
#include <sys/sendfile.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#ifndef TCP_FASTOPEN_CONNECT
#define TCP_FASTOPEN_CONNECT 30
#endif
#ifndef TCP_REPAIR
#define TCP_REPAIR 19
#endif
#ifndef TCP_ULP
#define TCP_ULP 31
#endif
#ifndef TCP_INQ
#define TCP_INQ 36
#endif
#ifndef TCP_ZEROCOPY_RECEIVE
#define TCP_ZEROCOPY_RECEIVE 35
#endif
#ifndef SO_PEEK_OFF
#define SO_PEEK_OFF 42
#endif
#ifndef SO_ZEROCOPY
#define SO_ZEROCOPY 60
#endif

static bool own(int fd)
{
	struct file *file = file_get(fd);

	return unlikely(file && file->kind == FILE_OWN);
}

static int bad_fd(void)
{
	errno = EBADF;
	return -1;
}

/* What the table holds of a number that the program ends or overwrites. */
static void forget(int fd, bool closing)
{
	struct file *file = file_get(fd);

	if (likely(!file))
		return;
	if (file->kind == FILE_CONN)
		conn_forget(fd, closing);
	else if (file->kind == FILE_SET)
		set_forget(fd);
	else if (file->kind == FILE_EXPLICIT)
		explicit_forget(fd);
	else if (file->kind == FILE_LISTENER)
		file_put(fd, NULL);
	else if (file->kind == FILE_CLOSING && !closing)
		file_closed(fd);
}

/* A new number: an entry left there belongs to a descriptor that was closed where we could not see it. */
static void fresh(int fd)
{
	if (fd >= 0)
		forget(fd, false);
}

static void noted(struct conn *conn, bool nonblock)
{
	if (conn)
		word_store(conn->nonblock, nonblock);
}

EXPORT int socket(int domain, int type, int protocol)
{
	if (unlikely(explicit_wanted(domain, protocol)) && fd_table_len)
		return explicit_socket(domain, type, protocol);
	int fd = real.socket(domain, type, protocol);

	if (fd < 0)
		return fd;
	int saved = errno;
	fresh(fd);
	int kind = type & ~(SOCK_CLOEXEC | SOCK_NONBLOCK);
	if ((domain == AF_INET || domain == AF_INET6) && kind == SOCK_STREAM && fd_table_len && !config.opt_in &&
	    (protocol == 0 || protocol == IPPROTO_TCP))
		noted(conn_new(fd, domain, ROLE_UNKNOWN), type & SOCK_NONBLOCK);
	errno = saved;
	return fd;
}

static bool is_loopback(const struct sockaddr *address)
{
	if (address->sa_family == AF_INET)
		return ((const uint8_t *)&((const struct sockaddr_in *)address)->sin_addr)[0] == 127;
	if (address->sa_family == AF_INET6) {
		const struct in6_addr *addr = &((const struct sockaddr_in6 *)address)->sin6_addr;
		return IN6_IS_ADDR_LOOPBACK(addr) || (IN6_IS_ADDR_V4MAPPED(addr) && addr->s6_addr[12] == 127);
	}
	return false;
}

static bool same_host(int fd, const struct sockaddr *peer)
{
	struct sockaddr_storage mine;
	socklen_t len = sizeof(mine);

	if (is_loopback(peer))
		return true;
	if (real.getsockname(fd, (struct sockaddr *)&mine, &len) < 0 || mine.ss_family != peer->sa_family)
		return false;
	if (peer->sa_family == AF_INET)
		return memcmp(&((const struct sockaddr_in *)peer)->sin_addr, &((struct sockaddr_in *)&mine)->sin_addr, 4) == 0;
	return memcmp(&((const struct sockaddr_in6 *)peer)->sin6_addr, &((struct sockaddr_in6 *)&mine)->sin6_addr, 16) == 0;
}

static bool stamps(int option)
{
	/* asm-generic/socket.h; the last three are the same for 64-bit times */
	enum { TIMESTAMP_NEW = 63, TIMESTAMPNS_NEW = 64, TIMESTAMPING_NEW = 65 };

	return option == SO_TIMESTAMP || option == SO_TIMESTAMPNS || option == SO_TIMESTAMPING || option == TIMESTAMP_NEW ||
	       option == TIMESTAMPNS_NEW || option == TIMESTAMPING_NEW;
}

/* Options that concern us and that accepted sockets have from their listener; asked for once one has been set on any socket. */
static _Atomic bool heritage;
static const struct {
	int level, name;
} heritable[] = {{SOL_SOCKET, SO_RCVLOWAT},
                 {SOL_SOCKET, SO_TIMESTAMP},
                 {SOL_SOCKET, SO_TIMESTAMPNS},
                 {SOL_SOCKET, SO_TIMESTAMPING},
                 {SOL_SOCKET, SO_OOBINLINE},
                 {SOL_SOCKET, SO_PEEK_OFF},
                 {SOL_SOCKET, SO_ZEROCOPY},
                 {IPPROTO_TCP, TCP_INQ}};

static void note_heritable(int level, int name)
{
	bool found = level == SOL_SOCKET && stamps(name);

	for (size_t i = 0; i < sizeof(heritable) / sizeof(*heritable); i++)
		found |= heritable[i].level == level && heritable[i].name == name;
	if (found)
		atomic_store(&heritage, true);
}

static void inherit(struct conn *conn, int fd)
{
	for (size_t i = 0; i < sizeof(heritable) / sizeof(*heritable); i++) {
		int value = 0, name = heritable[i].name;
		socklen_t len = sizeof(value);
		if (real.getsockopt(fd, heritable[i].level, name, &value, &len) < 0)
			continue;
		if (heritable[i].level == SOL_SOCKET && name == SO_RCVLOWAT)
			conn->slot->rx_low_water = value > 0 ? (uint64_t)value : 1;
		else if (heritable[i].level == SOL_SOCKET && name == SO_PEEK_OFF ? value >= 0 : value != 0)
			conn_pin(conn, REASON_UNUSUAL_OPTION);
	}
}

static int accepted(int listener, int fd, struct sockaddr_storage *from, int flags, const struct explicit *explicit)
{
	struct conn *conn = NULL;
	const struct sockaddr *peer = (const struct sockaddr *)from;

	if (fd < 0)
		return fd;
	int saved = errno;
	fresh(fd);
	/* A peer elsewhere: the socket is not tracked, and its calls cost nothing. */
	if (fd_table_len && (peer->sa_family == AF_INET || peer->sa_family == AF_INET6) &&
	    (likely(!config.opt_in) || file_get(listener)) && (same_host(fd, peer) || rpc_reaches_far()))
		conn = conn_new(fd, peer->sa_family, ROLE_PASSIVE);
	noted(conn, flags & SOCK_NONBLOCK);
	if (conn && unlikely(atomic_load_explicit(&heritage, memory_order_relaxed)))
		inherit(conn, fd);
	if (conn && unlikely(explicit))
		explicit_accepted(explicit, conn, fd);
	if (unlikely(names_peer_may_be(from)) && names_show(fd, NULL, from) && conn) { /* of another host, by way of the provider */
		conn_pin(conn, REASON_BY_SDP);
		conn_set_addresses(conn, fd);
	}
	if (conn)
		rpc_introduce();
	errno = saved;
	return fd;
}

EXPORT int accept4(int fd, struct sockaddr *address, socklen_t *len, int flags)
{
	struct sockaddr_storage peer = {0};
	socklen_t peer_len = sizeof(peer);
	HELD_EXPLICIT explicit = explicit_hold(fd); /* the number may be closed while we wait */

	if (!address)
		return accepted(fd, native_accept(fd, (struct sockaddr *)&peer, &peer_len, flags), &peer, flags, explicit);
	if (!len) {
		return real.accept4(fd, address, len, flags);
	}
	int got = accepted(fd, native_accept(fd, (struct sockaddr *)&peer, &peer_len, flags), &peer, flags, explicit);
	if (got >= 0) {
		memcpy(address, &peer, *len < peer_len ? *len : peer_len);
		*len = peer_len;
	}
	return got;
}

EXPORT int accept(int fd, struct sockaddr *address, socklen_t *len)
{
	return accept4(fd, address, len, 0);
}

/*
 * The kernel's socket has forgotten its peer and begins anew; the channel with that peer would serve the next one's bytes.
 * What is in a set keeps its registration there, and stays with it.
 */
static void start_over(struct conn *conn, struct explicit *explicit)
{
	for (uint32_t fd = 0; !has_members(conn) && fd < atomic_load(&fd_end); fd++) {
		if (conn_get((int)fd) != conn)
			continue;
		forget((int)fd, false);
		if (explicit)
			explicit_listens(explicit, (int)fd);
	}
}

EXPORT int bind(int fd, const struct sockaddr *address, socklen_t len)
{
	HELD_EXPLICIT explicit = explicit_hold(fd);

	return likely(!explicit) ? real.bind(fd, address, len) : explicit_bind(explicit, fd, address, len);
}

EXPORT int connect(int fd, const struct sockaddr *address, socklen_t len)
{
	HELD conn = conn_hold(fd);
	HELD_EXPLICIT explicit = explicit_hold(fd);
	struct sockaddr_storage copy;
	struct reach reach = {0};

	if (unlikely(explicit))
		address = explicit_address(address, len, &copy);
	if (unlikely(conn || explicit) && reach_wanted(conn, explicit, address, len)) {
		if (reach_before_connect(conn, explicit, fd, address, len, &reach) < 0)
			return -1;
		if (reach.sent) {
			int result = reach_connect(conn, fd, &reach);
			if (result == 0 || reach.insists || errno == EINPROGRESS || errno == EINTR)
				return result;
			/* the provider has lost it in this very moment: TCP then, as with any other failure */
		}
	}
	if (likely(!conn) || !address || len < sizeof(sa_family_t))
		return real.connect(fd, address, len);
	struct conn_slot *slot = conn->slot;
	bool dissolves = slot_has(slot, SLOT_CONNECTED) && address->sa_family == AF_UNSPEC;
	if (dissolves)
		conn_demote(conn, fd, REASON_UNUSUAL_OPTION, true); /* the socket starts over: its counts do too */
	int result = real.connect(fd, address, len);
	if (dissolves && result == 0 && conn->managed)
		start_over(conn, explicit);
	if ((result == 0 || errno == EINPROGRESS || errno == EINTR) && !slot_has(slot, SLOT_CONNECTED)) {
		int saved = errno;
		slot->role = ROLE_ACTIVE;
		slot_set(slot, SLOT_CONNECTED);
		if (!is_loopback(address) && result == 0 && !same_host(fd, address) && !rpc_reaches_far())
			conn_pin(conn, REASON_REMOTE);
		else
			rpc_introduce();
		if (unlikely(explicit) && explicit->direct)
			conn_set_addresses(conn, fd);
		errno = saved;
	}
	return result;
}

EXPORT int listen(int fd, int backlog)
{
	HELD_EXPLICIT explicit = explicit_hold(fd);

	if (unlikely(explicit) && explicit_before_listen(explicit, fd) < 0)
		return -1;
	int result = real.listen(fd, backlog);

	if (result == 0 && conn_get(fd)) {
		struct conn *conn = conn_get(fd);
		/* A listener carries no bytes. In a set it has a registration, so it stays known there. */
		if (has_members(conn)) {
			conn_pin(conn, REASON_NONE);
		} else {
			forget(fd, false);
			if (unlikely(explicit))
				explicit_listens(explicit, fd);
			else if (config.opt_in)
				file_put(fd, &listener_file);
		}
	}
	return result;
}

EXPORT int shutdown(int fd, int how)
{
	HELD conn = conn_hold(fd);

	if (likely(!conn) || how < SHUT_RD || how > SHUT_RDWR)
		return real.shutdown(fd, how);
	struct conn_slot *slot = conn->slot;
	bool wr = how == SHUT_WR || how == SHUT_RDWR;
	if (conn->managed)
		conn_probe(conn, fd);
	if (conn->managed && wr)
		conn_end_sending(conn, fd);
	/*
	 * Told before it is done: a waiter that the kernel wakes must not take our own end for the peer's. And told before
	 * `managed` is read, as conn_attach() stores them the other way round: one of the two publishes shut_wr.
	 */
	uint32_t bits = (wr ? SLOT_WR_SHUT : 0) | (how == SHUT_RD || how == SHUT_RDWR ? SLOT_RD_SHUT : 0);
	uint32_t before = word_load(slot->flags);
	slot_set(slot, bits);
	bool managed = atomic_load(&conn->managed);
	if (managed && (before | bits) & SLOT_WR_SHUT && (before | bits) & SLOT_RD_SHUT)
		conn_refuse(conn); /* before the FIN, which the peer may answer with more */
	if (managed && wr) {
		slot_lock(&slot->tx_lock);
		if (conn->managed) /* before the kernel's FIN, so that the peer does not take it for a close */
			atomic_store(&conn->channel.local->shut_wr, 1);
	}
	int result = real.shutdown(fd, how);
	int saved = errno;
	if (managed && result == 0 && slot_has(slot, SLOT_RESET)) {
		/* a reset that the kernel's socket has not seen: the ring's bytes were left unread (inet_shutdown) */
		result = -1;
		saved = ENOTCONN;
	}
	if (result < 0)
		slot_clear(slot, bits & ~before);
	if (managed && wr) {
		if (conn->managed)
			conn_wake_own(conn); /* the kernel wakes its own sleepers; those that wait for room sleep on the bell */
		slot_unlock(&slot->tx_lock);
	}
	if (managed)
		set_conn_arm(conn, true); /* every shutdown() is an edge: inet_shutdown */
	errno = saved;
	return result;
}

EXPORT int getsockopt(int fd, int level, int name, void *value, socklen_t *len)
{
	HELD conn = conn_hold(fd);

	if (unlikely(conn && conn->managed && level == SOL_SOCKET && name == SO_ERROR && value && len &&
	             *len >= sizeof(int))) {
		conn_probe(conn, fd);
		int error = (int)atomic_exchange(&conn->slot->error, 0);
		if (error) {
			memcpy(value, &error, sizeof(error));
			*len = sizeof(error);
			return 0;
		}
	}
	if (unlikely(own(fd)))
		return bad_fd();
	return real.getsockopt(fd, level, name, value, len);
}

EXPORT int setsockopt(int fd, int level, int name, const void *value, socklen_t len)
{
	HELD conn = conn_hold(fd);

	note_heritable(level, name);
	if (likely(!conn))
		return own(fd) ? bad_fd() : real.setsockopt(fd, level, name, value, len);
	int result = real.setsockopt(fd, level, name, value, len);
	if (result < 0)
		return result;
	int saved = errno;
	if (level == SOL_SOCKET && name == SO_RCVLOWAT && len >= sizeof(int)) {
		int low;
		memcpy(&low, value, sizeof(low));
		conn->slot->rx_low_water = low > 0 ? (uint64_t)low : 1;
	} else if (level == SOL_SOCKET && (name == SO_PEEK_OFF || name == SO_ZEROCOPY)) {
		conn_demote(conn, fd, REASON_UNUSUAL_OPTION, true);
	} else if ((level == SOL_SOCKET && stamps(name)) || (level == IPPROTO_TCP && name == TCP_INQ)) {
		conn_demote(conn, fd, REASON_UNUSUAL_OPTION, false); /* messages that only the kernel can attach */
	} else if (level == SOL_SOCKET && name == SO_OOBINLINE) {
		conn_demote(conn, fd, REASON_URGENT_DATA, false);
	} else if (level == IPPROTO_TCP && (name == TCP_FASTOPEN_CONNECT)) {
		conn_pin(conn, REASON_FAST_OPEN);
	} else if (level == IPPROTO_TCP && (name == TCP_REPAIR || name == TCP_ZEROCOPY_RECEIVE)) {
		conn_demote(conn, fd, REASON_UNUSUAL_OPTION, true);
	} else if (level == IPPROTO_TCP && name == TCP_ULP) {
		conn_demote(conn, fd, REASON_KERNEL_TLS, true);
	}
	errno = saved;
	return result;
}

EXPORT int ioctl(int fd, unsigned long command, ...)
{
	va_list args;

	va_start(args, command);
	void *argument = va_arg(args, void *);
	va_end(args);
	HELD conn = conn_hold(fd);
	if (likely(!conn))
		return own(fd) ? bad_fd() : real.ioctl(fd, command, argument);
	if (command == FIONBIO || !conn->managed) {
		int done = real.ioctl(fd, command, argument);
		if (done == 0 && command == FIONBIO)
			noted(conn, *(const int *)argument);
		else if (done == 0 && command == FIOASYNC)
			conn_pin(conn, REASON_ASYNC_SIGNAL_IO);
		return done;
	}
	/* a program that only asks moves the switch along, too */
	conn_heed(conn, fd);
	conn_advance(conn, fd);
	int result = real.ioctl(fd, command, argument);
	if (result == 0 && command == FIONREAD && argument) {
		*(int *)argument += (int)conn_ring_unread(conn, (size_t)*(int *)argument);
	} else if (result == 0 && command == SIOCOUTQ && argument && tx_by_ring(conn->slot)) {
		/* Ring bytes are in the peer's buffer, which TCP would have acknowledged; what makes the ring full waits. */
		size_t held = channel_tx_unread(&conn->channel), buffer = conn->channel.tx_size / 4 * 3;
		if (held > buffer)
			*(int *)argument += (int)(held - buffer);
	} else if (result == 0 && command == FIOASYNC) {
		conn_demote(conn, fd, REASON_ASYNC_SIGNAL_IO, true);
	}
	return result;
}

/* A program that asks for all numbers, to see what it has inherited, does not see ours. */
EXPORT int fstat(int fd, struct stat *found)
{
	return own(fd) ? bad_fd() : real.fstat(fd, found);
}

EXPORT int fstat64(int fd, struct stat64 *found)
{
	static_assert(sizeof(struct stat64) == sizeof(struct stat), "on 64-bit machines they are the same");
	return fstat(fd, (struct stat *)found);
}

/* ---- closing ---- */

/*
 * Closes what a number names, and keeps the number: calls on it fail with EBADF, as with a descriptor that is only a path
 * (open(2), O_PATH). So the kernel gives it to nobody as long as our entry says that it is being closed, which would be
 * believed of the file that it names then.
 */
static bool close_in_place(int fd)
{
	static _Atomic int nobody = -1;
	int path = atomic_load(&nobody), none = -1, saved = errno;

	if (unlikely(path < 0)) {
		path = own_fd(arena_path_fd());
		if (!atomic_compare_exchange_strong(&nobody, &none, path)) {
			own_fd_close(path); /* another thread was first */
			path = none;
		}
	}
	bool done = path >= 0 && real.dup3(path, fd, O_CLOEXEC) == fd;
	errno = saved;
	return done;
}

EXPORT int close(int fd)
{
	struct file *file = file_get(fd);

	if (likely(!file))
		return real.close(fd);
	if (file->kind == FILE_OWN)
		return bad_fd(); /* a loop over all numbers must not take the ground from under us */
	forget(fd, true);
	if (file_closing(fd) && !*one_thread && close_in_place(fd)) {
		file_closed(fd);
		return real.close(fd);
	}
	int result = real.close(fd);
	file_closed(fd);
	return result;
}

/* glibc's own name for it; some programs call it */
EXPORT int __close(int fd)
{
	return close(fd);
}

static int range_apply(unsigned first, unsigned last, int flags)
{
	/* around our own descriptors, which the program does not know */
	unsigned start = first;
	int result = 0;

	for (unsigned fd = first; !(flags & CLOSE_RANGE_CLOEXEC) && fd <= last && fd < atomic_load(&fd_end); fd++) {
		struct file *file = file_get((int)fd);
		if (file && file->kind != FILE_OWN)
			forget((int)fd, true);
	}
	unsigned own_low = atomic_load(&own_first);
	for (unsigned fd = first > own_low ? first : own_low; fd <= last && fd < atomic_load(&own_end); fd++) {
		if (!own((int)fd))
			continue;
		if (fd > start && real.close_range(start, fd - 1, flags) < 0)
			result = -1;
		start = fd + 1;
	}
	if (start <= last && real.close_range(start, last, flags) < 0)
		result = -1;
	for (unsigned fd = first; fd <= last && fd < atomic_load(&fd_end); fd++)
		if (file_closing((int)fd))
			file_closed((int)fd);
	return result;
}

EXPORT int close_range(unsigned first, unsigned last, int flags)
{
	if (!fd_table_len || first > last || (flags & ~(CLOSE_RANGE_UNSHARE | CLOSE_RANGE_CLOEXEC)))
		return real.close_range(first, last, flags);
	if (flags & CLOSE_RANGE_UNSHARE) {
		struct stat tasks;
		/* A thread that leaves its siblings' descriptors to them; what is known here stays theirs. Alone it shares none. */
		if (stat("/proc/self/task", &tasks) < 0 || tasks.st_nlink > 3)
			return real.close_range(first, last, flags);
		if (unshare(CLONE_FILES) < 0) /* from a process of vfork() or clone() */
			return -1;
		flags &= ~CLOSE_RANGE_UNSHARE;
	}
	return range_apply(first, last, flags);
}

EXPORT void closefrom(int first)
{
	if (!fd_table_len)
		real.closefrom(first);
	else
		range_apply(first < 0 ? 0 : (unsigned)first, ~0u, 0);
}

/* ---- duplicating ---- */
static void duplicated(int from, int to)
{
	struct file *file = file_get(from);

	if (likely(!file))
		return;
	if (file->kind == FILE_CONN) {
		conn_dup(from, to);
		if (to <= STDERR_FILENO) /* libc's stdin, stdout and stderr read and write inside libc */
			conn_demote((struct conn *)file, from, REASON_STDIO, true);
	} else if (file->kind == FILE_SET) {
		set_dup(from, to);
	} else if (file->kind == FILE_EXPLICIT) {
		explicit_dup(from, to);
	} else if (file->kind == FILE_LISTENER) {
		file_put(to, file);
	}
}

EXPORT int dup(int fd)
{
	if (own(fd))
		return bad_fd();
	int copy = real.dup(fd);
	if (copy >= 0) {
		fresh(copy);
		duplicated(fd, copy);
	}
	return copy;
}

static int dup_onto(int from, int to, int flags, bool three)
{
	if (own(from))
		return bad_fd();
	if (own(to)) { /* ours is remembered by number in too many places to move; programs do not name such high numbers */
		errno = EMFILE;
		return -1;
	}
	struct file *target = file_get(to), *source = file_get(from);
	/* nothing changes for a number that names the connection already; other threads may be using it */
	if (from == to || target == source || (flags & ~O_CLOEXEC))
		return three ? real.dup3(from, to, flags) : real.dup2(from, to);
	if (real.fcntl64(from, F_GETFD, 0) < 0)
		return three ? real.dup3(from, to, flags) : real.dup2(from, to); /* EBADF: `to` must stay as it is */
	forget(to, true);
	int result = three ? real.dup3(from, to, flags) : real.dup2(from, to);
	file_closed(to);
	if (result >= 0)
		duplicated(from, to);
	return result;
}

EXPORT int dup2(int from, int to)
{
	return dup_onto(from, to, 0, false);
}

EXPORT int dup3(int from, int to, int flags)
{
	return dup_onto(from, to, flags, true);
}

EXPORT int fcntl64(int fd, int command, ...)
{
	va_list args;

	va_start(args, command);
	long argument = va_arg(args, long);
	va_end(args);
	struct file *file = file_get(fd);
	if (likely(!file))
		return real.fcntl64(fd, command, argument);
	if (file->kind == FILE_OWN)
		return bad_fd();
	int result = real.fcntl64(fd, command, argument);
	if (result >= 0 && (command == F_DUPFD || command == F_DUPFD_CLOEXEC)) {
		fresh(result);
		duplicated(fd, result);
	} else if (result >= 0 && command == F_SETFL && file->kind == FILE_CONN) {
		noted((struct conn *)file, argument & O_NONBLOCK);
		if (argument & O_ASYNC)
			conn_demote((struct conn *)file, fd, REASON_ASYNC_SIGNAL_IO, true);
	}
	return result;
}

/* one and the same where off_t has 64 bits */
EXPORT int fcntl(int fd, int command, ...) __attribute__((alias("fcntl64")));
EXPORT int __fcntl(int fd, int command, ...) __attribute__((alias("fcntl64")));

/* ---- stdio ---- */

/* libc's streams read and write inside libc, where no shim is. A stream on a socket gets ours instead. */
struct stream {
	FILE *file;
	int fd;
	struct stream *next;
};
static struct stream *streams; /* guarded by shim_lock */

static ssize_t stream_read(void *cookie, char *buf, size_t n)
{
	return read(((struct stream *)cookie)->fd, buf, n);
}

static ssize_t stream_write(void *cookie, const char *buf, size_t n)
{
	size_t done = 0;

	while (done < n) { /* stdio takes a short count for an error */
		ssize_t put = write(((struct stream *)cookie)->fd, buf + done, n - done);
		if (put < 0)
			return done ? (ssize_t)done : 0;
		done += (size_t)put;
	}
	return (ssize_t)done;
}

static int stream_seek(void *cookie, off64_t *offset, int whence)
{
	off64_t at = lseek64(((struct stream *)cookie)->fd, *offset, whence);

	if (at < 0)
		return -1; /* ESPIPE until freopen() puts a file there */
	*offset = at;
	return 0;
}

static int stream_close(void *cookie)
{
	struct stream *stream = cookie, **at = &streams;
	int fd = stream->fd;

	shim_lock_take();
	while (*at != stream)
		at = &(*at)->next;
	*at = stream->next;
	shim_lock_drop();
	free(stream);
	return fd < 0 ? 0 : close(fd);
}

EXPORT FILE *fdopen(int fd, const char *mode)
{
	if (likely(!conn_get(fd)))
		return real.fdopen(fd, mode);
	cookie_io_functions_t io = {
		.read = stream_read, .write = stream_write, .seek = stream_seek, .close = stream_close};
	if (!mode || !strchr("rwa", mode[0]) || !mode[0]) {
		errno = EINVAL;
		return NULL;
	}
	struct stream *stream = calloc(1, sizeof(*stream));
	FILE *file = stream ? fopencookie(stream, mode, io) : NULL;
	if (!file) {
		free(stream);
		return NULL;
	}
	file->_fileno = fd; /* so that fileno() answers */
	stream->fd = fd;
	stream->file = file;
	shim_lock_take();
	stream->next = streams;
	streams = stream;
	shim_lock_drop();
	return file;
}

/* libc's freopen() knows its own kind of stream alone, and crashes with ours. */
static FILE *stream_reopen(struct stream *stream, const char *path, const char *mode)
{
	/* libio.h: what a stream may not do */
	enum { NO_READS = 4, NO_WRITES = 8 };
	FILE *file = stream->file;
	int how = !mode ? -1 : mode[0] == 'r' ? 0 : mode[0] == 'w' ? O_CREAT | O_TRUNC : mode[0] == 'a' ? O_CREAT | O_APPEND : -1;
	bool both = mode && strchr(mode, '+');

	fflush(file);
	__fpurge(file);
	clearerr(file);
	if (stream->fd >= 0)
		close(stream->fd); /* freopen(3): in any case */
	stream->fd = file->_fileno = -1;
	if (how >= 0 && path) {
		how |= both ? O_RDWR : mode[0] == 'r' ? O_RDONLY : O_WRONLY;
		how |= (strchr(mode, 'e') ? O_CLOEXEC : 0) | (strchr(mode, 'x') ? O_EXCL : 0);
		stream->fd = file->_fileno = open(path, how, 0666);
	} else {
		errno = how < 0 ? EINVAL : ENXIO; /* without a path it is opened anew by its number, which a socket cannot be */
	}
	if (stream->fd < 0) {
		int failed = errno;
		fclose(file);
		errno = failed;
		return NULL;
	}
	file->_flags &= ~(NO_READS | NO_WRITES);
	file->_flags |= both ? 0 : mode[0] == 'r' ? NO_WRITES : NO_READS;
	return file;
}

EXPORT FILE *freopen(const char *path, const char *mode, FILE *file)
{
	shim_lock_take();
	struct stream *stream = streams;
	while (stream && stream->file != file)
		stream = stream->next;
	shim_lock_drop();
	return likely(!stream) ? real.freopen(path, mode, file) : stream_reopen(stream, path, mode);
}

EXPORT FILE *freopen64(const char *path, const char *mode, FILE *file)
{
	return freopen(path, mode, file); /* one and the same where off_t has 64 bits */
}

EXPORT int vdprintf(int fd, const char *format, va_list args)
{
	char *text;
	int len = vasprintf(&text, format, args), done = 0;

	while (len >= 0 && done < len) {
		ssize_t put = write(fd, text + done, (size_t)(len - done));
		if (put < 0)
			break;
		done += (int)put;
	}
	if (len >= 0)
		free(text);
	return len < 0 || done < len ? -1 : len;
}

EXPORT int dprintf(int fd, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	int result = vdprintf(fd, format, args);
	va_end(args);
	return result;
}

EXPORT int __vdprintf_chk(int fd, int level, const char *format, va_list args)
{
	(void)level;
	return vdprintf(fd, format, args);
}

EXPORT int __dprintf_chk(int fd, int level, const char *format, ...)
{
	va_list args;

	(void)level;
	va_start(args, format);
	int result = vdprintf(fd, format, args);
	va_end(args);
	return result;
}

/* ---- processes ---- */

/* A vfork child shares our memory: its close() and dup2() would change the parent's table. fork is vfork that does not. */
EXPORT pid_t vfork(void)
{
	return real.fork();
}

EXPORT pid_t __vfork(void)
{
	return vfork();
}

struct cloned {
	int (*run)(void *);
	void *argument;
};

static int cloned_run(void *argument)
{
	struct cloned cloned = *(struct cloned *)argument; /* on the parent's stack, of which the child has a copy */

	fork_child();
	return cloned.run(cloned.argument);
}

EXPORT int clone(int (*run)(void *), void *stack, int flags, void *argument, ...)
{
	va_list args;
	void *extra[3];

	va_start(args, argument);
	for (int i = 0; i < 3; i++)
		extra[i] = va_arg(args, void *);
	va_end(args);
	if ((flags & CLONE_VFORK) && !(flags & CLONE_THREAD))
		flags &= ~CLONE_VM; /* as vfork() */
	if (!fd_table_len || (flags & CLONE_VM) || !run)
		return real.clone(run, stack, flags, argument, extra[0], extra[1], extra[2]);
	struct cloned cloned = {run, argument};
	fork_prepare();
	int child = real.clone(cloned_run, stack, flags, &cloned, extra[0], extra[1], extra[2]);
	fork_parent();
	return child;
}

static long raw_clone(long number, const long a[6], uint64_t flags)
{
	if (!fd_table_len || (flags & CLONE_VM))
		return real.syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
	fork_prepare();
	long child = real.syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
	if (child == 0)
		fork_child();
	else
		fork_parent();
	return child;
}

/* libc's own leaves the parent by an _exit() that nobody sees, as if it still held every connection. */
EXPORT int daemon(int keep_directory, int keep_stdio)
{
	pid_t child = fork();

	if (child < 0)
		return -1;
	if (child > 0)
		_exit(0);
	if (setsid() < 0)
		return -1;
	if (!keep_directory && chdir("/") < 0)
		return -1;
	if (keep_stdio)
		return 0;
	int null = open("/dev/null", O_RDWR);
	if (null < 0)
		return -1;
	for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
		dup2(null, fd);
	if (null > STDERR_FILENO)
		close(null);
	return 0;
}

EXPORT pid_t _Fork(void)
{
	return real.fork(); /* with the handlers that keep the shim's own state right */
}

EXPORT void _exit(int status)
{
	if (fd_table_len && shim_pid == (uint32_t)getpid())
		conn_family_exit();
	real._exit(status);
}

EXPORT void _Exit(int status)
{
	_exit(status);
}

/* A program that starts anew knows nothing of channels: what it inherits goes back to TCP first. */
static void hold_on_exec(int change)
{
	for (uint32_t fd = 0; fd < atomic_load(&fd_end); fd++) {
		struct conn *conn = conn_get((int)fd);
		if (!conn || conn_fd(conn) != (int)fd || !(real.fcntl64((int)fd, F_GETFD, 0) & FD_CLOEXEC))
			continue;
		atomic_fetch_add(&conn->slot->holders, (uint32_t)change);
		holder_put(conn->slot, change < 0 ? shim_pid : 0, change < 0 ? 0 : shim_pid);
	}
}

static void demote_inherited(bool leaving)
{
	rpc_before_exec();
	for (uint32_t fd = 0; fd < atomic_load(&fd_end); fd++) {
		struct conn *conn = conn_get((int)fd);
		if (conn && conn->managed && !(real.fcntl64((int)fd, F_GETFD, 0) & FD_CLOEXEC)) {
			conn_demote(conn, (int)fd, REASON_PASSED, true);
			if (leaving && conn_alone(conn))
				conn_abandon(conn, (int)fd);
		} else if (conn && !(real.fcntl64((int)fd, F_GETFD, 0) & FD_CLOEXEC))
			conn_pin(conn, REASON_PASSED);
	}
}

static bool executable(const char *path)
{
	int saved = errno;
	bool found = path && access(path, X_OK) == 0;

	errno = saved;
	return found;
}

/* Whether execvp() will find it: a directory of PATH holds it. */
static bool executable_by_name(const char *file)
{
	const char *at = getenv("PATH");
	char path[PATH_MAX];

	if (!file || strchr(file, '/'))
		return executable(file);
	for (; at && *at; at += *at == ':') {
		size_t len = strcspn(at, ":");
		if (len && snprintf(path, sizeof(path), "%.*s/%s", (int)len, at, file) < (int)sizeof(path) && executable(path))
			return true;
		at += len;
	}
	return false;
}

EXPORT int execve(const char *path, char *const argv[], char *const env[])
{
	demote_inherited(executable(path));
	hold_on_exec(-1); /* the kernel closes them */
	int result = real.execve(path, argv, env);
	hold_on_exec(1);
	return result;
}

EXPORT int execvpe(const char *file, char *const argv[], char *const env[])
{
	demote_inherited(executable_by_name(file));
	hold_on_exec(-1); /* the kernel closes them */
	int result = real.execvpe(file, argv, env);
	hold_on_exec(1);
	return result;
}

EXPORT int execveat(int dir, const char *path, char *const argv[], char *const env[], int flags)
{
	demote_inherited(false);
	hold_on_exec(-1); /* the kernel closes them */
	int result = real.execveat(dir, path, argv, env, flags);
	hold_on_exec(1);
	return result;
}

EXPORT int execv(const char *path, char *const argv[])
{
	return execve(path, argv, environ);
}

EXPORT int execvp(const char *file, char *const argv[])
{
	return execvpe(file, argv, environ);
}

EXPORT int fexecve(int fd, char *const argv[], char *const env[])
{
	demote_inherited(false);
	hold_on_exec(-1); /* the kernel closes them */
	int result = real.fexecve(fd, argv, env);
	hold_on_exec(1);
	return result;
}

/* The l forms: libc's own would call its internal execve. */
#define COLLECT(list, first, last, argv) \
	size_t count = 1; \
	va_start(list, first); \
	while (va_arg(list, char *)) \
		count++; \
	va_end(list); \
	char **argv = alloca((count + 1) * sizeof(char *)); \
	va_start(list, first); \
	argv[0] = (char *)first; \
	for (size_t i = 1; i <= count; i++) \
		argv[i] = va_arg(list, char *); \
	last; \
	va_end(list)

EXPORT int execl(const char *path, const char *first, ...)
{
	va_list list;

	COLLECT(list, first, (void)0, argv);
	return execve(path, argv, environ);
}

EXPORT int execlp(const char *file, const char *first, ...)
{
	va_list list;

	COLLECT(list, first, (void)0, argv);
	return execvpe(file, argv, environ);
}

EXPORT int execle(const char *path, const char *first, ...)
{
	va_list list;
	char *const *env;

	COLLECT(list, first, env = va_arg(list, char *const *), argv);
	return execve(path, argv, env);
}

/* posix_spawn makes its child inside libc; a socket without FD_CLOEXEC, or named by an action, is inherited by it. */
EXPORT int posix_spawn_file_actions_adddup2(posix_spawn_file_actions_t *actions, int fd, int to)
{
	struct conn *conn = conn_get(fd);

	if (conn)
		conn_demote(conn, fd, REASON_PASSED, true);
	return real.posix_spawn_file_actions_adddup2(actions, fd, to);
}

EXPORT int posix_spawn(pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions,
                       const posix_spawnattr_t *attributes, char *const argv[], char *const env[])
{
	demote_inherited(false);
	return real.posix_spawn(pid, path, actions, attributes, argv, env);
}

EXPORT int posix_spawnp(pid_t *pid, const char *file, const posix_spawn_file_actions_t *actions,
                        const posix_spawnattr_t *attributes, char *const argv[], char *const env[])
{
	demote_inherited(false);
	return real.posix_spawnp(pid, file, actions, attributes, argv, env);
}

EXPORT int system(const char *command)
{
	if (command)
		demote_inherited(false);
	return real.system(command);
}

EXPORT FILE *popen(const char *command, const char *mode)
{
	demote_inherited(false);
	return real.popen(command, mode);
}

/* Before root drops its rights: the provider must know us by the user who started us. */
EXPORT int setuid(uid_t uid)
{
	if (fd_table_len)
		rpc_ensure();
	return real.setuid(uid);
}

EXPORT int seteuid(uid_t uid)
{
	if (fd_table_len)
		rpc_ensure();
	return real.seteuid(uid);
}

EXPORT int setreuid(uid_t ruid, uid_t euid)
{
	if (fd_table_len)
		rpc_ensure();
	return real.setreuid(ruid, euid);
}

EXPORT int setresuid(uid_t ruid, uid_t euid, uid_t suid)
{
	if (fd_table_len)
		rpc_ensure();
	return real.setresuid(ruid, euid, suid);
}

/* ---- raw system calls ---- */
EXPORT long syscall(long number, ...)
{
	va_list args;
	long a[6];

	va_start(args, number);
	for (int i = 0; i < 6; i++)
		a[i] = va_arg(args, long);
	va_end(args);
	switch (number) {
	case SYS_io_uring_setup:
		/* libuv batches epoll_ctl through io_uring, past every hook: it uses epoll_ctl when there is none */
		if (fd_table_len) {
			errno = ENOSYS;
			return -1;
		}
		break;
	case SYS_read: return read((int)a[0], (void *)a[1], (size_t)a[2]);
	case SYS_write: return write((int)a[0], (const void *)a[1], (size_t)a[2]);
	case SYS_readv: return readv((int)a[0], (const struct iovec *)a[1], (int)a[2]);
	case SYS_writev: return writev((int)a[0], (const struct iovec *)a[1], (int)a[2]);
	case SYS_recvfrom:
		return recvfrom((int)a[0], (void *)a[1], (size_t)a[2], (int)a[3], (struct sockaddr *)a[4], (socklen_t *)a[5]);
	case SYS_sendto:
		return sendto((int)a[0], (const void *)a[1], (size_t)a[2], (int)a[3], (const struct sockaddr *)a[4],
		              (socklen_t)a[5]);
	case SYS_recvmsg: return recvmsg((int)a[0], (struct msghdr *)a[1], (int)a[2]);
	case SYS_sendmsg: return sendmsg((int)a[0], (const struct msghdr *)a[1], (int)a[2]);
	case SYS_close: return close((int)a[0]);
	case SYS_close_range: return close_range((unsigned)a[0], (unsigned)a[1], (int)a[2]);
	case SYS_dup: return dup((int)a[0]);
	case SYS_dup3: return dup3((int)a[0], (int)a[1], (int)a[2]);
	case SYS_fcntl: return fcntl((int)a[0], (int)a[1], a[2]);
	case SYS_shutdown: return shutdown((int)a[0], (int)a[1]);
	case SYS_accept4: return accept4((int)a[0], (struct sockaddr *)a[1], (socklen_t *)a[2], (int)a[3]);
	case SYS_epoll_ctl: return epoll_ctl((int)a[0], (int)a[1], (int)a[2], (struct epoll_event *)a[3]);
	case SYS_epoll_pwait:
		return epoll_pwait((int)a[0], (struct epoll_event *)a[1], (int)a[2], (int)a[3], (const sigset_t *)a[4]);
	case SYS_epoll_pwait2:
		return epoll_pwait2((int)a[0], (struct epoll_event *)a[1], (int)a[2], (const struct timespec *)a[3],
		                    (const sigset_t *)a[4]);
	case SYS_ppoll:
		return ppoll((struct pollfd *)a[0], (nfds_t)a[1], (const struct timespec *)a[2], (const sigset_t *)a[3]);
	case SYS_sendmmsg: return sendmmsg((int)a[0], (struct mmsghdr *)a[1], (unsigned)a[2], (int)a[3]);
	case SYS_recvmmsg:
		return recvmmsg((int)a[0], (struct mmsghdr *)a[1], (unsigned)a[2], (int)a[3], (struct timespec *)a[4]);
	case SYS_sendfile: return sendfile((int)a[0], (int)a[1], (off_t *)a[2], (size_t)a[3]);
	case SYS_splice:
		return splice((int)a[0], (off_t *)a[1], (int)a[2], (off_t *)a[3], (size_t)a[4], (unsigned)a[5]);
	case SYS_accept: return accept((int)a[0], (struct sockaddr *)a[1], (socklen_t *)a[2]);
	case SYS_getsockopt: return getsockopt((int)a[0], (int)a[1], (int)a[2], (void *)a[3], (socklen_t *)a[4]);
	case SYS_setsockopt: return setsockopt((int)a[0], (int)a[1], (int)a[2], (const void *)a[3], (socklen_t)a[4]);
	case SYS_ioctl: return ioctl((int)a[0], (unsigned long)a[1], (void *)a[2]);
	case SYS_clone: return raw_clone(number, a, (uint64_t)a[0]);
#ifdef SYS_clone3
	case SYS_clone3: return raw_clone(number, a, a[0] ? *(const uint64_t *)a[0] : 0); /* struct clone_args: flags first */
#endif
#ifdef SYS_fork
	case SYS_fork: return fork();
	case SYS_vfork: return vfork();
#endif
	case SYS_exit_group: _exit((int)a[0]);
	case SYS_execve: return execve((const char *)a[0], (char *const *)a[1], (char *const *)a[2]);
#ifdef SYS_poll
	case SYS_poll: return poll((struct pollfd *)a[0], (nfds_t)a[1], (int)a[2]);
	case SYS_select:
		return select((int)a[0], (fd_set *)a[1], (fd_set *)a[2], (fd_set *)a[3], (struct timeval *)a[4]);
	case SYS_epoll_wait: return epoll_wait((int)a[0], (struct epoll_event *)a[1], (int)a[2], (int)a[3]);
	case SYS_dup2: return dup2((int)a[0], (int)a[1]);
#endif
	case SYS_epoll_create1: return epoll_create1((int)a[0]);
	case SYS_socket: return socket((int)a[0], (int)a[1], (int)a[2]);
	case SYS_connect: return connect((int)a[0], (const struct sockaddr *)a[1], (socklen_t)a[2]);
	case SYS_bind: return bind((int)a[0], (const struct sockaddr *)a[1], (socklen_t)a[2]);
	case SYS_getpeername: return getpeername((int)a[0], (struct sockaddr *)a[1], (socklen_t *)a[2]);
	case SYS_getsockname: return getsockname((int)a[0], (struct sockaddr *)a[1], (socklen_t *)a[2]);
	case SYS_listen: return listen((int)a[0], (int)a[1]);
	}
	return real.syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

/*
 * ---- io_uring ----
 * Its calls do not come by here: a read of a promoted socket would wait for ever, what was written would break it. Who has
 * a ring stays on TCP. liburing makes the system call itself; where it was loaded late it is in no scope that we can ask.
 */
_Atomic bool has_io_uring;

static void *uring_find(const char *name)
{
	void *found = dlsym(real_scope(), name);

	for (int version = 1; !found && version <= 2; version++) {
		void *library = dlopen(version == 1 ? "liburing.so.1" : "liburing.so.2", RTLD_LAZY | RTLD_NOLOAD);
		if (library) {
			found = dlsym(library, name);
			dlclose(library);
		}
	}
	return found;
}

static int uring_made(int result)
{
	if (result < 0 || atomic_exchange(&has_io_uring, true))
		return result;
	for (uint32_t fd = 0; fd < atomic_load(&fd_end); fd++) {
		HELD conn = conn_hold((int)fd);
		if (conn)
			conn_demote(conn, (int)fd, REASON_IO_URING, true);
	}
	return result;
}

#define URING(name, params, args) \
	EXPORT int name params; \
	EXPORT int name params \
	{ \
		int(*found) params = (int(*) params)uring_find(#name); \
		return found ? uring_made(found args) : -ENOSYS; \
	}
URING(io_uring_setup, (unsigned n, void *setup), (n, setup))
URING(io_uring_queue_init, (unsigned n, void *ring, unsigned flags), (n, ring, flags))
URING(io_uring_queue_init_params, (unsigned n, void *ring, void *setup), (n, ring, setup))
URING(io_uring_queue_init_mem, (unsigned n, void *ring, void *setup, void *memory, size_t len),
      (n, ring, setup, memory, len))

/* ---- asynchronous I/O: libc's threads make the calls inside libc ---- */
static void aio_demote(const struct aiocb *block)
{
	HELD conn = block ? conn_hold(block->aio_fildes) : NULL;

	if (conn)
		conn_demote(conn, block->aio_fildes, REASON_ASYNC_SIGNAL_IO, true);
}

EXPORT int aio_read(struct aiocb *block)
{
	aio_demote(block);
	return real.aio_read(block);
}

EXPORT int aio_write(struct aiocb *block)
{
	aio_demote(block);
	return real.aio_write(block);
}

EXPORT int lio_listio(int mode, struct aiocb *const list[], int len, struct sigevent *event)
{
	for (int i = 0; i < len; i++)
		aio_demote(list[i]);
	return real.lio_listio(mode, list, len, event);
}

/* the 64 names: one and the same where off_t has 64 bits */
EXPORT int aio_read64(struct aiocb64 *block)
{
	return aio_read((struct aiocb *)block);
}

EXPORT int aio_write64(struct aiocb64 *block)
{
	return aio_write((struct aiocb *)block);
}

EXPORT int lio_listio64(int mode, struct aiocb64 *const list[], int len, struct sigevent *event)
{
	return lio_listio(mode, (struct aiocb *const *)list, len, event);
}

/* libc's own names for some of these */
EXPORT int __socket(int domain, int type, int protocol)
{
	return socket(domain, type, protocol);
}

EXPORT FILE *_IO_fdopen(int fd, const char *mode)
{
	return fdopen(fd, mode);
}

EXPORT FILE *_IO_popen(const char *command, const char *mode)
{
	return popen(command, mode);
}

EXPORT int __connect(int fd, const struct sockaddr *address, socklen_t len)
{
	return connect(fd, address, len);
}

EXPORT int __dup2(int from, int to)
{
	return dup2(from, to);
}
