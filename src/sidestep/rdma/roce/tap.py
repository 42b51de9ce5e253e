"""The packets of connections, for those who look on at a software HCA; see `rdma.iwarp.tap`.

A wire is a queue pair's connection: its packets, and the messages of the connection manager that made and ended it,
from UDP's header to the checksum, as they are sent and taken in. Packets that come are told before they are looked at,
those that name no queue pair, or have a wrong checksum, not at all.

A wire opens when both queue pairs are known, and what was said until then is told first; an attempt that comes to
nothing is told at its end. Who begins to look on in the middle is told how the connection began. What was sent in
between nobody has kept.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final, Self

from sidestep.errors import PeerViolation
from sidestep.rdma.iwarp.tap import Seen, SeenKind, Speech, WireEnds, next_wire
from sidestep.rdma.roce.datagram import udp_header

if TYPE_CHECKING:
    from sidestep.rdma.iwarp.tap import Tap, Taps

_REMEMBERED_MAX: Final = 20  # messages of a handshake: a REQ is sent sixteen times at most (IBTA 12.6.5)


@dataclass(frozen=True, slots=True)
class Joined:
    """How two queue pairs were joined without InfiniBand's connection manager; pairs begin with the asking end's."""

    service_id: int
    request: bytes  # private data
    reply: bytes
    qp: tuple[int, int]
    psn: tuple[int, int]  # of the first packet to that end
    mtu: int

    def encode(self) -> bytes:
        return json.dumps(asdict(self) | {"request": self.request.hex(), "reply": self.reply.hex()}).encode()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """What `encode` made; raises PeerViolation."""
        try:
            found = json.loads(data)
            (one, other), (psn, other_psn) = found["qp"], found["psn"]
            return cls(
                int(found["service_id"]), bytes.fromhex(found["request"]), bytes.fromhex(found["reply"]),
                (int(one), int(other)), (int(psn), int(other_psn)), int(found["mtu"]),
            )  # fmt: skip
        except (ValueError, TypeError, KeyError) as error:
            raise PeerViolation(f"what joined two queue pairs cannot be read: {error}", rule="malformed") from error


class PacketWire:
    """One connection."""

    __slots__ = (
        "_address", "_closing", "_early", "_joined", "_opened", "_qps", "_remote", "_taps", "active", "live", "number",
        "unsent",
    )  # fmt: skip

    def __init__(self, taps: Taps, address: str, remote: str, *, active: bool) -> None:
        self.number = next_wire()
        self.live = False  # somebody looks on
        self.active = active
        self.unsent = 0  # messages of the connection manager that wait to be sent
        self._taps = taps
        self._address, self._remote = address, remote
        self._qps = 0, 0  # numbers of the queue pairs, this end's first
        self._early: list[Seen] = []  # what made it
        self._joined: tuple[Joined, int] | None = None  # and when that was
        self._opened = self._closing = False

    # --- the connection's side ---

    def opened(self, qp: int, remote_qp: int, joined: Joined | None = None) -> None:
        """Both queue pairs are known; 0: there is none. Not by their connection manager: `joined` tells."""
        self._qps = qp, remote_qp
        self._opened = True
        if joined is not None:
            self._joined = joined, time.time_ns()
        self._taps.opened(self)

    def message(self, port: int, payload: bytes | memoryview, *, outbound: bool) -> None:
        """One of the connection manager's, as the payload of a datagram that comes from that port."""
        remembered = len(self._early) < _REMEMBERED_MAX
        if remembered or self.live:
            seen = self._seen(port, payload, outbound=outbound)
            if remembered:
                self._early.append(seen)
            if self.live:
                self._taps.tell(self, seen)

    def passed(self, port: int, payload: bytes | memoryview, *, outbound: bool) -> None:
        """A packet; called only while somebody looks on, which `live` tells."""
        self._taps.tell(self, self._seen(port, payload, outbound=outbound))

    def sent(self) -> None:
        """One of those unsent has been."""
        self.unsent -= 1
        if self._closing and not self.unsent:
            self._close()

    def closed(self, qp: int = 0) -> None:
        """Nothing follows but what is unsent; `qp` is this end's, should the other one never have been known."""
        if self._closing:
            return
        self._closing = True
        if not self._opened and self._early:
            self.opened(qp, 0)
        if not self.unsent:
            self._close()

    def _close(self) -> None:
        if self.live:
            self._taps.tell(self, Seen(SeenKind.END, self.number, time.time_ns()))
        self._taps.closed(self)

    def _seen(self, port: int, payload: bytes | memoryview, *, outbound: bool) -> Seen:
        data = udp_header(port, len(payload)) + bytes(payload)
        return Seen(SeenKind.PACKET, self.number, time.time_ns(), outbound, data=data)

    # --- who looks on ---

    def introduce(self, tap: Tap, *, began_before: bool = True) -> None:
        (qp, remote_qp), joined = self._qps, self._joined
        begun = joined[1] if joined else self._early[0].time_ns if self._early else time.time_ns()
        ends = WireEnds(
            (self._address, qp), (self._remote, remote_qp), self.active, self._taps.device, began_before, Speech.ROCE
        )
        tap(Seen(SeenKind.OPENED, self.number, begun, ends=ends))
        if joined is not None:
            tap(Seen(SeenKind.JOINED, self.number, begun, data=joined[0].encode()))
        for seen in self._early:
            tap(seen)
