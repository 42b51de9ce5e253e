/*
 * channel_bells.c - a Bell is what the peers of a process ring, a RemoteBell somebody else's; bell.h has what they share.
 */
#include "channel_module.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "bell.h"

/* ---- the eventfds of bells ---- */
bool bell_fd_ring(int fd)
{
	uint64_t taken;
	struct iovec into = {&taken, sizeof(taken)};

	return preadv2(fd, &into, 1, -1, RWF_NOWAIT) == sizeof(taken);
}

int bell_fd_make(void)
{
	uint64_t rings = BELL_RINGS;
	int fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);

	if (fd < 0 || (write(fd, &rings, sizeof(rings)) == sizeof(rings) && bell_fd_ring(fd)))
		return fd;
	int failed = errno;
	close(fd);
	errno = failed;
	return -1;
}

/* ---- Bell: ours, rung by those who hold its descriptor and see its word ---- */
struct own_bell {
	PyObject_HEAD
	_Atomic uint64_t *word;
	int fd, page_fd;
	int wait_fd; /* a set that tells the edges of fd, which is always readable; nobody else has it */
	bool asleep;
};

static void own_bell_release(struct own_bell *bell)
{
	if (!bell->word)
		return;
	munmap((void *)bell->word, BELL_WORDS_LEN);
	bell->word = NULL;
	close(bell->wait_fd);
	close(bell->fd);
	close(bell->page_fd);
}

static PyObject *own_bell_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
	static char *none[] = {NULL};

	if (!PyArg_ParseTupleAndKeywords(args, keywords, ":Bell", none))
		return NULL;
	int page = memfd_create("sidestep-bells", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	int fd = page < 0 ? -1 : bell_fd_make();
	int wait_fd = fd < 0 ? -1 : epoll_create1(EPOLL_CLOEXEC);
	struct epoll_event event = {.events = BELL_EDGES};
	void *base = MAP_FAILED;
	if (wait_fd >= 0 && epoll_ctl(wait_fd, EPOLL_CTL_ADD, fd, &event) == 0 && epoll_wait(wait_fd, &event, 1, 0) >= 0 &&
	    ftruncate(page, BELL_WORDS_LEN) == 0)
		base = mmap(NULL, BELL_WORDS_LEN, PROT_READ | PROT_WRITE, MAP_SHARED, page, 0);
	/* from here on only our mapping can write it */
	if (base == MAP_FAILED ||
	    fcntl(page, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) < 0) {
		int failed = errno;
		if (base != MAP_FAILED)
			munmap(base, BELL_WORDS_LEN);
		if (wait_fd >= 0)
			close(wait_fd);
		if (fd >= 0)
			close(fd);
		if (page >= 0)
			close(page);
		return raise_errno(-failed);
	}
	allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
	struct own_bell *bell = (struct own_bell *)alloc(type, 0);
	if (!bell) {
		munmap(base, BELL_WORDS_LEN);
		close(wait_fd);
		close(fd);
		close(page);
		return NULL;
	}
	bell->word = base;
	bell->fd = fd;
	bell->wait_fd = wait_fd;
	bell->page_fd = page;
	return (PyObject *)bell;
}

static struct own_bell *open_bell(PyObject *self)
{
	struct own_bell *bell = (struct own_bell *)self;

	if (bell->word)
		return bell;
	PyErr_SetString(PyExc_ValueError, "the bell is closed");
	return NULL;
}

PyDoc_STRVAR(sleep_doc, "sleep($self, /)\n--\n\nWhoever has news rings from now on: look once more, and only then wait.");

static PyObject *own_bell_sleep(PyObject *self, PyObject *unused)
{
	struct own_bell *bell = open_bell(self);

	(void)unused;
	if (!bell)
		return NULL;
	if (!bell->asleep)
		bell_word_sleep(bell->word);
	bell->asleep = true;
	Py_RETURN_NONE;
}

PyDoc_STRVAR(wake_doc, "wake($self, /)\n--\n\nNobody needs to ring any more: look after this.");

static PyObject *own_bell_wake(PyObject *self, PyObject *unused)
{
	struct own_bell *bell = open_bell(self);

	(void)unused;
	if (!bell)
		return NULL;
	if (bell->asleep)
		bell_word_wake(bell->word);
	bell->asleep = false;
	Py_RETURN_NONE;
}

PyDoc_STRVAR(hear_doc, "hear($self, /)\n--\n\nTakes notice of all rings so far: wait_fd is readable with the next one.");

