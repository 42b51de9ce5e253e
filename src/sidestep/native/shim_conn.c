/*
 * shim_conn.c - connections: slots, switch-over, and the bytes.
 *
 * Switch-over of one direction, by consent:
 *   receiver: RX_OPENING, fence, no thread in an unwatched kernel read or wait (rx_sitters), kernel's byte count equal
 *             to ours -> publishes rx_ready. From then on its reads look at TCP and at the segment, both.
 *   sender:   sees rx_ready; TX_SWITCHING, fence, no thread in a kernel write (tx_sitters), counts equal -> publishes the
 *             offset, then tx_switched; bytes from that offset go to the ring.
 *   receiver: TCP holds only bytes before the offset. It reads TCP until its count equals the offset, then the ring.
 * A thread that enters the kernel counts itself first and looks at the flag second; the declarer sets the flag first and
 * looks at the count second: with a full fence between, one of them sees the other.
 *
 * The way back ends a *round* of the direction. The receiver consents to the next round, in the same segment, when it has
 * read the last one to its end (rx_open); nothing is unmapped, so no thread can be caught inside.
 *
 * A provider between (SLOT_RELAYED): the segment's other side is a provider, which hands bytes and words on to the peer's
 * segment (provider/relay.py), later than TCP does its own. What depends on the order of the two is settled thus:
 *   - TCP's end is the end only once the provider has published tx_fin; it is asked by fin_seen, and answers always.
 *     How the peer ended (shut_wr, CHANNEL_CLOSED) is not judged before that either. A reset waits the same way.
 *   - Going back to TCP has to wait until the provider has handed our offset on (handed_on): else the peer, who does not
 *     know of the ring yet, would read what TCP brings before what the ring holds. Until then we stay on the ring, and one
 *     of our next calls goes back. Only a call that nothing of ours follows, or that the kernel has to answer, waits itself.
 *   - Who asks the peer back to TCP waits the same way: else the peer's next bytes would still go to the ring, and come
 *     again only with its next call.
 *   - Bytes on TCP are no violation: the peer may have gone back, and the word of it is on its way behind the ring's bytes.
 *   - A provider that dies, or says CHANNEL_RESET, has lost bytes: the connection is reset, unless neither direction can
 *     have any there. One that lets go of the connection says CHANNEL_OVER, as a consent or a question may cross that.
 *   - There is one round: a direction that has gone back stays on TCP.
 */
#include "shim.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <linux/sockios.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>

#define PROBE_EVERY 64        /* ring writes between two looks at the native socket for the peer's end */
#define LISTEN_EVERY 64       /* ring reads between two looks whether the provider has something to say */
#define PUBLISH_CHUNK 32768u  /* bytes of a long write the peer may start on while we copy the next */
#define POOL_CHUNK 64
#define FLUSH_TURNS 20         /* how often, and how long each time, the end waits for recalled bytes to go out */
#define FLUSH_TURN_MS 100
#define LINGER_TURN_MS 5       /* how often a close() that lingers looks whether all has gone out */
#define HANDED_TURNS 10000     /* milliseconds that a call that must go by TCP waits until a provider has told our offset */
#define ASKED_TURNS 1000       /* and that the peer was asked back to TCP, which it will be in any case */
#define READ_TURNS 200         /* and that a peer has read its ring, which nobody can be asked for any more */
#define REAP_EVERY_NS 1000000000 /* how often slots of processes that were killed are looked for */
#define RETRY_AFTER_NS 1000000000ll /* who left the ring because neither end read goes there again after this, */
#define RETRY_DOUBLINGS 6           /* doubled each time, so often at most */
#define RETRY_NEVER UINT64_MAX

uint8_t arena_id[16];
static struct arena_header *arena;
static int arena_fd = -1;
static struct conn *free_conns;
static _Atomic uint64_t conn_serials;
_Atomic bool trim_due;
static bool foreign_pids; /* this process counts them otherwise than who made the arena */
bool arena_shared;        /* with a parent or children, who may have changed their user since and fallen into other hands */

/* ---- arena ---- */
static struct conn_slot *slot_at(uint32_t index)
{
	return (struct conn_slot *)((uint8_t *)arena + ARENA_SLOTS_OFFSET) + index;
}

static uint32_t slot_index(const struct conn_slot *slot)
{
	return (uint32_t)(slot - slot_at(0));
}

/* Numbers of processes mean the same only within one pid_namespaces(7). */
static uint64_t pid_namespace(void)
{
	struct stat st;

	return stat("/proc/self/ns/pid", &st) == 0 ? (uint64_t)st.st_ino : 0;
}

int arena_open(void)
{
	size_t len = ARENA_SLOTS_OFFSET + (size_t)ARENA_SLOTS_MAX * sizeof(struct conn_slot);
	int fd = channel_memory("sidestep-arena", len);

	if (fd < 0)
		return fd;
	if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0 ||
	    getrandom(arena_id, sizeof(arena_id), GRND_NONBLOCK) != sizeof(arena_id)) {
		raw_close(fd);
		return -EIO;
	}
	arena = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (arena == MAP_FAILED) {
		raw_close(fd);
		return -ENOMEM;
	}
	arena->magic = ARENA_MAGIC;
	arena->version = LAYOUT_VERSION;
	arena->slot_size = sizeof(struct conn_slot);
	arena->slots_max = ARENA_SLOTS_MAX;
	arena->pid_namespace = pid_namespace();
	foreign_pids = !arena->pid_namespace;
	memcpy(arena->arena_id, arena_id, sizeof(arena_id));
	arena_fd = own_fd(fd);
	return 0;
}

static int arena_reopen(int flags)
{
	char path[32];

	snprintf(path, sizeof(path), "/proc/self/fd/%d", arena_fd);
	return open(path, flags | O_CLOEXEC);
}

int arena_reader_fd(void)
{
	return arena_reopen(O_RDONLY);
}

int arena_path_fd(void)
{
	return arena_reopen(O_PATH);
}

static void slot_free(struct conn_slot *slot);

/* ---- who holds a slot: a process that is killed cannot let go ---- */
void holder_put(struct conn_slot *slot, uint32_t before, uint32_t after)
{
	for (size_t i = 0; i < sizeof(slot->holder_pids) / sizeof(*slot->holder_pids) && !foreign_pids; i++) {
		uint32_t expected = before;
		if (atomic_compare_exchange_strong(&slot->holder_pids[i], &expected, after))
			return;
	}
}

static void slot_release(struct conn_slot *slot)
{
	holder_put(slot, shim_pid, 0);
	if (atomic_fetch_sub(&slot->holders, 1) == 1)
		slot_free(slot);
}

struct known_pids {
	uint32_t pid[16];
	bool dead[16];
	uint32_t next;
};

static bool pid_dead(struct known_pids *known, uint32_t pid)
{
	for (uint32_t i = 0; i < 16; i++)
		if (known->pid[i] == pid)
			return known->dead[i];
	uint32_t at = known->next++ % 16;
	known->pid[at] = pid;
	known->dead[at] = pid != shim_pid && task_dead(pid, true);
	return known->dead[at];
}

static void slot_reap(struct conn_slot *slot, struct known_pids *known)
{
	for (size_t i = 0; i < sizeof(slot->holder_pids) / sizeof(*slot->holder_pids); i++) {
		uint32_t pid = word_load(slot->holder_pids[i]);
		if (!pid || !pid_dead(known, pid) ||
		    !atomic_compare_exchange_strong(&slot->holder_pids[i], &pid, 0))
			continue;
		if (atomic_fetch_sub(&slot->holders, 1) == 1) {
			slot_free(slot);
			return;
		}
	}
}

/* Frees what processes of the family held when they were killed. */
static void slots_reap(void)
{
	static _Atomic int64_t reaped_at;
	struct known_pids known = {0};
	int64_t now = now_ns(), last = atomic_load_explicit(&reaped_at, memory_order_relaxed);

	if (now - last < REAP_EVERY_NS || !atomic_compare_exchange_strong(&reaped_at, &last, now) || foreign_pids)
		return;
	uint32_t used = word_load(arena->slots_used);
	for (uint32_t i = 0; i < used && i < ARENA_SLOTS_MAX; i++)
		if (word_load(slot_at(i)->generation) & 1)
			slot_reap(slot_at(i), &known);
}

/* Whether this process alone holds the connection. */
bool conn_alone(struct conn *conn)
{
	struct known_pids known = {0};

	if (likely(word_load(conn->slot->holders) == 1))
		return true;
	if (!foreign_pids)
		slot_reap(conn->slot, &known);
	return word_load(conn->slot->holders) == 1;
}

static struct conn_slot *slot_alloc(void)
{
	slots_reap();
	_Atomic uint64_t *head = &arena->free_head;
	uint64_t top = atomic_load(head);

	/* a child that has changed its user since may write all of the arena: an index is bounded where it is used */
	while ((uint32_t)top && (uint32_t)top <= ARENA_SLOTS_MAX) {
		struct conn_slot *slot = slot_at((uint32_t)top - 1);
		uint64_t next = ((top >> 32) + 1) << 32 | word_load(slot->free_next);
		if (atomic_compare_exchange_weak(head, &top, next))
			return slot;
	}
	uint32_t index = word_add(arena->slots_used, 1);
	if (index >= ARENA_SLOTS_MAX) {
		word_store(arena->slots_used, ARENA_SLOTS_MAX);
		return NULL;
	}
	return slot_at(index);
}

static void slot_free(struct conn_slot *slot)
{
	_Atomic uint64_t *head = &arena->free_head;
	uint64_t top = atomic_load(head);
	uint64_t mine;

	word_store(slot->state, STATE_FREE);
	word_add(slot->generation, 1); /* even: unused */
	do {
		word_store(slot->free_next, (uint32_t)top);
		mine = ((top >> 32) + 1) << 32 | (slot_index(slot) + 1);
	} while (!atomic_compare_exchange_weak(head, &top, mine));
}

/* ---- conn lifecycle; the structs are type-stable: a stale pointer always points at some conn ---- */
struct conn *conn_new(int fd, int family, enum role_code role)
{
	struct conn_slot *slot = slot_alloc();

