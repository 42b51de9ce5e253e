/*
 * shim_ring.c - io_uring by liburing.
 *
 * A ring for files is no reason for TCP. Each entry is looked at before the kernel takes it, and a socket that it names goes
 * back to TCP first, for good. A socket that a ring makes or accepts is not tracked. Some entries do not come by here: a
 * thread of the kernel takes them by itself, or other code has made or submits the ring. A ring with features that this file
 * does not know counts as such: see uring_unseen().
 */
#include "shim_call.h"
#include "shim_number.h"
#include "shim_tcp_only.h"
#include "shim_travel.h"

#define SPLICE_FD_IN_FIXED (1u << 31)
#define ENTER_BY_INDEX (1u << 4) /* IORING_ENTER_REGISTERED_RING */
#define REGISTER_BY_INDEX (1u << 31) /* IORING_REGISTER_USE_REGISTERED_RING */

/* Numbers of linux/io_uring.h, of which the machine that builds this may have an early one. */
enum {
	/*
	 * Set-ups that are not among these: SQPOLL, REGISTERED_FD_ONLY (no descriptor), SQE_MIXED (entries of two sizes), and
	 * newer ones.
	 */
	SETUP_KNOWN = 0x77ff9,
	SETUP_SQE128 = 1 << 10,
	FEATURE_EXT_ARG = 1 << 8, /* liburing's waits submit, too, without this feature */
	ENTRY_FIXED_FILE = 1, /* the number is an index among registered files */
	REGISTER_FILES = 2,
	REGISTER_FILES_UPDATE = 6,
	REGISTER_FILES2 = 13,
	REGISTER_FILES_UPDATE2 = 14,
};
enum operation {
	OP_POLL_REMOVE = 7,
	OP_SENDMSG = 9,
	OP_RECVMSG = 10,
	OP_TIMEOUT = 11,
	OP_TIMEOUT_REMOVE = 12,
	OP_ASYNC_CANCEL = 14,
	OP_LINK_TIMEOUT = 15,
	OP_OPENAT = 18,
	OP_CLOSE = 19,
	OP_FILES_UPDATE = 20,
	OP_STATX = 21,
	OP_MADVISE = 25,
	OP_OPENAT2 = 28,
	OP_EPOLL_CTL = 29,
	OP_SPLICE = 30,
	OP_PROVIDE_BUFFERS = 31,
	OP_REMOVE_BUFFERS = 32,
	OP_TEE = 33,
	OP_RENAMEAT = 35,
	OP_UNLINKAT = 36,
	OP_MKDIRAT = 37,
	OP_SYMLINKAT = 38,
	OP_LINKAT = 39,
	OP_MSG_RING = 40,
	OP_SETXATTR = 42,
	OP_GETXATTR = 44,
	OP_SOCKET = 45,
	OP_SENDMSG_ZC = 48,
	OP_WAITID = 50,
	OP_FUTEX_WAIT = 51,
	OP_FUTEX_WAKE = 52,
	OP_FUTEX_WAITV = 53,
	OP_FIXED_FD_INSTALL = 54,
	OP_EPOLL_WAIT = 59,
	OP_PIPE = 62,
};

struct entry { /* struct io_uring_sqe */
	uint8_t operation, flags;
	uint16_t priority;
	int32_t fd;
	uint64_t offset, address;
	uint32_t len, operation_flags;
	uint64_t user_data;
	uint16_t buffer, personality;
	int32_t other; /* a descriptor, or an index among registered files and one more */
	uint64_t pad[2];
};
static_assert(sizeof(struct entry) == 64 && offsetof(struct entry, other) == 44, "as the kernel has it");

struct uring { /* struct io_uring, the same in each liburing.so.2 */
	const _Atomic uint32_t *head; /* number of entries that the kernel has taken */
	const uint32_t *tail, *mask, *len, *queue_flags, *dropped, *array;
	const uint8_t *entries;
	uint32_t submitted, filled; /* a call submits all up to `filled` that the kernel has not taken */
	uint8_t others[120];
	uint32_t flags;
	int fd;
	uint32_t features;
};
static_assert(offsetof(struct uring, filled) == 68 && offsetof(struct uring, flags) == 192, "as liburing.so.2 has it");

static struct file ring_file = {.kind = FILE_RING};
static _Atomic bool known_any;

/* ---- what an entry names ---- */

