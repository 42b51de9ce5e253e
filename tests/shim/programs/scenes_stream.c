/* Streams of every size, and promotion under way: each `while_*` scene is promoted by its own traffic, of one kind. */
#include "scene.h"

static uint8_t data[1 << 20];

static void sizes_out(void)
{
	static const size_t sizes[] = {1,    2,    63,    64,    65,    511,    1000,   4095,    4096,
	                               4097, 9000, 65535, 65536, 65537, 131072, 262147, 1 << 20, 4 << 20};
	struct pair *pair = open_pair();
	for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
		peer_now(pair, ACT_RECV, (int64_t)sizes[i], 0);
		put(pair, sizes[i]);
		say_reply("taken", peer_done());
	}
	stays(pair);
}

static void sizes_in(void)
{
	static const size_t sizes[] = {1,    2,    63,    64,    65,    511,    1000,   4095,    4096,
	                               4097, 9000, 65535, 65536, 65537, 131072, 262147, 1 << 20, 4 << 20};
	struct pair *pair = open_pair();
	for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
		peer_now(pair, ACT_SEND, (int64_t)sizes[i], 0);
		get(pair, sizes[i]);
		say_reply("sent", peer_done());
	}
	stays(pair);
}

enum { LONG = 24 << 20 };

static uint8_t *long_pattern(struct pair *pair)
{
	static uint8_t *bytes;
	if (!bytes)
		NEED((bytes = malloc(LONG)) != NULL);
	fill_pattern(KEY_OUT, pair->out, bytes, LONG);
	return bytes;
}

/* While one call lasts, no other of this end can promote the connection. */
static void long_calls(void)
{
	struct pair *pair = open_pair();
	for (int way = 0; way < 2; way++) {
		const uint8_t *bytes = long_pattern(pair);
		peer_now(pair, ACT_RECV, LONG, 0);
		ssize_t n = way ? write(pair->fd, bytes, LONG) : send(pair->fd, bytes, LONG, 0);
		sent(pair, say_ret("one call", n));
		say_reply("taken", peer_done());
	}
	stays(pair);
}

/* What ends a long call leaves it with what it has sent; an error is the next call's. */
static void long_call_interrupted(void)
{
	struct pair *pair = open_pair();
	alarms(300);
	ssize_t n = send(pair->fd, long_pattern(pair), LONG, 0);
	say("a part: %d", n > 0 && n < LONG);
	peer_put(pair, 10);
	arrived(pair, 10);
	say_bytes("what has come", pair, data, recv(pair->fd, data, 20, MSG_WAITALL));
	alarms(0);
}

static void long_call_timed_out(void)
{
	struct timeval limit = {.tv_usec = 300000};
	struct pair *pair = open_pair();
	NEED(setsockopt(pair->fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit) == 0);
	ssize_t n = write(pair->fd, long_pattern(pair), LONG);
	say("a part: %d", n > 0 && n < LONG);
}

static void long_call_reset(void)
{
	struct pair *pair = open_pair();
	signal(SIGPIPE, SIG_IGN);
	const uint8_t *bytes = long_pattern(pair);
	peer_when_asleep(pair, ACT_ABORT, 0, 0);
	ssize_t n = send(pair->fd, bytes, LONG, 0);
	peer_done();
	say("a part: %d", n > 0 && n < LONG);
	say_ret("send again", send(pair->fd, data, 60, 0));
	say_ret("and again", send(pair->fd, data, 60, 0));
}

struct file_sender {
	pid_t tid;
	int fd, file;
	ssize_t result;
};

static void *send_file(void *argument)
{
	struct file_sender *self = argument;
	__atomic_store_n(&self->tid, gettid(), __ATOMIC_RELEASE);
	self->result = sendfile(self->fd, self->file, &(off_t){0}, LONG);
	return NULL;
}

