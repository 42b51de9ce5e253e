/*
 * engine_line.h - a connection of an engine, for the tests of it: an application, and a peer at the other end of the wire.
 *
 * What the engine does is judged at both ends, by code that shares nothing with it but the framing: the peer takes each
 * message apart and judges its numbers by docs/wire/sdp.md §8 and §9, and the application sees only bytes of whole messages,
 * each where it belongs.
 */
#ifndef SIDESTEP_ENGINE_LINE_H
#define SIDESTEP_ENGINE_LINE_H

#include "check.h"
#include "engine.h"

#define LINE_MESSAGE_MAX (1u << 20)
#define LINE_HISTORY 4096u  /* messages of the peer that may be unacknowledged */
#define LINE_OUT_MAX (512u << 10) /* bytes of the peer's that may wait to be written */

/* What a message of the peer says, and how much the application may know of once it has come whole. */
struct line_said {
	uint32_t bufs, ack;
	uint64_t end;  /* of the peer's bytes on the wire: where it ends */
	uint64_t data; /* of the stream: bytes of it and of those before */
};

struct line_peer {
	struct framing_in in;
	struct framing_out out;
	int fd;
	uint32_t mseq, msn;           /* of what it has said last, and next */
	uint32_t seen, seen_msn;      /* of what the engine has said */
	uint32_t acked;               /* what the engine has taken, as it says */
	uint32_t told_bufs, told_ack; /* of the engine's last message */
	uint32_t bufs, size;          /* its own private buffers: how many there are always, and bytes of each */
	struct line_said said[LINE_HISTORY];
	uint8_t *message;             /* of the engine, as far as it has come */
	uint32_t message_len;
	uint64_t sent, data_left;     /* bytes of its stream; those that a word of DATA has still to bring */
	uint64_t read_reported;           /* how many of them have been read, as the engine says */
	uint64_t got, got_left,
		read; /* bytes of the application's stream; those still to come for a word; those told as read */
	bool ended, changed;          /* changed: not all that it said was as it should be */
};

struct line {
	struct engine *engine;
	struct end app, host;
	struct framing_in in;
	struct framing_out out;
	int fd;
	uint32_t number;
	struct engine_loan *loan;     /* NULL: the engine does not have it */
	struct engine_record record;  /* what it was last */
	enum engine_reason reason;    /* why it was taken back last */
	int error;
	uint32_t posted;
	_Atomic uint64_t doorbell_word, doorbell_rung;
	int doorbell_fd;
	struct hint_ring *hints;      /* NULL: it has none */
	uint64_t hints_seen;
	uint64_t seed, app_sent, app_got;
	bool mirrored;
	bool hostile;                 /* the application is: its bytes and counts mean nothing */
	struct line_device *device;   /* NULL: its wire is the socket itself; see line_device.h */
	struct line_peer peer;
};

struct line_options {
	uint32_t ring, number, remote_size, local_size, bufs, posted;
	uint64_t window; /* what the other application can leave unread; 0: as much as the ring and the spill hold */
	bool grows, tcp;
	bool mirrored; /* the application uses the host's mapping: a race detector sees that the memory is the same */
	const struct device_options *device; /* NULL: it has none */
};

void line_open(struct line *line, struct engine *engine, uint64_t seed, const struct line_options *options);
void line_close(struct line *line);

/*
 * Takes what was read, as Python does, and lends it with the application's words of now. False: `reason` tells, or a message
 * has begun and not ended (ENGINE_ASKED), or something waits to be written.
 */
bool line_lend(struct line *line);
void line_take(struct line *line);
/* Takes a message as Python does, with no eye for anything but plain ones. */
enum engine_reason line_heard(struct line *line, const uint8_t *message, uint32_t len);
/* Writes what waits, as Python does before it lends again. */
void line_flush(struct line *line);
/* Takes each that the engine has given back; how many. The user of a loan is its line. */
unsigned lines_returned(struct engine *engine);

/* ---- the application ---- */
size_t line_app_send(struct line *line, size_t len);
size_t line_app_receive(struct line *line, size_t len);
void line_app_hint(struct line *line);

/* ---- the peer ---- */
/* Reads what has come, at most `most` bytes, and judges it. */
void line_peer_read(struct line *line, size_t most);
/* Writes what waits to be written, at most `most` bytes. */
void line_peer_write(struct line *line, size_t most);
/* Credit that it has, as the engine's messages say; minus: it has been told of fewer than it has used. */
int64_t line_peer_credit(const struct line *line);
/* Bytes for which the application has room, as it was told. */
uint64_t line_peer_room(const struct line *line);
/* One message of its own: `data` bytes, if there is room, in so many words of DATA; and a READ for `read` more bytes. */
bool line_peer_say(struct line *line, uint32_t data, unsigned words, uint64_t read);
/* Any message, whether it is one or not. */
void line_peer_say_any(struct line *line, const uint8_t *message, uint32_t len);
/* Any bytes. */
void line_peer_say_bytes(struct line *line, const uint8_t *bytes, size_t len);

/* What must be so at any moment, with the engine not at work. */
void line_check(const struct line *line);
/* It is not lent, and the wire is no TCP: all that its record says to have been said is heard. */
void line_check_told(struct line *line);
/* Nothing is left to do: all that could have gone has gone. */
void line_check_quiet(struct line *line);

/*
 * Of the allocations that are made while memory is short, those from number n on fail, so many. Of one thread. Link with
 * -Wl,--wrap=malloc,--wrap=calloc,--wrap=realloc
 */
void memory_fails(uint64_t n, uint64_t many);
void memory_is_short(bool is);

#endif