/* The kernel is going to move bytes of it, or to wait for it, without a call that comes by here. */
static void named(int fd)
{
	struct file *file = file_get(fd);

	if (likely(!file))
		return;
	if (file->kind == FILE_SET) { /* members of a set may be on a ring of ours, now or later */
		tcp_only_begin(REASON_IO_URING);
		return;
	}
	HELD conn = conn_hold(fd);
	if (conn && !(slot_has(conn->slot, SLOT_PIN) && word_load(conn->slot->reason) == REASON_IO_URING))
		conn_demote(conn, fd, REASON_IO_URING, true);
}

static void all_named(const int32_t *fds, uint32_t len)
{
	for (uint32_t i = 0; fds && i < len; i++)
		named(fds[i]);
}

/* Registered files have been looked at when they were registered. */
static void entry_look(const struct entry *entry)
{
	const struct msghdr *message = (const struct msghdr *)entry->address;
	const bool by_number = !(entry->flags & ENTRY_FIXED_FILE);

	switch (entry->operation) {
	case OP_ASYNC_CANCEL:
	case OP_FIXED_FD_INSTALL:
	case OP_FUTEX_WAIT:
	case OP_FUTEX_WAITV:
	case OP_FUTEX_WAKE:
	case OP_GETXATTR:
	case OP_LINKAT: /* the number is a directory's, or something else */
	case OP_LINK_TIMEOUT:
	case OP_MADVISE:
	case OP_MKDIRAT:
	case OP_MSG_RING: /* a message to another ring, to which it passes registered files alone */
	case OP_OPENAT:
	case OP_OPENAT2:
	case OP_PIPE:
	case OP_POLL_REMOVE:
	case OP_PROVIDE_BUFFERS:
	case OP_REMOVE_BUFFERS:
	case OP_RENAMEAT:
	case OP_SETXATTR:
	case OP_SOCKET:
	case OP_STATX:
	case OP_SYMLINKAT:
	case OP_TIMEOUT:
	case OP_TIMEOUT_REMOVE:
	case OP_UNLINKAT:
	case OP_WAITID: return;
	case OP_FILES_UPDATE: all_named((const int32_t *)entry->address, entry->len); return;
	case OP_EPOLL_CTL: /* a set has members of which it does not know */
	case OP_EPOLL_WAIT: tcp_only_begin(REASON_IO_URING); return;
	case OP_SENDMSG:
	case OP_SENDMSG_ZC:
		if (message && message->msg_control)
			rights_strand(message);
		break;
	case OP_RECVMSG: /* a connection may come with it, which a call of ours alone would take */
		if (message && message->msg_controllen)
			tcp_only_begin(REASON_IO_URING);
		break;
	case OP_SPLICE:
	case OP_TEE:
		if (!(entry->operation_flags & SPLICE_FD_IN_FIXED))
			named(entry->other);
		break;
	case OP_CLOSE:
		if (!entry->other) { /* else a registered file */
			named(entry->fd);
			fd_forget(entry->fd, false);
		}
		return;
	default:
		if (entry->operation > OP_PIPE)
			uring_unseen();
	}
	if (by_number)
		named(entry->fd);
}

/* ---- a ring ---- */
bool ring_looked_through(int fd, unsigned enter_flags)
{
	struct file *file = word_load(known_any) ? file_get(fd) : NULL;

	return (file && file->kind == FILE_RING) || (word_load(known_any) && (enter_flags & ENTER_BY_INDEX));
}

static bool ring_known(const struct uring *ring)
{
	return ring_looked_through(ring->fd, 0); /* another field in an earlier library */
}

/*
 * Called before a call that may submit. liburing puts entries into the queue in their order, so the kernel's array need not
 * be asked.
 */
static void ring_look(struct uring *ring)
{
	KEEP_ERRNO;

	if (unlikely(!fd_table_len) || word_load(tcp_only_reason) == REASON_IO_URING)
		return;
	if (!ring_known(ring)) {
		uring_unseen();
		return;
	}
	const uint32_t mask = *ring->mask, filled = ring->filled;
	const size_t len = sizeof(struct entry) << !!(ring->flags & SETUP_SQE128);
	uint32_t at = atomic_load_explicit(ring->head, memory_order_acquire);
	if (filled - at > mask + 1)
		uring_unseen();
	else
		for (; at != filled; at++)
			entry_look((const struct entry *)(ring->entries + len * (at & mask)));
}

static void files_look(const int32_t *fds, uint32_t len)
{
	KEEP_ERRNO;

	if (fd_table_len && word_load(tcp_only_reason) != REASON_IO_URING)
		all_named(fds, len);
}

