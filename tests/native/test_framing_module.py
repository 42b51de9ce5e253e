"""sidestep.native._framing: what goes out and what is found, against the slow reading of the same formats."""

from __future__ import annotations

import errno
import gc
import re
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from common import pattern
from framing_oracle import Message, Reader
from hypothesis import given, settings
from hypothesis import strategies as st
from iwarp_vectors import frames

from sidestep import limits
from sidestep.native import _framing, layout
from sidestep.native._framing import Inbound, Outbound, crc32c, crc32c_by, crc32c_implementations
from sidestep.rdma.iwarp.mpa import crc32c as slow_crc32c
from sidestep.rdma.iwarp.mpa import fpdu, frame_len

FPDU_MAX = _framing.FPDU_MAX
U32 = st.integers(0, (1 << 32) - 1)
SETTINGS = [(crc, markers) for crc in (True, False) for markers in (True, False)]
modes = pytest.mark.parametrize(("crc", "markers"), SETTINGS, ids=["crc-markers", "crc", "markers", "bare"])


def pieces(whole: bytes, cuts: list[int]) -> Iterator[bytes]:
    for start, end in pairwise([0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]):
        yield whole[start:end]


def put(
    out: Outbound, message: Message, begin: int, end: int, last: bool, gather: tuple[bytes, ...], copy: bool
) -> None:
    if message.tagged:
        out.tagged(message.rdmap, message.stag, message.to, gather, begin, end, last, copy)
    else:
        out.untagged(message.rdmap, message.stag, message.queue, message.msn, gather, begin, end, last, copy)


# ---- checksum ----


@pytest.mark.slow
@pytest.mark.parametrize("name", crc32c_implementations())
@pytest.mark.spec("RFC 3720 B.4")
def test_checksum_of_every_length(name: str) -> None:
    """Every way through the wide forms, from every alignment."""
    data = pattern(2600)
    for length in [*range(1100), 1448, 2047, 2500]:
        view = memoryview(data)[length % 67 :][:length]
        assert crc32c_by(name, view, length) == slow_crc32c(view, length), length
    assert crc32c_by(name, b"123456789") == 0xE3069283
    assert crc32c_by(name, b"") == 0


@pytest.mark.slow
@given(st.binary(max_size=3000), st.integers(0, 3000), U32)
def test_checksum_goes_on(data: bytes, cut: int, start: int) -> None:
    whole = slow_crc32c(data, start)
    for name in crc32c_implementations():
        assert crc32c_by(name, data[cut:], crc32c_by(name, data[:cut], start)) == whole
    assert crc32c(data, start) == whole


def test_checksum_of_much() -> None:
    """Of so much that other threads may run meanwhile."""
    data = pattern(3 << 20)
    assert len({crc32c_by(name, data) for name in crc32c_implementations()}) == 1
    assert crc32c(memoryview(data)[: 1 << 20]) == crc32c_by("portable", data[: 1 << 20])


def test_implementations() -> None:
    assert crc32c_implementations()[-1] == "portable"
    with pytest.raises(ValueError, match="this CPU has no 'abacus'"):
        crc32c_by("abacus", b"")


# ---- Outbound ----


@st.composite
def messages(draw: st.DrawFn, size_max: int = 3000) -> Message:
    payload = pattern(draw(st.one_of(st.integers(0, 300), st.integers(0, size_max))), draw(st.integers(0, 9)))
    if draw(st.booleans()):
        to = draw(st.one_of(st.integers(0, 1 << 32), st.integers((1 << 64) - 2000, (1 << 64) - 1)))
        return Message(True, draw(st.integers(0, 255)), draw(U32), payload, to=to)
    return Message(False, draw(st.integers(0, 255)), draw(U32), payload, queue=draw(U32), msn=draw(U32))


