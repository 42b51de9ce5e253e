"""The main job, shown: real programs over kernel TCP and under sidestep, alternating, on this machine.

Each work runs in three places. Two are over kernel TCP: as the kernel places its programs, and with all of them on one
CPU. The last is under sidestep, with a provider of its own. Rounds alternate. The ratio is that of the medians, against
the better TCP placement. It counts only if two things hold. `promoted`: both ends of every connection were seen in
shared memory while it was open. `equal`: the programs received the bytes that were sent. These are short runs to see
for oneself; `make bench` measures. The load by other programs is kept beside the figures: on a busy machine they say
little.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import random
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Final, Self

from sidestep.demo.machine import CpuTime, Machine, Others, others_now
from sidestep.demo.picture import slower
from sidestep.errors import Unavailable
from sidestep.installation import native_library
from sidestep.observe.namespaces import Namespace, NetworkBridge
from sidestep.settings import RemoteSettings
from sidestep.testing import Sidestep, free_port

ROUNDS: Final = 3
SECONDS: Final = 0.25  # measured a run; with starting and stopping all works end within half a minute
SPREAD_MAX: Final = 0.5  # spread of the rounds of one place, as a part of their median; beyond it a ratio is chance
START_TIMEOUT_S: Final = 10.0  # patience for a program to come up
END_TIMEOUT_S: Final = 20.0  # patience for a program to end once its work is done
LOOK_S: Final = 0.1  # pause between looks at the connections of a running program
RUNS_MAX: Final = 4  # runs of a work, until one lasts long enough for all its connections to be seen offloaded
TWO_HOSTS_PREFIX: Final = "198.18.0."  # RFC 2544: for tests between hosts
FILE_LEN: Final = 16 << 20  # bytes
REDIS_CALIBRATION: Final = 5_000  # requests, to learn how many fill the time

_SEARCH_PATH: Final = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"  # nginx is there, for users as well

_PROGRAMS: Final = [sys.executable, "-m", "sidestep.demo.programs"]

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Look:
    """The connections of a server while they were open under sidestep."""

    ends_promoted: int
    ends_wanted: int
    why_not: tuple[str, ...]  # states and reasons of the ends that were not promoted

    @property
    def promoted(self) -> bool:
        """True when both ends of every connection were."""
        return self.ends_promoted >= self.ends_wanted


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a work in one place; `look` is None over kernel TCP."""

    value: float  # value in the work's unit
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
        complaint = " | ".join(self._errors.read().strip().splitlines()[-3:])
        return Unavailable(f"{self.name} {what}" + (f": {complaint}" if complaint else ""))

    def early_end(self) -> Unavailable:
        """The error for a program that has ended, or is about to, when it should not have."""
        try:
            code = self.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return self.fault("closed its output and runs on")
        return self.fault(f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}")

    def line(self, timeout_s: float) -> str:
        """Next line of the program; Unavailable when none comes."""
        assert self.process.stdout is not None, "it was started with a pipe"
        ready, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            raise self.early_end() if ready else self.fault(f"wrote nothing for {timeout_s:g} s")
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


@dataclass(frozen=True, slots=True)
class Site:
    """Place of one end of a connection."""

    address: str = "127.0.0.1"
    sidestep: Sidestep | None = None  # provider; None: over kernel TCP
    first: bool = False  # true if its connections begin with SDP, as its policy says
    namespace: Namespace | None = None  # namespace; None: on this very host

    def inside(self) -> AbstractContextManager[None]:
        """Context in which started programs run at this place."""
        return self.namespace.inside() if self.namespace else nullcontext()