	if (!slot)
		return NULL;
	shim_lock_take();
	if (!free_conns) {
		struct conn *chunk = mmap(NULL, POOL_CHUNK * sizeof(*chunk), PROT_READ | PROT_WRITE,
		                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (chunk == MAP_FAILED) {
			shim_lock_drop();
			slot_free(slot);
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

	uint32_t generation = slot->generation + 1; /* odd: in use */
	size_t kept = offsetof(struct conn_slot, free_next), behind = kept + sizeof(slot->free_next);
	memset(slot, 0, kept); /* not the link: whoever loses the race for the slot may look at it late */
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

	memset((uint8_t *)conn + offsetof(struct conn, managed), 0, sizeof(*conn) - offsetof(struct conn, managed));
	conn->slot = slot;
	conn->generation = generation;
	word_store(conn->serial, atomic_fetch_add(&conn_serials, 1) + 1);
	conn->fds = 1;
	conn->pending_segment_fd = -1;
	conn->linger_fd = -1;
	conn->spin_ns = config.spin_ns;
	atomic_store(&conn->refs, 1); /* last: from here on it can be held */
	file_put(fd, &conn->file);
	return conn;
}

void conn_ref(struct conn *conn)
{
	atomic_fetch_add(&conn->refs, 1);
}

static void tell_close(struct conn *conn, int fd);
static bool relay_ended(struct conn *conn);
static bool rx_reset_waits(struct conn *conn, int fd);
static bool relay_reset_waits(struct conn *conn);
static void relay_lost(struct conn *conn, int fd);
static void conn_abort(struct conn *conn, int fd, int error, enum reason_code reason);
static bool relay_gone(const struct conn *conn);
static bool relay_handed(struct conn *conn, uint32_t what, int turns);
static bool kernel_fin(int fd);

static void conn_destroy(struct conn *conn)
{
	struct conn_slot *slot = conn->slot;

	if (conn->linger_fd >= 0)
		tell_close(conn, conn->linger_fd);
	if (unlikely(conn->explicit))
		explicit_unref(conn->explicit);
	conn->explicit = NULL;
	if (atomic_load(&conn->managed)) {
		/* Both locks: nobody of this process is inside the rings. Waiters hold references, so there are none. */
		slot_lock(&slot->rx_lock);
		slot_lock(&slot->tx_lock);
		atomic_store(&conn->managed, 0);
		channel_unmap(&conn->channel);
		slot_unlock(&slot->tx_lock);
		slot_unlock(&slot->rx_lock);
	}
	shim_lock_take();
	if (conn->remote_bell)
		remote_bell_unref(conn->remote_bell);
	if (conn->bell)
		bell_unref(conn->bell);
	conn->remote_bell = NULL;
	conn->bell = NULL;
	own_fd_close(conn->pending_segment_fd);
	own_fd_close(conn->linger_fd);
	conn->pending_segment_fd = -1;
	conn->linger_fd = -1;
	slot_release(slot);
	conn->next_free = free_conns;
	free_conns = conn;
	shim_lock_drop();
}

void conn_unref(struct conn *conn)
{
	if (unlikely(refs_drop(&conn->refs))) {
		int saved = errno;
		conn_destroy(conn);
		errno = saved;
	}
}

bool conn_tryref(struct conn *conn, int fd)
{
	if (unlikely(!refs_take(&conn->refs)))
		return false; /* on its way to the free list, or there */
	if (likely(conn_get(fd) == conn))
		return true;
	conn_unref(conn);
	return false;
}

void conn_pin(struct conn *conn, enum reason_code reason)
{
	struct conn_slot *slot = conn->slot;

	if (reason == REASON_PASSED)
		slot_set(slot, SLOT_PASSED);
	if (slot_has(slot, SLOT_PIN) || (reason == REASON_DEMOTED && slot_has(slot, SLOT_DEMOTED)))
		return;
	slot_set(slot, reason == REASON_DEMOTED ? SLOT_DEMOTED : SLOT_PIN);
	word_store(slot->reason, reason);
	if (word_load(slot->state) == STATE_OFFERED) {
		/* The other end may hold the channel already, and can have no second one: it is taken, and rests. */
		if (reason == REASON_DEMOTED)
			return;
		rpc_withdraw(conn);
	}
	if (!atomic_load(&conn->managed))
		word_store(slot->state, STATE_PINNED);
}

static bool tx_resend(struct conn *conn, int fd);
static void tx_back(struct conn *conn, int fd);
static void flush(struct conn *conn, int fd);

/* The last holder closes. The peer is told, as the FIN may stand behind bytes that it does not read. */
static void tell_close(struct conn *conn, int fd)
{
	const struct linger reset = {.l_onoff = 1};

	if (!atomic_load(&conn->managed) || !conn_alone(conn))
		return;
	/* Data left unread makes TCP reset (RFC 1122 4.2.2.13). The kernel sees that of its own; ring bytes count even while
	 * receiving is still on TCP. */
	if (!rx_over(conn->slot) && channel_rx_peek(&conn->channel) != 0)
		real.setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
	conn_end_sending(conn, fd);
	atomic_fetch_or(&conn->channel.local->notice, CHANNEL_CLOSED);
	full_fence();
	conn_ring(conn); /* after a shutdown the FIN is long gone: only this wakes a sender that waits for room */
}

/* close() as the kernel makes it lingers for the program that asked for it. */
static void linger_out(int fd, int seconds)
{
	int64_t deadline = deadline_after(seconds * 1000000000ll);
	struct tcp_info info;
	socklen_t len = sizeof(info);

	while (now_ns() < deadline && real.getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &len) == 0 &&
	       (info.tcpi_state == TCP_FIN_WAIT1 || info.tcpi_state == TCP_CLOSING || info.tcpi_state == TCP_LAST_ACK))
		raw_poll(NULL, 0, LINGER_TURN_MS);
}

/*
 * The last holder closes, and the provider has not yet read the message that brings it a duplicate of the socket: for as
 * long the kernel would not take the close for one. What tcp_close() does is done here.
 */
static void end_lent(struct conn *conn, int fd, bool exiting)
{
	struct sockaddr none = {.sa_family = AF_UNSPEC};
	struct linger how = {0};
	socklen_t len = sizeof(how);
	int unread = 0;

	/* a call asleep on the socket lives on, and so does the stream; see linger(). Who was given it may have it still. */
	if (atomic_load(&conn->managed) || slot_has(conn->slot, SLOT_PASSED) || word_load(conn->slot->rx_sitters) || word_load(conn->slot->tx_sitters) ||
	    !rpc_lent(conn) || !conn_alone(conn))
		return;
	real.getsockopt(fd, SOL_SOCKET, SO_LINGER, &how, &len);
	if ((real.ioctl(fd, SIOCINQ, &unread) == 0 && unread) || (how.l_onoff && !how.l_linger)) {
		real.connect(fd, &none, sizeof(none)); /* RFC 1122 4.2.2.13: a reset */
		return;
	}
	if (real.shutdown(fd, SHUT_RDWR) == 0 && how.l_onoff && !exiting)
		linger_out(fd, how.l_linger);
	shim_log("fd %d ended for the duplicate that the provider has not read", fd);
}

/*
 * The kernel lets a call that sleeps on a socket live on after close(): what comes still reaches it, and the end is told
 * when it returns. True: there is such a call, and conn_destroy() tells it.
 */
static bool linger(struct conn *conn, int fd)
{
	full_fence(); /* between taking the number away and looking for waiters, who do it the other way round */
	if (!atomic_load(&conn->managed) || !atomic_load(&conn->waiters))
		return false;
	int copy = own_fd(real.fcntl64(fd, F_DUPFD_CLOEXEC, 0));
	if (copy < 0)
		return false;
	atomic_store(&conn->linger_fd, copy);
	return true;
}

/* Whether a call may go on with the connection; *fd becomes the number under which it has survived. */
bool conn_stays(struct conn *conn, int *fd)
{
	int left;

	if (likely(conn_get(*fd) == conn))
		return true;
	left = atomic_load(&conn->linger_fd);
	if (left >= 0)
		*fd = left;
	return left >= 0;
}

/*
 * The socket goes on with somebody who has no shim, while the ring holds bytes that the peer cannot take back any more, as
 * it has ended its direction. A stream with a hole must not look whole: it is reset.
 */
void conn_abandon(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;
	struct sockaddr none = {.sa_family = AF_UNSPEC};

	/* in this order: who is just going back (another process, about to exec) says so once it has recalled what it can */
	if (!conn->managed || word_load(slot->reason) != REASON_PASSED || !rx_watches(slot) ||
	    !(atomic_load(&conn->channel.local->notice) & CHANNEL_DEMOTE) ||
	    slot_has(slot, SLOT_RD_SHUT) || channel_rx_peek(&conn->channel) == 0)
		return;
	real.connect(fd, &none, sizeof(none));
	shim_log("fd %d: reset, nobody can read what its ring still holds", fd);
}

void conn_forget(int fd, bool closing)
{
	struct conn *conn = conn_get(fd);

	if (!conn)
		return;
	bool lasting = atomic_load(&conn->fds) > 1;
	if (closing && lasting && set_names(conn, fd))
		conn_demote(conn, fd, REASON_EPOLL_UNSUPPORTED, false); /* nobody can change that registration any more */
	file_put(fd, closing && atomic_load(&conn->managed) ? &closing_file : NULL);
	if (closing && !lasting && word_load(conn->slot->holders) <= 2) /* we, and who was given it */
		conn_abandon(conn, fd);
	if (closing && !lasting && !linger(conn, fd))
		tell_close(conn, fd);
	if (closing && !lasting && unlikely(atomic_load(&conn->lent)))
		end_lent(conn, fd, false);
	bool last = atomic_fetch_sub(&conn->fds, 1) == 1;
	if (has_members(conn))
		set_conn_closed(conn, fd, last);
	if (last) {
		if (word_load(conn->slot->state) == STATE_OFFERED)
			rpc_withdraw(conn);
	} else if (word_load(conn->slot->fd) == (uint32_t)fd) {
		word_store(conn->slot->fd, (uint32_t)-1);
	}
	conn_unref(conn);
}

void conn_dup(int from, int to)
{
	struct conn *conn = conn_hold(from); /* the new number's */

	if (!conn)
		return;
	atomic_fetch_add(&conn->fds, 1);
	file_put(to, &conn->file);
}

/* A number of this process by which the socket can be reached. */
int conn_fd(struct conn *conn)
{
	int fd = (int)word_load(conn->slot->fd);

	if (fd >= 0 && conn_get(fd) == conn)
		return fd;
	for (uint32_t i = 0; i < atomic_load(&fd_end); i++)
		if (conn_get((int)i) == conn) {
			word_store(conn->slot->fd, i); /* for the next time; it is checked at each */
			return (int)i;
		}
	return -1;
}

/* Called with shim_lock held: the child is about to share, or shares, every connection. */
void conn_forked(bool in_child)
{
	arena_shared = true;
	if (in_child)
		foreign_pids = !arena->pid_namespace || pid_namespace() != arena->pid_namespace;
	for (uint32_t fd = 0; fd < atomic_load(&fd_end); fd++) {
		struct conn *conn = conn_get((int)fd);
		if (!conn)
			continue;
		if (!in_child) {
			/* once for each connection, however many numbers it has */
			if ((int)fd == conn_fd(conn))
				atomic_fetch_add(&conn->slot->holders, 1);
		} else {
			if ((int)fd == conn_fd(conn))
				holder_put(conn->slot, 0, shim_pid);
			conn->refs = conn->fds; /* waiting threads stayed in the parent */
			conn->waiters = 0;
			conn->pending_segment_fd = -1;
		}
	}
}

void conn_family_exit(void)
{
	for (uint32_t fd = 0; fd < atomic_load(&fd_end); fd++) {
		struct conn *conn = conn_get((int)fd);
		if (conn && (int)fd == conn_fd(conn)) {
			tell_close(conn, (int)fd);
			if (unlikely(atomic_load(&conn->lent)))
				end_lent(conn, (int)fd, true);
			/* Threads of ours may still be at work with the slot: slots_reap() frees it once they are gone. */
			if (foreign_pids)
				atomic_fetch_sub(&conn->slot->holders, 1);
		}
	}
}

/* Its port. */
static uint16_t address_store(const struct sockaddr_storage *from, uint8_t addr[16])
{
	if (from->ss_family == AF_INET) {
		const struct sockaddr_in *in = (const struct sockaddr_in *)from;
		memset(addr, 0, 10);
		memset(addr + 10, 0xff, 2);
		memcpy(addr + 12, &in->sin_addr, 4);
		return ntohs(in->sin_port);
	}
	const struct sockaddr_in6 *in6 = (const struct sockaddr_in6 *)from;
	memcpy(addr, &in6->sin6_addr, 16);
	return ntohs(in6->sin6_port);
}

void conn_set_addresses(struct conn *conn, int fd)
{
	struct sockaddr_storage local, remote;
	socklen_t local_len = sizeof(local), remote_len = sizeof(remote);
	struct conn_slot *slot = conn->slot;

	if (real.getsockname(fd, (struct sockaddr *)&local, &local_len) < 0 ||
	    real.getpeername(fd, (struct sockaddr *)&remote, &remote_len) < 0)
		return;
	names_show(fd, &local, &remote);
	shim_lock_take();
	if (!slot->local_port) { /* else another thread was first, and somebody may be reading */
		slot->remote_port = address_store(&remote, slot->remote_addr);
		uint16_t port = address_store(&local, slot->local_addr);
		/* last: who sees it finds the others */
		atomic_store_explicit(&slot->local_port, port, memory_order_release);
	}
	shim_lock_drop();
}

/* ---- native calls of a connection that may still be promoted ---- */
bool native_rx_begin(struct conn *conn)
{
	if (atomic_load_explicit(&conn->managed, memory_order_acquire))
		return false;
	bool mine = conn_mine(conn);
	word_count32(&conn->slot->rx_sitters, 1, mine);
	if (unlikely(atomic_load(&conn->managed))) {
		word_count32(&conn->slot->rx_sitters, UINT32_MAX, mine);
		return false;
	}
	return true;
}

bool native_tx_begin(struct conn *conn)
{
	if (atomic_load_explicit(&conn->managed, memory_order_acquire))
		return false;
	bool mine = conn_mine(conn);
	word_count32(&conn->slot->tx_sitters, 1, mine);
	if (unlikely(atomic_load(&conn->managed))) {
		word_count32(&conn->slot->tx_sitters, UINT32_MAX, mine);
		return false;
	}
	return true;
}

static void consider(struct conn *conn, int fd)
{
	if (slot_has(conn->slot, SLOT_PIN)) {
		if (unlikely(!word_load(conn->slot->local_port))) { /* pinned before it was connected: `ss` wants to name it */
			int saved = errno;
			conn_set_addresses(conn, fd);
			errno = saved;
		}
		return;
	}
	if (unlikely(atomic_load_explicit(&rpc_pending, memory_order_relaxed)))
		rpc_poll();
	word_store(conn->calls, word_load(conn->calls) + 1);
	if (word_load(conn->slot->state) == STATE_NATIVE)
		rpc_consider(conn, fd);
	else if (unlikely(slot_has(conn->slot, SLOT_DEMOTED)))
		rpc_listen();
}

/* What a native call has moved; its thread is no sitter any more. */
static inline void native_count(struct conn *conn, _Atomic uint64_t *bytes, _Atomic uint64_t *messages,
                                _Atomic uint32_t *sitters, ssize_t moved)
{
	bool mine = conn_mine(conn);

	if (moved > 0) {
		word_count64(bytes, (uint64_t)moved, mine);
		word_store(*messages, word_load(*messages) + 1); /* two at once may count as one: it is there to be looked at */
	}
	word_count32(sitters, UINT32_MAX, mine);
}

ssize_t native_rx_end(struct conn *conn, int fd, ssize_t result, int flags)
{
	struct conn_slot *slot = conn->slot;

	native_count(conn, &slot->rx_tcp_bytes, &slot->rx_tcp_msgs, &slot->rx_sitters, flags & MSG_PEEK ? 0 : result);
	if (result > 0)
		consider(conn, fd);
	return result;
}

ssize_t native_tx_end(struct conn *conn, int fd, ssize_t result)
{
	struct conn_slot *slot = conn->slot;

	native_count(conn, &slot->tx_tcp_bytes, &slot->tx_tcp_msgs, &slot->tx_sitters, result);
	if (result > 0)
		consider(conn, fd);
	return result;
}

void native_wait_begin(struct conn *conn)
{
	atomic_fetch_add(&conn->slot->rx_sitters, 1);
}

void native_wait_end(struct conn *conn)
{
	atomic_fetch_sub(&conn->slot->rx_sitters, 1);
}

/* ---- switch-over ---- */
static bool peer_attached(const struct conn *conn)
{
	return atomic_load_explicit(&conn->channel.remote->attached, memory_order_acquire) == 1;
}

bool conn_switched(const struct conn *conn)
{
	return rx_by_ring(conn->slot) && tx_by_ring(conn->slot);
}

int conn_attach(struct conn *conn, int fd, int segment_fd, int side, struct remote_bell *remote, struct bell *local)
{
	struct conn_slot *slot = conn->slot;
	int failed = channel_map(&conn->channel, segment_fd, side, &slot->tx_tail,
	                         &slot->rx_head, &slot->tx_head_seen);

	if (failed)
		return failed;
	conn->remote_bell = remote;
	conn->bell = local;
	conn->probe_countdown = PROBE_EVERY;
	word_store(slot->state, STATE_ATTACHED);
	word_store(slot->reason, REASON_WAITING_FOR_PEER);
	atomic_store(&conn->managed, 1);
	if (slot_has(slot, SLOT_DEMOTED)) { /* while it was offered; conn_demote() sets it first and asks for `managed` then */
		word_store(slot->state, STATE_PINNED);
		word_store(slot->reason, REASON_DEMOTED);
		atomic_fetch_or(&conn->channel.local->notice, CHANNEL_DEMOTE);
	}
	set_conn_attached(conn); /* waits must be able to wake us before we tell the peer that we are there */
	if (slot_has(slot, SLOT_WR_SHUT)) /* else the FIN that the peer has, or will have, looks like a close; see shutdown() */
		atomic_store(&conn->channel.local->shut_wr, 1);
	atomic_store_explicit(&conn->channel.local->attached, 1, memory_order_release);
	full_fence();
	conn_ring(conn);
	shim_log("fd %d attached as side %d", fd, side);
	return 0;
}

/* linux/tcp.h: libc's struct tcp_info ends before the byte counts, so they are read by the kernel ABI's offsets. */
enum { TCPI_STATE = 0, TCPI_BYTES_ACKED = 120, TCPI_BYTES_RECEIVED = 128, TCPI_SIZE = 136 };

static bool tcp_info_get(int fd, uint8_t info[TCPI_SIZE])
{
	socklen_t len = TCPI_SIZE;

	return real.getsockopt(fd, IPPROTO_TCP, TCP_INFO, info, &len) == 0 && len == TCPI_SIZE;
}

static bool tcp_info_fin(const uint8_t info[TCPI_SIZE])
{
	uint8_t state = info[TCPI_STATE];

	return state != TCP_ESTABLISHED && state != TCP_FIN_WAIT1 && state != TCP_FIN_WAIT2;
}

static uint64_t tcp_info_u64(const uint8_t info[TCPI_SIZE], int offset)
{
	uint64_t value;

	memcpy(&value, info + offset, sizeof(value));
	return value;
}

/* Whether the kernel has counted the bytes that we have. Some arrive between two questions: then nothing is known yet. */
enum count { COUNT_EQUAL, COUNT_DIFFERS, COUNT_UNSTABLE };

static enum count rx_count(struct conn *conn, int fd)
{
	uint8_t info[TCPI_SIZE];
	int before = 0, after = 0;

	if (real.ioctl(fd, FIONREAD, &before) < 0 || !tcp_info_get(fd, info) || real.ioctl(fd, FIONREAD, &after) < 0)
		return COUNT_DIFFERS;
	if (before != after)
		return COUNT_UNSTABLE;
	uint64_t read = tcp_info_u64(info, TCPI_BYTES_RECEIVED) - (uint64_t)before - (tcp_info_fin(info) ? 1 : 0);
	return read == word_load(conn->slot->rx_tcp_bytes) ? COUNT_EQUAL : COUNT_DIFFERS;
}

static enum count tx_count(struct conn *conn, int fd)
{
	uint8_t info[TCPI_SIZE];
	int before = 0, after = 0;

	if (real.ioctl(fd, SIOCOUTQ, &before) < 0 || !tcp_info_get(fd, info) || real.ioctl(fd, SIOCOUTQ, &after) < 0)
		return COUNT_DIFFERS;
	if (before != after)
		return COUNT_UNSTABLE;
	uint64_t acked = tcp_info_u64(info, TCPI_BYTES_ACKED);
	if (conn->slot->role == ROLE_ACTIVE && acked > 0)
		acked--; /* the SYN */
	return acked + (uint64_t)before == word_load(conn->slot->tx_tcp_bytes) ? COUNT_EQUAL : COUNT_DIFFERS;
}

static void mark_promoted(struct conn *conn)
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

static void waits_for(struct conn_slot *slot, enum reason_code reason)
{
	if (word_load(slot->state) == STATE_ATTACHED)
		word_store(slot->reason, reason);
}

/* Whether we may be sent to by ring, as far as we and the peer are concerned. */
static bool rx_willing(const struct conn *conn)
{
	if (conn_relayed(conn) && word_load(conn->slot->rx_round))
		return false; /* what the provider hands on is of one round */
	return !slot_has(conn->slot, SLOT_STAYS | SLOT_RELAY_OVER | SLOT_FIN | SLOT_RD_SHUT | SLOT_RESET) &&
	       peer_attached(conn) && !(conn_notice(conn) & (CHANNEL_DEMOTE | CHANNEL_RECALL | CHANNEL_CLOSED)) &&
	       word_load(conn->slot->rx_round) < CHANNEL_ROUNDS;
}

/* rx_lock held. Whether no thread of ours sits in the kernel's calls, and all bytes from there are counted. */
static enum rx_event_code rx_settled(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;

	if (atomic_load(&slot->rx_sitters) != 0) {
		waits_for(slot, REASON_WAITER_IN_KERNEL);
		return RX_ON_UNSETTLED;
	}
	enum count count = rx_count(conn, fd);
	if (count == COUNT_DIFFERS) {
		word_store(slot->reason, REASON_COUNT_MISMATCH);
		word_store(slot->state, STATE_PINNED);
		shim_log("fd %d: read count differs from the kernel's", fd);
		return RX_ON_MISCOUNT;
	}
	return count == COUNT_EQUAL ? RX_ON_SETTLED : RX_ON_UNSETTLED;
}

/*
 * rx_lock held, receiving by TCP. Consents to the next round if no thread of ours would miss the ring, and the last one is
 * over and has been read to its end.
 */
static void rx_open(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;
	struct channel_side *local = conn->channel.local;
	uint32_t round = word_load(slot->rx_round);

	if (!rx_willing(conn) || atomic_load_explicit(&conn->channel.remote->tx_ended, memory_order_acquire) != round ||
	    channel_rx_avail(&conn->channel) != 0)
		return;
	rx_move(slot, RX_ON_WILLING); /* full fence; see tracked_recvmsg() */
	enum rx_event_code settled = rx_settled(conn, fd);
	rx_move(slot, settled);
	if (settled != RX_ON_SETTLED)
		return;
	waits_for(slot, REASON_WAITING_FOR_PEER);
	word_store(slot->rx_round, ++round);
	/* What we asked for in the last round is done; who sees rx_ready sees that. */
	atomic_fetch_and(&local->notice, ~(uint32_t)(CHANNEL_DEMOTE | CHANNEL_RECALL));
	atomic_store_explicit(&local->rx_ready, round, memory_order_release);
	full_fence();
	conn_ring(conn);
}

/* rx_lock held. Declares rx_ready if that can be. True: TCP and the segment are watched, both. */
static bool rx_consent(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;

	if (rx_is(slot, RX_OPENING) || rx_is(slot, RX_REOPENING))
		rx_move(slot, RX_ON_UNSETTLED); /* a process of ours was killed in there */
	/* in this order: a round that ended without having begun was never switched to */
	if (rx_is(slot, RX_CONSENTED) && conn_peer_back(conn) && !conn_peer_switched(conn))
		rx_move(slot, RX_ON_UNUSED);
	if (rx_is(slot, RX_TCP) || rx_is(slot, RX_BACK))
		rx_open(conn, fd);
	return rx_consented(slot);
}

/* Whether the peer consents to a round that we have not begun. */
static bool tx_invited(const struct conn *conn)
{
	return atomic_load_explicit(&conn->channel.remote->rx_ready, memory_order_acquire) ==
	       word_load(conn->slot->tx_round) + 1;
}

/* Who left the ring of its own accord may go there again when its time has come. */
static bool tx_waits(struct conn_slot *slot)
{
	uint64_t retry = word_load(slot->tx_retry_ns);

	if (likely(!retry))
		return false;
	if (retry == RETRY_NEVER || (uint64_t)now_ns() < retry)
		return true;
	word_store(slot->tx_retry_ns, 0);
	return false;
}

/* tx_lock held. Moves our sending direction to the ring if the peer consents. */
static bool tx_switch(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;

	if (unlikely(tx_is(slot, TX_SWITCHING)))
		tx_move(slot, TX_ON_UNSETTLED); /* a process of ours was killed in there */
	if (!peer_attached(conn) || !tx_invited(conn))
		return false;
	if (!rx_watches(slot))
		return false; /* a thread of ours may sit in the kernel's recv, where it would never hear of a recall */
	if (!(tx_is(slot, TX_TCP) || tx_is(slot, TX_LEFT)) ||
	    slot_has(slot, SLOT_STAYS | SLOT_RELAY_OVER | SLOT_WR_SHUT | SLOT_PEER_GONE | SLOT_RESET) || tx_waits(slot) ||
	    (conn_notice(conn) & (CHANNEL_DEMOTE | CHANNEL_RECALL)))
		return false;
	tx_move(slot, TX_ON_INVITED); /* full fence */
	enum count count = atomic_load(&slot->tx_sitters) == 0 ? tx_count(conn, fd) : COUNT_UNSTABLE;
	if (count != COUNT_EQUAL) {
		tx_move(slot, TX_ON_UNSETTLED);
		if (count == COUNT_DIFFERS) {
			word_store(slot->tx_retry_ns, RETRY_NEVER);
			word_store(slot->reason, REASON_COUNT_MISMATCH);
			word_store(slot->state, STATE_PINNED);
			shim_log("fd %d: written count differs from the kernel's", fd);
		}
		return false;
	}
	uint32_t round = word_load(slot->tx_round) + 1;
	word_store(slot->tx_round, round);
	word_store(slot->tx_switch_offset, word_load(slot->tx_tcp_bytes));
	atomic_store_explicit(&conn->channel.local->tx_switch_offset, word_load(slot->tx_tcp_bytes), memory_order_relaxed);
	atomic_store_explicit(&conn->channel.local->tx_switched, round, memory_order_release);
	tx_move(slot, TX_ON_SETTLED); /* full fence */
	if (unlikely(slot_has(slot, SLOT_RELAY_OVER))) { /* since the question above; see relay_lost() */
		tx_move(slot, TX_ON_UNSETTLED);
		return false;
	}
	mark_promoted(conn);
	full_fence();
	conn_ring(conn);
	shim_log("fd %d: sends by ring from byte %llu, round %u", fd, (unsigned long long)slot->tx_switch_offset, round);
	return true;
}

/* rx_lock held. Follows the sender onto the ring once every TCP byte before its offset has been read. 1 moved, 0 not yet. */
static int rx_follow(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;
	const struct channel_side *remote = conn->channel.remote;

	if (!rx_is(slot, RX_CONSENTED) || !conn_peer_switched(conn))
		return 0;
	uint64_t offset = atomic_load_explicit(&remote->tx_switch_offset, memory_order_relaxed);
	uint64_t read = word_load(slot->rx_tcp_bytes);
	if (offset > read)
		return 0;
	if (offset < read) {
		conn_violation(conn, fd);
		return 0;
	}
	word_store(slot->rx_switch_offset, offset);
	/* How the stream ends was the kernel's to tell; conn_probe() finds out anew. Another thread may just be setting it. */
	bool ended = atomic_fetch_and(&slot->flags, ~(uint32_t)SLOT_FIN) & SLOT_FIN;
	rx_move(slot, RX_ON_SWITCHED);
	mark_promoted(conn);
	if (ended)
		conn_probe(conn, fd); /* what told of it was an edge, which may not come again */
	return 1;
}

/* rx_lock held, ring empty. Follows a demoted sender back to TCP. True: receiving is on TCP again. */
static bool rx_back(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;
	const struct channel_side *remote = conn->channel.remote;

	if (!conn_peer_back(conn))
		return false;
	if (channel_rx_avail(&conn->channel) > 0)
		return false; /* sent before it went back: first this */
	if (atomic_load_explicit(&remote->tx_back_at, memory_order_relaxed) != atomic_load(conn->channel.own_head)) {
		conn_violation(conn, fd);
		return false;
	}
	rx_move(slot, RX_ON_DRY);
	if (word_load(slot->state) == STATE_PROMOTED)
		word_store(slot->state, STATE_PINNED);
	return true;
}

/* Whether all that is left to receive comes by TCP. */
bool conn_receives_tcp(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;

	if (rx_by_ring(slot) && conn_peer_back(conn) && slot_trylock(&slot->rx_lock)) {
		if (conn->managed && rx_by_ring(slot))
			rx_back(conn, fd);
		slot_unlock(&slot->rx_lock);
	}
	return rx_over(slot);
}

/*
 * Whether bytes that go by TCP from now on are read behind those of the ring: a provider between has handed our offset on,
 * or nobody reads the ring, as it was recalled.
 */
static bool tx_handed(const struct conn *conn)
{
	return likely(!conn_relayed(conn)) ||
	       (atomic_load_explicit(&conn->channel.remote->handed_on, memory_order_acquire) & CHANNEL_HANDED_SWITCH) ||
	       atomic_load(&conn->channel.local->tx_back) == (word_load(conn->slot->tx_round) << 2 | CHANNEL_RECALLED);
}

/* tx_lock held. The peer was first, and wants what it has not read by TCP. */
static void tx_recalled(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;
	uint64_t tail = atomic_load(conn->channel.own_tail), frozen = atomic_load(&conn->channel.remote->rx_frozen);

	if (tail - frozen > conn->channel.tx_size) { /* the peer can write this word: it is a lie */
		conn_violation(conn, fd);
		frozen = tail;
	}
	slot->tx_resend = frozen;
	tx_move(slot, TX_ON_RECALLED);
	if (frozen == tail)
		tx_move(slot, TX_ON_RESENT);
}

/*
 * tx_lock held. Ends the round of our sending direction, which goes back to TCP: after what the ring holds or, if that was
 * recalled, with it. A round that the peer has consented to and that has not begun ends unused.
 */
static void tx_back(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;
	bool unused = !tx_by_ring(slot);

	if (unused && (tx_is(slot, TX_RESEND) || !tx_invited(conn)))
		return;
	if (!unused && unlikely(!tx_handed(conn))) { /* conn_demote() has waited long enough */
		relay_lost(conn, fd);
		return;
	}
	uint32_t round = word_load(slot->tx_round) + unused;
	uint64_t tail = atomic_load(conn->channel.own_tail);
	word_store(slot->tx_round, round);
	/* a process of ours that was killed may have moved its tail and not shown it */
	atomic_store_explicit(&conn->channel.tx_line->tail, tail, memory_order_release);
	atomic_store_explicit(&conn->channel.local->tx_back_at, tail, memory_order_relaxed);
	uint32_t how = channel_decide(&conn->channel.local->tx_back, round, CHANNEL_BACK);
	if (!how)
		conn_violation(conn, fd);
	if (how == CHANNEL_RECALLED && tx_is(slot, TX_RING))
		tx_recalled(conn, fd);
	else
		tx_move(slot, TX_ON_LEAVE);
	atomic_store_explicit(&conn->channel.local->tx_ended, round, memory_order_release);
	if (word_load(slot->state) == STATE_PROMOTED)
		word_store(slot->state, STATE_PINNED);
}

/* tx_lock held. Sends recalled ring bytes by TCP without blocking; true when none are left. */
static bool tx_resend(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;
	uint64_t tail = atomic_load(conn->channel.own_tail), from = word_load(slot->tx_resend);

	if (tail - from > conn->channel.tx_size) { /* a stranger wrote it; see slot_alloc() */
		conn_violation(conn, fd);
		from = tail;
	}
	while (from != tail) {
		uint64_t at = from & (conn->channel.tx_size - 1);
		size_t len = (size_t)(tail - from);
		if (len > conn->channel.tx_size - at)
			len = (size_t)(conn->channel.tx_size - at);
		ssize_t n = raw_send(fd, conn->channel.tx_data + at, len, MSG_DONTWAIT | MSG_NOSIGNAL);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && errno == EAGAIN)
			return false;
		if (n < 0)
			break; /* the connection is gone; the next call hears of it from the kernel */
		from += (uint64_t)n;
		word_store(slot->tx_resend, from);
		word_add(slot->tx_tcp_bytes, (uint64_t)n);
	}
	tx_move(slot, TX_ON_RESENT);
	return true;
}

/* Our direction is back on TCP, and before a byte of it went there the peer has recalled what the ring holds. */
bool conn_recalled_since(const struct conn *conn)
{
	return tx_is(conn->slot, TX_LEFT) &&
	       atomic_load(&conn->channel.local->tx_follows) == (word_load(conn->slot->tx_round) << 2 | CHANNEL_RECALLED);
}

/*
 * Before bytes go by TCP, or the end: from then on the peer cannot recall what it has left in the ring. False: it has, and
 * that goes first.
 */
static bool tx_follows(struct conn *conn)
{
	return !tx_is(conn->slot, TX_LEFT) || channel_decide(&conn->channel.local->tx_follows, word_load(conn->slot->tx_round),
	                                                     CHANNEL_BACK) != CHANNEL_RECALLED;
}

/* Something is to be looked at before a wait: the peer's words, or our own that a provider between has to answer first. */
static bool heeds(const struct conn *conn)
{
	return unlikely(conn_notice(conn)) || conn_relayed(conn);
}

/*
 * The peer asks us to send by TCP, and a round of ours goes on or could begin. Or we have to, and could not as long as a
 * provider between had not told the peer: it rings when it has.
 */
bool conn_asked(const struct conn *conn)
{
	bool by_peer = conn_notice(conn) & (CHANNEL_DEMOTE | CHANNEL_RECALL);

	if (likely(!by_peer && !(conn_relayed(conn) && slot_has(conn->slot, SLOT_STAYS))))
		return false;
	if (tx_by_ring(conn->slot))
		return tx_handed(conn);
	if (tx_is(conn->slot, TX_RESEND))
		return false;
	/* Once more after rx_ready: with a consent to the next round the peer takes back what it asked for in the last. */
	return tx_invited(conn) && (conn_notice(conn) & (CHANNEL_DEMOTE | CHANNEL_RECALL));
}

/* What the peer asks for has not been done yet. */
static bool asked(const struct conn *conn)
{
	return conn_asked(conn) || unlikely(tx_is(conn->slot, TX_RESEND)) || unlikely(conn_recalled_since(conn));
}

/* tx_lock held. Stops sending by ring, or takes back what the peer has not read and sends that by TCP. */
static void obey(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;

	if (conn_asked(conn)) {
		tx_back(conn, fd);
		if (!slot_has(slot, SLOT_STAYS | SLOT_RESET))
			word_store(slot->reason, REASON_PEER_LEFT);
		shim_log("fd %d: the peer asked for TCP", fd);
		full_fence();
		conn_ring(conn);
	}
	if (conn_recalled_since(conn))
		tx_recalled(conn, fd);
	if (tx_is(slot, TX_RESEND))
		tx_resend(conn, fd);
}

/* Does what the peer asks for. True: sending moved, tell the sets. */
bool conn_obey(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;
	int saved = errno;
	bool moved = false;

	if (!asked(conn) || !slot_trylock(&slot->tx_lock))
		return false;
	if (conn->managed && asked(conn)) {
		moved = tx_by_ring(slot);
		obey(conn, fd);
	}
	slot_unlock(&slot->tx_lock);
	errno = saved;
	return moved;
}

/* A program's threads may wait for room in the ring when something else is to be looked at. */
void conn_wake_own(struct conn *conn)
{
	if (!raw_ring(conn->bell->fd))
		shim_log("cannot wake a waiting thread: %d", errno);
}

/*
 * The peer can be killed without a sign, and who runs out of room then might wait for ever: our direction goes back to TCP,
 * where the kernel knows. True: it did now.
 */
static bool leave(struct conn *conn, int fd, enum reason_code reason)
{
	struct conn_slot *slot = conn->slot;
	bool moved = false;
	int saved = errno;

	if (slot_has(slot, SLOT_PEER_GONE | SLOT_RESET) || !tx_by_ring(slot) || !tx_handed(conn))
		return false;
	slot_lock(&slot->tx_lock);
	if (conn->managed && tx_by_ring(slot)) {
		tx_back(conn, fd);
		moved = true;
		if (reason == REASON_BOTH_WAYS_FULL) {
			uint32_t times = word_add(slot->tx_left, 1);
			times = times < RETRY_DOUBLINGS ? times : RETRY_DOUBLINGS;
			word_store(slot->tx_retry_ns, (uint64_t)(now_ns() + (RETRY_AFTER_NS << times)));
		} else {
			word_store(slot->tx_retry_ns, RETRY_NEVER);
		}
		word_store(slot->reason, reason);
		full_fence();
		conn_ring(conn);
		conn_wake_own(conn);
		shim_log("fd %d: the peer's end would not be heard; ours goes on by TCP", fd);
	}
	slot_unlock(&slot->tx_lock);
	errno = saved;
	return moved;
}

/* It has ended its direction: its FIN has come. Our own shutdown of reading looks the same to the kernel. */
static bool leave_half_closed(struct conn *conn, int fd)
{
	return unlikely(slot_has(conn->slot, SLOT_FIN | SLOT_RD_SHUT)) && leave(conn, fd, REASON_HALF_CLOSED);
}

/* What we have recalled was not asked for within a moment: will nobody send it? A peer that has ended will not, unless it
 * had heard before, which the provider alone knows. */
static bool recall_fails(struct conn *conn, int fd)
{
	if (!relay_gone(conn)) {
		if (!kernel_fin(fd) || relay_handed(conn, CHANNEL_HANDED_ASKED, HANDED_TURNS))
			return false;
		if (!relay_gone(conn))
			return true;
	}
	return atomic_load_explicit(&conn->remote_bell->dead, memory_order_relaxed) || (conn_notice(conn) & CHANNEL_RESET);
}

/*
 * Before the socket is passed on: ends our round, and gives the peer a moment for what the ring holds. Should it be passed on
 * there as well, nobody would be left whom it could ask to send that again.
 */
void conn_leave_ring(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;

	slot_lock(&slot->tx_lock);
	bool moved = conn->managed && tx_by_ring(slot) && tx_handed(conn);
	if (moved) {
		tx_back(conn, fd);
		full_fence();
		conn_ring(conn);
	}
	slot_unlock(&slot->tx_lock);
	for (int turn = 0; moved && turn < READ_TURNS && channel_tx_unread(&conn->channel) && !conn_recalled_since(conn) &&
	                   !slot_has(slot, SLOT_RESET | SLOT_PEER_GONE); turn++)
		raw_poll(NULL, 0, 1);
}

/*
 * Goes back to TCP, both directions, losing nothing. Ours at once: the peer reads the ring to its end, then TCP. The
 * peer's when it hears of it, which is its next call or wait. With `recall` what it sent by ring and we have not read
 * comes again by TCP: for a socket whose next reader has no shim.
 */
void conn_demote(struct conn *conn, int fd, enum reason_code reason, bool recall)
{
	struct conn_slot *slot = conn->slot;
	int saved = errno;
	bool stranger = recall, moved = false, asked_peer = false, relayed = false;
	bool waits = reason != REASON_DEMOTED; /* else all calls go on to come here, and one of the next will do */

	conn_pin(conn, reason);
	if (reason == REASON_DEMOTED && slot_has(slot, SLOT_PIN))
		return; /* it is on TCP, or on its way there, for a better reason */
	if (!conn->managed)
		return;
	if (conn_relayed(conn) && waits) {
		slot_lock(&slot->tx_lock); /* who was just switching to the ring has done so */
		bool unheard = conn->managed && tx_by_ring(slot) && !tx_handed(conn);
		slot_unlock(&slot->tx_lock);
		if (unheard && !slot_has(slot, SLOT_RESET)) /* no lock is held: other calls on the connection go on */
			relay_handed(conn, CHANNEL_HANDED_SWITCH, HANDED_TURNS);
	}
	slot_lock(&slot->rx_lock);
	slot_lock(&slot->tx_lock);
	if (conn->managed) {
		struct channel_side *remote = conn->channel.remote;

		moved = tx_by_ring(slot) && (waits || tx_handed(conn));
		if (moved)
			tx_back(conn, fd);
		/* else the kernel, or somebody without a shim, sends what we do not see */
		if (reason != REASON_DEMOTED && !tx_follows(conn))
			tx_recalled(conn, fd);
		if (rx_watches(slot)) {
			relayed = conn_relayed(conn);
			/* A peer that is gone can send nothing again: what is in the ring is read from there. */
			if (slot_has(slot, SLOT_FIN))
				recall = false;
			if (recall) {
				atomic_store(&conn->channel.local->rx_frozen, atomic_load(conn->channel.own_head));
				/* One that has gone back by itself may have sent by TCP since, and one that has ended sends no more: first
				 * the ring, then TCP. */
				uint32_t round = word_load(slot->rx_round);
				uint32_t how = channel_decide(&remote->tx_back, round, CHANNEL_RECALLED);
				if (how == CHANNEL_BACK && !slot_has(slot, SLOT_RELAYED | SLOT_RELAY_OVER))
					how = channel_decide(&remote->tx_follows, round, CHANNEL_RECALLED);
				recall = how == CHANNEL_RECALLED;
			}
			if (recall)
				rx_move(slot, RX_ON_RECALL);
			atomic_fetch_or(&conn->channel.local->notice, recall ? CHANNEL_RECALL : CHANNEL_DEMOTE);
			asked_peer = true;
		}
		atomic_fetch_or(&conn->channel.local->notice, CHANNEL_DEMOTE); /* and do not think of coming back by yourself */
		if (reason != REASON_DEMOTED || !slot_has(slot, SLOT_PIN)) /* else another thread has pinned it since */
			word_store(slot->reason, reason);
		word_store(slot->state, STATE_PINNED);
		full_fence();
		conn_ring(conn);
		shim_log("fd %d: demoted (%d)", fd, (int)reason);
	}
	slot_unlock(&slot->tx_lock);
	slot_unlock(&slot->rx_lock);
	if (asked_peer && waits && relayed && !slot_has(slot, SLOT_RESET) &&
	    !relay_handed(conn, CHANNEL_HANDED_ASKED, ASKED_TURNS) && recall && recall_fails(conn, fd))
		conn_abort(conn, fd, ECONNRESET, REASON_RELAY_LOST); /* nobody sends again what we have not read */
	if (stranger && tx_is(slot, TX_RESEND))
		flush(conn, fd); /* who has the socket next knows nothing of it */
	if (moved)
		conn_wake_own(conn); /* threads that wait for room in the ring: there may be some in TCP's buffer */
	set_conn_switched(conn);
	errno = saved;
}

/*
 * Takes back what a command has decided by REASON_DEMOTED, and does not wait where we left the ring of our own accord. What
 * keeps the connection on TCP for good stands.
 */
void conn_promote(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;

	slot_lock(&slot->rx_lock);
	slot_lock(&slot->tx_lock);
	uint32_t state = word_load(slot->state);
	bool stays = slot_has(slot, SLOT_PIN | SLOT_RESET | SLOT_RELAYED), was_demoted = slot_has(slot, SLOT_DEMOTED);
	slot_clear(slot, SLOT_DEMOTED);
	if (!stays && word_load(slot->tx_retry_ns) != RETRY_NEVER) {
		word_store(slot->tx_retry_ns, 0);
		word_store(slot->tx_left, 0);
	}
	if (!stays && conn->managed) {
		/* While a recall stands, only the end of the round takes back what was asked for; see rx_open(). */
		if (was_demoted && !slot_has(slot, SLOT_RD_SHUT) &&
		    !(atomic_load(&conn->channel.local->notice) & CHANNEL_RECALL))
			atomic_fetch_and(&conn->channel.local->notice, ~(uint32_t)CHANNEL_DEMOTE);
		if (state == STATE_PINNED && !rx_is(slot, RX_BARRED) && !word_load(slot->tx_retry_ns)) {
			word_store(slot->state, STATE_ATTACHED);
			word_store(slot->reason, REASON_WAITING_FOR_PEER);
			mark_promoted(conn);
		}
		full_fence();
		conn_ring(conn);
	} else if (!stays && was_demoted && state == STATE_PINNED) {
		word_store(slot->state, STATE_NATIVE);
		word_store(slot->reason, REASON_YOUNG);
	}
	bool managed = conn->managed;
	slot_unlock(&slot->tx_lock);
	slot_unlock(&slot->rx_lock);
	if (stays)
		return;
	shim_log("fd %d: may be promoted again", fd);
	if (managed) {
		conn_progress(conn, fd);
		set_conn_switched(conn);
	} else if (word_load(slot->state) == STATE_NATIVE) {
		conn->backoff = 0;
		word_store(conn->calls, config.promote_after_calls);
		rpc_consider(conn, fd);
	}
}

/* The connection of a slot, held, and a number of it; NULL: this process has none. */
struct conn *conn_find(uint32_t slot, uint32_t generation, int *fd)
{
	for (uint32_t at = 0; at < atomic_load(&fd_end); at++) {
		struct conn *conn = conn_hold((int)at);
		if (!conn)
			continue;
		if (slot_index(conn->slot) == slot && conn->generation == generation) {
			*fd = (int)at;
			return conn;
		}
		conn_unref(conn);
	}
	return NULL;
}

/* Moves the switch along from any call or wait on the connection. True: something moved, tell the sets. */
bool conn_progress(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;
	bool moved = false;

	if (likely(conn_switched(conn)) || !peer_attached(conn))
		return false;
	if ((!rx_by_ring(slot) || conn_peer_back(conn)) && slot_trylock(&slot->rx_lock)) {
		if (conn->managed && rx_by_ring(slot) && channel_rx_avail(&conn->channel) == 0)
			moved = rx_back(conn, fd); /* a program that only sends would never follow */
		if (conn->managed && !rx_by_ring(slot) && rx_consent(conn, fd))
			rx_follow(conn, fd);
		slot_unlock(&slot->rx_lock);
	}
	if (!tx_by_ring(slot) && slot_trylock(&slot->tx_lock)) {
		moved |= conn->managed && !tx_by_ring(slot) && tx_switch(conn, fd);
		slot_unlock(&slot->tx_lock);
	}
	return moved;
}

/* ---- the end of the stream ---- */
/* The other end must not take what it got for all: the kernel sends it a reset. Any thread, any lock. */
static void conn_abort(struct conn *conn, int fd, int error, enum reason_code reason)
{
	struct conn_slot *slot = conn->slot;
	struct sockaddr none = {.sa_family = AF_UNSPEC};

	if (slot_has(slot, SLOT_RESET))
		return;
	/*
	 * tcp_disconnect sends the reset. It comes before anything is told here: a thread that hears of the end may shut down or
	 * close, and behind a FIN of ours (LAST_ACK) the kernel sends none: the stream would look whole to the peer. Some kernels
	 * refuse it (EBUSY) while another thread sits in a call of theirs.
	 */
	if (conn_stays(conn, &fd) && real.connect(fd, &none, sizeof(none)) < 0)
		real.shutdown(fd, SHUT_RDWR);
	word_store(slot->error, (uint32_t)error);
	slot_set(slot, SLOT_RESET | SLOT_FIN | SLOT_PEER_GONE);
	word_store(slot->reason, reason);
	word_store(slot->state, STATE_PINNED);
	shim_log("fd %d: reset, %s", fd,
	         reason == REASON_RELAY_LOST ? "the provider between has lost bytes" : "the peer broke the channel's rules");
}

void conn_violation(struct conn *conn, int fd)
{
	conn_abort(conn, fd, ECONNRESET, REASON_PEER_VIOLATION);
}

/* A lock of the arena was taken from a holder that keeps it for ever: what it guards may be half done. */
void conn_lock_broken(const void *lock)
{
	for (uint32_t fd = 0; fd < atomic_load(&fd_end); fd++) {
		struct conn *conn = conn_get((int)fd); /* who has asked for the lock holds it */
		if (conn && lock >= (void *)conn->slot && lock < (void *)(conn->slot + 1)) {
			conn_violation(conn, (int)fd);
			return;
		}
	}
}

/* ---- a provider between ---- */
static bool relay_gone(const struct conn *conn)
{
	return atomic_load_explicit(&conn->remote_bell->dead, memory_order_relaxed) ||
	       (atomic_load_explicit(&conn->channel.remote->notice, memory_order_acquire) & (CHANNEL_RESET | CHANNEL_OVER));
}

bool conn_relay_news(const struct conn *conn)
{
	const struct conn_slot *slot = conn->slot;

	if (!conn_relayed(conn) || slot_has(slot, SLOT_RESET))
		return false;
	return relay_gone(conn) ||
	       (slot_has(slot, SLOT_NATIVE_FIN) && !slot_has(slot, SLOT_FIN) &&
	        atomic_load_explicit(&conn->channel.remote->tx_fin, memory_order_acquire));
}

/* Asks whether the provider is still there; once for those that follow each other with the same one. */
void conn_life_look(const struct conn *conn, const struct remote_bell **last)
{
	struct remote_bell *bell = conn->remote_bell;

	if (!conn_relayed(conn) || bell == *last)
		return;
	*last = bell;
	struct pollfd life = {.fd = bell->life_fd};
	if (raw_poll(&life, 1, 0) > 0)
		atomic_store(&bell->dead, true);
}

/* Whether the peer's FIN has come, which a socket whose reading was shut down does not tell by its end. */
static bool kernel_fin(int fd)
{
	uint8_t info[TCPI_SIZE];

	return tcp_info_get(fd, info) && tcp_info_fin(info);
}

/* TCP's end has come: has the provider said that the ring's has, too? It is told to look. */
static bool relay_ended(struct conn *conn)
{
	uint32_t seen = CHANNEL_SEEN_END | (slot_has(conn->slot, SLOT_NATIVE_RESET) ? CHANNEL_SEEN_RESET : 0u);

	slot_set(conn->slot, SLOT_NATIVE_FIN);
	if (~atomic_fetch_or(&conn->channel.local->fin_seen, seen) & seen) {
		full_fence();
		conn_ring(conn);
	}
	return atomic_load_explicit(&conn->channel.remote->tx_fin, memory_order_acquire);
}

/* TCP has told a reset: are bytes that were sent before it still on their way? Then it is not heard yet. */
static bool relay_reset_waits(struct conn *conn)
{
	if (slot_has(conn->slot, SLOT_RD_SHUT) || !rx_watches(conn->slot))
		return false;
	slot_set(conn->slot, SLOT_NATIVE_RESET);
	return !relay_ended(conn);
}

/* The same for a reader that has come to the end of TCP's bytes, and would take the error out of the kernel. */
static bool rx_reset_waits(struct conn *conn, int fd)
{
	struct pollfd native = {.fd = fd};
	int queued = 0;

	return conn_relayed(conn) && raw_poll(&native, 1, 0) > 0 && (native.revents & POLLERR) &&
	       real.ioctl(fd, FIONREAD, &queued) == 0 && queued == 0 && relay_reset_waits(conn);
}

/* Whether the ring's end is still to be told, though the kernel's has been. */
bool conn_end_withheld(const struct conn *conn)
{
	const struct conn_slot *slot = conn->slot;

	return conn_relayed(conn) && slot_has(slot, SLOT_NATIVE_FIN) && rx_watches(slot) &&
	       !slot_has(slot, SLOT_FIN | SLOT_RESET);
}

/* And no byte is left there: then the kernel has nothing more to say. */
bool conn_fin_waits(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;
	int queued = 0;

	if (!conn_end_withheld(conn))
		return false;
	return rx_by_ring(slot) || real.ioctl(fd, FIONREAD, &queued) < 0 || queued == 0;
}

/* What of the kernel's events is true of the connection: its end is not before the ring's. */
static uint32_t relay_mask(struct conn *conn, int fd, uint32_t kernel_bits)
{
	struct conn_slot *slot = conn->slot;
	bool ended = kernel_bits & (EPOLLRDHUP | EPOLLHUP | EPOLLERR);
	int queued = 0;

	/* who did not ask for RDHUP is told of the end by IN alone: then there is nothing to read */
	if ((kernel_bits & EPOLLIN) && !rx_by_ring(slot) && rx_consented(slot))
		ended |= real.ioctl(fd, FIONREAD, &queued) == 0 && queued == 0;
	if (conn_relay_news(conn) || (ended && !slot_has(slot, SLOT_NATIVE_FIN | SLOT_RESET)))
		conn_probe(conn, fd);
	if (slot_has(slot, SLOT_NATIVE_FIN) && rx_watches(slot) && !slot_has(slot, SLOT_FIN | SLOT_RESET)) {
		kernel_bits &= ~(uint32_t)(EPOLLRDHUP | EPOLLHUP | (slot_has(slot, SLOT_NATIVE_RESET) ? EPOLLERR : 0u));
		if (conn_fin_waits(conn, fd))
			kernel_bits &= ~(uint32_t)(EPOLLIN | EPOLLRDNORM);
	}
	return kernel_bits;
}

/*
 * Whether what we send goes through the provider. How much of it arrived before an end is for the peer to judge, and so once
 * it is decided that we go back or end, which another thread may just be doing; what was recalled comes again by TCP.
 */
static bool tx_relayed(const struct conn *conn)
{
	return tx_by_ring(conn->slot) && !slot_has(conn->slot, SLOT_WR_SHUT | SLOT_PEER_GONE) &&
	       atomic_load(&conn->channel.local->tx_back) >> 2 != word_load(conn->slot->tx_round);
}

/*
 * What the provider held is gone. Any thread, any lock. The peer hears a reset as well: it must not take what it got for
 * all. Where neither direction depends on the provider any more, it is forgotten: from then on the kernel alone knows how
 * the connection ends, as what the segment says of the peer has stood still since.
 */
static void relay_lost(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;
	/* all of it is in our ring once the provider has published how that ends */
	bool ended = atomic_load_explicit(&conn->channel.remote->tx_fin, memory_order_acquire);
	bool invited = atomic_load(&conn->channel.remote->handed_on) & CHANNEL_HANDED_READY;
	/* or it is decided how it ends; who is just recalling the rest looks himself whether it comes: conn_demote() */
	bool decided = atomic_load(&conn->channel.remote->tx_back) >> 2 == word_load(slot->rx_round);
	bool receives = rx_watches(slot) && !slot_has(slot, SLOT_RD_SHUT) && invited && !decided && !ended;

	if (!receives && !tx_relayed(conn) && !(conn_notice(conn) & CHANNEL_RESET)) {
		slot_set(slot, SLOT_RELAY_OVER); /* full fence; before the second look: tx_switch() does it the other way round */
		if (!tx_relayed(conn)) {
			slot_clear(slot, SLOT_RELAYED);
			return;
		}
		slot_clear(slot, SLOT_RELAY_OVER);
	}
	conn_abort(conn, fd, ended ? EPIPE : ECONNRESET, REASON_RELAY_LOST); /* as the kernel has it, after a FIN and before */
}

/* No lock held. Waits until the provider has handed on to the peer what we told it. False: it did not, and may be dead. */
static bool relay_handed(struct conn *conn, uint32_t what, int turns)
{
	struct remote_bell *bell = conn->remote_bell;
	struct pollfd life = {.fd = bell->life_fd};

	for (int turn = 0; turn < turns; turn++) {
		if (likely(atomic_load_explicit(&conn->channel.remote->handed_on, memory_order_acquire) & what))
			return true;
		if (raw_poll(&life, 1, 1) > 0)
			atomic_store(&bell->dead, true);
		if (relay_gone(conn))
			break;
	}
	return false;
}

/* Whether the ring is where the peer reads what it has not read of us. */
static bool tx_in_ring(const struct conn *conn)
{
	uint32_t round = word_load(conn->slot->tx_round);

	if (slot_has(conn->slot, SLOT_RELAY_OVER))
		return false; /* the head that we see is the provider's last, not the peer's */
	if (tx_by_ring(conn->slot))
		return true;
	uint32_t follows = atomic_load(&conn->channel.local->tx_follows);
	return atomic_load(&conn->channel.local->tx_back) == (round << 2 | CHANNEL_BACK) &&
	       (follows >> 2 != round || (follows & 3) == CHANNEL_BACK);
}

/* How the peer ends is to be judged here: its kernel knows nothing of what it leaves in the ring. */
bool conn_judges_end(const struct conn *conn)
{
	return tx_by_ring(conn->slot) || (tx_in_ring(conn) && channel_tx_unread(&conn->channel) != 0);
}

/*
 * There are bytes on TCP, and in round `round` we read the ring: the peer has gone back, or breaks the rules. That we have
 * recalled the rest is only its word, unless whoever holds the lock is just doing so; he looks himself.
 */
static bool rx_astray(struct conn *conn, uint32_t round)
{
	struct conn_slot *slot = conn->slot;
	bool held = word_load(slot->rx_lock) == self.tid;

	if (!held && !slot_trylock(&slot->rx_lock))
		return false;
	bool astray = rx_by_ring(slot) && word_load(slot->rx_round) == round && !conn_peer_back(conn);
	if (!held)
		slot_unlock(&slot->rx_lock);
	return astray;
}

static void probe(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;
	bool relayed = conn_relayed(conn);
	struct pollfd asked_of[2] = {{.fd = fd, .events = POLLIN | POLLRDHUP},
	                             {.fd = relayed ? conn->remote_bell->life_fd : -1}};
	uint32_t round = atomic_load(&slot->rx_round); /* before the path: it is that round's */
	bool on_ring = rx_by_ring(slot), end_known = true;
	int saved = errno;

	if (slot_has(slot, SLOT_RESET) ||
	    (slot_has(slot, SLOT_FIN) && slot_has(slot, SLOT_PEER_GONE) && !(relayed && relay_gone(conn))))
		return;
	/* Its FIN may stand behind bytes that the program does not read. Where it asked us back to TCP, somebody else may go on
	 * with the socket, and the kernel will know. */
	if ((conn_notice(conn) & (CHANNEL_CLOSED | CHANNEL_DEMOTE | CHANNEL_RECALL)) == CHANNEL_CLOSED)
		slot_set(slot, SLOT_PEER_GONE);
	int told_of = raw_poll(asked_of, 1 + relayed, 0);
	struct pollfd native = asked_of[0];
	if (relayed && asked_of[1].revents)
		atomic_store(&conn->remote_bell->dead, true);
	if (relayed && relay_gone(conn)) {
		relay_lost(conn, fd);
		relayed = conn_relayed(conn); /* else an end that was heard before would be waited for, with nobody to tell it */
	}
	bool reset = slot_has(slot, SLOT_RESET);
	if (told_of <= 0 || (native.revents & POLLNVAL)) {
		errno = saved;
		return;
	}
	if ((native.revents & POLLERR) && relayed && !slot_has(slot, SLOT_RESET) && relay_reset_waits(conn)) {
		errno = saved;
		return;
	}
	bool fin = native.revents & (POLLRDHUP | POLLHUP);
	if (fin && slot_has(slot, SLOT_RD_SHUT))
		fin = kernel_fin(fd); /* our own shutdown says the same */
	if (native.revents & POLLERR) {
		if (on_ring) {
			int error = 0;
			socklen_t len = sizeof(error);
			real.getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &len);
			if (reset && error == EPIPE)
				error = 0; /* it was a reset behind a FIN, which came without the bytes that are lost */
			if (error || !slot_has(slot, SLOT_RESET)) /* else another thread has asked just now */
				word_store(slot->error, error ? (uint32_t)error : ECONNRESET);
			slot_set(slot, SLOT_RESET | SLOT_FIN | SLOT_PEER_GONE);
		} else {
			slot_set(slot, SLOT_PEER_GONE); /* bytes may be left on TCP: the kernel tells data and error in order */
		}
	} else if (on_ring && (native.revents & POLLIN)) {
		/* bytes on TCP after the switch: only of a peer that has gone back to it */
		char byte;
		if (!relayed && raw_recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) > 0 && rx_astray(conn, round))
			conn_violation(conn, fd);
	}
	if (fin && relayed && !slot_has(slot, SLOT_RESET)) {
		end_known = relay_ended(conn);
		fin = end_known || !rx_watches(slot);
	}
	if (fin && !slot_has(slot, SLOT_RESET)) {
		uint32_t bits = SLOT_FIN;
		const struct channel_side *remote = conn->channel.remote;
		bool closed = atomic_load_explicit(&remote->notice, memory_order_acquire) & CHANNEL_CLOSED;
		bool shut = atomic_load_explicit(&remote->shut_wr, memory_order_acquire);

		/* The peer stores shut_wr before its kernel sends the FIN; a FIN without it means that nobody is left there. */
		if (end_known && peer_attached(conn) && (closed || !shut) && !slot_has(slot, SLOT_RELAY_OVER)) {
			bits |= SLOT_PEER_GONE;
			/* One that was killed could not make its kernel reset because of what it had not read; see tell_close(). */
			bool in_ring = tx_in_ring(conn);
			bool told = (native.revents & POLLHUP) && !slot_has(slot, SLOT_WR_SHUT); /* the kernel has seen a reset */
			if (!slot_has(slot, SLOT_PEER_GONE) && in_ring && !closed && !told &&
			    channel_tx_unread(&conn->channel) != 0) {
				/* after a FIN the kernel makes a reset EPIPE, which readers do not hear of (tcp_reset) */
				word_store(slot->error, shut ? EPIPE : ECONNRESET);
				bits |= SLOT_RESET;
			}
		}
		slot_set(slot, bits);
	}
	errno = saved;
}

