"""The switch's end of a channel whose other end is an application, for protocols that stand in between.

A protocol is called by `on_change` and does a bounded amount of work: what it leaves is offered again in the next turn
of the provider's loop, after everybody else's. Bytes are read and filled where they lie, in the application's ring.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable


class Stream(ABC):
    """Bytes from and to one application; all counts are bytes."""

    on_change: Callable[[], None]  # called when there may be more to read or more room, or the end was told

    @abstractmethod
    def readable(self) -> tuple[memoryview, ...]:
        """What the application has sent and nobody has consumed, where it lies: at most two pieces (rings wrap).

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
        """Whether the application has ended its direction and every byte of it has been consumed."""

    @property
    @abstractmethod
    def lost(self) -> bool:
        """Whether the connection has been reset or left: nothing can be read or written, `close` is all there is."""

    @abstractmethod
    def end(self) -> None:
        """No more bytes to the application: after what was committed it reads the end of the stream."""

    @abstractmethod
    def close(self) -> None:
        """Done with it, if it `ended` and `end` was called; else leaves, and twice is allowed.

        A connection that is left goes back to TCP, or is reset if bytes of it are with the protocol.
        """
