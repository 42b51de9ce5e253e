"""The standard library's `socket`, whose TCP connections go through shared memory where both ends can.

`from sidestep import socket` stands in for `import socket`: everything that module has is here. The shim tracks
TCP sockets made here as those of a program under `sidestep run`, without LD_PRELOAD. All other sockets of the process
stay as they are. A connection begins as a kernel TCP connection and remains one if its other end is not under
sidestep. So selectors, `ssl`, asyncio, `makefile` and `fork` work as with a `socket.socket`.

Beyond the standard ones a socket has `peek` and `consume`, `reserve` and `commit`, which work on ring memory in place.

Where the shim cannot work in this process a RuntimeWarning says why, once, and the sockets are plain ones.

With `protocol="sdp"`, `create_connection` and `create_server` give an `SdpSocket` instead: SDP over an RDMA device in
this very process, from and into the caller's own memory.
"""

from __future__ import annotations

import contextlib
import socket as _stdlib
from typing import TYPE_CHECKING, Any, Final, Literal, SupportsIndex, overload

from sidestep import constants, embed, limits
from sidestep.constants import AF_INET6_DIRECT as AF_INET6_DIRECT
from sidestep.constants import AF_INET6_OFFLOAD as AF_INET6_OFFLOAD
from sidestep.constants import AF_INET_DIRECT as AF_INET_DIRECT
from sidestep.constants import AF_INET_OFFLOAD as AF_INET_OFFLOAD
from sidestep.constants import IPPROTO_OFFLOAD_ANY as IPPROTO_OFFLOAD_ANY
from sidestep.constants import IPPROTO_SDP as IPPROTO_SDP
from sidestep.errors import Misuse
from sidestep.rings import Window

if TYPE_CHECKING:
    from socket import EAGAIN as EAGAIN
    from socket import EBADF as EBADF
    from socket import EWOULDBLOCK as EWOULDBLOCK
    from socket import AddressInfo as AddressInfo
    from socket import MsgFlag as MsgFlag
    from socket import SocketIO as SocketIO

    from sidestep.api.sockets import SdpSocket as SdpSocket
else:  # a type checker would take any name for one of these

    def __getattr__(name: str) -> Any:
        """Returns any other name of the standard module, or a name that is imported when first used."""
        return _sdp_socket() if name == "SdpSocket" else getattr(_stdlib, name)


# No timeout was given: new sockets have that of setdefaulttimeout(). Callers such as http.client pass it on.
_GLOBAL_DEFAULT: Final[Any] = getattr(_stdlib, "_GLOBAL_DEFAULT_TIMEOUT")  # noqa: B009 - unknown to the type checker

__all__ = ["SdpSocket"]
__all__ += constants.__all__
__all__ += _stdlib.__all__  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType] - no type in its stub

_EXPLICIT: Final = (AF_INET_OFFLOAD, AF_INET6_OFFLOAD, AF_INET_DIRECT, AF_INET6_DIRECT)


def _sdp_socket() -> type[SdpSocket]:
    from sidestep.api.sockets import SdpSocket

    return SdpSocket


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_stdlib)})


