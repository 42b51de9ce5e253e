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

from ctypes import Structure, byref, c_char_p, c_int, c_void_p, cast
from errno import ECONNREFUSED
from typing import TYPE_CHECKING, Any, Final

from sidestep.rdma.cm import (
    BEGINNING,
    REJECT_CONSUMER,
    REJECT_INVALID_SERVICE_ID,
    REJECT_TIMEOUT,
    CmKind,
    CmState,
    Connection,
    ConnectionRequest,
    Rejected,
    TimewaitExit,
    Unreachable,
)
from sidestep.rdma.kernel import abi, quirks
from sidestep.rdma.kernel.abi import RdmaCmEvent
from sidestep.rdma.kernel.notes import address_in, address_of, sockaddr
from sidestep.rdma.verbs import EventKind, QpState

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidestep.rdma.kernel.manager import KernelManager
    from sidestep.rdma.kernel.notes import CmNote
    from sidestep.rdma.kernel.qp import KernelQueuePair

_GONE: Final = (RdmaCmEvent.DISCONNECTED, RdmaCmEvent.DEVICE_REMOVAL)
_FAILURES: Final = (
    RdmaCmEvent.ADDR_ERROR, RdmaCmEvent.ROUTE_ERROR, RdmaCmEvent.CONNECT_ERROR, RdmaCmEvent.UNREACHABLE, *_GONE,
)  # fmt: skip


class KernelConnection(Connection):
    """One side of a connection."""

    _manager: KernelManager
    qp: KernelQueuePair
    _id: Any = None
    _private_data = b""

    @property
    def _calls(self) -> Any:
        return self._manager.libraries

    @property
    def _iwarp(self) -> bool:
        return self._manager.device.iwarp

    # ---- what is sent ----

    def ask(self, service_id: int, private_data: bytes) -> None:
        device = self._manager.device
        self._private_data = private_data
        try:
            self.hold(self._manager.create_id())
            here = sockaddr(device.address, 0)
            there = sockaddr(self.remote_address, service_id & self._manager.service_mask)
            self._calls.rdma_resolve_addr(self._id, here, there, _ms(device.settings.resolve_s))
        except OSError as error:
            self._fail_later(error)
        else:
            self._timer = device.loop.call_later(device.settings.connect_s, super().lost)

    def _fail_later(self, error: OSError) -> None:
        self._manager.device.log.debug("%s: %s", self.remote_address, error)
        refused = error.errno == ECONNREFUSED
        event = Rejected(REJECT_INVALID_SERVICE_ID) if refused else Unreachable()
        self._manager.notices.append(lambda: self.end(event) if self.state in BEGINNING else None)

    def _resolve_route(self) -> None:
        self._calls.rdma_resolve_route(self._id, _ms(self._manager.device.settings.resolve_s))

    def _connect(self) -> None:
        settings, wanted = self._manager.device.settings, self.qp.capabilities
        self._calls.rdma_connect(
            self._id,
            self._parameters(
                self._private_data, wanted.responder_resources, wanted.initiator_depth, retry_count=settings.retries
            ),
        )

    def accept(self, private_data: bytes, depth: int, resources: int) -> None:
        """Says yes; a failure is told later."""
        qp = self.qp
        qp.initiator_depth = depth
        try:
            if not self._iwarp:
                self._make_ready(resources)
            self._calls.rdma_accept(self._id, self._parameters(private_data, resources, depth))
        except OSError as error:
            self._manager.device.log.debug("the request could not be accepted: %s", error)
            self.end(Rejected(REJECT_TIMEOUT))
            return
        qp.told_state(QpState.RTR)

    def _parameters(self, private_data: bytes, resources: int, depth: int, **more: int) -> Any:
        qp = self.qp
        return byref(abi.ConnParam(
            private_data=cast(c_char_p(private_data), c_void_p), private_data_len=len(private_data),
            responder_resources=resources, initiator_depth=depth, srq=qp.srq is not None, qp_num=qp.number,
            rnr_retry_count=self._manager.device.settings.rnr_retries, **more,
        ))  # fmt: skip

    def send(self, kind: CmKind, *, reason: int = 0, **_fields: Any) -> None:
        """Says what the kernel does not by itself, as the identifier is destroyed."""
        if kind is CmKind.REJ and reason == REJECT_CONSUMER and not self._iwarp:
            self._manager.reject(self._id, b"")
        elif kind in (CmKind.DREQ, CmKind.DREP) and self.state not in BEGINNING:
            try:
                self._calls.rdma_disconnect(self._id)
            except OSError as error:  # it is over already
                self._manager.device.log.debug("rdma_disconnect: %s", error)

    # ---- what comes ----

    def note(self, note: CmNote) -> None:
        """Something came out of the channel."""
        kind, state = note.kind, self.state
        if kind in _STEPS and state is CmState.REQUEST_SENT:
            try:
                _STEPS[kind](self)
            except OSError as error:
                self._fail_later(error)
        elif kind in (RdmaCmEvent.CONNECT_RESPONSE, RdmaCmEvent.ESTABLISHED):
            self.handle(CmKind.REP if state is CmState.REQUEST_SENT else CmKind.RTU, note)
        elif kind == RdmaCmEvent.REJECTED:
            # On InfiniBand the status is the reason (IBTA 12.6.7.2); on iWARP an errno, and who has private data to
            # send, or takes the connection to reject it, is the consumer.
            reason = note.status if note.status > 0 else REJECT_CONSUMER
            self.handle(CmKind.REJ, Rejected(reason, note.private_data))
        elif kind == RdmaCmEvent.TIMEWAIT_EXIT:
            self.qp.when_quiet(self._exit)
        elif kind in _FAILURES and state in BEGINNING:
            refused = -note.status == ECONNREFUSED
            self.end(Rejected(REJECT_INVALID_SERVICE_ID) if refused else Unreachable())
        elif kind in _GONE and state in (CmState.ESTABLISHED, CmState.DISCONNECT_SENT):
            if state is CmState.ESTABLISHED or not self._iwarp:
                self.send(CmKind.DREP)  # where both ends have asked, each waits for that of the other
            super().lost(confirmed=kind == RdmaCmEvent.DISCONNECTED and not note.status)

    def answered(self, reply: CmNote) -> bool:
        """Completes the connection; on iWARP it is there."""
        qp = self.qp
        qp.initiator_depth = min(qp.capabilities.initiator_depth, self._depth_taken(reply))
        if not self._iwarp:
            try:
                self._make_ready(qp.capabilities.responder_resources)
                self._calls.rdma_establish(self._id)
            except OSError as error:
                self._manager.device.log.debug("the connection could not be completed: %s", error)
                self._manager.reject(self._id, b"")
                self.end(Rejected(REJECT_TIMEOUT))  # the other end has given up since it said yes
                return False
        return True

    def _depth_taken(self, note: CmNote) -> int:
        """RDMA Reads that the other end takes. Drivers of iWARP do not agree which of the two numbers says so."""
        if not self._iwarp:
            return note.initiator_depth
        if quirks.is_siw(self._manager.device.kernel_name):
            return note.responder_resources
        return min(note.initiator_depth, note.responder_resources)

    # ---- the queue pair's side ----

    def communication_established(self) -> None:
        """As good as the last word, which the kernel is told."""
        if self.state is CmState.REPLY_SENT and not self._iwarp:
            try:
                self._calls.rdma_notify(self._id, int(EventKind.COMMUNICATION_ESTABLISHED))
            except OSError as error:
                self._manager.device.log.debug("rdma_notify: %s", error)
        super().communication_established()

    def lost(self, *, by_remote: bool | None = None, confirmed: bool = False) -> None:
        """The queue pair is in error, or gone; where that takes the connection along the kernel will say so."""
        if self._iwarp and self.state in BEGINNING:
            self.end(None)

    # ---- what follows ----

    def establish(self, private_data: bytes = b"") -> None:
        if self._iwarp:
            addresses = self._id.contents.route.addr
            self.transport = address_in(addresses.src_storage), address_in(addresses.dst_storage)
        super().establish(private_data)

    def rest(self) -> None:
        """The kernel says when late packets are past; with iWARP TCP keeps its own TIME-WAIT."""
        if self._iwarp:
            self.qp.when_quiet(self._exit)

    def _exit(self) -> None:
        if self.state is CmState.TIMEWAIT:
            self.end(TimewaitExit())

    def hold(self, identifier: Any) -> None:
        """Has an identifier, until the end."""
        self._id = identifier
        self._manager.heard_by[address_of(identifier)] = self

    def _forget(self) -> None:
        super()._forget()
        if self._id is not None:
            self._manager.destroy(self._id)
            self._id = None

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


