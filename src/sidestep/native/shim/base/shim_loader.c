/*
 * shim_loader.c - how programs that are executed here come to the shim. Most do by their C library's loader and LD_PRELOAD.
 * Those without this C library are started by ours (loader.c), which stands beside the shim and finds the file in the
 * environment. Without our loader, musl's must not see the shim: it would end the program over it. A program that gets an
 * environment of its caller's own making gets our part of it besides; see shim_environment.c.
 */
#include "shim_proc.h"

#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <sys/auxv.h>
#include <sys/stat.h>
#include <sys/xattr.h>

#include "loaded.h"

#define LINE_LENGTH 256 /* BINPRM_BUF_SIZE */
#define SEGMENTS_MAX 64
#define NAMES_LENGTH 4096 /* length of the names of sections */
#define HWCAP2_FSGSBASE 2 /* asm/hwcap2.h */

static const char preload[] = "LD_PRELOAD=", kept[] = LOADED_PRELOAD "=", program[] = LOADED_PROGRAM "=";
static const char glibc_loader[] = "ld-linux";
#if defined(__x86_64__)
#define MACHINE EM_X86_64
#else
#define MACHINE EM_AARCH64
#endif

/* Kinds of files, by the way in which they are loaded. */
enum kind { KIND_OTHER, KIND_SCRIPT, KIND_STATIC, KIND_MUSL, KIND_MUSL_RAISED, KIND_GO, KIND_DYNAMIC };

static bool read_at(int fd, void *to, size_t n, uint64_t at)
{
	return real.pread64(fd, to, n, (off_t)at) == (ssize_t)n;
}

/* A position-independent program without a loader, and not a loader itself (DF_1_PIE). */
static bool is_static_pie(int fd, const Elf64_Phdr *dynamic)
{
	Elf64_Dyn entry;

	for (uint64_t at = 0; at + sizeof(entry) <= dynamic->p_filesz && at < 4096; at += sizeof(entry)) {
		if (!read_at(fd, &entry, sizeof(entry), dynamic->p_offset + at) || entry.d_tag == DT_NULL)
			return false;
		if (entry.d_tag == DT_FLAGS_1)
			return entry.d_un.d_val & DF_1_PIE;
	}
	return false;
}

/* True by the names of its sections, which Go's linker keeps when it leaves out symbols, or its build's note. */
bool made_by_go(int fd, const Elf64_Ehdr *header)
{
	static const char section[] = "\0.go.buildinfo";
	char names[NAMES_LENGTH];
	Elf64_Shdr table;

	if (header->e_shentsize != sizeof(table) || header->e_shstrndx >= header->e_shnum ||
	    !read_at(fd, &table, sizeof(table), header->e_shoff + header->e_shstrndx * sizeof(table)))
		return false;
	const size_t length = table.sh_size < sizeof(names) ? table.sh_size : sizeof(names);
	return read_at(fd, names, length, table.sh_offset) && memmem(names, length, section, sizeof(section));
}

static enum kind kind_of_elf(int fd)
{
	char name[LINE_LENGTH] = "";
	Elf64_Ehdr header;
	Elf64_Phdr segment;
	bool pie = false;

	if (!read_at(fd, &header, sizeof(header), 0) || memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 ||
	    header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_phentsize != sizeof(segment))
		return KIND_OTHER;
	for (int i = 0; i < header.e_phnum && i < SEGMENTS_MAX; i++) {
		if (!read_at(fd, &segment, sizeof(segment), header.e_phoff + (uint64_t)i * sizeof(segment)))
			return KIND_OTHER;
		if (segment.p_type == PT_DYNAMIC)
			pie = is_static_pie(fd, &segment);
		if (segment.p_type != PT_INTERP)
			continue;
		if (!segment.p_filesz || segment.p_filesz > sizeof(name) ||
		    !read_at(fd, name, segment.p_filesz - 1, segment.p_offset))
			return KIND_OTHER;
		const char *base = strrchr(name, '/');
		base = base ? base + 1 : name;
		if (strncmp(base, "ld-musl", 7) == 0)
			return KIND_MUSL;
		if (made_by_go(fd, &header))
			return KIND_GO;
		return header.e_machine == MACHINE && strncmp(base, glibc_loader, sizeof(glibc_loader) - 1) == 0 ? KIND_DYNAMIC
		                                                                                                 : KIND_OTHER;
	}
	return header.e_type == ET_EXEC || pie ? KIND_STATIC : KIND_OTHER;
}

