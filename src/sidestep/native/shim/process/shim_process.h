/* shim_process.h - how programs are found and started, and what the shim does for those that it cannot serve. */
#ifndef SIDESTEP_SHIM_PROCESS_H
#define SIDESTEP_SHIM_PROCESS_H

#include "shim.h"

#include <alloca.h>
#include <limits.h>

/* `argv` and `env` become those that the program can be started with; they live as long as the caller. */
#define START_FOR(start, dir, program, argv, env) \
	struct start start; \
	if (unlikely(start_differs(&start, dir, program, argv, env))) \
	start_make(&start, program, &argv, &env, alloca(start.room))

/* The file that execvp() will find: itself, or one in a directory of PATH. NULL: nothing that can be executed. */
const char *found_by_name(const char *file, char path[PATH_MAX]);

void conns_release(enum reason_code reason, bool strict); /* shim_close.c */

/* The calling thread is about to fork: no other thread's child keeps this descriptor. 0: it has forked, and read. */
void fork_keeps(int fd);

#endif
