"""The main job, shown: real programs over kernel TCP and under sidestep, alternating, on this machine.

Each work runs over kernel TCP as the kernel places its programs, over kernel TCP with all of them on one CPU, and
under sidestep with a provider of its own; rounds alternate. The ratio is that of the medians, against the better TCP
placement. It counts only if `promoted` (both ends of every connection were seen in shared memory while it was open) and
`equal` (the programs received the bytes that were sent) hold. These are short runs to see for oneself; `make bench`
measures.
"""

from __future__ import annotations

import csv
import json
import os
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import IO, Any, Final, Self

from sidestep import native_library
from sidestep.errors import Unavailable
from sidestep.testing import Sidestep, free_port

ROUNDS: Final = 3
SECONDS: Final = 0.7  # measured a run; with starting and stopping all works end within a minute
START_TIMEOUT_S: Final = 10.0  # for a program to come up
END_TIMEOUT_S: Final = 20.0  # for a program to end once its work is done
LOOK_S: Final = 0.1  # between looks at the connections of a running program
RUNS_MAX: Final = 4  # of redis-benchmark, until one lasts long enough to be looked at
REDIS_CALIBRATION: Final = 5_000  # requests, to learn how many fill the time

_PROGRAMS: Final = [sys.executable, "-m", "sidestep.observe.demo_programs"]

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Look:
    """The connections of a server while they were open under sidestep."""

    ends_promoted: int
    ends_wanted: int
    why_not: tuple[str, ...]  # states and reasons of the ends that were not promoted
    none: bool  # there was no connection any more

    @property
    def promoted(self) -> bool:
        """True when both ends of every connection were."""
        return self.ends_promoted >= self.ends_wanted


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a work in one place; `look` is None over kernel TCP."""

    value: float  # in the work's unit
    equal: bool
    look: Look | None


class _Program:
    """A program under way: its output by line, its complaints kept for the error that names it."""

    def __init__(self, argv: list[str], env: dict[str, str], cpu: int | None) -> None:
        self.name = " ".join(argv[2:4]) if argv[0] == sys.executable else argv[0]
        self._errors: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed by end()
        pin = None if cpu is None else lambda: os.sched_setaffinity(0, {cpu})
        self.process = subprocess.Popen(
            argv,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            preexec_fn=pin,  # safe: this program has no threads
        )

    def fault(self, what: str) -> Unavailable:
        """An error that says what this program did and what it complained of."""
        self._errors.seek(0)
        said = " | ".join(self._errors.read().strip().splitlines()[-3:])
        return Unavailable(f"{self.name} {what}" + (f": {said}" if said else ""))

    def early_end(self) -> Unavailable:
        """The error for a program that has ended, or is about to, when it should not have."""
        try:
            code = self.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return self.fault("closed its output and runs on")
        return self.fault(f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}")

    def line(self, timeout_s: float) -> str:
        """Its next line; Unavailable when none comes."""
        assert self.process.stdout is not None, "it was started with a pipe"
        ready, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            raise self.early_end() if ready else self.fault(f"said nothing for {timeout_s:g} s")
        return line.strip()

    def rest(self) -> str:
        """Closes its input, waits for its end and returns what it still says; Unavailable when it fails."""
        try:
            output, _ = self.process.communicate(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise self.fault(f"did not end within {END_TIMEOUT_S:g} s") from error
        if self.process.returncode:
            raise self.early_end()
        return output

    def running(self) -> bool:
        """True until it has ended."""
        return self.process.poll() is None

    def end(self) -> None:
        """Ends it, by force where asking does not help."""
        if self.running():
            self.process.terminate()
            try:
                self.process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self._errors):
            if stream is not None:
                stream.close()


class Place:
    """Where programs run: over kernel TCP, perhaps all on one CPU, or under sidestep."""

    def __init__(self, name: str, *, cpu: int | None = None, sidestep: Sidestep | None = None) -> None:
        self.name, self._cpu, self._sidestep = name, cpu, sidestep
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, argv: list[str]) -> _Program:
        """Starts a program that ends, at the latest, with this place's block."""
        env = plain_environment() if self._sidestep is None else self._sidestep.env()
        program = _Program(argv, env, self._cpu)
        self._stack.callback(program.end)
        return program

    def look(self, port: int, connections: int) -> Look | None:
        """The connections of the server at `port`, now; None over kernel TCP."""
        if self._sidestep is None:
            return None
        found = [c for c in self._sidestep.connections() if str(port) in (_port(c.local), _port(c.remote))]
        why_not = sorted({f"{c.state}, {c.why}" if c.why else c.state for c in found if not c.promoted})
        if not found:
            why_not = ["sidestep sees no such connection"]
        return Look(sum(c.promoted for c in found), 2 * connections, tuple(why_not), none=not found)


