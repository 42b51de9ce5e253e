/* Connections and processes: fork, vfork, posix_spawn, exec, prefork servers. */
#include "scene.h"

#include <sched.h>

#include <spawn.h>

extern char **environ;
int helper_main(int argc, char **argv);
static uint8_t data[1 << 20];

/* What the program does when it is executed by a scene: @echo FD, @send FD COUNT, @hold FD */
int helper_main(int argc, char **argv)
{
	int fd = argc > 2 ? atoi(argv[2]) : 0;
	uint8_t bytes[4096];
	if (!strcmp(argv[1], "@echo")) {
		for (;;) {
			ssize_t got = recv(fd, bytes, sizeof bytes, 0);
			if (got <= 0)
				return got < 0;
			for (ssize_t at = 0; at < got;) {
				ssize_t wrote = send(fd, bytes + at, (size_t)(got - at), 0);
				if (wrote < 0)
					return 2;
				at += wrote;
			}
		}
	}
	if (!strcmp(argv[1], "@closed"))
		return fcntl(fd, F_GETFD) < 0 && errno == EBADF ? 0 : 1;
	return 9;
}

/* An echo somewhere behind `fd`: what the peer sends comes back to it in full, then the end. */
static void say_echo(struct pair *pair, const char *who, size_t len, size_t piece)
{
	for (size_t done = 0; done < len; done += piece) {
		struct reply reply = peer(pair, ACT_SEND, (int64_t)piece, 0);
		NEED(reply.result == (int64_t)piece);
		reply = peer(pair, ACT_ARRIVED, (int64_t)(done + piece), 0);
		if (reply.result != 1)
			fail("%s: nothing came back after %zu bytes", who, done);
	}
	say("%s echoed %zu bytes", who, len);
}

void say_child(pid_t child)
{
	int status;
	NEED(waitpid(child, &status, 0) == child);
	if (WIFSIGNALED(status))
		say("the child died of signal %d", WTERMSIG(status));
	else
		say("the child exited with %d", WEXITSTATUS(status));
}

static void end_echo(struct pair *pair, pid_t child)
{
	say_reply("the peer shuts down", peer(pair, ACT_SHUTDOWN, SHUT_WR, 0));
	say_child(child);
}

static void child_serves(struct pair *pair)
{
	pid_t child = fork();
	if (child == 0) {
		forget_peer();
		char number[16], *arguments[] = {"scenes", "@echo", number, NULL};
		snprintf(number, sizeof number, "%d", pair->fd);
		_exit(helper_main(3, arguments));
	}
	NEED(close(pair->fd) == 0);
	say_echo(pair, "the child", 1600, 8);
	end_echo(pair, child);
}

static void fork_child_serves(void)
{
	/* A server that forks for each connection: the child uses it, the parent closes it. */
	struct pair *pair = open_pair();
	child_serves(pair);
}

static void fork_parent_serves(void)
{
	struct pair *pair = open_pair();
	int pipes[2];
	NEED(pipe(pipes) == 0);
	pid_t child = fork();
	if (child == 0) {
		forget_peer();
		close(pair->fd);
		close(pipes[1]);
		NEED(read(pipes[0], data, 1) == 0); /* until the parent lets go */
		_exit(0);
	}
	for (int i = 0; i < 100; i++) {
		put(pair, 9);
		peer_get(pair, 9);
		peer_put(pair, 9);
		get(pair, 9);
	}
	stays(pair);
	say_reply("no end because of a child", peer(pair, ACT_POLL, POLLIN | POLLRDHUP, 20));
	NEED(close(pair->fd) == 0);
	say_reply("the end", peer(pair, ACT_RECV_ONCE, 5, 0));
	close(pipes[1]);
	say_child(child);
}

static void fork_child_exits(void)
{
	/* The child has never touched the connection; its exit is no end of it. */
	struct pair *pair = open_pair();
	for (int i = 0; i < 3; i++) {
		pid_t child = fork();
		if (child == 0)
			exit(i);
		say_child(child);
		put(pair, 9);
		peer_get(pair, 9);
		peer_put(pair, 9);
		get(pair, 9);
	}
	say_reply("no end", peer(pair, ACT_POLL, POLLIN | POLLRDHUP, 20));
}

