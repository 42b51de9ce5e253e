/*
 * program.c - the programs at the two ends of one connection.
 *
 * Each does some operations at random and then sends no more, but reads to the end, waiting in its own way.
 */
#include "program.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/ioctl.h>

#include "channel.h"
#include "operation.h"
#include "provider.h"
#include "relay.h"
#include "scenario.h"

#define NAP (2 * MS)
#define ALONE (10 * MS) /* BRIEF_NS of shim_call.c */
#define NAPS_MAX 10
#define SLEEP_TURNS 100 /* of the clock: who has not come to an end by then may need those that sleep */

struct program programs[ENDS];
uint64_t operations;
uint32_t stimuli, order_one_in;
bool seen[SEEN];

static void program_live(struct program *mine);
static void child_run(struct program *mine);

/* In another program, or as one more holder. False: neither may be. */
static bool goes_on(struct program *mine)
{
	static int travels = 4, gifts = 8; /* that are left */

	if ((stimuli & MAY_GIVE) && choose(2) && gifts-- > 0)
		do_give(mine);
	else if ((stimuli & MAY_TRAVEL) && travels-- > 0)
		do_travel(mine);
	else
		return false;
	return true;
}

/* With a set it makes calls of the shim as before, which its filter forbids: no program does that. */
static bool may_confine(const struct program *mine)
{
	return mine->side->holders > 1 && !mine->epfd;
}

static void rare(struct program *mine)
{
	uint32_t which = choose(12);

	if (!mine->stranger && (seen[SEEN_PROMOTED] || chance(4)) && chance(3) && goes_on(mine))
		return;
	if ((stimuli & MAY_SLEEP) && seen[SEEN_PROMOTED] && chance(6)) {
		do_sleep(mine);
		return;
	}
	if (which < 5 && (stimuli & MAY_ORDER))
		provider_order((int)choose(2), choose(2));
	else if (which == 5 && (stimuli & MAY_SHUT))
		do_shutdown(mine, SHUT_WR);
	else if (which == 6 && (stimuli & MAY_SHUT) && chance(3))
		do_shutdown(mine, choose(2) ? SHUT_RD : SHUT_RDWR);
	else if (which == 7 && (stimuli & MAY_CLOSE) && chance(3))
		(choose(2) ? do_close : choose(2) ? do_exit : do_hidden_close)(mine);
	else if (which == 5 && (stimuli & MAY_LEAVE) && !mine->stranger && choose(2))
		do_nest(mine);
	else if (which == 5 && (stimuli & MAY_LEAVE) && !mine->stranger && seen[SEEN_PROMOTED])
		do_async(mine);
	else if (which == 8 && (stimuli & MAY_ABORT) && chance(4))
		do_abort(mine, choose(2));
	else if (which == 9 && (stimuli & MAY_KILL) && chance(4))
		do_kill(mine);
	else if (which == 11 && (stimuli & MAY_RELAY) && chance(4))
		relay_leave();
	else if (which == 11 && (stimuli & MAY_LOSE) && chance(2))
		provider_dies();
	else if ((which == 6 || seen[SEEN_PROMOTED]) && (stimuli & MAY_FORK) && !mine->stranger && !mine->side->forked &&
	         choose(2))
		do_fork(mine, child_run, (stimuli & MAY_GIVE) && choose(2));
	else if (which == 10 && (stimuli & MAY_PASS) && !mine->stranger && chance(4))
		do_pass(mine);
	else if (which == 10 && (stimuli & MAY_EXEC) && !mine->stranger && chance(4))
		(may_confine(mine) && choose(2) ? do_confine : do_exec)(mine);
	else if (which >= 8 && which < 10 && (stimuli & MAY_SLEEP))
		do_sleep(mine);
	else if (which == 6 && (stimuli & MAY_CLOSE) && seen[SEEN_PROMOTED] && choose(2))
		do_hidden_close(mine);
	else if (which == 6 && (stimuli & MAY_GIVE) && mine->line && !mine->stranger && choose(2))
		do_hand_over(mine);
}

/* ---- reading when told ---- */

/*
 * Whether a reader goes on that has got `n` bytes of `wanted`, and has not been told anew. As nginx does (ngx_unix_recv, with
 * EPOLLRDHUP): a full read is followed by one FIONREAD, and what that has counted is read; so is all up to the end that it
 * was told of. What comes later is to be told by an edge.
 */
