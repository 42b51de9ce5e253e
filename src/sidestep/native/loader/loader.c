/* loader.c - begins: takes the program that it is to start from the environment, loads it, and enters it. See loader.h. */
#include "loader.h"

#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define STACK_SIZE (1ul << 20)
#define LONGEST_AUXV 64

static const char preload[] = "LD_PRELOAD=", kept[] = LOADED_PRELOAD "=", program[] = LOADED_PROGRAM "=";

static const uint16_t calls_intercepted[] = {
	/* clang-format off: a table */
	CALLS_OF_MACHINE SYS_accept,
	SYS_accept4,
	SYS_bind,
	SYS_brk,
	SYS_clone,
	SYS_clone3,
	SYS_close,
	SYS_close_range,
	SYS_connect,
	SYS_dup,
	SYS_dup3,
	SYS_epoll_create1,
	SYS_epoll_ctl,
	SYS_epoll_pwait,
	SYS_epoll_pwait2,
	SYS_execve,
	SYS_execveat,
	SYS_exit,
	SYS_exit_group,
	SYS_fcntl,
	SYS_getpeername,
	SYS_getsockname,
	SYS_getsockopt,
	SYS_io_submit,
	SYS_io_uring_setup,
	SYS_ioctl,
	SYS_listen,
	SYS_mmap,
	SYS_mprotect,
	SYS_openat,
	SYS_pkey_mprotect,
	SYS_ppoll,
	SYS_prctl,
	SYS_preadv2,
	SYS_pselect6,
	SYS_pwritev2,
	SYS_readlinkat,
	SYS_recvmmsg,
	SYS_recvmsg,
	SYS_rt_sigaction,
	SYS_seccomp,
	SYS_sendfile,
	SYS_sendmmsg,
	SYS_sendmsg,
	SYS_set_tid_address,
	SYS_setresuid,
	SYS_setreuid,
	SYS_setsockopt,
	SYS_setuid,
	SYS_shutdown,
	SYS_socket,
	SYS_splice,
	/* clang-format on */
};

/* Calls that the shim, too, passes on at once if it does not know the descriptor. */
static const uint16_t calls_moving[] = {
	SYS_read, SYS_readv, SYS_recvfrom, SYS_sendto, SYS_write, SYS_writev,
};

void *memory_there(void *memory)
{
	if (!memory) {
		dprintf(STDERR_FILENO, "sidestep: there is no memory to start the program\n");
		_exit(127);
	}
	return memory;
}

/* Starts the program without us: nothing of it has run yet. */
static void start_as_it_is(const char *path, char **argv, char **envp, bool strip)
{
	size_t kept_len = 0;

	for (char **each = envp; *each; each++) {
		if (strip && strncmp(*each, preload, sizeof(preload) - 1) == 0) {
			char *others = memory_there(malloc(strlen(*each) + 2));
			shim->preload_without_ours(others, *each);
			*each = others;
		}
		if (strncmp(*each, program, sizeof(program) - 1) != 0)
			envp[kept_len++] = *each;
	}
	envp[kept_len] = NULL;
	shim->bequeath();
	raw(SYS_execve, (long)path, (long)argv, (long)envp, 0, 0, 0);
	dprintf(STDERR_FILENO, "sidestep: %s: %s\n", path, strerror(errno));
	_exit(127);
}

static const char *load(struct image *image, struct image *interpreter, struct sites *sites)
{
	const char *why = machine_missing();

	for (size_t i = 0; i < sizeof(calls_intercepted) / sizeof(*calls_intercepted); i++)
		intercepted[calls_intercepted[i]] = INTERCEPTED_ALWAYS;
	for (size_t i = 0; i < sizeof(calls_moving) / sizeof(*calls_moving); i++)
		intercepted[calls_moving[i]] = INTERCEPTED_IF_KNOWN;
	if (!why)
		why = image_load(image, sites);
	if (!why && *image->interpreter) {
		interpreter->path = image->interpreter;
		why = image_load(interpreter, sites);
	}
	if (!why && sites->left_len)
		why = "a system call in its code cannot be replaced";
	if (!why && sites->takes_block)
		why = "its code sets the base of %gs, by which the loader finds what it knows of a thread";
	if (!why && !trampolines_finish())
		why = "memory that was written to cannot be made executable here";
	return why;
}

/* ---- the program's stack: arguments, environment, auxiliary vector, as the kernel lays them out ---- */
static uint64_t *stack_copy(uint64_t *at, int argc, char **argv, char **envp, bool strip)
{
	*at++ = (uint64_t)argc;
	for (int i = 0; i < argc; i++)
		*at++ = (uint64_t)argv[i];
	*at++ = 0;
	for (; *envp; envp++) {
		if (strip && strncmp(*envp, preload, sizeof(preload) - 1) == 0) {
			/* a loader of its own would end it over the shim; its children get the shim again, see shim_loader.c */
			char *renamed = memory_there(malloc(2 * strlen(*envp) + sizeof(kept) + 2)),
				 *others = renamed + strlen(*envp) + sizeof(kept);
			sprintf(renamed, "%s%s", kept, *envp + sizeof(preload) - 1);
			*at++ = (uint64_t)renamed;
			shim->preload_without_ours(others, *envp);
			if (others[sizeof(preload) - 1])
				*at++ = (uint64_t)others;
		} else if (strncmp(*envp, program, sizeof(program) - 1) != 0) {
			*at++ = (uint64_t)*envp;
		}
	}
	*at++ = 0;
	return at;
}

