/* shim_tcp_only.h - whether a process keeps to TCP. */
#ifndef SIDESTEP_SHIM_TCP_ONLY_H
#define SIDESTEP_SHIM_TCP_ONLY_H

#include "shim.h"

extern _Atomic uint32_t tcp_only_reason; /* reason why this process keeps to TCP; 0: it does not */
void tcp_only_begin(enum reason_code reason);
enum reason_code tcp_only_why(void); /* looks, too; before a connection is offered */
void uring_unseen(void); /* called for an io_uring whose entries do not come by here; no lock may be held */
bool uring_doubted(void); /* true if there is one, and it may have sockets as far as the policy knows */
bool ring_looked_through(int fd, unsigned enter_flags); /* shim_ring.c: io_uring_enter(2) of a ring of liburing */
void ring_register_unseen(
	unsigned operation); /* shim_ring.c: io_uring_register(2) by a call that names no ring of ours */
long raw_seccomp(long operation, long flags, long argument); /* shim_sandbox.c */

#endif
