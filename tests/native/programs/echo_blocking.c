/*
 * echo_blocking.c - an echo with a blocking thread a connection that outlives whatever its clients do.
 * Prints "listening PORT". A connection may end by end of file, ECONNRESET or EPIPE; anything else ends the program.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#define BUFFER_LEN (1u << 20)

static void may_end(ssize_t result, const char *call)
{
	if (result < 0 && errno != ECONNRESET && errno != EPIPE) {
		perror(call);
		_exit(1);
	}
}

static void *echo(void *argument)
{
	int fd = (int)(intptr_t)argument;
	/* larger than any segment of the tests: whatever count a peer claims, a reader that believes it leaves the mapping */
	char *bytes = malloc(BUFFER_LEN);
	ssize_t got;

	if (!bytes)
		abort();
	while ((got = recv(fd, bytes, BUFFER_LEN, 0)) > 0)
		for (ssize_t done = 0; done < got;) {
			ssize_t put = send(fd, bytes + done, (size_t)(got - done), MSG_NOSIGNAL);
			if (put < 0) {
				may_end(put, "send");
				goto out;
			}
			done += put;
		}
	may_end(got, "recv");
out:
	free(bytes);
	close(fd);
	return NULL;
}

int main(void)
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof(address);
	int listener = socket(AF_INET, SOCK_STREAM, 0);

	if (listener < 0 || bind(listener, (struct sockaddr *)&address, len) < 0 || listen(listener, 64) < 0 ||
	    getsockname(listener, (struct sockaddr *)&address, &len) < 0) {
		perror("listen");
		return 1;
	}
	printf("listening %u\n", ntohs(address.sin_port));
	fflush(stdout);
	for (;;) {
		pthread_t thread;
		int fd = accept(listener, NULL, NULL);
		if (fd < 0 || pthread_create(&thread, NULL, echo, (void *)(intptr_t)fd) || pthread_detach(thread)) {
			perror("accept");
			return 1;
		}
	}
}
