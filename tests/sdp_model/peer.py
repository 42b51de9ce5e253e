"""What one peer of the modelled connection knows, the messages it sends, and the rules that may be broken on purpose.

Stream bytes are numbered from 0, so a sink sees at once when one is lost, doubled or out of order. Payload of a
message is `start, payload`; an advertised source buffer is `start, length`, the payload of its SrcAvail being its
first bytes.

MSeq and MSeqAck are kept as differences, so that a peer that has come back to where it was is in the same state as
before: a message says how many more messages it confirms than the one before it did. The channel is first-in first-
out, so MSeq itself needs no field.

A `Peer` is copied, changed by one rule after the other, and never changed again once the explorer has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Message(NamedTuple):
    """One SDP message, or an RDMA Write on its way."""

    kind: str
    bufs: int = 0
    acks: int = 0  # how many more messages its MSeqAck confirms than the one before
    start: int = 0
    payload: int = 0
    key: int = 0
    length: int = 0
    non_discards: int = 0
    mode: str = ""

    def __str__(self) -> str:
        told = [f"bytes {self.start}..{self.start + self.payload - 1}"] if self.payload else []
        if self.kind in ("SrcAvail", "SinkAvail", "Write"):
            told.append(f"key {self.key}")
        if self.kind in ("SrcAvail", "SinkAvail", "RdmaRdCompl", "RdmaWrCompl"):
            told.append(f"Len {self.length}")
        if self.kind == "SinkAvail":
            told.append(f"NonDiscards {self.non_discards}")
        if self.mode:
            told.append(self.mode)
        if self.kind != "Write":
            told += [f"Bufs {self.bufs}"] if self.bufs else []
            told.append(f"acks {self.acks}")
        return f"{self.kind}({', '.join(told)})"


class SrcAdvert(NamedTuple):
    """A source buffer on offer, as its source keeps it (`done`: acknowledged) and as the sink does (`done`: read)."""

    key: int
    start: int
    length: int
    payload: int
    done: int = 0
    reported: int = 0  # sink only: bytes that a RdmaRdCompl has told
    before_change: bool = False  # source only: sent before the ModeChange to Combined that is pending

    @property
    def next_byte(self) -> int:
        return self.start + self.payload + self.done

    @property
    def left(self) -> int:
        return self.length - self.payload - self.done

    @property
    def untold(self) -> int:
        return self.done - self.reported


class SinkAdvert(NamedTuple):
    """A sink buffer on offer, as its sink keeps it and as the source does once it has found it valid."""

    key: int
    length: int
    start: int = 0
    written: int = 0


class Span(NamedTuple):
    """Some bytes of the stream."""

    start: int
    length: int


class Change(NamedTuple):
    """A Pipelined to Combined change that waits to be acknowledged: messages up to it, and PND as it was then (P*)."""

    unacked: int
    frozen: int


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules that a model can be told to break. The defaults are what the core should do."""

    # flow control, §9
    payload_reserve: int = 3  # credits that a payload-carrying message leaves behind
    last_credit_only_for_credits: bool = True
    refresh: str = (
        "when it helps"  # "never"; "at one", as §9.4 has it; "always" when the peer cannot send payload, as GEN2
    )
    credit_counts_ack: bool = True
    # SrcAvail, §10.2 and §12.3
    payload_waits_for_adverts: bool = True
    hold_ack: str = "until read"  # "never"; "until read"; "until told": until the RdmaRdCompl is sent as well
    crossing_send_sm: str = "counts"  # or "ignored" while a cancel is pending, as GEN2 does
    rest_after_cancel: bool = (
        False  # the source goes on sending the rest of a refused advert while its cancel is pending
    )
    cancel_forgets_due: bool = True
    one_send_sm: bool = True  # a cancel that dropped nothing is not answered
    read_told_before_cancel: bool = True
    reads_wait_for_rest: bool = True
    refuses_when_crossing: bool = True
    replies_when_decided: bool = True  # a SendSm is decided when it can be posted, not queued
    # SinkAvail, §10.3, §12.1, §12.2 and §12.4
    stale_check: bool = True
    stale_lowers_pnd: bool = True
    consume_counts: bool = True
    transaction_counts: bool = True
    sink_avail_waits_for_src: bool = True
    sink_avail_waits_for_rest: bool = True
    src_ignored_by_offer: bool = True
    write_wins: bool = True
    finish_write_first: bool = True
    drop_when_acked: bool = True  # queued SinkAvails go when the SinkCancelAck does, not when the cancel comes
    cancel_ack_for_writes: bool = False  # also after nothing but a RdmaWrCompl, as the draft can be read
    # modes, §11.3 and §11.4
    late_window: bool = True
    late_stale: str = "frozen"  # "frozen": against P*; "current": against PND; "none": no counting
    late_voids: str = (
        "valid, sent before"  # "first": the first late SinkAvail voids all; "valid": any valid one does; "none"
    )
    change_waits_for_ack: bool = True
    change_finishes_write: bool = True
    buffered_waits_for_srcs: bool = True
    # closing, §16.1
    close_waits: bool = True
    dis_conn_voids: bool = True


