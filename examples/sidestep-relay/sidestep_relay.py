"""An offload protocol in one page: carries the bytes of a connection through a pair of UNIX sockets.

The switch finds `Relay` by the entry point in pyproject.toml, starts it when a connection first wants it, and calls
`join` for each connection whose two ends it has found. Each end gets a link, which takes words and data for the other
end. All of it runs in the provider's one thread, so nothing may wait: what a full socket does not take stays queued.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from struct import Struct
from typing import ClassVar

from sidestep.errors import PeerViolation
from sidestep.loop import READ, WRITE
from sidestep.switch.link import Carried, Control
from sidestep.switch.protocol import Capabilities, OffloadProtocol, Pair

WORD = Struct(">B7xQ")  # number and count; data follows the word DATA
PIECES_MAX = 64  # words and pieces of data that wait for the socket before the link takes no more data
READS_MAX = 32  # reads of one turn, so that other connections have theirs


class Relay(OffloadProtocol):
    """The protocol, as the switch sees it."""

    name: ClassVar[str] = "relay"
    capabilities: ClassVar[Capabilities] = Capabilities(self_routing=True)  # it asks for no route

    def __init__(self) -> None:
        self.halves: set[Half] = set()

    def join(self, pair: Pair) -> None:
        """Carries a connection from now on: a link for each application, and a socket for each link."""
        one, other = (Half(self, sock) for sock in socket.socketpair())
        self.halves |= {one, other}
        try:
            one.carried, other.carried = pair.carry(one, other)
        except BaseException:
            one.close()
            other.close()
            raise
        one.watch()
        other.watch()

    def stop(self) -> None:
        """Closes the sockets; the switch takes the connections back to TCP."""
        for half in list(self.halves):
            half.close()


class Half:
    """The link of one application (`sidestep.switch.link.Link`): one end of the socket pair."""

    carried: Carried
    rounds = False  # a direction that has gone back to TCP stays there
    spacers = True
    plain = buffered = False  # the engine cannot have it
    under_way = 0

    def __init__(self, protocol: Relay, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.protocol, self.loop, self.sock = protocol, protocol.services.loop, sock
        self.out: deque[memoryview] = deque()  # words and data, in order
        self.header = memoryview(bytearray(WORD.size))
        self.rooms = [self.header]  # for the next bytes; behind a word DATA those of the other ring
        self.filled = 0  # bytes of the first of them
        self.on_gone: Callable[[], object] | None = None  # known once the switch has finished

    # ---- from the application ----

    @property
    def room(self) -> int:
        return max(0, PIECES_MAX - len(self.out))

    def send_control(self, control: Control, count: int = 0) -> None:
        self.out.append(memoryview(WORD.pack(control, count)))
        self.loop.soon(self.send_all)

    def send(self, piece: memoryview) -> None:
        """Data is sent from the application's ring, without a copy here."""
        self.send_control(Control.DATA, len(piece))
        self.out.append(piece)

    def finish(self, on_gone: Callable[[], object]) -> None:
        self.on_gone = on_gone
        if self in self.protocol.halves:
            self.loop.soon(self.send_all)
        else:
            on_gone()

    def send_all(self) -> None:
        """As much as the socket takes."""
        if self not in self.protocol.halves:
            return
        full = not self.room
        with suppress(BlockingIOError):
            while self.out:
                count = self.sock.sendmsg(list(islice(self.out, PIECES_MAX)))
                while count:
                    piece = self.out.popleft()
                    if count < len(piece):
                        self.out.appendleft(piece[count:])
                    count -= min(count, len(piece))
        self.watch()
        if self.on_gone and not self.out:
            self.sock.shutdown(socket.SHUT_WR)  # the end travels behind the last byte
        elif full and self.room:
            self.carried.handle_room()

    # ---- to the application ----

    def receive(self) -> None:
        """Takes in words, and data straight into the application's ring."""
        for _ in range(READS_MAX):
            room = memoryview(bytearray(4096)) if self.on_gone else self.rooms[0][self.filled :]
            try:
                count = self.sock.recv_into(room)
            except BlockingIOError:
                return
            if not count:
                self.end()
                return
            if not self.on_gone:
                with suppress(PeerViolation):  # an application broke a rule: its connection is reset, and finished
                    self.take(count)

    def take(self, count: int) -> None:
        self.filled += count
        if self.filled < len(self.rooms[0]):
            return
        room, self.filled = self.rooms.pop(0), 0
        if room is not self.header:
            self.carried.handle_data(len(room))
        else:
            number, length = WORD.unpack(room)
            if number == Control.DATA:
                self.rooms = list(self.carried.data_room(length) or [memoryview(bytearray(length))])
            else:
                self.carried.handle_control(Control(number), length)
        if not self.rooms:
            self.rooms = [self.header]

    def end(self) -> None:
        """The other half has finished, and all that it sent has come."""
        if not self.on_gone:
            self.carried.handle_farewell()
            self.carried.handle_arrived(None)
        self.close()

    def close(self) -> None:
        self.protocol.halves.discard(self)
        self.loop.forget(self.sock.fileno())
        self.sock.close()
        if self.on_gone:
            self.on_gone()

    # ---- both ----

    def watch(self) -> None:
        self.loop.watch(self.sock.fileno(), READ | WRITE if self.out else READ, self.handle_ready)

    def handle_ready(self, events: int) -> None:
        if events & WRITE:
            self.send_all()
        self.receive()

    def lend(self, record: dict[str, int]) -> None:
        """Never lends the socket to the engine."""

    def take_back(self, record: dict[str, int], error: int) -> None:
        """Never called."""

    def details(self) -> dict[str, object]:
        return {}
