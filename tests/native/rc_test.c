/* rc_test.c - two queue pairs of rc.h on a wire that loses, doubles and disorders; fuzz_rc.c has one that is told anything. */
#include "check.h"

#include "icrc.h"
#include "rc.h"

#include <endian.h>
#include <string.h>

#define FLYING_MAX 512
#define MESSAGES 100u
#define MOST 61440u
#define SECOND 1000000000ll

struct datagram {
	bool to_second;
	uint32_t len, segment;
	uint8_t *bytes;
};

struct world {
	struct rc ends[2];
	struct datagram flying[FLYING_MAX];
	uint32_t count;
	uint32_t sent[2], got[2]; /* messages */
	int64_t now;
	struct dice dice;
	uint32_t loss, twice, late; /* of a hundred */
};

/* ---- the checksum, by the bit ---- */
static uint32_t crc_slow(uint32_t state, const uint8_t *data, size_t len)
{
	for (size_t i = 0; i < len; i++) {
		state ^= data[i];
		for (int bit = 0; bit < 8; bit++)
			state = state >> 1 ^ (state & 1 ? 0xEDB88320u : 0);
	}
	return state;
}

static uint32_t icrc_slow(const struct rc *from, const uint8_t *packet, uint32_t len, uint16_t id)
{
	uint8_t head[56], bth[12];
	uint32_t at;

	memset(head, 0xFF, sizeof(head));
	if (from->record.ipv6) {
		head[8] = 0x6F;
		head[12] = (uint8_t)((8 + len) >> 8), head[13] = (uint8_t)(8 + len), head[14] = 17;
		memcpy(head + 16, from->local, 16);
		memcpy(head + 32, from->remote, 16);
		at = 48;
	} else {
		const uint8_t ip[12] = {0x45,
		                        0xFF,
		                        (uint8_t)((28 + len) >> 8),
		                        (uint8_t)(28 + len),
		                        (uint8_t)(id >> 8),
		                        (uint8_t)id,
		                        0x40,
		                        0,
		                        0xFF,
		                        17,
		                        0xFF,
		                        0xFF};
		memcpy(head + 8, ip, 12);
		memcpy(head + 20, from->local, 4);
		memcpy(head + 24, from->remote, 4);
		at = 28;
	}
	const uint8_t udp[8] = {(uint8_t)(from->record.source_port >> 8),
	                        (uint8_t)from->record.source_port,
	                        4791 >> 8,
	                        4791 & 0xFF,
	                        (uint8_t)((8 + len) >> 8),
	                        (uint8_t)(8 + len),
	                        0xFF,
	                        0xFF};
	memcpy(head + at, udp, 8);
	memcpy(bth, packet, 12);
	bth[4] = 0xFF;
	uint32_t state = crc_slow(0xFFFFFFFF, head, at + 8);
	return ~crc_slow(crc_slow(state, bth, 12), packet + 12, len - 16);
}

static void check_icrc(const struct rc *from, const uint8_t *packet, uint32_t len, uint16_t id)
{
	uint32_t told;

	memcpy(&told, packet + len - 4, 4);
	CHECK(le32toh(told) == icrc_slow(from, packet, len, id), "%u bytes, identification %u", len, id);
}

