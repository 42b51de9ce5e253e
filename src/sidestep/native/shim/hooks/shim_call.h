/* shim_call.h - what a receive and a send have in common, and what works on the rings in place with them. */
#ifndef SIDESTEP_SHIM_CALL_H
#define SIDESTEP_SHIM_CALL_H

#include "shim_spin.h"
#include "shim_switch.h"

/* results of rx_step and tx_step */
enum step { STEP_DONE, STEP_AGAIN, STEP_EMPTY, STEP_END, STEP_ERROR, STEP_KERNEL, STEP_CLOSED };

/* The other results of recvmsg(), such as times of arrival: only the kernel knows them, so only TCP's bytes bring them. */
struct beside {
	void *control;
	size_t room, len;
	int flags;
};

/* A receive or a send, until it returns. */
struct call {
	struct conn *conn;
	const struct iovec *iov;
	int fd; /* becomes the one under which the socket lives on when it is closed meanwhile */
	int iov_len;
	int flags;
	int saved; /* errno before the call: as it is after one that succeeds */
	size_t total, done;
	size_t seen; /* bytes that a look (MSG_PEEK) has found before it waits for more */
	ssize_t result;
	struct beside *beside; /* NULL: nobody asks */
	bool look; /* the native socket is asked before a receive says that there is nothing */
	bool broken; /* a send has nobody to send to: SIGPIPE */
	bool blocks; /* the socket does */
	bool unasked; /* answer of a socket that does not block, known from before */
	bool started; /* true if it has waited: `clock` runs, and it is counted among conn->waiters */
	bool counted; /* `clock` knows which signals are from before the call */
	struct wait_clock clock;
};

enum turn { TURN_OVER, TURN_AGAIN };

static inline size_t iov_total(const struct iovec *iov, int iov_len)
{
	size_t total = 0;

	for (int i = 0; i < iov_len; i++)
		total += iov[i].iov_len;
	return total;
}
static inline struct call call_of(struct conn *conn, int fd, const struct iovec *iov, int iov_len, int flags)
{
	struct call call;

	call.conn = conn;
	call.iov = iov;
	call.fd = fd;
	call.iov_len = iov_len;
	call.flags = flags;
	call.saved = errno;
	call.total = iov_total(iov, iov_len);
	call.done = 0;
	call.beside = NULL;
	call.look = call.broken = call.blocks = call.unasked = call.started = call.counted = false;
	return call;
}
static inline enum turn call_over(struct call *call, ssize_t result, int error)
{
	call->result = result;
	call->saved = error;
	return TURN_OVER;
}
static inline ssize_t call_end(const struct call *call)
{
	if (unlikely(call->started))
		atomic_fetch_sub(&call->conn->waiters, 1);
	errno = call->saved;
	return call->result;
}
enum turn call_wait(struct call *call, int way, size_t space);
void wait_clock_limit(struct wait_clock *clock, int fd, int way);
bool call_blocks(struct call *call, int way);
enum turn call_elsewhere(struct call *call, int way);
bool would_not_block(int fd, int flags);
void call_count_signals(struct call *call);
int iov_from(const struct iovec *iov, int iov_len, size_t skip, size_t most, struct iovec out[64]);
bool iov_refused(const struct iovec *iov, int iov_len, int flags);
void rx_finish(struct conn *conn);
bool reserved_by_self(const struct conn *conn);
#define PAST_MIN 16384u /* bytes from which on a message gains by a copy past the caches, and no answer comes later */
/* ---- shim_steps.c ---- */
#define TCP_STEP ((size_t)256 << 10) /* bytes after which a long call by TCP looks for its peer */
size_t step_size(int fd, size_t left);
bool step_is_last(int fd, uint64_t signals);
bool sent_by_steps(int fd, size_t n, int flags);
ssize_t kernel_send_steps(struct conn *conn, int fd, const uint8_t *bytes, size_t n, int flags);
/* ---- shim_message.c ---- */
void message_received(struct conn *conn, int fd, struct msghdr *message, int flags);
void message_errors_received(struct conn *conn, const struct msghdr *message);
ssize_t message_errors(struct conn *conn, int fd, struct msghdr *message, int flags);
void message_copied(struct conn *conn);
/* Hands the result of a send by TCP through. Before its thread is taken for out of the kernel: see zerocopy_in_kernel(). */
static inline ssize_t zerocopy_counted(struct conn *conn, int flags, ssize_t n)
{
	if (unlikely(flags & MSG_ZEROCOPY) && n > 0 && slot_has(conn->slot, SLOT_ZEROCOPY))
		word_add(conn->slot->zerocopy_sent, 1);
	return n;
}
enum step tx_room_look(struct conn *conn, int fd, size_t wanted, size_t *room);

#endif
