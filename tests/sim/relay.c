/*
 * relay.c - a provider between the two ends, as a third actor: what the two ends of provider/carry/local_relay.py
 * do for the applications, in one step instead of two, with a protocol that copies.
 *
 * Each move is one step of a turn there (hand words on, carry some bytes, give room back, find who is gone), at some moment
 * that the scheduler chooses: so bytes and words arrive late, and not all at once. A recall takes three: it is said, heard at
 * the other end, and answered. Consent, and the answer to a switch, take a step of their own to the other end (`hear`).
 * With `relay_rounds` it passes on the words of any number of rounds, as between hosts; else of one. Not here: hints, what asks a reader to ring (the relay looks by itself), the spill of a reader's
 * ring, and what else passes between the two ends of far.py.
 */
#include "relay.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "channel.h"
#include "kernel.h"
#include "layout.h"
#include "provider.h"

enum { HAND_ON, PUMP, PUMP_BACK, RELEASE, RELEASE_BACK, RECALL, RECALL_BACK, HEAR, HEAR_BACK, LOOK, STEPS };
#define SETTLE_ENDED (12000 * MS) /* SETTLE_ENDED_S */
#define ACKED_RECALL 8 /* CHANNEL_ACKED_RECALL, where there is one */
#define ACKED_ROUNDS 16
#define APPS_MAX 8 /* RELAY_DOORBELLS_MAX */

struct channel { /* with one application */
	struct channel_side *local;
	const struct channel_side *remote;
	_Atomic uint64_t *sent, *read; /* ours: the tail of our ring, and what the application has read of it */
	const _Atomic uint64_t *tail;  /* of the application's */
	_Atomic uint64_t *received;    /* its room that was given back */
	const _Atomic uint32_t *wanted;
	struct channel_ring out, in;
	const struct channel_producer *in_line; /* where what comes in lies */
	_Atomic uint32_t *remote_back; /* how its direction ends */
};

static struct relay_side {
	struct channel channel;
	struct relay_app apps[APPS_MAX];
	int apps_len;
	uint64_t rung[APPS_MAX], held;
	int64_t dead_at; /* when TCP's death is held against it; 0: it lives */
	bool gone;
	uint32_t consented; /* the last round, of the direction to this application, that it has consented to */
	/* of the direction that comes from this application: rounds that it was invited to, has gone to, and whose end is told */
	uint32_t invited, switched, back_told;
	uint32_t consent_due; /* the other's consent to this round is on its way here */
	bool ack_due; /* so is the answer to its switch */
	/* and what else has been handed on to the other */
	bool demote_told, frozen, finished, end_told, closed_told;
	/* how far the word of this application has come that it wants again what it has not read */
	enum { RECALLS_NOT, RECALL_SAID, RECALL_HEARD, RECALL_ANSWERED } recall;
} sides_of[2];
static bool exists, is_open, lost, left, dead;
bool relay_rounds;
static uint32_t quiet; /* steps that changed nothing since something else did */
static bool changed; /* by the step at work */
struct object *relay_liveness, *relay_doorbell, *relay_page;

static struct relay_side *other_of(const struct relay_side *side)
{
	return &sides_of[side == &sides_of[0]];
}

static void ring(struct relay_side *side)
{
	changed = true;
	for (int i = 0; i < side->apps_len; i++) {
		const struct relay_app *app = &side->apps[i];
		uint64_t word = *(const uint64_t *)(app->page->memory + app->doorbell_index * 64);
		if ((word & 0xffff) && side->rung[i] != word >> 16) {
			side->rung[i] = word >> 16;
			app->doorbell->count--;
			wake(app->doorbell, EPOLLOUT);
		}
	}
}

static void channel_of(struct channel *channel, struct object *object, int place)
{
	struct channel_segment *segment = (struct channel_segment *)object->memory;
	struct channel_ring rings[2];
	uint8_t *at = object->memory + CHANNEL_HEADER_SIZE, *spill = at + segment->ring_size[0] + segment->ring_size[1];
	int ours = 1 - place;

	for (int i = 0; i < 2; i++) {
		uint32_t size = segment->ring_size[i], spill_size = size > CHANNEL_SPILL ? size : CHANNEL_SPILL;
		rings[i] = (struct channel_ring){at, spill, size, spill_size};
		at += size;
		spill += spill_size;
	}

	*channel = (struct channel){
		.local = &segment->side[ours],
		.remote = &segment->side[place],
		.sent = &segment->producer[ours].tail,
		.read = &segment->consumer[ours].head,
		.tail = &segment->producer[place].tail,
		.received = &segment->consumer[place].head,
		.wanted = &segment->producer[place].want_space,
		.out = rings[ours],
		.in = rings[place],
		.in_line = &segment->producer[place],
		.remote_back = &segment->side[place].tx_back,
	};
}

