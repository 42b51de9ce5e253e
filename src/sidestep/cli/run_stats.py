"""`sidestep run --stats`: stays as the parent of the program, and prints at its end what was saved.

The program has the terminal and its job control as if it had been started alone. Both are of one process group, so a
signal of the terminal reaches the program without us. A signal to this process alone is passed on. A signal to the
whole group, not from the terminal, reaches the program twice.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Final

from sidestep.cli.shown import short
from sidestep.errors import Unavailable, counted
from sidestep.observe.connections import Connection, connections, ended
from sidestep.observe.explain import saved

# Signals about this process itself, and those that it cannot catch.
_OWN: Final = {
    signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP,
    signal.SIGSYS, signal.SIGABRT,
}  # fmt: skip
_FROM_KERNEL: Final = 0x80  # SI_KERNEL: the terminal's


def stay_as_parent(socket: Path) -> None:
    """Returns in a child, which is to become the program. The parent waits for it, and ends as it does."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _OWN)
    children = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, there would be no exit code
    started_ns = time.monotonic_ns()
    pid = os.fork()
    if pid:
        status = _wait(pid)
        _tell(socket, pid, started_ns)
        _end_like(status)
    signal.signal(signal.SIGCHLD, children)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # Python's own: if it was ignored, it stays so
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(pid: int) -> int:
    """The exit status of the program; until then signals are passed on to it."""
    while True:
        found = signal.sigwaitinfo(signal.valid_signals() - _OWN)
        if found.si_signo != signal.SIGCHLD:
            if found.si_code != _FROM_KERNEL or _for_the_leader(found.si_signo):
                os.kill(pid, found.si_signo)
            continue
        while (changed := os.waitpid(pid, os.WNOHANG | os.WUNTRACED))[0]:
            if not os.WIFSTOPPED(changed[1]):
                return changed[1]
            os.kill(os.getpid(), signal.SIGSTOP)  # our parent waits for that; SIGCONT comes here, and is passed on


def _for_the_leader(number: int) -> bool:
    """True if the hang-up is for this process only: the kernel sends a terminal's to the leader of its session."""
    return number == signal.SIGHUP and os.getsid(0) == os.getpid()


def _tell(socket: Path, pid: int, started_ns: int) -> None:
    try:
        text = summary(_connections_of(socket, pid, started_ns))
    except Unavailable as error:
        text = f"nothing is known of its connections: {error.message}"
    try:
        print(f"sidestep: {text}", file=sys.stderr, flush=True)  # noqa: T201 - as all of `run` does
    except OSError:  # no process reads it any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _connections_of(socket: Path, pid: int, started_ns: int) -> list[Connection]:
    """Connections of a process and its forks, as far as they are known; a part of it may live on."""
    found = {one.key: one for one in connections(socket) if one.pid == pid}
    found |= {one.connection.key: one.connection for one in ended(socket) if pid in (one.family, one.connection.pid)}
    return [one for one in found.values() if one.born_ns >= started_ns]


def summary(found: list[Connection]) -> str:
    """Savings, in a line."""
    promoted = sum(one.promoted_s is not None for one in found)
    by_ring = sum(one.tx.ring_bytes + one.rx.ring_bytes for one in found)
    by_tcp = sum(one.tx.tcp_bytes + one.rx.tcp_bytes for one in found)
    return (
        f"{counted(len(found), 'connection')}, {promoted:,} promoted; {short(by_ring)}B by ring, "
        f"{short(by_tcp)}B by TCP; {sum(map(saved, found)):,} system calls saved"
    )


def _end_like(status: int) -> None:
    """Exits with the program's code, or dies of its signal."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program has left its own
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
