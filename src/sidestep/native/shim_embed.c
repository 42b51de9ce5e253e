/*
 * shim_embed.c - the shim in a process that was started without it.
 *
 * Preloaded, the library comes first where the dynamic linker binds the calls of all objects. Loaded later it comes too
 * late for that, so it does the same itself: in every loaded object the slots through which it calls a function of ours
 * (GOT and PLT entries, and pointers in tables) are made to name ours. The functions that ours stand before are those
 * of the global scope, where another preloaded library may stand in turn. Objects that come later are seen to before
 * anybody can call them: dlopen() is ours, too, and so is dlsym(). Calls inside the C library stay its own, as ever.
 *
 * In `opt_in` mode only sockets that were adopted are tracked, and what listeners accept that were; all others pass
 * through. A socket may be adopted at any time before a byte has moved: the kernel's counts betray it if one has.
 *
 * Not seen: a call through an address that the program asked of dlsym() with the C library's own handle.
 */
#include "shim.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <netinet/in.h>
#include <sys/mman.h>

#if defined(__x86_64__)
#define RELOC_SLOT R_X86_64_JUMP_SLOT
#define RELOC_GOT R_X86_64_GLOB_DAT
#define RELOC_WORD R_X86_64_64
#elif defined(__aarch64__)
#define RELOC_SLOT R_AARCH64_JUMP_SLOT
#define RELOC_GOT R_AARCH64_GLOB_DAT
#define RELOC_WORD R_AARCH64_ABS64
#else
#error "which relocations bind functions here?"
#endif

#define HOOKS_MAX 256 /* names; a test compares with what the library exports */

static struct hook {
	const char *name;
	uintptr_t function;
} hooks[HOOKS_MAX];
static uint32_t hooks_len;
static uintptr_t own_base; /* of this library */
static _Atomic bool looked; /* whether calls are redirected */
static _Atomic bool look_due;
static pthread_mutex_t look_lock = PTHREAD_MUTEX_INITIALIZER;

/* ---- what we export ---- */
struct object {
	uintptr_t base;
	const ElfW(Sym) * symbols;
	const char *names;
	const ElfW(Rela) * tables[2]; /* DT_RELA, DT_JMPREL */
	size_t lens[2];              /* entries */
	const uint32_t *hash;
};

/* Linux's own object, and those of other systems' linkers, keep addresses as they are in the file. */
static const void *located(const struct dl_phdr_info *info, ElfW(Addr) address)
{
	return (const void *)(address < info->dlpi_addr ? info->dlpi_addr + address : address);
}