static bool reads_on(struct program *mine, ssize_t n, ssize_t wanted)
{
	if (n < 0)
		return false;
	if (mine->until != UNTIL_COUNT)
		return n == wanted || mine->until == UNTIL_NOTHING || mine->ending;
	if (mine->counted >= 0) {
		mine->counted -= (int)n;
		if (mine->counted < 0) /* some have come since, with an edge */
			return false;
	} else if (n == wanted) {
		mine->counted = do_count(mine);
	}
	if (n < wanted)
		mine->counted = 0;
	return mine->counted > 0 || mine->ending;
}

/* What was received, as by do_recv(). */
static ssize_t read_once(struct program *mine, size_t wanted)
{
	ssize_t n = do_recv(mine, wanted, mine->nonblock ? 0 : MSG_DONTWAIT);

	mine->readable = reads_on(mine, n, (ssize_t)wanted);
	return n;
}

/* ---- at random ---- */

/* The other process of its side, if there is one, is not in the midst of a call. */
static bool undisturbed(const struct program *mine)
{
	const struct program *other = &programs[mine->index ^ 2];

	if (mine->side->forked && mine->side->aborted)
		return false;
	return !other->ready || ends[other->index].over || other->between;
}

static void operate(struct program *mine)
{
	const struct side *side = mine->side, *peer = &sides[1 - (mine->index & 1)];
	uint64_t unread = side_sent(peer) > side->received ? side_sent(peer) - side->received : 0;
	/* unless the peer ends by a reset */
	bool comes = unread && !mine->told_end && !side->told_reset && !side->blind &&
	             (!side->forked || programs[mine->index ^ 2].closed);
	int all = choose(8) ? 0 : MSG_WAITALL;
	uint32_t which = choose(12);

	operations++;
	look(mine);
	if (chance(order_one_in))
		provider_order((int)choose(2), choose(3));
	if (mine->lazy ? which < 9 : mine->floods && !choose(3)) {
		if (mine->lazy && !which)
			do_send(mine, 1, true);
		else
			do_nap(mine, mine->lazy ? 0 : POLLOUT);
		return;
	}
	switch (which) {
	case 0:
	case 1:
	case 2: do_send(mine, some_size(), true); break;
	case 3:
	case 4:
	case 5:
		if (mine->until != UNTIL_COUNT)
			do_recv(mine, some_size(), MSG_DONTWAIT | all);
		else if (mine->readable)
			read_once(mine, some_size());
		else
			do_wait(mine, POLLIN, comes && unread >= side->low_water ? -1 : 0);
		break;
	case 6:
		if (comes && unread >= side->low_water && unread <= SIZE_LARGEST)
			do_recv(mine, all ? 1 + choose((uint32_t)unread) : some_size(), all);
		else
			do_recv(mine, some_size(), MSG_DONTWAIT);
		break;
	case 7: do_recv(mine, some_size(), MSG_DONTWAIT | MSG_PEEK | all); break;
	case 8:
		if (undisturbed(mine))
			do_agree(mine);
		break;
	case 9: do_wait(mine, (short)(choose(2) ? POLLIN : POLLIN | POLLOUT), choose(2) ? 0 : (int)choose(30)); break;
	case 10:
		if (choose(8))
			do_count(mine);
		else if (mine->way <= BY_POLL)
			do_dup(mine);
		break;
	default: rare(mine);
	}
}

bool side_no_more(const struct side *side)
{
	for (int i = 0; i < 2; i++)
		if (programs[i].side == side && !programs[i].no_more)
			return false;
	return true;
}

/* ---- to the end ---- */
static void between_calls(struct program *mine)
{
	judge_call_over(mine);
	mine->between = true;
	give_way();
	mine->between = false;
}

