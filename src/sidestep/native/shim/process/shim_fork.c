/*
 * shim_fork.c - the calls that make a process with a memory of its own. Each part of the shim acts before it, and after it in
 * the parent and in the child.
 */
#include "shim_process.h"
#include "shim_provider.h"
#include "shim_switch.h"

/*
 * Pipes by which children say that they could not execute (shim_spawn.c), each as long as its parent reads. Another thread's
 * fork() copies them: a child that lives on would keep that parent reading.
 */
#define PIPES_MAX 32
static _Atomic int kept[PIPES_MAX]; /* 0: free */
static __thread int own_kept;

void fork_keeps(int fd)
{
	int from = fd ? 0 : own_kept;

	for (int i = 0; i < PIPES_MAX; i++) {
		int expected = from;
		if (atomic_compare_exchange_strong(&kept[i], &expected, fd))
			break;
	}
	own_kept = fd;
}

static void kept_after_fork(void)
{
	for (int i = 0; i < PIPES_MAX; i++) {
		if (kept[i] > 0 && kept[i] != own_kept)
			own_fd_close(kept[i]);
		kept[i] = 0;
	}
}

enum { PREPARE, PARENT, CHILD, MOMENTS };
static void (*const modules[][MOMENTS])(void) = {
	{shim_lock_take, shim_lock_drop,
     shim_after_fork}, /* first: the others come under its lock, which is new in the child */
	{new_doorbells_before_fork, NULL, NULL},
	{conns_before_fork, NULL, conns_after_fork},
	{NULL, NULL, doorbells_after_fork},
	{sets_before_fork, NULL, sets_after_fork},
	{NULL, NULL, provider_after_fork},
	{NULL, NULL, answers_after_fork},
	{NULL, NULL, serve_after_fork},
	{NULL, NULL, rpc_after_fork},
	{NULL, NULL, explicit_after_fork},
	{NULL, NULL, inherited_after_fork},
	{receivers_forget, NULL, passes_after_fork},
	{NULL, NULL, kept_after_fork},
};

static void each(int moment)
{
	for (size_t i = 0; i < sizeof(modules) / sizeof(*modules); i++)
		if (modules[i][moment])
			modules[i][moment]();
}

void fork_prepare(void)
{
	each(PREPARE);
}

void fork_parent(void)
{
	each(PARENT);
}

void fork_child(void)
{
	each(CHILD);
}
