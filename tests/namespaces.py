"""A thread in another network namespace."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_CLONE_NEWNET: Final = 0x40000000
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


@contextmanager
def thread_in_netns(namespace: Path | None) -> Iterator[None]:
    """This thread and its children are in that network namespace, or in a new one that goes with its last socket.

    Sockets stay in the namespace in which they were made.
    """
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _enter(namespace)
        try:
            yield
        finally:
            _call("setns", home, _CLONE_NEWNET)
    finally:
        os.close(home)


def _enter(namespace: Path | None) -> None:
    if namespace is None:
        _call("unshare", _CLONE_NEWNET)
        return
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call("setns", descriptor, _CLONE_NEWNET)
    finally:
        os.close(descriptor)


def _call(name: str, *arguments: int) -> None:
    if getattr(_LIBC, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