@pytest.mark.slow
@settings(deadline=None)
@given(data=st.data(), crc=st.booleans(), markers=st.booleans())
def test_what_goes_out(data: st.DataObject, crc: bool, markers: bool) -> None:
    """Any messages, in any parts, from memory in any pieces, taken in any amounts."""
    out = Outbound(data.draw(st.integers(128, 2000)), crc=crc, markers=markers)
    expected, taken = b"", b""
    for message in data.draw(st.lists(messages(), max_size=5)):
        out.mulpdu = data.draw(st.one_of(st.integers(128, 2000), st.integers(128, 64768)))
        gather = tuple(pieces(message.payload, data.draw(st.lists(st.integers(0, 3000), max_size=4))))
        parts = sorted({len(message.payload), *data.draw(st.lists(st.integers(0, len(message.payload)), max_size=2))})
        begin = 0
        for end in parts:
            last = end == parts[-1]
            expected += message.frames(len(expected), out.mulpdu, begin, end, last, crc=crc, markers=markers)
            put(out, message, begin, end, last, gather, data.draw(st.booleans()))
            assert (out.position, out.waiting) == (len(expected), len(expected) - len(taken))
            begin = end
        if data.draw(st.booleans()):
            taken += out.take(data.draw(st.integers(0, 4000)))
        if data.draw(st.booleans()):
            out.own()
        assert out.peek() == expected[len(taken) :]
    while part := out.take(data.draw(st.integers(1, 4000))):
        taken += part
    assert taken == expected
    assert (out.waiting, out.written, out.rest) == (0, len(expected), 0)


@pytest.mark.slow
@modes
def test_large_messages_go_out(crc: bool, markers: bool) -> None:
    payload = pattern(200_000)
    message = Message(False, 0x43, 0, payload, msn=7)
    for mulpdu in (128, 1442, 8942, 64768):
        out = Outbound(mulpdu, crc=crc, markers=markers)
        put(out, message, 0, len(payload), True, (payload[:70_001], b"", payload[70_001:]), False)
        expected = message.frames(0, mulpdu, 0, len(payload), True, crc=crc, markers=markers)
        assert out.take(1 << 30) == expected
        read_back(expected, message, crc=crc, markers=markers)


def read_back(stream: bytes, message: Message, *, crc: bool, markers: bool) -> None:
    found, payload = Inbound(crc=crc, markers=markers), b""
    view = memoryview(stream)
    while view:
        view = view[found.feed(view) :]
        for run in found.parse():
            assert run.offset == len(payload)
            payload += found.payload(run)
    assert payload == message.payload
    assert (found.pending, found.position, found.fault) == (0, len(stream), None)


@modes
@pytest.mark.spec("RFC 5044 4.3")
def test_every_length_at_every_place_between_markers(crc: bool, markers: bool) -> None:
    out, found = Outbound(2100, crc=crc, markers=markers), Inbound(crc=crc, markers=markers)
    payload = pattern(2000)
    stream = b""
    for length in range(0, 2000, 3):
        out.untagged(0x43, 0, 0, length, (payload,), 0, length, True)
        frame = out.take(1 << 20)
        if length % 21 == 0:
            message = Message(False, 0x43, 0, payload, msn=length)
            assert frame == message.frames(len(stream), 2100, 0, length, True, crc=crc, markers=markers)
        assert len(frame) == frame_len(length + 18, len(stream), markers=markers)
        stream += frame
        found.feed(frame)
        (run,) = found.parse()
        assert (found.payload(run), run.msn) == (payload[:length], length)


VECTORS = {name: whole for name, whole in frames().items() if name >= "T08"}
PLACES = {"T28": 0, "T29": 0x1EC, "T30": 0, "T31n": 520, "T32b": 480, "T32c": 512, "T33": 0}
BEFORE = {0: [], 0x1EC: [464], 520: [487], 480: [452], 512: [452, 8]}  # payload that brings a direction there


@pytest.mark.parametrize("name", VECTORS)
def test_vectors(name: str) -> None:
    markers, crc = name in PLACES, name != "T21"
    out, found = Outbound(64768, crc=crc, markers=markers), Inbound(crc=crc, markers=markers)
    for length in BEFORE[PLACES.get(name, 0)]:
        payload = bytes(index & 0xFF for index in range(length)) if length == 487 else bytes(length)
        msn = 1 if length != 8 else 2
        out.untagged(0x43, 0, 0, msn, (payload,), 0, length, True)
    assert out.waiting == PLACES.get(name, 0)
    found.feed(out.take(1 << 20))
    found.parse()

    assert found.feed(VECTORS[name]) == len(VECTORS[name])
    (run,) = found.parse()
    payload = found.payload(run)
    ((header, length),) = found.segments(run)
    assert length == len(header) + len(payload)
    begin = run.offset if not run.control & 0x80 else 0
    gather = (bytes(begin), payload)
    if run.control & 0x80:
        out.tagged(run.rdmap, run.stag, run.offset, gather, 0, len(payload), run.last)
    else:
        out.untagged(run.rdmap, run.stag, run.queue, run.msn, gather, begin, begin + len(payload), run.last)
    assert out.take(1 << 20) == VECTORS[name]