/* Asks the native socket whether the stream has ended. Any thread, any lock. */
void conn_probe(struct conn *conn, int fd)
{
	bool relayed = conn_relayed(conn);

	probe(conn, fd);
	/* Who waits for its end has let TCP's pass, whose edge does not come again, and nothing else tells it any more. */
	if (relayed && !conn_relayed(conn)) {
		int saved = errno;
		conn_wake_own(conn);
		errno = saved;
	}
}

/* ---- readiness ---- */

/* The next bytes are on one path and those after them on the other: no call sees them together. */
static bool rx_divided(const struct conn *conn)
{
	const struct conn_slot *slot = conn->slot;

	return conn_peer_back(conn) || (!rx_by_ring(slot) &&
	                                rx_watches(slot) &&
	                                conn_peer_switched(conn));
}

static bool has_data(struct conn *conn, size_t wanted)
{
	return channel_rx_tell(&conn->channel) >= wanted;
}

static size_t low_water(struct conn *conn)
{
	uint64_t low = atomic_load_explicit(&conn->slot->rx_low_water, memory_order_relaxed);

	if (unlikely(conn_peer_back(conn)))
		return 1; /* the rest comes by TCP once the ring has been read */
	/* beyond half the ring it could never be met while the sender waits for room */
	return low > conn->channel.rx_size / 2 ? conn->channel.rx_size / 2 : low;
}

