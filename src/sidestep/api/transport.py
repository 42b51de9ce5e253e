"""One end of an SDP connection in an asyncio event loop: what a reader and a writer share.

An awaited call keeps its buffer until it ends. Any number may be outstanding, of both kinds: they are served in the
order in which they were begun. Only several make Pipelined mode (Read Zcopy with many advertisements, Write Zcopy)
worthwhile.

Cancelling a task takes its request back, and the task ends once the memory is free, which may take the other end's
consent. Bytes that a cancelled `recv_into` had got go back to the stream. That cannot be done if a later one has got
some as well: then the connection is reset, for its stream would have a hole. Of a cancelled `send` an unknown part has
been sent, as with sockets.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from sidestep.api.end import SdpEnd, room_of
from sidestep.sdp.host import release
from sidestep.sdp.requests import SdpEvent, SdpEventKind, StreamEvent, StreamReceive, StreamSend

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from sidestep.api.end import SdpListener
    from sidestep.sdp.endpoint import SdpStream
    from sidestep.sdp.host import Host
    from sidestep.switch.protocol import Endpoint


class SdpTransport(SdpEnd):
    """One connection; all calls are made in its event loop."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._waiters: dict[StreamSend | StreamReceive, asyncio.Future[None]] = {}
        self._receives: deque[StreamReceive] = deque()  # receives that their callers have not got yet, in order
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._over: asyncio.Future[None] = self._loop.create_future()  # done once no part of it is outstanding

    async def open(self, host: Host, local: Endpoint | None, remote: Endpoint) -> None:
        """Connects.

        Raises:
            OSError: ConnectionRefusedError, TimeoutError and others.
        """
        self._open(host, local, remote)
        assert self._reports is not None
        try:
            await asyncio.shield(self._opened)
        except asyncio.CancelledError:
            self.abort()
            raise
        if (broken := self._reports.take()) is not None:
            raise broken

    @classmethod
    def accepted(cls, listener: SdpListener) -> SdpTransport:
        """The one that has waited the longest."""
        made = cls()
        made._adopt(listener)
        return made

    # --- data ---

    async def send(self, data: Buffer, *, urgent: bool = False) -> None:
        """Sends all of it, and ends when the memory is free; `urgent`: the last byte is out of band.

        Raises:
            OSError: ConnectionResetError, BrokenPipeError and others.
        """
        view = memoryview(data).cast("B")
        self._check_writing()
        if not len(view):
            return
        send = self._begin_send(view, urgent=urgent)
        try:
            await self._ended(send)
        finally:
            release(view)
        if send.error is not None:
            raise self._why()

    def begin_send(self, data: bytes, ended: Callable[[OSError | None], None]) -> None:
        """Queues it, and does not wait; `ended` is called when the memory is free, and how it went.

        Raises:
            OSError: ConnectionResetError, BrokenPipeError and others.
        """
        self._check_writing()
        send = self._begin_send(memoryview(data), urgent=False)
        waiter = self._waiter(send)

        def over(_: object) -> None:
            release(send.view)
            ended(None if send.error is None else self._why())

        waiter.add_done_callback(over)

    async def recv_into(self, buffer: Buffer, *, waitall: bool = False) -> int:
        """Receives into the buffer; returns how many bytes, 0 at the end of the stream.

        With `waitall` all of it is filled, unless the stream ends or an urgent byte is ahead.

        Raises:
            OSError: ConnectionResetError and others, once; then it is the end of the stream.
        """
        view = room_of(buffer)
        if not len(view) or self._closed or (receive := self._begin_receive(view, waitall=waitall)) is None:
            return 0
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
            raise self._why()
        return receive.filled

    # --- ends ---

    def write_eof(self) -> None:
        """Sends no more; what was sent before still arrives."""
        if not self._write_shut:
            self._write_shut = True
            self.stream.shutdown_write()
            self._kick()

    def close(self) -> None:
        """Ends both directions. Unread bytes make it a reset, as in TCP; else what was sent still arrives."""
        if not self._closed:
            self._closed = True
            self.stream.close()
            self._kick()

    def abort(self) -> None:
        """Resets the connection."""
        self._closed = True
        self.stream.abort()
        self._kick()

    async def wait_closed(self) -> None:
        """Ends when nothing of the connection is left: both ends have closed it, or it broke."""
        await asyncio.shield(self._over)

    def on_over(self, callback: Callable[[], None]) -> None:
        """Calls it when nothing of the connection is left."""
        self._over.add_done_callback(lambda _: callback())

    @property
    def broken(self) -> bool:
        """True if the connection ended by an error, or was closed here."""
        return self._closed or self.stream.connection.error is not None

    # --- within ---

    def _handle_event(self, stream: SdpStream, event: StreamEvent) -> None:
        super()._handle_event(stream, event)
        done: asyncio.Future[None] | None = None
        if not isinstance(event, SdpEvent):
            done = self._waiters.pop(event, None)
        elif event.kind in (SdpEventKind.ESTABLISHED, SdpEventKind.BROKEN):
            done = self._opened
        elif event.kind is SdpEventKind.CLOSED:
            done = self._over
        if done is not None and not done.done():
            done.set_result(None)

    def _waiter(self, request: StreamSend | StreamReceive) -> asyncio.Future[None]:
        """Done when the request has ended."""
        waiter = self._loop.create_future()
        if request.done:
            waiter.set_result(None)
        else:
            self._waiters[request] = waiter
        return waiter

    async def _ended(self, request: StreamSend | StreamReceive) -> None:
        """Waits until the request has ended. Cancelled, it takes it back, and ends when that is done."""
        if request.done:
            await asyncio.sleep(0)  # a caller in a loop must not keep all others from their turn
            return
        waiter = self._waiter(request)
        try:
            await asyncio.shield(waiter)
        except asyncio.CancelledError:
            self._cancel(request)
            while not request.done:
                with suppress(asyncio.CancelledError):  # the memory is still in use
                    await asyncio.shield(waiter)
            raise

    def _take_back(self, receive: StreamReceive) -> None:
        """Returns the bytes of a cancelled receive to the stream."""
        if not receive.filled or self._closed:
            return
        receives = list(self._receives)
        later = receives[receives.index(receive) + 1 :]
        if any(each.filled or each.planned for each in later):
            self.stream.abort()
        else:
            self.stream.put_back(bytes(receive.view[: receive.filled]))
        self._kick()
