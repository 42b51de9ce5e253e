/* shim.c - threads and their lock, the log, settings, the descriptor table, and descriptors of the shim's own. */
#include "shim.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/rseq.h>

#pragma weak __rseq_size /* symbol of glibc 2.35: the shim comes up with an older one, too */
#pragma weak __rseq_offset

__thread struct thread self;
_Atomic(struct file *) *fd_table;
uint32_t fd_table_len;
_Atomic uint32_t fd_end;
_Atomic uint32_t own_first = UINT32_MAX, own_end;
pthread_mutex_t shim_lock = PTHREAD_MUTEX_INITIALIZER;
uint32_t shim_pid;
struct config config = {
	.promote_after_calls = PROMOTE_AFTER_CALLS,
	.promote_after_bytes = PROMOTE_AFTER_BYTES,
	.ring_size = 256u << 10,
	.remote_ring_size = 256u << 10,
	.spin_ns = 50000,
	.ncpus = 1,
};
static struct file own_file = {.kind = FILE_OWN};
pthread_key_t thread_key;
static int log_fd = -1;

/* False: it cannot be written. Then the signal by which the kernel would end the program is revoked: it has not written. */
static bool log_write(const char *line, size_t len)
{
	const uint64_t ends =
		1ull << (SIGXFSZ - 1) | 1ull << (SIGPIPE - 1); /* a limit of RLIMIT_FSIZE; a reader that has gone */
	const struct timespec at_once = {0};
	uint64_t mask, waiting = 0;

	real.syscall(SYS_rt_sigprocmask, SIG_BLOCK, (long)&ends, (long)&mask, sizeof(ends), 0, 0);
	real.syscall(SYS_rt_sigpending, (long)&waiting, sizeof(waiting), 0, 0, 0, 0);
	bool written = raw_write(log_fd, line, len) >= 0;
	uint64_t ours = ends & ~waiting;
	if (!written && ours)
		real.syscall(SYS_rt_sigtimedwait, (long)&ours, 0, (long)&at_once, sizeof(ours), 0, 0);
	real.syscall(SYS_rt_sigprocmask, SIG_SETMASK, (long)&mask, 0, sizeof(mask), 0, 0);
	return written;
}

void shim_log(const char *format, ...)
{
	char line[512];
	va_list args;

	if (log_fd < 0)
		return;
	KEEP_ERRNO;
	int at = snprintf(line, sizeof(line), "%d.%d ", (int)shim_pid, (int)self.tid);
	va_start(args, format);
	int len = vsnprintf(line + at, sizeof(line) - (size_t)at - 1, format, args);
	va_end(args);
	if (len > 0) {
		size_t total = (size_t)at + (size_t)len;
		if (total > sizeof(line) - 2)
			total = sizeof(line) - 2;
		line[total++] = '\n';
		if (!log_write(line, total))
			log_fd = -1; /* the disk is full or the reader gone: the program must not suffer */
	}
}

/*
 * The digits of `text` up to `end`, which is a character or the end of the text. The last parameter gets the place behind
 * them. As int() in settings.py.
 */
static bool digits(const char *text, char end, uint64_t *value, const char **rest)
{
	size_t len = strspn(text, "0123456789");

	errno = 0;
	*value = strtoull(text, NULL, 10);
	*rest = text + len;
	return len && text[len] == end && !errno;
}

static uint64_t env_number(const char *name, uint64_t low, uint64_t high, uint64_t fallback, bool *found)
{
	const char *text = getenv(name), *end;
	uint64_t value;

	if (!text || !*text)
		return fallback;
	if (!digits(text, '\0', &value, &end) || value < low || value > high) {
		fprintf(stderr, "sidestep: %s=%s is not a number from %llu to %llu; using %llu\n", name, text,
		        (unsigned long long)low, (unsigned long long)high, (unsigned long long)fallback);
		return fallback;
	}
	if (found)
		*found = true;
	return value;
}

