/* shim_kernel_io.c - calls of connections that may still be promoted: what the kernel moves is counted. */
#include "shim_provider.h"
#include "shim_switch.h"

#define LARGE_CALL 8192 /* bytes */

static inline bool waiter_enter(struct conn *conn, _Atomic uint32_t *waiters)
{
	if (atomic_load_explicit(&conn->managed, memory_order_acquire))
		return false;
	bool mine = conn_mine(conn);
	word_count32(waiters, 1, mine);
	if (unlikely(atomic_load(&conn->managed))) {
		word_count32(waiters, UINT32_MAX, mine);
		return false;
	}
	return true;
}

bool kernel_rx_begin(struct conn *conn)
{
	return waiter_enter(conn, &conn->slot->rx_kernel_waiters);
}

bool kernel_tx_begin(struct conn *conn)
{
	return waiter_enter(conn, &conn->slot->tx_kernel_waiters);
}

/* The connection has been offered, or stays on TCP for a while. */
static void consider_again(struct conn *conn, int fd)
{
	if (unlikely(slot_has(conn->slot, SLOT_DEMOTED))) {
		rpc_listen();
		if (word_load(conn->message_ns))
			rpc_return(conn, fd);
	}
	if (unlikely(word_load(late_len)))
		late_look(conn);
}

/* Counts a call of `moved` bytes. A large one gains nothing by being one less: its bytes count, until a ring has been left. */
static void consider(struct conn *conn, int fd, ssize_t moved)
{
	if (slot_has(conn->slot, SLOT_PIN)) {
		if (unlikely(!word_load(conn->slot->local_port))) { /* pinned before it was connected: `ss` wants to name it */
			KEEP_ERRNO;
			conn_set_addresses(conn, fd);
		}
		return;
	}
	if (unlikely(word_load(rpc_pending)))
		rpc_poll();
	if (moved < LARGE_CALL || conn->backoff)
		word_store(conn->calls, word_load(conn->calls) + 1);
	if (word_load(conn->slot->state) == STATE_NATIVE)
		rpc_consider(conn, fd);
	else
		consider_again(conn, fd);
	conn_check_inherited(conn);
}

/* Counts what a native call has moved; its thread has left the kernel. */
static inline void kernel_count(struct conn *conn, _Atomic uint64_t *bytes, _Atomic uint64_t *messages,
                                _Atomic uint32_t *kernel_waiters, ssize_t moved)
{
	bool mine = conn_mine(conn);

	if (moved > 0) {
		word_count64(bytes, (uint64_t)moved, mine);
		word_store(*messages, word_load(*messages) + 1); /* two threads at once may count as one */
	}
	word_count32(kernel_waiters, UINT32_MAX, mine);
}

ssize_t kernel_rx_end(struct conn *conn, int fd, ssize_t result, int flags)
{
	struct conn_slot *slot = conn->slot;

	kernel_count(conn, &slot->rx_tcp_bytes, &slot->rx_tcp_msgs, &slot->rx_kernel_waiters,
	             flags & MSG_PEEK ? 0 : result);
	if (result > 0) {
		count_turn(slot);
		consider(conn, fd, result);
	} else if (result < 0 && unlikely(word_load(rings_ever))) { /* this may come back for ever, and never sleep */
		KEEP_ERRNO;
		rpc_listen_passing();
	}
	return result;
}

ssize_t kernel_tx_end(struct conn *conn, int fd, ssize_t result)
{
	struct conn_slot *slot = conn->slot;

	kernel_count(conn, &slot->tx_tcp_bytes, &slot->tx_tcp_msgs, &slot->tx_kernel_waiters, result);
	if (result > 0)
		consider(conn, fd, result);
	return result;
}
