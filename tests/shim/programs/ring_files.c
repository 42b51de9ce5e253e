/*
 * Two connections, each with a thread that sends back what it receives, and an io_uring by liburing. Does the commands of its
 * input, and answers each with a line: 0, or what was wrong. "ring FLAGS" makes the ring, "talk" uses send and recv, "file" moves
 * blocks of a file by the ring; the others put the first connection into the ring, each in its way.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define ENTRIES 8
#define BATCH 5 /* entries at a time: the queue wraps in the midst of them */
#define BLOCK 4096
#define PART 5000
#define PARTS 40
#define UNREAD 3000

struct way {
	int fd;
	unsigned char flags;
};

static struct io_uring ring;
static int ends[2];
static pthread_t echoes[2];
static int file, listener;
static struct sockaddr_in address = {.sin_family = AF_INET};
static char sent[PART], got[PART];

/* What the oldest of the ring's requests has come to. */
static int result(void)
{
	struct io_uring_cqe *done;
	struct __kernel_timespec limit = {.tv_sec = 20};
	int failed = io_uring_wait_cqe_timeout(&ring, &done, &limit);
	if (failed)
		return failed;
	int found = done->res;
	io_uring_cqe_seen(&ring, done);
	return found;
}

static int submit(struct io_uring_sqe *entry, unsigned char flags)
{
	entry->flags |= flags;
	int count = io_uring_submit(&ring);
	return count < 0 ? count : result();
}

static void *echo(void *argument)
{
	char buffer[8192];
	int fd = *(int *)argument;
	ssize_t n;
	while ((n = recv(fd, buffer, sizeof(buffer), 0)) > 0)
		for (ssize_t done = 0, put; done < n; done += put)
			if ((put = send(fd, buffer + done, (size_t)(n - done), MSG_NOSIGNAL)) <= 0)
				return NULL;
	shutdown(fd, SHUT_RDWR);
	return NULL;
}

static int use_sockets(void)
{
	for (int end = 0; end < 2; end++)
		for (char turn = 0; turn < 4; turn++) {
			char back = -1;
			if (send(ends[end], &turn, 1, 0) != 1 || recv(ends[end], &back, 1, 0) != 1 || back != turn)
				return -EBADMSG;
		}
	return 0;
}

/* A thread of the kernel that reads the ring (SQPOLL) frees its entries only after it has answered them. */
static struct io_uring_sqe *next_entry(void)
{
	struct io_uring_sqe *entry;
	while ((entry = io_uring_get_sqe(&ring)) == NULL)
		io_uring_sqring_wait(&ring);
	return entry;
}

static int use_file(void)
{
	static char blocks[BATCH][BLOCK], read_back[BATCH][BLOCK];
	for (int turn = 0; turn < 7; turn++) {
		for (int i = 0; i < BATCH; i++) {
			memset(blocks[i], turn * BATCH + i, BLOCK);
			io_uring_prep_write(next_entry(), file, blocks[i], BLOCK, (__u64)i * BLOCK);
		}
		if (io_uring_submit_and_wait(&ring, BATCH) != BATCH)
			return -EIO;
		for (int i = 0; i < BATCH; i++)
			if (result() != BLOCK)
				return -EIO;
		for (int i = 0; i < BATCH; i++)
			io_uring_prep_read(next_entry(), file, read_back[i], BLOCK, (__u64)i * BLOCK);
		if (io_uring_submit(&ring) != BATCH)
			return -EIO;
		for (int i = 0; i < BATCH; i++)
			if (result() != BLOCK)
				return -EIO;
		if (memcmp(blocks, read_back, sizeof(blocks)) != 0)
			return -EBADMSG;
	}
	return 0;
}

/* Sends a few bytes and waits until all are back, unread. */
static int leave_unread(void)
{
	int there = 0;
	if (send(ends[0], sent, UNREAD, 0) != UNREAD)
		return -errno;
	for (int turn = 0; turn < 4000 && there < UNREAD; turn++) {
		poll(NULL, 0, 5);
		if (ioctl(ends[0], FIONREAD, &there) < 0)
			return -errno;
	}
	return there == UNREAD ? 0 : -ETIMEDOUT;
}

static int receive(struct way way, size_t len)
{
	memset(got, 0, sizeof(got));
	for (size_t at = 0; at < len;) {
		struct io_uring_sqe *entry = io_uring_get_sqe(&ring);
		io_uring_prep_recv(entry, way.fd, got + at, len - at, 0);
		int n = submit(entry, way.flags);
		if (n <= 0)
			return n ? n : -ENODATA;
		at += (size_t)n;
	}
	return memcmp(got, sent, len) == 0 ? 0 : -EBADMSG;
}

