/* rc_qp.c - what requester and responder share: packets in and out, their checksum, and trains of them; rc_qp.h tells of it. */
#include "rc_qp.h"

#include "icrc.h"

#include <endian.h>
#include <string.h>

#define BTH_LEN 12u
#define ICRC_LEN 4u
#define OVERHEAD (BTH_LEN + ICRC_LEN)
#define PORT 4791u
#define PKEY_DEFAULT 0xFFFFu
#define PARTITION 0x7FFFu
#define MIGRATED 0x40u
#define ACKNOWLEDGE 0x11u
#define NAK_SEQUENCE 0x60u
#define TRAIN_BYTES_MAX 65000u /* bytes of a datagram for UDP_SEGMENT: IP takes no more */
#define BEHIND_ID (20u - 6 + 8) /* bytes of the headers of IPv4 and UDP behind the identification */

#define IS(...) (QP_KNOWN | __VA_ARGS__)
const uint16_t qp_opcodes[32] = {
	IS(QP_IS_SEND | QP_STARTS), /* 0x00: Send First, Middle, Last, Last with immediate data, Only, the same with */
	IS(QP_IS_SEND),
	IS(QP_IS_SEND | QP_ENDS),
	IS(QP_IS_SEND | QP_ENDS | QP_IMMEDIATE),
	IS(QP_IS_SEND | QP_STARTS | QP_ENDS),
	IS(QP_IS_SEND | QP_STARTS | QP_ENDS | QP_IMMEDIATE),
	IS(QP_IS_WRITE | QP_STARTS | QP_RETH), /* 0x06: Write, likewise */
	IS(QP_IS_WRITE),
	IS(QP_IS_WRITE | QP_ENDS),
	IS(QP_IS_WRITE | QP_ENDS | QP_IMMEDIATE),
	IS(QP_IS_WRITE | QP_STARTS | QP_ENDS | QP_RETH),
	IS(QP_IS_WRITE | QP_STARTS | QP_ENDS | QP_RETH | QP_IMMEDIATE),
	IS(QP_IS_FETCH | QP_RETH), /* 0x0C: Read Request; Response First, Middle, Last, Only */
	IS(QP_IS_RESPONSE | QP_AETH),
	IS(QP_IS_RESPONSE),
	IS(QP_IS_RESPONSE | QP_AETH),
	IS(QP_IS_RESPONSE | QP_AETH),
	IS(QP_IS_RESPONSE | QP_AETH), /* 0x11: Acknowledge, Atomic Acknowledge, Compare and Swap, Fetch and Add */
	IS(QP_IS_RESPONSE | QP_AETH | QP_ORIGINAL),
	IS(QP_IS_FETCH | QP_ATOMIC),
	IS(QP_IS_FETCH | QP_ATOMIC),
	0,
	IS(QP_IS_SEND | QP_ENDS | QP_IETH), /* 0x16: Send Last with Invalidate, Only */
	IS(QP_IS_SEND | QP_STARTS | QP_ENDS | QP_IETH),
};

void qp_put32(uint8_t *at, uint32_t value)
{
	value = htobe32(value);
	memcpy(at, &value, sizeof(value));
}

void qp_put64(uint8_t *at, uint64_t value)
{
	value = htobe64(value);
	memcpy(at, &value, sizeof(value));
}

uint32_t qp_get32(const uint8_t *at)
{
	uint32_t value;

	memcpy(&value, at, sizeof(value));
	return be32toh(value);
}

uint64_t qp_get64(const uint8_t *at)
{
	uint64_t value;

	memcpy(&value, at, sizeof(value));
	return be64toh(value);
}

void qp_begin(struct rc_qp *qp, uint32_t send_psn, uint32_t receive_psn)
{
	icrc_init();
	qp->flights_end = &qp->flights;
	qp->acknowledged = qp->cursor = qp->reached = qp->next = send_psn;
	qp->expected = receive_psn;
	qp->carried_out = qp_after(receive_psn, -1u);
	qp->retries_left = qp->retry_count;
	qp->rnr_left = qp->rnr_retry;
	qp->gone_back_to = QP_NOWHERE;
}

