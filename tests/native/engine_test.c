/*
 * engine_test.c - what the engine must survive, one test a run; usage: engine_test TEST. Without one they are listed.
 *
 * Those with threads are for a race detector as well: there an application has the engine's own mapping of its segment.
 */
#include "engine_line.h"
#include "engine_wire.h"

#include <endian.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MANY 1000u
#define WITHIN_S 60

static const struct line_options ordinary = {
	.ring = 4096, .number = 1, .remote_size = 4112, .local_size = 4112, .bufs = 16, .posted = 16, .tcp = true};

static int64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* An engine with one line that is lent, and hints by which the application names it. */
struct world {
	struct engine *engine;
	struct hint_ring hints;
	uint64_t seen;
	struct line line;
};

static struct world *world_open(const struct line_options *options)
{
	struct world *world = calloc(1, sizeof(*world));

	world->engine = engine_new();
	CHECK(world->engine);
	line_open(&world->line, world->engine, 7, options);
	world->line.hints = &world->hints;
	CHECK(engine_feed_add(world->engine, &world->hints, &world->seen) == 0);
	CHECK(line_lend(&world->line));
	return world;
}

static void world_close(struct world *world)
{
	line_close(&world->line);
	engine_feed_remove(world->engine, &world->hints);
	engine_free(world->engine);
	free(world);
}

/* What TCP carries comes when it comes. */
static void rest(struct world *world)
{
	for (int quiet = 0; quiet < 5;) {
		quiet = engine_step(world->engine, 1) ? 0 : quiet + 1;
		lines_returned(world->engine);
		line_peer_read(&world->line, SIZE_MAX);
		line_peer_write(&world->line, SIZE_MAX);
	}
}

/* ---- what is sent ---- */
static void small_buffers_are_left_to_python(void)
{
	for (uint32_t size = 37; size < 1100; size += size < 128 ? 1 : 97) {
		struct line_options options = ordinary;
		options.remote_size = size;
		struct world *world = world_open(&options);
		line_app_send(&world->line, 1000);
		rest(world);
		CHECK(world->line.loan || world->line.reason == ENGINE_SMALL);
		CHECK(world->line.loan || !world->line.peer.seen);
		world_close(world);
	}
}

static void large_buffers_take_more_than_a_call_frames(void)
{
	struct line_options options = ordinary;

	options.ring = options.remote_size = 1u << 20;
	struct world *world = world_open(&options);
	struct line *line = &world->line;
	for (uint64_t moved = 0; moved < 5u << 20; moved = line->peer.got) {
		line_app_send(line, 1u << 20);
		rest(world);
		CHECK(line->loan, "given back for %d", line->reason);
		line_check_quiet(line);
		CHECK(line_peer_say(line, 0, 1, UINT64_MAX));
		line_peer_write(line, SIZE_MAX);
		rest(world);
	}
	world_close(world);
}

static void a_count_that_goes_back_is_not_told(void)
{
	struct world *world = world_open(&ordinary);
	struct line *line = &world->line;

	for (int i = 0; i < 2; i++) {
		CHECK(line_peer_say(line, 2000, 1, 0));
		line_peer_write(line, SIZE_MAX);
		rest(world);
	}
	line_take(line);
	line->record.read_reported = 3000; /* as Python has told, by a look that keeps no count */
	CHECK(line_lend(line));
	line->peer.read_reported = 3000;
	line->hostile = true;
	atomic_store(&line->host.channel.tx_peer_line->head, 1500);
	rest(world);
	CHECK(line->peer.read_reported == 3000);
	world_close(world);
}

/* ---- what comes ---- */
static void an_end_behind_data_is_noticed(void)
{
	struct world *world = world_open(&ordinary);
	struct line *line = &world->line;

	rest(world);
	CHECK(line_peer_say(line, 100, 1, 0));
	line_peer_write(line, SIZE_MAX);
	shutdown(line->peer.fd, SHUT_WR);
	line->peer.ended = true;
	int64_t until = now_ns() + 2000000000;
	while (line->loan && now_ns() < until)
		rest(world);
	CHECK(!line->loan && line->reason == ENGINE_ENDED);
	CHECK(line_app_receive(line, 200) == 100);
	world_close(world);
}

