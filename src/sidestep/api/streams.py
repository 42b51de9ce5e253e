"""SDP for asyncio: look-alikes of `StreamReader`, `StreamWriter` and `Server`, over a software RNIC in the event loop.

    reader, writer = await sidestep.open_connection(host, port, protocol="sdp")
    await asyncio.gather(*(writer.sendall(block) for block in blocks))     # none is copied; together they are pipelined
    count = await reader.recv_into(room)

`sendall` and `recv_into` lend their buffer to the device until they end. Any number may be outstanding: they are
served in the order in which they were begun. With two large sends waiting, or if the other end asks for it, the
half-connection changes to Pipelined mode. That is many advertisements at a time, RDMA Reads, and RDMA Writes into
buffers that wait in `recv_into` (docs/wire/sdp.md §11). A task that is cancelled ends when its buffer is free. Bytes
that a cancelled `recv_into` had got are received again.

`write` and `read` are as in asyncio: `bytes` that are written are referred to, everything else is copied at once.

The device belongs to the event loop and goes with its last connection or server. All calls are made in that loop.
"""

from __future__ import annotations

import asyncio
import errno
import socket as _stdlib
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

from sidestep import limits
from sidestep.api.end import SdpListener
from sidestep.api.engine import engine
from sidestep.api.rnic import details, not_there
from sidestep.api.transport import SdpTransport
from sidestep.errors import Misuse, SidestepError
from sidestep.sdp.errnos import error_of, os_error
from sidestep.switch.protocol import Endpoint

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Buffer

    from sidestep.api.driver import Hosts

__all__ = ["SdpReader", "SdpServer", "SdpWriter", "open_connection", "start_server"]

Connected: TypeAlias = "Callable[[SdpReader, SdpWriter], Awaitable[None] | None]"
_CHUNK: Final = 64 << 10  # bytes that are read ahead for lines, and that small writes are joined to


