/*
 * rc_type.c - Rc: rc_qp.h for Python. The host, which each call that may ask names, is rdma/roce/qp.py's queue pair.
 *
 * Memory of requests and receives is exported to the connection until they are done with. That of a grant is not: its region keeps it,
 * and it is used within one call only.
 */
#include "rc_type.h"

#include <stdio.h>
#include <stdlib.h>

struct posted {
	struct qp_flight flight;
	struct memory memory;
};

static struct rc_object *idle(PyObject *self)
{
	struct rc_object *object = (struct rc_object *)self;

	if (!object->busy)
		return object;
	PyErr_SetString(PyExc_RuntimeError, "an engine has it");
	return NULL;
}

static struct rc_object *object_of(struct rc_qp *qp)
{
	return qp->owner;
}

/* ---- memory of requests and receives ---- */
static void memory_open(struct memory *memory, PyObject *entries, int flags)
{
	memory->entries = PySequence_Tuple(entries);
	memory->views_len = 0;
	memory->length = 0;
	Py_ssize_t count = memory->entries ? PyTuple_Size(memory->entries) : 0;
	memory->bad = !memory->entries || count > (Py_ssize_t)QP_PIECES_MAX;
	if (!memory->entries)
		PyErr_Clear();
	for (Py_ssize_t i = 0; i < count && !memory->bad; i++) {
		Py_buffer *view = memory->views + i;
		if (PyObject_GetBuffer(PyTuple_GetItem(memory->entries, i), view, flags) < 0) {
			PyErr_Clear();
			memory->bad = true;
			break;
		}
		memory->pieces[i] = (struct iovec){.iov_base = view->buf, .iov_len = (size_t)view->len};
		memory->length += (uint64_t)view->len;
		memory->views_len++;
	}
}

static void memory_close(struct memory *memory)
{
	while (memory->views_len)
		PyBuffer_Release(memory->views + --memory->views_len);
	Py_CLEAR(memory->entries);
}

/* Frees requests that are done with; the number of those that were posted here. */
static uint32_t free_done(struct rc_object *object)
{
	uint32_t count = 0;

	while (object->qp.done) {
		struct qp_flight *flight = object->qp.done;
		object->qp.done = flight->next;
		count += !flight->owned;
		if (!flight->owned)
			memory_close(&((struct posted *)(void *)flight)->memory);
		free(flight);
	}
	return count;
}

/* ---- what the connection asks ---- */
/* The host's answer is yes; a fault breaks the connection. */
static bool asked(struct rc_object *object, PyObject *answer)
{
	int yes = answer ? PyObject_IsTrue(answer) : -1;

	Py_XDECREF(answer);
	if (yes < 0)
		object->qp.broken = true;
	return yes > 0;
}

static bool host_may_use(struct rc_qp *qp, struct qp_flight *flight)
{
	struct rc_object *object = object_of(qp);
	const struct memory *memory = &((struct posted *)(void *)flight)->memory;
	const char *method = flight->op == QP_SEND || flight->op == QP_WRITE ? "may_read" : "may_sink";

	return !memory->bad && asked(object, PyObject_CallMethod(object->host, method, "(O)", memory->entries));
}

static void say_why(struct rc_qp *qp, const char *what, PyObject *refusal)
{
	PyObject *name = PyObject_GetAttrString(refusal, "name");
	const char *text = name ? PyUnicode_AsUTF8AndSize(name, NULL) : NULL;

	if (text)
		snprintf(qp->why, sizeof(qp->why), "%s: %s", what, text);
	else
		qp->broken = true;
	Py_XDECREF(name);
}

static uint8_t *host_grant(struct rc_qp *qp, uint32_t key, uint64_t va, uint32_t length, enum qp_right right)
{
	struct rc_object *object = object_of(qp);
	PyObject *found = PyObject_CallMethod(object->host, "grant", "IKIi", (unsigned int)key, (unsigned long long)va,
	                                      (unsigned int)length, (int)right);
	uint8_t *at = NULL;
	Py_buffer view;

	if (found && PyLong_Check(found)) {
		say_why(qp, "the other end named memory that it may not use so", found);
	} else if (found &&
	           PyObject_GetBuffer(found, &view, right == QP_REMOTE_READ ? PyBUF_SIMPLE : PyBUF_WRITABLE) == 0) {
		if (view.len == (Py_ssize_t)length)
			at = view.buf;
		PyBuffer_Release(&view);
	}
	if (PyErr_Occurred())
		qp->broken = true;
	Py_XDECREF(found);
	return at;
}

