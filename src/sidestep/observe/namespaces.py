"""Network namespaces: this thread in another one, and hosts made of them.

Needs CAP_SYS_ADMIN in the user namespace that owns them: root has it, and so has everybody in one of his own.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final

_CLONE_NEWNET: Final = 0x40000000
_IP_TIMEOUT_S: Final = 10.0
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


def ip(command: str) -> None:
    """Runs iproute2's `ip`; raises CalledProcessError."""
    subprocess.run(["ip", *command.split()], check=True, timeout=_IP_TIMEOUT_S, capture_output=True)


class Namespace:
    """A network namespace that lasts as long as its descriptor, with `lo` up."""

    def __init__(self) -> None:
        with thread_in_netns(None):
            self._fd = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            ip("link set lo up")

    @property
    def path(self) -> Path:
        return Path(f"/proc/{os.getpid()}/fd/{self._fd}")

    def inside(self) -> AbstractContextManager[None]:
        return thread_in_netns(self.path)

    def close(self) -> None:
        os.close(self._fd)


class NetworkBridge(Namespace):
    """A network of hosts: a namespace with nothing in it but a bridge."""

    def __init__(self) -> None:
        super().__init__()
        with self.inside():
            ip("link add bridge type bridge forward_delay 0")
            ip("link set bridge up")

    def join(self, number: int, host: Namespace, *addresses: str) -> None:
        """Gives a host its `eth0`, with these addresses and prefix lengths; here it is `port` and the number."""
        with self.inside():
            ip(f"link add port{number} type veth peer name eth0 netns {host.path}")
            ip(f"link set port{number} master bridge up")
        with host.inside():
            for address in addresses:
                ip(f"addr add {address} dev eth0{' nodad' if ':' in address else ''}")
            ip("link set eth0 up")
