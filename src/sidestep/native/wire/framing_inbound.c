/*
 * framing_inbound.c - an Inbound, the receiving side of a direction, and the Runs of segments that it finds.
 *
 * While a system call runs the interpreter is released, and the object is refused to other threads.
 */
#include "framing_module.h"

#include <sys/socket.h>

/* ---- Run ---- */

enum run_field {
	RUN_CONTROL,
	RUN_RDMAP,
	RUN_STAG,
	RUN_QUEUE,
	RUN_MSN,
	RUN_OFFSET,
	RUN_LENGTH,
	RUN_SEGMENTS,
	RUN_INDEX,
	RUN_LAST,
	RUN_FIELDS,
};

static PyStructSequence_Field run_fields[] = {
	{"control", "control octet of DDP without its L bit"},
	{"rdmap", "control octet of RDMAP"},
	{"stag", "tagged: where it goes; untagged: what to invalidate"},
	{"queue", "untagged: QN"},
	{"msn", "untagged: MSN"},
	{"offset", "TO or MO of its first byte"},
	{"length", "bytes of payload"},
	{"segments", "how many it has"},
	{"index", "its number in the direction"},
	{"last", "whether it ends its message"},
	{0},
};

PyStructSequence_Desc run_desc = {
	.name = "sidestep.native._framing.Run",
	.doc = "Segments of one message, one behind the other, that continue each other.",
	.fields = run_fields,
	.n_in_sequence = RUN_FIELDS,
};

static PyObject *run_new(PyTypeObject *type, const struct framing_run *run, uint64_t index)
{
	PyObject *made = PyStructSequence_New(type);

	if (!made)
		return NULL;
	PyObject *fields[RUN_FIELDS] = {
		[RUN_CONTROL] = PyLong_FromLong(run->control),    [RUN_RDMAP] = PyLong_FromLong(run->rdmap),
		[RUN_STAG] = PyLong_FromUnsignedLong(run->stag),  [RUN_QUEUE] = PyLong_FromUnsignedLong(run->queue),
		[RUN_MSN] = PyLong_FromUnsignedLong(run->msn),    [RUN_OFFSET] = PyLong_FromUnsignedLongLong(run->offset),
		[RUN_LENGTH] = PyLong_FromUnsignedLong(run->len), [RUN_SEGMENTS] = PyLong_FromUnsignedLong(run->count),
		[RUN_INDEX] = PyLong_FromUnsignedLongLong(index), [RUN_LAST] = PyBool_FromLong(run->last),
	};
	bool whole = true;

	for (Py_ssize_t n = 0; n < RUN_FIELDS; n++) {
		whole &= fields[n] != NULL;
		PyStructSequence_SetItem(made, n, fields[n]);
	}
	if (whole)
		return made;
	Py_DECREF(made);
	return NULL;
}

/* ---- Inbound ---- */

static PyObject *inbound_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
	static char *names[] = {"crc", "markers", "capacity", NULL};
	PyObject *crc_object = NULL, *markers_object = NULL, *capacity_object = NULL;
	uint64_t capacity = FRAMING_STAGED_DEFAULT;
	bool crc, markers;

	if (!PyArg_ParseTupleAndKeywords(args, keywords, "|$OOO:Inbound", names, &crc_object, &markers_object,
	                                 &capacity_object))
		return NULL;
	if (settings_get(crc_object, markers_object, &crc, &markers) < 0)
		return NULL;
	if (capacity_object && arg_number(capacity_object, "capacity", FRAMING_STAGED_MAX, &capacity) < 0)
		return NULL;
	struct inbound *inbound = object_new(type);
	if (!inbound)
		return NULL;
	if (framing_in_init(&inbound->in, crc, markers, (uint32_t)capacity) < 0) {
		Py_DECREF(inbound);
		return PyErr_Format(PyExc_ValueError, "capacity is less than %u, which one FPDU may have", FRAMING_FPDU_MAX);
	}
	return (PyObject *)inbound;
}

static void inbound_dealloc(PyObject *self)
{
	framing_in_free(&((struct inbound *)self)->in);
	object_free(self);
}

/* The runs there are will be no more: their numbers are not given again. */
static void inbound_end_runs(struct inbound *inbound)
{
	const struct framing_run *runs;

	inbound->first_index += framing_in_runs(&inbound->in, &runs);
}

static int inbound_room(struct inbound *inbound, uint8_t **at, size_t *len)
{
	if (inbound->busy)
		return refuse_busy(), -1;
	inbound_end_runs(inbound);
	if (framing_in_room(&inbound->in, at, len) < 0)
		return PyErr_NoMemory(), -1;
	return 0;
}

