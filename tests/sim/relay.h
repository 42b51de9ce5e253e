/* relay.h - a provider between the two ends; see relay.c. */
#ifndef SIDESTEP_SIM_RELAY_H
#define SIDESTEP_SIM_RELAY_H

#include "sim.h"

struct relay_app { /* what an application has sent for its channel */
	struct object *doorbell, *page;
	uint32_t doorbell_index;
};

/* From now on it stands between: of each side the segment, and which place in it is the application's. */
void relay_open(struct object *const segments[2], const int places[2], const struct relay_app apps[2]);
/* A program of that end has another doorbell; `alone`: the others are nobody's. */
void relay_hears_bell(int end, struct relay_app app, uint64_t word, bool alone);
bool relay_can(void);
void relay_move(void);
void relay_leave(void); /* the protocol goes */
void relay_dies(void);
bool relay_recalls(int end); /* it has left, and wants bytes of that end again, which who is killed then cannot send */
bool relay_excuses(void); /* it may have lost bytes, or is weaker than a shared segment: docs/internals/switch.md */
extern bool relay_rounds; /* a direction that went back may go to the ring again */
extern struct object *relay_liveness, *relay_doorbell, *relay_page;

#endif
