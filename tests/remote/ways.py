"""Where a peer made by hand meets what sidestep relays to a program that knows only TCP: several ways, two ends."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from common import PATIENCE_S
from hosts import Host
from sdp_by_hand import BUFFER, BUFS, HandPeer, ask_port, hello_ib

PORT: Final = 7000
WAIT_S: Final = PATIENCE_S
_AT, _FROM_TCP, _VIA, _GATEWAY_LISTENS = 7900, 7901, 7902, 7903
SIDESTEP: Final = Path(sys.executable).with_name("sidestep")


@dataclass
class Ends:
    """Both ends of one connection, and where they are."""

    peer: HandPeer
    program: socket.socket
    world: World


Way = Callable[..., AbstractContextManager[Ends]]


class World:
    """The peer's host, and the one under test: with a provider whose log is a file, and a gateway."""

    def __init__(self, closing: ExitStack, here: Host, there: Host, log: Path) -> None:
        self.here, self.there = here, there
        self._closing = closing
        self._log = log
        self.server_pid = 0  # of a program under the shim, if there is one
        self._listener: socket.socket | None = None

    def gateway(self, log: Path) -> None:
        """Starts the gateway of both directions."""
        rules = [
            f"sdp {self.there.address}:{_GATEWAY_LISTENS} to tcp {self.there.address}:{PORT} at {_AT}",
            f"tcp {self.there.address}:{_FROM_TCP} to sdp {self.here.address}:{PORT} via {_VIA}",
        ]
        argv = [str(SIDESTEP), "gateway", "--json", *rules]
        with self.there.namespace.inside(), log.open("wb") as file:
            process = self._closing.enter_context(subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=file))
        self._closing.callback(process.kill)
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["rules"]

    @contextmanager
    def lends_listener(self, other: World) -> Iterator[None]:
        """The program's is the other one's meanwhile."""
        other._listener = self.listener
        yield
        other._listener = None

    @property
    def listener(self) -> socket.socket:
        """The program's."""
        if self._listener is None:
            with self.there.namespace.inside():
                self._listener = socket.create_server((self.there.address, PORT), backlog=100)
            self._closing.callback(self._listener.close)
            self._listener.settimeout(WAIT_S)
        return self._listener

    def asked(self) -> int:
        """The RDMA port of the program: it is kept for a while only, so whoever needs it asks."""
        return ask_port(self.here.address, self.there.address, PORT)

    def accepted(self) -> socket.socket:
        """The program's end of the connection that has just been opened."""
        made, _ = self.listener.accept()
        made.settimeout(WAIT_S)
        return made

    @contextmanager
    def visit(self, bufs: int = BUFS, size: int = BUFFER, hello: bytes | None = None) -> Iterator[Ends]:
        """An ordinary SDP request for a service of the host, which its provider serves."""
        with self.here.namespace.inside(), ExitStack() as closing:
            _ = self.listener
            where = (self.there.address, self.asked())
            peer = closing.enter_context(HandPeer.connect(self.here.address, where, hello, bufs=bufs, size=size))
            yield Ends(peer, closing.enter_context(self.accepted()), self)

    def visit_by_ib(self, bufs: int = BUFS, size: int = BUFFER) -> AbstractContextManager[Ends]:
        """The same, with the longer Hello."""
        return self.visit(bufs, size, hello_ib(self.here.address, self.there.address, 40000, bufs=bufs, size=size))

    @contextmanager
    def to_gateway(self, bufs: int = BUFS, size: int = BUFFER) -> Iterator[Ends]:
        """SDP to the gateway, TCP behind it."""
        with self.here.namespace.inside(), ExitStack() as closing:
            _ = self.listener
            where = (self.there.address, _AT)
            peer = closing.enter_context(HandPeer.connect(self.here.address, where, bufs=bufs, size=size))
            yield Ends(peer, closing.enter_context(self.accepted()), self)

    @contextmanager
    def from_gateway(self, bufs: int = BUFS, size: int = BUFFER) -> Iterator[Ends]:
        """TCP to the gateway, which opens an SDP connection to the peer."""
        with self.here.namespace.inside(), ExitStack() as closing:
            with socket.create_server((self.here.address, _VIA)) as listener:
                listener.settimeout(WAIT_S)
                program = closing.enter_context(socket.create_connection((self.there.address, _FROM_TCP), WAIT_S))
                peer = closing.enter_context(HandPeer.accept(listener, bufs=bufs, size=size))
            yield Ends(peer, program, self)

    def program_is_reset(self, program: socket.socket) -> None:
        """Asserts that it is, behind what came before; the end of the stream may be seen first."""
        try:
            while program.recv(1000) or program.send(b"."):
                """It goes on."""
        except (ConnectionResetError, BrokenPipeError):
            return

    def log(self) -> str:
        """What the providers have logged."""
        return self._log.read_text()

    def logs(self, text: str, since: int = 0) -> bool:
        """Whether they log this, behind so many characters, before long."""
        deadline = time.monotonic() + WAIT_S
        while text not in self.log()[since:]:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)  # nothing tells when a line is written
        return True


WAYS: Final[dict[str, Way]] = {
    "provider": World.visit, "provider, Hello of InfiniBand": World.visit_by_ib, "gateway from SDP": World.to_gateway,
    "gateway to SDP": World.from_gateway,
}  # fmt: skip
