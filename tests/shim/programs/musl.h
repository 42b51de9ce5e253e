/* What the scenes call that musl does not have, by the system calls of it. */
#ifndef MUSL_H
#define MUSL_H
#include <spawn.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define strerrorname_np strerror
#define __poll poll
#define __select select
#define __fcntl fcntl

static inline int close_range(unsigned first, unsigned last, int flags)
{
	return (int)syscall(SYS_close_range, first, last, flags);
}

static inline void closefrom(int low)
{
	close_range((unsigned)low, ~0u, 0);
}

static inline int posix_spawn_file_actions_addclosefrom_np(posix_spawn_file_actions_t *actions, int low)
{
	for (int fd = low; fd < 512; fd++)
		posix_spawn_file_actions_addclose(actions, fd); /* those that are not open do no harm */
	return 0;
}

static inline int epoll_pwait2(int set, struct epoll_event *events, int most, const struct timespec *pause,
                               const sigset_t *mask)
{
	return (int)syscall(SYS_epoll_pwait2, set, events, most, pause, mask, _NSIG / 8);
}

static inline ssize_t preadv2(int fd, const struct iovec *vectors, int count, off_t at, int flags)
{
	return syscall(SYS_preadv2, fd, vectors, count, at, 0, flags);
}

static inline ssize_t pwritev2(int fd, const struct iovec *vectors, int count, off_t at, int flags)
{
	return syscall(SYS_pwritev2, fd, vectors, count, at, 0, flags);
}
#endif
