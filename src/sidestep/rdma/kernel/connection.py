"""Connections and requests of a device of the kernel: what each event of rdma_cm means to them.

    REQUEST_SENT  ADDR_RESOLVED, ROUTE_RESOLVED: the next step           CONNECT_RESPONSE, ESTABLISHED: ESTABLISHED
    REPLY_SENT    ESTABLISHED, or the first message: ESTABLISHED
    both          REJECTED, UNREACHABLE, *_ERROR: CLOSED
    ESTABLISHED   DISCONNECTED: TIMEWAIT, and answered
    DISCONNECT_SENT DISCONNECTED: TIMEWAIT
    TIMEWAIT      TIMEWAIT_EXIT: CLOSED                                  iWARP has none: at once

An event that a state does not name is of the past, and nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import Structure, byref, c_char_p, c_int, c_void_p, cast
from errno import ECONNREFUSED
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from sidestep.rdma.cm import (
    REJECT_CONSUMER,
    REJECT_INVALID_SERVICE_ID,
    REJECT_TIMEOUT,
    CmState,
    Connection,
    Disconnected,
    Established,
    Rejected,
    TimewaitExit,
    Unreachable,
)
from sidestep.rdma.kernel import abi, quirks
from sidestep.rdma.kernel.abi import CmKind
from sidestep.rdma.kernel.notes import address_in, address_of, sockaddr
from sidestep.rdma.soft.manager import SoftRequest
from sidestep.rdma.verbs import EventKind, QpState

if TYPE_CHECKING:
    from sidestep.loop import Timer
    from sidestep.rdma.cm import ConnectionEvent, ConnectionHandler, Transport
    from sidestep.rdma.kernel.manager import KernelManager
    from sidestep.rdma.kernel.notes import CmNote
    from sidestep.rdma.kernel.qp import KernelQueuePair
    from sidestep.rdma.soft.manager import SoftListener
    from sidestep.rdma.verbs import QueuePair

_ASKING: Final = (CmState.REQUEST_SENT, CmState.REPLY_SENT)
_FAILURES: Final = (CmKind.ADDR_ERROR, CmKind.ROUTE_ERROR, CmKind.CONNECT_ERROR, CmKind.UNREACHABLE)


class KernelConnection(Connection):
    """One side of a connection."""

    qp: KernelQueuePair

    def __init__(
        self,
        manager: KernelManager,
        qp: KernelQueuePair,
        remote_address: str,
        handler: ConnectionHandler,
        state: CmState,
        identifier: Any = None,
    ) -> None:
        self._manager = manager
        self.qp = qp
        self.remote_address = remote_address
        self.state = state
        self.transport: Transport | None = None
        self._handler = handler
        self._id: Any = None
        self._private_data = b""
        self._check_reply: Callable[[bytes], bool] | None = None
        self._timer: Timer | None = None
        qp.connection = self
        manager.connections.add(self)
        if identifier is not None:
            self._hold(identifier)

    @property
    def _calls(self) -> Any:
        return self._manager.libraries

    @property
    def _iwarp(self) -> bool:
        return self._manager.device.iwarp

    @property
    def closes(self) -> bool:
        """It ends in order: the kernel has the queue pair."""
        return self.state in (CmState.DISCONNECT_SENT, CmState.TIMEWAIT)

    # ---- the user's side ----

    def disconnect(self) -> None:
        if self.state in _ASKING:
            self.end(None)
        elif self.state is CmState.ESTABLISHED:
            self.state = CmState.DISCONNECT_SENT
            self._disconnect()
            self.qp.to_error()

    def _disconnect(self) -> None:
        try:
            self._calls.rdma_disconnect(self._id)
        except OSError as error:  # it is over already
            self._manager.device.log.debug("rdma_disconnect: %s", error)

    # ---- asking ----

    def ask(self, there: bytes, private_data: bytes, check_reply: Callable[[bytes], bool] | None) -> None:
        """Begins; every failure is told later."""
        device = self._manager.device
        self._private_data, self._check_reply = private_data, check_reply
        try:
            self._hold(self._manager.create_id())
            here = sockaddr(device.address, 0)
            self._calls.rdma_resolve_addr(self._id, here, there, _ms(device.settings.resolve_s))
        except OSError as error:
            self._fail_later(error)
        else:
            self._timer = device.loop.call_later(device.settings.connect_s, self._too_late)

    def _too_late(self) -> None:
        if self.state is CmState.REQUEST_SENT:
            self.end(Unreachable())

    def _fail_later(self, error: OSError) -> None:
        self._manager.device.log.debug("%s: %s", self.remote_address, error)
        refused = error.errno == ECONNREFUSED
        event = Rejected(REJECT_INVALID_SERVICE_ID) if refused else Unreachable()
        self._manager.device.notices.append(lambda: self.end(event) if self.state in _ASKING else None)

    def _route_resolved(self) -> None:
        qp = self.qp
        settings = self._manager.device.settings
        wanted = qp.capabilities
        parameters = abi.ConnParam(
            private_data=cast(c_char_p(self._private_data), c_void_p), private_data_len=len(self._private_data),
            responder_resources=wanted.responder_resources, initiator_depth=wanted.initiator_depth,
            retry_count=settings.retries, rnr_retry_count=settings.rnr_retries, srq=qp.srq is not None,
            qp_num=qp.number,
        )  # fmt: skip
        try:
            self._calls.rdma_connect(self._id, byref(parameters))
        except OSError as error:
            self._fail_later(error)

    def _answered(self, note: CmNote) -> None:
        """The reply is here; on iWARP the connection too."""
        wanted = self._check_reply is None or self._check_reply(note.private_data)
        if self.state is not CmState.REQUEST_SENT:
            return  # ended by the user when he was asked
        qp = self.qp
        if not wanted:
            if not self._iwarp:
                self._manager.reject(self._id, b"")
            self.end(Rejected(REJECT_CONSUMER))
            return
        qp.initiator_depth = min(qp.capabilities.initiator_depth, self._depth_taken(note))
        if not self._iwarp:
            try:
                self._make_ready(qp.capabilities.responder_resources)
                self._calls.rdma_establish(self._id)
            except OSError as error:
                self._manager.device.log.debug("the connection could not be completed: %s", error)
                self._manager.reject(self._id, b"")
                self.end(Rejected(REJECT_TIMEOUT))  # the other end has given up since it said yes
                return
        self.established(note.private_data)

    def _depth_taken(self, note: CmNote) -> int:
        """RDMA Reads that the other end takes. Drivers of iWARP do not agree which of the two numbers says so."""
        if not self._iwarp:
            return note.initiator_depth
        if quirks.is_siw(self._manager.device.kernel_name):
            return note.responder_resources
        return min(note.initiator_depth, note.responder_resources)

    # ---- being asked ----

    def accept(self, private_data: bytes, note: CmNote) -> None:
        """Says yes; a failure is told later."""
        qp = self.qp
        wanted = qp.capabilities
        resources = min(wanted.responder_resources, note.responder_resources)
        qp.initiator_depth = min(wanted.initiator_depth, note.initiator_depth)
        parameters = abi.ConnParam(
            private_data=cast(c_char_p(private_data), c_void_p), private_data_len=len(private_data),
            responder_resources=resources, initiator_depth=qp.initiator_depth,
            rnr_retry_count=self._manager.device.settings.rnr_retries, srq=qp.srq is not None, qp_num=qp.number,
        )  # fmt: skip
        try:
            if not self._iwarp:
                self._make_ready(resources)
            self._calls.rdma_accept(self._id, byref(parameters))
        except OSError as error:
            self._manager.device.log.debug("the request could not be accepted: %s", error)
            self.end(Rejected(REJECT_TIMEOUT))
            return
        qp.told_state(QpState.RTR)

    def heard(self) -> None:
        """The first message is here: as good as the last word, which the kernel is told."""
        if self.state is CmState.REPLY_SENT:
            if not self._iwarp:
                try:
                    self._calls.rdma_notify(self._id, int(EventKind.COMMUNICATION_ESTABLISHED))
                except OSError as error:
                    self._manager.device.log.debug("rdma_notify: %s", error)
            self.established()

    # ---- events ----

    def note(self, note: CmNote) -> None:
        """Something came out of the channel."""
        kind = note.kind
        if self.state is CmState.REQUEST_SENT:
            self._note_asking(note)
        elif self.state is CmState.REPLY_SENT and kind == CmKind.ESTABLISHED:
            self.established()
        elif kind == CmKind.TIMEWAIT_EXIT and self.state is CmState.TIMEWAIT:
            self.qp.when_quiet(self._exit)
        elif kind in (CmKind.DISCONNECTED, CmKind.DEVICE_REMOVAL) and self.state in _LIVES:
            confirmed = kind == CmKind.DISCONNECTED and not note.status
            self._over(by_remote=self.state is CmState.ESTABLISHED, confirmed=confirmed)
        if self.state in _ASKING:
            self._note_failure(note)

    def _note_asking(self, note: CmNote) -> None:
        if note.kind == CmKind.ADDR_RESOLVED:
            try:
                self._calls.rdma_resolve_route(self._id, _ms(self._manager.device.settings.resolve_s))
            except OSError as error:
                self._fail_later(error)
        elif note.kind == CmKind.ROUTE_RESOLVED:
            self._route_resolved()
        elif note.kind in (CmKind.CONNECT_RESPONSE, CmKind.ESTABLISHED):
            self._answered(note)

    def _note_failure(self, note: CmNote) -> None:
        if note.kind == CmKind.REJECTED:
            # On InfiniBand the status is the reason (IBTA 12.6.7.2); on iWARP an errno, and who has private data to
            # send, or takes the connection to reject it, is the consumer.
            reason = note.status if note.status > 0 else REJECT_CONSUMER
            self.end(Rejected(reason, note.private_data))
        elif note.kind in _FAILURES or note.kind in (CmKind.DISCONNECTED, CmKind.DEVICE_REMOVAL):
            refused = -note.status == ECONNREFUSED
            self.end(Rejected(REJECT_INVALID_SERVICE_ID) if refused else Unreachable())

    def established(self, private_data: bytes = b"") -> None:
        self._stop_timer()
        self.state = CmState.ESTABLISHED
        if self._iwarp:
            addresses = self._id.contents.route.addr
            self.transport = address_in(addresses.src_storage), address_in(addresses.dst_storage)
        self.qp.told_state(QpState.RTS)
        self._tell(Established(private_data))

    def _over(self, *, by_remote: bool, confirmed: bool) -> None:
        self.state = CmState.TIMEWAIT
        if by_remote or not self._iwarp:
            self._disconnect()  # the answer; where both ends have asked, each waits for that of the other
        self.qp.to_error()
        self.qp.when_quiet(partial(self._tell, Disconnected(by_remote=by_remote, confirmed=confirmed)))
        if self._iwarp:  # TCP keeps its own TIME-WAIT
            self.qp.when_quiet(self._exit)

    def _exit(self) -> None:
        if self.state is CmState.TIMEWAIT:
            self.end(TimewaitExit())

    # ---- the queue pair's side ----

    def broken(self) -> None:
        """The queue pair is in error, or gone; where that takes the connection along the kernel will say so."""
        if not self._iwarp:
            return
        if self.state in _ASKING:
            self.end(None)

    def lost(self) -> None:
        """The device is gone: rdma_cm says so by itself."""

    # ---- the end ----

    def end(self, event: ConnectionEvent | None) -> None:
        """It never was, or is no more: nothing follows."""
        self._stop_timer()
        established = self.state not in _ASKING
        self.state = CmState.CLOSED
        self._let_go()
        self._manager.connections.discard(self)
        self.qp.to_error()
        if event is None:
            return
        if established:
            self._tell(event)
        else:
            self.qp.when_quiet(partial(self._tell, event))

    def drop(self) -> None:
        """The device is closed: nobody is told here."""
        if self.state is CmState.ESTABLISHED:
            self.state = CmState.DISCONNECT_SENT
            self._disconnect()
        self.end(None)

    def _hold(self, identifier: Any) -> None:
        self._id = identifier
        self._manager.heard_by[address_of(identifier)] = self

    def _let_go(self) -> None:
        if self._id is not None:
            self._manager.heard_by.pop(address_of(self._id), None)
            self._calls.rdma_destroy_id(self._id)
            self._id = None

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tell(self, event: ConnectionEvent) -> None:
        self._manager.device.notices.append(partial(self._handler, self, event))

    def _make_ready(self, resources: int) -> None:
        """Moves the queue pair as far as the kernel's manager knows it; raises OSError."""
        qp, settings = self.qp, self._manager.device.settings
        qp.modify(*self._attributes(QpState.INIT, lambda found: setattr(found, "qp_access_flags", qp.access_flags)))

        def rtr(found: Structure) -> None:
            found.max_dest_rd_atomic = resources
            found.min_rnr_timer = settings.rnr_timer

        qp.modify(*self._attributes(QpState.RTR, rtr))

        def rts(found: Structure) -> None:
            found.max_rd_atomic = qp.initiator_depth
            found.timeout, found.retry_cnt = settings.ack_timeout, settings.retries
            found.rnr_retry = settings.rnr_retries

        qp.modify(*self._attributes(QpState.RTS, rts))

    def _attributes(self, state: QpState, change: Callable[[Structure], None]) -> tuple[Structure, int]:
        found, mask = abi.QpAttr(qp_state=int(state)), c_int()
        self._calls.rdma_init_qp_attr(self._id, byref(found), byref(mask))
        change(found)
        return found, mask.value


