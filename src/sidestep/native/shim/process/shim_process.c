/* shim_process.c - the calls that make or replace processes, end them, or change their user. */
#include "shim_process.h"
#include "shim_number.h"
#include "shim_switch.h"

#include <alloca.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>

/* A vfork child shares our memory: its close() and dup2() would change the parent's table. fork is vfork that does not. */
EXPORT pid_t vfork(void)
{
	return real.fork();
}

ALIAS(__vfork, vfork);

struct cloned {
	int (*run)(void *);
	void *argument;
};

static int cloned_run(void *argument)
{
	struct cloned cloned = *(struct cloned *)argument; /* a copy on the parent's stack, which the child has copied */

	fork_child();
	return cloned.run(cloned.argument);
}

EXPORT int clone(int (*run)(void *), void *stack, int flags, void *argument, ...)
{
	va_list args;
	void *extra[3];

	va_start(args, argument);
	for (int i = 0; i < 3; i++)
		extra[i] = va_arg(args, void *);
	va_end(args);
	if ((flags & CLONE_VFORK) && !(flags & CLONE_THREAD))
		flags &= ~CLONE_VM; /* the behaviour of vfork() */
	if ((flags & CLONE_VM) && !(flags & CLONE_THREAD))
		conns_release(REASON_UNCOVERED,
		              false); /* the child has our thread's own variables, too: we cannot tell the two apart */
	if (!fd_table_len || (flags & CLONE_VM) || !run)
		return real.clone(run, stack, flags, argument, extra[0], extra[1], extra[2]);
	struct cloned cloned = {run, argument};
	fork_prepare();
	int child = real.clone(cloned_run, stack, flags, &cloned, extra[0], extra[1], extra[2]);
	fork_parent();
	return child;
}

/* libc's own ends the parent by an _exit() that we cannot see, as if it still held every connection. */
EXPORT int daemon(int keep_directory, int keep_stdio)
{
	pid_t child = fork();

	if (child < 0)
		return -1;
	if (child > 0)
		_exit(0);
	if (setsid() < 0)
		return -1;
	if (!keep_directory && chdir("/") < 0)
		return -1;
	if (keep_stdio)
		return 0;
	int null = open("/dev/null", O_RDWR);
	if (null < 0)
		return -1;
	for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
		dup2(null, fd);
	if (null > STDERR_FILENO)
		close(null);
	return 0;
}

EXPORT pid_t _Fork(void)
{
	return real.fork(); /* a fork with the handlers that keep the shim's own state right */
}

EXPORT void _exit(int status)
{
	if (fd_table_len && shim_pid == (uint32_t)getpid())
		conn_family_exit();
	real._exit(status);
}

ALIAS(_Exit, _exit);

/* A new program knows nothing of channels: connections that it inherits go back to TCP first. */
void demote_inherited(struct travel *travel, bool leaving)
{
	rpc_before_exec();
	if (leaving)
		passes_settle();
	shim_lock_take();
	sets_before_fork(); /* nor of registrations that the kernel still has */
	shim_lock_drop();
	for (uint32_t fd = 0; fd < atomic_load(&fd_end); fd++) {
		struct conn *conn = conn_get((int)fd);
		if (!conn || real.fcntl64((int)fd, F_GETFD, 0) & FD_CLOEXEC)
			continue;
		if (travel_takes(travel, conn))
			continue;
		conn_demote(conn, (int)fd, REASON_INHERITED, true);
		if (leaving && conn->managed)
			conn_bequeath(conn, (int)fd);
	}
}

/* True if the kernel closes all numbers of a connection on exec. */
static bool closes_on_exec(const struct conn *conn, int fd)
{
	if (!(real.fcntl64(fd, F_GETFD, 0) & FD_CLOEXEC))
		return false;
	for (uint32_t other = 0; word_load(conn->fds) > 1 && other < atomic_load(&fd_end); other++)
		if (conn_get((int)other) == conn && !(real.fcntl64((int)other, F_GETFD, 0) & FD_CLOEXEC))
			return false;
	return true;
}

/*
 * Connections that the kernel closes on exec lose this holder, or get it back. A child that no call of ours has made, or that
 * shares our memory, holds none.
 */
static void hold_on_exec(struct travel *travel, int change)
{
	if (shim_pid != (uint32_t)getpid())
		return;
	sets_on_exec(change < 0);
	if (change < 0)
		new_doorbells_on_exec(1);
	for (uint32_t fd = 0; fd < atomic_load(&fd_end); fd++) {
		struct conn *conn = conn_get((int)fd);
		if (!conn || conn_fd(conn) != (int)fd)
			continue;
		bool closes = closes_on_exec(conn, (int)fd);
		if (change < 0)
			travel_settles(travel, conn, !closes);
		if (change > 0)
			holder_estrange(conn->slot, false);
		if (!closes)
			continue;
		atomic_fetch_add(&conn->slot->holders, (uint32_t)change);
		holder_put(conn->slot, change < 0 ? shim_pid : 0, change < 0 ? 0 : shim_pid);
	}
	if (change > 0)
		new_doorbells_on_exec(-1);
}

static bool executable(const char *path)
{
	KEEP_ERRNO;

	return path && access(path, X_OK) == 0;
}

