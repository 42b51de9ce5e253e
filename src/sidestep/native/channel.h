/*
 * channel.h - one stream connection in shared memory.
 *
 * A segment is a sealed memfd: one header page and two power-of-two byte rings, ring[d] written by side d (0: the side
 * that offered, 1: the side that claimed). tail and head are free-running byte counts. The authoritative tail and head
 * of a side live in that side's own memory (`struct channel_end` points at them); the segment holds the published
 * copies, which the peer could overwrite, so a side never reads its own back.
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
#define CHANNEL_VERSION 3u
#define CHANNEL_HEADER_SIZE 4096u
#define CHANNEL_RING_MIN 4096u
#define CHANNEL_RING_MAX (64u << 20)
#define CHANNEL_LINE 128 /* two cache lines: the adjacent-line prefetcher pairs them */

#define CHANNEL_ROUNDS ((1u << 30) - 1) /* after so many a direction stays on TCP */

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
                  sizeof(struct channel_side) == CHANNEL_LINE, "a line each");
static_assert(sizeof(struct channel_segment) <= CHANNEL_HEADER_SIZE, "the header is one page");

/* One side's view of a mapped segment. own_tail and own_head are in memory the peer cannot write. */
struct channel_end {
	struct channel_segment *seg;
	struct channel_side *local, *remote;
	uint8_t *tx_data, *rx_data;
	uint32_t tx_size, rx_size; /* powers of two, from our checked copy, never from the segment again */
	struct channel_producer *tx_line;       /* ours */
	struct channel_consumer *tx_peer_line;  /* the peer's */
	struct channel_consumer *rx_line;       /* ours */
	struct channel_producer *rx_peer_line;  /* the peer's */
	_Atomic uint64_t *own_tail, *own_head;
	_Atomic uint64_t *head_seen; /* last checked copy of the peer's head, saves touching its line */
	/* The furthest that a program of this process was told of: what the peer cannot take back. */
	_Atomic uint64_t tail_told, head_told;
	size_t map_len;
};

/* `count` was told to the program. Several threads may look at once. */
static inline void channel_tell(_Atomic uint64_t *told, uint64_t count)
{
	uint64_t before = atomic_load_explicit(told, memory_order_relaxed);

	while ((int64_t)(count - before) > 0 && !atomic_compare_exchange_weak(told, &before, count))
		;
}

/*
 * Whether pages of a stranger's file stay where they are once mapped: sealed against shrinking and growing, and of ordinary
 * memory, as huge pages can be taken out of a sealed file. Else a look at them may end in SIGBUS.
 */
bool channel_stays(int fd);

/* Memory of that many zeroes, to be shared and sealed. Its descriptor, or -errno. */
int channel_memory(const char *name, size_t len);
/* Makes a sealed segment; returns a close-on-exec memfd or -errno. Sizes in bytes, powers of two. */
int channel_create(uint32_t tx_size, uint32_t rx_size);

/*
 * Maps the segment in fd as `side` (0 offered, 1 claimed). Checks seals, size, magic, version and geometry: the fd comes
 * from a peer. own_tail, own_head and head_seen must be zero words that outlive the mapping. 0 or -errno.
 */
int channel_map(struct channel_end *end, int fd, int side, _Atomic uint64_t *own_tail, _Atomic uint64_t *own_head,
                _Atomic uint64_t *head_seen);
void channel_unmap(struct channel_end *end);

/* Gives the pages of our own (empty) sending ring back to the kernel; the bytes of an empty ring mean nothing. */
void channel_trim(struct channel_end *end);

/*
 * Bytes free in the sending ring; -ECONNRESET if the peer's head is impossible. The caller owns the sending direction. Ours
 * can be as well: in a shim a child that has changed its user since may write them.
 */
static inline int64_t channel_tx_space(const struct channel_end *end, size_t wanted)
{
	uint64_t tail = atomic_load_explicit(end->own_tail, memory_order_relaxed);
	uint64_t head = atomic_load_explicit(end->head_seen, memory_order_relaxed);

	if (tail - head > end->tx_size)
		return -ECONNRESET;
	if (end->tx_size - (tail - head) >= wanted)
		return (int64_t)(end->tx_size - (tail - head));
	uint64_t told = atomic_load_explicit(&end->head_told, memory_order_acquire);
	/* R2 pairs with W2 in channel_rx_consume: what was read is no longer needed. */
	uint64_t fresh = atomic_load_explicit(&end->tx_peer_line->head, memory_order_acquire);
	/* the peer can write this word: it may only move forward, and not past what was sent */
	if (fresh - head > tail - head || (int64_t)(fresh - told) < 0)
		return -ECONNRESET;
	atomic_store_explicit(end->head_seen, fresh, memory_order_relaxed);
	return (int64_t)(end->tx_size - (tail - fresh));
}

/*
 * The same for a caller that does not own the direction: another thread may send meanwhile, so a head that fits no tail is
 * looked at again until the tail stands still. Accuses nobody: SIZE_MAX where the owner has something to judge, so that it
 * is called. *head is what it was.
 */
static inline size_t channel_tx_look(const struct channel_end *end, uint64_t *head)
{
	for (;;) {
		uint64_t tail = atomic_load_explicit(end->own_tail, memory_order_acquire);
		*head = atomic_load_explicit(&end->tx_peer_line->head, memory_order_acquire); /* after tail */

		if (tail - *head <= end->tx_size)
			return (size_t)(end->tx_size - (tail - *head));
		if (atomic_load_explicit(end->own_tail, memory_order_relaxed) == tail)
			return SIZE_MAX;
	}
}

