"""The `sdp` protocol: connections with other hosts, over RDMA from provider to provider.

The connecting end's provider asks the port mapper of the other host where its provider listens, and opens an SDP
connection there whose Hello, and what stands beside it (`promotion`), name the TCP connection. The accepting end's
provider looks for the program that holds its end, which shows its socket as for any claim; only then it accepts, and
both directions switch (`sidestep.provider.carry.remote_relay`). Whatever fails at whatever step, the connection is on
TCP and stays there.

A host is believed if it is among those that the provider was told of, and has the key, if there is one; what it asks
for must concern a connection between the very addresses that it asks from.

A request for a service, with nothing beside its Hello or with `Purpose.INBOUND`, is one of ordinary SDP: `serving`
hands it to who listens there. `sdp_connect` makes such connections for programs of this host that begin with SDP: those
whose socket names IPPROTO_SDP, and those of whom a rule of the policy says so.

If the SDP connection breaks while the TCP connection lives, the connecting end's provider asks the other up to which
byte it has come, and both go back to TCP there (`Purpose.SETTLE`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from ipaddress import ip_address
from typing import ClassVar, Final

from sidestep import limits
from sidestep.errors import LimitReached, PeerViolation, SidestepError, Unavailable
from sidestep.gain import Profile
from sidestep.loop import nothing
from sidestep.native.layout import IPPROTO_SDP
from sidestep.rdma.cm import ConnectionRequest
from sidestep.rdma.control import Control
from sidestep.rdma.verbs import AsyncEvent, Device, EventKind
from sidestep.remote.control_link import PRIVATE_DATA_MAX
from sidestep.remote.control_links import ControlLinks
from sidestep.remote.control_manager import ControlManager
from sidestep.remote.inbound import settings_for
from sidestep.remote.link import SdpLink
from sidestep.remote.peers import PROVIDER_ITSELF, PROVIDER_PORT, Peers
from sidestep.remote.places import Places
from sidestep.remote.promotion import SIZE, Promotion, Purpose, read_key, why_not, why_not_in
from sidestep.remote.resync import Resync, ResyncResponder, Route, by_request
from sidestep.remote.sdp_connect import SdpConnects
from sidestep.remote.serving import Serving
from sidestep.routing import Address
from sidestep.sdp.endpoint import SdpStream
from sidestep.sdp.header import BSDH_LEN
from sidestep.sdp.hello import Hello
from sidestep.sdp.portmapper import UDP_PORT
from sidestep.sdp.requests import SdpEvent, SdpEventKind, StreamEvent
from sidestep.sdp.settings import Addresses, SdpSettings
from sidestep.sdp.stack import Node, Stack
from sidestep.switch.link import Carried
from sidestep.switch.protocol import (
    Capabilities,
    Endpoint,
    Incoming,
    OffloadProtocol,
    Outgoing,
    Pair,
    PendingConnect,
    PortMapper,
    Request,
    Row,
    Services,
    Workers,
)

LINK_SETTINGS: Final = SdpSettings(
    receive_count=limits.REMOTE_RECEIVES,
    receive_size=limits.REMOTE_RECEIVE_SIZE,
    receive_size_max=limits.REMOTE_RECEIVE_SIZE_MAX,
    remote_size=limits.REMOTE_RECEIVE_SIZE,
)
_PINNED_SETTINGS: Final = replace(LINK_SETTINGS, receive_count=limits.REMOTE_RECEIVES_PINNED)
MAPPED_WIRE: Final = "iwarp"  # what the port mapper tells ports of
QUESTIONS: Final = (Purpose.RESYNC, Purpose.RESYNCED, Purpose.FAILED)
HELLO_LEN: Final = BSDH_LEN + Hello.LENGTH
_DEVICE_GONE: Final = (EventKind.DEVICE_FATAL, EventKind.PORT_ERROR, EventKind.GID_CHANGE)


def settings_on(device: Device) -> SdpSettings:
    """Those of connections over that device."""
    return _PINNED_SETTINGS if device.attributes.pins_memory else LINK_SETTINGS


class Sdp(OffloadProtocol):
    """What the switch knows of it."""

    name: ClassVar[str] = "sdp"
    ip_protocol: ClassVar[int] = IPPROTO_SDP
    capabilities: ClassVar[Capabilities] = Capabilities(
        rdma=True, local=False, remote=True, self_routing=True, opens=True
    )

    def start(self, services: Services) -> None:
        """Listens for other hosts, if there are any to be believed."""
        super().start(services)
        self._devices: dict[tuple[str, Address], _At] = {}  # by transport
        self._carried: dict[Carried, tuple[_At, SdpLink]] = {}
        self._retired: set[_At] = set()  # devices that take nothing new, and carry something still
        self._askers: set[Resync] = set()
        self.answers: ResyncResponder  # also of links whose device is gone
        self.key: bytes | None = None  # what both providers know
        self._peers: PortMapper
        self._workers: Workers | None = None
        self._connects: SdpConnects | None = None
        self.controls: ControlLinks | None = None  # None: a worker
        if services.remote is None:
            return
        if services.remote.key_file is not None:
            self.key = read_key(services.remote.key_file)
        self.loop = services.loop
        self.answers = ResyncResponder(services.loop)
        for name in services.remote.transports:
            services.transports.get(name)  # now: it takes a while, and who asks waits for a second only
        if services.port_mapper is not None:
            self._peers = services.port_mapper
        else:
            self._peers = peers = Peers(self.loop, self._port_for, services.log)
            self.controls = ControlLinks(self, peers)
            self._workers = services.start_workers(self, peers)
            self._connects = SdpConnects(self, peers, self.mapped_stack)

    def stop(self) -> None:
        if self.services.remote is None:
            return
        if self._workers is not None:
            self._workers.stop()
        if self._connects is not None:
            self._connects.close()
        self._peers.close()
        if self.controls is not None:
            self.controls.close()
        for resync in self._askers:
            resync.close()
        for at in (*self._devices.values(), *self._retired):
            at.close()
        self._retired.clear()
        for far in list(self._carried):  # nobody will find out any more what has arrived
            far.handle_arrived(None)

    def refusal(self, request: Request) -> str | None:
        """Whether the other host is one to carry connections with, and what would carry them."""
        remote = self.services.remote
        if remote is None:
            return "connections with other hosts are not asked for: sidestep provider start --remote NETWORKS"
        if request.local == request.remote:  # a listener, anywhere: who comes is judged then
            return None
        if not remote.trusts(request.remote.address):
            return f"{request.remote.address} is none of the hosts given with --remote: name it there, on both hosts"
        try:
            self.services.transports.choose(request)
        except Unavailable as why:
            return why.message
        return None

    def profile(self, request: Request) -> Profile | None:
        """That of the transport that is asked first; `Outgoing.carry` is told that of the one that carries it."""
        try:
            return self.profile_of(self.services.transports.choose(request).name)
        except Unavailable:
            return None  # it is refused for that

    def profile_of(self, transport: str) -> Profile | None:
        """By whose figures connections have to gain over that transport."""
        remote = self.services.remote
        return remote.profile(self.services.transports[transport].profiles) if remote is not None else None

    def handle_transport_stopped(self, name: str) -> None:
        """What goes over its devices goes back to TCP, if it can."""
        for (transport, _), at in list(self._devices.items()):
            if transport == name:
                self.retire(at)

    def join(self, pair: Pair) -> None:
        """Both ends are on this host."""
        raise Unavailable("both ends are on this host")

    def connect(self, outgoing: Outgoing) -> None:
        """Reaches out for the other end, or has a worker do that."""
        mapped = self._workers is not None and self.services.transports.choose(outgoing.request).wire == MAPPED_WIRE
        if not mapped or self._workers is None or not self._workers.hand_over(outgoing):
            self.reach(outgoing, None)

    def port_at(self, local: Address) -> int:
        """Where other providers call."""
        return self._mapped(local, local).port

    def open(self, asked: PendingConnect) -> None:
        """Begins with SDP."""
        assert self._connects is not None  # what programs ask for comes to the provider, not to a worker
        self._connects.open(asked)

    def links(self) -> Iterator[Row]:
        """Of connections that began with SDP."""
        if self._connects is not None:
            yield from self._connects.links()
        for at in self._devices.values():
            yield from at.serving.links()

    def reach(self, outgoing: Outgoing, unanswered: int | None, without: tuple[str, ...] = ()) -> None:
        """Asks for the other provider's port and calls there, or by the control link.

        `vain`: where nobody answered; `without`: the transports that the other host has none of.
        """
        host = outgoing.request.remote.address
        absent = (
            f"no provider answers at {host}: start one there with 'sidestep provider start --remote', which names this "
            f"host, and let UDP port {UDP_PORT} through"
        )
        unreached = f"the provider at {host} does not answer at TCP port {unanswered}, which it told: let it through"
        request = outgoing.request
        assert request.local is not None
        local = request.local
        if without and self.controls is not None and self.controls.silent(host):
            outgoing.refuse(absent)  # by another transport it would go for good; it is asked again
            return
        try:
            transport = self.services.transports.choose(request, without=without)
            if transport.wire != MAPPED_WIRE:
                self._reach_by_control(transport.name, outgoing, without)
                return
        except SidestepError as why:
            _refuse(outgoing, why)
            return

        def answered(port: int | None) -> None:
            if port is None or port == unanswered:
                outgoing.refuse(absent if port is None else unreached)
            elif outgoing.wanted:
                try:
                    at = self._at(transport.name, local.address)
                    _Reaching(self, at, outgoing, port, again=unanswered is not None, without=without).begin()
                except SidestepError as why:  # nobody who waits for the same answer is to miss it
                    _refuse(outgoing, why)

        provider = Endpoint(request.remote.address, PROVIDER_PORT)
        if unanswered is not None:
            self._peers.doubt(provider, unanswered)
        self._peers.ask(local, provider, answered)

    def _reach_by_control(self, transport: str, outgoing: Outgoing, without: tuple[str, ...]) -> None:
        """By that transport, or by another one if its device does not work."""
        assert outgoing.request.local is not None
        without = (*without, transport)
        try:
            at = self._at(transport, outgoing.request.local.address)
        except SidestepError as why:
            self.services.log(f"{transport} is passed over: {why}")
            self.reach(outgoing, None, without)
        else:
            _Reaching(self, at, outgoing, 0, again=True, without=without).begin()

    # ---- for connections ----

    def carried(self, far: Carried, at: _At, link: SdpLink, on_over: Callable[[], None]) -> None:
        """A connection has that link over that device; `on_over` is called once it is over."""

        def over() -> None:
            del self._carried[far]
            at.places.discard(far)
            on_over()
            if at in self._retired:
                self.loop.soon(partial(self._close_unused, at))  # what ended it may still have to be answered by it

        self._carried[far] = at, link
        at.places.add(far)
        far.on_over = over

    def settle(self, route: Route, promotion: Promotion, far: Carried) -> None:
        """Its link is broken: finds out where TCP goes on."""
        self._askers.add(Resync(self.loop, route, promotion, self.key, far, self._askers.discard))

    def judged(self, local: Address, host: Address, said: bytes) -> tuple[Promotion, bytes, Hello]:
        """What another host wants, and its Hello, as it came and decoded; raises if it is not believed."""
        if not self.trusts(host):
            raise PeerViolation("it is none of the hosts given with --remote", rule="promotion_host")
        found = Promotion.find(said, self.key)
        if found is None or len(said) != HELLO_LEN + SIZE:
            raise Unavailable("no connection of programs is meant")
        told = said[:-SIZE]
        hello = Hello.decode(memoryview(told))
        if (hello.src_ip, hello.dst_ip) != (host, local):
            raise PeerViolation("it concerns other addresses than it comes from", rule="promotion_host")
        return found, told, hello

    def answer(self, local: Address, host: Address, question: bytes) -> bytes:
        """To what a control link asks; nothing to what is not believed, or none of its business."""
        try:
            found, told, _ = self.judged(local, host, question)
        except SidestepError as why:
            self.services.log(f"a question of {host} is not answered: {why}")
            return b""
        return self.answers.answer(found, told, self.key) if found.purpose in QUESTIONS else b""

    def trusts(self, host: Address) -> bool:
        return self.services.remote is not None and self.services.remote.trusts(host)

    def _at(self, transport: str, local: Address) -> _At:
        """That transport's device at an address of this host; raises Unavailable."""
        at = self._devices.get((transport, local))
        if at is None:
            if len(self._devices) >= limits.REMOTE_ADDRESSES_MAX:
                raise Unavailable(f"{limits.REMOTE_ADDRESSES_MAX} addresses are in use")
            transports = self.services.transports
            wire, device = transports[transport].wire, transports.device(transport, local, self.loop)
            manager = None
            if wire != MAPPED_WIRE and self.controls is not None:
                manager = ControlManager(device, self.loop, wire, partial(self.controls.reach, local))
            at = _At(self, transport, device, local, manager)
            self._devices[transport, local] = at
        return at

    def registered_bytes_max(self, device: Device) -> int:
        """Of data that its connections send, by all of them: what is more is copied."""
        if self.services.remote is None or not device.attributes.pins_memory:
            return limits.RDMA_POOL_BYTES_MAX
        return self.services.remote.pinned_max // limits.REMOTE_DATA_SHARE

    def _mapped(self, local: Address, remote: Address) -> _At:
        """The device whose port the port mapper tells to another host; raises Unavailable."""
        return self._speaking(MAPPED_WIRE, Request(Endpoint(local, 0), Endpoint(remote, 0), None))

    def _speaking(self, wire: str, request: Request) -> _At:
        assert request.local is not None
        return self._at(self.services.transports.choose(request, wire=wire).name, request.local.address)

    def mapped_stack(self, request: Request) -> Stack:
        """By which a port that the port mapper tells is reached; raises Unavailable."""
        return self._speaking(MAPPED_WIRE, request).stack

    def manager_for(self, wire: str, local: Address, remote: Address) -> ControlManager | None:
        """What answers at an address of this host who speaks that wire; None: there is no such device."""
        try:
            return self._speaking(wire, Request(Endpoint(local, 0), Endpoint(remote, 0), None)).manager
        except SidestepError as why:
            self.services.log(f"{remote} asks for {wire} in vain: {why}")
            return None

    def retire(self, at: _At, *, works: bool = True) -> None:
        """Nothing new goes over that device, and it is closed once nothing does.

        Over one that works connections take leave, for which all that is under way has to arrive. What another one
        carries is settled, by what has arrived: before any program hears of it, as it could not send again then.
        """
        if self._devices.get((at.transport, at.address)) is not at:
            return
        del self._devices[at.transport, at.address]
        self._retired.add(at)
        at.retire()
        for far, link in [(far, link) for far, (over, link) in self._carried.items() if over is at]:
            if works:
                far.leave()
            else:
                link.stream.abort()
        self._close_unused(at)

    def _close_unused(self, at: _At) -> None:
        if at in self._retired and all(over is not at for over, _ in self._carried.values()):
            self._retired.discard(at)
            at.close()

    def _port_for(self, local: Address, host: Address, service: int) -> tuple[int, float] | None:
        if not self.trusts(host):
            return None
        if service == PROVIDER_PORT and self._workers is not None:
            port = self._workers.port(local)
            if port is not None:
                return port, 0.0  # for one connection: the next one may be another worker's
        try:
            at = self._mapped(local, host)
            if service not in (PROVIDER_PORT, PROVIDER_ITSELF):
                return at.serving.port_for(service)
            lasts = self._workers is None or service == PROVIDER_ITSELF
            return at.port, limits.PEER_PORT_S if lasts else 0.0
        except SidestepError as why:
            self.services.log(f"{host} is not answered: {why}")
            return None


