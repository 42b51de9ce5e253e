"""Echo servers and clients in many languages, each with each: what they are, one exchange, and what came of it.

All take the same words: `server` prints the port it listens on and echoes on every connection, with backpressure,
until the end of stream, which it answers with its own once all is echoed. `client PORT COUNT DIRECTORY` makes COUNT
connections at once; connection N sends N.in whole, ends its direction, and writes to N.out what came until the
other's end. The bytes are random, and other ones for each connection; every one of them is compared here.

While a file DIRECTORY/wait exists, each of the client's connections first exchanges a little, again and again. So a
*warm* exchange has all its bytes on the ring: it begins when all connections are promoted, and it is a fault if they
are not. A *cold* one sends all at once and is promoted in its midst, or, on a machine that is quick that day, not at
all.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import needed
from foreign_programs import loader_missing
from stage import LOG, PROGRAMS, SEARCH_PATH, Mode, Program, Stage, describe, payload, port_of

from sidestep.testing import Sidestep

ECHO: Final = PROGRAMS / "echo"
LOAD: Final = 8  # busy processes beside the programs
DEADLINE_S: Final = 100.0  # for one exchange, on two processors with that load
ENDS: Final[tuple[str, ...]] = (
    "threads", "asyncio", "uvloop", "gevent", "node", "java", "ruby", "perl", "php", "tcl", "erlang", "libevent",
    *(() if loader_missing() else ("static", "go", "cgo")),
)  # fmt: skip
AFTERS: Final = ("default", "0")  # --promote-after
SHAPES: Final = ((1, 4_000_000), (4, 3_000_000), (16, 600_000), (64, 150_000))  # connections at once, bytes of each
_SWITCHED: Final = re.compile(rb"fd \d+: sends by ring from byte \d+, round 1\n")


# --- the programs -----------------------------------------------------------------------------------------------------


def prepare(name: str, built: Path) -> list[str]:
    """How the end `name` is started; compiled ones are built in `built`. Where one is missing the test fails."""
    if name == "threads":
        return [sys.executable, str(ECHO / "threads.py")]
    if name == "asyncio":
        return [sys.executable, str(ECHO / "loop.py"), name]
    if name in ("uvloop", "gevent"):
        needed.module(name)
        return (
            [sys.executable, str(ECHO / "green.py")]
            if name == "gevent"
            else [sys.executable, str(ECHO / "loop.py"), name]
        )
    if name in ("node", "ruby", "perl", "php"):
        return [
            needed.program(name),
            str(ECHO / f"echo.{ {'node': 'js', 'ruby': 'rb', 'perl': 'pl', 'php': 'php'}[name] }"),
        ]
    if name == "tcl":
        return [needed.program("tclsh"), str(ECHO / "echo.tcl")]
    if name == "java":
        java, compiler = needed.program("java"), needed.program("javac")
        build(built / "Echo.class", [compiler, "-d", str(built), str(ECHO / "Echo.java")])
        return [java, "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto", "-cp", str(built), "Echo"]
    if name == "erlang":
        erl, compiler = needed.program("erl"), needed.program("erlc")
        build(built / "echo.beam", [compiler, "-o", str(built), str(ECHO / "echo.erl")])
        return [erl, "-noinput", "-pa", str(built), "-run", "echo", "main", "-extra"]
    if name in ("go", "cgo"):  # without a C library, and with one beside Go's own system calls
        program = built / f"echo_{name}"
        go = {"CGO_ENABLED": str(int(name == "cgo")), "GOCACHE": str(built / "go")}
        build(program, [needed.program("go"), "build", "-o", str(program), str(ECHO / "echo.go")], **go)
        return [str(program)]
    if name in ("libevent", "static"):
        if not Path("/usr/include/event2/event.h").exists():
            needed.missing("libevent-dev", "/usr/include/event2/event.h")
        program = built / f"echo_{name}"
        flags = ["-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-o", str(program)]
        if name == "static":
            flags.append("-static")
        compiler = needed.program(os.environ.get("CC", "cc"), "gcc")
        build(program, [compiler, *flags, str(ECHO / "echo_libevent.c"), "-levent_core"])
        return [str(program)]
    raise ValueError(f"no such end: {name}")


def build(product: Path, command: Sequence[str], **env: str) -> None:
    """Run a compiler, if that was not done; several test workers may meet here."""
    with product.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not product.exists():
            subprocess.run(command, check=True, env=os.environ | env)


# --- one exchange -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cell:
    """What is run."""

    server: str
    client: str
    connections: int
    size: int  # bytes of each, each way
    seed: int
    after: str = "default"  # --promote-after; one of AFTERS, or anything that it takes
    ring_size: int | None = None
    warm: bool = False  # promoted before the bytes are sent
    native: bool = False  # without sidestep

    @property
    def command(self) -> str:
        """How to run it again and again."""
        words = ["tests/apps/soak.py", "--server", self.server, "--client", self.client,
                 "--connections", str(self.connections), "--bytes", str(self.size), "--seed", str(self.seed),
                 "--after", self.after]  # fmt: skip
        if self.ring_size is not None:
            words += ["--ring-size", str(self.ring_size)]
        words.append("--warm" if self.warm else "--cold")
        return shlex.join([*words, *(["--native"] if self.native else []), "--rounds", "100"])


@dataclass(slots=True)
class Outcome:
    """What came of it."""

    cell: Cell
    faults: list[str] = field(default_factory=list)
    promoted: list[int] = field(default_factory=list)  # connections that began to send by ring, at client and servers
    seconds: float = 0.0
    place: str = ""  # what is left of it, if it failed

    def line(self) -> str:
        """It as one line of JSON."""
        return json.dumps({**asdict(self.cell), **asdict(self), "cell": self.cell.command})


class Server:
    """What clients talk to on a stage: programs, of which the shims write to `logs`."""

    name: str
    port: int
    programs: list[Program]
    logs: list[Path]
    marks: list[int]  # for each log, from where on it counts

    def begin(self) -> None:
        """An exchange begins: what was promoted before does not count."""
        self.marks = [log.stat().st_size if log.exists() else 0 for log in self.logs]

    def warm(self, client: int, connections: int) -> bool:
        """Whether enough is promoted for so many connections of a client, of which `client` send by ring."""
        return min(client, *self.promoted()) >= connections

    def expected(self, sent: Sequence[bytes]) -> dict[str, bytes]:
        """What a client's files hold in the end, if its connections send that."""
        return {f"{number}.out": data for number, data in enumerate(sent)}

    def promoted(self) -> list[int]:
        """For each log, the connections that send by ring."""
        return [switched(log, mark) for log, mark in zip(self.logs, self.marks, strict=True)]

    def close(self) -> None:
        """Take away what the stage does not."""


