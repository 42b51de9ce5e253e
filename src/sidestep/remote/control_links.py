"""The control links of one provider: those that it has made, to ask by, and those that it has taken, to answer by."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final

from sidestep import limits
from sidestep.errors import LimitReached, PeerViolation, SidestepError, Unavailable
from sidestep.rdma.cm import REJECT_INVALID_SERVICE_ID
from sidestep.remote.control_link import ControlLink, Kind, Rej, Req, Talker
from sidestep.remote.peers import PROVIDER_ITSELF
from sidestep.remote.promotion import Promotion, Purpose
from sidestep.sdp.requests import SdpEvent, SdpEventKind, StreamEvent
from sidestep.sdp.settings import Addresses
from sidestep.switch.protocol import Endpoint, Request

if TYPE_CHECKING:
    from sidestep.remote.peers import Peers
    from sidestep.remote.protocol import Sdp
    from sidestep.remote.resync import AnswerHandler
    from sidestep.routing import Address
    from sidestep.sdp.endpoint import SdpStream

Reached = Callable[[ControlLink | None], None]


class Question:
    """One that waits for its answer."""

    def __init__(self, heard: AnswerHandler) -> None:
        self._heard: AnswerHandler | None = heard
        self._link: ControlLink | None = None
        self._number = 0

    def begin(self, link: ControlLink | None, question: bytes) -> None:
        """The link is there, or there is none."""
        if link is None:
            self._tell(None)
        if link is None or self._heard is None:
            return
        self._link, self._number = link, link.add(self)
        link.send(Kind.ASK, self._number, question)

    def take_back(self) -> None:
        self._heard = None
        if self._link is not None:
            self._link.remove(self._number)

    def handle_record(self, kind: Kind, body: bytes) -> None:
        if kind is not Kind.ANSWER:
            raise PeerViolation(f"{kind.name} to a question", rule="control_order")
        if self._link is not None:
            self._link.remove(self._number)
        self._tell(body)

    def handle_lost(self) -> None:
        self._tell(None)

    def _tell(self, answer: bytes | None) -> None:
        heard, self._heard = self._heard, None
        if heard is not None:
            heard(answer)


class ControlLinks:
    """All of them."""

    def __init__(self, sdp: Sdp, peers: Peers) -> None:
        self._sdp: Final = sdp
        self._peers: Final = peers
        self._making: dict[tuple[Address, Address], list[Reached]] = {}  # by both addresses; who waits
        self._made: dict[tuple[Address, Address], ControlLink] = {}
        self._taken: set[ControlLink] = set()

    def close(self) -> None:
        """Ends all."""
        for way in list(self._making):
            self._reached(way, None)
        for link in (*self._made.values(), *self._taken):
            link.close()

    def reach(self, local: Address, host: str, reached: Reached) -> None:
        """Calls `reached`, now or later, with the link to the provider of that host; None: there is none."""
        way = local, ip_address(host)
        if (link := self._made.get(way)) is not None:
            reached(link)
        elif (waiting := self._making.get(way)) is not None:
            if len(waiting) < limits.PEERS_WAITING_MAX:
                waiting.append(reached)
            else:
                reached(None)
        elif len(self._made) + len(self._making) >= limits.CONTROL_LINKS_MAX:
            reached(None)
        else:
            self._making[way] = [reached]
            self._ask(way, None)

    def take(self, stream: SdpStream, local: Address, remote: Address) -> None:
        """Another provider has made one, to an address of this host."""
        link = ControlLink(
            stream, self._sdp.loop, partial(self._asked, local, remote), lambda: self._taken.discard(link),
            self._sdp.services.log, lambda question: self._sdp.answer(local, remote, question),
        )  # fmt: skip
        self._taken.add(link)

    def ask(self, local: Address, host: str, question: bytes, heard: AnswerHandler) -> Callable[[], None]:
        """`Route.ask` of resynchronisation."""
        asked = Question(heard)
        self.reach(local, host, lambda link: asked.begin(link, question))
        return asked.take_back

    def silent(self, host: Address) -> bool:
        """Whether there is none to that host as it has not been heard in time."""
        return self._peers.silent(Endpoint(host, PROVIDER_ITSELF))

    def check_room(self) -> None:
        """Raises LimitReached if no more are taken."""
        if len(self._taken) >= limits.CONTROL_LINKS_MAX:
            raise LimitReached(f"{limits.CONTROL_LINKS_MAX} control links are open")

    # ---- making one ----

    def _ask(self, way: tuple[Address, Address], unanswered: int | None) -> None:
        """Where the provider is; `vain`: where nobody answered."""
        local, remote = way
        there = Endpoint(remote, PROVIDER_ITSELF)
        if unanswered is not None:
            self._peers.doubt(there, unanswered)
        self._peers.ask(Endpoint(local, 0), there, partial(self._connect, way, unanswered))

    def _connect(self, way: tuple[Address, Address], unanswered: int | None, port: int | None) -> None:
        local, remote = way
        if port is None or port == unanswered:
            self._reached(way, None)
            return
        promotion = Promotion(Purpose.CONTROL, 0, secrets.token_bytes(16))
        try:
            self._sdp.mapped_stack(Request(Endpoint(local, 0), Endpoint(remote, 0), None)).connect(
                str(remote), Addresses(local, 0, remote, port),
                partial(self._handle_event, way, unanswered is not None, port),
                beside_hello=lambda hello: promotion.encode(hello, self._sdp.key),
            )  # fmt: skip
        except SidestepError as why:
            self._sdp.services.log(f"no control link with {remote}: {why}")
            self._reached(way, None)

    def _handle_event(
        self, way: tuple[Address, Address], again: bool, port: int, stream: SdpStream, event: StreamEvent
    ) -> None:
        """Until there is a link."""
        if not isinstance(event, SdpEvent):
            return
        if event.kind is SdpEventKind.ESTABLISHED:
            link = ControlLink(
                stream, self._sdp.loop, None, lambda: self._made.pop(way, None) and None, self._sdp.services.log
            )
            self._made[way] = link
            link.begin()
            self._reached(way, link)
        elif event.kind is SdpEventKind.BROKEN:
            if not again and isinstance(event.error, Unavailable):
                self._sdp.loop.soon(partial(self._ask, way, port))  # it may have been started anew, at another port
            else:
                self._reached(way, None)

    def _reached(self, way: tuple[Address, Address], link: ControlLink | None) -> None:
        for reached in self._making.pop(way, ()):
            reached(link)

    # ---- answering ----

    def _asked(self, local: Address, remote: Address, link: ControlLink, number: int, req: Req) -> Talker | None:
        manager = self._sdp.manager_for(req.wire, local, remote)
        if manager is None:
            link.send(Kind.REJ, number, Rej(REJECT_INVALID_SERVICE_ID).encode())
            return None
        return manager.take(link, number, req)
