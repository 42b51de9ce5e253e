"""The ends on Linux's siw, by pyverbs: these run in the lab's guest.

They sleep until there is a completion, as those on our device do.
"""

from __future__ import annotations

import errno
import multiprocessing
from itertools import cycle
from pathlib import Path
from typing import Any, Final

from pyverbs import cm_enums, enums
from pyverbs.cmid import CMID, AddrInfo, CMEvent, CMEventChannel, ConnParam
from pyverbs.cq import CQ, CompChannel
from pyverbs.mr import MR
from pyverbs.pyverbs_error import PyverbsRDMAError
from pyverbs.qp import QPCap, QPInitAttr

from rnic.method import READS, RECV_WR, REGION, SEND_WR, SIW_PORT, SMALL, TARGET, WINDOW, Client, NoConnection, Replies

_CRC: Final = Path("/sys/module/siw/parameters/mpa_crc_required")
_RESOLVE_MS: Final = 5000
_LOCAL: Final = enums.IBV_ACCESS_LOCAL_WRITE
_EVERYTHING: Final = _LOCAL | enums.IBV_ACCESS_REMOTE_READ | enums.IBV_ACCESS_REMOTE_WRITE


class _End:
    """A queue pair with its receives, before it is connected."""

    def __init__(self, cmid: Any, access: int) -> None:
        self.cmid = cmid
        self._channel = CompChannel(cmid.context)
        self._queue = CQ(cmid.context, SEND_WR, None, self._channel, 0)
        self._queue.req_notify()
        room = QPCap(max_send_wr=SEND_WR, max_recv_wr=RECV_WR, max_send_sge=1, max_recv_sge=1)
        cmid.create_qp(QPInitAttr(qp_type=enums.IBV_QPT_RC, scq=self._queue, rcq=self._queue, cap=room))
        self.region = MR(cmid.pd, REGION, access)
        rooms = [MR(cmid.pd, SMALL, _LOCAL) for _ in range(WINDOW)]
        for each in rooms:
            cmid.post_recv(each, SMALL)
        self._oldest = cycle(rooms)  # receives complete in the order in which they were posted
        self.messages = {letter: MR(cmid.pd, SMALL, _LOCAL) for letter in "PRA"}
        for letter, region in self.messages.items():
            region.write(letter.encode() * SMALL, SMALL)

    def send(self, letter: str, length: int, *, signaled: bool) -> None:
        self.cmid.post_send(self.messages[letter], enums.IBV_SEND_SIGNALED if signaled else 0, length)

    def completions(self) -> list[Any]:
        """Waits for some. Each look behind `req_notify` sees what came before it, so none is slept over."""
        while True:
            count, found = self._queue.poll(SEND_WR)
            if count:
                return list(found)
            self._channel.get_cq_event(self._queue)
            self._queue.ack_events(1)
            self._queue.req_notify()

    def received(self) -> int:
        """What the oldest receive begins with; it is posted again."""
        room = next(self._oldest)
        letter: int = room.read(1, 0)[0]
        self.cmid.post_recv(room, SMALL)
        return letter


# ---- the end that serves ----


def serve(address: str) -> None:
    """One client after the other, each by a process of its own: with a client pyverbs closes the listener's context."""
    while True:
        process = multiprocessing.Process(target=_serve_one, args=(address,))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"a server on siw ended with {process.exitcode}")


def _serve_one(address: str) -> None:
    channel = CMEventChannel()
    listener = CMID(creator=channel)
    passive = {"port_space": cm_enums.RDMA_PS_TCP, "flags": cm_enums.RAI_PASSIVE}
    listener.bind_addr(AddrInfo(src=address, src_service=str(SIW_PORT), **passive))
    listener.listen(backlog=1)
    asked = CMEvent(channel)
    end = _End(CMID(creator=asked, listen_id=listener), _EVERYTHING)
    end.cmid.accept(_param(TARGET.pack(end.region.buf, end.region.rkey)))
    asked.ack_cm_event()
    replies = Replies()
    while True:
        for each in end.completions():
            if each.status != enums.IBV_WC_SUCCESS:  # the client is gone, and what was posted is flushed
                return
            if each.opcode & enums.IBV_WC_RECV and (length := replies.length(end.received())):
                end.send("P" if length == SMALL else "A", length, signaled=length == SMALL)


# ---- the end that measures ----


class SiwClient(Client):
    """Of a server on siw, or on another device that speaks iWARP."""

    def __init__(self, remote: str, port: int, *, crc: bool) -> None:
        # siw asks for a CRC only while it requires it, and then refuses whoever does not.
        _CRC.write_text("Y" if crc else "N")
        try:
            self._connect(remote, port)
        finally:
            _CRC.write_text("N")

    def _connect(self, remote: str, port: int) -> None:
        self._events = CMEventChannel()
        cmid = CMID(creator=self._events)
        cmid.resolve_addr(AddrInfo(dst=remote, dst_service=str(port), port_space=cm_enums.RDMA_PS_TCP), _RESOLVE_MS)
        self._expect(cm_enums.RDMA_CM_EVENT_ADDR_RESOLVED)
        cmid.resolve_route(_RESOLVE_MS)
        self._expect(cm_enums.RDMA_CM_EVENT_ROUTE_RESOLVED)
        self._end = _End(cmid, _LOCAL)
        try:
            cmid.connect(_param(b""))
        except PyverbsRDMAError as error:
            if error.error_code != errno.ECONNREFUSED:
                raise
            raise NoConnection("of siw: refused") from error
        told = self._expect(cm_enums.RDMA_CM_EVENT_ESTABLISHED)
        self._va, self._key = TARGET.unpack(told[: TARGET.size])

    def _expect(self, kind: int) -> bytes:
        """The next event is to be that one; its private data."""
        event = CMEvent(self._events)
        found, data = event.event_type, bytes(event.private_data or b"")
        words = event.event_str()
        event.ack_cm_event()
        if found != kind:
            raise NoConnection(f"of siw: {words}")
        return data

    def write(self, size: int) -> None:
        self._end.cmid.post_write(self._end.region, size, self._va, self._key, enums.IBV_SEND_SIGNALED)

    def read(self, size: int) -> None:
        self._end.cmid.post_read(self._end.region, size, self._va, self._key, enums.IBV_SEND_SIGNALED)

    def send(self, letter: str, *, signaled: bool) -> None:
        self._end.send(letter, SMALL, signaled=signaled)

    def completions(self) -> tuple[int, int]:
        found = self._end.completions()
        arrived = 0
        for each in found:
            if each.status != enums.IBV_WC_SUCCESS:
                raise SystemExit(f"a request of siw's failed: status {each.status}")
            if each.opcode & enums.IBV_WC_RECV:
                self._end.received()
                arrived += 1
        return len(found) - arrived, arrived

    def close(self) -> None:
        self._end.cmid.disconnect()
        self._expect(cm_enums.RDMA_CM_EVENT_DISCONNECTED)


def _param(private_data: bytes) -> Any:
    param = ConnParam(resources=READS, depth=READS, data_len=len(private_data))
    if private_data:
        param.set_private_data(private_data)
    return param
