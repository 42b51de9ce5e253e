"""What a fabric is told about time and about what shall go wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, TypeAlias

from sidestep.rdma.cm import CmKind
from sidestep.rdma.work import Status

__all__ = ["NO_DELAY", "CmKind", "Faults", "Span", "Timing"]

Span: TypeAlias = tuple[float, float]  # seconds, least and most; each draw lies between, by the fabric's Random


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long things take in virtual time."""

    wire_s: Span = (1e-6, 5e-6)  # a message or an acknowledgement of a queue pair, one way; they never overtake
    read_s: Span = (0.0, 20e-6)  # more until the other end answers an RDMA Read: later Sends may arrive first
    cm_s: Span = (5e-6, 100e-6)  # a message of the connection manager; they overtake each other and data
    registration_s: Span = (5e-6, 50e-6)  # `register_later`; `register` takes no virtual time
    bandwidth: float | None = None  # bytes a second that leave a device; None: size costs nothing
    retry_timeout_s: float = 4.0  # until a request that gets no answer fails with RETRY_EXCEEDED
    cm_timeout_s: float = 4.0  # until a message of the connection manager is sent again
    cm_retries: int = 7  # times it is sent again; then Unreachable, or Disconnected unconfirmed
    timewait_s: float = 0.5  # from Disconnected to TimewaitExit


@dataclass(slots=True, kw_only=True)
class Faults:
    """What goes wrong; may be changed at any time. Chances are 0 to 1, drawn from the fabric's Random.

    A connection is broken at a moment of choice with `Fabric.cut` and `Fabric.reset`, a device with `Fabric.fail` and
    `Fabric.unplug`; `Fabric.call_at` says when. A message without a posted receive needs no fault: the sender's request
    fails with RNR_RETRY_EXCEEDED, always.
    """

    lose_connection: float = 0.0  # per message of a queue pair: as `Fabric.cut`, and the message is lost as well
    complete_with_error: float = 0.0  # per request: it is not carried out, and fails with one of `error_statuses`
    error_statuses: tuple[Status, ...] = (Status.REMOTE_OPERATION_ERROR, Status.RETRY_EXCEEDED, Status.FATAL)  # drawn
    error_by_wr_id: dict[int, Status] = field(default_factory=dict)  # the next request of that id; then removed
    lose_cm: float = 0.0  # per message of the connection manager
    lose_cm_next: dict[CmKind, int] = field(default_factory=dict)  # so many of a kind are lost next; counted down
    fail_registration: float = 0.0  # per registration: Unavailable
    fail_registrations_next: int = 0  # so many fail next; counted down


NO_DELAY: Final = Timing(wire_s=(0, 0), read_s=(0, 0), cm_s=(0, 0), registration_s=(0, 0))  # every delay is zero
