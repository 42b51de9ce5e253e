"""Machine of the figures: processor, kernel, load, and how much of its CPUs other programs used meanwhile."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

LOOK_S: Final = 0.5  # look at others' use, before a measurement
BUSY_SHARE: Final = 0.15  # part of the CPUs used by others: two ends that share the other CPUs measure their waits


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
    def now(cls) -> Self:
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


@dataclass(frozen=True)
class CpuTime:
    """CPU time up to a moment, in seconds: of all programs, and of this one with those it has started and seen end."""

    at: float
    every: float
    own: float

    @classmethod
    def now(cls) -> Self:
        """Interrupts are left out: they mostly are our own loopback traffic. What a hypervisor took is in."""
        user, nice, system, _idle, _iowait, _irq, _softirq, steal = map(
            int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
        )
        own = sum(os.times()[:4])
        return cls(time.monotonic(), (user + nice + system + steal) / os.sysconf("SC_CLK_TCK"), own)

    def others(self) -> float:
        """The share of all CPUs that other programs have used since, 0 to 1."""
        now = CpuTime.now()
        available = (now.at - self.at) * (os.cpu_count() or 1)
        return min(max((now.every - self.every - (now.own - self.own)) / available, 0.0), 1.0)


@dataclass
class Others:
    """The share of the CPUs that other programs used before and during a measurement, 0 to 1."""

    before: float = 0.0
    during: float = 0.0

    @property
    def too_many(self) -> bool:
        """True when figures are not to be judged by."""
        return max(self.before, self.during) > BUSY_SHARE

    def __str__(self) -> str:
        return f"other programs used {self.before:.0%} of the CPUs before, {self.during:.0%} during the runs"


def others_now() -> float:
    """The share of the CPUs that other programs use at this moment; takes half a second."""
    start = CpuTime.now()
    time.sleep(LOOK_S)
    return start.others()
