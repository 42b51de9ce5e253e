/* shim_loaded.c - what the loader of static programs needs of the shim; see loaded.h. */
#include "shim.h"

#include "loaded.h"

static void lend_begin(void)
{
	lending_begin();
	demote_inherited(false);
}

/* The parent's connection, if the number still is that one in the child. */
static void lend_number(int fd)
{
	HELD conn = conn_hold(fd);
	uint64_t cookie = 0;

	if (conn && (!conn->managed || (option_get(fd, SOL_SOCKET, SO_COOKIE, &cookie, sizeof(cookie)) &&
	                                cookie == word_load(conn->slot->cookie))))
		conn_demote(conn, fd, REASON_PASSED, true);
}

static void uncovered(void)
{
	plain_from_now(REASON_UNCOVERED);
}

EXPORT const struct loaded *sidestep_loaded(int (*action)(int, const struct sigaction *, struct sigaction *))
{
	static struct loaded loaded = {execute_bare, lend_begin, lending_end, lend_number, signal_interrupts, uncovered,
	                               preload_without_ours, made_by_go, NULL, 0};

	loaded.known = (const void *)fd_table;
	loaded.known_len = fd_table_len;
	real.sigaction = action;
	return &loaded;
}
