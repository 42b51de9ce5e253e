/* engine_line.c - see engine_line.h. */
#include "line_device.h"

#include <endian.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#define BSDH_LEN ((uint32_t)sizeof(struct sdp_bsdh))
#define WORD_LEN 16u
#define SEND 0x43u
#define OTHER(seed) ((seed) + 0x5EED) /* the stream of the peer */

/* ---- memory that runs out ---- */
void *__real_malloc(size_t len);
void *__real_calloc(size_t count, size_t len);
void *__real_realloc(void *old, size_t len);
void *__wrap_malloc(size_t len);
void *__wrap_calloc(size_t count, size_t len);
void *__wrap_realloc(void *old, size_t len);

static uint64_t asked, fails_at, fails_until;
static _Thread_local bool short_of_memory;

void memory_fails(uint64_t n, uint64_t many)
{
	asked = 0;
	fails_at = n;
	fails_until = n + many;
}

void memory_is_short(bool is)
{
	short_of_memory = is;
}

static bool fails(void)
{
	if (!short_of_memory)
		return false;
	asked++;
	return asked >= fails_at && asked < fails_until;
}

void *__wrap_malloc(size_t len)
{
	return fails() ? NULL : __real_malloc(len);
}

void *__wrap_calloc(size_t count, size_t len)
{
	return fails() ? NULL : __real_calloc(count, len);
}

void *__wrap_realloc(void *old, size_t len)
{
	return fails() ? NULL : __real_realloc(old, len);
}

/* ---- making ---- */
static void by_tcp(int fds[2])
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof(address);
	int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1;

	CHECK(listener >= 0 && bind(listener, (struct sockaddr *)&address, len) == 0 && listen(listener, 1) == 0);
	CHECK(getsockname(listener, (struct sockaddr *)&address, &len) == 0);
	fds[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	CHECK(fds[0] >= 0 && connect(fds[0], (struct sockaddr *)&address, len) == 0);
	fds[1] = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
	CHECK(fds[1] >= 0);
	close(listener);
	for (int i = 0; i < 2; i++)
		CHECK(setsockopt(fds[i], IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one)) == 0);
}

static void end_open(struct end *end, int fd, int side)
{
	memset(end, 0, sizeof(*end));
	struct channel_own own = own_of(&end->own);
	CHECK(channel_map(&end->channel, fd, side, &own) == 0);
}

void line_open(struct line *line, struct engine *engine, uint64_t seed, const struct line_options *options)
{
	int segment = channel_create(options->ring, options->ring), fds[2];

	*line = (struct line){.engine = engine, .seed = seed, .number = options->number, .mirrored = options->mirrored};
	CHECK(segment >= 0, "%d", segment);
	end_open(&line->host, segment, 1);
	if (options->mirrored)
		end_mirror(&line->app, &line->host);
	else
		end_open(&line->app, segment, 0);
	close(segment);
	line->reason = ENGINE_ASKED;
	line->doorbell_fd = eventfd(1u << 30, EFD_SEMAPHORE | EFD_CLOEXEC | EFD_NONBLOCK);
	CHECK(line->doorbell_fd >= 0);
	if (options->tcp)
		by_tcp(fds);
	else
		CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
	line->fd = fds[0];
	line->peer.fd = fds[1];
	line->posted = options->posted;
	line->peer.bufs = line->peer.said[0].bufs = options->bufs;
	line->peer.told_bufs = options->posted;
	line->peer.size = options->remote_size;
	line->peer.msn = 1;
	line->peer.message = __real_malloc(LINE_MESSAGE_MAX);
	CHECK(framing_in_init(&line->in, true, false, FRAMING_STAGED_DEFAULT) == 0);
	CHECK(framing_out_init(&line->out, FRAMING_MULPDU_MAX, true, false) == 0);
	CHECK(framing_in_init(&line->peer.in, true, false, FRAMING_STAGED_DEFAULT) == 0);
	CHECK(framing_out_init(&line->peer.out, 1400, true, false) == 0);
	uint32_t tx_size = line->host.channel.tx.size;
	line->record = (struct engine_record){
		.sends = 1,
		.receives = 1,
		.local_size = options->local_size,
		.grows = options->grows,
		.credit = options->bufs,
		.posted = options->posted,
		.last_bufs_sent = options->posted,
		.remote_size = options->remote_size,
		.tx_msn = 1,
		.rx_msn = 1,
		.window = options->window ? options->window : line->host.channel.rx.spill_size,
		.read_step = tx_size / 4,
	};
	if (options->device)
		device_open(line, options->device);
}

