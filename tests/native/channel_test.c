/* channel_test.c - tests of channel.[ch]. Without arguments: lists them; with one: runs it, silently if it holds. */
#include "check.h"

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096u

/* A ring and the spill behind it. */
static size_t with_spill(uint32_t ring)
{
	return (size_t)ring + (ring > CHANNEL_SPILL ? ring : CHANNEL_SPILL);
}

static blkcnt_t blocks_of(int fd)
{
	struct stat st;

	CHECK(fstat(fd, &st) == 0);
	return st.st_blocks;
}

/* ---- making and mapping ---- */
static void test_create_refuses_bad_sizes(void)
{
	static const uint32_t bad[] = {0, 1, 2048, 4095, 4097, 12288, (64u << 20) + 1, 128u << 20, 1u << 31, UINT32_MAX};

	for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
		CHECK(channel_create(bad[i], PAGE) == -EINVAL, "%u", bad[i]);
		CHECK(channel_create(PAGE, bad[i]) == -EINVAL, "%u", bad[i]);
	}
}

static void test_create_makes_a_sealed_segment(void)
{
	for (uint32_t tx = CHANNEL_RING_MIN; tx; tx = tx < CHANNEL_RING_MAX ? tx * 2 : 0) {
		struct stat st;
		int fd = channel_create(tx, CHANNEL_RING_MIN);
		CHECK(fd >= 0, "%u: %d", tx, fd);
		CHECK(fcntl(fd, F_GETFD) & FD_CLOEXEC);
		CHECK(fcntl(fd, F_GET_SEALS) == (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL));
		CHECK(fstat(fd, &st) == 0 &&
		      st.st_size == (off_t)(CHANNEL_HEADER_SIZE + with_spill(tx) + with_spill(CHANNEL_RING_MIN)));
		CHECK(ftruncate(fd, 0) < 0 && ftruncate(fd, st.st_size + PAGE) < 0);
		struct own_words words = {0};
		struct channel_own own = own_of(&words);
		struct channel_end end;
		CHECK(channel_map(&end, fd, 0, &own) == 0);
		CHECK(end.tx.size == tx && end.rx.size == CHANNEL_RING_MIN);
		CHECK(end.tx.spill_size == with_spill(tx) - tx && end.rx.spill_size == CHANNEL_SPILL);
		channel_unmap(&end);
		channel_unmap(&end); /* twice is allowed */
		close(fd);
	}
}

/* A segment as a peer might send it. */
struct forged {
	uint32_t magic, version, size0, size1;
	off_t len;
	int seals;
};

#define SEALED (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
#define TWO_PAGES (CHANNEL_HEADER_SIZE + 2 * (PAGE + CHANNEL_SPILL))
#define HONEST {CHANNEL_MAGIC, CHANNEL_VERSION, PAGE, PAGE, TWO_PAGES, SEALED}

static int map_forged(const struct forged *forged)
{
	int fd = memfd_create("forged", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	uint32_t header[4] = {forged->magic, forged->version, forged->size0, forged->size1};
	struct own_words words = {0};
	struct channel_own own = own_of(&words);
	struct channel_end end;

	CHECK(fd >= 0 && ftruncate(fd, forged->len) == 0);
	if (forged->len >= (off_t)sizeof(header))
		CHECK(pwrite(fd, header, sizeof(header), 0) == sizeof(header));
	CHECK(!forged->seals || fcntl(fd, F_ADD_SEALS, forged->seals) == 0);
	int result = channel_map(&end, fd, 1, &own);
	if (result == 0)
		channel_unmap(&end);
	close(fd);
	return result;
}

static void test_map_refuses_bad_geometry(void)
{
	static const uint32_t sizes[] = {0, 1, 4095, 4097, 8191, 12288, 128u << 20, 1u << 31, UINT32_MAX, 0xfffff000u};
	struct forged honest = HONEST, forged;

	CHECK(map_forged(&honest) == 0);
	for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
		forged = honest;
		forged.size0 = sizes[i];
		CHECK(map_forged(&forged) == -EPROTO, "size0 %u", sizes[i]);
		forged = honest;
		forged.size1 = sizes[i];
		CHECK(map_forged(&forged) == -EPROTO, "size1 %u", sizes[i]);
	}
	/* sizes whose sum, cut to 32 bits, would fit the file */
	forged = honest;
	forged.size0 = forged.size1 = 0x80001000u;
	CHECK(map_forged(&forged) == -EPROTO);
	forged = honest;
	forged.size1 = 2 * PAGE; /* larger than the file */
	CHECK(map_forged(&forged) == -EPROTO);
	forged.len = TWO_PAGES + PAGE;
	CHECK(map_forged(&forged) == 0);
	forged.len++;
	CHECK(map_forged(&forged) == -EPROTO);
	forged = honest;
	forged.magic ^= 1u << 31;
	CHECK(map_forged(&forged) == -EPROTO);
	for (uint32_t version = 0; version < 8; version++) {
		forged = honest;
		forged.version = version;
		CHECK(map_forged(&forged) == (version == CHANNEL_VERSION ? 0 : -EPROTO));
	}
	static const off_t lengths[] = {0, 1, 16, PAGE, TWO_PAGES - 1, TWO_PAGES - PAGE, (off_t)1 << 40};
	for (size_t i = 0; i < sizeof(lengths) / sizeof(*lengths); i++) {
		forged = honest;
		forged.len = lengths[i];
		CHECK(map_forged(&forged) == -EPROTO, "length %lld", (long long)lengths[i]);
	}
}

static void test_map_refuses_bad_seals(void)
{
	static const int weak[] = {0,
	                           F_SEAL_SEAL,
	                           F_SEAL_SHRINK,
	                           F_SEAL_GROW,
	                           F_SEAL_GROW | F_SEAL_SEAL,
	                           F_SEAL_SHRINK | F_SEAL_SEAL,
	                           SEALED | F_SEAL_WRITE};
	struct forged forged = HONEST;

	for (size_t i = 0; i < sizeof(weak) / sizeof(*weak); i++) {
		forged.seals = weak[i];
		CHECK(map_forged(&forged) == -EPROTO, "seals %d", weak[i]);
	}
	/* FUTURE_WRITE makes a writable mapping impossible */
	forged.seals = SEALED | 0x10;
	CHECK(map_forged(&forged) < 0);
}

/* A program that keeps its memory in RAM does not fill 16 MiB for each direction. */
static void test_locked_memory_is_not_filled(void)
{
	struct end ends[2];
	int fd;

	CHECK(mlockall(MCL_FUTURE) == 0 || geteuid());
	ends_open(ends, PAGE, PAGE, &fd);
	CHECK(blocks_of(fd) <= 8, "%lld", (long long)blocks_of(fd)); /* its header */
	munlockall();
	ends_close(ends);
	close(fd);
}

static void test_map_refuses_other_files(void)
{
	struct own_words words = {0};
	struct channel_own own = own_of(&words);
	struct channel_end end;
	int pipes[2];

	CHECK(pipe2(pipes, O_CLOEXEC) == 0);
	int null = open("/dev/null", O_RDWR | O_CLOEXEC), zero = open("/dev/zero", O_RDWR | O_CLOEXEC);
	int program = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
	CHECK(null >= 0 && zero >= 0 && program >= 0);
	const int others[] = {-1, 1 << 20, pipes[0], pipes[1], null, zero, program};
	for (size_t i = 0; i < sizeof(others) / sizeof(*others); i++)
		CHECK(channel_map(&end, others[i], 0, &own) == -EINVAL, "number %zu", i);
	/* a descriptor that may only be read cannot be mapped writable */
	char path[64];
	int segment = channel_create(PAGE, PAGE);
	snprintf(path, sizeof(path), "/proc/self/fd/%d", segment);
	int reader = open(path, O_RDONLY | O_CLOEXEC);
	CHECK(reader >= 0 && channel_map(&end, reader, 0, &own) == -EACCES);
	for (size_t i = 2; i < sizeof(others) / sizeof(*others); i++)
		close(others[i]);
	close(segment);
	close(reader);
}

