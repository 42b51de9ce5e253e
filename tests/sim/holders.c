/*
 * holders.c - how the socket comes to other programs and processes: by exec, by a message, by fork; and how a process ends.
 */
#include "operation.h"

#include <dlfcn.h>
#include <errno.h>
#include <linux/seccomp.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#include "channel.h"
#include "kernel.h"
#include "layout.h"
#include "process.h"
#include "provider.h"
#include "scenario.h"

static struct executing {
	jmp_buf place;
	int list; /* of what travels; -1: there is none */
	char text[12]; /* the same, in the environment of the next program; "": it is not there */
} executing[ENDS];

char *exec_variable(void)
{
	char *text = executing[current_end()].text;

	return *text ? text : NULL;
}

/* What it has not read is in the ring, and was not recalled. */
static bool ring_keeps(int side)
{
	int place;
	const struct channel_segment *segment = provider_segment(side, &place);

	if (!segment || segment->producer[1 - place].tail == segment->consumer[1 - place].head)
		return false;
	const struct channel_side *peer = &segment->side[1 - place];
	return (peer->tx_back & 3) != CHANNEL_RECALLED && (peer->tx_follows & 3) != CHANNEL_RECALLED;
}

/* From now on a program without a shim has the socket. */
static void is_strangers(struct program *mine)
{
	/*
	 * Known: another process of the family goes on with a ring whose bytes cannot be asked for again, as the peer has ended
	 * its direction or sends by TCP behind them. It is not to be reset for an exec of a child that may never read: so a
	 * stranger that does read misses them. So it does those that a read of the other process has taken, and goes on behind.
	 */
	bool ring_read = !programs[mine->index ^ 2].stranger && ring_keeps(mine->index & 1);
	if (mine->side->holders > 1 && (ring_read || mine->side->reading)) {
		mine->side->blind = true;
		mine->side->lost_max = UINT64_MAX;
	}
	mine->stranger = mine->side->passed = true;
	mine->passing = mine->by_signal = false;
	if (mine->way > BY_POLL)
		mine->way = BY_POLL;
}

/* What was sent by sendmsg(2), with the socket; < 0: nothing. */
static ssize_t message_send(struct program *mine, int line)
{
	union {
		struct cmsghdr header;
		char bytes[CMSG_SPACE(sizeof(int))];
	} control = {.header = {.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof(int))}};
	struct iovec iov = {"x", 1};
	struct msghdr message = {
		.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};

	mine->passing = true;
	look(mine);
	memcpy(CMSG_DATA(&control.header), &mine->fd, sizeof(int));
	return CALL(mine, ssize_t, sendmsg, (int, const struct msghdr *, int))(line, &message, MSG_NOSIGNAL);
}

/* To a program without a shim, which the program is from now on. */
void do_pass(struct program *mine)
{
	int line = fd_new(object_new(KIND_LINE), 0, mine->index, true);

	trace("%d: passes the socket on", mine->index);
	if (message_send(mine, line) != 1)
		fail("end %d: sendmsg: %s", mine->index, strerrorname_np(errno));
	int theirs = fd_new(connection[mine->index & 1], 0, mine->index, false);
	object_put(connection[mine->index & 1]); /* the message's */
	if (CALL(mine, int, close, (int))(mine->fd) < 0)
		fail("end %d: close: %s", mine->index, strerrorname_np(errno));
	mine->fd = theirs;
	is_strangers(mine);
}

/* The number under which the socket comes; < 0: it does not. */
static int message_receive(struct program *mine, int line)
{
	union {
		struct cmsghdr header;
		char bytes[CMSG_SPACE(sizeof(int))];
	} control;
	char byte;
	struct iovec iov = {&byte, 1};
	struct msghdr message = {
		.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};
	int fd = -1;

	ssize_t n = CALL(mine, ssize_t, recvmsg, (int, struct msghdr *, int))(line, &message, 0);
	if (n == 1 && message.msg_controllen >= sizeof(control.header))
		memcpy(&fd, CMSG_DATA(&control.header), sizeof(int));
	trace("%d: recvmsg %zd, socket %d", mine->index, n, fd);
	if (n == 1 && (fd < 0 || (message.msg_flags & MSG_CTRUNC)))
		fail("end %d: the socket did not come with the message", mine->index);
	return fd;
}

/* A process with the shim gets it, or is about to. */
static void is_given(struct program *mine, int line)
{
	const bool by_ring = line_passed(line) > 1, promoted = promoted_now(mine);

	mine->passing = false;
	mine->side->passed |= !by_ring;
	seen[SEEN_GIVEN] |= by_ring && promoted;
	seen[SEEN_ASLEEP] |= by_ring && promoted && programs[1 - (mine->index & 1)].asleep;
}