static inline size_t channel_tx_peek(const struct channel_end *end)
{
	uint64_t head;

	return channel_tx_look(end, &head);
}

/* As channel_tx_peek(), for a caller that tells the program, which may then wait for nothing: the peer is held to it. */
static inline size_t channel_tx_tell(struct channel_end *end)
{
	uint64_t head;
	size_t room = channel_tx_look(end, &head);

	if (room != SIZE_MAX)
		channel_tell(&end->head_told, head);
	return room;
}

/* Bytes sent that the peer has not read, for any caller; all of a ring where its count is impossible. */
static inline size_t channel_tx_unread(const struct channel_end *end)
{
	size_t room = channel_tx_peek(end);

	return room > end->tx_size ? end->tx_size : end->tx_size - room;
}

/* Copies len bytes to `offset` bytes past the tail; the caller has checked the space. Publishes nothing. */
static inline void channel_tx_put(const struct channel_end *end, size_t offset, const void *data, size_t len)
{
	uint64_t at = (atomic_load_explicit(end->own_tail, memory_order_relaxed) + offset) & (end->tx_size - 1);
	size_t first = end->tx_size - at < len ? (size_t)(end->tx_size - at) : len;

	memcpy(end->tx_data + at, data, first);
	if (first < len)
		memcpy(end->tx_data, (const uint8_t *)data + first, len - first);
}

static inline void channel_tx_publish(const struct channel_end *end, size_t len)
{
	uint64_t tail = atomic_load_explicit(end->own_tail, memory_order_relaxed) + len;

	atomic_store_explicit(end->own_tail, tail, memory_order_release); /* lookers: head is read after it */
	/* W1 pairs with R1 in channel_rx_avail: the bytes are visible once tail is. */
	atomic_store_explicit(&end->tx_line->tail, tail, memory_order_release);
}

/* Bytes to read; -ECONNRESET if the peer's tail is impossible. The caller owns the receiving direction. */
static inline int64_t channel_rx_avail(const struct channel_end *end)
{
	uint64_t head = atomic_load_explicit(end->own_head, memory_order_relaxed);
	uint64_t told = atomic_load_explicit(&end->tail_told, memory_order_acquire);
	uint64_t tail = atomic_load_explicit(&end->rx_peer_line->tail, memory_order_acquire); /* R1 */

	if (tail - head > end->rx_size || (int64_t)(tail - told) < 0)
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
		uint64_t head = atomic_load_explicit(end->own_head, memory_order_acquire);
		*tail = atomic_load_explicit(&end->rx_peer_line->tail, memory_order_acquire);

		if (*tail - head <= end->rx_size)
			return (size_t)(*tail - head);
		if (atomic_load_explicit(end->own_head, memory_order_relaxed) == head)
			return SIZE_MAX;
	}
}

static inline size_t channel_rx_peek(const struct channel_end *end)
{
	uint64_t tail;

	return channel_rx_look(end, &tail);
}

/* As channel_rx_peek(), for a caller that tells the program, which may then wait for nothing: the peer is held to it. */
static inline size_t channel_rx_tell(struct channel_end *end)
{
	uint64_t tail;
	size_t there = channel_rx_look(end, &tail);

	if (there != SIZE_MAX)
		channel_tell(&end->tail_told, tail);
	return there;
}

/* Copies len bytes from `offset` bytes past the head; the caller has checked what is there. */
static inline void channel_rx_get(const struct channel_end *end, size_t offset, void *data, size_t len)
{
	uint64_t at = (atomic_load_explicit(end->own_head, memory_order_relaxed) + offset) & (end->rx_size - 1);
	size_t first = end->rx_size - at < len ? (size_t)(end->rx_size - at) : len;

	memcpy(data, end->rx_data + at, first);
	if (first < len)
		memcpy((uint8_t *)data + first, end->rx_data, len - first);
}

/* The readable bytes from `offset` on as at most two pieces, in ring memory; returns the number of pieces. */
static inline int channel_rx_pieces(const struct channel_end *end, size_t offset, size_t len, struct iovec out[2])
{
	uint64_t at = (atomic_load_explicit(end->own_head, memory_order_relaxed) + offset) & (end->rx_size - 1);
	size_t first = end->rx_size - at < len ? (size_t)(end->rx_size - at) : len;

	out[0] = (struct iovec){end->rx_data + at, first};
	out[1] = (struct iovec){end->rx_data, len - first};
	return first < len ? 2 : 1;
}

/* The free bytes after the tail as at most two pieces; the caller has checked the space. */
static inline int channel_tx_pieces(const struct channel_end *end, size_t len, struct iovec out[2])
{
	uint64_t at = atomic_load_explicit(end->own_tail, memory_order_relaxed) & (end->tx_size - 1);
	size_t first = end->tx_size - at < len ? (size_t)(end->tx_size - at) : len;

	out[0] = (struct iovec){end->tx_data + at, first};
	out[1] = (struct iovec){end->tx_data, len - first};
	return first < len ? 2 : 1;
}

static inline void channel_rx_consume(const struct channel_end *end, size_t len)
{
	uint64_t head = atomic_load_explicit(end->own_head, memory_order_relaxed) + len;

	atomic_store_explicit(end->own_head, head, memory_order_release); /* lookers: tail is read after it */
	atomic_store_explicit(&end->rx_line->head, head, memory_order_release); /* W2 */
}

#endif
