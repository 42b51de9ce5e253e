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
#include <netinet/in.h>
#include <string.h>
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
#define CHECK_EVERY_NS 100000000     /* the provider's socket is asked at least this often whether it is still there */
#define BACKOFF_MAX 10               /* an unanswered offer doubles the calls until the next one, 2^10 times at most */

_Atomic uint32_t rpc_pending;
static int rpc_fd = -1;
static _Atomic bool introduced;
static int64_t retry_at;
static bool welcomed;
static const struct registry_header *_Atomic registry; /* NULL: no provider, or none that has answered yet */
static _Atomic uint32_t registry_epoch;                 /* one more with each provider: buckets are of a registry */
static uint64_t tokens;
static struct {
	uint64_t token;
	struct conn *conn; /* holds a reference */
} pending[PENDING_MAX];

static void rpc_lost(void);

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
	if (real.connect(fd, (struct sockaddr *)&address, sizeof(address)) < 0) {
		raw_close(fd);
		return false;
	}
	rpc_fd = own_fd(fd);
	welcomed = false;
	return rpc_fd >= 0;
}

/* Sends one record with descriptors; false if it cannot go out now. */
static bool rpc_send(struct rpc_msg *record, const int *fds, int fds_len)
{
	union {
		struct cmsghdr header;
		char bytes[CMSG_SPACE(4 * sizeof(int))];
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
	shim_lock_drop();
}

/* The first connection to a near peer: from now on the provider can tell of this process, whatever becomes of it. */
void rpc_introduce(void)
{
	if (likely(atomic_load_explicit(&introduced, memory_order_relaxed)) || atomic_exchange(&introduced, true))
		return;
	rpc_ensure();
}

static struct conn *pending_take(uint64_t token)
{
	for (int i = 0; i < PENDING_MAX; i++)
		if (pending[i].conn && pending[i].token == token) {
			struct conn *conn = pending[i].conn;
			pending[i].conn = NULL;
			atomic_fetch_sub(&rpc_pending, 1);
			return conn;
		}
	return NULL;
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
		word_store(slot->state, slot_has(slot, SLOT_PIN) ? STATE_PINNED : STATE_NATIVE);
		word_store(slot->reason, reason);
	}
	word_store(conn->calls, 0);
	/* The accepting side asks for nothing until the bucket changes, so only offers grow rarer. */
	if (slot->role == ROLE_ACTIVE && conn->backoff < BACKOFF_MAX)
		conn->backoff++;
	own_fd_close(conn->pending_segment_fd);
	conn->pending_segment_fd = -1;
}

/* shim_lock held. Everything with the provider is void; whoever still waits goes back to TCP. References are dropped later. */
static int lost_conns(struct conn **lost)
{
	int n = 0;

	for (int i = 0; i < PENDING_MAX; i++)
		if (pending[i].conn) {
			refused(pending[i].conn, REASON_NO_PROVIDER);
			lost[n++] = pending[i].conn;
			pending[i].conn = NULL;
			atomic_fetch_sub(&rpc_pending, 1);
		}
	return n;
}

static struct conn *orphans[PENDING_MAX];
static int orphans_len;

static void rpc_lost(void)
{
	own_fd_close(rpc_fd);
	rpc_fd = -1;
	welcomed = false;
	atomic_store(&registry, NULL);
	orphans_len = lost_conns(orphans);
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

	if (fds_len != (claimer ? 3 : 2) || fd < 0 || segment < 0 || set_wants_pin(conn) || !local || slot_has(slot, SLOT_PIN) ||
	    !conn_alone(conn)) {
		shim_log("cannot attach: %d descriptors, fd %d, holders %u", fds_len, fd, word_load(slot->holders));
		refused(conn, !conn_alone(conn) ? REASON_SHARED_BY_FORK : REASON_NO_RESOURCES);
		return fds_len;
	}
	int failed = 0;
	if (!claimer) {
		/* no longer ours to hide: channel_map asks about it by the calls that hide our own */
		file_put(segment, NULL);
		conn->pending_segment_fd = -1;
		fds[fds_len++] = segment; /* closed by the caller, with the others */
	}
	int *bell_fds = claimer ? fds + 1 : fds;
	remote = remote_bell_get(record->bell_page_id, record->bell_index, bell_fds[0], bell_fds[1]);
	bell_fds[0] = bell_fds[1] = -1;
	if (!remote)
		failed = -EPROTO;
	else
		failed = conn_attach(conn, fd, segment, claimer ? 1 : 0, remote, local);
	if (failed) {
		shim_log("fd %d: attach failed: %d", fd, failed);
		if (remote)
			remote_bell_unref(remote);
		refused(conn, failed == -EPROTO ? REASON_PEER_LAYOUT : REASON_NO_RESOURCES);
	} else if (claimer) {
		memcpy(slot->segment_id, record->segment_id, 16);
	}
	return fds_len;
}

static enum reason_code refusal_reason(uint32_t refusal)
{
	switch (refusal) {
	case REFUSAL_NO_OFFER:
	case REFUSAL_EXPIRED:
		return REASON_PEER_ABSENT;
	case REFUSAL_NO_BUDGET:
	case REFUSAL_TOO_MANY:
		return REASON_NO_RESOURCES;
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
	ssize_t n = raw_recvmsg(rpc_fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return NULL;
	if (n <= 0) {
		rpc_lost();
		return NULL;
	}
	*more = true;
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
			conn = pending_take(record.token);
			if (conn && word_load(conn->slot->state) == STATE_OFFERED)
				fds_len = attach(conn, &record, fds, fds_len, record.type == RPC_ATTACH);
			break;
		case RPC_REFUSED:
			conn = pending_take(record.token);
			shim_log("refused: %u", record.reason);
			if (conn)
				refused(conn, refusal_reason(record.reason));
			break;
		}
	}
	for (int i = 0; i < fds_len; i++)
		if (fds[i] >= 0)
			raw_close(fds[i]);
	return conn;
}

