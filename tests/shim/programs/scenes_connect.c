/* How a connection comes about. */
#include "scene.h"

static uint8_t data[65536];

static int listener_here(struct sockaddr_storage *address, socklen_t *len)
{
	uint16_t port;
	int listener = loopback_listener(choice.family, &port, 0);
	*len = loopback_address(choice.family, port, true, address);
	return listener;
}

static void connect_nonblocking(void)
{
	struct sockaddr_storage address;
	socklen_t len, error_len;
	int listener = listener_here(&address, &len), error = -1;
	int client = socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	say("flags %d %d", !!(fcntl(client, F_GETFL) & O_NONBLOCK), fcntl(client, F_GETFD));
	say_ret("connect", connect(client, (struct sockaddr *)&address, len));
	struct pollfd item = {.fd = client, .events = POLLOUT};
	int ready = poll(&item, 1, 5000);
	say_poll("poll", ready, item.revents);
	error_len = sizeof error;
	NEED(getsockopt(client, SOL_SOCKET, SO_ERROR, &error, &error_len) == 0);
	say("SO_ERROR %d", error);
	say_ret("connect again", connect(client, (struct sockaddr *)&address, len));
	say_ret("and again", connect(client, (struct sockaddr *)&address, len));
	say_ret("recv", recv(client, data, 1, 0));
	int server = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
	say("flags %d %d", !!(fcntl(server, F_GETFL) & O_NONBLOCK), fcntl(server, F_GETFD));
	say_ret("recv", recv(server, data, 1, 0));
	nonblocking(client, false);
	nonblocking(server, false);
	converse(client, server);
}

static void connect_in_epoll(void)
{
	/* What event loops do: the set sees the connection before it is one. */
	struct sockaddr_storage address;
	socklen_t len;
	int listener = listener_here(&address, &len), set = epoll_create1(0);
	struct epoll_event event = {.events = EPOLLOUT | EPOLLIN | EPOLLET, .data.u64 = 0xabcdef0123456789};
	int client = socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK, 0);
	say_ret("connect", connect(client, (struct sockaddr *)&address, len));
	NEED(epoll_ctl(set, EPOLL_CTL_ADD, client, &event) == 0);
	struct epoll_event got;
	say_ret("epoll_wait", epoll_wait(set, &got, 1, 5000));
	say("%s %#lx", poll_names(got.events), (unsigned long)got.data.u64);
	int server = accept(listener, NULL, NULL);
	nonblocking(client, false);
	converse(client, server);
	while (epoll_wait(set, &got, 1, 0) > 0)
		;
	NEED(send(server, "x", 1, 0) == 1);
	int count;
	do
		count = epoll_wait(set, &got, 1, 5000);
	while (choice.shaken && count == 1 && !(got.events & EPOLLIN)); /* what still holds may be told once more */
	say_ret("epoll_wait", count);
	say("in %d, %#lx", !!(got.events & EPOLLIN), (unsigned long)got.data.u64);
}

static void connect_refused(void)
{
	struct sockaddr_storage address;
	socklen_t len, error_len;
	int listener = listener_here(&address, &len), error = -1;
	close(listener);
	int client = socket(address.ss_family, SOCK_STREAM, 0);
	say_ret("connect", connect(client, (struct sockaddr *)&address, len));
	close(client);
	client = socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK, 0);
	say_ret("connect without blocking", connect(client, (struct sockaddr *)&address, len));
	struct pollfd item = {.fd = client, .events = POLLOUT};
	int ready = poll(&item, 1, 5000);
	say_poll("poll", ready, item.revents);
	error_len = sizeof error;
	NEED(getsockopt(client, SOL_SOCKET, SO_ERROR, &error, &error_len) == 0);
	say("SO_ERROR %s", strerrorname_np(error));
	say_ret("recv", recv(client, data, 1, 0));
}

