/* loader_image.c - maps an ELF file as the kernel does (System V ABI, chapter 5), and has its code patched. */
#include "loader.h"

#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#define SEGMENTS_MAX 64
#define SECTIONS_MAX 128
#define SIZE_MAX_MAPPED (1ul << 40)
#define DOWN(at) ((at) & ~(PAGE - 1))
#define UP(at) DOWN((at) + PAGE - 1)

static bool read_at(int fd, void *to, size_t size, uint64_t at)
{
	return raw(SYS_pread64, fd, (long)to, (long)size, (long)at, 0, 0) == (long)size;
}

struct file {
	int fd;
	Elf64_Ehdr header;
	Elf64_Phdr segments[SEGMENTS_MAX];
	uint64_t low, high; /* bounds of its segments' addresses */
	bool by_go;
};

static const char *file_read(struct file *file)
{
	const Elf64_Ehdr *header = &file->header;
	struct stat st;

	if (!read_at(file->fd, &file->header, sizeof(file->header), 0) || memcmp(header->e_ident, ELFMAG, SELFMAG) != 0 ||
	    header->e_ident[EI_CLASS] != ELFCLASS64 || header->e_ident[EI_DATA] != ELFDATA2LSB)
		return "it is no ELF file of 64 bits";
	if (header->e_machine != MACHINE || (header->e_type != ET_EXEC && header->e_type != ET_DYN))
		return "it is no program for this machine";
	if (header->e_phentsize != sizeof(*file->segments) || !header->e_phnum || header->e_phnum > SEGMENTS_MAX ||
	    !read_at(file->fd, file->segments, header->e_phnum * sizeof(*file->segments), header->e_phoff))
		return "its program headers cannot be read";
	if (fstat(file->fd, &st) < 0)
		return "it cannot be read";
	file->low = UINT64_MAX;
	file->by_go = shim->made_by_go(file->fd, header);
	for (int i = 0; i < header->e_phnum; i++) {
		const Elf64_Phdr *segment = &file->segments[i];
		if (segment->p_type != PT_LOAD)
			continue;
		if (segment->p_filesz > (uint64_t)st.st_size || segment->p_offset > (uint64_t)st.st_size - segment->p_filesz)
			return "it is cut off";
		if (segment->p_filesz > segment->p_memsz || segment->p_memsz > SIZE_MAX_MAPPED ||
		    segment->p_vaddr > SIZE_MAX_MAPPED * 128 || (segment->p_vaddr - segment->p_offset) % PAGE)
			return "a segment of it is malformed";
		if (DOWN(segment->p_vaddr) < file->low)
			file->low = DOWN(segment->p_vaddr);
		if (UP(segment->p_vaddr + segment->p_memsz) > file->high)
			file->high = UP(segment->p_vaddr + segment->p_memsz);
	}
	if (file->low >= file->high || file->high - file->low > SIZE_MAX_MAPPED)
		return "it has nothing to map";
	return NULL;
}

static int protection(const Elf64_Phdr *segment)
{
	return (segment->p_flags & PF_R ? PROT_READ : 0) | (segment->p_flags & PF_W ? PROT_WRITE : 0) |
	       (segment->p_flags & PF_X ? PROT_EXEC : 0);
}

static bool map(uint64_t at, uint64_t length, int prot, int flags, int fd, uint64_t offset)
{
	return raw(SYS_mmap, (long)at, (long)length, prot, MAP_PRIVATE | MAP_FIXED | flags, fd, (long)offset) == (long)at;
}

/* One segment: what the file has, and zeros. Code can be written until it has been patched. */
static bool segment_map(const struct file *file, const Elf64_Phdr *segment, uint64_t bias)
{
	uint64_t at = bias + segment->p_vaddr, page = DOWN(at), skew = at - page, file_end = at + segment->p_filesz;
	uint64_t zeros = UP(file_end), end = UP(at + segment->p_memsz);
	int prot = protection(segment);
	int first = prot & PROT_EXEC ? PROT_READ | PROT_WRITE : prot;

	if (!segment->p_filesz)
		zeros = page;
	else if (!map(page, segment->p_filesz + skew, first, 0, file->fd, segment->p_offset - skew))
		return false;
	if (segment->p_memsz > segment->p_filesz && segment->p_filesz && prot & PROT_WRITE)
		memset((void *)file_end, 0, zeros - file_end); /* zeros to the page's end: glibc's loader counts on that */
	return end <= zeros || map(zeros, end - zeros, first, MAP_ANONYMOUS, -1, 0);
}

