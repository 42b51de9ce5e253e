/*
 * fuzz_framing.c - libFuzzer target: both sides of a direction, with whatever lies between them.
 *
 * Input: 1 byte options (bit 0: checksums, bit 1: markers), then moves of 1 byte and what they need: a message is framed, some
 * of it is written, bytes of the input itself are put behind, a byte on its way is changed, some arrives, memory is taken
 * back or given back. Every byte of payload says where it belongs, so what arrives is checked by itself for as long as
 * nothing was changed on the way. Memory of a message is freed once it is written: what still refers to it is caught.
 */
#include "check.h"

#include <string.h>

#include "crc32c.h"
#include "framing.h"

#define MESSAGE_MAX 20000u
#define MESSAGES 16u
#define SPANS 4u
#define WIRE_MAX (1u << 19) /* bytes on their way */

/* A message whose memory is still referred to. */
struct message {
	uint8_t *memory[SPANS];
	uint64_t until;
};

struct world {
	struct framing_out out;
	struct framing_in in;
	struct message messages[MESSAGES];
	uint32_t count;        /* messages so far */
	uint8_t *wire;         /* what is written and has not arrived */
	size_t wire_len;
	bool changed;          /* not all of what arrives was framed by us */
	uint64_t arrived, payload_left; /* payload_left: framed and not yet found */
};

static void messages_free(struct world *world, uint64_t until)
{
	for (size_t n = 0; n < MESSAGES; n++) {
		struct message *message = &world->messages[n];

		if (message->until > until)
			continue;
		for (size_t i = 0; i < SPANS; i++)
			free(message->memory[i]);
		*message = (struct message){0};
	}
}

static void do_put(struct world *world, struct input *input, unsigned move)
{
	struct message *message = world->messages;

	while (message < world->messages + MESSAGES && message->memory[0])
		message++;
	if (message == world->messages + MESSAGES)
		return;
	uint32_t key = ++world->count;
	bool tagged = move & 8, last = move & 16, copy = move & 32;
	struct framing_message put = {.tagged = tagged, .rdmap = (uint8_t)input_take(input, 1)};
	uint64_t len = input_take(input, 2) % (MESSAGE_MAX + 1), position = 0;
	struct framing_span spans[SPANS];

	if (tagged)
		put.stag = key;
	else
		put.msn = key;
	for (size_t n = 0; n < SPANS; n++) {
		uint64_t some = n == SPANS - 1 ? len - position : input_take(input, 1) * (len - position) / 255;

		message->memory[n] = malloc(some ? some : 1);
		for (uint64_t i = 0; i < some; i++)
			message->memory[n][i] = stream_byte(key, position + i);
		spans[n] = (struct framing_span){message->memory[n], some, 0, false};
		position += some;
	}
	uint64_t begin = move & 64 ? input_take(input, 1) * len / 255 : 0, before = world->out.position;
	int result = framing_out_put(&world->out, &put, spans, SPANS, begin, len, last, copy);
	CHECK(result == 0 || result == -ENOBUFS);
	CHECK(result == 0 || world->out.position == before);
	for (size_t n = 0; n < SPANS && !result; n++) {
		CHECK(spans[n].until <= world->out.position);
		if (spans[n].until > message->until)
			message->until = spans[n].until;
	}
	if (!result)
		world->payload_left += len - begin;
	CHECK(!copy || !message->until);
	messages_free(world, world->out.written);
}

static void do_write(struct world *world, size_t wanted)
{
	struct iovec pieces[7];
	size_t bytes, count = framing_out_peek(&world->out, pieces, 7, &bytes), done = 0;

	CHECK(bytes <= framing_out_waiting(&world->out));
	CHECK((count == 0) == (framing_out_waiting(&world->out) == 0));
	if (wanted > WIRE_MAX - world->wire_len)
		wanted = WIRE_MAX - world->wire_len;
	for (size_t n = 0; n < count && done < wanted; n++) {
		size_t some = pieces[n].iov_len < wanted - done ? pieces[n].iov_len : wanted - done;

		memcpy(world->wire + world->wire_len + done, pieces[n].iov_base, some);
		done += some;
	}
	framing_out_advance(&world->out, done);
	world->wire_len += done;
	messages_free(world, world->out.written);
}

static void check_run(struct world *world, const struct framing_run *run)
{
	uint8_t *payload = malloc(run->len ? run->len : 1), header[FRAMING_HEADER_MAX];
	uint32_t half = run->len / 2, total = 0, key = run->tagged ? run->stag : run->msn;
	struct framing_span spans[2] = {{payload, half, 0, false}, {payload + half, run->len - half, 0, false}};

	CHECK(framing_in_place(&world->in, run, 0, spans, 2, 1, run->len) == -EINVAL);
	CHECK(framing_in_place(&world->in, run, 1, spans, 2, 0, run->len) == -EINVAL);
	CHECK(framing_in_place(&world->in, run, 0, spans, 2, 0, run->len) == 0);
	if (run->len) {
		uint8_t byte;
		struct framing_span one = {&byte, 1, 0, false};
		CHECK(framing_in_place(&world->in, run, half, &one, 1, 0, 1) == 0);
		CHECK(byte == payload[half]);
	}
	for (uint32_t n = 0; n < run->count; n++) {
		uint16_t ulpdu_len;
		size_t header_len = framing_in_header(&world->in, run, n, header, &ulpdu_len);

		CHECK(header_len == (run->tagged ? 14 : 18) && ulpdu_len >= header_len);
		CHECK((header[0] & ~0x40) == run->control && header[1] == run->rdmap);
		CHECK(((header[0] & 0x40) != 0) == (n == run->count - 1 && run->last));
		total += ulpdu_len - (uint32_t)header_len;
	}
	CHECK(total == run->len);
	if (!world->changed) {
		CHECK(run->control == (run->tagged ? 0x81 : 0x01) && key && key <= world->count);
		for (uint32_t i = 0; i < run->len; i++)
			CHECK(payload[i] == stream_byte(key, run->offset + i));
		CHECK(world->payload_left >= run->len);
		world->payload_left -= run->len;
	}
	free(payload);
}

