/* coverage_runtime.c - notes which basic blocks have run, in a file that outlives the process.
 *
 * The compiler calls __sanitizer_cov_trace_pc() at the beginning of each basic block. The block's offset from where the
 * library is loaded is the index of a byte in COVERAGE_DIRECTORY/WORKER/COVERAGE_NAME, mapped shared: a process that is
 * killed leaves what it has noted. WORKER is pytest-xdist's name of the process that runs the tests, or "none".
 *
 * The first block asks for the file, by system calls of its own: the library hooks those of the C library, may run
 * before that is ready, and in signal handlers. A process that cannot open the file notes nothing. */
#include <elf.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#define UNSEEN \
	__attribute__((no_sanitize_coverage, no_sanitize("address"), no_sanitize("thread"), no_sanitize("undefined")))
#define NOTHING ((unsigned char *)1)
#define PATH_SIZE 512

void __sanitizer_cov_trace_pc(void);

extern char **environ;
extern const char __ehdr_start[] __attribute__((visibility("hidden"))); /* the linker's: where the file is mapped */
extern const char etext[] __attribute__((visibility("hidden")));        /* and where its code ends */

static _Atomic(unsigned char *) seen;

UNSEEN static long call(long number, long one, long two, long three, long four, long five, long six)
{
#if defined(__x86_64__)
	register long fourth __asm__("r10") = four, fifth __asm__("r8") = five, sixth __asm__("r9") = six;
	long result;
	__asm__ volatile("syscall"
	                 : "=a"(result)
	                 : "a"(number), "D"(one), "S"(two), "d"(three), "r"(fourth), "r"(fifth), "r"(sixth)
	                 : "rcx", "r11", "memory");
	return result;
#elif defined(__aarch64__)
	register long x8 __asm__("x8") = number, x0 __asm__("x0") = one, x1 __asm__("x1") = two;
	register long x2 __asm__("x2") = three, x3 __asm__("x3") = four, x4 __asm__("x4") = five, x5 __asm__("x5") = six;
	__asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
	return x0;
#else
#error "no system calls for this machine"
#endif
}

UNSEEN static size_t append(char *path, size_t length, const char *text)
{
	while (*text && length < PATH_SIZE - 1)
		path[length++] = *text++;
	path[length] = 0;
	return length;
}

UNSEEN static const char *worker(void)
{
	static const char name[] = "PYTEST_XDIST_WORKER=";
	for (char **variable = environ; *variable; variable++) {
		size_t same = 0;
		while (name[same] && (*variable)[same] == name[same])
			same++;
		if (!name[same])
			return *variable + same;
	}
	return "none";
}

UNSEEN static unsigned char *open_map(void)
{
	char path[PATH_SIZE];
	size_t size = ((uintptr_t)etext - (uintptr_t)__ehdr_start + 4095) & ~(size_t)4095;
	size_t length = append(path, 0, COVERAGE_DIRECTORY "/");
	length = append(path, length, worker());
	call(SYS_mkdirat, AT_FDCWD, (long)path, 0777, 0, 0, 0);
	append(path, append(path, length, "/"), COVERAGE_NAME);
	long fd = call(SYS_openat, AT_FDCWD, (long)path, O_RDWR | O_CREAT | O_CLOEXEC, 0666, 0, 0);
	if (fd < 0)
		return NOTHING;
	call(SYS_fchmod, fd, 0666, 0, 0, 0, 0); /* for programs of other users */
	long map = -1;
	if (!call(SYS_ftruncate, fd, (long)size, 0, 0, 0, 0))
		map = call(SYS_mmap, 0, (long)size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	call(SYS_close, fd, 0, 0, 0, 0, 0);
	unsigned char *found = map < 0 && map > -4096 ? NOTHING : (unsigned char *)map, *before = NULL;
	if (atomic_compare_exchange_strong(&seen, &before, found))
		return found;
	if (found != NOTHING) /* another thread, or a signal's handler, was first */
		call(SYS_munmap, map, (long)size, 0, 0, 0, 0);
	return before;
}

UNSEEN void __sanitizer_cov_trace_pc(void)
{
	unsigned char *map = atomic_load_explicit(&seen, memory_order_relaxed);
	if (!map) {
		if (!environ) /* too early to know the worker */
			return;
		map = open_map();
		atomic_store_explicit(&seen, map, memory_order_relaxed);
	}
	size_t offset = (uintptr_t)__builtin_return_address(0) - (uintptr_t)__ehdr_start;
	if (map != NOTHING && offset < (size_t)(etext - __ehdr_start) && !map[offset])
		map[offset] = 1;
}
