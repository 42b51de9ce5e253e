/* shim_socket.c - the calls of a connection's life: socket, bind, connect, listen, accept, shutdown. */
#include "shim_fd.h"
#include "shim_switch.h"
#include "shim_tcp_wait.h"

#include <netinet/in.h>

EXPORT int socket(int domain, int type, int protocol)
{
	if (unlikely(explicit_wanted(domain, protocol)) && fd_table_len)
		return explicit_socket(domain, type, protocol);
	int fd = fd_new(real.socket(domain, type, protocol));

	if (fd < 0)
		return fd;
	KEEP_ERRNO;
	int kind = type & ~(SOCK_CLOEXEC | SOCK_NONBLOCK);
	if ((domain == AF_INET || domain == AF_INET6) && kind == SOCK_STREAM && fd_table_len && !config.opt_in &&
	    (protocol == 0 || protocol == IPPROTO_TCP))
		noted(conn_new(fd, domain, ROLE_UNKNOWN), type & SOCK_NONBLOCK);
	return fd;
}

/* The unspecified address as well, which connect() takes for it. */
static bool is_loopback(const struct sockaddr *address)
{
	if (address->sa_family == AF_INET) {
		uint32_t addr = ntohl(((const struct sockaddr_in *)address)->sin_addr.s_addr);
		return addr >> 24 == 127 || addr == INADDR_ANY;
	}
	if (address->sa_family == AF_INET6) {
		const struct in6_addr *addr = &((const struct sockaddr_in6 *)address)->sin6_addr;
		return IN6_IS_ADDR_LOOPBACK(addr) || IN6_IS_ADDR_UNSPECIFIED(addr) ||
		       (IN6_IS_ADDR_V4MAPPED(addr) && addr->s6_addr[12] == 127);
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

static int accepted(int listener, int fd, struct sockaddr_storage *from, int flags, const struct explicit *explicit)
{
	struct conn *conn = NULL;
	const struct sockaddr *peer = (const struct sockaddr *)from;

	if (fd < 0)
		return fd;
	KEEP_ERRNO;
	fd_new(fd);
	/* A peer elsewhere: the socket is not tracked, and its calls cost nothing. */
	if (fd_table_len && (peer->sa_family == AF_INET || peer->sa_family == AF_INET6) &&
	    (likely(!config.opt_in) || file_get(listener)) && (same_host(fd, peer) || rpc_reaches_far()))
		conn = conn_new(fd, peer->sa_family, ROLE_PASSIVE);
	noted(conn, flags & SOCK_NONBLOCK);
	if (conn)
		option_inherit(conn, fd);
	if (conn && unlikely(explicit))
		explicit_accepted(explicit, conn, fd);
	/* an address of another host, by way of the provider */
	if (unlikely(address_may_translate(from)) && address_translate(fd, NULL, from) && conn) {
		conn_pin(conn, REASON_BY_SDP);
		conn_set_addresses(conn, fd);
	}
	if (conn)
		rpc_introduce();
	return fd;
}

EXPORT int accept4(int fd, struct sockaddr *address, socklen_t *len, int flags)
{
	struct sockaddr_storage peer = {0};
	socklen_t peer_len = sizeof(peer);
	HELD_EXPLICIT explicit = explicit_hold(fd); /* the number may be closed while we wait */

	if (address && !len)
		return real.accept4(fd, address, len, flags);
	int got = accepted(fd, tcp_wait_accept(fd, (struct sockaddr *)&peer, &peer_len, flags), &peer, flags, explicit);
	if (got >= 0 && address) {
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
 * The kernel's socket has forgotten its peer, whose channel must not carry the next peer's bytes. So the numbers start over, and
 * registrations in sets are the kernel's.
 */
static void start_over(struct conn *conn, struct explicit *explicit)
{
	if (has_members(conn) && !set_conn_dissolved(conn))
		return;
	for (uint32_t fd = 0; fd < atomic_load(&fd_end); fd++) {
		if (conn_get((int)fd) != conn)
			continue;
		fd_forget((int)fd, false);
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
	struct sdp_connect attempt = {0};

	if (unlikely(explicit))
		address = explicit_address(address, len, &copy);
	if (unlikely(conn || explicit) && sdp_connect_wanted(conn, explicit, address, len)) {
		if (sdp_connect_ask(conn, explicit, fd, address, len, &attempt) < 0)
			return -1;
		if (attempt.redirected) {
			int result = sdp_connect_start(conn, fd, &attempt);
			if (result == 0 || attempt.insists || errno == EINPROGRESS || errno == EINTR)
				return result;
			/* the provider has lost it in this very moment: then TCP, as with any other failure */
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
		KEEP_ERRNO;
		slot->role = ROLE_ACTIVE;
		slot_set(slot, SLOT_CONNECTED);
		if (!is_loopback(address) && result == 0 && !same_host(fd, address) && !rpc_reaches_far())
			conn_pin(conn, REASON_REMOTE);
		else
			rpc_introduce();
		if (unlikely(explicit) && explicit->direct)
			conn_set_addresses(conn, fd);
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
			fd_forget(fd, false);
			if (unlikely(explicit))
				explicit_listens(explicit, fd);
			else if (config.opt_in)
				file_put(fd, &listener_file);
		}
	}
	return result;
}

/* Recalled bytes of the peer's have no room yet: the kernel hears of the end behind them. As inet_shutdown(). */
static int shutdown_later(int fd, int how)
{
	if (how == SHUT_RDWR)
		return real.shutdown(fd, SHUT_RD);
	return kernel_closed(fd) ? fail_with(ENOTCONN) : 0;
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
	if (conn_drop_stale(conn, fd))
		return real.shutdown(fd, how);
	if (conn->managed && wr)
		conn_end_sending(conn, fd);
	/*
	 * Announced before it is done: a waiter that the kernel wakes must not take our own end for the peer's. And before
	 * `managed` is read, as conn_attach() stores them the other way round: one of the two publishes shut_wr.
	 */
	uint32_t bits = (wr ? SLOT_WR_SHUT : 0) | (how == SHUT_RD || how == SHUT_RDWR ? SLOT_RD_SHUT : 0);
	uint32_t before = word_load(slot->flags);
	slot_set(slot, bits);
	bool managed = atomic_load(&conn->managed);
	if (managed && (before | bits) & SLOT_WR_SHUT && (before | bits) & SLOT_RD_SHUT)
		conn_refuse(conn); /* the refusal before the FIN, which the peer may answer with more */
	bool owed = false;
	if (managed && wr) {
		slot_lock(&slot->tx_lock);
		owed = conn->managed && tx_is(slot, TX_RESEND);
		if (owed)
			slot_set(slot, SLOT_FIN_OWED);
		else if (conn->managed) /* the word before the kernel's FIN, so that the peer does not take it for a close */
			atomic_store(&conn->channel.local->shut_wr, 1);
	}
	int result = owed ? shutdown_later(fd, how) : real.shutdown(fd, how);
	int saved = errno;
	if (managed && result == 0 && slot_has(slot, SLOT_RESET)) {
		/* a reset that the kernel's socket has not seen: the ring's bytes were left unread (inet_shutdown) */
		result = -1;
		saved = ENOTCONN;
	}
	if (result < 0)
		slot_clear(slot, (bits & ~before) | (owed ? SLOT_FIN_OWED : 0));
	if (managed && wr) {
		if (conn->managed)
			conn_wake_own(conn); /* the kernel wakes its own sleepers; those that wait for room sleep on the doorbell */
		slot_unlock(&slot->tx_lock);
	}
	if (managed)
		set_conn_arm(conn, true); /* every shutdown() is an edge: inet_shutdown */
	errno = saved;
	return result;
}

/* libc's own names for some of these */
ALIAS(__socket, socket);
ALIAS(__connect, connect);
