/* program.h - what the two programs do, and what must come of it. */
#ifndef SIDESTEP_SIM_PROGRAM_H
#define SIDESTEP_SIM_PROGRAM_H

#include "sim.h"

enum way { BY_RECV, BY_POLL, BY_LEVEL, BY_EDGE, BY_EDGE_ONESHOT, BY_LEVEL_ONESHOT, WAYS };

struct program {
	/* how it is */
	enum way way;
	bool until_short; /* an edge-triggered reader takes a short read for the last */
	bool nonblock;
	uint32_t operations;
	void *library;
	/* how far it is */
	int fd, epfd;
	uint64_t offered, sent, received; /* sent, with and without what a call at work may have sent; received */
	bool shut_wr, shut_rd, closing, killed, aborted;
	bool passed, stranger; /* is being passed on; others without a shim have it */
	bool hostile;          /* it has written what no shim does */
	bool no_more;          /* it sends nothing new */
	uint32_t events;       /* what its set is asked for */
	bool hung_up; /* told of POLLHUP */
	bool told_end, told_reset, ending; /* ending: it was told of an end: a short read is not the last */
	short waits_for; /* POLL*, while it waits for as long as it takes */
};
extern struct program programs[2];
extern uint64_t operations;
enum { SEEN_PROMOTED, SEEN_BACK, SEEN_AGAIN, SEEN_PASSED, SEEN_RESET, SEEN };
extern bool seen[SEEN]; /* in this run */
extern uint32_t stimuli; /* bits: which of the rarer ones may come */
enum {
	MAY_ORDER = 1 << 0,
	MAY_SHUT = 1 << 1,
	MAY_CLOSE = 1 << 2,
	MAY_ABORT = 1 << 3,
	MAY_KILL = 1 << 4,
	MAY_PASS = 1 << 5,
	MAY_EXEC = 1 << 6,
	MAY_LOSE = 1 << 7, /* the provider */
};

void program_run(struct end *end);
void exec_done(void) __attribute__((noreturn)); /* execve() has come to the kernel */
void program_do(struct program *mine, const char *command);
void program_idle(void); /* nothing can move but the clock: is it right so? */
void programs_check(void); /* all is over */

#endif
