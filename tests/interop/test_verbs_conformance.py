"""The kernel's devices, by our classes, pass the conformance suite in the guest: siw, and rxe in two ways.

The suite runs in the guest, once for each row of `NOT_MET`, all of them at a time; each check is a test here. One that
a driver cannot meet has its reason in the table, and has to fail as long as it stands there: better ones are noticed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeAlias

import pytest
from lab_guest import Lab, Unusable

from sidestep.rdma.conformance import CHECKS, Check

Outcomes: TypeAlias = dict[str, dict[str, str]]  # of each check

_SUITE_TIMEOUT_S: Final = 1500.0  # an emulated processor, on a machine that others use
_SOLICITED = "no queue armed for solicited events is woken by one"
_LENGTH = "a message longer than its receive is told as LOC_QP_OP_ERR"
_DEPTHS = "who is asked takes as many RDMA Reads as the other end wants (relaxed_ird_negotiation), whatever it said"
_DOMAIN = "receives of a shared queue are looked for in the domain of the queue pair"
_GENERAL = "memory of a receive that may not be written is told as GENERAL_ERR"
_SCATTER = "told as LOC_QP_OP_ERR"
_RXE: Final = {
    "queue_pairs_share_a_queue": _LENGTH,
    "message_too_long_is_an_error": _LENGTH,
    "message_too_long_takes_one_shared_receive": _LENGTH,
    "scatter_lies_in_a_writable_region": _SCATTER,
    "shared_receives_lie_in_their_own_domain": _DOMAIN,
    "datagram_too_long_for_its_receive_is_dropped": _LENGTH,
    "datagram_memory_is_registered": _SCATTER,
}
NOT_MET: Final[dict[str, dict[str, str]]] = {
    "siw": {
        "arm_for_solicited_only": _SOLICITED,
        "reply_can_be_refused": "the connection exists when the Reply is here (RFC 5044 7.1.2): it is ended instead",
        "read_depth_is_agreed": _DEPTHS,
        "read_with_a_depth_of_zero_fails": _DEPTHS,
        "error_and_connection": "a connection that the other end breaks off is told as one that ended",
        "rights_are_those_of_the_region": "a Terminate for a refused RDMA Read is logged, and ends nothing",
        "rights_are_those_of_the_queue_pair": "access flags of a queue pair are not looked at",
        "scatter_lies_in_a_writable_region": _GENERAL,
        "shared_receives_lie_in_their_own_domain": _GENERAL,
    },
    "rxe": {
        "private_data_arrives_exactly": "rdma_cm's TCP port space leaves 56 bytes of InfiniBand's 92; SDP wants 76",
    }
    | _RXE,
    "rxe-joined": _RXE,
}


def _outcomes(lab: Lab, device: str) -> Outcomes:
    address, nobody = {
        "siw": (lab.siw_address, lab.siw_nobody),
        "rxe": (lab.rxe_address, lab.rxe_nobody),
    }[device.removesuffix("-joined")]
    how = "joined" if device.endswith("-joined") else "rdma_cm"
    command = lab.python_in_guest("verbs_conformance.py", how, address, nobody)
    done = lab.run(command, timeout_s=_SUITE_TIMEOUT_S, check=False)
    assert done.returncode == 0, f"the suite ended with {done.returncode}: {done.stderr[-600:]}"
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {each["check"]: each for each in told}


@pytest.fixture(scope="module")
def suites(booted: Lab | Unusable) -> Iterator[dict[str, Future[Outcomes]]]:
    """All runs, begun at a time: each of them waits for most of it."""
    if isinstance(booted, Unusable):
        pytest.skip(str(booted))  # there is no lab: it says why
    booted.install()
    with ThreadPoolExecutor(len(NOT_MET)) as pool:
        yield {device: pool.submit(_outcomes, booted, device) for device in NOT_MET}


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.timeout(2 * _SUITE_TIMEOUT_S)
@pytest.mark.parametrize("device", NOT_MET)
@pytest.mark.parametrize("check", CHECKS, ids=str)
def test_kernel_device_keeps_the_rule(suites: dict[str, Future[Outcomes]], check: Check, device: str) -> None:
    found = suites[device].result()[check.name]
    if (reason := NOT_MET[device].get(check.name)) is not None:
        assert found["outcome"] in ("broken", "raised"), f"{device} keeps the rule: take it out of the table"
        pytest.skip(reason)  # it was seen to fail; the table says what the driver does
    if found["outcome"] == "does not apply":
        pytest.skip(found["why"])  # the device does not promise it: its attributes say so
    assert found["outcome"] == "kept", found["why"]
