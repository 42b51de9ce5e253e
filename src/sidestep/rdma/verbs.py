"""What every device offers: memory regions, queue pairs and completion queues, named after the verbs.

Who uses a device (SDP's endpoint, the pools, the conformance suite) knows this file, `work` and `cm`, and nothing of
what is beneath. Rules that hold for every device:

- **Nobody is called back from inside a call.** Completions, events and answers come later, from where the device is
  driven (a `run` of the loopback fabric, the provider's loop). So a handler may post, register and disconnect freely.
- **Work of one queue pair is begun and completed in the order of posting.** A Send arrives after the Writes posted
  before it were placed; an RDMA Read or atomic operation may deliver its bytes after a Send posted behind it arrived
  (IBTA 9.5, RFC 5040 5.5).
- **Errors end a queue pair.** The request that failed is completed with its status, all others with `FLUSHED`, in
  order, receives too; then nothing more happens on it. What no completion tells comes as an `AsyncEvent`.
- **Nothing is placed before everything was checked**: key (all 32 bits), protection domain, rights, bounds, wrap.

What a device can do is in its `DeviceAttributes`; what it cannot, it refuses with `Misuse` or `LimitReached` at the
call.

A queue pair is one end of a reliable connection (RC), or takes and sends unreliable datagrams (UD): those of anybody
who knows its number and its Q_Key, to whoever an `AddressHandle` leads to. UD has no connection manager: who talks to
whom is agreed otherwise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, Self, TypeAlias, cast

from sidestep.errors import Misuse

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Buffer

    from sidestep.errors import SidestepError
    from sidestep.native._engine import KernelQueuePair, Rc
    from sidestep.native._framing import Inbound, Outbound
    from sidestep.rdma.cm import CmState, ConnectionManager
    from sidestep.rdma.iwarp.tap import Taps
    from sidestep.rdma.work import Access, Completion, LKey, Receive, RKey, SendRequest

# What handlers return is of no meaning.
CompletionHandler: TypeAlias = "Callable[[list[Completion]], object]"
EventHandler: TypeAlias = "Callable[[AsyncEvent], object]"
Registered: TypeAlias = "Callable[[MemoryRegion | SidestepError], object]"


class QpState(IntEnum):
    """What a queue pair takes (IBTA 10.3.1); the values of `ibv_qp_state`. SQD and SQE are not used."""

    RESET = 0  # destroyed: takes nothing
    INIT = 1  # takes receives
    RTR = 2  # ready to receive: messages arrive; sending is Misuse
    RTS = 3  # ready to send: everything
    ERROR = 6  # what is posted is flushed; nothing arrives


class QpType(IntEnum):
    """What travels how; the values of `ibv_qp_type`."""

    RC = 2  # reliable connection
    UD = 4  # unreliable datagram


class EventKind(IntEnum):
    """What happened outside of any work request; the values of `ibv_event_type`."""

    CQ_ERROR = 0  # more completions than room: the queue is dead, its queue pairs are in error
    QP_FATAL = 1  # the connection broke, or the other end ended it with an error (iWARP: Terminate)
    QP_REQUEST_ERROR = 2  # the other end sent what this one cannot take
    QP_ACCESS_ERROR = 3  # the other end broke a rule of access: key, rights, bounds
    COMMUNICATION_ESTABLISHED = 4  # a message arrived before the connection manager's last word
    DEVICE_FATAL = 8  # nothing works any more; all queue pairs are in error
    PORT_ACTIVE = 9
    PORT_ERROR = 10  # the link is down; connections live on until they give up
    SRQ_LIMIT_REACHED = 15  # a shared receive queue has fewer receives than the limit it was armed with
    QP_LAST_WQE_REACHED = 16  # a queue pair in error takes no more receives out of its shared receive queue
    GID_CHANGE = 18  # the device's address is not its port's any more, or stands elsewhere: see `QpEndpoint`


@dataclass(frozen=True, slots=True)
class AsyncEvent:
    """One event, told once."""

    kind: EventKind
    source: QueuePair | CompletionQueue | SharedReceiveQueue | Device
    why: str = ""  # for people


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAttributes:
    """What a device can do. The defaults are those of an InfiniBand device that has no datagrams."""

    # Private data of the connection manager (IBTA 12.6).
    request_private_data_max: int = 92  # bytes; SDP needs 68 at least, and 24 of a reply (sdp.private_data)
    reply_private_data_max: int = 196  # bytes
    reject_private_data_max: int = 148  # bytes
    reject_reasons: bool = True  # a rejection tells its reason; else it is REJECT_CONSUMER always
    private_data_padded: bool = True  # arrives with zeros up to the size above; else as long as it was sent

    # Bounds.
    queue_pairs_max: int = 65536  # at a time
    work_requests_max: int = 16384  # of one queue
    completions_max: int = 65536  # of one completion queue
    regions_max: int = 65536  # at a time
    region_bytes_max: int = 1 << 40  # bytes of one region
    message_max: int = 1 << 31  # bytes of one Send, Write or Read (IBTA 9.7.8)
    gather_max: int = 16  # entries of a Send or Write
    scatter_max: int = 16  # entries of a receive
    read_scatter_max: int = 16  # entries of an RDMA Read; iWARP: 1
    inline_max: int = 256  # bytes of all `bytes` entries of a gather: copied by the device, needs no region
    read_depth_max: int = 16  # RDMA Reads and atomic operations of one queue pair under way, each way
    atomics: bool = True  # `CompareSwap` and `FetchAdd`
    immediate: bool = True  # sends immediate data; what another stack sends of it is told by all
    zero_based: bool = True  # regions and windows whose first byte has address 0
    key_part_chosen: bool = True  # the consumer may choose the low 8 bits of a key
    windows_max: int = 65536  # memory windows at a time; 0: not offered
    shared_receive_queues_max: int = 65536  # at a time; 0: not offered
    address_handles_max: int = 0  # at a time; 0: unreliable datagrams are not offered

    # What differs between transports.
    acknowledged: bool = True  # a Send or Write completes when the other end has it (iWARP: when TCP has it)
    error_disconnects: bool = False  # a queue pair in ERROR takes its connection with it, at both ends (iWARP)
    checks_local_memory: bool = True  # entries must lie in a region of the domain, else LOCAL_PROTECTION_ERROR
    read_sink_remote_write: bool = False  # the sink of an RDMA Read needs REMOTE_WRITE as well (some RNICs)
    access_errors_reported: bool = True  # what the other end did wrong is an AsyncEvent here, and the queue pair ends
    regions_voided: bool = True  # requests void keys of regions, too; if not of windows alone
    pins_memory: bool = False  # a region's pages stay where they are: what its owner gives back meanwhile is lost to it
    solicited_reported: bool = True  # a receive's completion says whether it was solicited; if not it is False always


@dataclass(frozen=True, slots=True, kw_only=True)
class QpCapabilities:
    """How much work a queue pair holds."""

    max_send_wr: int = 128  # posted and not completed; an unsignaled one counts until a later signaled one is
    max_recv_wr: int = 128  # posted, and no message has come
    initiator_depth: int = 4  # RDMA Reads and atomic operations under way; more wait, and what is behind them
    responder_resources: int = 4  # those of the other end under way


class MemoryRegion(ABC):
    """Memory that a device may use, and the other end as far as `access` says.

    While it is registered the buffer stays alive and cannot be resized.
    """

    __slots__ = ("access", "length", "lkey", "rkey", "va", "valid", "view")

    view: memoryview  # the registered bytes
    va: int  # opaque 64-bit address of the first byte, chosen by the device, or 0; need not be aligned
    length: int  # bytes
    access: Access
    rkey: RKey
    lkey: LKey
    valid: bool  # False once deregistered or invalidated: its keys mean nothing any more

    @abstractmethod
    def deregister(self) -> None:
        """Ends every access, at once: after this call no byte is placed or read. Calling it again does nothing.

        Raises:
            Misuse: A window is bound to it (verbs draft for iWARP 7.10.5).
        """

    @abstractmethod
    def rekey(self) -> None:
        """Voids the keys, at once, and makes new ones: who knows only the old ones has no access any more.

        Address, memory and access stay, so it costs much less than registering; an invalidated region is valid again.

        Raises:
            Misuse: The region is deregistered, or a window is bound to it.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.deregister()