/* CALLS or CALLS:BYTES, as PromoteAfter.parse() in settings.py has it. */
static void promote_after_read(void)
{
	const char *text = getenv("SIDESTEP_PROMOTE_AFTER"), *rest;
	uint64_t calls, bytes = PROMOTE_AFTER_BYTES;

	if (!text || !*text)
		return;
	bool good = strchr(text, ':') ? digits(text, ':', &calls, &rest) && digits(rest + 1, '\0', &bytes, &rest)
	                              : digits(text, '\0', &calls, &rest);
	if (!good || calls > PROMOTE_AFTER_CALLS_MAX || bytes > PROMOTE_AFTER_BYTES_MAX) {
		fprintf(stderr, "sidestep: SIDESTEP_PROMOTE_AFTER=%s is not CALLS or CALLS:BYTES; using %u:%llu\n", text,
		        config.promote_after_calls, (unsigned long long)config.promote_after_bytes);
		return;
	}
	config.promote_after_calls = (uint32_t)calls;
	config.promote_after_bytes = bytes;
	config.promote_set = true;
}

void config_read(void)
{
	cpu_set_t cpus;

	promote_after_read();
	/* copied: servers clear their environment (nginx does) */
	const char *provider = getenv("SIDESTEP_SOCKET");
	if (provider && strlen(provider) < sizeof(config.socket))
		memcpy(config.socket, provider, strlen(provider) + 1);
	uint32_t ring = (uint32_t)env_number("SIDESTEP_RING_SIZE", CHANNEL_RING_MIN, CHANNEL_RING_MAX, config.ring_size,
	                                     &config.ring_size_set);
	if (ring & (ring - 1))
		fprintf(stderr, "sidestep: SIDESTEP_RING_SIZE=%u is not a power of two; using %u\n", ring, config.ring_size);
	else
		config.ring_size = config.remote_ring_size = ring;
	config.spin_ns = (uint32_t)env_number("SIDESTEP_SPIN_US", 0, SPIN_US_MAX, config.spin_ns / 1000, NULL) * 1000;
	if (sched_getaffinity(0, sizeof(cpus), &cpus) == 0)
		config.ncpus = CPU_COUNT(&cpus);
	const char *stay = getenv("SIDESTEP_STAY"); /* a seccomp filter kills a process that changes its CPUs */
	config.stay = stay && strcmp(stay, "1") == 0;
	const char *from_root = getenv("SIDESTEP_FROM_ROOT");
	config.from_root = from_root && strcmp(from_root, "1") == 0;
	const char *path = getenv("SIDESTEP_LOG");
	if (path && *path) {
		int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
		if (fd >= 0)
			log_fd = own_fd(fd);
	}
}

uint32_t cpu_now(void)
{
	if (likely(&__rseq_size && __rseq_size)) {
		const struct rseq *area = (const struct rseq *)((char *)__builtin_thread_pointer() + __rseq_offset);
		return *(const volatile uint32_t *)&area->cpu_id + 1;
	}
	return (uint32_t)sched_getcpu() + 1;
}

uint32_t thread_init(void)
{
	self.tid = (uint32_t)real.syscall(SYS_gettid, 0, 0, 0, 0, 0, 0);
	return self.tid;
}

/* Descriptors a thread owns are released when it ends; only threads that got some register. */
void thread_register(void)
{
	if (!self.registered) {
		self.registered = true;
		pthread_setspecific(thread_key, &self);
	}
}

/* The signals that came in a critical section come once more, now that it has ended. */
void critical_flush(void)
{
	KEEP_ERRNO;

	thread_register(); /* gives the memory back */
	while (self.signals_deferred) {
		siginfo_t info = self.deferred[--self.signals_deferred];
		real.syscall(SYS_rt_tgsigqueueinfo, getpid(), self.tid ? (long)self.tid : (long)thread_init(), info.si_signo,
		             (long)&info, 0, 0);
	}
}

void shim_lock_take(void)
{
	int before;

	critical_enter();
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
	pthread_mutex_lock(&shim_lock);
	self.cancel_state = before;
}

void shim_lock_drop(void)
{
	int before = self.cancel_state;

	pthread_mutex_unlock(&shim_lock);
	pthread_setcancelstate(before, &before);
	critical_leave();
}

