/*
 * framing_module.c - sidestep.native._framing: framing.c and crc32c.c for Python, in the limited API.
 *
 * An Outbound holds the buffers that its waiting FPDUs refer to; each is released as soon as it is written. While a system
 * call runs the interpreter is released, and the object is refused to other threads: its memory must not move meanwhile.
 * Getting and releasing a buffer may run Python code, so neither is done while something is half changed.
 */
#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030b0000
#endif
#include <Python.h>

#include <errno.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>

#include "crc32c.h"
#include "framing.h"

#define IOVECS 1024       /* the most that Linux takes at once (UIO_MAXIOV) */
#define LONG_SUM (1 << 20) /* bytes; for more, other threads may run */

struct module_state {
	PyTypeObject *run_type;
};

/* ---- arguments ---- */

#define ARGS_MAX 10

/* Sorts arguments by position and by name into `found`, in the order of `names`; those left out stay NULL. */
static int args_sort(const char *const *names, Py_ssize_t required, PyObject *const *args, Py_ssize_t given,
                     PyObject *keywords, PyObject **found)
{
	Py_ssize_t known = 0, named = keywords ? PyTuple_Size(keywords) : 0;

	while (names[known])
		found[known++] = NULL;
	if (given > known)
		return PyErr_Format(PyExc_TypeError, "%zd arguments, and %zd are known", given, known), -1;
	for (Py_ssize_t n = 0; n < given; n++)
		found[n] = args[n];
	for (Py_ssize_t n = 0; n < named; n++) {
		PyObject *name = PyTuple_GetItem(keywords, n);
		Py_ssize_t at = 0;

		while (names[at] && PyUnicode_CompareWithASCIIString(name, names[at]) != 0)
			at++;
		if (!names[at] || found[at])
			return PyErr_Format(PyExc_TypeError, "argument %R is unknown or there twice", name), -1;
		found[at] = args[given + n];
	}
	for (Py_ssize_t n = 0; n < required; n++)
		if (!found[n])
			return PyErr_Format(PyExc_TypeError, "argument '%s' is missing", names[n]), -1;
	return 0;
}

static int arg_number(PyObject *object, const char *name, uint64_t max, uint64_t *value)
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
	return PyErr_Format(PyExc_ValueError, "%s is %R, and is to be of 0 to %llu", name, object, (unsigned long long)max), -1;
}

static int arg_u32(PyObject *object, const char *name, uint32_t *value)
{
	uint64_t number;

	if (arg_number(object, name, UINT32_MAX, &number) < 0)
		return -1;
	*value = (uint32_t)number;
	return 0;
}

static int arg_bool(PyObject *object, bool *value)
{
	int truth = object ? PyObject_IsTrue(object) : 0;

	*value = truth > 0;
	return truth < 0 ? -1 : 0;
}

static int arg_fd(PyObject *object, int *fd)
{
	*fd = PyObject_AsFileDescriptor(object);
	return *fd < 0 ? -1 : 0;
}

/* ---- lists of buffers ---- */

/* The buffers of a tuple, held. In one block, where they stay: a Py_buffer must not be moved. */
struct held {
	struct held *next;
	struct framing_span *spans;
	Py_ssize_t len, released; /* buffers; the first so many are given back */
	Py_buffer views[];
};

static void held_release(struct held *held, Py_ssize_t until)
{
	while (held->released < until)
		PyBuffer_Release(&held->views[held->released++]);
}

static void held_free(struct held *held)
{
	held_release(held, held->len);
	PyMem_Free(held);
}

static struct held *held_get(PyObject *tuple, int flags)
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

/* ---- objects ---- */

static PyObject *object_new(PyTypeObject *type)
{
	return ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
}

