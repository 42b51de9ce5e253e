/*
 * fuzz_engine.c - libFuzzer target: an engine with two connections, whose applications and peers do what they like.
 *
 * Input: how long the slab is that both send from, for each connection its options, then moves of 1 byte and what they need.
 * Bit 7 of a move says which connection. A connection goes over TCP, or over a device of the kernel (line_device.c), which does
 * what it likes as well.
 * As long as both sides of a connection are honest every byte and every number is judged (engine_line.c); what a side that
 * is not gets is still judged by itself. A connection is given back for no reason but those that its sides, or its device, have
 * given.
 */
#include "line_device.h"

#include <endian.h>
#include <limits.h>
#include <sys/socket.h>
#include <unistd.h>

#define LINES 2
#define SEND 0x43u
#define SMALL 1072u /* bytes of a private buffer, below which Python sends */

static uint64_t edge(struct input *input)
{
	static const uint64_t edges[] = {
		0,     1,        2,          15,         16,         17,         4096,       16384,
		65536, 1u << 31, UINT32_MAX, 1ull << 32, 1ull << 56, 1ull << 63, UINT64_MAX, UINT64_MAX - 15};
	unsigned which = (unsigned)input_take(input, 1);

	return which & 1 ? edges[which >> 1 & 15] : input_take(input, which & 2 ? 2 : 8);
}

static struct device_options device_of(struct input *input, struct verbs_slab *slab)
{
	static const uint32_t inlines[] = {0, 60, VERBS_INLINE_MAX, VERBS_INLINE_MAX}, gathers[] = {1, 2, 4, 8},
						  polls[] = {1, 3, 16, 16};
	unsigned options = (unsigned)input_take(input, 1);

	return (struct device_options){.slab = slab,
	                               .inline_max = inlines[options & 3],
	                               .gather_max = gathers[options >> 2 & 3],
	                               .poll_max = polls[options >> 4 & 3],
	                               .hot_bytes = options & 64 ? 20000 : 0,
	                               .pins = options & 128,
	                               .haste = (unsigned)input_take(input, 1) & 15};
}

static void open_one(struct line *line, struct engine *engine, struct input *input, uint32_t number,
                     struct hint_ring *hints, struct verbs_slab *slab)
{
	static const uint32_t sizes[] = {37, 48, 64, 300, 4112, 1100, 61440, 61440},
						  bufs[] = {2, 3, 4, 5, 16, 16, 64, 65535};
	unsigned options = (unsigned)input_take(input, 1), more = (unsigned)input_take(input, 1);
	bool by_device = options & 128;
	const struct device_options device = by_device ? device_of(input, slab) : (struct device_options){0};
	uint32_t posted = bufs[(more >> 3 & 7) | 1];
	const struct line_options how = {
		.ring = options & 1 ? 4096
	            : by_device ? 65536
	                        : 32768,
		.number = number,
		.remote_size = sizes[options >> 1 & 7],
		.local_size = sizes[(options >> 4 & 7) | 2],
		.bufs = bufs[more & 7],
		.posted = by_device && posted > DEVICE_RECEIVES ? DEVICE_RECEIVES : posted,
		.grows = more & 64,
		.window = more & 128 ? 4096 : 0,
		.device = by_device ? &device : NULL,
	};

	line_open(line, engine, number, &how);
	line->hints = hints;
	if (!line_lend(line))
		abort();
}

/* A message of which some field is not as it should be, or all are. */
static void say_odd(struct line *line, struct input *input)
{
	struct line_peer *peer = &line->peer;
	uint8_t message[600];
	unsigned what = (unsigned)input_take(input, 1);
	uint32_t len = 16 + (uint32_t)input_take(input, 2) % 500, at = 16;
	struct sdp_bsdh bsdh = {.mid = SDP_DATA,
	                        .bufs = htobe16((uint16_t)peer->bufs),
	                        .mseq = htobe32(peer->mseq + 1),
	                        .mseq_ack = htobe32(peer->seen)};

	memset(message, 0, sizeof(message));
	while (what & 1 && at + 16 <= len) { /* words of any number and count */
		unsigned near = (unsigned)input_take(input, 1); /* just beside what it may be, or anything */
		uint64_t count = htobe64(near < 128 ? edge(input) : (near & 64 ? peer->got : peer->read) + (near & 3) - 1);
		message[at] = input_take(input, 1) & 3 ? LINK_DATA + (at >> 4 & 1) : (uint8_t)input_take(input, 1);
		memcpy(message + at + 8, &count, sizeof(count));
		at += 16 + ((unsigned)input_take(input, 1) & 31);
	}
	bsdh.len = htobe32(len);
	if (what & 2)
		bsdh.mseq = htobe32(peer->mseq + 1 + (uint32_t)edge(input));
	if (what & 4)
		bsdh.mseq_ack = htobe32(peer->seen + (uint32_t)edge(input));
	if (what & 8)
		bsdh.len = htobe32(len + (uint32_t)edge(input));
	if (what & 16)
		bsdh.bufs = htobe16((uint16_t)edge(input));
	if (what & 32)
		bsdh.mid = (uint8_t)input_take(input, 1);
	if (what & 64)
		bsdh.flags = (uint8_t)input_take(input, 1);
	memcpy(message, &bsdh, sizeof(bsdh));
	if (what & 128)
		len = (uint32_t)input_take(input, 1) % 17;
	line_peer_say_any(line, message, len);
	peer->changed = true;
}