/* ---- the checksum ---- */
static uint8_t *put16(uint8_t *at, uint32_t value)
{
	at[0] = (uint8_t)(value >> 8);
	at[1] = (uint8_t)value;
	return at + 2;
}

/*
 * The state of the checksum behind the headers of IP and UDP. IBTA annex A17.3.4: what routers may change counts as ones. What is
 * sent has "don't fragment", and the identification that Linux gives it.
 */
static uint32_t begun(const struct rc_qp *qp, bool out, uint32_t port, uint32_t len, uint32_t id)
{
	const uint8_t *from = out ? qp->local : qp->remote, *to = out ? qp->remote : qp->local;
	size_t address_len = qp->ipv6 ? 16 : 4;
	uint8_t head[8 + 40 + 8], *at = head + 8;

	memset(head, 0xFF, sizeof(head));
	if (qp->ipv6) {
		at[0] = 0x6F;
		put16(at + 4, 8 + len);
		at[6] = 17;
		at += 8;
	} else {
		at[0] = 0x45;
		put16(put16(put16(at + 2, 28 + len), id), 0x4000);
		at[9] = 17;
		at += 12;
	}
	memcpy(at, from, address_len);
	memcpy(at + address_len, to, address_len);
	at = put16(put16(put16(at + 2 * address_len, port), PORT), 8 + len);
	return icrc_update(ICRC_START, head, (size_t)(at + 2 - head));
}

static uint32_t icrc_of(uint32_t state, const uint8_t *packet, uint32_t len)
{
	uint8_t bth[BTH_LEN];

	memcpy(bth, packet, BTH_LEN);
	bth[4] = 0xFF; /* congestion, and reserved */
	return ~icrc_update(icrc_update(state, bth, BTH_LEN), packet + BTH_LEN, len - BTH_LEN);
}

/*
 * The checksum is that of the packet. It covers the identification in the header of IPv4, which no socket shows. An identification
 * makes it right if the difference becomes one of 16 bits, at the place of the identification.
 */
static bool intact(struct rc_qp *qp, const uint8_t *packet, uint32_t len, uint32_t port)
{
	uint32_t transport = len - ICRC_LEN, received;

	if (len != qp->in_len || port != qp->in_port) {
		qp->in_len = len;
		qp->in_port = port;
		qp->in_begun = begun(qp, false, port, len, 0);
		qp->in_before = qp->ipv6 ? 0 : icrc_before(BEHIND_ID + transport + 4);
	}
	memcpy(&received, packet + transport, sizeof(received));
	uint32_t difference = icrc_of(qp->in_begun, packet, transport) ^ le32toh(received);
	if (!difference || qp->ipv6)
		return !difference;
	return !(icrc_product(difference, qp->in_before) & 0xFFFF);
}

/* ---- in ---- */
static bool take_header(const uint8_t **header, const uint8_t **at, uint32_t *left, bool there, uint32_t len)
{
	if (!there)
		return true;
	if (*left < len)
		return false;
	*header = *at;
	*at += len;
	*left -= len;
	return true;
}

enum found { DAMAGED, STRANGE, GOOD };