static void object_free(PyObject *self)
{
	PyTypeObject *type = Py_TYPE(self);

	((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
	Py_DECREF(type); /* instances of heap types hold their type */
}

/* The two settings that both directions have; they are given by name. */
static int settings_get(PyObject *crc, PyObject *markers, bool *crc_value, bool *markers_value)
{
	if (!crc || !markers)
		return PyErr_Format(PyExc_TypeError, "crc and markers are to be given by name"), -1;
	return arg_bool(crc, crc_value) < 0 || arg_bool(markers, markers_value) < 0 ? -1 : 0;
}

static PyObject *refuse_busy(void)
{
	PyErr_SetString(PyExc_RuntimeError, "another thread is in a system call with it");
	return NULL;
}

/* ---- Outbound ---- */

struct outbound {
	PyObject_HEAD
	struct framing_out out;
	struct held *first, *last; /* what waiting FPDUs refer to, in the order of the stream */
	bool busy, releasing;
};

static PyObject *outbound_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
	static char *names[] = {"mulpdu", "crc", "markers", NULL};
	PyObject *mulpdu_object, *crc_object = NULL, *markers_object = NULL;
	uint64_t mulpdu;
	bool crc, markers;

	if (!PyArg_ParseTupleAndKeywords(args, keywords, "O|$OO:Outbound", names, &mulpdu_object, &crc_object, &markers_object))
		return NULL;
	if (arg_number(mulpdu_object, "mulpdu", FRAMING_MULPDU_MAX, &mulpdu) < 0)
		return NULL;
	if (settings_get(crc_object, markers_object, &crc, &markers) < 0)
		return NULL;
	struct outbound *outbound = (struct outbound *)object_new(type);
	if (!outbound)
		return NULL;
	if (framing_out_init(&outbound->out, (uint32_t)mulpdu, crc, markers) < 0) {
		Py_DECREF(outbound);
		return PyErr_Format(PyExc_ValueError, "mulpdu is less than %u", FRAMING_MULPDU_MIN);
	}
	return (PyObject *)outbound;
}

/*
 * Releases the buffers that are written. To release one may run code that calls us again: that leaves it to the call that is
 * under way, as the memory of the one being released must stay until it is done.
 */
static void outbound_release(struct outbound *outbound)
{
	struct held *held;

	if (outbound->releasing)
		return;
	outbound->releasing = true;
	while ((held = outbound->first)) {
		while (held->released < held->len && held->spans[held->released].until <= outbound->out.written)
			PyBuffer_Release(&held->views[held->released++]);
		if (held->released < held->len)
			break;
		outbound->first = held->next;
		if (!held->next)
			outbound->last = NULL;
		PyMem_Free(held);
	}
	outbound->releasing = false;
}

/* No byte behind `position` will be written from where it is. */
static void outbound_forget(struct outbound *outbound, uint64_t position)
{
	for (struct held *held = outbound->first; held; held = held->next)
		for (Py_ssize_t n = held->released; n < held->len; n++)
			if (held->spans[n].until > position)
				held->spans[n].until = position;
	outbound_release(outbound);
}

/* Keeps the buffers that are referred to until they are written; the others are given back at once. */
static void outbound_hold(struct outbound *outbound, struct held *held)
{
	bool referred = false;

	for (Py_ssize_t n = 0; n < held->len; n++) {
		if (held->spans[n].until)
			referred = true;
		else
			PyBuffer_Release(&held->views[n]); /* once more it does nothing */
	}
	if (!referred) {
		held_free(held);
		return;
	}
	if (outbound->last)
		outbound->last->next = held;
	else
		outbound->first = held;
	outbound->last = held;
	outbound_release(outbound); /* what was just given back may have run code that wrote all of it */
}

static int outbound_traverse(PyObject *self, visitproc visit, void *arg)
{
	Py_VISIT(Py_TYPE(self));
	for (struct held *held = ((struct outbound *)self)->first; held; held = held->next)
		for (Py_ssize_t n = held->released; n < held->len; n++)
			Py_VISIT(held->views[n].obj);
	return 0;
}

static int outbound_tp_clear(PyObject *self)
{
	struct outbound *outbound = (struct outbound *)self;
	struct held *held;

	framing_out_free(&outbound->out);
	outbound->out.position = outbound->out.written;
	while ((held = outbound->first)) {
		outbound->first = held->next;
		held_free(held);
	}
	outbound->last = NULL;
	return 0;
}

static void outbound_dealloc(PyObject *self)
{
	PyObject_GC_UnTrack(self);
	outbound_tp_clear(self);
	object_free(self);
}

static PyObject *put_refused(const struct outbound *outbound, int error, const struct held *held, uint64_t begin, uint64_t end)
{
	if (error == -ENOMEM)
		return PyErr_NoMemory();
	if (error == -ENOBUFS)
		return PyErr_Format(PyExc_BufferError, "%llu bytes wait already, and %u are the most",
		                    (unsigned long long)framing_out_waiting(&outbound->out), FRAMING_WAITING_MAX);
	return PyErr_Format(PyExc_ValueError, "[%llu, %llu) is more than %u bytes, or not within %zd buffers, or beyond 2^32",
	                    (unsigned long long)begin, (unsigned long long)end, FRAMING_CALL_MAX, held->len);
}

/* `rest` are gather, begin, end, last and copy. */
static PyObject *outbound_put(struct outbound *outbound, const struct framing_message *message, PyObject *const *rest)
{
	uint64_t begin, end;
	bool last, copy;

	if (arg_number(rest[1], "begin", UINT64_MAX, &begin) < 0 || arg_number(rest[2], "end", UINT64_MAX, &end) < 0)
		return NULL;
	if (arg_bool(rest[3], &last) < 0 || arg_bool(rest[4], &copy) < 0)
		return NULL;
	struct held *held = held_get(rest[0], PyBUF_SIMPLE);
	if (!held)
		return NULL;
	if (outbound->busy) {
		held_free(held);
		return refuse_busy();
	}
	int error = framing_out_put(&outbound->out, message, held->spans, (size_t)held->len, begin, end, last, copy);
	if (error) {
		put_refused(outbound, error, held, begin, end);
		held_free(held);
		return NULL;
	}
	outbound_hold(outbound, held);
	Py_RETURN_NONE;
}

PyDoc_STRVAR(tagged_doc,
             "tagged(rdmap, stag, to, gather, begin, end, last, copy=False)\n--\n\n"
             "Frame the bytes [begin, end) of the tagged message that lies in the buffers `gather` and goes to `to`.");

static PyObject *outbound_tagged(PyObject *self, PyObject *const *args, Py_ssize_t given, PyObject *keywords)
{
	static const char *const names[] = {"rdmap", "stag", "to", "gather", "begin", "end", "last", "copy", NULL};
	struct framing_message message = {.tagged = true};
	PyObject *found[ARGS_MAX];
	uint64_t rdmap;

	if (args_sort(names, 7, args, given, keywords, found) < 0)
		return NULL;
	if (arg_number(found[0], "rdmap", UINT8_MAX, &rdmap) < 0 || arg_u32(found[1], "stag", &message.stag) < 0)
		return NULL;
	if (arg_number(found[2], "to", UINT64_MAX, &message.to) < 0)
		return NULL;
	message.rdmap = (uint8_t)rdmap;
	return outbound_put((struct outbound *)self, &message, found + 3);
}

PyDoc_STRVAR(untagged_doc,
             "untagged(rdmap, inv_stag, qn, msn, gather, begin, end, last, copy=False)\n--\n\n"
             "Frame the bytes [begin, end) of the untagged message that lies in the buffers `gather`.");

static PyObject *outbound_untagged(PyObject *self, PyObject *const *args, Py_ssize_t given, PyObject *keywords)
{
	static const char *const names[] = {"rdmap", "inv_stag", "qn",   "msn",  "gather",
	                                    "begin", "end",      "last", "copy", NULL};
	struct framing_message message = {.tagged = false};
	PyObject *found[ARGS_MAX];
	uint64_t rdmap;

	if (args_sort(names, 8, args, given, keywords, found) < 0)
		return NULL;
	if (arg_number(found[0], "rdmap", UINT8_MAX, &rdmap) < 0 || arg_u32(found[1], "inv_stag", &message.stag) < 0)
		return NULL;
	if (arg_u32(found[2], "qn", &message.queue) < 0 || arg_u32(found[3], "msn", &message.msn) < 0)
		return NULL;
	message.rdmap = (uint8_t)rdmap;
	return outbound_put((struct outbound *)self, &message, found + 4);
}

PyDoc_STRVAR(send_doc, "send(fd)\n--\n\n"
                       "Write to a socket until nothing waits or it is full; the bytes written, 0 if it was full before.");

static PyObject *outbound_send(PyObject *self, PyObject *file)
{
	struct outbound *outbound = (struct outbound *)self;
	struct iovec pieces[IOVECS];
	size_t bytes;
	uint64_t total = 0;
	int fd;

	if (arg_fd(file, &fd) < 0)
		return NULL;
	if (outbound->busy)
		return refuse_busy();
	while (framing_out_waiting(&outbound->out)) {
		struct msghdr msg = {.msg_iov = pieces};
		ssize_t sent;
		int error;

		msg.msg_iovlen = framing_out_peek(&outbound->out, pieces, IOVECS, &bytes);
		/* More follows at once: TCP is to fill its segments, so that FPDUs begin where these do. */
		int more = bytes < framing_out_waiting(&outbound->out) ? MSG_MORE : 0;

		outbound->busy = true;
		Py_BEGIN_ALLOW_THREADS
		do {
			sent = sendmsg(fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT | more);
			error = errno;
		} while (sent < 0 && error == EINTR);
		Py_END_ALLOW_THREADS
		outbound->busy = false;
		if (sent < 0 && (error == EAGAIN || error == EWOULDBLOCK))
			break;
		if (sent < 0) {
			errno = error;
			return PyErr_SetFromErrno(PyExc_OSError);
		}
		framing_out_advance(&outbound->out, (size_t)sent);
		total += (size_t)sent;
		outbound_release(outbound);
		if ((size_t)sent < bytes)
			break;
	}
	return PyLong_FromUnsignedLongLong(total);
}

PyDoc_STRVAR(take_doc, "take(limit)\n--\n\nThe next `limit` bytes at most, as if they had been written.");

static PyObject *outbound_take(PyObject *self, PyObject *limit)
{
	struct outbound *outbound = (struct outbound *)self;
	uint64_t len, waiting = framing_out_waiting(&outbound->out);

	if (arg_number(limit, "limit", UINT64_MAX, &len) < 0)
		return NULL;
	if (outbound->busy)
		return refuse_busy();
	if (len > waiting)
		len = waiting;
	PyObject *taken = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)len);
	char *at = taken ? PyBytes_AsString(taken) : NULL;
	if (!at)
		return NULL;
	framing_out_copy(&outbound->out, (uint8_t *)at, (size_t)len);
	framing_out_advance(&outbound->out, (size_t)len);
	outbound_release(outbound);
	return taken;
}

