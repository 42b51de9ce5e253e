/* How a stream ends: shutdown, close, reset, death. */
#include "scene.h"

static uint8_t data[1 << 20];

static void say_state(const char *name, struct pair *pair)
{
	struct pollfd item = {.fd = pair->fd, .events = POLLIN | POLLOUT | POLLRDHUP | POLLPRI};
	int ready = poll(&item, 1, 0);
	say_poll(name, ready, item.revents);
}

static void ignore_sigpipe(void)
{
	signal(SIGPIPE, SIG_IGN);
}

static void eof(void)
{
	struct pair *pair = open_pair();
	ignore_sigpipe();
	say_state("before", pair);
	peer_put(pair, 100);
	arrived(pair, 100);
	say_state("data", pair);
	peer(pair, ACT_CLOSE, 0, 0);
	await_fin(pair);
	say_state("data and end", pair);
	say_bytes("recv", pair, data, recv(pair->fd, data, 60, 0));
	say_state("some data and end", pair);
	say_bytes("recv", pair, data, recv(pair->fd, data, 60, 0));
	for (int i = 0; i < 3; i++)
		say_ret("recv at the end", recv(pair->fd, data, 60, 0));
	say_ret("recv DONTWAIT at the end", recv(pair->fd, data, 60, MSG_DONTWAIT));
	say_ret("read at the end", read(pair->fd, data, 60));
	say_state("end", pair);
	say_ret("first send after the peer closed", send(pair->fd, pattern_out(pair, 10), 10, 0));
	await_reset(pair);
	say_state("reset", pair);
	say_ret("second send", send(pair->fd, pattern_out(pair, 10), 10, 0));
	say_ret("third send", send(pair->fd, pattern_out(pair, 10), 10, 0));
	say_ret("recv", recv(pair->fd, data, 60, 0));
	say_state("after", pair);
}

static void eof_recv_first(void)
{
	/* As above, but a read meets the reset first. */
	struct pair *pair = open_pair();
	ignore_sigpipe();
	peer(pair, ACT_CLOSE, 0, 0);
	await_fin(pair);
	say_ret("recv at the end", recv(pair->fd, data, 60, 0));
	say_ret("send", send(pair->fd, pattern_out(pair, 10), 10, 0));
	await_reset(pair);
	say_ret("recv", recv(pair->fd, data, 60, 0));
	say_ret("recv", recv(pair->fd, data, 60, 0));
	say_ret("send", send(pair->fd, pattern_out(pair, 10), 10, 0));
}

static void eof_so_error(void)
{
	struct pair *pair = open_pair();
	int value = -1;
	socklen_t len = sizeof value;
	ignore_sigpipe();
	peer(pair, ACT_ABORT, 0, 0);
	await_reset(pair);
	say_state("reset", pair);
	NEED(getsockopt(pair->fd, SOL_SOCKET, SO_ERROR, &value, &len) == 0);
	say("SO_ERROR %s", strerrorname_np(value));
	NEED(getsockopt(pair->fd, SOL_SOCKET, SO_ERROR, &value, &len) == 0);
	say("SO_ERROR again %d", value);
	say_state("after", pair);
	say_ret("recv", recv(pair->fd, data, 60, 0));
	say_ret("send", send(pair->fd, data, 60, 0));
}

static void eof_blocked(void)
{
	struct pair *pair = open_pair();
	peer_when_asleep(pair, ACT_CLOSE, 0, 0);
	say_ret("blocked recv", recv(pair->fd, data, 60, 0));
	peer_done();
}

static void eof_blocked_poll(void)
{
	struct pair *pair = open_pair();
	struct pollfd item = {.fd = pair->fd, .events = POLLIN};
	peer_when_asleep(pair, ACT_SHUTDOWN, SHUT_WR, 0);
	int ready = poll(&item, 1, 5000);
	say_poll("blocked poll", ready, item.revents);
	peer_done();
	item.events = POLLRDHUP;
	ready = poll(&item, 1, 0);
	say_poll("poll RDHUP", ready, item.revents);
	item.events = 0;
	ready = poll(&item, 1, 0);
	say_poll("poll nothing", ready, item.revents);
}

