"""Accepting ends of connections with other hosts: a protocol has them looked for, and a program here claims them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from sidestep import limits
from sidestep.errors import Unavailable
from sidestep.native.layout import Attach, Refusal, Rpc
from sidestep.provider import rpc
from sidestep.provider.carry import remote_relay
from sidestep.provider.carry.remote_relay import RemoteRelay
from sidestep.provider.clients import Client
from sidestep.provider.pairing.shared import Shared
from sidestep.provider.proof.lookup import endpoint_of, mapped_address
from sidestep.provider.rpc import Message, Packet
from sidestep.provider.workers.delegate import Delegated, DelegatedClaim, DelegatedEnd
from sidestep.switch.link import Link
from sidestep.switch.offers import ClientId, ConnectionKey
from sidestep.switch.protocol import Awaited, Endpoint, OffloadProtocol
from sidestep.switch.protocol import Incoming as IncomingEnd

_NOBODY_HOLDS_IT: Final = "nobody under sidestep has claimed it there: start that end with 'sidestep run', too"


class Incoming:
    """Those that are looked for, and those that a worker is about to carry."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self._sought: dict[ConnectionKey, Sought] = {}
        self._delegated: dict[tuple[ClientId, int], DelegatedClaim] = {}

    def await_end(
        self,
        carrier: OffloadProtocol,
        local: Endpoint,
        remote: Endpoint,
        on_found: Callable[[IncomingEnd], None],
        on_failed: Callable[[str], None],
    ) -> Awaited:
        """Looks for the accepting end of a connection with another host; raises Unavailable."""
        if self.shared.closing:
            raise Unavailable("the provider is going away")
        key = ConnectionKey(
            self.shared.netns_cookie, mapped_address(str(local.address)), local.port,
            mapped_address(str(remote.address)), remote.port,
        )  # fmt: skip
        if key in self._sought:
            raise Unavailable(_NOBODY_HOLDS_IT)  # that very connection is looked for already
        if len(self._sought) >= limits.REMOTE_SOUGHT_MAX:
            raise Unavailable(f"{limits.REMOTE_SOUGHT_MAX} connections are looked for already")
        bucket = self.shared.registry.bucket(key)
        sought = Sought(self, key, bucket, carrier, on_found, on_failed)
        self._sought[key] = sought
        self.shared.registry.handle_added(bucket)
        self.shared.services.loop.call_later(limits.REMOTE_SOUGHT_S, lambda: sought.fail(_NOBODY_HOLDS_IT))
        return sought

    def sought(self, key: ConnectionKey) -> Sought | None:
        """What is looked for at that end."""
        return self._sought.get(key)

    def forget(self, sought: Sought) -> None:
        if self._sought.get(sought.key) is sought:
            del self._sought[sought.key]
            self.shared.registry.handle_removed(sought.bucket)

    def handle_found(self, sought: Sought, client: Client, packet: Packet) -> None:
        """The claimer holds the end that is looked for."""
        shared, key = self.shared, sought.key
        verdict = shared.decisions.listen(client.subject, endpoint_of(key.local_addr, key.local_port), sought.carrier)
        if verdict.refusal:
            shared.refuse_claim(client, packet.message.token, verdict.refusal)
            sought.fail("its policy keeps it on TCP: change the line that 'sidestep policy trace' names there")
            return
        claim = RemoteClaim(self, sought, client, packet)
        sought.find(claim)
        if not claim.carried:
            shared.refuse_claim(client, packet.message.token, Refusal.PROTOCOL_FAILED)

    def tell_delegated(self, claim: DelegatedClaim, doorbell_id: bytes, doorbell: Sequence[int]) -> bool:
        """A worker carries it, whom that doorbell rings; False: its application is gone."""
        (segment,) = claim.segment.numbers
        return self.tell_claimer(claim.client, claim.token, claim.end.segment_id, segment, doorbell_id, doorbell)

    def tell_claimer(
        self, client: Client, token: int, segment_id: bytes, segment: int, doorbell_id: bytes, doorbell: Sequence[int]
    ) -> bool:
        """Gives an end that accepted a connection its channel and the doorbell to ring; False: it is gone."""
        attach = Message(
            type=Rpc.ATTACH, token=token, flags=Attach.RELAYED, ring_size=self.shared.ring_size, segment_id=segment_id,
            doorbell_page_id=doorbell_id,
        )  # fmt: skip
        if not self.shared.send(client, attach, (segment, *doorbell)):
            return False
        self.shared.counters.add("remote_joined", "accept")
        return True

    def delegate(self, delegated: DelegatedClaim) -> None:
        """A worker is about to serve that claim."""
        self._delegated[delegated.client.client_id, delegated.token] = delegated

    def handle_answered(self, delegated: DelegatedClaim) -> None:
        """Its claim has been answered, or is off."""
        self._delegated.pop((delegated.client.client_id, delegated.token), None)

    def delegated(self, client: Client, token: int) -> DelegatedClaim | None:
        """The claim of a client that a worker is about to serve."""
        return self._delegated.get((client.client_id, token))