/* The words of a script's first line: its interpreter, and one argument. */
static bool line_split(char *line, struct start_script *script)
{
	line[strcspn(line, "\n")] = '\0';
	for (size_t end = strlen(line); end && strchr(" \t", line[end - 1]);)
		line[--end] = '\0';
	char *interpreter = line + 2 + strspn(line + 2, " \t");
	size_t len = strcspn(interpreter, " \t");
	snprintf(script->interpreter, sizeof(script->interpreter), "%.*s", (int)len, interpreter);
	snprintf(script->argument, sizeof(script->argument), "%s", interpreter + len + strspn(interpreter + len, " \t"));
	return len;
}

/* True if such a program gets more rights than its caller has, in which we have no part. */
static bool raises_rights(int fd)
{
	struct stat st;

	return fstat(fd, &st) < 0 || (st.st_mode & (S_ISUID | S_ISGID)) ||
	       fgetxattr(fd, "security.capability", NULL, 0) > 0;
}

static enum kind look(int dir, const char *file, char line[LINE_LENGTH], char resolved[PATH_MAX])
{
	char link[32];
	int fd = (int)real.syscall(SYS_openat, dir, (long)file, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, 0, 0, 0);
	enum kind kind = KIND_OTHER;

	if (fd < 0)
		return kind;
	ssize_t len = real.pread64(fd, line, LINE_LENGTH - 1, 0);
	line[len > 0 ? len : 0] = '\0';
	if (strncmp(line, "#!", 2) == 0)
		kind = KIND_SCRIPT;
	else if ((kind = kind_of_elf(fd)) != KIND_OTHER && raises_rights(fd))
		kind = kind == KIND_MUSL ? KIND_MUSL_RAISED : KIND_OTHER; /* raised: musl's loader minds LD_PRELOAD, too */
	snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
	len = (ssize_t)real.syscall(SYS_readlinkat, AT_FDCWD, (long)link, (long)resolved, PATH_MAX - 1, 0, 0);
	resolved[len > 0 ? len : 0] = '\0';
	raw_close(fd);
	return kind;
}

static bool machine_can_load(void)
{
#if defined(__x86_64__)
	return getauxval(AT_HWCAP2) & HWCAP2_FSGSBASE;
#else
	return true;
#endif
}

/* The loader's path, or NULL: there is none for this machine, or not in this root (chroot). */
static const char *loader_find(void)
{
	static const char loader[] = "sidestep-loader";
	static char path[PATH_MAX];
	static _Atomic bool known;
	Dl_info info;

	if (!known) {
		if (!machine_can_load() || !dladdr((void *)loader_find, &info) || !info.dli_fname)
			return NULL;
		const char *slash = strrchr(info.dli_fname, '/');
		int directory = slash ? (int)(slash + 1 - info.dli_fname) : 0;
		if (snprintf(path, sizeof(path), "%.*s%s", directory, info.dli_fname, loader) >= (int)sizeof(path))
			return NULL;
		known = true;
	}
	return access(path, X_OK) == 0 ? path : NULL;
}

/* A debugger's breakpoints are for the program that it starts, and a user that traces calls wants to see the program's. */
static bool is_traced(void)
{
	char status[1024] = "";
	int fd = (int)real.syscall(SYS_openat, AT_FDCWD, (long)"/proc/self/status", O_RDONLY | O_CLOEXEC, 0, 0, 0);

	if (fd < 0)
		return false;
	ssize_t len = real.pread64(fd, status, sizeof(status) - 1, 0);
	raw_close(fd);
	const char *tracer = len > 0 ? strstr(status, "\nTracerPid:\t") : NULL;
	return tracer && tracer[sizeof("\nTracerPid:\t") - 1] != '0';
}

