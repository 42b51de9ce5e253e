/* shim_proc.h - what proc(5) tells of processes and descriptors, read by calls that no hook sees and without allocating. */
#ifndef SIDESTEP_SHIM_PROC_H
#define SIDESTEP_SHIM_PROC_H

#include "shim.h"

bool program_calls(const char *file); /* true if it makes calls by code of its own, or may (shim_code.c) */

struct process {
	uint32_t parent;
	uint64_t began_ns;
};

int proc_open(const char *path, int flags);
bool proc_process(uint32_t pid, struct process *process); /* false: it has gone, or is hidden from us */
long proc_number(const char *name); /* -1: it is none */
/* Calls `each` for the entries of a directory that are numbers, as long as it says so. False: it could not be read. */
bool proc_numbers(int dir, bool (*each)(int dir, long number, void *argument), void *argument);

#endif