def test_a_message_worked_out() -> None:
    """RFC 5041 5.2."""
    payload = pattern(2048)
    out, found = Outbound(1500, crc=True, markers=False), Inbound(crc=True, markers=False)
    out.untagged(0x43, 0, 0, 1, (payload,), 0, 2048, True)
    out.tagged(0x40, 5, 16384, (payload,), 0, 2048, True)
    found.feed(out.take(1 << 20))
    untagged, tagged = found.parse()
    assert [length - 18 for _, length in found.segments(untagged)] == [1482, 566]
    assert [(int.from_bytes(header[6:]), length - 14) for header, length in found.segments(tagged)] == [
        (16384, 1486), (17870, 562),
    ]  # fmt: skip


@modes
def test_what_an_fpdu_still_has(crc: bool, markers: bool) -> None:
    """Wherever what is written ends: `rest` is as much as `clear` leaves."""
    payload = pattern(1500)
    message = Message(False, 0x43, 0, payload, msn=7)
    whole = message.frames(0, 600, 0, len(payload), True, crc=crc, markers=markers)
    for size in range(0, len(whole) + 1, 7):
        out = Outbound(600, crc=crc, markers=markers)
        put(out, message, 0, len(payload), True, (payload,), False)
        out.take(size)
        rest = out.rest
        frames = Inbound(crc=crc, markers=markers)
        frames.feed(whole[: size + rest])
        frames.parse()
        assert frames.pending == 0, "it ends where an FPDU does"
        frames = Inbound(crc=crc, markers=markers)
        frames.feed(whole[:size])
        frames.parse()
        begun = frames.staged()
        assert (len(begun), bool(begun)) == (frames.pending, rest > 0)
        assert whole[frames.position :].startswith(begun)
        out.clear()
        assert out.waiting == rest


# ---- Inbound ----


@st.composite
def segments(draw: st.DrawFn) -> list[bytes]:
    """Segments of which many continue the one before, and some almost do."""
    made: list[bytes] = []
    offset = draw(st.sampled_from([0, 100, (1 << 32) - 40, (1 << 64) - 60]))
    tagged, fields = draw(st.booleans()), [0x40, 1, 2, 3]
    for _ in range(draw(st.integers(0, 12))):
        change = draw(st.integers(0, 15))
        if change < 4:
            fields[change] += 1
        elif change == 4:
            tagged = not tagged
        elif change == 5:
            offset += draw(st.integers(-1, 1))
        payload = pattern(draw(st.one_of(st.integers(0, 40), st.integers(0, 1500))), draw(st.integers(0, 5)))
        message = Message(tagged, fields[0] & 0xFF, fields[1], b"", offset % (1 << 64), fields[2], fields[3])
        header = bytearray(message.header(0 if tagged else offset % (1 << 32), draw(st.integers(0, 4)) == 0))
        if draw(st.integers(0, 9)) == 0:
            header[0] ^= draw(st.sampled_from([1, 2, 4, 0x38]))
        made.append(bytes(header) + payload)
        if draw(st.integers(0, 30)) == 0:
            made[-1] = made[-1][: draw(st.integers(0, 17))]
        offset += len(payload)
    return made


def compare(found: Inbound, reader: Reader, stream: bytes, cuts: list[int]) -> None:
    """The same runs, the same fault, of any pieces."""
    index = 0
    for piece in pieces(stream, cuts):
        rest = memoryview(piece)
        while rest:
            took = found.feed(rest)
            expected = reader.feed(bytes(rest[:took]))
            rest = rest[took:]
            runs = found.parse()
            assert [(*run[:8], run.last) for run in runs] == [one.fields for one in expected]
            assert [run.index for run in runs] == list(range(index, index + len(runs)))
            index += len(runs)
            for run, one in zip(runs, expected, strict=True):
                assert found.payload(run) == one.payload
                assert tuple(found.segments(run)) == one.headers
                assert run == (*run[:8], run.index, run.last)
            assert (found.fault, found.pending) == (reader.fault, reader.pending)


