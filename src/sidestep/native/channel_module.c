/*
 * channel_module.c - sidestep.native._channel: the channel for Python, in the limited API.
 *
 * A Channel is one end of a mapped segment. Nothing here blocks or rings: whoever uses it looks, and rings its own bells.
 * A Channel is not made for several threads; the interpreter's lock makes each single call whole.
 */
#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030b0000
#endif
#include <Python.h>

#include "channel.h"

struct channel {
	PyObject_HEAD
	struct channel_end end;
	_Atomic uint64_t own_tail, own_head, head_seen; /* out of the peer's reach */
};

static PyObject *raise_errno(int negative)
{
	errno = -negative;
	return PyErr_SetFromErrno(PyExc_OSError);
}

static struct channel *mapped(PyObject *self)
{
	struct channel *channel = (struct channel *)self;

	if (channel->end.seg)
		return channel;
	PyErr_SetString(PyExc_ValueError, "the channel is closed");
	return NULL;
}

/* Exact, unlike channel_tx_unread(), for a Channel has one user: bytes, or -ECONNRESET. */
static int64_t unread_of(const struct channel *channel)
{
	int64_t space = channel_tx_space(&channel->end, (size_t)channel->end.tx_size + 1);

	return space < 0 ? space : (int64_t)channel->end.tx_size - space;
}

static PyObject *number_or_raise(int64_t value)
{
	return value < 0 ? raise_errno((int)value) : PyLong_FromLongLong(value);
}

/* ---- Channel ---- */
PyDoc_STRVAR(write_doc, "write($self, data, /)\n--\n\n"
                        "Puts as much of `data` into the sending ring as fits; the number of bytes taken, 0 if it is full.\n\n"
                        "Raises ConnectionResetError if the peer's count of what it has read is impossible.");

static PyObject *channel_write(PyObject *self, PyObject *data)
{
	Py_buffer buffer;

	/* first the buffer, which may run Python code, then the look at the mapping */
	if (PyObject_GetBuffer(data, &buffer, PyBUF_SIMPLE) < 0)
		return NULL;
	struct channel *channel = mapped(self);
	int64_t taken = -1;
	if (channel) {
		taken = channel_tx_space(&channel->end, (size_t)buffer.len);
		if (taken < 0) {
			raise_errno((int)taken);
		} else {
			if (taken > buffer.len)
				taken = buffer.len;
			if (taken > 0) {
				channel_tx_put(&channel->end, 0, buffer.buf, (size_t)taken);
				channel_tx_publish(&channel->end, (size_t)taken);
			}
		}
	}
	PyBuffer_Release(&buffer);
	return taken < 0 ? NULL : PyLong_FromLongLong(taken);
}

PyDoc_STRVAR(read_doc, "read($self, size=-1, /)\n--\n\n"
                       "Takes at most `size` bytes, or all that are there, out of the receiving ring; b'' if it is empty.\n\n"
                       "Raises ConnectionResetError if the peer's count of what it has written is impossible.");

static PyObject *channel_read(PyObject *self, PyObject *args)
{
	Py_ssize_t size = -1;

	if (!PyArg_ParseTuple(args, "|n:read", &size))
		return NULL;
	struct channel *channel = mapped(self);
	if (!channel)
		return NULL;
	int64_t there = channel_rx_avail(&channel->end);
	if (there < 0)
		return raise_errno((int)there);
	if (size >= 0 && there > size)
		there = size;
	PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)there);
	if (!bytes)
		return NULL;
	if (there > 0) {
		char *to = PyBytes_AsString(bytes);
		channel_rx_get(&channel->end, 0, to, (size_t)there);
		channel_rx_consume(&channel->end, (size_t)there);
	}
	return bytes;
}

PyDoc_STRVAR(trim_doc, "trim($self, /)\n--\n\n"
                       "Gives the pages of the sending ring back to the kernel. Raises ValueError unless the ring is empty.");

