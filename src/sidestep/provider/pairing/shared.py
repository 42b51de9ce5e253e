"""Tables that the parts of pairing share: offers and clients, and the words by which a client is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sidestep.counters import Counters
from sidestep.errors import Unavailable
from sidestep.gain import Profile
from sidestep.native import _channel
from sidestep.native.layout import Refusal, Rpc
from sidestep.provider.carry.hub import End, Hub
from sidestep.provider.clients import Brought, Client
from sidestep.provider.decisions import Decisions
from sidestep.provider.pairing.registry import Registry
from sidestep.provider.pairing.segments import Segments
from sidestep.provider.proof.lookup import SocketProver
from sidestep.provider.rpc import Message, Packet
from sidestep.switch.modules import Protocols
from sidestep.switch.offers import ClientId, ConnectionKey, Offer, OfferTable
from sidestep.switch.protocol import Services


def fields_of(profile: Profile | None) -> dict[str, Any]:
    """Fields of a message by which a shim judges whether a connection's way to another host is worth it."""
    if profile is None:
        return {}
    message_ns, mib_ns, turn_ns = profile.nanoseconds
    return {"promote_after_calls": message_ns, "promote_after_bytes": mib_ns, "turns": turn_ns}


@dataclass(slots=True)
class Shared:
    """`send` delivers a message at once, or drops the client and says False."""

    registry: Registry
    protocols: Protocols
    decisions: Decisions
    counters: Counters
    clients: Mapping[ClientId, Client]
    offers: OfferTable[Brought]
    segments: Segments
    ring_size: tuple[int, int]  # sizes for programs that other hosts ask for
    netns_cookie: int
    services: Services
    send: Callable[..., bool]
    hub: Hub
    prover: SocketProver  # proves that the ends of connections through the provider are still held
    closing: bool = False  # no more offers are taken in

    def need_home(self, *netns_cookies: int) -> None:
        """Raises Unavailable for a socket of another network namespace than the provider's."""
        if any(each != self.netns_cookie for each in netns_cookies):
            raise Unavailable("a provider in between does not see the holders of a socket of another network namespace")

    def end(
        self,
        segment: int,
        side: int,
        client: Client,
        key: ConnectionKey,
        cookie: int,
        doorbell_name: bytes,
        doorbell_index: int,
        doorbell: Sequence[int],
    ) -> End:
        """One application's end of a channel with the provider."""
        return End(
            _channel.map(segment, side), doorbell_name, doorbell_index, doorbell[0], doorbell[1],
            held=lambda: self.prover.holds(key, cookie), received=lambda: self.prover.received(key, cookie),
            client_open=lambda: client.open,
        )  # fmt: skip

    def claimer_end(self, made: int, client: Client, key: ConnectionKey, claim: Packet) -> End:
        """End of the client that made a claim, in a segment of ours."""
        message = claim.message
        return self.end(
            made, 0, client, key, message.cookie, client.doorbell_name(message.doorbell_page_id),
            message.doorbell_index, claim.descriptors.numbers,
        )  # fmt: skip

    def offerer_end(self, offer: Offer[Brought]) -> End:
        """End of the client that made an offer."""
        segment, *doorbell = offer.brought.descriptors.numbers
        return self.end(
            segment, 1, self.clients[offer.client], offer.key, offer.brought.evidence.cookie, offer.doorbell_page_id,
            offer.doorbell_index, doorbell,
        )  # fmt: skip

    def claimed(self, offer: Offer[Brought], doorbell: Sequence[int], counted: tuple[str, ...], **fields: Any) -> bool:
        """Answers an offer that has been served, and closes its descriptors. False: its maker is gone."""
        self.offers.handle_claimed(offer)
        self.registry.handle_removed(offer.brought.bucket)
        offer.brought.close()
        if not self.send(self.clients[offer.client], Message(type=Rpc.CLAIMED, token=offer.token, **fields), doorbell):
            return False
        self.counters.add(*counted)
        return True

    def release(self, offer: Offer[Brought]) -> None:
        """Releases the memory and descriptors of an offer that was not claimed."""
        self.registry.handle_removed(offer.brought.bucket)
        self.segments.budget.release(offer.segment_id)
        offer.brought.close()

    def refuse_offer(self, client: Client, token: int, refusal: Refusal, profile: Profile | None = None) -> None:
        """Refuses an offer; `profile`: figures by which it has to gain, sent if it does not."""
        self.counters.add("offer_refused", refusal.name)
        fields = fields_of(profile) if refusal is Refusal.LATENCY else {}
        self.send(client, Message(type=Rpc.REFUSED, token=token, reason=refusal, **fields))

    def refuse_claim(self, client: Client, token: int, refusal: Refusal) -> None:
        self.counters.add("claim_refused", refusal.name)
        self.send(client, Message(type=Rpc.REFUSED, token=token, reason=refusal))