class Testbed:
    """Place for programs: over kernel TCP, perhaps all on one CPU, or under sidestep; on one host or on two."""

    def __init__(self, name: str, server: Site, client: Site | None = None, *, cpu: int | None = None) -> None:
        self.name, self._cpu = name, cpu
        self._server, self._client = server, client or server
        self._before = self._counted()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def address(self) -> str:
        return self._server.address

    def start(self, argv: list[str], *, server: bool = False) -> _Program:
        """Starts a client, or a server; it ends, at the latest, with this place's block."""
        site = self._server if server else self._client
        with site.inside():
            env = plain_environment() if site.sidestep is None else site.sidestep.env()
            program = _Program([_found(argv[0]) or argv[0], *argv[1:]], env, self._cpu)
        self._stack.callback(program.end)
        return program

    def answers(self, port: int) -> bool:
        with self._client.inside(), socket.socket() as probe:
            return probe.connect_ex((self.address, port)) == 0

    def look(self, port: int, connections: int) -> Look | None:
        """The connections of the server at `port`, now; None over kernel TCP."""
        providers = {id(site.sidestep): site.sidestep for site in (self._server, self._client) if site.sidestep}
        if not providers:
            return None
        if self._client.first:
            opened, refused = (now - before for now, before in zip(self._counted(), self._before, strict=True))
            why = (f"{refused} connections came to TCP",) if refused else ()
            return Look(0 if refused else 2 * min(opened, connections), 2 * connections, why)
        listed = [c for sidestep in providers.values() for c in sidestep.connections()]
        found = [c for c in listed if str(port) in (_port(c.local), _port(c.remote))]
        why_not = sorted({f"{c.state}, {c.why}" if c.why else c.state for c in found if not c.promoted})
        if not found:
            why_not = ["sidestep sees no such connection"]
        return Look(sum(c.promoted for c in found), 2 * connections, tuple(why_not))

    def _counted(self) -> tuple[int, int]:
        """Numbers of the client's connections that began with SDP, and that were to and did not."""
        if not self._client.first or self._client.sidestep is None:
            return 0, 0
        counters = self._client.sidestep.status()["counters"]
        refused = sum(int(count) for name, count in counters.items() if name.startswith("reach_refused"))
        return counters.get("reach_opened", 0), refused


def plain_environment() -> dict[str, str]:
    """This process's environment without sidestep."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("SIDESTEP_")}
    preloaded = [entry for entry in env.pop("LD_PRELOAD", "").replace(":", " ").split() if entry != _library()]
    return env | ({"LD_PRELOAD": " ".join(preloaded)} if preloaded else {})


def _library() -> str:
    return str(native_library())


def _port(endpoint: str) -> str:
    return endpoint.rpartition(":")[2]


def talk(role: str, *more: str) -> Callable[[Testbed, float], Run]:
    """A work of one connection between two of our own programs; `more` goes to the client."""

    def run(place: Testbed, seconds: float) -> Run:
        at = ["--address", place.address]
        server = place.start([*_PROGRAMS, f"{role}-server", *at], server=True)
        port = int(server.line(START_TIMEOUT_S))
        client = place.start([*_PROGRAMS, f"{role}-client", *at, "--port", str(port), "--seconds", str(seconds), *more])
        found = _measured(place, port, client, seconds)
        server.rest()
        return found

    return run


def _measured(place: Testbed, port: int, client: _Program, seconds: float) -> Run:
    """Run of a client with one connection, by the client's figures; the connection is looked at while it is open."""
    result = json.loads(client.line(seconds + END_TIMEOUT_S))
    look = place.look(port, 1)
    client.rest()
    return Run(result["value"], result["equal"], look)


