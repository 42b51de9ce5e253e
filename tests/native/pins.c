/*
 * pins.c - a device that has pinned a ring, and an application that gives the ring's pages back meanwhile.
 *
 *     pins counted|blind|amid ROUNDS SECONDS        (link with -Wl,--wrap=madvise)
 *
 * The application sends, and gives its pages back whenever its ring is empty. The other thread pins them as a device does: a
 * pipe keeps the pages that vmsplice(2) was given, whatever the file is made of later. It reads each stretch of the stream from
 * there if the count is the one from before (`counted`), else from the ring, and pins it anew at times. With `blind` it does
 * not compare; with `amid` it pins while the count is odd. Prints the stretches read from what was pinned, how often it
 * was pinned, and the stretches with wrong bytes; of the last two variants no more than one.
 */
#include "check.h"

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define RING (4 * CHANNEL_RING_MIN)
#define SEED 5

static struct end ends[2];
static bool compares = true, amid;
static _Atomic bool stop;

static double seconds_now(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* As slow as on a machine with much to do, at times. */
int __real_madvise(void *at, size_t len, int advice);
int __wrap_madvise(void *at, size_t len, int advice);
int __wrap_madvise(void *at, size_t len, int advice)
{
	static struct dice dice = {3}; /* one thread gives pages back */

	if (advice == MADV_REMOVE && dice_below(&dice, 8) == 0)
		usleep((useconds_t)dice_below(&dice, 100));
	return __real_madvise(at, len, advice);
}

static void *application(void *unused)
{
	struct end *end = &ends[0];
	struct dice dice = {1};
	uint64_t sent = 0;

	while (!atomic_load_explicit(&stop, memory_order_relaxed)) {
		if (dice_below(&dice, 4) == 0 && channel_tx_unread(&end->channel) == 0)
			channel_trim(&end->channel);
		sent += end_send(end, SEED, sent, 1 + dice_below(&dice, RING));
		if (dice_below(&dice, 2))
			sched_yield();
	}
	return unused;
}

/* ---- the device ---- */
static int kept[2] = {-1, -1}, copied[2];
static uint8_t seen[RING];
static uint32_t pages; /* from before the ring was pinned; 0: it is not */

static void unpin(void)
{
	for (int n = 0; n < 2 && kept[n] >= 0; n++)
		close(kept[n]);
	kept[0] = kept[1] = -1;
	pages = 0;
}

static bool pin(void)
{
	const struct channel_end *end = &ends[1].channel;
	struct iovec ring = {end->rx.data, RING};

	uint32_t now = atomic_load(&end->rx_peer_line->pages);
	uint32_t before = !amid ? channel_rx_pages(end) : now & 1 ? now + 1 : 0;

	if (!amid)
		unpin();
	if (!before)
		return false;
	unpin();
	CHECK(pipe(kept) == 0 && vmsplice(kept[1], &ring, 1, 0) == RING);
	pages = before;
	return true;
}

/* What the pages that are pinned hold now. */
static void look(void)
{
	CHECK(tee(kept[0], copied[1], RING, 0) == RING);
	for (size_t got = 0; got < RING;) {
		ssize_t some = read(copied[0], seen + got, RING - got);
		CHECK(some > 0);
		got += (size_t)some;
	}
}

/* Whether all of the next `len` bytes are those of the stream. */
static bool read_pinned(uint64_t received, size_t len)
{
	bool right = true;

	look();
	for (size_t n = 0; n < len; n++)
		right &= seen[(received + n) % RING] == stream_byte(SEED, received + n);
	channel_rx_consume(&ends[1].channel, len);
	return right;
}

int main(int argc, char **argv)
{
	struct dice dice = {2};
	uint64_t received = 0, read = 0, pinned = 0, wrong = 0;
	pthread_t thread;

	if (argc != 4) {
		fprintf(stderr, "usage: pins counted|blind|amid ROUNDS SECONDS\n");
		return 2;
	}
	compares = strcmp(argv[1], "blind") != 0;
	amid = strcmp(argv[1], "amid") == 0;
	uint64_t rounds = strtoull(argv[2], NULL, 10);
	double until = seconds_now() + strtod(argv[3], NULL);
	ends_open(ends, RING, CHANNEL_RING_MIN, NULL);
	CHECK(pipe(copied) == 0);
	CHECK(pthread_create(&thread, NULL, application, NULL) == 0);
	while (read < rounds && seconds_now() < until && (!wrong || (compares && !amid))) {
		struct channel_end *end = &ends[1].channel;
		if (amid || dice_below(&dice, pages ? 50 : 2) == 0)
			pinned += pin();
		int64_t there = channel_rx_avail(end);
		CHECK(there >= 0);
		if (!there) {
			sched_yield();
			continue;
		}
		size_t len = 1 + dice_below(&dice, (uint64_t)there);
		if (pages && (!compares || channel_rx_pages(end) == pages)) {
			wrong += !read_pinned(received, len);
			received += len;
			read++;
		} else {
			received += end_receive(&ends[1], SEED, received, len);
		}
	}
	atomic_store(&stop, true);
	CHECK(pthread_join(thread, NULL) == 0);
	unpin();
	ends_close(ends);
	printf("%llu %llu %llu\n", (unsigned long long)read, (unsigned long long)pinned, (unsigned long long)wrong);
	return 0;
}