static void finish_reading(struct program *mine)
{
	const struct side *side = mine->side, *peer = &sides[1 - (mine->index & 1)];
	size_t left = mine->way == BY_RECV || side->shut_wr ? 0 : (choose(2) ? some_size() : 0);
	bool writable = true;

	for (;;) {
		operations++;
		between_calls(mine);
		if (mine->told_end || (mine->told_reset && (mine->read_fails || !mine->stubborn)) ||
		    (side->shut_rd && side_no_more(peer)))
			break;
		if (!left) {
			mine->no_more = true;
			if (side_no_more(peer) && (side->blind || side->received >= side_sent(peer)) && !peer->shut_wr &&
			    !peer->closing && !peer->killed)
				break;
		}
		if (mine->way == BY_RECV) {
			size_t wanted = some_size(); /* of more than was sent all would wait for each other */
			if (do_recv(mine, wanted, side_sent(peer) >= side->received + wanted && choose(2) ? MSG_WAITALL : 0) == 0)
				break;
			continue;
		}
		if (left && writable) {
			ssize_t n = do_send(mine, left, true);
			if (n < 0 && errno != EAGAIN)
				left = 0;
			writable = n == (ssize_t)left;
			left -= n > 0 ? (size_t)n : 0;
			continue;
		}
		if (mine->readable) {
			if (read_once(mine, some_size()) == 0)
				break;
			continue;
		}
		uint32_t told = do_wait(mine, left ? POLLIN | POLLOUT : POLLIN, -1);
		if (!told)
			fail("end %d: waits for ever, and is told nothing", mine->index);
		writable = told & (POLLOUT | POLLERR | POLLHUP);
	}
	mine->no_more = true;
}

static bool could_read_all(const struct program *mine, size_t len)
{
	return side_sent(&sides[1 - (mine->index & 1)]) >= mine->side->received + len;
}

/* One step of who reads when told. */
static void turn(struct program *mine)
{
	if (mine->readable)
		read_once(mine, 1500);
	else
		do_wait(mine, POLLIN, could_read_all(mine, 1) ? -1 : 0);
}

/* Reads what was sent, and waits to be told of it. */
static void drain(struct program *mine)
{
	while (could_read_all(mine, 1) && !mine->told_end && !mine->told_reset && !mine->side->shut_rd &&
	       !mine->side->forked)
		turn(mine);
}

static void count_only(struct program *mine)
{
	do_count(mine);
}

/* A command of a scenario; none that would need something of a connection that has ended here. */
void program_do(struct program *mine, const char *command)
{
	static const struct {
		const char *name;
		size_t len;
	} sizes[] = {{"byte", 1}, {"send", 3000}, {"big", 20000}, {"more", 700}};
	static const struct {
		const char *name;
		void (*does)(struct program *mine);
	} plain[] = {{"turn", turn},    {"drain", drain},    {"close", do_close},         {"exit", do_exit},
	             {"dup", do_dup},   {"kill", do_kill},   {"count", count_only},       {"async", do_async},
	             {"nest", do_nest}, {"sleep", do_sleep}, {"unseen", do_hidden_close}, {"edges", do_nest_edges}};

	operations++;
	for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++)
		if (strcmp(command, sizes[i].name) == 0) {
			do_send(mine, sizes[i].len, true);
			return;
		}
	for (size_t i = 0; i < sizeof(plain) / sizeof(*plain); i++)
		if (strcmp(command, plain[i].name) == 0) {
			plain[i].does(mine);
			return;
		}
	if (strcmp(command, "nap") == 0)
		do_nap(mine, POLLIN);
	else if (strcmp(command, "recv") == 0)
		while (do_recv(mine, 2000, MSG_DONTWAIT) == 2000)
			;
	else if (strcmp(command, "all") == 0)
		do_recv(mine, SIZE_LARGEST, MSG_DONTWAIT);
	else if (strcmp(command, "some") == 0)
		do_recv(mine, 1000, MSG_DONTWAIT);
	else if (strcmp(command, "block") == 0)
		do_recv(mine, 1000, 0);
	else if (strcmp(command, "peek") == 0)
		do_recv(mine, SIZE_LARGEST, MSG_DONTWAIT | MSG_PEEK);
	else if (strcmp(command, "poll") == 0 && undisturbed(mine))
		do_agree(mine);
	else if (strcmp(command, "wait") == 0)
		do_wait(mine, POLLIN, 0);
	else if (strcmp(command, "both") == 0)
		do_wait(mine, POLLIN | POLLOUT, 0);
	else if (strcmp(command, "room") == 0)
		do_wait(mine, POLLOUT, -1);
	else if (strcmp(command, "shut") == 0)
		do_shutdown(mine, SHUT_WR);
	else if (strcmp(command, "shutrd") == 0)
		do_shutdown(mine, SHUT_RD);
	else if (strcmp(command, "linger") == 0 || strcmp(command, "abort") == 0)
		do_abort(mine, *command == 'l');
	else if (strcmp(command, "first") == 0)
		do_recv(mine, 1, 0);
	else if (strcmp(command, "whole") == 0)
		do_recv(mine, 2000, MSG_WAITALL | (could_read_all(mine, 2000) && !mine->side->forked ? 0 : MSG_DONTWAIT));
	else if (strcmp(command, "water") == 0)
		do_low_water(mine, 400);
	else if (strcmp(command, "fork") == 0 && !mine->side->forked)
		do_fork(mine, child_run, false);
	else if (strcmp(command, "worker") == 0 && !mine->side->forked)
		do_fork(mine, child_run, true);
	else if (strcmp(command, "hand") == 0 && mine->line)
		do_hand_over(mine);
	else if (strcmp(command, "give") == 0 && !mine->stranger)
		do_give(mine);
	else if (strcmp(command, "pass") == 0 && !mine->stranger)
		do_pass(mine);
	else if (strcmp(command, "exec") == 0 && !mine->stranger)
		do_exec(mine);
	else if (strcmp(command, "travel") == 0 && !mine->stranger)
		do_travel(mine);
	else if (strcmp(command, "confine") == 0 && !mine->stranger)
		do_confine(mine);
	else if (!mine->stranger && strcmp(command, "poll") != 0 && strcmp(command, "fork") != 0 &&
	         strcmp(command, "worker") != 0 && strcmp(command, "hand") != 0)
		fail("what is %s?", command);
}

