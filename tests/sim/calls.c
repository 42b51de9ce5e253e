/* calls.c - the simulated kernel's system calls, by the names under which the shim looks for them. */
#include "kernel.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "program.h"

/* ---- the calls ---- */
ssize_t sim_recvmsg(int fd, struct msghdr *message, int flags)
{
	point();
	struct object *object = fd_object(fd);

	if (!object)
		return failed(EBADF);
	if (object->kind == KIND_LINE)
		return line_take(object, message, flags);
	message->msg_controllen = 0;
	message->msg_flags = 0;
	return object->kind == KIND_TCP ? tcp_receive(object, message->msg_iov, message->msg_iovlen, flags)
	                                : failed(ENOTSOCK);
}

ssize_t sim_sendmsg(int fd, const struct msghdr *message, int flags)
{
	point();
	struct object *object = fd_object(fd);

	if (!object)
		return failed(EBADF);
	if (object->kind == KIND_LINE)
		return line_put(object, message);
	return object->kind == KIND_TCP ? tcp_send(object, message->msg_iov, message->msg_iovlen, flags) : failed(ENOTSOCK);
}

static ssize_t sim_recv(int fd, void *buf, size_t n, int flags)
{
	struct iovec iov = {buf, n};

	return sim_recvmsg(fd, &(struct msghdr){.msg_iov = &iov, .msg_iovlen = 1}, flags);
}

static ssize_t sim_recvfrom(int fd, void *buf, size_t n, int flags, struct sockaddr *address, socklen_t *len)
{
	(void)address;
	if (len)
		*len = 0;
	return sim_recv(fd, buf, n, flags);
}

static ssize_t sim_send(int fd, const void *buf, size_t n, int flags)
{
	struct iovec iov = {(void *)buf, n};

	return sim_sendmsg(fd, &(struct msghdr){.msg_iov = &iov, .msg_iovlen = 1}, flags);
}

static ssize_t sim_sendto(int fd, const void *buf, size_t n, int flags, const struct sockaddr *address, socklen_t len)
{
	(void)address;
	(void)len;
	return sim_send(fd, buf, n, flags);
}

static ssize_t sim_readv(int fd, const struct iovec *iov, int len)
{
	struct object *object = fd_object(fd);

	if (object && object->kind == KIND_DOORBELL) { /* eventfd_read */
		point();
		if (!object->count)
			return failed(EAGAIN);
		uint64_t taken = object->whole ? object->count : 1;
		object->count -= taken;
		memcpy(iov[0].iov_base, &taken, sizeof(taken));
		wake(object, EPOLLOUT);
		return sizeof(taken);
	}
	return sim_recvmsg(fd, &(struct msghdr){.msg_iov = (struct iovec *)iov, .msg_iovlen = (size_t)len}, 0);
}

static ssize_t sim_read(int fd, void *buf, size_t n)
{
	return sim_readv(fd, &(struct iovec){buf, n}, 1);
}

static ssize_t sim_writev(int fd, const struct iovec *iov, int len)
{
	struct object *object = fd_object(fd);

	if (object && object->kind == KIND_DOORBELL) {
		uint64_t more;
		memcpy(&more, iov[0].iov_base, sizeof(more));
		object->count += more;
		wake(object, EPOLLIN);
		return sizeof(more);
	}
	if (object && object->kind == KIND_FILE) {
		object->count += iov[0].iov_len;
		return (ssize_t)iov[0].iov_len;
	}
	if (object && object->kind == KIND_LOG) {
		trace("      %.*s", (int)iov[0].iov_len - 1, (const char *)iov[0].iov_base);
		return (ssize_t)iov[0].iov_len;
	}
	return sim_sendmsg(fd, &(struct msghdr){.msg_iov = (struct iovec *)iov, .msg_iovlen = (size_t)len}, 0);
}

static ssize_t sim_write(int fd, const void *buf, size_t n)
{
	return sim_writev(fd, &(struct iovec){(void *)buf, n}, 1);
}

