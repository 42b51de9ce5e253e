/* engine_datagrams.c - Datagrams: a queue pair of RoCEv2, and what an engine has left of it. */
#include "engine_datagrams.h"

#include <stdlib.h>

#define PARTIAL_MAX (1 << 20)

static struct datagrams *idle(PyObject *self)
{
	struct datagrams *object = (struct datagrams *)self;

	if (!object->busy)
		return object;
	PyErr_SetString(PyExc_RuntimeError, "an engine has it");
	return NULL;
}

static PyObject *datagrams_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
	static char *names[] = {"local", "remote", "receive_fd", "send_fd", NULL};
	const char *local, *remote;
	Py_ssize_t local_len, remote_len;
	int receive_fd, send_fd;

	if (!PyArg_ParseTupleAndKeywords(args, keywords, "y#y#ii:Datagrams", names, &local, &local_len, &remote,
	                                 &remote_len, &receive_fd, &send_fd))
		return NULL;
	if (local_len != remote_len || (local_len != 4 && local_len != 16)) {
		PyErr_SetString(PyExc_ValueError, "two addresses have 4 bytes each, or 16");
		return NULL;
	}
	struct datagrams *object = object_new(type);
	if (!object)
		return NULL;
	memcpy(object->rc.local, local, (size_t)local_len);
	memcpy(object->rc.remote, remote, (size_t)local_len);
	object->rc.record.ipv6 = local_len == 16;
	object->receive_fd = receive_fd;
	object->send_fd = send_fd;
	return (PyObject *)object;
}

static bool is_sound(const struct rc_record *record)
{
	uint32_t mtu = record->mtu, most = RC_QUEUE_MAX / RC_OVERHEAD;
	const uint32_t psns[] = {record->acknowledged, record->cursor,      record->reached,  record->next,
	                         record->expected,     record->carried_out, record->completed};

	for (size_t i = 0; i < sizeof(psns) / sizeof(*psns); i++)
		if (psns[i] > 0xFFFFFF)
			return false;
	return mtu >= 256 && mtu <= 4096 && !(mtu & (mtu - 1)) && record->window && record->window <= most &&
	       record->timeout_ns && record->timeout_ns <= (uint64_t)INT64_MAX >> 8 &&
	       record->acknowledged == record->next && record->cursor == record->next && record->reached == record->next;
}

static PyObject *datagrams_begin(PyObject *self, PyObject *args)
{
	struct datagrams *object = idle(self);
	const char *bytes, *partial = "";
	Py_ssize_t len, partial_len = 0;
	struct rc_record record;

	if (!object || !PyArg_ParseTuple(args, "y#|y#:begin", &bytes, &len, &partial, &partial_len))
		return NULL;
	if (len == sizeof(record))
		memcpy(&record, bytes, sizeof(record));
	if (len != sizeof(record) || !is_sound(&record) || partial_len % record.mtu || partial_len > PARTIAL_MAX) {
		PyErr_SetString(PyExc_ValueError, "it cannot begin with these numbers");
		return NULL;
	}
	record.ipv6 = object->rc.record.ipv6;
	rc_free(&object->rc);
	object->rc.record = record;
	if (rc_begin(&object->rc, (const uint8_t *)partial, (uint32_t)partial_len) < 0)
		return PyErr_NoMemory();
	object->ready = true;
	Py_RETURN_NONE;
}

static PyObject *datagrams_record(PyObject *self, PyObject *Py_UNUSED(unused))
{
	const struct rc_record *record = &((struct datagrams *)self)->rc.record;

	return PyBytes_FromStringAndSize((const char *)record, sizeof(*record));
}