static size_t room_wanted(const struct conn *conn)
{
	return conn->channel.tx_size / 4;
}

uint32_t conn_ready(struct conn *conn, int fd, uint32_t kernel_bits, uint32_t interest)
{
	struct conn_slot *slot = conn->slot;
	uint32_t ready = 0, notice = conn_notice(conn);
	bool was_ring = tx_by_ring(slot);

	if (conn_relayed(conn))
		kernel_bits = relay_mask(conn, fd, kernel_bits);
	if (heeds(conn)) {
		conn_obey(conn, fd);
		if ((notice & CHANNEL_CLOSED) && !slot_has(slot, SLOT_PEER_GONE))
			conn_probe(conn, fd);
	}
	/* a look at the rings alone must not leave out an end that the peer has told */
	if (unlikely(atomic_load_explicit(&conn->channel.remote->shut_wr, memory_order_acquire)) && !slot_has(slot, SLOT_FIN))
		conn_probe(conn, fd);
	if (rx_by_ring(slot)) {
		ready |= kernel_bits & EPOLLPRI;
		if ((kernel_bits & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) && !slot_has(slot, SLOT_RESET))
			conn_probe(conn, fd);
		if (has_data(conn, low_water(conn))) {
			ready |= EPOLLIN | EPOLLRDNORM;
		} else if (unlikely(conn_peer_back(conn)) && slot_trylock(&slot->rx_lock)) {
			if (conn->managed && rx_by_ring(slot) && rx_back(conn, fd))
				ready |= kernel_bits & (EPOLLIN | EPOLLRDNORM);
			slot_unlock(&slot->rx_lock);
		}
	} else {
		ready |= kernel_bits & (EPOLLIN | EPOLLRDNORM | EPOLLRDHUP | EPOLLPRI);
		/* a sender by ring must hear of the end, which a reader meets in the kernel */
		if ((kernel_bits & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) && conn_judges_end(conn))
			conn_probe(conn, fd);
		if (rx_consented(slot) && !ready && slot_trylock(&slot->rx_lock)) {
			bool moved = conn->managed && !rx_by_ring(slot) && rx_follow(conn, fd);
			slot_unlock(&slot->rx_lock);
			int queued = 0;
			if (moved ? has_data(conn, low_water(conn))
			          : rx_divided(conn) && real.ioctl(fd, FIONREAD, &queued) == 0 && queued > 0)
				ready |= EPOLLIN | EPOLLRDNORM; /* the kernel alone would wait for the low-water mark */
		}
	}
	if (tx_by_ring(slot)) {
		size_t room = conn_room(conn);
		if (room < room_wanted(conn) && (interest & (EPOLLOUT | EPOLLWRNORM))) {
			/* somebody waits for it: the consumer must tell when there is some; then look once more */
			atomic_fetch_or(&conn->channel.tx_line->want_space, WANT_STICKY);
			full_fence();
			room = conn_room(conn);
		}
		if (room >= room_wanted(conn) && (interest & (EPOLLOUT | EPOLLWRNORM)))
			room = channel_tx_tell(&conn->channel);
		if (room >= room_wanted(conn))
			ready |= EPOLLOUT | EPOLLWRNORM;
		else if (interest & (EPOLLOUT | EPOLLWRNORM))
			leave_half_closed(conn, fd);
	}
	if (unlikely(!tx_by_ring(slot) && !tx_is(slot, TX_RESEND))) {
		struct pollfd native = {.fd = fd, .events = POLLOUT | POLLWRNORM};
		if (was_ring && (interest & (EPOLLOUT | EPOLLWRNORM)) && raw_poll(&native, 1, 0) > 0)
			ready |= (uint32_t)native.revents & (EPOLLOUT | EPOLLWRNORM); /* the kernel was not asked for it */
		ready |= kernel_bits & (EPOLLOUT | EPOLLWRNORM);
	}
	uint32_t flags = word_load(slot->flags);
	if (flags & (SLOT_FIN | SLOT_RD_SHUT | SLOT_RESET))
		ready |= EPOLLIN | EPOLLRDNORM | EPOLLRDHUP;
	if ((flags & (SLOT_WR_SHUT | SLOT_RESET)) ||
	    ((flags & SLOT_PEER_GONE) && tx_by_ring(slot)))
		ready |= EPOLLOUT | EPOLLWRNORM;
	if ((flags & SLOT_RESET) || ((flags & SLOT_FIN || flags & SLOT_RD_SHUT) && flags & SLOT_WR_SHUT))
		ready |= EPOLLHUP;
	if (word_load(slot->error))
		ready |= EPOLLERR;
	/* An event is told whole: a look at the rings alone leaves out what the kernel knows of the end, and of a direction that
	 * is on TCP. */
	uint32_t by_tcp = !rx_by_ring(slot) ? EPOLLIN | EPOLLRDNORM | EPOLLRDHUP | EPOLLPRI : 0;
	if (!tx_by_ring(slot) && !tx_is(slot, TX_RESEND))
		by_tcp |= EPOLLOUT | EPOLLWRNORM;
	if (!kernel_bits && unlikely((by_tcp && (ready & interest)) || flags & (SLOT_FIN | SLOT_PEER_GONE))) {
		struct pollfd native = {.fd = fd, .events = (short)by_tcp};
		if (raw_poll(&native, 1, 0) > 0)
			kernel_bits = (unsigned short)native.revents & ~(uint32_t)POLLNVAL;
		if (conn_relayed(conn))
			kernel_bits = relay_mask(conn, fd, kernel_bits);
		if (unlikely(kernel_bits & EPOLLERR) && !(flags & SLOT_RESET))
			return conn_ready(conn, fd, kernel_bits, interest); /* the reset has come just now */
		ready |= kernel_bits & by_tcp;
	}
	return ready | (kernel_bits & (EPOLLHUP | EPOLLERR));
}

