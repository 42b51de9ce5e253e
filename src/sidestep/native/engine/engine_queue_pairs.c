/* engine_queue_pairs.c - SendSlab and KernelQueuePair: what an engine needs of a device of the kernel, and what it has left. */
#include "engine_queue_pairs.h"

#include "engine_loan.h"

#include <stdlib.h>

#define RECEIVES_MAX 16384
#define BEFORE_MAX (VERBS_SENDS - VERBS_CHAIN) /* the first requests of an engine have to find room */

/* ---- SendSlab ---- */
static PyObject *send_slab_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
	static char *names[] = {"memory", "lkey", NULL};
	Py_buffer memory;
	unsigned int lkey;

	if (!PyArg_ParseTupleAndKeywords(args, keywords, "w*I:SendSlab", names, &memory, &lkey))
		return NULL;
	struct send_slab *object = object_new(type);
	int failed = object ? verbs_slab_init(&object->slab, memory.buf, (size_t)memory.len, lkey) : 0;
	if (!object || failed) {
		PyBuffer_Release(&memory);
		Py_XDECREF((PyObject *)object);
		return object ? raise_errno(failed) : NULL;
	}
	object->memory = memory;
	return (PyObject *)object;
}

static void send_slab_dealloc(PyObject *self)
{
	struct send_slab *object = (struct send_slab *)self;

	verbs_slab_free(&object->slab);
	if (object->memory.obj)
		PyBuffer_Release(&object->memory);
	object_free(self);
}

static PyObject *send_slab_free(PyObject *self, void *Py_UNUSED(unused))
{
	return PyLong_FromUnsignedLong(verbs_slab_room(&((struct send_slab *)self)->slab));
}

static PyGetSetDef send_slab_getset[] = {
	{"free", send_slab_free, NULL, "Slots that nothing is sent from.", NULL},
	{0},
};

static PyType_Slot send_slab_slots[] = {
	{Py_tp_doc,
     (void
          *)"SendSlab(memory, lkey)\n--\n\nRegistered memory that the queue pairs of a domain send from, for an Engine."},
	{Py_tp_new, send_slab_new},
	{Py_tp_getset, send_slab_getset},
	{Py_tp_dealloc, send_slab_dealloc},
	{0},
};

PyType_Spec send_slab_spec = {
	.name = "sidestep.native._engine.SendSlab",
	.basicsize = sizeof(struct send_slab),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
	.slots = send_slab_slots,
};

/* ---- KernelQueuePair ---- */
static struct queue_pair *idle(PyObject *self)
{
	struct queue_pair *object = (struct queue_pair *)self;

	if (!object->busy)
		return object;
	PyErr_SetString(PyExc_RuntimeError, "an engine has it");
	return NULL;
}

/* A function, or an object of the library, by its address. */
static void *by_address(unsigned long long address)
{
	return (void *)(uintptr_t)address;
}

static bool calls_of(PyObject *tuple, struct verbs_calls *calls)
{
	unsigned long long at[sizeof(*calls) / sizeof(void (*)(void))];

	if (!PyArg_ParseTuple(tuple, "KKKKKK", at, at + 1, at + 2, at + 3, at + 4, at + 5))
		return false;
	for (size_t n = 0; n < sizeof(at) / sizeof(*at); n++) {
		void *function = by_address(at[n]);
		if (!function) {
			PyErr_SetString(PyExc_ValueError, "a function is missing");
			return false;
		}
		memcpy((char *)calls + n * sizeof(function), &function, sizeof(function)); /* POSIX has them alike: dlsym(3) */
	}
	return true;
}