class MemoryWindow(ABC):
    """A part of a region, opened to the other end of one queue pair: costs less than a region, and ends by itself.

    It is allocated void, opened by a `BindWindow` in the order of a send queue, and voided by `LocalInvalidate`, by a
    Send with Invalidate of the other end, or by `deallocate`; then it can be bound again, to another part or region.
    While it is open it belongs to the queue pair that bound it and to no other (a window of type 2B; the verbs draft
    for iWARP 7.10), and keeps its region from being deregistered, rekeyed or invalidated.
    """

    __slots__ = ("access", "length", "rkey", "va", "valid")

    access: Access  # what the other end may do; meaningless unless valid, as are the next two
    va: int  # opaque 64-bit address of the first byte, or 0
    length: int  # bytes
    rkey: RKey  # the last one while it is void; the upper 24 bits stay
    valid: bool  # it is bound

    @abstractmethod
    def deallocate(self) -> None:
        """Ends every access, at once, and the window. Calling it again does nothing."""

    def key(self, part: int) -> RKey:
        """The key of this window with other low 8 bits: with `BindWindow.key_part` it is known before the bind."""
        return cast("RKey", self.rkey & 0xFFFF_FF00 | part)


class CompletionQueue(ABC):
    """Where completions arrive, of any number of queue pairs.

    Either they are polled, and a call tells when there is something to poll (`arm`); or each batch is handed to the
    handler given to `create_cq`, which is the fast way. A queue with a handler is never full.
    """

    __slots__ = ()

    capacity: int  # completions it holds; one more is an error: EventKind.CQ_ERROR

    @abstractmethod
    def poll(self, max_count: int) -> list[Completion]:
        """Takes out up to `max_count` completions, the oldest first; Misuse if the queue has a handler."""

    @abstractmethod
    def arm(self, callback: Callable[[CompletionQueue], object], *, solicited_only: bool = False) -> None:
        """Asks for one call when the next completion comes, or the next solicited receive or error (IBTA 11.4.2.2).

        Completions that are already there do not cause it: arm, then poll once more. A second `arm` before the call
        replaces the callback; "any" wins over "solicited only". Misuse if the queue has a handler.
        """

    @abstractmethod
    def destroy(self) -> None:
        """Misuse while a queue pair uses it."""


