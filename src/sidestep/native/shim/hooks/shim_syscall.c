/* shim_syscall.c - ways into the kernel that bypass the hooked calls: raw system calls, asynchronous I/O. */
#include "shim_number.h"
#include "shim_tcp_only.h"

#include <fcntl.h>
#include <linux/aio_abi.h>
#include <linux/close_range.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/sendfile.h>

static long raw_clone(long number, const long a[6], uint64_t flags)
{
	if (!fd_table_len || (flags & CLONE_VM))
		return real.syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
	fork_prepare();
	long child = real.syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
	if (child == 0)
		fork_child();
	else
		fork_parent();
	return child;
}

/* All others, of which some return new numbers. */
static long raw_number(long number, const long a[6])
{
	long result = real.syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);

	switch (number) {
	case SYS_eventfd2:
	case SYS_fanotify_init:
	case SYS_inotify_init1:
	case SYS_memfd_create:
	case SYS_mq_open:
	case SYS_open_by_handle_at:
	case SYS_openat:
	case SYS_perf_event_open:
	case SYS_signalfd4:
	case SYS_timerfd_create:
	case SYS_userfaultfd:
#ifdef SYS_pidfd_open
	case SYS_pidfd_open:
#endif
#ifdef SYS_pidfd_getfd
	case SYS_pidfd_getfd:
#endif
#ifdef SYS_openat2
	case SYS_openat2:
#endif
#ifdef SYS_open
	case SYS_creat:
	case SYS_eventfd:
	case SYS_inotify_init:
	case SYS_open:
	case SYS_signalfd:
#endif
		fd_new((int)result);
		break;
	}
	return result;
}

/* Calls that move bytes, and those that wait until some can be moved. */
static long raw_moving(long number, const long a[6])
{
	switch (number) {
	case SYS_read: return read((int)a[0], (void *)a[1], (size_t)a[2]);
	case SYS_write: return write((int)a[0], (const void *)a[1], (size_t)a[2]);
	case SYS_readv: return readv((int)a[0], (const struct iovec *)a[1], (int)a[2]);
	case SYS_writev: return writev((int)a[0], (const struct iovec *)a[1], (int)a[2]);
	case SYS_preadv2: return preadv2((int)a[0], (const struct iovec *)a[1], (int)a[2], (off_t)a[3], (int)a[5]);
	case SYS_pwritev2: return pwritev2((int)a[0], (const struct iovec *)a[1], (int)a[2], (off_t)a[3], (int)a[5]);
	case SYS_recvfrom:
		return recvfrom((int)a[0], (void *)a[1], (size_t)a[2], (int)a[3], (struct sockaddr *)a[4], (socklen_t *)a[5]);
	case SYS_sendto:
		return sendto((int)a[0], (const void *)a[1], (size_t)a[2], (int)a[3], (const struct sockaddr *)a[4],
		              (socklen_t)a[5]);
	case SYS_recvmsg: return recvmsg((int)a[0], (struct msghdr *)a[1], (int)a[2]);
	case SYS_sendmsg: return sendmsg((int)a[0], (const struct msghdr *)a[1], (int)a[2]);
	case SYS_sendmmsg: return sendmmsg((int)a[0], (struct mmsghdr *)a[1], (unsigned)a[2], (int)a[3]);
	case SYS_recvmmsg:
		return recvmmsg((int)a[0], (struct mmsghdr *)a[1], (unsigned)a[2], (int)a[3], (struct timespec *)a[4]);
	case SYS_sendfile: return sendfile((int)a[0], (int)a[1], (off_t *)a[2], (size_t)a[3]);
	case SYS_splice: return splice((int)a[0], (off_t *)a[1], (int)a[2], (off_t *)a[3], (size_t)a[4], (unsigned)a[5]);
	case SYS_pselect6:
		return pselect_counting((int)a[0], (fd_set *)a[1], (fd_set *)a[2], (fd_set *)a[3], (struct timespec *)a[4],
		                        a[5] ? *(const sigset_t *const *)a[5] : NULL); /* a mask, and its size */
	case SYS_epoll_create1: return epoll_create1((int)a[0]);
	case SYS_epoll_ctl: return epoll_ctl((int)a[0], (int)a[1], (int)a[2], (struct epoll_event *)a[3]);
	case SYS_epoll_pwait:
		return epoll_pwait((int)a[0], (struct epoll_event *)a[1], (int)a[2], (int)a[3], (const sigset_t *)a[4]);
	case SYS_epoll_pwait2:
		return epoll_pwait2((int)a[0], (struct epoll_event *)a[1], (int)a[2], (const struct timespec *)a[3],
		                    (const sigset_t *)a[4]);
	case SYS_pipe2: return pipe2((int *)a[0], (int)a[1]);
	case SYS_socketpair: return socketpair((int)a[0], (int)a[1], (int)a[2], (int *)a[3]);
	case SYS_ppoll:
		return ppoll((struct pollfd *)a[0], (nfds_t)a[1], (const struct timespec *)a[2], (const sigset_t *)a[3]);
#ifdef SYS_poll
	case SYS_pipe: return pipe((int *)a[0]);
	case SYS_poll: return poll((struct pollfd *)a[0], (nfds_t)a[1], (int)a[2]);
	case SYS_select: return select((int)a[0], (fd_set *)a[1], (fd_set *)a[2], (fd_set *)a[3], (struct timeval *)a[4]);
	case SYS_epoll_create: return epoll_create((int)a[0]);
	case SYS_epoll_wait: return epoll_wait((int)a[0], (struct epoll_event *)a[1], (int)a[2], (int)a[3]);
#endif
	}
	return raw_number(number, a);
}

