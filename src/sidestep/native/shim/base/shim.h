/*
 * shim.h - what the files of libsidestep.so share.
 *
 * The application's fd is its TCP socket, always. fd_table maps an fd number to the shim's record of it: none (the real call
 * is made at once), a connection, an epoll set, or a descriptor of the shim's own.
 *
 * A connection has three parts. `struct conn` is private to the process. Its `struct conn_slot` in the arena is shared by the
 * process family (fork, exec), and has the locks and the authoritative positions. Once it is attached, the channel segment is
 * shared with the peer. A conn is *managed* while it holds a segment; then every call goes through conn_send/conn_recv.
 *
 * Lock order: shim_lock, set lock, rx_lock, tx_lock. Nothing blocks while holding one. A critical section defers signal
 * handlers (shim_signal.c), so a handler may call any hooked function.
 */
#ifndef SIDESTEP_SHIM_H
#define SIDESTEP_SHIM_H

#include "shim_base.h" /* first: it asks libc for all it has */

#include <elf.h>
#include <limits.h>

#include "channel.h"

/* Idle time after which ring pages are freed. It is no full second: messages that come each second would meet the timer. */
#define TRIM_AFTER_NS 1300000000ll
#define FD_TABLE_SIZE (1u << 20) /* descriptors beyond it are not tracked and stay on TCP */

enum file_kind {
	FILE_CONN = 1,
	FILE_SET = 2,
	FILE_OWN = 3,
	FILE_CLOSING = 4,
	FILE_EXPLICIT = 5,
	FILE_LISTENER = 6,
	FILE_RING = 7, /* an io_uring whose entries are looked through (shim_ring.c) */
};

struct file {
	uint8_t kind;
};

/* channel_producer.want_space: threads waiting for room, and a bit for those that will ask again */
#define WANT_STICKY (1u << 31)

/* Length of spins in waits, adapted to how many paid lately: see spin_adapt(). */
struct spin_budget {
	_Atomic uint32_t ns;
	_Atomic uint32_t wasted; /* spins that lost, less those that won */
	_Atomic int64_t rests_until; /* no wait spins before */
	_Atomic bool idle; /* True if the last wait was longer than SELDOM_NS. */
};

#define OLD_DOORBELLS_MAX 8 /* programs that a peer becomes, one after the other; from then on it is rung always */

