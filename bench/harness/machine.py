"""What processes use: CPU time, memory, libraries."""

from __future__ import annotations

from pathlib import Path


def cpu_time_ns(pid: int) -> int:
    """CPU time of a process with all its threads, in ns (from schedstat, which counts what ticks miss)."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir())


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