/* A child of fork() has one thread, under another number, and its lock is made anew. */
void shim_after_fork(void)
{
	shim_pid = (uint32_t)getpid();
	self.tid = 0;
	thread_init();
	shim_lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	pthread_setcancelstate(self.cancel_state, &(int){0});
	critical_leave(); /* taken before the fork */
}

/*
 * True if a thread, or all of a process, has ended. A killed one remains until its parent has waited for it, and we may be
 * the parent. proc_pid_stat(5): the name in parentheses, the state, and 17 fields later the number of threads.
 */
bool task_dead(uint32_t id, bool process)
{
	char path[32], text[512];
	KEEP_ERRNO;

	if (kill((pid_t)id, 0) < 0 && errno == ESRCH)
		return true;
	snprintf(path, sizeof(path), "/proc/%u/stat", id);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t n = fd < 0 ? 0 : real.pread64(fd, text, sizeof(text) - 1, 0);
	if (fd >= 0)
		raw_close(fd);
	text[n > 0 ? n : 0] = '\0';
	const char *at = strrchr(text, ')');
	bool dead = at && at[1] == ' ' && (at[2] == 'Z' || at[2] == 'X');
	if (dead && process) { /* the first thread of a process may end before the others */
		for (int field = 0; field < 18 && at; field++)
			at = strchr(at + 1, ' ');
		dead = at && strtoul(at, NULL, 10) <= 1;
	}
	return dead;
}

void file_put(int fd, struct file *file)
{
	if ((uint32_t)fd >= fd_table_len)
		return;
	/* shim's own numbers are high and not among those that loops look for */
	uint32_t end = word_load(fd_end);
	while (file && file != &own_file && (uint32_t)fd >= end &&
	       !atomic_compare_exchange_weak(&fd_end, &end, (uint32_t)fd + 1))
		;
	atomic_store_explicit(&fd_table[fd], file, memory_order_release);
}

struct file closing_file = {.kind = FILE_CLOSING};
struct file listener_file = {.kind = FILE_LISTENER};

void file_closed(int fd)
{
	struct file *closing = &closing_file;

	/* the number may have been given to another file since, which has its own entry then */
	if ((uint32_t)fd < fd_table_len)
		atomic_compare_exchange_strong(&fd_table[fd], &closing, NULL);
}

#define OWN_FD_BASE_MAX 16384 /* a higher number would make the kernel copy a larger table at every fork */

int own_fd(int fd)
{
	struct rlimit limit;
	int base = 512;

	if (fd < 0)
		return -1;
	/* High, so that programs get the low numbers they expect; below the soft limit, because that bounds every number. */
	if (getrlimit(RLIMIT_NOFILE, &limit) == 0)
		base = limit.rlim_cur < (rlim_t)OWN_FD_BASE_MAX / 7 * 8 ? (int)(limit.rlim_cur / 8 * 7) : OWN_FD_BASE_MAX;
	/* connections of the last program stand there already, maybe above a limit that is lower by now */
	int high = fd >= base ? fd : (int)real.fcntl64(fd, F_DUPFD_CLOEXEC, base);
	if (high == fd)
		real.fcntl64(fd, F_SETFD, FD_CLOEXEC);
	else
		raw_close(fd);
	if (high < 0 || (uint32_t)high >= fd_table_len) {
		/* No room up there. The program's numbers are not ours to take: the caller does without, on TCP. */
		if (high >= 0)
			raw_close(high);
		return -1;
	}
	uint32_t low = atomic_load(&own_first), end = atomic_load(&own_end);
	while ((uint32_t)high < low && !atomic_compare_exchange_weak(&own_first, &low, (uint32_t)high))
		;
	while ((uint32_t)high >= end && !atomic_compare_exchange_weak(&own_end, &end, (uint32_t)high + 1))
		;
	file_put(high, &own_file);
	return high;
}

void own_fd_close(int fd)
{
	if (fd < 0)
		return;
	file_put(fd, NULL);
	raw_close(fd);
}