class SdpReader:
    """Reader of the bytes from the other end."""

    def __init__(self, transport: SdpTransport) -> None:
        self._transport = transport
        self._ahead = bytearray()  # read and not asked for
        self._ended = False

    async def recv_into(self, buffer: Buffer, *, waitall: bool = False) -> int:
        """Receives into the buffer's own memory; returns how many bytes, 0 at the end of the stream.

        With `waitall` all of it is filled, unless the stream ends or an urgent byte is ahead. Cancelled, it ends when
        the device cannot write to the buffer any more, and the bytes that it had got are received again.
        """
        if not self._ahead:
            count = await self._transport.recv_into(buffer, waitall=waitall)
            self._ended |= not count and memoryview(buffer).nbytes > 0
            return count
        with memoryview(buffer).cast("B") as view:
            size = len(view)
            taken = self._take(size)
            view[: len(taken)] = taken
            if not waitall or len(taken) == size:
                return len(taken)
            with view[len(taken) :] as rest:
                try:
                    count = await self._transport.recv_into(rest, waitall=True)
                except BaseException:
                    self._ahead[:0] = taken
                    raise
        self._ended |= not count
        return len(taken) + count

    async def read(self, n: int = -1) -> bytes:
        """Returns up to `n` bytes, as many as there are; all up to the end of the stream if it is negative."""
        if n < 0:
            parts: list[bytes] = []
            while part := await self.read(_CHUNK):
                parts.append(part)
            return b"".join(parts)
        if n and not self._ahead:
            await self._fill(n)
        return self._take(n)

    async def readexactly(self, n: int) -> bytes:
        """`n` bytes.

        Raises:
            asyncio.IncompleteReadError: The stream ended before; it has what had come.
        """
        if n < 0:
            raise ValueError("readexactly size can not be less than zero")
        room = bytearray(n)
        count = await self.recv_into(room, waitall=True) if n else 0
        if count < n:
            raise asyncio.IncompleteReadError(bytes(memoryview(room)[:count]), n)
        return bytes(room)

    async def readuntil(self, separator: bytes = b"\n") -> bytes:
        """Returns the bytes up to the separator, which is part of them.

        Raises:
            asyncio.IncompleteReadError: The stream ended before it came; it has the bytes that had come.
            asyncio.LimitOverrunError: It did not come in STREAM_LIMIT bytes, which are still to be read.
        """
        if not separator:
            raise ValueError("Separator should be at least one-byte string")
        looked_at = 0
        while (found := self._ahead.find(separator, looked_at)) < 0:
            looked_at = max(0, len(self._ahead) - len(separator) + 1)
            if len(self._ahead) > _CHUNK:
                raise asyncio.LimitOverrunError("Separator is not found, and chunk exceed the limit", looked_at)
            if not await self._fill(_CHUNK):
                raise asyncio.IncompleteReadError(self._take(len(self._ahead)), None)
        return self._take(found + len(separator))

    async def readline(self) -> bytes:
        """Returns a line; at the end of the stream the remaining bytes, without a newline."""
        try:
            return await self.readuntil()
        except asyncio.IncompleteReadError as short:
            return short.partial
        except asyncio.LimitOverrunError as long:
            self._take(len(self._ahead))
            raise ValueError(str(long)) from long

    def at_eof(self) -> bool:
        """True if a read has met the end of the stream, and no byte is left."""
        return self._ended and not self._ahead

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        line = await self.readline()
        if not line:
            raise StopAsyncIteration
        return line

    def take_urgent(self) -> int | None:
        """The urgent byte, once; None if none has come."""
        return self._transport.stream.connection.take_urgent()

    def at_mark(self) -> bool:
        """True if the urgent byte is the next one."""
        return not self._ahead and self._transport.stream.connection.at_mark

    def _take(self, size: int) -> bytes:
        taken = bytes(memoryview(self._ahead)[:size])
        del self._ahead[: len(taken)]
        return taken

    async def _fill(self, size: int) -> int:
        """Reads ahead, once; 0 at the end."""
        room = bytearray(size)
        count = await self._transport.recv_into(room)
        self._ended |= not count
        self._ahead += memoryview(room)[:count]
        return count