static void fork_last_holder(void)
{
	/* The end comes when the last process has let go. */
	struct pair *pair = open_pair();
	int pipes[2];
	NEED(pipe(pipes) == 0);
	pid_t child = fork();
	if (child == 0) {
		forget_peer();
		close(pipes[1]);
		NEED(read(pipes[0], data, 1) == 0);
		_exit(0);
	}
	close(pipes[0]);
	NEED(close(pair->fd) == 0);
	say_reply("no end while the child holds it", peer(pair, ACT_POLL, POLLIN | POLLRDHUP, 30));
	close(pipes[1]);
	say_child(child);
	say_reply("the end", peer(pair, ACT_RECV_ONCE, 5, 0));
}

static void fork_both_write(void)
{
	enum { EACH = 120, LEN = 16 }; /* all of it fits while nobody reads */
	uint8_t record[LEN];
	int other[2];
	/* both ends here, so that records need not follow the pattern */
	uint16_t port;
	int listener = loopback_listener(choice.family, &port, 0);
	struct sockaddr_storage address;
	socklen_t len = loopback_address(choice.family, port, true, &address);
	other[0] = socket(address.ss_family, SOCK_STREAM, 0);
	NEED(connect(other[0], (struct sockaddr *)&address, len) == 0);
	other[1] = accept(listener, NULL, NULL);
	for (int i = 0; i < 300; i++) {
		NEED(send(other[0], "ping", 4, 0) == 4 && recv(other[1], record, 4, MSG_WAITALL) == 4);
		NEED(send(other[1], "pong", 4, 0) == 4 && recv(other[0], record, 4, MSG_WAITALL) == 4);
	}
	pid_t child = fork();
	if (child == 0) {
		close(other[1]);
		memset(record, 'c', LEN);
		for (int i = 0; i < EACH; i++)
			if (send(other[0], record, LEN, 0) != LEN)
				_exit(1);
		_exit(0);
	}
	int seen[2] = {0}, mixed = 0;
	memset(record, 'p', LEN);
	for (int i = 0; i < EACH; i++)
		NEED(send(other[0], record, LEN, 0) == LEN);
	NEED(close(other[0]) == 0);
	for (;;) {
		ssize_t got = recv(other[1], record, LEN, MSG_WAITALL);
		if (got == 0)
			break;
		NEED(got == LEN);
		for (int i = 1; i < LEN; i++)
			mixed += record[i] != record[0];
		seen[record[0] == 'c']++;
	}
	say("parent %d, child %d, mixed %d", seen[0], seen[1], mixed);
	say_child(child);
}

static void fork_both_read(void)
{
	/* Parent and child read the same connection: each byte goes to one of them. */
	struct pair *pair = open_pair();
	int pipes[2];
	NEED(pipe(pipes) == 0);
	pid_t child = fork();
	uint64_t count = 0, sum = 0, total[2], expected = 0;
	if (child == 0)
		forget_peer();
	else
		peer_now(pair, ACT_SEND_CLOSE, 200000, 700);
	for (;;) {
		ssize_t got = recv(pair->fd, data, 333, 0);
		NEED(got >= 0);
		if (got == 0)
			break;
		for (ssize_t i = 0; i < got; i++)
			sum += data[i];
		count += (uint64_t)got;
	}
	if (child == 0) {
		total[0] = count;
		total[1] = sum;
		NEED(write(pipes[1], total, sizeof total) == sizeof total);
		_exit(0);
	}
	NEED(read(pipes[0], total, sizeof total) == sizeof total);
	enum { SENT = 200000 };
	fill_pattern(KEY_IN, pair->in, data, SENT);
	for (int i = 0; i < SENT; i++)
		expected += data[i];
	say("together %lu bytes, %s", (unsigned long)(count + total[0]),
	    sum + total[1] == expected ? "the right ones" : "WRONG ONES");
	say_reply("sent", peer_done());
	say_child(child);
}

