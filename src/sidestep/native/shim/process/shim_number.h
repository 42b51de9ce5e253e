/* shim_number.h - what becomes of an entry of the table whose number comes anew, or ends. */
#ifndef SIDESTEP_SHIM_NUMBER_H
#define SIDESTEP_SHIM_NUMBER_H

#include "shim.h"

void fd_forget(int fd, bool closing); /* ends the entry of a number that the program closes or overwrites */
void fd_fresh(int fd);
/* The kernel has just given it to the program; -1: it has not. */
static inline int fd_new(int fd)
{
	if (unlikely(file_get(fd)))
		fd_fresh(fd);
	return fd;
}

#endif
