/* shim_set.h - an epoll set whose members may be promoted, for the files that make it up. */
#ifndef SIDESTEP_SHIM_SET_H
#define SIDESTEP_SHIM_SET_H

#include "shim_wait.h"

#define SCAN_MAX 256 /* more managed members than these are not looked at one by one: peers give hints */
#define INDEX_BITS 24
#define AGE_BITS 8 /* an index is given anew with the next one: the kernel may still hold events of the last */
#define NAME_BITS (INDEX_BITS + AGE_BITS)
#define DOORBELL_INDEX 0

struct member {
	struct set *set;
	struct conn *conn;
	struct member *next; /* link in the list of the conn */
	int fd;
	uint32_t index; /* index in set->members; 0 is the doorbell */
	uint8_t age;
	uint32_t events;
	uint64_t data;
	bool managed;
	bool hot; /* true if it is in set->hot */
	bool hinted; /* true if its peer names it when there is news */
	bool disabled; /* one-shot has fired */
	bool away; /* taken out by the program, but not yet out of the kernel's set; see member_leave() */
	bool rx_ring; /* receiving was by ring when it was last looked at */
	bool by_tcp; /* a direction was on TCP then */
	uint32_t in_kernel; /* events of the kernel's entry; may be more than are wanted */
	bool exclusive; /* the kernel's entry is: it can be taken out, and not changed */
	bool known; /* the kernel's entry is as we set it: nothing has failed, and nobody else has changed it */
	bool armed; /* edge: report what is true once, whatever has been seen */
	bool out_armed; /* edge: room is news */
	bool fin_acked; /* edge: the peer's kernel has acknowledged our end, which is news once */
	uint32_t at; /* place in set->managed */
	uint32_t reported; /* edge: RDHUP, HUP and ERR reported already */
	uint64_t seen_tail;
	uint64_t seen_tcp; /* count at the last report, if the kernel reports no edge; see came_unreported() */
	uint32_t stood; /* events for which the stand-in stands, and the ring's tail then; see set_keep() */
	uint64_t stood_tail;
	uint64_t pass;
};

struct set_doorbell {
	struct doorbell *doorbell;
	uint32_t refs;
};

struct feed {
	struct remote_doorbell *doorbell;
	uint64_t seen;
	uint32_t refs;
};

/* A set that is in another one, as far as calls of ours have put it there. Guarded by shim_lock. */
struct nest {
	struct nest *next; /* link among those in the same outer set */
	struct set *inner;
};
enum { NEST_INNER = 1, NEST_OUTER = 2 }; /* flags: it is in another set; another is in it */

struct set {
	struct file file;
	_Atomic uint32_t
		ours; /* managed members, and kinds of nesting: with any of them its waits are not the kernel's alone */
	_Atomic uint32_t managed_len;
	_Atomic uint32_t kernel_waiters; /* threads in the kernel's wait that do not know of any managed member */
	uint32_t refs; /* descriptor numbers */
	_Atomic uint32_t users; /* threads inside a call on it */
	struct set *next_free;
	pthread_mutex_t lock;
	_Atomic uint32_t sleepers; /* threads asleep that know, but only of the doorbells of that moment */
	_Atomic bool managed_ever; /* the kernel may hold events with our data */
	uint32_t owner_pid; /* a forked child shares the kernel's set and takes nothing out of it */
	_Atomic uint32_t user_pid; /* process that has used it last: a child that has not used it does not change it */
	int cancel_state;
	int epfd;
	uint64_t secret; /* 32 bits */
	uint8_t age;
	bool shared;
	_Atomic uint8_t nest; /* NEST_*; the set's lock to change it */
	bool leaves; /* true if its members leave their rings, as the kernel alone waits on a set that it is in */
	bool partial; /* a forked child has closed its copy of a member that others still have */
	int stand_in; /* see shim_stand_in.c; 0: there is none yet */
	bool stands; /* true if it can be read, as far as this process knows */
	_Atomic uint32_t aware; /* sleepers that hear the doorbells of sets in this one, and its stand-in */
	struct nest *inners;
	uint32_t forks; /* fork_count of then: processes forked since may change what the kernel has */
	_Atomic uint32_t away_len; /* members that are away */
	struct member **members; /* members by index */
	_Atomic uint32_t members_len, members_live;
	uint32_t members_cap;
	uint32_t next_index; /* an index is given anew as late as can be */
	struct member **managed;
	uint32_t managed_cap;
	_Atomic uint32_t manages; /* count of members that have become managed */
	uint32_t by_tcp; /* managed members of which the kernel has to be asked at each wait */
	bool level_reported; /* true in this pass: events that stay true if the program does nothing */
	struct doorbell *doorbell;
	struct set_doorbell *doorbells; /* every doorbell with an entry in the kernel's set */
	uint32_t doorbells_len, doorbells_cap;
	/* with more than SCAN_MAX managed members */
	bool hinting; /* peers have been asked for hints */
	bool scan_all; /* hints were lost or are young: look at every member once */
	uint32_t unhinted; /* managed members nobody gives hints for */
	struct member **hot; /* members that were ready, or named, and may still be */
	uint32_t hot_len, hot_cap;
	struct feed *feeds; /* the hint rings of the members' peers */
	uint32_t feeds_len, feeds_cap;
	uint32_t cursor;
	bool kernel_filled; /* the last look left no room for the rings */
	/* The kernel's last answer: KERNEL_READY if it held members that the kernel alone knows, whose level may still be true. */
	enum { KERNEL_SAID, KERNEL_QUIET, KERNEL_READY } kernel_last; /* QUIET: nothing but doorbells */
	_Atomic uint32_t watched; /* watch of the provider's socket; see rpc_watch() */
	uint64_t pass;
	_Atomic int64_t looked_at;
	_Atomic int64_t full_until; /* time as of a thread, for its members; the set's lock to change it */
	struct spin_budget budget;
	_Atomic uint32_t last_cpu; /* CPU of the latest peer, + 1 */
	enum set_spent { SPENT_NOTHING, SPENT_SPUN, SPENT_SLEPT, SPENT_BOTH } spent;
};

