/*
 * rc_responder.c - what the other end asks for, checked, carried out once (IBTA 9.7.3, 9.7.4).
 *
 * The packet that is expected goes through a line of checks; the first that fails decides the answer. A packet ahead of it shows a
 * loss, and is answered with one NAK until the expected one is here. A packet behind it was carried out before, and is acknowledged
 * again. A repeated Read is answered out of the memory as it is now. A repeated atomic operation is answered by the number that was
 * kept, or not at all (IBTA 9.7.5.1.6).
 *
 *     a check fails for                     answer                          queue pair
 *     opcodes, lengths, rights, alignment   NAK 0x61 invalid request        error
 *     key, domain, bounds                   NAK 0x62 remote access          error
 *     a receive of this end                 NAK 0x63 remote operational     error
 *     no receive is posted                  RNR NAK: the same packet again  goes on
 *     a number that was left out            NAK 0x60: go back to it         goes on
 *
 * Answers leave in the order of their numbers, an acknowledgement behind the answers to the Reads before it; one acknowledgement
 * stands for all that are due. A Read's answer is made packet by packet as it is sent, and its key is checked anew in each turn.
 *
 * A refusal that ends the queue pair is this end's last word. It is given again to who asks again, since it may be lost; the
 * specification would have a queue pair in error be silent (IBTA 9.7.4.1 says nothing of the answer's own loss).
 */
#include "rc_qp.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define ACK 0x1Fu /* that says nothing of credits */
#define RNR_NAK 0x20u /* and the code of a timer */
#define NAK 0x60u /* and what it says, from QP_NAK_SEQUENCE on */
#define ATOMIC_LEN 8u
enum { READ_REQUEST = 0x0C, RESPONSE_FIRST, RESPONSE_MIDDLE, RESPONSE_LAST, RESPONSE_ONLY, ACKNOWLEDGE, ATOMIC_ACK };
enum { FETCH_ADD = 0x14 };

/* ---- answers ---- */
/* Queues in the order of numbers; an acknowledgement takes the place of the one before it, or after it. */
static void queue(struct rc_qp *qp, struct qp_answer answer)
{
	struct qp_answer *answers = qp->answers;
	uint32_t at = qp->answers_len;
	bool word = answer.kind == QP_WORD, plain = word && answer.syndrome == ACK;

	if (at == QP_ANSWERS_MAX)
		return;
	while (at && qp_ahead(answers[at - 1].psn, answer.psn) > 0)
		at--;
	if (word && at && answers[at - 1].kind == QP_WORD) {
		if (answers[at - 1].psn == answer.psn && answers[at - 1].syndrome == answer.syndrome)
			return;
		if (plain && answers[at - 1].syndrome == ACK) {
			answers[at - 1] = answer;
			return;
		}
	}
	if (plain && at < qp->answers_len && answers[at].kind == QP_WORD)
		return; /* that one covers this one */
	memmove(answers + at + 1, answers + at, (qp->answers_len++ - at) * sizeof(answer));
	answers[at] = answer;
}

static void queue_word(struct rc_qp *qp, uint32_t psn, uint32_t syndrome)
{
	queue(qp, (struct qp_answer){.kind = QP_WORD, .psn = psn, .syndrome = syndrome});
}

void qp_acknowledge(struct rc_qp *qp)
{
	queue_word(qp, qp->carried_out, ACK);
}

static void remove_at(struct qp_answer *answers, uint32_t *len, uint32_t at)
{
	--*len;
	memmove(answers + at, answers + at + 1, (*len - at) * sizeof(*answers));
}

/* Ends the queue pair. `status`: that of the receive which the message has taken; success: none. */
static void refuse(struct rc_qp *qp, uint32_t psn, enum qp_nak nak, enum qp_status status, const char *format, ...)
	__attribute__((format(printf, 5, 6)));

static void refuse(struct rc_qp *qp, uint32_t psn, enum qp_nak nak, enum qp_status status, const char *format, ...)
{
	va_list values;

	if (format) {
		va_start(values, format);
		vsnprintf(qp->why, sizeof(qp->why), format, values);
		va_end(values);
	}
	qp->refused = qp->ended = true;
	qp->nak = nak;
	qp->receive_status = status;
	qp->last_word = (struct qp_answer){.kind = QP_WORD, .psn = psn, .syndrome = NAK + (uint32_t)nak - QP_NAK_SEQUENCE};
	queue(qp, qp->last_word);
}