class SharedReceiveQueue(ABC):
    """Receives that serve several queue pairs: each message takes the oldest, on whichever queue pair it comes.

    Which message takes which receive is known at completion only; completions of one queue pair keep the order of its
    messages. The entries of a receive lie in regions of this queue's domain, which need not be that of a queue pair.
    The end of a queue pair leaves the receives here to the others.
    """

    __slots__ = ("on_event",)

    domain: ProtectionDomain
    max_wr: int  # receives it holds
    on_event: EventHandler | None  # of this queue's events; without one they go to the device's

    @property
    @abstractmethod
    def receives_posted(self) -> int:
        """Receives posted and not yet used by a message."""

    @abstractmethod
    def post_recv(self, receive: Receive) -> None:
        """Hands over room for one message.

        Raises:
            Misuse: After `destroy`, or more entries than the device takes.
            LimitReached: The queue is full.
        """

    @abstractmethod
    def arm(self, limit: int) -> None:
        """Asks for one SRQ_LIMIT_REACHED when fewer receives than `limit` are left (verbs draft for iWARP 6.3).

        Where fewer are left already the draft is silent: here that is told as well, so that no message comes between.
        0 takes the question back. Misuse for more than the queue holds.
        """

    @abstractmethod
    def destroy(self) -> None:
        """Gives it back; what is posted never completes. Misuse while a queue pair uses it."""


class LentStream(NamedTuple):
    """The wire of a queue pair, for the engine: a TCP connection."""

    inbound: Inbound
    outbound: Outbound
    fd: int


