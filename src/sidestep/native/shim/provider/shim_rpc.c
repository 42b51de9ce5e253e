/*
 * shim_rpc.c - the times at which the shim reads from the provider, asks it, or makes an offer. Any hooked call that comes
 * next picks up answers. A question of an explicit socket waits, for a bounded time. All this is in one file because each
 * part leads to the others. A command may make an offer, an offer needs addresses, and the provider is asked for these. A
 * thread that waits for an answer runs the commands that arrive meanwhile.
 */
#include "shim_provider.h"
#include "shim_address.h"
#include "shim_tcp_only.h"
#include "shim_switch.h"

#include <fcntl.h>

#define POLL_EVERY_NS 10000          /* interval of looks for answers while calls come quickly */
#define WELCOME_LOOKS 16 /* looks for a welcome with each call; then one in: */
#define WELCOME_EVERY_NS 200000 /* a fifth of a millisecond */
#define UNREPORTED_EVERY_NS 20000000     /* and how often the socket is checked without a sign of one */
#define CHECK_EVERY_NS 100000000 /* the provider's socket is asked at least this often whether it is still there */
#define ASK_TIMEOUT_NS 3000000000ll /* EXPLICIT_ASK_TIMEOUT_S of limits.py: a provider that is slower is none */
#define NAMED_TIMEOUT_NS 30000000000ll /* EXPLICIT_NAMED_TIMEOUT_S: a socket that names a protocol cannot do without */
#define MEET_NS 1000000000ll /* a provider that has not welcomed us by then is none */
#define ASK_LOOK_MS 2 /* another thread may have read the answer while we went to sleep: look that often */

static _Atomic uint32_t commands_seen; /* the registry's word when commands were last received */
static _Atomic bool inherited; /* set by fork(): the provider does not know yet that we hold connections */
static bool running; /* a thread runs commands, in the order in which they came */

static void command_run(const struct command *command)
{
	int fd;

	if (command->type == RPC_SERVE) {
		conns_serve_segment(command->segment_id);
		return;
	}
	const uint32_t generation = (uint32_t)command->slot_generation;
	HELD conn = conn_find(slot_named(command->arena_id, (uint32_t)(command->slot_generation >> 32), generation),
	                      generation, &fd);

	if (command->type == RPC_NEW_DOORBELL) {
		new_doorbell_received(conn, &command->new_doorbell);
		return;
	}
	if (!conn)
		return; /* another process of the family has it, or it has ended */
	if (command->type == RPC_DEMOTE) {
		conn_demote(conn, fd, REASON_DEMOTED, false);
	} else if (conn_promote(conn, fd, SLOT_DEMOTED)) {
		conn->backoff = 0;
		conn->again_at = 0;
		word_store(conn->calls, config.promote_after_calls);
		rpc_consider(conn, fd);
	}
}

/* One thread at a time, or a later command might be run before an earlier one. False: there was nothing to do. */
static bool commands_run(void)
{
	if (likely(!word_load(commands_len)))
		return false;
	critical_enter(); /* a handler must not jump out of it */
	shim_lock_take();
	bool mine = !running && commands_len;
	while (mine && commands_len) {
		struct command some[COMMANDS_MAX];
		int some_len = commands_len;
		memcpy(some, commands, sizeof(some));
		commands_len = 0;
		running = true;
		shim_lock_drop();
		for (int i = 0; i < some_len; i++)
			command_run(&some[i]);
		shim_lock_take();
		running = false;
	}
	shim_lock_drop();
	critical_leave();
	return mine;
}

/* shim_lock held. How many references in `done` have to be dropped; *more: there may be more to receive. */
static int receive_all(struct conn *done[PENDING_MAX], bool *more)
{
	int done_len = 0;

	*more = true;
	while (*more && provider.fd >= 0 && done_len < PENDING_MAX) {
		struct conn *conn = rpc_receive(more);
		if (conn)
			done[done_len++] = conn;
	}
	return done_len;
}

