/* shim_fd.h - what the calls on descriptors have in common. */
#ifndef SIDESTEP_SHIM_FD_H
#define SIDESTEP_SHIM_FD_H

#include "shim_number.h"

static inline bool own(int fd)
{
	struct file *file = file_get(fd);

	return unlikely(file && file->kind == FILE_OWN);
}

/* A wait may have another limit, or none at all: the next one asks. */
static inline void briefs_end(struct conn *conn)
{
	word_store(conn->brief_fd[0], 0);
	word_store(conn->brief_fd[1], 0);
	refusing_ends(conn);
}

/* The program's setting of O_NONBLOCK. */
static inline void noted(struct conn *conn, bool nonblock)
{
	if (!conn)
		return;
	word_store(conn->nonblock, nonblock);
	briefs_end(conn);
}

/* Streams of the program read and write by us: see shim_stdio.c. Our loader's programs make no other calls. */
extern bool stdio_seen;
/* A stream is to have the number. */
static inline void conn_streams(int fd)
{
	if (likely(stdio_seen))
		return;
	HELD conn = conn_hold(fd);
	if (conn)
		conn_demote(conn, fd, REASON_STDIO, true);
}

/* ---- options (shim_option.c) ---- */
void option_inherit(struct conn *conn, int fd); /* accepted sockets have some from their listener */

#endif
