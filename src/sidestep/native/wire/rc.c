/* rc.c - what both halves of a reliable connection share: rc.h tells of them. */
#include "rc.h"

#include "icrc.h"

#include <endian.h>
#include <stdlib.h>
#include <string.h>

#define IPV4_LEN 20u
#define IPV6_LEN 40u
#define UDP_LEN 8u
#define PROTOCOL_UDP 17u
#define ACK_EVERY_MAX 32u
#define MIGRATED 0x40u
#define PKEY_DEFAULT 0xFFFFu

static uint8_t *put16(uint8_t *at, uint32_t value)
{
	at[0] = (uint8_t)(value >> 8);
	at[1] = (uint8_t)value;
	return at + 2;
}

/* IBTA annex A17.3.4: what routers may change counts as ones. The identification is 0. */
uint32_t rc_icrc_begun(const struct rc *rc, bool out, uint32_t len)
{
	const struct rc_record *record = &rc->record;
	const uint8_t *from = out ? rc->local : rc->remote, *to = out ? rc->remote : rc->local;
	uint32_t address_len = record->ipv6 ? 16 : 4;
	uint8_t head[8 + IPV6_LEN + UDP_LEN], *at = head + 8;

	memset(head, 0xFF, sizeof(head));
	if (record->ipv6) {
		at[0] = 0x6F;
		put16(at + 4, UDP_LEN + len);
		at[6] = PROTOCOL_UDP;
		at += 8;
	} else {
		at[0] = 0x45;
		put16(at + 2, IPV4_LEN + UDP_LEN + len);
		put16(at + 4, 0);
		put16(at + 6, 0x4000); /* "don't fragment" */
		at[9] = PROTOCOL_UDP;
		at += 12;
	}
	memcpy(at, from, address_len);
	memcpy(at + address_len, to, address_len);
	at = put16(at + 2 * (size_t)address_len, out ? record->source_port : record->remote_port);
	at = put16(at, RC_PORT);
	at = put16(at, UDP_LEN + len);
	return icrc_update(ICRC_START, head, (size_t)(at + 2 - head));
}

uint32_t rc_icrc(uint32_t begun, const uint8_t *packet, uint32_t len)
{
	uint8_t bth[RC_BTH];

	memcpy(bth, packet, RC_BTH);
	bth[4] = 0xFF; /* congestion, and reserved */
	return ~icrc_update(icrc_update(begun, bth, RC_BTH), packet + RC_BTH, len - RC_BTH);
}

void rc_put_bth(uint8_t *at, uint32_t qp, uint32_t opcode, uint32_t pad, uint32_t psn)
{
	uint32_t words[3] = {htobe32(opcode << 24 | (MIGRATED | pad << 4) << 16 | PKEY_DEFAULT), htobe32(qp), htobe32(psn)};

	memcpy(at, words, sizeof(words));
}

void rc_put_icrc(uint8_t *at, uint32_t value)
{
	value = htole32(value);
	memcpy(at, &value, sizeof(value));
}

int rc_begin(struct rc *rc, const uint8_t *partial, uint32_t partial_len)
{
	struct rc_record *record = &rc->record;
	uint32_t most = record->window / 2 < ACK_EVERY_MAX ? record->window / 2 : ACK_EVERY_MAX;

	icrc_init();
	rc->ack_every = 1;
	while (2 * rc->ack_every <= most)
		rc->ack_every *= 2;
	rc->stride = RC_OVERHEAD + record->mtu;
	rc->out_full = rc_icrc_begun(rc, true, rc->stride);
	uint32_t behind = icrc_behind(IPV4_LEN - 6 + UDP_LEN + rc->stride - RC_ICRC);
	for (uint32_t id = 0; id < RC_TRAIN_MAX; id++) {
		uint8_t bytes[2];
		put16(bytes, id);
		rc->ids[id] = icrc_product(icrc_update(0, bytes, 2), behind);
	}
	rc->expires_ns = 0;
	rc->expiries = 0;
	rc->gone_back_to = RC_NOWHERE;
	rc->at = rc->tail = rc->segment = 0;
	rc->pieces_len = rc->message_len = rc->in_len = 0;
	rc->owes_nak = rc->asks = false;
	record->packets_sent = record->packets_received = record->packets_dropped = record->packets_resent = 0;
	record->resent = record->naks_sent = record->naks_received = 0;
	return rc_resume(rc, partial, partial_len);
}

void rc_free(struct rc *rc)
{
	free(rc->packets);
	free(rc->slots);
	free(rc->staging);
	free(rc->pieces);
	rc->packets = rc->staging = NULL;
	rc->slots = NULL;
	rc->pieces = NULL;
	rc->size = rc->pieces_size = rc->pieces_len = rc->at = rc->tail = 0;
}