static void accept_kinds(void)
{
	struct sockaddr_storage address, from;
	socklen_t len, from_len;
	int listener = listener_here(&address, &len);
	static const int flags[] = {0, SOCK_NONBLOCK, SOCK_CLOEXEC, SOCK_NONBLOCK | SOCK_CLOEXEC};
	nonblocking(listener, true); /* first: musl's falls back to accept(2) then */
	say_ret("accept4 with bad flags", accept4(listener, NULL, NULL, 0x40));
	say_ret("accept of none", accept(listener, NULL, NULL));
	for (int i = 0; i < 5; i++) {
		int client = socket(address.ss_family, SOCK_STREAM, 0), server;
		NEED(connect(client, (struct sockaddr *)&address, len) == 0);
		struct pollfd item = {.fd = listener, .events = POLLIN};
		NEED(poll(&item, 1, 5000) == 1);
		from_len = sizeof from;
		memset(&from, 0, sizeof from);
		if (i < 4)
			server = accept4(listener, (struct sockaddr *)&from, &from_len, flags[i]);
		else
			server = accept(listener, (struct sockaddr *)&from, &from_len);
		NEED(server >= 0);
		say("O_NONBLOCK %d FD_CLOEXEC %d", !!(fcntl(server, F_GETFL) & O_NONBLOCK), fcntl(server, F_GETFD));
		say("from %u bytes, family %d, its port: %d", from_len, from.ss_family,
		    ntohs(((struct sockaddr_in *)&from)->sin_port) == local_port(client));
		nonblocking(server, false);
		converse(client, server);
		close(client);
		say_ret("the end", recv(server, data, 1, 0));
		close(server);
	}
}

static void speak_before_accept(void)
{
	/* The client connects, speaks and even closes before the server accepts. */
	struct sockaddr_storage address;
	socklen_t len;
	int listener = listener_here(&address, &len), clients[3];
	for (int i = 0; i < 3; i++) {
		clients[i] = socket(address.ss_family, SOCK_STREAM, 0);
		NEED(connect(clients[i], (struct sockaddr *)&address, len) == 0);
		for (int j = 0; j < 20; j++)
			NEED(send(clients[i], "0123456789", 10, 0) == 10);
	}
	NEED(close(clients[1]) == 0);
	NEED(shutdown(clients[2], SHUT_WR) == 0);
	for (int i = 0; i < 3; i++) {
		int server = accept(listener, NULL, NULL);
		NEED(server >= 0);
		say_ret("recv", recv(server, data, 200, MSG_WAITALL));
		if (i == 0)
			converse(clients[0], server);
		else
			say_ret("the end", recv(server, data, 10, 0));
		if (i == 2) {
			say_ret("send", send(server, "bye", 3, 0));
			say_ret("recv", recv(clients[2], data, 10, 0));
		}
		close(server);
	}
}

static void server_speaks_first(void)
{
	struct sockaddr_storage address;
	socklen_t len;
	int listener = listener_here(&address, &len);
	int client = socket(address.ss_family, SOCK_STREAM, 0);
	NEED(connect(client, (struct sockaddr *)&address, len) == 0);
	int server = accept(listener, NULL, NULL);
	for (int i = 0; i < 30; i++)
		NEED(send(server, "220 welcome\n", 12, 0) == 12);
	say_ret("recv", recv(client, data, 360, MSG_WAITALL));
	converse(client, server);
}

