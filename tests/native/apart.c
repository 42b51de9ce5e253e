/*
 * apart.c - segments whose spills are mapped elsewhere.
 *
 *     apart shared|bounded
 *
 * `shared`: many segments together have fewer page tables than one each. `bounded`: a
 * process has a limit of mappings, so beyond a number of segments each is one mapping again, as long as the others live.
 */
#include "check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SEGMENTS 64
#define RING (256u << 10)
#define APART_MAX 16384

static long page_tables_kib(void)
{
	char line[256];
	long kib = -1;
	FILE *status = fopen("/proc/self/status", "re");

	CHECK(status);
	while (fgets(line, sizeof(line), status))
		if (sscanf(line, "VmPTE: %ld", &kib) == 1)
			break;
	fclose(status);
	CHECK(kib >= 0);
	return kib;
}

static void open_apart(struct channel_end *end, int segment, int side, struct own_words *words)
{
	struct channel_own own = own_of(words);

	CHECK(channel_map_as(end, segment, side, &own, true) == 0);
}

static void test_shared(void)
{
	static struct channel_end ends[SEGMENTS];
	static struct own_words words[SEGMENTS];
	long before = page_tables_kib();

	for (int i = 0; i < SEGMENTS; i++) {
		int segment = channel_create(RING, RING);
		CHECK(segment >= 0);
		open_apart(&ends[i], segment, 0, &words[i]);
		close(segment);
		CHECK(ends[i].spills);
		channel_tx_put(&ends[i], 0, "abc", 3, false);
		channel_tx_publish(&ends[i], 3);
	}
	long used = page_tables_kib() - before;
	CHECK(used < SEGMENTS * 4 / 2, "%ld KiB", used);
	for (int i = 0; i < SEGMENTS; i++)
		channel_unmap(&ends[i]);
	CHECK(page_tables_kib() - before < SEGMENTS * 4 / 2);
}

static void test_bounded(void)
{
	static struct own_words words;
	struct channel_end *ends = calloc(APART_MAX + 1, sizeof(*ends)), again;
	int segment = channel_create(CHANNEL_RING_MIN, CHANNEL_RING_MIN);

	CHECK(ends && segment >= 0);
	for (int i = 0; i <= APART_MAX; i++) {
		open_apart(&ends[i], segment, i & 1, &words);
		CHECK((ends[i].spills != NULL) == (i < APART_MAX), "number %d", i);
	}
	channel_unmap(&ends[7]);
	channel_unmap(&ends[7]); /* counted once */
	open_apart(&ends[7], segment, 0, &words);
	CHECK(ends[7].spills);
	open_apart(&again, segment, 0, &words);
	CHECK(!again.spills);
	channel_unmap(&again);
	for (int i = 0; i <= APART_MAX; i++)
		channel_unmap(&ends[i]);
	close(segment);
	free(ends);
}

int main(int argc, char **argv)
{
	mappings_unguarded = true; /* guards lie between, and are mappings, too */
	if (argc == 2 && !strcmp(argv[1], "shared"))
		test_shared();
	else if (argc == 2 && !strcmp(argv[1], "bounded"))
		test_bounded();
	else
		return 2;
	return 0;
}
