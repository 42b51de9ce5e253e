/* engine_queue_pairs.h - queue pairs of the kernel's devices for Python, and for an engine that has one. */
#ifndef SIDESTEP_ENGINE_QUEUE_PAIRS_H
#define SIDESTEP_ENGINE_QUEUE_PAIRS_H

#include "extension.h"

#include "engine_verbs.h"

struct send_slab {
	PyObject_HEAD
	struct verbs_slab slab;
	Py_buffer memory;
};

struct queue_pair {
	PyObject_HEAD
	struct verbs_qp qp;
	struct send_slab *memory;
	bool ready; /* it has receives and a number to begin with */
	bool busy;  /* an engine has it */
};
extern PyType_Spec send_slab_spec, queue_pair_spec;

#endif
