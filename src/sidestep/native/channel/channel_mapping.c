/*
 * channel_mapping.c - a mapping as a buffer of Python, and where a buffer lies.
 *
 * A Ring owns the mapping that sidestep_map() made. Views hold the Ring, so the memory stays for as long as there are any.
 * `exports` counts them, so that no bytes are released under a view.
 */
#include "channel_module.h"

#include <sys/mman.h>

struct ring {
	PyObject_HEAD
	void *base;
	Py_ssize_t len;
	Py_ssize_t exports;
	int readonly;
};

static PyObject *ring_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
	static char *names[] = {"address", "size", "readonly", NULL};
	unsigned long long address;
	Py_ssize_t len;
	int readonly;

	if (!PyArg_ParseTupleAndKeywords(args, keywords, "Knp:Ring", names, &address, &len, &readonly))
		return NULL;
	if (!address || len <= 0) {
		PyErr_SetString(PyExc_ValueError, "no mapping");
		return NULL;
	}
	struct ring *ring = object_new(type);
	if (!ring)
		return NULL;
	ring->base = (void *)(uintptr_t)address;
	ring->len = len;
	ring->readonly = readonly;
	return (PyObject *)ring;
}

static void ring_dealloc(PyObject *self)
{
	struct ring *ring = (struct ring *)self;

	if (ring->base)
		munmap(ring->base, (size_t)ring->len);
	object_free(self);
}

static int ring_getbuffer(PyObject *self, Py_buffer *view, int flags)
{
	struct ring *ring = (struct ring *)self;

	if (PyBuffer_FillInfo(view, self, ring->base, ring->len, ring->readonly, flags) < 0)
		return -1;
	ring->exports++;
	return 0;
}

static void ring_releasebuffer(PyObject *self, Py_buffer *Py_UNUSED(view))
{
	((struct ring *)self)->exports--;
}

static PyMemberDef ring_members[] = {
	{"exports", T_PYSSIZET, offsetof(struct ring, exports), READONLY,
     "How many views of it there are; slices of a view count with it."},
	{0},
};

PyDoc_STRVAR(ring_doc,
             "Ring(address, size, readonly)\n--\n\n"
             "Takes over the mapping of `size` bytes at `address`, and unmaps it when the last view is gone.");

static PyType_Slot ring_slots[] = {
	{Py_tp_doc, (void *)ring_doc},
	{Py_tp_new, (void *)ring_new},
	{Py_tp_dealloc, (void *)ring_dealloc},
	{Py_tp_members, ring_members},
	{Py_bf_getbuffer, (void *)ring_getbuffer},
	{Py_bf_releasebuffer, (void *)ring_releasebuffer},
	{0},
};

PyType_Spec ring_spec = {
	.name = "sidestep.native._channel.Ring",
	.basicsize = sizeof(struct ring),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
	.slots = ring_slots,
};

/* Address of the bytes: proof that they were not copied, and the key of a registration. */
PyObject *buffer_address(PyObject *Py_UNUSED(module), PyObject *buffer)
{
	Py_buffer view;

	if (PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE) < 0)
		return NULL;
	PyObject *address = PyLong_FromVoidPtr(view.buf);
	PyBuffer_Release(&view);
	return address;
}
