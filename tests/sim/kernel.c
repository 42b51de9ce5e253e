/* kernel.c - the simulated kernel: descriptors, epoll and poll, the connection to the provider. See also tcp.c, calls.c. */
#include "kernel.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#define FIRST_FD 10

struct object *provider_lines[ENDS];
struct descriptor fds[ENDS][FDS_MAX];
struct object *objects;
static uint64_t ready_order;

int failed(int error)
{
	errno = error;
	return -1;
}

/* ---- descriptors ---- */
struct object *object_new(enum kind kind)
{
	static uint64_t inodes = 100;
	struct object *object = calloc(1, sizeof(*object));

	object->kind = kind;
	object->inode = ++inodes;
	object->next = objects;
	return objects = object;
}

struct object *fd_object(int fd)
{
	return fd >= 0 && fd < FDS_MAX ? fds[current_end()][fd].object : NULL;
}

int fd_new(struct object *object, int lowest, int end, bool cloexec)
{
	int fd = lowest < FIRST_FD ? FIRST_FD : lowest;

	while (fd < FDS_MAX && fds[end][fd].object)
		fd++;
	if (fd == FDS_MAX)
		return failed(EMFILE);
	object->refs++;
	fds[end][fd] = (struct descriptor){object, cloexec};
	return fd;
}

int current_end(void)
{
	return current ? current->index : 0;
}

static void message_drop(struct message *message)
{
	for (int i = 0; i < message->files_len; i++)
		object_put(message->files[i]);
	free(message);
}

/* What another process has sent here is nobody's then. */
static void line_closed(struct line *line)
{
	line->hung_up = true;
	if (line->mate)
		line_end(line->mate);
	for (struct message *message; line->mate && (message = line->to_process);) {
		line->to_process = message->next;
		message_drop(message);
	}
}

void object_put(struct object *object)
{
	if (--object->refs)
		return;
	/* epoll(7): a registration ends with the last descriptor of what it is of */
	for (struct object *set = objects; set; set = set->next)
		for (struct item **at = &set->items; set->kind == KIND_SET && *at;) {
			if ((*at)->object != object) {
				at = &(*at)->next;
				continue;
			}
			*at = (*at)->next;
		}
	if (object->kind == KIND_TCP)
		tcp_closed(&object->tcp);
	else if (object->kind == KIND_LINE)
		line_closed(&object->line);
}

void line_pair(struct object *pair[2])
{
	for (int i = 0; i < 2; i++)
		pair[i] = object_new(KIND_LINE);
	for (int i = 0; i < 2; i++)
		pair[i]->line.mate = pair[1 - i];
}

int line_passed(int fd)
{
	return fd_object(fd)->line.passed;
}

void fds_close(int end, bool cloexec_only)
{
	for (int fd = 0; fd < FDS_MAX; fd++)
		if (fds[end][fd].object && (!cloexec_only || fds[end][fd].cloexec)) {
			struct object *object = fds[end][fd].object;
			fds[end][fd].object = NULL;
			object_put(object);
		}
}

void fds_fork(int parent, int child)
{
	for (int fd = 0; fd < FDS_MAX; fd++)
		if (fds[parent][fd].object) {
			fds[child][fd] = fds[parent][fd];
			fds[child][fd].object->refs++;
			fds[child][fd].object->shared = true;
		}
	for (struct object *object = objects; object; object = object->next)
		object->shared |= object->kind == KIND_MEMORY; /* some are mapped, and closed */
}

int sim_close(int fd)
{
	struct object *object = fd_object(fd);

	point();
	if (!object)
		return failed(EBADF);
	fds[current_end()][fd].object = NULL;
	object_put(object);
	return 0;
}

/* ---- readiness ---- */
static bool item_true(struct item *item)
{
	return !item->disabled && (object_bits(item->object) & (item->events | EPOLLERR | EPOLLHUP));
}

static bool set_ready(void *argument)
{
	for (struct item *item = ((struct object *)argument)->items; item; item = item->next)
		if (item->ready && item_true(item))
			return true;
	return false;
}

