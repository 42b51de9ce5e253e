"""Builds and runs the scenes in programs/ (see programs/scene.h), over kernel TCP or under the shim.

A scene asks on its control socket "warm PORT PORT" after each batch of its warm-up and is told to go on once `sidestep
ss` shows both ends of that connection promoted, so that what follows is known to be on the ring. "stay PORT PORT" asks
the same at its end. Over kernel TCP the answer is always yes.
"""

from __future__ import annotations

import difflib
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

import toolchain
from sidestep.testing import Connection, Sidestep
from toolchain import PLAIN, Sanitizer

PROGRAMS: Final = Path(__file__).resolve().parent / "programs"
WARM_UP_S: Final = 15.0
SCENE_S: Final = 30.0
KNOWN_DIFFERENCES: Final[dict[str, str]] = tomllib.loads(
    Path(__file__).with_name("known_differences.toml").read_text(encoding="utf-8")
)


class Build(StrEnum):
    """How the scenes are compiled: which names of the C library they call."""

    PLAIN = "plain"
    FORTIFIED = "fortified"  # the _chk and the 64 names


_BUILD_FLAGS: Final = {Build.PLAIN: (), Build.FORTIFIED: ("-D_FORTIFY_SOURCE=2", "-D_FILE_OFFSET_BITS=64")}


@dataclass(frozen=True, slots=True)
class Variant:
    """The conditions of one run."""

    peer_process: bool = False
    active: bool = True
    warm: bool = True
    family: str = "4"
    build: Build = Build.PLAIN

    def arguments(self) -> list[str]:
        """The options of the scene program."""
        return [
            *(["--peer=process"] if self.peer_process else []),
            *([] if self.active else ["--passive"]),
            *(["--warm"] if self.warm else []),
            f"--family={self.family}",
        ]

    def __str__(self) -> str:
        return "-".join(
            (
                "process" if self.peer_process else "same",
                "active" if self.active else "passive",
                "warm" if self.warm else "cold",
                f"v{self.family}",
                self.build,
            )
        )


@dataclass(frozen=True, slots=True)
class Run:
    """What became of a scene: its transcript, and why the run as such failed, if it did."""

    transcript: str
    failure: str | None
    promotions_seen: int  # warm-ups that ended with both ends promoted


def scene_names() -> Iterator[str]:
    """The names of all scenes, read from the sources: collecting tests must not need a compiler."""
    for path in sorted(PROGRAMS.glob("scenes_*.c")):
        table = path.read_text(encoding="utf-8").rpartition(f"const struct scene {path.stem}[] = {{")[2]
        for short, named in re.findall(r'SCENE\((\w+)\)|\{"(\w+)",', table):
            yield short or named


def build(kind: Build = Build.PLAIN, sanitizer: Sanitizer = PLAIN) -> Path:
    """Compiles the scenes; returns the program."""
    flags = [*sanitizer.flags, *_BUILD_FLAGS[kind], "-D_GNU_SOURCE"]
    return toolchain.build(f"scenes-{kind}-{sanitizer.name}", sorted(PROGRAMS.glob("*.c")), flags)


def difference(native: str, shimmed: str) -> str:
    """The two transcripts as a diff; empty if they are the same."""
    lines = difflib.unified_diff(native.splitlines(), shimmed.splitlines(), "kernel TCP", "shim", lineterm="", n=4)
    return "\n".join(lines)


def _both_ends(found: list[Connection], ports: tuple[int, int]) -> list[Connection]:
    """The connections with these two ports, one for each end."""

    def port(address: str) -> int:
        return int(address.rpartition(":")[2])

    return [c for c in found if {port(c.local), port(c.remote)} == set(ports)]


class _Control:
    """Answers a scene's questions about its connections."""

    def __init__(self, sidestep: Sidestep | None) -> None:
        self._sidestep = sidestep
        self._deadline_s = time.monotonic() + WARM_UP_S
        self.promotions_seen = 0
        self.failure: str | None = None

    def answer(self, question: str) -> bytes:
        """b"g": go on; b"m": more of the same, ask again; b"x": give up."""
        if self._sidestep is None:
            return b"g"
        word, *ports = question.split()
        ends = _both_ends(self._sidestep.connections(), (int(ports[0]), int(ports[1])))
        if len(ends) == 2 and all(end.promoted for end in ends):
            self.promotions_seen += word == "warm"
            self._deadline_s = time.monotonic() + WARM_UP_S
            return b"g"
        if word == "warm" and time.monotonic() < self._deadline_s:
            return b"m"
        listed = "; ".join(
            f"{e.local} {e.role} {e.state} {e.reason} tcp {e.tx.tcp_bytes}/{e.rx.tcp_bytes}" for e in ends
        )
        self.failure = f"not promoted when asked '{question}': {listed or 'nothing known of it'}"
        return b"x"


def run(
    program: Path,
    scene: str,
    variant: Variant,
    sidestep: Sidestep | None = None,
    env: Mapping[str, str] | None = None,
) -> Run:
    """Plays `scene` over kernel TCP, or under the shim with `sidestep`'s provider and, if given, this environment."""
    if env is None and sidestep is not None:
        env = sidestep.env()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control = _Control(sidestep)
    with ours, tempfile.TemporaryFile() as output:
        with theirs:
            child = subprocess.Popen(
                [program, scene, *variant.arguments(), f"--control={theirs.fileno()}"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=output,
                pass_fds=[theirs.fileno()],
                env=env,
                start_new_session=True,  # so that what a scene leaves behind can be ended with it
            )
        failure = None
        deadline_s = time.monotonic() + SCENE_S
        try:
            while True:
                ours.settimeout(max(deadline_s - time.monotonic(), 0.001))
                question = ours.recv(256).decode()
                if not question:
                    break
                ours.send(control.answer(question))
            child.wait(max(deadline_s - time.monotonic(), 0.001))
        except (TimeoutError, subprocess.TimeoutExpired):
            failure = f"not finished after {SCENE_S:.0f} s\n{_stacks(child.pid)}"
        except (ConnectionResetError, BrokenPipeError):
            child.wait()
        finally:
            _end_session(child)
        if failure is None and child.returncode:
            failure = f"ended with {child.returncode}"
        output.seek(0)
        transcript = output.read().decode(errors="replace")
    return Run(transcript, control.failure or failure, control.promotions_seen)


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
