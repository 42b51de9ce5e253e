/* shim_offer.c - offers and claims of connections: when they are made, and what goes to the provider with them. */
#include "shim_provider.h"
#include "shim_address.h"
#include "shim_tcp_only.h"

#include <fcntl.h>
#include <sys/random.h>

#ifndef SO_NETNS_COOKIE
#define SO_NETNS_COOKIE 71
#endif

static uint32_t bucket_of(const struct conn_slot *slot, uint64_t secret)
{
	uint64_t total = 0;

	for (int end = 0; end < 2; end++) {
		uint64_t value = 0xCBF29CE484222325ull ^ secret;
		uint8_t text[18];
		uint16_t port = end ? slot->remote_port : slot->local_port;
		memcpy(text, end ? slot->remote_addr : slot->local_addr, 16);
		text[16] = (uint8_t)port;
		text[17] = (uint8_t)(port >> 8);
		for (int i = 0; i < 18; i++)
			value = (value ^ text[i]) * 0x100000001B3ull;
		total += value;
	}
	return (uint32_t)((total ^ (total >> 32)) % REGISTRY_BUCKETS);
}

/* Fills in the proof of the socket: addresses and cookies from the kernel. */
static bool describe(struct conn *conn, int fd, struct rpc_msg *record)
{
	struct conn_slot *slot = conn->slot;

	memcpy(record->local_addr, slot->local_addr, 16);
	memcpy(record->remote_addr, slot->remote_addr, 16);
	record->local_port = slot->local_port;
	record->remote_port = slot->remote_port;
	if (!option_get(fd, SOL_SOCKET, SO_COOKIE, &record->cookie, sizeof(record->cookie)) ||
	    !option_get(fd, SOL_SOCKET, SO_NETNS_COOKIE, &record->netns_cookie, sizeof(record->netns_cookie)))
		return false;
	slot->cookie = record->cookie;
	record->token = conn->token;
	record->protocol = conn->explicit ? conn->explicit->protocol : 0;
	memcpy(record->doorbell_page_id, conn->doorbell->id, 16);
	record->doorbell_index = conn->doorbell->index;
	return true;
}

/* Traffic of the connection since the last count. */
void describe_traffic(const struct conn *conn, struct rpc_msg *record)
{
	const struct conn_slot *slot = conn->slot;

	record->promote_after_calls = (uint32_t)(slot_messages(slot) - word_load(conn->counted_msgs));
	record->promote_after_bytes = slot_bytes(slot) - word_load(conn->counted_bytes);
	record->turns = (uint32_t)(word_load(slot->turns) - word_load(conn->counted_turns));
}

void count_traffic(struct conn *conn)
{
	word_store(conn->counted_msgs, slot_messages(conn->slot));
	word_store(conn->counted_bytes, slot_bytes(conn->slot));
	word_store(conn->counted_turns, word_load(conn->slot->turns));
}

/* A UDP socket at the connection's local address, by which the provider finds out whether the two ends reach each other. */
static int path_socket(const struct conn_slot *slot)
{
	int family = address_mapped(slot->local_addr) ? AF_INET : AF_INET6;
	struct sockaddr_storage address;
	socklen_t len;

	address_join(family, slot->local_addr, 0, &address, &len);
	int fd = real.socket(family, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd >= 0 && real.syscall(SYS_bind, fd, (long)&address, len, 0, 0, 0) < 0) {
		raw_close(fd);
		return -1;
	}
	return fd;
}

/* The other end is in our network namespace, by its address. */
static bool local_peer(const struct conn_slot *slot)
{
	static const uint8_t loopback6[16] = {[15] = 1};

	if (address_mapped(slot->remote_addr) && slot->remote_addr[12] == 127)
		return true;
	return memcmp(slot->remote_addr, loopback6, 16) == 0 || memcmp(slot->remote_addr, slot->local_addr, 16) == 0;
}

