/* check.c - see check.h. */
#include "check.h"

#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define GUARD 4096u

_Noreturn void check_failed(const char *file, int line, const char *condition, const char *format, ...)
{
	va_list args;

	fprintf(stderr, "%s:%d: not true: %s;", file, line, condition);
	va_start(args, format);
	vfprintf(stderr, format, args);
	va_end(args);
	fputc('\n', stderr);
	abort();
}

uint64_t dice_roll(struct dice *dice)
{
	uint64_t value = dice->state += 0x9E3779B97F4A7C15ull;

	value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
	value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
	return value ^ (value >> 31);
}

uint64_t dice_below(struct dice *dice, uint64_t bound)
{
	return bound ? dice_roll(dice) % bound : 0;
}

/* ---- guarded mappings ---- */
bool mappings_unguarded;

void *__real_mmap(void *address, size_t len, int protection, int flags, int fd, off_t offset);
int __real_munmap(void *address, size_t len);
void *__wrap_mmap(void *address, size_t len, int protection, int flags, int fd, off_t offset);
int __wrap_munmap(void *address, size_t len);

void *__wrap_mmap(void *address, size_t len, int protection, int flags, int fd, off_t offset)
{
	if (mappings_unguarded)
		return __real_mmap(address, len, protection, flags, fd, offset);
	uint8_t *room = __real_mmap(NULL, len + 2 * GUARD, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (room == MAP_FAILED)
		return MAP_FAILED;
	void *inside = __real_mmap(room + GUARD, len, protection, flags | MAP_FIXED, fd, offset);
	if (inside == MAP_FAILED)
		__real_munmap(room, len + 2 * GUARD);
	return inside;
}

int __wrap_munmap(void *address, size_t len)
{
	return mappings_unguarded ? __real_munmap(address, len)
	                          : __real_munmap((uint8_t *)address - GUARD, len + 2 * GUARD);
}

/* ---- ends ---- */
struct channel_own own_of(struct own_words *words)
{
	return (struct channel_own){
		.tail = &words->tail,
		.head = &words->head,
		.head_seen = &words->head_seen,
		.ring_from = &words->ring_from,
		.ring_to = &words->ring_to,
		.spill_base = &words->spill_base,
		.limit = &words->limit,
		.room_max = &words->room_max,
	};
}

static void end_open(struct end *end, int fd, int side)
{
	memset(end, 0, sizeof(*end));
	struct channel_own own = own_of(&end->own);
	int failed = channel_map_as(&end->channel, fd, side, &own, side == 1); /* either way, against the other */
	CHECK(failed == 0, "side %d: %d", side, failed);
}

void ends_open(struct end ends[2], uint32_t size0, uint32_t size1, int *fd)
{
	int segment = channel_create(size0, size1);

	CHECK(segment >= 0, "%d", segment);
	end_open(&ends[0], segment, 0);
	end_open(&ends[1], segment, 1);
	if (fd)
		*fd = segment;
	else
		close(segment);
}

void ends_close(struct end ends[2])
{
	for (int side = 0; side < 2; side++) {
		channel_unmap(&ends[side].channel);
		CHECK(ends[side].channel.seg == NULL);
	}
}

void end_mirror(struct end *end, const struct end *of)
{
	const struct channel_end *other = &of->channel;
	int side = other->local == &other->seg->side[0] ? 1 : 0;

	memset(end, 0, sizeof(*end));
	end->channel = (struct channel_end){
		.seg = other->seg,
		.local = other->remote,
		.remote = other->local,
		.tx = other->rx,
		.rx = other->tx,
		.tx_line = &other->seg->producer[side],
		.tx_peer_line = &other->seg->consumer[side],
		.rx_line = &other->seg->consumer[1 - side],
		.rx_peer_line = &other->seg->producer[1 - side],
		.own = own_of(&end->own),
		.map_len = other->map_len,
	};
}

size_t end_send(struct end *end, uint64_t seed, uint64_t position, size_t len)
{
	uint8_t part[512];
	int64_t space = channel_tx_space(&end->channel, len);
	size_t done = 0;

	CHECK(space >= 0 && space <= end->channel.tx.spill_size, "space %lld", (long long)space);
	if (len > (size_t)space)
		len = (size_t)space;
	while (done < len) {
		size_t n = len - done < sizeof(part) ? len - done : sizeof(part);
		for (size_t i = 0; i < n; i++)
			part[i] = stream_byte(seed, position + done + i);
		channel_tx_put(&end->channel, done, part, n, n & 1);
		done += n;
	}
	if (len)
		channel_tx_publish(&end->channel, len);
	return len;
}

size_t end_receive(struct end *end, uint64_t seed, uint64_t position, size_t len)
{
	uint8_t part[512];
	int64_t there = channel_rx_avail(&end->channel);
	size_t done = 0;

	CHECK(there >= 0 && there <= end->channel.rx.spill_size, "there %lld", (long long)there);
	if (len > (size_t)there)
		len = (size_t)there;
	while (done < len) {
		size_t n = len - done < sizeof(part) ? len - done : sizeof(part);
		channel_rx_get(&end->channel, done, part, n);
		for (size_t i = 0; i < n; i++)
			CHECK(part[i] == stream_byte(seed, position + done + i), "byte %llu of stream %llu",
			      (unsigned long long)(position + done + i), (unsigned long long)seed);
		done += n;
	}
	if (len)
		channel_rx_consume(&end->channel, len);
	return len;
}

/* ---- header words ---- */
#define WORD(path) {#path, offsetof(struct channel_segment, path), sizeof(((struct channel_segment *)0)->path)}
#define SIDE(i) \
	WORD(side[i].attached), WORD(side[i].rx_ready), WORD(side[i].tx_switched), WORD(side[i].shut_wr), \
		WORD(side[i].notice), WORD(side[i].tx_back), WORD(side[i].tx_switch_offset), WORD(side[i].tx_back_at), \
		WORD(side[i].rx_frozen), WORD(side[i].tx_ended), WORD(side[i].fin_seen), WORD(side[i].tx_fin), \
		WORD(side[i].tx_fin_at), WORD(side[i].acked), WORD(side[i].tx_follows), WORD(side[i].hint)
#define RING(i) \
	WORD(producer[i].tail), WORD(producer[i].ring_from), WORD(producer[i].ring_to), WORD(producer[i].spill_base), \
		WORD(producer[i].want_space), WORD(producer[i].pages), WORD(producer[i].cpu), WORD(consumer[i].head), \
		WORD(consumer[i].cpu), WORD(consumer[i].room_max)

const struct header_word header_words[] = {
	WORD(magic), WORD(version), WORD(ring_size[0]), WORD(ring_size[1]), SIDE(0), SIDE(1), RING(0), RING(1),
};
const size_t header_words_len = sizeof(header_words) / sizeof(*header_words);

void header_poke(struct channel_segment *seg, const struct header_word *word, uint64_t value)
{
	uint8_t *at = (uint8_t *)seg + word->offset;

	if (word->size == 8) {
		atomic_store_explicit((_Atomic uint64_t *)(void *)at, value, memory_order_relaxed);
	} else {
		CHECK(word->size == 4);
		atomic_store_explicit((_Atomic uint32_t *)(void *)at, (uint32_t)value, memory_order_relaxed);
	}
}

int tests_run(const struct test *tests, size_t len, int argc, char **argv)
{
	for (size_t i = 0; i < len; i++) {
		if (argc < 2)
			puts(tests[i].name);
		else if (strcmp(argv[1], tests[i].name) == 0) {
			tests[i].run();
			return 0;
		}
	}
	if (argc < 2)
		return 0;
	fprintf(stderr, "%s: there is no test '%s'; without an argument the tests are listed\n", argv[0], argv[1]);
	return 2;
}
