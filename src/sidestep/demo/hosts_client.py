"""The host of `sidestep rdma bench` that asks: all ways in turns, and a table of the medians."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from io import BufferedRWPair
from pathlib import Path
from typing import Any, Final

from sidestep.demo.hosts import ITERATIONS_MAX, KINDS, Run, Way, Work
from sidestep.demo.hosts_server import RUN_MAX_S, host, receive, send
from sidestep.demo.world import Program, World
from sidestep.errors import SidestepError, Unavailable
from sidestep.observe import connections as observed

_CALIBRATED_US: Final = 100_000  # a run has to last so long to show how many iterations fill the time
_GROWTH: Final = 8
_COME_UP_S: Final = 10.0  # for the other end
_LOOK_S: Final = 0.05  # between two looks at a program that runs


@dataclass(slots=True)
class Row:
    """Result of one way."""

    way: Way
    problem: str = ""  # why there are no figures
    microseconds: dict[Work, list[float]] = field(default_factory=dict)  # of a message, by round
    carried: dict[Work, str] = field(default_factory=dict)  # of sidestep: by what

    def median(self, work: Work) -> float | None:
        """Microseconds of a message."""
        found = self.microseconds.get(work)
        return statistics.median(found) if found else None

    def value(self, work: Work) -> float | None:
        """Microseconds of a round trip, messages a second, or MB a second."""
        median = self.median(work)
        if median is None:
            return None
        return {Work.LATENCY: 2 * median, Work.MESSAGES: 1e6 / median, Work.BANDWIDTH: KINDS[work].size / median}[work]


@dataclass(frozen=True, slots=True)
class Report:
    """The whole result."""

    here: dict[str, Any]
    there: dict[str, Any]
    rows: list[Row]


class Client:
    """A conversation with the server at an address; use it in a `with` block.

    Args:
        address: The server's.
        port: Likewise; programs use the next one.
        provider: The socket of this host's provider, for a look at what it carries.
    """

    def __init__(self, address: str, port: int, provider: Path) -> None:
        try:
            self._socket = socket.create_connection((address, port), timeout=RUN_MAX_S)
        except OSError as error:
            raise Unavailable(
                f"nobody answers at {address} port {port}: {error.strerror or error}",
                remedy="start 'sidestep rdma bench --serve' there",
            ) from error
        self._stream: BufferedRWPair = self._socket.makefile("rwb")
        self._address, self._port = address, port + 1
        self._own = self._socket.getsockname()[0]
        self._provider = provider
        self.there = self._read_answer()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        self._socket.close()

    def measure(self, *, rounds: int, seconds: float, tell: Callable[[str], None]) -> Report:
        """All ways, of which one that cannot be measured says why."""
        rows = [Row(way) for way in Way]
        runs: dict[tuple[Way, Work], Run] = {}
        for number in range(rounds):
            for work in Work:
                for row in rows:
                    if not row.problem:
                        self._measure(row, runs, work, seconds)
            tell(f"round {number + 1} of {rounds}")
        return Report(host(), self.there, rows)

    def _measure(self, row: Row, runs: dict[tuple[Way, Work], Run], work: Work, seconds: float) -> None:
        try:
            if (row.way, work) not in runs:
                runs[row.way, work] = self._calibrated(row, Run(row.way, work, KINDS[work].least), seconds)
            while not (microseconds := self._run(row, runs[row.way, work])):
                # Too short for the program's clock: what it was calibrated by was held up.
                runs[row.way, work] = self._calibrated(row, runs[row.way, work], seconds)
        except SidestepError as why:
            row.problem = f"{why.message}: {why.remedy}" if why.remedy else why.message
        else:
            row.microseconds.setdefault(work, []).append(microseconds)

    def _calibrated(self, row: Row, run: Run, seconds: float) -> Run:
        """The run with iterations that fill the time."""
        while (took := self._run(row, run) * run.counted) < min(_CALIBRATED_US, seconds * 1e6):
            run = replace(run, iterations=run.iterations * _GROWTH)
        return replace(run, iterations=min(max(1, int(run.iterations * seconds * 1e6 / took)), ITERATIONS_MAX))

    def _run(self, row: Row, run: Run) -> float:
        """Microseconds of a message."""
        run.check(self._own)
        self._say({"way": run.way, "work": run.work, "iterations": run.iterations})
        if problem := str(self._read_answer().get("problem", "")):
            raise Unavailable(f"at the other host: {problem}")
        try:
            return run.microseconds(self._output(row, run))
        finally:
            self._say({"done": True})

    def _output(self, row: Row, run: Run) -> str:
        """Output of the program here, which is started again until the other end listens: no event shows that."""
        begun = time.monotonic()
        while True:
            with World(run.tool) as world:
                program = world.start(run.argv(self._port, self._provider, at=self._own, to=self._address))
                program.name = run.tool  # the measuring one, not its starter
                try:
                    return self._watched(row, run, program)
                except Unavailable:
                    if time.monotonic() > begun + _COME_UP_S:
                        raise
            time.sleep(_LOOK_S)

    def _watched(self, row: Row, run: Run, program: Program) -> str:
        """Waits for its end, and looks by what its connection goes meanwhile."""
        end = time.monotonic() + RUN_MAX_S
        while program.poll() is None and time.monotonic() < end:
            if run.way is Way.SIDESTEP and (carried := self._carried()):
                row.carried[run.work] = carried
            time.sleep(_LOOK_S)
        return program.finish()

    def _carried(self) -> str:
        """Carrier of the measured connection; empty where there is none."""
        for found in observed.connections(self._provider):
            if found.remote.rpartition(":")[2] == str(self._port):
                if found.promoted and found.link is not None:
                    return f"{found.link['protocol']} over {found.link['device']}"
                return "shared memory" if found.promoted else f"TCP: {found.why or found.state}"
        return ""

    def _say(self, document: dict[str, Any]) -> None:
        try:
            send(self._stream, document)
        except OSError as error:
            raise self._lost() from error

    def _read_answer(self) -> dict[str, Any]:
        try:
            return receive(self._stream)
        except (OSError, EOFError, ValueError) as error:
            raise self._lost() from error

    def _lost(self) -> Unavailable:
        return Unavailable(
            f"{self._address} does not answer any more, or is no 'sidestep rdma bench --serve'",
            remedy="look at what it says there",
        )