PyDoc_STRVAR(peek_doc, "peek()\n--\n\nAll that waits; it goes on waiting.");

static PyObject *outbound_peek(PyObject *self, PyObject *unused)
{
	const struct framing_out *out = &((struct outbound *)self)->out;
	size_t len = (size_t)framing_out_waiting(out);
	PyObject *seen = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)len);
	char *at = seen ? PyBytes_AsString(seen) : NULL;

	(void)unused;
	if (at)
		framing_out_copy(out, (uint8_t *)at, len);
	return at ? seen : NULL;
}

static PyObject *outbound_rest(PyObject *self, void *unused)
{
	(void)unused;
	return PyLong_FromSize_t(framing_out_rest(&((struct outbound *)self)->out));
}

PyDoc_STRVAR(own_doc, "own()\n--\n\nCopy the payload that waits, and release all buffers.");

static PyObject *outbound_own(PyObject *self, PyObject *unused)
{
	struct outbound *outbound = (struct outbound *)self;

	(void)unused;
	if (outbound->busy)
		return refuse_busy();
	if (framing_out_own(&outbound->out) < 0)
		return PyErr_NoMemory();
	outbound_forget(outbound, 0);
	Py_RETURN_NONE;
}

PyDoc_STRVAR(clear_doc, "clear()\n--\n\nDrop all that waits but the rest of an FPDU that is partly written.");

