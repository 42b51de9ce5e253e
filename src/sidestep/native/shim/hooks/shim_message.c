/* shim_message.c - what recvmsg tells beside bytes: how many are left (TCP_INQ), and which sends are done (MSG_ZEROCOPY). */
#include "shim_call.h"

#include <linux/errqueue.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>

/* put_cmsg() of the kernel: the one message of a call, in `room` bytes. */
static void message_put(struct msghdr *message, size_t room, int level, int type, const void *data, size_t len)
{
	struct cmsghdr header = {.cmsg_len = CMSG_LEN(len), .cmsg_level = level, .cmsg_type = type};

	message->msg_controllen = 0;
	if (!message->msg_control || room < sizeof(header)) {
		message->msg_flags |= MSG_CTRUNC;
		return;
	}
	if (room < CMSG_LEN(len)) {
		message->msg_flags |= MSG_CTRUNC;
		header.cmsg_len = room;
	}
	memcpy(message->msg_control, &header, sizeof(header));
	memcpy((uint8_t *)message->msg_control + CMSG_LEN(0), data, header.cmsg_len - CMSG_LEN(0));
	message->msg_controllen = room < CMSG_SPACE(len) ? room : CMSG_SPACE(len);
}

/* True if the peer's end has come, as far as the program knows: TCP_INQ counts it as one byte more (tcp_inq_hint). */
static bool end_has_come(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;

	if (!rx_by_ring(slot))
		return !conn_end_withheld(conn) && kernel_fin(fd);
	/* A peer that was killed writes nothing. But a thread that waits for an edge notices that, as the kernel's end is one. */
	if (!slot_has(slot, SLOT_FIN) &&
	    (atomic_load(&conn->channel.remote->shut_wr) || conn_notice(conn) & CHANNEL_CLOSED))
		conn_probe(conn, fd);
	return slot_has(slot, SLOT_FIN) && !slot_has(slot, SLOT_RESET);
}

void message_received(struct conn *conn, int fd, struct msghdr *message, int flags)
{
	struct conn_slot *slot = conn->slot;
	size_t room = message->msg_controllen;
	int queued = 0, saved = errno;

	message->msg_namelen = 0;
	message->msg_controllen = 0;
	message->msg_flags = flags & MSG_CMSG_CLOEXEC;
	if (likely(!slot_has(slot, SLOT_INQ)))
		return;
	if ((!rx_by_ring(slot) || conn_peer_back(conn)) && !recall_open(conn))
		real.ioctl(fd, FIONREAD, &queued);
	int left = (int)conn_unread(conn, (size_t)queued) + end_has_come(conn, fd);
	message_put(message, room, IPPROTO_TCP, TCP_CM_INQ, &left, sizeof(left));
	errno = saved;
}

/* The kernel's reports on the sends that it has numbered. */
void message_errors_received(struct conn *conn, const struct msghdr *message)
{
	for (struct cmsghdr *header = CMSG_FIRSTHDR(message); header;
	     header = CMSG_NXTHDR((struct msghdr *)message, header)) {
		struct sock_extended_err error;
		if (header->cmsg_len < CMSG_LEN(sizeof(error)) ||
		    (header->cmsg_level != IPPROTO_IP && header->cmsg_level != IPPROTO_IPV6))
			continue;
		memcpy(&error, CMSG_DATA(header), sizeof(error));
		if (error.ee_origin == SO_EE_ORIGIN_ZEROCOPY)
			word_add(conn->slot->zerocopy_reported, error.ee_data - error.ee_info + 1);
	}
}

/* MSG_ERRQUEUE: the kernel's queue comes first, as it was there first. Our own copies are reported as the kernel does. */
ssize_t message_errors(struct conn *conn, int fd, struct msghdr *message, int flags)
{
	struct conn_slot *slot = conn->slot;
	size_t room = message->msg_controllen;
	ssize_t n = real.recvmsg(fd, message, flags);

	if (n >= 0)
		message_errors_received(conn, message);
	if (n >= 0 || errno != EAGAIN)
		return n;
	uint32_t reported = word_load(slot->zerocopy_reported), sent;
	do {
		sent = atomic_load(&slot->zerocopy_sent);
		if (!zerocopy_unreported(slot) || sent == reported)
			return fail_with(EAGAIN);
	} while (!atomic_compare_exchange_weak(&slot->zerocopy_reported, &reported, sent));
	set_conn_leaves(conn, false);
	struct {
		struct sock_extended_err error;
		struct sockaddr_in6 offender;
	} record = {.error = {.ee_origin = SO_EE_ORIGIN_ZEROCOPY,
	                      .ee_code = SO_EE_CODE_ZEROCOPY_COPIED,
	                      .ee_info = reported,
	                      .ee_data = sent - 1}};
	bool v6 = slot->family == AF_INET6;
	message->msg_namelen = 0;
	message->msg_flags = MSG_ERRQUEUE | (flags & MSG_CMSG_CLOEXEC);
	message_put(message, room, v6 ? IPPROTO_IPV6 : IPPROTO_IP, v6 ? IPV6_RECVERR : IP_RECVERR, &record,
	            sizeof(record.error) + (v6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in)));
	return 0;
}

/* A send with MSG_ZEROCOPY has been copied, so the program may change its bytes; it hears of that as of an error. */
void message_copied(struct conn *conn)
{
	if (!slot_has(conn->slot, SLOT_ZEROCOPY))
		return;
	int saved = errno;
	atomic_fetch_add(&conn->slot->zerocopy_sent, 1);
	set_conn_arm(conn, true);
	if (conn->managed)
		conn_wake_own(conn);
	errno = saved;
}
