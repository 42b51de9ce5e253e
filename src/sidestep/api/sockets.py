"""SDP sockets that block, with the methods of `socket.socket`: see `SdpSocket`.

Differences from a TCP socket, and their causes:
"""

from __future__ import annotations

import errno
import io
import socket as _stdlib
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import wraps
from ipaddress import IPv4Address, IPv6Address, ip_address
from socket import MSG_DONTWAIT, MSG_OOB, MSG_PEEK, MSG_WAITALL, SHUT_RD, SHUT_RDWR, SHUT_WR
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, Self, TypeAlias, TypeVar

from sidestep import limits
from sidestep.api.end import SdpEnd, SdpListener, SocketAddress, room_of, socket_address
from sidestep.api.rnic import details, not_there
from sidestep.api.service import service
from sidestep.constants import IPPROTO_SDP
from sidestep.errors import Misuse, SidestepError
from sidestep.sdp.endpoint import ignore_event
from sidestep.sdp.errnos import error_of, os_error
from sidestep.sdp.host import release
from sidestep.sdp.requests import SdpEvent, SdpEventKind, StreamEvent, StreamReceive, StreamSend
from sidestep.sdp.states import OPENING, SdpState
from sidestep.switch.protocol import Endpoint

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Buffer

    from sidestep.api.driver import Driver, Hosts
    from sidestep.sdp.connection import SdpConnection
    from sidestep.sdp.endpoint import SdpStream, StreamHandler
    from sidestep.sdp.hello import IpAddress
    from sidestep.sdp.host import Host

__all__ = [
    "MSG_DONTWAIT", "MSG_OOB", "MSG_PEEK", "MSG_WAITALL", "SHUT_RD", "SHUT_RDWR", "SHUT_WR", "SdpSocket", "select",
]  # fmt: skip

_Raised: TypeAlias = type[BaseException]  # a name of its own: in the class `type` is something else
_P = ParamSpec("_P")
_T = TypeVar("_T")
_ANY: Final[dict[int, IpAddress]] = {_stdlib.AF_INET: IPv4Address(0), _stdlib.AF_INET6: IPv6Address(0)}


