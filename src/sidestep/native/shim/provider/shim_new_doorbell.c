/*
 * shim_new_doorbell.c - a connection that has come by exec gets rid of being rung always (HINT_RING_ALWAYS; see shim_travel.c).
 *
 * The program that took it up has a doorbell whose page its peer does not map. The provider passes its name to the peer's
 * family, whose slot stands in the channel. A random number in its own side of the channel proves that it is the peer. Once
 * the peer says that it looks there, the bit goes. That needs one holder at each end: two programs at one end look at two
 * words. If the program that attached the connection is alone again, the peer looks at its word, and the bit goes at once.
 * All this is a matter of speed.
 */
#include "shim_provider.h"
#include "shim_set.h"
#include "shim_switch.h"

#include <sys/random.h>

#define ANNOUNCE_EVERY_NS 20000000 /* interval of looks while a connection is rung always, or may have become so */
#define ANNOUNCE_AGAIN_NS \
	1000000000ll /* time before a doorbell is named again that the peer has not taken; doubled each time */
#define ANNOUNCE_WAITS_MAX 8
#define LEARN_TURNS 10000 /* milliseconds that a program waits, before it begins, for a provider to know its doorbell */
#define LOST_TURNS 1000 /* milliseconds for news of a provider that has dropped the connection by which it reports */

static _Atomic int64_t look_at;
static uint32_t executing; /* threads in an exec, which has let go of connections for as long; guarded by shim_lock */

/* shim_lock held. */
static bool one_holder(struct conn *conn)
{
	return !executing && conn_alone(conn);
}

/* shim_lock held. Nobody rings the doorbell of the program before for this connection. */
static void successor_known(struct conn *conn)
{
	if (conn->taken_up)
		doorbell_known(conn->doorbell);
	conn->taken_up = false;
}

static bool random_number(uint64_t *number)
{
	return real.syscall(SYS_getrandom, (long)number, sizeof(*number), GRND_NONBLOCK, 0, 0, 0) == sizeof(*number);
}

/* shim_lock held. The same number each time: the peer may have taken it while we ask again, and looks there soon. */
static void new_doorbell_announce(struct conn *conn)
{
	const struct channel_side *remote = conn->channel.remote;
	struct channel_side *local = conn->channel.local;
	struct rpc_msg record = {.type = RPC_NEW_DOORBELL, .doorbell_index = conn->doorbell->index};
	const uint64_t there = atomic_load(&local->doorbell_nonce);
	uint64_t nonce = conn->announced_nonce;
	int fds[2] = {conn->doorbell->fd, conn->doorbell->page_fd};

	if (!(word_load(provider.wants) & WELCOME_NEW_DOORBELLS) || !(atomic_load(&remote->knows) & KNOWS_NEW_DOORBELL) ||
	    provider.fd < 0)
		return;
	if (nonce && there == NONCE_TAKEN)
		return;
	if (!nonce || there != nonce) { /* a child that has executed a program may have withdrawn it */
		if (!random_number(&nonce) || nonce <= NONCE_TAKEN)
			return;
		conn->announced_nonce = nonce;
		atomic_store(&local->doorbell_nonce, nonce);
	}
	record.cookie = nonce;
	record.token = (uint64_t)atomic_load(&remote->slot) << 32 | atomic_load(&remote->generation);
	memcpy(record.arena_id, remote->family_id, sizeof(record.arena_id));
	memcpy(record.doorbell_page_id, conn->doorbell->id, sizeof(record.doorbell_page_id));
	if (!rpc_send(&record, fds, 2))
		return;
	if (conn->announced_by != provider.serial)
		conn->announce_waits = 0;
	conn->announced_by = provider.serial;
	conn->announce_again_at = coarse_ns() + (ANNOUNCE_AGAIN_NS << conn->announce_waits);
	if (conn->announce_waits < ANNOUNCE_WAITS_MAX)
		conn->announce_waits++;
}

/*
 * A process that goes on with the connection by descriptors of ours has to wait on the doorbell that the peer rings. A name
 * that is under way is withdrawn, unless the peer has taken it: it takes none of a program that has ended. No process names
 * another meanwhile, as there is one more holder, or an exec has begun.
 */
int new_doorbell_settle(struct conn *conn)
{
	shim_lock_take();
	uint64_t number = conn->announced_nonce;
	const bool named = number && !conn_relayed(conn);
	const bool rings_ours =
		!conn->taken_up ||
		(named && !atomic_compare_exchange_strong(&conn->channel.local->doorbell_nonce, &number, 0) &&
	     number == NONCE_TAKEN);
	const int fd = rings_ours ? conn->doorbell->fd : conn->doorbell->old_fd;
	shim_lock_drop();
	return fd;
}

