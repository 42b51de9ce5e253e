/*
 * shim_explicit.c - sockets whose program names the family: AF_INET_OFFLOAD wants an offload protocol, AF_INET_DIRECT none.
 *
 * The descriptor is a TCP socket of the kernel from birth, and begins every connection as one; struct explicit holds the
 * difference. A direct socket is pinned. An explicit one asks the provider before it connects. It asks for a port after it
 * has bound it natively, so that native TCP and the offload protocols share one space of ports. Each question waits for the
 * answer, for three seconds at most. A socket that names a protocol also asks when it is opened, and waits longer, except in
 * connect(). Connections of explicit sockets are offered at once.
 *
 * The provider keeps a port as long as a pipe is open, the lease. It reads the pipe's end when the last holder of the socket
 * has closed it, died, or executed another program. For that one the socket is ordinary.
 *
 * An offload socket of protocol 0 takes whatever there is, and plain TCP where there is nothing. One that names a protocol
 * does not open, bind, listen or connect without it.
 */
#include "shim.h"
#include "shim_address.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>

#define OPTION_MAX 64 /* bytes of a socket option that is carried over */

static bool explicit_family(int domain)
{
	return domain == AF_INET_OFFLOAD || domain == AF_INET6_OFFLOAD || domain == AF_INET_DIRECT ||
	       domain == AF_INET6_DIRECT;
}

bool explicit_wanted(int domain, int protocol)
{
	return explicit_family(domain) || (protocol == IPPROTO_SDP && (domain == AF_INET || domain == AF_INET6));
}

static int kernel_family(int domain)
{
	return domain == AF_INET || domain == AF_INET_OFFLOAD || domain == AF_INET_DIRECT ? AF_INET : AF_INET6;
}

/* ---- what is known of a socket ---- */
struct explicit *explicit_hold_slow(int fd)
{
	struct file *file = file_get(fd);

	if (!file)
		return NULL;
	if (file->kind == FILE_CONN) {
		HELD conn = conn_hold(fd);
		struct explicit *found = conn ? conn->explicit : NULL;
		if (found)
			explicit_ref(found);
		return found;
	}
	if (file->kind != FILE_EXPLICIT)
		return NULL;
	struct explicit *explicit = (struct explicit *)file;
	uint32_t refs = atomic_load(&explicit->refs);
	do {
		if (refs == 0)
			return NULL; /* a connection on its way to the free list, or there */
	} while (!atomic_compare_exchange_weak(&explicit->refs, &refs, refs + 1));
	if (file_get(fd) == file)
		return explicit;
	explicit_unref(explicit);
	return NULL;
}

/* A listener is no connection: its numbers' entries are the struct itself. */
void explicit_listens(struct explicit *explicit, int fd)
{
	explicit_ref(explicit);
	file_put(fd, &explicit->file);
}

void explicit_forget(int fd)
{
	struct explicit *explicit = (struct explicit *)file_get(fd);

	file_put(fd, NULL);
	explicit_unref(explicit);
}

void explicit_dup(int from, int to)
{
	HELD_EXPLICIT explicit = explicit_hold(from);

	if (explicit)
		explicit_listens(explicit, to);
}

/* ---- addresses ---- */
const struct sockaddr *explicit_address(const struct sockaddr *address, socklen_t len, struct sockaddr_storage *copy)
{
	if (likely(!address || len < sizeof(sa_family_t) || !explicit_family(address->sa_family)) || len > sizeof(*copy))
		return address;
	memcpy(copy, address, len); /* the program's own memory stays as it is */
	copy->ss_family = (sa_family_t)kernel_family(address->sa_family);
	return (const struct sockaddr *)copy;
}

/* Address of the socket; port 0: it is not bound. */
void explicit_local(int fd, struct rpc_msg *record)
{
	struct sockaddr_storage local;
	socklen_t len = sizeof(local);

	if (real.getsockname(fd, (struct sockaddr *)&local, &len) < 0 ||
	    !address_split((struct sockaddr *)&local, len, record->local_addr, &record->local_port))
		record->local_port = 0;
}

/* ---- asking ---- */

