/*
 * shim_rights.c - connections that are given to another process with a message (SCM_RIGHTS), and go on by their rings there.
 *
 * If each process that may read the message has the shim, the parts of the connection travel in the same message, behind the
 * program's own descriptors. They are a page with a list, the arena, the segment, and the doorbells. The taker's shim takes
 * them out, and is one more holder of the slot, as a child would be. The peer is asked nothing. A message that nobody reads
 * takes all of it with it. What is not promoted yet goes in the same way, so that the taker knows what TCP has carried.
 */
#include "shim_number.h"
#include "shim_pass.h"
#include "shim_tcp_only.h"
#include "shim_provider.h"
#include "shim_travel.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "shim_proc.h"

#define GIVEN_MAX 16    /* connections in one message; others go by TCP */
#define RIGHTS_MAX 253  /* SCM_MAX_FD */
#define CONTROL_MAX 2048 /* room for that, credentials, a label, a process: all that a UNIX socket delivers at once */

enum { FILE_PAGE, FILE_ARENA, FILE_SEGMENT, FILE_REMOTE, FILE_REMOTE_PAGE, FILE_DOORBELL, FILES };
/* Files that follow if a provider stands between: its liveness pipe and a connection to it. */
enum { FILE_LIVENESS = FILES, FILE_LINE, FILES_FAR };
#define FILES_BY_TCP FILE_SEGMENT /* files of a connection that has no ring, and may get one where it goes */

struct given {
	struct conn *conn; /* the connection, with a reference */
	int fd, file;
	struct pass *pass;
};

#define EACH_RIGHT(message, header) \
	for (struct cmsghdr *header = (message)->msg_control ? CMSG_FIRSTHDR(message) : NULL; header; \
	     header = CMSG_NXTHDR((struct msghdr *)(message), header)) \
		if (header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS)

