/*
 * channel.h - one stream connection in shared memory.
 *
 * A segment is a sealed memfd: one header page, and a *ring* and a *spill* for each direction, both powers of two long. Side
 * d writes direction d (0: the side that offered, 1: the side that claimed). The two rings come first: all that most
 * connections ever touch can be mapped apart from the spills, next to that of others. tail and head are free-running byte
 * counts. The authoritative counts of a side live in that side's own memory (`struct channel_own` points at them). The
 * segment holds the published copies: the peer could overwrite them, so a side never reads its own back.
 *
 * A ring is small, so that a stream that is read in time stays in the cache. When its reader stands still, the producer goes
 * on in the spill (channel_tx_spill), which has room for as much as TCP would have held. It comes back to the ring once the
 * reader has nearly caught up (channel_tx_settle). The count of a byte says where it lies: in the ring from ring_from to
 * ring_to, else in the spill. So no more bytes than the spill is long are ever unread. The ring has one such stretch at a
 * time: a new one begins only when the last has been read. If nothing in the spill is unread, new bytes begin at its start
 * (spill_base), so that few of its pages are touched. `ring_to` is loaded before the other two, and stored after them: any
 * values that can be seen together mean the same for all bytes that are unread.
 *
 * The peer is hostile until proven otherwise: each word it can write is loaded once and checked.
 */
#ifndef SIDESTEP_CHANNEL_H
#define SIDESTEP_CHANNEL_H

#include <assert.h>
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>

#include "layout.h"

#define CHANNEL_MAGIC 0x31434453u /* "SDC1" */
#define CHANNEL_VERSION 6u
#define CHANNEL_HEADER_SIZE 4096u
#define CHANNEL_RING_MIN 4096u
#define CHANNEL_RING_MAX (64u << 20)
#define CHANNEL_LINE 128 /* two cache lines: the adjacent-line prefetcher pairs them */

/*
 * Ends a round of a direction in the way `how`, or finds that the other side has decided already: the way that stands.
 * 0: the word was of another round than both sides know, which only a peer that breaks the rules can do.
 */
static inline uint32_t channel_decide(_Atomic uint32_t *tx_back, uint32_t round, uint32_t how)
{
	uint32_t found = atomic_load(tx_back);

	if (found >> 2 != round && atomic_compare_exchange_strong(tx_back, &found, round << 2 | how))
		return how;
	return found >> 2 == round ? found & 3 : 0;
}

struct channel_segment {
	uint32_t magic;
	uint32_t version;
	uint32_t ring_size[2];
	uint8_t pad[CHANNEL_LINE - 16];
	struct channel_side side[2];
	struct channel_producer producer[2];
	struct channel_consumer consumer[2];
};

static_assert(sizeof(struct channel_producer) == CHANNEL_LINE && sizeof(struct channel_consumer) == CHANNEL_LINE &&
                  sizeof(struct channel_side) == CHANNEL_LINE,
              "a line each");
static_assert(sizeof(struct channel_segment) <= CHANNEL_HEADER_SIZE, "the header is one page");

/* The memory of a direction. Sizes are powers of two, from our checked copy, never from the segment again. */
struct channel_ring {
	uint8_t *data, *spill; /* places in one mapping, or in two */
	uint32_t size, spill_size;
};

/* A side's own counts, in memory that the peer cannot write and that outlives the mapping; all 0 at first. */
struct channel_own {
	_Atomic uint64_t *tail, *head;
	_Atomic uint64_t *head_seen; /* last checked copy of the peer's head, saves touching its line */
	_Atomic uint64_t *ring_from, *ring_to, *spill_base; /* the published copies */
	_Atomic uint64_t *limit;    /* with ring_to: count up to which it may go on, at any pace of the reader */
	_Atomic uint64_t *room_max; /* bytes that may be unread; 0: as many as there is memory for */
};

/* Values of `asleep`: a thread of the reader sleeps on it; the writer has woken that thread. */
enum { ASLEEP_NOT, ASLEEP_FUTEX, ASLEEP_RUNG };

