/*
 * channel_doorbells.c - a Doorbell is what the peers of a process ring, a RemoteDoorbell belongs to a peer. See doorbell.h.
 */
#include "channel_module.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "doorbell.h"

/* ---- the eventfds of doorbells ---- */
bool doorbell_fd_ring(int fd)
{
	uint64_t taken;
	struct iovec into = {&taken, sizeof(taken)};

	return preadv2(fd, &into, 1, -1, RWF_NOWAIT) == sizeof(taken);
}

int doorbell_fd_make(void)
{
	uint64_t rings = DOORBELL_RINGS;
	int fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);

	if (fd < 0 || (write(fd, &rings, sizeof(rings)) == sizeof(rings) && doorbell_fd_ring(fd)))
		return fd;
	int failed = errno;
	close(fd);
	errno = failed;
	return -1;
}

/* ---- Doorbell: ours, rung by processes that hold its descriptor and see its word ---- */

static void own_doorbell_release(struct own_doorbell *doorbell)
{
	int *fds[] = {&doorbell->wait_fd, &doorbell->fd, &doorbell->page_fd};

	if (doorbell->word)
		munmap((void *)doorbell->word, DOORBELL_WORDS_LEN);
	doorbell->word = NULL;
	for (int i = 0; i < 3; i++) {
		if (*fds[i] >= 0)
			close(*fds[i]);
		*fds[i] = -1;
	}
}

static PyObject *own_doorbell_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
	static char *none[] = {NULL};

	if (!PyArg_ParseTupleAndKeywords(args, keywords, ":Doorbell", none))
		return NULL;
	struct own_doorbell *doorbell = object_new(type);
	if (!doorbell)
		return NULL;
	int page = doorbell->page_fd = memfd_create("sidestep-doorbells", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	int fd = doorbell->fd = page < 0 ? -1 : doorbell_fd_make();
	int wait_fd = doorbell->wait_fd = fd < 0 ? -1 : epoll_create1(EPOLL_CLOEXEC);
	struct epoll_event event = {.events = DOORBELL_EDGES};
	void *base = MAP_FAILED;
	if (wait_fd >= 0 && epoll_ctl(wait_fd, EPOLL_CTL_ADD, fd, &event) == 0 && epoll_wait(wait_fd, &event, 1, 0) >= 0 &&
	    ftruncate(page, DOORBELL_WORDS_LEN) == 0)
		base = mmap(NULL, DOORBELL_WORDS_LEN, PROT_READ | PROT_WRITE, MAP_SHARED, page, 0);
	doorbell->word = base == MAP_FAILED ? NULL : base;
	/* only our mapping can write it from here on */
	if (!doorbell->word ||
	    fcntl(page, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) < 0) {
		int failed = errno;
		Py_DECREF(doorbell);
		return raise_errno(-failed);
	}
	return (PyObject *)doorbell;
}

static struct own_doorbell *open_doorbell(PyObject *self)
{
	struct own_doorbell *doorbell = (struct own_doorbell *)self;

	if (doorbell->word)
		return doorbell;
	PyErr_SetString(PyExc_ValueError, "the doorbell is closed");
	return NULL;
}

static PyObject *own_doorbell_sleep(PyObject *self, PyObject *Py_UNUSED(unused))
{
	struct own_doorbell *doorbell = open_doorbell(self);

	if (!doorbell)
		return NULL;
	if (!doorbell->asleep)
		doorbell_word_sleep(doorbell->word);
	doorbell->asleep = true;
	Py_RETURN_NONE;
}

static PyObject *own_doorbell_wake(PyObject *self, PyObject *Py_UNUSED(unused))
{
	struct own_doorbell *doorbell = open_doorbell(self);

	if (!doorbell)
		return NULL;
	if (doorbell->asleep)
		doorbell_word_wake(doorbell->word);
	doorbell->asleep = false;
	Py_RETURN_NONE;
}

static PyObject *own_doorbell_acknowledge(PyObject *self, PyObject *Py_UNUSED(unused))
{
	struct own_doorbell *doorbell = open_doorbell(self);
	struct epoll_event event;

	if (!doorbell)
		return NULL;
	if (epoll_wait(doorbell->wait_fd, &event, 1, 0) < 0)
		return raise_errno(-errno);
	Py_RETURN_NONE;
}

static PyObject *own_doorbell_close(PyObject *self, PyObject *Py_UNUSED(unused))
{
	own_doorbell_release((struct own_doorbell *)self);
	Py_RETURN_NONE;
}

