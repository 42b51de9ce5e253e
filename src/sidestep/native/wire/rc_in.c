/* rc_in.c - what comes: packets, checked one by one, and messages of them; rdma/roce/responder.py (IBTA 9.6, 9.7.4). */
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
#define AETH_LEN 4u
#define PARTITION 0x7FFFu
#define ASKS 0x80000000u
#define BEHIND_ID (20u - 6 + 8) /* bytes of the headers of IPv4 and UDP behind the identification */
#define PIECES_FIRST 128u

struct bth {
	uint8_t opcode, pad, version;
	uint16_t pkey;
	uint32_t qp, psn;
	bool asks;
};

static struct bth bth_of(const uint8_t *packet)
{
	uint32_t words[3];

	memcpy(words, packet, sizeof(words));
	uint32_t first = be32toh(words[0]), third = be32toh(words[2]);
	return (struct bth){
		.opcode = (uint8_t)(first >> 24),
		.pad = first >> 20 & 3,
		.version = first >> 16 & 0xF,
		.pkey = (uint16_t)first,
		.qp = be32toh(words[1]) & 0xFFFFFF,
		.psn = third & 0xFFFFFF,
		.asks = third & ASKS,
	};
}

/* So many bytes of staging memory, at least; what is there stays. */
static bool stage(struct rc *rc, uint32_t size)
{
	if (rc->size >= size)
		return true;
	uint8_t *staging = realloc(rc->staging, size);
	if (!staging)
		return false;
	rc->staging = staging;
	rc->size = size;
	return true;
}

uint8_t *rc_room(struct rc *rc, uint32_t most)
{
	uint32_t used = 0;

	if (!stage(rc, 2 * RC_DATAGRAM_MAX + most + most / 8)) /* a packet of 256 bytes is 272 */
		return NULL;
	if (!rc->pieces_len)
		rc->at = rc->tail = 0;
	if (rc->tail <= rc->size - RC_DATAGRAM_MAX)
		return rc->staging + rc->tail;
	for (uint32_t i = 0; i < rc->pieces_len; i++) { /* together, so that there is room behind them */
		struct rc_piece *piece = rc->pieces + i;
		memmove(rc->staging + used, rc->staging + piece->at - RC_BTH, piece->raw);
		piece->at = used + RC_BTH;
		used += piece->raw;
	}
	rc->at = rc->tail = used;
	return used <= rc->size - RC_DATAGRAM_MAX ? rc->staging + used : NULL;
}

void rc_commit(struct rc *rc, uint32_t len, uint32_t segment)
{
	rc->at = rc->tail;
	rc->tail += len;
	rc->segment = segment && segment < len ? segment : len;
}

/*
 * Whether the checksum is that of the packet. The socket does not tell the identification in the header of IPv4, which the checksum
 * covers: that one is right by which the difference becomes one of 16 bits, there where the identification is.
 */
static bool intact(struct rc *rc, const uint8_t *packet, uint32_t len)
{
	uint32_t transport = len - RC_ICRC, received;

	if (len != rc->in_len) {
		rc->in_len = len;
		rc->in_begun = rc_icrc_begun(rc, false, len);
		rc->in_before = rc->record.ipv6 ? 0 : icrc_before(BEHIND_ID + transport + 4);
	}
	memcpy(&received, packet + transport, sizeof(received));
	uint32_t difference = rc_icrc(rc->in_begun, packet, transport) ^ le32toh(received);
	if (!difference || rc->record.ipv6)
		return !difference;
	return !(icrc_product(difference, rc->in_before) & 0xFFFF);
}

/* IBTA 9.7.4.1.6: what a packet of this opcode carries; 9.7.4.1.3: packets of one message follow each other. */
static bool is_due(const struct rc *rc, const struct bth *bth, uint32_t len)
{
	bool begins = bth->opcode == SEND_FIRST || bth->opcode == SEND_ONLY;
	bool whole = bth->opcode == SEND_FIRST || bth->opcode == SEND_MIDDLE;

	if (begins == (rc->pieces_len != 0))
		return false;
	if (whole)
		return len == rc->record.mtu && !bth->pad;
	return len <= rc->record.mtu && bth->pad == (-len & 3) && (len || bth->opcode == SEND_ONLY);
}

static bool add_piece(struct rc *rc, const uint8_t *packet, uint32_t len, uint32_t raw)
{
	if (rc->pieces_len == rc->pieces_size) {
		uint32_t size = rc->pieces_size ? 2 * rc->pieces_size : PIECES_FIRST;
		struct rc_piece *pieces = realloc(rc->pieces, size * sizeof(*pieces));
		if (!pieces)
			return false;
		rc->pieces = pieces;
		rc->pieces_size = size;
	}
	if (!rc->pieces_len) {
		rc->before = rc->record.carried_out;
		rc->message_len = 0;
	}
	rc->pieces[rc->pieces_len++] =
		(struct rc_piece){.at = (uint32_t)(packet - rc->staging) + RC_BTH, .len = len, .raw = raw};
	rc->message_len += len;
	return true;
}

/* A plain Send, or a part of one. */
static enum rc_found take_send(struct rc *rc, const uint8_t *packet, uint32_t raw, const struct bth *bth, uint32_t most)
{
	struct rc_record *record = &rc->record;
	int32_t distance = rc_ahead(bth->psn, record->expected);