/* ---- the stream ---- */
static void run_pattern(struct end *from, struct end *to, size_t write_len, size_t read_len, uint64_t *position)
{
	uint64_t sent = *position, received = *position, stop = sent + 3 * (uint64_t)from->channel.tx.size + 17;

	while (received < stop) {
		size_t want = stop - sent < write_len ? (size_t)(stop - sent) : write_len;
		sent += end_send(from, 1, sent, want);
		received += end_receive(to, 1, received, read_len);
		size_t unread = channel_tx_unread(&from->channel);
		CHECK(unread == sent - received, "unread %zu", unread);
		CHECK(channel_rx_avail(&to->channel) == (int64_t)unread && channel_rx_peek(&to->channel) == unread);
		CHECK(channel_tx_space(&from->channel, SIZE_MAX) == (int64_t)(from->channel.tx.size - unread));
		CHECK(channel_tx_peek(&from->channel) == from->channel.tx.size - unread);
	}
	*position = stop;
}

static void test_every_size_pattern(void)
{
	static const uint32_t rings[][2] = {{PAGE, PAGE}, {PAGE, 4 * PAGE}, {16 * PAGE, PAGE}};
	static const size_t lens[] = {1, 2, 3, 7, 63, 64, 65, 127, 128, 129, 1000, 2048, 4095, 4096, 4097, 70000};
	const size_t lens_len = sizeof(lens) / sizeof(*lens);

	for (size_t r = 0; r < sizeof(rings) / sizeof(*rings); r++) {
		struct end ends[2];
		uint64_t position[2] = {0, 0};
		ends_open(ends, rings[r][0], rings[r][1], NULL);
		for (size_t w = 0; w < lens_len; w++)
			for (size_t i = 0; i < lens_len; i++)
				for (int from = 0; from < 2; from++) {
					/* byte by byte through a large ring is the same code over and over */
					if (ends[from].channel.tx.size > PAGE && (lens[w] < 63 || lens[i] < 63))
						continue;
					run_pattern(&ends[from], &ends[1 - from], lens[w], lens[i], &position[from]);
				}
		ends_close(ends);
	}
}

static void test_wrap_of_the_ring(void)
{
	struct end ends[2];
	uint64_t position = 0;

	ends_open(ends, PAGE, PAGE, NULL);
	/* every start in the ring, so every split of a message that wraps */
	for (uint32_t turn = 0; turn < 2 * PAGE; turn++) {
		CHECK(end_send(&ends[0], 1, position, 97) == 97);
		CHECK(end_receive(&ends[1], 1, position, 97) == 97);
		position += 97;
	}
	ends_close(ends);
}

/* The counts are free-running: they may pass 2^64. */
static void test_wrap_of_the_counts(void)
{
	struct end ends[2];

	for (uint64_t before = 1; before < 3 * PAGE; before += 511) {
		uint64_t start = 0 - before, position = start;
		ends_open(ends, PAGE, PAGE, NULL);
		ends[0].own.tail = ends[0].own.head_seen = ends[1].own.head = start;
		ends[0].channel.tx_line->tail = start;
		ends[0].channel.tx_peer_line->head = start;
		ends[0].channel.head_reported = ends[1].channel.tail_reported = start;
		while (position - start < 5 * (uint64_t)PAGE) {
			size_t sent = end_send(&ends[0], 1, position, 1000);
			CHECK(sent == 1000 && end_send(&ends[0], 1, position + sent, PAGE) == PAGE - 1000);
			CHECK(end_send(&ends[0], 1, 0, 1) == 0);
			CHECK(channel_tx_unread(&ends[0].channel) == PAGE);
			CHECK(end_receive(&ends[1], 1, position, SIZE_MAX) == PAGE);
			position += PAGE;
		}
		ends_close(ends);
	}
}

static void test_full_and_empty(void)
{
	struct end ends[2];

	ends_open(ends, PAGE, PAGE, NULL);
	CHECK(channel_rx_avail(&ends[1].channel) == 0 && channel_tx_unread(&ends[0].channel) == 0);
	CHECK(end_receive(&ends[1], 1, 0, 100) == 0);
	CHECK(end_send(&ends[0], 1, 0, SIZE_MAX) == PAGE);
	CHECK(channel_tx_space(&ends[0].channel, 1) == 0 && channel_rx_avail(&ends[1].channel) == PAGE);
	CHECK(end_send(&ends[0], 1, 0, 1) == 0);
	CHECK(end_receive(&ends[1], 1, 0, 1) == 1);
	CHECK(channel_tx_space(&ends[0].channel, 1) == 1);
	CHECK(end_send(&ends[0], 1, PAGE, 100) == 1);
	CHECK(end_receive(&ends[1], 1, 1, SIZE_MAX) == PAGE);
	CHECK(channel_rx_avail(&ends[1].channel) == 0);
	ends_close(ends);
}

/* Every place in a line, on both sides, and lengths about a line and a page; nothing beside it is touched. */
static void test_copies_to_any_place(void)
{
	enum { ROOM = 3 * 4096 };
	static const size_t lens[] = {0, 1, 63, 64, 65, 127, 128, 255, 4095, 4096, 4097, 8000};
	static uint8_t from[ROOM], to[ROOM];

	for (size_t i = 0; i < ROOM; i++)
		from[i] = (uint8_t)(i * 7 + (i >> 8));
	for (int past = 0; past < 2; past++)
		for (size_t at = 0; at < 66; at++)
			for (size_t source = 0; source < 66; source += 1 + at % 5)
				for (size_t i = 0; i < sizeof(lens) / sizeof(*lens); i++) {
					memset(to, 0xee, ROOM);
					channel_copy(to + at, from + source, lens[i], past);
					CHECK(memcmp(to + at, from + source, lens[i]) == 0);
					CHECK((!at || to[at - 1] == 0xee) && to[at + lens[i]] == 0xee);
				}
}

static void test_pieces_name_the_bytes(void)
{
	struct end ends[2];
	struct dice dice = {7};
	uint64_t position = 0;

	ends_open(ends, PAGE, PAGE, NULL);
	for (int turn = 0; turn < 3000; turn++) {
		struct iovec out[CHANNEL_PIECES];
		size_t len = 1 + dice_below(&dice, PAGE), at = 0;
		int pieces = channel_tx_pieces(&ends[0].channel, len, out);
		CHECK(pieces == 1 || pieces == 2);
		CHECK(pieces == 2 || out[0].iov_len == len);
		for (int i = 0; i < pieces; i++) {
			uint8_t *bytes = out[i].iov_base;
			CHECK(bytes >= ends[0].channel.tx.data && bytes + out[i].iov_len <= ends[0].channel.tx.data + PAGE);
			CHECK(out[i].iov_len > 0);
			for (size_t j = 0; j < out[i].iov_len; j++)
				bytes[j] = stream_byte(1, position + at++);
		}
		CHECK(at == len);
		channel_tx_publish(&ends[0].channel, len);
		size_t offset = dice_below(&dice, len);
		pieces = channel_rx_pieces(&ends[1].channel, offset, len - offset, out);
		at = offset;
		for (int i = 0; i < pieces; i++) {
			const uint8_t *bytes = out[i].iov_base;
			CHECK(bytes >= ends[1].channel.rx.data && bytes + out[i].iov_len <= ends[1].channel.rx.data + PAGE);
			for (size_t j = 0; j < out[i].iov_len; j++)
				CHECK(bytes[j] == stream_byte(1, position + at++));
		}
		CHECK(at == len);
		CHECK(end_receive(&ends[1], 1, position, len) == len);
		position += len;
	}
	ends_close(ends);
}

