/* Carries out socket calls, one a line of stdin, and answers each with a line on stdout.
 *
 * Sockets are called by small numbers ("ends"), epoll sets too. Every end is non-blocking, but `get`. What is sent follows a
 * pattern by offset, so that every byte received can be checked. Lines, with e an end, s a set:
 *
 *   listen e            port            send e kind n       result errno      poll e kind events   revents
 *   connect e port      result errno    flood e             bytes             fionread e           bytes
 *   accept e l          result errno    recv e kind n       bytes why wrong   error e              SO_ERROR
 *   shutdown e how      result errno    peek e n            result wrong      lowat e n            result errno
 *   close e             result errno    skip e n            bytes why         dup e                result
 *   abort e             result errno    get e n             bytes wrong       names e              ports
 *   epoll s             result          ctl s op e ev data  result errno      wait s max           data:events ...
 *   arrived e n         1 or 0          ended e             1 or 0            reset e              1 or 0
 *   writable e          1 or 0          clear
 */
#include "../support/pattern.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { ENDS_MAX = 16, SETS_MAX = 4, ROOM = 65536, PATIENCE_MS = 5000 };

struct end {
	int fd;
	uint8_t key_out, key_in; /* the connecting end sends by one pattern, the accepting one by another */
	uint64_t out, in;
};

static struct end ends[ENDS_MAX];
static int sets[SETS_MAX];
static uint8_t data[ROOM];

static const char *error_name(long result)
{
	return result < 0 ? strerrorname_np(errno) : "-";
}

static bool right(const struct end *end, const uint8_t *bytes, long len)
{
	return len <= 0 || check_pattern(end->key_in, end->in, bytes, (size_t)len);
}

static void begin(struct end *end, int fd, bool connecting)
{
	*end = (struct end){.fd = fd, .key_out = connecting ? 3 : 5, .key_in = connecting ? 5 : 3};
	if (fd >= 0)
		fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
}

static uint16_t port_of(int fd, bool remote)
{
	struct sockaddr_in address = {0};
	socklen_t len = sizeof address;
	(remote ? getpeername : getsockname)(fd, (struct sockaddr *)&address, &len);
	return ntohs(address.sin_port);
}

/* The vector forms split the bytes in three, to meet every boundary. */
static int split(struct iovec vectors[3], uint8_t *bytes, size_t len)
{
	size_t first = len / 3, second = len / 2 - len / 3;
	vectors[0] = (struct iovec){.iov_base = bytes, .iov_len = first};
	vectors[1] = (struct iovec){.iov_base = bytes + first, .iov_len = second};
	vectors[2] = (struct iovec){.iov_base = bytes + first + second, .iov_len = len - first - second};
	return 3;
}

static long do_send(struct end *end, int kind, size_t len)
{
	struct iovec vectors[3];
	struct msghdr header = {.msg_iov = vectors, .msg_iovlen = (size_t)split(vectors, data, len)};
	struct mmsghdr messages[2] = {{.msg_hdr = {.msg_iov = vectors, .msg_iovlen = 1}},
	                              {.msg_hdr = {.msg_iov = vectors + 1, .msg_iovlen = 2}}};
	long result;
	fill_pattern(end->key_out, end->out, data, len);
	switch (kind) {
	case 0: result = send(end->fd, data, len, MSG_NOSIGNAL); break;
	case 1: result = write(end->fd, data, len); break;
	case 2: result = writev(end->fd, vectors, 3); break;
	case 3: result = sendmsg(end->fd, &header, MSG_DONTWAIT); break;
	case 4: result = sendto(end->fd, data, len, MSG_DONTWAIT, NULL, 0); break;
	default:
		result = sendmmsg(end->fd, messages, 2, 0);
		if (result > 0)
			result = messages[0].msg_len + (result > 1 ? messages[1].msg_len : 0);
	}
	if (result > 0)
		end->out += (uint64_t)result;
	return result;
}

static long do_recv(struct end *end, int kind, size_t len)
{
	struct iovec vectors[3];
	struct msghdr header = {.msg_iov = vectors, .msg_iovlen = (size_t)split(vectors, data, len)};
	struct mmsghdr message = {.msg_hdr = header};
	switch (kind) {
	case 0: return recv(end->fd, data, len, 0);
	case 1: return read(end->fd, data, len);
	case 2: return readv(end->fd, vectors, 3);
	case 3: return recvmsg(end->fd, &header, MSG_DONTWAIT);
	case 4: return recvfrom(end->fd, data, len, MSG_DONTWAIT, NULL, NULL);
	default: return recvmmsg(end->fd, &message, 1, MSG_DONTWAIT, NULL) < 0 ? -1 : (long)message.msg_len;
	}
}

