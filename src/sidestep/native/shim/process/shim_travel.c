/*
 * shim_travel.c - connections that go on by their rings in the program that this process executes next.
 *
 * Nothing of a connection ends with exec(2) but the mappings: its slot lies in the arena, its bytes in the segment, and both
 * are files. So the arena, the segments and the doorbells stay open for a program that is sure to have the shim. One more
 * file lists them. The environment names that file. The next program finds its sockets by their cookies, even under other
 * numbers, and takes up each where the last one left it. A socket on TCP keeps its slot and counts, and may be promoted
 * there. The peer is asked nothing. But the word by which we sleep is not where the peer looks, as nobody can write the old
 * page any more: so it rings always (HINT_RING_ALWAYS).
 *
 * A provider between wakes only by doorbells that it knows. It learns the new one before the next program does anything, by a
 * connection to it that travels as well (shim_new_doorbell.c).
 *
 * Some sockets do not go on: explicit ones, those of a standard stream that reads inside libc, and those in an inherited
 * epoll set. Nor do those on which a thread of another process may sit in the kernel.
 */
#include "shim_fd.h"
#include "shim_provider.h"
#include "shim_set.h"
#include "shim_travel.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "shim_tcp_only.h"
#include "shim_proc.h"

#define VARIABLE "SIDESTEP_TRAVEL="
#define TRAVELLERS_MAX KEPT_MAX
#define LEFT_MAX \
	4096 /* slots that lose this process as their holder; of more the family keeps the slots until it ends */
#define TRAVEL_MAGIC 0x54524156u
#define ENV_MAX 4096 /* entries of an environment that a list is named in: a copy of it lies on the stack */
#define ARGUMENTS_SPARE 65536 /* names of files, what the kernel adds, and our own name */
#define ARGUMENTS_MIN 131072  /* ARG_MAX of linux/limits.h */
#define ARGUMENTS_MAX (6u << 20)
#define NUMBERS_SPARE 5 /* numbers that the next program needs besides: its arena, its page of doorbells, a line */

/* The list, in memory that both programs map. */
struct travel {
	uint32_t magic, version;
	uint32_t pid, len, left_len;
	int arena_fd;
	int line_fd; /* line to the provider, if it stands between; else -1 */
	uint8_t arena_id[16];
	struct traveller list[TRAVELLERS_MAX];
	struct {
		uint32_t slot, generation;
		bool held; /* this process still counts as a holder */
	} left[LEFT_MAX];
};

/* ---- before ---- */
static bool is_kept(int fd, uint64_t inode)
{
	struct stat st;

	return fd >= 0 && real.fstat(fd, &st) == 0 && (uint64_t)st.st_ino == inode;
}

static bool is_doorbell(int fd)
{
	struct stat st;

	return real.fstat(fd, &st) == 0 && !(st.st_mode & S_IFMT);
}

/* A program may have closed all numbers by system calls of its own, ours among them. */
static bool all_kept(const struct conn *conn)
{
	const struct remote_doorbell *remote = conn->remote_doorbell;
	struct stat st;

	return is_kept(conn->segment_fd, conn->segment_inode) && is_kept(remote->page_fd, remote->page_inode) &&
	       is_doorbell(remote->fd) && is_doorbell(conn->doorbell->fd) &&
	       (!conn->taken_up || is_doorbell(conn->doorbell->old_fd)) &&
	       (remote->liveness_fd < 0 || (real.fstat(remote->liveness_fd, &st) == 0 && S_ISFIFO(st.st_mode)));
}

static bool inherited(int fd)
{
	int flags = real.fcntl64(fd, F_GETFD, 0);

	return flags >= 0 && !(flags & FD_CLOEXEC);
}

static bool any_inherited(void)
{
	for (uint32_t fd = 0; fd < atomic_load(&fd_end); fd++) {
		struct conn *conn = conn_get((int)fd);
		if (conn && (conn->managed || word_load(conn->slot->state) == STATE_NATIVE) && inherited((int)fd))
			return true;
	}
	return false;
}

