"""The end of rping's protocol that asks (`sidestep.rdma.tools.rping`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from sidestep import limits
from sidestep.errors import Misuse, PeerViolation
from sidestep.rdma.cm import Disconnected, Established, Rejected, TimewaitExit, Unreachable
from sidestep.rdma.tools.rping import INFO, PLAIN
from sidestep.rdma.tools.talk import Talk
from sidestep.rdma.work import Access, Send

if TYPE_CHECKING:
    from sidestep.rdma.cm import Connection, ConnectionEvent
    from sidestep.rdma.verbs import Device

_REMOTE: Final = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE
_LETTERS: Final = bytes(range(ord("A"), ord("z") + 1))


def text_of(number: int, size: int) -> bytes:
    """What a client has in that round: different in each, the last byte zero, for rping takes it for a text of C's."""
    prefix = f"rdma-ping-{number}: ".encode()[: size - 1]
    start = number % len(_LETTERS)
    filler = (_LETTERS[start:] + _LETTERS[:start]) * (size // len(_LETTERS) + 1)
    return prefix + filler[: size - 1 - len(prefix)] + b"\0"


class RpingClient(Talk):
    """The end that asks: makes so many rounds, compares what comes back, and disconnects.

    Args:
        device: Any.
        size: Bytes of the text; 2 at least.
        rounds: How many.
        failed: Is called once when it cannot go on, with the reason.
    """

    def __init__(self, device: Device, size: int, rounds: int, failed: Callable[[str], object]) -> None:
        if not 2 <= size <= limits.RDMA_TOOL_MESSAGE_MAX or rounds < 1:
            raise Misuse(f"{rounds} rounds of {size} bytes", remedy="one round of two bytes, at least")
        super().__init__(device, PLAIN, 2, INFO.size, failed)
        self._rounds = rounds
        self._text, self._text_at = self._place(size)
        self._sink, self._sink_at = self._place(size)
        self._writes_next = False
        self.messages = 0  # rounds that are done
        self.ended = False  # the connection is over, or never was

    def connect(self, address: str, service_id: int) -> None:
        """The first round begins when there is a connection."""
        self.connection = self.device.cm.connect(address, service_id, self.qp, b"", self._told)

    def received(self, index: int, length: int) -> None:
        """The server has read, or written."""
        if length != INFO.size:
            raise PeerViolation(f"{length} bytes that are none of rping's messages", rule="unexpected")
        self.post_receive(index)
        if not self._writes_next:
            self._writes_next = True
            self._sink[:] = bytes(len(self._sink))
            self.qp.post_send(Send(0, (self._sink_at,)))
        elif self._sink != self._text:
            raise PeerViolation(f"what came back in round {self.messages} is not what was sent", rule="content")
        else:
            self.messages += 1
            self._begin()

    def _begin(self) -> None:
        if self.messages < self._rounds:
            self._writes_next = False
            self._text[:] = text_of(self.messages, len(self._text))
            self.qp.post_send(Send(0, (self._text_at,)))
        elif self.connection is not None:
            self.connection.disconnect()

    def _place(self, size: int) -> tuple[bytearray, bytes]:
        """Memory for the server, and how it is told of it."""
        memory = self.memory(bytearray(size), _REMOTE)
        region = self.regions[-1]
        return memory, INFO.pack(region.va, region.rkey, size)

    def _told(self, connection: Connection, event: ConnectionEvent) -> None:
        self.connection = connection
        match event:
            case Established():
                self._begin()
            case Rejected() | Unreachable():
                self.ended = True
                self.fail(f"no connection: {event}")
            case Disconnected():
                self.ended = True
                if self.messages < self._rounds:
                    self.fail("the connection has ended")
            case TimewaitExit():
                pass
