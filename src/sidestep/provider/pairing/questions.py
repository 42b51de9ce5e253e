"""Questions about connections that are not answered at once: who asked, and how the answer is given.

Each is answered by its `Pairing`, which holds the tables; protocols see them as `sidestep.switch.protocol` has them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sidestep.provider.carry.remote_relay import RemoteRelay
from sidestep.provider.clients import Brought, Client
from sidestep.provider.proof.evidence import Evidence
from sidestep.provider.proof.lookup import endpoint_of
from sidestep.provider.proof.path import PathProofs, Proof, Way
from sidestep.provider.rpc import Packet
from sidestep.provider.workers.delegate import Delegated
from sidestep.switch.link import Link
from sidestep.switch.offers import ConnectionKey, Offer
from sidestep.switch.protocol import Incoming, OffloadProtocol, Request
from sidestep.switch.stream import Stream

if TYPE_CHECKING:
    from sidestep.provider.pairing.pairing import Pairing


@dataclass(slots=True, eq=False)
class Search:
    """A claim whose offer was made in another namespace: the first candidate whose path is proven is the one."""

    pairing: Pairing
    claimer: Client
    claim: Packet
    evidence: Evidence
    proofs: list[Proof] = field(default_factory=list)
    failed: int = 0
    over: bool = False

    def try_offer(self, offer: Offer[Brought], paths: PathProofs, its_way: Way, way: Way) -> None:
        """Begins the proof for one candidate; raises LimitReached."""

        def done(proven: bool) -> None:
            if self.over:
                return
            if proven:
                self.pairing.handle_found(self, offer)
                return
            self.failed += 1
            if self.failed == len(self.proofs):
                self.pairing.handle_found(self, None)

        self.proofs.append(paths.start(its_way, way, uid=self.claimer.uid, on_done=done))

    def end(self) -> None:
        """Gives everything back; does nothing the second time."""
        if self.over:
            return
        self.over = True
        self.pairing.forget(self)
        for proof in self.proofs:
            proof.end(False)
        self.evidence.close()
        self.claim.descriptors.close()


@dataclass(slots=True, eq=False)
class RemoteOffer:
    """An offer whose other end is on another host (`sidestep.switch.protocol.Outgoing`)."""

    pairing: Pairing
    offer: Offer[Brought]

    @property
    def request(self) -> Request:
        key = self.offer.key
        local, remote = endpoint_of(key.local_addr, key.local_port), endpoint_of(key.remote_addr, key.remote_port)
        return Request(local, remote, self.offer.brought.route)

    @property
    def wanted(self) -> bool:
        return self.pairing.is_offered(self.offer)

    def carry(self, link: Link) -> RemoteRelay:
        return self.pairing.carry_offered(self.offer, link)

    def refuse(self, why: str) -> None:
        self.pairing.refuse_offered(self.offer, why)

    def delegate(self) -> Delegated:
        return self.pairing.delegate_offered(self.offer)


@dataclass(slots=True, eq=False)
class Sought:
    """An accepting end that is looked for (`sidestep.switch.protocol.Awaited`)."""

    pairing: Pairing
    key: ConnectionKey  # as that end sees it
    bucket: int
    carrier: OffloadProtocol
    on_found: Callable[[Incoming], None]
    on_failed: Callable[[str], None]
    over: bool = False

    def find(self, incoming: RemoteClaim) -> None:
        if self._end():
            try:
                self.on_found(incoming)
            except Exception as error:  # a stranger's code: the others go on
                self.pairing.fail_carrier(self.carrier, error)

    def fail(self, why: str) -> None:
        """It is not, or must not be carried; does nothing the second time."""
        if self._end():
            self.on_failed(why)

    def cancel(self) -> None:
        self._end()

    def _end(self) -> bool:
        over, self.over = self.over, True
        self.pairing.forget_sought(self)
        return not over


@dataclass(slots=True, eq=False)
class RemoteClaim:
    """A claim whose other end is on another host (`sidestep.switch.protocol.Incoming`)."""

    pairing: Pairing
    sought: Sought
    claimer: Client
    claim: Packet
    carried: bool = False

    def carry(self, link: Link) -> RemoteRelay:
        relay = self.pairing.carry_found(self.sought, self.claimer, self.claim, link)
        self.carried = True
        return relay

    def delegate(self) -> Delegated:
        delegated = self.pairing.delegate_found(self.sought, self.claimer, self.claim)
        self.carried = True  # the claim is answered later
        return delegated


@dataclass(slots=True)
class LocalPair:
    """An offer and its claim, for the protocol that carries them (`sidestep.switch.protocol.Pair`)."""

    pairing: Pairing
    offer: Offer[Brought]
    claimer: Client
    claim: Packet
    taken: bool = False
    carried: bool = False  # both ends have been told, and not that it is refused
    streams: tuple[Stream, ...] = ()

    @property
    def request(self) -> Request:
        key = self.offer.key
        local, remote = endpoint_of(key.local_addr, key.local_port), endpoint_of(key.remote_addr, key.remote_port)
        return Request(local, remote, self.offer.brought.route)

    def attach(self) -> None:
        self._take()
        self.carried = True
        self.pairing.attach(self.offer, self.claimer, self.claim)

    def open(self) -> tuple[Stream, Stream]:
        self._take()
        self.streams = streams = self.pairing.open(self.offer, self.claimer, self.claim)
        self.carried = True
        return streams

    def leave(self) -> None:
        """The protocol gives up: what it has opened nobody would serve."""
        for stream in self.streams:
            stream.close()

    def _take(self) -> None:
        if self.taken:
            raise AssertionError("a pair is carried once")
        self.taken = True
