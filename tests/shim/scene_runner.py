"""Builds and runs the scenes in programs/ (see programs/scene.h), over kernel TCP or under the shim.

A scene asks on its control socket "warm PORT PORT" after each batch of its warm-up and is told to go on once `sidestep
ss` shows both ends of that connection promoted, so that what follows is known to be on the ring. "stay PORT PORT" asks
the same at its end. Over kernel TCP the answer is always yes.
"""

from __future__ import annotations

import difflib
import os
import random
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, TypeAlias

import needed
import toolchain
from common import PATIENCE_S
from foreign_programs import KERNEL_HEADERS
from hosts import Host
from toolchain import PLAIN, Sanitizer

from sidestep.observe.demotion import Outcome, Result
from sidestep.testing import Connection, Sidestep

PROGRAMS: Final = Path(__file__).resolve().parent / "programs"
WARM_UP_S: Final = PATIENCE_S
SCENE_S: Final = 200.0  # a storm of signals between two hosts takes 4 alone, and 80 where eight scenes meet
KNOWN_S: Final = 20.0  # one that is expected to differ, and may wait for good
KNOWN_HEARD_S: Final = 5.0  # likewise, until its connections are where an order sends them
NOT_APART: Final = 77  # scene.h
HEARD_S: Final = PATIENCE_S
SHAKE_SEED: Final = os.environ.get("SIDESTEP_SHAKE_SEED", "")  # other moments for a Variant.shaken: any text
LOADER: Final = toolchain.NATIVE / "sidestep-loader"


@dataclass(frozen=True, slots=True)
class Difference:
    """Why a scene differs from kernel TCP, and the conditions under which it does: patterns of their names."""

    reason: str
    where: list[str]


KNOWN_DIFFERENCES: Final = {
    scene: Difference(**found)
    for scene, found in tomllib.loads(
        Path(__file__).with_name("known_differences.toml").read_text(encoding="utf-8")
    ).items()
}


def difference_known(scene: str, conditions: object) -> str:
    """Why this scene differs from kernel TCP under these conditions, always; empty if it must not."""
    found = KNOWN_DIFFERENCES.get(scene)
    return found.reason if found and any(fnmatchcase(str(conditions), each) for each in found.where) else ""


@dataclass(frozen=True, slots=True)
class Apart:
    """Where a scene is played whose peer is on another host: what is asked of both providers is asked here."""

    one: Host
    other: Host

    def arguments(self, family: str, *, carried: bool) -> list[str]:
        """The options of the scene program; with `carried` the peer runs under its own host's provider."""
        here, there = ((host.address6 if family == "6" else host.address) for host in (self.one, self.other))
        return [
            f"--here={here}",
            f"--there={there}",
            f"--apart={self.other.namespace.path}",
            *([f"--apart-socket={self.other.sidestep.socket}"] if carried else []),
        ]

    def env(self) -> dict[str, str]:
        """Of a program on the first host."""
        return self.one.sidestep.env()

    def connections(self) -> list[Connection]:
        """Those of both hosts."""
        return [connection for host in (self.one, self.other) for connection in host.sidestep.connections()]

    def demote(self, wanted: Callable[[Connection], bool] = lambda _: True, timeout_s: float = 0) -> list[Outcome]:
        """Sends connections of both hosts back to TCP."""
        return [told for host in (self.one, self.other) for told in host.sidestep.demote(wanted, timeout_s)]

    def promote(self, wanted: Callable[[Connection], bool] = lambda _: True, timeout_s: float = 0) -> list[Outcome]:
        """Takes `demote` back."""
        return [told for host in (self.one, self.other) for told in host.sidestep.promote(wanted, timeout_s)]


Stage: TypeAlias = Sidestep | Apart  # who serves the scene


class Build(StrEnum):
    """How the scenes are compiled: which names of the C library they call."""

    PLAIN = "plain"
    FORTIFIED = "fortified"  # the _chk and the 64 names
    STATIC = "static"  # with its own copy of it
    MUSL = "musl"  # another one