static bool executable_at(int dir, const char *path, int flags)
{
	char named[32];
	KEEP_ERRNO;

	if (!path || *path || !(flags & AT_EMPTY_PATH))
		return path && faccessat(dir, path, X_OK, 0) == 0;
	snprintf(named, sizeof(named), "/proc/self/fd/%d", dir);
	return access(named, X_OK) == 0;
}

const char *found_by_name(const char *file, char path[PATH_MAX])
{
	const char *at = getenv("PATH");

	if (!at)
		at = "/bin:/usr/bin"; /* confstr(3), _CS_PATH */
	if (!file || strchr(file, '/'))
		return executable(file) ? file : NULL;
	for (;; at++) {
		int len = (int)strcspn(at, ":"); /* 0: the current directory */
		if (snprintf(path, PATH_MAX, "%.*s%s%s", len, at, len ? "/" : "", file) < PATH_MAX && executable(path))
			return path;
		at += len;
		if (!*at)
			return NULL;
	}
}

static const char *proc_fd(int fd, char path[PATH_MAX])
{
	snprintf(path, PATH_MAX, "/proc/self/fd/%d", fd);
	return path;
}

/* The file that execveat(2) means. */
static const char *file_at(int dir, const char *path, int flags, char found[PATH_MAX])
{
	return path && !*path && (flags & AT_EMPTY_PATH) ? proc_fd(dir, found) : path;
}

/* A call that returns only if it fails. */
#define EXEC(name, leaving, dir, program, params, args) \
	EXPORT int name params \
	{ \
		char found[PATH_MAX]; \
		const char *file = program; \
		int list; \
		(void)found; \
		START_FOR(start, dir, file, argv, env); \
		if ((leaving) && unlikely(arena_has_passed()) && (start.loader || !start_has_shim(&start, env_or_none(env)))) \
			passes_strand(); \
		struct travel *travel = travel_begin(&start, argv, env, &list); \
		demote_inherited(travel, leaving); \
		hold_on_exec(travel, -1); \
		travel_go(travel, list, &env, alloca(travel_room(travel, env))); \
		int result = start.loader ? real.execve(start.loader, argv, env) : real.name args; \
		travel_stay(travel, list); \
		hold_on_exec(NULL, 1); \
		return result; \
	}
EXEC(execve, executable(path), AT_FDCWD, path, (const char *path, char *const *argv, char *const *env),
     (path, argv, env))
EXEC(execvpe, file, AT_FDCWD, found_by_name(name, found), (const char *name, char *const *argv, char *const *env),
     (name, argv, env))
EXEC(execveat, executable_at(dir, path, flags), dir, file_at(dir, path, flags, found),
     (int dir, const char *path, char *const *argv, char *const *env, int flags), (dir, path, argv, env, flags))
EXEC(fexecve, executable_at(fd, "", AT_EMPTY_PATH), AT_FDCWD, proc_fd(fd, found),
     (int fd, char *const *argv, char *const *env), (fd, argv, env))

long execute_bare(int dir, const char *path, char *const argv[], char *const env[], int flags)
{
	char found[PATH_MAX];
	START_FOR(start, dir, file_at(dir, path, flags, found), argv, env);
	const char *file = start.loader;
	if (!file && dir == AT_FDCWD && !flags)
		file = path; /* execve(2) stays what it is: sandboxes, and emulators, may know no other */
	int result = file ? real.execve(file, argv, env) : real.execveat(dir, path, argv, env, flags);
	return result < 0 ? -errno : result;
}

EXPORT int execv(const char *path, char *const argv[])
{
	return execve(path, argv, environ);
}

EXPORT int execvp(const char *file, char *const argv[])
{
	return execvpe(file, argv, environ);
}

/* The l forms: libc's own would call its internal execve. */
#define COLLECT(list, first, last, argv) \
	size_t count = 1; \
	va_start(list, first); \
	while (va_arg(list, char *)) \
		count++; \
	va_end(list); \
	char **argv = alloca((count + 1) * sizeof(char *)); \
	va_start(list, first); \
	argv[0] = (char *)first; \
	for (size_t i = 1; i <= count; i++) \
		argv[i] = va_arg(list, char *); \
	last; \
	va_end(list)

EXPORT int execl(const char *path, const char *first, ...)
{
	va_list list;

	COLLECT(list, first, (void)0, argv);
	return execve(path, argv, environ);
}

EXPORT int execlp(const char *file, const char *first, ...)
{
	va_list list;

	COLLECT(list, first, (void)0, argv);
	return execvpe(file, argv, environ);
}

EXPORT int execle(const char *path, const char *first, ...)
{
	va_list list;
	char *const *env;

	COLLECT(list, first, env = va_arg(list, char *const *), argv);
	return execve(path, argv, env);
}

/*
 * Called before root drops its rights, or loses sight of the provider's socket: the provider must know us by the user that
 * started us.
 */
#define CHANGES_USER(name, params, args) \
	EXPORT int name params \
	{ \
		if (fd_table_len) \
			rpc_ensure(); \
		return real.name args; \
	}
CHANGES_USER(setuid, (uid_t uid), (uid))
CHANGES_USER(chroot, (const char *path), (path))
CHANGES_USER(seteuid, (uid_t uid), (uid))
CHANGES_USER(setreuid, (uid_t ruid, uid_t euid), (ruid, euid))
CHANGES_USER(setresuid, (uid_t ruid, uid_t euid, uid_t suid), (ruid, euid, suid))
