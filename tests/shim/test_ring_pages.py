"""Pages of a ring that rests are given back, and that is counted: whoever has pinned them would have the old ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from told_ends import End, join, promote

from sidestep.native import _channel
from sidestep.testing import Sidestep

pytestmark = pytest.mark.slow


def counts(end: End) -> list[int]:
    """Those of both ends of its only channel: of who connected, and of who accepted."""
    process = Path("/proc") / str(end.ask("os.getpid()"))
    (at,) = [
        int(line.split("-")[0], 16)
        for line in (process / "maps").read_text().splitlines()
        if "memfd:sidestep-channel" in line and int(line.split()[2], 16) == 0  # the spills are mapped apart
    ]
    found = []
    with (process / "mem").open("rb", buffering=0) as memory:
        for side in range(2):
            offset, size = _channel.HEADER_WORDS[f"producer[{side}].pages"]
            memory.seek(at + offset)
            found.append(int.from_bytes(memory.read(size), "little"))
    return found


def test_each_time_is_counted() -> None:
    with Sidestep(promote_after="0") as stage:
        a, b = End(stage), End(stage)
        join(a, b)
        promote(stage, a, b)
        before = counts(a)
        assert before == [2, 2]
        for sender, both in ((None, [4, 4]), (a, [6, 4]), (b, [6, 6])):
            if sender is not None:
                other = b if sender is a else a
                sender.ask("s.sendall(b'x' * 100)")
                assert other.ask("len(get(100))") == 100
            for end in (a, b):
                end.tell("select.select([s], [], [], 4)[0]")
            assert [a.answer(), b.answer()] == ["[]", "[]"]
            assert counts(a) == counts(b) == both