/* shim_lock held. The next program may wait on a set of which it knows nothing. */
static bool in_inherited_set(const struct conn *conn)
{
	for (struct member *member = conn->members; member; member = member->next)
		if (member->set->refs > 1 || inherited(member->set->epfd))
			return true;
	return false;
}

static bool is_standard(const struct conn *conn)
{
	for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
		if (conn_get(fd) == conn)
			return true;
	return false;
}

/* Threads of this process end with the exec, whatever they are doing. Their counts look like those of other processes. */
static bool waiters_known(struct conn *conn)
{
	return conn_alone(conn) || *one_thread ||
	       !(word_load(conn->slot->rx_kernel_waiters) | word_load(conn->slot->tx_kernel_waiters));
}

/* The peer looks for our hints in a page that the next program cannot write. */
static bool asks_for_hints(const struct conn *conn)
{
	return conn->remote_doorbell->liveness_fd < 0 && (atomic_load(&conn->channel.remote->hint) & ~HINT_RING_ALWAYS);
}

/* True if the other end of the channel goes on with the next program; *line as in traveller_can(). */
static bool finds_next(const struct conn *conn, int *line)
{
	uint32_t knows = atomic_load(&conn->channel.remote->knows);

	if (slot_has(conn->slot, SLOT_RELAY_OVER))
		return true; /* the connection has no provider between */
	if (!conn_relayed(conn))
		return knows & KNOWS_RING_ALWAYS;
	if (!(knows & KNOWS_DOORBELLS) || relay_gone(conn))
		return false;
	if (*line < 0)
		*line = rpc_line();
	return *line >= 0;
}

/*
 * True if another program can go on with it that gets the files of the connection. It has none of the flags `stays`. Where a
 * provider stands between, that needs a connection to it as well: *line, if it is -1, becomes one.
 */
bool traveller_can(struct conn *conn, uint32_t stays, int *line)
{
	struct conn_slot *slot = conn->slot;

	return !asks_for_hints(conn) && !tx_is(slot, TX_RESEND) && /* this process alone knows what it has to send again */
	       !slot_has(slot, stays) && word_load(slot->cookie) && all_kept(conn) && finds_next(conn, line);
}

static bool can_travel(struct travel *travel, struct conn *conn, struct traveller *of)
{
	uint64_t cookie;

	if (slot_is_guest(conn->slot) || conn->explicit || (!stdio_seen && is_standard(conn)) || !waiters_known(conn) ||
	    !(conn->managed ? traveller_can(conn, SLOT_RESET | SLOT_PIN | SLOT_INHERITED | SLOT_CONFINED, &travel->line_fd)
	                    : traveller_waits(conn, conn_fd(conn), &cookie)))
		return false;
	*of = conn->managed ? traveller_of(conn) : traveller_by_tcp(conn, cookie);
	shim_lock_take();
	bool alone = !in_inherited_set(conn);
	shim_lock_drop();
	return alone;
}

/* A connection by TCP, of which no answer is awaited, and that nothing keeps there. */
bool traveller_waits(struct conn *conn, int fd, uint64_t *cookie)
{
	return word_load(conn->slot->state) == STATE_NATIVE && !conn->explicit && !word_load(conn->delegated) &&
	       !slot_has(conn->slot, SLOT_STAYS | SLOT_RESET | SLOT_INHERITED) &&
	       option_get(fd, SOL_SOCKET, SO_COOKIE, cookie, sizeof(*cookie));
}

struct traveller traveller_by_tcp(const struct conn *conn, uint64_t cookie)
{
	return (struct traveller){.cookie = cookie,
	                          .slot = slot_index(conn->slot),
	                          .generation = conn->generation,
	                          .segment_fd = -1,
	                          .remote_fd = -1,
	                          .remote_page_fd = -1,
	                          .doorbell_fd = -1,
	                          .liveness_fd = -1};
}

