/*
 * channel_module.c - sidestep.native._channel: the channel for Python, in the limited API.
 *
 * A Channel is one end of a mapped segment, a Ring is memory that the shim has mapped. The peer rings a Doorbell, and we ring
 * a RemoteDoorbell. Nothing here blocks. Several threads may not share one; the interpreter's lock makes each single call
 * whole.
 */
#include "channel_module.h"

#ifdef __GLIBC__
#include <malloc.h>
#endif

struct state {
	PyTypeObject *channel_type;
	PyTypeObject *piece_type;
};

PyDoc_STRVAR(create_doc,
             "create($module, tx_size, rx_size, /)\n--\n\n"
             "Makes a sealed segment and returns its close-on-exec descriptor, which the caller closes.\n\n"
             "tx_size is the ring of side 0, rx_size that of side 1, in bytes: powers of two, 4096 to 64 MiB.\n"
             "Raises ValueError for other sizes and OSError where the kernel gives no memory file.");

static PyObject *module_create(PyObject *Py_UNUSED(module), PyObject *args)
{
	unsigned long tx_size, rx_size;
	PyObject *tx, *rx;

	if (!PyArg_ParseTuple(args, "O!O!:create", &PyLong_Type, &tx, &PyLong_Type, &rx))
		return NULL;
	tx_size = PyLong_AsUnsignedLong(tx);
	rx_size = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLong(rx);
	if (PyErr_Occurred()) { /* negative or huge: as wrong as any other size */
		if (!PyErr_ExceptionMatches(PyExc_OverflowError))
			return NULL;
		PyErr_Clear();
		tx_size = 0;
	}
	int fd = tx_size > CHANNEL_RING_MAX || rx_size > CHANNEL_RING_MAX
	             ? -EINVAL
	             : channel_create((uint32_t)tx_size, (uint32_t)rx_size);
	if (fd == -EINVAL) {
		PyErr_Format(PyExc_ValueError, "ring sizes must be powers of two from %u to %u, not %R and %R",
		             CHANNEL_RING_MIN, CHANNEL_RING_MAX, tx, rx);
		return NULL;
	}
	return fd < 0 ? raise_errno(fd) : PyLong_FromLong(fd);
}

PyDoc_STRVAR(map_doc,
             "map($module, fd, side, /)\n--\n\n"
             "Maps the segment in `fd` as side 0, which offered it, or 1, which claimed it.\n\n"
             "The descriptor stays the caller's and may be closed at once. Raises OSError: EPROTO where seals, size,\n"
             "version or geometry are not those of a segment, EINVAL where `fd` is no memory file at all.");

static PyObject *module_map(PyObject *module, PyObject *args)
{
	struct state *state = PyModule_GetState(module);
	int fd, side;

	if (!PyArg_ParseTuple(args, "ii:map", &fd, &side))
		return NULL;
	if (side != 0 && side != 1) {
		PyErr_Format(PyExc_ValueError, "side must be 0 or 1, not %d", side);
		return NULL;
	}
	struct channel *channel = object_new(state->channel_type);
	if (!channel)
		return NULL;
	struct channel_own own = {
		.tail = &channel->tail,
		.head = &channel->head,
		.head_seen = &channel->head_seen,
		.ring_from = &channel->ring_from,
		.ring_to = &channel->ring_to,
		.spill_base = &channel->spill_base,
		.limit = &channel->limit,
		.room_max = &channel->room_max,
	};
	int failed = channel_map(&channel->end, fd, side, &own);
	if (failed) {
		Py_DECREF(channel);
		return raise_errno(failed);
	}
	Py_INCREF((PyObject *)state->piece_type);
	channel->piece_type = state->piece_type;
	return (PyObject *)channel;
}

#define WORD(path) PLACE(channel_segment, path)
#define AT(at, name) WORD(at.name)
#define BOTH(list, at) list(AT, at[0]) list(AT, at[1])
/* clang-format off: a table */
static const struct place words[] = {WORD(magic) WORD(version) WORD(ring_size[0]) WORD(ring_size[1]) BOTH(
	CHANNEL_SIDE_WORDS, side) BOTH(CHANNEL_PRODUCER_WORDS, producer) BOTH(CHANNEL_CONSUMER_WORDS, consumer)};
/* clang-format on */

