/*
 * shim_embed.c - the shim in a process that was started without it.
 *
 * A preloaded library comes first when the dynamic linker binds the calls of all objects. One that is loaded later comes too
 * late for that, so it does the same itself. In every loaded object it changes the slots of functions that we replace (GOT
 * and PLT entries, and pointers in tables) to name ours. The functions that ours stand before are those of the global scope,
 * where another preloaded library may stand in turn. The linker itself binds objects that come later to us (shim_names.c).
 *
 * In `opt_in` mode only sockets that were adopted are tracked, and what listeners accept that were; all others pass
 * through. A socket may be adopted at any time before a byte has moved: the kernel's counts betray it if one has.
 */
#include "shim_object.h"

#include "shim_set.h"

#include <netinet/in.h>

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

static _Atomic bool looked; /* true once calls are redirected */

/* ---- the calls of others ---- */
struct look {
	struct object ours;
	uint32_t changed;
	bool failed;
};

static uintptr_t function_of(const struct object *ours, const char *text)
{
	const ElfW(Sym) *symbol = strncmp(text, "sidestep_", 9) == 0 ? NULL : object_find(ours, text, name_hash(text));

	return symbol ? ours->base + symbol->st_value : 0;
}

static int object_redirect(struct dl_phdr_info *info, size_t size, void *argument)
{
	struct look *look = argument;
	struct object object;
	bool open = false;

	(void)size;
	if (!object_read(info, &object))
		return 0;
	for (int table = 0; table < 2; table++)
		for (size_t i = 0; object.tables[table] && i < object.lens[table]; i++) {
			const ElfW(Rela) *entry = &object.tables[table][i];
			uint64_t type = ELF64_R_TYPE(entry->r_info);
			if ((type != RELOC_SLOT && type != RELOC_GOT && type != RELOC_WORD) ||
			    (type == RELOC_WORD && entry->r_addend))
				continue;
			const ElfW(Sym) *symbol = &object.symbols[ELF64_R_SYM(entry->r_info)];
			/* A function of its own of that name stays. But our calls among ourselves are bound to the global scope, too. */
			if (symbol->st_shndx != SHN_UNDEF && object.base != look->ours.base)
				continue;
			uintptr_t function = function_of(&look->ours, object.names + symbol->st_name);
			_Atomic uintptr_t *slot = (_Atomic uintptr_t *)(object.base + entry->r_offset);
			if (!function || word_load(*slot) == function)
				continue;
			if ((uintptr_t)slot >= object.relro && (uintptr_t)slot < object.relro_end && !open) {
				open = pages_open(object.relro, object.relro_end);
				if (!open) {
					look->failed = true;
					continue;
				}
			}
			atomic_store_explicit(slot, function, memory_order_release);
			look->changed++;
		}
	if (open)
		pages_shut(object.relro, object.relro_end);
	return 0;
}

/* ---- for sidestep.embed ---- */

/* Settings of a program; the names of the environment's variables. A number that is negative is left as it is. */
struct sidestep_settings {
	const char *socket;
	int64_t promote_after_calls;
	int64_t promote_after_bytes;
	int64_t ring_size;
	int64_t spin_us;
};

/*
 * Redirects the process's calls. 0, also if they are already. -EPERM: pages cannot be made writable. -ENOENT: there is no
 * call to redirect, as in a program that is linked statically. -ENODEV: SIDESTEP_DISABLE is set, the program runs with more
 * rights than its caller, or there was no memory.
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
	struct look look = {0};
	if (!object_ours(&look.ours) || !names_redirect()) /* first: an object that is loaded just now is bound to us */
		return -EPERM;
	streams_redirect();
	dl_iterate_phdr(object_redirect, &look);
	if (!look.changed)
		return look.failed ? -EPERM : -ENOENT;
	atomic_store(&looked, true);
	return 0;
}

/*
 * Chooses between tracking every TCP socket made from now on and only those that are adopted. Nothing changes for a program
 * that was started with the shim.
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

/* True if an entry that is already in the kernel's set carries data that would be taken for ours. */
static bool secret_taken(int epfd, uint64_t secret)
{
	char path[40], line[256];
	bool taken = false;

	snprintf(path, sizeof(path), "/proc/self/fdinfo/%d", epfd);
	FILE *entries = fopen(path, "re");
	while (entries && !taken && fgets(line, sizeof(line), entries)) {
		const char *data = strncmp(line, "tfd:", 4) == 0 ? strstr(line, "data:") : NULL;
		taken = data && strtoull(data + strlen("data:"), NULL, 16) >> NAME_BITS == secret;
	}
	if (entries)
		fclose(entries);
	return taken;
}

/*
 * Tracks a set that was made where we could not see it. The caller guarantees that no thread waits in it (such a thread would
 * see our events), and that it is in no other set. Its present entries stay the kernel's.
 */
static int set_adopt(int epfd)
{
	char path[40], target[64] = "";

	snprintf(path, sizeof(path), "/proc/self/fd/%d", epfd);
	if (set_get(epfd))
		return 0;
	if (readlink(path, target, sizeof(target) - 1) < 0)
		return -EBADF;
	if (strcmp(target, "anon_inode:[eventpoll]") != 0)
		return -EINVAL;
	set_created(epfd);
	struct set *set = set_get(epfd);
	if (!set)
		return -ENOMEM;
	while (secret_taken(epfd, set->secret))
		set->secret = new_secret();
	return 0;
}

/* The same for an epoll set that was made before calls were redirected; see set_adopt(). 0, -EBADF, -EINVAL or -ENOMEM. */
EXPORT int sidestep_adopt_set(int epfd)
{
	return fd_table_len ? set_adopt(epfd) : 0;
}