uint32_t object_bits(struct object *object)
{
	switch (object->kind) {
	case KIND_TCP: return tcp_bits(&object->tcp);
	case KIND_LINE: return EPOLLOUT | (object->line.to_process || object->line.dead ? EPOLLIN | EPOLLRDNORM : 0);
	case KIND_DOORBELL: return (object->count ? EPOLLIN : 0) | (object->count < UINT64_MAX - 1 ? EPOLLOUT : 0);
	case KIND_LIVENESS: return object->count ? EPOLLHUP : 0;
	case KIND_SET: return set_ready(object) ? EPOLLIN | EPOLLRDNORM : 0;
	default: return EPOLLIN | EPOLLOUT;
	}
}

static void item_ready(struct item *item)
{
	if (!item->ready && !item->disabled) {
		item->ready = true;
		item->order = ++ready_order;
	}
}

void wake(struct object *object, uint32_t key) /* ep_poll_callback, kill_fasync */
{
	if (object->async && (!key || (key & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR))))
		object->signals++;
	for (struct object *set = objects; set; set = set->next) {
		if (set->kind != KIND_SET || !set->refs)
			continue;
		for (struct item *item = set->items; item; item = item->next)
			if (item->object == object && (!key || (key & (item->events | EPOLLERR | EPOLLHUP)))) {
				item_ready(item);
				wake(set, EPOLLIN | EPOLLRDNORM);
			}
	}
}

static int set_collect(struct object *set, struct epoll_event *events, int max) /* ep_send_events */
{
	uint64_t last = ready_order;
	int n = 0;

	while (n < max) {
		struct item *first = NULL;
		for (struct item *item = set->items; item; item = item->next)
			if (item->ready && item->order <= last && (!first || item->order < first->order))
				first = item;
		if (!first)
			break;
		first->ready = false;
		if (!item_true(first))
			continue;
		events[n].events = object_bits(first->object) & (first->events | EPOLLERR | EPOLLHUP);
		events[n++].data.u64 = first->data;
		if (first->events & EPOLLONESHOT)
			first->disabled = true;
		else if (!(first->events & EPOLLET))
			item_ready(first);
	}
	return n;
}

int set_wait(int fd, struct epoll_event *events, int max, int64_t timeout)
{
	struct object *set = fd_object(fd);
	int64_t deadline = timeout < 0 || timeout > NEVER - now ? NEVER : now + timeout;

	point();
	if (!set || set->kind != KIND_SET)
		return failed(set ? EINVAL : EBADF);
	for (;;) {
		int n = set_collect(set, events, max);
		if (n || timeout == 0 || !block(set_ready, set, deadline))
			return n;
	}
}

int set_control(int epfd, int op, int fd, struct epoll_event *event)
{
	struct object *set = fd_object(epfd), *object = fd_object(fd);
	struct item **at;

	point();
	set = fd_object(epfd);
	object = fd_object(fd);
	if (!set || !object)
		return failed(EBADF);
	for (at = &set->items; *at && ((*at)->object != object || (*at)->fd != fd); at = &(*at)->next)
		;
	struct item *item = *at;
	if (op == EPOLL_CTL_ADD ? item != NULL : item == NULL)
		return failed(item ? EEXIST : ENOENT);
	if (op == EPOLL_CTL_DEL) {
		*at = item->next;
		return 0;
	}
	if (op == EPOLL_CTL_ADD) {
		item = calloc(1, sizeof(*item));
		item->object = object;
		item->fd = fd;
		item->next = set->items;
		set->items = item;
	}
	item->events = event->events;
	item->data = event->data.u64;
	item->disabled = false;
	if (item_true(item)) {
		item_ready(item);
		wake(set, EPOLLIN | EPOLLRDNORM);
	}
	return 0;
}

#define POLLED_MAX 64
struct polled {
	struct pollfd fds[POLLED_MAX];
	struct object *objects[POLLED_MAX]; /* found when the call begins */
	nfds_t len;
};

static bool poll_ready(void *argument)
{
	struct polled *polled = argument;
	bool found = false;

	for (nfds_t i = 0; i < polled->len; i++) {
		struct pollfd *item = &polled->fds[i];
		struct object *object = polled->objects[i];
		item->revents = 0;
		if (item->fd < 0)
			continue;
		uint32_t bits = object ? object_bits(object) : POLLNVAL;
		item->revents = (short)(bits & ((uint16_t)item->events | POLLERR | POLLHUP | POLLNVAL));
		found |= item->revents != 0;
	}
	return found;
}