class socket(_stdlib.socket):  # noqa: N801 - the name of the class it stands in for
    """A `socket.socket` that is promoted to shared memory once its connection has shown that it lives.

    Given a `fileno`, it is promoted if that socket was made by sidestep, and else stays on TCP. Of an explicit family
    (AF_INET_OFFLOAD, AF_INET_DIRECT and their like) it is that kind of socket, and its `family` is the kernel's.
    """

    __slots__ = ("_window",)
    _window: Window | None

    def __init__(
        self,
        family: _stdlib.AddressFamily | int = -1,
        type: _stdlib.SocketKind | int = -1,  # noqa: A002 - the standard name
        proto: int = -1,
        fileno: int | None = None,
    ) -> None:
        self._window = None
        if fileno is None and (family in _EXPLICIT or proto == IPPROTO_SDP):
            embed.load()
            super().__init__(fileno=_stdlib.socket(family, type, proto).detach())
            return
        super().__init__(family, type, proto, fileno)
        if fileno is None and self.family in (_stdlib.AF_INET, _stdlib.AF_INET6) and self.type == _stdlib.SOCK_STREAM:
            embed.adopt(self.fileno())

    def accept(self) -> tuple[socket, Any]:
        """The next connection, as a socket of this class, and the address of its other end."""
        plain, address = super().accept()
        timeout = plain.gettimeout()
        accepted = socket(self.family, self.type, self.proto, fileno=plain.detach())
        accepted.settimeout(timeout)
        return accepted, address

    # ---- in place ----
    def peek(self, size: int = -1) -> memoryview:
        """A read-only view of bytes that have come and are not consumed: all of them, or at most `size`.

        Of a promoted connection it is the ring itself, and of one on TCP a copy of at most PEEK_COPY_MAX bytes. Waits
        for the first byte as `recv` would. The view is empty at the end of the stream.

        Bytes that `recv` takes while there is a view are not protected: the other end may overwrite them. It can also
        write to the ring at any time, if it breaks the rules. If you do not trust it, copy the bytes before you check
        and use them.

        Raises:
            OSError: An error of `recv`: BlockingIOError, TimeoutError, ConnectionResetError.
        """
        if self._window is None:
            self._window = Window()
        return self._window.peek(self, size)

    def consume(self, size: int) -> None:
        """Takes `size` bytes from the front of what the last `peek` showed; they need not be all.

        Raises:
            BufferError: A view of `peek` is still in use.
            Misuse: They are more than were shown, or something else has received them since.
        """
        if self._window is None:
            raise Misuse("there is nothing to consume", remedy="call peek() first")
        self._window.consume(self, size)

    def reserve(self, size: int) -> memoryview:
        """A view to be filled with bytes to send: of `size` bytes, or fewer where there is less room.

        Of a promoted connection it is the room in the ring, and of one on TCP a buffer of at most RESERVE_COPY_MAX
        bytes. Waits for room as `send` would. Until `commit` all other sends of this connection wait as if the ring
        were full. In the same thread, where the socket blocks, they are OSError (EDEADLK).

        Raises:
            OSError: BlockingIOError or TimeoutError: there is no room. `commit` raises other errors.
            Misuse: Room is reserved already.
        """
        if self._window is None:
            self._window = Window()
        return self._window.reserve(self, size)

    def commit(self, size: int) -> None:
        """Sends the first `size` bytes of the reserved room, and releases the others; 0 releases it all.

        By ring it never waits. On TCP it waits until all is sent, also by a socket that does not block.

        Raises:
            BufferError: A view of `reserve` is still in use.
            OSError: An error of `sendall`.
            Misuse: They are more than were reserved.
        """
        if self._window is None:
            raise Misuse("there is nothing to commit", remedy="call reserve() first")
        self._window.commit(self, size)

    def detach(self) -> int:
        """Detaches the descriptor as `socket.socket` does; reserved room is released."""
        if self._window is not None:
            self._window.give_back(self)
        return super().detach()

    def _real_close(self, *closer: Any) -> None:
        """Closes for good: close() comes here when no file of makefile() is left."""
        if self._window is not None:
            self._window.give_back(self)
        super()._real_close(*closer)  # type: ignore[misc]


@overload
def create_connection(
    address: tuple[str | None, bytes | str | int | None],
    timeout: float | None = ...,
    source_address: tuple[bytearray | bytes | str, int] | None = ...,
    *,
    all_errors: bool = ...,
    protocol: Literal["tcp"] = ...,
) -> socket: ...


@overload
def create_connection(
    address: tuple[str | None, bytes | str | int | None],
    timeout: float | None = ...,
    source_address: tuple[bytearray | bytes | str, int] | None = ...,
    *,
    all_errors: bool = ...,
    protocol: Literal["sdp"],
    rdma_port: int | None = ...,
) -> SdpSocket: ...


def create_connection(
    address: tuple[str | None, bytes | str | int | None],
    timeout: float | None = _GLOBAL_DEFAULT,
    source_address: tuple[bytearray | bytes | str, int] | None = None,
    *,
    all_errors: bool = False,
    protocol: Literal["tcp", "sdp"] = "tcp",
    rdma_port: int | None = None,
) -> socket | SdpSocket:
    """Connects to (host, port), trying each address that the host has; as `socket.create_connection`.

    With `protocol="sdp"` by SDP over an RDMA device in this process; `rdma_port` spares asking the port mapper.

    Raises:
        OSError: No address could be connected to: the last error, or with `all_errors` an ExceptionGroup of them all.
    """
    made, errors = _connect_each(address, timeout, source_address, protocol, rdma_port)
    if made is not None:
        return made
    try:
        if not errors:
            raise OSError("getaddrinfo returns an empty list")
        if all_errors:
            raise ExceptionGroup("create_connection failed", errors)
        raise errors[-1]
    finally:
        errors.clear()  # errors whose tracebacks hold this frame