static void shutdown_write(void)
{
	struct pair *pair = open_pair();
	ignore_sigpipe();
	put(pair, 100);
	say_ret("shutdown WR", shutdown(pair->fd, SHUT_WR));
	say_state("after", pair);
	say_ret("send", send(pair->fd, data, 1, 0));
	say_reply("the peer drains", peer(pair, ACT_DRAIN, 0, 0));
	say_reply("the peer at the end", peer(pair, ACT_RECV_ONCE, 10, 0));
	peer_now(pair, ACT_SEND, 1 << 20, 0);
	get(pair, 1 << 20);
	say_reply("the other way", peer_done());
	say_ret("shutdown WR again", shutdown(pair->fd, SHUT_WR));
	peer(pair, ACT_SHUTDOWN, SHUT_WR, 0);
	await_fin(pair);
	say_ret("recv at the end", recv(pair->fd, data, 1, 0));
	say_state("both", pair);
	say_ret("shutdown RD", shutdown(pair->fd, SHUT_RD));
	say_ret("shutdown RDWR", shutdown(pair->fd, SHUT_RDWR));
}

static void half_close_by_peer(void)
{
	struct pair *pair = open_pair();
	peer_put(pair, 50);
	peer(pair, ACT_SHUTDOWN, SHUT_WR, 0);
	say("%ld bytes to the end", get_all(pair));
	peer_now(pair, ACT_DRAIN, 0, 0);
	put(pair, 1 << 20);
	NEED(shutdown(pair->fd, SHUT_WR) == 0);
	say_reply("the other way", peer_done());
	say_ret("close", close(pair->fd));
}

static void shutdown_read(void)
{
	struct pair *pair = open_pair();
	peer_put(pair, 30);
	arrived(pair, 30);
	say_ret("shutdown RD", shutdown(pair->fd, SHUT_RD));
	say_state("after", pair);
	say_bytes("recv what had come", pair, data, recv(pair->fd, data, 20, 0));
	say_bytes("recv what had come", pair, data, recv(pair->fd, data, 20, 0));
	say_ret("recv then", recv(pair->fd, data, 20, 0));
	say_reply("the peer sends on", peer(pair, ACT_SEND, 10, 0));
	arrived(pair, 10);
	say_bytes("recv what came later", pair, data, recv(pair->fd, data, 20, 0));
	say_ret("recv then", recv(pair->fd, data, 20, 0));
	put(pair, 100);
	peer_get(pair, 100);
	say_reply("the peer's poll", peer(pair, ACT_POLL, POLLIN | POLLOUT | POLLRDHUP, 0));
}

static void shutdown_read_of_a_quiet_peer(void)
{
	struct pair *pair = open_pair();
	put(pair, 100);
	peer_get(pair, 100);
	say_ret("shutdown RD", shutdown(pair->fd, SHUT_RD));
	say_ret("recv", recv(pair->fd, data, 20, 0));
	say_ret("recv again", recv(pair->fd, data, 20, 0));
	put(pair, 100);
	peer_get(pair, 100);
	say_reply("the peer's poll", peer(pair, ACT_POLL, POLLIN | POLLOUT | POLLRDHUP, 0));
	peer_put(pair, 10);
	arrived(pair, 10);
	say_bytes("recv what came later", pair, data, recv(pair->fd, data, 20, 0));
	put(pair, 100);
	peer_get(pair, 100);
	say_ret("close", close(pair->fd));
	say_reply("the peer at the end", peer(pair, ACT_RECV_ONCE, 10, 0));
}

