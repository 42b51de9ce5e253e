/*
 * channel_module.c - sidestep.native._channel: the channel for Python, in the limited API.
 *
 * A Channel is one end of a mapped segment; a Bell is what its peer rings, a RemoteBell the peer's. Nothing here blocks.
 * Neither is made for several threads; the interpreter's lock makes each single call whole.
 *
 * The views that readable() and writable() give lie in the segment, which stays mapped until the last of them is gone.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030b0000
#endif
#include <Python.h>

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include "bell.h"
#include "channel.h"
#include "layout.h"

struct channel {
	PyObject_HEAD
	struct channel_end end;
	_Atomic uint64_t own_tail, own_head, head_seen; /* out of the peer's reach */
	PyTypeObject *piece_type;
	Py_ssize_t pieces; /* views in use */
	bool closed;
};

/* A stretch of a ring, for as long as somebody has a view of it. */
struct piece {
	PyObject_HEAD
	struct channel *channel;
	struct iovec where;
	bool read_only;
};

static PyObject *raise_errno(int negative)
{
	errno = -negative;
	return PyErr_SetFromErrno(PyExc_OSError);
}

static struct channel *mapped(PyObject *self)
{
	struct channel *channel = (struct channel *)self;

	if (!channel->closed)
		return channel;
	PyErr_SetString(PyExc_ValueError, "the channel is closed");
	return NULL;
}

/* Exact, unlike channel_tx_unread(), for a Channel has one user: bytes, or -ECONNRESET. */
static int64_t unread_of(const struct channel *channel)
{
	int64_t space = channel_tx_space(&channel->end, (size_t)channel->end.tx_size + 1);

	return space < 0 ? space : (int64_t)channel->end.tx_size - space;
}

static PyObject *number_or_raise(int64_t value)
{
	return value < 0 ? raise_errno((int)value) : PyLong_FromLongLong(value);
}

/* ---- Channel ---- */
PyDoc_STRVAR(write_doc, "write($self, data, /)\n--\n\n"
                        "Puts as much of `data` into the sending ring as fits; the number of bytes taken, 0 if it is full.\n\n"
                        "Raises ConnectionResetError if the peer's count of what it has read is impossible.");

static PyObject *channel_write(PyObject *self, PyObject *data)
{
	Py_buffer buffer;

	/* first the buffer, which may run Python code, then the look at the mapping */
	if (PyObject_GetBuffer(data, &buffer, PyBUF_SIMPLE) < 0)
		return NULL;
	struct channel *channel = mapped(self);
	int64_t taken = -1;
	if (channel) {
		taken = channel_tx_space(&channel->end, (size_t)buffer.len);
		if (taken < 0) {
			raise_errno((int)taken);
		} else {
			if (taken > buffer.len)
				taken = buffer.len;
			if (taken > 0) {
				channel_tx_put(&channel->end, 0, buffer.buf, (size_t)taken);
				channel_tx_publish(&channel->end, (size_t)taken);
			}
		}
	}
	PyBuffer_Release(&buffer);
	return taken < 0 ? NULL : PyLong_FromLongLong(taken);
}

PyDoc_STRVAR(read_doc, "read($self, size=-1, /)\n--\n\n"
                       "Takes at most `size` bytes, or all that are there, out of the receiving ring; b'' if it is empty.\n\n"
                       "Raises ConnectionResetError if the peer's count of what it has written is impossible.");

static PyObject *channel_read(PyObject *self, PyObject *args)
{
	Py_ssize_t size = -1;

	if (!PyArg_ParseTuple(args, "|n:read", &size))
		return NULL;
	struct channel *channel = mapped(self);
	if (!channel)
		return NULL;
	int64_t there = channel_rx_avail(&channel->end);
	if (there < 0)
		return raise_errno((int)there);
	if (size >= 0 && there > size)
		there = size;
	PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)there);
	if (!bytes)
		return NULL;
	if (there > 0) {
		char *to = PyBytes_AsString(bytes);
		channel_rx_get(&channel->end, 0, to, (size_t)there);
		channel_rx_consume(&channel->end, (size_t)there);
	}
	return bytes;
}

