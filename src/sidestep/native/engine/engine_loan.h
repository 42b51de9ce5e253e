/* engine_loan.h - one connection that the engine has. */
#ifndef SIDESTEP_ENGINE_LOAN_H
#define SIDESTEP_ENGINE_LOAN_H

#include "engine.h"
#include "engine_wire.h"

#define LOAN_STARVED_MS 20 /* that payload waits for credit before Python asks for it; see sdp/outgoing.py */

struct engine_loan {
	struct engine_loan *next_ready, *next_returned, *next_number, *next_polled;
	struct engine_record record;
	union {
		struct wire wire;
		struct wire_stream stream;
		struct wire_datagram datagram;
		struct wire_verbs verbs;
	} by;
	bool streams; /* it is the second */
	struct channel_end *end;
	struct channel_side words; /* the application's, as Python has read them */
	struct engine_peer_doorbell doorbell;
	uint32_t number; /* of its channel, in the hint rings */
	void *user;
	enum engine_reason reason; /* ENGINE_KEPT while the engine has it */
	bool ready, more;          /* more: it has had its share of the turn */
	bool polled;    /* its wire is looked at in each turn */
	uint32_t looks;            /* since something was to be done */
	int64_t starved_ns;        /* since when it waits for credit; 0: it does not */
};

void loan_begin(struct engine_loan *loan, const struct engine_record *record, struct channel_end *end,
                const struct channel_side *words, const struct engine_peer_doorbell *doorbell, uint32_t number,
                const struct engine_way *way, void *user);
/* False: there was no memory for what waits on the wire, which is broken now. */
bool loan_end(struct engine_loan *loan);

/* What there is to do, up to its share of a turn. ENGINE_KEPT, or why it has to be given back. */
enum engine_reason loan_turn(struct engine_loan *loan, int64_t now_ns);

/* When it has to have a turn in any case; 0: never. */
int64_t loan_deadline(const struct engine_loan *loan);

int64_t loan_clock(void);

#endif