/* A segment that is framed as it should be, and of which the header says anything. */
static void say_segment(struct line *line, struct input *input)
{
	struct line_peer *peer = &line->peer;
	uint8_t bytes[256] = {0};
	unsigned what = (unsigned)input_take(input, 1);
	struct framing_message message = {.tagged = !(what & 7),
	                                  .rdmap = what & 8 ? (uint8_t)input_take(input, 1) : SEND,
	                                  .queue = what & 16 ? (uint32_t)edge(input) : 0,
	                                  .msn = peer->msn + (what & 32 ? (uint32_t)edge(input) : 0)};
	struct framing_span span = {bytes, sizeof(bytes), 0, true};
	uint64_t begin = what & 64 ? input_take(input, 1) : 0, end = begin + input_take(input, 1) % (257 - begin);

	if (framing_out_waiting(&peer->out) < LINE_OUT_MAX)
		CHECK(framing_out_put(&peer->out, &message, &span, 1, begin, end, what & 128, true) == 0);
	peer->changed = true;
}

static void do_odd(struct line *line, struct input *input, unsigned what)
{
	struct line_peer *peer = &line->peer;
	uint8_t bytes[255];

	switch (what) {
	case 0:
	case 1: say_odd(line, input); break;
	case 2: say_segment(line, input); break;
	case 3: { /* bytes of the input itself */
		size_t len = (size_t)input_take(input, 1);
		for (size_t i = 0; i < len; i++)
			bytes[i] = (uint8_t)input_take(input, 1);
		line_peer_say_bytes(line, bytes, len);
		break;
	}
	case 4:
	case 5: { /* any word of the segment */
		size_t word = (size_t)input_take(input, 1) % header_words_len;
		header_poke(line->app.channel.seg, &header_words[word], edge(input));
		line->hostile = true;
		break;
	}
	case 6:
		if (!framing_out_waiting(&peer->out) && peer->fd >= 0) {
			shutdown(peer->fd, SHUT_WR);
			peer->ended = true;
		}
		break;
	default:
		if (input_take(input, 1) & 1) {
			line->peer.bufs = (uint32_t)input_take(input, 2);
		} else if (peer->fd >= 0) {
			close(peer->fd);
			peer->fd = -1;
			peer->ended = peer->changed = true;
		}
	}
}

/* ---- the device ---- */
/* A completion that says what is not so: the next one, or one that nothing has brought about. */
static void lie(struct line *line, struct input *input)
{
	struct line_device *device = line->device;
	struct device_lie lie = {0};
	unsigned what = (unsigned)input_take(input, 1), which = (unsigned)input_take(input, 1);

	if (what & 3) { /* of a buffer, or of a request: near those that are posted */
		lie.wr_id = which & 1 ? (which >> 1) % line->posted << 1 | 1 : (device->posted - (which >> 1 & 63)) << 1;
		lie.opcode = which & 1 ? VERBS_WC_RECV : VERBS_WC_SEND;
	}
	if (what & 4)
		lie.status = (int)input_take(input, 1) & 31;
	if (what & 8)
		lie.opcode = (int)edge(input);
	if (what & 16)
		lie.flags = (unsigned)input_take(input, 1);
	if (what & 32)
		lie.byte_len = (uint32_t)edge(input);
	device->lied = line->peer.changed = true;
	if (what & 2)
		device_make_up(line, &lie);
	else
		device->lie = lie;
}