/* Receives up to len bytes, in as many calls as it takes: how many is nobody's promise. */
static void recv_line(struct end *end, int kind, size_t len)
{
	size_t total = 0;
	const char *why = "full";
	bool wrong = false;
	while (total < len) {
		long got = do_recv(end, kind, len - total);
		if (got <= 0) {
			why = got ? error_name(got) : "end";
			break;
		}
		wrong |= !right(end, data, got);
		end->in += (uint64_t)got;
		total += (size_t)got;
	}
	/* An error that came after bytes belongs to the next call; it was taken by this one, so it is told. */
	printf("%zu %s %d\n", total, why, wrong);
}

static unsigned do_poll(int fd, int kind, unsigned events)
{
	struct pollfd item = {.fd = fd, .events = (short)events};
	struct timespec none = {0};
	struct timeval no_time = {0};
	fd_set in, out;
	switch (kind) {
	case 0: return poll(&item, 1, 0) < 0 ? 0xffff : (uint16_t)item.revents;
	case 1: return ppoll(&item, 1, &none, NULL) < 0 ? 0xffff : (uint16_t)item.revents;
	default:
		FD_ZERO(&in);
		FD_ZERO(&out);
		FD_SET(fd, &in);
		FD_SET(fd, &out);
		if (select(fd + 1, &in, &out, NULL, &no_time) < 0)
			return 0xffff;
		return (FD_ISSET(fd, &in) ? POLLIN : 0u) | (FD_ISSET(fd, &out) ? POLLOUT : 0u);
	}
}

static bool becomes_within(int fd, short events, short wanted, int limit_ms)
{
	struct pollfd item = {.fd = fd, .events = events};
	int64_t deadline = now_ms() + limit_ms;
	do
		if (poll(&item, 1, limit_ms < 20 ? limit_ms : 20) > 0 && item.revents & wanted)
			return true;
	while (now_ms() < deadline);
	return false;
}

static bool becomes(int fd, short events, short wanted)
{
	return becomes_within(fd, events, wanted, PATIENCE_MS);
}

static bool arrived(int fd, int len)
{
	int64_t deadline = now_ms() + PATIENCE_MS;
	int have = -1;
	while (now_ms() < deadline) {
		if (ioctl(fd, FIONREAD, &have) < 0 || have > len)
			return false;
		if (have == len)
			return true;
		sched_yield();
	}
	return false;
}

static void flood(struct end *end)
{
	long total = 0, wrote;
	for (;;) {
		wrote = do_send(end, 0, 16384);
		if (wrote > 0)
			total += wrote;
		else if (wrote == 0 || errno != EAGAIN || !becomes_within(end->fd, POLLOUT, POLLOUT, 30))
			break;
	}
	printf("%ld\n", total);
}

static void get(struct end *end, size_t len)
{
	size_t total = 0;
	bool wrong = false;
	while (total < len && becomes(end->fd, POLLIN, POLLIN | POLLHUP | POLLERR)) {
		long got = recv(end->fd, data, len - total < ROOM ? len - total : ROOM, 0);
		if (got <= 0)
			break;
		wrong |= !right(end, data, got);
		end->in += (uint64_t)got;
		total += (size_t)got;
	}
	printf("%zu %d\n", total, wrong);
}

static int by_data(const void *left, const void *right_side)
{
	uint64_t a = ((const struct epoll_event *)left)->data.u64, b = ((const struct epoll_event *)right_side)->data.u64;
	return a < b ? -1 : a > b;
}

static void wait_line(int set, int room)
{
	struct epoll_event events[64];
	int count = epoll_wait(set, events, room, 0);
	if (count < 0) {
		printf("%s\n", error_name(count));
		return;
	}
	qsort(events, (size_t)count, sizeof *events, by_data);
	for (int i = 0; i < count; i++)
		printf("%s%lx:%x", i ? " " : "", (unsigned long)events[i].data.u64, events[i].events);
	printf("\n");
}

static void clear(void)
{
	for (int i = 0; i < ENDS_MAX; i++) {
		if (ends[i].fd >= 0)
			close(ends[i].fd);
		ends[i].fd = -1;
	}
	for (int i = 0; i < SETS_MAX; i++) {
		if (sets[i] >= 0)
			close(sets[i]);
		sets[i] = -1;
	}
	printf("\n");
}

