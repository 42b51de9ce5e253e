"""Measurements of `sidestep rdma bench` between two hosts, and their programs.

Owners of RDMA adapters know the programs. rstream (of rdmacm-utils) makes a conversation and two streams over TCP, over
rsockets, and over TCP under sidestep. ib_send_lat and ib_send_bw (of perftest) make the same of Sends of verbs. One end
of each runs on each host, and both get the number of iterations.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from sidestep.demo.world import program_missing
from sidestep.errors import Unavailable
from sidestep.rdma.kernel.sysfs import kernel_devices

DEFAULT_PORT: Final = 7473
ITERATIONS_MAX: Final = 10_000_000
_SIDESTEP_RUN: Final = [sys.executable, "-m", "sidestep", "run"]
_RSTREAM_TIME: Final = 5  # the column
_PERFTEST_TYPICAL: Final = 4  # microseconds one way, of ib_send_lat
_PERFTEST_AVERAGE: Final = 3  # MiB/s, of ib_send_bw
_PERFTEST_RATE: Final = 4  # million messages a second


class Way(StrEnum):
    """Way of the bytes."""

    TCP = "tcp"
    RSOCKETS = "rsockets"
    VERBS = "verbs"
    SIDESTEP = "sidestep"


class Work(StrEnum):
    """Kind of measurement."""

    LATENCY = "latency"
    MESSAGES = "messages"
    BANDWIDTH = "bandwidth"


@dataclass(frozen=True, slots=True)
class Kind:
    """Iteration of a work: so many messages to and fro; of verbs, so many one way."""

    size: int  # bytes of a message
    messages: int
    least: int  # iterations to begin with


KINDS: Final = {Work.LATENCY: Kind(64, 1, 500), Work.MESSAGES: Kind(64, 1000, 5), Work.BANDWIDTH: Kind(1 << 16, 100, 5)}


@dataclass(frozen=True, slots=True)
class Run:
    """One measurement, as both hosts know it."""

    way: Way
    work: Work
    iterations: int

    @property
    def kind(self) -> Kind:
        return KINDS[self.work]

    @property
    def tool(self) -> str:
        if self.way is not Way.VERBS:
            return "rstream"
        return "ib_send_lat" if self.work is Work.LATENCY else "ib_send_bw"

    def check(self, address: str) -> None:
        """Raises Unavailable if it cannot be done on this host, whose address that is, or the other one's."""
        if missing := program_missing(self.tool):
            raise Unavailable(missing)
        if self.way in (Way.RSOCKETS, Way.VERBS) and not kernel_devices():
            raise Unavailable("the kernel has no RDMA device here")
        if self.way is Way.VERBS and ":" in address:
            raise Unavailable("perftest is used over IPv4 only")

    def argv(self, port: int, provider: Path, *, at: str, to: str | None) -> list[str]:
        """The command; `at`: this end's address, `to`: the other host's, None for the end that waits."""
        kind = self.kind
        if self.way is Way.VERBS:  # which takes addresses by the connection manager, as the others do
            argv = [self.tool, "-R", "-F", "-s", str(kind.size), "-n", str(self.iterations * kind.messages)]
            return [*argv, "-p", str(port), *([to] if to else [])]
        argv = ["rstream", "-f", "ipv6" if ":" in at else "ip", *(["-s", to] if to else ["-b", at]), "-p", str(port)]
        argv += ["-T", "b", "-S", str(kind.size), "-C", str(kind.messages), "-I", str(self.iterations)]
        if self.way is Way.RSOCKETS:
            return argv
        argv += ["-T", "s"]
        return argv if self.way is Way.TCP else [*_SIDESTEP_RUN, "--socket", str(provider), "--", *argv]

    @property
    def counted(self) -> int:
        """Messages one behind the other of which the time is that of the whole run."""
        both = self.way is not Way.VERBS or self.work is Work.LATENCY
        return self.iterations * self.kind.messages * (2 if both else 1)

    def microseconds(self, output: str) -> float:
        """Microseconds of a message, by the program's output; raises Unavailable if that has no such figure."""
        rows = [words for words in map(str.split, output.splitlines()) if len(words) > _RSTREAM_TIME - 1]
        try:
            if self.way is not Way.VERBS:
                seconds = next(float(row[_RSTREAM_TIME].rstrip("s")) for row in rows if row[0] == "custom")
                return seconds * 1e6 / self.counted
            row = next(row for row in rows if row[0] == str(self.kind.size))
            if self.work is Work.LATENCY:
                return float(row[_PERFTEST_TYPICAL])
            if self.work is Work.MESSAGES:
                return 1 / float(row[_PERFTEST_RATE])
            return self.kind.size / (float(row[_PERFTEST_AVERAGE]) * (1 << 20)) * 1e6
        except (StopIteration, ValueError, IndexError, ZeroDivisionError):
            said = " | ".join(output.strip().splitlines()[-3:])
            raise Unavailable(f"{self.tool} told no figures: {said or 'nothing'}") from None