static void do_read(struct world *world, size_t wanted)
{
	const struct framing_run *runs;
	uint8_t *at;
	size_t len;

	CHECK(framing_in_room(&world->in, &at, &len) == 0);
	CHECK(len > 0 && framing_in_runs(&world->in, &runs) == 0);
	len = len < wanted ? len : wanted;
	len = len < world->wire_len ? len : world->wire_len;
	memcpy(at, world->wire, len);
	memmove(world->wire, world->wire + len, world->wire_len - len);
	world->wire_len -= len;
	world->arrived += len;
	framing_in_commit(&world->in, len);
	CHECK(framing_in_parse(&world->in) == 0);
	CHECK(world->in.fault || world->in.position + framing_in_pending(&world->in) == world->arrived);
	CHECK(world->changed || !world->in.fault);
	CHECK(framing_in_pending(&world->in) < FRAMING_FPDU_MAX);
	for (size_t n = framing_in_runs(&world->in, &runs); n--; runs++)
		check_run(world, runs);
}

static void check_sums(const uint8_t *data, size_t len)
{
	uint8_t *copy = malloc(len ? len : 1);
	uint32_t state = crc32c_copy(CRC32C_START, copy, data, len);

	CHECK(!len || memcmp(copy, data, len) == 0);
	for (const struct crc32c_implementation *one = crc32c_implementations; one->name; one++)
		CHECK(one->update(CRC32C_START, data, len) == state, "by %s", one->name);
	free(copy);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static uint8_t wire[WIRE_MAX];
	struct input input = {data, size};
	unsigned options = (unsigned)input_take(&input, 1);
	struct world world = {.wire = wire};

	crc32c_init();
	check_sums(data, size);
	CHECK(framing_out_init(&world.out, FRAMING_MULPDU_MIN - 1, true, true) == -EINVAL);
	CHECK(framing_in_init(&world.in, true, true, FRAMING_FPDU_MAX - 1) == -EINVAL);
	CHECK(framing_out_init(&world.out, FRAMING_MULPDU_MIN, options & 1, options & 2) == 0);
	CHECK(framing_in_init(&world.in, options & 1, options & 2, FRAMING_FPDU_MAX + (options >> 2)) == 0);
	while (input.left) {
		unsigned move = (unsigned)input_take(&input, 1);

		switch (move & 7) {
		case 0:
		case 1: do_put(&world, &input, move); break;
		case 2: do_write(&world, move & 128 ? SIZE_MAX : (size_t)input_take(&input, 2)); break;
		case 3:
		case 4: do_read(&world, move & 128 ? SIZE_MAX : (size_t)input_take(&input, 2)); break;
		case 5:
			if (move & 128) { /* bytes of the input itself */
				size_t len = (size_t)input_take(&input, 1);

				len = len < input.left ? len : input.left;
				len = len < WIRE_MAX - world.wire_len ? len : WIRE_MAX - world.wire_len;
				memcpy(wire + world.wire_len, input.at, len);
				input_take(&input, len);
				world.wire_len += len;
				world.changed |= len > 0;
			} else if (world.wire_len) {
				uint8_t change = (uint8_t)input_take(&input, 1);

				wire[input_take(&input, 2) % world.wire_len] ^= change;
				world.changed |= change != 0;
			}
			break;
		case 6:
			world.out.mulpdu = FRAMING_MULPDU_MIN + (uint32_t)input_take(&input, 2) % (FRAMING_MULPDU_MAX - 127);
			break;
		default:
			if (move & 8) {
				CHECK(framing_out_own(&world.out) == 0);
				messages_free(&world, UINT64_MAX);
			}
			if (move & 16) {
				framing_out_clear(&world.out);
				world.payload_left = UINT64_MAX / 2; /* unknown from here on */
				CHECK(world.out.partial == (framing_out_waiting(&world.out) > 0));
			}
		}
	}
	do { /* all that waits arrives */
		do_write(&world, SIZE_MAX);
		do_read(&world, SIZE_MAX);
	} while (framing_out_waiting(&world.out) || world.wire_len);
	CHECK(world.changed || (!framing_in_pending(&world.in) && world.in.position == world.out.position));
	CHECK(world.changed || world.payload_left == 0 || world.payload_left > UINT64_MAX / 4);
	messages_free(&world, UINT64_MAX);
	framing_out_free(&world.out);
	framing_in_free(&world.in);
	return 0;
}
