/*
 * shim_receiver.c - the possible readers of messages to a UNIX socket: true if each process that holds its other end has the
 * shim.
 *
 * The kernel names the other end (sock_diag(7)), and proc(5) lists its holders. A program under the shim has an arena open as
 * well, and one that keeps to TCP has a mark. Processes of other users may be hidden; but the process that has made the other
 * end is of ours.
 */
#include "shim_travel.h"

#include <fcntl.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <linux/unix_diag.h>
#include <sys/stat.h>

#include "shim_proc.h"

#define KNOWN_MAX 8
#define DESCRIPTORS_MAX 65536 /* looked at; where there are more, nothing is known */
#define KNOWN_NS \
	1000000000ll /* time for which a receiver is taken for the same: most have few, and are given many sockets */

/* Our end, and the holders of the other; guarded by shim_lock. */
static struct {
	uint64_t inode;
	unsigned long other_end;
	enum receiver what;
	int64_t until;
} known[KNOWN_MAX];

struct search {
	unsigned long inode; /* inode of the other end */
	uint64_t namespace;  /* namespace of process numbers: ours */
	bool holds, shim, tcp_only; /* findings of the process at hand */
	uint32_t others, strangers, descriptors;
	bool self;
};

static uint64_t inode_of(const char *path)
{
	struct stat st;

	return stat(path, &st) == 0 ? (uint64_t)st.st_ino : 0;
}

static bool number_seen(int dir, long number, void *argument)
{
	static const char arena[] = "/memfd:" ARENA_NAME, tcp_only[] = "/memfd:" TCP_ONLY_MARK;
	struct search *search = argument;
	char name[16], target[64];
	unsigned long inode;

	snprintf(name, sizeof(name), "%ld", number);
	if (++search->descriptors > DESCRIPTORS_MAX)
		return false;
	ssize_t n = real.syscall(SYS_readlinkat, dir, (long)name, (long)target, sizeof(target) - 1, 0, 0);
	target[n > 0 ? n : 0] = '\0';
	search->holds |= sscanf(target, "socket:[%lu]", &inode) == 1 && inode == search->inode;
	search->shim |= strncmp(target, arena, sizeof(arena) - 1) == 0;
	search->tcp_only |= strncmp(target, tcp_only, sizeof(tcp_only) - 1) == 0;
	return true;
}

/* True if a process has no other user than ours, in any of the ways to have one. */
static bool same_user(const char *process)
{
	char path[48], text[1024];
	uint32_t uids[4], our = geteuid();

	snprintf(path, sizeof(path), "%s/status", process);
	int fd = proc_open(path, O_RDONLY);
	ssize_t n = fd < 0 ? -1 : real.syscall(SYS_read, fd, (long)text, sizeof(text) - 1, 0, 0, 0);
	if (fd >= 0)
		raw_close(fd);
	text[n > 0 ? n : 0] = '\0';
	const char *line = strstr(text, "\nUid:");
	return line && sscanf(line, "\nUid: %u %u %u %u", &uids[0], &uids[1], &uids[2], &uids[3]) == 4 && uids[0] == our &&
	       uids[1] == our && uids[2] == our && uids[3] == our;
}

static bool process_seen(int dir, long pid, void *argument)
{
	struct search *search = argument;
	char process[28], path[40];

	(void)dir;
	snprintf(process, sizeof(process), "/proc/%ld", pid);
	snprintf(path, sizeof(path), "%s/fd", process);
	int numbers = proc_open(path, O_RDONLY | O_DIRECTORY);
	if (numbers < 0)
		return true;
	search->holds = search->shim = search->tcp_only = false;
	proc_numbers(numbers, number_seen, search);
	raw_close(numbers);
	if (!search->holds)
		return true;
	snprintf(path, sizeof(path), "%s/ns/pid", process);
	search->self |= (uint32_t)pid == shim_pid;
	search->others += (uint32_t)pid != shim_pid;
	search->strangers +=
		!search->shim || search->tcp_only || inode_of(path) != search->namespace || !same_user(process);
	return search->descriptors <= DESCRIPTORS_MAX;
}

