"""State of a connection of which this provider has one end: its two directions, how each ends, which provider leaves.

Theory of operation. `layout.Tx` and `layout.Rx` have the states of a connection's two shims. A provider between follows
them, with five small machines for each of its ends. `Out` is the direction from our application to the link, `In` the
one from the link to our application. Either may be called off while bytes are under way. For `Out` that is a state, as
nothing more is sent then. For `In` it is a machine of its own (`Recall`), as the other end may send any word until it
knows of that. The end of an application's direction (`Ending`) goes on in any state of its ring, since it ends TCP as
well. There is one for ours, as far as the other provider knows, and one for theirs, as far as we know. `Leaving` says
which of the two providers goes.

The provider passes on the words that the two shims would exchange in a segment, each behind the bytes that it follows:
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, Final, TypeVar

from sidestep.errors import PeerViolation

StateT = TypeVar("StateT", bound=Enum)


class Out(Enum):
    """The direction from our application."""

    APART = 0  # an application has not attached
    TCP = 1  # bytes go by TCP
    INVITED = 2  # READY has come: it may go to its ring
    RING = 3  # SWITCHED is sent: the bytes of its ring go over the link
    BACK = 4  # BACK is sent: all of these have gone, and later bytes go by TCP, until READY comes again
    RECALLED = 5  # bytes that the other application has not read go by TCP, and nothing over the link


class OutEvent(Enum):
    """Event that moves the direction from our application."""

    MET = 0  # both applications have attached
    INVITED = 1  # READY has come
    SWITCHED = 2  # the direction has gone to its ring
    BACK = 3  # the direction has gone back to TCP, and the link has all that its ring held
    RECALLED = 4  # RECALL has come, or the link is broken; our application sends again


class In(Enum):
    """The direction to our application."""

    APART = 0  # our application has not attached
    ATTACHED = 1  # our application has, and ATTACHED is sent; the other one has not
    TCP = 2  # both have attached; bytes come by TCP
    CONSENTED = 3  # READY is sent: bytes may come over the link
    RING = 4  # SWITCHED has come: so they do
    BACK = 5  # BACK has come: all of them are here, and later bytes come by TCP, until READY is sent again


class InEvent(Enum):
    """Event that moves the direction to our application."""

    ATTACHED = 0  # our application has attached
    MET = 1  # both have attached
    CONSENT = 2  # our application consents
    SWITCHED = 3  # SWITCHED has come
    BACK = 4  # BACK has come


class Recall(Enum):
    """State of a recall: whether bytes to our application are wanted again by TCP."""

    NOT = 0  # bytes of the link go to its ring
    OURS = 1  # RECALL is sent, as a provider goes: bytes are kept until it is known whether they come again
    TAKEN = 2  # recalled bytes come again: bytes of the link are discarded
    REQUESTED = 3  # RECALL is sent for our application, which reads its ring no further: link bytes are discarded
    GRANTED = 4  # and they come again


class RecallEvent(Enum):
    """Event that moves a recall."""

    TAKE = 0  # a provider goes
    WANT = 1  # our application reads its ring no further
    RESENDS = 2  # RESENDS has come
    REFUSED = 3  # the other application had gone back, or ended, behind bytes that are kept: they go to the ring


class Ending(Enum):
    """End of an application's direction, as far as the other end knows."""

    OPEN = 0  # no end yet
    SHUT = 1  # SHUT is sent: nothing follows; the application is still there
    CLOSED = 2  # CLOSED is sent: the application is gone, and its last bytes may still be under way
    SHUT_CLOSED = 3  # both
    ENDED = 4  # ENDED is sent: all bytes that it sent by ring have gone before


class EndEvent(Enum):
    """Word of an application's provider about its end, and the event there as well."""

    SHUT = 0  # SHUT
    CLOSED = 1  # CLOSED
    ENDED = 2  # ENDED


class Leaving(Enum):
    """State of a connection that goes back to TCP because a provider goes."""

    STAYS = 0  # no leave
    LEADS = 1  # ours goes, and waits until the other has let go
    FOLLOWS = 2  # theirs goes, or both do: it is let go as soon as nothing depends on it


class LeaveEvent(Enum):
    """Event that makes a provider go."""

    LEAVE = 0  # ours
    REQUESTED = 1  # LEAVE has come


OUT_TRANSITIONS: Final[dict[tuple[Out, OutEvent], Out]] = {
    (Out.APART, OutEvent.MET): Out.TCP,
    (Out.TCP, OutEvent.INVITED): Out.INVITED,
    (Out.TCP, OutEvent.RECALLED): Out.RECALLED,  # consent and recall were seen at once, and never sent apart
    (Out.INVITED, OutEvent.SWITCHED): Out.RING,
    (Out.INVITED, OutEvent.BACK): Out.BACK,
    (Out.INVITED, OutEvent.RECALLED): Out.RECALLED,
    (Out.RING, OutEvent.BACK): Out.BACK,
    (Out.RING, OutEvent.RECALLED): Out.RECALLED,
    (Out.BACK, OutEvent.INVITED): Out.INVITED,  # consent to the next round
    (Out.BACK, OutEvent.RECALLED): Out.RECALLED,  # a recall behind its last byte, else it cannot send again
    (Out.RECALLED, OutEvent.INVITED): Out.RECALLED,  # too late
}

IN_TRANSITIONS: Final[dict[tuple[In, InEvent], In]] = {
    (In.APART, InEvent.ATTACHED): In.ATTACHED,
    (In.ATTACHED, InEvent.MET): In.TCP,
    (In.TCP, InEvent.CONSENT): In.CONSENTED,
    (In.CONSENTED, InEvent.SWITCHED): In.RING,
    (In.CONSENTED, InEvent.BACK): In.BACK,  # a return without a switch
    (In.RING, InEvent.BACK): In.BACK,
    (In.BACK, InEvent.CONSENT): In.CONSENTED,  # consent to the next round
}