static PyObject *own_doorbell_fd(PyObject *self, void *offset)
{
	return open_doorbell(self) ? PyLong_FromLong(*(int *)((char *)self + (size_t)offset)) : NULL;
}

static void own_doorbell_dealloc(PyObject *self)
{
	own_doorbell_release((struct own_doorbell *)self);
	object_free(self);
}

static PyMethodDef own_doorbell_methods[] = {
	{"sleep", own_doorbell_sleep, METH_NOARGS,
     "sleep($self, /)\n--\n\nWhoever has news rings from now on: look once more, and only then wait."},
	{"wake", own_doorbell_wake, METH_NOARGS, "wake($self, /)\n--\n\nNobody needs to ring any more: look after this."},
	{"acknowledge", own_doorbell_acknowledge, METH_NOARGS,
     "acknowledge($self, /)\n--\n\nTakes notice of all rings so far: wait_fd is readable with the next one."},
	{"close", own_doorbell_close, METH_NOARGS, "close($self, /)\n--\n\nCloses its descriptors; twice is allowed."},
	{0},
};

#define FD(member) (void *)offsetof(struct own_doorbell, member)
static PyGetSetDef own_doorbell_getset[] = {
	{"fd", own_doorbell_fd, NULL, "The eventfd that others ring.", FD(fd)},
	{"wait_fd", own_doorbell_fd, NULL, "Readable once it has been rung, until acknowledge().", FD(wait_fd)},
	{"page_fd", own_doorbell_fd, NULL, "The page with the word that others see, as line 0.", FD(page_fd)},
	{0},
};

static PyType_Slot own_doorbell_slots[] = {
	{Py_tp_doc,
     (void *)"Doorbell()\n--\n\nA wake-up target: an eventfd, and a word by which others know whether to ring it."},
	{Py_tp_new, own_doorbell_new},
	{Py_tp_methods, own_doorbell_methods},
	{Py_tp_getset, own_doorbell_getset},
	{Py_tp_dealloc, own_doorbell_dealloc},
	{0},
};

PyType_Spec own_doorbell_spec = {
	.name = "sidestep.native._channel.Doorbell",
	.basicsize = sizeof(struct own_doorbell),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
	.slots = own_doorbell_slots,
};

/* ---- RemoteDoorbell: somebody else's ---- */

static void remote_doorbell_release(struct remote_doorbell *doorbell)
{
	if (doorbell->page)
		munmap(doorbell->page, doorbell->page_len);
	if (doorbell->fd >= 0)
		close(doorbell->fd);
	doorbell->page = NULL;
	doorbell->fd = -1;
}

static PyObject *remote_doorbell_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
	static char *names[] = {"fd", "page_fd", "index", NULL};
	int fd, page_fd;
	unsigned int index;
	struct stat st;

	if (!PyArg_ParseTupleAndKeywords(args, keywords, "iiI:RemoteDoorbell", names, &fd, &page_fd, &index))
		return NULL;
	if (index >= DOORBELLS_PER_PAGE || !channel_stays(page_fd) || fstat(page_fd, &st) < 0 ||
	    st.st_size < DOORBELL_WORDS_LEN)
		return raise_errno(-EPROTO);
	size_t len = st.st_size >= (off_t)DOORBELL_PAGE_LEN ? DOORBELL_PAGE_LEN : DOORBELL_WORDS_LEN;
	struct remote_doorbell *doorbell = object_new(type);
	if (!doorbell)
		return NULL;
	void *page = mmap(NULL, len, PROT_READ, MAP_SHARED, page_fd, 0);
	doorbell->page = page == MAP_FAILED ? NULL : page;
	doorbell->page_len = len;
	doorbell->fd = doorbell->page ? fcntl(fd, F_DUPFD_CLOEXEC, 0) : -1;
	if (doorbell->fd < 0) {
		int failed = errno;
		Py_DECREF(doorbell);
		return raise_errno(-failed);
	}
	doorbell->word = doorbell_word_at(page, index);
	doorbell->hints = len == DOORBELL_PAGE_LEN ? doorbell_hints_at(page, index) : NULL;
	doorbell->rung = UINT64_MAX;
	doorbell->seen = doorbell->hints ? atomic_load(&doorbell->hints->tail) : 0;
	return (PyObject *)doorbell;
}

static struct remote_doorbell *open_remote_doorbell(PyObject *self)
{
	struct remote_doorbell *doorbell = (struct remote_doorbell *)self;

