/* engine_wire.h - what carries whole SDP messages between two hosts, as the engine sees it. */
#ifndef SIDESTEP_ENGINE_WIRE_H
#define SIDESTEP_ENGINE_WIRE_H

#include "engine.h"
#include "engine_verbs.h"
#include "rc_qp.h"

#define WIRE_HEADER_MAX 64u /* bytes of a message that are the engine's own, and copied */

struct wire {
	const struct wire_ops *ops;
	int receive_fd, send_fd; /* one that tells what has come, and one that tells of room; they may be the same */
	uint32_t queue_max;   /* bytes waiting, after which nothing is added */
	uint32_t message_max; /* bytes of a message of ours, beside its header */
	int64_t now_ns;
	int64_t deadline_ns; /* when it wants a turn in any case; 0: never */
	uint32_t len;  /* bytes of the message that `next` found */
	int error;     /* errno of what broke it */
	bool readable; /* something may have come */
	bool ended;    /* no more will, behind that */
	bool blocked;  /* it takes nothing now */
	bool hot;      /* so much is copied that the ring is worth pinning */
};

struct wire_ops {
	/* Finds the next whole message, of at most `most` bytes: 1; none has come: 0; else minus an engine_reason. */
	int (*next)(struct wire *wire, uint32_t most);
	/* Copies bytes of it. */
	void (*copy)(const struct wire *wire, uint32_t from, uint8_t *to, uint32_t len);
	/* It is done with. Without this it is given back. */
	void (*taken)(struct wire *wire);
	/* Queues a message: `header` is copied, the pieces stay where they are until they are written. 0, 1: none is taken now, or
	 * minus a reason. */
	int (*put)(struct wire *wire, const uint8_t *header, uint32_t header_len, const struct iovec *pieces,
	           int pieces_len);
	/* Bytes that are queued. */
	uint64_t (*waiting)(const struct wire *wire);
	/* Writes what it can. 0 or minus a reason. */
	int (*flush)(struct wire *wire);
	/* Everything is as who lent it will look at it. -ENOMEM: what waited is gone, and with it the wire, by `error`. */
	int (*give_back)(struct wire *wire);
	/* Of a wire whose descriptor tells nothing unless it was asked to, else NULL: whether there is something to do. */
	bool (*look)(struct wire *wire);
	/* The descriptor tells what comes from now on. False: something has come. */
	bool (*arm)(struct wire *wire);
};

/* iWARP over a TCP socket: a message is a Send of RDMAP in segments of DDP, each in an FPDU of MPA. */
struct wire_stream {
	struct wire wire;
	struct framing_in *in;
	struct framing_out *out;
	uint32_t tx_msn, rx_msn;
	int fd;
	size_t at; /* of the run that `next` found */
};

#define RC_PARTS_MAX 64u
#define RC_DATAGRAM_MAX 65536u

/* A reliable connection that an engine has, or had: what has come and was not looked at, or not taken, stays. */
struct rc_loaned {
	struct rc_qp *qp;
	int receive_fd, send_fd;
	uint32_t local_port, remote_port, train; /* packets that may go by one call */
	uint8_t *datagrams; /* one that comes, in parts of `segment` bytes: [in_at, in_tail); and one that leaves */
	uint32_t in_at, in_tail, segment;
	size_t out_len; /* bytes that the kernel had no room for */
	struct qp_train out_train;
	uint8_t *message; /* a Send that comes, or is whole */
	uint32_t message_size, message_len;
	uint32_t kept; /* bytes that lie in `message`; those behind them lie in `in` */
	uint32_t parts_len;
	struct iovec parts[RC_PARTS_MAX];
	bool whole, solicited;
};
/* Sends a train from this socket. 0 or -errno; -EAGAIN: there is no room. */
int rc_send(const struct rc_qp *qp, int fd, const uint8_t *data, size_t len, const struct qp_train *train);
/* Gives memory back. */
void rc_loaned_free(struct rc_loaned *loaned);
/* Makes room for a message of so many bytes, and keeps a part that has come. False: there is no memory. */
bool rc_loaned_room(struct rc_loaned *loaned, uint32_t size);
extern const struct qp_host rc_loaned_host;

/* RoCEv2 over UDP: a message is a Send of a reliable connection. */
struct wire_datagram {
	struct wire wire;
	struct rc_loaned *loaned;
};

/* A device of the kernel: a message is a Send. */
struct wire_verbs {
	struct wire wire;
	struct verbs_qp *qp;
	const struct channel_end *end;
	uint32_t lkey, pages; /* as in engine_record */
};

void wire_verbs_init(struct wire_verbs *verbs, struct verbs_qp *qp, const struct channel_end *end,
                     const struct engine_record *record);

void wire_datagram_init(struct wire_datagram *datagram, struct rc_loaned *loaned);

void wire_stream_init(struct wire_stream *stream, struct framing_in *in, struct framing_out *out, int fd,
                      uint32_t tx_msn, uint32_t rx_msn);

#endif
