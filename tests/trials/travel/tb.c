/* t WHERE WHAT: WHERE: exec | child ; WHAT: none | nofile=N | as=MB | landlock | prog=PATH ... ; */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/landlock.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#define NEED(c) ((c) ? (void)0 : (printf("%d: line %d %s: %s\n", getpid(), __LINE__, #c, strerror(errno)), fflush(stdout), _exit(9)))
static double now(void){struct timespec t;clock_gettime(CLOCK_MONOTONIC,&t);return t.tv_sec+t.tv_nsec/1e9;}
static void client(int port)
{
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = port, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	char buf[4096];
	NEED(connect(fd, (void *)&a, sizeof a) == 0);
	for (int i = 0; i < 300; i++) {
		NEED(send(fd, buf, 64, 0) == 64);
		NEED(recv(fd, buf, 64, MSG_WAITALL) == 64);
		if (i % 10 == 0) usleep(2000);
	}
	for (int i = 0; i < 1000; i++) buf[i] = i * 7;
	NEED(send(fd, buf, 1000, 0) == 1000);
	if (getenv("ASLEEP")) { usleep(1000 * atoi(getenv("ASLEEP"))); }
	struct pollfd p = {.fd = fd, .events = POLLIN};
	double t = now();
	int r = poll(&p, 1, 5000);
	ssize_t n = r ? recv(fd, buf, sizeof buf, 0) : -2;
	printf("client: poll %d after %.2f s, recv %zd %s\n", r, now() - t, n, n == -1 ? strerror(errno) : n == 2 ? "right" : "WRONG");
	fflush(stdout);
	_exit(0);
}
static void reader(int fd)
{
	char buf[4096];
	size_t n = 0;
	struct pollfd p = {.fd = fd, .events = POLLIN};
	int avail = -1, bad = 0;
	ioctl(fd, FIONREAD, &avail);
	while (n < 1000) {
		int r = poll(&p, 1, 3000);
		if (r != 1) { printf("reader: FIONREAD %d, %zu bytes, then poll %d after 3 s: HANG\n", avail, n, r); fflush(stdout); return; }
		ssize_t m = recv(fd, buf + n, sizeof buf - n, 0);
		if (m <= 0) { printf("reader: FIONREAD %d, %zu bytes, then recv %zd %s: LOST\n", avail, n, m, m ? strerror(errno) : "end"); fflush(stdout); return; }
		n += m;
	}
	for (int i = 0; i < 1000; i++) bad += buf[i] != (char)(i * 7);
	printf("reader: FIONREAD %d, %zu bytes, %d bad; travel var %s\n", avail, n, bad, getenv("SIDESTEP_TRAVEL") ?: "-");
	fflush(stdout);
	send(fd, "ok", 2, MSG_NOSIGNAL);
}
static void landlock(void)
{
	struct landlock_ruleset_attr attr = {.handled_access_fs = LANDLOCK_ACCESS_FS_READ_FILE | LANDLOCK_ACCESS_FS_READ_DIR | LANDLOCK_ACCESS_FS_EXECUTE};
	int rs = syscall(SYS_landlock_create_ruleset, &attr, sizeof attr, 0);
	NEED(rs >= 0);
	char *paths[] = {"/usr", "/lib", "/lib64", "/etc", "/bin", "/tmp", "/work", "/root", "/dev", NULL};
	for (char **p = paths; *p; p++) {
		struct landlock_path_beneath_attr b = {.allowed_access = attr.handled_access_fs, .parent_fd = open(*p, O_PATH | O_CLOEXEC)};
		if (b.parent_fd < 0) continue;
		NEED(syscall(SYS_landlock_add_rule, rs, LANDLOCK_RULE_PATH_BENEATH, &b, 0) == 0);
		close(b.parent_fd);
	}
	prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
	NEED(syscall(SYS_landlock_restrict_self, rs, 0) == 0);
	close(rs);
}
static void limit(const char *what)
{
	struct rlimit l;
	if (!strncmp(what, "nofile=", 7)) { getrlimit(RLIMIT_NOFILE, &l); l.rlim_cur = atoi(what + 7); NEED(setrlimit(RLIMIT_NOFILE, &l) == 0); }
	if (!strncmp(what, "as=", 3)) { getrlimit(RLIMIT_AS, &l); l.rlim_cur = (rlim_t)atoi(what + 3) << 20; NEED(setrlimit(RLIMIT_AS, &l) == 0); }
	if (!strncmp(what, "fsize=", 6)) { getrlimit(RLIMIT_FSIZE, &l); l.rlim_cur = (rlim_t)atoi(what + 6) << 10; NEED(setrlimit(RLIMIT_FSIZE, &l) == 0); }
	if (!strcmp(what, "landlock")) landlock();
}
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <pthread.h>
static char *args[4];
static char large[1 << 20];
static void *fails(void *x) { memset(large, 'x', sizeof large - 1); for (;;) execl("/proc/self/exe", "t", large, NULL); }