@dataclass(frozen=True, slots=True)
class Bounds:
    """How large the conversation is that a model tries."""

    private_max: int = 1  # payload bytes of a Data message
    advert_sizes: tuple[int, ...] = (2,)  # lengths of SrcAvails
    offer_size: int = 2  # length of SinkAvails; larger than `private_max`, §10.3
    adverts_max: int = 2  # MaxAdverts of both peers
    read_sizes: tuple[int, ...] = (1, 2)
    data: bool = True  # the source may choose Data for bytes that it need not send so
    refuse: bool = True  # the sink may answer a SrcAvail with SendSm
    credits: bool = False  # count credits and buffers


@dataclass(frozen=True, slots=True)
class Setting:
    """What both peers of a model go by."""

    bounds: Bounds
    rules: Rules


@dataclass(slots=True, unsafe_hash=True)
class Peer:
    """One end. Sheet §19.1 lists the same variables."""

    # flow control
    unacked: int = 0  # messages sent that no MSeqAck has confirmed: last MSeq sent - last MSeqAck received
    unsaid: int = 0  # messages received that no MSeqAck has confirmed: last MSeq received - last MSeqAck sent
    held: int = (
        0  # how many of them must not be confirmed: the SrcAvailCancel that is worked off, and what came behind it
    )
    credit: int = 0
    posted: int = 0
    unread: int = 0  # buffers that hold payload which the program has not taken
    last_bufs: int = 0  # Bufs of the last message sent
    owed: bool = False  # a message other than an empty Data came since the last one sent
    # send half
    total: int = 0
    head: int = 0  # next byte that is neither sent nor advertised
    mode: str = "Combined"
    pnd: int = 0
    adverts: tuple[SrcAdvert, ...] = ()
    rest: Span | None = None  # to be sent because of a SendSm
    back: int = -1  # where to go on once the pending cancel is complete; -1: at the first advert
    cancel: int | None = None  # unconfirmed messages up to the pending SrcAvailCancel; 0: an MSeqAck has confirmed it
    queue: tuple[SinkAdvert, ...] = ()  # the other's valid SinkAvails
    answering: bool = False  # a SinkAvailCancel is to be answered
    owes_cancel_ack: bool = False
    change: Change | None = None
    closing: bool = False
    dis_conn_sent: bool = False
    # receive half
    got: int = 0
    sink_mode: str = "Combined"
    nd: int = 0
    offers: tuple[SinkAdvert, ...] = ()
    taking_back: bool = False  # a SinkAvailCancel is pending
    srcs: tuple[SrcAdvert, ...] = ()
    reading: tuple[int, int, int] | None = None  # key, first byte, count
    due: int = 0  # bytes of a refused advert that must still come as Data
    withdrawing: bool = False  # a SrcAvailCancel is being worked off
    refusals_queued: int = 0  # SendSm that were decided and not sent, where `Rules` allows that
    dis_conn_got: bool = False
    # what its program does, and how much more of it
    sends_first: bool = False
    keys: int = 0  # keys made so far, in either half
    offers_left: int = 0
    transactions_left: int = 0
    cancels_left: int = 0
    takes_back_left: int = 0
    controls_left: int = 0
    updates_left: int = 0
    changes_left: tuple[str, ...] = ()
    sink_changes_left: int = 0
    closes_left: int = 0
