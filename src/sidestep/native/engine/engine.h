/*
 * engine.h - carries ordinary messages of connections between hosts, in a thread that never runs Python.
 *
 * Python sets a connection up and *lends* it while nothing unusual goes on: its counters (`struct engine_record`), both ends of
 * its wire, and the channel of its application. The engine moves bytes from the ring to the wire and from the wire to the ring. It knows one
 * SDP message (Data without flags), and two words of the link (DATA and READ). At anything else it *gives the connection
 * back*, between two messages: what it has not taken is found anew by Python, which is the reference for all of it.
 *
 * At any moment one of the two has the connection. Both take the engine's lock to change that, so Python may take a
 * connection back at any time.
 *
 * The rules of SDP here are those of sdp/flow.py and sdp/outgoing.py, those of the link those of carry/remote_relay.py.
 */
#ifndef SIDESTEP_ENGINE_H
#define SIDESTEP_ENGINE_H

#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "channel.h"
#include "doorbell.h"
#include "framing.h"

/* Why a connection is given back. lending.py has the names. */
enum engine_reason {
	ENGINE_KEPT,    /* it is not */
	ENGINE_ASKED,   /* Python has taken it */
	ENGINE_WORDS,   /* the application has said something */
	ENGINE_MESSAGE, /* so has the other host, or it broke a rule */
	ENGINE_ENDED,   /* the other host has ended the wire */
	ENGINE_BROKEN,  /* the wire is broken, by `error` */
	ENGINE_COUNTS,  /* the application's counts are impossible */
	ENGINE_CREDIT,  /* it waits for credit that does not come */
	ENGINE_SMALL,   /* the other host's buffers are small for what there is to send */
	ENGINE_MEMORY,  /* there is none */
	ENGINE_SILENT,  /* the other host acknowledges nothing */
	ENGINE_HOT,     /* so much goes out that the application's ring is worth pinning */
};

/* Whom to wake when something has been put into a channel, or taken out. */
struct engine_peer_doorbell {
	const _Atomic uint64_t *word;
	_Atomic uint64_t *rung;
	int fd;
};

struct rc_loaned;
struct verbs_qp;

/* What carries messages: one of these. */
struct engine_way {
	struct verbs_qp *verbs; /* a device of the kernel, or NULL */
	struct rc_loaned *rc;     /* RoCEv2, or NULL: iWARP by TCP */
	struct framing_in *in;
	struct framing_out *out;
	int fd;
};

struct engine;
struct engine_loan;

struct engine *engine_new(void); /* NULL with errno */
void engine_free(struct engine *engine); /* everything was taken back */

/* Readable once something was given back; engine_clear_notify() ends that. */
int engine_fd(const struct engine *engine);
void engine_clear_notify(struct engine *engine);

/* The doorbell that applications ring: its word, and a set that tells its edges. NULL: none any more. */
int engine_doorbell(struct engine *engine, _Atomic uint64_t *word, int wait_fd);

/* Where one application names the channels with news. -ENOMEM */
int engine_feed_add(struct engine *engine, const struct hint_ring *hints, uint64_t *seen);
void engine_feed_remove(struct engine *engine, const struct hint_ring *hints);

/* Channels with news that are not lent, at most `len`: *all if there may be others. */
size_t engine_news(struct engine *engine, uint32_t *numbers, size_t len, bool *all);

/*
 * What is lent stays where it is, alive, until it was given back. `words` are the application's that Python has acted on: once
 * they differ, it is given back. NULL with errno.
 */
struct engine_loan *engine_lend(struct engine *engine, const struct engine_record *record, struct channel_end *end,
                                const struct channel_side *words, const struct engine_peer_doorbell *doorbell,
                                uint32_t number, const struct engine_way *way, void *user);

/* Takes it back, if it is not given back yet, and frees it. Why it was; *error is that of ENGINE_BROKEN. */
enum engine_reason engine_take(struct engine *engine, struct engine_loan *loan, struct engine_record *record,
                               int *error);

/* The user of a loan that has been given back, and that Python has still to take; NULL: there is none. */
void *engine_returned(struct engine *engine);

/* A copy of what it is now. */
void engine_look(struct engine *engine, const struct engine_loan *loan, struct engine_record *record);

/*
 * One turn: what is ready is served once. Waits for something at most so long, in milliseconds; -1: until something comes.
 * Whether anything was. The thread does nothing else.
 */
bool engine_step(struct engine *engine, int timeout_ms);
int engine_start(struct engine *engine, const cpu_set_t *cpus); /* NULL: where it may run anyway */

#endif
