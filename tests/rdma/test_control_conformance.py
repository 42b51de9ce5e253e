"""Devices whose queue pairs are connected by a control link keep the rules of those with a connection manager."""

from __future__ import annotations

from random import Random
from typing import Final

import pytest
from conformance_items import applying, left_out
from control_pair import ControlPair
from loopback_dut import LoopbackUnderTest

from sidestep.rdma.conformance import Check, run
from sidestep.rdma.loopback import Fabric
from sidestep.rdma.verbs import DeviceAttributes
from sidestep.remote.control_link import PRIVATE_DATA_MAX

ATTRIBUTES: Final = DeviceAttributes(
    request_private_data_max=PRIVATE_DATA_MAX,
    reply_private_data_max=PRIVATE_DATA_MAX,
    reject_private_data_max=PRIVATE_DATA_MAX,
    private_data_padded=False,
)


class JoinedUnderTest(LoopbackUnderTest):
    """Two devices, and two more for the control link."""

    def __init__(self, seed: int) -> None:
        super().__init__(Fabric(Random(seed)), ATTRIBUTES)
        self.pair = ControlPair(self.active, self.passive, self.fabric, self.fabric)
        for device, manager in ((self.active, self.pair.active), (self.passive, self.pair.passive)):
            device.cm = manager  # type: ignore[misc]  # LoopbackDevice has it

    def close(self) -> None:
        super().close()
        self.pair.close()


@pytest.mark.parametrize(("check", "seed"), applying([1, 2], ATTRIBUTES))
def test_a_joined_device_keeps_the_rule(check: Check, seed: int) -> None:
    assert run(check, lambda: JoinedUnderTest(seed)) is None


def test_nothing_else_is_left_out() -> None:
    assert left_out(JoinedUnderTest(1), ATTRIBUTES) == {"datagrams"}
