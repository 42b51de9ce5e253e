/* shim_real.h - the C library's own functions, found once. X(result, name, parameters, arguments) */
#ifndef SIDESTEP_SHIM_REAL_H
#define SIDESTEP_SHIM_REAL_H

#include <aio.h>
#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>

int close_range(unsigned first, unsigned last, int flags); /* glibc declares it since 2.34 */

/* Calls that return a new number, and are of no other interest. */
#define NUMBER_FUNCTIONS(X) \
	X(int, __open_2, (const char *p, int f), (p, f)) \
	X(int, __openat_2, (int d, const char *p, int f), (d, p, f)) \
	X(int, creat, (const char *p, mode_t m), (p, m)) \
	X(int, eventfd, (unsigned n, int f), (n, f)) \
	X(int, fanotify_init, (unsigned f, unsigned e), (f, e)) \
	X(int, inotify_init, (void), ()) \
	X(int, inotify_init1, (int f), (f)) \
	X(int, memfd_create, (const char *n, unsigned f), (n, f)) \
	X(int, mkostemp, (char *t, int f), (t, f)) \
	X(int, mkostemps, (char *t, int n, int f), (t, n, f)) \
	X(int, mkstemp, (char *t), (t)) \
	X(int, mkstemps, (char *t, int n), (t, n)) \
	X(int, open_by_handle_at, (int d, struct file_handle *h, int f), (d, h, f)) \
	X(int, pidfd_getfd, (int p, int fd, unsigned f), (p, fd, f)) \
	X(int, pidfd_open, (pid_t p, unsigned f), (p, f)) \
	X(int, posix_openpt, (int f), (f)) \
	X(int, signalfd, (int fd, const sigset_t *s, int f), (fd, s, f)) \
	X(int, timerfd_create, (clockid_t c, int f), (c, f))

/* The same, with two of them in `pair`. */
#define PAIR_FUNCTIONS(X) \
	X(int, pipe, (int pair[2]), (pair)) \
	X(int, pipe2, (int pair[2], int f), (pair, f)) \
	X(int, socketpair, (int d, int t, int p, int pair[2]), (d, t, p, pair))

/* The same, with one in a stream, which libc opens within itself. */
#define STREAM_FUNCTIONS(X) \
	X(FILE *, fopen, (const char *p, const char *m), (p, m)) \
	X(FILE *, tmpfile, (void), ())