/* IBTA 9.7.5.2.8: nothing was done, and what is behind it is dropped without a word until it comes again. */
static void not_ready(struct rc_qp *qp, uint32_t psn)
{
	qp->reported_gap = true;
	queue_word(qp, psn, RNR_NAK | qp->rnr_timer_code);
}

static void carry_out(struct rc_qp *qp, uint32_t psn)
{
	qp->carried_out = psn;
	qp->expected = qp_after(psn, 1);
}

static void finish(struct rc_qp *qp)
{
	qp->message.kind = QP_NONE;
	qp->completed = qp_after(qp->completed, 1);
}

static void deliver(struct rc_qp *qp, const struct qp_packet *packet, uint32_t length, const uint32_t *voided)
{
	finish(qp);
	qp->host->deliver(qp, length, packet->solicited, voided, packet->immediate);
}

/* ---- checks ---- */
/* IBTA 9.7.4.1.3: packets of one message follow each other, and nothing comes between them. */
static bool is_due(const struct rc_qp *qp, uint32_t has)
{
	if (qp->message.kind == QP_NONE)
		return has & QP_IS_FETCH || has & QP_STARTS;
	return !(has & QP_STARTS) && has & (qp->message.kind == QP_SENDING ? QP_IS_SEND : QP_IS_WRITE);
}

/* IBTA 9.7.4.1.6: what a packet of this opcode carries. */
static bool is_of_its_length(const struct rc_qp *qp, const struct qp_packet *packet)
{
	if (packet->has & QP_IS_FETCH)
		return !packet->len && !packet->pad;
	if (!(packet->has & QP_ENDS))
		return packet->len == qp->mtu && !packet->pad;
	return packet->len <= qp->mtu && packet->pad == (-packet->len & 3) && (packet->len || packet->has & QP_STARTS);
}

/* Memory that the other end named, from `va` on: checked in each turn, since access may end in between. */
static uint8_t *granted(struct rc_qp *qp, struct qp_grant *grant, uint32_t key, uint64_t va, uint32_t left,
                        enum qp_right right)
{
	if (grant->turn != qp->turn) {
		grant->at = qp->host->grant(qp, key, va, left, right);
		grant->va = va;
		grant->turn = grant->at ? qp->turn : qp->turn - 1;
	}
	return grant->at ? grant->at + (va - grant->va) : NULL;
}

static void refuse_access(struct rc_qp *qp, uint32_t psn)
{
	refuse(qp, psn, QP_NAK_ACCESS, QP_SUCCESS, NULL);
}

/* ---- requests ---- */
static void take_send(struct rc_qp *qp, const struct qp_packet *packet)
{
	struct qp_message *message = &qp->message;
	uint32_t psn = packet->psn, voided = packet->ieth ? qp_get32(packet->ieth) : 0;

	if (message->kind == QP_NONE) {
		if (!qp->host->take_receive(qp)) {
			not_ready(qp, psn);
			return;
		}
		*message = (struct qp_message){.kind = QP_SENDING};
		qp->receive.turn = qp->turn - 1;
	}
	if (packet->len > qp->receive.length - message->placed) {
		refuse(qp, psn, QP_NAK_INVALID, QP_LOCAL_LENGTH, "a message is longer than the receive posted for it");
		return;
	}
	if (packet->ieth && !qp->host->may_void(qp, voided)) {
		refuse_access(qp, psn);
		return;
	}
	if (qp->receive.bad || (qp->receive.turn != qp->turn && !qp->host->may_receive(qp))) {
		refuse(qp, psn, QP_NAK_OPERATION, QP_LOCAL_PROTECTION, "a posted receive lies in no region");
		return;
	}
	qp->receive.turn = qp->turn;
	if (qp->host->place)
		qp->host->place(qp, packet->payload, packet->len);
	else
		qp_scatter(qp->receive.pieces, qp->receive.pieces_len, message->placed, packet->payload, packet->len);
	message->placed += packet->len;
	carry_out(qp, psn);
	if (!(packet->has & QP_ENDS))
		return;
	if (packet->ieth) {
		qp->host->void_key(qp, voided);
		qp->turn++; /* grants may be void */
	}
	deliver(qp, packet, message->placed, packet->ieth ? &voided : NULL);
}

