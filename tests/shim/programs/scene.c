/* What every scene uses: transcript, pairs of connections, the peer, and main(). See scene.h.
 *
 * The transcript goes to stderr, because some scenes put a socket in the place of stdin and stdout, and some close every
 * descriptor from 3 on. */
#include "scene.h"

#include <linux/sockios.h>
#include <sched.h>
#include <stdarg.h>
#include <sys/prctl.h>

struct choice choice = {.active = true, .family = '4', .sockets = 'o', .control = -1};
static struct pair pairs[PAIRS_MAX];
static uint32_t pairs_count;

/* -- transcript -------------------------------------------------------------------------------------------------- */

static pthread_mutex_t transcript_lock = PTHREAD_MUTEX_INITIALIZER;

static void transcript_write(const char *text, size_t len)
{
	int kept = errno;
	while (len > 0) {
		ssize_t wrote = write(STDERR_FILENO, text, len);
		if (wrote < 0 && errno != EINTR)
			abort();
		if (wrote > 0) {
			text += wrote;
			len -= (size_t)wrote;
		}
	}
	errno = kept;
}

static void say_list(const char *format, va_list arguments)
{
	char line[1024];
	int len = vsnprintf(line, sizeof line - 1, format, arguments);
	if (len < 0 || (size_t)len >= sizeof line - 1)
		abort();
	line[len] = '\n';
	transcript_write(line, (size_t)len + 1);
}

void say(const char *format, ...)
{
	va_list arguments;
	int kept = errno;
	sigset_t all, before;
	sigfillset(&all); /* a handler may speak too: one line at a time, and no deadlock */
	pthread_sigmask(SIG_BLOCK, &all, &before);
	pthread_mutex_lock(&transcript_lock);
	va_start(arguments, format);
	say_list(format, arguments);
	va_end(arguments);
	pthread_mutex_unlock(&transcript_lock);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	errno = kept;
}

void fail(const char *format, ...)
{
	char line[1024];
	va_list arguments;
	va_start(arguments, format);
	vsnprintf(line, sizeof line, format, arguments);
	va_end(arguments);
	say("FAILED: %s", line);
	_exit(3);
}

long say_ret(const char *name, long result)
{
	int kept = errno;
	if (result < 0)
		say("%s = %ld %s", name, result, strerrorname_np(kept));
	else
		say("%s = %ld", name, result);
	errno = kept;
	return result;
}

void say_bytes(const char *name, struct pair *pair, const void *data, long result)
{
	if (result <= 0) {
		say_ret(name, result);
		return;
	}
	bool right = took(pair, data, result);
	say("%s = %ld %s", name, result, right ? "right" : "WRONG BYTES");
}

void say_reply(const char *name, struct reply reply)
{
	if (reply.wrong)
		say("%s: peer = %ld WRONG BYTES", name, (long)reply.result);
	else if (reply.result < 0)
		say("%s: peer = -1 %s", name, strerrorname_np(reply.error));
	else
		say("%s: peer = %ld", name, (long)reply.result);
}

const char *poll_names(uint32_t events)
{
	static _Thread_local char text[4][160];
	static _Thread_local unsigned turn;
	static const struct {
		uint32_t bit;
		const char *name;
	} names[] = {
		{POLLIN, "IN"},         {POLLPRI, "PRI"},       {POLLOUT, "OUT"},       {POLLERR, "ERR"},
		{POLLHUP, "HUP"},       {POLLNVAL, "NVAL"},     {POLLRDNORM, "RDNORM"}, {POLLRDBAND, "RDBAND"},
		{POLLWRNORM, "WRNORM"}, {POLLWRBAND, "WRBAND"}, {POLLRDHUP, "RDHUP"},
	};
	char *at = text[turn++ % 4];
	char *start = at;
	*at = '\0';
	for (size_t i = 0; i < sizeof names / sizeof *names; i++)
		if (events & names[i].bit) {
			at += sprintf(at, "%s%s", at == start ? "" : "|", names[i].name);
			events &= ~names[i].bit;
		}
	if (events)
		at += sprintf(at, "%s%#x", at == start ? "" : "|", events);
	return *start ? start : "0";
}

void say_poll(const char *name, int result, short revents)
{
	if (result < 0)
		say_ret(name, result);
	else
		say("%s = %d %s", name, result, poll_names((uint16_t)revents));
}

void say_near(const char *name, int64_t elapsed_ms, int64_t expected_ms)
{
	/* Late is allowed (a crowded machine), early is not. */
	if (elapsed_ms >= expected_ms - expected_ms / 20 - 1 && elapsed_ms <= expected_ms + 3000)
		say("%s after about %ld ms", name, (long)expected_ms);
	else
		say("%s after %ld ms INSTEAD OF %ld", name, (long)elapsed_ms, (long)expected_ms);
}

