"""The RDMA device of an interface: the route names the interface, the interface names the device.

The kernel's sysfs has both. Every entry of a port's GID table names its interface (a VLAN's as well). An adapter's own
directory lists its RDMA devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final

from sidestep import limits

_SYS: Final = Path("/sys")


def device_of(interface: str, root: Path = _SYS) -> str | None:
    """The RDMA device that sends over `interface`; None if there is none. `root` is where sysfs is."""
    if not interface or interface in (".", "..") or "/" in interface:
        return None
    for device in _entries(root / "class/infiniband"):
        for port in _entries(device / "ports"):
            if any(_text(index) == interface for index in _entries(port / "gid_attrs/ndevs")):
                return device.name
    return next((device.name for device in _entries(root / "class/net" / interface / "device/infiniband")), None)


def _entries(directory: Path) -> Iterator[Path]:
    """Entries of a directory, in order; none if it is not there."""
    try:
        found = list(islice(directory.iterdir(), limits.SYSFS_ENTRIES_MAX))
    except OSError:  # errors: no such class of devices here, or the device has just gone
        return
    yield from sorted(found)


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # EINVAL: this entry of the GID table is empty
        return None
