"""The loader's decoder of x86-64 instructions, beside objdump: the same instructions in all code of real programs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
import toolchain

SOURCES: Final = [Path(__file__).parent / "programs" / "decoder.c", *toolchain.native("loader_decode_x86_64")]


def programs() -> list[Path]:
    """Of several compilers and languages, with and without vector code."""
    libc = re.search(
        r"libc\.so\.6 => (\S+)", subprocess.run(["ldd", sys.executable], capture_output=True, text=True).stdout
    )
    assert libc
    return [Path(libc[1]), Path("/lib/ld-musl-x86_64.so.1"), Path("/usr/sbin/nginx")]


@pytest.mark.parametrize("program", programs(), ids=lambda path: path.name)
def test_instructions_are_those_of_objdump(program: Path) -> None:
    decoder = toolchain.build("decoder", SOURCES, toolchain.ADDRESS.flags)
    headers = subprocess.run(["objdump", "-h", program], capture_output=True, text=True, check=True).stdout
    found = re.search(r" \.text\s+(\w+)\s+(\w+)\s+\w+\s+(\w+)", headers)
    assert found
    size, address, offset = (int(text, 16) for text in found.groups())
    mine = subprocess.run([decoder, program, str(offset), str(size)], capture_output=True, text=True, check=True).stdout
    ours = set(mine.splitlines())
    theirs = subprocess.run(
        ["objdump", "-d", "-j", ".text", "-w", "--no-show-raw-insn", program],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = re.findall(r"(?m)^\s*([0-9a-f]+):\s+(.*)$", theirs.stdout)
    assert len(lines) > 10_000
    wrong = [f"{at} {text}" for at, text in lines if f"{int(at, 16) - address:x}" not in ours and "(bad)" not in text]
    assert not wrong[:20], f"{len(wrong)} of {len(lines)}"