/* The inode of the other end of a UNIX socket; 0: it has none, or the kernel does not tell. */
static unsigned long other_end(uint64_t inode)
{
	const struct {
		struct nlmsghdr header;
		struct unix_diag_req request;
	} asked = {{.nlmsg_len = sizeof(asked), .nlmsg_type = SOCK_DIAG_BY_FAMILY, .nlmsg_flags = NLM_F_REQUEST},
	           {.sdiag_family = AF_UNIX,
	            .udiag_states = UINT32_MAX,
	            .udiag_ino = (uint32_t)inode,
	            .udiag_show = UDIAG_SHOW_PEER,
	            .udiag_cookie = {UINT32_MAX, UINT32_MAX}}};
	_Alignas(struct nlmsghdr) char answer[1024];
	uint32_t other = 0;

	int fd = (int)real.syscall(SYS_socket, AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG, 0, 0, 0);
	if (fd < 0)
		return 0;
	ssize_t n = real.syscall(SYS_sendto, fd, (long)&asked, sizeof(asked), 0, 0, 0) == (long)sizeof(asked)
	                ? real.syscall(SYS_recvfrom, fd, (long)answer, sizeof(answer), MSG_DONTWAIT, 0, 0)
	                : -1;
	raw_close(fd);
	const struct nlmsghdr *header = (const struct nlmsghdr *)answer;
	if (n < 0 || !NLMSG_OK(header, (size_t)n) || header->nlmsg_type != SOCK_DIAG_BY_FAMILY)
		return 0;
	size_t left = header->nlmsg_len - NLMSG_LENGTH(sizeof(struct unix_diag_msg)), at = 0;
	const char *attributes = (const char *)NLMSG_DATA(header) + NLMSG_ALIGN(sizeof(struct unix_diag_msg));
	while (at + sizeof(struct nlattr) <= left) {
		const struct nlattr *attribute = (const struct nlattr *)(attributes + at);
		if (attribute->nla_len < sizeof(*attribute) || attribute->nla_len > left - at)
			break;
		if (attribute->nla_type == UNIX_DIAG_PEER && attribute->nla_len >= sizeof(*attribute) + sizeof(other))
			memcpy(&other, attribute + 1, sizeof(other));
		at += NLA_ALIGN(attribute->nla_len);
	}
	return other;
}

enum receiver receiver_again(unsigned long other_end)
{
	struct search search = {.inode = other_end, .namespace = inode_of("/proc/self/ns/pid")};
	KEEP_ERRNO;

	int processes = search.namespace ? proc_open("/proc", O_RDONLY | O_DIRECTORY) : -1;
	bool seen = processes >= 0 && proc_numbers(processes, process_seen, &search);
	if (processes >= 0)
		raw_close(processes);
	if (!seen || search.strangers || search.descriptors > DESCRIPTORS_MAX || (!search.others && !search.self))
		return RECEIVER_UNKNOWN;
	return search.others ? RECEIVER_SHIM : RECEIVER_SELF;
}

/* `other_end` becomes what receiver_again() takes. */
enum receiver receiver_of(int fd, unsigned long *other)
{
	enum receiver what = RECEIVER_UNKNOWN;
	struct ucred peer;
	struct stat st;
	int domain, place = 0;
	int64_t now = now_ns();
	KEEP_ERRNO;

	if (!option_get(fd, SOL_SOCKET, SO_DOMAIN, &domain, sizeof(domain)) || domain != AF_UNIX ||
	    real.fstat(fd, &st) < 0 || !option_get(fd, SOL_SOCKET, SO_PEERCRED, &peer, sizeof(peer)) ||
	    peer.uid != geteuid())
		return RECEIVER_UNKNOWN;
	shim_lock_take();
	for (int i = 0; i < KNOWN_MAX; i++)
		if (known[i].inode == (uint64_t)st.st_ino && now < known[i].until) {
			what = known[i].what;
			*other = known[i].other_end;
		}
	shim_lock_drop();
	if (what != RECEIVER_UNKNOWN)
		return what;
	*other = other_end((uint64_t)st.st_ino);
	what = *other ? receiver_again(*other) : RECEIVER_UNKNOWN;
	shim_lock_take();
	for (int i = 0; i < KNOWN_MAX; i++)
		if (known[i].until < known[place].until)
			place = i;
	known[place].inode = (uint64_t)st.st_ino;
	known[place].other_end = *other;
	known[place].what = what;
	known[place].until = now + KNOWN_NS;
	shim_lock_drop();
	return what;
}

/* Called around a fork: there is one more process that may read. */
void receivers_forget(void)
{
	memset(known, 0, sizeof(known));
}