struct conn {
	/* A late thread may look at these while the struct is reused for another connection. */
	struct file file; /* a kind that never changes */
	_Atomic uint32_t refs; /* descriptors and waiting threads of this process; 0: the struct is free */
	_Atomic uint64_t serial; /* unique in the process; word_load() and word_store() without a reference */
	/* Only a holder of a reference may look at the fields below. */
	_Atomic uint8_t managed; /* holds a segment */
	_Atomic bool nonblock; /* the value as far as we have seen it set; decides about spinning only */
	_Atomic int brief_fd[2]; /* + 1: receives and sends by it waited briefly, without a limit; see call_blocks() */
	_Atomic bool waited; /* seen in a hooked poll, select or epoll set */
	_Atomic int stale_fd; /* + 1: a number in the table that the kernel has given to another file; 0: none is known */
	_Atomic bool heritable; /* the program has taken FD_CLOEXEC from a number of it */
	uint32_t generation; /* generation of the slot */
	struct conn_slot *slot;
	_Atomic uint32_t fds; /* descriptors of this process */
	_Atomic uint32_t calls; /* calls since birth or the last refused offer */
	_Atomic uint32_t bucket_seen;
	_Atomic uint32_t bucket_index; /* + 1; 0: not computed */
	_Atomic uint32_t bucket_epoch; /* epoch of the registry in which it is a bucket */
	_Atomic uint32_t backoff;
	_Atomic int64_t again_at; /* coarse ns; nothing is offered before it */
	/* Gain and loss of its way to another host, as the provider has measured them; message_ns 0: it need not gain. */
	_Atomic uint64_t message_ns, mib_ns, turn_ns;
	_Atomic uint32_t gain_serial; /* provider.lost then */
	_Atomic uint64_t counted_msgs, counted_bytes, counted_turns; /* counts at the last look at its gain */
	uint32_t probe_countdown;
	struct spin_budget budget; /* budget of blocking waits */
	_Atomic uint32_t linger_skips, linger_pause; /* see conn_lingers() */
	_Atomic uint64_t turn_msgs, turn_sleeps, turn_sent, turn_bytes; /* counts at `turns_at`: spin_stack() */
	_Atomic int64_t turns_at;
	_Atomic uint64_t refusing; /* a number that does not block + 1; age of that; how often to trust it: refuses() */
	struct channel_end channel;
	struct doorbell *doorbell; /* ours: the peer rings it */
	struct remote_doorbell *remote_doorbell; /* the peer's: we ring it */
	struct explicit *explicit; /* NULL: an ordinary socket; else a reference */
	struct member *members; /* registrations in epoll sets; guarded by shim_lock */
	int pending_segment_fd; /* segment of a pending offer; else -1 */
	int segment_fd; /* kept for the next program; else -1; see shim_travel.c */
	uint64_t segment_inode;
	_Atomic uint32_t in_messages; /* messages to this process that hold the socket, unless they were thrown away */
	bool taken_up; /* a connection from the program before: the peer does not look at our doorbell's word */
	uint64_t announced_nonce; /* nonce by which it was named last; 0: it was not */
	uint32_t announced_by; /* serial of the provider connection by which the peer learned of it; 0: it did not */
	uint32_t announce_waits, old_doorbells_len;
	int64_t announce_again_at; /* time at which it is named again */
	uint64_t nonce_named,
		nonce_alone; /* a relay: our last `doorbell_nonce`, and the one by which it has our doorbell alone */
	struct remote_doorbell *old_doorbells[OLD_DOORBELLS_MAX]; /* that the peer had before; see shim_new_doorbell.c */
	_Atomic uint64_t idle_tail; /* tail of our ring when it was last looked at; see trim() */
	_Atomic uint64_t trimmed_tail; /* tail of our ring when its pages were last released */
	_Atomic uint64_t idle_from; /* ring_from then: nothing has been spilled since if it still is */
	_Atomic uint64_t stalled_at; /* last result of stalled_at() in shim_idle.c */
	_Atomic uint64_t full_head; /* position of the peer when a sender found no room, */
	_Atomic int64_t full_since; /* and when that was first so; see steps_stood() */
	_Atomic uint64_t
		leave_tail; /* with SLOT_LEAVES: bytes of the ring up to there were reported, or will be looked for */
	_Atomic uint32_t waiters; /* threads in a call on it that has slept */
	_Atomic int deferred_fd; /* a copy of the socket for waiters that outlive close(); else -1 */
	uint64_t token;
	/* serial of the provider connection that took a duplicate of the socket and has not answered; shim_lock to write */
	_Atomic uint32_t delegated;
	struct conn *loose_next,
		**loose_at; /* neighbours in the list of its doorbell; NULL: in none. Guarded by shim_lock */
	struct conn *next_free;
};

/* A hint, read without the lock: before acting on it, take the lock and look again. */
static inline bool has_members(struct conn *conn)
{
	return __atomic_load_n(&conn->members, __ATOMIC_RELAXED) != NULL;
}

/* A wake-up target: one word a peer reads, and an eventfd it rings. word: sleepers in bits 0-15, generation above. */
struct doorbell {
	_Atomic uint64_t *word;
	struct hint_ring *hints;
	int fd;
	int wait_fd; /* descriptor for sleeps: `fd`, or a set with it and `old_fd` */
	int old_fd; /* doorbell of the last program: peers of its connections ring it, until they know ours; else -1 */
	uint32_t old_users; /* connections whose peers do */
	int page_fd;
	uint8_t id[16];
	uint32_t index;
	uint64_t serial; /* unique in the process: descriptor numbers come again, serials do not */
	_Atomic uint32_t refs;
	struct conn *loose; /* connections that it wakes for and that are in no set, which would look at them; shim_lock */
	_Atomic uint32_t loose_len;
};

struct remote_doorbell {
	const _Atomic uint64_t *word; /* word in a page mapped read-only */
	const struct hint_ring *hints; /* NULL: the peer gives none */
	int fd;
	uint8_t id[16];
	uint32_t index;
	uint32_t refs;
	_Atomic uint64_t rung; /* generation this process rang last */
	int liveness_fd; /* pipe of a provider that stands between: hangs up when it dies; else -1 */
	_Atomic bool dead; /* true once it has */
	struct remote_doorbell *next;
	int page_fd; /* kept for the next program; else -1 */
	uint64_t page_inode;
	void *page;
	size_t page_len;
};

extern _Atomic(struct file *) *fd_table;
extern uint32_t fd_table_len; /* 0 until the shim is up */

