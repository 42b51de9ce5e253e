/*
 * Echoes one connection; from some message on, what goes back is written by a plug-in that was opened with RTLD_DEEPBIND, or by
 * write() of the C library's own handle. Arguments: the plug-in's path, or the C library's name. Prints its port.
 */
#include <dlfcn.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { ALONE = 2000 }; /* messages that the host answers itself */

int main(int argc, char **argv)
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof(address);
	int listener = socket(AF_INET, SOCK_STREAM, 0);
	char buf[4096];
	ssize_t n;

	if (argc != 2 || bind(listener, (struct sockaddr *)&address, len) < 0 || listen(listener, 1) < 0 ||
	    getsockname(listener, (struct sockaddr *)&address, &len) < 0)
		return 2;
	void *handle = dlopen(argv[1], RTLD_NOW | RTLD_DEEPBIND);
	int (*plug_in)(int, const char *, size_t) = handle ? dlsym(handle, "plug_in_write") : NULL;
	ssize_t (*direct)(int, const void *, size_t) = handle ? dlsym(handle, "write") : NULL;
	if (!plug_in && !direct)
		return 3;
	printf("%d\n", ntohs(address.sin_port));
	fflush(stdout);
	int one = accept(listener, NULL, NULL);
	for (int turn = 0; (n = read(one, buf, sizeof(buf))) > 0; turn++) {
		ssize_t put = n;
		if (turn < ALONE)
			put = write(one, buf, (size_t)n);
		else if (plug_in)
			put = plug_in(one, buf, (size_t)n) < 0 ? -1 : n;
		else
			put = direct(one, buf, (size_t)n);
		if (put != n)
			return 4;
	}
	return n < 0;
}
