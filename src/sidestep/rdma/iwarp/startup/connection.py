"""A start-up on its TCP connection: what both ends do alike, whoever has asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sidestep.loop import Loop, Timer
    from sidestep.rdma.iwarp.startup.negotiation import Initiator, Responder
    from sidestep.rdma.iwarp.tcp import Tcp

_FRAMES_MAX: Final = 1024  # bytes of one look: a frame of the start-up has 532 at most


class Starting(ABC):
    """Between a machine of `startup`, a TCP connection and the loop's timers."""

    _machine: Initiator | Responder
    _tcp: Tcp

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._timer: Timer | None = None
        self._unsent = b""

    def on_readable(self) -> None:
        try:
            piece = self._tcp.read(_FRAMES_MAX)
        except OSError:
            self._machine.handle_closed(lost=True)
        else:
            if piece is None:
                return
            if piece:
                self._handle_bytes(piece)
            else:
                self._machine.handle_closed()
        self._advance()

    @abstractmethod
    def _handle_bytes(self, piece: bytes) -> None:
        """Gives bytes to the machine."""

    @abstractmethod
    def _advance(self) -> None:
        """Does what the machine tells."""

    def _send(self) -> None:
        self._unsent += self._machine.poll_send()
        try:
            self._unsent = self._unsent[self._tcp.write(self._unsent) :] if self._unsent else b""
        except OSError:
            self._unsent = b""  # reading tells what became of the connection
        self._tcp.watch(write=bool(self._unsent))

    def _leave(self) -> None:
        """Orderly: what there is to send is sent, and is to arrive."""
        self._send()
        self._stop_timer()
        self._tcp.end_writing()
        self._tcp.close()

    def _arm(self) -> None:
        self._stop_timer()
        deadline = self._machine.next_deadline()
        if deadline is not None:
            self._timer = self._loop.call_later(deadline - self._loop.now, partial(self._tcp.run, self._timeout))

    def _timeout(self) -> None:
        self._timer = None
        self._machine.handle_timeout(now=self._loop.now)
        self._advance()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