def plain_environment() -> dict[str, str]:
    """This process's environment without sidestep."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("SIDESTEP_")}
    preloaded = [entry for entry in env.pop("LD_PRELOAD", "").replace(":", " ").split() if entry != _library()]
    return env | ({"LD_PRELOAD": " ".join(preloaded)} if preloaded else {})


def _library() -> str:
    return str(native_library())


def _port(endpoint: str) -> str:
    return endpoint.rpartition(":")[2]


def _talk(role: str) -> Callable[[Place, float], Run]:
    """A work of demo_programs: ROLE-server and ROLE-client."""

    def run(place: Place, seconds: float) -> Run:
        server = place.start([*_PROGRAMS, f"{role}-server"])
        port = int(server.line(START_TIMEOUT_S))
        client = place.start([*_PROGRAMS, f"{role}-client", "--port", str(port), "--seconds", str(seconds)])
        result = json.loads(client.line(seconds + END_TIMEOUT_S))
        look = place.look(port, 1)
        client.rest()
        server.rest()
        return Run(result["value"], result["equal"], look)

    return run


class _Redis:
    """redis-benchmark GET over some connections; remembers how many requests fill the time in each place."""

    def __init__(self, connections: int) -> None:
        self._connections = connections
        self._rates: dict[str, float] = {}

    def __call__(self, place: Place, seconds: float) -> Run:
        with tempfile.TemporaryDirectory(prefix="sidestep-demo-") as folder:
            port = free_port()
            argv = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
            server = place.start([*argv, "--dir", folder])
            _wait_for_port(server, port)
            check = place.start([*_PROGRAMS, "redis-check", "--port", str(port)])
            equal = json.loads(check.line(END_TIMEOUT_S))["equal"]
            check.rest()
            if place.name not in self._rates:
                self._rates[place.name], _ = self._ask(place, port, REDIS_CALIBRATION, 0.0)
            requests = max(REDIS_CALIBRATION, int(self._rates[place.name] * seconds))
            for _ in range(RUNS_MAX):
                self._rates[place.name], look = self._ask(place, port, requests, 0.3 * seconds)
                if look is None or not look.none:
                    break
                requests *= 2  # it was faster than ever before, and over before it could be looked at
            server.end()
        return Run(self._rates[place.name], equal, look)

    def _ask(self, place: Place, port: int, requests: int, look_after_s: float) -> tuple[float, Look | None]:
        argv = ["redis-benchmark", "-h", "127.0.0.1", "-p", str(port), "-t", "get", "--csv"]
        client = place.start([*argv, "-c", str(self._connections), "-n", str(requests)])
        time.sleep(look_after_s)
        look = place.look(port, self._connections)
        while look and not look.promoted and client.running():
            time.sleep(LOOK_S)
            look = place.look(port, self._connections)
        rows = list(csv.DictReader(client.rest().splitlines()))
        if len(rows) != 1 or "rps" not in rows[0]:
            raise client.fault("gave no figures")
        return float(rows[0]["rps"]), look


def _wait_for_port(program: _Program, port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if not program.running():
            raise program.early_end()
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise program.fault(f"does not listen on port {port} after {START_TIMEOUT_S:g} s")


@dataclass(frozen=True, slots=True)
class Work:
    """Something the demo runs in each place."""

    name: str
    title: str
    unit: str
    run: Callable[[Place, float], Run]
    lower_is_better: bool = False
    needs: tuple[str, ...] = ()  # programs, by name


def works() -> tuple[Work, ...]:
    """What the demo runs, in its order."""
    redis = ("redis-server", "redis-benchmark")
    return (
        Work("redis-1", "redis-benchmark GET, 1 connection", "requests/s", _Redis(1), needs=redis),
        Work("redis-50", "redis-benchmark GET, 50 connections", "requests/s", _Redis(50), needs=redis),
        Work("echo", "64 B ping-pong in Python, median", "us", _talk("echo"), lower_is_better=True),
        Work("bulk", "16 MiB transfers in Python, SHA-256 checked", "MB/s", _talk("bulk")),
    )


@dataclass
class Line:
    """A work's runs by place, and what they come to."""

    work: Work
    runs: dict[str, list[Run]] = field(default_factory=dict)

    def median(self, place: str) -> float:
        """The median value in a place."""
        return statistics.median(run.value for run in self.runs[place])

    @property
    def best_tcp(self) -> str:
        """The better of kernel TCP's placements."""
        pick = min if self.work.lower_is_better else max
        return pick((place for place in self.runs if place != "sidestep"), key=self.median)

    @property
    def ratio(self) -> float:
        """How many times faster sidestep was than kernel TCP's better placement."""
        tcp, ours = self.median(self.best_tcp), self.median("sidestep")
        return tcp / ours if self.work.lower_is_better else ours / tcp

    @property
    def promoted(self) -> bool:
        """True when every run under sidestep had all its connections promoted."""
        return all(run.look is not None and run.look.promoted for run in self.runs["sidestep"])

    @property
    def equal(self) -> bool:
        """True when in every run, in every place, the bytes received were those sent."""
        return all(run.equal for runs in self.runs.values() for run in runs)

    @property
    def why_not_promoted(self) -> list[str]:
        """In words, what the connections that were not promoted were instead."""
        looks = [run.look for run in self.runs["sidestep"] if run.look and not run.look.promoted]
        return sorted({why for look in looks for why in look.why_not})

    def as_json(self) -> dict[str, Any]:
        """The line as a JSON document."""
        places = {
            name: {"median": self.median(name), "values": [run.value for run in runs]}
            for name, runs in self.runs.items()
        }
        return {
            "work": self.work.name,
            "title": self.work.title,
            "unit": self.work.unit,
            "lower_is_better": self.work.lower_is_better,
            "places": places,
            "best_tcp": self.best_tcp,
            "ratio": self.ratio,
            "promoted": self.promoted,
            "why_not_promoted": self.why_not_promoted,
            "equal": self.equal,
        }