static void more_segments_than_are_staged_are_left_to_python(void)
{
	struct world *world = world_open(&ordinary);
	struct line *line = &world->line;
	struct framing_message message = {.rdmap = 0x43, .msn = 1};
	struct framing_span span = {(uint8_t[1]){0}, 1, 0, true};

	line->peer.changed = true;
	for (int i = 0; i < 20000 && line->loan; i++) { /* of nothing, and never the last */
		CHECK(framing_out_put(&line->peer.out, &message, &span, 1, 0, 0, false, true) == 0);
		line_peer_write(line, SIZE_MAX);
		engine_step(world->engine, 0);
		lines_returned(world->engine);
	}
	CHECK(!line->loan && line->reason == ENGINE_MESSAGE, "reason %d", line->reason);
	world_close(world);
}

static void what_came_before_a_fault_is_found_again(void)
{
	struct world *world = world_open(&ordinary);
	struct line *line = &world->line;
	struct sdp_bsdh odd = {.mid = 2, .bufs = htobe16(16), .len = htobe32(16), .mseq = htobe32(1)};
	uint8_t garbage[] = {0, 18, 0x41, 0x43, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 1, 2, 3, 4};
	const struct framing_run *runs;

	rest(world);
	line_peer_say_any(line, (uint8_t *)&odd, sizeof(odd));
	line_peer_say_bytes(line, garbage, sizeof(garbage));
	rest(world);
	CHECK(!line->loan && line->reason == ENGINE_MESSAGE);
	CHECK(framing_in_parse(&line->in) == 0);
	CHECK(framing_in_runs(&line->in, &runs) == 1 && runs->len == 16 && runs->msn == 1, "it is lost");
	CHECK(line->in.fault == FRAMING_CRC);
	world_close(world);
}

/* ---- others ---- */
static void who_waits_for_credit_is_heard_beside_a_busy_one(void)
{
	struct world *world = world_open(&ordinary);
	struct line_options options = ordinary;
	struct line *line = &world->line, *starved = calloc(1, sizeof(*starved));
	struct hint_ring hints = {0};
	uint64_t seen = 0;

	options.number = 2;
	options.bufs = 3;
	line_open(starved, world->engine, 8, &options);
	starved->hints = &hints;
	CHECK(engine_feed_add(world->engine, &hints, &seen) == 0);
	CHECK(line_lend(starved));
	line_app_send(starved, 100);
	engine_step(world->engine, 0);
	line_app_send(starved, 100); /* there is a credit of 2 */
	int64_t until = now_ns() + 1000000000;
	while (starved->loan && now_ns() < until) {
		line_app_send(line, 10);
		engine_step(world->engine, 0);
		lines_returned(world->engine);
		line_peer_read(line, SIZE_MAX);
		CHECK(line_peer_say(line, 10, 1, 10));
		line_peer_write(line, SIZE_MAX);
		line_app_receive(line, 10);
	}
	CHECK(!starved->loan && starved->reason == ENGINE_CREDIT);
	line_peer_read(starved, SIZE_MAX);
	CHECK(starved->peer.got == 100);
	engine_feed_remove(world->engine, &hints);
	line_close(starved);
	free(starved);
	world_close(world);
}

static void who_waits_for_credit_keeps_nobody_busy(void)
{
	struct line_options options = ordinary;
	unsigned busy = 0;

	options.bufs = 3;
	struct world *world = world_open(&options);
	line_app_send(&world->line, 100);
	engine_step(world->engine, 0);
	line_app_send(&world->line, 100); /* there is a credit of 2 */
	for (int i = 0; i < 100; i++)
		busy += engine_step(world->engine, 0);
	CHECK(busy < 20, "%u of 100 turns", busy);
	int64_t began = now_ns();
	while (world->line.loan) {
		engine_step(world->engine, -1);
		lines_returned(world->engine);
	}
	CHECK(world->line.reason == ENGINE_CREDIT && now_ns() - began < 1000000000);
	world_close(world);
}

