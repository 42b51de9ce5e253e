/* framing_args.c - what Python hands over: numbers, flags, and tuples of buffers. */
#include "framing_module.h"

int args_count(Py_ssize_t given, Py_ssize_t least, Py_ssize_t most)
{
	if (given >= least && given <= most)
		return 0;
	return PyErr_Format(PyExc_TypeError, "%zd arguments, not %zd to %zd", given, least, most), -1;
}

int arg_number(PyObject *object, const char *name, uint64_t max, uint64_t *value)
{
	unsigned long long number = PyLong_AsUnsignedLongLong(object);

	if (number == (unsigned long long)-1 && PyErr_Occurred()) {
		if (!PyErr_ExceptionMatches(PyExc_OverflowError))
			return -1;
		PyErr_Clear();
	} else if (number <= max) {
		*value = number;
		return 0;
	}
	return PyErr_Format(PyExc_ValueError, "%s is %R, and is to be of 0 to %llu", name, object, (unsigned long long)max),
	       -1;
}

int arg_u32(PyObject *object, const char *name, uint32_t *value)
{
	uint64_t number;

	if (arg_number(object, name, UINT32_MAX, &number) < 0)
		return -1;
	*value = (uint32_t)number;
	return 0;
}

int arg_bool(PyObject *object, bool *value)
{
	int truth = object ? PyObject_IsTrue(object) : 0;

	*value = truth > 0;
	return truth < 0 ? -1 : 0;
}

int arg_fd(PyObject *object, int *fd)
{
	*fd = PyObject_AsFileDescriptor(object);
	return *fd < 0 ? -1 : 0;
}

/* ---- lists of buffers ---- */

static void held_release(struct held *held, Py_ssize_t until)
{
	while (held->released < until)
		PyBuffer_Release(&held->views[held->released++]);
}

void held_free(struct held *held)
{
	held_release(held, held->len);
	PyMem_Free(held);
}

struct held *held_get(PyObject *tuple, int flags)
{
	if (!PyTuple_Check(tuple))
		return PyErr_Format(PyExc_TypeError, "buffers come as a tuple, not as %R", Py_TYPE(tuple)), NULL;
	Py_ssize_t len = PyTuple_Size(tuple);
	if (len > FRAMING_BUFFERS_MAX)
		return PyErr_Format(PyExc_ValueError, "%zd buffers, and %u are the most", len, FRAMING_BUFFERS_MAX), NULL;
	size_t before = sizeof(struct held) + (size_t)len * sizeof(Py_buffer);
	struct held *held = PyMem_Malloc(before + (size_t)len * sizeof(struct framing_span));

	if (!held)
		return (struct held *)PyErr_NoMemory();
	*held = (struct held){.spans = (struct framing_span *)(void *)((char *)held + before)};
	for (; held->len < len; held->len++) {
		Py_buffer *view = &held->views[held->len];

		if (PyObject_GetBuffer(PyTuple_GetItem(tuple, held->len), view, flags) < 0) {
			held_free(held);
			return NULL;
		}
		held->spans[held->len] = (struct framing_span){view->buf, (size_t)view->len, 0};
	}
	return held;
}

/* ---- what both directions have ---- */

int settings_get(PyObject *crc, PyObject *markers, bool *crc_value, bool *markers_value)
{
	if (!crc || !markers)
		return PyErr_Format(PyExc_TypeError, "crc and markers are to be given by name"), -1;
	return arg_bool(crc, crc_value) < 0 || arg_bool(markers, markers_value) < 0 ? -1 : 0;
}

PyObject *refuse_busy(void)
{
	PyErr_SetString(PyExc_RuntimeError, "another thread is in a system call with it");
	return NULL;
}
