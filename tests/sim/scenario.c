/*
 * scenario.c - a run by words instead of by a seed, one after the other:
 *
 *   0.send 1.close@7 0.recv net
 *
 * A command of an end is done whole; with @7 it is interrupted at its seventh point (a system call, a word that both ends
 * have) for the next word, `1.die` kills it there. What is no end's, as net@7, so interrupts the end that it wakes. Between
 * words the provider has answered; TCP brings what is under way with `net` only, the first step of a reset with `half`, and a
 * provider between (`relay=1`) carries what it has with `carry`; with `settle` all moves that can. At the end both programs send
 * a little more, where they can, and read to the end.
 */
#include "scenario.h"

#include <stdlib.h>
#include <string.h>

#include "channel.h"
#include "layout.h"
#include "provider.h"
#include "relay.h"

static const char *given[ENDS];
static bool finishing;
static bool never_interrupted, more = true;
static int64_t tick = MS / 10; /* between two commands */

static bool may_go_on(void *argument)
{
	return finishing || given[((struct end *)argument)->index];
}

void scenario_program(struct program *mine, struct end *end)
{
	while (mine->fd >= 0) {
		given[end->index] = NULL;
		judge_call_over(mine);
		mine->between = true;
		block(may_go_on, end, NEVER);
		if (finishing)
			break;
		mine->between = false;
		program_do(mine, given[end->index]);
	}
	mine->between = false;
	if (mine->fd >= 0 && more)
		program_do(mine, "more");
}

static void provider_settles(void)
{
	for (int i = 0; i < ENDS;)
		if (provider_can(i)) {
			provider_move(i);
			i = 0;
		} else {
			i++;
		}
}

static void relay_settles(void)
{
	while (relay_can())
		relay_move();
}

static void network_settles(void)
{
	for (int i = 0; i < NETWORK_MOVES;)
		if (network_can(i)) {
			network_move(i);
			i = 0;
		} else {
			i++;
		}
}

/* Lets it go on until it waits for a command, is interrupted, or sleeps. */
static void go_on(int i)
{
	while (end_can_run(&ends[i])) {
		bool was_armed = points_left >= 0;
		end_resume(&ends[i]);
		provider_settles();
		if (was_armed && points_left < 0 && !ends[i].ready && !ends[i].over)
			return;
	}
}

static bool busy(int i)
{
	return !ends[i].over && given[i];
}

/* Its call sleeps: the clock moves until it is done, and a provider between goes on meanwhile. */
static void sleeps_out(int i)
{
	for (int turn = 0; busy(i) && turn < 20000; turn++) {
		relay_settles();
		if (!end_can_run(&ends[i])) {
			if (ends[i].deadline == NEVER)
				return;
			now = ends[i].deadline > now ? ends[i].deadline : now;
		}
		go_on(i);
	}
}

static bool on_ring(int i)
{
	const struct conn_slot *slot = provider_slot(i);

	return slot && slot->state == STATE_PROMOTED;
}

static void order(int i, const char *command)
{
	if (busy(i))
		sleeps_out(i);
	if (!ends[i].started || ends[i].over || busy(i))
		return;
	now += tick;
	given[i] = command;
	go_on(i);
}

static void become_promoted(void)
{
	for (int turn = 0; turn < 40 && !(on_ring(0) && on_ring(1)); turn++) {
		order(turn & 1, turn & 2 ? "recv" : "byte");
		network_settles();
		relay_settles();
	}
	for (int i = 0; i < 2; i++)
		order(i, "recv");
	if (!on_ring(0) || !on_ring(1))
		fail("the connection is not promoted");
}

/* The tail of its ring goes back to what the peer has read: only who breaks the rules does that. */
static void tail_back(int i)
{
	int place;
	struct channel_segment *segment = provider_segment(i, &place);

	if (!segment)
		return;
	trace("%d: its tail goes back", i);
	sides[i].hostile = true;
	ends[i].over = true; /* and does nothing more */
	segment->producer[place].tail = segment->consumer[place].head;
}

static void configure(const char *word)
{
	int end = word[3] - '0', value = atoi(strchr(word, '=') + 1);

	if (strncmp(word, "way", 3) == 0)
		programs[end].way = (enum way)value;
	else if (strncmp(word, "until", 5) == 0)
		programs[0].until = programs[1].until = (enum until)value;
	else if (strncmp(word, "more", 4) == 0)
		more = value; /* whether both send once more at the end */
	else if (strncmp(word, "tick", 4) == 0)
		tick = value;
	else if (strncmp(word, "relay", 5) == 0)
		provider_relays = value;
	else if (strncmp(word, "rounds", 6) == 0)
		relay_rounds = value;
	else if (strncmp(word, "tcp", 3) == 0)
		tcp_out_max = tcp_in_max = (size_t)value;
	else
		fail("what is %s?", word);
}

static void word_do(char *word)
{
	char *interrupted = strchr(word, '@');
	int i = word[0] - '0';

	if (interrupted) {
		*interrupted = '\0';
		points_left = atoi(interrupted + 1);
	}
	if (strchr(word, '='))
		configure(word);
	else if (strcmp(word, "net") == 0)
		network_settles();
	else if (strcmp(word, "half") == 0)
		for (int end = 0; end < 2; end++)
			network_half_reset(end);
	else if (strcmp(word, "promoted") == 0)
		become_promoted();
	else if (strcmp(word, "lost") == 0)
		provider_dies();
	else if (strcmp(word, "settle") == 0)
		schedule(program_idle);
	else if (strcmp(word, "carry") == 0)
		relay_settles();
	else if (strcmp(word, "leave") == 0)
		relay_leave();
	else if (strcmp(word, "time") == 0)
		now += 2000 * MS;
	else if (word[0] != '0' + i || i < 0 || i >= ENDS || word[1] != '.')
		fail("what is %s?", word);
	else if (strcmp(word + 2, "tail") == 0)
		tail_back(i);
	else if (strcmp(word + 2, "die") == 0)
		program_dies_at(i);
	else if (strcmp(word + 2, "demote") == 0 || strcmp(word + 2, "promote") == 0)
		provider_order(i & 1, word[2] == 'p');
	else
		order(i, word + 2);
	bool wakes = interrupted && (i < 0 || i >= ENDS); /* whom it wakes is interrupted */
	for (int end = 0; wakes && end < ENDS; end++)
		go_on(end);
	if (interrupted && points_left >= 0) {
		never_interrupted = true;
		points_left = -1;
	}
	for (int end = 0; end < ENDS; end++)
		if (!interrupted || (!wakes && end != i))
			go_on(end);
	provider_settles();
}

bool scenario_run(char *text)
{
	char *rest, *word = strtok_r(text, " \n", &rest);

	while (word && strchr(word, '=')) {
		configure(word);
		word = strtok_r(NULL, " \n", &rest);
	}
	calm = 0;
	for (int i = 0; i < 2; i++)
		go_on(i); /* connected, and wait for a command */
	go_on(0);
	for (; word; word = strtok_r(NULL, " \n", &rest)) {
		bool interrupts = strchr(word, '@') != NULL;
		trace("  %s", word);
		word_do(word);
		if (never_interrupted)
			return false;
		if (!interrupts)
			for (int i = 0; i < ENDS; i++)
				go_on(i);
	}
	finishing = true;
	schedule(program_idle);
	programs_check();
	return true;
}
