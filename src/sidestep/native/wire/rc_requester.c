/*
 * rc_requester.c - what this end asks for, until it is acknowledged (IBTA 9.7.5, 9.7.6).
 *
 * The packet at the cursor is made of the memory of its request whenever it is sent: go-back-N only moves the cursor back. A Read is
 * asked for in requests of half a window each, as far as the depth allows: sockets drop long bursts. The first missing packet of its
 * answer begins the request that repeats it. An atomic operation has one number, and is repeated as it was.
 *
 * An acknowledgement of all up to a number, a NAK, or a packet of a Read's answer comes back. One that passes an answer that is not
 * whole tells that something of it was lost. Outside of what was sent and not acknowledged it is old, or made up, and dropped.
 *
 * `retry_count` times without progress all is sent again, because it was lost; `rnr_retry` times because the other end had no
 * receive, seven for ever (IBTA 9.7.5.2.8). The first expiry of the timer comes after the timeout agreed, each after that takes
 * longer: the other end may be a process that waits for a CPU. IBTA 9.7.6.1.3 would have four times at most.
 */
#include "rc_qp.h"

#include <string.h>

#define ACK_EVERY 32u /* packets; a power of two */
#define RNR_ENDLESS 7u
#define PATIENCE_MAX 4u /* times that the timeout doubles */
#define ATOMIC_LEN 8u
#define NAK_SEQUENCE 0x60u
#define NAK_INVALID 0x61u
#define NAK_ACCESS 0x62u
enum { READ_REQUEST = 0x0C, ACKNOWLEDGE = 0x11, ATOMIC_ACK = 0x12, COMPARE_SWAP = 0x13, FETCH_ADD = 0x14 };

/* IBTA 9.7.5.2.8, table 45: the least wait of each timer code, in units of 10 us. */
static const uint16_t RNR_WAITS[32] = {0,    1,    2,    3,    4,    6,     8,     12,    16,    24,   32,
                                       48,   64,   96,   128,  192,  256,   384,   512,   768,   1024, 1536,
                                       2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152};
#define RNR_UNIT_NS 10000
#define RNR_LONGEST 65536 /* units of code 0 */

static uint32_t end_of(const struct qp_flight *flight)
{
	return qp_after(flight->first, flight->count);
}

static bool is_atomic(const struct qp_flight *flight)
{
	return flight->op == QP_SWAP || flight->op == QP_ADD;
}

void qp_post(struct rc_qp *qp, struct qp_flight *flight)
{
	flight->next = NULL;
	flight->first = qp->next;
	flight->count = is_atomic(flight) ? 1 : qp_packets_of(flight->length, qp->mtu);
	*qp->flights_end = flight;
	qp->flights_end = &flight->next;
	qp->next = end_of(flight);
	if (!qp->at && qp_ahead(qp->cursor, qp->next) < 0)
		qp->at = flight;
}

static void start_timer(struct rc_qp *qp, int64_t now)
{
	qp->expires_ns = now + (qp->timeout_ns << (qp->expiries < PATIENCE_MAX ? qp->expiries : PATIENCE_MAX));
}

/* The request ends with a status; it and all behind it are not sent any more. */
static void fail(struct rc_qp *qp, struct qp_flight *flight, enum qp_status status)
{
	flight->failed = true;
	qp->failed = flight;
	qp->status = status;
}

static void finish(struct rc_qp *qp)
{
	struct qp_flight *flight = qp->flights;

	qp->flights = flight->next;
	if (!qp->flights)
		qp->flights_end = &qp->flights;
	if (qp->at == flight)
		qp->at = flight->next;
	flight->next = qp->done;
	qp->done = flight;
}

/* ---- what goes out ---- */
/* The other end has room for one more request that it is to answer. */
static bool may_ask(struct rc_qp *qp)
{
	while (qp->asked_len && qp_ahead(qp->acknowledged, qp->asked[qp->asked_at]) >= 0) {
		qp->asked_at = (qp->asked_at + 1) % QP_DEPTH_MAX;
		qp->asked_len--;
	}
	return qp->asked_len < qp->depth && qp->asked_len < QP_DEPTH_MAX;
}

