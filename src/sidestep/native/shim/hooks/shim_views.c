/*
 * shim_views.c - rings as memory of the program, called by sidestep.rings.
 *
 * A program that looks into a ring has a mapping of its own, which outlives the connection for as long as the program keeps
 * views of it. It shows the ring twice, one after the other, and then the spill twice. So every piece is contiguous, but for
 * one in the ring that goes on in the spill, or back. Receiving rings are mapped read-only. The peer can write to the same
 * memory at any time, so bytes are copied before they are judged.
 */
#include "shim_call.h"

#include <sys/mman.h>

/* Place of `at`, in the ring or its spill, in a mapping of sidestep_map(). */
static void piece_place(const struct channel_ring *ring, const uint8_t *at, struct sidestep_piece *piece)
{
	uintptr_t offset = (uintptr_t)at - (uintptr_t)ring->data;

	piece->offset = offset < ring->size ? (uint32_t)offset : 2 * ring->size + (uint32_t)(at - ring->spill);
	piece->size = ring->size + ring->spill_size;
}

/* The one ends where the ring, or the spill, does, and the other begins where it begins. */
static bool wraps(const struct channel_ring *ring, const struct iovec *one, const struct iovec *other)
{
	const uint8_t *end = (uint8_t *)one->iov_base + one->iov_len, *next = other->iov_base;

	return (next == ring->data && end == ring->data + ring->size) ||
	       (next == ring->spill && end == ring->spill + ring->spill_size);
}

static uint64_t rx_position(struct conn_slot *slot)
{
	return word_load(slot->rx_tcp_bytes) + word_load(slot->rx_ring_bytes);
}

/* Bytes to read by ring. 0: they are at *piece; -EAGAIN: none, or other bytes come first; recv() knows. */
static int conn_look(struct conn *conn, int fd, struct sidestep_piece *piece)
{
	struct conn_slot *slot = conn->slot;
	int64_t there = 0;

	if (!conn->managed)
		return -EAGAIN;
	conn_advance(conn, fd);
	slot_lock(&slot->rx_lock);
	if (conn->managed && rx_by_ring(slot)) {
		there = channel_rx_avail(&conn->channel);
		if (there > 0) {
			struct iovec pieces[CHANNEL_PIECES];
			int n = channel_rx_pieces(&conn->channel, 0, (size_t)there, pieces);
			piece_place(&conn->channel.rx, pieces[0].iov_base, piece);
			piece->len = (uint32_t)pieces[0].iov_len;
			/* The piece goes on in the mapping where it began anew. */
			if (n > 1 && wraps(&conn->channel.rx, &pieces[0], &pieces[1]))
				piece->len += (uint32_t)pieces[1].iov_len;
			channel_report(&conn->channel.tail_reported, atomic_load(conn->channel.own.head) + piece->len);
		}
	}
	slot_unlock(&slot->rx_lock);
	return there > 0 ? 0 : -EAGAIN;
}

/*
 * The bytes that have come by ring. 0 or -EAGAIN, as conn_look(); serial and position are set in any case, to 0 and 0 of a
 * socket that is not tracked.
 */
EXPORT int sidestep_look(int fd, struct sidestep_piece *piece)
{
	HELD conn = conn_hold(fd);

	*piece = (struct sidestep_piece){0};
	if (!conn)
		return -EAGAIN;
	piece->serial = conn->serial;
	int result = conn_look(conn, fd, piece);
	piece->position = rx_position(conn->slot);
	return result;
}

/* Takes `len` bytes from the front. 0; -ESTALE: `piece` is not the front any more; -EAGAIN: the bytes are on TCP. */
EXPORT int sidestep_consume(int fd, const struct sidestep_piece *piece, size_t len)
{
	HELD conn = conn_hold(fd);
	int result = -EAGAIN;

	if (!conn || conn->serial != piece->serial)
		return conn || piece->serial ? -ESTALE : -EAGAIN;
	struct conn_slot *slot = conn->slot;
	slot_lock(&slot->rx_lock);
	if (rx_position(slot) != piece->position) {
		result = -ESTALE;
	} else if (conn->managed && rx_by_ring(slot)) {
		int64_t there = channel_rx_avail(&conn->channel);
		if (there >= 0 && (size_t)there >= len) {
			channel_rx_consume(&conn->channel, len);
			word_store(slot->rx_ring_bytes, slot->rx_ring_bytes + len);
			word_store(slot->rx_ring_msgs, slot->rx_ring_msgs + 1);
			rx_finish(conn);
			result = 0;
		}
	}
	slot_unlock(&slot->rx_lock);
	if (result == 0 && unlikely(conn_notice(conn) && rx_spaced(conn)))
		conn_advance(conn, fd); /* see recv_turn() in shim_recv.c */
	if (unlikely(slot_has(slot, SLOT_LEAVES)))
		conn_leave_drained(conn, fd);
	return result;
}

/*
 * Reserves room behind the tail, to be filled in place. Until it is committed or released no other thread or process sends by
 * ring: a send waits, as if the room were taken. 0; -EAGAIN: there is none; -EDEADLK: this thread has the room already.
 * -ENOTCONN: the bytes do not go by ring, or send() has to report why they go nowhere.
 */
