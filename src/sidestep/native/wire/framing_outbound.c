/*
 * framing_outbound.c - an Outbound, the sending side of a direction.
 *
 * It holds the buffers that its waiting FPDUs refer to; each is released as soon as it is written. While a system
 * call runs the interpreter is released, and the object is refused to other threads: its memory must not move meanwhile.
 */
#include "framing_module.h"

#include <sys/socket.h>

#define IOVECS 1024 /* the most that Linux takes at once (UIO_MAXIOV) */

static PyObject *outbound_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
	static char *names[] = {"mulpdu", "crc", "markers", NULL};
	PyObject *mulpdu_object, *crc_object = NULL, *markers_object = NULL;
	uint64_t mulpdu;
	bool crc, markers;

	if (!PyArg_ParseTupleAndKeywords(args, keywords, "O|$OO:Outbound", names, &mulpdu_object, &crc_object,
	                                 &markers_object))
		return NULL;
	if (arg_number(mulpdu_object, "mulpdu", FRAMING_MULPDU_MAX, &mulpdu) < 0)
		return NULL;
	if (settings_get(crc_object, markers_object, &crc, &markers) < 0)
		return NULL;
	struct outbound *outbound = object_new(type);
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

static PyObject *put_refused(const struct outbound *outbound, int error, const struct held *held, uint64_t begin,
                             uint64_t end)
{
	if (error == -ENOMEM)
		return PyErr_NoMemory();
	if (error == -ENOBUFS)
		return PyErr_Format(PyExc_BufferError, "%llu bytes wait already, and %u are the most",
		                    (unsigned long long)framing_out_waiting(&outbound->out), FRAMING_WAITING_MAX);
	return PyErr_Format(PyExc_ValueError,
	                    "[%llu, %llu) is more than %u bytes, or not within %zd buffers, or beyond 2^32",
	                    (unsigned long long)begin, (unsigned long long)end, FRAMING_CALL_MAX, held->len);
}

/* `rest` are gather, begin, end, last and, unless they are four, copy. */
static PyObject *outbound_put(struct outbound *outbound, const struct framing_message *message, PyObject *const *rest,
                              Py_ssize_t given)
{
	uint64_t begin, end;
	bool last, copy;

	if (arg_number(rest[1], "begin", UINT64_MAX, &begin) < 0 || arg_number(rest[2], "end", UINT64_MAX, &end) < 0)
		return NULL;
	if (arg_bool(rest[3], &last) < 0 || arg_bool(given > 4 ? rest[4] : NULL, &copy) < 0)
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
             "tagged(rdmap, stag, to, gather, begin, end, last, copy=False, /)\n--\n\n"
             "Frame the bytes [begin, end) of the tagged message that lies in the buffers `gather` and goes to `to`.");

static PyObject *outbound_tagged(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
	struct framing_message message = {.tagged = true};
	uint64_t rdmap;

	if (args_count(given, 7, 8) < 0)
		return NULL;
	if (arg_number(args[0], "rdmap", UINT8_MAX, &rdmap) < 0 || arg_u32(args[1], "stag", &message.stag) < 0)
		return NULL;
	if (arg_number(args[2], "to", UINT64_MAX, &message.to) < 0)
		return NULL;
	message.rdmap = (uint8_t)rdmap;
	return outbound_put((struct outbound *)self, &message, args + 3, given - 3);
}

PyDoc_STRVAR(untagged_doc, "untagged(rdmap, inv_stag, qn, msn, gather, begin, end, last, copy=False, /)\n--\n\n"
                           "Frame the bytes [begin, end) of the untagged message that lies in the buffers `gather`.");

static PyObject *outbound_untagged(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
	struct framing_message message = {.tagged = false};
	uint64_t rdmap;

	if (args_count(given, 8, 9) < 0)
		return NULL;
	if (arg_number(args[0], "rdmap", UINT8_MAX, &rdmap) < 0 || arg_u32(args[1], "inv_stag", &message.stag) < 0)
		return NULL;
	if (arg_u32(args[2], "qn", &message.queue) < 0 || arg_u32(args[3], "msn", &message.msn) < 0)
		return NULL;
	message.rdmap = (uint8_t)rdmap;
	return outbound_put((struct outbound *)self, &message, args + 4, given - 4);
}