static void app_add(struct relay_side *side, struct relay_app app)
{
	app.doorbell->refs++;
	app.page->refs++;
	side->rung[side->apps_len] = UINT64_MAX;
	side->apps[side->apps_len++] = app;
}

void relay_open(struct object *const segments[2], const int places[2], const struct relay_app apps[2])
{
	exists = true;
	for (int i = 0; i < 2; i++) {
		sides_of[i] = (struct relay_side){0};
		app_add(&sides_of[i], apps[i]);
		channel_of(&sides_of[i].channel, segments[i], places[i]);
		sides_of[i].channel.local->knows = KNOWS_DOORBELLS | KNOWS_LEAVE;
		if (relay_rounds)
			sides_of[i].channel.local->acked = ACKED_ROUNDS;
	}
	quiet = 0;
}

/* ---- what the sides are ---- */
static bool is_closed(const struct relay_side *side)
{
	return side->gone || (side->channel.remote->notice & CHANNEL_CLOSED);
}

static bool is_final(const struct relay_side *side)
{
	return is_closed(side) || side->channel.remote->shut_wr;
}

/* How its round ends. */
static uint32_t back_of(const struct relay_side *side)
{
	uint32_t back = side->channel.remote->tx_back;

	return back >> 2 == (side->invited ? side->invited : 1) ? back & 3 : 0;
}

/* The round that `target` has consented to is over, and it has been told. */
static bool round_over(const struct relay_side *source, const struct relay_side *target)
{
	return target->consented && source->back_told == target->consented;
}

static bool has_ended(const struct relay_side *side)
{
	const struct channel *channel = &side->channel;
	bool ending = side->frozen || is_final(side) || back_of(side) == CHANNEL_BACK;

	return ending && (side->frozen || *channel->received + side->held == *channel->tail);
}

static uint64_t space(const struct relay_side *side)
{
	return side->channel.out.size - (*side->channel.sent - *side->channel.read);
}

static void drop(void)
{
	lost = true;
	for (int i = 0; i < 2; i++) {
		sides_of[i].channel.local->notice |= CHANNEL_OVER;
		ring(&sides_of[i]);
	}
}

static void reset(const char *reason)
{
	if (lost)
		return;
	trace("    relay: resets: %s", reason);
	for (int i = 0; i < 2; i++) {
		sides_of[i].channel.local->notice |= CHANNEL_RESET;
		ring(&sides_of[i]);
	}
	drop();
}

void relay_hears_bell(int end, struct relay_app app, uint64_t word, bool alone)
{
	struct relay_side *side = &sides_of[end];
	struct channel_side *local = side->channel.local;

	if (!exists || lost || dead || ((word ^ side->channel.remote->doorbell_nonce) & ~(uint64_t)NONCE_COUNT))
		return;
	if (alone && word == side->channel.remote->doorbell_nonce)
		side->apps_len = 0;
	if (side->apps_len == APPS_MAX) {
		reset("doorbell");
		return;
	}
	app_add(side, app);
	trace("    relay: %d has another doorbell, %d now", end, side->apps_len);
	local->knows = side->apps_len < APPS_MAX / 2 ? KNOWS_DOORBELLS | KNOWS_LEAVE : KNOWS_LEAVE;
	local->doorbell_nonce_seen = word;
	ring(side);
	quiet = 0;
}

static void violation(const struct relay_side *side, const char *what)
{
	fail("end %d breaks the rules, as the provider sees it: %s", side == &sides_of[1], what);
}

/* ---- the end of a direction ---- */
static uint32_t decide(struct relay_side *target, uint32_t value)
{
	struct channel *channel = &target->channel;
	uint32_t stands = channel_decide(&channel->local->tx_back, target->consented ? target->consented : 1, value);

	if (stands == CHANNEL_RECALLED) {
		if (channel->remote->rx_frozen != *channel->sent)
			reset("recall");
		else
			channel->local->acked |= ACKED_RECALL;
	}
	return lost ? 0 : stands;
}

