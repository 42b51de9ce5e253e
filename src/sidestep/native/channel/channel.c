/* channel.c - making, checking and mapping segments. See channel.h. */
#define _GNU_SOURCE
#include "channel.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

static bool ring_size_ok(uint32_t size)
{
	return size >= CHANNEL_RING_MIN && size <= CHANNEL_RING_MAX && (size & (size - 1)) == 0;
}

static uint32_t spill_size(uint32_t ring_size)
{
	return ring_size > CHANNEL_SPILL ? ring_size : CHANNEL_SPILL;
}

static size_t segment_len(uint32_t size0, uint32_t size1)
{
	return (size_t)CHANNEL_HEADER_SIZE + size0 + spill_size(size0) + size1 + spill_size(size1);
}

int channel_memory(const char *name, size_t len)
{
	struct rlimit limit;

	/* Memory counts as a file: the kernel would end the program, by SIGXFSZ. */
	if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < len)
		return -EFBIG;
	int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (fd < 0 || ftruncate(fd, (off_t)len) == 0)
		return fd < 0 ? -errno : fd;
	int failed = errno;
	close(fd);
	return -failed;
}

int channel_create(uint32_t tx_size, uint32_t rx_size)
{
	if (!ring_size_ok(tx_size) || !ring_size_ok(rx_size))
		return -EINVAL;
	int fd = channel_memory("sidestep-channel", segment_len(tx_size, rx_size));
	if (fd < 0)
		return fd;

	struct channel_segment header = {
		.magic = CHANNEL_MAGIC, .version = CHANNEL_VERSION, .ring_size = {tx_size, rx_size}};
	if (pwrite(fd, &header, offsetof(struct channel_segment, pad), 0) < 0 ||
	    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0) {
		int failed = errno;
		close(fd);
		return -failed;
	}
	return fd;
}

bool channel_stays(int fd)
{
	struct statfs fs;
	int seals = fcntl(fd, F_GET_SEALS);

	return seals >= 0 && (seals & (F_SEAL_SHRINK | F_SEAL_GROW)) == (F_SEAL_SHRINK | F_SEAL_GROW) &&
	       fstatfs(fd, &fs) == 0 && fs.f_type == TMPFS_MAGIC;
}

/* A program that keeps all its memory in RAM (mlockall, MCL_FUTURE) fills a mapping at once, but not one without access. */
static void *map_untouched(void *hint, int fd, size_t offset, size_t len)
{
	void *at = mmap(hint, len, PROT_NONE, MAP_SHARED, fd, (off_t)offset);

	if (at == MAP_FAILED)
		return NULL;
	(void)munlock(at, len);
	if (mprotect(at, len, PROT_READ | PROT_WRITE) == 0) {
		/* A core dump would touch every page. */
		(void)madvise(at, len, MADV_DONTDUMP);
		return at;
	}
	int failed = errno;
	munmap(at, len);
	errno = failed;
	return NULL;
}

/* Sizes of the rings of a file of that length, from its header. 0 or -errno. */
static int read_geometry(int fd, off_t file_len, uint32_t size[2])
{
	struct channel_segment *seg = mmap(NULL, CHANNEL_HEADER_SIZE, PROT_READ, MAP_SHARED, fd, 0);

	if (seg == MAP_FAILED)
		return -errno;
	/* Geometry is read once, through volatile so that the check and the use are of one load. */
	const volatile struct channel_segment *words = seg;
	uint32_t magic = words->magic, version = words->version;
	size[0] = words->ring_size[0];
	size[1] = words->ring_size[1];
	munmap(seg, CHANNEL_HEADER_SIZE);
	return magic == CHANNEL_MAGIC && version == CHANNEL_VERSION && ring_size_ok(size[0]) && ring_size_ok(size[1]) &&
	               segment_len(size[0], size[1]) == (size_t)file_len
	           ? 0
	           : -EPROTO;
}

#define SPILLS_SPAN ((uint64_t)512 << 30) /* addresses below the first segment, for the spills */
#define SPILLS_APART_MAX 16384u /* segments in two mappings; a process has 65530, see proc_sys_vm(5) */
static _Atomic uint32_t spills_apart;

/*
 * Place for the spills of a segment that is mapped at `seg` without them, away from where the kernel puts small mappings.
 * Any other will do, if it is taken. NULL: there are too few addresses.
 */