static void let_go(struct rc_object *object)
{
	memory_close(&object->memory);
	Py_CLEAR(object->receive);
	object->qp.receive.pieces_len = 0;
}

static bool host_take_receive(struct rc_qp *qp)
{
	struct rc_object *object = object_of(qp);
	PyObject *receive = PyObject_CallMethod(object->host, "take_posted", NULL), *scatter;

	if (!receive || Py_IsNone(receive) || !(scatter = PyObject_GetAttrString(receive, "scatter"))) {
		qp->broken |= !receive || !Py_IsNone(receive);
		Py_XDECREF(receive);
		return false;
	}
	let_go(object);
	object->receive = receive;
	memory_open(&object->memory, scatter, PyBUF_WRITABLE);
	Py_DECREF(scatter);
	qp->receive.pieces_len = object->memory.views_len;
	memcpy(qp->receive.pieces, object->memory.pieces, sizeof(qp->receive.pieces));
	qp->receive.bad = object->memory.bad;
	qp->receive.length = object->memory.length < QP_LENGTH_MAX ? object->memory.length : QP_LENGTH_MAX;
	return true;
}

static bool host_may_receive(struct rc_qp *qp)
{
	struct rc_object *object = object_of(qp);

	return asked(object, PyObject_CallMethod(object->host, "may_receive", "(O)", object->memory.entries));
}

static bool host_may_void(struct rc_qp *qp, uint32_t key)
{
	struct rc_object *object = object_of(qp);
	PyObject *found = PyObject_CallMethod(object->host, "may_be_invalidated", "I", (unsigned int)key);
	bool may = found && !PyLong_Check(found);

	if (found && !may)
		say_why(qp, "a message was to void a key that it may not", found);
	qp->broken |= !found;
	Py_XDECREF(found);
	return may;
}

static void host_void_key(struct rc_qp *qp, uint32_t key)
{
	struct rc_object *object = object_of(qp);
	PyObject *done = PyObject_CallMethod(object->host, "void_key", "I", (unsigned int)key);

	qp->broken |= !done;
	Py_XDECREF(done);
}

static void host_deliver(struct rc_qp *qp, uint32_t length, bool solicited, const uint32_t *voided,
                         const uint8_t *immediate)
{
	struct rc_object *object = object_of(qp);
	PyObject *key = voided ? PyLong_FromUnsignedLong(*voided) : Py_NewRef(Py_None);
	PyObject *data = immediate ? PyBytes_FromStringAndSize((const char *)immediate, 4) : Py_NewRef(Py_None);
	PyObject *entry = key && data ? Py_BuildValue("(OIOOO)", object->receive, (unsigned int)length,
	                                              solicited ? Py_True : Py_False, key, data)
	                              : NULL;

	if (!object->delivered)
		object->delivered = PyList_New(0);
	if (!entry || !object->delivered || PyList_Append(object->delivered, entry) < 0)
		qp->broken = true;
	Py_XDECREF(entry);
	Py_XDECREF(key);
	Py_XDECREF(data);
	let_go(object);
}

static const struct qp_host host = {
	.may_use = host_may_use,
	.grant = host_grant,
	.take_receive = host_take_receive,
	.may_receive = host_may_receive,
	.may_void = host_may_void,
	.void_key = host_void_key,
	.deliver = host_deliver,
};

/* ---- making ---- */
static int64_t ns_of(double seconds)
{
	return (int64_t)(seconds * 1e9 + 0.5);
}

