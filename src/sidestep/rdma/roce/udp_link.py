"""The software HCA on UDP sockets.

    device = UdpRoceDevice("198.18.2.1")
    ...                                  # as any device: alloc_pd, create_cq, cm.listen, cm.connect
    device.loop.turn()                   # drives it; see `sidestep.loop`

One socket, bound to the device's address and port 4791, receives for all queue pairs. No privilege is needed, but
nobody else may have the port at that address: a kernel with rdma_rxe loaded has it at all of them. Each queue pair
sends from a port of its own, and has a socket of its own to receive once the engine is to have it (`own_sockets`).
"""

from __future__ import annotations

import errno
import logging
import socket
from contextlib import suppress
from functools import partial
from secrets import SystemRandom
from typing import TYPE_CHECKING, Final

from sidestep import limits
from sidestep.errors import SidestepError, Unavailable
from sidestep.loop import READ, WRITE, Loop, Timer
from sidestep.rdma.path_mtu import route_mtu
from sidestep.rdma.roce.datagram import DATAGRAM_MAX
from sidestep.rdma.roce.device import ATTRIBUTES, SENT, Datagram, RoceDevice
from sidestep.rdma.roce.own_sockets import (
    CONTROL_LEN,
    OwnSockets,
    cut_into,
    join_received,
    segment_of,
    unfragmented,
)
from sidestep.rdma.roce.packet import UDP_PORT

if TYPE_CHECKING:
    from sidestep.rdma.roce.device import AnyQueuePair
    from sidestep.rdma.roce.qp import RoceQueuePair
    from sidestep.rdma.roce.settings import RoceSettings
    from sidestep.rdma.verbs import DeviceAttributes

_ROOM_FACTOR: Final = 1.6  # bytes of a receive buffer for one of payload
_TRAIN_MAX: Final = 64  # UDP_MAX_SEGMENTS of older kernels
_log: Final = logging.getLogger(__name__)


