"""The network as the kernel has it: its routes, asked for one at a time, and its changes, as events.

The answers are never older than the kernel's announcements: a lookup that finds one unread asks the kernel and not the
cache. The kernel may announce a change before it makes it, so nothing is remembered for a moment afterwards. A snapshot
of what may change in silence begins with a request that the kernel answers only when no process changes anything.

Changes may be missed: the socket overflowed, a message made no sense, IPv4 routes went in silence. A snapshot, compared
with the known state, finds them. It is read a piece a turn. Announcements wait in their socket until it is complete,
and are then taken in as the later ones that they are.

Not supported: where routing rules name ports, the lookup is made without them.
"""

from __future__ import annotations

import errno
import math
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from ipaddress import IPv4Address, IPv6Address
from typing import Final

from sidestep import limits
from sidestep.counters import Counters
from sidestep.errors import Misuse, Unavailable
from sidestep.provider.network import netlink
from sidestep.provider.network.netlink import Frame
from sidestep.provider.network.state import NetworkState, RouteChange
from sidestep.routing import (
    Address,
    NetworkEvent,
    NoRoute,
    Obstacle,
    Route,
    plain_address,
)

_SOL_NETLINK: Final = 270
_NETLINK_ADD_MEMBERSHIP: Final = 1
_NLMSG_DONE: Final = 3
_NLM_F_DUMP_INTR: Final = 0x10
_U32_MAX: Final = 2**32 - 1
_LOOPBACK_6: Final = IPv6Address("::1")

RouteQuestion = tuple[Address, Address | None, int | None, int, str | None]


@dataclass(slots=True)
class _Snapshot:
    """A snapshot that is being read."""

    sock: socket.socket
    state: NetworkState
    left: list[tuple[int, int]]  # dumps to come, the present one first
    cause: str
    whole: bool  # true for more than the routes
    tries: int
    sequence: int = 0
    torn: bool = False  # the network changed under it, or not all of it could be read


@dataclass(frozen=True, slots=True)
class _Cached:
    answer: Route | NoRoute
    until: float