static long raw_ring(long number, const long a[6])
{
	/* libuv batches epoll_ctl through io_uring, past every hook: it uses epoll_ctl when there is none */
	if (number == SYS_io_uring_setup && fd_table_len)
		return fail_with(ENOSYS);
	if (number == SYS_io_uring_register)
		ring_register_unseen((unsigned)a[1]);
	else if (number == SYS_io_uring_enter && a[1] && ring_looked_through((int)a[0], (unsigned)a[3]))
		uring_unseen(); /* entries that nobody has looked at; other rings are found by their descriptors: tcp_only_why() */
	return real.syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

/* The kernel moves the bytes of asynchronous I/O. */
static void aio_kernel_demote(long len, struct iocb *const list[])
{
	for (long i = 0; list && i < len; i++) {
		HELD conn = list[i] ? conn_hold((int)list[i]->aio_fildes) : NULL;
		if (conn)
			conn_demote(conn, (int)list[i]->aio_fildes, REASON_ASYNC_IO, true);
	}
}

EXPORT long syscall(long number, ...)
{
	va_list args;
	long a[6];

	va_start(args, number);
	for (int i = 0; i < 6; i++)
		a[i] = va_arg(args, long);
	va_end(args);
	switch (number) {
	case SYS_io_uring_enter:
	case SYS_io_uring_register:
	case SYS_io_uring_setup: return raw_ring(number, a);
	case SYS_io_submit:
		if (fd_table_len)
			aio_kernel_demote(a[1], (struct iocb *const *)a[2]);
		break;
	case SYS_socket: return socket((int)a[0], (int)a[1], (int)a[2]);
	case SYS_bind: return bind((int)a[0], (const struct sockaddr *)a[1], (socklen_t)a[2]);
	case SYS_connect: return connect((int)a[0], (const struct sockaddr *)a[1], (socklen_t)a[2]);
	case SYS_listen: return listen((int)a[0], (int)a[1]);
	case SYS_accept: return accept((int)a[0], (struct sockaddr *)a[1], (socklen_t *)a[2]);
	case SYS_accept4: return accept4((int)a[0], (struct sockaddr *)a[1], (socklen_t *)a[2], (int)a[3]);
	case SYS_shutdown: return shutdown((int)a[0], (int)a[1]);
	case SYS_getsockopt: return getsockopt((int)a[0], (int)a[1], (int)a[2], (void *)a[3], (socklen_t *)a[4]);
	case SYS_setsockopt: return setsockopt((int)a[0], (int)a[1], (int)a[2], (const void *)a[3], (socklen_t)a[4]);
	case SYS_getpeername: return getpeername((int)a[0], (struct sockaddr *)a[1], (socklen_t *)a[2]);
	case SYS_getsockname: return getsockname((int)a[0], (struct sockaddr *)a[1], (socklen_t *)a[2]);
	case SYS_close: return close((int)a[0]);
	case SYS_close_range: return close_range((unsigned)a[0], (unsigned)a[1], (int)a[2]);
	case SYS_dup: return dup((int)a[0]);
	case SYS_dup3: return dup3((int)a[0], (int)a[1], (int)a[2]);
	case SYS_fcntl: return fcntl((int)a[0], (int)a[1], a[2]);
	case SYS_ioctl: return ioctl((int)a[0], (unsigned long)a[1], (void *)a[2]);
#ifdef SYS_dup2
	case SYS_dup2: return dup2((int)a[0], (int)a[1]);
#endif
	case SYS_clone: return raw_clone(number, a, (uint64_t)a[0]);
#ifdef SYS_clone3
	case SYS_clone3:
		return raw_clone(number, a, a[0] ? *(const uint64_t *)a[0] : 0); /* struct clone_args: flags first */
#endif
#ifdef SYS_fork
	case SYS_fork: return fork();
	case SYS_vfork: return vfork();
#endif
	case SYS_exit_group: _exit((int)a[0]);
	case SYS_prctl: return prctl((int)a[0], a[1], a[2], a[3], a[4]);
	case SYS_seccomp: return raw_seccomp(a[0], a[1], a[2]);
	case SYS_execve: return execve((const char *)a[0], (char *const *)a[1], (char *const *)a[2]);
	case SYS_execveat:
		return execveat((int)a[0], (const char *)a[1], (char *const *)a[2], (char *const *)a[3], (int)a[4]);
	case SYS_setuid:
	case SYS_setreuid:
	case SYS_setresuid: /* a change of this thread alone; see CHANGES_USER */
		if (fd_table_len)
			rpc_ensure();
		break;
	}
	return raw_moving(number, a);
}

/* ---- asynchronous I/O: the kernel's, by libaio, and libc's, whose threads make the calls inside libc ---- */
EXPORT int io_submit(aio_context_t context, long len, struct iocb *list[])
{
	static int (*_Atomic submit)(aio_context_t, long, struct iocb *[]);

	if (unlikely(!submit) && !(submit = (int (*)(aio_context_t, long, struct iocb *[]))library_find("io_submit", NULL)))
		return -ENOSYS;
	aio_kernel_demote(len, list);
	return submit(context, len, list);
}

/*
 * Bytes that come from now on go by TCP, where libc's threads find them. Bytes that lie in the ring are read at once, as these
 * threads would wait for them in vain. True: the request has ended.
 */
static bool aio_ended(struct aiocb *block, bool reads)
{
	HELD conn = conn_hold(block->aio_fildes);

	if (!conn)
		return false;
	conn_leave(conn, block->aio_fildes, REASON_ASYNC_IO);
	if (!reads || !conn->managed || !slot_has(conn->slot, SLOT_LEAVES))
		return false;
	ssize_t n = recv(block->aio_fildes, (void *)block->aio_buf, block->aio_nbytes, MSG_DONTWAIT);
	if (n <= 0)
		return false;
	block->__return_value = n;
	block->__error_code = 0;
	return true;
}

/* libc notifies the program of the end of a list: of an empty one, as the request has ended. */
static void aio_notify(struct sigevent *event)
{
	struct aiocb *none = NULL;

	real.lio_listio(LIO_NOWAIT, &none, 0, event);
}

EXPORT int aio_read(struct aiocb *block)
{
	if (likely(!aio_ended(block, true)))
		return real.aio_read(block);
	aio_notify(&block->aio_sigevent);
	return 0;
}

EXPORT int aio_write(struct aiocb *block)
{
	aio_ended(block, false);
	return real.aio_write(block);
}

/* Requests that have ended are left out. */
EXPORT int lio_listio(int mode, struct aiocb *const list[], int len, struct sigevent *event)
{
	struct aiocb **left = rings_ever && len > 0 ? malloc((size_t)len * sizeof(*left)) : NULL;

	for (int i = 0; i < len; i++) {
		bool counts = list[i] && list[i]->aio_lio_opcode != LIO_NOP;
		bool ended = counts && aio_ended(list[i], left && list[i]->aio_lio_opcode == LIO_READ);
		if (left)
			left[i] = ended ? NULL : list[i];
	}
	int result = real.lio_listio(mode, left ? left : list, len, event);
	free(left);
	return result;
}

/* the 64 names: one and the same where off_t has 64 bits */
EXPORT int aio_read64(struct aiocb64 *block)
{
	return aio_read((struct aiocb *)block);
}

EXPORT int aio_write64(struct aiocb64 *block)
{
	return aio_write((struct aiocb *)block);
}

EXPORT int lio_listio64(int mode, struct aiocb64 *const list[], int len, struct sigevent *event)
{
	return lio_listio(mode, (struct aiocb *const *)list, len, event);
}
