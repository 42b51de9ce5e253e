/*
 * shim_inherited.c - sockets inherited by programs that were started here (SLOT_INHERITED), until no other process holds
 * them.
 *
 * The kernel does not tell how many processes hold a socket. So the shim searches the open descriptors of all processes that
 * began after the connection: no other can have inherited it. In doubt it stays on TCP. Bytes that such a program has moved
 * show in the kernel's counts when the connection is to be promoted.
 */
#include "shim_proc.h"
#include "shim_provider.h"
#include "shim_switch.h"

#include <fcntl.h>
#include <sys/stat.h>

#define INHERITED_MAX 64                 /* connections looked for at once */
#define LOOK_FIRST_NS 100000000ll   /* least time after the inheritance, and between two looks; */
#define LOOK_LAST_NS 8000000000ll   /* greatest time between them, else a quarter of the time that has passed */
#define ANCESTORS_MAX 32
#define CONFINED_LOOK_NS 10000000ll /* Time between two looks whether confined processes have ended */

struct inherited {
	struct conn *conn; /* the connection, with a reference */
	int fd;
	bool held;
	ino_t inode;
	uint64_t inherited_ns;
};

struct family {
	uint64_t since_ns; /* birth of the oldest connection, to compare with that of processes */
	uint32_t ancestors[ANCESTORS_MAX];
	int ancestors_len;
};

static _Atomic uint32_t inheriting; /* threads that are just starting a program */
static _Atomic bool looking;
static uint32_t cursor; /* place where the next look begins; guarded by `looking` */

void inheriting_begin(void)
{
	atomic_fetch_add(&inheriting, 1);
}

void inheriting_end(void)
{
	atomic_fetch_sub(&inheriting, 1);
}

void inherited_after_fork(void)
{
	inheriting = 0;
	looking = false;
}

static bool is_ancestor(const struct family *family, uint32_t pid)
{
	for (int i = 0; i < family->ancestors_len; i++)
		if (family->ancestors[i] == pid)
			return true;
	return pid <= 1;
}

/*
 * True if a process that we cannot look into may descend from us. The kernel gives orphans to their ancestors, and these are
 * ours.
 */
static bool may_descend(const struct family *family, struct process process)
{
	for (int i = 0; i < ANCESTORS_MAX; i++) {
		if (process.parent == shim_pid || is_ancestor(family, process.parent) ||
		    !proc_process(process.parent, &process))
			return true;
		if (process.began_ns < family->since_ns)
			return false;
	}
	return true;
}

static bool ancestors_read(struct family *family)
{
	struct process process;
	uint32_t pid = shim_pid;

	for (family->ancestors_len = 0; pid > 1; pid = process.parent) {
		if (family->ancestors_len == ANCESTORS_MAX || !proc_process(pid, &process))
			return false;
		if (pid != shim_pid)
			family->ancestors[family->ancestors_len++] = pid;
	}
	return shim_pid == 1 || proc_process(1, &process); /* else other users' processes are hidden: proc(5), hidepid */
}

struct search {
	struct family family;
	struct inherited *inherited;
	int len;
	bool hidden; /* the kernel hides the open files of the process at hand */
	bool doubt;
};

static bool descriptor_seen(int dir, long number, void *argument)
{
	struct search *search = argument;
	char name[16], target[64];
	unsigned long inode;

	snprintf(name, sizeof(name), "%ld", number);
	ssize_t n = real.syscall(SYS_readlinkat, dir, (long)name, (long)target, sizeof(target) - 1, 0, 0);
	if (n < 0) {
		search->hidden |= errno != ENOENT;
		return !search->hidden;
	}
	target[n] = '\0';
	if (sscanf(target, "socket:[%lu]", &inode) == 1)
		for (int i = 0; i < search->len; i++)
			search->inherited[i].held |= search->inherited[i].inode == inode;
	return true;
}

static bool process_seen(int dir, long number, void *argument)
{
	struct search *search = argument;
	struct process process;
	char path[32];

	(void)dir;
	if (number == (long)shim_pid || !proc_process((uint32_t)number, &process) ||
	    process.began_ns < search->family.since_ns)
		return true;
	snprintf(path, sizeof(path), "/proc/%ld/fd", number);
	int fds = proc_open(path, O_RDONLY | O_DIRECTORY);
	search->hidden = fds < 0 && errno != ENOENT;
	if (fds >= 0) {
		if (!proc_numbers(fds, descriptor_seen, search))
			search->hidden |= errno != ENOENT && errno != ESRCH;
		raw_close(fds);
	}
	search->doubt = search->hidden && may_descend(&search->family, process);
	return !search->doubt;
}

