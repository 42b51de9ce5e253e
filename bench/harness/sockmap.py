"""The peer: BPF's sockmap, by which the kernel puts what a socket sends into the receiving socket of the same host.

The programs of its world are in a control group of their own. A BPF program at that group adds each connection that
they make or accept to a map. A second one, at the map, redirects each message to the socket of the other end, as Cilium
did. Programs run unchanged and without a library. Needs root, control groups of version 2, and a kernel that allows it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import socket
import struct
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from harness.model import PEER
from harness.world import CountedWorld
from sidestep.demo.world import Evidence, Program, Site

BY_TCP_MAX: Final = 4096  # bytes that an end may have received by TCP itself, before both ends were in the map
_CALLS: Final = {"x86_64": 321, "aarch64": 280}  # bpf(2), by machine
_PIDFD_GETFD: Final = 438
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_RECEIVED_AT: Final = 128  # tcpi_bytes_received in struct tcp_info, 8 bytes

# Of linux/bpf.h.
_MAP_CREATE, _PROG_LOAD, _PROG_ATTACH, _LINK_CREATE = 0, 5, 8, 28
_SOCKHASH, _SOCK_OPS, _SK_MSG = 18, 13, 16
_AT_GROUP, _AT_MAP = 3, 7  # BPF_CGROUP_SOCK_OPS, BPF_SK_MSG_VERDICT
_SOCK_HASH_UPDATE, _MSG_REDIRECT_HASH = 70, 71
_MADE, _ACCEPTED = 4, 5  # BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB, BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB
_INGRESS: Final = 1
_ENDS_MAX: Final = 1 << 17
_R0, _R1, _R2, _R3, _R4, _R6, _STACK = 0, 1, 2, 3, 4, 6, 10

# Where the contexts of both programs have the addresses and ports of a socket, and of its other end; True: swapped.
_OF_SOCKET: Final = ((28, False), (24, False), (68, False), (64, True))  # struct bpf_sock_ops
_OF_OTHER_END: Final = ((20, False), (24, False), (60, True), (64, False))  # struct sk_msg_md
_KEY: Final = 4 * len(_OF_SOCKET)


def _bpf(command: int, attributes: bytes) -> int:
    """The system call; returns a descriptor or 0."""
    number = _CALLS.get(platform.machine())
    if number is None:
        raise OSError(0, f"the number of bpf(2) is not known for {platform.machine()}")
    buffer = ctypes.create_string_buffer(attributes, 128)
    found = int(_LIBC.syscall(number, command, buffer, len(buffer)))
    if found < 0:
        raise OSError(ctypes.get_errno(), f"bpf(2): {os.strerror(ctypes.get_errno())}")
    return found


def _code(code: int, to: int = 0, source: int = 0, offset: int = 0, value: int = 0) -> bytes:
    return struct.pack("<BBhi", code, to | source << 4, offset, value)


def _call(function: int, map_fd: int, key: tuple[tuple[int, bool], ...], flags: int) -> bytes:
    """Stores a key of these fields of the context in R6, calls a function of the map with it, and returns 1."""
    code = b""
    for place, (field, swapped) in enumerate(key):
        code += _code(0x61, _R2, _R6, field)
        code += _code(0xDC, _R2, value=32) if swapped else b""
        code += _code(0x63, _STACK, _R2, 4 * place - _KEY)
    code += _code(0xBF, _R1, _R6) + _code(0x18, _R2, 1, value=map_fd) + _code(0)
    code += _code(0xBF, _R3, _STACK) + _code(0x07, _R3, value=-_KEY) + _code(0xB7, _R4, value=flags)
    return code + _code(0x85, value=function) + _code(0xB7, _R0, value=1) + _code(0x95)


def _loaded(kind: int, code: bytes) -> int:
    """The descriptor of a program of this kind."""
    licence, kept = ctypes.create_string_buffer(b"GPL"), ctypes.create_string_buffer(code)
    about = kind, len(code) // 8, ctypes.addressof(kept), ctypes.addressof(licence)
    return _bpf(_PROG_LOAD, struct.pack("=IIQQ", *about))


class Group:
    """A control group whose processes' connections among each other are redirected. Closing it takes all away."""

    def __init__(self, parent: Path) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="sidestep-bench-", dir=parent))
        self._fds: list[int] = []
        try:
            self._attach()
        except OSError:
            self.close()
            raise

    def _attach(self) -> None:
        sockets = self._kept(_bpf(_MAP_CREATE, struct.pack("=IIII", _SOCKHASH, _KEY, 8, _ENDS_MAX)))
        enter = _code(0xBF, _R6, _R1) + _code(0x61, _R2, _R1) + _code(0x15, _R2, offset=3, value=_MADE)
        enter += _code(0x15, _R2, offset=2, value=_ACCEPTED) + _code(0xB7, _R0, value=1) + _code(0x95)
        joins = self._kept(_loaded(_SOCK_OPS, enter + _call(_SOCK_HASH_UPDATE, sockets, _OF_SOCKET, 0)))
        redirect = _code(0xBF, _R6, _R1) + _call(_MSG_REDIRECT_HASH, sockets, _OF_OTHER_END, _INGRESS)
        redirects = self._kept(_loaded(_SK_MSG, redirect))
        _bpf(_PROG_ATTACH, struct.pack("=IIII", sockets, redirects, _AT_MAP, 0))
        group = self._kept(os.open(self.path, os.O_RDONLY | os.O_DIRECTORY))
        self._kept(_bpf(_LINK_CREATE, struct.pack("=IIII", joins, group, _AT_GROUP, 0)))

    def _kept(self, fd: int) -> int:
        self._fds.append(fd)
        return fd

    def pids(self) -> list[int]:
        """The processes in it."""
        return [int(line) for line in (self.path / "cgroup.procs").read_text().split()]

    def close(self) -> None:
        """Takes the programs and the group away; all its processes have ended."""
        for fd in reversed(self._fds):
            os.close(fd)
        self._fds.clear()
        self.path.rmdir()


