/* framing_module.c - sidestep.native._framing: the framing and crc32c.c for Python, in the limited API. */
#include "framing_module.h"

#include "crc32c.h"

#define LONG_SUM (1 << 20) /* bytes; for more, other threads may run */

/* ---- the checksum ---- */

static PyObject *checksum(crc32c_update_fn *update, PyObject *data, PyObject *start_object)
{
	uint64_t start = 0;
	Py_buffer view;
	uint32_t state;

	if (start_object && arg_number(start_object, "start", UINT32_MAX, &start) < 0)
		return NULL;
	if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0)
		return NULL;
	if (view.len < LONG_SUM) {
		state = update(~(uint32_t)start, view.buf, (size_t)view.len);
	} else {
		Py_BEGIN_ALLOW_THREADS
		state = update(~(uint32_t)start, view.buf, (size_t)view.len);
		Py_END_ALLOW_THREADS
	}
	PyBuffer_Release(&view);
	return PyLong_FromUnsignedLong(~state);
}

static PyObject *module_crc32c(PyObject *Py_UNUSED(module), PyObject *args)
{
	PyObject *data, *start = NULL;

	return PyArg_ParseTuple(args, "O|O:crc32c", &data, &start) ? checksum(crc32c_update, data, start) : NULL;
}

static PyObject *module_crc32c_by(PyObject *Py_UNUSED(module), PyObject *args)
{
	PyObject *name, *data, *start = NULL;

	if (!PyArg_ParseTuple(args, "UO|O:crc32c_by", &name, &data, &start))
		return NULL;
	for (const struct crc32c_implementation *one = crc32c_implementations; one->name; one++)
		if (PyUnicode_CompareWithASCIIString(name, one->name) == 0)
			return checksum(one->update, data, start);
	return PyErr_Format(PyExc_ValueError, "this CPU has no %R", name);
}

static PyObject *module_crc32c_implementations(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
	PyObject *list = PyList_New(0);

	for (const struct crc32c_implementation *one = crc32c_implementations; list && one->name; one++) {
		PyObject *name = PyUnicode_FromString(one->name);

		if (!name || PyList_Append(list, name) < 0)
			Py_CLEAR(list);
		Py_XDECREF(name);
	}
	PyObject *tuple = list ? PyList_AsTuple(list) : NULL;
	Py_XDECREF(list);
	return tuple;
}

/* ---- the module ---- */

static PyMethodDef module_methods[] = {
	{"crc32c", module_crc32c, METH_VARARGS,
     "crc32c(data, start=0, /)\n--\n\nThe checksum of the data; `start` is that of what comes before."},
	{"crc32c_by", module_crc32c_by, METH_VARARGS,
     "crc32c_by(name, data, start=0, /)\n--\n\nThe same by one of the implementations."},
	{"crc32c_implementations", module_crc32c_implementations, METH_NOARGS,
     "crc32c_implementations()\n--\n\nThe names of those that this CPU can run, best first."},
	{0},
};

static int module_exec(PyObject *module)
{
	struct module_state *state = PyModule_GetState(module);

	crc32c_init();
	if (!state || add_type(module, &outbound_spec) < 0 || add_type(module, &inbound_spec) < 0)
		return -1;
	state->run_type = PyStructSequence_NewType(&run_desc);
	if (!state->run_type || PyModule_AddObjectRef(module, "Run", (PyObject *)state->run_type) < 0)
		return -1;
	if (PyModule_AddIntConstant(module, "CALL_MAX", FRAMING_CALL_MAX) < 0 ||
	    PyModule_AddIntConstant(module, "WAITING_MAX", FRAMING_WAITING_MAX) < 0 ||
	    PyModule_AddIntConstant(module, "BUFFERS_MAX", FRAMING_BUFFERS_MAX) < 0 ||
	    PyModule_AddIntConstant(module, "FPDU_MAX", FRAMING_FPDU_MAX) < 0 ||
	    PyModule_AddIntConstant(module, "STAGED_DEFAULT", FRAMING_STAGED_DEFAULT) < 0)
		return -1;
	return 0;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
	struct module_state *state = PyModule_GetState(module);

	if (state)
		Py_VISIT(state->run_type);
	return 0;
}

static int module_clear(PyObject *module)
{
	struct module_state *state = PyModule_GetState(module);

	if (state)
		Py_CLEAR(state->run_type);
	return 0;
}

static PyModuleDef_Slot module_slots[] = {
	{Py_mod_exec, (void *)module_exec},
	{0},
};

static struct PyModuleDef module_def = {
	PyModuleDef_HEAD_INIT,
	.m_name = "sidestep.native._framing",
	.m_doc = "The bytes of iWARP: FPDUs out of messages and back, and CRC32C.",
	.m_size = sizeof(struct module_state),
	.m_methods = module_methods,
	.m_slots = module_slots,
	.m_traverse = module_traverse,
	.m_clear = module_clear,
};

PyMODINIT_FUNC PyInit__framing(void)
{
	return PyModuleDef_Init(&module_def);
}
