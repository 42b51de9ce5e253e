"""The provider's loop: takes in clients, offers and claims, and answers commands.

One thread, one selector. It never waits for a client: a send that the kernel does not take at once costs the client its
connection, and a client's messages are read a few at a time. Every message is checked before anything changes; a client
that breaks a rule is dropped, an offer or claim that cannot be served is refused, and both are counted with the reason.

Not supported: promotion across network namespaces or users; sockets bound to an interface, which the kernel's exact
lookup by addresses alone does not find (they are refused with NOT_PROVEN and stay on TCP).
"""

from __future__ import annotations

import errno
import json
import os
import resource
import selectors
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any, Final

from sidestep import __version__, limits
from sidestep.config import ProviderSettings
from sidestep.counters import Counters
from sidestep.errors import PeerViolation
from sidestep.native import layout
from sidestep.native.layout import Refusal, Rpc
from sidestep.provider import arena as arenas
from sidestep.provider import memory, proof, rpc
from sidestep.provider.clients import Arena, Brought, Client, Kind
from sidestep.provider.registry import Registry
from sidestep.provider.rpc import Message, Packet
from sidestep.switch.budget import ChannelBudget
from sidestep.switch.offers import ClientId, ConnectionKey, Offer, OfferTable

_UCRED: Final = struct.Struct("iII")  # struct ucred: pid, uid, gid
_FDS_PER_CLIENT: Final = 2  # its connection and its arena
_ACCEPTS_PER_TURN: Final = 64
_ACCEPT_PAUSE_S: Final = 0.1  # after the kernel ran out of descriptors or memory
_SWEEP_SLOTS_MAX: Final = 1 << 18  # slots read in one sweep; beyond it the sweep is given up and nothing released