@dataclass(slots=True, eq=False)
class Sought:
    """An accepting end that is looked for (`sidestep.switch.protocol.Awaited`)."""

    incoming: Incoming
    key: ConnectionKey  # as that end sees it
    bucket: int
    carrier: OffloadProtocol
    on_found: Callable[[IncomingEnd], None]
    on_failed: Callable[[str], None]
    over: bool = False

    def find(self, claim: RemoteClaim) -> None:
        if self._end():
            try:
                self.on_found(claim)
            except Exception as error:  # a stranger's code: the others go on
                self.incoming.shared.protocols.fail(self.carrier.name, error)

    def fail(self, why: str) -> None:
        """It is not, or must not be carried; does nothing the second time."""
        if self._end():
            self.on_failed(why)

    def cancel(self) -> None:
        self._end()

    def _end(self) -> bool:
        over, self.over = self.over, True
        self.incoming.forget(self)
        return not over


@dataclass(slots=True, eq=False)
class RemoteClaim:
    """A claim whose other end is on another host (`sidestep.switch.protocol.Incoming`)."""

    incoming: Incoming
    sought: Sought
    claimer: Client
    claim: Packet
    carried: bool = False

    def carry(self, link: Link) -> RemoteRelay:
        """Hands the program a channel with the provider; raises Unavailable."""
        shared, client, message, key = self.incoming.shared, self.claimer, self.claim.message, self.sought.key
        segment_id, made = self._make_segment()
        try:
            try:
                own_doorbell = shared.hub.descriptors()
                end = shared.end(made, 0, client, key, message.cookie, client.doorbell_name(message.doorbell_page_id),
                                 message.doorbell_index, self.claim.descriptors.numbers)  # fmt: skip
                relay = remote_relay.enter(
                    shared.hub, end, protocol=self.sought.carrier.name,
                    on_drop=lambda: shared.segments.release_second(segment_id), link=link,
                    segment_id=segment_id, uid=client.uid,
                )  # fmt: skip
                own_id = shared.hub.doorbell_id
                told = self.incoming.tell_claimer(client, message.token, segment_id, made, own_id, own_doorbell)
                if not told:
                    shared.hub.drop(relay)
                    raise Unavailable("the end that claimed it has gone")
            finally:
                os.close(made)
        except OSError as error:
            shared.segments.release_second(segment_id)
            raise Unavailable(f"the channel cannot be mapped: {error.strerror}") from error
        except BaseException:
            shared.segments.release_second(segment_id)
            raise
        self.carried = True
        return relay

    def delegate(self) -> Delegated:
        """What a worker needs to be the other end of its channel; raises Unavailable."""
        incoming, client, message = self.incoming, self.claimer, self.claim.message
        if incoming.delegated(client, message.token):
            raise Unavailable("that very claim is served already")
        segment_id, made = self._make_segment()
        doorbell_name = client.doorbell_name(message.doorbell_page_id)
        end = DelegatedEnd(self.sought.key, message.cookie, 0, segment_id, doorbell_name, message.doorbell_index)
        shared = incoming.shared
        delegated = DelegatedClaim(
            end, client, message.token, rpc.Descriptors([made]), self.claim.descriptors.take(), incoming.tell_delegated,
            lambda: shared.refuse_claim(client, message.token, Refusal.PROTOCOL_FAILED),
            incoming.handle_answered, lambda: shared.segments.release_second(segment_id),
        )  # fmt: skip
        incoming.delegate(delegated)
        self.carried = True  # the claim is answered later
        return delegated

    def _make_segment(self) -> tuple[bytes, int]:
        segment_id, shared = os.urandom(16), self.incoming.shared
        return segment_id, shared.segments.make(segment_id, shared.ring_size, self.claimer.uid)