class Sockets(StrEnum):
    """The family that sockets are opened with."""

    ORDINARY = "ordinary"
    EXPLICIT = "explicit"
    DIRECT = "direct"


LOADED: Final = (Build.STATIC, Build.MUSL)  # started by sidestep's loader
_BUILD_FLAGS: Final = {
    Build.PLAIN: (),
    Build.FORTIFIED: ("-D_FORTIFY_SOURCE=2", "-D_FILE_OFFSET_BITS=64"),
    Build.STATIC: ("-static",),
    Build.MUSL: KERNEL_HEADERS,
}


@dataclass(frozen=True, slots=True)
class Variant:
    """The conditions of one run."""

    peer_process: bool = False
    active: bool = True
    warm: bool = True
    family: str = "4"
    build: Build = Build.PLAIN
    sockets: Sockets = Sockets.ORDINARY
    shaken: bool = False  # demoted and promoted all the while, at random moments

    def arguments(self) -> list[str]:
        """The options of the scene program."""
        return [
            *(["--peer=process"] if self.peer_process else []),
            *([] if self.active else ["--passive"]),
            *(["--warm"] if self.warm else []),
            *(["--shaken"] if self.shaken else []),
            f"--family={self.family}",
            f"--sockets={self.sockets[0]}",
        ]

    def native(self) -> Variant:
        """The same without sidestep: the kernel has ordinary sockets alone."""
        return replace(self, sockets=Sockets.ORDINARY)

    def __str__(self) -> str:
        return "-".join(
            (
                "process" if self.peer_process else "same",
                "active" if self.active else "passive",
                "warm" if self.warm else "cold",
                f"v{self.family}",
                self.build,
                *([] if self.sockets is Sockets.ORDINARY else [self.sockets]),
                *(["shaken"] if self.shaken else []),
            )
        )


@dataclass(frozen=True, slots=True)
class Run:
    """What became of a scene: its transcript, and why the run as such failed, if it did."""

    transcript: str
    failure: str | None
    promotions_seen: int  # warm-ups that ended with both ends promoted
    demoted: int = 0  # connections that were told to go back to TCP meanwhile
    needs_one_host: bool = False  # it cannot be played on two


def scene_names(table: str = "*") -> Iterator[str]:
    """The names of all scenes, or of one table; from the sources: collecting tests must not need a compiler."""
    for path in sorted(PROGRAMS.glob(f"scenes_{table}.c")):
        listed = path.read_text(encoding="utf-8").rpartition(f"const struct scene {path.stem}[] = {{")[2]
        for short, named in re.findall(r'SCENE\((\w+)\)|\{"(\w+)",', listed):
            yield short or named


def build(kind: Build = Build.PLAIN, sanitizer: Sanitizer = PLAIN) -> Path:
    """Compiles the scenes; returns the program."""
    flags = [*sanitizer.flags, *_BUILD_FLAGS[kind], "-D_GNU_SOURCE", f"-I{toolchain.HEADERS}"]
    compiler = "musl-gcc" if kind is Build.MUSL else None
    if compiler:
        needed.program(compiler)
    return toolchain.build(f"scenes-{kind}-{sanitizer.name}", sorted(PROGRAMS.glob("scene*.c")), flags, cc=compiler)


def difference(native: str, shimmed: str) -> str:
    """The two transcripts as a diff; empty if they are the same."""
    lines = difflib.unified_diff(native.splitlines(), shimmed.splitlines(), "kernel TCP", "shim", lineterm="", n=4)
    return "\n".join(lines)


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def _both_ends(found: list[Connection], ports: tuple[int, int]) -> list[Connection]:
    """The connections with these two ports, one for each end."""
    return [c for c in found if {_port(c.local), _port(c.remote)} == set(ports)]


def _on_tcp(ends: list[Connection]) -> bool:
    return all(end.state == "pinned" and end.tx.path == end.rx.path == "tcp" for end in ends)


def _promoted_again(ends: list[Connection]) -> bool:
    return all(end.promoted and end.promotions > 1 for end in ends)


