"""The queue pair of immediate mode: a request is carried out when it is posted."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from sidestep.rdma.loopback.qp import LoopbackQueuePair
from sidestep.rdma.soft.qp import LOCAL_KINDS, OP_RECEIVE, OP_SEND, SUCCESS, length_of
from sidestep.rdma.work import Completion, RdmaRead, Send, Status

if TYPE_CHECKING:
    from sidestep.rdma.loopback.device import LoopbackDevice
    from sidestep.rdma.soft.init import QpInit
    from sidestep.rdma.work import RdmaWrite, SendRequest


class ImmediateQueuePair(LoopbackQueuePair):
    """Carries requests out at once. Only those that get no answer wait, for the timeout."""

    __slots__ = ("_gather_max", "_inline_max", "_message_max", "_readable", "_unanswered", "_unsignaled", "_writable")

    def __init__(self, device: LoopbackDevice, init: QpInit) -> None:
        super().__init__(device, init)
        self._unanswered: deque[SendRequest] = deque()
        self._unsignaled = 0  # done, and in the queue until a signaled one is
        self._gather_max = self.device.attributes.gather_max
        self._inline_max = self.device.attributes.inline_max
        self._message_max = self.device.attributes.message_max
        self._readable = init.domain.readable
        self._writable = init.domain.writable

    @property
    def sends_outstanding(self) -> int:
        return self._unsignaled + len(self._unanswered)

    @property
    def awaits_answer(self) -> bool:
        return bool(self._unanswered)

    def take_unfinished(self) -> list[SendRequest]:
        unfinished = list(self._unanswered)
        self._unanswered.clear()
        return unfinished

    def post_send(self, request: SendRequest) -> None:
        """Carries the request out; the common one, a Send into one buffer, on the short way."""
        peer = self.peer
        if (
            self._slow
            or type(request) is not Send
            or peer is None
            or peer._slow
            or not peer._receives
            or request.invalidate is not None
            or self._unsignaled >= self._max_send_wr
        ):
            self._post(request)
            return
        gather = request.gather
        receive = peer._receives[0]
        scatter = receive.scatter
        if len(scatter) != 1 or len(gather) > self._gather_max:
            self._post(request)
            return
        readable = self._readable
        length = inline = 0
        for part in gather:
            size = len(part)
            length += size
            if type(part) is bytes:
                inline += size
            elif id(part.obj) not in readable:  # type: ignore[union-attr]
                self._post(request)
                return
        room = scatter[0]
        if (
            length > len(room)
            or length > self._message_max
            or inline > self._inline_max
            or id(room.obj) not in peer._writable  # type: ignore[attr-defined]
        ):
            self._post(request)
            return
        begun = 0
        try:
            for part in gather:
                end = begun + len(part)
                room[begun:end] = part
                begun = end
        except (TypeError, ValueError):
            self._post(request)  # says what is wrong
            return
        peer._receives.popleft()
        peer.recv_cq.add(Completion(receive.wr_id, SUCCESS, OP_RECEIVE, length, peer.number, request.solicited))
        if request.signaled:
            self._unsignaled = 0
            self.send_cq.add(Completion(request.wr_id, SUCCESS, OP_SEND, 0, self.number))
        else:
            self._unsignaled += 1

    def _post(self, request: SendRequest) -> None:
        if not self.check_post(request, self.sends_outstanding):
            return
        if self._unanswered:
            self._unanswered.append(request)
            return
        status = self.begin(request)
        byte_len = 0
        if status is SUCCESS and not isinstance(request, LOCAL_KINDS):
            length = length_of(request)
            self.saw_request(request, length)
            early = self.completes_early and not isinstance(request, RdmaRead)
            arrives = self._arrives()
            if arrives:
                status = self._carry_out(request, length)
            elif not early:
                self._unanswered.append(request)
            if early:
                status = SUCCESS  # whatever came of it: the connection tells
            if self._unanswered or self.link.cut or not arrives:
                self.expect_silence()
            if self._unanswered:
                return
            if isinstance(request, RdmaRead) and status is SUCCESS:
                byte_len = length
        if request.signaled:
            self._unsignaled = 0
        else:
            self._unsignaled += 1
        self.complete(request, status, byte_len)

    def _arrives(self) -> bool:
        faults = self.fabric.faults
        if faults is not None and self.fabric.chance(faults.lose_connection):
            self.fabric.cut(self)
        peer = self.peer
        return not (
            self.link.cut
            or peer is None
            or not peer.hears
            or not self.device.port_active
            or not peer.device.port_active
        )

    def _carry_out(self, request: Send | RdmaWrite | RdmaRead, length: int) -> Status:
        peer = self.peer
        assert peer is not None
        if isinstance(request, RdmaRead):
            data = peer.grant_read(request, length)
            if isinstance(data, Status):
                peer.saw_ack(data)
                return data
            peer.saw_response(data)
            return SUCCESS if self.place_read(request, data) else Status.LOCAL_PROTECTION_ERROR
        status = peer.take_send(request, length) if isinstance(request, Send) else peer.take_write(request, length)
        peer.saw_ack(status)
        return status
