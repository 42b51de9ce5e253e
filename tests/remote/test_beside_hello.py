"""What stands beside SDP's Hello when one provider asks another, and the key that vouches for it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidestep.errors import Misuse, PeerViolation
from sidestep.remote.promotion import KEY_MAX, KEY_MIN, SIZE, Promotion, Purpose, read_key

HELLO = bytes(range(76))
KEY = b"k" * KEY_MIN
OURS = Promotion(Purpose.RESYNC, 0x1234, bytes(range(16)), 0x0102030405060708)
PROMOTIONS = st.builds(
    Promotion,
    st.sampled_from(Purpose),
    st.integers(0, 0xFFFF),
    st.binary(min_size=16, max_size=16),
    st.integers(0, (1 << 64) - 1),
    st.booleans(),
)
KEYS = st.one_of(st.none(), st.binary(min_size=KEY_MIN, max_size=64))


def test_the_bytes() -> None:
    told = OURS.encode(HELLO, None)
    assert told == bytes.fromhex("7369646573746570 01 02 1234 00000001 0102030405060708") + bytes(range(16)) + bytes(32)
    assert len(told) == SIZE == 72


@given(promotion=PROMOTIONS, hello=st.binary(max_size=100), key=KEYS)
def test_there_and_back(promotion: Promotion, hello: bytes, key: bytes | None) -> None:
    assert Promotion.find(hello + promotion.encode(hello, key), key) == promotion


@given(bits=st.integers(0, (1 << 32) - 1))
def test_bits_that_nobody_knows_are_passed_over(bits: int) -> None:
    told = bytearray(OURS.encode(HELLO, None))
    told[12:16] = bits.to_bytes(4, "big")
    assert Promotion.find(HELLO + told, None) == replace(OURS, rounds=bool(bits & 1))


@given(data=st.binary(max_size=200), key=KEYS)
def test_garbage_is_nothing_of_ours(data: bytes, key: bytes | None) -> None:
    assert Promotion.find(data, key) is None


@given(at=st.integers(0, len(HELLO) + SIZE - 1), bit=st.integers(0, 7))
def test_each_bit_is_vouched_for(at: int, bit: int) -> None:
    changed = bytearray(HELLO + OURS.encode(HELLO, KEY))
    changed[at] ^= 1 << bit
    if len(HELLO) <= at < len(HELLO) + 8:
        assert Promotion.find(bytes(changed), KEY) is None  # it does not say that it is ours
        return
    with pytest.raises(PeerViolation) as told:
        Promotion.find(bytes(changed), KEY)
    assert told.value.rule == ("promotion_version" if at == len(HELLO) + 8 else "promotion_key")


@pytest.mark.parametrize(("theirs", "ours"), [(KEY, b"x" * KEY_MIN), (KEY, None), (None, KEY)])
def test_another_key(theirs: bytes | None, ours: bytes | None) -> None:
    with pytest.raises(PeerViolation) as told:
        Promotion.find(HELLO + OURS.encode(HELLO, theirs), ours)
    assert told.value.rule == "promotion_key"


def test_another_hello_with_the_same_words() -> None:
    with pytest.raises(PeerViolation):
        Promotion.find(bytes(76) + OURS.encode(HELLO, KEY), KEY)


@pytest.mark.parametrize("purpose", [0, 9, 255])
def test_a_purpose_that_nobody_knows(purpose: int) -> None:
    told = bytearray(OURS.encode(HELLO, None))
    told[9] = purpose
    with pytest.raises(PeerViolation) as why:
        Promotion.find(HELLO + told, None)
    assert why.value.rule == "promotion_purpose"


def test_no_answer_reads_as_a_question() -> None:
    assert {Purpose.ARRIVED, Purpose.HEARD}.isdisjoint({Purpose.RESYNC, Purpose.RESYNCED, Purpose.FAILED})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_bytes(b" " + KEY + b"\n")
    path.chmod(0o600)
    return path


def test_a_key_is_read_without_what_stands_around_it(file: Path) -> None:
    assert read_key(file) == KEY


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o622])
def test_a_key_that_others_can_read(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(Misuse, match="read by others"):
        read_key(file)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_key_that_another_user_has(file: Path) -> None:
    os.chown(file, 12345, 12345)
    with pytest.raises(Misuse, match="uid 12345"):
        read_key(file)


@pytest.mark.parametrize("length", [0, KEY_MIN - 1, KEY_MAX + 1, 2 * KEY_MAX])
def test_a_key_of_another_length(file: Path, length: int) -> None:
    file.write_bytes(b"k" * length)
    with pytest.raises(Misuse, match=r"has \d+ bytes"):
        read_key(file)


def test_what_is_no_file_of_a_key(tmp_path: Path) -> None:
    with pytest.raises(Misuse, match="cannot be read"):
        read_key(tmp_path / "missing")
    with pytest.raises(Misuse, match="cannot be read"):
        read_key(tmp_path)
    reader, writer = os.pipe()
    try:
        os.write(writer, KEY)
        os.close(writer)
        with pytest.raises(Misuse):
            read_key(Path(f"/dev/fd/{reader}"))
    finally:
        os.close(reader)