static void test_rings_do_not_touch_each_other(void)
{
	struct end ends[2];
	struct dice dice = {11};
	uint64_t position[2] = {0, 0};

	ends_open(ends, PAGE, 2 * PAGE, NULL);
	/* all four are kept nearly full, so a byte written outside of one is a wrong byte in another */
	for (int side = 0; side < 2; side++) {
		uint32_t size = ends[side].channel.tx.size;
		CHECK(end_send(&ends[side], (uint64_t)side, 0, SIZE_MAX) == size);
		CHECK(channel_tx_spill(&ends[side].channel, SIZE_MAX));
		CHECK(end_send(&ends[side], (uint64_t)side, size, SIZE_MAX) == CHANNEL_SPILL - size);
	}
	for (int turn = 0; turn < 20000; turn++) {
		int side = (int)dice_below(&dice, 2);
		size_t len = end_receive(&ends[1 - side], (uint64_t)side, position[side], 1 + dice_below(&dice, 300));
		CHECK(channel_tx_space(&ends[side].channel, SIZE_MAX) >= 0 && channel_tx_spill(&ends[side].channel, SIZE_MAX));
		CHECK(end_send(&ends[side], (uint64_t)side, position[side] + CHANNEL_SPILL, len) == len);
		position[side] += len;
	}
	for (int side = 0; side < 2; side++)
		end_receive(&ends[1 - side], (uint64_t)side, position[side], SIZE_MAX);
	ends_close(ends);
}

static void test_trim_gives_pages_back(void)
{
	struct end ends[2];
	const uint32_t size = 64 * PAGE;
	int fd;

	ends_open(ends, size, size, &fd);
	for (int turn = 0; turn < 3; turn++) {
		uint64_t position = (uint64_t)turn * (size + 99);
		for (uint64_t done = 0; done < size + 99;) {
			size_t sent = end_send(&ends[0], 1, position + done, size);
			CHECK(end_receive(&ends[1], 1, position + done, SIZE_MAX) == sent);
			done += sent;
			if (done > size)
				done = size + 99;
		}
		/* what the loop sent beyond size + 99 belongs to nobody: start the next turn where the counts are */
		CHECK(channel_tx_unread(&ends[0].channel) == 0);
		blkcnt_t before = blocks_of(fd);
		channel_trim(&ends[0].channel);
		blkcnt_t after = blocks_of(fd);
		CHECK(before - after >= (blkcnt_t)(size / 512), "%lld -> %lld", (long long)before, (long long)after);
	}
	ends_close(ends);
	close(fd);
}

/* Twice each time, whatever somebody left who was killed in the midst of it. */
static void test_trim_counts(void)
{
	struct end ends[2];

	ends_open(ends, PAGE, PAGE, NULL);
	_Atomic uint32_t *pages = &ends[0].channel.tx_line->pages;
	uint32_t before = channel_rx_pages(&ends[1].channel);
	CHECK(before && channel_rx_pages(&ends[0].channel) == before);
	channel_trim(&ends[0].channel);
	CHECK(channel_rx_pages(&ends[1].channel) == before + 2 && channel_rx_pages(&ends[0].channel) == before);
	channel_trim_spill(&ends[0].channel);
	CHECK(channel_rx_pages(&ends[1].channel) == before + 2); /* nobody pins those */
	*pages |= 1;
	CHECK(channel_rx_pages(&ends[1].channel) == 0);
	channel_trim(&ends[0].channel);
	CHECK(channel_rx_pages(&ends[1].channel) == before + 4);
	*pages = UINT32_MAX;
	channel_trim(&ends[0].channel);
	CHECK(channel_rx_pages(&ends[1].channel) == 0);
	ends_close(ends);
}

static void test_trim_spill_gives_pages_back(void)
{
	struct end ends[2];
	const blkcnt_t page = PAGE / 512, spill = CHANNEL_SPILL / 512;
	uint64_t sent = 0, received = 0;
	int fd;

	ends_open(ends, PAGE, PAGE, &fd);
	struct channel_end *end = &ends[0].channel;
	for (int turn = 0; turn < 5; turn++) {
		sent += end_send(&ends[0], 1, sent, SIZE_MAX);
		CHECK(channel_tx_spill(end, SIZE_MAX));
		sent += end_send(&ends[0], 1, sent, SIZE_MAX);
		CHECK(sent - received == CHANNEL_SPILL && !channel_trim_spill(end));
		while (sent - received > PAGE / 2)
			received += end_receive(&ends[1], 1, received, sent - received - PAGE / 2);
		sent +=
			end_send(&ends[0], 1, sent, 3 * PAGE); /* what it has promised once more, so that all of it is touched */
		while (sent - received > PAGE / 2)
			received += end_receive(&ends[1], 1, received, sent - received - PAGE / 2);
		CHECK(!channel_trim_spill(end)); /* what follows would go there */
		channel_tx_settle(end);
		CHECK(!ends[0].own.ring_to && !channel_trim_spill(end)); /* what is unread lies there */
		sent += end_send(&ends[0], 1, sent, 100);
		received += end_receive(&ends[1], 1, received, PAGE / 2 - 1);
		CHECK(!channel_trim_spill(end)); /* a byte of it is */
		received += end_receive(&ends[1], 1, received, 1);
		blkcnt_t before = blocks_of(fd);
		CHECK(channel_trim_spill(end)); /* what is unread lies in the ring */
		CHECK(before - blocks_of(fd) >= spill, "%lld -> %lld", (long long)before, (long long)blocks_of(fd));
		CHECK(blocks_of(fd) >= 2 * page); /* the header and the ring are kept */
		CHECK(end_receive(&ends[1], 1, received, SIZE_MAX) == 100);
		received = sent;
		/* both, though what follows would go to the spill */
		sent += end_send(&ends[0], 1, sent, SIZE_MAX);
		CHECK(channel_tx_spill(end, SIZE_MAX));
		sent += end_send(&ends[0], 1, sent, SIZE_MAX);
		received += end_receive(&ends[1], 1, received, SIZE_MAX);
		CHECK(received == sent && blocks_of(fd) >= spill);
		channel_trim(end);
		CHECK(blocks_of(fd) == page);
		channel_tx_settle(end);
	}
	ends_close(ends);
	close(fd);
}

static uint64_t hostile_value(struct dice *dice, uint64_t now)
{
	static const uint64_t values[] = {
		0,        1,          2,          3,          PAGE - 1,   PAGE,           PAGE + 1,
		1u << 31, UINT32_MAX, 1ull << 32, 1ull << 63, UINT64_MAX, UINT64_MAX - 1, UINT64_MAX - PAGE};

	switch (dice_below(dice, 4)) {
	case 0: return values[dice_below(dice, sizeof(values) / sizeof(*values))];
	case 1: return now + dice_below(dice, 3 * PAGE) - PAGE;
	case 2: return 1ull << dice_below(dice, 64);
	default: return dice_roll(dice);
	}
}