static PyObject *inbound_fill(PyObject *self, PyObject *file)
{
	struct inbound *inbound = (struct inbound *)self;
	uint8_t *at;
	size_t len;
	ssize_t got;
	int fd, error;

	if (arg_fd(file, &fd) < 0 || inbound_room(inbound, &at, &len) < 0)
		return NULL;
	if (!len)
		return PyErr_Format(PyExc_BufferError, "what is staged has to be parsed first");
	inbound->busy = true;
	Py_BEGIN_ALLOW_THREADS
	do {
		got = recv(fd, at, len, MSG_DONTWAIT);
		error = errno;
	} while (got < 0 && error == EINTR);
	Py_END_ALLOW_THREADS
	inbound->busy = false;
	if (got < 0)
		return raise_errno(-error);
	framing_in_commit(&inbound->in, (size_t)got);
	return PyLong_FromSsize_t((Py_ssize_t)got);
}

static PyObject *inbound_feed(PyObject *self, PyObject *data)
{
	struct inbound *inbound = (struct inbound *)self;
	Py_buffer view;
	uint8_t *at;
	size_t len;

	if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0)
		return NULL;
	if (inbound_room(inbound, &at, &len) < 0) {
		PyBuffer_Release(&view);
		return NULL;
	}
	if (len > (size_t)view.len)
		len = (size_t)view.len;
	memcpy(at, view.buf, len);
	framing_in_commit(&inbound->in, len);
	PyBuffer_Release(&view);
	return PyLong_FromSize_t(len);
}

static PyObject *inbound_parse(PyObject *self, PyObject *Py_UNUSED(unused))
{
	struct inbound *inbound = (struct inbound *)self;
	struct module_state *state = PyType_GetModuleState(Py_TYPE(self));
	const struct framing_run *runs;

	if (!state)
		return NULL;
	if (inbound->busy)
		return refuse_busy();
	inbound_end_runs(inbound);
	if (framing_in_parse(&inbound->in) < 0)
		return PyErr_NoMemory();
	size_t count = framing_in_runs(&inbound->in, &runs);
	PyObject *list = PyList_New((Py_ssize_t)count);

	for (size_t n = 0; list && n < count; n++) {
		PyObject *run = run_new(state->run_type, &runs[n], inbound->first_index + n);

		if (!run)
			Py_CLEAR(list);
		else
			PyList_SetItem(list, (Py_ssize_t)n, run);
	}
	return list;
}

/* What is known of a run; NULL if it is not one of the last parse. */
static const struct framing_run *inbound_run(struct inbound *inbound, PyObject *object)
{
	struct module_state *state = PyType_GetModuleState(Py_TYPE((PyObject *)inbound));
	const struct framing_run *runs;
	size_t count = framing_in_runs(&inbound->in, &runs);
	uint64_t index;

	if (!state)
		return NULL;
	if (Py_TYPE(object) != state->run_type)
		return PyErr_Format(PyExc_TypeError, "a Run is wanted, not a %R", Py_TYPE(object)), NULL;
	if (arg_number(PyStructSequence_GetItem(object, RUN_INDEX), "index", UINT64_MAX, &index) < 0)
		return NULL;
	if (inbound->busy)
		return (const struct framing_run *)(const void *)refuse_busy();
	if (index - inbound->first_index >= count)
		return PyErr_Format(PyExc_ValueError, "run %llu is not one of the last parse", (unsigned long long)index), NULL;
	return &runs[index - inbound->first_index];
}

PyDoc_STRVAR(place_doc, "place(run, begin, scatter, offset, length, /)\n--\n\n"
                        "Copy payload [begin, begin + length) of a run to `offset` in the buffers `scatter`.");

static PyObject *inbound_place(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
	struct inbound *inbound = (struct inbound *)self;
	uint64_t begin, offset, len;

	if (args_count(given, 5, 5) < 0)
		return NULL;
	if (arg_number(args[1], "begin", UINT64_MAX, &begin) < 0 || arg_number(args[3], "offset", UINT64_MAX, &offset) < 0)
		return NULL;
	if (arg_number(args[4], "length", UINT64_MAX, &len) < 0)
		return NULL;
	struct held *held = held_get(args[2], PyBUF_WRITABLE);
	if (!held)
		return NULL;
	const struct framing_run *run = inbound_run(inbound, args[0]); /* after what may run Python code */
	int error = 0;
	if (run)
		error = framing_in_place(&inbound->in, run, begin, held->spans, (size_t)held->len, offset, len);
	if (error)
		PyErr_Format(PyExc_ValueError, "%llu bytes at %llu of %lu do not fit at %llu of the buffers",
		             (unsigned long long)len, (unsigned long long)begin, (unsigned long)run->len,
		             (unsigned long long)offset);
	held_free(held);
	if (!run || error)
		return NULL;
	Py_RETURN_NONE;
}

