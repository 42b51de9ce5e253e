/*
 * shim_rpc.c - talking to the provider, never waiting for it.
 *
 * One SOCK_SEQPACKET connection a process, made on first need and again after the provider was restarted. Offers and
 * claims are sent without blocking; answers are picked up by whatever hooked call comes next. Without a provider every
 * connection simply stays on TCP.
 */
#include "shim.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>

#ifndef SO_NETNS_COOKIE
#define SO_NETNS_COOKIE 71
#endif

#define PENDING_MAX 64               /* offers and claims of this process with the provider; more wait for a later call */
#define RETRY_CONNECT_NS 1000000000  /* a provider that is not there is asked for again after this */
#define POLL_EVERY_NS 10000          /* how often answers are looked for while calls come quickly */
#define UNTOLD_EVERY_NS 20000000     /* and, where no answer is told, the socket this often */
#define CHECK_EVERY_NS 100000000     /* the provider's socket is asked at least this often whether it is still there */
#define ASKS_MAX 32                  /* questions of this process at a time; one more is answered as without a provider */
#define ASK_TIMEOUT_NS 3000000000ll  /* EXPLICIT_ASK_TIMEOUT_S of limits.py: a provider that is slower is none */
#define MEET_NS 1000000000ll         /* a provider that has not welcomed us by then is none */
#define ASK_LOOK_MS 2                /* another thread may have read the answer while we went to sleep: look that often */
#define OFFER_FDS_MAX 5              /* the socket's duplicate, a UDP socket, segment, bell, bell page */
#define BACKOFF_MAX 10               /* an unanswered offer doubles the calls until the next one, 2^10 times at most */
#define BACKOFF_NS 1000000           /* and the time, which is the same for those that call often */

#define SYSTEM_SOCKET "/run/sidestep/provider" /* of config.py */

#define ORDERS_MAX 64                /* orders of the provider taken in at a time */

_Atomic uint32_t rpc_pending;
static _Atomic int rpc_fd = -1;
static _Atomic uint32_t rpc_serial = 1; /* one more with each connection to a provider, and in each child */
static _Atomic uint32_t orders_heard;  /* the registry's word when they were last asked for */
static _Atomic bool inherited;         /* by fork(): the provider does not know yet that we hold connections */
static struct order {
	uint16_t type;
	uint64_t slot_generation;
} orders[ORDERS_MAX]; /* taken in, not followed yet */
static _Atomic int orders_len;
static bool following; /* a thread follows them, in their order */
/* Of peers at other addresses: in another namespace of this host, or on another host. */
#define WELCOME_FAR (WELCOME_PATH | WELCOME_REMOTE)
static _Atomic uint32_t rpc_wants;     /* WELCOME_* of the provider, once there is one */
static _Atomic bool rpc_answered;      /* whether rpc_wants is known, or nobody is there to know */
static _Atomic bool introduced;
static _Atomic int64_t retry_at;
static bool welcomed;
static const struct registry_header *_Atomic registry; /* NULL: no provider, or none that has answered yet */
static _Atomic uint32_t registry_epoch;                 /* one more with each provider: buckets are of a registry */
static uint64_t tokens;
static struct {
	uint64_t token;
	struct conn *conn; /* holds a reference */
	bool lost;         /* with its provider; the place is taken until let_go() drops the reference */
} pending[PENDING_MAX];
static int pending_lost;

/* CLOCK_MONOTONIC as it was a few milliseconds ago: costs next to nothing. */
static int64_t coarse_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
	return now.tv_sec * 1000000000ll + now.tv_nsec;
}

static void rpc_lost(void);
static void let_go(struct conn **done, int done_len);

/*
 * Questions of explicit sockets, whose calls wait for the answer. Whichever thread reads an answer stores it here; who
 * waits looks. An entry that nobody waits for any more (a signal handler jumped out) is free when its time is up.
 */
enum ask_state { ASK_WAITING, ASK_ANSWERED, ASK_LOST };
static struct {
	uint64_t token; /* 0: free */
	int64_t deadline;
	enum ask_state state;
	struct rpc_answer answer;
} asks[ASKS_MAX];
static bool stalled; /* a call has waited in vain, and nothing has come since: who can do without an answer does */

