"""Queue pairs that two hosts have joined before a connection wants them: those of one device, with all hosts.

To make one and to move it to INIT, RTR and RTS takes some calls of the kernel, and of an adapter's firmware, at both
ends. Here that is done in advance, by a REQ for `POOL_SERVICE`; a connection takes one by a REQ of its own under the
same number, and that word and its answer are all that is left on its way.

    asks, RTS at once                         is asked, RTR until there is a connection
    REQ for POOL_SERVICE, with queue pair -->  makes one, joins the two
    joins the two                        <--  REP, with its own
                                         ...
    REQ for a service, private data      -->  is asked whether there is to be a connection, as always
                                         <--  REP; or REJ, and the pair is no more
    RTU                                  -->

- Who asks by a link keeps as many as connections were made by it lately, and alone takes them.
- A pair serves one connection: its numbers and PSNs are new, and packets of an older one have nowhere to go.
- It is of the link that it was joined by: its other end is the host that the link's is, and it ends with the link.
- Nothing is posted to it: what another host sends before there is a connection finds no receive.
- Without one, for whatever reason, a connection joins its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from sidestep import limits
from sidestep.errors import SidestepError
from sidestep.rdma.cm import REJECT_NO_RESOURCES, CmState, Established
from sidestep.rdma.verbs import EventKind, QueuePair

if TYPE_CHECKING:
    from sidestep.rdma.cm import Connection, ConnectionEvent
    from sidestep.rdma.verbs import AsyncEvent, EventHandler, QpCapabilities
    from sidestep.remote.control_link import ControlLink
    from sidestep.remote.control_manager import ControlConnection, ControlManager, ControlRequest

POOL_SERVICE: Final = 1 << 63  # none of SDP's (0x1_PORT, annex A4), which are the only ones that connections ask for


class _Host:
    """The pairs that this end has asked one other host for."""

    def __init__(self) -> None:
        self.ready: list[ControlConnection] = []
        self.joining: ControlConnection | None = None
        self.wanted = 0  # as many as connections were made since it rested
        self.refused = False  # the other end has no more, or knows none; it is asked again after a rest
        self.due = False  # one is about to be joined
        self.rests = False  # no connection was made since that was looked at


class QueuePairPool:
    """All of one device.

    Args:
        manager: The device's.
        make_qp: Makes one as connections have it, whose events are told to that handler.
        count: Hears what becomes of each; see `pooled_queue_pair` in `sidestep.counters`.
    """

    def __init__(
        self,
        manager: ControlManager,
        make_qp: Callable[[EventHandler], QueuePair],
        count: Callable[[str], object],
    ) -> None:
        self._manager = manager
        self._make_qp = make_qp
        self._count = count
        self._hosts: dict[str, _Host] = {}  # by address
        self._given: dict[Connection, ControlLink] = {}  # those that other hosts have asked for
        self._closed = False

    @property
    def size(self) -> int:
        """Pairs that wait for a connection, or are being joined."""
        asked = sum(len(each.ready) + (each.joining is not None) for each in self._hosts.values())
        return asked + len(self._given)

    def close(self) -> None:
        """Gives all back, and makes no more."""
        self._closed = True
        for address in list(self._hosts):
            self._drop(address)
        for connection in list(self._given):
            self._give_back(connection)

    # ---- for connections that ask ----

    def take(self, address: str, capabilities: QpCapabilities) -> ControlConnection | None:
        """One that is joined with that host's, and is the caller's from now on; None: there is none."""
        host = self._hosts.get(address)
        if host is None:
            return None
        for connection in host.ready:
            if connection.state is CmState.JOINED and connection.qp.capabilities == capabilities:
                host.ready.remove(connection)
                self._count("taken")
                return connection
        self._count("missed")
        return None

    def note(self, address: str) -> None:
        """A connection with that host was made: another one may follow."""
        if self._closed:
            return
        host = self._hosts.get(address)
        if host is None:
            host = self._hosts[address] = _Host()
            self._manager.driver.call_later(limits.CONTROL_POOL_KEPT_S, partial(self._look_after, address, host))
        host.rests = False
        host.wanted = min(host.wanted + 1, limits.CONTROL_POOL_MAX)
        self._fill_soon(address, host)

    def doubt(self, address: str) -> None:
        """A connection with that host broke: the way there may be another one than when the pairs were joined."""
        if address in self._hosts:
            self._drop(address)

    def _fill_soon(self, address: str, host: _Host) -> None:
        """When the connection has done what it has to do first."""
        if not host.due:
            host.due = True
            self._manager.driver.call_later(limits.CONTROL_POOL_DELAY_S, partial(self._fill, address, host))

    def _fill(self, address: str, host: _Host) -> None:
        """Joins one, if one is wanted; the next one follows it."""
        host.due = False
        if (
            self._hosts.get(address) is not host or host.refused or host.joining is not None
            or len(host.ready) >= host.wanted or self.size >= limits.CONTROL_POOL_ALL_MAX
        ):  # fmt: skip
            return
        try:
            qp = self._make_qp(self._on_event)
        except SidestepError:  # the device has no more
            host.refused = True
        else:
            host.joining = self._manager.connect(address, POOL_SERVICE, qp, b"", self._handle_event)

    def _look_after(self, address: str, host: _Host) -> None:
        """Gives back what nobody wants any more."""
        if self._hosts.get(address) is not host:
            return
        if host.rests:
            self._drop(address)
        else:
            host.rests = True
            self._manager.driver.call_later(limits.CONTROL_POOL_KEPT_S, partial(self._look_after, address, host))

    def _drop(self, address: str) -> None:
        host = self._hosts.pop(address)
        for connection in (*host.ready, host.joining):
            if connection is not None:
                self._give_back(connection)

    # ---- for those that are asked ----

    def join(self, request: ControlRequest) -> bool:
        """Another host wants one; whether it has got it."""
        connection = None
        of_link = sum(link is request.link for link in self._given.values())
        if not self._closed and of_link < limits.CONTROL_POOL_MAX and self.size < limits.CONTROL_POOL_ALL_MAX:
            try:
                connection = request.accept(self._make_qp(self._on_event), b"", self._handle_event)
            except SidestepError:  # the device has no more
                connection = None
        if connection is None:
            request.reject(REJECT_NO_RESOURCES)
            return False
        self._given[connection] = request.link  # also if it came to nothing, which is about to be told
        return connection.state is CmState.JOINED

    def hand_over(self, connection: ControlConnection) -> None:
        """There is to be a connection by it: it is the caller's from now on."""
        self._given.pop(connection, None)

    # ---- what becomes of them ----

    def _handle_event(self, connection: Connection, event: ConnectionEvent) -> None:
        host = self._hosts.get(connection.remote_address)
        if host is not None and host.joining is connection:
            joined, host.joining = host.joining, None
            if isinstance(event, Established) and joined.state is CmState.JOINED:
                self._count("joined")
                host.ready.append(joined)
                self._fill_soon(joined.remote_address, host)
                return
            host.refused = True
        self._forget(connection)

    def _on_event(self, event: AsyncEvent) -> None:
        """Of one that nobody has taken: who takes it hears of it himself."""
        if isinstance(event.source, QueuePair) and event.kind is not EventKind.COMMUNICATION_ESTABLISHED:
            connection = self._manager.connections.get(event.source.number)
            if connection is not None and connection.state is CmState.JOINED:
                self._manager.driver.notices.append(partial(self._give_back, connection))

    def _give_back(self, connection: Connection) -> None:
        self._count("unused")
        connection.disconnect()
        self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        """It is no more."""
        self._given.pop(connection, None)
        host = self._hosts.get(connection.remote_address)
        if host is not None:
            host.ready = [each for each in host.ready if each is not connection]
        connection.qp.destroy()
