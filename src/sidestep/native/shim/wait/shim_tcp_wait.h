/* shim_tcp_wait.h - waits of which the kernel knows the end. */
#ifndef SIDESTEP_SHIM_TCP_WAIT_H
#define SIDESTEP_SHIM_TCP_WAIT_H

#include "shim.h"

/* poll(2) until `deadline`, which hears the provider; fds has room for one more entry. */
int tcp_wait_poll(struct pollfd *fds, nfds_t len, int64_t deadline, uint64_t signals, const sigset_t *mask);
void tcp_pass_mark(int fd);
bool tcp_wait_fails(int fd,
                    int flags); /* true: the call has waited long enough, or was interrupted; errno has the cause */
/* A call that may sleep in the kernel until there is something to read. */
#define TCP_WAIT(fd, flags, call) (unlikely(word_load(rings_ever)) && tcp_wait_fails(fd, flags) ? -1 : (call))
ssize_t tcp_wait_receive(struct conn *conn, int fd, void *buf, size_t n);
int tcp_wait_accept(int fd, struct sockaddr *address, socklen_t *len, int flags);

#endif