static PyObject *queue_pair_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
	static char *names[] = {"calls", "qp", "cq", "channel", "fd", "slab", "inline_max", "gather_max", NULL};
	PyObject *calls, *slab;
	unsigned long long qp, cq, channel;
	unsigned int inline_max, gather_max;
	int fd;

	if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!KKKiOII:KernelQueuePair", names, &PyTuple_Type, &calls, &qp,
	                                 &cq, &channel, &fd, &slab, &inline_max, &gather_max))
		return NULL;
	if (PyType_GetSlot(Py_TYPE(slab), Py_tp_new) != (void *)(uintptr_t)send_slab_new) {
		PyErr_SetString(PyExc_TypeError, "it sends from a SendSlab");
		return NULL;
	}
	struct queue_pair *object = object_new(type);
	if (!object || !calls_of(calls, &object->qp.calls)) {
		Py_XDECREF((PyObject *)object);
		return NULL;
	}
	object->memory = (struct send_slab *)Py_NewRef(slab);
	object->qp.slab = &object->memory->slab;
	object->qp.qp = by_address(qp);
	object->qp.cq = by_address(cq);
	object->qp.channel = by_address(channel);
	object->qp.fd = fd;
	object->qp.inline_max = inline_max < VERBS_INLINE_MAX ? inline_max : VERBS_INLINE_MAX;
	object->qp.gather_max = gather_max ? gather_max : 1;
	return (PyObject *)object;
}

static bool receive_of(PyObject *item, struct verbs_receive *receive)
{
	unsigned long long wr_id, address;

	if (!PyArg_ParseTuple(item, "KKII", &wr_id, &address, &receive->len, &receive->lkey))
		return false;
	receive->wr_id = wr_id;
	receive->at = by_address(address);
	return true;
}

static bool sends_from_slots(const struct verbs_qp *qp)
{
	for (uint32_t n = 0; n < VERBS_SENDS; n++)
		if (qp->sends[n].slots_len)
			return true;
	return false;
}

static PyObject *queue_pair_begin(PyObject *self, PyObject *args)
{
	struct queue_pair *object = idle(self);
	unsigned long long number, hot_bytes;
	unsigned int before;
	PyObject *list;

	if (!object || !PyArg_ParseTuple(args, "KIO!K:begin", &number, &before, &PyList_Type, &list, &hot_bytes))
		return NULL;
	Py_ssize_t len = PyList_Size(list);
	if (before > BEFORE_MAX || len > RECEIVES_MAX || sends_from_slots(&object->qp)) {
		PyErr_SetString(PyExc_ValueError, "it cannot begin so");
		return NULL;
	}
	struct verbs_receive *receives = calloc((size_t)len + 1, sizeof(*receives));
	if (!receives)
		return PyErr_NoMemory();
	bool fit = true;
	for (Py_ssize_t n = 0; fit && n < len; n++)
		fit = receive_of(PyList_GetItem(list, n), receives + n);
	int failed = fit ? verbs_begin(&object->qp, number, before, receives, (uint32_t)len) : 0;
	free(receives);
	if (!fit)
		return NULL;
	if (failed)
		return PyErr_NoMemory();
	object->qp.hot_bytes = hot_bytes;
	object->ready = true;
	Py_RETURN_NONE;
}

static PyObject *queue_pair_cool(PyObject *self, PyObject *args)
{
	struct queue_pair *object = idle(self);
	unsigned int cold_ms;

	if (!object || !PyArg_ParseTuple(args, "I:cool", &cold_ms))
		return NULL;
	object->qp.copied = 0;
	object->qp.hot_since = loan_clock() + cold_ms * 1000000ll;
	Py_RETURN_NONE;
}

static PyObject *queue_pair_left(PyObject *self, PyObject *Py_UNUSED(unused))
{
	struct queue_pair *object = idle(self);

	if (!object)
		return NULL;
	const struct verbs_qp *qp = &object->qp;
	return PyBytes_FromStringAndSize((const char *)(qp->wc + qp->wc_at),
	                                 (Py_ssize_t)((qp->wc_len - qp->wc_at) * sizeof(*qp->wc)));
}

static PyObject *queue_pair_unfinished(PyObject *self, PyObject *Py_UNUSED(unused))
{
	struct queue_pair *object = idle(self);
	PyObject *list = object ? PyList_New(0) : NULL;

	for (uint64_t n = object ? object->qp.done : 0; list && n != object->qp.sent; n++) {
		PyObject *signaled = PyBool_FromLong(object->qp.sends[n % VERBS_SENDS].signaled);
		if (PyList_Append(list, signaled) < 0)
			Py_CLEAR(list);
		Py_DECREF(signaled);
	}
	return list ? Py_BuildValue("KNK", (unsigned long long)object->qp.done, list,
	                            (unsigned long long)verbs_gathering(&object->qp))
	            : NULL;
}

