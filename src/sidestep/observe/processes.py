"""Processes that slots name: a shim writes a number that counts in its own pid_namespaces(7) only."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Final

from sidestep.provider.arena import pid_namespace_of

_PROC: Final = Path("/proc")
# Names that Docker, containerd, CRI-O, podman, LXC and systemd-nspawn give the cgroup of a container. That of a
# pod of podman is around those of its containers.
_CONTAINER: Final = re.compile(
    r"(?:^|[/:-])(?<!/libpod_parent/)([0-9a-f]{64})(?:\.scope)?(?:/|$)|/lxc(?:\.payload\.|/)([\w.-]+)|/machine-([\w.-]+)\.scope(?:/|$)",
    re.ASCII,
)
_SERVICE: Final = re.compile(r":/system\.slice/(?:[^/\n]+\.slice/)*([^/\n]+)\.service$", re.MULTILINE)
_NESTED: Final = 2  # numbers that a process has at least if its pid namespace is not ours
_OVER: Final = frozenset("ZX")  # states of a process that has ended: zombie, dead
_THREADS_AT: Final = 17  # place of num_threads behind the name, in proc_pid_stat(5)
_HELD: Final = frozenset("RTt")  # states of a thread that runs or could: runnable, stopped, traced
_CALL_NS: Final = 1_000_000  # a thread that has run for so long has left a call of the shim's that only keeps books
_ID_SHOWN: Final = 12  # digits of a container's id, as `docker ps` shows it


class Processes:
    """Processes as this one sees them, at one moment."""

    def __init__(self) -> None:
        self._containers: dict[int, str | None] = {}
        self._names: dict[int, str | None] = {}
        self._gone: dict[tuple[int, int], bool] = {}

    def here(self, namespace: int, pid: int, first: tuple[int, int] = (0, 0)) -> int:
        """The number here of process `pid` of a pid namespace, named by its inode (0: not known); 0: not seen here.

        `first` is a process of the same family: a namespace, and the number that it has there.
        """
        if self.counts_here(namespace):
            return pid
        return self._elsewhere.get((namespace, pid)) or self._beside(pid, *first)

    def counts_here(self, namespace: int) -> bool:
        """True if the numbers of that namespace are those of this process."""
        return namespace in (0, pid_namespace_of(_PROC / "self"))

    def gone(self, namespace: int, pid: int) -> bool:
        """True if process `pid` of a pid namespace has ended; False, too, if that is not known here.

        A zombie has ended: the kernel has closed what it held.
        """
        if (namespace, pid) not in self._gone:
            here = pid if self.counts_here(namespace) else self._elsewhere.get((namespace, pid))
            self._gone[namespace, pid] = _ended(here) if here is not None else self._is_nobody(namespace, pid)
        return self._gone[namespace, pid]

    def _is_nobody(self, namespace: int, pid: int) -> bool:
        """True if we see into that namespace, and no process can be the one of that number there."""
        return any(seen == namespace for seen, _ in self._elsewhere) and pid not in self._unplaced

    def name(self, pid: int) -> str | None:
        """Name of a program; None: the process has gone, or is not seen from here."""
        if pid not in self._names:
            self._names[pid] = program_name(pid)
        return self._names[pid]

    def container(self, pid: int) -> str | None:
        """The id or name of a process's container, from its cgroup; None: none, or none known."""
        if pid not in self._containers:
            self._containers[pid] = container_of(_read(_PROC / str(pid) / "cgroup"))
        return self._containers[pid]

    @cached_property
    def _elsewhere(self) -> dict[tuple[int, int], int]:
        """The numbers here of the processes in other pid namespaces."""
        mine, found = pid_namespace_of(_PROC / "self"), {}
        for process in _processes():
            if (namespace := pid_namespace_of(process)) not in (0, mine) and (numbers := _numbers(process)):
                found[namespace, numbers[-1]] = int(process.name)
        return found

    @cached_property
    def _unplaced(self) -> set[int]:
        """Numbers of the processes in other pid namespaces that this user cannot name."""
        unknown = (_numbers(process) for process in _processes() if not pid_namespace_of(process))
        return {numbers[-1] for numbers in unknown if len(numbers) >= _NESTED}

    def _beside(self, pid: int, namespace: int, first: int) -> int:
        """The number here of process `pid` of the pid namespace that another process is in; 0: that is not certain.

        Root without capabilities, as in the container of a provider, cannot read namespaces. Every user can read the
        numbers and the cgroup of a process.
        """
        known = _PROC / str(first)
        if not (namespace and first) or not self.counts_here(namespace):
            return 0
        if pid_namespace_of(known) or len(depth := _numbers(known)) < _NESTED:
            return 0
        if depth[-1] == pid:
            return first
        cgroup, found = _read(known / "cgroup"), []
        for process in _processes():
            numbers = _numbers(process)
            if len(numbers) == len(depth) and numbers[-1] == pid and _read(process / "cgroup") == cgroup:
                found.append(int(process.name))
        return found[0] if len(found) == 1 else 0


class Pace:
    """Progress of a process: whether it has come out of the call of its shim that it was in, if it was in one."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._ran_ns = {thread: ran_ns for thread, _, ran_ns in self._threads()}

    def moved_on(self) -> bool:
        """True if each thread sleeps, as none does within such a call, or has since run for longer than one takes."""
        return all(
            state not in _HELD or ran_ns - self._ran_ns.get(thread, 0) >= _CALL_NS
            for thread, state, ran_ns in self._threads()
        )

    def _threads(self) -> Iterator[tuple[str, str, int]]:
        """Each thread's number, state (proc_pid_stat(5)), and for how long it has run (sched-stats)."""
        for thread in (_PROC / str(self._pid)).glob("task/*"):
            state = _read(thread / "stat").rpartition(")")[2].split()
            if ran := _read(thread / "schedstat").split():
                yield thread.name, state[0] if state else "X", int(ran[0])


def program_name(pid: int) -> str | None:
    return _read(_PROC / str(pid) / "comm").rstrip("\n") or None


def program_names() -> set[str]:
    """The names of the programs that run here."""
    return {name for process in _processes() if (name := program_name(int(process.name)))}


def container_of(cgroups: str) -> str | None:
    """Container that /proc/PID/cgroup names: its id, shortened, or its name."""
    if found := _CONTAINER.search(cgroups.replace("\n", "/\n")):
        return found[1][:_ID_SHOWN] if found[1] else found[2] or found[3]
    return None


def _ended(pid: int) -> bool:
    """True if a process of this pid namespace has ended. The first thread of one may end before the others."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # another user's
        pass
    stat = _read(_PROC / str(pid) / "stat").rpartition(")")[2].split()
    return len(stat) > _THREADS_AT and stat[0] in _OVER and int(stat[_THREADS_AT]) <= 1


def service_of(cgroups: str) -> str | None:
    """The system's service that /proc/PID/cgroup names, without its suffix; None: it is a container's, or a user's."""
    found = _SERVICE.search(cgroups)
    return found[1] if found else None


def _processes() -> Iterator[Path]:
    return (process for process in _PROC.iterdir() if process.name.isdigit())


def _numbers(process: Path) -> list[int]:
    """Numbers of a process in each of its pid namespaces, from ours to its own; empty: it has gone."""
    found = re.search(r"^NSpid:\t([\d\t]+)$", _read(process / "status"), re.MULTILINE)
    return [int(number) for number in found[1].split()] if found else []


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