static void set_leave(struct program *mine)
{
	if (mine->way > BY_POLL)
		CALL(mine, int, epoll_ctl, (int, int, int, struct epoll_event *))
	(mine->epfd, EPOLL_CTL_DEL, mine->fd, &(struct epoll_event){0});
}

/* To itself: the message holds it alone meanwhile, or not. */
void do_give(struct program *mine)
{
	bool alone = choose(2);
	int pair[2];

	trace("%d: gives the socket to itself", mine->index);
	CALL(mine, int, socketpair, (int, int, int, int *))(AF_UNIX, SOCK_STREAM, 0, pair);
	if (message_send(mine, pair[0]) != 1)
		fail("end %d: sendmsg: %s", mine->index, strerrorname_np(errno));
	is_given(mine, pair[0]);
	set_leave(mine);
	if (alone)
		CALL(mine, int, close, (int))(mine->fd);
	int fd = message_receive(mine, pair[1]);
	if (!alone)
		CALL(mine, int, close, (int))(mine->fd);
	mine->fd = fd;
	for (int i = 0; i < 2; i++)
		CALL(mine, int, close, (int))(pair[i]);
	if (mine->way > BY_POLL)
		set_register(mine, EPOLL_CTL_ADD, EPOLLIN | EPOLLOUT | EPOLLRDHUP);
	told_anew(mine);
}

/* The message by which a child was to get the socket, if there is one. */
static void message_lost(struct side *side)
{
	if (side->handed)
		side->holders--;
	side->handed = false;
}

/* To its child, which waits for it. */
void do_hand_over(struct program *mine)
{
	trace("%d: gives the socket to its child", mine->index);
	mine->side->holders++; /* the message */
	mine->hands_over = mine->side->handed = true;
	if (message_send(mine, mine->line) == 1)
		is_given(mine, mine->line);
	else
		message_lost(mine->side);
	mine->passing = mine->hands_over = false;
	CALL(mine, int, close, (int))(mine->line);
	mine->line = 0;
}

/* A program that it goes on as, without the shim (`env` names no library). What the shim has left for the one with it. */
static void execute(struct program *mine, char *const env[])
{
	static char *const none[] = {NULL};

	mine->passing = true;
	look(mine);
	if (setjmp(executing[mine->index].place) == 0)
		CALL(mine, int, execve, (const char *, char *const *, char *const *))("/bin/program", none, env);
	fds_close(mine->index, true);
	mine->by_signal = false;
	mine->outer = 0;
}

void do_exec(struct program *mine)
{
	trace("%d: exec", mine->index);
	execute(mine, (char *const[]){NULL});
	is_strangers(mine);
}

/* Puts itself under a filter of the kernel's that lets it read, write and end: its calls are the kernel's from now on. */
void do_confine(struct program *mine)
{
	const bool passed = mine->side->passed || provider_relays; /* there it shuts down unseen, as a stranger does */

	trace("%d: confines itself", mine->index);
	mine->passing = true;
	look(mine);
	if (CALL(mine, int, prctl, (int, ...))(PR_SET_SECCOMP, (long)SECCOMP_MODE_STRICT, 0l, 0l, 0l) < 0)
		fail("end %d: prctl: %s", mine->index, strerrorname_np(errno));
	is_strangers(mine);
	mine->side->passed = passed;
	mine->side->confined = true;
}

/* Of the descriptors that are inherited, a set keeps its connections from travelling. */
static void set_close(struct program *mine)
{
	if (mine->outer)
		CALL(mine, int, close, (int))(mine->outer);
	if (mine->way > BY_POLL)
		CALL(mine, int, close, (int))(mine->epfd);
	mine->outer = 0;
}

/* A program with the shim. Whether connections have come with it. */
static bool execute_again(struct program *mine)
{
	char entry[4096 + 16];
	Dl_info library;

	trace("%d: exec with the shim", mine->index);
	dladdr(dlsym(mine->library, "close"), &library);
	snprintf(entry, sizeof(entry), "LD_PRELOAD=%s", library.dli_fname);
	execute(mine, (char *const[]){entry, NULL});
	const int list = executing[mine->index].list;
	trace("%d: the next program begins, list %d", mine->index, list);
	mine->side->passed |= mine->fd >= 0 && list < 0;
	mine->passing = false;
	process_execute(mine->library);
	return list >= 0;
}

