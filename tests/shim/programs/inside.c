/*
 * A server reads lines and sends them back by calls that the C library makes within itself. The client has sent FIRST of them when it
 * stops (SIGSTOP), so that it makes no call any more. They have arrived, so the server must find all of them at once, and in
 * order. Then it wakes the client, which sends more, and compares what has come back.
 *
 * inside HOW [ARGUMENT]: prints "whole". The two exchange small messages until standard input has something.
 */
#include <aio.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <wchar.h>

enum { SMALL = 3, FIRST = 300, LINES = 400, ROOM = 64 };

#define NEED(condition) ((condition) ? (void)0 : need_failed(__LINE__, #condition))

static void need_failed(int line, const char *what)
{
	char text[200];
	int len = snprintf(text, sizeof(text), "line %d: %s (%s)\n", line, what, strerrorname_np(errno));
	int told = open("/dev/tty", O_WRONLY);
	ssize_t put = write(told < 0 ? 2 : told, text, (size_t)len);
	_exit(put < 0 ? 2 : 1);
}

/* ---- the client ---- */
static void send_lines(int fd, int from, int to)
{
	char line[ROOM];

	for (int i = from; i < to; i++) {
		int len = sprintf(line, "line%d\n", i);
		NEED(send(fd, line, (size_t)len, 0) == len);
	}
}

static void client(const struct sockaddr_in *address)
{
	static char back[LINES * ROOM];
	char small[SMALL], want[ROOM], *at = back;
	ssize_t got;
	size_t len = 0;
	int fd = socket(AF_INET, SOCK_STREAM, 0), whole = 0;
	struct pollfd told = {.fd = STDIN_FILENO, .events = POLLIN};

	NEED(connect(fd, (const struct sockaddr *)address, sizeof(*address)) == 0);
	while (poll(&told, 1, 0) == 0) {
		NEED(send(fd, "abc", SMALL, 0) == SMALL);
		NEED(recv(fd, small, SMALL, MSG_WAITALL) == SMALL);
	}
	NEED(send(fd, "end", SMALL, 0) == SMALL);
	send_lines(fd, 0, FIRST);
	raise(SIGSTOP);
	send_lines(fd, FIRST, LINES);
	NEED(shutdown(fd, SHUT_WR) == 0);
	while ((got = recv(fd, back + len, sizeof(back) - 1 - len, 0)) > 0)
		len += (size_t)got;
	NEED(got == 0);
	for (; whole < LINES; whole++) {
		int long_ = sprintf(want, "line%d", whole);
		char *end = strchr(at, '\n');
		if (!end || strncmp(at, want, (size_t)long_) != 0 || !strchr("\n:", at[long_]))
			break;
		at = end + 1;
	}
	if (whole == LINES && !*at)
		printf("whole\n");
	else
		printf("%d lines, then %.20s\n", whole, at);
	fflush(stdout);
}

/* ---- the server ---- */
static bool by_fgets(char *line)
{
	return fgets(line, ROOM, stdin);
}

static bool by_fread(char *line)
{
	size_t len = 0;

	while (fread(line + len, 1, 1, stdin) == 1)
		if (line[len++] == '\n')
			break;
	line[len] = '\0';
	return len;
}

static bool by_scanf(char *line)
{
	if (scanf("%62s", line) != 1)
		return false;
	strcat(line, "\n");
	return true;
}

static bool by_wide(char *line)
{
	wchar_t wide[ROOM];

	return fgetws(wide, ROOM, stdin) && wcstombs(line, wide, ROOM) != (size_t)-1;
}

static FILE *other;

static bool by_other(char *line)
{
	return fgets(line, ROOM, other);
}

static int number;
static bool listed;

static ssize_t asynchronous(char *to, size_t len)
{
	struct aiocb block = {.aio_fildes = number, .aio_buf = to, .aio_nbytes = len, .aio_lio_opcode = LIO_READ};
	const struct aiocb *wait = &block;
	struct aiocb *list[] = {NULL, &block};

	block.aio_sigevent.sigev_notify = SIGEV_SIGNAL;
	block.aio_sigevent.sigev_signo = SIGUSR1;
	if (listed) {
		NEED(lio_listio(LIO_WAIT, list, 2, NULL) == 0);
	} else {
		NEED(aio_read(&block) == 0);
		while (aio_error(&block) == EINPROGRESS)
			NEED(aio_suspend(&wait, 1, NULL) == 0 || errno == EINTR);
	}
	NEED(aio_error(&block) == 0);
	return aio_return(&block);
}

static volatile sig_atomic_t told_of;

static void tell(int signal_number)
{
	(void)signal_number;
	told_of++;
}

static bool by_aio(char *line)
{
	static char bytes[4 * ROOM];
	static size_t from, to;
	size_t len = 0;

	do {
		if (from == to) {
			sigset_t usr1, before;
			sigemptyset(&usr1);
			sigaddset(&usr1, SIGUSR1);
			NEED(sigprocmask(SIG_BLOCK, &usr1, &before) == 0);
			int earlier = told_of;
			ssize_t got = asynchronous(bytes, sizeof(bytes));
			while (!listed && told_of == earlier)
				sigsuspend(&before);
			NEED(sigprocmask(SIG_SETMASK, &before, NULL) == 0 && got >= 0);
			from = 0;
			to = (size_t)got;
		}
		if (from == to)
			break;
		line[len++] = bytes[from++];
	} while (line[len - 1] != '\n');
	line[len] = '\0';
	return len;
}

