"""The frames in tests/rdma/iwarp/data/iwarp-frames.txt: what other programs have agreed on, byte for byte."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path


@cache
def frames() -> dict[str, bytes]:
    """By name."""
    text = (Path(__file__).parents[1] / "rdma" / "iwarp" / "data" / "iwarp-frames.txt").read_text()
    blocks = re.findall(r"(?m)^(T\w+) .*\n((?:[0-9a-f]{4}  .+\n)+)", text + "\n")
    return {name: bytes.fromhex(re.sub(r"(?m)^[0-9a-f]{4}  ", "", dump)) for name, dump in blocks}
