"""Offers and claims: who is paired with whom, and what carries their bytes.

Each message is checked by its form, by the policy, and by the kernel, before anything changes. An offer that cannot be
served is refused with the reason, and counted; the connection stays on TCP.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Final

from sidestep import limits
from sidestep.config import ProviderSettings
from sidestep.counters import Counters
from sidestep.errors import LimitReached, PeerViolation, Unavailable
from sidestep.native import _channel, layout
from sidestep.native.layout import Attach, Refusal, Rpc
from sidestep.provider import arena as arenas
from sidestep.provider import memory, rpc
from sidestep.provider.carry import remote_relay as fars
from sidestep.provider.carry.hub import End, Relays
from sidestep.provider.carry.local_relay import open_relay
from sidestep.provider.carry.remote_relay import Far
from sidestep.provider.clients import Arena, Brought, Client
from sidestep.provider.decisions import Decisions
from sidestep.provider.pairing.questions import LocalPair, RemoteClaim, RemoteOffer, Search, Sought
from sidestep.provider.pairing.registry import Registry
from sidestep.provider.proof.evidence import Evidence, Examiner
from sidestep.provider.proof.lookup import SocketProver, endpoint_of
from sidestep.provider.proof.lookup import mapped_address as proof_address
from sidestep.provider.proof.path import PathProofs
from sidestep.provider.rpc import Message, Packet
from sidestep.provider.users import Users
from sidestep.provider.workers.delegate import Lent, LentClaim, LentEnd, LentOffer
from sidestep.switch.budget import ChannelBudget
from sidestep.switch.link import Link
from sidestep.switch.modules import Protocols
from sidestep.switch.offers import ClientId, ConnectionKey, Offer, OfferTable
from sidestep.switch.protocol import Awaited, Endpoint, Incoming, OffloadProtocol, Request, Services
from sidestep.switch.stream import Stream

_NOBODY_HOLDS_IT: Final = "nobody under sidestep has claimed it there: start that end with 'sidestep run', too"
_SWEEP_SLOTS_MAX: Final = 1 << 18  # slots read in one sweep; beyond it the sweep is given up and nothing released


class Pairing:
    """Pairs the ends of connections. `send` delivers a message at once, or drops the client and says False."""

    def __init__(
        self,
        settings: ProviderSettings,
        *,
        registry: Registry,
        protocols: Protocols,
        decisions: Decisions,
        counters: Counters,
        clients: Mapping[ClientId, Client],
        arenas_known: Mapping[bytes, Arena],
        offers_max: int,
        budget_bytes: int,
        netns_cookie: int,
        users: Users,
        services: Services,
        proofs_max: int,
        clock: Callable[[], float],
        send: Callable[..., bool],
        relays: Relays,
    ) -> None:
        self._registry = registry
        self._protocols = protocols
        self._decisions = decisions
        self._counters = counters
        self._clients = clients
        self._arenas = arenas_known
        self._users = users
        self._clock = clock
        self._send = send
        self._relays = relays
        self._services = services
        self._ring_size = (settings.ring_size, settings.ring_size)
        self._sought: dict[ConnectionKey, Sought] = {}  # accepting ends of connections with other hosts
        self._second_segments: set[bytes] = set()  # of connections through the provider, that no arena tells of
        self._prover = SocketProver()  # whether their ends are still held
        self._examiner = Examiner(settings.wants, netns_cookie=netns_cookie)
        self._netns_cookie = netns_cookie
        self._paths = PathProofs(services, pending_max=proofs_max)
        self._searches: dict[tuple[ClientId, int], Search] = {}
        self._lent: dict[tuple[ClientId, int], LentClaim] = {}  # claims that a worker is about to serve
        self._offers: OfferTable[Brought] = OfferTable(
            expiry_s=settings.offer_expiry_s, total_max=offers_max, owner_max=lambda uid: users.share(offers_max, uid)
        )
        self.budget = ChannelBudget(budget_bytes, owner_max=lambda uid: users.share(budget_bytes, uid))
        self.closing = False  # no more offers are taken in

    def __len__(self) -> int:
        return len(self._offers)

    def close(self) -> None:
        self._examiner.close()
        self._prover.close()

    def next_deadline(self) -> float | None:
        return self._offers.next_deadline()

    def handle_timeouts(self, now: float) -> None:
        """Refuses the offers whose time is up."""
        while offer := self._offers.poll_expired(now=now):
            self._release(offer)
            self._refuse_offer(self._clients[offer.client], offer.token, Refusal.EXPIRED)

    def handle_disconnect(self, client: Client) -> None:
        """A client has gone, and its offers and claims with it."""
        self._relays.handle_disconnect()
        for search in [one for one in self._searches.values() if one.claimer is client]:
            search.end()
        for offer in self._offers.handle_disconnect(client.client_id):
            self._release(offer)
            self._counters.add("offer_withdrawn")

    def fail_carrier(self, carrier: OffloadProtocol, error: BaseException) -> None:
        """A protocol has raised what it must not."""
        self._protocols.fail(carrier.name, error)

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
        message, key = packet.message, evidence.key
        segment, doorbell, doorbell_page = packet.descriptors.numbers
        segment_len = memory.sealed_size(segment, "segment")
        if not _geometry_ok(message.ring_size, segment_len):
            raise PeerViolation(f"a segment of {segment_len} bytes for rings of {message.ring_size}", rule="malformed")
        _check_doorbell(message, doorbell, doorbell_page)
        refusal = self._offer_refusal(client, message, evidence)
        if not refusal:
            request = Request(
                endpoint_of(key.local_addr, key.local_port), endpoint_of(key.remote_addr, key.remote_port), None
            )
            elsewhere = key.netns_cookie != self._netns_cookie
            verdict = self._decisions.connect(
                client.subject, request, ip_protocol=message.protocol, elsewhere=elsewhere
            )
            refusal = verdict.refusal
        if not refusal and not self._reserve(message.segment_id, memory.channel_memory(message.ring_size), client.uid):
            refusal = Refusal.NO_BUDGET
        if refusal:
            evidence.close()
            self._refuse_offer(client, message.token, refusal)
            return
        assert verdict.protocol is not None
        bucket = self._registry.bucket(key)
        route = None if verdict.protocol.capabilities.self_routing else verdict.route
        offer = Offer(
            client.client_id, message.token, key, message.ring_size, message.segment_id,
            client.doorbell_name(message.doorbell_page_id), message.doorbell_index, verdict.protocol.name,
            Brought(packet.descriptors.take(), bucket, evidence, route), client.uid,
        )  # fmt: skip
        if refusal := self._offers.handle_offer(offer, now=self._clock()):
            raise AssertionError(f"the table refused what it had checked: {refusal.name}")
        self._registry.handle_added(bucket)
        self._counters.add("offer_accepted")
        if verdict.leaves:
            self._reach_out(verdict.protocol, offer)

    def _reach_out(self, carrier: OffloadProtocol, offer: Offer[Brought]) -> None:
        """Has the protocol find the other end, on another host."""
        outgoing = RemoteOffer(self, offer)
        try:
            carrier.connect(outgoing)
        except Unavailable as error:
            outgoing.refuse(error.message)
        except Exception as error:  # a stranger's code: the others go on
            self._protocols.fail(carrier.name, error)
            outgoing.refuse("the protocol failed")

    def handle_claim(self, client: Client, packet: Packet) -> None:
        """CLAIM: the other end has seen that there may be an offer for it."""
        evidence = self._examiner.take(packet, 2)
        try:
            _check_doorbell(packet.message, *packet.descriptors.numbers)
            key = evidence.key
            offer = self._offers.find(key)
            elsewhere = self._offers.find_elsewhere(key) if offer is None else []
            refusal = evidence.refusal
            sought = self._sought.get(key) if offer is None else None
            if not refusal and offer is None and not elsewhere and sought is None:
                refusal = Refusal.NO_OFFER
            if not refusal:
                refusal = self._examiner.refusal(evidence)
            if not refusal and sought is not None:
                evidence.close()
                self._found_end(sought, client, packet)
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
            self._refuse_claim(client, packet.message.token, refusal or Refusal.NO_OFFER)
        else:
            self._join(offer, client, packet, key, across=False)

    def _search(
        self, client: Client, packet: Packet, evidence: Evidence, elsewhere: list[Offer[Brought]]
    ) -> Refusal | None:
        """Asks which of the offers made in other namespaces is of the claim's connection; None: it is under way."""
        if evidence.way is None or evidence.facts is None or (client.client_id, packet.message.token) in self._searches:
            return Refusal.NOT_PROVEN
        search = Search(self, client, Packet(packet.message, b"", packet.descriptors.take()), evidence)
        try:
            for offer in elsewhere:
                shown = offer.brought.evidence
                if shown.way is not None and shown.facts is not None and shown.facts.agrees(evidence.facts):
                    search.try_offer(offer, self._paths, shown.way, evidence.way)
        except LimitReached:
            search.end()
            return Refusal.TOO_MANY
        if not search.proofs:
            search.end()
            return Refusal.NOT_PROVEN
        self._searches[client.client_id, packet.message.token] = search
        return None

    def handle_found(self, search: Search, offer: Offer[Brought] | None) -> None:
        """A search across namespaces has come to its end."""
        client, message = search.claimer, search.claim.message
        try:
            if offer is None or offer not in self._offers:
                self._refuse_claim(client, message.token, Refusal.NOT_PROVEN if offer is None else Refusal.NO_OFFER)
            else:
                self._join(offer, client, search.claim, search.evidence.key, across=True)
        finally:
            search.end()

    def forget(self, search: Search) -> None:
        self._searches.pop((search.claimer.client_id, search.claim.message.token), None)

    def _join(self, offer: Offer[Brought], client: Client, packet: Packet, key: ConnectionKey, *, across: bool) -> None:
        """Both ends are proven; what is left are users, policy and protocol."""
        message = packet.message
        listener = endpoint_of(key.local_addr, key.local_port)
        if not self._users.may_pair(self._clients[offer.client], client, across=across):
            self._decisions.refuse(self._clients[offer.client].subject, client.subject, listener, Refusal.FOREIGN_USER)
            self._refuse_both(offer, client, message.token, Refusal.FOREIGN_USER)
            return
        carrier = self._protocols.get(offer.protocol)
        if carrier is None:  # removed meanwhile
            self._refuse_both(offer, client, message.token, Refusal.NO_PROTOCOL)
            return
        verdict = self._decisions.listen(client.subject, listener, carrier)
        if verdict.refusal:
            self._refuse_both(offer, client, message.token, verdict.refusal)
            return
        pair = LocalPair(self, offer, client, packet)
        try:
            carrier.join(pair)
        except Unavailable:
            pair.leave()
        except Exception as error:  # a stranger's code: the others go on
            self._protocols.fail(carrier.name, error)
            pair.leave()
        if not pair.carried:
            pair.taken = True  # whoever has kept it comes too late
            self._refuse_both(offer, client, message.token, Refusal.PROTOCOL_FAILED)

    def handle_withdraw(self, client: Client, packet: Packet) -> None:
        """WITHDRAW: the offer is off, or the claim."""
        expect(packet, 0)
        if search := self._searches.get((client.client_id, packet.message.token)):
            search.end()
        if lent := self._lent.get((client.client_id, packet.message.token)):
            lent.withdraw()
        offer = self._offers.handle_withdraw(client.client_id, packet.message.token)
        if offer is not None:
            self._release(offer)
            self._counters.add("offer_withdrawn")

    # ---- what a pair does ----

    def attach(self, offer: Offer[Brought], claimer: Client, packet: Packet) -> None:
        """Hands each end what the other brought."""
        message = packet.message
        attach = Message(
            type=Rpc.ATTACH,
            token=message.token,
            ring_size=offer.ring_size,
            segment_id=offer.segment_id,
            doorbell_page_id=offer.doorbell_page_id,
            doorbell_index=offer.doorbell_index,
        )
        if not self._send(claimer, attach, offer.brought.descriptors.numbers):
            return  # the offer stays for a claimer that lives, unless it was its own and went with it
        self._offers.handle_claimed(offer)
        self._registry.handle_removed(offer.brought.bucket)
        offer.brought.close()
        claimed = Message(
            type=Rpc.CLAIMED,
            token=offer.token,
            doorbell_page_id=claimer.doorbell_name(message.doorbell_page_id),
            doorbell_index=message.doorbell_index,
        )
        if self._send(self._clients[offer.client], claimed, packet.descriptors.numbers):
            self._counters.add("claim_matched")

    def open(self, offer: Offer[Brought], claimer: Client, packet: Packet) -> tuple[Stream, Stream]:
        """Hands each end a channel with the provider; raises Unavailable."""
        segment, *offerer_doorbell = offer.brought.descriptors.numbers
        second_id = blake2b(offer.segment_id, digest_size=16).digest()
        if offer.key.netns_cookie != self._netns_cookie or packet.message.netns_cookie != self._netns_cookie:
            raise Unavailable("who stands in between cannot tell who holds a socket of another network namespace")
        if not self._reserve(second_id, memory.channel_memory(offer.ring_size), claimer.uid):
            raise Unavailable("the budget for channel memory is used up")
        self._second_segments.add(second_id)
        try:
            return self._open(offer, claimer, packet, segment, offerer_doorbell, second_id)
        except BaseException:
            self._release_second(second_id)
            raise

    # ---- ends whose other end is on another host ----

    def is_offered(self, offer: Offer[Brought]) -> bool:
        return offer in self._offers

    def carry_offered(self, offer: Offer[Brought], link: Link) -> Far:
        """Hands the end that opened a connection a channel with the provider; raises Unavailable."""
        if offer not in self._offers:
            raise Unavailable("the connection does not wait any more")
        offerer = self._clients[offer.client]
        segment, *doorbell = offer.brought.descriptors.numbers
        self._need_home(offer.key)
        try:
            own_doorbell = self._relays.descriptors()
            end = self._end(
                segment,
                1,
                offerer,
                offer.key,
                offer.brought.evidence.cookie,
                offer.doorbell_page_id,
                offer.doorbell_index,
                doorbell,
            )
        except OSError as error:
            raise Unavailable(f"the channel cannot be mapped: {error.strerror}") from error
        far = fars.enter(self._relays, end, protocol=offer.protocol, on_drop=_nothing, link=link,
                        segment_id=offer.segment_id, uid=offer.owner)  # fmt: skip
        self.tell_offerer(offer, self._relays.doorbell_id, own_doorbell)
        return far

    def tell_offerer(self, offer: Offer[Brought], doorbell_id: bytes, doorbell: Sequence[int]) -> bool:
        """Its channel has another end, which that doorbell rings; False: the offer, or its maker, is gone."""
        if offer not in self._offers:
            return False
        offerer = self._clients[offer.client]
        self._offers.handle_claimed(offer)
        self._registry.handle_removed(offer.brought.bucket)
        offer.brought.close()
        claimed = Message(type=Rpc.CLAIMED, token=offer.token, flags=Attach.RELAYED, doorbell_page_id=doorbell_id)
        if not self._send(offerer, claimed, doorbell):
            return False
        self._counters.add("remote_joined", "connect")
        return True

    def lend_offered(self, offer: Offer[Brought]) -> Lent:
        """What a worker needs to be the other end of an offered channel; raises Unavailable."""
        if offer not in self._offers:
            raise Unavailable("the connection does not wait any more")
        self._need_home(offer.key)
        end = LentEnd(
            offer.key, offer.brought.evidence.cookie, 1, offer.segment_id, offer.doorbell_page_id, offer.doorbell_index
        )
        return LentOffer(self, offer, end, self._clients[offer.client])

    def refuse_offered(self, offer: Offer[Brought], why: str) -> None:
        """It stays on TCP."""
        if offer in self._offers:
            self._offers.handle_claimed(offer)
            self._release(offer)
            client, key = self._clients[offer.client], offer.key
            self._decisions.fail(client.subject, endpoint_of(key.remote_addr, key.remote_port), offer.protocol, why)
            self._refuse_offer(client, offer.token, Refusal.NO_PROTOCOL)

    def await_end(
        self,
        carrier: OffloadProtocol,
        local: Endpoint,
        remote: Endpoint,
        on_found: Callable[[Incoming], None],
        on_failed: Callable[[str], None],
    ) -> Awaited:
        """Looks for the accepting end of a connection with another host; raises Unavailable."""
        if self.closing:
            raise Unavailable("the provider is going away")
        key = ConnectionKey(
            self._netns_cookie,
            proof_address(str(local.address)),
            local.port,
            proof_address(str(remote.address)),
            remote.port,
        )
        if key in self._sought:
            raise Unavailable(_NOBODY_HOLDS_IT)  # that very connection is looked for already
        if len(self._sought) >= limits.REMOTE_SOUGHT_MAX:
            raise Unavailable(f"{limits.REMOTE_SOUGHT_MAX} connections are looked for already")
        bucket = self._registry.bucket(key)
        sought = Sought(self, key, bucket, carrier, on_found, on_failed)
        self._sought[key] = sought
        self._registry.handle_added(bucket)
        self._services.call_later(limits.REMOTE_SOUGHT_S, lambda: sought.fail(_NOBODY_HOLDS_IT))
        return sought

    def forget_sought(self, sought: Sought) -> None:
        if self._sought.get(sought.key) is sought:
            del self._sought[sought.key]
            self._registry.handle_removed(sought.bucket)

    def _found_end(self, sought: Sought, client: Client, packet: Packet) -> None:
        """The claimer holds the end that is looked for."""
        key = sought.key
        verdict = self._decisions.listen(client.subject, endpoint_of(key.local_addr, key.local_port), sought.carrier)
        incoming = RemoteClaim(self, sought, client, packet)
        if verdict.refusal:
            self._refuse_claim(client, packet.message.token, verdict.refusal)
            sought.fail("its policy keeps it on TCP: change the line that 'sidestep policy trace' names there")
            return
        sought.find(incoming)
        if not incoming.carried:
            self._refuse_claim(client, packet.message.token, Refusal.PROTOCOL_FAILED)

    def carry_found(self, sought: Sought, client: Client, packet: Packet, link: Link) -> Far:
        """Hands the end that accepted a connection a channel with the provider; raises Unavailable."""
        message, key = packet.message, sought.key
        segment_id, made = self._make_segment(client.uid)
        try:
            try:
                own_doorbell = self._relays.descriptors()
                end = self._end(made, 0, client, key, message.cookie, client.doorbell_name(message.doorbell_page_id),
                                message.doorbell_index, packet.descriptors.numbers)  # fmt: skip
                far = fars.enter(
                    self._relays, end, protocol=sought.carrier.name,
                    on_drop=lambda: self._release_second(segment_id), link=link,
                    segment_id=segment_id, uid=client.uid,
                )  # fmt: skip
                own_id = self._relays.doorbell_id
                if not self.tell_claimer(client, message.token, segment_id, made, own_id, own_doorbell):
                    self._relays.drop(far)
                    raise Unavailable("the end that claimed it has gone")
            finally:
                os.close(made)
        except OSError as error:
            self._release_second(segment_id)
            raise Unavailable(f"the channel cannot be mapped: {error.strerror}") from error
        except BaseException:
            self._release_second(segment_id)
            raise
        return far

    def _make_segment(self, uid: int) -> tuple[bytes, int]:
        """A segment for an end that accepted a connection, and its id; raises Unavailable."""
        segment_id = os.urandom(16)
        if not self._reserve(segment_id, memory.channel_memory(self._ring_size), uid):
            raise Unavailable("the budget for channel memory is used up")
        try:
            made = _channel.create(*self._ring_size)
        except OSError as error:
            self.budget.release(segment_id)
            raise Unavailable(f"no memory for a channel: {error.strerror}") from error
        self._second_segments.add(segment_id)
        return segment_id, made

    def tell_claimer(
        self, client: Client, token: int, segment_id: bytes, segment: int, doorbell_id: bytes, doorbell: Sequence[int]
    ) -> bool:
        """Gives an end that accepted a connection its channel and the doorbell to ring; False: it is gone."""
        attach = Message(
            type=Rpc.ATTACH, token=token, flags=Attach.RELAYED, ring_size=self._ring_size, segment_id=segment_id,
            doorbell_page_id=doorbell_id,
        )  # fmt: skip
        if not self._send(client, attach, (segment, *doorbell)):
            return False
        self._counters.add("remote_joined", "accept")
        return True

    def lend_found(self, sought: Sought, client: Client, packet: Packet) -> Lent:
        """What a worker needs to be the other end of a channel for an end that was found; raises Unavailable."""
        message = packet.message
        if (client.client_id, message.token) in self._lent:
            raise Unavailable("that very claim is served already")
        segment_id, made = self._make_segment(client.uid)
        end = LentEnd(
            sought.key, message.cookie, 0, segment_id, client.doorbell_name(message.doorbell_page_id),
            message.doorbell_index,
        )  # fmt: skip
        lent = LentClaim(self, end, client, message.token, rpc.Descriptors([made]), packet.descriptors.take())
        self._lent[client.client_id, message.token] = lent
        return lent

    def handle_lent(self, lent: LentClaim) -> None:
        """Its claim has been answered, or is off."""
        self._lent.pop((lent.client.client_id, lent.token), None)

    def refuse_lent(self, lent: LentClaim) -> None:
        """It stays on TCP."""
        self._refuse_claim(lent.client, lent.token, Refusal.PROTOCOL_FAILED)

    def release_lent(self, segment_id: bytes) -> None:
        """Nobody carries that end any more; twice is allowed."""
        self._release_second(segment_id)

    def _need_home(self, key: ConnectionKey) -> None:
        if key.netns_cookie != self._netns_cookie:
            raise Unavailable("who stands in between cannot tell who holds a socket of another network namespace")

    def _release_second(self, second_id: bytes) -> None:
        """The second segment of a connection through the provider is gone; twice is allowed."""
        if second_id in self._second_segments:
            self._second_segments.discard(second_id)
            self.budget.release(second_id)

    def _open(
        self,
        offer: Offer[Brought],
        claimer: Client,
        packet: Packet,
        segment: int,
        offerer_doorbell: Sequence[int],
        second_id: bytes,
    ) -> tuple[Stream, Stream]:
        message, offerer = packet.message, self._clients[offer.client]
        try:
            made = _channel.create(*offer.ring_size)
        except OSError as error:
            raise Unavailable(f"no memory for a channel: {error.strerror}") from error
        try:
            doorbell, page, life = self._relays.descriptors()
            streams = open_relay(
                self._relays,
                self._end(segment, 1, offerer, offer.key, offer.brought.evidence.cookie,
                          offer.doorbell_page_id, offer.doorbell_index, offerer_doorbell),
                self._end(made, 0, claimer, offer.key.mirrored(), message.cookie,
                          claimer.doorbell_name(message.doorbell_page_id), message.doorbell_index,
                          packet.descriptors.numbers),
                protocol=offer.protocol, on_drop=lambda: self._release_second(second_id),
            )  # fmt: skip
            attach = Message(
                type=Rpc.ATTACH,
                token=message.token,
                flags=Attach.RELAYED,
                ring_size=offer.ring_size,
                segment_id=second_id,  # so that whoever looks sees that the ends share no channel
                doorbell_page_id=self._relays.doorbell_id,
            )
            if not self._send(claimer, attach, (made, doorbell, page, life)):
                streams[0].close()
                raise Unavailable("the end that claimed it has gone")
        except OSError as error:
            raise Unavailable(f"the channel cannot be mapped: {error.strerror}") from error
        finally:
            os.close(made)
        self._offers.handle_claimed(offer)
        self._registry.handle_removed(offer.brought.bucket)
        offer.brought.close()
        own_id = self._relays.doorbell_id
        claimed = Message(type=Rpc.CLAIMED, token=offer.token, flags=Attach.RELAYED, doorbell_page_id=own_id)
        if self._send(offerer, claimed, (doorbell, page, life)):
            self._counters.add("claim_matched")
        return streams

    def _end(
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
        return End(
            _channel.map(segment, side), doorbell_name, doorbell_index, doorbell[0], doorbell[1],
            held=lambda: self._prover.holds(key, cookie), received=lambda: self._prover.received(key, cookie),
            client_open=lambda: client.open,
        )  # fmt: skip

    # ---- refusing ----

    def _offer_refusal(self, client: Client, message: Message, evidence: Evidence) -> Refusal | None:
        """Why an offer cannot be taken in, whatever the switch says of it; the cheap checks first."""
        if self.closing:
            return Refusal.SHUTTING_DOWN
        if refusal := self._offers.check(client.client_id, message.token, evidence.key, client.uid):
            return refusal
        if message.segment_id in self.budget:
            return Refusal.DUPLICATE
        return self._examiner.refusal(evidence)

    def _refuse_offer(self, client: Client, token: int, refusal: Refusal) -> None:
        self._counters.add("offer_refused", refusal.name)
        self._send(client, Message(type=Rpc.REFUSED, token=token, reason=refusal))

    def _refuse_claim(self, client: Client, token: int, refusal: Refusal) -> None:
        self._counters.add("claim_refused", refusal.name)
        self._send(client, Message(type=Rpc.REFUSED, token=token, reason=refusal))

    def _refuse_both(self, offer: Offer[Brought], claimer: Client, token: int, refusal: Refusal) -> None:
        """Both ends are there and proven, and yet they are not paired: neither needs to wait."""
        self._refuse_claim(claimer, token, refusal)
        if offer in self._offers:  # else it was its own and went with it
            self._offers.handle_claimed(offer)
            self._release(offer)
            self._refuse_offer(self._clients[offer.client], offer.token, refusal)

    # ---- memory ----

    def _reserve(self, segment_id: bytes, memory_len: int, uid: int) -> bool:
        now = self._clock()
        if self.budget.wants_sweep(now=now):
            self._sweep(now)
        if self.budget.reserve(segment_id, memory_len, now=now, owner=uid):
            return True
        if not self.budget.may_sweep(now=now):
            return False
        self._sweep(now)
        return self.budget.reserve(segment_id, memory_len, now=now, owner=uid)

    def _release(self, offer: Offer[Brought]) -> None:
        """Gives back what an offer held that was not claimed."""
        self._registry.handle_removed(offer.brought.bucket)
        self.budget.release(offer.segment_id)
        offer.brought.close()

    def _sweep(self, now: float) -> None:
        spilled = dict.fromkeys(self._second_segments, 0)  # bytes beside the rings, by segment
        slots_left = _SWEEP_SLOTS_MAX
        for arena in self._arenas.values():
            for segment_id, touched in arenas.segments_in_use(arena.fd):
                slots_left -= 1
                if not slots_left:
                    self.budget.handle_sweep(None, now=now)
                    return
                if segment_id is not None:
                    # both ends tell of their own; a stranger may tell of any, in as many slots as he likes
                    spilled[segment_id] = min(spilled.get(segment_id, 0) + touched, 2 * layout.CHANNEL_SPILL)
        self.budget.handle_sweep(spilled, now=now)


def _nothing() -> None:
    """The segment is the offerer's: the sweep finds out when it is gone."""


def expect(packet: Packet, fds_count: int) -> None:
    """Raises PeerViolation unless a message came with so many descriptors."""
    if len(packet.descriptors) != fds_count:
        raise PeerViolation(
            f"{packet.message.type.name} came with {len(packet.descriptors)} descriptors, not {fds_count}",
            rule="malformed",
        )


def _geometry_ok(ring_size: tuple[int, int], segment_len: int) -> bool:
    return segment_len == memory.segment_size(ring_size) and all(
        limits.RING_SIZE_MIN <= size <= limits.RING_SIZE_MAX and not size & (size - 1) for size in ring_size
    )


def _check_doorbell(message: Message, doorbell: int, doorbell_page: int) -> None:
    memory.check_eventfd(doorbell, "doorbell")
    if not memory.sealed_size(doorbell_page, "doorbell page") or message.doorbell_index >= layout.DOORBELLS_PER_PAGE:
        raise PeerViolation(f"doorbell {message.doorbell_index} of an impossible doorbell page", rule="malformed")
