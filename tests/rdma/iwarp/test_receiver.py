"""The receiving half of a stream: what it refuses and with which Terminate, what it places, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from struct import pack

import pytest
from mpa_oracle import Deframer
from raw_iwarp import Terminate, frame
from wire_end import ALL, GUARD, WireEnd

from sidestep.native._framing import Inbound
from sidestep.rdma.iwarp.ddp import RdmapOp, ReadRequest, Segment
from sidestep.rdma.iwarp.mpa import fpdu
from sidestep.rdma.iwarp.terminate import Condition
from sidestep.rdma.verbs import MemoryRegion
from sidestep.rdma.work import Access, BindWindow, RdmaRead, RKey, Status

SIZE = 256  # bytes of the region that is open to the other end
ROOM = 16  # bytes of each receive
NOWHERE = 0xDEAD_BE00


@dataclass
class Scene:
    """An end with a region and two receives, one of which the first message has taken."""

    end: WireEnd
    region: MemoryRegion
    reads: list[MemoryRegion] = field(default_factory=list)  # sinks of our RDMA Reads

    def write(self, at: int, payload: bytes, *, last: bool = True, stag: int | None = None) -> Segment:
        return Segment(RdmapOp.WRITE, last, payload, self.region.rkey if stag is None else stag, self.region.va + at)

    def asking(self, length: int, *, stag: int | None = None, at: int = 0, msn: int = 1) -> Segment:
        source = self.region.rkey if stag is None else stag
        wanted = ReadRequest(77, 1000, length, source, (self.region.va + at) % 2**64)
        return Segment(RdmapOp.READ_REQUEST, True, wanted.encode(), queue=1, msn=msn)

    def read(self, length: int) -> None:
        """One of our own."""
        sink = self.end.region(length + 1, Access.LOCAL_WRITE)
        self.reads.append(sink)
        self.end.sender.requests.append(RdmaRead(9, (sink.view[:length],), 1, RKey(1)))
        self.end.taken()

    def response(self, at: int, payload: bytes, *, last: bool = True) -> Segment:
        return Segment(RdmapOp.READ_RESPONSE, last, payload, self.end.qp.sink_stag, at)

    def other_domain(self) -> int:
        return self.end.region(SIZE, domain=self.end.device.alloc_pd()).rkey

    def window(self, *, foreign: bool) -> int:
        """A window on the first region that can be bound, of this queue pair or another one."""
        region = self.end.region(SIZE, ALL | Access.WINDOW_BIND)
        window = self.end.domain.alloc_window()
        qp = self.end.queue_pair() if foreign else self.end.qp
        request = BindWindow(wr_id=1, window=window, region=region, length=SIZE, access=Access.REMOTE_WRITE)
        assert window.bind(request, qp) is None
        return window.rkey if foreign else region.rkey


@pytest.fixture
def scene() -> Iterator[Scene]:
    end = WireEnd()
    yield Scene(end, end.region(SIZE))
    end.close()


def send(payload: bytes, msn: int = 2, mo: int = 0, *, last: bool = True, op: RdmapOp = RdmapOp.SEND) -> Segment:
    return Segment(op, last, payload, msn=msn, mo=mo)


Made = bytes | Segment
Row = tuple[Callable[[Scene], Sequence[Made]], str, Condition]


def refused_sink(scene: Scene) -> list[Made]:
    scene.read(8)
    scene.reads[0].deregister()
    return [scene.response(0, b"12345678")]


def other_sink(scene: Scene) -> list[Made]:
    scene.read(8)
    return [replace(scene.response(0, b"12345678"), stag=scene.region.rkey)]


def after_read(length: int, *made: tuple[int, bytes, bool]) -> Callable[[Scene], list[Made]]:
    """Responses to a Read of so many bytes."""

    def make(scene: Scene) -> list[Made]:
        scene.read(length)
        return [scene.response(at, payload, last=last) for at, payload, last in made]

    return make


def unusable(scene: Scene) -> list[Made]:
    scene.end.receives.clear()
    scene.end.post_recv(5, ROOM)
    region = scene.end.domain.regions.difference({scene.region})
    for each in region:
        if not each.rights & Access.REMOTE_WRITE:
            each.deregister()
    return [send(b"abc")]


def window_refused(scene: Scene) -> list[Made]:
    return [scene.write(0, b"abc", stag=scene.window(foreign=True))]


def invalidating(stag: Callable[[Scene], int]) -> Callable[[Scene], list[Made]]:
    return lambda scene: [replace(send(b"abc", op=RdmapOp.SEND_INV), stag=stag(scene))]


def no_right(access: Access) -> Callable[[Scene], int]:
    return lambda scene: scene.end.region(SIZE, access).rkey


def wrapping(scene: Scene, offset: int) -> Segment:
    return replace(scene.write(0, b"12345678"), offset=offset)


def read_wrapping(scene: Scene) -> list[Made]:
    wanted = ReadRequest(77, 1000, 8, scene.region.rkey, 2**64 - 8)
    return [Segment(RdmapOp.READ_REQUEST, True, wanted.encode(), queue=1, msn=1)]


def reads_off(scene: Scene) -> list[Made]:
    scene.end.receiver.may_read = False
    return [scene.asking(8)]


def writes_off(scene: Scene) -> list[Made]:
    scene.end.receiver.may_write = False
    return [scene.write(0, b"abc")]


def in_two(segment: Segment, at: int) -> list[Made]:
    """The same message in two segments."""
    first = replace(segment, last=False, payload=segment.payload[:at])
    return [frame(first) + frame(replace(segment, payload=segment.payload[at:], mo=at))]


def flipped(segment: Segment) -> bytes:
    return frame(segment, crc_flip=1)


NONE, DDP, READ = "no header", "DDP header", "DDP and read header"

# Name: what is sent, layer/type/code and what goes with it, the condition.
ROWS: dict[str, Row] = {
    "DV, tagged": (lambda s: [frame(s.write(0, b"abc"), control=0xC2)], f"1/1/04 {DDP}", Condition.DDP_VERSION_TAGGED),
    "DV, untagged": (lambda s: [frame(send(b"abc"), control=0x40)], f"1/2/06 {DDP}", Condition.DDP_VERSION_UNTAGGED),
    "RV": (lambda s: [frame(send(b"abc"), rdmap=0x83)], f"0/2/05 {DDP}", Condition.RDMAP_VERSION),
    "RV, tagged": (lambda s: [frame(s.write(0, b"a"), rdmap=0xC0)], f"0/2/05 {DDP}", Condition.RDMAP_VERSION),
    "opcode 8": (lambda s: [frame(send(b"abc"), rdmap=0x48)], f"0/2/06 {DDP}", Condition.OPCODE_UNKNOWN),
    "opcode F": (lambda s: [frame(s.write(0, b"abc"), rdmap=0x4F)], f"0/2/06 {DDP}", Condition.OPCODE_UNKNOWN),
    "tagged Send": (lambda s: [frame(s.write(0, b"abc"), rdmap=0x43)], f"0/2/06 {DDP}", Condition.OPCODE_TAGGED),
    "untagged Write": (lambda s: [frame(send(b"abc"), rdmap=0x40)], f"0/2/06 {DDP}", Condition.OPCODE_TAGGED),
    "tagged Terminate": (lambda s: [frame(s.write(0, b"abc"), rdmap=0x47)], f"0/2/06 {DDP}", Condition.OPCODE_TAGGED),
    "no DDP header": (lambda s: [frame(send(b""), keep=17)], f"1/0/00 {NONE}", Condition.SEGMENT_SIZE),
    "no tagged header": (lambda s: [frame(s.write(0, b""), keep=13)], f"1/0/00 {NONE}", Condition.SEGMENT_SIZE),
    "nothing at all": (lambda s: [frame(send(b""), keep=0)], f"1/0/00 {NONE}", Condition.SEGMENT_SIZE),
    "Read Request, L=0": (lambda s: [replace(s.asking(8), last=False)], f"0/2/07 {DDP}", Condition.NOT_LAST),
    "Read Request in two": (lambda s: in_two(s.asking(8), 12), f"0/2/07 {DDP}", Condition.NOT_LAST),
    "Terminate, L=0": (
        lambda s: [Segment(RdmapOp.TERMINATE, False, bytes(4), queue=2, msn=1)], f"0/2/07 {DDP}", Condition.NOT_LAST,
    ),
    "Read Request, 27 bytes": (
        lambda s: [frame(s.asking(8), keep=18 + 27)], f"0/2/07 {DDP}", Condition.READ_REQUEST_MALFORMED,
    ),
    "Read Request, 29 bytes": (
        lambda s: [frame(s.asking(8), extra=b"!")], f"0/2/07 {DDP}", Condition.READ_REQUEST_MALFORMED,
    ),
    "Read Request, 60000 bytes": (
        lambda s: [frame(s.asking(8), extra=bytes(60000))], f"0/2/07 {DDP}", Condition.READ_REQUEST_MALFORMED,
    ),
    "Read Request, MO": (lambda s: [replace(s.asking(8), mo=4)], f"0/2/07 {DDP}", Condition.READ_REQUEST_MALFORMED),
    "Send on QN 1": (lambda s: [replace(send(b"abc"), queue=1)], f"1/2/01 {DDP}", Condition.QUEUE_NUMBER),
    "Send on QN 2^32-1": (lambda s: [replace(send(b"a"), queue=2**32 - 1)], f"1/2/01 {DDP}", Condition.QUEUE_NUMBER),
    "Read on QN 0": (lambda s: [replace(s.asking(8), queue=0)], f"1/2/01 {DDP}", Condition.QUEUE_NUMBER),
    "Terminate on QN 0": (
        lambda s: [Segment(RdmapOp.TERMINATE, True, bytes(4), queue=0, msn=1)], f"1/2/01 {DDP}", Condition.QUEUE_NUMBER,
    ),
    "reads disabled": (reads_off, f"1/2/01 {DDP}", Condition.READS_DISABLED),
    "no receive": (lambda s: [send(b"a"), send(b"b", 3)], f"1/2/02 {DDP}", Condition.NO_RECEIVE),
    "MSN skipped": (lambda s: [send(b"abc", 3)], f"1/2/03 {DDP}", Condition.MSN_UNEXPECTED),
    "MSN again": (lambda s: [send(b"abc", 1)], f"1/2/03 {DDP}", Condition.MSN_UNEXPECTED),
    "MSN 0": (lambda s: [send(b"abc", 0)], f"1/2/03 {DDP}", Condition.MSN_UNEXPECTED),
    "MSN changes amid a Send": (
        lambda s: [send(b"abc", last=False), send(b"def", 3, 3)], f"1/2/03 {DDP}", Condition.MSN_UNEXPECTED,
    ),
    "MSN of a Read": (lambda s: [s.asking(8, msn=2)], f"1/2/03 {DDP}", Condition.MSN_UNEXPECTED),
    "MSN of a Terminate": (
        lambda s: [Segment(RdmapOp.TERMINATE, True, bytes(4), queue=2, msn=2)], f"1/2/03 {DDP}",
        Condition.MSN_UNEXPECTED,
    ),
    "too many Reads": (
        lambda s: [s.asking(8), s.asking(8, msn=2), s.asking(8, msn=3)], f"1/2/03 {DDP}", Condition.READS_TOO_MANY,
    ),
    "too many Reads of nothing": (
        lambda s: [s.asking(0, msn=each, stag=0) for each in (1, 2, 3)], f"1/2/03 {DDP}", Condition.READS_TOO_MANY,
    ),
    "MO gap": (lambda s: [send(b"abc", last=False), send(b"e", mo=4)], f"1/2/04 {DDP}", Condition.MESSAGE_OFFSET),
    "MO overlap": (lambda s: [send(b"abc", last=False), send(b"c", mo=2)], f"1/2/04 {DDP}", Condition.MESSAGE_OFFSET),
    "MO of the first": (lambda s: [send(b"abc", mo=1)], f"1/2/04 {DDP}", Condition.MESSAGE_OFFSET),
    "MO far out": (lambda s: [send(b"abc", mo=2**32 - 1)], f"1/2/04 {DDP}", Condition.MESSAGE_OFFSET),
    "Send too long": (lambda s: [send(bytes(ROOM + 1))], f"1/2/05 {DDP}", Condition.MESSAGE_TOO_LONG),
    "receive unusable": (unusable, f"0/0/00 {NONE}", Condition.RECEIVE_UNUSABLE),
    "Write, no such STag": (lambda s: [s.write(0, b"abc", stag=NOWHERE)], f"1/1/00 {DDP}", Condition.TAGGED_STAG),
    "Write, STag 0": (lambda s: [s.write(0, b"abc", stag=0)], f"1/1/00 {DDP}", Condition.TAGGED_STAG),
    "Write, stale key": (
        lambda s: [s.write(0, b"abc", stag=s.region.rkey ^ 1)], f"1/1/00 {DDP}", Condition.TAGGED_STAG,
    ),
    "Write, sink STag": (
        lambda s: [s.write(0, b"abc", stag=s.end.qp.sink_stag)], f"1/1/00 {DDP}", Condition.TAGGED_STAG,
    ),
    "Write, before": (lambda s: [s.write(-1, b"abc")], f"1/1/01 {DDP}", Condition.TAGGED_BOUNDS),
    "Write, behind": (lambda s: [s.write(SIZE - 2, b"abc")], f"1/1/01 {DDP}", Condition.TAGGED_BOUNDS),
    "Write, other domain": (
        lambda s: [s.write(0, b"abc", stag=s.other_domain())], f"1/1/02 {DDP}", Condition.TAGGED_OTHER_STREAM,
    ),
    "Write, window of another": (window_refused, f"1/1/02 {DDP}", Condition.TAGGED_OTHER_STREAM),
    "Write, read only": (
        lambda s: [s.write(0, b"abc", stag=no_right(Access.REMOTE_READ)(s))], f"1/1/02 {DDP}", Condition.TAGGED_RIGHTS,
    ),
    "Write, writes disabled": (writes_off, f"1/1/02 {DDP}", Condition.TAGGED_RIGHTS),
    "Write wraps": (lambda s: [wrapping(s, 2**64 - 1)], f"1/1/03 {DDP}", Condition.TAGGED_WRAP),
    "Write to the last byte": (lambda s: [wrapping(s, 2**64 - 8)], f"1/1/03 {DDP}", Condition.TAGGED_WRAP),
    "STag changes": (
        lambda s: [s.write(0, b"abc", last=False), s.write(3, b"def", stag=s.end.region(SIZE).rkey)], f"1/1/00 {DDP}",
        Condition.TAGGED_STAG_CHANGED,
    ),
    "TO gap": (
        lambda s: [s.write(0, b"abc", last=False), s.write(4, b"def")], f"1/1/01 {DDP}", Condition.TAGGED_GAP,
    ),
    "another message amid a Write": (
        lambda s: [s.write(0, b"abc", last=False), s.response(0, b"abc")], f"0/2/06 {DDP}", Condition.OPCODE_UNKNOWN,
    ),
    "Response unasked": (lambda s: [s.response(0, b"abc")], f"0/2/06 {DDP}", Condition.RESPONSE_UNASKED),
    "Response unasked, empty": (lambda s: [s.response(0, b"")], f"0/2/06 {DDP}", Condition.RESPONSE_UNASKED),
    "Response, other STag": (other_sink, f"1/1/00 {DDP}", Condition.RESPONSE_STAG),
    "Response, sink taken back": (refused_sink, f"1/1/00 {DDP}", Condition.RESPONSE_STAG),
    "Response, other place": (after_read(8, (1, b"1234567", True)), f"1/1/01 {DDP}", Condition.RESPONSE_OFFSET),
    "Response, gap": (
        after_read(8, (0, b"123", False), (4, b"5678", True)), f"1/1/01 {DDP}", Condition.TAGGED_GAP,
    ),
    "Response too short": (after_read(8, (0, b"1234567", True)), f"1/1/01 {DDP}", Condition.RESPONSE_LENGTH),
    "Response too long": (after_read(8, (0, b"123456789", True)), f"1/1/01 {DDP}", Condition.RESPONSE_LENGTH),
    "Response without an end": (after_read(8, (0, b"12345678", False)), f"1/1/01 {DDP}", Condition.RESPONSE_LENGTH),
    "Response to nothing, not empty": (after_read(0, (0, b"1", True)), f"1/1/01 {DDP}", Condition.RESPONSE_LENGTH),
    "Read, no such STag": (lambda s: [s.asking(8, stag=NOWHERE)], f"0/1/00 {READ}", Condition.READ_STAG),
    "Read, STag 0": (lambda s: [s.asking(8, stag=0)], f"0/1/00 {READ}", Condition.READ_STAG),
    "Read, behind": (lambda s: [s.asking(SIZE, at=1)], f"0/1/01 {READ}", Condition.READ_BOUNDS),
    "Read, 4 GiB": (lambda s: [s.asking(2**32 - 1)], f"0/1/01 {READ}", Condition.READ_BOUNDS),
    "Read, write only": (
        lambda s: [s.asking(8, stag=no_right(Access.LOCAL_WRITE | Access.REMOTE_WRITE)(s))], f"0/1/02 {READ}",
        Condition.READ_RIGHTS,
    ),
    "Read, other domain": (
        lambda s: [s.asking(8, stag=s.other_domain())], f"0/1/03 {READ}", Condition.READ_OTHER_STREAM,
    ),
    "Read wraps": (read_wrapping, f"0/1/04 {READ}", Condition.READ_WRAP),
    "invalidate the unknown": (invalidating(lambda s: NOWHERE), f"0/2/09 {DDP}", Condition.INVALIDATE_UNKNOWN),
    "invalidate 0": (invalidating(lambda s: 0), f"0/2/09 {DDP}", Condition.INVALIDATE_UNKNOWN),
    "invalidate our sink": (invalidating(lambda s: s.end.qp.sink_stag), f"0/2/09 {DDP}", Condition.INVALIDATE_UNKNOWN),
    "invalidate another domain's": (
        invalidating(Scene.other_domain), f"0/1/09 {DDP}", Condition.INVALIDATE_OTHER_STREAM,
    ),
    "invalidate another's window": (
        invalidating(lambda s: s.window(foreign=True)), f"0/1/09 {DDP}", Condition.INVALIDATE_OTHER_STREAM,
    ),
    "invalidate without a right": (
        invalidating(no_right(Access.LOCAL_WRITE)), f"0/1/09 {DDP}", Condition.INVALIDATE_RIGHTS,
    ),
    "invalidate under a window": (
        invalidating(lambda s: s.window(foreign=False)), f"0/1/09 {DDP}", Condition.INVALIDATE_FIXED,
    ),
    "CRC": (lambda s: [flipped(s.write(0, b"abc"))], f"2/0/02 {NONE}", Condition.CRC),
}  # fmt: skip


@pytest.mark.spec("RFC 5040 7.1")
@pytest.mark.parametrize("name", ROWS)
def test_refused(scene: Scene, name: str) -> None:
    """The code, the headers; what came before is kept, of the segment nothing, and nothing is looked at afterwards."""
    end = scene.end
    make, expected, condition = ROWS[name]
    first = end.post_recv(1, ROOM)
    end.post_recv(2, ROOM)
    assert end.feed(scene.write(100, b"before"), send(b"hello", 1)) is None
    made = make(scene)
    assert end.feed(*made[:-1]) is None
    assert bytes(scene.region.view[100:106]) == b"before"
    assert bytes(first.view[:5]) == b"hello"
    before, told = end.content(), list(end.told)
    last = made[-1] if isinstance(made[-1], bytes) else frame(made[-1])
    fault = end.feed(last)
    end.feed(scene.write(0, b"behind"), send(b"behind"))
    assert fault is not None
    assert end.receiver.fault is fault
    assert fault.condition is condition
    assert end.content() == before
    assert [each for each in end.told if each[0] != "asked"] == [each for each in told if each[0] != "asked"]

    terminate = Terminate.decode(fault.message.encode())
    code, _, includes = expected.partition(" ")
    assert str(terminate) == code
    whole = b"" if includes == NONE else next(iter(Deframer(markers=False).feed(last)))
    length = 14 if whole and whole[0] & 0x80 else 18
    assert terminate.ddp_header == whole[:length]
    assert terminate.segment_len == (len(whole) if whole else None)
    assert terminate.rdmap_header == (whole[length:] if includes == READ else b"")


def test_every_condition_of_an_arriving_segment_is_in_the_table() -> None:
    ours = {"OUTGOING", "USER", "END_TOO_EARLY", "STREAM_BROKEN", "DEVICE_BROKEN", "ATOMIC_MISALIGNED", "TCP_LOST"}
    arriving = {each for each in Condition if each.name not in ours and not each.name.startswith("START_")}
    assert arriving - {row[2] for row in ROWS.values()} == {Condition.MARKER}  # of the next test


@pytest.mark.spec("RFC 5044 4.3")
def test_a_marker_that_lies(scene: Scene) -> None:
    end = scene.end
    end.inbound = Inbound(crc=False, markers=True)
    good = fpdu(scene.write(0, b"before").encode(), 0, markers=True, crc=False)
    lying = bytearray(fpdu(scene.write(0, bytes(600)).encode(), len(good), markers=True, crc=False))
    marker = 512 - len(good)
    assert lying[marker : marker + 4] == pack(">HH", 0, 512 - len(good))
    lying[marker + 3] ^= 4
    fault = end.feed(good, bytes(lying))
    assert fault is not None
    assert fault.message.encode() == bytes.fromhex("20030000")
    assert bytes(scene.region.view[:8]) == b"before\0\0"


@pytest.mark.spec("RFC 5041 6.2")
def test_segments_of_a_write_before_the_one_that_is_refused_are_placed(scene: Scene) -> None:
    """They come in one run, and are told apart."""
    pieces = [scene.write(at, bytes([at + 1]) * 64, last=at == 192) for at in (0, 64, 128, 192)]
    pieces = [replace(each, offset=each.offset + 100) for each in pieces]
    fault = scene.end.feed(b"".join(map(frame, pieces)))
    assert fault is not None
    assert (fault.condition, fault.header) == (Condition.TAGGED_BOUNDS, pieces[2].encode()[:14])
    assert bytes(scene.region.view[100:228]) == b"\1" * 64 + b"\x41" * 64
    assert not any(scene.region.view[228:])
    assert not any(scene.end.buffers[0][-GUARD:])


def test_a_segment_of_nothing_before_the_one_that_is_refused(scene: Scene) -> None:
    """Both in one run."""
    size = scene.region.length
    fault = scene.end.feed(frame(scene.write(size, b"", last=False)) + frame(scene.write(size, b"x")))
    assert fault is not None
    assert fault.condition is Condition.TAGGED_BOUNDS
    assert fault.message.segment_len == 15


@pytest.mark.parametrize("kind", ["send", "response"])
def test_the_segment_that_runs_over_is_the_one_that_is_told(scene: Scene, kind: str) -> None:
    end = scene.end
    if kind == "send":
        region = end.post_recv(1, ROOM)
        pieces = [send(bytes([7]) * 6, 1, at, last=at == 18) for at in (0, 6, 12, 18)]
    else:
        scene.read(ROOM)
        region = scene.reads[0]
        pieces = [scene.response(at, bytes([7]) * 6, last=at == 18) for at in (0, 6, 12, 18)]
    fault = end.feed(b"".join(map(frame, pieces)))
    assert fault is not None
    assert fault.condition in (Condition.MESSAGE_TOO_LONG, Condition.RESPONSE_LENGTH)
    assert fault.header == pieces[2].encode()[: len(fault.header)]
    assert fault.status is (Status.LOCAL_LENGTH_ERROR if kind == "send" else Status.FLUSHED)
    assert not any(region.view[ROOM:])
    assert not any(end.buffers[-1][GUARD + len(region.view) :])


@pytest.mark.spec("RFC 5041 5.2")
def test_of_nothing_neither_key_nor_address_is_looked_at(scene: Scene) -> None:
    end = scene.end
    end.receiver.may_read = end.receiver.may_write = False
    nothing = ReadRequest(1, 2, 0, NOWHERE, 2**64 - 1).encode()
    assert end.feed(
        Segment(RdmapOp.WRITE, True, b"", NOWHERE, 2**64 - 1),
        Segment(RdmapOp.READ_REQUEST, True, nothing, queue=1, msn=1),
    ) is None  # fmt: skip
    (answer,) = Deframer(markers=False).feed(end.taken())
    assert Segment.decode(answer) == Segment(RdmapOp.READ_RESPONSE, True, b"", 1, 2)


def test_a_segment_of_nothing_amid_a_write_changes_nothing(scene: Scene) -> None:
    """Not even what is expected next: else an STag could change within a message."""
    other = scene.end.region(SIZE)
    fault = scene.end.feed(
        scene.write(0, b"abc", last=False),
        replace(scene.write(9, b"", last=False), stag=other.rkey),
        replace(scene.write(3, b"def"), stag=other.rkey),
    )
    assert fault is not None
    assert fault.condition is Condition.TAGGED_STAG_CHANGED


@pytest.mark.spec("RFC 5041 5.2")
def test_a_segment_of_nothing_that_begins_a_write_names_nothing(scene: Scene) -> None:
    assert scene.end.feed(
        Segment(RdmapOp.WRITE, False, b"", NOWHERE, 2**64 - 1),
        scene.write(3, b"abc", last=False),
        Segment(RdmapOp.WRITE, False, b"", NOWHERE, 0),
        scene.write(6, b"def"),
    ) is None  # fmt: skip
    assert bytes(scene.region.view[:10]) == b"\0\0\0abcdef\0"


def test_a_segment_of_nothing_that_begins_a_write_begins_one(scene: Scene) -> None:
    scene.read(3)
    fault = scene.end.feed(Segment(RdmapOp.WRITE, False), scene.response(0, b"abc"))
    assert fault is not None
    assert fault.condition is Condition.OPCODE_UNKNOWN


@pytest.mark.spec("RFC 5042 6.2.2")
@pytest.mark.parametrize("how", ["deregister", "invalidate", "rekey"])
def test_memory_taken_back_amid_a_message_is_not_written_any_more(scene: Scene, how: str) -> None:
    end = scene.end
    receive = end.post_recv(1, ROOM)
    assert end.feed(scene.write(0, b"abc", last=False)) is None
    more = scene.write(3, b"def")
    getattr(scene.region, how)()
    fault = end.feed(more)
    assert fault is not None
    assert fault.condition is Condition.TAGGED_STAG
    assert bytes(end.buffers[0][GUARD : GUARD + 6]) == b"abc\0\0\0"
    other = WireEnd()
    receive = other.post_recv(1, ROOM)
    assert other.feed(send(b"abc", 1, last=False)) is None
    receive.deregister()
    fault = other.feed(send(b"def", 1, 3))
    assert fault is not None
    assert (fault.condition, fault.status) == (Condition.RECEIVE_UNUSABLE, Status.LOCAL_PROTECTION_ERROR)
    assert bytes(other.buffers[0][GUARD : GUARD + 6]) == b"abc\0\0\0"
    other.close()
