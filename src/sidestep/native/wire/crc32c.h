/*
 * crc32c.h - CRC32C (RFC 3720 B.4; RFC 5044 4.4 uses it for MPA), as fast as the CPU does it.
 *
 * `state` is the register of the shift: ~0 before the first byte, complemented after the last. So a checksum goes on over
 * any number of pieces without more to be done between them. crc32c of rdma/iwarp/mpa.py is the readable form.
 */
#ifndef SIDESTEP_CRC32C_H
#define SIDESTEP_CRC32C_H

#include <stddef.h>
#include <stdint.h>

#define CRC32C_START 0xFFFFFFFFu

/* The state after `len` more bytes. */
typedef uint32_t crc32c_update_fn(uint32_t state, const uint8_t *data, size_t len);

/* The same while they are copied, in one pass where that is faster. It is the checksum of what arrives at `to`, even if `from`
 * is written to meanwhile. */
typedef uint32_t crc32c_copy_fn(uint32_t state, uint8_t *to, const uint8_t *from, size_t len);

struct crc32c_implementation {
	const char *name;
	crc32c_update_fn *update;
};

/* What this CPU can do, best first, ended by a NULL name. The last is plain C. crc32c_init() sets all three. */
extern const struct crc32c_implementation *crc32c_implementations;
extern crc32c_update_fn *crc32c_update;
extern crc32c_copy_fn *crc32c_copy;

/* Makes the tables; to be called before anything else, and harmless again. */
void crc32c_init(void);

#endif