void line_close(struct line *line)
{
	if (line->loan)
		line_take(line);
	if (line->device)
		device_close(line);
	close(line->fd);
	if (line->peer.fd >= 0)
		close(line->peer.fd);
	close(line->doorbell_fd);
	framing_in_free(&line->in);
	framing_out_free(&line->out);
	framing_in_free(&line->peer.in);
	framing_out_free(&line->peer.out);
	free(line->peer.message);
	if (!line->mirrored)
		channel_unmap(&line->app.channel);
	channel_unmap(&line->host.channel);
}

/* ---- lending ---- */
static struct channel_side words_of(const struct channel_side *remote)
{
	struct channel_side words = {0};

#define COPY(word) atomic_store(&words.word, atomic_load(&remote->word));
	CHANNEL_REMOTE_WORDS(COPY)
#undef COPY
	return words;
}

/* ---- what Python does with what was read and is not lent; slow, and with no eye for anything but plain messages ---- */
struct heard {
	uint8_t message[70000];
	uint32_t len, data_len;
	uint8_t data[70000];
	uint64_t data_left, read;
};

static bool heard_words(struct line *line, struct heard *heard)
{
	uint64_t head = atomic_load(line->host.channel.own.head);

	heard->data_left = line->record.data_left;
	heard->read = head;
	for (uint32_t at = BSDH_LEN; at < heard->len;) {
		uint64_t first, count;
		if (heard->data_left) {
			heard->data[heard->data_len++] = heard->message[at++];
			heard->data_left--;
			continue;
		}
		if (heard->len - at < WORD_LEN)
			return false;
		memcpy(&first, heard->message + at, sizeof(first));
		memcpy(&count, heard->message + at + 8, sizeof(count));
		at += WORD_LEN;
		count = be64toh(count);
		if (be64toh(first) >> 56 == LINK_DATA && count > 0 && count <= line->host.channel.tx.spill_size)
			heard->data_left = count;
		else if (be64toh(first) >> 56 == LINK_READ && count - head <= line->record.held && count >= heard->read)
			heard->read = count;
		else
			return false;
	}
	return true;
}

static enum engine_reason heard_take(struct line *line, struct heard *heard)
{
	struct engine_record *record = &line->record;
	struct channel_end *end = &line->host.channel;
	struct sdp_bsdh bsdh;

	if (heard->len < BSDH_LEN)
		return ENGINE_MESSAGE;
	memcpy(&bsdh, heard->message, BSDH_LEN);
	uint32_t ack = be32toh(bsdh.mseq_ack), bufs = be16toh(bsdh.bufs);
	if (bsdh.mid != SDP_DATA || bsdh.flags || be32toh(bsdh.len) != heard->len ||
	    be32toh(bsdh.mseq) != record->rx_mseq + 1 || record->tx_mseq - ack > record->tx_mseq - record->peer_ack ||
	    !heard_words(line, heard))
		return ENGINE_MESSAGE;
	channel_tx_settle(end);
	if (channel_tx_space(end, SIZE_MAX) < (int64_t)(heard->data_len + heard->data_left))
		channel_tx_spill(end, SIZE_MAX);
	if (channel_tx_space(end, SIZE_MAX) < (int64_t)(heard->data_len + heard->data_left))
		return ENGINE_MESSAGE;
	channel_tx_put(end, 0, heard->data, heard->data_len, false);
	channel_tx_publish(end, heard->data_len);
	uint64_t passed = heard->read - atomic_load(end->own.head);
	channel_rx_consume(end, passed);
	record->held -= passed;
	record->rx_mseq++;
	record->rx_msn++;
	record->peer_ack = ack;
	record->credit = bufs > record->tx_mseq - ack ? bufs - (record->tx_mseq - ack) : 0;
	record->owes |= heard->len > BSDH_LEN;
	record->data_left = heard->data_left;
	return ENGINE_KEPT;
}

