/* rc_type.h - Rc: a reliable connection's queue pair for Python, and for an engine that has it. */
#ifndef SIDESTEP_RC_TYPE_H
#define SIDESTEP_RC_TYPE_H

#include "extension.h"

#include "engine_wire.h"

/* Memory of a request or a receive. */
struct memory {
	PyObject *entries; /* the tuple that was posted */
	uint32_t views_len;
	Py_buffer views[QP_PIECES_MAX];
	struct iovec pieces[QP_PIECES_MAX];
	uint64_t length;
	bool bad;
};

struct rc_object {
	PyObject_HEAD
	struct rc_qp qp;
	struct rc_loaned loaned;
	bool ready; /* lent, and no engine has begun */
	bool busy;  /* an engine has it */
	PyObject *host;       /* borrowed while a call lasts */
	PyObject *receive;    /* the Receive that a message has taken */
	struct memory memory; /* memory of that */
	PyObject *delivered;  /* messages not reported yet; or NULL */
};

extern PyType_Spec rc_spec;

#endif
