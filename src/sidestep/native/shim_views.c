/*
 * shim_views.c - rings as memory of the program: what sidestep.rings calls.
 *
 * A program that looks into a ring has a mapping of its own, which outlives the connection for as long as the program
 * keeps views of it. It shows the ring twice, one after the other, so that every piece is contiguous. Receiving rings are
 * mapped read-only. The peer can write to the same memory at any time: what must not change while it is judged is copied.
 */
#include "shim.h"

#include <errno.h>
#include <sys/mman.h>

/* The bytes that have come by ring. 0 or -EAGAIN, as conn_look(); serial and position are told in any case, 0 and 0 of a
 * socket that is not tracked. */
EXPORT int sidestep_look(int fd, struct sidestep_piece *piece)
{
	HELD conn = conn_hold(fd);

	*piece = (struct sidestep_piece){0};
	if (!conn)
		return -EAGAIN;
	piece->serial = conn->serial;
	int result = conn_look(conn, fd, piece);
	piece->position = word_load(conn->slot->rx_tcp_bytes) + word_load(conn->slot->rx_ring_bytes);
	return result;
}

/* Takes `len` bytes from the front, if `piece` still is the front. 0, -ESTALE, or -EAGAIN: they are the kernel's. */
EXPORT int sidestep_consume(int fd, const struct sidestep_piece *piece, size_t len)
{
	HELD conn = conn_hold(fd);

	if (!conn)
		return piece->serial ? -ESTALE : -EAGAIN;
	return conn->serial == piece->serial ? conn_consume(conn, piece->position, len) : -ESTALE;
}

/* As conn_reserve(). */
EXPORT int sidestep_reserve(int fd, size_t wanted, struct sidestep_piece *piece)
{
	HELD conn = conn_hold(fd);

	*piece = (struct sidestep_piece){0};
	return conn ? conn_reserve(conn, fd, wanted, piece) : -ENOTCONN;
}

/* As conn_commit(). */
EXPORT int sidestep_commit(int fd, const struct sidestep_piece *piece, size_t len)
{
	HELD conn = conn_hold(fd);

	return conn ? conn_commit(conn, fd, piece, len) : -ENOTCONN;
}

EXPORT void sidestep_unreserve(int fd, const struct sidestep_piece *piece)
{
	HELD conn = conn_hold(fd);

	if (conn && piece->serial)
		conn_unreserve(conn, piece->serial);
}

/* The address of a ring of the connection `serial`, mapped twice in a row; the caller unmaps it. NULL: errno says why. */
EXPORT void *sidestep_map(int fd, uint64_t serial, int sending)
{
	HELD conn = conn_hold(fd);

	if (!conn || conn->serial != serial || !conn->managed) {
		errno = ENOTCONN;
		return NULL;
	}
	uint8_t *ring = sending ? conn->channel.tx_data : conn->channel.rx_data;
	size_t size = sending ? conn->channel.tx_size : conn->channel.rx_size;
	uint8_t *base = mmap(NULL, 2 * size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (base == MAP_FAILED)
		return NULL;
	for (int half = 0; half < 2; half++) {
		/* mremap(2): of shared memory, an old size of 0 makes a second mapping of the same pages */
		if (mremap(ring, 0, size, MREMAP_MAYMOVE | MREMAP_FIXED, base + (size_t)half * size) == MAP_FAILED ||
		    (!sending && mprotect(base + (size_t)half * size, size, PROT_READ) < 0)) {
			int failed = errno;
			munmap(base, 2 * size);
			errno = failed;
			return NULL;
		}
	}
	return base;
}