/* ---- bytes ---- */
/* what rx_step and tx_step found */
enum step { STEP_DONE, STEP_AGAIN, STEP_EMPTY, STEP_END, STEP_ERROR, STEP_NATIVE, STEP_CLOSED };

static size_t iov_total(const struct iovec *iov, int iov_len)
{
	size_t total = 0;

	for (int i = 0; i < iov_len; i++)
		total += iov[i].iov_len;
	return total;
}

static int64_t timeval_ns(const struct timeval *limit)
{
	return limit->tv_sec > 9000000000ll ? INT64_MAX : limit->tv_sec * 1000000000ll + limit->tv_usec * 1000ll;
}

static bool would_not_block(int fd, int flags)
{
	return (flags & MSG_DONTWAIT) || (real.fcntl64(fd, F_GETFL, 0) & O_NONBLOCK);
}

/*
 * What is left of an iovec array from byte `skip` on, `most` bytes of it; at most 64 pieces, which is a short read or write
 * and allowed.
 */
static int iov_from(const struct iovec *iov, int iov_len, size_t skip, size_t most, struct iovec out[64])
{
	int n = 0;

	for (int i = 0; i < iov_len && n < 64 && most; i++) {
		if (skip >= iov[i].iov_len) {
			skip -= iov[i].iov_len;
			continue;
		}
		size_t len = iov[i].iov_len - skip < most ? iov[i].iov_len - skip : most;
		out[n++] = (struct iovec){(uint8_t *)iov[i].iov_base + skip, len};
		most -= len;
		skip = 0;
	}
	return n;
}

