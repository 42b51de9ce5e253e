/* A program that others may run with rights of its owner: says whether it does, and talks with itself by TCP. */
#include <arpa/inet.h>
#include <stdio.h>
#include <sys/auxv.h>
#include <sys/socket.h>
#include <unistd.h>

int main(void)
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof(address);
	char byte = 7;
	int listener = socket(AF_INET, SOCK_STREAM, 0), one = socket(AF_INET, SOCK_STREAM, 0);
	if (bind(listener, (struct sockaddr *)&address, len) < 0 || listen(listener, 1) < 0 ||
	    getsockname(listener, (struct sockaddr *)&address, &len) < 0 ||
	    connect(one, (struct sockaddr *)&address, len) < 0)
		return 1;
	int other = accept(listener, NULL, NULL);
	for (int i = 0; i < 50; i++)
		if (send(i % 2 ? one : other, &byte, 1, 0) != 1 || recv(i % 2 ? other : one, &byte, 1, 0) != 1)
			return 1;
	printf("secure %lu, user %u\n", getauxval(AT_SECURE), (unsigned)geteuid());
	return 0;
}
