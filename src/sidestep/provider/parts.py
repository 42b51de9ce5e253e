"""Parts of a provider, made and joined in one place."""

from __future__ import annotations

import os
import resource
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from sidestep import limits
from sidestep.counters import Counters
from sidestep.loop import Loop
from sidestep.policy import Role, Subject
from sidestep.provider.carry.hub import Hub
from sidestep.provider.carry.lending import made
from sidestep.provider.carry.polling import Waiting
from sidestep.provider.client_quota import ClientQuota
from sidestep.provider.client_table import ClientTable
from sidestep.provider.decisions import Decisions
from sidestep.provider.log import Log, Source, Writer
from sidestep.provider.pairing.address_map import AddressMap
from sidestep.provider.pairing.explicit import ExplicitSockets
from sidestep.provider.pairing.listeners import Listeners
from sidestep.provider.pairing.pairing import Pairing
from sidestep.provider.pairing.pending_connects import PendingConnects
from sidestep.provider.pairing.registry import Registry
from sidestep.provider.pairing.segments import Segments
from sidestep.provider.pairing.shared import Shared
from sidestep.provider.policy_files import PolicyFiles
from sidestep.provider.proof import lookup
from sidestep.provider.proof.evidence import Examiner
from sidestep.provider.proof.path import PathProofs
from sidestep.provider.users import Lineage, Users
from sidestep.provider.workers.pool import WorkerPools
from sidestep.routing import NetworkEvent
from sidestep.settings import ProviderSettings
from sidestep.switch.modules import PROTOCOLS_GROUP, Modules, Protocols, installed
from sidestep.switch.offers import OfferTable
from sidestep.switch.protocol import OffloadModule, OffloadProtocol, Services
from sidestep.switch.transports import TRANSPORTS_GROUP, Transports

if TYPE_CHECKING:
    from sidestep.provider.network.routes import Network

_FDS_PER_CLIENT: Final = 2  # the connection and the arena
_FDS_PER_OFFER: Final = 4  # segment, doorbell, doorbell page, UDP socket
_FDS_PER_CLAIM: Final = 3  # descriptors while its path is proven: doorbell, doorbell page, UDP socket


@dataclass(frozen=True, slots=True)
class Room:
    """Numbers of each kind that the descriptor limit allows."""

    clients: int
    offers: int
    proofs: int
    lineage: int
    leases: int  # binds of explicit sockets
    relays: int  # connections through the provider


