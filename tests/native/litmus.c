/*
 * litmus.c - asleep, look again, sleep: is a wake-up ever lost?
 *
 * Two threads on two CPUs play rounds. In each the sleeper says that it is asleep and looks at the ring once more; the
 * sender puts a byte there, publishes it and looks whether anybody is asleep. A wake-up is lost when the sleeper saw no
 * byte and the sender saw no sleeper. Store-buffering hardware does that unless both sides fence between their store and
 * their load. The moves are the shim's own: doorbell_word_sleep(), channel_tx_publish(), full_fence(), the look of
 * doorbell_ring().
 *
 * usage: litmus both|no-sleeper-fence|no-sender-fence ROUNDS SECONDS
 * Prints "ROUNDS-PLAYED LOST"; a variant without a fence stops at its first loss.
 */
#include "check.h"

#include <pthread.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

static struct {
	_Atomic uint64_t word; /* the doorbell's: sleepers in the low 16 bits, generation above */
	uint8_t pad[CHANNEL_LINE - 8];
} doorbell __attribute__((aligned(CHANNEL_LINE)));

/* The round both may play next, and what they found; on lines of their own. */
static struct {
	_Atomic uint64_t round;
	uint8_t pad[CHANNEL_LINE - 8];
} sleeper_ready __attribute__((aligned(CHANNEL_LINE))), sender_ready __attribute__((aligned(CHANNEL_LINE)));
static _Atomic bool sleeper_saw, sender_saw, stop;
static bool sleeper_fences = true, sender_fences = true;
static struct end ends[2];

static void pin(int nth)
{
	cpu_set_t allowed, one;

	CHECK(sched_getaffinity(0, sizeof(allowed), &allowed) == 0);
	for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
		if (CPU_ISSET(cpu, &allowed) && nth-- == 0) {
			CPU_ZERO(&one);
			CPU_SET(cpu, &one);
			CHECK(sched_setaffinity(0, sizeof(one), &one) == 0);
			return;
		}
}

/* Both begin a round at the same time, give or take a cache line's way between two cores. */
static void meet(_Atomic uint64_t *mine, _Atomic uint64_t *other, uint64_t round)
{
	atomic_store_explicit(mine, round, memory_order_release);
	for (unsigned turn = 1; atomic_load_explicit(other, memory_order_acquire) < round; turn++)
		if (turn % 4096 == 0)
			sched_yield();
}

static void jitter(struct dice *dice)
{
	for (volatile unsigned left = (unsigned)dice_below(dice, 16); left; left--)
		;
}

static void *sleeper(void *unused)
{
	struct dice dice = {1};

	(void)unused;
	pin(1);
	for (uint64_t round = 1;; round += 2) {
		meet(&sleeper_ready.round, &sender_ready.round, round);
		if (atomic_load_explicit(&stop, memory_order_relaxed))
			return NULL;
		jitter(&dice);
		if (sleeper_fences) {
			atomic_fetch_add(&doorbell.word, (1u << 16) + 1);
			atomic_thread_fence(memory_order_seq_cst);
		} else {
			uint64_t word = atomic_load_explicit(&doorbell.word, memory_order_relaxed);
			atomic_store_explicit(&doorbell.word, word + (1u << 16) + 1, memory_order_relaxed);
		}
		atomic_store_explicit(&sleeper_saw, channel_rx_avail(&ends[1].channel) != 0, memory_order_relaxed);
		meet(&sleeper_ready.round, &sender_ready.round, round + 1);
		atomic_fetch_sub(&doorbell.word, 1);
		CHECK(channel_rx_avail(&ends[1].channel) == 1);
		channel_rx_consume(&ends[1].channel, 1);
	}
}

static double seconds_now(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

int main(int argc, char **argv)
{
	struct dice dice = {2};
	pthread_t thread;
	cpu_set_t allowed;

	if (argc == 4 && strcmp(argv[1], "no-sleeper-fence") == 0)
		sleeper_fences = false;
	else if (argc == 4 && strcmp(argv[1], "no-sender-fence") == 0)
		sender_fences = false;
	else if (argc != 4 || strcmp(argv[1], "both") != 0) {
		fprintf(stderr, "usage: litmus both|no-sleeper-fence|no-sender-fence ROUNDS SECONDS\n");
		return 2;
	}
	bool fenced = sleeper_fences && sender_fences;
	uint64_t rounds = strtoull(argv[2], NULL, 10), played = 0, lost = 0, again = 0;
	double until = seconds_now() + strtod(argv[3], NULL);
	CHECK(sched_getaffinity(0, sizeof(allowed), &allowed) == 0);
	if (CPU_COUNT(&allowed) < 2) {
		fprintf(stderr, "litmus: needs two CPUs\n");
		return 3;
	}
	ends_open(ends, CHANNEL_RING_MIN, CHANNEL_RING_MIN, NULL);
	CHECK(pthread_create(&thread, NULL, sleeper, NULL) == 0);
	pin(0);
	for (uint64_t round = 1;; round += 2) {
		bool over = played == rounds || (!fenced && lost) || (played % 1024 == 0 && seconds_now() > until);
		atomic_store_explicit(&stop, over, memory_order_relaxed);
		meet(&sender_ready.round, &sleeper_ready.round, round);
		if (over)
			break;
		jitter(&dice);
		channel_tx_put(&ends[0].channel, 0, "x", 1, false);
		channel_tx_publish(&ends[0].channel, 1);
		if (sender_fences)
			atomic_thread_fence(memory_order_seq_cst);
		atomic_store_explicit(&sender_saw, atomic_load_explicit(&doorbell.word, memory_order_relaxed) & 0xffff,
		                      memory_order_relaxed);
		meet(&sender_ready.round, &sleeper_ready.round, round + 1);
		bool saw = atomic_load_explicit(&sleeper_saw, memory_order_relaxed);
		lost += !saw && !atomic_load_explicit(&sender_saw, memory_order_relaxed);
		again += saw;
		played++;
	}
	CHECK(pthread_join(thread, NULL) == 0);
	ends_close(ends);
	printf("%llu %llu\n", (unsigned long long)played, (unsigned long long)lost);
	fprintf(stderr, "the second look found the byte in %llu rounds\n", (unsigned long long)again);
	return 0;
}
