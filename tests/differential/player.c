/*
 * Plays a random program of socket calls on both ends of two connections, one call at a time, and prints a line for each: what it
 * returned, and what it read or told. All is in one process, so that no byte can wait for a call of the peer unnoticed. Kernel TCP
 * prints the same each time, and the shim is to print the same as it.
 *
 * player SEED STEPS [passing]: `passing` adds sockets that the process passes to itself, and splice(2).
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
	CONNECTIONS = 2,
	ENDS = 2 * CONNECTIONS,
	SETS = 2,
	ROOM = 200000,
	SETTLE_US = 2500,
	SENT_AT_ONCE = 16384,
	NUMBERS = 64
};

/* Ends 0 and 1 are of one connection, 2 and 3 of the other. */
static struct end {
	int fd, copy;   /* -1: none */
	uint64_t sent;  /* bytes, by the pattern of this end */
	bool edges[SETS]; /* its registration tells edges, which may come twice */
	bool registered;  /* a set has had it */
	bool renumbered;  /* the number with which that was done may be closed */
	bool dissolved;   /* by connect() to AF_UNSPEC */
} ends[ENDS];
static int sets[SETS], listener, step, channel[2];
static bool passing;
static uint8_t bytes[ROOM];
static volatile sig_atomic_t alarms, asked;

static uint64_t state;

static unsigned below(unsigned most)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return (unsigned)(state >> 11) % most;
}

static void on_signal(int number)
{
	(*(number == SIGIO ? &asked : &alarms))++;
}

static void settle(void)
{
	const int saved = errno;

	usleep(SETTLE_US);
	errno = saved;
}

static const char *error_of(long result)
{
	return result < 0 ? strerrorname_np(errno) : "-";
}

static uint32_t sum_of(const uint8_t *from, ssize_t len)
{
	uint32_t sum = 2166136261u;

	for (ssize_t i = 0; i < len; i++)
		sum = (sum ^ from[i]) * 16777619u;
	return sum;
}

static void pattern(const struct end *end, uint64_t at, uint8_t *to, size_t len)
{
	for (size_t i = 0; i < len; i++, at++)
		to[i] = (uint8_t)(at * 31 + (at >> 8) * 7 + (uint64_t)(end - ends) * 53);
}

static void split(struct iovec pieces[3], size_t len)
{
	pieces[0] = (struct iovec){bytes, len / 3};
	pieces[1] = (struct iovec){bytes + len / 3, len / 3};
	pieces[2] = (struct iovec){bytes + 2 * (len / 3), len - 2 * (len / 3)};
}

static void timeout_set(int fd, int name, int us)
{
	struct timeval limit = {0, us};
	const int saved = errno;

	setsockopt(fd, SOL_SOCKET, name, &limit, sizeof(limit));
	errno = saved;
}

