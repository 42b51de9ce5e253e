/*
 * shim_sdp_connect.c - connections that begin with an offload protocol, and the true addresses of their ends.
 *
 * The descriptor is TCP's socket, as ever. Before it connects, the provider is asked. It opens the connection with the other
 * host, and names a place on this host where it accepts the socket. If it has no verdict yet and the program insists on the
 * protocol, that place drops SYNs. The kernel goes on trying, and every call sees a socket that connects, until the provider
 * opens the place or resets. The wait of the call itself is bounded, and short if it must not block.
 *
 * For such a connection, and for one that the provider has brought to a listener, the kernel names 127.83.68.80 as the other
 * end. With IPv6 it names the socket's own address. A call that sees this shows the socket to the provider, and reports the
 * true addresses. Nothing is kept here, so it is the same after fork(), exec(), and in a process that was passed the socket.
 */
#include "shim.h"
#include "shim_address.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/time.h>

#define SDP_CONNECT_WAIT_MS 1200 /* wait for a verdict: longer than a silent port mapper takes to be known as such */
#define SDP_CONNECT_WAIT_NONBLOCK_MS 200 /* wait of a nonblocking socket; a handshake takes a few milliseconds */
#define SDP_CONNECT_SYNS 3       /* retransmissions, some 15 s: the provider gives up after REACH_S of limits.py */
#define FIRST_WAIT_NS 1000000    /* the least SO_SNDTIMEO: 0 would be none */

/* ---- names ---- */

/* Copies the address out as the kernel does. */
static void copy_address(struct sockaddr *address, socklen_t room, const struct sockaddr_storage *name)
{
	socklen_t len = name->ss_family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);

	memcpy(address, name, room < len ? room : len);
}

/* A quick look at the kernel's address, which spares most sockets the full question. */
static bool worth_a_look(const struct sockaddr *address, socklen_t room, bool own)
{
	uint8_t addr[16];
	uint16_t port;

	if (room < sizeof(struct sockaddr_in)) /* cut short: perhaps */
		return room >= sizeof(sa_family_t) && (address->sa_family == AF_INET || address->sa_family == AF_INET6);
	if (address->sa_family == AF_INET6 && room < sizeof(struct sockaddr_in6))
		return true;
	if (!address_split(address, room, addr, &port) || !port)
		return false;
	if (address_mapped(addr)) /* the end that the program has may be any loopback address */
		return own ? addr[12] == 127 : address_translated(addr);
	return !address_near(addr);
}

bool address_may_translate(const struct sockaddr_storage *remote)
{
	return worth_a_look((const struct sockaddr *)remote, sizeof(*remote), false);
}

EXPORT int getpeername(int fd, struct sockaddr *restrict address, socklen_t *restrict len)
{
	struct sockaddr_storage name;
	socklen_t room = len ? *len : 0;
	int result = real.getpeername(fd, address, len);

	if (unlikely(result == 0 && worth_a_look(address, room < *len ? room : *len, false)) &&
	    address_translate(fd, NULL, &name))
		copy_address(address, room, &name);
	return result;
}

EXPORT int getsockname(int fd, struct sockaddr *restrict address, socklen_t *restrict len)
{
	struct sockaddr_storage name;
	socklen_t room = len ? *len : 0;
	int result = real.getsockname(fd, address, len);

	if (unlikely(result == 0 && worth_a_look(address, room < *len ? room : *len, true)) &&
	    address_translate(fd, &name, NULL))
		copy_address(address, room, &name);
	return result;
}

/* ---- connecting ---- */
bool sdp_connect_wanted(const struct conn *conn, const struct explicit *explicit, const struct sockaddr *address,
                        socklen_t len)
{
	uint8_t addr[16];
	uint16_t port;

	if (unlikely(explicit))
		return !explicit->direct && explicit->stream && address && len >= sizeof(sa_family_t);
	return conn && address && len >= sizeof(sa_family_t) && address_split(address, len, addr, &port) &&
	       !address_near(addr) && rpc_asks_connect();
}

/* True if connect() begins a connection; else the kernel returns its error. */
static bool begins(const struct conn *conn, int fd)
{
	uint8_t state = TCP_CLOSE; /* first in struct tcp_info */
	struct sockaddr_storage local;
	socklen_t local_len = sizeof(local);
	uint8_t addr[16];
	uint16_t port;

	if (conn && !slot_has(conn->slot, SLOT_CONNECTED))
		return true;
	if (!option_get(fd, IPPROTO_TCP, TCP_INFO, &state, sizeof(state)) || state != TCP_CLOSE)
		return false;
	/* A failed attempt that connect() has not reported yet still has its local address. */
	return real.getsockname(fd, (struct sockaddr *)&local, &local_len) == 0 &&
	       address_split((struct sockaddr *)&local, local_len, addr, &port) &&
	       (!address_near(addr) || address_unspecified(addr));
}

/* Bound to an interface from which the provider cannot be reached, or connecting with the first data only. */
static bool unfit(int fd)
{
	char interface[16] = "";
	int fast_open = 0;
	socklen_t len = sizeof(interface);

	return (real.getsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, interface, &len) == 0 && len && *interface) ||
	       (option_get(fd, IPPROTO_TCP, TCP_FASTOPEN_CONNECT, &fast_open, sizeof(fast_open)) && fast_open);
}

