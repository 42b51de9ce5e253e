/* shim_start.c - the shim comes up with the process, and its threads and the process end. It calls everybody. */
#include "shim_object.h"

#include "shim.h"

#include <sys/auxv.h>
#include <sys/mman.h>

static void thread_gone(void *unused)
{
	(void)unused;
	shim_lock_take();
	if (self.doorbell)
		doorbell_unref(self.doorbell);
	self.doorbell = NULL;
	self_sets_close();
	self.registered = false;
	shim_lock_drop();
	siginfo_t *deferred = self.deferred; /* no signal is held back outside a critical section */
	self.deferred = NULL;
	if (deferred)
		munmap(deferred, DEFERRED_MAX * sizeof(*deferred));
}

__attribute__((constructor(101))) static void shim_init(void)
{
	KEEP_ERRNO;

	real_init();
	shim_pid = (uint32_t)getpid();
	thread_init();
	void *table = mmap(NULL, FD_TABLE_SIZE * sizeof(*fd_table), PROT_READ | PROT_WRITE,
	                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (table == MAP_FAILED) { /* fd_table_len stays 0: every call goes straight to the C library */
		travel_arrive();
		travel_settle();
		return;
	}
	fd_table = table;
	/* The environment is a stranger's if we have more rights than the user that started us: we stay out. */
	const char *off = getenv("SIDESTEP_DISABLE");
	if (getauxval(AT_SECURE) || (off && *off && strcmp(off, "0") != 0))
		return;
	fd_table_len = FD_TABLE_SIZE;
	if (!main_program) {
		names_redirect();
		streams_redirect();
	}
	config_read();
	env_keep();
	if (!travel_arrive() && arena_open() < 0) {
		fd_table_len = 0;
		travel_settle();
		return;
	}
	pthread_key_create(&thread_key, thread_gone);
	signals_init();
	travel_settle();
	pthread_atfork(fork_prepare, fork_parent, fork_child);
	rpc_before_exec();
	shim_log("up: ring %u, promote after %u calls, spin %u ns", config.ring_size, config.promote_after_calls,
	         config.spin_ns);
}

__attribute__((destructor)) static void shim_exit(void)
{
	if (fd_table_len && shim_pid == (uint32_t)getpid())
		conn_family_exit();
}
