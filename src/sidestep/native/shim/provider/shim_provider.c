/*
 * shim_provider.c - the connection to the provider, and the offers and claims that it has not answered.
 *
 * One SOCK_SEQPACKET connection a process, made on first need and again after the provider was restarted. Nothing waits
 * for it. Without a provider every connection simply stays on TCP.
 */
#include "shim_provider.h"
#include "shim_switch.h"

#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/un.h>

#define WELCOME_MS 100 /* a process that is about to execute a program waits so long for the provider to know it */
#define RETRY_CONNECT_NS 1000000000  /* time between two attempts to connect to a provider */
#define BACKOFF_MAX 10 /* an unanswered offer doubles the calls until the next one, 2^10 times at most */
#define BACKOFF_NS 1000000 /* and also doubles this time, for connections with many calls */

_Atomic uint32_t rpc_pending;
struct provider provider = {.fd = -1, .serial = 1};
static _Atomic int64_t retry_at;
static struct {
	uint64_t token;
	struct conn *conn; /* holds a reference */
	bool lost; /* lost with its provider; the place is taken until let_go() drops the reference */
} pending[PENDING_MAX];
static int pending_lost;

/*
 * A provider can read and change the bytes of connections. So only our own user and root are believed, in a directory that
 * nobody else can change. At SYSTEM_SOCKET the directory's owner is believed, too. Only root can make a directory in /run,
 * and has given this one to the system-wide provider's user. The same as check_listener() in config.py.
 */
static bool believed(int fd)
{
	struct ucred listener;
	struct stat directory;
	char path[sizeof(config.socket)];
	uid_t own = geteuid();

	memcpy(path, config.socket, sizeof(path));
	char *slash = strrchr(path, '/');
	strcpy(slash ? slash + 1 : path, "."); /* a name has a byte at least, or nobody would listen there */
	bool good = option_get(fd, SOL_SOCKET, SO_PEERCRED, &listener, sizeof(listener)) && stat(path, &directory) == 0 &&
	            !(directory.st_mode & (S_IWGRP | S_IWOTH));
	if (good && strcmp(config.socket, SYSTEM_SOCKET) == 0)
		good = listener.uid == 0 || listener.uid == own || listener.uid == directory.st_uid;
	else if (good)
		good = (listener.uid == 0 || listener.uid == own) && (directory.st_uid == 0 || directory.st_uid == own);
	if (!good)
		shim_log("who listens at %s is not believed: it must be we or root, where nobody else can write",
		         config.socket);
	return good;
}

static bool rpc_connect(void)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int64_t now = now_ns();

	if (provider.fd >= 0)
		return true;
	if (!config.socket[0] || now < retry_at)
		return false;
	retry_at = now + RETRY_CONNECT_NS;
	memcpy(address.sun_path, config.socket, sizeof(address.sun_path));
	int fd = real.socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return false;
	if (real.connect(fd, (struct sockaddr *)&address, sizeof(address)) < 0 || !believed(fd)) {
		atomic_store(&provider.answered, true);
		raw_close(fd);
		return false;
	}
	provider.fd = own_fd(fd);
	atomic_fetch_add(&provider.serial, 1);
	provider.welcomed = false;
	return provider.fd >= 0;
}

/* Sends one record with descriptors over `line`, a connection to a provider. 0, or an errno. */
int rpc_send_over(int line, struct rpc_msg *record, const int *fds, int fds_len)
{
	union {
		struct cmsghdr header;
		char bytes[CMSG_SPACE(OFFER_FDS_MAX * sizeof(int))];
	} control;
	struct iovec iov = {record, sizeof(*record)};
	struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1};

	record->magic = RPC_MAGIC;
	record->version = LAYOUT_VERSION;
	record->pid = shim_pid;
	if (fds_len) {
		memset(&control, 0, sizeof(control));
		message.msg_control = &control;
		message.msg_controllen = CMSG_SPACE((size_t)fds_len * sizeof(int));
		struct cmsghdr *header = &control.header;
		header->cmsg_level = SOL_SOCKET;
		header->cmsg_type = SCM_RIGHTS;
		header->cmsg_len = CMSG_LEN((size_t)fds_len * sizeof(int));
		memcpy(CMSG_DATA(header), fds, (size_t)fds_len * sizeof(int));
	}
	return raw_sendmsg(line, &message, MSG_DONTWAIT | MSG_NOSIGNAL) == (ssize_t)sizeof(*record) ? 0 : errno;
}

