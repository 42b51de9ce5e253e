/* shim_close.c - the end of a descriptor, and of the connection with its last one. */
#include "shim_process.h"
#include "shim_tcp_only.h"
#include "shim_travel.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <linux/sockios.h>
#include <sys/ioctl.h>

#define LINGER_TURN_MS 5 /* interval at which a close() that lingers looks if all has gone out */

/* SO_LINGER: waits as the kernel's close() would. */
static void linger_out(int fd, int seconds)
{
	int64_t deadline = deadline_after(seconds * 1000000000ll);
	struct tcp_info info;

	while (now_ns() < deadline && option_get(fd, IPPROTO_TCP, TCP_INFO, &info, sizeof(info)) &&
	       (info.tcpi_state == TCP_FIN_WAIT1 || info.tcpi_state == TCP_CLOSING || info.tcpi_state == TCP_LAST_ACK))
		raw_poll(NULL, 0, LINGER_TURN_MS);
}

/*
 * The last holder closes while a duplicate of the socket is still in the provider's queue. Until the provider has read it,
 * the kernel does not see the last close, so this does what tcp_close() would do.
 */
static void close_delegated(struct conn *conn, int fd, bool exiting)
{
	struct linger how = {0};
	int unread = 0;

	/*
	 * a call asleep on the socket lives on, and so does the stream; see close_deferred(). A process that was given it may
	 * have it.
	 */
	if (atomic_load(&conn->managed) || slot_has(conn->slot, SLOT_PASSED) || word_load(conn->slot->rx_kernel_waiters) ||
	    word_load(conn->slot->tx_kernel_waiters) || !rpc_delegated(conn) || !conn_alone(conn))
		return;
	option_get(fd, SOL_SOCKET, SO_LINGER, &how, sizeof(how));
	if ((real.ioctl(fd, SIOCINQ, &unread) == 0 && unread) || (how.l_onoff && !how.l_linger)) {
		tcp_reset(fd); /* RFC 1122 4.2.2.13 */
		return;
	}
	if (real.shutdown(fd, SHUT_RDWR) == 0 && how.l_onoff && !exiting)
		linger_out(fd, how.l_linger);
	shim_log("fd %d ended for the duplicate that the provider has not read", fd);
}

/*
 * A call that sleeps on a socket outlives close() in the kernel: it still receives, and the peer sees the end when it
 * returns. True: there is such a call, and conn_destroy() announces the close.
 */
static bool close_deferred(struct conn *conn, int fd)
{
	full_fence(); /* fence between removing the number and looking for waiters; they do it the other way round */
	if (!atomic_load(&conn->managed) || !atomic_load(&conn->waiters))
		return false;
	int copy = own_fd(real.fcntl64(fd, F_DUPFD_CLOEXEC, 0));
	if (copy < 0)
		return false;
	atomic_store(&conn->deferred_fd, copy);
	return true;
}

void conn_forget(int fd, bool closing)
{
	struct conn *conn = conn_get(fd);

	if (!conn)
		return;
	closing = closing && !((conn->managed || conn->delegated) && conn_fd_stale(conn, fd));
	if (closing && unlikely(word_load(passes_open)) && atomic_load(&conn->fds) == 1)
		pass_settle(conn, fd);
	const bool last = atomic_fetch_sub(&conn->fds, 1) == 1; /* no thread joins from now on; see conn_join() */
	if (closing && !last && set_names(conn, fd))
		conn_demote(conn, fd, REASON_EPOLL_UNSUPPORTED, false); /* no call can change that registration any more */
	file_put(fd, closing && atomic_load(&conn->managed) ? &closing_file : NULL);
	if (closing && last && word_load(conn->slot->holders) <= 2) /* this process, and one that was given it */
		conn_abandon(conn, fd, false);
	if (closing && last && !close_deferred(conn, fd))
		announce_close(conn, fd);
	if (closing && last && unlikely(atomic_load(&conn->delegated)))
		close_delegated(conn, fd, false);
	word_store(conn->stale_fd, 0);
	if (closing && last && unlikely(word_load(conn->in_messages) || slot_has(conn->slot, SLOT_PASSED)) &&
	    has_members(conn))
		set_conn_goes(conn, fd);
	if (has_members(conn))
		set_conn_closed(conn, closing ? fd : -1, last); /* else the number is another's there, too */
	if (last) {
		if (word_load(conn->slot->state) == STATE_OFFERED)
			rpc_withdraw(conn);
	} else if (word_load(conn->slot->fd) == (uint32_t)fd) {
		word_store(conn->slot->fd, (uint32_t)-1);
	}
	conn_unref(conn);
}

