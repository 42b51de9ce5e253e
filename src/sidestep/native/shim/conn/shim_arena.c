/* shim_arena.c - the slots of a process family's connections, in memory that the family shares, and their holders. */
#include "shim_switch.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>

#define REAP_EVERY_NS 1000000000 /* interval of looks for slots of processes that were killed */

#define ARENA_LEN (ARENA_SLOTS_OFFSET + (size_t)ARENA_SLOTS_MAX * sizeof(struct conn_slot))
#define GUESTS_MAX 16 /* families of which we hold connections at once: programs that have passed them to us */

uint8_t arena_id[16], family_id[16];
static struct arena_header *arena;
static int arena_fd = -1;
static uint64_t arena_inode;
bool foreign_pids; /* this process counts them otherwise than the one that made the arena */

/* Arenas of other families; guarded by shim_lock. A place stays what it is as long as a slot of it is held. */
static struct guest {
	struct arena_header *arena; /* NULL: none is held */
	int fd;
	uint32_t slots_held;
	uint8_t id[16];
	uint32_t joined; /* serial of the provider connection that knows of it; 0: none does */
} guests[GUESTS_MAX];

static struct conn_slot *slot_in(struct arena_header *of, uint32_t index)
{
	return (struct conn_slot *)((uint8_t *)of + ARENA_SLOTS_OFFSET) + index;
}

static struct conn_slot *slot_at(uint32_t index)
{
	return slot_in(arena, index);
}

static bool lies_in(const struct arena_header *of, const struct conn_slot *slot)
{
	return of && (uintptr_t)slot - (uintptr_t)of < ARENA_LEN;
}

/* NULL: the slot lies in our own. The caller holds the slot, or it could go meanwhile. */
static struct guest *guest_of(const struct conn_slot *slot)
{
	for (int i = 0; i < GUESTS_MAX && !lies_in(arena, slot); i++)
		if (lies_in(guests[i].arena, slot))
			return &guests[i];
	return NULL;
}

static struct arena_header *arena_of(const struct conn_slot *slot)
{
	const struct guest *guest = guest_of(slot);

	return guest ? guest->arena : arena;
}

uint32_t slot_index(const struct conn_slot *slot)
{
	return (uint32_t)(slot - slot_in(arena_of(slot), 0));
}

bool slot_is_guest(const struct conn_slot *slot)
{
	return !lies_in(arena, slot);
}

const uint8_t *slot_family(const struct conn_slot *slot)
{
	return arena_of(slot)->family_id;
}

/* Numbers of processes mean the same only within one pid_namespaces(7). */
static uint64_t pid_namespace(void)
{
	struct stat st;

	return stat("/proc/self/ns/pid", &st) == 0 ? (uint64_t)st.st_ino : 0;
}

/* Called in a child of fork(). */
void arena_forked(void)
{
	foreign_pids = !arena->pid_namespace || pid_namespace() != arena->pid_namespace;
}

static uint64_t inode_of(int fd)
{
	struct stat st;

	return real.fstat(fd, &st) == 0 ? (uint64_t)st.st_ino : 0;
}

static int reopen(int fd, int flags)
{
	char path[32];

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	return open(path, flags | O_CLOEXEC);
}

/* The arena behind a descriptor, which is left as it is; NULL: it is none. */
static struct arena_header *arena_map(int fd, const uint8_t id[16])
{
	struct arena_header *at = MAP_FAILED;
	struct stat st;

	if (channel_stays(fd) && fstat(fd, &st) == 0 && st.st_size == (off_t)ARENA_LEN)
		at = mmap(NULL, ARENA_LEN, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (at == MAP_FAILED)
		return NULL;
	if (at->magic == ARENA_MAGIC && at->version == LAYOUT_VERSION && at->slot_size == sizeof(struct conn_slot) &&
	    memcmp(at->arena_id, id, sizeof(at->arena_id)) == 0)
		return at;
	munmap(at, ARENA_LEN);
	return NULL;
}

/* Takes over the arena of the program that this process ran before; leaves `fd` as it is. */
bool arena_continue(int fd, const uint8_t id[16])
{
	struct arena_header *at = arena_map(fd, id);
	int own = at ? own_fd(real.fcntl64(fd, F_DUPFD_CLOEXEC, 0)) : -1;

	if (own < 0) {
		if (at)
			munmap(at, ARENA_LEN);
		return false;
	}
	arena = at;
	arena_fd = own;
	arena_inode = inode_of(own);
	arena_shared = true;
	memcpy(arena_id, id, sizeof(arena_id));
	memcpy(family_id, arena->family_id, sizeof(family_id));
	arena_forked();
	return true;
}

/* shim_lock held. A place for an arena that is not ours, with a slot of it held; NULL: there is none. */
static struct guest *guest_take(int fd, const uint8_t id[16])
{
	struct guest *place = NULL;

