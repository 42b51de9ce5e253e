"""The connection manager: states, rules of the handshake, listeners, requests, and connections of every device.

The passive side listens on a 64-bit service id. A request carries private data (SDP: the Hello), the answer too (the
HelloAck), and so does a rejection. Several listeners may share a service id if each looks for something of its own in
the private data, such as the address the other end wants to reach.

    active                                   passive
    connect(address, id, qp, hello) --REQ--> handler(request)
    Established(hello_ack)          <--REP-- request.accept(qp, hello_ack, handler)
                                    --RTU--> Established()         or by the first message, if that comes before RTU
    Rejected(28)                    <--REJ-- request.reject()
    disconnect()                   --DREQ--> Disconnected()        crossing ones are normal: each side gets one
    Disconnected()                 <--DREP--
    TimewaitExit()                           TimewaitExit()

Rules that hold for every device:

- The manager moves the queue pair: to RTR in `accept`, to RTS with `Established`, to ERROR in `disconnect` and before
  `Disconnected`. Receives are posted before `connect` and `accept`: messages may come at once.
- A connection gets `Established` once, or `Rejected`, or `Unreachable`; after `Established` exactly one `Disconnected`;
  last of all `TimewaitExit` if `Established` had been told. Nothing comes after that.
- With callbacks, `Established` is told before the first message is handed over, and `Disconnected` after the last.
- A queue pair in error does not disconnect by itself (IBTA 12.9.7): who sees the error calls `disconnect`. Devices
  whose attributes say `error_disconnects` (iWARP) lose the connection with it and tell `Disconnected` at both ends.

Theory of operation. A device adds a way for the messages: `Connection.ask`, `Connection.send` and
`ConnectionRequest.answer` say them, `Connection.handle` takes each that has come. `TRANSITIONS` has what a message does
in a state, where messages come once and in order; a way that repeats or loses messages adds to it (`soft.handshake`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, TypeAlias

from sidestep import limits
from sidestep.errors import Misuse
from sidestep.rdma.verbs import QpState

if TYPE_CHECKING:
    from sidestep.rdma.verbs import Device, QpCapabilities, QueuePair

# Reasons of a rejection (IBTA 12.6.7.2).
REJECT_NO_RESOURCES: Final = 3  # no queue pair, no memory
REJECT_TIMEOUT: Final = 4  # who asked has given up
REJECT_INVALID_COMM_ID: Final = 6  # a reply to a request that is no more
REJECT_INVALID_SERVICE_ID: Final = 8  # nobody listens
REJECT_CONSUMER: Final = 28  # the consumer, not the fabric, said no


class Cancelled(Protocol):
    """A timer."""

    def cancel(self) -> None:
        """Stops it."""


class Driver(Protocol):
    """What drives a device, and calls handlers: a `Loop`, or a loopback fabric."""

    notices: deque[Callable[[], object]]  # calls to users, in the order of their causes

    def call_later(self, delay_s: float, callback: Callable[[], object], /) -> Cancelled:
        """Makes a call then."""


class CmKind(IntEnum):
    """Messages of the connection manager; the values are the attribute ids of the MADs (IBTA 16.7.2)."""

    REQ = 0x10
    REJ = 0x12
    REP = 0x13
    RTU = 0x14
    DREQ = 0x15
    DREP = 0x16


class CmState(IntEnum):
    """Where a connection is, seen from one side (IBTA 12.9.7)."""

    REQUEST_SENT = 1  # active: REQ is out
    REPLY_SENT = 2  # passive: accepted, RTU is awaited
    ESTABLISHED = 3
    DISCONNECT_SENT = 4  # DREQ is out
    TIMEWAIT = 5  # late packets may still come: the queue pair's number is not used again
    CLOSED = 6
    JOINED = 7  # not the standard's: both queue pairs are joined, and no connection has asked for them yet


CLOSING: Final = (CmState.DISCONNECT_SENT, CmState.TIMEWAIT)
BEGINNING: Final = (CmState.REQUEST_SENT, CmState.REPLY_SENT, CmState.JOINED)  # there is no connection yet


@dataclass(frozen=True, slots=True)
class Established:
    """Both ends may send. `private_data` is that of the reply; empty on the passive side."""

    private_data: bytes = b""


@dataclass(frozen=True, slots=True)
class Rejected:
    """The other end said no."""

    reason: int  # IBTA 12.6.7.2: REJECT_CONSUMER and others
    private_data: bytes = b""


@dataclass(frozen=True, slots=True)
class Unreachable:
    """Nobody answered: the request on the active side, the reply on the passive one."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection is over and its queue pair in error."""

    by_remote: bool  # the other end asked for it, or both at once
    confirmed: bool = True  # False: the other end never answered, or the connection broke


