"""C programs that no C library of ours is loaded into: compiled in several ways."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import toolchain

PROGRAMS: Final = toolchain.TESTS / "loader" / "programs"
KERNEL_HEADERS: Final = tuple(f"-idirafter{place}" for place in ("/usr/include", "/usr/include/x86_64-linux-gnu"))
KINDS: Final[dict[str, tuple[str | None, tuple[str, ...]]]] = {  # compiler and options
    "static": (None, ("-static",)),
    "static-pie": (None, ("-static-pie", "-fPIE")),
    "musl-static": ("musl-gcc", ("-static", *KERNEL_HEADERS)),
    "musl": ("musl-gcc", KERNEL_HEADERS),
}


def build(name: str, kind: str) -> Path:
    """A program of tests/loader/programs, compiled in one of KINDS."""
    cc, options = KINDS[kind]
    return toolchain.build(f"{name}-{kind}", [PROGRAMS / f"{name}.c"], ["-O1", "-D_GNU_SOURCE", *options], cc=cc)