static void fail_next(struct line_device *device, struct input *input)
{
	static const int errors[] = {ENOMEM, EINVAL, -EINVAL, EIO}, counts[] = {-1, -EIO, VERBS_BATCH + 1, INT_MAX};
	unsigned what = (unsigned)input_take(input, 1), call = what & 3;

	device->fails[call].error = call == DEVICE_POLL ? counts[what >> 2 & 3] : errors[what >> 2 & 3];
	device->fails[call].after = what >> 4;
}

/* The pages of the application's ring are given back, or are said to be. */
static void turn_pages(struct line *line, struct input *input)
{
	struct channel_end *end = &line->app.channel;
	unsigned what = (unsigned)input_take(input, 1);

	if (what & 1) {
		atomic_store(&end->tx_line->pages, (uint32_t)edge(input));
	} else if (what & 2) {
		if (line->loan)
			line_take(line);
		device_unpin(line);
	} else if (!channel_tx_unread(end)) {
		channel_trim(end);
	}
}

static void do_device(struct line *line, struct input *input, unsigned what)
{
	struct line_device *device = line->device;

	switch (what) {
	case 0: device_carry(line, 1 + input_take(input, 1) % VERBS_SENDS); break;
	case 1: device_complete(line, 1 + input_take(input, 1) % VERBS_SENDS); break;
	case 2: device_receive(line); break;
	case 3: device_catch_up(line); break;
	case 4: fail_next(device, input); break;
	case 5: lie(line, input); break;
	case 6:
		if (input_take(input, 1) & 1)
			device->mute = 1;
		else
			device_tell(line);
		break;
	default: turn_pages(line, input);
	}
}

static void hints_odd(struct hint_ring *hints, struct input *input)
{
	uint64_t tail = atomic_load(&hints->tail) + (input_take(input, 1) & 1 ? 1 : edge(input));

	atomic_store(&hints->entry[input_take(input, 2) % HINTS], edge(input));
	atomic_store(&hints->tail, tail);
}

static void do_receive(struct line *line, size_t len)
{
	int64_t there = channel_rx_avail(&line->app.channel);

	if (line->hostile || there <= 0)
		return;
	if (!line->peer.changed) {
		line_app_receive(line, len);
		return;
	}
	len = (size_t)there < len ? (size_t)there : len; /* its bytes may be any */
	channel_rx_consume(&line->app.channel, len);
	line->app_got += len;
	line_app_hint(line);
}

/* It goes to sleep, and is woken at once. */
static void nap(struct engine *engine)
{
	engine_doorbell(engine, NULL, -1);
	engine_step(engine, 1);
}

static void do_move(struct line *line, struct input *input, unsigned move)
{
	switch (move & 15) {
	case 0:
	case 1: line_app_send(line, line->hostile ? 0 : (size_t)input_take(input, 2)); break;
	case 2: do_receive(line, (size_t)input_take(input, 2)); break;
	case 3:
	case 4:
	case 5: {
		uint32_t data = (uint32_t)input_take(input, 2);
		line_peer_say(line, data, 1 + (move >> 4 & 3), input_take(input, 2));
		break;
	}
	case 6: line_peer_write(line, (size_t)input_take(input, 2)); break;
	case 7: line_peer_write(line, SIZE_MAX); break;
	case 8: line_peer_read(line, move & 16 ? SIZE_MAX : (size_t)input_take(input, 2)); break;
	case 9:
		if (line->device)
			do_device(line, input, move >> 4 & 7);
		else
			line->peer.out.mulpdu =
				FRAMING_MULPDU_MIN + (uint32_t)input_take(input, 2) % (FRAMING_MULPDU_MAX - FRAMING_MULPDU_MIN);
		break;
	case 10:
		if (line->loan)
			line_take(line);
		break;
	case 11: do_odd(line, input, move >> 4 & 7); break;
	case 14:
		if (move & 64) {
			nap(line->engine);
			break;
		}
		/* fall through */
	default: engine_step(line->engine, 0);
	}
}

/* Whether it has said so. */
static bool device_breaks(const struct line_device *device, int error)
{
	return (device->failed && error == device->failed) || (device->failing && error == ECONNABORTED);
}

