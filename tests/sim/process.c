/*
 * process.c - processes that are forked.
 *
 * Parent and child run the same library at the same addresses, as they do in a kernel: what a process has for itself (the
 * library's variables, its allocations, its stack) is copied out before the other of the two goes on, and back again. What a
 * fork shares stays where it is.
 */
#define _GNU_SOURCE
#include "process.h"

#include <dlfcn.h>
#include <link.h>
#include <stdlib.h>
#include <string.h>

#include "kernel.h"

#define HEAP (1u << 20)
#define REGIONS_MAX 64
#define MAPPED_MAX (256u << 10) /* of a larger piece, the table of descriptors, only the numbers that there are */

static struct family {
	void (*before)(void), (*parent)(void), (*child)(void);
	struct region {
		uint8_t *at;
		size_t len;
	} regions[REGIONS_MAX];
	size_t regions_len, heap_used;
	int resident; /* whose memory is in place: 0 the parent's, 1 the child's */
} families[2];
static uint8_t heaps[2][HEAP] __attribute__((aligned(16)));
static struct image {
	uint8_t *regions[REGIONS_MAX], *stack;
	size_t stack_len;
} images[ENDS];

static struct family *family_now(void)
{
	return &families[current_end() & 1];
}

void process_atfork(void (*before)(void), void (*parent)(void), void (*child)(void))
{
	struct family *family = family_now();

	family->before = before;
	family->parent = parent;
	family->child = child;
}

static void region_add(struct family *family, void *at, size_t len)
{
	if (family->regions_len == REGIONS_MAX)
		fail("a process of more than %d pieces of memory", REGIONS_MAX);
	family->regions[family->regions_len++] = (struct region){at, len};
}

void process_memory(void *at, size_t len)
{
	/* what either has for itself since they parted is at an address of its own */
	if (!ends[2 + (current_end() & 1)].started)
		region_add(family_now(), at, len < MAPPED_MAX ? len : FDS_MAX * sizeof(void *));
}

void *process_allocate(size_t len)
{
	struct family *family = family_now();
	uint8_t *at = heaps[current_end() & 1] + family->heap_used;

	family->heap_used += (len + 15) & ~(size_t)15;
	if (family->heap_used > HEAP)
		fail("a process of more than %u bytes", HEAP);
	return at;
}

bool process_allocated(const void *at)
{
	return (const uint8_t *)at >= heaps[0] && (const uint8_t *)at < heaps[0] + sizeof(heaps);
}

/* The library's variables, and its thread's. */
static int library_regions(struct dl_phdr_info *info, size_t size, void *library)
{
	size_t page = 4096;
	uintptr_t relro_end = 0;
	Dl_info found;

	(void)size;
	if (!dladdr(dlsym(library, "close"), &found) || (uintptr_t)found.dli_fbase != info->dlpi_addr)
		return 0;
	for (int i = 0; i < info->dlpi_phnum; i++)
		if (info->dlpi_phdr[i].p_type == PT_GNU_RELRO)
			relro_end = (info->dlpi_addr + info->dlpi_phdr[i].p_vaddr + info->dlpi_phdr[i].p_memsz) & ~(page - 1);
	for (int i = 0; i < info->dlpi_phnum; i++) {
		const ElfW(Phdr) *header = &info->dlpi_phdr[i];
		uintptr_t at = info->dlpi_addr + header->p_vaddr, end = at + header->p_memsz;
		if (header->p_type == PT_LOAD && (header->p_flags & PF_W)) {
			at = at < relro_end && relro_end < end ? relro_end : at;
			region_add(family_now(), (void *)at, end - at);
		} else if (header->p_type == PT_TLS && info->dlpi_tls_data) {
			region_add(family_now(), info->dlpi_tls_data, header->p_memsz);
		}
	}
	return 1;
}

/* ---- programs ---- */
static struct pristine {
	uintptr_t base;
	const uint8_t *from;
	uint8_t *bytes;
	size_t len, zeros; /* as the file has it, and behind that */
} pristine[2];

/* The part of a library that it can write, but for what is written when it is loaded. */
static int pristine_of(struct dl_phdr_info *info, size_t size, void *to)
{
	struct pristine *found = to;
	uintptr_t relro_end = 0;

	(void)size;
	if (info->dlpi_addr != found->base)
		return 0;
	for (int i = 0; i < info->dlpi_phnum; i++)
		if (info->dlpi_phdr[i].p_type == PT_GNU_RELRO)
			relro_end = (info->dlpi_addr + info->dlpi_phdr[i].p_vaddr + info->dlpi_phdr[i].p_memsz) & ~(uintptr_t)4095;
	for (int i = 0; i < info->dlpi_phnum; i++) {
		const ElfW(Phdr) *header = &info->dlpi_phdr[i];
		uintptr_t at = info->dlpi_addr + header->p_vaddr, file_end = at + header->p_filesz, end = at + header->p_memsz;
		if (header->p_type != PT_LOAD || !(header->p_flags & PF_W))
			continue;
		at = at < relro_end && relro_end < end ? relro_end : at;
		found->from = (const uint8_t *)at;
		found->len = file_end > at ? file_end - at : 0;
		found->zeros = end - at - found->len;
	}
	return 1;
}

