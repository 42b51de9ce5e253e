"""Offers and claims: pairs of ends, and the protocols that carry their bytes.

Each message is checked by its form, by the policy, and by the kernel, before anything changes. An offer that cannot be
served is refused with the reason, and counted; the connection stays on TCP. Two ends on this host are a `LocalPair`. Of
a connection with another host this provider has a `RemoteOffer`, or a search for its end (`Incoming`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sidestep.errors import LimitReached, Unavailable
from sidestep.gain import Profile, Traffic
from sidestep.native.layout import GAIN_MIN_NS, Refusal
from sidestep.provider import memory
from sidestep.provider.clients import Brought, Client
from sidestep.provider.decisions import Verdict
from sidestep.provider.pairing.incoming import Incoming
from sidestep.provider.pairing.local import LocalPair
from sidestep.provider.pairing.outgoing import RemoteOffer
from sidestep.provider.pairing.segments import check_geometry
from sidestep.provider.pairing.shared import Shared
from sidestep.provider.proof.evidence import Evidence, Examiner
from sidestep.provider.proof.lookup import endpoint_of
from sidestep.provider.proof.path import PathProofs, Proof
from sidestep.provider.rpc import Message, Packet, expect
from sidestep.provider.users import Users
from sidestep.switch.offers import ClientId, ConnectionKey, Offer
from sidestep.switch.protocol import Request


class Pairing:
    """Pairs the ends of connections."""

    def __init__(self, shared: Shared, examiner: Examiner, paths: PathProofs, users: Users) -> None:
        self.shared = shared
        self.incoming = Incoming(shared)
        self._examiner = examiner
        self._paths = paths
        self._users = users
        self._searches: dict[tuple[ClientId, int], Search] = {}

    def __len__(self) -> int:
        return len(self.shared.offers)

    def next_deadline(self) -> float | None:
        return self.shared.offers.next_deadline()

    def handle_timeouts(self, now: float) -> None:
        """Refuses the offers whose time is up."""
        while offer := self.shared.offers.poll_expired(now=now):
            self.shared.release(offer)
            self.shared.refuse_offer(self.shared.clients[offer.client], offer.token, Refusal.EXPIRED)

    def handle_disconnect(self, client: Client) -> None:
        """A client has gone, and its offers and claims with it."""
        self.shared.hub.handle_disconnect()
        for search in [one for one in self._searches.values() if one.claimer is client]:
            search.end()
        for offer in self.shared.offers.handle_disconnect(client.client_id):
            self._withdraw(offer)

    # ---- messages ----

    def handle_offer(self, client: Client, packet: Packet) -> None:
        """OFFER: one end is ready for a channel, and brought one."""
        evidence = self._examiner.take(packet, 3)
        try:
            self._take_offer(client, packet, evidence)
        except BaseException:
            evidence.close()
            raise

    def _take_offer(self, client: Client, packet: Packet, evidence: Evidence) -> None:
        shared, message, key = self.shared, packet.message, evidence.key
        segment, doorbell, doorbell_page = packet.descriptors.numbers
        check_geometry(segment, message.ring_size)
        memory.check_doorbell(message.doorbell_index, doorbell, doorbell_page)
        refusal = self._offer_refusal(client, message, evidence)
        profile: Profile | None = None
        if not refusal:
            request = Request(
                endpoint_of(key.local_addr, key.local_port), endpoint_of(key.remote_addr, key.remote_port), None
            )
            elsewhere = key.netns_cookie != shared.netns_cookie
            verdict = shared.decisions.connect(
                client.subject, request, ip_protocol=message.protocol, elsewhere=elsewhere
            )
            refusal = verdict.refusal
        if not refusal and verdict.leaves:
            profile = shared.decisions.profile(verdict)
            refusal = self._loss(client, message, verdict, profile)
        if not refusal and not shared.segments.reserve(message.segment_id, message.ring_size, client.uid):
            refusal = Refusal.NO_BUDGET
        if refusal:
            evidence.close()
            shared.refuse_offer(client, message.token, refusal, profile)
            return
        assert verdict.protocol is not None
        assert verdict.request is not None
        bucket = shared.registry.bucket(key)
        offer = Offer(
            client.client_id, message.token, key, message.ring_size, message.segment_id,
            client.doorbell_name(message.doorbell_page_id), message.doorbell_index, verdict.protocol.name,
            Brought(packet.descriptors.take(), bucket, evidence, verdict.request), client.uid,
        )  # fmt: skip
        if refusal := shared.offers.handle_offer(offer, now=shared.services.loop.now):
            raise AssertionError(f"the table refused what it had checked: {refusal.name}")
        shared.registry.handle_added(bucket)
        shared.counters.add("offer_accepted")
        if verdict.leaves:
            RemoteOffer(shared, offer, profile).reach_out(verdict.protocol)

    def _loss(self, client: Client, message: Message, verdict: Verdict, profile: Profile | None) -> Refusal | None:
        """LATENCY if TCP is faster for the connection's traffic and its program names no protocol, else None."""
        traffic = Traffic(message.promote_after_calls, message.promote_after_bytes, message.turns)
        if profile is None or message.protocol or not traffic.messages:
            return None
        gain_us = profile.gain_us(traffic)
        if gain_us * 1000 >= GAIN_MIN_NS:
            return None
        why = f"{traffic} would take {-gain_us:.0f} us longer than by TCP" if gain_us < 0 else f"{traffic} are too few"
        assert verdict.protocol is not None
        assert verdict.request is not None
        self.shared.decisions.fail(client.subject, verdict.request.remote, verdict.protocol.name, why, Refusal.LATENCY)
        return Refusal.LATENCY

    def _offer_refusal(self, client: Client, message: Message, evidence: Evidence) -> Refusal | None:
        """Reason why an offer cannot be taken in, before the switch is asked; the cheap checks first."""
        if self.shared.closing:
            return Refusal.SHUTTING_DOWN
        if refusal := self.shared.offers.check(client.client_id, message.token, evidence.key, client.uid):
            return refusal
        if message.segment_id in self.shared.segments.budget:
            return Refusal.DUPLICATE
        return self._examiner.refusal(evidence)

    def handle_claim(self, client: Client, packet: Packet) -> None:
        """CLAIM: the other end has seen that there may be an offer for it."""
        evidence = self._examiner.take(packet, 2)
        try:
            memory.check_doorbell(packet.message.doorbell_index, *packet.descriptors.numbers)
            key = evidence.key
            offer = self.shared.offers.find(key)
            elsewhere = self.shared.offers.find_elsewhere(key) if offer is None else []
            refusal = evidence.refusal
            sought = self.incoming.sought(key) if offer is None else None
            if not refusal and offer is None and not elsewhere and sought is None:
                refusal = Refusal.NO_OFFER
            if not refusal:
                refusal = self._examiner.refusal(evidence)
            if not refusal and sought is not None:
                evidence.close()
                self.incoming.handle_found(sought, client, packet)
                return
            if not refusal and offer is None:
                refusal = self._search(client, packet, evidence, elsewhere)
                if not refusal:
                    return
        except BaseException:
            evidence.close()
            raise
        evidence.close()
        if refusal or offer is None:
            self.shared.refuse_claim(client, packet.message.token, refusal or Refusal.NO_OFFER)
        else:
            self._join(offer, client, packet, key, across=False)

    def _search(
        self, client: Client, packet: Packet, evidence: Evidence, elsewhere: list[Offer[Brought]]
    ) -> Refusal | None:
        """Asks which of the offers made in other namespaces is of the claim's connection; None: it is under way."""
        number = (client.client_id, packet.message.token)
        if evidence.way is None or evidence.facts is None or number in self._searches:
            return Refusal.NOT_PROVEN
        claim = Packet(packet.message, b"", packet.descriptors.take())
        search = Search(client, claim, evidence, self._handle_found, lambda: self._searches.pop(number, None))
        try:
            if not search.begin(elsewhere, self._paths):
                return Refusal.NOT_PROVEN
        except LimitReached:
            return Refusal.TOO_MANY
        self._searches[number] = search
        return None

    def _handle_found(self, search: Search, offer: Offer[Brought] | None) -> None:
        """A search across namespaces has come to its end."""
        client, message = search.claimer, search.claim.message
        try:
            if offer is None or offer not in self.shared.offers:
                refusal = Refusal.NOT_PROVEN if offer is None else Refusal.NO_OFFER
                self.shared.refuse_claim(client, message.token, refusal)
            else:
                self._join(offer, client, search.claim, search.evidence.key, across=True)
        finally:
            search.end()

    def _join(self, offer: Offer[Brought], client: Client, packet: Packet, key: ConnectionKey, *, across: bool) -> None:
        """Both ends are proven; what is left are users, policy and protocol."""
        shared, token = self.shared, packet.message.token
        offerer, listener = shared.clients[offer.client], endpoint_of(key.local_addr, key.local_port)
        if not self._users.may_pair(offerer, client, across=across):
            shared.decisions.refuse(offerer.subject, client.subject, listener, Refusal.FOREIGN_USER)
            self._refuse_both(offer, client, token, Refusal.FOREIGN_USER)
            return
        carrier = shared.protocols.get(offer.protocol)
        if carrier is None:  # removed meanwhile
            self._refuse_both(offer, client, token, Refusal.NO_PROTOCOL)
            return
        verdict = shared.decisions.listen(client.subject, listener, carrier)
        if verdict.refusal:
            self._refuse_both(offer, client, token, verdict.refusal)
            return
        pair = LocalPair(shared, offer, client, packet)
        try:
            carrier.join(pair)
        except Unavailable:
            pair.leave()
        except Exception as error:  # a stranger's code: the others go on
            shared.protocols.fail(carrier.name, error)
            pair.leave()
        if not pair.carried:
            pair.taken = True  # a protocol that has kept it comes too late
            self._refuse_both(offer, client, token, Refusal.PROTOCOL_FAILED)

    def _refuse_both(self, offer: Offer[Brought], claimer: Client, token: int, refusal: Refusal) -> None:
        """Both ends are there and proven, and yet they are not paired: neither needs to wait."""
        shared = self.shared
        shared.refuse_claim(claimer, token, refusal)
        if offer in shared.offers:  # else it was its own and went with it
            shared.offers.handle_claimed(offer)
            shared.release(offer)
            shared.refuse_offer(shared.clients[offer.client], offer.token, refusal)

    def handle_withdraw(self, client: Client, packet: Packet) -> None:
        """WITHDRAW: the offer is off, or the claim."""
        expect(packet, 0)
        token = packet.message.token
        if search := self._searches.get((client.client_id, token)):
            search.end()
        if claim := self.incoming.delegated.get((client.client_id, token)):
            claim.withdraw()
        if offer := self.shared.offers.handle_withdraw(client.client_id, token):
            self._withdraw(offer)

    def _withdraw(self, offer: Offer[Brought]) -> None:
        self.shared.release(offer)
        self.shared.counters.add("offer_withdrawn")


