"""The connection manager: who listens, who asks, and what they tell each other before there is a connection.

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
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from sidestep import limits
from sidestep.errors import Misuse

if TYPE_CHECKING:
    from sidestep.rdma.verbs import QpCapabilities, QueuePair

# Reasons of a rejection (IBTA 12.6.7.2).
REJECT_NO_RESOURCES: Final = 3  # no queue pair, no memory
REJECT_TIMEOUT: Final = 4  # who asked has given up
REJECT_INVALID_COMM_ID: Final = 6  # a reply to a request that is no more
REJECT_INVALID_SERVICE_ID: Final = 8  # nobody listens
REJECT_CONSUMER: Final = 28  # the consumer, not the fabric, said no


class Driver(Protocol):
    """What drives a device, and calls handlers: a `Loop`, or a loopback fabric."""

    notices: deque[Callable[[], object]]  # calls to users, in the order of their causes

    def call_later(self, delay_s: float, callback: Callable[[], object], /) -> object:
        """Makes a call then."""


class CmState(IntEnum):
    """Where a connection is, seen from one side (IBTA 12.9.7)."""

    REQUEST_SENT = 1  # active: REQ is out
    REPLY_SENT = 2  # passive: accepted, RTU is awaited
    ESTABLISHED = 3
    DISCONNECT_SENT = 4  # DREQ is out
    TIMEWAIT = 5  # late packets may still come: the queue pair's number is not used again
    CLOSED = 6
    JOINED = 7  # not the standard's: both queue pairs are joined, and no connection has asked for them yet


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
ConnectionHandler: TypeAlias = (
    "Callable[[Connection, ConnectionEvent], object]"  # what handlers return is of no meaning
)
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

    @property
    def size(self) -> int:
        """Bytes compared."""
        return len(self.value)

    def matches(self, private_data: bytes) -> bool:
        """Whether the private data has the value there; what it is too short for counts as zeros."""
        found = private_data[self.offset : self.offset + self.size].ljust(self.size, b"\0")
        if not self.mask:
            return found == self.value
        return all((a ^ b) & m == 0 for a, b, m in zip(found, self.value, self.mask, strict=True))


class Listener(ABC):
    """A place where requests arrive."""

    __slots__ = ()

    service_id: int
    match: PrivateDataMatch | None
    backlog: int
    closed: bool
    pending: int  # requests handed to the handler and neither accepted nor rejected

    @abstractmethod
    def close(self) -> None:
        """Takes no more requests; those pending can still be answered. Calling it again does nothing."""


class ConnectionRequest(ABC):
    """Somebody wants a connection. It must be answered, once."""

    __slots__ = ()

    transport: Transport | None = None  # the connection beneath, where it is TCP's

    service_id: int
    private_data: bytes
    remote_address: str
    responder_resources: int  # RDMA Reads the other end takes at a time
    initiator_depth: int  # RDMA Reads the other end wants to make at a time

    @abstractmethod
    def accept(self, qp: QueuePair, private_data: bytes, handler: ConnectionHandler) -> Connection:
        """Says yes. If the other end has given up by now, the handler gets `Rejected` or `Unreachable`.

        Raises:
            Misuse: Already answered, too much private data, or the queue pair is not in INIT.
        """

    def take_joined(self, capabilities: QpCapabilities) -> Connection | None:
        """What `accept` is to be given the queue pair of, as who asks is joined with it; None: any.

        Raises:
            Unavailable: It is not as wanted, or no more. Reject the request.
        """
        del capabilities
        return None

    @abstractmethod
    def reject(self, reason: int = REJECT_CONSUMER, private_data: bytes = b"") -> None:
        """Says no.

        Raises:
            Misuse: Already answered, or too much private data.
        """


class Connection(ABC):
    """One side of a connection, from `connect` or `accept` on."""

    __slots__ = ()

    transport: Transport | None = None  # the connection beneath, where it is TCP's

    qp: QueuePair
    state: CmState
    remote_address: str

    @abstractmethod
    def disconnect(self) -> None:
        """Ends it in any state, at once on this side: the queue pair goes to ERROR. Calling it again does nothing.

        What the other end did not acknowledge yet may be lost. Before `Established` the attempt is given up: no
        event follows on this side, and the other one gets `Rejected` with REJECT_TIMEOUT. After it, `Disconnected`
        follows here too.
        """


class ConnectionManager(ABC):
    """The connection manager of one device."""

    __slots__ = ()

    @abstractmethod
    def listen(
        self,
        service_id: int,
        handler: RequestHandler,
        *,
        match: PrivateDataMatch | None = None,
        backlog: int = limits.RDMA_BACKLOG_DEFAULT,
    ) -> Listener:
        """Hands requests for the service id to the handler.

        Listeners with a match are asked first, in the order of their `listen`; one without takes the rest. If nobody
        listens on the service id the device answers REJECT_INVALID_SERVICE_ID; if none of them matches, or the
        backlog is full, REJECT_CONSUMER.

        Raises:
            Misuse: A listener with the same service id and match exists.
        """

    @abstractmethod
    def connect(
        self,
        address: str,
        service_id: int,
        qp: QueuePair,
        private_data: bytes,
        handler: ConnectionHandler,
        *,
        check_reply: Callable[[bytes], bool] | None = None,
    ) -> Connection:
        """Asks for a connection; what comes of it is told to the handler.

        `check_reply` sees the reply's private data before the connection is made. If it returns False the other end
        is told `Rejected` with REJECT_CONSUMER, and the handler `Rejected` with REJECT_CONSUMER as well.

        Raises:
            Misuse: Too much private data, or the queue pair is not in INIT.
        """

    def take_joined(self, address: str, capabilities: QpCapabilities) -> Connection | None:
        """One whose queue pair is joined with that host's already, for `connect`; None: there is none.

        It is the caller's from now on: `disconnect` gives it up, and the queue pair is his to destroy.
        """
        del address, capabilities
        return None
