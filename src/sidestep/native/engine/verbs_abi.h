/*
 * verbs_abi.h - structures of `infiniband/verbs.h` of rdma-core that the engine uses. Their layout is the library's ABI
 * (symbol versions IBVERBS_1.x). rdma/kernel/abi.py has those of Python. A test compares both files with the header.
 */
#ifndef SIDESTEP_VERBS_ABI_H
#define SIDESTEP_VERBS_ABI_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

enum verbs_send_flags { VERBS_SIGNALED = 1 << 1, VERBS_INLINE = 1 << 3 };              /* enum ibv_send_flags */
enum verbs_wr_opcode { VERBS_WR_SEND = 2 };            /* enum ibv_wr_opcode */
enum verbs_wc_opcode { VERBS_WC_SEND = 0, VERBS_WC_RECV = 1 << 7 };                     /* enum ibv_wc_opcode */
enum verbs_wc_flags { VERBS_WC_WITH_IMM = 1 << 1, VERBS_WC_WITH_INV = 1 << 3 };         /* enum ibv_wc_flags */
enum verbs_wc_status { VERBS_WC_SUCCESS = 0 };                                          /* enum ibv_wc_status */

/* struct ibv_sge */
struct verbs_sge {
	uint64_t addr;
	uint32_t length, lkey;
};

/* struct ibv_recv_wr */
struct verbs_recv_wr {
	uint64_t wr_id;
	struct verbs_recv_wr *next;
	struct verbs_sge *sg_list;
	int num_sge;
};

/* struct ibv_send_wr; what a Send has no use for is padding here */
struct verbs_send_wr {
	uint64_t wr_id;
	struct verbs_send_wr *next;
	struct verbs_sge *sg_list;
	int num_sge, opcode;
	unsigned int send_flags;
	uint32_t invalidate_rkey;
	uint64_t unused[11];
};

/* struct ibv_wc */
struct verbs_wc {
	uint64_t wr_id;
	int status, opcode;
	uint32_t vendor_err, byte_len, invalidated_rkey, qp_num, src_qp;
	unsigned int wc_flags;
	uint16_t pkey_index, slid;
	uint8_t sl, dlid_path_bits;
};

static_assert(sizeof(void *) != 8 || (sizeof(struct verbs_sge) == 16 && sizeof(struct verbs_recv_wr) == 32 &&
                                      sizeof(struct verbs_send_wr) == 128 && sizeof(struct verbs_wc) == 48),
              "as libibverbs has them");
static_assert(sizeof(void *) != 8 ||
                  (offsetof(struct verbs_send_wr, sg_list) == 16 && offsetof(struct verbs_send_wr, send_flags) == 32 &&
                   offsetof(struct verbs_wc, byte_len) == 20 && offsetof(struct verbs_wc, wc_flags) == 36),
              "as libibverbs has them");

/* The functions that the header calls through the table of a context (`struct ibv_context_ops`), and two of the library. */
struct verbs_calls {
	int (*post_send)(void *qp, struct verbs_send_wr *wr, struct verbs_send_wr **bad);
	int (*post_recv)(void *qp, struct verbs_recv_wr *wr, struct verbs_recv_wr **bad);
	int (*poll_cq)(void *cq, int most, struct verbs_wc *wc);
	int (*req_notify_cq)(void *cq, int solicited_only);
	int (*get_cq_event)(void *channel, void **cq, void **context);
	void (*ack_cq_events)(void *cq, unsigned int count);
};

#endif
