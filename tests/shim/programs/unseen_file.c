/*
 * A connection is closed, and a file opened, by system calls that no hook sees. Writes to the file's number, so many times as the
 * argument says, and prints how many bytes the file has, and whether its end and its beginning are what is read.
 */
#include <fcntl.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MESSAGES = 3000 };

#define NEED(condition) ((condition) ? (void)0 : (perror(#condition), exit(1)))

static long unseen(long number, long a, long b, long c, long d)
{
#if defined(__x86_64__)
	register long fourth __asm__("r10") = d;
	__asm__ volatile("syscall" : "+a"(number) : "D"(a), "S"(b), "d"(c), "r"(fourth) : "rcx", "r11", "memory");
	return number;
#else
	register long first __asm__("x0") = a, second __asm__("x1") = b, third __asm__("x2") = c, fourth __asm__("x3") = d;
	register long call __asm__("x8") = number;
	__asm__ volatile("svc 0" : "+r"(first) : "r"(second), "r"(third), "r"(fourth), "r"(call) : "memory");
	return first;
#endif
}

int unseen_close(int fd);

/* For who loads this as a library. */
int unseen_close(int fd)
{
	return (int)unseen(SYS_close, fd, 0, 0, 0);
}

int main(int argc, char **argv)
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof(address);
	int listener = socket(AF_INET, SOCK_STREAM, 0), other = socket(AF_INET, SOCK_STREAM, 0);
	struct stat st;
	char byte;

	NEED(argc == 3 && bind(listener, (struct sockaddr *)&address, len) == 0 && listen(listener, 1) == 0);
	NEED(getsockname(listener, (struct sockaddr *)&address, &len) == 0);
	NEED(connect(other, (struct sockaddr *)&address, len) == 0);
	int fd = accept(listener, NULL, NULL);
	for (int i = 0; i < MESSAGES; i++) {
		NEED(send(fd, "x", 1, 0) == 1 && recv(other, &byte, 1, 0) == 1);
		NEED(send(other, "x", 1, 0) == 1 && recv(fd, &byte, 1, 0) == 1);
	}
	NEED(unseen(SYS_close, fd, 0, 0, 0) == 0);
	NEED(unseen(SYS_openat, AT_FDCWD, (long)argv[2], O_RDWR | O_CREAT | O_TRUNC, 0600) == fd);
	int times = atoi(argv[1]);
	for (int i = 0; i < times; i++)
		NEED(write(fd, "f", 1) == 1);
	NEED(fstat(fd, &st) == 0);
	printf("%ld\n", (long)st.st_size);
	return 0;
}
