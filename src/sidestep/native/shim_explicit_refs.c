/* shim_explicit_refs.c - the structs of explicit sockets: references to them, and the lease that ends with the last. */
#include "shim.h"

#include <sys/mman.h>

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
