"""What processes use: CPU time, memory, libraries."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path


def cpu_time_ns(pid: int) -> int:
    """CPU time of a process with all its threads, in ns (from schedstat, which counts what ticks miss)."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir())


def process_cpu_s(pid: int) -> float:
    """CPU time of a process, with threads that have ended, up to this moment; 0 where it has ended itself."""
    try:
        return time.clock_gettime(~pid << 3 | 2)  # CPUCLOCK_SCHED of a process, as clock_getcpuclockid gives it
    except OSError:
        return 0.0


def family(pids: Iterable[int]) -> set[int]:
    """These processes and all that descend from them."""
    children = defaultdict(list)
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
        children[parent].append(int(entry.name))
    found, todo = set[int](), list(pids)
    while todo:
        pid = todo.pop()
        if pid not in found:
            found.add(pid)
            todo += children[pid]
    return found


def connections_to(pid: int, port: int) -> int:
    """How many connections to `port` are established where a process is."""
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    places = (line.split()[2:4] for line in lines)
    return sum(state == "01" and int(remote.rpartition(":")[2], 16) == port for remote, state in places)


def cpu_ticks(pid: int) -> int:
    """User and system time of a process as /proc/PID/stat has it, in clock ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def pss_kib(pid: int) -> int:
    """Proportional set size of a process, in KiB."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    raise LookupError(f"/proc/{pid}/smaps_rollup has no Pss")


def maps_library(pid: int, name: str) -> bool:
    """True when a process has a library of that file name mapped."""
    return any(line.rstrip().endswith("/" + name) for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
