"""The software RNIC: an RDMA device that speaks iWARP over the kernel's TCP.

    device = IwarpDevice("198.18.1.1")
    ...                                  # as any device: alloc_pd, create_cq, cm.listen, cm.connect
    device.loop.turn()                   # drives it; see `sidestep.loop`

Several devices may share a loop. Nothing needs a privilege: ports are TCP ports.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from secrets import SystemRandom
from typing import TYPE_CHECKING, Final

from sidestep import limits
from sidestep.counters import Counters
from sidestep.loop import Loop
from sidestep.rdma.iwarp.counting import EVENTS, StreamTally
from sidestep.rdma.iwarp.manager import IwarpManager
from sidestep.rdma.iwarp.qp import IwarpQueuePair
from sidestep.rdma.iwarp.startup.frame import ENHANCED_LEN, PRIVATE_DATA_MAX
from sidestep.rdma.iwarp.startup.terms import MpaSettings
from sidestep.rdma.iwarp.tap import Taps
from sidestep.rdma.iwarp.tcp import check_address
from sidestep.rdma.soft.device import SoftDevice
from sidestep.rdma.verbs import DeviceAttributes

if TYPE_CHECKING:
    from sidestep.rdma.iwarp.stream import RdmapStream
    from sidestep.rdma.soft.keys import Memory
    from sidestep.rdma.soft.memory import QpInit

_NUDGES_S: Final = tuple(limits.IWARP_NUDGE_S * 10**number for number in range(limits.IWARP_NUDGES_MAX))
_PRIVATE_DATA: Final = PRIVATE_DATA_MAX - ENHANCED_LEN
ATTRIBUTES: Final = DeviceAttributes(
    request_private_data_max=_PRIVATE_DATA,
    reply_private_data_max=_PRIVATE_DATA,
    reject_private_data_max=_PRIVATE_DATA,
    private_data_padded=False,
    reject_reasons=False,  # MPA has room for private data only
    message_max=(1 << 32) - 1,  # RFC 5041 5.2
    read_scatter_max=1,  # RFC 5040 5.2: one buffer at either end
    read_depth_max=limits.IWARP_READS_MAX,
    atomics=False,  # RFC 7306 has them, as an extension that is not spoken here
    immediate=False,  # likewise
    acknowledged=False,
    error_disconnects=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class IwarpSettings:
    """Choices of a device's owner; times are in seconds.

    Between two of these devices a start-up is peer-to-peer: a message of no length tells the end that accepted that it
    may send. `startup` has what else is said there; read depths come from the queue pair.
    """

    startup: MpaSettings = field(default_factory=lambda: MpaSettings(peer_to_peer=True))
    connect_s: float = 20.0  # for TCP's handshake
    close_s: float = limits.IWARP_CLOSE_S  # for the other end's FIN, once ours is out; then RST
    silence_s: float = limits.IWARP_SILENCE_S  # what is not acknowledged so long breaks the connection
    nudges_s: tuple[float, ...] = _NUDGES_S  # who asked: pauses, as long as the other end says nothing
    half_open_max: int = limits.IWARP_HALF_OPEN_MAX  # connections whose Request is not here; the oldest gives way


class IwarpDevice(SoftDevice):
    """One of them.

    Args:
        address: The IP address that its connections come from, and that it listens on.
        loop: What drives it; its own unless given, and then closed with it.
        settings: Times and bounds.
        name: For people.
        attributes: Fewer than `ATTRIBUTES`, if wanted.

    Raises:
        Misuse: The address is none; names are not looked up here.
    """

    cm: IwarpManager

    def __init__(
        self,
        address: str,
        loop: Loop | None = None,
        settings: IwarpSettings | None = None,
        *,
        name: str = "iwarp",
        attributes: DeviceAttributes = ATTRIBUTES,
    ) -> None:
        check_address(address)
        self.loop = loop or Loop()
        self._owns_loop = loop is None
        super().__init__(name, address, attributes, self.loop.notices, SystemRandom())
        self.settings = settings or IwarpSettings()
        self._qp_number = 0
        self.taps: Taps = Taps(name)
        self.events = Counters(EVENTS)
        self.streams: set[RdmapStream] = set()  # with a socket, those that only end included
        self._ended = StreamTally()  # of those that had one
        self.cm = IwarpManager(self)

    def close(self) -> None:
        if not self.closed:
            super().close()
            if self._owns_loop:
                self.loop.close()

    def end_connections(self) -> None:
        self.cm.close()

    def make_qp(self, init: QpInit) -> IwarpQueuePair:
        return IwarpQueuePair(self, init)

    def access_ended(self, memory: Memory) -> None:
        """What waits to be sent out of it is copied: it is its owner's from now on."""
        for qp in memory.domain.queue_pairs:
            assert isinstance(qp, IwarpQueuePair)
            if qp.stream is not None:
                qp.stream.own()

    def stream_closed(self, stream: RdmapStream) -> None:
        """What it counted stays."""
        if stream in self.streams:
            self.streams.discard(stream)
            self._ended.add(stream.tally)

    def counters(self) -> dict[str, int]:
        """What happened so far and is not zero, and what there is now, by the names of `counting.NAMES`."""
        whole = StreamTally()
        whole.add(self._ended)
        for stream in self.streams:
            whole.add(stream.tally)
        present = {
            "connections": len(self.cm.connections),
            "listeners": len(self.cm.listeners),
            "half_open": len(self.cm.half_open),
            "requests_pending": len(self.cm.requests),
            "queue_pairs": sum(len(domain.queue_pairs) for domain in self.domains),
            "regions": self.region_count,
            "windows": self.window_count,
            "keys": len(self.keys),
            "captures": len(self.taps),
        }
        return whole.as_json() | self.events.as_json() | present

    def queue_pairs(self) -> list[dict[str, object]]:
        """Each as it is, by number: its state, what is posted, and what goes over its connection."""
        found = [qp for domain in self.domains for qp in domain.queue_pairs if isinstance(qp, IwarpQueuePair)]
        return [qp.details() for qp in sorted(found, key=lambda qp: qp.number)]

    def listening(self) -> list[int]:
        return self.cm.ports

    def next_qp_number(self) -> int:
        """Of 24 bits; 0 and 1 mean something elsewhere."""
        in_use = {qp.number for domain in self.domains for qp in domain.queue_pairs} if self._qp_number >> 24 else ()
        while True:
            self._qp_number += 1
            number = self._qp_number & 0xFF_FFFF
            if number > 1 and number not in in_use:
                return number
