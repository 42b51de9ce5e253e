/* shim_fd.h - what the calls on descriptors have in common. */
#ifndef SIDESTEP_SHIM_FD_H
#define SIDESTEP_SHIM_FD_H

#include "shim_number.h"

static inline bool own(int fd)
{
	struct file *file = file_get(fd);

	return unlikely(file && file->kind == FILE_OWN);
}

/* What the program has asked of O_NONBLOCK. */
static inline void noted(struct conn *conn, bool nonblock)
{
	if (conn)
		word_store(conn->nonblock, nonblock);
}

extern bool
	program_loaded; /* by our loader: libc's streams are not those of the program, of which each call comes by */

/* ---- options (shim_option.c) ---- */
void option_inherit(struct conn *conn, int fd); /* accepted sockets have some from their listener */

#endif
