/*
 * stranger_child.c - a server whose child gives up its privileges, falls into other hands, and writes into what it shares.
 *
 * A connection with itself is talked on by `talk` on standard input, answered "talked". Then ATTACK, one of those below: a
 * child closes its copies of all sockets, changes its user where it may, and writes into the arena. After that the old
 * connection is used once, which is told as "old RESULT", and a new one must carry bytes: "new 0".
 */
#define _GNU_SOURCE
#include "layout.h"

#include <arpa/inet.h>
#include <errno.h>
#include <grp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define BULK_LEN (8u << 20) /* larger than any segment of the tests */
#define STRANGER 65534

static int listener;

static void check(int good, const char *what)
{
	if (good)
		return;
	perror(what);
	_exit(1);
}

static void say(const char *what, long number)
{
	printf("%s %ld\n", what, number);
	fflush(stdout);
}

static void pair(int ends[2])
{
	struct sockaddr_in address;
	socklen_t len = sizeof(address);

	ends[0] = socket(AF_INET, SOCK_STREAM, 0);
	check(getsockname(listener, (struct sockaddr *)&address, &len) == 0, "getsockname");
	check(connect(ends[0], (struct sockaddr *)&address, len) == 0, "connect");
	ends[1] = accept(listener, NULL, NULL);
	check(ends[1] >= 0, "accept");
}

static void talk(const int ends[2])
{
	for (int turn = 0; turn < 100; turn++) {
		char sent[64], got[64];
		memset(sent, turn, sizeof(sent));
		check(send(ends[turn % 2], sent, sizeof(sent), 0) == sizeof(sent), "send");
		check(recv(ends[1 - turn % 2], got, sizeof(got), MSG_WAITALL) == sizeof(got), "recv");
		check(memcmp(sent, got, sizeof(sent)) == 0, "other bytes");
	}
}

static uint8_t *arena(void)
{
	FILE *maps = fopen("/proc/self/maps", "r");
	char line[512];
	unsigned long at = 0;

	check(maps != NULL, "maps");
	while (!at && fgets(line, sizeof(line), maps))
		if (strstr(line, "sidestep-arena"))
			at = strtoul(line, NULL, 16);
	fclose(maps);
	check(at != 0, "no arena");
	return (uint8_t *)at;
}

static void attack(const char *how)
{
	struct arena_header *header = (struct arena_header *)arena();
	struct conn_slot *slots = (struct conn_slot *)((uint8_t *)header + ARENA_SLOTS_OFFSET);
	uint32_t used = header->slots_used;

	if (strcmp(how, "list") == 0) {
		header->free_head = UINT32_MAX;
	} else if (strcmp(how, "noise") == 0) {
		srandom(1);
		for (size_t i = 0; i < used * sizeof(*slots) / 4; i++)
			((uint32_t *)slots)[i] = (uint32_t)random();
		header->free_head = (uint64_t)random();
		header->slots_used = UINT32_MAX;
	}
	for (uint32_t i = 0; i < used; i++) {
		if (strcmp(how, "lock") == 0)
			slots[i].rx_lock = slots[i].tx_lock = 1; /* a process that lives as long as the machine is up */
		else if (strcmp(how, "tail") == 0)
			slots[i].tx_tail -= 2 * BULK_LEN; /* behind its head: more room than the ring has */
		else if (strcmp(how, "head") == 0)
			slots[i].rx_head -= 3 * BULK_LEN; /* so far behind its tail: more bytes than there is memory for */
	}
}

int main(void)
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	char line[64], *bulk = calloc(1, BULK_LEN);
	int ends[2], newer[2], status;

	listener = socket(AF_INET, SOCK_STREAM, 0);
	check(bulk && bind(listener, (struct sockaddr *)&address, sizeof(address)) == 0 && listen(listener, 8) == 0,
	      "listen");
	pair(ends);
	for (;;) {
		check(fgets(line, sizeof(line), stdin) != NULL, "stdin");
		line[strcspn(line, "\n")] = '\0';
		if (strcmp(line, "talk"))
			break;
		talk(ends);
		say("talked", 0);
	}
	pid_t child = fork();
	if (child == 0) {
		close(ends[0]);
		close(ends[1]);
		close(listener);
		if (geteuid() == 0)
			check(setgroups(0, NULL) == 0 && setresgid(STRANGER, STRANGER, STRANGER) == 0 &&
			          setresuid(STRANGER, STRANGER, STRANGER) == 0,
			      "setresuid");
		prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
		attack(line);
		_exit(0);
	}
	check(waitpid(child, &status, 0) == child && status == 0, "child");
	ssize_t done = strcmp(line, "head") ? send(ends[0], bulk, BULK_LEN, MSG_DONTWAIT | MSG_NOSIGNAL)
	                                    : recv(ends[0], bulk, BULK_LEN, MSG_DONTWAIT);
	say("old", done < 0 ? -errno : done);
	pair(newer);
	talk(newer);
	say("new", 0);
	return 0;
}