int explicit_ask(const struct explicit *explicit, enum ask_code what, struct rpc_msg *record, const int *fds,
                 int fds_len, struct rpc_answer *answer)
{
	record->type = RPC_ASK;
	record->flags = what;
	record->protocol = explicit->protocol;
	int failed = rpc_ask(record, fds, fds_len, answer);
	if (failed) {
		shim_log("asked %d of protocol %#x: %s", what, explicit->protocol, strerror(-failed));
		*answer = (struct rpc_answer){.reason = EXPLICIT_NOBODY_ANSWERED};
		return explicit->protocol ? EPROTONOSUPPORT : 0;
	}
	shim_log("asked %d of protocol %#x: error %u, reason %u", what, explicit->protocol, answer->error, answer->reason);
	return answer->error < 4096 ? (int)answer->error : EPROTO;
}

/* ---- the calls ---- */
int explicit_socket(int domain, int type, int protocol)
{
	bool direct = domain == AF_INET_DIRECT || domain == AF_INET6_DIRECT;
	bool stream = (type & ~(SOCK_CLOEXEC | SOCK_NONBLOCK)) == SOCK_STREAM;
	int family = kernel_family(domain);

	if (!direct && !stream)
		return fail_with(ESOCKTNOSUPPORT);
	if (protocol == IPPROTO_TCP) /* a socket of TCP and nothing else, by its number */
		direct = true;
	/* a number that fits an IP header is no offload protocol */
	if (!direct && protocol && protocol < 256)
		return fail_with(protocol < 0 ? EINVAL : EPROTONOSUPPORT);
	struct explicit *explicit = explicit_new(family, direct, stream, direct ? 0 : (uint32_t)protocol);
	if (!explicit)
		return fail_with(ENOMEM);
	HELD_EXPLICIT mine = explicit;
	if (mine->protocol) {
		struct rpc_msg record = {0};
		struct rpc_answer answer;
		if (family == AF_INET)
			memset(record.local_addr + 10, 0xff, 2);
		int error = explicit_ask(mine, ASK_OPEN, &record, NULL, 0, &answer);
		if (error)
			return fail_with(error);
	}
	int fd = socket(family, type, direct ? protocol : 0);
	if (fd < 0)
		return fd;
	if (config.opt_in)
		sidestep_adopt(fd);
	HELD conn = conn_hold(fd);
	if (!conn) { /* a socket that is not tracked: of datagrams, or no slot was left */
		explicit_listens(mine, fd);
		return fd;
	}
	explicit_ref(mine);
	conn->explicit = mine;
	if (direct)
		conn_pin(conn, REASON_DIRECT);
	return fd;
}

/* Connections inherit what their listener was opened as. */
void explicit_accepted(const struct explicit *listener, struct conn *conn, int fd)
{
	struct explicit *explicit = explicit_new(listener->family, listener->direct, true, listener->protocol);

	conn->explicit = explicit;
	if (listener->direct || !explicit)
		conn_pin(conn, listener->direct ? REASON_DIRECT : REASON_NO_RESOURCES);
	if (listener->direct)
		conn_set_addresses(conn, fd); /* addresses for `ss`; no call will ask for them */
}

/*
 * A TCP socket cannot be unbound, so its numbers get a fresh one, with the options and flags of the old. If another holder (a
 * process, an epoll set) has the old one as well, it is left alone: its native port is free only when that one closes it.
 */
