/*
 * shim_bell.c - a connection that has come by exec gets rid of being rung always (HINT_RING_ALWAYS; see shim_travel.c).
 *
 * The program that took it up has a doorbell whose page its peer does not map. It names that by the provider to the peer's
 * family, whose slot stands in the channel; a random number in its own side of the channel proves that it is the peer. Once the
 * peer says that it looks there, the bit goes. That needs one holder at each end: two programs at one end look at two words.
 * Where the program that attached the connection is alone again, its word is the one that the peer looks at, and the bit goes
 * at once. All this is a matter of speed.
 */
#include "shim_provider.h"
#include "shim_set.h"
#include "shim_switch.h"

#include <sys/random.h>

#define BELLS_EVERY_NS 20000000 /* while a connection is rung always, or may have become so */
#define BELL_AGAIN_NS 1000000000ll /* before a doorbell is named again that the peer has not taken; doubled each time */
#define BELL_WAITS_MAX 8
#define LEARN_TURNS 10000 /* milliseconds that a program waits, before it begins, for a provider to know its doorbell */
#define LOST_TURNS 1000 /* and so many for news of a provider that has dropped the connection by which it is told */

static _Atomic int64_t look_at;
static uint32_t executing; /* threads in an exec, which has let go of connections for as long; guarded by shim_lock */

/* shim_lock held. */
static bool one_holder(struct conn *conn)
{
	return !executing && conn_alone(conn);
}

/* shim_lock held. Nobody rings the doorbell of the program before for this connection. */
static void heir_known(struct conn *conn)
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
static void bell_say(struct conn *conn)
{
	const struct channel_side *remote = conn->channel.remote;
	struct channel_side *local = conn->channel.local;
	struct rpc_msg record = {.type = RPC_BELL, .doorbell_index = conn->doorbell->index};
	const uint64_t there = atomic_load(&local->bell);
	uint64_t bell = conn->bell_number;
	int fds[2] = {conn->doorbell->fd, conn->doorbell->page_fd};

	if (!(word_load(provider.wants) & WELCOME_BELLS) || !(atomic_load(&remote->knows) & KNOWS_BELL) || provider.fd < 0)
		return;
	if (bell && there == BELL_TAKEN)
		return;
	if (!bell || there != bell) { /* a child that has executed a program may have withdrawn it */
		if (!random_number(&bell) || bell <= BELL_TAKEN)
			return;
		conn->bell_number = bell;
		atomic_store(&local->bell, bell);
	}
	record.cookie = bell;
	record.token = (uint64_t)atomic_load(&remote->slot) << 32 | atomic_load(&remote->generation);
	memcpy(record.arena_id, remote->family_id, sizeof(record.arena_id));
	memcpy(record.doorbell_page_id, conn->doorbell->id, sizeof(record.doorbell_page_id));
	if (!rpc_send(&record, fds, 2))
		return;
	if (conn->bell_said != provider.serial)
		conn->bell_waits = 0;
	conn->bell_said = provider.serial;
	conn->bell_again_at = coarse_ns() + (BELL_AGAIN_NS << conn->bell_waits);
	if (conn->bell_waits < BELL_WAITS_MAX)
		conn->bell_waits++;
}

/*
 * Who goes on with the connection by descriptors of ours has to hear the doorbell that the peer rings. A name that is under way is
 * withdrawn, unless the peer has taken it: it takes none of a program that is no more. Nobody names another meanwhile, as there
 * is one more holder, or an exec has begun.
 */
int bell_settle(struct conn *conn)
{
	shim_lock_take();
	uint64_t number = conn->bell_number;
	const bool named = number && !conn_relayed(conn);
	const bool rings_ours =
		!conn->taken_up ||
		(named && !atomic_compare_exchange_strong(&conn->channel.local->bell, &number, 0) && number == BELL_TAKEN);
	const int fd = rings_ours ? conn->doorbell->fd : conn->doorbell->old_fd;
	shim_lock_drop();
	return fd;
}

/* ---- with a provider between ---- */

/*
 * The family names one more doorbell: how many it has named, behind what proves that they are its own. 0: nothing can prove it. So
 * the provider knows whether another holder has named one since.
 */
static uint64_t bell_count(struct conn *conn)
{
	_Atomic uint64_t *bell = &conn->channel.local->bell;
	const uint64_t count = BELL_COUNT;
	uint64_t before = atomic_load(bell), proof = before & ~count, next;

	if (!proof && (!random_number(&proof) || !(proof &= ~count)))
		return 0;
	do {
		next = (before & ~count ? before & ~count : proof) | ((before + 1) & count);
	} while (!atomic_compare_exchange_strong(bell, &before, next));
	return next;
}

/* shim_lock held: nothing is forked. False: it cannot go out now. */
static bool relay_tell(struct conn *conn, int line)
{
	const struct remote_doorbell *remote = conn->remote_doorbell;
	const int fds[2] = {conn->doorbell->fd, conn->doorbell->page_fd};
	struct rpc_msg record = {.type = RPC_BELL,
	                         .flags = one_holder(conn) ? DOORBELLS_ALONE : 0,
	                         .token = atomic_load(&conn->channel.remote->hint),
	                         .cookie = bell_count(conn),
	                         .doorbell_index = conn->doorbell->index};

	memcpy(record.arena_id, remote->id, sizeof(record.arena_id));
	memcpy(record.doorbell_page_id, conn->doorbell->id, sizeof(record.doorbell_page_id));
	bool sent = record.cookie && rpc_send_over(line, &record, fds, 2) == 0;
	if (sent)
		conn->bell_named = record.cookie;
	if (sent && record.flags)
		conn->bell_alone = record.cookie;
	return sent;
}

