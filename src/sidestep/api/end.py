"""Common parts of blocking sockets and asyncio streams: listeners, ends of connections, and the errors of calls."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from sidestep import limits
from sidestep.errors import LimitReached, Misuse, SidestepError
from sidestep.sdp.errnos import Reports, error_of, os_error
from sidestep.sdp.listening import Listening
from sidestep.sdp.requests import SdpEvent, SdpEventKind, StreamEvent, StreamReceive, StreamSend
from sidestep.switch.protocol import Endpoint

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from sidestep.api.driver import Hosts
    from sidestep.sdp.endpoint import SdpStream, StreamHandler
    from sidestep.sdp.hello import IpAddress
    from sidestep.sdp.host import Host

SocketAddress: TypeAlias = tuple[Any, ...]  # (host, port), or (host, port, 0, 0) of IPv6


class SdpListener:
    """Listener at one address; other hosts find it until it is closed.

    Raises:
        OSError: EADDRINUSE and others.
    """

    def __init__(self, hosts: Hosts, local: Endpoint, backlog: int, ready: Callable[[], None] | None = None) -> None:
        self._hosts = hosts
        for left in reversed(range(1 if local.port else limits.API_PORT_TRIES)):
            try:
                self._listen(local.address, local.port or hosts.free_port(local.address), backlog, ready)
                break
            except OSError as error:
                if not left or error.errno != errno.EADDRINUSE:
                    raise
        self.announced = hosts.announce(self.local)

    def _listen(self, address: IpAddress, port: int, backlog: int, ready: Callable[[], None] | None) -> None:
        try:
            self.host = self._hosts.at(address)
            self.host.take_port(port)
        except SidestepError as why:
            raise error_of(why) from why
        self.local = Endpoint(address, port)
        try:
            self.queue: Listening = self.host.listen(address, port, backlog=backlog, ready=ready)
        except SidestepError as why:
            self.host.give_port(port)
            raise os_error(errno.EADDRINUSE, str(why)) if isinstance(why, Misuse) else error_of(why) from why

    def getsockname(self) -> SocketAddress:
        """Address of the listener."""
        return socket_address(self.local.address, self.local.port)

    def close(self) -> None:
        """Takes no more connections, and resets those that were not accepted."""
        self._hosts.withdraw(self.local)
        self.queue.close()
        self.host.give_port(self.local.port)
        self.host.kick()


class SdpEnd:
    """One end of a connection, for blocking calls and asyncio alike."""

    def __init__(self) -> None:
        self._host: Host | None = None
        self._port: int | None = None  # number of the host's port, until it is released
        self._stream: SdpStream | None = None
        self._reports: Reports | None = None
        self._write_shut = False
        self._closed = False

    @property
    def stream(self) -> SdpStream:
        """The connection beneath."""
        if self._stream is None:
            raise os_error(errno.ENOTCONN)
        return self._stream

    def getsockname(self) -> SocketAddress:
        """The own address."""
        addresses = self.stream.connection.addresses
        assert addresses is not None
        return socket_address(addresses.local, addresses.local_port)

    def getpeername(self) -> SocketAddress:
        """The other end's address, as its Hello has it."""
        addresses = self.stream.connection.addresses
        assert addresses is not None
        return socket_address(addresses.remote, addresses.remote_port)

    # --- within ---

    def _open(self, host: Host, local: Endpoint | None, remote: Endpoint) -> None:
        """Begins to connect; the own address and port are chosen where none are given."""
        self._host = host
        try:
            self._port = host.take_port(local.port if local is not None else 0)
            own = local.address if local is not None else None
            if own is None or own.is_unspecified:
                own = host.address_for(remote.address)
            self._stream = host.connect((own, self._port), (remote.address, remote.port), self._stream_handler())
        except SidestepError as why:
            self._give_port_back()
            raise error_of(why) from why
        self._reports = Reports(self._stream.connection)

    def _adopt(self, listener: SdpListener) -> None:
        """Becomes the connection that has waited the longest."""
        self._host = listener.host
        self._stream = listener.queue.accept(self._stream_handler())
        assert self._stream is not None
        self._reports = Reports(self._stream.connection)

    def _stream_handler(self) -> StreamHandler:
        return self._handle_event

    def _handle_event(self, stream: SdpStream, event: StreamEvent) -> None:
        """Handles an event of the connection."""
        if isinstance(event, SdpEvent) and event.kind is SdpEventKind.CLOSED:
            self._give_port_back()

    def _give_port_back(self) -> None:
        port, self._port = self._port, None
        if port is not None:
            assert self._host is not None
            self._host.give_port(port)

    def _check_writing(self) -> None:
        assert self._reports is not None
        if self._write_shut or self._closed:
            raise os_error(errno.EPIPE)
        if (broken := self._reports.for_writing()) is not None:
            raise broken

    def _begin_send(self, view: memoryview, *, urgent: bool, bcopy_only: bool = False) -> StreamSend:
        try:
            send = self.stream.send(view, urgent=urgent, bcopy_only=bcopy_only)
        except LimitReached as why:
            raise error_of(why) from why
        self._kick()
        return send

    def _begin_receive(self, view: memoryview, *, waitall: bool) -> StreamReceive | None:
        """Begins a receive; None: at the end of the stream."""
        connection = self.stream.connection
        assert self._reports is not None
        if connection.error is not None and not connection.available:
            if (broken := self._reports.take()) is not None:
                raise broken
            return None
        try:
            receive = self.stream.receive(view, waitall=waitall)
        except LimitReached as why:
            raise error_of(why) from why
        self._kick()
        return receive

    def _cancel(self, request: StreamSend | StreamReceive) -> None:
        self.stream.cancel(request)
        self._kick()

    def _why(self) -> OSError:
        """The error that the connection ended by."""
        assert self._reports is not None
        return self._reports.why()

    def _kick(self) -> None:
        assert self._host is not None
        self._host.kick()


def room_of(buffer: Buffer) -> memoryview:
    """A buffer to receive into, byte by byte."""
    view = memoryview(buffer).cast("B")
    if view.readonly:
        raise TypeError("a buffer to receive into must be writable")
    return view


def socket_address(address: IpAddress, port: int) -> SocketAddress:
    """Address in the form of sockets."""
    return (str(address), port) if address.version == 4 else (str(address), port, 0, 0)
