/* Signals: EINTR and SA_RESTART as the kernel gives them, handlers that use the socket, jumps and cancellation. */
#include "scene.h"

static uint8_t data[1 << 20];
static volatile sig_atomic_t signals;

static void count_signal(int signal_number)
{
	(void)signal_number;
	signals++;
}

static void handle(int signal_number, void (*handler)(int), int flags)
{
	struct sigaction action = {.sa_handler = handler, .sa_flags = flags};
	sigemptyset(&action.sa_mask);
	NEED(sigaction(signal_number, &action, NULL) == 0);
}

/* A helper thread sends this thread SIGUSR1 once it sleeps. */
static pid_t target_tid;
static pthread_t target_thread;
static pthread_t striker;
static int strikes;

static void *strike(void *unused)
{
	(void)unused;
	for (int i = 0; i < strikes; i++) {
		await_asleep(getpid(), target_tid);
		pthread_kill(target_thread, SIGUSR1);
	}
	return NULL;
}

static void strike_when_asleep(int count)
{
	sigset_t all, before;
	target_tid = gettid();
	target_thread = pthread_self();
	strikes = count;
	signals = 0;
	sigfillset(&all);
	pthread_sigmask(SIG_BLOCK, &all, &before);
	NEED(pthread_create(&striker, NULL, strike, NULL) == 0);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void struck(const char *name)
{
	NEED(pthread_join(striker, NULL) == 0);
	say("%s: signals %d", name, (int)signals);
}

static void eintr_reads(void)
{
	struct pair *pair = open_pair();
	struct iovec one = {.iov_base = data, .iov_len = 100};
	struct msghdr header = {.msg_iov = &one, .msg_iovlen = 1};
	struct mmsghdr messages = {.msg_hdr = header};
	handle(SIGUSR1, count_signal, 0);
	strike_when_asleep(1);
	say_ret("recv", recv(pair->fd, data, 100, 0));
	struck("recv");
	strike_when_asleep(1);
	say_ret("read", read(pair->fd, data, 100));
	struck("read");
	strike_when_asleep(1);
	say_ret("readv", readv(pair->fd, &one, 1));
	struck("readv");
	strike_when_asleep(1);
	say_ret("recvmsg", recvmsg(pair->fd, &header, 0));
	struck("recvmsg");
	strike_when_asleep(1);
	say_ret("recvfrom", recvfrom(pair->fd, data, 100, 0, NULL, NULL));
	struck("recvfrom");
	strike_when_asleep(1);
	say_ret("recvmmsg", recvmmsg(pair->fd, &messages, 1, 0, NULL));
	struck("recvmmsg");
	strike_when_asleep(1);
	say_ret("recv PEEK", recv(pair->fd, data, 100, MSG_PEEK));
	struck("recv PEEK");
	peer_put(pair, 10);
	arrived(pair, 10);
	strike_when_asleep(1);
	say_bytes("recv WAITALL with a part", pair, data, recv(pair->fd, data, 100, MSG_WAITALL));
	struck("recv WAITALL");
	peer_put(pair, 10);
	get(pair, 10);
	stays(pair);
}

static void eintr_nothing(void)
{
	/* A wait for nothing ends with a signal, and not in EINTR. The second connection is on TCP, beside a ring. */
	struct pair *pairs[] = {open_pair(), open_pair_raw()};
	struct iovec empty = {.iov_base = data};
	struct msghdr header = {.msg_iov = &empty, .msg_iovlen = 1};
	handle(SIGUSR1, count_signal, 0);
	for (int i = 0; i < 2; i++) {
		int fd = pairs[i]->fd;
		strike_when_asleep(1);
		say_ret("recv WAITALL", recv(fd, data, 0, MSG_WAITALL));
		struck("recv WAITALL");
		strike_when_asleep(1);
		say_ret("recvfrom PEEK", recvfrom(fd, data, 0, MSG_PEEK, NULL, NULL));
		struck("recvfrom PEEK");
		strike_when_asleep(1);
		say_ret("recvmsg", recvmsg(fd, &header, 0));
		struck("recvmsg");
		say_ret("readv", readv(fd, &empty, 1));
		say_ret("preadv2", preadv2(fd, &empty, 1, -1, 0));
		peer_put(pairs[i], 10);
		get(pairs[i], 10);
	}
	stays(pairs[0]);
}

static void eintr_restart(void)
{
	struct pair *pair = open_pair();
	handle(SIGUSR1, count_signal, SA_RESTART);
	strike_when_asleep(3);
	peer_when_asleep(pair, ACT_SEND, 10, 0); /* before, amid or after the signals */
	say_bytes("recv goes on", pair, data, recv(pair->fd, data, 10, 0));
	peer_done();
	NEED(pthread_join(striker, NULL) == 0);
	struct timeval limit = {.tv_sec = 10};
	NEED(setsockopt(pair->fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0);
	strike_when_asleep(1);
	say_ret("recv with a timeout does not", recv(pair->fd, data, 10, 0));
	struck("recv");
	stays(pair);
}

static void eintr_waits(void)
{
	/* These are never restarted. */
	struct pair *pair = open_pair();
	struct pollfd item = {.fd = pair->fd, .events = POLLIN};
	struct epoll_event event = {.events = EPOLLIN};
	int set = epoll_create1(0);
	fd_set in;
	NEED(epoll_ctl(set, EPOLL_CTL_ADD, pair->fd, &event) == 0);
	for (int restart = 0; restart < 2; restart++) {
		handle(SIGUSR1, count_signal, restart ? SA_RESTART : 0);
		strike_when_asleep(1);
		say_ret("poll", poll(&item, 1, 10000));
		struck("poll");
		strike_when_asleep(1);
		say_ret("poll forever", poll(&item, 1, -1));
		struck("poll");
		strike_when_asleep(1);
		say_ret("ppoll", ppoll(&item, 1, NULL, NULL));
		struck("ppoll");
		strike_when_asleep(1);
		say_ret("epoll_wait", epoll_wait(set, &event, 1, -1));
		struck("epoll_wait");
		strike_when_asleep(1);
		say_ret("epoll_pwait", epoll_pwait(set, &event, 1, 10000, NULL));
		struck("epoll_pwait");
		FD_ZERO(&in);
		FD_SET(pair->fd, &in);
		strike_when_asleep(1);
		say_ret("select", select(pair->fd + 1, &in, NULL, NULL, NULL));
		struck("select");
		FD_SET(pair->fd, &in);
		strike_when_asleep(1);
		say_ret("pselect", pselect(pair->fd + 1, &in, NULL, NULL, NULL, NULL));
		struck("pselect");
	}
	stays(pair);
}

static void eintr_sends(void)
{
	struct pair *pair = open_pair();
	long total = flood(pair);
	handle(SIGUSR1, count_signal, 0);
	ssize_t wrote;
	do { /* the kernel may find a little room where there was none: then the count of what went */
		strike_when_asleep(1);
		wrote = send(pair->fd, pattern_out(pair, CHUNK), CHUNK, 0);
		int kept = errno;
		NEED(pthread_join(striker, NULL) == 0);
		NEED(signals == 1);
		errno = kept;
		sent(pair, wrote);
		total += wrote > 0 ? wrote : 0;
	} while (wrote > 0);
	say_ret("send", wrote);
	handle(SIGUSR1, count_signal, SA_RESTART);
	strike_when_asleep(2);
	peer_when_asleep(pair, ACT_RECV, total, 0);
	sent(pair, say_ret("send goes on", send(pair->fd, pattern_out(pair, 100), 100, 0)));
	struct reply reply = peer_done();
	say("the peer took all: %d", reply.result == total && !reply.wrong);
	NEED(pthread_join(striker, NULL) == 0);
	peer_get(pair, 100);
	/* with a part gone, the count of that part */
	handle(SIGUSR1, count_signal, 0);
	enum { LEN = 64 << 20 };
	uint8_t *much = mmap(NULL, LEN, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	NEED(much != MAP_FAILED);
	fill_pattern(KEY_OUT, pair->out, much, LEN);
	strike_when_asleep(1);
	wrote = send(pair->fd, much, LEN, 0);
	say("send of more than fits: %s", wrote > 0 && wrote < LEN ? "a part" : "NOT A PART");
	struck("send");
	reply = peer(pair, ACT_RECV, wrote, 0);
	say("the peer took it all: %d", reply.result == wrote && !reply.wrong);
	stays(pair);
}

static void mask_in_wait(void)
{
	/* A signal blocked outside and let in by the wait: no moment is missed. */
	struct pair *pair = open_pair();
	struct pollfd item = {.fd = pair->fd, .events = POLLIN};
	struct epoll_event event = {.events = EPOLLIN};
	int set = epoll_create1(0);
	sigset_t blocked, open;
	fd_set in;
	sigemptyset(&blocked);
	sigaddset(&blocked, SIGUSR1);
	sigemptyset(&open);
	NEED(epoll_ctl(set, EPOLL_CTL_ADD, pair->fd, &event) == 0);
	handle(SIGUSR1, count_signal, 0);
	NEED(sigprocmask(SIG_BLOCK, &blocked, NULL) == 0);
	raise(SIGUSR1);
	say_ret("ppoll", ppoll(&item, 1, NULL, &open));
	say("signals %d", (int)signals);
	raise(SIGUSR1);
	FD_ZERO(&in);
	FD_SET(pair->fd, &in);
	say_ret("pselect", pselect(pair->fd + 1, &in, NULL, NULL, NULL, &open));
	say("signals %d", (int)signals);
	raise(SIGUSR1);
	say_ret("epoll_pwait", epoll_pwait(set, &event, 1, -1, &open));
	say("signals %d", (int)signals);
	peer_put(pair, 5);
	arrived(pair, 5);
	raise(SIGUSR1);
	struct timespec none = {0};
	int ready = ppoll(&item, 1, &none, &blocked);
	say_poll("ppoll, still blocked, with data", ready, item.revents);
	say("signals %d", (int)signals);
	sigset_t now;
	NEED(sigprocmask(SIG_BLOCK, NULL, &now) == 0);
	say("the mask is as before: %d", sigismember(&now, SIGUSR1));
	get(pair, 5);
	signals = 0;
	NEED(sigprocmask(SIG_UNBLOCK, &blocked, NULL) == 0);
	say("signals %d", (int)signals);
	strike_when_asleep(1);
	NEED(sigprocmask(SIG_BLOCK, &blocked, NULL) == 0);
	say_ret("ppoll that sleeps", ppoll(&item, 1, NULL, &open));
	struck("ppoll");
	strike_when_asleep(1);
	say_ret("epoll_pwait that sleeps", epoll_pwait(set, &event, 1, -1, &open));
	struck("epoll_pwait");
	/* blocked during the wait: data ends it, the signal comes after */
	NEED(sigprocmask(SIG_UNBLOCK, &blocked, NULL) == 0);
	signals = 0;
	peer_when_asleep(pair, ACT_SEND, 5, 0);
	ready = ppoll(&item, 1, NULL, &blocked);
	say_poll("ppoll that keeps it out", ready, item.revents);
	peer_done();
	stays(pair);
}

static void storm_end(void)
{
	struct itimerval none = {0};
	NEED(setitimer(ITIMER_REAL, &none, NULL) == 0);
}

/* A busy machine hands on nothing between two signals: there a storm without an end would never let the scene come to its own. */
static void storm_signal(int number)
{
	count_signal(number);
	if (signals == 2000)
		storm_end();
}

static void storm_start(int every_us, int flags)
{
	struct itimerval time = {.it_interval = {.tv_usec = every_us}, .it_value = {.tv_usec = every_us}};
	handle(SIGALRM, storm_signal, flags);
	signals = 0;
	NEED(setitimer(ITIMER_REAL, &time, NULL) == 0);
}

static void storm_stop(const char *name)
{
	while (signals == 0)
		pause(); /* traffic by ring may be over before the first */
	storm_end();
	say("%s: signals came: %d", name, signals > 0);
}

static void storm_restart(void)
{
	struct pair *pair = open_pair();
	for (int every_us = 60; every_us < 700; every_us += 211) {
		storm_start(every_us, SA_RESTART);
		peer_now(pair, ACT_ECHO, 600, 64); /* through a provider, on a busy machine, each takes up to 10 ms */
		for (int i = 0; i < 600; i++) {
			put(pair, 64);
			get(pair, 64);
		}
		storm_stop("ping-pong");
		say_reply("echo", peer_done());
	}
	storm_start(150, SA_RESTART);
	peer_now(pair, ACT_RECV, 2 << 20, 0);
	put(pair, 2 << 20);
	say_reply("stream out", peer_done());
	peer_now(pair, ACT_SEND, 2 << 20, 0);
	get(pair, 2 << 20);
	say_reply("stream in", peer_done());
	storm_stop("streams");
	stays(pair);
}

static void storm_eintr(void)
{
	/* The program repeats what was interrupted: not a byte twice, not one lost. */
	struct pair *pair = open_pair();
	storm_start(90, 0);
	peer_now(pair, ACT_ECHO, 800, 48);
	for (int i = 0; i < 800; i++) {
		size_t left = 48;
		while (left > 0) {
			ssize_t wrote = send(pair->fd, pattern_out(pair, left), left, 0);
			if (wrote < 0)
				NEED(errno == EINTR);
			sent(pair, wrote);
			left -= wrote > 0 ? (size_t)wrote : 0;
		}
		left = 48;
		while (left > 0) {
			ssize_t got = recv(pair->fd, data, left, 0);
			if (got < 0)
				NEED(errno == EINTR);
			else
				NEED(got > 0 && took(pair, data, got));
			left -= got > 0 ? (size_t)got : 0;
		}
	}
	storm_stop("ping-pong");
	struct reply reply;
	reply = peer_done();
	say_reply("echo", reply);
	/* and through waits */
	int set = epoll_create1(0);
	struct epoll_event event = {.events = EPOLLIN};
	NEED(epoll_ctl(set, EPOLL_CTL_ADD, pair->fd, &event) == 0);
	peer_now(pair, ACT_ECHO, 400, 48);
	storm_start(110, 0);
	for (int i = 0; i < 400; i++) {
		put(pair, 48);
		size_t left = 48;
		while (left > 0) {
			int ready = epoll_wait(set, &event, 1, 5000);
			NEED(ready == 1 || (ready < 0 && errno == EINTR));
			if (ready < 0)
				continue;
			ssize_t got = recv(pair->fd, data, left, MSG_DONTWAIT);
			NEED(got > 0 && took(pair, data, got)); /* readiness is a promise */
			left -= (size_t)got;
		}
	}
	storm_stop("waits");
	say_reply("echo", peer_done());
	stays(pair);
}

static struct pair *handler_pair;

static void send_in_handler(int signal_number)
{
	(void)signal_number;
	int kept = errno;
	ssize_t wrote = write(handler_pair->fd, pattern_out(handler_pair, 5), 5);
	sent(handler_pair, wrote);
	errno = kept;
	signals++;
}

static void handler_writes(void)
{
	/* write() is allowed in a handler, also while recv() of the same connection is interrupted by it. */
	struct pair *pair = handler_pair = open_pair();
	handle(SIGUSR1, send_in_handler, SA_RESTART);
	for (int i = 0; i < 10; i++) {
		strike_when_asleep(1);
		peer_now(pair, ACT_ECHO, 1, 5); /* answers what the handler writes */
		get(pair, 5);
		say_reply("answered", peer_done());
		struck("recv");
	}
	struct pollfd item = {.fd = pair->fd, .events = POLLIN};
	strike_when_asleep(1);
	peer_now(pair, ACT_ECHO, 1, 5);
	int ready;
	do /* interrupted, or the answer to what the handler wrote is there already */
		ready = poll(&item, 1, 10000);
	while (ready < 0 && errno == EINTR);
	say_poll("poll", ready, item.revents);
	struck("poll");
	peer_done();
	get(pair, 5);
	stays(pair);
}

static sigjmp_buf way_out;

static void jump(int signal_number)
{
	(void)signal_number;
	signals++;
	siglongjmp(way_out, 1);
}

static void jump_out(void)
{
	/* A handler that does not return: what the interrupted call held must not stay held. */
	struct pair *pair = open_pair();
	struct pollfd item = {.fd = pair->fd, .events = POLLIN};
	struct epoll_event event = {.events = EPOLLIN};
	int set = epoll_create1(0);
	NEED(epoll_ctl(set, EPOLL_CTL_ADD, pair->fd, &event) == 0);
	handle(SIGUSR1, jump, 0);
	for (volatile int way = 0; way < 5; way++) {
		for (volatile int round = 0; round < 3; round++) {
			strike_when_asleep(1);
			if (sigsetjmp(way_out, 1) == 0) {
				switch (way) {
				case 0: recv(pair->fd, data, 100, 0); break;
				case 1: poll(&item, 1, -1); break;
				case 2: epoll_wait(set, &event, 1, -1); break;
				case 3: read(pair->fd, data, 100) < 0 ? (void)0 : (void)1; break;
				case 4: {
					fd_set in;
					FD_ZERO(&in);
					FD_SET(pair->fd, &in);
					select(pair->fd + 1, &in, NULL, NULL, NULL);
					break;
				}
				}
				say("NOT interrupted");
			}
			struck("jumped");
			put(pair, 7);
			peer_get(pair, 7);
			peer_when_asleep(pair, ACT_SEND, 7, 0);
			get(pair, 7);
			peer_done();
		}
	}
	stays(pair);
	flood(pair);
	strike_when_asleep(1);
	if (sigsetjmp(way_out, 1) == 0) {
		send_until_error("NOT interrupted", pair, 0);
	}
	struck("jumped out of send");
	/* nobody can know how much of it went; what went is right */
	NEED(shutdown(pair->fd, SHUT_WR) == 0);
	struct reply reply = peer(pair, ACT_DRAIN, 0, 0);
	say("the peer took what was sent: %d", reply.result > 0 && !reply.wrong);
}

struct victim {
	struct pair *pair;
	int way, set;
	pid_t tid;
};

static void *victim_run(void *argument)
{
	struct victim *self = argument;
	uint8_t bytes[100];
	struct pollfd item = {.fd = self->pair->fd, .events = POLLIN};
	struct epoll_event event;
	__atomic_store_n(&self->tid, gettid(), __ATOMIC_RELEASE);
	if (self->way == 0)
		recv(self->pair->fd, bytes, sizeof bytes, 0);
	else if (self->way == 1)
		poll(&item, 1, -1);
	else if (self->way == 2)
		epoll_wait(self->set, &event, 1, -1);
	else if (read(self->pair->fd, bytes, sizeof bytes) < 0)
		return (void *)1;
	return NULL;
}

static void cancelled(void)
{
	struct pair *pair = open_pair();
	struct epoll_event event = {.events = EPOLLIN};
	int set = epoll_create1(0);
	NEED(epoll_ctl(set, EPOLL_CTL_ADD, pair->fd, &event) == 0);
	for (int way = 0; way < 4; way++) {
		struct victim victim = {.pair = pair, .way = way, .set = set};
		pthread_t thread;
		void *result;
		NEED(pthread_create(&thread, NULL, victim_run, &victim) == 0);
		while (__atomic_load_n(&victim.tid, __ATOMIC_ACQUIRE) == 0)
			sched_yield();
		await_asleep(getpid(), victim.tid);
		NEED(pthread_cancel(thread) == 0);
		NEED(pthread_join(thread, &result) == 0);
		say("way %d: cancelled %d", way, result == PTHREAD_CANCELED);
		put(pair, 7);
		peer_get(pair, 7);
		peer_when_asleep(pair, ACT_SEND, 7, 0);
		get(pair, 7);
		peer_done();
	}
	stays(pair);
}

static void stopped(void)
{
	/* SIGSTOP and SIGCONT in the middle of a read and of a poll. */
	if (!choice.peer_process)
		return;
	struct pair *pair = open_pair(), *other = open_pair();
	peer_when_asleep(pair, ACT_STOP_CONT, 30, 0);
	struct timeval limit = {.tv_usec = 200000};
	struct pollfd item = {.fd = pair->fd, .events = POLLIN};
	say_ret("poll goes on", poll(&item, 1, 200));
	peer_done();
	peer_when_asleep(pair, ACT_STOP_CONT, 30, 0);
	fd_set in;
	FD_ZERO(&in);
	FD_SET(pair->fd, &in);
	say_ret("select goes on", select(pair->fd + 1, &in, NULL, NULL, &limit));
	peer_done();
	put(other, 3);
	peer_get(other, 3);
	peer_put(pair, 3);
	get(pair, 3);
	stays(pair);
}

static void ready_before_a_signal(void)
{
	/* What is ready as a wait begins is told, whatever signals come. */
	struct pair *pair = open_pair();
	struct epoll_event event = {.events = EPOLLIN}, told[2];
	int beside[2], set = epoll_create1(0), interrupted = 0, late = 0;
	uint8_t byte = 1;
	NEED(set >= 0 && pipe(beside) == 0);
	NEED(epoll_ctl(set, EPOLL_CTL_ADD, pair->fd, &event) == 0 && epoll_ctl(set, EPOLL_CTL_ADD, beside[0], &event) == 0);
	storm_start(100, 0);
	for (int i = 0; i < 3000; i++) {
		NEED(epoll_wait(set, told, 2, 0) == 0);
		NEED(write(beside[1], &byte, 1) == 1);
		int n = epoll_wait(set, told, 2, i % 2 ? -1 : 60000);
		interrupted += n < 0 && errno == EINTR;
		late += n == 0;
		NEED(read(beside[0], &byte, 1) == 1);
	}
	storm_end();
	say("interrupted %d, late %d", interrupted, late);
	stays(pair);
}

const struct scene scenes_signal[] = {
	SCENE(eintr_reads),  SCENE(eintr_nothing), SCENE(eintr_restart),         SCENE(eintr_waits),    SCENE(eintr_sends),
	SCENE(mask_in_wait), SCENE(storm_restart), SCENE(storm_eintr),           SCENE(handler_writes), SCENE(jump_out),
	SCENE(cancelled),    SCENE(stopped),       SCENE(ready_before_a_signal), {NULL, NULL},
};