static PyObject *queue_pair_finish(PyObject *self, PyObject *args)
{
	struct queue_pair *object = idle(self);
	unsigned long long number;

	if (!object || !PyArg_ParseTuple(args, "K:finish", &number))
		return NULL;
	verbs_finish(&object->qp, number);
	Py_RETURN_NONE;
}

static PyObject *queue_pair_release(PyObject *self, PyObject *Py_UNUSED(unused))
{
	struct queue_pair *object = idle(self);

	if (!object)
		return NULL;
	verbs_release(&object->qp);
	object->ready = false;
	Py_RETURN_NONE;
}

/* A loan holds it, so no engine has it. */
static void queue_pair_dealloc(PyObject *self)
{
	struct queue_pair *object = (struct queue_pair *)self;

	if (object->memory)
		verbs_release(&object->qp);
	Py_XDECREF((PyObject *)object->memory);
	object_free(self);
}

static PyMethodDef queue_pair_methods[] = {
	{"begin", queue_pair_begin, METH_VARARGS,
     "begin($self, number, before, receives, hot_bytes, /)\n--\n\nWhat it goes on with: the number of the next request, how many unsignaled\n"
     "ones before it may not be done, what is posted, the oldest first: (wr_id, address, bytes, lkey) of each, and how many bytes\n"
     "copied within a second make it hot, which is told; 0: none do."},
	{"cool", queue_pair_cool, METH_VARARGS,
     "cool($self, cold_ms, /)\n--\n\nIt is not hot, and so long nothing makes it so."},
	{"left", queue_pair_left, METH_NOARGS,
     "left($self, /)\n--\n\nCompletions that it took from the device and did not look at, as `ibv_wc`s."},
	{"unfinished", queue_pair_unfinished, METH_NOARGS,
     "unfinished($self, /)\n--\n\nThe number of the first request that is not done, of each from there on whether its completion tells, and the\n"
     "number behind the last of them that is read from the ring of the application, or 0."},
	{"finish", queue_pair_finish, METH_VARARGS,
     "finish($self, number, /)\n--\n\nThat request is done, or will never be."},
	{"release", queue_pair_release, METH_NOARGS, "release($self, /)\n--\n\nThe device has nothing of it any more."},
	{0},
};

static PyObject *queue_pair_gathered(PyObject *self, void *Py_UNUSED(unused))
{
	const struct verbs_qp *qp = &((struct queue_pair *)self)->qp;

	return PyLong_FromUnsignedLongLong(atomic_load_explicit(&qp->gathered, memory_order_relaxed));
}

static PyObject *queue_pair_hot(PyObject *self, void *Py_UNUSED(unused))
{
	struct queue_pair *object = idle(self);

	return object ? PyBool_FromLong(object->qp.hot_bytes && object->qp.copied >= object->qp.hot_bytes) : NULL;
}

static PyGetSetDef queue_pair_getset[] = {
	{"hot", queue_pair_hot, NULL, "Whether so many bytes as it was begun with were copied.", NULL},
	{"gathered", queue_pair_gathered, NULL, "Bytes that it ever sent from the ring of the application itself.", NULL},
	{0},
};

static PyType_Slot queue_pair_slots[] = {
	{Py_tp_doc,
     (void *)"KernelQueuePair(calls, qp, cq, channel, fd, slab, inline_max, gather_max)\n--\n\n"
             "A queue pair of a device of the kernel, for an Engine; the calls are `struct verbs_calls` by address."},
	{Py_tp_new, queue_pair_new},
	{Py_tp_methods, queue_pair_methods},
	{Py_tp_getset, queue_pair_getset},
	{Py_tp_dealloc, queue_pair_dealloc},
	{0},
};

PyType_Spec queue_pair_spec = {
	.name = "sidestep.native._engine.KernelQueuePair",
	.basicsize = sizeof(struct queue_pair),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
	.slots = queue_pair_slots,
};