class _Redis:
    """redis-benchmark GET over some connections; remembers how many requests fill the time in each place."""

    def __init__(self, connections: int) -> None:
        self._connections = connections
        self._rates: dict[str, float] = {}

    def __call__(self, place: Testbed, seconds: float) -> Run:
        with tempfile.TemporaryDirectory(prefix="sidestep-demo-") as folder:
            port = free_port()
            argv = ["redis-server", "--port", str(port), "--bind", place.address, "--save", "", "--appendonly", "no"]
            server = place.start([*argv, "--protected-mode", "no", "--dir", folder], server=True)
            _wait_for_port(place, server, port)
            check = place.start([*_PROGRAMS, "redis-check", "--address", place.address, "--port", str(port)])
            equal = json.loads(check.line(END_TIMEOUT_S))["equal"]
            check.rest()
            if place.name not in self._rates:
                self._rates[place.name], _ = self._ask(place, port, REDIS_CALIBRATION, 0.0)
            requests = max(REDIS_CALIBRATION, int(self._rates[place.name] * seconds))
            for _ in range(RUNS_MAX):
                self._rates[place.name], look = self._ask(place, port, requests, 0.3 * seconds)
                if look is None or look.promoted:
                    break
                requests *= 2  # the run was over before all connections could be seen
            server.end()
        return Run(self._rates[place.name], equal, look)

    def _ask(self, place: Testbed, port: int, requests: int, look_after_s: float) -> tuple[float, Look | None]:
        argv = ["redis-benchmark", "-h", place.address, "-p", str(port), "-t", "get", "--csv"]
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


_NGINX: Final = """
daemon off; worker_processes 1; pid {folder}/pid; error_log stderr crit; {user}
events {{ worker_connections 64; }}
http {{
    access_log off; keepalive_requests 100000; sendfile on;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    server {{ listen {address}:{port}; root {folder}/files; }}
}}
"""


def _nginx(place: Testbed, seconds: float) -> Run:
    with tempfile.TemporaryDirectory(prefix="sidestep-demo-") as name:
        folder, port = Path(name), free_port()
        data = random.Random(2002).randbytes(FILE_LEN)  # noqa: S311 - any bytes will do
        (folder / "files").mkdir()
        (folder / "files" / "file").write_bytes(data)
        user = "user root;" if os.geteuid() == 0 else ""  # the folder is ours alone
        conf = folder / "nginx.conf"
        conf.write_text(_NGINX.format(folder=folder, user=user, address=place.address, port=port))
        server = place.start(["nginx", "-p", name, "-e", "stderr", "-c", str(conf)], server=True)
        _wait_for_port(place, server, port)
        at = ["--address", place.address, "--port", str(port), "--seconds", str(seconds)]
        client = place.start([*_PROGRAMS, "fetch", *at, "--sha256", hashlib.sha256(data).hexdigest()])
        found = _measured(place, port, client, seconds)
        server.end()
    return found


