"""What a peer can do wrong once a connection is up: each with what the standards answer.

The other end is `guest/verbs_consumer.py` or anything that tells its memory in the same way. `Defect.commit` sends what
is wrong; the rest of the connection is as it should be. `Defect.answer` is the code that RFC 5040, 5041, 5044 and 6580
name for it, and where they leave a choice or name none, the most fitting one (docs/internals/devices.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from raw_iwarp import RawPeer, frame

from sidestep.rdma.iwarp.ddp import RdmapOp, ReadRequest, Segment


@dataclass(frozen=True, slots=True)
class Place:
    """Memory of the other end."""

    address: int
    stag: int


Memory: TypeAlias = Mapping[str, Place]  # both, readable, writable, local, foreign: what this peer may do there
Commit: TypeAlias = Callable[[RawPeer, Memory], None]

MEMORY_LEN: Final = 4096  # bytes of each
RECEIVE_LEN: Final = 64  # bytes of each posted receive
DEPTH: Final = 4  # Read Requests that either end takes at a time
SINK_STAG: Final = 0x5151_0000
SINK_ADDRESS: Final = 0x1000
TOO_MANY_READS: Final = "more Read Requests than the depth"
READ_LEN: Final = 8  # bytes that the other end reads from this one
_DATA: Final = b"0123456789abcdef"


@dataclass(frozen=True, slots=True)
class Defect:
    """One of them."""

    name: str
    answer: str  # layer/type/code of the Terminate that is due
    commit: Commit
    receives: int = 1  # posted by the other end
    reads: bool = False  # whether the other end has a Read Request outstanding


def _send(**wrong: Any) -> Commit:
    def commit(peer: RawPeer, memory: Memory) -> None:
        peer.send(replace(peer.untagged(RdmapOp.SEND, _DATA), **wrong))

    return commit


def _frame(**wrong: Any) -> Commit:
    """A Send whose frame is wrong."""

    def commit(peer: RawPeer, memory: Memory) -> None:
        peer.send(peer.untagged(RdmapOp.SEND, _DATA), **wrong)

    return commit


def _short(keep: int) -> Commit:
    """A Send of so many bytes, and a whole one behind it."""

    def commit(peer: RawPeer, memory: Memory) -> None:
        peer.send(peer.untagged(RdmapOp.SEND, _DATA), keep=keep)
        peer.send(peer.untagged(RdmapOp.SEND, _DATA))

    return commit


def _write(
    name: str, at: int = 0, *, stag: Callable[[int], int] = lambda own: own, address: int | None = None, **wrong: Any
) -> Commit:
    def commit(peer: RawPeer, memory: Memory) -> None:
        place = memory[name]
        offset = place.address + at if address is None else address
        peer.send(Segment(RdmapOp.WRITE, last=True, payload=_DATA, stag=stag(place.stag), offset=offset), **wrong)

    return commit


def _two_writes(**second: Any) -> Commit:
    """Two segments of one Write; the second continues the first but for what is said."""

    def commit(peer: RawPeer, memory: Memory) -> None:
        place = memory["both"]
        peer.send(Segment(RdmapOp.WRITE, False, _DATA, place.stag, place.address))
        after = Segment(RdmapOp.WRITE, True, _DATA, place.stag, place.address + len(_DATA))
        changes = {name: value(memory) if callable(value) else value for name, value in second.items()}
        peer.send(replace(after, **changes))

    return commit


def _two_sends(**second: Any) -> Commit:
    """Two segments of one Send."""

    def commit(peer: RawPeer, memory: Memory) -> None:
        message = peer.untagged(RdmapOp.SEND, _DATA)
        peer.send(replace(message, last=False))
        peer.send(replace(message, **{"mo": len(_DATA), **second}))

    return commit


def _read(
    name: str, at: int = 0, length: int = 16, *, stag: Callable[[int], int] = lambda own: own, **more: Any
) -> Commit:
    """A Read Request; `keep`, `extra` and `address` are of the frame, everything else of its segment."""
    address = more.pop("address", None)
    of_frame = {key: more.pop(key) for key in ("keep", "extra", "control") if key in more}

    def commit(peer: RawPeer, memory: Memory) -> None:
        place = memory[name]
        source = place.address + at if address is None else address
        asked = ReadRequest(SINK_STAG, SINK_ADDRESS, length, stag(place.stag), source)
        peer.send(replace(peer.untagged(RdmapOp.READ_REQUEST, asked.encode()), **more), **of_frame)

    return commit


def _response(length: int = READ_LEN, *, last: bool = True, stag: int = 0, at: int = 0) -> Commit:
    """The answer to the other end's Read Request, or to none."""

    def commit(peer: RawPeer, memory: Memory) -> None:
        place = memory["both"]
        where = (place.stag ^ stag, place.address + at)
        peer.send(Segment(RdmapOp.READ_RESPONSE, last, bytes(length), *where))

    return commit


