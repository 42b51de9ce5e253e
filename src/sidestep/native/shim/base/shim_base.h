/*
 * shim_base.h - basis of every file of the shim: its threads, critical sections and locks, its settings, and calls that no
 * hook of ours sees.
 */
#ifndef SIDESTEP_SHIM_BASE_H
#define SIDESTEP_SHIM_BASE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "doorbell.h"
#include "layout.h"
#include "shim_real.h"
#include "shim_slot.h"

#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)
#define EXPORT __attribute__((visibility("default")))
/* libc has both names for one function */
#define ALIAS(name, function) EXPORT __typeof__(function) name __attribute__((alias(#function))) COPIES(function)
#if __has_attribute(copy)
#define COPIES(function) __attribute__((copy(function)))
#else
#define COPIES(function)
#endif

#define DEFERRED_MAX 8 /* signals deferred by a critical section; one more is handled at once */

struct thread {
	uint32_t tid;
	uint32_t critical;         /* nesting of critical sections */
	uint32_t calls; /* system calls of our own since the last wait that a connection ended: slot->wait_calls */
	uint32_t signals_deferred;
	int cancel_state; /* cancel state before the outermost lock was taken */
	volatile uint64_t signals; /* handlers run on this thread */
	volatile uint64_t signals_interrupting; /* signals whose handlers were installed without SA_RESTART */
	int64_t full_until; /* next look at a reader that stands still or at bytes without an event; 0: none */
	int64_t served_at, serve_at; /* the last conns_serve(), and when another is owed at the latest; 0: none is */
	struct timespec sleep; /* a handler zeroes it, so that a sleep just about to start returns at once */
	struct doorbell *doorbell;
	int doorbell_epfd; /* edge-triggered set of the doorbells this thread sleeps on */
	uint32_t doorbells_len;
	uint64_t doorbells[32]; /* serials of the doorbells in doorbell_epfd */
	_Atomic uint32_t doorbell_watched; /* watch of the provider's socket there; see rpc_watch() */
	int wait_epfd; /* set on which a blocking receive sleeps: its socket, and doorbells as above */
	uint32_t wait_doorbells_len;
	_Atomic uint32_t wait_watched;
	uint32_t watched_next;
	uint64_t wait_doorbells[8];
	struct {
		uint64_t serial; /* serial of the conn; 0: free */
		int fd;
		bool edges; /* edges are all that it reports */
	} watched[4]; /* sockets in wait_epfd */
	siginfo_t
		*deferred; /* DEFERRED_MAX of them, on first need: thread-local memory is scarce where the library comes late */
	bool registered;
};

extern __thread struct thread self;
extern pthread_mutex_t shim_lock;
extern pthread_key_t thread_key; /* key of threads that own descriptors; see thread_register() */
extern uint32_t shim_pid;

struct config {
	uint32_t promote_after_calls;
	uint64_t promote_after_bytes;
	bool promote_set; /* true if the environment sets it: the provider's defaults do not apply */
	uint32_t ring_size, remote_ring_size; /* sizes with ends of this host, and with those of others */
	bool ring_size_set;
	uint32_t spin_ns;
	int ncpus;
	bool stay; /* no thread is moved to another CPU */
	bool from_root; /* root started us, or what became us: the provider is to know what we become */
	char socket[108]; /* path of the provider, as sun_path holds it; empty: none */
	bool embedded; /* loaded by a process that was started without us; see shim_embed.c */
	bool opt_in; /* only sockets that were adopted are tracked; see shim_embed.c */
};
extern struct config config;

void shim_log(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* The result of a call that fails. */
static inline int fail_with(int error)
{
	errno = error;
	return -1;
}

/* A scope of errno: at the end of the block it is as it was, though calls in between may fail. */
#define KEEP_ERRNO const int kept_errno __attribute__((cleanup(errno_put), unused)) = errno
static inline void errno_put(const int *kept)
{
	errno = *kept;
}

/* ---- time and CPU ---- */
static inline int64_t now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return ts.tv_sec * 1000000000ll + ts.tv_nsec;
}

static inline void cpu_relax(void)
{
#if defined(__x86_64__)
	__builtin_ia32_pause();
#elif defined(__aarch64__)
	__asm__ volatile("isb" ::: "memory");
#endif
}

static inline void full_fence(void)
{
	atomic_thread_fence(memory_order_seq_cst);
}

uint32_t cpu_now(void); /* current CPU + 1 */

/* ---- critical sections ---- */
void critical_flush(void);
static inline void critical_enter(void)
{
	self.critical++;
	atomic_signal_fence(memory_order_seq_cst);
}
static inline void critical_leave(void)
{
	atomic_signal_fence(memory_order_seq_cst);
	if (--self.critical == 0 && unlikely(self.signals_deferred))
		critical_flush();
}

/* ---- system calls that are no cancellation points: for use under locks ---- */
#define RAW(result, name, params, ...) \
	static inline result raw_##name params \
	{ \
		return (result)real.syscall(__VA_ARGS__); \
	}