static void take_write(struct rc_qp *qp, const struct qp_packet *packet)
{
	struct qp_message message = qp->message;
	bool ends = packet->has & QP_ENDS;

	if (!(qp->remote_access & QP_REMOTE_WRITE)) {
		refuse(qp, packet->psn, QP_NAK_INVALID, QP_SUCCESS, "the other end may not write on this queue pair");
		return;
	}
	if (message.kind == QP_NONE) {
		message = (struct qp_message){.kind = QP_WRITING,
		                              .va = qp_get64(packet->reth),
		                              .rkey = qp_get32(packet->reth + 8),
		                              .length = qp_get32(packet->reth + 12)};
		qp->room.turn = qp->turn - 1;
	}
	uint32_t left = message.length - message.placed;
	if (packet->len > left || ends != (packet->len == left) || message.length > QP_LENGTH_MAX) {
		refuse(qp, packet->psn, QP_NAK_INVALID, QP_SUCCESS, "a packet of an RDMA Write of %u bytes, where %u are left",
		       packet->len, left);
		return;
	}
	/* Memory for the remaining message is checked before its next byte. */
	uint8_t *at = NULL;
	if (left && !(at = granted(qp, &qp->room, message.rkey, message.va + message.placed, left, QP_REMOTE_WRITE))) {
		refuse_access(qp, packet->psn);
		return;
	}
	if (packet->immediate && !qp->host->take_receive(qp)) {
		not_ready(qp, packet->psn);
		return;
	}
	if (at)
		memcpy(at, packet->payload, packet->len);
	message.placed += packet->len;
	qp->message = message;
	carry_out(qp, packet->psn);
	if (ends && packet->immediate)
		deliver(qp, packet, message.length, NULL);
	else if (ends)
		finish(qp);
}

/* Carries out a new Read or operation. */
static void answer_by(struct rc_qp *qp, struct qp_answer answer, uint32_t expected)
{
	uint32_t waiting = 0, first = 0;

	for (uint32_t i = qp->answers_len; i--;)
		if (qp->answers[i].kind != QP_WORD) {
			waiting++;
			first = i;
		}
	/* A peer that keeps to the depth agreed has the oldest answer already, and it is a repeated one. */
	if (waiting >= qp->resources)
		remove_at(qp->answers, &qp->answers_len, first);
	if (qp->fetches_len == qp->resources)
		remove_at(qp->fetches, &qp->fetches_len, 0);
	qp->fetches[qp->fetches_len++] = answer;
	queue(qp, answer);
	qp->expected = expected;
	finish(qp);
}

static struct qp_answer read_of(const struct rc_qp *qp, const struct qp_packet *packet)
{
	uint32_t length = qp_get32(packet->reth + 12);

	return (struct qp_answer){.kind = QP_FETCH,
	                          .psn = packet->psn,
	                          .va = qp_get64(packet->reth),
	                          .rkey = qp_get32(packet->reth + 8),
	                          .length = length,
	                          .count = qp_packets_of(length, qp->mtu)};
}

static void take_read(struct rc_qp *qp, const struct qp_packet *packet)
{
	struct qp_answer read = read_of(qp, packet);

	if (!(qp->remote_access & QP_REMOTE_READ) || !qp->resources || read.length > QP_LENGTH_MAX) {
		refuse(qp, packet->psn, QP_NAK_INVALID, QP_SUCCESS,
		       "an RDMA Read of %u bytes, which the other end may not make on this queue pair", read.length);
		return;
	}
	if (read.length && !qp->host->grant(qp, read.rkey, read.va, read.length, QP_REMOTE_READ)) {
		refuse_access(qp, packet->psn);
		return;
	}
	answer_by(qp, read, qp_after(packet->psn, read.count));
}

static struct qp_answer operation_of(const struct qp_packet *packet)
{
	return (struct qp_answer){.kind = QP_OPERATED,
	                          .psn = packet->psn,
	                          .syndrome = packet->opcode,
	                          .va = qp_get64(packet->atomic),
	                          .rkey = qp_get32(packet->atomic + 8),
	                          .operand = qp_get64(packet->atomic + 12),
	                          .compare = qp_get64(packet->atomic + 20)};
}

