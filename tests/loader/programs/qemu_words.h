/* qemu_words.h - how options of a socket are asked for word by word: qemu_inside.c asks qemu_outside.c. */
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <sys/socket.h>

#ifndef SO_NETNS_COOKIE
#define SO_NETNS_COOKIE 71
#endif
#define WORDS 0x1000 /* the name of an option, none of TCP's: this, WORDS_MAX times which one, and the word */
#define WORDS_MAX 64
enum { WORDS_COOKIE, WORDS_NETNS, WORDS_INFO };
