/*
 * engine_verbs.h - a queue pair of a device of the kernel, and the memory that it sends from, as the engine has them.
 *
 * Its completion queue is its own, with a channel of its own: whoever has the queue pair, Python or an engine, has all of
 * its completions, and nobody else's. Receives stay posted as it changes hands, and so does what was sent and is not done: a
 * request keeps its number, and with it the slots of the slab that it goes out from.
 */
#ifndef SIDESTEP_ENGINE_VERBS_H
#define SIDESTEP_ENGINE_VERBS_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "verbs_abi.h"

#define VERBS_SLOT (16u << 10) /* bytes */
#define VERBS_SLOTS 4u         /* that a message takes at most; each is an entry of its gather list */
#define VERBS_SENDS 32u        /* of an engine that are not done; limits.py has the same */
#define VERBS_INLINE_MAX 256u      /* bytes that are handed over with a request, at most */
#define VERBS_CHAIN 8u         /* requests with one doorbell */
#define VERBS_BATCH 16         /* completions taken at once */

/* Registered memory, in slots, that all queue pairs of a domain send from. */
struct verbs_slab {
	pthread_mutex_t lock; /* slots are given back by Python, too */
	uint8_t *base;
	uint32_t lkey, slots_len, free_len;
	uint16_t *free;
	struct verbs_qp *first_waiting, **end_waiting; /* for slots: each in its turn */
};

struct verbs_receive {
	uint64_t wr_id;
	uint8_t *at;
	uint32_t len, lkey;
};

struct verbs_send {
	uint32_t bytes;
	uint16_t slots[VERBS_SLOTS];
	uint8_t slots_len;
	bool signaled;
	bool gathered; /* some of it is read from the ring of the application */
};

struct verbs_qp {
	struct verbs_calls calls;
	void *qp, *cq, *channel;
	int fd; /* of the channel; it does not block */
	uint32_t inline_max, gather_max;
	struct verbs_slab *slab;
	struct verbs_receive *receives; /* a ring: they complete in the order of posting */
	uint32_t receives_len, receives_first;
	struct verbs_send sends[VERBS_SENDS]; /* by number */
	uint64_t first, done, sent; /* numbers: of the first of this loan, of the first that is not done, of the next */
	uint32_t before;    /* unsignaled ones before the first that may not be done */
	uint32_t unsignaled; /* since the last one that was signaled */
	bool owing;          /* some of these hold slots */
	uint64_t bytes_out; /* of those that are not done */
	_Atomic uint64_t gathered; /* bytes, ever, that were sent from the ring itself */
	uint64_t
		hot_bytes; /* so many that have to be copied, and would not in a ring that is pinned, are told; 0: none are */
	int64_t hot_since; /* since when these were counted, or will be */
	uint64_t copied; /* those */
	uint32_t chained, chained_bytes; /* those before `sent` that the device does not have */
	struct verbs_send_wr chain[VERBS_CHAIN];
	struct verbs_sge entries[VERBS_CHAIN][VERBS_SLOTS];
	uint8_t inlined[VERBS_CHAIN][VERBS_INLINE_MAX];
	struct verbs_wc wc[VERBS_BATCH]; /* taken from the device; those from wc_at on are not looked at */
	uint32_t wc_at, wc_len;
	bool armed; /* the channel tells of the next completion */
	bool starved; /* it has not got what it wanted, in this turn */
	uint32_t wants; /* slots; 0: it does not wait for any */
	struct verbs_qp *next_waiting;
	int error; /* errno: a call has failed, and nothing goes on */
};

int verbs_slab_init(struct verbs_slab *slab, uint8_t *base, size_t len, uint32_t lkey); /* 0 or -errno */
void verbs_slab_free(struct verbs_slab *slab);
uint32_t verbs_slab_room(struct verbs_slab *slab);

/* It has these receives, the oldest first, and the next request has this number. 0 or -ENOMEM */
int verbs_begin(struct verbs_qp *qp, uint64_t number, uint32_t before, const struct verbs_receive *receives,
                uint32_t len);
/* The number behind the last request not done that the ring is read for; 0: none. */
uint64_t verbs_gathering(const struct verbs_qp *qp);
/* A request of an engine is done, or never will be. */
void verbs_finish(struct verbs_qp *qp, uint64_t number);
/* Nothing of it is used any more. */
void verbs_release(struct verbs_qp *qp);

#endif
