/*
 * shim_environment.c - our part of an environment, and how it goes on into programs that get one of their caller's making.
 *
 * Some servers start programs with an environment of their own (nginx's upgrade, dovecot, `env -i`). The entries with which
 * this process was started go on into it if it has nothing of ours, nor any LD_PRELOAD: a caller that takes out one name, or
 * sets one, means it. But a caller that takes out PATH as well cleans the environment, as inetd removes harmful names. Of
 * LD_PRELOAD our library alone goes on; the others were the program's to drop.
 */
#include "shim.h"

#include <dlfcn.h>
#include <sys/stat.h>

#include "loaded.h"

#define CARRIED_MAX 32                /* more names than there are */
#define ARGUMENT_MAX (128u << 10)     /* MAX_ARG_STRLEN of linux/binfmts.h */
#define OURS "SIDESTEP_"              /* beginning of our names */

static const char preload[] = "LD_PRELOAD=", library[] = "libsidestep.so";
static const char search_path[] = "PATH=";
static bool had_path;
static char *carried[CARRIED_MAX]; /* entries of ours, the library first */
static int carried_len;            /* 0: nothing is carried */

bool is_variable(const char *entry, const char *name)
{
	return strncmp(entry, name, strlen(name)) == 0;
}

bool env_has(char *const env[], const char *name)
{
	for (; *env; env++)
		if (is_variable(*env, name))
			return true;
	return false;
}

char *const *env_or_none(char *const env[])
{
	static char *const none[] = {NULL};

	return env ? env : none;
}

static bool is_ours(const char *path, size_t len)
{
	const size_t name = sizeof(library) - 1;

	return len >= name && memcmp(path + len - name, library, name) == 0 && (len == name || path[len - name - 1] == '/');
}

/* The other libraries that are to be loaded first; an empty name is none. Whether ours was among them. */
bool preload_without_ours(char *to, const char *entry)
{
	bool was_there = false;

	to += sprintf(to, "%s", preload);
	for (entry += sizeof(preload) - 1; *entry; entry += strspn(entry, " :")) {
		size_t len = strcspn(entry, " :");
		bool our = is_ours(entry, len);
		if (!our)
			to += sprintf(to, "%.*s:", (int)len, entry);
		was_there |= our;
		entry += len;
	}
	return was_there;
}

/* True if an entry LD_PRELOAD=…, or what our loader has made of it, names our library. */
static bool preloads_ours(const char *entry)
{
	for (entry += strcspn(entry, "=") + 1; *entry; entry += strspn(entry, " :")) {
		size_t len = strcspn(entry, " :");
		if (is_ours(entry, len))
			return true;
		entry += len;
	}
	return false;
}

/* Entries that concern one program alone stay with it, and a shell has to be able to export all others. */
static bool is_carried(const char *entry)
{
	static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZ_0123456789";

	return is_variable(entry, OURS) && !is_variable(entry, "SIDESTEP_TRAVEL=") &&
	       entry[strspn(entry, letters)] == '=' && !is_variable(entry, LOADED_PROGRAM "=") &&
	       !is_variable(entry, LOADED_PRELOAD "=");
}

static char own_path[PATH_MAX];
static struct stat own_file;

const char *env_library(void)
{
	struct stat now;

	return *own_path && stat(own_path, &now) == 0 && now.st_dev == own_file.st_dev && now.st_ino == own_file.st_ino &&
	               access(own_path, R_OK) == 0
	           ? own_path
	           : NULL;
}

/* True if LD_PRELOAD=… has this very name among its words. */
bool preload_names(const char *entry, const char *name)
{
	for (entry += sizeof(preload) - 1; name && *entry; entry += strspn(entry, " :")) {
		size_t len = strcspn(entry, " :");
		if (len == strlen(name) && memcmp(entry, name, len) == 0)
			return true;
		entry += len;
	}
	return false;
}

void env_keep(void)
{
	char *const *env = env_or_none(environ);
	char entry[sizeof(preload) + PATH_MAX];
	const char *off = getenv("SIDESTEP_CARRY");
	bool preloaded = false;
	int len = 1;
	Dl_info info;

	if (!dladdr((void *)env_keep, &info) || !info.dli_fname || *info.dli_fname != '/' ||
	    strlen(info.dli_fname) >= sizeof(own_path) || stat(info.dli_fname, &own_file) < 0)
		return;
	strcpy(own_path, info.dli_fname);
	if (off && strcmp(off, "0") == 0)
		return;
	had_path = env_has(env, search_path);
	for (; *env; env++) {
		preloaded |= (is_variable(*env, preload) || is_variable(*env, LOADED_PRELOAD "=")) && preloads_ours(*env);
		if (is_carried(*env) && len < CARRIED_MAX && (carried[len] = strdup(*env)))
			len++;
	}
	/* If LD_PRELOAD were the only name, a caller that takes it out would look like one that empties the environment. */
	if (!preloaded || len == 1 ||
	    snprintf(entry, sizeof(entry), "%s%s", preload, info.dli_fname) >= (int)sizeof(entry) ||
	    !(carried[0] = strdup(entry)))
		return;
	carried_len = len;
}

/* True if all that is ours is there as it was, but PATH is gone, and with it the library. */
static bool is_cleaned(char *const env[])
{
	bool all = had_path && !env_has(env, search_path);

	for (int i = 1; all && i < carried_len; i++) {
		char *const *at = env;
		while (*at && strcmp(*at, carried[i]) != 0)
			at++;
		all = *at;
	}
	return all;
}

/*
 * Secure executions need no part of ours: in one (getauxval(3), AT_SECURE) the loader would take nothing of it, nor warn;
 * without the library it warns.
 */
int env_carried(char *const env[], char *const **entries)
{
	KEEP_ERRNO;

	if (!carried_len || env_has(env, preload) || getuid() != geteuid() || getgid() != getegid() ||
	    access(carried[0] + sizeof(preload) - 1, R_OK) < 0)
		return 0;
	const bool ours = env_has(env, OURS);
	if (ours && !is_cleaned(env))
		return 0;
	*entries = carried;
	return ours ? 1 : carried_len;
}

/* The text as one word of a shell. */
static char *quoted(char *to, const char *text)
{
	*to++ = '\'';
	for (; *text; text++)
		to += *text == '\'' ? sprintf(to, "'\\''") : sprintf(to, "%c", *text);
	*to++ = '\'';
	return to;
}

/* libc's system() and popen() start the shell with `environ`: it exports what is carried. NULL: the command as it is. */
char *command_carrying(const struct start *start, const char *command)
{
	size_t room = sizeof("export; ") + strlen(command);

	for (int i = 0; i < start->carried_len; i++)
		room += sizeof(" ''") + 4 * strlen(start->carried[i]);
	char *made = start->carried_len && room < ARGUMENT_MAX ? malloc(room) : NULL;
	if (!made)
		return NULL;
	char *at = made + sprintf(made, "export");
	for (int i = 0; i < start->carried_len; i++) {
		*at++ = ' ';
		at = quoted(at, start->carried[i]);
	}
	sprintf(at, "; %s", command);
	return made;
}