static void news_without_bound_is_a_look_at_all(void)
{
	struct world *world = world_open(&ordinary);
	uint32_t numbers[1024];
	bool all;

	for (uint32_t round = 0; round < 5; round++) {
		for (uint32_t i = 0; i < 500; i++) {
			uint64_t count = atomic_load(&world->hints.tail);
			atomic_store(&world->hints.entry[count % HINTS], count << 32 | (100 + i));
			atomic_store(&world->hints.tail, count + 1);
		}
		engine_step(world->engine, 0);
	}
	CHECK(engine_news(world->engine, numbers, 1024, &all) == 1024 && all);
	CHECK(numbers[0] == 100 && numbers[1023] == 123);
	CHECK(engine_news(world->engine, numbers, 1024, &all) == 0 && !all);
	line_app_send(&world->line, 10);
	rest(world);
	line_check_quiet(&world->line);
	CHECK(world->line.peer.got == 10);
	for (int i = 0; i < 600; i++)
		line_app_hint(&world->line); /* more than there is room for */
	engine_step(world->engine, 0);
	CHECK(engine_news(world->engine, numbers, 1024, &all) == 0 && all);
	world_close(world);
}

static void a_wire_that_blocks_goes_on(void)
{
	struct line_options options = ordinary;
	struct dice dice = {11};

	options.ring = 1u << 20;
	options.remote_size = options.local_size = 61440;
	options.bufs = options.posted = 64;
	struct world *world = world_open(&options);
	struct line *line = &world->line;
	int small = 32768; /* less than the window of one segment, and TCP waits for its timers */
	CHECK(setsockopt(line->fd, SOL_SOCKET, SO_SNDBUF, &small, sizeof(small)) == 0);
	CHECK(setsockopt(line->peer.fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof(small)) == 0);
	int64_t until = now_ns() + (int64_t)WITHIN_S * 1000000000;
	while (line->peer.got < 4u << 20 || line->app_got < 4u << 20) {
		CHECK(now_ns() < until, "it stands still: %llu, %llu; credit %u, %lld", (unsigned long long)line->peer.got,
		      (unsigned long long)line->app_got, line->record.credit, (long long)line_peer_credit(line));
		line_app_send(line, dice_below(&dice, 100000));
		line_app_receive(line, dice_below(&dice, 100000));
		engine_step(world->engine, 0);
		if (lines_returned(world->engine)) {
			CHECK(line->reason == ENGINE_CREDIT);
			line_flush(line);
		}
		line_peer_read(line, dice_below(&dice, 3) ? 3000 : SIZE_MAX);
		line_peer_say(line, (uint32_t)dice_below(&dice, 70000), 2, dice_below(&dice, 100000));
		line_peer_write(line, dice_below(&dice, 3) ? 3000 : SIZE_MAX);
		if (dice_below(&dice, 50) == 0) {
			line_take(line);
			line_flush(line);
		}
		if (!line->loan)
			line_lend(line);
		line_check(line);
	}
	rest(world);
	world_close(world);
}

/* Bytes and numbers are the same if some of the engine's allocations fail, but for who goes on. */
static void talk_without(uint64_t nth, uint64_t many)
{
	struct line_options options = ordinary;
	options.remote_size = options.local_size = 8192;
	options.tcp = false;
	struct world *world = world_open(&options);
	struct line *line = &world->line;
	struct dice dice = {5};

	memory_fails(nth, many);
	for (int i = 0; i < 60; i++) {
		line_app_send(line, dice_below(&dice, 20000));
		line_peer_say(line, (uint32_t)dice_below(&dice, 9000), 3, dice_below(&dice, 9000));
		line_peer_write(line, dice_below(&dice, 2) ? 700 : SIZE_MAX);
		memory_is_short(true);
		engine_step(world->engine, 0);
		if (dice_below(&dice, 4) == 0 && line->loan)
			line_take(line);
		memory_is_short(false);
		lines_returned(world->engine);
		if (!line->loan && line->reason == ENGINE_BROKEN) {
			CHECK(line->error == ENOMEM && !framing_out_waiting(&line->out));
			world_close(world);
			return;
		}
		if (!line->loan) {
			CHECK(line->reason == ENGINE_MEMORY || line->reason == ENGINE_ASKED, "%d", line->reason);
			line_check_told(line);
			line_lend(line); /* or a message has begun, which is awaited */
		}
		line_app_receive(line, dice_below(&dice, 9000));
		line_peer_read(line, SIZE_MAX);
		line_check(line);
	}
	line_app_hint(line);
	rest(world);
	CHECK(line->loan || line_lend(line));
	rest(world);
	line_check_quiet(line);
	line_take(line);
	memory_fails(1, 1);
	memory_is_short(true);
	CHECK(!line_lend(line) && line_lend(line));
	memory_is_short(false);
	world_close(world);
}