static bool object_read(const struct dl_phdr_info *info, struct object *object)
{
	const ElfW(Dyn) *dynamic = NULL;

	*object = (struct object){.base = info->dlpi_addr};
	for (int i = 0; i < info->dlpi_phnum; i++)
		if (info->dlpi_phdr[i].p_type == PT_DYNAMIC)
			dynamic = (const ElfW(Dyn) *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
	for (; dynamic && dynamic->d_tag != DT_NULL; dynamic++) {
		switch (dynamic->d_tag) {
		case DT_SYMTAB: object->symbols = located(info, dynamic->d_un.d_ptr); break;
		case DT_STRTAB: object->names = located(info, dynamic->d_un.d_ptr); break;
		case DT_RELA: object->tables[0] = located(info, dynamic->d_un.d_ptr); break;
		case DT_RELASZ: object->lens[0] = dynamic->d_un.d_val / sizeof(ElfW(Rela)); break;
		case DT_JMPREL: object->tables[1] = located(info, dynamic->d_un.d_ptr); break;
		case DT_PLTRELSZ: object->lens[1] = dynamic->d_un.d_val / sizeof(ElfW(Rela)); break;
		case DT_GNU_HASH: object->hash = located(info, dynamic->d_un.d_ptr); break;
		}
	}
	return object->symbols && object->names;
}

static void hook_add(const char *name, uintptr_t function)
{
	if (hooks_len < HOOKS_MAX)
		hooks[hooks_len++] = (struct hook){name, function};
}

static int hook_compare(const void *a, const void *b)
{
	return strcmp(((const struct hook *)a)->name, ((const struct hook *)b)->name);
}

static uintptr_t hook_find(const char *name)
{
	const struct hook *found = bsearch(&(struct hook){.name = name}, hooks, hooks_len, sizeof(*hooks), hook_compare);

	return found ? found->function : 0;
}

static void *late_dlopen(const char *path, int flags);
static void *late_dlsym(void *handle, const char *name);

/* The names that a linker would bind to us: those in our hash table, but for the ones of this file. */
static int hooks_read(struct dl_phdr_info *info, size_t size, void *unused)
{
	struct object own;

	(void)size;
	(void)unused;
	bool ours = false;
	for (int i = 0; i < info->dlpi_phnum; i++) {
		const ElfW(Phdr) *part = &info->dlpi_phdr[i];
		ours |= part->p_type == PT_LOAD && (uintptr_t)hooks - info->dlpi_addr - part->p_vaddr < part->p_memsz;
	}
	if (!ours || !object_read(info, &own) || !own.hash)
		return ours;
	own_base = own.base;
	uint32_t buckets_len = own.hash[0], first = own.hash[1], bloom_len = own.hash[2];
	const uint32_t *buckets = own.hash + 4 + bloom_len * (sizeof(ElfW(Addr)) / 4), *chain = buckets + buckets_len;
	for (uint32_t i = 0; i < buckets_len; i++)
		for (uint32_t at = buckets[i]; at >= first; at++) {
			const ElfW(Sym) *symbol = &own.symbols[at];
			const char *name = own.names + symbol->st_name;
			if (ELF64_ST_TYPE(symbol->st_info) == STT_FUNC && strncmp(name, "sidestep_", 9) != 0)
				hook_add(name, own.base + symbol->st_value);
			if (chain[at - first] & 1)
				break;
		}
	hook_add("dlopen", (uintptr_t)late_dlopen);
	hook_add("dlsym", (uintptr_t)late_dlsym);
	qsort(hooks, hooks_len, sizeof(*hooks), hook_compare);
	return 1;
}

/* ---- the calls of others ---- */
struct look {
	uint32_t changed;
	bool failed;
};

/* The pages that the linker made read-only when it was done. */
static void relro(const struct dl_phdr_info *info, uintptr_t *start, uintptr_t *end)
{
	uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);

	*start = *end = 0;
	for (int i = 0; i < info->dlpi_phnum; i++)
		if (info->dlpi_phdr[i].p_type == PT_GNU_RELRO) {
			*start = (info->dlpi_addr + info->dlpi_phdr[i].p_vaddr) & -page;
			*end = (info->dlpi_addr + info->dlpi_phdr[i].p_vaddr + info->dlpi_phdr[i].p_memsz) & -page;
		}
}

static int object_redirect(struct dl_phdr_info *info, size_t size, void *argument)
{
	struct look *look = argument;
	struct object object;
	uintptr_t start, end;
	bool open = false;

	(void)size;
	if (!object_read(info, &object))
		return 0;
	relro(info, &start, &end);
	for (int table = 0; table < 2; table++)
		for (size_t i = 0; object.tables[table] && i < object.lens[table]; i++) {
			const ElfW(Rela) *entry = &object.tables[table][i];
			uint64_t type = ELF64_R_TYPE(entry->r_info);
			if ((type != RELOC_SLOT && type != RELOC_GOT && type != RELOC_WORD) ||
			    (type == RELOC_WORD && entry->r_addend))
				continue;
			const ElfW(Sym) *symbol = &object.symbols[ELF64_R_SYM(entry->r_info)];
			/* A function of its own of that name stays. But our calls among ourselves are bound to the global scope, too. */
			if (symbol->st_shndx != SHN_UNDEF && object.base != own_base)
				continue;
			uintptr_t function = hook_find(object.names + symbol->st_name);
			_Atomic uintptr_t *slot = (_Atomic uintptr_t *)(object.base + entry->r_offset);
			if (!function || word_load(*slot) == function)
				continue;
			if ((uintptr_t)slot >= start && (uintptr_t)slot < end && !open) {
				open = mprotect((void *)start, end - start, PROT_READ | PROT_WRITE) == 0;
				if (!open) {
					look->failed = true;
					continue;
				}
			}
			atomic_store_explicit(slot, function, memory_order_release);
			look->changed++;
		}
	if (open)
		mprotect((void *)start, end - start, PROT_READ);
	return 0;
}

static struct look redirect(void)
{
	struct look look = {0};

	atomic_store(&look_due, false);
	pthread_mutex_lock(&look_lock);
	dl_iterate_phdr(object_redirect, &look);
	pthread_mutex_unlock(&look_lock);
	return look;
}

static void *(*real_dlopen)(const char *, int);
static void *(*real_dlsym)(void *, const char *);