/* ---- descriptor table (shim.c) ---- */
static inline struct file *file_get(int fd)
{
	if (unlikely((uint32_t)fd >= fd_table_len))
		return NULL;
	return atomic_load_explicit(&fd_table[fd], memory_order_acquire);
}
static inline struct conn *conn_get(int fd)
{
	struct file *file = file_get(fd);

	return likely(!file) ? NULL : file->kind == FILE_CONN ? (struct conn *)file : NULL;
}
void file_put(int fd, struct file *file); /* sets the entry */
extern struct file listener_file; /* the entry of a tracked listener in opt-in mode */
extern struct file closing_file; /* the entry of a promoted connection's number until the kernel has closed it */
void file_closed(int fd); /* removes that entry */
static inline bool file_closing(int fd)
{
	struct file *file = file_get(fd);

	return unlikely(file && file->kind == FILE_CLOSING);
}
extern _Atomic uint32_t own_first, own_end; /* the shim's own descriptors lie between */
extern _Atomic uint32_t fd_end; /* no entry at this number or above */
int own_fd(int fd); /* moves fd high, marks it as the shim's; returns the new number or -1 */
void own_fd_close(int fd);

/* ---- slot locks (shim_slot_lock.c): the holder's tid; a dead holder's lock is taken over ---- */
void slot_lock_slow(_Atomic uint32_t *lock);
extern bool arena_shared; /* true with a parent or children */

static inline void slot_lock(_Atomic uint32_t *lock)
{
	uint32_t expected = 0, tid = likely(self.tid) ? self.tid : thread_init();

	critical_enter();
	if (unlikely(
			!atomic_compare_exchange_strong_explicit(lock, &expected, tid, memory_order_acquire, memory_order_relaxed)))
		slot_lock_slow(lock);
}
bool slot_trylock(_Atomic uint32_t *lock);
static inline void slot_unlock(_Atomic uint32_t *lock)
{
	atomic_store_explicit(lock, 0, memory_order_release);
	critical_leave();
}

/* ---- arena and connections (shim_arena.c to shim_close.c; between them: shim_switch.h) ---- */
int arena_open(void);
int arena_reader_fd(void); /* a read-only descriptor of the arena, to be closed by the caller */
int arena_path_fd(void); /* a descriptor that is a path and nothing more */
extern uint8_t arena_id[16], family_id[16]; /* ours, and by which peers know us */
struct conn *conn_new(int fd, int family, enum role_code role);
void conn_ref(struct conn *conn);
void conn_unref(struct conn *conn);
bool conn_tryref(struct conn *conn, int fd);
/*
 * Holds the connection behind a number as long as the variable lives. Another thread may close the number at any time, and
 * the struct is then reused for another connection.
 */
#define HELD struct conn *__attribute__((cleanup(conn_release)))
static inline struct conn *conn_hold(int fd)
{
	struct conn *conn = conn_get(fd);

	return likely(!conn) || !conn_tryref(conn, fd) ? NULL : conn;
}
static inline void conn_release(struct conn **conn)
{
	if (*conn)
		conn_unref(*conn);
}
/* Names the socket option that is about to become the reason. */
static inline void option_reason(struct conn *conn, int level, int name)
{
	word_store(conn->slot->option_level, (uint32_t)level);
	word_store(conn->slot->option_name, (uint32_t)name);
}
void conn_pin(struct conn *conn, enum reason_code reason);
void conn_forget(int fd, bool closing); /* takes the fd out of the table, as close() does */
bool conn_join(struct conn *conn, int fd);
void conns_before_fork(void);
void conns_after_fork(void);
void conn_family_exit(void);
void conn_set_addresses(struct conn *conn, int fd);
int conn_attach(struct conn *conn, int fd, int segment_fd, int side, struct remote_doorbell *remote,
                struct doorbell *local);