@pytest.mark.slow
@settings(deadline=None)
@given(segments(), st.booleans(), st.booleans(), st.lists(st.integers(0, 6000), max_size=12), st.data())
def test_what_is_found(ulpdus: list[bytes], crc: bool, markers: bool, cuts: list[int], data: st.DataObject) -> None:
    stream = bytearray()
    for ulpdu in ulpdus:
        stream += fpdu(ulpdu, len(stream), markers=markers, crc=crc)
    if stream and data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(stream) - 1))
        stream[at] ^= 1 << data.draw(st.integers(0, 7))
    reader, found = Reader(crc=crc, markers=markers), Inbound(crc=crc, markers=markers)
    compare(found, reader, bytes(stream), cuts)


@pytest.mark.slow
@settings(deadline=None)
@given(st.binary(max_size=3000), st.booleans(), st.booleans(), st.lists(st.integers(0, 3000), max_size=5))
def test_garbage_is_found_to_be_the_same(stream: bytes, crc: bool, markers: bool, cuts: list[int]) -> None:
    compare(Inbound(crc=crc, markers=markers), Reader(crc=crc, markers=markers), stream, cuts)


def runs_of(*ulpdus: bytes) -> list[tuple[int, int]]:
    """Segments and bytes of payload of each."""
    found = Inbound(crc=False, markers=False)
    found.feed(b"".join(fpdu(ulpdu, 0, crc=False) for ulpdu in ulpdus))
    return [(run.segments, run.length) for run in found.parse()]


@pytest.mark.parametrize("tagged", [True, False])
def test_what_a_run_is_of(tagged: bool) -> None:
    """Of segments that differ in no field, but in L of the last, and go on where the one before ends."""
    size = 14 if tagged else 18
    offset = 100
    one = bytes([tagged << 7 | 1, 0x40]) + bytes(range(size - 6)) + offset.to_bytes(4)

    def after(length: int) -> bytes:
        return one[:-4] + (offset + length).to_bytes(4)

    def last(header: bytes) -> bytes:
        return bytes([header[0] | 0x40]) + header[1:]

    assert runs_of(one + b"12345", after(5) + b"678", last(after(8)) + b"9") == [(3, 9)]
    assert runs_of(one + b"12345", after(5), after(5) + b"6") == [(3, 6)]
    assert runs_of(last(one) + b"12345", after(5) + b"678") == [(1, 5), (1, 3)]
    for index in range(size):
        other = bytearray(after(5))
        other[index] ^= 0x80 if index else 0x20
        assert runs_of(one + b"12345", bytes(other) + b"678") == [(1, 5), (1, 3)], index
    for length in (0, 4, 6):
        assert runs_of(one + b"12345", after(length) + b"678") == [(1, 5), (1, 3)]


def test_no_run_goes_round() -> None:
    """What ends at 2^64, or at 2^32 of a message, is not continued at 0."""
    tagged, untagged = Message(True, 0x40, 1, b"", to=(1 << 64) - 5), Message(False, 0x43, 0, b"")
    assert runs_of(tagged.header(0, False) + b"12345", tagged.header(5, False) + b"6") == [(1, 5), (1, 1)]
    assert runs_of(untagged.header((1 << 32) - 5, False) + b"12345", untagged.header(0, False) + b"6") == [
        (1, 5),
        (1, 1),
    ]


@pytest.mark.parametrize("markers", [True, False])
@pytest.mark.spec("RFC 5044 4.4")
def test_every_wrong_bit_is_seen(markers: bool) -> None:
    """Of a short direction, bit by bit. A length that grows makes it wait, and nothing is delivered."""
    out = Outbound(400, crc=True, markers=markers)
    out.untagged(0x43, 0, 0, 1, (pattern(700),), 0, 700, True)
    stream = out.take(1 << 20)
    for at in range(len(stream)):
        for bit in range(8):
            wrong = bytearray(stream)
            wrong[at] ^= 1 << bit
            found = Inbound(crc=True, markers=markers)
            found.feed(wrong)
            runs = found.parse()
            assert found.fault == "crc" or found.pending, (at, bit)
            assert sum(run.length for run in runs) < 700


def test_a_marker_that_lies() -> None:
    """The last of the vectors that are wrong: T28 with another pointer and the checksum made anew."""
    stream = bytearray(frames()["T28"])
    stream[3] = 4
    stream[-4:] = slow_crc32c(stream[:-4]).to_bytes(4, "little")
    found = Inbound(crc=True, markers=True)
    found.feed(stream)
    assert found.parse() == []
    assert found.fault == "marker"