int fds_poll(struct pollfd *items, nfds_t len, int64_t timeout)
{
	static struct polled at_work[ENDS];
	struct polled *polled = &at_work[current_end()];
	int n = 0;

	point();
	if (len > POLLED_MAX)
		fail("poll of %zu", (size_t)len);
	polled->len = len;
	for (nfds_t i = 0; i < len; i++) {
		polled->fds[i] = items[i];
		polled->objects[i] = fd_object(items[i].fd);
	}
	if (timeout)
		block(poll_ready, polled, timeout < 0 || timeout > NEVER - now ? NEVER : now + timeout);
	poll_ready(polled);
	for (nfds_t i = 0; i < len; i++) {
		items[i].revents = polled->fds[i].revents;
		n += items[i].revents != 0;
	}
	return n;
}

/* ---- lines: the provider's socket ---- */
static void messages_add(struct message **at, struct message *message)
{
	while (*at)
		at = &(*at)->next;
	*at = message;
}

static struct message *message_new(const void *data, size_t len)
{
	struct message *message = calloc(1, sizeof(*message));

	if (len > sizeof(message->data))
		fail("a message of %zu bytes", len);
	memcpy(message->data, data, len);
	message->len = len;
	return message;
}

static void message_file(struct message *message, struct object *object)
{
	object->refs++;
	object->shared = true;
	message->files[message->files_len++] = object;
}

void line_end(struct object *line)
{
	line->line.dead = true;
	wake(line, WAKES_ALL);
}

void line_send(struct object *line, const void *data, size_t len, struct object *const *files, int files_len)
{
	struct message *message = message_new(data, len);

	for (int i = 0; i < files_len; i++)
		message_file(message, files[i]);
	messages_add(&line->line.to_process, message);
	wake(line, EPOLLIN | EPOLLRDNORM);
}

ssize_t line_put(struct object *line, const struct msghdr *message)
{
	if (line->line.dead)
		return failed(EPIPE);
	struct message *made = message_new(message->msg_iov[0].iov_base, message->msg_iov[0].iov_len);

	for (struct cmsghdr *at = message->msg_control ? CMSG_FIRSTHDR(message) : NULL; at;
	     at = CMSG_NXTHDR((struct msghdr *)message, at))
		for (size_t i = 0; i < (at->cmsg_len - CMSG_LEN(0)) / sizeof(int); i++) {
			int fd;
			memcpy(&fd, CMSG_DATA(at) + i * sizeof(int), sizeof(int));
			if (!fd_object(fd))
				fail("descriptor %d is sent, and is none", fd);
			message_file(made, fd_object(fd));
		}
	messages_add(line->line.mate ? &line->line.mate->line.to_process : &line->line.to_driver, made);
	line->line.passed = made->files_len;
	if (line->line.mate)
		wake(line->line.mate, EPOLLIN | EPOLLRDNORM);
	return (ssize_t)made->len;
}

static bool line_tells(void *line)
{
	return ((struct line *)line)->to_process || ((struct line *)line)->dead;
}

ssize_t line_take(struct object *line, struct msghdr *message, int flags)
{
	if (line->line.mate && !line->nonblock && !(flags & MSG_DONTWAIT))
		block(line_tells, &line->line, NEVER);
	struct message *taken = line->line.to_process;

	if (!taken)
		return line->line.dead ? 0 : failed(EAGAIN);
	if (!(flags & MSG_PEEK))
		line->line.to_process = taken->next;
	size_t len = taken->len < message->msg_iov[0].iov_len ? taken->len : message->msg_iov[0].iov_len;
	memcpy(message->msg_iov[0].iov_base, taken->data, len);
	struct cmsghdr *header = message->msg_control ? CMSG_FIRSTHDR(message) : NULL;
	if (header && taken->files_len) {
		int numbers[12];
		for (int i = 0; i < taken->files_len; i++)
			numbers[i] = fd_new(taken->files[i], 0, current_end(), true);
		header->cmsg_level = SOL_SOCKET;
		header->cmsg_type = SCM_RIGHTS;
		header->cmsg_len = CMSG_LEN((size_t)taken->files_len * sizeof(int));
		memcpy(CMSG_DATA(header), numbers, (size_t)taken->files_len * sizeof(int));
		message->msg_controllen = CMSG_SPACE((size_t)taken->files_len * sizeof(int));
	} else {
		message->msg_controllen = 0;
	}
	if (!(flags & MSG_PEEK))
		message_drop(taken);
	return (ssize_t)len;
}
