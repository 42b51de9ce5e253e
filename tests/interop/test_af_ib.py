"""An ordinary SDP peer of InfiniBand cannot be spoken with through rdma_cm over RoCE: which calls say so, and how.

docs/internals/devices.md names the functions of the kernel. A kernel that lets one of these through is noticed here.
"""

from __future__ import annotations

import json

from lab_guest import Lab


def test_af_ib_does_not_reach_over_roce(lab: Lab) -> None:
    done = lab.run(lab.python_in_guest("af_ib.py", lab.rxe_address, lab.rxe_host_address))
    assert json.loads(done.stdout) == {
        "the port space of SDP": "EINVAL",
        "bind to the GID": "ENODEV",
        "bind to any GID, service id of SDP": "EPROTONOSUPPORT",
        "bind to any GID, service id of RDMA_PS_IB": "OK",
        "listen there": "OK",
        "resolve from the GID": "ENODEV",
        "resolve from any GID": "RDMA_CM_EVENT_ADDR_RESOLVED 0",
        "resolve the route": "ENODEV",
    }