class Provider:
    """One provider, serving `listener`, a listening AF_UNIX SOCK_SEQPACKET socket."""

    def __init__(
        self, settings: ProviderSettings, listener: socket.socket, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._listener = listener
        self._clock = clock
        self._started_at = self._idle_since = clock()
        self._netns_cookie = proof.netns_cookie()
        self._prover = proof.SocketProver()
        self._registry = Registry(netns_cookie=self._netns_cookie)
        self._clients: dict[ClientId, Client] = {}
        self._silent: dict[ClientId, Client] = {}  # no message yet; in order of arrival
        self._arenas: dict[bytes, Arena] = {}
        self._ids = 0
        self._clients_max, offers_max = _capacity()
        self._offers: OfferTable[Brought] = OfferTable(expiry_s=settings.offer_expiry_s, total_max=offers_max)
        self._budget = ChannelBudget(settings.budget_bytes or _memory_bytes())
        self.counters = Counters()
        self._log_lines_left = limits.LOG_LINES_MAX
        self._stopping = False
        self._accept_paused_until: float | None = None
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        for sock in (listener, self._wake_reader, self._wake_writer):
            sock.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)

    # ---- the loop ----

    def run(self) -> None:
        """Serves until told to stop or idle for too long; main thread only, since it handles SIGTERM and SIGINT."""
        signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle_signal)
        while not self._stopping:
            self._turn(self._timeout())
        self._close()

    def _turn(self, timeout_s: float | None) -> None:
        for key, _ in self._selector.select(timeout_s):
            if isinstance(key.data, Client):
                self._read(key.data)
            elif key.fileobj is self._listener:
                self._accept()
            else:
                self._wake_reader.recv(4096)
        self._handle_timeouts(self._clock())

    def _timeout(self) -> float | None:
        deadlines = [self._offers.next_deadline(), self._accept_paused_until, self._idle_deadline()]
        if self._silent:
            deadlines.append(next(iter(self._silent.values())).accepted_at + limits.HELLO_TIMEOUT_S)
        known = [deadline for deadline in deadlines if deadline is not None]
        return max(0.0, min(known) - self._clock()) if known else None

    def _idle_deadline(self) -> float | None:
        idle_exit_s = self._settings.idle_exit_s
        return self._idle_since + idle_exit_s if idle_exit_s and not self._clients else None

    def _handle_timeouts(self, now: float) -> None:
        while offer := self._offers.poll_expired(now=now):
            self._release(offer)
            self._refuse_offer(self._clients[offer.client], offer.token, Refusal.EXPIRED)
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

    def _handle_signal(self, _number: int, _frame: object) -> None:
        self._stopping = True

    def _close(self) -> None:
        self._registry.set_closing()
        for client in list(self._clients.values()):
            self._drop(client, "shutting_down")
        self._selector.close()
        self._registry.close()
        self._prover.close()
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
        pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        if uid not in (os.geteuid(), 0) or len(self._clients) >= self._clients_max:
            self.counters.add("client_dropped", "too_many" if uid in (os.geteuid(), 0) else "credentials")
            sock.close()
            return
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, limits.CLIENT_SEND_BUFFER)
        self._ids += 1
        client = Client(ClientId(self._ids), sock, pid, uid, self._clock())
        self._clients[client.client_id] = self._silent[client.client_id] = client
        self._selector.register(sock, selectors.EVENT_READ, client)
        self.counters.add("client_accepted")

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
                self._log(f"client {client.pid} is dropped: {violation}")
                self._drop(client, violation.rule)
            except OSError as error:
                self._drop(client, "closed" if error.errno in (errno.ECONNRESET, errno.EPIPE) else "broken")
            except Exception:
                # One client's message must not take the others down; the traceback goes to the log, and it is counted.
                self.counters.add("internal_error", "message")
                self._log(traceback.format_exc())
                self._drop(client, "internal_error")

    def _drop(self, client: Client, reason: str) -> None:
        """Ends a connection and takes its offers back; does nothing if it has ended."""
        if not client.open:
            return
        client.open = False
        self.counters.add("client_dropped", reason)
        self._selector.unregister(client.sock)
        client.sock.close()
        del self._clients[client.client_id]
        self._silent.pop(client.client_id, None)
        for offer in self._offers.handle_disconnect(client.client_id):
            self._release(offer)
            self.counters.add("offer_withdrawn")
        if client.arena:
            client.arena.clients.discard(client.client_id)
            if not client.arena.clients:
                del self._arenas[client.arena.arena_id]
                client.arena.close()
        if client.kind is not Kind.CONTROL:  # looking changes nothing
            self._idle_since = self._clock()

    def _send(self, client: Client, message: Message, fds: Iterable[int] = (), body: bytes = b"") -> bool:
        """Sends at once, or drops the client; False if it is gone."""
        if not client.open:
            return False
        try:
            rpc.send(client.sock, message, tuple(fds), body)
        except OSError as error:
            self._drop(client, "slow" if error.errno in (errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS) else "closed")
            return False
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
        _expect(packet, 1)
        arena = self._arenas.get(packet.message.arena_id)
        if arena is None:
            arenas.check_arena(packet.descriptors[0])
            self._ids += 1
            (fd,) = packet.descriptors.take().numbers
            arena = self._arenas[packet.message.arena_id] = Arena(packet.message.arena_id, self._ids, fd)
        client.arena = arena
        arena.clients.add(client.client_id)
        after = self._settings.promote_after
        welcome = Message(
            type=Rpc.WELCOME,
            promote_after_calls=after.calls,
            promote_after_bytes=after.payload_len,
            ring_size=(self._settings.ring_size, self._settings.ring_size),
            netns_cookie=self._netns_cookie,
            pid=os.getpid(),
        )
        self._send(client, welcome, [self._registry.fd])

    def _on_offer(self, client: Client, packet: Packet) -> None:
        _expect(packet, 3)
        message, key = packet.message, _key(packet.message)
        segment, bell, bell_page = packet.descriptors.numbers
        segment_len = memory.sealed_size(segment, "segment")
        if not _geometry_ok(message.ring_size, segment_len):
            raise PeerViolation(f"a segment of {segment_len} bytes for rings of {message.ring_size}", rule="malformed")
        _check_bell(message, bell, bell_page)
        if refusal := self._refuse_reason(client, message, key, segment_len):
            self._refuse_offer(client, message.token, refusal)
            return
        bucket = self._registry.bucket(key)
        offer = Offer(
            client.client_id, message.token, key, message.ring_size, message.segment_id,
            client.bell_name(message.bell_page_id), message.bell_index, Brought(packet.descriptors.take(), bucket),
        )  # fmt: skip
        if refusal := self._offers.handle_offer(offer, now=self._clock()):
            raise AssertionError(f"the table refused what it had checked: {refusal.name}")
        self._registry.handle_added(bucket)
        self.counters.add("offer_accepted")

    def _refuse_reason(self, client: Client, message: Message, key: ConnectionKey, segment_len: int) -> Refusal | None:
        """Why an offer cannot be taken in; the cheap checks first. Reserves its memory if it can."""
        if self._stopping:
            return Refusal.SHUTTING_DOWN
        if message.netns_cookie != self._netns_cookie:
            return Refusal.FOREIGN_NETNS
        if refusal := self._offers.check(client.client_id, message.token, key):
            return refusal
        if message.segment_id in self._budget:
            return Refusal.DUPLICATE
        if not self._prover.holds(key, message.cookie):
            return Refusal.NOT_PROVEN
        now = self._clock()
        if self._budget.wants_sweep(now=now):
            self._sweep(now)
        if not self._budget.reserve(message.segment_id, segment_len, now=now):
            if not self._budget.may_sweep(now=now):
                return Refusal.NO_BUDGET
            self._sweep(now)
            if not self._budget.reserve(message.segment_id, segment_len, now=now):
                return Refusal.NO_BUDGET
        return None

    def _on_claim(self, client: Client, packet: Packet) -> None:
        _expect(packet, 2)
        message, key = packet.message, _key(packet.message)
        bell, bell_page = packet.descriptors.numbers
        _check_bell(message, bell, bell_page)
        if message.netns_cookie != self._netns_cookie:
            self._refuse_claim(client, message.token, Refusal.FOREIGN_NETNS)
            return
        offer = self._offers.find(key)
        if offer is None:
            self._refuse_claim(client, message.token, Refusal.NO_OFFER)
            return
        if not self._prover.holds(key, message.cookie):
            self._refuse_claim(client, message.token, Refusal.NOT_PROVEN)
            return
        attach = Message(
            type=Rpc.ATTACH,
            token=message.token,
            ring_size=offer.ring_size,
            segment_id=offer.segment_id,
            bell_page_id=offer.bell_page_id,
            bell_index=offer.bell_index,
        )
        if not self._send(client, attach, offer.brought.descriptors.numbers):
            return  # the offer stays for a claimer that lives, unless it was its own and went with it
        self._offers.handle_claimed(offer)
        self._registry.handle_removed(offer.brought.bucket)
        offer.brought.close()
        claimed = Message(
            type=Rpc.CLAIMED,
            token=offer.token,
            bell_page_id=client.bell_name(message.bell_page_id),
            bell_index=message.bell_index,
        )
        if self._send(self._clients[offer.client], claimed, (bell, bell_page)):
            self.counters.add("claim_matched")

    def _on_withdraw(self, client: Client, packet: Packet) -> None:
        _expect(packet, 0)
        offer = self._offers.handle_withdraw(client.client_id, packet.message.token)
        if offer is not None:
            self._release(offer)
            self.counters.add("offer_withdrawn")

    def _on_control(self, client: Client, packet: Packet) -> None:
        _expect(packet, 0)
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
        operation(self, client, packet.message.token, request)

    def _reply(self, client: Client, token: int, document: dict[str, Any], fds: Iterable[int] = ()) -> None:
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
            "offers_pending": len(self._offers),
            "budget_bytes": self._budget.limit_bytes,
            "budget_used_bytes": self._budget.used_bytes,
            "clients_max": self._clients_max,
            "promote_after": str(settings.promote_after),
            "ring_size": settings.ring_size,
            "offer_expiry_s": settings.offer_expiry_s,
            "idle_exit_s": settings.idle_exit_s,
            "counters": self.counters.as_json(),
        }
        self._reply(client, token, document)

    def _control_stop(self, client: Client, token: int, _request: dict[str, Any]) -> None:
        self._registry.set_closing()
        self._stopping = True
        self._reply(client, token, {"stopping": True, "pid": os.getpid()})

    def _control_arenas(self, client: Client, token: int, request: dict[str, Any]) -> None:
        """One page of the arenas, with their descriptors: the command reads them itself, at its own pace and cost."""
        after = request.get("after", 0)
        if not isinstance(after, int):
            self._reply(client, token, {"error": "'after' is not a number"})
            return
        later = sorted((a for a in self._arenas.values() if a.sequence > after), key=lambda arena: arena.sequence)
        page = later[: limits.CONTROL_FDS_PER_PIECE]
        document = {
            "arenas": [arena.arena_id.hex() for arena in page],
            "next": page[-1].sequence if len(later) > len(page) else None,
        }
        self._reply(client, token, document, [arena.fd for arena in page])

    # ---- helpers ----

    def _refuse_offer(self, client: Client, token: int, refusal: Refusal) -> None:
        self.counters.add("offer_refused", refusal.name)
        self._send(client, Message(type=Rpc.REFUSED, token=token, reason=refusal))

    def _refuse_claim(self, client: Client, token: int, refusal: Refusal) -> None:
        self.counters.add("claim_refused", refusal.name)
        self._send(client, Message(type=Rpc.REFUSED, token=token, reason=refusal))

    def _release(self, offer: Offer[Brought]) -> None:
        """Gives back what an offer held that was not claimed."""
        self._registry.handle_removed(offer.brought.bucket)
        self._budget.release(offer.segment_id)
        offer.brought.close()

    def _sweep(self, now: float) -> None:
        in_use: set[bytes] = set()
        slots_left = _SWEEP_SLOTS_MAX
        for arena in self._arenas.values():
            for segment_id in arenas.segments_in_use(arena.fd):
                slots_left -= 1
                if not slots_left:
                    self._budget.handle_sweep(None, now=now)
                    return
                if segment_id is not None:
                    in_use.add(segment_id)
        self._budget.handle_sweep(in_use, now=now)

    def _log(self, text: str) -> None:
        for line in text.rstrip().splitlines():
            if not self._log_lines_left:
                return
            self._log_lines_left -= 1
            last = " (the log ends here: LOG_LINES_MAX)" if not self._log_lines_left else ""
            print(f"sidestep provider {os.getpid()}: {line}{last}", file=sys.stderr, flush=True)  # noqa: T201 - stderr is the log

    _HANDLERS: Final[dict[Rpc, Callable[[Provider, Client, Packet], None]]] = {
        Rpc.HELLO: _on_hello,
        Rpc.OFFER: _on_offer,
        Rpc.CLAIM: _on_claim,
        Rpc.WITHDRAW: _on_withdraw,
        Rpc.CONTROL: _on_control,
    }
    _CONTROL: Final[dict[str, Callable[[Provider, Client, int, dict[str, Any]], None]]] = {
        "status": _control_status,
        "stop": _control_stop,
        "arenas": _control_arenas,
    }


