/*
 * fuzz_rc.c - libFuzzer target: two queue pairs of rc_qp.h on a wire that does what it likes, and a stranger who says anything.
 *
 * Input: 1 byte options, then moves of 1 byte and what they need. Bit 7 of a move says which end. Packets of the stranger have the
 * addresses and the checksum of the other end, or not. An end that took one with a right checksum has been lied to: what comes to
 * it is not judged from then on, nor what it answers. If nobody was lied to, neither end is in error but for silence, and in the
 * end everything has arrived.
 */
#include "rc_ends.h"

#include "icrc.h"

#define FLYING_MAX 64u
#define SECOND 1000000000ll
#define DRAIN_MAX 10000u
#define DATAGRAM_MAX 65536u

struct datagram {
	int to;
	uint32_t len, segment;
	bool damaged, lie;
	uint8_t *bytes;
};

struct world {
	struct side sides[2];
	bool over[2];
	struct datagram flying[FLYING_MAX];
	uint32_t count;
	int64_t now;
	bool lied;
};

static uint32_t port_of(int end)
{
	return 50000u + (uint32_t)end;
}

static void world_open(struct world *world, unsigned options)
{
	*world = (struct world){.now = SECOND};
	for (int end = 0; end < 2; end++) {
		side_open(world->sides + end, end, 256u << (options >> 1 & 7) % 5, options & 16 ? 4 : 64, options & 1);
		world->sides[end].other = world->sides + !end;
		world->sides[end].receives = 3;
		if (options & 32)
			world->sides[end].qp.plain_max = END_MOST;
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

static void check_numbers(const struct rc_qp *qp)
{
	uint32_t flights = 0;

	for (const struct qp_flight *each = qp->flights; each; each = each->next)
		flights += each->count;
	CHECK(qp_ahead(qp->cursor, qp->acknowledged) >= 0 && qp_ahead(qp->reached, qp->cursor) >= 0 &&
	      qp_ahead(qp->next, qp->reached) >= 0);
	CHECK(qp_ahead(qp->reached, qp->acknowledged) <=
	      (int32_t)qp->window + (int32_t)(qp->window / 2 ? qp->window / 2 : 1));
	CHECK((int32_t)flights >= qp_ahead(qp->next, qp->acknowledged) && (!qp->flights == (qp->next == qp->acknowledged)));
	CHECK(qp->answers_len <= QP_ANSWERS_MAX && qp->fetches_len <= qp->resources && qp->asked_len <= QP_DEPTH_MAX);
}

static void ask(struct world *world, int end, struct input *input)
{
	struct side *side = world->sides + end;
	uint32_t what = (uint32_t)input_take(input, 2), len = what & 4 ? what % END_MOST : (what >> 3) % 300;
	enum qp_op op = (enum qp_op[]){QP_SEND, QP_WRITE, QP_READ, QP_ADD}[side->qp.plain_max ? 0 : what & 3];

	if (!world->over[end] && side->asked < END_ASKED_MAX - 1 && side->asked - side->done < 16)
		side_ask(side, op, len, (END_WRITTEN - len) / 2, !side->qp.plain_max && len % 3 == 1);
}

/* What has come of it; a refusal, or a failure, ends it. */
static void look(struct world *world, int end)
{
	struct rc_qp *qp = &world->sides[end].qp;

	if (qp->failed || qp->refused) {
		CHECK(world->lied || (qp->failed && qp->status == QP_RETRY_EXCEEDED) || world->over[!end], "%s", qp->why);
		qp->failed = NULL;
		qp->refused = false;
		world->over[end] = true;
		world->sides[end].judged = false;
		qp_stop(qp);
	}
	side_done(world->sides + end);
}

static void send_all(struct world *world, int end, uint32_t most)
{
	static uint8_t whole[DATAGRAM_MAX];
	size_t bytes;

	while (world->count < FLYING_MAX) {
		struct qp_train train = {.most = most, .port = port_of(end), .sends = !world->over[end]};
		if (!(bytes = qp_train(&world->sides[end].qp, whole, sizeof(whole), &train, world->now)))
			break;
		CHECK(train.count <= most && bytes <= 65507 && bytes > (train.count - 1) * train.segment &&
		      bytes <= train.count * train.segment);
		fly(world, !end, whole, (uint32_t)bytes, train.segment, false);
	}
	look(world, end);
}

static void arrive(struct world *world, uint32_t at)
{
	struct datagram datagram = land(world, at);
	struct side *side = world->sides + datagram.to;
	uint32_t from = 0, segment = datagram.segment ? datagram.segment : datagram.len;

	if (datagram.lie) {
		world->lied = true;
		side->judged = false;
	}
	while (from < datagram.len) {
		enum qp_state state = world->over[datagram.to] ? QP_ERROR : QP_RTS;
		uint32_t left = datagram.len - from;
		size_t taken =
			qp_receive(&side->qp, datagram.bytes + from, left, segment, port_of(!datagram.to), state, world->now);
		CHECK(taken <= left);
		look(world, datagram.to);
		from += taken ? (uint32_t)taken : segment < left ? segment : left;
	}
	free(datagram.bytes);
}

/* ---- the stranger ---- */
static uint32_t near(const struct rc_qp *qp, struct input *input)
{
	unsigned what = (unsigned)input_take(input, 1);
	const uint32_t of[] = {qp->expected, qp->acknowledged, qp->next, qp->reached};

	return what & 64 ? (uint32_t)input_take(input, 3) : qp_after(of[what >> 4 & 3], what & 8 ? (what & 7) - 3 : 0);
}

/* Headers that could be good: where, and how much. */
static uint32_t put_headers(uint8_t *at, uint32_t has, uint32_t size, struct input *input)
{
	uint8_t *begin = at;
	unsigned what = has & (QP_RETH | QP_AETH | QP_ATOMIC) ? (unsigned)input_take(input, 1) : 0;

	if (has & (QP_RETH | QP_ATOMIC)) {
		const uint64_t of[] = {END_VA, END_VA + END_COUNTER, END_VA + END_REGION, 0};
		qp_put64(at, of[what & 3] + ((what >> 2 & 7) - 3) * (what & 64 ? 8u : 0));
		qp_put32(at + 8, END_KEY + (what >> 5 & 1));
		qp_put32(at + 12, what & 128 ? (uint32_t)input_take(input, 4) : size);
		at += has & QP_ATOMIC ? 28 : 16;
	}
	if (has & QP_AETH) {
		const uint8_t syndromes[] = {0x1F, 0, 0x20, 0x3F, 0x60, 0x61, 0x62, 0x63, 0x7F, 0x40};
		qp_put32(at, (uint32_t)syndromes[what % sizeof(syndromes)] << 24 | 3);
		at += 4;
	}
	at += has & QP_ORIGINAL ? 8 : 0;
	at += has & QP_IMMEDIATE ? 4 : 0;
	if (has & QP_IETH) {
		qp_put32(at, END_KEY);
		at += 4;
	}
	return (uint32_t)(at - begin);
}

/* A packet of which the checksum is right, and nothing else has to be. */
static void lie(struct world *world, int to, struct input *input)
{
	static uint8_t packet[QP_PACKET_MAX + 64];
	struct rc_qp *qp = &world->sides[to].qp;
	unsigned what = (unsigned)input_take(input, 1), size = (unsigned)input_take(input, 1);
	uint32_t opcode = what & 31, len = size & 192 ? size & 63 : qp->mtu - (size & 3) + (size >> 5 & 1), pad = -len & 3;

	memset(packet, (int)size, sizeof(packet));
	struct rc_qp as = {.remote_qp = qp->local_qp};
	qp_put_header(&as, packet, opcode, (what & 64 ? QP_ASKS : 0) | (what & 32 ? QP_SOLICITED : 0),
	              size & 128 && size & 16 ? size & 3 : pad, near(qp, input));
	uint32_t at = 12 + put_headers(packet + 12, qp_opcodes[opcode], len, input) + len + pad;
	if (what & 128)
		packet[input_take(input, 1) % 12] ^= (uint8_t)input_take(input, 1);
	bool right = !(size & 64 && what & 128);
	/* sealed as by the other end: its identification may be any */
	qp_seal(&world->sides[!to].qp, packet, at, port_of(!to), 0);
	if (!right) /* by one bit, which no other identification explains */
		packet[12] ^= 1;
	fly(world, to, packet, at + 4, 0, right);
	if (world->count)
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
	world->now += ns;
	if (!world->over[end])
		qp_pass(&world->sides[end].qp, world->now);
	look(world, end);
}

/* One was silent for too long. */
static bool gave_up(const struct world *world)
{
	return world->over[0] || world->over[1];
}

/* Nobody was lied to: by a wire that is good from now on everything comes. */
static void drain(struct world *world)
{
	struct side *one = world->sides, *other = world->sides + 1;

	for (uint32_t step = 0; !gave_up(world) && (one->done < one->asked || other->done < other->asked); step++) {
		CHECK(step < DRAIN_MAX, "it comes to no end: %u of %u, %u of %u", one->done, one->asked, other->done,
		      other->asked);
		for (int end = 0; end < 2; end++) {
			world->sides[end].receives = 3;
			send_all(world, end, 64);
		}
		for (int end = 0; end < 2 && !world->count; end++)
			pass(world, end, 67000000);
		while (world->count)
			arrive(world, 0);
	}
	if (gave_up(world))
		return;
	side_check_written(one);
	side_check_written(other);
}

static void move(struct world *world, struct input *input)
{
	unsigned what = (unsigned)input_take(input, 1);
	int end = what >> 7;

	switch (what & 15) {
	case 0:
	case 1: ask(world, end, input); break;
	case 2:
	case 3:
	case 4: send_all(world, end, 1 + (what >> 4 & 7) * 9); break;
	case 5: lie(world, end, input); break;
	case 6: say_bytes(world, end, input); break;
	case 7: pass(world, end, (int64_t)input_take(input, 1) << (what >> 4 & 7) * 4); break;
	case 12: world->sides[end].receives = what >> 4 & 3; break;
	default:
		if (!world->count)
			break;
		if ((what & 15) == 8)
			damage(world, input);
		else if ((what & 15) == 9)
			free(land(world, (uint32_t)input_take(input, 1) % world->count).bytes);
		else if ((what & 15) == 10) {
			struct datagram again = world->flying[input_take(input, 1) % world->count];
			uint32_t count = world->count;
			fly(world, again.to, again.bytes, again.len, again.segment, again.lie);
			if (world->count != count)
				world->flying[count].damaged = true; /* not once more: two bits may do */
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
			check_numbers(&world.sides[end].qp);
	}
	for (uint32_t at = 0; at < world.count; at++) /* nor is anybody lied to now */
		while (at < world.count && world.flying[at].lie)
			free(land(&world, at).bytes);
	if (!world.lied)
		drain(&world);
	while (world.count)
		free(land(&world, 0).bytes);
	for (int end = 0; end < 2; end++)
		side_close(world.sides + end);
	return 0;
}
