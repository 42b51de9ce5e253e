"""Places of the parts of this installation that are not Python."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from sidestep import places
from sidestep.errors import Unavailable

LOADER_MACHINES: Final = ("x86_64", "aarch64")  # the names in meson.build


def include_dir() -> Path:
    """Directory of ``sidestep.h``, for the compilers of C programs.

    Raises:
        Unavailable: The header is missing from this installation.
    """
    package = Path(__file__).parent
    for place in (package / "include", package.parents[1] / "include" / "sidestep"):  # installed; in a checkout
        if (place / "sidestep.h").is_file():
            return place
    raise Unavailable("sidestep.h is missing", remedy="install sidestep with pip")


def native_library() -> Path:
    """Path of ``libsidestep.so``, the library that ``sidestep run`` preloads.

    Raises:
        Unavailable: The library was not built for this installation.
    """
    return Path(places.native_library())


def loader() -> Path | None:
    """Path of the program that starts static programs, and those of another C library; None where there is none."""
    return Path(found) if (found := places.loader()) else None


def loader_needed() -> Path:
    """The same path, where nothing can be done without it.

    Raises:
        Unavailable: This machine has none, or it was not built for this installation.
    """
    if found := loader():
        return found
    if (machine := os.uname().machine) not in LOADER_MACHINES:
        raise Unavailable(
            f"sidestep-loader is for {' and '.join(LOADER_MACHINES)}, and this is {machine}",
            remedy="do this on such a machine",
        )
    path = Path(places.NATIVE, "sidestep-loader")
    raise Unavailable(f"{path} is missing", remedy="install sidestep with pip, or run 'make build' in a checkout")
