"""SDP for asyncio: look-alikes of `StreamReader`, `StreamWriter` and `Server`, over a software RNIC in the event loop.

    reader, writer = await sidestep.open_connection(host, port, protocol="sdp")
    await asyncio.gather(*(writer.sendall(block) for block in blocks))     # none is copied; together they are pipelined
    count = await reader.recv_into(room)

`sendall` and `recv_into` lend their buffer to the device until they end. Any number may be outstanding: they are
served in the order in which they were begun. With two large sends waiting, or if the other end asks for it, the
half-connection changes to Pipelined mode: many advertisements at a time, RDMA Reads, and RDMA Writes into buffers that
wait in `recv_into` (docs/wire/sdp.md §11). A task that is cancelled ends when its buffer is free; bytes that a
cancelled `recv_into` had got are received again.

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
from sidestep.api.blocking import Address, free_port
from sidestep.api.rnic import SETTINGS, Rnics, details, not_there, raised
from sidestep.api.service import service
from sidestep.errors import Misuse, SidestepError, Unavailable
from sidestep.sdp import aio
from sidestep.sdp.errnos import os_error
from sidestep.switch.protocol import Endpoint

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Buffer

    from sidestep.sdp.aio import AsyncStream
    from sidestep.sdp.requests import StreamSend

__all__ = ["SdpReader", "SdpServer", "SdpWriter", "open_connection", "start_server"]

Connected: TypeAlias = "Callable[[SdpReader, SdpWriter], Awaitable[None] | None]"
_CHUNK: Final = 64 << 10  # bytes that are read ahead for lines, and that small writes are joined to


class _Engine:
    """The devices of one event loop; closed when nobody uses them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._scheduled: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._users = 0
        self.rnics = Rnics(self.kick)
        loop.add_reader(self.rnics.loop.fileno(), self._turn)

    def hold(self) -> None:
        """One user more."""
        self._users += 1

    def let_go(self) -> None:
        """One less; the last one turns off the light, in its own turn."""
        self._users -= 1
        if not self._users:
            self._loop.call_soon(self._close_unless_used)

    def kick(self) -> None:
        """Something was asked of a device."""
        if self._scheduled is None and not self.rnics.loop.closed and not self.orphaned:
            self._scheduled = self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        inner = self.rnics.loop
        if inner.closed:
            return
        self.rnics.turn()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_s = inner.next_in_s
        if due_s == 0:
            self.kick()
        elif due_s is not None:
            self._timer = self._loop.call_later(due_s, self._turn)

    def _close_unless_used(self) -> None:
        if not self._users:
            self.close()

    def close(self) -> None:
        """Ends everything at once."""
        _engines.pop(self._loop, None)
        for handle in (self._scheduled, self._timer):
            if handle is not None:
                handle.cancel()
        if not self.rnics.loop.closed:
            if self.orphaned:
                self.rnics.forsake()
            else:
                self._loop.remove_reader(self.rnics.loop.fileno())
            self.rnics.close()

    @property
    def orphaned(self) -> bool:
        """Whether its event loop is no more."""
        return self._loop.is_closed()


_engines: Final[dict[asyncio.AbstractEventLoop, _Engine]] = {}  # one each, while it is used


def _engine() -> _Engine:
    loop = asyncio.get_running_loop()
    for each in [each for each in _engines.values() if each.orphaned]:  # asyncio.run() ended with connections open
        each.close()
    if loop not in _engines:
        _engines[loop] = _Engine(loop)
    return _engines[loop]


