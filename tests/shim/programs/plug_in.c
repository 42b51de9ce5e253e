/* A plug-in that writes to a connection of its host's. */
#include <unistd.h>

int plug_in_write(int fd, const char *from, size_t len);

int plug_in_write(int fd, const char *from, size_t len)
{
	while (len) {
		ssize_t n = write(fd, from, len);
		if (n <= 0)
			return -1;
		from += n;
		len -= (size_t)n;
	}
	return 0;
}
