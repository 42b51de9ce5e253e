/*
 * The limit of a stream that is copied twice: one thread copies messages of -s bytes into a ring, another copies them out,
 * both at once and without a system call. The bytes are those of the stream benchmark's source, and both ends of each piece
 * are compared. Started as `copies client -p 1`, as no server is needed.
 */
#include "bench.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum {
	RING = 1 << 20,         /* bytes */
	PIECE_MAX = 128 << 10,  /* copied before the other thread hears of it */
	PERIOD = 4093,          /* as in stream.c: prime, and in the first-level cache */
	READ_SIZE = 256 << 10,  /* buffer of the reader */
	SAMPLE = 32,
	LINE = 128,
	LOOKS = 4096,
};

struct ring {
	_Alignas(LINE) _Atomic uint64_t tail; /* bytes written */
	_Alignas(LINE) _Atomic uint64_t head; /* bytes read */
	_Alignas(LINE) _Atomic bool over;
	unsigned char bytes[RING];
};

struct reader {
	struct ring *ring;
	const unsigned char *pattern;
	pthread_t thread;
	uint64_t wrong;
};

static size_t least(size_t a, size_t b)
{
	return a < b ? a : b;
}

/* Where both threads have a CPU, the other is done long before this gives its own away. */
static void wait_a_moment(unsigned *looks)
{
	if (++*looks % LOOKS == 0)
		sched_yield();
#if defined(__x86_64__)
	__builtin_ia32_pause();
#endif
}

static bool as_sent(const unsigned char *pattern, uint64_t offset, const unsigned char *data, size_t size)
{
	size_t looked = least(size, SAMPLE);

	return !memcmp(data, pattern + offset % PERIOD, looked) &&
	       !memcmp(data + size - looked, pattern + (offset + size - looked) % PERIOD, looked);
}

static void *read_all(void *argument)
{
	struct reader *reader = argument;
	struct ring *ring = reader->ring;
	unsigned char *buffer = bench_alloc(1, READ_SIZE);
	uint64_t head = 0;
	unsigned looks = 0;

	for (;;) {
		uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_acquire);
		size_t at = (size_t)(head % RING), into = (size_t)(head % READ_SIZE);
		size_t size = least(least((size_t)(tail - head), PIECE_MAX), least(RING - at, READ_SIZE - into));

		if (!size) {
			if (atomic_load_explicit(&ring->over, memory_order_acquire) &&
			    head == atomic_load_explicit(&ring->tail, memory_order_acquire))
				break;
			wait_a_moment(&looks);
			continue;
		}
		memcpy(buffer + into, ring->bytes + at, size);
		reader->wrong += !as_sent(reader->pattern, head, buffer + into, size);
		head += size;
		atomic_store_explicit(&ring->head, head, memory_order_release);
	}
	free(buffer);
	return NULL;
}

/* Copies a message into the ring, a piece at a time; returns the new tail. */
static uint64_t write_message(struct ring *ring, uint64_t tail, const unsigned char *message, size_t size)
{
	unsigned looks = 0;

	while (size) {
		uint64_t used = tail - atomic_load_explicit(&ring->head, memory_order_acquire);
		size_t at = (size_t)(tail % RING);
		size_t piece = least(least(size, PIECE_MAX), least(RING - at, RING - (size_t)used));

		if (!piece) {
			wait_a_moment(&looks);
			continue;
		}
		memcpy(ring->bytes + at, message, piece);
		message += piece;
		size -= piece;
		tail += piece;
		atomic_store_explicit(&ring->tail, tail, memory_order_release);
	}
	return tail;
}

int main(int argc, char **argv)
{
	struct bench_options options = bench_options(
		argc, argv, (struct bench_options){.size = 64 << 10, .connections = 1, .warmup_s = 0.3, .measure_s = 1});
	unsigned char *pattern = bench_alloc(PERIOD + (options.size > READ_SIZE ? options.size : READ_SIZE), 1);
	struct ring *ring = aligned_alloc(LINE, (sizeof(*ring) + LINE - 1) / LINE * LINE);
	struct reader reader = {.ring = ring, .pattern = pattern};
	uint64_t messages = 0, tail = 0, began = 0;
	uint64_t start = bench_now_ns() + bench_seconds_ns(options.warmup_s);
	uint64_t end = start + bench_seconds_ns(options.measure_s);
	uint64_t now;

	if (!ring)
		bench_fail("aligned_alloc");
	memset(ring, 0, sizeof(*ring));
	for (size_t i = 0; i < PERIOD + options.size; i++)
		pattern[i] = (unsigned char)(i % PERIOD * 7);
	if (pthread_create(&reader.thread, NULL, read_all, &reader))
		bench_refuse("no thread for the reader");
	while ((now = bench_now_ns()) < end) {
		tail = write_message(ring, tail, pattern + tail % PERIOD, options.size);
		if (now >= start && !began)
			began = bench_now_ns();
		else if (began)
			messages++;
	}
	atomic_store_explicit(&ring->over, true, memory_order_release);
	pthread_join(reader.thread, NULL);
	if (reader.wrong)
		bench_refuse("%llu pieces did not hold what was sent", (unsigned long long)reader.wrong);
	bench_report("copies", &options, messages, now - began, NULL);
	free(ring);
	free(pattern);
	return 0;
}
