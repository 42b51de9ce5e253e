"""Sockets over SDP that block, as the standard library's do.

    server = create_server(host, driver, ("10.0.0.2", 5001))
    client = create_connection(other_host, driver, ("10.0.0.2", 5001))
    client.sendall(buffer)          # the buffer's own memory goes to the device
    conn, peer = server.accept()
    conn.recv_into(room, flags=MSG_WAITALL)

Methods, flags, timeouts and exceptions are those of `socket.socket`, where they exist there. What differs, and why:

- A send returns when its memory is free again. For a large one that is when the other end has *read* it (Read Zcopy),
  not when it was taken for sending. One whose time is over is taken back, and the call ends once that is agreed upon.
- With a timeout of 0 a send goes by Bcopy, as much as there is credit for, and waits until the device is done with it,
  which does not take the other end's program. A receive that finds bytes on offer waits until they are fetched.
- `recv` makes a `bytes` object, which takes one copy more than `recv_into`.
- There is no descriptor. `select` here waits for sockets of this module.
- Addresses are IP addresses; no names are looked up.

Threads may use one socket at the same time if the driver is for threads.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from ipaddress import IPv4Address, ip_address
from socket import MSG_DONTWAIT, MSG_OOB, MSG_PEEK, MSG_WAITALL, SHUT_RD, SHUT_RDWR, SHUT_WR
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

from sidestep import limits
from sidestep.errors import LimitReached, Misuse, SidestepError
from sidestep.sdp.errnos import Reports, error_of, os_error
from sidestep.sdp.host import release
from sidestep.sdp.requests import Event, EventKind, StreamReceive, StreamSend, Told
from sidestep.sdp.states import State

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Buffer

    from sidestep.sdp.connection import Connection
    from sidestep.sdp.driver import Driver
    from sidestep.sdp.endpoint import Stream
    from sidestep.sdp.host import Host, IpAddress
    from sidestep.sdp.listening import Listening
    from sidestep.sdp.settings import Settings

__all__ = [
    "MSG_DONTWAIT", "MSG_OOB", "MSG_PEEK", "MSG_WAITALL", "SHUT_RD", "SHUT_RDWR", "SHUT_WR", "Socket",
    "create_connection", "create_server", "select",
]  # fmt: skip

Address: TypeAlias = tuple[Any, ...]  # (host, port), or (host, port, 0, 0) of IPv6

_ANY: Final = IPv4Address(0)
_OPENING: Final = frozenset({State.REQ_SENT, State.REP_SENT})


class Socket:
    """One SDP socket: to connect, to listen, or one that `accept` gave.

    Args:
        host: Whose connection it becomes.
        driver: What runs while a call waits.
        settings: Of the connection; those of the stack unless given.
    """

    def __init__(self, host: Host, driver: Driver, *, settings: Settings | None = None) -> None:
        self._host = host
        self._driver = driver
        self._settings = settings
        self._timeout: float | None = None
        self._linger: float | None = None
        self._bound: tuple[IpAddress | None, int] | None = None  # the port is taken
        self._stream: Stream | None = None
        self._reports: Reports | None = None
        self._listening: Listening | None = None
        self._established = False
        self._over = False  # CLOSED was told: nothing of the stream's is outstanding
        self._read_shut = False
        self._write_shut = False
        self._closed = False

    # --- making connections ---

    def bind(self, address: Address) -> None:
        """Chooses the own address and port; an empty host is any, port 0 any that is free."""
        with self._driver:
            self._check_open()
            if self._bound is not None or self._stream is not None:
                raise os_error(errno.EINVAL, "bound already")
            local = ip_address(address[0]) if address[0] else None
            if not self._host.serves(local):
                raise os_error(errno.EADDRNOTAVAIL, str(local))
            self._bound = (local, self._take_port(address[1]))

    def connect(self, address: Address) -> None:
        """Connects to (IP address, port).

        Raises:
            OSError: ECONNREFUSED, ETIMEDOUT and others; TimeoutError if the timeout passes; BlockingIOError with a
                timeout of 0, when `select` tells that it is done and `error` how.
        """
        with self._driver:
            self._check_open()
            if self._listening is not None:
                raise os_error(errno.EOPNOTSUPP)
            if self._stream is None:
                self._begin(ip_address(address[0]), address[1])
                if self._timeout == 0:
                    self._driver.wait(self._has_answer, 0)
                    if not self._has_answer():
                        raise os_error(errno.EINPROGRESS)
            elif not self._has_answer():
                raise os_error(errno.EALREADY)
            elif self._established and not self._failed():
                raise os_error(errno.EISCONN)
            self._finish_connecting()

    def _begin(self, remote: IpAddress, port: int) -> None:
        try:
            local = self._bound[0] if self._bound is not None else None
            if local is None or local.is_unspecified:
                local = self._host.address_for(remote)
            if self._bound is None:
                self._bound = (local, self._take_port(0))
            self._stream = self._host.connect((local, self._bound[1]), (remote, port), self._told, self._settings)
        except SidestepError as why:
            raise error_of(why) from why
        self._reports = Reports(self._stream.connection)

    def _finish_connecting(self) -> None:
        stream = self._stream
        assert stream is not None
        assert self._reports is not None
        if not self._driver.wait(self._has_answer, self._timeout):
            stream.abort()
            self._host.kick()
            self._reports.take()
            self._forget()
            raise TimeoutError("timed out")
        if self._failed():
            error = self._reports.why()
            self._forget()
            raise error

    def _forget(self) -> None:
        """An attempt that came to nothing: the socket may try again, as TCP's may."""
        self._stream = self._reports = None
        self._established = self._over = False

    def _has_answer(self) -> bool:
        return self._established or self._failed()

    def _failed(self) -> bool:
        return self._stream is not None and self._stream.connection.error is not None

    def listen(self, backlog: int = limits.RDMA_BACKLOG_DEFAULT) -> None:
        """Takes connections; up to `backlog` wait to be accepted, the next one is refused."""
        with self._driver:
            self._check_open()
            if self._stream is not None or self._listening is not None:
                raise os_error(errno.EINVAL)
            if self._bound is None:
                self._bound = (None, self._take_port(0))
            local, port = self._bound
            try:
                self._listening = self._host.listen(local, port, backlog=backlog, settings=self._settings)
            except Misuse as why:
                raise os_error(errno.EADDRINUSE, str(why)) from why
            except SidestepError as why:
                raise error_of(why) from why

    def accept(self) -> tuple[Socket, Address]:
        """The next connection, and the address of its other end as that one has told it."""
        with self._driver:
            listening = self._listening
            if listening is None:
                self._check_open()
                raise os_error(errno.EINVAL, "not listening")
            if not self._driver.wait(lambda: listening.waiting > 0 or self._closed, self._timeout):
                raise self._time_is_over(self._timeout)
            self._check_open()
            accepted = Socket(self._host, self._driver, settings=self._settings)
            stream = listening.accept(accepted._told)
            assert stream is not None
            accepted._stream = stream
            accepted._over = stream.connection.state is State.CLOSED  # which was told when it had no stream yet
            accepted._reports = Reports(stream.connection)
            return accepted, accepted.getpeername()

    # --- data ---

    def send(self, data: Buffer, flags: int = 0) -> int:
        """Sends bytes; with MSG_OOB the last one is urgent. Tells how many: all of them, unless time was too short."""
        with self._driver:
            timeout = self._timeout_of(flags)
            sent = self._send(data, flags, timeout)
            if sent is None:
                return 0
            if sent.passed:
                return sent.passed
            raise self._time_is_over(timeout)

    def sendall(self, data: Buffer, flags: int = 0) -> None:
        """Sends all; after TimeoutError it is not known how much of it was."""
        with self._driver:
            timeout = self._timeout_of(flags)
            if timeout == 0:
                left = memoryview(data).cast("B")
                while len(left):
                    left = left[self.send(left, flags) :]
                return
            sent = self._send(data, flags, timeout)
            if sent is not None and sent.passed < sent.length:
                raise self._time_is_over(timeout)

    def _send(self, data: Buffer, flags: int, timeout: float | None) -> StreamSend | None:
        """A send that has ended, perhaps early; None if there was nothing to send."""
        view = memoryview(data).cast("B")
        stream, connection = self._get_stream()
        assert self._reports is not None
        if self._write_shut:
            raise os_error(errno.EPIPE)
        if (broken := self._reports.for_writing()) is not None:
            raise broken
        if not len(view):
            return None
        urgent = bool(flags & MSG_OOB)
        if timeout == 0:
            room = connection.room if connection.writable else 0
            if not room:
                raise os_error(errno.EAGAIN)
            urgent = urgent and len(view) <= room  # the last byte is, and it goes with another call
            view = view[:room]
        try:
            send = stream.send(view, urgent=urgent, bcopy_only=timeout == 0)
        except LimitReached as why:
            raise error_of(why) from why
        self._host.kick()
        self._await(send, timeout if timeout != 0 else None)
        release(view)
        if send.error is not None:
            raise self._reports.why()
        return send

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Receives up to `size` bytes; none at the end of the stream."""
        room = bytearray(size)
        return bytes(memoryview(room)[: self.recv_into(room, 0, flags)])

    def recv_into(self, buffer: Buffer, size: int = 0, flags: int = 0) -> int:
        """Receives into a buffer and tells how many bytes; 0 at the end of the stream.

        With MSG_WAITALL all of it is filled, unless the stream ends, an urgent byte is ahead, or time is over. MSG_PEEK
        leaves the bytes in the stream. MSG_OOB gives the urgent byte, and never waits for it.
        """
        view = memoryview(buffer).cast("B")
        if view.readonly:
            raise TypeError("a buffer to receive into must be writable")
        if size:
            view = view[:size]
        with self._driver:
            stream, connection = self._get_stream()
            assert self._reports is not None
            timeout = self._timeout_of(flags)
            if flags & MSG_OOB:
                return self._take_urgent(view, connection)
            if not len(view) or self._read_shut:
                return 0
            if connection.error is not None and not connection.available:
                if (broken := self._reports.take()) is not None:
                    raise broken
                return 0
            if flags & MSG_PEEK:
                return self._peek(view, timeout)
            if timeout == 0 and not connection.readable:
                raise os_error(errno.EAGAIN)
            waitall = bool(flags & MSG_WAITALL) and timeout != 0
            receive = stream.receive(view, waitall=waitall)
            self._host.kick()
            in_time = self._await(receive, timeout if timeout != 0 else None)
            release(view)
            if receive.filled:
                return receive.filled
            if receive.error is not None:
                raise self._reports.why()
            if not in_time:
                raise self._time_is_over(timeout)
            return 0

    def _peek(self, view: memoryview, timeout: float | None) -> int:
        stream, connection = self._get_stream()
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

    def _take_urgent(self, view: memoryview, connection: Connection) -> int:
        byte = None if connection.urgent_inline else connection.take_urgent()
        if byte is None:
            if connection.urgent_pending and not connection.urgent_inline:
                raise os_error(errno.EAGAIN)  # announced, and not here yet
            raise os_error(errno.EINVAL)
        view[0] = byte
        return 1

    def at_mark(self) -> bool:
        """Whether the urgent byte is the next one."""
        with self._driver:
            return self._get_stream()[1].at_mark

    # --- ends ---

    def shutdown(self, how: int) -> None:
        """Ends one direction or both; what was sent before still arrives."""
        with self._driver:
            stream, connection = self._get_stream()
            if how not in (SHUT_RD, SHUT_WR, SHUT_RDWR):
                raise os_error(errno.EINVAL)
            if connection.state is State.CLOSED:
                raise os_error(errno.ENOTCONN)
            if how != SHUT_WR and not self._read_shut:
                self._read_shut = True
                stream.shutdown_read()
            if how != SHUT_RD and not self._write_shut:
                self._write_shut = True
                stream.shutdown_write()
            self._host.kick()

    def set_linger(self, seconds: float | None) -> None:
        """What close() does: None returns at once, 0 resets, else it waits so long for what was sent to arrive."""
        self._linger = seconds

    def close(self) -> None:
        """Ends the socket. Unread bytes make it a reset, as in TCP. What is on its way goes on in the background."""
        with self._driver:
            if self._closed:
                return
            self._closed = True
            if self._listening is not None:
                self._listening.close()
                self._host.kick()
            if self._stream is None:
                self._give_port_back()
                return
            if self._over:
                self._give_port_back()
            self._stream.close(self._linger)
            self._host.kick()
            if self._linger:
                self._driver.wait(lambda: self._over, self._linger)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # --- what it is ---

    def settimeout(self, seconds: float | None) -> None:
        """How long a call waits; None for ever, 0 not at all."""
        if seconds is not None and seconds < 0:
            raise ValueError("Timeout value out of range")
        self._timeout = seconds

    def gettimeout(self) -> float | None:
        """What `settimeout` has set; None at first."""
        return self._timeout

    def getsockname(self) -> Address:
        if self._stream is not None and (addresses := self._stream.connection.addresses) is not None:
            return _address(addresses.local, addresses.local_port)
        local, port = self._bound or (None, 0)
        return _address(local or _ANY, port)

    def getpeername(self) -> Address:
        """The other end's address, as its Hello or our `connect` has it."""
        addresses = self._get_stream()[1].addresses
        assert addresses is not None
        return _address(addresses.remote, addresses.remote_port)

    def error(self) -> int:
        """The errno that the next call would fail with, once: SO_ERROR."""
        with self._driver:
            raised = self._reports.take() if self._reports is not None else None
            return 0 if raised is None else raised.errno or errno.EIO

    @property
    def readable(self) -> bool:
        """Whether a call to read, or to accept, would not wait."""
        if self._listening is not None:
            return self._listening.waiting > 0 or self._closed
        if self._stream is None:
            return False
        connection = self._stream.connection
        return self._closed or self._read_shut or connection.readable or connection.state is State.CLOSED

    @property
    def writable(self) -> bool:
        """Whether a call to write would not wait; of a connection being made: whether it is."""
        if self._stream is None or self._stream.connection.state in _OPENING:
            return False
        return self._closed or self._write_shut or self._failed() or self._stream.connection.writable

    @property
    def urgent(self) -> bool:
        """Whether an urgent byte is ahead, or can be had."""
        return self._stream is not None and self._stream.connection.urgent

    @property
    def stream(self) -> Stream | None:
        return self._stream

    # --- within ---

    def _told(self, stream: Stream, event: Told) -> None:
        if isinstance(event, Event):
            if event.kind is EventKind.ESTABLISHED:
                self._established = True
            elif event.kind is EventKind.CLOSED and stream is self._stream:
                self._over = True
                if self._closed:
                    self._give_port_back()

    def _await(self, request: StreamSend | StreamReceive, timeout: float | None) -> bool:
        """Waits until the request has ended, or takes it back; tells whether it ended in time."""
        try:
            if self._driver.wait(lambda: request.done, timeout):
                return True
        except BaseException:  # such as KeyboardInterrupt: the memory must not stay in use
            self._take_back(request)
            if isinstance(request, StreamReceive) and request.filled:
                assert self._stream is not None
                self._stream.put_back(bytes(request.view[: request.filled]))
            release(request.view)
            raise
        self._take_back(request)
        return False

    def _take_back(self, request: StreamSend | StreamReceive) -> None:
        assert self._stream is not None
        self._stream.cancel(request)
        self._host.kick()
        self._driver.wait(lambda: request.done)

    def _take_port(self, port: int) -> int:
        try:
            return self._host.take_port(port)
        except SidestepError as why:
            raise error_of(why) from why

    def _give_port_back(self) -> None:
        bound, self._bound = self._bound, None
        if bound is not None:
            self._host.give_port(bound[1])

    def _check_open(self) -> None:
        if self._closed:
            raise os_error(errno.EBADF)

    def _get_stream(self) -> tuple[Stream, Connection]:
        self._check_open()
        if self._stream is None or not self._is_connected():
            raise os_error(errno.ENOTCONN)
        return self._stream, self._stream.connection

    def _is_connected(self) -> bool:
        return self._established or self._failed()

    def _timeout_of(self, flags: int) -> float | None:
        return 0 if flags & MSG_DONTWAIT else self._timeout

    def _time_is_over(self, timeout: float | None) -> OSError:
        return os_error(errno.EAGAIN) if timeout == 0 else TimeoutError("timed out")


