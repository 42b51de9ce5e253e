"""Processes that compute beside a test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_BUSY: Final = "import os\np = os.getppid()\nwhile os.getppid() == p:\n    for _ in range(1000000): pass"


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many of them beside the block; they end with it, and with us, however that may be."""
    load = [subprocess.Popen([sys.executable, "-S", "-c", _BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in load:
            process.kill()
        for process in load:
            process.wait()