@modes
def test_a_segment_too_short_for_its_header(crc: bool, markers: bool) -> None:
    whole = Message(True, 0x40, 1, b"").header(0, True), Message(False, 0x43, 1, b"").header(0, True)
    for header in whole:
        for length in range(len(header)):
            found = Inbound(crc=crc, markers=markers)
            good = fpdu(header + b"good", 0, markers=markers, crc=crc)
            found.feed(good + fpdu(header[:length], len(good), markers=markers, crc=crc) + b"more")
            (run,) = found.parse()
            assert found.payload(run) == b"good"
            assert (found.fault, found.pending) == ("short", 0)
            found.feed(good)
            assert found.parse() == []
            with pytest.raises(ValueError, match="not one of the last parse"):
                found.payload(run)


@pytest.mark.slow
@settings(deadline=None)
@given(data=st.data(), markers=st.booleans())
def test_placing(data: st.DataObject, markers: bool) -> None:
    """Any part of a run, to anywhere in buffers of any sizes; and nothing besides."""
    payload = pattern(data.draw(st.integers(0, 3000)))
    out, found = (
        Outbound(data.draw(st.integers(128, 1600)), crc=False, markers=markers),
        Inbound(crc=False, markers=markers),
    )
    out.untagged(0x43, 0, 0, 1, (payload,), 0, len(payload), True)
    found.feed(out.take(1 << 20))
    (run,) = found.parse()
    begin = data.draw(st.integers(0, len(payload)))
    length = data.draw(st.integers(0, len(payload) - begin))
    before, behind = data.draw(st.integers(0, 50)), data.draw(st.integers(0, 50))
    room = bytearray(before + length + behind)
    cuts = data.draw(st.lists(st.integers(0, len(room)), max_size=6))
    scatter = tuple(bytearray(piece) for piece in pieces(bytes(room), cuts))
    found.place(run, begin, scatter, before, length)
    assert b"".join(scatter) == bytes(before) + payload[begin : begin + length] + bytes(behind)


# ---- bounds and misuse ----


def ready() -> tuple[Inbound, _framing.Run]:
    found = Inbound(crc=True, markers=False)
    found.feed(frames()["T11"])
    (run,) = found.parse()
    return found, run


def test_what_cannot_be_placed() -> None:
    found, run = ready()
    room = bytearray(12)
    for begin, scatter, offset, length in (
        (0, (room,), 1, 12), (1, (room, room), 0, 12), (13, (room,), 0, 0), (0, (room[:11],), 0, 12), (0, (), 0, 1),
        ((1 << 64) - 1, (room,), 0, 2), (0, (room,), (1 << 64) - 1, 2), (0, (room,), 0, -1), (0, (room,), 0, 1 << 64),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"fit|is to be of"):
            found.place(run, begin, scatter, offset, length)
    with pytest.raises((BufferError, TypeError)):
        found.place(run, 0, (bytes(12),), 0, 12)
    with pytest.raises((BufferError, TypeError)):
        found.place(run, 0, (room, memoryview(bytearray(24))[::2]), 0, 12)
    assert room == bytes(12)
    found.place(run, 0, (room,), 0, 12)
    assert room == b"Hello, iWARP"


def test_a_run_ends() -> None:
    ends: list[Callable[[Inbound], object]] = [lambda f: f.parse(), lambda f: f.feed(b"")]
    for end in ends:
        found, run = ready()
        end(found)
        with pytest.raises(ValueError, match="not one of the last parse"):
            found.place(run, 0, (bytearray(12),), 0, 12)
    found, run = ready()
    left, right = socket.socketpair()
    with left, right, pytest.raises(BlockingIOError):
        found.fill(left.fileno())
    with pytest.raises(ValueError, match="not one of the last parse"):
        found.segments(run)
    with pytest.raises(TypeError):
        found.payload(tuple(run))  # type: ignore[arg-type]


