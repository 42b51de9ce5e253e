/*
 * sim.h - a simulated kernel, in which two copies of the shim run as two processes, a call at a time.
 *
 * One thread, and a coroutine for each process ("end"). Wherever an end makes a system call or touches memory that the other
 * end has as well, the scheduler may let something else happen first: the other end, TCP's network, the provider, the clock.
 * What happens is chosen by choose() alone, so that the same seed gives the same steps.
 */
#ifndef SIDESTEP_SIM_H
#define SIDESTEP_SIM_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <poll.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <ucontext.h>

#define MS 1000000ll
#define NEVER INT64_MAX

/* ---- what is chosen (main.c) ---- */
uint32_t choose(uint32_t n); /* 0 .. n-1 */
static inline bool chance(uint32_t one_in)
{
	return one_in && choose(one_in) == 0;
}
extern bool tracing;
void trace(const char *format, ...) __attribute__((format(printf, 1, 2)));
void fail(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

/* ---- ends and time (sched.c) ---- */
#define ENDS 4 /* two, and a child of each: 2 of 0, 3 of 1 */
#define STACK (512u << 10)
struct end {
	int index;
	ucontext_t context;
	uint8_t *stack; /* a child's is at the same place */
	void (*run)(struct end *end);
	bool started, over; /* over: it has returned, or was killed */
	/* while it is blocked */
	bool (*ready)(void *argument);
	void *argument; /* looked at while another process is in place: not on its stack */
	int64_t deadline;
};
extern struct end ends[ENDS];
extern struct end *current; /* NULL: the scheduler */
extern int64_t now;
extern uint32_t preempt_one_in; /* 0: never */
extern uint32_t death_one_in;   /* at a point, in the midst of a call; 0: never */
extern void (*dies)(void);
extern int points_left;         /* the scheduler takes over after so many points; -1: by chance */
extern uint32_t calm;           /* above 0: nothing else happens */
extern uint64_t moves;
void point(void);    /* of a call: where something else may happen first, as often as preempt_one_in says */
void give_way(void); /* between two calls */
bool block(bool (*ready)(void *argument), void *argument, int64_t deadline); /* false: the time is up */
void schedule(void (*idle)(void)); /* until all is over; idle(): nothing can move but the clock */
void kill_end(struct end *end);
void end_over(void) __attribute__((noreturn)); /* the current one */
bool end_can_run(const struct end *end);
void end_resume(struct end *end);

/* ---- the kernel (kernel.c) ---- */
enum kind {
	KIND_TCP = 1,
	KIND_LISTENER,
	KIND_LINE,
	KIND_DOORBELL,
	KIND_SET,
	KIND_MEMORY,
	KIND_LOG,
	KIND_LIVENESS,
	KIND_DIRECTORY, /* of proc(5) */
	KIND_DIAG,      /* a socket of sock_diag(7) */
	KIND_PROGRAM,   /* the file that is executed */
	KIND_FILE,
	KIND_OTHER
};

struct fifo {
	uint8_t *data;
	size_t head, len, cap;
};

struct object;
struct tcp {
	struct object *object, *peer;
	bool active;
	struct fifo out, in; /* not delivered yet; delivered and not read */
	size_t unacked;      /* delivered, and the sender does not know it yet */
	size_t out_max, in_max;
	bool fin_out, fin_there, fin_acked, fin_in,
		fin_in_first; /* ours: to be sent, delivered, acknowledged; the peer's */
	bool shut_rd, shut_wr, done;
	bool dead, orphan, reset_coming; /* TCP_CLOSE; closed by all; a RST is on its way to us */
	bool was_reset; /* one has come, before the peer's FIN */
	bool half_reset; /* the error is known, the end is not yet */
	bool no_space;
	int error;
	struct linger linger;
	size_t low_water; /* SO_RCVLOWAT */
	uint64_t acked, received;
	uint16_t port;
};

struct message {
	struct message *next;
	uint8_t data[512];
	size_t len;
	struct object *files[12];
	int files_len;
};

struct line { /* a SOCK_SEQPACKET connection; the other end is the driver's, or another process's */
	struct object *mate; /* that; NULL: the driver */
	int passed;          /* files of the last message that was sent from here */
	struct message *to_driver, *to_process;
	int end;
	bool hung_up; /* by the process */
	bool dead;    /* by the driver */
};

struct item {
	struct item *next;
	struct object *object;
	int fd;
	uint32_t events;
	uint64_t data;
	bool disabled, ready;
	uint64_t order; /* of its becoming ready */
};

struct object {
	enum kind kind;
	uint64_t inode;
	char name[24]; /* of memory */
	int process;   /* of a directory: whose descriptors; -1: all processes */
	uint32_t refs;
	bool nonblock;
	struct tcp tcp;
	struct line line;
	uint64_t
		count; /* of a file: bytes written; of a doorbell; of a life, a pipe: that it has ended; where a directory is read on */
	bool whole; /* of an eventfd: a read takes all of it */
	struct item *items; /* of a set */
	uint8_t *memory;
	size_t len;
	int seals;
	bool shared; /* has been sent to somebody */
	bool async; /* O_ASYNC */
	uint64_t signals; /* SIGIO for what can be read, or has ended */
	struct object *next;
};

extern size_t tcp_out_max, tcp_in_max; /* of sockets to come */
void *kernel_find(const char *name); /* what dlsym() tells the shim */
struct object *fd_object(int fd);
int fd_new(struct object *object, int lowest, int end, bool cloexec);
void fds_close(int end, bool cloexec_only);
void fds_fork(int parent, int child);
struct object *object_new(enum kind kind);
void object_put(struct object *object);
bool network_can(int which);
void network_move(int which);
void network_half_reset(int which); /* its first step, if one is coming */
#define NETWORK_MOVES 8
bool memory_shared(const void *address);
void line_end(struct object *line);
bool futex_sleeps(int end); /* it waits in a futex(2) */
int line_passed(int fd); /* files of the last message that was sent from there */
void line_send(struct object *line, const void *data, size_t len, struct object *const *files, int files_len);
extern struct object *provider_lines[ENDS];
extern struct object *connection[2]; /* the two sockets */

/* system calls, for a program without a shim */
ssize_t sim_sendmsg(int fd, const struct msghdr *message, int flags);
ssize_t sim_recvmsg(int fd, struct msghdr *message, int flags);
int sim_close(int fd);

#endif
