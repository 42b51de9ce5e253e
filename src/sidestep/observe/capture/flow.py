"""Packets to one queue pair, put together: the messages, RDMA Reads and Writes that they make.

Packets are taken in the order of their sequence numbers: what is sent again is told and left out, what is missing is
told. Acknowledgements are not told, refusals are.

The responses to an RDMA Read take numbers of the requester, as many as the path MTU that packets show asks for. The one
in a REQ is only stated: `conversation` writes packets that are larger than any code. Until packets show it, no request
behind a Read counts as sent again.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from sidestep import limits
from sidestep.observe.capture.events import Event, What, header_of
from sidestep.rdma.frames import Side
from sidestep.rdma.roce.numbers import after, ahead, packets_of
from sidestep.rdma.roce.packet import (
    ENDS,
    MTU_CODES,
    READ_RESPONSES,
    SENDS,
    STARTS,
    WRITES,
    Aeth,
    Ieth,
    Op,
    Packet,
    Reth,
    nak_text,
)

_ASSUMED_NOTE: Final = "taken for SDP by its form: no CM REQ was seen"
_FULL: Final = (SENDS | WRITES | READ_RESPONSES) - ENDS
_FORM_TRIES: Final = 8  # Sends of an unknown queue pair that are looked at before it counts as not SDP's


@dataclass
class PathMtu:
    """The path MTU, as far as packets of a connection show it."""

    exact: int = 0  # bytes of a first or middle packet, which is full (IBTA 9.7.4.1.6); 0: none was seen
    least: int = min(MTU_CODES.values())  # bytes that have fit into one packet

    def show(self, op: Op, payload_len: int) -> None:
        """Takes in a packet."""
        self.least = max(self.least, payload_len)
        if op in _FULL:
            self.exact = payload_len

    def numbers(self, length: int) -> tuple[int, int]:
        """The fewest and the most sequence numbers that the responses to an RDMA Read of so many bytes take."""
        if self.exact:
            return (count := packets_of(length, self.exact)), count
        return 1, packets_of(length, self.least)


@dataclass
class PacketConnection:
    """Two queue pairs, as far as they are known."""

    number: int
    sdp: bool
    names: dict[Side, str]
    mtu: PathMtu = field(default_factory=PathMtu)


@dataclass
class Assembly:
    """A message, or an RDMA operation, of which packets are still to come."""

    where: Reth | None = None
    kept: bytearray = field(default_factory=bytearray)
    missing: int = 0  # bytes behind what was kept
    packets: int = 0

    def add(self, payload: memoryview, missing: int) -> None:
        """Bytes that follow; behind a hole nothing is kept."""
        self.packets += 1
        if self.missing or len(self.kept) + len(payload) > limits.CAPTURE_MESSAGE_MAX:
            self.missing += len(payload) + missing
        else:
            self.kept += payload
            self.missing = missing

    @property
    def length(self) -> int:
        return len(self.kept) + self.missing


@dataclass
class PacketFlow:
    """Packets to one queue pair."""

    connection: PacketConnection | None
    sender: Side | None
    sdp: bool | None  # None: not known yet
    mtu: PathMtu = field(default_factory=PathMtu)  # the connection's, if that is known
    next_psn: int | None = None  # number that follows the last request packet
    read_len: int = 0  # bytes that this packet asked to read: the responses take the numbers that follow
    request: Assembly | None = None
    response: Assembly | None = None
    tries: int = 0


class PacketReader:
    """One packet of a flow that is SDP's, or may be."""

    def __init__(self, flow: PacketFlow, template: Event, packet: Packet, missing: int) -> None:
        self._flow, self._template, self._packet, self._missing = flow, template, packet, missing
        self._op = packet.bth.opcode

    def events(self) -> Iterator[Event]:
        self._flow.mtu.show(self._op, len(self._packet.payload) + self._missing)
        if self._op in READ_RESPONSES:
            yield from self._read_response()
        elif self._op in (Op.ACK, Op.ATOMIC_ACK, Op.CNP):
            yield from self._answer()
        elif (yield from self._in_order()):
            if self._op in SENDS:
                yield from self._send()
            elif self._op in WRITES:
                yield from self._write()
            elif self._op is Op.READ_REQUEST:
                yield from self._read_request()
            else:
                yield from self._tell(What.RDMA, f"{self._op.name.replace('_', ' ').title()}: SDP uses no atomics")

    def _tell(self, what: What, text: str) -> Iterator[Event]:
        if self._flow.sdp:
            yield replace(self._template, what=what, text=text)

    def _in_order(self) -> Generator[Event, None, bool]:
        """Whether the packet is the next one of its flow; tells of others."""
        flow, psn = self._flow, self._packet.bth.psn
        steps = 0 if flow.next_psn is None else ahead(psn, flow.next_psn)
        fewest, most = flow.mtu.numbers(flow.read_len)
        if flow.next_psn is not None and steps < fewest - 1:
            yield from self._tell(What.TRANSPORT, f"sent again: {_op_text(self._op)}, PSN {psn:#08x}")
            return False
        missing = steps - (most - 1)
        if missing > 0:
            flow.request = None
            count = "one packet before it is" if missing == 1 else f"{missing} packets before it are"
            yield from self._tell(What.TRANSPORT, f"{count} not in the capture: {_op_text(self._op)}, PSN {psn:#08x}")
        flow.next_psn, flow.read_len = after(psn, 1), 0
        return True

    def _joined(self, assembly: Assembly | None) -> Assembly | None:
        if self._op in STARTS:
            assembly = Assembly(self._packet.find(Reth))
        if assembly is not None:
            assembly.add(memoryview(self._packet.payload), self._missing)
        return assembly

    def _send(self) -> Iterator[Event]:
        flow = self._flow
        flow.request = self._joined(flow.request)
        if self._op not in ENDS:
            return
        whole, flow.request = flow.request, None
        if whole is None:
            yield from self._tell(What.TRANSPORT, "the end of a message whose beginning is not in the capture")
            return
        message = bytes(whole.kept)
        if flow.sdp is None and not self._judge(message, whole.missing):
            return
        notes = [self._template.note, _ASSUMED_NOTE if flow.connection is None else ""]
        if (invalidated := self._packet.find(Ieth)) is not None:
            notes.append(f"invalidates RKey {invalidated.rkey:#010x}")
        yield replace(
            self._template, message=message, missing=whole.missing, solicited=self._packet.bth.solicited,
            note="; ".join(note for note in notes if note),
        )  # fmt: skip

    def _judge(self, message: bytes, missing: int) -> bool:
        if header_of(message) is not None:
            self._flow.sdp = True
            return True
        self._flow.tries += not missing
        if self._flow.tries >= _FORM_TRIES:
            self._flow.sdp = False
        return False

    def _write(self) -> Iterator[Event]:
        self._flow.request = self._joined(self._flow.request)
        if self._op not in ENDS:
            return
        whole, self._flow.request = self._flow.request, None
        if whole is None or whole.where is None:
            yield from self._tell(What.TRANSPORT, "the end of a Write whose beginning is not in the capture")
        elif whole.length == 0:
            yield from self._tell(What.RDMA, "RDMA Write of 0 bytes: is the other end alive?")
        else:
            yield from self._tell(What.RDMA, f"RDMA Write: {_count(whole)} to {where_text(whole.where)}")

    def _read_request(self) -> Iterator[Event]:
        where = self._packet.find(Reth)
        if where is None:
            return
        self._flow.read_len = where.length
        yield from self._tell(What.RDMA, f"RDMA Read Request: {where.length} bytes from {where_text(where)}")

    def _read_response(self) -> Iterator[Event]:
        self._flow.response = self._joined(self._flow.response)
        if self._op not in ENDS:
            return
        whole, self._flow.response = self._flow.response, None
        if whole is None:
            yield from self._tell(
                What.TRANSPORT, "the end of an RDMA Read Response whose beginning is not in the capture"
            )
        else:
            yield from self._tell(What.RDMA, f"RDMA Read Response: {_count(whole)}")

    def _answer(self) -> Iterator[Event]:
        acknowledged = self._packet.find(Aeth)
        if self._op is Op.CNP:
            yield from self._tell(What.TRANSPORT, "congestion on the way")
        elif acknowledged is not None and (complaint := nak_text(acknowledged.syndrome)) is not None:
            yield from self._tell(What.TRANSPORT, f"{complaint}, PSN {self._packet.bth.psn:#08x}")


def where_text(where: Reth) -> str:
    return f"VA {where.va:#x}, RKey {where.rkey:#010x}"


def _count(whole: Assembly) -> str:
    return f"{whole.length} bytes in {'1 packet' if whole.packets == 1 else f'{whole.packets} packets'}"


def _op_text(op: Op) -> str:
    return op.name.replace("_", " ").capitalize()