PyDoc_STRVAR(send_doc,
             "send(fd)\n--\n\n"
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
		if (sent < 0)
			return raise_errno(-error);
		framing_out_advance(&outbound->out, (size_t)sent);
		total += (size_t)sent;
		outbound_release(outbound);
		if ((size_t)sent < bytes)
			break;
	}
	return PyLong_FromUnsignedLongLong(total);
}

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

static PyObject *outbound_peek(PyObject *self, PyObject *Py_UNUSED(unused))
{
	const struct framing_out *out = &((struct outbound *)self)->out;
	size_t len = (size_t)framing_out_waiting(out);
	PyObject *seen = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)len);
	char *at = seen ? PyBytes_AsString(seen) : NULL;

	if (at)
		framing_out_copy(out, (uint8_t *)at, len);
	return at ? seen : NULL;
}

static PyObject *outbound_rest(PyObject *self, void *Py_UNUSED(unused))
{
	return PyLong_FromSize_t(framing_out_rest(&((struct outbound *)self)->out));
}

static PyObject *outbound_own(PyObject *self, PyObject *Py_UNUSED(unused))
{
	struct outbound *outbound = (struct outbound *)self;

	if (outbound->busy)
		return refuse_busy();
	if (framing_out_own(&outbound->out) < 0)
		return PyErr_NoMemory();
	outbound_forget(outbound, 0);
	Py_RETURN_NONE;
}

static PyObject *outbound_clear(PyObject *self, PyObject *Py_UNUSED(unused))
{
	struct outbound *outbound = (struct outbound *)self;

	if (outbound->busy)
		return refuse_busy();
	framing_out_clear(&outbound->out);
	outbound_forget(outbound, outbound->out.position);
	Py_RETURN_NONE;
}

static PyObject *outbound_waiting(PyObject *self, void *Py_UNUSED(unused))
{
	return PyLong_FromUnsignedLongLong(framing_out_waiting(&((struct outbound *)self)->out));
}

static PyObject *outbound_mulpdu(PyObject *self, void *Py_UNUSED(unused))
{
	return PyLong_FromUnsignedLong(((struct outbound *)self)->out.mulpdu);
}

static int outbound_set_mulpdu(PyObject *self, PyObject *object, void *Py_UNUSED(unused))
{
	uint64_t mulpdu;

	if (!object)
		return PyErr_Format(PyExc_AttributeError, "mulpdu stays"), -1;
	if (arg_number(object, "mulpdu", FRAMING_MULPDU_MAX, &mulpdu) < 0)
		return -1;
	if (mulpdu < FRAMING_MULPDU_MIN)
		return PyErr_Format(PyExc_ValueError, "mulpdu is less than %u", FRAMING_MULPDU_MIN), -1;
	((struct outbound *)self)->out.mulpdu = (uint32_t)mulpdu;
	return 0;
}

static PyMethodDef outbound_methods[] = {
	{"tagged", POSITIONAL(outbound_tagged), METH_FASTCALL, tagged_doc},
	{"untagged", POSITIONAL(outbound_untagged), METH_FASTCALL, untagged_doc},
	{"send", outbound_send, METH_O, send_doc},
	{"take", outbound_take, METH_O, "take(limit)\n--\n\nThe next `limit` bytes at most, as if they had been written."},
	{"peek", outbound_peek, METH_NOARGS, "peek()\n--\n\nAll that waits; it goes on waiting."},
	{"own", outbound_own, METH_NOARGS, "own()\n--\n\nCopy the payload that waits, and release all buffers."},
	{"clear", outbound_clear, METH_NOARGS,
     "clear()\n--\n\nDrop all that waits but the rest of an FPDU that is partly written."},
	{0},
};

static PyMemberDef outbound_members[] = {
	{"position", T_ULONGLONG, offsetof(struct outbound, out.position), READONLY,
     "Bytes of the stream up to the end of what is framed."},
	{"written", T_ULONGLONG, offsetof(struct outbound, out.written), READONLY, "Bytes of the stream that are written."},
	{0},
};

static PyGetSetDef outbound_getset[] = {
	{"waiting", outbound_waiting, NULL, "Bytes framed and not written.", NULL},
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
	{Py_tp_members, outbound_members},
	{Py_tp_getset, outbound_getset},
	{0},
};

PyType_Spec outbound_spec = {
	.name = "sidestep.native._framing.Outbound",
	.basicsize = sizeof(struct outbound),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
	.slots = outbound_slots,
};
