"""The gateway: relays between TCP and SDP for hosts that know only one of them.

    gateway = Gateway(rules, log)
    while not gateway.drained: gateway.loop.turn()

A TCP client's connection is taken, its way on is made, and only then its bytes are read: SDP to the port that the
other host's port mapper names, or, where the rule says so, TCP if that fails. An SDP client's request is answered once
TCP has connected. A rule that has all the connections it may have takes no more: TCP clients wait in the kernel's
queue, SDP clients are rejected.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final

from sidestep import limits
from sidestep.accepting import PAUSE_S, Exhausted, accepted
from sidestep.errors import LimitReached, PeerViolation, SidestepError, Unavailable
from sidestep.loop import READ, Loop, Timer
from sidestep.rdma.tools.devices import source_for
from sidestep.remote.bridge import Bridge
from sidestep.remote.dial import Dial, reset
from sidestep.remote.gateway_rules import Rule, check_rules
from sidestep.remote.inbound import BY_CARRIER, Inbound, InboundRuntime, settings_for
from sidestep.remote.node import Node
from sidestep.remote.peers import Peers
from sidestep.remote.pump import Pieces, Pump
from sidestep.sdp.endpoint import unheard
from sidestep.sdp.requests import SdpEvent, SdpEventKind, Told
from sidestep.sdp.settings import Addresses, Carrier
from sidestep.sdp.stack import Stack
from sidestep.switch.protocol import Endpoint

if TYPE_CHECKING:
    from sidestep.rdma.cm import ConnectionRequest
    from sidestep.routing import Address
    from sidestep.sdp.endpoint import SdpStream

_BACKLOG: Final = 512
_INBOUND_S: Final = limits.MPA_DECISION_S - 1.0  # who asks by iWARP hears in time that nobody answers
Log = Callable[[str], None]


@dataclass(slots=True)
class Tally:
    """What happened to the connections of one rule."""

    active: int = 0
    joined: int = 0
    fell_back: int = 0  # of these, those that TCP carries on
    refused: int = 0  # not allowed, or too many
    failed: int = 0  # the target was not to be had
    reset: int = 0  # by either end
    to_target: int = 0  # bytes
    to_client: int = 0


def with_running(tally: Tally, running: Iterable[tuple[int, int]]) -> Tally:
    """The counts, and the bytes that connections have moved so far: there, and back."""
    to_target, to_client = tally.to_target, tally.to_client
    for there, back in running:
        to_target += there
        to_client += back
    return replace(tally, to_target=to_target, to_client=to_client)


class Gateway:
    """Relays until it is drained.

    Args:
        rules: What to relay.
        log: Gets a line for whatever begins, ends or fails.

    Raises:
        Misuse: Two rules are for one place.
        Unavailable: A place to listen at cannot be had.
    """

    def __init__(self, rules: list[Rule], log: Log) -> None:
        check_rules(rules)
        self.loop = Loop()
        self.log = log
        self.pieces = Pieces()
        self.draining = False
        self._stacks: dict[Address, Node] = {}
        self._served: list[_FromTcp | _FromSdp] = []
        self._gone: list[_FromTcp | _FromSdp] = []  # whose rule is no more; their connections go on
        self._mapped: dict[Endpoint, _FromSdp] = {}
        try:
            self.peers = Peers(self.loop, self._port_for, log)
            for rule in rules:
                self._serve(rule)
        except BaseException:
            self.close()
            raise

    def _serve(self, rule: Rule) -> None:
        if rule.listens_tcp:
            self._served.append(_FromTcp(self, rule))
        else:
            self._mapped[rule.listen] = made = _FromSdp(self, rule)
            self._served.append(made)

    def reload(self, rules: list[Rule]) -> None:
        """Goes over to these rules. No connection ends: those whose rule is gone go on without it.

        A rule that cannot listen is told to the log, and the others go on.

        Raises:
            Misuse: There are none, too many, or two for one place; then nothing has changed.
        """
        check_rules(rules)
        if self.draining:
            return
        wanted, kept = list(rules), []
        for each in self._served:
            if each.rule in wanted:
                wanted.remove(each.rule)
                kept.append(each)
            else:
                each.stop()
                self._gone.append(each)
        self._served = kept
        self._gone = [each for each in self._gone if each.tally.active]
        self._mapped = {each.rule.listen: each for each in kept if isinstance(each, _FromSdp)}
        for rule in wanted:
            try:
                self._serve(rule)
            except SidestepError as why:
                self.log(f"'{rule}' is not relayed: {why}")
        self.log(f"{len(self._served)} rules are relayed, {sum(each in kept for each in self._served)} as before")

    def at(self, address: Address) -> Stack:
        """The stack at an address of this host; raises Unavailable."""
        if address not in self._stacks:
            if len(self._stacks) >= limits.REMOTE_ADDRESSES_MAX:
                raise Unavailable(f"{limits.REMOTE_ADDRESSES_MAX} addresses are in use")
            self._stacks[address] = Node(self.loop, address, private_bytes_max=limits.REMOTE_PRIVATE_BYTES)
        return self._stacks[address].stack

    @property
    def active(self) -> int:
        return sum(each.tally.active for each in (*self._served, *self._gone))

    @property
    def drained(self) -> bool:
        """Whether it was told to end, and nothing is left."""
        return self.draining and not self.active

    def drain(self) -> None:
        """Takes no more connections; those there are go on."""
        self.draining = True
        for each in self._served:
            each.stop()

    def close(self) -> None:
        """Ends everything at once."""
        for each in (*self._served, *self._gone):
            each.stop()
            each.abort()
        for at in self._stacks.values():
            at.close()
        if hasattr(self, "peers"):
            self.peers.close()
        self.loop.close()

    def status(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "draining": self.draining,
            "active": self.active,
            "rules": [
                {"rule": str(each.rule), "listening": str(each.listening), "rdma_port": each.rdma_port}
                | asdict(each.counted)
                for each in self._served
            ],
        }

    def _port_for(self, local: Address, host: Address, service: int) -> tuple[int, float] | None:
        found = self._mapped.get(Endpoint(local, service))
        if found is None or self.draining or not found.rule.admits(host):
            return None
        return found.rdma_port, limits.SERVICE_TOLD_S


class _FromTcp:
    """A rule by which TCP clients reach an SDP service."""

    def __init__(self, gateway: Gateway, rule: Rule) -> None:
        self.gateway = gateway
        self.rule = rule
        self.tally = Tally()
        self.rdma_port = rule.rdma_port  # 0: asked for
        self._crossings: dict[_Crossing, None] = {}
        self._watched = False
        self._pause: Timer | None = None
        family = socket.AF_INET if rule.listen.address.version == 4 else socket.AF_INET6
        self._sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                self._sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            self._sock.bind((str(rule.listen.address), rule.listen.port))
            self._sock.listen(_BACKLOG)
        except OSError as error:
            self._sock.close()
            raise Unavailable(
                f"nobody can listen at {rule.listen}: {error.strerror}",
                remedy="choose another port, or stop who has it",
            ) from error
        self.listening = Endpoint(rule.listen.address, self._sock.getsockname()[1])
        self._watch()

    def stop(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
        if self._sock.fileno() >= 0:
            if self._watched:
                self.gateway.loop.forget(self._sock.fileno())
            self._sock.close()

    def abort(self) -> None:
        for crossing in list(self._crossings):
            crossing.abort("the gateway stops")

    def ended(self, crossing: _Crossing) -> None:
        if crossing in self._crossings:
            del self._crossings[crossing]
            self.tally.active -= 1
            self._watch()

    @property
    def counted(self) -> Tally:
        """With the bytes of connections that there are."""
        return with_running(self.tally, (crossing.counts for crossing in self._crossings))

    def _watch(self) -> None:
        """While there is room for one more."""
        self._pause = None
        wanted = self.tally.active < self.rule.connections_max
        if self._sock.fileno() >= 0 and wanted != self._watched:
            self._watched = wanted
            if wanted:
                self.gateway.loop.watch(self._sock.fileno(), READ, self._ready)
            else:
                self.gateway.loop.forget(self._sock.fileno())

    def _ready(self, _events: int) -> None:
        try:
            for sock, address in accepted(self._sock):
                self._take_in(sock, Endpoint(ip_address(address[0].partition("%")[0]), address[1]))
                if self.tally.active >= self.rule.connections_max:
                    break
        except Exhausted as why:
            self.gateway.log(f"{self.rule}: no connection can be taken: {why}")
            self.gateway.loop.forget(self._sock.fileno())
            self._watched = True  # until the pause is over
            self._pause = self.gateway.loop.call_later(PAUSE_S, self._go_on)
            return
        self._watch()

    def _take_in(self, sock: socket.socket, client: Endpoint) -> None:
        if self.rule.admits(client.address):
            self.tally.active += 1
            self._crossings[_Crossing(self, sock, client)] = None
        else:
            self.tally.refused += 1
            self.gateway.log(f"{client} by '{self.rule}' is refused: it is none of the hosts of the rule")
            reset(sock)

    def _go_on(self) -> None:
        self._watched = False
        self._watch()


class _Crossing:
    """One TCP client on its way to SDP."""

    def __init__(self, served: _FromTcp, sock: socket.socket, client: Endpoint) -> None:
        self._served = served
        self._gateway = served.gateway
        self._rule = served.rule
        self._sock = sock
        self._client = client
        self._stream: SdpStream | None = None
        self._dial: Dial | None = None
        self._carrier: Pump | Bridge | None = None
        self._over = False
        self._timer: Timer | None = None
        self._port = 0  # of RDMA, there
        self._gateway.loop.soon(self._begin)

    def abort(self, why: str) -> None:
        if isinstance(self._carrier, Pump | Bridge):
            self._carrier.abort(why)
        else:
            self._give_up(why)

    @property
    def counts(self) -> tuple[int, int]:
        """Bytes to the target, and to the client."""
        carrier = self._carrier
        if isinstance(carrier, Pump):
            return carrier.to_sdp, carrier.to_tcp
        return carrier.counts if carrier is not None else (0, 0)

    # ---- by SDP ----

    def _begin(self) -> None:
        if self._over:
            return
        target = self._rule.target
        try:
            self._source = ip_address(source_for(str(target.address)))
        except Unavailable as why:
            self._fall_back(why.message)
            return
        if self._rule.rdma_port:
            self._connect(self._rule.rdma_port)
        else:
            self._gateway.peers.ask(Endpoint(self._source, self._client.port), target, self._answered)

    def _answered(self, port: int | None) -> None:
        if self._over:
            return
        if port is None:
            self._fall_back(f"no port mapper at {self._rule.target.address} knows an RDMA port for it")
        else:
            self._connect(port)

    def _connect(self, port: int) -> None:
        target = self._rule.target.address
        self._port = port
        addresses = Addresses(self._source, self._client.port, target, port)
        self._timer = self._gateway.loop.call_later(limits.GATEWAY_CONNECT_S, self._late)
        try:
            stack = self._gateway.at(self._source)
            self._stream = stack.connect(str(target), addresses, self._told, BY_CARRIER[Carrier.IWARP])
        except SidestepError as why:
            self._fall_back(why.message)

    def _late(self) -> None:
        if self._stream is not None:
            self._stream.tell = unheard
            self._stream.abort()
        self._fall_back("it does not answer")

    def _told(self, stream: SdpStream, event: Told) -> None:
        if not isinstance(event, SdpEvent) or self._over:
            return
        if event.kind is SdpEventKind.ESTABLISHED:
            self._cancel_timer()
            self._log(f"goes on by SDP to {self._rule.target}")
            self._served.tally.joined += 1
            self._carrier = Pump(self._gateway.loop, stream, self._sock, self._gateway.pieces, self._pumped)
        elif event.kind is SdpEventKind.BROKEN:
            stream.tell = unheard
            self._gateway.peers.doubt(self._rule.target, self._port)
            self._fall_back(str(event.error or "it was refused"))

    def _pumped(self, pump: Pump) -> None:
        self._tell_end(pump.to_sdp, pump.to_tcp, pump.why)

    # ---- by TCP ----

    def _fall_back(self, why: str) -> None:
        self._cancel_timer()
        if self._rule.falls_back:
            self._log(f"goes on by TCP to {self._rule.target}, as SDP fails: {why}")
            self._dial = Dial(self._gateway.loop, self._rule.target, self._dialled, timeout_s=limits.GATEWAY_CONNECT_S)
        else:
            self._give_up(why)

    def _dialled(self, sock: socket.socket | None, why: str) -> None:
        if sock is None:
            self._give_up(why)
            return
        self._served.tally.joined += 1
        self._served.tally.fell_back += 1
        self._carrier = Bridge(self._gateway.loop, (self._sock, sock), self._gateway.pieces, self._bridged)

    def _bridged(self, bridge: Bridge) -> None:
        self._tell_end(*bridge.counts, bridge.why)

    # ---- the end ----

    def _give_up(self, why: str) -> None:
        if self._over:
            return
        self._log(f"cannot go on to {self._rule.target}: {why}")
        self._served.tally.failed += 1
        if self._dial is not None:
            self._dial.cancel()
        if self._stream is not None:
            self._stream.tell = unheard
            self._stream.abort()
        reset(self._sock)
        self._end()

    def _tell_end(self, to_target: int, to_client: int, why: str) -> None:
        tally = self._served.tally
        tally.to_target += to_target
        tally.to_client += to_client
        tally.reset += bool(why)
        self._log(f"has ended, {to_target} bytes there, {to_client} back{': ' if why else ''}{why}")
        self._end()

    def _end(self) -> None:
        self._over = True
        self._cancel_timer()
        self._served.ended(self)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _log(self, what: str) -> None:
        self._gateway.log(f"{self._client} by '{self._rule}' {what}")


class _FromSdp:
    """A rule by which SDP clients reach a TCP service."""

    def __init__(self, gateway: Gateway, rule: Rule) -> None:
        self.gateway = gateway
        self.rule = rule
        self.tally = Tally()
        self.listening = rule.listen
        self._stack = gateway.at(rule.listen.address)
        self._inbound: dict[Inbound, None] = {}
        self._listener = self._stack.take_requests(rule.rdma_port, self._requested)
        self.rdma_port = self._listener.service_id & 0xFFFF

    def stop(self) -> None:
        self._listener.close()

    def abort(self) -> None:
        for inbound in list(self._inbound):
            inbound.abandon("the gateway stops")

    @property
    def counted(self) -> Tally:
        pumps = (inbound.pump for inbound in self._inbound)
        return with_running(self.tally, ((pump.to_tcp, pump.to_sdp) for pump in pumps if pump is not None))

    def _requested(self, request: ConnectionRequest) -> None:
        host = ip_address(request.remote_address.partition("%")[0])
        try:
            if not self.rule.admits(host):
                raise Unavailable("it is none of the hosts of the rule")
            if self.tally.active >= self.rule.connections_max:
                raise LimitReached(f"{self.rule.connections_max} connections are relayed")
            settings = settings_for(request.private_data, host, self.rule.listen.address)
        except (PeerViolation, Unavailable, LimitReached) as why:
            self.tally.refused += 1
            self._log(host, f"is refused: {why}")
            request.reject()
            return
        place = InboundRuntime(self.gateway.loop, self._stack, self.gateway.pieces)
        inbound = Inbound(
            place, request, settings, self.rule.target, self._ended, partial(self._log, host), timeout_s=_INBOUND_S
        )
        self._inbound[inbound] = None
        self.tally.active += 1

    def _ended(self, inbound: Inbound) -> None:
        del self._inbound[inbound]
        tally, pump = self.tally, inbound.pump
        tally.active -= 1
        if pump is None:
            tally.failed += 1
        else:
            tally.joined += 1
            tally.to_target += pump.to_tcp
            tally.to_client += pump.to_sdp
            tally.reset += bool(pump.why)

    def _log(self, host: Address, what: str) -> None:
        self.gateway.log(f"{host} by '{self.rule}' {what}")