static PyObject *rc_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
	static char *names[] = {"local",     "remote",         "local_qp",    "remote_qp", "mtu",
	                        "window",    "send_psn",       "receive_psn", "timeout_s", "retry_count",
	                        "rnr_retry", "rnr_timer_code", "resources",   NULL};
	const char *local, *remote;
	Py_ssize_t local_len, remote_len;
	unsigned int local_qp, remote_qp, mtu, window, send_psn, receive_psn, retry, rnr_retry, rnr_code, resources;
	double timeout_s;

	if (!PyArg_ParseTupleAndKeywords(args, keywords, "y#y#IIIIIIdIIII:Rc", names, &local, &local_len, &remote,
	                                 &remote_len, &local_qp, &remote_qp, &mtu, &window, &send_psn, &receive_psn,
	                                 &timeout_s, &retry, &rnr_retry, &rnr_code, &resources))
		return NULL;
	if (local_len != remote_len || (local_len != 4 && local_len != 16) || (local_qp | remote_qp) > 0xFFFFFF ||
	    (send_psn | receive_psn) > 0xFFFFFF || mtu < 256 || mtu > QP_MTU_MAX || mtu & (mtu - 1) || !window ||
	    window > 1u << 22 || !(timeout_s > 0 && timeout_s < 1e6) || rnr_code > 31 || resources > QP_DEPTH_MAX) {
		PyErr_SetString(PyExc_ValueError, "there is no such connection");
		return NULL;
	}
	struct rc_object *object = object_new(type);
	if (!object)
		return NULL;
	struct rc_qp *qp = &object->qp;
	memcpy(qp->local, local, (size_t)local_len);
	memcpy(qp->remote, remote, (size_t)local_len);
	qp->host = &host;
	qp->owner = object;
	qp->ipv6 = local_len == 16;
	qp->local_qp = local_qp;
	qp->remote_qp = remote_qp;
	qp->mtu = mtu;
	qp->window = window;
	qp->retry_count = retry;
	qp->rnr_retry = rnr_retry;
	qp->rnr_timer_code = rnr_code;
	qp->timeout_ns = ns_of(timeout_s);
	qp->resources = resources;
	qp_begin(qp, send_psn, receive_psn);
	return (PyObject *)object;
}

static PyObject *rc_stop(PyObject *self, PyObject *Py_UNUSED(unused))
{
	struct rc_object *object = idle(self);

	if (!object)
		return NULL;
	qp_stop(&object->qp);
	free_done(object);
	Py_RETURN_NONE;
}

static void rc_dealloc(PyObject *self)
{
	struct rc_object *object = (struct rc_object *)self;

	qp_stop(&object->qp);
	free_done(object);
	let_go(object);
	rc_loaned_free(&object->loaned);
	Py_XDECREF(object->delivered);
	object_free(self);
}

/* ---- packets ---- */
static PyObject *rc_receive(PyObject *self, PyObject *args)
{
	struct rc_object *object = idle(self);
	Py_buffer data;
	unsigned int segment, port, access;
	int state;
	double now;

	if (!object ||
	    !PyArg_ParseTuple(args, "Oy*IIiId:receive", &object->host, &data, &segment, &port, &state, &access, &now))
		return NULL;
	object->qp.remote_access = access;
	object->qp.broken = false;
	size_t taken = qp_receive(&object->qp, data.buf, (size_t)data.len, segment ? segment : (uint32_t)data.len, port,
	                          (enum qp_state)state, ns_of(now));
	PyBuffer_Release(&data);
	return PyErr_Occurred() ? NULL : PyLong_FromSize_t(taken);
}

static PyObject *rc_train(PyObject *self, PyObject *args)
{
	struct rc_object *object = idle(self);
	Py_buffer room;
	unsigned int most, port;
	int sends;
	double now;

	if (!object || !PyArg_ParseTuple(args, "Ow*IIpd:train", &object->host, &room, &most, &port, &sends, &now))
		return NULL;
	struct qp_train train = {.most = most, .port = port, .sends = sends};
	object->qp.broken = false;
	size_t len = qp_train(&object->qp, room.buf, (size_t)room.len, &train, ns_of(now));
	PyBuffer_Release(&room);
	if (PyErr_Occurred())
		return NULL;
	return len ? Py_BuildValue("(nII)", (Py_ssize_t)len, (unsigned int)train.segment, (unsigned int)train.count)
	           : Py_NewRef(Py_None);
}

