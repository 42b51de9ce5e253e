"""Checks of descriptors that strangers sent: sealed memfds and eventfds.

A mapping of a file that its sender can still shrink may end in SIGBUS. So every shared file must be sealed against that
before it is mapped.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
from typing import Final

from sidestep import limits
from sidestep.errors import PeerViolation
from sidestep.native import layout

F_SEAL_FUTURE_WRITE: Final = 0x10  # Linux 5.1; not in the fcntl module of Python 3.11
MUST_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def sealed_size(fd: int, what: str) -> int:
    """Size in bytes of a sealed memfd; raises PeerViolation if `fd` is anything else. `what` names it in the error."""
    try:
        # First, because it asks no file system: one that a stranger serves (FUSE) may never answer an fstat.
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise PeerViolation(f"the {what} is not a memfd", rule="descriptor") from error
    if seals & MUST_SEALS != MUST_SEALS:
        raise PeerViolation(f"the {what} is not sealed against shrinking and growing", rule="descriptor")
    found = os.fstat(fd)
    if found.st_dev != _memfd_device():
        raise PeerViolation(f"the {what} is of huge pages, which can be taken out of a sealed file", rule="descriptor")
    return found.st_size


@functools.cache
def _memfd_device() -> int:
    """The device number that all memfds of ordinary pages share."""
    fd = os.memfd_create("probe", os.MFD_CLOEXEC)
    try:
        return os.fstat(fd).st_dev
    finally:
        os.close(fd)


def segment_size(ring_size: tuple[int, int]) -> int:
    """Bytes of a channel's segment (channel.h): a header and, for each direction, a ring and its spill."""
    return limits.CHANNEL_HEADER_SIZE + sum(size + max(size, layout.CHANNEL_SPILL) for size in ring_size)


def channel_memory(ring_size: tuple[int, int]) -> int:
    """Bytes that a channel takes while all of its bytes are read in time: those of its rings, not of the spills."""
    return limits.CHANNEL_HEADER_SIZE + sum(ring_size)


def check_eventfd(fd: int, what: str) -> None:
    """Raises PeerViolation unless `fd` is an eventfd."""
    # The kernel has no call for that; the name of the anonymous inode cannot be forged by a file.
    if os.readlink(f"/proc/self/fd/{fd}") != "anon_inode:[eventfd]":  # noqa: PTH115 - no path, a name
        raise PeerViolation(f"the {what} is not an eventfd", rule="descriptor")


def check_doorbell(index: int, eventfd: int, page: int) -> None:
    """Raises PeerViolation unless these are an eventfd and the page in which the doorbell `index` stands."""
    check_eventfd(eventfd, "doorbell")
    if not sealed_size(page, "doorbell page") or index >= layout.DOORBELLS_PER_PAGE:
        raise PeerViolation(f"doorbell {index} of an impossible doorbell page", rule="malformed")


def sealed_memfd(name: str, size: int) -> int:
    """A new memfd of `size` bytes, sealed against shrinking and growing, close-on-exec."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, MUST_SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def reopen_read_only(fd: int) -> int:
    """A second descriptor of the same file that cannot write, close-on-exec."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
