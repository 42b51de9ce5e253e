/*
 * channel_type.c - a Channel, one end of a mapped segment. Nothing here blocks.
 *
 * The views that readable() and writable() give lie in the segment, which stays mapped until the last of them is gone.
 */
#include "channel_module.h"

/* A stretch of a ring, for as long as somebody has a view of it. */
struct piece {
	PyObject_HEAD
	struct channel *channel;
	struct iovec where;
	bool read_only;
};

static struct channel *mapped(PyObject *self)
{
	struct channel *channel = (struct channel *)self;

	if (!channel->closed)
		return channel;
	PyErr_SetString(PyExc_ValueError, "the channel is closed");
	return NULL;
}

/* Bytes, with a fresh head; or -ECONNRESET. */
static int64_t space_of(const struct channel *channel)
{
	return channel_tx_space(&channel->end, SIZE_MAX);
}

/* Exact, unlike channel_tx_unread(), for a Channel has one user: bytes, or -ECONNRESET. */
static int64_t unread_of(const struct channel *channel)
{
	int64_t space = space_of(channel);

	return space < 0 ? space : (int64_t)(atomic_load(&channel->tail) - atomic_load(&channel->head_seen));
}

static PyObject *number_or_raise(int64_t value)
{
	return value < 0 ? raise_errno((int)value) : PyLong_FromLongLong(value);
}

/* ---- Channel ---- */
PyDoc_STRVAR(write_doc,
             "write($self, data, /)\n--\n\n"
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
		if (!channel->room_shown)
			channel_tx_settle(&channel->end);
		taken = channel_tx_space(&channel->end, (size_t)buffer.len);
		if (taken < 0) {
			raise_errno((int)taken);
		} else {
			if (taken > buffer.len)
				taken = buffer.len;
			if (taken > 0) {
				channel_tx_put(&channel->end, 0, buffer.buf, (size_t)taken, false);
				channel_tx_publish(&channel->end, (size_t)taken);
				channel->room_shown = false;
			}
		}
	}
	PyBuffer_Release(&buffer);
	return taken < 0 ? NULL : PyLong_FromLongLong(taken);
}

