/*
 * shim_fork.c - around every way to make a process with a memory of its own: what each part of the shim does before it, and
 * after it in the parent and in the child.
 */
#include "shim_provider.h"

static const struct module {
	void (*prepare)(void), (*parent)(void), (*child)(void);
} modules[] = {
	{shim_lock_take, shim_lock_drop, shim_after_fork}, /* first: the others come under its lock, which is new in the child */
	{conns_before_fork, NULL, conns_after_fork},
	{NULL, NULL, doorbells_after_fork},
	{sets_before_fork, NULL, sets_after_fork},
	{NULL, NULL, provider_after_fork},
	{NULL, NULL, answers_after_fork},
	{NULL, NULL, rpc_after_fork},
	{NULL, NULL, explicit_after_fork},
};
#define MODULES (sizeof(modules) / sizeof(*modules))

void fork_prepare(void)
{
	for (size_t i = 0; i < MODULES; i++)
		if (modules[i].prepare)
			modules[i].prepare();
}

void fork_parent(void)
{
	for (size_t i = 0; i < MODULES; i++)
		if (modules[i].parent)
			modules[i].parent();
}

void fork_child(void)
{
	for (size_t i = 0; i < MODULES; i++)
		if (modules[i].child)
			modules[i].child();
}
