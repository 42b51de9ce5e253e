/* While threads send and receive, others of the program dup2() the connection to the numbers that they use, which name it
 * already. Prints how many words were received, or what went wrong: on TCP nothing does. */
#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { TIMES = 20000, PIECE = 1024 };
static int ends[2];
static atomic_bool ended;

static void wrong(const char *what)
{
	printf("%s: %s\n", what, strerror(errno));
	exit(1);
}

static void *sends(void *unused)
{
	uint32_t words[PIECE], next = 0;
	(void)unused;
	while (!ended) {
		for (int i = 0; i < PIECE; i++)
			words[i] = next++;
		for (size_t sent = 0; sent < sizeof(words);) {
			ssize_t n = send(ends[0], (char *)words + sent, sizeof(words) - sent, MSG_NOSIGNAL);
			if (n < 0)
				wrong("send");
			sent += (size_t)n;
		}
	}
	shutdown(ends[0], SHUT_WR);
	return NULL;
}

static void *receives(void *unused)
{
	uint32_t words[PIECE], next = 0;
	(void)unused;
	for (;;) {
		ssize_t n = recv(ends[1], words, sizeof(words), MSG_WAITALL);
		if (n == 0)
			break;
		if (n < 0)
			wrong("recv");
		for (int i = 0; i < PIECE; i++)
			if (n != sizeof(words) || words[i] != next++)
				wrong("another word");
	}
	printf("%s\n", next ? "right" : "nothing");
	return NULL;
}

int main(void)
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof(address);
	pthread_t threads[2];
	int listener = socket(AF_INET, SOCK_STREAM, 0);
	ends[0] = socket(AF_INET, SOCK_STREAM, 0);
	if (bind(listener, (struct sockaddr *)&address, len) < 0 || listen(listener, 1) < 0 ||
	    getsockname(listener, (struct sockaddr *)&address, &len) < 0 ||
	    connect(ends[0], (struct sockaddr *)&address, len) < 0)
		wrong("connect");
	ends[1] = accept(listener, NULL, NULL);
	if (pthread_create(&threads[0], NULL, sends, NULL) || pthread_create(&threads[1], NULL, receives, NULL))
		wrong("pthread_create");
	for (int i = 0; i < TIMES; i++) {
		int copy = dup(ends[i % 2]);
		if (copy < 0 || dup2(copy, ends[i % 2]) < 0)
			wrong("dup2");
		close(copy);
		usleep(20); /* else the threads hardly get the number's lock: they are to call in between */
	}
	ended = true;
	pthread_join(threads[0], NULL);
	pthread_join(threads[1], NULL);
	return 0;
}