class SdpReader:
    """What comes from the other end."""

    def __init__(self, stream: AsyncStream) -> None:
        self._stream = stream
        self._ahead = bytearray()  # read and not asked for
        self._ended = False

    async def recv_into(self, buffer: Buffer, *, waitall: bool = False) -> int:
        """Receives into the buffer's own memory and tells how many bytes; 0 at the end of the stream.

        With `waitall` all of it is filled, unless the stream ends or an urgent byte is ahead. Cancelled, it ends when
        nobody can write to the buffer any more, and what it had got is received again.
        """
        if not self._ahead:
            count = await self._stream.recv_into(buffer, waitall=waitall)
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
                    count = await self._stream.recv_into(rest, waitall=True)
                except BaseException:
                    self._ahead[:0] = taken
                    raise
        self._ended |= not count
        return len(taken) + count

    async def read(self, n: int = -1) -> bytes:
        """Up to `n` bytes, as many as there are; all up to the end of the stream if it is negative."""
        if n < 0:
            parts = []
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
        """Up to the separator, which is part of it.

        Raises:
            asyncio.IncompleteReadError: The stream ended before it came; it has what had come.
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
        """A line; the rest, without a newline, at the end of the stream."""
        try:
            return await self.readuntil()
        except asyncio.IncompleteReadError as short:
            return short.partial
        except asyncio.LimitOverrunError as long:
            self._take(len(self._ahead))
            raise ValueError(str(long)) from long

    def at_eof(self) -> bool:
        """Whether a read has met the end of the stream, and nothing is left."""
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
        return self._stream.take_urgent()

    def at_mark(self) -> bool:
        """Whether the urgent byte is the next one."""
        return not self._ahead and self._stream.at_mark()

    def _take(self, size: int) -> bytes:
        taken = bytes(memoryview(self._ahead)[:size])
        del self._ahead[: len(taken)]
        return taken

    async def _fill(self, size: int) -> int:
        """Reads ahead, once; 0 at the end."""
        part = await self._stream.recv(size)
        self._ended |= not part
        self._ahead += part
        return len(part)


class SdpWriter:
    """What goes to the other end."""

    def __init__(self, stream: AsyncStream) -> None:
        self._stream = stream
        self._loop = asyncio.get_running_loop()
        self._held: deque[bytes] = deque()  # written, and not begun
        self._begun = 0  # sends that have not ended
        self._begun_len = 0
        self._flushing = False
        self._moved: set[asyncio.Future[None]] = set()  # of those who wait for some to end
        self._error: OSError | None = None
        self._eof = self._closing = False

    async def sendall(self, data: Buffer, *, urgent: bool = False) -> None:
        """Sends all from the buffer's own memory, and ends when it is free; `urgent`: the last byte is out of band.

        Cancelled, it ends when nobody can read the buffer any more; an unknown part of it was sent.
        """
        self._flush()
        while self._held:
            await self._move()
        self._check()
        await self._stream.send(data, urgent=urgent)

    def write(self, data: Buffer) -> None:
        """Takes it to be sent: `bytes` as they are, anything else as a copy. Follow it by `drain`."""
        if self._eof or self._closing:
            raise os_error(errno.EPIPE, "written after the end")
        whole = data if isinstance(data, bytes) else bytes(memoryview(data))
        if whole and self._error is None:  # after an error it goes nowhere, as in asyncio; `drain` tells
            self._held.append(whole)
            if not self._flushing:
                self._flushing = True
                self._loop.call_soon(self._flush)

    def writelines(self, data: list[Buffer]) -> None:
        """Several of them."""
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
        """It can."""
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
        """Whether it was closed, or broke."""
        return self._closing or self._error is not None or self._stream.stream.connection.error is not None

    async def wait_closed(self) -> None:
        """Ends when nothing of the connection is left: both ends have closed it, or it broke."""
        await self._stream.wait_closed()

    def abort(self) -> None:
        """Resets the connection."""
        self._closing = True
        self._held.clear()
        self._stream.abort()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """`peername`, `sockname`; and `details`, as of `SdpSocket`."""
        if name == "peername":
            return self._stream.getpeername()
        if name == "sockname":
            return self._stream.getsockname()
        if name == "details":
            return details(self._stream.stream)
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
            if not self._held and not self._stream.broken:
                if self._eof:
                    self._stream.write_eof()
                if self._closing:
                    self._stream.close()
        except OSError as error:
            self._fail(error)
        if self._closing and self._error is not None:
            self._stream.close()

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
            self._stream.begin_send(data, ended=partial(self._ended, len(data)))
        except BaseException:
            self._begun -= 1
            self._begun_len -= len(data)
            raise

    def _ended(self, size: int, send: StreamSend) -> None:
        self._begun -= 1
        self._begun_len -= size
        if send.error is not None and self._error is None:
            self._fail(self._stream.why())
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


class SdpListener:
    """What `SdpServer.sockets` has: where it listens."""

    def __init__(self, local: Endpoint) -> None:
        self._local = local

    def getsockname(self) -> Address:
        """Its address."""
        address, port = str(self._local.address), self._local.port
        return (address, port) if self._local.address.version == 4 else (address, port, 0, 0)


class SdpServer:
    """What `start_server` gives; as `asyncio.Server`."""

    def __init__(self, engine: _Engine) -> None:
        self._engine = engine
        self._servers: list[aio.Server] = []
        self._locals: list[Endpoint] = []
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.announced = False  # whether other hosts find it by the port mapper
        engine.hold()

    async def listen(self, served: aio.Served, local: Endpoint, backlog: int) -> None:
        """At one address; for `start_server`."""
        tries = 1 if local.port else limits.API_PORT_TRIES
        for left in reversed(range(tries)):
            port = local.port or free_port(local.address)
            try:
                host = self._engine.rnics.at(local.address)
                server = await aio.start_server(served, host, port, backlog=backlog, settings=SETTINGS)
            except SidestepError as why:
                raise raised(why) from why
            except OSError as error:
                if isinstance(error.__cause__, Unavailable):
                    error = raised(error.__cause__)
                if not left or error.errno != errno.EADDRINUSE:
                    raise error from None
            else:
                self._servers.append(server)
                self._locals.append(Endpoint(local.address, port))
                by = service()
                self.announced = by.call(partial(by.announce, self._locals[-1]))
                return

    @property
    def sockets(self) -> tuple[SdpListener, ...]:
        """Where it listens; none once it is closed."""
        return tuple(map(SdpListener, self._locals))

    def is_serving(self) -> bool:
        """Whether it takes connections."""
        return bool(self._servers)

    async def serve_forever(self) -> None:
        """Serves until it is cancelled, and then closes."""
        try:
            await asyncio.shield(self._over)
        finally:
            self.close()
            await self.wait_closed()

    def close(self) -> None:
        """Takes no more connections; those it has taken go on."""
        servers, self._servers = self._servers, []
        local, self._locals = self._locals, []
        for server in servers:
            server.close()
        for each in local:
            by = service()
            by.call(partial(by.withdraw, each))
        if not self._over.done():
            self._over.set_result(None)
            self._engine.let_go()
        self._closed_servers = servers or self._closed_servers

    _closed_servers: list[aio.Server] = []  # noqa: RUF012 - replaced, never changed

    async def wait_closed(self) -> None:
        """Ends when it is closed and all that was served has ended."""
        await asyncio.shield(self._over)
        for server in self._closed_servers:
            await server.wait_closed()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
        await self.wait_closed()


async def open_connection(
    name: str, port: int, *, local_addr: tuple[str, int] | None, family: int, rdma_port: int | None
) -> tuple[SdpReader, SdpWriter]:
    """Connects to a host, trying its addresses one after another."""
    loop = asyncio.get_running_loop()
    engine = _engine()
    engine.hold()
    try:
        failed: OSError | None = None
        for _, _, _, _, address in await loop.getaddrinfo(name, port, family=family, type=_stdlib.SOCK_STREAM):
            remote = Endpoint(ip_address(str(address[0]).partition("%")[0]), port)
            try:
                stream = await _connect(engine, remote, local_addr[0] if local_addr else None, rdma_port)
            except OSError as error:
                failed = failed or error
            else:
                return _ends(engine, stream)
        raise failed or OSError(f"{name} has no address")
    finally:
        engine.let_go()


async def _connect(engine: _Engine, remote: Endpoint, local: str | None, rdma_port: int | None) -> AsyncStream:
    rnics = engine.rnics
    try:
        host = rnics.towards(remote.address, ip_address(local) if local else None)
        if rdma_port is None:
            found: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

            def answered(port: int | None) -> None:
                if not found.done():
                    found.set_result(port)

            rnics.find(host, remote, answered)
            rdma_port = await found
            if rdma_port is None:
                raise not_there(remote)
        return await aio.open_connection(host, str(remote.address), rdma_port, settings=SETTINGS)
    except SidestepError as why:
        raise raised(why) from why


def _ends(engine: _Engine, stream: AsyncStream) -> tuple[SdpReader, SdpWriter]:
    """Reader and writer of a connection, which holds the engine until it is over."""
    engine.hold()
    stream.on_over(engine.let_go)
    return SdpReader(stream), SdpWriter(stream)


async def start_server(
    connected: Connected, name: str | list[str] | None, port: int, *, family: int, backlog: int
) -> SdpServer:
    """Listens at all addresses of a host, or at each of these."""
    engine = _engine()
    server = SdpServer(engine)

    async def served(stream: AsyncStream) -> None:
        reader, writer = _ends(engine, stream)
        wanted = connected(reader, writer)
        if wanted is not None:
            await wanted

    try:
        for local in await _places(name, port, family):
            if not port and server.sockets:
                local = Endpoint(local.address, server.sockets[0].getsockname()[1])
            await server.listen(served, local, backlog)
    except BaseException:
        server.close()
        raise
    return server


async def _places(name: str | list[str] | None, port: int, family: int) -> list[Endpoint]:
    if not name:
        both = [Endpoint(IPv4Address(0), port), Endpoint(IPv6Address(0), port)]
        return both if not family else both[:1] if family == _stdlib.AF_INET else both[1:]
    loop = asyncio.get_running_loop()
    found: dict[Endpoint, None] = {}
    for each in [name] if isinstance(name, str) else name:
        for _, _, _, _, address in await loop.getaddrinfo(each, port, family=family, type=_stdlib.SOCK_STREAM):
            found[Endpoint(ip_address(str(address[0]).partition("%")[0]), port)] = None
    if not found:
        raise Misuse(f"{name} has no address")
    return list(found)