@dataclass(slots=True, eq=False)
class Search:
    """Search for the offer of a claim, made in another network namespace: the first whose path is proven is the one.

    `on_found` is called once with the offer, or None, unless the search is ended before.
    """

    claimer: Client
    claim: Packet
    evidence: Evidence
    on_found: Callable[[Search, Offer[Brought] | None], None]
    on_end: Callable[[], object]
    proofs: list[Proof] = field(default_factory=list)
    failed: int = 0
    over: bool = False

    def begin(self, candidates: list[Offer[Brought]], paths: PathProofs) -> bool:
        """Begins a proof for each that agrees with the claim; False: there is none. Raises LimitReached."""
        try:
            for offer in candidates:
                self._try(offer, paths)
        except LimitReached:
            self.end()
            raise
        if not self.proofs:
            self.end()
        return bool(self.proofs)

    def _try(self, offer: Offer[Brought], paths: PathProofs) -> None:
        way, facts, shown = self.evidence.way, self.evidence.facts, offer.brought.evidence
        if way is None or facts is None or shown.way is None or shown.facts is None or not shown.facts.agrees(facts):
            return

        def done(proven: bool) -> None:
            if self.over:
                return
            if proven:
                self.on_found(self, offer)
                return
            self.failed += 1
            if self.failed == len(self.proofs):
                self.on_found(self, None)

        self.proofs.append(paths.start(shown.way, way, uid=self.claimer.uid, on_done=done))

    def end(self) -> None:
        """Gives everything back; does nothing the second time."""
        if self.over:
            return
        self.over = True
        self.on_end()
        for proof in self.proofs:
            proof.end(False)
        self.evidence.close()
        self.claim.descriptors.close()
