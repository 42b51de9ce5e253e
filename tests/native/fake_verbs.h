/*
 * fake_verbs.h - a libibverbs whose devices are all of this process, and have no wire: for tests without RDMA.
 *
 * It is built as a shared library with the names that Python calls (rdma/kernel/libraries.py), and into C tests. Queue
 * pairs that were joined by number reach each other. It is strict where a device would be silent: every entry must lie in
 * memory that is registered under its key, a queue that runs over and an object that is destroyed while it is used end
 * the program. What is sent is read when it is delivered, not when it is posted, and completes in order. Of memory that it
 * only sends from it keeps the pages, as a device that pins them does: it goes on reading those if the owner gives them back.
 */
#ifndef SIDESTEP_FAKE_VERBS_H
#define SIDESTEP_FAKE_VERBS_H

#include "verbs_abi.h"

#define FAKE_DEVICES 2 /* fake0 has 127.77.0.1, fake1 127.77.0.2 */

/* enum ibv_wc_status */
enum { FAKE_LENGTH_ERROR = 1, FAKE_PROTECTION_ERROR = 4, FAKE_FLUSHED = 5, FAKE_REMOTE_REQUEST = 9, FAKE_RETRIES = 12 };

/* Messages wait, and what tells that they have arrived; of both, what waited goes on when it is set to 0. */
void fake_hold(int deliveries, int acknowledgements);
/* The next `count` calls of this kind ("post_send", "post_recv", "req_notify_cq", "poll_cq", "reg_mr") fail with that error. */
void fake_fail(const char *call, int error, int count);
/* A completion that nothing has brought about, for the receive posted first: to that queue pair. 0 or -errno */
int fake_receive(uint32_t qp_num, int status, int opcode, unsigned int flags, uint32_t byte_len);
/* Its connection is lost: what it sends now fails. */
int fake_break(uint32_t qp_num);
/* An asynchronous event of all contexts; of a queue pair unless its number is 0. */
int fake_event(int kind, uint32_t qp_num);
/* What there is: requests that were not completed, bytes registered, pages pinned for them, calls of a kind. */
uint64_t fake_count(const char *what);

#endif
