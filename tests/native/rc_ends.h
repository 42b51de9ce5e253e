/*
 * rc_ends.h - two queue pairs of rc_qp.h with memory of their own, for rc_test.c and fuzz_rc.c.
 *
 * Each asks the other for Sends, Writes, Reads and atomic operations, of which it knows what must come of them. Memory that the other
 * may use lies in a block of exactly its size, and so does each request and receive: an access beyond is seen by ASan.
 */
#ifndef SIDESTEP_RC_ENDS_H
#define SIDESTEP_RC_ENDS_H

#include "check.h"

#include "rc_qp.h"

#include <string.h>

#define END_KEY 0x5EC2E7u
#define END_VA 0x7F0000001008ull
#define END_COUNTER 8u /* bytes: a number that is counted up */
#define END_READ 12000u /* bytes that never change */
#define END_WRITTEN 12000u
#define END_REGION (END_COUNTER + END_READ + END_WRITTEN)
#define END_MOST 12000u /* bytes of a message */
#define END_ASKED_MAX 256u
#define END_ALL (QP_REMOTE_WRITE | QP_REMOTE_READ | QP_REMOTE_ATOMIC)

/* A request, until it is acknowledged. */
struct asked {
	struct qp_flight flight;
	struct iovec pieces[2];
	uint64_t number; /* that an atomic operation must find */
	uint32_t at;     /* of a Read, in the region */
	uint8_t bytes[];
};

struct side {
	struct rc_qp qp;
	int end;
	uint8_t *region, *room;
	uint32_t receives, heard, sends, lens[END_ASKED_MAX]; /* posted; messages, of which the lengths */
	bool voids[END_ASKED_MAX];
	uint32_t asked, done;
	uint64_t counted; /* atomic operations */
	uint8_t model[END_WRITTEN]; /* what the other end's memory will be */
	struct side *other;
	bool judged; /* nobody has lied */
	bool refuses_memory;
};

void side_open(struct side *side, int end, uint32_t mtu, uint32_t window, bool ipv6);
void side_close(struct side *side);
/* Posts a request of a kind and a length. */
void side_ask(struct side *side, enum qp_op op, uint32_t len, uint32_t at, bool voids);
/* Judges what is done, and frees it. */
void side_done(struct side *side);
/* All bytes that the other end has written are as they must be, once all is done. */
void side_check_written(const struct side *side);

#endif