static PyObject *outbound_clear(PyObject *self, PyObject *unused)
{
	struct outbound *outbound = (struct outbound *)self;

	(void)unused;
	if (outbound->busy)
		return refuse_busy();
	framing_out_clear(&outbound->out);
	outbound_forget(outbound, outbound->out.position);
	Py_RETURN_NONE;
}

PyDoc_STRVAR(out_trim_doc, "trim()\n--\n\nGive memory back while nothing waits.");

static PyObject *outbound_trim(PyObject *self, PyObject *unused)
{
	struct outbound *outbound = (struct outbound *)self;

	(void)unused;
	if (outbound->busy)
		return refuse_busy();
	framing_out_trim(&outbound->out);
	Py_RETURN_NONE;
}

static PyObject *outbound_waiting(PyObject *self, void *unused)
{
	(void)unused;
	return PyLong_FromUnsignedLongLong(framing_out_waiting(&((struct outbound *)self)->out));
}

static PyObject *outbound_position(PyObject *self, void *unused)
{
	(void)unused;
	return PyLong_FromUnsignedLongLong(((struct outbound *)self)->out.position);
}

static PyObject *outbound_written(PyObject *self, void *unused)
{
	(void)unused;
	return PyLong_FromUnsignedLongLong(((struct outbound *)self)->out.written);
}