/* ---- the environment ---- */
/* A value that was kept takes its place again, unless the program got another. */
static bool env_restores(char *const env[], enum start_how how, char *scratch)
{
	bool was_kept = false;

	for (; how != START_WITHOUT && *env; env++) {
		was_kept |= is_variable(*env, kept);
		if (is_variable(*env, preload) && preload_without_ours(scratch, *env))
			return false;
	}
	return was_kept;
}

static char *const *env_make(char *const env[], const struct start *start, char **room)
{
	size_t count = 2 + (size_t)start->carried_len, at = 0;

	for (char *const *each = env; *each; each++)
		count++;
	char **made = (char **)(void *)*room, *text = (char *)(made + count);
	const bool restores = env_restores(env, start->how, text);
	for (; *env; env++) {
		if (is_variable(*env, program) || (restores && is_variable(*env, preload)))
			continue;
		made[at] = *env;
		if (restores && is_variable(*env, kept))
			sprintf(made[at] = text, "%s%s", preload, *env + sizeof(kept) - 1);
		else if (start->how == START_WITHOUT && is_variable(*env, preload))
			preload_without_ours(made[at] = text, *env);
		if (made[at++] == text)
			text += strlen(text) + 1;
	}
	if (start->how == START_LOADED) {
		made[at++] = text;
		text += sprintf(text, "%s%s", program, start->resolved) + 1;
	}
	for (int i = 0; i < start->carried_len; i++)
		made[at++] = start->carried[i];
	made[at] = NULL;
	*room = text;
	return made;
}

/* ---- all together ---- */
static size_t room_needed(const struct start *start, char *const argv[], char *const env[])
{
	size_t text = sizeof(program) + strlen(start->resolved);
	size_t count = 8 + 2 * START_SCRIPTS_MAX + (size_t)start->carried_len;

	for (; *env; env++, count++)
		if (is_variable(*env, preload) || is_variable(*env, kept))
			text += strlen(*env) + sizeof(kept);
	for (; argv && *argv; argv++)
		count++;
	return count * sizeof(char *) + text;
}

bool start_differs(struct start *start, int dir, const char *file, char *const argv[], char *const env[])
{
	KEEP_ERRNO;
	char line[LINE_LENGTH];
	enum kind kind;

	start->how = START_AS_IT_IS;
	start->dynamic = false;
	start->scripts_len = start->carried_len = 0;
	start->loader = NULL;
	if (!fd_table_len || !file)
		return false;
	env = env_or_none(env);
	while ((kind = look(dir, file, line, start->resolved)) == KIND_SCRIPT) {
		if (start->scripts_len == START_SCRIPTS_MAX || !line_split(line, &start->scripts[start->scripts_len]))
			return false;
		file = start->scripts[start->scripts_len++].interpreter;
		dir = AT_FDCWD;
	}
	/* Valgrind's own program is static, and runs the other, with its preloaded libraries, itself. */
	if ((kind == KIND_STATIC || kind == KIND_MUSL || kind == KIND_GO) && *start->resolved == '/' && !is_traced() &&
	    !env_has(env, "VALGRIND_LAUNCHER="))
		start->loader = loader_find();
	const bool by_musl = kind == KIND_MUSL || kind == KIND_MUSL_RAISED;
	start->how = start->loader ? START_LOADED : by_musl ? START_WITHOUT : START_AS_IT_IS;
	start->dynamic = kind == KIND_DYNAMIC;
	if (start->loader || kind == KIND_DYNAMIC || kind == KIND_GO)
		start->carried_len = env_carried(env, &start->carried);
	start->room = room_needed(start, argv, env);
	return start->how != START_AS_IT_IS || start->carried_len || env_has(env, kept) || env_has(env, program);
}