bool conn_drop_stale_found(struct conn *conn, int fd)
{
	KEEP_ERRNO;

	word_store(conn->stale_fd, 0); /* the socket may have become the connection's again */
	if (!conn_fd_stale(conn, fd))
		return false;
	shim_log("fd %d is another file's: it was closed unseen", fd);
	conn_forget(fd, false);
	return true;
}

_Atomic bool kernel_strict;

/*
 * True if the connection's ring holds bytes that no call is needed for. They have arrived: a peer that sleeps need not send
 * them again. Behind the last of them the kernel has all; see recv_strictly().
 */
static bool ring_read_on(struct conn *conn, int fd, enum reason_code reason)
{
	if (!word_load(kernel_strict) || !conn->managed || conn_relayed(conn) || !rx_by_ring(conn->slot) ||
	    channel_rx_peek(&conn->channel) == 0)
		return false;
	conn_leave(conn, fd, reason);
	return true;
}

/* This process forgets the connection, and has it until it ends. It reads no ring meanwhile. */
static void forget_confined(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;

	atomic_fetch_add(&slot->holders, 1);
	const bool known = holder_put(slot, 0, shim_pid);
	if (!known) { /* nobody would learn of the end */
		slot_set(slot, SLOT_PIN);
		atomic_fetch_sub(&slot->holders, 1);
	}
	conn_forget(fd, false);
	if (known)
		holder_estrange(slot, true);
}

/*
 * Hands all connections to the kernel, for good, with the bytes in their rings: a thread that we must not or cannot serve
 * makes calls on them. They leave the table, but for those that a set or a lease has. `strict`: that thread can make no other
 * calls than read(2) and write(2), but these come by here.
 */
void conns_release(enum reason_code reason, bool strict)
{
	if (!fd_table_len)
		return;
	word_store(kernel_strict, strict);
	tcp_only_begin(reason);
	config.opt_in = true;
	bool kept = false;
	for (int pass = 0; pass < 2; pass++)
		for (uint32_t fd = 0; fd < atomic_load(&fd_end); fd++) {
			HELD conn = conn_hold((int)fd);
			if (!conn)
				continue;
			if (pass == 0 && !ring_read_on(conn, (int)fd, reason)) {
				conn_demote(conn, (int)fd, reason, true);
				conn_abandon(conn, (int)fd, true);
			}
			if (pass == 0)
				continue;
			if (conn->managed) {
				conn_check(conn, (int)fd); /* the other end may be ours as well, and has asked for its bytes */
				conn_flush(conn, (int)fd);
			}
			if (has_members(conn) || conn->explicit || slot_has(conn->slot, SLOT_LEAVES)) {
				slot_set(conn->slot, SLOT_PIN); /* calls on it are counted, and may be forbidden */
				kept = true;
				continue;
			}
			const bool stays = slot_has(conn->slot, SLOT_CONFINED) && !slot_has(conn->slot, SLOT_PIN);
			if (stays && atomic_load(&conn->fds) == 1)
				forget_confined(conn, (int)fd);
			else
				conn_forget((int)fd, false);
		}
	if (strict && !kept) /* a filter may end a thread that calls the provider */
		word_store(rings_ever, false);
}

void conn_family_exit(void)
{
	for (uint32_t fd = 0; fd < atomic_load(&fd_end); fd++) {
		struct conn *conn = conn_get((int)fd);
		if (conn && (int)fd == conn_fd(conn)) {
			bool ours = !((conn->managed || conn->delegated) && conn_fd_stale(conn, (int)fd));
			if (ours && unlikely(word_load(passes_open)))
				pass_settle(conn, (int)fd);
			if (ours)
				announce_close(conn, (int)fd);
			if (ours && unlikely(atomic_load(&conn->delegated)))
				close_delegated(conn, (int)fd, true);
			/* Threads of ours may still be at work with the slot: slots_reap() frees it once they are gone. */
			if (foreign_pids)
				atomic_fetch_sub(&conn->slot->holders, 1);
		}
	}
}
