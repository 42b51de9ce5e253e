/*
 * fuzz_rc.c - libFuzzer target: two queue pairs of rc.h on a wire that does what it likes, and a third who says anything.
 *
 * Input: 1 byte options, then moves of 1 byte and what they need. Bit 7 of a move says which end. Packets of the third have the
 * addresses and the checksum of the other end, or not. An end that took one with a right checksum has been lied to: what it
 * hears is not judged from then on. The other one still gets what was sent, in order; and if nobody was lied to, neither is given
 * up but for silence, and in the end everything has arrived.
 */
#include "check.h"

#include "icrc.h"
#include "rc.h"

#include <string.h>
#if defined(__has_feature)
#if __has_feature(address_sanitizer) && !defined(__SANITIZE_ADDRESS__)
#define __SANITIZE_ADDRESS__
#endif
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(at, len) ((void)(at), (void)(len))
#define ASAN_UNPOISON_MEMORY_REGION(at, len) ((void)(at), (void)(len))
#endif

#define MOST 3000u /* less than the largest packet has */
#define FLYING_MAX 64u
#define MESSAGES_MAX 64u
#define SECOND 1000000000ll
#define DRAIN_MAX 10000u

struct datagram {
	int to;
	uint32_t len, segment;
	bool damaged, lie;
	uint8_t *bytes;
};

struct side {
	struct rc rc;
	uint32_t said, heard, lens[MESSAGES_MAX];
	bool lied_to, over;
};

struct world {
	struct side sides[2];
	struct datagram flying[FLYING_MAX];
	uint32_t count;
	int64_t now;
};

static void world_open(struct world *world, unsigned options)
{
	*world = (struct world){.now = SECOND};
	for (int end = 0; end < 2; end++) {
		struct rc *rc = &world->sides[end].rc;
		uint32_t first = end ? 0xFFFFF8 : 5, other = end ? 5 : 0xFFFFF8; /* one goes around its circle */
		memset(rc->local, 1 + end, sizeof(rc->local));
		memset(rc->remote, 2 - end, sizeof(rc->remote));
		rc->record = (struct rc_record){
			.ipv6 = options & 1,
			.source_port = 50000u + (uint32_t)end,
			.remote_port = 50001u - (uint32_t)end,
			.local_qp = 17u + (uint32_t)end,
			.remote_qp = 18u - (uint32_t)end,
			.mtu = 256u << (options >> 1 & 7) % 5,
			.window = options & 16 ? 4 : 64,
			.acknowledged = first,
			.cursor = first,
			.reached = first,
			.next = first,
			.expected = other,
			.carried_out = rc_after(other, -1u),
			.timeout_ns = 67000000,
		};
		CHECK(rc_begin(rc, NULL, 0) == 0);
	}
}

static void fly(struct world *world, int to, const uint8_t *bytes, uint32_t len, uint32_t segment, bool lie)
{
	if (world->count == FLYING_MAX)
		return;
	uint8_t *copy = malloc(len ? len : 1);
	CHECK(copy);
	memcpy(copy, bytes, len);
	world->flying[world->count++] =
		(struct datagram){.to = to, .len = len, .segment = segment, .lie = lie, .bytes = copy};
}

static struct datagram land(struct world *world, uint32_t at)
{
	struct datagram found = world->flying[at];

	memmove(world->flying + at, world->flying + at + 1, (--world->count - at) * sizeof(found));
	return found;
}

static void check_numbers(const struct rc *rc)
{
	const struct rc_record *record = &rc->record;

	CHECK(rc_ahead(record->cursor, record->acknowledged) >= 0 && rc_ahead(record->reached, record->cursor) >= 0 &&
	      rc_ahead(record->next, record->reached) >= 0);
	CHECK(rc_waiting(rc) <= RC_QUEUE_MAX + MOST + record->mtu);
	CHECK(rc_ahead(record->reached, record->acknowledged) <= (int32_t)record->window);
	CHECK(rc->message_len <= MOST && rc->pieces_len <= MOST / 256 + 2);
}

static void say(struct side *side, int end, struct input *input)
{
	static uint8_t bytes[MOST];
	uint32_t what = (uint32_t)input_take(input, 2), len = what & 1 ? what % MOST : what % 300;

	if (side->over || side->said == MESSAGES_MAX || rc_waiting(&side->rc) >= RC_QUEUE_MAX)
		return;
	for (uint32_t i = 0; i < len; i++)
		bytes[i] = stream_byte((uint64_t)end << 32 | side->said, i);
	uint32_t head = len < 16 ? len : 16, cut = head + (len - head) / 3;
	const struct iovec pieces[] = {{bytes + head, cut - head}, {bytes + cut, len - cut}};
	CHECK(rc_put(&side->rc, bytes, head, pieces, 2) == 0);
	side->lens[side->said++] = len;
}