PyDoc_STRVAR(trim_doc, "trim($self, /)\n--\n\n"
                       "Gives the pages of the sending ring back to the kernel. Raises ValueError unless the ring is empty.");

static PyObject *channel_give_back(PyObject *self, PyObject *unused)
{
	(void)unused;
	struct channel *channel = mapped(self);
	if (!channel)
		return NULL;
	int64_t unread = unread_of(channel);
	if (unread < 0)
		return raise_errno((int)unread);
	if (unread > 0) {
		PyErr_SetString(PyExc_ValueError, "the sending ring holds bytes that the peer has not read");
		return NULL;
	}
	channel_trim(&channel->end);
	Py_RETURN_NONE;
}

PyDoc_STRVAR(close_doc, "close($self, /)\n--\n\n"
                        "Unmaps the segment, once no view of its rings is left; closing twice is allowed.");

static PyObject *channel_close(PyObject *self, PyObject *unused)
{
	struct channel *channel = (struct channel *)self;

	(void)unused;
	channel->closed = true;
	if (!channel->pieces)
		channel_unmap(&channel->end);
	Py_RETURN_NONE;
}

/* ---- views of the rings ---- */
static int piece_getbuffer(PyObject *self, Py_buffer *view, int flags)
{
	struct piece *piece = (struct piece *)self;

	return PyBuffer_FillInfo(view, self, piece->where.iov_base, (Py_ssize_t)piece->where.iov_len, piece->read_only, flags);
}