_STEPS: Final = {
    RdmaCmEvent.ADDR_RESOLVED: KernelConnection._resolve_route,
    RdmaCmEvent.ROUTE_RESOLVED: KernelConnection._connect,
}


class KernelRequest(ConnectionRequest):
    """A request. It has an identifier of its own, which becomes the connection's."""

    _manager: KernelManager

    def __init__(self, manager: KernelManager, identifier: Any, note: CmNote, port: int) -> None:
        addresses = identifier.contents.route.addr
        here, there = address_in(addresses.src_storage), address_in(addresses.dst_storage)
        super().__init__(
            manager, there[0], service_id=port, private_data=note.private_data,
            responder_resources=note.initiator_depth, initiator_depth=note.responder_resources,  # as this end sees them
        )  # fmt: skip
        self._id = identifier
        if manager.device.iwarp:
            self.transport = here, there
        manager.heard_by[address_of(identifier)] = self
        self.seek_listener()

    def answer(self, connection: KernelConnection, private_data: bytes, depth: int, resources: int) -> None:
        connection.hold(self._id)
        connection.accept(private_data, depth, resources)

    def refuse(self, reason: int, private_data: bytes) -> None:
        """rdma_cm sends no reason but the consumer's."""
        del reason
        self._manager.reject(self._id, private_data)
        self._manager.destroy(self._id)

    def note(self, note: CmNote) -> None:
        """Who asked has given up."""
        if note.kind == RdmaCmEvent.REJECTED or note.kind in _FAILURES:
            self.withdraw()
            self._manager.destroy(self._id)


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