def test_what_is_not_framed() -> None:
    """And nothing has changed."""
    out = Outbound(1442, crc=True, markers=False)
    good = (bytes(100),)
    for rdmap, stag, to, gather, begin, end in (
        (256, 0, 0, good, 0, 1), (-1, 0, 0, good, 0, 1), (0, 1 << 32, 0, good, 0, 1), (0, 0, 1 << 64, good, 0, 1),
        (0, 0, 0, good, 0, 101), (0, 0, 0, good, 2, 1), (0, 0, 0, (), 0, 1), (0, 0, 0, good, -1, 1),
        (0, 0, 0, (bytes(1 << 20),), 0, (1 << 18) + 1), (0, 0, 0, good * 1025, 0, 1), (0, 0, 0, good, 0, 1 << 64),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"is to be of|not within|the most"):
            out.tagged(rdmap, stag, to, gather, begin, end, True)
    for inv_stag, queue, msn in ((1 << 32, 0, 0), (0, 1 << 32, 0), (0, 0, 1 << 32)):
        with pytest.raises(ValueError, match="is to be of"):
            out.untagged(0, inv_stag, queue, msn, good, 0, 1, True)
    with pytest.raises(TypeError):
        out.tagged(0, 0, 0, [b"a"], 0, 1, True)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        out.tagged(0, 0, 0, ("text",), 0, 1, True)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="6 arguments, not 7 to 8"):
        out.tagged(0, 0, 0, good, 0, 1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="10 arguments, not 8 to 9"):
        out.untagged(0, 0, 0, 0, good, 0, 1, True, True, True)  # type: ignore[call-arg]
    for mulpdu in (0, 127, 64769, -1):
        with pytest.raises(ValueError, match="mulpdu"):
            Outbound(mulpdu, crc=True, markers=True)
        with pytest.raises(ValueError, match="mulpdu"):
            out.mulpdu = mulpdu
    assert (out.position, out.waiting, out.mulpdu, out.take(100)) == (0, 0, 1442, b"")


def test_too_much_that_waits() -> None:
    out = Outbound(1442, crc=True, markers=True)
    whole = (bytes(1 << 18),)
    for _ in range(3):
        out.tagged(0x40, 1, 0, whole, 0, 1 << 18, True)
    waiting = out.waiting
    with pytest.raises(BufferError, match=f"{waiting} bytes wait already"):
        out.tagged(0x40, 1, 0, whole, 0, 1 << 18, True)
    assert (1 << 20) - (1 << 18) < waiting < 1 << 20
    assert len(out.take(1 << 30)) == waiting
    out.tagged(0x40, 1, 0, whole, 0, 1 << 18, True)


def test_staging_is_bounded() -> None:
    for capacity in (0, FPDU_MAX - 1, (64 << 20) + 1, -1):
        with pytest.raises(ValueError, match="capacity"):
            Inbound(crc=True, markers=False, capacity=capacity)
    found = Inbound(crc=False, markers=False, capacity=FPDU_MAX)
    stream = fpdu(bytes([0x41]) + bytes(0xFFFE), 0, crc=False)
    assert found.feed(stream + bytes(10_000)) == FPDU_MAX
    assert found.feed(bytes(10)) == 0
    left, right = socket.socketpair()
    with left, right, pytest.raises(BufferError, match="parsed first"):
        found.fill(left.fileno())
    (run,) = found.parse()
    assert run.length == 65535 - 18
    assert found.feed(bytes(10)) == 10


def test_the_largest_frame_with_markers_fits() -> None:
    """A ULPDU of 65535 bytes from every place: RFC 5044 4.1 knows no lower bound for a receiver."""
    largest = max(frame_len(65535, position, markers=True) for position in range(0, 512, 4))
    assert largest == FPDU_MAX
    ulpdu = bytes([0x41]) + pattern(65534)
    for position in range(0, 512, 76):
        found = Inbound(crc=False, markers=True, capacity=FPDU_MAX)
        stream = fpdu(bytes([0x41]) + bytes(17 + position), 0, markers=True, crc=False)
        stream += fpdu(ulpdu, len(stream), markers=True, crc=False)
        stream += fpdu(ulpdu, len(stream), markers=True, crc=False)
        whole = b""
        while stream:
            stream = stream[found.feed(stream) :]
            for run in found.parse():
                whole += found.payload(run)
        assert whole == bytes(position) + 2 * ulpdu[18:]


def test_settings_are_by_name() -> None:
    for make in (
        lambda: Outbound(1442, True, False),  # type: ignore[call-arg]
        lambda: Outbound(1442, crc=True),  # type: ignore[call-arg]
        lambda: Inbound(markers=True),  # type: ignore[call-arg]
        lambda: Inbound(True, False),  # type: ignore[call-arg]
    ):
        with pytest.raises(TypeError):
            make()


# ---- the owner's memory ----


class Memory(bytearray):
    """Memory of which one can see that it is gone."""


def held(memory: bytearray) -> bool:
    try:
        memory.append(0)
    except BufferError:
        return True
    memory.pop()
    return False


