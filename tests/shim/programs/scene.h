/* A scene is a small program of socket calls on one or more loopback connections. It prints a canonical transcript: what
 * each call returned, which errno it left, whether the bytes were right, which events were reported. The same scene must
 * print the same text over kernel TCP and under the shim, whatever the moment at which a connection is promoted.
 *
 * A scene speaks for one end (`pair.fd`). The other end, the peer, lives in the same process or in a process of its own
 * (--peer), and carries out simple orders (enum act). Which end connects is chosen by --side.
 *
 * With --apart the peer process is on another host: in another network namespace, with a provider of its own.
 *
 * Bytes follow a pattern by stream offset, so that every byte received can be checked for being the right one.
 */
#ifndef SCENE_H
#define SCENE_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "../../support/pattern.h"
#include "sidestep.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#ifndef __GLIBC__
#include "musl.h"
#endif

/* Exit code: the scene has both ends of a connection in one process, and two hosts were asked for. */
enum { NOT_APART = 77 };
enum { PAIRS_MAX = 64, MARK_LEN = 8, CHUNK = 4 << 20 };

/* What a peer can be told to do. `a` and `b` are the order's arguments. */
enum act {
	ACT_LISTEN, /* a = family choice; answers the port */
	ACT_ACCEPT, /* accepts one connection */
	ACT_CONNECT, /* a = port, b = family choice */
	ACT_SEND, /* sends a bytes, in pieces of b (0: one call) */
	ACT_FLOOD, /* sends without blocking until it would block */
	ACT_RECV, /* receives exactly a bytes, in pieces of at most b (0: as they come); stops at the end */
	ACT_RECV_ONCE, /* one recv of at most a bytes, flags b */
	ACT_ECHO, /* a times: receives b bytes, sends b bytes */
	ACT_EXCHANGE, /* sends a bytes and receives b bytes at the same time, never blocking in either */
	ACT_DRAIN, /* receives until the end; answers how many bytes */
	ACT_SUM, /* receives exactly a bytes, whose sum_of must be b */
	ACT_SEND_CLOSE, /* sends a bytes and closes at once */
	ACT_SHUTDOWN, /* a = how */
	ACT_CLOSE,
	ACT_ABORT, /* SO_LINGER 0, close: a reset */
	ACT_EXIT, /* a peer process exits without closing anything (a == 1: after it) */
	ACT_KILL, /* a peer process kills itself with SIGKILL */
	ACT_POLL, /* a = events, b = timeout in ms; answers revents */
	ACT_OOB, /* one urgent byte a */
	ACT_ARRIVED, /* waits until a bytes are to be read */
	ACT_ERROR, /* SO_ERROR */
	ACT_SET_INT, /* setsockopt(SOL_SOCKET, a, b) */
	ACT_STOP_CONT, /* SIGSTOP to the asking process, SIGCONT a ms later (peer process only) */
	ACT_QUIT,
};

struct pair {
	int fd;
	uint32_t index;
	uint16_t port; /* of fd */
	uint16_t peer_port; /* of the other end */
	uint64_t out; /* bytes the scene has sent */
	uint64_t in; /* bytes the scene has received */
};

struct reply {
	int64_t result;
	int32_t error; /* errno when result < 0 */
	int32_t wrong; /* a byte was not the expected one */
};

struct scene {
	const char *name;
	void (*play)(void);
};

/* What the command line chose. */
struct choice {
	bool peer_process; /* the peer is a process of its own */
	bool active; /* the scene's end connects */
	bool warm; /* connections are promoted before the scene begins */
	bool shaken; /* then they go to TCP and back all the while, at any moment */
	char family; /* '4', '6', or 'm': v4-mapped on a dual-stack listener */
	char sockets; /* 'o'rdinary, 'e'xplicit (AF_INET_OFFLOAD), 'd'irect: the family that addresses come with */
	int control; /* descriptor on which the runner is asked, or -1 */
	const char *here, *there; /* addresses of the two ends' hosts; NULL: the loopback address */
	const char *apart; /* file of the peer's network namespace */
	const char *apart_socket; /* of its provider; NULL: over kernel TCP */
};
extern struct choice choice;