/* Numbers that the next packet takes, a part of the window for a Read; 0: none may be sent. */
static uint32_t may_send(struct rc_qp *qp)
{
	const struct qp_flight *flight = qp->at;
	uint32_t outstanding = (uint32_t)qp_ahead(qp->cursor, qp->acknowledged), count = 1;

	if (!flight || qp->waits_ns || flight->failed || outstanding >= qp->window)
		return 0;
	if (flight->op == QP_READ) {
		uint32_t done = (uint32_t)qp_ahead(qp->cursor, flight->first), part = qp->window / 2 ? qp->window / 2 : 1;
		/* Asked for again it is a part of one request, never of two: only that may be repeated (IBTA 9.7.5.1.6). */
		count = part - done % part;
		if (count > flight->count - done)
			count = flight->count - done;
		if (outstanding && outstanding + count > qp->window)
			return 0;
	}
	return (flight->op == QP_READ || is_atomic(flight)) && !may_ask(qp) ? 0 : count;
}

static void step(struct rc_qp *qp, struct qp_flight *flight, uint32_t count)
{
	qp->packets_resent += qp_ahead(qp->cursor, qp->reached) < 0;
	qp->cursor = qp_after(qp->cursor, count);
	if (qp->cursor == end_of(flight))
		qp->at = flight->next;
	if (qp_ahead(qp->cursor, qp->reached) > 0)
		qp->reached = qp->cursor;
	if (flight->op == QP_READ || is_atomic(flight))
		qp->asked[(qp->asked_at + qp->asked_len++) % QP_DEPTH_MAX] = qp->cursor;
}

static uint32_t put_reth(uint8_t *to, uint64_t va, uint32_t rkey, uint32_t length)
{
	qp_put64(to, va);
	qp_put32(to + 8, rkey);
	qp_put32(to + 12, length);
	return 16;
}

static uint32_t ask_for(struct rc_qp *qp, const struct qp_flight *flight, uint8_t *to, uint32_t count)
{
	uint32_t begin = (uint32_t)qp_ahead(qp->cursor, flight->first) * qp->mtu, left = flight->length - begin;
	uint32_t length = (uint64_t)count * qp->mtu < left ? count * qp->mtu : left;
	uint32_t at = qp_put_header(qp, to, READ_REQUEST, QP_ASKS, 0, qp->cursor);

	return at + put_reth(to + at, flight->va + begin, flight->rkey, length);
}

static uint32_t operate(const struct rc_qp *qp, const struct qp_flight *flight, uint8_t *to)
{
	uint32_t at = qp_put_header(qp, to, flight->op == QP_SWAP ? COMPARE_SWAP : FETCH_ADD, QP_ASKS, 0, qp->cursor);

	qp_put64(to + at, flight->va);
	qp_put32(to + at + 8, flight->rkey);
	qp_put64(to + at + 12, flight->operand);
	qp_put64(to + at + 20, flight->compare);
	return at + 28;
}

static uint32_t opcode_of(const struct qp_flight *flight, bool begins, bool ends)
{
	uint32_t base = flight->op == QP_WRITE ? 6 : 0, imm = flight->has_immediate;

	if (!ends)
		return base + !begins;
	if (flight->invalidates)
		return begins ? 0x17 : 0x16;
	return base + (begins ? 4 : 2) + imm;
}

/* A packet of a Send or Write. */
static uint32_t piece_of(const struct rc_qp *qp, const struct qp_flight *flight, uint8_t *to)
{
	uint32_t index = (uint32_t)qp_ahead(qp->cursor, flight->first), begin = index * qp->mtu;
	bool begins = !index, ends = index == flight->count - 1;
	uint32_t len = ends ? flight->length - begin : qp->mtu, pad = -len & 3; /* IBTA 9.2.4: packets end on four bytes */
	/* IBTA 9.2.3: what completes a receive may ask for an event. */
	bool solicited = ends && flight->solicited && (flight->op == QP_SEND || flight->has_immediate);
	uint32_t at = qp_put_header(qp, to, opcode_of(flight, begins, ends), solicited ? QP_SOLICITED : 0, pad, qp->cursor);

	if (begins && flight->op == QP_WRITE)
		at += put_reth(to + at, flight->va, flight->rkey, flight->length);
	if (ends && flight->has_immediate) {
		memcpy(to + at, flight->immediate, sizeof(flight->immediate));
		at += sizeof(flight->immediate);
	} else if (ends && flight->invalidates) {
		qp_put32(to + at, flight->rkey);
		at += 4;
	}
	memset(to + at + len, 0, pad);
	qp_gather(flight->pieces, flight->pieces_len, begin, to + at, len);
	return at + len + pad;
}

