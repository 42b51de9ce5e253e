/* rc_test.c - two queue pairs of rc_qp.h on a wire that loses, doubles and disorders; fuzz_rc.c has one that is told anything. */
#include "rc_ends.h"

#include "icrc.h"

#include <endian.h>

#define FLYING_MAX 512
#define REQUESTS 100u
#define SECOND 1000000000ll
#define DATAGRAM_MAX 65536u

struct datagram {
	bool to_second;
	uint32_t len, segment;
	uint8_t *bytes;
};

struct world {
	struct side ends[2];
	struct datagram flying[FLYING_MAX];
	uint32_t count;
	int64_t now;
	struct dice dice;
	uint32_t loss, twice, late; /* of a hundred */
	uint32_t receives; /* that are posted at once */
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

static uint32_t icrc_slow(const struct rc_qp *from, uint32_t port, const uint8_t *packet, uint32_t len, uint16_t id)
{
	uint8_t head[56], bth[12];
	uint32_t at;

	memset(head, 0xFF, sizeof(head));
	if (from->ipv6) {
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
	const uint8_t udp[8] = {(uint8_t)(port >> 8),      (uint8_t)port,      4791 >> 8, 4791 & 0xFF,
	                        (uint8_t)((8 + len) >> 8), (uint8_t)(8 + len), 0xFF,      0xFF};
	memcpy(head + at, udp, 8);
	memcpy(bth, packet, 12);
	bth[4] = 0xFF;
	uint32_t state = crc_slow(0xFFFFFFFF, head, at + 8);
	return ~crc_slow(crc_slow(state, bth, 12), packet + 12, len - 16);
}

static void check_icrc(const struct rc_qp *from, uint32_t port, const uint8_t *packet, uint32_t len, uint16_t id)
{
	uint32_t told;

	memcpy(&told, packet + len - 4, 4);
	CHECK(le32toh(told) == icrc_slow(from, port, packet, len, id), "%u bytes, identification %u", len, id);
}

/* ---- a world ---- */
static uint32_t port_of(bool second)
{
	return 50000u + second;
}

static void world_open(struct world *world, uint64_t seed, uint32_t mtu, bool ipv6)
{
	*world = (struct world){.dice = {seed}, .now = SECOND, .receives = 4};
	for (int end = 0; end < 2; end++)
		side_open(world->ends + end, end, mtu, 64, ipv6);
	world->ends[0].other = world->ends + 1;
	world->ends[1].other = world->ends;
}

static void world_close(struct world *world)
{
	for (uint32_t i = 0; i < world->count; i++)
		free(world->flying[i].bytes);
	side_close(world->ends);
	side_close(world->ends + 1);
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
	struct rc_qp *qp = &world->ends[end].qp;
	uint8_t *whole = malloc(DATAGRAM_MAX);
	size_t bytes;

	CHECK(whole);
	for (;;) {
		struct qp_train train = {
			.most = 1 + (uint32_t)dice_below(&world->dice, 64), .port = port_of(end), .sends = true};
		if (!(bytes = qp_train(qp, whole, DATAGRAM_MAX, &train, world->now)))
			break;
		uint32_t len = train.segment;
		CHECK(bytes <= 65507 && bytes > (train.count - 1) * len && bytes <= train.count * len &&
		      train.count <= train.most);
		bool together = chance(world, 70);
		for (uint32_t i = 0; i < train.count; i++) {
			uint32_t this = (uint32_t)bytes - i * len < len ? (uint32_t)bytes - i * len : len;
			if (chance(world, 10))
				check_icrc(qp, port_of(end), whole + i * len, this, (uint16_t)i);
			if (!together)
				fly(world, !end, whole + i * len, this, this);
		}
		if (together)
			fly(world, !end, whole, (uint32_t)bytes, len);
	}
	free(whole);
}

static void ask(struct world *world, int end)
{
	struct side *side = world->ends + end;
	struct dice *dice = &world->dice;
	enum qp_op op = (enum qp_op[]){QP_SEND, QP_WRITE, QP_READ, QP_ADD}[dice_below(dice, 4)];
	uint32_t len = (uint32_t)dice_below(dice, chance(world, 50) ? 100 : END_MOST);
	uint32_t at = len < END_WRITTEN ? (uint32_t)dice_below(dice, END_WRITTEN - len) : 0;

	if (side->asked < REQUESTS && side->asked - side->done < 8)
		side_ask(side, op, len, at, op == QP_SEND && len % 3 == 1);
}

static void arrive(struct world *world)
{
	uint32_t at = chance(world, world->late) ? (uint32_t)dice_below(&world->dice, world->count) : 0;
	struct datagram datagram = world->flying[at];
	struct side *side = world->ends + datagram.to_second;

	memmove(world->flying + at, world->flying + at + 1, (--world->count - at) * sizeof(datagram));
	if (side->receives < world->receives && chance(world, 50))
		side->receives = world->receives;
	size_t taken = qp_receive(&side->qp, datagram.bytes, datagram.len, datagram.segment, port_of(!datagram.to_second),
	                          QP_RTS, world->now);
	CHECK(taken == datagram.len && !side->qp.refused && !side->qp.failed, "%s", side->qp.why);
	side_done(side);
	free(datagram.bytes);
}

static bool is_done(const struct side *side)
{
	return side->asked == REQUESTS && side->done == REQUESTS;
}

static void pass(struct world *world)
{
	for (int end = 0; end < 2 && !world->count; end++) { /* nothing is on its way: time passes */
		struct side *side = world->ends + end;
		int64_t due = qp_deadline(&side->qp);
		if (!due)
			continue;
		world->now = due > world->now ? due : world->now;
		side->other->receives = world->receives;
		side->qp.retries_left = side->qp.retry_count;
		qp_pass(&side->qp, world->now);
		CHECK(!side->qp.failed);
		send_all(world, end);
	}
}

static void run(uint64_t seed, uint32_t mtu, bool ipv6, uint32_t loss, uint32_t twice, uint32_t late)
{
	struct world world;

	world_open(&world, seed, mtu, ipv6);
	world.loss = loss, world.twice = twice, world.late = late;
	for (uint64_t step = 0; !is_done(world.ends) || !is_done(world.ends + 1); step++) {
		CHECK(step < 1000000, "it comes to no end");
		int end = (int)dice_below(&world.dice, 2);
		ask(&world, end);
		if (chance(&world, 50))
			send_all(&world, end);
		if (world.count)
			arrive(&world);
		world.now += 1000;
		if (world.count)
			continue;
		send_all(&world, 0);
		send_all(&world, 1);
		pass(&world);
	}
	for (int end = 0; end < 2; end++) {
		side_check_written(world.ends + end);
		CHECK(world.ends[end].heard == world.ends[!end].sends);
	}
	world_close(&world);
}

static void requests_are_carried_out_as_they_were_asked_for(void)
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
	uint32_t times = 0;

	world_open(&world, 1, 1024, false);
	struct rc_qp *qp = &world.ends[0].qp;
	world.loss = 100;
	side_ask(world.ends, QP_SEND, 16, 0, false);
	while (!qp->failed) {
		send_all(&world, 0);
		int64_t due = qp_deadline(qp);
		CHECK(due > world.now);
		qp_pass(qp, due - 1);
		CHECK(qp_deadline(qp) == due);
		world.now = due;
		qp_pass(qp, due);
		times++;
	}
	CHECK(times == 8 && world.now - SECOND == 67000000ll * (1 + 2 + 4 + 8 + 4 * 16), "%u", times);
	CHECK(qp->status == QP_RETRY_EXCEEDED && qp->resent == 7);
	world_close(&world);
}

/* Of long messages each 32nd packet asks for an acknowledgement, and the last of a turn does, of messages together. */
static void an_acknowledgement_is_asked_for_now_and_then(void)
{
	struct world world;
	uint8_t packet[QP_PACKET_MAX];
	uint32_t asks = 0, last = 0, count = 0;

	world_open(&world, 1, 256, true);
	for (int i = 0; i < 5; i++)
		side_ask(world.ends, QP_SEND, 2560, 0, false);
	for (;;) {
		struct qp_train train = {.most = 1, .port = 1, .sends = true};
		if (!qp_train(&world.ends[0].qp, packet, sizeof(packet), &train, world.now))
			break;
		last = packet[8] >> 7;
		asks += last;
		count++;
	}
	CHECK(count == 50 && asks == 2 && last, "%u of %u", asks, count); /* number 31, and the last */
	world_close(&world);
}

static void a_damaged_packet_is_left(void)
{
	struct world world;

	for (uint32_t bit = 0; bit < 8 * (12 + 64 + 4); bit++) {
		world_open(&world, 1, 1024, bit & 1);
		side_ask(world.ends, QP_SEND, 64, 0, false);
		send_all(&world, 0);
		CHECK(world.count == 1);
		struct datagram *datagram = world.flying;
		datagram->bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
		struct side *other = world.ends + 1;
		other->receives = 1;
		other->judged = false;
		bool masked = bit / 8 == 4; /* congestion, and reserved */
		size_t taken = qp_receive(&other->qp, datagram->bytes, datagram->len, datagram->len, port_of(false), QP_RTS, 0);
		CHECK(taken == (masked ? datagram->len : 0) && other->heard == masked, "bit %u", bit);
		other->qp.plain_max = END_MOST; /* and for an engine it is as if it were lost */
		taken = qp_receive(&other->qp, datagram->bytes, datagram->len, datagram->len, port_of(false), QP_RTS, 0);
		CHECK(taken == datagram->len && other->heard == masked && other->qp.packets_dropped == !masked);
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
	static struct rc_qp qp = {
		.remote_qp = 0x11, .mtu = 1024, .window = 64, .local = {192, 0, 2, 2}, .remote = {192, 0, 2, 1}};
	uint8_t answer[QP_PACKET_MAX];
	const uint8_t wanted[] = {0x11, 0x40, 0xFF, 0xFF, 0, 0, 0,    0x11, 0,    0xFE,
	                          0xDC, 0xBA, 0x1F, 0,    0, 1, 0xE4, 0xF2, 0x17, 0x88};
	struct qp_train train = {.most = 1, .port = 0xC0DF};

	qp_begin(&qp, 0, 0xFEDCBB);
	qp.completed = 1;
	qp_acknowledge(&qp);
	CHECK(qp_train(&qp, answer, sizeof(answer), &train, 0) == sizeof(wanted) &&
	      !memcmp(answer, wanted, sizeof(wanted)));
}

static const struct test tests[] = {
#define TEST(name) {#name, name}
	TEST(requests_are_carried_out_as_they_were_asked_for),
	TEST(what_is_lost_doubled_or_late_is_made_good),
	TEST(who_is_silent_is_given_up),
	TEST(an_acknowledgement_is_asked_for_now_and_then),
	TEST(a_damaged_packet_is_left),
	TEST(every_icrc_is_the_same),
	TEST(the_worked_example_is_right),
};

int main(int argc, char **argv)
{
	return tests_run(tests, sizeof(tests) / sizeof(*tests), argc, argv);
}
