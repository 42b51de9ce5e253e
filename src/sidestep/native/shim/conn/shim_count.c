/* shim_count.c - whether the kernel has counted the bytes that we have. */
#include "shim_switch.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <linux/sockios.h>
#include <sys/ioctl.h>

/* linux/tcp.h: libc's struct tcp_info ends before the byte counts, so they are read by the kernel ABI's offsets. */
enum { TCPI_STATE = 0, TCPI_BYTES_ACKED = 120, TCPI_BYTES_RECEIVED = 128, TCPI_SIZE = 136 };

#define RECOUNT_TURNS 100 /* Turns in which bytes arrive between two questions */

static bool tcp_info_get(int fd, uint8_t info[TCPI_SIZE])
{
	socklen_t len = TCPI_SIZE;

	return real.getsockopt(fd, IPPROTO_TCP, TCP_INFO, info, &len) == 0 && len == TCPI_SIZE;
}

static bool tcp_info_fin(const uint8_t info[TCPI_SIZE])
{
	uint8_t state = info[TCPI_STATE];

	return state != TCP_ESTABLISHED && state != TCP_FIN_WAIT1 && state != TCP_FIN_WAIT2;
}

static uint64_t tcp_info_u64(const uint8_t info[TCPI_SIZE], int offset)
{
	uint64_t value;

	memcpy(&value, info + offset, sizeof(value));
	return value;
}

/* Number of bytes that the kernel has given to readers. COUNT_DIFFERS: it does not say. */
static enum count rx_counted(int fd, uint64_t *bytes)
{
	uint8_t info[TCPI_SIZE];
	int before = 0, after = 0;

	if (real.ioctl(fd, FIONREAD, &before) < 0 || !tcp_info_get(fd, info) || real.ioctl(fd, FIONREAD, &after) < 0)
		return COUNT_DIFFERS;
	if (before != after || info[TCPI_STATE] == TCP_CLOSE) /* a reset may have come without a FIN, or behind one */
		return COUNT_UNSTABLE;
	*bytes = tcp_info_u64(info, TCPI_BYTES_RECEIVED) - (uint64_t)before - (tcp_info_fin(info) ? 1 : 0);
	return COUNT_EQUAL;
}

enum count rx_count(struct conn *conn, int fd)
{
	uint64_t read = 0;
	enum count count = rx_counted(fd, &read);

	return count == COUNT_EQUAL && read != word_load(conn->slot->rx_tcp_bytes) ? COUNT_DIFFERS : count;
}

/* Number of bytes that the kernel has taken from senders. */
static enum count tx_counted(const struct conn *conn, int fd, uint64_t *bytes)
{
	uint8_t info[TCPI_SIZE];
	int before = 0, after = 0;

	if (real.ioctl(fd, SIOCOUTQ, &before) < 0 || !tcp_info_get(fd, info) || real.ioctl(fd, SIOCOUTQ, &after) < 0)
		return COUNT_DIFFERS;
	if (before != after)
		return COUNT_UNSTABLE;
	uint64_t acked = tcp_info_u64(info, TCPI_BYTES_ACKED);
	if (conn->slot->role == ROLE_ACTIVE && acked > 0)
		acked--; /* the SYN */
	*bytes = acked + (uint64_t)before;
	return COUNT_EQUAL;
}

enum count tx_count(struct conn *conn, int fd)
{
	uint64_t sent = 0;
	enum count count = tx_counted(conn, fd, &sent);

	return count == COUNT_EQUAL && sent != word_load(conn->slot->tx_tcp_bytes) ? COUNT_DIFFERS : count;
}

/*
 * rx_lock held, of a process that died with it. Bytes that it had read by TCP and not counted are gone with it, as in the kernel.
 * Uncounted, nobody would ever reach the offset at which the ring goes on. An urgent mark hides from FIONREAD what is behind it.
 */
void rx_recount(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;
	struct pollfd urgent = {.fd = fd, .events = POLLPRI};
	enum count count = COUNT_UNSTABLE;
	uint64_t read = 0;
	KEEP_ERRNO;

	if (!conn->managed || !rx_consented(slot) || rx_is(slot, RX_OPENING) || rx_is(slot, RX_REOPENING) ||
	    conn_fd_stale(conn, fd))
		return; /* reads of others are at work, whose bytes are not counted yet; see rx_settled() */
	for (int turn = 0; turn < RECOUNT_TURNS && count == COUNT_UNSTABLE; turn++)
		count = rx_counted(fd, &read);
	if (count == COUNT_EQUAL && read > word_load(slot->rx_tcp_bytes) && raw_poll(&urgent, 1, 0) == 0)
		word_store(slot->rx_tcp_bytes, read);
}

/*
 * tx_lock held, of a process that died with it. What it had sent again of recalled bytes, and not counted, is not sent once more.
 * From the switch on TCP has had nothing but these.
 */