static void tell_end(struct relay_side *source, struct relay_side *target)
{
	struct channel *channel = &target->channel;

	if ((source->frozen && !is_final(source)) || (target->recall && target->recall != RECALL_ANSWERED))
		return;
	if (back_of(source) == CHANNEL_BACK && source->back_told < source->invited) {
		source->back_told = source->invited;
		channel->local->tx_back_at = *channel->sent;
		uint32_t stands = decide(target, CHANNEL_BACK);
		trace("    relay: %d has gone back from round %u", source == &sides_of[1], source->invited);
		if (!stands)
			return;
		if (stands == CHANNEL_BACK && relay_rounds) {
			channel->local->acked &= ~(uint32_t)CHANNEL_ACKED_READY;
			channel->local->tx_ended = target->consented;
		}
		ring(target);
	}
	if (!is_final(source) || (source->end_told && (source->closed_told || !is_closed(source))))
		return;
	if (!(source->end_told || round_over(source, target) || source->frozen) && !decide(target, CHANNEL_ENDED))
		return;
	if (source->channel.remote->shut_wr)
		channel->local->shut_wr = 1;
	if (is_closed(source)) {
		source->closed_told = true;
		channel->local->notice |= CHANNEL_CLOSED;
	}
	source->end_told = true;
	channel->local->tx_fin_at = *channel->sent;
	channel->local->tx_fin = 1;
	ring(target);
}

/* Its process is connected to the provider, whose own is the other reference. */
static bool is_client(int end)
{
	return provider_lines[end] && provider_lines[end]->refs > 1;
}

/* Asks the kernel whether no process holds its end: `held` and `client_open`, hub.py. */
static bool has_gone(struct relay_side *side)
{
	int i = side == &sides_of[1];

	if (!side->gone && connection[i]->tcp.orphan && !is_client(i))
		side->gone = changed = true;
	return side->gone;
}

/* Has its application send again by TCP what follows `count`; false: it cannot. */
static bool stop_at(struct relay_side *side, uint64_t count)
{
	struct channel *channel = &side->channel;
	bool gone = has_gone(side);

	channel->local->rx_frozen = count;
	uint32_t stands = gone ? CHANNEL_ENDED
	                       : channel_decide(channel->remote_back, side->invited ? side->invited : 1, CHANNEL_RECALLED);
	if (stands != CHANNEL_RECALLED && *channel->tail != count)
		return false;
	side->frozen = true;
	channel->local->notice |= CHANNEL_RECALL | CHANNEL_DEMOTE;
	ring(side);
	return true;
}

/* What comes for this application from now on is wanted by TCP. */
static void recall(struct relay_side *source)
{
	if (channel_decide(&source->channel.local->tx_back, source->consented ? source->consented : 1, CHANNEL_RECALLED) !=
	    CHANNEL_RECALLED)
		violation(source, "recalls what was decided otherwise");
	if (source->channel.remote->rx_frozen > *source->channel.sent)
		violation(source, "recalls what is not there");
	source->recall = RECALL_SAID;
	changed = true;
}

/* What the other end's provider has said comes here. */
static void hear(struct relay_side *side)
{
	struct channel_side *local = side->channel.local;

	if (side->ack_due) {
		side->ack_due = false;
		local->acked |= CHANNEL_ACKED_SWITCH;
		ring(side);
	}
	if (side->consent_due) {
		side->invited = side->consent_due;
		side->consent_due = 0;
		side->finished = false;
		local->acked &= ~(uint32_t)CHANNEL_ACKED_SWITCH;
		local->rx_ready = side->invited;
		trace("    relay: %d is invited to round %u", side == &sides_of[1], side->invited);
		ring(side);
	}
}

/* The word comes to the other end's provider, and the answer back. */
static void recall_goes_on(struct relay_side *source, struct relay_side *target)
{
	uint64_t frozen = source->channel.remote->rx_frozen;

	if (source->recall == RECALL_HEARD) {
		source->recall = RECALL_ANSWERED;
		source->channel.local->acked |= CHANNEL_ACKED_REQUEST | ACKED_RECALL;
		ring(source);
	}
	if (source->recall != RECALL_SAID)
		return;
	if (frozen < *target->channel.received)
		violation(source, "recalls what it has read");
	source->recall = RECALL_HEARD;
	hear(target); /* what was said before */
	if (!stop_at(target, frozen))
		reset("recall"); /* it has gone back by itself, ended or died, and will not send again */
}

static void cut_short(struct relay_side *source, struct relay_side *target, uint32_t round)
{
	uint64_t arrived = *target->channel.sent;

	hear(source);
	if (source->invited == round && !stop_at(source, arrived))
		return;
	target->consented = source->back_told = round;
	target->channel.local->tx_back_at = arrived;
	channel_decide(&target->channel.local->tx_back, round, CHANNEL_BACK);
	ring(target);
}