static void shutdown_both(void)
{
	struct pair *pair = open_pair();
	ignore_sigpipe();
	put(pair, 10);
	say_ret("shutdown RDWR", shutdown(pair->fd, SHUT_RDWR));
	say_state("after", pair);
	say_ret("recv", recv(pair->fd, data, 10, 0));
	say_ret("send", send(pair->fd, data, 10, 0));
	say_reply("the peer drains", peer(pair, ACT_DRAIN, 0, 0));
	say_reply("the peer's poll", peer(pair, ACT_POLL, POLLIN | POLLOUT | POLLRDHUP, 0));
	say_reply("the peer closes", peer(pair, ACT_CLOSE, 0, 0));
	say_ret("close", close(pair->fd));
}

static void data_after_shutdown_both(void)
{
	struct pair *pair = open_pair();
	ignore_sigpipe();
	peer_put(pair, 20);
	arrived(pair, 20);
	say_ret("shutdown RD", shutdown(pair->fd, SHUT_RD));
	peer_put(pair, 10);
	arrived(pair, 30);
	say_ret("shutdown WR", shutdown(pair->fd, SHUT_WR));
	say("the peer polls %s", poll_names((uint32_t)peer(pair, ACT_POLL, POLLRDHUP, 5000).result));
	say_reply("the peer sends", peer(pair, ACT_SEND, 10, 0));
	await_reset(pair);
	say_reply("the peer reads", peer(pair, ACT_RECV_ONCE, 10, 0));
	say_reply("the peer sends again", peer(pair, ACT_SEND, 10, 0));
	say_state("this end", pair);
	long got = recv(pair->fd, data, 100, 0);
	if (choice.shaken && got == 20) /* what has come by TCP and by ring is not read in one */
		got += recv(pair->fd, data + got, 10, 0);
	say_bytes("recv", pair, data, got);
	say_ret("recv then", recv(pair->fd, data, 100, 0));
	say_ret("recv at last", recv(pair->fd, data, 100, 0));
}

static void shutdown_by_both(void)
{
	struct pair *pair = open_pair();
	ignore_sigpipe();
	NEED(shutdown(pair->fd, SHUT_WR) == 0);
	say_reply("the peer shuts down", peer(pair, ACT_SHUTDOWN, SHUT_WR, 0));
	await_fin(pair);
	say_state("this end", pair);
	/* a provider between hands on one end after the other */
	NEED(peer(pair, ACT_POLL, POLLRDHUP, 5000).result & POLLRDHUP);
	say_reply("the peer's poll", peer(pair, ACT_POLL, POLLIN | POLLOUT | POLLRDHUP, 0));
	say_ret("recv", recv(pair->fd, data, 10, 0));
	say_reply("the peer reads", peer(pair, ACT_RECV_ONCE, 10, 0));
	say_ret("send", send(pair->fd, data, 10, 0));
	say_reply("the peer sends", peer(pair, ACT_SEND, 10, 0));
}

static void shutdown_wakes_peer(void)
{
	struct pair *pair = open_pair();
	peer_now(pair, ACT_DRAIN, 0, 0);
	put(pair, 3);
	say_ret("shutdown WR", shutdown(pair->fd, SHUT_WR));
	say_reply("the blocked peer", peer_done());
}

static void close_with_unread(void)
{
	struct pair *pair = open_pair();
	put(pair, 20);
	peer_put(pair, 30);
	arrived(pair, 30);
	say_ret("close", close(pair->fd));
	say("the peer polls %s", poll_names((uint32_t)peer(pair, ACT_POLL, 0, 5000).result));
	say_reply("the peer reads what had come", peer(pair, ACT_RECV_ONCE, 100, 0));
	say_reply("the peer reads", peer(pair, ACT_RECV_ONCE, 100, 0));
	say_reply("the peer reads again", peer(pair, ACT_RECV_ONCE, 100, 0));
	say_reply("the peer sends", peer(pair, ACT_SEND, 10, 0));
}

