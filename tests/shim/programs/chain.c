/*
 * usage: chain HOW TIMES [WORD]. The two ends exchange words until standard input has something. Then the client sends more, two of
 * them always under way, and compares each that comes back. The server executes itself, TIMES times, and echoes some in each program:
 * in its place, or (`fork`, `clone`) in a child while it waits. Then it prints what it read last.
 * HOW: exec; fork; failing: each exec fails first; closefrom, close_range, closed: all other numbers are closed before, the last by a
 * system call that no hook sees; environment: WORD is added to that of the next program; crowded: so are very many others; two: the
 * socket has a second number; numbers, memory: the next program, which is WORD for the last, gets less of them; landlock: it must not read directories; path: it is
 * looked for by PATH; clone: a child executes it that shares its parent's memory, which waits; program: WORD is the next program.
 * WORD `stays`: the last program echoes until standard input ends. The client prints how many words came back whole.
 * AT=ADDRESS in the environment: the server listens there, prints its port, and its client is `chain client TIMES ADDRESS PORT`.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/landlock.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#ifdef LARGE
char large[60 << 20]; /* with it there is no room for the family's memory under a limit that the program before has */
#endif

enum { WORD = 64, EACH = 50, UNDER_WAY = 2, CROWD = 70000, ENTRY = 8 };
#define NEED(condition) ((condition) ? (void)0 : need_failed(__LINE__, #condition))

static void need_failed(int line, const char *what)
{
	printf("%d, line %d: %s (%s)\n", (int)getpid(), line, what, strerror(errno));
	fflush(stdout);
	_exit(1);
}

static void wait_for(int fd, int turn)
{
	struct pollfd item = {.fd = fd, .events = POLLIN};
	struct epoll_event event = {.events = EPOLLIN};

	if (turn % 3 == 0) {
		NEED(poll(&item, 1, -1) == 1);
	} else if (turn % 3 == 1) {
		int set = epoll_create1(EPOLL_CLOEXEC);
		NEED(epoll_ctl(set, EPOLL_CTL_ADD, fd, &event) == 0 && epoll_wait(set, &event, 1, -1) == 1 && close(set) == 0);
	}
}

static void ask(int fd)
{
	struct pollfd told = {.fd = STDIN_FILENO, .events = POLLIN};
	char word[WORD];

	do {
		memset(word, poll(&told, 1, 0) ? 'b' : 'a', WORD);
		NEED(send(fd, word, WORD, MSG_NOSIGNAL) == WORD);
		NEED(recv(fd, word, WORD, MSG_WAITALL) == WORD);
	} while (*word == 'a');
	NEED(read(STDIN_FILENO, word, WORD) >= 0);
}

static void answer(int fd)
{
	char word[WORD];

	do {
		NEED(recv(fd, word, WORD, MSG_WAITALL) == WORD);
		NEED(send(fd, word, WORD, MSG_NOSIGNAL) == WORD);
	} while (*word == 'a');
}

static void echo(int fd, int count)
{
	char word[WORD];

	for (int i = 0; i < count; i++) {
		wait_for(fd, i);
		NEED(recv(fd, word, WORD, MSG_WAITALL) == WORD);
		NEED(send(fd, word, WORD, MSG_NOSIGNAL) == WORD);
	}
}

static void read_on(int fd)
{
	char buf[WORD];
	ssize_t n = read(fd, buf, sizeof(buf));

	printf("server: %zd, %s\n", n, n < 0 ? strerror(errno) : "the end");
}

static int client(const struct sockaddr_in *address, int total, bool stays)
{
	char word[WORD], back[WORD];
	unsigned char out = 0, in = 0;
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), sent = 0, got = 0;

	NEED(connect(fd, (const struct sockaddr *)address, sizeof(*address)) == 0);
	ask(fd);
	for (; got < total; got++) {
		for (; sent < total && sent - got < UNDER_WAY; sent++) {
			for (int i = 0; i < WORD; i++)
				word[i] = (char)(out++ * 7 + 3);
			NEED(send(fd, word, WORD, MSG_NOSIGNAL) == WORD);
		}
		NEED(recv(fd, back, WORD, MSG_WAITALL) == WORD);
		for (int i = 0; i < WORD; i++)
			NEED((unsigned char)back[i] == (unsigned char)(in++ * 7 + 3));
	}
	if (stays)
		ask(fd);
	NEED(shutdown(fd, SHUT_WR) == 0);
	NEED(recv(fd, back, WORD, 0) == 0);
	printf("client: %d whole\n", got);
	fflush(stdout);
	return 0;
}

static bool nothing_of_ours(void)
{
	return !getenv("SIDESTEP_TRAVEL");
}

/* Ends with E69999. */
static char **crowded(void)
{
	char *text = malloc(CROWD * ENTRY), **made;
	size_t own = 0;

	if (getenv("E69999"))
		return environ;
	while (environ[own])
		own++;
	made = malloc((own + CROWD + 1) * sizeof(*made));
	memcpy(made, environ, own * sizeof(*made));
	for (int i = 0; i < CROWD; i++) {
		made[own + (size_t)i] = text + i * ENTRY;
		snprintf(text + i * ENTRY, ENTRY, "E%05d=", i);
	}
	made[own + CROWD] = NULL;
	return made;
}

static void limit(int resource, rlim_t to)
{
	struct rlimit now;

	NEED(getrlimit(resource, &now) == 0);
	now.rlim_cur = to;
	NEED(setrlimit(resource, &now) == 0);
}

