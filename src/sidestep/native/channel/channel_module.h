/* channel_module.h - what the C files of sidestep.native._channel share: its Channel, and the types it has. */
#ifndef SIDESTEP_CHANNEL_MODULE_H
#define SIDESTEP_CHANNEL_MODULE_H

#include "extension.h" /* first: it asks libc for all it has */

#include "channel.h"
#include "doorbell.h"

struct channel {
	PyObject_HEAD
	struct channel_end end;
	_Atomic uint64_t tail, head, head_seen, ring_from, ring_to, spill_base, limit,
		room_max; /* out of the peer's reach */
	bool room_shown; /* room was shown, and nothing has been committed since: it stays where it is */
	PyTypeObject *piece_type;
	Py_ssize_t pieces; /* views in use */
	bool closed;
};

/* A wake-up target of ours, rung by processes that hold its descriptor and see its word. */
struct own_doorbell {
	PyObject_HEAD
	_Atomic uint64_t *word;
	int fd, page_fd;
	int wait_fd; /* a set that tells the edges of fd, which is always readable; nobody else has it */
	bool asleep;
};

/* The doorbell of a peer. */
struct remote_doorbell {
	PyObject_HEAD
	void *page;
	size_t page_len;
	const _Atomic uint64_t *word;
	const struct hint_ring *hints; /* NULL: it gives none */
	_Atomic uint64_t rung; /* the engine may ring, too */
	uint64_t seen;
	int fd;
};

/* A word by its name, for tests and tools that look at a segment through a mapping of their own, too. */
struct place {
	const char *name;
	size_t offset, size;
};
#define PLACE(record, path) {#path, offsetof(struct record, path), sizeof(((struct record *)0)->path)},

/* channel_type.c: one end of a segment, and the views of its rings */
extern PyType_Spec channel_spec, piece_spec;

/* channel_mapping.c: memory that somebody else has mapped */
extern PyType_Spec ring_spec;
PyObject *buffer_address(PyObject *module, PyObject *buffer);

/* channel_doorbells.c: our doorbells, and those of peers */
extern PyType_Spec own_doorbell_spec, remote_doorbell_spec;
int doorbell_fd_make(void);
bool doorbell_fd_ring(int fd);

#endif
