/*
 * A server sends back what it receives, by functions that are asked of the C library alone once its connection is promoted; and a
 * client that compares. past_names HOW PLUGIN: prints "whole". HOW: "deep", a plug-in that is opened with RTLD_DEEPBIND; "handle"
 * and "version", dlsym() and dlvsym() with a handle of the C library. -DPLUGIN makes the plug-in.
 */
#include <dlfcn.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#ifdef PLUGIN

ssize_t plugin_send(int fd, const void *from, size_t len, int flags);
ssize_t plugin_recv(int fd, void *to, size_t len, int flags);
int plugin_close(int fd);

ssize_t plugin_send(int fd, const void *from, size_t len, int flags)
{
	return send(fd, from, len, flags);
}

ssize_t plugin_recv(int fd, void *to, size_t len, int flags)
{
	return recv(fd, to, len, flags);
}

int plugin_close(int fd)
{
	return close(fd);
}

#else

enum { ROUNDS = 2000, ORDINARY = 500, SIZE = 64 };

#define NEED(condition) ((condition) ? (void)0 : need_failed(__LINE__, #condition))

static void need_failed(int line, const char *what)
{
	printf("line %d: %s (%s)\n", line, what, strerror(errno));
	fflush(stdout);
	_exit(1);
}

static void *find(const char *how, const char *plugin, const char *name)
{
	char own[64];
	void *handle =
		strcmp(how, "deep") == 0 ? dlopen(plugin, RTLD_LAZY | RTLD_DEEPBIND) : dlopen("libc.so.6", RTLD_LAZY);

	NEED(handle);
	snprintf(own, sizeof(own), "plugin_%s", name);
	if (strcmp(how, "version") != 0)
		return dlsym(handle, strcmp(how, "deep") == 0 ? own : name);
	void *found = dlvsym(handle, name, "GLIBC_2.2.5");
	return found ? found : dlvsym(handle, name, "GLIBC_2.17"); /* the first of aarch64 */
}

static void serve(int listener, const char *how, const char *plugin)
{
	ssize_t (*sends)(int, const void *, size_t, int) = NULL, (*receives)(int, void *, size_t, int) = NULL;
	int (*closes)(int) = (int (*)(int))find(how, plugin, "close");
	char bytes[SIZE];
	int fd = accept(listener, NULL, NULL);

	for (int i = 0; i < ORDINARY; i++)
		NEED(recv(fd, bytes, SIZE, MSG_WAITALL) == SIZE && send(fd, bytes, SIZE, 0) == SIZE);
	sends = (ssize_t(*)(int, const void *, size_t, int))find(how, plugin, "send");
	receives = (ssize_t(*)(int, void *, size_t, int))find(how, plugin, "recv");
	NEED(sends && receives && closes);
	for (int i = ORDINARY; i < ROUNDS; i++)
		if (i % 3)
			NEED(receives(fd, bytes, SIZE, MSG_WAITALL) == SIZE && sends(fd, bytes, SIZE, 0) == SIZE);
		else
			NEED(recv(fd, bytes, SIZE, MSG_WAITALL) == SIZE && sends(fd, bytes, SIZE, 0) == SIZE);
	NEED(closes(fd) == 0);
}

int main(int argc, char **argv)
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof(address);
	int listener = socket(AF_INET, SOCK_STREAM, 0), status;
	char sent[SIZE], back[SIZE];

	NEED(argc == 3 && bind(listener, (struct sockaddr *)&address, len) == 0 && listen(listener, 1) == 0);
	NEED(getsockname(listener, (struct sockaddr *)&address, &len) == 0);
	pid_t server = fork();
	if (server == 0) {
		alarm(60);
		serve(listener, argv[1], argv[2]);
		_exit(0);
	}
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	NEED(connect(fd, (struct sockaddr *)&address, len) == 0);
	for (int i = 0; i < ROUNDS; i++) {
		memset(sent, i, sizeof(sent));
		NEED(send(fd, sent, sizeof(sent), 0) == SIZE);
		NEED(recv(fd, back, sizeof(back), MSG_WAITALL) == SIZE && memcmp(sent, back, SIZE) == 0);
	}
	NEED(recv(fd, back, 1, 0) == 0);
	NEED(close(fd) == 0);
	NEED(waitpid(server, &status, 0) == server && status == 0);
	printf("whole\n");
	return 0;
}

#endif