class Echo(Server):
    """One echo server."""

    def __init__(self, stage: Stage, name: str, argv: Sequence[str]) -> None:
        self.name = name
        self.logs, self.marks = [stage.workdir / f"{name}-server.shim"], [0]
        self.programs = [
            stage.start("server", [*argv, "server"], stdout=subprocess.PIPE, SIDESTEP_LOG=str(self.logs[0]))
        ]
        self.port = int(self.programs[0].line(DEADLINE_S))


def switched(log: Path, mark: int = 0) -> int:
    """How many connections have begun to send by ring: the shim's log tells."""
    return len(_SWITCHED.findall(log.read_bytes()[mark:])) if log.exists() else 0


@contextlib.contextmanager
def staged(workdir: Path, after: str, ring_size: int | None = None, *, native: bool = False) -> Iterator[Stage]:
    """A stage with a provider of its own; with `native`, one without sidestep."""
    with contextlib.ExitStack() as stack:
        sidestep = None
        if not native:
            sidestep = stack.enter_context(Sidestep(None if after == "default" else after, ring_size))
        stage = Stage(Mode.NATIVE if native else Mode.BOTH, workdir, sidestep)
        stack.callback(stage.close)
        yield stage


def _settings(cell: Cell) -> dict[str, str]:
    """Variables that a client needs.

    Erlang/OTP 25 stands still, by kernel TCP as well, if a socket's output ends in the very input that makes the
    schedulers poll it (the eleventh), and it hangs up later while an input is under way: what its poll thread hears
    then takes it out of their set, and nobody puts it back (erts_check_io). What precedes a warm exchange may well be
    ten inputs.
    """
    return {"ERL_FLAGS": "+IOs false"} if cell.client == "erlang" else {}


