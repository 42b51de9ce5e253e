/* shim_object.c - loaded objects, as the dynamic linker binds names to them; and what we export ourselves. */
#include "shim_object.h"

#include <sys/mman.h>

#define HIDDEN_VERSION 0x8000 /* version of a symbol that new programs are not bound to */

/* Linux's own object, and those of other systems' linkers, keep addresses as they are in the file. */
static const void *located(const struct dl_phdr_info *info, ElfW(Addr) address)
{
	return (const void *)(address < info->dlpi_addr ? info->dlpi_addr + address : address);
}

static void dynamic_read(const struct dl_phdr_info *info, const ElfW(Dyn) * dynamic, struct object *object)
{
	size_t soname = 0;

	for (; dynamic->d_tag != DT_NULL; dynamic++) {
		switch (dynamic->d_tag) {
		case DT_SYMTAB: object->symbols = located(info, dynamic->d_un.d_ptr); break;
		case DT_STRTAB: object->names = located(info, dynamic->d_un.d_ptr); break;
		case DT_STRSZ: object->names_len = dynamic->d_un.d_val; break;
		case DT_RELA: object->tables[0] = located(info, dynamic->d_un.d_ptr); break;
		case DT_RELASZ: object->lens[0] = dynamic->d_un.d_val / sizeof(ElfW(Rela)); break;
		case DT_JMPREL: object->tables[1] = located(info, dynamic->d_un.d_ptr); break;
		case DT_PLTRELSZ: object->lens[1] = dynamic->d_un.d_val / sizeof(ElfW(Rela)); break;
		case DT_GNU_HASH: object->hash = located(info, dynamic->d_un.d_ptr); break;
		case DT_VERSYM: object->versions = located(info, dynamic->d_un.d_ptr); break;
		case DT_SONAME: soname = dynamic->d_un.d_val; break;
		}
	}
	if (soname && object->names)
		object->soname = object->names + soname;
}

bool object_read(const struct dl_phdr_info *info, struct object *object)
{
	const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
	const ElfW(Dyn) *dynamic = NULL;

	*object = (struct object){.base = info->dlpi_addr};
	for (int i = 0; i < info->dlpi_phnum; i++) {
		const ElfW(Phdr) *part = &info->dlpi_phdr[i];
		const uintptr_t at = info->dlpi_addr + part->p_vaddr;
		if (part->p_type == PT_DYNAMIC)
			dynamic = (const ElfW(Dyn) *)at;
		if (part->p_type == PT_GNU_RELRO) {
			object->relro = at & -page;
			object->relro_end = (at + part->p_memsz) & -page;
		}
	}
	if (dynamic)
		dynamic_read(info, dynamic, object);
	return object->symbols && object->names;
}

static int object_is_ours(struct dl_phdr_info *info, size_t size, void *object)
{
	bool ours = false;

	(void)size;
	for (int i = 0; i < info->dlpi_phnum; i++) {
		const ElfW(Phdr) *part = &info->dlpi_phdr[i];
		ours |= part->p_type == PT_LOAD && (uintptr_t)object_read - info->dlpi_addr - part->p_vaddr < part->p_memsz;
	}
	return ours && object_read(info, object) && ((struct object *)object)->hash;
}

bool object_ours(struct object *object)
{
	return dl_iterate_phdr(object_is_ours, object) == 1;
}

uint32_t name_hash(const char *text)
{
	uint32_t hash = 5381;

	while (*text)
		hash = hash * 33 + (uint8_t)*text++;
	return hash;
}

/* DT_GNU_HASH: four words, a Bloom filter, and for each bucket its first symbol; then a word for each symbol. */
static const uint32_t *hash_buckets(const struct object *object)
{
	return object->hash + 4 + object->hash[2] * (sizeof(ElfW(Addr)) / sizeof(uint32_t));
}

static bool is_function(const ElfW(Sym) * symbol)
{
	return ELF64_ST_TYPE(symbol->st_info) == STT_FUNC || ELF64_ST_TYPE(symbol->st_info) == STT_GNU_IFUNC;
}

/* The function that the linker binds the name to, if it looks here; NULL: it looks on. */
ElfW(Sym) * object_find(const struct object *object, const char *text, uint32_t hash)
{
	const uint32_t *table = object->hash;

	if (!table || !table[0] || !table[2])
		return NULL;
	const ElfW(Addr) filter = ((const ElfW(Addr) *)(table + 4))[hash / (8 * sizeof(filter)) & (table[2] - 1)];
	const uint32_t *buckets = hash_buckets(object), *chain = buckets + table[0] - table[1];
	if (!(filter >> hash % (8 * sizeof(filter)) & filter >> (hash >> table[3]) % (8 * sizeof(filter)) & 1))
		return NULL;
	for (uint32_t at = buckets[hash % table[0]]; at >= table[1]; at++) {
		const ElfW(Sym) *symbol = &object->symbols[at];
		if ((chain[at] | 1) == (hash | 1) && symbol->st_shndx != SHN_UNDEF && is_function(symbol) &&
		    !(object->versions && object->versions[at] & HIDDEN_VERSION) &&
		    strcmp(object->names + symbol->st_name, text) == 0)
			return (ElfW(Sym) *)symbol;
		if (chain[at] & 1)
			break;
	}
	return NULL;
}

/* The names that a linker would bind to us, but for those that are ours alone. Returns how many. */
uint32_t names_read(const struct object *ours, struct name names[NAMES_MAX])
{
	const uint32_t *table = ours->hash, *buckets = hash_buckets(ours), *chain = buckets + table[0] - table[1];
	uint32_t len = 0;

	for (uint32_t i = 0; i < table[0]; i++)
		for (uint32_t at = buckets[i]; at >= table[1]; at++) {
			const ElfW(Sym) *symbol = &ours->symbols[at];
			const char *text = ours->names + symbol->st_name;
			if (ELF64_ST_TYPE(symbol->st_info) == STT_FUNC && strncmp(text, "sidestep_", 9) != 0 && len < NAMES_MAX)
				names[len++] = (struct name){text, ours->base + symbol->st_value, name_hash(text), false};
			if (chain[at] & 1)
				break;
		}
	return len;
}

bool pages_open(uintptr_t start, uintptr_t end)
{
	const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);

	start &= -page;
	return mprotect((void *)start, end - start, PROT_READ | PROT_WRITE) == 0;
}

void pages_shut(uintptr_t start, uintptr_t end)
{
	const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);

	start &= -page;
	mprotect((void *)start, end - start, PROT_READ);
}
