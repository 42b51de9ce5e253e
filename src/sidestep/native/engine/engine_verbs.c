/*
 * engine_verbs.c - a device of the kernel, as a wire of the engine: each message is a Send.
 *
 * What is sent goes with its request if the device copies that much (IBV_SEND_INLINE), else by a copy in the slab. If the
 * device has pinned the ring of the application, a message of more than a slot goes from there, and but its header is copied:
 * its bytes stay where they are until the other host has told READ, so it has them, and what the device might still send of
 * them is a duplicate. That the pages are the same still is said by channel_rx_pages(), see channel_trim().
 *
 * Of the requests of a turn the last is signaled if any of them holds slots; of inline ones some, so that the send queue never
 * runs full of those of which nobody tells. A receive is posted again, with its number, as soon as its message was taken.
 *
 * While it is awake, the engine looks at the completion queue itself; before it sleeps the queue is armed, and looked at
 * once more (ibv_req_notify_cq(3)).
 */
#include "engine_wire.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define QUEUE_MAX (256u << 10)
#define CHAINED_MAX (32u << 10) /* bytes that wait for the doorbell: the device may as well begin */
#define STARVED_NS 1000000      /* until slots are looked for again, if nothing tells of some */
#define HOT_NS 1000000000       /* within which so many bytes make a ring worth pinning */

static struct wire_verbs *verbs_of(struct wire *wire)
{
	return (struct wire_verbs *)(void *)wire;
}

static const struct verbs_qp *qp_seen(const struct wire *wire)
{
	return ((const struct wire_verbs *)(const void *)wire)->qp;
}

/* ---- the slab ---- */
int verbs_slab_init(struct verbs_slab *slab, uint8_t *base, size_t len, uint32_t lkey)
{
	size_t count = len / VERBS_SLOT;

	*slab = (struct verbs_slab){.base = base, .lkey = lkey};
	slab->end_waiting = &slab->first_waiting;
	if (count < VERBS_SLOTS || count > UINT16_MAX)
		return -EINVAL;
	slab->free = calloc(count, sizeof(*slab->free));
	if (!slab->free)
		return -ENOMEM;
	pthread_mutex_init(&slab->lock, NULL);
	slab->slots_len = (uint32_t)count;
	while (count--)
		slab->free[slab->free_len++] = (uint16_t)count;
	return 0;
}

void verbs_slab_free(struct verbs_slab *slab)
{
	if (!slab->free)
		return;
	pthread_mutex_destroy(&slab->lock);
	free(slab->free);
	slab->free = NULL;
}

uint32_t verbs_slab_room(struct verbs_slab *slab)
{
	pthread_mutex_lock(&slab->lock);
	uint32_t room = slab->free_len;
	pthread_mutex_unlock(&slab->lock);
	return room;
}

/* Its turn to wait is over. The lock is held. */
static void waits_no_more(struct verbs_qp *qp)
{
	struct verbs_slab *slab = qp->slab;
	struct verbs_qp **at = &slab->first_waiting;

	if (!qp->wants)
		return;
	while (*at != qp)
		at = &(*at)->next_waiting;
	*at = qp->next_waiting;
	if (!*at)
		slab->end_waiting = at;
	qp->wants = 0;
}

/* Who frees some might take them again at once, for ever: so who has waited the longest is served first. */
static bool slab_take(struct verbs_qp *qp, struct verbs_send *send, uint32_t count)
{
	struct verbs_slab *slab = qp->slab;

	pthread_mutex_lock(&slab->lock);
	bool enough = slab->free_len >= count && (!slab->first_waiting || slab->first_waiting == qp);
	for (; enough && send->slots_len < count; send->slots_len++)
		send->slots[send->slots_len] = slab->free[--slab->free_len];
	if (enough) {
		waits_no_more(qp);
	} else if (!qp->wants) {
		qp->next_waiting = NULL;
		*slab->end_waiting = qp;
		slab->end_waiting = &qp->next_waiting;
	}
	if (!enough)
		qp->wants = count;
	pthread_mutex_unlock(&slab->lock);
	return enough;
}

