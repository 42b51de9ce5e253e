"""A pump between a real TCP connection and a real SDP stream over two software RNICs, all driven by one loop."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from fcntl import ioctl
from ipaddress import IPv4Address
from typing import Final

from sidestep.loop import Loop
from sidestep.rdma.iwarp.device import IwarpDevice
from sidestep.remote.inbound import BY_CARRIER
from sidestep.remote.pump import Pieces, Pump
from sidestep.sdp.endpoint import SdpStream
from sidestep.sdp.requests import SdpEvent, SdpEventKind, StreamEvent, StreamReceive, StreamSend
from sidestep.sdp.settings import Addresses, Carrier, SdpSettings
from sidestep.sdp.stack import Stack

WAIT_S: Final = 20.0
TURN_S: Final = 0.02
_LINGER_0: Final = struct.pack("ii", 1, 0)


class Host:
    """A device and a stack whose timers the loop has."""

    def __init__(self, closing: ExitStack, loop: Loop, address: str, settings: SdpSettings) -> None:
        self.loop = loop
        self.address = address
        self.device = IwarpDevice(address, loop)
        closing.callback(self.device.close)
        self.stack = Stack(self.device, lambda: loop.now, settings, wake_at=self._wake_at)
        closing.callback(self.stack.close)

    def _wake_at(self, at: float) -> None:
        self.loop.call_later(max(0.0, at - self.loop.now), self.stack.handle_timeouts)


class SdpEnd:
    """A program at the SDP end, that reads when it is told to."""

    def __init__(self) -> None:
        self.stream: SdpStream | None = None
        self.received = bytearray()
        self.marks: list[int] = []  # offsets of urgent bytes
        self.kinds: list[SdpEventKind] = []
        self.ended = False
        self.reading = True
        self.unsent = 0
        self._mark = False
        self._room = memoryview(bytearray(1 << 16))
        self._busy = False

    def told(self, stream: SdpStream, event: StreamEvent) -> None:
        if isinstance(event, StreamReceive):
            self._busy = False
            if event.filled and self._mark:
                self.marks.append(len(self.received))
            self.received += event.view[: event.filled]
            if not event.filled and event.error is None and stream.connection.ended:
                self.ended = True
            self.read()
        elif isinstance(event, StreamSend):
            self.unsent -= 1
        elif isinstance(event, SdpEvent):
            self.kinds.append(event.kind)
            if event.kind is SdpEventKind.READABLE:
                self.read()

    def read(self) -> None:
        """One receive, if there is something and it is wanted."""
        assert self.stream is not None
        connection = self.stream.connection
        if self.reading and not (self._busy or self.ended or connection.error) and connection.readable:
            self._busy = True
            self._mark = connection.at_mark
            self.stream.receive(self._room[:1] if self._mark else self._room)

    def send(self, data: bytes, *, urgent: bool = False) -> None:
        assert self.stream is not None
        self.unsent += 1
        self.stream.send(memoryview(data), urgent=urgent)

    @property
    def reset(self) -> bool:
        return SdpEventKind.BROKEN in self.kinds

    @property
    def closed(self) -> bool:
        return SdpEventKind.CLOSED in self.kinds


class TcpEnd:
    """A program at the TCP end, that reads when it is told to."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)
        self.received = bytearray()
        self.marks: list[int] = []
        self.ended = self.reset = False
        self.reading = True
        self.unsent = bytearray()
        self._shut = False

    def move(self) -> bool:
        """Sends and receives what there is; whether it did anything."""
        if self.reset or self.sock.fileno() < 0:
            return False
        moved = False
        try:
            if self.unsent and (sent := self.sock.send(self.unsent)):
                del self.unsent[:sent]
                moved = True
            if not self.unsent and self._shut:
                self.sock.shutdown(socket.SHUT_WR)
                self._shut = False
                moved = True
        except BlockingIOError:
            pass
        except OSError:
            self.reset = True
            return True
        return self._read() or moved

    def _read(self) -> bool:
        if not self.reading or self.ended:
            return False
        try:
            urgent = at_mark(self.sock)
            data = self.sock.recv(1 if urgent else 1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            self.reset = True
            return True
        if urgent and data:
            self.marks.append(len(self.received))
        self.received += data
        self.ended = not data
        return True

    def send(self, data: bytes) -> None:
        self.unsent += data

    def shut(self) -> None:
        self._shut = True

    def abort(self) -> None:
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_0)
        self.sock.close()


def at_mark(sock: socket.socket) -> bool:
    return ioctl(sock, 0x8905, bytes(4)) != bytes(4)  # SIOCATMARK


class World:
    """One pump."""

    def __init__(
        self, closing: ExitStack, *, carrier: Carrier = Carrier.IWARP, active: bool = False, buffers: int = 0
    ) -> None:
        """`active`: the pump's end of the stream is the one that connects."""
        self.loop = Loop()
        closing.callback(self.loop.close)
        settings = BY_CARRIER[carrier]
        self.near = Host(closing, self.loop, "127.0.0.1", settings)
        self.far = Host(closing, self.loop, "127.0.0.2", replace(settings, close_s=0.05))  # for DisConns that cross
        self.pieces = Pieces()
        self.sdp = SdpEnd()
        self.overs: list[Pump] = []
        with socket.create_server(("127.0.0.1", 0)) as server:
            if buffers:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffers)
                server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffers)
            made = socket.socket()
            if buffers:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffers)
                made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffers)
            made.connect(server.getsockname())
            self.tcp = TcpEnd(closing.enter_context(made))
            inner = closing.enter_context(server.accept()[0])
        self.inner = inner
        self.pump: Pump | None = None
        passive, connecting = (self.far, self.near) if active else (self.near, self.far)
        listener = passive.stack.listen(0, self._take_sdp if active else self._take_pump)
        addresses = Addresses(
            IPv4Address(connecting.address), 1, IPv4Address(passive.address), listener.service_id & 0xFFFF
        )
        stream = connecting.stack.connect(passive.address, addresses, self.sdp.told)
        if active:
            self._take_pump(stream)
        else:
            self.sdp.stream = stream
        self.until(lambda: self.sdp.stream is not None and SdpEventKind.ESTABLISHED in self.sdp.kinds)
        self.until(lambda: self.pump is not None)
        listener.close()

    def _take_pump(self, stream: SdpStream) -> None:
        self.pump = Pump(self.loop, stream, self.inner, self.pieces, self.overs.append)

    def _take_sdp(self, stream: SdpStream) -> None:
        self.sdp.stream = stream
        stream.tell = self.sdp.told

    def turn(self, timeout_s: float = TURN_S) -> bool:
        """One turn of all; whether anything happened."""
        moved = self.tcp.move()
        return self.loop.turn(0 if moved else timeout_s) or moved

    def until(self, condition: Callable[[], bool]) -> None:
        """Lets everything go on until something is so."""
        deadline = self.loop.now + WAIT_S
        while not condition():
            assert self.loop.now < deadline, "it never came to be"
            if hasattr(self, "tcp"):
                self.turn()
            else:
                self.loop.turn(TURN_S)

    def rest(self) -> None:
        """Lets everything go on until nothing happens any more."""
        quiet, deadline = 0, self.loop.now + WAIT_S
        while quiet < 3:
            assert self.loop.now < deadline, "it never comes to rest"
            quiet = 0 if self.turn() else quiet + 1