/*
 * Who pairs the ends of connections can read and change what they carry. So only our own user and root are believed, in a
 * directory that nobody else can change. At SYSTEM_SOCKET it may be another: only root can make a directory in /run, and
 * to whom it has given that one is the system-wide provider's user. The same as check_listener() in config.py.
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
	bool good = real.getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &listener, &(socklen_t){sizeof(listener)}) == 0 &&
	            stat(path, &directory) == 0 && !(directory.st_mode & (S_IWGRP | S_IWOTH));
	if (good && strcmp(config.socket, SYSTEM_SOCKET) == 0)
		good = listener.uid == 0 || listener.uid == own || listener.uid == directory.st_uid;
	else if (good)
		good = (listener.uid == 0 || listener.uid == own) && (directory.st_uid == 0 || directory.st_uid == own);
	if (!good)
		shim_log("who listens at %s is not believed: it must be we or root, where nobody else can write", config.socket);
	return good;
}

static bool rpc_connect(void)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int64_t now = now_ns();

	if (rpc_fd >= 0)
		return true;
	if (!config.socket[0] || now < retry_at)
		return false;
	retry_at = now + RETRY_CONNECT_NS;
	memcpy(address.sun_path, config.socket, sizeof(address.sun_path));
	int fd = real.socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return false;
	if (real.connect(fd, (struct sockaddr *)&address, sizeof(address)) < 0 || !believed(fd)) {
		atomic_store(&rpc_answered, true);
		raw_close(fd);
		return false;
	}
	rpc_fd = own_fd(fd);
	atomic_fetch_add(&rpc_serial, 1);
	welcomed = false;
	return rpc_fd >= 0;
}

/* Sends one record with descriptors; false if it cannot go out now. */
static bool rpc_send(struct rpc_msg *record, const int *fds, int fds_len)
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
		struct cmsghdr *header = CMSG_FIRSTHDR(&message);
		header->cmsg_level = SOL_SOCKET;
		header->cmsg_type = SCM_RIGHTS;
		header->cmsg_len = CMSG_LEN((size_t)fds_len * sizeof(int));
		memcpy(CMSG_DATA(header), fds, (size_t)fds_len * sizeof(int));
	}
	if (raw_sendmsg(rpc_fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL) == (ssize_t)sizeof(*record))
		return true;
	if (errno != EAGAIN)
		rpc_lost();
	return false;
}