/* Whether it would get what it waits for. */
static bool slab_has(struct verbs_qp *qp)
{
	struct verbs_slab *slab = qp->slab;

	if (!qp->wants)
		return false;
	pthread_mutex_lock(&slab->lock);
	bool has = slab->first_waiting == qp && slab->free_len >= qp->wants;
	pthread_mutex_unlock(&slab->lock);
	return has;
}

static void slab_leave(struct verbs_qp *qp)
{
	if (!qp->wants)
		return;
	pthread_mutex_lock(&qp->slab->lock);
	waits_no_more(qp);
	pthread_mutex_unlock(&qp->slab->lock);
}

static void slab_put(struct verbs_slab *slab, struct verbs_send *send)
{
	if (!send->slots_len)
		return;
	pthread_mutex_lock(&slab->lock);
	while (send->slots_len)
		slab->free[slab->free_len++] = send->slots[--send->slots_len];
	pthread_mutex_unlock(&slab->lock);
}

/* ---- beginning and end ---- */
int verbs_begin(struct verbs_qp *qp, uint64_t number, uint32_t before, const struct verbs_receive *receives,
                uint32_t len)
{
	struct verbs_receive *own = realloc(qp->receives, (len ? len : 1) * sizeof(*own));

	if (!own)
		return -ENOMEM;
	if (len)
		memcpy(own, receives, len * sizeof(*own));
	qp->receives = own;
	qp->receives_len = len;
	qp->receives_first = 0;
	qp->first = qp->done = qp->sent = number;
	qp->before = qp->unsignaled = before;
	qp->owing = false;
	qp->bytes_out = 0;
	qp->chained = qp->chained_bytes = 0;
	qp->wc_at = qp->wc_len = 0;
	qp->armed = qp->starved = false;
	qp->error = 0;
	return 0;
}

static struct verbs_send *send_of(struct verbs_qp *qp, uint64_t number)
{
	return qp->sends + number % VERBS_SENDS;
}

uint64_t verbs_gathering(const struct verbs_qp *qp)
{
	uint64_t number = qp->sent;

	while (number != qp->done && !qp->sends[(number - 1) % VERBS_SENDS].gathered)
		number--;
	return number == qp->done ? 0 : number;
}

void verbs_finish(struct verbs_qp *qp, uint64_t number)
{
	if (number >= qp->first && number < qp->sent) /* those of an earlier loan have none */
		slab_put(qp->slab, send_of(qp, number));
}

void verbs_release(struct verbs_qp *qp)
{
	for (uint32_t n = 0; n < VERBS_SENDS; n++)
		slab_put(qp->slab, qp->sends + n);
	free(qp->receives);
	qp->receives = NULL;
	qp->receives_len = 0;
}

/* ---- completions ---- */
/*
 * What the channel has told is done with. It tells once for each time that the queue was armed, so one look is enough; one more, that
 * Python had asked for before the loan, costs a wake-up and no more.
 */
static void take_cq_events(struct verbs_qp *qp)
{
	void *cq, *context;

	if (!qp->armed || qp->calls.get_cq_event(qp->channel, &cq, &context))
		return;
	qp->calls.ack_cq_events(cq, 1);
	qp->armed = false;
}

/* Whether there is a completion, or an error. */
static bool completions_look(struct verbs_qp *qp)
{
	if (qp->wc_at < qp->wc_len || qp->error)
		return true;
	int count = qp->calls.poll_cq(qp->cq, VERBS_BATCH, qp->wc);

	qp->wc_at = qp->wc_len = 0;
	if (count < 0 || count > VERBS_BATCH)
		qp->error = EIO;
	else
		qp->wc_len = (uint32_t)count;
	return count != 0;
}

/* Requests up to this one are done. False: it is none of those that are to tell. */
static bool sends_done(struct verbs_qp *qp, const struct verbs_wc *wc)
{
	uint64_t number = wc->wr_id >> 1;

	if (wc->opcode != VERBS_WC_SEND || number < qp->done || number >= qp->sent - qp->chained ||
	    !send_of(qp, number)->signaled)
		return false;
	for (; qp->done <= number; qp->done++) {
		struct verbs_send *send = send_of(qp, qp->done);
		qp->bytes_out -= send->bytes;
		slab_put(qp->slab, send);
	}
	return true;
}

