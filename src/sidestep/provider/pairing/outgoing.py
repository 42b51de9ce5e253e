"""Offers whose other end is on another host: a protocol finds it there, and carries the bytes itself or by a worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from sidestep.errors import Unavailable
from sidestep.gain import Profile
from sidestep.loop import nothing
from sidestep.native.layout import Attach, Refusal
from sidestep.provider.carry import remote_relay
from sidestep.provider.carry.remote_relay import RemoteRelay
from sidestep.provider.clients import Brought
from sidestep.provider.pairing.shared import Shared, fields_of
from sidestep.provider.proof.lookup import endpoint_of
from sidestep.provider.workers.pool import Delegated
from sidestep.switch.link import Link
from sidestep.switch.offers import Offer
from sidestep.switch.protocol import OffloadProtocol, Request


@dataclass(slots=True, eq=False)
class RemoteOffer:
    """One (`sidestep.switch.protocol.Outgoing`)."""

    shared: Shared
    offer: Offer[Brought]
    profile: Profile | None  # figures by which it has to gain

    def reach_out(self, carrier: OffloadProtocol) -> None:
        """Has the protocol find the other end."""
        try:
            carrier.connect(self)
        except Unavailable as error:
            self.refuse(error.message)
        except Exception as error:  # a stranger's code: the others go on
            self.shared.protocols.fail(carrier.name, error)
            self.refuse("the protocol failed")

    @property
    def request(self) -> Request:
        return self.offer.brought.request

    @property
    def uid(self) -> int:
        return self.offer.owner

    @property
    def wanted(self) -> bool:
        return self.offer in self.shared.offers

    def carry(self, link: Link, profile: Profile | None = None) -> RemoteRelay:
        """Hands the program a channel with the provider; raises Unavailable."""
        shared, offer = self.shared, self.offer
        self._need_wanted()
        try:
            own_doorbell = shared.hub.descriptors()
            end = shared.offerer_end(offer)
        except OSError as error:
            raise Unavailable(f"the channel cannot be mapped: {error.strerror}") from error
        # no call when it is dropped: the segment is the offerer's, and the sweep finds out when it is gone
        relay = remote_relay.enter(shared.hub, end, protocol=offer.protocol, on_drop=nothing, link=link,
                                   segment_id=offer.segment_id, uid=offer.owner)  # fmt: skip
        self.profile = profile
        self.tell(shared.hub.doorbell_id, own_doorbell)
        return relay

    def refuse(self, why: str, *, full: bool = False) -> None:
        """Leaves the connection on TCP; does nothing once it has been served."""
        if self.wanted:
            shared, offer, refusal = self.shared, self.offer, Refusal.NO_BUDGET if full else Refusal.NO_PROTOCOL
            shared.offers.handle_claimed(offer)
            shared.release(offer)
            client, key = shared.clients[offer.client], offer.key
            place = endpoint_of(key.remote_addr, key.remote_port)
            shared.decisions.fail(client.subject, place, offer.protocol, why, refusal)
            shared.refuse_offer(client, offer.token, refusal)

    def delegate(self) -> Delegated:
        """Facts for a worker that is to be the other end of its channel; raises Unavailable."""
        self._need_wanted()
        offer = self.offer
        return Delegated(
            offer.key, offer.brought.evidence.cookie, 1, offer.segment_id, offer.doorbell_page_id, offer.doorbell_index,
            self.shared.clients[offer.client], offer.owner, offer.brought.descriptors.numbers, self.tell,
            partial(self.refuse, ""), nothing,  # the segment is the offerer's: the sweep finds out when it is gone
        )  # fmt: skip

    def tell(self, doorbell_id: bytes, doorbell: Sequence[int]) -> bool:
        """Answers the offer: its channel has another end, rung by that doorbell. False: offer or maker is gone."""
        if not self.wanted:
            return False
        counted = ("remote_joined", "connect")
        return self.shared.claimed(
            self.offer, doorbell, counted,
            flags=Attach.RELAYED, doorbell_page_id=doorbell_id, **fields_of(self.profile),
        )  # fmt: skip

    def _need_wanted(self) -> None:
        if not self.wanted:
            raise Unavailable("the connection does not wait any more")
        self.shared.need_home(self.offer.key.netns_cookie)
