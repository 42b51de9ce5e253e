"""The control link between two providers: what they tell each other to connect queue pairs, one record after another.

It is an SDP connection of its own over the wire that the port mapper tells of, and shows once, beside its Hello, that
both have the key (`Purpose.CONTROL`). Who has made it asks by it; so two hosts that ask each other have two. It is as
reliable and ordered as TCP, so nothing is said twice. When it breaks, all that was connected by it is disconnected: the
connections of programs settle by a new one, or by none, and go on over TCP.

A record is a header of 8 bytes, big-endian, and its body: kind, length of the body, number of the connection that the
asking end has chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from sidestep import limits
from sidestep.errors import PeerViolation
from sidestep.loop import nothing
from sidestep.rdma.cm import REJECT_NO_RESOURCES
from sidestep.rdma.verbs import QpEndpoint
from sidestep.sdp.endpoint import ignore_event
from sidestep.sdp.requests import SdpEvent, SdpEventKind, StreamEvent, StreamReceive, StreamSend

if TYPE_CHECKING:
    from sidestep.rdma.cm import Driver
    from sidestep.sdp.endpoint import SdpStream

_HEADER: Final = Struct(">BxHI")
_REQUEST: Final = Struct(">16sQBB")
_REPLY: Final = Struct(">BB")
_REJECT: Final = Struct(">H")
_ENDPOINT: Final = Struct(">16sIIHxx")
PRIVATE_DATA_MAX: Final = 512  # bytes: as iWARP's, so that what fits there fits here
_BODY_MAX: Final = _REQUEST.size + _ENDPOINT.size + PRIVATE_DATA_MAX


class Kind(IntEnum):
    """Those of the connection manager of InfiniBand (IBTA 12.6), as far as they are needed here; and a question."""

    REQ = 1
    REP = 2
    RTU = 3
    REJ = 4
    DREQ = 5
    DREP = 6
    ASK = 7  # what has become of a link whose queue pairs are no more; see `resync`
    ANSWER = 8


@dataclass(frozen=True, slots=True)
class Req:
    """Asks for a connection."""

    wire: str
    service_id: int
    responder_resources: int
    initiator_depth: int
    endpoint: QpEndpoint
    private_data: bytes

    def encode(self) -> bytes:
        head = _REQUEST.pack(self.wire.encode(), self.service_id, self.responder_resources, self.initiator_depth)
        return head + _packed(self.endpoint) + self.private_data

    @classmethod
    def decode(cls, body: bytes) -> Self:
        wire, service_id, resources, depth = _unpacked(_REQUEST, body)
        name = wire.rstrip(b"\0").decode(errors="replace")
        private_data = body[_REQUEST.size + _ENDPOINT.size :]
        return cls(name, service_id, resources, depth, _endpoint_in(body, _REQUEST.size), private_data)


@dataclass(frozen=True, slots=True)
class Rep:
    """Says yes."""

    responder_resources: int
    initiator_depth: int
    endpoint: QpEndpoint
    private_data: bytes

    def encode(self) -> bytes:
        head = _REPLY.pack(self.responder_resources, self.initiator_depth)
        return head + _packed(self.endpoint) + self.private_data

    @classmethod
    def decode(cls, body: bytes) -> Self:
        resources, depth = _unpacked(_REPLY, body)
        private_data = body[_REPLY.size + _ENDPOINT.size :]
        return cls(resources, depth, _endpoint_in(body, _REPLY.size), private_data)


@dataclass(frozen=True, slots=True)
class Rej:
    """Says no, or has given up."""

    reason: int  # IBTA 12.6.7.2
    private_data: bytes = b""

    def encode(self) -> bytes:
        return _REJECT.pack(self.reason) + self.private_data

    @classmethod
    def decode(cls, body: bytes) -> Self:
        (reason,) = _unpacked(_REJECT, body)
        return cls(reason, body[_REJECT.size :])


class Talker(Protocol):
    """What a record is for."""

    def handle_record(self, kind: Kind, body: bytes) -> None:
        """It has come; raises PeerViolation."""

    def handle_lost(self) -> None:
        """The link is no more."""


class ControlLink:
    """One link.

    Args:
        stream: Of an established SDP connection, or one that is about to be; its `tell` is this one's from now on.
        driver: What calls `on_lost`.
        asked: Takes a request of the other end, with the number that it goes by, and gives who hears what follows, if
            anything may; None: that end only answers.
        question: Answers what the other end asks; likewise.
        on_lost: Called once when the link is no more.
        log: Hears of rules that the other provider broke.
    """

    def __init__(
        self,
        stream: SdpStream,
        driver: Driver,
        asked: Callable[[ControlLink, int, Req], Talker | None] | None,
        on_lost: Callable[[], object],
        log: Callable[[str], None],
        question: Callable[[bytes], bytes] | None = None,
    ) -> None:
        self._stream = stream
        self._driver = driver
        self._asked = asked
        self._on_lost = on_lost
        self._log = log
        self._question = question
        self._talkers: dict[int, Talker] = {}
        self._header = memoryview(bytearray(_HEADER.size))
        self._body: memoryview | None = None  # that is being received
        self._unsent = 0  # records on their way
        self._next = 0
        self.open = True
        stream.tell = self._handle_event

    @property
    def address(self) -> str:
        """The other host's."""
        return self._stream.address

    def begin(self) -> None:
        """The stream is established: what comes is taken from now on."""
        self._stream.receive(self._header, waitall=True)

    def add(self, talker: Talker) -> int:
        """Gives a number to a connection that this end asks for."""
        self._next = (self._next + 1) & 0xFFFF_FFFF
        self._talkers[self._next] = talker
        return self._next

    def hand_over(self, number: int, talker: Talker) -> None:
        """That one hears what follows."""
        self._talkers[number] = talker

    def remove(self, number: int) -> None:
        self._talkers.pop(number, None)

    def send(self, kind: Kind, number: int, body: bytes = b"") -> None:
        """Says something; nothing happens where the link is no more."""
        if not self.open:
            return
        self._unsent += 1
        if self._unsent > limits.CONTROL_RECORDS_MAX:
            self._break(PeerViolation(f"it takes none of {self._unsent} records", rule="control_records"))
            return
        self._stream.send_together([memoryview(_HEADER.pack(kind, len(body), number) + body)], bcopy_only=True)

    def close(self) -> None:
        """Ends it, and all that has been connected by it."""
        if not self.open:
            return
        self.open = False
        self._stream.tell = ignore_event
        self._stream.abort()
        self._lost()

    def _lost(self) -> None:
        self.open = False
        talkers, self._talkers = self._talkers, {}
        for talker in talkers.values():
            talker.handle_lost()
        on_lost, self._on_lost = self._on_lost, nothing
        on_lost()

    def _break(self, why: PeerViolation) -> None:
        self._log(f"the control link with {self.address or 'another host'} is closed: {why}")
        self._driver.notices.append(self.close)  # not in the midst of what the stream tells

    # ---- in ----

    def _handle_event(self, _stream: SdpStream, event: StreamEvent) -> None:
        if not self.open:
            return
        if type(event) is StreamReceive:
            try:
                self._received(event)
            except PeerViolation as why:
                self._break(why)
        elif type(event) is StreamSend:
            self._unsent -= 1
        elif isinstance(event, SdpEvent):
            if event.kind is SdpEventKind.ESTABLISHED:
                self.begin()
            else:
                self._driver.notices.append(self.close)

    def _received(self, receive: StreamReceive) -> None:
        if receive.filled < receive.length:
            self._driver.notices.append(self.close)
            return
        kind, length, number = _HEADER.unpack(self._header)
        if self._body is None and length:
            if length > _BODY_MAX:
                raise PeerViolation(f"a record of {length} bytes", rule="control_record")
            self._body = memoryview(bytearray(length))
            self._stream.receive(self._body, waitall=True)
            return
        body, self._body = bytes(self._body or b""), None
        try:
            self._take(Kind(kind), number, body)
        except ValueError:
            raise PeerViolation(f"a record of kind {kind}", rule="control_record") from None
        self.begin()

    def _take(self, kind: Kind, number: int, body: bytes) -> None:
        talker = self._talkers.get(number)
        if kind is Kind.REQ:
            if self._asked is None:
                raise PeerViolation("it asks where it is to answer", rule="control_request")
            if talker is not None:
                talker.handle_record(kind, body)
                return
            if len(self._talkers) >= limits.CONTROL_CONNECTIONS_MAX:
                self.send(Kind.REJ, number, Rej(REJECT_NO_RESOURCES).encode())
                return
            taken = self._asked(self, number, Req.decode(body))
            if taken is not None:
                self._talkers[number] = taken
        elif kind is Kind.ASK:
            if self._question is None:
                raise PeerViolation("it asks where it is to answer", rule="control_request")
            self.send(Kind.ANSWER, number, self._question(body))
        elif talker is not None:
            talker.handle_record(kind, body)
        elif kind is Kind.DREQ:  # it was over here when that was said
            self.send(Kind.DREP, number)


def _packed(endpoint: QpEndpoint) -> bytes:
    return _ENDPOINT.pack(endpoint.gid, endpoint.number, endpoint.psn, endpoint.mtu)


def _unpacked(layout: Struct, body: bytes) -> tuple[Any, ...]:
    if len(body) < layout.size:
        raise PeerViolation(f"a record of {len(body)} bytes", rule="control_record")
    return layout.unpack_from(body)


def _endpoint_in(body: bytes, at: int) -> QpEndpoint:
    if len(body) < at + _ENDPOINT.size:
        raise PeerViolation(f"a record of {len(body)} bytes", rule="control_record")
    gid, number, psn, mtu = _ENDPOINT.unpack_from(body, at)
    if number >> 24 or psn >> 24 or mtu not in _MTUS:
        raise PeerViolation(f"queue pair {number:#x}, PSN {psn:#x}, MTU {mtu}", rule="control_endpoint")
    return QpEndpoint(gid, number, psn, mtu)


_MTUS: Final = frozenset({256, 512, 1024, 2048, 4096})  # IBTA 9.2: what a path may have
