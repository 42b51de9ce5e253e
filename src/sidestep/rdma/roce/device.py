"""The software HCA: an RDMA device that speaks InfiniBand's transport, as RoCEv2 carries it in UDP.

This is all of it but the socket: datagrams go in and come out, and time is told by who drives it.

    device.handle_datagram(address, port, payload, now)
    while (datagram := device.poll_datagram(now)) is not None: ...
    device.handle_timeout(now)     # when device.next_deadline() has come

`udp_link` drives it with a socket, `wire` in virtual time. A user's call says by `wake` that something is to be sent.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from sidestep import limits
from sidestep.counters import Counters
from sidestep.errors import Misuse, PeerViolation
from sidestep.rdma.iwarp.tap import Taps
from sidestep.rdma.path_mtu import PACKET_OVERHEAD, ROUTE_MTU_UNKNOWN, largest_code
from sidestep.rdma.roce.counting import EVENTS
from sidestep.rdma.roce.datagram import DATAGRAM_MAX, is_intact, known_address, seal
from sidestep.rdma.roce.ip_cm import has_header
from sidestep.rdma.roce.manager import RoceManager
from sidestep.rdma.roce.packet import ICRC_LEN, MTU_CODES, PKEY_DEFAULT, QP_GSI, UDP_PORT, Bth, Op, Packet
from sidestep.rdma.roce.qp import RoceQueuePair
from sidestep.rdma.roce.schedule import Deadlines, Delays
from sidestep.rdma.roce.settings import RoceSettings
from sidestep.rdma.roce.ud import DATAGRAMS, UdQueuePair
from sidestep.rdma.soft.device import SoftDevice
from sidestep.rdma.soft.handles import SoftAddressHandle
from sidestep.rdma.verbs import DeviceAttributes, EventKind

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable
    from random import Random

    from sidestep.rdma.frames import IpAddress
    from sidestep.rdma.soft.memory import Domain, QpInit

ATTRIBUTES: Final = DeviceAttributes(address_handles_max=65536)
_PKEY_PARTITION: Final = 0x7FFF
_QP_FIRST: Final = 17  # as Linux's rxe; the lower ones are special (IBTA 3.9.4), or may be taken for it
_QP_MASK: Final = 0xFF_FFFF
_log: Final = logging.getLogger(__name__)
AnyQueuePair: TypeAlias = RoceQueuePair | UdQueuePair


class Datagram(NamedTuple):
    """One to send."""

    address: str
    payload: bytes | memoryview  # good until the next is polled
    source_port: int = UDP_PORT
    segment: int = 0  # bytes of the datagrams that it is to be cut into


SENT: Final = Datagram("", b"")  # stands for some that the device has sent itself


class RoceDevice(SoftDevice):
    """One of them, without its socket.

    Args:
        address: Its IP address, of which its GID is made.
        notices: Calls to users that wait; whoever drives the device makes them.
        rng: Makes keys and numbers hard to guess: `secrets.SystemRandom()`, or a seeded one in simulations.
        settings: Times and bounds.
        name: For people.
        attributes: Fewer than `ATTRIBUTES`, if wanted.

    Raises:
        Misuse: The address is none; names are not looked up here.
    """

    cm: RoceManager
    train_max = 1  # packets of a connection that one datagram may be cut into

    def __init__(
        self,
        address: str,
        notices: deque[Callable[[], object]],
        rng: Random,
        settings: RoceSettings | None = None,
        *,
        name: str = "roce",
        attributes: DeviceAttributes = ATTRIBUTES,
    ) -> None:
        try:
            self.ip: IpAddress = known_address(address)
        except ValueError as why:
            raise Misuse(f"{address!r} is not an IP address") from why
        if self.ip.is_unspecified or self.ip.is_multicast:
            raise Misuse(f"{address} is not the address of one host", remedy="give one that this host has")
        super().__init__(name, address, attributes, notices, rng)
        self.settings = settings or RoceSettings()
        self.window = self.settings.window  # packets of a queue pair that are not acknowledged
        self.rng = rng
        self.guid = rng.getrandbits(64) | 1
        self.queue_pairs_by_number: dict[int, AnyQueuePair] = {}
        self.events = Counters(EVENTS)
        self.taps: Taps = Taps(name)
        self.delays = Delays()
        self._deadlines: Deadlines[AnyQueuePair] = Deadlines()
        self._busy: dict[AnyQueuePair, None] = {}  # those that may have something to send
        self._left = limits.ROCE_TURN_PACKETS  # that the first of them may send
        self._out = memoryview(bytearray(DATAGRAM_MAX))
        self.senders: Counter[tuple[IpAddress, int]] = Counter()  # queue pairs whose other end sends from there
        self._qp_number = rng.randrange(_QP_FIRST, _QP_MASK)
        self._numbers_given = 0
        self.cm = RoceManager(self)

    # --- a driver's ---

    @abstractmethod
    def wake(self) -> None:
        """Something is to be sent, or a timer begins: `poll_datagram` and `next_deadline` have news."""

    def path_mtu(self, address: str) -> int:
        """Bytes of an IP packet that goes there whole."""
        del address
        return ROUTE_MTU_UNKNOWN

    def source_port(self, qp: RoceQueuePair) -> int:
        """That packets of this queue pair are sent from: always the same."""
        del qp
        return UDP_PORT

    def send_from(self, qp: RoceQueuePair, most: int, now: float) -> tuple[Datagram, int] | None:
        """Sends packets of a queue pair, at most so many: a datagram that has not left, or `SENT`; and their number.

        None: the device cannot do that itself.
        """
        del qp, most, now
        return None

    def sockets_of(self, qp: RoceQueuePair) -> tuple[int, int] | None:
        """Sockets of this queue pair alone, to receive and to send by; None: there are none, or not yet."""
        del qp
        return None

    def leave_to_engine(self, qp: RoceQueuePair) -> None:
        """Nobody else reads and writes there from now on."""

    def take_from_engine(self, qp: RoceQueuePair, left: bytes, segment: int) -> None:
        """It has given that back, and has left datagrams of so many bytes that it did not take."""

    def catch_up(self, qp: RoceQueuePair) -> None:
        """What has come to sockets of this queue pair alone is taken."""

    def handle_datagram(
        self, address: str, port: int, payload: bytes | memoryview, now: float, segment: int = 0
    ) -> None:
        """Takes in one that came to port 4791, or many of `segment` bytes each but the last.

        What is wrong with one is counted, and not answered (IBTA 9.6).
        """
        view, remote = memoryview(payload), known_address(address)
        size = segment or len(view)
        while True:
            if not (taken := self._to_connection(remote, view, size, port, now)):
                taken = min(size, len(view))
                self._handle_other(address, remote, port, bytes(view[:taken]), now)
            if taken >= len(view):
                return
            view = view[taken:]

    def _to_connection(self, remote: IpAddress, view: memoryview, size: int, port: int, now: float) -> int:
        """The bytes of packets that a connection takes."""
        if len(view) < Bth.LENGTH:
            return 0
        qp = self.queue_pairs_by_number.get(int.from_bytes(view[5:8]))
        if not isinstance(qp, RoceQueuePair) or qp.path is None or qp.path.remote != remote:
            return 0
        looked_on = qp.wire is not None and qp.wire.live
        taken = qp.take_in(view[:size] if looked_on else view, size, port, now)
        if taken and looked_on:
            assert qp.wire is not None
            qp.wire.passed(port, view[:taken], outbound=False)
        if taken:
            if qp.remote_port != port:
                self._heard_from(qp, port)
            self._busy.setdefault(qp)
        return taken

    def _handle_other(self, address: str, remote: IpAddress, port: int, payload: bytes, now: float) -> None:
        """One that no connection takes: of the connection manager, of other queue pairs, or to be dropped."""
        view = memoryview(payload)
        try:
            if len(view) < Bth.LENGTH + ICRC_LEN or len(view) % 4:
                self.events.add("packet_dropped", "short")
                return
            if remote.version != self.ip.version or not is_intact(view, remote, self.ip, port):
                self.events.add("packet_dropped", "checksum")
                return
            packet = Packet.decode(view[:-ICRC_LEN])
        except PeerViolation as broken:
            self.events.add("packet_dropped", broken.rule)
            return
        if packet.bth.pkey & _PKEY_PARTITION != PKEY_DEFAULT & _PKEY_PARTITION:
            self.events.add("packet_dropped", "partition")
        elif packet.bth.opcode is Op.CNP:
            self.events.add("packet_dropped", "congestion")  # the window is small enough as it is
        elif packet.bth.dest_qp == QP_GSI:
            self.events.add("packets_received")
            self.cm.handle_packet(address, packet, now, (port, view))
        else:
            self._to_other(remote, packet)

    def poll_datagram(self, now: float) -> Datagram | None:
        """The next one to send."""
        self.delays.begin(now)
        if (message_to := self.cm.poll_packet()) is not None:
            address, message, wire = message_to
            datagram = self._sealed(address, message)
            if wire is not None:
                wire.message(UDP_PORT, datagram.payload, outbound=True)
                wire.sent()
            return datagram
        while self._busy:
            qp = next(iter(self._busy))
            polled, count = self._polled(qp, now)
            self._left -= count
            if not count or self._left <= 0:
                self._left = limits.ROCE_TURN_PACKETS
                self._busy.pop(qp, None)
            if not count:
                self._deadlines.set(qp, qp.deadline)
                continue
            self._busy.setdefault(qp)  # at the end, if it had its turn
            return polled
        return None

    def _polled(self, qp: AnyQueuePair, now: float) -> tuple[Datagram | None, int]:
        """The next datagram of a queue pair, and the packets in it.

        A fault of ours ends one connection, not the loop that serves others.
        """
        try:
            if isinstance(qp, UdQueuePair):
                packet_to = qp.poll_packet(now)
                return (None, 0) if packet_to is None else (self._sealed(*packet_to), 1)
            looked_on = qp.wire is not None and qp.wire.live
            if not looked_on and (sent := self.send_from(qp, self._left, now)) is not None:
                return sent
            train = qp.poll_train(self._out, 1 if looked_on else min(self.train_max, self._left), now)
            if train is None or qp.path is None:
                return None, 0
            length, segment, count = train
            payload = self._out[:length]
            datagram = Datagram(qp.path.address, payload, self.source_port(qp), segment if count > 1 else 0)
            if looked_on and qp.wire is not None:
                qp.wire.passed(datagram.source_port, payload, outbound=True)
            return datagram, count
        except Exception as fault:
            _log.exception("queue pair %d is broken by a fault of sidestep", qp.number)
            qp.break_off(EventKind.QP_FATAL, f"{type(fault).__name__}: {fault}")
            return None, 0

    def next_deadline(self) -> float | None:
        """When `handle_timeout` is to be called next."""
        return min((at for at in (self._deadlines.next(), self.delays.next()) if at is not None), default=None)

    def handle_timeout(self, now: float) -> None:
        """Time has passed."""
        self.delays.run(now)
        while (qp := self._deadlines.take_due(now)) is not None:
            qp.handle_timeout(now)
            self._busy.setdefault(qp)

    # --- everybody's ---

    def make_qp(self, init: QpInit) -> RoceQueuePair:
        return RoceQueuePair(self, init)

    def make_ud_qp(self, init: QpInit, qkey: int) -> UdQueuePair:
        return UdQueuePair(self, init, qkey)

    def make_ah(self, domain: Domain, address: str) -> SoftAddressHandle:
        remote, address = self.reached(address)
        if remote.is_multicast or remote.is_unspecified:
            raise Misuse(f"{address} is not the address of one host")
        return SoftAddressHandle(domain, address, MTU_CODES[self.mtu_code_to(address)])

    def reached(self, address: str) -> tuple[IpAddress, str]:
        """An address on the wire, and as sockets tell it; Misuse if it is none, or of another version of IP."""
        try:
            remote = known_address(address)
        except ValueError as why:
            raise Misuse(f"{address!r} is not an IP address") from why
        if remote.version != self.ip.version:
            raise Misuse(f"{address} is of another version of IP than {self.address}")
        return remote, str(remote) + address[len(address.partition("%")[0]) :]

    def end_connections(self) -> None:
        self.cm.close()

    def counters(self) -> dict[str, int]:
        """What happened so far and is not zero, and what there is now."""
        for qp in self.queue_pairs_by_number.values():
            if isinstance(qp, RoceQueuePair):
                qp.count()
        present = {
            "connections": len(self.cm.connections),
            "listeners": len(self.cm.listeners),
            "requests_pending": len(self.cm.requests),
            "queue_pairs": len(self.queue_pairs_by_number),
            "regions": self.region_count,
            "windows": self.window_count,
            "address_handles": self.ah_count,
            "keys": len(self.keys),
            "captures": len(self.taps),
        }
        return self.events.as_json() | present

    def listening(self) -> list[int]:
        """Ports of rdma_cm's TCP port space, and the numbers of other services."""
        return sorted({_port(each.service_id) for each in self.cm.listeners})

    def queue_pairs(self) -> list[dict[str, object]]:
        """Each as it is, by number."""
        return [qp.details() for _, qp in sorted(self.queue_pairs_by_number.items())]

    # --- for queue pairs ---

    def has_work(self, qp: AnyQueuePair) -> None:
        if qp not in self._busy:
            self._busy[qp] = None
            self.wake()

    def forget_qp(self, qp: AnyQueuePair) -> None:
        self.queue_pairs_by_number.pop(qp.number, None)
        if isinstance(qp, RoceQueuePair):
            self._heard_from(qp, None)
        self._busy.pop(qp, None)
        self._deadlines.set(qp, None)

    def next_qp_number(self) -> int:
        """One that no queue pair has, nor a connection that late packets may still come for (IBTA 12.9.8.4)."""
        self._numbers_given += 1
        around = self._numbers_given > _QP_MASK >> 1
        kept = {each.qp.number for each in self.cm.connections.values()} if around else ()
        while True:
            number = self._qp_number = self._qp_number + 1 & _QP_MASK
            if _QP_FIRST <= number < _QP_MASK and number not in self.queue_pairs_by_number and number not in kept:
                return number

    def mtu_code_to(self, address: str) -> int:
        """The largest MTU of this device whose packets go there whole."""
        return largest_code(min(self.settings.mtu, self.path_mtu(address) - PACKET_OVERHEAD))

    def _heard_from(self, qp: RoceQueuePair, port: int | None) -> None:
        """Packets of the other end come from there; None: from nowhere."""
        if qp.path is not None and qp.remote_port is not None:
            sender = qp.path.remote, qp.remote_port
            self.senders[sender] -= 1
            if not self.senders[sender]:
                del self.senders[sender]
        qp.remote_port = port
        if qp.path is not None and port is not None:
            self.senders[qp.path.remote, port] += 1

    def _to_other(self, remote: IpAddress, packet: Packet) -> None:
        qp = self.queue_pairs_by_number.get(packet.bth.dest_qp)
        if qp is None:
            self.events.add("packet_dropped", "no_queue_pair")
        elif isinstance(qp, UdQueuePair):
            if (reason := qp.handle_packet(remote, packet)) is None:
                self.events.add("packets_received")
            else:
                self.events.add("packet_dropped", reason)
        elif packet.bth.opcode in DATAGRAMS:
            self.events.add("packet_dropped", "transport")
        elif qp.path is None or qp.path.remote != remote:
            self.events.add("packet_dropped", "other_end")  # IBTA 9.6.1.5: of whom it is not connected to
        else:
            self.events.add("packet_dropped", "state")

    def _sealed(self, address: str, packet: Packet) -> Datagram:
        self.events.add("packets_sent")
        return Datagram(address, seal(packet.encode(), self.ip, known_address(address)))


def _port(service_id: int) -> int:
    return service_id & 0xFFFF if has_header(service_id) else service_id
