"""The switch's end of a channel whose other end is an application, for protocols that stand in between.

A protocol is called by `on_change` and does a bounded amount of work. Anything left over is offered again in the next
turn of the provider's loop, after all others. Bytes are read and written where they lie, in the application's ring.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable


class Stream(ABC):
    """Bytes from and to one application; all counts are bytes."""

    on_change: Callable[[], None]  # called when there may be more to read or more room, or the stream may have ended

    @abstractmethod
    def readable(self) -> tuple[memoryview, ...]:
        """Bytes that the application has sent and no caller has consumed, in place: at most two pieces (rings wrap).

        The application can still write there: look at a byte once.
        """

    @abstractmethod
    def consume(self, count: int) -> None:
        """The first `count` of these bytes are done with; their views must not be used any more."""

    @abstractmethod
    def writable(self) -> tuple[memoryview, ...]:
        """The room there is for bytes to the application: at most two pieces, to be filled in order."""

    @abstractmethod
    def commit(self, count: int) -> None:
        """The first `count` bytes of the room have been filled; the application may read them."""

    @property
    @abstractmethod
    def ended(self) -> bool:
        """True if the application has ended its direction and every byte of it has been consumed."""

    @property
    @abstractmethod
    def lost(self) -> bool:
        """True if the connection has been reset or left: no read or write is possible, only `close`."""

    @abstractmethod
    def end(self) -> None:
        """No more bytes to the application: after what was committed it reads the end of the stream."""

    @abstractmethod
    def close(self) -> None:
        """Done with it, if it `ended` and `end` was called; else leaves, and twice is allowed.

        A connection that is left goes back to TCP, or is reset if bytes of it are with the protocol.
        """