static int take_error(struct conn *conn)
{
	return (int)atomic_exchange(&conn->slot->error, 0);
}

/* rx_lock held. Copies from the ring to iov from byte `done` on. */
static size_t ring_read(struct conn *conn, const struct iovec *iov, int iov_len, size_t done, size_t len, int flags)
{
	size_t from = 0, skip = done;

	if (flags & MSG_TRUNC) {
		from = len; /* TCP: the bytes are thrown away, see recv(2) */
	} else if (likely(iov_len == 1)) {
		channel_rx_get(&conn->channel, 0, (uint8_t *)iov->iov_base + done, len);
		from = len;
	} else {
		for (int i = 0; i < iov_len && from < len; i++) {
			if (skip >= iov[i].iov_len) {
				skip -= iov[i].iov_len;
				continue;
			}
			size_t part = iov[i].iov_len - skip < len - from ? iov[i].iov_len - skip : len - from;
			channel_rx_get(&conn->channel, from, (uint8_t *)iov[i].iov_base + skip, part);
			from += part;
			skip = 0;
		}
	}
	if (!(flags & MSG_PEEK)) {
		channel_rx_consume(&conn->channel, len);
		word_store(conn->slot->rx_ring_bytes, conn->slot->rx_ring_bytes + len);
		word_store(conn->slot->rx_ring_msgs, conn->slot->rx_ring_msgs + 1);
	}
	return len;
}

/*
 * rx_lock held, consent declared. Reads TCP, but never past the offset at which the sender moved to the ring: it may be
 * back on TCP already, and what it sends there follows what the ring holds. What the kernel held before tx_switched was
 * still unset was sent before the switch; so the question comes between the count and the read. As recvmsg.
 */
static ssize_t rx_tcp(struct conn *conn, int fd, const struct iovec *iov, int iov_len, size_t done, int flags)
{
	struct conn_slot *slot = conn->slot;
	const struct channel_side *remote = conn->channel.remote;
	struct iovec rest[64];
	struct msghdr message = {.msg_iov = rest};

	flags = (flags & (MSG_PEEK | MSG_TRUNC)) | MSG_DONTWAIT;
	for (int again = 0;;) {
		size_t most = SIZE_MAX;
		if (!rx_over(slot)) {
			int queued = 0;
			real.ioctl(fd, FIONREAD, &queued);
			if (atomic_load(&remote->tx_switched) == word_load(slot->rx_round)) {
				uint64_t offset = atomic_load_explicit(&remote->tx_switch_offset, memory_order_relaxed);
				uint64_t read = word_load(slot->rx_tcp_bytes);
				most = offset > read ? (size_t)(offset - read) : 0;
				if (!most) {
					errno = EAGAIN; /* rx_follow() judges it */
					return -1;
				}
			} else if (queued > 0) {
				most = (size_t)queued;
			} else {
				char byte;
				ssize_t n = raw_recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
				if (n <= 0)
					return n;
				if (again++ == 0)
					continue; /* it has come since */
				most = 1; /* an urgent mark stands before it, which FIONREAD stops at */
			}
		}
		/* more than 64 pieces: as many calls as fill them */
		for (size_t got = 0;;) {
			message.msg_iovlen = (size_t)iov_from(iov, iov_len, done + got, most - got, rest);
			if (got && message.msg_iovlen == 0)
				return (ssize_t)got;
			ssize_t n = raw_recvmsg(fd, &message, flags);
			if (n <= 0 || (flags & MSG_PEEK) || (size_t)n < iov_total(rest, (int)message.msg_iovlen))
				return got ? (ssize_t)(got + (n > 0 ? (size_t)n : 0)) : n;
			got += (size_t)n;
		}
	}
}

/*
 * A read from TCP has met its end: what waits on the connection hears of it as well. True: errno says that it is none, as
 * the peer has left bytes in the ring unread, of which its kernel knows nothing.
 */
bool conn_tcp_ended(struct conn *conn, int fd)
{
	conn_probe(conn, fd);
	if (!word_load(conn->slot->error) || word_load(conn->slot->error) == EPIPE)
		return false;
	errno = take_error(conn);
	return errno != 0;
}

/* Whether the ring goes on where TCP ends, `queued` bytes from here. */
static bool rx_ring_next(const struct conn *conn, size_t queued)
{
	const struct channel_side *remote = conn->channel.remote;

	return !rx_over(conn->slot) && conn_peer_switched(conn) &&
	       atomic_load_explicit(&remote->tx_switch_offset, memory_order_relaxed) ==
	           word_load(conn->slot->rx_tcp_bytes) + queued;
}

/* Bytes of the ring that a read can return beside `queued` ones of TCP, from before the ring or behind it. */
size_t conn_ring_unread(struct conn *conn, size_t queued)
{
	bool next = rx_by_ring(conn->slot) || rx_ring_next(conn, queued);
	size_t there = next ? channel_rx_tell(&conn->channel) : 0;

	return there == SIZE_MAX ? 0 : there;
}

/*
 * rx_lock held. Whether the stream goes on by the other path, with bytes there that the same call is to return. A short read
 * means that nothing is left: edge-triggered readers wait for the next edge then (epoll(7), "Questions and answers" 9), and
 * libuv takes it with HUP for the end of the stream.
 */
static bool rx_goes_on(struct conn *conn, int fd)
{
	int queued = 0;

	if (!rx_by_ring(conn->slot))
		return rx_follow(conn, fd) && channel_rx_avail(&conn->channel) > 0;
	return conn_peer_back(conn) && rx_back(conn, fd) && real.ioctl(fd, FIONREAD, &queued) == 0 && queued > 0;
}

/* rx_lock held. `look`: also ask the native socket before saying that there is nothing. */
static enum step rx_step(struct conn *conn, int fd, const struct iovec *iov, int iov_len, size_t done, size_t wanted,
                         int flags, bool look, size_t *moved)
{
	struct conn_slot *slot = conn->slot;

	if (unlikely(!rx_by_ring(slot))) {
		if (!rx_consent(conn, fd))
			return STEP_NATIVE;
		if (conn_relay_news(conn))
			conn_probe(conn, fd);
		ssize_t n = -1;
		bool reset = conn_relayed(conn) && slot_has(slot, SLOT_RESET), waits = !reset && rx_reset_waits(conn, fd);
		if (reset && !rx_follow(conn, fd)) {
			errno = take_error(conn);
			return errno ? STEP_ERROR : STEP_END;
		}
		errno = EAGAIN;
		if (!reset && !waits)
			n = rx_tcp(conn, fd, iov, iov_len, done, flags);
		if (n > 0) {
			*moved = (size_t)n;
			if (!(flags & MSG_PEEK)) {
				word_add(slot->rx_tcp_bytes, (uint64_t)n);
				word_add(slot->rx_tcp_msgs, 1);
				full_fence();
				if (unlikely(conn_tcp_read(conn)))
					conn_wake_own(conn); /* the ring is next, which another reader did not know; see ready_now() */
			} else if (*moved < wanted && rx_ring_next(conn, (size_t)n)) {
				int64_t there = channel_rx_avail(&conn->channel);
				if (there > 0)
					*moved += ring_read(conn, iov, iov_len, done + *moved,
					                    (size_t)there < wanted - *moved ? (size_t)there : wanted - *moved, flags);
			}
			return STEP_DONE;
		}
		/* An end on TCP is the end only if the sender had not moved to the ring before it. */
		int error = n < 0 ? errno : 0;
		/* asked before: what came before the end is published before it */
		bool alone = n != 0 || !conn_relayed(conn) || rx_over(slot);
		bool known = !waits && (alone || (slot_has(slot, SLOT_RD_SHUT) && !kernel_fin(fd)) || relay_ended(conn));
		if (!reset && !rx_follow(conn, fd)) {
			if (!known) {
				conn_probe(conn, fd); /* the provider may be gone */
				if (!slot_has(slot, SLOT_RESET))
					return STEP_EMPTY;
				errno = take_error(conn);
				return errno ? STEP_ERROR : STEP_END;
			}
			if (n == 0 && conn_tcp_ended(conn, fd))
				return STEP_ERROR;
			if (error == EAGAIN && slot_has(slot, SLOT_RESET)) /* rx_follow() has just judged so, or long ago */
				error = take_error(conn);
			errno = error;
			return error == 0 ? STEP_END : error == EAGAIN ? STEP_EMPTY : STEP_ERROR;
		}
		if (n == 0) {
			conn_probe(conn, fd);
		} else if (error != EAGAIN) {
			word_store(slot->error, (uint32_t)error);
			slot_set(slot, SLOT_RESET | SLOT_FIN | SLOT_PEER_GONE);
		}
	}
	for (int turn = 0;; turn++) {
		if (conn_relay_news(conn))
			conn_probe(conn, fd);
		/* Loaded before the ring is looked at: an end seen after it may stand behind bytes not seen. */
		uint32_t ended = atomic_load(&slot->flags) & (SLOT_FIN | SLOT_RD_SHUT | SLOT_RESET);
		bool failed = atomic_load(&slot->error) != 0;
		int64_t there = channel_rx_avail(&conn->channel);
		if (unlikely(there < 0)) {
			conn_violation(conn, fd);
			there = 0;
		}
		if (there > 0) {
			*moved = ring_read(conn, iov, iov_len, done, (size_t)there < wanted ? (size_t)there : wanted, flags);
			if (unlikely(flags & MSG_PEEK))
				channel_tell(&conn->channel.tail_told, atomic_load(conn->channel.own_head) + (uint64_t)there);
			/* where the ring ends TCP goes on, if it is all there: the peer may have written more before it went back */
			if (unlikely((flags & MSG_PEEK) && *moved < wanted && conn_peer_back(conn)) &&
			    atomic_load(&conn->channel.remote->tx_back_at) == atomic_load(conn->channel.own_head) + *moved) {
				struct iovec rest[64];
				struct msghdr message = {
					.msg_iov = rest,
					.msg_iovlen = (size_t)iov_from(iov, iov_len, done + *moved, wanted - *moved, rest)};
				ssize_t n = raw_recvmsg(fd, &message, (flags & (MSG_PEEK | MSG_TRUNC)) | MSG_DONTWAIT);
				*moved += n > 0 ? (size_t)n : 0;
			}
			return STEP_DONE;
		}
		/* before a reset is told: what came by TCP ahead of it can still be read, as in the kernel */
		if (unlikely(conn_peer_back(conn)) && rx_back(conn, fd))
			return STEP_AGAIN;
		/* EPIPE (reset after FIN) is told to senders; a reader has had its end of file */
		int error = failed && word_load(slot->error) != EPIPE ? take_error(conn) : 0;
		if (error) {
			errno = error;
			return STEP_ERROR;
		}
		if (ended && conn_relayed(conn) && !(ended & (SLOT_RD_SHUT | SLOT_RESET)) &&
		    atomic_load(&conn->channel.remote->tx_fin_at) != atomic_load(conn->channel.own_head)) {
			conn_violation(conn, fd);
			errno = take_error(conn);
			return STEP_ERROR;
		}
		if (ended)
			return STEP_END;
		if (turn >= 2 || (!look && !slot_has(slot, SLOT_FIN | SLOT_RESET)))
			return STEP_EMPTY;
		if (!look)
			continue;
		conn_probe(conn, fd); /* then look at the ring once more: what was sent before the FIN is there now */
	}
}

static ssize_t native_recv(struct conn *conn, int fd, const struct iovec *iov, int iov_len, int flags)
{
	struct conn_slot *slot = conn->slot;
	struct msghdr message = {.msg_iov = (struct iovec *)iov, .msg_iovlen = (size_t)iov_len};

	atomic_fetch_add(&slot->rx_sitters, 1);
	full_fence();
	if (rx_consented(slot)) { /* declared meanwhile: back to watching both */
		atomic_fetch_sub(&slot->rx_sitters, 1);
		return -2;
	}
	ssize_t n = real.recvmsg(fd, &message, flags);
	if (n == 0 && conn_tcp_ended(conn, fd))
		n = -1;
	return native_rx_end(conn, fd, n, flags);
}