class LentDatagrams(NamedTuple):
    """The same by UDP sockets."""

    connection: Rc


class LentQueuePair(NamedTuple):
    """The same by a device of the kernel."""

    queue_pair: KernelQueuePair


class SendRing(NamedTuple):
    """Where most of what an engine sends lies."""

    memory: memoryview
    pages: int  # `channel_producer.pages`, read before: another number once it lies in other pages; 0: that is not told
    uid: int  # whose it is


Lent: TypeAlias = LentStream | LentDatagrams | LentQueuePair


@dataclass(frozen=True, slots=True)
class QpEndpoint:
    """What the other end has to know of a queue pair that is connected without a connection manager."""

    gid: bytes  # 16 of them: of the port
    number: int  # 24 bits
    psn: int  # 24 bits: that the first packet to it is to have
    mtu: int  # bytes: the largest path MTU that it takes


@dataclass(frozen=True, slots=True)
class Beginning:
    """What the two ends of queue pairs that were joined by number said to each other, for those who look on."""

    active: bool  # this end asked for it
    service_id: int
    request: bytes  # private data
    reply: bytes  # likewise


class Connected(Protocol):
    """What a queue pair tells of its connection."""

    @property
    def remote_address(self) -> str: ...

    @property
    def state(self) -> CmState: ...


class JoinedBy(Protocol):
    """Who has joined a queue pair with another one."""

    remote_address: str
    state: CmState

    def communication_established(self) -> None:
        """The first message has come, before the handler of completions hears of it."""

    def lost(self) -> None:
        """The other end is heard of no more; the queue pair is in ERROR."""


class AddressHandle(ABC):
    """The way to another host, for datagrams."""

    __slots__ = ()

    address: str  # where it leads
    mtu: int  # bytes of the longest datagram that goes there
    domain: ProtectionDomain
    valid: bool  # False once it is destroyed

    @abstractmethod
    def destroy(self) -> None:
        """Gives it back; requests that name it have to be completed. Calling it again does nothing."""


