/*
 * judge.c - the model of one connection, and what a program may be told.
 *
 * Every byte is judged as it is read: which process of the other side sent it, and at what place. Where two processes read
 * from one socket at once, the order in which they took what they have is not known before both have returned: then some
 * order must be right.
 */
#include "judge.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "layout.h"
#include "program.h"
#include "provider.h"
#include "relay.h"

struct side sides[2];

static struct side *other_side(const struct side *side)
{
	return &sides[side == &sides[0]];
}

static int side_index(const struct side *side)
{
	return side == &sides[1];
}

uint8_t pattern(int side, int process, uint64_t at)
{
	return (uint8_t)(((at * 0x9E3779B97F4A7C15ull >> 56) + (uint64_t)side) << 1 | (uint64_t)process);
}

uint64_t side_offered(const struct side *side)
{
	return side->streams[0].offered + side->streams[1].offered;
}

uint64_t side_sent(const struct side *side)
{
	return side->streams[0].sent + side->streams[1].sent;
}

/* ---- what is sent ---- */
void stream_begins(struct side *side, int process, size_t len)
{
	struct stream *stream = &side->streams[process];
	uint64_t other = side->streams[1 - process].sent;

	if (side->forked && (!stream->marks_len || stream->marks[stream->marks_len - 1].other != other)) {
		if (stream->marks_len == stream->marks_max) {
			stream->marks_max = 2 * stream->marks_max + 16;
			stream->marks = realloc(stream->marks, stream->marks_max * sizeof(*stream->marks));
		}
		stream->marks[stream->marks_len++] = (struct mark){stream->sent, other};
	}
	stream->offered = stream->sent + len;
}

void stream_moved(struct side *side, int process, size_t len)
{
	struct stream *stream = &side->streams[process];

	stream->sent += len;
	stream->offered = stream->sent;
	for (int i = 0; i < 2; i++)
		if (other_side(side)->cursor.read[i] > side->streams[i].offered)
			fail("end %d: the peer has read more than was sent", side_index(side));
}

/* ---- what is read ---- */

/* Whether these bytes may follow; what is wrong with the first that may not, or NULL. */
static const char *follows(const struct side *from, struct cursor *cursor, const uint8_t *bytes, size_t len)
{
	for (size_t i = 0; i < len; i++) {
		int process = bytes[i] & 1;
		const struct stream *stream = &from->streams[process];
		uint64_t at = cursor->read[process];
		if (bytes[i] != pattern(side_index(from), process, at))
			return "wrong byte";
		if (at >= stream->offered)
			return "byte that was not sent";
		size_t *mark = &cursor->mark[process];
		for (; *mark < stream->marks_len && stream->marks[*mark].at <= at; ++*mark)
			if (cursor->read[1 - process] < stream->marks[*mark].other)
				return "byte that overtook another process's";
		cursor->read[process]++;
	}
	return NULL;
}

/* Some order of the chunks of both processes, each behind those that had returned before it began. */
static bool some_order(const struct side *mine, struct cursor cursor, const size_t at[2], struct cursor *found)
{
	if (at[0] == mine->chunks_len[0] && at[1] == mine->chunks_len[1]) {
		*found = cursor;
		return true;
	}
	for (int i = 0; i < 2; i++) {
		if (at[i] == mine->chunks_len[i])
			continue;
		const struct chunk *chunk = &mine->chunks[i][at[i]];
		struct cursor next = cursor;
		size_t then[2] = {at[0] + (i == 0), at[1] + (i == 1)};
		if (chunk->after <= at[1 - i] && !follows(other_side(mine), &next, chunk->bytes, chunk->len) &&
		    some_order(mine, next, then, found))
			return true;
	}
	return false;
}