static void fast_open(void)
{
	struct sockaddr_storage address;
	socklen_t len;
	int listener = listener_here(&address, &len);
	for (int i = 0; i < 2; i++) {
		int client = socket(address.ss_family, SOCK_STREAM, 0);
		say_ret("sendto FASTOPEN", sendto(client, "hello", 5, MSG_FASTOPEN, (struct sockaddr *)&address, len));
		int server = accept(listener, NULL, NULL);
		say_ret("recv", recv(server, data, 5, MSG_WAITALL));
		for (int j = 0; j < 100; j++) {
			NEED(send(client, "abc", 3, 0) == 3 && recv(server, data, 3, MSG_WAITALL) == 3);
			NEED(send(server, "def", 3, 0) == 3 && recv(client, data, 3, MSG_WAITALL) == 3);
		}
		close(client);
		say_ret("the end", recv(server, data, 5, 0));
		close(server);
	}
	int on = 1;
	int client = socket(address.ss_family, SOCK_STREAM, 0);
	say_ret("FASTOPEN_CONNECT", setsockopt(client, IPPROTO_TCP, TCP_FASTOPEN_CONNECT, &on, sizeof on));
	say_ret("connect", connect(client, (struct sockaddr *)&address, len));
	say_ret("send", send(client, "hello", 5, 0));
	int server = accept(listener, NULL, NULL);
	say_ret("recv", recv(server, data, 5, MSG_WAITALL));
	for (int j = 0; j < 100; j++) {
		NEED(send(client, "abc", 3, 0) == 3 && recv(server, data, 3, MSG_WAITALL) == 3);
		NEED(send(server, "def", 3, 0) == 3 && recv(client, data, 3, MSG_WAITALL) == 3);
	}
}