static void memory_that_runs_out_loses_nothing(void)
{
	for (uint64_t nth = 1; nth < 60; nth++)
		for (uint64_t many = 1; many < 4; many++)
			talk_without(nth, many);
	memory_fails(1, 100);
	memory_is_short(true);
	struct engine *none = engine_new();
	memory_is_short(false);
	CHECK(!none);
}

static void what_finds_no_memory_is_not_forgotten(void)
{
	for (uint64_t nth = 1; nth < 20; nth++) {
		struct world *world = world_open(&ordinary);
		struct line *line = &world->line;

		for (int i = 0; i < 9; i++)
			CHECK(line_peer_say(line, 10, 1, 0));
		line_peer_write(line, SIZE_MAX);
		memory_fails(nth, 1);
		memory_is_short(true);
		for (int i = 0; i < 5; i++)
			engine_step(world->engine, 1);
		memory_is_short(false);
		lines_returned(world->engine);
		CHECK(line->loan || line->reason == ENGINE_MEMORY);
		CHECK(line->loan || line_lend(line));
		rest(world);
		line_check_quiet(line);
		CHECK(line_app_receive(line, 100) == 90);
		world_close(world);
	}
}

static void memory_that_is_not_to_be_had_leaves_nothing_behind(void)
{
	struct line_options options = ordinary;
	int small = 4096;

	options.ring = 1u << 20;
	options.remote_size = 61440;
	options.bufs = 64;
	struct world *world = world_open(&options);
	struct line *line = &world->line;

	CHECK(setsockopt(line->fd, SOL_SOCKET, SO_SNDBUF, &small, sizeof(small)) == 0);
	CHECK(setsockopt(line->peer.fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof(small)) == 0);
	while (!framing_out_waiting(&line->out)) {
		CHECK(line_app_send(line, 1u << 16) > 0);
		engine_step(world->engine, 0);
	}
	memory_fails(1, 1);
	memory_is_short(true);
	line_take(line); /* what waits is still in the ring, which may go at any moment from now on */
	memory_is_short(false);
	CHECK(line->reason == ENGINE_BROKEN && line->error == ENOMEM);
	CHECK(framing_out_waiting(&line->out) == 0);
	world_close(world);
}

static void a_word_that_finds_no_memory_is_not_said(void)
{
	struct line_options options = ordinary;

	options.tcp = false;
	options.posted = 64; /* so that no update is due, which would make room for a word */
	struct world *world = world_open(&options);
	struct line *line = &world->line;
	CHECK(line_peer_say(line, 3000, 1, 0));
	line_peer_write(line, SIZE_MAX);
	rest(world);
	CHECK(line_app_receive(line, 3000) == 3000);
	memory_fails(1, 1000);
	memory_is_short(true);
	engine_step(world->engine, 0);
	memory_is_short(false);
	lines_returned(world->engine);
	CHECK(!line->loan && line->reason == ENGINE_MEMORY);
	line_check_told(line);
	CHECK(line_lend(line));
	rest(world);
	line_check_quiet(line);
	world_close(world);
}

/* ---- threads ---- */
struct crowd {
	struct engine *engine;
	struct line *lines;
	struct hint_ring *hints; /* of each */
	uint64_t *seen;
	pthread_mutex_t *locks; /* of each line's loan */
	uint32_t count;
	_Atomic bool stop;
	_Atomic uint64_t bell;
	_Atomic uint32_t done;
	uint64_t bytes;
};

static void crowd_open(struct crowd *crowd, uint32_t count, bool mirrored)
{
	struct line_options options = ordinary;

	*crowd = (struct crowd){.engine = engine_new(), .count = count};
	CHECK(crowd->engine);
	crowd->lines = calloc(count, sizeof(*crowd->lines));
	crowd->hints = calloc(count, sizeof(*crowd->hints));
	crowd->seen = calloc(count, sizeof(*crowd->seen));
	crowd->locks = calloc(count, sizeof(*crowd->locks));
	for (uint32_t i = 0; i < count; i++) {
		options.number = i + 1;
		options.mirrored = mirrored;
		options.tcp = i % 2;
		pthread_mutex_init(&crowd->locks[i], NULL);
		line_open(&crowd->lines[i], crowd->engine, i, &options);
		crowd->lines[i].hints = &crowd->hints[i];
		CHECK(engine_feed_add(crowd->engine, &crowd->hints[i], &crowd->seen[i]) == 0);
	}
}

