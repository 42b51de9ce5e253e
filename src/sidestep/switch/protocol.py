"""Offload protocols, and the transports beneath them, as the switch sees them.

Both are Python entry points, in the groups `sidestep.protocols` and `sidestep.transports`, that name a class derived
from `OffloadProtocol` or `OffloadTransport`. The switch loads them when a connection, a policy or a command first needs
them. It starts them, passes the network's changes on to them, and stops them (`switch/modules.py`). Everything here
runs in the provider's one thread: a method that waits makes all wait.

The words are those of the Offload Sockets Framework of 2002: a protocol registers with capabilities, is initialised,
and cleans up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

from sidestep.errors import Unavailable
from sidestep.gain import IWARP, Profile, Profiles
from sidestep.loop import Loop
from sidestep.routing import Address, NetworkEvent, Route

if TYPE_CHECKING:
    from sidestep.rdma.verbs import Device
    from sidestep.settings import RemoteSettings
    from sidestep.switch.link import Carried, Link
    from sidestep.switch.transports import Transports


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Declaration of a protocol or a transport; the switch asks it for nothing else."""

    families: frozenset[int] = frozenset({4, 6})  # versions of IP
    connect: bool = True  # can carry a connection from the end that opened it
    accept: bool = True  # and from the end that accepted it
    self_routing: bool = False  # finds its own way: requests reach it untouched, without a route
    rdma: bool = False  # places bytes into the peer's memory by itself
    local: bool = True  # can carry a connection with both ends on this host
    remote: bool = False  # and one that leaves it
    opens: bool = False  # opens a connection by itself, in the place of TCP, if a program names it: `PendingConnect`


Row: TypeAlias = tuple[int, dict[str, Any]]  # the user of a connection, and how it is, as `ss` shows it


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address and a port; the unspecified address stands for all of its family."""

    address: Address
    port: int

    def __str__(self) -> str:
        host = f"[{self.address}]" if self.address.version == 6 else str(self.address)
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Ends:
    """The two ends of a TCP connection, as one of them sees it."""

    local: Endpoint
    remote: Endpoint

    def as_json(self) -> dict[str, str]:
        return {"local": str(self.local), "remote": str(self.remote)}


@dataclass(frozen=True, slots=True)
class Request:
    """A connection that is to be carried, as the end that opened it sees it."""

    local: Endpoint | None  # address; None: not bound yet
    remote: Endpoint
    route: Route | None  # the kernel's, with first hop and interface; None for a protocol that is self-routing
    over: str = ""  # the transport that the policy wants for it; empty: any


class Pair(Protocol):
    """A TCP connection whose two ends this provider has found; a protocol carries it by calling one of these, once."""

    @property
    def request(self) -> Request:
        """The connection."""

    def attach(self) -> None:
        """Hands each end the other's memory; the provider takes no further part in the connection."""

    def carry(self, connected: Link, accepted: Link) -> tuple[Carried, Carried]:
        """Stands in between: a link for the end that connected, and one for the end that accepted; raises Unavailable.

        What one link takes, the protocol brings to the other end.
        """


class Outgoing(Protocol):
    """A TCP connection to another host whose opening end this provider has found; it waits for its link.

    The protocol calls `carry` once the other host's provider has joined in, or `refuse`. Until then the connection is
    on TCP, and may end.
    """

    @property
    def request(self) -> Request:
        """The connection."""

    @property
    def uid(self) -> int:
        """User that the program runs as."""

    @property
    def wanted(self) -> bool:
        """True while the connection waits for its link."""

    def carry(self, link: Link, profile: Profile | None = None) -> Carried:
        """Carries the connection's bytes over `link` from now on; raises Unavailable.

        `profile`: figures of the transport; the connection goes back to TCP once it would gain by that. None: never.
        """

    def refuse(self, why: str, *, full: bool = False) -> None:
        """Leaves the connection on TCP; `why` is a half sentence. Does nothing if the connection no longer waits.

        `full`: only for now, as there is no room for one more.
        """


class Incoming(Protocol):
    """The accepting end of a TCP connection with another host, proven to be held by a program here."""

    @property
    def uid(self) -> int:
        """User that the program runs as."""

    def carry(self, link: Link) -> Carried:
        """Carries the connection's bytes over `link` from now on; raises Unavailable."""


