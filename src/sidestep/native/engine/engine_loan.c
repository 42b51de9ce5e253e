/*
 * engine_loan.c - the bytes of one connection: out of its application's ring into messages, and out of messages into the
 * other ring.
 *
 * A message is taken whole or not at all: it is judged before anything of it has an effect, so that what is not plain can
 * be given back as if it had never been looked at.
 */
#define _GNU_SOURCE
#include "engine_loan.h"

#include <endian.h>
#include <errno.h>
#include <sys/uio.h>
#include <time.h>

#define SHARE (256u << 10)   /* bytes each way that a connection moves in a turn */
#define BSDH_LEN ((uint32_t)sizeof(struct sdp_bsdh))
#define WORD_LEN 16u          /* remote/link.py: number, and count */
#define PAYLOAD_CREDIT 3u    /* CA4-81: what a message with payload needs */
#define PAYLOAD_MIN 1024u /* bytes, for which the other host's buffers must have room; Python sends by smaller ones */
#define LARGE 4u /* remote/link.py: data that would fill more messages than this asks for larger ones */

int64_t loan_clock(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* ---- the words of the application ---- */
static struct channel_side words_now(const struct channel_side *remote)
{
	struct channel_side words = {0};

#define COPY(word) \
	atomic_store_explicit(&words.word, atomic_load_explicit(&remote->word, memory_order_acquire), memory_order_relaxed);
	CHANNEL_REMOTE_WORDS(COPY)
#undef COPY
	return words;
}

static bool words_changed(const struct engine_loan *loan)
{
	struct channel_side now = words_now(loan->end->remote);
	bool changed = false;

#define DIFFERS(word) changed |= now.word != loan->words.word;
	CHANNEL_REMOTE_WORDS(DIFFERS)
#undef DIFFERS
	return changed;
}

/* ---- beginning and end ---- */
void loan_begin(struct engine_loan *loan, const struct engine_record *record, struct channel_end *end,
                const struct channel_side *words, const struct engine_peer_doorbell *doorbell, uint32_t number,
                const struct engine_way *way, void *user)
{
	loan->record = *record;
	loan->end = end;
	loan->doorbell = *doorbell;
	loan->number = number;
	loan->user = user;
	loan->words = *words;
	loan->streams = !way->rc && !way->verbs;
	if (way->verbs)
		wire_verbs_init(&loan->by.verbs, way->verbs, end, record);
	else if (way->rc)
		wire_datagram_init(&loan->by.datagram, way->rc);
	else
		wire_stream_init(&loan->by.stream, way->in, way->out, way->fd, record->tx_msn, record->rx_msn);
}

bool loan_end(struct engine_loan *loan)
{
	struct wire *wire = &loan->by.wire;

	if (loan->streams) {
		loan->record.tx_msn = loan->by.stream.tx_msn;
		loan->record.rx_msn = loan->by.stream.rx_msn;
	}
	return wire->ops->give_back(wire) == 0;
}

static void ring(struct engine_loan *loan)
{
	struct engine_peer_doorbell *doorbell = &loan->doorbell;

	atomic_thread_fence(memory_order_seq_cst); /* between publishing and reading the word */
	uint64_t word = atomic_load_explicit(doorbell->word, memory_order_relaxed);
	if (!(word & 0xffff) || word >> 16 == atomic_load_explicit(doorbell->rung, memory_order_relaxed))
		return;
	atomic_store_explicit(doorbell->rung, word >> 16, memory_order_relaxed);
	uint64_t taken;
	struct iovec into = {&taken, sizeof(taken)};
	(void)!preadv2(doorbell->fd, &into, 1, -1, RWF_NOWAIT); /* what fails is its owner's doing, and loss */
}

/* ---- sdp/flow.py ---- */
static int32_t remote_credit(const struct engine_record *record)
{
	return (int32_t)(record->last_bufs_sent - (record->rx_mseq - record->last_ack_sent));
}

static bool brings_credit(const struct engine_record *record)
{
	return (int32_t)record->posted > remote_credit(record);
}

static bool credit_low(const struct engine_record *record)
{
	return remote_credit(record) < 4 || 2 * remote_credit(record) <= (int32_t)record->posted;
}

static bool may_send_bare(const struct engine_record *record)
{
	return record->credit >= 2 || (record->credit == 1 && brings_credit(record));
}

/* Sends Data: `words` of the link, and the pieces behind them. 0, 1: not now, or minus a reason. */
static int send_data(struct engine_loan *loan, const uint8_t *words, uint32_t words_len, const struct iovec *pieces,
                     int pieces_len, uint32_t payload)
{
	struct engine_record *record = &loan->record;
	struct wire *wire = &loan->by.wire;
	uint8_t header[WIRE_HEADER_MAX];
	uint32_t bufs = record->posted < 0xffff ? record->posted : 0xffff;
	struct sdp_bsdh bsdh = {
		.mid = SDP_DATA,
		.bufs = htobe16((uint16_t)bufs),
		.len = htobe32(BSDH_LEN + words_len + payload),
		.mseq = htobe32(record->tx_mseq + 1),
		.mseq_ack = htobe32(record->rx_mseq),
	};

	memcpy(header, &bsdh, BSDH_LEN);
	memcpy(header + BSDH_LEN, words, words_len);
	int result = wire->ops->put(wire, header, BSDH_LEN + words_len, pieces, pieces_len);
	if (result)
		return result;
	record->tx_mseq++;
	record->credit--;
	record->last_ack_sent = record->rx_mseq;
	record->last_bufs_sent = bufs;
	record->owes = 0;
	record->messages_sent++;
	record->payloads_sent += words_len + payload != 0;
	record->wire_sent += BSDH_LEN + words_len + payload;
	return 0;
}

static uint32_t put_word(uint8_t *at, uint32_t number, uint64_t count)
{
	uint64_t first = htobe64((uint64_t)number << 56), second = htobe64(count);

	memcpy(at, &first, sizeof(first));
	memcpy(at + 8, &second, sizeof(second));
	return WORD_LEN;
}

/* ---- from the ring to the wire ---- */
/* How far the application has read, where that is worth a word; else it is to ring once it is. 0 or minus a reason. */
static int read_due(struct engine_loan *loan, uint64_t *read)
{
	struct engine_record *record = &loan->record;
	struct channel_end *end = loan->end;

	*read = 0;
	if (!record->receives)
		return 0;
	for (int look = 0; look < 2; look++) {
		if (channel_tx_space(end, SIZE_MAX) < 0)
			return -ENGINE_COUNTS;
		uint64_t sent = atomic_load_explicit(end->own.tail, memory_order_relaxed);
		uint64_t head = atomic_load_explicit(end->own.head_seen, memory_order_relaxed);
		/* less than was told: a stranger's count, that Python judges once it has to do with it */
		*read = (int64_t)(head - record->read_reported) >= (int64_t)record->read_step ? head : 0;
		uint32_t wanted = !*read && sent - record->read_reported >= record->read_step;
		if (wanted == loan->record.asking)
			break;
		loan->record.asking = wanted;
		atomic_store(&end->tx_line->want_space, wanted); /* full fence; then look once more */
	}
	return 0;
}

/* Bytes of the ring that may go now; or minus a reason. */
static int64_t sendable(struct engine_loan *loan)
{
	struct engine_record *record = &loan->record;

	if (!record->sends)
		return 0;
	int64_t there = channel_rx_avail(loan->end);
	if (there < (int64_t)record->held)
		return -ENGINE_COUNTS; /* also what was impossible; it has taken back what was passed on */
	uint64_t count = (uint64_t)there - record->held;
	uint64_t window = record->window > record->held ? record->window - record->held : 0;
	return (int64_t)(count < window ? count : window);
}

/* Bytes of `count` that the next message may take; 0: the other host's buffers are small for them. */
static uint32_t data_max(const struct engine_record *record, const struct wire *wire, uint64_t count)
{
	if (record->remote_size < BSDH_LEN + 2 * WORD_LEN + PAYLOAD_MIN ||
	    (record->grows && count > (uint64_t)LARGE * record->remote_size))
		return 0;
	uint32_t most = record->remote_size - BSDH_LEN - 2 * WORD_LEN;

	return most < wire->message_max ? most : wire->message_max;
}

static int send_some(struct engine_loan *loan, int64_t now)
{
	struct engine_record *record = &loan->record;
	struct wire *wire = &loan->by.wire;
	uint64_t moved = 0;

	for (;;) {
		uint8_t words[2 * WORD_LEN];
		uint32_t words_len = 0;
		uint64_t read;
		int result = read_due(loan, &read);
		int64_t count = result < 0 ? result : sendable(loan);
		if (count < 0)
			return (int)count;
		if (wire->ops->waiting(wire) >= wire->queue_max)
			return 0; /* the wire tells when it takes more */
		if ((count || read) && record->credit < PAYLOAD_CREDIT) { /* words of the link are payload, too */
			if (!loan->starved_ns)
				loan->starved_ns = now;
			else if (now - loan->starved_ns > LOAN_STARVED_MS * 1000000ll)
				return -ENGINE_CREDIT;
			count = 0;
			read = 0;
		} else {
			loan->starved_ns = 0;
		}
		if (moved >= SHARE) {
			loan->more = true;
			return 0;
		}
		bool update = !count && !read && credit_low(record) && brings_credit(record) &&
		              (record->owes || record->rx_mseq - record->last_ack_sent >= 2);
		if (!count && !read && !update)
			return 0;
		if (update && !may_send_bare(record))
			return 0; /* what comes brings credit */
		uint32_t most = data_max(record, wire, (uint64_t)count);
		if (!most)
			return -ENGINE_SMALL;
		uint32_t len = (uint64_t)count < most ? (uint32_t)count : most;
		struct iovec pieces[CHANNEL_PIECES];
		int pieces_len = 0;
		words_len = read ? put_word(words, LINK_READ, read) : 0;
		if (len) {
			pieces_len = channel_rx_pieces(loan->end, record->held, len, pieces);
			len = 0; /* a stranger's words may mean more pieces than there are */
			for (int i = 0; i < pieces_len; i++)
				len += (uint32_t)pieces[i].iov_len;
			words_len += put_word(words + words_len, LINK_DATA, len);
		}
		result = send_data(loan, words, words_len, pieces, pieces_len, len);
		if (result)
			return result < 0 ? result : 0; /* the wire tells when it takes more */
		if (read)
			record->read_reported = read;
		record->held += len;
		record->sent += len;
		record->bytes_sent += len;
		moved += len;
		if (!wire->blocked && wire->ops->waiting(wire) >= wire->queue_max && (result = wire->ops->flush(wire)) < 0)
			return result;
	}
}

/* ---- from the wire to the ring ---- */
/* What a message does, once it is known that it may. */
struct effect {
	uint64_t data, data_left; /* bytes of it that are of the stream, and that are to follow */
	uint64_t read; /* the other application has read so far; valid if reads */
	bool reads;
};

/* Walks over the words of the link in a message; where `place`, its data is put behind the tail. False: not plain. */
static bool walk(struct engine_loan *loan, uint32_t len, bool place, struct effect *effect)
{
	struct engine_record *record = &loan->record;
	struct wire *wire = &loan->by.wire;
	uint64_t left = record->data_left, room = loan->end->tx.spill_size;
	uint64_t head = atomic_load_explicit(loan->end->own.head, memory_order_relaxed);

	*effect = (struct effect){.read = head};
	for (uint32_t at = BSDH_LEN; at < len;) {
		if (left) {
			uint32_t some = left < len - at ? (uint32_t)left : len - at;
			while (place && some) {
				struct iovec piece[2];
				channel_tx_pieces(loan->end, some, piece);
				uint32_t part = (uint32_t)piece[0].iov_len;
				wire->ops->copy(wire, at, piece[0].iov_base, part);
				atomic_store_explicit(loan->end->own.tail,
				                      atomic_load_explicit(loan->end->own.tail, memory_order_relaxed) + part,
				                      memory_order_release);
				at += part;
				left -= part;
				some -= part;
				effect->data += part;
			}
			at += some;
			left -= some;
			effect->data += some;
			continue;
		}
		uint8_t word[WORD_LEN];
		if (len - at < WORD_LEN)
			return false;
		wire->ops->copy(wire, at, word, WORD_LEN);
		at += WORD_LEN;
		uint64_t count;
		memcpy(&count, word + 8, sizeof(count));
		count = be64toh(count);
		if (word[0] == LINK_DATA && count && count <= room && record->receives) {
			left = count;
		} else if (word[0] == LINK_READ && count - head <= record->held && count >= effect->read) {
			effect->read = count;
			effect->reads = true;
		} else {
			return false;
		}
	}
	effect->data_left = left;
	return true;
}

/* Whether there is room for so many bytes, in the ring or behind it. */
static bool room_for(struct engine_loan *loan, uint64_t bytes)
{
	struct channel_end *end = loan->end;

	channel_tx_settle(end);
	int64_t room = channel_tx_space(end, SIZE_MAX);
	if (room >= 0 && (uint64_t)room < bytes && channel_tx_spill(end, SIZE_MAX))
		room = channel_tx_space(end, SIZE_MAX);
	return room >= 0 && (uint64_t)room >= bytes;
}

/* Takes the message that the wire has found. ENGINE_KEPT, or why it has to be given back untouched. */
static enum engine_reason take_message(struct engine_loan *loan, uint32_t len, bool *shown, bool *freed)
{
	struct engine_record *record = &loan->record;
	struct wire *wire = &loan->by.wire;
	struct sdp_bsdh bsdh;
	struct effect effect;

	if (len < BSDH_LEN)
		return ENGINE_MESSAGE;
	wire->ops->copy(wire, 0, (uint8_t *)&bsdh, BSDH_LEN);
	uint32_t ack = be32toh(bsdh.mseq_ack), unseen = record->tx_mseq - ack;
	if (bsdh.mid != SDP_DATA || bsdh.flags || be32toh(bsdh.len) != len || be32toh(bsdh.mseq) != record->rx_mseq + 1 ||
	    unseen > record->tx_mseq - record->peer_ack)
		return ENGINE_MESSAGE;
	if (!walk(loan, len, false, &effect))
		return ENGINE_MESSAGE;
	if (effect.data + effect.data_left && !room_for(loan, effect.data + effect.data_left))
		return ENGINE_MESSAGE; /* more than was allowed, or the application's counts: Python tells which */
	walk(loan, len, true, &effect);
	uint32_t bufs = be16toh(bsdh.bufs);
	record->rx_mseq++;
	record->peer_ack = ack;
	record->credit = bufs > unseen ? bufs - unseen : 0;
	record->owes |= len > BSDH_LEN;
	record->data_left = effect.data_left;
	record->messages_received++;
	record->payloads_received += len > BSDH_LEN;
	record->wire_received += len;
	record->bytes_received += effect.data;
	*shown |= effect.data != 0;
	if (effect.reads) {
		uint64_t passed = effect.read - atomic_load_explicit(loan->end->own.head, memory_order_relaxed);
		channel_rx_consume(loan->end, passed);
		record->held -= passed;
		*freed |= passed != 0;
	}
	wire->ops->taken(wire);
	return ENGINE_KEPT;
}

static enum engine_reason receive_some(struct engine_loan *loan)
{
	struct wire *wire = &loan->by.wire;
	enum engine_reason reason = ENGINE_KEPT;
	bool shown = false, freed = false;
	uint64_t before = loan->record.wire_received;

	while (!reason) {
		int found = wire->ops->next(wire, loan->record.local_size);
		if (found < 0)
			reason = (enum engine_reason)(-found);
		if (found <= 0) {
			loan->more |= !found && wire->readable;
			break;
		}
		reason = take_message(loan, wire->len, &shown, &freed);
		if (loan->record.wire_received - before >= SHARE) {
			loan->more = true;
			break;
		}
	}
	if (shown)
		channel_tx_show(loan->end);
	if (freed) {
		atomic_thread_fence(memory_order_seq_cst); /* between publishing head and reading want_space */
		freed = atomic_load_explicit(&loan->end->rx_peer_line->want_space, memory_order_relaxed) != 0;
	}
	if (shown || freed)
		ring(loan);
	return reason;
}

enum engine_reason loan_turn(struct engine_loan *loan, int64_t now_ns)
{
	struct wire *wire = &loan->by.wire;

	loan->more = false;
	wire->now_ns = now_ns;
	if (words_changed(loan))
		return ENGINE_WORDS; /* before the counts are read: who finds that it has ended finds all that it sent */
	enum engine_reason reason = receive_some(loan);
	int result = reason ? 0 : send_some(loan, now_ns);
	if (result < 0)
		reason = (enum engine_reason)(-result);
	result = reason == ENGINE_BROKEN ? 0 : wire->ops->flush(wire);
	if (result < 0)
		return (enum engine_reason)(-result);
	return !reason && wire->hot ? ENGINE_HOT : reason;
}

int64_t loan_deadline(const struct engine_loan *loan)
{
	int64_t wire = loan->by.wire.deadline_ns;
	int64_t starved = loan->starved_ns ? loan->starved_ns + LOAN_STARVED_MS * 1000000ll + 1 : 0;

	return !starved || (wire && wire < starved) ? wire : starved;
}