@dataclass(frozen=True, slots=True)
class TimewaitExit:
    """The last event: the number of the queue pair may be used again. It comes even if that was destroyed before."""


Transport: TypeAlias = tuple[tuple[str, int], tuple[str, int]]  # address and port of this end, and of the other one
ConnectionEvent: TypeAlias = Established | Rejected | Unreachable | Disconnected | TimewaitExit
# The return value of a handler has no meaning.
ConnectionHandler: TypeAlias = "Callable[[Connection, ConnectionEvent], object]"
RequestHandler: TypeAlias = "Callable[[ConnectionRequest], object]"


@dataclass(frozen=True, slots=True)
class PrivateDataMatch:
    """What a listener looks for in the private data of a request: `value` at `offset`, where `mask` has ones.

    SDP compares Hello's IP version and DstIP this way (docs/wire/sdp.md §2.3).
    """

    offset: int
    value: bytes
    mask: bytes = b""  # as long as `value`; all ones unless given

    def __post_init__(self) -> None:
        if self.offset < 0 or not self.value:
            raise Misuse("a match needs an offset and a value")
        if self.mask and len(self.mask) != len(self.value):
            raise Misuse(f"a mask of {len(self.mask)} bytes for a value of {len(self.value)}")

    def matches(self, private_data: bytes) -> bool:
        """Whether the private data has the value there; what it is too short for counts as zeros."""
        size = len(self.value)
        found = private_data[self.offset : self.offset + size].ljust(size, b"\0")
        if not self.mask:
            return found == self.value
        return all((a ^ b) & m == 0 for a, b, m in zip(found, self.value, self.mask, strict=True))


class Listener:
    """A place where requests arrive."""

    def __init__(
        self, manager: ConnectionManager, service_id: int, handler: RequestHandler, match: PrivateDataMatch | None,
        backlog: int,
    ) -> None:  # fmt: skip
        self._manager = manager
        self.service_id = service_id
        self.handler = handler
        self.match = match
        self.backlog = backlog
        self.closed = False
        self.pending = 0  # requests handed to the handler and neither accepted nor rejected

    def close(self) -> None:
        """Takes no more requests; those pending can still be answered. Calling it again does nothing."""
        if not self.closed:
            self.closed = True
            self._manager.listener_closed(self)


def depths(qp: QueuePair, other: Any) -> tuple[int, int]:
    """RDMA Reads under way at most, of this end and of the other one: the smaller number counts (IBTA 12.7.5)."""
    able = qp.capabilities
    return min(able.initiator_depth, other.responder_resources), min(able.responder_resources, other.initiator_depth)


