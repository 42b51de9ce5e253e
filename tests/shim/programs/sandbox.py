"""Puts the process under a seccomp filter that kills it for calls which it has no need of."""

from __future__ import annotations

import ctypes
import os
import platform
import select
import socket
import struct
import time
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


# By these a process hands a socket on, changes it, or leaves its bytes to others.
CONFINED: Final = {
    "x86_64": {"clone": 56, "clone3": 435, "fork": 57, "vfork": 58, "execve": 59, "execveat": 322, "sendmsg": 46,
               "sendmmsg": 307, "sendto": 44, "connect": 42, "setsockopt": 54, "ioctl": 16, "fcntl": 72,
               "io_submit": 209, "io_uring_setup": 425, "io_uring_enter": 426, "epoll_ctl": 233},
    "aarch64": {"clone": 220, "clone3": 435, "execve": 221, "execveat": 281, "sendmsg": 211, "sendmmsg": 269,
                "sendto": 206, "connect": 203, "setsockopt": 208, "ioctl": 29, "fcntl": 25, "io_submit": 2,
                "io_uring_setup": 425, "io_uring_enter": 426, "epoll_ctl": 21},
}  # fmt: skip
_children: list[tuple[int, int]] = []


def begin(fd: int, rounds: int, allowed: str = "", *, shut: bool = False, refused: bool = False) -> bytes:
    """Makes a child under a filter that lets it do none of that, but for one call; a byte when it is there.

    It answers so many times what comes, and maybe shuts its sending down, and then lives until `end()`. `refused`: the
    kernel does not take the filter, and a child of that child has the socket for a while longer.
    """
    forbidden = [number for name, number in CONFINED[platform.machine()].items() if name != allowed]
    said, says = os.pipe()
    waits, ends = os.pipe()
    if pid := os.fork():
        _children.append((pid, ends))
        os.close(waits)
        return os.read(said, 1)
    os.close(ends)
    os.write(says, b"." if forbid(forbidden, whole=not refused) == (-1 if refused else 0) else b"!")
    for _ in range(rounds):
        os.write(fd, os.read(fd, 6).upper())
    if shut:
        socket.socket(fileno=fd).shutdown(socket.SHUT_WR)
    os.read(waits, 1)
    if refused and os.fork() == 0:
        time.sleep(5)
    os._exit(0)


def idle() -> None:
    """Makes a child that has all that its parent has, and does nothing until `end()`."""
    waits, ends = os.pipe()
    if pid := os.fork():
        _children.append((pid, ends))
        os.close(waits)
        return
    os.close(ends)
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
    return forbid(forbidden, seccomp if way == "seccomp" else None)


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


def forbid(forbidden: list[int], seccomp: int | None = None, *, whole: bool = True) -> int:
    """Who makes one of these calls is killed; `seccomp`: the number of the call that says so, if it is not prctl.

    What is not `whole` ends with a line that the kernel does not know.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    program = struct.pack("HBBI", 0x20, 0, 0, 0)  # BPF_LD | BPF_W | BPF_ABS: the call's number
    for at, number in enumerate(forbidden):
        program += struct.pack("HBBI", 0x15, len(forbidden) - at, 0, number)  # BPF_JMP | BPF_JEQ, to the last line
    program += struct.pack("HBBI", 0x06, 0, 0, ALLOW) + struct.pack("HBBI", 0x06, 0, 0, KILL_PROCESS)  # BPF_RET
    program += b"" if whole else struct.pack("HBBI", 0xFFFF, 0, 0, 0)
    memory = ctypes.create_string_buffer(program, len(program))
    program_at = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(memory)))
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return -ctypes.get_errno()
    if seccomp is None:
        return int(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program_at, 0, 0))
    return int(libc.syscall(seccomp, SECCOMP_SET_MODE_FILTER, 0, program_at))
