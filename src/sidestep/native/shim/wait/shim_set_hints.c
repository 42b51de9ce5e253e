/* shim_set_hints.c - which of many members have news: their peers name them, so that a set need not look at each. */
#include "shim_set.h"

bool grow(void *array, uint32_t *cap, uint32_t wanted, size_t size)
{
	void **at = array;

	if (wanted <= *cap)
		return true;
	uint32_t larger = *cap ? *cap * 2 : 16;
	void *bigger = realloc(*at, (size_t)larger * size);
	if (!bigger)
		return false;
	memset((uint8_t *)bigger + *cap * size, 0, (larger - *cap) * size);
	*at = bigger;
	*cap = larger;
	return true;
}

void hot_add(struct set *set, struct member *member)
{
	if (!set->hinting || member->hot)
		return;
	if (!grow(&set->hot, &set->hot_cap, set->hot_len + 1, sizeof(*set->hot))) {
		set->scan_all = true;
		return;
	}
	member->hot = true;
	set->hot[set->hot_len++] = member;
}

static void hot_drop(struct set *set, struct member *member)
{
	for (uint32_t i = 0; member->hot && i < set->hot_len; i++)
		if (set->hot[i] == member) {
			set->hot[i] = set->hot[--set->hot_len];
			member->hot = false;
		}
}

void feed_enter(struct set *set, struct member *member)
{
	struct remote_doorbell *doorbell = member->conn->remote_doorbell;
	uint32_t expected = atomic_load(&member->conn->channel.local->hint) & HINT_RING_ALWAYS, at = 0;

	while (at < set->feeds_len && set->feeds[at].doorbell != doorbell)
		at++;
	/* A connection in several sets gives its hints to one of them; a peer that rings always has another page by now. */
	if (!doorbell->hints || atomic_load(&member->conn->channel.remote->hint) & HINT_RING_ALWAYS ||
	    (at == set->feeds_len && !grow(&set->feeds, &set->feeds_cap, at + 1, sizeof(*set->feeds))) ||
	    !atomic_compare_exchange_strong(&member->conn->channel.local->hint, &expected, expected | member->index)) {
		set->unhinted++;
		return;
	}
	full_fence(); /* fence between asking for hints and this look; the peer does it the other way round, see take_up() */
	if (atomic_load(&member->conn->channel.remote->hint) & HINT_RING_ALWAYS) {
		atomic_fetch_and(&member->conn->channel.local->hint, HINT_RING_ALWAYS);
		set->unhinted++;
		return;
	}
	if (at == set->feeds_len)
		set->feeds[set->feeds_len++] = (struct feed){doorbell, atomic_load(&doorbell->hints->tail), 0};
	set->feeds[at].refs++;
	member->hinted = true;
	/* A look finds bytes that were published before the peer could see the request. */
	hot_add(set, member);
}

void feed_exit(struct set *set, struct member *member)
{
	if (!set->hinting)
		return;
	hot_drop(set, member);
	if (!member->hinted) {
		set->unhinted--;
		return;
	}
	member->hinted = false;
	if (set->owner_pid == shim_pid)
		atomic_fetch_and(&member->conn->channel.local->hint, HINT_RING_ALWAYS);
	for (uint32_t i = 0; i < set->feeds_len; i++)
		if (set->feeds[i].doorbell == member->conn->remote_doorbell && --set->feeds[i].refs == 0) {
			set->feeds[i] = set->feeds[--set->feeds_len];
			return;
		}
}

/* Marks the members that peers have named since the last time. Every word read here is a peer's: it may only cost time. */
void feeds_read(struct set *set)
{
	for (uint32_t i = 0; i < set->feeds_len; i++) {
		struct feed *feed = &set->feeds[i];
		uint64_t tail = atomic_load_explicit(&feed->doorbell->hints->tail, memory_order_acquire);

		if (likely(tail == feed->seen))
			continue;
		if (tail - feed->seen > HINTS) {
			set->scan_all = true;
			feed->seen = tail;
			continue;
		}
		for (; feed->seen != tail; feed->seen++) {
			uint64_t entry =
				atomic_load_explicit(&feed->doorbell->hints->entry[feed->seen % HINTS], memory_order_acquire);
			uint32_t index = (uint32_t)entry;
			if (!hint_valid(entry, feed->seen)) {
				set->scan_all = true; /* the connections that it names were published before */
			} else if (index < set->members_len && set->members[index] && set->members[index]->managed &&
			           set->members[index]->conn->remote_doorbell == feed->doorbell) {
				hot_add(set, set->members[index]);
			}
		}
	}
}
