/* line_device.c - see line_device.h. */
#include "line_device.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#define RING_LKEY 1000u /* the first; each time that it is pinned has its own */
#define SEND 0x43u
#define LENGTH_ERROR 1 /* enum ibv_wc_status */
#define FLUSHED 5
#define ANY 0x55 /* of a completion with an error, what is not defined */
#define SLABS_MAX 64u /* slots */

static struct device_request *request_of(struct line_device *device, uint64_t number)
{
	return device->requests + number % VERBS_SENDS;
}

static uint8_t *buffer_of(const struct line_device *device, uint64_t number)
{
	return device->buffers + number * device->size;
}

/* ---- what it says ---- */
static void notify(struct line *line)
{
	struct line_device *device = line->device;

	if (!device->armed)
		return;
	device->armed = false;
	if (!device->mute) {
		device_tell(line);
		return;
	}
	device->mute--;
	device->late++;
}

void device_tell(struct line *line)
{
	struct line_device *device = line->device;

	if (write(device->event_fds[1], &line, sizeof(line)) == sizeof(line))
		device->events++;
}

static void add_completion(struct line *line, const struct verbs_wc *wc)
{
	struct line_device *device = line->device;

	CHECK(device->completions_made - device->completions_polled < DEVICE_COMPLETIONS);
	device->failing |= wc->status != VERBS_WC_SUCCESS;
	device->completions[device->completions_made++ % DEVICE_COMPLETIONS] = *wc;
	notify(line);
}

static void complete(struct line *line, struct verbs_wc wc)
{
	struct device_lie *lie = &line->device->lie;

	wc.wr_id = lie->wr_id ? lie->wr_id : wc.wr_id;
	wc.status = lie->status ? lie->status : wc.status;
	wc.opcode = lie->opcode ? lie->opcode : wc.opcode;
	wc.wc_flags = lie->flags ? lie->flags : wc.wc_flags;
	wc.byte_len = lie->byte_len ? lie->byte_len : wc.byte_len;
	*lie = (struct device_lie){0};
	add_completion(line, &wc);
}

void device_make_up(struct line *line, const struct device_lie *lie)
{
	struct line_device *device = line->device;
	const struct verbs_wc wc = {.wr_id = lie->wr_id,
	                            .status = lie->status,
	                            .opcode = lie->opcode,
	                            .byte_len = lie->byte_len,
	                            .wc_flags = lie->flags};

	if (device->completions_made - device->completions_polled < DEVICE_COMPLETIONS / 4)
		add_completion(line, &wc);
}

/* Its connection is over: all that is posted is flushed. */
static void break_off(struct line *line)
{
	struct line_device *device = line->device;

	if (device->over)
		return;
	device->over = true;
	device->carried = device->posted;
	for (; device->completed != device->posted; device->completed++)
		add_completion(line, &(struct verbs_wc){.wr_id = request_of(device, device->completed)->wr_id,
		                                        .status = FLUSHED,
		                                        .opcode = ANY});
	for (; device->receives_taken != device->receives_posted; device->receives_taken++)
		add_completion(line,
		               &(struct verbs_wc){.wr_id = device->receives[device->receives_taken % DEVICE_RECEIVES] << 1 | 1,
		                                  .status = FLUSHED,
		                                  .opcode = ANY});
}

/* ---- sending ---- */
static bool lies_in(const struct verbs_sge *entry, const uint8_t *base, size_t len)
{
	uint64_t offset = entry->addr - (uintptr_t)base;

	return offset < len && entry->length <= len - offset;
}

/* Whether it is in the ring of the application, which has to be pinned as it is now; else it is in the slab. */
static bool judge_entry(const struct line *line, const struct verbs_sge *entry)
{
	const struct line_device *device = line->device;
	const struct verbs_slab *slab = device->qp.slab;
	const struct channel_end *end = &line->host.channel;

	CHECK(entry->length, "an entry of nothing");
	if (entry->lkey == DEVICE_SLAB_LKEY) {
		CHECK(lies_in(entry, slab->base, (size_t)slab->slots_len * VERBS_SLOT), "it leaves the slab");
		CHECK((entry->addr - (uintptr_t)slab->base) % VERBS_SLOT == 0 && entry->length <= VERBS_SLOT);
		return false;
	}
	CHECK(device->pages && entry->lkey == device->lkey && !device->leaving, "key %u of nothing that is pinned",
	      entry->lkey);
	CHECK(channel_rx_pages(end) == device->pages, "the pages that are pinned are others");
	CHECK(lies_in(entry, end->rx.data, end->rx.size), "it leaves the ring");
	return true;
}