/* ---- connections ---- */
static void join(int connection)
{
	struct end *one = &ends[2 * connection];
	struct sockaddr_in address;
	socklen_t len = sizeof(address);
	int on = 1;

	getsockname(listener, (struct sockaddr *)&address, &len);
	for (int i = 0; i < 2; i++)
		one[i] = (struct end){.fd = -1, .copy = -1};
	one->fd = socket(AF_INET, SOCK_STREAM, 0);
	if (connect(one->fd, (struct sockaddr *)&address, len) < 0)
		printf("%d connect %s\n", step, error_of(-1));
	one[1].fd = accept(listener, NULL, NULL);
	for (int i = 0; i < 2; i++) {
		timeout_set(one[i].fd, SO_SNDTIMEO, 30000);
		setsockopt(one[i].fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
	}
}

static void warm_up(int connection, int rounds)
{
	for (int i = 0; i < 2 * rounds; i++) {
		int from = ends[2 * connection + i % 2].fd, to = ends[2 * connection + (i + 1) % 2].fd;
		struct pollfd item = {.fd = to, .events = POLLIN};
		char small[3] = "abc";
		send(from, small, sizeof(small), MSG_NOSIGNAL);
		usleep(150);
		poll(&item, 1, 500);
		recv(to, small, sizeof(small), MSG_DONTWAIT);
	}
}

static void forget(struct end *end)
{
	if (end->fd >= 0)
		close(end->fd);
	if (end->copy >= 0)
		close(end->copy);
	end->fd = end->copy = -1;
}

static struct end *peer_of(struct end *end)
{
	return &ends[(end - ends) ^ 1];
}

/* ---- calls that move bytes ---- */
static ssize_t put_by_pipe(int fd, size_t len)
{
	int pipes[2];

	if (pipe(pipes) < 0 || (len && write(pipes[1], bytes, len) != (ssize_t)len))
		abort();
	ssize_t n = splice(pipes[0], NULL, fd, NULL, len, SPLICE_F_NONBLOCK);
	const int saved = errno;
	close(pipes[0]);
	close(pipes[1]);
	errno = saved;
	return n;
}

static ssize_t put(struct end *end, size_t len, unsigned how)
{
	struct iovec pieces[3];
	struct msghdr message = {.msg_iov = pieces, .msg_iovlen = 3};
	ssize_t n;
	int file, saved;

	if ((how == 4 || how == 7) && len > SENT_AT_ONCE)
		len = SENT_AT_ONCE; /* a file goes out as there is room for it */
	pattern(end, end->sent, bytes, len);
	split(pieces, len);
	switch (how) {
	case 0: n = send(end->fd, bytes, len, MSG_DONTWAIT | MSG_NOSIGNAL); break;
	case 1: n = write(end->fd, bytes, len); break;
	case 2: n = writev(end->fd, pieces, 3); break;
	case 3: n = sendmsg(end->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL); break;
	case 4:
		file = memfd_create("file", 0);
		if (write(file, bytes, len) != (ssize_t)len)
			abort();
		n = sendfile(end->fd, file, &(off_t){0}, len);
		saved = errno;
		close(file);
		errno = saved;
		break;
	case 5: n = pwritev2(end->fd, pieces, 3, -1, 0); break;
	case 7: n = put_by_pipe(end->fd, len); break;
	default: n = sendto(end->fd, bytes, len, MSG_DONTWAIT | MSG_NOSIGNAL, NULL, 0);
	}
	if (n > 0)
		end->sent += (uint64_t)n;
	settle();
	return n;
}

static void op_send(struct end *end)
{
	static const unsigned most[] = {2000, 2000, 2000, 30000};
	size_t len = below(30) ? 1 + below(most[below(4)]) : 0;
	unsigned how = below(passing ? 8 : 7);
	ssize_t n = put(end, len, how);

	printf("send %td how %u, %zu: %zd %s\n", end - ends, how, len, n, error_of(n));
}

/* As the call that would wait, for a bounded time; `alarm_us`: a signal comes, with or without SA_RESTART. */
static ssize_t get_waiting(int fd, size_t len, int flags, int timeout_us, int alarm_us)
{
	struct sigaction act = {.sa_handler = on_signal, .sa_flags = alarm_us && below(2) ? SA_RESTART : 0};
	struct itimerval timer = {.it_value.tv_usec = alarm_us};

	sigaction(SIGALRM, &act, NULL);
	timeout_set(fd, SO_RCVTIMEO, timeout_us);
	setitimer(ITIMER_REAL, &timer, NULL);
	ssize_t n = recv(fd, bytes, len, flags);
	const int saved = errno;
	setitimer(ITIMER_REAL, &(struct itimerval){0}, NULL);
	errno = saved;
	timeout_set(fd, SO_RCVTIMEO, 0);
	return n;
}

static ssize_t get_unwaiting(int fd, size_t len, const struct iovec pieces[3])
{
	const int flags = fcntl(fd, F_GETFL);

	fcntl(fd, F_SETFL, flags | O_NONBLOCK);
	ssize_t n = below(2) ? read(fd, bytes, len) : readv(fd, pieces, 3);
	const int saved = errno;
	fcntl(fd, F_SETFL, flags);
	errno = saved;
	return n;
}

static void op_recv(struct end *end)
{
	size_t len = below(12) ? 1 + below(3000) : below(2) ? 1 + below(ROOM - 1) : 0;
	unsigned how = below(11);
	struct iovec pieces[3];
	struct msghdr message = {.msg_iov = pieces, .msg_iovlen = 3};
	struct mmsghdr messages[2] = {{.msg_hdr = {.msg_iov = pieces, .msg_iovlen = 2}},
	                              {.msg_hdr = {.msg_iov = pieces + 2, .msg_iovlen = 1}}};
	ssize_t n;

	split(pieces, len);
	switch (how) {
	case 0: n = recv(end->fd, bytes, len, MSG_DONTWAIT); break;
	case 1: n = recv(end->fd, bytes, len, MSG_DONTWAIT | MSG_PEEK); break;
	case 2: n = recv(end->fd, bytes, len, MSG_DONTWAIT | MSG_WAITALL); break;
	case 3:
		n = recv(end->fd, bytes, len, MSG_DONTWAIT | MSG_TRUNC);
		memset(bytes, 0, len);
		break;
	case 4: n = recvmsg(end->fd, &message, MSG_DONTWAIT | (below(2) ? MSG_PEEK : 0)); break;
	case 5:
		n = recvmmsg(end->fd, messages, 2, MSG_DONTWAIT, NULL);
		if (n > 0)
			n = messages[0].msg_len + (n > 1 ? messages[1].msg_len : 0);
		memset(bytes, 0, len);
		break;
	case 6: n = get_waiting(end->fd, len, 0, 15000, 0); break;
	case 7: n = get_waiting(end->fd, len, MSG_WAITALL, 15000, 0); break;
	case 8: n = get_waiting(end->fd, len, below(2) ? MSG_WAITALL : 0, 60000, 15000); break;
	case 9: n = recv(end->fd, bytes, len, MSG_DONTWAIT | MSG_ERRQUEUE); break;
	default: n = get_unwaiting(end->fd, len, pieces);
	}
	printf("recv %td how %u, %zu: %zd %s, %x\n", end - ends, how, len, n, error_of(n), sum_of(bytes, n > 0 ? n : 0));
	settle();
}

static void op_urgent(struct end *end)
{
	char byte = 0;

	ssize_t sent = send(end->fd, "U", 1, MSG_OOB | MSG_DONTWAIT | MSG_NOSIGNAL);
	printf("urgent %td: %zd %s", end - ends, sent, error_of(sent));
	settle();
	ssize_t got = recv(peer_of(end)->fd, &byte, 1, MSG_OOB | MSG_DONTWAIT);
	printf("; %zd %s %d\n", got, error_of(got), byte);
}

static void op_signal_io(struct end *end)
{
	int on = 1, off = 0;

	fcntl(end->fd, F_SETOWN, getpid());
	int result = ioctl(end->fd, FIOASYNC, &on);
	settle();
	asked = 0;
	ssize_t sent = put(peer_of(end), 1 + below(100), 0);
	settle();
	bool told = asked > 0;
	ioctl(end->fd, FIOASYNC, &off);
	printf("SIGIO %td: %d, sent %zd, told %d\n", end - ends, result, sent, told);
}

/* A child makes the call: what it reads is gone for us, too. */
static void op_child(struct end *end)
{
	int status = 0;

	fflush(stdout);
	pid_t child = fork();
	if (!child) {
		if (below(2))
			op_recv(end);
		else
			printf("child sends %zd\n", put(end, 1 + below(500), 0));
		fflush(stdout);
		_exit(0);
	}
	waitpid(child, &status, 0);
	printf("child %x\n", (unsigned)status);
	settle();
}

/* ---- what is told ---- */
static void op_poll(void)
{
	static const short wishes[] = {
		POLLIN,    POLLOUT, POLLIN | POLLOUT | POLLRDHUP,
		POLLPRI,   0,       POLLIN | POLLPRI | POLLRDNORM | POLLWRNORM | POLLRDBAND,
		POLLRDHUP,
	};
	struct pollfd items[ENDS];

	for (int i = 0; i < ENDS; i++)
		items[i] = (struct pollfd){.fd = ends[i].fd, .events = wishes[below(7)]};
	int ready = poll(items, ENDS, below(3) ? 0 : 8);
	printf("poll: %d %s", ready, error_of(ready));
	for (int i = 0; i < ENDS; i++)
		printf(" %x/%x", items[i].events, (unsigned short)items[i].revents);
	puts("");
}

static void op_select(void)
{
	struct timeval limit = {0, below(2) * 5000};
	fd_set kinds[3];
	int most = -1;

	for (int kind = 0; kind < 3; kind++)
		FD_ZERO(&kinds[kind]);
	for (int i = 0; i < ENDS; i++)
		for (int kind = 0; kind < 3 && ends[i].fd >= 0; kind++) {
			FD_SET(ends[i].fd, &kinds[kind]);
			most = ends[i].fd > most ? ends[i].fd : most;
		}
	int ready = select(most + 1, &kinds[0], &kinds[1], &kinds[2], &limit);
	printf("select: %d %s", ready, error_of(ready));
	for (int i = 0; i < ENDS; i++)
		for (int kind = 0; kind < 3 && ends[i].fd >= 0; kind++)
			printf("%s%d", kind ? "" : " ", FD_ISSET(ends[i].fd, &kinds[kind]) ? 1 : 0);
	puts("");
}

static void op_control(struct end *end)
{
	static const uint32_t wishes[] = {
		EPOLLIN,
		EPOLLIN | EPOLLET,
		EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET,
		EPOLLIN | EPOLLONESHOT,
		EPOLLOUT | EPOLLONESHOT | EPOLLET,
		EPOLLIN | EPOLLEXCLUSIVE,
		EPOLLIN | EPOLLEXCLUSIVE | EPOLLET,
		EPOLLRDHUP,
		EPOLLPRI,
		0,
		EPOLLIN | EPOLLOUT,
	};
	static const int ops[] = {EPOLL_CTL_DEL, EPOLL_CTL_MOD, EPOLL_CTL_ADD};
	int set = (int)below(SETS), op = ops[below(3)];
	struct epoll_event event = {.events = wishes[below(11)], .data.u64 = (uint64_t)(end - ends)};
	int result = epoll_ctl(sets[set], op, end->fd, &event);

	if (result == 0 && op != EPOLL_CTL_DEL) {
		end->edges[set] |= (event.events & EPOLLET) != 0;
		end->registered = true;
	}
	printf("epoll_ctl %d op %d, %td for %x: %d %s\n", set, op, end - ends, event.events, result, error_of(result));
}

static int by_data(const void *one, const void *other)
{
	const struct epoll_event *a = one, *b = other;

	return a->data.u64 != b->data.u64 ? (a->data.u64 < b->data.u64 ? -1 : 1)
	                                  : (a->events > b->events) - (a->events < b->events);
}

static void op_wait(void)
{
	struct epoll_event events[2 * ENDS];
	int set = (int)below(SETS);
	int ready = epoll_wait(sets[set], events, 2 * ENDS, below(3) ? 0 : 8);

	printf("epoll_wait %d: %s", set, error_of(ready));
	if (ready > 0)
		qsort(events, (size_t)ready, sizeof(*events), by_data);
	for (int i = 0; i < ready; i++)
		printf(" %d%c%x", (int)events[i].data.u64, ends[events[i].data.u64].edges[set] ? '~' : ':', events[i].events);
	puts("");
}

static void op_look(struct end *end)
{
	struct sockaddr_in address = {0};
	socklen_t len = sizeof(address);
	struct pollfd over = {.fd = end->fd};
	int value = -1, result;

	switch (below(5)) {
	case 0:
		result = ioctl(end->fd, FIONREAD, &value);
		printf("FIONREAD %td: %d %s %d\n", end - ends, result, error_of(result), value);
		break;
	case 1:
		result = ioctl(end->fd, SIOCATMARK, &value);
		if (poll(&over, 1, 0) == 1 && over.revents & POLLHUP)
			value = -1; /* a reset drops the byte that tx_space() sends ahead, and the mark with it */
		printf("SIOCATMARK %td: %d %s %d\n", end - ends, result, error_of(result), value);
		break;
	case 2:
		len = sizeof(value);
		result = getsockopt(end->fd, SOL_SOCKET, SO_ERROR, &value, &len);
		printf("SO_ERROR %td: %d %s %d\n", end - ends, result, error_of(result), value);
		break;
	case 3:
		len = sizeof(value);
		result = getsockopt(end->fd, SOL_SOCKET, SO_RCVLOWAT, &value, &len);
		printf("SO_RCVLOWAT %td: %d %s %d\n", end - ends, result, error_of(result), value);
		break;
	default:
		result = getpeername(end->fd, (struct sockaddr *)&address, &len);
		printf("getpeername %td: %d %s\n", end - ends, result, error_of(result));
	}
}

/* ---- what changes an end ---- */
static void op_option(struct end *end)
{
	struct linger linger = {(int)below(2), 0};
	int value, result;

	switch (below(6)) {
	case 0:
		result = setsockopt(end->fd, SOL_SOCKET, SO_LINGER, &linger, sizeof(linger));
		printf("SO_LINGER %td %d: %d %s\n", end - ends, linger.l_onoff, result, error_of(result));
		break;
	case 1:
		value = 60000 + (int)below(100000);
		result = setsockopt(end->fd, SOL_SOCKET, SO_RCVBUF, &value, sizeof(value));
		printf("SO_RCVBUF %td: %d %s\n", end - ends, result, error_of(result));
		break;
	default:
		value = 1 + (below(3) ? (int)below(3000) : 0);
		result = setsockopt(end->fd, SOL_SOCKET, SO_RCVLOWAT, &value, sizeof(value));
		printf("SO_RCVLOWAT %td %d: %d %s\n", end - ends, value, result, error_of(result));
		settle();
	}
}

static void op_shutdown(struct end *end)
{
	int how = below(2) ? SHUT_WR : (int)below(3), result = shutdown(end->fd, how);

	printf("shutdown %td %d: %d %s\n", end - ends, how, result, error_of(result));
	settle();
}

static void op_dup(struct end *end)
{
	int copy = dup(end->fd);

	printf("dup %td: %s\n", end - ends, copy < 0 ? error_of(-1) : "-");
	if (below(2)) {
		close(end->fd);
		end->fd = copy;
		end->renumbered = true;
	} else if (copy >= 0) {
		if (end->copy >= 0)
			close(end->copy);
		end->copy = copy;
	}
	settle();
}

/* The socket goes through a channel, and has no number meanwhile. It gets the same again, by which its registrations go. */
static void op_pass(struct end *end)
{
	char byte = 'p';
	_Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {0};
	struct iovec iov = {&byte, 1};
	struct msghdr message = {
		.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)};
	struct cmsghdr *header = CMSG_FIRSTHDR(&message);
	int lower[NUMBERS], lower_len = 0;

	if (end->fd < 0)
		return;
	while (lower_len < NUMBERS - 1 && (lower[lower_len] = dup(listener)) < end->fd)
		lower_len++;
	close(lower[lower_len]);
	*header = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof(int))};
	memcpy(CMSG_DATA(header), &end->fd, sizeof(int));
	if (sendmsg(channel[0], &message, 0) != 1)
		abort();
	close(end->fd);
	if (recvmsg(channel[1], &message, 0) != 1)
		abort();
	memcpy(&end->fd, CMSG_DATA(header), sizeof(int));
	while (lower_len)
		close(lower[--lower_len]);
	printf("pass %td\n", end - ends);
	settle();
}

