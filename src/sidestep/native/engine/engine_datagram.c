/*
 * engine_datagram.c - RoCEv2 over UDP sockets, as a wire of the engine: rc.h has the protocol.
 *
 * Two sockets. What comes is read from one that is connected to the port which the other end sends from, so that the kernel
 * tells queue pairs apart. What goes out leaves by one that is not connected and must not fragment: then Linux puts
 * identification 0 on it, or 0, 1, 2 ... on the packets of a datagram that it cuts (UDP_SEGMENT), wherever it is cut.
 */
#define _GNU_SOURCE
#include "engine_wire.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/udp.h>
#include <string.h>
#include <sys/socket.h>

#define FILLS_MAX 16 /* reads of which nothing is left, after which others have their turn */
#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif
#ifndef UDP_GRO
#define UDP_GRO 104
#endif

union control {
	char bytes[CMSG_SPACE(sizeof(int))];
	struct cmsghdr align;
};

static struct wire_datagram *datagram_of(struct wire *wire)
{
	return (struct wire_datagram *)(void *)wire;
}

static const struct wire_datagram *datagram_seen(const struct wire *wire)
{
	return (const struct wire_datagram *)(const void *)wire;
}

static uint32_t segment_of(struct msghdr *message)
{
	int segment = 0;

	for (struct cmsghdr *each = CMSG_FIRSTHDR(message); each; each = CMSG_NXTHDR(message, each))
		if (each->cmsg_level == SOL_UDP && each->cmsg_type == UDP_GRO)
			memcpy(&segment, CMSG_DATA(each), sizeof(segment));
	return segment > 0 ? (uint32_t)segment : 0;
}

/* Reads once. 1: something has come, 0: nothing has; or minus a reason. */
static int fill(struct wire_datagram *datagram, uint32_t most)
{
	struct rc *rc = datagram->rc;
	uint8_t *at = datagram->wire.readable ? rc_room(rc, most) : NULL;
	union control control;

	if (!datagram->wire.readable)
		return 0;
	if (!at)
		return -ENGINE_MEMORY;
	struct iovec into = {.iov_base = at, .iov_len = RC_DATAGRAM_MAX};
	struct msghdr message = {
		.msg_iov = &into, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof(control.bytes)};
	ssize_t got = recvmsg(datagram->receive_fd, &message, MSG_DONTWAIT);
	if (got < 0) { /* also the error of what was sent, which the timer tells */
		datagram->wire.readable = errno != EAGAIN;
		return 0;
	}
	if (got > 0)
		rc_commit(rc, (uint32_t)got, segment_of(&message));
	return 1;
}

static int datagram_next(struct wire *wire, uint32_t most)
{
	struct wire_datagram *datagram = datagram_of(wire);

	for (int fills = 0;; fills++) {
		switch (rc_next(datagram->rc, most, wire->now_ns)) {
		case RC_MESSAGE: wire->len = datagram->rc->message_len; return 1;
		case RC_STRANGE: return -ENGINE_MESSAGE;
		case RC_NO_MEMORY: return -ENGINE_MEMORY;
		case RC_NOTHING: break;
		}
		int filled = fills < FILLS_MAX ? fill(datagram, most) : 0;
		if (filled <= 0)
			return filled;
	}
}

static void datagram_copy(const struct wire *wire, uint32_t from, uint8_t *to, uint32_t len)
{
	rc_copy(datagram_seen(wire)->rc, from, to, len);
}

static void datagram_taken(struct wire *wire)
{
	rc_taken(datagram_of(wire)->rc);
}

static int datagram_put(struct wire *wire, const uint8_t *header, uint32_t header_len, const struct iovec *pieces,
                        int pieces_len)
{
	return rc_put(datagram_of(wire)->rc, header, header_len, pieces, pieces_len) < 0 ? -ENGINE_MEMORY : 0;
}

static uint64_t datagram_waiting(const struct wire *wire)
{
	return rc_waiting(datagram_seen(wire)->rc);
}