def test_buffers_are_released_as_they_are_written() -> None:
    first, second, beside = bytearray(1000), bytearray(1000), bytearray(1000)
    out = Outbound(4000, crc=True, markers=False)
    out.tagged(0x40, 1, 0, (first, second, beside), 0, 2000, True)
    assert (held(first), held(second), held(beside)) == (True, True, False)
    out.take(16 + 999)
    assert held(first)
    out.take(1)
    assert (held(first), held(second)) == (False, True)
    assert out.rest
    out.take(1000)
    assert not held(second)
    assert (out.waiting, out.rest) == (4, 4)
    out.take(4)
    assert not out.rest


def test_what_is_copied_is_not_held() -> None:
    memory = bytearray(pattern(1000))
    out = Outbound(4000, crc=True, markers=True)
    out.tagged(0x40, 1, 0, (memory,), 0, 1000, True, True)
    before = bytes(memory)
    memory.clear()
    assert out.take(1 << 20) == Message(True, 0x40, 1, before).frames(0, 4000, 0, 1000, True, crc=True, markers=True)


def test_the_owner_takes_its_memory_back() -> None:
    memory = bytearray(pattern(5000))
    message = Message(True, 0x40, 1, bytes(memory))
    out = Outbound(1442, crc=True, markers=False)
    out.tagged(0x40, 1, 0, (memory,), 0, 5000, True)
    stream = out.take(3000)
    out.own()
    memory.clear()
    out.tagged(0x40, 1, 0, (message.payload,), 0, 5000, True)
    stream += out.take(1 << 20)
    assert stream == 2 * message.frames(0, 1442, 0, 5000, True, crc=True, markers=False)


@modes
def test_clear_ends_behind_the_frame_that_is_begun(crc: bool, markers: bool) -> None:
    """So that a Terminate can follow at once, wherever the last write ended."""
    memory = bytearray(pattern(3000))
    message, terminate = Message(True, 0x40, 1, bytes(memory)), Message(False, 0x47, 0, b"\x20\x02\0\0", queue=2, msn=1)
    ends = [0]
    for segment in message.segments(1000, 0, 3000, True):
        ends.append(ends[-1] + len(fpdu(segment, ends[-1], markers=markers, crc=crc)))
    whole = message.frames(0, 1000, 0, 3000, True, crc=crc, markers=markers)
    for written in [*range(0, len(whole), 13), *ends]:
        out = Outbound(1000, crc=crc, markers=markers)
        put(out, message, 0, 3000, True, (memory,), False)  # type: ignore[arg-type]
        stream = out.take(written)
        assert (out.rest > 0) == (written not in ends)
        out.clear()
        end = min(at for at in ends if at >= written)
        assert (out.position, out.waiting) == (end, end - written)
        put(out, terminate, 0, 4, True, (terminate.payload,), False)
        stream += out.take(1 << 20)
        assert stream == whole[:end] + terminate.frames(end, 1000, 0, 4, True, crc=crc, markers=markers)
        assert not held(memory)


def test_buffers_go_with_the_object() -> None:
    memory = Memory(1000)
    gone = weakref.ref(memory)
    out = Outbound(1442, crc=True, markers=False)
    out.tagged(0x40, 1, 0, (memory,), 0, 1000, True)
    memory.out = out  # type: ignore[attr-defined]  # a cycle
    del memory, out
    gc.collect()
    assert gone() is None


def test_a_release_that_calls_again() -> None:
    """Memory that goes when it is released, and takes the rest of the stream while it goes."""
    taken = []

    class Last(bytearray):
        def __del__(self) -> None:
            taken.append(out.take(2500))

    out = Outbound(1442, crc=True, markers=False)
    payload = pattern(1000)
    for _ in range(6):
        out.tagged(0x40, 1, 0, (Last(payload), b"", Last(payload)), 0, 2000, True)
    whole = out.take(1100) + b"".join(taken)
    message = Message(True, 0x40, 1, 2 * payload)
    assert len(taken) == 12
    assert out.waiting == 0
    assert whole == 6 * message.frames(0, 1442, 0, 2000, True, crc=True, markers=False)


# ---- sockets ----


