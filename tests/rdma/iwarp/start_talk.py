"""Two start-ups joined by their bytes, in pieces of any size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from mpa_oracle import Deframer

from sidestep.rdma.iwarp.ddp import QUEUE_READ, RdmapOp, ReadRequest, Segment
from sidestep.rdma.iwarp.mpa import fpdu
from sidestep.rdma.iwarp.startup.frame import Rtr
from sidestep.rdma.iwarp.startup.negotiation import Initiator, Responder
from sidestep.rdma.iwarp.startup.terms import Agreed, Asked, Failed, MpaEvent, MpaSettings, ReadDepths, Refused

# The STags and offsets mean nothing (RFC 5041 5.2, RFC 5040 5.2.1). They are those that Linux siw sends.
RTR_SEGMENTS = {
    Rtr.WRITE: Segment(RdmapOp.WRITE, True, stag=1),
    Rtr.READ: Segment(RdmapOp.READ_REQUEST, True, ReadRequest(0, 0, 0, 1, 0).encode(), queue=QUEUE_READ, msn=1),
    Rtr.SEND: Segment(RdmapOp.SEND, True, msn=1),
}


def drained(machine: Initiator | Responder) -> list[MpaEvent]:
    """All that it tells."""
    found = []
    while (event := machine.poll_event()) is not None:
        found.append(event)
    return found


def pieces(stream: bytes, size: int | None) -> list[bytes]:
    """The stream cut at every `size` bytes; None: not at all."""
    if size is None:
        return [stream] if stream else []
    return [stream[start : start + size] for start in range(0, len(stream), size)]


def accepting(private_data: bytes = b"", depths: ReadDepths | None = None) -> Callable[[Responder], None]:
    """A user who says yes."""
    return lambda responder: responder.accept(private_data, depths=depths, now=0.0)


def rejecting(private_data: bytes = b"") -> Callable[[Responder], None]:
    """A user who says no."""
    return lambda responder: responder.reject(private_data)


@dataclass
class Talk:
    """Runs to its end: both ends agree and the first message has gone, or the connection is closed."""

    initiator: Initiator
    responder: Responder
    decide: Callable[[Responder], None]
    size: int | None = None
    told: list[MpaEvent] = field(default_factory=list)  # by the initiator
    heard: list[MpaEvent] = field(default_factory=list)  # by the responder
    wire: list[bytes] = field(default_factory=list)  # in turns, the initiator begins
    first: list[Segment] = field(default_factory=list)  # what came to the responder behind its Reply
    deframer: Deframer | None = None  # of that

    def run(self) -> Talk:
        """To the end."""
        while self._turn():
            pass
        self._send_first()
        for ended, other in ((self.told, self.responder), (self.heard, self.initiator)):
            if any(isinstance(event, Failed | Refused) for event in ended):
                other.handle_closed()
        self._collect()
        return self

    def _turn(self) -> bool:
        out = self.initiator.poll_send()
        for piece in pieces(out, self.size):
            self._to_responder(piece)
        back = self.responder.poll_send()
        for piece in pieces(back, self.size):
            self.initiator.handle_bytes(piece)
        self._collect()
        self.wire += [each for each in (out, back) if each]
        return bool(out or back)

    def _to_responder(self, piece: bytes) -> None:
        if self.deframer is None:
            self.responder.handle_bytes(piece, now=0.0)
            self._collect()
            return
        self.first += [Segment.decode(payload) for payload in self.deframer.feed(piece)]

    def _send_first(self) -> None:
        """The first FPDU of the initiator: an RTR if one was agreed."""
        agreed = next((event for event in self.told if isinstance(event, Agreed)), None)
        if agreed is None or not agreed.rtr:
            return
        frame = fpdu(RTR_SEGMENTS[agreed.rtr].encode(), 0, markers=agreed.markers_out, crc=agreed.crc)
        self.wire.append(frame)
        for piece in pieces(frame, self.size):
            self._to_responder(piece)

    def _collect(self) -> None:
        self.told += drained(self.initiator)
        while (event := self.responder.poll_event()) is not None:
            self.heard.append(event)
            if isinstance(event, Asked):
                self.decide(self.responder)
            if isinstance(event, Agreed):
                self.deframer = Deframer(markers=event.markers_in)


def talk(
    asking: MpaSettings,
    asked: MpaSettings,
    decide: Callable[[Responder], None] | None = None,
    private_data: bytes = b"",
    size: int | None = None,
) -> Talk:
    """One that has run."""
    ends = Initiator(asking, private_data, now=0.0), Responder(asked, now=0.0)
    return Talk(*ends, decide or accepting(), size).run()