def room_of_descriptors(*, remote: bool) -> Room:
    """Room of this process; `remote`: connections with other hosts are carried."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = max(0, (1 << 20 if soft == resource.RLIM_INFINITY else soft) - limits.DESCRIPTORS_SPARE)
    leases_max = min(limits.EXPLICIT_BINDS_TOTAL_MAX, free // 16)
    for_relays = free // (2 if remote else 4)  # all connections with other hosts are among them there
    relays_max = min(limits.RELAYS_MAX, for_relays // limits.RELAY_DESCRIPTORS)
    free -= leases_max + relays_max * limits.RELAY_DESCRIPTORS
    clients_max = max(1, min(limits.CLIENTS_MAX, free // 4))
    proofs_max = max(1, min(limits.PATH_PROOFS_MAX, free // 64))
    lineage_max = max(1, min(limits.LINEAGE_MAX, free // 64))
    left = free - _FDS_PER_CLIENT * clients_max - _FDS_PER_CLAIM * proofs_max - lineage_max
    offers_max = max(1, min(limits.OFFERS_TOTAL_MAX, left // _FDS_PER_OFFER))
    return Room(clients_max, offers_max, proofs_max, lineage_max, leases_max, relays_max)


class Parts:
    """All parts, which is why there are so many; calls from one to another are here as well."""

    def __init__(self, settings: ProviderSettings, listener: socket.socket, write_log: Callable[[str], None]) -> None:
        room = room_of_descriptors(remote=settings.remote is not None)
        self.settings = settings
        self.netns_cookie = lookup.netns_cookie()
        self.clients_max = room.clients
        self.counters = Counters()
        self.loop = Loop(self._failed)
        self.network: Network | None = None
        self.prover = lookup.SocketProver()
        # rights of clients
        self.users = Users(system=settings.system, policy=self._policy_pairs)
        self.log = Log(f"sidestep provider {os.getpid()}", share=self.users.share, write=write_log)
        tell_of_modules = partial(self.tell, writer=Source.MODULES)
        self.services = Services(loop=self.loop, log=tell_of_modules, remote=settings.remote, share=self.users.share)
        self.services.count = self.counters.add
        self.policy = self._policy_of(settings)
        self.lineage = Lineage(self.loop, processes_max=room.lineage)
        self.table = ClientTable(
            listener, self.loop, self.users, ClientQuota(self.users.share, room.clients), self.counters,
            self.tell,
        )  # fmt: skip
        # carriers
        self.protocols: Protocols = Modules(
            OffloadProtocol,  # type: ignore[type-abstract]  # a base class, never instantiated
            partial(installed, PROTOCOLS_GROUP), self.services, self._on_broken_module, self._on_started_module,
        )  # fmt: skip
        self.services.transports = self.transports = Transports(
            partial(installed, TRANSPORTS_GROUP), self.services, self._on_broken_module, self._on_started_module,
            order=settings.remote.transports if settings.remote else (),
            route=lambda *to, **how: self.router().route(*to, **how), on_stopped=self._on_stopped_transport,
        )  # fmt: skip
        self.hub = Hub(self.loop, self.counters, relays_max=room.relays, engine=made(settings.remote))
        self.waiting = Waiting(self.loop, self.hub)
        self.pools = WorkerPools(settings.workers, self.services, self.counters)
        self.services.start_workers = self.pools.start_workers
        # pairs
        self.registry = Registry(netns_cookie=self.netns_cookie)
        self.decisions = Decisions(
            self.protocols, lambda: self.policy.policy, lambda *to, **how: self.router().route(*to, **how), time.time,
            settings.remote,
        )  # fmt: skip
        self.pairing = self._pairing_of(room)
        self.services.await_end = self.pairing.incoming.await_end
        self.listeners = Listeners(self.decisions, self.counters, self.prover)
        self.services.check_listener, self.services.lease_listener = self.listeners.check, self.listeners.lease
        address_map = AddressMap(self.netns_cookie)
        self.services.map_addresses = address_map.add
        self.pending_connects = PendingConnects(
            protocols=self.protocols, users=self.users, counters=self.counters, prover=self.prover,
            send=self.table.send,
        )  # fmt: skip
        self.explicit = ExplicitSockets(
            protocols=self.protocols, decisions=self.decisions, services=self.services, counters=self.counters,
            netns_cookie=self.netns_cookie, leases_max=room.leases, pending_connects=self.pending_connects,
            address_map=address_map,
        )  # fmt: skip
        self.table.on_sent = self.registry.bump_answers

    def _policy_of(self, settings: ProviderSettings) -> PolicyFiles:
        owners = frozenset({0, os.geteuid()}) if settings.system else None
        policy = PolicyFiles(
            settings.policy, log=partial(self.tell, writer=Source.PROVIDER), on_change=self.follow_policy,
            owners=owners,
        )  # fmt: skip
        if (policy_fd := policy.fileno()) is not None:
            self.loop.on_readable(policy_fd, policy.handle_readable)
        return policy

    def _pairing_of(self, room: Room) -> Pairing:
        settings, share = self.settings, self.users.share
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        shared = Shared(
            registry=self.registry,
            protocols=self.protocols,
            decisions=self.decisions,
            counters=self.counters,
            clients=self.table.clients,
            offers=OfferTable(
                expiry_s=settings.offer_expiry_s,
                total_max=room.offers,
                owner_max=lambda uid: share(room.offers, uid),
            ),
            segments=Segments(settings.budget_bytes or memory, self.table.arenas, share, self.loop),
            ring_size=(settings.remote_ring_size, settings.remote_ring_size),
            netns_cookie=self.netns_cookie,
            services=self.services,
            send=self.table.send,
            hub=self.hub,
            prover=self.prover,
        )
        examiner = Examiner(settings.wants, self.prover, netns_cookie=self.netns_cookie)
        paths = PathProofs(self.loop, pending_max=room.proofs)
        return Pairing(shared, examiner, paths, self.users)

    def close(self) -> None:
        """Lets go of everything, clients first."""
        self.registry.set_closing()
        self.table.close()
        self.explicit.close()
        self.lineage.close()
        self.protocols.stop()
        self.pools.close()
        self.transports.stop()
        for part in (self.hub, self.prover, self.waiting, self.policy):
            part.close()
        if self.network is not None:
            self.network.close()
        self.loop.close()
        self.registry.close()

    def tell(self, text: str, writer: Writer) -> None:
        """A line for the log."""
        self.log.add(text, writer, now=self.loop.now)

    def _failed(self, error: Exception) -> None:
        """Logs an error of a call that a module asked for; it must not take the others down."""
        self.counters.add("internal_error", "callback")
        self.tell("".join(traceback.format_exception(error)), Source.MODULES)

    def follow_policy(self) -> None:
        """Makes ordinary sockets ask before they connect if a rule names a protocol that opens connections."""
        self.registry.set_asks_connect(bool(self.settings.remote) and any(
            rule.role is Role.CONNECT and (named := self.protocols.get(rule.target)) and named.capabilities.opens
            for rule in self.policy.policy.rules
        ))  # fmt: skip

    def router(self) -> Network:
        """The network, followed from the first time that a part wants to know it: most providers never do."""
        if self.network is None:
            from sidestep.provider.network.routes import Network  # 0.2 s: not before the provider listens

            self.network = Network(self._handle_network, counters=self.counters)
            self.loop.on_readable(self.network.fileno(), self.network.handle_readable)
        return self.network

    def _policy_pairs(self, one: Subject, other: Subject) -> bool:
        """True if the policy pairs ends of these two users."""
        return self.policy.policy.may_pair(one.uid, one.gids, other.uid, other.gids) is not None

    def _handle_network(self, event: NetworkEvent) -> None:
        """Transports first: what a protocol asks of them then is as the network is."""
        self.transports.handle_network(event)
        self.protocols.handle_network(event)

    def _on_broken_module(self, name: str, error: BaseException) -> None:
        self.counters.add("module_failed", name)
        self.hub.cut_off(name)
        self.hub.leave(name)
        self.tell("".join(traceback.format_exception(error)), Source.MODULES)

    def _on_stopped_transport(self, name: str) -> None:
        for protocol in self.protocols.started():
            protocol.handle_transport_stopped(name)

    def _on_started_module(self, module: OffloadModule) -> None:
        """A module that follows the network learns first how it is now."""
        if type(module).handle_network is not OffloadModule.handle_network:
            for event in self.router().present():
                module.handle_network(event)
