/* engine_datagrams.h - a queue pair of RoCEv2 for Python, and for an engine that has it. */
#ifndef SIDESTEP_ENGINE_DATAGRAMS_H
#define SIDESTEP_ENGINE_DATAGRAMS_H

#include "extension.h"

#include "rc.h"

struct datagrams {
	PyObject_HEAD
	struct rc rc;
	int receive_fd, send_fd;
	bool ready; /* it has numbers to begin with */
	bool busy;  /* an engine has it */
};
extern PyType_Spec datagrams_spec;

#endif
