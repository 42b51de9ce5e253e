"""The provider's loop: takes in clients, offers and claims, and answers commands.

One thread, one selector. It never waits for a client: a send that the kernel does not take at once costs the client its
connection, and a client's messages are read a few at a time. Every message is checked before anything changes; a client
that breaks a rule is dropped, an offer or claim that cannot be served is refused, and both are counted with the reason.

Not supported: sockets bound to an interface, which the kernel's exact lookup by addresses alone does not find and of
which there may be several with equal addresses (they are refused with NOT_PROVEN and stay on TCP).
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import selectors
import signal
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final

from sidestep import __version__, limits
from sidestep.config import Proof, ProviderSettings, peer
from sidestep.counters import Counters
from sidestep.errors import Misuse, PeerViolation, Unavailable
from sidestep.native import layout
from sidestep.native.layout import Rpc
from sidestep.policy import Role, Subject
from sidestep.provider import arena as arenas
from sidestep.provider import capacity, commands, rpc
from sidestep.provider.carry import links
from sidestep.provider.carry.hub import Hub
from sidestep.provider.carry.polling import Waiting
from sidestep.provider.carry.services import ProviderServices
from sidestep.provider.client_quota import ClientQuota
from sidestep.provider.clients import Arena, Client, Kind
from sidestep.provider.decisions import Decisions, subject_of
from sidestep.provider.interrupt import interrupt, interrupted
from sidestep.provider.log import Log, Source, Writer, to_stderr
from sidestep.provider.pairing.address_map import AddressMap
from sidestep.provider.pairing.explicit import ExplicitSockets
from sidestep.provider.pairing.listeners import Listeners
from sidestep.provider.pairing.pairing import Pairing, expect
from sidestep.provider.pairing.pending_connects import PendingConnects
from sidestep.provider.pairing.registry import Registry
from sidestep.provider.policy_files import PolicyFiles
from sidestep.provider.proof import duplicate, lookup
from sidestep.provider.rpc import Message, Packet
from sidestep.provider.users import ROOT, Lineage, Users, in_container
from sidestep.provider.workers.pool import Row, WorkerPools
from sidestep.routing import NetworkEvent
from sidestep.switch.modules import PROTOCOLS_GROUP, TRANSPORTS_GROUP, Modules, Protocols, Transports
from sidestep.switch.offers import ClientId
from sidestep.switch.protocol import Endpoint, OffloadModule, OffloadProtocol, OffloadTransport, Request

if TYPE_CHECKING:
    from sidestep.provider.network.routes import Network

_GOVERNING: Final = ("stop", "module_add", "module_remove")
_NOT_ALLOWED: Final = {
    "error": "only root and the provider's own user may do that",
    "remedy": "be root, outside of containers",
}
_ACCEPTS_PER_TURN: Final = 64
_LINKS_OF_ONE: Final = 1 << 20  # more connections than one process carries: the next one's are counted from here on
_ACCEPT_PAUSE_S: Final = 0.1  # after the kernel ran out of descriptors or memory


class Provider:
    """One provider, serving `listener`, a listening AF_UNIX SOCK_SEQPACKET socket."""

    def __init__(
        self,
        settings: ProviderSettings,
        listener: socket.socket,
        *,
        clock: Callable[[], float] = time.monotonic,
        write_log: Callable[[str], None] = to_stderr,
    ) -> None:
        self._settings = settings
        self._listener = listener
        self._clock = clock
        self._started_at = self._idle_since = clock()
        self._netns_cookie = lookup.netns_cookie()
        self._registry = Registry(netns_cookie=self._netns_cookie)
        self._clients: dict[ClientId, Client] = {}
        self._silent: dict[ClientId, Client] = {}  # no message yet; in order of arrival
        self._arenas: dict[bytes, Arena] = {}
        self._ids = 0
        room = capacity.of_descriptors(remote=settings.remote is not None)
        self._clients_max = room.clients
        self.counters = Counters()
        self._log = Log(
            f"sidestep provider {os.getpid()}", share=lambda whole, uid: self._users.share(whole, uid), write=write_log
        )
        self._stopping = False
        self._accept_paused_until: float | None = None
        self._selector = selectors.DefaultSelector()
        self._services = ProviderServices(self._selector, clock, partial(self._tell, writer=Source.MODULES))
        self._network: Network | None = None
        self._policy = self._policy_of(settings)
        self._users = Users(system=settings.system, policy=self._policy_pairs)
        self._quota = ClientQuota(self._users.share, self._clients_max)
        self._lineage = Lineage(self._services, processes_max=room.lineage)
        self._protocols: Protocols = Modules(
            OffloadProtocol,  # type: ignore[type-abstract]  # what must be derived from it, not made
            partial(_installed, PROTOCOLS_GROUP), self._services, self._on_broken_module, self._on_started_module,
        )  # fmt: skip
        self._transports: Transports = self._transports_installed()
        self._services.transports_known = self._transports
        self._services.remote = settings.remote
        self._modules: dict[str, Protocols | Transports] = {"protocol": self._protocols, "transport": self._transports}
        self.decisions = Decisions(
            self._protocols, lambda: self._policy.policy, self._router, time.time, settings.remote
        )
        self._hub = Hub(self._services, self.counters, relays_max=room.relays, guarded=self._call)
        self._waiting = Waiting(self._selector, self._services, self._hub)
        self._pairing = self._pairing_of(settings, room)
        self._services.find_end = self._pairing.await_end
        self._pools = WorkerPools(
            settings.workers, settings.remote, self._services, self.counters,
            partial(self._tell, writer=Source.MODULES),
        )  # fmt: skip
        self._services.worker_starter = self._pools.start_workers
        self._services.listeners = self._listeners = Listeners(self.decisions, self.counters)
        self._services.names = names = AddressMap(self._netns_cookie)
        self._pending_connects = PendingConnects(
            protocols=self._protocols, users=self._users, counters=self.counters, send=self._send
        )
        self._explicit = self._explicit_of(room, names)
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._watch_sockets()

    def _transports_installed(self) -> Transports:
        return Modules(
            OffloadTransport, partial(_installed, TRANSPORTS_GROUP), self._services, self._on_broken_module,
            self._on_started_module,
        )  # fmt: skip

    def _watch_sockets(self) -> None:
        for sock in (self._listener, self._wake_reader, self._wake_writer):
            sock.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)

    def _policy_of(self, settings: ProviderSettings) -> PolicyFiles:
        owners = frozenset({0, os.geteuid()}) if settings.system else None
        policy = PolicyFiles(
            settings.policy, log=partial(self._tell, writer=Source.PROVIDER), on_change=self._follow_policy,
            owners=owners,
        )  # fmt: skip
        if (policy_fd := policy.fileno()) is not None:
            self._services.watch(policy_fd, policy.handle_readable)
        return policy

    def _pairing_of(self, settings: ProviderSettings, room: capacity.Room) -> Pairing:
        return Pairing(
            settings,
            registry=self._registry,
            protocols=self._protocols,
            decisions=self.decisions,
            counters=self.counters,
            clients=self._clients,
            arenas_known=self._arenas,
            offers_max=room.offers,
            budget_bytes=settings.budget_bytes or capacity.memory_bytes(),
            netns_cookie=self._netns_cookie,
            users=self._users,
            services=self._services,
            proofs_max=room.proofs,
            clock=self._clock,
            send=self._send,
            hub=self._hub,
        )

    def _explicit_of(self, room: capacity.Room, names: AddressMap) -> ExplicitSockets:
        return ExplicitSockets(
            protocols=self._protocols, decisions=self.decisions, services=self._services, counters=self.counters,
            netns_cookie=self._netns_cookie, leases_max=room.leases, pending_connects=self._pending_connects,
            names=names,
        )  # fmt: skip

    # ---- the loop ----

    def run(self) -> None:
        """Serves until told to stop or idle for too long; main thread only, since it handles SIGTERM and SIGINT."""
        signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle_signal)
        signal.signal(signal.SIGALRM, interrupt)
        if self._settings.remote:
            for carrier in self._protocols.each():  # those of other hosts may ask before anybody here does
                self._tell(f"{carrier.name} is ready", Source.PROVIDER)
            self._router()  # a connect() waits for what is decided by it: better now than then
        self._follow_policy()
        while not self._stopping:
            self._turn(self._timeout())
        self._leave_relays()
        with interrupted():
            self._close()

    def _leave_relays(self) -> None:
        """Connections that go through here have to be without us from now on."""
        self._registry.set_closing()
        self._pairing.closing = True
        self._hub.leave()
        self._pools.leave()
        deadline = self._clock() + limits.RELAY_LEAVE_S
        while not (self._hub.settled() and self._pools.settled()) and (left_s := deadline - self._clock()) > 0:
            self._turn(left_s)

    def _turn(self, timeout_s: float | None) -> None:
        ready = self._waiting.wait(timeout_s)
        with interrupted():
            for key, _ in ready:
                if isinstance(key.data, Client):
                    self._read(key.data)
                elif key.data is not None:
                    self._call(key.data)
                elif key.fileobj is self._listener:
                    self._accept()
                else:
                    self._wake_reader.recv(4096)
            self._hub.handle_turn()
            self._handle_timeouts(self._clock())

    def _timeout(self) -> float | None:
        deadlines = [
            self._pairing.next_deadline(),
            self._services.next_deadline(),
            self._log.next_deadline(),
            self._accept_paused_until,
            self._idle_deadline(),
        ]
        if self._silent:
            deadlines.append(next(iter(self._silent.values())).accepted_at + limits.HELLO_TIMEOUT_S)
        known = [deadline for deadline in deadlines if deadline is not None]
        return max(0.0, min(known) - self._clock()) if known else None

    def _idle_deadline(self) -> float | None:
        idle_exit_s = self._settings.idle_exit_s
        if not idle_exit_s or self._clients or self._explicit or self._hub:
            return None
        if self._pending_connects or self._listeners.leases:
            return None
        if self._pools.connections:
            return None
        return self._idle_since + idle_exit_s

    def _handle_timeouts(self, now: float) -> None:
        self._pairing.handle_timeouts(now)
        self._log.handle_timeouts(now)
        while callback := self._services.poll_due(now):
            self._call(callback)
        for driven in self._services.driven_due():
            self._call(partial(driven.turn, 0))
        while self._silent:
            client = next(iter(self._silent.values()))
            if client.accepted_at + limits.HELLO_TIMEOUT_S > now:
                break
            self._drop(client, "silent")
        if self._accept_paused_until is not None and self._accept_paused_until <= now:
            self._accept_paused_until = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        idle_deadline = self._idle_deadline()
        if idle_deadline is not None and idle_deadline <= now:
            self._stopping = True

    def _call(self, callback: Callable[[], object]) -> None:
        """Something that a module asked for: what it raises must not take the others down."""
        try:
            callback()
        except Exception:
            self.counters.add("internal_error", "callback")
            self._tell(traceback.format_exc(), Source.MODULES)

    def _on_broken_module(self, name: str, error: BaseException) -> None:
        self.counters.add("module_failed", name)
        self._hub.leave(name)
        self._tell("".join(traceback.format_exception(error)), Source.MODULES)

    def _follow_policy(self) -> None:
        """Whether ordinary sockets have to ask before they connect: a rule names a protocol that opens connections."""
        self._registry.set_asks_connect(bool(self._settings.remote) and any(
            rule.role is Role.CONNECT and (named := self._protocols.get(rule.target)) and named.capabilities.opens
            for rule in self._policy.policy.rules
        ))  # fmt: skip

    def _router(self) -> Network:
        """The network, followed from the first time that somebody wants to know it: most providers never do."""
        if self._network is None:
            from sidestep.provider.network.routes import Network  # 0.2 s: not before the provider listens

            self._network = Network(self._handle_network, counters=self.counters)
            self._services.watch(self._network.fileno(), self._network.handle_readable)
        return self._network

    def _handle_network(self, event: NetworkEvent) -> None:
        """Transports first: what a protocol asks of them then is as the network is."""
        self._transports.handle_network(event)
        self._protocols.handle_network(event)

    def _on_started_module(self, module: OffloadModule) -> None:
        """A module that follows the network learns first how it is now."""
        if type(module).handle_network is not OffloadModule.handle_network:
            for event in self._router().present():
                module.handle_network(event)

    def _handle_signal(self, _number: int, _frame: object) -> None:
        self._stopping = True

    def _close(self) -> None:
        self._registry.set_closing()
        for client in list(self._clients.values()):
            self._drop(client, "shutting_down")
        self._explicit.close()
        self._lineage.close()
        self._protocols.stop()
        self._pools.close()
        self._transports.stop()
        self._pending_connects.close()
        self._hub.close()
        self._pairing.close()
        self._waiting.close()
        self._listeners.close()
        self._quota.close()
        self._policy.close()
        if self._network is not None:
            self._network.close()
        self._selector.close()
        self._registry.close()
        signal.set_wakeup_fd(-1)
        self._wake_reader.close()
        self._wake_writer.close()

    # ---- clients ----

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    raise
                self._selector.unregister(self._listener)
                self._accept_paused_until = self._clock() + _ACCEPT_PAUSE_S
                return
            self._take_in(sock)

    def _take_in(self, sock: socket.socket) -> None:
        pid, uid = peer(sock)
        if refusal := self._client_refusal(uid):
            self.counters.add("client_dropped", refusal)
            sock.close()
            return
        self._quota.enter(uid)
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, limits.CLIENT_SEND_BUFFER)
        self._ids += 1
        client = Client(ClientId(self._ids), sock, pid, uid, self._clock())
        self._clients[client.client_id] = self._silent[client.client_id] = client
        self._selector.register(sock, selectors.EVENT_READ, client)
        self.counters.add("client_accepted")

    def _client_refusal(self, uid: int) -> str | None:
        if not self._users.admits(uid):
            return "credentials"
        return "too_many" if self._quota.full(uid) else None

    def _policy_pairs(self, one: Subject, other: Subject) -> bool:
        """Whether the policy pairs ends of these two users."""
        return self._policy.policy.may_pair(one.uid, one.gids, other.uid, other.gids) is not None

    def _read(self, client: Client) -> None:
        for _ in range(limits.MESSAGES_PER_TURN):
            if not client.open:
                return
            try:
                packet = rpc.receive(client.sock)
                if packet is None:
                    self._drop(client, "closed")
                    return
                with packet.descriptors:
                    self._handle(client, packet)
            except BlockingIOError:
                return
            except PeerViolation as violation:
                self._tell(f"client {client.pid} is dropped: {violation}", client.uid)
                self._drop(client, violation.rule)
            except OSError as error:
                self._drop(client, "closed" if error.errno in (errno.ECONNRESET, errno.EPIPE) else "broken")
            except Exception:
                # One client's message must not take the others down; the traceback goes to the log, and it is counted.
                self.counters.add("internal_error", "message")
                self._tell(traceback.format_exc(), client.uid)
                self._drop(client, "internal_error")

    def _drop(self, client: Client, reason: str) -> None:
        """Ends a connection and takes its offers back; does nothing if it has ended."""
        if not client.open:
            return
        client.open = False
        self.counters.add("client_dropped", reason)
        self._selector.unregister(client.sock)
        self._quota.leave(client)
        del self._clients[client.client_id]
        self._silent.pop(client.client_id, None)
        self._pairing.handle_disconnect(client)
        self._pools.handle_disconnect(client)
        self._pending_connects.handle_disconnect(client)
        if client.arena:
            client.arena.clients.discard(client.client_id)
            if not client.arena.clients:
                del self._arenas[client.arena.arena_id]
                client.arena.close()
        if client.kind is not Kind.CONTROL:  # looking changes nothing
            self._idle_since = self._clock()

    def _send(self, client: Client, message: Message, fds: Sequence[int] = (), body: bytes = b"") -> bool:
        """Sends at once, or drops the client; False if it is gone."""
        if not client.open:
            return False
        try:
            self._quota.count(client, len(fds))
            rpc.send(client.sock, message, fds, body)
        except OSError as error:
            self._drop(client, "slow" if error.errno in (errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS) else "closed")
            return False
        self._registry.bump_answers()
        return True

    # ---- messages ----

    def _handle(self, client: Client, packet: Packet) -> None:
        kind = Kind.CONTROL if packet.message.type is Rpc.CONTROL else Kind.SHIM
        if client.kind is Kind.NEW:
            if packet.message.type not in (Rpc.HELLO, Rpc.CONTROL):
                raise PeerViolation(f"it began with {packet.message.type.name}", rule="malformed")
            self._silent.pop(client.client_id, None)
            client.kind = kind
        elif client.kind is not kind:
            raise PeerViolation(
                f"it sent {packet.message.type.name} on a {client.kind.value} connection", rule="malformed"
            )
        handler = self._HANDLERS.get(packet.message.type)
        if handler is None:
            raise PeerViolation(f"{packet.message.type.name} is not for providers", rule="malformed")
        handler(self, client, packet)

    def _on_hello(self, client: Client, packet: Packet) -> None:
        if client.arena:
            raise PeerViolation("a second HELLO", rule="malformed")
        expect(packet, 1)
        arena = self._arenas.get(packet.message.arena_id)
        if arena is None:
            arenas.check_arena(packet.descriptors[0])
            self._ids += 1
            from_root = client.uid == ROOT or client in self._lineage
            (fd,) = packet.descriptors.take().numbers
            arena = Arena(packet.message.arena_id, self._ids, fd, client.uid, from_root)
            self._arenas[packet.message.arena_id] = arena
        elif not arena.is_of(packet.descriptors[0]):
            raise PeerViolation("an arena that goes by the id of another", rule="arena")
        if arena.from_root and self._settings.system:
            self._lineage.remember(client)
        client.arena = arena
        client.subject = subject_of(client.sock, client.pid, client.uid, near=not self._settings.system)
        arena.clients.add(client.client_id)
        after = self._settings.promote_after
        welcome = Message(
            type=Rpc.WELCOME,
            flags=self._settings.wants,
            promote_after_calls=after.calls,
            promote_after_bytes=after.payload_len,
            ring_size=(self._settings.ring_size, self._settings.ring_size),
            netns_cookie=self._netns_cookie,
            pid=os.getpid(),
        )
        self._send(client, welcome, [self._registry.fd])

    def _on_ask(self, client: Client, packet: Packet) -> None:
        if (answer := self._explicit.handle_ask(client, packet)) is not None:
            self._send(client, answer)

    def _on_control(self, client: Client, packet: Packet) -> None:
        if len(packet.descriptors):
            expect(packet, 1)
            client.at_home = duplicate.made_in(packet.descriptors[0], self._netns_cookie) and not in_container(client)
        if len(packet.body) > limits.CONTROL_REQUEST_MAX:
            raise PeerViolation("a control request is too long", rule="malformed")
        try:
            request = json.loads(packet.body)
        except (ValueError, RecursionError) as error:
            raise PeerViolation(f"a control request is not JSON: {error}", rule="malformed") from error
        operation = self._CONTROL.get(str(request.get("op"))) if isinstance(request, dict) else None
        if operation is None:
            self._reply(client, packet.message.token, {"error": f"unknown request; known: {sorted(self._CONTROL)}"})
            return
        if request["op"] in _GOVERNING and not self._users.governs(client):
            self._reply(client, packet.message.token, _NOT_ALLOWED)
            return
        operation(self, client, packet.message.token, request)

    def _reply(self, client: Client, token: int, document: dict[str, Any], fds: Sequence[int] = ()) -> None:
        body = json.dumps(document).encode()
        if len(body) > limits.CONTROL_PIECE_MAX:
            raise AssertionError(f"a control reply of {len(body)} bytes")
        self._send(client, Message(type=Rpc.CONTROL_REPLY, token=token), fds, body)

    # ---- commands ----

    def _control_status(self, client: Client, token: int, _request: dict[str, Any]) -> None:
        settings = self._settings
        document = {
            "pid": os.getpid(),
            "version": __version__,
            "layout_version": layout.LAYOUT_VERSION,
            "socket": str(settings.socket),
            "uptime_s": round(self._clock() - self._started_at, 3),
            "netns_cookie": self._netns_cookie,
            "shims": sum(other.kind is Kind.SHIM for other in self._clients.values()),
            "families": len(self._arenas),
            "offers_pending": len(self._pairing),
            "explicit_binds": len(self._explicit),
            "budget_bytes": self._pairing.budget.limit_bytes,
            "budget_used_bytes": self._pairing.budget.used_bytes,
            "clients_max": self._clients_max,
            "promote_after": str(settings.promote_after),
            "ring_size": settings.ring_size,
            "offer_expiry_s": settings.offer_expiry_s,
            "idle_exit_s": settings.idle_exit_s,
            "proves_paths": bool(settings.wants & layout.Welcome.PATH),
            "workers": self._pools.as_json(),
            "policy": self._policy.as_json(),
            "counters": self.counters.as_json(),
        }
        self._reply(client, token, document)

    def _control_stop(self, client: Client, token: int, _request: dict[str, Any]) -> None:
        self._registry.set_closing()
        self._stopping = self._pairing.closing = True
        self._reply(client, token, {"stopping": True, "pid": os.getpid()})

    def _control_arenas(self, client: Client, token: int, request: dict[str, Any]) -> None:
        """One page of the arenas, with their descriptors: the command reads them itself, at its own pace and cost."""
        after = request.get("after", 0)
        if not isinstance(after, int):
            self._reply(client, token, {"error": "'after' is not a number"})
            return
        visible = (arena for arena in self._arenas.values() if self._users.sees(client, arena))
        later = sorted((a for a in visible if a.sequence > after), key=lambda arena: arena.sequence)
        page = later[: limits.CONTROL_FDS_PER_PIECE]
        document = {
            "arenas": [arena.arena_id.hex() for arena in page],
            "next": page[-1].sequence if len(later) > len(page) else None,
        }
        self._reply(client, token, document, [arena.fd for arena in page])

    def _control_links(self, client: Client, token: int, request: dict[str, Any]) -> None:
        """One page of the connections with other hosts: of those that are carried here, then of each worker's."""
        after = request.get("after", 0)
        if not isinstance(after, int) or not 0 <= after < _LINKS_OF_ONE * limits.WORKERS_MAX:
            self._reply(client, token, {"error": "'after' is not a number"})
            return
        place, begin = divmod(after, _LINKS_OF_ONE)
        slots = self._pools.slots

        def show(rows: list[Row], more: bool) -> None:
            later = after + len(rows) if more else (place + 1) * _LINKS_OF_ONE if place < len(slots) else None
            page = [details for uid, details in rows if self._users.sees_user(client, uid)]
            self._reply(client, token, {"links": page, "next": later})

        if place:
            if place <= len(slots):
                slots[place - 1].show(begin, show)
            else:
                show([], False)
            return
        show(*links.page(self._hub, begin))

    def _control_modules(self, client: Client, token: int, _request: dict[str, Any]) -> None:
        found = [one.as_json(kind) for kind, modules in self._modules.items() for one in modules.status()]
        self._reply(client, token, {"modules": found})

    def _control_module_add(self, client: Client, token: int, request: dict[str, Any]) -> None:
        self._change_module(client, token, "add", request)

    def _control_module_remove(self, client: Client, token: int, request: dict[str, Any]) -> None:
        """What goes to other hosts needs the protocol until it is back on TCP."""
        name = str(request.get("name"))
        deadline = self._clock() + limits.RELAY_LEAVE_S
        if request.get("kind", "protocol") == "protocol":
            self._hub.leave(name)
            self._hub.refused.add(name)
            self._pools.leave(name)

        def remove() -> None:
            carries = any(one.protocol == name for one in self._hub)
            waits = (carries and not self._hub.settled(name)) or not self._pools.settled(name)
            if waits and self._clock() < deadline:
                self._services.call_later(limits.RELAY_LEAVE_LOOK_S, remove)
                return
            self._hub.refused.discard(name)
            if self._change_module(client, token, "remove", request):
                self._hub.leave(name)

        remove()

    def _change_module(self, client: Client, token: int, change: str, request: dict[str, Any]) -> bool:
        """Adds or removes a module; whether it was done, and a protocol."""
        modules = self._modules.get(str(request.get("kind", "protocol")))
        if modules is None:
            self._reply(client, token, {"error": f"unknown kind of module; known: {sorted(self._modules)}"})
        else:
            try:
                (modules.add if change == "add" else modules.remove)(str(request.get("name")))
            except Unavailable as error:
                self._reply(client, token, {"error": error.message, "remedy": error.remedy})
            else:
                self._follow_policy()
                self._reply(client, token, {"done": True})
                return modules is self._protocols
        return False

    def _control_decide(self, client: Client, token: int, request: dict[str, Any]) -> None:
        """A dry run: what would become of a connection."""
        try:
            endpoint = Endpoint(ip_address(request["address"]), int(request["port"]))
            role = Role(request["role"])
            uid = int(request.get("uid", client.uid))
            subject = Subject((str(request["program"]),), uid, frozenset(map(int, request.get("gids", ()))))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            self._reply(client, token, {"error": f"not a connection: {error!r}"})
            return
        if role is Role.CONNECT:
            verdict = self.decisions.connect(subject, Request(None, endpoint, None), dry=True)
        else:
            verdict = self.decisions.would_listen(subject, endpoint)
        carrier, paths = verdict.protocol, self._settings.proof is Proof.PATH
        within = carrier is not None and not carrier.capabilities.remote and not paths
        self._reply(client, token, verdict.as_json() | {"within_namespace": within})

    def _control_trace(self, client: Client, token: int, request: dict[str, Any]) -> None:
        after = request.get("after", 0)
        if not isinstance(after, int):
            self._reply(client, token, {"error": "'after' is not a number"})
            return
        self._reply(client, token, self.decisions.trace(after, shown=partial(self._users.sees_user, client)))

    def _control_order(self, client: Client, token: int, request: dict[str, Any]) -> None:
        kind = commands.OPERATIONS[request["op"]]
        try:
            reply = commands.give(
                kind, client, request, arenas=self._arenas, clients=self._clients, registry=self._registry,
                sees=self._users.sees,
            )  # fmt: skip
        except Misuse as error:
            self._reply(client, token, {"error": error.message})
            return
        self.counters.add("order_passed" if reply["told"] else "order_refused", str(reply["passed"]))
        self._reply(client, token, reply)

    # ---- helpers ----

    def _tell(self, text: str, writer: Writer) -> None:
        self._log.add(text, writer, now=self._clock())

    _HANDLERS: Final[dict[Rpc, Callable[[Provider, Client, Packet], None]]] = {
        Rpc.HELLO: _on_hello,
        Rpc.OFFER: lambda self, client, packet: self._pairing.handle_offer(client, packet),
        Rpc.CLAIM: lambda self, client, packet: self._pairing.handle_claim(client, packet),
        Rpc.WITHDRAW: lambda self, client, packet: self._pairing.handle_withdraw(client, packet),
        Rpc.ASK: _on_ask,
        Rpc.CONTROL: _on_control,
    }
    _CONTROL: Final[dict[str, Callable[[Provider, Client, int, dict[str, Any]], None]]] = {
        "status": _control_status,
        "stop": _control_stop,
        "arenas": _control_arenas,
        "links": _control_links,
        "modules": _control_modules,
        "module_add": _control_module_add,
        "module_remove": _control_module_remove,
        "decide": _control_decide,
        "trace": _control_trace,
        "demote": _control_order,
        "promote": _control_order,
    }


def _installed(group: str) -> dict[str, EntryPoint]:
    """The offload protocols or transports that are installed now."""
    importlib.invalidate_caches()
    return {point.name: point for point in entry_points(group=group)}