/* It goes on to the end of the file though its numbers are closed, and the end of the stream comes after that. */
static void long_call_closed(void)
{
	struct pair *pair = open_pair();
	struct file_sender sender = {.fd = pair->fd, .file = memfd_create("scene", MFD_CLOEXEC)};
	pthread_t thread;
	NEED(sender.file >= 0 && write(sender.file, long_pattern(pair), LONG) == LONG);
	NEED(pthread_create(&thread, NULL, send_file, &sender) == 0);
	while (!__atomic_load_n(&sender.tid, __ATOMIC_ACQUIRE))
		sched_yield();
	await_asleep(getpid(), sender.tid);
	NEED(close(pair->fd) == 0 && close(sender.file) == 0);
	say_reply("taken", peer(pair, ACT_DRAIN, 0, 0));
	NEED(pthread_join(thread, NULL) == 0);
	say("sent: %zd", sender.result);
}

/* A look that wants more than there is ends with what there is. */
static void look_interrupted(void)
{
	struct timeval limit = {.tv_usec = 200000};
	const int low = 15;
	struct pair *pair = open_pair();
	alarms(100); /* a signal restarts a call that has seen nothing */
	peer_when_asleep(pair, ACT_SEND, 10, 0);
	say_ret("at a signal, behind bytes that came", recv(pair->fd, data, 20, MSG_PEEK | MSG_WAITALL));
	peer_done();
	say_ret("at a signal", recv(pair->fd, data, 20, MSG_PEEK | MSG_WAITALL));
	alarms(0);
	NEED(setsockopt(pair->fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0);
	say_ret("timed out", recv(pair->fd, data, 20, MSG_PEEK | MSG_WAITALL));
	NEED(setsockopt(pair->fd, SOL_SOCKET, SO_RCVLOWAT, &low, sizeof low) == 0);
	say_ret("timed out below the low-water mark", recv(pair->fd, data, 20, MSG_PEEK));
	get(pair, 10);
	say_ret("timed out with nothing", recv(pair->fd, data, 20, MSG_PEEK | MSG_WAITALL));
	stays(pair);
}

static void pieces(void)
{
	/* Written in pieces of one size and read in pieces of another. */
	static const int64_t sizes[][2] = {{1, 7}, {7, 1}, {64, 4096}, {4096, 64}, {1000, 333}, {4095, 4097}, {65536, 13}};
	struct pair *pair = open_pair();
	for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
		int64_t total = sizes[i][0] == 1 || sizes[i][1] == 1 ? 5000 : 400000;
		peer_now(pair, ACT_SEND, total, sizes[i][0]);
		int64_t left = total;
		while (left > 0) {
			size_t want = (size_t)(left < sizes[i][1] ? left : sizes[i][1]);
			ssize_t got = recv(pair->fd, data, want, MSG_WAITALL);
			NEED(got == (ssize_t)want && took(pair, data, got));
			left -= got;
		}
		say_reply("pieces", peer_done());
	}
	stays(pair);
}

static void ping_pong(void)
{
	struct pair *pair = open_pair();
	static const int64_t sizes[] = {1, 64, 1000, 4000};
	for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
		peer_now(pair, ACT_ECHO, 500, sizes[i]);
		for (int j = 0; j < 500; j++) {
			put(pair, (size_t)sizes[i]);
			get(pair, (size_t)sizes[i]);
		}
		say_reply("echo", peer_done());
	}
	stays(pair);
}

/* Sends and receives at the same time from one thread; never blocks in one while the other could move. */
static void exchange_here(struct pair *pair, size_t out, size_t in, uint32_t seed)
{
	int64_t deadline = now_ms() + 20000;
	while (out > 0 || in > 0) {
		struct pollfd item = {.fd = pair->fd, .events = (short)((out ? POLLOUT : 0) | (in ? POLLIN : 0))};
		int ready = poll(&item, 1, 5000);
		NEED(ready == 1 && now_ms() < deadline);
		if (item.revents & POLLIN) {
			ssize_t got = recv(pair->fd, data, in < 65536 ? in : 65536, MSG_DONTWAIT);
			NEED(got > 0 && took(pair, data, got)); /* readiness is a promise */
			in -= (size_t)got;
		}
		if (item.revents & POLLOUT) {
			seed = seed * 1664525u + 1013904223u;
			size_t want = 1 + (seed >> 8) % 3000;
			want = want < out ? want : out;
			ssize_t wrote = send(pair->fd, pattern_out(pair, want), want, MSG_DONTWAIT);
			NEED(wrote > 0);
			sent(pair, wrote);
			out -= (size_t)wrote;
		}
	}
}

