"""What the queue pairs of all devices made of software have in common.

Receives, the checks before a request is queued and before it is begun, requests that never leave this end, completions,
events, and the end of a queue pair. A device adds how requests travel, and what is done with those that arrive.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Final

from sidestep.errors import LimitReached, Misuse
from sidestep.rdma.soft.handles import check_type
from sidestep.rdma.soft.memory import AccessRefusal
from sidestep.rdma.soft.windows import SoftWindow
from sidestep.rdma.verbs import AsyncEvent, EventKind, QpState, QpType, QueuePair
from sidestep.rdma.work import (
    ATOMIC_LEN,
    IMMEDIATE_LEN,
    Access,
    BindWindow,
    CompareSwap,
    Completion,
    FetchAdd,
    LocalInvalidate,
    Opcode,
    RdmaRead,
    RdmaWrite,
    Send,
    Status,
    UdSend,
)

if TYPE_CHECKING:
    from sidestep.rdma.cm import Connection
    from sidestep.rdma.soft.device import SoftDevice
    from sidestep.rdma.soft.memory import Domain, QpInit
    from sidestep.rdma.soft.queues import SoftQueue
    from sidestep.rdma.soft.receives import SharedReceives
    from sidestep.rdma.verbs import DeviceAttributes, JoinedBy
    from sidestep.rdma.work import Gather, Receive, Scatter, SendRequest

# Looking up a member of an enum costs as much as copying a header.
RTS: Final = QpState.RTS
INIT: Final = QpState.INIT
UD: Final = QpType.UD
RTR: Final = QpState.RTR
ERROR: Final = QpState.ERROR
RESET: Final = QpState.RESET
SUCCESS: Final = Status.SUCCESS
FLUSHED: Final = Status.FLUSHED
OP_SEND: Final = Opcode.SEND
OP_RECEIVE: Final = Opcode.RECEIVE
OPCODES: Final = {
    Send: Opcode.SEND,
    UdSend: Opcode.SEND,
    RdmaWrite: Opcode.RDMA_WRITE,
    RdmaRead: Opcode.RDMA_READ,
    CompareSwap: Opcode.COMPARE_SWAP,
    FetchAdd: Opcode.FETCH_ADD,
    LocalInvalidate: Opcode.LOCAL_INVALIDATE,
    BindWindow: Opcode.BIND_WINDOW,
}
LOCAL_KINDS: Final = (LocalInvalidate, BindWindow)  # requests that never leave this end
LOCAL_WRITE: Final = int(Access.LOCAL_WRITE)
REMOTE_WRITE: Final = int(Access.REMOTE_WRITE)
REMOTE_READ: Final = int(Access.REMOTE_READ)
REMOTE_ATOMIC: Final = int(Access.REMOTE_ATOMIC)
ATOMICS: Final = (CompareSwap, FetchAdd)
FETCHES: Final = (RdmaRead, CompareSwap, FetchAdd)  # requests that bring bytes


class SoftQueuePair(QueuePair):
    """A queue pair of a device made of software."""

    __slots__ = (
        "_max_recv_wr", "_max_send_wr", "_receives", "capabilities", "connection", "device", "domain",
        "initiator_depth", "number", "recv_cq", "remote_access", "send_cq", "srq", "state", "windows",
    )  # fmt: skip

    device: SoftDevice
    domain: Domain
    send_cq: SoftQueue
    recv_cq: SoftQueue
    srq: SharedReceives | None

    def __init__(self, number: int, device: SoftDevice, init: QpInit) -> None:
        self.number = number
        self.device = device
        self.domain = init.domain
        self.state = QpState.INIT
        self.capabilities = init.capabilities
        self.send_cq = init.send_cq
        self.recv_cq = init.recv_cq
        self.remote_access = init.remote_access
        self.srq = init.srq
        self.on_event = init.on_event
        self.initiator_depth = 0
        self.windows: set[SoftWindow] = set()  # bound to this queue pair
        self._max_send_wr = init.capabilities.max_send_wr
        self._max_recv_wr = init.capabilities.max_recv_wr
        self._receives: deque[Receive] = deque() if init.srq is None else init.srq.receives
        self.connection: Connection | JoinedBy | None = None
        self.send_cq.users.append(self)
        self.recv_cq.users.append(self)
        self.domain.queue_pairs.add(self)
        if self.srq is not None:
            self.srq.users.add(self)

    # Receives.

    @property
    def receives_posted(self) -> int:
        return len(self._receives) if self.srq is None else 0

    def post_recv(self, receive: Receive) -> None:
        receives = self._receives
        if self.srq is not None:
            raise Misuse("the receives of this queue pair come from a shared queue")
        if len(receives) >= self._max_recv_wr:
            raise LimitReached(f"{self._max_recv_wr} receives are posted already")
        if len(receive.scatter) > self.device.attributes.scatter_max:
            raise Misuse(f"a receive of {len(receive.scatter)} entries")
        if self.state is ERROR:
            self.recv_cq.add(Completion(receive.wr_id, FLUSHED, OP_RECEIVE, 0, self.number))
        elif self.state is RESET:
            raise Misuse("the queue pair is destroyed")
        else:
            receives.append(receive)

    def next_receive(self) -> Receive | None:
        return self._receives[0] if self._receives else None

    def take_receive(self) -> Receive:
        receive = self._receives.popleft()
        if self.srq is not None:
            self.srq.taken()
        return receive

    def untake_receive(self, receive: Receive) -> None:
        """It is the next again; not of a shared queue, whose others may have taken more meanwhile."""
        self._receives.appendleft(receive)

    def _flush_receives(self) -> None:
        if self.srq is not None:
            return  # what is there belongs to the others (verbs draft for iWARP 6.3)
        add, number = self.recv_cq.add, self.number
        while self._receives:
            add(Completion(self._receives.popleft().wr_id, FLUSHED, OP_RECEIVE, 0, number))

    # Sending: before a request is queued, before it is begun, and when it is done.

    def check_post(self, request: SendRequest, held: int) -> bool:
        """Whether the request may be queued; False if it was flushed.

        Raises:
            Misuse: Before RTS, too many entries or bytes, or what device or type of queue pair do not offer.
            LimitReached: The queue is full.
        """
        if self.state is ERROR:
            self.send_cq.add(Completion(request.wr_id, FLUSHED, OPCODES[type(request)], 0, self.number))
            return False
        if self.state is not RTS:
            raise Misuse(f"nothing is sent in {self.state.name}")
        if held >= self._max_send_wr:
            raise LimitReached(f"{self._max_send_wr} requests are outstanding")
        attributes = self.device.attributes
        check_offered(request, attributes)
        if self.qp_type is UD or isinstance(request, UdSend):
            check_type(request, self)
        elif isinstance(request, BindWindow):
            if not attributes.windows_max:
                raise Misuse("the device has no memory windows")
            self.domain.part(request.key_part, zero_based=request.zero_based)
        return True

    def begin(self, request: SendRequest) -> Status:
        """What can be said about a request before it leaves: SUCCESS, or how it fails here.

        One that never leaves is carried out.
        """
        if isinstance(request, FETCHES):
            if not self.initiator_depth:
                return Status.LOCAL_QP_OPERATION_ERROR  # the verbs draft for iWARP 8.2.2: a Read with a depth of zero
            return SUCCESS if self.may_sink(request.scatter) else Status.LOCAL_PROTECTION_ERROR
        if isinstance(request, LocalInvalidate):
            memory = self.domain.may_invalidate(request.rkey, self)
            if isinstance(memory, AccessRefusal):
                return Status.LOCAL_PROTECTION_ERROR
            memory.invalidate()
            return SUCCESS
        if isinstance(request, BindWindow):
            window = request.window
            bound = isinstance(window, SoftWindow) and window.bind(request, self) is None
            return SUCCESS if bound else Status.WINDOW_BIND_ERROR
        return SUCCESS if self.may_read(request.gather) else Status.LOCAL_PROTECTION_ERROR

    def complete(self, request: SendRequest, status: Status, byte_len: int = 0) -> None:
        """Tells how a request ended; anything but success ends the queue pair."""
        if status is not SUCCESS or request.signaled:
            self.send_cq.add(Completion(request.wr_id, status, OPCODES[type(request)], byte_len, self.number))
        if status is not SUCCESS:
            self.modify_to_error()

    # Local memory.

    def may_read(self, gather: Gather) -> bool:
        domain = self.domain
        return all(
            isinstance(entry, bytes) or id(entry.obj) in domain.readable or domain.covers(entry, 0) for entry in gather
        )

    def may_receive(self, scatter: Scatter) -> bool:
        """Whether a message may go into a receive: a shared one lies in its own queue's domain (verbs draft 6.3)."""
        return _may_write(self.domain if self.srq is None else self.srq.domain, scatter)

    def may_sink(self, scatter: Scatter) -> bool:
        """Whether the answer to an RDMA Read or an atomic operation may go there."""
        if not self.device.attributes.read_sink_remote_write:
            return _may_write(self.domain, scatter)
        return all(self.domain.covers(entry, LOCAL_WRITE | REMOTE_WRITE) for entry in scatter)

    # The end.

    @abstractmethod
    def take_unfinished(self) -> list[SendRequest]:
        """Takes out all requests that are not completed, in the order of posting."""

    def stop_waiting(self) -> None:
        """Nothing is outstanding any more: the queue pair is in error, or destroyed."""

    def end(self) -> None:
        """Flushes everything; what becomes of the connection is the caller's matter."""
        if self.state in (ERROR, RESET):
            return
        self.state = ERROR
        self.stop_waiting()
        add, number = self.send_cq.add, self.number
        for request in self.take_unfinished():
            add(Completion(request.wr_id, FLUSHED, OPCODES[type(request)], 0, number))
        self._flush_receives()
        if self.srq is not None:  # from now on it takes nothing out of the shared queue
            self.tell(EventKind.QP_LAST_WQE_REACHED)

    def destroy(self) -> None:
        if self.state is RESET:
            return
        if self.windows:
            raise Misuse(f"{len(self.windows)} windows are bound to the queue pair")
        self.state = RESET
        self.stop_waiting()
        self.take_unfinished()
        if self.srq is None:
            self._receives.clear()
        else:
            self.srq.users.discard(self)
        self.send_cq.users.remove(self)
        self.recv_cq.users.remove(self)
        self.domain.queue_pairs.discard(self)

    def break_off(self, kind: EventKind, why: str) -> None:
        if self.state in (ERROR, RESET):
            return
        self.modify_to_error()
        self.tell(kind, why)

    def tell(self, kind: EventKind, why: str = "") -> None:
        self.device.tell(AsyncEvent(kind, self, why), self.on_event)


