/* shim_answer.c - what the provider says: answers, and commands, which are kept until they can be run. */
#include "shim_provider.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

struct command commands[COMMANDS_MAX];
_Atomic int commands_len;
struct ask asks[ASKS_MAX];
bool asks_stalled;

#define LATE_LOOK_NS \
	10000000ll /* Time between two looks whether another process has a connection whose answer is kept */

/* The provider closes its duplicate before it answers. */
static struct conn *answered(uint64_t token)
{
	struct conn *conn = pending_take(token);

	if (conn)
		atomic_store(&conn->delegated, 0);
	return conn;
}

static void take_ring_size(uint32_t proposed, uint32_t *size)
{
	if (!config.ring_size_set && proposed >= CHANNEL_RING_MIN && proposed <= CHANNEL_RING_MAX &&
	    !(proposed & (proposed - 1)))
		*size = proposed;
}

static void welcome(const struct rpc_msg *record, int registry_fd)
{
	struct stat st;

	if (!config.promote_set) {
		config.promote_after_calls = record->promote_after_calls;
		config.promote_after_bytes = record->promote_after_bytes;
	}
	take_ring_size(record->ring_size[0], &config.ring_size);
	take_ring_size(record->ring_size[1], &config.remote_ring_size);
	if (registry_fd < 0 || fstat(registry_fd, &st) < 0 || st.st_size < (off_t)REGISTRY_SIZE)
		return;
	int seals = fcntl(registry_fd, F_GET_SEALS);
	if (seals < 0 || !(seals & F_SEAL_SHRINK))
		return;
	void *map = mmap(NULL, REGISTRY_SIZE, PROT_READ, MAP_SHARED, registry_fd, 0);
	if (map == MAP_FAILED)
		return;
	atomic_store(&provider.wants, record->flags & (WELCOME_POSSESSION | WELCOME_FAR | WELCOME_SERVES |
	                                               WELCOME_NEW_DOORBELLS | WELCOME_JOINS | WELCOME_FILE_RINGS));
	atomic_store(&provider.answered, true);
	/* The old page, of a provider that is gone, may still be looked at by another thread: it stays mapped. */
	atomic_fetch_add(&provider.registry_epoch, 1);
	atomic_store(&provider.registry, map);
	provider.welcomed = true;
	guests_join();
	atomic_store(&provider.other_layout, false);
}

/* A confined process counts nothing: conn_attach() leaves the connection on TCP until its end. */
static bool used_by_others(struct conn *conn)
{
	return !conn_alone(conn) && !slot_has(conn->slot, SLOT_CONFINED);
}

/* fds has room for one more than fds_len; what is left in it is the caller's to close. */
static int attach(struct conn *conn, const struct rpc_msg *record, int *fds, int fds_len)
{
	const bool claimer = record->type == RPC_ATTACH;
	int segment = claimer ? fds[0] : conn->pending_segment_fd;
	int fd = conn_fd(conn);
	struct conn_slot *slot = conn->slot;
	struct doorbell *local = conn->doorbell;
	bool relayed = record->flags & ATTACH_RELAYED;

	if (fds_len != (claimer ? 3 : 2) + relayed || fd < 0 || segment < 0 || set_wants_pin(conn) || !local ||
	    slot_has(slot, SLOT_PIN)) {
		shim_log("cannot attach: %d descriptors, fd %d", fds_len, fd);
		refused(conn, REASON_NO_RESOURCES);
		return fds_len;
	}
	if (used_by_others(conn)) {
		if (!late_keep(conn, record, fds, fds_len)) {
			shim_log("cannot attach: %u holders", word_load(slot->holders));
			refused(conn, REASON_INHERITED);
		}
		return fds_len;
	}
	int liveness_fd = relayed ? fds[--fds_len] : -1;
	if (!claimer) {
		/* no longer ours to hide: channel_map asks about it by the calls that hide our own */
		file_put(segment, NULL);
		conn->pending_segment_fd = -1;
		fds[fds_len++] = segment; /* closed by the caller, with the others */
	}
	int *doorbell_fds = claimer ? fds + 1 : fds;
	struct remote_doorbell *remote = remote_doorbell_get(record->doorbell_page_id, record->doorbell_index,
	                                                     doorbell_fds[0], doorbell_fds[1], liveness_fd);
	doorbell_fds[0] = doorbell_fds[1] = -1;
	if (remote && relayed && remote->liveness_fd >= 0)
		slot_set(slot, SLOT_RELAYED);
	int failed = !remote ? -errno
	             : relayed != (remote->liveness_fd >= 0)
	                 ? -EPROTO
	                 : conn_attach(conn, fd, segment, claimer ? 1 : 0, remote, local);
	if (failed) {
		shim_log("fd %d: attach failed: %d", fd, failed);
		slot_clear(slot, SLOT_RELAYED);
		if (remote)
			remote_doorbell_unref(remote);
		refused(conn, failed == -EPROTO     ? REASON_PEER_VIOLATION
		              : failed == -ENOTCONN ? REASON_PEER_ABSENT
		                                    : REASON_NO_RESOURCES);
	} else if (claimer) {
		memcpy(slot->segment_id, record->segment_id, 16);
	}
	return fds_len;
}

