"""The link of one connection between two providers: their words to each other, and the duties of either side.

A protocol that is `remote` makes links; `sidestep.provider.carry.remote_relay` carries connections over them.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from sidestep.rdma.verbs import Lent, SendRing


class Control(IntEnum):
    """Words of one provider to the other about one connection, each with a count.

    "It" is the sender of the word, and its application.
    """

    ATTACHED = 1  # our application holds its channel; count: bytes of its rings, sent << 32 | read
    READY = 2  # the application may be sent to by ring
    SWITCHED = 3  # the application sends by ring, from this offset of its stream on
    DATA = 4  # data: as many bytes follow
    READ = 5  # the application has read as many bytes of its ring, in all
    ASK = 6  # the application asks the other back to TCP; count 1, behind ROUNDS: no more
    RECALL = 7  # the application reads no more by ring; its unread bytes, from this count on, come again by TCP
    BACK = 8  # the application sends by TCP again; count: of the bytes of its ring, all of which have gone before
    SHUT = 9  # the application has ended its direction, and is still there; count: as with BACK
    CLOSED = 10  # no process holds it; count: of the bytes that it has read
    ENDED = 11  # a word behind CLOSED: all that it sent by ring has gone before; count: as with BACK
    FIN_SEEN = 12  # the native socket has read the end of the stream
    ACKED = 13  # `Acked` bits, as count: the requests that these name are done
    RESET = 14  # bytes are lost: reset the connection
    LEAVE = 15  # each takes its incoming direction back to TCP, without its application's help; count 1: to make room
    ARRIVED = 16  # BACK, SHUT or ENDED has come, with all before it; count: its own
    RESENDS = 17  # RECALL has come, and the bytes that it asks for come by TCP
    # READY may come again behind BACK; count 1: SPACER, too. Not to a provider without the word (`Link.rounds`).
    ROUNDS = 18
    SPACER = 19  # an urgent byte follows this round by TCP: is a spacer to go ahead? Answered by ACKED


class Link(Protocol):
    """The way to the other provider: ordered, reliable, and not for ever."""

    @property
    def rounds(self) -> bool:
        """True if the other provider is known to know the word ROUNDS; False leaves it open."""

    spacers: bool  # the other provider is known to know the word SPACER; False leaves it open

    @property
    def room(self) -> int:
        """Pieces of data that the link takes now; it calls `Carried.handle_room` once it takes more."""

    def send_control(self, control: Control, count: int = 0) -> None:
        """Queues a word."""

    def send(self, piece: memoryview) -> None:
        """Queues a piece of data; its memory stays as it is until the other provider has sent READ."""

    def finish(self, on_gone: Callable[[], object]) -> None:
        """Ends this side: queued words and data still go out, and anything that arrives is discarded.

        `on_gone` is called once, when the other end has all of it or will never have it, within seconds.
        """

    buffered: bool  # data is copied into messages: advertised memory would keep the link from being lent

    @property
    def under_way(self) -> int:
        """Words and pieces that the other end does not have yet; falls while nothing is added."""

    @property
    def plain(self) -> bool:
        """True if the link could be lent as soon as nothing is under way."""

    def lend(self, record: dict[str, int]) -> Lent | None:
        """Returns the wire for the engine, and fills the record with its state, if nothing is under way; else None."""

    def take_back(self, record: dict[str, int], error: int) -> None:
        """The engine has given it back; `error`: the errno that broke the wire, or 0."""

    def details(self) -> dict[str, object]:
        """The link's present state, for people."""


class Carried(Protocol):
    """One end of a connection, as its link sees it."""

    lost: bool  # the connection is over, or carried no more
    on_over: Callable[[], None]  # called once when it is

    @property
    def memory(self) -> memoryview:
        """Memory in which all pieces of data that it sends lie, to be registered."""

    @property
    def ring(self) -> SendRing:
        """The part of that which is used while they are read in time."""

    @property
    def moved(self) -> int:
        """Bytes that its application has sent and received by ring, whether the engine or Python carried them."""

    @property
    def failed(self) -> bool:
        """True if it was reset for a reason that the other side may not know."""

    def handle_room(self) -> None:
        """The link takes data again."""

    def reclaim(self) -> None:
        """Takes it back from the engine, if lent, because its link is about to be used."""

    def handle_control(self, control: Control, count: int) -> None:
        """Handles any word but DATA; raises PeerViolation once it is reset for that."""

    def data_room(self, length: int) -> tuple[memoryview, ...] | None:
        """Memory for the next bytes; None: discard them. Raises PeerViolation if they must not come."""

    def handle_data(self, length: int) -> None:
        """Takes in `length` bytes that have come into that room."""

    def leave(self, *, crowded: bool = False) -> None:
        """Takes the connection back to TCP, if it can; `crowded`: to make room for another one."""

    def reset(self, reason: str) -> None:
        """The connection is to be reset, here and there."""

    def handle_farewell(self) -> None:
        """Takes note that the other side has finished; `break_off` is next, unless it is over by that."""

    def break_off(self) -> int | None:
        """Handles a broken link: returns the bytes that count as arrived over it, always the same; None: it is over."""

    def handle_arrived(self, count: int | None) -> bool:
        """Takes the number of bytes that arrived at the other side; None: unknown. Returns False if it is over now."""

    def handle_resynced(self) -> None:
        """Expects all bytes that have not arrived here by TCP."""