/* Where the other end is, as sockets take it. */
static socklen_t target(const struct rc *rc, struct sockaddr_in6 *space)
{
	struct sockaddr_in *ipv4 = (struct sockaddr_in *)(void *)space;

	memset(space, 0, sizeof(*space));
	if (rc->record.ipv6) {
		space->sin6_family = AF_INET6;
		space->sin6_port = htons(RC_PORT);
		memcpy(&space->sin6_addr, rc->remote, sizeof(space->sin6_addr));
		return sizeof(*space);
	}
	ipv4->sin_family = AF_INET;
	ipv4->sin_port = htons(RC_PORT);
	memcpy(&ipv4->sin_addr, rc->remote, sizeof(ipv4->sin_addr));
	return sizeof(*ipv4);
}

/* 0: it has gone, or is as good as lost on the way; -EAGAIN: there is no room; -EINVAL: it is not cut here. */
static int send_some(struct wire_datagram *datagram, struct iovec *pieces, int used, uint32_t count, uint32_t len)
{
	struct sockaddr_in6 address;
	union control control = {0};
	struct msghdr message = {.msg_name = &address, .msg_iov = pieces, .msg_iovlen = (size_t)used};

	message.msg_namelen = target(datagram->rc, &address);
	if (count > 1) {
		uint16_t segment = (uint16_t)len;
		message.msg_control = control.bytes;
		message.msg_controllen = CMSG_SPACE(sizeof(segment));
		struct cmsghdr *cut = CMSG_FIRSTHDR(&message);
		*cut = (struct cmsghdr){.cmsg_level = SOL_UDP, .cmsg_type = UDP_SEGMENT, .cmsg_len = CMSG_LEN(sizeof(segment))};
		memcpy(CMSG_DATA(cut), &segment, sizeof(segment));
	}
	while (sendmsg(datagram->send_fd, &message, MSG_DONTWAIT) < 0) {
		if (errno == EINTR)
			continue;
		if (errno == EAGAIN)
			return -EAGAIN;
		/* no route, too long for it, or no room in the interface: it is sent again, until that is given up */
		return count > 1 && (errno == EINVAL || errno == EIO || errno == EOPNOTSUPP) ? -EINVAL : 0;
	}
	return 0;
}

static int datagram_flush(struct wire *wire)
{
	struct wire_datagram *datagram = datagram_of(wire);
	struct rc *rc = datagram->rc;
	uint8_t answer[RC_ANSWER_LEN];
	struct iovec pieces[2];
	uint32_t count, len;
	int used;

	if (!rc_pass(rc, wire->now_ns))
		return -ENGINE_SILENT;
	while ((len = rc_answer(rc, answer))) {
		struct iovec piece = {.iov_base = answer, .iov_len = len};
		(void)send_some(datagram, &piece, 1, 1, len); /* without room it is lost, and asked for again */
	}
	while (!wire->blocked && (used = rc_train(rc, datagram->train, pieces, &count, &len))) {
		int result = send_some(datagram, pieces, used, count, len);
		if (result == -EINVAL) {
			datagram->train = 1;
			continue;
		}
		wire->blocked = result == -EAGAIN;
		if (!wire->blocked)
			rc_sent(rc, count, wire->now_ns);
	}
	wire->deadline_ns = rc_deadline(rc);
	return 0;
}

static int datagram_give_back(struct wire *wire)
{
	rc_rewind(datagram_of(wire)->rc);
	return 0;
}

static const struct wire_ops datagram_ops = {
	.next = datagram_next,
	.copy = datagram_copy,
	.taken = datagram_taken,
	.put = datagram_put,
	.waiting = datagram_waiting,
	.flush = datagram_flush,
	.give_back = datagram_give_back,
};

void wire_datagram_init(struct wire_datagram *datagram, struct rc *rc, int receive_fd, int send_fd)
{
	*datagram = (struct wire_datagram){
		.wire = {.ops = &datagram_ops,
	             .readable = true,
	             .receive_fd = receive_fd,
	             .send_fd = send_fd,
	             .queue_max = RC_QUEUE_MAX,
	             .message_max = RC_MESSAGE_MAX - WIRE_HEADER_MAX},
		.rc = rc,
		.receive_fd = receive_fd,
		.send_fd = send_fd,
		.train = RC_TRAIN_MAX,
	};
}
