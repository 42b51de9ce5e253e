"""Who may do what when: the states of a connection and the messages that may come in each, as data.

Theory of operation (docs/wire/sdp.md §16.3). A connection is set up by the transport's connection manager, whose
private data are Hello and HelloAck. Each end closes its direction by DisConn, once all that it sent before has been
delivered. An end in `FIN_WAIT` has sent it and not received it, one in `CLOSE_WAIT` the other way round. When both have
gone, the end that sent first takes the transport connection down; the other does so a little later if that does not
happen (`LAST_ACK`). A transport connection that goes down without a DisConn is a reset. So is one that goes down after
an AbortConn, which an end has to send only if it has sent DisConn.

A socket may move to another process (`SUSPENDED`, and `RESUMING` at the other end): the stream goes on over a new
transport connection.

A pair that is not in `TRANSITIONS` cannot happen; a message that `FORBIDDEN` names for a state breaks the rule that is
given there. The diagram of the documentation site and the test over all (state, message) pairs are made from these
tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from sidestep.sdp.wire import Mid, Mode


class SdpState(Enum):
    """Of a connection. Both ends have all of them, but for the two that only one side takes to get established."""

    CLOSED = "closed"
    REQ_SENT = "request sent"  # connecting side: Hello has gone, or waits for its buffers
    REP_SENT = "reply sent"  # accepting side: HelloAck has gone, or waits for its buffers
    ESTABLISHED = "established"
    FIN_WAIT = "fin wait"  # DisConn sent
    CLOSE_WAIT = "close wait"  # DisConn received
    LAST_ACK = "last ack"  # DisConn received, then sent
    TIME_WAIT = "time wait"  # both, and the transport connection is being taken down
    ABORTING = "aborting"  # reset by this end; the transport connection is being taken down
    RESUMING = "resuming"  # the other end's socket has moved: a new transport connection is made
    SUSPENDED = "suspended"  # our socket has moved


OPENING: Final = frozenset({SdpState.REQ_SENT, SdpState.REP_SENT})


class Stimulus(Enum):
    """What moves a connection from state to state."""

    CONNECT = "connect"
    REQUEST = "good Hello received"
    REPLY = "good HelloAck received"
    REFUSED = "refused, or not answered"
    READY = "ready to use, or a first message"
    END_SENT = "DisConn sent"
    END_RECEIVED = "DisConn received"
    DISCONNECTED = "transport connection down"
    TIMER = "last timer"
    RESET = "reset by this end, by AbortConn, or by an error"
    MOVED = "SuspCommAck received"
    MOVES = "SuspCommAck sent"
    RECONNECT = "new queue pair"


_S, _E = SdpState, Stimulus

TRANSITIONS: Final[dict[tuple[SdpState, Stimulus], SdpState]] = {
    (_S.CLOSED, _E.CONNECT): _S.REQ_SENT,
    (_S.CLOSED, _E.REQUEST): _S.REP_SENT,
    (_S.REQ_SENT, _E.REPLY): _S.ESTABLISHED,
    (_S.REQ_SENT, _E.REFUSED): _S.CLOSED,
    (_S.REQ_SENT, _E.DISCONNECTED): _S.CLOSED,
    (_S.REQ_SENT, _E.RESET): _S.ABORTING,
    (_S.REP_SENT, _E.READY): _S.ESTABLISHED,
    (_S.REP_SENT, _E.REFUSED): _S.CLOSED,
    (_S.REP_SENT, _E.DISCONNECTED): _S.CLOSED,
    (_S.REP_SENT, _E.RESET): _S.ABORTING,
    (_S.ESTABLISHED, _E.END_SENT): _S.FIN_WAIT,
    (_S.ESTABLISHED, _E.END_RECEIVED): _S.CLOSE_WAIT,
    (_S.ESTABLISHED, _E.DISCONNECTED): _S.CLOSED,
    (_S.ESTABLISHED, _E.RESET): _S.ABORTING,
    (_S.ESTABLISHED, _E.MOVED): _S.SUSPENDED,
    (_S.ESTABLISHED, _E.MOVES): _S.RESUMING,
    (_S.FIN_WAIT, _E.MOVES): _S.RESUMING,
    (_S.CLOSE_WAIT, _E.MOVED): _S.SUSPENDED,
    (_S.CLOSE_WAIT, _E.MOVES): _S.RESUMING,
    (_S.FIN_WAIT, _E.END_RECEIVED): _S.TIME_WAIT,
    (_S.FIN_WAIT, _E.DISCONNECTED): _S.CLOSED,
    (_S.FIN_WAIT, _E.RESET): _S.ABORTING,
    (_S.CLOSE_WAIT, _E.END_SENT): _S.LAST_ACK,
    (_S.CLOSE_WAIT, _E.DISCONNECTED): _S.CLOSED,
    (_S.CLOSE_WAIT, _E.RESET): _S.ABORTING,
    (_S.LAST_ACK, _E.TIMER): _S.TIME_WAIT,
    (_S.LAST_ACK, _E.DISCONNECTED): _S.CLOSED,
    (_S.LAST_ACK, _E.RESET): _S.ABORTING,
    (_S.TIME_WAIT, _E.DISCONNECTED): _S.CLOSED,
    (_S.TIME_WAIT, _E.RESET): _S.ABORTING,
    (_S.ABORTING, _E.DISCONNECTED): _S.CLOSED,
    (_S.SUSPENDED, _E.DISCONNECTED): _S.CLOSED,
    (_S.SUSPENDED, _E.RESET): _S.ABORTING,
    (_S.RESUMING, _E.RECONNECT): _S.REQ_SENT,
    (_S.RESUMING, _E.RESET): _S.ABORTING,
}

# States in which the transport connection carries messages of the stream's protocol.
OPEN: Final = frozenset({_S.ESTABLISHED, _S.FIN_WAIT, _S.CLOSE_WAIT, _S.LAST_ACK})

_SETUP: Final = {Mid.HELLO: "hello_late", Mid.HELLO_ACK: "hello_late"}
_ENDED: Final = {
    Mid.DIS_CONN: "second_end",
    Mid.SRC_AVAIL: "payload_after_end",
    Mid.SRC_AVAIL_CANCEL: "payload_after_end",
    Mid.RDMA_WR_COMPL: "payload_after_end",
}

# State -> messages that break a rule there, and the rule's name. What is not named is taken (or, where the state of a
# mechanism forbids it, judged there). In states that are not here messages are dropped: they crossed an end.
FORBIDDEN: Final[dict[SdpState, dict[Mid, str]]] = {
    _S.REP_SENT: _SETUP,
    _S.ESTABLISHED: _SETUP,
    _S.FIN_WAIT: _SETUP,
    _S.CLOSE_WAIT: {**_SETUP, **_ENDED},
    _S.LAST_ACK: {**_SETUP, **_ENDED, Mid.SUSP_COMM: "suspend_late"},
}

# States in which payload breaks a rule: its sender has ended its direction.
NO_PAYLOAD: Final = frozenset({_S.CLOSE_WAIT, _S.LAST_ACK})

_BARE: Final = frozenset(
    {
        Mid.DATA, Mid.SEND_SM, Mid.RDMA_RD_COMPL, Mid.SINK_AVAIL, Mid.SINK_AVAIL_CANCEL, Mid.MODE_CHANGE,
        Mid.CH_RCV_BUF, Mid.CH_RCV_BUF_ACK, Mid.SUSP_COMM_ACK, Mid.ABORT_CONN, Mid.SINK_CANCEL_ACK,
    }
)  # fmt: skip
_STREAM: Final = frozenset({Mid.SRC_AVAIL, Mid.SRC_AVAIL_CANCEL, Mid.RDMA_WR_COMPL, Mid.DIS_CONN, Mid.SUSP_COMM})

# State -> what this end may send there; after its DisConn only messages without payload. In other states: nothing.
SENDABLE: Final[dict[SdpState, frozenset[Mid]]] = {
    _S.ESTABLISHED: (_BARE | _STREAM) - {Mid.ABORT_CONN},
    _S.FIN_WAIT: _BARE,
    _S.CLOSE_WAIT: (_BARE | _STREAM) - {Mid.ABORT_CONN, Mid.SUSP_COMM},
    _S.LAST_ACK: _BARE,
}


class Master(Enum):
    """Who changes the mode of a half-connection: its Data Source, or its Data Sink (docs/wire/sdp.md §11.3)."""

    SOURCE = "source"
    SINK = "sink"


# The four transitions there are; Buffered to Pipelined and back go through Combined.
MODE_CHANGES: Final[dict[tuple[Mode, Mode], Master]] = {
    (Mode.COMBINED, Mode.BUFFERED): Master.SOURCE,
    (Mode.BUFFERED, Mode.COMBINED): Master.SINK,
    (Mode.COMBINED, Mode.PIPELINED): Master.SOURCE,
    (Mode.PIPELINED, Mode.COMBINED): Master.SOURCE,
}


@dataclass(frozen=True, slots=True)
class ModeRules:
    """What a mode allows in its half-connection (docs/wire/sdp.md §11.1)."""

    src_avails: int | None  # SrcAvails that may be outstanding; None: as many as MaxAdverts allows
    src_avail_payload: bool  # each SrcAvail has payload, or none has
    sink_avails: bool  # whether SinkAvails, and with them Transactions and RDMA Writes, are allowed


MODES: Final[dict[Mode, ModeRules]] = {
    Mode.BUFFERED: ModeRules(src_avails=0, src_avail_payload=False, sink_avails=False),
    Mode.COMBINED: ModeRules(src_avails=1, src_avail_payload=True, sink_avails=False),
    Mode.PIPELINED: ModeRules(src_avails=None, src_avail_payload=False, sink_avails=True),
}

# What the rules that need a state are; those that a message breaks by itself are in header.RULES.
RULES: Final = {
    "hello_late": "Hello and HelloAck are private data of the connection manager only",
    "second_end": "DisConn comes once from each end",
    "payload_after_end": "nothing of the stream follows DisConn",
    "suspend_late": "a connection that both ends have closed cannot move",
    "abort_early": "AbortConn comes after DisConn of the same end",
    "sequence": "MSeq grows by one with each message",
    "acknowledgement": "MSeqAck names a message that was sent, and never goes back",
    "message_size": "a message fits into a private buffer",
    "rdma_access": "RDMA goes to memory that is advertised, and as it was advertised",
    "invalidated": "a message voids no key but that of memory which is advertised to its sender",
    "payload_closed": "nothing may be sent to who has closed",
    "payload_amid_advert": "no payload while a SrcAvail is incomplete, but what SendSm asked for",
    "src_avail_mode": "SrcAvail in Combined and Pipelined mode only",
    "src_avail_payload": "SrcAvail has payload in Combined mode, and none in Pipelined mode",
    "src_avail_second": "one SrcAvail at a time in Combined mode",
    "src_avail_cancelling": "no SrcAvail between SrcAvailCancel and its answer",
    "cancel_second": "one SrcAvailCancel at a time",
    "read_unasked": "RdmaRdCompl answers a SrcAvail",
    "read_early": "after SendSm the bytes it asked for come first",
    "read_excess": "no more is read than was advertised",
    "sink_avail_mode": "SinkAvail in Pipelined mode only",
    "sink_avail_small": "SinkAvail offers more than a private buffer of its sender holds",
    "sink_avail_cancelling": "no SinkAvail between SinkAvailCancel and its answer",
    "write_unasked": "RdmaWrCompl answers a SinkAvail",
    "write_excess": "no more is written than was advertised",
    "adverts": "at most MaxAdverts advertisements are outstanding",
    "mode_transition": "four transitions exist, and each mode has one master",
    "end_amid_advert": "DisConn comes after all that was advertised was delivered",
    "resize_second": "one ChRcvBuf at a time",
    "resize_unasked": "ChRcvBufAck answers a ChRcvBuf",
    "resize_range": "ChRcvBufAck names a size between the old one and the one that was asked for, or beyond it",
    "suspend_unasked": "SuspCommAck answers a SuspComm",
    "suspend_amid": "nothing follows SuspComm but updates of credit",
}


def forbidden(state: SdpState, mid: Mid, payload_len: int) -> str | None:
    """The rule that a message breaks by coming in this state, if any."""
    rule = FORBIDDEN[state].get(mid) if state in FORBIDDEN else None
    if rule is None and payload_len and state in NO_PAYLOAD:
        return "payload_after_end"
    return rule
