/* What a program sees of a socket itself: how it is opened, bound, made to listen, and handed on. Played with ordinary,
 * explicit and direct sockets: the family in an address is the only difference. */
#include "scene.h"

static uint8_t data[4096];

static int open_one(int flags)
{
	struct sockaddr_storage address;
	loopback_address(choice.family, 0, true, &address);
	int fd = socket(address.ss_family, SOCK_STREAM | flags, 0);
	NEED(fd >= 0);
	return fd;
}

static int option(int fd, int level, int name)
{
	int value = -1;
	socklen_t len = sizeof value;
	NEED(getsockopt(fd, level, name, &value, &len) == 0 && len == sizeof value);
	return value;
}

static void say_name(const char *what, int fd)
{
	struct sockaddr_storage address;
	socklen_t len = sizeof address;
	say_ret(what, getsockname(fd, (struct sockaddr *)&address, &len));
	say("%u bytes, family %d, port %s", len, address.ss_family,
	    ((struct sockaddr_in *)&address)->sin_port ? "given" : "none");
}

/* Binds to a port and says how; the address given must come back as it was. */
static int bind_to(int fd, uint16_t port)
{
	struct sockaddr_storage address, before;
	socklen_t len = loopback_address(choice.family, port, true, &address);
	before = address;
	int result = (int)say_ret("bind", bind(fd, (struct sockaddr *)&address, len));
	if (memcmp(&address, &before, sizeof address))
		say("the address given HAS CHANGED");
	return result;
}

static int connect_to(uint16_t port)
{
	struct sockaddr_storage address;
	socklen_t len = loopback_address(choice.family, port, true, &address);
	int fd = socket(address.ss_family, SOCK_STREAM, 0);
	NEED(fd >= 0);
	say_ret("connect", connect(fd, (struct sockaddr *)&address, len));
	return fd;
}

static void say_accepted(int listener, int client)
{
	struct sockaddr_storage from = {0};
	socklen_t len = sizeof from;
	int server = accept(listener, (struct sockaddr *)&from, &len);
	NEED(server >= 0);
	say("from %u bytes, family %d, its port: %d", len, from.ss_family,
	    ntohs(((struct sockaddr_in *)&from)->sin_port) == local_port(client));
	converse(client, server);
	close(client);
	say_ret("the end", recv(server, data, 1, 0));
	close(server);
}

static void opened(void)
{
	static const int flags[] = {0, SOCK_NONBLOCK, SOCK_CLOEXEC, SOCK_NONBLOCK | SOCK_CLOEXEC};
	for (int i = 0; i < 4; i++) {
		int fd = open_one(flags[i]);
		say("O_NONBLOCK %d FD_CLOEXEC %d", !!(fcntl(fd, F_GETFL) & O_NONBLOCK), fcntl(fd, F_GETFD));
		say("domain %d type %d protocol %d listens %d", option(fd, SOL_SOCKET, SO_DOMAIN),
		    option(fd, SOL_SOCKET, SO_TYPE), option(fd, SOL_SOCKET, SO_PROTOCOL),
		    option(fd, SOL_SOCKET, SO_ACCEPTCONN));
		say_name("getsockname", fd);
		say_ret("recv", recv(fd, data, 1, 0));
		say_ret("send", send(fd, "x", 1, MSG_NOSIGNAL));
		say_ret("close", close(fd));
		say_ret("again", close(fd));
	}
}

static void ports(void)
{
	int one = open_one(0), other = open_one(0);
	bind_to(one, 0);
	say_name("port 0", one);
	bind_to(one, 0);
	bind_to(other, local_port(one));
	say_name("the other", other);
	NEED(listen(one, 5) == 0);
	bind_to(other, local_port(one));
	uint16_t port = local_port(one);
	NEED(close(one) == 0);
	bind_to(other, port);
	say("the same port: %d", local_port(other) == port);
	say_ret("listen", listen(other, 5));
	say_ret("and again", listen(other, 7));
	say("listens %d", option(other, SOL_SOCKET, SO_ACCEPTCONN));
	say_accepted(other, connect_to(port));
}

static void ports_shared(void)
{
	int fds[3], on = 1;
	for (int i = 0; i < 3; i++) {
		fds[i] = open_one(0);
		if (i < 2)
			NEED(setsockopt(fds[i], SOL_SOCKET, SO_REUSEPORT, &on, sizeof on) == 0);
		bind_to(fds[i], i ? local_port(fds[0]) : 0);
		say_ret("listen", i < 2 ? listen(fds[i], 5) : 0);
	}
	uint16_t port = local_port(fds[0]);
	NEED(close(fds[0]) == 0);
	say_accepted(fds[1], connect_to(port));
	NEED(close(fds[1]) == 0);
	bind_to(fds[2], port);
	say_name("the third", fds[2]);
}