/* IBTA 9.6: a damaged packet is dropped silently. */
static enum found parse(struct rc_qp *qp, const uint8_t *data, uint32_t len, uint32_t port, struct qp_packet *packet)
{
	if (len < OVERHEAD || len > QP_PACKET_MAX || len % 4 || !intact(qp, data, len, port))
		return DAMAGED;
	uint32_t first = qp_get32(data), last = qp_get32(data + 8), has = data[0] < 32 ? qp_opcodes[data[0]] : 0;
	uint32_t left = len - OVERHEAD;
	const uint8_t *at = data + BTH_LEN;
	*packet = (struct qp_packet){
		.opcode = data[0],
		.has = has,
		.psn = last & 0xFFFFFF,
		.pad = first >> 20 & 3,
		.asks = last >> 31,
		.solicited = first >> 23 & 1,
	};
	if (first >> 16 & 0xF || (first & PARTITION) != PARTITION)
		return DAMAGED;
	if (!has || (qp_get32(data + 4) & 0xFFFFFF) != qp->local_qp ||
	    !take_header(&packet->reth, &at, &left, has & QP_RETH, 16) ||
	    !take_header(&packet->aeth, &at, &left, has & QP_AETH, 4) ||
	    !take_header(&packet->original, &at, &left, has & QP_ORIGINAL, 8) ||
	    !take_header(&packet->atomic, &at, &left, has & QP_ATOMIC, 28) ||
	    !take_header(&packet->immediate, &at, &left, has & QP_IMMEDIATE, 4) ||
	    !take_header(&packet->ieth, &at, &left, has & QP_IETH, 4) || left < packet->pad)
		return STRANGE;
	packet->payload = at;
	packet->len = left - packet->pad;
	return GOOD;
}

/* Packets that an engine knows: parts of plain Sends, and what acknowledges them. */
static bool is_plain(const struct rc_qp *qp, const struct qp_packet *packet)
{
	if (packet->has & QP_IS_RESPONSE)
		return packet->opcode == ACKNOWLEDGE && (packet->aeth[0] >> 5 == 0 || packet->aeth[0] == NAK_SEQUENCE);
	uint64_t room = qp->message.kind == QP_SENDING ? qp->receive.length - qp->message.placed : qp->plain_max;
	return packet->has & QP_IS_SEND && !(packet->has & (QP_IMMEDIATE | QP_IETH)) && packet->len <= room;
}

size_t qp_receive(struct rc_qp *qp, const uint8_t *data, size_t len, uint32_t segment, uint32_t port,
                  enum qp_state state, int64_t now)
{
	struct qp_packet packet;
	size_t at = 0;

	qp->turn++;
	qp->paused = false;
	while (at < len && !qp->refused && !qp->failed && !qp->broken && !qp->paused) {
		uint32_t size = len - at < segment ? (uint32_t)(len - at) : segment;
		enum found found = parse(qp, data + at, size, port, &packet);
		if (found == DAMAGED && qp->plain_max) {
			qp->packets_dropped++;
			at += size;
			continue;
		}
		bool response = found == GOOD && packet.has & QP_IS_RESPONSE;
		if (found != GOOD || (response && state != QP_RTS) || (qp->plain_max && !is_plain(qp, &packet)))
			break;
		qp->packets_received++;
		at += size;
		if (response)
			qp_respond(qp, &packet, now);
		else
			qp_serve(qp, &packet, state);
	}
	return at;
}

/* ---- out ---- */
uint32_t qp_put_header(const struct rc_qp *qp, uint8_t *to, uint32_t opcode, uint32_t flags, uint32_t pad, uint32_t psn)
{
	uint32_t solicited = flags & QP_SOLICITED ? 1u << 23 : 0, asks = flags & QP_ASKS ? 1u << 31 : 0;

	qp_put32(to, opcode << 24 | solicited | (MIGRATED | pad << 4) << 16 | PKEY_DEFAULT);
	qp_put32(to + 4, qp->remote_qp);
	qp_put32(to + 8, asks | psn);
	return BTH_LEN;
}

/* The next packet, answers first; without its checksum. */
static uint32_t next_packet(struct rc_qp *qp, uint8_t *to, bool sends, int64_t now)
{
	uint32_t len = qp->held_len;

	if (len) {
		memcpy(to, qp->held, len);
		qp->held_len = 0;
		return len;
	}
	len = qp_answer(qp, to);
	if (!len && sends && !qp->broken)
		len = qp_request(qp, to, now);
	qp->packets_sent += len != 0;
	return len;
}