/* One side's view of a mapped segment. */
struct channel_end {
	struct channel_segment *seg;
	struct channel_side *local, *remote;
	struct channel_ring tx, rx;
	struct channel_producer *tx_line;       /* ours */
	struct channel_consumer *tx_peer_line;  /* the peer's */
	struct channel_consumer *rx_line;       /* ours */
	struct channel_producer *rx_peer_line;  /* the peer's */
	struct channel_own own;
	/* The largest count reported to a program of this process: the peer cannot revoke that. */
	_Atomic uint64_t tail_reported, head_reported;
	size_t map_len; /* bytes from `seg` on */
	uint8_t *spills; /* second mapping; NULL: there is one only */
	size_t spills_len;
};

/* The program has learned of `count`. Several threads may look at once. */
static inline void channel_report(_Atomic uint64_t *reported, uint64_t count)
{
	uint64_t before = atomic_load_explicit(reported, memory_order_relaxed);

	while ((int64_t)(count - before) > 0 && !atomic_compare_exchange_weak(reported, &before, count))
		;
}

/*
 * True if pages of a stranger's file stay where they are once mapped. The file must be sealed against shrinking and growing,
 * and of ordinary memory, as huge pages can be taken out of a sealed file. Else a look at them may end in SIGBUS.
 */
bool channel_stays(int fd);

/* Memory of that many zeroes, to be shared and sealed. Its descriptor, or -errno. */
int channel_memory(const char *name, size_t len);
/* Makes a sealed segment; returns a close-on-exec memfd or -errno. Sizes in bytes, powers of two. */
int channel_create(uint32_t tx_size, uint32_t rx_size);

/*
 * Maps the segment in fd as `side` (0 offered, 1 claimed). Checks seals, size, magic, version and geometry: the fd comes
 * from a peer. 0 or -errno. `apart`: header and rings in one mapping, if there is room for two, and the spills in another.
 */
int channel_map_as(struct channel_end *end, int fd, int side, const struct channel_own *own, bool apart);
static inline int channel_map(struct channel_end *end, int fd, int side, const struct channel_own *own)
{
	return channel_map_as(end, fd, side, own, false);
}
void channel_unmap(struct channel_end *end);

/*
 * Allows `most` bytes to be unread, if the spill and room_max have the room. False: that is no more than already. The caller
 * owns the sending direction; see above.
 */
bool channel_tx_spill(struct channel_end *end, uint64_t most);
void channel_tx_settle(struct channel_end *end);

/*
 * Releases the pages of our sending direction to the kernel: all of it, or those of the spill. The caller owns the direction,
 * and all of it is released only if the ring is empty. False: the spill has unread bytes.
 *
 * A device that has pinned pages of the ring goes on reading them, while later bytes are written to new pages. So `pages`
 * counts each release, before and after. A caller that has the ring pinned reads the count first. It uses the pinned pages
 * only for bytes behind whose tail the count is still the same. An earlier release was counted before those bytes were
 * written.
 */
void channel_trim(struct channel_end *end);
bool channel_trim_spill(struct channel_end *end);

/* Bytes that the spill, or room_max, has room for. */
static inline uint64_t channel_tx_most(const struct channel_end *end)
{
	uint64_t most = atomic_load_explicit(end->own.room_max, memory_order_relaxed);

	return most && most < end->tx.spill_size ? most : end->tx.spill_size;
}

/* Count up to which bytes can be sent with the peer's head at `head`. */
static inline uint64_t channel_tx_until(const struct channel_end *end, uint64_t head)
{
	uint64_t most = channel_tx_most(end), until = head + (most < end->tx.size ? most : end->tx.size);

	if (atomic_load_explicit(end->own.ring_to, memory_order_relaxed)) {
		uint64_t limit = atomic_load_explicit(end->own.limit, memory_order_relaxed);
		if ((int64_t)(limit - until) > 0)
			return limit;
	}
	return until;
}