/* ---- the spill ---- */
#define UNREAD_MAX (16 * PAGE)

/* A direction from side 0 to side 1, and what must be true of it, told without its words. */
struct spilling {
	struct end ends[2];
	struct dice dice;
	uint64_t sent, received;
	uint64_t limit, ring_end; /* with `spilled` */
	bool spilled;             /* what is sent goes to the spill */
	uint8_t in_ring[UNREAD_MAX];
	/* what was met on the way */
	unsigned spills, settles, refused[2], trims[2], three_stretches, ring_wraps, spill_wraps, five_pieces;
};

static void spilling_open(struct spilling *s, uint32_t ring, uint64_t start, uint64_t seed)
{
	ends_open(s->ends, ring, PAGE, NULL);
	CHECK(s->ends[0].channel.tx.spill_size <= UNREAD_MAX);
	s->dice = (struct dice){seed};
	s->sent = s->received = start;
	s->limit = s->ring_end = 0;
	s->spilled = false;
	s->ends[0].own.tail = s->ends[0].own.head_seen = s->ends[0].own.ring_from = s->ends[1].own.head = start;
	s->ends[0].channel.tx_peer_line->head = start;
	s->ends[0].channel.head_reported = s->ends[1].channel.tail_reported = start;
	channel_tx_show(&s->ends[0].channel);
}

static uint64_t spilling_most(const struct spilling *s)
{
	uint64_t most = s->ends[0].own.room_max, spill = s->ends[0].channel.tx.spill_size;

	return most && most < spill ? most : spill;
}

static uint64_t spilling_calm(const struct spilling *s) /* what may be unread without the spill */
{
	uint64_t most = spilling_most(s), ring = s->ends[0].channel.tx.size;

	return most < ring ? most : ring;
}

static size_t spilling_room(const struct spilling *s)
{
	uint64_t until = s->received + spilling_calm(s);

	if (s->spilled && s->limit > until)
		until = s->limit;
	return until > s->sent ? (size_t)(until - s->sent) : 0;
}

static bool lies_in(const uint8_t *at, const uint8_t *from, size_t len)
{
	return at >= from && at < from + len;
}

static bool any_unread(const struct spilling *s, bool in_ring)
{
	for (uint64_t at = s->received; at < s->sent; at++)
		if (s->in_ring[at % UNREAD_MAX] == in_ring)
			return true;
	return false;
}

/* Every unread byte, where it should be, by pieces from any byte on. */
static void spilling_look(struct spilling *s)
{
	const struct channel_ring *ring = &s->ends[1].channel.rx;
	size_t unread = (size_t)(s->sent - s->received),
		   skip = dice_below(&s->dice, 3) ? 0 : dice_below(&s->dice, unread + 1);
	struct iovec out[CHANNEL_PIECES];
	int pieces = channel_rx_pieces(&s->ends[1].channel, skip, unread - skip, out), stretches = 0, before = -1;
	uint64_t at = s->received + skip;
	const uint8_t *end = NULL;

	for (int i = 0; i < pieces; i++) {
		const uint8_t *bytes = out[i].iov_base;
		bool in_ring = lies_in(bytes, ring->data, ring->size);
		CHECK(out[i].iov_len > 0);
		CHECK(in_ring ? out[i].iov_len <= (size_t)(ring->data + ring->size - bytes)
		              : lies_in(bytes, ring->spill, ring->spill_size) &&
		                    out[i].iov_len <= (size_t)(ring->spill + ring->spill_size - bytes));
		stretches += in_ring != before;
		s->ring_wraps += in_ring && before == 1 && bytes != end;
		s->spill_wraps += !in_ring && before == 0 && bytes != end;
		before = in_ring;
		end = bytes + out[i].iov_len;
		for (size_t j = 0; j < out[i].iov_len; j++, at++) {
			CHECK(s->in_ring[at % UNREAD_MAX] == in_ring, "byte %llu", (unsigned long long)at);
			CHECK(bytes[j] == stream_byte(1, at), "byte %llu", (unsigned long long)at);
		}
	}
	CHECK(at == s->sent, "%llu of %llu", (unsigned long long)at, (unsigned long long)s->sent);
	CHECK(stretches <= 3);
	s->three_stretches += stretches == 3;
	s->five_pieces += pieces == 5; /* one of the two parts of the spill can wrap, and the ring */
}

static void spilling_check(struct spilling *s)
{
	const struct channel_end *from = &s->ends[0].channel, *to = &s->ends[1].channel;
	size_t unread = (size_t)(s->sent - s->received), room = spilling_room(s);

	CHECK(channel_rx_avail(to) == (int64_t)unread && channel_rx_peek(to) == unread);
	CHECK(channel_tx_unread(from) == unread);
	CHECK(channel_tx_peek(from) == room, "%zu, not %zu", channel_tx_peek(from), room);
	CHECK(channel_tx_space(from, SIZE_MAX) == (int64_t)room);
	CHECK(unread + room <= from->tx.spill_size);
}

static void spilling_send(struct spilling *s, size_t len)
{
	struct channel_end *end = &s->ends[0].channel;
	size_t room = spilling_room(s);

	if (dice_below(&s->dice, 2)) {
		size_t moved = end_send(&s->ends[0], 1, s->sent, len);
		CHECK(moved == (len < room ? len : room));
		len = moved;
	} else {
		struct iovec out[2];
		len = len < room ? len : room;
		CHECK(channel_tx_space(end, len) >= (int64_t)len);
		int pieces = channel_tx_pieces(end, len, out);
		uint64_t at = s->sent;
		for (int i = 0; i < pieces; i++)
			for (size_t j = 0; j < out[i].iov_len; j++)
				((uint8_t *)out[i].iov_base)[j] = stream_byte(1, at++);
		CHECK(at == s->sent + len);
		channel_tx_publish(end, len);
	}
	for (; len; len--)
		s->in_ring[s->sent++ % UNREAD_MAX] = !s->spilled;
}

static void spilling_receive(struct spilling *s, size_t len)
{
	s->received += end_receive(&s->ends[1], 1, s->received, len);
}

static void spilling_spill(struct spilling *s)
{
	size_t before = spilling_room(s);
	uint64_t limit = s->received + spilling_most(s), calm = s->received + spilling_calm(s);
	bool more = limit > calm && !(s->spilled && s->limit >= limit);

	CHECK(channel_tx_space(&s->ends[0].channel, SIZE_MAX) >= 0); /* a fresh head */
	CHECK(channel_tx_spill(&s->ends[0].channel, SIZE_MAX) == more);
	if (more) {
		s->limit = limit;
		s->ring_end = s->spilled ? s->ring_end : s->sent;
		s->spilled = true;
		s->spills++;
	}
	CHECK(spilling_room(s) >= before);
}

/* What there was to be told of room stays enough: room_wanted() of the shim. */
static void spilling_settle(struct spilling *s)
{
	uint64_t quarter = spilling_calm(s) / 4;
	bool had = spilling_room(s) >= quarter, read = s->received >= s->ring_end;
	bool few = s->sent - s->received <= s->ends[0].channel.tx.size / 2;

	channel_tx_settle(&s->ends[0].channel);
	if (s->spilled && read && few) {
		CHECK(!any_unread(s, true));
		s->spilled = false;
		s->settles++;
	} else if (s->spilled) {
		s->refused[read]++;
	}
	CHECK(!had || channel_tx_peek(&s->ends[0].channel) >= quarter);
}