/* The next program's entry, without the doorbell that is its own; the descriptors stay the connection's. */
struct traveller traveller_of(const struct conn *conn)
{
	const struct remote_doorbell *remote = conn->remote_doorbell;
	struct traveller of = {.cookie = word_load(conn->slot->cookie),
	                       .slot = slot_index(conn->slot),
	                       .generation = conn->generation,
	                       .side = conn->channel.local == &conn->channel.seg->side[1],
	                       .segment_fd = conn->segment_fd,
	                       .remote_fd = remote->fd,
	                       .remote_page_fd = remote->page_fd,
	                       .doorbell_fd = -1,
	                       .liveness_fd = remote->liveness_fd,
	                       .remote_index = remote->index};

	memcpy(of.remote_id, remote->id, sizeof(of.remote_id));
	return of;
}

/* The number of holders grows, or an exec has begun: from now on neither end of the channel changes its doorbell. */
void traveller_settle(struct traveller *of, struct conn *conn)
{
	if (!has_ring(of))
		return;
	int fd = new_doorbell_settle(conn);
	*of = traveller_of(conn); /* the peer may have named another doorbell since */
	of->doorbell_fd = fd;
}

static size_t env_len(char *const env[])
{
	size_t count = 0;

	while (env_or_none(env)[count])
		count++;
	return count;
}

/* Our name in the environment must not make a call fail (E2BIG) that would not have; see prepare_arg_pages in Linux. */
static bool arguments_fit(char *const argv[], char *const env[])
{
	struct rlimit stack;
	size_t len = ARGUMENTS_SPARE;

	for (; argv && *argv; argv++)
		len += strlen(*argv) + 1 + sizeof(char *);
	for (; *env; env++)
		len += strlen(*env) + 1 + sizeof(char *);
	return getrlimit(RLIMIT_STACK, &stack) == 0 && (len <= ARGUMENTS_MIN || len <= stack.rlim_cur / 4) &&
	       len <= ARGUMENTS_MAX;
}

static rlim_t numbers_first; /* RLIMIT_NOFILE as this program began */

/*
 * The next program has to map what this one has mapped, and to keep the numbers that it inherits above its own. Its size is not
 * known: under a limit of its memory nothing is certain.
 */
static bool resources_suffice(void)
{
	struct rlimit numbers, size;
	int spare[NUMBERS_SPARE];
	bool enough = getrlimit(RLIMIT_NOFILE, &numbers) == 0 && numbers.rlim_cur >= numbers_first &&
	              getrlimit(RLIMIT_AS, &size) == 0 && size.rlim_cur == RLIM_INFINITY;

	for (int i = 0; i < NUMBERS_SPARE; i++) {
		spare[i] = enough ? own_fd(real.fcntl64(arena_own_fd(), F_DUPFD_CLOEXEC, 0)) : -1;
		enough = spare[i] >= 0;
	}
	for (int i = 0; i < NUMBERS_SPARE; i++)
		own_fd_close(spare[i]);
	return enough;
}

/* True if the next program can look for its sockets. Sandboxes forbid it by ways that access(2) does not ask. */
static bool numbers_seen(void)
{
	int numbers = proc_open("/proc/self/fd", O_RDONLY | O_DIRECTORY);

	if (numbers >= 0)
		raw_close(numbers);
	return numbers >= 0;
}

/*
 * The connections that go on into the next program of this process, if it is certain to have the shim; NULL: none. A child
 * that shares its parent's memory (CLONE_VM) is not the process that holds the connections.
 */
struct travel *travel_begin(const struct start *start, char *const argv[], char *const env[], int *file)
{
	KEEP_ERRNO;