static PyObject *channel_give_back(PyObject *self, PyObject *unused)
{
	(void)unused;
	struct channel *channel = mapped(self);
	if (!channel)
		return NULL;
	int64_t unread = unread_of(channel);
	if (unread < 0)
		return raise_errno((int)unread);
	if (unread > 0) {
		PyErr_SetString(PyExc_ValueError, "the sending ring holds bytes that the peer has not read");
		return NULL;
	}
	channel_trim(&channel->end);
	Py_RETURN_NONE;
}

PyDoc_STRVAR(close_doc, "close($self, /)\n--\n\nUnmaps the segment; closing twice is allowed.");

static PyObject *channel_close(PyObject *self, PyObject *unused)
{
	(void)unused;
	channel_unmap(&((struct channel *)self)->end);
	Py_RETURN_NONE;
}

static PyObject *channel_enter(PyObject *self, PyObject *unused)
{
	(void)unused;
	if (!mapped(self))
		return NULL;
	Py_INCREF(self);
	return self;
}

static PyObject *channel_exit(PyObject *self, PyObject *args)
{
	(void)args;
	return channel_close(self, NULL);
}

static PyObject *get_avail(PyObject *self, void *unused)
{
	(void)unused;
	struct channel *channel = mapped(self);
	return channel ? number_or_raise(channel_rx_avail(&channel->end)) : NULL;
}

static PyObject *get_space(PyObject *self, void *unused)
{
	(void)unused;
	struct channel *channel = mapped(self);
	return channel ? number_or_raise(channel_tx_space(&channel->end, (size_t)channel->end.tx_size + 1)) : NULL;
}

static PyObject *get_unread(PyObject *self, void *unused)
{
	(void)unused;
	struct channel *channel = mapped(self);
	return channel ? number_or_raise(unread_of(channel)) : NULL;
}

static PyObject *get_tx_size(PyObject *self, void *unused)
{
	(void)unused;
	return PyLong_FromUnsignedLong(((struct channel *)self)->end.tx_size);
}

static PyObject *get_rx_size(PyObject *self, void *unused)
{
	(void)unused;
	return PyLong_FromUnsignedLong(((struct channel *)self)->end.rx_size);
}

static PyObject *get_closed(PyObject *self, void *unused)
{
	(void)unused;
	return PyBool_FromLong(((struct channel *)self)->end.seg == NULL);
}