class PendingConnect(Protocol):
    """A program that waits in connect() for a connection that a protocol is to open in the place of TCP.

    The protocol calls `redirect` or `refuse`, once, and `over` once nothing is left of the connection. The provider
    calls `on_gone` when the program has left it.
    """

    on_gone: Callable[[], None]

    @property
    def request(self) -> Request:
        """The connection; its local address is the unspecified one where the program leaves it to the kernel."""

    @property
    def uid(self) -> int:
        """User that the program runs as."""

    @property
    def insists(self) -> bool:
        """True if TCP is of no use: the program itself has named the protocol, not a rule of the policy."""

    @property
    def wait_s(self) -> float:
        """Seconds within which it is to be answered."""

    def redirect(self, place: Endpoint) -> None:
        """The program's socket connects to that place of this provider's."""

    def refuse(self, error: int) -> None:
        """Ends the wait without the protocol: a program that insists gets the errno, any other TCP."""

    def is_from(self, local: Endpoint, place: Endpoint) -> bool:
        """True if a TCP connection that came from `local` to `place` is of the very socket of the program."""

    def over(self) -> None:
        """Ends this object, as nothing is left of the connection; does nothing the second time."""


@dataclass(frozen=True, slots=True)
class ListenerLease:
    """A listener that takes a connection of another host."""

    uid: int  # user of the listening program
    named: bool  # the program asks the provider for the peer's true address
    leave: Callable[[], None]  # call for the end


class EndFinder(Protocol):
    """Search for the end at `local` that accepted a connection from `remote`; one of the two is called, once.

    A call returns a function that ends the search; it does nothing once the end has come or the time is up.

    Raises:
        Unavailable: Too many searches run, or one for this very connection.
    """

    def __call__(
        self,
        carrier: OffloadProtocol,
        transport: str,
        local: Endpoint,
        remote: Endpoint,
        on_found: Callable[[Incoming], None],
        on_failed: Callable[[str], None],
        /,
    ) -> Callable[[], object]: ...


class PortMapper(Protocol):
    """Ports at which other hosts serve this protocol (docs/wire/sdp.md §23.4)."""

    def ask(self, local: Endpoint, remote: Endpoint, answer: Callable[[int | None], None]) -> None:
        """Calls `answer`, now or soon, with the port for that service there; None: there is none."""

    def doubt(self, remote: Endpoint, port: int) -> None:
        """Discards the answer for that port, which does not respond: the next request asks the host anew."""

    def close(self) -> None:
        """Ends; pending requests get the answer None."""


class Workers(Protocol):
    """Processes that carry a protocol's connections with other hosts, so that they share several processors."""

    def hand_over(self, outgoing: Outgoing) -> bool:
        """Returns True if a worker carries the connection, or refuses it; False if there is no worker."""

    def port(self, local: Address) -> int | None:
        """Port at which a worker takes the next connection with that address of this host; None: there is no worker.

        Raises:
            NotYet: The port will soon be known.
        """

    def stop(self) -> None:
        """Takes all connections of the workers back to TCP, and ends the workers."""


@dataclass(slots=True, kw_only=True)
class Services:
    """Services of the switch for a protocol.

    `check_listener` returns if a connection of another host, over that transport, may be handed by TCP to the program
    that listens at that address. `lease_listener` does the same for one connection, which counts. Both raise
    Unavailable if no program listens there, if the policy keeps the listener on TCP, or if neither can be found out.
    """

    loop: Loop  # calls the module when a descriptor is ready or a time has come; closed after the module's stop
    log: Callable[[str], None]  # takes a line for the provider's log
    remote: RemoteSettings | None  # hosts with which connections may be carried; None: with none
    share: Callable[[int, int], int] = lambda whole, _uid: whole  # a user's share of a bounded thing
    port_mapper: PortMapper | None = None  # a worker's; None: this is no worker, and a protocol has its own
    start_workers: Callable[[OffloadProtocol, PortMapper], Workers | None] = lambda _carrier, _mapper: None
    """Workers that run this protocol, too, and ask that port mapper; None: it carries everything itself."""
    await_end: EndFinder = field(init=False)
    check_listener: Callable[[OffloadProtocol, str, Endpoint], object] = field(init=False)
    lease_listener: Callable[[OffloadProtocol, str, Endpoint], ListenerLease] = field(init=False)
    map_addresses: Callable[[Ends, Ends], Callable[[], None]] = field(init=False)
    """Programs under the shim see the second `Ends` where a TCP socket has the first, until what it gives is called."""
    count: Callable[[str, str], object] = field(init=False)
    """Adds one to a counter of the provider's, for a reason; see `sidestep.counters`."""
    transports: Transports = field(init=False)