def _wait_for_port(place: Testbed, program: _Program, port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if not program.running():
            raise program.early_end()
        if place.answers(port):
            return
        time.sleep(0.02)
    raise program.fault(f"does not listen on port {port} after {START_TIMEOUT_S:g} s")


@dataclass(frozen=True, slots=True)
class Work:
    """Work that the demo runs in each place."""

    name: str
    title: str
    unit: str
    run: Callable[[Testbed, float], Run]
    lower_is_better: bool = False
    needs: tuple[str, ...] = ()  # programs, by name


def works() -> tuple[Work, ...]:
    redis = ("redis-server", "redis-benchmark")
    return (
        Work("redis-1", "redis-benchmark GET, 1 connection", "requests/s", _Redis(1), needs=redis),
        Work("redis-50", "redis-benchmark GET, 50 connections", "requests/s", _Redis(50), needs=redis),
        Work("echo", "64 B ping-pong in Python, median", "us", talk("echo"), lower_is_better=True),
        Work("bulk", "16 MiB transfers in Python, SHA-256 checked", "MB/s", talk("bulk")),
        Work("nginx", "nginx, 16 MiB files, SHA-256 checked", "MB/s", _nginx, needs=("nginx",)),
    )


@dataclass
class ResultLine:
    """A work's runs by place, and what they come to."""

    work: Work
    runs: dict[str, list[Run]] = field(default_factory=dict)

    def median(self, place: str) -> float:
        return statistics.median(run.value for run in self.runs[place])

    @property
    def best_tcp(self) -> str:
        pick = min if self.work.lower_is_better else max
        return pick((place for place in self.runs if place.startswith("tcp")), key=self.median)

    def ratio_of(self, place: str) -> float:
        """Speed there over the speed of kernel TCP in its better placement."""
        tcp, ours = self.median(self.best_tcp), self.median(place)
        return tcp / ours if self.work.lower_is_better else ours / tcp

    @property
    def ways(self) -> list[str]:
        """The places under sidestep."""
        return [place for place in self.runs if not place.startswith("tcp")]

    @property
    def spread(self) -> float:
        """Largest distance between rounds of one place, as a part of their median."""
        rounds = {place: [run.value for run in self.runs[place]] for place in (self.best_tcp, *self.ways)}
        return max((max(values) - min(values)) / self.median(place) for place, values in rounds.items())

    @property
    def good(self) -> bool:
        """True when its ratios count: else they are of TCP with TCP, or of wrong bytes."""
        return self.promoted and self.equal

    @property
    def slower(self) -> bool:
        """True when it counts, and was slower than kernel TCP."""
        return self.good and any(slower(self.ratio_of(way)) for way in self.ways)

    @property
    def promoted(self) -> bool:
        """True when every run under sidestep had all its connections offloaded."""
        return all(run.look is not None and run.look.promoted for run in self._ours)

    @property
    def _ours(self) -> list[Run]:
        return [run for way in self.ways for run in self.runs[way]]

    @property
    def equal(self) -> bool:
        """True when in every run, in every place, the bytes received were those sent."""
        return all(run.equal for runs in self.runs.values() for run in runs)

    @property
    def why_not_promoted(self) -> list[str]:
        """States, in words, of the connections that were not promoted."""
        looks = [run.look for run in self._ours if run.look and not run.look.promoted]
        return sorted({why for look in looks for why in look.why_not})

    def as_json(self) -> dict[str, Any]:
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
            "ratio": self.ratio_of("sidestep"),
            "spread": self.spread,
            "promoted": self.promoted,
            "why_not_promoted": self.why_not_promoted,
            "equal": self.equal,
        }


@dataclass
class Demo:
    """The whole demo: a line a work, what could not run, with the remedy, and what it was taken on."""

    machine: Machine
    rounds: int
    seconds: float
    others: Others = field(default_factory=Others)
    lines: list[ResultLine] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # reasons by the name of the work

    @property
    def good(self) -> bool:
        """True when everything that ran was promoted and received what was sent."""
        return bool(self.lines) and all(line.good for line in self.lines)

    def warnings(self) -> list[str]:
        """Reasons, in sentences, why the figures prove little; none where they do."""
        found = (
            [f"Too busy to judge: {self.others}. Run it again when the machine is idle."]
            if self.others.too_many
            else []
        )
        apart = [f"{line.work.title} ({line.spread:.0%})" for line in self.lines if line.spread > SPREAD_MAX]
        return found + ([f"Too far apart to judge are the rounds of {', '.join(apart)}."] if apart else [])

    def slower(self) -> dict[str, str]:
        """Reasons why works were slower than over kernel TCP, as far as is known, by name of the work."""
        return {line.work.name: self._why_slower(line) for line in self.lines if line.slower}

    def _why_slower(self, line: ResultLine) -> str:
        if "sdp" in line.runs:
            return "the device of SDP is software here, and itself rides on TCP"
        if self.machine.cpus == 1:
            return "both ends share the only CPU"
        if self.others.too_many:
            return "perhaps because other programs used the CPUs"
        if line.spread > SPREAD_MAX:
            return f"perhaps by chance: its rounds differ by {line.spread:.0%}"
        return "the reason is not known; `make bench` measures longer"

    def as_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine.as_json(),
            "rounds": self.rounds,
            "seconds": self.seconds,
            "others": {"before": self.others.before, "during": self.others.during},
            "warnings": self.warnings(),
            "works": [line.as_json() for line in self.lines],
            "slower": self.slower(),
            "skipped": self.skipped,
            "good": self.good,
        }


def _found(program: str) -> str | None:
    return shutil.which(program, path=_SEARCH_PATH)