static void crowd_close(struct crowd *crowd)
{
	for (uint32_t i = 0; i < crowd->count; i++) {
		line_close(&crowd->lines[i]);
		engine_feed_remove(crowd->engine, &crowd->hints[i]);
		pthread_mutex_destroy(&crowd->locks[i]);
	}
	engine_free(crowd->engine);
	free(crowd->lines);
	free(crowd->hints);
	free(crowd->seen);
	free(crowd->locks);
}

/* What Python does with all of them: takes what is given back, takes others as it likes, and lends again. */
static void *takes(void *argument)
{
	struct crowd *crowd = argument;
	struct dice dice = {21};
	uint32_t numbers[64];
	bool all;

	while (!atomic_load(&crowd->stop)) {
		struct line *line = engine_returned(crowd->engine);
		engine_clear_notify(crowd->engine);
		engine_news(crowd->engine, numbers, 64, &all);
		if (!line)
			line = &crowd->lines[dice_below(&dice, crowd->count)];
		pthread_mutex_lock(&crowd->locks[line->number - 1]);
		if (line->loan) {
			struct engine_record record;
			engine_look(crowd->engine, line->loan, &record);
			line_take(line);
		}
		line_flush(line);
		if (line->reason != ENGINE_ENDED && line->reason != ENGINE_BROKEN)
			line_lend(line);
		pthread_mutex_unlock(&crowd->locks[line->number - 1]);
		if (dice_below(&dice, 4))
			usleep(100); /* the others get at the locks, too */
	}
	return NULL;
}

/* An application and a peer of one line after the other. */
static void *talks(void *argument)
{
	struct crowd *crowd = argument;
	struct dice dice = {31};
	uint32_t done = 0;

	while (done < crowd->count) {
		done = 0;
		for (uint32_t i = 0; i < crowd->count; i++) {
			struct line *line = &crowd->lines[i];
			if (line->app_sent < crowd->bytes)
				line_app_send(line, dice_below(&dice, 6000));
			line_app_receive(line, dice_below(&dice, 6000));
			line_app_hint(line);
			pthread_mutex_lock(&crowd->locks[i]); /* line_flush() reads for the peer */
			line_peer_read(line, SIZE_MAX);
			if (line->peer.sent < crowd->bytes || line->peer.read < line->peer.got)
				line_peer_say(line, line->peer.sent < crowd->bytes ? (uint32_t)dice_below(&dice, 4000) : 0, 2, 6000);
			line_peer_write(line, dice_below(&dice, 2) ? 900 : SIZE_MAX);
			pthread_mutex_unlock(&crowd->locks[i]);
			done += line->peer.got >= crowd->bytes && line->app_got >= crowd->bytes;
		}
	}
	atomic_store(&crowd->stop, true);
	return NULL;
}

static void run_crowd(struct crowd *crowd, void *(*more)(void *))
{
	pthread_t threads[3];
	int64_t until = now_ns() + (int64_t)WITHIN_S * 1000000000;

	for (uint32_t i = 0; i < crowd->count; i++)
		CHECK(line_lend(&crowd->lines[i]));
	CHECK(engine_start(crowd->engine, NULL) == 0);
	CHECK(pthread_create(&threads[0], NULL, takes, crowd) == 0);
	CHECK(pthread_create(&threads[1], NULL, talks, crowd) == 0);
	if (more)
		CHECK(pthread_create(&threads[2], NULL, more, crowd) == 0);
	while (!atomic_load(&crowd->stop)) {
		CHECK(now_ns() < until, "it does not get through");
		usleep(1000); /* a look at whether it is over: the threads have the CPUs */
	}
	for (int i = 0; i < (more ? 3 : 2); i++)
		pthread_join(threads[i], NULL);
}