static bool is_plain(const struct verbs_qp *qp, const struct verbs_wc *wc, uint32_t most)
{
	if (!qp->receives_len)
		return false;
	const struct verbs_receive *oldest = qp->receives + qp->receives_first;

	return wc->opcode == VERBS_WC_RECV && !(wc->wc_flags & (VERBS_WC_WITH_IMM | VERBS_WC_WITH_INV)) &&
	       wc->wr_id == oldest->wr_id && wc->byte_len <= oldest->len && wc->byte_len <= most;
}

static int verbs_next(struct wire *wire, uint32_t most)
{
	struct verbs_qp *qp = verbs_of(wire)->qp;

	if (wire->readable)
		take_cq_events(qp);
	wire->readable = qp->starved = false;
	while (completions_look(qp)) {
		if (qp->error) {
			wire->error = qp->error;
			return -ENGINE_BROKEN;
		}
		const struct verbs_wc *wc = qp->wc + qp->wc_at;
		if (wc->status != VERBS_WC_SUCCESS) { /* Python finds it, and says what follows */
			wire->error = ECONNABORTED;
			return -ENGINE_BROKEN;
		}
		if (wc->wr_id & 1) {
			wire->len = wc->byte_len;
			return is_plain(qp, wc, most) ? 1 : -ENGINE_MESSAGE;
		}
		if (!sends_done(qp, wc))
			return -ENGINE_MESSAGE;
		qp->wc_at++;
	}
	return 0;
}

static void verbs_copy(const struct wire *wire, uint32_t from, uint8_t *to, uint32_t len)
{
	const struct verbs_qp *qp = qp_seen(wire);

	memcpy(to, qp->receives[qp->receives_first].at + from, len);
}

static void verbs_taken(struct wire *wire)
{
	struct verbs_qp *qp = verbs_of(wire)->qp;
	const struct verbs_receive *receive = qp->receives + qp->receives_first;
	struct verbs_sge entry = {(uintptr_t)receive->at, receive->len, receive->lkey};
	struct verbs_recv_wr wr = {.wr_id = receive->wr_id, .sg_list = &entry, .num_sge = 1}, *bad;
	int failed = qp->calls.post_recv(qp->qp, &wr, &bad);

	if (failed && !qp->error)
		qp->error = abs(failed);
	qp->receives_first = (qp->receives_first + 1) % qp->receives_len;
	qp->wc_at++;
}

/* ---- sending ---- */
/* Of what waits for the doorbell the device has so many; the rest is forgotten. */
static void chain_drop(struct verbs_qp *qp, uint32_t posted)
{
	for (; qp->chained > posted; qp->chained--)
		slab_put(qp->slab, send_of(qp, --qp->sent));
	qp->chained = qp->chained_bytes = 0;
}

/* Of a message, and of its gather list. */
static uint32_t entries_max(const struct verbs_qp *qp)
{
	return qp->gather_max < VERBS_SLOTS ? qp->gather_max : VERBS_SLOTS;
}

/* Rings the doorbell for what waits for it. 0 or an errno. */
static int chain_post(struct verbs_qp *qp)
{
	struct verbs_send_wr *bad = NULL;

	if (!qp->chained)
		return 0;
	struct verbs_send_wr *last = qp->chain + qp->chained - 1;
	struct verbs_send *send = send_of(qp, qp->sent - 1);
	if (qp->owing || qp->unsignaled >= VERBS_SENDS / 2) {
		last->send_flags |= VERBS_SIGNALED;
		send->signaled = true;
		qp->unsignaled = 0;
		qp->owing = false;
	}
	for (uint32_t n = 0; n + 1 < qp->chained; n++)
		qp->chain[n].next = qp->chain + n + 1;
	last->next = NULL;
	int failed = abs(qp->calls.post_send(qp->qp, qp->chain, &bad));
	/* the device has those before the bad one */
	chain_drop(qp, !failed ? qp->chained : bad >= qp->chain && bad <= last ? (uint32_t)(bad - qp->chain) : 0);
	return failed;
}

