/* shim_conn_refs.c - references to a connection, and its end when the last one goes. */
#include "shim_switch.h"

/* A function of its own: inlined, its registers would be saved in every call that lets go of a connection. */
__attribute__((noinline)) static void conn_destroy(struct conn *conn)
{
	struct conn_slot *slot = conn->slot;

	if (conn->deferred_fd >= 0)
		announce_close(conn, conn->deferred_fd);
	if (unlikely(conn->explicit))
		explicit_unref(conn->explicit);
	conn->explicit = NULL;
	shim_lock_take();
	conn_unloose(conn); /* the list before the channel: see find_asked() */
	shim_lock_drop();
	if (atomic_load(&conn->managed)) {
		/* Both locks: nobody of this process is inside the rings. Waiters hold references, so there are none. */
		slot_lock(&slot->rx_lock);
		slot_lock(&slot->tx_lock);
		atomic_store(&conn->managed, 0);
		channel_unmap(&conn->channel);
		slot_unlock(&slot->tx_lock);
		slot_unlock(&slot->rx_lock);
	}
	conn_free(conn);
}

void conn_ref(struct conn *conn)
{
	atomic_fetch_add(&conn->refs, 1);
}

void conn_unref(struct conn *conn)
{
	if (unlikely(refs_drop(&conn->refs))) {
		KEEP_ERRNO;
		conn_destroy(conn);
	}
}

bool conn_tryref(struct conn *conn, int fd)
{
	if (unlikely(!refs_take(&conn->refs)))
		return false; /* a connection on its way to the free list, or there */
	if (likely(conn_get(fd) == conn))
		return true;
	conn_unref(conn);
	return false;
}

/* One more number, for a caller that holds the connection. False: its last number is being closed. */
bool conn_join(struct conn *conn, int fd)
{
	uint32_t fds = atomic_load(&conn->fds);

	while (fds && !atomic_compare_exchange_weak(&conn->fds, &fds, fds + 1))
		;
	if (!fds)
		return false;
	conn_ref(conn); /* the new number's */
	file_put(fd, &conn->file);
	return true;
}

/* The connection of a slot, held, and a number of it; NULL: this process has none. */
struct conn *conn_find(const struct conn_slot *slot, uint32_t generation, int *fd)
{
	for (uint32_t at = 0; slot && at < atomic_load(&fd_end); at++) {
		struct conn *conn = conn_hold((int)at);
		if (!conn)
			continue;
		if (conn->slot == slot && conn->generation == generation) {
			*fd = (int)at;
			return conn;
		}
		conn_unref(conn);
	}
	return NULL;
}