/* ---- shim_set_hints.c: set lock held ---- */
bool grow(void *array, uint32_t *cap, uint32_t wanted, size_t size);
void hot_add(struct set *set, struct member *member);
void feed_enter(struct set *set, struct member *member);
void feed_exit(struct set *set, struct member *member);
void feeds_read(struct set *set);

/* ---- shim_set.c ---- */
struct set *set_get(int epfd);
struct set *set_hold(int epfd);
void set_release(struct set **set);
#define HELD_SET struct set *__attribute__((cleanup(set_release)))
void set_lock(struct set *set);
void set_unlock(struct set *set);
uint64_t new_secret(void);
int set_created(int epfd);
/* set lock held; with shim_lock, where members come or go */
uint32_t member_name(const struct member *member);
static inline int set_ctl(const struct set *set, int op, int fd, struct epoll_event *event)
{
	self.calls++;
	return real.epoll_ctl(set->epfd, op, fd, event);
}
extern _Atomic uint32_t fork_count; /* forks of this process and its ancestors; guarded by shim_lock */
/* No other process has had the kernel's set: it holds what we have put there. */
static inline bool set_private(const struct set *set)
{
	return set->forks == word_load(fork_count);
}
bool kernel_differs(const struct member *member, uint32_t bits);
int kernel_set(struct member *member, int op);
int kernel_unmanaged(struct member *member, int op);
void member_by_tcp(struct member *member, bool by_tcp);
bool member_manage(struct member *member, int op);
struct member *member_find(struct set *set, struct conn *conn, int fd);
struct member *member_new(struct set *set, struct conn *conn, int fd, const struct epoll_event *event);
void member_free(struct member *member);
int member_change(struct member *member, const struct epoll_event *event);
bool member_leave(struct member *member);
int member_return(struct member *member, const struct epoll_event *event);
void member_drop(struct member *member);
/* epoll(7): a registration outlives the number it was made with while the socket has others. */
static inline int member_fd(const struct member *member)
{
	return likely(conn_get(member->fd) == member->conn) ? member->fd : conn_fd(member->conn);
}
void set_sweep(struct set *set); /* neither lock held */
void wake_set(struct set *set);

/* ---- shim_stand_in.c: set lock held ---- */
extern _Atomic uint32_t nest_sleepers; /* threads asleep that hear stand-ins */
bool stand_in_enter(struct set *set);
void stand_in_put(struct set *set, bool stands, bool news);
void set_stand_in(struct set *set, bool news);

/* ---- shim_nest.c: neither lock held ---- */
void set_nest(struct set *outer, struct set *inner);
void set_polled(struct set *set);
void set_leave(struct set *set);
void nest_look(struct set *set);
uint32_t nest_doorbells(struct set *set, struct doorbell **doorbells, uint32_t len, uint32_t max);
/* Adds one, with a reference, if it is not among them; more than `max`: there is no room. */
static inline uint32_t doorbell_add(struct doorbell **doorbells, uint32_t len, uint32_t max, struct doorbell *doorbell)
{
	for (uint32_t i = 0; i < len; i++)
		if (doorbells[i] == doorbell)
			return len;
	if (len < max) {
		atomic_fetch_add(&doorbell->refs, 1);
		doorbells[len] = doorbell;
	}
	return len + 1;
}

/* ---- shim_ready.c: set lock held ---- */
void set_keep(struct set *set);
bool set_tells(struct set *set);
bool set_has_ready(struct set *set); /* no lock held */
int collect(struct set *set, struct epoll_event *events, int room);
int translate(struct set *set, const struct epoll_event *reported, int len, uint32_t manages,
              struct epoll_event *events);
bool concerns_others(struct set *set, int n, int max);

#endif