def exchange(stage: Stage, server: Server, argv: Sequence[str], cell: Cell, place: Path) -> Outcome:
    """Run a client against the server; `place`, which is made, is left behind only where something was wrong."""
    place.mkdir(parents=True)
    outcome = Outcome(cell)
    sent = [payload(cell.size, cell.seed + number) for number in range(cell.connections)]
    for number, data in enumerate(sent):
        (place / f"{number}.in").write_bytes(data)
    if cell.warm:
        (place / "wait").touch()
    log = place / "client.shim"
    ended = False
    server.begin()
    begun = time.monotonic()
    words = [*argv, "client", str(server.port), str(cell.connections), str(place)]
    client = Program(stage.argv("client", words),
                     stage.env("client", SIDESTEP_LOG=str(log), **_settings(cell)), stage.workdir,
                     f"client {cell.client}", subprocess.DEVNULL, LOG, place / "client.log")  # fmt: skip
    try:
        if cell.warm:
            if not cell.native:
                _await_promotion(client, log, server, cell.connections)
            (place / "wait").unlink()
        client.expect_exit(deadline_s=DEADLINE_S)
        ended = True
    except AssertionError as error:
        outcome.faults += [str(error), _state(stage, place)]
    finally:
        client.close()
    outcome.seconds = round(time.monotonic() - begun, 2)
    for program in server.programs:
        if program.popen.poll() is not None:
            outcome.faults.append(program.complaint("has ended"))
    for name, expected in server.expected(sent).items():
        outcome.faults += compare(place / name, expected, ended=ended)
    outcome.promoted = [switched(log), *server.promoted()]
    if cell.native and any(outcome.promoted):
        outcome.faults.append("promoted without sidestep")
    if outcome.faults:
        outcome.place = str(place)
        (place / "fault.json").write_text(outcome.line() + "\n")
        for own, mark in zip(server.logs, server.marks, strict=True):
            if own.exists():
                (place / f"server-{own.name}").write_bytes(own.read_bytes()[mark:])
    else:
        shutil.rmtree(place)
    return outcome


def _await_promotion(client: Program, log: Path, server: Server, connections: int) -> None:
    """A pass by which nothing was promoted would be none."""
    end = time.monotonic() + DEADLINE_S
    while not server.warm(switched(log), connections):
        assert client.popen.poll() is None, client.complaint("ended before its connections were promoted")
        found = [switched(log), *server.promoted()]
        assert time.monotonic() < end, client.complaint(f"promoted ends at the client and each server: {found}")
        time.sleep(0.02)


def compare(path: Path, expected: bytes, *, ended: bool) -> list[str]:
    """What is wrong with the bytes in the file; `ended`: its writer has told that these are all."""
    if not path.exists():
        return [f"{path.name}: the connection did not come to its end"]
    got = path.read_bytes()
    if got == expected:
        return []
    common = min(len(got), len(expected))
    at = next((n for n in range(0, common, 4096) if got[n : n + 4096] != expected[n : n + 4096]), common)
    while at < common and got[at] == expected[at]:
        at += 1
    if at == len(got):
        what = "a false end of stream" if ended else "stands still"
        return [f"{path.name}: {what} at {at} of {len(expected)}, {len(expected) - at} bytes are missing"]
    return [f"{path.name}: wrong from byte {at} on, of {len(expected)}; {len(got)} came"]


def _state(stage: Stage, place: Path) -> str:
    """The connections as they stand, all along a chain; what the kernel knows of them is left in `place`."""
    rows = stage.connections()
    ports = sorted({port_of(address) for row in rows for address in (row.local, row.remote)})
    if ports and (ss := shutil.which("ss", path=SEARCH_PATH)):
        known = subprocess.run([ss, "-tinpeaO", " or ".join(f"sport = {port}" for port in ports)], capture_output=True)
        (place / "ss").write_bytes(known.stdout)
    return describe(rows)
