/*
 * framing.h - a direction of an iWARP connection as bytes: DDP segments in FPDUs (RFC 5041 4, RFC 5044 4).
 *
 * `struct framing_out` makes a train of FPDUs of a part of a message and keeps it until it is written. Payload is referenced
 * where it lies; headers, padding, checksums and markers are in the object's own memory. `struct framing_in` stages
 * what arrives, checks whole FPDUs, and gathers the segments that continue each other into runs, of which the payload is
 * then copied to where it belongs. Neither does I/O, knows Python, or judges what a header says.
 *
 * The peer is hostile: a length is believed only within what is there, and memory is bounded by what is staged.
 */
#ifndef SIDESTEP_FRAMING_H
#define SIDESTEP_FRAMING_H

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

/* limits.py tells of these what happens there. */
#define FRAMING_CALL_MAX (256u << 10)
#define FRAMING_WAITING_MAX (1u << 20)
#define FRAMING_BUFFERS_MAX 1024u
#define FRAMING_STAGED_DEFAULT ((256u << 10) + FRAMING_FPDU_MAX)

#define FRAMING_MULPDU_MIN 128u /* RFC 5044 3 */
#define FRAMING_MULPDU_MAX 64768u
#define FRAMING_FPDU_MAX 66064u /* bytes of the largest FPDU: a ULPDU of 65535 and 130 markers */
#define FRAMING_STAGED_MAX (64u << 20)
#define FRAMING_HEADER_MAX 18u /* bytes of the header of an untagged segment */

/* Items in a row: added at the end, taken from the front, moved or made room for when the end is reached. */
struct framing_row {
	uint8_t *items;
	size_t head, tail, size; /* items; [head, tail) are there */
};

/* A piece of the memory that a message is in. */
struct framing_span {
	uint8_t *base;
	size_t len;
	uint64_t until; /* framing_out_put: position in the stream behind its last byte, 0 if it is not referred to */
	bool copied;    /* framing_out_put: its bytes are, in any case */
};

/* What all segments of a message have in common. */
struct framing_message {
	bool tagged;
	uint8_t rdmap; /* the control octet of RDMAP */
	uint32_t stag; /* untagged: the one to invalidate */
	uint64_t to;   /* tagged: of the first byte of the message; segments beyond 2^64 go on at 0 */
	uint32_t queue, msn;
};

struct framing_out {
	bool crc, markers;
	bool partial;           /* what is written ends within an FPDU */
	uint32_t mulpdu;        /* of the segments to come */
	uint64_t position;      /* of the next FPDU in the stream */
	uint64_t written;       /* bytes of the stream */
	struct framing_row pieces; /* struct piece: what waits, in order */
	struct framing_row arena;  /* bytes of our own among it */
	uint64_t arena_start;   /* count of our own bytes before arena.items[0] */
};

int framing_out_init(struct framing_out *out, uint32_t mulpdu, bool crc, bool markers);
void framing_out_free(struct framing_out *out);

/*
 * Frames the bytes [begin, end) of the message that lies in `spans`, of which the last segment of the message is the last
 * if `last`. -EINVAL: out of bounds, -ENOBUFS: too much waits, -ENOMEM; then nothing has changed.
 */
int framing_out_put(struct framing_out *out, const struct framing_message *message, struct framing_span *spans,
                    size_t spans_len, uint64_t begin, uint64_t end, bool last, bool copy);

/* The next `len` of these at most, and their bytes: what to write next. */
size_t framing_out_peek(const struct framing_out *out, struct iovec *pieces, size_t len, size_t *bytes);

/* Copies the next `len` bytes, which must wait, and leaves them where they are. */
void framing_out_copy(const struct framing_out *out, uint8_t *to, size_t len);

/* Bytes that an FPDU still has which is partly written. */
size_t framing_out_rest(const struct framing_out *out);

/* So many bytes of it are written. */
void framing_out_advance(struct framing_out *out, size_t bytes);

/* Copies into our own memory all that is referred to. -ENOMEM */
int framing_out_own(struct framing_out *out);

/* Drops all but the rest of an FPDU that is partly written. */
void framing_out_clear(struct framing_out *out);

static inline uint64_t framing_out_waiting(const struct framing_out *out)
{
	return out->position - out->written;
}

enum framing_fault { FRAMING_OK, FRAMING_CRC, FRAMING_MARKER, FRAMING_SHORT };

/* Where a segment lies. */
struct framing_segment {
	uint32_t at;        /* its length field, in the staging memory */
	uint32_t before;    /* bytes of payload before it in its run */
	uint16_t ulpdu_len; /* bytes */
	uint16_t phase;     /* position of the length field in the stream, modulo the spacing of markers */
};

/* Segments of a message, one behind the other, each of which goes on where the one before it ends. */
struct framing_run {
	bool tagged, last;
	uint8_t control, rdmap; /* control without its L bit */
	uint32_t stag, queue, msn;
	uint32_t first, count; /* segments */
	uint32_t len;          /* bytes of payload */
	uint64_t offset;       /* TO or MO of the first */
};

struct framing_in {
	bool crc, markers;
	enum framing_fault fault;
	uint8_t *staging;    /* made when it is first needed */
	uint32_t size;       /* bytes of it */
	uint32_t head, tail; /* [head, tail) is not read yet */
	uint64_t position;   /* of head in the stream */
	struct framing_row segments, runs; /* of the last call of framing_in_parse */
	bool kept;           /* one of them goes on with the next call */
};

/* -EINVAL if not even one FPDU would fit. */
int framing_in_init(struct framing_in *in, bool crc, bool markers, uint32_t size);
void framing_in_free(struct framing_in *in);

/* Where the next bytes go, and how many: 0 if framing_in_parse has to be called first. -ENOMEM. Ends all runs. */
int framing_in_room(struct framing_in *in, uint8_t **at, size_t *len);

/* So many bytes are there. */
void framing_in_commit(struct framing_in *in, size_t len);

/* Finds the runs in what is staged. Stops for good at the first fault. -ENOMEM if memory is missing for the first. */
int framing_in_parse(struct framing_in *in);

size_t framing_in_runs(const struct framing_in *in, const struct framing_run **runs);

/*
 * Only the last run stays, and goes on in what comes next: for who takes whole messages only. Its segments need no second
 * look then. Not with markers.
 */
void framing_in_keep(struct framing_in *in);

/* Takes nothing of the run and of what follows as read: the next call of framing_in_parse finds it anew. Not with markers. */
void framing_in_unread(struct framing_in *in, size_t index);

/* Copies payload [begin, begin + len) of a run to `offset` in `spans`. -EINVAL if it does not fit; nothing is changed then. */
int framing_in_place(const struct framing_in *in, const struct framing_run *run, uint64_t begin,
                     const struct framing_span *spans, size_t spans_len, uint64_t offset, uint64_t len);

/* The DDP header of a segment of a run; its bytes. */
size_t framing_in_header(const struct framing_in *in, const struct framing_run *run, uint32_t index,
                         uint8_t header[FRAMING_HEADER_MAX], uint16_t *ulpdu_len);

static inline uint32_t framing_in_pending(const struct framing_in *in)
{
	return in->tail - in->head;
}

#endif
