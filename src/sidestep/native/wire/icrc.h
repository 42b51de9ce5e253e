/*
 * icrc.h - the CRC-32 of Ethernet, of which the invariant checksum of RoCEv2 is made (IBTA annex A17), as fast as the CPU does it.
 *
 * `state` is the register of the shift, as in crc32c.h: ~0 before the first byte, complemented after the last. rdma/roce/packet.py
 * has what a packet's checksum covers, in a readable form.
 */
#ifndef SIDESTEP_ICRC_H
#define SIDESTEP_ICRC_H

#include <stddef.h>
#include <stdint.h>

#define ICRC_START 0xFFFFFFFFu

/* The state after `len` more bytes. */
typedef uint32_t icrc_update_fn(uint32_t state, const uint8_t *data, size_t len);

struct icrc_implementation {
	const char *name;
	icrc_update_fn *update;
};

/* What this CPU can do, best first, ended by a NULL name. The last is plain C. */
extern const struct icrc_implementation *icrc_implementations;
extern icrc_update_fn *icrc_update;

/* Factors, by which a difference between two states becomes that behind, or before, `len` bytes, whatever these are. */
uint32_t icrc_behind(size_t len);
uint32_t icrc_before(size_t len);
uint32_t icrc_product(uint32_t a, uint32_t b);

/* Makes the tables; to be called before anything else, and harmless again. */
void icrc_init(void);

#endif
