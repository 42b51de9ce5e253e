/* A library that comes after the shim, with socket calls of its own; and one that takes thread-local memory. */
#include <sys/socket.h>

long late_send(int fd, const void *data, long len)
{
	return send(fd, data, (size_t)len, 0);
}

long late_recv(int fd, void *data, long len)
{
	return recv(fd, data, (size_t)len, 0);
}

#ifdef HOG
__thread char hog[1500] __attribute__((tls_model("initial-exec")));

char *late_hog(void)
{
	return hog;
}
#endif
