"""The kernel's devices, by our classes, pass the conformance suite in the guest: siw and rxe.

The suite runs in the guest, once for each device; each check is a test here. One that a driver cannot meet has its
reason in the table, and has to fail as long as it stands there: a better driver is noticed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

import pytest
from lab_guest import Lab

from sidestep.rdma.conformance import CHECKS, Check

_SUITE_TIMEOUT_S: Final = 1500.0  # an emulated processor, on a machine that others use
_SOLICITED = "no queue armed for solicited events is woken by one"
_LENGTH = "a message longer than its receive is told as LOC_QP_OP_ERR"
_REGIONS = "keys of regions are not voided by requests, those of windows alone"
_DEPTHS = "who is asked takes as many RDMA Reads as the other end wants (relaxed_ird_negotiation), whatever it said"
_INVALIDATE = "libsiw posts no invalidation"
NOT_MET: Final[dict[str, dict[str, str]]] = {
    "siw": {
        "arm_for_solicited_only": _SOLICITED,
        "reply_can_be_refused": "the connection exists when the Reply is here (RFC 5044 7.1.2): it is ended instead",
        "read_depth_is_agreed": _DEPTHS,
        "read_with_a_depth_of_zero_fails": _DEPTHS,
        "error_and_connection": "a connection that the other end breaks off is told as one that ended",
        "rights_are_those_of_the_region": "a Terminate for a refused RDMA Read is logged, and ends nothing",
        "rights_are_those_of_the_queue_pair": "access flags of a queue pair are not looked at",
        "scatter_lies_in_a_writable_region": "told as GENERAL_ERR",
        "fenced_invalidation_waits": _INVALIDATE,
        "send_with_invalidate_voids_the_key": _INVALIDATE,
        "only_open_regions_are_invalidated": _INVALIDATE,
        "local_invalidate_voids_the_key": _INVALIDATE,
        "void_keys_may_be_voided_again": _INVALIDATE,
        "closed_queue_pair_voids_nothing": _INVALIDATE,
        "shared_receives_lie_in_their_own_domain": _INVALIDATE,
    },
    "rxe": {
        "queue_pairs_share_a_queue": _LENGTH,
        "message_too_long_is_an_error": _LENGTH,
        "private_data_arrives_exactly": "rdma_cm's TCP port space leaves 56 bytes of InfiniBand's 92, and SDP wants 76",
        "fenced_invalidation_waits": _REGIONS,
    },
}


@dataclass(frozen=True, slots=True)
class Suite:
    """A run in the guest: what came of each check."""

    found: dict[str, dict[str, str]]

    @classmethod
    def run(cls, lab: Lab, address: str, nobody: str) -> Suite:
        program = "tests/interop/guest/verbs_conformance.py"
        done = lab.python_in_guest(program, address, nobody, timeout_s=_SUITE_TIMEOUT_S)
        told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        assert done.returncode == 0, f"the suite ended with {done.returncode}: {done.stderr[-600:]}"
        return cls({each["check"]: each for each in told})


_runs: dict[str, Suite] = {}


@pytest.mark.timeout(_SUITE_TIMEOUT_S + 1500)
@pytest.mark.parametrize("device", NOT_MET)
@pytest.mark.parametrize("check", CHECKS, ids=str)
def test_kernel_device_keeps_the_rule(lab: Lab, check: Check, device: str) -> None:
    if device not in _runs:
        address, nobody = {
            "siw": (lab.siw_address, lab.siw_nobody),
            "rxe": (lab.rxe_address, lab.rxe_nobody),
        }[device]
        _runs[device] = Suite.run(lab, address, nobody)
    found = _runs[device].found[check.name]
    if (reason := NOT_MET[device].get(check.name)) is not None:
        assert found["outcome"] in ("broken", "raised"), f"{device} keeps the rule: take it out of the table"
        pytest.skip(reason)
    if found["outcome"] == "does not apply":
        pytest.skip(found["why"])
    assert found["outcome"] == "kept", found["why"]