static void fork_turns(void)
{
	/* Parent and child speak in turn on the same connection. */
	struct pair *pair = open_pair();
	int down[2], up[2];
	NEED(pipe(down) == 0 && pipe(up) == 0);
	pid_t child = fork();
	if (child == 0) {
		forget_peer();
		close(down[1]);
		while (read(down[0], pair, sizeof *pair) == sizeof *pair) {
			put(pair, 6);
			get(pair, 6);
			NEED(write(up[1], pair, sizeof *pair) == sizeof *pair);
		}
		_exit(0);
	}
	for (int i = 0; i < 50; i++) {
		peer_now(pair, ACT_ECHO, 2, 6);
		put(pair, 6);
		get(pair, 6);
		NEED(write(down[1], pair, sizeof *pair) == sizeof *pair);
		NEED(read(up[0], pair, sizeof *pair) == sizeof *pair);
		struct reply reply = peer_done();
		NEED(reply.result == 2 && !reply.wrong);
	}
	say("fifty turns");
	NEED(close(down[1]) == 0);
	say_child(child);
	put(pair, 6);
	peer_get(pair, 6);
}

static void fork_before_first_byte(void)
{
	/* Accepted or connected, then forked at once; everything happens in the child. */
	struct pair *pair = open_pair_raw();
	child_serves(pair);
}

static void fork_child_killed(void)
{
	/* A child dies in the middle of a write; the parent and the peer go on. */
	struct pair *pair = open_pair();
	for (int i = 0; i < 5; i++) {
		pid_t child = fork();
		if (child == 0) {
			forget_peer();
			recv(pair->fd, data, 10, 0);
			_exit(1);
		}
		await_asleep(child, child);
		NEED(kill(child, SIGKILL) == 0);
		say_child(child);
		peer_put(pair, 9);
		get(pair, 9);
		put(pair, 9);
		peer_get(pair, 9);
	}
}

static pid_t spawn_cat(struct pair *pair, char **environment)
{
	posix_spawn_file_actions_t actions;
	char *arguments[] = {"cat", NULL};
	pid_t child;
	NEED(posix_spawn_file_actions_init(&actions) == 0);
	NEED(posix_spawn_file_actions_adddup2(&actions, pair->fd, 0) == 0);
	NEED(posix_spawn_file_actions_adddup2(&actions, pair->fd, 1) == 0);
	NEED(posix_spawn_file_actions_addclosefrom_np(&actions, 3) == 0);
	NEED(posix_spawnp(&child, "cat", &actions, NULL, arguments, environment) == 0);
	NEED(posix_spawn_file_actions_destroy(&actions) == 0);
	return child;
}

static void spawn_cat_on_socket(void)
{
	struct pair *pair = open_pair();
	pid_t child = spawn_cat(pair, environ);
	NEED(close(pair->fd) == 0);
	say_echo(pair, "cat", 1600, 8);
	end_echo(pair, child);
}

static void spawn_stranger(void)
{
	/* A program that does not load the shim gets the socket. */
	struct pair *pair = open_pair();
	char *nothing[] = {"PATH=/usr/bin:/bin", NULL};
	pid_t child = spawn_cat(pair, nothing);
	NEED(close(pair->fd) == 0);
	say_echo(pair, "cat", 1600, 8);
	end_echo(pair, child);
}

static void spawn_and_return(void)
{
	/* The socket is lent to a program and comes back. */
	struct pair *pair = open_pair();
	for (int i = 0; i < 2; i++) {
		char command[64];
		snprintf(command, sizeof command, "head -c 8 >/dev/null <&%d; printf abcdefgh >&%d", pair->fd, pair->fd);
		peer_put(pair, 8);
		arrived(pair, 8);
		pair->in += 8;
		say_ret("system", system(command));
		say_reply("arrived", peer(pair, ACT_ARRIVED, 8, 0));
		struct reply reply = peer(pair, ACT_RECV, 8, 0);
		say("the peer got what the program wrote: %d", reply.wrong == 1);
		break; /* the peer's place in the pattern is lost with bytes that do not follow it */
	}
	peer_put(pair, 8);
	get(pair, 8);
}

