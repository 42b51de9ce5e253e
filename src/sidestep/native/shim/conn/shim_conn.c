/* shim_conn.c - connections: their structs and descriptors, and what ends them at once. */
#include "shim_provider.h"
#include "shim_switch.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#define POOL_CHUNK 64

static struct conn *free_conns;
static _Atomic uint64_t conn_serials;
static _Atomic uint32_t segments_kept;
_Atomic bool announce_due;
bool arena_shared; /* True with a parent or children, which may have changed their user since */

bool peer_attached(const struct conn *conn)
{
	return atomic_load_explicit(&conn->channel.remote->attached, memory_order_acquire) == 1;
}

static struct conn *conn_alloc(void)
{
	shim_lock_take();
	if (!free_conns) {
		struct conn *chunk =
			mmap(NULL, POOL_CHUNK * sizeof(*chunk), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (chunk == MAP_FAILED) {
			shim_lock_drop();
			return NULL;
		}
		for (int i = 0; i < POOL_CHUNK; i++) {
			chunk[i].file.kind = FILE_CONN;
			chunk[i].next_free = free_conns;
			free_conns = &chunk[i];
		}
	}
	struct conn *conn = free_conns;
	free_conns = conn->next_free;
	shim_lock_drop();
	return conn;
}

static void conn_begin(struct conn *conn, int fd, struct conn_slot *slot)
{
	memset((uint8_t *)conn + offsetof(struct conn, managed), 0, sizeof(*conn) - offsetof(struct conn, managed));
	conn->slot = slot;
	conn->generation = slot->generation;
	word_store(conn->serial, atomic_fetch_add(&conn_serials, 1) + 1);
	conn->fds = 1;
	conn->pending_segment_fd = -1;
	conn->segment_fd = -1;
	conn->deferred_fd = -1;
	conn->budget = (struct spin_budget){.ns = config.spin_ns};
	atomic_store(&conn->refs, 1); /* last: from here on it can be held */
	file_put(fd, &conn->file);
}

/* A connection that the family has, under a number of this process; its holders count it already. */
struct conn *conn_of_slot(int fd, struct conn_slot *slot)
{
	struct conn *conn = conn_alloc();

	if (conn)
		conn_begin(conn, fd, slot);
	return conn;
}

struct channel_own channel_own_of(struct conn_slot *slot)
{
	return (struct channel_own){
		.tail = &slot->tx_tail,
		.head = &slot->rx_head,
		.head_seen = &slot->tx_head_seen,
		.ring_from = &slot->tx_ring_from,
		.ring_to = &slot->tx_ring_to,
		.spill_base = &slot->tx_spill_base,
		.limit = &slot->tx_limit,
		.room_max = &slot->tx_room_max,
	};
}

/* The segment is one of many, at most a quarter of the numbers that are ours: others are needed more. */
void conn_keep_segment(struct conn *conn, int segment_fd)
{
	struct stat st;
	struct rlimit limit;

	if (getrlimit(RLIMIT_NOFILE, &limit) < 0 || atomic_load(&segments_kept) >= KEPT_MAX ||
	    atomic_load(&segments_kept) >= limit.rlim_cur / 32 || real.fstat(segment_fd, &st) < 0)
		return;
	conn->segment_fd = own_fd(real.fcntl64(segment_fd, F_DUPFD_CLOEXEC, 0));
	conn->segment_inode = (uint64_t)st.st_ino;
	if (conn->segment_fd >= 0)
		atomic_fetch_add(&segments_kept, 1);
}

struct conn *conn_new(int fd, int family, enum role_code role)
{
	struct conn_slot *slot = slot_alloc();
	struct conn *conn = slot ? conn_alloc() : NULL;

	if (slot && !conn)
		slot_free(slot);
	if (!conn)
		return NULL;
	uint32_t generation = slot->generation + 1; /* odd: in use */
	size_t kept = offsetof(struct conn_slot, free_next), behind = kept + sizeof(slot->free_next);
	memset(slot, 0, kept); /* the link stays: a thread that loses the race for the slot may read it late */
	memset((uint8_t *)slot + behind, 0, sizeof(*slot) - behind);
	slot->role = (uint16_t)role;
	slot->family = (uint16_t)family;
	slot->fd = (uint32_t)fd;
	slot->pid = shim_pid;
	slot->holders = 1;
	holder_put(slot, 0, shim_pid);
	slot->born_ns = (uint64_t)now_ns();
	slot->reason = REASON_YOUNG;
	slot->rx_low_water = 1;
	if (role == ROLE_PASSIVE)
		slot->flags = SLOT_CONNECTED;
	word_store(slot->state, STATE_NATIVE);
	atomic_store_explicit(&slot->generation, generation, memory_order_release);

