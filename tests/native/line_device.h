/*
 * line_device.h - a device of the kernel that is played, beneath a line (engine_line.h), and what Python has of its queue pair.
 *
 * It is an adapter for iWARP: its other end is the socket of the line, so the peer and all that is judged there are the same as
 * without it. Nothing moves in it but when it is told to, each step by itself: requests are carried out late or never, and
 * what they are sent from is read no earlier, and must stay as it was until they are complete. It is strict: whatever it is asked,
 * and what the slots of the slab are used for, is judged.
 */
#ifndef SIDESTEP_LINE_DEVICE_H
#define SIDESTEP_LINE_DEVICE_H

#include "engine_line.h"
#include "engine_wire.h"

#define DEVICE_RECEIVES 16u /* at most, that are posted */
#define DEVICE_COMPLETIONS 128u
#define DEVICE_SLAB_LKEY 7u

enum device_call { DEVICE_POST_SEND, DEVICE_POST_RECV, DEVICE_POLL, DEVICE_NOTIFY, DEVICE_CALLS };

/* When it moves by itself. */
enum device_haste {
	DEVICE_CARRIES = 1,   /* what is posted goes out at once */
	DEVICE_COMPLETES = 2, /* and is complete */
	DEVICE_RECEIVES_AT_POLL = 4,
	DEVICE_MOVES_AT_NOTIFY = 8, /* before it is armed: nobody is told */
};

struct device_options {
	struct verbs_slab *slab;
	uint32_t inline_max, gather_max, poll_max, hot_bytes;
	unsigned haste; /* of device_haste */
	bool pins;      /* Python pins the ring of its application whenever it lends */
};

/* The next completion says this in place of what is so, for each field that is not 0. */
struct device_lie {
	uint64_t wr_id;
	int status, opcode;
	unsigned flags;
	uint32_t byte_len;
};

struct device_request {
	uint64_t wr_id, sum; /* of what lies in the slab, when it was posted */
	struct verbs_sge entries[VERBS_SLOTS];
	uint8_t inlined[VERBS_INLINE_MAX];
	uint32_t entries_len, flags;
};

struct line_device {
	struct verbs_qp qp;
	struct device_options options;
	struct device_request requests[VERBS_SENDS]; /* by number */
	uint64_t posted, carried, completed,
		freed; /* how many, ever; freed: their places, by a completion that was polled */
	uint64_t receives[DEVICE_RECEIVES], receives_posted, receives_taken; /* numbers of buffers, the oldest first */
	uint8_t *buffers;
	uint32_t size, receiving; /* bytes of a buffer, and of the message that has begun */
	uint32_t tx_msn, rx_msn;
	struct verbs_wc completions[DEVICE_COMPLETIONS];
	uint64_t completions_made, completions_polled;
	int event_fds[2];
	uint32_t events, mute, late; /* that were told and are not acknowledged; that are not to be told; that were not */
	bool armed;
	bool over;    /* its connection is */
	struct {
		int error;
		uint32_t after; /* requests of the chain that it takes */
	} fails[DEVICE_CALLS];
	int failed;   /* what a call has failed with */
	bool failing; /* a completion tells of an error */
	bool lied;
	struct device_lie lie;
	/* Python's */
	uint64_t first, next, order[DEVICE_RECEIVES]; /* numbers of requests, and of buffers, the oldest first */
	bool tells[VERBS_SENDS];
	uint64_t gathered_until, received_before;
	uint32_t lkey, pages; /* of the ring; no pages: it is not pinned */
	bool leaving;         /* but is not used any more */
};

void device_open(struct line *line, const struct device_options *options);
/* Its queue pair is destroyed. */
void device_close(struct line *line);

/* Takes what has come, and prepares the queue pair. False: line->reason tells, or it cannot be lent now (ENGINE_ASKED). */
bool device_lend(struct line *line);
void device_take_back(struct line *line);

/* Carries out so many requests; completes so many of those; takes what has come from the peer. */
void device_carry(struct line *line, uint64_t most);
void device_complete(struct line *line, uint64_t most);
void device_receive(struct line *line);
/* Everything that can be done is done, and told. */
void device_catch_up(struct line *line);
/* A completion that nothing has brought about. */
void device_make_up(struct line *line, const struct device_lie *lie);
/* An event that nobody has asked for. */
void device_tell(struct line *line);
/* Its ring is pinned no more, once the device does not read it. */
void device_unpin(struct line *line);
/* All that was posted has gone to the peer. */
bool device_has_sent(const struct line *line);

/* What must be so at any moment, with the engine not at work, of all lines that send from one slab. */
void devices_check(const struct line *lines, size_t len);

#endif
