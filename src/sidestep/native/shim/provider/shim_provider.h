/* shim_provider.h - what the files share that talk to the provider. */
#ifndef SIDESTEP_SHIM_PROVIDER_H
#define SIDESTEP_SHIM_PROVIDER_H

#include "shim.h"

#define PENDING_MAX 64 /* offers and claims of this process with the provider; more wait for a later call */
#define OFFER_FDS_MAX 5 /* the socket's duplicate, a UDP socket, segment, doorbell, doorbell page */
/* Peers at other addresses: in another namespace of this host, or on another host. */
#define WELCOME_FAR (WELCOME_PATH | WELCOME_REMOTE)

#define LATENCY_NS 100000000ll /* time between two looks at the gain of a way to another host */

#define STAYS_BACK_NS 1000000000ll /* time before a connection that went back to TCP may return */
#define TURNS_LOOKED_AT 256 /* a conversation by ring is judged by so many turns at least */

extern struct provider {
	_Atomic int fd; /* -1: there is no connection */
	_Atomic uint32_t serial; /* one more with each connection, and in each child */
	_Atomic uint32_t wants; /* WELCOME_*, once there is a provider */
	_Atomic bool answered; /* `wants` is known, or there is no provider */
	_Atomic bool introduced; /* true if it knows this process */
	bool welcomed;
	_Atomic bool other_layout; /* an answer: it does not serve our layout */
	const struct registry_header *_Atomic registry; /* NULL: no provider, or none that has answered yet */
	_Atomic uint32_t registry_epoch; /* one more with each provider: buckets are of a registry */
	uint64_t tokens;
	_Atomic uint32_t lost; /* number of providers that have gone; their figures of gains count no more */
} provider;

/* Reason why there is none to ask. */
static inline enum reason_code no_provider(void)
{
	return word_load(provider.other_layout) ? REASON_PROVIDER_LAYOUT : REASON_NO_PROVIDER;
}

/* CLOCK_MONOTONIC as it was a few milliseconds ago: costs next to nothing. */
static inline int64_t coarse_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
	return now.tv_sec * 1000000000ll + now.tv_nsec;
}

/* ---- shim_provider.c: shim_lock held ---- */
int rpc_send_over(int line, struct rpc_msg *record, const int *fds, int fds_len); /* no lock needed */
bool rpc_send(struct rpc_msg *record, const int *fds, int fds_len);
bool rpc_up(void);
struct conn *pending_take(uint64_t token);
bool pending_add(struct conn *conn);
void refused(struct conn *conn, enum reason_code reason);
void let_go(struct conn **done, int done_len);
void rpc_lost(void);
void provider_after_fork(void);

/* ---- shim_answer.c: guarded by shim_lock ---- */
#define COMMANDS_MAX 64 /* commands of the provider that are kept at a time */
extern struct command {
	uint16_t type;
	uint64_t slot_generation;
	uint8_t arena_id[16];
	uint8_t segment_id[16]; /* RPC_SERVE */
	struct new_doorbell {
		int fds[2];
		uint64_t number;
		uint32_t index;
		uint8_t id[16];
	} new_doorbell;
} commands[COMMANDS_MAX]; /* received and not run yet */
extern _Atomic int commands_len;
void guests_join(void);
void rpc_given(void);

#define ASKS_MAX 32 /* questions of this process at a time; one more is answered as without a provider */
/*
 * Questions of explicit sockets, whose calls wait for the answer. The thread that reads an answer stores it here, and the
 * waiting one looks. An entry without a waiter (a signal handler jumped out) is free when its time is up.
 */
extern struct ask {
	uint64_t token; /* 0: free */
	int64_t deadline;
	uint32_t serial; /* serial of the connection by which it was asked: the answer is lost with that */
	bool answered;
	struct rpc_answer answer;
} asks[ASKS_MAX];
extern bool
	asks_stalled; /* a call has waited in vain, and nothing has come since: others do not wait if they can do without */

struct conn *rpc_receive(bool *more);
void answers_after_fork(void);

void late_look(struct conn *conn); /* no lock held */

/* ---- shim_late.c: shim_lock held ---- */
#define LATE_FDS 4
struct late {
	struct conn *conn;
	struct rpc_msg record;
	int fds[LATE_FDS];
	int fds_len;
};
extern _Atomic int late_len; /* answers that are kept until their connection is no other process's */
bool late_keep(struct conn *conn, const struct rpc_msg *record, int *fds, int fds_len);
bool late_take(const struct conn *conn, struct late *taken);
bool late_drop(const struct conn *conn);
void late_close(const struct late *mine);
void late_after_fork(void);

/* ---- shim_new_doorbell.c ---- */
void new_doorbells_look(void); /* no lock held */
void new_doorbell_received(struct conn *conn, const struct new_doorbell *new_doorbell); /* takes over the descriptors */
void new_doorbells_before_fork(void); /* shim_lock held: more programs may come to share connections */
int new_doorbell_settle(struct conn *conn); /* no lock held: the eventfd that the peer rings */
bool relay_learns(struct conn *conn, int line); /* likewise no lock held */

/* ---- shim_rpc.c, no lock held ---- */
int rpc_line(void); /* a copy of the connection to a provider that knows us, to be closed; -1: there is none */

/* ---- shim_offer.c ---- */
bool offer_missing(struct conn *conn); /* an accepting end for which none has come */
void describe_traffic(const struct conn *conn, struct rpc_msg *record);
void count_traffic(struct conn *conn);
bool offer_bearable(struct conn *conn, int fd); /* true if a waiter would be seen by the shim */
void offer_make(struct conn *conn, int fd); /* or claims; its addresses are known, and no lock is held */

#endif
