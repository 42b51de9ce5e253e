/*
 * qemu_inside.c - what qemu-user 7.2 lacks that promotion needs, preloaded behind the shim: options of sockets that are no int, with
 * the help of qemu_outside.c, and preadv2(2), which rings doorbells: of these a plain read does not wait, either.
 */
#include "qemu_words.h"

#include <errno.h>
#include <stdarg.h>
#include <string.h>
#include <sys/syscall.h>

static long call(long number, const long arguments[6])
{
	register long x8 __asm__("x8") = number == SYS_preadv2 ? SYS_readv : number;
	register long x0 __asm__("x0") = arguments[0], x1 __asm__("x1") = arguments[1], x2 __asm__("x2") = arguments[2];
	register long x3 __asm__("x3") = arguments[3], x4 __asm__("x4") = arguments[4], x5 __asm__("x5") = arguments[5];

	__asm__ volatile("svc #0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
	if ((unsigned long)x0 <= -4096ul)
		return x0;
	errno = (int)-x0;
	return -1;
}

long syscall(long number, ...)
{
	long arguments[6];
	va_list list;

	va_start(list, number);
	for (int i = 0; i < 6; i++)
		arguments[i] = va_arg(list, long);
	va_end(list);
	return call(number, arguments);
}

static int option_get(int fd, int level, int name, void *value, socklen_t *len)
{
	return (int)call(SYS_getsockopt, (const long[6]){fd, level, name, (long)value, (long)len});
}

int getsockopt(int fd, int level, int name, void *value, socklen_t *len)
{
	const int option = level == IPPROTO_TCP && name == TCP_INFO         ? WORDS_INFO
	                   : level == SOL_SOCKET && name == SO_COOKIE       ? WORDS_COOKIE
	                   : level == SOL_SOCKET && name == SO_NETNS_COOKIE ? WORDS_NETNS
	                                                                    : -1;
	uint32_t word;
	socklen_t size = sizeof(word);

	if (option < 0)
		return option_get(fd, level, name, value, len);
	for (socklen_t at = 0; at < *len; at += size) {
		if (option_get(fd, IPPROTO_TCP, WORDS + option * WORDS_MAX + (int)(at / 4), &word, &size) < 0)
			return -1;
		memcpy((char *)value + at, &word, *len - at < size ? *len - at : size);
	}
	return 0;
}
