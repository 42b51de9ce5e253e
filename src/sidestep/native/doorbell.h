/*
 * doorbell.h - what processes share of a doorbell: a page that its owner writes and its peers map read-only, and an eventfd.
 *
 * The eventfd is rung by *reading* it. All who hold it can change its flags, but with RWF_NOWAIT a read returns at once
 * whatever they say, and nothing of the kind exists for a write. A read wakes those who wait for room (EPOLLOUT). The
 * counter goes down by one a read (EFD_SEMAPHORE), from more than anybody can read in a lifetime: so it is never empty, an
 * eventfd that is not empty is readable however full, and what sleeps on both edges finds one, whoever else holds it.
 *
 * One line a doorbell: sleepers in bits 0-15, generation above. After the page of lines come the hint rings, a page each, in
 * which the owner names the connections that have news to peers who asked for it; a doorbell page without them is one page.
 */
#ifndef SIDESTEP_DOORBELL_H
#define SIDESTEP_DOORBELL_H

#include <assert.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/epoll.h>

#include "layout.h"

#define DOORBELL_RINGS ((uint64_t)1 << 62)            /* at first; each ring takes one */
#define DOORBELL_EDGES (EPOLLIN | EPOLLOUT | EPOLLET) /* in the sets that hold it: true at once, then with each ring */

#define DOORBELL_LINE 64
#define DOORBELL_WORDS_LEN 4096

/*
 * Beside each doorbell, in the same file: the connections whose owner asked to be told which of many has news. Entries are
 * (count << 32 | number, not 0, that the peer chose). The owner of the doorbell writes, its peers read.
 */
#define HINTS 511
struct hint_ring {
	_Atomic uint64_t tail;
	_Atomic uint64_t entry[HINTS];
};
static_assert(sizeof(struct hint_ring) == 4096, "a page each");

#define DOORBELL_PAGE_LEN (DOORBELL_WORDS_LEN + DOORBELLS_PER_PAGE * sizeof(struct hint_ring)) /* sparse */

static inline _Atomic uint64_t *doorbell_word_at(void *page, uint32_t index)
{
	return (_Atomic uint64_t *)((uint8_t *)page + (size_t)index * DOORBELL_LINE);
}

static inline struct hint_ring *doorbell_hints_at(void *page, uint32_t index)
{
	return (struct hint_ring *)((uint8_t *)page + DOORBELL_WORDS_LEN) + index;
}

/* False: not written yet, or overwritten. The first place of all, not written yet, has the right count: 0. */
static inline bool hint_valid(uint64_t entry, uint64_t count)
{
	return entry >> 32 == (uint32_t)count && (uint32_t)entry != 0;
}

static inline void doorbell_word_sleep(_Atomic uint64_t *word)
{
	atomic_fetch_add(word, (1u << 16) + 1);
	atomic_thread_fence(memory_order_seq_cst); /* look again after this */
}

static inline void doorbell_word_wake(_Atomic uint64_t *word)
{
	/* A new generation: whoever still sleeps on this doorbell is rung again for what comes after the ring we took. */
	atomic_fetch_add(word, (1u << 16) - 1);
	atomic_thread_fence(memory_order_seq_cst); /* look again after this */
}

#endif