/* tail and head fit each other. The limit may not fit them: it is of later, or a child's that has changed its user since. */
static inline size_t channel_tx_left(const struct channel_end *end, uint64_t head, uint64_t tail)
{
	uint64_t left = channel_tx_until(end, head) - tail, most = end->tx.spill_size - (tail - head);

	if ((int64_t)left <= 0)
		return 0; /* less than nothing: room_max was lowered */
	return (size_t)(left < most ? left : most);
}

/*
 * Bytes that can be sent; -ECONNRESET if the peer's head is impossible. The caller owns the sending direction. Ours can be
 * as well: in a shim a child that has changed its user since may write them.
 */
static inline int64_t channel_tx_space(const struct channel_end *end, size_t wanted)
{
	uint64_t tail = atomic_load_explicit(end->own.tail, memory_order_relaxed);
	uint64_t head = atomic_load_explicit(end->own.head_seen, memory_order_relaxed);

	if (tail - head > end->tx.spill_size)
		return -ECONNRESET;
	size_t left = channel_tx_left(end, head, tail);
	if (left >= wanted)
		return (int64_t)left;
	uint64_t reported = atomic_load_explicit(&end->head_reported, memory_order_acquire);
	/* R2 pairs with W2 in channel_rx_consume: what was read is no longer needed. */
	uint64_t fresh = atomic_load_explicit(&end->tx_peer_line->head, memory_order_acquire);
	/* the peer can write this word: it may only move forward, and not past what was sent */
	if (fresh - head > tail - head || (int64_t)(fresh - reported) < 0)
		return -ECONNRESET;
	atomic_store_explicit(end->own.head_seen, fresh, memory_order_relaxed);
	return (int64_t)channel_tx_left(end, fresh, tail);
}

/*
 * The same for a caller that does not own the direction. Another thread may send meanwhile, so a head that fits no tail is
 * read again until the tail stands still. Accuses nobody: SIZE_MAX means that the owner has something to judge, and must be
 * called. *head is the head that was read.
 */
static inline size_t channel_tx_look(const struct channel_end *end, uint64_t *head)
{
	for (;;) {
		uint64_t tail = atomic_load_explicit(end->own.tail, memory_order_acquire);
		*head = atomic_load_explicit(&end->tx_peer_line->head, memory_order_acquire); /* later than tail */

		if (tail - *head <= end->tx.spill_size)
			return channel_tx_left(end, *head, tail);
		if (atomic_load_explicit(end->own.tail, memory_order_relaxed) == tail)
			return SIZE_MAX;
	}
}

static inline size_t channel_tx_peek(const struct channel_end *end)
{
	uint64_t head;

	return channel_tx_look(end, &head);
}

/* Like channel_tx_peek(), for a caller that reports to the program, which may then wait for nothing: the peer is held to it. */
static inline size_t channel_tx_report(struct channel_end *end)
{
	uint64_t head;
	size_t room = channel_tx_look(end, &head);

	if (room != SIZE_MAX)
		channel_report(&end->head_reported, head);
	return room;
}

/* Bytes sent that the peer has not read, for any caller; as many as can be where its count is impossible. */
static inline size_t channel_tx_unread(const struct channel_end *end)
{
	uint64_t tail = atomic_load_explicit(end->own.tail, memory_order_acquire);
	uint64_t unread = tail - atomic_load_explicit(&end->tx_peer_line->head, memory_order_acquire);

	if (unread > end->tx.spill_size && (int64_t)unread < 0)
		return 0; /* another thread has sent since, and that was read */
	return unread > end->tx.spill_size ? end->tx.spill_size : (size_t)unread;
}

/* Place of the byte of count `at`. *len becomes the number of bytes that lie behind it, at least 1 for any words. */
static inline uint8_t *channel_place(const struct channel_ring *ring, uint64_t from, uint64_t to, uint64_t base,
                                     uint64_t at, size_t *len)
{
	bool in_ring = at >= from && (!to || at < to - 1);
	uint32_t size = in_ring ? ring->size : ring->spill_size;
	size_t offset = (size_t)((in_ring ? at : at - base) & (size - 1)), here = size - offset;

	if (in_ring && to && to - 1 - at < here)
		here = (size_t)(to - 1 - at);
	if (!in_ring && at < from && from - at < here)
		here = (size_t)(from - at);
	if (here < *len)
		*len = here;
	return (in_ring ? ring->data : ring->spill) + offset;
}

