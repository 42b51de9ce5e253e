"""Captures what happens on a loopback fabric, as if there were a wire: give it to a `Fabric` as its observer.

The addresses are those that the Hello names. Only connections that begin with a Hello are written; plain
acknowledgements are not, refusals are.
"""

from __future__ import annotations

from typing import Final

from pcap_file import PcapFile, RoceWriter

from sidestep.errors import PeerViolation
from sidestep.rdma.frames import Side
from sidestep.rdma.loopback import observer
from sidestep.rdma.loopback.settings import CmKind
from sidestep.rdma.roce.connection import RecordKind, RoceEnds, RoceRecord
from sidestep.rdma.roce.packet import PSN_MASK
from sidestep.rdma.work import Status
from sidestep.sdp.hello import Hello, port_of
from sidestep.sdp.wire import decode

_KINDS: Final = {
    observer.Kind.SEND: RecordKind.SEND,
    observer.Kind.WRITE: RecordKind.WRITE,
    observer.Kind.READ_REQUEST: RecordKind.READ_REQUEST,
    observer.Kind.READ_RESPONSE: RecordKind.READ_RESPONSE,
}
_SYNDROMES: Final = {
    Status.REMOTE_INVALID_REQUEST: 0x61,
    Status.REMOTE_ACCESS_ERROR: 0x62,
    Status.REMOTE_OPERATION_ERROR: 0x63,
    Status.RNR_RETRY_EXCEEDED: 0x20,
}


class _Wire:
    """One connection, with packets of its own."""

    def __init__(self, file: PcapFile, ends: RoceEnds, mtu_code: int) -> None:
        ends.mtu_code = mtu_code
        self.ends = ends
        self.writer = RoceWriter(file, ends)
        self.qps: dict[int, Side] = {}


class FabricCapture:
    """An observer that writes what it sees; times count from `start_s`."""

    def __init__(self, file: PcapFile, *, mtu_code: int = 3, start_s: float = 0.0) -> None:
        self._file, self._mtu_code, self._start_s = file, mtu_code, start_s
        self._by_comm_id: dict[tuple[str, int], tuple[_Wire, Side]] = {}  # by device
        self._by_qp: dict[tuple[str, int], _Wire] = {}

    def qp_message(self, message: observer.QpMessage) -> None:
        wire = self._by_qp.get((message.source, message.source_qp))
        if wire is None:
            return
        at, side = self._start_s + message.at, wire.qps[message.source_qp]
        if message.kind is observer.Kind.ACK:
            if message.status in _SYNDROMES:
                wire.writer.write(RoceRecord(at, side, RecordKind.REFUSAL, syndrome=_SYNDROMES[message.status]))
            return
        wire.writer.write(
            RoceRecord(
                at, side, _KINDS[message.kind], b"".join(message.payload),
                rkey=message.rkey or 0, va=message.remote_va, length=message.length,
                solicited=message.solicited, invalidate=message.invalidate,
            )
        )  # fmt: skip

    def cm_message(self, message: observer.CmMessage) -> None:
        found = self._by_comm_id.get((message.source, message.local_id))
        if found is None and message.kind is CmKind.REQ:
            found = self._request(message)
        elif found is None and message.kind in (CmKind.REP, CmKind.REJ):
            found = self._answer(message)
        if found is None:
            return
        wire, side = found
        kind = RecordKind[message.kind.name]
        data = message.private_data if any(message.private_data) else b""
        wire.writer.write(RoceRecord(self._start_s + message.at, side, kind, data, reason=message.reason))

    def placed(self, placed: observer.Placed) -> None:
        """Bytes were written: nothing that a wire would show."""

    def _request(self, message: observer.CmMessage) -> tuple[_Wire, Side] | None:
        port, hello = port_of(message.service_id), _hello(message.private_data)
        if port is None or hello is None:
            return None
        # Each connection counts from other numbers, so that packets of two are not taken for each other's.
        first = len(self._by_comm_id) << 12 & PSN_MASK
        ends = RoceEnds(
            hello.src_ip, hello.dst_ip, message.service_id,
            qpn=(message.qp_number, 0), comm_id=(message.local_id, 0), starting_psn=(first, first | 0x800),
            transaction_id=message.local_id,
        )  # fmt: skip
        wire = _Wire(self._file, ends, self._mtu_code)
        wire.qps[message.qp_number] = Side.CONNECTING
        self._by_comm_id[message.source, message.local_id] = wire, Side.CONNECTING
        self._by_qp[message.source, message.qp_number] = wire
        return wire, Side.CONNECTING

    def _answer(self, message: observer.CmMessage) -> tuple[_Wire, Side] | None:
        found = self._by_comm_id.get((message.target, message.remote_id))
        if found is None or found[1] is not Side.CONNECTING:
            return None
        wire = found[0]
        if message.kind is CmKind.REP:
            wire.ends.qpn = (wire.ends.qpn[0], message.qp_number)
            wire.ends.comm_id = (wire.ends.comm_id[0], message.local_id)
            wire.qps[message.qp_number] = Side.ACCEPTING
            self._by_comm_id[message.source, message.local_id] = wire, Side.ACCEPTING
            self._by_qp[message.source, message.qp_number] = wire
        return wire, Side.ACCEPTING


def _hello(private_data: bytes) -> Hello | None:
    try:
        header = decode(memoryview(private_data)).header
    except PeerViolation:
        return None
    return header if isinstance(header, Hello) else None