static PyObject *outbound_partial(PyObject *self, void *unused)
{
	(void)unused;
	return PyBool_FromLong(((struct outbound *)self)->out.partial);
}

static PyObject *outbound_mulpdu(PyObject *self, void *unused)
{
	(void)unused;
	return PyLong_FromUnsignedLong(((struct outbound *)self)->out.mulpdu);
}

static int outbound_set_mulpdu(PyObject *self, PyObject *object, void *unused)
{
	uint64_t mulpdu;

	(void)unused;
	if (!object)
		return PyErr_Format(PyExc_AttributeError, "mulpdu stays"), -1;
	if (arg_number(object, "mulpdu", FRAMING_MULPDU_MAX, &mulpdu) < 0)
		return -1;
	if (mulpdu < FRAMING_MULPDU_MIN)
		return PyErr_Format(PyExc_ValueError, "mulpdu is less than %u", FRAMING_MULPDU_MIN), -1;
	((struct outbound *)self)->out.mulpdu = (uint32_t)mulpdu;
	return 0;
}

#define WITH_NAMES(function) ((PyCFunction)(void (*)(void))(function))

static PyMethodDef outbound_methods[] = {
	{"tagged", WITH_NAMES(outbound_tagged), METH_FASTCALL | METH_KEYWORDS, tagged_doc},
	{"untagged", WITH_NAMES(outbound_untagged), METH_FASTCALL | METH_KEYWORDS, untagged_doc},
	{"send", outbound_send, METH_O, send_doc},
	{"take", outbound_take, METH_O, take_doc},
	{"peek", outbound_peek, METH_NOARGS, peek_doc},
	{"own", outbound_own, METH_NOARGS, own_doc},
	{"clear", outbound_clear, METH_NOARGS, clear_doc},
	{"trim", outbound_trim, METH_NOARGS, out_trim_doc},
	{0},
};

static PyGetSetDef outbound_getset[] = {
	{"waiting", outbound_waiting, NULL, "Bytes framed and not written.", NULL},
	{"position", outbound_position, NULL, "Bytes of the stream up to the end of what is framed.", NULL},
	{"written", outbound_written, NULL, "Bytes of the stream that are written.", NULL},
	{"partial", outbound_partial, NULL, "Whether what is written ends within an FPDU.", NULL},
	{"rest", outbound_rest, NULL, "Bytes that a partly written FPDU still has.", NULL},
	{"mulpdu", outbound_mulpdu, outbound_set_mulpdu, "Bytes of the largest segment of the messages to come.", NULL},
	{0},
};

