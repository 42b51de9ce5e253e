"""Accepting ends of connections with other hosts: a protocol has them looked for, and a program here claims them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from sidestep import limits
from sidestep.errors import Unavailable
from sidestep.native.layout import Attach, Refusal, Rpc
from sidestep.provider.carry import remote_relay
from sidestep.provider.carry.remote_relay import RemoteRelay
from sidestep.provider.clients import Client
from sidestep.provider.pairing.shared import Shared
from sidestep.provider.proof.lookup import endpoint_of, mapped_address
from sidestep.provider.rpc import Descriptors, Message, Packet
from sidestep.provider.workers.pool import Delegated
from sidestep.switch.link import Link
from sidestep.switch.offers import ClientId, ConnectionKey
from sidestep.switch.protocol import Endpoint, OffloadProtocol
from sidestep.switch.protocol import Incoming as IncomingEnd

_NOBODY_HOLDS_IT: Final = "nobody under sidestep has claimed it there: start that end with 'sidestep run', too"


class Incoming:
    """Searches for accepting ends, and the claims that a worker is about to serve: `delegated`, by client and token."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self.delegated: dict[tuple[ClientId, int], RemoteClaim] = {}
        self._sought: dict[ConnectionKey, Sought] = {}

    def await_end(
        self,
        carrier: OffloadProtocol,
        transport: str,
        local: Endpoint,
        remote: Endpoint,
        on_found: Callable[[IncomingEnd], None],
        on_failed: Callable[[str], None],
    ) -> Callable[[], object]:
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
        sought = Sought(self, key, bucket, carrier, transport, on_found, on_failed)
        self._sought[key] = sought
        self.shared.registry.handle_added(bucket)
        self.shared.services.loop.call_later(limits.REMOTE_SOUGHT_S, lambda: sought.fail(_NOBODY_HOLDS_IT))
        return sought.end

    def sought(self, key: ConnectionKey) -> Sought | None:
        """Search for that end; None: there is none."""
        return self._sought.get(key)

    def forget(self, sought: Sought) -> None:
        if self._sought.get(sought.key) is sought:
            del self._sought[sought.key]
            self.shared.registry.handle_removed(sought.bucket)

    def handle_found(self, sought: Sought, client: Client, packet: Packet) -> None:
        """The claimer holds the end that is looked for."""
        shared, key = self.shared, sought.key
        local = endpoint_of(key.local_addr, key.local_port)
        verdict = shared.decisions.listen(client.subject, local, sought.carrier, sought.transport)
        if verdict.refusal:
            shared.refuse_claim(client, packet.message.token, verdict.refusal)
            sought.fail("its policy keeps it on TCP: change the line that 'sidestep policy trace' names there")
            return
        claim = RemoteClaim(self, sought, client, packet)
        sought.find(claim)
        if not claim.carried:
            shared.refuse_claim(client, packet.message.token, Refusal.PROTOCOL_FAILED)


@dataclass(slots=True, eq=False)
class Sought:
    """An accepting end that is looked for."""

    incoming: Incoming
    key: ConnectionKey  # addresses as that end sees them
    bucket: int
    carrier: OffloadProtocol
    transport: str
    on_found: Callable[[IncomingEnd], None]
    on_failed: Callable[[str], None]
    over: bool = False

    def find(self, claim: RemoteClaim) -> None:
        if self.end():
            try:
                self.on_found(claim)
            except Exception as error:  # a stranger's code: the others go on
                self.incoming.shared.protocols.fail(self.carrier.name, error)

    def fail(self, why: str) -> None:
        """Fails the search: there is no such end, or it must not be carried; does nothing the second time."""
        if self.end():
            self.on_failed(why)

    def end(self) -> bool:
        """Ends the search; False: it had ended before."""
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
    segment_id: bytes = field(default_factory=lambda: os.urandom(16))
    lent: Descriptors = field(default_factory=Descriptors)  # lent to a worker: none once it needs no answer

    @property
    def uid(self) -> int:
        return self.claimer.uid

    def carry(self, link: Link) -> RemoteRelay:
        """Hands the program a channel with the provider; raises Unavailable."""
        shared, client = self.incoming.shared, self.claimer
        with shared.segments.made(self.segment_id, shared.ring_size, client.uid) as made:
            own_doorbell = shared.hub.descriptors()
            end = shared.claimer_end(made, client, self.sought.key, self.claim)
            relay = remote_relay.enter(
                shared.hub, end, protocol=self.sought.carrier.name, on_drop=self._give_back, link=link,
                segment_id=self.segment_id, uid=client.uid,
            )  # fmt: skip
            if not self._tell(made, shared.hub.doorbell_id, own_doorbell):
                shared.hub.drop(relay)
                raise Unavailable("the end that claimed it has gone")
        self.carried = True
        return relay

    def delegate(self) -> Delegated:
        """Facts for a worker that is to be the other end of its channel; raises Unavailable."""
        shared, client, message = self.incoming.shared, self.claimer, self.claim.message
        if self._name in self.incoming.delegated:
            raise Unavailable("that very claim is served already")
        made = shared.segments.make(self.segment_id, shared.ring_size, client.uid)
        self.lent = Descriptors((made, *self.claim.descriptors.take().numbers))
        self.incoming.delegated[self._name] = self
        self.carried = True  # the claim is answered later
        return Delegated(
            self.sought.key, message.cookie, 0, self.segment_id, client.doorbell_name(message.doorbell_page_id),
            message.doorbell_index, client, client.uid, self.lent.numbers, self._taken, self._refuse, self._over,
        )  # fmt: skip

    @property
    def _name(self) -> tuple[ClientId, int]:
        return self.claimer.client_id, self.claim.message.token

    def _taken(self, doorbell_id: bytes, doorbell: Sequence[int]) -> bool:
        sent = len(self.lent) > 0 and self._tell(self.lent[0], doorbell_id, doorbell)
        self.withdraw()
        return sent

    def _refuse(self) -> None:
        if len(self.lent):
            self.incoming.shared.refuse_claim(self.claimer, self.claim.message.token, Refusal.PROTOCOL_FAILED)
            self.withdraw()

    def _over(self) -> None:
        self.withdraw()
        self._give_back()

    def withdraw(self) -> None:
        """Withdraws the claim from a worker: it has been answered, or needs no answer any more."""
        if len(self.lent):
            del self.incoming.delegated[self._name]
            self.lent.close()

    def _give_back(self) -> None:
        self.incoming.shared.segments.release_second(self.segment_id)

    def _tell(self, segment: int, doorbell_id: bytes, doorbell: Sequence[int]) -> bool:
        """Gives the program its channel and the doorbell to ring; False: it is gone."""
        shared = self.incoming.shared
        attach = Message(
            type=Rpc.ATTACH, token=self.claim.message.token, flags=Attach.RELAYED, ring_size=shared.ring_size,
            segment_id=self.segment_id, doorbell_page_id=doorbell_id,
        )  # fmt: skip
        if not shared.send(self.claimer, attach, (segment, *doorbell)):
            return False
        shared.counters.add("remote_joined", "accept")
        return True
