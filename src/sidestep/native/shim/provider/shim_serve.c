/*
 * shim_serve.c - requests of peers on connections that no thread waits on.
 *
 * A peer that goes back to TCP asks us to follow, or to send unread bytes again. We do so with our next call or wait on that
 * connection. A program may not make one before it learns, by another connection, that the bytes have come. So a thread that
 * sleeps looks at all connections of its doorbells, before it sleeps and after. One ring may be for several, and the program
 * may make no call on any of them for long. Sets look at their members themselves. All this is behind a sleep.
 *
 * A thread wakes by the doorbells of its own wait, and no others. A peer without an answer asks the provider, which sends a
 * message to this process. Then one of its threads, asleep or not, looks at that connection.
 */
#include "shim_switch.h"

#define LOOSE_MAX 64            /* number of connections beyond which a look at all is made less often: */
#define SERVE_EVERY_NS 1000000  /* and recalled bytes that TCP has no room for are tried again after so long */
#define SERVED_MAX 16           /* connections at once */

/* Connections that the provider has named to us, whose recalled bytes have not all gone out; guarded by shim_lock. */
static struct conn *unserved[SERVED_MAX]; /* references to each */
static _Atomic uint32_t unserved_len;

/* No lock is held. Answers the peer's request. True: recalled bytes are left, for which TCP has no room now. */
static bool serve(struct conn *conn)
{
	int fd = conn_fd(conn);

	if (fd >= 0)
		conn_check(conn, fd);
	return fd >= 0 && tx_is(conn->slot, TX_RESEND) && !slot_has(conn->slot, SLOT_RESET);
}

static void owe(int64_t now)
{
	self.serve_at = now + SERVE_EVERY_NS;
}

/* shim_lock held. Those whose peers ask for something, each with a reference. */
static int find_asked(struct doorbell *const *doorbells, uint32_t len, struct conn *found[SERVED_MAX])
{
	int n = 0;

	for (uint32_t i = 0; i < len; i++)
		for (struct conn *conn = doorbells[i]->loose; conn && n < SERVED_MAX; conn = conn->loose_next)
			if (conn_must_check(conn) && tx_request_pending(conn) && refs_take(&conn->refs))
				found[n++] = conn;
	return n;
}

/* shim_lock held. Takes the remaining connections that the provider has named. */
static int find_unserved(struct conn *found[SERVED_MAX])
{
	int n = (int)word_load(unserved_len);

	memcpy(found, unserved, (size_t)n * sizeof(*found));
	word_store(unserved_len, 0);
	return n;
}

/* Drops the reference, or keeps it for the next time. */
static void unserve(struct conn *conn, bool left)
{
	shim_lock_take();
	bool kept = left && word_load(unserved_len) < SERVED_MAX;
	if (kept) {
		unserved[unserved_len] = conn;
		word_store(unserved_len, word_load(unserved_len) + 1);
	}
	shim_lock_drop();
	if (!kept)
		conn_unref(conn);
}

/*
 * No lock is held. The caller is about to sleep on these doorbells (and has made a full fence since it announced that), or
 * was just woken. It looks at `looked_at` of their loose connections by itself. Returns `deadline`, or an earlier time of the
 * next look.
 */
int64_t conns_serve(struct doorbell *const *doorbells, uint32_t len, uint32_t looked_at, int64_t deadline)
{
	struct conn *found[SERVED_MAX];
	uint32_t loose = 0;

	for (uint32_t i = 0; i < len; i++)
		loose += word_load(doorbells[i]->loose_len);
	if (likely(loose <= looked_at && !self.serve_at && !word_load(unserved_len)))
		return deadline;
	KEEP_ERRNO;
	int64_t now = now_ns();
	if (loose > LOOSE_MAX && now - self.served_at < SERVE_EVERY_NS) {
		self.serve_at = self.served_at + SERVE_EVERY_NS;
		return self.serve_at < deadline ? self.serve_at : deadline;
	}
	self.served_at = now;
	self.serve_at = 0;
	shim_lock_take();
	int found_len = find_unserved(found), n = 0;
	shim_lock_drop();
	for (int i = 0; i < found_len; i++) {
		bool left = serve(found[i]);
		unserve(found[i], left);
		if (left)
			owe(now);
	}
	if (loose > looked_at) {
		shim_lock_take();
		n = find_asked(doorbells, len, found);
		shim_lock_drop();
	}
	if (n == SERVED_MAX)
		owe(now);
	for (int i = 0; i < n; i++) {
		if (serve(found[i]))
			owe(now);
		conn_unref(found[i]);
	}
	return self.serve_at && self.serve_at < deadline ? self.serve_at : deadline;
}

/* No lock is held. The provider says that the peer of this channel has asked for something, and is not answered. */
void conns_serve_segment(const uint8_t segment_id[16])
{
	for (uint32_t fd = 0; fd < atomic_load(&fd_end); fd++) {
		struct conn *conn = conn_hold((int)fd);
		if (!conn)
			continue;
		bool named = conn->managed && memcmp(conn->slot->segment_id, segment_id, 16) == 0;
		bool left = named && serve(conn);
		if (left)
			owe(now_ns());
		unserve(conn, left);
		if (named)
			return;
	}
}

/* References of waiting threads stayed in the parent. */
void serve_after_fork(void)
{
	unserved_len = 0;
}
