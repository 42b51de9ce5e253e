"""Random programs of one process that holds both ends of its connections (player.c): each call as over kernel TCP.

The seed decides all, so a difference comes again. A long run: SIDESTEP_PLAYER_SECONDS=3600 plays so long in each
setting, from seed SIDESTEP_PLAYER_SEED on.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Final

import pytest
import toolchain
from common import PATIENCE_S

from sidestep.testing import Sidestep

pytestmark = pytest.mark.slow

SECONDS: Final = float(os.environ.get("SIDESTEP_PLAYER_SECONDS", "0"))
FIRST: Final = int(os.environ.get("SIDESTEP_PLAYER_SEED", "1"))
SEEDS: Final = 24  # without a time, and those in which something was found:
FOUND: Final[Mapping[tuple[str | None, ...], Sequence[int]]] = {
    ("0",): (
        10013,
        10065,
        10085,
        10107,
        10119,
        10146,
        30112,
        61018,
        61058,
        61088,
        301863,
        400335,
        500123,
        501136,
        501410,
        501860,
        600654,
    ),
    (None,): (20039, 20040, 20073, 20161, 20264, 62005, 51312, 101694, 62002, 301863, 400335, 501410),
    ("0", "passing"): (3, 4, 6, 11, 13, 24, 26, 28, 29, 30, 40, 56, 62, 79, 89, 601025, 620923),
    (None, "passing"): (100757, 601025),
}
STEPS: Final = 60
AGAIN: Final = 3  # plays that have to agree


@pytest.fixture(scope="module")
def player() -> Path:
    return toolchain.build("player", [Path(__file__).with_name("player.c")], ["-O2", "-D_GNU_SOURCE"])


def play(player: Sequence[str], seed: int, env: Mapping[str, str] | None) -> list[str]:
    """Lines that the program prints, and how it ends."""
    argv = [player[0], str(seed), str(STEPS), *player[1:]]
    try:
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except subprocess.TimeoutExpired as stuck:
        return [*(stuck.stdout or b"").decode().splitlines(), "it stands still"]
    return [*done.stdout.splitlines(), *done.stderr.splitlines(), f"ended with {done.returncode}"]


def differ(one: str, other: str) -> bool:
    """True if two lines differ. Of edges ("end~bits") the other may have more."""
    if "~" not in one + other:
        return one != other
    told = [dict(word.split("~") for word in line.split() if "~" in word) for line in (one, other)]
    rest = [[word for word in line.split() if "~" not in word] for line in (one, other)]
    return rest[0] != rest[1] or any(int(bits, 16) & ~int(told[1].get(end, "0"), 16) for end, bits in told[0].items())


def differing(one: list[str], other: list[str]) -> int | None:
    """The first line in which two plays differ."""
    pairs = enumerate(zip(one, other, strict=False))
    ends = None if len(one) == len(other) else min(len(one), len(other))
    return next((at for at, (a, b) in pairs if differ(a, b)), ends)


def difference(player: Sequence[str], seed: int, env: Mapping[str, str]) -> str | None:
    """Where the shim differs from kernel TCP, each time; None: nowhere, or TCP differs from itself there."""
    native, text = play(player, seed, None), None
    for _ in range(AGAIN):
        shimmed = play(player, seed, env)
        at = differing(native, shimmed)
        if at is None:
            return None
        changed = differing(native, play(player, seed, None))
        if changed is not None and changed <= at:
            return None
        text = shown(seed, native, shimmed, at)
    return text


def shown(seed: int, native: list[str], shimmed: list[str], at: int) -> str:
    """What differs in line `at`."""
    before, over, under = (" ".join(lines) for lines in (native[:at][-1:], native[at:][:1], shimmed[at:][:1]))
    return f"seed {seed}: behind '{before}'\n  over kernel TCP: {over}\n  under the shim:  {under}"


@pytest.mark.timeout(0 if SECONDS else 100)
@pytest.mark.parametrize("passing", [(), ("passing",)], ids=["kept", "passed"])
@pytest.mark.parametrize("promote_after", ["0", None], ids=["at-once", "default"])
def test_each_call_as_over_kernel_tcp(player: Path, promote_after: str | None, passing: Sequence[str]) -> None:
    end = time.monotonic() + SECONDS
    found = []
    with Sidestep(promote_after=promote_after) as sidestep:
        for at, seed in enumerate(chain(FOUND[promote_after, *passing], count(FIRST))):
            if at >= SEEDS and time.monotonic() >= end:
                break
            if text := difference([os.fspath(player), *passing], seed, sidestep.env()):
                found.append(text)
        promoted = sidestep.status()["counters"].get("claim_matched", 0)
    assert not found, "\n".join(found)
    assert promoted > SEEDS