/* Whether it has ended, for a reason that somebody has given. */
static bool is_over(const struct line *line)
{
	const struct line_peer *peer = &line->peer;

	switch (line->reason) {
	case ENGINE_MESSAGE: CHECK(peer->changed || line->hostile); return true;
	case ENGINE_ENDED: CHECK(peer->ended && !line->device); return true;
	case ENGINE_COUNTS: CHECK(line->hostile); return true;
	case ENGINE_BROKEN:
		CHECK(!line->device || device_breaks(line->device, line->error), "by %d", line->error);
		return true;
	case ENGINE_HOT:
		CHECK(line->device && line->device->options.hot_bytes && line->device->qp.copied >= 20000);
		return false;
	case ENGINE_WORDS: CHECK(line->hostile); return false;
	case ENGINE_SMALL: CHECK(line->record.grows); return false;
	case ENGINE_CREDIT: CHECK(line->record.credit < 3); return false;
	default: CHECK(line->reason == ENGINE_ASKED, "reason %d", line->reason); return false;
	}
}

/* It goes on if it can, once it has been given back. False: it has ended. */
static bool go_on(struct line *line)
{
	if (line->loan)
		return true;
	if (line->peer.fd < 0 || line->record.remote_size < SMALL || is_over(line))
		return false;
	line->record.grows &= line->reason != ENGINE_SMALL;
	line_check_told(line);
	return line_lend(line) || !is_over(line);
}

/* Whether it has ended; then its queue pair is destroyed, so that others can go on. */
static bool ended(struct line *line, bool waits_for_credit)
{
	if ((waits_for_credit || line->reason != ENGINE_CREDIT) && go_on(line))
		return false;
	if (line->device)
		device_close(line);
	return true;
}

/* Whether one waits for slots, which it looks for anew after a while. */
static bool waits(const struct line *lines)
{
	bool any = false;

	for (int i = 0; i < LINES; i++)
		any |= lines[i].device && lines[i].device->qp.wants;
	return any;
}

/* Whatever can still go does: then nothing is left. */
static void settle(struct engine *engine, struct line *lines, bool *live)
{
	for (int quiet = 0, turns = 0; quiet < 3; turns++) {
		CHECK(turns < 10000, "it never comes to rest");
		quiet = engine_step(engine, waits(lines) ? 2 : 0) ? 0 : quiet + 1;
		if (quiet)
			nap(engine);
		lines_returned(engine);
		for (int i = 0; i < LINES; i++) {
			if (lines[i].device)
				device_catch_up(&lines[i]);
			line_peer_read(&lines[i], SIZE_MAX);
			line_peer_write(&lines[i], SIZE_MAX);
			live[i] = live[i] && !ended(&lines[i], false);
		}
		devices_check(lines, LINES);
	}
	for (int i = 0; i < LINES; i++)
		line_check_quiet(&lines[i]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static struct line lines[LINES];
	static struct hint_ring hints;
	uint64_t seen = 0;
	struct input input = {data, size};
	struct engine *engine = engine_new();
	struct verbs_slab slab;
	size_t slab_len = (VERBS_SLOTS + (input_take(&input, 1) & 7)) * VERBS_SLOT;
	uint8_t *memory = malloc(slab_len);
	bool live[LINES] = {true, true}, lied = false;
	uint32_t numbers[16];
	bool all;

	CHECK(engine && memory && verbs_slab_init(&slab, memory, slab_len, DEVICE_SLAB_LKEY) == 0);
	memset(&hints, 0, sizeof(hints));
	CHECK(engine_feed_add(engine, &hints, &seen) == 0);
	for (uint32_t i = 0; i < LINES; i++)
		open_one(&lines[i], engine, &input, 1 + i * 4096, i ? NULL : &hints,
		         &slab); /* both in one place of the table */
	lines[1].hints = &hints;
	while (input.left) {
		unsigned move = (unsigned)input_take(&input, 1);
		struct line *line = &lines[move >> 7];

		if ((move & 15) == 15) {
			if ((move & 0x70) == 0x70) {
				hints_odd(&hints, &input);
				lied = true;
			}
			engine_news(engine, numbers, move >> 4 & 7, &all);
		} else if (live[move >> 7]) {
			do_move(line, &input, move);
		}
		lines_returned(engine);
		for (int i = 0; i < LINES; i++) {
			live[i] = live[i] && !ended(&lines[i], true);
			if (live[i])
				line_check(&lines[i]);
		}
		devices_check(lines, LINES);
	}
	if (lied) /* whatever was said may have been lost among odd ones: more than there is room for is a look at all */
		atomic_store(&hints.tail, seen + 2 * HINTS);
	settle(engine, lines, live);
	for (int i = 0; i < LINES; i++)
		line_close(&lines[i]);
	CHECK(verbs_slab_room(&slab) == slab.slots_len && !slab.first_waiting, "slots are lost");
	verbs_slab_free(&slab);
	free(memory);
	engine_feed_remove(engine, &hints);
	engine_free(engine);
	return 0;
}
