/* shim_option.c - socket options and ioctl: some keep a connection on TCP, or take it back there. */
#include "shim_fd.h"
#include "shim_switch.h"

#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>

static bool stamps(int option)
{
	/* asm-generic/socket.h; the last three are the same for 64-bit times */
	enum { TIMESTAMP_NEW = 63, TIMESTAMPNS_NEW = 64, TIMESTAMPING_NEW = 65 };

	return option == SO_TIMESTAMP || option == SO_TIMESTAMPNS || option == SO_TIMESTAMPING || option == TIMESTAMP_NEW ||
	       option == TIMESTAMPNS_NEW || option == TIMESTAMPING_NEW;
}

/* Options of interest that accepted sockets inherit; they are checked once one has been set on any socket. */
static _Atomic bool heritage;
static const struct {
	int level, name;
} heritable[] = {
	{SOL_SOCKET, SO_RCVLOWAT},  {SOL_SOCKET, SO_TIMESTAMP}, {SOL_SOCKET, SO_TIMESTAMPNS}, {SOL_SOCKET, SO_TIMESTAMPING},
	{SOL_SOCKET, SO_OOBINLINE}, {SOL_SOCKET, SO_PEEK_OFF},  {SOL_SOCKET, SO_ZEROCOPY},    {IPPROTO_TCP, TCP_INQ},
};

/* Flag of a connection for a switch whose effect we bring about; 0: there is no such switch. */
static uint32_t option_carried(int level, int name)
{
	if (level == IPPROTO_TCP && name == TCP_INQ)
		return SLOT_INQ;
	return level == SOL_SOCKET && name == SO_ZEROCOPY ? SLOT_ZEROCOPY : 0;
}

/* The connection stays on TCP, or goes back there, because of this option. `recall` as in conn_demote(). */
static void option_pins(struct conn *conn, int fd, int level, int name, enum reason_code reason, bool recall)
{
	if (!slot_has(conn->slot, SLOT_PIN))
		option_reason(conn, level, name);
	conn_demote(conn, fd, reason, recall);
}

static void note_heritable(int level, int name)
{
	bool found = level == SOL_SOCKET && stamps(name);

	for (size_t i = 0; i < sizeof(heritable) / sizeof(*heritable); i++)
		found |= heritable[i].level == level && heritable[i].name == name;
	if (found)
		atomic_store(&heritage, true);
}

void option_inherit(struct conn *conn, int fd)
{
	if (likely(!word_load(heritage)))
		return;
	for (size_t i = 0; i < sizeof(heritable) / sizeof(*heritable); i++) {
		int value = 0, level = heritable[i].level, name = heritable[i].name;
		if (!option_get(fd, level, name, &value, sizeof(value)))
			continue;
		if (level == SOL_SOCKET && name == SO_RCVLOWAT)
			conn->slot->rx_low_water = value > 0 ? (uint64_t)value : 1;
		else if (option_carried(level, name))
			slot_set(conn->slot, value ? option_carried(level, name) : 0);
		else if (level == SOL_SOCKET && name == SO_PEEK_OFF ? value >= 0 : value != 0)
			option_pins(conn, fd, level, name, REASON_UNUSUAL_OPTION, true);
	}
}

EXPORT int getsockopt(int fd, int level, int name, void *value, socklen_t *len)
{
	HELD conn = conn_hold(fd);

	if (unlikely(conn && conn->managed && level == SOL_SOCKET && name == SO_ERROR && value && len &&
	             *len >= sizeof(int))) {
		conn_probe(conn, fd);
		int error = take_error(conn);
		if (error) {
			memcpy(value, &error, sizeof(error));
			*len = sizeof(error);
			return 0;
		}
	}
	if (unlikely(own(fd)))
		return fail_with(EBADF);
	if (unlikely(conn && level == SOL_SOCKET && name == SO_RCVLOWAT && value && len && *len >= sizeof(int) &&
	             slot_has(conn->slot, SLOT_LEAVES))) { /* the kernel has another: low_water_left() */
		int low = (int)word_load(conn->slot->rx_low_water);
		memcpy(value, &low, sizeof(low));
		*len = sizeof(low);
		return 0;
	}
	return real.getsockopt(fd, level, name, value, len);
}