static void simultaneous(void)
{
	/* Both sides connect to each other: nobody has accepted. */
	struct sockaddr_in addresses[2];
	socklen_t len = sizeof *addresses;
	int fds[2], on = 1;
	for (int i = 0; i < 2; i++) {
		fds[i] = socket(AF_INET, SOCK_STREAM, 0);
		addresses[i] = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
		NEED(setsockopt(fds[i], SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0);
		NEED(bind(fds[i], (struct sockaddr *)&addresses[i], len) == 0);
		NEED(getsockname(fds[i], (struct sockaddr *)&addresses[i], &len) == 0);
	}
	/* One socket connected to itself is the simplest simultaneous open. */
	say_ret("connect to itself", connect(fds[0], (struct sockaddr *)&addresses[0], len));
	for (int i = 0; i < 100; i++) {
		NEED(send(fds[0], &i, sizeof i, 0) == sizeof i);
		NEED(recv(fds[0], data, sizeof i, MSG_WAITALL) == sizeof i && !memcmp(data, &i, sizeof i));
	}
	say("it hears itself");
	struct pollfd item = {.fd = fds[0], .events = POLLIN | POLLOUT};
	int ready = poll(&item, 1, 0);
	say_poll("poll", ready, item.revents);
	NEED(send(fds[0], "tail", 4, 0) == 4);
	NEED(shutdown(fds[0], SHUT_WR) == 0);
	say_ret("recv", recv(fds[0], data, 10, 0));
	say_ret("the end", recv(fds[0], data, 10, 0));
}

/* System calls that no library sees. */
static long raw_call(long number, long a, long b, long c, long d, long e, long f)
{
#if defined(__x86_64__)
	long result;
	register long r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = e;
	register long r9 __asm__("r9") = f;
	__asm__ volatile("syscall"
	                 : "=a"(result)
	                 : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
	                 : "rcx", "r11", "memory");
	return result;
#elif defined(__aarch64__)
	register long x8 __asm__("x8") = number;
	register long x0 __asm__("x0") = a;
	register long x1 __asm__("x1") = b;
	register long x2 __asm__("x2") = c;
	register long x3 __asm__("x3") = d;
	register long x4 __asm__("x4") = e;
	register long x5 __asm__("x5") = f;
	__asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
	return x0;
#else
#error "say how this machine makes a system call"
#endif
}

static void calls_past_the_library(void)
{
	/* One end mixes raw system calls with library calls from the first byte on. */
	struct pair *pair = open_pair_raw();
	for (int i = 0; i < 200; i++) {
		long wrote = raw_call(SYS_write, pair->fd, (long)pattern_out(pair, 9), 9, 0, 0, 0);
		NEED(wrote == 9);
		sent(pair, wrote);
		put(pair, 3);
		peer_get(pair, 12);
		peer_put(pair, 10);
		long got = raw_call(SYS_recvfrom, pair->fd, (long)data, 6, 0x100 /* MSG_WAITALL */, 0, 0);
		NEED(got == 6 && took(pair, data, got));
		get(pair, 4);
	}
	say("two hundred rounds");
	peer(pair, ACT_SHUTDOWN, SHUT_WR, 0);
	say_ret("the end", raw_call(SYS_read, pair->fd, (long)data, 6, 0, 0, 0));
}

static void calls_by_syscall(void)
{
	/* syscall() is a library call too. */
	struct pair *pair = open_pair();
	struct pollfd item = {.fd = pair->fd, .events = POLLIN};
	sent(pair, say_ret("SYS_write", syscall(SYS_write, pair->fd, pattern_out(pair, 10), 10)));
	sent(pair, say_ret("SYS_sendto", syscall(SYS_sendto, pair->fd, pattern_out(pair, 10), 10, 0, NULL, 0)));
	peer_get(pair, 20);
	peer_put(pair, 20);
	arrived(pair, 20);
	say_ret("SYS_ppoll", syscall(SYS_ppoll, &item, 1, NULL, NULL, 8));
	say_bytes("SYS_read", pair, data, syscall(SYS_read, pair->fd, data, 10));
	say_bytes("SYS_recvfrom", pair, data, syscall(SYS_recvfrom, pair->fd, data, 10, 0, NULL, NULL));
	put(pair, 5);
	peer_get(pair, 5);
	peer_now(pair, ACT_DRAIN, 0, 0);
	say_ret("SYS_close", syscall(SYS_close, pair->fd));
	say_reply("the end", peer_done());
}

/* What a dissolved socket, and its sets if it is in any, say of it. */
static void say_state(const char *name, int fd, const int sets[2], int sets_len)
{
	struct pollfd item = {.fd = fd, .events = POLLIN | POLLOUT | POLLRDHUP};
	int ready = poll(&item, 1, 0);
	say_poll(name, ready, item.revents);
	for (int i = 0; i < sets_len; i++) {
		struct epoll_event event = {0};
		int count = epoll_wait(sets[i], &event, 1, 0);
		say("set %d: %d %s %d", i, count, count > 0 ? poll_names(event.events) : "", (int)event.data.u32);
	}
}

/* The peer resets; the socket is dissolved with that error unreported, and connects to another peer. */
static void dissolved(bool looks, int sets_len)
{
	static const uint32_t wishes[2] = {EPOLLIN | EPOLLRDHUP, EPOLLIN | EPOLLOUT | EPOLLET};
	int sets[2], other, error = -1;
	struct pair *pair = open_pair();
	struct sockaddr nobody = {.sa_family = AF_UNSPEC};
	struct sockaddr_storage address;
	socklen_t len, error_len = sizeof error;
	if (!choice.active)
		return; /* an accepted socket keeps the port of its listener */
	for (int i = 0; i < sets_len; i++) {
		struct epoll_event event = {.events = wishes[i], .data.u32 = 70 + (uint32_t)i};
		NEED((sets[i] = epoll_create1(EPOLL_CLOEXEC)) >= 0);
		NEED(epoll_ctl(sets[i], EPOLL_CTL_ADD, pair->fd, &event) == 0);
	}
	peer_put(pair, 10);
	arrived(pair, 10);
	peer(pair, ACT_ABORT, 0, 0);
	await_reset(pair);
	if (looks)
		say_state("reset", pair->fd, sets, sets_len);
	say_ret("connect to AF_UNSPEC", connect(pair->fd, &nobody, sizeof nobody));
	say_state("dissolved", pair->fd, sets, sets_len);
	say_ret("recv", recv(pair->fd, data, 10, MSG_DONTWAIT));
	say_ret("recv", recv(pair->fd, data, 10, MSG_DONTWAIT));
	NEED(getsockopt(pair->fd, SOL_SOCKET, SO_ERROR, &error, &error_len) == 0);
	say("SO_ERROR %d", error);
	int listener = listener_here(&address, &len);
	say_ret("connect elsewhere", connect(pair->fd, (struct sockaddr *)&address, len));
	NEED((other = accept(listener, NULL, NULL)) >= 0);
	say_state("connected", pair->fd, sets, sets_len);
	say_ret("recv", recv(pair->fd, data, 10, MSG_DONTWAIT));
	for (int i = 0; i < 100; i++) {
		NEED(send(pair->fd, "abcd", 4, 0) == 4 && recv(other, data, 4, MSG_WAITALL) == 4);
		NEED(send(other, "efgh", 4, 0) == 4 && arrived_at(pair->fd, 4));
		if (i % 50 == 0)
			say_state("asked", pair->fd, sets, sets_len);
		NEED(recv(pair->fd, data, 4, MSG_WAITALL) == 4 && memcmp(data, "efgh", 4) == 0);
	}
	NEED(close(other) == 0);
	say_ret("the end", recv(pair->fd, data, 4, 0));
	say_state("ended", pair->fd, sets, sets_len);
}

static void dissolved_alone(void)
{
	dissolved(true, 0);
}

static void dissolved_in_sets(void)
{
	dissolved(true, 2);
}

static void dissolved_unseen(void)
{
	dissolved(false, 2);
}

/* The peer dissolves its socket with bytes of ours unread; then ours is dissolved, with that error unreported. */
static void dissolved_by_both(void)
{
	int fds[2], error = -1;
	struct sockaddr nobody = {.sa_family = AF_UNSPEC};
	socklen_t len = sizeof error;
	both_ends(fds);
	struct pair pair = {.fd = fds[0]};
	say_ret("send", send(fds[0], "unread", 6, 0));
	NEED(arrived_at(fds[1], 6));
	say_ret("the peer's", connect(fds[1], &nobody, sizeof nobody));
	await_reset(&pair);
	say_state("reset", fds[0], NULL, 0);
	say_ret("ours", connect(fds[0], &nobody, sizeof nobody));
	say_state("dissolved", fds[0], NULL, 0);
	NEED(getsockopt(fds[0], SOL_SOCKET, SO_ERROR, &error, &len) == 0);
	say("SO_ERROR %d", error);
	say_state("told", fds[0], NULL, 0);
}

/* The peer closes, and a byte of ours brings the reset. No call has seen the end when ours is dissolved. */
static void dissolved_behind_an_end(void)
{
	int fds[2];
	struct sockaddr nobody = {.sa_family = AF_UNSPEC};
	both_ends(fds);
	struct pair pair = {.fd = fds[0]};
	NEED(close(fds[1]) == 0);
	say_ret("urgent byte", send(fds[0], "!", 1, MSG_OOB | MSG_NOSIGNAL));
	await_reset(&pair);
	say_ret("shutdown", shutdown(fds[0], SHUT_RDWR));
	say_ret("connect", connect(fds[0], &nobody, sizeof nobody));
	say_state("dissolved", fds[0], NULL, 0);
}

const struct scene scenes_connect[] = {
	SCENE(connect_nonblocking),
	SCENE(connect_in_epoll),
	SCENE(connect_refused),
	SCENE(accept_kinds),
	SCENE(speak_before_accept),
	SCENE(server_speaks_first),
	SCENE(fast_open),
	SCENE(simultaneous),
	SCENE(calls_past_the_library),
	SCENE(calls_by_syscall),
	SCENE(dissolved_alone),
	SCENE(dissolved_in_sets),
	SCENE(dissolved_unseen),
	SCENE(dissolved_by_both),
	SCENE(dissolved_behind_an_end),
	{NULL, NULL},
};