static void op_close(struct end *end)
{
	struct end *peer = peer_of(end);

	forget(end);
	settle();
	printf("close %td\n", end - ends);
	if (below(3) && peer->fd >= 0)
		return;
	forget(peer);
	join((int)((end - ends) / 2));
	warm_up((int)((end - ends) / 2), below(2) ? 25 : 2);
	settle();
	settle();
}

static void op_again(struct end *end)
{
	struct sockaddr_in address;
	socklen_t len = sizeof(address);

	getsockname(listener, (struct sockaddr *)&address, &len);
	if (below(3) && !end->dissolved) {
		int result = connect(end->fd, (struct sockaddr *)&address, len);
		printf("connect again %td: %d %s\n", end - ends, result, error_of(result));
		result = listen(end->fd, 4);
		printf("listen %td: %d %s\n", end - ends, result, error_of(result));
		return;
	}
	address = (struct sockaddr_in){.sin_family = AF_UNSPEC};
	int result = connect(end->fd, (struct sockaddr *)&address, sizeof(address));
	printf("disconnect %td: %d %s\n", end - ends, result, error_of(result));
	if (end->registered && end->renumbered) /* nobody can change that registration */
		forget(end);
	getsockopt(end->fd, SOL_SOCKET, SO_ERROR, &result,
	           &(socklen_t){sizeof(result)}); /* the scoreboard names the difference */
	end->dissolved = true;
	settle();
}

