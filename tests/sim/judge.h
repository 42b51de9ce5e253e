/* judge.h - what may come of what the programs do: the model of one connection, by its two sides. */
#ifndef SIDESTEP_SIM_JUDGE_H
#define SIDESTEP_SIM_JUDGE_H

#include "sim.h"

/* What one process of a side sends. Bit 0 of each byte says which process, the rest is a function of its place. */
struct stream {
	uint64_t offered, sent; /* with and without what a call at work may have sent */
	struct mark {
		uint64_t at, other; /* from this byte on, behind so much of the other process's */
	} *marks;
	size_t marks_len, marks_max;
};

struct cursor { /* how far a reader has come in the streams of the other side */
	uint64_t read[2];
	size_t mark[2];
};

struct chunk { /* what a read returned, while another read of the same side may have come before it */
	uint8_t *bytes;
	size_t len, after; /* so many chunks of the other process had returned before this read began */
};

/* One end of the connection: a process, and the child that it may have. */
struct side {
	struct stream streams[2];
	struct cursor cursor;
	uint64_t received;
	uint64_t arrived; /* so much of the stream a process of this side was told of, by FIONREAD or poll */
	uint32_t holders, reading; /* processes that have the socket; that are in a call that reads */
	struct chunk *chunks[2];
	size_t chunks_len[2], chunks_max[2];
	bool ended_meanwhile; /* a read has told the end, while another was at work */
	bool handed; /* a message holds it, for a child that waits */
	bool closed_unseen; /* no shim knows of it */
	bool blind;           /* nobody can say what comes: a process was killed in the midst of a read */
	uint64_t lost_max; /* which has taken so much at most */
	bool shut_wr, shut_rd, closing, killed;
	bool aborted, disconnected; /* by either way; at once, whoever else has the socket */
	bool forked, passed, confined; /* others without a shim have it */
	bool hostile;        /* has written what no shim does */
	bool told_reset;
	bool left_unread; /* closed with bytes there that it had not read: TCP resets (RFC 1122 4.2.2.13) */
	size_t low_water;
	int64_t closing_at, read_at; /* when it began, and when bytes were taken last */
};
extern struct side sides[2];

struct program;
uint8_t pattern(int side, int process, uint64_t at);
uint64_t side_offered(const struct side *side);
uint64_t side_sent(const struct side *side);
bool reset_excused(const struct side *mine);
bool side_passes(const struct side *side);
void stream_begins(struct side *side, int process, size_t len); /* a send */
void stream_moved(struct side *side, int process, size_t len);
void judge_error(struct program *mine, const char *call, int error);
void judge_end(struct program *mine);
void judge_call_over(struct program *mine); /* it is between two calls */
void judge_read_begins(struct program *mine);
void judge_read_over(struct program *mine);
void judge_bytes(struct program *mine, const uint8_t *data, size_t len, bool is_short, bool peek);
void judge_told(struct program *mine, uint32_t asked, uint32_t told);
void judge_counted(struct program *mine, uint64_t received_before, uint64_t arrived_before, int number);
bool could_read(const struct program *mine);  /* and need not wait */
bool could_write(const struct program *mine);

#endif