class ConnectionRequest(ABC):
    """Somebody wants a connection. It must be answered, once.

    A request counts for its listener until it is answered, or its sender has given up.
    """

    def __init__(
        self, manager: ConnectionManager, remote_address: str, *, service_id: int = 0, private_data: bytes = b"",
        responder_resources: int = 0, initiator_depth: int = 0,
    ) -> None:  # fmt: skip
        self._manager = manager
        self._answered = False
        self._listener: Listener | None = None
        self.withdrawn = False  # who asked has given up; it can still be answered, to no effect
        self.transport: Transport | None = None  # the connection beneath, where it is TCP's
        self.remote_address = remote_address
        self.service_id = service_id
        self.private_data = private_data
        self.responder_resources = responder_resources  # RDMA Reads the other end takes at a time
        self.initiator_depth = initiator_depth  # RDMA Reads the other end wants to make at a time

    # The user's side.

    def accept(self, qp: QueuePair, private_data: bytes, handler: ConnectionHandler) -> Connection:
        """Says yes. If the other end has given up by now, the handler gets `Rejected` or `Unreachable`.

        Raises:
            Misuse: Already answered, too much private data, or the queue pair is not in INIT.
        """
        self._manager.check_private_data(CmKind.REP, private_data)
        connection = self.connection_of(qp)
        self._answer()
        if connection is None:
            connection = self._manager.make_connection(qp, self.remote_address, handler, None)
        connection.state, connection.handler = CmState.REPLY_SENT, handler
        if self.withdrawn:
            connection.end(Rejected(REJECT_TIMEOUT))
        else:
            connection.transport = self.transport
            self.answer(connection, private_data, *depths(qp, self))
        return connection

    def take_joined(self, capabilities: QpCapabilities) -> Connection | None:
        """What `accept` is to be given the queue pair of, as who asks is joined with it; None: any.

        Raises:
            Unavailable: It is not as wanted, or no more. Reject the request.
        """
        del capabilities
        return None

    def reject(self, reason: int = REJECT_CONSUMER, private_data: bytes = b"") -> None:
        """Says no. Some ways send no reason but the consumer's.

        Raises:
            Misuse: Already answered, or too much private data.
        """
        self._manager.check_private_data(CmKind.REJ, private_data)
        self._answer()
        if not self.withdrawn:
            self.refuse(reason, private_data)

    # A device's.

    @property
    def key(self) -> object:
        """Its name among the manager's requests."""
        return self

    def connection_of(self, qp: QueuePair) -> Connection | None:
        """The one that the queue pair has already; None: it can be connected. Misuse: it cannot."""
        self._manager.check_qp(qp)
        return None

    @abstractmethod
    def answer(self, connection: Any, private_data: bytes, depth: int, resources: int) -> None:
        """Sends the REP, with the depths that are agreed on; if that fails, ends the connection."""

    @abstractmethod
    def refuse(self, reason: int, private_data: bytes) -> None:
        """Sends the REJ."""

    # The manager's side.

    def seek_listener(self) -> bool:
        """Hands it to the listener that it is for; False: it is refused, as there is none."""
        listener = self._manager.find_listener(self.service_id, self.private_data)
        if isinstance(listener, int):
            self._answered = True
            self.refuse(listener, b"")
            return False
        self.await_answer(listener)
        return True

    def await_answer(self, listener: Listener) -> None:
        """Hands it to a listener, later."""
        self._listener, self.service_id = listener, listener.service_id
        listener.pending += 1
        self._manager.requests[self.key] = self
        self._manager.notices.append(self._deliver)

    def withdraw(self) -> None:
        """Notes that who asked has given up."""
        if not self.withdrawn:
            self.withdrawn = True
            if not self._answered:
                self._leave_backlog()

    def _deliver(self) -> None:
        if self._answered:
            return
        assert self._listener is not None
        if self._listener.closed:
            self.reject(REJECT_INVALID_SERVICE_ID)
        else:
            self._listener.handler(self)

    def _answer(self) -> None:
        if self._answered:
            raise Misuse("the request was answered already")
        self._answered = True
        if not self.withdrawn:
            self._leave_backlog()

    def _leave_backlog(self) -> None:
        if self._listener is not None:
            self._listener.pending -= 1
            del self._manager.requests[self.key]