static void spilling_trim(struct spilling *s)
{
	if (dice_below(&s->dice, 2) && s->sent == s->received) {
		channel_trim(&s->ends[0].channel);
	} else {
		bool may = !s->spilled && !any_unread(s, false);
		CHECK(channel_trim_spill(&s->ends[0].channel) == may);
		s->trims[may]++;
	}
}

static void spilling_bound(struct spilling *s)
{
	uint64_t spill = s->ends[0].channel.tx.spill_size;

	if (s->sent != s->received) /* as at the beginning of a round */
		return;
	spilling_settle(s);
	s->ends[0].own.room_max = dice_below(&s->dice, 3) ? 0 : 1 + dice_below(&s->dice, spill + 2 * PAGE);
}

static size_t spilling_len(struct spilling *s)
{
	switch (dice_below(&s->dice, 4)) {
	case 0: return 1 + dice_below(&s->dice, 5 * PAGE);
	case 1: return 1 + dice_below(&s->dice, 3);
	default: return 1 + dice_below(&s->dice, 1200);
	}
}

static void spilling_any(struct spilling *s, int turns)
{
	/* now the one is faster, now the other */
	uint64_t sends = 4;

	for (int turn = 0; turn < turns; turn++) {
		uint64_t move = dice_below(&s->dice, 16);
		if (turn % 64 == 0)
			sends = 1 + dice_below(&s->dice, 7);
		if (move < sends) {
			spilling_send(s, spilling_len(s));
		} else if (move < 8) {
			spilling_receive(s, spilling_len(s));
		} else if (move == 8 && s->sent - s->received > PAGE) { /* nearly caught up, and then the ring is soon full */
			spilling_receive(
				s, (size_t)(s->sent - s->received - 1 - dice_below(&s->dice, s->ends[0].channel.tx.size / 2)));
			spilling_settle(s);
			spilling_receive(s, dice_below(&s->dice, PAGE / 2));
			spilling_send(s, spilling_room(s));
			spilling_spill(s);
			spilling_send(s, spilling_len(s));
			if (dice_below(&s->dice, 2))
				spilling_look(s);
		} else if (move < 11) {
			spilling_settle(s);
		} else if (move < 13) {
			spilling_spill(s);
		} else if (move == 13) {
			spilling_trim(s);
		} else if (move == 14) {
			spilling_look(s);
		} else if (dice_below(&s->dice, 8) == 0) {
			spilling_bound(s);
		}
		spilling_check(s);
	}
}

static void spilling_close(struct spilling *s)
{
	spilling_receive(s, SIZE_MAX);
	CHECK(s->received == s->sent);
	spilling_settle(s);
	CHECK(!s->spilled && s->ends[0].own.ring_to == 0); /* who has been read is back in the ring */
	ends_close(s->ends);
}

static void test_spill_and_settle_at_random(void)
{
	/* also where the upper half of the counts begins, and 32 bits end */
	static const uint64_t starts[] = {0, (1ull << 32) - 3 * PAGE, (1ull << 63) - 20 * PAGE - 7};
	static struct spilling s;
	unsigned three_stretches = 0, five_pieces = 0;

	for (size_t i = 0; i < sizeof(starts) / sizeof(*starts); i++)
		for (uint32_t ring = PAGE; ring <= 2 * PAGE; ring *= 2) {
			memset(&s, 0, sizeof(s));
			spilling_open(&s, ring, starts[i], 40 + i);
			spilling_any(&s, 6000);
			CHECK(s.spills > 50 && s.settles > 50 && s.refused[0] > 50 && s.refused[1] > 10, "%u %u %u %u", s.spills,
			      s.settles, s.refused[0], s.refused[1]);
			CHECK(s.trims[0] > 10 && s.trims[1] > 10, "%u %u", s.trims[0], s.trims[1]);
			CHECK(s.ring_wraps > 10 && s.spill_wraps > 10, "%u %u", s.ring_wraps, s.spill_wraps);
			three_stretches += s.three_stretches;
			five_pieces += s.five_pieces;
			spilling_close(&s);
		}
	CHECK(three_stretches > 20 && five_pieces > 0, "%u %u", three_stretches, five_pieces);
}

static void test_every_size_pattern_with_a_spill(void)
{
	static const size_t lens[] = {1, 3, 64, 129, 1000, 2048, 4095, 4096, 4097, 70000};
	static struct spilling s;

	for (size_t w = 0; w < sizeof(lens) / sizeof(*lens); w++)
		for (size_t r = 0; r < sizeof(lens) / sizeof(*lens); r++) {
			spilling_open(&s, PAGE, 0, w * 100 + r);
			/* byte by byte is the same code over and over */
			const uint64_t stop = lens[w] < 64 || lens[r] < 64 ? PAGE : 6 * PAGE;
			while (s.received < stop) {
				spilling_send(&s, lens[w]);
				if (dice_below(&s.dice, 4) == 0)
					spilling_spill(&s);
				if (dice_below(&s.dice, 2))
					spilling_receive(&s, lens[r]);
				if (dice_below(&s.dice, 3) == 0)
					spilling_settle(&s);
				spilling_check(&s);
				if (dice_below(&s.dice, stop == PAGE ? 64 : 4) == 0)
					spilling_look(&s);
			}
			spilling_close(&s);
		}
}

/* Step by step: the ring, full; the spill, full; the ring again while the spill is not read; the spill again. */
static void test_a_ring_in_the_midst_of_a_spill(void)
{
	static struct spilling s;
	const size_t half = PAGE / 2;

	memset(&s, 0, sizeof(s));
	for (uint64_t shift = 0; shift < CHANNEL_SPILL; shift += 509) {
		spilling_open(&s, PAGE, shift, shift);
		spilling_send(&s, SIZE_MAX);
		CHECK(s.sent - s.received == PAGE && spilling_room(&s) == 0);
		spilling_settle(&s); /* it is there */
		spilling_spill(&s);
		spilling_check(&s);
		spilling_send(&s, SIZE_MAX);
		CHECK(s.sent - s.received == CHANNEL_SPILL);
		spilling_look(&s);
		CHECK(!channel_tx_spill(&s.ends[0].channel, SIZE_MAX)); /* that is all */
		spilling_receive(&s, PAGE - 1);
		spilling_settle(&s); /* a byte of the ring is unread: it stays behind */
		CHECK(s.spilled && s.ends[0].own.ring_to);
		spilling_receive(&s, CHANNEL_SPILL - PAGE + 1 - half - 1);
		spilling_settle(&s); /* a byte too many of the spill is */
		CHECK(s.spilled && s.ends[0].own.ring_to);
		spilling_receive(&s, 1);
		spilling_settle(&s);
		CHECK(!s.spilled && spilling_room(&s) == half);
		spilling_check(&s);
		spilling_send(&s, half);
		spilling_spill(&s);
		spilling_send(&s, half);
		spilling_look(&s); /* in three stretches */
		CHECK(channel_trim_spill(&s.ends[0].channel) == false);
		for (size_t len = half; len; len--) { /* over each of the two seams, at last byte by byte */
			spilling_receive(&s, 1);
			if (len % 97 == 0 || len < 3)
				spilling_look(&s);
		}
		CHECK(channel_trim_spill(&s.ends[0].channel) == false);
		spilling_settle(&s);
		CHECK(s.spilled); /* the second stretch in the ring is unread now */
		spilling_receive(&s, half);
		spilling_settle(&s);
		CHECK(!s.spilled && s.sent - s.received == half);
		CHECK(channel_trim_spill(&s.ends[0].channel) == false);
		spilling_look(&s);
		spilling_receive(&s, half);
		CHECK(channel_trim_spill(&s.ends[0].channel));
		spilling_close(&s);
	}
	CHECK(s.three_stretches && s.ring_wraps, "%u %u", s.three_stretches, s.ring_wraps);
}

