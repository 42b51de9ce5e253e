"""Messages cut into datagrams: put together whatever is lost, doubled or disordered, and whoever sends what."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestep import limits
from sidestep.errors import Misuse, PeerViolation
from sidestep.rdma.segments import (
    HEADER_LEN,
    RULES,
    SEGMENT_MIN,
    Reassembly,
    SegmentHeader,
    Sender,
    segments,
)

ALICE: Sender = "10.0.0.1", 17
BOB: Sender = "10.0.0.2", 18
MTU = 256


def cut(message: bytes, number: int = 7, mtu: int = MTU) -> list[bytes]:
    return [header + bytes(payload) for header, payload in segments(message, number, mtu)]


def content(length: int, seed: int = 0) -> bytes:
    return Random(seed).randbytes(length)


def feed(whole: Reassembly, pieces: list[bytes], sender: Sender = ALICE, now: float = 0.0) -> list[bytes]:
    found = (whole.handle_segment(sender, memoryview(each), now) for each in pieces)
    return [bytes(each) for each in found if each is not None]


def test_the_header() -> None:
    """As the documentation of the module has it."""
    header = SegmentHeader(size=0x1000 - 16, message=0x01020304, length=0x00009000, offset=0x00001FE0)
    assert header.encode().hex() == "01000ff0010203040000900000001fe0"
    assert SegmentHeader.decode(memoryview(header.encode() + bytes(0xFF0))) == header


@pytest.mark.parametrize("mtu", [256, 512, 1024, 2048, 4096])
@pytest.mark.parametrize("length", [0, 1, 239, 240, 241, 480, 5000, 65535, 65536])
def test_a_message_comes_back(length: int, mtu: int) -> None:
    message = content(length)
    pieces = cut(message, mtu=mtu)
    assert len(pieces) == max(1, -(-length // (mtu - HEADER_LEN)))
    assert all(len(each) <= mtu for each in pieces)
    whole = Reassembly()
    assert feed(whole, pieces) == [message]
    assert (len(whole), whole.held, whole.next_deadline()) == (0, 0, None)


def test_a_message_has_a_bound() -> None:
    with pytest.raises(Misuse):
        segments(bytes(limits.DATAGRAM_MESSAGE_MAX + 1), 1, MTU)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_loss_doubling_and_order(data: st.DataObject) -> None:
    """Each message comes once at most; whole if all of its segments came, in time and within bounds."""
    lengths = data.draw(st.lists(st.sampled_from([0, 1, 240, 241, 700, 1500]), min_size=1, max_size=6))
    messages = {
        (sender, number): content(length, number) for number, length in enumerate(lengths) for sender in (ALICE, BOB)
    }
    copies = []
    lost = set()
    for (sender, number), message in messages.items():
        for at, piece in enumerate(cut(message, number)):
            count = data.draw(st.sampled_from([1, 1, 1, 0, 2, 3]))
            if not count:
                lost.add((sender, number))
            copies += [(sender, number, at, piece)] * count
    order = data.draw(st.permutations(copies))
    whole = Reassembly()
    delivered: list[tuple[Sender, bytes]] = []
    for sender, _, _, piece in order:
        delivered += [(sender, each) for each in feed(whole, [piece], sender)]
    wanted = [(sender, message) for (sender, number), message in messages.items() if (sender, number) not in lost]
    assert sorted(delivered) == sorted(wanted)
    whole.handle_timeout(limits.DATAGRAM_REASSEMBLY_S)
    assert (len(whole), whole.held) == (0, 0)


def test_what_is_not_whole_in_time_is_lost() -> None:
    whole = Reassembly()
    first, *rest = cut(content(700))
    feed(whole, [first], now=10.0)
    assert whole.next_deadline() == 10.0 + limits.DATAGRAM_REASSEMBLY_S
    assert feed(whole, rest, now=12.0) == []
    assert whole.events.as_json() == {"message_lost{timeout}": 1, "segment_dropped{late}": 2}
    assert (len(whole), whole.held) == (0, 0)


def test_a_delivered_message_does_not_come_again() -> None:
    whole = Reassembly()
    for message in (content(10), content(700)):
        pieces = cut(message, len(message))
        assert feed(whole, pieces) == [message]
        assert feed(whole, pieces * 2) == []
    assert feed(whole, cut(content(10), 10), BOB) == [content(10)], "another sender counts by himself"


def test_what_is_remembered_has_a_bound() -> None:
    whole = Reassembly(done_max=3)
    for number in range(5):
        feed(whole, cut(b"x", number))
    assert feed(whole, cut(b"x", 4)) == []
    assert feed(whole, cut(b"x", 0)) == [b"x"], "it was forgotten"


@pytest.mark.parametrize(
    ("rule", "segment"),
    {
        "segment_short": bytes(15),
        "segment_version": SegmentHeader(240, 1, 1, 0).encode().replace(b"\1", b"\2", 1) + b"x",
        "segment_size": SegmentHeader(SEGMENT_MIN - 1, 1, 1, 0).encode() + b"x",
        "segment_message": SegmentHeader(4080, 1, 65537, 0).encode() + bytes(4080),
        "segment_place": SegmentHeader(240, 1, 700, 241).encode() + bytes(240),
        "segment_length": SegmentHeader(240, 1, 700, 480).encode() + bytes(221),
    }.items(),
)
def test_rules(rule: str, segment: bytes) -> None:
    with pytest.raises(PeerViolation) as raised:
        SegmentHeader.decode(memoryview(segment))
    assert raised.value.rule == rule
    whole = Reassembly()
    assert feed(whole, [segment]) == []
    assert whole.events.as_json() == {f"segment_dropped{{{rule}}}": 1}
    assert len(whole) == 0


@pytest.mark.parametrize(
    "header",
    [
        SegmentHeader(240, 1, 240, 240),  # behind the end
        SegmentHeader(240, 1, 0, 240),
        SegmentHeader(240, 1, 65536, 65536),
        SegmentHeader(65535, 1, 0xFFFF_FFFF, 0),
        SegmentHeader(240, 1, 65536, 2**32 - 240),
    ],
)
def test_places_behind_the_end(header: SegmentHeader) -> None:
    for length in (0, 1, 240):
        with pytest.raises(PeerViolation):
            SegmentHeader.decode(memoryview(header.encode() + bytes(length)))


def test_every_rule_is_tested() -> None:
    mark = next(each for each in test_rules.pytestmark if each.name == "parametrize")  # type: ignore[attr-defined]
    assert {rule for rule, _ in mark.args[1]} == set(RULES)


def test_what_says_otherwise_changes_nothing() -> None:
    """Another length or segment size under the number of a message is dropped; the first word counts."""
    whole = Reassembly()
    message = content(700)
    first, *rest = cut(message)
    feed(whole, [first])
    feed(whole, [*cut(content(701, 1))[1:], *cut(content(700, 1), mtu=512)])
    feed(whole, [SegmentHeader(240, 7, 700, 0).encode() + b"\xee" * 240])
    assert feed(whole, rest) == [message]
    assert whole.events.get("segment_dropped", "other") == 4
    assert whole.events.get("segment_dropped", "duplicate") == 1


def test_one_who_floods_loses_his_own_first() -> None:
    whole = Reassembly(bytes_max=64 << 10)
    message = content(8000)
    good = cut(message, mtu=4096)
    feed(whole, good[:1], BOB)
    for number in range(1000):
        feed(whole, cut(bytes(30_000), number)[:1])
        assert whole.held <= 64 << 10
    assert feed(whole, good[1:], BOB) == [message]
    assert whole.events.get("message_lost", "room") >= 998


def test_many_who_flood_stay_within_the_bound() -> None:
    whole = Reassembly(bytes_max=64 << 10)
    for number in range(2000):
        feed(whole, cut(bytes(300), number)[:1], (f"10.9.{number >> 8}.{number & 255}", number))
        assert whole.held <= 64 << 10
        assert len(whole) <= 16
    assert len(whole._shares) <= 16
    assert feed(whole, cut(content(500), 1), BOB) == [content(500)], "who is quick gets through"


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([ALICE, BOB]),
            st.integers(0, 3),
            st.sampled_from([0, 1, 240, 241, 480, 500, 65536, 65537, 2**32 - 1]),
            st.sampled_from([0, 1, 240, 480, 65280, 2**32 - 240]),
            st.sampled_from([0, 1, 20, 240, 241]),
            st.sampled_from([240, 239, 0, 4080]),
            st.sampled_from([0.0, 0.0, 0.5, 3.0]),
        ),
        max_size=40,
    )
)
def test_any_segments(given_: list[tuple[Sender, int, int, int, int, int, float]]) -> None:
    whole = Reassembly(bytes_max=128 << 10)
    now = 0.0
    for sender, message, length, offset, size, step, passes in given_:
        now += passes
        raw = SegmentHeader(step, message, length, offset).encode() + bytes(size)
        got = whole.handle_segment(sender, memoryview(raw), now)
        assert got is None or len(got) == length
        assert whole.held <= 128 << 10
        assert whole.held == sum(each.cost for each in whole._shares.values())
        assert len(whole) == sum(len(each.numbers) for each in whole._shares.values())


@given(st.binary(max_size=40))
def test_any_bytes(data: bytes) -> None:
    whole = Reassembly()
    whole.handle_segment(ALICE, memoryview(data), 0.0)
    assert whole.held <= limits.DATAGRAM_MESSAGE_MAX