static int module_exec(PyObject *module)
{
	struct state *state = PyModule_GetState(module);
	PyObject *type = PyType_FromModuleAndSpec(module, &channel_spec, NULL);

	state->channel_type = (PyTypeObject *)type;
	if (!type || PyModule_AddType(module, state->channel_type) < 0 ||
	    PyModule_AddIntConstant(module, "HEADER_SIZE", CHANNEL_HEADER_SIZE) < 0 ||
	    PyModule_AddIntConstant(module, "RING_MIN", CHANNEL_RING_MIN) < 0 ||
	    PyModule_AddIntConstant(module, "RING_MAX", CHANNEL_RING_MAX) < 0)
		return -1;
	state->piece_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &piece_spec, NULL);
	if (!state->piece_type || add_type(module, &own_doorbell_spec) < 0 || add_type(module, &remote_doorbell_spec) < 0 ||
	    add_type(module, &ring_spec) < 0)
		return -1;
	PyObject *table = PyDict_New();
	if (!table)
		return -1;
	for (size_t i = 0; i < sizeof(words) / sizeof(*words); i++) {
		PyObject *place = Py_BuildValue("(nn)", (Py_ssize_t)words[i].offset, (Py_ssize_t)words[i].size);
		int failed = place ? PyDict_SetItemString(table, words[i].name, place) : -1;
		Py_XDECREF(place);
		if (failed) {
			Py_DECREF(table);
			return -1;
		}
	}
	int failed = PyModule_AddObjectRef(module, "HEADER_WORDS", table);
	Py_DECREF(table);
	return failed;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
	struct state *state = PyModule_GetState(module);

	Py_VISIT(state->channel_type);
	Py_VISIT(state->piece_type);
	return 0;
}

static int module_clear(PyObject *module)
{
	struct state *state = PyModule_GetState(module);

	Py_CLEAR(state->channel_type);
	Py_CLEAR(state->piece_type);
	return 0;
}

PyDoc_STRVAR(doorbell_make_doc,
             "doorbell_make($module, /)\n--\n\n"
             "A new eventfd for a doorbell, close-on-exec, which the caller closes.\n\n"
             "Raises OSError: EOPNOTSUPP before Linux 5.8, where nobody could ring it without fear of waiting.");

static PyObject *module_doorbell_make(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
	int fd = doorbell_fd_make();
	return fd < 0 ? raise_errno(-errno) : PyLong_FromLong(fd);
}

PyDoc_STRVAR(doorbell_ring_doc,
             "doorbell_ring($module, fd, /)\n--\n\n"
             "Wakes whoever sleeps on the eventfd of a doorbell, and never waits. Whether it was rung.");

static PyObject *module_doorbell_ring(PyObject *Py_UNUSED(module), PyObject *args)
{
	int fd;

	return PyArg_ParseTuple(args, "i:doorbell_ring", &fd) ? PyBool_FromLong(doorbell_fd_ring(fd)) : NULL;
}

PyDoc_STRVAR(give_back_doc, "give_back_free_memory()\n--\n\nGives what the C library has free back to the kernel, "
                            "also from between what is in use.");

static PyObject *module_give_back(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
#ifdef __GLIBC__
	Py_BEGIN_ALLOW_THREADS
	malloc_trim(0);
	Py_END_ALLOW_THREADS
#endif
	Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
	{"doorbell_make", module_doorbell_make, METH_NOARGS, doorbell_make_doc},
	{"doorbell_ring", module_doorbell_ring, METH_VARARGS, doorbell_ring_doc},
	{"create", module_create, METH_VARARGS, create_doc},
	{"map", module_map, METH_VARARGS, map_doc},
	{"buffer_address", buffer_address, METH_O,
     "buffer_address(buffer)\n--\n\nThe address of the first byte of a contiguous buffer."},
	{"give_back_free_memory", module_give_back, METH_NOARGS, give_back_doc},
	{0},
};

static PyModuleDef_Slot module_slots[] = {
	{Py_mod_exec, module_exec},
	{0},
};

PyDoc_STRVAR(module_doc, "Channels: one stream connection in shared memory, mapped by two ends.\n\n"
                         "HEADER_WORDS names the words of a segment's header: name -> (offset, size), in bytes.");

static struct PyModuleDef module_def = {
	PyModuleDef_HEAD_INIT,         .m_name = "sidestep.native._channel",
	.m_doc = module_doc,           .m_size = sizeof(struct state),
	.m_methods = module_methods,   .m_slots = module_slots,
	.m_traverse = module_traverse, .m_clear = module_clear,
};

PyMODINIT_FUNC PyInit__channel(void)
{
	return PyModuleDef_Init(&module_def);
}
