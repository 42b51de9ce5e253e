/* shim_switch.h - what the files share that carry a connection: from its slot to its bytes. */
#ifndef SIDESTEP_SHIM_SWITCH_H
#define SIDESTEP_SHIM_SWITCH_H

#include "shim.h"

#define PROBE_EVERY 64        /* ring writes between two looks at the native socket for the peer's end */
#define RETRY_NEVER UINT64_MAX

/* ---- shim_arena.c ---- */
#define ARENA_NAME \
	"sidestep-arena-2" /* the number grows when a program of before could not take what is given (shim_pass.h) */
extern bool foreign_pids;
uint32_t slot_index(const struct conn_slot *slot);
void arena_forked(void);
bool arena_continue(int fd, const uint8_t id[16]);
int arena_own_fd(void);
bool arena_kept(void);
struct conn_slot *slot_known(uint32_t index, uint32_t generation);
struct conn_slot *slot_arrive(int fd, const uint8_t id[16], uint32_t index, uint32_t generation);
const struct conn_slot *slot_named(const uint8_t id[16], uint32_t index, uint32_t generation);
bool guest_news(uint32_t serial, uint8_t id[16], uint8_t family[16], int *fd);
void slot_forgo(const struct conn_slot *slot);
void arena_passes(void);
bool arena_has_passed(void);
bool slot_is_guest(const struct conn_slot *slot); /* true if it lies in the arena of another family */
int slot_arena_fd(const struct conn_slot *slot);
const uint8_t *slot_arena_id(const struct conn_slot *slot);
const uint8_t *slot_family(const struct conn_slot *slot); /* name by which peers know it */
void slot_release(struct conn_slot *slot);
struct conn_slot *slot_alloc(void);
void slot_free(struct conn_slot *slot);
void slots_unconfine(void);

/* ---- shim_conn.c ---- */
void conn_free(struct conn *conn);
struct conn *conn_of_slot(int fd, struct conn_slot *slot);
struct channel_own channel_own_of(struct conn_slot *slot);
#define KEPT_MAX 1024 /* segments that are kept open for the next program; connections beyond do not go on in it */
void conn_keep_segment(struct conn *conn, int segment_fd);
bool peer_attached(const struct conn *conn);
void mark_promoted(struct conn *conn);
void conn_abort(struct conn *conn, int fd, int error, enum reason_code reason);
int take_error(struct conn *conn);
void keep_error(struct conn *conn, ssize_t result);
void error_delivered(struct conn *conn, int error);

/* ---- shim_count.c ---- */
/*
 * Results of a comparison of the kernel's count with ours. Some bytes arrive between two questions: then nothing is known
 * yet.
 */
enum count { COUNT_EQUAL, COUNT_DIFFERS, COUNT_UNSTABLE };
enum count rx_count(struct conn *conn, int fd);
enum count tx_count(struct conn *conn, int fd);
void rx_recount(struct conn *conn, int fd);
void tx_recount(struct conn *conn, int fd);
enum count counts_take(struct conn *conn, int fd);
size_t tcp_unread(const struct conn *conn, int fd);
bool kernel_fin(int fd);
bool kernel_fin_acked(int fd);
bool kernel_lost(int fd, uint64_t bytes);
bool kernel_failed(int fd, uint32_t events);
bool kernel_closed(int fd);

/* ---- shim_relayed.c ---- */
bool tx_acked(const struct conn *conn);
bool relay_gone(const struct conn *conn);
bool relay_once(const struct conn *conn);
bool rx_depends(const struct conn *conn);
void recall_settle(struct conn *conn, int fd);
bool rx_lost(const struct conn *conn);
bool relay_ended(struct conn *conn);
bool relay_reset_waits(struct conn *conn);
bool rx_reset_waits(struct conn *conn, int fd);
void relay_lost(struct conn *conn, int fd);
bool relay_acked(struct conn *conn, uint32_t what, int turns);
bool relay_spaces(struct conn *conn, int fd);

/* ---- shim_end.c ---- */
bool error_met(struct conn *conn, int fd);

/* ---- shim_switch.c ---- */
bool rx_consent(struct conn *conn, int fd);
bool tx_switch(struct conn *conn, int fd);
int rx_follow(struct conn *conn, int fd);
bool rx_back(struct conn *conn, int fd);
bool rx_spaced(const struct conn *conn);
void tx_recalled(struct conn *conn, int fd);
void tx_back(struct conn *conn, int fd);
bool tx_resend(struct conn *conn, int fd);
bool tx_follows(struct conn *conn);
void tx_space(struct conn *conn, int fd);
bool tx_request_pending(const struct conn *conn);
void tx_handle_notice(struct conn *conn, int fd);
bool leave_ring(struct conn *conn, int fd);
bool rx_divided(const struct conn *conn);
bool rx_unreported(const struct conn *conn);
bool rx_ring_among(const struct conn *conn, size_t queued);
bool rx_goes_on(struct conn *conn, int fd);

/* ---- shim_demote.c ---- */
extern bool process_confined;
void conn_unconfine(struct conn *conn, int fd);
bool ring_recall(struct conn *conn, bool follows);
void low_water_left(struct conn *conn, int fd);

/* ---- shim_close.c ---- */
extern _Atomic bool kernel_strict; /* a thread is in the strict mode of seccomp: see conns_release() */

/* ---- shim_end.c ---- */
void conn_probe_known(struct conn *conn, int fd);

/* ---- shim_room.c ---- */
bool tx_full(const struct conn *conn);

/* ---- shim_events.c ---- */
size_t low_water(struct conn *conn);

/* ---- shim_demote.c ---- */
void conn_abandon(struct conn *conn, int fd, bool unseen);
void conn_bequeath(struct conn *conn, int fd);
void conn_leave_to_stranger(struct conn *conn, int fd, enum reason_code reason);

/* ---- shim_pass.c ---- */
extern _Atomic uint32_t passes_open; /* given to another process, which has not been seen to take them */
void pass_settle(struct conn *conn, int fd);
void passes_settle(void);
void passes_strand(void);
void passes_look(void);
void passes_after_fork(void);
void receivers_forget(void); /* shim_lock held */

/* ---- shim_finish.c ---- */
void conn_flush(struct conn *conn, int fd);
void announce_close(struct conn *conn, int fd);

#endif