int conn_fd(const struct conn *conn);
#define REFUSING_AGE 64u /* unit of conn->refusing's age, below which it counts */
static inline void refusing_ends(struct conn *conn)
{
	uint64_t old = atomic_load(&conn->refusing);

	while (!atomic_compare_exchange_weak(&conn->refusing, &old, (uint32_t)((old | (REFUSING_AGE - 1)) + 1)))
		;
}
bool conn_stays(struct conn *conn, int *fd);
bool conn_progress(struct conn *conn, int fd);
void conn_probe(struct conn *conn, int fd);
bool conn_fd_stale(struct conn *conn, int fd);
bool conn_drop_stale_found(struct conn *conn, int fd);
/* The number is another's, as conn_fd_stale() has found: it is no entry of the table from now on. No lock may be held. */
static inline bool conn_drop_stale(struct conn *conn, int fd)
{
	return unlikely(word_load(conn->stale_fd) == fd + 1) && conn_drop_stale_found(conn, fd);
}
size_t room_wanted(const struct conn *conn);
bool conn_make_room(struct conn *conn, bool hurries);
void conn_bound(struct conn *conn, int fd);
void conn_demote(struct conn *conn, int fd, enum reason_code reason, bool recall);
void conn_leave(struct conn *conn, int fd, enum reason_code reason);
void conn_leave_drained(struct conn *conn, int fd);
void conn_end_sending(struct conn *conn, int fd);
void conn_refuse(struct conn *conn);
void conn_wake_own(struct conn *conn);
bool conn_handle_notice(struct conn *conn, int fd);
static inline uint32_t conn_notice(const struct conn *conn)
{
	return word_load(conn->channel.remote->notice);
}
/* A provider stands between the two ends: what it publishes and what TCP tells come in any order. */
static inline bool conn_relayed(const struct conn *conn)
{
	return unlikely(slot_has(conn->slot, SLOT_RELAYED));
}
bool conn_relay_news(const struct conn *conn); /* conn_probe() has something to do */
bool recall_open(const struct conn *conn); /* no thread may read TCP yet */
bool conn_end_withheld(const struct conn *conn); /* the kernel's end is reported already, and the ring's is not */
bool conn_fin_waits(struct conn *conn, int fd); /* the same, and TCP has no bytes that may be read */
void conn_liveness_check(const struct conn *conn, const struct remote_doorbell **last);
/* True if the peer's sending direction has gone back to TCP in the round we are in. */
static inline bool conn_peer_back(const struct conn *conn)
{
	uint32_t round = word_load(conn->slot->rx_round);

	if (likely(atomic_load_explicit(&conn->channel.remote->tx_back, memory_order_acquire) !=
	           (round << 2 | CHANNEL_BACK)))
		return false;
	uint32_t follows = atomic_load_explicit(&conn->channel.remote->tx_follows, memory_order_acquire);
	return follows >> 2 != round || (follows & 3) == CHANNEL_BACK; /* else we have recalled it since */
}
/* True if it has gone to the ring in the round we are in. */
static inline bool conn_peer_switched(const struct conn *conn)
{
	uint32_t round = word_load(conn->slot->rx_round);

	return round && atomic_load_explicit(&conn->channel.remote->tx_switched, memory_order_acquire) == round;
}
/* True if it has, and we have read all that TCP brought before. */
static inline bool conn_tcp_read(const struct conn *conn)
{
	return conn_peer_switched(conn) &&
	       word_load(conn->channel.remote->tx_switch_offset) <= word_load(conn->slot->rx_tcp_bytes);
}
/* True if requests have to be looked for: the peer has set a notice, or a provider between has to acknowledge our words. */
static inline bool conn_must_check(const struct conn *conn)
{
	return unlikely(conn_notice(conn)) || conn_relayed(conn);
}
bool conn_tcp_requested(const struct conn *conn);
bool conn_judges_end(const struct conn *conn);
bool conn_recalled_since(const struct conn *conn);
bool conn_promote(struct conn *conn, int fd, uint32_t kept);
struct conn *conn_find(const struct conn_slot *slot, uint32_t generation, int *fd);
void conn_violation(struct conn *conn, int fd);
uint32_t conn_ready(struct conn *conn, int fd, uint32_t kernel_bits, uint32_t interest);
uint32_t conn_watched(struct conn *conn, int fd, uint32_t events, bool withheld);
ssize_t conn_send(struct conn *conn, int fd, const struct iovec *iov, int iov_len, int flags);
size_t send_put_off(struct conn *conn);
struct beside; /* shim_call.h */
ssize_t conn_recv_beside(struct conn *conn, int fd, const struct iovec *iov, int iov_len, int flags,
                         struct beside *beside);