/* -- bytes ------------------------------------------------------------------------------------------------------- */

int64_t sum_of(const void *data, size_t len)
{
	const uint8_t *bytes = data;
	uint32_t low = 1, high = 0; /* RFC 1950 9: Adler-32 */
	for (size_t i = 0; i < len; i++) {
		low = (low + bytes[i]) % 65521;
		high = (high + low) % 65521;
	}
	return (int64_t)high << 16 | low;
}

const uint8_t *pattern_out(struct pair *pair, size_t len)
{
	static _Thread_local uint8_t *bytes;
	NEED(len <= CHUNK);
	if (!bytes)
		NEED((bytes = malloc(CHUNK)) != NULL);
	fill_pattern(KEY_OUT, pair->out, bytes, len);
	return bytes;
}

void sent(struct pair *pair, long result)
{
	if (result > 0)
		pair->out += (uint64_t)result;
}

bool took(struct pair *pair, const void *data, long result)
{
	if (result <= 0)
		return true;
	bool right = check_pattern(KEY_IN, pair->in, data, (size_t)result);
	pair->in += (uint64_t)result;
	return right;
}

void nonblocking(int fd, bool on)
{
	int flags = fcntl(fd, F_GETFL);
	NEED(flags >= 0);
	NEED(fcntl(fd, F_SETFL, on ? flags | O_NONBLOCK : flags & ~O_NONBLOCK) == 0);
}

static void note_alarm(int signal_number)
{
	(void)signal_number;
}

void alarms(int ms)
{
	const struct sigaction action = {.sa_handler = note_alarm, .sa_flags = SA_RESTART};
	const struct timeval each = {.tv_usec = ms * 1000};
	const struct itimerval timer = {.it_value = each, .it_interval = each};
	NEED(sigaction(SIGALRM, &action, NULL) == 0 && setitimer(ITIMER_REAL, &timer, NULL) == 0);
}

void put(struct pair *pair, size_t len)
{
	while (len > 0) {
		size_t piece = len < CHUNK ? len : CHUNK;
		ssize_t wrote = send(pair->fd, pattern_out(pair, piece), piece, MSG_NOSIGNAL);
		if (wrote <= 0)
			fail("put: send = %zd %s", wrote, strerrorname_np(errno));
		sent(pair, wrote);
		len -= (size_t)wrote;
	}
}

void get(struct pair *pair, size_t len)
{
	static _Thread_local uint8_t data[65536];
	while (len > 0) {
		ssize_t got = recv(pair->fd, data, len < sizeof data ? len : sizeof data, 0);
		if (got <= 0)
			fail("get: recv = %zd %s with %zu bytes to come", got, strerrorname_np(errno), len);
		if (!took(pair, data, got))
			fail("get: wrong bytes before offset %lu", (unsigned long)pair->in);
		len -= (size_t)got;
	}
}

long get_all(struct pair *pair)
{
	static _Thread_local uint8_t data[65536];
	long total = 0;
	for (;;) {
		ssize_t got = recv(pair->fd, data, sizeof data, 0);
		if (got < 0)
			return -errno;
		if (got == 0)
			return total;
		if (!took(pair, data, got))
			fail("get_all: wrong bytes before offset %lu", (unsigned long)pair->in);
		total += got;
	}
}

long flood(struct pair *pair)
{
	long total = 0;
	bool full = false;
	for (;;) {
		ssize_t wrote = send(pair->fd, pattern_out(pair, 65536), 65536, MSG_DONTWAIT | MSG_NOSIGNAL);
		if (wrote < 0 && errno == EAGAIN) {
			if (full)
				return total;
			/* Bytes on their way to the peer's kernel free room a moment later: full means full for long. */
			struct pollfd item = {.fd = pair->fd, .events = POLLOUT};
			full = poll(&item, 1, 100) == 0;
			continue;
		}
		full = false;
		if (wrote <= 0)
			fail("flood: send = %zd %s", wrote, strerrorname_np(errno));
		sent(pair, wrote);
		total += wrote;
	}
}