static void exchanges(void)
{
	struct pair *pair = open_pair();
	for (int i = 0; i < 4; i++) {
		peer_now(pair, ACT_EXCHANGE, 300000 + i, 500000 - i);
		exchange_here(pair, (size_t)(500000 - i), (size_t)(300000 + i), (uint32_t)i);
		say_reply("exchange", peer_done());
	}
	stays(pair);
}

/* Sends without blocking, waiting by poll(). */
static void put_polled(struct pair *pair, size_t len)
{
	while (len > 0) {
		struct pollfd item = {.fd = pair->fd, .events = POLLOUT};
		NEED(poll(&item, 1, 10000) == 1);
		size_t want = len < 65536 ? len : 65536;
		ssize_t wrote = send(pair->fd, pattern_out(pair, want), want, MSG_DONTWAIT);
		NEED(wrote > 0);
		sent(pair, wrote);
		len -= (size_t)wrote;
	}
}

/* Both send more than rings hold before either reads, less than TCP's buffers do. */
static void both_send_first(void)
{
	struct pair *pair = open_pair();
	for (int i = 0; i < 3; i++) {
		peer_now(pair, ACT_SEND, 600000, 0);
		if (i % 2 == 0)
			put(pair, 600000);
		else
			put_polled(pair, 600000);
		say_reply("the peer has sent", peer_done());
		get(pair, 600000);
		peer_get(pair, 600000);
	}
}

/* Traffic goes on in rounds until the runner sees the connection promoted, or at most so long. */
static void until_promoted(struct pair *pair, void (*round)(struct pair *, uint32_t))
{
	uint32_t count = 0;
	do
		for (int i = 0; i < 8; i++)
			round(pair, count++);
	while (choice.warm && !ask_runner("warm", pair));
	for (int i = 0; i < 8; i++)
		round(pair, count++);
	stays(pair);
	say("promoted on the way");
}

static void round_exchange(struct pair *pair, uint32_t count)
{
	peer_now(pair, ACT_EXCHANGE, 20000, 30000);
	exchange_here(pair, 30000, 20000, count);
	struct reply reply = peer_done();
	NEED(reply.result == 0 && !reply.wrong);
}

static void while_exchanging(void)
{
	until_promoted(open_pair_raw(), round_exchange);
}

static void round_out(struct pair *pair, uint32_t count)
{
	peer_now(pair, ACT_RECV, 20000, 0);
	for (int i = 0; i < 20; i++)
		put(pair, 1000);
	(void)count;
	struct reply reply = peer_done();
	NEED(reply.result == 20000 && !reply.wrong);
}

static void while_only_sending(void)
{
	until_promoted(open_pair_raw(), round_out);
}

static void round_in(struct pair *pair, uint32_t count)
{
	(void)count;
	peer_now(pair, ACT_SEND, 20000, 1000);
	get(pair, 20000);
	NEED(peer_done().result == 20000);
}

static void while_only_receiving(void)
{
	until_promoted(open_pair_raw(), round_in);
}

static void round_poll(struct pair *pair, uint32_t count)
{
	struct pollfd item = {.fd = pair->fd, .events = POLLIN};
	for (int i = 0; i < 8; i++) {
		peer_now(pair, ACT_SEND, 50, 0);
		NEED(poll(&item, 1, 5000) == 1 && item.revents == POLLIN);
		NEED(peer_done().result == 50);
		NEED(arrived(pair, 50));
		ssize_t got = recv(pair->fd, data, 50, MSG_DONTWAIT);
		NEED(got == 50 && took(pair, data, got));
		if ((count + (uint32_t)i) % 3 == 0) {
			put(pair, 20);
			peer_get(pair, 20);
		}
	}
}

