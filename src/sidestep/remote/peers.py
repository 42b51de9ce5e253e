"""Which hosts have a provider that carries connections, and at which port: the exchange of the port mapper.

Who asks for a service names its port, and gets the RDMA port at which ordinary SDP connections to it come. Providers
ask for port 0, which no service has, and get the port for all that concerns TCP connections between the two hosts; and
from port 0 for that of the provider itself, not of a worker of its.

One UDP socket a family asks and answers (docs/wire/sdp.md §23.4, port 3935). What a host has answered is kept for as
long as it says, silence and refusals for a while; nobody waits for more than a second. Where another program has the
port, this host can still ask, but is not found.
"""

from __future__ import annotations

import errno
import secrets
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final, TypeAlias

from sidestep import limits
from sidestep.errors import PeerViolation
from sidestep.loop import READ, Loop, Timer
from sidestep.routing import Address
from sidestep.sdp.portmapper import UDP_PORT, PortMap, PortMapKind, pm_time_of
from sidestep.switch.protocol import Endpoint, NotYet

Answer: TypeAlias = Callable[[int | None], None]
Serve: TypeAlias = Callable[[Address, Address, int], tuple[int, float] | None]

PROVIDER_PORT: Final = 0  # what is asked for is no service, but the provider, or a worker of its
PROVIDER_ITSELF: Final = -1  # the same, and no worker
_DATAGRAM_MAX: Final = 128
_READS_PER_TURN: Final = 64
_IP_PKTINFO: Final = 8  # linux/in.h
_PKTINFO4: Final = struct.Struct("=i4s4s")  # struct in_pktinfo: interface, local address, header destination
_PKTINFO6: Final = struct.Struct("=16si")  # struct in6_pktinfo: address, interface


@dataclass(slots=True)
class _Known:
    """What a host has answered."""

    until: float
    port: int | None  # None: it has said no, or nothing
    denied: bool = False  # it has said no; else nothing


@dataclass(slots=True)
class _Asking:
    """A request that waits for its answer."""

    request: PortMap
    remote: Endpoint  # of whom, and what
    local: Address
    tries: int = 0
    waiting: list[Answer] = field(default_factory=list)
    timer: Timer | None = None