#define REAL_FUNCTIONS(X) \
	NUMBER_FUNCTIONS(X) \
	PAIR_FUNCTIONS(X) \
	STREAM_FUNCTIONS(X) \
	X(int, open64, (const char *p, int f, mode_t m), (p, f, m)) \
	X(int, openat64, (int d, const char *p, int f, mode_t m), (d, p, f, m)) \
	X(DIR *, opendir, (const char *p), (p)) \
	X(ssize_t, read, (int fd, void *buf, size_t n), (fd, buf, n)) \
	X(ssize_t, write, (int fd, const void *buf, size_t n), (fd, buf, n)) \
	X(ssize_t, readv, (int fd, const struct iovec *iov, int n), (fd, iov, n)) \
	X(ssize_t, writev, (int fd, const struct iovec *iov, int n), (fd, iov, n)) \
	X(ssize_t, preadv2, (int fd, const struct iovec *iov, int n, off_t o, int f), (fd, iov, n, o, f)) \
	X(ssize_t, pwritev2, (int fd, const struct iovec *iov, int n, off_t o, int f), (fd, iov, n, o, f)) \
	X(ssize_t, pread64, (int fd, void *buf, size_t n, off_t o), (fd, buf, n, o)) \
	X(ssize_t, recv, (int fd, void *buf, size_t n, int f), (fd, buf, n, f)) \
	X(ssize_t, recvfrom, (int fd, void *buf, size_t n, int f, struct sockaddr *a, socklen_t *l), \
	  (fd, buf, n, f, a, l)) \
	X(ssize_t, recvmsg, (int fd, struct msghdr *m, int f), (fd, m, f)) \
	X(int, recvmmsg, (int fd, struct mmsghdr *m, unsigned n, int f, struct timespec *t), (fd, m, n, f, t)) \
	X(ssize_t, send, (int fd, const void *buf, size_t n, int f), (fd, buf, n, f)) \
	X(ssize_t, sendto, (int fd, const void *buf, size_t n, int f, const struct sockaddr *a, socklen_t l), \
	  (fd, buf, n, f, a, l)) \
	X(ssize_t, sendmsg, (int fd, const struct msghdr *m, int f), (fd, m, f)) \
	X(int, sendmmsg, (int fd, struct mmsghdr *m, unsigned n, int f), (fd, m, n, f)) \
	X(ssize_t, sendfile64, (int out, int in, off_t *o, size_t n), (out, in, o, n)) \
	X(ssize_t, splice, (int in, off_t *io, int out, off_t *oo, size_t n, unsigned f), (in, io, out, oo, n, f)) \
	X(int, socket, (int d, int t, int p), (d, t, p)) \
	X(int, accept4, (int fd, struct sockaddr *a, socklen_t *l, int f), (fd, a, l, f)) \
	X(int, connect, (int fd, const struct sockaddr *a, socklen_t l), (fd, a, l)) \
	X(int, bind, (int fd, const struct sockaddr *a, socklen_t l), (fd, a, l)) \
	X(int, listen, (int fd, int n), (fd, n)) \
	X(int, getpeername, (int fd, struct sockaddr *a, socklen_t *l), (fd, a, l)) \
	X(int, getsockname, (int fd, struct sockaddr *a, socklen_t *l), (fd, a, l)) \
	X(int, shutdown, (int fd, int how), (fd, how)) \
	X(int, getsockopt, (int fd, int level, int name, void *v, socklen_t *l), (fd, level, name, v, l)) \
	X(int, setsockopt, (int fd, int level, int name, const void *v, socklen_t l), (fd, level, name, v, l)) \
	X(int, close, (int fd), (fd)) \
	X(int, close_range, (unsigned a, unsigned b, int f), (a, b, f)) \
	X(void, closefrom, (int a), (a)) \
	X(int, dup, (int fd), (fd)) \
	X(int, dup2, (int a, int b), (a, b)) \
	X(int, dup3, (int a, int b, int f), (a, b, f)) \
	X(int, fcntl64, (int fd, int cmd, long arg), (fd, cmd, arg)) \
	X(int, fstat, (int fd, struct stat *found), (fd, found)) \
	X(int, ioctl, (int fd, unsigned long cmd, void *arg), (fd, cmd, arg)) \
	X(int, poll, (struct pollfd * p, nfds_t n, int t), (p, n, t)) \
	X(int, ppoll, (struct pollfd * p, nfds_t n, const struct timespec *t, const sigset_t *s), (p, n, t, s)) \
	X(int, select, (int n, fd_set *r, fd_set *w, fd_set *e, struct timeval *t), (n, r, w, e, t)) \
	X(int, pselect, (int n, fd_set *r, fd_set *w, fd_set *e, const struct timespec *t, const sigset_t *s), \
	  (n, r, w, e, t, s)) \
	X(int, epoll_create, (int n), (n)) \
	X(int, epoll_create1, (int f), (f)) \
	X(int, epoll_ctl, (int e, int op, int fd, struct epoll_event *ev), (e, op, fd, ev)) \
	X(int, epoll_wait, (int e, struct epoll_event *ev, int n, int t), (e, ev, n, t)) \
	X(int, epoll_pwait, (int e, struct epoll_event *ev, int n, int t, const sigset_t *s), (e, ev, n, t, s)) \
	X(int, epoll_pwait2, (int e, struct epoll_event *ev, int n, const struct timespec *t, const sigset_t *s), \
	  (e, ev, n, t, s)) \
	X(pid_t, fork, (void), ()) \
	X(int, execve, (const char *p, char *const a[], char *const e[]), (p, a, e)) \
	X(int, execveat, (int d, const char *p, char *const a[], char *const e[], int f), (d, p, a, e, f)) \
	X(int, fexecve, (int fd, char *const a[], char *const e[]), (fd, a, e)) \
	X(int, execvpe, (const char *p, char *const a[], char *const e[]), (p, a, e)) \
	X(int, posix_spawn, \
	  (pid_t * pid, const char *p, const posix_spawn_file_actions_t *f, const posix_spawnattr_t *t, char *const a[], \
	   char *const e[]), \
	  (pid, p, f, t, a, e)) \
	X(int, posix_spawnp, \
	  (pid_t * pid, const char *p, const posix_spawn_file_actions_t *f, const posix_spawnattr_t *t, char *const a[], \
	   char *const e[]), \
	  (pid, p, f, t, a, e)) \
	X(int, posix_spawn_file_actions_adddup2, (posix_spawn_file_actions_t * f, int a, int b), (f, a, b)) \
	X(int, system, (const char *c), (c)) \
	X(FILE *, popen, (const char *c, const char *m), (c, m)) \
	X(int, pclose, (FILE * f), (f)) \
	X(int, fclose, (FILE * f), (f)) \
	X(FILE *, fdopen, (int fd, const char *mode), (fd, mode)) \
	X(void, perror, (const char *t), (t)) \
	X(FILE *, freopen, (const char *path, const char *mode, FILE *file), (path, mode, file)) \
	X(int, chroot, (const char *path), (path)) \
	X(int, setuid, (uid_t u), (u)) \
	X(int, seteuid, (uid_t u), (u)) \
	X(int, setreuid, (uid_t a, uid_t b), (a, b)) \
	X(int, setresuid, (uid_t a, uid_t b, uid_t c), (a, b, c)) \
	X(int, aio_read, (struct aiocb * a), (a)) \
	X(int, aio_write, (struct aiocb * a), (a)) \
	X(int, lio_listio, (int mode, struct aiocb *const a[], int n, struct sigevent *e), (mode, a, n, e)) \
	X(int, clone, (int (*run)(void *), void *stack, int f, void *arg, void *ptid, void *tls, void *ctid), \
	  (run, stack, f, arg, ptid, tls, ctid)) \
	X(int, sigaction, (int s, const struct sigaction *a, struct sigaction *o), (s, a, o))

struct real {
#define X(result, name, params, args) result(*name) params;
	REAL_FUNCTIONS(X)
#undef X
	long (*syscall)(long, long, long, long, long, long, long);
	void (*_exit)(int) __attribute__((noreturn));
	void (*_Exit)(int) __attribute__((noreturn));
};

extern struct real real;
void real_init(void);     /* finds them all, unless the first call of one was earlier */
void *real_scope(void);   /* scope in which dlsym() finds the functions that ours stand before */
/* A function of liburing or libaio, which make their system calls themselves; of that version of its symbol, unless NULL. */
void *library_find(const char *name, const char *version);
extern void *main_program; /* dlopen()'s handle of the global scope; NULL: preloaded */

#endif
