/* scenario.h - see scenario.c. */
#ifndef SIDESTEP_SIM_SCENARIO_H
#define SIDESTEP_SIM_SCENARIO_H

#include "program.h"

bool scenario_run(char *text); /* false: a command has fewer points than it was to be interrupted at */
void scenario_program(struct program *mine, struct end *end);
extern bool scenario;

#endif
