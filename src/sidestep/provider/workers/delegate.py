"""Ends of connections with other hosts that a worker carries (`pool`), and what the provider keeps of them.

The provider has the clients and their offers and claims; the worker gets descriptors, and the facts that a
`RemoteRelay` wants. Until it has carried the end its application is told nothing: it may withdraw, or go, and the end
is then not `taken`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sidestep.provider import rpc
from sidestep.provider.clients import Brought, Client
from sidestep.switch.offers import ConnectionKey, Offer


@dataclass(frozen=True, slots=True)
class DelegatedEnd:
    """An application's end of a channel, in what can be told to another process."""

    key: ConnectionKey
    cookie: int
    side: int  # of the segment, that of who carries it
    segment_id: bytes
    doorbell_name: bytes
    doorbell_index: int


class Delegated(Protocol):
    """An end of a connection with another host that a worker is to carry, or refuse."""

    end: DelegatedEnd
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
class DelegatedOffer:
    """One that opened its connection."""

    offer: Offer[Brought]
    end: DelegatedEnd
    client: Client
    tell: Callable[[bytes, Sequence[int]], bool]  # its application
    refuse_offer: Callable[[str], None]

    @property
    def uid(self) -> int:
        return self.offer.owner

    @property
    def fds(self) -> tuple[int, ...]:
        return self.offer.brought.descriptors.numbers

    def taken(self, doorbell_id: bytes, doorbell: Sequence[int]) -> bool:
        return self.tell(doorbell_id, doorbell)

    def refuse(self) -> None:
        self.refuse_offer("")

    def over(self) -> None:
        """The segment is the offerer's: the sweep finds out when it is gone."""


@dataclass(slots=True, eq=False)
class DelegatedClaim:
    """One that accepted its connection."""

    end: DelegatedEnd
    client: Client
    token: int
    segment: rpc.Descriptors  # which we have made
    doorbell: rpc.Descriptors  # of the application
    tell: Callable[[DelegatedClaim, bytes, Sequence[int]], bool]  # its application
    refuse_claim: Callable[[], None]
    on_answered: Callable[[DelegatedClaim], None]
    on_over: Callable[[], None]
    waits: bool = True  # its application has not been answered

    @property
    def uid(self) -> int:
        return self.client.uid

    @property
    def fds(self) -> tuple[int, ...]:
        return (*self.segment.numbers, *self.doorbell.numbers)

    def taken(self, doorbell_id: bytes, doorbell: Sequence[int]) -> bool:
        if not self.waits:
            return False
        told = self.tell(self, doorbell_id, doorbell)
        self.withdraw()
        return told

    def refuse(self) -> None:
        if self.waits:
            self.refuse_claim()
            self.withdraw()

    def withdraw(self) -> None:
        """It has been answered, or wants no answer any more."""
        if self.waits:
            self.waits = False
            self.on_answered(self)
            self.segment.close()
            self.doorbell.close()

    def over(self) -> None:
        """Its memory is given back."""
        self.withdraw()
        self.on_over()
