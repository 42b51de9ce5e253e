"""SDP streams for asyncio.

    server = await start_server(served, host, 5001)
    stream = await open_connection(other_host, "10.0.0.2", 5001)
    await stream.send(buffer)               # the buffer's own memory goes to the device
    count = await stream.recv_into(room)

A call that is awaited has the memory it was given until it ends. Any number may be outstanding, of both kinds: they are
served in the order in which they were begun, and several are what makes Pipelined mode (Read Zcopy with many
advertisements, Write Zcopy) worthwhile.

Cancelling a task takes its request back, and the task ends once the memory is free, which may take the other end's
consent. Bytes that a cancelled `recv_into` had got go back to the stream. That cannot be done if a later one has got
some as well: then the connection is reset, for its stream would have a hole. Of a cancelled `send` an unknown part has
been sent, as with sockets.

Errors are those of sockets: see `errnos`.

A loopback fabric is driven by a `Pump`, in virtual time. Devices with sockets of their own belong to the event loop
anyway, and their stack only needs `timers`.
"""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

from sidestep import limits
from sidestep.errors import LimitReached, Misuse, SidestepError
from sidestep.sdp.driver import stack_on
from sidestep.sdp.errnos import Reports, error_of, os_error
from sidestep.sdp.host import release
from sidestep.sdp.requests import Event, EventKind, StreamReceive, StreamSend, Told
from sidestep.sdp.stack import Stack

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Buffer

    from sidestep.rdma.loopback import Fabric
    from sidestep.rdma.verbs import Device
    from sidestep.sdp.endpoint import Stream
    from sidestep.sdp.host import Host, IpAddress
    from sidestep.sdp.listening import Listening
    from sidestep.sdp.settings import Settings

__all__ = ["AsyncStream", "Pump", "Server", "open_connection", "start_server", "timers"]

Served: TypeAlias = "Callable[[AsyncStream], Awaitable[None] | None]"

_CHUNK: Final = 64 << 10  # bytes of one receive of `read` without a size
_PATIENCE: Final = 50  # turns of the event loop without news until virtual time goes on


