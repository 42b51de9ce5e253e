/*
 * A peer has sent all that it has, and makes no socket call any more. The other end does one thing, and then wants the bytes: they
 * have arrived, so it must find them at once. Prints what it found, and then what it read.
 *
 * arrived THING WAIT: what the reader does before, and what the peer waits in meanwhile. The two exchange small messages until
 * standard input has something.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SMALL = 3, UNREAD = 1000, LATER = 10, SOON_MS = 5000 };

#define NEED(condition) ((condition) ? (void)0 : need_failed(__LINE__, #condition))

static void need_failed(int line, const char *what)
{
	printf("line %d: %s (%s)\n", line, what, strerror(errno));
	fflush(stdout);
	_exit(1);
}

/* ---- the peer ---- */
static void talk(const struct sockaddr_in *address, const char *wait, int way)
{
	static char bytes[UNREAD];
	char small[SMALL];
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	struct pollfd told = {.fd = STDIN_FILENO, .events = POLLIN}, other = {.fd = way, .events = POLLIN};

	NEED(connect(fd, (const struct sockaddr *)address, sizeof(*address)) == 0);
	while (poll(&told, 1, 0) == 0) {
		NEED(send(fd, "abc", SMALL, 0) == SMALL);
		NEED(recv(fd, small, SMALL, MSG_WAITALL) == SMALL);
	}
	NEED(send(fd, "end", SMALL, 0) == SMALL);
	NEED(send(fd, bytes, UNREAD, 0) == UNREAD);
	if (strcmp(wait, "recv") == 0)
		NEED(recv(fd, small, 1, 0) == 1);
	else if (strcmp(wait, "poll") == 0)
		NEED(poll(&other, 1, -1) == 1);
	NEED(read(way, small, 1) == 1); /* a pipe: the reader has all of it */
	NEED(send(fd, bytes, LATER, 0) == LATER);
	recv(fd, small, SMALL, 0); /* waits for the end of it all */
}

/* ---- the reader ---- */
static void sandbox(void)
{
	struct sock_filter all[] = {{BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW}};
	struct sock_fprog program = {1, all};

	NEED(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
	NEED(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
}

/* The set that is to tell of bytes from now on, or -1. */
static int do_thing(const char *thing, int fd)
{
	struct epoll_event event = {.events = EPOLLIN};
	int on = 1, inner = epoll_create1(0), outer = epoll_create1(0);

	signal(SIGIO, SIG_IGN);
	if (strcmp(thing, "async") == 0) {
		NEED(fcntl(fd, F_SETOWN, getpid()) == 0 && fcntl(fd, F_SETFL, O_ASYNC) == 0);
	} else if (strcmp(thing, "fioasync") == 0) {
		NEED(ioctl(fd, FIOASYNC, &on) == 0);
	} else if (strcmp(thing, "seccomp") == 0) {
		sandbox();
	} else if (strcmp(thing, "exclusive") == 0) {
		event.events |= EPOLLEXCLUSIVE;
		NEED(epoll_ctl(inner, EPOLL_CTL_ADD, fd, &event) == 0);
		return inner;
	} else if (strcmp(thing, "nested") == 0) {
		NEED(epoll_ctl(inner, EPOLL_CTL_ADD, fd, &event) == 0);
		NEED(epoll_ctl(outer, EPOLL_CTL_ADD, inner, &event) == 0);
		return outer;
	}
	return -1;
}

static void find(int fd, int set)
{
	struct pollfd item = {.fd = fd, .events = POLLIN};
	struct epoll_event event;
	int there = -1;

	NEED(ioctl(fd, FIONREAD, &there) == 0);
	printf("%d bytes, poll %d", there, poll(&item, 1, SOON_MS));
	if (set >= 0)
		printf(", epoll %d", epoll_wait(set, &event, 1, SOON_MS));
}

static void want(const char *thing, const char *wait, int fd, int way)
{
	char small[SMALL], bytes[UNREAD];
	int there = 0;

	do {
		NEED(recv(fd, small, SMALL, MSG_WAITALL) == SMALL);
		if (*small == 'a')
			NEED(send(fd, small, SMALL, 0) == SMALL);
	} while (*small == 'a');
	while (there < UNREAD)
		NEED(ioctl(fd, FIONREAD, &there) == 0);
	int set = do_thing(thing, fd);
	find(fd, set);
	printf(", read %zd\n", recv(fd, bytes, UNREAD, MSG_DONTWAIT));
	if (strcmp(wait, "recv") == 0)
		NEED(send(fd, "x", 1, 0) == 1);
	NEED(write(way, "x", 1) == 1);
	there = 0;
	while (there < LATER) {
		struct pollfd item = {.fd = fd, .events = POLLIN};
		NEED(poll(&item, 1, SOON_MS) == 1 && ioctl(fd, FIONREAD, &there) == 0);
	}
	find(fd, set);
	printf(", read %zd\n", recv(fd, bytes, UNREAD, MSG_DONTWAIT));
	fflush(stdout);
	char go;
	while (read(STDIN_FILENO, &go, 1) > 0)
		; /* somebody looks at the connection meanwhile */
}

int main(int argc, char **argv)
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof(address);
	int way[2], listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	NEED(argc == 3 && pipe(way) == 0);
	NEED(bind(listener, (struct sockaddr *)&address, len) == 0 && listen(listener, 1) == 0);
	NEED(getsockname(listener, (struct sockaddr *)&address, &len) == 0);
	pid_t client = fork();
	if (!client) {
		talk(&address, argv[2], way[0]);
		_exit(0);
	}
	want(argv[1], argv[2], accept(listener, NULL, NULL), way[1]);
	kill(client, SIGKILL);
	NEED(waitpid(client, NULL, 0) == client);
	return 0;
}
