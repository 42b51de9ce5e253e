"""The SrcAvails of a connection, as each of its halves remembers them."""

from __future__ import annotations

from sidestep.rdma.work import RKey
from sidestep.sdp.requests import StreamSend
from sidestep.sdp.wire import SrcAvail


class SinkAdvert:
    """A SrcAvail of the other end that is not processed."""

    __slots__ = ("left", "planned", "read", "reading", "rkey", "unreported", "va")

    def __init__(self, header: SrcAvail, payload: int) -> None:
        self.rkey = RKey(header.rkey)
        self.va = header.va + payload  # the payload is not read once more
        self.left = header.length - payload  # bytes to read
        self.planned = 0  # bytes of them for which a read is posted
        self.read = 0  # bytes of them that have come
        self.reading = 0  # RDMA Reads under way
        self.unreported = 0  # bytes read that no RdmaRdCompl has told of


class SourceAdvert:
    """A SrcAvail of ours that is not processed."""

    __slots__ = ("acked", "length", "mseq", "payload", "send", "start")

    def __init__(self, send: StreamSend, start: int, length: int, payload: int, mseq: int) -> None:
        self.send = send
        self.start = start  # offset in the send
        self.length = length
        self.payload = payload  # bytes that went with the SrcAvail
        self.acked = 0  # bytes that RdmaRdCompl has told of
        self.mseq = mseq