/* The message that the packet with this number belongs to, and how many of its packets are left from there on. */
static PyObject *unacknowledged_message(const struct rc *rc, uint32_t psn, uint32_t *count)
{
	uint32_t mtu = rc->record.mtu, acknowledged = rc->slots[psn % rc->slots_len].index, left = 0;

	while (psn != rc->record.next && rc->slots[psn % rc->slots_len].index == acknowledged + left) {
		left++;
		psn = rc_after(psn, 1);
	}
	*count = left;
	uint32_t len = (acknowledged + left) * mtu;
	char *bytes = calloc(1, len);
	if (!bytes)
		return PyErr_NoMemory();
	uint32_t at = acknowledged * mtu;
	for (uint32_t i = left; i; i--) {
		uint32_t slot = rc_after(psn, -i) % rc->slots_len, some = rc->slots[slot].len - RC_OVERHEAD;
		const uint8_t *packet = rc->packets + (size_t)slot * rc->stride;
		some -= packet[1] >> 4 & 3; /* padding */
		memcpy(bytes + at, packet + RC_BTH, some);
		at += some;
	}
	PyObject *made = Py_BuildValue("Iy#", rc_after(psn, -(acknowledged + left)), bytes, (Py_ssize_t)at);
	free(bytes);
	return made;
}

static PyObject *datagrams_unacknowledged(PyObject *self, PyObject *Py_UNUSED(unused))
{
	struct datagrams *object = idle(self);
	PyObject *list = object ? PyList_New(0) : NULL;

	if (!list)
		return NULL;
	const struct rc *rc = &object->rc;
	for (uint32_t psn = rc->record.acknowledged, count; list && psn != rc->record.next; psn = rc_after(psn, count)) {
		PyObject *message = unacknowledged_message(rc, psn, &count);
		if (!message || PyList_Append(list, message) < 0)
			Py_CLEAR(list);
		Py_XDECREF(message);
	}
	return list;
}

static PyObject *datagrams_left(PyObject *self, PyObject *Py_UNUSED(unused))
{
	struct datagrams *object = idle(self);
	PyObject *list = object ? PyList_New(0) : NULL;
	const uint8_t *datagram;
	uint32_t len;

	for (uint32_t n = 0; list && (datagram = rc_left(&object->rc, n, &len)); n++) {
		PyObject *bytes = PyBytes_FromStringAndSize((const char *)datagram, len);
		if (!bytes || PyList_Append(list, bytes) < 0)
			Py_CLEAR(list);
		Py_XDECREF(bytes);
	}
	return list;
}

static PyObject *datagrams_release(PyObject *self, PyObject *Py_UNUSED(unused))
{
	struct datagrams *object = idle(self);

	if (!object)
		return NULL;
	rc_free(&object->rc);
	object->rc.record.next = object->rc.record.acknowledged;
	object->ready = false;
	Py_RETURN_NONE;
}

/* A loan holds it, so no engine has it. */
static void datagrams_dealloc(PyObject *self)
{
	rc_free(&((struct datagrams *)self)->rc);
	object_free(self);
}

static PyMethodDef datagrams_methods[] = {
	{"begin", datagrams_begin, METH_VARARGS,
     "begin($self, record, partial=b'', /)\n--\n\nIts numbers from now on, as `layout.pack('rc_record', ...)`; nothing is\n"
     "unacknowledged. Of a message so much has come already."},
	{"record", datagrams_record, METH_NOARGS,
     "record($self, /)\n--\n\nIts numbers as they are; while an engine has it only the counts are to be believed."},
	{"unacknowledged", datagrams_unacknowledged, METH_NOARGS,
     "unacknowledged($self, /)\n--\n\nMessages that are not acknowledged to their end: the number of the first packet, and the bytes;\n"
     "those of packets that are acknowledged are zeros."},
	{"left", datagrams_left, METH_NOARGS, "left($self, /)\n--\n\nDatagrams that came and were not taken."},
	{"release", datagrams_release, METH_NOARGS,
     "release($self, /)\n--\n\nGives back its memory, and all that was left."},
	{0},
};

static PyType_Slot datagrams_slots[] = {
	{Py_tp_doc,
     (void
          *)"Datagrams(local, remote, receive_fd, send_fd)\n--\n\nA queue pair of RoCEv2 by two UDP sockets, for an Engine."},
	{Py_tp_new, datagrams_new},
	{Py_tp_methods, datagrams_methods},
	{Py_tp_dealloc, datagrams_dealloc},
	{0},
};

PyType_Spec datagrams_spec = {
	.name = "sidestep.native._engine.Datagrams",
	.basicsize = sizeof(struct datagrams),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
	.slots = datagrams_slots,
};
