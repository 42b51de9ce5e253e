/* Preloaded behind the shim: a number is free for others long before the thread that closed it goes on. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>

int close(int fd);

int close(int fd)
{
	int (*next)(int) = (int (*)(int))dlsym(RTLD_NEXT, "close");
	int result = next(fd);

	usleep(500); /* no wait for something: the window in which another thread gets the number, made wide */
	return result;
}
