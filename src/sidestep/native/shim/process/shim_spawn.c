/*
 * shim_spawn.c - programs that are started beside this one: posix_spawn, system, popen.
 *
 * libc makes these children within itself. Connections that they inherit and that can go on by ring in them (shim_travel.c) need
 * a child that is known as a holder. So where all can, the child is made by our fork and executes by our exec. Otherwise libc
 * makes it, and what it inherits is lent: TCP carries it until nobody else holds it.
 */
#include "shim_process.h"
#include "shim_switch.h"
#include "shim_number.h"
#include "shim_tcp_wait.h"

#include <fcntl.h>
#include <paths.h>
#include <spawn.h>
#include <sys/wait.h>

/* Lent sockets are not looked for until the new program is there to be found, or the call has failed. */
#define INHERITING bool __attribute__((cleanup(inherit_end), unused))
static bool inherit_begin(void)
{
	inheriting_begin();
	demote_inherited(NULL, false);
	return true;
}

static void inherit_end(bool *inherited)
{
	(void)inherited;
	inheriting_end();
}

/* posix_spawn makes its child inside libc; a socket without FD_CLOEXEC, or named by an action, is inherited by it. */
EXPORT int posix_spawn_file_actions_adddup2(posix_spawn_file_actions_t *actions, int fd, int to)
{
	struct conn *conn = conn_get(fd);

	if (conn) {
		conn_leave_to_stranger(conn, fd, REASON_PASSED); /* the child is to read it */
	}
	return real.posix_spawn_file_actions_adddup2(actions, fd, to);
}

/* ---- children of our own ---- */
static bool travels(const char *path, char *const *argv, char *const *env)
{
	START_FOR(start, AT_FDCWD, path, argv, env);
	return path && travel_all(&start, argv, env);
}

/*
 * The end of a child of ours. waitpid(2) sleeps without a look at peers, and the child may wait for bytes that this process
 * is to send again. So the wait sleeps on the child's descriptor, which reports its end alone.
 */
static pid_t wait_for(pid_t pid, int *status)
{
	struct pollfd fds[2] = {{.fd = own_fd(real.pidfd_open(pid, 0)), .events = POLLIN}};
	pid_t ended;

	while (fds[0].fd >= 0 && tcp_wait_poll(fds, 1, INT64_MAX, self.signals, NULL) < 0 && errno == EINTR)
		; /* a signal's handler has run */
	own_fd_close(fds[0].fd);
	do
		ended = waitpid(pid, status, 0);
	while (ended < 0 && errno == EINTR);
	return ended;
}

/* Handlers are this program's: what comes before the exec waits for it, and is then as that program has it. */
static void handlers_reset(void)
{
	struct sigaction now, initial = {.sa_handler = SIG_DFL};

	for (int signal = 1; signal < _NSIG; signal++)
		if (sigaction(signal, NULL, &now) == 0 && now.sa_handler != SIG_IGN && now.sa_handler != SIG_DFL)
			sigaction(signal, &initial, NULL);
}

/*
 * Executes a program in a child, which calls `prepare` first, and has `mask` then (NULL: the caller's). The child's number; -1, with
 * errno: it could not be executed.
 */
static pid_t child_start(const char *path, char *const *argv, char *const *env, const sigset_t *mask,
                         int (*prepare)(const void *), const void *argument)
{
	int report[2], failed = 0, status;
	sigset_t all, before;

	if (real.pipe2(report, O_CLOEXEC) < 0)
		return -1;
	report[0] = own_fd(report[0]);
	report[1] = own_fd(report[1]);
	sigfillset(&all);
	pthread_sigmask(SIG_BLOCK, &all, &before);
	fork_keeps(report[1]);
	pid_t pid = report[0] < 0 || report[1] < 0 ? -1 : fork();
	if (pid == 0) {
		handlers_reset();
		failed = prepare(argument);
		pthread_sigmask(SIG_SETMASK, mask ? mask : &before, NULL);
		if (!failed) {
			execve(path, argv, env);
			failed = errno;
		}
		raw_write(report[1], &failed, sizeof(failed));
		_exit(127);
	}
	const int saved = errno;
	fork_keeps(0);
	own_fd_close(report[1]);
	if (pid > 0 && real.read(report[0], &failed, sizeof(failed)) == sizeof(failed)) {
		wait_for(pid, &status);
		pid = -1;
	} else {
		failed = saved;
	}
	own_fd_close(report[0]);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	errno = failed;
	return pid;
}

/* ---- posix_spawn ---- */
#define KNOWN_FLAGS \
	(POSIX_SPAWN_RESETIDS | POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSIGMASK | \
	 POSIX_SPAWN_USEVFORK | POSIX_SPAWN_SETSID)

static short flags_of(const posix_spawnattr_t *attributes)
{
	short flags = 0;

	if (attributes)
		posix_spawnattr_getflags(attributes, &flags);
	return flags;
}

