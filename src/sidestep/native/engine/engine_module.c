/*
 * engine_module.c - the engine for Python: an Engine, and the Loans that it has.
 *
 * What a loan refers to is kept alive by it; while it is lent, Inbound and Outbound refuse other use.
 */
#include "channel_module.h"

#include "crc32c.h"
#include "engine.h"
#include "engine_queue_pairs.h"
#include "framing_module.h"
#include "rc_type.h"

struct state {
	PyTypeObject *channel, *doorbell, *remote_doorbell, *inbound, *outbound; /* of the other modules */
	PyTypeObject *loan, *rc, *queue_pair;
};

struct engine_object {
	PyObject_HEAD
	struct engine *engine;
	PyObject *kept; /* a dict of what the engine looks at */
	struct state *state;
};

struct loan_object {
	PyObject_HEAD
	struct engine_object *owner;
	struct engine_loan *loan; /* NULL: it was taken back */
	PyObject *channel, *doorbell_object;
	struct inbound *inbound; /* NULL: it is not by a stream */
	struct outbound *outbound;
	struct rc_object *rc;
	struct queue_pair *queue_pair;
};

#define NEWS_MAX 1024

static struct engine_object *open_engine(PyObject *self)
{
	struct engine_object *object = (struct engine_object *)self;

	if (object->engine)
		return object;
	PyErr_SetString(PyExc_ValueError, "the engine is closed");
	return NULL;
}

static bool is_a(PyObject *object, PyTypeObject *type, const char *name)
{
	if (PyObject_TypeCheck(object, type))
		return true;
	PyErr_Format(PyExc_TypeError, "%s is a %R, not a %R", name, Py_TYPE(object), type);
	return false;
}

/* ---- Loan ---- */
/* While it is, Python leaves it alone. */
static void wire_is_loaned(struct loan_object *object, bool is)
{
	if (object->queue_pair) {
		object->queue_pair->busy = is;
		object->queue_pair->ready = false;
	} else if (object->rc) {
		object->rc->busy = is;
		object->rc->ready = false;
	} else {
		object->inbound->busy = object->outbound->busy = is;
	}
}

/* Python may use them again. A channel that was closed meanwhile was kept for the engine, as for a view of it. */
static void loan_lets_go(struct loan_object *object)
{
	struct channel *channel = (struct channel *)object->channel;

	object->loan = NULL;
	wire_is_loaned(object, false);
	if (--channel->pieces == 0 && channel->closed)
		channel_unmap(&channel->end);
}

static PyObject *loan_take(PyObject *self, PyObject *Py_UNUSED(unused))
{
	struct loan_object *object = (struct loan_object *)self;
	struct engine_record record;
	int error = 0;

	if (!object->loan) {
		PyErr_SetString(PyExc_ValueError, "it was taken back");
		return NULL;
	}
	enum engine_reason reason = engine_take(object->owner->engine, object->loan, &record, &error);
	loan_lets_go(object);
	return Py_BuildValue("iiy#", (int)reason, error, (const char *)&record, (Py_ssize_t)sizeof(record));
}

static PyObject *loan_look(PyObject *self, PyObject *Py_UNUSED(unused))
{
	struct loan_object *object = (struct loan_object *)self;
	struct engine_record record;

	if (!object->loan) {
		PyErr_SetString(PyExc_ValueError, "it was taken back");
		return NULL;
	}
	engine_look(object->owner->engine, object->loan, &record);
	return PyBytes_FromStringAndSize((const char *)&record, (Py_ssize_t)sizeof(record));
}

static void loan_dealloc(PyObject *self)
{
	struct loan_object *object = (struct loan_object *)self;
	struct engine_record record;
	int error;

	if (object->loan) {
		engine_take(object->owner->engine, object->loan, &record, &error);
		loan_lets_go(object);
	}
	Py_XDECREF((PyObject *)object->owner);
	Py_XDECREF(object->channel);
	Py_XDECREF(object->doorbell_object);
	Py_XDECREF((PyObject *)object->inbound);
	Py_XDECREF((PyObject *)object->outbound);
	Py_XDECREF((PyObject *)object->rc);
	Py_XDECREF((PyObject *)object->queue_pair);
	object_free(self);
}

