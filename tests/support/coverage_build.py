"""What the C of the tests is compiled with where a run notes what its items touch.

SIDESTEP_COVERAGE names the directory of the maps, for pytest and the builds that it starts; the library itself has it
from meson's option `coverage`. See coverage_runtime.c.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

DIRECTORY: Final = "SIDESTEP_COVERAGE"
RUNTIME: Final = Path(__file__).with_name("coverage_runtime.c")


def compile_flags(name: str) -> list[str]:
    """Flags for each C file of the program or library whose map is called `name`; empty if nobody asks."""
    maps = os.environ.get(DIRECTORY)
    if not maps:
        return []
    where = [f'-DCOVERAGE_DIRECTORY="{maps}"', f'-DCOVERAGE_NAME="{name}"']
    return ["-fsanitize-coverage=trace-pc", "-fno-optimize-sibling-calls", *where]  # as in native/meson.build


def runtime() -> list[str]:
    """What is compiled besides."""
    return [str(RUNTIME)] if os.environ.get(DIRECTORY) else []