/* Of what a request has in the slab. */
static uint64_t sum_of(const struct device_request *request)
{
	uint64_t sum = 0xCBF29CE484222325ull, word;

	for (uint32_t n = 0; n < request->entries_len; n++) {
		const struct verbs_sge *entry = request->entries + n;
		for (uint32_t at = 0; entry->lkey == DEVICE_SLAB_LKEY && at < entry->length; at += sizeof(word)) {
			word = 0;
			memcpy(&word, (const uint8_t *)(uintptr_t)entry->addr + at,
			       entry->length - at < sizeof(word) ? entry->length - at : sizeof(word));
			sum = (sum ^ word) * 0x9E3779B97F4A7C15ull;
		}
	}
	return sum;
}

static void post_one(struct line *line, const struct verbs_send_wr *wr)
{
	struct line_device *device = line->device;
	struct device_request *request = request_of(device, device->posted);

	CHECK(device->posted - device->freed < VERBS_SENDS, "the send queue runs over");
	CHECK(wr->opcode == VERBS_WR_SEND && !(wr->send_flags & ~(unsigned)(VERBS_SIGNALED | VERBS_INLINE)));
	CHECK(wr->num_sge > 0 && (uint32_t)wr->num_sge <= device->options.gather_max &&
	      (uint32_t)wr->num_sge <= VERBS_SLOTS);
	*request =
		(struct device_request){.wr_id = wr->wr_id, .entries_len = (uint32_t)wr->num_sge, .flags = wr->send_flags};
	memcpy(request->entries, wr->sg_list, sizeof(*wr->sg_list) * request->entries_len);
	if (wr->send_flags & VERBS_INLINE) {
		CHECK(wr->num_sge == 1 && wr->sg_list->length <= device->options.inline_max, "%u bytes inline",
		      wr->sg_list->length);
		memcpy(request->inlined, (const void *)(uintptr_t)wr->sg_list->addr, wr->sg_list->length);
		request->entries[0] = (struct verbs_sge){(uintptr_t)request->inlined, wr->sg_list->length, 0};
	} else {
		CHECK(!judge_entry(line, request->entries), "a header that is not ours");
		for (uint32_t n = 1; n < request->entries_len; n++)
			judge_entry(line, request->entries + n);
	}
	request->sum = sum_of(request);
	device->posted++;
	if (device->over) {
		device->carried = device->completed = device->posted;
		add_completion(line, &(struct verbs_wc){.wr_id = wr->wr_id, .status = FLUSHED, .opcode = ANY});
	}
}

/* Whether this one fails, as it was told to. */
static int fails(struct line_device *device, enum device_call call)
{
	int error = device->fails[call].error;

	if (!error || device->fails[call].after-- > 0)
		return 0;
	device->fails[call].error = 0;
	device->failed = abs(error);
	return error;
}

static int post_send(void *at, struct verbs_send_wr *wr, struct verbs_send_wr **bad)
{
	struct line *line = at;
	struct line_device *device = line->device;
	int failed = 0;
	uint64_t before = device->posted;

	CHECK(wr && !device->failed, "a device that has failed is given more");
	for (; wr; wr = wr->next) {
		failed = fails(device, DEVICE_POST_SEND);
		if (!failed && device->lied && device->posted - device->freed >= VERBS_SENDS)
			failed = device->failed = ENOMEM; /* it was told of less than was done */
		if (failed)
			break;
		post_one(line, wr);
	}
	if (failed > 0 || device->posted != before) /* by a driver that says nothing of those it did not look at */
		*bad = wr;
	if (device->options.haste & DEVICE_CARRIES)
		device_carry(line, UINT64_MAX);
	if (device->options.haste & DEVICE_COMPLETES)
		device_complete(line, UINT64_MAX);
	return failed;
}