/* What is unread, then many bytes in both directions, by the ring alone. */
static int use_ring(struct way way)
{
	int failed = receive(way, UNREAD);
	for (int part = 0; !failed && part < PARTS; part++) {
		for (size_t i = 0; i < PART; i++)
			sent[i] = (char)((i + (size_t)part * PART) * 2654435761u >> 13);
		struct io_uring_sqe *entry = io_uring_get_sqe(&ring);
		io_uring_prep_send(entry, way.fd, sent, PART, MSG_NOSIGNAL | MSG_WAITALL);
		int n = submit(entry, way.flags);
		failed = n == PART ? receive(way, PART) : n < 0 ? n : -EIO;
	}
	return failed;
}

static int put_number(void)
{
	int failed = leave_unread();
	return failed ? failed : use_ring((struct way){ends[0], 0});
}

static int put_registered(void)
{
	int failed = leave_unread();
	if (!failed)
		failed = io_uring_register_files(&ring, ends, 1);
	return failed ? failed : use_ring((struct way){0, IOSQE_FIXED_FILE});
}

static int put_by_update(void)
{
	static const int none = -1;
	int failed = leave_unread();
	if (!failed)
		failed = io_uring_register_files(&ring, &none, 1);
	if (failed)
		return failed;
	struct io_uring_sqe *entry = io_uring_get_sqe(&ring);
	io_uring_prep_files_update(entry, ends, 1, 0);
	int n = submit(entry, 0);
	return n != 1 ? n : use_ring((struct way){0, IOSQE_FIXED_FILE});
}

/* In the ring, waiting, while its bytes come and go by the C library's calls. */
static int put_to_wait(void)
{
	char byte = 'x';
	io_uring_prep_poll_add(io_uring_get_sqe(&ring), ends[0], POLLIN);
	if (io_uring_submit(&ring) != 1 || send(ends[0], &byte, 1, 0) != 1)
		return -EIO;
	int events = result();
	return events < 0 ? events : !(events & POLLIN) ? -EBADMSG : recv(ends[0], &byte, 1, 0) == 1 ? 0 : -EIO;
}

/* What io_uring_submit() does, by a system call of the program's own. */
static int put_past_the_library(void)
{
	unsigned tail = *ring.sq.ktail, at = tail & *ring.sq.kring_mask;
	io_uring_prep_nop(io_uring_get_sqe(&ring));
	ring.sq.array[at] = at;
	ring.sq.sqe_head = ring.sq.sqe_tail;
	__atomic_store_n(ring.sq.ktail, tail + 1, __ATOMIC_RELEASE);
	return syscall(SYS_io_uring_enter, ring.ring_fd, 1, 0, 0, NULL, 0) == 1 ? result() : -errno;
}

static int put_to_splice(void)
{
	int pair[2], failed = leave_unread();
	if (failed || pipe(pair) < 0)
		return failed ? failed : -errno;
	for (int at = 0; at < UNREAD;) {
		struct io_uring_sqe *entry = io_uring_get_sqe(&ring);
		io_uring_prep_splice(entry, ends[0], -1, pair[1], -1, (unsigned)(UNREAD - at), 0);
		int n = submit(entry, 0);
		if (n <= 0 || read(pair[0], got + at, (size_t)n) != n)
			return n < 0 ? n : -EIO;
		at += n;
	}
	return memcmp(got, sent, UNREAD) == 0 ? 0 : -EBADMSG;
}

/* Passes it to ourselves, under another number; the ring sends the message or receives it. */
static int pass(bool sends)
{
	union {
		struct cmsghdr header;
		char bytes[CMSG_SPACE(sizeof(int))];
	} control = {.header = {.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS}};
	struct iovec part = {"x", 1};
	struct msghdr message = {
		.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};
	int pair[2], passed, failed = leave_unread();
	if (failed || socketpair(AF_UNIX, SOCK_DGRAM, 0, pair) < 0)
		return failed ? failed : -errno;
	memcpy(CMSG_DATA(&control.header), &ends[0], sizeof(int));
	if (sends) {
		io_uring_prep_sendmsg(io_uring_get_sqe(&ring), pair[0], &message, 0);
		if (io_uring_submit(&ring) != 1 || result() != 1)
			return -EIO;
	} else if (sendmsg(pair[0], &message, 0) != 1) {
		return -errno;
	}
	part.iov_base = got;
	if (!sends) {
		io_uring_prep_recvmsg(io_uring_get_sqe(&ring), pair[1], &message, 0);
		if (io_uring_submit(&ring) != 1 || result() != 1)
			return -EIO;
	} else if (recvmsg(pair[1], &message, 0) != 1) {
		return -errno;
	}
	memcpy(&passed, CMSG_DATA(&control.header), sizeof(int));
	return recv(passed, got, UNREAD, MSG_WAITALL) == UNREAD && memcmp(got, sent, UNREAD) == 0 ? 0 : -EBADMSG;
}

static int put_to_pass(void)
{
	return pass(true);
}

static int put_to_arrive(void)
{
	return pass(false);
}

