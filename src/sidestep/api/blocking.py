"""SDP sockets that block, with the methods of `socket.socket`: see `SdpSocket`."""

from __future__ import annotations

import errno
import io
import socket as _stdlib
import warnings
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

from sidestep import limits
from sidestep.api.rnic import SETTINGS, details, not_there, raised
from sidestep.api.service import Service, service
from sidestep.constants import IPPROTO_SDP
from sidestep.errors import SidestepError, Unavailable
from sidestep.sdp import blocking
from sidestep.sdp.errnos import os_error
from sidestep.switch.protocol import Endpoint

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Buffer

    from sidestep.routing import Address as IpAddress
    from sidestep.sdp.host import Host

__all__ = ["SdpSocket", "create_connection", "create_server"]

Address: TypeAlias = tuple[Any, ...]  # (host, port), or (host, port, 0, 0) of IPv6
_Raised: TypeAlias = type[BaseException]  # in the class `type` is something else
_ANY: Final[dict[int, IpAddress]] = {_stdlib.AF_INET: IPv4Address(0), _stdlib.AF_INET6: IPv6Address(0)}


class SdpSocket:
    """A TCP socket's look, and SDP over a software RNIC of this process beneath.

    A send of a large buffer shows it to the other end's device, which reads it (Read Zcopy), or writes it into the
    buffers that the other end has shown (Write Zcopy); `recv_into` of a large buffer has it filled so. SDP copies
    nothing on the way, and the call ends when the buffer is free again. Small ones go through private buffers.

    Threads may use one socket at the same time, one call each way and more. A signal handler that raises ends a call
    once its buffer is free. There is no descriptor: selectors cannot watch it; see `settimeout`, or `open_connection`.
    """

    def __init__(self, family: _stdlib.AddressFamily | int = _stdlib.AF_INET) -> None:
        if family not in _ANY:
            raise os_error(errno.EAFNOSUPPORT)
        self.family = _stdlib.AddressFamily(family)
        self._by: Service = service()
        self._timeout: float | None = _stdlib.getdefaulttimeout()
        self._linger: float | None = None
        self._bound: tuple[IpAddress, int] | None = None
        self._inner: blocking.Socket | None = None
        self._peer: Endpoint | None = None  # as `connect` was told
        self._announced: Endpoint | None = None
        self._io_refs = 0  # files of makefile() that are open
        self._closed = False

    # --- making connections ---

    def bind(self, address: Address) -> None:
        """Chooses the own address; its port is what a listener takes."""
        if self._closed or self._bound is not None or self._inner is not None:
            raise os_error(errno.EBADF if self._closed else errno.EINVAL)
        self._bound = (self._own(address[0]), address[1])

    def connect(self, address: Address, *, rdma_port: int | None = None) -> None:
        """Connects to (host, port); the host's port mapper is asked for the RDMA port, unless it is given.

        Raises:
            OSError: As `socket.connect`; ConnectionRefusedError also if the port mapper there knows no such service.
        """
        if self._closed:
            raise os_error(errno.EBADF)
        if self._inner is not None:
            raise os_error(errno.EISCONN)
        remote = Endpoint(self._resolved(address[0], address[1]), address[1])
        try:
            self._by.call(lambda: self._connect(remote, rdma_port))
        except SidestepError as why:
            raise raised(why) from why

    def _connect(self, remote: Endpoint, rdma_port: int | None) -> None:
        with self._by:
            host = self._by.rnics.towards(remote.address, self._bound[0] if self._bound is not None else None)
            port = rdma_port if rdma_port is not None else self._find(host, remote)
        if port is None:
            raise not_there(remote)
        inner = self._made(host)
        try:
            inner.connect((str(remote.address), port))
        except BaseException:
            inner.close()
            raise
        self._inner, self._peer = inner, remote

    def _find(self, host: Host, remote: Endpoint) -> int | None:
        found: list[int | None] = []
        self._by.rnics.find(host, remote, found.append)
        if not self._by.wait(lambda: bool(found), self._timeout):
            raise TimeoutError("timed out")
        return found[0]

    def listen(self, backlog: int = limits.RDMA_BACKLOG_DEFAULT) -> None:
        """Takes connections at the TCP port of the same number, by RDMA, and lets other hosts find it."""
        if self._closed or self._inner is not None:
            raise os_error(errno.EBADF if self._closed else errno.EINVAL)
        local, port = self._bound or (_ANY[self.family], 0)
        tries = 1 if port else limits.API_PORT_TRIES
        for left in reversed(range(tries)):
            try:
                self._by.call(lambda: self._listen(Endpoint(local, port or free_port(local)), backlog))
                return
            except OSError as error:
                if not left or error.errno != errno.EADDRINUSE:
                    raise

    def _listen(self, local: Endpoint, backlog: int) -> None:
        with self._by:
            try:
                inner = self._made(self._by.rnics.at(local.address))
                inner.bind(("", local.port))  # the device is at that address, and knows no other
            except SidestepError as why:
                raise raised(why) from why
            try:
                inner.listen(backlog)
            except OSError as error:
                inner.close()
                if isinstance(error.__cause__, Unavailable):
                    raise raised(error.__cause__) from error
                raise
            self._inner, self._bound = inner, (local.address, local.port)
            self._announced = local
            self.announced = self._by.announce(local)

    announced = False  # whether other hosts find this listener by the port mapper

    def accept(self) -> tuple[SdpSocket, Address]:
        """The next connection, and the address of its other end."""
        inner = self._get()

        def accept() -> tuple[blocking.Socket, Address]:
            inner.settimeout(self._timeout)
            return inner.accept()

        accepted, address = self._by.call(accept)
        made = SdpSocket(self.family)
        made._inner = accepted
        return made, address

    def _made(self, host: Host) -> blocking.Socket:
        inner = blocking.Socket(host, self._by, settings=SETTINGS)
        inner.settimeout(self._timeout)
        return inner

    def _own(self, name: str) -> IpAddress:
        return self._resolved(name, 0) if name else _ANY[self.family]

    def _resolved(self, name: str, port: int) -> IpAddress:
        found = _stdlib.getaddrinfo(name, port, self.family, _stdlib.SOCK_STREAM)
        return ip_address(str(found[0][4][0]).partition("%")[0])

    # --- data ---

    def send(self, data: Buffer, flags: int = 0) -> int:
        """Sends bytes; with MSG_OOB the last one is urgent. Tells how many: all of them, unless time was too short."""
        inner = self._get()
        return self._by.call(lambda: inner.send(data, flags))

    def sendall(self, data: Buffer, flags: int = 0) -> None:
        """Sends all, and ends when the buffer is free; after TimeoutError it is not known how much of it was sent."""
        inner = self._get()
        self._by.call(lambda: inner.sendall(data, flags))

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        """Receives up to that many bytes, by a copy more than `recv_into`; none at the end of the stream."""
        inner = self._get()
        return self._by.call(lambda: inner.recv(bufsize, flags))

    def recv_into(self, buffer: Buffer, nbytes: int = 0, flags: int = 0) -> int:
        """Receives into the buffer and tells how many bytes; 0 at the end. MSG_WAITALL, MSG_PEEK, MSG_OOB as usual."""
        inner = self._get()
        return self._by.call(lambda: inner.recv_into(buffer, nbytes, flags))

    def at_mark(self) -> bool:
        """Whether the urgent byte is the next one: SIOCATMARK."""
        inner = self._get()
        return self._by.call(inner.at_mark)

    def makefile(
        self,
        mode: str = "r",
        buffering: int | None = None,
        *,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
    ) -> Any:
        """A file for the stream; as `socket.makefile`. The socket stays open until it is closed as well."""
        make: Any = _stdlib.socket.makefile  # asks for nothing but methods that are here
        return make(self, mode, buffering, encoding=encoding, errors=errors, newline=newline)

    # --- ends ---

    def shutdown(self, how: int) -> None:
        """Ends one direction or both; what was sent before still arrives."""
        inner = self._get()
        self._by.call(lambda: inner.shutdown(how))

    def set_linger(self, seconds: float | None) -> None:
        """What close() does: None returns at once, 0 resets, else it waits so long for what was sent to arrive."""
        self._linger = seconds

    def close(self) -> None:
        """Ends the socket, once the files of `makefile` are closed. Unread bytes make it a reset, as in TCP.

        What is on its way goes on, as long as the process lives.
        """
        self._closed = True
        if self._io_refs <= 0:
            self._real_close()

    def _decref_socketios(self) -> None:
        """A file of makefile() was closed."""
        self._io_refs -= 1
        if self._closed:
            self.close()

    def _real_close(self) -> None:
        inner, self._inner = self._inner, None
        announced, self._announced = self._announced, None
        if announced is not None:
            self._by.call(lambda: self._by.withdraw(announced))
        if inner is not None:
            inner.set_linger(self._linger)
            self._by.call(inner.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: _Raised | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        inner = getattr(self, "_inner", None)
        if inner is not None:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)
            announced = self._announced
            if announced is not None:
                self._by.later(lambda: self._by.withdraw(announced))
            self._by.later(inner.close)

    def __repr__(self) -> str:
        if self._closed:
            return "<SdpSocket [closed]>"
        peer = f", raddr={self._peer}" if self._peer is not None else ""
        return f"<SdpSocket family={self.family.name}{peer}>"

    # --- what it is ---

    def settimeout(self, value: float | None) -> None:
        """How long a call waits; None for ever, 0 not at all."""
        if value is not None and value < 0:
            raise ValueError("Timeout value out of range")
        self._timeout = value
        if self._inner is not None:
            self._inner.settimeout(value)

    def gettimeout(self) -> float | None:
        """What `settimeout` has set."""
        return self._timeout

    @property
    def type(self) -> _stdlib.SocketKind:
        """A stream."""
        return _stdlib.SOCK_STREAM

    @property
    def proto(self) -> int:
        """SDP."""
        return IPPROTO_SDP

    @property
    def timeout(self) -> float | None:
        """The same."""
        return self._timeout

    def setblocking(self, flag: bool) -> None:
        """`settimeout(None)`, or 0."""
        self.settimeout(None if flag else 0.0)

    def getblocking(self) -> bool:
        """Whether calls wait at all."""
        return self._timeout != 0

    def getsockname(self) -> Address:
        """The own address."""
        if self._inner is not None and self._inner.stream is not None:
            return self._inner.getsockname()
        local, port = self._bound or (_ANY[self.family], 0)
        return (str(local), port) if local.version == 4 else (str(local), port, 0, 0)

    def getpeername(self) -> Address:
        """The other end's address; the port is the service's, whichever its RDMA port is."""
        address = self._get().getpeername()
        return address if self._peer is None else (address[0], self._peer.port, *address[2:])

    def fileno(self) -> int:
        """There is none.

        Raises:
            io.UnsupportedOperation: Always; but -1 of a socket that is closed.
        """
        if self._closed:
            return -1
        raise io.UnsupportedOperation("an SDP socket of this process has no descriptor")

    def details(self) -> dict[str, object]:
        """The connection at the moment: mechanism, mode, credit, advertisements, and what its queue pair has moved."""
        stream = self._get().stream
        with self._by:
            return {} if stream is None else details(stream)

    def _get(self) -> blocking.Socket:
        if self._inner is None:
            raise os_error(errno.EBADF if self._closed else errno.ENOTCONN)
        return self._inner