static void send_all(struct world *world, int end, uint32_t most)
{
	struct side *side = world->sides + end;
	static uint8_t whole[2 * RC_DATAGRAM_MAX];
	uint8_t answer[RC_ANSWER_LEN];
	struct iovec pieces[2];
	uint32_t count, len;
	int used;

	if (side->over)
		return;
	while ((len = rc_answer(&side->rc, answer)))
		fly(world, !end, answer, len, 0, false);
	while (world->count < FLYING_MAX && (used = rc_train(&side->rc, most, pieces, &count, &len))) {
		uint32_t bytes = 0;
		for (int i = 0; i < used; i++) {
			memcpy(whole + bytes, pieces[i].iov_base, pieces[i].iov_len);
			bytes += (uint32_t)pieces[i].iov_len;
		}
		CHECK(count <= most && bytes <= 65507 && bytes > (count - 1) * len && bytes <= count * len);
		fly(world, !end, whole, bytes, len, false);
		rc_sent(&side->rc, count, world->now);
	}
}

/* It is given back: what is left is whole datagrams. */
static void give_up(struct side *side)
{
	const uint8_t *left;
	uint32_t len;

	rc_rewind(&side->rc);
	for (uint32_t n = 0; (left = rc_left(&side->rc, n, &len)); n++)
		CHECK(left >= side->rc.staging && len && left + len <= side->rc.staging + side->rc.tail && n < RC_DATAGRAM_MAX);
	side->over = true;
}

static void hear(struct world *world, int end)
{
	static uint8_t bytes[MOST];
	struct side *side = world->sides + end, *other = world->sides + !end;
	enum rc_found found;

	while ((found = rc_next(&side->rc, MOST, world->now)) == RC_MESSAGE) {
		uint32_t len = side->rc.message_len, cut = len / 3;
		CHECK(len <= MOST);
		rc_copy(&side->rc, 0, bytes, cut);
		rc_copy(&side->rc, cut, bytes + cut, len - cut);
		if (!side->lied_to) {
			CHECK(side->heard < other->said && len == other->lens[side->heard], "%u bytes", len);
			for (uint32_t i = 0; i < len; i++)
				CHECK(bytes[i] == stream_byte((uint64_t)!end << 32 | side->heard, i), "byte %u of message %u", i,
				      side->heard);
		}
		side->heard++;
		rc_taken(&side->rc);
	}
	if (found == RC_NOTHING)
		return;
	CHECK(found == RC_STRANGE && (side->lied_to || other->lied_to), "%d", found);
	give_up(side);
}

static void arrive(struct world *world, uint32_t at)
{
	struct datagram datagram = land(world, at);
	struct side *side = world->sides + datagram.to;
	struct rc *rc = &side->rc;

	if (!side->over) {
		if (rc->staging)
			ASAN_UNPOISON_MEMORY_REGION(rc->staging, rc->size);
		uint8_t *room = rc_room(rc, MOST);
		CHECK(room);
		memcpy(room, datagram.bytes, datagram.len);
		ASAN_POISON_MEMORY_REGION(room + datagram.len, rc->size - (size_t)(room + datagram.len - rc->staging));
		rc_commit(rc, datagram.len, datagram.segment);
		side->lied_to |= datagram.lie;
		hear(world, datagram.to);
	}
	free(datagram.bytes);
}

/* ---- the third ---- */
static uint32_t near(const struct rc *rc, struct input *input)
{
	unsigned what = (unsigned)input_take(input, 1);
	const struct rc_record *record = &rc->record;
	const uint32_t of[] = {record->expected, record->acknowledged, record->next, record->reached};

	return what & 64 ? (uint32_t)input_take(input, 3) : rc_after(of[what >> 4 & 3], what & 8 ? (what & 7) - 3 : 0);
}

/* A packet of which the checksum is right, and nothing else has to be. */
static void lie(struct world *world, int to, struct input *input)
{
	static const uint8_t opcodes[] = {0, 0, 1, 1, 2, 2, 4, 4, 0x11, 0x11, 3, 5, 6, 0x0C, 0x10, 0x17};
	static uint8_t packet[RC_OVERHEAD + 4096 + 4];
	const struct rc *rc = &world->sides[to].rc;
	unsigned what = (unsigned)input_take(input, 1), size = (unsigned)input_take(input, 1);
	uint32_t mtu = rc->record.mtu,
			 len = RC_OVERHEAD + (size & 192 ? 4 * (size & 63) : mtu + 4 * (size & 1) - 4 * (size >> 1 & 1));

	if (size == 255)
		len = (uint32_t)input_take(input, 1) % RC_OVERHEAD;
	memset(packet, (int)input_take(input, 1), sizeof(packet)); /* the syndrome of an acknowledgement among them */
	rc_put_bth(packet, rc->record.local_qp, opcodes[what & 15], what >> 4 & 3,
	           near(rc, input) | (what & 64 ? 1u << 31 : 0));
	if (what & 128)
		packet[input_take(input, 1) % RC_BTH] ^= (uint8_t)input_take(input, 1);
	bool right = len >= RC_OVERHEAD && !(size & 64 && what & 128);
	if (len >= RC_OVERHEAD) {
		uint32_t begun = rc_icrc_begun(&world->sides[!to].rc, true, len);
		rc_put_icrc(packet + len - RC_ICRC, rc_icrc(begun, packet, len - RC_ICRC));
	}
	if (!right) /* by one bit, which no other identification explains */
		packet[len > RC_BTH ? RC_BTH : 0] ^= 1;
	fly(world, to, packet, len, 0, right);
	world->flying[world->count - 1].damaged |= !right;
}

