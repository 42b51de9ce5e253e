/* rc_ends.c - see rc_ends.h. */
#include "rc_ends.h"

static struct side *side_of(struct rc_qp *qp)
{
	return (struct side *)qp->owner;
}

static bool may_use(struct rc_qp *qp, struct qp_flight *flight)
{
	(void)flight;
	return !side_of(qp)->refuses_memory;
}

static uint8_t *grant(struct rc_qp *qp, uint32_t key, uint64_t va, uint32_t length, enum qp_right right)
{
	(void)right;
	CHECK(length);
	if (key != END_KEY || va < END_VA || va - END_VA > END_REGION || length > END_REGION - (va - END_VA))
		return NULL;
	return side_of(qp)->region + (va - END_VA);
}

static bool take_receive(struct rc_qp *qp)
{
	struct side *side = side_of(qp);

	if (!side->receives)
		return false;
	side->receives--;
	qp->receive.pieces[0] = (struct iovec){side->room, END_MOST / 3};
	qp->receive.pieces[1] = (struct iovec){side->room + END_MOST / 3, END_MOST - END_MOST / 3};
	qp->receive.pieces_len = 2;
	qp->receive.length = END_MOST;
	qp->receive.bad = false;
	return true;
}

static bool may_receive(struct rc_qp *qp)
{
	return !side_of(qp)->refuses_memory;
}

static bool may_void(struct rc_qp *qp, uint32_t key)
{
	(void)qp;
	return key == END_KEY;
}

static void void_key(struct rc_qp *qp, uint32_t key)
{
	CHECK(key == END_KEY && qp->owner);
}

static void deliver(struct rc_qp *qp, uint32_t length, bool solicited, const uint32_t *voided, const uint8_t *immediate)
{
	struct side *side = side_of(qp);
	uint64_t seed = (uint64_t)!side->end << 32 | side->heard;

	CHECK(length <= END_MOST || immediate);
	if (side->judged) {
		CHECK(side->heard < side->other->sends && length == side->other->lens[side->heard] && !immediate, "%u bytes",
		      length);
		CHECK(solicited == (length % 2 == 1) && (voided != NULL) == side->other->voids[side->heard]);
		for (uint32_t i = 0; i < length; i++)
			CHECK(side->room[i] == stream_byte(seed, i), "byte %u of message %u", i, side->heard);
	}
	side->heard++;
}

static const struct qp_host host = {
	.may_use = may_use,
	.grant = grant,
	.take_receive = take_receive,
	.may_receive = may_receive,
	.may_void = may_void,
	.void_key = void_key,
	.deliver = deliver,
};

static uint8_t constant_byte(int end, uint32_t at)
{
	return stream_byte(77 + (uint64_t)end, at);
}

void side_open(struct side *side, int end, uint32_t mtu, uint32_t window, bool ipv6)
{
	struct rc_qp *qp = &side->qp;
	uint32_t first = end ? 0xFFFFF0 : 5, other = end ? 5 : 0xFFFFF0; /* one goes around its circle */

	*side = (struct side){.end = end, .judged = true};
	side->region = calloc(1, END_REGION);
	side->room = malloc(END_MOST);
	CHECK(side->region && side->room);
	for (uint32_t i = 0; i < END_READ; i++)
		side->region[END_COUNTER + i] = constant_byte(end, i);
	memset(qp->local, 1 + end, sizeof(qp->local));
	memset(qp->remote, 2 - end, sizeof(qp->remote));
	qp->host = &host;
	qp->owner = side;
	qp->ipv6 = ipv6;
	qp->local_qp = 17u + (uint32_t)end;
	qp->remote_qp = 18u - (uint32_t)end;
	qp->mtu = mtu;
	qp->window = window;
	qp->retry_count = 7;
	qp->rnr_retry = 7;
	qp->rnr_timer_code = 1;
	qp->timeout_ns = 67000000;
	qp->depth = qp->resources = 3;
	qp->remote_access = END_ALL;
	qp_begin(qp, first, other);
}

void side_done(struct side *side)
{
	while (side->qp.done) {
		struct asked *asked = (struct asked *)(void *)side->qp.done;
		uint32_t len = asked->flight.length;
		side->qp.done = asked->flight.next;
		if (side->judged && side->other->judged && asked->flight.op == QP_READ)
			for (uint32_t i = 0; i < len; i++)
				CHECK(asked->bytes[i] == constant_byte(!side->end, asked->at + i), "byte %u of %u read", i, len);
		if (side->judged && side->other->judged && asked->flight.op == QP_ADD) {
			uint64_t found;
			memcpy(&found, asked->bytes, sizeof(found));
			CHECK(found == asked->number, "%llu", (unsigned long long)found);
		}
		side->done++;
		free(asked);
	}
}

void side_close(struct side *side)
{
	side->judged = false;
	qp_stop(&side->qp);
	side_done(side);
	free(side->region);
	free(side->room);
}

void side_ask(struct side *side, enum qp_op op, uint32_t len, uint32_t at, bool voids)
{
	uint64_t seed = (uint64_t)side->end << 32 | (op == QP_SEND ? side->sends : side->asked + 1000u);
	uint32_t size = op == QP_ADD ? 8 : len, cut = size / 3;
	struct asked *asked = malloc(sizeof(*asked) + size);

	CHECK(asked && side->sends < END_ASKED_MAX);
	asked->pieces[0] = (struct iovec){asked->bytes, cut};
	asked->pieces[1] = (struct iovec){asked->bytes + cut, size - cut};
	asked->flight =
		(struct qp_flight){.op = op, .rkey = END_KEY, .length = size, .pieces = asked->pieces, .pieces_len = 2};
	asked->flight.turn = side->qp.turn - 1;
	for (uint32_t i = 0; i < size; i++)
		asked->bytes[i] = stream_byte(seed, i);
	if (op == QP_SEND) {
		side->voids[side->sends] = voids;
		side->lens[side->sends++] = len;
		asked->flight.solicited = len % 2 == 1;
		asked->flight.invalidates = voids;
	} else if (op == QP_WRITE) {
		asked->flight.va = END_VA + END_COUNTER + END_READ + at;
		memcpy(side->model + at, asked->bytes, len);
	} else if (op == QP_READ) {
		asked->at = at;
		asked->flight.va = END_VA + END_COUNTER + at;
	} else {
		asked->flight.va = END_VA;
		asked->flight.operand = 1;
		asked->number = side->counted++;
	}
	side->asked++;
	qp_post(&side->qp, &asked->flight);
}

void side_check_written(const struct side *side)
{
	uint64_t counted;

	CHECK(!memcmp(side->region + END_COUNTER + END_READ, side->other->model, END_WRITTEN));
	for (uint32_t i = 0; i < END_READ; i++)
		CHECK(side->region[END_COUNTER + i] == constant_byte(side->end, i), "byte %u", i);
	memcpy(&counted, side->region, sizeof(counted));
	CHECK(counted == side->other->counted);
}
