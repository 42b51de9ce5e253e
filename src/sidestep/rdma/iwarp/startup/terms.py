"""The terms of an MPA start-up: its states, what an end may want, and what it is told (theory: negotiation.py)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final, TypeAlias

from sidestep import limits
from sidestep.errors import Misuse
from sidestep.rdma.iwarp.startup.frame import DEPTH_MAX, Rtr

REVISIONS: Final = (1, 2)
CONSORTIUM_REVISION: Final = 0


class MpaState(Enum):
    """Of a start-up."""

    WAIT_REPLY = "Request sent"
    WAIT_REQUEST = "nothing received"
    DECIDING = "Request received; the user decides"
    FULL_RX_ONLY = "Reply sent; only the initiator may send"
    FULL = "both ends may send"
    REJECTED = "one of the users said no"
    CLOSED = "failed"


class MpaStimulus(Enum):
    """What moves a start-up from state to state."""

    REQUEST = "good Request received"
    ACCEPT = "Reply accepts"
    REJECT = "Reply rejects"
    FAILURE = "timer, end of the connection, or an error"


_S, _E = MpaState, MpaStimulus

TRANSITIONS: Final = {
    (_S.WAIT_REPLY, _E.ACCEPT): _S.FULL,
    (_S.WAIT_REPLY, _E.REJECT): _S.REJECTED,
    (_S.WAIT_REPLY, _E.FAILURE): _S.CLOSED,
    (_S.WAIT_REQUEST, _E.REQUEST): _S.DECIDING,
    (_S.WAIT_REQUEST, _E.FAILURE): _S.CLOSED,
    (_S.DECIDING, _E.ACCEPT): _S.FULL_RX_ONLY,
    (_S.DECIDING, _E.REJECT): _S.REJECTED,
    (_S.DECIDING, _E.FAILURE): _S.CLOSED,
    (_S.FULL_RX_ONLY, _E.FAILURE): _S.CLOSED,
    (_S.FULL, _E.FAILURE): _S.CLOSED,  # an initiator that does not like what it was told: `Initiator.abandon`
}
OVER: Final = frozenset({_S.REJECTED, _S.CLOSED})


class MpaCause(Enum):
    """Why a start-up failed."""

    VIOLATION = "the other end broke a rule"
    SILENT = "the other end did not answer in time"
    UNDECIDED = "our user did not decide in time"
    ENDED = "the connection was closed or lost"
    READS = "the two ends cannot agree about RDMA Reads"
    NO_RTR = "there is no ready-to-receive message that both ends take"
    ABANDONED = "our user has given up"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadDepths:
    """How many RDMA Reads an end wants at a time, each way."""

    ird: int = 16  # of the other end's, that this one holds
    ird_max: int = limits.IWARP_READS_MAX  # as many if the other end wants to make more than `ird`
    ord: int = 16  # of its own; fewer if the other end holds fewer
    ord_min: int = 0  # with fewer the connection is of no use
    ird_announced: bool = True  # False: the users agree by themselves, the start-up leaves `ird` alone
    ord_announced: bool = True  # False: likewise with `ord`

    def __post_init__(self) -> None:
        if not 0 <= self.ird <= self.ird_max <= DEPTH_MAX:
            raise Misuse(f"IRD {self.ird}, {self.ird_max} at most", remedy=f"choose 0 to {DEPTH_MAX}")
        if not 0 <= self.ord_min <= self.ord <= DEPTH_MAX:
            raise Misuse(f"ORD {self.ord}, {self.ord_min} at least", remedy=f"choose 0 to {DEPTH_MAX}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MpaSettings:
    """What an end wants, times in seconds. The defaults suit Linux siw and hardware RNICs, on either side."""

    revision: int = 2  # initiator: what it says; responder: the highest that it takes
    enhanced: bool = True  # initiator: asks for read depths, and perhaps peer-to-peer; revision 2 only
    peer_to_peer: bool = False  # initiator: asks for it; a responder does as it is asked
    rtr: Rtr = Rtr.WRITE | Rtr.READ  # initiator: those it can send; responder: those it can take
    crc: bool = True  # False: only if the other end does not want it either
    markers: bool = False  # in what this end receives; what it sends has them if the other end asks
    depths: ReadDepths = field(default_factory=ReadDepths)  # revision 1: not told, both ends just have theirs
    reply_s: float | None = limits.MPA_REPLY_S  # initiator: from the Request; None: for ever, as with all of these
    request_s: float | None = limits.MPA_REQUEST_S  # responder: from the start
    decision_s: float | None = limits.MPA_DECISION_S  # responder: for its user, then the Reply rejects
    rtr_s: float | None = limits.MPA_RTR_S  # responder: from the Reply, if it is peer-to-peer
    first_fpdu_s: float | None = None  # responder: from the Reply, if not: the initiator's user may be silent

    def __post_init__(self) -> None:
        if self.revision not in REVISIONS:
            raise Misuse(f"MPA revision {self.revision}", remedy="choose 1 or 2")
        if self.peer_to_peer and not (self.revision == 2 and self.enhanced):
            raise Misuse("peer-to-peer needs the enhanced data of revision 2")
        if not self.rtr:
            raise Misuse("no ready-to-receive message", remedy="name one at least")


# ---- what is told ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Responder: a good Request has come; its user is to `accept` or `reject`."""

    revision: int
    private_data: bytes  # without the enhanced part
    peer_to_peer: bool
    rtr: Rtr  # that the initiator can send
    remote_ird: int | None  # RDMA Reads that it holds at a time; None: not told
    remote_ord: int | None  # that it wants to make at a time; None: not told


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """The connection is one of RDMA from here on, with these parameters for the stream."""

    revision: int
    crc: bool
    markers_in: bool  # in what this end receives
    markers_out: bool  # in what it sends
    ird: int  # RDMA Reads of the other end that this one holds at a time
    ord: int  # RDMA Reads of this end that it makes at a time
    remote_ird: int | None  # what the other end said; None: nothing
    remote_ord: int | None
    peer_to_peer: bool
    rtr: Rtr  # initiator: the one to send before all else, if any; responder: those that may come
    private_data: bytes  # of the other end, without the enhanced part; a responder has it from `Asked` as well
    leftover: bytes = b""  # the first bytes of the stream, if they came along


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Initiator: the other end's user said no. The TCP connection is to be closed."""

    private_data: bytes
    remote_ird: int | None  # what it would have had, or would need
    remote_ord: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Nothing came of it. The TCP connection is to be closed, after what there is to send."""

    cause: MpaCause
    text: str
    code: int  # as a Terminate says it, whether one is sent or not
    rule: str = ""  # of a violation


MpaEvent: TypeAlias = Asked | Agreed | Refused | Failed