static bool (*by_library)(char *line);

static bool by_loaded(char *line)
{
	return by_library(line);
}

static void load(const char *library, const char *name)
{
	void *loaded = dlopen(library, RTLD_NOW);

	NEED(loaded && (by_library = (bool (*)(char *))dlsym(loaded, name)));
}

/* Lines go back by standard output, by perror() on standard error, or by send(). */
static void answer(int fd, const char *line, bool prints)
{
	if (prints) {
		NEED(fputs(line, stdout) >= 0);
	} else if (fd == STDERR_FILENO) {
		char text[ROOM];
		strcpy(text, line);
		*strchr(text, '\n') = '\0';
		errno = ENOENT;
		perror(text);
	} else {
		NEED(send(fd, line, strlen(line), 0) == (ssize_t)strlen(line));
	}
}

static void echo(int fd, bool (*next)(char *line), bool prints, pid_t stopped)
{
	char line[ROOM];

	for (int i = 0; next(line); i++) {
		answer(fd, line, prints);
		if (i + 1 == FIRST)
			NEED(kill(stopped, SIGCONT) == 0);
	}
}

static void serve(int fd, const char *how, char **argv, pid_t stopped)
{
	char pid[16];
	bool (*next)(char *) = !strcmp(how, "fread")     ? by_fread
	                       : !strcmp(how, "scanf")   ? by_scanf
	                       : !strcmp(how, "wide")    ? by_wide
	                       : !strcmp(how, "other")   ? by_other
	                       : !strcmp(how, "fdopen")  ? by_other
	                       : !strncmp(how, "cin", 3) ? by_loaded
	                       : !strncmp(how, "aio", 3) ? by_aio
	                                                 : by_fgets;

	if (next == by_aio) {
		struct sigaction action = {.sa_handler = tell};
		NEED(sigaction(SIGUSR1, &action, NULL) == 0);
		number = fd;
		listed = !strcmp(how, "aio-list");
	} else if (!strcmp(how, "other")) {
		NEED((other = fopen("/dev/null", "r")) && dup2(fd, fileno(other)) == fileno(other));
	} else if (!strcmp(how, "fdopen")) {
		NEED(other = fdopen(dup(fd), "r"));
	} else {
		NEED(dup2(fd, STDIN_FILENO) == STDIN_FILENO);
	}
	if (next == by_loaded)
		load(argv[2], how);
	bool prints = !strcmp(how, "printf");
	if (prints || !strcmp(how, "exec"))
		NEED(dup2(fd, STDOUT_FILENO) == STDOUT_FILENO);
	if (!strcmp(how, "perror"))
		NEED(dup2(fd, STDERR_FILENO) == STDERR_FILENO);
	if (!strcmp(how, "exec")) {
		sprintf(pid, "%d", (int)stopped);
		NEED(close(fd) == 0 && execl(argv[0], argv[0], "echo", pid, NULL) == 0);
	}
	echo(strcmp(how, "perror") ? fd : STDERR_FILENO, next, prints, stopped);
	exit(0); /* libc writes what streams still hold after all destructors */
}

int main(int argc, char **argv)
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof(address);
	int way[2], status, unread = 0, expected = 0, listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	char small[SMALL], line[ROOM];
	pid_t ends[2];

	NEED(argc >= 2);
	if (!strcmp(argv[1], "echo")) {
		echo(-1, by_fgets, true, atoi(argv[2]));
		return 0;
	}
	NEED(pipe2(way, O_CLOEXEC) == 0);
	NEED(bind(listener, (struct sockaddr *)&address, len) == 0 && listen(listener, 1) == 0);
	NEED(getsockname(listener, (struct sockaddr *)&address, &len) == 0);
	if (!(ends[0] = fork())) {
		client(&address);
		_exit(0);
	}
	if (!(ends[1] = fork())) {
		int fd = accept(listener, NULL, NULL);
		do {
			NEED(recv(fd, small, SMALL, MSG_WAITALL) == SMALL);
			if (*small == 'a')
				NEED(send(fd, small, SMALL, 0) == SMALL);
		} while (*small == 'a');
		for (int i = 0; i < FIRST; i++)
			expected += sprintf(line, "line%d\n", i);
		while (unread < expected)
			NEED(ioctl(fd, FIONREAD, &unread) == 0);
		NEED(read(way[0], small, 1) == 1);
		serve(fd, argv[1], argv, ends[0]);
	}
	NEED(waitpid(ends[0], &status, WUNTRACED) == ends[0] && WIFSTOPPED(status));
	NEED(write(way[1], "", 1) == 1);
	for (int i = 0; i < 2; i++)
		NEED(waitpid(ends[i], &status, 0) == ends[i] && status == 0);
	return 0;
}
