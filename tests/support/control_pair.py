"""The connection managers of two devices whose queue pairs are joined by number, and the control link between them."""

from __future__ import annotations

from ipaddress import ip_address
from random import Random
from typing import TYPE_CHECKING, Final

from sidestep.rdma.loopback import Fabric
from sidestep.remote.control_link import ControlLink, Req, Talker
from sidestep.remote.control_manager import ControlManager
from sidestep.sdp.endpoint import SdpStream
from sidestep.sdp.requests import SdpEvent, Told
from sidestep.sdp.settings import Addresses
from sidestep.sdp.stack import stack_on

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidestep.rdma.cm import Driver
    from sidestep.rdma.verbs import Device


_WIRE: Final = "tested"


class ControlPair:
    """The link goes between two more devices, on a fabric; the first of the two devices asks, the second is asked."""

    def __init__(self, active: Device, passive: Device, driver: Driver, fabric: Fabric | None = None) -> None:
        self._at = passive.address
        self.link: ControlLink | None = None
        self.active = ControlManager(active, driver, _WIRE, self._reach)
        self.passive = ControlManager(passive, driver, _WIRE, self._reach)
        self.fabric = fabric or Fabric(Random(1))
        self._stacks = [stack_on(self.fabric, self.fabric.device(name)) for name in ("asks", "answers")]
        one, other = self._stacks
        other.listen(1, self._accepted)
        one.connect("answers", Addresses(ip_address("10.0.0.1"), 2, ip_address("10.0.0.2"), 1), self._told)
        self.fabric.run_until(lambda: self.link is not None)
        self.fabric.run()

    def _told(self, stream: SdpStream, event: Told) -> None:
        assert isinstance(event, SdpEvent)
        self.link = ControlLink(stream, self.fabric, None, lambda: None, print)
        self.link.begin()

    def _accepted(self, stream: SdpStream) -> None:
        ControlLink(stream, self.fabric, self._asked, lambda: None, print)

    def _asked(self, link: ControlLink, number: int, req: Req) -> Talker | None:
        assert req.wire == _WIRE
        return self.passive.take(link, number, req)

    def _reach(self, address: str, reached: Callable[[ControlLink | None], None]) -> None:
        reached(self.link if address == self._at else None)

    def close(self) -> None:
        for stack in self._stacks:
            stack.close()
