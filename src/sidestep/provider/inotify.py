"""The kernel's inotify, which Python lacks. Debian packages no library for it that is looked after and fits a loop."""

from __future__ import annotations

import ctypes
import os
from enum import IntFlag
from io import FileIO
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_HEAD: Final = Struct("iIII")  # watch, mask, cookie, bytes of the name with the zeros behind it
_READ_BYTES: Final = 1 << 16  # the next call reads further


class Mask(IntFlag):
    """inotify(7); what FileWatch needs of it."""

    ATTRIB = 0x00000004
    CLOSE_WRITE = 0x00000008
    MOVED_FROM = 0x00000040
    MOVED_TO = 0x00000080
    CREATE = 0x00000100
    DELETE = 0x00000200
    DELETE_SELF = 0x00000400
    MOVE_SELF = 0x00000800
    Q_OVERFLOW = 0x00004000
    IGNORED = 0x00008000
    ONLYDIR = 0x01000000
    ISDIR = 0x40000000


class Event(NamedTuple):
    """Event of a watched directory, or of an entry of it."""

    number: int  # number of the watch
    mask: int
    name: str  # name of the entry; empty: the directory itself


class Inotify(FileIO):
    """An inotify descriptor that never blocks."""

    def __init__(self) -> None:
        """Raises OSError if the user has too many."""
        super().__init__(_call("inotify_init1", os.O_CLOEXEC | os.O_NONBLOCK), "rb")

    def add_watch(self, path: Path, mask: int) -> int:
        """The number of the watch: that of the directory's earlier one, whose mask this one replaces."""
        return _call("inotify_add_watch", self.fileno(), os.fsencode(path), mask)

    def rm_watch(self, number: int) -> None:
        """Gives a watch up; raises OSError (EINVAL) if the kernel has done so already."""
        _call("inotify_rm_watch", self.fileno(), number)

    def events(self) -> list[Event]:
        """Events that have come, oldest first; empty if there are none."""
        data, offset, found = self.read(_READ_BYTES) or b"", 0, []
        while offset < len(data):
            number, mask, _, length = _HEAD.unpack_from(data, offset)
            offset += _HEAD.size + length
            found.append(Event(number, mask, os.fsdecode(data[offset - length : offset].rstrip(b"\0"))))
        return found


def _call(name: str, *arguments: int | bytes) -> int:
    result: int = getattr(_LIBC, name)(*arguments)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result