static int ring_made(int result, const struct uring *ring)
{
	if (result < 0 || !fd_table_len)
		return result;
	if (library_find("io_uring_submit", "LIBURING_2.0") && !(ring->flags & ~(uint32_t)SETUP_KNOWN) &&
	    ring->features & FEATURE_EXT_ARG) {
		word_store(known_any, true);
		file_put(ring->fd, &ring_file);
	} else {
		uring_unseen();
	}
	return result;
}

static void ring_gone(const struct uring *ring)
{
	if (ring_known(ring))
		file_put(ring->fd, NULL);
}

void ring_register_unseen(unsigned operation)
{
	switch (operation & ~REGISTER_BY_INDEX) {
	case REGISTER_FILES:
	case REGISTER_FILES2:
	case REGISTER_FILES_UPDATE:
	case REGISTER_FILES_UPDATE2: uring_unseen();
	}
}

/* ---- the calls. `before` is done first; `result` makes the call's of the library's. ---- */
#define HOOK(name, params, args, before, result) \
	EXPORT int name params \
	{ \
		static int(*_Atomic found) params; \
		if (unlikely(!found) && !(found = (int(*) params)library_find(#name, NULL))) \
			return -ENOSYS; \
		before; \
		return result(found args); \
	}

#define MADE(result) ring_made(result, ring)
#define MAKES(name, params, args) HOOK(name, params, args, (void)0, MADE)
MAKES(io_uring_queue_init, (unsigned n, struct uring *ring, unsigned flags), (n, ring, flags))
MAKES(io_uring_queue_init_params, (unsigned n, struct uring *ring, void *setup), (n, ring, setup))
MAKES(io_uring_queue_init_mem, (unsigned n, struct uring *ring, void *setup, void *memory, size_t len),
      (n, ring, setup, memory, len))

#define SUBMITS(name, params, args) HOOK(name, params, args, ring_look(ring), )
SUBMITS(io_uring_submit, (struct uring * ring), (ring))
SUBMITS(io_uring_submit_and_get_events, (struct uring * ring), (ring))
SUBMITS(io_uring_submit_and_wait, (struct uring * ring, unsigned n), (ring, n))
SUBMITS(io_uring_submit_and_wait_min_timeout,
        (struct uring * ring, void *done, unsigned n, void *time, unsigned min, void *signals),
        (ring, done, n, time, min, signals))
SUBMITS(io_uring_submit_and_wait_reg, (struct uring * ring, void *done, unsigned n, int index), (ring, done, n, index))
SUBMITS(io_uring_submit_and_wait_timeout, (struct uring * ring, void *done, unsigned n, void *time, void *signals),
        (ring, done, n, time, signals))

#define REGISTERS(name, params, args) HOOK(name, params, args, files_look(files, len), )
REGISTERS(io_uring_register_files, (void *ring, const int32_t *files, unsigned len), (ring, files, len))
REGISTERS(io_uring_register_files_tags, (void *ring, const int32_t *files, const void *tags, unsigned len),
          (ring, files, tags, len))
REGISTERS(io_uring_register_files_update, (void *ring, unsigned at, const int32_t *files, unsigned len),
          (ring, at, files, len))
REGISTERS(io_uring_register_files_update_tag,
          (void *ring, unsigned at, const int32_t *files, const void *tags, unsigned len), (ring, at, files, tags, len))

/* The call by which a program manages a ring itself. */
HOOK(io_uring_enter, (unsigned fd, unsigned submit, unsigned min, unsigned flags, void *signals),
     (fd, submit, min, flags, signals), submit ? uring_unseen() : (void)0, )
HOOK(io_uring_enter2, (unsigned fd, unsigned submit, unsigned min, unsigned flags, void *argument, size_t len),
     (fd, submit, min, flags, argument, len), submit ? uring_unseen() : (void)0, )
HOOK(io_uring_register, (unsigned fd, unsigned operation, const void *argument, unsigned len),
     (fd, operation, argument, len), ring_register_unseen(operation), )

static int ring_made_unseen(int result)
{
	if (result >= 0)
		uring_unseen();
	return result;
}

HOOK(io_uring_setup, (unsigned n, void *setup), (n, setup), (void)0, ring_made_unseen)

/* The number becomes another file's. */
HOOK(io_uring_close_ring_fd, (struct uring * ring), (ring), ring_gone(ring), )

EXPORT void io_uring_queue_exit(struct uring *ring)
{
	void (*found)(struct uring *) = (void (*)(struct uring *))library_find("io_uring_queue_exit", NULL);

	ring_gone(ring);
	if (found)
		found(ring);
}