	if (doorbell->page)
		return doorbell;
	PyErr_SetString(PyExc_ValueError, "the doorbell is closed");
	return NULL;
}

static PyObject *remote_doorbell_ring(PyObject *self, PyObject *Py_UNUSED(unused))
{
	struct remote_doorbell *doorbell = open_remote_doorbell(self);
	if (!doorbell)
		return NULL;
	atomic_thread_fence(memory_order_seq_cst); /* fence between publishing and reading the word */
	uint64_t word = atomic_load_explicit(doorbell->word, memory_order_relaxed);
	if (!(word & 0xffff) || word >> 16 == atomic_load_explicit(&doorbell->rung, memory_order_relaxed))
		Py_RETURN_FALSE;
	atomic_store_explicit(&doorbell->rung, word >> 16, memory_order_relaxed);
	return PyBool_FromLong(doorbell_fd_ring(doorbell->fd)); /* a failure is its owner's doing, and loss */
}

PyDoc_STRVAR(hints_doc, "hints($self, /)\n--\n\n"
                        "The numbers that its owner has named since the last time: its channels with news.\n\n"
                        "None: some were lost, or it names none; look at all.");

static PyObject *remote_doorbell_hints(PyObject *self, PyObject *Py_UNUSED(unused))
{
	struct remote_doorbell *doorbell = open_remote_doorbell(self);

	if (!doorbell)
		return NULL;
	if (!doorbell->hints)
		Py_RETURN_NONE;
	uint64_t tail = atomic_load_explicit(&doorbell->hints->tail, memory_order_acquire);
	if (tail - doorbell->seen > HINTS) {
		doorbell->seen = tail;
		Py_RETURN_NONE;
	}
	PyObject *found = PyList_New(0);
	bool lost = false;
	for (; found && doorbell->seen != tail; doorbell->seen++) {
		uint64_t entry = atomic_load_explicit(&doorbell->hints->entry[doorbell->seen % HINTS], memory_order_acquire);
		if (!hint_valid(entry, doorbell->seen)) {
			lost = true; /* the connections that it names were published before */
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

static PyObject *remote_doorbell_news(PyObject *self, void *Py_UNUSED(unused))
{
	struct remote_doorbell *doorbell = open_remote_doorbell(self);

	if (!doorbell)
		return NULL;
	return PyBool_FromLong(!doorbell->hints ||
	                       atomic_load_explicit(&doorbell->hints->tail, memory_order_acquire) != doorbell->seen);
}

static PyObject *remote_doorbell_gives_hints(PyObject *self, void *Py_UNUSED(unused))
{
	return PyBool_FromLong(((struct remote_doorbell *)self)->hints != NULL);
}

static PyObject *remote_doorbell_close(PyObject *self, PyObject *Py_UNUSED(unused))
{
	remote_doorbell_release((struct remote_doorbell *)self);
	Py_RETURN_NONE;
}

static void remote_doorbell_dealloc(PyObject *self)
{
	remote_doorbell_release((struct remote_doorbell *)self);
	object_free(self);
}

static PyMethodDef remote_doorbell_methods[] = {
	{"ring", remote_doorbell_ring, METH_NOARGS,
     "ring($self, /)\n--\n\nWakes its owner if that sleeps; call after publishing. Whether it was rung."},
	{"hints", remote_doorbell_hints, METH_NOARGS, hints_doc},
	{"close", remote_doorbell_close, METH_NOARGS, "close($self, /)\n--\n\nLets go of it; twice is allowed."},
	{0},
};

static PyGetSetDef remote_doorbell_getset[] = {
	{"news", remote_doorbell_news, NULL, "Whether hints() has something to say.", NULL},
	{"gives_hints", remote_doorbell_gives_hints, NULL, "Whether its owner can name channels.", NULL},
	{0},
};

static PyType_Slot remote_doorbell_slots[] = {
	{Py_tp_doc,
     (void *)"RemoteDoorbell(fd, page_fd, index)\n--\n\n"
             "A peer's doorbell, by duplicates of its descriptors. Raises OSError: EPROTO for an impossible page."},
	{Py_tp_new, remote_doorbell_new},
	{Py_tp_methods, remote_doorbell_methods},
	{Py_tp_getset, remote_doorbell_getset},
	{Py_tp_dealloc, remote_doorbell_dealloc},
	{0},
};

PyType_Spec remote_doorbell_spec = {
	.name = "sidestep.native._channel.RemoteDoorbell",
	.basicsize = sizeof(struct remote_doorbell),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
	.slots = remote_doorbell_slots,
};
