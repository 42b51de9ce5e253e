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
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final

from sidestep import limits
from sidestep.accepting import Acceptor, listening
from sidestep.errors import LimitReached, PeerViolation, SidestepError, Unavailable
from sidestep.loop import Loop, Timer
from sidestep.rdma.iwarp.device import IwarpDevice
from sidestep.rdma.tools.devices import source_for
from sidestep.remote.bridge import Bridge
from sidestep.remote.dial import Dial, reset
from sidestep.remote.gateway_rules import Rule, check_rules
from sidestep.remote.inbound import BY_CARRIER, Inbound, settings_for
from sidestep.remote.peers import Peers
from sidestep.remote.pump import Pieces, Pump
from sidestep.sdp.endpoint import ignore_event
from sidestep.sdp.requests import SdpEvent, SdpEventKind, StreamEvent
from sidestep.sdp.settings import Addresses, Carrier
from sidestep.sdp.stack import Node, Stack
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

    active: int = 0  # at the moment, see `_Served.counted`
    joined: int = 0
    fell_back: int = 0  # of these, those that TCP carries on
    refused: int = 0  # not allowed, or too many
    failed: int = 0  # the target was not to be had
    reset: int = 0  # by either end
    to_target: int = 0  # bytes
    to_client: int = 0


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
        self._stacks: dict[Address, Node[IwarpDevice]] = {}
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
        self._gone = [each for each in self._gone if each.running]
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
            device = IwarpDevice(str(address), self.loop, name=f"iwarp@{address}")
            self._stacks[address] = Node(self.loop, device, private_bytes_max=limits.REMOTE_PRIVATE_BYTES)
        return self._stacks[address].stack

    @property
    def active(self) -> int:
        return sum(len(each.running) for each in (*self._served, *self._gone))

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
        return found.rdma_port, limits.SERVICE_PORT_S


class _Served:
    """A rule, and the connections that it has."""

    listening: Endpoint
    rdma_port: int

    def __init__(self, gateway: Gateway, rule: Rule) -> None:
        self.gateway = gateway
        self.rule = rule
        self.tally = Tally()  # but for `active`, and the bytes of those that run
        self.running: dict[_Crossing | Inbound, None] = {}

    @property
    def counted(self) -> Tally:
        """With the connections that there are."""
        counts = [each.counts for each in self.running]
        there, back = (sum(moved) for moved in zip(*counts, strict=True)) if counts else (0, 0)
        tally = self.tally
        return replace(
            tally, active=len(counts), to_target=tally.to_target + there, to_client=tally.to_client + back
        )  # fmt: skip

    def abort(self) -> None:
        for each in list(self.running):
            each.abandon("the gateway stops")

    def moved(self, counts: tuple[int, int], why: str) -> None:
        """A connection that was joined has ended."""
        self.tally.to_target += counts[0]
        self.tally.to_client += counts[1]
        self.tally.reset += bool(why)

    def log(self, host: Address | Endpoint, what: str) -> None:
        self.gateway.log(f"{host} by '{self.rule}' {what}")