class Connection(ABC):
    """One side of a connection, from `connect` or `accept` on."""

    def __init__(
        self, manager: ConnectionManager, qp: Any, remote_address: str, handler: ConnectionHandler,
        check_reply: Callable[[bytes], bool] | None = None,
    ) -> None:  # fmt: skip
        self._manager = manager
        self.qp: QueuePair = qp
        self.remote_address = remote_address
        self.transport: Transport | None = None  # the connection beneath, where it is TCP's
        self.state = CmState.REQUEST_SENT
        self.handler = handler
        self._check_reply = check_reply
        self._timer: Cancelled | None = None
        qp.connection = self
        manager.connections[self.key] = self

    # The user's side.

    def disconnect(self) -> None:
        """Ends it in any state, at once on this side: the queue pair goes to ERROR. Calling it again does nothing.

        What the other end did not acknowledge yet may be lost. Before `Established` the attempt is given up: no
        event follows on this side, and the other one gets `Rejected` with REJECT_TIMEOUT. After it, `Disconnected`
        follows here too.
        """
        if self.state is CmState.ESTABLISHED:
            self.state = CmState.DISCONNECT_SENT
            self.qp.end()
            self.send(CmKind.DREQ)
        elif self.state in BEGINNING:
            self._give_up()

    # A device's.

    @property
    def key(self) -> int:
        """Its name among the manager's connections."""
        return id(self)

    @abstractmethod
    def ask(self, service_id: int, private_data: bytes) -> None:
        """Sends the REQ, or begins to; every failure is told later."""

    @abstractmethod
    def send(self, kind: CmKind, **fields: Any) -> None:
        """Sends an RTU, REJ, DREQ or DREP; a REJ has a `reason`, and the `reply` that it is about, if any."""

    @abstractmethod
    def answered(self, reply: Any) -> bool:
        """Readies the queue pair for what the other end has accepted and sends the RTU; False: it ended."""

    def timewait_s(self) -> float:
        """Seconds from the end until the last event; 0: the way keeps late packets off by itself."""
        return 0.0

    def rest(self) -> None:
        """Waits for late packets, then calls `end` with TimewaitExit."""
        if wait_s := self.timewait_s():
            self._timer = self._manager.call_later(wait_s, partial(self.end, TimewaitExit()))
        else:
            self.end(TimewaitExit())

    # The queue pair's side.

    def communication_established(self) -> None:
        """A message arrived: the RTU need not."""
        if self.state is CmState.REPLY_SENT:
            self.establish()

    def lost(self, *, by_remote: bool | None = None, confirmed: bool = False) -> None:
        """The way to the other end is no more; `by_remote`: unless this end has asked for the end."""
        if self.state in BEGINNING:
            self.end(Unreachable())
        elif self.state in (CmState.ESTABLISHED, CmState.DISCONNECT_SENT):
            unasked = self.state is CmState.ESTABLISHED
            self._over(Disconnected(unasked if by_remote is None else by_remote, confirmed))

    # The other end's side: one method for each entry of TRANSITIONS.

    def handle(self, kind: CmKind, message: Any = None) -> bool:
        """Takes a message; False: it is none for this state."""
        if (transition := self._manager.transitions.get((self.state, kind))) is not None:
            transition(self, message)
        return transition is not None

    def on_reply(self, reply: Any) -> None:
        """The other end accepts."""
        wanted = self._check_reply is None or self._check_reply(reply.private_data)
        if self.state is not CmState.REQUEST_SENT:
            return  # ended by the user when he was asked
        if not wanted:
            self.send(CmKind.REJ, reason=REJECT_CONSUMER, reply=reply)
            self.end(Rejected(REJECT_CONSUMER))
        elif self.answered(reply):
            self.establish(reply.private_data)

    def on_ready_to_use(self, _message: Any) -> None:
        """The last word of the handshake."""
        self.establish()

    def on_reject(self, message: Any) -> None:
        """The other end does not want, or no longer."""
        self.end(Rejected(message.reason, message.private_data))

    def on_disconnect(self, _message: Any) -> None:
        """The other end disconnects."""
        self.send(CmKind.DREP)
        self.qp.catch_up()
        self._over(Disconnected(by_remote=True))

    def on_disconnect_early(self, _message: Any) -> None:
        """The other end gave up before this one knew of a connection."""
        self.send(CmKind.DREP)
        self.end(Rejected(REJECT_TIMEOUT))

    def on_disconnected(self, _message: Any) -> None:
        """The other end agrees."""
        self._over(Disconnected(by_remote=False))

    # Changes of state.

    def establish(self, private_data: bytes = b"") -> None:
        """Both ends may send."""
        self._manager.count("connection_made", "passive" if self.state is CmState.REPLY_SENT else "active")
        self._stop_timer()
        self.state = CmState.ESTABLISHED
        self.qp.ready_to_send()
        self._manager.notices.append(partial(self.handler, self, Established(private_data)))

    def end(self, event: ConnectionEvent | None) -> None:
        """Ends the connection at once, without time-wait."""
        self._stop_timer()
        self.state = CmState.CLOSED
        self._forget()
        self.qp.end()
        if event is not None:
            self._tell(event)

    def _over(self, event: Disconnected) -> None:
        """Ends an established connection; time-wait follows."""
        self._stop_timer()
        self.state = CmState.TIMEWAIT
        self.qp.end()
        self._tell(event)
        self.rest()

    def _give_up(self) -> None:
        self.send(CmKind.REJ if self.state is CmState.REQUEST_SENT else CmKind.DREQ, reason=REJECT_TIMEOUT)
        self.end(None)

    def _forget(self) -> None:
        if self._manager.connections.get(self.key) is self:
            del self._manager.connections[self.key]

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tell(self, event: ConnectionEvent) -> None:
        """Tells an end, behind all that was posted."""
        self.qp.when_quiet(partial(self._manager.notices.append, partial(self.handler, self, event)))