static PyMethodDef loan_methods[] = {
	{"take", loan_take, METH_NOARGS,
     "take($self, /)\n--\n\nTakes the connection back, wherever it is: (reason, errno, record)."},
	{"look", loan_look, METH_NOARGS, "look($self, /)\n--\n\nThe record as it is now."},
	{0},
};

static PyType_Slot loan_slots[] = {
	{Py_tp_doc, (void *)"A connection that the engine has, or had."},
	{Py_tp_methods, loan_methods},
	{Py_tp_dealloc, loan_dealloc},
	{0},
};

static PyType_Spec loan_spec = {
	.name = "sidestep.native._engine.Loan",
	.basicsize = sizeof(struct loan_object),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
	.slots = loan_slots,
};

/* ---- Engine ---- */
static PyObject *engine_object_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
	static char *none[] = {NULL};

	if (!PyArg_ParseTupleAndKeywords(args, keywords, ":Engine", none))
		return NULL;
	struct engine_object *object = object_new(type);
	if (!object)
		return NULL;
	object->state = PyType_GetModuleState(type);
	object->kept = PyDict_New();
	object->engine = object->kept ? engine_new() : NULL;
	if (object->engine)
		return (PyObject *)object;
	int failed = errno;
	bool memory = !object->kept;
	Py_DECREF(object);
	return memory ? NULL : raise_errno(-failed);
}

PyDoc_STRVAR(
	lend_doc,
	"lend($self, record, channel, words, doorbell, number, /, *wire)\n--\n\n"
	"Gives a connection to the engine, as `layout.pack('engine_record', ...)`; `words` is what was read last by\n"
	"Channel.remote(); the wire is an Inbound, an Outbound and a descriptor, or an Rc, or a KernelQueuePair. A Loan.");

/* Words of an application as channel_remote() in channel_type.c has read them. */
static int words_of(PyObject *tuple, struct channel_side *words)
{
	Py_ssize_t at = 0;

	*words = (struct channel_side){0};
#define STORED(word) \
	words->word = (__typeof__(words->word))PyLong_AsUnsignedLongLong(PyTuple_GetItem(tuple, at++)); \
	if (PyErr_Occurred()) \
		return -1;
	CHANNEL_REMOTE_WORDS(STORED)
#undef STORED
	return 0;
}

/* The wire of a loan, of these objects; they are kept in it. False with an exception. */
static bool way_of(const struct state *state, struct loan_object *loan, PyObject *first, PyObject *second, int fd,
                   struct engine_way *way)
{
	bool fit;

	if (PyObject_TypeCheck(first, state->queue_pair)) {
		struct queue_pair *queue_pair = (struct queue_pair *)first;
		fit = !second && queue_pair->ready && !queue_pair->busy;
		if (fit)
			loan->queue_pair = (struct queue_pair *)Py_NewRef(first);
		*way = (struct engine_way){.verbs = &queue_pair->qp};
	} else if (PyObject_TypeCheck(first, state->rc)) {
		struct rc_object *rc = (struct rc_object *)first;
		fit = !second && rc->ready && !rc->busy;
		if (fit)
			loan->rc = (struct rc_object *)Py_NewRef(first);
		*way = (struct engine_way){.rc = &rc->loaned};
	} else {
		if (!is_a(first, state->inbound, "inbound") || !is_a(second ? second : Py_None, state->outbound, "outbound"))
			return false;
		struct inbound *inbound = (struct inbound *)first;
		struct outbound *outbound = (struct outbound *)second;
		fit = !inbound->busy && !outbound->busy && !inbound->in.markers && !outbound->out.markers &&
		      !framing_out_waiting(&outbound->out);
		if (fit) {
			loan->inbound = (struct inbound *)Py_NewRef(first);
			loan->outbound = (struct outbound *)Py_NewRef(second);
		}
		*way = (struct engine_way){.in = &inbound->in, .out = &outbound->out, .fd = fd};
	}
	if (!fit)
		PyErr_SetString(PyExc_ValueError, "it cannot be lent as it is");
	return fit;
}

