/*
 * A client sends a request, ends its direction, and waits for the answer. The server does not read the request: another program does,
 * which gets the socket in the way that the argument names, with BARE in the environment without LD_PRELOAD. Prints what that reader
 * got. `passed-late` with BARE: the reader has the shim until the message with the socket is there. The two ends exchange small messages
 * until standard input has something, and the server waits until the whole request and the end behind it have come.
 * AT=ADDRESS in the environment: the server listens there, prints its port, and its client is `half_close client ADDRESS PORT`. With
 * CLOSE in its environment that closes instead of waiting. NEXT=FILE: another build of it is the reader that is executed; built with
 * -DREFUSED sidestep's loader does not take it.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { REQUEST = 50000, SMALL = 3 };

#define NEED(condition) ((condition) ? (void)0 : need_failed(__LINE__, #condition))

#ifdef REFUSED
__asm__(".text\n.globl refused\nrefused: wrgsbase %rax\n ret\n"); /* the base that the loader has for its own */
#endif

static void need_failed(int line, const char *what)
{
	printf("line %d: %s (%s)\n", line, what, strerror(errno));
	fflush(stdout);
	_exit(1);
}

/* ---- the reader ---- */
static void read_all(int fd)
{
	static char buf[65536];
	size_t got = 0;
	ssize_t n;

	while ((n = read(fd, buf, sizeof(buf))) > 0)
		got += (size_t)n;
	printf("%zu bytes, then %s\n", got, n ? strerrorname_np(errno) : "the end");
	fflush(stdout);
}

static int take(int from)
{
	char byte, control[CMSG_SPACE(sizeof(int))];
	struct iovec iov = {&byte, 1};
	struct msghdr message = {
		.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)};
	int fd;

	NEED(recvmsg(from, &message, 0) == 1 && CMSG_FIRSTHDR(&message));
	memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(fd));
	return fd;
}

static void become_taker(int from, int late)
{
	struct pollfd there = {.fd = from, .events = POLLIN};
	char number[16];

	NEED(!late || poll(&there, 1, -1) == 1);
	NEED(fcntl(from, F_SETFD, 0) == 0);
	snprintf(number, sizeof(number), "%d", from);
	execl("/proc/self/exe", "half_close", "taker", number, (char *)NULL);
	NEED(!"exec");
}

/* ---- how it gets the socket ---- */
static void give(int to, int fd, int many)
{
	char control[CMSG_SPACE(sizeof(int))] = "";
	struct iovec iov = {"x", 1};
	struct mmsghdr message = {
		.msg_hdr = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)}};
	struct cmsghdr *header = CMSG_FIRSTHDR(&message.msg_hdr);

	*header = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof(int))};
	memcpy(CMSG_DATA(header), &fd, sizeof(fd));
	NEED((many ? sendmmsg(to, &message, 1, 0) : sendmsg(to, &message.msg_hdr, 0)) == 1);
}

static void execute(int fd)
{
	char number[16];

	snprintf(number, sizeof(number), "%d", fd);
	execl(getenv("NEXT") ? getenv("NEXT") : "/proc/self/exe", "half_close", "reader", number, (char *)NULL);
	NEED(!"exec");
}

static void execute_by_descriptor(int fd)
{
	char number[16];
	int self = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);

	snprintf(number, sizeof(number), "%d", fd);
	fexecve(self, (char *[]){"half_close", "reader", number, NULL}, environ);
	NEED(!"fexecve");
}

static pid_t spawn(int fd)
{
	posix_spawn_file_actions_t actions;
	pid_t child;

	NEED(posix_spawn_file_actions_init(&actions) == 0);
	NEED(posix_spawn_file_actions_adddup2(&actions, fd, STDIN_FILENO) == 0);
	NEED(posix_spawn(&child, "/proc/self/exe", &actions, NULL, (char *[]){"half_close", "reader", "0", NULL},
	                 environ) == 0);
	return child;
}

/* A program without the shim inherits the socket, and does not read it, until the parent ends. Returns once it is executed. */
static void start_beside(void)
{
	int executed[2];
	char byte;

	NEED(pipe2(executed, O_CLOEXEC) == 0);
	pid_t child = fork();
	if (!child) {
		NEED(prctl(PR_SET_PDEATHSIG, SIGKILL) == 0);
		execle("/bin/sleep", "sleep", "infinity", (char *)NULL, (char *[]){"LD_PRELOAD=", NULL});
		NEED(!"exec");
	}
	NEED(close(executed[1]) == 0 && read(executed[0], &byte, 1) == 0);
}

