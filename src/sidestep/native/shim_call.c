/*
 * shim_call.c - what a receive and a send have in common.
 */
#include "shim_call.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>

size_t iov_total(const struct iovec *iov, int iov_len)
{
	size_t total = 0;

	for (int i = 0; i < iov_len; i++)
		total += iov[i].iov_len;
	return total;
}

int64_t timeval_ns(const struct timeval *limit)
{
	return limit->tv_sec > 9000000000ll ? INT64_MAX : limit->tv_sec * 1000000000ll + limit->tv_usec * 1000ll;
}

bool would_not_block(int fd, int flags)
{
	return (flags & MSG_DONTWAIT) || (real.fcntl64(fd, F_GETFL, 0) & O_NONBLOCK);
}

/*
 * What is left of an iovec array from byte `skip` on, `most` bytes of it; at most 64 pieces, which is a short read or write
 * and allowed.
 */
int iov_from(const struct iovec *iov, int iov_len, size_t skip, size_t most, struct iovec out[64])
{
	int n = 0;

	for (int i = 0; i < iov_len && n < 64 && most; i++) {
		if (skip >= iov[i].iov_len) {
			skip -= iov[i].iov_len;
			continue;
		}
		size_t len = iov[i].iov_len - skip < most ? iov[i].iov_len - skip : most;
		out[n++] = (struct iovec){(uint8_t *)iov[i].iov_base + skip, len};
		most -= len;
		skip = 0;
	}
	return n;
}

/* What the kernel would refuse. A bad pointer beyond the first page faults here, where the kernel says EFAULT. */
bool iov_refused(const struct iovec *iov, int iov_len, int flags)
{
	if (iov_len < 0 || iov_len > IOV_MAX) {
		errno = EINVAL;
		return true;
	}
	if (iov_len && (uintptr_t)iov < 4096) {
		errno = EFAULT;
		return true;
	}
	for (int i = 0; i < iov_len; i++) {
		if ((ssize_t)iov[i].iov_len < 0) {
			errno = EINVAL;
			return true;
		}
		if (iov[i].iov_len && (uintptr_t)iov[i].iov_base < 4096 && !(flags & MSG_TRUNC)) {
			errno = EFAULT;
			return true;
		}
	}
	return false;
}