	*file = -1;
	if (!fd_table_len || shim_pid != (uint32_t)getpid() || atomic_load(&tcp_only_reason) || !any_inherited() ||
	    !arena_kept() || env_len(env) > ENV_MAX || !arguments_fit(argv, env_or_none(env)) || !resources_suffice() ||
	    !numbers_seen() || !start_has_shim(start, env_or_none(env)))
		return NULL;
	int fd = channel_memory("sidestep-travel", sizeof(struct travel));
	if (fd < 0)
		return NULL;
	struct travel *travel = mmap(NULL, sizeof(*travel), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	*file = travel == MAP_FAILED ? -1 : own_fd(fd);
	if (*file < 0) {
		if (travel == MAP_FAILED)
			raw_close(fd);
		else
			munmap(travel, sizeof(*travel));
		return NULL;
	}
	travel->magic = TRAVEL_MAGIC;
	travel->version = LAYOUT_VERSION;
	travel->pid = shim_pid;
	travel->arena_fd = arena_own_fd();
	travel->line_fd = -1;
	memcpy(travel->arena_id, arena_id, sizeof(arena_id));
	return travel;
}

/* True: the next program goes on with it, and nothing of it changes here. */
bool travel_takes(struct travel *travel, struct conn *conn)
{
	struct conn_slot *slot = conn->slot;

	for (uint32_t i = 0; travel && i < travel->len; i++)
		if (travel->list[i].slot == slot_index(slot))
			return true;
	if (!travel || travel->len == TRAVELLERS_MAX || !can_travel(travel, conn, &travel->list[travel->len]))
		return false;
	travel->len++;
	return true;
}

static bool mirrors(const struct conn_slot *one, const struct conn_slot *other)
{
	return one->local_port == other->remote_port && one->remote_port == other->local_port &&
	       memcmp(one->local_addr, other->remote_addr, sizeof(one->local_addr)) == 0 &&
	       memcmp(one->remote_addr, other->local_addr, sizeof(one->remote_addr)) == 0;
}

/* The same, where a provider stands between the two ends. */
static bool far_peer_is_here(const struct conn *conn)
{
	for (uint32_t fd = 0; fd < atomic_load(&fd_end); fd++) {
		HELD other = conn_hold((int)fd);
		if (other && mirrors(conn->slot, other->slot))
			return true;
	}
	return false;
}

/* True if this process holds the other end as well: while it waits for a child, nobody answers what that asks of its peer. */
static bool peer_is_here(const struct conn *conn)
{
	const struct channel_side *remote = conn->channel.remote;
	int fd;

	if (!conn->managed || conn_relayed(conn))
		return far_peer_is_here(conn);
	if (memcmp(remote->family_id, family_id, sizeof(family_id)) != 0)
		return false;
	const uint32_t generation = atomic_load(&remote->generation);
	HELD peer = conn_find(slot_known(atomic_load(&remote->slot), generation), generation, &fd);
	return peer != NULL;
}

/* True if a program that a child executes now goes on with all that it inherits. */
bool travel_all(const struct start *start, char *const argv[], char *const env[])
{
	int list;
	struct travel *travel = travel_begin(start, argv, env, &list);
	bool all = travel != NULL;

	for (uint32_t fd = 0; all && fd < atomic_load(&fd_end); fd++) {
		HELD conn = conn_hold((int)fd);
		if (conn && inherited((int)fd))
			all = !peer_is_here(conn) && travel_takes(travel, conn);
	}
	travel_stay(travel, list);
	return all;
}

/* An exec has begun. `held`: the process counts as a holder of the connection, which the next program is not if it does not go on. */
void travel_settles(struct travel *travel, struct conn *conn, bool held)
{
	const struct conn_slot *slot = conn->slot;

	for (uint32_t i = 0; travel && i < travel->len; i++)
		if (travel->list[i].slot == slot_index(slot)) {
			traveller_settle(&travel->list[i], conn);
			return;
		}
	if (!travel || travel->left_len == LEFT_MAX)
		return;
	travel->left[travel->left_len].slot = slot_index(slot);
	travel->left[travel->left_len].generation = conn->generation;
	travel->left[travel->left_len++].held = held;
}

static void all_inherit(const struct travel *travel, int file, int flag)
{
	real.fcntl64(file, F_SETFD, flag);
	real.fcntl64(travel->arena_fd, F_SETFD, flag);
	real.fcntl64(travel->line_fd, F_SETFD, flag);
	for (uint32_t i = 0; i < travel->len; i++) {
		real.fcntl64(travel->list[i].segment_fd, F_SETFD, flag);
		real.fcntl64(travel->list[i].remote_fd, F_SETFD, flag);
		real.fcntl64(travel->list[i].remote_page_fd, F_SETFD, flag);
		real.fcntl64(travel->list[i].doorbell_fd, F_SETFD, flag);
		real.fcntl64(travel->list[i].liveness_fd, F_SETFD, flag);
	}
}

size_t travel_room(const struct travel *travel, char *const env[])
{
	return travel && travel->len ? (env_len(env) + 2) * sizeof(char *) + sizeof(VARIABLE) + 12 : 0;
}

/* The last step before the call: `room` has the result of travel_room(). */
void travel_go(const struct travel *travel, int file, char *const **env, void *room)
{
	char **made = room;
	size_t count = 0;

	if (!travel || !travel->len)
		return;
	for (char *const *each = env_or_none(*env); *each; each++)
		if (!is_variable(*each, VARIABLE))
			made[count++] = *each;
	made[count] = (char *)(made + count + 2);
	sprintf(made[count], VARIABLE "%d", file);
	made[count + 1] = NULL;
	*env = made;
	all_inherit(travel, file, 0);
	shim_log("%u connections travel", travel->len);
}

/* The call has failed. */
void travel_stay(struct travel *travel, int file)
{
	KEEP_ERRNO;

	if (!travel)
		return;
	all_inherit(travel, file, FD_CLOEXEC);
	own_fd_close(travel->line_fd);
	own_fd_close(file);
	munmap(travel, sizeof(*travel));
}

/* ---- after ---- */
static struct travel *arrived;

/* The memory of the program before, if there is any that was left to us. */
static struct travel *list_map(int fd)
{
	struct stat st;