/* The socket stays open here until the reader has ended, but where the name says otherwise. */
static void hand_over(const char *how, int fd, int way)
{
	pid_t child = 0;

	if (strncmp(how, "passed", 6) == 0) {
		give(way, fd, strcmp(how, "passed-by-sendmmsg") == 0);
		if (strcmp(how, "passed-and-closed") == 0)
			NEED(close(fd) == 0);
		return;
	}
	if (strcmp(how, "executed-beside") == 0) {
		start_beside();
		execute(fd);
	}
	if (strcmp(how, "fexecve") == 0)
		execute_by_descriptor(fd);
	if (strcmp(how, "spawned") == 0)
		child = spawn(fd);
	else if (!(child = strcmp(how, "vforked") == 0 ? vfork() : fork())) {
		if (strcmp(how, "executed-as-stdin") == 0)
			NEED(dup2(fd, STDIN_FILENO) == STDIN_FILENO);
		if (strcmp(how, "executed") == 0)
			NEED(fcntl(fd, F_SETFD, 0) == 0);
		if (strcmp(how, "read-on") == 0)
			execl("/bin/true", "true", (char *)NULL);
		execute(strcmp(how, "executed-as-stdin") == 0 ? STDIN_FILENO : fd);
	}
	if (strcmp(how, "executed-and-closed") == 0)
		NEED(close(fd) == 0);
	NEED(waitpid(child, NULL, 0) == child);
	if (strcmp(how, "read-on") == 0)
		read_all(fd);
}

/* ---- the two ends ---- */
static void ask(const struct sockaddr_in *address)
{
	static char request[REQUEST];
	char small[SMALL];
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	struct pollfd told = {.fd = STDIN_FILENO, .events = POLLIN};

	NEED(connect(fd, (const struct sockaddr *)address, sizeof(*address)) == 0);
	while (poll(&told, 1, 0) == 0) {
		NEED(send(fd, "abc", SMALL, 0) == SMALL);
		NEED(recv(fd, small, SMALL, MSG_WAITALL) == SMALL);
	}
	NEED(send(fd, "end", SMALL, 0) == SMALL);
	NEED(send(fd, request, sizeof(request), 0) == sizeof(request));
	NEED(shutdown(fd, SHUT_WR) == 0);
	if (!getenv("CLOSE"))
		recv(fd, small, SMALL, 0); /* waits for the end of it all */
}

static void serve(const char *how, int fd, int way)
{
	struct pollfd ended = {.fd = fd, .events = POLLRDHUP};
	char small[SMALL];
	int there = 0;

	do {
		NEED(recv(fd, small, SMALL, MSG_WAITALL) == SMALL);
		if (*small == 'a')
			NEED(send(fd, small, SMALL, 0) == SMALL);
	} while (*small == 'a');
	while (there < REQUEST)
		NEED(ioctl(fd, FIONREAD, &there) == 0);
	NEED(poll(&ended, 1, -1) == 1);
	hand_over(how, fd, way);
}

int main(int argc, char **argv)
{
	const char *at = getenv("AT");
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = inet_addr(at ? at : "127.0.0.1")};
	socklen_t len = sizeof(address);
	int way[2];

	if (argc > 3) {
		address.sin_addr.s_addr = inet_addr(argv[2]);
		address.sin_port = htons((uint16_t)atoi(argv[3]));
		ask(&address);
		return 0;
	}
	if (argc > 2) {
		read_all(strcmp(argv[1], "taker") == 0 ? take(atoi(argv[2])) : atoi(argv[2]));
		return 0;
	}
	int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	NEED(bind(listener, (struct sockaddr *)&address, len) == 0 && listen(listener, 1) == 0);
	NEED(getsockname(listener, (struct sockaddr *)&address, &len) == 0);
	NEED(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, way) == 0);
	if (at)
		printf("%d\n", ntohs(address.sin_port));
	fflush(stdout);
	pid_t client = at ? -1 : fork(), worker = 0;
	if (!client) {
		ask(&address);
		_exit(0);
	}
	if (getenv("BARE"))
		unsetenv("LD_PRELOAD");
	if (strncmp(argv[1], "passed", 6) == 0 && !(worker = fork())) {
		if (getenv("BARE"))
			become_taker(way[1], strcmp(argv[1], "passed-late") == 0);
		read_all(take(way[1]));
		_exit(0);
	}
	serve(argv[1], accept(listener, NULL, NULL), way[0]);
	if (worker)
		NEED(waitpid(worker, NULL, 0) == worker);
	return 0;
}