/* A child does some operations of its own, or runs another program. */
static void child_run(struct program *mine)
{
	static const enum way ways[] = {BY_RECV, BY_POLL, BY_LEVEL, BY_EDGE};

	mine->parents_set = mine->way > BY_POLL ? mine->epfd : 0;
	if (!scenario) {
		mine->way = ways[mine->nonblock ? 1 + choose(3) : choose(4)];
		mine->operations = choose(40);
	}
	told_anew(mine);
	if (mine->line && !do_await(mine))
		return;
	if (!scenario && may_confine(mine) && choose(2)) {
		mine->way = choose(2) && !mine->nonblock ? BY_RECV : BY_POLL; /* Reads without a wait would let no time pass. */
		mine->operations = choose(6);
		do_confine(mine);
	}
	if (mine->way > BY_POLL) { /* the parent's set stays open and unused */
		mine->epfd = CALL(mine, int, epoll_create1, (int))(0);
		set_register(mine, EPOLL_CTL_ADD, EPOLLIN | EPOLLOUT | EPOLLRDHUP);
	}
	if (!scenario && chance(6) && (stimuli & MAY_EXEC) && !mine->stranger)
		do_exec(mine);
	if (!scenario && chance(6))
		do_close(mine);
	program_live(mine);
}

static void program_live(struct program *mine)
{
	if (scenario)
		scenario_program(mine, &ends[mine->index]);
	for (uint32_t i = 0; i < mine->operations && mine->fd >= 0; i++) {
		if (mine->side->forked)
			between_calls(mine);
		operate(mine);
	}
	if (mine->line && mine->fd >= 0 && !mine->stranger && choose(2))
		do_hand_over(mine);
	if (mine->line) /* then nobody is to wait for it any more */
		CALL(mine, int, close, (int))(mine->line);
	mine->line = 0;
	if (mine->fd < 0)
		return;
	if (mine->stranger && mine->side->holders > 1 && choose(4)) {
		do_exit(mine);
		return;
	}
	if (mine->floods && choose(4)) {
		/* who leaves something unread is met by a provider's reset */
		if (choose(4))
			while (do_recv(mine, some_size(), MSG_DONTWAIT) > 0)
				;
		if (choose(2))
			do_kill(mine);
		do_abort(mine, choose(2));
		return;
	}
	/* what is below the other's low-water mark is told with the end only */
	bool shut = (choose(2) || sides[0].low_water || sides[1].low_water) && !mine->side->shut_wr;
	if (shut && mine->side->holders == 1) {
		mine->no_more = true;
		do_shutdown(mine, SHUT_WR);
	}
	finish_reading(mine);
	/* others may wait for the end, and it would not come with this close */
	if (mine->side->holders > 1 && side_no_more(mine->side) && !mine->side->shut_wr)
		do_shutdown(mine, SHUT_WR);
	do_close(mine);
}