@modes
def test_through_a_socket(crc: bool, markers: bool) -> None:
    payload = pattern(200_000)
    message = Message(True, 0x40, 1, payload)
    left, right = socket.socketpair()
    with left, right:
        out, found = Outbound(1442, crc=crc, markers=markers), Inbound(crc=crc, markers=markers)
        with pytest.raises(BlockingIOError):
            found.fill(right.fileno())
        put(out, message, 0, len(payload), True, (payload,), False)
        room = bytearray(len(payload))
        placed = 0
        while placed < len(payload):
            before = out.written
            assert out.send(left.fileno()) == out.written - before
            assert found.fill(right.fileno()) > 0
            for run in found.parse():
                assert run.offset == placed
                found.place(run, 0, (room,), placed, run.length)
                placed += run.length
        assert room == payload
        left.shutdown(socket.SHUT_WR)
        assert found.fill(right.fileno()) == 0
        assert (found.pending, found.position) == (0, out.position)


def test_a_full_socket_and_one_that_is_gone() -> None:
    left, right = socket.socketpair()
    with left:
        with right:
            out = Outbound(64768, crc=False, markers=False)
            payload = bytes(1 << 18)
            while not out.waiting:
                out.tagged(0x40, 1, 0, (payload,), 0, len(payload), True)
                out.send(left.fileno())
            assert out.send(left.fileno()) == 0
        with pytest.raises(OSError) as caught:  # noqa: PT011  # the number is what is looked at
            out.send(left.fileno())
        assert caught.value.errno in (errno.EPIPE, errno.ECONNRESET)
    with pytest.raises(ValueError, match="file descriptor"):
        out.send(-1)


def test_after_a_fault_what_comes_is_read_and_dropped() -> None:
    """So that a socket can be closed without unread bytes, which would reset the connection."""
    left, right = socket.socketpair()
    with left, right:
        found = Inbound(crc=True, markers=False)
        left.sendall(bytes(1000))
        assert found.fill(right.fileno()) == 1000
        assert found.parse() == []
        assert found.fault == "crc"
        left.sendall(bytes(2000))
        left.close()
        assert found.fill(right.fileno()) == 2000
        assert found.pending == 0
        assert found.parse() == []
        assert found.fill(right.fileno()) == 0


@pytest.mark.slow
def test_many_threads() -> None:
    """One object is for one thread at a time: while that is in a system call others are refused, and nothing breaks."""
    left, right = socket.socketpair()
    payload = pattern(1 << 17)
    stop = threading.Event()
    out = Outbound(1442, crc=True, markers=False)
    acts: dict[str, Callable[[], object]] = {
        "tagged": lambda: out.tagged(0x40, 1, 0, (payload,), 0, len(payload), True),
        "send": lambda: out.send(left.fileno()),
        "own": lambda: out.own(),
        "take": lambda: out.take(0),
    }
    refused: set[str] = set()

    def move() -> None:
        while not stop.is_set():
            for name, act in acts.items():
                try:
                    act()
                except RuntimeError:
                    refused.add(name)
                except BufferError:
                    continue

    with left, right:
        threads = [threading.Thread(target=move) for _ in range(2)]
        for thread in threads:
            thread.start()
        found = Inbound(crc=True, markers=False)
        while found.position < 4 << 20 or refused != set(acts):
            try:
                found.fill(right.fileno())
            except BlockingIOError:
                continue
            assert all(found.payload(run) == payload[run.offset :][: run.length] for run in found.parse())
            assert found.fault is None
        stop.set()
        for thread in threads:
            thread.join()


def test_the_limits_are_those_of_the_module() -> None:
    assert _framing.CALL_MAX == limits.FRAMING_CALL_MAX
    assert _framing.WAITING_MAX == limits.FRAMING_WAITING_MAX
    assert _framing.BUFFERS_MAX == limits.FRAMING_BUFFERS_MAX
    assert _framing.STAGED_DEFAULT == limits.FRAMING_STAGED_DEFAULT == (256 << 10) + FPDU_MAX


def test_the_stub_says_what_there_is() -> None:
    """Of every class and function, by name."""
    stub = (Path(layout.__file__).parent / "_framing.pyi").read_text()
    names = set(re.findall(r"^(?:class|def) (\w+)|^(\w+): Final", stub, re.M))
    assert {a or b for a, b in names} == {name for name in dir(_framing) if not name.startswith("_")}
    for kind in (Outbound, Inbound, _framing.Run):
        body = stub.split(f"class {kind.__name__}")[1].split("\n@final")[0].split("\nclass")[0]
        told = set(re.findall(r"^    (?:def )?(\w+)[(:]", body, re.M)) - {"__init__"}
        there = {name for name in vars(kind) if not name.startswith(("_", "n_"))}
        assert told == there