static int runs(void *x) { execv(args[0], args); _exit(3); }
int main(int argc, char **argv)
{
	if (argc > 2 && !strcmp(argv[1], "reader")) { reader(atoi(argv[2])); return 0; }
	if (argc > 2 && !strcmp(argv[1], "hold")) { usleep(300000); return 0; }
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof a;
	int l = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	NEED(bind(l, (void *)&a, len) == 0 && listen(l, 5) == 0 && getsockname(l, (void *)&a, &len) == 0);
	pid_t c = fork();
	if (!c) { close(l); client(a.sin_port); }
	int fd = accept(l, NULL, NULL), avail = 0;
	char buf[4096], number[16];
	for (int i = 0; i < 300; i++) {
		NEED(recv(fd, buf, 64, MSG_WAITALL) == 64);
		NEED(send(fd, buf, 64, 0) == 64);
	}
	for (int i = 0; avail != 1000 && i < 1000; i++) { usleep(1000); ioctl(fd, FIONREAD, &avail); }
	snprintf(number, sizeof number, "%d", fd);
	const char *program = "/proc/self/exe";
	for (int i = 2; i < argc; i++) if (!strncmp(argv[i], "prog=", 5)) program = argv[i] + 5;
	if (!strcmp(argv[1], "exec")) {
		for (int i = 2; i < argc; i++) limit(argv[i]);
		if (getenv("BIG")) { char **e = calloc(70003, 8); extern char **environ; int n = 0; while (environ[n]) e[n] = environ[n], n++; for (; n < 70000; n++) { e[n] = "A="; } e[n] = "LAST=here"; char *a[] = {(char *)program, "reader", number, NULL}; execve(program, a, e); perror("execve"); }
		if (!strchr(program, '/')) execlp(program, program, "reader", number, (char *)NULL);
		execl(program, program, "reader", number, (char *)NULL);
		printf("exec: %s\n", strerror(errno));
		reader(fd);
	} else if (!strcmp(argv[1], "clonevm")) {
		extern char **environ;
		args[0] = (char *)program; args[1] = "reader"; args[2] = number;
		static char stack[1 << 20];
		int p = clone(runs, stack + sizeof stack, CLONE_VM | SIGCHLD, NULL), st;
		NEED(p > 0);
		waitpid(p, &st, 0);
	} else if (!strcmp(argv[1], "sysclone")) {
		int p = syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0), st;
		if (!p) { execl(program, program, "reader", number, (char *)NULL); _exit(1); }
		waitpid(p, &st, 0);
	} else if (!strcmp(argv[1], "sysexec")) {
		char *a[] = {(char *)program, "reader", number, NULL};
		extern char **environ;
		syscall(SYS_execve, program, a, environ);
	} else if (!strcmp(argv[1], "spawn")) {
		extern char **environ;
		char *a[] = {(char *)program, "reader", number, NULL};
		pid_t p; int st;
		NEED(posix_spawn(&p, program, NULL, NULL, a, environ) == 0);
		waitpid(p, &st, 0);
	} else if (!strcmp(argv[1], "rawdup")) {
		int d; asm volatile("syscall" : "=a"(d) : "a"(SYS_dup2), "D"(fd), "S"(0) : "rcx", "r11", "memory");
		execl(program, program, "reader", "0", (char *)NULL);
	} else if (!strcmp(argv[1], "raceexec") || !strcmp(argv[1], "racespawn")) {
		pthread_t t;
		args[0] = (char *)program;
		extern char **environ;
		pthread_create(&t, NULL, fails, NULL);
		usleep(20000);
		for (int i = 0; i < 100 && argv[1][4] == 's'; i++) {
			char *a[] = {"/bin/sh", "-c", "SIDESTEP_DISABLE=1 ls -l /proc/self/fd | grep -q 'memfd:sidestep' && echo LEAKED", NULL};
			pid_t p; int st;
			NEED(posix_spawn(&p, a[0], NULL, NULL, a, environ) == 0);
			waitpid(p, &st, 0);
		}
		execl(program, program, "reader", number, (char *)NULL);
	} else {
		pid_t p = fork();
		if (!p) {
			for (int i = 2; i < argc; i++) limit(argv[i]);
			execl(program, program, "hold", number, (char *)NULL);
			_exit(1);
		}
		int st;
		waitpid(p, &st, 0);
		printf("child ended: %x\n", st);
		reader(fd);
	}
	waitpid(c, NULL, 0);
	return 0;
}