def create_connection(
    host: Host,
    driver: Driver,
    address: Address,
    timeout: float | None = None,
    *,
    source_address: Address | None = None,
    settings: Settings | None = None,
) -> Socket:
    """A socket that is connected to (IP address, port)."""
    made = Socket(host, driver, settings=settings)
    try:
        made.settimeout(timeout)
        if source_address is not None:
            made.bind(source_address)
        made.connect(address)
    except BaseException:
        made.close()
        raise
    return made


def create_server(
    host: Host,
    driver: Driver,
    address: Address,
    *,
    backlog: int = limits.RDMA_BACKLOG_DEFAULT,
    settings: Settings | None = None,
) -> Socket:
    """A socket that listens at (IP address, port); an empty host is any address."""
    made = Socket(host, driver, settings=settings)
    try:
        made.bind(address)
        made.listen(backlog)
    except BaseException:
        made.close()
        raise
    return made


def select(
    readers: Sequence[Socket],
    writers: Sequence[Socket],
    urgents: Sequence[Socket] = (),
    timeout: float | None = None,
) -> tuple[list[Socket], list[Socket], list[Socket]]:
    """Waits until one of them is readable, writable, or has urgent data; all with one driver."""
    found: tuple[list[Socket], list[Socket], list[Socket]] = ([], [], [])

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
    with driver:
        driver.wait(ready, timeout)
    return found


def _address(address: IpAddress, port: int) -> Address:
    return (str(address), port) if address.version == 4 else (str(address), port, 0, 0)