/* Takes what the provider has sent. True: there may be more. */
static bool rpc_receive_some(void)
{
	struct conn *done[PENDING_MAX];
	KEEP_ERRNO;
	bool more;

	shim_lock_take();
	/* read before the socket: the word moves once more after the commands have been sent */
	const struct registry_header *page = atomic_load(&provider.registry);
	uint32_t published = page ? atomic_load(&page->commands) : 0;
	int done_len = receive_all(done, &more);
	bool full = commands_len == COMMANDS_MAX;
	if (!more && !full && page)
		atomic_store(&commands_seen, published);
	let_go(done, done_len);
	bool ran = commands_run();
	return full && ran;
}

void rpc_poll(void)
{
	static _Atomic int64_t polled_at, asked_at;
	static _Atomic uint32_t answers_seen;
	const struct registry_header *page = atomic_load_explicit(&provider.registry, memory_order_acquire);
	uint32_t published = page ? atomic_load_explicit(&page->answers, memory_order_acquire) : 0;

	/* a dead provider moves no word any more, so its socket is checked now and then all the same */
	if (likely(page && published == word_load(answers_seen))) {
		int64_t coarse = coarse_ns();
		if (likely(coarse - word_load(asked_at) < UNREPORTED_EVERY_NS))
			return;
		word_store(asked_at, coarse);
	}
	int64_t now = now_ns();
	if (now - word_load(polled_at) < POLL_EVERY_NS)
		return;
	word_store(polled_at, now);
	word_store(answers_seen, published);
	while (rpc_receive_some())
		;
}

/*
 * A process that only looks at the registry, or whose connections are all promoted, sends nothing. Only the socket then shows
 * a provider's end. After that the shim looks for the next provider, which must learn of our connections.
 */
static void provider_check(void)
{
	static _Atomic int64_t checked_at;
	int64_t now = coarse_ns();

	if (now - word_load(checked_at) < CHECK_EVERY_NS)
		return;
	word_store(checked_at, now);
	if (word_load(provider.fd) >= 0)
		rpc_poll();
	else if (word_load(provider.introduced) && config.socket[0])
		rpc_ensure();
}

/* The registry of a provider that knows us; NULL: there is none. */
static const struct registry_header *rpc_meet(void)
{
	const struct registry_header *page = atomic_load_explicit(&provider.registry, memory_order_acquire);

	if (unlikely(!page) && config.socket[0]) {
		/* Wait for the first answer: it is waited for once in the life of a process, and of a provider. */
		int64_t deadline = now_ns() + MEET_NS;
		rpc_ensure();
		while (atomic_load(&provider.fd) >= 0 && !(page = atomic_load(&provider.registry)) && !asks_stalled) {
			struct pollfd item = {.fd = provider.fd, .events = POLLIN};
			raw_poll(&item, 1, ASK_LOOK_MS);
			rpc_receive_some();
			if (now_ns() > deadline)
				asks_stalled = true;
		}
	}
	return page;
}

bool rpc_asks_connect(void)
{
	const struct registry_header *page = rpc_meet();

	return page && word_load(page->asks_connect) != 0;
}

int rpc_line(void)
{
	KEEP_ERRNO;

	if (!rpc_meet())
		return -1;
	shim_lock_take();
	int line = provider.fd < 0 ? -1 : own_fd(real.fcntl64(provider.fd, F_DUPFD_CLOEXEC, 0));
	shim_lock_drop();
	return line;
}

void rpc_listen(void)
{
	provider_check();
	new_doorbells_look();
	if (unlikely(word_load(passes_open)))
		passes_look();
	const struct registry_header *page = atomic_load_explicit(&provider.registry, memory_order_acquire);

	if (likely(page) && likely(atomic_load_explicit(&page->commands, memory_order_acquire) == word_load(commands_seen)))
		return;
	if (unlikely(!page && atomic_load(&inherited)) && atomic_exchange(&inherited, false))
		rpc_ensure();
	if (word_load(provider.fd) >= 0)
		while (rpc_receive_some())
			;
}

