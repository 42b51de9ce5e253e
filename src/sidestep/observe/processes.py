"""Which process a slot means: its shim wrote a number that counts in its own pid_namespaces(7) only."""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
# How Docker, containerd, CRI-O, podman, LXC and systemd-nspawn name the cgroup of a container.
_CONTAINER: Final = re.compile(
    r"(?:^|[/:-])([0-9a-f]{64})(?:\.scope)?(?:/|$)|/lxc(?:\.payload\.|/)([\w.-]+)|/machine-([\w.-]+)\.scope(?:/|$)",
    re.ASCII,
)
_ID_SHOWN: Final = 12  # digits of a container's id, as `docker ps` shows it


class Processes:
    """Processes as this one sees them, at one moment."""

    def __init__(self) -> None:
        self._containers: dict[int, str | None] = {}
        self._names: dict[int, str | None] = {}

    def here(self, namespace: int, pid: int) -> int:
        """The number here of process `pid` of a pid namespace, named by its inode (0: not known); 0: not seen here."""
        return pid if self.counts_here(namespace) else self._elsewhere.get((namespace, pid), 0)

    def counts_here(self, namespace: int) -> bool:
        """Whether its numbers are those of this process."""
        return namespace in (0, _namespace(_PROC / "self"))

    def name(self, pid: int) -> str | None:
        """None: the process has gone, or is not seen from here."""
        if pid not in self._names:
            self._names[pid] = program_name(pid)
        return self._names[pid]

    def container(self, pid: int) -> str | None:
        """The id or name of the container that a process is in, as its cgroup tells it; None: none, or none known."""
        if pid not in self._containers:
            self._containers[pid] = container_of(_read(_PROC / str(pid) / "cgroup"))
        return self._containers[pid]

    @cached_property
    def _elsewhere(self) -> dict[tuple[int, int], int]:
        """The numbers here of the processes in other pid namespaces."""
        mine, found = _namespace(_PROC / "self"), {}
        for process in _PROC.iterdir():
            if process.name.isdigit() and (namespace := _namespace(process)) not in (0, mine):
                numbers = re.search(r"^NSpid:.*\t(\d+)$", _read(process / "status"), re.MULTILINE)
                if numbers:  # the last one counts in its own namespace
                    found[namespace, int(numbers[1])] = int(process.name)
        return found


def program_name(pid: int) -> str | None:
    return _read(_PROC / str(pid) / "comm").rstrip("\n") or None


def container_of(cgroups: str) -> str | None:
    """What /proc/PID/cgroup tells of a container: its id, shortened, or its name."""
    if found := _CONTAINER.search(cgroups.replace("\n", "/\n")):
        return found[1][:_ID_SHOWN] if found[1] else found[2] or found[3]
    return None


def _namespace(process: Path) -> int:
    try:
        return (process / "ns/pid").stat().st_ino
    except OSError:
        return 0  # it has gone, or may not be looked at


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
