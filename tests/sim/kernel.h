/* kernel.h - what the files of the simulated kernel share. */
#ifndef SIDESTEP_SIM_KERNEL_H
#define SIDESTEP_SIM_KERNEL_H

#include "sim.h"

#include <sys/stat.h>

#define FDS_MAX 2048
#define WAKES_ALL 0u

struct descriptor {
	struct object *object;
	bool cloexec;
};
extern struct descriptor fds[ENDS][FDS_MAX]; /* of each process */
extern struct object *objects; /* all there have been */

int failed(int error); /* -1, with errno */
int current_end(void);
int fd_dup(int fd, int lowest, bool cloexec);
uint32_t object_bits(struct object *object);
void wake(struct object *object, uint32_t key); /* as ep_poll_callback; WAKES_ALL: whatever is waited for */
int set_wait(int fd, struct epoll_event *events, int max, int64_t timeout);
int set_control(int epfd, int op, int fd, struct epoll_event *event);
int fds_poll(struct pollfd *items, nfds_t len, int64_t timeout);
ssize_t line_put(struct object *line, const struct msghdr *message);
ssize_t line_take(struct object *line, struct msghdr *message, int flags);
void line_pair(struct object *pair[2]); /* of socketpair(2) */

size_t tcp_queued(const struct tcp *tcp);
int tcp_state(const struct tcp *tcp);
int tcp_take_error(struct tcp *tcp);
void tcp_lock(struct tcp *tcp); /* who takes the lock of the socket comes after a reset that is at work */
uint32_t tcp_bits(struct tcp *tcp);
ssize_t tcp_receive(struct object *object, const struct iovec *iov, size_t iov_len, int flags);
ssize_t tcp_send(struct object *object, const struct iovec *iov, size_t iov_len, int flags);
int tcp_shutdown(struct tcp *tcp, int how);
void tcp_disconnect(struct tcp *tcp);
void tcp_closed(struct tcp *tcp);

int sim_fstat(int fd, struct stat *found);
ssize_t sim_pread64(int fd, void *buf, size_t n, off_t offset);
long files_syscall(long number, long a, long b, long c, long d); /* those that tell of files and processes */
long sim_syscall(long number, long a, long b, long c, long d, long e, long f);

#endif
