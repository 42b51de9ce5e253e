"""What an offload protocol, or a transport beneath one, is to the switch.

Both are Python entry points, in the groups `sidestep.protocols` and `sidestep.transports`, that name a class derived
from `OffloadProtocol` or `OffloadTransport`. The switch loads them when they are first wanted, starts them, tells them
of the network's changes, and stops them; `switch/modules.py` does that. Everything here runs in the provider's one
thread: a method that waits makes all wait.

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
    from sidestep.config import RemoteSettings
    from sidestep.rdma.verbs import Device
    from sidestep.switch.link import Carried, Link
    from sidestep.switch.stream import Stream
    from sidestep.switch.transports import Transports


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a protocol or a transport declares; the switch asks it for nothing else."""

    families: frozenset[int] = frozenset({4, 6})  # versions of IP
    connect: bool = True  # can carry a connection from the end that opened it
    accept: bool = True  # and from the end that accepted it
    self_routing: bool = False  # finds its own way: requests reach it untouched, without a route
    rdma: bool = False  # places bytes into the peer's memory by itself
    local: bool = True  # can carry a connection both of whose ends are on this host
    remote: bool = False  # and one that leaves it
    opens: bool = False  # opens a connection by itself, in the place of TCP, for who names it: see `PendingConnect`


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

    local: Endpoint | None  # None: not bound yet
    remote: Endpoint
    route: Route | None  # the kernel's, with first hop and interface; None for a protocol that is self-routing
    over: str = ""  # the transport that the policy wants for it; empty: any


class Pair(Protocol):
    """A TCP connection whose two ends this provider has found; a protocol carries it by calling one of these, once."""

    @property
    def request(self) -> Request:
        """The connection."""

    def attach(self) -> None:
        """Hands each end the other's memory: from here on the two need nobody."""

    def open(self) -> tuple[Stream, Stream]:
        """Stands in between: a stream with the end that connected, and one with the end that accepted."""


class Outgoing(Protocol):
    """A TCP connection to another host whose opening end this provider has found; it waits for its link.

    Whoever has it calls `carry` once the other host's provider has joined in, or `refuse`; until then it is on TCP, and
    it may go away meanwhile.
    """

    @property
    def request(self) -> Request:
        """The connection."""

    @property
    def uid(self) -> int:
        """Whose program it is."""

    @property
    def wanted(self) -> bool:
        """Whether it still waits."""

    def carry(self, link: Link, profile: Profile | None = None) -> Carried:
        """Its bytes go over that link from now on; raises Unavailable.

        `profile`: by whose figures it goes back to TCP once it would gain by that; None: never.
        """

    def refuse(self, why: str, *, full: bool = False) -> None:
        """It stays on TCP; `why` is a half sentence. Does nothing if it is not wanted any more.

        `full`: only for now, as there is no room for one more.
        """


class Incoming(Protocol):
    """The accepting end of a TCP connection with another host, proven to be held by a program here."""

    @property
    def uid(self) -> int:
        """Whose program it is."""

    def carry(self, link: Link) -> Carried:
        """Its bytes go over that link from now on; raises Unavailable."""


class PendingConnect(Protocol):
    """A program that waits in connect() for a connection that a protocol is to open in the place of TCP.

    Whoever has it calls `redirect` or `refuse`, once, and `over` once nothing is left of it. `on_gone` is called when
    the program has left the provider.
    """

    on_gone: Callable[[], None]

    @property
    def request(self) -> Request:
        """The connection; its local address is the unspecified one where the program leaves it to the kernel."""

    @property
    def uid(self) -> int:
        """Whose program it is."""

    @property
    def insists(self) -> bool:
        """Whether TCP is of no use: the program has named the protocol, not a rule of the policy."""

    @property
    def wait_s(self) -> float:
        """Seconds within which it is to be answered."""

    def redirect(self, place: Endpoint) -> None:
        """The program's socket connects to that place of this provider's."""

    def refuse(self, error: int) -> None:
        """Nothing comes of it: who insists gets the errno, others TCP."""

    def is_from(self, local: Endpoint, place: Endpoint) -> bool:
        """Whether a TCP connection that came from `local` to `place` is of the very socket of the program."""

    def over(self) -> None:
        """Nothing is left of it; does nothing the second time."""


@dataclass(frozen=True, slots=True)
class ListenerLease:
    """A listener that takes a connection of another host."""

    uid: int  # whose program it is
    named: bool  # which asks the provider who is at the other end
    leave: Callable[[], None]  # to be called once it is over


