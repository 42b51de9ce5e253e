"""The connection managers of two devices whose queue pairs are joined by number, and the control link between them."""

from __future__ import annotations

from ipaddress import ip_address
from random import Random
from typing import TYPE_CHECKING, Final

from sidestep.rdma.loopback import Fabric
from sidestep.remote.control_link import ControlLink, Req, Talker
from sidestep.remote.control_manager import ControlManager
from sidestep.sdp.endpoint import SdpStream
from sidestep.sdp.requests import SdpEvent, StreamEvent
from sidestep.sdp.settings import Addresses
from sidestep.sdp.stack import stack_on

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidestep.rdma.cm import Driver
    from sidestep.rdma.verbs import Device
    from sidestep.sdp.stack import Stack


_WIRE: Final = "tested"


class ControlPair:
    """The link goes between two more devices, on a fabric; the first of the two devices asks, the second is asked."""

    def __init__(self, active: Device, passive: Device, driver: Driver, fabric: Fabric | None = None) -> None:
        self.logged: list[str] = []  # of rules that either end broke
        self.links: dict[str, ControlLink] = {}  # ends that ask, by the address that they ask
        self.answering: dict[str, ControlLink] = {}  # those that answer, by their own address
        self.active = ControlManager(active, driver, _WIRE, self._reach)
        self.passive = ControlManager(passive, driver, _WIRE, self._reach)
        self.fabric = fabric or Fabric(Random(1))
        self._stacks = [stack_on(self.fabric, self.fabric.device(name)) for name in ("asks", "answers")]
        self._connect(self.passive, *self._stacks)

    def connect_back(self) -> None:
        """Has the second one ask as well."""
        self._connect(self.active, *reversed(self._stacks))

    def _connect(self, asked: ControlManager, one: Stack, other: Stack) -> None:
        """The manager whose host is `other` is asked."""
        at = asked.device.address

        def made(stream: SdpStream, event: StreamEvent) -> None:
            assert isinstance(event, SdpEvent)
            self.links[at] = ControlLink(
                stream, self.fabric, None, lambda: self.links.pop(at, None), self.logged.append
            )
            self.links[at].begin()

        def take(link: ControlLink, number: int, req: Req) -> Talker | None:
            assert req.wire == _WIRE
            return asked.take(link, number, req)

        def accepted(stream: SdpStream) -> None:
            self.answering[at] = ControlLink(stream, self.fabric, take, lambda: None, self.logged.append)

        listener = other.listen(1, accepted)
        one.connect(other.device.address, Addresses(ip_address("10.0.0.1"), 2, ip_address("10.0.0.2"), 1), made)
        self.fabric.run_until(lambda: at in self.links)
        self.fabric.run()
        listener.close()

    def _reach(self, address: str, reached: Callable[[ControlLink | None], None]) -> None:
        reached(self.links.get(address))

    def close(self) -> None:
        for stack in self._stacks:
            stack.close()
