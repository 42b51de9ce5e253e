"""The loopback device passes the conformance suite: both modes, several seeds, and with attributes like iWARP's."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from loopback_dut import LoopbackUnderTest

from sidestep.rdma.conformance import CHECKS, Check, DeviceUnderTest, run
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
    "timed-iwarp": lambda: timed(6, IWARP_LIKE),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("check", CHECKS, ids=str)
def test_loopback_keeps_the_rule(check: Check, mode: str) -> None:
    why_not = run(check, MODES[mode])
    if why_not is not None:
        pytest.skip(why_not)