static void piece_dealloc(PyObject *self)
{
	struct piece *piece = (struct piece *)self;
	struct channel *channel = piece->channel;
	PyTypeObject *type = Py_TYPE(self);

	((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
	Py_DECREF(type);
	if (--channel->pieces == 0 && channel->closed)
		channel_unmap(&channel->end);
	Py_DECREF(channel);
}

static PyObject *piece_view(struct channel *channel, struct iovec where, bool read_only)
{
	allocfunc alloc = (allocfunc)PyType_GetSlot(channel->piece_type, Py_tp_alloc);
	struct piece *piece = (struct piece *)alloc(channel->piece_type, 0);

	if (!piece)
		return NULL;
	Py_INCREF((PyObject *)channel);
	channel->pieces++;
	piece->channel = channel;
	piece->where = where;
	piece->read_only = read_only;
	PyObject *view = PyMemoryView_FromObject((PyObject *)piece);
	Py_DECREF(piece);
	return view;
}

static PyObject *pieces_tuple(struct channel *channel, const struct iovec *pieces, int len, bool read_only)
{
	PyObject *tuple = PyTuple_New(len);

	for (int i = 0; tuple && i < len; i++) {
		PyObject *view = piece_view(channel, pieces[i], read_only);
		if (!view || PyTuple_SetItem(tuple, i, view) < 0) {
			Py_DECREF(tuple);
			return NULL;
		}
	}
	return tuple;
}

PyDoc_STRVAR(readable_doc, "readable($self, skip=0, /)\n--\n\n"
                           "Read-only views of what can be read from byte `skip` on, in the ring: none, one, or two where it\n"
                           "wraps.\n\n"
                           "Raises ConnectionResetError if the peer's count of what it has written is impossible.");

static PyObject *channel_readable(PyObject *self, PyObject *args)
{
	struct channel *channel = mapped(self);
	struct iovec pieces[2];
	Py_ssize_t skip = 0;
	int len = 0;

	if (!channel || !PyArg_ParseTuple(args, "|n:readable", &skip))
		return NULL;
	int64_t there = channel_rx_avail(&channel->end);
	if (there < 0)
		return raise_errno((int)there);
	if (skip < 0 || skip > there) {
		PyErr_Format(PyExc_ValueError, "%zd bytes, where there are %lld", skip, (long long)there);
		return NULL;
	}
	if (skip < there)
		len = channel_rx_pieces(&channel->end, (size_t)skip, (size_t)(there - skip), pieces);
	return pieces_tuple(channel, pieces, len, true);
}

PyDoc_STRVAR(receiving_doc, "ring($self, /)\n--\n\n"
                       "A read-only view of all the memory of the receiving ring, to register it; it says nothing of what is in it.");

static PyObject *channel_ring(PyObject *self, PyObject *unused)
{
	struct channel *channel = mapped(self);

	(void)unused;
	if (!channel)
		return NULL;
	return piece_view(channel, (struct iovec){channel->end.rx_data, channel->end.rx_size}, true);
}

PyDoc_STRVAR(writable_doc, "writable($self, /)\n--\n\n"
                           "Views of the room for writing, in the ring: none, one, or two where it wraps.\n\n"
                           "Raises ConnectionResetError if the peer's count of what it has read is impossible.");

static PyObject *channel_writable(PyObject *self, PyObject *unused)
{
	struct channel *channel = mapped(self);
	struct iovec pieces[2];

	(void)unused;
	if (!channel)
		return NULL;
	int64_t room = channel_tx_space(&channel->end, (size_t)channel->end.tx_size + 1);
	if (room < 0)
		return raise_errno((int)room);
	return pieces_tuple(channel, pieces, room ? channel_tx_pieces(&channel->end, (size_t)room, pieces) : 0, false);
}

/* A count of bytes that the caller has moved; -1 with an exception if there are not so many. */
static Py_ssize_t moved(PyObject *count, int64_t most)
{
	Py_ssize_t value = PyLong_AsSsize_t(count);

	if (value == -1 && PyErr_Occurred())
		return -1;
	if (most < 0) {
		raise_errno((int)most);
		return -1;
	}
	if (value < 0 || value > most) {
		PyErr_Format(PyExc_ValueError, "%zd bytes, where there are %lld", value, (long long)most);
		return -1;
	}
	return value;
}

PyDoc_STRVAR(consume_doc, "consume($self, count, /)\n--\n\n"
                          "Gives the first `count` readable bytes back to the peer as room; views of them mean nothing now.");

static PyObject *channel_consume(PyObject *self, PyObject *count)
{
	struct channel *channel = mapped(self);

	if (!channel)
		return NULL;
	Py_ssize_t len = moved(count, channel_rx_avail(&channel->end));
	if (len < 0)
		return NULL;
	channel_rx_consume(&channel->end, (size_t)len);
	Py_RETURN_NONE;
}

PyDoc_STRVAR(commit_doc, "commit($self, count, /)\n--\n\n"
                         "Shows the peer the first `count` bytes of the room, which have been filled.");

static PyObject *channel_commit(PyObject *self, PyObject *count)
{
	struct channel *channel = mapped(self);

	if (!channel)
		return NULL;
	Py_ssize_t len = moved(count, channel_tx_space(&channel->end, (size_t)channel->end.tx_size + 1));
	if (len < 0)
		return NULL;
	channel_tx_publish(&channel->end, (size_t)len);
	Py_RETURN_NONE;
}

/* ---- the words of the two sides ---- */
PyDoc_STRVAR(remote_doc, "remote($self, /)\n--\n\n"
                         "The peer's words, each read once, as a tuple in the order of `layout.Words`.");

static PyObject *channel_remote(PyObject *self, PyObject *unused)
{
	struct channel *channel = mapped(self);

	(void)unused;
	if (!channel)
		return NULL;
	const struct channel_side *remote = channel->end.remote;
#define LOADED(word) (uint64_t)atomic_load_explicit(&remote->word, memory_order_acquire),
	/* in this order: who finds that a direction has ended finds all that it held */
	uint64_t words[] = {
		CHANNEL_REMOTE_WORDS(LOADED) atomic_load_explicit(&channel->end.rx_peer_line->tail, memory_order_acquire)};
	Py_ssize_t len = sizeof(words) / sizeof(*words);
	PyObject *found = PyTuple_New(len);

	for (Py_ssize_t i = 0; found && i < len; i++) {
		PyObject *value = PyLong_FromUnsignedLongLong(words[i]);
		if (!value || PyTuple_SetItem(found, i, value) < 0)
			Py_CLEAR(found);
	}
	return found;
}

/* A word by its name, for tests and tools that look at a segment through a mapping of their own, too. */
struct place {
	const char *name;
	size_t offset, size;
};
#define PLACE(record, path) {#path, offsetof(struct record, path), sizeof(((struct record *)0)->path)},

PyDoc_STRVAR(publish_doc, "publish($self, name, value, /)\n--\n\n"
                          "Stores one of our words, by its name; `notice` and `handed_on` add bits.");

static PyObject *channel_publish(PyObject *self, PyObject *args)
{
	static const struct place words[] = {CHANNEL_SIDE_WORDS(PLACE, channel_side)};
	struct channel *channel = mapped(self);
	const char *name;
	unsigned long long value;

	if (!channel || !PyArg_ParseTuple(args, "sK:publish", &name, &value))
		return NULL;
	struct channel_side *local = channel->end.local;
	if (strcmp(name, "want_space") == 0) {
		atomic_store(&channel->end.tx_line->want_space, (uint32_t)value);
		Py_RETURN_NONE;
	}
	for (size_t i = 0; i < sizeof(words) / sizeof(*words); i++) {
		if (strcmp(name, words[i].name) != 0)
			continue;
		void *word = (uint8_t *)local + words[i].offset;
		if (word == &local->notice || word == &local->handed_on)
			atomic_fetch_or((_Atomic uint32_t *)word, (uint32_t)value);
		else if (words[i].size == sizeof(uint32_t))
			atomic_store((_Atomic uint32_t *)word, (uint32_t)value);
		else
			atomic_store((_Atomic uint64_t *)word, (uint64_t)value);
		Py_RETURN_NONE;
	}
	PyErr_Format(PyExc_KeyError, "%s", name);
	return NULL;
}

PyDoc_STRVAR(decide_doc, "decide($self, sending, how, /)\n--\n\n"
                         "Decides how the first round of a direction ends (tx_back), ours or, with sending False, the\n"
                         "peer's, unless that is decided: what stands. 0: the word makes no sense.");

static PyObject *channel_decide_how(PyObject *self, PyObject *args)
{
	struct channel *channel = mapped(self);
	int sending;
	unsigned int how;

	if (!channel || !PyArg_ParseTuple(args, "pI:decide", &sending, &how))
		return NULL;
	return PyLong_FromUnsignedLong(
		channel_decide(sending ? &channel->end.local->tx_back : &channel->end.remote->tx_back, 1, how & 3));
}

static PyObject *get_sent(PyObject *self, void *unused)
{
	(void)unused;
	return PyLong_FromUnsignedLongLong(atomic_load(&((struct channel *)self)->own_tail));
}

static PyObject *get_received(PyObject *self, void *unused)
{
	(void)unused;
	return PyLong_FromUnsignedLongLong(atomic_load(&((struct channel *)self)->own_head));
}

static PyObject *get_wanted(PyObject *self, void *unused)
{
	struct channel *channel = mapped(self);

	(void)unused;
	if (!channel)
		return NULL;
	atomic_thread_fence(memory_order_seq_cst); /* between publishing head and reading want_space */
	return PyBool_FromLong(atomic_load_explicit(&channel->end.rx_peer_line->want_space, memory_order_relaxed) != 0);
}

static PyObject *channel_enter(PyObject *self, PyObject *unused)
{
	(void)unused;
	if (!mapped(self))
		return NULL;
	Py_INCREF(self);
	return self;
}

static PyObject *channel_exit(PyObject *self, PyObject *args)
{
	(void)args;
	return channel_close(self, NULL);
}

static PyObject *get_avail(PyObject *self, void *unused)
{
	(void)unused;
	struct channel *channel = mapped(self);
	return channel ? number_or_raise(channel_rx_avail(&channel->end)) : NULL;
}

static PyObject *get_space(PyObject *self, void *unused)
{
	(void)unused;
	struct channel *channel = mapped(self);
	return channel ? number_or_raise(channel_tx_space(&channel->end, (size_t)channel->end.tx_size + 1)) : NULL;
}

static PyObject *get_unread(PyObject *self, void *unused)
{
	(void)unused;
	struct channel *channel = mapped(self);
	return channel ? number_or_raise(unread_of(channel)) : NULL;
}

static PyObject *get_tx_size(PyObject *self, void *unused)
{
	(void)unused;
	return PyLong_FromUnsignedLong(((struct channel *)self)->end.tx_size);
}

static PyObject *get_rx_size(PyObject *self, void *unused)
{
	(void)unused;
	return PyLong_FromUnsignedLong(((struct channel *)self)->end.rx_size);
}

static PyObject *get_closed(PyObject *self, void *unused)
{
	(void)unused;
	return PyBool_FromLong(((struct channel *)self)->closed);
}

static void channel_dealloc(PyObject *self)
{
	PyTypeObject *type = Py_TYPE(self);

	channel_unmap(&((struct channel *)self)->end);
	Py_XDECREF((PyObject *)((struct channel *)self)->piece_type);
	((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
	Py_DECREF(type); /* instances of heap types hold their type */
}

static PyMethodDef channel_methods[] = {
	{"write", channel_write, METH_O, write_doc},
	{"read", channel_read, METH_VARARGS, read_doc},
	{"ring", channel_ring, METH_NOARGS, receiving_doc},
	{"readable", channel_readable, METH_VARARGS, readable_doc},
	{"consume", channel_consume, METH_O, consume_doc},
	{"writable", channel_writable, METH_NOARGS, writable_doc},
	{"commit", channel_commit, METH_O, commit_doc},
	{"remote", channel_remote, METH_NOARGS, remote_doc},
	{"publish", channel_publish, METH_VARARGS, publish_doc},
	{"decide", channel_decide_how, METH_VARARGS, decide_doc},
	{"trim", channel_give_back, METH_NOARGS, trim_doc},
	{"close", channel_close, METH_NOARGS, close_doc},
	{"__enter__", channel_enter, METH_NOARGS, NULL},
	{"__exit__", channel_exit, METH_VARARGS, NULL},
	{0},
};

static PyGetSetDef channel_getset[] = {
	{"avail", get_avail, NULL, "Bytes that can be read now.", NULL},
	{"space", get_space, NULL, "Bytes that can be written now.", NULL},
	{"unread", get_unread, NULL, "Bytes written that the peer has not read.", NULL},
	{"tx_size", get_tx_size, NULL, "Size of the sending ring in bytes.", NULL},
	{"rx_size", get_rx_size, NULL, "Size of the receiving ring in bytes.", NULL},
	{"sent", get_sent, NULL, "Bytes ever written.", NULL},
	{"received", get_received, NULL, "Bytes ever read.", NULL},
	{"wanted", get_wanted, NULL, "Whether the peer waits for room: ring its bell after making some.", NULL},
	{"closed", get_closed, NULL, "Whether the segment has been unmapped.", NULL},
	{0},
};

PyDoc_STRVAR(channel_doc, "One end of a mapped segment; made by map(). A context manager that closes it.\n\n"
                          "avail, space and unread raise ConnectionResetError where the peer's counts are impossible.");

static PyType_Slot channel_slots[] = {
	{Py_tp_doc, (void *)channel_doc},
	{Py_tp_methods, channel_methods},
	{Py_tp_getset, channel_getset},
	{Py_tp_dealloc, channel_dealloc},
	{0},
};

static PyType_Spec channel_spec = {
	.name = "sidestep.native._channel.Channel",
	.basicsize = sizeof(struct channel),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
	.slots = channel_slots,
};

static PyType_Slot piece_slots[] = {
	{Py_bf_getbuffer, (void *)piece_getbuffer},
	{Py_tp_dealloc, piece_dealloc},
	{0},
};

static PyType_Spec piece_spec = {
	.name = "sidestep.native._channel.Piece",
	.basicsize = sizeof(struct piece),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
	.slots = piece_slots,
};

/* ---- the eventfds of bells ---- */
static bool bell_fd_ring(int fd)
{
	uint64_t taken;
	struct iovec into = {&taken, sizeof(taken)};

	return preadv2(fd, &into, 1, -1, RWF_NOWAIT) == sizeof(taken);
}

static int bell_fd_make(void)
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

static PyType_Spec own_bell_spec = {
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

static PyType_Spec far_bell_spec = {
	.name = "sidestep.native._channel.RemoteBell",
	.basicsize = sizeof(struct far_bell),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
	.slots = far_bell_slots,
};

/* ---- the module ---- */
struct state {
	PyTypeObject *channel_type;
	PyTypeObject *piece_type;
};

PyDoc_STRVAR(create_doc, "create($module, tx_size, rx_size, /)\n--\n\n"
                         "Makes a sealed segment and returns its close-on-exec descriptor, which the caller closes.\n\n"
                         "tx_size is the ring of side 0, rx_size that of side 1, in bytes: powers of two, 4096 to 64 MiB.\n"
                         "Raises ValueError for other sizes and OSError where the kernel gives no memory file.");

static PyObject *module_create(PyObject *module, PyObject *args)
{
	unsigned long tx_size, rx_size;
	PyObject *tx, *rx;

	(void)module;
	if (!PyArg_ParseTuple(args, "O!O!:create", &PyLong_Type, &tx, &PyLong_Type, &rx))
		return NULL;
	tx_size = PyLong_AsUnsignedLong(tx);
	rx_size = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLong(rx);
	if (PyErr_Occurred()) { /* negative or huge: as wrong as any other size */
		if (!PyErr_ExceptionMatches(PyExc_OverflowError))
			return NULL;
		PyErr_Clear();
		tx_size = 0;
	}
	int fd = tx_size > CHANNEL_RING_MAX || rx_size > CHANNEL_RING_MAX
	             ? -EINVAL
	             : channel_create((uint32_t)tx_size, (uint32_t)rx_size);
	if (fd == -EINVAL) {
		PyErr_Format(PyExc_ValueError, "ring sizes must be powers of two from %u to %u, not %R and %R", CHANNEL_RING_MIN,
		             CHANNEL_RING_MAX, tx, rx);
		return NULL;
	}
	return fd < 0 ? raise_errno(fd) : PyLong_FromLong(fd);
}

PyDoc_STRVAR(map_doc, "map($module, fd, side, /)\n--\n\n"
                      "Maps the segment in `fd` as side 0, which offered it, or 1, which claimed it.\n\n"
                      "The descriptor stays the caller's and may be closed at once. Raises OSError: EPROTO where seals, size,\n"
                      "version or geometry are not those of a segment, EINVAL where `fd` is no memory file at all.");

static PyObject *module_map(PyObject *module, PyObject *args)
{
	struct state *state = PyModule_GetState(module);
	int fd, side;

	if (!PyArg_ParseTuple(args, "ii:map", &fd, &side))
		return NULL;
	if (side != 0 && side != 1) {
		PyErr_Format(PyExc_ValueError, "side must be 0 or 1, not %d", side);
		return NULL;
	}
	allocfunc alloc = (allocfunc)PyType_GetSlot(state->channel_type, Py_tp_alloc);
	struct channel *channel = (struct channel *)alloc(state->channel_type, 0); /* zeroed */
	if (!channel)
		return NULL;
	int failed = channel_map(&channel->end, fd, side, &channel->own_tail, &channel->own_head, &channel->head_seen);
	if (failed) {
		Py_DECREF(channel);
		return raise_errno(failed);
	}
	Py_INCREF((PyObject *)state->piece_type);
	channel->piece_type = state->piece_type;
	return (PyObject *)channel;
}

#define WORD(path) PLACE(channel_segment, path)
#define AT(at, name) WORD(at.name)
#define BOTH(list, at) list(AT, at[0]) list(AT, at[1])
static const struct place words[] = {WORD(magic) WORD(version) WORD(ring_size[0]) WORD(ring_size[1])
	BOTH(CHANNEL_SIDE_WORDS, side) BOTH(CHANNEL_PRODUCER_WORDS, producer) BOTH(CHANNEL_CONSUMER_WORDS, consumer)};

static int module_exec(PyObject *module)
{
	struct state *state = PyModule_GetState(module);
	PyObject *type = PyType_FromModuleAndSpec(module, &channel_spec, NULL);
	PyType_Spec *bells[] = {&own_bell_spec, &far_bell_spec};

	state->channel_type = (PyTypeObject *)type;
	if (!type || PyModule_AddType(module, state->channel_type) < 0 ||
	    PyModule_AddIntConstant(module, "HEADER_SIZE", CHANNEL_HEADER_SIZE) < 0 ||
	    PyModule_AddIntConstant(module, "RING_MIN", CHANNEL_RING_MIN) < 0 ||
	    PyModule_AddIntConstant(module, "RING_MAX", CHANNEL_RING_MAX) < 0)
		return -1;
	state->piece_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &piece_spec, NULL);
	if (!state->piece_type)
		return -1;
	for (int i = 0; i < 2; i++) {
		PyObject *bell_type = PyType_FromModuleAndSpec(module, bells[i], NULL);
		int failed_type = bell_type ? PyModule_AddType(module, (PyTypeObject *)bell_type) : -1;
		Py_XDECREF(bell_type);
		if (failed_type < 0)
			return -1;
	}
	PyObject *table = PyDict_New();
	if (!table)
		return -1;
	for (size_t i = 0; i < sizeof(words) / sizeof(*words); i++) {
		PyObject *place = Py_BuildValue("(nn)", (Py_ssize_t)words[i].offset, (Py_ssize_t)words[i].size);
		int failed = place ? PyDict_SetItemString(table, words[i].name, place) : -1;
		Py_XDECREF(place);
		if (failed) {
			Py_DECREF(table);
			return -1;
		}
	}
	int failed = PyModule_AddObjectRef(module, "HEADER_WORDS", table);
	Py_DECREF(table);
	return failed;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
	struct state *state = PyModule_GetState(module);

	Py_VISIT(state->channel_type);
	Py_VISIT(state->piece_type);
	return 0;
}

static int module_clear(PyObject *module)
{
	struct state *state = PyModule_GetState(module);

	Py_CLEAR(state->channel_type);
	Py_CLEAR(state->piece_type);
	return 0;
}

PyDoc_STRVAR(make_bell_doc, "make_bell($module, /)\n--\n\n"
                            "A new eventfd for a bell, close-on-exec, which the caller closes.\n\n"
                            "Raises OSError: EOPNOTSUPP before Linux 5.8, where nobody could ring it without fear of waiting.");

static PyObject *module_make_bell(PyObject *module, PyObject *unused)
{
	(void)module;
	(void)unused;
	int fd = bell_fd_make();
	return fd < 0 ? raise_errno(-errno) : PyLong_FromLong(fd);
}

PyDoc_STRVAR(ring_bell_doc, "ring_bell($module, fd, /)\n--\n\n"
                            "Wakes whoever sleeps on the eventfd of a bell, and never waits. Whether it was rung.");

static PyObject *module_ring_bell(PyObject *module, PyObject *args)
{
	int fd;

	(void)module;
	return PyArg_ParseTuple(args, "i:ring_bell", &fd) ? PyBool_FromLong(bell_fd_ring(fd)) : NULL;
}

PyDoc_STRVAR(give_back_doc, "give_back_free_memory()\n--\n\nGives what the C library has free back to the kernel, "
                            "also from between what is in use.");

static PyObject *module_give_back(PyObject *module, PyObject *unused)
{
	(void)module;
	(void)unused;
#ifdef __GLIBC__
	Py_BEGIN_ALLOW_THREADS
	malloc_trim(0);
	Py_END_ALLOW_THREADS
#endif
	Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
	{"make_bell", module_make_bell, METH_NOARGS, make_bell_doc},
	{"ring_bell", module_ring_bell, METH_VARARGS, ring_bell_doc},
	{"create", module_create, METH_VARARGS, create_doc},
	{"map", module_map, METH_VARARGS, map_doc},
	{"give_back_free_memory", module_give_back, METH_NOARGS, give_back_doc},
	{0},
};

static PyModuleDef_Slot module_slots[] = {
	{Py_mod_exec, module_exec},
	{0},
};

PyDoc_STRVAR(module_doc, "Channels: one stream connection in shared memory, mapped by two ends.\n\n"
                         "HEADER_WORDS names the words of a segment's header: name -> (offset, size), in bytes.");

static struct PyModuleDef module_def = {
	PyModuleDef_HEAD_INIT,
	.m_name = "sidestep.native._channel",
	.m_doc = module_doc,
	.m_size = sizeof(struct state),
	.m_methods = module_methods,
	.m_slots = module_slots,
	.m_traverse = module_traverse,
	.m_clear = module_clear,
};

PyMODINIT_FUNC PyInit__channel(void)
{
	return PyModuleDef_Init(&module_def);
}
