/*
 * qemu_outside.c - preloaded into qemu-user, which takes each option of a TCP socket for an int: gives qemu_inside.c, which is
 * preloaded into the program that it emulates, longer ones word by word.
 */
#include "qemu_words.h"

#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static __thread uint32_t
	words[WORDS_MAX]; /* of the option whose first word was asked for last, so that they are of one time */

static const struct {
	int level, name;
} options[] = {{SOL_SOCKET, SO_COOKIE}, {SOL_SOCKET, SO_NETNS_COOKIE}, {IPPROTO_TCP, TCP_INFO}};

int getsockopt(int fd, int level, int name, void *value, socklen_t *len)
{
	if (level != IPPROTO_TCP || name < WORDS || (name - WORDS) / WORDS_MAX >= (int)(sizeof(options) / sizeof(*options)))
		return (int)syscall(SYS_getsockopt, fd, level, name, value, len);
	const int option = (name - WORDS) / WORDS_MAX, word = (name - WORDS) % WORDS_MAX;
	socklen_t size = option == WORDS_INFO ? sizeof(words) : sizeof(uint64_t);
	if (!word && syscall(SYS_getsockopt, fd, options[option].level, options[option].name, words, &size) < 0)
		return -1;
	memcpy(value, &words[word], sizeof(*words));
	return 0;
}