/* ---- with a provider between ---- */

/*
 * The family names one more doorbell: how many it has named, behind what proves that they are its own. 0: nothing can prove it. So
 * the provider knows whether another holder has named one since.
 */
static uint64_t new_doorbell_count(struct conn *conn)
{
	_Atomic uint64_t *nonce = &conn->channel.local->doorbell_nonce;
	const uint64_t count = NONCE_COUNT;
	uint64_t before = atomic_load(nonce), proof = before & ~count, next;

	if (!proof && (!random_number(&proof) || !(proof &= ~count)))
		return 0;
	do {
		next = (before & ~count ? before & ~count : proof) | ((before + 1) & count);
	} while (!atomic_compare_exchange_strong(nonce, &before, next));
	return next;
}

/* shim_lock held: nothing is forked. False: it cannot go out now. */
static bool relay_tell(struct conn *conn, int line)
{
	const struct remote_doorbell *remote = conn->remote_doorbell;
	const int fds[2] = {conn->doorbell->fd, conn->doorbell->page_fd};
	struct rpc_msg record = {.type = RPC_NEW_DOORBELL,
	                         .flags = one_holder(conn) ? DOORBELLS_ALONE : 0,
	                         .token = atomic_load(&conn->channel.remote->hint),
	                         .cookie = new_doorbell_count(conn),
	                         .doorbell_index = conn->doorbell->index};

	memcpy(record.arena_id, remote->id, sizeof(record.arena_id));
	memcpy(record.doorbell_page_id, conn->doorbell->id, sizeof(record.doorbell_page_id));
	bool sent = record.cookie && rpc_send_over(line, &record, fds, 2) == 0;
	if (sent)
		conn->nonce_named = record.cookie;
	if (sent && record.flags)
		conn->nonce_alone = record.cookie;
	return sent;
}

/* True if the provider has taken our last, or one that was named after it. */
static bool relay_knows(const struct conn *conn)
{
	const uint64_t ahead = atomic_load(&conn->channel.remote->doorbell_nonce_seen) - conn->nonce_named;

	return conn->nonce_named && (ahead & NONCE_COUNT) <= NONCE_COUNT / 2 &&
	       atomic_load(&conn->channel.remote->doorbell_nonce_seen);
}

/*
 * A connection that has just come to this program: its provider is to know our doorbell before anything else is done. `line` is a
 * connection to it. False: it cannot learn of it. A provider that takes long hears it all the same, and nothing of ours before.
 */
bool relay_learns(struct conn *conn, int line)
{
	struct remote_doorbell *remote = conn->remote_doorbell;
	struct pollfd items[2] = {{.fd = remote->liveness_fd}, {.fd = line, .events = 0}};
	bool sent = false;
	int turns = LEARN_TURNS;

	for (; turns > 0 && !(sent && relay_knows(conn)) && !relay_gone(conn); turns--) {
		if (!sent) {
			shim_lock_take();
			sent = relay_tell(conn, line);
			shim_lock_drop();
		}
		if (raw_poll(items, 2, 1) > 0 && items[0].revents)
			atomic_store(&remote->dead, true);
		if (items[1].revents & (POLLHUP | POLLERR | POLLNVAL)) { /* all is read, or never will be */
			items[1].fd = -1;
			turns = turns < LOST_TURNS ? turns : LOST_TURNS;
		}
	}
	shim_lock_take();
	const bool known = relay_knows(conn);
	if (known)
		successor_known(conn);
	shim_lock_drop();
	shim_log("slot %u: its provider %s", slot_index(conn->slot), known ? "knows our doorbell" : "does not answer");
	return known || relay_gone(conn) || (sent && items[1].fd >= 0);
}

/* shim_lock held. The provider knows doorbells of programs that are no more: it learns that ours is the only one. */
static void relay_forgets(struct conn *conn)
{
	if (one_holder(conn) && provider.fd >= 0 && relay_tell(conn, provider.fd))
		conn->announce_again_at = coarse_ns() + ANNOUNCE_AGAIN_NS;
}

/* True: its provider may come to know fewer doorbells. */
static bool relay_look(struct conn *conn)
{
	const struct channel_side *local = conn->channel.local;

	shim_lock_take();
	const uint64_t nonce = atomic_load(&local->doorbell_nonce);
	const bool alone = nonce == conn->nonce_alone && (!nonce || relay_knows(conn));
	if (relay_knows(conn))
		successor_known(conn);
	if (!alone && coarse_ns() >= conn->announce_again_at)
		relay_forgets(conn);
	shim_lock_drop();
	return !alone;
}