	if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode) || st.st_size != (off_t)sizeof(struct travel))
		return NULL;
	struct travel *list = mmap(NULL, sizeof(*list), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (list == MAP_FAILED)
		return NULL;
	if (list->magic == TRAVEL_MAGIC && list->version == LAYOUT_VERSION && list->pid == shim_pid &&
	    list->len <= TRAVELLERS_MAX && list->left_len <= LEFT_MAX)
		return list;
	munmap(list, sizeof(*list));
	return NULL;
}

/* False: this program begins with an arena of its own, or with none at all: fd_table_len is 0 then. */
bool travel_arrive(void)
{
	const char *text = getenv("SIDESTEP_TRAVEL");
	int fd = text && *text ? atoi(text) : -1;
	struct rlimit numbers;

	if (getrlimit(RLIMIT_NOFILE, &numbers) == 0)
		numbers_first = numbers.rlim_cur;
	if (!text)
		return false;
	unsetenv("SIDESTEP_TRAVEL");
	arrived = fd < 0 ? NULL : list_map(fd);
	if (!arrived)
		return false;
	raw_close(fd);
	return fd_table_len && arena_continue(arrived->arena_fd, arrived->arena_id);
}

/*
 * Takes a descriptor out of the list: a copy where another entry names it as well. Else the number itself, or few programs would
 * have numbers for twice as many as the last one needed.
 */
static int descriptor_take(int *place)
{
	int fd = *place;

	*place = -1;
	for (uint32_t i = 0; arrived && i < arrived->len; i++) {
		const struct traveller *other = &arrived->list[i];
		if (other->remote_fd == fd || other->remote_page_fd == fd || other->doorbell_fd == fd ||
		    other->liveness_fd == fd)
			return real.fcntl64(fd, F_DUPFD_CLOEXEC, 0);
	}
	return fd;
}

/* shim_lock held. Ours, whose eventfd the peers have: one for all connections that shared it. */
static struct doorbell *doorbell_again(int *place)
{
	static struct {
		int fd;
		struct doorbell *doorbell;
	} known[64];
	static int len;
	const int fd = *place;