/* The state before the base header of a packet that leaves; most are full. */
static uint32_t begun_out(struct rc_qp *qp, uint32_t port, uint32_t len, uint32_t id)
{
	if (len != qp->mtu + OVERHEAD || id >= QP_ENGINE_TRAIN)
		return begun(qp, true, port, len, id);
	if (port != qp->out_port)
		qp->out_known = 0;
	qp->out_port = port;
	while (qp->out_known <= id) {
		qp->out_begun[qp->out_known] = begun(qp, true, port, len, qp->out_known);
		qp->out_known++;
	}
	return qp->out_begun[id];
}

void qp_seal(struct rc_qp *qp, uint8_t *packet, uint32_t len, uint32_t port, uint32_t id)
{
	uint32_t icrc = htole32(icrc_of(begun_out(qp, port, len + ICRC_LEN, id), packet, len));

	memcpy(packet + len, &icrc, sizeof(icrc));
}

size_t qp_train(struct rc_qp *qp, uint8_t *to, size_t room, struct qp_train *train, int64_t now)
{
	size_t at = 0;

	qp->turn++;
	if (qp->resumes) {
		qp->resumes = false;
		qp->expires_ns = now + qp->timeout_ns;
	}
	train->count = 0;
	if (room > TRAIN_BYTES_MAX)
		room = TRAIN_BYTES_MAX;
	while (train->count < train->most && room - at >= QP_PACKET_MAX && !qp->broken) {
		uint32_t len = next_packet(qp, to + at, train->sends, now);
		if (!len)
			break;
		uint32_t whole = len + ICRC_LEN;
		if (!train->count)
			train->segment = whole;
		if (whole > train->segment) { /* one length for all but the last, which may be shorter */
			memcpy(qp->held, to + at, len);
			qp->held_len = len;
			break;
		}
		qp_seal(qp, to + at, len, train->port, train->count); /* Linux numbers the packets of a datagram that it cuts */
		at += whole;
		train->count++;
		if (whole < train->segment)
			break;
	}
	return at;
}

void qp_stop(struct rc_qp *qp)
{
	if (qp->flights) { /* their owner frees them */
		*qp->flights_end = qp->done;
		qp->done = qp->flights;
	}
	qp->flights = qp->at = NULL;
	qp->flights_end = &qp->flights;
	qp->acknowledged = qp->cursor = qp->reached = qp->next;
	qp->asked_len = 0;
	qp->waits_ns = 0;
	qp->fetches_len = qp->held_len = 0;
	if (!qp->ended)
		qp->answers_len = 0;
}

/* ---- memory ---- */
/* Copies between the pieces of a message, from an offset on, and one block. */
static uint32_t copy(const struct iovec *pieces, uint32_t count, uint64_t offset, uint8_t *block, uint32_t len,
                     bool gathers)
{
	uint32_t done = 0;

	for (uint32_t i = 0; i < count && done < len; i++) {
		if (offset >= pieces[i].iov_len) {
			offset -= pieces[i].iov_len;
			continue;
		}
		size_t some = pieces[i].iov_len - offset < len - done ? pieces[i].iov_len - offset : len - done;
		uint8_t *at = (uint8_t *)pieces[i].iov_base + offset;
		memcpy(gathers ? block + done : at, gathers ? at : block + done, some);
		done += (uint32_t)some;
		offset = 0;
	}
	return done;
}

uint32_t qp_gather(const struct iovec *pieces, uint32_t count, uint64_t offset, uint8_t *to, uint32_t len)
{
	return copy(pieces, count, offset, to, len, true);
}

uint32_t qp_scatter(const struct iovec *pieces, uint32_t count, uint64_t offset, const uint8_t *from, uint32_t len)
{
	return copy(pieces, count, offset, (uint8_t *)(uintptr_t)from, len, false);
}

/* IBTA 9.7.5.2.8, tables 44 and 46. */
void qp_count_nak(uint64_t counts[QP_NAKS], uint32_t syndrome)
{
	if (syndrome >> 5 == 1)
		counts[QP_NAK_RNR]++;
	else if (syndrome >= 0x60 && syndrome <= 0x63)
		counts[syndrome - 0x60 + QP_NAK_SEQUENCE]++;
	else if (syndrome >> 5)
		counts[QP_NAK_OTHER]++;
}
