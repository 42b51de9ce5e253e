/* operation.h - what a program can do with its end of the connection; see operation.c, and holders.c. */
#ifndef SIDESTEP_SIM_OPERATION_H
#define SIDESTEP_SIM_OPERATION_H

#include "program.h"

#define SIZE_LARGEST 40000

/* A call of this program: the shim's, or the kernel's own for a program without a shim. */
#define CALL(program, result, name, types) \
	((result(*) types)((program)->stranger ? kernel_find(#name) : dlsym((program)->library, #name)))

bool promoted_now(const struct program *mine);
void look(const struct program *mine); /* how far the connection has come */
size_t some_size(void);
ssize_t do_send(struct program *mine, size_t len, bool quiet);
ssize_t do_recv(struct program *mine, size_t len, int flags);
void do_shutdown(struct program *mine, int how);
void do_close(struct program *mine);
void set_register(struct program *mine, int op, uint32_t events);
void do_agree(struct program *mine);
uint32_t do_wait(struct program *mine, short events, int timeout);
void told_anew(struct program *mine); /* that it can read */
void do_nap(struct program *mine, short events);
void do_async(struct program *mine);
void do_nest(struct program *mine);
void do_nest_edges(struct program *mine);
int do_count(struct program *mine);
void do_low_water(struct program *mine, int low);
void do_pass(struct program *mine);
void do_exec(struct program *mine);
void do_travel(struct program *mine);
void do_sleep(struct program *mine);
void do_confine(struct program *mine);
void do_dup(struct program *mine);
void do_kill(struct program *mine);
void do_fork(struct program *mine, void (*child)(struct program *mine), bool awaits);
bool do_await(struct program *mine);
void do_give(struct program *mine);
void do_hand_over(struct program *mine);
void do_hidden_close(struct program *mine);
void do_exit(struct program *mine);
void do_abort(struct program *mine, bool by_linger);

#endif
