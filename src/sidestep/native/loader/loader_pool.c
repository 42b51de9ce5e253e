/*
 * loader_pool.c - room for trampolines, near the code. The end of each piece lists the sites of its trampolines, from the
 * last one on.
 */
#include "loader.h"

#include <sys/mman.h>
#include <sys/syscall.h>

#define POOLS_MAX 64

static struct pool {
	uint8_t *begin, *free;
	struct made *made;
} pools[POOLS_MAX];
static size_t pools_len, pools_done;

static bool pool_has_room(const struct pool *pool, size_t length)
{
	return pool->free + length <= (const uint8_t *)(pool->made - 1);
}

static bool near_to(const uint8_t *a, const uint8_t *b)
{
	return a - b < REACH && b - a < REACH;
}

static struct pool *pool_at(uintptr_t hint)
{
	void *at = (void *)raw(SYS_mmap, (long)hint, POOL_SIZE, PROT_READ | PROT_WRITE,
	                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);

	if ((uintptr_t)at > -4096ul)
		return NULL;
	if (at != (void *)hint) { /* a kernel that does not know the flag */
		raw(SYS_munmap, (long)at, POOL_SIZE, 0, 0, 0, 0);
		return NULL;
	}
	pools[pools_len] = (struct pool){at, at, (struct made *)((uint8_t *)at + POOL_SIZE)};
	return &pools[pools_len++];
}

static struct pool *pool_near(const uint8_t *site, size_t length)
{
	for (size_t i = pools_done; i < pools_len; i++)
		if (near_to(pools[i].begin, site) && pool_has_room(&pools[i], length))
			return &pools[i];
	if (pools_len == POOLS_MAX)
		return NULL;
	/* distances that are not close by: a program's heap grows there */
	for (long distance = 16l << 20; distance < REACH - (16l << 20); distance += 8l << 20)
		for (int sign = 1; sign >= -1; sign -= 2) {
			uintptr_t hint = ((uintptr_t)site + (uintptr_t)(sign * distance)) & ~(POOL_SIZE - 1);
			struct pool *pool = hint > POOL_SIZE && hint < 1ul << 47 ? pool_at(hint) : NULL;
			if (pool)
				return pool;
		}
	return NULL;
}

static struct pool *last;

uint8_t *pool_room(const uint8_t *site, size_t length)
{
	last = pool_near(site, length);
	return last ? last->free : NULL;
}

void pool_take(const struct made *made, const uint8_t *end)
{
	last->made[-1] = *made;
	__atomic_store_n(&last->made, last->made - 1, __ATOMIC_RELEASE); /* handlers look at it */
	last->free += (end - last->free + 15) & ~15l;
}

const struct made *pool_find(uint64_t at)
{
	const uint8_t *here = (const uint8_t *)at;

	for (size_t i = 0; i < pools_len; i++) {
		const struct pool *pool = &pools[i];
		if (here < pool->begin || here >= pool->free)
			continue;
		const struct made *made = pool->made;
		while (here < made->begin)
			made++;
		return made;
	}
	return NULL;
}

bool trampolines_finish(void)
{
	for (; pools_done < pools_len; pools_done++) {
		__builtin___clear_cache((char *)pools[pools_done].begin, (char *)pools[pools_done].free);
		if (raw(SYS_mprotect, (long)pools[pools_done].begin, POOL_SIZE, PROT_READ | PROT_EXEC, 0, 0, 0))
			return false;
	}
	return true;
}