/* Whether the provider has taken our last, or one that was named after it. */
static bool relay_knows(const struct conn *conn)
{
	const uint64_t ahead = atomic_load(&conn->channel.remote->bell_seen) - conn->bell_named;

	return conn->bell_named && (ahead & BELL_COUNT) <= BELL_COUNT / 2 && atomic_load(&conn->channel.remote->bell_seen);
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
		if (items[1].revents & (POLLHUP | POLLERR | POLLNVAL)) { /* it has read what it was sent, or will not */
			items[1].fd = -1;
			turns = turns < LOST_TURNS ? turns : LOST_TURNS;
		}
	}
	shim_lock_take();
	const bool known = relay_knows(conn);
	if (known)
		heir_known(conn);
	shim_lock_drop();
	shim_log("slot %u: its provider %s", slot_index(conn->slot), known ? "knows our doorbell" : "does not answer");
	return known || relay_gone(conn) || (sent && items[1].fd >= 0);
}

/* shim_lock held. The provider knows doorbells of programs that are no more: it learns that ours is the only one. */
static void relay_forgets(struct conn *conn)
{
	if (one_holder(conn) && provider.fd >= 0 && relay_tell(conn, provider.fd))
		conn->bell_again_at = coarse_ns() + BELL_AGAIN_NS;
}

/* True: its provider may come to know fewer doorbells. */
static bool relay_look(struct conn *conn)
{
	const struct channel_side *local = conn->channel.local;

	shim_lock_take();
	const uint64_t bell = atomic_load(&local->bell);
	const bool alone = bell == conn->bell_alone && (!bell || relay_knows(conn));
	if (relay_knows(conn))
		heir_known(conn);
	if (!alone && coarse_ns() >= conn->bell_again_at)
		relay_forgets(conn);
	shim_lock_drop();
	return !alone;
}

void bells_before_fork(void)
{
	for (uint32_t fd = 0; word_load(bells_due) && fd < atomic_load(&fd_end); fd++) {
		struct conn *conn = conn_get((int)fd);
		if (conn && conn->managed && conn_relayed(conn) && atomic_load(&conn->channel.local->bell) != conn->bell_alone)
			relay_forgets(conn);
	}
}

void bells_on_exec(int change)
{
	shim_lock_take();
	executing += (uint32_t)change;
	shim_lock_drop();
}

/* True: it is rung always, and may not have to be for ever. */
static bool bell_look(struct conn *conn)
{
	struct channel_side *local = conn->channel.local;

	if (conn_relayed(conn))
		return relay_look(conn);
	if (!(atomic_load(&local->hint) & HINT_RING_ALWAYS))
		return false;
	shim_lock_take();
	bool one = one_holder(conn);
	bool known = one && (!conn->taken_up ||
	                     (conn->bell_number && atomic_load(&conn->channel.remote->bell_seen) == conn->bell_number));
	if (known) {
		atomic_fetch_and(&local->hint, ~HINT_RING_ALWAYS);
		heir_known(conn);
		full_fence(); /* the peer looks at our word from now on, which has been right for as long as we had it */
		shim_log("slot %u: its doorbell is known", slot_index(conn->slot));
	} else if (one && (conn->bell_said != provider.serial || coarse_ns() >= conn->bell_again_at)) {
		bell_say(conn);
	}
	let_go(NULL, 0); /* what is lost with a provider that has gone */
	return !known;
}

void bells_look(void)
{
	int64_t now;
	bool more = false;

	if (likely(!word_load(bells_due)))
		return;
	now = coarse_ns();
	if (now < word_load(look_at))
		return;
	word_store(look_at, now + BELLS_EVERY_NS);
	KEEP_ERRNO;
	for (uint32_t fd = 0; fd < atomic_load(&fd_end); fd++) {
		HELD conn = conn_hold((int)fd);
		if (conn && conn->managed && (bell_look(conn) || word_load(conn->slot->holders) > 1))
			more = true;
	}
	if (!more)
		word_store(bells_due, false);
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
 * The peer of `conn` has said so; NULL: it is not ours. The old doorbell stays for threads that are just looking at it. Where the
 * peer gives hints these come by the old page, and it goes on ringing always.
 */
void bell_heard(struct conn *conn, const struct bell *bell)
{
	struct remote_doorbell *doorbell = NULL;
	uint64_t number = bell->number;
	bool taken = false;

	file_put(bell->fds[0], NULL); /* theirs to hide from now on */
	file_put(bell->fds[1], NULL);
	shim_lock_take();
	if (conn && conn->managed && one_holder(conn) && !slot_has(conn->slot, SLOT_RELAYED | SLOT_RELAY_OVER) &&
	    conn->bells_len < BELLS_MAX && !looks_for_hints(conn) && number > BELL_TAKEN &&
	    atomic_load(&conn->channel.remote->bell) == number) {
		doorbell = remote_doorbell_get(bell->id, bell->index, bell->fds[0], bell->fds[1], -1);
		taken = true;
	}
	if (doorbell && !atomic_compare_exchange_strong(&conn->channel.remote->bell, &number, BELL_TAKEN)) {
		remote_doorbell_unref(doorbell);
		doorbell = NULL;
	}
	if (doorbell) {
		conn->bells[conn->bells_len++] = conn->remote_doorbell;
		__atomic_store_n(&conn->remote_doorbell, doorbell, __ATOMIC_RELEASE);
		atomic_store(&conn->channel.local->bell_seen, bell->number);
		shim_log("slot %u: the peer has another doorbell", slot_index(conn->slot));
	}
	shim_lock_drop();
	for (int i = 0; !taken && i < 2; i++)
		raw_close(bell->fds[i]); /* without the lock: what another process sends may take long to close */
	if (doorbell)
		peer_wake(conn); /* it may be asleep, and looks then */
}