static inline ssize_t conn_recv(struct conn *conn, int fd, const struct iovec *iov, int iov_len, int flags)
{
	return conn_recv_beside(conn, fd, iov, iov_len, flags, NULL);
}
extern _Atomic bool trim_due; /* bytes have gone by ring since the last conns_trim() that found none */
void conns_trim(int64_t now);
bool conn_alone(struct conn *conn);
bool holder_put(struct conn_slot *slot, uint32_t before, uint32_t after); /* false: `before` is not there */
void holder_estrange(struct conn_slot *slot, bool stranger);
bool holders_are_strangers(const struct conn_slot *slot);
static inline bool conn_switched(const struct conn *conn)
{
	return rx_by_ring(conn->slot) && tx_by_ring(conn->slot);
}
void set_conn_switched(struct conn *conn); /* tells the sets that a direction has moved */
/* ---- a socket that is held by programs that were started (shim_inherited.c) ---- */
void kept_look(struct conn *conn);
void inheriting_begin(void);
void inheriting_end(void);
void inherited_after_fork(void);
static inline void conn_check_inherited(struct conn *conn)
{
	if (unlikely(slot_has(conn->slot, SLOT_INHERITED | SLOT_CONFINED)))
		kept_look(conn);
}
/* Every call advances the switch-over of both directions, or a program that only reads would never switch its sending. */
static inline void conn_advance(struct conn *conn, int fd)
{
	if (likely(conn_switched(conn)))
		return;
	conn_check_inherited(conn);
	if (conn->managed && conn_progress(conn, fd))
		set_conn_switched(conn);
}
/* Honours what the peer asks for, if it asks for anything. */
static inline void conn_check(struct conn *conn, int fd)
{
	if (conn_must_check(conn) && conn_handle_notice(conn, fd))
		set_conn_switched(conn);
}
bool conn_tcp_ended(struct conn *conn, int fd);
size_t conn_unread(struct conn *conn, size_t queued);
bool conn_reserved(const struct conn *conn);
/* Bytes that the next call could send by ring; as channel_tx_peek(). */
static inline size_t conn_room(const struct conn *conn)
{
	return unlikely(slot_has(conn->slot, SLOT_RESERVED)) && conn_reserved(conn) ? 0 : channel_tx_peek(&conn->channel);
}

/* No other thread or process changes the words of its slot. */
static inline bool conn_mine(const struct conn *conn)
{
	return *one_thread && word_load(conn->slot->holders) == 1;
}
bool kernel_rx_begin(struct conn *conn);
ssize_t kernel_rx_end(struct conn *conn, int fd, ssize_t result, int flags);
bool kernel_tx_begin(struct conn *conn);
ssize_t kernel_tx_end(struct conn *conn, int fd, ssize_t result);
/*
 * Makes the program's call unchanged, between kernel_rx_begin() or kernel_tx_begin() and its end. A thread that is
 * cancelled in it is not counted as a waiter any more.
 */
static inline void kernel_rx_cancelled(struct conn **waiting_conn)
{
	if (unlikely(*waiting_conn))
		atomic_fetch_sub(&(*waiting_conn)->slot->rx_kernel_waiters, 1);
}
static inline void kernel_tx_cancelled(struct conn **waiting_conn)
{
	if (unlikely(*waiting_conn))
		atomic_fetch_sub(&(*waiting_conn)->slot->tx_kernel_waiters, 1);
}
#define KERNEL_RX(conn, fd, call, flags) \
	({ \
		struct conn *waiting_conn __attribute__((cleanup(kernel_rx_cancelled))) = (conn); \
		ssize_t result_of_call = (call); \
		waiting_conn = NULL; \
		kernel_rx_end(conn, fd, result_of_call, flags); \
	})
#define KERNEL_TX(conn, fd, call) \
	({ \
		struct conn *waiting_conn __attribute__((cleanup(kernel_tx_cancelled))) = (conn); \
		ssize_t result_of_call = (call); \
		waiting_conn = NULL; \
		kernel_tx_end(conn, fd, result_of_call); \
	})

/* The latest end of a sleep: a thread must release the pages of idle rings, and make room behind a reader that stands still. */
static inline int64_t sleep_deadline(int64_t deadline, int64_t now)
{
	if (word_load(trim_due) && deadline - now > TRIM_AFTER_NS)
		deadline = now + TRIM_AFTER_NS;
	if (unlikely(self.serve_at) && self.serve_at < deadline)
		deadline = self.serve_at;
	return unlikely(self.full_until && self.full_until < deadline) ? self.full_until : deadline;
}

static inline void look_again_until(int64_t when)
{
	if (!self.full_until || when < self.full_until)
		self.full_until = when;
}

/* ---- waiting (shim_doorbell.c, shim_spin.c, shim_wait.c) ---- */
enum { WAIT_RX = 1, WAIT_TX = 2 };
struct doorbell *doorbell_new_locked(void); /* shim_lock held */
struct doorbell *doorbell_successor_locked(int old_fd); /* likewise; takes over that eventfd */
void doorbell_known(struct doorbell *doorbell); /* shim_lock held: one connection more needs the old one no more */
void thread_register(void); /* this thread owns descriptors that must go with it */
int sleep_poll(struct pollfd *fds, nfds_t fds_len, int64_t deadline, uint64_t signals, const sigset_t *mask);
int sleep_epoll(int epfd, struct epoll_event *events, int max, int64_t deadline, uint64_t signals);
int sleep_receiving(struct conn *conn, int fd, int64_t deadline, uint64_t signals, int *error);
struct doorbell *doorbell_self(void); /* this thread's, made on first use; NULL when out of resources */
void doorbell_unref(struct doorbell *doorbell);
void doorbells_wake(struct doorbell *const *doorbells,
                    uint32_t len); /* ends sleeps on them, and drops the references */