static PyObject *rc_send_trains(PyObject *self, PyObject *args)
{
	struct rc_object *object = idle(self);
	Py_buffer room;
	unsigned int most, train_max, port, count = 0;
	int fd, sends, failed = 0;
	double now;
	size_t len = 0;

	if (!object ||
	    !PyArg_ParseTuple(args, "OiIIw*Ipd:send", &object->host, &fd, &most, &train_max, &room, &port, &sends, &now))
		return NULL;
	struct qp_train train = {.port = port, .sends = sends};
	object->qp.broken = false;
	while (count < most && !failed && !object->qp.broken) {
		train.most = most - count < train_max ? most - count : train_max;
		len = qp_train(&object->qp, room.buf, (size_t)room.len, &train, ns_of(now));
		if (!len)
			break;
		count += train.count;
		failed = rc_send(&object->qp, fd, room.buf, len, &train);
	}
	PyBuffer_Release(&room);
	if (PyErr_Occurred())
		return NULL;
	return Py_BuildValue("(Iinn)", count, -failed, (Py_ssize_t)len, (Py_ssize_t)(train.count > 1 ? train.segment : 0));
}

static PyObject *rc_deadline(PyObject *self, PyObject *Py_UNUSED(unused))
{
	struct rc_object *object = idle(self);

	if (!object)
		return NULL;
	int64_t at = qp_deadline(&object->qp);
	return at ? PyFloat_FromDouble((double)at / 1e9) : Py_NewRef(Py_None);
}

static PyObject *rc_pass(PyObject *self, PyObject *now)
{
	struct rc_object *object = idle(self);
	double seconds = PyFloat_AsDouble(now);

	if (!object || PyErr_Occurred())
		return NULL;
	qp_pass(&object->qp, ns_of(seconds) + 1000); /* rounded twice, it may be a little early */
	Py_RETURN_NONE;
}

/* ---- what has come of it ---- */
static PyObject *refusal_of(struct rc_qp *qp)
{
	if (!qp->refused)
		return Py_NewRef(Py_None);
	qp->refused = false;
	return Py_BuildValue("(iis)", (int)qp->nak - QP_NAK_SEQUENCE + 0x60, (int)qp->receive_status, qp->why);
}

static PyObject *rc_outcome(PyObject *self, PyObject *Py_UNUSED(unused))
{
	struct rc_object *object = idle(self);

	if (!object)
		return NULL;
	struct rc_qp *qp = &object->qp;
	uint32_t finished = free_done(object);
	if (!finished && !qp->failed && !qp->refused && !object->delivered)
		Py_RETURN_NONE;
	enum qp_status status = qp->failed ? qp->status : QP_SUCCESS;
	int index = qp->failed && qp->failed->owned ? -1 : 0; /* counted from the first that is left; -1: an engine's */
	for (const struct qp_flight *each = qp->flights; qp->failed && each != qp->failed; each = each->next)
		index += !each->owned;
	qp->failed = NULL;
	PyObject *delivered = object->delivered ? object->delivered : PyList_New(0);
	object->delivered = NULL;
	return Py_BuildValue("(IiiNN)", (unsigned int)finished, index, (int)status, delivered, refusal_of(qp));
}

static PyObject *rc_give_up(PyObject *self, PyObject *Py_UNUSED(unused))
{
	struct rc_object *object = idle(self);

	if (!object)
		return NULL;
	bool taken = object->qp.message.kind == QP_SENDING && object->receive;
	PyObject *receive = Py_NewRef(taken ? object->receive : Py_None);

	object->qp.message.kind = QP_NONE;
	let_go(object);
	return receive;
}

static PyObject *rc_counts(PyObject *self, PyObject *Py_UNUSED(unused))
{
	const struct rc_qp *qp = &((struct rc_object *)self)->qp;
	const uint64_t counts[] = {qp->packets_sent, qp->packets_received, qp->packets_resent, qp->packets_dropped,
	                           qp->resent};
	const size_t first = sizeof(counts) / sizeof(*counts);
	PyObject *list = PyList_New(0);

	for (size_t i = 0; list && i < first + 2 * (size_t)QP_NAKS; i++) {
		uint64_t value = i < first             ? counts[i]
		                 : i < first + QP_NAKS ? qp->naks_sent[i - first]
		                                       : qp->naks_received[i - first - QP_NAKS];
		PyObject *number = PyLong_FromUnsignedLongLong(value);
		if (!number || PyList_Append(list, number) < 0)
			Py_CLEAR(list);
		Py_XDECREF(number);
	}
	return list;
}