/* Copies a message to where the device takes it from. */
static void write_down(struct verbs_qp *qp, uint32_t at, struct verbs_send *send, const uint8_t *header,
                       uint32_t header_len, const struct iovec *pieces)
{
	struct verbs_send_wr *wr = qp->chain + at;
	struct verbs_sge *entry = wr->sg_list;
	const uint8_t *from = header;
	size_t left = header_len;

	for (uint32_t done = 0; done < send->bytes;) {
		if (!left) {
			from = pieces->iov_base;
			left = pieces->iov_len;
			pieces++;
			continue;
		}
		uint32_t room = (send->slots_len ? VERBS_SLOT : VERBS_INLINE_MAX) - entry->length;
		if (!room) {
			entry++;
			wr->num_sge++;
			*entry = (struct verbs_sge){(uintptr_t)(qp->slab->base + (size_t)send->slots[wr->num_sge - 1] * VERBS_SLOT),
			                            0, qp->slab->lkey};
			continue;
		}
		uint32_t some = left < room ? (uint32_t)left : room;
		memcpy((uint8_t *)(uintptr_t)entry->addr + entry->length, from, some);
		entry->length += some;
		from += some;
		left -= some;
		done += some;
	}
}

/* ---- from the ring itself ---- */
static bool in_ring(const struct channel_ring *ring, const struct iovec *pieces, int pieces_len)
{
	bool in = true;

	for (int n = 0; n < pieces_len; n++) {
		size_t offset = (uintptr_t)pieces[n].iov_base - (uintptr_t)ring->data;
		in &= offset < ring->size && pieces[n].iov_len <= ring->size - offset;
	}
	return in;
}

/* Whether pages that are pinned hold what was seen in the ring. */
static bool is_pinned(const struct wire_verbs *verbs)
{
	return verbs->pages && channel_rx_pages(verbs->end) == verbs->pages;
}

/* The header goes by a slot, the pieces from where they are. */
static void gather(struct wire_verbs *verbs, struct verbs_send_wr *wr, const uint8_t *header, uint32_t header_len,
                   const struct iovec *pieces, int pieces_len)
{
	memcpy((uint8_t *)(uintptr_t)wr->sg_list->addr, header, header_len);
	wr->sg_list->length = header_len;
	for (; pieces_len--; pieces++)
		wr->sg_list[wr->num_sge++] =
			(struct verbs_sge){(uintptr_t)pieces->iov_base, (uint32_t)pieces->iov_len, verbs->lkey};
}

/* So many bytes were copied that need not have been. */
static void heat(struct wire_verbs *verbs, uint32_t len)
{
	struct verbs_qp *qp = verbs->qp;
	int64_t now = verbs->wire.now_ns;

	if (!qp->hot_bytes || now < qp->hot_since)
		return;
	if (now - qp->hot_since > HOT_NS) {
		qp->hot_since = now;
		qp->copied = 0;
	}
	qp->copied += len;
	verbs->wire.hot = qp->copied >= qp->hot_bytes;
}

