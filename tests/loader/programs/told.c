/* Tells all that a program can know of how it was started, and what it gets when it asks: the same with the loader as without. */
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

static void tell_link(const char *path)
{
	char to[4096];
	ssize_t length = readlink(path, to, sizeof(to) - 1);

	printf("%s -> %.*s\n", path, (int)(length < 0 ? 0 : length), to);
}

static void tell_heap(void)
{
	char *before = (char *)syscall(SYS_brk, 0), *end = before + (1 << 20);

	printf("brk %d", syscall(SYS_brk, end) == (long)end);
	memset(before, 1, 1 << 20);
	printf(" %d", syscall(SYS_brk, before + 4096) == (long)(before + 4096));
	printf(" %d", syscall(SYS_brk, end) == (long)end);
	printf(" zero %d", before[4096] == 0 && end[-1] == 0);
	printf(" refused %d\n", syscall(SYS_brk, (char *)1) == (long)end);
}

static void tell_limits(void)
{
	struct rlimit limit;

	for (int i = 0; i < RLIM_NLIMITS; i++)
		if (getrlimit(i, &limit) == 0)
			printf("limit %d: %llx %llx\n", i, (unsigned long long)limit.rlim_cur, (unsigned long long)limit.rlim_max);
}

static void tell_signals(void)
{
	struct sigaction act;
	sigset_t mask;

	sigprocmask(SIG_BLOCK, NULL, &mask);
	for (int i = 1; i < 32; i++)
		if (sigaction(i, NULL, &act) == 0 && (act.sa_handler != SIG_DFL || sigismember(&mask, i)))
			printf("signal %d: %s%s\n", i, act.sa_handler == SIG_IGN ? "ignored" : "handled",
			       sigismember(&mask, i) ? " blocked" : "");
}

#if defined(__x86_64__)
/* Whether the CPU knows that registers are empty above what SSE sees, as vzeroupper leaves them: else SSE is slow. */
static void tell_vectors(void)
{
	unsigned a = 0, b, c, d, before, after;

	__builtin_cpu_init();
	if (!__builtin_cpu_supports("avx") || !__get_cpuid_count(0xd, 1, &a, &b, &c, &d) || !(a & 4)) /* XGETBV of XINUSE */
		return;
	__asm__ volatile("vzeroupper\n\txgetbv" : "=a"(before), "=d"(d) : "c"(1));
	__asm__ volatile(
		"vzeroupper\n\txorl %%edi, %%edi\n\txorl %%esi, %%esi\n\txorl %%edx, %%edx\n\tmovl %2, %%eax\n\tsyscall\n\t"
		"testq %%rax, %%rax\n\tmovl $1, %%ecx\n\txgetbv"
		: "=a"(after), "=&d"(d)
		: "i"(SYS_read)
		: "rcx", "rdi", "rsi", "r11", "memory", "cc");
	printf("upper halves %d %d\n", !(before & 0x44), !(after & 0x44)); /* of AVX, and of AVX-512 */
}
#else
static void tell_vectors(void)
{
}
#endif

static void tell_children(void)
{
	int status;
	pid_t child = fork();

	if (child == 0)
		_exit(7);
	waitpid(child, &status, 0);
	printf("exit %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : -1);
	child = fork();
	if (child == 0) {
		setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
		*(volatile int *)NULL = 0;
	}
	waitpid(child, &status, 0);
	printf("killed by %d\n", WIFSIGNALED(status) ? WTERMSIG(status) : -1);
}

int main(int argc, char **argv)
{
	static const unsigned long kinds[] = {AT_PAGESZ, AT_UID,   AT_EUID,   AT_GID,   AT_EGID,
	                                      AT_SECURE, AT_HWCAP, AT_CLKTCK, AT_PHENT, AT_PHNUM};
	char text[256] = "";
	struct stat exe;

	for (int i = 0; i < argc; i++)
		printf("argument %s\n", argv[i]);
	for (char **each = environ; *each; each++)
		if (strncmp(*each, "LD_PRELOAD=", 11) != 0 && strncmp(*each, "SIDESTEP_", 9) != 0)
			printf("environment %s\n", *each);
	for (size_t i = 0; i < sizeof(kinds) / sizeof(*kinds); i++)
		printf("auxiliary %lu: %lx\n", kinds[i], getauxval(kinds[i]));
	printf("started as %s\n", (const char *)getauxval(AT_EXECFN));
	printf("headers %d\n", ((const Elf64_Phdr *)getauxval(AT_PHDR))->p_type < PT_LOPROC);
	printf("stack %lu\n", (unsigned long)__builtin_frame_address(0) % 16);
	tell_link("/proc/self/exe");
	tell_link("/proc/self/cwd");
	printf("exe %d\n", stat(argc > 1 ? argv[1] : argv[0], &exe));
	int fd = open("/proc/self/exe", O_RDONLY);
	printf("magic %d\n", pread(fd, text, 4, 0) == 4 && memcmp(text, "\177ELF", 4) == 0);
	prctl(PR_GET_NAME, text);
	printf("name %s\n", text);
	printf("dumpable %d, no new privileges %d\n", prctl(PR_GET_DUMPABLE), prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0));
	printf("umask %o\n", umask(0));
	for (int i = 0; i < 256; i++)
		if (i != fd && fcntl(i, F_GETFD) >= 0)
			printf("open %d: %x\n", i, (unsigned)fcntl(i, F_GETFL));
	tell_heap();
	tell_limits();
	tell_signals();
	tell_vectors();
	printf("bad call %ld %d\n", syscall(-1), errno);
	printf("bad address %ld %d\n", syscall(SYS_getcwd, 8, 100), errno);
	fflush(stdout);
	tell_children();
	fflush(stdout);
	return 42;
}