class Peers:
    """The port mapper of one provider.

    Args:
        loop: That watches its sockets.
        serve: Gives the RDMA port at an address of this host for a service, for who asks from an address, and for how
            long he may use it, 0 s: for one connection; None: not for him. May raise NotYet.
            Without it nobody is answered, and the port is left to others.
        log: For what keeps this host from being found.
    """

    def __init__(self, loop: Loop, serve: Serve | None, log: Callable[[str], None]) -> None:
        self._loop = loop
        self._serve = serve
        self._known: dict[Endpoint, _Known] = {}
        self._asking: dict[Endpoint, _Asking] = {}
        self._handles: dict[int, _Asking] = {}  # the same, by what the answer says
        self._sockets: dict[int, socket.socket] = {}
        self.blind: str = ""  # why this host is not found
        for version, family in ((4, socket.AF_INET), (6, socket.AF_INET6)):
            try:
                self._sockets[version] = self._open(family)
            except OSError as error:  # no IPv6 here, for one
                log(f"no port mapper for IPv{version}: {error.strerror}")
        if self.blind:
            log(f"other hosts do not find this one: {self.blind}")

    def close(self) -> None:
        """Answers nobody any more; those who ask hear that there is nothing."""
        for asking in list(self._asking.values()):
            self._settle(asking, None, 0)
        for sock in self._sockets.values():
            self._loop.forget(sock.fileno())
            sock.close()
        self._sockets.clear()

    def ask(self, local: Endpoint, remote: Endpoint, answer: Answer, *, anew: bool = False) -> None:
        """Calls `answer`, now or soon, with the RDMA port for that service there, or None.

        A service is a TCP port, PROVIDER_PORT or PROVIDER_ITSELF.

        `anew`: a host that has said no, or nothing, is asked again.
        """
        known = self._known.get(remote)
        if known is not None and known.until > self._loop.now and not (anew and known.port is None):
            answer(known.port)
            return
        asking = self._asking.get(remote)
        if asking is None:
            if len(self._asking) >= limits.PEERS_ASKING_MAX or remote.address.version not in self._sockets:
                answer(None)
                return
            service, source = (0, 0) if remote.port == PROVIDER_ITSELF else (remote.port, local.port)
            request = PortMap(PortMapKind.REQUEST, service, source, secrets.randbits(64), local.address, remote.address)
            asking = _Asking(request, remote, local.address)
            self._asking[remote] = self._handles[request.assoc_handle] = asking
            asking.waiting.append(answer)
            self._try(asking)
        elif len(asking.waiting) < limits.PEERS_WAITING_MAX:
            asking.waiting.append(answer)
        else:
            answer(None)

    def denied(self, remote: Endpoint) -> bool:
        """Whether the host has said, not long ago, that there is no such service; silence is not that."""
        return self._absent(remote, denied=True)

    def silent(self, remote: Endpoint) -> bool:
        """Whether it has said nothing, not long ago."""
        return self._absent(remote, denied=False)

    def _absent(self, remote: Endpoint, *, denied: bool) -> bool:
        known = self._known.get(remote)
        return known is not None and known.until > self._loop.now and (known.port, known.denied) == (None, denied)

    def doubt(self, remote: Endpoint, port: int) -> None:
        known = self._known.get(remote)
        if known is not None and known.port == port:
            del self._known[remote]

    # ---- out ----

    def _try(self, asking: _Asking) -> None:
        asking.tries += 1
        if asking.tries > limits.PEER_TRIES:
            self._settle(asking, None, limits.PEER_ABSENT_S)
            return
        asking.timer = self._loop.call_later(limits.PEER_ANSWER_S, lambda: self._try(asking))
        self._send(asking.request, asking.local, asking.request.ap_ip, UDP_PORT)

    def _send(self, message: PortMap, source: Address, host: Address, port: int) -> None:
        sock = self._sockets.get(host.version)
        if sock is None:
            return
        if isinstance(source, IPv4Address):
            where = (socket.IPPROTO_IP, _IP_PKTINFO, _PKTINFO4.pack(0, source.packed, bytes(4)))
        else:
            where = (socket.IPPROTO_IPV6, socket.IPV6_PKTINFO, _PKTINFO6.pack(source.packed, 0))
        try:
            sock.sendmsg([message.encode()], [where], socket.MSG_DONTWAIT, (str(host), port))
        except OSError as error:  # the other end asks again, and we do
            if error.errno in (errno.EBADF, errno.ENOTSOCK):
                raise

    def _settle(self, asking: _Asking, port: int | None, lasts_s: float, *, denied: bool = False) -> None:
        remote = asking.remote
        if asking.timer is not None:
            asking.timer.cancel()
        self._asking.pop(remote, None)
        self._handles.pop(asking.request.assoc_handle, None)
        if lasts_s > 0:
            self._keep(remote, _Known(self._loop.now + lasts_s, port, denied))
        answered = len(asking.waiting) if lasts_s > 0 or port is None else 1  # PmTime 0: for one connection only
        for answer in asking.waiting[:answered]:
            answer(port)
        for answer in asking.waiting[answered:]:
            self.ask(Endpoint(asking.local, asking.request.cp_port), remote, answer)

    def _keep(self, remote: Endpoint, known: _Known) -> None:
        if len(self._known) >= limits.PEERS_KNOWN_MAX and remote not in self._known:
            del self._known[next(iter(self._known))]
        self._known.pop(remote, None)
        self._known[remote] = known

    # ---- in ----

    def _open(self, family: socket.AddressFamily) -> socket.socket:
        sock = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            if family == socket.AF_INET:
                sock.setsockopt(socket.IPPROTO_IP, _IP_PKTINFO, 1)
            else:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
            try:
                sock.bind(("", 0 if self._serve is None else UDP_PORT))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                self.blind = f"another program has UDP port {UDP_PORT}"
                sock.bind(("", 0))
            self._loop.watch(sock.fileno(), READ, lambda _events: self._read(sock))
        except BaseException:
            sock.close()
            raise
        return sock

    def _read(self, sock: socket.socket) -> None:
        for _ in range(_READS_PER_TURN):
            try:
                data, ancillary, flags, source = sock.recvmsg(_DATAGRAM_MAX, 128, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError as error:  # what the network reported of an earlier datagram
                if error.errno in (errno.EBADF, errno.ENOTSOCK):
                    raise
                continue
            local = _local_of(ancillary)
            if local is None or flags & socket.MSG_TRUNC:
                continue
            try:
                message = PortMap.decode(memoryview(data))
            except PeerViolation:
                continue  # anybody may send us anything
            self._handle_message(message, local, ip_address(source[0].partition("%")[0]), source[1])
            if sock.fileno() < 0:
                return

    def _handle_message(self, message: PortMap, local: Address, host: Address, port: int) -> None:
        if message.kind is PortMapKind.REQUEST:
            self._answer(message, local, host, port)
            return
        asking = self._handles.get(message.assoc_handle)
        if asking is None or port != UDP_PORT or host != asking.request.ap_ip:
            return
        if message.kind is PortMapKind.ACCEPT and message.ap_port:
            acknowledged = PortMap(
                PortMapKind.ACK,
                message.ap_port,
                message.cp_port,
                message.assoc_handle,
                asking.request.cp_ip,
                asking.request.ap_ip,
            )
            self._send(acknowledged, asking.local, host, UDP_PORT)
            self._settle(asking, message.ap_port, min(message.lifetime_s, limits.PEER_KNOWN_MAX_S))
        elif message.kind is PortMapKind.DENY:
            self._settle(asking, None, limits.PEER_ABSENT_S, denied=True)

    def _answer(self, asked: PortMap, local: Address, host: Address, port: int) -> None:
        """Never more bytes than were asked with, and nothing is kept: the mapping is the same for all."""
        if self._serve is None or asked.ap_ip != local or asked.cp_ip != host:
            return
        try:
            service = asked.ap_port if asked.ap_port or asked.cp_port else PROVIDER_ITSELF
            mapped = self._serve(local, host, service)
        except NotYet as why:
            why.wait(lambda: self._answer(asked, local, host, port))
            return
        reply = PortMap(PortMapKind.DENY, 0, asked.cp_port, asked.assoc_handle, asked.cp_ip, asked.ap_ip)
        if mapped is not None:
            port_there, lasts_s = mapped
            reply = replace(reply, kind=PortMapKind.ACCEPT, ap_port=port_there, pm_time=pm_time_of(lasts_s))
        self._send(reply, local, host, port)


def _local_of(ancillary: list[tuple[int, int, bytes]]) -> Address | None:
    """The address that a datagram was sent to."""
    for level, kind, data in ancillary:
        if (level, kind) == (socket.IPPROTO_IP, _IP_PKTINFO) and len(data) >= _PKTINFO4.size:
            return IPv4Address(_PKTINFO4.unpack_from(data)[2])
        if (level, kind) == (socket.IPPROTO_IPV6, socket.IPV6_PKTINFO) and len(data) >= _PKTINFO6.size:
            return IPv6Address(_PKTINFO6.unpack_from(data)[0])
    return None
