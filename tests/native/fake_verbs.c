/* fake_verbs.c - see fake_verbs.h. */
#define _GNU_SOURCE
#include "fake_verbs.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))
#define MUST(condition) \
	do { \
		if (!(condition)) \
			must(#condition, __LINE__); \
	} while (0)
#define ENTRIES 32
#define INLINE_MAX 220u
#define MTU_4096 5
#define PAGE 4096
#define PINNED_MAX (1 << 20) /* bytes of a region; of larger ones nobody gives pages back */
#define QPS 16384u
enum { CALLS_LEN = 5 };
enum { STATE_RESET, STATE_INIT, STATE_RTR, STATE_RTS, STATE_ERROR = 6 };
enum { OP_WRITE = 0, OP_READ = 4 };
enum { MASK_STATE = 1, MASK_DEST = 1 << 20 };

static void must(const char *condition, int line)
{
	fprintf(stderr, "fake_verbs.c:%d: %s\n", line, condition);
	abort();
}

/* ---- objects; each begins as the header has it ---- */
struct device {
	void *ops[2];
	int node_type, transport_type;
	char name[64], dev_name[64];
	uint8_t gid[16];
};

struct context {
	struct device *device;
	void *ops[32];
	int cmd_fd, async_fd, num_comp_vectors;
	int async_in;
	struct context *next;
};

struct channel {
	struct context *context;
	int fd, refcnt;
	int in;
};

struct completion {
	struct verbs_wc wc;
	uint64_t request; /* all up to this one give back their places; 0: it is a receive's */
};

struct cq {
	void *context;
	struct channel *channel;
	void *cq_context;
	uint32_t handle;
	int cqe;
	struct completion *ring;
	uint32_t first, len, events;
	bool armed;
	int users;
};

struct mr {
	void *context, *pd;
	uint8_t *addr;
	size_t length;
	uint32_t handle, lkey, rkey;
	struct mr *next;
	int pages[2]; /* a pipe that keeps those pages that the memory had; -1: it is looked at where it is */
};

struct receive {
	struct receive *next;
	uint64_t wr_id;
	struct verbs_sge entries[ENTRIES];
	int len;
};

struct receives {
	struct receive *first, **end;
	uint32_t len, most;
};

struct srq {
	struct context *context;
	struct receives receives;
	uint32_t limit;
	int users;
};

struct send {
	struct send *next;
	uint64_t wr_id, number, remote;
	int opcode, len;
	unsigned int flags;
	struct verbs_sge entries[ENTRIES];
	uint8_t inlined[INLINE_MAX];
};

struct qp {
	struct context *context;
	void *qp_context, *pd;
	struct cq *send_cq, *recv_cq;
	struct srq *srq;
	uint32_t handle, qp_num;
	int state, qp_type;
	struct receives own;
	struct send *sends, **sends_end; /* not delivered */
	struct send *acks, **acks_end;   /* delivered, which is to be told */
	uint64_t posted, freed;
	uint32_t most, dest;
	bool broken;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct device devices[FAKE_DEVICES];
static struct context *contexts;
static struct mr *regions;
static struct qp *qps[QPS];
static uint32_t next_qp = 1, next_key = 1;
static int hold_deliveries, hold_acks;
static uint64_t registered, pages, calls_made[CALLS_LEN];
static struct {
	int error, count;
} failing[CALLS_LEN];
static const char *const CALLS[CALLS_LEN] = {"post_send", "post_recv", "req_notify_cq", "poll_cq", "reg_mr"};

static int call_of(const char *name)
{
	for (int n = 0; n < CALLS_LEN; n++)
		if (!strcmp(CALLS[n], name))
			return n;
	return -1;
}

/* The error that this call is to have, or 0. */
static int fails(int call)
{
	calls_made[call]++;
	if (!failing[call].count)
		return 0;
	failing[call].count--;
	return failing[call].error;
}

/* ---- completions ---- */
static void notify(struct cq *cq)
{
	if (!cq->armed || !cq->channel)
		return;
	cq->armed = false;
	cq->events++;
	MUST(write(cq->channel->in, &cq, sizeof(cq)) == sizeof(cq));
}

static void complete(struct cq *cq, const struct verbs_wc *wc, uint64_t request)
{
	MUST(cq->len < (uint32_t)cq->cqe); /* it runs over */
	cq->ring[(cq->first + cq->len++) % (uint32_t)cq->cqe] = (struct completion){*wc, request};
	notify(cq);
}

static void receive_done(struct qp *qp, int status, int opcode, unsigned int flags, uint32_t byte_len)
{
	struct receives *from = qp->srq ? &qp->srq->receives : &qp->own;
	struct receive *receive = from->first;
	struct verbs_wc wc = {.wr_id = receive->wr_id,
	                      .status = status,
	                      .opcode = opcode,
	                      .byte_len = byte_len,
	                      .wc_flags = flags,
	                      .qp_num = qp->qp_num};

	from->first = receive->next;
	if (!from->first)
		from->end = &from->first;
	from->len--;
	free(receive);
	complete(qp->recv_cq, &wc, 0);
}

static void send_done(struct qp *qp, struct send *send, int status)
{
	struct verbs_wc wc = {.wr_id = send->wr_id, .status = status, .qp_num = qp->qp_num};

	wc.opcode = send->opcode == OP_READ ? 2 : send->opcode == OP_WRITE ? 1 : VERBS_WC_SEND;
	if (status || send->flags & VERBS_SIGNALED)
		complete(qp->send_cq, &wc, send->number);
	free(send);
}

static struct send *pop(struct send **first, struct send ***end)
{
	struct send *send = *first;

	*first = send->next;
	if (!*first)
		*end = first;
	return send;
}

static void to_error(struct qp *qp)
{
	qp->state = STATE_ERROR;
	while (qp->acks)
		send_done(qp, pop(&qp->acks, &qp->acks_end), FAKE_FLUSHED); /* nobody knows that they have arrived */
	while (qp->sends)
		send_done(qp, pop(&qp->sends, &qp->sends_end), FAKE_FLUSHED);
	while (!qp->srq && qp->own.first)
		receive_done(qp, FAKE_FLUSHED, 0, 0, 0);
}

/* ---- what moves ---- */
static const struct mr *region_of(const void *pd, const struct verbs_sge *entry)
{
	const struct mr *mr = regions;

	while (mr && !(mr->lkey == entry->lkey && mr->pd == pd && entry->addr >= (uintptr_t)mr->addr &&
	               entry->addr + entry->length <= (uintptr_t)mr->addr + mr->length))
		mr = mr->next;
	return mr;
}

static bool is_registered(const void *pd, const struct verbs_sge *entry)
{
	return region_of(pd, entry);
}

static bool all_registered(const void *pd, const struct verbs_sge *entries, int len)
{
	for (int n = 0; n < len; n++)
		if (!is_registered(pd, entries + n))
			return false;
	return true;
}

static uint32_t bytes_of(const struct verbs_sge *entries, int len)
{
	uint32_t bytes = 0;

	while (len--)
		bytes += entries[len].length;
	return bytes;
}

/* ---- pages that are pinned ---- */
/* A pipe keeps the pages that it was given, whatever the file is made of later: that is what a device sees. */
static void pin(struct mr *mr)
{
	struct iovec memory = {mr->addr, mr->length};

	MUST(pipe2(mr->pages, O_CLOEXEC) == 0 && fcntl(mr->pages[1], F_SETPIPE_SZ, mr->length) >= (int)mr->length);
	MUST(vmsplice(mr->pages[1], &memory, 1, 0) == (ssize_t)mr->length);
}

static const uint8_t *seen_in(const struct mr *mr, const struct verbs_sge *entry)
{
	static uint8_t seen[PINNED_MAX];
	static int copied[2];

	if (mr->pages[0] < 0)
		return (const uint8_t *)(uintptr_t)entry->addr;
	if (!copied[1])
		MUST(pipe2(copied, O_CLOEXEC) == 0 && fcntl(copied[1], F_SETPIPE_SZ, PINNED_MAX) == PINNED_MAX);
	MUST(tee(mr->pages[0], copied[1], mr->length, 0) == (ssize_t)mr->length);
	for (size_t got = 0; got < mr->length;) {
		ssize_t some = read(copied[0], seen + got, mr->length - got);
		MUST(some > 0);
		got += (size_t)some;
	}
	return seen + (entry->addr - (uintptr_t)mr->addr);
}

/* Copies entry by entry, as many bytes as there are to send; of a protection domain, or NULL: memory that need not be registered. */
static void copy(const void *pd, const struct verbs_sge *from, int from_len, const struct verbs_sge *to)
{
	uint32_t at = 0;

	for (; from_len--; from++) {
		const struct mr *mr = pd ? region_of(pd, from) : NULL;
		const uint8_t *bytes = mr ? seen_in(mr, from) : (const uint8_t *)(uintptr_t)from->addr;
		for (uint32_t n = 0; n < from->length;) {
			if (at == to->length) {
				to++;
				at = 0;
				continue;
			}
			uint32_t some = to->length - at < from->length - n ? to->length - at : from->length - n;
			memcpy((void *)(uintptr_t)(to->addr + at), bytes + n, some);
			at += some;
			n += some;
		}
	}
}

static int fail_head(struct qp *qp, int status)
{
	send_done(qp, pop(&qp->sends, &qp->sends_end), status);
	to_error(qp);
	return -1;
}

/* 1: the first request was carried out; 0: it waits; -1: it failed */
static int deliver(struct qp *qp)
{
	struct send *send = qp->sends;
	struct qp *peer = qp->dest < QPS ? qps[qp->dest] : NULL;
	uint32_t bytes = bytes_of(send->entries, send->len);

	if (qp->broken || !peer || peer->broken || peer->state < STATE_RTR || peer->state == STATE_ERROR)
		return fail_head(qp, FAKE_RETRIES);
	if (!(send->flags & VERBS_INLINE) && !all_registered(qp->pd, send->entries, send->len))
		return fail_head(qp, FAKE_PROTECTION_ERROR);
	struct verbs_sge there = {send->remote, bytes, 0};
	const void *pd = send->flags & VERBS_INLINE ? NULL : qp->pd;
	if (send->opcode == OP_WRITE) {
		copy(pd, send->entries, send->len, &there);
	} else if (send->opcode == OP_READ) {
		copy(NULL, &there, 1, send->entries);
	} else {
		struct receive *receive = peer->srq ? peer->srq->receives.first : peer->own.first;
		if (!receive)
			return 0; /* it is asked to try again, for ever */
		bool short_of = bytes > bytes_of(receive->entries, receive->len);
		if (short_of || !all_registered(peer->pd, receive->entries, receive->len)) {
			receive_done(peer, short_of ? FAKE_LENGTH_ERROR : FAKE_PROTECTION_ERROR, 0, 0, 0);
			to_error(peer);
			return fail_head(qp, FAKE_REMOTE_REQUEST);
		}
		copy(pd, send->entries, send->len, receive->entries);
		receive_done(peer, 0, VERBS_WC_RECV, 0, bytes);
	}
	pop(&qp->sends, &qp->sends_end);
	send->next = NULL;
	*qp->acks_end = send;
	qp->acks_end = &send->next;
	return 1;
}

static void go_on(void)
{
	for (bool any = true; any;) {
		any = false;
		for (uint32_t n = 0; n < next_qp; n++) {
			struct qp *qp = qps[n];
			while (qp && qp->sends && !hold_deliveries && deliver(qp) > 0)
				any = true;
			while (qp && qp->acks && !hold_acks)
				send_done(qp, pop(&qp->acks, &qp->acks_end), 0);
		}
	}
}

/* ---- what the header calls through the table ---- */
static int post_one_send(struct qp *qp, const struct verbs_send_wr *wr)
{
	if (qp->state != STATE_RTS && qp->state != STATE_ERROR)
		return EINVAL;
	if (qp->posted - qp->freed >= qp->most)
		return ENOMEM;
	struct send *send = calloc(1, sizeof(*send));
	MUST(send && wr->num_sge >= 0 && wr->num_sge <= ENTRIES);
	*send = (struct send){.wr_id = wr->wr_id,
	                      .number = ++qp->posted,
	                      .remote = wr->unused[0],
	                      .opcode = wr->opcode,
	                      .len = wr->num_sge,
	                      .flags = wr->send_flags};
	memcpy(send->entries, wr->sg_list, (size_t)wr->num_sge * sizeof(*wr->sg_list));
	if (wr->send_flags & VERBS_INLINE) {
		struct verbs_sge whole = {(uintptr_t)send->inlined, bytes_of(send->entries, send->len), 0};
		MUST(whole.length <= INLINE_MAX);
		copy(NULL, send->entries, send->len, &whole);
		send->entries[0] = whole;
		send->len = 1;
	}
	if (qp->state == STATE_ERROR) {
		send_done(qp, send, FAKE_FLUSHED);
		return 0;
	}
	*qp->sends_end = send;
	qp->sends_end = &send->next;
	return 0;
}

static int post_send(void *at, struct verbs_send_wr *wr, struct verbs_send_wr **bad)
{
	pthread_mutex_lock(&lock);
	int failed = fails(0);
	for (; wr && !failed; wr = failed ? wr : wr->next)
		failed = post_one_send(at, wr);
	*bad = wr;
	go_on();
	pthread_mutex_unlock(&lock);
	return failed;
}

static int post_receive(struct receives *to, const struct verbs_recv_wr *wr)
{
	if (to->len >= to->most)
		return ENOMEM;
	struct receive *receive = calloc(1, sizeof(*receive));
	MUST(receive && wr->num_sge >= 0 && wr->num_sge <= ENTRIES);
	receive->wr_id = wr->wr_id;
	receive->len = wr->num_sge;
	if (wr->num_sge)
		memcpy(receive->entries, wr->sg_list, (size_t)wr->num_sge * sizeof(*wr->sg_list));
	*to->end = receive;
	to->end = &receive->next;
	to->len++;
	return 0;
}

static int post_recv(void *at, struct verbs_recv_wr *wr, struct verbs_recv_wr **bad)
{
	struct qp *qp = at;

	pthread_mutex_lock(&lock);
	int failed = fails(1);
	for (; wr && !failed; wr = failed ? wr : wr->next) {
		failed = post_receive(&qp->own, wr);
		if (!failed && qp->state == STATE_ERROR)
			receive_done(qp, FAKE_FLUSHED, 0, 0, 0);
	}
	*bad = wr;
	go_on();
	pthread_mutex_unlock(&lock);
	return failed;
}

static int post_srq_recv(void *at, struct verbs_recv_wr *wr, struct verbs_recv_wr **bad)
{
	struct srq *srq = at;

	pthread_mutex_lock(&lock);
	int failed = fails(1);
	for (; wr && !failed; wr = failed ? wr : wr->next)
		failed = post_receive(&srq->receives, wr);
	*bad = wr;
	go_on();
	pthread_mutex_unlock(&lock);
	return failed;
}

static int poll_cq(void *at, int most, struct verbs_wc *wc)
{
	struct cq *cq = at;
	int count = 0;

	pthread_mutex_lock(&lock);
	int failed = fails(3);
	for (; !failed && count < most && cq->len; count++) {
		const struct completion *completion = cq->ring + cq->first;
		struct qp *qp = qps[completion->wc.qp_num];
		wc[count] = completion->wc;
		if (qp && completion->request)
			qp->freed = completion->request;
		cq->first = (cq->first + 1) % (uint32_t)cq->cqe;
		cq->len--;
	}
	pthread_mutex_unlock(&lock);
	return failed ? -failed : count;
}

static int req_notify_cq(void *at, int solicited_only)
{
	struct cq *cq = at;

	(void)solicited_only;
	pthread_mutex_lock(&lock);
	int failed = fails(2);
	cq->armed |= !failed;
	pthread_mutex_unlock(&lock);
	return failed;
}

static void *no_window(void *pd, int kind)
{
	(void)pd, (void)kind;
	errno = ENOMEM;
	return NULL;
}

/* ---- devices and contexts ---- */
EXPORTED int ibv_fork_init(void)
{
	return 0;
}

EXPORTED void **ibv_get_device_list(int *count)
{
	void **list = calloc(FAKE_DEVICES + 1, sizeof(*list));

	MUST(list);
	for (uint8_t n = 0; n < FAKE_DEVICES; n++) {
		snprintf(devices[n].name, sizeof(devices[n].name), "fake%u", n);
		snprintf(devices[n].dev_name, sizeof(devices[n].dev_name), "uverbs-fake%u", n);
		const uint8_t gid[16] = {[10] = 0xFF, [11] = 0xFF, [12] = 127, [13] = 77, [15] = (uint8_t)(n + 1)};
		memcpy(devices[n].gid, gid, sizeof(gid));
		list[n] = devices + n;
	}
	*count = FAKE_DEVICES;
	return list;
}

EXPORTED void ibv_free_device_list(void **list)
{
	free(list);
}

static void pipe_of(int *out, int *in)
{
	int fds[2];

	MUST(pipe2(fds, O_CLOEXEC) == 0);
	*out = fds[0];
	*in = fds[1];
}

EXPORTED struct context *ibv_open_device(struct device *device)
{
	struct context *context = calloc(1, sizeof(*context));

	MUST(context);
	context->device = device;
	/* as `struct ibv_context_ops` has them */
	memcpy(context->ops + 7, &(void *(*)(void *, int)){no_window}, sizeof(void *));
	memcpy(context->ops + 11, &(int (*)(void *, int, struct verbs_wc *)){poll_cq}, sizeof(void *));
	memcpy(context->ops + 12, &(int (*)(void *, int)){req_notify_cq}, sizeof(void *));
	memcpy(context->ops + 20, &(int (*)(void *, struct verbs_recv_wr *, struct verbs_recv_wr **)){post_srq_recv},
	       sizeof(void *));
	memcpy(context->ops + 25, &(int (*)(void *, struct verbs_send_wr *, struct verbs_send_wr **)){post_send},
	       sizeof(void *));
	memcpy(context->ops + 26, &(int (*)(void *, struct verbs_recv_wr *, struct verbs_recv_wr **)){post_recv},
	       sizeof(void *));
	pipe_of(&context->async_fd, &context->async_in);
	pthread_mutex_lock(&lock);
	context->next = contexts;
	contexts = context;
	pthread_mutex_unlock(&lock);
	return context;
}

EXPORTED int ibv_close_device(struct context *context)
{
	pthread_mutex_lock(&lock);
	struct context **at = &contexts;
	while (*at != context)
		at = &(*at)->next;
	*at = context->next;
	for (uint32_t n = 0; n < next_qp; n++)
		MUST(!qps[n] || qps[n]->context != context);
	pthread_mutex_unlock(&lock);
	close(context->async_fd);
	close(context->async_in);
	free(context);
	return 0;
}

/* By the offsets of the header's structures, which rdma/kernel/data/abi-offsets.txt has. */
static void put(uint8_t *record, size_t offset, uint64_t value, size_t len)
{
	memcpy(record + offset, &value, len);
}

static uint32_t got(const uint8_t *record, size_t offset)
{
	uint32_t value;

	memcpy(&value, record + offset, sizeof(value));
	return value;
}

EXPORTED int ibv_query_device(struct context *context, uint8_t *attr)
{
	(void)context;
	memset(attr, 0, 232);
	put(attr, 80, 1ull << 40, 8); /* max_mr_size */
	put(attr, 108, QPS - 1, 4); /* max_qp */
	put(attr, 112, 4096, 4); /* max_qp_wr */
	put(attr, 120, 16, 4); /* max_sge */
	put(attr, 124, 16, 4); /* max_sge_rd */
	put(attr, 132, 65536, 4); /* max_cqe */
	put(attr, 136, 65536, 4); /* max_mr */
	put(attr, 144, 16, 4); /* max_qp_rd_atom */
	put(attr, 156, 16, 4); /* max_qp_init_rd_atom */
	put(attr, 212, 64, 4); /* max_srq */
	put(attr, 220, 4, 4); /* max_srq_sge */
	put(attr, 227, 1, 1); /* phys_port_cnt */
	return 0;
}

EXPORTED int ibv_query_port(struct context *context, uint8_t port, uint8_t *attr)
{
	(void)context, (void)port;
	memset(attr, 0, 52);
	put(attr, 0, 4, 4); /* active */
	put(attr, 4, MTU_4096, 4); /* max_mtu */
	put(attr, 8, MTU_4096, 4); /* active_mtu */
	put(attr, 20, 1u << 30, 4); /* max_msg_sz */
	put(attr, 46, 2, 1); /* Ethernet */
	return 0;
}

EXPORTED int _ibv_query_gid_ex(struct context *context, uint32_t port, uint32_t index, uint8_t *entry, uint32_t flags,
                               size_t len)
{
	(void)flags, (void)len;
	if (index || port != 1)
		return ENODATA;
	memset(entry, 0, 32);
	memcpy(entry, context->device->gid, 16);
	put(entry, 20, 1, 4);
	put(entry, 24, 2, 4); /* RoCE v2 */
	return 0;
}

EXPORTED ssize_t _ibv_query_gid_table(struct context *context, uint8_t *entries, size_t most, uint32_t flags,
                                      size_t len)
{
	return most && !_ibv_query_gid_ex(context, 1, 0, entries, flags, len) ? 1 : 0;
}

struct async_event {
	void *element;
	int kind;
};

EXPORTED int ibv_get_async_event(struct context *context, struct async_event *event)
{
	return read(context->async_fd, event, sizeof(*event)) == sizeof(*event) ? 0 : -1;
}

EXPORTED void ibv_ack_async_event(struct async_event *event)
{
	(void)event;
}

/* ---- memory ---- */
EXPORTED void *ibv_alloc_pd(struct context *context)
{
	void **pd = calloc(2, sizeof(*pd));

	MUST(pd);
	*pd = context;
	return pd;
}

EXPORTED int ibv_dealloc_pd(void *pd)
{
	for (const struct mr *mr = regions; mr; mr = mr->next)
		MUST(mr->pd != pd);
	free(pd);
	return 0;
}

/* What a device pins: whole pages, for each region anew, as the kernel counts them against RLIMIT_MEMLOCK (ib_umem_get). */
static uint64_t pages_of(const struct mr *mr)
{
	return (((uintptr_t)mr->addr + mr->length - 1) >> 12) - ((uintptr_t)mr->addr >> 12) + 1;
}

EXPORTED struct mr *ibv_reg_mr(void *pd, void *addr, size_t length, int access)
{
	struct mr *mr = calloc(1, sizeof(*mr));
	int error;

	MUST(mr);
	pthread_mutex_lock(&lock);
	error = fails(4);
	if (error) {
		pthread_mutex_unlock(&lock);
		free(mr);
		errno = error;
		return NULL;
	}
	*mr = (struct mr){.pd = pd,
	                  .addr = addr,
	                  .length = length,
	                  .lkey = next_key << 8,
	                  .rkey = next_key << 8,
	                  .next = regions,
	                  .pages = {-1, -1}};
	if (!access && length <= PINNED_MAX && !((uintptr_t)addr % PAGE)) /* it is only read from, by the engine */
		pin(mr);
	next_key++;
	regions = mr;
	registered += length;
	pages += pages_of(mr);
	pthread_mutex_unlock(&lock);
	return mr;
}

/* Whether something that is still to be sent, or may have to be once more, lies in a region. */
static bool reads(const struct send *send, const struct mr *mr)
{
	for (; send; send = send->next)
		for (int n = 0; n < send->len && !(send->flags & VERBS_INLINE); n++)
			if (send->entries[n].lkey == mr->lkey)
				return true;
	return false;
}

EXPORTED int ibv_dereg_mr(struct mr *mr)
{
	struct mr **at = &regions;

	pthread_mutex_lock(&lock);
	while (*at != mr)
		at = &(*at)->next;
	*at = mr->next;
	registered -= mr->length;
	for (uint32_t n = 0; n < next_qp; n++)
		MUST(!qps[n] || !(reads(qps[n]->sends, mr) || reads(qps[n]->acks, mr)));
	pages -= pages_of(mr);
	pthread_mutex_unlock(&lock);
	for (int n = 0; n < 2; n++)
		if (mr->pages[n] >= 0)
			close(mr->pages[n]);
	free(mr);
	return 0;
}

/* ---- queues ---- */
EXPORTED struct channel *ibv_create_comp_channel(struct context *context)
{
	struct channel *channel = calloc(1, sizeof(*channel));

	MUST(channel);
	channel->context = context;
	pipe_of(&channel->fd, &channel->in);
	return channel;
}

EXPORTED int ibv_destroy_comp_channel(struct channel *channel)
{
	MUST(!channel->refcnt);
	close(channel->fd);
	close(channel->in);
	free(channel);
	return 0;
}

EXPORTED struct cq *ibv_create_cq(struct context *context, int cqe, void *cq_context, struct channel *channel,
                                  int vector)
{
	struct cq *cq = calloc(1, sizeof(*cq));

	(void)vector;
	MUST(cq);
	*cq = (struct cq){.context = context, .channel = channel, .cq_context = cq_context, .cqe = cqe};
	cq->ring = calloc((size_t)cqe, sizeof(*cq->ring));
	MUST(cq->ring);
	if (channel)
		channel->refcnt++;
	return cq;
}

EXPORTED int ibv_resize_cq(struct cq *cq, int cqe)
{
	pthread_mutex_lock(&lock);
	struct completion *ring = calloc((size_t)cqe, sizeof(*ring));
	MUST(ring && cqe >= cq->cqe);
	for (uint32_t n = 0; n < cq->len; n++)
		ring[n] = cq->ring[(cq->first + n) % (uint32_t)cq->cqe];
	free(cq->ring);
	cq->ring = ring;
	cq->cqe = cqe;
	cq->first = 0;
	pthread_mutex_unlock(&lock);
	return 0;
}

EXPORTED int ibv_get_cq_event(struct channel *channel, struct cq **cq, void **context)
{
	if (read(channel->fd, cq, sizeof(*cq)) != sizeof(*cq))
		return -1;
	*context = (*cq)->cq_context;
	return 0;
}

EXPORTED void ibv_ack_cq_events(struct cq *cq, unsigned int count)
{
	pthread_mutex_lock(&lock);
	MUST(cq->events >= count);
	cq->events -= count;
	pthread_mutex_unlock(&lock);
}

EXPORTED int ibv_destroy_cq(struct cq *cq)
{
	struct cq *told;
	void *context;

	MUST(!cq->users);
	while (cq->channel &&
	       cq->events) { /* as the kernel does with what was not fetched; what was is to be acknowledged */
		MUST(ibv_get_cq_event(cq->channel, &told, &context) == 0 && told == cq);
		cq->events--;
	}
	if (cq->channel)
		cq->channel->refcnt--;
	free(cq->ring);
	free(cq);
	return 0;
}

static void receives_free(struct receives *receives)
{
	while (receives->first) {
		struct receive *receive = receives->first;
		receives->first = receive->next;
		free(receive);
	}
}

/* It has no datagrams. */
EXPORTED void *ibv_create_ah(void **pd, const uint8_t *attr)
{
	(void)pd;
	(void)attr;
	errno = EOPNOTSUPP;
	return NULL;
}

EXPORTED int ibv_destroy_ah(void *ah)
{
	(void)ah;
	return EINVAL;
}

EXPORTED struct srq *ibv_create_srq(void **pd, const uint8_t *attr)
{
	struct srq *srq = calloc(1, sizeof(*srq));

	MUST(srq);
	srq->context = *pd;
	srq->receives.most = got(attr, 8);
	srq->receives.end = &srq->receives.first;
	return srq;
}

EXPORTED int ibv_modify_srq(struct srq *srq, const uint8_t *attr, int mask)
{
	(void)mask;
	srq->limit = got(attr, 8);
	return 0;
}

EXPORTED int ibv_destroy_srq(struct srq *srq)
{
	MUST(!srq->users);
	receives_free(&srq->receives);
	free(srq);
	return 0;
}

EXPORTED struct qp *ibv_create_qp(void **pd, const uint8_t *attr)
{
	struct qp *qp = calloc(1, sizeof(*qp));

	MUST(qp);
	if (got(attr, 48) > INLINE_MAX || next_qp >= QPS) {
		free(qp);
		errno = EINVAL;
		return NULL;
	}
	qp->context = *pd;
	qp->pd = pd;
	memcpy(&qp->send_cq, attr + 8, sizeof(void *));
	memcpy(&qp->recv_cq, attr + 16, sizeof(void *));
	memcpy(&qp->srq, attr + 24, sizeof(void *));
	qp->most = got(attr, 32);
	qp->own.most = got(attr, 36);
	qp->own.end = &qp->own.first;
	qp->sends_end = &qp->sends;
	qp->acks_end = &qp->acks;
	qp->send_cq->users++;
	qp->recv_cq->users++;
	if (qp->srq)
		qp->srq->users++;
	pthread_mutex_lock(&lock);
	qp->qp_num = next_qp++;
	qps[qp->qp_num] = qp;
	pthread_mutex_unlock(&lock);
	return qp;
}

EXPORTED int ibv_modify_qp(struct qp *qp, const uint8_t *attr, int mask)
{
	pthread_mutex_lock(&lock);
	if (mask & MASK_DEST)
		qp->dest = got(attr, 28);
	if (mask & MASK_STATE && got(attr, 0) == STATE_ERROR)
		to_error(qp);
	else if (mask & MASK_STATE)
		qp->state = (int)got(attr, 0);
	go_on();
	pthread_mutex_unlock(&lock);
	return 0;
}

EXPORTED int ibv_destroy_qp(struct qp *qp)
{
	pthread_mutex_lock(&lock);
	qps[qp->qp_num] = NULL;
	while (qp->sends)
		free(pop(&qp->sends, &qp->sends_end));
	while (qp->acks)
		free(pop(&qp->acks, &qp->acks_end));
	receives_free(&qp->own);
	qp->send_cq->users--;
	qp->recv_cq->users--;
	if (qp->srq)
		qp->srq->users--;
	pthread_mutex_unlock(&lock);
	free(qp);
	return 0;
}

/* ---- for tests ---- */
EXPORTED void fake_hold(int deliveries, int acknowledgements)
{
	pthread_mutex_lock(&lock);
	hold_deliveries = deliveries;
	hold_acks = acknowledgements;
	go_on();
	pthread_mutex_unlock(&lock);
}

EXPORTED void fake_fail(const char *call, int error, int count)
{
	pthread_mutex_lock(&lock);
	failing[call_of(call)].error = error;
	failing[call_of(call)].count = count;
	pthread_mutex_unlock(&lock);
}

EXPORTED int fake_receive(uint32_t qp_num, int status, int opcode, unsigned int flags, uint32_t byte_len)
{
	pthread_mutex_lock(&lock);
	struct qp *qp = qp_num < QPS ? qps[qp_num] : NULL;
	bool may = qp && qp->own.first;
	if (may)
		receive_done(qp, status, opcode, flags, byte_len);
	pthread_mutex_unlock(&lock);
	return may ? 0 : -ENOENT;
}

EXPORTED int fake_break(uint32_t qp_num)
{
	pthread_mutex_lock(&lock);
	struct qp *qp = qp_num < QPS ? qps[qp_num] : NULL;
	if (qp)
		qp->broken = true;
	pthread_mutex_unlock(&lock);
	return qp ? 0 : -ENOENT;
}

EXPORTED int fake_event(int kind, uint32_t qp_num)
{
	pthread_mutex_lock(&lock);
	struct async_event event = {qp_num ? qps[qp_num] : NULL, kind};
	for (struct context *context = contexts; context; context = context->next)
		MUST(write(context->async_in, &event, sizeof(event)) == sizeof(event));
	pthread_mutex_unlock(&lock);
	return 0;
}

EXPORTED uint64_t fake_count(const char *what)
{
	uint64_t count = 0;

	pthread_mutex_lock(&lock);
	if (call_of(what) >= 0)
		count = calls_made[call_of(what)];
	else if (!strcmp(what, "registered"))
		count = registered;
	else if (!strcmp(what, "pages"))
		count = pages;
	for (uint32_t n = 0; n < next_qp && !strcmp(what, "outstanding"); n++)
		count += qps[n] ? qps[n]->posted - qps[n]->freed : 0;
	pthread_mutex_unlock(&lock);
	return count;
}