/* ---- steps ---- */
static void switch_told(struct relay_side *source, struct relay_side *target)
{
	source->switched = source->channel.remote->tx_switched;
	if (source->switched != source->invited)
		violation(source, "sends by ring without consent");
	target->channel.local->tx_switch_offset = source->channel.remote->tx_switch_offset;
	target->channel.local->tx_switched = source->switched;
	source->ack_due = true;
	trace("    relay: %d has gone to its ring, round %u", source == &sides_of[1], source->switched);
	ring(target);
}

static void demote_told(struct relay_side *source, struct relay_side *target, bool asks)
{
	source->demote_told = asks;
	if (asks) {
		target->channel.local->notice |= CHANNEL_DEMOTE;
		source->channel.local->acked |= CHANNEL_ACKED_REQUEST;
	} else {
		source->channel.local->acked &= ~(uint32_t)CHANNEL_ACKED_REQUEST;
		if (!(left || target->frozen))
			target->channel.local->notice &= ~(uint32_t)CHANNEL_DEMOTE;
	}
	ring(target);
}

static void consent_told(struct relay_side *source, struct relay_side *target)
{
	source->consented++;
	changed = true;
	if (left || source->recall)
		return;
	if (source->demote_told && relay_rounds)
		demote_told(source, target, false);
	source->channel.local->acked |= CHANNEL_ACKED_READY;
	target->consent_due = source->consented;
	if (target->end_told && source->consented > 1)
		decide(source, CHANNEL_ENDED);
}

static void hand_on_from(struct relay_side *source, struct relay_side *target)
{
	const struct channel_side *words = source->channel.remote;

	uint32_t round = target->channel.remote->rx_ready;
	bool wanted = target->channel.remote->notice & CHANNEL_LEAVE;

	if (wanted || (words->notice & CHANNEL_LEAVE))
		relay_leave();
	if (left && round && (wanted || source->switched != round) && source->back_told != round && !target->recall)
		cut_short(source, target, round);
	if (words->rx_ready == source->consented + 1 && (relay_rounds || !source->consented)) {
		if (source->consented && !round_over(target, source))
			violation(source, "consents anew before the round is over");
		consent_told(source, target);
	}
	if (words->tx_switched != source->switched)
		switch_told(source, target);
	if ((words->notice & CHANNEL_RECALL) && !source->recall)
		recall(source);
	else if (((words->notice & CHANNEL_DEMOTE) != 0) != source->demote_told && (relay_rounds || !source->demote_told))
		demote_told(source, target, !source->demote_told);
	if (back_of(source) == CHANNEL_BACK && words->tx_back_at != *source->channel.tail)
		violation(source, "goes back at another count than it has sent");
	if ((is_final(source) || words->tx_back) && *source->channel.tail && !(source->switched || source->frozen))
		violation(source, "has sent by ring and never gone there");
	if (lost)
		return;
	bool unread = !target->frozen && *target->channel.tail != *source->channel.read;
	if (is_closed(source) && (source->finished || !space(target)) && unread)
		reset("unread");
	else if (source->finished)
		tell_end(source, target);
}

static void hand_on(void)
{
	if (!is_open) {
		if (!sides_of[0].channel.remote->attached || !sides_of[1].channel.remote->attached)
			return;
		is_open = true;
		for (int i = 0; i < 2; i++) {
			sides_of[i].channel.local->attached = 1;
			ring(&sides_of[i]);
		}
	}
	for (int i = 0; i < 2; i++)
		if (sides_of[1 - i].channel.remote->fin_seen && !is_final(&sides_of[i]))
			sides_of[i].gone = changed = true;
	for (int i = 0; i < 2 && !lost; i++)
		hand_on_from(&sides_of[i], &sides_of[1 - i]);
}

static void pump(struct relay_side *source, struct relay_side *target)
{
	struct channel *in = &source->channel, *out = &target->channel;
	uint64_t from = *in->received + source->held, there = *in->tail - from, room = space(target);
	uint64_t len = source->frozen || target->recall || !source->switched || source->switched != source->invited ? 0
	               : there < room                                                                               ? there
	                                                                                                            : room;

	if (len && choose(2))
		len = 1 + choose((uint32_t)len);
	for (uint64_t i = 0; i < len; i++)
		*channel_place(&out->out, 0, 0, 0, *out->sent + i, &(size_t){1}) = *channel_place(
			&in->in, in->in_line->ring_from, in->in_line->ring_to, in->in_line->spill_base, from + i, &(size_t){1});
	if (len) {
		trace("    relay: %llu bytes to %d", (unsigned long long)len, target == &sides_of[1]);
		*out->sent += len;
		source->held += len;
		ring(target);
	}
	if (has_ended(source) && !source->finished)
		source->finished = changed = true;
}