	for (int i = 0; i < GUESTS_MAX; i++) {
		bool same = memcmp(guests[i].id, id, sizeof(guests[i].id)) == 0;
		if (guests[i].arena && same) {
			guests[i].slots_held++;
			return &guests[i];
		}
		if (!guests[i].arena && (!place || same || (place->joined && !guests[i].joined)))
			place = &guests[i];
		if (place == &guests[i] && same)
			break;
	}
	struct guest made = {.arena = place ? arena_map(fd, id) : NULL, .slots_held = 1};
	memcpy(made.id, id, sizeof(made.id));
	made.fd = made.arena ? own_fd(real.fcntl64(fd, F_DUPFD_CLOEXEC, 0)) : -1;
	if (made.fd < 0) {
		if (made.arena)
			munmap(made.arena, ARENA_LEN);
		return NULL;
	}
	if (memcmp(place->id, id, sizeof(place->id)) == 0)
		made.joined = place->joined;
	*place = made;
	return place;
}

/* shim_lock held. */
static void guest_drop(struct guest *guest)
{
	if (--guest->slots_held)
		return;
	munmap(guest->arena, ARENA_LEN);
	own_fd_close(guest->fd);
	guest->arena = NULL;
}

/*
 * shim_lock held. Finds families whose connections this process holds, and which a provider does not know yet. True: *fd is
 * the arena of one, to be closed by the caller; or -1: none of its connections is held any more.
 */
bool guest_news(uint32_t serial, uint8_t id[16], uint8_t family[16], int *fd)
{
	for (int i = 0; i < GUESTS_MAX; i++) {
		struct guest *guest = &guests[i];
		bool joined = guest->joined == serial;
		if (joined == (guest->arena != NULL))
			continue;
		memcpy(id, guest->id, sizeof(guest->id));
		guest->joined = guest->arena ? serial : 0;
		*fd = guest->arena ? reopen(guest->fd, O_RDONLY) : -1;
		if (*fd >= 0)
			memcpy(family, guest->arena->family_id, sizeof(guest->arena->family_id));
		if (*fd >= 0 || joined)
			return true;
	}
	return false;
}

/*
 * The slot of a connection that has been passed to us, in our own arena or in that of `fd`. NULL: there is none, or a process of
 * ours and one of its family could not tell whether the other lives. A later slot_release() gives a guest's back.
 */
struct conn_slot *slot_arrive(int fd, const uint8_t id[16], uint32_t index, uint32_t generation)
{
	struct conn_slot *slot = NULL;