static void while_polling(void)
{
	until_promoted(open_pair_raw(), round_poll);
}

static void round_select(struct pair *pair, uint32_t count)
{
	(void)count;
	for (int i = 0; i < 8; i++) {
		fd_set in;
		FD_ZERO(&in);
		FD_SET(pair->fd, &in);
		peer_now(pair, ACT_ECHO, 1, 50);
		put(pair, 50);
		NEED(select(pair->fd + 1, &in, NULL, NULL, NULL) == 1 && FD_ISSET(pair->fd, &in));
		get(pair, 50);
		NEED(peer_done().result == 1);
	}
}

static void while_selecting(void)
{
	until_promoted(open_pair_raw(), round_select);
}

static int round_set;
static uint32_t round_events;

static void round_epoll(struct pair *pair, uint32_t count)
{
	for (int i = 0; i < 8; i++) {
		struct epoll_event event;
		size_t len = 1 + (count * 8 + (uint32_t)i) % 90;
		peer_now(pair, ACT_ECHO, 1, (int64_t)len);
		put(pair, len);
		size_t left = len;
		while (left > 0) {
			int ready = epoll_wait(round_set, &event, 1, 5000);
			NEED(ready == 1 && event.data.u64 == 0xfeedfacefeedface);
			NEED(event.events & EPOLLIN || round_events & EPOLLOUT);
			ssize_t got;
			while (left > 0 && (got = recv(pair->fd, data, left, MSG_DONTWAIT)) > 0) {
				NEED(took(pair, data, got));
				left -= (size_t)got;
			}
		}
		NEED(peer_done().result == 1);
	}
	if (!(round_events & EPOLLET)) {
		struct epoll_event event;
		NEED(epoll_wait(round_set, &event, 1, 0) == 0);
	}
}

static void while_in_epoll(uint32_t events)
{
	struct pair *pair = open_pair_raw();
	struct epoll_event event = {.events = events, .data.u64 = 0xfeedfacefeedface};
	round_events = events;
	round_set = epoll_create1(0);
	NEED(epoll_ctl(round_set, EPOLL_CTL_ADD, pair->fd, &event) == 0);
	until_promoted(pair, round_epoll);
}

static void while_in_epoll_level(void)
{
	while_in_epoll(EPOLLIN);
}

static void while_in_epoll_edge(void)
{
	while_in_epoll(EPOLLIN | EPOLLET);
}

static void while_in_epoll_edge_out(void)
{
	while_in_epoll(EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET);
}

static void round_nonblocking(struct pair *pair, uint32_t count)
{
	/* A spinning reader: asks until there is something. */
	(void)count;
	for (int i = 0; i < 8; i++) {
		peer_now(pair, ACT_ECHO, 1, 30);
		put(pair, 30);
		size_t left = 30;
		int64_t deadline = now_ms() + 5000;
		while (left > 0) {
			ssize_t got = recv(pair->fd, data, left, MSG_DONTWAIT);
			NEED(got > 0 || (got < 0 && errno == EAGAIN));
			NEED(took(pair, data, got) && now_ms() < deadline);
			left -= got > 0 ? (size_t)got : 0;
		}
		NEED(peer_done().result == 1);
	}
}

static void while_asking_without_waiting(void)
{
	until_promoted(open_pair_raw(), round_nonblocking);
}

static void round_in_flight(struct pair *pair, uint32_t count)
{
	/* Unread bytes lie in both directions while calls go on. */
	put(pair, 700);
	peer_put(pair, 900);
	for (int i = 0; i < 8; i++) {
		put(pair, 50);
		peer_put(pair, 60);
		get(pair, 60);
		peer_get(pair, 50);
	}
	get(pair, 900);
	peer_get(pair, 700);
	(void)count;
}

static void while_in_flight(void)
{
	until_promoted(open_pair_raw(), round_in_flight);
}

