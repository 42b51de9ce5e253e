/* shim_count.c - whether the kernel has counted the bytes that we have. */
#include "shim_switch.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <linux/sockios.h>
#include <sys/ioctl.h>

/* linux/tcp.h: libc's struct tcp_info ends before the byte counts, so they are read by the kernel ABI's offsets. */
enum { TCPI_STATE = 0, TCPI_BYTES_ACKED = 120, TCPI_BYTES_RECEIVED = 128, TCPI_SIZE = 136 };

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

enum count rx_count(struct conn *conn, int fd)
{
	uint8_t info[TCPI_SIZE];
	int before = 0, after = 0;

	if (real.ioctl(fd, FIONREAD, &before) < 0 || !tcp_info_get(fd, info) || real.ioctl(fd, FIONREAD, &after) < 0)
		return COUNT_DIFFERS;
	if (before != after || info[TCPI_STATE] == TCP_CLOSE) /* a reset may have come without a FIN, or behind one */
		return COUNT_UNSTABLE;
	uint64_t read = tcp_info_u64(info, TCPI_BYTES_RECEIVED) - (uint64_t)before - (tcp_info_fin(info) ? 1 : 0);
	return read == word_load(conn->slot->rx_tcp_bytes) ? COUNT_EQUAL : COUNT_DIFFERS;
}

enum count tx_count(struct conn *conn, int fd)
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
	return acked + (uint64_t)before == word_load(conn->slot->tx_tcp_bytes) ? COUNT_EQUAL : COUNT_DIFFERS;
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

/* Whether the connection is dead: an error that is none of single sends. */
bool kernel_closed(int fd)
{
	uint8_t info[TCPI_SIZE];

	return !tcp_info_get(fd, info) || info[TCPI_STATE] == TCP_CLOSE;
}

/* Whether the connection was reset before TCP had brought so many bytes. Behind a FIN nothing is missing. */
bool kernel_lost(int fd, uint64_t bytes)
{
	uint8_t info[TCPI_SIZE];

	return tcp_info_get(fd, info) && info[TCPI_STATE] == TCP_CLOSE && tcp_info_u64(info, TCPI_BYTES_RECEIVED) < bytes;
}

/* Whether the peer's FIN has come, which a socket whose reading was shut down does not tell by its end. */
bool kernel_fin(int fd)
{
	uint8_t info[TCPI_SIZE];

	return tcp_info_get(fd, info) && tcp_info_fin(info);
}

/* Whether these events of the socket tell of an error. Without a hang-up it may also be a message in the error queue, of who has
 * asked for such, or the midst of a reset: see tcp_reset() in Linux. */
bool kernel_failed(int fd, uint32_t events)
{
	int zerocopy = 0, stamping = 0;

	if (likely(!(events & POLLERR)) || (events & POLLHUP))
		return events & POLLERR;
	option_get(fd, SOL_SOCKET, SO_ZEROCOPY, &zerocopy, sizeof(zerocopy));
	option_get(fd, SOL_SOCKET, SO_TIMESTAMPING, &stamping, sizeof(stamping));
	return !zerocopy && !stamping;
}