def _call(method: Callable[Concatenate[SdpSocket, _P], _T]) -> Callable[Concatenate[SdpSocket, _P], _T]:
    """A method that the driver makes, with the stacks held."""

    @wraps(method)
    def made(self: SdpSocket, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return self._driver.call(lambda: method(self, *args, **kwargs))

    return made


class SdpSocket(SdpEnd):
    """A TCP socket's methods, and SDP over a software RNIC of this process beneath.

    A send of a large buffer shows it to the other end's device. That reads it (Read Zcopy), or writes it into the
    buffers that the other end has shown (Write Zcopy). `recv_into` of a large buffer has it filled so. SDP copies
    nothing on the way, and the call ends when the buffer is free again. Small ones go through private buffers.

    Threads may use one socket at the same time, one call each way and more. A signal handler that raises ends a call
    once its buffer is free. There is no descriptor: selectors cannot watch it; see `settimeout`, or `open_connection`.

    Args:
        family: AF_INET or AF_INET6.
        driver: Runs while a call waits; by default, the thread that serves this process's software RNICs.
        hosts: Hosts of the connection; by default, such an RNIC. Both go together.
    """

    def __init__(
        self,
        family: _stdlib.AddressFamily | int = _stdlib.AF_INET,
        *,
        driver: Driver | None = None,
        hosts: Hosts | None = None,
    ) -> None:
        if family not in _ANY:
            raise os_error(errno.EAFNOSUPPORT)
        self.family = _stdlib.AddressFamily(family)
        self._driver: Driver = driver or service()
        self._hosts: Hosts = hosts or service().rnics
        super().__init__()  # the socket can be closed from here on
        self._timeout: float | None = _stdlib.getdefaulttimeout()
        self._linger: float | None = None
        self._bound: Endpoint | None = None
        self._listener: SdpListener | None = None
        self._peer: Endpoint | None = None  # the argument of `connect`
        self._established = False
        self._over = False  # CLOSED has come: nothing of the stream's is outstanding
        self._read_shut = False
        self._io_refs = 0  # files of makefile() that are open
        self._close_asked = False

    # --- making connections ---

    def bind(self, address: SocketAddress) -> None:
        """Chooses the own address and port; an empty host is any, port 0 any that is free."""
        self._check_open()
        if self._bound is not None or self._stream is not None:
            raise os_error(errno.EINVAL, "bound already")
        local = self._resolved(address[0], 0) if address[0] else _ANY[self.family]
        self._bound = Endpoint(local, address[1])

    def connect(self, address: SocketAddress, *, rdma_port: int | None = None) -> None:
        """Connects to (host, port); the host's port mapper is asked for the RDMA port, unless it is given.

        Raises:
            OSError: As `socket.connect`; ConnectionRefusedError also if the port mapper there knows no such service.
                With a timeout of 0 BlockingIOError: `select` shows that it is done, and `error` how.
        """
        self._connect(Endpoint(self._resolved(address[0], address[1]), address[1]), rdma_port)

    @_call
    def _connect(self, remote: Endpoint, rdma_port: int | None) -> None:
        self._check_open()
        if self._listener is not None:
            raise os_error(errno.EOPNOTSUPP)
        if self._stream is None:
            self._begin(remote, rdma_port)
            if self._timeout == 0:
                self._driver.wait(self._has_answer, 0)
                if not self._has_answer():
                    raise os_error(errno.EINPROGRESS)
        elif not self._has_answer():
            raise os_error(errno.EALREADY)
        elif self._established and not self._failed():
            raise os_error(errno.EISCONN)
        self._finish_connecting()

    def _begin(self, remote: Endpoint, rdma_port: int | None) -> None:
        try:
            host = self._hosts.towards(remote.address, self._bound.address if self._bound is not None else None)
        except SidestepError as why:
            raise error_of(why) from why
        port = rdma_port if rdma_port is not None else self._find(host, remote)
        if port is None:
            raise not_there(remote)
        self._open(host, self._bound, Endpoint(remote.address, port))
        self._peer = remote

    def _find(self, host: Host, remote: Endpoint) -> int | None:
        found: list[int | None] = []
        self._hosts.find(host, remote, found.append)
        if not self._driver.wait(lambda: bool(found), self._timeout):
            raise TimeoutError("timed out")
        return found[0]

    def _finish_connecting(self) -> None:
        try:
            in_time = self._driver.wait(self._has_answer, self._timeout)
        except BaseException:
            self._give_up()
            raise
        if not in_time:
            self._give_up()
            raise TimeoutError("timed out")
        if self._failed():
            error = self._why()
            self._forget()
            raise error

    def _give_up(self) -> None:
        assert self._reports is not None
        self.stream.abort()
        self._kick()
        self._reports.take()
        self._forget()

    def _forget(self) -> None:
        """An attempt that came to nothing: the socket may try again, as TCP's may."""
        self.stream.tell = ignore_event
        self._give_port_back()
        self._stream = self._reports = self._peer = None
        self._established = self._over = False

    def _has_answer(self) -> bool:
        return self._established or self._failed()

    def _failed(self) -> bool:
        return self._stream is not None and self._stream.connection.error is not None

    @_call
    def listen(self, backlog: int = limits.RDMA_BACKLOG_DEFAULT) -> None:
        """Takes connections at the TCP port of the same number, by RDMA, and lets other hosts find it.

        Up to `backlog` wait to be accepted, the next one is refused.
        """
        self._check_open()
        if self._stream is not None or self._listener is not None:
            raise os_error(errno.EINVAL)
        self._listener = SdpListener(self._hosts, self._bound or Endpoint(_ANY[self.family], 0), backlog)
        self._bound = self._listener.local

    @property
    def announced(self) -> bool:
        """True if other hosts find this listener by the port mapper."""
        return self._listener is not None and self._listener.announced

    @_call
    def accept(self) -> tuple[SdpSocket, SocketAddress]:
        """The next connection, and the address of its other end."""
        self._check_open()
        if self._listener is None:
            raise os_error(errno.EINVAL, "not listening")
        queue = self._listener.queue
        if not self._driver.wait(lambda: queue.waiting > 0 or self._closed, self._timeout):
            raise self._time_is_over(self._timeout)
        self._check_open()
        accepted = SdpSocket(self.family, driver=self._driver, hosts=self._hosts)
        accepted._adopt(self._listener)
        return accepted, accepted.getpeername()

    def _resolved(self, name: str, port: int) -> IpAddress:
        found = _stdlib.getaddrinfo(name, port, self.family, _stdlib.SOCK_STREAM)
        return ip_address(str(found[0][4][0]).partition("%")[0])

    # --- data ---

    @_call
    def send(self, data: Buffer, flags: int = 0) -> int:
        """Sends bytes; with MSG_OOB the last one is urgent. Returns how many: all of them, unless time ran out."""
        timeout = self._timeout_of(flags)
        sent = self._send(memoryview(data).cast("B"), flags, timeout)
        if sent is None:
            return 0
        if sent.passed:
            return sent.passed
        raise self._time_is_over(timeout)

    @_call
    def sendall(self, data: Buffer, flags: int = 0) -> None:
        """Sends all, and ends when the buffer is free; after TimeoutError it is not known how much of it was sent."""
        timeout, count = self._timeout_of(flags), 0
        with memoryview(data).cast("B") as whole:
            while (sent := self._send(whole[count:], flags, timeout)) is not None:
                count += sent.passed
                if count == len(whole):
                    return
                if timeout != 0 or not sent.passed:
                    raise self._time_is_over(timeout)

    def _send(self, view: memoryview, flags: int, timeout: float | None) -> StreamSend | None:
        """A send that has ended, perhaps early; None if there was nothing to send."""
        connection = self._connected()
        self._check_writing()
        if not len(view):
            return None
        urgent = bool(flags & MSG_OOB)
        if timeout == 0:
            room = connection.room if connection.writable else 0
            if not room:
                raise os_error(errno.EAGAIN)
            urgent = urgent and len(view) <= room  # the last byte is, and it goes with another call
            view = view[:room]
        send = self._begin_send(view, urgent=urgent, bcopy_only=timeout == 0)
        self._await(send, timeout if timeout != 0 else None)
        release(view)
        if send.error is not None:
            raise self._why()
        return send

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        """Receives up to that many bytes, by a copy more than `recv_into`; none at the end of the stream."""
        room = bytearray(bufsize)
        return bytes(memoryview(room)[: self.recv_into(room, 0, flags)])

    @_call
    def recv_into(self, buffer: Buffer, nbytes: int = 0, flags: int = 0) -> int:
        """Receives into the buffer; returns how many bytes, 0 at the end. MSG_WAITALL, MSG_PEEK, MSG_OOB as usual.

        With MSG_WAITALL all of it is filled, unless the stream ends, an urgent byte is ahead, or time is over. MSG_OOB
        gives the urgent byte, and never waits for it.
        """
        view = room_of(buffer)
        if nbytes:
            view = view[:nbytes]
        connection = self._connected()
        timeout = self._timeout_of(flags)
        if flags & MSG_OOB:
            return self._take_urgent(view, connection)
        if not len(view) or self._read_shut:
            return 0
        if connection.error is None or connection.available:
            if flags & MSG_PEEK:
                return self._peek(view, timeout)
            if timeout == 0 and not connection.readable:
                raise os_error(errno.EAGAIN)
        receive = self._begin_receive(view, waitall=bool(flags & MSG_WAITALL) and timeout != 0)
        if receive is None:
            return 0
        in_time = self._await(receive, timeout if timeout != 0 else None)
        release(view)
        if receive.filled:
            return receive.filled
        if receive.error is not None:
            raise self._why()
        if not in_time:
            raise self._time_is_over(timeout)
        return 0

    def _peek(self, view: memoryview, timeout: float | None) -> int:
        stream, connection = self.stream, self.stream.connection
        assert self._reports is not None
        count = 0

        def seen() -> bool:
            nonlocal count
            count = stream.peek_into(view)
            return count > 0 or connection.ended or connection.error is not None

        in_time = self._driver.wait(seen, timeout)
        if not count and (broken := self._reports.take()) is not None:
            raise broken
        if not in_time:
            raise self._time_is_over(timeout)
        return count

    def _take_urgent(self, view: memoryview, connection: SdpConnection) -> int:
        byte = None if connection.urgent_inline else connection.take_urgent()
        if byte is None:
            if connection.urgent_pending and not connection.urgent_inline:
                raise os_error(errno.EAGAIN)  # announced, and not here yet
            raise os_error(errno.EINVAL)
        view[0] = byte
        return 1

    @_call
    def at_mark(self) -> bool:
        """True if the urgent byte is the next one: SIOCATMARK."""
        return self._connected().at_mark

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

    @_call
    def shutdown(self, how: int) -> None:
        """Ends one direction or both; what was sent before still arrives."""
        connection = self._connected()
        if how not in (SHUT_RD, SHUT_WR, SHUT_RDWR):
            raise os_error(errno.EINVAL)
        if connection.state is SdpState.CLOSED:
            raise os_error(errno.ENOTCONN)
        if how != SHUT_WR and not self._read_shut:
            self._read_shut = True
            self.stream.shutdown_read()
        if how != SHUT_RD and not self._write_shut:
            self._write_shut = True
            self.stream.shutdown_write()
        self._kick()

    def set_linger(self, seconds: float | None) -> None:
        """Sets how close() ends: None returns at once, 0 resets, else it waits so long for sent bytes to arrive."""
        self._linger = seconds

    def close(self) -> None:
        """Ends the socket, once the files of `makefile` are closed. Unread bytes make it a reset, as in TCP.

        What is on its way goes on, as long as the process lives.
        """
        self._close_asked = True
        if self._io_refs <= 0 and not self._closed:
            if self._stream is None and self._listener is None:
                self._closed = True
            else:
                self._real_close()

    def _decref_socketios(self) -> None:
        """A file of makefile() was closed."""
        self._io_refs -= 1
        if self._close_asked:
            self.close()

    @_call
    def _real_close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._listener is not None:
            self._listener.close()
        if self._stream is not None:
            self._stream.tell = self._handle_event  # keeps this until all is over, without other references
            self._stream.close(self._linger)
            self._kick()
            if self._linger:
                self._driver.wait(lambda: self._over, self._linger)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: _Raised | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and (self._stream is not None or self._listener is not None):
            warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)
            self._linger = None
            self._driver.later(self._real_close)

    def __repr__(self) -> str:
        if self._close_asked:
            return "<SdpSocket [closed]>"
        peer = f", raddr={self._peer}" if self._peer is not None else ""
        return f"<SdpSocket family={self.family.name}{peer}>"

    # --- what it is ---

    def settimeout(self, value: float | None) -> None:
        """Sets how long a call waits; None for ever, 0 not at all."""
        if value is not None and value < 0:
            raise ValueError("Timeout value out of range")
        self._timeout = value

    def gettimeout(self) -> float | None:
        """Timeout that `settimeout` has set."""
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
        """True if calls wait at all."""
        return self._timeout != 0

    def getsockname(self) -> SocketAddress:
        """The own address."""
        if self._stream is not None and self._stream.connection.addresses is not None:
            return super().getsockname()
        local = self._bound or Endpoint(_ANY[self.family], 0)
        return socket_address(local.address, local.port)

    def getpeername(self) -> SocketAddress:
        """The other end's address; the port is the service's, whichever its RDMA port is."""
        self._connected()
        address = super().getpeername()
        return address if self._peer is None else (address[0], self._peer.port, *address[2:])

    def fileno(self) -> int:
        """Always fails, as there is no descriptor.

        Raises:
            io.UnsupportedOperation: Always; but -1 of a socket that is closed.
        """
        if self._close_asked:
            return -1
        raise io.UnsupportedOperation("an SDP socket of this process has no descriptor")

    @_call
    def details(self) -> dict[str, object]:
        """The connection at the moment: mechanism, mode, credit, advertisements, and what its queue pair has moved."""
        self._check_open()
        return {} if self._listener is not None else details(self.stream)

    @_call
    def error(self) -> int:
        """The errno that the next call would fail with, once: SO_ERROR."""
        raised = self._reports.take() if self._reports is not None else None
        return 0 if raised is None else raised.errno or errno.EIO

    @property
    def readable(self) -> bool:
        """True if a call to read, or to accept, would not wait."""
        if self._listener is not None:
            return self._listener.queue.waiting > 0 or self._closed
        if self._stream is None:
            return False
        connection = self._stream.connection
        return self._closed or self._read_shut or connection.readable or connection.state is SdpState.CLOSED

    @property
    def writable(self) -> bool:
        """True if a call to write would not wait; of a connection being made: if it is made."""
        if self._stream is None or self._stream.connection.state in OPENING:
            return False
        return self._closed or self._write_shut or self._failed() or self._stream.connection.writable

    @property
    def urgent(self) -> bool:
        """True if an urgent byte is ahead, or can be had."""
        return self._stream is not None and self._stream.connection.urgent

    # --- within ---

    def _stream_handler(self) -> StreamHandler:
        """Callback that does not keep the socket: without other references its finalizer closes it."""
        own = weakref.WeakMethod(self._handle_event)

        def tell(stream: SdpStream, event: StreamEvent) -> None:
            if (handler := own()) is not None:
                handler(stream, event)

        return tell

    def _handle_event(self, stream: SdpStream, event: StreamEvent) -> None:
        super()._handle_event(stream, event)
        if isinstance(event, SdpEvent):
            self._established |= event.kind is SdpEventKind.ESTABLISHED
            self._over |= event.kind is SdpEventKind.CLOSED

    def _await(self, request: StreamSend | StreamReceive, timeout: float | None) -> bool:
        """Waits until the request has ended, or takes it back; returns whether it ended in time."""
        try:
            if self._driver.wait(lambda: request.done, timeout):
                return True
        except BaseException:  # KeyboardInterrupt is one: the memory must not stay in use
            self._take_back(request)
            if isinstance(request, StreamReceive) and request.filled:
                self.stream.put_back(bytes(request.view[: request.filled]))
            release(request.view)
            raise
        self._take_back(request)
        return False

    def _take_back(self, request: StreamSend | StreamReceive) -> None:
        self._cancel(request)
        self._driver.wait(lambda: request.done)

    def _check_open(self) -> None:
        if self._closed:
            raise os_error(errno.EBADF)

    def _connected(self) -> SdpConnection:
        self._check_open()
        if not self._has_answer():
            raise os_error(errno.ENOTCONN)
        return self.stream.connection

    def _timeout_of(self, flags: int) -> float | None:
        return 0 if flags & MSG_DONTWAIT else self._timeout

    def _time_is_over(self, timeout: float | None) -> OSError:
        return os_error(errno.EAGAIN) if timeout == 0 else TimeoutError("timed out")


def select(
    readers: Sequence[SdpSocket],
    writers: Sequence[SdpSocket],
    urgents: Sequence[SdpSocket] = (),
    timeout: float | None = None,
) -> tuple[list[SdpSocket], list[SdpSocket], list[SdpSocket]]:
    """Waits until one of them is readable, writable, or has urgent data; all with one driver."""
    found: tuple[list[SdpSocket], list[SdpSocket], list[SdpSocket]] = ([], [], [])

    def ready() -> bool:
        nonlocal found
        found = (
            [each for each in readers if each.readable],
            [each for each in writers if each.writable],
            [each for each in urgents if each.urgent],
        )
        return any(found)

    drivers = {id(each._driver): each._driver for each in (*readers, *writers, *urgents)}
    if len(drivers) != 1:
        raise Misuse(f"sockets of {len(drivers)} drivers", remedy="select among those of one")
    (driver,) = drivers.values()
    driver.call(lambda: driver.wait(ready, timeout))
    return found