static void bound_before_connect(void)
{
	uint16_t port;
	int listener = loopback_listener(choice.family, &port, 0), client = open_one(0);
	struct sockaddr_storage address;
	socklen_t len = loopback_address(choice.family, port, true, &address);
	bind_to(client, 0);
	uint16_t mine = local_port(client);
	say_ret("connect", connect(client, (struct sockaddr *)&address, len));
	say("the same port: %d", local_port(client) == mine);
	say_accepted(listener, client);
}

static void unbound_listener(void)
{
	int listener = open_one(0);
	say_ret("accept", accept(listener, NULL, NULL));
	say_ret("listen", listen(listener, 5));
	say_name("getsockname", listener);
	say_accepted(listener, connect_to(local_port(listener)));
}

static void listener_copied(void)
{
	uint16_t port;
	int listener = loopback_listener(choice.family, &port, SOCK_CLOEXEC);
	int copies[4] = {dup(listener), fcntl(listener, F_DUPFD, 100), fcntl(listener, F_DUPFD_CLOEXEC, 100),
	                 dup2(listener, 90)};
	NEED(close(listener) == 0);
	for (int i = 0; i < 4; i++) {
		say("copy %d: FD_CLOEXEC %d", i, fcntl(copies[i], F_GETFD));
		say_accepted(copies[i], connect_to(port));
		say_ret("close", close(copies[i]));
	}
	int late = connect_to(port);
	say_ret("send", send(late, "x", 1, MSG_NOSIGNAL));
}

static void copied_before_listen(void)
{
	/* What one number does holds for the other. */
	int one = open_one(0), other = dup(one);
	bind_to(other, 0);
	say_name("the first", one);
	say_ret("listen", listen(one, 5));
	uint16_t port = local_port(other);
	say_accepted(other, connect_to(port));
	NEED(close(one) == 0);
	say_accepted(other, connect_to(port));
}

