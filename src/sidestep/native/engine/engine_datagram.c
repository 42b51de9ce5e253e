/*
 * engine_datagram.c - RoCEv2 over UDP sockets, as a wire of the engine: rc_qp.h has the protocol.
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
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#define PORT 4791
#define QUEUE_MAX (128u << 10)  /* bytes not acknowledged, after which nothing is added */
#define MESSAGE_MAX (64u << 10) /* bytes of a message of ours */
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

/* A message of ours, until it is acknowledged. */
struct owned {
	struct qp_flight flight;
	struct iovec piece;
	uint8_t bytes[];
};

static struct rc_loaned *loaned_of(const struct wire *wire)
{
	return ((const struct wire_datagram *)(const void *)wire)->loaned;
}

/* ---- what a connection asks of an engine ---- */
bool rc_loaned_room(struct rc_loaned *loaned, uint32_t size)
{
	if (loaned->message_size < size) {
		uint8_t *message = realloc(loaned->message, size);
		if (!message)
			return false;
		loaned->message = message;
		loaned->message_size = size;
	}
	loaned->qp->receive.pieces[0] = (struct iovec){.iov_base = loaned->message, .iov_len = loaned->message_size};
	loaned->qp->receive.pieces_len = 1;
	loaned->qp->receive.length = loaned->message_size;
	loaned->qp->receive.bad = false;
	return true;
}

static bool loaned_take_receive(struct rc_qp *qp)
{
	return rc_loaned_room(qp->owner, qp->plain_max); /* no memory: the peer retries */
}

static bool loaned_may_receive(struct rc_qp *qp)
{
	(void)qp;
	return true;
}

/* Brings a message together, since `in` is written anew. */
static void keep(struct rc_loaned *loaned)
{
	for (uint32_t i = 0; i < loaned->parts_len; i++) {
		memcpy(loaned->message + loaned->kept, loaned->parts[i].iov_base, loaned->parts[i].iov_len);
		loaned->kept += (uint32_t)loaned->parts[i].iov_len;
	}
	loaned->parts_len = 0;
}

static void loaned_place(struct rc_qp *qp, const uint8_t *payload, uint32_t len)
{
	struct rc_loaned *loaned = qp->owner;

	if (loaned->parts_len == RC_PARTS_MAX)
		keep(loaned);
	loaned->parts[loaned->parts_len++] = (struct iovec){.iov_base = (void *)(uintptr_t)payload, .iov_len = len};
}

static void loaned_deliver(struct rc_qp *qp, uint32_t length, bool solicited, const uint32_t *voided,
                           const uint8_t *immediate)
{
	struct rc_loaned *loaned = qp->owner;

	(void)voided; /* a plain Send has neither */
	(void)immediate;
	loaned->whole = qp->paused = true;
	loaned->message_len = length;
	loaned->solicited = solicited;
}

const struct qp_host rc_loaned_host = {
	.take_receive = loaned_take_receive,
	.may_receive = loaned_may_receive,
	.place = loaned_place,
	.deliver = loaned_deliver,
};

static void free_done(struct rc_qp *qp)
{
	while (qp->done) {
		struct qp_flight *flight = qp->done;
		qp->done = flight->next;
		free(flight);
	}
}

void rc_loaned_free(struct rc_loaned *loaned)
{
	free(loaned->datagrams);
	free(loaned->message);
	*loaned = (struct rc_loaned){.qp = loaned->qp};
}

/* ---- in ---- */
static uint32_t segment_of(struct msghdr *message)
{
	int segment = 0;

	for (struct cmsghdr *each = CMSG_FIRSTHDR(message); each; each = CMSG_NXTHDR(message, each))
		if (each->cmsg_level == SOL_UDP && each->cmsg_type == UDP_GRO)
			memcpy(&segment, CMSG_DATA(each), sizeof(segment));
	return segment > 0 ? (uint32_t)segment : 0;
}