static int sim_socket(int domain, int type, int protocol)
{
	(void)protocol;
	struct object *object = object_new(domain == AF_UNIX ? KIND_LINE : KIND_TCP);

	object->nonblock = type & SOCK_NONBLOCK;
	if (object->kind == KIND_TCP)
		object->tcp.object = object;
	return fd_new(object, 0, current_end(), type & SOCK_CLOEXEC);
}

static int sim_socketpair(int domain, int type, int protocol, int pair[2])
{
	struct object *made[2];

	(void)domain;
	(void)type;
	(void)protocol;
	line_pair(made);
	for (int i = 0; i < 2; i++)
		pair[i] = fd_new(made[i], 0, current_end(), false);
	return 0;
}

static int sim_dup3(int from, int to, int flags)
{
	if (!fd_object(from))
		return failed(EBADF);
	if (from == to)
		return to;
	if (fd_object(to))
		sim_close(to);
	fds[current_end()][to] = (struct descriptor){fd_object(from), flags & O_CLOEXEC};
	fd_object(from)->refs++;
	return to;
}

static int sim_dup2(int from, int to)
{
	return sim_dup3(from, to, 0);
}

/* A file that takes what is written, and says how much that was. */
static int sim_open64(const char *path, int flags, mode_t mode)
{
	(void)path;
	(void)flags;
	(void)mode;
	return fd_new(object_new(KIND_FILE), 0, current_end(), false);
}

static int sim_connect(int fd, const struct sockaddr *address, socklen_t len)
{
	(void)len;
	point();
	struct object *object = fd_object(fd);

	if (!object)
		return failed(EBADF);
	if (address->sa_family == AF_UNIX) {
		object->line.end = current_end();
		object->refs++; /* the driver's */
		provider_lines[current_end()] = object;
		return 0;
	}
	if (address->sa_family == AF_UNSPEC) {
		tcp_disconnect(&object->tcp);
		return 0;
	}
	struct object *peer = object_new(KIND_TCP);
	object->tcp.peer = peer;
	peer->tcp = (struct tcp){.object = peer, .peer = object, .out_max = tcp_out_max, .in_max = tcp_in_max, .port = 2};
	object->tcp.out_max = tcp_out_max;
	object->tcp.in_max = tcp_in_max;
	object->tcp.port = 1;
	object->tcp.active = true;
	object->tcp.acked = 1; /* the SYN */
	connection[0] = object;
	connection[1] = peer;
	return 0;
}

static bool connected(void *unused)
{
	(void)unused;
	return connection[1] != NULL;
}

static void name_put(uint16_t port, struct sockaddr *address, socklen_t *len)
{
	struct sockaddr_in in = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr = {htonl(INADDR_LOOPBACK)}};

	memcpy(address, &in, *len < sizeof(in) ? *len : sizeof(in));
	*len = sizeof(in);
}

static int sim_accept4(int fd, struct sockaddr *address, socklen_t *len, int flags)
{
	(void)fd;
	block(connected, NULL, NEVER);
	connection[1]->nonblock = flags & SOCK_NONBLOCK;
	if (address)
		name_put(1, address, len);
	return fd_new(connection[1], 0, current_end(), flags & SOCK_CLOEXEC);
}

static int name_get(int fd, struct sockaddr *address, socklen_t *len, bool peer)
{
	struct object *object = fd_object(fd);

	if (!object || object->kind != KIND_TCP)
		return failed(object ? ENOTSOCK : EBADF);
	if (peer && tcp_state(&object->tcp) == TCP_CLOSE)
		return failed(ENOTCONN);
	name_put(peer ? (uint16_t)(3 - object->tcp.port) : object->tcp.port, address, len);
	return 0;
}

static int sim_getsockname(int fd, struct sockaddr *address, socklen_t *len)
{
	return name_get(fd, address, len, false);
}

static int sim_getpeername(int fd, struct sockaddr *address, socklen_t *len)
{
	return name_get(fd, address, len, true);
}

static int sim_shutdown(int fd, int how)
{
	point();
	struct object *object = fd_object(fd);

	return !object ? failed(EBADF) : tcp_shutdown(&object->tcp, how);
}

static int option_put(void *value, socklen_t *len, const void *from, size_t size)
{
	if (*len > size)
		*len = (socklen_t)size;
	memcpy(value, from, *len);
	return 0;
}