/* The socket goes on in another program. */
void do_travel(struct program *mine)
{
	bool was_promoted = promoted_now(mine);

	if (scenario || choose(8)) {
		set_close(mine);
		if (mine->parents_set)
			CALL(mine, int, close, (int))(mine->parents_set);
		mine->parents_set = 0;
	}
	bool travels = execute_again(mine);
	seen[SEEN_TRAVELLED] |= travels && was_promoted;
	seen[SEEN_ASLEEP] |= travels && was_promoted && programs[1 - (mine->index & 1)].asleep;
	if (mine->way > BY_POLL) {
		mine->epfd = CALL(mine, int, epoll_create1, (int))(0);
		set_register(mine, EPOLL_CTL_ADD, EPOLLIN | EPOLLOUT | EPOLLRDHUP);
	}
	told_anew(mine);
}

void exec_done(char *const env[])
{
	static const char name[] = EXEC_VARIABLE "=";
	struct executing *mine = &executing[current->index];

	mine->list = -1;
	for (; env && *env; env++)
		if (strncmp(*env, name, sizeof(name) - 1) == 0) {
			snprintf(mine->text, sizeof(mine->text), "%s", *env + sizeof(name) - 1);
			mine->list = atoi(mine->text);
		}
	longjmp(mine->place, 1);
}

/* It is no more: what it had of the socket is as the kernel has left it. */
static void is_gone(struct program *mine)
{
	struct side *side = mine->side;

	if (!mine->closed && !mine->awaits)
		side->holders--;
	if ((mine->hands_over && !line_passed(mine->line)) || mine->awaits)
		message_lost(side);
	if (!side->holders) { /* also who dies in the midst of the last close */
		side->killed = true;
		side->left_unread = false;
	}
	mine->no_more = mine->closed = true;
	mine->passing = false;
	kill_end(&ends[mine->index]);
}

void do_kill(struct program *mine)
{
	trace("%d: is killed", mine->index);
	is_gone(mine);
	end_over();
}

void program_dies_at(int end)
{
	struct program *mine = &programs[end];

	trace("%d: dies in the midst", mine->index);
	seen[SEEN_DIED] = true;
	if (mine->reading) {
		mine->side->reading--;
		mine->side->blind = true;
		if (mine->side->lost_max != UINT64_MAX)
			mine->side->lost_max += mine->asks;
	}
	is_gone(mine);
}

void program_dies(void)
{
	if (!programs[current->index].ready)
		return;
	program_dies_at(current->index);
	end_over();
}

/* A child that closes its socket, and waits for one to come with a message; false: none has come. */
bool do_await(struct program *mine)
{
	trace("%d: waits for a socket", mine->index);
	mine->awaits = true;
	if (!--mine->side->holders)
		mine->side->closing = true;
	CALL(mine, int, close, (int))(mine->fd);
	mine->fd = -1;
	if (choose(2)) /* then it is of another family */
		execute_again(mine);
	mine->fd = message_receive(mine, mine->line);
	mine->awaits = false;
	mine->side->handed = false;
	CALL(mine, int, close, (int))(mine->line);
	mine->line = 0;
	mine->no_more = mine->closed = mine->fd < 0;
	return mine->fd >= 0;
}

/* `awaits`: the child is to be given its socket later. */
void do_fork(struct program *mine, void (*child)(struct program *mine), bool awaits)
{
	struct program *theirs = &programs[mine->index + 2];
	int pair[2] = {0};

	if (mine->side->low_water > 1) /* a read that waits for more is of several pieces, with another's in between */
		do_low_water(mine, 1);
	trace("%d: forks %d", mine->index, mine->index + 2);
	*theirs = *mine;
	theirs->index = mine->index + 2;
	theirs->process = 1;
	theirs->by_signal = false;
	theirs->outer = 0;
	if (awaits)
		CALL(mine, int, socketpair, (int, int, int, int *))(AF_UNIX, SOCK_STREAM, 0, pair);
	mine->line = pair[0];
	theirs->line = pair[1];
	mine->side->forked = true;
	mine->side->holders++;
	seen[SEEN_FORKED] = true;
	look(mine);
	mine->ready = false; /* it does not die half forked */
	if (process_fork(mine->library) == 0) {
		if (awaits)
			CALL(theirs, int, close, (int))(pair[0]);
		child(theirs); /* never to return: these frames are the parent's as well */
		end_over();
	}
	if (awaits)
		CALL(mine, int, close, (int))(pair[1]);
	mine->ready = true;
}
