/*
 * A thread reads and writes a connection where the shim can do nothing for it: in the strict mode of seccomp, or in a child that
 * shares its parent's memory. Prints what it read.
 *
 * confined strict|child: the two ends exchange small messages until standard input has something.
 */
#include <errno.h>
#include <linux/seccomp.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SMALL = 3, UNREAD = 1000, FIRST = 600, LATER = 10, STACK = 65536, STATUS = 5 };

#define NEED(condition) ((condition) ? (void)0 : need_failed(__LINE__, #condition))

static void need_failed(int line, const char *what)
{
	printf("line %d: %s (%s)\n", line, what, strerror(errno));
	fflush(stdout);
	_exit(1);
}

static int connection, way[2];

/* ---- the peer ---- */
static void talk(const struct sockaddr_in *address, size_t unread)
{
	static char bytes[UNREAD];
	char small[SMALL];
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	struct pollfd told = {.fd = STDIN_FILENO, .events = POLLIN};

	NEED(connect(fd, (const struct sockaddr *)address, sizeof(*address)) == 0);
	while (poll(&told, 1, 0) == 0) {
		NEED(send(fd, "abc", SMALL, 0) == SMALL);
		NEED(recv(fd, small, SMALL, MSG_WAITALL) == SMALL);
	}
	NEED(send(fd, "end", SMALL, 0) == SMALL);
	NEED(send(fd, bytes, unread, 0) == (ssize_t)unread);
	NEED(read(way[0], small, 1) == 1); /* where it hears of nothing else */
	NEED(send(fd, bytes, LATER, 0) == LATER);
	NEED(recv(fd, small, SMALL, MSG_WAITALL) == SMALL);
	NEED(recv(fd, small, SMALL, 0) == 0);
}

/* ---- the reader ---- */
static size_t put_number(char *to, long number)
{
	size_t len = 0;
	char digits[24];

	if (number < 0)
		digits[len++] = '-';
	for (unsigned long left = (unsigned long)(number < 0 ? -number : number); len == 0 || left; left /= 10)
		digits[len++] = (char)('0' + left % 10);
	for (size_t i = 0; i < len; i++)
		to[i] = digits[len - 1 - i];
	to[len] = ' ';
	return len + 1;
}

static void use(size_t unread)
{
	static char bytes[2 * UNREAD], said[64];
	size_t len = 0;

	if (unread)
		len += put_number(said + len, read(connection, bytes, FIRST));
	if (unread)
		len += put_number(said + len, read(connection, bytes, sizeof(bytes)));
	write(way[1], "x", 1);
	len += put_number(said + len, read(connection, bytes, sizeof(bytes)));
	len += put_number(said + len, write(connection, "abc", SMALL));
	said[len - 1] = '\n';
	write(STDOUT_FILENO, said, len);
}

static int child_run(void *unused)
{
	(void)unused;
	use(0);
	syscall(SYS_exit, STATUS);
	return 0;
}

static void child(void)
{
	char *stack = mmap(NULL, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	int status = 0;

	NEED(stack != MAP_FAILED);
	pid_t made = clone(child_run, stack + STACK, CLONE_VM | CLONE_FILES | SIGCHLD, NULL);
	NEED(made > 0 && waitpid(made, &status, 0) == made);
	NEED(WIFEXITED(status) && WEXITSTATUS(status) == STATUS);
}

static void listen_for(size_t unread)
{
	char small[SMALL];
	size_t there = 0;

	do {
		NEED(recv(connection, small, SMALL, MSG_WAITALL) == SMALL);
		if (*small == 'a')
			NEED(send(connection, small, SMALL, 0) == SMALL);
	} while (*small == 'a');
	while (there < unread) {
		int found = 0;
		NEED(ioctl(connection, FIONREAD, &found) == 0);
		there = (size_t)found;
	}
}

int main(int argc, char **argv)
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof(address);
	int listener = socket(AF_INET, SOCK_STREAM, 0);

	NEED(argc == 2 && pipe(way) == 0);
	bool strict = strcmp(argv[1], "strict") == 0;
	NEED(bind(listener, (struct sockaddr *)&address, len) == 0 && listen(listener, 1) == 0);
	NEED(getsockname(listener, (struct sockaddr *)&address, &len) == 0);
	pid_t peer = fork();
	if (!peer) {
		close(listener);
		talk(&address, strict ? UNREAD : 0);
		_exit(0);
	}
	connection = accept(listener, NULL, NULL);
	listen_for(strict ? UNREAD : 0);
	if (strict) {
		NEED(prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT) == 0);
		use(UNREAD);
		syscall(SYS_exit, STATUS);
	}
	child();
	close(connection);
	int status = 0;
	NEED(waitpid(peer, &status, 0) == peer && status == 0);
	return STATUS;
}