void process_loaded(const void *code)
{
	Dl_info found;
	int i = 0;

	if (!dladdr(code, &found))
		fail("a library that is none");
	for (; i < 2 && pristine[i].base; i++)
		if (pristine[i].base == (uintptr_t)found.dli_fbase)
			return;
	if (i == 2)
		fail("a third library");
	pristine[i].base = (uintptr_t)found.dli_fbase;
	dl_iterate_phdr(pristine_of, &pristine[i]);
	pristine[i].bytes = malloc(pristine[i].len);
	memcpy(pristine[i].bytes, pristine[i].from, pristine[i].len);
}

static int thread_begins(struct dl_phdr_info *info, size_t size, void *base)
{
	(void)size;
	if (info->dlpi_addr != (uintptr_t)base)
		return 0;
	for (int i = 0; i < info->dlpi_phnum; i++) {
		const ElfW(Phdr) *header = &info->dlpi_phdr[i];
		if (header->p_type != PT_TLS || !info->dlpi_tls_data)
			continue;
		memcpy(info->dlpi_tls_data, (const void *)(info->dlpi_addr + header->p_vaddr), header->p_filesz);
		memset((uint8_t *)info->dlpi_tls_data + header->p_filesz, 0, header->p_memsz - header->p_filesz);
	}
	return 1;
}

/* The program that is executed has the same library at the same place. */
void process_execute(void *library)
{
	struct link_map *map;
	void (*const *begins)(int, char **, char **) = NULL;
	size_t len = 0;

	dlinfo(library, RTLD_DI_LINKMAP, &map);
	for (int i = 0; i < 2; i++)
		if (pristine[i].base == map->l_addr) {
			memcpy((void *)pristine[i].from, pristine[i].bytes, pristine[i].len);
			memset((uint8_t *)pristine[i].from + pristine[i].len, 0, pristine[i].zeros);
		}
	dl_iterate_phdr(thread_begins, (void *)map->l_addr);
	for (const ElfW(Dyn) *at = map->l_ld; at->d_tag; at++)
		if (at->d_tag == DT_INIT_ARRAY)
			begins = (void (*const *)(int, char **, char **))(map->l_addr + at->d_un.d_ptr);
		else if (at->d_tag == DT_INIT_ARRAYSZ)
			len = at->d_un.d_val / sizeof(*begins);
	for (size_t i = 0; i < len; i++)
		begins[i](0, NULL, NULL);
}

static uint8_t *stack_low(const struct end *end)
{
#if defined(__x86_64__)
	return (uint8_t *)end->context.uc_mcontext.gregs[REG_RSP] - 128;
#else
	return (uint8_t *)end->context.uc_mcontext.sp;
#endif
}

static void image_take(const struct end *end)
{
	const struct family *family = &families[end->index & 1];
	struct image *image = &images[end->index];
	uint8_t *low = stack_low(end);

	for (size_t i = 0; i < family->regions_len; i++) {
		if (!image->regions[i])
			image->regions[i] = malloc(family->regions[i].len);
		memcpy(image->regions[i], family->regions[i].at, family->regions[i].len);
	}
	image->stack_len = (size_t)(end->stack + STACK - low);
	image->stack = realloc(image->stack, image->stack_len);
	memcpy(image->stack, low, image->stack_len);
}

void process_enter(struct end *end)
{
	struct family *family = &families[end->index & 1];
	const struct image *image = &images[end->index];
	int which = end->index >> 1;

	if (family->resident == which)
		return;
	if (!ends[end->index ^ 2].over)
		image_take(&ends[end->index ^ 2]);
	for (size_t i = 0; i < family->regions_len; i++)
		memcpy(family->regions[i].at, image->regions[i], family->regions[i].len);
	memcpy(end->stack + STACK - image->stack_len, image->stack, image->stack_len);
	family->resident = which;
}

int process_fork(void *library)
{
	struct end *parent = current, *child = &ends[parent->index + 2];
	struct family *family = family_now();

	family->before();
	dl_iterate_phdr(library_regions, library);
	region_add(family, heaps[parent->index], family->heap_used);
	fds_fork(parent->index, child->index);
	child->stack = parent->stack;
	getcontext(&child->context);
	if (current == child) {
		family->child();
		return 0;
	}
	image_take(child);
	child->started = true;
	family->parent();
	return 1000 + child->index;
}