/* Who was bounded by less than the ring has no use for the spill. */
static void test_room_max_bounds_what_is_unread(void)
{
	static struct spilling s;
	static const uint32_t bounds[] = {1, 3, 100, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, CHANNEL_SPILL, CHANNEL_SPILL + 1};

	for (size_t i = 0; i < sizeof(bounds) / sizeof(*bounds); i++) {
		uint64_t most = bounds[i] < CHANNEL_SPILL ? bounds[i] : CHANNEL_SPILL;
		spilling_open(&s, PAGE, 0, i);
		s.ends[0].own.room_max = bounds[i];
		CHECK(channel_tx_most(&s.ends[0].channel) == most);
		spilling_send(&s, SIZE_MAX);
		CHECK(s.sent == (most < PAGE ? most : PAGE));
		spilling_spill(&s);
		CHECK(s.spilled == (bounds[i] > PAGE));
		spilling_send(&s, SIZE_MAX);
		CHECK(s.sent == most, "%llu", (unsigned long long)s.sent);
		spilling_check(&s);
		/* lowered, it takes nothing back, and has no room to give until it is read */
		s.ends[0].own.room_max = 1;
		CHECK(channel_tx_peek(&s.ends[0].channel) == 0 && !channel_tx_spill(&s.ends[0].channel, SIZE_MAX));
		spilling_look(&s);
		spilling_close(&s);
	}
}

static void test_a_place_is_in_bounds_for_any_words(void)
{
	struct end ends[2];
	struct dice dice = {17};

	ends_open(ends, 2 * PAGE, PAGE, NULL);
	const struct channel_ring *ring = &ends[0].channel.tx;
	for (int turn = 0; turn < 300000; turn++) {
		uint64_t near = dice_roll(&dice), from = hostile_value(&dice, near), to = hostile_value(&dice, from),
				 at = hostile_value(&dice, dice_below(&dice, 2) ? from : to), base = hostile_value(&dice, at);
		size_t asked = 1 + dice_below(&dice, 3 * CHANNEL_SPILL), len = asked;
		uint8_t *place = channel_place(ring, from, to, base, at, &len);
		bool in_ring = lies_in(place, ring->data, ring->size);
		CHECK(len >= 1 && len <= asked);
		CHECK(in_ring ? lies_in(place + len - 1, ring->data, ring->size)
		              : lies_in(place, ring->spill, ring->spill_size) &&
		                    lies_in(place + len - 1, ring->spill, ring->spill_size));
		/* and all of these bytes lie where each of them does */
		size_t off = dice_below(&dice, len), one = 1;
		CHECK(at + off < at || channel_place(ring, from, to, base, at + off, &one) == place + off);
	}
	ends_close(ends);
}

/* ---- two threads, two processes ---- */
#define TALK_LEN (512u << 10)

/*
 * Moves TALK_LEN bytes each way; `seed` and the next are of the two streams. Who `spills` goes to the spill and back at any
 * moment, and does not read for a while at times.
 */
static void talk(struct end *end, int side, uint64_t seed, bool spills)
{
	struct dice dice = {seed + (uint64_t)side};
	uint64_t sent = 0, received = 0, lazy = 0;
	unsigned settled = 0, far = 0;
	bool full = false;

	while (sent < TALK_LEN || received < TALK_LEN) {
		if (spills && dice_below(&dice, full ? 2 : 20) == 0) { /* also where the two take turns at one processor */
			CHECK(channel_tx_space(&end->channel, SIZE_MAX) >= 0);
			channel_tx_spill(&end->channel, SIZE_MAX);
		}
		if (spills && dice_below(&dice, 4) == 0) {
			bool before = end->own.ring_to;
			channel_tx_settle(&end->channel);
			settled += before && !end->own.ring_to;
		}
		if (spills && dice_below(&dice, 100) == 0)
			channel_trim_spill(&end->channel);
		if (spills && !lazy && dice_below(&dice, 100) == 0)
			lazy = 1 + dice_below(&dice, 100);
		size_t out = 1 + dice_below(&dice, dice_below(&dice, 8) ? 200 : 6000);
		size_t moved;
		if (out > TALK_LEN - sent)
			out = (size_t)(TALK_LEN - sent);
		moved = out ? end_send(end, seed + (uint64_t)side, sent, out) : 0;
		sent += moved;
		full = out && !moved;
		far += channel_tx_unread(&end->channel) > end->channel.tx.size;
		size_t in = lazy ? 0 : end_receive(end, seed + 1 - (uint64_t)side, received, 1 + dice_below(&dice, 5000));
		received += in;
		lazy -= lazy != 0;
		if (!moved && !in)
			sched_yield();
	}
	CHECK(channel_rx_avail(&end->channel) == 0);
	CHECK(!spills || (settled > 2 && far > 10), "%u %u", settled, far);
}

struct talker {
	struct end *end;
	int side;
	bool spills;
};

static void *talk_thread(void *argument)
{
	struct talker *talker = argument;

	talk(talker->end, talker->side, 100, talker->spills);
	return NULL;
}

static void talk_in_threads(struct end *first, struct end *second, bool spills)
{
	struct talker talkers[2] = {{first, 0, spills}, {second, 1, spills}};
	pthread_t threads[2];

	for (int i = 0; i < 2; i++)
		CHECK(pthread_create(&threads[i], NULL, talk_thread, &talkers[i]) == 0);
	for (int i = 0; i < 2; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
}

static void test_two_threads_two_mappings(void)
{
	struct end ends[2];

	for (int spills = 0; spills < 2; spills++) {
		ends_open(ends, spills ? 2 * PAGE : 4 * PAGE, PAGE, NULL);
		talk_in_threads(&ends[0], &ends[1], spills);
		ends_close(ends);
	}
}

/* One mapping: here a race detector sees both ends touch the same addresses. */
static void test_two_threads_one_mapping(void)
{
	struct end ends[2], mirror;

	for (int spills = 0; spills < 2; spills++) {
		ends_open(ends, spills ? 2 * PAGE : 4 * PAGE, PAGE, NULL);
		end_mirror(&mirror, &ends[0]);
		talk_in_threads(&ends[0], &mirror, spills);
		ends_close(ends);
	}
}

static void talk_in_processes(bool spills)
{
	struct end ends[2];
	int status;

	ends_open(ends, PAGE, spills ? 2 * PAGE : 4 * PAGE, NULL);
	fflush(NULL);
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0)
		prctl(PR_SET_PDEATHSIG, SIGKILL); /* who is left alone would wait for ever */
	talk(&ends[child == 0], child == 0, 200, spills);
	if (child == 0)
		_exit(0);
	CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %d", status);
	ends_close(ends);
}

static void test_two_processes(void)
{
	talk_in_processes(false);
	talk_in_processes(true);
}

/*
 * Several threads of one side: one at a time moves bytes (the shim's rx_lock and tx_lock), others only peek (a thread in
 * epoll_wait, say). The peer is honest, so the mover is never told of a violation (end_send and end_receive check it) and
 * no peek calls for a judge: to a program that would be readiness which is none.
 */
struct crowd {
	struct end *ends[2]; /* side 0 is looked at, side 1 is the honest peer */
	bool spills;
	_Atomic bool stop;
	_Atomic uint64_t looks;
};