static int verbs_put(struct wire *wire, const uint8_t *header, uint32_t header_len, const struct iovec *pieces,
                     int pieces_len)
{
	struct wire_verbs *verbs = verbs_of(wire);
	struct verbs_qp *qp = verbs->qp;
	struct verbs_send *send = send_of(qp, qp->sent);
	uint32_t len = header_len, at = qp->chained;

	if (qp->error) { /* nothing goes on: the chain is not posted any more, and has no room */
		wire->error = qp->error;
		return -ENGINE_BROKEN;
	}
	for (int n = 0; n < pieces_len; n++)
		len += (uint32_t)pieces[n].iov_len;
	*send = (struct verbs_send){.bytes = len};
	bool inlined = len <= qp->inline_max;
	bool large =
		len > VERBS_SLOT && (uint32_t)pieces_len < entries_max(qp) && in_ring(&verbs->end->rx, pieces, pieces_len);
	bool gathered = large && is_pinned(verbs);
	if (!inlined && !slab_take(qp, send, gathered ? 1 : (len + VERBS_SLOT - 1) / VERBS_SLOT)) {
		qp->starved = true;
		return 1;
	}
	qp->entries[at][0] = inlined ? (struct verbs_sge){.addr = (uintptr_t)qp->inlined[at]}
	                             : (struct verbs_sge){(uintptr_t)(qp->slab->base + (size_t)send->slots[0] * VERBS_SLOT),
	                                                  0, qp->slab->lkey};
	qp->chain[at] = (struct verbs_send_wr){.wr_id = qp->sent << 1,
	                                       .sg_list = qp->entries[at],
	                                       .num_sge = 1,
	                                       .opcode = VERBS_WR_SEND,
	                                       .send_flags = inlined ? VERBS_INLINE : 0};
	if (gathered) {
		gather(verbs, qp->chain + at, header, header_len, pieces, pieces_len);
		atomic_fetch_add_explicit(&qp->gathered, len - header_len, memory_order_relaxed);
		send->gathered = true;
	} else {
		write_down(qp, at, send, header, header_len, pieces);
		if (large)
			heat(verbs, len);
	}
	qp->sent++;
	qp->chained++;
	qp->chained_bytes += len;
	qp->unsignaled++;
	qp->owing |= !inlined;
	qp->bytes_out += len;
	if (qp->chained == VERBS_CHAIN || qp->chained_bytes >= CHAINED_MAX)
		qp->error = chain_post(qp);
	return 0;
}

/* Where the send queue is full, as much as is ever queued: what completes makes room. */
static uint64_t verbs_waiting(const struct wire *wire)
{
	const struct verbs_qp *qp = qp_seen(wire);
	uint64_t busy = qp->sent - qp->done + (qp->done == qp->first ? qp->before : 0);

	return busy >= VERBS_SENDS ? QUEUE_MAX : qp->bytes_out;
}

static int verbs_flush(struct wire *wire)
{
	struct verbs_qp *qp = verbs_of(wire)->qp;

	if (!qp->error)
		qp->error = chain_post(qp);
	if (!qp->starved)
		slab_leave(qp);
	wire->deadline_ns = qp->starved ? wire->now_ns + STARVED_NS : 0;
	if (!qp->error)
		return 0;
	wire->error = qp->error;
	return -ENGINE_BROKEN;
}

static int verbs_give_back(struct wire *wire)
{
	struct verbs_qp *qp = verbs_of(wire)->qp;

	slab_leave(qp);
	if (qp->error)
		chain_drop(qp, 0);
	else
		qp->error = chain_post(qp);
	wire->error = qp->error ? qp->error : wire->error;
	return -qp->error;
}

/* ---- while it is awake ---- */
static bool verbs_look(struct wire *wire)
{
	struct verbs_qp *qp = verbs_of(wire)->qp;

	return completions_look(qp) || slab_has(qp);
}

static bool verbs_arm(struct wire *wire)
{
	struct verbs_qp *qp = verbs_of(wire)->qp;

	if (!qp->armed) {
		int failed = qp->calls.req_notify_cq(qp->cq, 0);
		if (failed && !qp->error)
			qp->error = abs(failed);
		qp->armed = !failed;
	}
	return !verbs_look(wire);
}

static const struct wire_ops verbs_ops = {
	.next = verbs_next,
	.copy = verbs_copy,
	.taken = verbs_taken,
	.put = verbs_put,
	.waiting = verbs_waiting,
	.flush = verbs_flush,
	.give_back = verbs_give_back,
	.look = verbs_look,
	.arm = verbs_arm,
};

void wire_verbs_init(struct wire_verbs *verbs, struct verbs_qp *qp, const struct channel_end *end,
                     const struct engine_record *record)
{
	*verbs = (struct wire_verbs){
		.wire = {.ops = &verbs_ops,
	             .readable = true,
	             .receive_fd = qp->fd,
	             .send_fd = qp->fd,
	             .queue_max = QUEUE_MAX,
	             .message_max = entries_max(qp) * VERBS_SLOT - WIRE_HEADER_MAX},
		.qp = qp,
		.end = end,
		.lkey = record->ring_lkey,
		.pages = record->ring_pages,
	};
}