/* Marks those that another process holds. False: that cannot be known. */
static bool others_look(struct search *search)
{
	char self_pid[16] = "";
	bool known = false;

	if (real.syscall(SYS_readlinkat, AT_FDCWD, (long)"/proc/self", (long)self_pid, sizeof(self_pid) - 1, 0, 0) <= 0 ||
	    proc_number(self_pid) != (long)getpid() || !ancestors_read(&search->family))
		return false;
	int processes = proc_open("/proc", O_RDONLY | O_DIRECTORY);
	if (processes < 0)
		return false;
	known = proc_numbers(processes, process_seen, search);
	raw_close(processes);
	return known && !search->doubt;
}

/* Processes tell when they began by CLOCK_BOOTTIME, which is never behind. */
static uint64_t process_clock(uint64_t born_ns)
{
	const uint64_t rounded = 20000000;
	struct timespec boot;
	int64_t now = now_ns();

	if (clock_gettime(CLOCK_BOOTTIME, &boot) < 0 || timespec_ns(&boot) < now || born_ns < rounded)
		return 0; /* a time namespace of its own */
	return born_ns - rounded;
}

static int inherited_collect(struct search *search)
{
	uint32_t end = atomic_load(&fd_end);
	struct stat st;

	search->family.since_ns = UINT64_MAX;
	for (uint32_t n = 0; n < end && search->len < INHERITED_MAX; n++) {
		uint32_t fd = cursor++ % end;
		struct conn *conn = conn_hold((int)fd);
		if (!conn)
			continue;
		if (!slot_has(conn->slot, SLOT_INHERITED) || slot_has(conn->slot, SLOT_PIN) || conn_fd(conn) != (int)fd ||
		    real.fstat((int)fd, &st) < 0) {
			conn_unref(conn);
			continue;
		}
		search->inherited[search->len++] =
			(struct inherited){conn, (int)fd, false, st.st_ino, atomic_load(&conn->slot->inherited_ns)};
		uint64_t since = process_clock(conn->slot->born_ns);
		if (since < search->family.since_ns)
			search->family.since_ns = since;
	}
	return search->len;
}

/* This process alone has it. A thread that lends it just now stores the time before the flag, and we clear the flag first. */
static void inherited_released(struct inherited *inherited)
{
	conn_promote(inherited->conn, inherited->fd, SLOT_INHERITED | SLOT_PASSED);
	if (atomic_load(&inherited->conn->slot->inherited_ns) != inherited->inherited_ns)
		conn_demote(inherited->conn, inherited->fd, REASON_INHERITED, true);
	else
		shim_log("fd %d: no other program holds it", inherited->fd);
}

static bool look_is_due(const struct search *search, int64_t since)
{
	int64_t now = now_ns();

	for (int i = 0; i < search->len; i++) {
		int64_t age = now - (int64_t)search->inherited[i].inherited_ns;
		int64_t pause = age / 4 < LOOK_LAST_NS ? age / 4 : LOOK_LAST_NS;
		if (age >= LOOK_FIRST_NS && since >= pause)
			return true;
	}
	return false;
}

/* No lock held. Looks, if it is time to, whether lent sockets of this process have come back. */
static void inherited_look(void)
{
	static _Atomic int64_t looked_at, next_at;
	struct inherited inherited[INHERITED_MAX];
	struct search search = {.inherited = inherited};
	int saved = errno;
	int64_t now = now_ns();

	if (now < word_load(next_at) || atomic_exchange(&looking, true))
		return;
	critical_enter(); /* a handler must not jump out of it */
	word_store(next_at, now + LOOK_FIRST_NS);
	bool known =
		inherited_collect(&search) && look_is_due(&search, now - word_load(looked_at)) && !atomic_load(&inheriting);
	if (known) {
		/* twice: a holder may start another one behind our back and end before its turn comes */
		known = others_look(&search) && others_look(&search) && !atomic_load(&inheriting);
		word_store(looked_at, now_ns());
	}
	for (int i = 0; i < search.len; i++) {
		if (known && !inherited[i].held)
			inherited_released(&inherited[i]);
		conn_unref(inherited[i].conn);
	}
	critical_leave();
	atomic_store(&looking, false);
	errno = saved;
}

/* No lock is held. The connection may be promoted if those have ended who had it uncounted. */
static void confined_look(struct conn *conn)
{
	const int64_t now = coarse_ns();

	if (now < word_load(conn->again_at) || slot_has(conn->slot, SLOT_PIN | SLOT_RESET))
		return;
	KEEP_ERRNO;
	word_store(conn->again_at, now + CONFINED_LOOK_NS);
	const int fd = conn_alone(conn) ? conn_fd(conn) : -1;
	if (fd >= 0 && !conn_fd_stale(conn, fd))
		conn_unconfine(conn, fd);
}

/* No lock held. Whether what keeps the connection on TCP is over: who has it besides. */
void kept_look(struct conn *conn)
{
	if (slot_has(conn->slot, SLOT_CONFINED))
		confined_look(conn);
	if (slot_has(conn->slot, SLOT_INHERITED))
		inherited_look();
}
