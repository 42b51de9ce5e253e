/*
 * main.c - runs seeds from the first one on, until so many steps are made, or scenarios; simulator.py is its face.
 *
 * Each runs in a process of its own, forked, so that it finds everything as it is at first.
 */
#include "sim.h"

#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "layout.h"
#include "program.h"
#include "provider.h"
#include "relay.h"
#include "scenario.h"

#define FAILURES_MAX 20

bool tracing, scenario;
static uint64_t state; /* of what is chosen */
static struct totals {
	uint64_t operations, moves, seen[SEEN];
	char message[256];
} *totals;

uint32_t choose(uint32_t n)
{
	uint64_t value = state += 0x9E3779B97F4A7C15ull; /* splitmix64 */

	value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
	value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
	value ^= value >> 31;
	return n ? (uint32_t)(((value >> 32) * n) >> 32) : 0;
}

void trace(const char *format, ...)
{
	va_list args;

	if (!tracing)
		return;
	va_start(args, format);
	vprintf(format, args);
	va_end(args);
	putchar('\n');
}

static void count(void)
{
	totals->operations += operations;
	totals->moves += moves;
	for (int i = 0; i < SEEN; i++)
		totals->seen[i] += seen[i];
}

void fail(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vsnprintf(totals->message, sizeof(totals->message), format, args);
	va_end(args);
	trace("FAILED: %s", totals->message);
	count();
	fflush(stdout);
	_exit(1);
}

static void configure(int end)
{
	struct program *program = &programs[end];
	static const uint32_t ways[] = {BY_RECV, BY_POLL, BY_LEVEL, BY_EDGE, BY_EDGE, BY_EDGE_ONESHOT, BY_LEVEL_ONESHOT};

	program->way = ways[choose(7)];
	program->nonblock = program->way != BY_RECV && choose(2);
	program->until = (enum until)choose(UNTILS);
	program->operations = choose(3) ? choose(60) : 60 + choose(200);
	program->stubborn = choose(2);
}

/* One end fills what there is and is killed, or resets, while the other has not read yet. */
static void configure_flood(void)
{
	int floods = (int)choose(2);

	setenv("SIDESTEP_RING_SIZE", "4096", 1); /* shorter than its spill: a provider does not carry all */
	stimuli |= MAY_RELAY | MAY_ABORT | MAY_KILL;
	programs[floods].floods = programs[1 - floods].lazy = true;
	for (int i = 0; i < 2; i++)
		programs[i].operations = 20 + choose(60);
}

static void libraries_load(char *const paths[2])
{
	setenv("SIDESTEP_SOCKET", "/provider/socket", 1);
	setenv("SIDESTEP_LOG", "/log", 1); /* always: a seed that is told is to take the same steps */
	setenv("SIDESTEP_CHECKED", "1", 1);
	for (int i = 0; i < 2; i++) {
		current = &ends[i]; /* its constructor runs as this process */
		programs[i].index = i;
		programs[i].side = &sides[i];
		sides[i].holders = 1;
		programs[i].library = dlopen(paths[i], RTLD_NOW | RTLD_LOCAL);
		if (!programs[i].library)
			fail("%s", dlerror());
		ends[i].run = program_run;
	}
	current = NULL;
}

static void run_scenario(char *const paths[2], const char *text)
{
	char words[1024];

	state = 1;
	setenv("SIDESTEP_RING_SIZE", "8192", 1);
	setenv("SIDESTEP_SPIN_US", "0", 1);
	setenv("SIDESTEP_PROMOTE_AFTER", "0", 1);
	scenario = true;
	programs[0].way = programs[1].way = BY_POLL;
	libraries_load(paths);
	snprintf(words, sizeof(words), "%s", text);
	bool reached = scenario_run(words);
	fflush(stdout);
	count();
	_exit(reached ? 0 : 3);
}

