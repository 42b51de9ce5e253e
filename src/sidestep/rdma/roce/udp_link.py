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
from sidestep.rdma.roce.device import ATTRIBUTES, Datagram, RoceDevice
from sidestep.rdma.roce.own_sockets import OwnSockets, unfragmented
from sidestep.rdma.roce.packet import UDP_PORT

if TYPE_CHECKING:
    from sidestep.native._engine import Datagrams
    from sidestep.rdma.roce.device import AnyQueuePair
    from sidestep.rdma.roce.qp import RoceQueuePair
    from sidestep.rdma.roce.settings import RoceSettings
    from sidestep.rdma.verbs import DeviceAttributes

_DATAGRAM_MAX: Final = 65536
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
        self.loop = loop or Loop()
        self._owns_loop = loop is None
        self._timer: Timer | None = None
        self._timer_at = 0.0
        self._unsent: Datagram | None = None  # the kernel had no room for it
        self._own: dict[AnyQueuePair, OwnSockets] = {}
        self._sending: dict[int, socket.socket] = {}  # by their ports
        super().__init__(address, self.loop.notices, SystemRandom(), settings, name=name, attributes=attributes)
        self._sock = _opened(address, self.ip.version, self.settings.receive_buffer)
        self._sending[UDP_PORT] = self._sock
        self.loop.watch(self._sock.fileno(), READ, self._on_ready)

    # --- the core's side ---

    def source_port(self, qp: RoceQueuePair) -> int:
        if (own := self._own.get(qp)) is None:
            own = self._own[qp] = OwnSockets(self.address, self.ip.version, self.settings.receive_buffer)
            if own.sending is not None:
                self._sending[own.source_port] = own.sending
        return own.source_port

    def datagrams_of(self, qp: RoceQueuePair) -> Datagrams | None:
        own, path, port = self._own.get(qp), qp.path, qp.remote_port
        if own is None or path is None or port is None or port == UDP_PORT or "%" in path.address:
            return None
        if self.senders[path.remote, port] > 1 or (self._unsent is not None and self._unsent.source_port != UDP_PORT):
            return None  # the kernel would not tell them apart; or it may be one of these
        if own.joined_to == port:
            return own.datagrams(self.ip, path.remote)
        self._part(own)
        if own.join(path.address, port):  # what has come to the other socket until now is read first
            self._watch_own(qp, own)
            self.loop.soon(partial(self._on_own, qp, own))
        return None

    def leave_to_engine(self, qp: RoceQueuePair) -> None:
        own = self._own[qp]
        assert own.receiving is not None
        self.loop.forget(own.receiving.fileno())

    def take_from_engine(self, qp: RoceQueuePair, left: list[bytes]) -> None:
        self._own[qp].left = left
        self.loop.soon(partial(self._go_on, qp))

    def catch_up(self, qp: RoceQueuePair) -> None:
        if (own := self._own.get(qp)) is not None:
            self._take_left(qp, own)
            self._take_in_own(qp, own)

    def _take_left(self, qp: RoceQueuePair, own: OwnSockets) -> None:
        left, own.left = own.left, []
        if qp.path is not None and qp.remote_port is not None:
            for datagram in left:
                self._take(qp.path.address, qp.remote_port, datagram)

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
        if self._own.get(qp) is own:
            for source, datagram in own.received(limits.ROCE_TURN_DATAGRAMS):
                self._take(source[0], source[1], datagram)

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
            self._take_in()
        self._pump()

    def _take_in(self) -> None:
        for _ in range(limits.ROCE_TURN_DATAGRAMS):
            try:
                payload, source = self._sock.recvfrom(_DATAGRAM_MAX, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:  # an ICMP error of what was sent; the timers tell it
                continue
            self._take(source[0], source[1], payload)

    def _take(self, address: str, port: int, payload: bytes) -> None:
        try:
            self.handle_datagram(address, port, payload, self.loop.now)
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
                self._unsent = datagram
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
        if sock is None:
            return True  # of a queue pair that is destroyed
        try:
            sock.sendto(datagram.payload, socket.MSG_DONTWAIT, (datagram.address, UDP_PORT))
        except OSError as why:
            if why.errno in (errno.EAGAIN, errno.ENOBUFS):
                return why.errno == errno.ENOBUFS  # of the interface: it is lost, as it may be on the way
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