class _FromTcp(_Served):
    """A rule by which TCP clients reach an SDP service."""

    def __init__(self, gateway: Gateway, rule: Rule) -> None:
        super().__init__(gateway, rule)
        self.rdma_port = rule.rdma_port  # 0: asked for
        sock = listening((str(rule.listen.address), rule.listen.port), _BACKLOG)
        self.listening = Endpoint(rule.listen.address, sock.getsockname()[1])
        self._acceptor = Acceptor(gateway.loop, sock, self._take_in, self._exhausted)

    def stop(self) -> None:
        self._acceptor.close()

    def ended(self, crossing: _Crossing) -> None:
        self.running.pop(crossing, None)
        self._acceptor.want(True)

    def _exhausted(self, why: str) -> None:
        self.gateway.log(f"{self.rule}: no connection can be taken: {why}")

    def _take_in(self, sock: socket.socket, address: tuple[str, int]) -> None:
        client = Endpoint(ip_address(address[0].partition("%")[0]), address[1])
        if self.rule.admits(client.address):
            self.running[_Crossing(self, sock, client)] = None
            self._acceptor.want(len(self.running) < self.rule.connections_max)
        else:
            self.tally.refused += 1
            self.log(client, "is refused: it is none of the hosts of the rule")
            reset(sock)


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

    def abandon(self, why: str) -> None:
        if self._carrier is not None:
            self._carrier.abort(why)
        else:
            self._give_up(why)

    @property
    def counts(self) -> tuple[int, int]:
        """Bytes to the target, and to the client."""
        return self._carrier.counts if self._carrier is not None else (0, 0)

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
            self._stream = stack.connect(str(target), addresses, self._handle_event, BY_CARRIER[Carrier.IWARP])
        except SidestepError as why:
            self._fall_back(why.message)

    def _late(self) -> None:
        if self._stream is not None:
            self._stream.tell = ignore_event
            self._stream.abort()
        self._fall_back("it does not answer")

    def _handle_event(self, stream: SdpStream, event: StreamEvent) -> None:
        if not isinstance(event, SdpEvent) or self._over:
            return
        if event.kind is SdpEventKind.ESTABLISHED:
            self._cancel_timer()
            self._log(f"goes on by SDP to {self._rule.target}")
            self._served.tally.joined += 1
            self._carrier = Pump(self._gateway.loop, stream, self._sock, self._gateway.pieces, self._carried)
        elif event.kind is SdpEventKind.BROKEN:
            stream.tell = ignore_event
            self._gateway.peers.doubt(self._rule.target, self._port)
            self._fall_back(str(event.error or "it was refused"))

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
        self._carrier = Bridge(self._gateway.loop, (self._sock, sock), self._gateway.pieces, self._carried)

    # ---- the end ----

    def _give_up(self, why: str) -> None:
        if self._over:
            return
        self._log(f"cannot go on to {self._rule.target}: {why}")
        self._served.tally.failed += 1
        if self._dial is not None:
            self._dial.cancel()
        if self._stream is not None:
            self._stream.tell = ignore_event
            self._stream.abort()
        reset(self._sock)
        self._end()

    def _carried(self, carrier: Pump | Bridge) -> None:
        there, back = carrier.counts
        self._served.moved(carrier.counts, carrier.why)
        self._log(f"has ended, {there} bytes there, {back} back{': ' if carrier.why else ''}{carrier.why}")
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
        self._served.log(self._client, what)


class _FromSdp(_Served):
    """A rule by which SDP clients reach a TCP service."""

    def __init__(self, gateway: Gateway, rule: Rule) -> None:
        super().__init__(gateway, rule)
        self.listening = rule.listen
        self._stack = gateway.at(rule.listen.address)
        self._listener = self._stack.take_requests(rule.rdma_port, self._requested)
        self.rdma_port = self._listener.service_id & 0xFFFF

    def stop(self) -> None:
        self._listener.close()

    def _requested(self, request: ConnectionRequest) -> None:
        host = ip_address(request.remote_address.partition("%")[0])
        try:
            if not self.rule.admits(host):
                raise Unavailable("it is none of the hosts of the rule")
            if len(self.running) >= self.rule.connections_max:
                raise LimitReached(f"{self.rule.connections_max} connections are relayed")
            settings = settings_for(request.private_data, host, self.rule.listen.address)
        except (PeerViolation, Unavailable, LimitReached) as why:
            self.tally.refused += 1
            self.log(host, f"is refused: {why}")
            request.reject()
            return
        inbound = Inbound(
            self.gateway.loop, self._stack, self.gateway.pieces, request, settings, self.rule.target, self._ended,
            partial(self.log, host), timeout_s=_INBOUND_S,
        )  # fmt: skip
        self.running[inbound] = None

    def _ended(self, inbound: Inbound) -> None:
        del self.running[inbound]
        if inbound.pump is None:
            self.tally.failed += 1
        else:
            self.tally.joined += 1
            self.moved(inbound.counts, inbound.pump.why)
