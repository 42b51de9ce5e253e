"""What the figures were taken on: processor, kernel, load."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Machine:
    """The machine at one moment."""

    processor: str
    cpus: int
    virtual: bool
    memory_mib: int
    kernel: str
    clocksource: str
    python: str
    load: tuple[float, float, float]

    @classmethod
    def now(cls) -> Machine:
        """Reads it from /proc and /sys."""
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part"))]
        flags = next((line for line in lines if line.startswith("flags")), "")
        clock = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
        return cls(
            processor=names[0] if names else platform.machine(),
            cpus=len(os.sched_getaffinity(0)),
            virtual="hypervisor" in flags.split(),
            memory_mib=memory_kib("MemTotal") // 1024,
            kernel=f"{platform.system()} {platform.release()} {platform.machine()}",
            clocksource=clock.read_text().strip() if clock.exists() else "unknown",
            python=platform.python_version(),
            load=os.getloadavg(),
        )

    def as_json(self) -> dict[str, Any]:
        """The machine as a JSON document."""
        return asdict(self)

    def __str__(self) -> str:
        kind = "virtual" if self.virtual else "bare"
        return (
            f"{self.processor}, {self.cpus} CPUs ({kind}), {self.memory_mib} MiB, {self.kernel}, "
            f"clock {self.clocksource}, Python {self.python}"
        )


def memory_kib(field: str) -> int:
    """A field of /proc/meminfo, in KiB."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise LookupError(f"/proc/meminfo has no {field}")


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