PyDoc_STRVAR(outbound_doc, "Outbound(mulpdu, *, crc, markers)\n--\n\n"
                           "The sending side of a direction: FPDUs that wait to be written, in order.");

static PyType_Slot outbound_slots[] = {
	{Py_tp_doc, (void *)outbound_doc},
	{Py_tp_new, (void *)outbound_new},
	{Py_tp_dealloc, (void *)outbound_dealloc},
	{Py_tp_traverse, (void *)outbound_traverse},
	{Py_tp_clear, (void *)outbound_tp_clear},
	{Py_tp_methods, outbound_methods},
	{Py_tp_getset, outbound_getset},
	{0},
};

static PyType_Spec outbound_spec = {
	.name = "sidestep.native._framing.Outbound",
	.basicsize = sizeof(struct outbound),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
	.slots = outbound_slots,
};

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

static PyStructSequence_Desc run_desc = {
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
		[RUN_CONTROL] = PyLong_FromLong(run->control),
		[RUN_RDMAP] = PyLong_FromLong(run->rdmap),
		[RUN_STAG] = PyLong_FromUnsignedLong(run->stag),
		[RUN_QUEUE] = PyLong_FromUnsignedLong(run->queue),
		[RUN_MSN] = PyLong_FromUnsignedLong(run->msn),
		[RUN_OFFSET] = PyLong_FromUnsignedLongLong(run->offset),
		[RUN_LENGTH] = PyLong_FromUnsignedLong(run->len),
		[RUN_SEGMENTS] = PyLong_FromUnsignedLong(run->count),
		[RUN_INDEX] = PyLong_FromUnsignedLongLong(index),
		[RUN_LAST] = PyBool_FromLong(run->last),
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

struct inbound {
	PyObject_HEAD
	struct framing_in in;
	uint64_t first_index; /* of the first run there is */
	bool busy;
};

static PyObject *inbound_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
	static char *names[] = {"crc", "markers", "capacity", NULL};
	PyObject *crc_object = NULL, *markers_object = NULL, *capacity_object = NULL;
	uint64_t capacity = FRAMING_STAGED_DEFAULT;
	bool crc, markers;

	if (!PyArg_ParseTupleAndKeywords(args, keywords, "|$OOO:Inbound", names, &crc_object, &markers_object, &capacity_object))
		return NULL;
	if (settings_get(crc_object, markers_object, &crc, &markers) < 0)
		return NULL;
	if (capacity_object && arg_number(capacity_object, "capacity", FRAMING_STAGED_MAX, &capacity) < 0)
		return NULL;
	struct inbound *inbound = (struct inbound *)object_new(type);
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

PyDoc_STRVAR(fill_doc, "fill(fd)\n--\n\nReceive once what a socket has; the bytes, 0 at its end. Ends all runs.");

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
	if (got < 0) {
		errno = error;
		return PyErr_SetFromErrno(PyExc_OSError);
	}
	framing_in_commit(&inbound->in, (size_t)got);
	return PyLong_FromSsize_t((Py_ssize_t)got);
}

PyDoc_STRVAR(feed_doc, "feed(data)\n--\n\nTake what fits of `data`; the bytes. Ends all runs.");

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

PyDoc_STRVAR(parse_doc, "parse()\n--\n\nThe runs in what is staged; earlier ones end. After a fault there are no more.");

