"""sidestep runs any TCP program over shared memory, unchanged.

Two processes on one host that talk TCP, both started by ``sidestep run``, exchange their bytes through shared memory
once the connection has shown that it lives; everything else stays kernel TCP. The work is done by ``libsidestep.so``
inside the programs and by a small provider that pairs the two ends.
"""

from __future__ import annotations

from pathlib import Path

from sidestep.errors import Unavailable

__version__ = "0.1.0"

__all__ = ["__version__", "native_library"]


def native_library() -> Path:
    """Path of ``libsidestep.so``, the library that ``sidestep run`` preloads.

    Raises:
        Unavailable: The library was not built for this installation.
    """
    path = Path(__file__).with_name("native") / "libsidestep.so"
    if not path.is_file():
        raise Unavailable(f"{path} is missing", remedy="install sidestep with pip, or run 'make build' in a checkout")
    return path
