"""Damaged ELF files: the loader refuses them or takes them, and never fails at that.

SIDESTEP_FUZZ_MINUTES=15 is the long form, for each kind of file.
"""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import time
from pathlib import Path
from typing import Final

import pytest
from foreign_programs import build

pytestmark = pytest.mark.slow

ROUNDS: Final = 400  # for each kind, without a time
VALUES: Final = (0, 1, 2, 0x3F, 0xFFF, 0x1000, 0x7FFFFFFF, 0x80000000, 1 << 40, 1 << 47, (1 << 63) - 1, 1 << 63, -1)
HEADER: Final = 64  # bytes of an Elf64_Ehdr
ENTRIES: Final = {32: 56, 40: 64}  # where it tells of program headers and of sections; bytes of each entry


def damage(data: bytearray, chance: random.Random) -> None:
    """One to four places of the headers or of the code become others, or the end is missing."""
    tables = [(0, HEADER)]
    for at, size in ENTRIES.items():
        (begin,), (count,) = struct.unpack_from("=Q", data, at), struct.unpack_from("=H", data, 56 if at == 32 else 60)
        tables.append((begin, size * count))
    for _ in range(chance.randint(1, 4)):
        match chance.randrange(6):
            case 0:
                data[chance.randrange(len(data))] = chance.randrange(256)
            case 1:
                del data[chance.randrange(len(data)) :]
            case _:
                begin, length = chance.choice(tables)
                size, code = chance.choice([(8, "=Q"), (4, "=I"), (2, "=H"), (1, "=B")])
                at = begin + chance.randrange(length // size) * size
                if at + size <= len(data):
                    struct.pack_into(code, data, at, chance.choice(VALUES) % (1 << 8 * size))
        if len(data) < HEADER:
            return


@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", ["static", "static-pie", "musl-static", "musl"])
def test_a_damaged_program_is_refused_or_taken(loader: Path, tmp_path: Path, kind: str) -> None:
    minutes = float(os.environ.get("SIDESTEP_FUZZ_MINUTES", "0"))
    end, seed, seen = time.monotonic() + 60 * minutes, 0 if not minutes else time.time_ns(), set()
    whole = build("told", kind).read_bytes()
    path = tmp_path / "damaged"
    while seed < ROUNDS if not minutes else time.monotonic() < end:
        data = bytearray(whole)
        damage(data, random.Random(seed))
        path.write_bytes(data)
        found = subprocess.run([loader, "--check", path], capture_output=True, timeout=60, check=False)
        assert found.returncode in (0, 1), f"seed {seed}: {found.returncode}, {found.stderr.decode()}"
        refused = json.loads(found.stdout)["refused"]
        assert (refused is None) == (found.returncode == 0), f"seed {seed}: {found.stdout.decode()}"
        seen.add(refused)
        seed += 1
    assert None in seen
    assert len(seen) > 4