static PyObject *inbound_parse(PyObject *self, PyObject *unused)
{
	struct inbound *inbound = (struct inbound *)self;
	struct module_state *state = PyType_GetModuleState(Py_TYPE(self));
	const struct framing_run *runs;

	(void)unused;
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

PyDoc_STRVAR(place_doc, "place(run, begin, scatter, offset, length)\n--\n\n"
                        "Copy payload [begin, begin + length) of a run to `offset` in the buffers `scatter`.");

static PyObject *inbound_place(PyObject *self, PyObject *const *args, Py_ssize_t given, PyObject *keywords)
{
	static const char *const names[] = {"run", "begin", "scatter", "offset", "length", NULL};
	struct inbound *inbound = (struct inbound *)self;
	PyObject *found[ARGS_MAX];
	uint64_t begin, offset, len;

	if (args_sort(names, 5, args, given, keywords, found) < 0)
		return NULL;
	if (arg_number(found[1], "begin", UINT64_MAX, &begin) < 0 || arg_number(found[3], "offset", UINT64_MAX, &offset) < 0)
		return NULL;
	if (arg_number(found[4], "length", UINT64_MAX, &len) < 0)
		return NULL;
	struct held *held = held_get(found[2], PyBUF_WRITABLE);
	if (!held)
		return NULL;
	const struct framing_run *run = inbound_run(inbound, found[0]); /* after what may run Python code */
	int error = 0;
	if (run)
		error = framing_in_place(&inbound->in, run, begin, held->spans, (size_t)held->len, offset, len);
	if (error)
		PyErr_Format(PyExc_ValueError, "%llu bytes at %llu of %lu do not fit at %llu of the buffers", (unsigned long long)len,
		             (unsigned long long)begin, (unsigned long)run->len, (unsigned long long)offset);
	held_free(held);
	if (!run || error)
		return NULL;
	Py_RETURN_NONE;
}

PyDoc_STRVAR(payload_doc, "payload(run)\n--\n\nThe payload of a run.");

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

PyDoc_STRVAR(segments_doc, "segments(run)\n--\n\nOf each segment of a run, its DDP header and the length of the whole.");

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

PyDoc_STRVAR(in_trim_doc, "trim()\n--\n\nGive memory back while nothing is staged. Ends all runs.");

static PyObject *inbound_trim(PyObject *self, PyObject *unused)
{
	struct inbound *inbound = (struct inbound *)self;

	(void)unused;
	if (inbound->busy)
		return refuse_busy();
	inbound_end_runs(inbound);
	framing_in_trim(&inbound->in);
	Py_RETURN_NONE;
}

static PyObject *inbound_pending(PyObject *self, void *unused)
{
	(void)unused;
	return PyLong_FromUnsignedLong(framing_in_pending(&((struct inbound *)self)->in));
}

PyDoc_STRVAR(staged_doc, "staged()\n--\n\nThe bytes that are staged and not parsed: the beginning of an FPDU.");

static PyObject *inbound_staged(PyObject *self, PyObject *unused)
{
	const struct framing_in *in = &((struct inbound *)self)->in;

	(void)unused;
	if (!in->staging)
		return PyBytes_FromStringAndSize("", 0);
	return PyBytes_FromStringAndSize((const char *)in->staging + in->head, framing_in_pending(in));
}

static PyObject *inbound_position(PyObject *self, void *unused)
{
	(void)unused;
	return PyLong_FromUnsignedLongLong(((struct inbound *)self)->in.position);
}

static PyObject *inbound_fault(PyObject *self, void *unused)
{
	static const char *const words[] = {[FRAMING_CRC] = "crc", [FRAMING_MARKER] = "marker", [FRAMING_SHORT] = "short"};
	enum framing_fault fault = ((struct inbound *)self)->in.fault;

	(void)unused;
	if (!fault)
		Py_RETURN_NONE;
	return PyUnicode_FromString(words[fault]);
}

static PyMethodDef inbound_methods[] = {
	{"fill", inbound_fill, METH_O, fill_doc},
	{"feed", inbound_feed, METH_O, feed_doc},
	{"parse", inbound_parse, METH_NOARGS, parse_doc},
	{"place", WITH_NAMES(inbound_place), METH_FASTCALL | METH_KEYWORDS, place_doc},
	{"payload", inbound_payload, METH_O, payload_doc},
	{"segments", inbound_segments, METH_O, segments_doc},
	{"staged", inbound_staged, METH_NOARGS, staged_doc},
	{"trim", inbound_trim, METH_NOARGS, in_trim_doc},
	{0},
};

static PyGetSetDef inbound_getset[] = {
	{"pending", inbound_pending, NULL, "Bytes of the stream that are staged and not parsed.", NULL},
	{"position", inbound_position, NULL, "Bytes of the stream that are parsed.", NULL},
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
	{Py_tp_getset, inbound_getset},
	{0},
};

static PyType_Spec inbound_spec = {
	.name = "sidestep.native._framing.Inbound",
	.basicsize = sizeof(struct inbound),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
	.slots = inbound_slots,
};

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

PyDoc_STRVAR(crc32c_doc, "crc32c(data, start=0)\n--\n\nThe checksum of the data; `start` is that of what comes before.");

static PyObject *module_crc32c(PyObject *module, PyObject *const *args, Py_ssize_t given, PyObject *keywords)
{
	static const char *const names[] = {"data", "start", NULL};
	PyObject *found[ARGS_MAX];

	(void)module;
	if (args_sort(names, 1, args, given, keywords, found) < 0)
		return NULL;
	return checksum(crc32c_update, found[0], found[1]);
}

PyDoc_STRVAR(crc32c_by_doc, "crc32c_by(name, data, start=0)\n--\n\nThe same by one of the implementations.");

static PyObject *module_crc32c_by(PyObject *module, PyObject *const *args, Py_ssize_t given, PyObject *keywords)
{
	static const char *const names[] = {"name", "data", "start", NULL};
	PyObject *found[ARGS_MAX];

	(void)module;
	if (args_sort(names, 2, args, given, keywords, found) < 0)
		return NULL;
	if (!PyUnicode_Check(found[0]))
		return PyErr_Format(PyExc_TypeError, "a name is wanted, not a %R", Py_TYPE(found[0]));
	for (const struct crc32c_implementation *one = crc32c_implementations; one->name; one++)
		if (PyUnicode_CompareWithASCIIString(found[0], one->name) == 0)
			return checksum(one->update, found[1], found[2]);
	return PyErr_Format(PyExc_ValueError, "this CPU has no %R", found[0]);
}

PyDoc_STRVAR(crc32c_implementations_doc,
             "crc32c_implementations()\n--\n\nThe names of those that this CPU can run, best first.");

static PyObject *module_crc32c_implementations(PyObject *module, PyObject *unused)
{
	PyObject *list = PyList_New(0);

	(void)module;
	(void)unused;
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
	{"crc32c", WITH_NAMES(module_crc32c), METH_FASTCALL | METH_KEYWORDS, crc32c_doc},
	{"crc32c_by", WITH_NAMES(module_crc32c_by), METH_FASTCALL | METH_KEYWORDS, crc32c_by_doc},
	{"crc32c_implementations", module_crc32c_implementations, METH_NOARGS, crc32c_implementations_doc},
	{0},
};

static int add_type(PyObject *module, PyType_Spec *spec)
{
	PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
	int failed = type ? PyModule_AddType(module, (PyTypeObject *)type) : -1;

	Py_XDECREF(type);
	return failed;
}

static int module_exec(PyObject *module)
{
	struct module_state *state = PyModule_GetState(module);

	crc32c_init();
	if (!state || add_type(module, &outbound_spec) < 0 || add_type(module, &inbound_spec) < 0)
		return -1;
	state->run_type = PyStructSequence_NewType(&run_desc);
	if (!state->run_type || PyModule_AddObjectRef(module, "Run", (PyObject *)state->run_type) < 0)
		return -1;
	if (PyModule_AddIntConstant(module, "MULPDU_MIN", FRAMING_MULPDU_MIN) < 0 ||
	    PyModule_AddIntConstant(module, "MULPDU_MAX", FRAMING_MULPDU_MAX) < 0 ||
	    PyModule_AddIntConstant(module, "CALL_MAX", FRAMING_CALL_MAX) < 0 ||
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