/* Gives back to `source` the room of what the application of `target` has read. */
static void release(struct relay_side *source)
{
	uint64_t read = *other_of(source)->channel.read - *source->channel.received;
	uint64_t len = read < source->held ? read : source->held;

	if (!len)
		return;
	*source->channel.received += len;
	source->held -= len;
	changed = true;
	if (*source->channel.wanted)
		ring(source);
}

/* Asks the kernel about ends whose process has left. */
static void look_for_gone(void)
{
	bool one = has_gone(&sides_of[0]), other = has_gone(&sides_of[1]);

	if (one && other)
		drop();
}

static void step(int which)
{
	switch (which) {
	case HAND_ON: hand_on(); break;
	case PUMP:
	case PUMP_BACK: pump(&sides_of[which - PUMP], &sides_of[1 - (which - PUMP)]); break;
	case RELEASE:
	case RELEASE_BACK: release(&sides_of[which - RELEASE]); break;
	case RECALL:
	case RECALL_BACK: recall_goes_on(&sides_of[which - RECALL], &sides_of[1 - (which - RECALL)]); break;
	case HEAR:
	case HEAR_BACK: hear(&sides_of[which - HEAR]); break;
	default: look_for_gone();
	}
	bool over = (sides_of[0].end_told && sides_of[1].end_told) || (is_closed(&sides_of[0]) && is_closed(&sides_of[1]));
	if (over && !lost)
		drop();
}

/* What the applications say has changed since the last look. */
static bool news(void)
{
	static struct said {
		struct channel_side words;
		uint64_t tail, read;
		bool orphan, client;
	} last[2];
	bool found = false;

	for (int i = 0; i < 2; i++) {
		const struct channel *channel = &sides_of[i].channel;
		struct said said;
		memset(&said, 0, sizeof(said));
		memcpy(&said.words, channel->remote, sizeof(said.words));
		said.tail = *channel->tail;
		said.read = *channel->read;
		said.orphan = connection[i]->tcp.orphan;
		said.client = is_client(i);
		found |= memcmp(&said, &last[i], sizeof(said)) != 0;
		last[i] = said;
	}
	return found;
}

/* TCP is dead for an application that still waits for bytes of the ring, which would be there by now: far.py, _check_dead().
 * The clock of that is for a network that swallows an end: nobody is to wait for it where the kernel tells all of them. */
static bool hopeless(void)
{
	bool found = false;

	for (int i = 0; i < 2; i++) {
		struct relay_side *side = &sides_of[i];
		const struct relay_side *from = &sides_of[1 - i];
		if (!(side->channel.remote->fin_seen & CHANNEL_SEEN_RESET))
			continue;
		if (!side->dead_at)
			side->dead_at = now + SETTLE_ENDED;
		found |= now >= side->dead_at && !is_closed(side) && !from->end_told && !round_over(from, side);
	}
	return found;
}

bool relay_can(void)
{
	if (!exists || lost || dead)
		return false;
	if (news())
		quiet = 0;
	return quiet != (1u << STEPS) - 1 || hopeless();
}

void relay_move(void)
{
	int which = (int)choose(STEPS);

	if (quiet == (1u << STEPS) - 1) {
		reset("link_lost");
		return;
	}
	while (quiet & 1u << which)
		which = (which + 1) % STEPS;
	changed = false;
	step(which);
	quiet = changed ? 0 : quiet | 1u << which;
}

void relay_leave(void)
{
	if (!exists || lost || dead || left)
		return;
	trace("    relay: leaves");
	left = true;
	for (int i = 0; i < 2; i++) {
		sides_of[i].channel.local->notice |= CHANNEL_DEMOTE;
		ring(&sides_of[i]);
	}
	quiet = 0;
}

void relay_dies(void)
{
	if (!exists || dead)
		return;
	dead = true;
	relay_liveness->count = 1;
	wake(relay_liveness, WAKES_ALL);
}

bool relay_recalls(int end)
{
	return exists && left && sides_of[end].frozen;
}

bool relay_excuses(void)
{
	return exists && dead;
}