RAW(ssize_t, read, (int fd, void *buf, size_t n), SYS_read, fd, (long)buf, (long)n, 0, 0, 0)
RAW(ssize_t, write, (int fd, const void *buf, size_t n), SYS_write, fd, (long)buf, (long)n, 0, 0, 0)
RAW(ssize_t, send, (int fd, const void *buf, size_t n, int f), SYS_sendto, fd, (long)buf, (long)n, f, 0, 0)
RAW(ssize_t, recv, (int fd, void *buf, size_t n, int f), SYS_recvfrom, fd, (long)buf, (long)n, f, 0, 0)
RAW(ssize_t, sendmsg, (int fd, const struct msghdr *m, int f), SYS_sendmsg, fd, (long)m, f, 0, 0, 0)
RAW(ssize_t, recvmsg, (int fd, struct msghdr *m, int f), SYS_recvmsg, fd, (long)m, f, 0, 0, 0)
RAW(int, epoll_look, (int e, struct epoll_event *ev, int n), SYS_epoll_pwait, e, (long)ev, n, 0, 0, _NSIG / 8)
RAW(int, close, (int fd), SYS_close, fd, 0, 0, 0, 0, 0)
static inline int raw_poll(struct pollfd *fds, nfds_t len, int timeout_ms)
{
	struct timespec limit = {timeout_ms / 1000, timeout_ms % 1000 * 1000000l};

	return (int)real.syscall(SYS_ppoll, (long)fds, (long)len, (long)&limit, 0, _NSIG / 8, 0);
}
/* Wakes all threads that sleep on a doorbell's eventfd, and never waits; see doorbell.h. */
static inline bool raw_doorbell_ring(int fd)
{
	uint64_t taken;
	struct iovec into = {&taken, sizeof(taken)};

	return real.syscall(SYS_preadv2, fd, (long)&into, 1, -1, -1, RWF_NOWAIT) == sizeof(taken);
}
/* A socket's option of `len` bytes. False: it has none, and *value is as before. */
static inline bool option_get(int fd, int level, int name, void *value, socklen_t len)
{
	return real.getsockopt(fd, level, name, value, &len) == 0;
}
/* tcp_disconnect(): the peer gets a reset, and what the kernel still holds of the connection is lost. */
static inline int tcp_reset(int fd)
{
	return real.connect(fd, &(struct sockaddr){.sa_family = AF_UNSPEC}, sizeof(struct sockaddr));
}
static inline int64_t deadline_after(int64_t timeout_ns)
{
	int64_t now = now_ns();

	return timeout_ns < 0 || timeout_ns > INT64_MAX - now ? INT64_MAX : now + timeout_ns;
}
static inline int64_t timespec_ns(const struct timespec *ts)
{
	return ts->tv_sec > 9000000000ll ? INT64_MAX : ts->tv_sec * 1000000000ll + ts->tv_nsec;
}

void shim_lock_take(void);
void shim_lock_drop(void);
void shim_after_fork(void);
uint32_t thread_init(void);
bool task_dead(uint32_t id, bool process);
void config_read(void); /* reads the environment */

/*
 * A word that no other thread changes needs no bus lock, which costs more than the whole shim adds to a call on TCP. A signal
 * comes before an instruction or after it. libc knows if there is another thread (sys/single_threaded.h).
 */
extern const char *one_thread; /* points to a word that is not 0 as long as this process has one */
/* Adds; `alone`: no other process has the word either. */
static inline void word_count64(_Atomic uint64_t *word, uint64_t value, bool alone)
{
#if defined(__x86_64__)
	if (likely(alone)) {
		__asm__("addq %1, %0" : "+m"(*word) : "er"(value) : "cc");
		return;
	}
#endif
	(void)alone;
	word_add(*word, value);
}
/* The same, with a full fence where there is somebody to be ordered with. */
static inline void word_count32(_Atomic uint32_t *word, uint32_t value, bool alone)
{
#if defined(__x86_64__)
	if (likely(alone)) {
		__asm__ volatile("addl %1, %0" : "+m"(*word) : "er"(value) : "cc", "memory");
		return;
	}
#endif
	(void)alone;
	atomic_fetch_add(word, value);
}
/* Takes one off. True: it was the last. */
static inline bool refs_drop(_Atomic uint32_t *refs)
{
#if defined(__x86_64__)
	if (likely(*one_thread)) {
		bool last;
		__asm__ volatile("subl $1, %0" : "+m"(*refs), "=@ccz"(last) : : "memory");
		return last;
	}
#endif
	return atomic_fetch_sub(refs, 1) == 1;
}
/* Adds one, if there is any. */
static inline bool refs_take(_Atomic uint32_t *refs)
{
	uint32_t found = word_load(*refs);
	bool taken;

	do {
		if (unlikely(found == 0))
			return false;
#if defined(__x86_64__)
		if (likely(*one_thread)) {
			__asm__ volatile("cmpxchgl %3, %0" : "+m"(*refs), "+a"(found), "=@ccz"(taken) : "r"(found + 1) : "memory");
			continue;
		}
#endif
		taken = atomic_compare_exchange_weak(refs, &found, found + 1);
	} while (unlikely(!taken));
	return true;
}

#endif