void program_run(struct end *end)
{
	struct program *mine = &programs[end->index];
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = 1, .sin_addr = {htonl(INADDR_LOOPBACK)}};
	socklen_t len = sizeof(address);

	if (end->index == 0) {
		mine->fd = CALL(mine, int, socket, (int, int, int))(AF_INET, SOCK_STREAM, 0);
		CALL(mine, int, connect, (int, const struct sockaddr *, socklen_t))(mine->fd, (struct sockaddr *)&address, len);
	} else {
		int listener = fd_new(object_new(KIND_LISTENER), 0, end->index, false);
		mine->fd =
			CALL(mine, int, accept, (int, struct sockaddr *, socklen_t *))(listener, (struct sockaddr *)&address, &len);
	}
	if (mine->nonblock)
		CALL(mine, int, fcntl64, (int, int, ...))(mine->fd, F_SETFL, (long)O_NONBLOCK);
	if (mine->way > BY_POLL) {
		mine->epfd = CALL(mine, int, epoll_create1, (int))(0);
		set_register(mine, EPOLL_CTL_ADD, EPOLLIN | EPOLLOUT | EPOLLRDHUP);
	}
	told_anew(mine);
	mine->ready = true;
	if (!scenario && (stimuli & MAY_ANY) && choose(2))
		do_low_water(mine, 1 + (int)choose(500));
	program_live(mine);
}

static bool is_passing(int side)
{
	return programs[side].passing || programs[side + 2].passing;
}

static bool asleep(int side)
{
	return programs[side].asleep || programs[side + 2].asleep;
}

static bool naps(int end)
{
	return ends[end].deadline - now <= (futex_sleeps(end) ? ALONE : NAP);
}

/* Who only naps finds in a moment what there is, or frees the other; see NO_DOORBELL_POLL_NS, LOCK_NAPS. */
static bool somebody_naps(void)
{
	bool found = false;
	int place;

	for (int i = 0; i < ENDS; i++) {
		const struct channel_segment *segment = provider_segment(i & 1, &place);
		if (!ends[i].started || ends[i].over)
			continue;
		if (futex_sleeps(i) && segment && segment->producer[1 - place].tail != provider_slot(i & 1)->rx_head &&
		    segment->consumer[place].asleep == ASLEEP_FUTEX)
			fail("end %d sleeps on a futex, and there are bytes in its ring", i);
		found |= naps(i) && programs[i].naps++ < NAPS_MAX;
	}
	return found;
}

/* Nobody waits for what is there. */
void program_idle(void)
{
	static uint32_t in_vain[ENDS]; /* naps since there was something: those before it were rightly made */
	bool moves_on = false;

	if (somebody_naps())
		return;
	for (int i = 0; i < ENDS; i++) {
		const struct program *mine = &programs[i];
		const struct side *peer = &sides[1 - (i & 1)];
		if (!ends[i].started || ends[i].over || !mine->waits_for || is_passing(1 - (i & 1)))
			continue; /* who passes its socket on waits for a moment itself */
		bool in = (mine->waits_for & POLLIN) && could_read(mine),
			 out = (mine->waits_for & POLLOUT) && could_write(mine);
		/* known: see docs/internals/simulator.md */
		bool recalls = mine->side->passed || mine->side->confined || relay_recalls(1 - (i & 1));
		bool late = recalls && asleep(1 - (i & 1));
		if (!(in || out) || late)
			in_vain[i] = 0;
		else if (!naps(i) || in_vain[i]++ >= NAPS_MAX)
			fail("end %d sleeps, and there is %s (%llu bytes)", i, in ? "something to read" : "room",
			     (unsigned long long)(side_sent(peer) - mine->side->received));
	}
	for (int i = 0; i < ENDS; i++)
		moves_on |= ends[i].started && !ends[i].over && ends[i].deadline < NEVER;
	static uint32_t turns;
	if (moves_on && ++turns % SLEEP_TURNS)
		return;
	for (int i = 0; i < ENDS; i++)
		programs[i].asleep = false;
}

/* A reset has lost bytes from before the ring, and there was more than the provider could carry to its end. */
static bool lost_before_ring(int side)
{
	int place;
	const struct channel_segment *segment = provider_segment(side, &place);
	const struct channel_side *peer = segment ? &segment->side[1 - place] : NULL;

	return peer && peer->tx_switched && !peer->tx_fin && connection[side]->tcp.was_reset &&
	       connection[side]->tcp.received < peer->tx_switch_offset;
}

void programs_check(void)
{
	seen[SEEN_LOST] = provider_relays && (lost_before_ring(0) || lost_before_ring(1));
	for (int i = 0; i < ENDS; i++)
		/* who waits for more than comes, as it counted on a process that was killed since, waits rightly */
		if (ends[i].started && !ends[i].over && !(seen[SEEN_FORKED] && programs[i].waits_for))
			fail("end %d waits for ever", i);
}