/* A call that does not wait finds nothing. Its program may come back for ever, and never sleep where it hears the provider. */
void rpc_listen_passing(void)
{
	rpc_listen();
	conns_serve(NULL, 0, 0, INT64_MAX);
}

/*
 * A sleep on managed connections hears the provider, too: its socket is in the set, edge-triggered, and wakes one sleeping
 * thread, which calls rpc_listen(). `watched` belongs to the set.
 */
void rpc_watch(int epfd, _Atomic uint32_t *watched, uint64_t data)
{
	struct epoll_event event = {.events = EPOLLIN | EPOLLET | EPOLLEXCLUSIVE, .data.u64 = data};

	if (likely(word_load(*watched) == word_load(provider.serial)))
		return;
	KEEP_ERRNO;
	shim_lock_take();
	word_store(*watched, provider.serial);
	if (provider.fd >= 0 && real.epoll_ctl(epfd, EPOLL_CTL_ADD, provider.fd, &event) < 0 && errno != EEXIST)
		shim_log("commands of the provider will not wake set %d: %d", epfd, errno);
	shim_lock_drop();
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
 * shim_lock held. How long to wait for an answer. A socket that names a protocol cannot go on without one, so a busy machine
 * must not look like a missing provider. A connect() has a time of its own, as it may not block. A provider that was waited
 * for in vain gets the usual time until it says something.
 */
static int64_t patience(const struct rpc_msg *record)
{
	if (record->protocol && record->flags != ASK_CONNECT && !asks_stalled)
		return NAMED_TIMEOUT_NS;
	return ASK_TIMEOUT_NS + record->wait_ms * 1000000ll;
}

/*
 * The wait holds no lock, and receives whatever comes meanwhile. Signal handlers run during it, and may ask as well. It goes
 * on after them: the calls that ask cannot be interrupted in the kernel either.
 */
int rpc_ask(struct rpc_msg *record, const int *fds, int fds_len, struct rpc_answer *answer)
{
	struct conn *done[PENDING_MAX];
	int at = -1, failed = -EAGAIN, saved = errno;
	uint64_t token = 0;
	int64_t now = now_ns(), deadline = 0;
	bool sent = false;

	while (failed == -EAGAIN) {
		int done_len = 0;
		struct pollfd item = {.fd = -1, .events = POLLIN};
		bool more;
		shim_lock_take();
		if (!deadline)
			deadline = now + patience(record);
		if (at < 0 && rpc_up())
			at = ask_take(now, deadline);
		if (at >= 0 && !token)
			token = record->token = asks[at].token;
		if (at < 0 || asks[at].token != token) { /* else: a handler forked, and this is the child */
			failed = -ENOTCONN;
		} else {
			if (!sent && provider.fd >= 0 && !(asks_stalled && !record->protocol))
				sent = rpc_send(record, fds, fds_len);
			done_len = receive_all(done, &more);
			if (asks[at].answered) {
				*answer = asks[at].answer;
				failed = 0;
			} else if (asks[at].serial != provider.serial || provider.fd < 0) {
				failed = -ENOTCONN;
			} else if (now_ns() > deadline || (asks_stalled && !record->protocol)) {
				failed = -ETIMEDOUT;
				asks_stalled = true;
			}
			if (failed != -EAGAIN)
				asks[at].token = 0;
			item.fd = provider.fd;
			item.events |= sent ? 0 : POLLOUT;
		}
		let_go(done, done_len);
		commands_run();
		if (failed == -EAGAIN)
			raw_poll(&item, 1, ASK_LOOK_MS);
	}
	errno = saved;
	return failed;
}

/* ---- addresses: the provider knows those that the kernel does not ---- */

/* True if the two ends may be those of a connection with the provider. */
static bool may_translate(const uint8_t local[16], const uint8_t remote[16])
{
	if (address_mapped(remote))
		return address_translated(remote) || address_translated(local);
	return memcmp(local, remote, 16) == 0 && !address_near(remote) && rpc_carries_far();
}

bool address_translate(int fd, struct sockaddr_storage *local, struct sockaddr_storage *remote)
{
	struct sockaddr_storage ends[2];
	socklen_t lens[2] = {sizeof(ends[0]), sizeof(ends[1])};
	uint8_t addrs[2][16];
	uint16_t port;
	struct rpc_msg record = {.type = RPC_ASK, .flags = ASK_ADDRESSES};
	struct rpc_answer answer;
	bool shown = false;

	if (!fd_table_len)
		return false;
	KEEP_ERRNO;
	if (real.getsockname(fd, (struct sockaddr *)&ends[0], &lens[0]) == 0 &&
	    address_split((struct sockaddr *)&ends[0], lens[0], addrs[0], &port) &&
	    real.getpeername(fd, (struct sockaddr *)&ends[1], &lens[1]) == 0 &&
	    address_split((struct sockaddr *)&ends[1], lens[1], addrs[1], &port) && may_translate(addrs[0], addrs[1])) {
		int failed = rpc_ask(&record, &fd, 1, &answer);
		shim_log("names of fd %d: %d, error %u", fd, failed, failed ? 0 : answer.error);
		int family = ends[0].ss_family;
		shown = !failed && !answer.error &&
		        address_join(family, answer.local_addr, answer.local_port, &ends[0], &lens[0]) &&
		        address_join(family, answer.remote_addr, answer.remote_port, &ends[1], &lens[1]);
	}
	if (shown && local)
		*local = ends[0];
	if (shown && remote)
		*remote = ends[1];
	return shown;
}

void conn_set_addresses(struct conn *conn, int fd)
{
	struct sockaddr_storage local, remote;
	socklen_t local_len = sizeof(local), remote_len = sizeof(remote);
	struct conn_slot *slot = conn->slot;

	if (real.getsockname(fd, (struct sockaddr *)&local, &local_len) < 0 ||
	    real.getpeername(fd, (struct sockaddr *)&remote, &remote_len) < 0)
		return;
	address_translate(fd, &local, &remote);
	shim_lock_take();
	if (!slot->local_port) { /* else another thread was first, and somebody may be reading */
		uint16_t port = 0;
		address_split((struct sockaddr *)&remote, sizeof(remote), slot->remote_addr, &port);
		slot->remote_port = port;
		address_split((struct sockaddr *)&local, sizeof(local), slot->local_addr, &port);
		/* last: a thread that sees it finds the others */
		atomic_store_explicit(&slot->local_port, port, memory_order_release);
	}
	shim_lock_drop();
}

/* ---- offers ---- */

/* True if it has been used enough, and no reason against it is known without a system call. */
static bool is_due(struct conn *conn)
{
	struct conn_slot *slot = conn->slot;
	uint64_t bytes = word_load(slot->tx_tcp_bytes) + word_load(slot->rx_tcp_bytes);
	uint32_t after = conn_at_once(conn) ? 0 : config.promote_after_calls;

	/* A command to promote may come in another thread while connect() is under way: its role stands before this flag. */
	if (!(atomic_load_explicit(&slot->flags, memory_order_acquire) & SLOT_CONNECTED))
		return false;
	/* The accepting side asks a little earlier, so that it never misses the moment the offer is made. */
	if (slot->role == ROLE_PASSIVE)
		after /= 2;
	if (unlikely(!after && conn->backoff)) /* even a connection that is promoted at once asks more and more rarely */
		after = 1;
	if (word_load(conn->calls) < (after << conn->backoff) && (bytes < config.promote_after_bytes || conn->backoff))
		return false;
	if (slot_has(slot, SLOT_STAYS))
		return false;
	if (unlikely(atomic_load(&tcp_only_reason))) {
		conn_pin(conn, (enum reason_code)tcp_only_reason);
		return false;
	}
	return !conn->again_at || coarse_ns() >= conn->again_at;
}

/* True if the provider has reported gain and loss of its way to another host. */
static bool gain_known(const struct conn *conn)
{
	return word_load(conn->message_ns) && word_load(conn->gain_serial) == word_load(provider.lost);
}

/* Nanoseconds that this way gains over TCP for what it has done since that was counted last; < 0: loses. */
static double conn_gain(const struct conn *conn)
{
	struct rpc_msg now;

	if (!gain_known(conn))
		return 0;
	describe_traffic(conn, &now);
	return (double)now.promote_after_calls * (double)word_load(conn->message_ns) -
	       (double)now.promote_after_bytes * (double)word_load(conn->mib_ns) / (1 << 20) -
	       (double)now.turns * (double)word_load(conn->turn_ns);
}

/*
 * True if a connection that the provider has left on TCP for its latency might gain by now: only then is it asked anew. Else
 * its earlier traffic counts no more.
 */
static bool may_gain(struct conn *conn)
{
	if (likely(word_load(conn->slot->reason) != REASON_LATENCY) || conn_gain(conn) >= GAIN_MIN_NS || !gain_known(conn))
		return true;
	count_traffic(conn);
	word_store(conn->calls, 0);
	conn->again_at = coarse_ns() + LATENCY_NS;
	return false;
}

/* No lock is held. A connection by ring goes back to TCP if it would have been faster there, over so many turns. */
void rpc_reconsider(struct conn *conn, int fd)
{
	if (word_load(conn->slot->turns) - word_load(conn->counted_turns) < TURNS_LOOKED_AT)
		return;
	bool loses = conn_gain(conn) < -GAIN_MIN_NS;
	count_traffic(conn);
	if (loses) {
		conn->again_at = coarse_ns() + STAYS_BACK_NS;
		conn_demote(conn, fd, REASON_LATENCY, false);
	}
}

/* No lock is held. What has gone back that way returns once it gains by that. */
void rpc_return(struct conn *conn, int fd)
{
	if (word_load(conn->slot->reason) != REASON_LATENCY || coarse_ns() < conn->again_at)
		return;
	bool gains = conn_gain(conn) >= GAIN_MIN_NS;
	count_traffic(conn);
	conn->again_at = coarse_ns() + LATENCY_NS;
	if (gains)
		conn_promote(conn, fd, SLOT_DEMOTED);
}

/* True if a provider that was greeted has not answered at the last look: a busy one takes long. */
static bool welcome_waits(void)
{
	static _Atomic int64_t looked_at;
	static _Atomic uint32_t looks;

	if (likely(atomic_load_explicit(&provider.registry, memory_order_acquire)))
		return false;
	if (word_load(provider.fd) < 0)
		word_store(looks, 0);
	if (word_load(looks) < WELCOME_LOOKS) {
		word_store(looks, word_load(looks) + 1);
		return false;
	}
	int64_t now = now_ns();
	if (now - word_load(looked_at) < WELCOME_EVERY_NS)
		return true;
	word_store(looked_at, now);
	return false;
}

void rpc_consider(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;

	if (!is_due(conn) || !may_gain(conn) || welcome_waits())
		return;
	rpc_listen();
	if (unlikely(slot_has(slot, SLOT_DEMOTED)) || offer_missing(conn))
		return;
	KEEP_ERRNO;
	if (unlikely(unseen_set_has(fd))) {
		conn_pin(conn, REASON_EPOLL_UNSUPPORTED);
		return;
	}
	if (offer_bearable(conn, fd)) {
		if (!atomic_load_explicit(&slot->local_port, memory_order_acquire))
			conn_set_addresses(conn, fd);
		/* 0: it is not connected any more. Acquired anew: another thread may have set them since, where we could not. */
		if (atomic_load_explicit(&slot->local_port, memory_order_acquire)) {
			offer_make(conn, fd);
			commands_run();
		}
	}
}

void rpc_after_fork(void)
{
	atomic_store(&inherited, true);
	running = false;
}
