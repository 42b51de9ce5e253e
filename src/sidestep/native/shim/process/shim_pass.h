/* shim_pass.h - a connection on its way to another process: what its giver and its taker share. */
#ifndef SIDESTEP_SHIM_PASS_H
#define SIDESTEP_SHIM_PASS_H

#include "shim_travel.h"

#define PASS_MAGIC 0x50415353u
enum { PASS_WAITS, PASS_TAKEN, PASS_WITHDRAWN };

/* The page in memory that both programs map. */
struct pass {
	uint32_t magic, version;
	_Atomic uint32_t state; /* a futex */
	uint32_t files;
	uint8_t arena_id[16];
	struct traveller of; /* the record: its descriptors have no meaning there */
};

/* ---- shim_pass.c ---- */
bool pass_withdraw(struct pass *pass, struct conn *conn);
void pass_close(struct pass *pass);
void pass_watch(struct conn *conn, struct pass *pass, unsigned long other_end);

#endif