static const struct {
	int level, name;
} carried[] = {
/* clang-format off: a table */
	{SOL_SOCKET, SO_REUSEADDR},
	{SOL_SOCKET, SO_REUSEPORT},
	{SOL_SOCKET, SO_KEEPALIVE},
	{SOL_SOCKET, SO_LINGER},
	{SOL_SOCKET, SO_OOBINLINE},
	{SOL_SOCKET, SO_SNDBUF},
	{SOL_SOCKET, SO_RCVBUF},
	{SOL_SOCKET, SO_RCVLOWAT},
	{SOL_SOCKET, SO_RCVTIMEO},
	{SOL_SOCKET, SO_SNDTIMEO},
	{SOL_SOCKET, SO_PRIORITY},
	{SOL_SOCKET, SO_MARK},
	{SOL_SOCKET, SO_BINDTODEVICE},
	{SOL_SOCKET, SO_DONTROUTE},
	{SOL_SOCKET, SO_BROADCAST},
	{SOL_SOCKET, SO_TIMESTAMP},
	{SOL_SOCKET, SO_TIMESTAMPNS},
	{SOL_SOCKET, SO_TIMESTAMPING},
	{SOL_SOCKET, SO_ZEROCOPY},
	{SOL_SOCKET, SO_PEEK_OFF},
	{SOL_SOCKET, SO_BUSY_POLL},
	{SOL_SOCKET, SO_INCOMING_CPU},
	{SOL_SOCKET, SO_MAX_PACING_RATE},
	{IPPROTO_IP, IP_TOS},
	{IPPROTO_IP, IP_TTL},
	{IPPROTO_IP, IP_FREEBIND},
	{IPPROTO_IP, IP_TRANSPARENT},
	{IPPROTO_IP, IP_MTU_DISCOVER},
	{IPPROTO_IP, IP_RECVERR},
	{IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT},
	{IPPROTO_IP, 51 /* IP_LOCAL_PORT_RANGE */},
	{IPPROTO_IP, IP_MINTTL},
	{IPPROTO_IP, IP_OPTIONS},
	{IPPROTO_IPV6, IPV6_V6ONLY},
	{IPPROTO_IPV6, IPV6_UNICAST_HOPS},
	{IPPROTO_IPV6, IPV6_TCLASS},
	{IPPROTO_IPV6, IPV6_MTU_DISCOVER},
	{IPPROTO_IPV6, IPV6_RECVERR},
	{IPPROTO_IPV6, IPV6_FREEBIND},
	{IPPROTO_IPV6, IPV6_TRANSPARENT},
	{IPPROTO_IPV6, IPV6_MINHOPCOUNT},
	{IPPROTO_TCP, TCP_NODELAY},
	{IPPROTO_TCP, TCP_MAXSEG},
	{IPPROTO_TCP, TCP_CORK},
	{IPPROTO_TCP, TCP_KEEPIDLE},
	{IPPROTO_TCP, TCP_KEEPINTVL},
	{IPPROTO_TCP, TCP_KEEPCNT},
	{IPPROTO_TCP, TCP_SYNCNT},
	{IPPROTO_TCP, TCP_LINGER2},
	{IPPROTO_TCP, TCP_DEFER_ACCEPT},
	{IPPROTO_TCP, TCP_WINDOW_CLAMP},
	{IPPROTO_TCP, TCP_CONGESTION},
	{IPPROTO_TCP, TCP_USER_TIMEOUT},
	{IPPROTO_TCP, TCP_FASTOPEN},
	{IPPROTO_TCP, TCP_NOTSENT_LOWAT},
	{IPPROTO_TCP, TCP_SAVE_SYN},
	{IPPROTO_TCP, TCP_FASTOPEN_CONNECT},
	{IPPROTO_TCP, TCP_INQ},
/* clang-format on */
};

static void options_carry(int from, int to)
{
	for (size_t i = 0; i < sizeof(carried) / sizeof(*carried); i++) {
		uint8_t old[OPTION_MAX] = {0}, fresh[OPTION_MAX] = {0};
		socklen_t len = sizeof(old), fresh_len = sizeof(fresh);
		int level = carried[i].level, name = carried[i].name;
		if (real.getsockopt(from, level, name, old, &len) < 0 ||
		    real.getsockopt(to, level, name, fresh, &fresh_len) < 0 || (len == fresh_len && !memcmp(old, fresh, len)))
			continue;
		if (level == SOL_SOCKET && (name == SO_SNDBUF || name == SO_RCVBUF)) { /* socket(7): twice the value */
			int half;
			memcpy(&half, old, sizeof(half));
			half /= 2;
			memcpy(old, &half, sizeof(half));
		}
		if (real.setsockopt(to, level, name, old, len) < 0)
			shim_log("option %d of level %d is not carried over: %s", name, level, strerror(errno));
	}
	int flags = real.fcntl64(from, F_GETFL, 0);
	struct f_owner_ex owner;
	if (flags >= 0 && real.fcntl64(from, F_GETOWN_EX, (long)&owner) == 0 && owner.pid) {
		real.fcntl64(to, F_SETOWN_EX, (long)&owner);
		real.fcntl64(to, F_SETSIG, real.fcntl64(from, F_GETSIG, 0));
	}
	if (flags >= 0)
		real.fcntl64(to, F_SETFL, flags);
}