static void channel_dealloc(PyObject *self)
{
	PyTypeObject *type = Py_TYPE(self);

	channel_unmap(&((struct channel *)self)->end);
	((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
	Py_DECREF(type); /* instances of heap types hold their type */
}

static PyMethodDef channel_methods[] = {
	{"write", channel_write, METH_O, write_doc},
	{"read", channel_read, METH_VARARGS, read_doc},
	{"trim", channel_give_back, METH_NOARGS, trim_doc},
	{"close", channel_close, METH_NOARGS, close_doc},
	{"__enter__", channel_enter, METH_NOARGS, NULL},
	{"__exit__", channel_exit, METH_VARARGS, NULL},
	{0},
};

static PyGetSetDef channel_getset[] = {
	{"avail", get_avail, NULL, "Bytes that can be read now.", NULL},
	{"space", get_space, NULL, "Bytes that can be written now.", NULL},
	{"unread", get_unread, NULL, "Bytes written that the peer has not read.", NULL},
	{"tx_size", get_tx_size, NULL, "Size of the sending ring in bytes.", NULL},
	{"rx_size", get_rx_size, NULL, "Size of the receiving ring in bytes.", NULL},
	{"closed", get_closed, NULL, "Whether the segment has been unmapped.", NULL},
	{0},
};

PyDoc_STRVAR(channel_doc, "One end of a mapped segment; made by map(). A context manager that closes it.\n\n"
                          "avail, space and unread raise ConnectionResetError where the peer's counts are impossible.");

static PyType_Slot channel_slots[] = {
	{Py_tp_doc, (void *)channel_doc},
	{Py_tp_methods, channel_methods},
	{Py_tp_getset, channel_getset},
	{Py_tp_dealloc, channel_dealloc},
	{0},
};

static PyType_Spec channel_spec = {
	.name = "sidestep.native._channel.Channel",
	.basicsize = sizeof(struct channel),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
	.slots = channel_slots,
};

/* ---- the module ---- */
struct state {
	PyTypeObject *channel_type;
};

PyDoc_STRVAR(create_doc, "create($module, tx_size, rx_size, /)\n--\n\n"
                         "Makes a sealed segment and returns its close-on-exec descriptor, which the caller closes.\n\n"
                         "tx_size is the ring of side 0, rx_size that of side 1, in bytes: powers of two, 4096 to 64 MiB.\n"
                         "Raises ValueError for other sizes and OSError where the kernel gives no memory file.");

static PyObject *module_create(PyObject *module, PyObject *args)
{
	unsigned long tx_size, rx_size;
	PyObject *tx, *rx;

	(void)module;
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
		PyErr_Format(PyExc_ValueError, "ring sizes must be powers of two from %u to %u, not %R and %R", CHANNEL_RING_MIN,
		             CHANNEL_RING_MAX, tx, rx);
		return NULL;
	}
	return fd < 0 ? raise_errno(fd) : PyLong_FromLong(fd);
}

PyDoc_STRVAR(map_doc, "map($module, fd, side, /)\n--\n\n"
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
	allocfunc alloc = (allocfunc)PyType_GetSlot(state->channel_type, Py_tp_alloc);
	struct channel *channel = (struct channel *)alloc(state->channel_type, 0); /* zeroed */
	if (!channel)
		return NULL;
	int failed = channel_map(&channel->end, fd, side, &channel->own_tail, &channel->own_head, &channel->head_seen);
	if (failed) {
		Py_DECREF(channel);
		return raise_errno(failed);
	}
	return (PyObject *)channel;
}

/* Header words by name, for tests and tools that look at a segment through a mapping of their own. */
#define WORD(path) {#path, offsetof(struct channel_segment, path), sizeof(((struct channel_segment *)0)->path)}
#define SIDE(i) \
	WORD(side[i].attached), WORD(side[i].rx_ready), WORD(side[i].tx_switched), WORD(side[i].shut_wr), \
	WORD(side[i].notice), WORD(side[i].tx_back), WORD(side[i].tx_switch_offset), WORD(side[i].tx_back_at), \
	WORD(side[i].rx_frozen)
#define RING(i) \
	WORD(producer[i].tail), WORD(producer[i].want_space), WORD(producer[i].cpu), WORD(consumer[i].head), \
	WORD(consumer[i].cpu)

static const struct {
	const char *name;
	size_t offset, size;
} words[] = {WORD(magic), WORD(version), WORD(ring_size[0]), WORD(ring_size[1]), SIDE(0), SIDE(1), RING(0), RING(1)};

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
	return 0;
}

static int module_clear(PyObject *module)
{
	struct state *state = PyModule_GetState(module);

	Py_CLEAR(state->channel_type);
	return 0;
}

static PyMethodDef module_methods[] = {
	{"create", module_create, METH_VARARGS, create_doc},
	{"map", module_map, METH_VARARGS, map_doc},
	{0},
};

static PyModuleDef_Slot module_slots[] = {
	{Py_mod_exec, module_exec},
	{0},
};

PyDoc_STRVAR(module_doc, "Channels: one stream connection in shared memory, mapped by two ends.\n\n"
                         "HEADER_WORDS names the words of a segment's header: name -> (offset, size), in bytes.");

static struct PyModuleDef module_def = {
	PyModuleDef_HEAD_INIT,
	.m_name = "sidestep.native._channel",
	.m_doc = module_doc,
	.m_size = sizeof(struct state),
	.m_methods = module_methods,
	.m_slots = module_slots,
	.m_traverse = module_traverse,
	.m_clear = module_clear,
};

PyMODINIT_FUNC PyInit__channel(void)
{
	return PyModuleDef_Init(&module_def);
}
