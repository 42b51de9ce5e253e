/* A program that goes on with a connection by its number: stranger FD RECEIVED LEN SENT LEN. It reads LEN bytes of the peer's
 * pattern from offset RECEIVED on, and sends LEN bytes of its own from offset SENT on. Ends with 0 if all were right.
 * First it prints whether it runs with the rights of another, so that nothing is preloaded into it. */
#include "../../support/pattern.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/auxv.h>
#include <sys/socket.h>

enum { KEY_IN = 0x77, KEY_OUT = 0x11, PIECE = 5000 };

int main(int argc, char **argv)
{
	static uint8_t data[PIECE];
	if (argc != 6)
		return 2;
	printf("%lu\n", getauxval(AT_SECURE));
	fflush(stdout);
	int fd = atoi(argv[1]);
	uint64_t in = strtoull(argv[2], NULL, 10), in_end = in + strtoull(argv[3], NULL, 10);
	uint64_t out = strtoull(argv[4], NULL, 10), out_end = out + strtoull(argv[5], NULL, 10);
	while (in < in_end) {
		ssize_t got = recv(fd, data, in_end - in < PIECE ? in_end - in : PIECE, 0);
		if (got <= 0 || !check_pattern(KEY_IN, in, data, (size_t)got)) {
			fprintf(stderr, "stranger: recv = %zd after byte %llu\n", got, (unsigned long long)in);
			return 3;
		}
		in += (uint64_t)got;
	}
	while (out < out_end) {
		size_t len = out_end - out < PIECE ? out_end - out : PIECE;
		fill_pattern(KEY_OUT, out, data, len);
		ssize_t wrote = send(fd, data, len, MSG_NOSIGNAL);
		if (wrote <= 0)
			return 4;
		out += (uint64_t)wrote;
	}
	return 0;
}
