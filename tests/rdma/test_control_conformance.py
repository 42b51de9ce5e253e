"""Devices whose queue pairs are connected by a control link keep the rules of those with a connection manager."""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import ip_address
from random import Random
from typing import Final

import pytest
from loopback_dut import LoopbackUnderTest

from sidestep.rdma.conformance import CHECKS, Check, run
from sidestep.rdma.loopback import Fabric
from sidestep.rdma.verbs import DeviceAttributes
from sidestep.remote.control_link import PRIVATE_DATA_MAX, ControlLink, Req, Talker
from sidestep.remote.control_manager import ControlManager
from sidestep.sdp.endpoint import SdpStream
from sidestep.sdp.requests import SdpEvent, Told
from sidestep.sdp.settings import Addresses
from sidestep.sdp.stack import stack_on

WIRE: Final = "loopback"
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
        self.link: ControlLink | None = None
        self.managers = {
            "active": ControlManager(self.active, self.fabric, WIRE, self.reach),
            "passive": ControlManager(self.passive, self.fabric, WIRE, lambda _address, reached: reached(None)),
        }
        for device in (self.active, self.passive):
            device.cm = self.managers[device.name]  # type: ignore[misc]  # LoopbackDevice has it
        self.stacks = [stack_on(self.fabric, self.fabric.device(name)) for name in ("asks", "answers")]
        one, other = self.stacks
        other.listen(1, self.accepted)
        addresses = Addresses(ip_address("10.0.0.1"), 2, ip_address("10.0.0.2"), 1)
        one.connect("answers", addresses, self.told)
        self.fabric.run_until(lambda: self.link is not None)
        self.fabric.run()

    def told(self, stream: SdpStream, event: Told) -> None:
        assert isinstance(event, SdpEvent)
        self.link = ControlLink(stream, self.fabric, None, lambda: None, print)
        self.link.begin()

    def accepted(self, stream: SdpStream) -> None:
        ControlLink(stream, self.fabric, self.asked, lambda: None, print)

    def asked(self, link: ControlLink, number: int, req: Req) -> Talker | None:
        assert req.wire == WIRE
        return self.managers["passive"].take(link, number, req)

    def reach(self, address: str, reached: Callable[[ControlLink | None], None]) -> None:
        reached(self.link if address == "passive" else None)

    def close(self) -> None:
        super().close()
        for stack in self.stacks:
            stack.close()


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("check", CHECKS, ids=str)
def test_a_joined_device_keeps_the_rule(check: Check, seed: int) -> None:
    why_not = run(check, lambda: JoinedUnderTest(seed))
    if why_not is not None:
        pytest.skip(why_not)  # the device does not promise it: its attributes say so