def free_port(local: IpAddress) -> int:
    """A TCP port that nobody has at the moment."""
    family = _stdlib.AF_INET if local.version == 4 else _stdlib.AF_INET6
    with _stdlib.socket(family, _stdlib.SOCK_STREAM) as probe:
        probe.bind((str(local), 0))
        return int(probe.getsockname()[1])


def create_connection(
    address: tuple[str | None, int],
    timeout: float | None,
    source_address: Address | None,
    rdma_port: int | None,
) -> tuple[SdpSocket | None, list[OSError]]:
    """A socket that is connected, or what came of each address that the host has."""
    host, port = address
    errors: list[OSError] = []
    for family, _, _, _, peer in _stdlib.getaddrinfo(host, port, 0, _stdlib.SOCK_STREAM):
        made = SdpSocket(family)
        try:
            made.settimeout(timeout)
            if source_address is not None:
                made.bind(source_address)
            made.connect(peer, rdma_port=rdma_port)
        except OSError as error:
            made.close()
            errors.append(error)
        except BaseException:
            made.close()
            raise
        else:
            return made, []
    return None, errors


def create_server(address: Address, family: int, backlog: int | None) -> SdpSocket:
    """A socket that listens."""
    made = SdpSocket(family)
    try:
        made.bind(address)
        made.listen(limits.RDMA_BACKLOG_DEFAULT if backlog is None else backlog)
    except BaseException:
        made.close()
        raise
    return made