long send_until_error(const char *name, struct pair *pair, int flags)
{
	enum { MUCH = 64 << 20 };
	static uint8_t *much;
	long total = 0;
	if (!much) {
		much = mmap(NULL, MUCH, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		NEED(much != MAP_FAILED);
	}
	fill_pattern(KEY_OUT, pair->out, much, MUCH);
	for (;;) {
		ssize_t wrote = send(pair->fd, much + total, (size_t)(MUCH - total), flags);
		if (wrote < 0) {
			say_ret(name, wrote);
			return total;
		}
		sent(pair, wrote);
		total += wrote;
		NEED(total < MUCH);
	}
}

bool arrived_at(int fd, long len)
{
	int64_t deadline = now_ms() + 5000;
	int have = -1;
	for (;;) {
		NEED(ioctl(fd, FIONREAD, &have) == 0);
		if (have == len)
			return true;
		if (have > len || now_ms() > deadline)
			return false;
		sched_yield();
	}
}

bool arrived(struct pair *pair, size_t len)
{
	bool right = arrived_at(pair->fd, (long)len);
	if (!right) {
		int have = -1;
		ioctl(pair->fd, FIONREAD, &have);
		say("FIONREAD says %d, NOT %zu", have, len);
	}
	return right;
}

static void await_events(struct pair *pair, short events, short wanted, const char *what)
{
	int64_t deadline = now_ms() + 5000;
	struct pollfd item = {.fd = pair->fd, .events = events};
	while (now_ms() < deadline) {
		int ready = poll(&item, 1, 100);
		if (ready > 0 && item.revents & wanted)
			return;
	}
	say("%s NOT SEEN", what);
}

void await_fin(struct pair *pair)
{
	await_events(pair, POLLRDHUP, POLLRDHUP | POLLHUP, "the peer's end of stream");
}

void await_reset(struct pair *pair)
{
	await_events(pair, 0, POLLERR | POLLHUP, "the reset");
}

/* -- addresses --------------------------------------------------------------------------------------------------- */

static sa_family_t chosen(sa_family_t ordinary)
{
	if (choice.sockets == 'o')
		return ordinary;
	if (choice.sockets == 'd')
		return ordinary == AF_INET ? AF_INET_DIRECT : AF_INET6_DIRECT;
	return ordinary == AF_INET ? AF_INET_OFFLOAD : AF_INET6_OFFLOAD;
}

static socklen_t address_of(char family, uint16_t port, bool connecting, struct sockaddr_storage *address)
{
	const char *host = connecting ? choice.there : choice.here;
	memset(address, 0, sizeof *address);
	if (family == '4' || (family == 'm' && connecting)) {
		struct sockaddr_in *in = (struct sockaddr_in *)address;
		in->sin_family = chosen(AF_INET);
		in->sin_port = htons(port);
		in->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
		NEED(!host || inet_pton(AF_INET, host, &in->sin_addr) == 1);
		return sizeof *in;
	}
	struct sockaddr_in6 *in6 = (struct sockaddr_in6 *)address;
	in6->sin6_family = chosen(AF_INET6);
	in6->sin6_port = htons(port);
	in6->sin6_addr = family == 'm' ? in6addr_any : in6addr_loopback;
	NEED(family == 'm' || !host || inet_pton(AF_INET6, host, &in6->sin6_addr) == 1);
	return sizeof *in6;
}

/* What a scene cannot do whose ends are on two hosts. */
static void need_one_host(void)
{
	if (choice.there)
		_exit(NOT_APART);
}

socklen_t loopback_address(char family, uint16_t port, bool connecting, struct sockaddr_storage *address)
{
	need_one_host();
	return address_of(family, port, connecting, address);
}

uint16_t local_port(int fd)
{
	struct sockaddr_storage address;
	socklen_t len = sizeof address;
	NEED(getsockname(fd, (struct sockaddr *)&address, &len) == 0);
	return ntohs(((struct sockaddr_in *)&address)->sin_port); /* at the same place in both families */
}

static int listener_of(char family, uint16_t *port, int flags)
{
	struct sockaddr_storage address;
	socklen_t len = address_of(family, 0, false, &address);
	int off = 0;
	int fd = socket(address.ss_family, SOCK_STREAM | flags, 0);
	NEED(fd >= 0);
	if (family == 'm')
		NEED(setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off) == 0);
	NEED(bind(fd, (struct sockaddr *)&address, len) == 0);
	NEED(listen(fd, 64) == 0);
	*port = local_port(fd);
	return fd;
}

int loopback_listener(char family, uint16_t *port, int flags)
{
	need_one_host();
	return listener_of(family, port, flags);
}

static int connect_to(char family, uint16_t port)
{
	struct sockaddr_storage address;
	socklen_t len = address_of(family, port, true, &address);
	int fd = socket(address.ss_family, SOCK_STREAM, 0);
	NEED(fd >= 0);
	NEED(connect(fd, (struct sockaddr *)&address, len) == 0);
	return fd;
}

/* -- the peer ----------------------------------------------------------------------------------------------------- */

struct order {
	enum act act;
	uint32_t index;
	int64_t a, b;
	pid_t wait_pid, wait_tid; /* begin when this thread sleeps; 0: at once */
};

struct end { /* what the peer knows of its end of a pair */
	int fd;
	uint64_t out, in;
};

static struct end ends[PAIRS_MAX];
static int peer_listener = -1;
static int order_fd = -1; /* socket to a peer process */
static pid_t peer_process;

