/*
 * shim_names.c - ways past us by the C library's table of names.
 *
 * We come first where the dynamic linker binds the calls of an object. For an object that is opened with RTLD_DEEPBIND it
 * looks into the C library before us. For dlsym() with a handle of the C library it looks there alone. So the table of the C
 * library names our functions. That is data: no instruction changes, and no page that may be written may be executed.
 *
 * Ours takes the place of the very function that ours calls in turn, and of no other. If another library stands between, such
 * as a sanitizer's runtime, its name leads to us. The C library's name, which that one calls, stays as it is.
 */
#include "shim_object.h"

struct walk {
	struct object ours;
	struct name names[NAMES_MAX];
	uint32_t names_len;
	bool behind; /* us, in the order in which the linker looks */
	bool failed;
};

/*
 * True if the pages of the symbols up to `end` have no code. Linkers put it into a segment of its own, or behind the symbols
 * and their names.
 */
static bool is_apart(const struct dl_phdr_info *info, const struct object *object, uintptr_t end)
{
	const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), over = (end + page - 1) & -page;
	const uintptr_t symbols = (uintptr_t)object->symbols, names = (uintptr_t)object->names;
	bool with_code = false;

	for (int i = 0; i < info->dlpi_phnum; i++) {
		const ElfW(Phdr) *part = &info->dlpi_phdr[i];
		const uintptr_t at = info->dlpi_addr + part->p_vaddr;
		with_code |= part->p_type == PT_LOAD && (part->p_flags & PF_X) && at < over && symbols < at + part->p_memsz;
	}
	return !with_code || (symbols < names && over <= names + object->names_len);
}

static int object_rename(struct dl_phdr_info *info, size_t size, void *argument)
{
	struct walk *walk = argument;
	struct object object;
	ElfW(Sym) * found[NAMES_MAX], *first = NULL, *last = NULL;

	(void)size;
	if (!object_read(info, &object))
		return 0;
	if (object.base == walk->ours.base)
		walk->behind = true;
	if (!walk->behind || object.base == walk->ours.base)
		return 0;
	for (uint32_t i = 0; i < walk->names_len; i++) {
		struct name *name = &walk->names[i];
		found[i] = name->bound ? NULL : object_find(&object, name->text, name->hash);
		if (!found[i])
			continue;
		name->bound = !object_is(&object, LIBPTHREAD);
		first = !first || found[i] < first ? found[i] : first;
		last = found[i] > last ? found[i] : last;
	}
	if (!first || !is_apart(info, &object, (uintptr_t)(last + 1)))
		return 0;
	if (!pages_open((uintptr_t)first, (uintptr_t)(last + 1))) {
		walk->failed = true;
		return 1;
	}
	for (uint32_t i = 0; i < walk->names_len; i++)
		if (found[i] && ELF64_ST_TYPE(found[i]->st_info) == STT_FUNC)
			__atomic_store_n(&found[i]->st_value, walk->names[i].function - object.base, __ATOMIC_RELEASE);
	pages_shut((uintptr_t)first, (uintptr_t)(last + 1));
	return 0;
}

/* Functions of other libraries, as liburing's, are looked for when they are called: they would lead back to us. */
static int names_of_libc(struct dl_phdr_info *info, size_t size, void *argument)
{
	struct walk *walk = argument;
	struct object object;
	uint32_t kept = 0;

	(void)size;
	if (!object_read(info, &object) || !object_is(&object, LIBC))
		return 0;
	for (uint32_t i = 0; i < walk->names_len; i++)
		if (object_find(&object, walk->names[i].text, walk->names[i].hash))
			walk->names[kept++] = walk->names[i];
	walk->names_len = kept;
	return 1;
}

bool names_redirect(void)
{
	struct walk walk = {.behind = main_program != NULL};

	if (!object_ours(&walk.ours))
		return false;
	walk.names_len = names_read(&walk.ours, walk.names);
	if (dl_iterate_phdr(names_of_libc, &walk))
		dl_iterate_phdr(object_rename, &walk);
	return !walk.failed;
}