class QueuePair(ABC):
    """A queue of work to send and a queue of receives: one end of a connection, or for datagrams."""

    __slots__ = ("on_event",)

    qp_type: ClassVar[QpType] = QpType.RC
    number: int  # 24 bits
    state: QpState
    capabilities: QpCapabilities
    device: Device
    domain: ProtectionDomain
    send_cq: CompletionQueue
    recv_cq: CompletionQueue
    srq: SharedReceiveQueue | None  # where its receives come from, unless they are its own
    initiator_depth: int  # as agreed with the other end; 0 before the connection is made
    connection: Connected | None
    on_event: EventHandler | None  # of this queue pair's events; without one they go to the device's

    @property
    @abstractmethod
    def receives_posted(self) -> int:
        """Receives posted to this queue pair and not yet used by a message."""

    @property
    @abstractmethod
    def sends_outstanding(self) -> int:
        """Requests that occupy the send queue."""

    def details(self) -> dict[str, object]:
        """How it is now, for people: names and values that JSON knows. A device adds what it counts."""
        found: dict[str, object] = {
            "number": self.number,
            "type": self.qp_type.name,
            "state": self.state.name,
            "sends_outstanding": self.sends_outstanding,
            "receives_posted": self.receives_posted,
            "shared_receives": self.srq is not None,
        }
        if self.connection is not None:
            found["remote_address"] = self.connection.remote_address
            found["connection"] = self.connection.state.name
        return found

    def lend(self, record: dict[str, int], reclaim: Callable[[], object], ring: Callable[[], SendRing]) -> Lent | None:
        """Leaves the wire to the engine, and its numbers in the record, if nothing is under way; else None.

        `reclaim` brings it back. A device that pins memory may do so with the ring, and says so in the record.
        """
        return None

    def endpoint(self, address: str) -> QpEndpoint:
        """Who it is, for `join` of the other end, which is at that address.

        Raises:
            Misuse: Only the device's connection manager can connect it.
        """
        raise Misuse("this device's queue pairs are connected by its connection manager only")

    def join(self, other: QpEndpoint, owner: JoinedBy, *, initiator_depth: int, responder_resources: int) -> None:
        """Connects it with another one, from INIT to RTR; `ready_to_send` is next.

        Args:
            other: The other end.
            owner: Hears of what a connection manager would.
            initiator_depth: RDMA Reads of this end under way at most.
            responder_resources: RDMA Reads of the other end under way at most.

        Raises:
            Misuse: As `endpoint`, or it is not in INIT.
            Unavailable: The other end cannot be reached from this device.
        """
        raise Misuse("this device's queue pairs are connected by its connection manager only")

    def ready_to_send(self) -> None:
        """From RTR to RTS."""
        raise Misuse("this device's queue pairs are connected by its connection manager only")

    def tell_beginning(self, beginning: Beginning) -> None:  # noqa: B027 - few devices let others look on
        """How it came to the connection: told once, after `join` and before anything is sent."""

    def use_large_frames(self) -> None:  # noqa: B027 - most devices have none
        """The other end is known to take frames of any size, and to gain from large ones; where there are any."""

    def catch_up(self) -> None:  # noqa: B027 - most devices have one way for all
        """Takes what has come and is not looked at: the word that the other end has left may have overtaken it."""

    def take_back(self, record: dict[str, int], error: int) -> None:
        """The engine has given it back; `error`: the errno that broke it, or 0."""
        raise NotImplementedError

    @abstractmethod
    def post_send(self, request: SendRequest) -> None:
        """Hands over one request; its memory belongs to the device until it is completed.

        In ERROR the request is flushed.

        Raises:
            Misuse: Before RTS, after `destroy`, more entries or bytes than the device takes, what it does not offer, or
                what this type of queue pair does not send. A datagram longer than the path's MTU is Misuse, too.
            LimitReached: The send queue is full.
        """

    @abstractmethod
    def post_recv(self, receive: Receive) -> None:
        """Hands over room for one message; messages take them in the order of posting. In ERROR it is flushed.

        Raises:
            Misuse: After `destroy`, more entries than the device takes, or the receives come from a shared queue.
            LimitReached: The receive queue is full.
        """

    @abstractmethod
    def modify_to_error(self) -> None:
        """Ends all work: everything posted is flushed. The other end learns it as `error_disconnects` says."""

    def end(self) -> None:
        """As `modify_to_error`; what becomes of the connection is the caller's matter."""
        self.modify_to_error()

    def when_quiet(self, callback: Callable[[], object]) -> None:
        """Calls when nothing is posted any more; the queue pair is in ERROR, or destroyed."""
        callback()

    @abstractmethod
    def destroy(self) -> None:
        """Gives the queue pair back. Nothing of it completes any more; completions not yet polled may be lost.

        Raises:
            Misuse: Windows are bound to it (verbs draft for iWARP 6.1).
        """