/* rx_lock held: the conn may be gone without it. */
static void rx_finish(struct conn *conn)
{
	full_fence(); /* between publishing head and reading want_space */
	if (unlikely(atomic_load_explicit(&conn->channel.rx_peer_line->want_space, memory_order_relaxed)))
		conn_ring(conn);
}

/* What the kernel would refuse. A bad pointer beyond the first page faults here, where the kernel says EFAULT. */
static bool iov_refused(const struct iovec *iov, int iov_len, int flags)
{
	if (iov_len < 0 || iov_len > IOV_MAX) {
		errno = EINVAL;
		return true;
	}
	if (iov_len && (uintptr_t)iov < 4096) {
		errno = EFAULT;
		return true;
	}
	for (int i = 0; i < iov_len; i++) {
		if ((ssize_t)iov[i].iov_len < 0) {
			errno = EINVAL;
			return true;
		}
		if (iov[i].iov_len && (uintptr_t)iov[i].iov_base < 4096 && !(flags & MSG_TRUNC)) {
			errno = EFAULT;
			return true;
		}
	}
	return false;
}

ssize_t conn_recv(struct conn *conn, int fd, const struct iovec *iov, int iov_len, int flags)
{
	if (unlikely(iov_refused(iov, iov_len, flags)))
		return -1;
	size_t total = iov_total(iov, iov_len), done = 0, moved = 0, target;
	struct wait_clock clock;
	bool started = false, look = false, timed = false, peek = flags & MSG_PEEK;
	int saved = errno;

	if (unlikely(flags & (MSG_OOB | MSG_ERRQUEUE))) {
		struct msghdr message = {.msg_iov = (struct iovec *)iov, .msg_iovlen = (size_t)iov_len};
		return real.recvmsg(fd, &message, flags);
	}
	pthread_testcancel();
	if (total == 0) { /* recv(2) of nothing waits for something all the same; read(2) of nothing does not come here */
		char byte;
		ssize_t n = conn_recv(conn, fd, &(struct iovec){&byte, 1}, 1, (flags & MSG_DONTWAIT) | MSG_PEEK);
		return n < 0 ? n : 0;
	}
	target = flags & MSG_WAITALL ? total : low_water(conn);
	if (target > total)
		target = total;
	if (peek && target > conn->channel.rx_size)
		target = conn->channel.rx_size;
	struct conn_slot *slot = conn->slot;
	ssize_t result;
	for (;;) {
		enum step step = STEP_CLOSED;

		/* every call moves the switch along, both directions: a program that only reads would never switch its sending */
		if (unlikely(!conn_switched(conn)) && conn->managed && conn_progress(conn, fd))
			set_conn_switched(conn);
		slot_lock(&slot->rx_lock);
		if (likely(atomic_load_explicit(&conn->managed, memory_order_relaxed))) {
			step = rx_step(conn, fd, iov, iov_len, done, total - done, flags, look, &moved);
			while (step == STEP_DONE && moved < total - done && !peek && rx_goes_on(conn, fd)) {
				size_t more = 0;
				if (rx_step(conn, fd, iov, iov_len, done + moved, total - done - moved, flags, false, &more) != STEP_DONE)
					break;
				moved += more;
			}
			if (likely(step == STEP_DONE && !peek))
				rx_finish(conn);
		}
		int error = errno;
		bool ended = slot_has(slot, SLOT_FIN | SLOT_RD_SHUT | SLOT_RESET) || rx_over(slot);
		bool listen = !(word_load(slot->rx_ring_msgs) % LISTEN_EVERY);
		slot_unlock(&slot->rx_lock);
		if (likely(step == STEP_DONE)) {
			if (unlikely(listen))
				rpc_listen();
			if (likely((peek ? moved : done + moved) >= target) || (peek && (ended || rx_divided(conn)))) {
				result = (ssize_t)(peek ? moved : done + moved);
				break;
			}
			if (!peek) {
				done += moved;
				continue;
			}
		} else if (step == STEP_AGAIN) {
			continue;
		} else if (step == STEP_NATIVE && !done) {
			result = native_recv(conn, fd, iov, iov_len, flags);
			if (result != -2) {
				saved = errno;
				break;
			}
			continue;
		} else if (step != STEP_EMPTY) {
			int left = fd;
			if (step == STEP_ERROR && error == EBADF && started && conn_stays(conn, &left) && left != fd) {
				fd = left; /* closed in the midst of this turn */
				continue;
			}
			result = (ssize_t)done;
			if (done && step == STEP_ERROR) {
				word_store(slot->error, (uint32_t)error); /* for the next call, which would take the end for a good one */
			} else if (step != STEP_END && !done) {
				result = -1;
				saved = step == STEP_CLOSED ? EBADF : error;
			}
			break;
		}
		/* Not enough there. Before saying so to a caller that does not wait, ask the native socket for the end. */
		if (look) {
			result = step == STEP_DONE ? (ssize_t)moved : (ssize_t)done;
			if (!result) {
				result = -1;
				saved = EAGAIN;
			}
			break;
		}
		if (heeds(conn) && conn_obey(conn, fd))
			set_conn_switched(conn);
		if (would_not_block(fd, flags)) {
			look = true;
			continue;
		}
		if (!started) {
			struct timeval limit = {0};
			socklen_t len = sizeof(limit);
			real.getsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, &len);
			timed = limit.tv_sec || limit.tv_usec;
			wait_clock_start(&clock, timed ? timeval_ns(&limit) : -1);
			atomic_fetch_add(&conn->waiters, 1);
			started = true;
		}
		int waited = conn_wait(conn, fd, WAIT_RX, peek ? target : 1, &clock, timed);
		if (waited == 0 && conn_stays(conn, &fd))
			continue;
		result = (ssize_t)done;
		if (!done) {
			bool over = waited == 0 && slot_has(slot, SLOT_RD_SHUT | SLOT_FIN | SLOT_RESET);
			result = over ? 0 : -1;
			saved = over ? saved : waited == 0 ? EBADF : waited == -ETIMEDOUT ? EAGAIN : -waited;
		}
		break;
	}
	if (started)
		atomic_fetch_sub(&conn->waiters, 1);
	errno = saved;
	return result;
}

/* Whether a process that lives has reserved the room behind the tail. One that was killed has not. */
bool conn_reserved(const struct conn *conn)
{
	struct conn_slot *slot = conn->slot;
	uint32_t pid = (uint32_t)(atomic_load(&slot->tx_reserver) >> 32);

	if (pid == shim_pid || !task_dead(pid, true))
		return true;
	slot_clear(slot, SLOT_RESERVED);
	return false;
}

static bool reserved_by_self(const struct conn *conn)
{
	return atomic_load(&conn->slot->tx_reserver) == ((uint64_t)shim_pid << 32 | self.tid);
}

/* tx_lock held. STEP_DONE: what comes next goes by ring, and there is *room. Inline: it is half of each send. */
static inline __attribute__((always_inline)) enum step tx_room(struct conn *conn, int fd, size_t wanted, size_t *room)
{
	struct conn_slot *slot = conn->slot;
	uint32_t flags;

again:
	if (unlikely(conn_recalled_since(conn)))
		tx_recalled(conn, fd);
	flags = word_load(slot->flags);
	if (unlikely(tx_is(slot, TX_RESEND)) && !tx_resend(conn, fd)) /* these come first, whatever has happened since */
		return STEP_EMPTY;
	if (unlikely(flags & (SLOT_WR_SHUT | SLOT_RESET | SLOT_PEER_GONE) || word_load(slot->error))) {
		if (!tx_by_ring(slot) && !(flags & SLOT_RESET))
			return STEP_NATIVE;
		int error = take_error(conn);
		socklen_t len = sizeof(error);
		if (!error && (flags & SLOT_WR_SHUT) && !(flags & SLOT_RESET))
			real.getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &len); /* told before EPIPE: sk_stream_error */
		if (!error && (flags & SLOT_PEER_GONE) && !(flags & (SLOT_RESET | SLOT_WR_SHUT)))
			return STEP_NATIVE; /* nobody is there: the kernel's answers are the right ones */
		errno = error ? error : EPIPE;
		return STEP_ERROR;
	}
	if (unlikely(!tx_by_ring(slot) && !tx_switch(conn, fd)))
		return STEP_NATIVE;
	if (unlikely(conn_notice(conn) || --conn->probe_countdown == 0)) {
		conn->probe_countdown = PROBE_EVERY;
		conn_probe(conn, fd);
		if (asked(conn))
			obey(conn, fd);
		if (slot_has(slot, SLOT_RESET | SLOT_PEER_GONE) || !tx_by_ring(slot))
			goto again;
	}
	if (unlikely(flags & SLOT_RESERVED) && conn_reserved(conn))
		return STEP_EMPTY;
	int64_t space = channel_tx_space(&conn->channel, wanted);
	if (unlikely(space < 0)) {
		conn_violation(conn, fd);
		errno = take_error(conn);
		return STEP_ERROR;
	}
	*room = (size_t)space;
	return space ? STEP_DONE : STEP_EMPTY;
}

static void tx_cpu(struct conn *conn)
{
	uint32_t cpu = cpu_now();

	if (word_load(conn->channel.tx_line->cpu) != cpu)
		atomic_store_explicit(&conn->channel.tx_line->cpu, cpu, memory_order_relaxed);
}

/* tx_lock held. Copies from iov, from byte `done` on, as much as fits; publishes in chunks. */
static enum step tx_step(struct conn *conn, int fd, const struct iovec *iov, int iov_len, size_t done, size_t wanted,
                         size_t *moved)
{
	struct conn_slot *slot = conn->slot;
	size_t room = 0;
	enum step step = tx_room(conn, fd, wanted, &room);

	if (unlikely(step != STEP_DONE))
		return step;
	size_t len = room < wanted ? room : wanted, sent = 0, skip = done;
	tx_cpu(conn);
	for (int i = 0; i < iov_len && sent < len; i++) {
		if (skip >= iov[i].iov_len) {
			skip -= iov[i].iov_len;
			continue;
		}
		const uint8_t *from = (const uint8_t *)iov[i].iov_base + skip;
		size_t part = iov[i].iov_len - skip < len - sent ? iov[i].iov_len - skip : len - sent;
		skip = 0;
		sent += part;
		while (part > PUBLISH_CHUNK) {
			channel_tx_put(&conn->channel, 0, from, PUBLISH_CHUNK);
			channel_tx_publish(&conn->channel, PUBLISH_CHUNK);
			full_fence();
			conn_ring(conn);
			from += PUBLISH_CHUNK;
			part -= PUBLISH_CHUNK;
		}
		channel_tx_put(&conn->channel, 0, from, part);
		/* one message becomes visible as one: pieces of a vector are published with the last of them */
		if (sent == len || part >= PUBLISH_CHUNK / 2) {
			channel_tx_publish(&conn->channel, part);
		} else {
			/* small piece: advance our tail without showing it */
			atomic_store_explicit(conn->channel.own_tail, *conn->channel.own_tail + part, memory_order_relaxed);
		}
	}
	atomic_store_explicit(&conn->channel.tx_line->tail, *conn->channel.own_tail, memory_order_release); /* W1 */
	word_store(slot->tx_ring_bytes, slot->tx_ring_bytes + len);
	word_store(slot->tx_ring_msgs, slot->tx_ring_msgs + 1);
	*moved = len;
	return STEP_DONE;
}

/* -2: the bytes do not go by TCP any more. */
static ssize_t native_send(struct conn *conn, int fd, const struct iovec *iov, int iov_len, int flags)
{
	struct conn_slot *slot = conn->slot;
	struct msghdr message = {.msg_iov = (struct iovec *)iov, .msg_iovlen = (size_t)iov_len};

	atomic_fetch_add(&slot->tx_sitters, 1);
	full_fence();
	uint32_t state = word_load(slot->tx_state);
	if (state == TX_RESEND || (state == TX_LEFT && !tx_follows(conn)) ||
	    ((state == TX_SWITCHING || tx_by_ring(slot)) && !slot_has(slot, SLOT_PEER_GONE))) {
		atomic_fetch_sub(&slot->tx_sitters, 1);
		return -2;
	}
	ssize_t n = real.sendmsg(fd, &message, flags);
	return native_tx_end(conn, fd, n);
}

static ssize_t send_failed(int error, int flags)
{
	if (error == EPIPE && !(flags & MSG_NOSIGNAL))
		raise(SIGPIPE); /* to this thread, as the kernel does */
	errno = error;
	return -1;
}

ssize_t conn_send(struct conn *conn, int fd, const struct iovec *iov, int iov_len, int flags)
{
	if (unlikely(iov_refused(iov, iov_len, flags)))
		return -1;
	size_t total = iov_total(iov, iov_len), done = 0, moved = 0;
	struct wait_clock clock;
	bool started = false, timed = false;
	int saved = errno;

	pthread_testcancel();
	if (total == 0 && tx_by_ring(conn->slot) && !word_load(conn->slot->error) &&
	    !slot_has(conn->slot, SLOT_WR_SHUT | SLOT_PEER_GONE | SLOT_RESET))
		return 0;
	struct conn_slot *slot = conn->slot;
	ssize_t result;
	int signal_error = 0;
	for (;;) {
		enum step step = STEP_CLOSED;
		bool moved_over = false;

		if (unlikely(!conn_switched(conn)) && conn->managed && conn_progress(conn, fd))
			set_conn_switched(conn);
		slot_lock(&slot->tx_lock);
		if (likely(atomic_load_explicit(&conn->managed, memory_order_relaxed))) {
			bool on_ring = tx_by_ring(slot);
			step = tx_step(conn, fd, iov, iov_len, done, total - done, &moved);
			moved_over = on_ring != (tx_by_ring(slot));
			if (likely(step == STEP_DONE)) {
				full_fence(); /* between publishing tail and reading the bell */
				conn_ring(conn);
			}
		}
		int error = errno;
		bool notice = step == STEP_DONE && conn_notice(conn);
		bool listen = conn->probe_countdown == PROBE_EVERY;
		slot_unlock(&slot->tx_lock);
		if (unlikely(listen))
			rpc_listen();
		if (unlikely(moved_over))
			set_conn_switched(conn);
		/* a recall may have crossed this message: it must go out again */
		if (unlikely(notice) && conn_stays(conn, &fd) && conn_obey(conn, fd))
			set_conn_switched(conn);
		if (likely(step == STEP_DONE)) {
			if (unlikely(!atomic_load_explicit(&trim_due, memory_order_relaxed)))
				atomic_store_explicit(&trim_due, true, memory_order_relaxed);
			done += moved;
			if (likely(done == total)) {
				result = (ssize_t)done;
				break;
			}
			continue;
		} else if (step == STEP_ERROR) {
			result = (ssize_t)done;
			if (!done) {
				result = -1;
				signal_error = error;
			} else if (error != EPIPE) {
				word_store(slot->error, (uint32_t)error); /* for the next call */
			}
			break;
		} else if (step == STEP_CLOSED) {
			result = done ? (ssize_t)done : -1;
			saved = done ? saved : EBADF;
			break;
		} else if (step == STEP_NATIVE) {
			if (likely(!done)) {
				result = native_send(conn, fd, iov, iov_len, flags);
				if (result == -2)
					continue;
				saved = errno;
				break;
			}
			/* what has gone by ring is of the same call: one that blocks is not short because of that */
			struct iovec rest[64];
			int rest_len = iov_from(iov, iov_len, done, SIZE_MAX, rest);
			result = native_send(conn, fd, rest, rest_len, flags | MSG_NOSIGNAL);
			if (result == -2)
				continue;
			if (result < 0 && errno != EAGAIN && errno != EINTR && errno != EPIPE)
				word_store(slot->error, (uint32_t)errno); /* for the next call */
			done += result > 0 ? (size_t)result : 0;
			if (result == (ssize_t)iov_total(rest, rest_len) && done < total)
				continue; /* more than 64 pieces */
			result = (ssize_t)done;
			break;
		}
		if (heeds(conn) && conn_obey(conn, fd))
			set_conn_switched(conn);
		if (unlikely(leave_half_closed(conn, fd))) {
			set_conn_switched(conn);
			continue;
		}
		if (would_not_block(fd, flags)) {
			/* remember that somebody waits for room, then look once more */
			atomic_fetch_or(&conn->channel.tx_line->want_space, WANT_STICKY);
			full_fence();
			set_conn_arm(conn, false);
			result = (ssize_t)done;
			if (done)
				break;
			if (conn_room(conn) > 0 && !tx_is(slot, TX_RESEND))
				continue;
			conn_probe(conn, fd);
			if (slot_has(slot, SLOT_PEER_GONE | SLOT_RESET) && !tx_is(slot, TX_RESEND))
				continue;
			result = -1;
			saved = EAGAIN;
			break;
		}
		if (unlikely(slot_has(slot, SLOT_RESERVED)) && reserved_by_self(conn)) {
			result = done ? (ssize_t)done : -1; /* it would wait for itself */
			saved = done ? saved : EDEADLK;
			break;
		}
		if (!started) {
			struct timeval limit = {0};
			socklen_t len = sizeof(limit);
			real.getsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, &len);
			timed = limit.tv_sec || limit.tv_usec;
			wait_clock_start(&clock, timed ? timeval_ns(&limit) : -1);
			atomic_fetch_add(&conn->waiters, 1);
			started = true;
		}
		size_t want = total - done < room_wanted(conn) ? total - done : room_wanted(conn);
		int waited = conn_wait(conn, fd, WAIT_TX, want, &clock, timed);
		if (waited == 0 && conn_stays(conn, &fd))
			continue;
		result = (ssize_t)done;
		if (!done) {
			result = -1;
			saved = waited == 0 ? EBADF : waited == -ETIMEDOUT ? EAGAIN : -waited;
		}
		break;
	}
	if (started)
		atomic_fetch_sub(&conn->waiters, 1);
	if (signal_error)
		return send_failed(signal_error, flags);
	errno = saved;
	return result;
}