static void take_atomic(struct rc_qp *qp, const struct qp_packet *packet)
{
	struct qp_answer asked = operation_of(packet);
	uint64_t value;

	if (!(qp->remote_access & QP_REMOTE_ATOMIC) || !qp->resources) {
		refuse(qp, packet->psn, QP_NAK_INVALID, QP_SUCCESS,
		       "an atomic operation, which the other end may not ask for on this queue pair");
		return;
	}
	if (asked.va % ATOMIC_LEN) { /* IBTA 9.4.5 */
		refuse(qp, packet->psn, QP_NAK_INVALID, QP_SUCCESS,
		       "an atomic operation at %#llx, which is not a multiple of 8", (unsigned long long)asked.va);
		return;
	}
	uint8_t *at = qp->host->grant(qp, asked.rkey, asked.va, ATOMIC_LEN, QP_REMOTE_ATOMIC);
	if (!at) {
		refuse_access(qp, packet->psn);
		return;
	}
	memcpy(&asked.original, at,
	       sizeof(value)); /* the memory need not be aligned: its addresses on the wire are made up */
	if (packet->opcode == FETCH_ADD)
		value = asked.original + asked.operand;
	else
		value = asked.original == asked.compare ? asked.operand : asked.original;
	memcpy(at, &value, sizeof(value));
	answer_by(qp, asked, qp_after(packet->psn, 1));
}

/* ---- what was carried out before ---- */
static void answer_again(struct rc_qp *qp, const struct qp_answer *read)
{
	for (uint32_t i = 0; i < qp->answers_len; i++) {
		struct qp_answer *each = qp->answers + i;
		int32_t skipped = qp_ahead(read->psn, each->psn);
		if (each->kind != QP_FETCH || skipped < 0 || (uint32_t)skipped >= each->count)
			continue;
		if (each->sent > (uint32_t)skipped) { /* else it is on its way */
			*each = *read;
			qp->source.turn = qp->turn - 1;
		}
		return;
	}
	queue(qp, *read);
}

static void repeat_read(struct rc_qp *qp, const struct qp_packet *packet)
{
	struct qp_answer asked = read_of(qp, packet);

	for (uint32_t i = 0; i < qp->fetches_len; i++) {
		const struct qp_answer *read = qp->fetches + i;
		int32_t skipped = qp_ahead(asked.psn, read->psn);
		if (read->kind != QP_FETCH || skipped < 0 || (uint32_t)skipped >= read->count || asked.rkey != read->rkey)
			continue;
		uint64_t begin = (uint64_t)skipped * qp->mtu;
		if (asked.va != read->va + begin)
			continue;
		/* A request that comes late is dropped: its answer is there, and its memory may be the other end's no more. */
		if (begin + asked.length <= read->length &&
		    (!asked.length || qp->host->grant(qp, asked.rkey, asked.va, asked.length, QP_REMOTE_READ)))
			answer_again(qp, &asked);
		return;
	}
}

/* Repeats an answer that is kept; other operations are dropped (IBTA 9.7.5.1.6). */
static void repeat_atomic(struct rc_qp *qp, const struct qp_packet *packet)
{
	struct qp_answer asked = operation_of(packet);

	for (uint32_t i = 0; i < qp->fetches_len; i++) {
		const struct qp_answer *each = qp->fetches + i;
		if (each->kind != QP_OPERATED || each->psn != asked.psn || each->syndrome != asked.syndrome ||
		    each->va != asked.va || each->rkey != asked.rkey || each->operand != asked.operand ||
		    each->compare != asked.compare)
			continue;
		for (uint32_t n = 0; n < qp->answers_len; n++)
			if (qp->answers[n].kind == QP_OPERATED && qp->answers[n].psn == asked.psn)
				return; /* the answer waits already */
		queue(qp, *each);
		return;
	}
}

/* IBTA 9.7.4.2, 9.7.5.1.6. */
static void repeat(struct rc_qp *qp, const struct qp_packet *packet)
{
	if (packet->atomic)
		repeat_atomic(qp, packet);
	else if (packet->opcode == READ_REQUEST)
		repeat_read(qp, packet);
	else /* the number of a Read's answer would tell that the answer was lost */
		qp_acknowledge(qp);
}

