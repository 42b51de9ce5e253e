"""Offers of a channel that wait for their claim: a table without I/O and without a clock.

The connecting end of a TCP connection offers a channel, the accepting end claims it. Each names the connection by its
own addresses, so the claim's four-tuple is the mirror image of the offer's. The caller passes the time in and proves
with the kernel that both really hold the connection. It closes the descriptors of an offer that has left the table.

Invariants: a connection is offered at most once at a time. Offers expire in the order in which they came, because all
live equally long. The counts per client are exactly the offers in the table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, NewType, Self, TypeVar

from sidestep import limits
from sidestep.native.layout import Refusal

ClientId = NewType("ClientId", int)


Ends = tuple[bytes, int, bytes, int]  # local address and port, remote address and port


class ConnectionKey(NamedTuple):
    """A TCP connection as one end sees it. Addresses are 16 bytes, IPv4 v4-mapped."""

    netns_cookie: int
    local_addr: bytes
    local_port: int
    remote_addr: bytes
    remote_port: int

    @property
    def ends(self) -> Ends:
        """The key without its network namespace."""
        return self[1:]

    def mirrored(self) -> Self:
        """The same connection as the other end sees it."""
        return self._replace(
            local_addr=self.remote_addr,
            local_port=self.remote_port,
            remote_addr=self.local_addr,
            remote_port=self.local_port,
        )


BroughtT = TypeVar("BroughtT")  # descriptors of an offer, which the caller must close


@dataclass(frozen=True, slots=True)
class Offer(Generic[BroughtT]):
    """One channel on offer."""

    client: ClientId
    token: int  # the client's name for it
    key: ConnectionKey
    ring_size: tuple[int, int]  # bytes: offerer to claimer, claimer to offerer
    segment_id: bytes
    doorbell_page_id: bytes
    doorbell_index: int
    protocol: str  # that the switch chose to carry it
    brought: BroughtT
    owner: int = 0  # the client's user


class OfferTable(Generic[BroughtT]):
    """All pending offers of one provider."""

    def __init__(
        self,
        *,
        expiry_s: float = limits.OFFER_EXPIRY_S,
        pending_max: int = limits.OFFERS_PENDING_MAX,
        total_max: int = limits.OFFERS_TOTAL_MAX,
        owner_max: Callable[[int], int] | None = None,
    ) -> None:
        """`owner_max`: how many offers a user may have; None: as many as all together."""
        self._expiry_s = expiry_s
        self._pending_max = pending_max
        self._total_max = total_max
        self._by_key: dict[ConnectionKey, tuple[float, Offer[BroughtT]]] = {}  # offers in order of their deadlines
        self._by_client: dict[ClientId, dict[int, Offer[BroughtT]]] = {}  # offers by token
        self._by_ends: dict[Ends, list[Offer[BroughtT]]] = {}  # offers: one for each namespace, as they came
        self._owner_max = owner_max or (lambda _: total_max)
        self._of_owner: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, offer: Offer[BroughtT]) -> bool:
        found = self._by_key.get(offer.key)
        return found is not None and found[1] is offer

    def check(self, client: ClientId, token: int, key: ConnectionKey, owner: int = 0) -> Refusal | None:
        """Reason why an offer would be refused, or None; changes nothing."""
        of_client = self._by_client.get(client, {})
        if key in self._by_key or token in of_client:
            return Refusal.DUPLICATE
        if (
            len(of_client) >= self._pending_max
            or len(self._by_key) >= self._total_max
            or self._of_owner[owner] >= self._owner_max(owner)
            or len(self._by_ends.get(key.ends, ())) >= limits.ENDS_OFFERED_MAX
        ):
            return Refusal.TOO_MANY
        return None

    def handle_offer(self, offer: Offer[BroughtT], *, now: float) -> Refusal | None:
        """Takes an offer in, or returns the refusal. `now`: monotonic seconds, never less than before."""
        if refusal := self.check(offer.client, offer.token, offer.key, offer.owner):
            return refusal
        self._by_key[offer.key] = (now + self._expiry_s, offer)
        self._by_client.setdefault(offer.client, {})[offer.token] = offer
        self._by_ends.setdefault(offer.key.ends, []).append(offer)
        self._of_owner[offer.owner] += 1
        return None

    def find(self, claim: ConnectionKey) -> Offer[BroughtT] | None:
        """The offer that matches a claim made with this view of the connection; it stays in the table."""
        found = self._by_key.get(claim.mirrored())
        return found[1] if found else None

    def find_elsewhere(self, claim: ConnectionKey) -> list[Offer[BroughtT]]:
        """The offers that would match if they were made in the claim's namespace. That proves nothing."""
        found = self._by_ends.get(claim.mirrored().ends, ())
        return [offer for offer in found if offer.key.netns_cookie != claim.netns_cookie]

    def handle_claimed(self, offer: Offer[BroughtT]) -> None:
        """The offer has been delivered; KeyError if it is not in the table."""
        self._remove(offer)

    def handle_withdraw(self, client: ClientId, token: int) -> Offer[BroughtT] | None:
        """Takes the client's offer out; None if there is none of that token (it may just have been claimed)."""
        offer = self._by_client.get(client, {}).get(token)
        if offer is not None:
            self._remove(offer)
        return offer

    def handle_disconnect(self, client: ClientId) -> list[Offer[BroughtT]]:
        """Takes all offers of a client out."""
        gone = list(self._by_client.get(client, {}).values())
        for offer in gone:
            self._remove(offer)
        return gone

    def poll_expired(self, *, now: float) -> Offer[BroughtT] | None:
        """Takes the next offer out whose time is up; call until None."""
        for deadline, offer in self._by_key.values():
            if deadline > now:
                return None
            self._remove(offer)
            return offer
        return None

    def next_deadline(self) -> float | None:
        """Time at which the next offer expires; None: there is none."""
        return next((deadline for deadline, _ in self._by_key.values()), None)

    def _remove(self, offer: Offer[BroughtT]) -> None:
        del self._by_key[offer.key]
        of_client = self._by_client[offer.client]
        del of_client[offer.token]
        if not of_client:
            del self._by_client[offer.client]
        same_ends = self._by_ends[offer.key.ends]
        same_ends[:] = [other for other in same_ends if other is not offer]
        if not same_ends:
            del self._by_ends[offer.key.ends]
        self._of_owner[offer.owner] -= 1
        if not self._of_owner[offer.owner]:
            del self._of_owner[offer.owner]