/* Sends one record with descriptors; false if it cannot go out now. */
bool rpc_send(struct rpc_msg *record, const int *fds, int fds_len)
{
	int failed = rpc_send_over(provider.fd, record, fds, fds_len);

	if (failed && failed != EAGAIN)
		rpc_lost();
	return !failed;
}

/* shim_lock held */
bool rpc_up(void)
{
	if (provider.fd >= 0)
		return true;
	if (!rpc_connect())
		return false;
	struct rpc_msg hello = {.type = RPC_HELLO};
	memcpy(hello.arena_id, arena_id, sizeof(arena_id));
	memcpy(hello.segment_id, family_id, sizeof(family_id));
	int fd = arena_reader_fd();
	bool sent = rpc_send(&hello, &fd, fd >= 0 ? 1 : 0);
	if (fd >= 0)
		raw_close(fd);
	return sent;
}

void rpc_ensure(void)
{
	shim_lock_take();
	rpc_up();
	let_go(NULL, 0);
}

/* shim_lock held. The provider takes this process for one of each family whose connections it holds. */
void guests_join(void)
{
	struct rpc_msg record = {0};
	int fd;

	while (provider.welcomed && (word_load(provider.wants) & WELCOME_JOINS) && provider.fd >= 0 &&
	       guest_news(provider.serial, record.arena_id, record.segment_id, &fd)) {
		record.type = fd >= 0 ? RPC_JOIN : RPC_LEAVE;
		rpc_send(&record, &fd, fd >= 0 ? 1 : 0);
		if (fd >= 0)
			raw_close(fd);
	}
}

/* This process has been given a connection. */
void rpc_given(void)
{
	shim_lock_take();
	if (rpc_up())
		guests_join();
	let_go(NULL, 0);
}

/* Called with the first connection to a near peer: from now on the provider knows this process, even if nothing is promoted. */
void rpc_introduce(void)
{
	if (likely(word_load(provider.introduced)) || atomic_exchange(&provider.introduced, true))
		return;
	rpc_ensure();
}

/*
 * A server that root has started and that has dropped its privileges is root's to the provider, as long as the provider can
 * follow it. It follows from process to process by our messages, and over an exec by the process itself.
 */
void rpc_before_exec(void)
{
	if (unlikely(config.from_root && geteuid() != 0))
		rpc_ensure();
}

/* True if a peer at another address may be reached: in another network namespace, say. Asks the provider if need be. */
bool rpc_reaches_far(void)
{
	if (!config.socket[0])
		return false;
	if (unlikely(provider.fd < 0) && now_ns() >= retry_at)
		rpc_ensure(); /* one attempt a second at most: without a provider a peer elsewhere costs next to nothing */
	return !word_load(provider.answered) || (word_load(provider.wants) & WELCOME_FAR);
}

bool rpc_carries_far(void)
{
	return config.socket[0] && (!atomic_load_explicit(&provider.registry, memory_order_acquire) ||
	                            (word_load(provider.wants) & WELCOME_REMOTE));
}

struct conn *pending_take(uint64_t token)
{
	for (int i = 0; i < PENDING_MAX; i++)
		if (pending[i].conn && !pending[i].lost && pending[i].token == token) {
			struct conn *conn = pending[i].conn;
			pending[i].conn = NULL;
			atomic_fetch_sub(&rpc_pending, 1);
			return conn;
		}
	return NULL;
}

bool pending_add(struct conn *conn)
{
	for (int i = 0; i < PENDING_MAX; i++)
		if (!pending[i].conn) {
			pending[i].conn = conn;
			pending[i].token = conn->token;
			conn_ref(conn);
			atomic_fetch_add(&rpc_pending, 1);
			return true;
		}
	return false;
}

/* The conn goes back to plain TCP; it may try again after twice as many calls. */
void refused(struct conn *conn, enum reason_code reason)
{
	struct conn_slot *slot = conn->slot;

	if (word_load(slot->state) == STATE_OFFERED) {
		word_store(slot->state, slot_has(slot, SLOT_STAYS) ? STATE_PINNED : STATE_NATIVE);
		if (!slot_has(slot, SLOT_STAYS))
			word_store(slot->reason, reason);
	}
	word_store(conn->calls, 0);
	/* The accepting side asks for nothing until the bucket changes, so only offers grow rarer. */
	if (reason == REASON_LATENCY) { /* a connection whose behaviour may change at any time */
		conn->again_at = coarse_ns() + LATENCY_NS;
	} else if (slot->role == ROLE_ACTIVE) {
		conn->again_at = coarse_ns() + ((int64_t)BACKOFF_NS << conn->backoff);
		if (conn->backoff < BACKOFF_MAX)
			conn->backoff++;
	}
	own_fd_close(conn->pending_segment_fd);
	conn->pending_segment_fd = -1;
}