/* The same loader as ours: another may not load the library that this one has loaded. */
static bool same_loader(const char *program_file)
{
	char name[LINE_LENGTH] = "";
	Elf64_Ehdr header;
	Elf64_Phdr segment;
	struct stat theirs, our;
	Dl_info info;
	bool found = false;
	int fd = proc_open(program_file, O_RDONLY);

	if (fd < 0)
		return false;
	if (read_at(fd, &header, sizeof(header), 0))
		for (int i = 0; i < header.e_phnum && i < SEGMENTS_MAX && !found; i++)
			found = read_at(fd, &segment, sizeof(segment), header.e_phoff + (uint64_t)i * sizeof(segment)) &&
			        segment.p_type == PT_INTERP && segment.p_filesz && segment.p_filesz <= sizeof(name) &&
			        read_at(fd, name, segment.p_filesz - 1, segment.p_offset);
	raw_close(fd);
	return found && *name == '/' && stat(name, &theirs) == 0 && dladdr((void *)getauxval(AT_BASE), &info) &&
	       info.dli_fname && stat(info.dli_fname, &our) == 0 && theirs.st_dev == our.st_dev &&
	       theirs.st_ino == our.st_ino;
}

/* True if a security module is in force. It may change the program's domain, and the loader ignores LD_PRELOAD then. */
static bool confined(void)
{
	char text[64];
	int fd = proc_open("/proc/self/attr/current", O_RDONLY);
	ssize_t n = fd < 0 ? -1 : real.syscall(SYS_read, fd, (long)text, sizeof(text) - 1, 0, 0, 0);

	if (fd >= 0)
		raw_close(fd);
	text[n > 0 ? n : 0] = '\0';
	text[strcspn(text, "\n")] = '\0';
	return n > 0 &&
	       strcmp(text, "unconfined") != 0; /* AppArmor's word; SELinux' labels that begin with it are not free */
}

/* The file that this process runs, which has come so far by the calls that we see. */
static bool is_own(const char *file)
{
	struct stat theirs, our;

	return stat(file, &theirs) == 0 && stat("/proc/self/exe", &our) == 0 && theirs.st_dev == our.st_dev &&
	       theirs.st_ino == our.st_ino;
}

bool start_has_shim(const struct start *start, char *const env[])
{
	const char *library = env_library();
	int preloads = 0;

	for (; *env; env++) {
		if (is_variable(*env, "SIDESTEP_DISABLE="))
			return false;
		if (is_variable(*env, preload))
			preloads = preload_names(*env, library) && !preloads ? 1 : 2;
	}
	if (!library || preloads != 1 || confined())
		return false;
	if (start->how == START_LOADED)
		return same_loader(start->loader);
	return start->how == START_AS_IT_IS && start->dynamic && same_loader(start->resolved) &&
	       (is_own(start->resolved) || !program_calls(start->resolved));
}

/*
 * Arguments of a script, as the kernel has them: its interpreters with their arguments go before its name, which takes the
 * place of argv[0].
 */
static char *const *argv_make(char *const argv[], const char *file, const struct start *start, char **room)
{
	char **made = (char **)(void *)*room, **to = made;

	if (start->how != START_LOADED || !start->scripts_len)
		return argv;
	for (int i = start->scripts_len - 1; i >= 0; i--) {
		*to++ = (char *)start->scripts[i].interpreter;
		if (*start->scripts[i].argument)
			*to++ = (char *)start->scripts[i].argument;
	}
	*to++ = (char *)file;
	for (argv += argv && *argv; argv && *argv; argv++)
		*to++ = *argv;
	*to++ = NULL;
	*room = (char *)to;
	return made;
}

void start_make(struct start *start, const char *file, char *const **argv, char *const **env, void *room)
{
	char *at = room;

	*argv = argv_make(*argv, file, start, &at);
	*env = env_make(env_or_none(*env), start, &at);
}