static int conn_reserve(struct conn *conn, int fd, size_t wanted, struct sidestep_piece *piece)
{
	struct conn_slot *slot = conn->slot;
	enum step step = STEP_KERNEL;
	bool moved_over = false;
	size_t room = 0;

	/* a sleeper of another process would not wake when the room is released */
	if (!conn->managed || !conn_alone(conn))
		return -ENOTCONN;
	conn_advance(conn, fd);
	slot_lock(&slot->tx_lock);
	if (conn->managed) {
		bool on_ring = tx_by_ring(slot);
		uint32_t error = word_load(slot->error);
		step = error || slot_has(slot, SLOT_WR_SHUT | SLOT_RESET | SLOT_PEER_GONE)
		           ? STEP_KERNEL
		           : tx_room_look(conn, fd, wanted, &room);
		moved_over = on_ring != (tx_by_ring(slot));
	}
	if (step == STEP_DONE) {
		uint64_t tail = atomic_load(conn->channel.own.tail);
		piece->serial = conn->serial;
		piece->position = tail;
		piece_place(&conn->channel.tx, channel_tx_place(&conn->channel, tail, &(size_t){room}), piece);
		piece->len = (uint32_t)(room < wanted ? room : wanted); /* free room lies on one side of the two */
		atomic_store(&slot->tx_reserver, (uint64_t)shim_pid << 32 | self.tid);
		slot_set(slot, SLOT_RESERVED);
	}
	slot_unlock(&slot->tx_lock);
	if (unlikely(moved_over))
		set_conn_switched(conn);
	if (step != STEP_EMPTY)
		return step == STEP_DONE ? 0 : -ENOTCONN;
	if (slot_has(slot, SLOT_RESERVED) && reserved_by_self(conn))
		return -EDEADLK;
	atomic_fetch_or(&conn->channel.tx_line->want_space, WANT_STICKY);
	full_fence();
	set_conn_arm(conn, false);
	return -EAGAIN;
}

static void unreserve(struct conn *conn)
{
	slot_clear(conn->slot, SLOT_RESERVED); /* full fence: those that wait store want_space, then look */
	if (conn->managed && atomic_load(&conn->channel.tx_line->want_space))
		conn_wake_own(conn);
}

/* Sends what was written there. 0; -ENOTCONN: it does not go by ring any more, and is reserved as before. */
EXPORT int sidestep_commit(int fd, const struct sidestep_piece *piece, size_t len)
{
	HELD conn = conn_hold(fd);
	bool done = false;

	if (!conn)
		return -ENOTCONN;
	struct conn_slot *slot = conn->slot;
	slot_lock(&slot->tx_lock);
	if (conn->managed && conn->serial == piece->serial && slot_has(slot, SLOT_RESERVED) && len <= piece->len &&
	    (uint32_t)(atomic_load(&slot->tx_reserver) >> 32) == shim_pid && /* a child of fork() has it only by memory */
	    tx_by_ring(slot) && atomic_load(conn->channel.own.tail) == piece->position &&
	    !slot_has(slot, SLOT_WR_SHUT | SLOT_RESET | SLOT_PEER_GONE) && !word_load(slot->error)) {
		conn_sends_here(conn);
		channel_tx_publish(&conn->channel, len);
		word_store(slot->tx_ring_bytes, slot->tx_ring_bytes + len);
		word_store(slot->tx_ring_msgs, slot->tx_ring_msgs + 1);
		peer_wake(conn);
		unreserve(conn);
		done = true;
	}
	slot_unlock(&slot->tx_lock);
	if (!done)
		return -ENOTCONN;
	conn_check(conn, fd); /* a recall may have crossed it, as in conn_send() */
	if (unlikely(!word_load(trim_due)))
		word_store(trim_due, true);
	return 0;
}

/* Gives the room back, if it is this process that has it. */
EXPORT void sidestep_unreserve(int fd, const struct sidestep_piece *piece)
{
	HELD conn = conn_hold(fd);

	if (!conn || !piece->serial)
		return;
	struct conn_slot *slot = conn->slot;
	slot_lock(&slot->tx_lock);
	if (conn->serial == piece->serial && slot_has(slot, SLOT_RESERVED) &&
	    (uint32_t)(atomic_load(&slot->tx_reserver) >> 32) == shim_pid)
		unreserve(conn);
	slot_unlock(&slot->tx_lock);
}

/* Like conn_reserve(). */
EXPORT int sidestep_reserve(int fd, size_t wanted, struct sidestep_piece *piece)
{
	HELD conn = conn_hold(fd);

	*piece = (struct sidestep_piece){0};
	return conn ? conn_reserve(conn, fd, wanted, piece) : -ENOTCONN;
}

static bool maps_twice(uint8_t *from, size_t size, uint8_t *to)
{
	/* mremap(2): of shared memory, an old size of 0 makes a second mapping of the same pages */
	return mremap(from, 0, size, MREMAP_MAYMOVE | MREMAP_FIXED, to) != MAP_FAILED &&
	       mremap(from, 0, size, MREMAP_MAYMOVE | MREMAP_FIXED, to + size) != MAP_FAILED;
}

/*
 * The address of a ring of the connection `serial`, mapped twice in a row, and then its spill, twice as well; the caller
 * unmaps it. NULL: errno says why.
 */
EXPORT void *sidestep_map(int fd, uint64_t serial, int sending)
{
	HELD conn = conn_hold(fd);

	if (!conn || conn->serial != serial || !conn->managed) {
		errno = ENOTCONN;
		return NULL;
	}
	const struct channel_ring *ring = sending ? &conn->channel.tx : &conn->channel.rx;
	size_t size = ring->size, spill_size = ring->spill_size, len = 2 * (size + spill_size);
	uint8_t *base = mmap(NULL, len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (base == MAP_FAILED)
		return NULL;
	if (maps_twice(ring->data, size, base) && maps_twice(ring->spill, spill_size, base + 2 * size) &&
	    (sending || mprotect(base, len, PROT_READ) == 0))
		return base;
	int failed = errno;
	munmap(base, len);
	errno = failed;
	return NULL;
}