# What a scene asks after an order: whether it is so of the ends, the one whose port came first being the first; and
# whether that is waited for, as nobody of the scene makes a call meanwhile.
_ORDERED: Final[dict[str, tuple[Callable[[list[Connection]], bool], bool]]] = {
    "tcp": (_on_tcp, False),
    "tcp!": (_on_tcp, True),
    "left": (lambda ends: ends[0].tx.path == "tcp", False),
    "joined": (lambda ends: ends[0].tx.path == "ring", False),
    "on": (lambda ends: all(end.promoted for end in ends), False),
    "again": (_promoted_again, False),
    "again!": (_promoted_again, True),
    "rests": (lambda ends: ends[0].reason == "DEMOTED" and ends[0].tx.path == "tcp", True),
    "moves": (lambda ends: ends[0].state != "pinned", True),
}


class _Shaker:
    """Sends all connections of a provider to TCP and lets them come back, at random moments, in a thread."""

    def __init__(self, sidestep: Stage, seed: str) -> None:
        self._sidestep = sidestep
        self._random = random.Random(seed)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.demoted = 0  # connections that were told to go back

    def start(self) -> None:
        """Begins, with connections on their way back; does nothing the second time."""
        if self._thread is None:
            self._demote()
            self._thread = threading.Thread(target=self._shake)
            self._thread.start()

    def stop(self) -> None:
        """Ends."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _shake(self) -> None:
        while not self._stop.is_set():
            self._stop.wait(self._random.uniform(0, 0.003))
            self._sidestep.promote(timeout_s=0)
            self._stop.wait(self._random.uniform(0, 0.003))
            self._demote()

    def _demote(self) -> None:
        told = self._sidestep.demote(timeout_s=0)
        self.demoted += sum(one.result in (Result.TCP, Result.PENDING) for one in told)


class _Control:
    """Answers a scene's questions about its connections."""

    def __init__(self, sidestep: Stage | None, shaker: _Shaker | None, heard_s: float) -> None:
        self._sidestep = sidestep
        self._shaker = shaker
        self._heard_s = heard_s
        self._deadline_s = time.monotonic() + WARM_UP_S
        self.promotions_seen = 0
        self.failure: str | None = None

    def answer(self, question: str) -> bytes:
        """b"g": go on; b"m": more of the same, ask again; b"x": give up."""
        if self._sidestep is None:
            return b"g"
        word, *ports = question.split()
        if self._shaker and word != "warm":
            return b"g"  # it may be anywhere
        if word in ("demote", "promote"):
            give = self._sidestep.demote if word == "demote" else self._sidestep.promote
            give(lambda c: (_port(c.local), _port(c.remote)) == (int(ports[0]), int(ports[1])), 0)
            return b"g"
        ends = _both_ends(self._sidestep.connections(), (int(ports[0]), int(ports[1])))
        if word in _ORDERED:
            return self._ordered(word, ends, int(ports[0]), question)
        if len(ends) == 2 and all(end.promoted for end in ends):
            self.promotions_seen += word == "warm"
            self._deadline_s = time.monotonic() + WARM_UP_S
            if self._shaker:
                self._shaker.start()
            return b"g"
        if word == "warm" and time.monotonic() < self._deadline_s:
            return b"m"
        listed = "; ".join(
            f"{e.local} {e.role} {e.state} {e.reason} tcp {e.tx.tcp_bytes}/{e.rx.tcp_bytes}" for e in ends
        )
        self.failure = f"not promoted when asked '{question}': {listed or 'nothing known of it'}"
        return b"x"

    def _ordered(self, word: str, ends: list[Connection], port: int, question: str) -> bytes:
        """Whether the ends are where an order sends them; without a call of theirs where the word says so."""
        assert self._sidestep is not None
        reached, waits = _ORDERED[word]
        deadline_s = time.monotonic() + self._heard_s
        while not (len(ends) == 2 and reached(sorted(ends, key=lambda end: _port(end.local) != port))):
            if (time.monotonic() if waits else deadline_s) < min(deadline_s, self._deadline_s):
                time.sleep(0.002)  # other processes change it: nothing announces that
                ends = _both_ends(self._sidestep.connections(), (_port(ends[0].local), _port(ends[0].remote)))
                continue
            if not waits and time.monotonic() < self._deadline_s:
                return b"m"
            listed = "; ".join(f"{e.local} {e.state} {e.reason} {e.tx.path}/{e.rx.path} {e.promotions}" for e in ends)
            self.failure = f"not so when asked '{question}': {listed or 'nothing known of it'}"
            return b"x"
        self._deadline_s = time.monotonic() + WARM_UP_S
        return b"g"