/* Sends an offer or a claim, with what the provider wants as proof before the descriptors of the channel. */
static bool rpc_send_proven(struct conn *conn, int fd, struct rpc_msg *record, const int *channel, int channel_len)
{
	uint32_t wants = atomic_load(&provider.wants);
	int fds[OFFER_FDS_MAX], fds_len = 0, path = -1;

	if (wants & WELCOME_POSSESSION)
		fds[fds_len++] = fd;
	if (wants & WELCOME_PATH && !local_peer(conn->slot)) { /* a local peer is in the same namespace */
		path = path_socket(conn->slot);
		if (path < 0)
			return false;
		fds[fds_len++] = path;
	}
	memcpy(fds + fds_len, channel, (size_t)channel_len * sizeof(int));
	bool sent = rpc_send(record, fds, fds_len + channel_len);
	if (sent && wants & WELCOME_POSSESSION)
		atomic_store(&conn->delegated, provider.serial);
	if (path >= 0)
		raw_close(path);
	return sent;
}

/* shim_lock held. The message of a pending connection could not be sent. */
static void not_sent(struct conn *conn)
{
	if (pending_take(conn->token)) { /* else the provider is lost, and so is the conn's entry */
		refused(conn, no_provider());
		atomic_fetch_sub(&conn->refs, 1); /* never the last: the caller's descriptor holds one */
	}
}

/* shim_lock held */
static void offer(struct conn *conn, int fd)
{
	struct rpc_msg record = {.type = RPC_OFFER};
	uint32_t size = local_peer(conn->slot) ? config.ring_size : config.remote_ring_size;
	int segment = channel_create(size, size);

	if (segment < 0) {
		conn_pin(conn, REASON_NO_RESOURCES);
		return;
	}
	record.ring_size[0] = record.ring_size[1] = size;
	describe_traffic(conn, &record);
	count_traffic(conn);
	int fds[3] = {segment, conn->doorbell->fd, conn->doorbell->page_fd};
	if (real.syscall(SYS_getrandom, (long)record.segment_id, 16, GRND_NONBLOCK, 0, 0, 0) != 16 ||
	    !describe(conn, fd, &record) || !pending_add(conn)) {
		raw_close(segment);
		return;
	}
	memcpy(conn->slot->segment_id, record.segment_id, 16);
	word_store(conn->slot->state, STATE_OFFERED);
	word_store(conn->slot->reason, REASON_WAITING_FOR_PEER);
	if (!rpc_send_proven(conn, fd, &record, fds, 3)) {
		raw_close(segment);
		not_sent(conn);
		return;
	}
	conn->pending_segment_fd = own_fd(segment); /* -1 where descriptors are short: the answer is then refused */
	shim_log("fd %d offered", fd);
}

static void claim(struct conn *conn, int fd)
{
	struct rpc_msg record = {.type = RPC_CLAIM};
	int fds[2] = {conn->doorbell->fd, conn->doorbell->page_fd};

	if (!describe(conn, fd, &record) || !pending_add(conn))
		return;
	word_store(conn->slot->state, STATE_OFFERED);
	word_store(conn->slot->reason, REASON_WAITING_FOR_PEER);
	if (!rpc_send_proven(conn, fd, &record, fds, 2)) {
		not_sent(conn);
		return;
	}
	shim_log("fd %d claimed", fd);
}

/* The registry's word of the connection's bucket: pending offers, and a count that grows with each. */
static uint32_t bucket_word(const struct conn *conn, const struct registry_header *page)
{
	return atomic_load((const _Atomic uint32_t *)((const uint8_t *)page + REGISTRY_BUCKETS_OFFSET) +
	                   conn->bucket_index - 1);
}

static bool bucket_news(const struct conn *conn, uint32_t word)
{
	return (word & 0xff) && word != conn->bucket_seen;
}

/* The common look of the accepting side, without any lock: has an offer come for this bucket? */
bool offer_missing(struct conn *conn)
{
	struct conn_slot *slot = conn->slot;
	const struct registry_header *page = atomic_load(&provider.registry);

	if (slot->role != ROLE_PASSIVE || !conn->bucket_index || !page ||
	    conn->bucket_epoch != atomic_load(&provider.registry_epoch) || bucket_news(conn, bucket_word(conn, page)))
		return false;
	if (unlikely(word_load(slot->reason) == REASON_YOUNG))
		word_store(slot->reason, REASON_PEER_ABSENT);
	return true;
}