static void taken_back_at_any_moment(void)
{
	struct crowd crowd;

	crowd_open(&crowd, 8, true);
	crowd.bytes = 300000;
	run_crowd(&crowd, NULL);
	crowd_close(&crowd);
}

static void a_thousand_loans(void)
{
	struct rlimit limit = {16 * MANY, 16 * MANY};
	struct crowd crowd;

	CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0, "6 descriptors for each");
	crowd_open(&crowd, MANY, false);
	crowd.bytes = 10000;
	run_crowd(&crowd, NULL);
	crowd_close(&crowd);
}

/* Words that carry no bytes change all the while, and each of the numbers that only cost a look. */
static void *shouts(void *argument)
{
	struct crowd *crowd = argument;
	struct dice dice = {41};

	while (!atomic_load(&crowd->stop)) {
		struct line *line = &crowd->lines[dice_below(&dice, crowd->count)];
		struct channel_side *side = line->app.channel.local;
		switch (dice_below(&dice, 5)) {
		case 0: atomic_store(&side->notice, (uint32_t)dice_roll(&dice)); break;
		case 1: atomic_store(&side->rx_frozen, dice_roll(&dice)); break;
		case 2: atomic_store(&line->app.channel.tx_line->want_space, (uint32_t)dice_below(&dice, 3)); break;
		case 3: atomic_store(&line->doorbell_word, dice_roll(&dice)); break;
		default: atomic_store(&side->tx_back, (uint32_t)dice_roll(&dice));
		}
		usleep(50); /* some turns of the engine pass between two changes, and not only one */
	}
	return NULL;
}

static void words_change_all_the_while(void)
{
	struct crowd crowd;

	crowd_open(&crowd, 4, true);
	crowd.bytes = 50000;
	run_crowd(&crowd, shouts);
	crowd_close(&crowd);
}

/* Counts and hints change all the while, from a mapping of their own: whatever becomes of the bytes. */
static void *lies(void *argument)
{
	struct crowd *crowd = argument;
	struct dice dice = {51};
	int64_t until = now_ns() + 3000000000;

	while (now_ns() < until) {
		struct line *line = &crowd->lines[dice_below(&dice, crowd->count)];
		uint64_t value = dice_below(&dice, 2) ? dice_roll(&dice) : dice_below(&dice, 20000);
		const struct header_word *word = &header_words[dice_below(&dice, header_words_len)];
		if (dice_below(&dice, 4) == 0)
			header_poke(line->app.channel.seg, word, value);
		else if (dice_below(&dice, 2))
			atomic_fetch_add(&line->app.channel.tx_line->tail, dice_below(&dice, 3000));
		else
			atomic_fetch_add(&line->app.channel.rx_line->head, dice_below(&dice, 3000));
		atomic_store(&line->hints->entry[dice_below(&dice, HINTS)], dice_roll(&dice));
		atomic_fetch_add(&line->hints->tail, dice_below(&dice, 4));
		if (dice_below(&dice, 200) == 0)
			usleep(1000); /* the engine comes to rest now and then, which is a way of its own */
	}
	atomic_store(&crowd->stop, true);
	return NULL;
}

static void *hears(void *argument)
{
	struct crowd *crowd = argument;

	while (!atomic_load(&crowd->stop))
		for (uint32_t i = 0; i < crowd->count; i++) {
			struct line *line = &crowd->lines[i];
			pthread_mutex_lock(&crowd->locks[i]);
			line_peer_read(line, SIZE_MAX);
			line_peer_say(line, 3000, 2, 6000);
			line_peer_write(line, SIZE_MAX);
			if (!line->loan) /* as one that comes anew */
				line->record.held = 0;
			pthread_mutex_unlock(&crowd->locks[i]);
		}
	return NULL;
}

static void counts_change_all_the_while(void)
{
	struct crowd crowd;
	pthread_t threads[3];

	crowd_open(&crowd, 4, false);
	for (uint32_t i = 0; i < crowd.count; i++) {
		crowd.lines[i].hostile = true;
		CHECK(line_lend(&crowd.lines[i]));
	}
	CHECK(engine_start(crowd.engine, NULL) == 0);
	CHECK(pthread_create(&threads[0], NULL, takes, &crowd) == 0);
	CHECK(pthread_create(&threads[1], NULL, lies, &crowd) == 0);
	CHECK(pthread_create(&threads[2], NULL, hears, &crowd) == 0);
	for (int i = 0; i < 3; i++)
		pthread_join(threads[i], NULL);
	crowd_close(&crowd);
}