# RESENDS may come at any time, about bytes that have come already (`Recall.NOT`).
RECALL_TRANSITIONS: Final[dict[tuple[Recall, RecallEvent], Recall]] = {
    (Recall.NOT, RecallEvent.TAKE): Recall.OURS,
    (Recall.NOT, RecallEvent.WANT): Recall.REQUESTED,
    (Recall.NOT, RecallEvent.RESENDS): Recall.NOT,
    (Recall.OURS, RecallEvent.WANT): Recall.REQUESTED,
    (Recall.OURS, RecallEvent.RESENDS): Recall.TAKEN,
    (Recall.OURS, RecallEvent.REFUSED): Recall.NOT,
    (Recall.TAKEN, RecallEvent.WANT): Recall.GRANTED,
    (Recall.TAKEN, RecallEvent.RESENDS): Recall.TAKEN,
    (Recall.REQUESTED, RecallEvent.RESENDS): Recall.GRANTED,
    (Recall.GRANTED, RecallEvent.RESENDS): Recall.GRANTED,
}

ENDING_TRANSITIONS: Final[dict[tuple[Ending, EndEvent], Ending]] = {
    (Ending.OPEN, EndEvent.SHUT): Ending.SHUT,
    (Ending.OPEN, EndEvent.CLOSED): Ending.CLOSED,
    (Ending.SHUT, EndEvent.CLOSED): Ending.SHUT_CLOSED,
    (Ending.CLOSED, EndEvent.SHUT): Ending.SHUT_CLOSED,
    (Ending.CLOSED, EndEvent.ENDED): Ending.ENDED,
    (Ending.SHUT_CLOSED, EndEvent.ENDED): Ending.ENDED,
}

LEAVING_TRANSITIONS: Final[dict[tuple[Leaving, LeaveEvent], Leaving]] = {
    (Leaving.STAYS, LeaveEvent.LEAVE): Leaving.LEADS,
    (Leaving.STAYS, LeaveEvent.REQUESTED): Leaving.FOLLOWS,
    (Leaving.LEADS, LeaveEvent.REQUESTED): Leaving.FOLLOWS,
    (Leaving.FOLLOWS, LeaveEvent.REQUESTED): Leaving.FOLLOWS,
}

MACHINES: Final[dict[str, tuple[type[Enum], type[Enum], Mapping[tuple[Any, Any], Enum]]]] = {
    "OUT": (Out, OutEvent, OUT_TRANSITIONS),
    "IN": (In, InEvent, IN_TRANSITIONS),
    "RECALL": (Recall, RecallEvent, RECALL_TRANSITIONS),
    "ENDING": (Ending, EndEvent, ENDING_TRANSITIONS),
    "LEAVING": (Leaving, LeaveEvent, LEAVING_TRANSITIONS),
}

BEFORE: Final = frozenset({Out.TCP, Out.INVITED})  # our application has not gone to its ring
USED: Final = frozenset({Out.INVITED, Out.RING})  # the application may send by ring
AWAITED: Final = frozenset({In.CONSENTED, In.RING})  # bytes may come over the link
AGAIN: Final = frozenset({Recall.TAKEN, Recall.GRANTED})  # recalled bytes come by TCP instead
BY_APPLICATION: Final = frozenset({Recall.REQUESTED, Recall.GRANTED})  # recalls that the application has asked for
SILENT: Final = frozenset({Ending.SHUT, Ending.SHUT_CLOSED, Ending.ENDED})  # states that nothing follows

_NEXT: Final = {pair: to for _, _, transitions in MACHINES.values() for pair, to in transitions.items()}


def moved(state: StateT, event: Enum, *, rule: str = "link_order") -> StateT:
    """The state that follows; raises PeerViolation where there is none."""
    following = _NEXT.get((state, event))
    if following is None:
        raise PeerViolation(f"{event.name} of a direction that is {state.name}", rule=rule)
    assert isinstance(following, type(state))
    return following


class Directions:
    """State of one connection."""

    def __init__(self) -> None:
        self.out = Out.APART
        self.ending = Ending.OPEN  # state as the other provider knows it
        self.into = In.APART
        self.recall = Recall.NOT
        self.peer_ending = Ending.OPEN  # state as we know it
        self.shown = Ending.OPEN  # state as our application knows it: OPEN, SHUT or ENDED
        self.leaving = Leaving.STAYS

    @property
    def left(self) -> bool:
        """True if a provider goes."""
        return self.leaving is not Leaving.STAYS

    @property
    def promised(self) -> bool:
        """True once our ATTACHED is sent: the other provider opens the connection, and its application consents."""
        return self.into is not In.APART

    @property
    def undecided(self) -> bool:
        """True if our application does not know yet how the ring to it ends."""
        return self.into in AWAITED and self.recall not in BY_APPLICATION and self.shown is Ending.OPEN

    @property
    def flows(self) -> bool:
        """True if data may come."""
        return self.into is In.RING and self.peer_ending not in SILENT

    @property
    def given(self) -> bool:
        """True if our application sends nothing by ring any more, and all that it has sent was given to the link."""
        return self.out not in USED or self.ending in SILENT

    @property
    def taken(self) -> bool:
        """True if our application needs nothing by ring any more but the bytes that are there."""
        return self.into not in AWAITED or self.recall in AGAIN or self.shown is not Ending.OPEN