static PyObject *own_bell_hear(PyObject *self, PyObject *unused)
{
	struct own_bell *bell = open_bell(self);
	struct epoll_event event;

	(void)unused;
	if (!bell)
		return NULL;
	if (epoll_wait(bell->wait_fd, &event, 1, 0) < 0)
		return raise_errno(-errno);
	Py_RETURN_NONE;
}

static PyObject *own_bell_close(PyObject *self, PyObject *unused)
{
	(void)unused;
	own_bell_release((struct own_bell *)self);
	Py_RETURN_NONE;
}

static PyObject *own_bell_fd(PyObject *self, void *unused)
{
	(void)unused;
	return open_bell(self) ? PyLong_FromLong(((struct own_bell *)self)->fd) : NULL;
}

static PyObject *own_bell_wait_fd(PyObject *self, void *unused)
{
	(void)unused;
	return open_bell(self) ? PyLong_FromLong(((struct own_bell *)self)->wait_fd) : NULL;
}

static PyObject *own_bell_page(PyObject *self, void *unused)
{
	(void)unused;
	return open_bell(self) ? PyLong_FromLong(((struct own_bell *)self)->page_fd) : NULL;
}

static void own_bell_dealloc(PyObject *self)
{
	PyTypeObject *type = Py_TYPE(self);

	own_bell_release((struct own_bell *)self);
	((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
	Py_DECREF(type);
}

static PyMethodDef own_bell_methods[] = {
	{"sleep", own_bell_sleep, METH_NOARGS, sleep_doc},
	{"wake", own_bell_wake, METH_NOARGS, wake_doc},
	{"hear", own_bell_hear, METH_NOARGS, hear_doc},
	{"close", own_bell_close, METH_NOARGS, "close($self, /)\n--\n\nCloses its descriptors; twice is allowed."},
	{0},
};

static PyGetSetDef own_bell_getset[] = {
	{"fd", own_bell_fd, NULL, "The eventfd that others ring.", NULL},
	{"wait_fd", own_bell_wait_fd, NULL, "Readable once it has been rung, until hear().", NULL},
	{"page_fd", own_bell_page, NULL, "The page with the word that others see, as line 0.", NULL},
	{0},
};

static PyType_Slot own_bell_slots[] = {
	{Py_tp_doc, (void *)"Bell()\n--\n\nA wake-up target: an eventfd, and a word by which others know whether to ring it."},
	{Py_tp_new, own_bell_new},
	{Py_tp_methods, own_bell_methods},
	{Py_tp_getset, own_bell_getset},
	{Py_tp_dealloc, own_bell_dealloc},
	{0},
};

PyType_Spec own_bell_spec = {
	.name = "sidestep.native._channel.Bell",
	.basicsize = sizeof(struct own_bell),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
	.slots = own_bell_slots,
};

/* ---- RemoteBell: somebody else's ---- */
struct far_bell {
	PyObject_HEAD
	void *page;
	size_t page_len;
	const _Atomic uint64_t *word;
	const struct hint_ring *hints; /* NULL: it gives none */
	uint64_t rung, seen;
	int fd;
};

static void far_bell_release(struct far_bell *bell)
{
	if (bell->page)
		munmap(bell->page, bell->page_len);
	if (bell->fd >= 0)
		close(bell->fd);
	bell->page = NULL;
	bell->fd = -1;
}

static PyObject *far_bell_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
	static char *names[] = {"fd", "page_fd", "index", NULL};
	int fd, page_fd;
	unsigned int index;
	struct stat st;

	if (!PyArg_ParseTupleAndKeywords(args, keywords, "iiI:RemoteBell", names, &fd, &page_fd, &index))
		return NULL;
	if (index >= BELL_PAGE_BELLS || !channel_stays(page_fd) || fstat(page_fd, &st) < 0 || st.st_size < BELL_WORDS_LEN)
		return raise_errno(-EPROTO);
	size_t len = st.st_size >= (off_t)BELL_PAGE_LEN ? BELL_PAGE_LEN : BELL_WORDS_LEN;
	void *page = mmap(NULL, len, PROT_READ, MAP_SHARED, page_fd, 0);
	if (page == MAP_FAILED)
		return raise_errno(-errno);
	int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
	allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
	struct far_bell *bell = copy < 0 ? NULL : (struct far_bell *)alloc(type, 0);
	if (!bell) {
		munmap(page, len);
		return copy < 0 ? raise_errno(-errno) : (close(copy), NULL);
	}
	bell->page = page;
	bell->page_len = len;
	bell->word = bell_word_at(page, index);
	bell->hints = len == BELL_PAGE_LEN ? bell_hints_at(page, index) : NULL;
	bell->rung = UINT64_MAX;
	bell->seen = bell->hints ? atomic_load(&bell->hints->tail) : 0;
	bell->fd = copy;
	return (PyObject *)bell;
}

static struct far_bell *open_far_bell(PyObject *self)
{
	struct far_bell *bell = (struct far_bell *)self;

	if (bell->page)
		return bell;
	PyErr_SetString(PyExc_ValueError, "the bell is closed");
	return NULL;
}

PyDoc_STRVAR(ring_doc, "ring($self, /)\n--\n\nWakes its owner if that sleeps; call after publishing. Whether it was rung.");

static PyObject *far_bell_ring(PyObject *self, PyObject *unused)
{
	struct far_bell *bell = open_far_bell(self);
	(void)unused;
	if (!bell)
		return NULL;
	atomic_thread_fence(memory_order_seq_cst); /* between publishing and reading the word */
	uint64_t word = atomic_load_explicit(bell->word, memory_order_relaxed);
	if (!(word & 0xffff) || word >> 16 == bell->rung)
		Py_RETURN_FALSE;
	bell->rung = word >> 16;
	return PyBool_FromLong(bell_fd_ring(bell->fd)); /* what fails is its owner's doing, and loss */
}

PyDoc_STRVAR(hints_doc, "hints($self, /)\n--\n\n"
                        "The numbers that its owner has named since the last time: its channels with news.\n\n"
                        "None: some were lost, or it names none; look at all.");

static PyObject *far_bell_hints(PyObject *self, PyObject *unused)
{
	struct far_bell *bell = open_far_bell(self);

	(void)unused;
	if (!bell)
		return NULL;
	if (!bell->hints)
		Py_RETURN_NONE;
	uint64_t tail = atomic_load_explicit(&bell->hints->tail, memory_order_acquire);
	if (tail - bell->seen > HINTS) {
		bell->seen = tail;
		Py_RETURN_NONE;
	}
	PyObject *found = PyList_New(0);
	bool lost = false;
	for (; found && bell->seen != tail; bell->seen++) {
		uint64_t entry = atomic_load_explicit(&bell->hints->entry[bell->seen % HINTS], memory_order_acquire);
		if (!hint_valid(entry, bell->seen)) {
			lost = true; /* what it names was published before */
			continue;
		}
		PyObject *number = PyLong_FromUnsignedLong((uint32_t)entry);
		if (!number || PyList_Append(found, number) < 0)
			Py_CLEAR(found);
		Py_XDECREF(number);
	}
	if (found && lost) {
		Py_DECREF(found);
		Py_RETURN_NONE;
	}
	return found;
}

static PyObject *far_bell_news(PyObject *self, void *unused)
{
	struct far_bell *bell = open_far_bell(self);

	(void)unused;
	if (!bell)
		return NULL;
	return PyBool_FromLong(!bell->hints || atomic_load_explicit(&bell->hints->tail, memory_order_acquire) != bell->seen);
}

static PyObject *far_bell_gives_hints(PyObject *self, void *unused)
{
	(void)unused;
	return PyBool_FromLong(((struct far_bell *)self)->hints != NULL);
}

static PyObject *far_bell_close(PyObject *self, PyObject *unused)
{
	(void)unused;
	far_bell_release((struct far_bell *)self);
	Py_RETURN_NONE;
}

static void far_bell_dealloc(PyObject *self)
{
	PyTypeObject *type = Py_TYPE(self);

	far_bell_release((struct far_bell *)self);
	((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
	Py_DECREF(type);
}

static PyMethodDef far_bell_methods[] = {
	{"ring", far_bell_ring, METH_NOARGS, ring_doc},
	{"hints", far_bell_hints, METH_NOARGS, hints_doc},
	{"close", far_bell_close, METH_NOARGS, "close($self, /)\n--\n\nLets go of it; twice is allowed."},
	{0},
};

static PyGetSetDef far_bell_getset[] = {
	{"news", far_bell_news, NULL, "Whether hints() has something to say.", NULL},
	{"gives_hints", far_bell_gives_hints, NULL, "Whether its owner can name channels.", NULL},
	{0},
};

static PyType_Slot far_bell_slots[] = {
	{Py_tp_doc, (void *)"RemoteBell(fd, page_fd, index)\n--\n\n"
	                    "Somebody else's bell, by duplicates of its descriptors. Raises OSError: EPROTO for an impossible page."},
	{Py_tp_new, far_bell_new},
	{Py_tp_methods, far_bell_methods},
	{Py_tp_getset, far_bell_getset},
	{Py_tp_dealloc, far_bell_dealloc},
	{0},
};

PyType_Spec far_bell_spec = {
	.name = "sidestep.native._channel.RemoteBell",
	.basicsize = sizeof(struct far_bell),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
	.slots = far_bell_slots,
};