	for (int i = 0; arrived && i < len; i++)
		if (known[i].fd == fd) {
			atomic_fetch_add(&known[i].doorbell->refs, 1);
			return known[i].doorbell;
		}
	struct doorbell *doorbell = doorbell_successor_locked(descriptor_take(place));
	if (doorbell && arrived && len < 64) {
		known[len].fd = fd;
		known[len++].doorbell = doorbell;
	}
	return doorbell;
}

/* Threads of the last program are no more; this clears their marks in the slot. */
static void threads_gone(struct conn *conn)
{
	struct conn_slot *slot = conn->slot;

	if (atomic_load(&slot->tx_reserver) >> 32 == shim_pid)
		slot_clear(slot, SLOT_RESERVED);
	const uint32_t always = conn_relayed(conn) ? 0 : HINT_RING_ALWAYS;
	atomic_fetch_or(&conn->channel.local->hint, always);
	if (conn_alone(conn)) {
		atomic_store(&conn->channel.local->hint, always); /* the set that has asked for hints is no more, either */
		word_store(slot->rx_kernel_waiters, 0);
		word_store(slot->tx_kernel_waiters, 0);
	}
}

/* A connection on TCP. It may be promoted here, but for one that the last program has just asked a channel for. */
static bool kernel_take(struct conn_slot *slot, int fd)
{
	struct conn *conn = conn_of_slot(fd, slot);

	if (!conn)
		return false;
	word_store(conn->nonblock, real.fcntl64(fd, F_GETFL, 0) & O_NONBLOCK);
	word_store(conn->heritable, true);
	word_store(slot->fd, (uint32_t)fd);
	word_store(slot->pid, shim_pid);
	if (conn_alone(conn)) {
		word_store(slot->rx_kernel_waiters, 0);
		word_store(slot->tx_kernel_waiters, 0);
	}
	if (word_load(slot->state) != STATE_NATIVE)
		conn_pin(conn, REASON_INHERITED);
	shim_log("fd %d is taken up by TCP", fd);
	return true;
}

/*
 * Makes a connection of a slot that counts this process as a holder; takes descriptors out of *of. `line`: as traveller_can() had it.
 * False: none was made, and if *of is not taken, the slot still counts it.
 */
bool traveller_take(struct traveller *of, struct conn_slot *slot, int fd, int line)
{
	if (!has_ring(of))
		return of->taken = kernel_take(slot, fd);
	struct conn *conn = conn_of_slot(fd, slot);

	if (!conn)
		return false;
	of->taken = true;
	struct channel_own own = channel_own_of(slot);
	int failed = channel_map_as(&conn->channel, of->segment_fd, (int)of->side, &own, true);
	conn_keep_segment(conn, of->segment_fd);
	raw_close(of->segment_fd);
	of->segment_fd = -1;
	shim_lock_take();
	conn->remote_doorbell =
		remote_doorbell_get(of->remote_id, of->remote_index, descriptor_take(&of->remote_fd),
	                        descriptor_take(&of->remote_page_fd), descriptor_take(&of->liveness_fd));
	conn->doorbell = doorbell_again(&of->doorbell_fd);
	if (conn->doorbell)
		conn->doorbell->old_users++;
	conn->taken_up = conn->doorbell != NULL;
	shim_lock_drop();
	if (failed || !conn->remote_doorbell || !conn->doorbell) {
		shim_log("fd %d cannot be taken up: %d", fd, failed);
		if (!failed)
			channel_unmap(&conn->channel);
		file_put(fd, NULL);
		conn_unref(conn);
		return false;
	}
	threads_gone(conn);
	conn->probe_countdown = PROBE_EVERY;
	word_store(conn->nonblock, real.fcntl64(fd, F_GETFL, 0) & O_NONBLOCK);
	word_store(conn->waited, true);
	word_store(announce_due, true);
	word_store(conn->heritable, true);
	word_store(slot->fd, (uint32_t)fd);
	word_store(slot->pid, shim_pid);
	atomic_store(&conn->managed, 1);
	word_store(rings_ever, true);
	shim_lock_take();
	conn_loose(conn);
	shim_lock_drop();
	peer_wake(conn); /* a full fence: it reads the bit from now on */
	if (asks_for_hints(conn)) /* news since the last program looked */
		conn_demote(conn, fd, REASON_EPOLL_UNSUPPORTED, false);
	if (conn_relayed(conn) && !relay_learns(conn, line))
		conn_abort(conn, fd, ECONNRESET, REASON_RELAY_LOST);
	shim_log("fd %d is taken up, slot %u", fd, of->slot);
	return true;
}

