"""The records that C and Python share."""

from __future__ import annotations

import re
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sidestep
from sidestep import limits
from sidestep.config import PromoteAfter
from sidestep.native import layout
from sidestep.native.layout import REASON_TEXT, Reason

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
    (tmp_path / "layout.h").write_text(layout.c_header())
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


def test_the_limits_of_channels_are_those_of_channel_h() -> None:
    text = (NATIVE / "channel.h").read_text()
    found = dict(re.findall(r"#define (CHANNEL_\w+) ([^/\n]+?)\s*(?:/\*.*)?\n", text))

    def number(name: str) -> int:
        factor, _, shift = found[name].strip("()").partition("<<")
        return int(factor.strip().rstrip("u"), 0) << int(shift or 0)

    assert number("CHANNEL_HEADER_SIZE") == limits.CHANNEL_HEADER_SIZE
    assert number("CHANNEL_RING_MIN") == limits.RING_SIZE_MIN
    assert number("CHANNEL_RING_MAX") == limits.RING_SIZE_MAX


def test_calls_without_bytes_mean_the_same_to_the_shim_and_to_the_commands() -> None:
    found = re.search(r"promote_after_bytes = colon \? .* : (\d+);", (NATIVE / "shim.c").read_text())
    assert found is not None
    assert PromoteAfter.parse("16").payload_len == int(found[1])


def test_the_version_is_written_the_same_twice() -> None:
    found = re.search(r"version: '([^']+)'", (ROOT / "meson.build").read_text())
    assert found is not None
    assert found[1] == sidestep.__version__


def test_records_are_as_long_as_struct_says() -> None:
    for record, fields in layout.RECORDS.items():
        assert layout.size(record) == struct.calcsize("=" + "".join(f"{n}{code}" for _, code, n in fields))
