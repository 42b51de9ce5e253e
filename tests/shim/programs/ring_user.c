/* Talks with itself by TCP, as its input says: "talk" by ordinary calls, "ring" makes an io_uring, "mix" receives and sends
 * by it, "aio" by libaio. Answers each with a line. */
#include <arpa/inet.h>
#include <errno.h>
#include <linux/aio_abi.h>
#include <linux/io_uring.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

int io_uring_setup(unsigned entries, struct io_uring_params *setup);
int io_submit(aio_context_t context, long len, struct iocb *list[]);
int use_ring(void);

static int ring = -1, one, other;
static struct io_uring_params setup;
static uint8_t *submissions, *completions;
static struct io_uring_sqe *entries;

#define WORD(base, offset) ((_Atomic uint32_t *)((base) + (offset)))

static int make_ring(void)
{
	ring = io_uring_setup(4, &setup);
	if (ring < 0)
		return ring;
	submissions = mmap(NULL, setup.sq_off.array + setup.sq_entries * 4, PROT_READ | PROT_WRITE, MAP_SHARED, ring,
	                   IORING_OFF_SQ_RING);
	completions = mmap(NULL, setup.cq_off.cqes + setup.cq_entries * sizeof(struct io_uring_cqe), PROT_READ | PROT_WRITE,
	                   MAP_SHARED, ring, IORING_OFF_CQ_RING);
	entries =
		mmap(NULL, setup.sq_entries * sizeof(*entries), PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQES);
	return submissions == MAP_FAILED || completions == MAP_FAILED || entries == MAP_FAILED ? -errno : 0;
}

static void submit(uint8_t operation, int fd, void *data, uint32_t len)
{
	uint32_t tail = *WORD(submissions, setup.sq_off.tail);
	uint32_t at = tail & *WORD(submissions, setup.sq_off.ring_mask);
	entries[at] = (struct io_uring_sqe){.opcode = operation, .fd = fd, .addr = (uintptr_t)data, .len = len};
	*WORD(submissions, setup.sq_off.array + at * 4) = at;
	*WORD(submissions, setup.sq_off.tail) = tail + 1;
	syscall(SYS_io_uring_enter, ring, 1, 0, 0, NULL, 0);
}

static int result(void)
{
	uint32_t head = *WORD(completions, setup.cq_off.head);
	struct pollfd done = {.fd = ring, .events = POLLIN};
	if (poll(&done, 1, 5000) != 1)
		return -ETIMEDOUT;
	uint32_t at = head & *WORD(completions, setup.cq_off.ring_mask);
	struct io_uring_cqe *found = (struct io_uring_cqe *)(completions + setup.cq_off.cqes) + at;
	*WORD(completions, setup.cq_off.head) = head + 1;
	return found->res;
}

static int talk(void)
{
	char byte = 7;
	for (int i = 0; i < 2; i++)
		if (send(i ? one : other, &byte, 1, 0) != 1 || recv(i ? other : one, &byte, 1, 0) != 1)
			return -errno;
	return 0;
}

static int aio(aio_context_t context, int operation, void *data, uint32_t len)
{
	struct iocb block = {.aio_fildes = (uint32_t)one,
	                     .aio_lio_opcode = (uint16_t)operation,
	                     .aio_buf = (uintptr_t)data,
	                     .aio_nbytes = len};
	struct iocb *list = &block;
	struct io_event event;
	struct timespec limit = {.tv_sec = 5};
	int submitted = io_submit(context, 1, &list);
	if (submitted != 1)
		return submitted;
	return syscall(SYS_io_getevents, context, 1, 1, &event, &limit) == 1 ? (int)event.res : -ETIMEDOUT;
}

/* Sends and receives by libaio. */
static int use_aio(void)
{
	char data[16] = "first";
	aio_context_t context = 0;
	if (syscall(SYS_io_setup, 4, &context) < 0)
		return -errno;
	int moved = aio(context, IOCB_CMD_PWRITE, data, 5);
	if (moved != 5 || recv(other, data, 5, MSG_WAITALL) != 5 || memcmp(data, "first", 5) != 0)
		return moved < 0 ? moved : -EBADMSG;
	if (send(other, "second", 6, 0) != 6)
		return -errno;
	moved = aio(context, IOCB_CMD_PREAD, data, sizeof(data));
	if (moved != 6 || memcmp(data, "second", 6) != 0)
		return moved < 0 ? moved : -EBADMSG;
	syscall(SYS_io_destroy, context);
	return talk();
}

/* The first bytes wait for the ring's reader, the second ones find it waiting. */
static int mix(void)
{
	char data[16] = "";
	if (send(other, "first", 5, 0) != 5)
		return -errno;
	submit(IORING_OP_RECV, one, data, sizeof(data));
	int got = result();
	if (got != 5 || memcmp(data, "first", 5) != 0)
		return got;
	submit(IORING_OP_RECV, one, data, sizeof(data));
	if (send(other, "second", 6, 0) != 6)
		return -errno;
	got = result();
	if (got != 6 || memcmp(data, "second", 6) != 0)
		return got;
	submit(IORING_OP_SEND, one, data, 6);
	if (result() != 6 || recv(other, data, sizeof(data), 0) != 6)
		return -errno;
	return talk();
}

int use_ring(void)
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof(address);
	char line[16];
	int listener = socket(AF_INET, SOCK_STREAM, 0);
	one = socket(AF_INET, SOCK_STREAM, 0);
	if (bind(listener, (struct sockaddr *)&address, len) < 0 || listen(listener, 1) < 0 ||
	    getsockname(listener, (struct sockaddr *)&address, &len) < 0 ||
	    connect(one, (struct sockaddr *)&address, len) < 0)
		return 1;
	other = accept(listener, NULL, NULL);
	while (fgets(line, sizeof(line), stdin)) {
		printf("%d\n", line[0] == 't' ? talk() : line[0] == 'r' ? make_ring() : line[0] == 'a' ? use_aio() : mix());
		fflush(stdout);
	}
	return 0;
}

#ifdef ALONE
int main(void)
{
	return use_ring();
}
#endif