enum engine_reason line_heard(struct line *line, const uint8_t *message, uint32_t len)
{
	struct heard heard = {.len = len};

	CHECK(len <= sizeof(heard.message));
	memcpy(heard.message, message, len);
	return heard_take(line, &heard);
}

static bool is_whole(const struct line *line, const struct framing_run *run)
{
	return !run->tagged && run->control == 1 && run->rdmap == SEND && !run->queue && run->msn == line->record.rx_msn &&
	       !run->offset && run->last && run->len <= line->record.local_size;
}

/* Takes what is staged. False: a message has begun and not ended; or that was no message, and line->reason tells. */
static bool take_staged(struct line *line)
{
	const struct framing_run *runs;
	size_t count, n = 0;

	CHECK(framing_in_parse(&line->in) == 0);
	count = framing_in_runs(&line->in, &runs);
	line->reason = ENGINE_ASKED;
	for (; n < count && line->reason == ENGINE_ASKED; n++) {
		struct heard heard = {.len = runs[n].len};
		struct framing_span span = {heard.message, sizeof(heard.message), 0, false};
		if (n == count - 1 && !runs[n].last && !line->in.fault && runs[n].len <= line->record.local_size)
			break;
		if (!is_whole(line, runs + n)) {
			line->reason = ENGINE_MESSAGE;
			return false;
		}
		CHECK(framing_in_place(&line->in, runs + n, 0, &span, 1, 0, runs[n].len) == 0);
		enum engine_reason why = heard_take(line, &heard);
		if (why)
			line->reason = why;
	}
	if (line->reason == ENGINE_ASKED && line->in.fault)
		line->reason = ENGINE_MESSAGE;
	if (n < count && line->reason == ENGINE_ASKED)
		framing_in_unread(&line->in, n);
	return n == count && line->reason == ENGINE_ASKED;
}

/* As stream_fill(): what may complete a message that has begun. */
static bool read_more(struct line *line)
{
	uint8_t *at;
	size_t len;

	CHECK(framing_in_room(&line->in, &at, &len) == 0);
	ssize_t got = len ? recv(line->fd, at, len, MSG_DONTWAIT) : -1;
	if (got <= 0)
		return false;
	framing_in_commit(&line->in, (size_t)got);
	return true;
}

bool line_lend(struct line *line)
{
	struct engine_peer_doorbell doorbell = {&line->doorbell_word, &line->doorbell_rung, line->doorbell_fd};
	struct channel_side words = words_of(line->host.channel.remote);

	CHECK(!line->loan);
	struct engine_way way = {.in = &line->in, .out = &line->out, .fd = line->fd};
	if (line->device) {
		if (!device_lend(line))
			return false;
		way = (struct engine_way){.verbs = &line->device->qp};
	} else {
		while (!take_staged(line))
			if (line->reason != ENGINE_ASKED || !read_more(line))
				return false;
		if (framing_out_waiting(&line->out))
			return false;
	}
	line->loan =
		engine_lend(line->engine, &line->record, &line->host.channel, &words, &doorbell, line->number, &way, line);
	return line->loan != NULL;
}

void line_take(struct line *line)
{
	line->reason = engine_take(line->engine, line->loan, &line->record, &line->error);
	line->loan = NULL;
	CHECK(line->reason != ENGINE_KEPT);
	if (line->device)
		device_take_back(line);
}