/* Binds a port before the connect, so that both hosts know the connection by the same one. */
static bool bind_first(int fd, struct rpc_msg *record)
{
	struct sockaddr_storage local;
	socklen_t len = sizeof(local);
	int later = 0, none = 0;

	if (real.getsockname(fd, (struct sockaddr *)&local, &len) < 0 ||
	    !address_split((struct sockaddr *)&local, len, record->local_addr, &record->local_port))
		return false;
	if (record->local_port)
		return true;
	option_get(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &later, sizeof(later));
	if (later)
		real.setsockopt(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &none, sizeof(none));
	bool bound = real.bind(fd, (struct sockaddr *)&local, len) == 0;
	if (later)
		real.setsockopt(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &later, sizeof(later));
	len = sizeof(local);
	return bound && real.getsockname(fd, (struct sockaddr *)&local, &len) == 0 &&
	       address_split((struct sockaddr *)&local, len, record->local_addr, &record->local_port);
}

static uint32_t wait_ms(int fd, struct sdp_connect *attempt)
{
	struct timeval limit = {0};

	if (real.fcntl64(fd, F_GETFL, 0) & O_NONBLOCK)
		return SDP_CONNECT_WAIT_NONBLOCK_MS;
	if (option_get(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit)) && limit.tv_sec < SDP_CONNECT_WAIT_MS)
		attempt->timeout_ns = limit.tv_sec * 1000000000ll + limit.tv_usec * 1000;
	if (!attempt->timeout_ns)
		return SDP_CONNECT_WAIT_MS;
	int64_t ms = attempt->timeout_ns / (attempt->insists ? 1000000 : 2000000); /* TCP needs time as well */
	return ms < SDP_CONNECT_WAIT_MS ? (uint32_t)ms : SDP_CONNECT_WAIT_MS;
}

int sdp_connect_ask(struct conn *conn, struct explicit *explicit, int fd, const struct sockaddr *address, socklen_t len,
                    struct sdp_connect *attempt)
{
	struct rpc_msg record = {0};
	struct rpc_answer answer;
	int saved = errno, error = 0;
	bool opens = !unfit(fd);
	static const struct explicit ordinary;

	attempt->insists = explicit && explicit->protocol;
	if (!begins(conn, fd) || !address_split(address, len, record.remote_addr, &record.remote_port) ||
	    (!explicit && !opens)) {
		errno = saved;
		return 0; /* no news, or the kernel will report the fault */
	}
	if (address_near(record.remote_addr) || !record.remote_port)
		opens = false;
	attempt->asked_ns = now_ns();
	record.wait_ms = wait_ms(fd, attempt);
	if (opens && rpc_carries_far())
		opens = bind_first(fd, &record);
	else
		explicit_local(fd, &record);
	error = explicit_ask(explicit ? explicit : &ordinary, ASK_CONNECT, &record, &fd, opens, &answer);
	if (error)
		return fail_with(error);
	if (answer.remote_port) {
		int family = 0, syns = 0, fewer = SDP_CONNECT_SYNS;
		option_get(fd, SOL_SOCKET, SO_DOMAIN, &family, sizeof(family));
		attempt->redirected =
			address_join(family, answer.remote_addr, answer.remote_port, &attempt->place, &attempt->place_len);
		if (attempt->insists && option_get(fd, IPPROTO_TCP, TCP_SYNCNT, &syns, sizeof(syns)) && syns > SDP_CONNECT_SYNS)
			real.setsockopt(fd, IPPROTO_TCP, TCP_SYNCNT, &fewer, sizeof(fewer));
	} else if (explicit && conn && answer.reason && answer.reason != EXPLICIT_NOBODY_ANSWERED) {
		conn_pin(conn, rpc_refusal_reason(answer.reason));
	}
	errno = saved;
	return 0;
}

int sdp_connect_start(struct conn *conn, int fd, const struct sdp_connect *attempt)
{
	const struct sockaddr *place = (const struct sockaddr *)&attempt->place;
	struct timeval limit;
	bool limited = attempt->timeout_ns && option_get(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));

	if (limited) { /* the question has used a part of it */
		int64_t left = attempt->timeout_ns - (now_ns() - attempt->asked_ns);
		if (left < FIRST_WAIT_NS)
			left = FIRST_WAIT_NS;
		struct timeval rest = {left / 1000000000, left % 1000000000 / 1000};
		real.setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &rest, sizeof(rest));
	}
	int result = real.connect(fd, place, attempt->place_len), saved = errno;
	if (limited)
		real.setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
	shim_log("fd %d is sent to port %d of the provider: %d", fd, ntohs(((const struct sockaddr_in *)place)->sin_port),
	         result < 0 ? saved : 0);
	if (conn && (result == 0 || saved == EINPROGRESS || saved == EINTR)) {
		conn->slot->role = ROLE_ACTIVE;
		slot_set(conn->slot, SLOT_CONNECTED);
		rpc_introduce();
		conn_pin(conn, REASON_BY_SDP);
		conn_set_addresses(conn, fd);
	}
	errno = saved;
	return result;
}