/*
 * Auxiliary vector behind the environment as the kernel has it. The shim may have taken entries out of that: their places are
 * empty.
 */
static const Elf64_auxv_t *auxiliary_find(char **environment)
{
	while (*environment)
		environment++;
	while (!*environment)
		environment++;
	return (const Elf64_auxv_t *)environment;
}

static void auxiliary_copy(uint64_t *at, const Elf64_auxv_t *from, const struct image *image,
                           const struct image *interpreter)
{
	static uint8_t seed[16];

	if (getrandom(seed, sizeof(seed), GRND_NONBLOCK) != sizeof(seed))
		memcpy(seed, (const void *)getauxval(AT_RANDOM), sizeof(seed));
	for (;; from++) {
		uint64_t value = from->a_un.a_val;
		switch (from->a_type) {
		case AT_PHDR: value = image->headers; break;
		case AT_PHNUM: value = image->headers_count; break;
		case AT_ENTRY: value = image->entry; break;
		case AT_BASE: value = *image->interpreter ? interpreter->bias : 0; break;
		case AT_EXECFN: value = (uint64_t)image->path; break;
		case AT_RANDOM: value = (uint64_t)seed; break;
		}
		*at++ = from->a_type;
		*at++ = value;
		if (from->a_type == AT_NULL)
			return;
	}
}

static void *no_thread(void *nothing)
{
	return nothing;
}

/* glibc takes the signal 33 with its first thread, which Go and musl have a use for: its handler comes before theirs. */
static void first_thread(void)
{
	pthread_t thread;

	if (pthread_create(&thread, NULL, no_thread, NULL) == 0)
		pthread_join(thread, NULL);
}

__attribute__((noreturn)) static void begin(const struct image *image, const struct image *interpreter, int argc,
                                            char **argv, char **envp)
{
	static struct block block;
	static struct frame frame;
	size_t env_len = 0;

	while (envp[env_len])
		env_len++;
	const Elf64_auxv_t *auxiliary = auxiliary_find(argv + argc + 1);
	size_t words = (size_t)argc + env_len + 4 + 2 * (size_t)LONGEST_AUXV;
	uint64_t *stack = __builtin_alloca_with_align(words * sizeof(uint64_t), 512);
	uint64_t *rest = stack_copy(stack, argc, argv, envp, *image->interpreter);
	auxiliary_copy(rest, auxiliary, image, interpreter);
	const char *name = strrchr(image->path, '/');
	prctl(PR_SET_NAME, name ? name + 1 : image->path);
	char *ours = mmap(NULL, STACK_SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (ours == MAP_FAILED) {
		dprintf(STDERR_FILENO, "sidestep: no memory to start %s\n", image->path);
		_exit(127);
	}
	thread_block_init(&block, (uint64_t)ours, (uint64_t)ours + STACK_SIZE);
	block_set(&block);
	frame_begin(&frame, *image->interpreter ? interpreter->entry : image->entry, (uint64_t)stack);
	loader_enter(&frame, &block);
	__builtin_unreachable();
}

static int check(const char *path)
{
	struct image image = {.path = path}, interpreter = {0};
	struct sites sites = {0};
	const char *why = load(&image, &interpreter, &sites);

	printf("{\"refused\": %s%s%s, \"sites\": %u, \"idle\": %u, \"replaced\": %u, \"left\": [", why ? "\"" : "",
	       why ? why : "null", why ? "\"" : "", sites.found, sites.idle, sites.patched);
	for (uint32_t i = 0; i < sites.left_len && i < LEFT_MAX; i++) {
		bool own = (uint64_t)sites.left[i] - image.bias < (uint64_t)sites.left[i] - interpreter.bias;
		printf("%s%llu", i ? ", " : "",
		       (unsigned long long)((uint64_t)sites.left[i] - (own ? image.bias : interpreter.bias)));
	}
	printf("]}\n");
	return why ? 1 : 0;
}

/* The shim knows how to start a program, and comes back to us if need be. Returns only if it could not. */
static int run(int argc, char **argv, char **envp)
{
	const char *name = argc > 1 ? argv[1] : "-";

	if (*name != '-') { /* a bundle names the program alone, as `sidestep run` elsewhere */
		execvp(name, argv + 1);
	} else if (argc > 3 && strcmp(name, "--run") == 0) {
		name = argv[2];
		execve(name, argv + 3, envp);
	} else {
		fprintf(stderr, "usage: %s PROGRAM [ARGUMENT]...\n", argv[0]);
		return 2;
	}
	const int result = errno == ENOENT ? 127 : 126;
	fprintf(stderr, "sidestep: %s: %s\n", name, strerror(errno));
	return result;
}

int main(int argc, char **argv, char **envp)
{
	static struct image image, interpreter;
	static char resolved[PATH_MAX];
	struct sites sites = {0};
	const char *path = getenv(LOADED_PROGRAM);

	shim = sidestep_loaded(kernel_action);
	if (!path && argc == 3 && strcmp(argv[1], "--check") == 0)
		return check(argv[2]);
	if (!path)
		return run(argc, argv, envp);
	image.path = program_path = realpath(path, resolved) ? resolved : path;
	const char *why = load(&image, &interpreter, &sites);
	if (why) {
		const char *verbose = getenv("SIDESTEP_LOADER_LOG");
		if (verbose)
			dprintf(STDERR_FILENO, "sidestep: %s stays on TCP: %s\n", path, why);
		start_as_it_is(path, argv, envp, *image.interpreter || !image.entry);
	}
	first_thread();
	begin(&image, &interpreter, argc, argv, envp);
}
