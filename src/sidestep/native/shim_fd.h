/* shim_fd.h - what the calls on descriptors have in common. */
#ifndef SIDESTEP_SHIM_FD_H
#define SIDESTEP_SHIM_FD_H

#include "shim.h"

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
void fd_forget(int fd, bool closing); /* what the table holds of a number that the program ends or overwrites */
void fd_fresh(
	int fd); /* a new number: an entry left there belongs to a descriptor that was closed where we could not see it */

/* ---- options (shim_option.c) ---- */
void option_inherit(struct conn *conn, int fd); /* accepted sockets have some from their listener */

#endif