def missing(work: Work) -> str | None:
    """Reason why a work cannot run here, with the remedy; None when it can."""
    lacking = [name for name in work.needs if _found(name) is None]
    if not lacking:
        return None
    packages = "nginx-light" if "nginx" in lacking else "redis-server redis-tools"
    return f"{' and '.join(lacking)} not installed; apt-get install {packages}"


def run_demo(*, rounds: int = ROUNDS, seconds: float = SECONDS, tell: Tell) -> Demo:
    """Runs every work that can run, `rounds` times in each place; `tell` is called with the present step.

    Raises:
        Unavailable: sidestep's library is missing, or a program failed; the error names it.
    """
    _library()
    cpu = min(os.sched_getaffinity(0))
    with _watched(rounds, seconds) as demo, Sidestep(promote_after=None) as sidestep:
        ours = Site(sidestep=sidestep)
        places: dict[str, Callable[[str], Testbed]] = {
            "tcp": lambda name: Testbed(name, Site()),
            "tcp-one-cpu": lambda name: Testbed(name, Site(), cpu=cpu),
            "sidestep": lambda name: Testbed(name, ours),
        }
        _run(demo, places, tell)
    return demo


def run_two_hosts(*, rounds: int = ROUNDS, seconds: float = SECONDS, tell: Tell) -> Demo:
    """The same on two hosts, made of network namespaces: clients on the one, servers on the other.

    Raises:
        Unavailable: As `run_demo`, or this user may make no namespaces.
    """
    _library()
    with _watched(rounds, seconds) as demo, ExitStack() as stack:
        policy = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sidestep-demo-"))) / "libsdp.conf"
        policy.write_text(f"use sdp connect * {TWO_HOSTS_PREFIX}0/24:*\n")
        promoted, first = two_hosts(stack), two_hosts(stack, policy)
        sites = {"tcp": [replace(site, sidestep=None) for site in promoted], "sidestep": promoted, "sdp": first}
        places: dict[str, Callable[[str], Testbed]] = {
            name: lambda name: Testbed(name, sites[name][1], sites[name][0]) for name in sites
        }
        _run(demo, places, tell)
    return demo


def two_hosts(stack: ExitStack, policy: Path | None = None, *, transports: str = "") -> list[Site]:
    """Two hosts, joined by a bridge, with a provider each; by `policy` their connections begin with SDP."""
    bridge, namespaces = NetworkBridge(), (Namespace(), Namespace())
    for made in (bridge, *namespaces):
        stack.callback(made.close)
    sites = []
    for number, namespace in enumerate(namespaces, 1):
        address = f"{TWO_HOSTS_PREFIX}{number}"
        bridge.join(number, namespace, f"{address}/24")
        with namespace.inside():
            remote = RemoteSettings.parse(f"{TWO_HOSTS_PREFIX}0/24", transports=transports)
            sidestep = stack.enter_context(Sidestep(promote_after=None, remote=remote, policy=policy))
        sites.append(Site(address, sidestep, first=policy is not None, namespace=namespace))
    return sites


@contextmanager
def _watched(rounds: int, seconds: float) -> Iterator[Demo]:
    """A demo, and what others do before and during it. Its providers end within: what has ended is not of others."""
    demo = Demo(Machine.now(), rounds, seconds)
    demo.others.before = others_now()
    start = CpuTime.now()
    yield demo
    demo.others.during = start.others()


def _run(demo: Demo, places: Mapping[str, Callable[[str], Testbed]], tell: Tell) -> None:
    for work in works():
        if why := missing(work):
            demo.skipped[work.name] = why
            tell(f"{work.title}: skipped, {why}")
            continue
        line = ResultLine(work, {name: [] for name in places})
        tell(f"{work.title}: {demo.rounds} rounds")
        for _ in range(demo.rounds):
            for name, make in places.items():
                with make(name) as place:
                    line.runs[name].append(work.run(place, demo.seconds))
        demo.lines.append(line)
