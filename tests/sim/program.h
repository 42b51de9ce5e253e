/* program.h - what the programs do. */
#ifndef SIDESTEP_SIM_PROGRAM_H
#define SIDESTEP_SIM_PROGRAM_H

#include "judge.h"

enum way { BY_RECV, BY_POLL, BY_LEVEL, BY_EDGE, BY_EDGE_ONESHOT, BY_LEVEL_ONESHOT, WAYS };

/* Which read is the last before it waits again: one that gets nothing, a short one, or as nginx does; see reads_on(). */
enum until { UNTIL_NOTHING, UNTIL_SHORT, UNTIL_COUNT, UNTILS };

/* A process at one side of the connection. */
struct program {
	struct side *side;
	int index, process; /* of its end; of its side: 0, and the child 1 */
	/* how it is */
	enum way way;
	enum until until; /* an edge-triggered reader */
	bool nonblock;
	uint32_t operations;
	bool floods,
		lazy; /* sends as much as there is room for, and ends by a reset; reads nothing before its last operation */
	bool stubborn; /* reads on after a send has failed */
	void *library;
	/* how far it is */
	int fd, epfd;
	int line; /* by which a child is given its socket; 0: there is none */
	bool awaits; /* that */
	bool hands_over; /* is about to send it */
	int parents_set; /* a child has inherited it, and does not use it */
	int outer; /* a set that has its own in it; 0: there is none */
	bool by_signal; /* the kernel tells it of bytes, by SIGIO */
	uint64_t signals; /* so many it has had */
	bool ready; /* it has its socket */
	bool stranger; /* without a shim */
	bool passing; /* is about to hand the socket on */
	bool no_more; /* it sends nothing new */
	bool closed; /* the socket, or is gone */
	uint32_t events; /* what its set is asked for */
	bool hung_up; /* told of POLLHUP */
	bool readable; /* has been told, and has not read until its last */
	int counted; /* by FIONREAD since it was told, and not read yet; -1: it has not asked */
	bool owes_reset; /* its call is to tell of one, as another process of its side was told the end */
	bool told_end, told_reset, read_fails, ending; /* ending: it was told of an end: a short read is not the last */
	size_t read_after; /* see struct chunk */
	bool reading; /* is in such a call */
	size_t asks; /* it, for so much at most */
	bool between; /* two calls */
	bool alone; /* nobody else of its side is in a read since it began its own */
	size_t wanted; /* by MSG_WAITALL */
	bool asleep; /* where no shim hears anything, until nothing else moves */
	short waits_for; /* POLL*, while it waits for as long as it takes */
	uint32_t naps; /* meanwhile, with nothing else that could move */
};
extern struct program programs[ENDS];
extern uint64_t operations;
enum {
	SEEN_PROMOTED,
	SEEN_BACK,
	SEEN_AGAIN,
	SEEN_PASSED,
	SEEN_RESET,
	SEEN_FORKED,
	SEEN_SHARED,
	SEEN_DIED,
	SEEN_RELAYED,
	SEEN_LOST,
	SEEN_ROUNDS,
	SEEN_TRAVELLED,
	SEEN_GIVEN,
	SEEN_UNSEEN, /* a socket was closed unseen */
	SEEN_ASLEEP, /* while its peer travelled, or passed its socket on */
	SEEN_CONFINED,
	SEEN
};
extern bool seen[SEEN]; /* in this run */
extern uint32_t order_one_in; /* operations: the provider demotes or promotes; 0: as seldom as other rarer things */
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
	MAY_ANY = 1 << 8,
	MAY_DIE = 1 << 9, /* in the midst of a call */
	MAY_FORK = 1 << 10,
	MAY_RELAY = 1 << 11, /* the provider stands between */
	MAY_LEAVE = 1 << 12, /* it lets the kernel alone tell it of bytes */
	MAY_TRAVEL = 1 << 13, /* by exec, with the shim */
	MAY_SLEEP = 1 << 14,
	MAY_GIVE = 1 << 15, /* by SCM_RIGHTS, to who has the shim */
	STIMULI = 1 << 16,
};

void program_run(struct end *end);
void program_dies(void); /* the current one, where it is */
void program_dies_at(int end); /* likewise another, which has been interrupted */
void exec_done(char *const env[]) __attribute__((noreturn)); /* execve() has come to the kernel */
#define EXEC_VARIABLE "SIDESTEP_TRAVEL"
char *exec_variable(void); /* what it is in the environment of the current end; NULL: it is not there */
void program_do(struct program *mine, const char *command);
bool side_no_more(const struct side *side); /* none of its processes sends anything new */
void program_idle(void); /* nothing can move but the clock: is it right so? */
void programs_check(void); /* all is over */

#endif