static PyObject *inbound_payload(PyObject *self, PyObject *object)
{
	struct inbound *inbound = (struct inbound *)self;
	const struct framing_run *run = inbound_run(inbound, object);
	PyObject *payload = run ? PyBytes_FromStringAndSize(NULL, run->len) : NULL;

	if (!payload)
		return NULL;
	struct framing_span span = {(uint8_t *)PyBytes_AsString(payload), run->len, 0};
	framing_in_place(&inbound->in, run, 0, &span, 1, 0, run->len);
	return payload;
}

static PyObject *inbound_segments(PyObject *self, PyObject *object)
{
	struct inbound *inbound = (struct inbound *)self;
	const struct framing_run *run = inbound_run(inbound, object);
	PyObject *list = run ? PyList_New(run->count) : NULL;

	for (uint32_t n = 0; list && n < run->count; n++) {
		uint8_t header[FRAMING_HEADER_MAX];
		uint16_t ulpdu_len;
		size_t len = framing_in_header(&inbound->in, run, n, header, &ulpdu_len);
		PyObject *segment = Py_BuildValue("(y#i)", (const char *)header, (Py_ssize_t)len, (int)ulpdu_len);

		if (!segment)
			Py_CLEAR(list);
		else
			PyList_SetItem(list, n, segment);
	}
	return list;
}

static PyObject *inbound_pending(PyObject *self, void *Py_UNUSED(unused))
{
	return PyLong_FromUnsignedLong(framing_in_pending(&((struct inbound *)self)->in));
}

static PyObject *inbound_staged(PyObject *self, PyObject *Py_UNUSED(unused))
{
	const struct framing_in *in = &((struct inbound *)self)->in;

	if (!in->staging)
		return PyBytes_FromStringAndSize("", 0);
	return PyBytes_FromStringAndSize((const char *)in->staging + in->head, framing_in_pending(in));
}

static PyObject *inbound_fault(PyObject *self, void *Py_UNUSED(unused))
{
	static const char *const words[] = {[FRAMING_CRC] = "crc", [FRAMING_MARKER] = "marker", [FRAMING_SHORT] = "short"};
	enum framing_fault fault = ((struct inbound *)self)->in.fault;

	if (!fault)
		Py_RETURN_NONE;
	return PyUnicode_FromString(words[fault]);
}

static PyMethodDef inbound_methods[] = {
	{"fill", inbound_fill, METH_O,
     "fill(fd)\n--\n\nReceive once what a socket has; the bytes, 0 at its end. Ends all runs."},
	{"feed", inbound_feed, METH_O, "feed(data)\n--\n\nTake what fits of `data`; the bytes. Ends all runs."},
	{"parse", inbound_parse, METH_NOARGS,
     "parse()\n--\n\nThe runs in what is staged; earlier ones end. After a fault there are no more."},
	{"place", POSITIONAL(inbound_place), METH_FASTCALL, place_doc},
	{"payload", inbound_payload, METH_O, "payload(run)\n--\n\nThe payload of a run."},
	{"segments", inbound_segments, METH_O,
     "segments(run)\n--\n\nOf each segment of a run, its DDP header and the length of the whole."},
	{"staged", inbound_staged, METH_NOARGS,
     "staged()\n--\n\nThe bytes that are staged and not parsed: the beginning of an FPDU."},
	{0},
};

static PyMemberDef inbound_members[] = {
	{"position", T_ULONGLONG, offsetof(struct inbound, in.position), READONLY, "Bytes of the stream that are parsed."},
	{0},
};

static PyGetSetDef inbound_getset[] = {
	{"pending", inbound_pending, NULL, "Bytes of the stream that are staged and not parsed.", NULL},
	{"fault", inbound_fault, NULL, "What ended parsing: 'crc', 'marker', 'short'; None if nothing did.", NULL},
	{0},
};

PyDoc_STRVAR(inbound_doc, "Inbound(*, crc, markers, capacity=...)\n--\n\n"
                          "The receiving side of a direction: FPDUs as they arrive, checked, as runs of segments.");

static PyType_Slot inbound_slots[] = {
	{Py_tp_doc, (void *)inbound_doc},
	{Py_tp_new, (void *)inbound_new},
	{Py_tp_dealloc, (void *)inbound_dealloc},
	{Py_tp_methods, inbound_methods},
	{Py_tp_members, inbound_members},
	{Py_tp_getset, inbound_getset},
	{0},
};

PyType_Spec inbound_spec = {
	.name = "sidestep.native._framing.Inbound",
	.basicsize = sizeof(struct inbound),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
	.slots = inbound_slots,
};
