"""The connection manager of the loopback device: InfiniBand's handshake of `soft.handshake` in the fabric's time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sidestep.rdma.cm import CmKind
from sidestep.rdma.loopback.observer import CmMessage
from sidestep.rdma.loopback.qp import LoopbackQueuePair
from sidestep.rdma.soft.handshake import (
    TRANSITIONS,
    HandshakeConnection,
    HandshakeManager,
    HandshakeRequest,
)

if TYPE_CHECKING:
    from sidestep.rdma.cm import ConnectionHandler, Listener
    from sidestep.rdma.loopback.device import LoopbackDevice
    from sidestep.rdma.loopback.fabric import Fabric, Timer

__all__ = ["TRANSITIONS", "LoopbackConnection", "LoopbackManager", "LoopbackRequest"]


class LoopbackRequest(HandshakeRequest[LoopbackQueuePair, CmMessage]):
    """A REQ that waits for its answer."""


class LoopbackConnection(HandshakeConnection[LoopbackQueuePair, CmMessage]):
    """One side of a connection."""

    _manager: LoopbackManager

    def joined(self, req: CmMessage) -> None:
        peer = self._manager.device.fabric.queue_pairs.get(req.qp_number)
        if peer is not None:
            self.qp.pair_with(peer)

    def patience(self) -> tuple[float, int]:
        timing = self._manager.device.fabric.timing
        return timing.cm_timeout_s, timing.cm_retries

    def timewait_s(self) -> float:
        return self._manager.device.fabric.timing.timewait_s


class LoopbackManager(HandshakeManager[LoopbackQueuePair, CmMessage]):
    """The connection manager of one device."""

    device: LoopbackDevice

    def next_comm_id(self) -> int:
        return self.device.fabric.next_comm_id()

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Timer:
        return self.device.fabric.call_later(delay_s, callback)

    def make_connection(
        self,
        qp: LoopbackQueuePair,
        remote_address: str,
        handler: ConnectionHandler,
        check_reply: Callable[[bytes], bool] | None,
    ) -> LoopbackConnection:
        return LoopbackConnection(self, qp, remote_address, handler, check_reply)

    def make_request(self, listener: Listener, message: CmMessage) -> LoopbackRequest:
        return LoopbackRequest(self, listener, message)

    def send(
        self, kind: CmKind, address: str, local_id: int, remote_id: int, qp: LoopbackQueuePair | None = None,
        **fields: Any,
    ) -> None:  # fmt: skip
        """Sends a message, which may be lost; `fields` are those of `CmMessage` that not every kind has."""
        fabric = self.device.fabric
        message = CmMessage(
            at=fabric.now, kind=kind, source=self.device.name, target=address, local_id=local_id, remote_id=remote_id,
            qp_number=0 if qp is None else qp.number, **fields,
        )  # fmt: skip
        if fabric.observer is not None:
            fabric.observer.cm_message(message)
        if not self.device.port_active or (qp is not None and qp.link.cut) or _is_lost(fabric, kind):
            return
        fabric.arrive(fabric.now + fabric.draw(fabric.timing.cm_s), _arrive, fabric, message)


def _is_lost(fabric: Fabric, kind: CmKind) -> bool:
    if (faults := fabric.faults) is None:
        return False
    if faults.lose_cm_next.get(kind, 0) > 0:
        faults.lose_cm_next[kind] -= 1
        return True
    return fabric.chance(faults.lose_cm)


def _arrive(fabric: Fabric, message: CmMessage) -> None:
    target = fabric.devices.get(message.target)
    if target is not None and target.port_active:
        target.cm.receive(message)