def ignore(_connection: Connection, _message: Any) -> None:
    """Changes nothing: the message that matters is on its way, or came before."""


Transitions: TypeAlias = "dict[tuple[CmState, CmKind], Callable[[Any, Any], None]]"  # a connection, and the message
TRANSITIONS: Final[Transitions] = {
    (CmState.REQUEST_SENT, CmKind.REP): Connection.on_reply,
    (CmState.REQUEST_SENT, CmKind.REJ): Connection.on_reject,
    (CmState.REQUEST_SENT, CmKind.DREQ): Connection.on_disconnect_early,
    (CmState.REPLY_SENT, CmKind.RTU): Connection.on_ready_to_use,
    (CmState.REPLY_SENT, CmKind.REJ): Connection.on_reject,
    (CmState.REPLY_SENT, CmKind.DREQ): Connection.on_disconnect_early,
    (CmState.ESTABLISHED, CmKind.RTU): ignore,  # a message has made it unneeded
    (CmState.ESTABLISHED, CmKind.DREQ): Connection.on_disconnect,
    (CmState.DISCONNECT_SENT, CmKind.RTU): ignore,
    (CmState.DISCONNECT_SENT, CmKind.DREQ): Connection.on_disconnect,  # crossing
    (CmState.DISCONNECT_SENT, CmKind.DREP): Connection.on_disconnected,
}


class ConnectionManager(ABC):
    """The connection manager of one device.

    Args:
        device: Whose queue pairs it connects.
        notices: The driver's.
    """

    transitions: ClassVar[Transitions] = TRANSITIONS
    service_mask: ClassVar[int] = (1 << 64) - 1  # bits of a service id that are on the wire

    def __init__(self, device: Device, notices: deque[Callable[[], object]]) -> None:
        self.device = device
        self.notices = notices
        self.listeners: list[Listener] = []
        self.connections: dict[int, Any] = {}
        self.requests: dict[Any, Any] = {}  # not answered yet
        self.count: Callable[..., object] = lambda *_what: None  # what happened and why, if the device counts it

    # The user's side.

    def listen(
        self, service_id: int, handler: RequestHandler, *, match: PrivateDataMatch | None = None,
        backlog: int = limits.RDMA_BACKLOG_DEFAULT,
    ) -> Listener:  # fmt: skip
        """Hands requests for the service id to the handler.

        Listeners with a match are asked first, in the order of their `listen`; one without takes the rest. If nobody
        listens on the service id the device answers REJECT_INVALID_SERVICE_ID; if none of them matches, or the
        backlog is full, REJECT_CONSUMER.

        Raises:
            Misuse: A listener with the same service id and match exists.
        """
        _check_service(service_id)
        if backlog < 1:
            raise Misuse("a listener needs room for a request")
        if any(each.service_id == service_id and each.match == match for each in self.listeners):
            raise Misuse(f"somebody listens on service id {service_id:#018x} already")
        listener = Listener(self, self.open_service(service_id), handler, match, backlog)
        self.listeners.append(listener)
        return listener

    def connect(
        self, address: str, service_id: int, qp: QueuePair, private_data: bytes, handler: ConnectionHandler, *,
        check_reply: Callable[[bytes], bool] | None = None,
    ) -> Connection:  # fmt: skip
        """Asks for a connection; what comes of it is told to the handler.

        `check_reply` sees the reply's private data before the connection is made. If it returns False the other end
        is told `Rejected` with REJECT_CONSUMER, and the handler `Rejected` with REJECT_CONSUMER as well.

        Raises:
            Misuse: Too much private data, or the queue pair is not in INIT.
        """
        self.check_private_data(CmKind.REQ, private_data)
        address = self.check_target(address, service_id)
        self.check_qp(qp)
        connection = self.make_connection(qp, address, handler, check_reply)
        connection.ask(service_id, private_data)
        return connection

    def take_joined(self, address: str, capabilities: QpCapabilities) -> Connection | None:
        """One whose queue pair is joined with that host's already, for `connect`; None: there is none.

        It is the caller's from now on: `disconnect` gives it up, and the queue pair is his to destroy.
        """
        del address, capabilities
        return None

    def close(self) -> None:
        """Ends everything, without waiting for anybody."""
        for listener in list(self.listeners):
            listener.close()
        for request in list(self.requests.values()):
            request.reject(REJECT_INVALID_SERVICE_ID)
        for connection in list(self.connections.values()):
            connection.disconnect()
            connection.end(None)

    # A device's.

    @abstractmethod
    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Cancelled:
        """Calls in so many seconds, from where the device is driven."""

    @abstractmethod
    def make_connection(
        self, qp: Any, remote_address: str, handler: ConnectionHandler, check_reply: Callable[[bytes], bool] | None
    ) -> Connection:
        """One side of a connection, which adds itself to `connections`."""

    def check_target(self, address: str, service_id: int) -> str:
        """The address as the device writes it; Misuse if no request can go there."""
        _check_service(service_id)
        return address

    def open_service(self, service_id: int) -> int:
        """Gets ready for requests; which service id it is."""
        return service_id

    def private_data_max(self, kind: CmKind) -> int:
        """Bytes of private data that a REQ, REP or REJ has room for."""
        attributes = self.device.attributes
        if kind is CmKind.REQ:
            return attributes.request_private_data_max
        return attributes.reply_private_data_max if kind is CmKind.REP else attributes.reject_private_data_max

    # For listeners, requests and connections.

    def listener_closed(self, listener: Listener) -> None:
        self.listeners.remove(listener)

    def listening_on(self, service_id: int) -> list[Listener]:
        """All that a request for the service id may be for."""
        return [each for each in self.listeners if not (each.service_id ^ service_id) & self.service_mask]

    def find_listener(self, service_id: int, private_data: bytes) -> Listener | int:
        """Whom a request is for, or the reason why it is rejected; see `listen`."""
        candidates = self.listening_on(service_id)
        if not candidates:
            return REJECT_INVALID_SERVICE_ID
        candidates.sort(key=lambda each: each.match is None)  # stable: the order of listening otherwise
        for listener in candidates:
            if listener.match is None or listener.match.matches(private_data):
                return REJECT_CONSUMER if listener.pending >= listener.backlog else listener
        return REJECT_CONSUMER

    def check_private_data(self, kind: CmKind, private_data: bytes) -> None:
        """Raises Misuse if there is too much."""
        if len(private_data) > (most := self.private_data_max(kind)):
            raise Misuse(f"{len(private_data)} bytes of private data; {most} have room")

    def check_qp(self, qp: QueuePair) -> None:
        """Raises Misuse for a queue pair of another device, or one that is, or has been, connected."""
        if qp.device is not self.device:
            raise Misuse("a queue pair of another device")
        if qp.state is not QpState.INIT or qp.connection is not None:
            raise Misuse(f"a queue pair in {qp.state.name} that was used before cannot be connected")