unsigned lines_returned(struct engine *engine)
{
	struct line *line;
	unsigned count = 0;

	engine_clear_notify(engine);
	while ((line = engine_returned(engine))) {
		line_take(line);
		count++;
	}
	return count;
}

void line_flush(struct line *line)
{
	struct iovec pieces[64];
	size_t bytes;

	CHECK(!line->loan);
	while (framing_out_waiting(&line->out)) {
		struct msghdr message = {.msg_iov = pieces, .msg_iovlen = framing_out_peek(&line->out, pieces, 64, &bytes)};
		ssize_t wrote = sendmsg(line->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
		if (wrote > 0) {
			framing_out_advance(&line->out, (size_t)wrote);
		} else if (errno == EAGAIN && line->peer.fd >= 0) {
			line_peer_read(line, SIZE_MAX);
		} else {
			framing_out_clear(&line->out);
			return;
		}
	}
}

/* ---- the application ---- */
void line_app_hint(struct line *line)
{
	if (!line->hints)
		return;
	uint64_t count = atomic_load_explicit(&line->hints->tail, memory_order_relaxed);

	atomic_store_explicit(&line->hints->entry[count % HINTS], count << 32 | line->number, memory_order_release);
	atomic_store_explicit(&line->hints->tail, count + 1, memory_order_release);
}

size_t line_app_send(struct line *line, size_t len)
{
	struct channel_end *end = &line->app.channel;

	channel_tx_settle(end);
	int64_t space = channel_tx_space(end, len);
	if (space >= 0 && (size_t)space < len)
		channel_tx_spill(end, SIZE_MAX);
	size_t sent = end_send(&line->app, line->seed, line->app_sent, len);
	line->app_sent += sent;
	line_app_hint(line);
	return sent;
}

size_t line_app_receive(struct line *line, size_t len)
{
	size_t got = end_receive(&line->app, OTHER(line->seed), line->app_got, len);

	line->app_got += got;
	line_app_hint(line);
	return got;
}

/* ---- the peer: what it hears ---- */
static void judge_words(struct line *line, uint32_t len)
{
	struct line_peer *peer = &line->peer;

	for (uint32_t at = BSDH_LEN; at < len;) {
		if (peer->got_left) {
			uint32_t some = peer->got_left < len - at ? (uint32_t)peer->got_left : len - at;
			for (uint32_t i = 0; i < some && !line->hostile; i++)
				CHECK(peer->message[at + i] == stream_byte(line->seed, peer->got + i), "byte %llu",
				      (unsigned long long)(peer->got + i));
			peer->got += some;
			peer->got_left -= some;
			at += some;
			continue;
		}
		uint64_t first, count;
		CHECK(len - at >= WORD_LEN, "a word is cut");
		memcpy(&first, peer->message + at, sizeof(first));
		memcpy(&count, peer->message + at + 8, sizeof(count));
		first = be64toh(first);
		count = be64toh(count);
		at += WORD_LEN;
		if (first == (uint64_t)LINK_DATA << 56) {
			CHECK(count > 0 && peer->got + count - peer->read <= line->record.window, "more than the window: %llu",
			      (unsigned long long)count);
			peer->got_left = count;
		} else {
			CHECK(first == (uint64_t)LINK_READ << 56, "word %llx", (unsigned long long)first);
			uint64_t came = atomic_load(line->host.channel.own.tail); /* also of what a peer makes up */
			CHECK(count > peer->read_reported && count <= (peer->changed ? came : peer->sent),
			      "read %llu after %llu, of %llu", (unsigned long long)count, (unsigned long long)peer->read_reported,
			      (unsigned long long)peer->sent);
			CHECK(line->hostile || line->mirrored || count <= line->app_got);
			peer->read_reported = count;
		}
	}
}

static void judge(struct line *line)
{
	struct line_peer *peer = &line->peer;
	uint32_t len = peer->message_len;
	struct sdp_bsdh bsdh;

	CHECK(len >= BSDH_LEN && len <= peer->size, "%u bytes for a buffer of %u", len, peer->size);
	memcpy(&bsdh, peer->message, BSDH_LEN);
	uint32_t mseq = be32toh(bsdh.mseq), ack = be32toh(bsdh.mseq_ack), bufs = be16toh(bsdh.bufs);
	CHECK(bsdh.mid == SDP_DATA && !bsdh.flags && be32toh(bsdh.len) == len);
	CHECK(mseq == peer->seen + 1);
	CHECK(ack - peer->acked <= peer->mseq - peer->acked, "acknowledges %u, after %u, of %u", ack, peer->acked,
	      peer->mseq);
	CHECK(bufs == line->posted); /* each is posted again before anything is said */
	/* what it could know: the last that it has taken of ours says how many buffers there are for it */
	const struct line_said *said = &peer->said[ack % LINE_HISTORY];
	int64_t credit = (int64_t)said->bufs - (uint32_t)(mseq - 1 - said->ack);
	int64_t view = (int64_t)peer->told_bufs - (uint32_t)(ack - peer->told_ack);
	bool brings = (int64_t)bufs > view;
	if (len > BSDH_LEN)
		CHECK(credit >= 3, "payload with a credit of %lld", (long long)credit);
	else
		CHECK(credit >= 2 || (credit == 1 && brings), "an update with a credit of %lld", (long long)credit);
	peer->acked = ack;
	peer->seen = mseq;
	peer->told_ack = ack;
	peer->told_bufs = bufs;
	judge_words(line, len);
}

static void hear(struct line *line, const struct framing_run *run)
{
	struct line_peer *peer = &line->peer;

	CHECK(!run->tagged && run->rdmap == SEND && !run->queue && run->msn == peer->seen_msn + 1);
	CHECK(run->offset == peer->message_len && run->len <= LINE_MESSAGE_MAX - peer->message_len);
	struct framing_span span = {peer->message + peer->message_len, run->len, 0, false};
	CHECK(framing_in_place(&peer->in, run, 0, &span, 1, 0, run->len) == 0);
	peer->message_len += run->len;
	if (!run->last)
		return;
	judge(line);
	peer->message_len = 0;
	peer->seen_msn++;
}

void line_peer_read(struct line *line, size_t most)
{
	struct line_peer *peer = &line->peer;
	const struct framing_run *runs;

	while (most && peer->fd >= 0) {
		uint8_t *at;
		size_t room;
		CHECK(framing_in_room(&peer->in, &at, &room) == 0 && room);
		ssize_t got = recv(peer->fd, at, room < most ? room : most, MSG_DONTWAIT);
		if (got <= 0)
			break;
		most -= (size_t)got;
		framing_in_commit(&peer->in, (size_t)got);
		CHECK(framing_in_parse(&peer->in) == 0);
		/* bytes that a hostile program changes on their way make the checksum wrong, which is its own loss */
		CHECK(!peer->in.fault || line->hostile, "fault %d", peer->in.fault);
		for (size_t n = framing_in_runs(&peer->in, &runs); n--; runs++)
			hear(line, runs);
	}
}

/* ---- the peer: what it says ---- */
static uint64_t written(const struct line_peer *peer)
{
	return peer->out.written;
}

void line_peer_write(struct line *line, size_t most)
{
	struct line_peer *peer = &line->peer;
	struct iovec pieces[16];
	size_t bytes;

	while (most && peer->fd >= 0 && framing_out_waiting(&peer->out)) {
		size_t count = framing_out_peek(&peer->out, pieces, 16, &bytes), n = 0;
		for (size_t left = most; n < count && left; n++) {
			if (pieces[n].iov_len > left)
				pieces[n].iov_len = left;
			left -= pieces[n].iov_len;
		}
		struct msghdr message = {.msg_iov = pieces, .msg_iovlen = n};
		ssize_t wrote = sendmsg(peer->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
		if (wrote <= 0)
			break;
		framing_out_advance(&peer->out, (size_t)wrote);
		most -= (size_t)wrote;
	}
}

int64_t line_peer_credit(const struct line *line)
{
	const struct line_peer *peer = &line->peer;

	return (int64_t)peer->told_bufs - (uint32_t)(peer->mseq - peer->told_ack);
}

uint64_t line_peer_room(const struct line *line)
{
	const struct line_peer *peer = &line->peer;

	return line->host.channel.tx.spill_size - (peer->sent - peer->read_reported) - peer->data_left;
}

void line_peer_say_any(struct line *line, const uint8_t *bytes, uint32_t len)
{
	struct line_peer *peer = &line->peer;
	const struct framing_message message = {.rdmap = SEND, .msn = peer->msn};
	struct framing_span span = {(uint8_t *)(uintptr_t)bytes, len, 0, true};
	struct sdp_bsdh bsdh = {0};

	if (framing_out_waiting(&peer->out) > LINE_OUT_MAX)
		return;
	memcpy(&bsdh, bytes, len < BSDH_LEN ? len : BSDH_LEN);
	CHECK(framing_out_put(&peer->out, &message, &span, 1, 0, len, true, true) == 0);
	peer->msn++;
	if (be32toh(bsdh.mseq) == peer->mseq + 1) {
		peer->mseq++;
		peer->said[peer->mseq % LINE_HISTORY] =
			(struct line_said){be16toh(bsdh.bufs), be32toh(bsdh.mseq_ack), peer->out.position, peer->sent};
	}
}

void line_peer_say_bytes(struct line *line, const uint8_t *bytes, size_t len)
{
	line_peer_write(line, SIZE_MAX);
	if (!framing_out_waiting(&line->peer.out) && line->peer.fd >= 0)
		(void)!send(line->peer.fd, bytes, len, MSG_DONTWAIT | MSG_NOSIGNAL);
	line->peer.changed = true;
}

static uint8_t *put_word(uint8_t *at, uint32_t number, uint64_t count)
{
	uint64_t first = htobe64((uint64_t)number << 56), second = htobe64(count);

	memcpy(at, &first, sizeof(first));
	memcpy(at + 8, &second, sizeof(second));
	return at + WORD_LEN;
}

bool line_peer_say(struct line *line, uint32_t data, unsigned words, uint64_t read)
{
	struct line_peer *peer = &line->peer;
	uint8_t message[70000], *at = message + BSDH_LEN, *end = message + line->record.local_size;

	CHECK(line->record.local_size <= sizeof(message));
	if (framing_out_waiting(&peer->out) > LINE_OUT_MAX || peer->mseq - peer->acked >= LINE_HISTORY - 1)
		return false;
	int64_t credit = line_peer_credit(line);
	if (credit < 2 || ((data || read) && credit < 3))
		return false;
	if (read > peer->got - peer->read)
		read = peer->got - peer->read;
	uint64_t room = line_peer_room(line) + peer->data_left;
	for (uint64_t left = data < room ? data : room; left;) {
		if (!peer->data_left) { /* the data of a word may go on in the messages behind */
			uint64_t count = words > 1 ? (left + words - 1) / words : left;
			if (end - at < (ptrdiff_t)WORD_LEN + 1)
				break;
			at = put_word(at, LINK_DATA, count);
			peer->data_left = count;
		}
		uint64_t some = peer->data_left < left ? peer->data_left : left;
		some = some < (uint64_t)(end - at) ? some : (uint64_t)(end - at);
		if (!some)
			break;
		for (uint64_t i = 0; i < some; i++)
			*at++ = stream_byte(OTHER(line->seed), peer->sent + i);
		peer->sent += some;
		peer->data_left -= some;
		left -= some;
	}
	if (read && !peer->data_left && end - at >= (ptrdiff_t)WORD_LEN) {
		peer->read += read;
		at = put_word(at, LINK_READ, peer->read);
	}
	uint32_t len = (uint32_t)(at - message);
	struct sdp_bsdh bsdh = {.mid = SDP_DATA,
	                        .bufs = htobe16((uint16_t)peer->bufs),
	                        .len = htobe32(len),
	                        .mseq = htobe32(peer->mseq + 1),
	                        .mseq_ack = htobe32(peer->seen)};
	memcpy(message, &bsdh, BSDH_LEN);
	line_peer_say_any(line, message, len);
	return true;
}

/* ---- what must be so ---- */
void line_check(const struct line *line)
{
	const struct line_peer *peer = &line->peer;
	struct engine_record record = line->record;

	if (line->loan)
		engine_look(line->engine, line->loan, &record);
	CHECK(record.credit <= 0xffff && record.held <= record.window);
	CHECK(record.tx_mseq - peer->seen <= UINT32_MAX / 2, "it has said less than was heard");
	if (peer->changed)
		return;
	CHECK(record.rx_mseq - peer->acked <= peer->mseq - peer->acked);
	const struct line_said *said = &peer->said[record.rx_mseq % LINE_HISTORY];
	/* no byte is shown, and no message taken, before all of it can have come */
	CHECK(said->end <= written(peer));
	CHECK(atomic_load(line->host.channel.own.tail) <= said->data);
	CHECK(line->hostile || atomic_load(&line->host.channel.tx_line->tail) <= said->data);
	int64_t credit = (int64_t)said->bufs - (uint32_t)(record.tx_mseq - said->ack);
	CHECK((int64_t)record.credit == (credit > 0 ? credit : 0), "credit %u, not %lld", record.credit, (long long)credit);
	CHECK(record.peer_ack == said->ack);
}

static bool has_sent(const struct line *line)
{
	return line->device ? device_has_sent(line) : !framing_out_waiting(&line->out);
}

void line_check_told(struct line *line)
{
	const struct line_peer *peer = &line->peer;

	line_flush(line);
	line_peer_read(line, SIZE_MAX);
	if (peer->fd < 0 || peer->in.fault || !has_sent(line))
		return;
	CHECK(line->record.tx_mseq == peer->seen && (line->device || line->record.tx_msn == peer->seen_msn + 1));
	CHECK(line->record.last_ack_sent == peer->told_ack && line->record.last_bufs_sent == peer->told_bufs);
	CHECK(line->record.sent == peer->got, "%llu, of which %llu came", (unsigned long long)line->record.sent,
	      (unsigned long long)peer->got);
	CHECK(line->record.read_reported == peer->read_reported, "%llu, which was heard as %llu",
	      (unsigned long long)line->record.read_reported, (unsigned long long)peer->read_reported);
}

void line_check_quiet(struct line *line)
{
	const struct line_peer *peer = &line->peer;
	struct engine_record record = line->record;

	line_check(line);
	if (!line->loan)
		return;
	engine_look(line->engine, line->loan, &record);
	CHECK(!peer->ended, "the peer has ended, and nobody was told");
	if (peer->changed || line->hostile)
		return;
	CHECK(record.rx_mseq == peer->mseq || framing_out_waiting(&peer->out), "%u messages were taken, of %u",
	      record.rx_mseq, peer->mseq);
	if (!framing_out_waiting(&peer->out))
		CHECK(atomic_load(&line->host.channel.tx_line->tail) == peer->sent);
	uint64_t there = (uint64_t)channel_rx_avail(&line->host.channel);
	if (record.credit >= 3)
		CHECK(record.held == there || record.held == record.window, "%llu of %llu bytes are on their way",
		      (unsigned long long)record.held, (unsigned long long)there);
	if (record.credit >= 3)
		CHECK(line->app_got - record.read_reported < record.read_step, "what was read is not told");
	if (has_sent(line))
		CHECK(record.sent == peer->got && record.tx_mseq == peer->seen && record.read_reported == peer->read_reported);
}
