/* Children by clone3(2) as clone(2) cannot make them: what they and their parent see is the same with the loader as without. */
#include <errno.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static long call(long number, const void *a, const void *b, const void *c)
{
	long result;

	__asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
	return result;
}

/* A child on its parent's stack must not return from where it begins. */
static inline __attribute__((always_inline)) void child_run(char *const argv[], char *const envp[])
{
	call(SYS_execve, argv[0], argv, envp);
	call(SYS_exit, (const void *)9, NULL, NULL);
	__builtin_unreachable();
}

static void tell(const char *name, uint64_t flags, struct clone_args with, size_t size)
{
	static int pidfd, tid;
	static char *argv[] = {"/proc/self/exe", "child", NULL}, *envp[] = {NULL};
	int status = 0;

	pidfd = tid = -1;
	with.flags = flags;
	with.exit_signal = SIGCHLD;
	with.pidfd = (uintptr_t)&pidfd;
	with.parent_tid = (uintptr_t)&tid;
	fflush(stdout);
	long child = call(SYS_clone3, &with, (const void *)size, NULL);
	if (child == 0)
		child_run(argv, envp);
	if (child < 0) {
		printf("%s: %s\n", name, strerror((int)-child));
		return;
	}
	waitpid((pid_t)child, &status, 0);
	printf("%s: exit %d, pidfd %d, number %d\n", name, WIFEXITED(status) ? WEXITSTATUS(status) : -1,
	       fcntl(pidfd, F_GETFD), tid == child);
	close(pidfd);
}

static int child(void)
{
	char ours[64] = "", parents[64] = "", path[64];

	snprintf(path, sizeof(path), "/proc/%d/ns/time", (int)getppid());
	if (readlink("/proc/self/ns/time", ours, sizeof(ours) - 1) < 0 || readlink(path, parents, sizeof(parents) - 1) < 0)
		return 3;
	return strcmp(ours, parents) == 0 ? 7 : 8;
}

int main(int argc, char **argv)
{
	(void)argv;
	if (argc > 1)
		return child();
	static const uint64_t both = CLONE_PIDFD | CLONE_PARENT_SETTID, share = CLONE_VM | CLONE_VFORK;
	const size_t size = sizeof(struct clone_args);
	struct {
		struct clone_args known;
		uint64_t more;
	} longer = {.more = 1};
	pid_t number = 0x3fffff;
	struct clone_args numbered = {.set_tid = (uintptr_t)&number, .set_tid_size = 1};
	struct clone_args nowhere = {.cgroup = (uint64_t)open("/proc/self", O_RDONLY | O_DIRECTORY)};

	tell("both", both, (struct clone_args){0}, size);
	tell("both, in our memory", both | share, (struct clone_args){0}, size);
	tell("time", both | CLONE_NEWTIME, (struct clone_args){0}, size);
	tell("time, in our memory", both | CLONE_NEWTIME | share, (struct clone_args){0}, size);
	tell("number", both, numbered, size);
	tell("number, in our memory", both | share, numbered, size);
	tell("group", both | CLONE_INTO_CGROUP, nowhere, size);
	tell("group, in our memory", both | CLONE_INTO_CGROUP | share, nowhere, size);
	tell("unknown", both | 1ull << 62, nowhere, size);
	tell("short", both, (struct clone_args){0}, CLONE_ARGS_SIZE_VER0 - 1);
	printf("longer: %ld\n", call(SYS_clone3, &longer, (const void *)sizeof(longer), NULL));
	longer.more = 0;
	longer.known.exit_signal = 1 << 8;
	printf("signal: %ld\n", call(SYS_clone3, &longer, (const void *)sizeof(longer), NULL));
	return 0;
}
