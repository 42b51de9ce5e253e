"""The provider's loop: messages of clients go to their handlers, and everything that has a time is done.

One thread, one loop; `parts` has what it is made of. Every message is checked before anything changes. A client that
breaks a rule is dropped. An offer or claim that cannot be served is refused. Both are counted with the reason.

Not supported: sockets bound to an interface. The kernel's exact lookup by addresses alone does not find them, and
several may have equal addresses. They are refused with NOT_PROVEN and stay on TCP.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from typing import Final

from sidestep import limits
from sidestep.errors import PeerViolation
from sidestep.loop import READ
from sidestep.native.layout import Rpc, Welcome
from sidestep.provider import arena as arenas
from sidestep.provider import commands
from sidestep.provider.clients import Arena, Client, Kind
from sidestep.provider.decisions import subject_of
from sidestep.provider.log import Source, to_stderr
from sidestep.provider.operations import Operations
from sidestep.provider.parts import Parts
from sidestep.provider.proof.lookup import netns_cookie_of
from sidestep.provider.rpc import Message, Packet, expect
from sidestep.provider.users import ROOT
from sidestep.settings import ProviderSettings

_UNDERSTOOD: Final = Welcome.SERVES | Welcome.NEW_DOORBELLS | Welcome.JOINS
_TIMER_ONLY: Final = {int(signal.SIGALRM)}


class Provider:
    """One provider, serving `listener`, a listening AF_UNIX SOCK_SEQPACKET socket."""

    def __init__(
        self,
        settings: ProviderSettings,
        listener: socket.socket,
        *,
        write_log: Callable[[str], None] = to_stderr,
    ) -> None:
        self._settings = settings
        self._stopping = False
        self.parts = parts = Parts(settings, listener, write_log)
        self._idle_since = parts.loop.now
        parts.table.on_message = self._handle
        parts.table.on_dropped = self._handle_dropped
        self._operations = Operations(parts, self._stop)
        self._wake_reader, self._wake_writer = socket.socketpair()
        for sock in (self._wake_reader, self._wake_writer):
            sock.setblocking(False)
        parts.loop.on_readable(self._wake_reader.fileno(), self._signals_reported)
        self._watchdog = Watchdog()

    # ---- the loop ----

    def run(self) -> None:
        """Serves until a signal, a command or idleness ends it; main thread only, as it handles SIGTERM and SIGINT."""
        signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop())
        self._watchdog.take_signal()
        if self._settings.remote:
            for carrier in self.parts.protocols.each():  # other hosts may ask before any program here does
                self.parts.tell(f"{carrier.name} is ready", Source.PROVIDER)
            self.parts.router()  # a connect() waits for what is decided by it: better now than then
        self.parts.follow_policy()
        while not self._stopping:
            self._turn(self._timeout())
        self._leave_relays()
        with self._watchdog:
            self.close()
        self._watchdog.close()

    def close(self) -> None:
        """Lets go of everything."""
        self.parts.close()
        signal.set_wakeup_fd(-1)
        self._wake_reader.close()
        self._wake_writer.close()

    def _stop(self) -> None:
        self._stopping = True

    def _signals_reported(self) -> set[int]:
        """Signals that have come; none, if another turn has seen them."""
        try:
            return set(self._wake_reader.recv(4096))
        except BlockingIOError:
            return set()

    def _leave_relays(self) -> None:
        """Connections that go through here have to be without us from now on."""
        hub, pools = self.parts.hub, self.parts.pools
        self.parts.registry.set_closing()
        self.parts.pairing.shared.closing = True
        hub.leave()
        pools.leave()
        deadline = self.parts.loop.now + limits.RELAY_LEAVE_S
        while not (hub.settled() and pools.settled()) and (left_s := deadline - self.parts.loop.now) > 0:
            self._turn(left_s)

    def _turn(self, timeout_s: float | None) -> None:
        ready = self.parts.waiting.wait(timeout_s)
        if ready == [(self._wake_reader.fileno(), READ)] and self._signals_reported() == _TIMER_ONLY:
            return  # that would set it anew, for ever
        now = self.parts.loop.now  # earlier messages are taken in first, however long this process waits for a CPU then
        with self._watchdog:
            self.parts.loop.run(ready)
            self.parts.hub.handle_turn()
            self._handle_timeouts(now)

    def _timeout(self) -> float | None:
        timed = (self.parts.pairing, self.parts.log, self.parts.table)
        deadlines = [self._idle_deadline(), *(each.next_deadline() for each in timed)]
        known = [deadline for deadline in deadlines if deadline is not None]
        return max(0.0, min(known) - self.parts.loop.now) if known else None

    def _idle_deadline(self) -> float | None:
        parts, idle_exit_s = self.parts, self._settings.idle_exit_s
        if not idle_exit_s or parts.table.clients or parts.explicit or parts.hub:
            return None
        if parts.pending_connects or parts.listeners.leases or parts.pools.connections:
            return None
        return self._idle_since + idle_exit_s

    def _handle_timeouts(self, now: float) -> None:
        parts = self.parts
        parts.pairing.handle_timeouts(now)
        parts.log.handle_timeouts(now)
        parts.table.handle_timeouts(now)
        idle_deadline = self._idle_deadline()
        if idle_deadline is not None and idle_deadline <= now:
            self._stopping = True

    # ---- messages ----

    def _handle(self, client: Client, packet: Packet) -> None:
        kind = Kind.CONTROL if packet.message.type is Rpc.CONTROL else Kind.SHIM
        if client.kind is Kind.NEW:
            if packet.message.type not in (Rpc.HELLO, Rpc.CONTROL):
                raise PeerViolation(f"it began with {packet.message.type.name}", rule="malformed")
            self.parts.table.received(client)
            client.kind, client.version = kind, packet.message.version
        elif client.kind is not kind:
            raise PeerViolation(
                f"it sent {packet.message.type.name} on a {client.kind.value} connection", rule="malformed"
            )
        handler = self._HANDLERS.get(packet.message.type)
        if handler is None:
            raise PeerViolation(f"{packet.message.type.name} is not for providers", rule="malformed")
        handler(self, client, packet)

    def _handle_dropped(self, client: Client) -> None:
        """Drops the offers and waits of a client that has gone."""
        self.parts.pairing.handle_disconnect(client)
        self.parts.pools.handle_disconnect(client)
        self.parts.pending_connects.handle_disconnect(client)
        if client.kind is not Kind.CONTROL:  # looking changes nothing
            self._idle_since = self.parts.loop.now

    def _arena_of(self, client: Client, packet: Packet) -> Arena:
        """The arena that came with a message: one that is known, or a new one."""
        table = self.parts.table
        arena = table.arenas.get(packet.message.arena_id)
        if arena is None:
            arenas.check_arena(packet.descriptors[0])
            from_root = client.uid == ROOT or client in self.parts.lineage
            (fd,) = packet.descriptors.take().numbers
            arena = Arena(
                packet.message.arena_id, next(table.numbers), fd, client.uid, client.pid, from_root,
                family_id=packet.message.segment_id,
            )  # fmt: skip
            table.arenas[packet.message.arena_id] = arena
            table.history.forget(packet.message.arena_id)
        elif not arena.is_of(packet.descriptors[0]):
            raise PeerViolation("an arena that goes by the id of another", rule="arena")
        return arena

    def _on_join(self, client: Client, packet: Packet) -> None:
        expect(packet, 1)
        if client.arena is None or len(client.guests) == limits.GUEST_ARENAS_MAX:
            raise PeerViolation("a JOIN before HELLO, or too many", rule="malformed")
        if os.fstat(packet.descriptors[0]).st_uid != client.uid:
            raise PeerViolation("a JOIN with an arena of another user", rule="arena")
        arena = self._arena_of(client, packet)
        if arena is not client.arena:
            client.guests[arena.arena_id] = arena
            arena.clients.add(client.client_id)

    def _on_leave(self, client: Client, packet: Packet) -> None:
        expect(packet, 0)
        if (arena := client.guests.pop(packet.message.arena_id, None)) is not None:
            self.parts.table.leave(client, arena)

    def _on_hello(self, client: Client, packet: Packet) -> None:
        parts, settings = self.parts, self._settings
        if client.arena:
            raise PeerViolation("a second HELLO", rule="malformed")
        expect(packet, 1)
        arena = self._arena_of(client, packet)
        if arena.from_root and settings.system:
            parts.lineage.remember(client)
        client.arena = arena
        client.subject = subject_of(client.sock, client.pid, client.uid, near=not settings.system)
        arena.clients.add(client.client_id)
        wants = _UNDERSTOOD
        if parts.policy.policy.file_rings(client.subject):
            wants |= Welcome.FILE_RINGS
        near = netns_cookie_of(client.sock) == parts.netns_cookie  # accept() gives a socket of the client's namespace
        welcome = Message(
            type=Rpc.WELCOME,
            flags=(settings.wants if near else settings.wants_elsewhere) | wants,
            promote_after_calls=settings.promote_after.calls,
            promote_after_bytes=settings.promote_after.payload_len,
            ring_size=(settings.ring_size, settings.remote_ring_size),
            netns_cookie=parts.netns_cookie,
            pid=os.getpid(),
        )
        parts.table.send(client, welcome, [parts.registry.fd])

    def _on_ask(self, client: Client, packet: Packet) -> None:
        if (answer := self.parts.explicit.handle_ask(client, packet)) is not None:
            self.parts.table.send(client, answer)

    def _on_serve(self, client: Client, packet: Packet) -> None:
        expect(packet, 0)
        table = self.parts.table
        commands.serve(packet.message, arenas=table.arenas, clients=table.clients, registry=self.parts.registry)

    def _on_new_doorbell(self, client: Client, packet: Packet) -> None:
        table, registry = self.parts.table, self.parts.registry
        hub_id, new_doorbell = commands.new_doorbell_of(client, packet)
        if hub_id == self.parts.hub.doorbell_id:
            self.parts.hub.handle_new_doorbell(new_doorbell)
        elif not self.parts.pools.pass_new_doorbell(hub_id, new_doorbell):
            commands.pass_new_doorbell(
                client, packet, arenas=table.arenas, clients=table.clients, registry=registry, quota=table.quota
            )

    _HANDLERS: Final[dict[Rpc, Callable[[Provider, Client, Packet], None]]] = {
        Rpc.HELLO: _on_hello,
        Rpc.OFFER: lambda self, client, packet: self.parts.pairing.handle_offer(client, packet),
        Rpc.CLAIM: lambda self, client, packet: self.parts.pairing.handle_claim(client, packet),
        Rpc.WITHDRAW: lambda self, client, packet: self.parts.pairing.handle_withdraw(client, packet),
        Rpc.ASK: _on_ask,
        Rpc.SERVE: _on_serve,
        Rpc.NEW_DOORBELL: _on_new_doorbell,
        Rpc.JOIN: _on_join,
        Rpc.LEAVE: _on_leave,
        Rpc.CONTROL: lambda self, client, packet: self._operations.handle(client, packet),
    }


class Watchdog:
    """Timer for work on strangers' descriptors: a call that a signal can end does not last long.

    The last close of a socket waits for its lingering, and that close may be ours, if a stranger has left us a
    duplicate alone. The timer goes on from one such work to the next, and stops when it finds none: setting it takes a
    system call. Main thread only, for SIGALRM.
    """

    def __init__(self) -> None:
        self._working = False
        self._runs = False

    def take_signal(self) -> None:
        signal.signal(signal.SIGALRM, lambda *_: self._handle_timer())  # the signal itself is what ends a call

    def __enter__(self) -> None:
        self._working = True
        if not self._runs:
            self._runs = True
            signal.setitimer(signal.ITIMER_REAL, limits.HELD_UP_S, limits.HELD_UP_S)

    def __exit__(self, *_: object) -> None:
        self._working = False

    def close(self) -> None:
        self._runs = False
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _handle_timer(self) -> None:
        if not self._working:
            self.close()
