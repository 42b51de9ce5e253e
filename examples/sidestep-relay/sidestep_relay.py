"""An offload protocol in one page: carries the bytes of a connection through a pair of UNIX sockets.

The switch finds `Relay` by the entry point in pyproject.toml, starts it when a connection first wants it, and calls
`join` for each connection whose two ends it has found. All of it runs in the provider's one thread, so nothing may
wait: what a full socket or ring does not take is left where it lies until there is room.
"""

from __future__ import annotations

import contextlib
import socket
from typing import ClassVar

from sidestep.switch.protocol import Capabilities, OffloadProtocol, Pair
from sidestep.switch.stream import Stream


class Relay(OffloadProtocol):
    """What the switch knows of us."""

    name: ClassVar[str] = "relay"
    capabilities: ClassVar[Capabilities] = Capabilities(self_routing=True)  # it asks for no route

    def join(self, pair: Pair) -> None:
        """Carries a connection from now on: a stream with each application, and a socket for each stream."""
        halves = [Half(self, stream, sock) for stream, sock in zip(pair.open(), socket.socketpair(), strict=True)]
        halves[0].other, halves[1].other = halves[1], halves[0]


class Half:
    """Moves bytes between one application and one end of the socket pair."""

    other: Half

    def __init__(self, protocol: Relay, stream: Stream, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.services, self.stream, self.sock = protocol.services, stream, sock
        self.watching = False  # the socket, that is while there is room for what it brings
        self.sending = self.receiving = True
        stream.on_change = self.handle_change  # more to read, or more room, or an end

    def handle_change(self) -> None:
        """Does once what can be done now; the switch calls again as long as that moves bytes."""
        self.send()
        self.receive()

    def send(self) -> None:
        """From the application's ring into the socket, without a copy here."""
        with contextlib.suppress(BlockingIOError):  # full: the other half calls when it has read
            if self.sending and (pieces := self.stream.readable()):
                self.stream.consume(self.sock.sendmsg(pieces))
        if self.sending and self.stream.ended:
            self.sending = False
            self.sock.shutdown(socket.SHUT_WR)  # so that the end travels behind the last byte

    def receive(self) -> None:
        """From the socket straight into the application's ring."""
        room = self.stream.writable() if self.receiving else ()
        with contextlib.suppress(BlockingIOError):
            if room and (count := self.sock.recvmsg_into(room)[0]):
                self.stream.commit(count)
                self.other.send()
            elif room:
                self.receiving = False
                self.stream.end()
        self.watch(wanted=bool(room) and self.receiving)
        if self.stream.lost or not (self.sending or self.receiving):
            self.sock.close()
            self.stream.on_change = lambda: None
            self.stream.close()

    def watch(self, *, wanted: bool) -> None:
        """Has the loop call `receive` when the socket brings something, or not."""
        if wanted != self.watching:
            self.watching = wanted
            if wanted:
                self.services.loop.on_readable(self.sock.fileno(), self.receive)
            else:
                self.services.loop.forget(self.sock.fileno())