def _expect(packet: Packet, fds_count: int) -> None:
    if len(packet.descriptors) != fds_count:
        raise PeerViolation(
            f"{packet.message.type.name} came with {len(packet.descriptors)} descriptors, not {fds_count}",
            rule="malformed",
        )


def _key(message: Message) -> ConnectionKey:
    return ConnectionKey(
        message.netns_cookie, message.local_addr, message.local_port, message.remote_addr, message.remote_port
    )


def _geometry_ok(ring_size: tuple[int, int], segment_len: int) -> bool:
    return segment_len == limits.CHANNEL_HEADER_SIZE + sum(ring_size) and all(
        limits.RING_SIZE_MIN <= size <= limits.RING_SIZE_MAX and not size & (size - 1) for size in ring_size
    )


def _check_bell(message: Message, bell: int, bell_page: int) -> None:
    memory.check_eventfd(bell, "bell")
    if not memory.sealed_size(bell_page, "bell page") or message.bell_index >= layout.BELL_PAGE_BELLS:
        raise PeerViolation(f"bell {message.bell_index} of an impossible bell page", rule="malformed")


def _capacity() -> tuple[int, int]:
    """How many clients and offers the descriptor limit allows."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = max(0, (1 << 20 if soft == resource.RLIM_INFINITY else soft) - limits.DESCRIPTORS_SPARE)
    clients_max = max(1, min(limits.CLIENTS_MAX, free // 4))
    offers_max = max(1, min(limits.OFFERS_TOTAL_MAX, (free - _FDS_PER_CLIENT * clients_max) // limits.FDS_PER_MESSAGE))
    return clients_max, offers_max


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
