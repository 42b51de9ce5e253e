"""What a queue pair is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sidestep.rdma.soft.memory import Domain
    from sidestep.rdma.soft.queues import SoftQueue
    from sidestep.rdma.soft.receives import SharedReceives
    from sidestep.rdma.verbs import EventHandler, QpCapabilities


@dataclass(frozen=True, slots=True)
class QpInit:
    """What `ProtectionDomain.create_qp` was asked for, everything about it checked; verbs has `ibv_qp_init_attr`."""

    domain: Domain
    send_cq: SoftQueue
    recv_cq: SoftQueue
    capabilities: QpCapabilities
    remote_access: int  # bits of `Access`
    srq: SharedReceives | None
    on_event: EventHandler | None