static inline uint8_t *channel_tx_place(const struct channel_end *end, uint64_t at, size_t *len)
{
	return channel_place(&end->tx, atomic_load_explicit(end->own.ring_from, memory_order_relaxed),
	                     atomic_load_explicit(end->own.ring_to, memory_order_relaxed),
	                     atomic_load_explicit(end->own.spill_base, memory_order_relaxed), at, len);
}

#define CHANNEL_COPY_LONG 4096u /* bytes from which on a copy is made by channel_copy_long() */
void channel_copy_long(void *to, const void *from, size_t len, bool past);

/* Copies bytes. `past`: past the caches of this CPU where the machine can, for a reader on another. */
static inline void channel_copy(void *to, const void *from, size_t len, bool past)
{
	if (past || len >= CHANNEL_COPY_LONG)
		channel_copy_long(to, from, len, past);
	else
		memcpy(to, from, len);
}

/*
 * Copies len bytes to `offset` bytes past the tail; the caller has checked the space. Publishes nothing. `past`: see
 * channel_copy().
 */
static inline void channel_tx_put(const struct channel_end *end, size_t offset, const void *data, size_t len, bool past)
{
	uint64_t at = atomic_load_explicit(end->own.tail, memory_order_relaxed) + offset;

	while (len) {
		size_t part = len;
		uint8_t *to = channel_tx_place(end, at, &part);
		channel_copy(to, data, part, past);
		data = (const uint8_t *)data + part;
		at += part;
		len -= part;
	}
}

/* Publishes all counts every time, because a process killed in this function may have published only some. */
static inline void channel_tx_show(const struct channel_end *end)
{
	atomic_store_explicit(&end->tx_line->ring_from, atomic_load_explicit(end->own.ring_from, memory_order_relaxed),
	                      memory_order_relaxed);
	atomic_store_explicit(&end->tx_line->spill_base, atomic_load_explicit(end->own.spill_base, memory_order_relaxed),
	                      memory_order_relaxed);
	atomic_store_explicit(&end->tx_line->ring_to, atomic_load_explicit(end->own.ring_to, memory_order_relaxed),
	                      memory_order_release);
	/* W1 pairs with R1 in channel_rx_avail: the bytes are visible once tail is. */
	atomic_store_explicit(&end->tx_line->tail, atomic_load_explicit(end->own.tail, memory_order_relaxed),
	                      memory_order_release);
}

static inline void channel_tx_publish(const struct channel_end *end, size_t len)
{
	uint64_t tail = atomic_load_explicit(end->own.tail, memory_order_relaxed) + len;

	atomic_store_explicit(end->own.tail, tail, memory_order_release); /* lookers: head is read after it */
	channel_tx_show(end);
}

/* Bytes to read; -ECONNRESET if the peer's tail is impossible. The caller owns the receiving direction. */
static inline int64_t channel_rx_avail(const struct channel_end *end)
{
	uint64_t head = atomic_load_explicit(end->own.head, memory_order_relaxed);
	uint64_t reported = atomic_load_explicit(&end->tail_reported, memory_order_acquire);
	uint64_t tail = atomic_load_explicit(&end->rx_peer_line->tail, memory_order_acquire); /* R1 */

	if (tail - head > end->rx.spill_size || (int64_t)(tail - reported) < 0)
		return -ECONNRESET; /* the peer can write this word: load once, check the copy */
	return (int64_t)(tail - head);
}

/*
 * Bytes to read for a caller that does not own the direction; SIZE_MAX where the owner has something to judge. A tail that
 * fits no head is looked at again until the head stands still: readiness that is none would hang a program. *tail is what
 * it was.
 */