/* ---- requests ---- */
static PyObject *rc_post(PyObject *self, PyObject *args)
{
	struct rc_object *object = idle(self);
	PyObject *entries;
	unsigned long long va = 0, operand = 0, compare = 0;
	unsigned int key = 0;
	int op, solicited = 0, invalidates = 0;
	const char *immediate = NULL;
	Py_ssize_t immediate_len = 0;

	if (!object || !PyArg_ParseTuple(args, "iO|KIKKz#pp:post", &op, &entries, &va, &key, &operand, &compare, &immediate,
	                                 &immediate_len, &invalidates, &solicited))
		return NULL;
	struct posted *posted = malloc(sizeof(*posted));
	if (!posted || op < QP_SEND || op > QP_ADD || (immediate && immediate_len != 4)) {
		free(posted);
		PyErr_SetString(PyExc_ValueError, "there is no such request");
		return NULL;
	}
	memory_open(&posted->memory, entries, op == QP_SEND || op == QP_WRITE ? PyBUF_SIMPLE : PyBUF_WRITABLE);
	posted->memory.bad |= posted->memory.length > QP_LENGTH_MAX;
	posted->flight = (struct qp_flight){
		.op = (enum qp_op)op,
		.solicited = solicited,
		.has_immediate = immediate,
		.invalidates = invalidates,
		.rkey = key,
		.length = posted->memory.bad ? 0 : (uint32_t)posted->memory.length,
		.turn = object->qp.turn - 1,
		.pieces_len = posted->memory.views_len,
		.va = va,
		.operand = operand,
		.compare = compare,
		.pieces = posted->memory.pieces,
	};
	if (immediate)
		memcpy(posted->flight.immediate, immediate, 4);
	qp_post(&object->qp, &posted->flight);
	Py_RETURN_NONE;
}

/* ---- to the engine and back ---- */
static PyObject *rc_lend(PyObject *self, PyObject *args)
{
	struct rc_object *object = idle(self);
	int receive_fd, send_fd;
	unsigned int local_port, remote_port;

	if (!object || !PyArg_ParseTuple(args, "iiII:lend", &receive_fd, &send_fd, &local_port, &remote_port))
		return NULL;
	struct rc_qp *qp = &object->qp;
	struct rc_loaned *loaned = &object->loaned;
	if (qp->flights || qp->done || qp->failed || qp->waits_ns || qp->answers_len || qp->ended || qp->held_len ||
	    object->delivered || qp->message.kind == QP_WRITING)
		Py_RETURN_FALSE;
	*loaned = (struct rc_loaned){.qp = qp,
	                             .receive_fd = receive_fd,
	                             .send_fd = send_fd,
	                             .local_port = local_port,
	                             .remote_port = remote_port,
	                             .train = QP_ENGINE_TRAIN,
	                             .datagrams = malloc(2 * (size_t)RC_DATAGRAM_MAX)};
	if (!loaned->datagrams)
		return PyErr_NoMemory();
	if (qp->message.kind == QP_SENDING) { /* the Send goes on in an engine */
		if (!(loaned->message = malloc(qp->message.placed + 1u))) {
			rc_loaned_free(loaned);
			return PyErr_NoMemory();
		}
		loaned->message_size = qp->message.placed + 1;
		loaned->kept = qp->message.placed;
		qp_gather(qp->receive.pieces, qp->receive.pieces_len, 0, loaned->message, qp->message.placed);
		rc_loaned_room(loaned, loaned->message_size);
	}
	PyObject *receive = object->receive ? Py_NewRef(object->receive) : Py_NewRef(Py_True);
	memory_close(&object->memory);
	Py_CLEAR(object->receive);
	qp->host = &rc_loaned_host;
	qp->owner = loaned;
	object->ready = true;
	return receive;
}

/* Copies a Send, or a part of one, into the next receive. False: none is posted, or the next is too short. */
static bool adopt(struct rc_object *object, uint32_t len)
{
	struct rc_qp *qp = &object->qp;

	if (!host_take_receive(qp) || qp->receive.length < len || qp->receive.bad)
		return false;
	return qp_scatter(qp->receive.pieces, qp->receive.pieces_len, 0, object->loaned.message, len) == len;
}