void await_asleep(pid_t pid, pid_t tid)
{
	char path[64], stat[512];
	int64_t deadline = now_ms() + 3000;
	int seen = 0;
	snprintf(path, sizeof path, "/proc/%d/task/%d/stat", pid, tid);
	while (seen < 4 && now_ms() < deadline) {
		int fd = open(path, O_RDONLY | O_CLOEXEC);
		ssize_t len = fd < 0 ? -1 : read(fd, stat, sizeof stat - 1);
		if (fd >= 0)
			close(fd);
		if (len <= 0)
			return; /* it is gone */
		stat[len] = '\0';
		char *state = strrchr(stat, ')');
		seen = state && state[2] == 'S' ? seen + 1 : 0;
		struct timespec pause = {.tv_nsec = 500000};
		nanosleep(&pause, NULL);
	}
	/* A thread that never sleeps (it spins) is served all the same after the deadline. */
}

static struct reply answer(long result)
{
	return (struct reply){.result = result, .error = result < 0 ? errno : 0};
}

static int end_close(struct end *end)
{
	int fd = end->fd;
	end->fd = -1;
	return close(fd);
}

static struct reply end_send(struct end *end, size_t len, size_t piece)
{
	static _Thread_local uint8_t data[65536];
	size_t total = 0;
	while (total < len) {
		size_t want = len - total < sizeof data ? len - total : sizeof data;
		if (piece && want > piece)
			want = piece;
		fill_pattern(KEY_IN, end->out, data, want);
		ssize_t wrote = send(end->fd, data, want, MSG_NOSIGNAL);
		if (wrote < 0)
			return answer(-1);
		end->out += (uint64_t)wrote;
		total += (size_t)wrote;
	}
	return answer((long)total);
}

static struct reply end_flood(struct end *end)
{
	static _Thread_local uint8_t data[65536];
	struct pollfd item = {.fd = end->fd, .events = POLLOUT};
	do {
		fill_pattern(KEY_IN, end->out, data, sizeof data);
		ssize_t wrote = send(end->fd, data, sizeof data, MSG_DONTWAIT | MSG_NOSIGNAL);
		if (wrote < 0 && errno != EAGAIN)
			return answer(-1);
		end->out += wrote > 0 ? (uint64_t)wrote : 0;
	} while (poll(&item, 1, 100) == 1); /* see flood() */
	return answer(0);
}

static struct reply end_take(struct end *end, size_t len, size_t piece, int flags, bool until_end)
{
	static _Thread_local uint8_t data[65536];
	size_t total = 0;
	while (until_end || total < len) {
		size_t want = until_end || len - total > sizeof data ? sizeof data : len - total;
		if (piece && want > piece)
			want = piece;
		ssize_t got = recv(end->fd, data, want, flags);
		if (got < 0)
			return answer(-1);
		if (got == 0)
			break;
		if (!check_pattern(KEY_OUT, end->in, data, (size_t)got))
			return (struct reply){.result = (long)total, .wrong = 1};
		end->in += (uint64_t)got;
		total += (size_t)got;
	}
	return answer((long)total);
}

/* Both directions at once, from one thread: never waits for one while the other could move. */
static struct reply exchange(int fd, uint8_t key_out, uint64_t *out, size_t out_len, uint8_t key_in, uint64_t *in,
                             size_t in_len, uint32_t seed)
{
	static _Thread_local uint8_t data[65536];
	int before = fcntl(fd, F_GETFL);
	int64_t deadline = now_ms() + 20000;
	nonblocking(fd, true);
	while (out_len > 0 || in_len > 0) {
		struct pollfd item = {.fd = fd, .events = (short)((out_len ? POLLOUT : 0) | (in_len ? POLLIN : 0))};
		int ready = poll(&item, 1, 5000);
		if (ready < 0 && errno == EINTR)
			continue;
		if (ready <= 0 || now_ms() > deadline) {
			errno = ETIMEDOUT;
			return (struct reply){.result = -1, .error = ETIMEDOUT};
		}
		if (in_len > 0 && item.revents & (POLLIN | POLLERR | POLLHUP)) {
			ssize_t got = recv(fd, data, in_len < sizeof data ? in_len : sizeof data, 0);
			if (got <= 0 && !(got < 0 && (errno == EINTR)))
				return (struct reply){.result = -1, .error = got ? errno : ENODATA};
			if (got > 0) {
				if (!check_pattern(key_in, *in, data, (size_t)got))
					return (struct reply){.wrong = 1};
				*in += (uint64_t)got;
				in_len -= (size_t)got;
			}
		}
		if (out_len > 0 && item.revents & (POLLOUT | POLLERR | POLLHUP)) {
			seed = seed * 1664525u + 1013904223u;
			size_t want = 1 + (seed >> 8) % 3000;
			if (want > out_len)
				want = out_len;
			fill_pattern(key_out, *out, data, want);
			ssize_t wrote = send(fd, data, want, MSG_NOSIGNAL);
			if (wrote < 0 && errno != EINTR && errno != EAGAIN)
				return (struct reply){.result = -1, .error = errno};
			if (wrote > 0) {
				*out += (uint64_t)wrote;
				out_len -= (size_t)wrote;
			}
		}
	}
	fcntl(fd, F_SETFL, before);
	return (struct reply){.result = 0};
}