static rlim_t memory_now(void)
{
	unsigned long pages = 0;
	FILE *statm = fopen("/proc/self/statm", "re");

	NEED(statm && fscanf(statm, "%lu", &pages) == 1 && fclose(statm) == 0);
	return pages * (rlim_t)sysconf(_SC_PAGESIZE);
}

static void restrict_directories(void)
{
	struct landlock_ruleset_attr rules = {.handled_access_fs = LANDLOCK_ACCESS_FS_READ_DIR};
	int set = (int)syscall(SYS_landlock_create_ruleset, &rules, sizeof(rules), 0);

	NEED(set >= 0 && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
	NEED(syscall(SYS_landlock_restrict_self, set, 0) == 0 && close(set) == 0);
}

static void confine(const char *how)
{
	if (strcmp(how, "numbers") == 0)
		limit(RLIMIT_NOFILE, 24);
	if (strcmp(how, "memory") == 0)
		limit(RLIMIT_AS, memory_now() + (16 << 20));
	if (strcmp(how, "landlock") == 0)
		restrict_directories();
}

/* By system calls of its own, which no hook sees; without them it is a program whose code can be trusted to have none. */
static void close_unseen(int first)
{
#ifndef COVERED
	for (int each = first; each < 1 << 16; each++) {
		long result;
#if defined(__x86_64__)
		__asm__ volatile("syscall" : "=a"(result) : "a"(SYS_close), "D"(each) : "rcx", "r11", "memory");
#else
		register long a0 __asm__("x0") = each, call __asm__("x8") = SYS_close;
		__asm__ volatile("svc 0" : "+r"(a0) : "r"(call) : "memory");
		result = a0;
#endif
		(void)result;
	}
#else
	(void)first;
#endif
}

static void execute(const char *how, int fd, int left, const char *word)
{
	char number[16], count[16], *long_word = malloc(1 << 20);

	snprintf(number, sizeof(number), "%d", fd);
	snprintf(count, sizeof(count), "%d", left);
	if (strcmp(how, "failing") == 0) {
		memset(long_word, 'x', (1 << 20) - 1);
		long_word[(1 << 20) - 1] = '\0';
		NEED(execl("/proc/self/exe", "chain", long_word, (char *)NULL) < 0 && errno == E2BIG);
		echo(fd, 1);
	}
	if (strcmp(how, "closefrom") == 0)
		closefrom(fd + 1);
	if (strcmp(how, "close_range") == 0)
		NEED(close_range((unsigned)fd + 1, ~0u, 0) == 0);
	if (strcmp(how, "closed") == 0)
		close_unseen(fd + 1);
	if (strcmp(how, "environment") == 0)
		putenv((char *)word);
	if (strcmp(how, "two") == 0)
		NEED((left % 2 ? dup(fd) : fcntl(fd, F_DUPFD_CLOEXEC, 0)) >= 0);
	confine(how);
	if (strcmp(how, "path") == 0)
		execlp("chain", "chain", how, count, word ? word : "-", number, (char *)NULL);
	execle(strcmp(how, "program") == 0 || strcmp(how, "memory") == 0 ? word : "/proc/self/exe", "chain", how, count,
	       word ? word : "-", number, (char *)NULL, strcmp(how, "crowded") == 0 ? crowded() : environ);
	NEED(!"exec");
}

struct next {
	const char *how, *word;
	int fd;
};

static int next_in_child(void *next)
{
	execute(((struct next *)next)->how, ((struct next *)next)->fd, 0, ((struct next *)next)->word);
	return 1;
}

/* In the memory of its parent. */
static pid_t cloned(struct next *next)
{
	static char stack[1 << 18];

	return clone(next_in_child, stack + sizeof(stack), CLONE_VM | SIGCHLD, next);
}

int main(int argc, char **argv)
{
	const char *at = getenv("AT");
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = inet_addr(at ? at : "127.0.0.1")};
	socklen_t len = sizeof(address);
	const char *how = argv[1], *word = argc > 3 ? argv[3] : NULL;
	int left = atoi(argv[2]), fails = strcmp(how, "failing") == 0;
	bool clones = strcmp(how, "clone") == 0, forks = clones || strcmp(how, "fork") == 0,
		 stays = word && strcmp(word, "stays") == 0;

	NEED(nothing_of_ours());
	if (strcmp(how, "client") == 0) {
		address.sin_addr.s_addr = inet_addr(argv[3]);
		address.sin_port = htons((uint16_t)atoi(argv[4]));
		return client(&address, left * EACH, false);
	}
	if (argc > 4) {
		int fd = atoi(argv[4]);
		NEED(strcmp(how, "crowded") != 0 || getenv("E69999"));
		echo(fd, EACH);
		if (left && !forks)
			execute(how, fd, left - 1, word);
		if (!forks && stays)
			answer(fd);
		if (!forks)
			read_on(fd);
		return 0;
	}
	int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	NEED(bind(listener, (struct sockaddr *)&address, len) == 0 && listen(listener, 1) == 0);
	NEED(getsockname(listener, (struct sockaddr *)&address, &len) == 0);
	if (at)
		printf("%d\n", ntohs(address.sin_port));
	fflush(stdout);
	if (!at && fork() == 0)
		return client(&address, left * EACH + left * fails, stays);
	int fd = accept(listener, NULL, NULL);
	NEED(fd >= 0 && close(listener) == 0);
	answer(fd);
	if (!forks)
		execute(how, fd, left - 1, word);
	for (; left; left--) {
		int status;
		struct next next = {how, word, fd};
		pid_t child = clones ? cloned(&next) : fork();
		if (!child)
			execute(how, fd, 0, word);
		NEED(waitpid(child, &status, 0) == child && status == 0);
	}
	if (stays)
		answer(fd);
	read_on(fd);
	return 0;
}