/* A stream of popen() that reads, to its end. */
static void say_lines(FILE *stream)
{
	char line[64];

	NEED(stream);
	while (fgets(line, sizeof line, stream))
		say("line: %.*s", (int)strcspn(line, "\n"), line);
}

static void shell_results(void)
{
	/* What system() and popen() give back, and what their children have of ours, while they inherit the socket. */
	struct pair *pair = open_pair();
	sigset_t blocked;

	say_ret("true", system("true"));
	say_ret("exit 3", system("exit 3"));
	say_ret("killed", system("kill -9 $$"));
	say_ret("not found", system("exec nothing-of-that-name 2>/dev/null"));
	say_ret("a shell", system(NULL) != 0);
	FILE *reads = popen("echo one; echo two; exit 5", "r");
	say_lines(reads);
	say_ret("pclose", pclose(reads));
	/* popen(3): a child does not have the streams of earlier ones, so this one ends with its own */
	FILE *writes = popen("cat >/dev/null; exit 6", "w"), *later = popen("kill -9 $$", "re");
	say("two streams: %d, the later closes on exec: %d, the earlier: %d", writes && later,
	    fcntl(fileno(later), F_GETFD), fcntl(fileno(writes), F_GETFD));
	NEED(fputs("bytes", writes) >= 0);
	say_ret("pclose", pclose(writes));
	say_ret("bad mode", popen("true", "rw") == NULL);
	say("its error: %s", strerror(errno));
	reads = popen("exit 7", "r");
	int (*volatile end)(FILE *) = fclose; /* which compilers warn of */
	say_ret("fclose waits", end(reads) == 7 << 8);
	signal(SIGINT, SIG_IGN);
	say_ret("ignored", system("kill -INT $$; exit 4"));
	signal(SIGINT, SIG_DFL);
	say_ret("by default", system("kill -INT $$; exit 4") == SIGINT);
	sigprocmask(SIG_BLOCK, NULL, &blocked);
	say("SIGCHLD is blocked: %d", sigismember(&blocked, SIGCHLD));
	say_ret("pclose", pclose(later) != 0);
	peer_put(pair, 8);
	get(pair, 8);
}

static void spawn_attributes(void)
{
	/* A child without actions, whose attributes change its signals and its group; and one that is not there. */
	struct pair *pair = open_pair();
	char *argv[] = {"sh", "-c", "kill -INT $$; kill -TERM $$; exit 4", NULL};
	posix_spawnattr_t attributes;
	sigset_t set;
	pid_t child;

	signal(SIGINT, SIG_IGN);
	NEED(posix_spawn(&child, "/bin/sh", NULL, NULL, argv, environ) == 0);
	say_child(child);
	NEED(posix_spawnattr_init(&attributes) == 0);
	sigemptyset(&set);
	sigaddset(&set, SIGINT);
	NEED(posix_spawnattr_setsigdefault(&attributes, &set) == 0);
	NEED(posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETPGROUP) == 0);
	NEED(posix_spawnp(&child, "sh", NULL, &attributes, argv, environ) == 0);
	say_child(child);
	sigaddset(&set, SIGTERM);
	NEED(posix_spawnattr_setsigmask(&attributes, &set) == 0);
	NEED(posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK) == 0);
	NEED(posix_spawn(&child, "/bin/sh", NULL, &attributes, argv, environ) == 0);
	say_child(child);
	signal(SIGINT, SIG_DFL);
	say_ret("not there", posix_spawn(&child, "/nonexistent", NULL, NULL, argv, environ));
	peer_put(pair, 8);
	get(pair, 8);
}

static void vfork_exec(void)
{
	struct pair *pair = open_pair();
	pid_t child = vfork();
	if (child == 0) {
		dup2(pair->fd, 0);
		dup2(pair->fd, 1);
		execlp("cat", "cat", (char *)NULL);
		_exit(127);
	}
	NEED(close(pair->fd) == 0);
	say_echo(pair, "cat", 1600, 8);
	end_echo(pair, child);
}