static struct reply act(const struct order *order)
{
	struct end *end = &ends[order->index];
	struct linger linger = {.l_onoff = 1};
	struct pollfd item = {.fd = end->fd, .events = (short)order->a};
	uint16_t port;
	int value = 0;
	socklen_t len = sizeof value;

	if (order->wait_tid)
		await_asleep(order->wait_pid, order->wait_tid);
	switch (order->act) {
	case ACT_LISTEN: peer_listener = listener_of((char)order->a, &port, SOCK_CLOEXEC); return answer(port);
	case ACT_ACCEPT:
		*end = (struct end){.fd = accept(peer_listener, NULL, NULL)};
		NEED(end->fd >= 0);
		NEED(close(peer_listener) == 0);
		return answer(local_port(end->fd));
	case ACT_CONNECT:
		*end = (struct end){.fd = connect_to((char)order->b, (uint16_t)order->a)};
		return answer(local_port(end->fd));
	case ACT_SEND: return end_send(end, (size_t)order->a, (size_t)order->b);
	case ACT_FLOOD: return end_flood(end);
	case ACT_RECV: return end_take(end, (size_t)order->a, (size_t)order->b, 0, false);
	case ACT_RECV_ONCE: {
		uint8_t data[4096];
		NEED((size_t)order->a <= sizeof data);
		ssize_t got = recv(end->fd, data, (size_t)order->a, (int)order->b);
		if (got > 0) {
			if (!check_pattern(KEY_OUT, end->in, data, (size_t)got))
				return (struct reply){.result = got, .wrong = 1};
			if (!(order->b & MSG_PEEK))
				end->in += (uint64_t)got;
		}
		return answer(got);
	}
	case ACT_ECHO:
		for (int64_t i = 0; i < order->a; i++) {
			struct reply reply = end_take(end, (size_t)order->b, 0, 0, false);
			if (reply.result != order->b || reply.wrong)
				return reply;
			reply = end_send(end, (size_t)order->b, 0);
			if (reply.result != order->b)
				return reply;
		}
		return answer((long)order->a);
	case ACT_EXCHANGE:
		return exchange(end->fd, KEY_IN, &end->out, (size_t)order->a, KEY_OUT, &end->in, (size_t)order->b, 77);
	case ACT_DRAIN: return end_take(end, 0, 0, 0, true);
	case ACT_SUM: {
		static uint8_t data[65536];
		NEED((size_t)order->a <= sizeof data);
		ssize_t got = recv(end->fd, data, (size_t)order->a, MSG_WAITALL);
		return (struct reply){
			.result = got, .error = got < 0 ? errno : 0, .wrong = got > 0 && sum_of(data, (size_t)got) != order->b};
	}
	case ACT_SEND_CLOSE: {
		struct reply reply = end_send(end, (size_t)order->a, 0);
		if (end_close(end) < 0)
			return answer(-1);
		return reply;
	}
	case ACT_SHUTDOWN: return answer(shutdown(end->fd, (int)order->a));
	case ACT_CLOSE: return answer(end_close(end));
	case ACT_ABORT:
		NEED(setsockopt(end->fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger) == 0);
		return answer(end_close(end));
	case ACT_KILL:
		NEED(choice.peer_process);
		raise(SIGKILL);
		abort();
	case ACT_EXIT: NEED(choice.peer_process); exit(0);
	case ACT_POLL:
		if (poll(&item, 1, (int)order->b) < 0)
			return answer(-1);
		return answer((uint16_t)item.revents);
	case ACT_OOB: {
		uint8_t byte = (uint8_t)order->a;
		return answer(send(end->fd, &byte, 1, MSG_OOB));
	}
	case ACT_ARRIVED: return answer(arrived_at(end->fd, (long)order->a) ? 1 : 0);
	case ACT_ERROR: NEED(getsockopt(end->fd, SOL_SOCKET, SO_ERROR, &value, &len) == 0); return answer(value);
	case ACT_SET_INT:
		value = (int)order->b;
		return answer(setsockopt(end->fd, SOL_SOCKET, (int)order->a, &value, sizeof value));
	case ACT_STOP_CONT: {
		struct timespec pause = {.tv_sec = order->a / 1000, .tv_nsec = order->a % 1000 * 1000000};
		NEED(choice.peer_process);
		NEED(kill(getppid(), SIGSTOP) == 0);
		nanosleep(&pause, NULL);
		NEED(kill(getppid(), SIGCONT) == 0);
		return answer(0);
	}
	case ACT_QUIT: break;
	}
	fail("the peer does not know order %d", order->act);
}