/* Reads once. 1: something has come, 0: nothing has; or minus a reason. */
static int fill(struct wire *wire)
{
	struct rc_loaned *loaned = loaned_of(wire);
	union control control;

	if (!wire->readable)
		return 0;
	keep(loaned);
	struct iovec into = {.iov_base = loaned->datagrams, .iov_len = RC_DATAGRAM_MAX};
	struct msghdr message = {
		.msg_iov = &into, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof(control.bytes)};
	ssize_t got = recvmsg(loaned->receive_fd, &message, MSG_DONTWAIT);
	if (got < 0) { /* also the error of what was sent, which the timer tells */
		wire->readable = errno != EAGAIN;
		return 0;
	}
	loaned->in_at = 0;
	loaned->in_tail = (uint32_t)got;
	loaned->segment = segment_of(&message);
	if (!loaned->segment)
		loaned->segment = loaned->in_tail;
	return 1;
}

static int datagram_next(struct wire *wire, uint32_t most)
{
	struct rc_loaned *loaned = loaned_of(wire);
	struct rc_qp *qp = loaned->qp;

	qp->plain_max = most ? most : 1; /* 0 would be all */
	if (qp->message.kind == QP_SENDING && loaned->message_size < most && !rc_loaned_room(loaned, most))
		return -ENGINE_MEMORY;
	for (int fills = 0;; fills++) {
		if (loaned->in_at < loaned->in_tail)
			loaned->in_at +=
				(uint32_t)qp_receive(qp, loaned->datagrams + loaned->in_at, loaned->in_tail - loaned->in_at,
			                         loaned->segment, loaned->remote_port, QP_RTS, wire->now_ns);
		free_done(qp);
		if (loaned->whole) {
			wire->len = loaned->message_len;
			return 1;
		}
		if (loaned->in_at < loaned->in_tail || qp->refused || qp->failed)
			return -ENGINE_MESSAGE;
		int filled = fills < FILLS_MAX ? fill(wire) : 0;
		if (filled <= 0)
			return filled;
	}
}

static void datagram_copy(const struct wire *wire, uint32_t from, uint8_t *to, uint32_t len)
{
	const struct rc_loaned *loaned = loaned_of(wire);
	uint32_t there = from < loaned->kept ? loaned->kept - from : 0, some = there < len ? there : len;

	memcpy(to, loaned->message + from, some);
	qp_gather(loaned->parts, loaned->parts_len, from + some - loaned->kept, to + some, len - some);
}

static void datagram_taken(struct wire *wire)
{
	struct rc_loaned *loaned = loaned_of(wire);

	loaned->whole = false;
	loaned->parts_len = loaned->kept = 0;
}

/* ---- out ---- */
static uint64_t datagram_waiting(const struct wire *wire)
{
	const struct rc_qp *qp = loaned_of(wire)->qp;

	return (uint64_t)qp_ahead(qp->next, qp->acknowledged) * qp->mtu; /* bytes, if all packets were full */
}

static int datagram_put(struct wire *wire, const uint8_t *header, uint32_t header_len, const struct iovec *pieces,
                        int pieces_len)
{
	size_t len = header_len;

	for (int i = 0; i < pieces_len; i++)
		len += pieces[i].iov_len;
	struct owned *owned =
		len <= MESSAGE_MAX && datagram_waiting(wire) <= QUEUE_MAX ? malloc(sizeof(*owned) + len) : NULL;
	if (!owned)
		return -ENGINE_MEMORY;
	owned->piece = (struct iovec){.iov_base = owned->bytes, .iov_len = len};
	owned->flight = (struct qp_flight){
		.op = QP_SEND, .owned = true, .length = (uint32_t)len, .pieces = &owned->piece, .pieces_len = 1};
	memcpy(owned->bytes, header, header_len);
	qp_gather(pieces, (uint32_t)pieces_len, 0, owned->bytes + header_len, (uint32_t)len - header_len);
	qp_post(loaned_of(wire)->qp, &owned->flight);
	return 0;
}