static void run_seed(char *const paths[2], uint64_t seed)
{
	static const char *const rings[] = {"4096", "4096", "8192", "65536"};
	static const char *const spins[] = {"0", "0", "5"};
	static const uint32_t preempts[] = {0, 2, 5, 20, 100}, deaths[] = {300, 3000, 30000};
	static const size_t rooms[] = {1000, 5000, 20000, 100000};

	dies = program_dies;
	state = seed * 0xD1342543DE82EF95ull + 1;
	setenv("SIDESTEP_RING_SIZE", rings[choose(4)], 1);
	setenv("SIDESTEP_SPIN_US", spins[choose(3)], 1);
	setenv("SIDESTEP_PROMOTE_AFTER", choose(2) ? "0" : "4", 1);
	tcp_out_max = rooms[choose(4)];
	tcp_in_max = rooms[choose(4)];
	static const uint32_t some[] = {0,
	                                MAY_ORDER,
	                                MAY_ORDER | MAY_SHUT,
	                                MAY_RELAY | MAY_SHUT | MAY_CLOSE,
	                                MAY_RELAY | MAY_SHUT | MAY_FORK | MAY_EXEC | MAY_ORDER,
	                                MAY_TRAVEL | MAY_SLEEP | MAY_SHUT | MAY_CLOSE | MAY_ORDER,
	                                MAY_TRAVEL | MAY_SLEEP | MAY_SHUT | MAY_FORK | MAY_LEAVE,
	                                MAY_TRAVEL | MAY_SLEEP | MAY_RELAY | MAY_SHUT | MAY_CLOSE,
	                                MAY_GIVE | MAY_SLEEP | MAY_SHUT | MAY_CLOSE | MAY_FORK,
	                                MAY_GIVE | MAY_SLEEP | MAY_RELAY | MAY_SHUT | MAY_CLOSE | MAY_FORK};
	stimuli = choose(2) ? choose(STIMULI) : some[choose(10)];
	for (int i = 0; i < 2; i++)
		configure(i);
	if (chance(6))
		configure_flood();
	if (seed % 4 == 2) { /* through a provider to the ring and back, again and again */
		stimuli |= MAY_RELAY;
		order_one_in = 2 + choose(10);
		for (int i = 0; i < 2; i++)
			programs[i].operations += 100;
	}
	libraries_load(paths);
	preempt_one_in = preempts[choose(5)];
	provider_relays = stimuli & MAY_RELAY;
	relay_rounds = seed % 4;
	death_one_in = stimuli & MAY_DIE ? deaths[choose(3)] : 0;
	trace("seed %llu: rings %s, spin %s us, promote after %s, TCP %zu and %zu, one in %u, stimuli %#x, "
	      "ways %d and %d, read until %d and %d",
	      (unsigned long long)seed, getenv("SIDESTEP_RING_SIZE"), getenv("SIDESTEP_SPIN_US"),
	      getenv("SIDESTEP_PROMOTE_AFTER"), tcp_out_max, tcp_in_max, preempt_one_in, stimuli, programs[0].way,
	      programs[1].way, programs[0].until, programs[1].until);
	schedule(program_idle);
	programs_check();
	count();
	trace("ok: %llu operations", (unsigned long long)operations);
	fflush(stdout);
	_exit(0);
}

/* A process of its own for a scenario or, without one, a seed. 0, or how it ended; 3: not that many points. */
static int try(char *const paths[2], const char *text, uint64_t seed, bool telling)
{
	int status;

	totals->message[0] = '\0';
	fflush(stdout);
	pid_t child = fork();
	if (child == 0) {
		tracing = telling;
		alarm(20);
		if (telling)
			setvbuf(stdout, NULL, _IOLBF, 0); /* what was told before a signal is not lost */
		if (text)
			run_scenario(paths, text);
		run_seed(paths, seed);
	}
	if (child < 0 || waitpid(child, &status, 0) < 0)
		exit(2);
	if (WIFSIGNALED(status) && !totals->message[0])
		snprintf(totals->message, sizeof(totals->message), "signal %s", sigabbrev_np(WTERMSIG(status)));
	return WIFEXITED(status) ? WEXITSTATUS(status) : status;
}

/* Those on standard input, a line each; with @* in the place of a number, for each number of points there is. */
static int try_scenarios(char *const paths[2], bool telling)
{
	char line[1024], numbered[1100];
	uint64_t tried = 0, failures = 0;

	while (fgets(line, sizeof(line), stdin)) {
		line[strcspn(line, "\n")] = '\0';
		char *star = strstr(line, "@*");
		for (int at = 0;; at++) {
			if (star)
				snprintf(numbered, sizeof(numbered), "%.*s@%d%s", (int)(star - line), line, at, star + 2);
			int result = try(paths, star ? numbered : line, 0, telling);
			if (result == 3)
				break;
			tried++;
			if (result) {
				failures++;
				printf("%s: %s\n", star ? numbered : line, totals->message);
			}
			if (!star || result || failures >= FAILURES_MAX)
				break;
		}
		if (failures >= FAILURES_MAX)
			break;
	}
	printf("%llu scenarios, %llu operations, %llu moves: %llu failures\n", (unsigned long long)tried,
	       (unsigned long long)totals->operations, (unsigned long long)totals->moves, (unsigned long long)failures);
	return failures != 0;
}

int main(int argc, char **argv)
{
	if (argc < 5) {
		fprintf(stderr, "usage: sim LIBRARY-A LIBRARY-B FIRST-SEED STEPS [trace]\n"
		                "       sim LIBRARY-A LIBRARY-B scenarios quiet|trace\n");
		return 2;
	}
	static const char *const names[SEEN] = {"promoted", "back",   "again",   "passed",  "reset",  "forked",
	                                        "shared",   "died",   "relayed", "lost",    "rounds", "travelled",
	                                        "given",    "unseen", "asleep",  "confined"};
	uint64_t seed = strtoull(argv[3], NULL, 10), steps = strtoull(argv[4], NULL, 10), first = seed, failures = 0;
	bool telling = strcmp(argv[argc - 1], "trace") == 0;

	totals = mmap(NULL, sizeof(*totals), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	signal(SIGPIPE, SIG_IGN);
	if (strcmp(argv[3], "scenarios") == 0)
		return try_scenarios(argv + 1, telling);
	do {
		if (try(argv + 1, NULL, seed, telling) != 0) {
			printf("seed %llu: %s\n", (unsigned long long)seed, totals->message);
			if (++failures >= FAILURES_MAX)
				break;
		}
		seed++;
	} while (totals->operations + totals->moves < steps);
	printf("%llu seeds, %llu operations, %llu moves: %llu failures\n", (unsigned long long)(seed - first),
	       (unsigned long long)totals->operations, (unsigned long long)totals->moves, (unsigned long long)failures);
	for (int i = 0; i < SEEN; i++)
		printf("%s %llu\n", names[i], (unsigned long long)totals->seen[i]);
	return failures != 0;
}