static size_t rights_count(const struct cmsghdr *header)
{
	return header->cmsg_len < CMSG_LEN(0) ? 0 : (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
}

static int right_at(struct cmsghdr *header, size_t i)
{
	int fd;

	memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
	return fd;
}

/* ---- the giver ---- */

/*
 * Flags that keep it from going with its ring. One that is back on TCP, or has ended, goes as well. Its ring may hold bytes that
 * come no second time, and its slot an error. But a stranger who may have the socket already keeps it here.
 */
static uint32_t stays_here(const struct conn *conn)
{
	const uint32_t strange = SLOT_INHERITED | SLOT_CONFINED;

	return slot_has(conn->slot, SLOT_PASSED) || word_load(tcp_only_reason) ? strange | SLOT_PIN | SLOT_RESET : strange;
}

static bool give(struct given *given, struct conn *conn, int fd, int *line)
{
	uint64_t cookie;

	if (conn->managed ? !traveller_can(conn, stays_here(conn), line) : !traveller_waits(conn, fd, &cookie))
		return false;
	const struct traveller of = conn->managed ? traveller_of(conn) : traveller_by_tcp(conn, cookie);
	int file = channel_memory("sidestep-pass", sizeof(struct pass));
	struct pass *pass = MAP_FAILED;
	if (file >= 0 && real.fcntl64(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0)
		pass = mmap(NULL, sizeof(*pass), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	if (pass == MAP_FAILED) {
		if (file >= 0)
			raw_close(file);
		return false;
	}
	*pass = (struct pass){
		.magic = PASS_MAGIC, .version = LAYOUT_VERSION, .files = has_ring(&of) ? FILES : FILES_BY_TCP, .of = of};
	if (of.liveness_fd >= 0)
		pass->files = FILES_FAR;
	memcpy(pass->arena_id, slot_arena_id(conn->slot), sizeof(pass->arena_id));
	conn_ref(conn);
	*given = (struct given){.conn = conn, .fd = fd, .file = file, .pass = pass};
	arena_passes();
	atomic_fetch_add(&conn->slot->holders, 1); /* a reference for its taker */
	refusing_ends(conn);
	traveller_settle(&pass->of, conn);
	word_store(announce_due, true);
	return true;
}

/* Puts them behind those that are there, and returns their number. */
static size_t put_files(int *files, size_t len, const struct given *given, int line)
{
	const struct traveller *of = &given->pass->of;
	const int its[FILES_FAR] = {
		[FILE_PAGE] = given->file,
		[FILE_ARENA] = slot_arena_fd(given->conn->slot),
		[FILE_SEGMENT] = of->segment_fd,
		[FILE_REMOTE] = of->remote_fd,
		[FILE_REMOTE_PAGE] = of->remote_page_fd,
		[FILE_DOORBELL] = of->doorbell_fd,
		[FILE_LIVENESS] = of->liveness_fd,
		[FILE_LINE] = line < 0 ? of->liveness_fd : line, /* no line leads to a provider that has gone */
	};

	memcpy(files + len, its, given->pass->files * sizeof(*its));
	return len + given->pass->files;
}

/* The message, with the files behind its own. False: there is no room for them. */
static bool message_with_files(struct msghdr *with, const struct msghdr *message, char control[CONTROL_MAX],
                               const struct given *given, int given_len, int line)
{
	size_t count = 0, at = 0;
	int files[GIVEN_MAX * FILES_FAR];

	for (int i = 0; i < given_len; i++)
		count = put_files(files, count, &given[i], line);

	for (struct cmsghdr *header = CMSG_FIRSTHDR(message); header;
	     header = CMSG_NXTHDR((struct msghdr *)message, header)) {
		size_t len = header->cmsg_len;
		if (len < CMSG_LEN(0) || at + CMSG_SPACE(len - CMSG_LEN(0)) + CMSG_SPACE(count * sizeof(int)) > CONTROL_MAX)
			return false;
		memcpy(control + at, header, len);
		at += CMSG_SPACE(len - CMSG_LEN(0));
	}
	struct cmsghdr *own = (struct cmsghdr *)(control + at);
	*own =
		(struct cmsghdr){.cmsg_len = CMSG_LEN(count * sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
	memcpy(CMSG_DATA(own), files, count * sizeof(int));
	*with = *message;
	with->msg_control = control;
	with->msg_controllen = at + CMSG_SPACE(count * sizeof(int));
	return true;
}

static void given_end(struct given *given)
{
	raw_close(given->file);
	conn_unref(given->conn);
}

/* The message has been sent: the connection is on its way. */
static void given_sent(struct given *given, enum receiver receiver, unsigned long other_end)
{
	shim_log("fd %d is given away by ring", given->fd);
	if (receiver == RECEIVER_SELF)
		pass_close(given->pass);
	else
		pass_watch(given->conn, given->pass, other_end);
	given_end(given);
}

/* One message less holds the socket. It may be one that this process has not sent. */
static void message_over(struct conn *conn)
{
	uint32_t messages = atomic_load(&conn->in_messages);

	while (messages && !atomic_compare_exchange_weak(&conn->in_messages, &messages, messages - 1))
		;
}

/* The message was not sent: the giver has the connection for itself again. */
static void given_back(struct given *given)
{
	pass_withdraw(given->pass, given->conn);
	pass_close(given->pass);
	given_end(given);
}

static bool is_given(const struct given *given, int given_len, const struct conn *conn)
{
	for (int i = 0; i < given_len; i++)
		if (given[i].conn == conn)
			return true;
	return false;
}

/* Connections among the rights; those that are not given go back to TCP. */
static void strangers_leave(const struct msghdr *message, const struct given *given, int given_len)
{
	EACH_RIGHT(message, header)
	for (size_t i = 0; i < rights_count(header); i++) {
		int fd = right_at(header, i);
		HELD conn = conn_hold(fd);
		if (conn && !is_given(given, given_len, conn))
			conn_leave_to_stranger(conn, fd, REASON_PASSED);
	}
}

void rights_strand(const struct msghdr *message)
{
	strangers_leave(message, NULL, 0);
}

static bool rights_have_connections(const struct msghdr *message)
{
	bool any = false;

	EACH_RIGHT(message, header)
	for (size_t i = 0; i < rights_count(header); i++) {
		HELD conn = conn_hold(right_at(header, i));
		any |= conn != NULL;
	}
	return any;
}

static int rights_give(const struct msghdr *message, struct given given[GIVEN_MAX], int *line)
{
	int given_len = 0;
	size_t count = 0;

	EACH_RIGHT(message, header)
	for (size_t i = 0; i < rights_count(header); i++) {
		int fd = right_at(header, i);
		HELD conn = conn_hold(fd);
		count++;
		if (conn && given_len < GIVEN_MAX && !is_given(given, given_len, conn) &&
		    give(&given[given_len], conn, fd, line))
			count += given[given_len++].pass->files;
	}
	while (given_len && count > RIGHTS_MAX) {
		count -= given[given_len - 1].pass->files;
		given_back(&given[--given_len]);
	}
	return given_len;
}

bool rights_among(const struct mmsghdr *messages, unsigned len)
{
	for (unsigned i = 0; i < len; i++)
		EACH_RIGHT(&messages[i].msg_hdr, header)
	return true;
	return false;
}

/* Errors of a message that would have been sent without the files. */
static bool files_refused(int error)
{
	return error == EINVAL || error == ETOOMANYREFS || error == ENOBUFS || error == EBADF || error == EPERM;
}

/* sendmsg(2) on a socket that is no connection of ours. */
ssize_t rights_send(int fd, const struct msghdr *message, int flags)
{
	_Alignas(struct cmsghdr) char control[CONTROL_MAX];
	struct given given[GIVEN_MAX];
	struct msghdr with;
	unsigned long other_end = 0;
	int given_len = 0, line = -1;
	enum receiver receiver = rights_have_connections(message) && !message->msg_name && arena_kept() && !foreign_pids
	                             ? receiver_of(fd, &other_end)
	                             : RECEIVER_UNKNOWN;

	if (receiver != RECEIVER_UNKNOWN)
		given_len = rights_give(message, given, &line);
	bool fits = given_len && message_with_files(&with, message, control, given, given_len, line);
	while (!fits && given_len)
		given_back(&given[--given_len]);
	strangers_leave(message, given, given_len);
	for (int i = 0; i < given_len; i++) /* another thread may receive it at once */
		given[i].conn->in_messages += receiver == RECEIVER_SELF;
	ssize_t sent = real.sendmsg(fd, given_len ? &with : message, flags);
	int saved = errno;
	own_fd_close(line);
	errno = saved;
	if (!given_len)
		return sent;
	if (sent < 0) {
		KEEP_ERRNO;
		while (given_len) {
			if (receiver == RECEIVER_SELF)
				message_over(given[given_len - 1].conn);
			given_back(&given[--given_len]);
		}
	}
	for (int i = 0; i < given_len; i++)
		given_sent(&given[i], receiver, other_end);
	if (sent >= 0 || !files_refused(errno))
		return sent;
	rights_strand(message);
	return real.sendmsg(fd, message, flags);
}

/* ---- the taker ---- */

/* The page that tells of a connection, if this is one: of a size and shape that cannot change. */
static struct pass *pass_map(int fd)
{
	struct stat st;

	if (real.fstat(fd, &st) < 0 || !S_ISREG(st.st_mode) || st.st_size != (off_t)sizeof(struct pass) ||
	    !channel_stays(fd))
		return NULL;
	struct pass *pass = mmap(NULL, sizeof(*pass), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (pass == MAP_FAILED)
		return NULL;
	if (pass->magic == PASS_MAGIC && pass->version == LAYOUT_VERSION)
		return pass;
	munmap(pass, sizeof(*pass));
	return NULL;
}

/* Another user's could be anything, and change at any time. */
static bool are_ours(const int *files)
{
	struct stat page, arena;

	return real.fstat(files[FILE_PAGE], &page) == 0 && page.st_uid == geteuid() &&
	       real.fstat(files[FILE_ARENA], &arena) == 0 && arena.st_uid == geteuid();
}

/* True: the place of a holder that the giver has kept is ours. */
static bool pass_take(struct pass *pass)
{
	uint32_t waits = PASS_WAITS;
	bool first = atomic_compare_exchange_strong(&pass->state, &waits, PASS_TAKEN);

	real.syscall(SYS_futex, (long)&pass->state, FUTEX_WAKE, INT32_MAX, 0, 0, 0);
	return first;
}

static bool take_ring(struct traveller *of, int *files, bool far, struct conn_slot *slot, int fd)
{
	of->segment_fd = files[FILE_SEGMENT];
	of->remote_fd = files[FILE_REMOTE];
	of->remote_page_fd = files[FILE_REMOTE_PAGE];
	of->doorbell_fd = files[FILE_DOORBELL];
	of->liveness_fd = far ? files[FILE_LIVENESS] : -1;
	bool taken = traveller_take(of, slot, fd, far ? files[FILE_LINE] : -1);
	files[FILE_SEGMENT] = of->segment_fd;
	files[FILE_REMOTE] = of->remote_fd;
	files[FILE_REMOTE_PAGE] = of->remote_page_fd;
	files[FILE_DOORBELL] = of->doorbell_fd;
	if (far)
		files[FILE_LIVENESS] = of->liveness_fd;
	return taken;
}

/* A connection whose socket came under the number `fd`; < 0: it was cut off. Takes descriptors out of `files`, which are `count`. */
static void take(struct pass *pass, int *files, uint32_t count, int fd)
{
	const bool by_ring = count != FILES_BY_TCP;
	struct traveller of = pass->of; /* one copy: the giver can write it at any time */
	struct conn_slot *slot =
		are_ours(files) ? slot_arrive(files[FILE_ARENA], pass->arena_id, of.slot, of.generation) : NULL;
	const bool first = pass_take(pass), withdrawn = atomic_load(&pass->state) == PASS_WITHDRAWN;
	int known;
	HELD conn = conn_find(slot, of.generation, &known);

	/* The number comes first, then the message's reference goes: a thread that closes the last number counts both. */
	if (conn && fd >= 0 && !conn_join(conn, fd)) {
		conn_unref(conn);
		conn = NULL;
	}
	if (slot && !withdrawn && !conn && fd >= 0) {
		if (!first) /* the message has come before, by MSG_PEEK */
			atomic_fetch_add(&slot->holders, 1);
		holder_put(slot, 0, shim_pid);
		arena_shared = true;
		of.taken = false;
		of.segment_fd = -1;
		bool taken = by_ring ? take_ring(&of, files, count == FILES_FAR, slot, fd) : traveller_take(&of, slot, fd, -1);
		if (taken) {
			HELD its = conn_hold(fd);
			if (its)
				set_conn_returned(its, fd, false);
			rpc_given();
			return;
		}
		if (!of.taken) {
			shim_lock_take();
			slot_release(slot);
			shim_lock_drop();
		}
		slot = NULL;
	} else if (slot && first && atomic_fetch_sub(&slot->holders, 1) == 1) {
		slot_free(slot); /* else we have it already, or another has */
	}
	if (conn && first)
		message_over(conn);
	if (!conn && fd >= 0 && !withdrawn && by_ring)
		tcp_reset(fd); /* a reset, as the bytes in its ring cannot be read */
	if (slot)
		slot_forgo(slot);
}

/* All numbers of the socket among those that came; with no `files` their limit was met, and nobody can go on with it. */
static void take_all(struct pass *pass, int *files, uint32_t count, const int *fds, size_t len)
{
	bool any = false;
	uint64_t cookie;

	for (size_t i = 0; i < len; i++) {
		if (!option_get(fds[i], SOL_SOCKET, SO_COOKIE, &cookie, sizeof(cookie)) || cookie != pass->of.cookie)
			continue;
		if (!files && count != FILES_BY_TCP)
			tcp_reset(fds[i]);
		else if (files && !file_get(fds[i]))
			take(pass, files, count, fds[i]);
		any = true;
	}
	if (files && !any)
		take(pass, files, count, -1);
}

/* `cut`: the limit of descriptors was met. What a socket needs may have been cut off with it. */
static void doubtful_end(const int *fds, size_t len)
{
	int protocol;

	for (size_t i = 0; i < len; i++)
		if (option_get(fds[i], SOL_SOCKET, SO_PROTOCOL, &protocol, sizeof(protocol)) && protocol == IPPROTO_TCP)
			tcp_reset(fds[i]);
}

/* Takes connections out of `len` descriptors that have come; `room`: how many the program can take, which becomes how many it gets. */
static bool rights_take(int *fds, size_t len, size_t *room, bool cut, int flags)
{
	struct pass *pass = NULL;
	size_t own = 0;

	while (own < len && !(pass = pass_map(fds[own])))
		own++;
	const size_t kept = own < *room ? own : *room;
	for (size_t i = 0; i < kept; i++) {
		fd_new(fds[i]);
		if (!(flags & MSG_CMSG_CLOEXEC))
			real.fcntl64(fds[i], F_SETFD, 0);
	}
	if (cut && !pass)
		doubtful_end(fds, kept);
	for (size_t at = own; pass; pass = at < len ? pass_map(fds[at]) : NULL) {
		const uint32_t said = pass->files; /* one load: the giver can write it */
		const uint32_t files = said == FILES_BY_TCP || said == FILES_FAR ? said : FILES;
		take_all(pass, len - at < files ? NULL : fds + at, files, fds, kept);
		pass_close(pass);
		at += files;
	}
	for (size_t i = kept; i < len; i++)
		if (fds[i] >= 0)
			raw_close(fds[i]);
	*room = kept;
	return kept == own;
}

/* put_cmsg() of Linux: what does not fit is cut off. */
static void control_put(struct msghdr *message, size_t *at, const struct cmsghdr *header, const void *data, size_t len)
{
	size_t left = message->msg_controllen - *at;

	if (left < sizeof(*header)) {
		message->msg_flags |= MSG_CTRUNC;
		return;
	}
	struct cmsghdr put = *header;
	put.cmsg_len = CMSG_LEN(len) < left ? CMSG_LEN(len) : left;
	if (CMSG_LEN(len) > left)
		message->msg_flags |= MSG_CTRUNC;
	memcpy((char *)message->msg_control + *at, &put, sizeof(put));
	memcpy((char *)message->msg_control + *at + CMSG_LEN(0), data, put.cmsg_len - CMSG_LEN(0));
	*at += CMSG_SPACE(len) < left ? CMSG_SPACE(len) : left;
}

/* Control data goes from our buffer to the program's, as the kernel would have put it there. */
static void control_deliver(struct msghdr *message, const struct msghdr *own, int flags)
{
	const bool cut = own->msg_flags & MSG_CTRUNC;
	size_t at = 0;

	message->msg_namelen = own->msg_namelen;
	message->msg_flags = own->msg_flags & ~(flags & MSG_CMSG_CLOEXEC ? 0 : MSG_CMSG_CLOEXEC);
	for (struct cmsghdr *header = CMSG_FIRSTHDR(own); header; header = CMSG_NXTHDR((struct msghdr *)own, header)) {
		int fds[RIGHTS_MAX];
		if (header->cmsg_len < CMSG_LEN(0))
			break;
		if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) {
			control_put(message, &at, header, CMSG_DATA(header), header->cmsg_len - CMSG_LEN(0));
			continue;
		}
		size_t len = rights_count(header), left = message->msg_controllen - at;
		size_t room = left <= CMSG_LEN(0) ? 0 : (left - CMSG_LEN(0)) / sizeof(int);
		if (len > RIGHTS_MAX)
			len = RIGHTS_MAX;
		memcpy(fds, CMSG_DATA(header), len * sizeof(int));
		if (!rights_take(fds, len, &room, cut, flags))
			message->msg_flags |= MSG_CTRUNC;
		if (room)
			control_put(message, &at, header, fds, room * sizeof(int));
	}
	message->msg_controllen = at;
}

static bool has_room(const struct msghdr *message)
{
	return message->msg_control && message->msg_controllen >= CMSG_LEN(sizeof(int));
}

static bool is_unix(int fd)
{
	int domain;

	return option_get(fd, SOL_SOCKET, SO_DOMAIN, &domain, sizeof(domain)) && domain == AF_UNIX;
}

bool rights_may_come(int fd, const struct mmsghdr *messages, unsigned len)
{
	for (unsigned i = 0; i < len; i++)
		if (has_room(&messages[i].msg_hdr))
			return fd_table_len && !word_load(tcp_only_reason) && is_unix(fd);
	return false;
}

/* recvmsg(2) on a socket that is no connection of ours. */
ssize_t rights_receive(int fd, struct msghdr *message, int flags)
{
	_Alignas(struct cmsghdr) char control[CONTROL_MAX];
	struct msghdr own;

	if (!has_room(message) || unlikely(word_load(tcp_only_reason)) || !is_unix(fd))
		return real.recvmsg(fd, message, flags);
	own = *message;
	own.msg_control = control;
	own.msg_controllen = sizeof(control);
	/* descriptors of ours in it are not for a program that another thread may be starting */
	ssize_t got = real.recvmsg(fd, &own, flags | MSG_CMSG_CLOEXEC);
	if (got >= 0) {
		KEEP_ERRNO;
		control_deliver(message, &own, flags);
		if (uring_doubted())
			uring_unseen(); /* a connection may have come with it */
	}
	return got;
}

/* ---- a program that becomes another ---- */

/* Connections that wait in a socket which the next program inherits go back to TCP, as that program cannot take them. */
static bool number_strands(int dir, long number, void *argument)
{
	_Alignas(struct cmsghdr) char control[CONTROL_MAX];
	char byte;
	struct iovec iov = {&byte, 1};
	struct msghdr message = {
		.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)};
	int flags = real.fcntl64((int)number, F_GETFD, 0);

	(void)dir;
	(void)argument;
	if (file_get((int)number) || flags < 0 || flags & FD_CLOEXEC || !is_unix((int)number) ||
	    rights_receive((int)number, &message, MSG_PEEK | MSG_DONTWAIT | MSG_CMSG_CLOEXEC) < 0)
		return true;
	rights_strand(&message);
	EACH_RIGHT(&message, header)
	for (size_t i = 0; i < rights_count(header); i++)
		close(right_at(header, i));
	return true;
}

/* This process becomes a program without the shim, for all that is known. */
void passes_strand(void)
{
	KEEP_ERRNO;

	int numbers = arena_has_passed() ? proc_open("/proc/self/fd", O_RDONLY | O_DIRECTORY) : -1;
	if (numbers < 0)
		return;
	proc_numbers(numbers, number_strands, NULL);
	raw_close(numbers);
}