uint32_t qp_request(struct rc_qp *qp, uint8_t *to, int64_t now)
{
	struct qp_flight *flight = qp->at;
	uint32_t count = may_send(qp), len;
	bool first = qp->cursor == qp->acknowledged;

	if (!count)
		return 0;
	if (flight->op == QP_READ) {
		len = ask_for(qp, flight, to, count);
	} else if (is_atomic(flight)) {
		len = operate(qp, flight, to);
	} else {
		if (!flight->owned && flight->turn != qp->turn && !qp->host->may_use(qp, flight)) {
			fail(qp, flight, QP_LOCAL_PROTECTION); /* taken back since it was posted */
			return 0;
		}
		flight->turn = qp->turn;
		len = piece_of(qp, flight, to);
	}
	uint32_t psn = qp->cursor;
	step(qp, flight, count);
	/* Acknowledgements are asked for with the last packet that may be sent now, and every so often before. */
	if (!(qp_after(psn, 1) % ACK_EVERY) || !may_send(qp))
		to[8] |= 0x80;
	if (first)
		start_timer(qp, now);
	return len;
}

/* ---- going back ---- */
void qp_rewind(struct rc_qp *qp)
{
	qp->cursor = qp->acknowledged;
	qp->at = qp->flights;
	qp->asked_len = 0;
	qp->held_len = 0;
}

/* Sends again what is not acknowledged, once for each loss. */
static void go_back(struct rc_qp *qp, int64_t now)
{
	if (qp->gone_back_to == qp->acknowledged || qp->waits_ns)
		return;
	if (!qp->retries_left) {
		fail(qp, qp->flights, QP_RETRY_EXCEEDED);
		return;
	}
	qp->retries_left--;
	qp->gone_back_to = qp->acknowledged;
	start_timer(qp, now);
	qp->resent++;
	qp_rewind(qp);
}

static void progress(struct rc_qp *qp, int64_t now)
{
	qp->retries_left = qp->retry_count;
	qp->rnr_left = qp->rnr_retry;
	qp->gone_back_to = QP_NOWHERE;
	qp->expiries = 0;
	start_timer(qp, now);
	if (qp_ahead(qp->cursor, qp->acknowledged) < 0) { /* the resent packets had come after all */
		qp->cursor = qp->acknowledged;
		qp->at = qp->flights;
	}
}

int64_t qp_deadline(const struct rc_qp *qp)
{
	if (qp->waits_ns)
		return qp->waits_ns;
	return qp->reached != qp->acknowledged && !qp->resumes ? qp->expires_ns : 0;
}

void qp_pass(struct rc_qp *qp, int64_t now)
{
	int64_t deadline = qp_deadline(qp);

	if (!deadline || now < deadline)
		return;
	if (qp->waits_ns) {
		qp->waits_ns = 0;
		start_timer(qp, now);
		return;
	}
	qp->gone_back_to = QP_NOWHERE;
	qp->expiries++;
	go_back(qp, now);
}

/* ---- what comes back ---- */
/*
 * Acknowledges all before this number; false if an answer among them is missing (IBTA 9.7.5.1.2): then all before that.
 */
static bool acknowledge(struct rc_qp *qp, uint32_t end, int64_t now)
{
	uint32_t begin = qp->acknowledged;

	while (qp->flights && qp_ahead(end, qp->acknowledged) > 0 &&
	       (qp->flights->op == QP_SEND || qp->flights->op == QP_WRITE)) {
		uint32_t behind = end_of(qp->flights);
		if (qp_ahead(end, behind) < 0) {
			qp->acknowledged = end;
			break;
		}
		qp->acknowledged = behind;
		finish(qp);
	}
	if (qp->acknowledged != begin)
		progress(qp, now);
	return qp_ahead(end, qp->acknowledged) <= 0;
}

static struct qp_flight *flight_of(const struct rc_qp *qp, uint32_t psn)
{
	struct qp_flight *flight = qp->flights;

	while (flight && qp_ahead(psn, end_of(flight)) >= 0)
		flight = flight->next;
	return flight;
}

/* An answer's bytes go where its request says; false: they cannot. */
static bool place(struct rc_qp *qp, struct qp_flight *flight, uint32_t begin, const uint8_t *from, uint32_t len)
{
	if (flight->turn != qp->turn && !qp->host->may_use(qp, flight)) {
		fail(qp, flight, QP_LOCAL_PROTECTION);
		return false;
	}
	flight->turn = qp->turn;
	if (qp_scatter(flight->pieces, flight->pieces_len, begin, from, len) == len)
		return true;
	fail(qp, flight, QP_LOCAL_PROTECTION);
	return false;
}

