"""What joins an SDP stream with a kernel TCP socket: the "edge router" of the Offload Sockets Framework.

    TCP socket ── recv_into ──► piece ── stream.send ──► SDP          and the other way round, with pieces of its own

Theory of operation. Bytes are read into pieces of memory that all pumps of a pool share, and go out of the same memory.
A direction holds no more than `limits.PUMP_PIECES_MAX` pieces: while all of them are in use nothing is read, so the end
that is slow slows the other one down, by TCP's window or by SDP's credits. A piece is taken when there is something to
read, so a pump that idles has none, and costs nothing.

What one side says is said on the other:

| TCP | SDP |
|---|---|
| FIN: the end of the stream | DisConn, behind all bytes; the other direction goes on |
| RST, or any other error of the socket | the stream is reset; what is on its way is dropped, as TCP does |
| the urgent byte: SO_OOBINLINE, SIOCATMARK, MSG_OOB | the urgent byte, in its place: OOB_PRES |

That covers SO_LINGER of an application at either end, as far as anybody can see it: with a linger of 0, or with bytes
left unread, its close is a reset, and else an end of stream. A close that lingers waits for its own kernel only, here
as with any router of connections.

A turn moves a bounded number of bytes, then the other connections of the loop have theirs.

Not supported: announcing an urgent byte ahead of bytes that wait (TCP's urgent pointer and OOB_PEND travel ahead of the
window; here an urgent byte is announced once it is its turn), and SDP streams whose urgent bytes do not stay in line.
"""

from __future__ import annotations

import os
import select
import socket
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from fcntl import ioctl
from typing import TYPE_CHECKING, Final

from sidestep import limits
from sidestep.errors import Misuse, SidestepError
from sidestep.loop import READ, WRITE
from sidestep.rdma.iwarp.tcp import RESET
from sidestep.sdp.requests import SdpEvent, SdpEventKind, StreamEvent, StreamReceive, StreamSend
from sidestep.sdp.states import OPEN

if TYPE_CHECKING:
    from sidestep.loop import Loop
    from sidestep.sdp.endpoint import SdpStream

_SIOCATMARK: Final = 0x8905  # asm-generic/sockios.h
_NO_MARK: Final = bytes(4)
_LARGE: Final = 4  # messages of the present size: a piece that would fill more of them asks for larger ones
_LINGER: Final = bytes(8)  # the same: close() does not wait, and the kernel sends what is left
_SEND: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class Pieces:
    """Memory that pumps read into; those that are given back are used again."""

    def __init__(self) -> None:
        self.taken = 0  # in use
        self._free: list[memoryview] = []

    def take(self) -> memoryview:
        self.taken += 1
        return self._free.pop() if self._free else memoryview(bytearray(limits.PUMP_PIECE))

    def give(self, piece: memoryview) -> None:
        self.taken -= 1
        if len(self._free) < limits.PUMP_PIECES_KEPT:
            self._free.append(piece)


