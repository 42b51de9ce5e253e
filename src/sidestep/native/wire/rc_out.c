/*
 * rc_out.c - what is sent until it is acknowledged: rdma/roce/requester.py tells how (IBTA 9.7.5, 9.7.6).
 *
 * A message becomes packets when it is queued, in memory of ours: what has been acknowledged by the other end may be changed by its
 * owner, and what has not is sent again as it was.
 */
#include "rc.h"

#include "icrc.h"

#include <endian.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define SEND_FIRST 0x00u
#define SEND_MIDDLE 0x01u
#define SEND_LAST 0x02u
#define SEND_ONLY 0x04u
#define ACKNOWLEDGE 0x11u
#define ACK_NO_CREDITS 0x1Fu
#define NAK_SEQUENCE 0x60u
#define ASKS 0x80000000u
#define PATIENCE_MAX 4u /* times that the timeout doubles */
#define BEHIND_ID (20u - 6 + 8)   /* bytes of the headers of IPv4 and UDP behind the identification */
#define TRAIN_BYTES_MAX 65000u /* of one datagram for UDP_SEGMENT, within what IP takes */

static bool make_slots(struct rc *rc)
{
	uint32_t mtu = rc->record.mtu, most = RC_QUEUE_MAX / mtu + RC_MESSAGE_MAX / mtu + 2;

	if (rc->packets)
		return true;
	for (rc->slots_len = 1; rc->slots_len < most;)
		rc->slots_len *= 2;
	rc->slots = malloc(rc->slots_len * sizeof(*rc->slots));
	rc->packets = malloc((size_t)rc->slots_len * rc->stride);
	if (rc->slots && rc->packets)
		return true;
	free(rc->slots);
	free(rc->packets);
	rc->slots = NULL;
	rc->packets = NULL;
	return false;
}

static struct rc_slot *slot_of(const struct rc *rc, uint32_t psn)
{
	return rc->slots + psn % rc->slots_len;
}

static uint8_t *packet_of(const struct rc *rc, uint32_t psn)
{
	return rc->packets + (size_t)(psn % rc->slots_len) * rc->stride;
}

/* Where the next bytes of a message are. */
struct source {
	const struct iovec *piece;
	size_t offset;
};

static void take(struct source *source, uint8_t *to, uint32_t len)
{
	while (len) {
		size_t there = source->piece->iov_len - source->offset;
		size_t some = there < len ? there : len;
		memcpy(to, (const uint8_t *)source->piece->iov_base + source->offset, some);
		to += some;
		len -= (uint32_t)some;
		source->offset += some;
		if (source->offset == source->piece->iov_len) {
			source->piece++;
			source->offset = 0;
		}
	}
}

static void make_packet(struct rc *rc, struct source *source, uint32_t index, uint32_t len, bool ends)
{
	uint32_t psn = rc->record.next, pad = -len & 3;
	uint8_t *at = packet_of(rc, psn);
	uint32_t opcode = ends ? (index ? SEND_LAST : SEND_ONLY) : (index ? SEND_MIDDLE : SEND_FIRST);
	bool asks = ends || !(rc_after(psn, 1) % rc->ack_every);

	rc_put_bth(at, rc->record.remote_qp, opcode, pad, psn | (asks ? ASKS : 0));
	take(source, at + RC_BTH, len);
	memset(at + RC_BTH + len, 0, pad); /* IBTA 9.2.4 */
	uint32_t transport = RC_BTH + len + pad, whole = transport + RC_ICRC;
	uint32_t begun = whole == rc->stride ? rc->out_full : rc_icrc_begun(rc, true, whole);
	rc_put_icrc(at + transport, rc_icrc(begun, at, transport));
	*slot_of(rc, psn) = (struct rc_slot){.len = whole, .index = (uint16_t)index};
	rc->record.next = rc_after(psn, 1);
}

int rc_put(struct rc *rc, const uint8_t *header, uint32_t header_len, const struct iovec *pieces, int pieces_len)
{
	struct iovec all[16] = {{.iov_base = (void *)(uintptr_t)header, .iov_len = header_len}};
	uint32_t mtu = rc->record.mtu, len = header_len;
	int used = 1;

	if (pieces_len > 14 || rc_waiting(rc) > RC_QUEUE_MAX)
		return -EINVAL;
	for (int i = 0; i < pieces_len; i++) {
		if (pieces[i].iov_len > RC_MESSAGE_MAX - len)
			return -EINVAL;
		if (pieces[i].iov_len)
			all[used++] = pieces[i];
		len += (uint32_t)pieces[i].iov_len;
	}
	if (!make_slots(rc))
		return -ENOMEM;
	struct source source = {.piece = all};
	for (uint32_t index = 0, at = 0; !index || at < len; index++) {
		uint32_t some = len - at < mtu ? len - at : mtu;
		at += some;
		make_packet(rc, &source, index, some, at == len);
	}
	return 0;
}

/* Its checksum is that for this identification. */
static void set_id(struct rc *rc, uint32_t psn, uint16_t id)
{
	struct rc_slot *slot = slot_of(rc, psn);
	uint8_t *at = packet_of(rc, psn) + slot->len - RC_ICRC;
	uint32_t value, change;

	if (slot->id == id || rc->record.ipv6)
		return;
	if (slot->len == rc->stride) {
		change = rc->ids[slot->id] ^ rc->ids[id];
	} else {
		uint16_t bits = htobe16(slot->id ^ id);
		uint8_t bytes[2];
		memcpy(bytes, &bits, sizeof(bytes));
		change = icrc_product(icrc_update(0, bytes, 2), icrc_behind(BEHIND_ID + slot->len - RC_ICRC));
	}
	memcpy(&value, at, sizeof(value));
	rc_put_icrc(at, le32toh(value) ^ change);
	slot->id = id;
}

