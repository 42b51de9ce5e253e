"""The kernel takes a device away: whoever has it open is to close it, or is waited for.

Adapters that can be pulled out of running programs say so by DEVICE_FATAL. Other drivers, rxe and siw among them, let
`rdma link delete` and the like wait until the last program has closed the device, and no event of verbs tells that they
wait. What tells is the uevent of the device's file, as it goes first (ib_uverbs_remove_one in Linux). It needs no
privilege; in a network namespace of another user namespace there is none.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sidestep.loop import Loop

_NETLINK_KOBJECT_UEVENT: Final = 15
_KERNEL_GROUP: Final = 1
_UEVENT_MAX: Final = 8192  # bytes; the kernel's buffer has 2048
_REMOVED: Final = b"remove"
_SYSFS: Final = Path("/sys/class/infiniband_verbs")


class Removal:
    """Looks out for that of one device, `uverbs0` or another, and calls once; OSError if nobody may look."""

    def __init__(self, loop: Loop, name: str, removed: Callable[[], object]) -> None:
        self._loop = loop
        self._name = name
        self._removed = removed
        self._sock = socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, _NETLINK_KOBJECT_UEVENT
        )
        try:
            self._sock.bind((0, _KERNEL_GROUP))
        except OSError:
            self._sock.close()
            raise
        loop.on_readable(self._sock.fileno(), self._read)

    def close(self) -> None:
        """Calling it again does nothing."""
        if self._sock.fileno() >= 0:
            self._loop.forget(self._sock.fileno())
            self._sock.close()

    def _read(self) -> None:
        while self._sock.fileno() >= 0:
            try:
                message, (sender, _) = self._sock.recvfrom(_UEVENT_MAX)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                gone = not (_SYSFS / self._name).exists()  # some were lost
            else:
                gone = sender == 0 and is_removal(message, self._name)  # anybody may send: 0 is the kernel
            if gone:
                self.close()
                self._removed()


def is_removal(message: bytes, name: str) -> bool:
    """Whether a uevent says that this device's file is no more: `remove@PATH`, and fields behind zeros."""
    head = message.partition(b"\0")[0]
    action, _, path = head.partition(b"@")
    return action == _REMOVED and path.rpartition(b"/")[2] == name.encode()