void new_doorbells_before_fork(void)
{
	for (uint32_t fd = 0; word_load(announce_due) && fd < atomic_load(&fd_end); fd++) {
		struct conn *conn = conn_get((int)fd);
		if (conn && conn->managed && conn_relayed(conn) &&
		    atomic_load(&conn->channel.local->doorbell_nonce) != conn->nonce_alone)
			relay_forgets(conn);
	}
}

void new_doorbells_on_exec(int change)
{
	shim_lock_take();
	executing += (uint32_t)change;
	shim_lock_drop();
}

/* True: it is rung always, and may not have to be for ever. */
static bool new_doorbell_look(struct conn *conn)
{
	struct channel_side *local = conn->channel.local;

	if (conn_relayed(conn))
		return relay_look(conn);
	if (!(atomic_load(&local->hint) & HINT_RING_ALWAYS))
		return false;
	shim_lock_take();
	bool one = one_holder(conn);
	bool known =
		one && (!conn->taken_up || (conn->announced_nonce &&
	                                atomic_load(&conn->channel.remote->doorbell_nonce_seen) == conn->announced_nonce));
	if (known) {
		atomic_fetch_and(&local->hint, ~HINT_RING_ALWAYS);
		successor_known(conn);
		full_fence(); /* the peer looks at our word from now on, which has been right for as long as we had it */
		shim_log("slot %u: its doorbell is known", slot_index(conn->slot));
	} else if (one && (conn->announced_by != provider.serial || coarse_ns() >= conn->announce_again_at)) {
		new_doorbell_announce(conn);
	}
	let_go(NULL, 0); /* connections lost with a provider that has gone */
	return !known;
}

void new_doorbells_look(void)
{
	int64_t now;
	bool more = false;

	if (likely(!word_load(announce_due)))
		return;
	now = coarse_ns();
	if (now < word_load(look_at))
		return;
	word_store(look_at, now + ANNOUNCE_EVERY_NS);
	KEEP_ERRNO;
	for (uint32_t fd = 0; fd < atomic_load(&fd_end); fd++) {
		HELD conn = conn_hold((int)fd);
		if (conn && conn->managed && (new_doorbell_look(conn) || word_load(conn->slot->holders) > 1))
			more = true;
	}
	if (!more)
		word_store(announce_due, false);
}

/* shim_lock held. Whether a set, of a parent maybe, looks for the peer's hints in the old page. */
static bool looks_for_hints(const struct conn *conn)
{
	for (const struct member *member = conn->members; member; member = member->next)
		if (member->hinted)
			return true;
	return (atomic_load(&conn->channel.local->hint) & ~HINT_RING_ALWAYS) != 0;
}

/*
 * The peer of `conn` has announced that; NULL: it is not ours. The old doorbell stays for threads that are just looking at
 * it. If the peer gives hints these come by the old page, and it goes on ringing always.
 */
void new_doorbell_received(struct conn *conn, const struct new_doorbell *new_doorbell)
{
	struct remote_doorbell *doorbell = NULL;
	uint64_t number = new_doorbell->number;
	bool taken = false;

	file_put(new_doorbell->fds[0], NULL); /* theirs to hide from now on */
	file_put(new_doorbell->fds[1], NULL);
	shim_lock_take();
	if (conn && conn->managed && one_holder(conn) && !slot_has(conn->slot, SLOT_RELAYED | SLOT_RELAY_OVER) &&
	    conn->old_doorbells_len < OLD_DOORBELLS_MAX && !looks_for_hints(conn) && number > NONCE_TAKEN &&
	    atomic_load(&conn->channel.remote->doorbell_nonce) == number) {
		doorbell =
			remote_doorbell_get(new_doorbell->id, new_doorbell->index, new_doorbell->fds[0], new_doorbell->fds[1], -1);
		taken = true;
	}
	if (doorbell && !atomic_compare_exchange_strong(&conn->channel.remote->doorbell_nonce, &number, NONCE_TAKEN)) {
		remote_doorbell_unref(doorbell);
		doorbell = NULL;
	}
	if (doorbell) {
		conn->old_doorbells[conn->old_doorbells_len++] = conn->remote_doorbell;
		__atomic_store_n(&conn->remote_doorbell, doorbell, __ATOMIC_RELEASE);
		atomic_store(&conn->channel.local->doorbell_nonce_seen, new_doorbell->number);
		shim_log("slot %u: the peer has another doorbell", slot_index(conn->slot));
	}
	shim_lock_drop();
	for (int i = 0; !taken && i < 2; i++)
		raw_close(new_doorbell->fds[i]); /* a close without the lock: this may take long */
	if (doorbell)
		peer_wake(conn); /* a peer that is asleep looks then */
}