_LIVES: Final = (CmState.ESTABLISHED, CmState.DISCONNECT_SENT)


class KernelRequest(SoftRequest):
    """A request. It has an identifier of its own, which becomes the connection's."""

    def __init__(self, manager: KernelManager, identifier: Any, note: CmNote, listener: SoftListener) -> None:
        addresses = identifier.contents.route.addr
        here, there = address_in(addresses.src_storage), address_in(addresses.dst_storage)
        super().__init__(there[0])
        self._manager = manager
        self._id = identifier
        self._note = note
        if manager.device.iwarp:
            self.transport = here, there
        self.private_data = note.private_data
        self.initiator_depth = note.responder_resources  # they are told as this end sees them
        self.responder_resources = note.initiator_depth
        self.service_id = listener.service_id
        manager.heard_by[address_of(identifier)] = self
        manager.requests.add(self)
        self._enter_backlog(listener)
        manager.device.notices.append(self.deliver)

    def accept(self, qp: QueuePair, private_data: bytes, handler: ConnectionHandler) -> KernelConnection:
        manager = self._manager
        manager.check_private_data(private_data, manager.device.attributes.reply_private_data_max)
        own = manager.check_qp(qp)
        self._answer()
        connection = KernelConnection(
            manager, own, self.remote_address, handler, CmState.REPLY_SENT, None if self.withdrawn else self._id
        )
        if self.withdrawn:
            connection.end(Rejected(REJECT_TIMEOUT))
        else:
            connection.transport = self.transport
            connection.accept(private_data, self._note)
        return connection

    def reject(self, reason: int = REJECT_CONSUMER, private_data: bytes = b"") -> None:
        """rdma_cm sends no reason but the consumer's."""
        del reason
        self._manager.check_private_data(private_data, self._manager.device.attributes.reject_private_data_max)
        self._answer()
        if not self.withdrawn:
            self._manager.reject(self._id, private_data)
            self._destroy()

    def note(self, note: CmNote) -> None:
        """Who asked has given up."""
        if note.kind in (CmKind.REJECTED, CmKind.DISCONNECTED, CmKind.DEVICE_REMOVAL, *_FAILURES):
            self.withdraw()
            self._destroy()

    def drop(self) -> None:
        """Ends it: the other end is told no."""
        self._manager.reject(self._id, b"")
        self.withdraw()
        self._destroy()

    def forget(self) -> None:
        self._manager.requests.discard(self)

    def _destroy(self) -> None:
        self._manager.heard_by.pop(address_of(self._id), None)
        self._manager.libraries.rdma_destroy_id(self._id)


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
