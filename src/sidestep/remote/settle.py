"""What becomes of connections whose link has broken while TCP lives: both ends agree where TCP goes on.

The end that made the link asks: a connection request that is never accepted, with how many bytes have arrived here; the
rejection says how many there. Then each side ends both directions at these counts (`Carried.handle_arrived`). Who is
asked keeps his answer for a while, so a rejection that is lost may be asked for again.

Until then the connection stands still, as a TCP connection does over a link that is down, and for as long at most. A
host that does not know the link, or where nobody listens any more, says so at once: then nobody knows which bytes the
other application has, and the connection is reset.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from sidestep import limits
from sidestep.errors import PeerViolation, SidestepError
from sidestep.rdma.cm import Connection, ConnectionEvent, ConnectionRequest, Rejected, Unreachable
from sidestep.rdma.soft.loop import Loop
from sidestep.remote.promotion import Promotion, Purpose
from sidestep.sdp.wire import service_id
from sidestep.switch.link import Carried

if TYPE_CHECKING:
    from sidestep.remote.link import SdpLink
    from sidestep.sdp.endpoint import Stack

_PAUSES_S: Final = (0.0, 0.2, 1.0, 2.0, 5.0)  # between two questions; the last one again and again


@dataclass(frozen=True, slots=True)
class Route:
    """Where the other end of a link is asked."""

    stack: Stack
    address: str
    port: int
    hello: bytes  # that the link began with


class Asker:
    """Asks about one connection until it is settled."""

    def __init__(self, loop: Loop, route: Route, promotion: Promotion, key: bytes | None, far: Carried) -> None:
        self._loop = loop
        self._route = route
        self._promotion = replace(promotion, purpose=Purpose.SETTLE, arrived=far.arrived)
        self._key = key
        self._far = far
        self._until = loop.now + limits.SETTLE_S
        self._tries = 0
        self._again()

    def _again(self) -> None:
        pause_s = _PAUSES_S[min(self._tries, len(_PAUSES_S) - 1)]
        self._tries += 1
        self._loop.call_later(pause_s, self._ask)

    def _ask(self) -> None:
        if self._far.lost:
            return
        if self._loop.now > self._until:
            self._far.handle_arrived(None)
            return
        stack, hello = self._route.stack, self._route.hello
        try:
            qp = stack.domain.create_qp(stack.send_cq, stack.recv_cq)
        except SidestepError:  # none is left for now
            self._again()
            return

        def told(_connection: Connection, event: ConnectionEvent) -> None:
            if isinstance(event, Rejected | Unreachable):
                qp.destroy()
                self._answered(event)

        try:
            stack.device.cm.connect(
                self._route.address, service_id(self._route.port), qp, hello + self._promotion.encode(hello, self._key),
                told,
            )  # fmt: skip
        except SidestepError:
            qp.destroy()
            self._again()

    def _answered(self, event: Rejected | Unreachable) -> None:
        if isinstance(event, Unreachable):
            self._again()
            return
        try:
            found = Promotion.find(self._route.hello + event.private_data, self._key)
        except PeerViolation:
            found = None
        known = found is not None and (found.purpose, found.name) == (Purpose.SETTLE, self._promotion.name)
        self._far.handle_arrived(found.arrived if known and found is not None else None)


class Answers:
    """What the other hosts may ask about: links of theirs, and those that were settled not long ago."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._links: dict[bytes, tuple[bytes, SdpLink, Carried]] = {}  # by name: the Hello that it began with
        self._settled: OrderedDict[bytes, tuple[bytes, int, float]] = OrderedDict()  # by name: Hello, count, until

    def add(self, name: bytes, hello: bytes, link: SdpLink, far: Carried) -> None:
        """A link that another host has made; raises PeerViolation for a name that is taken."""
        if name in self._links or name in self._settled:
            raise PeerViolation("a second link of that name", rule="promotion_name")
        self._links[name] = hello, link, far

    def remove(self, name: bytes) -> None:
        """It is over."""
        self._links.pop(name, None)

    def handle_broken(self, far: Carried) -> None:
        """The link is gone: its maker is waited for, as long as he would ask."""
        self._loop.call_later(limits.SETTLE_S, lambda: far.handle_arrived(None))

    def answer(self, request: ConnectionRequest, promotion: Promotion, hello: bytes, key: bytes | None) -> None:
        """Says how much has arrived here, and ends the connection at what has arrived there."""
        now = self._loop.now
        while self._settled and next(iter(self._settled.values()))[2] <= now:
            self._settled.popitem(last=False)
        if (known := self._links.get(promotion.name)) is not None and known[0] == hello:
            _, link, far = known
            link.abandon()  # nothing more arrives
            self._settled[promotion.name] = hello, far.arrived, now + limits.SETTLED_KEPT_S
            while len(self._settled) > limits.SETTLED_MAX:
                self._settled.popitem(last=False)
            far.handle_arrived(promotion.arrived)
        settled = self._settled.get(promotion.name)
        if settled is None or settled[0] != hello:
            request.reject()
            return
        told = replace(promotion, arrived=settled[1])
        request.reject(private_data=told.encode(hello, key))
