"""System calls of a program, counted by ptrace(2)."""

from __future__ import annotations

import ctypes
import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

_CONT, _DETACH, _SYSCALL, _SEIZE, _INTERRUPT, _GET_SYSCALL_INFO = 7, 17, 24, 0x4206, 0x4207, 0x420E
_TRACESYSGOOD, _STOP, _ENTRY = 1, 0x80, 1
_WRITE: Final = {"x86_64": 1, "aarch64": 64}[os.uname().machine]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def _ptrace(request: int, pid: int, address: int = 0, data: object = None) -> None:
    if _libc.ptrace(request, pid, address, data) < 0:
        raise OSError(ctypes.get_errno(), "ptrace")


def calls_until_output(
    pid: int, begin: Callable[[], None], seen: Callable[[int, Sequence[int]], None] | None = None
) -> Counter[int]:
    """Numbers of the system calls that a program of one thread makes after `begin`, until it writes to its output.

    `seen` gets number and arguments of each while the program stands before it.
    """
    calls: Counter[int] = Counter()
    info = (ctypes.c_uint64 * 10)()  # op, arch; instruction and stack pointer; number and arguments
    _ptrace(_SEIZE, pid, 0, _TRACESYSGOOD)
    _ptrace(_INTERRUPT, pid)
    begin()
    while True:
        _, status = os.waitpid(pid, 0)
        assert os.WIFSTOPPED(status)
        stop = os.WSTOPSIG(status)
        if stop == signal.SIGTRAP | _STOP:
            _ptrace(_GET_SYSCALL_INFO, pid, ctypes.sizeof(info), ctypes.addressof(info))
            if info[0] & 0xFF == _ENTRY:
                if (info[3], info[4]) == (_WRITE, 1):
                    _ptrace(_DETACH, pid)
                    return calls
                calls[info[3]] += 1
                if seen:
                    seen(info[3], info[4:10])
        _ptrace(_SYSCALL, pid, 0, None if status >> 16 or stop == signal.SIGTRAP | _STOP else stop)
