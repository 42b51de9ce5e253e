"""The link of one connection between two providers: what they say to each other, and what either side of it must do.

A protocol that is `remote` makes links; `sidestep.provider.carry.remote_relay` carries connections over them.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from sidestep.rdma.verbs import Lent, SendRing


class Control(IntEnum):
    """What one provider says to the other of one connection; the count means what is said here."""

    ATTACHED = 1  # our application holds its channel; count: bytes of its rings, sent << 32 | read
    READY = 2  # it may be sent to by ring
    SWITCHED = 3  # it sends by ring, from this offset of its stream on
    DATA = 4  # as many bytes follow
    READ = 5  # it has read as many bytes of its ring, in all
    ASK = 6  # it asks the other back to TCP; count 1, behind ROUNDS: no more
    RECALL = 7  # it reads no more by ring; what it has not read, from this count on, comes again by TCP
    BACK = 8  # it sends by TCP again; count: of the bytes of its ring, all of which have gone before
    SHUT = 9  # it has ended its direction, and is still there; count: as with BACK
    CLOSED = 10  # nobody holds it any more; count: of the bytes that it has read
    ENDED = 11  # behind CLOSED: all that it sent by ring has gone before; count: as with BACK
    FIN_SEEN = 12  # its native socket has told the end
    ACKED = 13  # `Acked` bits, as count: what was said of these is done
    RESET = 14  # bytes are lost: reset the connection
    LEAVE = 15  # each takes back to TCP what comes to it, without its application's help; count 1: to make room
    ARRIVED = 16  # BACK, SHUT or ENDED has come, with all before it; count: its own
    RESENDS = 17  # RECALL has come, and what it wants comes by TCP
    ROUNDS = 18  # READY may come again behind BACK; not said to a provider that would not know it (`Link.rounds`)


class Link(Protocol):
    """The way to the other provider: ordered, reliable, and not for ever."""

    @property
    def rounds(self) -> bool:
        """Whether the other provider is known to know the word ROUNDS; it may be all the same."""

    @property
    def room(self) -> int:
        """How many more pieces of data it takes now; it calls `Carried.handle_room` once there is more."""

    def send_control(self, control: Control, count: int = 0) -> None:
        """Queues a word."""

    def send(self, piece: memoryview) -> None:
        """Queues a piece of data; its memory stays as it is until the other end has told READ."""

    def finish(self, on_gone: Callable[[], object]) -> None:
        """Nothing more is said or sent; what is queued still goes out, and what the other end says is dropped.

        `on_gone` is called once, when the other end has all of it or will never have, in some seconds at most.
        """

    buffered: bool  # its data is copied into messages: advertised memory would keep it from being lent

    @property
    def under_way(self) -> int:
        """Words and pieces that are not with the other end yet; it falls while nothing is added."""

    @property
    def plain(self) -> bool:
        """Whether it could be lent as soon as nothing is under way."""

    def lend(self, record: dict[str, int]) -> Lent | None:
        """Its wire for the engine, and in the record what that needs, if nothing is under way; else None."""

    def take_back(self, record: dict[str, int], error: int) -> None:
        """The engine has given it back; `error`: the errno that broke the wire, or 0."""

    def details(self) -> dict[str, object]:
        """How it is now, for people."""


class Carried(Protocol):
    """One end of a connection, as its link sees it."""

    lost: bool  # it is over, or carried no more
    on_over: Callable[[], None]  # called once when it is

    @property
    def memory(self) -> memoryview:
        """Where all pieces of data lie that it sends; for registering it."""

    @property
    def ring(self) -> SendRing:
        """The part of that which is used while they are read in time."""

    @property
    def moved(self) -> int:
        """Bytes that its application has sent and been given by ring, whoever carries them."""

    @property
    def failed(self) -> bool:
        """Whether it was reset for a reason that the other side may not know."""

    def handle_room(self) -> None:
        """The link takes data again."""

    def reclaim(self) -> None:
        """Takes it back from the engine, if it is lent: somebody is about to use its link."""

    def handle_control(self, control: Control, count: int) -> None:
        """The other side said anything but DATA; raises PeerViolation once it is reset for that."""

    def data_room(self, length: int) -> tuple[memoryview, ...] | None:
        """Where the next bytes go; None: nobody wants them. Raises PeerViolation if they must not come."""

    def handle_data(self, length: int) -> None:
        """So many bytes have come into that room."""

    def leave(self, *, crowded: bool = False) -> None:
        """It is to go back to TCP, if it can; `crowded`: to make room for another one."""

    def reset(self, reason: str) -> None:
        """The connection is to be reset, here and there."""

    def handle_farewell(self) -> None:
        """The other side has finished, and nothing more comes; `break_off` is next, unless it is over by that."""

    def break_off(self) -> int | None:
        """The link is broken: how many bytes count as arrived over it, always the same; None: it is over."""

    def handle_arrived(self, count: int | None) -> bool:
        """So many bytes have arrived at the other side; None: that cannot be found out. False: it is over now."""

    def handle_resynced(self) -> None:
        """What has not arrived here comes by TCP."""