	if (index >= ARENA_SLOTS_MAX || !(generation & 1))
		return NULL;
	if (memcmp(id, arena_id, sizeof(arena_id)) == 0)
		return slot_known(index, generation);
	shim_lock_take();
	struct guest *guest = foreign_pids ? NULL : guest_take(fd, id);
	if (guest) {
		slot = slot_in(guest->arena, index);
		if (word_load(slot->generation) != generation || guest->arena->pid_namespace != pid_namespace()) {
			slot = NULL;
			guest_drop(guest);
		}
	}
	shim_lock_drop();
	return slot;
}

/* A slot in the arena of that name, to be compared; NULL: this process has none. */
const struct conn_slot *slot_named(const uint8_t id[16], uint32_t index, uint32_t generation)
{
	static const uint8_t none[16]; /* an older provider names none */
	const struct conn_slot *slot = NULL;

	if (memcmp(id, none, sizeof(none)) == 0 || memcmp(id, arena_id, sizeof(arena_id)) == 0)
		return slot_known(index, generation);
	shim_lock_take();
	for (int i = 0; i < GUESTS_MAX && index < ARENA_SLOTS_MAX; i++)
		if (guests[i].arena && memcmp(guests[i].id, id, sizeof(guests[i].id)) == 0)
			slot = slot_in(guests[i].arena, index);
	shim_lock_drop();
	return slot;
}

/* The opposite, of a slot that this process does not hold. */
void slot_forgo(const struct conn_slot *slot)
{
	shim_lock_take();
	struct guest *guest = guest_of(slot);
	if (guest)
		guest_drop(guest);
	shim_lock_drop();
}

/* A process of the family is about to give a connection away. */
void arena_passes(void)
{
	arena_shared = true;
	word_store(arena->passes, 1);
}

bool arena_has_passed(void)
{
	return fd_table_len && word_load(arena->passes);
}

int slot_arena_fd(const struct conn_slot *slot)
{
	const struct guest *guest = guest_of(slot);

	return guest ? guest->fd : arena_fd;
}

const uint8_t *slot_arena_id(const struct conn_slot *slot)
{
	return arena_of(slot)->arena_id;
}

int arena_own_fd(void)
{
	return arena_fd;
}

/*
 * True if it is still open under its number, and of the user that this process has: else the next program is not of the
 * family.
 */
bool arena_kept(void)
{
	struct stat st;

	return real.fstat(arena_fd, &st) == 0 && (uint64_t)st.st_ino == arena_inode && st.st_uid == geteuid() &&
	       getuid() == geteuid() && getgid() == getegid();
}

/* NULL: there is no such connection. */
struct conn_slot *slot_known(uint32_t index, uint32_t generation)
{
	return index < ARENA_SLOTS_MAX && (generation & 1) && word_load(slot_at(index)->generation) == generation
	           ? slot_at(index)
	           : NULL;
}

int arena_open(void)
{
	size_t len = ARENA_LEN;
	int fd = channel_memory(ARENA_NAME, len);

	if (fd < 0)
		return fd;
	if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0 ||
	    getrandom(arena_id, sizeof(arena_id), GRND_NONBLOCK) != sizeof(arena_id) ||
	    getrandom(family_id, sizeof(family_id), GRND_NONBLOCK) != sizeof(family_id)) {
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
	memcpy(arena->family_id, family_id, sizeof(family_id));
	arena_fd = own_fd(fd);
	arena_inode = inode_of(arena_fd);
	return 0;
}

int arena_reader_fd(void)
{
	return reopen(arena_fd, O_RDONLY);
}

int arena_path_fd(void)
{
	return reopen(arena_fd, O_PATH);
}

bool holder_put(struct conn_slot *slot, uint32_t before, uint32_t after)
{
	for (size_t i = 0; i < sizeof(slot->holder_pids) / sizeof(*slot->holder_pids) && !foreign_pids; i++) {
		uint32_t expected = before;
		if (atomic_compare_exchange_strong(&slot->holder_pids[i], &expected, after))
			return true;
	}
	return false;
}

/* This process goes on in a program that reads no ring, or does not after all. A child that shares our memory is no holder. */
void holder_estrange(struct conn_slot *slot, bool stranger)
{
	if (shim_pid == (uint32_t)getpid())
		holder_put(slot, shim_pid | (stranger ? 0 : HOLDER_STRANGER), shim_pid | (stranger ? HOLDER_STRANGER : 0));
}

/* True if all other processes that `holders` counts go on in such programs. False, too, if not all of them are known. */
bool holders_are_strangers(const struct conn_slot *slot)
{
	uint32_t strangers = 0;

	for (size_t i = 0; i < sizeof(slot->holder_pids) / sizeof(*slot->holder_pids); i++) {
		uint32_t holder = word_load(slot->holder_pids[i]);
		strangers += (holder & HOLDER_STRANGER) && holder != (shim_pid | HOLDER_STRANGER);
	}
	return strangers + 1 >= word_load(slot->holders);
}

/* shim_lock held. */
void slot_release(struct conn_slot *slot)
{
	struct guest *guest = guest_of(slot);

	if (!holder_put(slot, shim_pid, 0))
		holder_put(slot, shim_pid | HOLDER_STRANGER, 0);
	if (atomic_fetch_sub(&slot->holders, 1) == 1)
		slot_free(slot);
	if (guest)
		guest_drop(guest);
}

/* Connections that this process has forgotten and holds on may be used by others that it makes: they stay on TCP for good. */
void slots_unconfine(void)
{
	uint32_t used = word_load(arena->slots_used);

	for (uint32_t i = 0; i < used && i < ARENA_SLOTS_MAX; i++)
		for (size_t at = 0; at < sizeof(slot_at(i)->holder_pids) / sizeof(uint32_t); at++)
			if ((word_load(slot_at(i)->holder_pids[at]) & ~HOLDER_STRANGER) == shim_pid &&
			    slot_has(slot_at(i), SLOT_CONFINED))
				slot_set(slot_at(i), SLOT_PIN);
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
		if (!pid || !pid_dead(known, pid & ~HOLDER_STRANGER) ||
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
	int64_t now = now_ns(), last = word_load(reaped_at);

	if (now - last < REAP_EVERY_NS || !atomic_compare_exchange_strong(&reaped_at, &last, now) || foreign_pids)
		return;
	uint32_t used = word_load(arena->slots_used);
	for (uint32_t i = 0; i < used && i < ARENA_SLOTS_MAX; i++)
		if (word_load(slot_at(i)->generation) & 1)
			slot_reap(slot_at(i), &known);
}

/* True if this process alone holds the connection. */
bool conn_alone(struct conn *conn)
{
	struct known_pids known = {0};

	if (likely(word_load(conn->slot->holders) == 1))
		return true;
	if (!foreign_pids)
		slot_reap(conn->slot, &known);
	return word_load(conn->slot->holders) == 1;
}

struct conn_slot *slot_alloc(void)
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

void slot_free(struct conn_slot *slot)
{
	_Atomic uint64_t *head = &arena_of(slot)->free_head;
	uint64_t top = atomic_load(head);
	uint64_t mine;

	word_store(slot->state, STATE_FREE);
	word_add(slot->generation, 1); /* even: unused */
	do {
		word_store(slot->free_next, (uint32_t)top);
		mine = ((top >> 32) + 1) << 32 | (slot_index(slot) + 1);
	} while (!atomic_compare_exchange_weak(head, &top, mine));
}