static void listener_of_parent(void)
{
	/* A server that opens its port and forks workers; the parent leaves the port to them. */
	uint16_t port;
	int listener = loopback_listener(choice.family, &port, 0), pipes[2];
	NEED(pipe(pipes) == 0);
	pid_t child = fork();
	NEED(child >= 0);
	if (child == 0) {
		int server = accept(listener, NULL, NULL);
		for (ssize_t got; (got = recv(server, data, sizeof data, 0)) > 0;)
			NEED(send(server, data, (size_t)got, 0) == got);
		NEED(close(listener) == 0 && write(pipes[1], "x", 1) == 1);
		_exit(0);
	}
	NEED(close(listener) == 0);
	int client = connect_to(port), status;
	for (int i = 0; i < 200; i++) {
		NEED(send(client, "ping", 4, 0) == 4);
		NEED(recv(client, data, 4, MSG_WAITALL) == 4);
	}
	say("two hundred rounds with the child");
	NEED(shutdown(client, SHUT_WR) == 0);
	say_ret("the end", recv(client, data, 1, 0));
	NEED(read(pipes[0], data, 1) == 1 && waitpid(child, &status, 0) == child);
	say("the child exited with %d", WEXITSTATUS(status));
	int again = open_one(0), on = 1;
	NEED(setsockopt(again, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0);
	bind_to(again, port);
}

static void listener_in_sets(void)
{
	/* Registered before it listens. */
	int listener = open_one(SOCK_NONBLOCK), set = epoll_create1(0);
	struct epoll_event event = {.events = EPOLLIN, .data.u64 = 77}, got;
	bind_to(listener, 0);
	NEED(epoll_ctl(set, EPOLL_CTL_ADD, listener, &event) == 0);
	say_ret("listen", listen(listener, 5));
	say_ret("epoll_wait", epoll_wait(set, &got, 1, 0));
	int client = connect_to(local_port(listener));
	say_ret("epoll_wait", epoll_wait(set, &got, 1, 5000));
	say("%s %lu", poll_names(got.events), (unsigned long)got.data.u64);
	struct pollfd item = {.fd = listener, .events = POLLIN};
	int ready = poll(&item, 1, 5000);
	say_poll("poll", ready, item.revents);
	say_accepted(listener, client);
	say_ret("accept of none", accept(listener, NULL, NULL));
	say_ret("EPOLL_CTL_DEL", epoll_ctl(set, EPOLL_CTL_DEL, listener, NULL));
	say_ret("again", epoll_ctl(set, EPOLL_CTL_DEL, listener, NULL));
}

static void listener_passed(void)
{
	uint16_t port;
	int listener = loopback_listener(choice.family, &port, 0), ways[2];
	union {
		struct cmsghdr header;
		char bytes[CMSG_SPACE(sizeof(int))];
	} control = {.header = {.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS}};
	struct iovec part = {data, 1};
	struct msghdr message = {
		.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
	NEED(socketpair(AF_UNIX, SOCK_STREAM, 0, ways) == 0);
	memcpy(CMSG_DATA(&control.header), &listener, sizeof listener);
	say_ret("sendmsg", sendmsg(ways[0], &message, 0));
	NEED(close(listener) == 0);
	say_ret("recvmsg", recvmsg(ways[1], &message, 0));
	memcpy(&listener, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof listener);
	int client = connect_to(port), server = accept(listener, NULL, NULL);
	NEED(send(client, "ping", 4, 0) == 4);
	say_ret("recv", recv(server, data, 4, MSG_WAITALL));
}

static void wrong_addresses(void)
{
	struct sockaddr_storage address;
	socklen_t len = loopback_address(choice.family, 1, true, &address);
	int fd = open_one(0);
	say_ret("bind to a short address", bind(fd, (struct sockaddr *)&address, 4));
	say_ret("connect to a short address", connect(fd, (struct sockaddr *)&address, 4));
	say_ret("bind to none", bind(fd, (struct sockaddr *)&address, 0));
	say_ret("connect to none", connect(fd, (struct sockaddr *)&address, 0));
	say_ret("bind to a long one", bind(fd, (struct sockaddr *)&address, sizeof address + 1));
	say_ret("connect to a long one", connect(fd, (struct sockaddr *)&address, sizeof address + 1));
	address.ss_family = 0x7777;
	say_ret("bind to a strange family", bind(fd, (struct sockaddr *)&address, len));
	say_ret("connect to a strange family", connect(fd, (struct sockaddr *)&address, len));
	say_name("getsockname", fd);
	say_ret("listen", listen(fd, 1));
	say_ret("connect a listener", connect(fd, (struct sockaddr *)&address, len));
	say_ret("bind no descriptor", bind(-1, (struct sockaddr *)&address, len));
	say_ret("listen on none", listen(9999, 1));
	int pair[2];
	NEED(pipe(pair) == 0);
	say_ret("bind a pipe", bind(pair[0], (struct sockaddr *)&address, len));
}

static void addresses_with_data(void)
{
	/* A stream that is connected takes no notice of the address. */
	struct sockaddr_storage address;
	uint16_t port;
	int listener = loopback_listener(choice.family, &port, 0);
	socklen_t len = loopback_address(choice.family, port, true, &address);
	int client = open_one(0);
	say_ret("sendto before", sendto(client, "x", 1, MSG_NOSIGNAL, (struct sockaddr *)&address, len));
	say_ret("connect", connect(client, (struct sockaddr *)&address, len));
	say_ret("connect again", connect(client, (struct sockaddr *)&address, len));
	int server = accept(listener, NULL, NULL);
	struct iovec part = {"abc", 3};
	struct mmsghdr messages[2] = {0};
	for (int i = 0; i < 2; i++)
		messages[i].msg_hdr =
			(struct msghdr){.msg_name = &address, .msg_namelen = len, .msg_iov = &part, .msg_iovlen = 1};
	for (int i = 0; i < 2; i++) {
		say_ret("sendto", sendto(client, "abc", 3, 0, (struct sockaddr *)&address, len));
		say_ret("sendmsg", sendmsg(client, &messages[0].msg_hdr, 0));
		say_ret("sendmmsg", sendmmsg(client, messages, 2, 0));
		say_ret("recv", recv(server, data, 12, MSG_WAITALL));
		converse(client, server);
	}
}

static void connected_anew(void)
{
	struct sockaddr_storage address;
	struct sockaddr nowhere = {.sa_family = AF_UNSPEC};
	uint16_t port;
	int listener = loopback_listener(choice.family, &port, 0);
	socklen_t len = loopback_address(choice.family, port, true, &address);
	int client = connect_to(port);
	for (int i = 0; i < 2; i++) {
		int server = accept(listener, NULL, NULL);
		for (int j = 0; j < 2000; j++) {
			NEED(send(client, "ping", 4, 0) == 4 && recv(server, data, 4, MSG_WAITALL) == 4);
			NEED(send(server, "pong", 4, 0) == 4 && recv(client, data, 4, MSG_WAITALL) == 4);
		}
		say("two thousand rounds");
		close(server);
		say_ret("connect to nothing", connect(client, &nowhere, sizeof nowhere));
		say_ret("send", send(client, "x", 1, MSG_NOSIGNAL));
		say_ret("connect", connect(client, (struct sockaddr *)&address, len));
	}
}

const struct scene scenes_explicit[] = {
	SCENE(opened),           SCENE(ports),           SCENE(ports_shared),         SCENE(bound_before_connect),
	SCENE(unbound_listener), SCENE(listener_copied), SCENE(copied_before_listen), SCENE(listener_of_parent),
	SCENE(listener_in_sets), SCENE(listener_passed), SCENE(wrong_addresses),      SCENE(addresses_with_data),
	SCENE(connected_anew),   {NULL, NULL},
};