class UdpRoceDevice(RoceDevice):
    """One of them.

    Args:
        address: The IP address that its packets come from, and go to.
        loop: What drives it; its own unless given, and then closed with it.
        settings: Times and bounds.
        name: For people.
        attributes: Fewer than `ATTRIBUTES`, if wanted.

    Raises:
        Misuse: The address is none; names are not looked up here.
        Unavailable: The address or its port 4791 cannot be had.
    """

    def __init__(
        self,
        address: str,
        loop: Loop | None = None,
        settings: RoceSettings | None = None,
        *,
        name: str = "roce",
        attributes: DeviceAttributes = ATTRIBUTES,
    ) -> None:
        self.train_max = _TRAIN_MAX
        self.loop = loop or Loop()
        self._owns_loop = loop is None
        self._timer: Timer | None = None
        self._timer_at = 0.0
        self._unsent: Datagram | None = None  # the kernel had no room for it
        self._own: dict[AnyQueuePair, OwnSockets] = {}
        self._sending: dict[int, socket.socket] = {}  # by their ports
        self._room = memoryview(bytearray(DATAGRAM_MAX))
        super().__init__(address, self.loop.notices, SystemRandom(), settings, name=name, attributes=attributes)
        self._sock = _opened(address, self.ip.version, self.settings.receive_buffer)
        self._sending[UDP_PORT] = self._sock
        # Sockets drop bursts. The other end's buffer is taken to be like this one's, in which packets need more room.
        room = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        self.window = min(self.window, max(1, int(room / _ROOM_FACTOR) // self.settings.mtu))
        self.loop.watch(self._sock.fileno(), READ, self._on_ready)

    # --- the core's side ---

    def source_port(self, qp: RoceQueuePair) -> int:
        if (own := self._own.get(qp)) is None:
            own = self._own[qp] = OwnSockets(self.address, self.ip.version, self.settings.receive_buffer)
            if own.sending is not None:
                self._sending[own.source_port] = own.sending
        return own.source_port

    def send_from(self, qp: RoceQueuePair, most: int, now: float) -> tuple[Datagram, int] | None:
        if qp.path is None or "%" in qp.path.address:
            return None
        port = self.source_port(qp)
        fd = self._sending[port].fileno()
        count, failed, length, segment = qp.send_trains(fd, self._out, most, self.train_max, now)
        return (Datagram(qp.path.address, self._out[:length], port, segment) if failed else SENT), count

    def sockets_of(self, qp: RoceQueuePair) -> tuple[int, int] | None:
        own, path, port = self._own.get(qp), qp.path, qp.remote_port
        if own is None or path is None or port is None or port == UDP_PORT or "%" in path.address:
            return None
        if self.senders[path.remote, port] > 1 or (self._unsent is not None and self._unsent.source_port != UDP_PORT):
            return None  # the kernel would not tell them apart; or it may be one of these
        if own.joined_to == port:
            return own.fds
        self._part(own)
        if own.join(path.address, port):  # what has come to the other socket until now is read first
            self._watch_own(qp, own)
            self.loop.soon(partial(self._on_own, qp, own))
        return None

    def leave_to_engine(self, qp: RoceQueuePair) -> None:
        own = self._own[qp]
        assert own.receiving is not None
        self.loop.forget(own.receiving.fileno())

    def take_from_engine(self, qp: RoceQueuePair, left: bytes, segment: int) -> None:
        self._own[qp].left = left, segment
        self.loop.soon(partial(self._go_on, qp))

    def catch_up(self, qp: RoceQueuePair) -> None:
        if (own := self._own.get(qp)) is not None:
            self._take_left(qp, own)
            self._take_in_own(qp, own)

    def _take_left(self, qp: RoceQueuePair, own: OwnSockets) -> None:
        qp.follow_up()
        (left, segment), own.left = own.left, (b"", 0)
        if left and qp.path is not None and qp.remote_port is not None:
            self._take(qp.path.address, qp.remote_port, left, segment)

    def _go_on(self, qp: RoceQueuePair) -> None:
        qp.returned = False
        if (own := self._own.get(qp)) is None:
            return  # it was destroyed meanwhile
        self._take_left(qp, own)
        self._watch_own(qp, own)
        self.has_work(qp)
        self._pump()  # who has work already wakes nobody

    def _watch_own(self, qp: RoceQueuePair, own: OwnSockets) -> None:
        if own.receiving is not None:
            self.loop.watch(own.receiving.fileno(), READ, lambda _: self._on_own(qp, own))

    def _on_own(self, qp: RoceQueuePair, own: OwnSockets) -> None:
        self._take_in_own(qp, own)
        self._pump()

    def _take_in_own(self, qp: RoceQueuePair, own: OwnSockets) -> None:
        if self._own.get(qp) is own and own.receiving is not None:
            self._take_all(own.receiving)

    def forget_qp(self, qp: AnyQueuePair) -> None:
        super().forget_qp(qp)
        if (own := self._own.pop(qp, None)) is not None:
            self._part(own)
            if own.sending is not None and self._sending.pop(own.source_port, None) is not None:
                self.loop.forget(own.sending.fileno())
            own.close()

    def _part(self, own: OwnSockets) -> None:
        if own.receiving is not None:
            self.loop.forget(own.receiving.fileno())
            own.part()

    def wake(self) -> None:
        self.loop.soon(self._pump)

    def path_mtu(self, address: str) -> int:
        """That of the route there, as far as the kernel knows."""
        return route_mtu(self.address, address, ipv6=self.ip.version == 6)

    # --- the user's side ---

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        self._pump()  # the last words
        if self._timer is not None:
            self._timer.cancel()
        self.loop.forget(self._sock.fileno())
        self._sock.close()
        if self._owns_loop:
            self.loop.close()

    # --- the loop's side ---

    def _on_ready(self, events: int) -> None:
        if events & WRITE:
            self.loop.watch(self._sock.fileno(), READ, self._on_ready)
        if events & ~WRITE:
            self._take_all(self._sock)
        self._pump()

    def _take_all(self, sock: socket.socket) -> None:
        for count in range(limits.ROCE_TURN_DATAGRAMS):
            if sock.fileno() < 0:
                return
            try:
                length, control, _, source = sock.recvmsg_into([self._room], CONTROL_LEN, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:  # an ICMP error of what was sent; the timers tell it
                continue
            segment = segment_of(control)
            self._take(source[0], source[1], self._room[:length], segment)
            if count % 4 == 3:
                self._pump()  # the other end goes on while more is taken in

    def _take(self, address: str, port: int, payload: bytes | memoryview, segment: int = 0) -> None:
        try:
            self.handle_datagram(address, port, payload, self.loop.now, segment)
        except SidestepError:
            raise
        except Exception:
            # Others are served by this loop, too; what one datagram did is told, and it is as if it were lost.
            self.events.add("packet_dropped", "fault")
            _log.exception("a datagram from %s was dropped by a fault of sidestep", address)

    def _pump(self) -> None:
        """Sends what there is, as far as the kernel takes it, and sets the timer."""
        if self._sock.fileno() < 0:
            return
        for _ in range(limits.ROCE_TURN_DATAGRAMS):
            datagram, self._unsent = self._unsent or self.poll_datagram(self.loop.now), None
            if datagram is None:
                break
            if not self._sent(datagram):
                self._unsent = datagram._replace(payload=bytes(datagram.payload))
                self._await_room(datagram.source_port)
                break
        else:
            self.loop.soon(self._pump)
        self._set_timer()

    def _await_room(self, port: int) -> None:
        if port == UDP_PORT:
            self.loop.watch(self._sock.fileno(), READ | WRITE, self._on_ready)
        else:
            self.loop.watch(self._sending[port].fileno(), WRITE, lambda _: self._on_room(port))

    def _on_room(self, port: int) -> None:
        if (sock := self._sending.get(port)) is not None:
            self.loop.forget(sock.fileno())
        self._pump()

    def _sent(self, datagram: Datagram) -> bool:
        sock = self._sending.get(datagram.source_port)
        if sock is None or datagram is SENT:
            return True  # or of a queue pair that is destroyed
        target = datagram.address, UDP_PORT
        try:
            if datagram.segment:
                sock.sendmsg([datagram.payload], [cut_into(datagram.segment)], socket.MSG_DONTWAIT, target)
            else:
                sock.sendto(datagram.payload, socket.MSG_DONTWAIT, target)
        except OSError as why:
            if why.errno in (errno.EAGAIN, errno.ENOBUFS):
                return why.errno == errno.ENOBUFS  # of the interface: it is lost, as it may be on the way
            if datagram.segment and why.errno in (errno.EINVAL, errno.EIO, errno.EOPNOTSUPP):
                self.train_max = 1  # this kernel, or interface, does not cut it
            # No route, or too long for it: as if lost, and sent again until the connection gives up.
            self.events.add("packet_unsent", errno.errorcode.get(why.errno or 0, "unknown"))
        return True

    def _set_timer(self) -> None:
        due = self.next_deadline()
        if self._timer is not None:
            if due is not None and due >= self._timer_at:
                return  # it looks again then
            self._timer.cancel()
            self._timer = None
        if due is not None:
            self._timer_at = due
            self._timer = self.loop.call_later(max(0.0, due - self.loop.now), self._time_passed)

    def _time_passed(self) -> None:
        self._timer = None
        self.handle_timeout(self.loop.now)
        self._pump()


def _opened(address: str, version: int, receive_buffer: int) -> socket.socket:
    """A socket whose packets have identification 0 and "don't fragment": see `datagram`."""
    ipv6 = version == 6
    sock = socket.socket(
        socket.AF_INET6 if ipv6 else socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    )
    try:
        unfragmented(sock)
        with suppress(OSError):  # a kernel before 5.0
            join_received(sock)
        if ipv6:
            with suppress(OSError):  # rxe and adapters send no checksum
                sock.setsockopt(socket.IPPROTO_UDP, 102, 1)  # UDP_NO_CHECK6_RX
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, receive_buffer)
        sock.bind((address, UDP_PORT))  # and never connected: then Linux would count identifications
        # Not before, so that only one process has it: queue pairs have sockets of their own there (own_sockets.py).
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError as why:
        sock.close()
        raise Unavailable(
            f"UDP port {UDP_PORT} of {address} cannot be had: {why.strerror}",
            remedy="an address has one RoCE device: take another address; 'ss -lunp' shows who has this one, "
            "and a loaded rdma_rxe has all",
        ) from why
    return sock