PyDoc_STRVAR(read_doc,
             "read($self, size=-1, /)\n--\n\n"
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

PyDoc_STRVAR(close_doc, "close($self, /)\n--\n\n"
                        "Unmaps the segment, once no view of its rings is left; closing twice is allowed.");

static PyObject *channel_close(PyObject *self, PyObject *Py_UNUSED(unused))
{
	struct channel *channel = (struct channel *)self;

	channel->closed = true;
	if (!channel->pieces)
		channel_unmap(&channel->end);
	Py_RETURN_NONE;
}

/* ---- views of the rings ---- */
static int piece_getbuffer(PyObject *self, Py_buffer *view, int flags)
{
	struct piece *piece = (struct piece *)self;

	return PyBuffer_FillInfo(view, self, piece->where.iov_base, (Py_ssize_t)piece->where.iov_len, piece->read_only,
	                         flags);
}

static void piece_dealloc(PyObject *self)
{
	struct piece *piece = (struct piece *)self;
	struct channel *channel = piece->channel;

	object_free(self);
	if (--channel->pieces == 0 && channel->closed)
		channel_unmap(&channel->end);
	Py_DECREF(channel);
}

static PyObject *piece_view(struct channel *channel, struct iovec where, bool read_only)
{
	struct piece *piece = object_new(channel->piece_type);

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

PyDoc_STRVAR(readable_doc,
             "readable($self, skip=0, /)\n--\n\n"
             "Read-only views of what can be read from byte `skip` on, in the ring and the spill: as many as it\n"
             "takes, but not more than six.\n\n"
             "Raises ConnectionResetError if the peer's count of what it has written is impossible.");

static PyObject *channel_readable(PyObject *self, PyObject *args)
{
	struct channel *channel = mapped(self);
	struct iovec pieces[CHANNEL_PIECES];
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

PyDoc_STRVAR(receiving_doc,
             "ring($self, /)\n--\n\n"
             "A read-only view of the memory from the receiving ring to the end of its spill, to register it. It says\n"
             "nothing of what is in it.");

static PyObject *channel_ring(PyObject *self, PyObject *Py_UNUSED(unused))
{
	struct channel *channel = mapped(self);

	if (!channel)
		return NULL;
	const struct channel_ring *rx = &channel->end.rx;
	return piece_view(channel, (struct iovec){rx->data, (size_t)(rx->spill + rx->spill_size - rx->data)}, true);
}

PyDoc_STRVAR(writable_doc,
             "writable($self, /)\n--\n\n"
             "Views of the room for writing, in the ring or the spill: none, one, or two where it wraps. They are\n"
             "good until bytes are committed, written, or sent to the spill.\n\n"
             "Raises ConnectionResetError if the peer's count of what it has read is impossible.");

static PyObject *channel_writable(PyObject *self, PyObject *Py_UNUSED(unused))
{
	struct channel *channel = mapped(self);
	struct iovec pieces[2];

	if (!channel)
		return NULL;
	if (!channel->room_shown)
		channel_tx_settle(&channel->end);
	int64_t room = space_of(channel);
	if (room < 0)
		return raise_errno((int)room);
	channel->room_shown = true;
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

PyDoc_STRVAR(consume_doc,
             "consume($self, count, /)\n--\n\n"
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
	Py_ssize_t len = moved(count, space_of(channel));
	if (len < 0)
		return NULL;
	channel_tx_publish(&channel->end, (size_t)len);
	channel->room_shown = false;
	Py_RETURN_NONE;
}

PyDoc_STRVAR(spill_doc,
             "spill($self, /)\n--\n\n"
             "Makes room for what the peer does not read: what follows goes to the spill, until it has nearly\n"
             "caught up. False: there is no more room than there was. Views of the room mean nothing now.\n\n"
             "Raises ConnectionResetError if the peer's count of what it has read is impossible.");

static PyObject *channel_spill(PyObject *self, PyObject *Py_UNUSED(unused))
{
	struct channel *channel = mapped(self);

	if (!channel)
		return NULL;
	int64_t room = space_of(channel);
	if (room < 0)
		return raise_errno((int)room);
	return PyBool_FromLong(channel_tx_spill(&channel->end, SIZE_MAX));
}

/* ---- the words of the two sides ---- */
PyDoc_STRVAR(remote_doc, "remote($self, /)\n--\n\n"
                         "The peer's words, each read once, as a tuple in the order of `layout.PeerState`.");

static PyObject *channel_remote(PyObject *self, PyObject *Py_UNUSED(unused))
{
	struct channel *channel = mapped(self);

	if (!channel)
		return NULL;
	const struct channel_side *remote = channel->end.remote;
#define LOADED(word) (uint64_t)atomic_load_explicit(&remote->word, memory_order_acquire),
	/* in this order: a reader that finds the direction ended finds all that it held */
	uint64_t words[] = {CHANNEL_REMOTE_WORDS(LOADED)
	                        atomic_load_explicit(&channel->end.rx_peer_line->tail, memory_order_acquire)};
	Py_ssize_t len = sizeof(words) / sizeof(*words);
	PyObject *found = PyTuple_New(len);

	for (Py_ssize_t i = 0; found && i < len; i++) {
		PyObject *value = PyLong_FromUnsignedLongLong(words[i]);
		if (!value || PyTuple_SetItem(found, i, value) < 0)
			Py_CLEAR(found);
	}
	return found;
}

PyDoc_STRVAR(publish_doc, "publish($self, name, value, /)\n--\n\n"
                          "Stores one of our words, by its name; `notice` and `acked` add bits.");

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
		if (word == &local->notice || word == &local->acked)
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

PyDoc_STRVAR(revoke_doc, "revoke($self, notice, acked, /)\n--\n\n"
                         "Takes these bits back from the two of our words that publish() adds bits to.");

static PyObject *channel_revoke(PyObject *self, PyObject *args)
{
	struct channel *channel = mapped(self);
	unsigned int notice, acked;

	if (!channel || !PyArg_ParseTuple(args, "II:revoke", &notice, &acked))
		return NULL;
	atomic_fetch_and(&channel->end.local->notice, ~notice);
	atomic_fetch_and(&channel->end.local->acked, ~acked);
	Py_RETURN_NONE;
}

PyDoc_STRVAR(decide_doc,
             "decide($self, sending, how, round=1, /)\n--\n\n"
             "Decides how this round of a direction ends (tx_back), ours or, with sending False, the peer's,\n"
             "unless that is decided: what stands. 0: the word makes no sense.");

static PyObject *channel_decide_how(PyObject *self, PyObject *args)
{
	struct channel *channel = mapped(self);
	int sending;
	unsigned int how, number = 1;

	if (!channel || !PyArg_ParseTuple(args, "pI|I:decide", &sending, &how, &number))
		return NULL;
	return PyLong_FromUnsignedLong(
		channel_decide(sending ? &channel->end.local->tx_back : &channel->end.remote->tx_back, number, how & 3));
}

PyDoc_STRVAR(decide_spacer_doc,
             "decide_spacer($self, sending, how, round, /)\n--\n\n"
             "Decides what TCP's first byte behind this round is (tx_spacer), as decide(). With sending False it\n"
             "answers the peer's question. What stands; 0: nothing was asked, or the word makes no sense.");

static PyObject *channel_decide_spacer(PyObject *self, PyObject *args)
{
	struct channel *channel = mapped(self);
	int sending;
	unsigned int how, number;

	if (!channel || !PyArg_ParseTuple(args, "pII:decide_spacer", &sending, &how, &number))
		return NULL;
	if (sending)
		return PyLong_FromUnsignedLong(channel_decide(&channel->end.local->tx_spacer, number, how & 3));
	uint32_t asked = number << 2 | SPACER_ASKED;
	bool answers = atomic_compare_exchange_strong(&channel->end.remote->tx_spacer, &asked, number << 2 | (how & 3));
	return PyLong_FromUnsignedLong(answers ? how & 3 : 0);
}

static PyObject *get_wants_space(PyObject *self, void *Py_UNUSED(unused))
{
	struct channel *channel = mapped(self);

	if (!channel)
		return NULL;
	atomic_thread_fence(memory_order_seq_cst); /* fence between publishing head and reading want_space */
	return PyBool_FromLong(atomic_load_explicit(&channel->end.rx_peer_line->want_space, memory_order_relaxed) != 0);
}

static PyObject *channel_enter(PyObject *self, PyObject *Py_UNUSED(unused))
{
	if (!mapped(self))
		return NULL;
	Py_INCREF(self);
	return self;
}

static PyObject *get_avail(PyObject *self, void *Py_UNUSED(unused))
{
	struct channel *channel = mapped(self);
	return channel ? number_or_raise(channel_rx_avail(&channel->end)) : NULL;
}

static PyObject *get_space(PyObject *self, void *Py_UNUSED(unused))
{
	struct channel *channel = mapped(self);
	return channel ? number_or_raise(space_of(channel)) : NULL;
}

static PyObject *get_unread(PyObject *self, void *Py_UNUSED(unused))
{
	struct channel *channel = mapped(self);
	return channel ? number_or_raise(unread_of(channel)) : NULL;
}

static PyObject *get_pages(PyObject *self, void *Py_UNUSED(unused))
{
	struct channel *channel = mapped(self);
	return channel ? PyLong_FromUnsignedLong(channel_rx_pages(&channel->end)) : NULL;
}

static PyObject *get_doorbell_nonce(PyObject *self, void *Py_UNUSED(unused))
{
	struct channel *channel = mapped(self);
	return channel ? PyLong_FromUnsignedLongLong(atomic_load(&channel->end.remote->doorbell_nonce)) : NULL;
}

static void channel_dealloc(PyObject *self)
{
	channel_unmap(&((struct channel *)self)->end);
	Py_XDECREF((PyObject *)((struct channel *)self)->piece_type);
	object_free(self);
}

static PyMethodDef channel_methods[] = {
	{"write", channel_write, METH_O, write_doc},
	{"read", channel_read, METH_VARARGS, read_doc},
	{"ring", channel_ring, METH_NOARGS, receiving_doc},
	{"readable", channel_readable, METH_VARARGS, readable_doc},
	{"consume", channel_consume, METH_O, consume_doc},
	{"writable", channel_writable, METH_NOARGS, writable_doc},
	{"commit", channel_commit, METH_O, commit_doc},
	{"spill", channel_spill, METH_NOARGS, spill_doc},
	{"remote", channel_remote, METH_NOARGS, remote_doc},
	{"publish", channel_publish, METH_VARARGS, publish_doc},
	{"revoke", channel_revoke, METH_VARARGS, revoke_doc},
	{"decide", channel_decide_how, METH_VARARGS, decide_doc},
	{"decide_spacer", channel_decide_spacer, METH_VARARGS, decide_spacer_doc},
	{"close", channel_close, METH_NOARGS, close_doc},
	{"__enter__", channel_enter, METH_NOARGS, NULL},
	{"__exit__", channel_close, METH_VARARGS, NULL},
	{0},
};

#define MEMBER(name, type, path, doc) {name, type, offsetof(struct channel, path), READONLY, doc}
static PyMemberDef channel_members[] = {
	MEMBER("tx_size", T_UINT, end.tx.size, "Size of the sending ring in bytes."),
	MEMBER("rx_size", T_UINT, end.rx.size, "Size of the receiving ring in bytes."),
	MEMBER("tx_most", T_UINT, end.tx.spill_size,
           "Bytes that the peer can leave unread at most, in the ring and its spill."),
	MEMBER("sent", T_ULONGLONG, tail, "Bytes ever written."),
	MEMBER("received", T_ULONGLONG, head, "Bytes ever read."),
	MEMBER("closed", T_BOOL, closed, "Whether the segment has been unmapped."),
	{0},
};

static PyGetSetDef channel_getset[] = {
	{"avail", get_avail, NULL, "Bytes that can be read now.", NULL},
	{"space", get_space, NULL, "Bytes that can be written now.", NULL},
	{"unread", get_unread, NULL, "Bytes written that the peer has not read.", NULL},
	{"pages", get_pages, NULL,
     "Another number once the peer has given pages of the receiving ring back; 0: that is not known.", NULL},
	{"doorbell_nonce", get_doorbell_nonce, NULL,
     "The peer's word `doorbell_nonce`, which proves that a doorbell is its own.", NULL},
	{"wants_space", get_wants_space, NULL, "Whether the peer waits for room: ring its doorbell after making some.",
     NULL},
	{0},
};

PyDoc_STRVAR(channel_doc, "One end of a mapped segment; made by map(). A context manager that closes it.\n\n"
                          "avail, space and unread raise ConnectionResetError where the peer's counts are impossible.");

static PyType_Slot channel_slots[] = {
	{Py_tp_doc, (void *)channel_doc}, {Py_tp_methods, channel_methods}, {Py_tp_members, channel_members},
	{Py_tp_getset, channel_getset},   {Py_tp_dealloc, channel_dealloc}, {0},
};

PyType_Spec channel_spec = {
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

PyType_Spec piece_spec = {
	.name = "sidestep.native._channel.Piece",
	.basicsize = sizeof(struct piece),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
	.slots = piece_slots,
};