static int sim_getsockopt(int fd, int level, int name, void *value, socklen_t *len)
{
	point();
	struct object *object = fd_object(fd);
	uint8_t info[136] = {0};
	int zero[4] = {0}, number = 0;

	if (!object || (object->kind != KIND_TCP && object->kind != KIND_LISTENER && object->kind != KIND_LINE))
		return failed(object ? ENOTSOCK : EBADF);
	struct tcp *tcp = &object->tcp;
	if (level == IPPROTO_TCP && name == TCP_INFO) {
		info[0] = (uint8_t)tcp_state(tcp);
		memcpy(info + 120, &tcp->acked, 8);
		memcpy(info + 128, &tcp->received, 8);
		return option_put(value, len, info, sizeof(info));
	}
	if (level == SOL_SOCKET)
		switch (name) {
		case SO_DOMAIN: number = object->kind == KIND_LINE ? AF_UNIX : AF_INET; break;
		case SO_PROTOCOL: number = object->kind == KIND_LINE ? 0 : IPPROTO_TCP; break;
		case SO_ERROR: number = tcp_take_error(tcp); break;
		case SO_LINGER: return option_put(value, len, &tcp->linger, sizeof(tcp->linger));
		case SO_RCVLOWAT: number = tcp->low_water ? (int)tcp->low_water : 1; break;
		case SO_RCVTIMEO:
		case SO_SNDTIMEO: return option_put(value, len, zero, sizeof(struct timeval));
		case SO_PEERCRED: return option_put(value, len, &(struct ucred){1, geteuid(), getegid()}, sizeof(struct ucred));
		case SO_COOKIE: return option_put(value, len, &(uint64_t){tcp->port}, 8);
		case 71: return option_put(value, len, &(uint64_t){1}, 8); /* SO_NETNS_COOKIE */
		case SO_SNDBUF: number = (int)tcp->out_max; break;
		case SO_RCVBUF: number = (int)tcp->in_max; break;
		}
	return option_put(value, len, &number, sizeof(number));
}

static int sim_setsockopt(int fd, int level, int name, const void *value, socklen_t len)
{
	point();
	struct object *object = fd_object(fd);

	if (!object)
		return failed(EBADF);
	if (level == SOL_SOCKET && name == SO_LINGER && len >= sizeof(struct linger))
		memcpy(&object->tcp.linger, value, sizeof(struct linger));
	if (level == SOL_SOCKET && name == SO_RCVLOWAT && len >= sizeof(int))
		object->tcp.low_water = (size_t)*(const int *)value;
	return 0;
}

int fd_dup(int fd, int lowest, bool cloexec)
{
	return fd_object(fd) ? fd_new(fd_object(fd), lowest, current_end(), cloexec) : failed(EBADF);
}

static int sim_dup(int fd)
{
	return fd_dup(fd, 0, false);
}

static int sim_fcntl64(int fd, int command, long argument)
{
	struct object *object = fd_object(fd);

	if (!object)
		return failed(EBADF);
	switch (command) {
	case F_DUPFD:
	case F_DUPFD_CLOEXEC: return fd_dup(fd, (int)argument, command == F_DUPFD_CLOEXEC);
	case F_GETFD: return fds[current_end()][fd].cloexec ? FD_CLOEXEC : 0;
	case F_SETFD: fds[current_end()][fd].cloexec = argument & FD_CLOEXEC; return 0;
	case F_GETFL: return O_RDWR | (object->nonblock ? O_NONBLOCK : 0) | (object->async ? O_ASYNC : 0);
	case F_GETOWN_EX: *(struct f_owner_ex *)argument = (struct f_owner_ex){F_OWNER_PID, 1 + current_end()}; return 0;
	case F_GETSIG: return 0;
	case F_SETFL: object->nonblock = argument & O_NONBLOCK; return 0;
	case F_ADD_SEALS: object->seals |= (int)argument; return 0;
	case F_GET_SEALS: return object->kind == KIND_MEMORY ? object->seals : failed(EINVAL);
	default: fail("fcntl %d", command);
	}
}

