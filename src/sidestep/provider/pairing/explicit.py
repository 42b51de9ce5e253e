"""Explicit sockets: the provider's answers to programs that name the family or the protocol themselves.

A call of such a socket waits for the answer, so nothing here waits. Where a connection is opened in the place of TCP
the answer comes when that is decided (`pending_connects`). Ordinary sockets ask before they connect if the policy has
some connections begin with a protocol.

Native TCP and the offload protocols share one space of ports. A socket that is bound natively gets the same port from
every protocol that it wants, or the bind fails. Protocols that had bound before are released in reverse order.

Two descriptors come with the request to bind. The native socket proves that its port is held. It is looked at and
closed before any answer, because a copy of it would keep the port. The *lease* is the reading end of a pipe. Its end of
file says that the last process with that socket has closed it, in whatever way; until then the protocols keep the port.
A client that closes its socket and keeps the lease cannot keep others from the port. The next socket that holds it
natively shares the reservation.

Not supported: sockets that were bound while no provider ran, or with one that has ended, are native only. Protocols
that are added later do not learn of earlier binds.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Final

from sidestep import limits
from sidestep.counters import Counters
from sidestep.errors import LimitReached, PeerViolation, Unavailable
from sidestep.native.layout import IPPROTO_OFFLOAD_ANY, Ask, Refusal, Rpc
from sidestep.provider.clients import Client
from sidestep.provider.decisions import Decisions, Verdict
from sidestep.provider.pairing.address_map import AddressMap
from sidestep.provider.pairing.pending_connects import PendingConnects
from sidestep.provider.proof import duplicate as possession
from sidestep.provider.proof import lookup as proof
from sidestep.provider.proof.lookup import endpoint_of
from sidestep.provider.rpc import Message, Packet, expect
from sidestep.switch.modules import Protocols
from sidestep.switch.protocol import Endpoint, Ends, OffloadProtocol, Request, Services


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to a call: an errno to fail with, the reason why it goes on natively, or neither."""

    error: int = 0
    refusal: Refusal | None = None
    names: Ends | None = None


_YES: Final = Answer()


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
    """A port that protocols hold for a native socket, as long as a process has the other end of the pipe."""

    fd: int
    uid: int
    endpoint: Endpoint
    protocols: tuple[OffloadProtocol, ...]  # sockets in the order in which they were bound