class ProtectionDomain(ABC):
    """What belongs together: a key of this domain is good for queue pairs of this domain only."""

    __slots__ = ()

    def memory(self, length: int) -> memoryview:
        """New memory for registering: where a device pins whole pages, nothing else lies on these."""
        return memoryview(bytearray(length))

    @abstractmethod
    def register(
        self, buffer: Buffer, access: Access, *, zero_based: bool = False, key_part: int | None = None,
        uid: int | None = None,
    ) -> MemoryRegion:  # fmt: skip
        """Makes a region of contiguous memory; a hardware device pins it, which takes time and counts against a limit.

        Args:
            buffer: Contiguous, of at least a byte.
            access: What may be done with it.
            zero_based: The address of the first byte is 0, and tells the other end nothing.
            key_part: The low 8 bits of the keys; the device chooses unless given, and always the other 24.
            uid: The user whose it is, where what is pinned is bounded by user; None: nobody's.

        Raises:
            Misuse: REMOTE_WRITE without LOCAL_WRITE, LOCAL_WRITE on read-only memory, an empty or scattered buffer,
                more than 8 bits of a key, or what the device does not offer.
            LimitReached: Too many regions or keys, or too much memory.
            Unavailable: The device could not; Bcopy needs no registration.
        """

    @abstractmethod
    def register_later(
        self, buffer: Buffer, access: Access, done: Registered, *, zero_based: bool = False, key_part: int | None = None
    ) -> None:
        """The same without waiting: `done` is called with the region, or with what `register` would have raised.

        Misuse is raised at once.
        """

    @abstractmethod
    def create_qp(
        self,
        send_cq: CompletionQueue,
        recv_cq: CompletionQueue,
        capabilities: QpCapabilities | None = None,
        *,
        remote_access: Access | None = None,
        srq: SharedReceiveQueue | None = None,
        on_event: EventHandler | None = None,
    ) -> QueuePair:
        """Makes a queue pair in INIT; the connection manager brings it to RTS.

        `remote_access` is what the other end may do at most, whatever a region says; everything unless given. With
        `srq` its receives are posted there.

        Raises:
            Misuse: More than the device's attributes allow, or a queue of another device.
            LimitReached: The device has no more queue pairs.
        """

    @abstractmethod
    def create_ud_qp(
        self,
        send_cq: CompletionQueue,
        recv_cq: CompletionQueue,
        qkey: int,
        capabilities: QpCapabilities | None = None,
        *,
        srq: SharedReceiveQueue | None = None,
        on_event: EventHandler | None = None,
    ) -> QueuePair:
        """Makes a queue pair for datagrams, in RTS: nobody has to be asked.

        It takes `UdSend` alone, and gets the datagrams that have its number and this Q_Key. What is wrong with one that
        comes, or that no receive is posted for it, or one too short, is told to nobody: it is dropped (IBTA 9.8.3).
        Some drivers end the queue pair instead where the receive is too short: post those of a whole packet.

        Raises:
            Misuse: As `create_qp`; or the device does not offer it, or the Q_Key has more than 31 bits.
            LimitReached: The device has no more queue pairs.
        """

    @abstractmethod
    def create_ah(self, address: str) -> AddressHandle:
        """Finds the way to a host, for datagrams from this domain's queue pairs.

        Raises:
            Misuse: The device does not offer datagrams, or the address is not that of one host.
            LimitReached: The device has no more address handles.
            Unavailable: The address cannot be reached from this device.
        """

    @abstractmethod
    def create_srq(self, max_wr: int, *, on_event: EventHandler | None = None) -> SharedReceiveQueue:
        """Makes a queue of so many receives for several queue pairs.

        Raises:
            Misuse: The device does not offer it, or not so many receives.
            LimitReached: The device has no more of them.
        """

    @abstractmethod
    def alloc_window(self) -> MemoryWindow:
        """Makes a window that is bound to nothing yet.

        Raises:
            Misuse: The device does not offer it.
            LimitReached: Too many windows or keys.
        """

    @abstractmethod
    def deallocate(self) -> None:
        """Misuse while it has regions, windows, queue pairs, address handles or shared receive queues."""


class Device(ABC):
    """One adapter, real or made of software."""

    __slots__ = ("on_event",)

    name: str
    address: str  # what the other end gives to `connect`
    attributes: DeviceAttributes
    cm: ConnectionManager
    on_event: EventHandler | None  # asynchronous events; without a handler they are dropped
    taps: Taps | None = None  # for those who want to see what passes; None: nobody can

    def listening(self) -> list[int]:
        """Ports, and numbers of services, that are listened at; for people."""
        return []

    def counters(self) -> dict[str, int]:
        """What happened so far, by name or `name{reason}`, and what there is now: names of `iwarp.counting.PRESENT`."""
        return {}

    def queue_pairs(self) -> list[dict[str, object]]:
        """`QueuePair.details` of each."""
        return []

    @abstractmethod
    def alloc_pd(self) -> ProtectionDomain:
        """Makes a protection domain."""

    @abstractmethod
    def create_cq(self, capacity: int, handler: CompletionHandler | None = None) -> CompletionQueue:
        """Makes a completion queue; with a handler, each batch of completions is handed to it as it comes.

        Raises:
            Misuse: A capacity the device does not offer.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends everything: listeners, connections, queue pairs, regions. Calling it again does nothing."""
