/* shim_loaded.c - what the loader of static programs needs of the shim; see loaded.h. */
#include "shim_process.h"
#include "shim_switch.h"

#include "loaded.h"
#include "shim_fd.h"
#include "shim_tcp_only.h"

static void inherit_begin(void)
{
	inheriting_begin();
	demote_inherited(NULL, false);
}

static bool holds(void)
{
	for (uint32_t fd = 0; fd < atomic_load(&fd_end); fd++)
		if (conn_get((int)fd))
			return true;
	return false;
}

/* The parent's connection, if the number still is that one in the child. */
static void inherit_fd(int fd)
{
	HELD conn = conn_hold(fd);
	uint64_t cookie = 0;

	if (conn && (!conn->managed || (option_get(fd, SOL_SOCKET, SO_COOKIE, &cookie, sizeof(cookie)) &&
	                                cookie == word_load(conn->slot->cookie)))) {
		conn_leave_to_stranger(conn, fd, REASON_PASSED);
	}
}

/* The starter takes it for certain that we replace the program's calls. */
static void bequeath(void)
{
	demote_inherited(NULL, true);
}

/* A child in our memory goes on beside us, and its calls go to the kernel. */
static void release(void)
{
	conns_release(REASON_UNCOVERED, false);
}

static void uncovered(void)
{
	tcp_only_begin(REASON_UNCOVERED);
}

/*
 * No thread of such a program is cancelled by our C library's pthread_cancel(3). Its threads look for that, twice and by an
 * atomic operation, in each call that may wait.
 */
#define UNCANCELLED(result, name, params, number, ...) \
	static result uncancelled_##name params \
	{ \
		return (result)real.syscall(number, __VA_ARGS__); \
	}
UNCANCELLED(ssize_t, read, (int fd, void *buf, size_t n), SYS_read, fd, (long)buf, (long)n, 0, 0, 0)
UNCANCELLED(ssize_t, write, (int fd, const void *buf, size_t n), SYS_write, fd, (long)buf, (long)n, 0, 0, 0)
UNCANCELLED(ssize_t, recvfrom, (int fd, void *buf, size_t n, int f, struct sockaddr *a, socklen_t *l), SYS_recvfrom, fd,
            (long)buf, (long)n, f, (long)a, (long)l)
UNCANCELLED(ssize_t, sendto, (int fd, const void *buf, size_t n, int f, const struct sockaddr *a, socklen_t l),
            SYS_sendto, fd, (long)buf, (long)n, f, (long)a, l)
UNCANCELLED(int, accept4, (int fd, struct sockaddr *a, socklen_t *l, int f), SYS_accept4, fd, (long)a, (long)l, f, 0, 0)
UNCANCELLED(int, epoll_pwait, (int e, struct epoll_event *ev, int n, int t, const sigset_t *s), SYS_epoll_pwait, e,
            (long)ev, n, t, (long)s, _NSIG / 8)
#ifdef SYS_poll
UNCANCELLED(int, poll, (struct pollfd * p, nfds_t n, int t), SYS_poll, (long)p, (long)n, t, 0, 0, 0)
UNCANCELLED(int, epoll_wait, (int e, struct epoll_event *ev, int n, int t), SYS_epoll_wait, e, (long)ev, n, t, 0, 0)
#endif

EXPORT const struct loaded *sidestep_loaded(int (*action)(int, const struct sigaction *, struct sigaction *))
{
	static struct loaded loaded = {execute_bare,
	                               inherit_begin,
	                               holds,
	                               inheriting_end,
	                               inherit_fd,
	                               bequeath,
	                               release,
	                               signal_interrupts,
	                               uncovered,
	                               preload_without_ours,
	                               made_by_go,
	                               NULL,
	                               0};

	loaded.known = (const void *)fd_table;
	loaded.known_len = fd_table_len;
	real.sigaction = action;
	real.read = uncancelled_read;
	real.write = uncancelled_write;
	real.recvfrom = uncancelled_recvfrom;
	real.sendto = uncancelled_sendto;
	real.accept4 = uncancelled_accept4;
	real.epoll_pwait = uncancelled_epoll_pwait;
#ifdef SYS_poll
	real.poll = uncancelled_poll;
	real.epoll_wait = uncancelled_epoll_wait;
#endif
	stdio_seen = true;
	return &loaded;
}