/* shim_lock held. All pending offers and claims are void; their connections stay on TCP. */
static void pending_lose(void)
{
	for (int i = 0; i < PENDING_MAX; i++)
		if (pending[i].conn && !pending[i].lost) {
			refused(pending[i].conn, no_provider());
			pending[i].lost = true;
			pending_lost++;
			atomic_fetch_sub(&rpc_pending, 1);
		}
}

/* Drops shim_lock, and then the references of answered and lost connections: dropping the last one takes the lock. */
void let_go(struct conn **done, int done_len)
{
	struct conn *lost[PENDING_MAX];
	int lost_len = 0;

	for (int i = 0; i < PENDING_MAX && unlikely(pending_lost); i++)
		if (pending[i].lost) {
			lost[lost_len++] = pending[i].conn;
			pending[i].conn = NULL;
			pending[i].lost = false;
			pending_lost--;
		}
	shim_lock_drop();
	for (int i = 0; i < done_len; i++)
		conn_unref(done[i]);
	for (int i = 0; i < lost_len; i++)
		conn_unref(lost[i]);
}

void rpc_lost(void)
{
	own_fd_close(provider.fd);
	provider.fd = -1;
	provider.welcomed = false;
	atomic_store(&provider.registry, NULL);
	word_store(provider.lost, word_load(provider.lost) + 1);
	pending_lose();
	shim_log("provider lost");
}

void rpc_withdraw(struct conn *conn)
{
	struct rpc_msg record = {.type = RPC_WITHDRAW, .token = conn->token};

	shim_lock_take();
	struct conn *mine = pending_take(conn->token);
	if (mine && provider.fd >= 0)
		rpc_send(&record, NULL, 0);
	if (mine || late_drop(conn))
		refused(conn, mine ? REASON_NONE : REASON_INHERITED);
	let_go(&mine, mine ? 1 : 0);
}

/*
 * True if a duplicate of the socket may be in the provider's queue, where it would hide a close. The kernel knows whether the
 * provider has read the queue; if the connection to it is lost, or the parent's, nobody knows.
 */
bool rpc_delegated(struct conn *conn)
{
	int queued = 0;

	if (likely(!atomic_load(&conn->delegated)))
		return false;
	shim_lock_take();
	uint32_t serial = atomic_load(&conn->delegated); /* the answer may have come in between */
	bool delegated = serial && (serial != provider.serial || provider.fd < 0 ||
	                            real.ioctl(provider.fd, SIOCOUTQ, &queued) < 0 || queued > 0);
	shim_lock_drop();
	return delegated;
}

/*
 * No lock is held. The peer does not answer a request of this connection, so the provider wakes its process. A process that
 * is about to execute a program may have just met the provider. It learns nothing more of processes that have gone before it
 * is welcomed.
 */
void rpc_serve(const struct conn *conn)
{
	const struct channel_side *remote = conn->channel.remote;
	struct rpc_msg record = {.type = RPC_SERVE};
	struct pollfd item = {.fd = -1, .events = POLLIN};

	if (!(atomic_load(&provider.wants) & WELCOME_SERVES) || !(atomic_load(&remote->knows) & KNOWS_NEW_DOORBELL))
		return;
	memcpy(record.segment_id, conn->slot->segment_id, sizeof(record.segment_id));
	memcpy(record.arena_id, remote->family_id, sizeof(record.arena_id));
	shim_lock_take();
	bool sent = rpc_up() && rpc_send(&record, NULL, 0);
	if (sent && !provider.welcomed)
		item.fd = provider.fd;
	shim_lock_drop();
	if (item.fd >= 0)
		raw_poll(&item, 1, WELCOME_MS);
	shim_log("the peer does not answer; the provider %s", sent ? "tells it" : "is not there");
}

/* Called in a child: the connection and its pending requests are the parent's. */
void provider_after_fork(void)
{
	own_fd_close(provider.fd);
	provider.fd = -1;
	provider.serial++;
	retry_at = 0;
	atomic_store(&provider.introduced, false);
	provider.welcomed = false;
	atomic_store(&provider.registry, NULL);
	memset(pending, 0, sizeof(pending));
	pending_lost = 0;
	atomic_store(&rpc_pending, 0);
}