/* True if a provider that stands between has gone since. */
static bool late_void(const struct late *mine)
{
	struct pollfd life = {.fd = mine->record.flags & ATTACH_RELAYED ? mine->fds[mine->fds_len - 1] : -1};

	return raw_poll(&life, 1, 0) > 0;
}

/* No lock is held. Takes the channel that has waited for it, if no other process uses the connection any more. */
void late_look(struct conn *conn)
{
	const int64_t now = coarse_ns();
	int fds[LATE_FDS + 1];
	struct late taken;

	if (word_load(conn->slot->state) != STATE_OFFERED || now < word_load(conn->again_at))
		return;
	KEEP_ERRNO;
	word_store(conn->again_at, now + LATE_LOOK_NS);
	if (used_by_others(conn))
		return;
	shim_lock_take();
	bool mine = word_load(conn->slot->state) == STATE_OFFERED && late_take(conn, &taken);
	if (mine && late_void(&taken)) {
		late_close(&taken);
		refused(conn, no_provider());
	} else if (mine) {
		for (int i = 0; i < taken.fds_len; i++) {
			fds[i] = taken.fds[i];
			file_put(fds[i], NULL); /* no longer ours to hide, as in attach() */
		}
		int fds_len = attach(conn, &taken.record, fds, taken.fds_len);
		for (int i = 0; i < fds_len; i++)
			if (fds[i] >= 0)
				raw_close(fds[i]);
	}
	shim_lock_drop();
}

enum reason_code rpc_refusal_reason(uint32_t refusal)
{
	switch (refusal) {
	case REFUSAL_NO_OFFER:
	case REFUSAL_EXPIRED: return REASON_PEER_ABSENT;
	case REFUSAL_NO_BUDGET:
	case REFUSAL_TOO_MANY: return REASON_NO_RESOURCES;
	case REFUSAL_POLICY: return REASON_POLICY;
	case REFUSAL_FOREIGN_USER: return REASON_FOREIGN_USER;
	case REFUSAL_NO_PROTOCOL: return REASON_NO_PROTOCOL;
	case REFUSAL_LATENCY: return REASON_LATENCY;
	default: return REASON_REFUSED_BY_PROVIDER;
	}
}

/* An answer that a call waits for. */
static void take_answer(const struct rpc_msg *record)
{
	for (int i = 0; i < ASKS_MAX; i++)
		if (asks[i].token && asks[i].token == record->token) {
			struct rpc_answer *answer = &asks[i].answer;
			*answer = (struct rpc_answer){.error = record->error,
			                              .reason = record->reason,
			                              .local_port = record->local_port,
			                              .remote_port = record->remote_port};
			memcpy(answer->local_addr, record->local_addr, sizeof(answer->local_addr));
			memcpy(answer->remote_addr, record->remote_addr, sizeof(answer->remote_addr));
			asks[i].answered = true;
		}
}

/* Gain and loss of its way to another host, if the provider names them. */
static void take_profile(struct conn *conn, const struct rpc_msg *record)
{
	word_store(conn->message_ns, record->promote_after_calls);
	word_store(conn->mib_ns, record->promote_after_bytes);
	word_store(conn->turn_ns, record->turns);
	word_store(conn->gain_serial, word_load(provider.lost));
}