void tx_recount(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;
	enum count count = COUNT_UNSTABLE;
	uint64_t sent = 0;
	KEEP_ERRNO;

	if (!conn->managed || !tx_is(slot, TX_RESEND) || conn_fd_stale(conn, fd))
		return;
	for (int turn = 0; turn < RECOUNT_TURNS && count == COUNT_UNSTABLE; turn++)
		count = tx_counted(conn, fd, &sent);
	uint64_t again = sent - word_load(slot->tx_switch_offset);
	if (count != COUNT_EQUAL || sent < word_load(slot->tx_tcp_bytes) ||
	    again > atomic_load(conn->channel.own.tail) - atomic_load(&conn->channel.remote->rx_frozen))
		return;
	word_store(slot->tx_tcp_bytes, sent);
	word_store(slot->tx_resend, atomic_load(&conn->channel.remote->rx_frozen) + again);
}

/*
 * Both locks held, and this process alone has the connection. Our counts become the kernel's. COUNT_UNSTABLE: nothing is known yet,
 * as another thread may just be moving bytes; it adds them before it leaves the kernel. COUNT_DIFFERS: the kernel does not tell, or a
 * direction has ended by a call that was not seen.
 */
enum count counts_take(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;
	struct pollfd ended = {.fd = fd, .events = POLLRDHUP};
	uint64_t rx_before = word_load(slot->rx_tcp_bytes), tx_before = word_load(slot->tx_tcp_bytes), read, written;
	uint8_t info[TCPI_SIZE];

	if (atomic_load(&slot->rx_kernel_waiters) | atomic_load(&slot->tx_kernel_waiters) || tx_is(slot, TX_RESEND))
		return COUNT_UNSTABLE;
	enum count rx = rx_counted(fd, &read), tx = tx_counted(conn, fd, &written);
	if (!tcp_info_get(fd, info) || info[TCPI_STATE] != TCP_ESTABLISHED || raw_poll(&ended, 1, 0) != 0)
		return COUNT_DIFFERS;
	if (rx != COUNT_EQUAL || tx != COUNT_EQUAL)
		return rx == COUNT_DIFFERS || tx == COUNT_DIFFERS ? COUNT_DIFFERS : COUNT_UNSTABLE;
	if (atomic_load(&slot->rx_kernel_waiters) | atomic_load(&slot->tx_kernel_waiters) ||
	    !atomic_compare_exchange_strong(&slot->rx_tcp_bytes, &rx_before, read) ||
	    !atomic_compare_exchange_strong(&slot->tx_tcp_bytes, &tx_before, written))
		return COUNT_UNSTABLE;
	return COUNT_EQUAL;
}

/*
 * Bytes that TCP has brought and that were not read, or a few more: urgent bytes that reads have passed over are among them.
 * FIONREAD leaves out those behind an urgent mark.
 */
size_t tcp_unread(const struct conn *conn, int fd)
{
	uint8_t info[TCPI_SIZE];

	if (!tcp_info_get(fd, info))
		return 0;
	uint64_t came = tcp_info_u64(info, TCPI_BYTES_RECEIVED) - (tcp_info_fin(info) ? 1 : 0);
	uint64_t read = word_load(conn->slot->rx_tcp_bytes);
	return came > read ? (size_t)(came - read) : 0;
}

/* True if the connection is dead: an error that is none of single sends. */
bool kernel_closed(int fd)
{
	uint8_t info[TCPI_SIZE];

	return !tcp_info_get(fd, info) || info[TCPI_STATE] == TCP_CLOSE;
}

/* True if the connection was reset before TCP had brought so many bytes. Behind a FIN nothing is missing. */
bool kernel_lost(int fd, uint64_t bytes)
{
	uint8_t info[TCPI_SIZE];

	return tcp_info_get(fd, info) && info[TCPI_STATE] == TCP_CLOSE && tcp_info_u64(info, TCPI_BYTES_RECEIVED) < bytes;
}

/* True if the peer's kernel has acknowledged the end of our direction, or the connection is over. */
bool kernel_fin_acked(int fd)
{
	uint8_t info[TCPI_SIZE];
	int state = tcp_info_get(fd, info) ? info[TCPI_STATE] : TCP_CLOSE;

	return state == TCP_FIN_WAIT2 || state == TCP_TIME_WAIT || state == TCP_CLOSE;
}

/* True if the peer's FIN has come, which a socket whose reading was shut down does not tell by its end. */
bool kernel_fin(int fd)
{
	uint8_t info[TCPI_SIZE];

	return tcp_info_get(fd, info) && tcp_info_fin(info);
}

/*
 * True if these events of the socket report an error. Without a hang-up it may also be a message in the error queue, if the
 * program has asked for such. It may also be the midst of a reset: see tcp_reset() in Linux.
 */
bool kernel_failed(int fd, uint32_t events)
{
	int zerocopy = 0, stamping = 0;

	if (likely(!(events & POLLERR)) || (events & POLLHUP))
		return events & POLLERR;
	option_get(fd, SOL_SOCKET, SO_ZEROCOPY, &zerocopy, sizeof(zerocopy));
	option_get(fd, SOL_SOCKET, SO_TIMESTAMPING, &stamping, sizeof(stamping));
	return !zerocopy && !stamping;
}