@dataclass
class Demo:
    """The whole demo: a line a work, and what could not run, with the remedy."""

    lines: list[Line] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # why, by the name of the work

    @property
    def good(self) -> bool:
        """True when everything that ran was promoted and received what was sent."""
        return bool(self.lines) and all(line.promoted and line.equal for line in self.lines)

    def as_json(self) -> dict[str, Any]:
        """The demo as a JSON document."""
        return {"works": [line.as_json() for line in self.lines], "skipped": self.skipped, "good": self.good}


def missing(work: Work) -> str | None:
    """Why a work cannot run here, with the remedy; None when it can."""
    lacking = [name for name in work.needs if shutil.which(name) is None]
    if not lacking:
        return None
    return f"{' and '.join(lacking)} not installed; apt-get install redis-server redis-tools"


def run_demo(*, rounds: int = ROUNDS, seconds: float = SECONDS, tell: Tell) -> Demo:
    """Runs every work that can run, `rounds` times in each place; `tell` hears what is under way.

    Raises:
        Unavailable: sidestep's library is missing, or a program failed; the error names it.
    """
    _library()
    demo = Demo()
    cpu = min(os.sched_getaffinity(0))
    with Sidestep(promote_after=None) as sidestep:
        for work in works():
            if why := missing(work):
                demo.skipped[work.name] = why
                tell(f"{work.title}: skipped, {why}")
                continue
            line = Line(work, {"tcp": [], "tcp-one-cpu": [], "sidestep": []})
            tell(f"{work.title}: {rounds} rounds")
            for _ in range(rounds):
                for name, runs in line.runs.items():
                    pinned = cpu if name == "tcp-one-cpu" else None
                    with Place(name, cpu=pinned, sidestep=sidestep if name == "sidestep" else None) as place:
                        runs.append(work.run(place, seconds))
            demo.lines.append(line)
    return demo
