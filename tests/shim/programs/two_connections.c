/*
 * As FTP has it: a client sends a file over a data connection, and waits on a control connection for the word that it has arrived.
 * The server starts a program, or has one read the data, and says so when it has all. Nobody makes another call on the data
 * connection before. Prints "whole", and "answered".
 *
 * two_connections HOW WAIT [READER]: popen, or execute READER with the number of the data connection; how the client waits: in
 * recv, in poll, in select, in a set or the set around it, or in recv while the data connection is in a set, or its thread is
 * elsewhere; or it asks again and again, by calls that do not wait. "pinned-" before that: the control connection stays on TCP. The two ends exchange small messages until standard input has something.
 */
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SMALL = 3, FILE_SIZE = 100000 };

#define NEED(condition) ((condition) ? (void)0 : need_failed(__LINE__, #condition))

static void need_failed(int line, const char *what)
{
	printf("line %d: %s (%s)\n", line, what, strerror(errno));
	fflush(stdout);
	_exit(1);
}

static int data_fd, control_fd;

/* ---- the client ---- */
static void exchange(int fd)
{
	char small[SMALL];

	NEED(send(fd, "abc", SMALL, 0) == SMALL);
	NEED(recv(fd, small, SMALL, MSG_WAITALL) == SMALL);
}

static void *send_file(void *set)
{
	static char file[FILE_SIZE];
	struct pollfd told = {.fd = STDIN_FILENO, .events = POLLIN};
	struct epoll_event event = {.events = EPOLLIN};

	if (set)
		NEED(epoll_ctl(*(int *)set, EPOLL_CTL_ADD, data_fd, &event) == 0);
	while (poll(&told, 1, 0) == 0) {
		exchange(data_fd);
		exchange(control_fd);
	}
	NEED(send(data_fd, "end", SMALL, 0) == SMALL);
	NEED(send(control_fd, "end", SMALL, 0) == SMALL);
	NEED(send(data_fd, file, FILE_SIZE, 0) == FILE_SIZE);
	return NULL;
}

static void *send_and_rest(void *sent)
{
	send_file(NULL);
	NEED(write(*(int *)sent, "x", 1) == 1);
	pause();
	return NULL;
}

/* Whether the control connection has something, by a call that does not wait. */
static bool look(const char *wait, int set)
{
	struct pollfd item = {.fd = control_fd, .events = POLLIN};
	struct epoll_event event;
	char byte;

	if (strcmp(wait, "busy-poll") == 0)
		return poll(&item, 1, 0) == 1;
	if (strcmp(wait, "busy-set") == 0)
		return epoll_wait(set, &event, 1, 0) == 1;
	return recv(control_fd, &byte, 1, MSG_DONTWAIT | MSG_PEEK) == 1;
}

static void look_until_there(const char *wait)
{
	struct epoll_event event = {.events = EPOLLIN};
	int set = epoll_create1(0);

	NEED(epoll_ctl(set, EPOLL_CTL_ADD, control_fd, &event) == 0);
	while (!look(wait, set))
		usleep(1000); /* between two looks that do not wait: a sleep under a call of ours would hear the peer */
}

/* Waits for something on the control connection. */
static void wait_there(const char *wait, int set)
{
	struct pollfd item = {.fd = control_fd, .events = POLLIN};
	struct epoll_event event = {.events = EPOLLIN};
	fd_set readable;

	FD_ZERO(&readable);
	FD_SET(control_fd, &readable);
	if (strcmp(wait, "poll") == 0)
		NEED(poll(&item, 1, -1) == 1);
	if (strcmp(wait, "select") == 0)
		NEED(select(control_fd + 1, &readable, NULL, NULL, NULL) == 1);
	if (strcmp(wait, "epoll") == 0 || strcmp(wait, "nested") == 0) {
		int outer = epoll_create1(0);
		NEED(epoll_ctl(set, EPOLL_CTL_ADD, control_fd, &event) == 0);
		if (*wait == 'n')
			NEED(epoll_ctl(outer, EPOLL_CTL_ADD, set, &event) == 0);
		NEED(epoll_wait(*wait == 'n' ? outer : set, &event, 1, -1) == 1);
	}
	if (strncmp(wait, "busy", 4) == 0)
		look_until_there(wait);
}