static void unbind(struct explicit *explicit, int fd)
{
	HELD conn = conn_hold(fd);

	if (conn && (has_members(conn) || !conn_alone(conn)))
		return;
	shim_lock_take(); /* no thread forks meanwhile: the child would have the fresh one without knowing it */
	int fresh = real.socket(explicit->family, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fresh >= 0) {
		options_carry(fd, fresh);
		for (uint32_t to = 0; to < atomic_load(&fd_end); to++) {
			struct file *file = file_get((int)to);
			if (!file || (file != &explicit->file && (!conn || file != &conn->file)))
				continue;
			real.dup3(fresh, (int)to, real.fcntl64((int)to, F_GETFD, 0) & FD_CLOEXEC ? O_CLOEXEC : 0);
		}
		raw_close(fresh);
	}
	shim_lock_drop();
}

/* Asks for the port that the socket is bound to natively; 0, or the errno that the bind fails with. */
static int reserve(struct explicit *explicit, int fd)
{
	struct rpc_msg record = {0};
	struct rpc_answer answer;
	int ends[2];

	explicit_local(fd, &record);
	if (!record.local_port) /* IP_BIND_ADDRESS_NO_PORT: there is none yet */
		return 0;
	shim_lock_take(); /* no thread forks before the writing end has its owner */
	int failed = real.syscall(SYS_pipe2, (long)ends, O_CLOEXEC, 0, 0, 0, 0) < 0 ? errno : 0;
	if (!failed) {
		ends[0] = own_fd(ends[0]);
		explicit->lease_fd = own_fd(ends[1]);
		failed = ends[0] < 0 || explicit->lease_fd < 0 ? EMFILE : 0;
	} else {
		ends[0] = -1;
	}
	shim_lock_drop();
	int error = 0;
	if (failed) {
		answer = (struct rpc_answer){.reason = EXPLICIT_NOBODY_ANSWERED};
		error = explicit->protocol ? failed : 0;
	} else {
		error = explicit_ask(explicit, ASK_BIND, &record, (int[]){fd, ends[0]}, 2, &answer);
	}
	own_fd_close(ends[0]);
	if (error || answer.reason) {
		own_fd_close(explicit->lease_fd);
		explicit->lease_fd = -1;
	}
	return error;
}

int explicit_bind(struct explicit *explicit, int fd, const struct sockaddr *address, socklen_t len)
{
	struct sockaddr_storage copy;
	int result = real.bind(fd, explicit_address(address, len, &copy), len);

	if (result < 0 || explicit->direct || !explicit->stream)
		return result;
	int saved = errno, error = reserve(explicit, fd);
	if (error) {
		unbind(explicit, fd);
		return fail_with(error);
	}
	errno = saved;
	return 0;
}

int explicit_before_listen(struct explicit *explicit, int fd)
{
	struct rpc_msg record = {0};
	struct rpc_answer answer;

	if (explicit->direct || !explicit->stream)
		return 0;
	explicit_local(fd, &record);
	if (!record.local_port) { /* listen() would bind it: it is bound first, so that the protocols get that port, too */
		struct sockaddr_storage any = {.ss_family = explicit->family};
		socklen_t len = explicit->family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
		if (explicit_bind(explicit, fd, (struct sockaddr *)&any, len) < 0)
			return -1;
		explicit_local(fd, &record);
	}
	if (!explicit->protocol)
		return 0; /* any protocol will do, even TCP: there is nothing to ask */
	int error = explicit_ask(explicit, ASK_LISTEN, &record, NULL, 0, &answer);
	return error ? fail_with(error) : 0;
}

bool explicit_bars_fast_open(const struct conn *conn, int flags)
{
	if (likely(!(flags & MSG_FASTOPEN)) || !conn->explicit || !conn->explicit->protocol)
		return false;
	errno = EOPNOTSUPP;
	return true;
}