/* posix_spawn(3): the attributes, in the order in which libc applies them; the mask comes last. */
static int spawn_prepare(const void *argument)
{
	const posix_spawnattr_t *attributes = argument;
	const short flags = flags_of(attributes);
	sigset_t set;
	pid_t group;

	if (flags & POSIX_SPAWN_SETSIGDEF) {
		posix_spawnattr_getsigdefault(attributes, &set);
		for (int signal = 1; signal < _NSIG; signal++)
			if (sigismember(&set, signal) > 0)
				sigaction(signal, &(struct sigaction){.sa_handler = SIG_DFL}, NULL);
	}
	if ((flags & POSIX_SPAWN_SETSID) && setsid() < 0)
		return errno;
	if ((flags & POSIX_SPAWN_SETPGROUP) && (posix_spawnattr_getpgroup(attributes, &group) || setpgid(0, group) < 0))
		return errno;
	if ((flags & POSIX_SPAWN_RESETIDS) && (seteuid(getuid()) < 0 || setegid(getgid()) < 0))
		return errno;
	return 0;
}

/* A child that libc would make. -1: it is to. Else as posix_spawn(). */
static int spawn_here(pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions,
                      const posix_spawnattr_t *attributes, char *const *argv, char *const *env)
{
	KEEP_ERRNO;

	/* the actions are libc's own knowledge */
	if (actions || (flags_of(attributes) & ~KNOWN_FLAGS) || !travels(path, argv, env))
		return -1;
	sigset_t mask;
	const bool masked = flags_of(attributes) & POSIX_SPAWN_SETSIGMASK;
	if (masked)
		posix_spawnattr_getsigmask(attributes, &mask);
	pid_t child = child_start(path, argv, env, masked ? &mask : NULL, spawn_prepare, attributes);
	if (child < 0)
		return errno;
	if (pid)
		*pid = child;
	return 0;
}

#define SPAWN(name, program) \
	EXPORT int name(pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions, \
	                const posix_spawnattr_t *attributes, char *const *argv, char *const *env) \
	{ \
		char found[PATH_MAX]; \
		const char *file = program; \
		(void)found; \
		int here = spawn_here(pid, file, actions, attributes, argv, env); \
		if (here >= 0) \
			return here; \
		START_FOR(start, AT_FDCWD, file, argv, env); \
		INHERITING inherited = inherit_begin(); \
		return start.loader ? real.posix_spawn(pid, start.loader, actions, attributes, argv, env) \
		                    : real.name(pid, path, actions, attributes, argv, env); \
	}
SPAWN(posix_spawn, path)
SPAWN(posix_spawnp, found_by_name(path, found))

/* ---- the shell ---- */
#define SHELL(command) ((char *const[]){"sh", "-c", "--", (char *)(command), NULL})

/* The command that libc's shell is to run. */
#define COMMAND char *__attribute__((cleanup(command_free)))
static char *command_for(const char *command)
{
	struct start start;

	return command && start_differs(&start, AT_FDCWD, _PATH_BSHELL, NULL, environ) ? command_carrying(&start, command)
	                                                                               : NULL;
}

static void command_free(char **command)
{
	free(*command);
}

/* system(3): the caller ignores these two while it waits, whichever of its threads comes first and leaves last. */
static struct {
	pthread_mutex_t lock;
	int users;
	struct sigaction interrupt, quit;
} ignoring = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void ignore(void)
{
	struct sigaction ignored = {.sa_handler = SIG_IGN};

	pthread_mutex_lock(&ignoring.lock);
	if (!ignoring.users++) {
		sigaction(SIGINT, &ignored, &ignoring.interrupt);
		sigaction(SIGQUIT, &ignored, &ignoring.quit);
	}
	pthread_mutex_unlock(&ignoring.lock);
}

static void ignore_over(void)
{
	pthread_mutex_lock(&ignoring.lock);
	if (!--ignoring.users) {
		sigaction(SIGINT, &ignoring.interrupt, NULL);
		sigaction(SIGQUIT, &ignoring.quit, NULL);
	}
	pthread_mutex_unlock(&ignoring.lock);
}

struct system {
	pid_t pid;
	sigset_t mask;
};

/* The child has these two as the caller had them; a handler is the default there. */
static int system_prepare(const void *argument)
{
	const struct sigaction *const was[] = {&ignoring.interrupt, &ignoring.quit};

	(void)argument;
	for (int i = 0; i < 2; i++)
		if (was[i]->sa_handler != SIG_IGN)
			sigaction(i ? SIGQUIT : SIGINT, &(struct sigaction){.sa_handler = SIG_DFL}, NULL);
	return 0;
}

static void system_cancelled(void *argument)
{
	struct system *running = argument;
	int status;

	kill(running->pid, SIGKILL);
	wait_for(running->pid, &status);
	ignore_over();
	pthread_sigmask(SIG_SETMASK, &running->mask, NULL);
}