static PyObject *engine_object_lend(PyObject *self, PyObject *args)
{
	struct engine_object *object = open_engine(self);
	const char *bytes;
	Py_ssize_t len;
	PyObject *channel, *peer_words, *doorbell_object, *first, *second = NULL;
	unsigned int number;
	int fd = -1;
	struct engine_record record;
	struct channel_side words;
	struct engine_way way;

	if (!object ||
	    !PyArg_ParseTuple(args, "y#OO!OIO|Oi:lend", &bytes, &len, &channel, &PyTuple_Type, &peer_words,
	                      &doorbell_object, &number, &first, &second, &fd) ||
	    words_of(peer_words, &words) < 0)
		return NULL;
	struct state *state = object->state;
	if (!is_a(channel, state->channel, "channel") || !is_a(doorbell_object, state->remote_doorbell, "doorbell"))
		return NULL;
	struct channel *ring = (struct channel *)channel;
	struct remote_doorbell *doorbell = (struct remote_doorbell *)doorbell_object;
	if (len != sizeof(record) || ring->closed || !doorbell->page) {
		PyErr_SetString(PyExc_ValueError, "it cannot be lent as it is");
		return NULL;
	}
	memcpy(&record, bytes, sizeof(record));
	struct loan_object *loan = object_new(state->loan);
	if (!loan)
		return NULL;
	if (!way_of(state, loan, first, second, fd, &way)) {
		Py_DECREF(loan);
		return NULL;
	}
	struct engine_peer_doorbell to = {.word = doorbell->word, .rung = &doorbell->rung, .fd = doorbell->fd};
	ring->room_shown = false;
	loan->loan = engine_lend(object->engine, &record, &ring->end, &words, &to, number, &way, loan);
	if (!loan->loan) {
		int failed = errno;
		Py_DECREF(loan);
		return raise_errno(-failed);
	}
	wire_is_loaned(loan, true);
	ring->pieces++;
	loan->owner = (struct engine_object *)Py_NewRef(self);
	loan->channel = Py_NewRef(channel);
	loan->doorbell_object = Py_NewRef(doorbell_object);
	return (PyObject *)loan;
}

static PyObject *engine_object_returned(PyObject *self, PyObject *Py_UNUSED(unused))
{
	struct engine_object *object = open_engine(self);
	PyObject *list = object ? PyList_New(0) : NULL, *loan;

	if (object)
		engine_clear_notify(object->engine);
	while (list && (loan = engine_returned(object->engine)))
		if (PyList_Append(list, loan) < 0)
			Py_CLEAR(list);
	return list;
}

static PyObject *engine_object_news(PyObject *self, PyObject *Py_UNUSED(unused))
{
	struct engine_object *object = open_engine(self);
	uint32_t numbers[NEWS_MAX];
	bool all;

	if (!object)
		return NULL;
	size_t count = engine_news(object->engine, numbers, NEWS_MAX, &all);
	if (all)
		Py_RETURN_NONE;
	PyObject *list = PyList_New(0);
	for (size_t i = 0; list && i < count; i++) {
		PyObject *number = PyLong_FromUnsignedLong(numbers[i]);
		if (!number || PyList_Append(list, number) < 0)
			Py_CLEAR(list);
		Py_XDECREF(number);
	}
	return list;
}

static PyObject *engine_object_set_doorbell(PyObject *self, PyObject *doorbell_object)
{
	struct engine_object *object = open_engine(self);

	if (object && Py_IsNone(doorbell_object)) {
		engine_doorbell(object->engine, NULL, -1);
		Py_RETURN_NONE;
	}
	if (!object || !is_a(doorbell_object, object->state->doorbell, "doorbell"))
		return NULL;
	struct own_doorbell *doorbell = (struct own_doorbell *)doorbell_object;
	int failed = doorbell->word ? engine_doorbell(object->engine, doorbell->word, doorbell->wait_fd) : -EBADF;
	if (failed)
		return raise_errno(failed);
	if (PyDict_SetItem(object->kept, doorbell_object, Py_None) < 0)
		return NULL;
	Py_RETURN_NONE;
}