static void peer_serve(int fd)
{
	struct order order;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	for (;;) {
		ssize_t len = read(fd, &order, sizeof order);
		if (len == 0)
			_exit(0);
		NEED(len == sizeof order);
		if (order.act == ACT_QUIT)
			exit(0);
		struct reply reply = act(&order);
		NEED(write(fd, &reply, sizeof reply) == sizeof reply);
	}
}

/* Goes on as a new program on the other host, which knows only the provider there. */
static void peer_elsewhere(int fd)
{
	char name[32], family[] = "--family=4", sockets[] = "--sockets=o", here[80], there[80];
	int namespace = open(choice.apart, O_RDONLY | O_CLOEXEC);
	NEED(namespace >= 0 && setns(namespace, CLONE_NEWNET) == 0);
	NEED(fcntl(fd, F_SETFD, 0) == 0);
	NEED(!choice.apart_socket || setenv("SIDESTEP_SOCKET", choice.apart_socket, 1) == 0);
	family[sizeof family - 2] = choice.family;
	sockets[sizeof sockets - 2] = choice.sockets;
	snprintf(name, sizeof name, "@peer:%d", fd);
	snprintf(here, sizeof here, "--here=%s", choice.there);
	snprintf(there, sizeof there, "--there=%s", choice.here);
	execl("/proc/self/exe", "peer", name, "--peer=process", family, sockets, here, there, NULL);
	fail("the peer's program: %s", strerrorname_np(errno));
}

static void peer_begin(void)
{
	int fds[2];
	if (!choice.peer_process || peer_process)
		return;
	NEED(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) == 0);
	peer_process = fork();
	NEED(peer_process >= 0);
	if (peer_process == 0) {
		close(fds[0]);
		if (choice.control >= 0)
			close(choice.control);
		if (choice.apart)
			peer_elsewhere(fds[1]);
		peer_serve(fds[1]);
	}
	close(fds[1]);
	order_fd = fds[0];
}

pid_t peer_pid(void)
{
	return peer_process;
}

static struct order pending_order;
static pthread_t pending_thread;
static struct reply pending_reply;

static void *pending_run(void *unused)
{
	(void)unused;
	pending_reply = act(&pending_order);
	return NULL;
}

static void order_begin(struct order order)
{
	sigset_t all, before;
	if (choice.peer_process) {
		NEED(write(order_fd, &order, sizeof order) == sizeof order);
		return;
	}
	pending_order = order;
	sigfillset(&all); /* signals are for the scene's own threads */
	pthread_sigmask(SIG_BLOCK, &all, &before);
	NEED(pthread_create(&pending_thread, NULL, pending_run, NULL) == 0);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
}

struct reply peer_done(void)
{
	struct reply reply;
	ssize_t len;
	if (!choice.peer_process) {
		NEED(pthread_join(pending_thread, NULL) == 0);
		return pending_reply;
	}
	do
		len = read(order_fd, &reply, sizeof reply);
	while (len < 0 && errno == EINTR);
	if (len == 0 || (len < 0 && errno == ECONNRESET))
		return (struct reply){.result = 0}; /* it was told to die */
	NEED(len == sizeof reply);
	return reply;
}

struct reply peer(struct pair *pair, enum act what, int64_t a, int64_t b)
{
	struct order order = {.act = what, .index = pair ? pair->index : 0, .a = a, .b = b};
	if (!choice.peer_process)
		return act(&order);
	order_begin(order);
	return peer_done();
}

void peer_now(struct pair *pair, enum act what, int64_t a, int64_t b)
{
	order_begin((struct order){.act = what, .index = pair->index, .a = a, .b = b});
}

void peer_when_asleep(struct pair *pair, enum act what, int64_t a, int64_t b)
{
	order_begin(
		(struct order){.act = what, .index = pair->index, .a = a, .b = b, .wait_pid = getpid(), .wait_tid = gettid()});
}

void peer_put(struct pair *pair, size_t len)
{
	struct reply reply = peer(pair, ACT_SEND, (int64_t)len, 0);
	if (reply.result != (int64_t)len)
		fail("the peer sent %ld of %zu: %s", (long)reply.result, len, strerrorname_np(reply.error));
}

void peer_get(struct pair *pair, size_t len)
{
	struct reply reply = peer(pair, ACT_RECV, (int64_t)len, 0);
	if (reply.result != (int64_t)len || reply.wrong)
		fail("the peer received %ld of %zu: %s", (long)reply.result, len,
		     reply.wrong ? "wrong bytes" : strerrorname_np(reply.error));
}

