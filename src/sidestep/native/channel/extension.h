/* extension.h - what the extension modules have in common: the limited API, and objects of heap types. */
#ifndef SIDESTEP_EXTENSION_H
#define SIDESTEP_EXTENSION_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030b0000
#endif
#include <Python.h>

#include <errno.h>
#include <string.h>
#include <structmember.h>

/* All zeroes. */
static inline void *object_new(PyTypeObject *type)
{
	return ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
}

static inline void object_free(PyObject *self)
{
	PyTypeObject *type = Py_TYPE(self);

	((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
	Py_DECREF(type); /* instances of heap types hold their type */
}

static inline int add_type(PyObject *module, PyType_Spec *spec)
{
	PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
	int failed = type ? PyModule_AddType(module, (PyTypeObject *)type) : -1;

	Py_XDECREF(type);
	return failed;
}

static inline PyObject *raise_errno(int negative)
{
	errno = -negative;
	return PyErr_SetFromErrno(PyExc_OSError);
}

#endif