static void *spills_hint(const void *seg, size_t len)
{
	static _Atomic uintptr_t base;
	static _Atomic uint64_t used;
	uintptr_t first = atomic_load(&base);

	if (!first) {
		uintptr_t at = (uintptr_t)seg & ~(uintptr_t)(CHANNEL_SPILL - 1);
		if (sizeof(at) < sizeof(uint64_t) || at / 2 < SPILLS_SPAN)
			return NULL;
		uintptr_t below = at - (uintptr_t)SPILLS_SPAN;
		first = atomic_compare_exchange_strong(&base, &first, below) ? below : first;
	}
	uint64_t offset = atomic_fetch_add(&used, len) & (SPILLS_SPAN - 1);
	return (void *)(first + (uintptr_t)offset);
}

/*
 * Maps a segment in two parts. A page table is a page for each 2 MiB of addresses. Idle connections whose spills lie between
 * would have one each; without them they share it. False: there is no memory, or too many have been mapped so.
 */
static bool map_apart(struct channel_end *end, int fd, size_t front, size_t spills, uint8_t **spill)
{
	if (atomic_fetch_add(&spills_apart, 1) < SPILLS_APART_MAX) {
		void *seg = map_untouched(NULL, fd, 0, front), *hint = seg ? spills_hint(seg, spills) : NULL;
		*spill = hint ? map_untouched(hint, fd, front, spills) : NULL;
		if (*spill) {
			end->seg = seg;
			end->map_len = front;
			end->spills = *spill;
			end->spills_len = spills;
			return true;
		}
		if (seg)
			munmap(seg, front);
	}
	atomic_fetch_sub(&spills_apart, 1);
	return false;
}

int channel_map_as(struct channel_end *end, int fd, int side, const struct channel_own *own, bool apart)
{
	struct stat st;
	int seals = fcntl(fd, F_GET_SEALS);
	uint32_t size[2] = {0};

	if (seals < 0)
		return -EINVAL;
	if (!channel_stays(fd) || (seals & F_SEAL_WRITE)) /* a file with WRITE sealed is of no use */
		return -EPROTO;
	if (fstat(fd, &st) < 0)
		return -errno;
	if (st.st_size < (off_t)segment_len(CHANNEL_RING_MIN, CHANNEL_RING_MIN) ||
	    st.st_size > (off_t)segment_len(CHANNEL_RING_MAX, CHANNEL_RING_MAX))
		return -EPROTO;
	int failed = read_geometry(fd, st.st_size, size);
	if (failed)
		return failed;
	size_t front = (size_t)CHANNEL_HEADER_SIZE + size[0] + size[1], spills_len = (size_t)st.st_size - front;
	struct channel_end made = {.own = *own};
	uint8_t *spills;
	if (!apart || !map_apart(&made, fd, front, spills_len, &spills)) {
		made.seg = map_untouched(NULL, fd, 0, (size_t)st.st_size);
		if (!made.seg)
			return -errno;
		made.map_len = (size_t)st.st_size;
		spills = (uint8_t *)made.seg + front;
	}
	int peer = 1 - side;
	uint8_t *at = (uint8_t *)made.seg + CHANNEL_HEADER_SIZE;
	struct channel_ring ring[2] = {
		{at, spills, size[0], spill_size(size[0])},
		{at + size[0], spills + spill_size(size[0]), size[1], spill_size(size[1])},
	};
	made.local = &made.seg->side[side];
	made.remote = &made.seg->side[peer];
	made.tx = ring[side];
	made.rx = ring[peer];
	made.tx_line = &made.seg->producer[side];
	made.tx_peer_line = &made.seg->consumer[side];
	made.rx_line = &made.seg->consumer[peer];
	made.rx_peer_line = &made.seg->producer[peer];
	*end = made;
	uint32_t uncounted = 0;
	atomic_compare_exchange_strong(&end->tx_line->pages, &uncounted, 2);
	return 0;
}

void channel_unmap(struct channel_end *end)
{
	if (end->seg)
		munmap(end->seg, end->map_len);
	if (end->seg && end->spills) {
		munmap(end->spills, end->spills_len);
		atomic_fetch_sub(&spills_apart, 1);
	}
	end->seg = NULL;
}