class _At(Node[Device]):
    """The device at one address of this host, and all that goes over it."""

    def __init__(
        self, sdp: Sdp, transport: str, device: Device, address: Address, manager: ControlManager | None
    ) -> None:
        device.on_event = self._handle_event  # before the stack's, which asks it next
        super().__init__(
            sdp.loop, device, settings_on(device), private_bytes_max=limits.REMOTE_PRIVATE_BYTES, private_waits=False,
            registered_bytes_max=sdp.registered_bytes_max(device), manager=manager,
            private_data_max=PRIVATE_DATA_MAX if manager is not None else 0,
        )  # fmt: skip
        self.manager = manager
        if manager is not None:
            manager.keep_joined(self.stack.make_usual_qp, partial(sdp.services.count, "pooled_queue_pair"))
        self.sdp = sdp
        self.transport = transport
        self.address = address
        self._retired = False
        try:
            self._listener = self.stack.take_requests(0, self._requested, backlog=limits.REMOTE_SOUGHT_MAX)
            self._control = self._observed()
        except BaseException:
            self.device.close()
            raise
        self.serving = Serving(sdp, transport, self.stack, address)
        remote = sdp.services.remote
        most = remote.connections_max if remote is not None else limits.RELAYS_MAX
        self.places = Places(sdp.loop, most, self._taken)

    @property
    def port(self) -> int:
        return self._listener.service_id & 0xFFFF

    def _taken(self) -> int:
        """Streams of promoted connections: others, such as of ordinary SDP, are nobody's."""
        return sum(stream.uid is not None for stream in self.stack.streams.values())

    def retire(self) -> None:
        """Takes no more connections; what it has carried may still be asked about."""
        self._retired = True
        self.serving.close()
        if self.manager is not None:
            self.manager.join_no_more()

    def close(self) -> None:
        self.serving.close()
        self.places.close()
        if self._control is not None:
            self._control.close()
        if self.manager is not None:
            self.manager.close()
        super().close()

    def _observed(self) -> Control | None:
        """What `sidestep rdma list` and `capture` ask; None: without it the rest goes on."""
        try:
            return Control(self.sdp.loop, [self.device], "sidestep provider")
        except SidestepError as why:
            self.sdp.services.log(f"{self.device.name} cannot be listed or captured: {why}")
            return None

    # ---- what the device says ----

    def _handle_event(self, event: AsyncEvent) -> None:
        if event.kind in _DEVICE_GONE and event.source is self.device:
            self.sdp.services.log(f"{self.device.name} is given up, {event.kind.name}: {event.why}")
            self.sdp.retire(self, works=False)

    # ---- what other hosts ask for ----

    def _requested(self, request: ConnectionRequest) -> None:
        try:
            self._judge(request)
        except SidestepError as why:
            self._refuse(request, why)

    def _refuse(self, request: ConnectionRequest, why: SidestepError) -> None:
        self.sdp.services.log(f"a request of {request.remote_address} is refused: {why}")
        if isinstance(why, PeerViolation) and why.rule == "promotion_host":
            request.reject()  # a stranger is told nothing
        elif isinstance(why, PeerViolation) and why.rule == "promotion_key":
            self._decline(request, "its key is another one: give both providers the same file with --remote-key")
        else:
            self._decline(request, f"{why.message}: {why.remedy}" if why.remedy else why.message)

    def _decline(self, request: ConnectionRequest, why: str) -> None:
        """Another provider is told why not."""
        request.reject(private_data=why_not(why))

    def _judge(self, request: ConnectionRequest) -> None:
        """Whom a request is for, and whether it is believed."""
        host = ip_address(request.remote_address)
        found, told, hello = self.sdp.judged(self.address, host, request.private_data)
        if self._retired and found.purpose not in QUESTIONS:
            raise Unavailable("its device is being given up")
        if found.purpose is Purpose.INBOUND:
            if self.sdp.services.port_mapper is not None:
                raise Unavailable("a worker has no services", remedy="PROVIDER_ITSELF has")
            self.sdp.answers.note_inbound(found.name)
            client = Endpoint(host, hello.local_port)
            self.serving.take(request, found.port, client, settings_for(told, host, self.address), beside_hello=SIZE)
            return
        if found.purpose is Purpose.CONTROL:
            self._take_control(request, found, host)
            return
        if found.purpose is not Purpose.CARRY:
            request.reject(private_data=self.sdp.answers.answer(found, told, self.sdp.key))
            return
        self.sdp.answers.check(found.name)
        local, remote = Endpoint(self.address, found.port), Endpoint(host, hello.local_port)

        def found_end(incoming: Incoming) -> None:
            def accepted(stream: SdpStream) -> None:
                self._accepted(stream, incoming, found, told)

            try:
                self.sdp.answers.check(found.name)  # two may have been on their way
                self.places.need()
            except (PeerViolation, LimitReached) as why:
                self._refuse(request, why)
            else:
                self.stack.serve(
                    request, accepted, self.port, beside_hello=SIZE, uid=incoming.uid,
                    why_not=lambda why: why_not(why.message),
                )  # fmt: skip

        declined = partial(self._decline, request)
        self.sdp.services.await_end(self.sdp, self.transport, local, remote, found_end, declined)

    def _take_control(self, request: ConnectionRequest, found: Promotion, host: Address) -> None:
        controls = self.sdp.controls
        if controls is None:
            raise Unavailable("a worker has no control links", remedy="PROVIDER_ITSELF has")
        controls.check_room()
        self.sdp.answers.note_inbound(found.name)
        self.stack.serve(
            request, lambda stream: controls.take(stream, self.address, host), self.port, beside_hello=SIZE
        )

    def _accepted(self, stream: SdpStream, incoming: Incoming, found: Promotion, hello: bytes) -> None:
        def broken(_relay: Carried) -> None:
            self.sdp.answers.handle_broken(found.name)

        link = SdpLink(stream, self.sdp.loop, broken, self.sdp.services.log, rounds=found.rounds)
        try:
            far = incoming.carry(link)
        except Unavailable as why:
            self.sdp.services.log(f"a connection stays on TCP: {why}")
            link.abandon()
            return
        link.carry(far)
        self.sdp.answers.add(found.name, hello, link, far)
        self.sdp.carried(far, self, link, lambda: self.sdp.answers.remove(found.name))


