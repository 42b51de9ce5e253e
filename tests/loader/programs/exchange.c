/* An end of a connection on which both send at once; or a process that executes a program in one of several ways.
 *
 * exchange talk [SCRIPT] PORT BYTES  sends a pattern while it reads the same: again and again a little, once stdin has a
 *                                    line that many bytes; says "equal"; ends its half once stdin has ended
 * exchange serve PORT                says "ready", then returns to each client what it sends, until that one's half has ended
 * exchange inetd PORT                the same by a process for each, in which the connection is stdin and stdout
 * exchange fork|vfork|spawn PROGRAM [ARGUMENT]...  ends as that does
 */
#include <arpa/inet.h>
#include <poll.h>
#include <pthread.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define PIECE_MAX 200000
#define LITTLE 3000

extern char **environ;
static size_t total;

static void need(int good, const char *what)
{
	if (!good) {
		perror(what);
		exit(1);
	}
}

static int tcp(const char *port, struct sockaddr_in *at)
{
	int fd = socket(AF_INET, SOCK_STREAM, 0);

	need(fd >= 0, "socket");
	*at = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(port))};
	at->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	return fd;
}

/* The byte at an offset, of which no two pieces of the stream have the same. */
static uint8_t byte_at(size_t offset)
{
	uint64_t word = (offset / 8 + 1) * 0x9e3779b97f4a7c15u;
	return (uint8_t)((word ^ word >> 29) >> 8 * (offset % 8));
}

static size_t piece_len(size_t at, size_t left)
{
	size_t len = 1 + (at * 7919) % PIECE_MAX;
	return len < left ? len : left;
}

static void *send_all(void *socket)
{
	static uint8_t piece[PIECE_MAX];

	for (size_t at = 0, len; at < total; at += len) {
		len = piece_len(at, total - at);
		for (size_t i = 0; i < len; i++)
			piece[i] = byte_at(at + i);
		for (size_t sent = 0; sent < len;) {
			ssize_t n = write(*(int *)socket, piece + sent, len - sent);
			need(n > 0, "write");
			sent += (size_t)n;
		}
	}
	return NULL;
}

static void exchange(int fd, size_t bytes)
{
	static uint8_t piece[PIECE_MAX];
	pthread_t sender;

	total = bytes;
	need(pthread_create(&sender, NULL, send_all, &fd) == 0, "pthread_create");
	for (size_t got = 0; got < total;) {
		ssize_t n = read(fd, piece, piece_len(got, total - got));
		need(n > 0, "read");
		for (ssize_t i = 0; i < n; i++, got++) {
			if (piece[i] != byte_at(got)) {
				fprintf(stderr, "wrong byte at %zu\n", got);
				exit(1);
			}
		}
	}
	pthread_join(sender, NULL);
}

static int talk(const char *port, const char *bytes)
{
	struct pollfd told = {STDIN_FILENO, POLLIN, 0};
	struct sockaddr_in at;
	char piece[64];
	int fd = tcp(port, &at);

	need(connect(fd, (void *)&at, sizeof(at)) == 0, "connect");
	while (poll(&told, 1, 0) == 0)
		exchange(fd, LITTLE);
	need(read(STDIN_FILENO, piece, sizeof(piece)) > 0, "stdin");
	exchange(fd, strtoul(bytes, NULL, 10));
	puts("equal");
	fflush(stdout);
	while (read(STDIN_FILENO, piece, sizeof(piece)) > 0)
		;
	need(shutdown(fd, SHUT_WR) == 0, "shutdown");
	need(read(fd, piece, 1) == 0, "end of the stream");
	return 0;
}

static void echo(int from, int to)
{
	uint8_t *piece = malloc(PIECE_MAX);
	ssize_t n;

	while ((n = read(from, piece, PIECE_MAX)) > 0)
		for (ssize_t sent = 0, more; sent < n; sent += more)
			need((more = write(to, piece + sent, (size_t)(n - sent))) > 0, "write");
	need(n == 0, "read");
	free(piece);
}

static void *answer(void *argument)
{
	int fd = (int)(intptr_t)argument;

	echo(fd, fd);
	close(fd);
	return NULL;
}

static void answer_as_inetd(int fd)
{
	if (fork() == 0) {
		dup2(fd, STDIN_FILENO);
		dup2(fd, STDOUT_FILENO);
		close(fd);
		echo(STDIN_FILENO, STDOUT_FILENO);
		exit(0);
	}
	close(fd);
}

static int serve(const char *port, int inetd)
{
	struct sockaddr_in at;
	int listener = tcp(port, &at), on = 1;

	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
	need(bind(listener, (void *)&at, sizeof(at)) == 0 && listen(listener, 64) == 0, "listen");
	puts("ready");
	fflush(stdout);
	for (int fd; (fd = accept(listener, NULL, NULL)) >= 0;) {
		pthread_t thread;
		if (inetd) {
			answer_as_inetd(fd);
			continue;
		}
		need(pthread_create(&thread, NULL, answer, (void *)(intptr_t)fd) == 0, "pthread_create");
		pthread_detach(thread);
	}
	return 1;
}

static int execute(const char *how, char **argv)
{
	pid_t child;
	int status;

	if (strcmp(how, "spawn") == 0) {
		need(posix_spawnp(&child, argv[0], NULL, NULL, argv, environ) == 0, "posix_spawnp");
	} else {
		child = strcmp(how, "vfork") == 0 ? vfork() : fork();
		if (child == 0) {
			execvp(argv[0], argv);
			_exit(127);
		}
	}
	need(waitpid(child, &status, 0) == child, "waitpid");
	return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

int main(int argc, char **argv)
{
	if (argc > 3 && strcmp(argv[1], "talk") == 0)
		return talk(argv[argc - 2], argv[argc - 1]);
	if (argc == 3 && (strcmp(argv[1], "serve") == 0 || strcmp(argv[1], "inetd") == 0))
		return serve(argv[2], *argv[1] == 'i');
	return argc > 2 ? execute(argv[1], argv + 2) : 2;
}
