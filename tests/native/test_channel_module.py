"""sidestep.native._channel: the channel as Python sees it, against a plain byte queue."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import inspect
import itertools
import mmap
import os
import resource
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sidestep.native import _channel, layout
from sidestep.provider import memory

PAGE = 4096
Pair = tuple[_channel.Channel, _channel.Channel]


def make(tx_size: int, rx_size: int) -> tuple[Pair, mmap.mmap]:
    """Both ends of a new segment, and a third mapping of it to look at and to spoil."""
    fd = _channel.create(tx_size, rx_size)
    try:
        words = mmap.mmap(fd, 0)
        return (_channel.map(fd, 0), _channel.map(fd, 1)), words
    finally:
        os.close(fd)


def poke(words: mmap.mmap, name: str, value: int) -> None:
    offset, size = _channel.HEADER_WORDS[name]
    words[offset : offset + size] = struct.pack("=Q" if size == 8 else "=I", value % (1 << 8 * size))


def peek(words: mmap.mmap, name: str) -> int:
    offset, size = _channel.HEADER_WORDS[name]
    return int.from_bytes(words[offset : offset + size], sys.byteorder)


@pytest.fixture
def segment(closing: ExitStack) -> Iterator[tuple[Pair, mmap.mmap]]:
    pair, words = make(PAGE, 2 * PAGE)
    for end in pair:
        closing.enter_context(end)
    with words:
        yield pair, words


@pytest.fixture
def pair(segment: tuple[Pair, mmap.mmap]) -> Pair:
    return segment[0]


class Sending:
    """What one direction should do: all of it is told by counts."""

    def __init__(self, size: int) -> None:
        self.size = size  # of the ring
        self.unread = bytearray()
        self.sent = self.limit = self.ring_end = 0
        self.spilled = self.lent = False
        self.filled: bytes | None = None  # what lies in the room, uncommitted

    @property
    def read(self) -> int:
        return self.sent - len(self.unread)

    @property
    def space(self) -> int:
        return max(self.read + self.size, self.limit if self.spilled else 0) - self.sent

    def add(self, data: bytes) -> None:
        self.unread += data
        self.sent += len(data)
        self.lent, self.filled = False, None

    def settle(self) -> None:
        if not self.lent and self.read >= self.ring_end and len(self.unread) <= self.size // 2:
            self.spilled = False

    def spill(self) -> bool:
        limit = self.read + layout.CHANNEL_SPILL
        if self.spilled and self.limit >= limit:
            return False
        self.ring_end = self.ring_end if self.spilled else self.sent
        self.limit, self.spilled, self.filled = limit, True, None
        return True


LENGTHS = st.one_of(st.integers(0, 200), st.integers(0, 9 * PAGE))
SIDES = st.integers(0, 1)


class AgainstAQueue(RuleBasedStateMachine):
    """Both directions, any splits: what comes out is what a bytearray would give, in the amounts a ring would give."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = (Sending(PAGE), Sending(PAGE))  # by the side that writes
        self.pair, self.words = make(PAGE, PAGE)
        self.count = 0

    @initialize(sizes=st.tuples(*[st.sampled_from([PAGE, 2 * PAGE, 8 * PAGE])] * 2))
    def open(self, sizes: tuple[int, int]) -> None:
        self.teardown()
        self.ways = (Sending(sizes[0]), Sending(sizes[1]))
        self.pair, self.words = make(*sizes)

    def teardown(self) -> None:
        for end in self.pair:
            end.close()
        self.words.close()

    def pattern(self, length: int) -> bytes:
        self.count += 1
        return (b"%d." % self.count * (length + 1))[:length]

    @rule(side=SIDES, length=LENGTHS, kind=st.sampled_from([bytes, bytearray, memoryview]))
    def write(self, side: int, length: int, kind: Callable[[bytes], bytes]) -> None:
        data, way = self.pattern(length), self.ways[side]
        way.settle()
        taken = self.pair[side].write(kind(data))
        assert taken == min(length, way.space)
        if taken:
            way.add(data[:taken])

    @rule(side=SIDES)
    def spill(self, side: int) -> None:
        assert self.pair[side].spill() == self.ways[side].spill()

    @rule(side=SIDES, length=LENGTHS)
    def fill(self, side: int, length: int) -> None:
        """The room is filled and not committed yet; asked for again, it is where it was."""
        way = self.ways[side]
        way.settle()
        pieces = self.pair[side].writable()
        way.lent = True
        assert sum(map(len, pieces)) == way.space
        assert len(pieces) <= 2
        if way.filled is None:
            way.filled = self.pattern(min(length, way.space))
            left = memoryview(way.filled)
            for piece in pieces:
                part = left[: len(piece)]
                piece[: len(part)] = part
                left = left[len(part) :]
        else:
            assert b"".join(pieces)[: len(way.filled)] == way.filled

    @rule(side=SIDES, share=st.floats(0, 1))
    def commit(self, side: int, share: float) -> None:
        way = self.ways[side]
        with pytest.raises(ValueError, match="where there are"):
            self.pair[side].commit(way.space + 1)
        if way.filled is not None:
            part = way.filled[: round(share * len(way.filled))]
            self.pair[side].commit(len(part))
            way.add(part)

    @rule(side=SIDES, size=st.one_of(st.integers(0, 300), st.integers(0, 9 * PAGE)))
    def read(self, side: int, size: int) -> None:
        queue = self.ways[1 - side].unread
        assert self.pair[side].read(size) == queue[:size]
        del queue[:size]

    @rule(side=SIDES, left=st.integers(0, PAGE))
    def read_nearly_all(self, side: int, left: int) -> None:
        self.read(side, max(0, len(self.ways[1 - side].unread) - left))

    @rule(side=SIDES, share=st.floats(0, 1))
    def look(self, side: int, share: float) -> None:
        """The bytes where they lie, from any of them on; then some are done with."""
        queue = self.ways[1 - side].unread
        skip = round(share * len(queue))
        pieces = self.pair[side].readable(skip)
        assert b"".join(pieces) == queue[skip:]
        assert len(pieces) <= 6
        self.pair[side].consume(skip // 2)
        del queue[: skip // 2]

    @invariant()
    def counts_agree(self) -> None:
        for side, way in enumerate(self.ways):
            unread = len(way.unread)
            end = self.pair[side]
            assert (end.unread, end.space, end.sent) == (unread, way.space, way.sent)
            assert self.pair[1 - side].avail == unread


@pytest.mark.slow
class TestAgainstAQueue(AgainstAQueue.TestCase):  # type: ignore[misc, valid-type]  # hypothesis makes it a property
    settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_sizes_are_by_side(pair: Pair) -> None:
    assert (pair[0].tx_size, pair[0].rx_size) == (PAGE, 2 * PAGE)
    assert (pair[1].tx_size, pair[1].rx_size) == (2 * PAGE, PAGE)


@pytest.mark.parametrize("size", [0, 1, 4095, 12288, (64 << 20) + 1, 128 << 20, 1 << 32, 1 << 64, 1 << 70, -1, -4096])
def test_create_refuses_sizes(size: int) -> None:
    with pytest.raises(ValueError, match="powers of two from 4096 to 67108864"):
        _channel.create(size, PAGE)
    with pytest.raises(ValueError, match="powers of two from 4096 to 67108864"):
        _channel.create(PAGE, size)


def test_create_makes_a_sealed_close_on_exec_file(closing: ExitStack) -> None:
    fd = _channel.create(_channel.RING_MIN, _channel.RING_MAX)
    closing.callback(os.close, fd)
    assert not os.get_inheritable(fd)
    assert os.fstat(fd).st_size == memory.segment_size((_channel.RING_MIN, _channel.RING_MAX))
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def test_the_spill_has_room_for_what_tcp_would_have_held(pair: Pair) -> None:
    end, peer = pair
    data = os.urandom(layout.CHANNEL_SPILL)
    assert (end.tx_most, peer.tx_most) == (len(data), len(data))
    assert end.write(data) == PAGE
    assert end.spill()
    assert not end.spill()
    assert end.write(data[PAGE:] + b"more") == len(data) - PAGE
    assert end.space == 0
    assert not end.spill()
    assert len(peer.readable()) == 2
    assert peer.read() == data
    assert end.write(b"in the ring again") == 17
    assert end.space == PAGE - 17


def test_what_was_filled_in_parts_stays_where_it_is(pair: Pair) -> None:
    """Even if the reader catches up meanwhile: the room is not somewhere else until it is committed."""
    end, peer = pair
    end.write(bytes(PAGE))
    assert end.spill()
    (room,) = end.writable()
    room[:4] = b"late"
    peer.read()
    (again,) = end.writable()
    assert bytes(again[:4]) == b"late"
    again[4:6] = b"r!"
    end.commit(6)
    assert peer.read() == b"later!"
    assert sum(map(len, end.writable())) == PAGE  # of the ring


def test_who_writes_has_given_the_room_back(pair: Pair) -> None:
    end, peer = pair
    end.write(bytes(PAGE))
    end.spill()
    end.writable()
    assert end.write(b"x") == 1
    peer.read()
    assert end.write(b"y") == 1
    assert end.space == PAGE - 1  # it is in the ring again


def test_create_reports_a_full_descriptor_table(closing: ExitStack) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        with pytest.raises(OSError) as caught:  # noqa: PT011  the number is checked below
            _channel.create(PAGE, PAGE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert caught.value.errno == errno.EMFILE


def test_map_refuses_what_is_no_segment(closing: ExitStack) -> None:
    reader, writer = os.pipe()
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(unsealed, 3 * PAGE)
    for fd in reader, writer, unsealed:
        closing.callback(os.close, fd)
    for fd, number in ((reader, errno.EINVAL), (-1, errno.EINVAL), (unsealed, errno.EPROTO)):
        with pytest.raises(OSError) as caught:  # noqa: PT011
            _channel.map(fd, 0)
        assert caught.value.errno == number
    segment = _channel.create(PAGE, PAGE)
    closing.callback(os.close, segment)
    for side in -1, 2, 1 << 20:
        with pytest.raises(ValueError, match="side must be 0 or 1"):
            _channel.map(segment, side)


def test_closed_channels_refuse_every_use(pair: Pair) -> None:
    end = pair[0]
    with end as entered:
        assert entered is end
        assert not end.closed
    assert end.closed
    end.close()
    uses: list[Callable[[], object]] = [
        lambda: end.write(b"x"),
        lambda: end.write(b""),
        end.spill,
        end.writable,
        end.readable,
        end.read,
        end.__enter__,
        lambda: end.avail,
        lambda: end.space,
        lambda: end.unread,
    ]
    for use in uses:
        with pytest.raises(ValueError, match="closed"):
            use()


def test_wrong_arguments_are_type_errors(pair: Pair) -> None:
    end = pair[0]
    for bad in ("text", None, 5):
        with pytest.raises(TypeError):
            end.write(bad)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        end.read("1")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        _channel.create(4096.0, 4096)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        _channel.Channel()
    with pytest.raises(BufferError):
        end.write(memoryview(bytearray(8))[::2])
    assert pair[1].avail == 0


def test_write_releases_the_buffer(pair: Pair) -> None:
    data = bytearray(b"abc")
    pair[0].write(data)
    data.append(0)  # BufferError if it were still exported
    pair[0].close()
    with pytest.raises(ValueError, match="closed"):
        pair[0].write(data)
    data.append(0)
    assert pair[1].read() == b"abc"


@pytest.mark.parametrize("tail", [layout.CHANNEL_SPILL + 1, 1 << 32, 1 << 63, -1])
def test_an_impossible_tail_is_a_reset(segment: tuple[Pair, mmap.mmap], tail: int) -> None:
    (end, _), words = segment
    poke(words, "producer[1].tail", tail)
    for use in (end.read, lambda: end.avail):
        with pytest.raises(ConnectionResetError):
            use()
    assert end.write(b"still") == 5  # the other direction is not this word's business


@pytest.mark.parametrize("head", [4, PAGE, 1 << 32, 1 << 63, -1])
def test_an_impossible_head_is_a_reset(segment: tuple[Pair, mmap.mmap], head: int) -> None:
    (end, _), words = segment
    assert end.write(b"abc") == 3
    poke(words, "consumer[0].head", head)
    uses = (lambda: end.space, lambda: end.unread, lambda: end.write(bytes(PAGE)), end.spill, end.writable)
    for use in uses:
        with pytest.raises(ConnectionResetError):
            use()


def test_a_side_never_reads_its_own_words_back(segment: tuple[Pair, mmap.mmap]) -> None:
    (end, peer), words = segment
    end.write(b"abcdef")
    peer.read(2)
    for name in "producer[0].tail", "consumer[1].head", "ring_size[0]", "magic":
        poke(words, name, 1 << 31)
    assert end.unread == 4
    end.write(b"gh")
    assert peek(words, "producer[0].tail") == 8
    assert peer.read() == b"cdefgh"


def test_header_words_are_where_the_segment_has_them(segment: tuple[Pair, mmap.mmap]) -> None:
    (end, peer), words = segment
    assert peek(words, "ring_size[0]") == PAGE
    assert peek(words, "ring_size[1]") == 2 * PAGE
    end.write(b"12345")
    peer.read(3)
    assert peek(words, "producer[0].tail") == 5
    assert peek(words, "consumer[0].head") == 3
    places = sorted(_channel.HEADER_WORDS.values())
    assert all(offset + size <= following for (offset, size), (following, _) in itertools.pairwise(places))
    assert places[-1][0] < _channel.HEADER_SIZE


def mapped_segments() -> int:
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return sum("memfd:sidestep-channel" in line for line in maps)


def test_a_forgotten_channel_is_unmapped() -> None:
    gc.collect()
    before = mapped_segments()
    fd = _channel.create(PAGE, PAGE)
    ends = [_channel.map(fd, side) for side in (0, 1)]
    os.close(fd)
    assert mapped_segments() == before + 2
    del ends
    gc.collect()
    assert mapped_segments() == before


def test_references_do_not_leak() -> None:
    fd = _channel.create(PAGE, PAGE)
    before = sys.getrefcount(_channel.Channel)
    for _ in range(100):
        with _channel.map(fd, 0) as end:
            end.write(b"x")
    with pytest.raises(OSError, match="Invalid"):
        _channel.map(-1, 0)
    os.close(fd)
    gc.collect()
    assert sys.getrefcount(_channel.Channel) < before + 10


def test_it_uses_the_stable_abi() -> None:
    path = inspect.getfile(_channel)
    assert path.endswith(".abi3.so")
    # every symbol it takes from the interpreter can be found by name in any later one
    assert ctypes.CDLL(path)["PyInit__channel"] is not None


def test_everything_public_is_documented() -> None:
    documented = [_channel, _channel.create, _channel.map, _channel.Channel]
    documented += [value for name, value in vars(_channel.Channel).items() if not name.startswith("__")]
    for thing in documented:
        assert inspect.getdoc(thing), thing
    assert str(inspect.signature(_channel.create)) == "(tx_size, rx_size, /)"
    assert str(inspect.signature(_channel.Channel.read)) == "(self, size=-1, /)"
