/*
 * shim_uring.c - processes that have an io_uring. Its calls do not come by here: a read of a promoted socket would wait for
 * ever, what was written would break it. Who has a ring stays on TCP.
 */
#include "shim_proc.h"

#include <fcntl.h>

#define LOOK_EVERY_NS 1000000000ll

_Atomic bool has_io_uring;

void uring_made(void)
{
	if (atomic_exchange(&has_io_uring, true))
		return;
	for (uint32_t fd = 0; fd < atomic_load(&fd_end); fd++) {
		HELD conn = conn_hold((int)fd);
		if (conn)
			conn_demote(conn, (int)fd, REASON_IO_URING, true);
	}
}

static bool not_a_ring(int dir, long number, void *argument)
{
	static const char ring[] = "anon_inode:[io_uring]";
	char name[16], target[sizeof(ring)];

	if (file_get((int)number)) /* a socket, an epoll set, or one of ours */
		return true;
	snprintf(name, sizeof(name), "%ld", number);
	ssize_t n = real.syscall(SYS_readlinkat, dir, (long)name, (long)target, sizeof(target), 0, 0);
	bool *found = argument;
	*found = n == (ssize_t)sizeof(ring) - 1 && memcmp(target, ring, sizeof(ring) - 1) == 0;
	return !*found;
}

/* Before a connection is offered: a library that is linked statically makes its ring unseen. */
bool uring_held(void)
{
	static _Atomic int64_t looked_at;
	int64_t now = now_ns(), last = word_load(looked_at);
	bool found = false;

	if (likely(!word_load(has_io_uring)) && (!last || now - last >= LOOK_EVERY_NS) &&
	    atomic_compare_exchange_strong(&looked_at, &last, now)) {
		int saved = errno, fds = proc_open("/proc/self/fd", O_RDONLY | O_DIRECTORY);
		if (fds >= 0) {
			proc_numbers(fds, not_a_ring, &found);
			raw_close(fds);
		}
		errno = saved;
		if (found)
			uring_made();
	}
	return word_load(has_io_uring);
}