def _invalidate(name: str, stag: Callable[[int], int] = lambda own: own) -> Commit:
    def commit(peer: RawPeer, memory: Memory) -> None:
        peer.send(peer.untagged(RdmapOp.SEND_INV, _DATA, stag(memory[name].stag)))

    return commit


def _too_many_reads(peer: RawPeer, memory: Memory) -> None:
    place = memory["both"]
    asked = ReadRequest(SINK_STAG, SINK_ADDRESS, MEMORY_LEN, place.stag, place.address)
    requests = [peer.untagged(RdmapOp.READ_REQUEST, asked.encode()) for _ in range(16 * DEPTH)]
    peer.socket.sendall(b"".join(frame(one, crc=peer.crc) for one in requests))


def _terminate(**wrong: Any) -> Commit:
    def commit(peer: RawPeer, memory: Memory) -> None:
        peer.send(replace(peer.untagged(RdmapOp.TERMINATE, bytes(4)), **wrong))

    return commit


def _unknown(stag: int) -> int:
    return stag ^ 0x0055_5500


def _other_key(stag: int) -> int:
    return stag ^ 1


_WRAP: Final = 2**64 - 8

DEFECTS: Final = (
    Defect("checksum of a Send", "2/0/02", _frame(crc_flip=1)),
    Defect("checksum of a Write", "2/0/02", _write("both", crc_flip=1)),
    Defect("DDP version 2, untagged", "1/2/06", _frame(control=0x42)),
    Defect("DDP version 0, untagged", "1/2/06", _frame(control=0x40)),
    Defect("DDP version 2, tagged", "1/1/04", _write("both", control=0xC2)),
    Defect("RDMAP version 2", "0/2/05", _frame(rdmap=0x83)),
    Defect("RDMAP version 0", "0/2/05", _frame(rdmap=0x03)),
    Defect("opcode 8", "0/2/06", _frame(rdmap=0x48)),
    Defect("opcode 15", "0/2/06", _frame(rdmap=0x4F)),
    Defect("Send that is tagged", "0/2/06", _frame(control=0xC1)),
    Defect("Write that is untagged", "0/2/06", _write("both", control=0x41)),
    Defect("segment of 1 byte", "1/0/00", _short(1)),
    Defect("segment of 10 bytes", "1/0/00", _short(10)),
    Defect("segment of 17 bytes", "1/0/00", _short(17)),
    Defect("Send on queue 1", "1/2/01", _send(queue=1)),
    Defect("Send on queue 2", "1/2/01", _send(queue=2)),
    Defect("Send on queue 3", "1/2/01", _send(queue=3)),
    Defect("MSN one too high", "1/2/03", _send(msn=3)),
    Defect("MSN of the message before", "1/2/03", _send(msn=1)),
    Defect("MSN 0", "1/2/03", _send(msn=0)),
    Defect("no receive posted", "1/2/02", _send(), receives=0),
    Defect("MO not 0 at the start", "1/2/04", _send(mo=4)),
    Defect("gap in MO", "1/2/04", _two_sends(mo=len(_DATA) + 4)),
    Defect("MO twice", "1/2/04", _two_sends(mo=0)),
    Defect("other MSN within a message", "1/2/03", _two_sends(msn=3), receives=2),
    Defect("other opcode within a message", "0/2/06", _two_sends(op=RdmapOp.SEND_SE)),
    Defect("Send longer than the receive", "1/2/05", _send(payload=bytes(RECEIVE_LEN + 1))),
    Defect("Send longer than the receive, in its second segment", "1/2/05", _two_sends(payload=bytes(RECEIVE_LEN))),
    Defect("Write to no STag", "1/1/00", _write("both", stag=_unknown)),
    Defect("Write with the wrong key", "1/1/00", _write("both", stag=_other_key)),
    Defect("Write to STag 0", "1/1/00", _write("both", stag=lambda _: 0)),
    Defect("Write beyond the end", "1/1/01", _write("both", MEMORY_LEN - 8)),
    Defect("Write behind the end", "1/1/01", _write("both", MEMORY_LEN)),
    Defect("Write before the start", "1/1/01", _write("both", -8)),
    Defect("Write whose TO wraps", "1/1/03", _write("both", address=_WRAP)),
    Defect("Write into another domain", "1/1/02", _write("foreign")),
    Defect("Write without the right", "1/1/02", _write("readable")),
    Defect("Write to local memory", "1/1/02", _write("local")),
    Defect("other STag within a Write", "1/1/00", _two_writes(stag=lambda memory: memory["writable"].stag)),
    Defect("gap in a Write", "1/1/01", _two_writes(offset=lambda memory: memory["both"].address + 64)),
    Defect("Read Response within a Write", "0/2/06", _two_writes(op=RdmapOp.READ_RESPONSE)),
    Defect("Read from no STag", "0/1/00", _read("both", stag=_unknown)),
    Defect("Read with the wrong key", "0/1/00", _read("both", stag=_other_key)),
    Defect("Read beyond the end", "0/1/01", _read("both", MEMORY_LEN - 8)),
    Defect("Read before the start", "0/1/01", _read("both", -8)),
    Defect("Read whose TO wraps", "0/1/04", _read("both", address=_WRAP)),
    Defect("Read from another domain", "0/1/03", _read("foreign")),
    Defect("Read without the right", "0/1/02", _read("writable")),
    Defect("Read from local memory", "0/1/02", _read("local")),
    Defect("Read Request on queue 0", "1/2/01", _read("both", queue=0, msn=2)),
    Defect("Read Request with MSN 2", "1/2/03", _read("both", msn=2)),
    Defect("Read Request with MO 4", "0/2/07", _read("both", mo=4)),
    Defect("Read Request without L", "0/2/07", _read("both", last=False)),
    Defect("Read Request of 24 bytes", "0/2/07", _read("both", keep=18 + 24)),
    Defect("Read Request of 32 bytes", "0/2/07", _read("both", extra=bytes(4))),
    Defect(TOO_MANY_READS, "1/2/03", _too_many_reads),
    Defect("Read Response to nothing", "0/2/06", _response()),
    Defect("Read Response to another STag", "1/1/00", _response(stag=0x100), reads=True),
    Defect("Read Response to another place", "1/1/01", _response(at=8), reads=True),
    Defect("Read Response too long", "1/1/01", _response(READ_LEN + 8), reads=True),
    Defect("Read Response too short", "1/1/01", _response(READ_LEN - 4), reads=True),
    Defect("Invalidate of no STag", "0/2/09", _invalidate("both", _unknown)),
    Defect("Invalidate in another domain", "0/1/09", _invalidate("foreign")),
    Defect("Terminate on queue 0", "1/2/01", _terminate(queue=0, msn=2)),
    Defect("Terminate with MSN 2", "1/2/03", _terminate(msn=2)),
)