/* The kernel has taken it. */
static void option_set(struct conn *conn, int fd, int level, int name, const void *value, socklen_t len)
{
	briefs_end(conn); /* the option may be SO_RCVTIMEO */
	if (level == SOL_SOCKET && name == SO_RCVLOWAT && len >= sizeof(int)) {
		int low;
		memcpy(&low, value, sizeof(low));
		conn->slot->rx_low_water = low > 0 ? (uint64_t)low : 1;
		if (unlikely(slot_has(conn->slot, SLOT_LEAVES))) {
			low_water_left(conn, fd);
			set_conn_leaves(conn, false);
		}
		if (conn->managed && conn_ready(conn, fd, 0, EPOLLIN) & EPOLLIN)
			set_conn_arm(conn, true); /* enough is there now: tcp_set_rcvlowat() in Linux */
	} else if (level == SOL_SOCKET &&
	           (name == SO_SNDBUF || name == SO_SNDBUFFORCE || name == SO_RCVBUF || name == SO_RCVBUFFORCE)) {
		if (conn->managed)
			conn_bound(conn, fd);
	} else if (level == SOL_SOCKET && name == SO_PEEK_OFF) {
		option_pins(conn, fd, level, name, REASON_UNUSUAL_OPTION, true);
	} else if (level == SOL_SOCKET && stamps(name)) {
		option_pins(conn, fd, level, name, REASON_UNUSUAL_OPTION, false); /* messages that only the kernel can attach */
	} else if (level == SOL_SOCKET && name == SO_OOBINLINE) {
		option_pins(conn, fd, level, name, REASON_URGENT_DATA, false);
	} else if (level == IPPROTO_TCP &&
	           (name == TCP_REPAIR || name == TCP_ZEROCOPY_RECEIVE || name == TCP_FASTOPEN_CONNECT)) {
		option_pins(conn, fd, level, name, REASON_UNUSUAL_OPTION, true);
	} else if (level == IPPROTO_TCP && name == TCP_ULP) {
		option_pins(conn, fd, level, name, REASON_KERNEL_TLS, true);
	}
}

EXPORT int setsockopt(int fd, int level, int name, const void *value, socklen_t len)
{
	HELD conn = conn_hold(fd);

	note_heritable(level, name);
	if (likely(!conn))
		return own(fd) ? fail_with(EBADF) : real.setsockopt(fd, level, name, value, len);
	uint32_t carried = option_carried(level, name), before = word_load(conn->slot->flags);
	/*
	 * the flag before the kernel's: sends that it numbers and we do not count would be numbered twice; see
	 * zerocopy_in_kernel()
	 */
	slot_set(conn->slot, carried);
	int result = real.setsockopt(fd, level, name, value, len);
	int saved = errno;
	if (carried && (result < 0 ? !(before & carried) : !*(const int *)value))
		slot_clear(conn->slot, carried);
	if (result == 0)
		option_set(conn, fd, level, name, value, len);
	errno = saved;
	return result;
}

EXPORT int ioctl(int fd, unsigned long command, ...)
{
	va_list args;

	va_start(args, command);
	void *argument = va_arg(args, void *);
	va_end(args);
	HELD conn = conn_hold(fd);
	if (likely(!conn))
		return own(fd) ? fail_with(EBADF) : real.ioctl(fd, command, argument);
	if (command == FIOCLEX || command == FIONCLEX)
		word_store(conn->heritable, command == FIONCLEX);
	if (command == FIONBIO || !conn->managed) {
		int done = real.ioctl(fd, command, argument);
		if (done == 0 && command == FIONBIO)
			noted(conn, *(const int *)argument);
		else if (done == 0 && command == FIOASYNC)
			conn_pin(conn, REASON_ASYNC_SIGNAL_IO);
		return done;
	}
	/* a program that only asks must advance the switch-over, too */
	conn_check(conn, fd);
	conn_advance(conn, fd);
	int result = real.ioctl(fd, command, argument);
	if (result == 0 && command == FIONREAD && argument) {
		*(int *)argument = (int)conn_unread(conn, (size_t)*(int *)argument);
	} else if (result == 0 && command == SIOCOUTQ && argument && tx_by_ring(conn->slot)) {
		/* Ring bytes are in the peer's buffer: TCP would have acknowledged them. Those that make the ring full wait. */
		size_t held = channel_tx_unread(&conn->channel), buffer = (size_t)conn->channel.tx.size / 4 * 3;
		if (held > buffer)
			*(int *)argument += (int)(held - buffer);
	} else if (result == 0 && command == SIOCATMARK && argument && *(int *)argument) {
		/* a mark of TCP's stream, whose next byte stands behind the bytes of the ring */
		*(int *)argument = !rx_by_ring(conn->slot) || channel_rx_avail(&conn->channel) <= 0;
	} else if (result == 0 && command == FIOASYNC) {
		conn_leave(conn, fd, REASON_ASYNC_SIGNAL_IO);
	}
	return result;
}

/* libc's own asks the kernel within itself. */
EXPORT int sockatmark(int fd)
{
	int at = 0;

	return ioctl(fd, SIOCATMARK, &at) < 0 ? -1 : at;
}
