/*
 * shim_fork.c - around every way to make a process with a memory of its own: what each part of the shim does before it, and
 * after it in the parent and in the child.
 */
#include "shim_provider.h"

enum { PREPARE, PARENT, CHILD, MOMENTS };
static void (*const modules[][MOMENTS])(void) = {
	{shim_lock_take, shim_lock_drop,
     shim_after_fork}, /* first: the others come under its lock, which is new in the child */
	{conns_before_fork, NULL, conns_after_fork},
	{NULL, NULL, doorbells_after_fork},
	{sets_before_fork, NULL, sets_after_fork},
	{NULL, NULL, provider_after_fork},
	{NULL, NULL, answers_after_fork},
	{NULL, NULL, serve_after_fork},
	{NULL, NULL, rpc_after_fork},
	{NULL, NULL, explicit_after_fork},
	{NULL, NULL, lent_after_fork},
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