/* -- pairs --------------------------------------------------------------------------------------------------------- */

struct pair *open_pair_raw(void)
{
	NEED(pairs_count < PAIRS_MAX);
	struct pair *pair = &pairs[pairs_count];
	*pair = (struct pair){.index = pairs_count++};
	peer_begin();
	if (choice.active) {
		uint16_t port = (uint16_t)peer(pair, ACT_LISTEN, choice.family, 0).result;
		pair->fd = connect_to(choice.family, port);
		pair->peer_port = (uint16_t)peer(pair, ACT_ACCEPT, 0, 0).result;
	} else {
		uint16_t port;
		int listener = listener_of(choice.family, &port, SOCK_CLOEXEC);
		pair->peer_port = (uint16_t)peer(pair, ACT_CONNECT, port, choice.family).result;
		pair->fd = accept(listener, NULL, NULL);
		NEED(pair->fd >= 0);
		close(listener);
	}
	pair->port = local_port(pair->fd);
	return pair;
}

bool ask_runner(const char *word, struct pair *pair)
{
	char line[64], answer_byte = 0;
	if (choice.control < 0)
		return true;
	int len = snprintf(line, sizeof line, "%s %u %u", word, pair->port, pair->peer_port);
	NEED(write(choice.control, line, (size_t)len) == len);
	ssize_t got;
	do
		got = read(choice.control, &answer_byte, 1);
	while (got < 0 && errno == EINTR);
	NEED(got == 1);
	if (answer_byte == 'x')
		fail("the runner found the connection not promoted (%s)", word);
	return answer_byte == 'g';
}

void warm_up(struct pair *pair)
{
	do {
		peer_now(pair, ACT_ECHO, 64, MARK_LEN);
		for (int i = 0; i < 64; i++) {
			put(pair, MARK_LEN);
			get(pair, MARK_LEN);
		}
		struct reply reply = peer_done();
		NEED(reply.result == 64 && !reply.wrong);
	} while (!ask_runner("warm", pair));
}

void converse(int one, int other)
{
	struct pair as_pair = {.port = local_port(one), .peer_port = local_port(other)};
	long right = 0, total = 0;
	bool content;
	do {
		for (int i = 0; i < 64; i++) {
			uint8_t out[24], in[24];
			fill_pattern(3, (uint64_t)i, out, sizeof out);
			NEED(send(one, out, sizeof out, 0) == sizeof out);
			right += recv(other, in, sizeof in, MSG_WAITALL) == sizeof in && !memcmp(in, out, sizeof in);
			NEED(send(other, out, sizeof out, 0) == sizeof out);
			right += recv(one, in, sizeof in, MSG_WAITALL) == sizeof in && !memcmp(in, out, sizeof in);
			total += 2;
		}
		content = !choice.warm || ask_runner("warm", &as_pair);
	} while (!content);
	say("conversation %s", right == total ? "right" : "WRONG");
}

void both_ends(int fds[2])
{
	uint16_t port;
	int listener = loopback_listener(choice.family, &port, 0);
	struct sockaddr_storage address;
	socklen_t len = loopback_address(choice.family, port, true, &address);
	char bytes[4];
	int active = socket(address.ss_family, SOCK_STREAM, 0);
	NEED(connect(active, (struct sockaddr *)&address, len) == 0);
	int passive = accept(listener, NULL, NULL);
	NEED(passive >= 0);
	close(listener);
	struct pair as_pair = {.port = local_port(active), .peer_port = local_port(passive)};
	if (choice.warm)
		do
			for (int i = 0; i < 64; i++) {
				NEED(send(active, "ping", 4, 0) == 4 && recv(passive, bytes, 4, MSG_WAITALL) == 4);
				NEED(send(passive, "pong", 4, 0) == 4 && recv(active, bytes, 4, MSG_WAITALL) == 4);
			}
		while (!ask_runner("warm", &as_pair));
	fds[0] = choice.active ? active : passive;
	fds[1] = choice.active ? passive : active;
}

struct pair *open_pair(void)
{
	struct pair *pair = open_pair_raw();
	if (choice.warm)
		warm_up(pair);
	return pair;
}

void stays(struct pair *pair)
{
	if (choice.warm && !ask_runner("stay", pair))
		fail("the runner answered nonsense");
}

void forget_peer(void)
{
	if (order_fd >= 0)
		close(order_fd);
	order_fd = -1;
	if (!choice.peer_process)
		for (uint32_t i = 0; i < pairs_count; i++)
			if (ends[i].fd > 0)
				close(ends[i].fd);
}

/* -- epoll sets ------------------------------------------------------------------------------------------------------- */

