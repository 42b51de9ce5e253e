/*
 * fuzz_channel.c - libFuzzer target: a segment with any content, mapped and used while any of its words change.
 *
 * Input: 1 byte options (bit 0: our side; bit 1: geometry is honest; bits 2-4: seals; bits 5-7: length of the file),
 * 64 bytes laid over the header, then moves of 1 byte and what they need: a word the peer writes, a look, a read, a write.
 * Whatever comes, a look answers in bounds or with ECONNRESET; an access outside of the segment hits a guard page.
 */
#include "check.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE 4096u
#define SPILLED(ring) ((size_t)(ring) + ((ring) > CHANNEL_SPILL ? (ring) : CHANNEL_SPILL))
#define LEN(ring0, ring1) (off_t)(CHANNEL_HEADER_SIZE + SPILLED(ring0) + SPILLED(ring1))

static int segment_forge(struct input *input, unsigned options)
{
	static const off_t lens[] = {0,
	                             PAGE,
	                             3 * PAGE,
	                             LEN(PAGE, PAGE) - 1,
	                             LEN(PAGE, PAGE),
	                             LEN(PAGE, 2 * PAGE),
	                             LEN(8 * PAGE, PAGE),
	                             LEN(64 * PAGE, 64 * PAGE)};
	static const int seals[] = {F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL,
	                            F_SEAL_SHRINK | F_SEAL_GROW,
	                            0,
	                            F_SEAL_SHRINK,
	                            F_SEAL_GROW,
	                            F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE,
	                            F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL,
	                            F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL};
	uint8_t header[64] = {0};
	size_t n = input->left < sizeof(header) ? input->left : sizeof(header);
	off_t len = lens[options >> 5 & 7];
	int fd = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	CHECK(fd >= 0);
	memcpy(header, input->at, n);
	input->at += n;
	input->left -= n;
	if (options & 2) {
		uint32_t words[4] = {CHANNEL_MAGIC, CHANNEL_VERSION, PAGE << (header[8] & 3), PAGE << (header[12] & 3)};
		memcpy(header, words, sizeof(words));
		len = LEN(words[2], words[3]);
	}
	CHECK(ftruncate(fd, len) == 0);
	if (len)
		CHECK(pwrite(fd, header, sizeof(header), 0) == sizeof(header));
	int wanted = seals[options & 2 ? 0 : options >> 2 & 7];
	CHECK(!wanted || fcntl(fd, F_ADD_SEALS, wanted) == 0);
	return fd;
}

static void do_read(const struct channel_end *end, size_t wanted)
{
	static uint8_t bytes[1 << 16];
	int64_t there = channel_rx_avail(end);
	struct iovec out[CHANNEL_PIECES];
	size_t sum = 0;

	CHECK(there == -ECONNRESET || (there >= 0 && there <= end->rx.spill_size));
	if (there <= 0)
		return;
	size_t len = (size_t)there < wanted ? (size_t)there : wanted;
	if (!len)
		return;
	channel_rx_get(end, 0, bytes, len);
	channel_rx_get(end, (size_t)there - 1, bytes, 1);
	int pieces = channel_rx_pieces(end, 0, len, out);
	for (int i = 0; i < pieces; i++) {
		sum += out[i].iov_len;
		memcpy(bytes, out[i].iov_base, out[i].iov_len < sizeof(bytes) ? out[i].iov_len : sizeof(bytes));
	}
	CHECK(sum == len || (sum < len && pieces == CHANNEL_PIECES));
	channel_rx_consume(end, len);
}

static void do_write(const struct channel_end *end, size_t wanted)
{
	static uint8_t bytes[1 << 16];
	int64_t space = channel_tx_space(end, wanted);
	struct iovec out[2];

	CHECK(space == -ECONNRESET || (space >= 0 && space <= end->tx.spill_size));
	if (space <= 0)
		return;
	size_t len = (size_t)space < wanted ? (size_t)space : wanted;
	if (!len)
		return;
	channel_tx_put(end, 0, bytes, len, len & 1);
	channel_tx_put(end, len - 1, bytes, 1, false);
	int pieces = channel_tx_pieces(end, len, out);
	CHECK(out[0].iov_len + (pieces == 2 ? out[1].iov_len : 0) == len);
	channel_tx_publish(end, len);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct input input = {data, size};
	unsigned options = (unsigned)input_take(&input, 1);
	int fd = segment_forge(&input, options);
	struct own_words words = {0};
	struct channel_own own = own_of(&words);
	struct channel_end end;
	int result = channel_map(&end, fd, (int)(options & 1), &own);

	close(fd);
	CHECK(result == 0 || result == -EPROTO || result == -EPERM);
	CHECK(result == 0 || !(options & 2));
	if (result)
		return 0;
	const struct channel_ring *rings[] = {&end.tx, &end.rx};
	for (int i = 0; i < 2; i++) {
		uint32_t ring = rings[i]->size;
		CHECK(ring >= CHANNEL_RING_MIN && ring <= CHANNEL_RING_MAX && !(ring & (ring - 1)));
		CHECK(rings[i]->spill_size == (ring > CHANNEL_SPILL ? ring : CHANNEL_SPILL));
	}
	CHECK(end.map_len == (size_t)LEN(end.tx.size, end.rx.size));
	while (input.left) {
		unsigned move = (unsigned)input_take(&input, 1);
		switch (move & 7) {
		case 0: do_read(&end, (size_t)input_take(&input, 2)); break;
		case 1: do_write(&end, (size_t)input_take(&input, 2)); break;
		case 2:
			CHECK(channel_tx_unread(&end) <= end.tx.spill_size);
			CHECK(channel_tx_peek(&end) <= end.tx.spill_size || channel_tx_peek(&end) == SIZE_MAX);
			CHECK(channel_rx_peek(&end) <= end.rx.spill_size || channel_rx_peek(&end) == SIZE_MAX);
			break;
		case 3: /* the count the peer writes moves by a little */
			atomic_fetch_add(&end.rx_peer_line->tail, input_take(&input, 2));
			break;
		case 4: atomic_fetch_add(&end.tx_peer_line->head, input_take(&input, 2)); break;
		case 5:
			switch (move >> 3 & 3) {
			case 0: channel_trim(&end); break;
			case 1: channel_trim_spill(&end); break;
			case 2: channel_tx_settle(&end); break;
			default: channel_tx_spill(&end, SIZE_MAX);
			}
			break;
		default:
			/* 6 and 7: a word each of two times 32 */
			header_poke(end.seg, &header_words[((move & 1) << 5 | move >> 3) % header_words_len],
			            input_take(&input, 8));
		}
	}
	channel_unmap(&end);
	return 0;
}
