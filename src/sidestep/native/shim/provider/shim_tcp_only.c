/*
 * shim_tcp_only.c - processes that keep to TCP, with all their sockets, now and later. Some have an io_uring that may have
 * sockets, and whose entries do not come by here. It would wait for ever for bytes of a promoted socket, and break it by
 * writing. Others are under a seccomp filter of their own, which may forbid the shim's calls.
 */
#include "shim_tcp_only.h"
#include "shim_proc.h"
#include "shim_provider.h"
#include "shim_travel.h"

#include <fcntl.h>

#define LOOK_EVERY_NS 1000000000ll

_Atomic uint32_t tcp_only_reason;

/* The shim goes on making its calls under a filter, and reads the ring to its end; if others read, the bytes are recalled. */
void tcp_only_begin(enum reason_code reason)
{
	uint32_t none = REASON_NONE;

	if (!fd_table_len || !atomic_compare_exchange_strong(&tcp_only_reason, &none, reason))
		return;
	int mark = channel_memory(TCP_ONLY_MARK, 1);
	if (mark >= 0 && own_fd(mark) < 0)
		raw_close(mark);
	/* A process under a filter reads its rings on. In the strict mode it cannot, where that takes a provider's acknowledgement. */
	for (uint32_t fd = 0; fd < atomic_load(&fd_end); fd++) {
		HELD conn = conn_hold((int)fd);
		if (conn)
			conn_demote(conn, (int)fd, reason,
			            reason != REASON_SANDBOX || (word_load(kernel_strict) && conn_relayed(conn)));
	}
}

/* ---- io_uring ---- */
static _Atomic bool ring_unseen;

bool uring_doubted(void)
{
	return unlikely(atomic_load(&ring_unseen)) && !(atomic_load(&provider.wants) & WELCOME_FILE_RINGS);
}

/*
 * The provider knows whether the policy says that rings of this program have no sockets. Before it has answered nothing is on its
 * way to a ring of ours: then offer_make() asks again. Both sides store first and look then, at `ring_unseen` and `registry`.
 */
void uring_unseen(void)
{
	atomic_store(&ring_unseen, true);
	if (uring_doubted() && (atomic_load(&provider.registry) || word_load(rings_ever)))
		tcp_only_begin(REASON_IO_URING);
}

static bool not_a_ring(int dir, long number, void *argument)
{
	static const char ring[] = "anon_inode:[io_uring]";
	char name[16], target[sizeof(ring)];

	if (file_get((int)number)) /* a socket, an epoll set, a ring that is looked through, or one of ours */
		return true;
	snprintf(name, sizeof(name), "%ld", number);
	ssize_t n = real.syscall(SYS_readlinkat, dir, (long)name, (long)target, sizeof(target), 0, 0);
	bool *found = argument;
	*found = n == (ssize_t)sizeof(ring) - 1 && memcmp(target, ring, sizeof(ring) - 1) == 0;
	return !*found;
}

/* Asked before a connection is offered: a library that is linked statically makes its ring unseen. */
enum reason_code tcp_only_why(void)
{
	static _Atomic int64_t looked_at;
	int64_t now = now_ns(), last = word_load(looked_at);
	bool found = false;

	if (likely(!word_load(tcp_only_reason)) && (!last || now - last >= LOOK_EVERY_NS) &&
	    atomic_compare_exchange_strong(&looked_at, &last, now)) {
		int saved = errno, fds = proc_open("/proc/self/fd", O_RDONLY | O_DIRECTORY);
		if (fds >= 0) {
			proc_numbers(fds, not_a_ring, &found);
			raw_close(fds);
		}
		errno = saved;
		if (found)
			uring_unseen();
	}
	if (uring_doubted())
		uring_unseen(); /* the provider may have answered since */
	return (enum reason_code)word_load(tcp_only_reason);
}
