#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
static long call(long n, long a, long b, long c) { long r; __asm__ volatile("syscall" : "=a"(r) : "a"(n), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory"); return r; }
int main(int argc, char **argv)
{
	int fd = atoi(argv[2]); long got = 0; char b[4096];
	while (got < 1000) {
		struct pollfd p = {fd, POLLIN};
		if (call(SYS_poll, (long)&p, 1, 3000) != 1) { printf("raw: HANG after %ld\n", got); return 1; }
		long n = call(SYS_read, fd, (long)b, sizeof b);
		if (n <= 0) { printf("raw: %ld after %ld\n", n, got); return 1; }
		got += n;
	}
	printf("raw: whole\n");
	call(SYS_write, fd, (long)"ok", 2);
}
