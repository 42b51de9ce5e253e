/*
 * shim_room.c - the number of bytes that may be unread. While the reader reads it is a ring's length. While it stands still
 * it is as much as TCP would have held. Then the sender goes on in the spill behind the ring; see channel.h.
 */
#include "shim_switch.h"

#ifndef SO_BUF_LOCK
#define SO_BUF_LOCK 72
#endif
enum { SNDBUF_LOCKED = 1, RCVBUF_LOCKED = 2 }; /* flags that it reports: linux/socket.h */
#define STEP_NS 1000000 /* a reader that has not moved for so long stands still, and may leave so much unread: */
#define STEP_SIZE (1u << 20) /* twice as much for each further step, so that a late reader does not cost the cache */
#define STEPS_MAX 32
#define STEPS_HURRIED 2 /* steps of a sender that would not wait: it would go round its loop for each ring's length */
#define WINDOW_FIRST 65536u /* bytes that a receiver takes before its first read: half of tcp_rmem's default, tcp(7) */

/* True if a living process has reserved the room behind the tail. */
bool conn_reserved(const struct conn *conn)
{
	struct conn_slot *slot = conn->slot;
	uint32_t pid = (uint32_t)(atomic_load(&slot->tx_reserver) >> 32);

	if (pid == shim_pid || !task_dead(pid, true))
		return true;
	slot_clear(slot, SLOT_RESERVED);
	return false;
}

/* Room that has to be free before a wait for room ends. */
size_t room_wanted(const struct conn *conn)
{
	uint64_t most = channel_tx_most(&conn->channel);

	return (most < conn->channel.tx.size ? (size_t)most : conn->channel.tx.size) / 4;
}

/*
 * Number of steps for which the reader has stood still: its clock restarts whenever it moves. self.full_until becomes the
 * time of the next step, if that is earlier.
 */
static uint32_t steps_stood(struct conn *conn, uint64_t head)
{
	int64_t now = now_ns(), since = word_load(conn->full_since);

	if (!since || word_load(conn->full_head) != head) {
		word_store(conn->full_head, head);
		word_store(conn->full_since, now);
		since = now;
	}
	int64_t steps = (now - since) / STEP_NS, next = since + (steps + 1) * STEP_NS;
	look_again_until(next);
	return steps < 0 ? 0 : steps < STEPS_MAX ? (uint32_t)steps : STEPS_MAX;
}

/* True if the reader alone can make room. */
bool tx_full(const struct conn *conn)
{
	uint64_t head;
	size_t room = channel_tx_look(&conn->channel, &head);
	uint64_t limit = head + channel_tx_most(&conn->channel);

	return room < room_wanted(conn) && (int64_t)(limit - channel_tx_until(&conn->channel, head)) <= 0;
}

/*
 * tx_lock held, sending by ring, without room. True: the spill has made room. The reader stands still, or the sender would not
 * wait (`hurries`), and TCP would have held as much.
 */
static bool tx_spill(struct conn *conn, bool hurries)
{
	struct conn_slot *slot = conn->slot;
	struct channel_end *end = &conn->channel;

	if (channel_tx_space(end, SIZE_MAX) < 0 || tx_full(conn))
		return false;
	uint32_t steps = steps_stood(conn, word_load(*end->own.head_seen));
	if (hurries && steps < STEPS_HURRIED)
		steps = STEPS_HURRIED;
	if (!steps || !channel_tx_spill(end, (uint64_t)STEP_SIZE << (steps - 1)))
		return false;
	uint64_t touched = word_load(*end->own.limit) - word_load(*end->own.spill_base);
	if (touched > end->tx.spill_size)
		touched = end->tx.spill_size;
	if (touched > word_load(slot->tx_spilled))
		word_store(slot->tx_spilled, touched);
	return true;
}

/*
 * Tries to make room for a thread that waits for it. True: there is some now. Else self.full_until says when to try again, if
 * that makes sense. No lock is needed; a set's may be held.
 */
bool conn_make_room(struct conn *conn, bool hurries)
{
	struct conn_slot *slot = conn->slot;
	bool made = false;

	if (!tx_by_ring(slot) || slot_has(slot, SLOT_RESERVED) || !slot_trylock(&slot->tx_lock))
		return false;
	if (conn->managed && tx_by_ring(slot) && !slot_has(slot, SLOT_RESERVED) &&
	    channel_tx_peek(&conn->channel) < room_wanted(conn))
		made = tx_spill(conn, hurries);
	slot_unlock(&slot->tx_lock);
	return made;
}

/* The size that the program has set for a buffer of the socket, as it gave it: socket(7). 0: it has set none. */
static uint32_t buffer_set(int fd, int lock, int name)
{
	int locks = 0, size = 0;

	if (!option_get(fd, SOL_SOCKET, SO_BUF_LOCK, &locks, sizeof(locks)) || !(locks & lock)) /* Linux 5.15 */
		return 0;
	return option_get(fd, SOL_SOCKET, name, &size, sizeof(size)) && size >= 2 ? (uint32_t)size / 2 : 0;
}

/*
 * Bounds how much may be unread by the buffer sizes that the programs have set, and tells the peer ours. A provider between
 * would not know of a bound, and gives room back in steps of the ring's size.
 */
void conn_bound(struct conn *conn, int fd)
{
	uint64_t own = conn_relayed(conn) ? 0 : buffer_set(fd, SNDBUF_LOCKED, SO_SNDBUF);
	uint32_t peer = word_load(conn->channel.tx_peer_line->room_max);

	word_store(conn->channel.rx_line->room_max, buffer_set(fd, RCVBUF_LOCKED, SO_RCVBUF));
	word_store(conn->slot->tx_room_max, own ? own + (peer ? peer : WINDOW_FIRST) : 0);
}
