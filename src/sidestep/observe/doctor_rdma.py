"""Checks of `sidestep doctor` where the kernel has RDMA devices: the libraries, and how much memory may be pinned."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Final

from sidestep.errors import Unavailable
from sidestep.observe.doctor import Checks, Finding, Level
from sidestep.rdma.kernel.libraries import Libraries
from sidestep.rdma.kernel.sysfs import SYSFS, kernel_devices

_COMFORTABLE: Final = 64 << 20  # bytes: a thousand connections with other hosts (limits.REMOTE_RECEIVES_PINNED)
_CAP_IPC_LOCK: Final = 14  # include/uapi/linux/capability.h
_REMEDY: Final = (
    "ulimit -l unlimited; for a service LimitMEMLOCK=infinity, for users a line 'USER - memlock unlimited' in "
    "/etc/security/limits.conf"
)


def rdma_checks(sysfs: Path = SYSFS) -> Checks:
    """Checks of RDMA; none where the kernel has no device."""
    if not kernel_devices(sysfs):
        return ()
    return (("rdma devices", lambda: _devices(sysfs)), ("locked memory", locked_memory))


def _devices(sysfs: Path) -> Finding:
    found = kernel_devices(sysfs)
    names = ", ".join(f"{device.name} ({device.ports[0].state if device.ports else 'no port'})" for device in found)
    try:
        Libraries()
    except Unavailable as error:  # connections have other ways
        return Finding("rdma devices", Level.NOTE, f"{names}, not used: {error.message}", error.remedy)
    return Finding("rdma devices", Level.OK, f"{names}; libibverbs and librdmacm load")


def locked_memory() -> Finding:
    """Finding about RLIMIT_MEMLOCK, which bounds a device's pinned memory (ibv_reg_mr(3), setrlimit(2))."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if _may_lock():
        return Finding("locked memory", Level.OK, "not bounded: this user may lock memory (CAP_IPC_LOCK)")
    if soft == resource.RLIM_INFINITY:
        return Finding("locked memory", Level.OK, "not bounded (RLIMIT_MEMLOCK)")
    of_hard = "unlimited" if hard == resource.RLIM_INFINITY else f"{hard >> 10} KiB"
    text = f"{soft >> 10} KiB may be registered with an RDMA device at a time (RLIMIT_MEMLOCK, up to {of_hard})"
    return Finding("locked memory", Level.OK if soft >= _COMFORTABLE else Level.NOTE, text, _REMEDY)


def _may_lock() -> bool:
    """True if the limit does not hold for this process."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    return False