static void play(void)
{
	struct end *end = &ends[below(ENDS)];
	unsigned op = below(passing ? 108 : 100);

	printf("%d ", step);
	if (op >= 100)
		op_pass(end);
	else if (op < 22)
		op_send(end);
	else if (op < 45)
		op_recv(end);
	else if (op < 55)
		op_poll();
	else if (op < 58)
		op_select();
	else if (op < 66)
		op_control(end);
	else if (op < 75)
		op_wait();
	else if (op < 81)
		op_look(end);
	else if (op < 84)
		op_shutdown(end);
	else if (op < 89)
		op_option(end);
	else if (op < 91)
		op_dup(end);
	else if (op < 93)
		op_child(end);
	else if (op < 95)
		op_close(end);
	else if (op < 96)
		op_signal_io(end);
	else if (op < 97)
		op_again(end);
	else
		op_urgent(end);
	fflush(stdout);
}

int main(int argc, char **argv)
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	struct sigaction act = {.sa_handler = on_signal};

	if (argc < 3 || socketpair(AF_UNIX, SOCK_STREAM, 0, channel) < 0)
		return 2;
	passing = argc > 3;
	state = strtoull(argv[1], NULL, 0) * 0x9e3779b97f4a7c15ull + 1;
	for (int i = 0; i < 5; i++)
		below(1);
	signal(SIGPIPE, SIG_IGN);
	sigaction(SIGIO, &act, NULL);
	listener = socket(AF_INET, SOCK_STREAM, 0);
	if (bind(listener, (struct sockaddr *)&address, sizeof(address)) < 0 || listen(listener, 16) < 0)
		return 3;
	for (int i = 0; i < SETS; i++)
		sets[i] = epoll_create1(0);
	int rounds = below(5) ? 25 : 3;
	for (int i = 0; i < CONNECTIONS; i++) {
		join(i);
		warm_up(i, rounds);
	}
	settle();
	settle();
	for (; step < atoi(argv[2]); step++)
		play();
	return 0;
}
