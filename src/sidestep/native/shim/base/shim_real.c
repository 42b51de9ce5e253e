/* shim_real.c - the C library's own functions: where they are, and that they are found in time. */
#include "shim_base.h"

#include <dlfcn.h>

/* Entries of `real` find the C library's function first, until shim_init has run. */
#define X(result, name, params, args) \
	static result first_##name params \
	{ \
		real_init(); \
		return real.name args; \
	}
REAL_FUNCTIONS(X)
#undef X
static long first_syscall(long n, long a, long b, long c, long d, long e, long f)
{
	real_init();
	return real.syscall(n, a, b, c, d, e, f);
}

struct real real = {
#define X(result, name, params, args) .name = first_##name,
	REAL_FUNCTIONS(X)
#undef X
		.syscall = first_syscall,
};

static const char several_threads;
const char *one_thread = &several_threads;

void *main_program;

void *real_scope(void)
{
	static bool known;

	if (!known) {
		/* preloaded we are in the global scope ourselves; what stands behind us there is meant then */
		void *global = dlopen(NULL, RTLD_LAZY);
		main_program = global && dlsym(global, "sidestep_embed") ? NULL : global;
		known = true;
	}
	return main_program ? main_program : RTLD_NEXT;
}

static void *real_find(const char *name)
{
	return dlsym(real_scope(), name);
}

static void *missing_symbol(void)
{
	errno = ENOSYS;
	return (void *)-1;
}

static void *symbol(void *scope, const char *name, const char *version)
{
	return version ? dlvsym(scope, name, version) : dlsym(scope, name);
}

/* A plug-in's library is in no scope that we can ask. It stays loaded, as the function is kept. */
void *library_find(const char *name, const char *version)
{
	static const char *const libraries[] = {"liburing.so.1", "liburing.so.2", "libaio.so.1", "libaio.so.1t64"};
	void *found = symbol(real_scope(), name, version);

	for (size_t i = 0; !found && i < sizeof(libraries) / sizeof(*libraries); i++) {
		void *library = dlopen(libraries[i], RTLD_LAZY | RTLD_NOLOAD);
		found = library ? symbol(library, name, version) : NULL;
		if (library && !found)
			dlclose(library);
	}
	return found;
}

void real_init(void)
{
	void *found;
#define X(result, name, params, args) \
	found = real_find(#name); \
	real.name = (result(*) params)(found ? found : (void *)missing_symbol);
	REAL_FUNCTIONS(X)
#undef X
	real.syscall = (long (*)(long, long, long, long, long, long, long))real_find("syscall");
	real._exit = (__typeof__(real._exit))real_find("_exit");
	real._Exit = (__typeof__(real._exit))real_find("_Exit");
	found = real_find("__libc_single_threaded"); /* glibc 2.32 */
	if (found)
		one_thread = found;
}