void qp_serve(struct rc_qp *qp, const struct qp_packet *packet, enum qp_state state)
{
	int32_t distance = qp_ahead(packet->psn, qp->expected);

	if (state == QP_ERROR) { /* asked again after the last word */
		if (qp->ended && qp_ahead(packet->psn, qp->last_word.psn) >= 0)
			queue(qp, qp->last_word);
		return;
	}
	if (distance > 0) { /* IBTA 9.7.4.1.2: one NAK for a gap */
		if (!qp->reported_gap)
			queue_word(qp, qp->expected, NAK);
		qp->reported_gap = true;
		return;
	}
	if (distance < 0) {
		repeat(qp, packet);
		return;
	}
	qp->begun = true;
	qp->reported_gap = false;
	if (!is_due(qp, packet->has)) {
		refuse(qp, packet->psn, QP_NAK_INVALID, QP_SUCCESS, "opcode %#04x was not due", packet->opcode);
	} else if (!is_of_its_length(qp, packet)) {
		refuse(qp, packet->psn, QP_NAK_INVALID, QP_SUCCESS, "opcode %#04x with %u bytes and %u of padding, path MTU %u",
		       packet->opcode, packet->len, packet->pad, qp->mtu);
	} else if (packet->opcode == READ_REQUEST) {
		take_read(qp, packet);
	} else if (packet->atomic) {
		take_atomic(qp, packet);
	} else {
		if (packet->has & QP_IS_SEND)
			take_send(qp, packet);
		else
			take_write(qp, packet);
		if (!qp->refused && packet->asks && qp->carried_out == packet->psn)
			queue_word(qp, packet->psn, ACK);
	}
}

/* ---- what goes out ---- */
/* An acknowledgement, and what is behind it. */
static uint32_t put_aeth(const struct rc_qp *qp, uint8_t *to, uint32_t opcode, uint32_t pad, uint32_t psn,
                         uint32_t syndrome)
{
	uint32_t at = qp_put_header(qp, to, opcode, 0, pad, psn);

	if (opcode == RESPONSE_MIDDLE)
		return at;
	qp_put32(to + at, syndrome << 24 | qp->completed);
	return at + 4;
}

static uint32_t respond(struct rc_qp *qp, struct qp_answer *answer, uint8_t *to)
{
	uint32_t begin = answer->sent * qp->mtu, left = answer->length - begin, psn = qp_after(answer->psn, answer->sent);
	uint32_t len = left < qp->mtu ? left : qp->mtu, pad = -len & 3;
	bool first = !answer->sent, last = answer->sent + 1 == answer->count;
	uint8_t *from = NULL;

	if (left && !(from = granted(qp, &qp->source, answer->rkey, answer->va + begin, left, QP_REMOTE_READ))) {
		qp->answers_len = 0;
		refuse_access(qp, psn);
		return qp_answer(qp, to);
	}
	uint32_t opcode = first && last ? RESPONSE_ONLY : first ? RESPONSE_FIRST : last ? RESPONSE_LAST : RESPONSE_MIDDLE;
	uint32_t at = put_aeth(qp, to, opcode, pad, psn, ACK);
	if (from)
		memcpy(to + at, from, len);
	memset(to + at + len, 0, pad);
	answer->sent++;
	if (last) {
		qp->source.turn = qp->turn - 1;
		remove_at(qp->answers, &qp->answers_len, 0);
	}
	return at + len + pad;
}

uint32_t qp_answer(struct rc_qp *qp, uint8_t *to)
{
	struct qp_answer answer = qp->answers[0];

	if (!qp->answers_len)
		return 0;
	if (answer.kind == QP_FETCH)
		return respond(qp, qp->answers, to);
	remove_at(qp->answers, &qp->answers_len, 0);
	if (answer.kind == QP_WORD) {
		qp_count_nak(qp->naks_sent, answer.syndrome);
		return put_aeth(qp, to, ACKNOWLEDGE, 0, answer.psn, answer.syndrome);
	}
	uint32_t at = put_aeth(qp, to, ATOMIC_ACK, 0, answer.psn, ACK);
	qp_put64(to + at, answer.original);
	return at + 8;
}