static void spill_or_settle(struct channel_end *end, unsigned turn)
{
	CHECK(channel_tx_space(end, SIZE_MAX) >= 0);
	if (turn % 3)
		channel_tx_spill(end, SIZE_MAX);
	else
		channel_tx_settle(end);
}

static void *crowd_look(void *argument)
{
	struct crowd *crowd = argument;
	const struct channel_end *end = &crowd->ends[0]->channel;

	while (!atomic_load(&crowd->stop)) {
		CHECK(channel_rx_peek(end) <= end->rx.spill_size);
		CHECK(channel_tx_peek(end) <= end->tx.spill_size && channel_tx_unread(end) <= end->tx.spill_size);
		atomic_fetch_add(&crowd->looks, 1);
	}
	return NULL;
}

static void *crowd_echo(void *argument)
{
	struct crowd *crowd = argument;
	uint64_t received = 0, sent = 0;

	for (unsigned turn = 0; !atomic_load(&crowd->stop); turn++) {
		if (crowd->spills)
			spill_or_settle(&crowd->ends[1]->channel, turn);
		received += end_receive(crowd->ends[1], 1, received, SIZE_MAX);
		sent += end_send(crowd->ends[1], 2, sent, PAGE);
	}
	return NULL;
}

static void look_beside_a_mover(bool spills)
{
	struct end ends[2];
	pthread_t threads[3];
	uint64_t received = 0, sent = 0;

	ends_open(ends, PAGE, PAGE, NULL);
	struct crowd crowd = {.ends = {&ends[0], &ends[1]}, .spills = spills};
	for (int i = 0; i < 2; i++)
		CHECK(pthread_create(&threads[i], NULL, crowd_look, &crowd) == 0);
	CHECK(pthread_create(&threads[2], NULL, crowd_echo, &crowd) == 0);
	for (unsigned turn = 0; sent < (6u << 20) || received < (6u << 20); turn++) {
		if (spills)
			spill_or_settle(&ends[0].channel, turn);
		received += end_receive(&ends[0], 2, received, SIZE_MAX);
		sent += end_send(&ends[0], 1, sent, PAGE);
	}
	atomic_store(&crowd.stop, true);
	for (int i = 0; i < 3; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
	CHECK(crowd.looks > 0);
	ends_close(ends);
}

static void test_lookers_beside_a_mover(void)
{
	look_beside_a_mover(false);
	look_beside_a_mover(true);
}

/* ---- the hostile peer ---- */

/* Every call a victim makes on shared words, with what any value of them may do: an answer in bounds, or ECONNRESET. */
static void look_everywhere(struct end *end)
{
	uint8_t bytes[64];
	struct iovec out[CHANNEL_PIECES];
	struct channel_end *channel = &end->channel;
	int64_t there = channel_rx_avail(channel);

	CHECK(there == -ECONNRESET || (there >= 0 && there <= channel->rx.spill_size), "there %lld", (long long)there);
	if (there > 0) {
		size_t len = (size_t)there;
		int pieces = channel_rx_pieces(channel, 0, len, out);
		uint64_t sum = 0;
		for (int i = 0; i < pieces; i++)
			for (size_t j = 0; j < out[i].iov_len; j++)
				sum += ((const volatile uint8_t *)out[i].iov_base)[j];
		(void)sum;
		channel_rx_get(channel, len - 1, bytes, 1);
		if (len >= sizeof(bytes))
			channel_rx_get(channel, len - sizeof(bytes), bytes, sizeof(bytes));
		channel_rx_consume(channel, len);
	}
	channel_tx_settle(channel);
	int64_t space = channel_tx_space(channel, sizeof(bytes));
	CHECK(space == -ECONNRESET || (space >= 0 && space <= channel->tx.spill_size), "space %lld", (long long)space);
	size_t room = channel_tx_peek(channel);
	CHECK((room <= channel->tx.spill_size || room == SIZE_MAX) && channel_tx_unread(channel) <= channel->tx.spill_size);
	size_t peeked = channel_rx_peek(channel);
	CHECK(peeked <= channel->rx.spill_size || peeked == SIZE_MAX);
	if (space > 0) {
		size_t len = (size_t)space < sizeof(bytes) ? (size_t)space : sizeof(bytes);
		int pieces = channel_tx_pieces(channel, (size_t)space, out);
		for (int i = 0; i < pieces; i++)
			memset(out[i].iov_base, 0x5a, out[i].iov_len);
		memset(bytes, 0xa5, sizeof(bytes));
		channel_tx_put(channel, (size_t)space - len, bytes, len, false);
		channel_tx_publish(channel, (size_t)space);
	}
	channel_tx_spill(channel, SIZE_MAX);
	channel_trim_spill(channel);
}

static void test_hostile_words_one_at_a_time(void)
{
	struct dice dice = {3};

	for (size_t w = 0; w < header_words_len; w++)
		for (int turn = 0; turn < 200; turn++) {
			struct end ends[2];
			ends_open(ends, PAGE, PAGE, NULL);
			uint64_t before = dice_below(&dice, PAGE), after = dice_below(&dice, PAGE);
			uint64_t sent = end_send(&ends[1], 1, 0, before);
			if (dice_below(&dice, 2)) {
				CHECK(channel_tx_spill(&ends[1].channel, SIZE_MAX));
				sent += end_send(&ends[1], 1, sent, 2 * PAGE);
			}
			uint64_t received = end_receive(&ends[0], 1, 0, after);
			if (dice_below(&dice, 2)) {
				channel_tx_settle(&ends[1].channel);
				sent += end_send(&ends[1], 1, sent, PAGE);
			}
			end_receive(&ends[0], 1, received, dice_below(&dice, 2 * PAGE));
			end_send(&ends[0], 2, 0, after);
			header_poke(ends[1].channel.seg, &header_words[w],
			            hostile_value(&dice, dice_below(&dice, 2) ? before : sent));
			for (int look = 0; look < 3; look++)
				look_everywhere(&ends[0]);
			ends_close(ends);
		}
}

static void test_impossible_counts_are_refused(void)
{
	struct end ends[2];
	/* one more than the spill holds, a head before or beyond what was sent: no reader may take them for bytes */
	static const uint64_t tails[] = {CHANNEL_SPILL + 1, 2 * CHANNEL_SPILL, 1ull << 32,
	                                 1ull << 63,        UINT64_MAX,        UINT64_MAX - PAGE};
	static const uint64_t heads[] = {101, PAGE, UINT64_MAX, 1ull << 63, UINT64_MAX - 100};

	for (size_t i = 0; i < sizeof(tails) / sizeof(*tails); i++) {
		ends_open(ends, PAGE, PAGE, NULL);
		ends[1].channel.tx_line->tail = tails[i];
		CHECK(channel_rx_avail(&ends[0].channel) == -ECONNRESET, "tail %llu", (unsigned long long)tails[i]);
		CHECK(channel_rx_peek(&ends[0].channel) == SIZE_MAX);
		ends_close(ends);
	}
	for (size_t i = 0; i < sizeof(heads) / sizeof(*heads); i++) {
		ends_open(ends, PAGE, PAGE, NULL);
		CHECK(end_send(&ends[0], 1, 0, 100) == 100);
		ends[1].channel.rx_line->head = heads[i];
		CHECK(channel_tx_space(&ends[0].channel, PAGE) == -ECONNRESET, "head %llu", (unsigned long long)heads[i]);
		CHECK(channel_tx_space(&ends[0].channel, 10) == PAGE - 100); /* what is known to be free needs no look */
		ends_close(ends);
	}
	/* and it may not go back behind what it has said before */
	ends_open(ends, PAGE, PAGE, NULL);
	end_send(&ends[0], 1, 0, 100);
	end_receive(&ends[1], 1, 0, 60);
	CHECK(channel_tx_space(&ends[0].channel, PAGE) == PAGE - 40);
	ends[1].channel.rx_line->head = 59;
	CHECK(channel_tx_space(&ends[0].channel, PAGE) == -ECONNRESET);
	ends_close(ends);
}

static void test_what_was_told_is_not_taken_back(void)
{
	struct end ends[2];

	ends_open(ends, PAGE, PAGE, NULL);
	CHECK(end_send(&ends[0], 1, 0, PAGE) == PAGE);
	CHECK(channel_rx_report(&ends[1].channel) == PAGE);
	CHECK(end_receive(&ends[1], 1, 0, 100) == 100); /* part of it is no less */
	ends[0].channel.tx_line->tail = PAGE - 1;
	CHECK(channel_rx_avail(&ends[1].channel) == -ECONNRESET);
	ends[0].channel.tx_line->tail = PAGE;
	CHECK(channel_rx_avail(&ends[1].channel) == PAGE - 100);
	CHECK(channel_tx_report(&ends[0].channel) == 100);
	ends[1].channel.rx_line->head = 99;
	CHECK(channel_tx_space(&ends[0].channel, 1) == -ECONNRESET);
	ends[1].channel.rx_line->head = 100;
	CHECK(channel_tx_space(&ends[0].channel, 1) == 100);
	/* what was not told may be seen to shrink by who only looks */
	CHECK(end_receive(&ends[1], 1, 100, 100) == 100 && channel_tx_peek(&ends[0].channel) == 200);
	ends[1].channel.rx_line->head = 100;
	CHECK(channel_tx_space(&ends[0].channel, PAGE) == 100);
	ends_close(ends);
}

/* In a shim they lie in memory that a child of another user may have kept. */
static void test_own_counts_that_do_not_fit_are_refused(void)
{
	struct end ends[2];

	for (uint64_t tail = 1; tail; tail <<= 1)
		for (int sign = 0; sign < 2; sign++) {
			uint64_t other = sign ? 0 - tail : tail;
			ends_open(ends, PAGE, PAGE, NULL);
			ends[0].own.tail = ends[1].own.head = other;
			CHECK(channel_tx_space(&ends[0].channel, 1) <= PAGE, "%llu", (unsigned long long)other);
			CHECK(other <= CHANNEL_SPILL || channel_tx_space(&ends[0].channel, SIZE_MAX / 4) == -ECONNRESET);
			CHECK(channel_rx_avail(&ends[1].channel) <= CHANNEL_SPILL);
			ends_close(ends);
		}
}

/* Nor can they make more room than there is memory, or lead out of it. */
static void test_own_words_that_do_not_fit_stay_in_bounds(void)
{
	struct dice dice = {23};

	for (int turn = 0; turn < 20000; turn++) {
		struct end ends[2];
		ends_open(ends, PAGE, PAGE, NULL);
		end_send(&ends[0], 1, 0, dice_below(&dice, PAGE));
		_Atomic uint64_t *own[] = {&ends[0].own.ring_from, &ends[0].own.ring_to,    &ends[0].own.limit,
		                           &ends[0].own.room_max,  &ends[0].own.spill_base, &ends[0].own.tail,
		                           &ends[0].own.head_seen};
		for (uint64_t more = 1 + dice_below(&dice, 4); more; more--)
			*own[dice_below(&dice, turn % 2 ? 7 : 5)] = hostile_value(&dice, PAGE);
		int64_t space = channel_tx_space(&ends[0].channel, 2 * CHANNEL_SPILL);
		size_t room = channel_tx_report(&ends[0].channel);
		CHECK(space == -ECONNRESET || (space >= 0 && space <= CHANNEL_SPILL), "%lld", (long long)space);
		CHECK(room == SIZE_MAX || room <= CHANNEL_SPILL, "%zu", room);
		for (int look = 0; look < 2; look++)
			look_everywhere(&ends[0]);
		ends_close(ends);
	}
}

/* Geometry is checked once and never read again. */
static void test_geometry_is_not_read_again(void)
{
	struct end ends[2];

	ends_open(ends, PAGE, PAGE, NULL);
	ends[1].channel.seg->ring_size[0] = ends[1].channel.seg->ring_size[1] = UINT32_MAX;
	ends[1].channel.seg->magic = 0;
	uint64_t position = 0;
	run_pattern(&ends[0], &ends[1], 1000, 900, &position);
	ends_close(ends);
}

struct scribbler {
	struct channel_segment *seg;
	_Atomic bool stop;
};

static void *scribble(void *argument)
{
	struct scribbler *scribbler = argument;
	struct dice dice = {5};
	uint64_t near = 0;

	while (!atomic_load_explicit(&scribbler->stop, memory_order_relaxed)) {
		size_t at = dice_below(&dice, header_words_len);
		header_poke(scribbler->seg, &header_words[at], hostile_value(&dice, near));
		near = atomic_load_explicit(&scribbler->seg->producer[dice_below(&dice, 2)].tail, memory_order_relaxed);
	}
	return NULL;
}

static void test_hostile_words_while_talking(void)
{
	struct end ends[2];
	struct scribbler scribbler = {0};
	pthread_t thread;

	ends_open(ends, PAGE, 4 * PAGE, NULL);
	scribbler.seg = ends[1].channel.seg;
	CHECK(pthread_create(&thread, NULL, scribble, &scribbler) == 0);
	for (int turn = 0; turn < 60000; turn++)
		look_everywhere(&ends[0]);
	atomic_store(&scribbler.stop, true);
	CHECK(pthread_join(thread, NULL) == 0);
	ends_close(ends);
}

#define TEST(name) {#name, test_##name}
static const struct test tests[] = {
	TEST(create_refuses_bad_sizes),
	TEST(create_makes_a_sealed_segment),
	TEST(map_refuses_bad_geometry),
	TEST(map_refuses_bad_seals),
	TEST(locked_memory_is_not_filled),
	TEST(map_refuses_other_files),
	TEST(every_size_pattern),
	TEST(wrap_of_the_ring),
	TEST(wrap_of_the_counts),
	TEST(full_and_empty),
	TEST(copies_to_any_place),
	TEST(pieces_name_the_bytes),
	TEST(rings_do_not_touch_each_other),
	TEST(trim_gives_pages_back),
	TEST(trim_counts),
	TEST(trim_spill_gives_pages_back),
	TEST(spill_and_settle_at_random),
	TEST(every_size_pattern_with_a_spill),
	TEST(a_ring_in_the_midst_of_a_spill),
	TEST(room_max_bounds_what_is_unread),
	TEST(a_place_is_in_bounds_for_any_words),
	TEST(two_threads_two_mappings),
	TEST(two_threads_one_mapping),
	TEST(two_processes),
	TEST(lookers_beside_a_mover),
	TEST(hostile_words_one_at_a_time),
	TEST(impossible_counts_are_refused),
	TEST(what_was_told_is_not_taken_back),
	TEST(own_counts_that_do_not_fit_are_refused),
	TEST(own_words_that_do_not_fit_stay_in_bounds),
	TEST(geometry_is_not_read_again),
	TEST(hostile_words_while_talking),
};

int main(int argc, char **argv)
{
	return tests_run(tests, sizeof(tests) / sizeof(*tests), argc, argv);
}
