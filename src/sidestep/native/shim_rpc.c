/*
 * shim_rpc.c - what the provider says: answers, orders, and what it stands for in the registry.
 *
 * Answers are picked up by whatever hooked call comes next. Who asks for an explicit socket waits, for a bounded time.
 */
#include "shim_provider.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>

#define POLL_EVERY_NS 10000          /* how often answers are looked for while calls come quickly */
#define UNTOLD_EVERY_NS 20000000     /* and, where no answer is told, the socket this often */
#define CHECK_EVERY_NS 100000000     /* the provider's socket is asked at least this often whether it is still there */
#define ASKS_MAX 32                  /* questions of this process at a time; one more is answered as without a provider */
#define ASK_TIMEOUT_NS 3000000000ll  /* EXPLICIT_ASK_TIMEOUT_S of limits.py: a provider that is slower is none */
#define MEET_NS 1000000000ll         /* a provider that has not welcomed us by then is none */
#define ASK_LOOK_MS 2                /* another thread may have read the answer while we went to sleep: look that often */
#define ORDERS_MAX 64                /* orders of the provider taken in at a time */

static _Atomic uint32_t orders_heard;  /* the registry's word when they were last asked for */
static _Atomic bool inherited;         /* by fork(): the provider does not know yet that we hold connections */
static struct order {
	uint16_t type;
	uint64_t slot_generation;
} orders[ORDERS_MAX]; /* taken in, not followed yet */
static _Atomic int orders_len;
static bool following; /* a thread follows them, in their order */

/*
 * Questions of explicit sockets, whose calls wait for the answer. Whichever thread reads an answer stores it here; who
 * waits looks. An entry that nobody waits for any more (a signal handler jumped out) is free when its time is up.
 */
static struct {
	uint64_t token; /* 0: free */
	int64_t deadline;
	uint32_t serial; /* of the connection by which it was asked: the answer is lost with it */
	bool answered;
	struct rpc_answer answer;
} asks[ASKS_MAX];
static bool stalled; /* a call has waited in vain, and nothing has come since: who can do without an answer does */

/* The provider closes its duplicate before it answers. */
static struct conn *answered(uint64_t token)
{
	struct conn *conn = pending_take(token);

	if (conn)
		atomic_store(&conn->lent, 0);
	return conn;
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
	atomic_store(&provider.wants, record->flags & (WELCOME_POSSESSION | WELCOME_FAR));
	atomic_store(&provider.answered, true);
	/* The old page, of a provider that is gone, may still be looked at by another thread: it stays mapped. */
	atomic_fetch_add(&provider.registry_epoch, 1);
	atomic_store(&provider.registry, map);
	provider.welcomed = true;
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

/* An answer that a call waits for. */
static void take_answer(const struct rpc_msg *record)
{
	for (int i = 0; i < ASKS_MAX; i++)
		if (asks[i].token && asks[i].token == record->token) {
			struct rpc_answer *answer = &asks[i].answer;
			*answer = (struct rpc_answer){.error = record->error, .reason = record->reason,
			                              .local_port = record->local_port, .remote_port = record->remote_port};
			memcpy(answer->local_addr, record->local_addr, sizeof(answer->local_addr));
			memcpy(answer->remote_addr, record->remote_addr, sizeof(answer->remote_addr));
			asks[i].answered = true;
		}
}

/* Does what a record says; the conn whose reference is to be dropped, or NULL. */
static struct conn *take_record(const struct rpc_msg *record, int *fds, int *fds_len)
{
	struct conn *conn = NULL;