static void ask(const struct sockaddr_in *address, const char *wait)
{
	static const char pinned[] = "pinned-";
	const int on = 1;
	char answer[SMALL + 1];
	int set = epoll_create1(0), sent[2];
	pthread_t thread;

	data_fd = socket(AF_INET, SOCK_STREAM, 0);
	control_fd = socket(AF_INET, SOCK_STREAM, 0);
	NEED(connect(data_fd, (const struct sockaddr *)address, sizeof(*address)) == 0);
	NEED(connect(control_fd, (const struct sockaddr *)address, sizeof(*address)) == 0);
	NEED(pipe(sent) == 0);
	if (strncmp(wait, pinned, sizeof(pinned) - 1) == 0) {
		NEED(setsockopt(control_fd, SOL_SOCKET, SO_TIMESTAMP, &on, sizeof(on)) == 0);
		wait += sizeof(pinned) - 1;
	}
	if (strcmp(wait, "thread") == 0) {
		NEED(pthread_create(&thread, NULL, send_and_rest, &sent[1]) == 0);
		NEED(read(sent[0], answer, 1) == 1);
	} else {
		send_file(strcmp(wait, "set") == 0 ? &set : NULL);
	}
	wait_there(wait, set);
	NEED(recv(control_fd, answer, SMALL + 1, MSG_WAITALL) == SMALL + 1);
	printf("answered\n");
	fflush(stdout);
}

/* ---- the server ---- */
static int read_file(int fd)
{
	static char bytes[65536];
	ssize_t got = 0, n;

	while (got < FILE_SIZE && (n = read(fd, bytes, sizeof(bytes))) > 0)
		got += n;
	printf("%s\n", got == FILE_SIZE ? "whole" : "cut short");
	fflush(stdout);
	return got != FILE_SIZE;
}

static void answer_all(int fd)
{
	char small[SMALL];

	NEED(recv(fd, small, SMALL, MSG_WAITALL) == SMALL);
	if (*small == 'a')
		NEED(send(fd, small, SMALL, 0) == SMALL);
	if (fd == control_fd && *small == 'e')
		data_fd = -data_fd; /* it has told its last */
}

static void serve(const char *reader)
{
	int there = 0, data = data_fd;

	while (data_fd > 0) {
		answer_all(data_fd);
		answer_all(control_fd);
	}
	while (there < FILE_SIZE)
		NEED(ioctl(data, FIONREAD, &there) == 0);
	if (!reader) {
		NEED(pclose(popen("true", "r")) == 0);
		NEED(read_file(data) == 0);
	} else {
		pid_t child = fork();
		int status;
		if (!child) {
			char number[16];
			snprintf(number, sizeof(number), "%d", data);
			execl(reader, "two_connections", number, (char *)NULL);
			NEED(!"exec");
		}
		NEED(waitpid(child, &status, 0) == child && status == 0);
	}
	NEED(send(control_fd, "done", SMALL + 1, 0) == SMALL + 1);
}

int main(int argc, char **argv)
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof(address);

	if (argc == 2)
		return read_file(atoi(argv[1]));
	int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	NEED(bind(listener, (struct sockaddr *)&address, len) == 0 && listen(listener, 2) == 0);
	NEED(getsockname(listener, (struct sockaddr *)&address, &len) == 0);
	pid_t client = fork();
	if (!client) {
		alarm(20);
		ask(&address, argv[2]);
		_exit(0);
	}
	data_fd = accept(listener, NULL, NULL);
	control_fd = accept(listener, NULL, NULL);
	serve(argc > 3 ? argv[3] : NULL);
	int status;
	NEED(waitpid(client, &status, 0) == client && status == 0);
	return 0;
}