static void drop_orphans(struct conn **list, int n)
{
	for (int i = 0; i < n; i++)
		conn_unref(list[i]);
}

void rpc_poll(void)
{
	static _Atomic int64_t polled_at;
	struct conn *done[PENDING_MAX + 8], *lost[PENDING_MAX];
	int64_t now = now_ns();
	int done_len = 0, lost_len;
	bool more = true;
	int saved = errno;

	if (now - atomic_load_explicit(&polled_at, memory_order_relaxed) < POLL_EVERY_NS)
		return;
	atomic_store_explicit(&polled_at, now, memory_order_relaxed);
	shim_lock_take();
	while (more && rpc_fd >= 0 && done_len < PENDING_MAX) {
		struct conn *conn = rpc_receive(&more);
		if (conn)
			done[done_len++] = conn;
	}
	lost_len = orphans_len;
	memcpy(lost, orphans, (size_t)lost_len * sizeof(*lost));
	orphans_len = 0;
	shim_lock_drop();
	drop_orphans(done, done_len);
	drop_orphans(lost, lost_len);
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
	memcpy(record->bell_page_id, conn->bell->id, 16);
	record->bell_index = conn->bell->index;
	return true;
}

static bool random_bytes(uint8_t *to, size_t len)
{
	return (size_t)real.syscall(SYS_getrandom, (long)to, (long)len, 1, 0, 0, 0) == len;
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
	if (!rpc_send(&record, fds, 3)) {
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
	if (!rpc_send(&record, fds, 2)) {
		struct conn *mine = pending_take(conn->token);
		if (mine) {
			refused(conn, REASON_NO_PROVIDER);
			atomic_fetch_sub(&conn->refs, 1);
		}
		return;
	}
	shim_log("fd %d claimed", fd);
}

static bool local_peer(const struct conn_slot *slot)
{
	static const uint8_t loopback6[16] = {[15] = 1}, mapped[12] = {[10] = 0xff, [11] = 0xff};

	if (memcmp(slot->remote_addr, mapped, 12) == 0 && slot->remote_addr[12] == 127)
		return true;
	return memcmp(slot->remote_addr, loopback6, 16) == 0 || memcmp(slot->remote_addr, slot->local_addr, 16) == 0;
}

/* Who only looks at the registry, or finds it closing, sends nothing: then only the socket tells of a provider's end. */
static void provider_check(void)
{
	static _Atomic int64_t checked_at;
	struct timespec coarse;

	clock_gettime(CLOCK_MONOTONIC_COARSE, &coarse); /* a few ns */
	int64_t now = coarse.tv_sec * 1000000000ll + coarse.tv_nsec;
	if (now - atomic_load_explicit(&checked_at, memory_order_relaxed) < CHECK_EVERY_NS)
		return;
	atomic_store_explicit(&checked_at, now, memory_order_relaxed);
	rpc_poll();
}

void rpc_consider(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;
	uint64_t bytes = word_load(slot->tx_tcp_bytes) + word_load(slot->rx_tcp_bytes);
	uint32_t after = config.promote_after_calls;

	/* The accepting side asks a little earlier, so that it never misses the moment the offer is made. */
	if (slot->role == ROLE_PASSIVE)
		after /= 2;
	if (word_load(conn->calls) < (after << conn->backoff) && (bytes < config.promote_after_bytes || conn->backoff))
		return;
	if (slot_has(slot, SLOT_PIN) || !slot_has(slot, SLOT_CONNECTED))
		return;
	provider_check();
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
	 * a wait for it has come through us, unless the user wants it at once. */
	if (!conn->waited && config.promote_after_calls && (real.fcntl64(fd, F_GETFL, 0) & O_NONBLOCK)) {
		word_store(conn->calls, 0);
		errno = saved;
		return;
	}
	if (!atomic_load_explicit((_Atomic uint16_t *)&slot->local_port, memory_order_acquire))
		conn_set_addresses(conn, fd);
	if (!word_load(slot->local_port)) { /* not connected any more */
		errno = saved;
		return;
	}
	if (!local_peer(slot)) {
		conn_pin(conn, REASON_REMOTE);
		errno = saved;
		return;
	}
	struct conn *lost[PENDING_MAX];
	int lost_len;
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
	if (welcomed && now && !now->closing && word_load(slot->state) == STATE_NATIVE) {
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
				go = welcomed && word_load(slot->state) == STATE_NATIVE && !slot_has(slot, SLOT_PIN);
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
	lost_len = orphans_len;
	memcpy(lost, orphans, (size_t)lost_len * sizeof(*lost));
	orphans_len = 0;
	shim_lock_drop();
	drop_orphans(lost, lost_len);
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
	shim_lock_drop();
	if (mine)
		conn_unref(mine);
}

void rpc_after_fork(void)
{
	/* The connection and what is pending on it are the parent's. */
	own_fd_close(rpc_fd);
	rpc_fd = -1;
	retry_at = 0;
	atomic_store(&introduced, false);
	welcomed = false;
	atomic_store(&registry, NULL);
	for (int i = 0; i < PENDING_MAX; i++)
		pending[i].conn = NULL;
	orphans_len = 0;
	atomic_store(&rpc_pending, 0);
}