	conn_begin(conn, fd, slot);
	return conn;
}

/* The last reference has gone. */
void conn_free(struct conn *conn)
{
	shim_lock_take();
	late_drop(conn);
	if (conn->remote_doorbell)
		remote_doorbell_unref(conn->remote_doorbell);
	while (conn->old_doorbells_len)
		remote_doorbell_unref(conn->old_doorbells[--conn->old_doorbells_len]);
	/* Another holder, since a fork, may wait on the old doorbell by the same set, and this would take it out. */
	if (conn->doorbell && conn->taken_up && conn_alone(conn))
		doorbell_known(conn->doorbell);
	if (conn->doorbell)
		doorbell_unref(conn->doorbell);
	conn->remote_doorbell = NULL;
	conn->doorbell = NULL;
	own_fd_close(conn->pending_segment_fd);
	own_fd_close(conn->deferred_fd);
	if (conn->segment_fd >= 0)
		atomic_fetch_sub(&segments_kept, 1);
	own_fd_close(conn->segment_fd);
	conn->segment_fd = -1;
	conn->pending_segment_fd = -1;
	conn->deferred_fd = -1;
	slot_release(conn->slot);
	conn->next_free = free_conns;
	free_conns = conn;
	shim_lock_drop();
}

/* True if a call may go on with the connection; *fd becomes the number under which it has survived. */
bool conn_stays(struct conn *conn, int *fd)
{
	if (likely(conn_get(*fd) == conn))
		return true;
	int left = atomic_load(&conn->deferred_fd);
	if (left >= 0)
		*fd = left;
	return left >= 0;
}

/*
 * True if the number names another file by now, or none: a close that no hook sees leaves it to the next file that is opened.
 * Then nothing of it may be taken for the connection's. Any thread, any lock.
 */
bool conn_fd_stale(struct conn *conn, int fd)
{
	uint64_t cookie = 0, known = word_load(conn->slot->cookie);
	KEEP_ERRNO;

	if (likely(option_get(fd, SOL_SOCKET, SO_COOKIE, &cookie, sizeof(cookie)))) {
		if (likely(!known || cookie == known))
			return false;
	} else if (errno != EBADF && errno != ENOTSOCK) {
		return false;
	}
	if (conn_get(fd) != conn)
		return false; /* a close that we have seen takes the entry first */
	word_store(conn->stale_fd, fd + 1);
	return true;
}

/* A number of this process by which the socket can be reached. */
int conn_fd(const struct conn *conn)
{
	int fd = (int)word_load(conn->slot->fd);

	if (fd >= 0 && conn_get(fd) == conn)
		return fd;
	for (uint32_t i = 0; i < atomic_load(&fd_end); i++)
		if (conn_get((int)i) == conn) {
			word_store(conn->slot->fd, i); /* number for the next time; it is checked at each */
			return (int)i;
		}
	return -1;
}

/* shim_lock held: the child is about to share every connection. */
void conns_before_fork(void)
{
	arena_shared = true;
	for (uint32_t fd = 0; fd < atomic_load(&fd_end); fd++) {
		struct conn *conn = conn_get((int)fd);
		/* one event for each connection, however many numbers it has */
		if (conn && (int)fd == conn_fd(conn)) {
			atomic_fetch_add(&conn->slot->holders, 1);
			refusing_ends(conn); /* a child may change it unseen, and end */
		}
		if (conn && conn->managed)
			word_store(announce_due, true); /* the child may execute a program, which has it rung always */
	}
}

void conns_after_fork(void)
{
	arena_forked();
	for (uint32_t fd = 0; fd < atomic_load(&fd_end); fd++) {
		struct conn *conn = conn_get((int)fd);
		if (conn)
			conn->fds = 0; /* counted anew: a thread of the parent may be inside conn_forget() */
	}
	for (uint32_t fd = 0; fd < atomic_load(&fd_end); fd++) {
		struct conn *conn = conn_get((int)fd);
		if (!conn)
			continue;
		if ((int)fd == conn_fd(conn))
			holder_put(conn->slot, 0, shim_pid);
		conn->refs = ++conn->fds; /* waiting threads stayed in the parent */
		conn->waiters = 0;
		conn->pending_segment_fd = -1;
	}
}

/* The program's threads may wait for room in the ring while there is something else to look at. */
void conn_wake_own(struct conn *conn)
{
	if (conn->channel.seg)
		futex_ring(&conn->channel.rx_line->asleep);
	if (!raw_doorbell_ring(conn->doorbell->fd))
		shim_log("cannot wake a waiting thread: %d", errno);
}

void mark_promoted(struct conn *conn)
{
	struct conn_slot *slot = conn->slot;
	uint32_t state = word_load(slot->state);

	if (conn_switched(conn) && !slot_has(slot, SLOT_STAYS | SLOT_RESET) &&
	    (state == STATE_ATTACHED || state == STATE_PINNED)) {
		word_store(slot->promoted_ns, (uint64_t)now_ns());
		word_store(slot->reason, REASON_NONE);
		word_store(slot->state, STATE_PROMOTED);
	}
}

int take_error(struct conn *conn)
{
	uint32_t error = atomic_exchange(&conn->slot->error, 0);
	int taken = 0;

	if (likely(!(error & ERROR_IN_KERNEL)))
		return (int)error;
	return option_get(conn_fd(conn), SOL_SOCKET, SO_ERROR, &taken, sizeof(taken)) ? taken
	                                                                              : (int)(error & ~ERROR_IN_KERNEL);
}

/* The kernel reports a reset once. If we see it in passing, it is kept for the next call to report; ENOTCONN comes behind it. */
void keep_error(struct conn *conn, ssize_t result)
{
	if (result < 0 && errno != EAGAIN && errno != EINTR && errno != EPIPE && errno != ENOTCONN)
		word_store(conn->slot->error, (uint32_t)errno);
}

/*
 * A call has returned this error. If it is the end of the connection, later calls meet that, and no reset of ours; see
 * fin_received().
 */
void error_delivered(struct conn *conn, int error)
{
	uint32_t kept = word_load(conn->slot->error);

	if (unlikely(kept & ERROR_IN_KERNEL) && error && error != EAGAIN && error != EINTR)
		atomic_compare_exchange_strong(&conn->slot->error, &kept, 0); /* the kernel has just reported it */
	if (error == ECONNRESET || error == ETIMEDOUT)
		slot_set(conn->slot, SLOT_RESET | SLOT_FIN | SLOT_PEER_GONE);
}

/* Resets the connection, so that the peer does not take what it got for the whole stream. Any thread, any lock. */
void conn_abort(struct conn *conn, int fd, int error, enum reason_code reason)
{
	struct conn_slot *slot = conn->slot;

	if (slot_has(slot, SLOT_RESET))
		return;
	/*
	 * tcp_disconnect sends the reset, before the shim reports anything. A thread that learned of the end might shut down or
	 * close, and behind a FIN of ours (LAST_ACK) the kernel sends no reset. The stream would then look whole to the peer.
	 * Some kernels refuse it (EBUSY) while another thread sits in a call of theirs.
	 */
	if (conn_stays(conn, &fd) && !conn_fd_stale(conn, fd) && tcp_reset(fd) < 0)
		real.shutdown(fd, SHUT_RDWR);
	word_store(slot->error, (uint32_t)error);
	slot_set(slot, SLOT_RESET | SLOT_FIN | SLOT_PEER_GONE);
	word_store(slot->reason, reason);
	word_store(slot->state, STATE_PINNED);
	shim_log("fd %d: reset, %s", fd,
	         reason == REASON_RELAY_LOST ? "the provider between has lost bytes"
	                                     : "the peer broke the channel's rules");
}

void conn_violation(struct conn *conn, int fd)
{
	conn_abort(conn, fd, ECONNRESET, REASON_PEER_VIOLATION);
}