struct remote_doorbell *remote_doorbell_get(const uint8_t id[16], uint32_t index, int event_fd, int page_fd,
                                            int liveness_fd);
void remote_doorbell_unref(struct remote_doorbell *doorbell);
void doorbell_ring_slow(struct conn *conn, struct remote_doorbell *doorbell, uint64_t word);
bool futex_ring(_Atomic uint32_t *asleep);
void conn_hint(struct conn *conn, uint32_t number);
static inline void doorbell_ring(struct conn *conn) /* the caller has made a full fence since it published */
{
	/* acquire: a thread that sees the bit gone finds the new doorbell */
	uint32_t number = atomic_load_explicit(&conn->channel.remote->hint, memory_order_acquire);
	if (unlikely(number))
		conn_hint(conn, number);
	/* loaded once: the generation is that doorbell's, even if another thread puts another in its place */
	struct remote_doorbell *doorbell = __atomic_load_n(&conn->remote_doorbell, __ATOMIC_ACQUIRE);
	uint64_t word = word_load(*doorbell->word);

	if (unlikely(word & 0xffff))
		doorbell_ring_slow(conn, doorbell, word);
}
/* Call after a publication: the peer looks for it once more before it sleeps, or wakes. */
static inline void peer_wake(struct conn *conn)
{
	full_fence(); /* fence between publishing and reading the doorbell */
	doorbell_ring(conn);
}
int self_doorbell_fd(struct doorbell *const *doorbells,
                     int doorbells_len); /* epoll fd to sleep on, holding these doorbells */
void self_doorbells_clear(void);
void self_sets_close(void); /* sets on which this thread sleeps */
void self_liveness_watch(const struct conn *conn);
bool conn_liveness_watch(const struct conn *conn, int epfd, uint64_t data);
void doorbells_after_fork(void);

/* ---- connections that nobody waits on (shim_serve.c) ---- */
void conn_loose(struct conn *conn); /* shim_lock held: it is in no set any more, or has its channel */
void conn_unloose(struct conn *conn); /* shim_lock held: the opposite */
extern _Atomic bool rings_ever; /* true in this process, or one it was forked from: each wait looks for the provider */
int64_t conns_serve(struct doorbell *const *doorbells, uint32_t len, uint32_t looked_at, int64_t deadline);
void conns_serve_segment(const uint8_t segment_id[16]);
void serve_after_fork(void);
static inline bool conn_is_loose(const struct conn *conn)
{
	return __atomic_load_n(&conn->loose_at, __ATOMIC_RELAXED) != NULL;
}

/* ---- provider (shim_provider.c to shim_rpc.c; between them: shim_provider.h) ---- */
extern _Atomic uint32_t rpc_pending;
void rpc_poll(void);
extern _Atomic bool announce_due; /* a peer rings always, or a child may execute a program: shim_new_doorbell.c */
void new_doorbells_on_exec(int change); /* 1: holders may be others than it seems, until -1; no lock held */
void rpc_listen(void); /* runs the provider's commands, and checks now and then that it is alive; no lock may be held */
void rpc_listen_passing(void);
void rpc_watch(int epfd, _Atomic uint32_t *watched, uint64_t data);
void rpc_consider(struct conn *conn, int fd); /* offers or claims when the time has come */
void rpc_reconsider(struct conn *conn, int fd);
void rpc_return(struct conn *conn, int fd);
void rpc_withdraw(struct conn *conn);
void rpc_after_fork(void);
void rpc_ensure(void);
void rpc_introduce(void);
void rpc_before_exec(void);
void rpc_serve(const struct conn *conn);
bool rpc_reaches_far(void);
bool rpc_delegated(struct conn *conn);

struct rpc_answer {
	uint32_t error; /* errno that the call fails with; 0: none */
	uint32_t reason; /* Refusal: the call goes on, natively; 0: all is well */
	uint8_t local_addr[16], remote_addr[16];
	uint16_t local_port, remote_port;
};
bool rpc_asks_connect(void); /* an ordinary socket asks before it connects to another host */
bool rpc_carries_far(void); /* the provider carries connections with other hosts, or it is not known yet */
/* Waits for the provider, for a bounded time. 0: *answer is its answer; -ENOTCONN: there is none; -ETIMEDOUT. */
int rpc_ask(struct rpc_msg *record, const int *fds, int fds_len, struct rpc_answer *answer);
enum reason_code rpc_refusal_reason(uint32_t refusal);
/* Replaces the addresses of a connection with the provider by the true ones; either may be NULL. */
bool address_translate(int fd, struct sockaddr_storage *local, struct sockaddr_storage *remote);

