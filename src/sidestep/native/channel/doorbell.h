/*
 * doorbell.h - what processes share of a doorbell: a page that its owner writes and its peers map read-only, and an eventfd.
 *
 * The eventfd is rung by *reading* it. Every holder can change its flags. With RWF_NOWAIT a read returns at once whatever the
 * flags are; a write has nothing of the kind. A read wakes threads that wait for room (EPOLLOUT). The counter falls by one a
 * read (EFD_SEMAPHORE), from more than a lifetime of reads, so it is never empty. An eventfd that is not empty is readable
 * however full. So a thread that sleeps on both edges finds one, even if another process holds the eventfd.
 *
 * One line a doorbell: sleepers in bits 0-15, generation above. The hint rings follow the page of lines, a page each. The
 * owner names there the connections that have news, for peers that asked for it. A doorbell page without them is one page.
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

#define DOORBELL_RINGS ((uint64_t)1 << 62)            /* rings of a new doorbell; each ring takes one */
#define DOORBELL_EDGES (EPOLLIN | EPOLLOUT | EPOLLET) /* events of it in sets: true at once, then with each ring */

#define DOORBELL_LINE 64
#define DOORBELL_WORDS_LEN 4096

/*
 * Hints, beside each doorbell in the same file. If a peer asked for it, the owner names there which of its many connections
 * has news. Entries are (count << 32 | number, not 0, that the peer chose). The owner of the doorbell writes, its peers read.
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

/* False: the entry is not written yet, or overwritten. The first place of all, not written yet, has the right count: 0. */
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
	/* A new generation: a thread that still sleeps on this doorbell is rung again for bytes behind the ring that we took. */
	atomic_fetch_add(word, (1u << 16) - 1);
	atomic_thread_fence(memory_order_seq_cst); /* look again after this */
}

#endif