/* Sends what was recalled, waiting a little where TCP's buffer is full. What cannot go out must not end as if it had. */
static void flush(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;

	for (int turn = 0; turn < FLUSH_TURNS && tx_is(slot, TX_RESEND); turn++) {
		slot_lock(&slot->tx_lock);
		bool done = !conn->managed || tx_resend(conn, fd);
		slot_unlock(&slot->tx_lock);
		struct pollfd room = {.fd = fd, .events = POLLOUT};
		if (!done)
			raw_poll(&room, 1, FLUSH_TURN_MS);
	}
	if (tx_is(slot, TX_RESEND)) {
		struct sockaddr none = {.sa_family = AF_UNSPEC};
		real.connect(fd, &none, sizeof(none)); /* a reset, and nothing read after what is missing: tcp_disconnect */
		slot_lock(&slot->tx_lock);
		if (tx_is(slot, TX_RESEND))
			tx_move(slot, TX_ON_RESENT);
		slot_unlock(&slot->tx_lock);
		shim_log("fd %d: reset, the bytes that the peer asked for again would not go out", fd);
	}
}

/* Before the end of our direction is told: what the peer has recalled goes first, and from then on it can recall nothing. */
void conn_end_sending(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;

	slot_lock(&slot->tx_lock);
	if (conn->managed && tx_is(slot, TX_RING)) {
		if (channel_decide(&conn->channel.local->tx_back, word_load(slot->tx_round), CHANNEL_ENDED) == CHANNEL_RECALLED)
			tx_back(conn, fd);
		else
			tx_move(slot, TX_ON_END);
	} else if (conn->managed && !tx_follows(conn)) {
		tx_recalled(conn, fd);
	}
	slot_unlock(&slot->tx_lock);
	if (tx_is(slot, TX_RESEND))
		flush(conn, fd);
}

/*
 * Neither direction goes on here: a socket in that state answers data with a reset (RFC 1122 4.2.2.13), which only the
 * kernel can send. What the ring holds already came in time.
 */
void conn_refuse(struct conn *conn)
{
	slot_lock(&conn->slot->rx_lock); /* or a consent that is being given would take it back */
	if (conn->managed) {
		atomic_fetch_or(&conn->channel.local->notice, CHANNEL_DEMOTE);
		full_fence();
		conn_ring(conn);
	}
	slot_unlock(&conn->slot->rx_lock);
}

/*
 * Both rings are full: two programs that send before they read, what TCP's larger buffers have room for. How far all has
 * come, by which a later look sees whether anybody has moved; 0: it is not so.
 */
uint64_t conn_stuck(const struct conn *conn)
{
	const struct channel_end *end = &conn->channel;

	if (!tx_by_ring(conn->slot) || !rx_by_ring(conn->slot))
		return 0;
	size_t room = channel_tx_peek(end), unread = channel_rx_peek(end);
	if (room >= room_wanted(conn) || unread > end->rx_size || end->rx_size - unread >= end->rx_size / 4)
		return 0;
	return 2 * (atomic_load(end->own_tail) + atomic_load(end->own_head)) + room + unread + 1; /* all heads and tails */
}

/* Nobody has moved for a while: ours goes on by TCP. True: it did now. */
bool conn_unstick(struct conn *conn, int fd, uint64_t since)
{
	return conn_stuck(conn) == since && leave(conn, fd, REASON_BOTH_WAYS_FULL);
}

/*
 * Has it no room, and does it not read what is there? Then how far it has read, as in conn_stuck(); else 0. By TCP there may
 * be bytes as well, behind which the peer's FIN would stand.
 */
static uint64_t unread(const struct conn *conn, int fd)
{
	struct pollfd native = {.fd = fd, .events = POLLIN};

	if (channel_tx_peek(&conn->channel) >= room_wanted(conn))
		return 0;
	if (raw_poll(&native, 1, 0) > 0 && (native.revents & POLLIN))
		return word_load(conn->slot->rx_tcp_bytes) + 1;
	return conn_stuck(conn);
}

/* False: it has sent since the last time, or its peer has not read all: it is to be looked at again. */
static bool trim(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;

	if (!conn->managed || tx_is(slot, TX_RESEND) || !slot_trylock(&slot->tx_lock))
		return true;
	uint64_t tail = conn->managed ? atomic_load(conn->channel.own_tail) : conn->idle_tail;
	bool idle = tail == conn->idle_tail;
	/* what was recalled has gone out by TCP: nobody reads it here */
	bool recalled = conn->managed && tx_is(slot, TX_TCP) &&
	                (atomic_load(&conn->channel.local->tx_back) == (word_load(slot->tx_round) << 2 | CHANNEL_RECALLED) ||
	                 atomic_load(&conn->channel.local->tx_follows) == (word_load(slot->tx_round) << 2 | CHANNEL_RECALLED));
	if (idle && tail != conn->trimmed_tail && !slot_has(slot, SLOT_RESERVED) &&
	    (recalled || channel_tx_unread(&conn->channel) == 0)) {
		channel_trim(&conn->channel);
		conn->trimmed_tail = tail;
	}
	conn->idle_tail = tail;
	bool trimmed = idle && tail == conn->trimmed_tail;
	uint64_t before = conn->unread, now = conn->managed && !trimmed ? unread(conn, fd) : 0;
	conn->unread = now;
	slot_unlock(&slot->tx_lock);
	/* for a second it has neither sent nor read; who reads may have to wait for nothing but a link between hosts */
	if (idle && unlikely(now && now == before) && leave(conn, fd, REASON_BOTH_WAYS_FULL))
		set_conn_switched(conn);
	return trimmed;
}

/* Who has sent nothing for a second gives its ring's pages back. For threads that are about to sleep; no lock is held. */
void conns_trim(int64_t now)
{
	static _Atomic int64_t trimmed_at;
	int64_t last = atomic_load_explicit(&trimmed_at, memory_order_relaxed);
	bool again = false;

	if (likely(!atomic_load_explicit(&trim_due, memory_order_relaxed) || now - last < TRIM_AFTER_NS) ||
	    !atomic_compare_exchange_strong(&trimmed_at, &last, now))
		return;
	atomic_store(&trim_due, false);
	for (uint32_t fd = 0; fd < atomic_load(&fd_end); fd++) {
		HELD conn = conn_hold((int)fd);
		if (conn)
			again |= !trim(conn, (int)fd);
	}
	if (again)
		atomic_store(&trim_due, true);
}

/* ---- in place: a program's own views of the rings (shim_views.c) ---- */

/* What there is to read by ring. 0: it is at *piece; -EAGAIN: nothing, or other bytes come first; recv() knows. */
int conn_look(struct conn *conn, int fd, struct sidestep_piece *piece)
{
	struct conn_slot *slot = conn->slot;
	int64_t there = 0;

	if (!conn->managed)
		return -EAGAIN;
	if (unlikely(!conn_switched(conn)) && conn_progress(conn, fd))
		set_conn_switched(conn);
	slot_lock(&slot->rx_lock);
	if (conn->managed && rx_by_ring(slot)) {
		there = channel_rx_avail(&conn->channel);
		piece->offset = (uint32_t)(atomic_load(conn->channel.own_head) & (conn->channel.rx_size - 1));
		piece->len = there > 0 ? (uint32_t)there : 0;
		channel_tell(&conn->channel.tail_told, atomic_load(conn->channel.own_head) + piece->len);
		piece->size = conn->channel.rx_size;
	}
	slot_unlock(&slot->rx_lock);
	return there > 0 ? 0 : -EAGAIN;
}

static uint64_t rx_position(struct conn_slot *slot)
{
	return word_load(slot->rx_tcp_bytes) + word_load(slot->rx_ring_bytes);
}

/* 0; -ESTALE: others have read since; -EAGAIN: the bytes are on TCP. */
int conn_consume(struct conn *conn, uint64_t position, size_t len)
{
	struct conn_slot *slot = conn->slot;
	int result = -EAGAIN;

	slot_lock(&slot->rx_lock);
	if (rx_position(slot) != position) {
		result = -ESTALE;
	} else if (conn->managed && rx_by_ring(slot)) {
		int64_t there = channel_rx_avail(&conn->channel);
		if (there >= 0 && (size_t)there >= len) {
			channel_rx_consume(&conn->channel, len);
			word_store(slot->rx_ring_bytes, slot->rx_ring_bytes + len);
			word_store(slot->rx_ring_msgs, slot->rx_ring_msgs + 1);
			rx_finish(conn);
			result = 0;
		}
	}
	slot_unlock(&slot->rx_lock);
	return result;
}

/*
 * Room behind the tail, to be filled in place. Until it is committed or given back nobody else sends by ring, in this
 * process or another: a send waits, as if the room were taken. 0; -EAGAIN: there is none; -ENOTCONN: the bytes do not go
 * by ring, or send() has to tell why they go nowhere; -EDEADLK: this thread has the room already.
 */
int conn_reserve(struct conn *conn, int fd, size_t wanted, struct sidestep_piece *piece)
{
	struct conn_slot *slot = conn->slot;
	enum step step = STEP_NATIVE;
	bool moved_over = false;
	size_t room = 0;

	/* a sleeper of another process would not be told when the room is given back */
	if (!conn->managed || !conn_alone(conn))
		return -ENOTCONN;
	if (unlikely(!conn_switched(conn)) && conn_progress(conn, fd))
		set_conn_switched(conn);
	slot_lock(&slot->tx_lock);
	if (conn->managed) {
		bool on_ring = tx_by_ring(slot);
		uint32_t error = word_load(slot->error);
		step = error || slot_has(slot, SLOT_WR_SHUT | SLOT_RESET | SLOT_PEER_GONE) ? STEP_NATIVE
		                                                                          : tx_room(conn, fd, wanted, &room);
		moved_over = on_ring != (tx_by_ring(slot));
	}
	if (step == STEP_DONE) {
		uint64_t tail = atomic_load(conn->channel.own_tail);
		piece->serial = conn->serial;
		piece->position = tail;
		piece->offset = (uint32_t)(tail & (conn->channel.tx_size - 1));
		piece->len = (uint32_t)(room < wanted ? room : wanted);
		piece->size = conn->channel.tx_size;
		atomic_store(&slot->tx_reserver, (uint64_t)shim_pid << 32 | self.tid);
		slot_set(slot, SLOT_RESERVED);
	}
	slot_unlock(&slot->tx_lock);
	if (unlikely(moved_over))
		set_conn_switched(conn);
	if (step != STEP_EMPTY)
		return step == STEP_DONE ? 0 : -ENOTCONN;
	if (slot_has(slot, SLOT_RESERVED) && reserved_by_self(conn))
		return -EDEADLK;
	atomic_fetch_or(&conn->channel.tx_line->want_space, WANT_STICKY);
	full_fence();
	set_conn_arm(conn, false);
	return -EAGAIN;
}

static void unreserve(struct conn *conn)
{
	slot_clear(conn->slot, SLOT_RESERVED); /* full fence: those that wait store want_space, then look */
	if (conn->managed && atomic_load(&conn->channel.tx_line->want_space))
		conn_wake_own(conn);
}

/* Sends what was written there. 0; -ENOTCONN: it does not go by ring any more, and is reserved as before. */
int conn_commit(struct conn *conn, int fd, const struct sidestep_piece *piece, size_t len)
{
	struct conn_slot *slot = conn->slot;
	bool done = false;

	slot_lock(&slot->tx_lock);
	if (conn->managed && conn->serial == piece->serial && slot_has(slot, SLOT_RESERVED) && len <= piece->len &&
	    (uint32_t)(atomic_load(&slot->tx_reserver) >> 32) == shim_pid && /* a child of fork() has it only by memory */
	    tx_by_ring(slot) && atomic_load(conn->channel.own_tail) == piece->position &&
	    !slot_has(slot, SLOT_WR_SHUT | SLOT_RESET | SLOT_PEER_GONE) && !word_load(slot->error)) {
		tx_cpu(conn);
		channel_tx_publish(&conn->channel, len);
		word_store(slot->tx_ring_bytes, slot->tx_ring_bytes + len);
		word_store(slot->tx_ring_msgs, slot->tx_ring_msgs + 1);
		full_fence(); /* between publishing tail and reading the bell */
		conn_ring(conn);
		unreserve(conn);
		done = true;
	}
	slot_unlock(&slot->tx_lock);
	if (!done)
		return -ENOTCONN;
	if (unlikely(conn_notice(conn)) && conn_obey(conn, fd)) /* a recall may have crossed it, as in conn_send() */
		set_conn_switched(conn);
	if (unlikely(!atomic_load_explicit(&trim_due, memory_order_relaxed)))
		atomic_store_explicit(&trim_due, true, memory_order_relaxed);
	return 0;
}

/* Gives the room back, if it is this process that has it. */
void conn_unreserve(struct conn *conn, uint64_t serial)
{
	struct conn_slot *slot = conn->slot;

	slot_lock(&slot->tx_lock);
	if (conn->serial == serial && slot_has(slot, SLOT_RESERVED) &&
	    (uint32_t)(atomic_load(&slot->tx_reserver) >> 32) == shim_pid)
		unreserve(conn);
	slot_unlock(&slot->tx_lock);
}