def _groups() -> Path:
    """Where control groups of version 2 are mounted."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(place)
    raise OSError(0, "control groups of version 2 are not mounted")


@functools.cache
def sockmap_missing() -> str | None:
    """Why the peer cannot be run here, in a sentence; None when it can."""
    if os.geteuid():
        return "BPF's sockmap needs root"
    try:
        Group(_groups()).close()
    except OSError as error:
        return f"BPF's sockmap is not allowed here: {error.strerror}"
    return None


@dataclass(frozen=True, slots=True)
class _GroupSite(Site):
    """This host, in a group."""

    group: Group | None = None

    def argv(self, argv: list[str]) -> list[str]:
        """Starts it in the group."""
        assert self.group is not None, "made with one"
        return ["sh", "-c", 'echo $$ >"$0/cgroup.procs" && exec "$@"', str(self.group.path), *argv]


class _SockmapWorld(CountedWorld):
    """Kernel TCP's sockets, past its protocol."""

    def evidence(self, port: int, ends: int, *programs: Program) -> Evidence | None:
        """How many ends of the server at `port` received next to nothing by TCP itself."""
        super().evidence(port, ends, *programs)
        assert isinstance(self.server, _GroupSite)
        assert self.server.group is not None
        received = [size for pid in self.server.group.pids() for size in _received_by_tcp(pid, port)]
        redirected = sum(size <= BY_TCP_MAX for size in received)
        by_tcp = max(received, default=0)
        return Evidence(redirected, ends, (f"{len(received)} were found, by TCP {by_tcp} bytes came to one",))


@contextmanager
def sockmap_world(**options: Any) -> Iterator[CountedWorld]:
    """Kernel TCP's sockets, past its protocol, by a group of their own."""
    with closing(Group(_groups())) as group, _SockmapWorld(PEER, _GroupSite(group=group), **options) as world:
        yield world


def _received_by_tcp(pid: int, port: int) -> Iterator[int]:
    """Bytes that TCP itself delivered to each connection of a process from or to `port`."""
    with suppress(OSError):  # the process has ended
        pidfd = os.pidfd_open(pid)
        try:
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):  # closed meanwhile, or no connection
                    if str(fd.readlink()).startswith("socket:"):
                        yield from _received(pidfd, int(fd.name), port)
        finally:
            os.close(pidfd)


def _received(pidfd: int, fd: int, port: int) -> Iterator[int]:
    """The same of one socket; nothing of another's."""
    copy = int(_LIBC.syscall(_PIDFD_GETFD, pidfd, fd, 0))
    if copy < 0:
        return
    with socket.socket(fileno=copy) as sock:
        internet = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
        if internet and port in (sock.getsockname()[1], sock.getpeername()[1]):
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + 8)
            yield int.from_bytes(info[_RECEIVED_AT:], "little")