static PyObject *engine_object_feed(PyObject *self, PyObject *doorbell_object)
{
	struct engine_object *object = open_engine(self);

	if (!object || !is_a(doorbell_object, object->state->remote_doorbell, "doorbell"))
		return NULL;
	struct remote_doorbell *doorbell = (struct remote_doorbell *)doorbell_object;
	if (!doorbell->hints)
		return raise_errno(-EBADF);
	if (PyDict_SetItem(object->kept, doorbell_object, Py_None) < 0)
		return NULL;
	if (engine_feed_add(object->engine, doorbell->hints, &doorbell->seen) < 0)
		return PyErr_NoMemory();
	Py_RETURN_NONE;
}

static PyObject *engine_object_unfeed(PyObject *self, PyObject *doorbell_object)
{
	struct engine_object *object = open_engine(self);

	if (!object || !is_a(doorbell_object, object->state->remote_doorbell, "doorbell"))
		return NULL;
	engine_feed_remove(object->engine, ((struct remote_doorbell *)doorbell_object)->hints);
	if (PyDict_DelItem(object->kept, doorbell_object) < 0)
		return NULL;
	Py_RETURN_NONE;
}

static PyObject *engine_object_start(PyObject *self, PyObject *args)
{
	struct engine_object *object = open_engine(self);
	PyObject *given = NULL;
	cpu_set_t cpus;

	if (!object || !PyArg_ParseTuple(args, "|O:start", &given))
		return NULL;
	CPU_ZERO(&cpus);
	Py_ssize_t count = given ? PySequence_Size(given) : 0;
	for (Py_ssize_t i = 0; i < count; i++) {
		PyObject *cpu = PySequence_GetItem(given, i);
		long number = cpu ? PyLong_AsLong(cpu) : -1;
		Py_XDECREF(cpu);
		if (number < 0 || number >= CPU_SETSIZE)
			return PyErr_Occurred() ? NULL : raise_errno(-EINVAL);
		CPU_SET((size_t)number, &cpus);
	}
	int failed = count < 0 ? 0 : engine_start(object->engine, count ? &cpus : NULL);
	if (failed)
		return raise_errno(failed);
	return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static PyObject *engine_object_step(PyObject *self, PyObject *args)
{
	struct engine_object *object = open_engine(self);
	int timeout_ms = 0;
	bool any;

	if (!object || !PyArg_ParseTuple(args, "|i:step", &timeout_ms))
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	any = engine_step(object->engine, timeout_ms);
	Py_END_ALLOW_THREADS
	return PyBool_FromLong(any);
}

static PyObject *engine_object_fd(PyObject *self, void *Py_UNUSED(unused))
{
	struct engine_object *object = open_engine(self);

	return object ? PyLong_FromLong(engine_fd(object->engine)) : NULL;
}

/* Loans hold it, so none is left. */
static void engine_object_dealloc(PyObject *self)
{
	struct engine_object *object = (struct engine_object *)self;

	if (object->engine)
		engine_free(object->engine);
	Py_XDECREF(object->kept);
	object_free(self);
}

static PyMethodDef engine_methods[] = {
	{"lend", engine_object_lend, METH_VARARGS, lend_doc},
	{"returned", engine_object_returned, METH_NOARGS,
     "returned($self, /)\n--\n\nThe loans that it has given back since the last time; each is still to be taken."},
	{"news", engine_object_news, METH_NOARGS,
     "news($self, /)\n--\n\nThe numbers of channels with news that are not lent. None: look at all."},
	{"set_doorbell", engine_object_set_doorbell, METH_O,
     "set_doorbell($self, doorbell, /)\n--\n\nThe Doorbell that applications ring from now on; None: it has none."},
	{"feed", engine_object_feed, METH_O,
     "feed($self, doorbell, /)\n--\n\nReads the hints of this RemoteDoorbell from now on."},
	{"unfeed", engine_object_unfeed, METH_O, "unfeed($self, doorbell, /)\n--\n\nEnds that."},
	{"start", engine_object_start, METH_VARARGS,
     "start($self, cpus=(), /)\n--\n\nStarts the thread, on these CPUs; else somebody calls step()."},
	{"step", engine_object_step, METH_VARARGS,
     "step($self, timeout_ms=0, /)\n--\n\nOne turn; whether anything was done. Not beside the thread."},
	{0},
};

static PyGetSetDef engine_getset[] = {
	{"fd", engine_object_fd, NULL, "Readable when something was given back, or has news.", NULL},
	{0},
};

static PyType_Slot engine_slots[] = {
	{Py_tp_doc, (void *)"Engine()\n--\n\nCarries the ordinary messages of connections that are lent to it."},
	{Py_tp_new, engine_object_new},
	{Py_tp_methods, engine_methods},
	{Py_tp_getset, engine_getset},
	{Py_tp_dealloc, engine_object_dealloc},
	{0},
};

static PyType_Spec engine_spec = {
	.name = "sidestep.native._engine.Engine",
	.basicsize = sizeof(struct engine_object),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
	.slots = engine_slots,
};

/* ---- the module ---- */
static PyTypeObject *type_of(const char *module_name, const char *name)
{
	PyObject *module = PyImport_ImportModule(module_name);
	PyObject *type = module ? PyObject_GetAttrString(module, name) : NULL;

	Py_XDECREF(module);
	return (PyTypeObject *)type;
}

static int module_exec(PyObject *module)
{
	struct state *state = PyModule_GetState(module);

	crc32c_init();
	state->channel = type_of("sidestep.native._channel", "Channel");
	state->doorbell = state->channel ? type_of("sidestep.native._channel", "Doorbell") : NULL;
	state->remote_doorbell = state->doorbell ? type_of("sidestep.native._channel", "RemoteDoorbell") : NULL;
	state->inbound = state->remote_doorbell ? type_of("sidestep.native._framing", "Inbound") : NULL;
	state->outbound = state->inbound ? type_of("sidestep.native._framing", "Outbound") : NULL;
	if (!state->outbound || add_type(module, &engine_spec) < 0)
		return -1;
	state->rc = (PyTypeObject *)PyType_FromModuleAndSpec(module, &rc_spec, NULL);
	if (!state->rc || PyModule_AddType(module, state->rc) < 0)
		return -1;
	state->queue_pair = (PyTypeObject *)PyType_FromModuleAndSpec(module, &queue_pair_spec, NULL);
	if (!state->queue_pair || PyModule_AddType(module, state->queue_pair) < 0 || add_type(module, &send_slab_spec) < 0)
		return -1;
	state->loan = (PyTypeObject *)PyType_FromModuleAndSpec(module, &loan_spec, NULL);
	return state->loan ? PyModule_AddType(module, state->loan) : -1;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
	struct state *state = PyModule_GetState(module);

	if (state) {
		Py_VISIT(state->channel);
		Py_VISIT(state->doorbell);
		Py_VISIT(state->remote_doorbell);
		Py_VISIT(state->inbound);
		Py_VISIT(state->outbound);
		Py_VISIT(state->loan);
		Py_VISIT(state->rc);
		Py_VISIT(state->queue_pair);
	}
	return 0;
}

static int module_clear(PyObject *module)
{
	struct state *state = PyModule_GetState(module);

	if (state) {
		Py_CLEAR(state->channel);
		Py_CLEAR(state->doorbell);
		Py_CLEAR(state->remote_doorbell);
		Py_CLEAR(state->inbound);
		Py_CLEAR(state->outbound);
		Py_CLEAR(state->loan);
		Py_CLEAR(state->rc);
		Py_CLEAR(state->queue_pair);
	}
	return 0;
}

static PyModuleDef_Slot module_slots[] = {
	{Py_mod_exec, (void *)module_exec},
	{0},
};

static struct PyModuleDef module_def = {
	PyModuleDef_HEAD_INIT,
	.m_name = "sidestep.native._engine",
	.m_doc = "The engine: ordinary messages of connections between hosts, without Python.",
	.m_size = sizeof(struct state),
	.m_slots = module_slots,
	.m_traverse = module_traverse,
	.m_clear = module_clear,
};

PyMODINIT_FUNC PyInit__engine(void)
{
	return PyModuleDef_Init(&module_def);
}
