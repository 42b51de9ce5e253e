/* shim_refs.c - references to explicit sockets and to connections; with the last, a lease or a connection ends. */
#include "shim_switch.h"

#include <sys/mman.h>

/* ---- explicit sockets (shim_explicit.c) ---- */
#define POOL_CHUNK 32

_Atomic bool explicit_any;
/* guarded by shim_lock; never unmapped, so that a stale pointer is harmless */
static struct explicit *free_explicits, *explicits;

struct explicit *explicit_new(int family, bool direct, bool stream, uint32_t protocol)
{
	shim_lock_take();
	if (!free_explicits) {
		struct explicit *chunk =
			mmap(NULL, POOL_CHUNK * sizeof(*chunk), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		for (int i = 0; chunk != MAP_FAILED && i < POOL_CHUNK; i++) {
			chunk[i].file.kind = FILE_EXPLICIT;
			chunk[i].lease_fd = -1;
			chunk[i].next_free = free_explicits;
			chunk[i].next = explicits;
			free_explicits = explicits = &chunk[i];
		}
	}
	struct explicit *explicit = free_explicits;
	if (explicit)
		free_explicits = explicit->next_free;
	shim_lock_drop();
	if (!explicit)
		return NULL;
	explicit->family = (uint16_t)family;
	explicit->direct = direct;
	explicit->stream = stream;
	explicit->protocol = protocol;
	explicit->lease_fd = -1;
	atomic_store(&explicit_any, true);
	atomic_store(&explicit->refs, 1); /* last: from here on it can be held */
	return explicit;
}

void explicit_ref(struct explicit *explicit)
{
	atomic_fetch_add(&explicit->refs, 1);
}

void explicit_unref(struct explicit *explicit)
{
	if (atomic_fetch_sub(&explicit->refs, 1) != 1)
		return;
	KEEP_ERRNO;
	own_fd_close(explicit->lease_fd);
	explicit->lease_fd = -1;
	shim_lock_take();
	explicit->next_free = free_explicits;
	free_explicits = explicit;
	shim_lock_drop();
}

/* References of calls at work stay in the parent: what they alone held has no holder here. */
void explicit_after_fork(void)
{
	for (struct explicit *each = explicits; each; each = each->next)
		each->refs = 0;
	for (uint32_t fd = 0; explicits && fd < atomic_load(&fd_end); fd++) {
		struct file *file = file_get((int)fd);
		struct conn *conn = conn_get((int)fd);
		if (file && file->kind == FILE_EXPLICIT)
			((struct explicit *)file)->refs++;
		else if (conn && conn->explicit && conn_fd(conn) == (int)fd)
			conn->explicit->refs++;
	}
	for (struct explicit *each = explicits; each; each = each->next)
		if (!each->refs && each->lease_fd >= 0) {
			own_fd_close(each->lease_fd);
			each->lease_fd = -1;
		}
}

/* ---- connections ---- */
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
