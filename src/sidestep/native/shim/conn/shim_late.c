/*
 * shim_late.c - answers of the provider that came while another process had the connection. A child leaves it to us when it is
 * confined or ends. The peer has its side of the channel and can have no second one, so the answer is kept until then.
 *
 * All this is guarded by shim_lock. An entry holds no reference: its connection takes it with it; see conn_free().
 */
#include "shim_provider.h"

#define LATE_MAX 16 /* Answers at a time; one more stays on TCP */

static struct late late[LATE_MAX];
_Atomic int late_len;

void late_close(const struct late *mine)
{
	for (int i = 0; i < mine->fds_len; i++)
		own_fd_close(mine->fds[i]);
}

static struct late late_remove(int at)
{
	struct late taken = late[at];

	late[at] = late[late_len - 1];
	word_store(late_len, late_len - 1);
	return taken;
}

/* Another process of the family has decided that these stay on TCP. */
static void late_sweep(void)
{
	for (int i = late_len - 1; i >= 0; i--)
		if (word_load(late[i].conn->slot->state) != STATE_OFFERED) {
			struct late taken = late_remove(i);
			late_close(&taken);
		}
}

/* Takes the descriptors over. False: there is no room for them, and they may be closed. */
bool late_keep(struct conn *conn, const struct rpc_msg *record, int *fds, int fds_len)
{
	if (late_len == LATE_MAX)
		late_sweep();
	if (late_len == LATE_MAX || fds_len > LATE_FDS)
		return false;
	struct late *mine = &late[late_len];
	bool good = true;
	*mine = (struct late){.conn = conn, .record = *record, .fds_len = fds_len};
	for (int i = 0; i < fds_len; i++) {
		good &= (mine->fds[i] = own_fd(fds[i])) >= 0;
		fds[i] = -1;
	}
	if (!good) {
		late_close(mine);
		return false;
	}
	word_store(late_len, late_len + 1);
	word_store(conn->slot->reason, REASON_INHERITED);
	shim_log("another process has the connection: its channel waits");
	return true;
}

bool late_take(const struct conn *conn, struct late *taken)
{
	for (int i = 0; i < late_len; i++)
		if (late[i].conn == conn) {
			*taken = late_remove(i);
			return true;
		}
	return false;
}

/* The connection ends, or stays on TCP. False: no answer is kept for it. */
bool late_drop(const struct conn *conn)
{
	struct late taken;

	if (likely(!late_len) || !late_take(conn, &taken))
		return false;
	late_close(&taken);
	return true;
}

/* The answers of a child are its parent's. */
void late_after_fork(void)
{
	for (int i = 0; i < late_len; i++)
		late_close(&late[i]);
	word_store(late_len, 0);
}
