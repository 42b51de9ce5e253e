/*
 * shim_call.h - what a receive and a send have in common, and what works on the rings in place with them.
 */
#ifndef SIDESTEP_SHIM_CALL_H
#define SIDESTEP_SHIM_CALL_H

#include "shim_switch.h"

/* what rx_step and tx_step found */
enum step { STEP_DONE, STEP_AGAIN, STEP_EMPTY, STEP_END, STEP_ERROR, STEP_NATIVE, STEP_CLOSED };

size_t iov_total(const struct iovec *iov, int iov_len);
int64_t timeval_ns(const struct timeval *limit);
bool would_not_block(int fd, int flags);
int iov_from(const struct iovec *iov, int iov_len, size_t skip, size_t most, struct iovec out[64]);
bool iov_refused(const struct iovec *iov, int iov_len, int flags);
void rx_finish(struct conn *conn);
bool reserved_by_self(const struct conn *conn);
void tx_cpu(struct conn *conn);
enum step tx_room_look(struct conn *conn, int fd, size_t wanted, size_t *room);

#endif