static void peer_closes_with_unread(void)
{
	struct pair *pair = open_pair();
	ignore_sigpipe();
	put(pair, 20);
	say_reply("arrived", peer(pair, ACT_ARRIVED, 20, 0));
	peer_put(pair, 30);
	arrived(pair, 30); /* a reset takes back what has not gone out, as where Nagle's algorithm holds it */
	peer(pair, ACT_CLOSE, 0, 0);
	await_reset(pair);
	say_state("reset", pair);
	say_bytes("recv what had come", pair, data, recv(pair->fd, data, 100, 0));
	say_ret("recv", recv(pair->fd, data, 100, 0));
	say_ret("recv again", recv(pair->fd, data, 100, 0));
	say_ret("send", send(pair->fd, data, 10, 0));
	say_state("after", pair);
}

static void unread_after_shutdown(void)
{
	/* The peer has shut down in good order, but leaves bytes of ours unread. */
	struct pair *pair = open_pair();
	ignore_sigpipe();
	put(pair, 20);
	say_reply("arrived", peer(pair, ACT_ARRIVED, 20, 0));
	peer_put(pair, 30);
	peer(pair, ACT_SHUTDOWN, SHUT_WR, 0);
	await_fin(pair);
	peer(pair, ACT_CLOSE, 0, 0);
	await_reset(pair);
	say_state("reset", pair);
	say_bytes("recv what had come", pair, data, recv(pair->fd, data, 100, 0));
	say_ret("recv", recv(pair->fd, data, 100, 0));
	say_ret("send", send(pair->fd, data, 10, 0));
}

static void close_all_read(void)
{
	struct pair *pair = open_pair();
	put(pair, 20);
	peer_get(pair, 20);
	peer_put(pair, 30);
	get(pair, 30);
	say_ret("close", close(pair->fd));
	say_reply("the peer reads", peer(pair, ACT_RECV_ONCE, 100, 0));
	say_reply("the peer's poll", peer(pair, ACT_POLL, POLLIN | POLLOUT | POLLRDHUP, 0));
}

static void close_after_much(void)
{
	/* What was written before close still arrives, all of it, also when nobody reads yet. */
	struct pair *pair = open_pair();
	long total = flood(pair);
	say_ret("close", close(pair->fd));
	struct reply reply = peer(pair, ACT_DRAIN, 0, 0);
	say("the peer got %s", reply.result == total && !reply.wrong ? "all of it" : "SOMETHING ELSE");
	say_reply("the peer at the end", peer(pair, ACT_RECV_ONCE, 10, 0));
}

static void peer_closes_after_much(void)
{
	struct pair *pair = open_pair();
	peer_now(pair, ACT_SEND_CLOSE, 3 << 20, 0);
	say("%ld bytes to the end", get_all(pair));
	say_reply("the peer sent", peer_done());
}

static void reset_blocked_recv(void)
{
	struct pair *pair = open_pair();
	peer_when_asleep(pair, ACT_ABORT, 0, 0);
	say_ret("blocked recv", recv(pair->fd, data, 60, 0));
	peer_done();
	say_ret("recv again", recv(pair->fd, data, 60, 0));
	say_state("after", pair);
}

static void reset_blocked_send(void)
{
	struct pair *pair = open_pair();
	ignore_sigpipe();
	flood(pair);
	peer_when_asleep(pair, ACT_ABORT, 0, 0);
	send_until_error("blocked send", pair, 0);
	peer_done();
	say_ret("send again", send(pair->fd, data, 60, 0));
	say_ret("recv", recv(pair->fd, data, 60, 0));
}

static void close_blocked_send(void)
{
	/* The peer closes with our bytes unread: a reset meets the blocked sender. */
	struct pair *pair = open_pair();
	ignore_sigpipe();
	flood(pair);
	peer_when_asleep(pair, ACT_CLOSE, 0, 0);
	send_until_error("blocked send", pair, 0);
	peer_done();
	say_ret("send again", send(pair->fd, data, 60, 0));
}

static void reset_blocked_poll(void)
{
	struct pair *pair = open_pair();
	struct pollfd item = {.fd = pair->fd, .events = 0};
	peer_when_asleep(pair, ACT_ABORT, 0, 0);
	int ready = poll(&item, 1, 5000);
	say_poll("blocked poll for nothing", ready, item.revents);
	peer_done();
	say_state("after", pair);
}

