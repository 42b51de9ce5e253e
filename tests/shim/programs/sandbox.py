"""Puts the process under a seccomp filter that kills it for calls which it has no need of."""

from __future__ import annotations

import ctypes
import os
import platform
import select
import struct
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


def forbid(forbidden: list[int], seccomp: int | None = None) -> int:
    """Who makes one of these calls is killed; `seccomp`: the number of the call that says so, if it is not prctl."""
    libc = ctypes.CDLL(None, use_errno=True)
    program = struct.pack("HBBI", 0x20, 0, 0, 0)  # BPF_LD | BPF_W | BPF_ABS: the call's number
    for at, number in enumerate(forbidden):
        program += struct.pack("HBBI", 0x15, len(forbidden) - at, 0, number)  # BPF_JMP | BPF_JEQ, to the last line
    program += struct.pack("HBBI", 0x06, 0, 0, ALLOW) + struct.pack("HBBI", 0x06, 0, 0, KILL_PROCESS)  # BPF_RET
    memory = ctypes.create_string_buffer(program, len(program))
    whole = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(memory)))
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return -ctypes.get_errno()
    if seccomp is None:
        return int(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, whole, 0, 0))
    return int(libc.syscall(seccomp, SECCOMP_SET_MODE_FILTER, 0, whole))
