"""Puts the process under a seccomp filter that kills it for calls which it has no need of."""

from __future__ import annotations

import ctypes
import os
import platform
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Final

PR_SET_SECCOMP: Final = 22  # linux/prctl.h
PR_SET_NO_NEW_PRIVS: Final = 38
SECCOMP_MODE_FILTER: Final = 2
SECCOMP_SET_MODE_FILTER: Final = 1  # of seccomp(2)
KILL_PROCESS: Final = 0x8000_0000
ALLOW: Final = 0x7FFF_0000
# First sendmsg, recvmsg, preadv2, getsockopt, ioctl, which a connection needs that was promoted. Then what one on TCP
# does not need: pwritev2, eventfd2, memfd_create, socket, connect, readlinkat; and last the number of seccomp itself.
NUMBERS: Final = {
    "x86_64": (46, 47, 327, 55, 16, 328, 290, 319, 41, 42, 267, 317),
    "aarch64": (211, 212, 286, 209, 29, 287, 19, 279, 198, 203, 78, 277),
}


# Calls that a confined process needs: to read and write, to have memory, to end.
HARMLESS: Final = {
    "x86_64": (0, 1, 3, 5, 8, 9, 10, 11, 12, 13, 14, 15, 25, 28, 39, 48, 51, 55, 60, 186, 202, 228, 231, 234, 318),
    "aarch64": (63, 64, 57, 80, 62, 222, 226, 215, 214, 134, 135, 139, 216, 233, 172, 210, 204, 209, 93, 178, 98, 113,
                94, 131, 278),
}  # fmt: skip
# By these, among others, a process hands a socket on, changes it, or leaves its bytes to others.
UNCONTROLLED: Final = {
    "x86_64": {"clone": 56, "clone3": 435, "fork": 57, "vfork": 58, "execve": 59, "execveat": 322, "sendmsg": 46,
               "sendmmsg": 307, "sendto": 44, "connect": 42, "setsockopt": 54, "ioctl": 16, "fcntl": 72,
               "io_submit": 209, "io_uring_setup": 425, "io_uring_enter": 426, "epoll_ctl": 233},
    "aarch64": {"clone": 220, "clone3": 435, "execve": 221, "execveat": 281, "sendmsg": 211, "sendmmsg": 269,
                "sendto": 206, "connect": 203, "setsockopt": 208, "ioctl": 29, "fcntl": 25, "io_submit": 2,
                "io_uring_setup": 425, "io_uring_enter": 426, "epoll_ctl": 21},
}  # fmt: skip
ARCH: Final = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}  # linux/audit.h
CLONE_NEWPID: Final = 0x2000_0000
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06  # linux/bpf_common.h
_children: list[tuple[int, int]] = []


def _line(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("HBBI", code, then, otherwise, value)


def allowing(also: str = "", partly: str = "", *, other_arch: bool = False) -> bytes:
    """A filter that allows harmless calls, another one, one with an argument. `other_arch`: and those of 32 bits."""
    machine = platform.machine()
    program = _line(LOAD, 4) + _line(EQUAL, ARCH[machine], 1, 0)
    program += _line(RETURN, ALLOW if other_arch else KILL_PROCESS)
    program += _line(LOAD, 0) + _line(AT_LEAST, 1, 0, 0)  # the second does nothing, as in what libseccomp makes
    for number in (*HARMLESS[machine], *([UNCONTROLLED[machine][also]] if also else [])):
        program += _line(EQUAL, number, 0, 1) + _line(RETURN, ALLOW)
    if partly:
        program += _line(EQUAL, UNCONTROLLED[machine][partly], 0, 3) + _line(LOAD, 24)  # its second argument
        program += _line(EQUAL, 1, 0, 1) + _line(RETURN, ALLOW)
    return program + _line(RETURN, KILL_PROCESS)


def forbidding(forbidden: Sequence[int]) -> bytes:
    """A filter that kills the process for these calls, and allows all others."""
    program = _line(LOAD, 0)
    for at, number in enumerate(forbidden):
        program += _line(EQUAL, number, len(forbidden) - at)  # to the last line
    return program + _line(RETURN, ALLOW) + _line(RETURN, KILL_PROCESS)


def begin(
    fd: int, rounds: int, also: str = "", partly: str = "", *, copies: int = 0, other_arch: bool = False,
    unknown: bool = False, shut: bool = False, refused: bool = False, apart: bool = False,
) -> bytes:  # fmt: skip
    """Makes a child under a filter that lets it make harmless calls, and what else is named; a byte when it is there.

    It answers so many times what comes, and maybe shuts its sending down, and then lives until `end()`. `copies` are of
    the socket, in the child. `unknown`: the filter allows what is not named here. `refused`: the kernel does not take
    the filter, and a child of that child has the socket for a while longer. `apart`: it counts processes for itself.
    """
    program = (
        forbidding([*UNCONTROLLED[platform.machine()].values()])
        if unknown
        else allowing(also, partly, other_arch=other_arch)
    )
    program += _line(0xFFFF, 0) if refused else b""
    said, says = os.pipe()
    waits, ends = os.pipe()
    libc = ctypes.CDLL(None)
    if apart and libc.unshare(CLONE_NEWPID):
        raise PermissionError("unshare")
    if pid := os.fork():
        _children.append((pid, ends))
        os.close(waits)
        return os.read(said, 1)
    os.close(ends)
    for _ in range(copies):
        os.dup(fd)
    os.write(says, b"." if put_under(program) == (-1 if refused else 0) else b"!")
    for _ in range(rounds):
        os.write(fd, os.read(fd, 6).upper())
    if shut:
        libc.shutdown(fd, socket.SHUT_WR)
    os.read(waits, 1)
    if refused and os.fork() == 0:
        time.sleep(5)
    os._exit(0)


def idle() -> None:
    """Makes a child that has all that its parent has, and does nothing until `end()`. It has returned from fork."""
    waits, ends = os.pipe()
    ready, started = os.pipe()
    if pid := os.fork():
        _children.append((pid, ends))
        os.close(waits)
        os.close(started)
        os.read(ready, 1)
        os.close(ready)
        return
    os.close(ends)
    os.close(ready)
    os.close(started)
    os.read(waits, 1)
    os._exit(0)


def end() -> int:
    """Ends the child; its status."""
    pid, ends = _children.pop()
    os.close(ends)
    return os.waitpid(pid, 0)[1]


def enter(way: str, lenient: int = 0) -> int:
    """By `way`: prctl, or seccomp as libseccomp makes that call; what it returns. So many of the calls stay allowed."""
    *forbidden, seccomp = NUMBERS[platform.machine()][lenient:]
    return put_under(forbidding(forbidden), seccomp if way == "seccomp" else None)


def waits_in_a_child(fd: int) -> int:
    """A child of this process enters, and waits for the socket; its status when it has ended."""
    if pid := os.fork():
        return os.waitpid(pid, 0)[1]
    entered = enter("prctl")
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    for timeout in (0, 1):
        poll.poll(timeout)
    os._exit(0 if entered == 0 else 1)


def put_under(program: bytes, seccomp: int | None = None) -> int:
    """This process, under that filter; `seccomp`: the number of the call that says so, if it is not prctl."""
    libc = ctypes.CDLL(None, use_errno=True)
    memory = ctypes.create_string_buffer(program, len(program))
    program_at = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(memory)))
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return -ctypes.get_errno()
    if seccomp is None:
        return int(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program_at, 0, 0))
    return int(libc.syscall(seccomp, SECCOMP_SET_MODE_FILTER, 0, program_at))