static void chunk_add(struct program *mine, const uint8_t *bytes, size_t len)
{
	struct side *side = mine->side;
	int i = mine->process;

	if (side->chunks_len[i] == side->chunks_max[i]) {
		side->chunks_max[i] = 2 * side->chunks_max[i] + 16;
		side->chunks[i] = realloc(side->chunks[i], side->chunks_max[i] * sizeof(struct chunk));
	}
	struct chunk *chunk = &side->chunks[i][side->chunks_len[i]++];
	*chunk = (struct chunk){malloc(len), len, mine->read_after};
	memcpy(chunk->bytes, bytes, len);
}

static void chunks_judge(struct side *mine)
{
	/* with a program without a shim beside it, what a shim reads at once may be two reads of the kernel's */
	mine->blind = mine->passed && !some_order(mine, mine->cursor, (const size_t[2]){0, 0}, &mine->cursor);
	if (mine->blind)
		mine->lost_max = UINT64_MAX;
	if (!mine->passed && !some_order(mine, mine->cursor, (const size_t[2]){0, 0}, &mine->cursor))
		fail("end %d: two processes have read what was not sent, in no order", side_index(mine));
	for (int i = 0; i < 2; i++) {
		for (size_t at = 0; at < mine->chunks_len[i]; at++)
			free(mine->chunks[i][at].bytes);
		mine->chunks_len[i] = 0;
	}
}

/* Others without a shim have the socket, or are about to get it. */
bool side_passes(const struct side *side)
{
	for (int i = side_index(side); i < ENDS; i += 2)
		if (programs[i].passing)
			return true;
	return side->passed;
}

/* Both processes of a side are in the midst of a call. */
static bool in_calls(const struct side *side)
{
	int i = side_index(side);

	return programs[i].ready && programs[i + 2].ready && !ends[i].over && !ends[i + 2].over && !programs[i].between &&
	       !programs[i + 2].between;
}

/* So much has come for a side at least that none of its processes has taken. */
static uint64_t left_for(const struct side *mine)
{
	uint64_t sent = side_sent(other_side(mine));

	if (mine->lost_max == UINT64_MAX || sent <= mine->received + mine->lost_max)
		return 0;
	return sent - mine->received - mine->lost_max;
}

/*
 * A reset is told once, to any process of this side, and from then on a read ends (sock_error, tcp_recvmsg_locked). The other process
 * may have it, and its call has not returned: then that call has to tell of it; see judge_call_over().
 */
static bool other_tells(struct program *mine)
{
	if (!mine->side->forked || !in_calls(mine->side) || !reset_excused(mine->side))
		return false;
	programs[mine->index ^ 2].owes_reset = true;
	return true;
}

void judge_call_over(struct program *mine)
{
	if (mine->owes_reset && !mine->side->told_reset)
		fail("end %d: end of stream, and the other process is told of no reset", side_index(mine->side));
	mine->owes_reset = false;
}

/* `reader`: who was told the end, if nobody has read meanwhile. */
static void judge_whole(struct side *mine, struct program *reader)
{
	const struct side *peer = other_side(mine);

	mine->ended_meanwhile = false;
	/* Known: who is killed cannot send again what an end that passed its socket on had not read. */
	if (mine->told_reset ||
	    ((side_passes(mine) || relay_recalls(!side_index(mine))) && (peer->killed || peer->closed_unseen)))
		return;
	const struct tcp *tcp = &connection[side_index(mine)]->tcp;
	if (mine->forked && tcp->was_reset && (!tcp->error || in_calls(mine)))
		return; /* another process has been told of the reset, by the kernel or the shim, whose call has not returned yet */
	if ((left_for(mine) || (!mine->blind && mine->received > side_offered(peer))) && !(reader && other_tells(reader)))
		fail("end %d: false end of stream at %llu of %llu", side_index(mine), (unsigned long long)mine->received,
		     (unsigned long long)side_sent(peer));
}

void judge_read_begins(struct program *mine)
{
	mine->side->reading++;
	mine->reading = true;
	mine->read_after = mine->side->chunks_len[1 - mine->process];
	mine->alone = mine->side->reading == 1;
}