static void half_close_on_the_way(void)
{
	/* This end has said all it has to say, and shuts down, while the peer's stream moves to the ring. */
	long right = 0;
	for (int i = 0; i < 40; i++) {
		struct pair *pair = open_pair_raw();
		size_t out = (size_t)(i % 4) * (size_t)(i % 4) * 20000;
		peer_now(pair, ACT_EXCHANGE, 1 << 20, (int64_t)out);
		exchange_here(pair, out, 0, (uint32_t)i);
		NEED(shutdown(pair->fd, SHUT_WR) == 0);
		get(pair, 1 << 20);
		struct reply reply = peer_done();
		right += reply.result == 0 && !reply.wrong;
		say_reply("the peer at the end", peer(pair, ACT_RECV_ONCE, 1, 0));
		NEED(peer(pair, ACT_CLOSE, 0, 0).result == 0);
		say_ret("the end", recv(pair->fd, data, 1, 0));
		NEED(close(pair->fd) == 0);
	}
	say("right %ld", right);
}

static void promoted_then_quiet(void)
{
	/* Bytes sent before an idle second are there after it; the rings may have given their pages back. */
	struct pair *pair = open_pair();
	struct timespec pause = {.tv_sec = 1, .tv_nsec = 300000000};
	for (int i = 0; i < 2; i++) {
		peer_now(pair, ACT_EXCHANGE, 100000, 100000);
		exchange_here(pair, 100000, 100000, 1);
		NEED(peer_done().result == 0);
		peer_put(pair, 100);
		put(pair, 100);
		nanosleep(&pause, NULL); /* the quiet is what is tried here */
		get(pair, 100);
		peer_get(pair, 100);
		nanosleep(&pause, NULL);
		peer_put(pair, 100);
		get(pair, 100);
		put(pair, 100);
		peer_get(pair, 100);
	}
	say("still there");
	stays(pair);
}

static void many_short(void)
{
	/* Connect, exchange, close: most live too short to be promoted, some are caught in the act. */
	uint16_t port;
	int listener = loopback_listener(choice.family, &port, 0);
	struct sockaddr_storage address;
	socklen_t len = loopback_address(choice.family, port, true, &address);
	long right = 0;
	for (int i = 0; i < 300; i++) {
		char in[8];
		int rounds = i % 9;
		int client = socket(address.ss_family, SOCK_STREAM, 0);
		NEED(connect(client, (struct sockaddr *)&address, len) == 0);
		int server = accept(listener, NULL, NULL);
		NEED(server >= 0);
		for (int j = 0; j < rounds; j++) {
			NEED(send(client, &i, sizeof i, 0) == sizeof i);
			right += recv(server, in, sizeof in, 0) == sizeof i && !memcmp(in, &i, sizeof i);
			NEED(send(server, &j, sizeof j, 0) == sizeof j);
			right += recv(client, in, sizeof in, 0) == sizeof j && !memcmp(in, &j, sizeof j);
		}
		NEED(close(i % 2 ? client : server) == 0);
		right += recv(i % 2 ? server : client, in, sizeof in, 0) == 0;
		NEED(close(i % 2 ? server : client) == 0);
	}
	say("right %ld", right);
}

const struct scene scenes_stream[] = {
	SCENE(sizes_out),
	SCENE(sizes_in),
	SCENE(long_calls),
	SCENE(long_call_interrupted),
	SCENE(long_call_timed_out),
	SCENE(long_call_reset),
	SCENE(long_call_closed),
	SCENE(look_interrupted),
	SCENE(pieces),
	SCENE(ping_pong),
	SCENE(exchanges),
	SCENE(both_send_first),
	SCENE(while_exchanging),
	SCENE(while_only_sending),
	SCENE(while_only_receiving),
	SCENE(while_polling),
	SCENE(while_selecting),
	SCENE(while_in_epoll_level),
	SCENE(while_in_epoll_edge),
	SCENE(while_in_epoll_edge_out),
	SCENE(while_asking_without_waiting),
	SCENE(while_in_flight),
	SCENE(half_close_on_the_way),
	SCENE(promoted_then_quiet),
	SCENE(many_short),
	{NULL, NULL},
};