static int sim_ioctl(int fd, unsigned long command, void *argument)
{
	point();
	struct object *object = fd_object(fd);
	int *number = argument;

	if (!object)
		return failed(EBADF);
	switch (command) {
	case FIONREAD:
		tcp_lock(&object->tcp);
		*number = (int)object->tcp.in.len;
		return 0;
	case SIOCOUTQ:
		*number = object->kind == KIND_LINE
		              ? object->line.to_driver != NULL
		              : (int)(tcp_queued(&object->tcp) + (object->tcp.fin_out && !object->tcp.fin_acked));
		return 0;
	case SIOCATMARK: *number = 0; return 0; /* nothing is urgent */
	case FIONBIO: object->nonblock = *number != 0; return 0;
	case FIOASYNC: object->async = *number != 0; return 0;
	default: fail("ioctl %#lx", command);
	}
}

static int64_t timespec_ns(const struct timespec *limit)
{
	if (!limit)
		return -1;
	return limit->tv_sec > 9000000000ll ? NEVER : limit->tv_sec * 1000 * MS + limit->tv_nsec;
}

static int sim_poll(struct pollfd *items, nfds_t len, int timeout)
{
	return fds_poll(items, len, timeout < 0 ? -1 : timeout * MS);
}

static int sim_ppoll(struct pollfd *items, nfds_t len, const struct timespec *limit, const sigset_t *mask)
{
	(void)mask;
	return fds_poll(items, len, timespec_ns(limit));
}

static int sim_select(int len, fd_set *in, fd_set *out, fd_set *urgent, struct timeval *limit)
{
	struct pollfd items[64];
	nfds_t n = 0;
	int found = 0;

	for (int fd = 0; fd < len; fd++) {
		short events = (short)((in && FD_ISSET(fd, in) ? POLLIN : 0) | (out && FD_ISSET(fd, out) ? POLLOUT : 0));
		if (events && n < 64)
			items[n++] = (struct pollfd){.fd = fd, .events = events};
	}
	if (urgent)
		FD_ZERO(urgent);
	fds_poll(items, n, limit ? limit->tv_sec * 1000 * MS + limit->tv_usec * 1000 : -1);
	for (nfds_t i = 0; i < n; i++) { /* do_select: POLLIN_SET, POLLOUT_SET */
		if ((items[i].events & POLLIN) && !(items[i].revents & (POLLIN | POLLHUP | POLLERR)))
			FD_CLR(items[i].fd, in);
		if ((items[i].events & POLLOUT) && !(items[i].revents & (POLLOUT | POLLERR)))
			FD_CLR(items[i].fd, out);
		found += (items[i].events & POLLIN && FD_ISSET(items[i].fd, in)) +
		         (items[i].events & POLLOUT && FD_ISSET(items[i].fd, out));
	}
	return found;
}

static int sim_pselect(int len, fd_set *in, fd_set *out, fd_set *urgent, const struct timespec *limit,
                       const sigset_t *mask)
{
	struct timeval same = {.tv_sec = limit ? limit->tv_sec : 0, .tv_usec = limit ? limit->tv_nsec / 1000 : 0};

	(void)mask; /* nobody signals */
	return sim_select(len, in, out, urgent, limit ? &same : NULL);
}

static int sim_epoll_create1(int flags)
{
	return fd_new(object_new(KIND_SET), 0, current_end(), flags & EPOLL_CLOEXEC);
}

static int sim_epoll_wait(int epfd, struct epoll_event *events, int max, int timeout)
{
	return set_wait(epfd, events, max, timeout < 0 ? -1 : timeout * MS);
}

static int sim_epoll_pwait(int epfd, struct epoll_event *events, int max, int timeout, const sigset_t *mask)
{
	(void)mask;
	return sim_epoll_wait(epfd, events, max, timeout);
}

static int sim_epoll_pwait2(int epfd, struct epoll_event *events, int max, const struct timespec *limit,
                            const sigset_t *mask)
{
	(void)mask;
	return set_wait(epfd, events, max, timespec_ns(limit));
}