static PyObject *rc_take_back(PyObject *self, PyObject *given)
{
	struct rc_object *object = idle(self);

	if (!object)
		return NULL;
	struct rc_qp *qp = &object->qp;
	struct rc_loaned *loaned = &object->loaned;
	bool fits = true;
	object->host = given;
	object->ready = false;
	qp->host = &host;
	qp->owner = object;
	qp->plain_max = 0;
	qp->resumes = true;
	if (loaned->whole && (fits = adopt(object, loaned->message_len)))
		host_deliver(qp, loaned->message_len, loaned->solicited, NULL, NULL);
	else if (qp->message.kind == QP_SENDING)
		fits = adopt(object, qp->message.placed);
	PyObject *left = Py_BuildValue("(iy#I)", fits, (const char *)loaned->datagrams + loaned->in_at,
	                               (Py_ssize_t)(loaned->in_tail - loaned->in_at), (unsigned int)loaned->segment);
	rc_loaned_free(loaned);
	if (!PyErr_Occurred())
		return left;
	Py_XDECREF(left);
	return NULL;
}

static PyMethodDef rc_methods[] = {
	{"post", rc_post, METH_VARARGS,
     "post($self, op, entries, va=0, key=0, operand=0, compare=0, immediate=None, invalidates=False,\n"
     "solicited=False, /)\n--\n\nSends a request when its turn comes."},
	{"receive", rc_receive, METH_VARARGS,
     "receive($self, host, data, segment, port, state, access, now, /)\n--\n\nTakes packets in, in datagrams of so\n"
     "many bytes; the bytes taken, up to what is no packet of this connection."},
	{"train", rc_train, METH_VARARGS,
     "train($self, host, room, most, port, sends, now, /)\n--\n\nWrites the next packets, at most so many: (bytes, bytes of each\n"
     "but the last, their number). None: there is none."},
	{"send", rc_send_trains, METH_VARARGS,
     "send($self, host, fd, most, train_max, room, port, sends, now, /)\n--\n\nSends the next packets, at most so many, by a\n"
     "socket: (their number, errno, bytes of the datagram that was not sent, those of each packet of it but the last)."},
	{"outcome", rc_outcome, METH_NOARGS,
     "outcome($self, /)\n--\n\nWhat has come of it: requests acknowledged, the index behind them of one that failed, its\n"
     "status, messages delivered, and the refusal that ends it. None: nothing."},
	{"deadline", rc_deadline, METH_NOARGS, "deadline($self, /)\n--\n\nWhen expire() is to be called, in seconds."},
	{"expire", rc_pass, METH_O, "expire($self, now, /)\n--\n\nTime has passed."},
	{"give_up", rc_give_up, METH_NOARGS,
     "give_up($self, /)\n--\n\nA message that is not whole comes no more; the receive that it has taken, or None."},
	{"stop", rc_stop, METH_NOARGS, "stop($self, /)\n--\n\nNothing is sent or awaited any more, but the last word."},
	{"counts", rc_counts, METH_NOARGS,
     "counts($self, /)\n--\n\nPackets sent, received, resent, dropped; times gone back; NAKs."},
	{"lend", rc_lend, METH_VARARGS,
     "lend($self, receive_fd, send_fd, local_port, remote_port, /)\n--\n\nIs ready for an engine from now on. False: as it is,\n"
     "it cannot be. Else the receive that it had taken, and that is free again, or True."},
	{"take_back", rc_take_back, METH_O,
     "take_back($self, host, /)\n--\n\nGoes on here: whether what has come had a receive, and datagrams that nobody has looked\n"
     "at, with the bytes of each but the last."},
	{0},
};

#define NUMBER(name, what, flags) {#name, what, offsetof(struct rc_object, qp.name), flags, NULL}
static PyMemberDef rc_members[] = {
	NUMBER(depth, T_UINT, 0),
	NUMBER(expected, T_UINT, READONLY),
	NUMBER(answers_len, T_UINT, READONLY),
	NUMBER(begun, T_BOOL, READONLY),
	{0},
};

static PyType_Slot rc_slots[] = {
	{Py_tp_doc, (void *)"A queue pair of InfiniBand's reliable connections: its requester and its responder."},
	{Py_tp_new, rc_new},
	{Py_tp_methods, rc_methods},
	{Py_tp_members, rc_members},
	{Py_tp_dealloc, rc_dealloc},
	{0},
};

PyType_Spec rc_spec = {
	.name = "sidestep.native._engine.Rc",
	.basicsize = sizeof(struct rc_object),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
	.slots = rc_slots,
};
