"""What a software RNIC counts, and by which names it is told.

Bytes and messages are counted for each stream by the opcode of their messages (RFC 5040 4.3), as plain numbers on the
data path; what happens seldom is counted by name and reason for the whole device. `IwarpDevice.counters` puts both
together, and what there is at the moment.
"""

from __future__ import annotations

from typing import Final

from sidestep.rdma.iwarp.ddp import RdmapOp

OPERATIONS: Final = tuple(op.name.lower() for op in RdmapOp)
EVENTS: Final = {
    "connection_made": "connections established, by who asked: this end (active) or the other one (passive)",
    "connection_refused": "attempts of this end that the other end refused, by cause",
    "connection_failed": "attempts of either end that came to nothing, by cause",
    "connection_broken": "established connections that were lost",
    "request_rejected": "requests of others that were refused here, by cause",
    "half_open_dropped": "TCP connections dropped because too many had sent no MPA Request yet",
    "terminate_sent": "Terminate messages sent, by code",
    "terminate_received": "Terminate messages received, by code",
    "completion_failed": "work requests completed with an error, by status",
}
TRAFFIC: Final = {
    "messages_sent": "messages framed whole, by operation",
    "messages_received": "messages delivered, by operation",
    "bytes_sent": "bytes of payload framed, by operation",
    "bytes_received": "bytes of payload delivered, by operation",
    "segments_received": "DDP segments delivered, an FPDU each",
    "stream_bytes_sent": "bytes of FPDUs that TCP has taken",
    "stream_bytes_received": "bytes of FPDUs that came from TCP",
}
PRESENT: Final = {
    "connections": "connections at the moment, those that are being made or ended among them",
    "listeners": "listeners at the moment",
    "half_open": "TCP connections without an MPA Request at the moment",
    "requests_pending": "connection requests that no user has answered yet",
    "queue_pairs": "queue pairs at the moment",
    "regions": "memory regions at the moment",
    "windows": "memory windows at the moment",
    "address_handles": "address handles at the moment, of datagrams",
    "pinned_bytes": "bytes that a device of the kernel pins at the moment, in whole pages",
    "keys": "keys held at the moment: of regions, windows and read sinks",
    "captures": "captures at the moment",
}
NAMES: Final = TRAFFIC | EVENTS | PRESENT


class StreamTally:
    """Messages and bytes of one stream, or of many; lists are indexed by opcode."""

    __slots__ = (
        "bytes_received", "bytes_sent", "messages_received", "messages_sent", "segments_received",
        "stream_bytes_received", "stream_bytes_sent",
    )  # fmt: skip

    def __init__(self) -> None:
        self.bytes_received = [0] * 8
        self.bytes_sent = [0] * 8
        self.messages_received = [0] * 8
        self.messages_sent = [0] * 8
        self.segments_received = 0
        self.stream_bytes_received = self.stream_bytes_sent = 0

    def add(self, other: StreamTally) -> None:
        for name in self.__slots__:
            mine, its = getattr(self, name), getattr(other, name)
            if isinstance(mine, list):
                setattr(self, name, [one + two for one, two in zip(mine, its, strict=True)])
            else:
                setattr(self, name, mine + its)

    def as_json(self) -> dict[str, int]:
        """All that are not zero, as `name` or `name{operation}`."""
        found: dict[str, int] = {}
        for name in TRAFFIC:
            value = getattr(self, name)
            if isinstance(value, list):
                found |= {f"{name}{{{OPERATIONS[opcode]}}}": n for opcode, n in enumerate(value) if n}
            elif value:
                found[name] = value
        return found