/* -- transcript -------------------------------------------------------------------------------------------------- */
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Prints "name = result" or "name = -1 ERRNO"; hands the result through and keeps errno. */
long say_ret(const char *name, long result);
void say_bytes(const char *name, struct pair *pair, const void *data, long result); /* say_ret + check + advance */
void say_reply(const char *name, struct reply reply);
void say_child(pid_t child); /* waits for it */
void say_poll(const char *name, int result, short revents);
void say_near(const char *name, int64_t elapsed_ms, int64_t expected_ms);
const char *poll_names(uint32_t events); /* "IN|OUT|..."; a static buffer per thread */
void fail(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));
#define NEED(condition) \
	((condition) ? (void)0 : fail("%s:%d: %s (%s)", __FILE__, __LINE__, #condition, strerror(errno)))

/* -- pairs and bytes ---------------------------------------------------------------------------------------------- */
struct pair *open_pair(void); /* connected, and promoted if the choice is so */
struct pair *open_pair_raw(void); /* connected, no byte exchanged */
void warm_up(struct pair *pair); /* ping-pong until the runner is content */
void both_ends(int fds[2]); /* connected, and promoted if the choice is so: the scene's end, and the peer's */
void converse(int one, int other); /* two ends held here: speaks until the runner sees the connection promoted */
bool ask_runner(const char *word, struct pair *pair); /* true: go on; false: not yet */
void stays(struct pair *pair); /* the connection is still promoted (if it was warmed up) */
const uint8_t *pattern_out(struct pair *pair, size_t len); /* the next bytes to send */
void sent(struct pair *pair, long result); /* so many of them went out */
bool took(struct pair *pair, const void *data, long result); /* so many came in; true: the right ones */
void put(struct pair *pair, size_t len); /* sends all, or the scene fails */
void get(struct pair *pair, size_t len); /* receives all, or the scene fails */
long get_all(struct pair *pair); /* receives until the end; bytes, or -errno */
int64_t sum_of(const void *data, size_t len); /* depends on every byte and its place */
enum { KEY_OUT = 0x11, KEY_IN = 0x77 }; /* seen from the scene */
void nonblocking(int fd, bool on);
void alarms(int ms); /* a signal each so many ms, below 1000, whose handler restarts calls; 0: no more */
bool arrived(struct pair *pair, size_t len);
bool arrived_at(int fd, long len); /* waits until FIONREAD says len */
void await_fin(struct pair *pair); /* until the end of the peer's stream is seen */
void await_reset(struct pair *pair); /* until POLLERR or POLLHUP */
long flood(struct pair *pair); /* sends without blocking until it would block */
/* Sends, by this pair's pattern and with these flags, until a call fails: says that failure, and how many calls of it were
 * partial is nobody's promise. Returns the bytes sent. A kernel that was full may find room a moment later, so a scene that
 * wants to block must not rely on one small send. */
long send_until_error(const char *name, struct pair *pair, int flags);
void await_asleep(pid_t pid, pid_t tid); /* until that thread sleeps in the kernel */
int loopback_listener(char family, uint16_t *port, int flags);
/* The family of `address` is that of the socket to be made for it. */
socklen_t loopback_address(char family, uint16_t port, bool connecting, struct sockaddr_storage *address);
uint16_t local_port(int fd);

/* -- epoll sets ---------------------------------------------------------------------------------------------------- */
int set_new(void);
int set_ctl(int set, int op, int fd, uint32_t events, uint64_t user);
/* Events in the order of their user data: the order among descriptors ready at once is nobody's promise. */
int say_wait(const char *name, int set, int room, int timeout_ms);
struct epoll_thread {
	int set;
	int count;
	struct epoll_event event;
	pid_t tid;
	pthread_barrier_t *ready;
};
void *epoll_waiter(void *epoll_thread); /* waits in the set for one event */

/* -- the peer ----------------------------------------------------------------------------------------------------- */
struct reply peer(struct pair *pair, enum act act, int64_t a, int64_t b);
void peer_put(struct pair *pair, size_t len); /* the peer sends all, or the scene fails */
void peer_get(struct pair *pair, size_t len); /* the peer receives exactly so much */
/* The same, begun when the calling thread sleeps in the kernel; one at a time. */
void peer_when_asleep(struct pair *pair, enum act act, int64_t a, int64_t b);
void peer_now(struct pair *pair, enum act act, int64_t a, int64_t b); /* begun at once, not waited for */
struct reply peer_done(void); /* waits for what was begun */
pid_t peer_pid(void); /* 0 when it is this process */
void forget_peer(void); /* in a forked child: lets go of the peer's end and gives no orders */

/* -- the tables of scenes, one a file; the last has no name --------------------------------------------------------- */
extern const struct scene scenes_io[], scenes_option[], scenes_end[], scenes_wait[], scenes_epoll[], scenes_fd[],
	scenes_process[], scenes_signal[], scenes_thread[], scenes_stdio[], scenes_stream[], scenes_connect[],
	scenes_explicit[], scenes_demote[], scenes_interest[], scenes_nest[];
#define SCENE(name) {#name, name}
#endif