/* shim_lock held */
static bool rpc_up(void)
{
	if (rpc_fd >= 0)
		return true;
	if (!rpc_connect())
		return false;
	struct rpc_msg hello = {.type = RPC_HELLO};
	memcpy(hello.arena_id, arena_id, sizeof(arena_id));
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

/* The first connection to a near peer: from now on the provider can tell of this process, whatever becomes of it. */
void rpc_introduce(void)
{
	if (likely(atomic_load_explicit(&introduced, memory_order_relaxed)) || atomic_exchange(&introduced, true))
		return;
	rpc_ensure();
}

/*
 * What root has started, and what dropped its privileges since, is root's server to the provider for as long as it can
 * follow it: from process to process by our messages, and over an exec by the process itself.
 */
void rpc_before_exec(void)
{
	if (unlikely(config.from_root && geteuid() != 0))
		rpc_ensure();
}

/* Whether an end elsewhere may be on this host all the same: in another network namespace. Asks the provider if need be. */
bool rpc_reaches_far(void)
{
	if (!config.socket[0])
		return false;
	if (unlikely(rpc_fd < 0) && now_ns() >= retry_at)
		rpc_ensure(); /* at most once a second: without a provider a peer elsewhere costs next to nothing */
	return !atomic_load_explicit(&rpc_answered, memory_order_relaxed) ||
	       (atomic_load_explicit(&rpc_wants, memory_order_relaxed) & WELCOME_FAR);
}

bool rpc_carries_far(void)
{
	return config.socket[0] && (!atomic_load_explicit(&registry, memory_order_acquire) ||
	                            (atomic_load_explicit(&rpc_wants, memory_order_relaxed) & WELCOME_REMOTE));
}

static struct conn *pending_take(uint64_t token)
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

/* The provider closes its duplicate before it answers. */
static struct conn *answered(uint64_t token)
{
	struct conn *conn = pending_take(token);

	if (conn)
		atomic_store(&conn->lent, 0);
	return conn;
}

static bool pending_add(struct conn *conn)
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
static void refused(struct conn *conn, enum reason_code reason)
{
	struct conn_slot *slot = conn->slot;

	if (word_load(slot->state) == STATE_OFFERED) {
		word_store(slot->state, slot_has(slot, SLOT_STAYS) ? STATE_PINNED : STATE_NATIVE);
		if (!slot_has(slot, SLOT_STAYS))
			word_store(slot->reason, reason);
	}
	word_store(conn->calls, 0);
	/* The accepting side asks for nothing until the bucket changes, so only offers grow rarer. */
	if (slot->role == ROLE_ACTIVE) {
		conn->again_at = coarse_ns() + ((int64_t)BACKOFF_NS << conn->backoff);
		if (conn->backoff < BACKOFF_MAX)
			conn->backoff++;
	}
	own_fd_close(conn->pending_segment_fd);
	conn->pending_segment_fd = -1;
}

/* shim_lock held. Everything with the provider is void; whoever still waits goes back to TCP. */
static void pending_lose(void)
{
	for (int i = 0; i < PENDING_MAX; i++)
		if (pending[i].conn && !pending[i].lost) {
			refused(pending[i].conn, REASON_NO_PROVIDER);
			pending[i].lost = true;
			pending_lost++;
			atomic_fetch_sub(&rpc_pending, 1);
		}
}

/* Drops shim_lock, and then the references of what was answered and of what was lost: the last one takes the lock itself. */
static void let_go(struct conn **done, int done_len)
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

static void rpc_lost(void)
{
	own_fd_close(rpc_fd);
	rpc_fd = -1;
	welcomed = false;
	atomic_store(&registry, NULL);
	pending_lose();
	for (int i = 0; i < ASKS_MAX; i++)
		if (asks[i].state == ASK_WAITING)
			asks[i].state = ASK_LOST;
	shim_log("provider lost");
}

static void welcome(const struct rpc_msg *record, int registry_fd)
{
	struct stat st;

	if (!config.promote_set) {
		config.promote_after_calls = record->promote_after_calls;
		config.promote_after_bytes = record->promote_after_bytes;
	}
	if (!config.ring_size_set && record->ring_size[0] >= CHANNEL_RING_MIN && record->ring_size[0] <= CHANNEL_RING_MAX &&
	    !(record->ring_size[0] & (record->ring_size[0] - 1)))
		config.ring_size = record->ring_size[0];
	if (registry_fd < 0 || fstat(registry_fd, &st) < 0 || st.st_size < (off_t)REGISTRY_SIZE)
		return;
	int seals = fcntl(registry_fd, F_GET_SEALS);
	if (seals < 0 || !(seals & F_SEAL_SHRINK))
		return;
	void *map = mmap(NULL, REGISTRY_SIZE, PROT_READ, MAP_SHARED, registry_fd, 0);
	if (map == MAP_FAILED)
		return;
	atomic_store(&rpc_wants, record->flags & (WELCOME_POSSESSION | WELCOME_FAR));
	atomic_store(&rpc_answered, true);
	/* The old page, of a provider that is gone, may still be looked at by another thread: it stays mapped. */
	atomic_fetch_add(&registry_epoch, 1);
	atomic_store(&registry, map);
	welcomed = true;
}

/* fds has room for one more than fds_len; what is left in it is the caller's to close. */
static int attach(struct conn *conn, const struct rpc_msg *record, int *fds, int fds_len, bool claimer)
{
	int segment = claimer ? fds[0] : conn->pending_segment_fd;
	int fd = conn_fd(conn);
	struct conn_slot *slot = conn->slot;
	struct remote_bell *remote = NULL;
	struct bell *local = conn->bell;

	bool relayed = record->flags & ATTACH_RELAYED;

	if (fds_len != (claimer ? 3 : 2) + relayed || fd < 0 || segment < 0 || set_wants_pin(conn) || !local || slot_has(slot, SLOT_PIN) ||
	    !conn_alone(conn)) {
		shim_log("cannot attach: %d descriptors, fd %d, holders %u", fds_len, fd, word_load(slot->holders));
		refused(conn, !conn_alone(conn) ? REASON_SHARED_BY_FORK : REASON_NO_RESOURCES);
		return fds_len;
	}
	int failed = 0;
	int life = relayed ? fds[--fds_len] : -1;
	if (!claimer) {
		/* no longer ours to hide: channel_map asks about it by the calls that hide our own */
		file_put(segment, NULL);
		conn->pending_segment_fd = -1;
		fds[fds_len++] = segment; /* closed by the caller, with the others */
	}
	int *bell_fds = claimer ? fds + 1 : fds;
	remote = remote_bell_get(record->bell_page_id, record->bell_index, bell_fds[0], bell_fds[1], life);
	bell_fds[0] = bell_fds[1] = -1;
	if (remote && relayed && remote->life_fd >= 0)
		slot_set(slot, SLOT_RELAYED);
	if (!remote || relayed != (remote->life_fd >= 0))
		failed = -EPROTO;
	else
		failed = conn_attach(conn, fd, segment, claimer ? 1 : 0, remote, local);
	if (failed) {
		shim_log("fd %d: attach failed: %d", fd, failed);
		slot_clear(slot, SLOT_RELAYED);
		if (remote)
			remote_bell_unref(remote);
		refused(conn, failed == -EPROTO ? REASON_PEER_LAYOUT : REASON_NO_RESOURCES);
	} else if (claimer) {
		memcpy(slot->segment_id, record->segment_id, 16);
	}
	return fds_len;
}

enum reason_code rpc_refusal_reason(uint32_t refusal)
{
	switch (refusal) {
	case REFUSAL_NO_OFFER:
	case REFUSAL_EXPIRED:
		return REASON_PEER_ABSENT;
	case REFUSAL_NO_BUDGET:
	case REFUSAL_TOO_MANY:
		return REASON_NO_RESOURCES;
	case REFUSAL_POLICY:
		return REASON_POLICY;
	case REFUSAL_FOREIGN_USER:
		return REASON_FOREIGN_USER;
	case REFUSAL_NO_PROTOCOL:
		return REASON_NO_PROTOCOL;
	default:
		return REASON_REFUSED_BY_PROVIDER;
	}
}

/* Takes one answer; returns the conn whose reference is to be dropped, or NULL; *more: another may wait. */
static struct conn *rpc_receive(bool *more)
{
	union {
		struct cmsghdr header;
		char bytes[CMSG_SPACE(8 * sizeof(int))];
	} control;
	struct rpc_msg record;
	struct iovec iov = {&record, sizeof(record)};
	struct msghdr message = {
		.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};
	int fds[9], fds_len = 0;
	struct conn *conn = NULL;

	*more = false;
	if (orders_len == ORDERS_MAX)
		return NULL; /* first these; see orders_follow() */
	ssize_t n = raw_recvmsg(rpc_fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return NULL;
	if (n <= 0) {
		rpc_lost();
		return NULL;
	}
	*more = true;
	stalled = false;
	for (struct cmsghdr *header = CMSG_FIRSTHDR(&message); header; header = CMSG_NXTHDR(&message, header))
		if (header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
			int count = (int)((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
			for (int i = 0; i < count && fds_len < 8; i++)
				memcpy(&fds[fds_len++], CMSG_DATA(header) + (size_t)i * sizeof(int), sizeof(int));
		}
	if (n == (ssize_t)sizeof(record) && record.magic == RPC_MAGIC && record.version == LAYOUT_VERSION) {
		switch (record.type) {
		case RPC_WELCOME:
			welcome(&record, fds_len == 1 ? fds[0] : -1);
			break;
		case RPC_ATTACH:
		case RPC_CLAIMED:
			conn = answered(record.token);
			if (conn && word_load(conn->slot->state) == STATE_OFFERED)
				fds_len = attach(conn, &record, fds, fds_len, record.type == RPC_ATTACH);
			break;
		case RPC_REFUSED:
			conn = answered(record.token);
			shim_log("refused: %u", record.reason);
			if (conn)
				refused(conn, rpc_refusal_reason(record.reason));
			break;
		case RPC_ANSWER:
			for (int i = 0; i < ASKS_MAX; i++)
				if (asks[i].token && asks[i].token == record.token) {
					struct rpc_answer *answer = &asks[i].answer;
					*answer = (struct rpc_answer){.error = record.error, .reason = record.reason,
					                              .local_port = record.local_port, .remote_port = record.remote_port};
					memcpy(answer->local_addr, record.local_addr, sizeof(answer->local_addr));
					memcpy(answer->remote_addr, record.remote_addr, sizeof(answer->remote_addr));
					asks[i].state = ASK_ANSWERED;
				}
			break;
		case RPC_DEMOTE:
		case RPC_PROMOTE:
			orders[orders_len++] = (struct order){record.type, record.token};
			break;
		}
	}
	for (int i = 0; i < fds_len; i++)
		if (fds[i] >= 0)
			raw_close(fds[i]);
	return conn;
}

static void follow_order(const struct order *order)
{
	int fd;
	HELD conn = conn_find((uint32_t)(order->slot_generation >> 32), (uint32_t)order->slot_generation, &fd);

	if (!conn)
		return; /* another process of the family has it, or it has ended */
	if (order->type == RPC_DEMOTE) {
		conn_demote(conn, fd, REASON_DEMOTED, false);
	} else if (conn_promote(conn, fd)) {
		conn->backoff = 0;
		word_store(conn->calls, config.promote_after_calls);
		rpc_consider(conn, fd);
	}
}

/* One thread after the other, or a later order might be followed before an earlier one. False: there was nothing to do. */
static bool orders_follow(void)
{
	critical_enter(); /* a handler must not jump out of it */
	shim_lock_take();
	bool mine = !following && orders_len;
	while (mine && orders_len) {
		struct order some[ORDERS_MAX];
		int some_len = orders_len;
		memcpy(some, orders, sizeof(some));
		orders_len = 0;
		following = true;
		shim_lock_drop();
		for (int i = 0; i < some_len; i++)
			follow_order(&some[i]);
		shim_lock_take();
		following = false;
	}
	shim_lock_drop();
	critical_leave();
	return mine;
}

/* Takes what the provider has sent. True: there may be more. */
static bool rpc_hear(void)
{
	struct conn *done[PENDING_MAX];
	int done_len = 0;
	bool more = true, full;
	int saved = errno;

	shim_lock_take();
	/* before the socket: the word moves on once more after what it stands for has been sent */
	const struct registry_header *page = atomic_load(&registry);
	uint32_t told = page ? atomic_load((const _Atomic uint32_t *)&page->orders) : 0;
	while (more && rpc_fd >= 0 && done_len < PENDING_MAX) {
		struct conn *conn = rpc_receive(&more);
		if (conn)
			done[done_len++] = conn;
	}
	full = orders_len == ORDERS_MAX;
	if (!more && !full && page)
		atomic_store(&orders_heard, told);
	let_go(done, done_len);
	bool followed = orders_follow();
	errno = saved;
	return full && followed;
}

void rpc_poll(void)
{
	static _Atomic int64_t polled_at, asked_at;
	static _Atomic uint32_t answers_heard;
	const struct registry_header *page = atomic_load_explicit(&registry, memory_order_acquire);
	uint32_t told = page ? atomic_load_explicit((const _Atomic uint32_t *)&page->answers, memory_order_acquire) : 0;

	/* a provider that has died moves no word any more: now and then its socket is asked all the same */
	if (likely(page && told == atomic_load_explicit(&answers_heard, memory_order_relaxed))) {
		int64_t coarse = coarse_ns();
		if (likely(coarse - atomic_load_explicit(&asked_at, memory_order_relaxed) < UNTOLD_EVERY_NS))
			return;
		atomic_store_explicit(&asked_at, coarse, memory_order_relaxed);
	}
	int64_t now = now_ns();
	if (now - atomic_load_explicit(&polled_at, memory_order_relaxed) < POLL_EVERY_NS)
		return;
	atomic_store_explicit(&polled_at, now, memory_order_relaxed);
	atomic_store_explicit(&answers_heard, told, memory_order_relaxed);
	while (rpc_hear())
		;
}

/*
 * Who only looks at the registry, or has nothing to ask because all is promoted, sends nothing: then only the socket tells
 * of a provider's end. Once it has, the next one is looked for, which must hear of what we have.
 */
static void provider_check(void)
{
	static _Atomic int64_t checked_at;
	int64_t now = coarse_ns();

	if (now - atomic_load_explicit(&checked_at, memory_order_relaxed) < CHECK_EVERY_NS)
		return;
	atomic_store_explicit(&checked_at, now, memory_order_relaxed);
	if (atomic_load_explicit(&rpc_fd, memory_order_relaxed) >= 0)
		rpc_poll();
	else if (atomic_load_explicit(&introduced, memory_order_relaxed) && config.socket[0])
		rpc_ensure();
}

bool rpc_asks_connect(void)
{
	const struct registry_header *page = atomic_load_explicit(&registry, memory_order_acquire);

	if (unlikely(!page) && config.socket[0]) {
		/* Nothing has been heard of it yet: once in the life of a process, and of a provider, its word is waited for. */
		int64_t deadline = now_ns() + MEET_NS;
		rpc_ensure();
		while (atomic_load(&rpc_fd) >= 0 && !(page = atomic_load(&registry)) && !stalled) {
			struct pollfd item = {.fd = rpc_fd, .events = POLLIN};
			raw_poll(&item, 1, ASK_LOOK_MS);
			rpc_hear();
			if (now_ns() > deadline)
				stalled = true;
		}
	}
	return page && atomic_load_explicit((const _Atomic uint32_t *)&page->asks_connect, memory_order_relaxed) != 0;
}

void rpc_listen(void)
{
	provider_check();
	const struct registry_header *page = atomic_load_explicit(&registry, memory_order_acquire);

	if (likely(page) && likely(atomic_load_explicit((const _Atomic uint32_t *)&page->orders, memory_order_acquire) ==
	                           atomic_load_explicit(&orders_heard, memory_order_relaxed)))
		return;
	if (unlikely(!page && atomic_load(&inherited)) && atomic_exchange(&inherited, false))
		rpc_ensure();
	if (atomic_load_explicit(&rpc_fd, memory_order_relaxed) >= 0)
		while (rpc_hear())
			;
}

/*
 * Whoever sleeps on managed connections hears the provider, too: its socket is in the set, edge-triggered, and wakes one of
 * those that sleep, who asks rpc_listen(). `watched` belongs to the set.
 */
void rpc_watch(int epfd, _Atomic uint32_t *watched, uint64_t data)
{
	struct epoll_event event = {.events = EPOLLIN | EPOLLET | EPOLLEXCLUSIVE, .data.u64 = data};

	if (likely(word_load(*watched) == atomic_load_explicit(&rpc_serial, memory_order_relaxed)))
		return;
	int saved = errno;
	shim_lock_take();
	word_store(*watched, rpc_serial);
	if (rpc_fd >= 0 && real.epoll_ctl(epfd, EPOLL_CTL_ADD, rpc_fd, &event) < 0 && errno != EEXIST)
		shim_log("orders of the provider will not wake set %d: %d", epfd, errno);
	shim_lock_drop();
	errno = saved;
}

static uint32_t bucket_of(const struct conn_slot *slot, uint64_t secret)
{
	uint64_t total = 0;

	for (int end = 0; end < 2; end++) {
		uint64_t value = 0xCBF29CE484222325ull ^ secret;
		uint8_t text[18];
		uint16_t port = end ? slot->remote_port : slot->local_port;
		memcpy(text, end ? slot->remote_addr : slot->local_addr, 16);
		text[16] = (uint8_t)port;
		text[17] = (uint8_t)(port >> 8);
		for (int i = 0; i < 18; i++)
			value = (value ^ text[i]) * 0x100000001B3ull;
		total += value;
	}
	return (uint32_t)((total ^ (total >> 32)) % REGISTRY_BUCKETS);
}

/* Fills in what proves the socket: kernel-told addresses and cookies. */
static bool describe(struct conn *conn, int fd, struct rpc_msg *record)
{
	struct conn_slot *slot = conn->slot;
	socklen_t len = sizeof(record->cookie);

	memcpy(record->local_addr, slot->local_addr, 16);
	memcpy(record->remote_addr, slot->remote_addr, 16);
	record->local_port = slot->local_port;
	record->remote_port = slot->remote_port;
	if (real.getsockopt(fd, SOL_SOCKET, SO_COOKIE, &record->cookie, &len) < 0)
		return false;
	len = sizeof(record->netns_cookie);
	if (real.getsockopt(fd, SOL_SOCKET, SO_NETNS_COOKIE, &record->netns_cookie, &len) < 0)
		return false;
	slot->cookie = record->cookie;
	record->token = conn->token;
	record->protocol = conn->explicit ? conn->explicit->protocol : 0;
	memcpy(record->bell_page_id, conn->bell->id, 16);
	record->bell_index = conn->bell->index;
	return true;
}

static bool random_bytes(uint8_t *to, size_t len)
{
	return (size_t)real.syscall(SYS_getrandom, (long)to, (long)len, 1, 0, 0, 0) == len;
}

/* An address as the records hold it: IPv4 is v4-mapped. */
static bool is_v4(const uint8_t addr[16])
{
	static const uint8_t mapped[12] = {[10] = 0xff, [11] = 0xff};

	return memcmp(addr, mapped, sizeof(mapped)) == 0;
}

/* A UDP socket at the connection's local address, by which the provider finds out whether the two ends reach each other. */
static int path_socket(const struct conn_slot *slot)
{
	bool v4 = is_v4(slot->local_addr);
	struct sockaddr_in in = {.sin_family = AF_INET};
	struct sockaddr_in6 in6 = {.sin6_family = AF_INET6};
	const struct sockaddr *address = v4 ? (struct sockaddr *)&in : (struct sockaddr *)&in6;

	memcpy(&in.sin_addr, slot->local_addr + 12, 4);
	memcpy(&in6.sin6_addr, slot->local_addr, 16);
	int fd = real.socket(v4 ? AF_INET : AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd >= 0 && real.syscall(SYS_bind, fd, (long)address, v4 ? sizeof(in) : sizeof(in6), 0, 0, 0) < 0) {
		raw_close(fd);
		return -1;
	}
	return fd;
}

static bool local_peer(const struct conn_slot *slot);

/* Sends an offer or a claim, with what the provider wants as proof before the descriptors of the channel. */
static bool rpc_send_proven(struct conn *conn, int fd, struct rpc_msg *record, const int *channel, int channel_len)
{
	uint32_t wants = atomic_load(&rpc_wants);
	int fds[OFFER_FDS_MAX], fds_len = 0, path = -1;

	if (wants & WELCOME_POSSESSION)
		fds[fds_len++] = fd;
	if (wants & WELCOME_PATH && !local_peer(conn->slot)) { /* who is near is in the same namespace */
		path = path_socket(conn->slot);
		if (path < 0)
			return false;
		fds[fds_len++] = path;
	}
	memcpy(fds + fds_len, channel, (size_t)channel_len * sizeof(int));
	bool sent = rpc_send(record, fds, fds_len + channel_len);
	if (sent && wants & WELCOME_POSSESSION)
		atomic_store(&conn->lent, rpc_serial);
	if (path >= 0)
		raw_close(path);
	return sent;
}

/*
 * Whether a duplicate of the socket may be in the provider's queue, where it would hide a close. It is there until the
 * provider reads on; the kernel tells whether it has. Of a connection that is lost, or of our parent, nobody tells.
 */
bool rpc_lent(struct conn *conn)
{
	int queued = 0;

	if (likely(!atomic_load(&conn->lent)))
		return false;
	shim_lock_take();
	uint32_t serial = atomic_load(&conn->lent); /* the answer may have come in between */
	bool lent =
	    serial && (serial != rpc_serial || rpc_fd < 0 || real.ioctl(rpc_fd, SIOCOUTQ, &queued) < 0 || queued > 0);
	shim_lock_drop();
	return lent;
}

/* shim_lock held */
static void offer(struct conn *conn, int fd)
{
	struct rpc_msg record = {.type = RPC_OFFER};
	int segment = channel_create(config.ring_size, config.ring_size);

	if (segment < 0) {
		conn_pin(conn, REASON_NO_RESOURCES);
		return;
	}
	record.ring_size[0] = record.ring_size[1] = config.ring_size;
	int fds[3] = {segment, conn->bell->fd, conn->bell->page_fd};
	if (!random_bytes(record.segment_id, 16) || !describe(conn, fd, &record) || !pending_add(conn)) {
		raw_close(segment);
		return;
	}
	memcpy(conn->slot->segment_id, record.segment_id, 16);
	word_store(conn->slot->state, STATE_OFFERED);
	word_store(conn->slot->reason, REASON_WAITING_FOR_PEER);
	if (!rpc_send_proven(conn, fd, &record, fds, 3)) {
		raw_close(segment);
		struct conn *mine = pending_take(conn->token);
		if (mine) { /* else the provider is lost, and so is the conn's entry */
			refused(conn, REASON_NO_PROVIDER);
			atomic_fetch_sub(&conn->refs, 1); /* never the last: the caller's descriptor holds one */
		}
		return;
	}
	conn->pending_segment_fd = own_fd(segment); /* -1 where descriptors are short: the answer is then refused */
	shim_log("fd %d offered", fd);
}

static void claim(struct conn *conn, int fd)
{
	struct rpc_msg record = {.type = RPC_CLAIM};
	int fds[2] = {conn->bell->fd, conn->bell->page_fd};

	if (!describe(conn, fd, &record) || !pending_add(conn))
		return;
	word_store(conn->slot->state, STATE_OFFERED);
	word_store(conn->slot->reason, REASON_WAITING_FOR_PEER);
	if (!rpc_send_proven(conn, fd, &record, fds, 2)) {
		struct conn *mine = pending_take(conn->token);
		if (mine) {
			refused(conn, REASON_NO_PROVIDER);
			atomic_fetch_sub(&conn->refs, 1);
		}
		return;
	}
	shim_log("fd %d claimed", fd);
}

/* The other end is in our network namespace, by its address. */
static bool local_peer(const struct conn_slot *slot)
{
	static const uint8_t loopback6[16] = {[15] = 1};

	if (is_v4(slot->remote_addr) && slot->remote_addr[12] == 127)
		return true;
	return memcmp(slot->remote_addr, loopback6, 16) == 0 || memcmp(slot->remote_addr, slot->local_addr, 16) == 0;
}

void rpc_consider(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;
	uint64_t bytes = word_load(slot->tx_tcp_bytes) + word_load(slot->rx_tcp_bytes);
	bool at_once = conn_at_once(conn);
	uint32_t after = at_once ? 0 : config.promote_after_calls;

	/* An order to promote may come in another thread while connect() is under way: its role stands before this flag. */
	if (!(atomic_load_explicit(&slot->flags, memory_order_acquire) & SLOT_CONNECTED))
		return;
	/* The accepting side asks a little earlier, so that it never misses the moment the offer is made. */
	if (slot->role == ROLE_PASSIVE)
		after /= 2;
	if (unlikely(!after && conn->backoff)) /* even what is to be promoted at once asks more and more rarely */
		after = 1;
	if (word_load(conn->calls) < (after << conn->backoff) && (bytes < config.promote_after_bytes || conn->backoff))
		return;
	if (slot_has(slot, SLOT_STAYS))
		return;
	if (unlikely(atomic_load(&has_io_uring))) {
		conn_pin(conn, REASON_IO_URING);
		return;
	}
	if (conn->backoff && coarse_ns() < conn->again_at)
		return;
	rpc_listen();
	if (unlikely(slot_has(slot, SLOT_DEMOTED)))
		return;
	const struct registry_header *now = atomic_load(&registry);
	if (slot->role == ROLE_PASSIVE && conn->bucket_index && now && conn->bucket_epoch == atomic_load(&registry_epoch)) {
		/* the common look, without any lock: has an offer come for this bucket? */
		uint32_t word = atomic_load_explicit((_Atomic uint32_t *)((uint8_t *)now + REGISTRY_BUCKETS_OFFSET) +
		                                     conn->bucket_index - 1, memory_order_acquire);
		if (!(word & 0xff) || word == conn->bucket_seen) {
			if (unlikely(word_load(slot->reason) == REASON_YOUNG))
				word_store(slot->reason, REASON_PEER_ABSENT);
			return;
		}
	}
	int saved = errno;
	/* A program that waits by calls we cannot see would wait for ever: a socket that does not block is promoted only after
	 * a wait for it has come through us, unless the user wants it at once. Where we came late such calls are likely: a
	 * libuv loop that was there before us may register sockets by io_uring. */
	if (!word_load(conn->waited) && !at_once && (config.promote_after_calls || config.embedded) &&
	    (real.fcntl64(fd, F_GETFL, 0) & O_NONBLOCK)) {
		word_store(conn->calls, 0);
		errno = saved;
		return;
	}
	if (!atomic_load_explicit(&slot->local_port, memory_order_acquire))
		conn_set_addresses(conn, fd);
	if (!word_load(slot->local_port)) { /* not connected any more */
		errno = saved;
		return;
	}
	bool far = !local_peer(slot);
	if (far && atomic_load(&rpc_answered) && !(atomic_load(&rpc_wants) & WELCOME_FAR)) {
		conn_pin(conn, REASON_REMOTE);
		errno = saved;
		return;
	}
	shim_lock_take();
	if (!rpc_up()) {
		word_store(conn->calls, 0); /* ask again later */
		word_store(slot->reason, REASON_NO_PROVIDER);
	} else if (!welcomed) {
		bool more = true;
		while (more && !welcomed && rpc_fd >= 0)
			rpc_receive(&more);
	}
	now = atomic_load(&registry);
	if (welcomed && far && !(atomic_load(&rpc_wants) & WELCOME_FAR))
		word_store(conn->calls, 0); /* pinned at the next look */
	else if (welcomed && now && !now->closing && word_load(slot->state) == STATE_NATIVE) {
		if (!conn->token)
			conn->token = ++tokens;
		if (slot->role == ROLE_PASSIVE && (!conn->bucket_index || conn->bucket_epoch != registry_epoch)) {
			conn->bucket_index = bucket_of(slot, now->secret) + 1;
			conn->bucket_epoch = registry_epoch;
			conn->bucket_seen = 0;
		}
		uint32_t word = conn->bucket_index
		                    ? atomic_load((_Atomic uint32_t *)((uint8_t *)now + REGISTRY_BUCKETS_OFFSET) +
		                                  conn->bucket_index - 1)
		                    : 0;
		bool go = slot->role == ROLE_ACTIVE || ((word & 0xff) && word != conn->bucket_seen);
		if (go && !conn_alone(conn)) {
			word_store(slot->reason, REASON_SHARED_BY_FORK);
			word_store(conn->calls, 0);
			go = false;
		}
		if (go && set_wants_pin(conn)) {
			conn_pin(conn, REASON_EPOLL_UNSUPPORTED);
			go = false;
		}
		if (go && !conn->bell) {
			conn->bell = set_bell_for(conn);
			if (!conn->bell) {
				shim_lock_drop();
				struct bell *mine = bell_self();
				shim_lock_take();
				/* without the lock another thread may have come this way with this connection */
				go = welcomed && word_load(slot->state) == STATE_NATIVE && !slot_has(slot, SLOT_STAYS);
				if (go && !conn->bell)
					conn->bell = mine;
				else
					mine = NULL;
				if (mine)
					atomic_fetch_add(&mine->refs, 1);
			} else {
				atomic_fetch_add(&conn->bell->refs, 1);
			}
		}
		if (go && !conn->bell) {
			conn_pin(conn, REASON_NO_RESOURCES);
		} else if (go && slot->role == ROLE_ACTIVE) {
			offer(conn, fd);
		} else if (go) {
			conn->bucket_seen = word;
			claim(conn, fd);
		}
	}
	let_go(NULL, 0);
	if (unlikely(atomic_load_explicit(&orders_len, memory_order_relaxed)))
		orders_follow();
	errno = saved;
}

void rpc_withdraw(struct conn *conn)
{
	struct rpc_msg record = {.type = RPC_WITHDRAW, .token = conn->token};

	shim_lock_take();
	struct conn *mine = pending_take(conn->token);
	if (mine && rpc_fd >= 0)
		rpc_send(&record, NULL, 0);
	if (mine)
		refused(conn, REASON_NONE);
	let_go(&mine, mine ? 1 : 0);
}

void rpc_after_fork(void)
{
	/* The connection and what is pending on it are the parent's. */
	own_fd_close(rpc_fd);
	rpc_fd = -1;
	rpc_serial++;
	retry_at = 0;
	atomic_store(&introduced, false);
	welcomed = false;
	atomic_store(&registry, NULL);
	memset(pending, 0, sizeof(pending));
	pending_lost = 0;
	memset(asks, 0, sizeof(asks));
	stalled = false;
	atomic_store(&rpc_pending, 0);
	atomic_store(&inherited, true);
	orders_len = 0;
	following = false;
}

/* shim_lock held. An entry for a question, or -1. */
static int ask_take(int64_t now, int64_t deadline)
{
	for (int i = 0; i < ASKS_MAX; i++)
		if (!asks[i].token || asks[i].deadline + ASK_TIMEOUT_NS < now) {
			asks[i].token = ++tokens;
			asks[i].deadline = deadline;
			asks[i].state = ASK_WAITING;
			return i;
		}
	return -1;
}

/*
 * The wait holds no lock, and takes in whatever comes meanwhile. Signal handlers run during it, and may ask, too; the calls
 * that ask cannot be interrupted in the kernel either, so it goes on after them.
 */
int rpc_ask(struct rpc_msg *record, const int *fds, int fds_len, struct rpc_answer *answer)
{
	struct conn *done[PENDING_MAX];
	int at = -1, failed = -EAGAIN, saved = errno;
	uint64_t token = 0;
	int64_t now = now_ns(), deadline = now + ASK_TIMEOUT_NS + record->wait_ms * 1000000ll;
	bool sent = false;

	while (failed == -EAGAIN) {
		int done_len = 0;
		struct pollfd item = {.fd = -1, .events = POLLIN};
		bool more = true;
		shim_lock_take();
		if (at < 0 && rpc_up())
			at = ask_take(now, deadline);
		if (at >= 0 && !token)
			token = record->token = asks[at].token;
		if (at < 0 || asks[at].token != token) { /* else: a handler forked, and this is the child */
			failed = -ENOTCONN;
		} else {
			if (!sent && rpc_fd >= 0 && !(stalled && !record->protocol))
				sent = rpc_send(record, fds, fds_len);
			while (more && rpc_fd >= 0 && done_len < PENDING_MAX) {
				struct conn *conn = rpc_receive(&more);
				if (conn)
					done[done_len++] = conn;
			}
			if (asks[at].state == ASK_ANSWERED) {
				*answer = asks[at].answer;
				failed = 0;
			} else if (asks[at].state == ASK_LOST || rpc_fd < 0) {
				failed = -ENOTCONN;
			} else if (now_ns() > deadline || (stalled && !record->protocol)) {
				failed = -ETIMEDOUT;
				stalled = true;
			}
			if (failed != -EAGAIN)
				asks[at].token = 0;
			item.fd = rpc_fd;
			item.events |= sent ? 0 : POLLOUT;
		}
		let_go(done, done_len);
		orders_follow();
		if (failed == -EAGAIN)
			raw_poll(&item, 1, ASK_LOOK_MS);
	}
	errno = saved;
	return failed;
}