def run(
    program: Path,
    scene: str,
    variant: Variant,
    sidestep: Stage | None = None,
    env: Mapping[str, str] | None = None,
    *,
    apart: Apart | None = None,
    differs: bool = False,
) -> Run:
    """Plays `scene` over kernel TCP, or under the shim with `sidestep`'s provider and, if given, this environment.

    With `apart` its peer is on another host. One that `differs`, as expected, is not waited for as long as others.
    """
    if env is None and sidestep is not None:
        env = sidestep.env()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    shaker = _Shaker(sidestep, f"{scene} {variant}{SHAKE_SEED}") if sidestep and variant.shaken else None
    if shaker and not variant.warm:
        shaker.start()
    known = sidestep is not None and (differs or bool(difference_known(scene, variant)))
    control = _Control(sidestep, shaker, KNOWN_HEARD_S if known else HEARD_S)
    more = apart.arguments(variant.family, carried=sidestep is not None) if apart else []
    loaded: list[str | Path] = [LOADER, "--run", program] if sidestep and variant.build in LOADED else []
    with ours, tempfile.TemporaryFile() as output:
        with theirs, apart.one.namespace.inside() if apart else nullcontext():
            child = subprocess.Popen(
                [*loaded, program, scene, *variant.arguments(), *more, f"--control={theirs.fileno()}"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=output,
                pass_fds=[theirs.fileno()],
                env=env,
                start_new_session=True,  # so that what a scene leaves behind can be ended with it
            )
        failure = None
        most_s = KNOWN_S if known else SCENE_S
        deadline_s = time.monotonic() + most_s
        try:
            while True:
                ours.settimeout(max(deadline_s - time.monotonic(), 0.001))
                question = ours.recv(256).decode()
                if not question:
                    break
                ours.send(control.answer(question))
            child.wait(max(deadline_s - time.monotonic(), 0.001))
        except (TimeoutError, subprocess.TimeoutExpired):
            failure = f"not finished after {most_s:.0f} s\n{_stacks(child.pid)}"
        except (ConnectionResetError, BrokenPipeError):
            child.wait()
        finally:
            _end_session(child)
            if shaker:
                shaker.stop()
        if failure is None and child.returncode not in (0, NOT_APART):
            failure = f"ended with {child.returncode}"
        output.seek(0)
        transcript = output.read().decode(errors="replace")
    return Run(
        transcript, control.failure or failure, control.promotions_seen, shaker.demoted if shaker else 0,
        child.returncode == NOT_APART,
    )  # fmt: skip


def _end_session(child: subprocess.Popen[bytes]) -> None:
    """Kills what is left of the scene's own process group."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # nothing is left
    finally:
        child.wait()


def _stacks(leader: int) -> str:
    """Where the processes of a scene that hangs are waiting, as far as the kernel tells."""
    lines = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(entry.name)) != leader:
                continue
            for task in sorted((entry / "task").iterdir()):
                state = re.search(r"State:\s+(\w)", (task / "status").read_text(encoding="ascii"))
                call = (task / "syscall").read_text(encoding="ascii").split()[:4]
                lines.append(f"  pid {entry.name} task {task.name} {state and state[1]} syscall {' '.join(call)}")
        except OSError:
            continue  # it ended meanwhile
    return "\n".join(lines)