static int sim_sigaction(int number, const struct sigaction *act, struct sigaction *old)
{
	(void)number;
	(void)act;
	if (old)
		memset(old, 0, sizeof(*old));
	return 0;
}

static int sim_execve(const char *path, char *const argv[], char *const env[])
{
	(void)path;
	(void)argv;
	point();
	exec_done(env);
}

static void sim__exit(int status)
{
	(void)status;
	point();
	kill_end(current);
	end_over();
}

long sim_syscall(long number, long a, long b, long c, long d, long e, long f)
{
	const struct object *object = fd_object((int)a);

	(void)e;
	(void)f;
	if (object && (object->kind == KIND_DIAG || object->kind == KIND_OTHER))
		return number == SYS_close ? sim_close((int)a) : files_syscall(number, a, b, c, d);
	switch (number) {
	case SYS_rt_sigprocmask:
	case SYS_rt_sigpending: return 0; /* nobody signals */
	case SYS_prctl: return 0; /* who confines itself keeps to it */
	case SYS_gettid: return 1000 + current_end();
	case SYS_kill: connection[current_end() & 1]->signals++; return 0; /* SIGIO */
	case SYS_ppoll: return fds_poll((struct pollfd *)a, (nfds_t)b, timespec_ns((struct timespec *)c));
	case SYS_read: return sim_read((int)a, (void *)b, (size_t)c);
	case SYS_write: return sim_write((int)a, (const void *)b, (size_t)c);
	case SYS_preadv2: return sim_readv((int)a, (const struct iovec *)b, (int)c);
	case SYS_sendto: return sim_send((int)a, (const void *)b, (size_t)c, (int)d);
	case SYS_recvfrom: return sim_recv((int)a, (void *)b, (size_t)c, (int)d);
	case SYS_sendmsg: return sim_sendmsg((int)a, (const struct msghdr *)b, (int)c);
	case SYS_recvmsg: return sim_recvmsg((int)a, (struct msghdr *)b, (int)c);
	case SYS_epoll_pwait: return set_wait((int)a, (struct epoll_event *)b, (int)c, d < 0 ? -1 : d * MS);
	case SYS_epoll_pwait2: return set_wait((int)a, (struct epoll_event *)b, (int)c, timespec_ns((struct timespec *)d));
	case SYS_close: return sim_close((int)a);
	case SYS_getrandom:
		for (long i = 0; i < b; i++)
			((uint8_t *)a)[i] = (uint8_t)choose(256);
		return b;
	default: return files_syscall(number, a, b, c, d);
	}
}

static void missing(void)
{
	fail("the shim makes a call that the simulated kernel does not have");
}

void *kernel_find(const char *name)
{
	static const struct {
		const char *name;
		void *function;
	} calls[] = {
#define CALL(name) {#name, (void *)sim_##name}
#define sim_epoll_ctl set_control
		CALL(read),          CALL(write),      CALL(readv),       CALL(writev),       CALL(recv),
		CALL(recvfrom),      CALL(recvmsg),    CALL(send),        CALL(sendto),       CALL(sendmsg),
		CALL(socket),        CALL(connect),    CALL(accept4),     CALL(getsockname),  CALL(getpeername),
		CALL(shutdown),      CALL(getsockopt), CALL(setsockopt),  CALL(close),        CALL(dup),
		CALL(fcntl64),       CALL(fstat),      CALL(ioctl),       CALL(poll),         CALL(ppoll),
		CALL(epoll_create1), CALL(epoll_wait), CALL(epoll_pwait), CALL(epoll_pwait2), CALL(pread64),
		CALL(sigaction),     CALL(execve),     CALL(syscall),     CALL(select),       CALL(_exit),
		CALL(socketpair),    CALL(dup2),       CALL(dup3),        CALL(open64),       CALL(pselect),
		CALL(epoll_ctl),
	};
	static char one_thread = 1;

	if (strcmp(name, "__libc_single_threaded") == 0)
		return &one_thread;
	for (size_t i = 0; i < sizeof(calls) / sizeof(*calls); i++)
		if (strcmp(name, calls[i].name) == 0)
			return calls[i].function;
	return (void *)missing;
}
