/*
 * shim_pass.c - connections that are on their way to another process, with their rings (shim_rights.c).
 *
 * Every process that may read the message has the shim, as far as is known. A child that holds the other end may execute a
 * program without the shim. So the giver looks again for holders of the other end, until the taker has announced itself in
 * that page. It looks before it lets go of the connection, and a few times later. If a stranger holds it, the connection goes
 * back to TCP.
 */
#include "shim_pass.h"

#include <linux/futex.h>
#include <sys/mman.h>

#define OPEN_MAX 32 /* given and not taken yet; of more, the giver waits for the first */
#define LOOK_NS 100000000ll
#define LOOKS_MAX 3

/* Guarded by shim_lock. */
static struct open {
	struct conn *conn; /* the connection, without a reference: `serial` is its own */
	uint64_t serial;
	struct pass *pass;
	unsigned long other_end;
	int64_t look_at;
	int looks;
} opened[OPEN_MAX];
_Atomic uint32_t passes_open;

void pass_close(struct pass *pass)
{
	munmap(pass, sizeof(*pass));
}

/* True: no process takes it any more. */
bool pass_withdraw(struct pass *pass, struct conn *conn)
{
	uint32_t waits = PASS_WAITS;

	if (!atomic_compare_exchange_strong(&pass->state, &waits, PASS_WITHDRAWN))
		return false;
	atomic_fetch_sub(&conn->slot->holders, 1);
	return true;
}

/* A connection that was given and is not known to be taken: any, for NULL, or this one. */
static bool opened_take(const struct conn *conn, struct open *taken)
{
	bool found = false;

	shim_lock_take();
	for (int i = 0; i < OPEN_MAX && !found; i++)
		if (opened[i].pass && (!conn || (opened[i].conn == conn && opened[i].serial == word_load(conn->serial)))) {
			*taken = opened[i];
			opened[i].pass = NULL;
			atomic_fetch_sub(&passes_open, 1);
			found = true;
		}
	shim_lock_drop();
	return found;
}

static bool opened_put(const struct open *put)
{
	bool room = false;

	shim_lock_take();
	for (int i = 0; i < OPEN_MAX && !room; i++)
		if (!opened[i].pass) {
			opened[i] = *put;
			atomic_fetch_add(&passes_open, 1);
			room = true;
		}
	shim_lock_drop();
	return room;
}

static void open_wait(const struct open *open, int64_t until)
{
	int64_t now;

	while (atomic_load(&open->pass->state) == PASS_WAITS && (now = now_ns()) < until) {
		struct timespec left = {(until - now) / 1000000000, (until - now) % 1000000000};
		real.syscall(SYS_futex, (long)&open->pass->state, FUTEX_WAIT, PASS_WAITS, (long)&left, 0, 0);
	}
}

/* True if it may be left as it is: it is taken, or every process that can take it has the shim. */
static bool open_settled(const struct open *open)
{
	return atomic_load(&open->pass->state) != PASS_WAITS || receiver_again(open->other_end) == RECEIVER_SHIM;
}

/* No lock is held. This process lets go of the connection, or becomes another program. */
void pass_settle(struct conn *conn, int fd)
{
	struct open open;
	KEEP_ERRNO;

	while (opened_take(conn, &open)) {
		open_wait(&open, open.look_at);
		if (!open_settled(&open) && pass_withdraw(open.pass, conn)) {
			shim_log("fd %d: a program without the shim may take it", fd);
			conn_leave_to_stranger(conn, fd, REASON_PASSED);
		}
		pass_close(open.pass);
	}
}

/* This process becomes another program. */
void passes_settle(void)
{
	for (uint32_t fd = 0; word_load(passes_open) && fd < atomic_load(&fd_end); fd++) {
		HELD conn = conn_hold((int)fd);
		if (conn)
			pass_settle(conn, (int)fd);
	}
}

/* No lock is held. Looks for possible takers of connections that wait for too long. */
void passes_look(void)
{
	int64_t next = INT64_MAX, now = now_ns();

	for (int i = 0; i < OPEN_MAX; i++) {
		struct open open = {0};
		shim_lock_take();
		struct conn *conn = opened[i].pass && now >= opened[i].look_at ? opened[i].conn : NULL;
		if (conn && refs_take(&conn->refs)) {
			open = opened[i];
			opened[i].pass = NULL;
			atomic_fetch_sub(&passes_open, 1);
		} else if (opened[i].pass && opened[i].look_at < next) {
			next = opened[i].look_at;
		}
		shim_lock_drop();
		if (!open.pass)
			continue;
		int fd = conn_fd(conn);
		open.look_at = now + (LOOK_NS << 2 * open.looks);
		if (!open_settled(&open)) {
			if (pass_withdraw(open.pass, conn) && fd >= 0)
				conn_leave_to_stranger(conn, fd, REASON_PASSED);
			pass_close(open.pass);
		} else if (atomic_load(&open.pass->state) != PASS_WAITS || ++open.looks == LOOKS_MAX || !opened_put(&open)) {
			pass_close(open.pass);
		} else if (open.look_at < next) {
			next = open.look_at;
		}
		conn_unref(conn);
	}
	if (next != INT64_MAX)
		look_again_until(next);
}

/* The connection is on its way to the reader of that end, and may not be taken. */
void pass_watch(struct conn *conn, struct pass *pass, unsigned long other_end)
{
	struct open first, open = {.conn = conn,
	                           .serial = word_load(conn->serial),
	                           .pass = pass,
	                           .other_end = other_end,
	                           .look_at = now_ns() + LOOK_NS};

	while (!opened_put(&open))
		if (opened_take(NULL, &first)) {
			open_wait(&first, first.look_at);
			pass_close(first.pass);
		}
}

/* The parent looks after what it has given. */
void passes_after_fork(void)
{
	for (int i = 0; i < OPEN_MAX; i++)
		if (opened[i].pass) {
			pass_close(opened[i].pass);
			opened[i].pass = NULL;
		}
	passes_open = 0;
}