/* `mine` is about to return, and what it has read was judged. */
void judge_read_over(struct program *mine)
{
	struct side *side = mine->side;

	mine->reading = false;
	if (--side->reading)
		return;
	if (side->chunks_len[0] + side->chunks_len[1] && !side->blind)
		chunks_judge(side);
	if (side->ended_meanwhile)
		judge_whole(side, NULL);
}

void judge_bytes(struct program *mine, const uint8_t *data, size_t len, bool is_short, bool peek)
{
	struct side *side = mine->side;
	const struct side *peer = other_side(side);
	bool overlaps = side->reading > 1 || side->chunks_len[0] + side->chunks_len[1];
	struct cursor cursor = side->cursor;
	int i = side_index(side);

	if (mine->told_end)
		fail("end %d: bytes after the end of stream", i);
	if (overlaps && !peek)
		chunk_add(mine, data, len);
	if (!overlaps && !(peek && !mine->alone) && !side->blind) {
		const char *wrong = follows(peer, &cursor, data, len);
		if (wrong)
			fail("end %d: %s at %llu", i, wrong, (unsigned long long)(cursor.read[0] + cursor.read[1]));
	}
	if (peek)
		return;
	if (!overlaps)
		side->cursor = cursor;
	side->received += len;
	side->read_at = now;
	/* libuv takes a short read for the end once it has been told of a hang-up */
	if (is_short && mine->hung_up && !overlaps && !side->blind && side->received < side_sent(peer) &&
	    !reset_excused(side))
		fail("end %d: false end of stream: hung up, and a short read at %llu of %llu", i,
		     (unsigned long long)side->received, (unsigned long long)side_sent(peer));
}

/* ---- how it may end ---- */

/* The connection may end by a reset for this end: the peer did what makes one, or left bytes unread. */
bool reset_excused(const struct side *mine)
{
	const struct side *peer = other_side(mine);

	/* who gets the socket next cannot read what a ring holds that nobody can be asked for any more: see conn_abandon() */
	if (side_passes(mine) || side_passes(peer) || peer->hostile || relay_excuses())
		return true;
	/* known: bytes that a provider has asked for again are lost with a close, where nobody reads for two seconds */
	int64_t since = peer->closing_at > mine->read_at ? peer->closing_at : mine->read_at;
	if (peer->closing && relay_recalls(!side_index(mine)) && now - since >= 2000 * MS)
		return true;
	return peer->aborted || mine->aborted || (mine->shut_rd && mine->shut_wr && side_offered(peer) > mine->received) ||
	       ((peer->closing || peer->killed || (peer->shut_rd && peer->shut_wr)) && side_offered(mine) > peer->received);
}

static bool has_ended(const struct side *side)
{
	return side->closing || side->killed || side->disconnected;
}

void judge_error(struct program *mine, const char *call, int error)
{
	struct side *side = mine->side;
	const struct side *peer = other_side(side);

	if (error == EAGAIN || (error == EPIPE && side->shut_wr && strcmp(call, "send") == 0))
		return;
	mine->read_fails |= strcmp(call, "recv") == 0;
	if ((error == EPIPE || error == ENOTCONN) && side->told_reset) {
		mine->told_reset |= error == ENOTCONN; /* another process of this side was told of the reset */
		return;
	}
	/* where the socket was passed on much is excused, but not a reset that the kernel knows nothing of */
	if (error == ECONNRESET && side_passes(peer) && !peer->forked && !connection[side_index(side)]->tcp.dead &&
	    !connection[side_index(side)]->tcp.half_reset && !has_ended(peer))
		fail("end %d: %s tells of a reset, and the connection is whole", side_index(side), call);
	if (((error == ECONNRESET || error == EPIPE) && reset_excused(side)) ||
	    (error == ENOTCONN && (side->aborted || (side_passes(side) && reset_excused(side))))) {
		side->told_reset = mine->told_reset = seen[SEEN_RESET] = true;
		return;
	}
	fail("end %d: %s fails: %s", side_index(side), call, strerrorname_np(error));
}

