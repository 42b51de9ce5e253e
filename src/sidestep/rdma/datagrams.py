"""The datagram service: messages of up to 64 KiB to anybody, over unreliable datagrams.

    service = DatagramService(device, QKEY, print, lambda: loop.now)
    service.send("10.0.0.2", number, b"...")      # the number of the other end's queue pair: `service.number`

A message is cut into datagrams and put together by `segments`: it comes once and whole, or not at all, and nobody tells
which; messages may overtake each other. Both ends have the same Q_Key. Who talks to whom is agreed otherwise, as with
all datagrams.

It works on any device that has UD queue pairs, from where the device is driven, and needs no timer: what is not whole
is also bounded in bytes. Who wants it to go in time calls `handle_timeout` at `next_deadline`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from secrets import SystemRandom
from typing import TYPE_CHECKING, Final

from sidestep import limits
from sidestep.errors import LimitReached, Misuse, PeerViolation, Unavailable
from sidestep.rdma import grh
from sidestep.rdma.pools import DatagramPool, Element, MessagePool
from sidestep.rdma.segments import HEADER_LEN, Reassembly, segments
from sidestep.rdma.soft.handles import check_datagrams
from sidestep.rdma.verbs import QpCapabilities, QpState
from sidestep.rdma.work import GRH_LEN, Opcode, Receive, UdSend

if TYPE_CHECKING:
    from sidestep.rdma.verbs import AddressHandle, Device, EventHandler
    from sidestep.rdma.work import Completion

_DATAGRAM_MAX: Final = 4096  # bytes: the largest path MTU (IBTA 9.4)
_NUMBERS: Final = 1 << 32  # of messages; then they begin anew


@dataclass(frozen=True, slots=True)
class Message:
    """One that has come."""

    address: str
    number: int  # of the queue pair that has sent it
    data: bytes | bytearray


class _Way:
    """An address handle, and how many messages that are not sent need it."""

    __slots__ = ("ah", "uses")

    def __init__(self, ah: AddressHandle) -> None:
        self.ah = ah
        self.uses = 0


@dataclass(slots=True)
class _Outgoing:
    """A message that is being sent."""

    way: _Way
    number: int  # of the queue pair that is to get it
    segments: Iterator[tuple[bytes, memoryview]]
    posted: int = 0  # of its segments, not completed
    cut: bool = False  # there are no more


class DatagramService:
    """One end of it, with a queue pair of its own.

    Args:
        device: Which has datagrams.
        qkey: Of this end and all whom it sends to; who knows it may send to this end.
        received: Is called with each message.
        clock: Monotonic seconds.
        rng: Where numbers of messages begin.
        on_event: Of the queue pair: it is over after a fatal one.

    Raises:
        Misuse: The device has no datagrams, or the Q_Key is none.
        LimitReached: The device has no room for it.
    """

    def __init__(
        self, device: Device, qkey: int, received: Callable[[Message], object], clock: Callable[[], float], *,
        rng: Random | None = None, on_event: EventHandler | None = None,
    ) -> None:  # fmt: skip
        check_datagrams(device.attributes, qkey)
        self._qkey = qkey
        self._received = received
        self._clock = clock
        self._message = (rng or SystemRandom()).randrange(_NUMBERS)
        self._reassembly = Reassembly()
        self._ways: OrderedDict[str, _Way] = OrderedDict()
        self._waiting: deque[_Outgoing] = deque()
        self._sending: dict[int, tuple[Element, _Outgoing]] = {}  # by number of the request
        self._receiving: dict[int, Element] = {}
        self._request = 0
        self._domain = device.alloc_pd()
        most = device.attributes.work_requests_max
        sends, receives = min(limits.DATAGRAM_BUFFERS, most), min(limits.DATAGRAM_RECEIVES, most)
        self._cq = device.create_cq(sends + receives, self._on_completions)
        room = QpCapabilities(max_send_wr=sends, max_recv_wr=receives)
        self._qp = self._domain.create_ud_qp(self._cq, self._cq, qkey, room, on_event=on_event)
        self._sends = MessagePool(self._domain, size=_DATAGRAM_MAX, count=sends)
        self._receives = DatagramPool(self._domain, size=_DATAGRAM_MAX, count=receives)
        while (element := self._receives.take()) is not None:
            self._post(element)

    @property
    def number(self) -> int:
        """Of the queue pair: what others send to."""
        return self._qp.number

    def send(self, address: str, number: int, message: bytes) -> None:
        """Sends a message to a service at this address, whose queue pair has this number.

        Raises:
            Misuse: It is too long, or address or number are none.
            LimitReached: Too many messages wait, or go to too many addresses at a time.
            Unavailable: The address cannot be reached, or the service is over.
        """
        if self._qp.state is not QpState.RTS:
            raise Unavailable("the datagram service is over")
        if not 0 < number < 0xFF_FFFF:
            raise Misuse(f"{number:#x} is not the number of a queue pair")
        if len(self._waiting) >= limits.DATAGRAM_SENDS_MAX:
            raise LimitReached(f"{limits.DATAGRAM_SENDS_MAX} messages wait to be sent already")
        way = self._way_to(address)
        outgoing = _Outgoing(way, number, segments(bytes(message), self._message, way.ah.mtu))
        self._message = (self._message + 1) % _NUMBERS
        way.uses += 1
        self._waiting.append(outgoing)
        self._pump()

    def next_deadline(self) -> float | None:
        """When `handle_timeout` would find something."""
        return self._reassembly.next_deadline()

    def handle_timeout(self, now: float) -> None:
        """Messages that are not whole in time are lost."""
        self._reassembly.handle_timeout(now)

    def counters(self) -> dict[str, int]:
        """What became of what came, by the names of `segments.EVENTS`, and what there is now."""
        return self._reassembly.events.as_json() | {
            "messages_partial": len(self._reassembly), "messages_waiting": len(self._waiting),
        }  # fmt: skip

    def close(self) -> None:
        """Ends it; what waits is not sent."""
        if self._qp.state is QpState.RESET:
            return
        self._qp.destroy()
        self._waiting.clear()
        self._sending.clear()
        self._receiving.clear()
        self._sends.close()
        self._receives.close()
        for way in self._ways.values():
            way.ah.destroy()
        self._ways.clear()
        self._cq.destroy()
        self._domain.deallocate()

    # --- what goes out ---

    def _way_to(self, address: str) -> _Way:
        way = self._ways.get(address)
        if way is not None:
            self._ways.move_to_end(address)
            return way
        if len(self._ways) >= limits.DATAGRAM_WAYS_MAX:
            idle = next((known for known, each in self._ways.items() if not each.uses), None)
            if idle is None:
                raise LimitReached(f"messages go to {limits.DATAGRAM_WAYS_MAX} addresses already")
            self._ways.pop(idle).ah.destroy()
        way = self._ways[address] = _Way(self._domain.create_ah(address))
        return way

    def _pump(self) -> None:
        """Posts segments as long as there are buffers."""
        while self._waiting and self._sends.available and self._qp.state is QpState.RTS:
            outgoing = self._waiting[0]
            segment = next(outgoing.segments, None)
            if segment is None:
                outgoing.cut = True
                self._waiting.popleft()
                self._see_whether_sent(outgoing)
                continue
            header, payload = segment
            element = self._sends.take()
            assert element is not None
            length = HEADER_LEN + len(payload)
            element.view[:HEADER_LEN] = header
            element.view[HEADER_LEN:length] = payload
            self._request += 1
            self._sending[self._request] = element, outgoing
            outgoing.posted += 1
            self._qp.post_send(
                UdSend(
                    wr_id=self._request, gather=(element.view[:length],), ah=outgoing.way.ah,
                    remote_qpn=outgoing.number, remote_qkey=self._qkey,
                )
            )  # fmt: skip

    # --- what comes ---

    def _post(self, element: Element) -> None:
        self._request += 1
        self._receiving[self._request] = element
        self._qp.post_recv(Receive(self._request, (element.view,)))

    def _on_completions(self, batch: list[Completion]) -> None:
        for each in batch:
            if each.opcode is Opcode.RECEIVE:
                self._on_received(each)
            else:
                self._on_sent(each)
        self._pump()

    def _on_sent(self, done: Completion) -> None:
        found = self._sending.pop(done.wr_id, None)
        if found is None:
            return  # of before `close`
        element, outgoing = found
        self._sends.put(element)
        outgoing.posted -= 1
        self._see_whether_sent(outgoing)

    def _see_whether_sent(self, outgoing: _Outgoing) -> None:
        if outgoing.cut and not outgoing.posted:
            outgoing.way.uses -= 1

    def _on_received(self, done: Completion) -> None:
        element = self._receiving.pop(done.wr_id, None)
        if element is None or not done.ok or done.source_qpn is None:
            return  # of before `close`, or the queue pair is over
        message = None
        try:
            sender = grh.source_of(element.view), done.source_qpn
        except PeerViolation as broken:
            self._reassembly.events.add("segment_dropped", broken.rule)
        else:
            segment = element.payload[: done.byte_len - GRH_LEN]
            data = self._reassembly.handle_segment(sender, segment, self._clock())
            message = None if data is None else Message(*sender, data)
        self._post(element)
        if message is not None:
            self._received(message)