/* ---- explicit sockets (shim_explicit.c) ---- */

/*
 * A socket that was opened as explicit (AF_INET_OFFLOAD) or direct (AF_INET_DIRECT). Its connection holds this struct. A
 * listener or a datagram socket has no connection: there the struct is the table's entry of its numbers.
 */
struct explicit
{
	struct file file; /* FILE_EXPLICIT */
	bool direct; /* native only, never offered */
	bool stream;
	uint16_t family; /* AF_INET, AF_INET6: what the kernel has */
	uint32_t protocol; /* number of the offload protocol asked for; 0: any */
	_Atomic uint32_t refs; /* connections and numbers of this process, and calls at work with it */
	int lease_fd; /* the writing end of a pipe: the port is released when the last process has closed it; else -1 */
	struct explicit *next_free;
	struct explicit *next; /* link of the list of all */
};
#define HELD_EXPLICIT struct explicit *__attribute__((cleanup(explicit_release)))
extern _Atomic bool explicit_any; /* true once there has been one in this process, or in one that it was forked from */
bool explicit_wanted(int domain, int protocol); /* true by its family, or by a number that the kernel does not know */
int explicit_socket(int domain, int type, int protocol);
struct explicit *explicit_hold_slow(int fd);
static inline struct explicit *explicit_hold(int fd)
{
	return likely(!word_load(explicit_any)) ? NULL : explicit_hold_slow(fd);
}
struct explicit *explicit_new(int family, bool direct, bool stream, uint32_t protocol); /* shim_refs.c */
void explicit_ref(struct explicit *explicit);
void explicit_unref(struct explicit *explicit);
static inline void explicit_release(struct explicit **explicit)
{
	if (unlikely(*explicit))
		explicit_unref(*explicit);
}
/* `address` as the kernel knows it: itself, or *copy */
const struct sockaddr *explicit_address(const struct sockaddr *address, socklen_t len, struct sockaddr_storage *copy);
/* True if addresses given for this number may have to be translated for the kernel, though it is no connection. */
static inline bool explicit_named(int fd)
{
	struct file *file = file_get(fd);

	return unlikely(file && file->kind == FILE_EXPLICIT);
}
#define EXPLICIT_NOBODY_ANSWERED UINT32_MAX /* the reason of an answer */
void explicit_local(int fd, struct rpc_msg *record); /* address of the socket; port 0: it is not bound */
/* 0, or the errno that the call fails with; *answer is all 0 if the protocols take part. */
int explicit_ask(const struct explicit *explicit, enum ask_code what, struct rpc_msg *record, const int *fds,
                 int fds_len, struct rpc_answer *answer);
/* Fast open connects without a question to the provider, so a socket that insists on a protocol cannot use it. */
bool explicit_bars_fast_open(const struct conn *conn, int flags);
int explicit_bind(struct explicit *explicit, int fd, const struct sockaddr *address, socklen_t len);
int explicit_before_listen(struct explicit *explicit, int fd);
void explicit_listens(struct explicit *explicit, int fd);
void explicit_accepted(const struct explicit *listener, struct conn *conn, int fd);
void explicit_forget(int fd);
void explicit_dup(int from, int to);
void explicit_after_fork(void);
/* An explicit socket is offered as soon as a byte has moved: it need not prove that it is worth a channel. */
static inline bool conn_at_once(const struct conn *conn)
{
	return unlikely(conn->explicit) && !conn->backoff;
}

/* ---- connections that begin with an offload protocol (shim_sdp_connect.c) ---- */
struct sdp_connect {
	bool redirected; /* the socket connects to `place` instead */
	bool insists; /* the program does not want TCP */
	struct sockaddr_storage place; /* address of the provider */
	socklen_t place_len;
	int64_t timeout_ns; /* SO_SNDTIMEO; 0: none */
	int64_t asked_ns; /* CLOCK_MONOTONIC */
};
bool sdp_connect_wanted(const struct conn *conn, const struct explicit *explicit, const struct sockaddr *address,
                        socklen_t len);
int sdp_connect_ask(struct conn *conn, struct explicit *explicit, int fd, const struct sockaddr *address, socklen_t len,
                    struct sdp_connect *attempt);