void judge_end(struct program *mine)
{
	struct side *side = mine->side;
	const struct side *peer = other_side(side);
	int i = side_index(side);

	if (side->shut_rd || side->told_reset || side->aborted)
		return;
	if (!peer->shut_wr && !peer->closing && !peer->killed) {
		if (!other_tells(mine))
			fail("end %d: end of stream, and the peer has not ended", i);
		mine->told_end = true;
		return;
	}
	/* the kernel tells a reset once: to another process of this side, perhaps just now */
	if (connection[i]->tcp.was_reset && !side->forked)
		fail("end %d: end of stream, and it was a reset", i);
	if (peer->left_unread && !peer->shut_wr && !side->forked)
		fail("end %d: end of stream, and the peer has closed with bytes unread", i);
	mine->told_end = true;
	if (side->reading > 1)
		side->ended_meanwhile = true;
	else
		judge_whole(side, mine);
}

/*
 * What has arrived is the receiver's: nothing but a reset takes it away, and nothing that the peer does or leaves undone. But who
 * passes the socket on to a program without a shim asks for its bytes by TCP, and nobody knows what two that read at once have left.
 */
static bool keeps_what_arrived(const struct program *mine, uint64_t received_before)
{
	const struct side *side = mine->side;

	return !mine->stranger && !side_passes(side) && !side->blind && !side->reading && !side->shut_rd &&
	       !side->told_reset && !mine->told_end && side->received == received_before && !reset_excused(side);
}

/* FIONREAD has counted `number`; from before the call so much had been received, and so much had arrived. */
void judge_counted(struct program *mine, uint64_t received_before, uint64_t arrived_before, int number)
{
	struct side *side = mine->side;
	uint64_t there = side->received + (uint64_t)number;

	/* of a process that has confined itself the peer sends all again, which may be more than TCP takes at once */
	if (!keeps_what_arrived(mine, received_before) || side->confined)
		return;
	if (there < arrived_before)
		fail("end %d: FIONREAD %d, and %llu bytes more have arrived", side_index(side), number,
		     (unsigned long long)(arrived_before - there));
	if (there > side->arrived)
		side->arrived = there;
}

/* `asked` of poll, or of a set, and what was told. */
void judge_told(struct program *mine, uint32_t asked, uint32_t told)
{
	mine->ending |= (told & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
	mine->hung_up |= (told & POLLHUP) != 0;
	if (told & ~(asked | POLLHUP | POLLERR))
		fail("end %d: told of %#x, asked for %#x", side_index(mine->side), told, asked);
	/* the kernel's own halves, where there has been no ring, are not the shim's doing */
	const struct conn_slot *slot = provider_slot(side_index(mine->side));
	uint32_t whole = POLLHUP | (asked & (POLLIN | POLLRDHUP | POLLOUT));
	if ((told & POLLERR) && (told & whole) != whole && !mine->stranger && !mine->side->passed && slot &&
	    slot->promoted_ns)
		fail("end %d: told of half a reset: %#x", side_index(mine->side), told);
	/* tcp_poll: only a socket that was disconnected hangs up and has nothing to read */
	if ((told & POLLHUP) && (asked & POLLIN) && !(told & POLLIN) && !mine->side->aborted && !side_passes(mine->side))
		fail("end %d: told of a hang-up, and not that it can be read: %#x", side_index(mine->side), told);
}

bool could_read(const struct program *mine)
{
	const struct side *side = mine->side, *peer = other_side(side);
	uint64_t there = left_for(side);

	if (side->blind && !there)
		return has_ended(peer);
	return there >= (mine->wanted      ? mine->wanted
	                 : side->low_water ? side->low_water
	                                   : 1) ||
	       peer->shut_wr || has_ended(peer);
}

bool could_write(const struct program *mine)
{
	const struct side *side = mine->side, *peer = other_side(side);

	return side_sent(side) <= peer->received || has_ended(peer);
}
