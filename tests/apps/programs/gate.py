"""How a program stays under the test's control once its results are out."""

from __future__ import annotations

import sys
from collections.abc import Callable


def linger(nudge: Callable[[], object]) -> None:
    """Stay until standard input ends; for each line of it call `nudge` and answer "nudged"."""
    for _ in sys.stdin:
        nudge()
        print("nudged", flush=True)