class Network:
    """Routes, interfaces and addresses of this process's network namespace. One thread."""

    def __init__(
        self,
        on_event: Callable[[NetworkEvent], None],
        *,
        counters: Counters | None = None,
        receive_buffer: int = limits.NETLINK_RECEIVE_BUFFER,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes a first snapshot, of which no events come: `present` has its content.

        Raises:
            Unavailable: The kernel cannot be asked.
        """
        self._on_event = on_event
        self._counters = counters if counters is not None else Counters()
        self._receive_buffer = receive_buffer
        self._clock = clock
        self._sequence = 0
        self._state = NetworkState()
        self._events: deque[NetworkEvent] = deque()
        self._cache: dict[RouteQuestion, _Cached] = {}
        self._snapshot: _Snapshot | None = None
        self._missed = ""  # reason why a snapshot of everything is due
        self._quiet_from = -math.inf  # time when announced changes have surely been done
        self._ready = select.epoll()
        try:
            self._requests = _open()
            self._announcements = self._subscribe()
            self._begin_snapshot("start", whole=True)
            while self._snapshot:
                self._read_snapshot(self._snapshot)
        except OSError as error:
            raise Unavailable(f"cannot ask the kernel about routes: {error.strerror}") from error
        self._events.clear()

    def close(self) -> None:
        if self._snapshot:
            self._leave_snapshot(self._snapshot)
        for closed in (self._ready, self._requests, self._announcements):
            closed.close()
        self._events.clear()

    def fileno(self) -> int:
        """Readable when `handle_readable` has something to do; the same number from beginning to end."""
        return self._ready.fileno()

    def handle_readable(self) -> None:
        """Takes in some of what the kernel has announced, and calls `on_event` for what changed; does not wait."""
        if self._snapshot:
            self._read_snapshot(self._snapshot)
        else:
            self._read_announcements()
        while self._events:
            self._on_event(self._events.popleft())

    # ---- what there is ----

    def present(self) -> Iterator[NetworkEvent]:
        """All interfaces, addresses and routes, as if they came now: for a protocol that begins to follow."""
        return iter(list(self._state.present()))

    # ---- lookups ----

    def route(
        self,
        destination: Address,
        *,
        source: Address | None = None,
        uid: int | None = None,
        mark: int = 0,
        interface: str | None = None,
    ) -> Route:
        """The way that the kernel would send a TCP packet; `uid` None stands for this process's own.

        Raises:
            NoRoute: There is none.
            Unavailable: The kernel did not answer.
            Misuse: There is no such user or mark.
        """
        question = _question(destination, source, uid, mark, interface)
        settled = not self._unread()
        now = self._clock()
        known = self._cache.get(question) if settled else None
        if known is None or known.until <= now:
            known = _Cached(self._ask(question), now + limits.ROUTE_CACHE_AGE_S)
            if settled and now >= self._quiet_from:
                self._remember(question, known)
        if isinstance(known.answer, NoRoute):  # a new one: each is raised once
            raise NoRoute(known.answer.destination, known.answer.obstacle, known.answer.errno)
        return known.answer

    def _remember(self, question: RouteQuestion, answer: _Cached) -> None:
        self._cache.pop(question, None)  # the answer moves to the end
        if len(self._cache) >= limits.ROUTES_CACHED_MAX:
            del self._cache[next(iter(self._cache))]
        self._cache[question] = answer

    def _ask(self, question: RouteQuestion) -> Route | NoRoute:
        destination, source, uid, mark, interface = question
        try:
            index = _index_of(interface) if interface else 0
            frame = self._answer(netlink.lookup_request(destination, source, uid, mark, index, self._next_sequence()))
            route = netlink.route_of(frame, destination, source)
            return replace(route, interface=_name_of(route.interface_index))
        except NoRoute as none:
            return none
        except netlink.Malformed as error:
            self._counters.add("network_ignored", "malformed")
            raise Unavailable(f"the kernel's answer about {destination} makes no sense: {error}") from error
        except _NoInterface:
            return NoRoute(destination, Obstacle.NO_INTERFACE, errno.ENODEV)
        except OSError as error:
            raise Unavailable(f"cannot ask the kernel about routes: {error.strerror}") from error

    def _answer(self, request: bytes) -> Frame:
        """The kernel's answer to a request that has one; it is there when the send returns."""
        self._requests.send(request)
        while True:
            datagram, sender = _receive(self._requests)
            if sender != 0:
                continue
            for frame in netlink.split(datagram):
                if frame.sequence == self._sequence:
                    return frame  # else a leftover of an earlier request

    def _next_sequence(self) -> int:
        self._sequence = (self._sequence + 1) & _U32_MAX
        return self._sequence

    # ---- announcements ----

    def _subscribe(self) -> socket.socket:
        sock = _open()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_buffer)
        sock.bind((0, netlink.GROUPS))
        try:
            sock.setsockopt(_SOL_NETLINK, _NETLINK_ADD_MEMBERSHIP, netlink.RTNLGRP_NEXTHOP)
        except OSError as error:
            if error.errno != errno.EINVAL:  # kernels before Linux 5.3 have no next hop objects
                raise
        self._ready.register(sock, select.EPOLLIN)
        self._unread_poll = select.poll()
        self._unread_poll.register(sock, select.POLLIN)
        return sock

    def _unread(self) -> bool:
        """True if an announcement waits that has not been taken in."""
        return bool(self._unread_poll.poll(0))

    def _read_announcements(self) -> None:
        for _ in range(limits.NETLINK_DATAGRAMS_PER_TURN):
            try:
                datagram, sender = _receive(self._announcements)
                if sender == 0:  # the kernel; what others send is nothing to us
                    self._take_in(datagram)
            except BlockingIOError:
                break
            except netlink.Malformed:
                self._counters.add("network_ignored", "malformed")
                self._missed = "malformed"
            except OSError as error:
                if error.errno == errno.ENOBUFS:
                    self._missed = "overflow"
                    self._resubscribe()
                    break
                if error.errno != errno.EMSGSIZE:
                    raise
                self._missed = "truncated"
        self._cache.clear()
        self._quiet_from = self._clock() + limits.ROUTE_SETTLE_S
        if self._missed:
            self._begin_snapshot(self._missed, whole=True)
        elif self._state.doubtful:
            self._begin_snapshot("silent", whole=False)

    def _resubscribe(self) -> None:
        """Begins with an empty socket: what an overflow left in the old one is older than the snapshot to come."""
        self._ready.unregister(self._announcements)
        self._announcements.close()
        self._announcements = self._subscribe()

    def _take_in(self, datagram: bytes) -> None:
        for frame in netlink.split(datagram):
            record = netlink.record_of(frame)
            if record is not None:
                self._events.extend(self._state.handle(record))

    # ---- snapshots ----

    def _begin_snapshot(self, cause: str, *, whole: bool, tries: int = 1) -> None:
        """Begins to read everything, or the routes alone, for comparison with what is known."""
        self._missed = ""
        self._state.doubtful = False
        if not whole and RouteChange in self._state.full:
            self._events.extend(self._state.lost())
            return
        self._counters.add("network_resync", cause)
        if not whole and not self._wait_for_changes():
            whole = True
        left, state = [netlink.ROUTES_4, netlink.ROUTES_6], NetworkState()
        if whole:
            left = [netlink.LINKS, netlink.ADDRESSES, *left]
        else:
            state = NetworkState(self._state.links, self._state.addresses, full=set(self._state.full))
        sock = _open()
        self._ready.unregister(self._announcements)
        self._ready.register(sock, select.EPOLLIN)
        self._snapshot = _Snapshot(sock, state, left, cause, whole, tries)
        self._ask_dump(self._snapshot)

    def _wait_for_changes(self) -> bool:
        """Waits until the kernel has done what it announced; False if it does not answer."""
        try:
            self._answer(netlink.barrier_request(self._next_sequence()))
        except (OSError, netlink.Malformed):
            return False
        return True

    def _ask_dump(self, snapshot: _Snapshot) -> None:
        snapshot.sequence = self._next_sequence()
        snapshot.sock.send(netlink.dump_request(snapshot.left[0], snapshot.sequence))

    def _read_snapshot(self, snapshot: _Snapshot) -> None:
        """Reads one piece of the snapshot, and compares it once it is complete."""
        try:
            datagram, sender = _receive(snapshot.sock)
            if sender == 0 and self._take_piece(snapshot, datagram):
                del snapshot.left[0]
                if snapshot.left:
                    self._ask_dump(snapshot)
        except BlockingIOError:
            return
        except (OSError, netlink.Malformed):
            snapshot.torn = True
            snapshot.left.clear()
        if RouteChange in snapshot.state.full:
            snapshot.left.clear()  # more routes than are followed: the others need not be read
        if not snapshot.left:
            self._end_snapshot(snapshot)

    def _take_piece(self, snapshot: _Snapshot, datagram: bytes) -> bool:
        """Takes in a piece of a dump; True if it was the last."""
        for frame in netlink.split(datagram):
            if frame.sequence != snapshot.sequence:
                continue
            snapshot.torn |= bool(frame.flags & _NLM_F_DUMP_INTR)
            if frame.error is not None:
                raise OSError(frame.error, "the kernel refused a dump")
            if frame.kind == _NLMSG_DONE:
                return True
            try:
                record = netlink.record_of(frame)
            except netlink.Malformed:
                self._counters.add("network_ignored", "malformed")
                continue
            if record is not None:
                snapshot.state.handle(record)
        return False

    def _end_snapshot(self, snapshot: _Snapshot) -> None:
        self._leave_snapshot(snapshot)
        if not snapshot.torn:
            self._events.extend(self._state.becomes(snapshot.state))
            self._state = snapshot.state
        elif snapshot.tries < limits.NETWORK_SNAPSHOTS_MAX:
            self._begin_snapshot(snapshot.cause, whole=snapshot.whole, tries=snapshot.tries + 1)
        else:
            self._events.extend(self._state.lost())
            self._missed = snapshot.cause  # the next announcement gives another try

    def _leave_snapshot(self, snapshot: _Snapshot) -> None:
        self._snapshot = None
        self._ready.unregister(snapshot.sock)
        snapshot.sock.close()
        self._ready.register(self._announcements, select.EPOLLIN)