static int system_here(const char *command)
{
	struct system running;
	volatile int status = -1; /* live across the cleanup handler's setjmp */
	sigset_t children;

	sigemptyset(&children);
	sigaddset(&children, SIGCHLD);
	ignore();
	pthread_sigmask(SIG_BLOCK, &children, &running.mask);
	running.pid = child_start(_PATH_BSHELL, SHELL(command), environ, &running.mask, system_prepare, NULL);
	if (running.pid > 0) {
		int ended = -1;
		pthread_cleanup_push(system_cancelled, &running);
		wait_for(running.pid, &ended);
		pthread_cleanup_pop(0);
		status = ended;
	}
	const int failed = errno;
	ignore_over();
	pthread_sigmask(SIG_SETMASK, &running.mask, NULL);
	errno = failed;
	return status;
}

EXPORT int system(const char *command)
{
	if (!command)
		return real.system(command);
	if (travels(_PATH_BSHELL, SHELL(command), environ))
		return system_here(command);
	COMMAND carrying = command_for(command);
	INHERITING inherited = inherit_begin();
	return real.system(carrying ? carrying : command);
}

/* Streams of popen() whose child is ours. */
struct piped {
	FILE *stream;
	pid_t pid;
	struct piped *next;
};
static struct piped *all_piped;
static pthread_mutex_t piped_lock = PTHREAD_MUTEX_INITIALIZER;

struct popening {
	int end, to; /* the child's end of the pipe, and the stream that it becomes */
};

static int popen_prepare(const void *argument)
{
	const struct popening *opening = argument;

	for (struct piped *piped = all_piped; piped; piped = piped->next) /* popen(3): of earlier calls */
		close(fileno(piped->stream));
	if (opening->end == opening->to)
		return real.fcntl64(opening->end, F_SETFD, 0) < 0 ? errno : 0;
	return dup2(opening->end, opening->to) < 0 ? errno : 0;
}

static FILE *popen_here(const char *command, const char *mode)
{
	const bool reads = strchr(mode, 'r');
	struct piped *piped = malloc(sizeof(*piped));
	int ends[2];

	if (!piped || pipe2(ends, O_CLOEXEC) < 0) {
		free(piped);
		return NULL;
	}
	const int ours = reads ? ends[0] : ends[1], theirs = reads ? ends[1] : ends[0];
	struct popening child = {theirs, reads ? STDOUT_FILENO : STDIN_FILENO};
	*piped = (struct piped){.stream = fdopen(ours, reads ? "r" : "w"), .pid = -1};
	pthread_mutex_lock(&piped_lock);
	if (piped->stream)
		piped->pid = child_start(_PATH_BSHELL, SHELL(command), environ, NULL, popen_prepare, &child);
	const int failed = errno;
	if (piped->pid > 0) {
		piped->next = all_piped;
		all_piped = piped;
	}
	pthread_mutex_unlock(&piped_lock);
	close(theirs);
	if (piped->pid > 0) {
		if (!strchr(mode, 'e'))
			real.fcntl64(ours, F_SETFD, 0);
		return piped->stream;
	}
	if (piped->stream)
		fclose(piped->stream);
	else
		close(ours);
	free(piped);
	errno = failed;
	return NULL;
}

/* True if it names one direction, and nothing unknown: popen(3). */
static bool is_mode(const char *mode)
{
	return !mode[strspn(mode, "rwe")] && !strchr(mode, 'r') != !strchr(mode, 'w');
}

EXPORT FILE *popen(const char *command, const char *mode)
{
	if (!is_mode(mode)) { /* a refusal before anything is lent */
		errno = EINVAL;
		return NULL;
	}
	if (travels(_PATH_BSHELL, SHELL(command), environ))
		return popen_here(command, mode);
	COMMAND carrying = command_for(command);
	INHERITING inherited = inherit_begin();
	FILE *stream = real.popen(carrying ? carrying : command, mode);
	if (stream)
		fd_new(fileno(stream));
	return stream;
}

static struct piped *piped_take(FILE *stream)
{
	struct piped **at = &all_piped;

	pthread_mutex_lock(&piped_lock);
	while (*at && (*at)->stream != stream)
		at = &(*at)->next;
	struct piped *piped = *at;
	if (piped)
		*at = piped->next;
	pthread_mutex_unlock(&piped_lock);
	return piped;
}

EXPORT int pclose(FILE *stream)
{
	struct piped *piped = likely(!all_piped) ? NULL : piped_take(stream);
	int status = -1;

	if (!piped)
		return real.pclose(stream);
	pid_t pid = piped->pid;
	free(piped);
	real.fclose(stream);
	return wait_for(pid, &status) < 0 ? -1 : status;
}

/* libc's own ends a stream of popen() as pclose() does. */
EXPORT int fclose(FILE *stream)
{
	return likely(!all_piped) ? real.fclose(stream) : pclose(stream);
}

ALIAS(_IO_popen, popen);
ALIAS(_IO_pclose, pclose);
ALIAS(_IO_fclose, fclose);