class TcpSide:
    """The TCP socket of a pump, or one of a bridge: its own from now on.

    `ready` is called with what it is ready for.
    """

    def __init__(self, loop: Loop, sock: socket.socket, pieces: Pieces, ready: Callable[[int], object]) -> None:
        self.sock = sock
        self._loop = loop
        self._pieces = pieces
        self._ready = ready
        self._watched: int | None = None
        self._hung_up = False  # both directions have ended: the kernel tells that all the time
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # who sent has decided that it is time to
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    @property
    def open(self) -> bool:
        return self.sock.fileno() >= 0

    def read(self) -> tuple[memoryview, int, bool] | None:
        """A piece, how many bytes of it were read, and whether it is an urgent one; None: nothing is there.

        0 bytes: the end of the stream; the piece has been given back. To be called when the socket was readable: so
        what is first in it was there, and the mark before it, if any. Raises OSError.
        """
        piece = self._pieces.take()
        count = 0
        try:
            urgent = ioctl(self.sock, _SIOCATMARK, _NO_MARK) != _NO_MARK
            count = self.sock.recv_into(piece[:1] if urgent else piece, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        finally:
            if not count:
                self._pieces.give(piece)
        return piece, count, urgent

    def send(self, data: memoryview, *, urgent: bool) -> int:
        """How many bytes it has taken; 0: none at the moment. Raises OSError."""
        try:
            return self.sock.send(data, _SEND | socket.MSG_OOB if urgent else _SEND)
        except BlockingIOError:
            return 0

    def watch(self, wanted: int) -> None:
        """What it is watched for: errors always, but for those behind the end of both directions."""
        if not wanted and self._hung_up:
            self._forget()
        elif wanted != self._watched:
            self._loop.watch(self.sock.fileno(), wanted, self._on_events)
            self._watched = wanted

    def close(self) -> None:
        self._forget()
        self.sock.close()

    def _forget(self) -> None:
        if self._watched is not None:
            self._loop.forget(self.sock.fileno())
            self._watched = None

    def _on_events(self, events: int) -> None:
        if events & select.EPOLLHUP:
            self._hung_up = True
        self._ready(events)


class _Waiting:
    """Bytes on their way to TCP."""

    __slots__ = ("left", "piece", "urgent")

    def __init__(self, piece: memoryview, count: int, *, urgent: bool) -> None:
        self.piece = piece
        self.left = piece[:count]
        self.urgent = urgent


class Pump:
    """One connection. The stream may be about to be established; its `tell` is the pump's from now on.

    Args:
        loop: That drives the stream's device; it watches the socket.
        stream: Its settings have `urgent_inline`.
        sock: Connected, TCP; it belongs to the pump from now on.
        pieces: The memory to use.
        on_over: Called once, when nothing is left of both sides.

    Raises:
        Misuse: Urgent bytes of the stream are not in line.
    """

    def __init__(
        self, loop: Loop, stream: SdpStream, sock: socket.socket, pieces: Pieces, on_over: Callable[[Pump], object]
    ) -> None:
        if not stream.connection.urgent_inline:
            raise Misuse("the place of an urgent byte gets lost", remedy="Settings(urgent_inline=True)")
        self.to_sdp = 0  # bytes
        self.to_tcp = 0
        self.why = ""  # what reset it; empty: nothing has
        self.over = False
        self._loop = loop
        self._stream = stream
        self._tcp = TcpSide(loop, sock, pieces, self._on_tcp)
        self._pieces = pieces
        self._on_over = on_over
        self._open = stream.connection.state in OPEN
        self._stream_over = False
        # From TCP to SDP:
        self._sending: dict[StreamSend, memoryview] = {}
        self._asked = False  # for larger private buffers
        self._tcp_ended = False
        self._closing = False  # nothing more is asked of the stream
        # From SDP to TCP:
        self._receiving: tuple[memoryview, bool] | None = None  # where to, and whether it is an urgent byte
        self._waiting: deque[_Waiting] = deque()
        self._sdp_ended = False
        self._fin_sent = False
        # Whoever ends us without a word closes the socket: that must not look like the end of what SDP has brought.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        stream.tell = self._handle_event
        self._watch()
        loop.soon(self._go_on)

    @property
    def held(self) -> int:
        """Pieces in use."""
        return len(self._sending) + len(self._waiting) + (self._receiving is not None)

    @property
    def counts(self) -> tuple[int, int]:
        """Bytes from TCP, and to it."""
        return self.to_sdp, self.to_tcp

    def details(self) -> dict[str, object]:
        """How it is now, as `RemoteRelay.details` tells it of a connection that was promoted."""
        held = sum(send.length for send in self._sending)
        return {"sent": self.to_sdp, "held": held, "arrived": self.to_tcp, **self._stream.details()}

    def abort(self, why: str) -> None:
        self._end_badly(why)

    # ---- from TCP ----

    def _on_tcp(self, events: int) -> None:
        self._contained(self._ready, events)

    def _ready(self, events: int) -> None:
        if not self._tcp.open:
            return
        if events & select.EPOLLERR:
            self._lose_tcp(self._tcp.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
            return
        if events & WRITE:
            self._turn()
        if events & (READ | select.EPOLLHUP) and self._wants_tcp():
            self._read()
        self._watch()

    def _wants_tcp(self) -> bool:
        return (
            self._open and not (self._tcp_ended or self._closing) and len(self._sending) < limits.PUMP_PIECES_MAX
            and self._tcp.open
        )  # fmt: skip

    def _read(self) -> None:
        try:
            found = self._tcp.read()
        except OSError as error:
            self._lose_tcp(error.errno or 0)
            return
        if found is None:
            return
        piece, count, urgent = found
        if not count:
            self._tcp_ended = True
            self._stream.shutdown_write()
            self._settle()
            return
        try:
            if not self._asked and count > _LARGE * self._stream.connection.remote_size:
                self._asked = True
                with suppress(SidestepError):  # its own request may be on its way
                    self._stream.resize_remote(limits.REMOTE_RECEIVE_SIZE_MAX)
            send = self._stream.send(piece[:count], urgent=urgent)
        except SidestepError:  # it broke, which is told
            self._pieces.give(piece)
            self._closing = True
            return
        self.to_sdp += count
        if send.done:
            self._pieces.give(piece)
        else:
            self._sending[send] = piece

    def _sent(self, send: StreamSend) -> None:
        piece = self._sending.pop(send, None)
        if piece is not None:
            self._pieces.give(piece)
            self._watch()
            self._settle()

    # ---- to TCP ----

    def _go_on(self) -> None:
        self._contained(self._turn)

    def _turn(self) -> None:
        """What SDP has brought, as far as TCP takes it."""
        budget = limits.PUMP_TURN
        while not self._closing:
            before = self.to_tcp
            self._write()
            budget -= self.to_tcp - before
            if self._receiving is not None or self._sdp_ended or not self._stream.connection.readable:
                break
            if not self._tcp.open or len(self._waiting) >= limits.PUMP_PIECES_MAX:
                break
            if budget <= 0:
                self._loop.soon(self._go_on)
                break
            self._receive()
        self._write()
        self._watch()

    def _receive(self) -> None:
        urgent = self._stream.connection.at_mark
        piece = self._pieces.take()
        self._receiving = piece, urgent
        try:
            self._stream.receive(piece[:1] if urgent else piece)
        except SidestepError:  # it is over, which is told
            self._receiving = None
            self._pieces.give(piece)
            self._closing = True

    def _received(self, receive: StreamReceive) -> None:
        assert self._receiving is not None
        piece, urgent = self._receiving
        self._receiving = None
        if receive.filled and self._tcp.open:
            self._waiting.append(_Waiting(piece, receive.filled, urgent=urgent))
        else:
            self._pieces.give(piece)
            if not receive.filled and receive.error is None and self._stream.connection.ended:
                self._sdp_ended = True
        self._loop.soon(self._go_on)

    def _write(self) -> None:
        waiting, tcp = self._waiting, self._tcp
        try:
            while waiting and tcp.open:
                first = waiting[0]
                count = tcp.send(first.left, urgent=first.urgent)
                if not count:
                    break
                self.to_tcp += count
                first.left = first.left[count:]
                if not first.left:
                    waiting.popleft()
                    self._pieces.give(first.piece)
            if self._sdp_ended and not waiting and not self._fin_sent and tcp.open:
                self._fin_sent = True
                tcp.sock.shutdown(socket.SHUT_WR)
        except OSError as error:  # of the last: the other end was quicker with a reset
            self._lose_tcp(error.errno or 0)
            return
        self._settle()

    # ---- the ends ----

    def _lose_tcp(self, code: int) -> None:
        """The socket has broken."""
        self._end_badly(f"TCP: {os.strerror(code) if code else 'reset'}")

    def _end_badly(self, why: str) -> None:
        """Resets what is not reset yet; the first reason is kept."""
        if not self.why:
            self.why = why
        self._closing = True
        self._reset_tcp()
        self._stream.abort()
        self._settle()

    def _reset_tcp(self) -> None:
        if self._tcp.open:
            self._tcp.close()  # which resets
        while self._waiting:
            self._pieces.give(self._waiting.popleft().piece)

    def _settle(self) -> None:
        """Gives up what is at its end."""
        if self._tcp_ended and self._fin_sent and self._tcp.open:
            with suppress(OSError):  # it may be over by itself
                self._tcp.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER)
            self._tcp.close()  # what it has not sent yet, the kernel still sends
        if not self._tcp.open and not (self._sending or self._closing):
            self._closing = True
            self._stream.close()
        if self._stream_over and not self._tcp.open and not self.over:
            self.over = True
            self._on_over(self)

    def _watch(self) -> None:
        if self._tcp.open:
            self._tcp.watch((READ if self._wants_tcp() else 0) | (WRITE if self._waiting else 0))

    # ---- what the stream tells ----

    def _handle_event(self, _stream: SdpStream, event: StreamEvent) -> None:
        self._contained(self._take, event)

    def _contained(self, call: Callable[..., object], *arguments: object) -> None:
        """Others share our loop, and we are called in the midst of what their streams are told: a fault stays here."""
        try:
            call(*arguments)
        except Exception:
            self._end_badly(f"a fault of ours: {traceback.format_exc()}")

    def _take(self, event: StreamEvent) -> None:
        if type(event) is StreamSend:
            self._sent(event)
        elif type(event) is StreamReceive:
            self._received(event)
        elif isinstance(event, SdpEvent):
            if event.kind is SdpEventKind.ESTABLISHED:
                self._open = True
                self._watch()
            elif event.kind is SdpEventKind.READABLE or event.kind is SdpEventKind.END_OF_STREAM:
                self._loop.soon(self._go_on)
            elif event.kind is SdpEventKind.BROKEN:
                self._end_badly(f"SDP: {event.error or 'reset'}")
            elif event.kind is SdpEventKind.CLOSED:
                self._stream_over = True
                if not self._tcp_ended:
                    self._end_badly("SDP: closed too early")
                self._turn()  # what it has brought is still read
                self._settle()
