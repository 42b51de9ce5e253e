/*
 * rc_qp.h - a queue pair of InfiniBand's reliable connections (IBTA 9.7), packet by packet: a requester and a responder.
 *
 * The code does no I/O, reads no clock and knows no Python. Payload is copied once, between a packet and the memory of a request.
 * The host says whether memory may be used, and where it is.
 *
 * The other end is hostile: each length, number, key and offset of a packet is checked here, before it is used. Packets of others
 * are left untouched.
 */
#ifndef SIDESTEP_RC_QP_H
#define SIDESTEP_RC_QP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#define QP_ANSWERS_MAX 64u /* that wait to be sent; the next is left out, and asked for again */
#define QP_DEPTH_MAX 16u   /* RDMA Reads and atomic operations under way, each way */
#define QP_PIECES_MAX 16u  /* entries of a request or a receive */
#define QP_MTU_MAX 4096u
#define QP_PACKET_MAX \
	(12u + 28u + QP_MTU_MAX + 4u) /* IBTA chapter 9: base header, the longest extension, payload, checksum */
#define QP_LENGTH_MAX (1u << 31)                    /* bytes of a message (IBTA 9.7.8) */
#define QP_ENGINE_TRAIN 64u /* packets of a datagram: UDP_MAX_SEGMENTS of older kernels */
#define QP_NOWHERE UINT32_MAX

enum qp_op { QP_SEND, QP_WRITE, QP_READ, QP_SWAP, QP_ADD };
enum qp_state { QP_RTR = 2, QP_RTS = 3, QP_ERROR = 6 }; /* ibv_qp_state */
enum qp_right { QP_REMOTE_WRITE = 2, QP_REMOTE_READ = 4, QP_REMOTE_ATOMIC = 8 }; /* ibv_access_flags */
enum qp_status {     /* ibv_wc_status */
	             QP_SUCCESS = 0,
	             QP_LOCAL_LENGTH = 1,
	             QP_LOCAL_PROTECTION = 4,
	             QP_BAD_RESPONSE = 7,
	             QP_REMOTE_INVALID = 9,
	             QP_REMOTE_ACCESS = 10,
	             QP_REMOTE_OPERATION = 11,
	             QP_RETRY_EXCEEDED = 12,
	             QP_RNR_EXCEEDED = 13,
};
enum qp_nak { QP_NAK_RNR, QP_NAK_SEQUENCE, QP_NAK_INVALID, QP_NAK_ACCESS, QP_NAK_OPERATION, QP_NAK_OTHER, QP_NAKS };

/* A request that has sequence numbers: one for each packet of it, or of its answer. */
struct qp_flight {
	struct qp_flight *next;
	enum qp_op op;
	bool solicited, has_immediate, invalidates, failed;
	bool owned; /* memory of nobody else */
	uint8_t immediate[4];
	uint32_t rkey; /* key that the request names, or voids */
	uint32_t first, count, length;
	uint32_t turn; /* turn in which its memory was good */
	uint32_t pieces_len;
	uint64_t va, operand, compare;
	struct iovec *pieces;
};

/* An answer to one number, or to all up to it. */
struct qp_answer {
	enum { QP_WORD, QP_FETCH, QP_OPERATED } kind;
	uint32_t psn, syndrome; /* syndrome: or the opcode of an operation */
	uint32_t rkey, length, count, sent;
	uint64_t va, operand, compare, original;
};

/* Memory of this end that the other one may use; good for one turn. */
struct qp_grant {
	uint32_t turn;
	uint64_t va; /* address of `at` */
	uint8_t *at;
};

/* A message of which not all has come. */
struct qp_message {
	enum { QP_NONE, QP_SENDING, QP_WRITING } kind;
	uint32_t rkey, length, placed; /* length: of all of a Write */
	uint64_t va;
};

struct rc_qp;

