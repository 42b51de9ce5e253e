"""RDMA devices that the kernel has, as sysfs tells of them: no library and no privilege is needed to look.

The files are described in the kernel's Documentation/ABI/stable/sysfs-class-infiniband.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import IPv6Address
from pathlib import Path
from typing import Final

from sidestep.rdma.kernel.gids import written

SYSFS: Final = Path("/sys/class/infiniband")
ROCE_V2: Final = "RoCE v2"
ETHERNET: Final = "Ethernet"
_ACTIVE: Final = "ACTIVE"
IWARP: Final = "RNIC"


@dataclass(slots=True)
class GidView:
    """An address of a port; its fields are names of `sidestep rdma list --json`."""

    index: int
    gid: str
    type: str  # "RoCE v2", "IB/RoCE v1"
    interface: str  # of the network, empty if it has none


@dataclass(slots=True)
class PortView:
    """A port; likewise."""

    number: int
    state: str  # "ACTIVE", "DOWN" and others
    link_layer: str  # "InfiniBand", "Ethernet"
    rate: str
    gids: list[GidView] = field(default_factory=list)


@dataclass(slots=True)
class KernelDeviceView:
    """A device; likewise."""

    name: str
    node_type: str  # "CA", "RNIC" (iWARP) and others
    firmware: str
    ports: list[PortView] = field(default_factory=list)


def kernel_devices(sysfs: Path = SYSFS) -> list[KernelDeviceView]:
    """All of them, by name; none where the kernel has no RDMA."""
    return [_device(path) for path in _in_order(sysfs)]


def why_not_joined(address: str, devices: list[KernelDeviceView]) -> str | None:
    """Why no queue pair at an address of this host can be joined by number, as a half sentence; None: it can."""
    told = _mapped(address)
    reason = ""
    for device in devices:
        for port in device.ports:
            kinds = {each.type for each in port.gids if each.gid == told}
            if not kinds:
                continue
            if port.link_layer != ETHERNET:
                reason = f"{device.name} is InfiniBand, whose paths only its subnet manager knows"
            elif ROCE_V2 not in kinds:
                reason = f"{device.name} has {address} for RoCE v1 only"
            elif port.state != _ACTIVE:
                reason = f"port {port.number} of {device.name} is {port.state}"
            else:
                return None
    return reason or _why_none(address, devices)


def _why_none(address: str, devices: list[KernelDeviceView]) -> str:
    if not devices:
        return "the kernel has no RDMA device"
    reason = f"no RDMA device of the kernel has a GID for {address}"
    if iwarp := ", ".join(each.name for each in devices if each.node_type == IWARP):
        reason += f"; {iwarp}: iWARP, whose queue pairs are not joined by number"
    return reason


def _mapped(address: str) -> str:
    """The GID of an IP address, as it is written here."""
    return address if ":" in address else f"::ffff:{address}"


def _device(path: Path) -> KernelDeviceView:
    ports = [_port(each) for each in _in_order(path / "ports")]
    return KernelDeviceView(path.name, _word(path / "node_type"), _text(path / "fw_ver"), ports)


def _port(path: Path) -> PortView:
    gids = []
    for each in _in_order(path / "gids"):
        if (gid := _gid(_text(each))) is not None:
            kind, interface = (_text(path / "gid_attrs" / what / each.name) for what in ("types", "ndevs"))
            gids.append(GidView(int(each.name), gid, kind, interface))
    return PortView(int(path.name), _word(path / "state"), _text(path / "link_layer"), _text(path / "rate"), gids)


def _gid(text: str) -> str | None:
    """As addresses are written; None for an empty place of the table."""
    try:
        found = IPv6Address(text)
    except ValueError:
        return None
    if not int(found):
        return None
    return written(found)


def _in_order(folder: Path) -> list[Path]:
    """By number where names are numbers."""
    try:
        found = list(folder.iterdir())
    except OSError:
        return []
    return sorted(found, key=lambda path: (int(path.name) if path.name.isdecimal() else 0, path.name))


def _word(path: Path) -> str:
    """What stands behind the number: `4: ACTIVE`."""
    return _text(path).rpartition(":")[2].strip()


def _text(path: Path) -> str:
    """Nothing where it cannot be read: empty places of the table cannot."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
