/* shim_object.h - loaded objects, as the dynamic linker binds names to them. */
#ifndef SIDESTEP_SHIM_OBJECT_H
#define SIDESTEP_SHIM_OBJECT_H

#include "shim_base.h"

#include <elf.h>
#include <link.h>

struct object {
	uintptr_t base;
	const ElfW(Sym) * symbols;
	const char *names;
	size_t names_len; /* bytes */
	const char *soname; /* NULL: it has none */
	const uint16_t *versions; /* NULL: it has none */
	const ElfW(Rela) * tables[2]; /* DT_RELA, DT_JMPREL */
	size_t lens[2];              /* entries */
	const uint32_t *hash;
	uintptr_t relro, relro_end; /* pages that the linker made read-only when it was done */
};

/* A function of ours that stands before another of that name. */
struct name {
	const char *text;
	uintptr_t function;
	uint32_t hash;
	bool bound;
};

#define NAMES_MAX 320 /* the library exports fewer */
#define LIBC "libc.so"
#define LIBPTHREAD "libpthread.so" /* glibc before 2.34: it has some functions of the C library once more */

static inline bool object_is(const struct object *object, const char *library)
{
	return object->soname && strncmp(object->soname, library, strlen(library)) == 0;
}

bool object_read(const struct dl_phdr_info *info, struct object *object);
bool object_ours(struct object *object);
ElfW(Sym) * object_find(const struct object *object, const char *text, uint32_t hash);
uint32_t name_hash(const char *text);
uint32_t names_read(const struct object *ours, struct name names[NAMES_MAX]);

/* Pages of an object, so that words in them can be changed. No code lies there: afterwards they can be read alone. */
bool pages_open(uintptr_t start, uintptr_t end);
void pages_shut(uintptr_t start, uintptr_t end);

bool names_redirect(void);   /* shim_names.c; false: the pages cannot be written */
void streams_redirect(void); /* shim_stdio.c */

#endif