/* Questions to the owner. A false that stands for a fault of the owner sets `broken` as well. */
struct qp_host {
	/* Memory of a request may be read, or written by an answer. */
	bool (*may_use)(struct rc_qp *qp, struct qp_flight *flight);
	/* Memory that the other end may use; NULL: `why` has the reason. */
	uint8_t *(*grant)(struct rc_qp *qp, uint32_t key, uint64_t va, uint32_t length, enum qp_right right);
	/* Fills `receive`; false if none is posted. */
	bool (*take_receive)(struct rc_qp *qp);
	bool (*may_receive)(struct rc_qp *qp);
	/* The other end may void a key; else `why` has the reason. */
	bool (*may_void)(struct rc_qp *qp, uint32_t key);
	void (*void_key)(struct rc_qp *qp, uint32_t key);
	/* Takes bytes of a Send, in place of the memory of `receive`; or NULL. */
	void (*place)(struct rc_qp *qp, const uint8_t *payload, uint32_t len);
	/* A message is whole, and `receive` is done with. */
	void (*deliver)(struct rc_qp *qp, uint32_t length, bool solicited, const uint32_t *voided,
	                const uint8_t *immediate);
};

struct rc_qp {
	const struct qp_host *host;
	void *owner; /* data of the host */
	bool broken; /* a fault of the host; nothing goes on */
	bool paused; /* the rest waits for the next call */
	uint32_t plain_max; /* bytes of the longest Send, where only plain Sends are taken; 0: all is taken */
	uint32_t turn; /* number of this call: grants last for one */
	/* the path */
	uint8_t local[16], remote[16];
	bool ipv6;
	uint32_t local_qp, remote_qp, mtu, window, retry_count, rnr_retry, rnr_timer_code;
	int64_t timeout_ns;
	/*
	 * The requester: acknowledged <= cursor <= reached, the first never sent; cursor <= next, the first that no flight has.
	 */
	struct qp_flight *flights, **flights_end, *at; /* the oldest first; that at the cursor */
	struct qp_flight *done;                        /* acknowledged, the last first */
	uint32_t acknowledged, cursor, reached, next;
	uint32_t depth, asked[QP_DEPTH_MAX], asked_at, asked_len; /* numbers behind the answers that were asked for */
	uint32_t retries_left, rnr_left, expiries, gone_back_to;
	int64_t waits_ns, expires_ns; /* deadlines of RNR NAK and of the timer; 0: none */
	struct qp_flight *failed;
	enum qp_status status; /* status of `failed` */
	bool resumes;          /* the timer begins with the next look at the clock */
	/* the responder */
	uint32_t resources, remote_access, expected, completed, carried_out;
	bool begun; /* the expected packet has come once */
	bool reported_gap, ended;
	struct qp_message message;
	struct qp_grant room;
	struct {
		uint32_t pieces_len, turn;
		uint64_t length;
		struct iovec pieces[QP_PIECES_MAX];
		bool bad; /* memory that cannot be written */
	} receive;
	struct qp_answer answers[QP_ANSWERS_MAX], fetches[QP_DEPTH_MAX], last_word;
	uint32_t answers_len, fetches_len;
	struct qp_grant source; /* memory of the Read that is answered */
	bool refused;           /* the queue pair is to end, with: */
	enum qp_nak nak;
	enum qp_status receive_status; /* status of the receive that the message has taken; or success */
	char why[128];
	/* a packet that did not fit into the last train */
	uint8_t held[QP_PACKET_MAX];
	uint32_t held_len;
	/* the checksum of packets that come of this length, from this port */
	uint32_t in_len, in_port, in_begun, in_before;
	/* states of the checksum before the base headers of full packets of these identifications, from this port */
	uint32_t out_port, out_known, out_begun[QP_ENGINE_TRAIN];
	/* done so far */
	uint64_t packets_sent, packets_received, packets_resent, packets_dropped, resent, naks_sent[QP_NAKS],
		naks_received[QP_NAKS];
};

/* One packet, as it came. */
struct qp_packet {
	uint32_t opcode, has, psn, pad, len;
	bool asks, solicited;
	const uint8_t *reth, *aeth, *original, *atomic, *immediate, *ieth, *payload;
};

/* Headers and properties of an opcode. */
enum {
	QP_RETH = 1,
	QP_AETH = 2,
	QP_ORIGINAL = 4,
	QP_ATOMIC = 8,
	QP_IMMEDIATE = 16,
	QP_IETH = 32,
	QP_STARTS = 64,
	QP_ENDS = 128,
	QP_IS_SEND = 256,
	QP_IS_WRITE = 512,
	QP_IS_FETCH = 1024,
	QP_IS_RESPONSE = 2048,
	QP_KNOWN = 4096,
};
extern const uint16_t qp_opcodes[32];

