/* process.h - a process forks; see process.c. */
#ifndef SIDESTEP_SIM_PROCESS_H
#define SIDESTEP_SIM_PROCESS_H

#include "sim.h"

void process_atfork(void (*before)(void), void (*parent)(void), void (*child)(void)); /* of the current end */
void process_memory(void *at, size_t len); /* that it alone has, from now on */
void *process_allocate(size_t len);
bool process_allocated(const void *at);
void process_enter(struct end *end); /* what it has in memory is in place */
void process_loaded(const void *code); /* a library, before anything of it has run */
void process_execute(void *library); /* all that it has is as it was then, and it begins */
int process_fork(void *library); /* 0 in the child, which is the end two numbers on */

#endif