/* Patches the executable sections that lie in [begin, begin + length) of the file, which is mapped at `at`. */
static const char *sections_patch(int fd, uint8_t *at, uint64_t begin, uint64_t length, bool by_go, struct sites *sites)
{
	static Elf64_Shdr sections[SECTIONS_MAX];
	Elf64_Ehdr header;
	bool any = false;

	if (!read_at(fd, &header, sizeof(header), 0) || header.e_shentsize != sizeof(*sections) || !header.e_shnum ||
	    header.e_shnum > SECTIONS_MAX || !read_at(fd, sections, header.e_shnum * sizeof(*sections), header.e_shoff))
		return "it has no section headers, which tell code from data";
	for (int i = 0; i < header.e_shnum; i++) {
		const Elf64_Shdr *section = &sections[i];
		if (!(section->sh_flags & SHF_EXECINSTR) || section->sh_type != SHT_PROGBITS || section->sh_offset < begin ||
		    section->sh_size > length || section->sh_offset - begin > length - section->sh_size)
			continue;
		uint8_t *code_at = at + (section->sh_offset - begin);
		struct code code = {code_at, code_at + section->sh_size, by_go};
		sites_patch(&code, sites);
		__builtin___clear_cache((char *)code.begin, (char *)code.end);
		any = true;
	}
	return any ? NULL : "its code is in no section";
}

static const char *segments_map(struct image *image, const struct file *file, struct sites *sites)
{
	for (int i = 0; i < file->header.e_phnum; i++) {
		const Elf64_Phdr *segment = &file->segments[i];
		uint64_t at = image->bias + segment->p_vaddr;
		if (segment->p_type == PT_PHDR)
			image->headers = at;
		if (segment->p_type == PT_INTERP &&
		    (segment->p_filesz < 2 || segment->p_filesz > sizeof(image->interpreter) ||
		     !read_at(file->fd, image->interpreter, segment->p_filesz, segment->p_offset)))
			return "the name of its loader cannot be read";
		if (segment->p_type != PT_LOAD)
			continue;
		if (!image->headers && file->header.e_phoff >= segment->p_offset &&
		    file->header.e_phoff < segment->p_offset + segment->p_filesz)
			image->headers = at + (file->header.e_phoff - segment->p_offset);
		if (!segment_map(file, segment, image->bias))
			return "it cannot be mapped";
		if (!(segment->p_flags & PF_X))
			continue;
		if (segment->p_flags & PF_W)
			return "its code can be written";
		const char *why =
			sections_patch(file->fd, (uint8_t *)at, segment->p_offset, segment->p_filesz, file->by_go, sites);
		if (why)
			return why;
		if (raw(SYS_mprotect, (long)DOWN(at), (long)(UP(at + segment->p_memsz) - DOWN(at)), protection(segment), 0, 0,
		        0))
			return "memory that was written to cannot be made executable here";
	}
	image->interpreter[sizeof(image->interpreter) - 1] = '\0';
	return NULL;
}

static const char *file_map(struct image *image, struct file *file, struct sites *sites)
{
	const char *why = file_read(file);
	bool fixed = file->header.e_type == ET_EXEC;

	if (why)
		return why;
	uint64_t length = file->high - file->low, want = fixed ? file->low : 0;
	uint64_t at = (uint64_t)raw(SYS_mmap, (long)want, (long)length, PROT_NONE,
	                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (fixed ? MAP_FIXED_NOREPLACE : 0), -1, 0);
	if (at > -4096ul || (fixed && at != want))
		return fixed ? "the addresses that it must lie at are taken" : "there is no room for it";
	image->bias = at - file->low;
	image->entry = image->bias + file->header.e_entry;
	image->headers_count = file->header.e_phnum;
	return segments_map(image, file, sites);
}

const char *image_load(struct image *image, struct sites *sites)
{
	struct file file = {.fd = (int)raw(SYS_openat, AT_FDCWD, (long)image->path, O_RDONLY | O_CLOEXEC, 0, 0, 0)};

	if (file.fd < 0)
		return "it cannot be read";
	const char *why = file_map(image, &file, sites);
	raw(SYS_close, file.fd, 0, 0, 0, 0, 0);
	return why;
}

static uint64_t pages(uint64_t length)
{
	return UP(length);
}

/* A library of the program's: nobody executes it yet. */
void code_mapped(uint8_t *at, uint64_t length, int fd, uint64_t offset, int prot)
{
	struct sites sites = {0};

	if (raw(SYS_mprotect, (long)at, (long)pages(length), PROT_READ | PROT_WRITE, 0, 0, 0)) {
		shim->uncovered();
		return;
	}
	const char *why = sections_patch(fd, at, offset, length, false, &sites);
	if (why || sites.left_len || !trampolines_finish() || prot & PROT_WRITE)
		shim->uncovered();
	raw(SYS_mprotect, (long)at, (long)pages(length), prot, 0, 0, 0);
}

/* Code in memory without a file: made as the program runs. */
void code_made(const uint8_t *at, uint64_t length, bool writable)
{
	if (writable || calls_in(at, length))
		shim->uncovered();
}