static void reset_with_data(void)
{
	struct pair *pair = open_pair();
	peer_put(pair, 40);
	arrived(pair, 40);
	peer(pair, ACT_ABORT, 0, 0);
	await_reset(pair);
	say_state("reset", pair);
	say_bytes("recv what had come", pair, data, recv(pair->fd, data, 25, 0));
	say_bytes("recv what had come", pair, data, recv(pair->fd, data, 25, 0));
	say_ret("recv", recv(pair->fd, data, 25, 0));
	say_ret("recv again", recv(pair->fd, data, 25, 0));
}

static void killed(void)
{
	/* SIGKILL looks like close: an end of stream, or a reset where bytes were left unread. */
	if (!choice.peer_process)
		return;
	struct pair *pair = open_pair(), *other = open_pair();
	ignore_sigpipe();
	peer_put(pair, 40);
	put(other, 10);
	say_reply("arrived", peer(other, ACT_ARRIVED, 10, 0));
	peer_when_asleep(pair, ACT_KILL, 0, 0);
	struct pollfd item = {.fd = pair->fd, .events = POLLRDHUP};
	int ready = poll(&item, 1, 5000);
	say_poll("blocked poll", ready, item.revents);
	peer_done();
	say("%ld bytes to the end", get_all(pair));
	say_state("read to the end", pair);
	say_ret("send", send(pair->fd, data, 10, 0));
	await_reset(pair);
	say_ret("send", send(pair->fd, data, 10, 0));
	await_reset(other);
	say_state("the one with unread bytes", other);
	say_ret("recv", recv(other->fd, data, 10, 0));
	say_ret("recv", recv(other->fd, data, 10, 0));
}

static void killed_while_blocked(void)
{
	if (!choice.peer_process)
		return;
	struct pair *pair = open_pair();
	peer_when_asleep(pair, ACT_KILL, 0, 0);
	say_ret("blocked recv", recv(pair->fd, data, 10, 0));
	peer_done();
}

static void exits_without_closing(void)
{
	if (!choice.peer_process)
		return;
	struct pair *pair = open_pair();
	peer_put(pair, 3000);
	peer_now(pair, ACT_EXIT, 0, 0);
	say("%ld bytes to the end", get_all(pair));
	peer_done();
}

static void sent_and_gone(void)
{
	/* The whole program ends right after its last write: the bytes must not end with it. */
	struct pair *pair = open_pair();
	pid_t child = fork();
	if (child == 0) {
		forget_peer();
		put(pair, 150000);
		_exit(0);
	}
	NEED(close(pair->fd) == 0);
	say_reply("the peer drains", peer(pair, ACT_DRAIN, 0, 0));
	NEED(waitpid(child, NULL, 0) == child);
}

/* The peer's end stands behind bytes that nobody reads. Small messages the other way are a chance to promote meanwhile. */
static struct pair *open_flooded_pair(void)
{
	struct pair *pair = open_pair();
	ignore_sigpipe();
	say_reply("the peer floods", peer(pair, ACT_FLOOD, 0, 0));
	for (int i = 0; i < 300; i++) {
		put(pair, 10);
		peer_get(pair, 10);
	}
	return pair;
}

/* The same, and full in both directions: the peer closes or is killed once we sleep. */
static struct pair *open_full_pair(enum act end)
{
	struct pair *pair = open_flooded_pair();
	flood(pair);
	peer_when_asleep(pair, end, 0, 0);
	return pair;
}

static void say_end_behind_bytes(struct pair *pair)
{
	say_ret("send again", send(pair->fd, data, 60, 0));
	say("and then: %ld", get_all(pair) < 0 ? -1l : 0l);
}

