/* loaded.h - what the shim does for the loader, beside the calls that it answers in place of the C library; see loader.h. */
#ifndef SIDESTEP_LOADED_H
#define SIDESTEP_LOADED_H

#include <elf.h>
#include <signal.h>
#include <stdbool.h>

#define LOADED_PROGRAM "SIDESTEP_PROGRAM" /* variable of the loader's environment: the file to start */
#define LOADED_PRELOAD "SIDESTEP_PRELOAD" /* variable of a program whose own loader must not see LD_PRELOAD: the same */

struct loaded {
	/* Executes for a child in our memory, whose descriptors are not ours. Returns -errno. */
	long (*execute_bare)(int directory, const char *path, char *const argv[], char *const env[], int flags);
	void (*inherit_begin)(void); /* called before such a child is made: connections that it inherits go back to TCP */
	bool (*holds)(void); /* true if such a child inherits a connection, or may duplicate one */
	void (*inherit_end)(void); /* called once it has executed, or ended */
	void (*inherit_fd)(int fd); /* the child duplicates it, or lets it be inherited */
	void (*bequeath)(void); /* called before the program is executed without the shim after connections have come */
	void (*release)(void); /* called before a child in our memory is made that its parent does not wait for */
	void (*interrupt)(void); /* a call of this thread that waits is to end, as by a handler without SA_RESTART */
	void (*uncovered)(void); /* code may make calls that do not come by: no more connections leave TCP */
	bool (*preload_without_ours)(char *to, const char *entry);
	bool (*made_by_go)(int fd, const Elf64_Ehdr *header);
	const void *known; /* array by descriptor: a pointer that is not NULL if it is of interest; `known_len` of them */
	uint32_t known_len;
};

/* Action by which the shim installs handlers from now on. */
const struct loaded *sidestep_loaded(int (*action)(int, const struct sigaction *, struct sigaction *));

#endif