static void vfork_exec_fails(void)
{
	struct pair *pair = open_pair();
	pid_t child = vfork();
	if (child == 0) {
		dup2(pair->fd, 0);
		execl("/nonexistent", "nonexistent", (char *)NULL);
		_exit(127);
	}
	say_child(child);
	for (int i = 0; i < 20; i++) {
		put(pair, 9);
		peer_get(pair, 9);
		peer_put(pair, 9);
		get(pair, 9);
	}
}

static void exec_keeps(void)
{
	/* fork, exec of a program that goes on using the connection by its number. */
	struct pair *pair = open_pair();
	pid_t child = fork();
	if (child == 0) {
		char number[16];
		forget_peer();
		snprintf(number, sizeof number, "%d", pair->fd);
		execl("/proc/self/exe", "scenes", "@echo", number, (char *)NULL);
		_exit(127);
	}
	NEED(close(pair->fd) == 0);
	say_echo(pair, "the program", 1600, 8);
	end_echo(pair, child);
}

static void exec_keeps_stranger(void)
{
	struct pair *pair = open_pair();
	pid_t child = fork();
	if (child == 0) {
		char number[16];
		char *nothing[] = {NULL};
		forget_peer();
		snprintf(number, sizeof number, "%d", pair->fd);
		execle("/proc/self/exe", "scenes", "@echo", number, (char *)NULL, nothing);
		_exit(127);
	}
	NEED(close(pair->fd) == 0);
	say_echo(pair, "the program", 1600, 8);
	end_echo(pair, child);
}

static void exec_in_flight(void)
{
	/* Bytes wait in both directions when the program is replaced. */
	struct pair *pair = open_pair();
	peer_put(pair, 800);
	arrived(pair, 800);
	put(pair, 400);
	pid_t child = fork();
	if (child == 0) {
		char number[16];
		forget_peer();
		snprintf(number, sizeof number, "%d", pair->fd);
		execl("/proc/self/exe", "scenes", "@echo", number, (char *)NULL);
		_exit(127);
	}
	NEED(close(pair->fd) == 0);
	say_reply("arrived", peer(pair, ACT_ARRIVED, 1200, 0));
	peer_get(pair, 400);
	say_reply("the peer sends on", peer(pair, ACT_SEND, 200, 0));
	say_reply("arrived", peer(pair, ACT_ARRIVED, 1000, 0));
	end_echo(pair, child);
}

static void exec_closes(void)
{
	struct pair *pair = open_pair();
	NEED(fcntl(pair->fd, F_SETFD, FD_CLOEXEC) == 0);
	pid_t child = fork();
	if (child == 0) {
		char number[16];
		forget_peer();
		snprintf(number, sizeof number, "%d", pair->fd);
		execl("/proc/self/exe", "scenes", "@closed", number, (char *)NULL);
		_exit(127);
	}
	say_child(child);
	say_reply("no end", peer(pair, ACT_POLL, POLLIN | POLLRDHUP, 20));
	put(pair, 8);
	peer_get(pair, 8);
	peer_put(pair, 8);
	get(pair, 8);
}

