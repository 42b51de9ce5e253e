"""An offer and its claim, both ends of one connection on this host, for the protocol that carries them."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from sidestep.errors import Unavailable
from sidestep.native.layout import Attach, Rpc
from sidestep.provider.carry import local_relay
from sidestep.provider.carry.local_relay import LocalEnd
from sidestep.provider.clients import Brought, Client
from sidestep.provider.pairing.shared import Shared
from sidestep.provider.rpc import Message, Packet
from sidestep.switch.link import Link
from sidestep.switch.offers import Offer
from sidestep.switch.protocol import Request


@dataclass(slots=True)
class LocalPair:
    """One (`sidestep.switch.protocol.Pair`)."""

    shared: Shared
    offer: Offer[Brought]
    claimer: Client
    claim: Packet
    taken: bool = False
    carried: bool = False  # both ends have got an answer, and it is no refusal
    relays: tuple[LocalEnd, ...] = ()

    @property
    def request(self) -> Request:
        return self.offer.brought.request

    def attach(self) -> None:
        """Hands each end what the other brought."""
        self._take()
        self.carried = True
        shared, offer, message = self.shared, self.offer, self.claim.message
        attach = Message(
            type=Rpc.ATTACH, token=message.token, ring_size=offer.ring_size, segment_id=offer.segment_id,
            doorbell_page_id=offer.doorbell_page_id, doorbell_index=offer.doorbell_index,
        )  # fmt: skip
        if not shared.send(self.claimer, attach, offer.brought.descriptors.numbers):
            return  # the offer stays for a claimer that lives, unless it was its own and went with it
        shared.claimed(
            offer, self.claim.descriptors.numbers, ("claim_matched",), doorbell_index=message.doorbell_index,
            doorbell_page_id=self.claimer.doorbell_name(message.doorbell_page_id),
        )  # fmt: skip

    def carry(self, connected: Link, accepted: Link) -> tuple[LocalEnd, LocalEnd]:
        """Hands each end a channel with the provider; raises Unavailable."""
        self._take()
        shared, offer = self.shared, self.offer
        shared.need_home(offer.key.netns_cookie, self.claim.message.netns_cookie)
        second_id = blake2b(offer.segment_id, digest_size=16).digest()
        with shared.segments.made(second_id, offer.ring_size, self.claimer.uid) as made:
            relays = self._enter((connected, accepted), made, second_id)
        self.carried = True
        return relays

    def _enter(self, links: tuple[Link, Link], made: int, second_id: bytes) -> tuple[LocalEnd, LocalEnd]:
        shared, offer, claimer, message = self.shared, self.offer, self.claimer, self.claim.message
        doorbell = shared.hub.descriptors()
        ends = shared.offerer_end(offer), shared.claimer_end(made, claimer, offer.key.mirrored(), self.claim)
        self.relays = relays = local_relay.enter(
            shared.hub, ends, links,
            protocol=offer.protocol, on_drop=lambda: shared.segments.release_second(second_id),
        )  # fmt: skip
        attach = Message(
            type=Rpc.ATTACH, token=message.token, flags=Attach.RELAYED, ring_size=offer.ring_size,
            segment_id=second_id,  # two names, so that an observer sees that the ends share no channel
            doorbell_page_id=shared.hub.doorbell_id,
        )  # fmt: skip
        if not shared.send(claimer, attach, (made, *doorbell)):
            self.leave()
            raise Unavailable("the end that claimed it has gone")
        shared.claimed(
            offer, doorbell, ("claim_matched",), flags=Attach.RELAYED, doorbell_page_id=shared.hub.doorbell_id
        )
        return relays

    def leave(self) -> None:
        """Leaves both ends on TCP, as the protocol gives up and no other would serve them."""
        for relay in self.relays[:1]:
            relay.cut_off()

    def _take(self) -> None:
        if self.taken:
            raise AssertionError("a pair is carried once")
        self.taken = True