int rc_train(struct rc *rc, uint32_t most, struct iovec pieces[2], uint32_t *count, uint32_t *len)
{
	struct rc_record *record = &rc->record;
	int32_t left = rc_ahead(record->next, record->cursor);
	int32_t window = (int32_t)record->window - rc_ahead(record->cursor, record->acknowledged);
	uint32_t may = left < window ? (uint32_t)left : window > 0 ? (uint32_t)window : 0, taken = 0;
	size_t bytes = 0;
	int used = 0;

	if (!may)
		return 0;
	if (most > RC_TRAIN_MAX)
		most = RC_TRAIN_MAX;
	*len = slot_of(rc, record->cursor)->len;
	while (taken < may && taken < most) {
		uint32_t psn = rc_after(record->cursor, taken);
		uint32_t this = slot_of(rc, psn)->len;
		if (this > *len || bytes + this > TRAIN_BYTES_MAX)
			break;
		set_id(rc, psn, (uint16_t)taken); /* Linux numbers the packets of a datagram that it cuts */
		if (!used || !(psn % rc->slots_len))
			pieces[used++] = (struct iovec){.iov_base = packet_of(rc, psn)};
		pieces[used - 1].iov_len += this;
		bytes += this;
		taken++;
		if (this < rc->stride)
			break; /* only the last may be shorter, and the next one lies behind a gap */
	}
	*count = taken;
	return used;
}

static void start_timer(struct rc *rc, int64_t now)
{
	uint32_t doubled = rc->expiries < PATIENCE_MAX ? rc->expiries : PATIENCE_MAX;

	rc->expires_ns = now + ((int64_t)rc->record.timeout_ns << doubled);
}

void rc_sent(struct rc *rc, uint32_t count, int64_t now)
{
	struct rc_record *record = &rc->record;

	if (record->cursor == record->acknowledged)
		start_timer(rc, now);
	record->cursor = rc_after(record->cursor, count);
	int32_t first = rc_ahead(record->cursor, record->reached); /* so many are sent for the first time */
	if (first > 0)
		record->reached = record->cursor;
	record->packets_sent += count;
	record->packets_resent += count - (first > 0 ? (uint32_t)first : 0);
}

uint32_t rc_answer(struct rc *rc, uint8_t answer[RC_ANSWER_LEN])
{
	struct rc_record *record = &rc->record;

	if (!rc->owes_nak && !record->owes_ack)
		return 0;
	/* IBTA 9.7.5.2.1: a NAK acknowledges all before it as well */
	uint32_t syndrome = rc->owes_nak ? NAK_SEQUENCE : ACK_NO_CREDITS;
	uint32_t aeth = htobe32(syndrome << 24 | record->completed);
	rc_put_bth(answer, record->remote_qp, ACKNOWLEDGE, 0, rc->owes_nak ? record->expected : record->carried_out);
	memcpy(answer + RC_BTH, &aeth, sizeof(aeth));
	uint32_t transport = RC_ANSWER_LEN - RC_ICRC;
	rc_put_icrc(answer + transport, rc_icrc(rc_icrc_begun(rc, true, RC_ANSWER_LEN), answer, transport));
	record->naks_sent += rc->owes_nak;
	rc->owes_nak = false;
	record->owes_ack = 0;
	record->packets_sent++;
	return RC_ANSWER_LEN;
}

/* ---- what comes back ---- */
static void go_back(struct rc *rc, int64_t now)
{
	struct rc_record *record = &rc->record;

	if (rc->gone_back_to == record->acknowledged)
		return; /* what else tells of that loss is no news */
	rc->gone_back_to = record->acknowledged;
	start_timer(rc, now);
	record->cursor = record->acknowledged;
	record->resent++;
}

/* All before this number was carried out. */
static void progress(struct rc *rc, uint32_t end, int64_t now)
{
	struct rc_record *record = &rc->record;

	if (record->acknowledged == end)
		return;
	record->acknowledged = end;
	rc->gone_back_to = RC_NOWHERE;
	rc->expiries = 0;
	start_timer(rc, now);
	if (rc_ahead(record->cursor, end) < 0) /* it was sent before, and is here after all */
		record->cursor = end;
}

bool rc_acknowledged(struct rc *rc, uint32_t psn, uint8_t syndrome, int64_t now)
{
	struct rc_record *record = &rc->record;
	int32_t distance = rc_ahead(psn, record->acknowledged);

	if (distance < 0 || distance >= rc_ahead(record->reached, record->acknowledged))
		return true; /* IBTA 9.7.5.1.4: old, or not of this connection */
	if (syndrome >> 5 == 0) {
		progress(rc, rc_after(psn, 1), now);
		return true;
	}
	if (syndrome != NAK_SEQUENCE)
		return false; /* of a receive that is missing, or the end: IBTA 9.7.5.2.8 */
	record->naks_received++;
	progress(rc, psn, now);
	go_back(rc, now);
	return true;
}

int64_t rc_deadline(const struct rc *rc)
{
	return rc->record.acknowledged != rc->record.reached ? rc->expires_ns : 0;
}

bool rc_pass(struct rc *rc, int64_t now)
{
	int64_t deadline = rc_deadline(rc);

	if (!deadline || now < deadline)
		return true;
	if (rc->expiries == RC_EXPIRIES)
		return false;
	rc->expiries++;
	rc->gone_back_to = RC_NOWHERE;
	go_back(rc, now);
	return true;
}