class EndFinder(Protocol):
    """What looks for the end at `local` that accepted a connection from `remote`; one of the two is called, once.

    It gives a call that ends it; that does nothing once the end has come or the time is up.

    Raises:
        Unavailable: Too many are looked for, or the end of this very connection is.
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
    """Where other hosts serve what is asked for (docs/wire/sdp.md §23.4)."""

    def ask(self, local: Endpoint, remote: Endpoint, answer: Callable[[int | None], None]) -> None:
        """Calls `answer`, now or soon, with the port for that service there; None: there is none."""

    def doubt(self, remote: Endpoint, port: int) -> None:
        """Nobody answers at that port: the host is asked anew."""

    def close(self) -> None:
        """Those who ask hear that there is nothing."""


class Workers(Protocol):
    """Processes that carry a protocol's connections with other hosts, so that they share several processors."""

    def hand_over(self, outgoing: Outgoing) -> bool:
        """One of them carries it, or refuses it; False: none is there to do that."""

    def port(self, local: Address) -> int | None:
        """Where one of them takes the next connection with that address of this host; None: none is there.

        Raises:
            NotYet: It will soon be known.
        """

    def stop(self) -> None:
        """They take what they carry back to TCP, and end."""


@dataclass(slots=True, kw_only=True)
class Services:
    """What the switch does for a protocol.

    `check_listener` returns if a connection of another host, over that transport, may be handed, by TCP, to who listens
    at an address of this host; `lease_listener` is the same for one connection, which counts. Both raise Unavailable if
    nobody listens there, the policy keeps the listener on TCP, or it cannot be told.
    """

    loop: Loop  # what calls it when a descriptor is ready or a time has come; closed once the module has been stopped
    log: Callable[[str], None]  # takes a line for the provider's log
    remote: RemoteSettings | None  # with which other hosts connections may be carried; None: with none
    share: Callable[[int, int], int] = lambda whole, _uid: whole  # how much of a bounded thing a user may have
    port_mapper: PortMapper | None = None  # what a worker asks; None: this is no worker; who needs one has its own
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
    """What protocols and transports have in common."""

    name: ClassVar[str]  # a word of lower-case letters, digits and hyphens: what policies and commands call it
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

    wire: ClassVar[str]  # what is spoken: iwarp, rocev2, ...
    profiles: ClassVar[Profiles] = Profiles(
        engine=IWARP.python, python=IWARP.python
    )  # what gains by it, unless measured

    def refusal(self, request: Request) -> str | None:
        """Why there is no device for this connection, as a half sentence; None: there is. Must not wait."""
        return None

    @abstractmethod
    def open(self, local: Address, loop: Loop) -> Device:
        """The device at an address of this host, which that loop drives and whose caller closes it.

        Raises:
            Unavailable: There is none, or it cannot be used.
        """


class OffloadProtocol(OffloadModule):
    """Something that can carry the bytes of a stream connection instead of TCP."""

    ip_protocol: ClassVar[int] = 0  # what an explicit socket may name it by, as IPPROTO_SDP; 0: it has no number

    def refusal(self, request: Request) -> str | None:
        """Why this connection cannot be carried, as a half sentence; None: it can. Must not wait."""
        return None

    def profile(self, request: Request) -> Profile | None:
        """By whose figures a connection that is not refused has to gain over TCP to be carried; None: it need not."""
        return None

    def bind(self, endpoint: Endpoint) -> None:
        """An explicit socket has bound this endpoint natively; raises OSError or Unavailable to fail the bind."""

    def release(self, endpoint: Endpoint) -> None:
        """The socket of an earlier `bind` has gone."""

    @abstractmethod
    def join(self, pair: Pair) -> None:
        """Carries a connection both of whose ends have been found; raises Unavailable to leave it on TCP."""

    def handle_transport_stopped(self, name: str) -> None:
        """Its devices work, if at all, until what goes over them is back on TCP."""

    def port_at(self, local: Address) -> int:
        """Where it takes connections of other hosts with that address of this one; raises Unavailable.

        Only for protocols that have hired workers, in such a one.
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
    """It is not known at this moment; `wait` takes a call that is made once, when to ask again, or never."""

    def __init__(self, message: str, wait: Callable[[Callable[[], None]], None]) -> None:
        super().__init__(message)
        self.wait = wait


class BrokenModule(Unavailable):
    """A module that cannot be loaded, declares nonsense, or fails while it starts."""