@dataclass(slots=True, eq=False, kw_only=True)
class ExplicitSockets:
    """Answers ASK, and keeps the table of ports that protocols hold for sockets."""

    protocols: Protocols
    decisions: Decisions
    services: Services
    counters: Counters
    netns_cookie: int
    leases_max: int
    pending_connects: PendingConnects
    address_map: AddressMap
    _leases: set[Lease] = field(default_factory=set)
    _of_user: Counter[int] = field(default_factory=Counter)
    _held: Counter[tuple[int, Endpoint]] = field(default_factory=Counter)  # leases, by identity of the protocol

    def __len__(self) -> int:
        return len(self._leases)

    def close(self) -> None:
        """Releases everything; before the protocols are stopped."""
        for lease in list(self._leases):
            self._end(lease)

    def handle_ask(self, client: Client, packet: Packet) -> Message | None:
        """The ANSWER to an ASK, None: it comes later; raises PeerViolation."""
        message = packet.message
        try:
            ask = Ask(message.flags)
        except ValueError:
            raise PeerViolation(f"an explicit socket asks for {message.flags}", rule="malformed") from None
        if ask is not Ask.CONNECT or len(packet.descriptors):
            expect(packet, _DESCRIPTORS.get(ask, 0))
        self.counters.add("explicit_asked", ask.name)
        answer = self._HANDLERS[ask](self, client, packet)
        if answer is None:
            return None
        if answer.error:
            self.counters.add("explicit_refused", f"{ask.name}_{errno.errorcode.get(answer.error, 'UNKNOWN')}")
        elif answer.refusal:
            self.counters.add("explicit_refused", f"{ask.name}_{answer.refusal.name}")
        return Message(
            type=Rpc.ANSWER,
            token=message.token,
            flags=ask,
            protocol=message.protocol,
            error=answer.error,
            reason=answer.refusal or 0,
            **_as_fields(answer.names),
        )

    # ---- what is asked ----

    def _open(self, _client: Client, packet: Packet) -> Answer:
        number = packet.message.protocol
        found = any(self._wanted(number, endpoint_of(packet.message.local_addr, 0)))
        return _YES if found or number == IPPROTO_OFFLOAD_ANY else Answer(errno.EPROTONOSUPPORT)

    def _bind(self, client: Client, packet: Packet) -> Answer:
        message = packet.message
        native_fd, lease_fd = packet.descriptors.numbers
        _check_lease(lease_fd)
        netns_cookie = _check_bound(native_fd, message)
        lease_fd = os.dup(lease_fd)
        packet.descriptors.close()  # a copy of the native socket would keep its port after the client has let go of it
        answer = self._reserve(client, message, lease_fd, netns_cookie)
        if answer != _YES:
            os.close(lease_fd)
        return answer

    def _listen(self, client: Client, packet: Packet) -> Answer:
        message = packet.message
        if message.protocol == IPPROTO_OFFLOAD_ANY:
            return _YES  # TCP can
        local = endpoint_of(message.local_addr, message.local_port)
        verdict = self.decisions.would_listen(client.subject, local, ip_protocol=message.protocol)
        return self._insist(message.protocol, local, verdict, errno.EOPNOTSUPP)

    def _connect(self, client: Client, packet: Packet) -> Answer | None:
        message = packet.message
        local = endpoint_of(message.local_addr, message.local_port) if message.local_port else None
        remote = endpoint_of(message.remote_addr, message.remote_port)
        request = Request(local, remote, None)
        verdict = self.decisions.connect(client.subject, request, ip_protocol=message.protocol)
        if (opener := _opener(verdict, message.protocol)) is not None:
            if len(packet.descriptors):
                return self._open_instead(client, packet, verdict.request or request, opener)
            return Answer(errno.EOPNOTSUPP) if message.protocol else Answer(refusal=Refusal.NOT_PROVEN)
        if message.protocol == IPPROTO_OFFLOAD_ANY:
            return Answer(refusal=verdict.refusal)
        return self._insist(message.protocol, remote, verdict, errno.ENETUNREACH)

    def _open_instead(self, client: Client, packet: Packet, request: Request, opener: OffloadProtocol) -> Answer | None:
        """Has a protocol open the connection in the place of TCP."""
        message = packet.message
        with possession.as_socket(packet.descriptors.take_first(), "native socket") as found:
            place = _bound_at(found, message)
            cookie = proof.socket_cookie(found)
        if place != self.netns_cookie:  # an address on one interface, or in another network, which does not lead here
            refusal = Refusal.NO_PROTOCOL if place is None else Refusal.FOREIGN_NETNS
            return Answer(errno.EADDRNOTAVAIL) if message.protocol else Answer(refusal=refusal)
        try:
            self.pending_connects.ask(client, message, request, cookie, opener)
        except LimitReached:
            return Answer(errno.ENOBUFS) if message.protocol else Answer(refusal=Refusal.TOO_MANY)
        return None

    def _name(self, _client: Client, packet: Packet) -> Answer:
        found = self.address_map.of(packet.descriptors.take_first())
        return Answer(errno.ENOENT) if found is None else Answer(names=found)

    def _insist(self, number: int, endpoint: Endpoint, verdict: Verdict, unable: int) -> Answer:
        """The answer to a socket that wants that protocol or none."""
        if verdict.refusal is None:
            return _YES
        if not any(self._wanted(number, endpoint)):
            return Answer(errno.EPROTONOSUPPORT)
        return Answer(errno.EACCES if verdict.refusal is Refusal.POLICY else unable)

    def _wanted(self, number: int, endpoint: Endpoint) -> Iterator[OffloadProtocol]:
        """The protocols that an explicit socket of this number and family is for."""
        for protocol in self.protocols.each():
            if not (protocol.capabilities.local or self.services.remote):
                continue  # protocols for other hosts, of which there are none
            fits = endpoint.address.version in protocol.capabilities.families
            if fits and number in (IPPROTO_OFFLOAD_ANY, protocol.ip_protocol):
                yield protocol

    # ---- ports ----

    def _reserve(self, client: Client, message: Message, lease_fd: int, netns_cookie: int | None) -> Answer:
        endpoint = endpoint_of(message.local_addr, message.local_port)
        insists = message.protocol != IPPROTO_OFFLOAD_ANY
        if netns_cookie is None:  # the same port of another interface may belong to another socket
            return Answer(errno.EADDRNOTAVAIL) if insists else Answer(refusal=Refusal.NO_PROTOCOL)
        if netns_cookie != self.netns_cookie:  # the protocols would bind another network's port
            return Answer(errno.EADDRNOTAVAIL) if insists else Answer(refusal=Refusal.FOREIGN_NETNS)
        self._end_left(endpoint.port)
        if len(self._leases) >= self.leases_max or self._of_user[client.uid] >= limits.EXPLICIT_BINDS_PER_USER_MAX:
            return Answer(errno.ENOBUFS) if insists else Answer(refusal=Refusal.TOO_MANY)
        bound: list[OffloadProtocol] = []
        for protocol in self._wanted(message.protocol, endpoint):
            error = self._hold(protocol, endpoint)
            if error:
                for earlier in reversed(bound):
                    self._let_go(earlier, endpoint)
                return Answer(error)
            if self._held[id(protocol), endpoint]:  # else it failed as a module: the others go on without it
                bound.append(protocol)
        if insists and not bound:
            return Answer(errno.EPROTONOSUPPORT)
        lease = Lease(lease_fd, client.uid, endpoint, tuple(bound))
        self._leases.add(lease)
        self._of_user[client.uid] += 1
        self.services.loop.on_readable(lease_fd, partial(self._end, lease))
        return _YES

    def _hold(self, protocol: OffloadProtocol, endpoint: Endpoint) -> int:
        """Binds `endpoint` with `protocol`, unless it is; the errno if that fails."""
        if not self._held[id(protocol), endpoint]:
            try:
                protocol.bind(endpoint)
            except OSError as error:
                return error.errno if error.errno and 0 < error.errno < limits.ERRNO_END else errno.EIO
            except Unavailable:
                return errno.EADDRNOTAVAIL
            except Exception as error:  # a stranger's code
                self.protocols.fail(protocol.name, error)
                return 0
        self._held[id(protocol), endpoint] += 1
        return 0

    def _let_go(self, protocol: OffloadProtocol, endpoint: Endpoint) -> None:
        held = (id(protocol), endpoint)
        self._held[held] -= 1
        if self._held[held]:
            return
        del self._held[held]
        if self.protocols.get(protocol.name) is not protocol:
            return  # the protocol has been stopped, and has released everything
        try:
            protocol.release(endpoint)
        except Exception as error:  # a stranger's code
            self.protocols.fail(protocol.name, error)

    def _end(self, lease: Lease) -> None:
        """Ends a lease: its pipe has shown its end, or the provider stops."""
        if lease not in self._leases:
            return  # `_end_left` was first; its descriptor's number may be another's by now
        self._leases.discard(lease)
        self.services.loop.forget(lease.fd)
        os.close(lease.fd)
        self._of_user[lease.uid] -= 1
        if not self._of_user[lease.uid]:
            del self._of_user[lease.uid]
        for protocol in reversed(lease.protocols):
            self._let_go(protocol, lease.endpoint)

    def _end_left(self, port: int) -> None:
        """Ends leases of this port whose pipes have ended unnoticed: the next socket there may be asking."""
        of_port = {lease.fd: lease for lease in self._leases if lease.endpoint.port == port}
        poller = select.poll()
        for fd in of_port:
            poller.register(fd, select.POLLIN)
        for fd, _ in poller.poll(0) if of_port else ():
            self._end(of_port[fd])

    _HANDLERS: ClassVar[dict[Ask, Callable[[ExplicitSockets, Client, Packet], Answer | None]]] = {
        Ask.OPEN: _open,
        Ask.BIND: _bind,
        Ask.LISTEN: _listen,
        Ask.CONNECT: _connect,
        Ask.ADDRESSES: _name,
    }