	if (distance > 0) { /* IBTA 9.7.4.1.2: one NAK for a gap */
		rc->owes_nak |= !record->reported_gap;
		record->reported_gap = 1;
		return RC_NOTHING;
	}
	if (distance < 0) { /* IBTA 9.7.4.2: it was carried out before */
		record->owes_ack = 1;
		return RC_NOTHING;
	}
	if (raw < RC_OVERHEAD + bth->pad)
		return RC_STRANGE;
	uint32_t len = raw - RC_OVERHEAD - bth->pad;
	if (!is_due(rc, bth, len) || len > most || (rc->pieces_len && rc->message_len > most - len))
		return RC_STRANGE;
	if (!add_piece(rc, packet, len, raw))
		return RC_NO_MEMORY;
	record->reported_gap = 0;
	rc->owes_nak = false;
	record->expected = rc_after(bth->psn, 1);
	record->carried_out = bth->psn;
	if (bth->opcode == SEND_LAST || bth->opcode == SEND_ONLY) {
		rc->asks = bth->asks;
		return RC_MESSAGE;
	}
	record->owes_ack |= bth->asks;
	return RC_NOTHING;
}

static enum rc_found look(struct rc *rc, const uint8_t *packet, uint32_t len, uint32_t most, int64_t now)
{
	struct rc_record *record = &rc->record;
	enum rc_found found = RC_STRANGE;

	if (len < RC_OVERHEAD || len % 4 || !intact(rc, packet, len)) {
		record->packets_dropped++; /* IBTA 9.6: nobody is told */
		return RC_NOTHING;
	}
	struct bth bth = bth_of(packet);
	if (bth.version || (bth.pkey & PARTITION) != PARTITION) {
		record->packets_dropped++;
		return RC_NOTHING;
	}
	if (bth.qp != record->local_qp)
		return RC_STRANGE;
	if (bth.opcode == ACKNOWLEDGE && len >= RC_OVERHEAD + AETH_LEN) {
		if (rc_acknowledged(rc, bth.psn, packet[RC_BTH], now))
			found = RC_NOTHING;
	} else if (bth.opcode <= SEND_LAST || bth.opcode == SEND_ONLY) {
		found = take_send(rc, packet, len, &bth, most);
	}
	record->packets_received += found == RC_NOTHING || found == RC_MESSAGE;
	return found;
}

enum rc_found rc_next(struct rc *rc, uint32_t most, int64_t now)
{
	while (rc->at < rc->tail) {
		uint32_t left = rc->tail - rc->at, len = left < rc->segment ? left : rc->segment;
		enum rc_found found = look(rc, rc->staging + rc->at, len, most, now);
		if (found == RC_STRANGE || found == RC_NO_MEMORY)
			return found;
		rc->at += len;
		if (found == RC_MESSAGE)
			return found;
	}
	return RC_NOTHING;
}

void rc_copy(const struct rc *rc, uint32_t from, uint8_t *to, uint32_t len)
{
	const struct rc_piece *piece = rc->pieces + from / rc->record.mtu; /* all but the last are full */
	uint32_t offset = from % rc->record.mtu;

	while (len) {
		uint32_t some = piece->len - offset < len ? piece->len - offset : len;
		memcpy(to, rc->staging + piece->at + offset, some);
		to += some;
		len -= some;
		offset = 0;
		piece++;
	}
}

void rc_taken(struct rc *rc)
{
	rc->pieces_len = rc->message_len = 0;
	rc->record.completed = rc_after(rc->record.completed, 1);
	rc->record.owes_ack |= rc->asks;
}

int rc_resume(struct rc *rc, const uint8_t *partial, uint32_t len)
{
	uint32_t mtu = rc->record.mtu, count = len / mtu, raw = RC_OVERHEAD + mtu;

	if (count && !stage(rc, count * raw))
		return -ENOMEM;
	for (uint32_t i = 0; i < count; i++) { /* datagrams, as for all that may have to be given back */
		uint8_t *at = rc->staging + (size_t)i * raw;
		rc_put_bth(at, rc->record.local_qp, i ? SEND_MIDDLE : SEND_FIRST, 0, rc_after(rc->record.expected, i - count));
		memcpy(at + RC_BTH, partial + (size_t)i * mtu, mtu);
		rc_put_icrc(at + RC_BTH + mtu, rc_icrc(rc_icrc_begun(rc, false, raw), at, RC_BTH + mtu));
		if (!add_piece(rc, at, mtu, raw))
			return -ENOMEM;
	}
	rc->before = RC_NOWHERE;
	rc->at = rc->tail = count * raw;
	return 0;
}

void rc_rewind(struct rc *rc)
{
	struct rc_record *record = &rc->record;

	if (rc->pieces_len) {
		record->expected = rc_after(record->expected, -rc->pieces_len);
		if (rc->before == RC_NOWHERE)
			record->owes_ack = 0; /* those that ask for it are given back */
		else
			record->carried_out = rc->before;
	}
	if (rc->owes_nak) /* it was not told, so it is to be found anew */
		record->reported_gap = 0;
}

const uint8_t *rc_left(const struct rc *rc, uint32_t n, uint32_t *len)
{
	if (n < rc->pieces_len) {
		*len = rc->pieces[n].raw;
		return rc->staging + rc->pieces[n].at - RC_BTH;
	}
	uint64_t at = rc->at + (uint64_t)(n - rc->pieces_len) * rc->segment;
	if (at >= rc->tail)
		return NULL;
	*len = rc->tail - (uint32_t)at < rc->segment ? rc->tail - (uint32_t)at : rc->segment;
	return rc->staging + at;
}
