"""The page about iWARP and its tables say what the code does, and their figures are right."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from sidestep import limits
from sidestep.rdma.iwarp.ddp import TAGGED, RdmapOp, Segment
from sidestep.rdma.iwarp.mpa import crc32c
from sidestep.rdma.iwarp.startup import frame as start_frame
from sidestep.rdma.iwarp.startup.frame import Enhanced, MpaRole, Rtr, StartFrame
from sidestep.rdma.iwarp.terminate import Code, Condition

WIRE = Path(__file__).parents[3] / "docs/wire"
PAGE = (WIRE / "iwarp.md").read_text()
TABLES = tomllib.loads((WIRE / "iwarp.toml").read_text())


def rows(heading: str, table: int = 0) -> list[list[str]]:
    """The cells of a table of a section, without its first two lines."""
    section = PAGE.split(f"\n### {heading}", 1)[1].split("\n##", 1)[0]
    tables = re.findall(r"(?m)(?:^\|.*\n)+", section + "\n")
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in tables[table].splitlines()[2:]]


def short(code: int) -> str:
    """As the page writes codes."""
    return f"{code >> 12}/{code >> 8 & 0xF}/{code & 0xFF:02X}"


def test_conditions_and_codes() -> None:
    """Section 4.3."""
    assert {name: codes["here"] for name, codes in TABLES["conditions"].items()} == {
        condition.name: short(condition.code) for condition in Condition
    }


def test_codes() -> None:
    """Section 4.2."""
    found = {f"{kind}/{code}" for kind, group in TABLES["codes"].items() for code, _ in group["codes"]}
    assert found == {short(code) for code in Code}


def test_opcodes() -> None:
    """Of §3.1: T, queue, and how such a segment begins."""
    for number, _, tagged, queue, begins, _ in rows("3.1"):
        op = RdmapOp(int(number))
        assert (op in TAGGED) == (tagged == "1")
        segment = Segment(op, True, queue=int(queue or 0)).encode()
        assert segment[:2].hex(" ") == begins.strip("`")
    assert len(rows("3.1")) == len(RdmapOp)


def test_checksums() -> None:
    """Of §7.2."""
    inputs = {
        "empty": b"", "one byte 00": b"\0", '"a"': b"a", '"123456789"': b"123456789", "32 x 00": bytes(32),
        "32 x ff": b"\xff" * 32, "00 01 to 1f": bytes(range(32)), "1f 1e to 00": bytes(range(31, -1, -1)),
    }  # fmt: skip
    assert set(TABLES["checksums"]) == set(inputs)
    for name, told in TABLES["checksums"].items():
        value = crc32c(inputs[name])
        assert (f"{value:08x}", value.to_bytes(4, "little").hex(" ")) == (told["crc"], told["wire"])
    assert crc32c(b"abc" + crc32c(b"abc").to_bytes(4, "little")) == int(TABLES["residue"], 16)


@pytest.mark.parametrize("emss", [int(name) for name in TABLES["mulpdu"]])
def test_mulpdu(emss: int) -> None:
    """Section 7.3, by its formulas."""
    plain, marked = emss - (6 + emss % 4), emss - (6 + 4 * -(-emss // 512) + emss % 4)
    limited = [min(max(each, 128), 64768) for each in (plain, marked)]
    assert TABLES["mulpdu"][str(emss)] == dict(zip(("plain", "markers"), limited, strict=True))


def test_start_up() -> None:
    """Of §6.1: the bits of the enhanced data, and the flags."""
    bits = {name.split(":")[0]: int(mask, 16) for mask, name in rows("6.1", 1)}
    assert (bits["B"], bits["C"], bits["D"]) == (Rtr.SEND, Rtr.WRITE, Rtr.READ)
    told = int.from_bytes(Enhanced(0x1234, 0x0567, True).encode())
    assert (told & bits["A"], told & bits["IRD of the sender"], told & bits["ORD of the sender"]) == (
        bits["A"], 0x1234 << 16, 0x0567,
    )  # fmt: skip
    flags = [int(each, 16) for each in re.findall(r"0x(\w\w) [MCRS]", rows("6.1")[1][2])]
    for position, name in enumerate(("markers", "crc", "rejected", "enhanced")):
        frame = StartFrame(MpaRole.REQUEST, crc=False, revision=2)
        one = StartFrame(**{**{each: getattr(frame, each) for each in ("role", "crc", "revision")}, name: True})
        assert one.encode()[16] == flags[position]
    assert f"{start_frame.PRIVATE_DATA_MAX} at most" in rows("6.1")[3][2]


def test_times() -> None:
    """Of §6.2 and §6.6."""
    assert f"{limits.MPA_REPLY_S:.0f} s for the Reply, {limits.MPA_REQUEST_S:.0f} s for the Request" in PAGE.replace(
        "\n   ", " "
    )
    chosen = dict(row[:2] for row in rows("6.6"))
    assert f"after {limits.MPA_DECISION_S:.0f} s" in chosen["user who does not decide"]
    assert chosen["first FPDU"].startswith(f"{limits.MPA_RTR_S:.0f} s for an RTR")