def _check_service(service_id: int) -> None:
    if not 0 <= service_id < 1 << 64:
        raise Misuse("a service id has 64 bits")


class PortManager(ConnectionManager):
    """One whose service ids have a port in the low 16 bits, as those of SDP and of rdma_cm's TCP space.

    The other bits are not on the wire, so services of one port are told apart by matches only. Port 0 is any that is
    free.
    """

    service_mask = 0xFFFF
    device: Any  # one that has a loop

    def __init__(self, device: Any) -> None:
        super().__init__(device, device.loop.notices)
        self._ports: dict[int, Any] = {}

    @property
    def ports(self) -> list[int]:
        return sorted(self._ports)

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Cancelled:
        timer: Cancelled = self.device.loop.call_later(delay_s, callback)
        return timer

    @abstractmethod
    def open_port(self, number: int) -> Any:
        """Listens on it; Unavailable if it cannot be had. What it returns has a `number` and can be closed."""

    def open_service(self, service_id: int) -> int:
        self.device.check_open()
        number = service_id & self.service_mask
        if number not in self._ports:
            port = self.open_port(number)
            self._ports[port.number] = port
            number = port.number
        return service_id & ~self.service_mask | number

    def listener_closed(self, listener: Listener) -> None:
        super().listener_closed(listener)
        if not self.listening_on(listener.service_id):
            self._ports.pop(listener.service_id & self.service_mask).close()

    def check_target(self, address: str, service_id: int) -> str:
        self.device.check_open()
        address = super().check_target(address, service_id)
        if not service_id & self.service_mask:
            raise Misuse(f"service id {service_id:#x} names no port", remedy="its low 16 bits are the TCP port")
        return address