/* Kept until it can be looked at; another process of the family may be meant. */
static void take_new_doorbell(const struct rpc_msg *record, int *fds, int fds_len)
{
	struct command *command = &commands[commands_len];

	if (fds_len != 2)
		return;
	*command = (struct command){.type = RPC_NEW_DOORBELL,
	                            .slot_generation = record->token,
	                            .new_doorbell = {.fds = {own_fd(fds[0]), own_fd(fds[1])},
	                                             .number = record->cookie,
	                                             .index = record->doorbell_index}};
	memcpy(command->new_doorbell.id, record->doorbell_page_id, sizeof(command->new_doorbell.id));
	memcpy(command->arena_id, record->arena_id, sizeof(command->arena_id));
	fds[0] = fds[1] = -1;
	if (command->new_doorbell.fds[0] >= 0 && command->new_doorbell.fds[1] >= 0) {
		commands_len++;
		return;
	}
	own_fd_close(command->new_doorbell.fds[0]);
	own_fd_close(command->new_doorbell.fds[1]);
}

/* Does what a record says; the conn whose reference is to be dropped, or NULL. */
static struct conn *take_record(const struct rpc_msg *record, int *fds, int *fds_len)
{
	struct conn *conn = NULL;

	switch (record->type) {
	case RPC_WELCOME: welcome(record, *fds_len == 1 ? fds[0] : -1); break;
	case RPC_ATTACH:
	case RPC_CLAIMED:
		conn = answered(record->token);
		if (conn)
			take_profile(conn, record);
		if (conn && word_load(conn->slot->state) == STATE_OFFERED)
			*fds_len = attach(conn, record, fds, *fds_len);
		break;
	case RPC_REFUSED:
		conn = answered(record->token);
		shim_log("refused: %u", record->reason);
		if (conn && record->reason == REFUSAL_LATENCY)
			take_profile(conn, record);
		if (conn)
			refused(conn, rpc_refusal_reason(record->reason));
		break;
	case RPC_ANSWER: take_answer(record); break;
	case RPC_NEW_DOORBELL: take_new_doorbell(record, fds, *fds_len); break;
	case RPC_DEMOTE:
	case RPC_PROMOTE:
	case RPC_SERVE: {
		struct command *command = &commands[commands_len++];
		*command = (struct command){.type = record->type, .slot_generation = record->token};
		memcpy(command->segment_id, record->segment_id, sizeof(command->segment_id));
		memcpy(command->arena_id, record->arena_id, sizeof(command->arena_id));
		break;
	}
	}
	return conn;
}

/* Takes one answer; returns the conn whose reference is to be dropped, or NULL; *more: another may wait. */
struct conn *rpc_receive(bool *more)
{
	union {
		struct cmsghdr header;
		char bytes[CMSG_SPACE(8 * sizeof(int))];
	} control;
	struct rpc_msg record;
	struct iovec iov = {&record, sizeof(record)};
	struct msghdr message = {
		.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};
	int fds[9], fds_len = 0;
	struct conn *conn = NULL;

	*more = false;
	if (commands_len == COMMANDS_MAX)
		return NULL; /* first these; see commands_run() */
	ssize_t n = raw_recvmsg(provider.fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return NULL;
	if (n <= 0) {
		rpc_lost();
		return NULL;
	}
	*more = true;
	asks_stalled = false;
	for (struct cmsghdr *header = CMSG_FIRSTHDR(&message); header; header = CMSG_NXTHDR(&message, header))
		if (header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
			int count = (int)((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
			for (int i = 0; i < count && fds_len < 8; i++)
				memcpy(&fds[fds_len++], CMSG_DATA(header) + (size_t)i * sizeof(int), sizeof(int));
		}
	bool whole = n == (ssize_t)sizeof(record) && record.magic == RPC_MAGIC;
	if (whole && record.type == RPC_LAYOUT)
		atomic_store(&provider.other_layout, true);
	else if (whole && record.version == LAYOUT_VERSION)
		conn = take_record(&record, fds, &fds_len);
	for (int i = 0; i < fds_len; i++)
		if (fds[i] >= 0)
			raw_close(fds[i]);
	return conn;
}

void answers_after_fork(void)
{
	memset(asks, 0, sizeof(asks));
	asks_stalled = false;
	for (int i = 0; i < commands_len; i++) { /* the parent's */
		if (commands[i].type == RPC_NEW_DOORBELL) {
			own_fd_close(commands[i].new_doorbell.fds[0]);
			own_fd_close(commands[i].new_doorbell.fds[1]);
		}
	}
	commands_len = 0;
	late_after_fork();
}