class OffloadModule(ABC):
    """Base of protocols and transports."""

    name: ClassVar[str]  # name for policies and commands: a word of lower-case letters, digits and hyphens
    capabilities: ClassVar[Capabilities]

    def start(self, services: Services) -> None:
        """Makes ready; called once, before anything else. An exception refuses the module."""
        self.services = services

    def stop(self) -> None:  # noqa: B027 - not abstract: not every module has something to do
        """Lets go of everything. Connections still carried are closed to the switch, which takes them back to TCP."""

    def handle_network(self, event: NetworkEvent) -> None:  # noqa: B027
        """An address, a link or a route came, changed or went."""


class OffloadTransport(OffloadModule):
    """A kind of device that protocols send over: of it there is one at each address of this host that is used.

    Of two hosts that reach each other by the same `wire` each may have another kind.
    """

    wire: ClassVar[str]  # protocol on the wire: iwarp, rocev2, ...
    profiles: ClassVar[Profiles] = Profiles(
        engine=IWARP.python, python=IWARP.python
    )  # figures that stand until others are measured

    def refusal(self, request: Request) -> str | None:
        """Reason, as a half sentence, why there is no device for this connection; None: there is one. Must not wait."""
        return None

    @abstractmethod
    def open(self, local: Address, loop: Loop) -> Device:
        """The device at an address of this host, which that loop drives and whose caller closes it.

        Raises:
            Unavailable: There is none, or it cannot be used.
        """


class OffloadProtocol(OffloadModule):
    """Base of protocols that carry the bytes of a stream connection instead of TCP."""

    ip_protocol: ClassVar[int] = 0  # number by which an explicit socket names it, as IPPROTO_SDP; 0: it has no number

    def refusal(self, request: Request) -> str | None:
        """Reason, as a half sentence, why this connection cannot be carried; None: it can. Must not wait."""
        return None

    def profile(self, request: Request) -> Profile | None:
        """Figures by which a connection that is not refused must gain over TCP to be carried; None: it need not."""
        return None

    def bind(self, endpoint: Endpoint) -> None:
        """An explicit socket has bound this endpoint natively; raises OSError or Unavailable to fail the bind."""

    def release(self, endpoint: Endpoint) -> None:
        """The socket of an earlier `bind` has gone."""

    @abstractmethod
    def join(self, pair: Pair) -> None:
        """Carries a connection both of whose ends have been found; raises Unavailable to leave it on TCP."""

    def handle_transport_stopped(self, name: str) -> None:
        """Takes connections over that transport back to TCP; its devices work until then, if at all."""

    def port_at(self, local: Address) -> int:
        """Port for connections of other hosts with that address of this one; raises Unavailable.

        Only for protocols that have hired workers, in a worker.
        """
        raise Unavailable(f"{self.name} carries no connections to other hosts")

    def connect(self, outgoing: Outgoing) -> None:
        """Carries a connection to another host, if its provider joins in; raises Unavailable to leave it on TCP.

        Only for protocols that are `remote`.
        """
        raise Unavailable(f"{self.name} carries no connections to other hosts")

    def links(self) -> Iterator[Row]:
        """The connections that it has opened, or taken in, in the place of TCP.

        Only for protocols that say that they can, by `opens`.
        """
        return iter(())

    def open(self, asked: PendingConnect) -> None:
        """Opens a connection to another host in the place of TCP; raises Unavailable if that cannot be tried.

        Only for protocols that say that they can, by `opens`.
        """
        raise Unavailable(f"{self.name} opens no connections by itself")


class NotYet(Unavailable):
    """The answer is not known yet; `wait` takes a function that is called once, when to ask again, or never."""

    def __init__(self, message: str, wait: Callable[[Callable[[], None]], None]) -> None:
        super().__init__(message)
        self.wait = wait


class BrokenModule(Unavailable):
    """A module that cannot be loaded, declares nonsense, or fails while it starts."""