class _Reaching:
    """One connection on its way to the other host."""

    def __init__(
        self, sdp: Sdp, at: _At, outgoing: Outgoing, port: int, *, again: bool, without: tuple[str, ...]
    ) -> None:
        self._sdp = sdp
        self._again = again  # its port is not what was remembered
        self._without = without  # transports that are not to be tried after this one
        self._at = at
        self._outgoing = outgoing
        self._port = port
        self._promotion = Promotion(Purpose.CARRY, outgoing.request.remote.port, secrets.token_bytes(16))
        self._hello = b""

    def begin(self) -> None:
        """Asks the other provider; raises LimitReached, Unavailable."""
        self._at.places.need()
        request = self._outgoing.request
        assert request.local is not None
        addresses = Addresses(request.local.address, request.local.port, request.remote.address, self._port)
        self._address = str(request.remote.address)
        self._at.stack.connect(
            self._address, addresses, self._handle_event, beside_hello=self._beside, uid=self._outgoing.uid
        )

    def _beside(self, hello: bytes) -> bytes:
        self._hello = hello
        return self._promotion.encode(hello, self._sdp.key)

    def _handle_event(self, stream: SdpStream, event: StreamEvent) -> None:
        if not isinstance(event, SdpEvent):
            return
        if event.kind is SdpEventKind.ESTABLISHED:
            link = SdpLink(stream, self._sdp.loop, self._handle_broken, self._sdp.services.log)
            try:
                far = self._outgoing.carry(link, self._sdp.profile_of(self._at.transport))
            except Unavailable as why:
                link.abandon()
                self._outgoing.refuse(why.message)
            else:
                link.carry(far)
                self._sdp.carried(far, self._at, link, nothing)
                link.handle_established()
        elif event.kind is SdpEventKind.BROKEN:
            host = self._outgoing.request.remote.address
            if said := why_not_in(stream.refused_with):
                self._outgoing.refuse(f"the provider at {host} refuses: {said}")
            elif self._at.manager is not None and self._outgoing.wanted:
                self._sdp.reach(self._outgoing, None, self._without)
            elif not self._again and isinstance(event.error, Unavailable) and self._outgoing.wanted:
                self._sdp.reach(self._outgoing, self._port)  # its provider may have been started anew, at another port
            else:
                self._outgoing.refuse(f"the provider at {host} has not joined in: its log says why")

    def _handle_broken(self, far: Carried) -> None:
        at, controls = self._at, self._sdp.controls
        if at.manager is not None and controls is not None:
            ask = partial(controls.ask, at.address, self._address)
        else:
            ask = partial(by_request, at.stack, self._address, self._port)
        self._sdp.settle(Route(self._hello, ask), self._promotion, far)


def _refuse(outgoing: Outgoing, why: SidestepError) -> None:
    full = isinstance(why, LimitReached)
    outgoing.refuse(f"{why.message}: {why.remedy}" if full and why.remedy else why.message, full=full)