/* Where the other end is, as sockets take it. */
static socklen_t target(const struct rc_qp *qp, struct sockaddr_in6 *space)
{
	struct sockaddr_in *ipv4 = (struct sockaddr_in *)(void *)space;

	memset(space, 0, sizeof(*space));
	if (qp->ipv6) {
		space->sin6_family = AF_INET6;
		space->sin6_port = htons(PORT);
		memcpy(&space->sin6_addr, qp->remote, sizeof(space->sin6_addr));
		return sizeof(*space);
	}
	ipv4->sin_family = AF_INET;
	ipv4->sin_port = htons(PORT);
	memcpy(&ipv4->sin_addr, qp->remote, sizeof(ipv4->sin_addr));
	return sizeof(*ipv4);
}

int rc_send(const struct rc_qp *qp, int fd, const uint8_t *data, size_t len, const struct qp_train *train)
{
	struct sockaddr_in6 address;
	union control control = {0};
	struct iovec piece = {.iov_base = (void *)(uintptr_t)data, .iov_len = len};
	struct msghdr message = {.msg_name = &address, .msg_iov = &piece, .msg_iovlen = 1};

	message.msg_namelen = target(qp, &address);
	if (train->count > 1) {
		uint16_t segment = (uint16_t)train->segment;
		message.msg_control = control.bytes;
		message.msg_controllen = CMSG_SPACE(sizeof(segment));
		struct cmsghdr *cut = CMSG_FIRSTHDR(&message);
		*cut = (struct cmsghdr){.cmsg_level = SOL_UDP, .cmsg_type = UDP_SEGMENT, .cmsg_len = CMSG_LEN(sizeof(segment))};
		memcpy(CMSG_DATA(cut), &segment, sizeof(segment));
	}
	while (sendmsg(fd, &message, MSG_DONTWAIT) < 0) {
		if (errno != EINTR)
			return -errno;
	}
	return 0;
}

/* 0: it has gone, or is as good as lost on the way; -EAGAIN: there is no room. */
static int send_out(struct rc_loaned *loaned)
{
	int result =
		rc_send(loaned->qp, loaned->send_fd, loaned->datagrams + RC_DATAGRAM_MAX, loaned->out_len, &loaned->out_train);

	if (result == -EAGAIN)
		return result;
	/* no route, too long for it, or no room in the interface: the packets are sent again, until the retries end */
	if (loaned->out_train.count > 1 && (result == -EINVAL || result == -EIO || result == -EOPNOTSUPP)) {
		loaned->train = 1; /* this interface does not cut */
		qp_rewind(loaned->qp);
	}
	loaned->out_len = 0;
	return 0;
}

static int datagram_flush(struct wire *wire)
{
	struct rc_loaned *loaned = loaned_of(wire);
	struct rc_qp *qp = loaned->qp;

	qp_pass(qp, wire->now_ns);
	while (!wire->blocked && !qp->failed) {
		if (!loaned->out_len) {
			loaned->out_train = (struct qp_train){.most = loaned->train, .port = loaned->local_port, .sends = true};
			loaned->out_len =
				qp_train(qp, loaned->datagrams + RC_DATAGRAM_MAX, RC_DATAGRAM_MAX, &loaned->out_train, wire->now_ns);
		}
		if (!loaned->out_len)
			break;
		wire->blocked = send_out(loaned) == -EAGAIN;
	}
	wire->deadline_ns = qp_deadline(qp);
	return qp->failed ? -ENGINE_SILENT : 0;
}

static int datagram_give_back(struct wire *wire)
{
	struct rc_loaned *loaned = loaned_of(wire);

	free_done(loaned->qp);
	keep(loaned);
	if (loaned->out_len)
		qp_rewind(loaned->qp);
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

void wire_datagram_init(struct wire_datagram *datagram, struct rc_loaned *loaned)
{
	*datagram = (struct wire_datagram){
		.wire = {.ops = &datagram_ops,
	             .readable = true,
	             .receive_fd = loaned->receive_fd,
	             .send_fd = loaned->send_fd,
	             .queue_max = QUEUE_MAX,
	             .message_max = MESSAGE_MAX - WIRE_HEADER_MAX},
		.loaned = loaned,
	};
}