static bool carry_out(const char *verb, long a, long b, long c, long d, unsigned long e)
{
	struct end *end = &ends[a % ENDS_MAX];
	int fd = end->fd, value = 0;
	socklen_t len = sizeof value;
	long result;
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};

	if (!strcmp(verb, "listen")) {
		begin(end, socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), false);
		if (bind(end->fd, (struct sockaddr *)&address, sizeof address) < 0 || listen(end->fd, 16) < 0)
			abort();
		printf("%u\n", port_of(end->fd, false));
	} else if (!strcmp(verb, "connect")) {
		fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
		address.sin_port = htons((uint16_t)b);
		result = connect(fd, (struct sockaddr *)&address, sizeof address);
		printf("%ld %s\n", result, error_name(result));
		begin(end, fd, true);
	} else if (!strcmp(verb, "accept")) {
		becomes(ends[b % ENDS_MAX].fd, POLLIN, POLLIN);
		fd = accept4(ends[b % ENDS_MAX].fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
		printf("%d %s\n", fd < 0 ? -1 : 0, error_name(fd));
		begin(end, fd, false);
	} else if (!strcmp(verb, "names")) {
		printf("%u %u\n", port_of(fd, false), port_of(fd, true));
	} else if (!strcmp(verb, "send")) {
		result = do_send(end, (int)b, (size_t)c);
		printf("%ld %s\n", result, error_name(result));
	} else if (!strcmp(verb, "flood")) {
		flood(end);
	} else if (!strcmp(verb, "recv")) {
		recv_line(end, (int)b, (size_t)c);
	} else if (!strcmp(verb, "peek")) {
		result = recv(fd, data, (size_t)b, MSG_PEEK);
		printf("%ld %s %d\n", result, error_name(result), result > 0 && !right(end, data, result));
	} else if (!strcmp(verb, "skip")) {
		long total = 0;
		const char *why = "full";
		while (total < b) {
			result = recv(fd, NULL, (size_t)(b - total), MSG_TRUNC);
			if (result <= 0) {
				why = result ? error_name(result) : "end";
				break;
			}
			total += result;
		}
		end->in += (uint64_t)total;
		printf("%ld %s\n", total, why);
	} else if (!strcmp(verb, "get")) {
		get(end, (size_t)b);
	} else if (!strcmp(verb, "poll")) {
		printf("%x\n", do_poll(fd, (int)b, (unsigned)c));
	} else if (!strcmp(verb, "fionread")) {
		result = ioctl(fd, FIONREAD, &value);
		printf("%d %s\n", value, error_name(result));
	} else if (!strcmp(verb, "error")) {
		result = getsockopt(fd, SOL_SOCKET, SO_ERROR, &value, &len);
		printf("%s\n", value ? strerrorname_np(value) : "-");
	} else if (!strcmp(verb, "lowat")) {
		value = (int)b;
		result = setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &value, sizeof value);
		printf("%ld %s\n", result, error_name(result));
	} else if (!strcmp(verb, "shutdown")) {
		result = shutdown(fd, (int)b);
		printf("%ld %s\n", result, error_name(result));
	} else if (!strcmp(verb, "close") || !strcmp(verb, "abort")) {
		struct linger linger = {.l_onoff = 1};
		if (verb[0] == 'a')
			setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger);
		result = close(fd);
		end->fd = -1;
		printf("%ld %s\n", result, error_name(result));
	} else if (!strcmp(verb, "dup")) {
		end->fd = dup(fd);
		close(fd);
		printf("%d\n", end->fd >= 0);
	} else if (!strcmp(verb, "epoll")) {
		sets[a % SETS_MAX] = epoll_create1(EPOLL_CLOEXEC);
		printf("%d\n", sets[a % SETS_MAX] >= 0);
	} else if (!strcmp(verb, "ctl")) {
		struct epoll_event event = {.events = (uint32_t)d, .data.u64 = e};
		result = epoll_ctl(sets[a % SETS_MAX], (int)b, ends[c % ENDS_MAX].fd, &event);
		printf("%ld %s\n", result, error_name(result));
	} else if (!strcmp(verb, "wait")) {
		wait_line(sets[a % SETS_MAX], (int)b);
	} else if (!strcmp(verb, "arrived")) {
		printf("%d\n", arrived(fd, (int)b));
	} else if (!strcmp(verb, "ended")) {
		printf("%d\n", becomes(fd, POLLRDHUP, POLLRDHUP | POLLHUP));
	} else if (!strcmp(verb, "reset")) {
		printf("%d\n", becomes(fd, 0, POLLERR | POLLHUP));
	} else if (!strcmp(verb, "writable")) {
		printf("%d\n", becomes(fd, POLLOUT, POLLOUT));
	} else if (!strcmp(verb, "clear")) {
		clear();
	} else {
		return false;
	}
	return true;
}

int main(void)
{
	char line[256], verb[16];
	signal(SIGPIPE, SIG_IGN);
	setvbuf(stdout, NULL, _IOFBF, 4096);
	for (int i = 0; i < ENDS_MAX; i++)
		ends[i].fd = -1;
	for (int i = 0; i < SETS_MAX; i++)
		sets[i] = -1;
	while (fgets(line, sizeof line, stdin)) {
		long a = 0, b = 0, c = 0, d = 0;
		unsigned long e = 0;
		if (sscanf(line, "%15s %ld %ld %ld %ld %lx", verb, &a, &b, &c, &d, &e) < 1 || a < 0 ||
		    !carry_out(verb, a, b, c, d, e)) {
			fprintf(stderr, "cannot do: %s", line);
			return 2;
		}
		fflush(stdout);
	}
	return 0;
}