_DESCRIPTORS: Final = {Ask.BIND: 2, Ask.CONNECT: 1, Ask.ADDRESSES: 1}


def _opener(verdict: Verdict, number: int) -> OffloadProtocol | None:
    """The protocol that opens a connection in the place of TCP: it is named, by the program or by a rule."""
    protocol = verdict.protocol
    if protocol is None or not (protocol.capabilities.opens and verdict.leaves):
        return None
    return protocol if number or verdict.ruling.target == protocol.name else None


def _as_fields(names: Ends | None) -> dict[str, Any]:
    """Fields of the record for these names."""
    if names is None:
        return {}
    local, remote = names.local, names.remote
    return {
        "local_addr": proof.mapped_address(str(local.address)),
        "local_port": local.port,
        "remote_addr": proof.mapped_address(str(remote.address)),
        "remote_port": remote.port,
    }


def _check_lease(fd: int) -> None:
    """Raises PeerViolation unless `fd` is the reading end of a pipe."""
    # a look by its name, which the kernel makes: any other may be a file whose file system never answers
    name = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115
    if not name.startswith("pipe:[") or fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
        raise PeerViolation("a lease is not the reading end of a pipe", rule="descriptor")


def _check_bound(fd: int, message: Message) -> int | None:
    """The network namespace of a TCP socket that is bound where `message` says; None: on one interface only.

    Raises:
        PeerViolation: It is bound elsewhere, or is no such socket.
    """
    with possession.as_socket(os.dup(fd), "native socket") as found:
        return _bound_at(found, message)


def _bound_at(found: socket.socket, message: Message) -> int | None:
    if (found.type, found.proto) != (socket.SOCK_STREAM, socket.IPPROTO_TCP):
        raise PeerViolation("a request came with another socket than TCP's", rule="descriptor")
    host, port = found.getsockname()[:2]
    if not port or (proof.mapped_address(host), port) != (message.local_addr, message.local_port):
        raise PeerViolation(
            f"a request about port {message.local_port} came with a socket bound to {port}", rule="unproven"
        )
    return None if possession.bound_to_interface(found) else proof.netns_cookie_of(found)