static void say_bytes(struct world *world, int to, struct input *input)
{
	uint8_t bytes[256];
	uint32_t len = (uint32_t)input_take(input, 1);

	for (uint32_t i = 0; i < len; i++)
		bytes[i] = (uint8_t)input_take(input, 1);
	fly(world, to, bytes, len, (uint32_t)input_take(input, 1), true);
}

/* One bit of it, so that the checksum is wrong, unless it is one that it does not cover. */
static void damage(struct world *world, struct input *input)
{
	struct datagram *datagram = world->flying + input_take(input, 1) % world->count;
	uint32_t bit = (uint32_t)input_take(input, 3);

	if (!datagram->damaged && datagram->len)
		datagram->bytes[bit / 8 % datagram->len] ^= (uint8_t)(1 << bit % 8);
	datagram->damaged = true;
}

static void pass(struct world *world, int end, int64_t ns)
{
	struct side *side = world->sides + end;
	int64_t due = rc_deadline(&side->rc);

	world->now += ns;
	if (side->over || !due || due > world->now || rc_pass(&side->rc, world->now))
		return;
	CHECK(side->rc.expiries == RC_EXPIRIES);
	give_up(side);
}

/* Nobody was lied to: by a wire that is good from now on everything comes. */
static void drain(struct world *world)
{
	const struct side *one = world->sides, *other = world->sides + 1;

	for (uint32_t step = 0; one->heard < other->said || other->heard < one->said; step++) {
		CHECK(step < DRAIN_MAX, "it comes to no end: %u of %u, %u of %u", one->heard, other->said, other->heard,
		      one->said);
		if (one->over || other->over) /* it was silent for too long before */
			return;
		for (int end = 0; end < 2; end++)
			send_all(world, end, RC_TRAIN_MAX);
		for (int end = 0; end < 2 && !world->count; end++)
			pass(world, end, 67000000);
		while (world->count)
			arrive(world, 0);
	}
}

static void move(struct world *world, struct input *input)
{
	unsigned what = (unsigned)input_take(input, 1);
	int end = what >> 7;

	switch (what & 15) {
	case 0:
	case 1: say(world->sides + end, end, input); break;
	case 2:
	case 3:
	case 4: send_all(world, end, 1 + (what >> 4 & 7) * 9); break;
	case 5: lie(world, end, input); break;
	case 6: say_bytes(world, end, input); break;
	case 7: pass(world, end, (int64_t)input_take(input, 1) << (what >> 4 & 7) * 4); break;
	default:
		if (!world->count)
			break;
		if ((what & 15) == 8)
			damage(world, input);
		else if ((what & 15) == 9)
			free(land(world, (uint32_t)input_take(input, 1) % world->count).bytes);
		else if ((what & 15) == 10) {
			struct datagram again = world->flying[input_take(input, 1) % world->count];
			fly(world, again.to, again.bytes, again.len, again.segment, again.lie);
			world->flying[world->count - 1].damaged = true; /* not once more: two bits may do */
		} else
			arrive(world, (what & 15) == 11 ? (uint32_t)input_take(input, 1) % world->count : 0);
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct input input = {data, size};
	static struct world world;

	icrc_init();
	world_open(&world, (unsigned)input_take(&input, 1));
	while (input.left) {
		move(&world, &input);
		for (int end = 0; end < 2; end++)
			check_numbers(&world.sides[end].rc);
	}
	if (!world.sides[0].lied_to && !world.sides[1].lied_to) {
		for (uint32_t at = 0; at < world.count; at++) /* nor is anybody now */
			while (at < world.count && world.flying[at].lie)
				free(land(&world, at).bytes);
		drain(&world);
	}
	while (world.count)
		free(land(&world, 0).bytes);
	for (int end = 0; end < 2; end++) {
		struct rc *rc = &world.sides[end].rc;
		if (rc->staging)
			ASAN_UNPOISON_MEMORY_REGION(rc->staging, rc->size);
		rc_free(rc);
	}
	return 0;
}