/* Its number becomes a file's, in which alone what is written must be. */
static int put_to_close(void)
{
	struct io_uring_sqe *entry = io_uring_get_sqe(&ring);
	io_uring_prep_close(entry, ends[0]);
	int failed = submit(entry, 0);
	entry = io_uring_get_sqe(&ring);
	io_uring_prep_openat(entry, AT_FDCWD, "/tmp", O_TMPFILE | O_RDWR, 0600);
	int fd = failed ? failed : submit(entry, 0);
	if (fd < 0)
		return fd;
	if (pthread_join(echoes[0], NULL) != 0 || fd != ends[0])
		return -EXDEV;
	if (write(fd, "to the file", 11) != 11 || lseek(fd, 0, SEEK_SET) != 0 || read(fd, got, PART) != 11)
		return -EBADMSG;
	return memcmp(got, "to the file", 11) == 0 ? 0 : -EBADMSG;
}

/* At the end of both directions; its number becomes another connection's. */
static int put_to_close_before_another(void)
{
	int client = socket(AF_INET, SOCK_STREAM, 0);
	if (shutdown(ends[0], SHUT_WR) < 0 || recv(ends[0], got, PART, 0) != 0 ||
	    connect(client, (struct sockaddr *)&address, sizeof(address)) < 0)
		return -errno;
	struct io_uring_sqe *entry = io_uring_get_sqe(&ring);
	io_uring_prep_close(entry, ends[0]);
	int failed = submit(entry, 0);
	entry = io_uring_get_sqe(&ring);
	io_uring_prep_accept(entry, listener, NULL, NULL, 0);
	int fd = failed ? failed : submit(entry, 0);
	if (fd != ends[0])
		return fd < 0 ? fd : -EXDEV;
	if (send(client, "there", 5, 0) != 5 || recv(fd, got, PART, 0) != 5 || memcmp(got, "there", 5) != 0)
		return -EBADMSG;
	if (send(fd, "back", 4, 0) != 4 || recv(client, got, PART, 0) != 4 || memcmp(got, "back", 4) != 0)
		return -EBADMSG;
	return 0;
}

/* An epoll set with it, which then tells of its bytes. */
static int put_set(void)
{
	struct epoll_event event = {.events = EPOLLIN};
	char byte = 'x';
	int set = epoll_create1(0);
	if (epoll_ctl(set, EPOLL_CTL_ADD, ends[0], &event) < 0)
		return -errno;
	io_uring_prep_poll_add(io_uring_get_sqe(&ring), set, POLLIN);
	if (io_uring_submit(&ring) != 1 || send(ends[0], &byte, 1, 0) != 1)
		return -EIO;
	int events = result();
	return events < 0 ? events : recv(ends[0], &byte, 1, 0) == 1 ? use_sockets() : -EIO;
}

static int connect_both(void)
{
	static int others[2];
	socklen_t len = sizeof(address);
	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	listener = socket(AF_INET, SOCK_STREAM, 0);
	if (bind(listener, (struct sockaddr *)&address, len) < 0 || listen(listener, 2) < 0 ||
	    getsockname(listener, (struct sockaddr *)&address, &len) < 0)
		return -1;
	for (int end = 0; end < 2; end++) {
		ends[end] = socket(AF_INET, SOCK_STREAM, 0);
		if (connect(ends[end], (struct sockaddr *)&address, len) < 0)
			return -1;
		others[end] = accept(listener, NULL, NULL);
		if (pthread_create(&echoes[end], NULL, echo, &others[end]) != 0)
			return -1;
	}
	return 0;
}

/* With an argument a child does the commands, with the ring of its parent, as PostgreSQL's processes do. */
int main(int argc, char *argv[])
{
	static const struct {
		const char *name;
		int (*run)(void);
	} commands[] = {
		{"talk", use_sockets},
		{"file", use_file},
		{"number", put_number},
		{"registered", put_registered},
		{"update", put_by_update},
		{"wait", put_to_wait},
		{"splice", put_to_splice},
		{"pass", put_to_pass},
		{"arrive", put_to_arrive},
		{"close", put_to_close},
		{"reuse", put_to_close_before_another},
		{"set", put_set},
		{"past", put_past_the_library},
	};
	char line[32];
	file = open("/tmp", O_TMPFILE | O_RDWR, 0600);
	int made = argc > 1 ? io_uring_queue_init(ENTRIES, &ring, (unsigned)strtoul(argv[1], NULL, 0)) : -ENXIO;
	if (made == 0 && fork())
		return wait(NULL) < 0;
	if (file < 0 || connect_both() < 0)
		return 1;
	while (fgets(line, sizeof(line), stdin)) {
		int done = -ENOSYS;
		line[strcspn(line, "\n")] = '\0';
		if (strcmp(line, "ring") == 0)
			done = made;
		if (strncmp(line, "ring ", 5) == 0)
			done = io_uring_queue_init(ENTRIES, &ring, (unsigned)strtoul(line + 5, NULL, 0));
		for (size_t i = 0; i < sizeof(commands) / sizeof(*commands); i++)
			if (strcmp(line, commands[i].name) == 0)
				done = commands[i].run();
		printf("%d\n", done);
		fflush(stdout);
	}
	return 0;
}
