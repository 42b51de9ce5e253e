"""The records that C and Python share."""

from __future__ import annotations

import re
import struct
import subprocess
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidestep import limits
from sidestep.native import defaults, layout
from sidestep.native.header import c_header
from sidestep.native.layout import (
    REASON_TEXT,
    RX_TRANSITIONS,
    TX_TRANSITIONS,
    Reason,
    Rx,
    RxEvent,
    Tx,
    TxEvent,
)  # fmt: skip

NATIVE = Path(layout.__file__).parent
ROOT = NATIVE.parents[2]
_RANGES = {"B": 8, "H": 16, "I": 32, "Q": 64}


@st.composite
def records(draw: st.DrawFn) -> tuple[str, dict[str, object]]:
    """A record's name and a value for each of its fields."""
    record = draw(st.sampled_from(sorted(layout.RECORDS)))
    values: dict[str, object] = {}
    for name, code, count in layout.RECORDS[record]:
        one = st.integers(0, 2 ** _RANGES[code] - 1)
        if code == "B" and count > 1:
            values[name] = draw(st.binary(min_size=count, max_size=count))
        elif count > 1:
            values[name] = draw(st.tuples(*[one] * count))
        else:
            values[name] = draw(one)
    return record, values


@given(records())
def test_every_record_comes_back_as_it_was_packed(case: tuple[str, dict[str, object]]) -> None:
    record, values = case
    packed = layout.pack(record, **values)
    assert len(packed) == layout.size(record)
    assert layout.unpack(record, packed) == values


@pytest.mark.parametrize(("record", "size"), [("rpc_msg", 168), ("conn_slot", 512)])
def test_records_have_the_size_that_the_c_side_was_built_for(record: str, size: int) -> None:
    assert layout.size(record) == size


def test_fields_that_do_not_exist_are_refused() -> None:
    with pytest.raises(TypeError, match="nonsense"):
        layout.pack("rpc_msg", nonsense=1)


def test_the_generated_header_satisfies_its_own_assertions(tmp_path: Path) -> None:
    (tmp_path / "layout.h").write_text(c_header(layout, defaults))
    (tmp_path / "check.c").write_text('#include "layout.h"\n')
    subprocess.run(["cc", "-std=gnu11", "-Wall", "-Werror", "-fsyntax-only", "check.c"], cwd=tmp_path, check=True)


@given(
    secret=st.integers(0, 2**64 - 1),
    ends=st.lists(st.tuples(st.binary(min_size=16, max_size=16), st.integers(0, 65535)), min_size=2, max_size=2),
)
def test_both_ends_find_the_same_bucket(secret: int, ends: list[tuple[bytes, int]]) -> None:
    (addr_a, port_a), (addr_b, port_b) = ends
    one = layout.bucket_index(secret, addr_a, port_a, addr_b, port_b)
    assert one == layout.bucket_index(secret, addr_b, port_b, addr_a, port_a)
    assert 0 <= one < layout.REGISTRY_BUCKETS


def test_every_reason_has_its_sentence() -> None:
    assert set(REASON_TEXT) == set(Reason)
    assert all(text for reason, text in REASON_TEXT.items() if reason is not Reason.NONE)


def test_a_reason_that_earlier_shims_give_is_read_as_its_successor() -> None:
    merged = {9: Reason.UNUSUAL_OPTION, 12: Reason.INHERITED, 16: Reason.PEER_VIOLATION}
    assert {number: Reason(number) for number in merged} == merged
    with pytest.raises(ValueError, match="99"):
        Reason(99)


def test_the_limits_of_channels_are_those_of_channel_h() -> None:
    text = (NATIVE / "channel/channel.h").read_text()
    found = dict(re.findall(r"#define (CHANNEL_\w+) ([^/\n]+?)\s*(?:/\*.*)?\n", text))

    def number(name: str) -> int:
        factor, _, shift = found[name].strip("()").partition("<<")
        return int(factor.strip().rstrip("u"), 0) << int(shift or 0)

    assert number("CHANNEL_HEADER_SIZE") == limits.CHANNEL_HEADER_SIZE
    assert number("CHANNEL_RING_MIN") == limits.RING_SIZE_MIN
    assert number("CHANNEL_RING_MAX") == limits.RING_SIZE_MAX


def test_records_are_as_long_as_struct_says() -> None:
    for record, fields in layout.RECORDS.items():
        assert layout.size(record) == struct.calcsize("=" + "".join(f"{n}{code}" for _, code, n in fields))


Moves = Mapping[tuple[Any, Any], IntEnum]
TABLES: Final[dict[str, tuple[type[IntEnum], type[IntEnum], Moves]]] = {
    "TX": (Tx, TxEvent, TX_TRANSITIONS),
    "RX": (Rx, RxEvent, RX_TRANSITIONS),
}


@pytest.mark.parametrize("way", TABLES)
def test_the_shim_has_the_table_of_the_switch_over_pair_by_pair(tmp_path: Path, way: str) -> None:
    states, events, moves = TABLES[way]
    lines = [
        '#include "layout.h"',
        "int main(void)",
        "{",
        f"static const uint8_t next[{way}_STATES][{way}_EVENTS] = {way}_NEXT;",
    ]
    for state in states:
        for event in events:
            to = f"{way}_{moves[state, event].name}" if (state, event) in moves else "0xff"
            lines.append(
                f"if (next[{way}_{state.name}][{way}_ON_{event.name}] != {to}) return {way}_ON_{event.name} + 1;"
            )
    (tmp_path / "layout.h").write_text(c_header(layout, defaults))
    (tmp_path / "check.c").write_text("\n".join([*lines, "return 0;", "}", ""]))
    subprocess.run(["cc", "-std=gnu11", "-Wall", "-Werror", "-o", "check", "check.c"], cwd=tmp_path, check=True)
    subprocess.run(["./check"], cwd=tmp_path, check=True)


def reachable(moves: Moves, start: IntEnum, without: IntEnum | None = None) -> set[IntEnum]:
    found = {start}
    while more := {to for (at, _), to in moves.items() if at in found and to is not without} - found:
        found |= more
    return found


@pytest.mark.parametrize("way", TABLES)
def test_every_state_can_be_come_to(way: str) -> None:
    states, events, moves = TABLES[way]
    assert reachable(moves, states(0)) == set(states)
    assert {event for _, event in moves} == set(events)


def test_every_sender_can_come_back_to_tcp() -> None:
    assert all(Tx.TCP in reachable(TX_TRANSITIONS, state) for state in Tx)


def test_nobody_comes_to_the_ring_but_by_consent_and_counts_that_agree() -> None:
    assert {pair for pair, to in TX_TRANSITIONS.items() if to is Tx.RING} == {(Tx.SWITCHING, TxEvent.SETTLED)}
    assert Rx.RING not in reachable(RX_TRANSITIONS, Rx.TCP, without=Rx.CONSENTED)
    assert {event for (_, event), to in RX_TRANSITIONS.items() if to is Rx.CONSENTED} == {RxEvent.SETTLED}


def test_what_was_recalled_goes_out_before_anything_else() -> None:
    assert {event for state, event in TX_TRANSITIONS if state is Tx.RESEND} == {TxEvent.RESENT}
    assert {event for state, event in RX_TRANSITIONS if state is Rx.RECALLED} == {RxEvent.DRAINED}