static bool far_unwanted(void)
{
	return !(atomic_load(&provider.wants) & WELCOME_FAR);
}

/*
 * A program that waits by calls that we cannot see would wait for ever. So a nonblocking socket is promoted only after we
 * have seen a wait for it, unless the user wants it at once. If the shim was loaded late such calls are likely: a libuv loop
 * from before may register sockets by io_uring.
 */
bool offer_bearable(struct conn *conn, int fd)
{
	if (!word_load(conn->waited) && !conn_at_once(conn) && (config.promote_after_calls || config.embedded) &&
	    (real.fcntl64(fd, F_GETFL, 0) & O_NONBLOCK)) {
		word_store(conn->calls, 0);
		return false;
	}
	return true;
}

/* shim_lock held, but dropped for a while. Gives the connection a doorbell: its set's, or this thread's. */
static bool doorbell_given(struct conn *conn)
{
	struct conn_slot *slot = conn->slot;

	if (conn->doorbell)
		return true;
	conn->doorbell = set_doorbell_for(conn);
	if (!conn->doorbell) {
		shim_lock_drop();
		struct doorbell *mine = doorbell_self();
		shim_lock_take();
		/* another thread may have come this way with this connection, without the lock */
		if (!provider.welcomed || word_load(slot->state) != STATE_NATIVE || slot_has(slot, SLOT_STAYS))
			return false;
		if (conn->doorbell)
			return true;
		conn->doorbell = mine;
	}
	if (conn->doorbell)
		atomic_fetch_add(&conn->doorbell->refs, 1);
	else
		conn_pin(conn, REASON_NO_RESOURCES);
	return conn->doorbell;
}

/* shim_lock held; the provider is there, and the connection is native. */
static void approach(struct conn *conn, int fd, const struct registry_header *page)
{
	struct conn_slot *slot = conn->slot;
	uint32_t word = 0;

	if (!conn->token)
		conn->token = ++provider.tokens;
	if (slot->role == ROLE_PASSIVE) {
		if (!conn->bucket_index || conn->bucket_epoch != provider.registry_epoch) {
			conn->bucket_index = bucket_of(slot, page->secret) + 1;
			conn->bucket_epoch = provider.registry_epoch;
			conn->bucket_seen = 0;
		}
		word = bucket_word(conn, page);
	}
	if (slot->role != ROLE_ACTIVE && !bucket_news(conn, word))
		return;
	if (!conn_alone(conn)) {
		word_store(slot->reason, REASON_INHERITED);
		word_store(conn->calls, 0);
	} else if (set_wants_pin(conn)) {
		conn_pin(conn, REASON_EPOLL_UNSUPPORTED);
	} else if (doorbell_given(conn)) {
		if (slot->role == ROLE_ACTIVE) {
			offer(conn, fd);
		} else {
			conn->bucket_seen = word;
			claim(conn, fd);
		}
	}
}

void offer_make(struct conn *conn, int fd)
{
	struct conn_slot *slot = conn->slot;
	bool far = !local_peer(slot), more = true; /* true if its peer has another address */

	enum reason_code tcp_only = tcp_only_why();
	if (unlikely(tcp_only)) {
		conn_pin(conn, tcp_only);
		return;
	}
	if (far && atomic_load(&provider.answered) && far_unwanted()) {
		conn_pin(conn, REASON_REMOTE);
		return;
	}
	shim_lock_take();
	if (!rpc_up()) {
		word_store(conn->calls, 0); /* ask again later */
		word_store(slot->reason, no_provider());
	}
	while (more && !provider.welcomed && provider.fd >= 0)
		rpc_receive(&more);
	const struct registry_header *page = atomic_load(&provider.registry);
	if (provider.welcomed && far && far_unwanted())
		word_store(conn->calls, 0); /* pinned at the next look */
	else if (provider.welcomed && page && !page->closing && word_load(slot->state) == STATE_NATIVE && !uring_doubted())
		approach(conn, fd, page);
	let_go(NULL, 0);
}
