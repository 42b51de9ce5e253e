"""A queue pair of a device of the kernel.

The device does the work; what is kept here is what was posted, so that completions can say what they are of (a failed
one names only its number), and what users are promised beyond verbs:

- A completion takes along the unsignaled requests before it: they have succeeded (IBTA 10.8.5). Completions are told in
  the order of posting also where a driver does not keep it.
- The state is what was told of the queue pair. Once it is ERROR here nothing more is given to the device; what is
  posted then is flushed in its turn, behind what the device flushes.
- `when_quiet` tells when the device has given everything back: it looks by a timer, as nobody may be woken.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from ctypes import Structure, byref, c_void_p, cast
from errno import EINVAL
from typing import TYPE_CHECKING, Any, Final

from sidestep import limits
from sidestep.errors import LimitReached, Misuse
from sidestep.rdma.cm import CLOSING
from sidestep.rdma.kernel import abi
from sidestep.rdma.kernel.abi import QpMask
from sidestep.rdma.kernel.joining import Joining
from sidestep.rdma.kernel.lending import OF_ENGINE, Lending
from sidestep.rdma.kernel.libraries import told
from sidestep.rdma.kernel.queues import KernelPolledQueue, OwnHardware
from sidestep.rdma.kernel.receives import Poster
from sidestep.rdma.kernel.sends import Posted, Writer
from sidestep.rdma.soft.handles import check_type
from sidestep.rdma.soft.qp import OPCODES, check_offered
from sidestep.rdma.verbs import AsyncEvent, EventKind, MemoryRegion, QpState, QpType, QueuePair
from sidestep.rdma.work import (
    Access,
    BindWindow,
    Completion,
    LocalInvalidate,
    Opcode,
    RdmaRead,
    RKey,
    Send,
    Status,
)

if TYPE_CHECKING:
    from sidestep.rdma.kernel.device import KernelDevice
    from sidestep.rdma.kernel.memory import KernelDomain, KernelWindow
    from sidestep.rdma.kernel.queues import Hardware, KernelQueue
    from sidestep.rdma.kernel.receives import KernelSharedReceives
    from sidestep.rdma.verbs import EventHandler, JoinedBy, LentQueuePair, QpCapabilities, QpEndpoint, SendRing
    from sidestep.rdma.work import Receive, SendRequest

_KNOWN: Final = frozenset(map(int, Status))
_SUCCESS: Final = Status.SUCCESS
_RECEIVE: Final = Opcode.RECEIVE
_OVER: Final = (QpState.ERROR, QpState.RESET)


class KernelQueuePair(QueuePair):
    """One of them."""

    domain: KernelDomain
    send_cq: KernelQueue
    recv_cq: KernelQueue

    def __init__(
        self,
        domain: KernelDomain,
        queues: tuple[KernelQueue, KernelQueue],
        capabilities: QpCapabilities,
        remote_access: int,
        srq: KernelSharedReceives | None,
        on_event: EventHandler | None,
    ) -> None:
        self.domain = domain
        self.device: KernelDevice = domain.device
        self.capabilities = capabilities
        self.send_cq, self.recv_cq = queues
        self.remote_access = remote_access
        self.srq: KernelSharedReceives | None = srq
        self.on_event = on_event
        self.initiator_depth = 0
        self.windows: set[KernelWindow] = set()
        self.connection: JoinedBy | None = None
        self._state = QpState.INIT
        self.sends: deque[Posted] = deque()
        self._first = 0  # number of the oldest one there
        self._last = -1  # of the last one that the device has completed
        self.receives: dict[int, Receive] = {}
        self._quiet: list[Callable[[], object]] = []  # who waits until nothing is posted any more
        self._told_last = False
        self._of_engine = 0  # of `sends`
        self._joining: Joining | None = None
        self.lending = Lending(self)
        self._make()
        self.send_cq.users.append(self)
        self.recv_cq.users.append(self)
        domain.queue_pairs.add(self)
        if srq is not None:
            srq.users.add(self)
        self.device.by_number[self.number] = self

    def _make(self) -> None:
        device, wanted = self.device, self.capabilities
        sends, receives = self._completions
        handled = [not isinstance(each, KernelPolledQueue) for each in (self.send_cq, self.recv_cq)]
        size = sends * handled[0] + receives * handled[1]
        self.own = OwnHardware(device, self, size) if size else None
        self._send_hardware = self._behind(self.send_cq, sends)
        self._recv_hardware = self._behind(self.recv_cq, receives)
        attributes = device.attributes
        entries = max(attributes.gather_max, attributes.read_scatter_max)
        inline = device.inline_max
        while True:
            asked = abi.QpInitAttr(
                send_cq=self._send_hardware.address, recv_cq=self._recv_hardware.address,
                srq=None if self.srq is None else self.srq.address, qp_type=self.qp_type,
                cap=abi.QpCap(sends, wanted.max_recv_wr, entries, attributes.scatter_max, inline),
            )  # fmt: skip
            try:
                self.handle: Any = device.libraries.ibv_create_qp(self.domain.address, byref(asked))
                break
            except OSError as error:
                if error.errno != EINVAL or not inline:  # more inline bytes than the device has are EINVAL
                    self._let_go_of_queues()
                    raise told(error, "no queue pair could be made") from error
                inline //= 2
        device.inline_max = inline
        self.address = cast(self.handle, c_void_p).value or 0
        self.number: int = self.handle.contents.qp_num
        device.by_address[self.address] = self
        self.inline_max = min(inline, asked.cap.max_inline_data)
        self._writer = Writer(self.domain, entries, self.inline_max)
        self._poster = Poster(self.domain, attributes.scatter_max)
        try:
            self._make_ready()
        except OSError as error:
            device.libraries.ibv_destroy_qp(self.handle)
            self._let_go_of_queues()
            raise told(error, "the queue pair could not be made ready") from error

    def _make_ready(self) -> None:
        """Raises OSError."""
        init = abi.QpAttr(qp_state=QpState.INIT, port_num=self.device.port, qp_access_flags=self.access_flags)
        self.modify(init, QpMask.STATE | QpMask.PORT | QpMask.PKEY_INDEX | QpMask.ACCESS_FLAGS)

    @property
    def _completions(self) -> tuple[int, int]:
        """How many there may be of each queue; the engine's requests have places of their own."""
        receives = self.capabilities.max_recv_wr if self.srq is None else self.srq.max_wr
        of_engine = limits.VERBS_ENGINE_SENDS if self.qp_type is QpType.RC else 0
        sends = self.capabilities.max_send_wr + of_engine
        return min(sends, self.device.attributes.work_requests_max), receives

    @property
    def _has_room(self) -> bool:
        return self._completions[0] - self.capabilities.max_send_wr == limits.VERBS_ENGINE_SENDS

    def _behind(self, queue: KernelQueue, count: int) -> Hardware:
        """The device's queue for that many completions of this queue pair."""
        if isinstance(queue, KernelPolledQueue):
            queue.hardware.reserve(count)
            return queue.hardware
        assert self.own is not None
        return self.own

    def _let_go_of_queues(self) -> None:
        for queue, count in zip((self.send_cq, self.recv_cq), self._completions, strict=True):
            if isinstance(queue, KernelPolledQueue):
                queue.hardware.taken -= count
        if self.own is not None:
            self.own.destroy()

    @property
    def access_flags(self) -> int:
        windows = Access.WINDOW_BIND if self.device.attributes.windows_max else 0
        return self.remote_access | Access.LOCAL_WRITE | windows

    # ---- what is asked of it ----

    @property
    def state(self) -> QpState:  # type: ignore[override]  # nobody but this device sets it
        if self._state is not QpState.RESET:
            self._look()
        return self._state

    def details(self) -> dict[str, object]:
        lending = self.lending
        pinned = lending in self.domain.rings
        return super().details() | {"ring_pinned": pinned, "bytes_gathered": lending.gathered}

    @property
    def receives_posted(self) -> int:
        self.recv_cq.look()
        return len(self.receives)

    @property
    def sends_outstanding(self) -> int:
        self.send_cq.look()
        return len(self.sends)

    def _look(self) -> None:
        self.send_cq.look()
        self.recv_cq.look()

    # ---- the user's side ----

    def post_send(self, request: SendRequest) -> None:
        self.lending.reclaim()
        if self._state is QpState.ERROR:
            self._add_failed(request, Status.FLUSHED)
            return
        if self._state is not QpState.RTS:
            raise Misuse(f"nothing is sent in {self._state.name}")
        self._check(request)
        posted = Posted(request)
        if isinstance(request, RdmaRead) and not self.initiator_depth:
            posted.verdict = Status.LOCAL_QP_OPERATION_ERROR  # the verbs draft for iWARP 8.2.2
        elif self.sends and self.sends[-1].verdict is not None:
            posted.verdict = Status.FLUSHED  # behind one that fails here
        else:
            self._writer.post(self.device.ops.post_send, self.address, self.next_number << 1, posted)
        if posted.verdict is None:
            self.sends.append(posted)
        else:
            self._add_failed(request, posted.verdict)

    def _check(self, request: SendRequest) -> None:
        most = self.capabilities.max_send_wr
        if len(self.sends) - self._of_engine >= most and self.sends_outstanding - self._of_engine >= most:
            raise LimitReached(f"{most} requests are outstanding")
        attributes = self.device.attributes
        check_offered(request, attributes)
        check_type(request, self)
        if isinstance(request, LocalInvalidate):
            if not attributes.windows_max or isinstance(self.device.memory_of(request.rkey), MemoryRegion):
                raise Misuse("no request of this device voids the key of a region")
        elif isinstance(request, Send):
            if request.invalidate is not None and not attributes.windows_max:
                raise Misuse("no request of this device voids a key")
        elif isinstance(request, BindWindow):
            if not attributes.windows_max:
                raise Misuse("the device has no memory windows")
            if request.zero_based:
                raise Misuse("the device has no zero-based windows")
            if request.key_part is not None and not 0 <= request.key_part <= 0xFF:
                raise Misuse("the part of a key that may be chosen has 8 bits")

    def _add_failed(self, request: SendRequest, verdict: Status) -> None:
        """Queues what the device does not get; it ends when all before it has."""
        waits = bool(self.sends)
        self.sends.append(Posted(request, verdict))
        if not waits:
            self._settle()
        elif self._state is QpState.RTS and self.sends[-2].verdict is None and not self.sends[-2].tells:
            # Nothing would tell that its turn has come. What is flushed with it could have succeeded: nobody asked.
            self.end()

    def post_recv(self, receive: Receive) -> None:
        self.lending.reclaim()
        if self.srq is not None:
            raise Misuse("the receives of this queue pair come from a shared queue")
        if self._state is QpState.RESET:
            raise Misuse("the queue pair is destroyed")
        if len(receive.scatter) > self.device.attributes.scatter_max:
            raise Misuse(f"a receive of {len(receive.scatter)} entries")
        most = self.capabilities.max_recv_wr
        if len(self.receives) >= most and self.receives_posted >= most:
            raise LimitReached(f"{most} receives are posted already")
        number = self.device.next_receive()
        if self._state is not QpState.ERROR:
            self._poster.post(self.device.ops.post_recv, self.address, number << 1 | 1, receive.scatter)
            self.device.receives[number] = self
        elif not self.receives:
            self.recv_cq.add(Completion(receive.wr_id, Status.FLUSHED, _RECEIVE, 0, self.number))
            return
        self.receives[number] = receive

    def modify_to_error(self) -> None:
        if self._state in _OVER:
            return
        self.end()
        if self.device.attributes.error_disconnects and self.connection is not None:
            self.connection.lost()

    def destroy(self) -> None:
        if self._state is QpState.RESET:
            return
        if self.windows:
            raise Misuse(f"{len(self.windows)} windows are bound to the queue pair")
        self.lending.reclaim()
        device = self.device
        try:
            device.libraries.ibv_destroy_qp(self.handle)
        except OSError as error:
            raise told(error, "the queue pair could not be destroyed") from error
        self._state = QpState.RESET
        self.lending.release()
        del device.by_number[self.number], device.by_address[self.address]
        self._look()  # what is there of it is taken out, and comes to nothing
        for number in self.receives:
            device.receives.pop(number, None)
        self.receives.clear()
        for posted in self.sends:
            self._writer.release(posted)
        self.sends.clear()
        if self.srq is not None:
            self.srq.users.discard(self)
        self.send_cq.users.remove(self)
        self.recv_cq.users.remove(self)
        self._let_go_of_queues()
        self.domain.queue_pairs.discard(self)
        self._run_quiet()
        if self.device.iwarp and self.connection is not None:
            self.connection.lost()

    # ---- lending it to the engine ----

    def lend(
        self, record: dict[str, int], reclaim: Callable[[], object], ring: Callable[[], SendRing]
    ) -> LentQueuePair | None:
        return self.lending.lend(record, reclaim, ring)

    def take_back(self, record: dict[str, int], error: int) -> None:
        self.lending.take_back(record, error)

    def catch_up(self) -> None:
        self.lending.reclaim()
        self._send_hardware.drain()
        self._recv_hardware.drain()

    @property
    def told(self) -> QpState:
        """The state, without a look at the device."""
        return self._state

    @property
    def done_number(self) -> int:
        """All requests before it are done."""
        return self._first

    @property
    def next_number(self) -> int:
        """That of the next request."""
        return self._first + len(self.sends)

    @property
    def may_be_lent(self) -> bool:
        """Whether all of its completions come by a queue of its own, and none waits to be handed over."""
        queues = self.send_cq, self.recv_cq
        return self._has_room and not any(
            isinstance(each, KernelPolledQueue) or each.has_of(self.number) for each in queues
        )

    def go_on(self, done: int, unfinished: list[bool]) -> None:
        """The engine has sent: all before `done` is done, and these from there on are not; whether each tells."""
        if done > self.next_number:  # one of the engine's that told: so are those before it
            while self.sends:
                self._done(self._next(), _SUCCESS)
            self._first, self._last = done, done - 1
        self._of_engine += len(unfinished)
        for tells in unfinished:
            posted = Posted(OF_ENGINE)
            posted.tells = tells
            self.sends.append(posted)

    # ---- the connection manager's side ----

    def endpoint(self, address: str) -> QpEndpoint:
        return self._join_by_number().endpoint(address)

    def join(self, other: QpEndpoint, owner: JoinedBy, *, initiator_depth: int, responder_resources: int) -> None:
        self._join_by_number().join(
            other, owner, initiator_depth=initiator_depth, responder_resources=responder_resources
        )

    def ready_to_send(self) -> None:
        if self._joining is None:
            self.told_state(QpState.RTS)  # as rdma_cm's connection has seen to
        else:
            self._joining.ready_to_send()

    def _join_by_number(self) -> Joining:
        self.device.check_joins()
        if self._joining is None:
            self._joining = Joining(self)
        return self._joining

    def modify(self, attributes: Structure, mask: int) -> None:
        """Raises OSError."""
        self.device.libraries.ibv_modify_qp(self.handle, byref(attributes), mask)

    def told_state(self, state: QpState) -> None:
        """The connection is so far."""
        if self._state not in _OVER:
            self._state = state

    def end(self) -> None:
        """Nothing more happens on it; what is posted is flushed by the device."""
        self.lending.reclaim()
        if self._state in _OVER:
            return
        self._state = QpState.ERROR
        if not self.device.iwarp or self.connection is None or self.connection.state not in CLOSING:
            # An iWARP connection that is closed in order is moved by the kernel, which still has to send its end.
            try:
                self.modify(abi.QpAttr(qp_state=QpState.ERROR), QpMask.STATE)
            except OSError as error:
                self.device.log.debug("queue pair %d could not be moved to ERROR: %s", self.number, error)
        self.when_quiet(self._taken_last)

    def when_quiet(self, callback: Callable[[], object]) -> None:
        """Calls when nothing is posted any more; soon at the latest, as then it is flushed here."""
        self._quiet.append(callback)
        if len(self._quiet) == 1:
            self._wait_for_quiet(self.device.loop.now + limits.VERBS_DRAIN_S)

    def _wait_for_quiet(self, until: float) -> None:
        if self._state is not QpState.RESET:
            self._send_hardware.drain()
            self._recv_hardware.drain()
            if self._with_device and self.device.loop.now < until:
                self.device.loop.call_later(limits.VERBS_DRAIN_TICK_S, lambda: self._wait_for_quiet(until))
                return
            self._flush()
        self._run_quiet()

    @property
    def _with_device(self) -> bool:
        return bool(self.receives) or bool(self.sends)

    def _run_quiet(self) -> None:
        waiting, self._quiet = self._quiet, []
        for callback in waiting:
            callback()

    def _flush(self) -> None:
        """The device did not; it has nothing any more all the same."""
        for posted in self.sends:
            posted.verdict = posted.verdict or Status.FLUSHED
        self._settle()
        receives, self.receives = self.receives, {}
        for number, receive in receives.items():
            self.device.receives.pop(number, None)
            self.recv_cq.add(Completion(receive.wr_id, Status.FLUSHED, _RECEIVE, 0, self.number))

    def _taken_last(self) -> None:
        if self.srq is not None and self._state is QpState.ERROR and not self._told_last:
            self._told_last = True
            self.tell(EventKind.QP_LAST_WQE_REACHED)

    # ---- the completion queues' side ----

    def send_completed(self, number: int, wc: Structure) -> None:
        """A request is done, and so are those before it."""
        if not self._first <= number < self._first + len(self.sends):
            return  # of a time before it was flushed here
        status = _status(wc.status)
        posted = self.sends[number - self._first]
        posted.outcome = status, wc.byte_len if isinstance(posted.request, RdmaRead) else 0
        self._last = max(self._last, number)
        self._settle()
        if status is not _SUCCESS:
            self.failed()

    def _next(self) -> Posted:
        self._first += 1
        return self.sends.popleft()

    def _done(self, posted: Posted, status: Status, byte_len: int = 0) -> None:
        self._writer.release(posted)
        request = posted.request
        if request is OF_ENGINE:
            self._engine_is_done(status)
            return
        if status is _SUCCESS:
            self._take_effect(posted)
        if status is not _SUCCESS or request.signaled:
            self.send_cq.add(Completion(request.wr_id, status, OPCODES[type(request)], byte_len, self.number))

    def _engine_is_done(self, status: Status) -> None:
        self._of_engine -= 1
        self.lending.finish(self._first - 1)
        if status not in (_SUCCESS, Status.FLUSHED):
            self.break_off(EventKind.QP_FATAL, f"what the engine has sent ended by {status.name}")

    def _take_effect(self, posted: Posted) -> None:
        request = posted.request
        if isinstance(request, LocalInvalidate):
            self.device.invalidated(request.rkey)
        elif isinstance(request, BindWindow):
            assert posted.key is not None
            span = request.region.va + request.offset, request.length
            window: Any = request.window  # ours, and the region too: they were looked at
            region: Any = request.region
            window.bound(posted.key, self, region, request.access, span)

    def _settle(self) -> None:
        """Ends those whose turn has come."""
        while self.sends:
            head = self.sends[0]
            if head.outcome is not None:
                self._done(self._next(), *head.outcome)
            elif head.verdict is not None:
                self._done(self._next(), head.verdict)
                if head.verdict is not Status.FLUSHED:
                    self.failed()
            elif not head.tells and self._first < self._last:
                self._done(self._next(), _SUCCESS)
            else:
                return

    def receive_completed(self, receive: Receive, wc: Structure) -> None:
        """A message is here, or a receive came back."""
        status = _status(wc.status)
        if status is _SUCCESS:
            if self._state is QpState.RTR and self.connection is not None:
                self.connection.communication_established()
            invalidated = RKey(wc.invalidated_rkey) if wc.wc_flags & abi.WC_WITH_INV else None
            if invalidated is not None:
                self.device.invalidated(invalidated)
            # Whether it was solicited is not told; a queue that is armed for such alone is woken by the device.
            immediate = int(wc.invalidated_rkey).to_bytes(4, sys.byteorder) if wc.wc_flags & abi.WC_WITH_IMM else None
            source = wc.src_qp if self.qp_type is QpType.UD else None
            done = Completion(
                receive.wr_id, _SUCCESS, _RECEIVE, wc.byte_len, self.number, False, invalidated, immediate, source
            )
        else:
            done = Completion(receive.wr_id, status, _RECEIVE, 0, self.number)
        self.recv_cq.add(done)
        if status is not _SUCCESS:
            self.failed()

    def take_receive(self, number: int) -> Receive | None:
        """What was posted with this number."""
        receive = self.receives.pop(number, None)
        if self._state is QpState.ERROR and not any(each in self.device.receives for each in self.receives):
            late, self.receives = self.receives, {}
            if late:  # posted in ERROR: they come behind what the device flushes
                self.device.loop.soon(lambda: self._flush_late(late))
        return receive

    def _flush_late(self, late: dict[int, Receive]) -> None:
        for receive in late.values():
            self.recv_cq.add(Completion(receive.wr_id, Status.FLUSHED, _RECEIVE, 0, self.number))

    def failed(self) -> None:
        """Something posted has failed: the device ends it, or has already."""
        if self._state in _OVER:
            return
        self.end()
        if self.device.attributes.error_disconnects and self.connection is not None:
            self.connection.lost()

    # ---- events ----

    def event(self, kind: EventKind) -> None:
        """What the device says of it."""
        if kind is EventKind.COMMUNICATION_ESTABLISHED:
            if self.connection is not None:
                self.connection.communication_established()
            self.tell(kind)
        elif kind is EventKind.QP_LAST_WQE_REACHED:
            self.when_quiet(self._taken_last)
        else:
            self.break_off(kind, "the device says so")

    def break_off(self, kind: EventKind, why: str) -> None:
        if self._state in _OVER:
            return
        self.tell(kind, why)
        self.failed()

    def lose_device(self) -> None:
        """The device is gone, and the other end is heard of no more."""
        self.failed()
        if self.connection is not None:
            self.connection.lost()

    def tell(self, kind: EventKind, why: str = "") -> None:
        self.device.tell(AsyncEvent(kind, self, why), self.on_event)


def _status(number: int) -> Status:
    """What verbs has and we do not is an error of the request all the same."""
    return Status(number) if number in _KNOWN else _OTHERS.get(number, Status.FATAL)


# ibv_wc_status: what is told apart by more values there.
_OTHERS: Final = {
    7: Status.REMOTE_OPERATION_ERROR,  # BAD_RESP_ERR
    8: Status.LOCAL_PROTECTION_ERROR,  # LOC_ACCESS_ERR
    15: Status.REMOTE_INVALID_REQUEST,  # REM_INV_RD_REQ_ERR
    16: Status.REMOTE_OPERATION_ERROR,  # REM_ABORT_ERR
    20: Status.RETRY_EXCEEDED,  # RESP_TIMEOUT_ERR
}
