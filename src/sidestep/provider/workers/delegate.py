"""Ends of connections with other hosts that a worker carries (`workers`), and what the provider keeps of them.

The provider has the clients and their offers and claims; the worker gets descriptors, and the facts that a `Far` wants.
Until it has carried the end its application is told nothing: it may withdraw, or go, and the end is then not `taken`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from sidestep.provider import rpc
from sidestep.provider.clients import Brought, Client
from sidestep.switch.offers import ConnectionKey, Offer

if TYPE_CHECKING:
    from sidestep.provider.pairing.pairing import Pairing


@dataclass(frozen=True, slots=True)
class LentEnd:
    """An application's end of a channel, in what can be told to another process."""

    key: ConnectionKey
    cookie: int
    side: int  # of the segment, that of who carries it
    segment_id: bytes
    doorbell_name: bytes
    doorbell_index: int


class Lent(Protocol):
    """An end of a connection with another host that a worker is to carry, or refuse."""

    end: LentEnd
    client: Client

    @property
    def uid(self) -> int:
        """Whose it is."""

    @property
    def fds(self) -> tuple[int, ...]:
        """The application's segment, doorbell and its page; none any more once `taken` or `refuse` was called."""

    def taken(self, doorbell_id: bytes, doorbell: Sequence[int]) -> bool:
        """Its application is told whose doorbell to ring from now on; False: it does not want that any more."""

    def refuse(self) -> None:
        """It stays on TCP; does nothing once it has been `taken`."""

    def over(self) -> None:
        """It was carried and is not any more, or was not `taken`."""


@dataclass(slots=True, eq=False)
class LentOffer:
    """One that opened its connection."""

    pairing: Pairing
    offer: Offer[Brought]
    end: LentEnd
    client: Client

    @property
    def uid(self) -> int:
        return self.offer.owner

    @property
    def fds(self) -> tuple[int, ...]:
        return self.offer.brought.descriptors.numbers

    def taken(self, doorbell_id: bytes, doorbell: Sequence[int]) -> bool:
        """Its application is told."""
        return self.pairing.tell_offerer(self.offer, doorbell_id, doorbell)

    def refuse(self) -> None:
        """It stays on TCP."""
        self.pairing.refuse_offered(self.offer, "")

    def over(self) -> None:
        """The segment is the offerer's: the sweep finds out when it is gone."""


@dataclass(slots=True, eq=False)
class LentClaim:
    """One that accepted its connection."""

    pairing: Pairing
    end: LentEnd
    client: Client
    token: int
    segment: rpc.Descriptors
    doorbell: rpc.Descriptors
    waits: bool = True  # its application has not been answered

    @property
    def uid(self) -> int:
        return self.client.uid

    @property
    def fds(self) -> tuple[int, ...]:
        """The segment, which we have made, and the application's doorbell."""
        return (*self.segment.numbers, *self.doorbell.numbers)

    def taken(self, doorbell_id: bytes, doorbell: Sequence[int]) -> bool:
        """Its application is told."""
        if not self.waits:
            return False
        (segment,) = self.segment.numbers
        told = self.pairing.tell_claimer(self.client, self.token, self.end.segment_id, segment, doorbell_id, doorbell)
        self.withdraw()
        return told

    def refuse(self) -> None:
        """It stays on TCP."""
        if self.waits:
            self.pairing.refuse_lent(self)
            self.withdraw()

    def withdraw(self) -> None:
        """It has been answered, or wants no answer any more."""
        if self.waits:
            self.waits = False
            self.pairing.handle_lent(self)
            self.segment.close()
            self.doorbell.close()

    def over(self) -> None:
        """Its memory is given back."""
        self.withdraw()
        self.pairing.release_lent(self.end.segment_id)