bool channel_tx_spill(struct channel_end *end, uint64_t most)
{
	uint64_t tail = atomic_load_explicit(end->own.tail, memory_order_relaxed);
	uint64_t head = atomic_load_explicit(end->own.head_seen, memory_order_relaxed);
	uint64_t limit = head + (most < channel_tx_most(end) ? most : channel_tx_most(end));

	if ((int64_t)(limit - channel_tx_until(end, head)) <= 0)
		return false;
	atomic_store(end->own.limit, limit);
	if (!atomic_load_explicit(end->own.ring_to, memory_order_relaxed)) {
		if ((int64_t)(head - atomic_load_explicit(end->own.ring_from, memory_order_relaxed)) >= 0)
			atomic_store(end->own.spill_base, tail); /* everything before is read */
		atomic_store(end->own.ring_to, tail + 1);
	}
	channel_tx_show(end);
	return true;
}

void channel_tx_settle(struct channel_end *end)
{
	uint64_t tail = atomic_load_explicit(end->own.tail, memory_order_relaxed);
	uint64_t to = atomic_load_explicit(end->own.ring_to, memory_order_relaxed);

	if (!to || channel_tx_space(end, SIZE_MAX) < 0) /* a fresh head, checked */
		return;
	uint64_t head = atomic_load_explicit(end->own.head_seen, memory_order_relaxed);
	if ((int64_t)(head - (to - 1)) < 0 || tail - head > end->tx.size / 2)
		return; /* bytes of the last stretch in the ring are unread, or too many others */
	atomic_store(end->own.ring_from, tail); /* the ring is empty between these two */
	atomic_store(end->own.ring_to, 0);
	channel_tx_show(end);
}

/*
 * A line that one CPU has just written is in its cache. The other CPU reads it from there, 64 bytes at a time. On a machine
 * with two level-3 caches that is slower than memory by far. Stores that are not temporal go to memory, from which the reader
 * fetches ahead.
 *
 * memcpy() of glibc before 2.40 is `rep movsb` for so many bytes. AMD's Zen 3 and 4 take up to four times as long for it where
 * both places have nearly the same offset in a page. A buffer of malloc() is 16 bytes behind a page.
 */
void channel_copy_long(void *to, const void *from, size_t len, bool past)
{
#if defined(__x86_64__)
	const size_t line = 64, odd = -(uintptr_t)to & (line - 1);
	uint8_t *at = to;
	const uint8_t *bytes = from;

	if (len < odd + line) {
		memcpy(to, from, len);
		return;
	}
	memcpy(at, bytes, odd);
	at += odd;
	bytes += odd;
	len -= odd;
	for (; len >= line; at += line, bytes += line, len -= line) {
		const __m128i *load = (const __m128i *)bytes;
		__m128i *store = (__m128i *)at;
		__m128i first = _mm_loadu_si128(load), second = _mm_loadu_si128(load + 1);
		__m128i third = _mm_loadu_si128(load + 2), fourth = _mm_loadu_si128(load + 3);
		if (past) {
			_mm_stream_si128(store, first);
			_mm_stream_si128(store + 1, second);
			_mm_stream_si128(store + 2, third);
			_mm_stream_si128(store + 3, fourth);
		} else {
			_mm_store_si128(store, first);
			_mm_store_si128(store + 1, second);
			_mm_store_si128(store + 2, third);
			_mm_store_si128(store + 3, fourth);
		}
	}
	if (past)
		_mm_sfence(); /* The release of the tail orders no such store: AMD64 manual, volume 2, 7.4.2. */
	memcpy(at, bytes, len);
#else
	(void)past;
	memcpy(to, from, len);
#endif
}

/* Failure (an old kernel, a foreign seal) only keeps the memory. */
static void give_back(uint8_t *at, size_t len)
{
	(void)madvise(at, len, MADV_REMOVE);
}

void channel_trim(struct channel_end *end)
{
	_Atomic uint32_t *pages = &end->tx_line->pages;
	uint32_t during = atomic_load_explicit(pages, memory_order_relaxed) | 1; /* odd even if a process was killed here */

	atomic_store(pages, during);
	give_back(end->tx.data, end->tx.size);
	atomic_store(pages, during + 1);
	give_back(end->tx.spill, end->tx.spill_size);
}

bool channel_trim_spill(struct channel_end *end)
{
	uint64_t from = atomic_load_explicit(end->own.ring_from, memory_order_relaxed);

	if (atomic_load_explicit(end->own.ring_to, memory_order_relaxed) ||
	    (int64_t)(atomic_load_explicit(&end->tx_peer_line->head, memory_order_acquire) - from) < 0)
		return false;
	give_back(end->tx.spill, end->tx.spill_size);
	return true;
}