class AsyncStream:
    """One connection; made by `open_connection` and by a server."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._stream: Stream | None = None
        self._reports: Reports | None = None
        self._port: int | None = None  # to be given back
        self._waiters: dict[StreamSend | StreamReceive, asyncio.Future[None]] = {}
        self._receives: deque[StreamReceive] = deque()  # whose callers have not got them yet, in order
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._over: asyncio.Future[None] = self._loop.create_future()  # nothing of it is outstanding
        self._write_shut = False
        self._closed = False

    # --- data ---

    async def send(self, data: Buffer, *, urgent: bool = False) -> int:
        """Sends all of it, and ends when the memory is free; `urgent`: the last byte is out of band.

        Raises:
            OSError: ConnectionResetError, BrokenPipeError and others.
        """
        send = self.begin_send(data, urgent=urgent)
        if send is None:
            return 0
        try:
            await self._ended(send)
        finally:
            release(send.view)
        if send.error is not None:
            raise self._get()[1].why()
        return send.passed

    def begin_send(
        self, data: Buffer, *, urgent: bool = False, ended: Callable[[StreamSend], None] | None = None
    ) -> StreamSend | None:
        """Queues it, and does not wait; `ended` is called when the memory is free. None: there is nothing to send.

        Raises:
            OSError: ConnectionResetError, BrokenPipeError and others.
        """
        view = memoryview(data).cast("B")
        stream, reports = self._get()
        if self._write_shut or self._closed:
            raise os_error(errno.EPIPE)
        if (broken := reports.for_writing()) is not None:
            raise broken
        if not len(view):
            return None
        try:
            send = stream.send(view, urgent=urgent)
        except LimitReached as why:
            raise error_of(why) from why
        self._host.kick()
        if ended is not None:
            waiter = self._loop.create_future()

            def over(_: object) -> None:
                release(send.view)
                ended(send)

            waiter.add_done_callback(over)
            if send.done:
                waiter.set_result(None)
            else:
                self._waiters[send] = waiter
        return send

    async def recv_into(self, buffer: Buffer, *, waitall: bool = False) -> int:
        """Receives into the buffer and tells how many bytes; 0 at the end of the stream.

        With `waitall` all of it is filled, unless the stream ends or an urgent byte is ahead.

        Raises:
            OSError: ConnectionResetError and others, once; then it is the end of the stream.
        """
        view = memoryview(buffer).cast("B")
        if view.readonly:
            raise TypeError("a buffer to receive into must be writable")
        stream, reports = self._get()
        if not len(view) or self._closed:
            return 0
        connection = stream.connection
        if connection.error is not None and not connection.available:
            if (broken := reports.take()) is not None:
                raise broken
            return 0
        try:
            receive = stream.receive(view, waitall=waitall)
        except LimitReached as why:
            raise error_of(why) from why
        self._receives.append(receive)
        try:
            await self._ended(receive)
        except asyncio.CancelledError:
            self._take_back(receive)
            raise
        finally:
            self._receives.remove(receive)
            release(view)
        if receive.error is not None and not receive.filled:
            raise reports.why()
        return receive.filled

    async def recv(self, size: int) -> bytes:
        """Receives up to `size` bytes; none at the end of the stream."""
        room = bytearray(size)
        count = await self.recv_into(room)
        return bytes(memoryview(room)[:count])

    async def readexactly(self, size: int) -> bytes:
        """Receives `size` bytes.

        Raises:
            asyncio.IncompleteReadError: The stream ended before; it has what had come.
        """
        room = bytearray(size)
        count = await self.recv_into(room, waitall=True) if size else 0
        if count < size:
            raise asyncio.IncompleteReadError(bytes(memoryview(room)[:count]), size)
        return bytes(room)

    async def read(self) -> bytes:
        """Receives up to the end of the stream."""
        parts: list[bytes] = []
        while part := await self.recv(_CHUNK):
            parts.append(part)
        return b"".join(parts)

    def take_urgent(self) -> int | None:
        """The urgent byte, once; None if none has come."""
        return self._get()[0].connection.take_urgent()

    def at_mark(self) -> bool:
        """Whether the urgent byte is the next one."""
        return self._get()[0].connection.at_mark

    # --- ends ---

    def write_eof(self) -> None:
        """Sends no more; what was sent before still arrives."""
        if not self._write_shut:
            self._write_shut = True
            self._get()[0].shutdown_write()
            self._host.kick()

    def close(self) -> None:
        """Ends both directions. Unread bytes make it a reset, as in TCP; else what was sent still arrives."""
        if self._closed:
            return
        self._closed = True
        if self._stream is not None:
            self._stream.close()
            self._host.kick()

    def abort(self) -> None:
        self._closed = True
        if self._stream is not None:
            self._stream.abort()
            self._host.kick()

    async def wait_closed(self) -> None:
        """Ends when nothing of the connection is left: both ends have closed it, or it broke."""
        await asyncio.shield(self._over)

    def on_over(self, callback: Callable[[], None]) -> None:
        """Calls it when nothing of the connection is left."""
        self._over.add_done_callback(lambda _: callback())

    @property
    def broken(self) -> bool:
        """Whether the connection ended by an error, or was closed here."""
        return self._closed or self._get()[0].connection.error is not None

    def why(self) -> OSError:
        """The error that it ended by."""
        return self._get()[1].why()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    # --- what it is ---

    def getsockname(self) -> tuple[str, int]:
        addresses = self._get()[0].connection.addresses
        assert addresses is not None
        return str(addresses.local), addresses.local_port

    def getpeername(self) -> tuple[str, int]:
        addresses = self._get()[0].connection.addresses
        assert addresses is not None
        return str(addresses.remote), addresses.remote_port

    @property
    def stream(self) -> Stream:
        return self._get()[0]

    # --- within ---

    async def open(self, remote: IpAddress, port: int, local: tuple[IpAddress, int], settings: Settings | None) -> None:
        """Connects; for `open_connection`."""
        self._port = local[1]
        try:
            self._stream = self._host.connect(local, (remote, port), self._told, settings)
        except SidestepError as why:
            self._give_port_back()
            raise error_of(why) from why
        self._reports = Reports(self._stream.connection)
        try:
            await asyncio.shield(self._opened)
        except asyncio.CancelledError:
            self.abort()
            raise
        if (broken := self._reports.take()) is not None:
            raise broken

    def adopt(self, listening: Listening) -> bool:
        """Becomes the next connection that can be accepted; for `Server`."""
        self._stream = listening.accept(self._told)
        if self._stream is None:
            return False
        self._reports = Reports(self._stream.connection)
        return True

    def _told(self, stream: Stream, event: Told) -> None:
        if not isinstance(event, Event):
            waiter = self._waiters.pop(event, None)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
            return
        if event.kind in (EventKind.ESTABLISHED, EventKind.BROKEN) and not self._opened.done():
            self._opened.set_result(None)
        elif event.kind is EventKind.CLOSED:
            self._give_port_back()
            if not self._over.done():
                self._over.set_result(None)

    async def _ended(self, request: StreamSend | StreamReceive) -> None:
        """Waits until the request has ended. Cancelled, it takes it back, and ends when that is done."""
        self._host.kick()
        if request.done:
            await asyncio.sleep(0)  # a caller in a loop must not keep all others from their turn
            return
        waiter = self._waiters[request] = self._loop.create_future()
        try:
            await asyncio.shield(waiter)
        except asyncio.CancelledError:
            assert self._stream is not None
            self._stream.cancel(request)
            self._host.kick()
            while not request.done:
                with suppress(asyncio.CancelledError):  # the memory is still in use
                    await asyncio.shield(waiter)
            raise

    def _take_back(self, receive: StreamReceive) -> None:
        """What a cancelled receive had got goes back to the stream."""
        if not receive.filled or self._closed:
            return
        stream = self._get()[0]
        receives = list(self._receives)
        later = receives[receives.index(receive) + 1 :]
        if any(each.filled or each.planned for each in later):
            stream.abort()
            self._host.kick()
            return
        stream.put_back(bytes(receive.view[: receive.filled]))
        self._host.kick()

    def _give_port_back(self) -> None:
        port, self._port = self._port, None
        if port is not None:
            self._host.give_port(port)

    def _get(self) -> tuple[Stream, Reports]:
        if self._stream is None or self._reports is None:
            raise os_error(errno.ENOTCONN)
        return self._stream, self._reports


class Server:
    """What `start_server` gives: takes connections, and calls back with each."""

    def __init__(self, host: Host, served: Served) -> None:
        self._host = host
        self._served = served
        self._listening: Listening | None = None
        self._port = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, address: IpAddress | None, port: int, backlog: int, settings: Settings | None) -> None:
        """Listens; for `start_server`."""
        if not self._host.serves(address):
            raise os_error(errno.EADDRNOTAVAIL, str(address))
        try:
            self._port = self._host.take_port(port)
        except SidestepError as why:
            raise error_of(why) from why
        try:
            self._listening = self._host.listen(
                address, self._port, backlog=backlog, settings=settings, ready=self._accept
            )
        except SidestepError as why:
            self._host.give_port(self._port)
            raise os_error(errno.EADDRINUSE, str(why)) if isinstance(why, Misuse) else error_of(why) from why

    @property
    def port(self) -> int:
        return self._port

    def close(self) -> None:
        """Takes no more connections; those it has taken go on."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None
            self._host.give_port(self._port)
            self._host.kick()

    async def wait_closed(self) -> None:
        """Ends when all that was served has ended."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
        await self.wait_closed()

    def _accept(self) -> None:
        """Takes all that wait: this is called from within the stack, so what follows comes in its own turn."""
        asyncio.get_running_loop().call_soon(self._accept_all)

    def _accept_all(self) -> None:
        while self._listening is not None:
            stream = AsyncStream(self._host)
            if not stream.adopt(self._listening):
                return
            wanted = self._served(stream)
            if wanted is not None:
                task = asyncio.ensure_future(_finish(wanted, stream))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)


async def _finish(wanted: Awaitable[None], stream: AsyncStream) -> None:
    try:
        await wanted
    except BaseException:
        stream.abort()  # nobody else will end it, and the other end would wait
        raise


async def open_connection(
    host: Host,
    address: str,
    port: int,
    *,
    local_address: tuple[str, int] | None = None,
    settings: Settings | None = None,
) -> AsyncStream:
    """Connects to an IP address.

    Raises:
        OSError: ConnectionRefusedError, TimeoutError and others.
    """
    remote = ip_address(address)
    own, own_port = local_address or ("", 0)
    try:
        local = ip_address(own) if own else host.address_for(remote)
        taken = host.take_port(own_port)
    except SidestepError as why:
        raise error_of(why) from why
    stream = AsyncStream(host)
    await stream.open(remote, port, (local, taken), settings)
    return stream


async def start_server(
    served: Served,
    host: Host,
    port: int,
    *,
    address: str = "",
    backlog: int = limits.RDMA_BACKLOG_DEFAULT,
    settings: Settings | None = None,
) -> Server:
    """Listens at a port, and calls back with each connection; a coroutine becomes a task. Port 0 is any free one.

    Raises:
        OSError: EADDRINUSE and others.
    """
    server = Server(host, served)
    server.begin(ip_address(address) if address else None, port, backlog, settings)
    return server


def timers(stack: Stack) -> None:
    """Lets the running event loop see to the timeouts of a stack whose clock is `loop.time`."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None

    def wake_at(at: float) -> None:
        nonlocal timer
        if timer is not None:
            timer.cancel()
        timer = loop.call_at(at, stack.handle_timeouts)

    stack.wake_at = wake_at
    if (at := stack.next_deadline()) is not None:
        wake_at(at)


class Pump:
    """Drives a loopback fabric from the event loop, in virtual time.

    Time goes on only when the tasks have nothing to do: each event of the fabric gets a turn of the loop, and before
    the fabric's clock jumps to a timer the tasks get some more.
    """

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self._loop = asyncio.get_running_loop()
        self._scheduled = False
        self._patience = _PATIENCE
        self._closed = False

    def stack(self, device: Device, settings: Settings | None = None, **options: Any) -> Stack:
        """A stack whose time is the fabric's; `options` go to `Stack`."""
        return stack_on(self.fabric, device, settings, **options)

    def kick(self) -> None:
        """Something was asked of a stack: what `Host` is given as `kick`."""
        self._patience = _PATIENCE
        if not self._scheduled and not self._closed:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def close(self) -> None:
        self._closed = True

    def _turn(self) -> None:
        self._scheduled = False
        if self._closed:
            return
        if not self.fabric.idle:
            self.kick()
            self.fabric.step()
        elif self.fabric.next_at is not None:
            patience = self._patience - 1
            self.kick()
            if patience < 0:
                self.fabric.step()
            else:
                self._patience = patience