/*
 * The linker searches where the caller's object says, and knows the caller by the address it will return to. So where
 * that matters the call goes on as a jump, and the look comes with the dlsym() that must follow.
 */
static void *late_dlopen(const char *path, int flags)
{
	if (!path || !strchr(path, '/') || strchr(path, '$')) {
		atomic_store(&look_due, true);
		return real_dlopen(path, flags);
	}
	void *handle = real_dlopen(path, flags);
	if (handle)
		redirect();
	return handle;
}

static void *late_dlsym(void *handle, const char *name)
{
	if (unlikely(word_load(look_due)))
		redirect();
	if (handle == RTLD_DEFAULT || handle == main_program) {
		uintptr_t function = hook_find(name);
		if (function)
			return (void *)function;
	}
	return real_dlsym(handle, name);
}

/* ---- for sidestep.embed ---- */

/* What a program may set; the names of the environment's variables. A number that is negative is left as it is. */
struct sidestep_settings {
	const char *socket;
	int64_t promote_after_calls;
	int64_t promote_after_bytes;
	int64_t ring_size;
	int64_t spin_us;
};

/*
 * Redirects the process's calls. 0, also where they are already; -EPERM: pages cannot be made writable; -ENOENT: there is no
 * call to redirect, as in a program that is linked statically; -ENODEV: SIDESTEP_DISABLE is set, the program runs with more
 * rights than who started it, or there was no memory.
 */
EXPORT int sidestep_embed(const struct sidestep_settings *settings)
{
	if (!fd_table_len)
		return -ENODEV;
	if (!main_program || atomic_load(&looked))
		return 0;
	if (settings->socket && strlen(settings->socket) < sizeof(config.socket))
		strcpy(config.socket, settings->socket);
	if (settings->promote_after_calls >= 0) {
		config.promote_after_calls = (uint32_t)settings->promote_after_calls;
		config.promote_after_bytes = (uint64_t)settings->promote_after_bytes;
		config.promote_set = true;
	}
	if (settings->ring_size >= 0) {
		config.ring_size = config.remote_ring_size = (uint32_t)settings->ring_size;
		config.ring_size_set = true;
	}
	if (settings->spin_us >= 0)
		config.spin_ns = (uint32_t)settings->spin_us * 1000;
	config.embedded = config.opt_in = true;
	real_dlopen = dlopen; /* before our own slots are redirected */
	real_dlsym = dlsym;
	dl_iterate_phdr(hooks_read, NULL);
	struct look look = redirect();
	if (!look.changed)
		return look.failed ? -EPERM : -ENOENT;
	atomic_store(&looked, true);
	return 0;
}

/*
 * Whether every TCP socket made from now on is tracked, or only those that are adopted. Nothing changes for a program that
 * was started with the shim.
 */
EXPORT void sidestep_track_all(int all)
{
	if (main_program)
		config.opt_in = !all;
}

/*
 * Tracks a stream socket that has just been made, or what a listener will accept. It must not be in an epoll set yet. 0,
 * also where it is tracked already or is none that could be promoted; -EBUSY: it is connected; -EBADF.
 */
EXPORT int sidestep_adopt(int fd)
{
	int domain = 0, type = 0, protocol = 0, listens = 0, saved = errno, result = 0;
	struct sockaddr_storage peer;
	socklen_t peer_len = sizeof(peer);

	if (!fd_table_len || file_get(fd))
		return 0;
	if (!option_get(fd, SOL_SOCKET, SO_DOMAIN, &domain, sizeof(domain)) ||
	    !option_get(fd, SOL_SOCKET, SO_TYPE, &type, sizeof(type)) ||
	    !option_get(fd, SOL_SOCKET, SO_PROTOCOL, &protocol, sizeof(protocol)) ||
	    !option_get(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, sizeof(listens)))
		result = errno == EBADF ? -EBADF : 0;
	else if ((domain != AF_INET && domain != AF_INET6) || type != SOCK_STREAM || protocol != IPPROTO_TCP)
		result = 0;
	else if (listens)
		file_put(fd, &listener_file);
	else if (real.getpeername(fd, (struct sockaddr *)&peer, &peer_len) == 0)
		result = -EBUSY;
	else
		conn_new(fd, domain, ROLE_UNKNOWN);
	errno = saved;
	return result;
}

/* The same for an epoll set that was made before calls were redirected; see set_adopt(). 0, -EBADF, -EINVAL or -ENOMEM. */
EXPORT int sidestep_adopt_set(int epfd)
{
	return fd_table_len ? set_adopt(epfd) : 0;
}