/* True if this process alone holds it, as the file says: the arena may be one that cannot be mapped. */
static bool only_here(const struct traveller *of)
{
	struct conn_slot slot;

	return real.pread64(arrived->arena_fd, &slot, sizeof(slot),
	                    (off_t)(ARENA_SLOTS_OFFSET + (size_t)of->slot * sizeof(slot))) != (ssize_t)sizeof(slot) ||
	       slot.generation != of->generation || slot.holders <= 1;
}

static bool number_seen(int dir, long number, void *argument)
{
	struct travel *of = argument;
	uint64_t cookie = 0;
	int fd = (int)number, first;

	(void)dir;
	if (file_get(fd) || !option_get(fd, SOL_SOCKET, SO_COOKIE, &cookie, sizeof(cookie)))
		return true;
	for (uint32_t i = 0; i < of->len; i++) {
		struct traveller *at = &of->list[i];
		if (at->cookie != cookie)
			continue;
		struct conn_slot *slot = arena_shared ? slot_known(at->slot, at->generation) : NULL;
		HELD conn = conn_find(slot, at->generation, &first);
		bool only = has_ring(at) && only_here(at);
		if (conn)
			conn_join(conn, fd);
		else if ((!slot || !traveller_take(at, slot, fd, of->line_fd)) && only)
			tcp_reset(fd); /* a reset, as no other process can read the bytes in the ring */
		if (fd <= STDERR_FILENO)
			conn_streams(fd);
	}
	return true;
}

static void all_close(void)
{
	raw_close(arrived->arena_fd);
	raw_close(arrived->line_fd);
	for (uint32_t i = 0; i < arrived->len; i++) { /* some numbers are named more than once, and closed by then */
		raw_close(arrived->list[i].segment_fd);
		raw_close(arrived->list[i].remote_fd);
		raw_close(arrived->list[i].remote_page_fd);
		raw_close(arrived->list[i].doorbell_fd);
		raw_close(arrived->list[i].liveness_fd);
	}
}

/* Takes up what has come; without the arena it is reset, if nobody else can read it. */
void travel_settle(void)
{
	KEEP_ERRNO;

	if (!arrived)
		return;
	int numbers = proc_open("/proc/self/fd", O_RDONLY | O_DIRECTORY);
	bool seen = numbers >= 0 && proc_numbers(numbers, number_seen, arrived);
	if (numbers >= 0)
		raw_close(numbers);
	for (uint32_t fd = 0; !seen && fd < FD_TABLE_SIZE; fd++)
		number_seen(-1, fd, arrived);
	for (uint32_t i = 0; arena_shared && i < arrived->len; i++) {
		struct conn_slot *slot = slot_known(arrived->list[i].slot, arrived->list[i].generation);
		if (slot && !arrived->list[i].taken)
			slot_release(slot); /* a slot whose socket has not come: no connection stands for it */
	}
	for (uint32_t i = 0; arena_shared && i < arrived->left_len; i++) {
		struct conn_slot *slot = slot_known(arrived->left[i].slot, arrived->left[i].generation);
		if (slot && arrived->left[i].held)
			slot_release(slot);
		else if (slot && !word_load(slot->holders))
			slot_free(slot);
	}
	all_close();
	munmap(arrived, sizeof(*arrived));
	arrived = NULL;
	if (arena_shared)
		rpc_after_fork(); /* a process that begins like a child: we are to be introduced with the next call */
}