int sdp_connect_start(struct conn *conn, int fd, const struct sdp_connect *attempt);
bool address_may_translate(const struct sockaddr_storage *remote); /* worth the system calls of address_translate() */

/* ---- shim_environment.c: what is ours in an environment ---- */
bool is_variable(const char *entry, const char *name); /* `name` ends with '=' */
bool env_has(char *const env[], const char *name);
char *const *env_or_none(char *const env[]); /* the kernel takes NULL for an empty one */
bool preload_without_ours(char *to, const char *entry); /* LD_PRELOAD=…; `to` has as much room, and one byte */
void env_keep(void); /* keeps the environment of this process's start */
bool preload_names(const char *entry, const char *name);
const char *env_library(void); /* ours, by a path that still names the same file; NULL: that is not known */
int env_carried(char *const env[], char *const **entries); /* number of entries to add */
struct start;
char *command_carrying(const struct start *start, const char *command); /* a string that the caller frees */

bool unseen_set_has(int fd); /* true if an epoll set has it that no call of ours has made */

/* ---- shim_loader.c: how a program that is executed comes to the shim ---- */
#define START_SCRIPTS_MAX 4 /* the kernel's own limit */
enum start_how {
	START_AS_IT_IS,
	START_LOADED, /* start by our loader: no C library of its own would bring the shim in */
	START_WITHOUT /* start without the shim: its own loader would end it over the shim */
};
struct start_script {
	char interpreter[256], argument[256];
};
struct start {
	enum start_how how;
	const char *loader; /* program to execute in its place; NULL: itself */
	char resolved[PATH_MAX]; /* the file that is to be loaded in the end */
	int scripts_len;
	struct start_script scripts[START_SCRIPTS_MAX];
	bool dynamic; /* loaded by this C library's own loader */
	char *const *carried; /* entries for its environment; see shim_environment.c */
	int carried_len;
	size_t room; /* bytes for start_make() */
};
/* True if arguments or environment are to be others than the caller's. */
bool start_differs(struct start *start, int dir, const char *file, char *const argv[], char *const env[]);
void start_make(struct start *start, const char *file, char *const **argv, char *const **env, void *room);

bool made_by_go(int fd, const Elf64_Ehdr *header);

bool start_has_shim(const struct start *start, char *const env[]); /* true if that is certain */

/* ---- shim_travel.c: connections that go on in the next program ---- */
struct travel;
struct travel *travel_begin(const struct start *start, char *const argv[], char *const env[], int *file);
bool travel_all(const struct start *start, char *const argv[], char *const env[]);
bool travel_takes(struct travel *travel, struct conn *conn);
void travel_settles(struct travel *travel, struct conn *conn, bool held);
size_t travel_room(const struct travel *travel, char *const env[]);
void travel_go(const struct travel *travel, int file, char *const **env, void *room);
void travel_stay(struct travel *travel, int file);
bool travel_arrive(void);
void travel_settle(void);

void demote_inherited(struct travel *travel, bool leaving); /* connections that the next program inherits */
long execute_bare(int directory, const char *path, char *const argv[], char *const env[], int flags);

/* ---- epoll (shim_set.c, shim_set_return.c, shim_ready.c, shim_epoll.c; between them: shim_set.h) ---- */
struct set;
void set_conn_attached(struct conn *conn);
void set_conn_closed(struct conn *conn, int fd, bool last);
bool set_conn_dissolved(struct conn *conn);
void set_conn_arm(struct conn *conn, bool all);
struct doorbell *set_doorbell_for(struct conn *conn); /* the doorbell of the one set the conn is in, or NULL */
void set_forget(int fd);
void set_dup(int from, int to);
void sets_before_fork(void); /* shim_lock held */
void sets_after_fork(void);
bool set_is_managed(struct file *file);
bool set_wants_pin(struct conn *conn);
bool set_names(struct conn *conn, int fd);
void set_conn_leaves(struct conn *conn, bool anew); /* the kernel's events may change; `anew`: its ring holds more */
void sets_on_exec(bool before);

/* ---- around every way to make a process with a memory of its own (shim_fork.c) ---- */
void fork_prepare(void);
void fork_parent(void);
void fork_child(void);

/* ---- signals (shim_signal.c) ---- */
int pselect_counting(int len, fd_set *r, fd_set *w, fd_set *e, struct timespec *timeout, const sigset_t *mask);
void signals_init(void);
void signal_interrupts(void); /* ends the wait of this thread, like a handler without SA_RESTART */

/* ---- a process that was started without the shim (shim_embed.c) ---- */
int sidestep_adopt(int fd);

#endif