static void close_behind_bytes(void)
{
	struct pair *pair = open_flooded_pair();
	peer(pair, ACT_CLOSE, 0, 0);
	/* EPIPE where the end has overtaken the bytes, which ring and kernel hold different amounts of */
	while (send(pair->fd, pattern_out(pair, 65536), 65536, 0) >= 0)
		;
	say("reset: %d", errno == ECONNRESET || errno == EPIPE);
	say_end_behind_bytes(pair);
}

static void close_behind_bytes_with_unread(void)
{
	struct pair *pair = open_flooded_pair();
	put(pair, 10);
	say_reply("arrived", peer(pair, ACT_ARRIVED, 10, 0));
	peer(pair, ACT_CLOSE, 0, 0);
	await_reset(pair);
	say_state("reset", pair);
	send_until_error("send", pair, 0);
	say_end_behind_bytes(pair);
}

static void close_behind_bytes_blocked(void)
{
	struct pair *pair = open_full_pair(ACT_CLOSE);
	send_until_error("blocked send", pair, 0);
	say_end_behind_bytes(pair);
	peer_done();
}

static void killed_behind_bytes(void)
{
	if (!choice.peer_process)
		return;
	struct pair *pair = open_full_pair(ACT_KILL);
	send_until_error("blocked send", pair, 0);
	say_end_behind_bytes(pair);
	peer_done();
}

static void killed_behind_bytes_poll(void)
{
	if (!choice.peer_process)
		return;
	struct pair *pair = open_full_pair(ACT_KILL);
	struct pollfd item = {.fd = pair->fd, .events = POLLOUT};
	while (poll(&item, 1, 10000) == 1 && (send(pair->fd, data, sizeof data, MSG_DONTWAIT) >= 0 || errno == EAGAIN))
		;
	say_ret("after the failed send", send(pair->fd, data, 60, 0));
	peer_done();
}

static void killed_behind_bytes_epoll(void)
{
	if (!choice.peer_process)
		return;
	struct pair *pair = open_full_pair(ACT_KILL);
	struct epoll_event event = {.events = EPOLLOUT | EPOLLET};
	int set = epoll_create1(0);
	NEED(epoll_ctl(set, EPOLL_CTL_ADD, pair->fd, &event) == 0);
	while (epoll_wait(set, &event, 1, 10000) == 1) {
		ssize_t wrote;
		do
			wrote = send(pair->fd, data, sizeof data, MSG_DONTWAIT);
		while (wrote >= 0);
		if (errno != EAGAIN)
			break;
	}
	say_ret("after the failed send", send(pair->fd, data, 60, 0));
	peer_done();
}

const struct scene scenes_end[] = {
	SCENE(eof),
	SCENE(eof_recv_first),
	SCENE(eof_so_error),
	SCENE(eof_blocked),
	SCENE(eof_blocked_poll),
	SCENE(shutdown_write),
	SCENE(half_close_by_peer),
	SCENE(shutdown_read),
	SCENE(shutdown_read_of_a_quiet_peer),
	SCENE(shutdown_both),
	SCENE(data_after_shutdown_both),
	SCENE(shutdown_by_both),
	SCENE(shutdown_wakes_peer),
	SCENE(close_with_unread),
	SCENE(peer_closes_with_unread),
	SCENE(unread_after_shutdown),
	SCENE(close_all_read),
	SCENE(close_after_much),
	SCENE(peer_closes_after_much),
	SCENE(reset_blocked_recv),
	SCENE(reset_blocked_send),
	SCENE(close_blocked_send),
	SCENE(reset_blocked_poll),
	SCENE(reset_with_data),
	SCENE(killed),
	SCENE(killed_while_blocked),
	SCENE(exits_without_closing),
	SCENE(sent_and_gone),
	SCENE(close_behind_bytes),
	SCENE(close_behind_bytes_with_unread),
	SCENE(close_behind_bytes_blocked),
	SCENE(killed_behind_bytes),
	SCENE(killed_behind_bytes_poll),
	SCENE(killed_behind_bytes_epoll),
	{NULL, NULL},
};