static inline uint32_t qp_after(uint32_t psn, uint32_t count)
{
	return (psn + count) & 0xFFFFFF;
}

/* Steps from one number to another that is ahead on the circle (IBTA 9.7.1); negative: it is behind. */
static inline int32_t qp_ahead(uint32_t psn, uint32_t of)
{
	return (int32_t)((psn - of) << 8) >> 8;
}

/* Sequence numbers of a message, or of the answer to a Read: one at least (IBTA 9.7.2). */
static inline uint32_t qp_packets_of(uint32_t length, uint32_t mtu)
{
	return length ? (uint32_t)(((uint64_t)length + mtu - 1) / mtu) : 1;
}

/* The path is set. */
void qp_begin(struct rc_qp *qp, uint32_t send_psn, uint32_t receive_psn);

/*
 * Takes packets in, in datagrams of `segment` bytes each but the last; bytes that were taken, up to what is none of its own. Where
 * only plain ones are taken, damaged ones are dropped.
 */
size_t qp_receive(struct rc_qp *qp, const uint8_t *data, size_t len, uint32_t segment, uint32_t port,
                  enum qp_state state, int64_t now_ns);

/*
 * The next packets to send, at most `most`, as one datagram to be cut into segments: its bytes; 0: there is none.
 * `room` bytes lie at `to`; QP_PACKET_MAX at least.
 */
struct qp_train {
	uint32_t most, segment, count;
	uint32_t port; /* source port */
	bool sends;    /* requests, too: the state is RTS */
};
size_t qp_train(struct rc_qp *qp, uint8_t *to, size_t room, struct qp_train *train, int64_t now_ns);

/* The time of the next qp_pass(); 0: none. */
int64_t qp_deadline(const struct rc_qp *qp);
void qp_pass(struct rc_qp *qp, int64_t now_ns);
/* Ends all requests and answers but the last word of the responder. */
void qp_stop(struct rc_qp *qp);
/* Sends again all that is not acknowledged: what was made last has not left. */
void qp_rewind(struct rc_qp *qp);

/* ---- the requester ---- */
void qp_post(struct rc_qp *qp, struct qp_flight *flight);
/* The packet at the cursor; 0: none may be sent. Its length, without the checksum. */
uint32_t qp_request(struct rc_qp *qp, uint8_t *to, int64_t now_ns);
void qp_respond(struct rc_qp *qp, const struct qp_packet *packet, int64_t now_ns);

/* ---- the responder ---- */
uint32_t qp_answer(struct rc_qp *qp, uint8_t *to);
void qp_serve(struct rc_qp *qp, const struct qp_packet *packet, enum qp_state state);
/* Acknowledges all that was carried out. */
void qp_acknowledge(struct rc_qp *qp);

/* ---- both ---- */
uint32_t qp_put_header(const struct rc_qp *qp, uint8_t *to, uint32_t opcode, uint32_t flags, uint32_t pad,
                       uint32_t psn);
enum { QP_ASKS = 1, QP_SOLICITED = 2 };
/* Puts the checksum behind a packet that leaves this port, in an IP packet of this identification. */
void qp_seal(struct rc_qp *qp, uint8_t *packet, uint32_t len, uint32_t port, uint32_t id);
void qp_put32(uint8_t *at, uint32_t value);
void qp_put64(uint8_t *at, uint64_t value);
uint32_t qp_get32(const uint8_t *at);
uint64_t qp_get64(const uint8_t *at);
/* Copies between a message's pieces, from an offset on, and a packet. Bytes that lay in them. */
uint32_t qp_gather(const struct iovec *pieces, uint32_t count, uint64_t offset, uint8_t *to, uint32_t len);
uint32_t qp_scatter(const struct iovec *pieces, uint32_t count, uint64_t offset, const uint8_t *from, uint32_t len);
void qp_count_nak(uint64_t counts[QP_NAKS], uint32_t syndrome);

#endif