static void made_and_freed_at_any_moment(void)
{
	for (int round = 0; round < 200; round++) {
		struct crowd crowd;
		crowd_open(&crowd, 2, true);
		CHECK(engine_start(crowd.engine, NULL) == 0);
		for (uint32_t i = 0; i < 2; i++) {
			CHECK(line_lend(&crowd.lines[i]));
			line_app_send(&crowd.lines[i], 3000);
			line_peer_say(&crowd.lines[i], 1000, 1, 0);
			line_peer_write(&crowd.lines[i], SIZE_MAX);
		}
		if (round % 2)
			sched_yield();
		crowd_close(&crowd);
	}
}

/* A device that takes nothing, from one chain on. */
static int takes_nothing(void *qp, struct verbs_send_wr *wr, struct verbs_send_wr **bad)
{
	(void)qp;
	*bad = wr;
	return ENOMEM;
}

static void a_device_that_fails_is_told_nothing_more(void)
{
	for (uint32_t inline_max = 0; inline_max <= VERBS_INLINE_MAX; inline_max += VERBS_INLINE_MAX) {
		const struct engine_record record = {0};
		struct verbs_qp *qp = calloc(1, sizeof(*qp));
		uint8_t *memory = malloc(VERBS_SENDS * VERBS_SLOT), header[32] = {0};
		const struct iovec piece = {header, sizeof(header)};
		struct channel_end end = {0};
		struct verbs_slab slab;
		struct wire_verbs verbs;
		CHECK(qp && memory && verbs_slab_init(&slab, memory, VERBS_SENDS * VERBS_SLOT, 1) == 0);
		qp->slab = &slab;
		qp->inline_max = inline_max;
		qp->gather_max = 4;
		qp->calls.post_send = takes_nothing;
		CHECK(verbs_begin(qp, 0, 0, NULL, 0) == 0);
		wire_verbs_init(&verbs, qp, &end, &record);
		struct wire *wire = &verbs.wire;
		for (uint32_t n = 0; n < VERBS_CHAIN; n++)
			CHECK(wire->ops->put(wire, header, sizeof(header), &piece, 1) == 0);
		CHECK(qp->error == ENOMEM && !qp->chained);
		for (uint32_t n = 0; n < VERBS_SENDS; n++)
			CHECK(wire->ops->put(wire, header, sizeof(header), &piece, 1) == -ENGINE_BROKEN && wire->error == ENOMEM);
		CHECK(!qp->chained && wire->ops->give_back(wire) == -ENOMEM && verbs_slab_room(&slab) == VERBS_SENDS);
		verbs_release(qp);
		verbs_slab_free(&slab);
		free(memory);
		free(qp);
	}
}

static const struct test tests[] = {
#define TEST(name) {#name, name}
	TEST(small_buffers_are_left_to_python),
	TEST(large_buffers_take_more_than_a_call_frames),
	TEST(a_count_that_goes_back_is_not_told),
	TEST(an_end_behind_data_is_noticed),
	TEST(more_segments_than_are_staged_are_left_to_python),
	TEST(what_came_before_a_fault_is_found_again),
	TEST(who_waits_for_credit_is_heard_beside_a_busy_one),
	TEST(who_waits_for_credit_keeps_nobody_busy),
	TEST(news_without_bound_is_a_look_at_all),
	TEST(a_wire_that_blocks_goes_on),
	TEST(memory_that_runs_out_loses_nothing),
	TEST(what_finds_no_memory_is_not_forgotten),
	TEST(memory_that_is_not_to_be_had_leaves_nothing_behind),
	TEST(a_word_that_finds_no_memory_is_not_said),
	TEST(a_device_that_fails_is_told_nothing_more),
	TEST(taken_back_at_any_moment),
	TEST(a_thousand_loans),
	TEST(words_change_all_the_while),
	TEST(counts_change_all_the_while),
	TEST(made_and_freed_at_any_moment),
};

int main(int argc, char **argv)
{
	return tests_run(tests, sizeof(tests) / sizeof(*tests), argc, argv);
}
