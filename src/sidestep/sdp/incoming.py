"""Messages that come in: each is judged by the tables, accounted for, and given to what it concerns.

The order is that of docs/wire/sdp.md §19.1. Data, on a connection where nothing unusual goes on, does not come here:
`SdpConnection.handle_message` does the same for it without a look at the tables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from sidestep.errors import PeerViolation
from sidestep.rdma.work import Receive
from sidestep.sdp.requests import ReturnBuffer, SdpEventKind
from sidestep.sdp.states import SdpState, forbidden
from sidestep.sdp.wire import (
    OOB_PEND,
    OOB_PRES,
    REQ_PIPE,
    Decoded,
    Mid,
    ModeChange,
    RdmaRdCompl,
    SinkAvail,
    SinkCancelAck,
    SrcAvail,
    decode,
)

if TYPE_CHECKING:
    from sidestep.sdp.connection import SdpConnection

_DATA: Final = int(Mid.DATA)


class Incoming:
    """Any message of one connection; `control` is what waits to be sent."""

    __slots__ = (
        "_control", "_flow", "_handshake", "_host", "_resize", "_sink", "_source", "_suspend", "_teardown",
    )  # fmt: skip

    def __init__(self, host: SdpConnection) -> None:
        self._host = host
        self._flow, self._source, self._sink = host._flow, host._source, host._sink
        self._resize, self._control = host._resize, host._control
        self._handshake, self._teardown, self._suspend = host._handshake, host._teardown, host._suspend

    def take(self, buffer: Receive, message: memoryview) -> None:
        """A message that has come into this receive.

        Raises:
            PeerViolation: It breaks a rule; the receive is still to be given back.
        """
        flow, suspend = self._flow, self._suspend
        self._handshake.ready()  # the first message says as much as ready to use
        state = self._host.state
        if state is SdpState.REQ_SENT:  # the queue pair is quicker than the connection manager
            self._handshake.early.append((buffer, len(message)))
            return
        if not flow.open:
            flow.work.append(ReturnBuffer(buffer))  # it crossed our end of the connection
            return
        decoded = decode(message)
        bsdh, _, payload = decoded
        rule = forbidden(state, Mid(bsdh.mid), len(payload))
        if rule is not None:
            raise PeerViolation(f"{Mid(bsdh.mid).name} in state {state.value}", rule=rule)
        flow.take_header(bsdh.bufs, bsdh.mseq, bsdh.mseq_ack)
        if self._resize.busy:
            self._resize.received()
        if self._source.change_mseq is not None:
            self._source.acknowledged(bsdh.mseq_ack)
        if bsdh.flags & OOB_PEND:
            self.announced()
        if payload and self._teardown.reader_closed:
            raise PeerViolation(f"{len(payload)} bytes after close", rule="payload_closed")
        if suspend.confirmed or (suspend.answered and (payload or bsdh.mid != _DATA)):
            raise PeerViolation(f"{Mid(bsdh.mid).name} after SuspComm", rule="suspend_amid")
        if not payload:
            owed = flow.owes or bsdh.mid != _DATA
            self._resize.repost(buffer)
            flow.owes = owed
        self._HANDLERS[bsdh.mid](self, decoded, buffer)

    def give_back(self, buffer: Receive) -> None:
        """The receive of a message that broke a rule, unless it was used by then."""
        wr_id = buffer.wr_id  # it may have been cut to another size meanwhile
        used = any(held is not None and held.wr_id == wr_id for _, held, _ in self._sink.ready)
        for work in self._flow.work:
            receive = work.receive if isinstance(work, ReturnBuffer) else work
            used |= isinstance(receive, Receive) and receive.wr_id == wr_id
        if not used:
            self._flow.work.append(ReturnBuffer(buffer))

    def announced(self) -> None:
        """OOB_PEND: an urgent byte is under way."""
        self._sink.urgent_pending += 1
        self._host.tell(SdpEventKind.URGENT)

    def cancel_ack_queued(self) -> bool:
        """Whether a withdrawal of the other end's SinkAvails is not answered yet."""
        return any(isinstance(item, SinkCancelAck) for item in self._control)

    def _on_data(self, message: Decoded, buffer: Receive) -> None:
        if message.payload:
            self._sink.deliver(message.payload, buffer, message.bsdh.flags & OOB_PRES != 0)

    def _on_src_avail(self, message: Decoded, buffer: Receive) -> None:
        assert isinstance(message.header, SrcAvail)
        if self._teardown.reader_closed:
            raise PeerViolation("SrcAvail after close", rule="payload_closed")
        self._sink.handle_src_avail(message.header, message.payload, buffer)

    def _on_sink_avail(self, message: Decoded, buffer: Receive) -> None:
        assert isinstance(message.header, SinkAvail)
        if self.cancel_ack_queued():
            raise PeerViolation("SinkAvail before SinkCancelAck", rule="sink_avail_cancelling")
        self._source.handle_sink_avail(message.header, self._flow.remote_size)
        if message.payload:
            self._sink.deliver(message.payload, buffer, False)

    def _on_read_completed(self, message: Decoded, buffer: Receive) -> None:
        assert isinstance(message.header, RdmaRdCompl)
        hint = message.bsdh.flags & REQ_PIPE != 0
        self._source.handle_read_completed(message.header.length, message.bsdh.mseq_ack, hint)

    def _on_mode_change(self, message: Decoded, buffer: Receive) -> None:
        assert isinstance(message.header, ModeChange)
        half = self._source if message.header.to_send_half else self._sink
        half.handle_mode_change(message.header.mode)

    def _on_sink_avail_cancel(self, message: Decoded, buffer: Receive) -> None:
        if self._source.sinks:
            self._source.sinks.clear()
            self._control.append(SinkCancelAck())

    _HANDLERS: Final[dict[int, Callable[[Incoming, Any, Receive], None]]] = {
        int(Mid.DATA): _on_data,
        int(Mid.SRC_AVAIL): _on_src_avail,
        int(Mid.SINK_AVAIL): _on_sink_avail,
        int(Mid.RDMA_RD_COMPL): _on_read_completed,
        int(Mid.RDMA_WR_COMPL): lambda self, message, _: self._sink.handle_write_completed(message.header.length),
        int(Mid.SEND_SM): lambda self, message, _: self._source.handle_send_sm(message.bsdh.mseq_ack),
        int(Mid.MODE_CHANGE): _on_mode_change,
        int(Mid.SRC_AVAIL_CANCEL): lambda self, message, _: self._sink.handle_src_avail_cancel(message.bsdh.mseq),
        int(Mid.SINK_AVAIL_CANCEL): _on_sink_avail_cancel,
        int(Mid.SINK_CANCEL_ACK): lambda self, *_: self._sink.handle_sink_cancel_ack(),
        int(Mid.CH_RCV_BUF): lambda self, message, _: self._resize.handle_request(message.header.size),
        int(Mid.CH_RCV_BUF_ACK): lambda self, message, _: self._resize.handle_answer(message.header.size),
        int(Mid.DIS_CONN): lambda self, *_: self._teardown.handle_end(),
        int(Mid.ABORT_CONN): lambda self, *_: self._teardown.handle_abort(),
        int(Mid.SUSP_COMM): lambda self, message, _: self._suspend.handle_request(message.header.service_id),
        int(Mid.SUSP_COMM_ACK): lambda self, *_: self._suspend.handle_answer(),
    }
