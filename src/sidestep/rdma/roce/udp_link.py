"""The software HCA on a UDP socket: the one file of this device that holds any.

    device = UdpRoceDevice("198.18.2.1")
    ...                                  # as any device: alloc_pd, create_cq, cm.listen, cm.connect
    device.loop.turn()                   # drives it; see `sidestep.loop`

One socket, bound to the device's address and port 4791, sends and receives for all queue pairs. No privilege is needed,
but nobody else may have the port at that address: a kernel with rdma_rxe loaded has it at all of them.
"""

from __future__ import annotations

import errno
import logging
import socket
from contextlib import suppress
from secrets import SystemRandom
from typing import TYPE_CHECKING, Final

from sidestep import limits
from sidestep.errors import SidestepError, Unavailable
from sidestep.loop import READ, WRITE, Loop, Timer
from sidestep.rdma.path_mtu import route_mtu
from sidestep.rdma.roce.device import ATTRIBUTES, Datagram, RoceDevice
from sidestep.rdma.roce.packet import UDP_PORT

if TYPE_CHECKING:
    from sidestep.rdma.roce.settings import RoceSettings
    from sidestep.rdma.verbs import DeviceAttributes

# Of Linux, and not in Python's socket module.
_IP_MTU_DISCOVER: Final = 10
_IPV6_MTU_DISCOVER: Final = 23
_PROBE: Final = 3  # "don't fragment" always; what is known of a path's MTU does not count
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
        super().__init__(address, self.loop.notices, SystemRandom(), settings, name=name, attributes=attributes)
        self._sock = _opened(address, self.ip.version, self.settings.receive_buffer)
        self.loop.watch(self._sock.fileno(), READ, self._on_ready)

    # --- the core's side ---

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
            try:
                self.handle_datagram(source[0], source[1], payload, self.loop.now)
            except SidestepError:
                raise
            except Exception:
                # Others are served by this loop, too; what one datagram did is told, and it is as if it were lost.
                self.events.add("packet_dropped", "fault")
                _log.exception("a datagram from %s was dropped by a fault of sidestep", source[0])

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
                self.loop.watch(self._sock.fileno(), READ | WRITE, self._on_ready)
                break
        else:
            self.loop.soon(self._pump)
        self._set_timer()

    def _sent(self, datagram: Datagram) -> bool:
        try:
            self._sock.sendto(datagram.payload, socket.MSG_DONTWAIT, (datagram.address, UDP_PORT))
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
        if ipv6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, _PROBE)
            with suppress(OSError):  # rxe and adapters send no checksum
                sock.setsockopt(socket.IPPROTO_UDP, 102, 1)  # UDP_NO_CHECK6_RX
        else:
            sock.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _PROBE)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, receive_buffer)
        sock.bind((address, UDP_PORT))  # and never connected: then Linux would count identifications
    except OSError as why:
        sock.close()
        raise Unavailable(
            f"UDP port {UDP_PORT} of {address} cannot be had: {why.strerror}",
            remedy="look who has it by 'ss -lun'; a loaded rdma_rxe has it everywhere",
        ) from why
    return sock