class SdpWriter:
    """Writer of bytes to the other end."""

    def __init__(self, transport: SdpTransport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._held: deque[bytes] = deque()  # written, and not begun
        self._begun = 0  # sends that have not ended
        self._begun_len = 0
        self._flushing = False
        self._moved: set[asyncio.Future[None]] = set()  # futures of writers that wait for some to end
        self._error: OSError | None = None
        self._eof = self._closing = False

    async def sendall(self, data: Buffer, *, urgent: bool = False) -> None:
        """Sends all from the buffer's own memory, and ends when it is free; `urgent`: the last byte is out of band.

        Cancelled, it ends when the device cannot read the buffer any more; an unknown part of it was sent.
        """
        self._flush()
        while self._held:
            await self._move()
        self._check()
        await self._transport.send(data, urgent=urgent)

    def write(self, data: Buffer) -> None:
        """Takes it to be sent: `bytes` as they are, anything else as a copy. Follow it by `drain`."""
        if self._eof or self._closing:
            raise os_error(errno.EPIPE, "written after the end")
        whole = data if isinstance(data, bytes) else bytes(memoryview(data))
        if whole and self._error is None:  # bytes after an error go nowhere, as in asyncio; `drain` raises it
            self._held.append(whole)
            if not self._flushing:
                self._flushing = True
                self._loop.call_soon(self._flush)

    def writelines(self, data: list[Buffer]) -> None:
        """Writes each of them."""
        for each in data:
            self.write(each)

    async def drain(self) -> None:
        """Waits until what is written and not yet taken by the other end is less than API_WRITE_AHEAD.

        Raises:
            OSError: The connection broke.
        """
        self._flush()
        self._check()
        while self._held or self._begun_len > limits.API_WRITE_AHEAD:
            await self._move()
            self._check()
        await asyncio.sleep(0)  # a writer in a loop must not keep all others from their turn

    def can_write_eof(self) -> bool:
        """Always true."""
        return True

    def write_eof(self) -> None:
        """Sends no more; what was written before still arrives."""
        self._eof = True
        self._flush()

    def close(self) -> None:
        """Ends both directions, behind what was written. Unread bytes make it a reset, as in TCP."""
        self._closing = True
        self._flush()

    def is_closing(self) -> bool:
        """True if it was closed, or broke."""
        return self._closing or self._error is not None or self._transport.stream.connection.error is not None

    async def wait_closed(self) -> None:
        """Ends when nothing of the connection is left: both ends have closed it, or it broke."""
        await self._transport.wait_closed()

    def abort(self) -> None:
        """Resets the connection."""
        self._closing = True
        self._held.clear()
        self._transport.abort()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """`peername`, `sockname`; and `details`, as of `SdpSocket`."""
        if name == "peername":
            return self._transport.getpeername()
        if name == "sockname":
            return self._transport.getsockname()
        if name == "details":
            return details(self._transport.stream)
        return default

    # --- within ---

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _flush(self) -> None:
        """Begins what was written, as far as there is room, and what is to follow it."""
        self._flushing = False
        try:
            while self._held and self._begun < limits.API_WRITES_AHEAD:
                self._begin(self._next())
            if not self._held and not self._transport.broken:
                if self._eof:
                    self._transport.write_eof()
                if self._closing:
                    self._transport.close()
        except OSError as error:
            self._fail(error)
        if self._closing and self._error is not None:
            self._transport.close()

    def _next(self) -> bytes:
        """The next one, or several small ones joined."""
        first = self._held.popleft()
        size, parts = len(first), [first]
        while self._held and size + len(self._held[0]) <= _CHUNK:
            parts.append(self._held.popleft())
            size += len(parts[-1])
        return b"".join(parts) if len(parts) > 1 else first

    def _begin(self, data: bytes) -> None:
        self._begun += 1
        self._begun_len += len(data)
        try:
            self._transport.begin_send(data, partial(self._ended, len(data)))
        except BaseException:
            self._begun -= 1
            self._begun_len -= len(data)
            raise

    def _ended(self, size: int, error: OSError | None) -> None:
        self._begun -= 1
        self._begun_len -= size
        if error is not None and self._error is None:
            self._fail(error)
        for waiter in self._moved:
            if not waiter.done():
                waiter.set_result(None)
        self._moved.clear()
        if self._held:
            self._flush()

    def _fail(self, error: OSError) -> None:
        self._error = error
        self._held.clear()

    async def _move(self) -> None:
        """Waits until a send has ended."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._moved.add(waiter)
        try:
            await waiter
        finally:
            self._moved.discard(waiter)


class SdpServer:
    """Server that `start_server` returns; as `asyncio.Server`."""

    def __init__(self, hosts: Hosts, connected: Connected) -> None:
        self._hosts = hosts
        self._connected = connected
        self._listeners: list[SdpListener] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = self._loop.create_future()
        self.announced = False  # other hosts find it by the port mapper
        hosts.hold()

    def listen(self, local: Endpoint, backlog: int) -> None:
        """Listens at one address; for `start_server`."""
        listener = SdpListener(self._hosts, local, backlog, self._ready)
        self._listeners.append(listener)
        self.announced = listener.announced

    @property
    def sockets(self) -> tuple[SdpListener, ...]:
        """Listeners of the server; none once it is closed."""
        return tuple(self._listeners)

    def is_serving(self) -> bool:
        """True if it takes connections."""
        return bool(self._listeners)

    async def serve_forever(self) -> None:
        """Serves until it is cancelled, and then closes."""
        try:
            await asyncio.shield(self._over)
        finally:
            self.close()
            await self.wait_closed()

    def close(self) -> None:
        """Takes no more connections; those it has taken go on."""
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener.close()
        if not self._over.done():
            self._over.set_result(None)
            self._hosts.let_go()

    async def wait_closed(self) -> None:
        """Ends when it is closed and all that was served has ended."""
        await asyncio.shield(self._over)
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
        await self.wait_closed()

    def _ready(self) -> None:
        """Called from within the stack: what follows comes in its own turn."""
        self._loop.call_soon(self._accept_all)

    def _accept_all(self) -> None:
        for listener in self._listeners:
            while listener.queue.waiting:
                task = self._loop.create_task(self._serve(SdpTransport.accepted(listener)))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _serve(self, transport: SdpTransport) -> None:
        try:
            wanted = self._connected(*_ends(self._hosts, transport))
            if wanted is not None:
                await wanted
        except BaseException:
            transport.abort()  # no other code will end it, and the other end would wait
            raise


async def open_connection(
    name: str,
    port: int,
    *,
    local_addr: tuple[str, int] | None = None,
    family: int = 0,
    rdma_port: int | None = None,
    hosts: Hosts | None = None,
) -> tuple[SdpReader, SdpWriter]:
    """Connects to a host, trying its addresses one after another; `hosts` are this process's RNICs unless given."""
    hosts = hosts or engine()
    local = Endpoint(ip_address(local_addr[0]), local_addr[1]) if local_addr else None
    hosts.hold()
    try:
        failed: OSError | None = None
        for remote in await _resolved(name, port, family):
            try:
                return _ends(hosts, await _connect(hosts, remote, local, rdma_port))
            except OSError as error:
                failed = failed or error
        raise failed or OSError(f"{name} has no address")
    finally:
        hosts.let_go()


async def _connect(hosts: Hosts, remote: Endpoint, local: Endpoint | None, rdma_port: int | None) -> SdpTransport:
    try:
        host = hosts.towards(remote.address, local.address if local else None)
    except SidestepError as why:
        raise error_of(why) from why
    if rdma_port is None:
        found: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        hosts.find(host, remote, lambda port: None if found.done() else found.set_result(port))
        rdma_port = await found
        if rdma_port is None:
            raise not_there(remote)
    transport = SdpTransport()
    await transport.open(host, local, Endpoint(remote.address, rdma_port))
    return transport


def _ends(hosts: Hosts, transport: SdpTransport) -> tuple[SdpReader, SdpWriter]:
    """Reader and writer of a transport, which holds the devices until it is over."""
    hosts.hold()
    transport.on_over(hosts.let_go)
    return SdpReader(transport), SdpWriter(transport)


async def start_server(
    connected: Connected,
    name: str | list[str] | None,
    port: int,
    *,
    family: int = 0,
    backlog: int = limits.RDMA_BACKLOG_DEFAULT,
    hosts: Hosts | None = None,
) -> SdpServer:
    """Listens at all addresses of a host, or at each of these; `hosts` are this process's RNICs unless given."""
    server = SdpServer(hosts or engine(), connected)
    try:
        for local in await _places(name, port, family):
            if not port and server.sockets:
                local = Endpoint(local.address, server.sockets[0].local.port)
            server.listen(local, backlog)
    except BaseException:
        server.close()
        raise
    return server


async def _places(name: str | list[str] | None, port: int, family: int) -> list[Endpoint]:
    if not name:
        both = [Endpoint(IPv4Address(0), port), Endpoint(IPv6Address(0), port)]
        return both if not family else both[:1] if family == _stdlib.AF_INET else both[1:]
    found: dict[Endpoint, None] = {}
    for each in [name] if isinstance(name, str) else name:
        found |= dict.fromkeys(await _resolved(each, port, family))
    if not found:
        raise Misuse(f"{name} has no address")
    return list(found)


async def _resolved(name: str, port: int, family: int) -> list[Endpoint]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(name, port, family=family, type=_stdlib.SOCK_STREAM)
    return [Endpoint(ip_address(str(address[0]).partition("%")[0]), port) for *_, address in found]