/* ---- a world ---- */
static void world_open(struct world *world, uint64_t seed, uint32_t mtu, bool ipv6)
{
	*world = (struct world){.dice = {seed}, .now = SECOND};
	for (int end = 0; end < 2; end++) {
		struct rc *rc = world->ends + end;
		uint32_t first = end ? 0xFFFFF0 : 5; /* one goes around its circle */
		for (int i = 0; i < 16; i++) {
			rc->local[i] = (uint8_t)(i * 7 + end);
			rc->remote[i] = (uint8_t)(i * 7 + !end);
		}
		uint32_t other = end ? 5 : 0xFFFFF0;
		rc->record = (struct rc_record){
			.ipv6 = ipv6,
			.source_port = 50000u + (uint32_t)end,
			.remote_port = 50000u + !end,
			.local_qp = 17u + (uint32_t)end,
			.remote_qp = 17u + !end,
			.mtu = mtu,
			.window = 64,
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

static void world_close(struct world *world)
{
	for (uint32_t i = 0; i < world->count; i++)
		free(world->flying[i].bytes);
	rc_free(world->ends);
	rc_free(world->ends + 1);
}

static bool chance(struct world *world, uint32_t of_hundred)
{
	return dice_below(&world->dice, 100) < of_hundred;
}

static void fly(struct world *world, bool to_second, const uint8_t *bytes, uint32_t len, uint32_t segment)
{
	for (int times = chance(world, world->twice) ? 2 : 1; times && world->count < FLYING_MAX; times--) {
		if (chance(world, world->loss))
			continue;
		uint8_t *copy = malloc(len); /* of its own, so that nobody reads behind it */
		CHECK(copy);
		memcpy(copy, bytes, len);
		world->flying[world->count++] = (struct datagram){to_second, len, segment, copy};
	}
}

/* All that an end may send now; some together, as a socket gives it. */
static void send_all(struct world *world, int end)
{
	struct rc *rc = world->ends + end;
	uint8_t answer[RC_ANSWER_LEN], *whole = malloc(2 * RC_DATAGRAM_MAX);
	struct iovec pieces[2];
	uint32_t count, len;
	int used;

	while ((len = rc_answer(rc, answer))) {
		check_icrc(rc, answer, len, 0);
		fly(world, !end, answer, len, 0);
	}
	while ((used = rc_train(rc, 1 + (uint32_t)dice_below(&world->dice, RC_TRAIN_MAX), pieces, &count, &len))) {
		uint32_t bytes = 0;
		for (int i = 0; i < used; i++) {
			memcpy(whole + bytes, pieces[i].iov_base, pieces[i].iov_len);
			bytes += (uint32_t)pieces[i].iov_len;
		}
		CHECK(bytes <= 65507 && bytes > (count - 1) * len && bytes <= count * len, "%u of %u in %u", count, len, bytes);
		bool together = chance(world, 70);
		for (uint32_t i = 0; i < count; i++) {
			uint32_t this = bytes - i * len < len ? bytes - i * len : len;
			if (chance(world, 10))
				check_icrc(rc, whole + i * len, this, (uint16_t)i);
			if (!together)
				fly(world, !end, whole + i * len, this, 0);
		}
		if (together)
			fly(world, !end, whole, bytes, len);
		rc_sent(rc, count, world->now);
	}
	free(whole);
}

static uint32_t length_of(int end, uint32_t message)
{
	struct dice dice = {(uint64_t)end << 32 | message};
	uint64_t sort = dice_below(&dice, 4);

	return 16 + (uint32_t)dice_below(&dice, sort == 0 ? MOST - 16 : sort == 1 ? 5000 : 100);
}

static void say(struct world *world, int end)
{
	struct rc *rc = world->ends + end;
	uint8_t bytes[MOST];
	uint32_t len = length_of(end, world->sent[end]), cut = 16 + (len - 16) / 3;

	if (world->sent[end] == MESSAGES || rc_waiting(rc) >= RC_QUEUE_MAX)
		return;
	for (uint32_t i = 0; i < len; i++)
		bytes[i] = stream_byte((uint64_t)end << 32 | world->sent[end], i);
	const struct iovec pieces[] = {{bytes + 16, cut - 16}, {bytes + cut, len - cut}};
	CHECK(rc_put(rc, bytes, 16, pieces, 2) == 0);
	world->sent[end]++;
}

static void hear(struct world *world, int end)
{
	struct rc *rc = world->ends + end;

	for (;;) {
		enum rc_found found = rc_next(rc, MOST, world->now);
		if (found == RC_NOTHING)
			return;
		CHECK(found == RC_MESSAGE, "%d", found);
		uint32_t number = world->got[end]++, len = length_of(!end, number);
		uint8_t bytes[MOST];
		CHECK(rc->message_len == len, "%u, not %u", rc->message_len, len);
		uint32_t cut = (uint32_t)dice_below(&world->dice, len + 1);
		rc_copy(rc, 0, bytes, cut);
		rc_copy(rc, cut, bytes + cut, len - cut);
		for (uint32_t i = 0; i < len; i++)
			CHECK(bytes[i] == stream_byte((uint64_t)!end << 32 | number, i), "byte %u of message %u", i, number);
		rc_taken(rc);
	}
}

static void arrive(struct world *world)
{
	uint32_t at = chance(world, world->late) ? (uint32_t)dice_below(&world->dice, world->count) : 0;
	struct datagram datagram = world->flying[at];
	struct rc *rc = world->ends + datagram.to_second;

	memmove(world->flying + at, world->flying + at + 1, (--world->count - at) * sizeof(datagram));
	uint8_t *room = rc_room(rc, MOST);
	CHECK(room);
	memcpy(room, datagram.bytes, datagram.len);
	free(datagram.bytes);
	rc_commit(rc, datagram.len, datagram.segment);
	hear(world, datagram.to_second);
}

static void run(uint64_t seed, uint32_t mtu, bool ipv6, uint32_t loss, uint32_t twice, uint32_t late)
{
	struct world world;

	world_open(&world, seed, mtu, ipv6);
	world.loss = loss, world.twice = twice, world.late = late;
	for (uint64_t step = 0; world.got[0] < MESSAGES || world.got[1] < MESSAGES; step++) {
		CHECK(step < 1000000, "it comes to no end");
		int end = (int)dice_below(&world.dice, 2);
		say(&world, end);
		if (chance(&world, 50))
			send_all(&world, end);
		if (world.count)
			arrive(&world);
		world.now += 1000;
		if (world.count)
			continue;
		send_all(&world, 0);
		send_all(&world, 1);
		for (end = 0; end < 2; end++) { /* nothing is on its way: time passes */
			int64_t due = rc_deadline(world.ends + end);
			if (due && !world.count) {
				world.now = due > world.now ? due : world.now;
				CHECK(rc_pass(world.ends + end, world.now) || loss, "it was silent on a good wire");
				world.ends[end].expiries = 0;
				send_all(&world, end);
			}
		}
	}
	for (int end = 0; end < 2; end++)
		CHECK(loss || twice || late || !world.ends[end].record.resent, "nothing was lost, and yet sent again");
	world_close(&world);
}

static void messages_arrive_as_they_were_sent(void)
{
	for (uint32_t mtu = 256; mtu <= 4096; mtu *= 2) {
		run(mtu, mtu, false, 0, 0, 0);
		run(mtu + 1, mtu, true, 0, 0, 0);
	}
}

static void what_is_lost_doubled_or_late_is_made_good(void)
{
	for (uint64_t seed = 1; seed <= 6; seed++) {
		uint32_t mtu = 256u << seed % 5;
		run(seed, mtu, seed % 2, 5, 0, 0);
		run(seed + 100, mtu, seed % 2, 0, 20, 0);
		run(seed + 200, mtu, seed % 2, 0, 0, 30);
		run(seed + 300, mtu, seed % 2, 10, 10, 10);
	}
}

static void who_is_silent_is_given_up(void)
{
	struct world world;
	uint8_t bytes[16] = {0};
	uint32_t times = 0;

	world_open(&world, 1, 1024, false);
	world.loss = 100;
	CHECK(rc_put(world.ends, bytes, sizeof(bytes), NULL, 0) == 0);
	do {
		send_all(&world, 0);
		int64_t due = rc_deadline(world.ends);
		CHECK(due > world.now);
		CHECK(rc_pass(world.ends, due - 1));
		world.now = due;
		times++;
	} while (rc_pass(world.ends, world.now));
	CHECK(times == RC_EXPIRIES + 1 && world.now - SECOND == 67000000ll * 15, "%u", times);
	world_close(&world);
}

static void what_has_come_in_part_goes_on(void)
{
	struct world world;
	uint8_t bytes[3000];
	uint32_t len, n = 0;

	world_open(&world, 1, 1024, false);
	for (uint32_t i = 0; i < sizeof(bytes); i++)
		bytes[i] = stream_byte(9, i);
	const struct iovec rest = {bytes + 16, sizeof(bytes) - 16};
	CHECK(rc_put(world.ends, bytes, 16, &rest, 1) == 0);
	struct rc *other = world.ends + 1;
	other->record.expected = rc_after(other->record.expected, 2); /* which have come elsewhere */
	CHECK(rc_begin(other, bytes, 2048) == 0);
	for (const uint8_t *left; (left = rc_left(other, n, &len)); n++)
		CHECK(len == 1040 && !memcmp(left + 12, bytes + 1024 * n, 1024));
	CHECK(n == 2);
	send_all(&world, 0);
	uint8_t *room = rc_room(other, MOST);
	CHECK(room && world.count);
	while (world.count) {
		struct datagram datagram = world.flying[--world.count];
		memcpy(room, datagram.bytes, datagram.len);
		free(datagram.bytes);
		rc_commit(other, datagram.len, datagram.segment);
		if (rc_next(other, MOST, 0) == RC_MESSAGE)
			break;
		room = rc_room(other, MOST);
	}
	uint8_t got[3000];
	CHECK(other->message_len == sizeof(bytes));
	rc_copy(other, 0, got, sizeof(got));
	CHECK(!memcmp(got, bytes, sizeof(got)));
	uint32_t expected = other->record.expected;
	rc_rewind(other);
	CHECK(rc_ahead(expected, other->record.expected) == 3);
	world_close(&world);
}

static void a_damaged_packet_is_dropped(void)
{
	struct world world;
	uint8_t bytes[64] = {0};

	for (uint32_t bit = 0; bit < 8 * (12 + 64 + 4); bit++) {
		world_open(&world, 1, 1024, bit & 1);
		CHECK(rc_put(world.ends, bytes, sizeof(bytes), NULL, 0) == 0);
		send_all(&world, 0);
		CHECK(world.count == 1);
		world.flying[0].bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
		struct rc *other = world.ends + 1;
		memcpy(rc_room(other, MOST), world.flying[0].bytes, world.flying[0].len);
		rc_commit(other, world.flying[0].len, 0);
		bool masked = bit / 8 == 4; /* congestion, and reserved */
		CHECK(rc_next(other, MOST, 0) == (masked ? RC_MESSAGE : RC_NOTHING), "bit %u", bit);
		CHECK(other->record.packets_dropped == !masked);
		world_close(&world);
	}
}

/* Check value of CRC-32, and each way to compute it against the slow one. */
static void every_icrc_is_the_same(void)
{
	static uint8_t bytes[5000];
	struct dice dice = {7};

	icrc_init();
	for (size_t i = 0; i < sizeof(bytes); i++)
		bytes[i] = (uint8_t)dice_roll(&dice);
	for (const struct icrc_implementation *each = icrc_implementations; each->name; each++) {
		CHECK(~each->update(ICRC_START, (const uint8_t *)"123456789", 9) == 0xCBF43926, "%s", each->name);
		for (uint32_t len = 0; len < 1200; len++)
			CHECK(each->update(len, bytes + len % 17, len) == crc_slow(len, bytes + len % 17, len), "%s, %u",
			      each->name, len);
		CHECK(each->update(1, bytes, sizeof(bytes)) == crc_slow(1, bytes, sizeof(bytes)), "%s", each->name);
	}
	for (uint32_t len = 0; len < 300; len++) {
		uint32_t difference = crc_slow(5, bytes, len) ^ crc_slow(77, bytes, len);
		CHECK(icrc_product(5 ^ 77, icrc_behind(len)) == difference);
		CHECK(icrc_product(difference, icrc_before(len)) == (5 ^ 77));
	}
}

/* IBTA annex A17's checksum, of docs' worked example: an acknowledgement from 192.0.2.2 to 192.0.2.1. */
static void the_worked_example_is_right(void)
{
	struct rc rc = {.record = {.source_port = 0xC0DF,
	                           .remote_qp = 0x11,
	                           .carried_out = 0xFEDCBA,
	                           .completed = 1,
	                           .owes_ack = 1,
	                           .mtu = 1024,
	                           .window = 64},
	                .local = {192, 0, 2, 2},
	                .remote = {192, 0, 2, 1}};
	uint8_t answer[RC_ANSWER_LEN];
	const uint8_t wanted[] = {0x11, 0x40, 0xFF, 0xFF, 0, 0, 0,    0x11, 0,    0xFE,
	                          0xDC, 0xBA, 0x1F, 0,    0, 1, 0xE4, 0xF2, 0x17, 0x88};

	CHECK(rc_begin(&rc, NULL, 0) == 0);
	CHECK(rc_answer(&rc, answer) == sizeof(wanted) && !memcmp(answer, wanted, sizeof(wanted)));
	rc_free(&rc);
}

static const struct test tests[] = {
#define TEST(name) {#name, name}
	TEST(messages_arrive_as_they_were_sent), TEST(what_is_lost_doubled_or_late_is_made_good),
	TEST(who_is_silent_is_given_up),         TEST(what_has_come_in_part_goes_on),
	TEST(a_damaged_packet_is_dropped),       TEST(every_icrc_is_the_same),
	TEST(the_worked_example_is_right),
};

int main(int argc, char **argv)
{
	return tests_run(tests, sizeof(tests) / sizeof(*tests), argc, argv);
}
