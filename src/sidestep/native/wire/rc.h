/*
 * rc.h - a queue pair of InfiniBand's reliable connections, as RoCEv2 carries them, for messages by Send (IBTA 9.7).
 *
 * Both halves of it: packets that are sent until they are acknowledged, and packets that come, checked, as messages. It does no
 * I/O and reads no clock. rdma/roce/requester.py and responder.py are the reference: what is not a plain Send, or its acknowledgement,
 * is left where it is, untouched, for these (RC_STRANGE).
 *
 * The other end is hostile. Lengths are believed only within what has come, numbers only within what was sent; memory is
 * bounded by RC_QUEUE_MAX and RC_MESSAGE_MAX on the way out, and by the longest message that is asked for on the way in.
 */
#ifndef SIDESTEP_RC_H
#define SIDESTEP_RC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "layout.h"

#define RC_PORT 4791u
#define RC_BTH 12u      /* bytes of the base header */
#define RC_ICRC 4u
#define RC_OVERHEAD (RC_BTH + RC_ICRC)
#define RC_DATAGRAM_MAX 65536u
#define RC_QUEUE_MAX (128u << 10)  /* bytes not acknowledged, after which nothing is added */
#define RC_MESSAGE_MAX (64u << 10) /* bytes of a message of ours */
#define RC_TRAIN_MAX 64u           /* packets that one call sends: UDP_MAX_SEGMENTS of older kernels */
#define RC_ANSWER_LEN (RC_OVERHEAD + 4)
#define RC_NOWHERE UINT32_MAX
#define RC_EXPIRIES 3u             /* of the timer, without progress, before somebody else has to judge */

/* One packet that is to be sent, or was. */
struct rc_slot {
	uint32_t len; /* bytes of the datagram */
	uint16_t id;  /* identification in the header of IPv4 that its checksum is for */
	uint16_t index; /* of the packet in its message */
};

/* One packet of a message that is coming. */
struct rc_piece {
	uint32_t at, len, raw; /* in the staging memory: its payload; bytes of the datagram */
};

struct rc {
	struct rc_record record;
	uint8_t local[16], remote[16]; /* addresses as they are on the wire, of 4 or 16 bytes */
	/* packets to be sent: the one with number n at n % slots_len */
	uint8_t *packets; /* made when it is first needed, as all that follows here */
	struct rc_slot *slots;
	uint32_t slots_len, stride, ack_every;
	uint32_t out_full;             /* state of the checksum before the base header of a full packet */
	uint32_t ids[RC_TRAIN_MAX];    /* what an identification does to the checksum of a full packet */
	int64_t expires_ns; /* what was sent is taken for lost then */
	uint32_t expiries;
	uint32_t gone_back_to; /* for a loss that was told; RC_NOWHERE */
	/* what came */
	uint8_t *staging;
	uint32_t size, at, tail, segment; /* [at, tail) is not looked at yet, and in datagrams of so many bytes */
	struct rc_piece *pieces;
	uint32_t pieces_len, pieces_size, message_len;
	uint32_t in_len, in_begun; /* the checksum's state before a base header of a packet of this length, and how to */
	uint32_t in_before; /* go back in it from its end to the identification */
	uint32_t before; /* carried_out, before the first packet of the message; RC_NOWHERE: that is not known */
	bool owes_nak, asks; /* asks: the message's last packet, for an acknowledgement */
};

enum rc_found { RC_NOTHING, RC_MESSAGE, RC_STRANGE, RC_NO_MEMORY };

/*
 * `record` and the addresses are set. Begins anew with them, in the midst of a message of which these bytes have come: whole
 * packets. -ENOMEM
 */
int rc_begin(struct rc *rc, const uint8_t *partial, uint32_t partial_len);
void rc_free(struct rc *rc); /* gives memory back */

static inline uint32_t rc_after(uint32_t psn, uint32_t count)
{
	return (psn + count) & 0xFFFFFF;
}

/* How many steps one is in front of another, on their circle (IBTA 9.7.1); negative if it is behind. */
static inline int32_t rc_ahead(uint32_t psn, uint32_t of)
{
	return (int32_t)((psn - of) << 8) >> 8;
}

void rc_put_bth(uint8_t *at, uint32_t qp, uint32_t opcode, uint32_t pad, uint32_t psn);
void rc_put_icrc(uint8_t *at, uint32_t value);

/* ---- out ---- */
/* Queues a message: the header, and the pieces behind it, are copied. -ENOMEM; -EINVAL: it is too long, or too much waits. */
int rc_put(struct rc *rc, const uint8_t *header, uint32_t header_len, const struct iovec *pieces, int pieces_len);

/* Bytes of packets that are not acknowledged, as if all were full. */
static inline uint64_t rc_waiting(const struct rc *rc)
{
	return (uint64_t)rc_ahead(rc->record.next, rc->record.acknowledged) * rc->record.mtu;
}

/*
 * The packets to be sent next, as one datagram for UDP_SEGMENT: pieces, their number; *count packets, *len bytes of each but
 * the last. 0: none may be sent. rc_sent() says that they are.
 */
int rc_train(struct rc *rc, uint32_t most, struct iovec pieces[2], uint32_t *count, uint32_t *len);
void rc_sent(struct rc *rc, uint32_t count, int64_t now_ns);

/* The next answer: its bytes, or 0. */
uint32_t rc_answer(struct rc *rc, uint8_t answer[RC_ANSWER_LEN]);

/* When rc_pass() is to be called; 0: never. */
int64_t rc_deadline(const struct rc *rc);
/* Time has passed. False: the other end has been silent for too long. */
bool rc_pass(struct rc *rc, int64_t now_ns);

/* An acknowledgement, or what is none of a request that failed. False: somebody else has to judge. */
bool rc_acknowledged(struct rc *rc, uint32_t psn, uint8_t syndrome, int64_t now_ns);

/* ---- in ---- */
/* Where RC_DATAGRAM_MAX bytes can go; all was looked at. NULL: there is no memory. `most`: as for rc_next(). */
uint8_t *rc_room(struct rc *rc, uint32_t most);
/* So many have come, in datagrams of `segment` bytes each but the last. */
void rc_commit(struct rc *rc, uint32_t len, uint32_t segment);

/* Looks at packets until a message of at most `most` bytes is whole; its length is `message_len`. */
enum rc_found rc_next(struct rc *rc, uint32_t most, int64_t now_ns);
void rc_copy(const struct rc *rc, uint32_t from, uint8_t *to, uint32_t len);
void rc_taken(struct rc *rc);

/* ---- what is left when it is given back ---- */
/* Packets of a message that have come elsewhere. -ENOMEM */
int rc_resume(struct rc *rc, const uint8_t *partial, uint32_t len);
/* As if nothing had come of a message that was not taken. */
void rc_rewind(struct rc *rc);
/* The datagram number `n` that was not taken, and its length. NULL: there are no more. */
const uint8_t *rc_left(const struct rc *rc, uint32_t n, uint32_t *len);

/* The state of a checksum behind the headers of IP and UDP of a packet; its length is that of the datagram. */
uint32_t rc_icrc_begun(const struct rc *rc, bool out, uint32_t len);
/* The checksum of a packet of which the base header begins at `packet`, and which is `len` bytes without it. */
uint32_t rc_icrc(uint32_t begun, const uint8_t *packet, uint32_t len);

#endif
