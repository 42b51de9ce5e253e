"""The loopback device passes the conformance suite: both modes, several seeds, and with attributes like iWARP's."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from conformance_items import applying, left_out
from loopback_dut import LoopbackUnderTest

from sidestep.rdma.conformance import Check, DeviceUnderTest, run
from sidestep.rdma.loopback import NO_DELAY, Fabric, Timing
from sidestep.rdma.verbs import DeviceAttributes

IWARP_LIKE = DeviceAttributes(
    request_private_data_max=512,
    reply_private_data_max=512,
    reject_private_data_max=512,
    private_data_padded=False,
    read_scatter_max=1,
    read_sink_remote_write=True,
    atomics=False,
    immediate=False,
    acknowledged=False,
    error_disconnects=True,
    gather_max=4,
    scatter_max=4,
    inline_max=64,
)


def timed(seed: int, attributes: DeviceAttributes | None = None) -> DeviceUnderTest:
    return LoopbackUnderTest(Fabric(Random(seed)), attributes)


MODES: dict[str, Callable[[], DeviceUnderTest]] = {
    "timed-1": lambda: timed(1),
    "timed-2": lambda: timed(2),
    "timed-3": lambda: timed(3),
    "slow-reads": lambda: LoopbackUnderTest(Fabric(Random(4), timing=Timing(read_s=(0, 1e-3), cm_s=(0, 1e-3)))),
    "bandwidth": lambda: LoopbackUnderTest(Fabric(Random(5), timing=Timing(bandwidth=1e9))),
    "no-delay": lambda: LoopbackUnderTest(Fabric(Random(0), timing=NO_DELAY)),
}
PLAIN = DeviceAttributes()


@pytest.mark.parametrize(("check", "mode"), applying(MODES, PLAIN))
def test_loopback_keeps_the_rule(check: Check, mode: str) -> None:
    assert run(check, MODES[mode]) is None


@pytest.mark.parametrize(("check", "seed"), applying([6], IWARP_LIKE))
def test_loopback_like_iwarp_keeps_the_rule(check: Check, seed: int) -> None:
    assert run(check, lambda: timed(seed, IWARP_LIKE)) is None


def test_nothing_else_is_left_out() -> None:
    assert {frozenset(left_out(make(), PLAIN)) for make in MODES.values()} == {frozenset({"datagrams"})}
    lacking = {"acknowledged", "atomics", "datagrams", "immediate", "read scatter"}
    assert left_out(timed(6, IWARP_LIKE), IWARP_LIKE) == lacking
