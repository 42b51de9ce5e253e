/*
 * framing_module.h - what the C files of sidestep.native._framing share: arguments, held buffers, and the types it has.
 *
 * Getting and releasing a buffer may run Python code, so neither is done while something is half changed.
 */
#ifndef SIDESTEP_FRAMING_MODULE_H
#define SIDESTEP_FRAMING_MODULE_H

#include "extension.h"

#include "framing.h"

struct module_state {
	PyTypeObject *run_type;
};

/* framing_args.c */
#define POSITIONAL(function) ((PyCFunction)(void (*)(void))(function))

/* TypeError unless there are so many. */
int args_count(Py_ssize_t given, Py_ssize_t least, Py_ssize_t most);
int arg_number(PyObject *object, const char *name, uint64_t max, uint64_t *value);
int arg_u32(PyObject *object, const char *name, uint32_t *value);
int arg_bool(PyObject *object, bool *value);
int arg_fd(PyObject *object, int *fd);

/* The buffers of a tuple, held. In one block, where they stay: a Py_buffer must not be moved. */
struct held {
	struct held *next;
	struct framing_span *spans;
	Py_ssize_t len, released; /* buffers; the first so many are given back */
	Py_buffer views[];
};

struct held *held_get(PyObject *tuple, int flags);
void held_free(struct held *held);

/* The two settings that both directions have; they are given by name. */
int settings_get(PyObject *crc, PyObject *markers, bool *crc_value, bool *markers_value);

/* RuntimeError, for a thread that comes while another is in a system call. */
PyObject *refuse_busy(void);

/* framing_outbound.c */
struct outbound {
	PyObject_HEAD
	struct framing_out out;
	struct held *first, *last; /* what waiting FPDUs refer to, in the order of the stream */
	bool busy, releasing;
};
extern PyType_Spec outbound_spec;

/* framing_inbound.c */
struct inbound {
	PyObject_HEAD
	struct framing_in in;
	uint64_t first_index; /* of the first run there is */
	bool busy;
};
extern PyType_Spec inbound_spec;
extern PyStructSequence_Desc run_desc;

#endif
