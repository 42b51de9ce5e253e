/* shim_arena.c - the slots of a process family's connections, in memory that the family shares, and who holds them. */
#include "shim_switch.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>

#define REAP_EVERY_NS 1000000000 /* how often slots of processes that were killed are looked for */

uint8_t arena_id[16], family_id[16];
static struct arena_header *arena;
static int arena_fd = -1;
static uint64_t arena_inode;
bool foreign_pids; /* this process counts them otherwise than who made the arena */

static struct conn_slot *slot_at(uint32_t index)
{
	return (struct conn_slot *)((uint8_t *)arena + ARENA_SLOTS_OFFSET) + index;
}

uint32_t slot_index(const struct conn_slot *slot)
{
	return (uint32_t)(slot - slot_at(0));
}

/* Numbers of processes mean the same only within one pid_namespaces(7). */
static uint64_t pid_namespace(void)
{
	struct stat st;

	return stat("/proc/self/ns/pid", &st) == 0 ? (uint64_t)st.st_ino : 0;
}

/* In a child of fork(). */
void arena_forked(void)
{
	foreign_pids = !arena->pid_namespace || pid_namespace() != arena->pid_namespace;
}

#define ARENA_LEN (ARENA_SLOTS_OFFSET + (size_t)ARENA_SLOTS_MAX * sizeof(struct conn_slot))

static uint64_t inode_of(int fd)
{
	struct stat st;

	return real.fstat(fd, &st) == 0 ? (uint64_t)st.st_ino : 0;
}

/* Takes over the arena of the program that this process ran before; leaves `fd` as it is. */
bool arena_continue(int fd, const uint8_t id[16])
{
	struct arena_header *at = MAP_FAILED;
	struct stat st;

	if (channel_stays(fd) && fstat(fd, &st) == 0 && st.st_size == (off_t)ARENA_LEN)
		at = mmap(NULL, ARENA_LEN, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (at == MAP_FAILED)
		return false;
	int own = at->magic == ARENA_MAGIC && at->version == LAYOUT_VERSION && at->slot_size == sizeof(struct conn_slot) &&
	                  memcmp(at->arena_id, id, sizeof(at->arena_id)) == 0
	              ? own_fd(real.fcntl64(fd, F_DUPFD_CLOEXEC, 0))
	              : -1;
	if (own < 0) {
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

int arena_own_fd(void)
{
	return arena_fd;
}

/* Whether it is still open under its number, and of the user that this process has: else the next program is not of the family. */
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
	int fd = channel_memory("sidestep-arena", len);

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

void holder_put(struct conn_slot *slot, uint32_t before, uint32_t after)
{
	for (size_t i = 0; i < sizeof(slot->holder_pids) / sizeof(*slot->holder_pids) && !foreign_pids; i++) {
		uint32_t expected = before;
		if (atomic_compare_exchange_strong(&slot->holder_pids[i], &expected, after))
			return;
	}
}

void slot_release(struct conn_slot *slot)
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
		if (!pid || !pid_dead(known, pid) || !atomic_compare_exchange_strong(&slot->holder_pids[i], &pid, 0))
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