static void prefork(void)
{
	/* Children made before there is a connection accept on one listener. */
	uint16_t port;
	int listener = loopback_listener(choice.family, &port, 0), done[2];
	pid_t children[2];
	struct sockaddr_storage address;
	socklen_t len = loopback_address(choice.family, port, true, &address);
	NEED(pipe(done) == 0);
	for (int i = 0; i < 2; i++) {
		children[i] = fork();
		if (children[i] == 0) {
			close(done[1]);
			for (int j = 0; j < 3; j++) {
				int fd = accept(listener, NULL, NULL);
				ssize_t got;
				NEED(fd >= 0);
				while ((got = read(fd, data, 4096)) > 0)
					NEED(write(fd, data, (size_t)got) == got);
				NEED(got == 0);
				close(fd);
			}
			NEED(read(done[0], data, 1) == 0);
			_exit(0);
		}
	}
	long right = 0;
	for (int i = 0; i < 6; i++) {
		int fd = socket(address.ss_family, SOCK_STREAM, 0);
		NEED(connect(fd, (struct sockaddr *)&address, len) == 0);
		for (int j = 0; j < 200; j++) {
			uint8_t out[32], in[32];
			fill_pattern(9, (uint64_t)(i * 1000 + j), out, sizeof out);
			NEED(send(fd, out, sizeof out, 0) == sizeof out);
			NEED(recv(fd, in, sizeof in, MSG_WAITALL) == sizeof in);
			right += !memcmp(out, in, sizeof in);
		}
		close(fd);
	}
	say("right %ld", right);
	close(done[1]);
	for (int i = 0; i < 2; i++)
		say_child(children[i]);
}

static void daemonised(void)
{
	/* fork twice, the parents exit, descriptors closed, and only then it works. */
	uint16_t port;
	int listener = loopback_listener(choice.family, &port, 0);
	struct sockaddr_storage address;
	socklen_t len = loopback_address(choice.family, port, true, &address);
	pid_t child = fork();
	if (child == 0) {
		setsid();
		if (fork() != 0)
			_exit(0);
		NEED(dup2(listener, 4) == 4);
		closefrom(5);
		int fd = accept(4, NULL, NULL);
		ssize_t got;
		while ((got = recv(fd, data, 4096, 0)) > 0)
			NEED(send(fd, data, (size_t)got, 0) == got);
		_exit(0);
	}
	say_child(child);
	int fd = socket(address.ss_family, SOCK_STREAM, 0);
	NEED(connect(fd, (struct sockaddr *)&address, len) == 0);
	long right = 0;
	for (int j = 0; j < 500; j++) {
		NEED(send(fd, &j, sizeof j, 0) == sizeof j);
		NEED(recv(fd, data, sizeof j, MSG_WAITALL) == sizeof j);
		right += !memcmp(data, &j, sizeof j);
	}
	say("right %ld", right);
	NEED(shutdown(fd, SHUT_WR) == 0);
	say_ret("the end", recv(fd, data, 10, 0));
}

static int close_it(void *fd)
{
	close(*(int *)fd);
	return 0;
}

static void cloned(void)
{
	/* A process made past fork() closes its copy; another connection then must not be mixed up with this one. */
	static char stack[65536] __attribute__((aligned(16)));
	struct pair *pair = open_pair();
	pid_t child = clone(close_it, stack + sizeof stack, SIGCHLD, &pair->fd);
	NEED(child > 0 && waitpid(child, NULL, 0) == child);
	child = (pid_t)syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL);
	if (child == 0) {
		close(pair->fd);
		_exit(0);
	}
	NEED(child > 0 && waitpid(child, NULL, 0) == child);
	struct pair *second = open_pair();
	put(pair, 100);
	peer_get(pair, 100);
	put(second, 100);
	peer_get(second, 100);
	peer_put(pair, 50);
	get(pair, 50);
	peer_put(second, 50);
	get(second, 50);
	say("both go on");
}

const struct scene scenes_process[] = {
	SCENE(fork_child_serves),   SCENE(fork_parent_serves),  SCENE(fork_child_exits), SCENE(fork_last_holder),
	SCENE(fork_both_write),     SCENE(fork_both_read),      SCENE(fork_turns),       SCENE(fork_before_first_byte),
	SCENE(fork_child_killed),   SCENE(spawn_cat_on_socket), SCENE(spawn_stranger),   SCENE(cloned),
	SCENE(spawn_and_return),    SCENE(vfork_exec),          SCENE(vfork_exec_fails), SCENE(exec_keeps),
	SCENE(exec_keeps_stranger), SCENE(exec_in_flight),      SCENE(exec_closes),      SCENE(prefork),
	SCENE(daemonised),          SCENE(shell_results),       SCENE(spawn_attributes), {NULL, NULL},
};