int set_new(void)
{
	int set = epoll_create1(EPOLL_CLOEXEC);
	NEED(set >= 0);
	return set;
}

int set_ctl(int set, int op, int fd, uint32_t events, uint64_t user)
{
	struct epoll_event event = {.events = events, .data.u64 = user};
	return epoll_ctl(set, op, fd, &event);
}

static int by_user_data(const void *left, const void *right)
{
	const struct epoll_event *a = left, *b = right;
	uint64_t x = a->data.u64, y = b->data.u64;
	return x != y ? (x < y ? -1 : 1) : (a->events > b->events) - (a->events < b->events);
}

int say_wait(const char *name, int set, int room, int timeout_ms)
{
	struct epoll_event events[64];
	memset(events, 0xC5, sizeof events);
	int count = epoll_wait(set, events, room, timeout_ms);
	if (count <= 0) {
		say_ret(name, count);
		return count;
	}
	qsort(events, (size_t)count, sizeof *events, by_user_data);
	say("%s = %d", name, count);
	for (int i = 0; i < count; i++)
		say("  %#lx: %s", (unsigned long)events[i].data.u64, poll_names(events[i].events));
	if (count < 64 && events[count].data.u64 != 0xC5C5C5C5C5C5C5C5u)
		say("  WROTE BEYOND the events it reported");
	return count;
}

void *epoll_waiter(void *argument)
{
	struct epoll_thread *self = argument;
	__atomic_store_n(&self->tid, gettid(), __ATOMIC_RELEASE);
	pthread_barrier_wait(self->ready);
	int count = epoll_wait(self->set, &self->event, 1, 10000);
	__atomic_store_n(&self->count, count, __ATOMIC_RELEASE);
	return NULL;
}

/* -- main ------------------------------------------------------------------------------------------------------------ */

int helper_main(int argc, char **argv); /* scenes_process.c: what a scene executes in a new program */

static const struct scene *const tables[] = {
	scenes_io,       scenes_option, scenes_end,      scenes_wait,  scenes_epoll,  scenes_fd,
	scenes_process,  scenes_signal, scenes_thread,   scenes_stdio, scenes_stream, scenes_connect,
	scenes_explicit, scenes_demote, scenes_interest, scenes_nest,
};

int main(int argc, char **argv)
{
	bool is_peer = argc > 1 && !strncmp(argv[1], "@peer:", 6);
	if (argc > 1 && argv[1][0] == '@' && !is_peer)
		return helper_main(argc, argv);
	for (int i = 2; i < argc; i++) {
		if (!strcmp(argv[i], "--peer=process"))
			choice.peer_process = true;
		else if (!strcmp(argv[i], "--passive"))
			choice.active = false;
		else if (!strcmp(argv[i], "--warm"))
			choice.warm = true;
		else if (!strcmp(argv[i], "--shaken"))
			choice.shaken = true;
		else if (!strncmp(argv[i], "--family=", 9))
			choice.family = argv[i][9];
		else if (!strncmp(argv[i], "--sockets=", 10))
			choice.sockets = argv[i][10];
		else if (!strncmp(argv[i], "--control=", 10))
			choice.control = atoi(argv[i] + 10);
		else if (!strncmp(argv[i], "--here=", 7))
			choice.here = argv[i] + 7;
		else if (!strncmp(argv[i], "--there=", 8))
			choice.there = argv[i] + 8;
		else if (!strncmp(argv[i], "--apart=", 8))
			choice.apart = argv[i] + 8;
		else if (!strncmp(argv[i], "--apart-socket=", 15))
			choice.apart_socket = argv[i] + 15;
		else
			fail("unknown option %s", argv[i]);
	}
	if (is_peer)
		peer_serve(atoi(argv[1] + 6));
	for (size_t i = 0; i < sizeof tables / sizeof *tables; i++)
		for (const struct scene *scene = tables[i]; scene->name; scene++) {
			if (argc < 2) {
				printf("%s\n", scene->name);
			} else if (!strcmp(scene->name, argv[1])) {
				if (choice.control >= 0) { /* low, out of the way of scenes that close the rest */
					int given = choice.control;
					choice.control = fcntl(given, F_DUPFD_CLOEXEC, 3);
					NEED(choice.control >= 0 && close(given) == 0);
				}
				scene->play();
				say("end");
				if (peer_process) {
					struct order quit = {.act = ACT_QUIT};
					int status = 0;
					if (order_fd < 0 || write(order_fd, &quit, sizeof quit) != sizeof quit)
						kill(peer_process, SIGKILL);
					NEED(waitpid(peer_process, &status, 0) == peer_process || errno == ECHILD);
				}
				return 0;
			}
		}
	if (argc < 2)
		return 0;
	fail("no scene is called %s", argv[1]);
}