	switch (record->type) {
	case RPC_WELCOME:
		welcome(record, *fds_len == 1 ? fds[0] : -1);
		break;
	case RPC_ATTACH:
	case RPC_CLAIMED:
		conn = answered(record->token);
		if (conn && word_load(conn->slot->state) == STATE_OFFERED)
			*fds_len = attach(conn, record, fds, *fds_len, record->type == RPC_ATTACH);
		break;
	case RPC_REFUSED:
		conn = answered(record->token);
		shim_log("refused: %u", record->reason);
		if (conn)
			refused(conn, rpc_refusal_reason(record->reason));
		break;
	case RPC_ANSWER:
		take_answer(record);
		break;
	case RPC_DEMOTE:
	case RPC_PROMOTE:
		orders[orders_len++] = (struct order){record->type, record->token};
		break;
	}
	return conn;
}

/* Takes one answer; returns the conn whose reference is to be dropped, or NULL; *more: another may wait. */
struct conn *rpc_receive(bool *more)
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
	ssize_t n = raw_recvmsg(provider.fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
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
	if (n == (ssize_t)sizeof(record) && record.magic == RPC_MAGIC && record.version == LAYOUT_VERSION)
		conn = take_record(&record, fds, &fds_len);
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
bool orders_follow(void)
{
	if (likely(!atomic_load_explicit(&orders_len, memory_order_relaxed)))
		return false;
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
	const struct registry_header *page = atomic_load(&provider.registry);
	uint32_t told = page ? atomic_load((const _Atomic uint32_t *)&page->orders) : 0;
	while (more && provider.fd >= 0 && done_len < PENDING_MAX) {
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
	const struct registry_header *page = atomic_load_explicit(&provider.registry, memory_order_acquire);
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
	if (atomic_load_explicit(&provider.fd, memory_order_relaxed) >= 0)
		rpc_poll();
	else if (atomic_load_explicit(&provider.introduced, memory_order_relaxed) && config.socket[0])
		rpc_ensure();
}

bool rpc_asks_connect(void)
{
	const struct registry_header *page = atomic_load_explicit(&provider.registry, memory_order_acquire);

	if (unlikely(!page) && config.socket[0]) {
		/* Nothing has been heard of it yet: once in the life of a process, and of a provider, its word is waited for. */
		int64_t deadline = now_ns() + MEET_NS;
		rpc_ensure();
		while (atomic_load(&provider.fd) >= 0 && !(page = atomic_load(&provider.registry)) && !stalled) {
			struct pollfd item = {.fd = provider.fd, .events = POLLIN};
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
	const struct registry_header *page = atomic_load_explicit(&provider.registry, memory_order_acquire);

	if (likely(page) && likely(atomic_load_explicit((const _Atomic uint32_t *)&page->orders, memory_order_acquire) ==
	                           atomic_load_explicit(&orders_heard, memory_order_relaxed)))
		return;
	if (unlikely(!page && atomic_load(&inherited)) && atomic_exchange(&inherited, false))
		rpc_ensure();
	if (atomic_load_explicit(&provider.fd, memory_order_relaxed) >= 0)
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

	if (likely(word_load(*watched) == atomic_load_explicit(&provider.serial, memory_order_relaxed)))
		return;
	int saved = errno;
	shim_lock_take();
	word_store(*watched, provider.serial);
	if (provider.fd >= 0 && real.epoll_ctl(epfd, EPOLL_CTL_ADD, provider.fd, &event) < 0 && errno != EEXIST)
		shim_log("orders of the provider will not wake set %d: %d", epfd, errno);
	shim_lock_drop();
	errno = saved;
}

/* shim_lock held. An entry for a question, or -1. */
static int ask_take(int64_t now, int64_t deadline)
{
	for (int i = 0; i < ASKS_MAX; i++)
		if (!asks[i].token || asks[i].deadline + ASK_TIMEOUT_NS < now) {
			asks[i].token = ++provider.tokens;
			asks[i].deadline = deadline;
			asks[i].serial = provider.serial;
			asks[i].answered = false;
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
			if (!sent && provider.fd >= 0 && !(stalled && !record->protocol))
				sent = rpc_send(record, fds, fds_len);
			while (more && provider.fd >= 0 && done_len < PENDING_MAX) {
				struct conn *conn = rpc_receive(&more);
				if (conn)
					done[done_len++] = conn;
			}
			if (asks[at].answered) {
				*answer = asks[at].answer;
				failed = 0;
			} else if (asks[at].serial != provider.serial || provider.fd < 0) {
				failed = -ENOTCONN;
			} else if (now_ns() > deadline || (stalled && !record->protocol)) {
				failed = -ETIMEDOUT;
				stalled = true;
			}
			if (failed != -EAGAIN)
				asks[at].token = 0;
			item.fd = provider.fd;
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

void rpc_after_fork(void)
{
	memset(asks, 0, sizeof(asks));
	stalled = false;
	atomic_store(&inherited, true);
	orders_len = 0;
	following = false;
}
