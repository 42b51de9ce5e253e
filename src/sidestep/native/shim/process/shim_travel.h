/* shim_travel.h - how a connection goes on in another program: the next of this process, or one that was given its socket. */
#ifndef SIDESTEP_SHIM_TRAVEL_H
#define SIDESTEP_SHIM_TRAVEL_H

#include "shim_switch.h"

struct traveller {
	uint64_t cookie;
	uint32_t slot, generation, side;
	bool taken; /* a connection stands for it in the next program */
	int segment_fd, remote_fd, remote_page_fd, doorbell_fd, liveness_fd; /* the last: -1 without a provider between */
	uint32_t remote_index;
	uint8_t remote_id[16];
};

/* ---- shim_travel.c ---- */
bool traveller_waits(struct conn *conn, int fd, uint64_t *cookie);
struct traveller traveller_by_tcp(const struct conn *conn, uint64_t cookie);
static inline bool has_ring(const struct traveller *of)
{
	return of->segment_fd >= 0;
}
bool traveller_can(struct conn *conn, uint32_t stays, int *line);
struct traveller traveller_of(const struct conn *conn);
void traveller_settle(struct traveller *of, struct conn *conn); /* no lock held */
bool traveller_take(struct traveller *of, struct conn_slot *slot, int fd, int line);

/* ---- shim_set_return.c ---- */
void set_conn_goes(struct conn *conn, int fd);
void set_conn_returned(struct conn *conn, int fd, bool taking);

/* ---- shim_receiver.c ---- */
#define TCP_ONLY_MARK "sidestep-plain" /* name of a file that programs have open which keep to TCP */
enum receiver {
	RECEIVER_UNKNOWN, /* a program without the shim may read what is sent here */
	RECEIVER_SHIM,
	RECEIVER_SELF, /* this process alone */
};
enum receiver receiver_of(int fd, unsigned long *other_end);
enum receiver receiver_again(unsigned long other_end);

/* ---- shim_rights.c ---- */
ssize_t rights_send(int fd, const struct msghdr *message, int flags);
ssize_t rights_receive(int fd, struct msghdr *message, int flags);
void rights_strand(const struct msghdr *message); /* called if it is sent by a call that is not rights_send() */
bool rights_among(const struct mmsghdr *messages, unsigned len);
bool rights_may_come(int fd, const struct mmsghdr *messages, unsigned len);

#endif
