"""Evidence of a client for an offer or a claim, and the provider's judgement of it.

By lookup the provider asks the kernel about the socket that the message names; that works within one user and one
network namespace. By possession the message brings a duplicate of the socket. Where the peer may be in another
namespace it brings also a UDP socket for the proof of the path. A provider that looks up takes duplicates as well: it
asks clients in another namespace for one.
"""

from __future__ import annotations

from dataclasses import dataclass

from sidestep.native.layout import Refusal, Welcome
from sidestep.provider.proof import duplicate as possession
from sidestep.provider.proof import lookup as proof
from sidestep.provider.proof.duplicate import TcpFacts
from sidestep.provider.proof.path import Way
from sidestep.provider.rpc import Message, Packet, expect
from sidestep.switch.offers import ConnectionKey


@dataclass(frozen=True, slots=True)
class Evidence:
    """One end of a connection, and how far its client has shown that it holds it."""

    key: ConnectionKey
    cookie: int
    refusal: Refusal | None = None  # reason why it is none
    facts: TcpFacts | None = None  # facts; None: by lookup
    way: Way | None = None

    def close(self) -> None:
        """Gives up what the proof of the path needs."""
        if self.way is not None:
            self.way.close()


class Examiner:
    """Takes the evidence out of messages."""

    def __init__(self, wants: Welcome, prover: proof.SocketProver, *, netns_cookie: int) -> None:
        self._wants = wants
        self._netns_cookie = netns_cookie
        self._prover = prover

    def take(self, packet: Packet, channel_fds: int) -> Evidence:
        """The evidence of an OFFER or CLAIM, whose other `channel_fds` descriptors stay in the packet.

        Raises:
            PeerViolation: The message brings descriptors of other kinds or numbers.
        """
        proofs = len(packet.descriptors) - channel_fds
        allowed = (1, 2) if self._wants & Welcome.PATH else (1,) if self._wants & Welcome.POSSESSION else (0, 1)
        expect(packet, *(channel_fds + each for each in allowed))
        if not proofs:
            key = _key(packet.message)
            foreign = key.netns_cookie != self._netns_cookie
            return Evidence(key, packet.message.cookie, Refusal.FOREIGN_NETNS if foreign else None)
        # Closed before anything else is done: while it is open, the peer sees no close.
        held = possession.examine(packet.descriptors.take_first())
        way_fd = packet.descriptors.take_first() if proofs == 2 else None
        if held is None:
            if way_fd is not None:
                possession.as_socket(way_fd, "UDP socket").close()
            return Evidence(_key(packet.message), packet.message.cookie, Refusal.NOT_PROVEN)
        way = None
        if way_fd is not None:
            way = Way.take(way_fd, netns_cookie=held.key.netns_cookie, address=held.key.local_addr)
        claimed = (_key(packet.message), packet.message.cookie)
        refusal = None if claimed == (held.key, held.cookie) else Refusal.NOT_PROVEN
        return Evidence(held.key, held.cookie, refusal, held.facts, way)

    def refusal(self, evidence: Evidence) -> Refusal | None:
        """Reason why the evidence does not hold, or None; by lookup this asks the kernel, so ask last."""
        if evidence.refusal or evidence.facts is not None:
            return evidence.refusal
        return None if self._prover.holds(evidence.key, evidence.cookie) else Refusal.NOT_PROVEN


def _key(message: Message) -> ConnectionKey:
    return ConnectionKey(
        message.netns_cookie, message.local_addr, message.local_port, message.remote_addr, message.remote_port
    )