class _NoInterface(Exception):
    """The interface is not there, or went just now."""


def _index_of(interface: str) -> int:
    try:
        return socket.if_nametoindex(interface)
    except OSError as error:  # Python does not say which of its reasons
        raise _NoInterface from error


def _name_of(index: int) -> str:
    try:
        return socket.if_indextoname(index)
    except OSError as error:
        raise _NoInterface from error


def _open() -> socket.socket:
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
    sock.setblocking(False)  # the kernel answers within the send: nothing is ever waited for
    return sock


def _receive(sock: socket.socket) -> tuple[bytes, int]:
    """A datagram and the port of its sender, 0 for the kernel; OSError(EMSGSIZE) for one that is too long."""
    datagram, _, flags, address = sock.recvmsg(limits.NETLINK_DATAGRAM_MAX)
    if flags & socket.MSG_TRUNC:
        raise OSError(errno.EMSGSIZE, "a netlink message is too long")
    return datagram, address[0]


def _question(
    destination: Address, source: Address | None, uid: int | None, mark: int, interface: str | None
) -> RouteQuestion:
    """A lookup as the kernel understands it, and as the cache keeps it."""
    if isinstance(destination, IPv6Address):
        interface = interface or destination.scope_id
    destination = _on_the_wire(destination)
    source = _on_the_wire(source) if source is not None and not source.is_unspecified else None
    if source is not None and source.version != destination.version:
        raise NoRoute(destination, Obstacle.OTHER, errno.EAFNOSUPPORT)
    if not 0 <= mark <= _U32_MAX or not 0 <= (uid or 0) <= _U32_MAX:
        raise Misuse(f"a route for user {uid} with mark {mark}")
    return destination, source, uid, mark, interface


def _on_the_wire(address: Address) -> Address:
    """The address that packets carry."""
    address = plain_address(address)
    if isinstance(address, IPv4Address):
        return address
    if address.is_unspecified:
        return _LOOPBACK_6  # the choice of connect()
    return IPv6Address(int(address))  # the scope goes as the interface