static void flush_out(struct line *line)
{
	struct iovec pieces[16];
	size_t bytes;

	while (framing_out_waiting(&line->out)) {
		struct msghdr message = {.msg_iov = pieces, .msg_iovlen = framing_out_peek(&line->out, pieces, 16, &bytes)};
		ssize_t wrote = sendmsg(line->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
		if (wrote < 0 && errno != EAGAIN) {
			framing_out_advance(&line->out, framing_out_waiting(&line->out));
			break_off(line);
		}
		if (wrote <= 0)
			return;
		framing_out_advance(&line->out, (size_t)wrote);
	}
}

void device_carry(struct line *line, uint64_t most)
{
	struct line_device *device = line->device;

	flush_out(line);
	for (; most && !device->over && device->carried != device->posted && !framing_out_waiting(&line->out); most--) {
		struct device_request *request = request_of(device, device->carried++);
		const struct framing_message message = {.rdmap = SEND, .msn = device->tx_msn++};
		struct framing_span spans[VERBS_SLOTS];
		uint64_t len = 0;
		for (uint32_t n = 0; n < request->entries_len; n++) {
			const struct verbs_sge *entry = request->entries + n;
			spans[n] = (struct framing_span){(uint8_t *)(uintptr_t)entry->addr, entry->length, 0, true};
			len += entry->length;
		}
		CHECK(framing_out_put(&line->out, &message, spans, request->entries_len, 0, len, true, true) == 0);
		flush_out(line);
	}
}

void device_complete(struct line *line, uint64_t most)
{
	struct line_device *device = line->device;

	for (; most && device->completed != device->carried; most--) {
		struct device_request *request = request_of(device, device->completed++);
		CHECK(device->lied || sum_of(request) == request->sum, "what may be sent once more has changed");
		if (request->flags & VERBS_SIGNALED)
			complete(line, (struct verbs_wc){.wr_id = request->wr_id, .opcode = VERBS_WC_SEND});
	}
}

bool device_has_sent(const struct line *line)
{
	return !line->device->over && line->device->carried == line->device->posted && !framing_out_waiting(&line->out);
}

/* ---- receiving ---- */
static int post_recv(void *at, struct verbs_recv_wr *wr, struct verbs_recv_wr **bad)
{
	struct line *line = at;
	struct line_device *device = line->device;
	uint64_t number = wr->wr_id >> 1;
	int failed = fails(device, DEVICE_POST_RECV);

	CHECK(!wr->next && wr->num_sge == 1 && wr->wr_id & 1 && number < line->posted);
	CHECK(wr->sg_list->addr == (uintptr_t)buffer_of(device, number) && wr->sg_list->length == device->size &&
	      wr->sg_list->lkey == DEVICE_SLAB_LKEY);
	for (uint64_t n = device->receives_taken; n != device->receives_posted; n++)
		CHECK(device->receives[n % DEVICE_RECEIVES] != number, "buffer %u is posted twice", (unsigned)number);
	if (failed) {
		*bad = wr;
		return failed;
	}
	device->receives[device->receives_posted++ % DEVICE_RECEIVES] = number;
	if (device->over) {
		device->receives_taken++;
		add_completion(line, &(struct verbs_wc){.wr_id = wr->wr_id, .status = FLUSHED, .opcode = ANY});
	}
	return 0;
}

/* A part of a message, into the oldest buffer. False: the connection is over. */
static bool place(struct line *line, const struct framing_run *run)
{
	struct line_device *device = line->device;
	uint64_t number = device->receives[device->receives_taken % DEVICE_RECEIVES];
	struct framing_span span = {buffer_of(device, number), device->size, 0, false};
	struct verbs_wc wc = {.wr_id = number << 1 | 1, .opcode = VERBS_WC_RECV};

	if (run->tagged || run->control != 1 || run->rdmap != SEND || run->queue || run->msn != device->rx_msn ||
	    run->offset != device->receiving) {
		break_off(line);
		return false;
	}
	if (run->len > device->size - device->receiving) {
		device->receives_taken++;
		wc.status = LENGTH_ERROR;
		add_completion(line, &wc);
		break_off(line);
		return false;
	}
	CHECK(framing_in_place(&line->in, run, 0, &span, 1, device->receiving, run->len) == 0);
	device->receiving += run->len;
	if (run->last) {
		wc.byte_len = device->receiving;
		device->receiving = 0;
		device->rx_msn++;
		device->receives_taken++;
		complete(line, wc);
	}
	return true;
}

void device_receive(struct line *line)
{
	struct line_device *device = line->device;
	const struct framing_run *runs;
	uint8_t *at;
	size_t room;

	while (!device->over) {
		CHECK(framing_in_parse(&line->in) == 0);
		size_t count = framing_in_runs(&line->in, &runs);
		for (size_t n = 0; n < count; n++) {
			if (device->receives_taken == device->receives_posted) { /* it is asked to try again, for ever */
				framing_in_unread(&line->in, n);
				return;
			}
			if (!place(line, runs + n))
				return;
		}
		if (line->in.fault) {
			break_off(line);
			return;
		}
		CHECK(framing_in_room(&line->in, &at, &room) == 0 && room);
		ssize_t got = recv(line->fd, at, room, MSG_DONTWAIT);
		if (got < 0 && errno == EAGAIN)
			return;
		if (got <= 0)
			break_off(line);
		else
			framing_in_commit(&line->in, (size_t)got);
	}
}

void device_catch_up(struct line *line)
{
	struct line_device *device = line->device;

	device_receive(line);
	device_carry(line, UINT64_MAX);
	device_complete(line, UINT64_MAX);
	for (; device->late; device->late--)
		device_tell(line);
	device->mute = 0;
}

/* ---- its completion queue ---- */
static int poll_cq(void *at, int most, struct verbs_wc *wc)
{
	struct line *line = at;
	struct line_device *device = line->device;
	int failed = fails(device, DEVICE_POLL), count = 0;

	CHECK(most > 0 && most <= VERBS_BATCH);
	if (failed) { /* also: more than there is room for */
		device->failed = EIO;
		return failed;
	}
	if (device->options.haste & DEVICE_RECEIVES_AT_POLL)
		device_receive(line);
	for (; count < most && (uint32_t)count < device->options.poll_max &&
	       device->completions_polled != device->completions_made;
	     count++) {
		wc[count] = device->completions[device->completions_polled++ % DEVICE_COMPLETIONS];
		for (uint64_t n = device->freed; !(wc[count].wr_id & 1) && n != device->completed; n++)
			if (request_of(device, n)->wr_id == wc[count].wr_id)
				device->freed = n + 1;
	}
	return count;
}

static int req_notify_cq(void *at, int solicited_only)
{
	struct line *line = at;
	struct line_device *device = line->device;
	int failed = fails(device, DEVICE_NOTIFY);

	CHECK(!solicited_only);
	if (failed)
		return failed;
	if (device->options.haste & DEVICE_MOVES_AT_NOTIFY) {
		device_receive(line);
		device_carry(line, UINT64_MAX);
		device_complete(line, UINT64_MAX);
	}
	device->armed = true;
	return 0;
}

static int get_cq_event(void *channel, void **cq, void **context)
{
	struct line *line = channel;

	if (read(line->device->event_fds[0], cq, sizeof(*cq)) != sizeof(*cq))
		return -1;
	CHECK(*cq == line);
	*context = NULL;
	return 0;
}

static void ack_cq_events(void *cq, unsigned int count)
{
	struct line *line = cq;

	CHECK(line->device->events >= count);
	line->device->events -= count;
}

/* ---- making ---- */
void device_open(struct line *line, const struct device_options *options)
{
	struct line_device *device = calloc(1, sizeof(*device));

	CHECK(device && line->posted <= DEVICE_RECEIVES);
	line->device = device;
	device->options = *options;
	device->size = line->record.local_size;
	device->tx_msn = device->rx_msn = 1;
	device->buffers = malloc((size_t)line->posted * device->size);
	CHECK(device->buffers && pipe2(device->event_fds, O_CLOEXEC | O_NONBLOCK) == 0);
	device->qp.calls = (struct verbs_calls){post_send, post_recv, poll_cq, req_notify_cq, get_cq_event, ack_cq_events};
	device->qp.qp = device->qp.cq = device->qp.channel = line;
	device->qp.fd = device->event_fds[0];
	device->qp.inline_max = options->inline_max;
	device->qp.gather_max = options->gather_max;
	device->qp.slab = options->slab;
	device->lkey = RING_LKEY;
	for (uint64_t n = 0; n < line->posted; n++)
		device->order[n] = device->receives[n] = n;
	device->receives_posted = line->posted;
}

void device_close(struct line *line)
{
	struct line_device *device = line->device;

	for (uint64_t n = device->completed; n != device->posted && !device->lied; n++)
		CHECK(sum_of(request_of(device, n)) == request_of(device, n)->sum, "what is still to be sent has changed");
	verbs_release(&device->qp);
	close(device->event_fds[0]);
	close(device->event_fds[1]);
	free(device->buffers);
	free(device);
	line->device = NULL;
}

/* ---- what Python does with it: rdma/kernel/lending.py and qp.py ---- */
static uint32_t unfinished(const struct line_device *device)
{
	return (uint32_t)(device->next - device->first);
}

static void finish_until(struct line_device *device, uint64_t number)
{
	for (; device->first != number; device->first++)
		verbs_finish(&device->qp, device->first);
}

static enum engine_reason strange(struct line *line)
{
	CHECK(line->device->lied, "a completion of nothing");
	return ENGINE_MESSAGE;
}

static enum engine_reason heard_message(struct line *line, const struct verbs_wc *wc)
{
	struct line_device *device = line->device;
	uint64_t number = device->order[0];
	uint8_t *at = buffer_of(device, number);
	struct verbs_sge entry = {(uintptr_t)at, device->size, DEVICE_SLAB_LKEY};
	struct verbs_recv_wr wr = {.wr_id = number << 1 | 1, .sg_list = &entry, .num_sge = 1}, *bad;

	if (wc->wr_id != wr.wr_id || wc->opcode != VERBS_WC_RECV || wc->wc_flags || wc->byte_len > device->size)
		return strange(line);
	enum engine_reason why = line_heard(line, at, wc->byte_len);
	if (why)
		return why;
	memmove(device->order, device->order + 1, (line->posted - 1) * sizeof(*device->order));
	device->order[line->posted - 1] = number;
	return post_recv(line, &wr, &bad) ? ENGINE_BROKEN : ENGINE_KEPT;
}

static enum engine_reason completed(struct line *line, const struct verbs_wc *wc)
{
	struct line_device *device = line->device;
	uint64_t number = wc->wr_id >> 1;

	if (wc->status)
		return ENGINE_BROKEN;
	if (wc->wr_id & 1)
		return heard_message(line, wc);
	if (wc->opcode != VERBS_WC_SEND || number < device->first || number >= device->next ||
	    !device->tells[number % VERBS_SENDS])
		return strange(line);
	finish_until(device, number + 1);
	return ENGINE_KEPT;
}

static enum engine_reason drain(struct line *line)
{
	struct line_device *device = line->device;
	struct verbs_qp *qp = &device->qp;
	enum engine_reason why = ENGINE_KEPT;
	void *cq, *context;

	if (!get_cq_event(line, &cq, &context)) {
		ack_cq_events(cq, 1);
		if (req_notify_cq(line, 0))
			return ENGINE_BROKEN;
	}
	while (!why) {
		if (qp->wc_at == qp->wc_len) { /* those that the engine has left come first */
			int count = poll_cq(line, VERBS_BATCH, qp->wc);
			if (count < 0 || count > VERBS_BATCH)
				return ENGINE_BROKEN;
			if (!count)
				return ENGINE_KEPT;
			qp->wc_at = 0;
			qp->wc_len = (uint32_t)count;
		}
		why = completed(line, qp->wc + qp->wc_at++);
	}
	return why;
}

void device_unpin(struct line *line)
{
	struct line_device *device = line->device;

	device->leaving = true;
	if (!device->pages || device->first < device->gathered_until)
		return;
	for (uint64_t n = device->completed; n != device->posted && !device->lied; n++)
		for (uint32_t at = 0; at < request_of(device, n)->entries_len; at++)
			CHECK(request_of(device, n)->entries[at].lkey != device->lkey, "the device may still read the ring");
	device->pages = 0;
}

/* The ring is pinned if that is worth it, and as it is now. */
static void pin(struct line *line)
{
	struct line_device *device = line->device;
	uint32_t pages = channel_rx_pages(&line->host.channel);
	bool hot = device->qp.hot_bytes && device->qp.copied >= device->qp.hot_bytes;

	if ((hot || device->options.pins) && pages && (device->leaving || device->pages != pages)) {
		device_unpin(line);
		if (!device->pages) {
			device->lkey++;
			device->pages = pages;
			device->leaving = false;
		}
	}
	if (hot)
		device->qp.copied = 0;
	bool is = device->pages && device->pages == pages && !device->leaving;
	line->record.ring_lkey = is ? device->lkey : 0;
	line->record.ring_pages = is ? pages : 0;
}

/* What is posted, the oldest first, as the device has it. */
static void check_order(const struct line *line)
{
	const struct line_device *device = line->device;

	CHECK(device->receives_posted - device->receives_taken == line->posted);
	for (uint32_t n = 0; n < line->posted; n++)
		CHECK(device->receives[(device->receives_taken + n) % DEVICE_RECEIVES] == device->order[n]);
}

bool device_lend(struct line *line)
{
	struct line_device *device = line->device;
	struct verbs_receive receives[DEVICE_RECEIVES];

	line->reason = drain(line);
	if (line->reason == ENGINE_BROKEN)
		line->error = device->failed ? device->failed : ECONNABORTED;
	if (line->reason)
		return false;
	line->reason = ENGINE_ASKED;
	for (uint64_t n = device->first; n != device->next; n++)
		if (device->tells[n % VERBS_SENDS])
			return false;
	for (uint32_t n = 0; n < VERBS_SENDS; n++)
		CHECK(!device->qp.sends[n].slots_len, "slots of what tells nothing");
	CHECK(unfinished(device) <= VERBS_SENDS - VERBS_CHAIN, "%u unsignaled requests", unfinished(device));
	if (device->completions_polled == device->completions_made && !device->lied)
		check_order(line);
	for (uint32_t n = 0; n < line->posted; n++)
		receives[n] = (struct verbs_receive){device->order[n] << 1 | 1, buffer_of(device, device->order[n]),
		                                     device->size, DEVICE_SLAB_LKEY};
	pin(line);
	CHECK(verbs_begin(&device->qp, device->next, unfinished(device), receives, line->posted) == 0);
	device->qp.hot_bytes = channel_rx_pages(&line->host.channel) ? device->options.hot_bytes : 0;
	device->received_before = line->record.messages_received;
	return true;
}

void device_take_back(struct line *line)
{
	struct line_device *device = line->device;
	struct verbs_qp *qp = &device->qp;
	uint64_t before[DEVICE_RECEIVES], at = line->record.messages_received - device->received_before;

	CHECK(!qp->chained && !qp->wants && qp->done >= qp->first && qp->sent - qp->done <= VERBS_SENDS);
	if (qp->done > device->next) {
		finish_until(device, device->next);
		device->first = qp->done;
	}
	for (uint64_t n = qp->done; n != qp->sent; n++)
		device->tells[n % VERBS_SENDS] = qp->sends[n % VERBS_SENDS].signaled;
	device->next = qp->sent;
	device->gathered_until = verbs_gathering(qp);
	memcpy(before, device->order, sizeof(before));
	for (uint32_t n = 0; n < line->posted; n++)
		device->order[n] = before[(n + at) % line->posted];
	if (line->reason != ENGINE_BROKEN && req_notify_cq(line, 0)) {
		line->reason = ENGINE_BROKEN;
		line->error = device->failed;
	}
}

/* ---- what must be so ---- */
static void own(const struct line_device *owners[SLABS_MAX], uint16_t slot, const struct line_device *device)
{
	CHECK(slot < device->qp.slab->slots_len && !owners[slot], "slot %u has two owners", slot);
	owners[slot] = device;
}

/* Slots that the device may still read are those of its queue pair. */
static void check_reads(const struct line_device *owners[SLABS_MAX], const struct line_device *device)
{
	const struct verbs_slab *slab = device->qp.slab;

	for (uint64_t n = device->completed; n != device->posted; n++) {
		const struct device_request *request = device->requests + n % VERBS_SENDS;
		for (uint32_t at = 0; at < request->entries_len; at++)
			if (request->entries[at].lkey == DEVICE_SLAB_LKEY)
				CHECK(owners[(request->entries[at].addr - (uintptr_t)slab->base) / VERBS_SLOT] == device,
				      "a slot that the device may read is not its own");
	}
}

void devices_check(const struct line *lines, size_t len)
{
	const struct line_device *owners[SLABS_MAX] = {NULL};
	const struct verbs_slab *slab = NULL;
	uint32_t count = 0, waiting = 0;

	for (size_t i = 0; i < len; i++) {
		const struct line_device *device = lines[i].device;
		if (!device)
			continue;
		slab = device->qp.slab;
		CHECK(slab->slots_len <= SLABS_MAX && device->posted - device->freed <= VERBS_SENDS);
		waiting += device->qp.wants != 0;
		for (uint32_t n = 0; n < VERBS_SENDS; n++)
			for (uint32_t at = 0; at < device->qp.sends[n].slots_len; at++, count++)
				own(owners, device->qp.sends[n].slots[at], device);
	}
	if (!slab)
		return;
	CHECK(count + slab->free_len == slab->slots_len, "%u slots are used, %u free", count, slab->free_len);
	for (uint32_t n = 0; n < slab->free_len; n++)
		CHECK(slab->free[n] < slab->slots_len && !owners[slab->free[n]], "slot %u is free, and used", slab->free[n]);
	for (size_t i = 0; i < len; i++)
		if (lines[i].device && !lines[i].device->lied)
			check_reads(owners, lines[i].device);
	for (const struct verbs_qp *qp = slab->first_waiting; qp; qp = qp->next_waiting, waiting--)
		CHECK(qp->wants && waiting, "it waits for nothing");
	CHECK(!waiting, "it waits out of turn");
}