/* A packet of the answer to an RDMA Read. */
static void answered(struct rc_qp *qp, const struct qp_packet *packet, int64_t now)
{
	struct qp_flight *flight = flight_of(qp, packet->psn);

	if (!flight || flight->op != QP_READ)
		return; /* the answer to what is none */
	if (!acknowledge(qp, flight->first, now) || packet->psn != qp->acknowledged) {
		go_back(qp, now); /* a packet before it was lost */
		return;
	}
	uint32_t begin = (uint32_t)qp_ahead(packet->psn, flight->first) * qp->mtu, left = flight->length - begin;
	/* First or Middle, Last or Only: who answers again from the middle may call it either (IBTA is silent). */
	if (packet->len != (left < qp->mtu ? left : qp->mtu) || (packet->aeth && packet->aeth[0] >> 5)) {
		fail(qp, flight, QP_BAD_RESPONSE);
		return;
	}
	if (!place(qp, flight, begin, packet->payload, packet->len))
		return;
	qp->acknowledged = qp_after(packet->psn, 1);
	if (qp->acknowledged == end_of(flight))
		finish(qp);
	progress(qp, now);
}

/* The answer to an atomic operation: the number before it. */
static void operated(struct rc_qp *qp, const struct qp_packet *packet, int64_t now)
{
	struct qp_flight *flight = flight_of(qp, packet->psn);

	if (!flight || !is_atomic(flight))
		return; /* the answer to what is none */
	if (!acknowledge(qp, flight->first, now)) {
		go_back(qp, now); /* a packet before it was lost */
		return;
	}
	uint64_t original = qp_get64(packet->original);
	if (packet->aeth[0] >> 5 || packet->len) {
		fail(qp, flight, QP_BAD_RESPONSE);
		return;
	}
	if (!place(qp, flight, 0, (const uint8_t *)&original, ATOMIC_LEN))
		return;
	qp->acknowledged = end_of(flight);
	finish(qp);
	progress(qp, now);
}

/* RNR NAK: the other end had no receive for this packet (IBTA 9.7.5.2.8). */
static void not_ready(struct rc_qp *qp, uint32_t psn, uint32_t code, int64_t now)
{
	if (!acknowledge(qp, psn, now)) {
		go_back(qp, now);
		return;
	}
	if (qp->waits_ns)
		return; /* the same NAK again */
	if (qp->rnr_retry != RNR_ENDLESS && !qp->rnr_left--) {
		fail(qp, qp->flights, QP_RNR_EXCEEDED);
		return;
	}
	qp->resent++;
	qp_rewind(qp);
	qp->waits_ns = now + (int64_t)(code ? RNR_WAITS[code] : RNR_LONGEST) * RNR_UNIT_NS;
}

/* NAK: all before this packet was carried out, and it was not (IBTA 9.7.5.2.8, table 46). */
static void refused(struct rc_qp *qp, uint32_t psn, uint32_t syndrome, int64_t now)
{
	if (!acknowledge(qp, psn, now) || syndrome == NAK_SEQUENCE)
		go_back(qp, now);
	else
		fail(qp, qp->flights,
		     syndrome == NAK_INVALID  ? QP_REMOTE_INVALID
		     : syndrome == NAK_ACCESS ? QP_REMOTE_ACCESS
		                              : QP_REMOTE_OPERATION);
}

void qp_respond(struct rc_qp *qp, const struct qp_packet *packet, int64_t now)
{
	int32_t distance = qp_ahead(packet->psn, qp->acknowledged);

	if (packet->aeth)
		qp_count_nak(qp->naks_received, packet->aeth[0]);
	if (distance < 0 || distance >= qp_ahead(qp->reached, qp->acknowledged))
		return; /* IBTA 9.7.5.1.4: old, or not of this connection */
	if (packet->opcode == ATOMIC_ACK) {
		operated(qp, packet, now);
	} else if (packet->opcode != ACKNOWLEDGE) {
		answered(qp, packet, now);
	} else {
		uint32_t syndrome = packet->aeth[0];
		if (syndrome >> 5 == 0 && !acknowledge(qp, qp_after(packet->psn, 1), now))
			go_back(qp, now);
		else if (syndrome >> 5 == 1)
			not_ready(qp, packet->psn, syndrome & 0x1F, now);
		else if (syndrome >> 5 == 3)
			refused(qp, packet->psn, syndrome, now);
	}
}