static inline size_t channel_rx_look(const struct channel_end *end, uint64_t *tail)
{
	for (;;) {
		uint64_t head = atomic_load_explicit(end->own.head, memory_order_acquire);
		*tail = atomic_load_explicit(&end->rx_peer_line->tail, memory_order_acquire);

		if (*tail - head <= end->rx.spill_size)
			return (size_t)(*tail - head);
		if (atomic_load_explicit(end->own.head, memory_order_relaxed) == head)
			return SIZE_MAX;
	}
}

static inline size_t channel_rx_peek(const struct channel_end *end)
{
	uint64_t tail;

	return channel_rx_look(end, &tail);
}

/* Like channel_rx_peek(), for a caller that reports to the program, which may then wait for nothing: the peer is held to it. */
static inline size_t channel_rx_report(struct channel_end *end)
{
	uint64_t tail;
	size_t there = channel_rx_look(end, &tail);

	if (there != SIZE_MAX)
		channel_report(&end->tail_reported, tail);
	return there;
}

/* The peer's count of its pages, or 0: it does not tell, or is just giving some back. For bytes of a tail seen before. */
static inline uint32_t channel_rx_pages(const struct channel_end *end)
{
	uint32_t pages = atomic_load_explicit(&end->rx_peer_line->pages, memory_order_acquire);

	return pages & 1 ? 0 : pages;
}

/* Place of the byte `offset` bytes past the head, and how many of *len lie behind it; see channel_place(). After R1. */
static inline uint8_t *channel_rx_place(const struct channel_end *end, size_t offset, size_t *len)
{
	uint64_t at = atomic_load_explicit(end->own.head, memory_order_relaxed) + offset;
	uint64_t to = atomic_load_explicit(&end->rx_peer_line->ring_to, memory_order_acquire); /* first */

	return channel_place(&end->rx, atomic_load_explicit(&end->rx_peer_line->ring_from, memory_order_relaxed), to,
	                     atomic_load_explicit(&end->rx_peer_line->spill_base, memory_order_relaxed), at, len);
}

/* Copies len bytes from `offset` bytes past the head; the caller has checked what is there. */
static inline void channel_rx_get(const struct channel_end *end, size_t offset, void *data, size_t len)
{
	while (len) {
		size_t part = len;
		const uint8_t *from = channel_rx_place(end, offset, &part);
		channel_copy(data, from, part, false);
		data = (uint8_t *)data + part;
		offset += part;
		len -= part;
	}
}

#define CHANNEL_PIECES 6 /* a ring in the midst of a spill, both of which wrap; a peer's words may mean more */

/* The readable bytes from `offset` on, where they lie; returns the number of pieces. */
static inline int channel_rx_pieces(const struct channel_end *end, size_t offset, size_t len,
                                    struct iovec out[CHANNEL_PIECES])
{
	int n = 0;

	for (; len && n < CHANNEL_PIECES; n++) {
		size_t part = len;
		uint8_t *from = channel_rx_place(end, offset, &part);
		out[n] = (struct iovec){from, part};
		offset += part;
		len -= part;
	}
	return n;
}

/* The free bytes after the tail as at most two pieces; the caller has checked the space. */
static inline int channel_tx_pieces(const struct channel_end *end, size_t len, struct iovec out[2])
{
	uint64_t at = atomic_load_explicit(end->own.tail, memory_order_relaxed);
	int n = 0;

	for (; len && n < 2; n++) {
		size_t part = len;
		uint8_t *to = channel_tx_place(end, at, &part);
		out[n] = (struct iovec){to, part};
		at += part;
		len -= part;
	}
	return n;
}

static inline void channel_rx_consume(const struct channel_end *end, size_t len)
{
	uint64_t head = atomic_load_explicit(end->own.head, memory_order_relaxed) + len;

	atomic_store_explicit(end->own.head, head, memory_order_release); /* lookers: tail is read after it */
	atomic_store_explicit(&end->rx_line->head, head, memory_order_release); /* W2 */
}

#endif