def _connect_each(
    address: tuple[str | None, bytes | str | int | None],
    timeout: float | None,
    source_address: tuple[bytearray | bytes | str, int] | None,
    protocol: str,
    rdma_port: int | None,
) -> tuple[socket | SdpSocket | None, list[OSError]]:
    """Connects to the addresses in turn; returns the socket, or the error of each address."""
    if protocol not in ("tcp", "sdp") or (protocol == "tcp" and rdma_port is not None):
        raise Misuse(f"protocol {protocol!r}, RDMA port {rdma_port}", remedy='"tcp", or "sdp" with or without a port')
    host, port = address
    errors: list[OSError] = []
    for family, kind, proto, _, peer in _stdlib.getaddrinfo(host, port, 0, _stdlib.SOCK_STREAM):
        with contextlib.ExitStack() as stack:
            try:
                sdp = protocol == "sdp"
                sock: socket | SdpSocket = _sdp_socket()(family) if sdp else socket(family, kind, proto)
                stack.callback(sock.close)
                if timeout is not _GLOBAL_DEFAULT:
                    sock.settimeout(timeout)
                if source_address is not None:
                    sock.bind(source_address)
                if isinstance(sock, socket):
                    sock.connect(peer)
                else:
                    sock.connect(peer, rdma_port=rdma_port)
            except OSError as error:
                errors.append(error)
                continue
            stack.pop_all()  # the socket stays open
            return sock, []
    return None, errors


@overload
def create_server(
    address: tuple[str, int] | tuple[str, int, int, int],
    *,
    family: int = ...,
    backlog: int | None = ...,
    reuse_port: bool = ...,
    dualstack_ipv6: bool = ...,
    protocol: Literal["tcp"] = ...,
) -> socket: ...


@overload
def create_server(
    address: tuple[str, int] | tuple[str, int, int, int],
    *,
    family: int = ...,
    backlog: int | None = ...,
    protocol: Literal["sdp"],
) -> SdpSocket: ...


def create_server(
    address: tuple[str, int] | tuple[str, int, int, int],
    *,
    family: int = _stdlib.AddressFamily.AF_INET,
    backlog: int | None = None,
    reuse_port: bool = False,
    dualstack_ipv6: bool = False,
    protocol: Literal["tcp", "sdp"] = "tcp",
) -> socket | SdpSocket:
    """A socket that listens at `address`; as `socket.create_server`, and with `protocol="sdp"` for SDP."""
    if protocol == "sdp":
        if reuse_port or dualstack_ipv6:
            raise Misuse("an SDP listener has a port for itself, and one family")
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(_sdp_socket()(family))
            listener.bind(address)
            listener.listen(limits.RDMA_BACKLOG_DEFAULT if backlog is None else backlog)
            stack.pop_all()  # the socket stays open
            return listener
    if protocol != "tcp":
        raise Misuse(f"protocol {protocol!r}", remedy='"tcp" or "sdp"')
    plain = _stdlib.create_server(
        address, family=family, backlog=backlog, reuse_port=reuse_port, dualstack_ipv6=dualstack_ipv6
    )
    embed.adopt(plain.fileno())
    return _of(plain)


def fromfd(
    fd: SupportsIndex,
    family: _stdlib.AddressFamily | int,
    type: _stdlib.SocketKind | int,  # noqa: A002
    proto: int = 0,
) -> socket:
    """A socket of a duplicate of `fd`; as `socket.fromfd`."""
    return _of(_stdlib.fromfd(fd, family, type, proto))


def _of(plain: _stdlib.socket) -> socket:
    """A socket of this module in the place of `plain`."""
    timeout = plain.gettimeout()
    sock = socket(plain.family, plain.type, plain.proto, fileno=plain.detach())
    sock.settimeout(timeout)
    return sock


def socketpair(
    family: int | _stdlib.AddressFamily | None = None,
    type: _stdlib.SocketKind | int = _stdlib.SocketKind.SOCK_STREAM,  # noqa: A002
    proto: int = 0,
) -> tuple[socket, socket]:
    """Two connected sockets, which are not TCP's and stay in the kernel; as `socket.socketpair`."""
    a, b = _stdlib.socketpair(family, type, proto)
    return _of(a), _of(b)


if TYPE_CHECKING:  # an import behind ours, which mypy then keeps
    from sidestep.standard_names import *  # type: ignore[assignment, no-redef]  # noqa: F403