def _may_write(domain: Domain, scatter: Scatter) -> bool:
    return all(id(entry.obj) in domain.writable or domain.covers(entry, LOCAL_WRITE) for entry in scatter)


def check_offered(request: SendRequest, attributes: DeviceAttributes) -> None:
    """Raises Misuse for more entries or bytes than the device takes, and for operations that it does not offer."""
    entries = entries_of(request)
    entries_max = attributes.read_scatter_max if isinstance(request, FETCHES) else attributes.gather_max
    if len(entries) > entries_max:
        raise Misuse(f"{len(entries)} entries; the device takes {entries_max}")
    if sum(map(len, entries)) > attributes.message_max:
        raise Misuse(f"more than {attributes.message_max} bytes")
    if sum(len(entry) for entry in entries if isinstance(entry, bytes)) > attributes.inline_max:
        raise Misuse(f"more than {attributes.inline_max} bytes of inline data")
    if isinstance(request, ATOMICS):
        if not attributes.atomics:
            raise Misuse("the device has no atomic operations")
        if length_of(request) != ATOMIC_LEN:
            raise Misuse(f"an atomic operation brings {ATOMIC_LEN} bytes, and there is room for {length_of(request)}")
    elif isinstance(request, Send | RdmaWrite | UdSend) and request.immediate is not None:
        if not attributes.immediate:
            raise Misuse("the device sends no immediate data")
        if len(request.immediate) != IMMEDIATE_LEN:
            raise Misuse(f"{len(request.immediate)} bytes of immediate data, which has {IMMEDIATE_LEN}")
        if isinstance(request, Send) and request.invalidate is not None:
            raise Misuse("a Send has immediate data or invalidates a key, not both")  # IBTA 9.2: no opcode has


def entries_of(request: SendRequest) -> Gather:
    if isinstance(request, FETCHES):
        return request.scatter
    return () if isinstance(request, LOCAL_KINDS) else request.gather


def length_of(request: SendRequest) -> int:
    return sum(map(len, entries_of(request)))
