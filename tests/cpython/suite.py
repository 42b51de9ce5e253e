"""Runs modules of CPython's tests in a process of their own and compares what became of each test."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
TEST_TIMEOUT_S: Final = 60.0  # for a single test; the slowest takes about ten seconds
RESTARTS_MAX: Final = 20  # tests that kill or hang the interpreter before the module is given up


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a test: ok, fail, skip, expected failure, unexpected success, crash or hang."""

    verdict: str
    detail: str = ""


@dataclass(slots=True)
class Run:
    """One run of a module."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    environment_altered: bool = False


@dataclass(frozen=True, slots=True)
class Exceptions:
    """The listed exceptions: pattern -> reason."""

    excluded: dict[str, str]
    differs: dict[str, str]

    @classmethod
    def load(cls) -> Exceptions:
        """Read exceptions.toml; every entry needs a reason."""
        listed = tomllib.loads((HERE / "exceptions.toml").read_text(encoding="utf-8"))
        tables = {
            kind: {entry["tests"]: entry["reason"] for entry in listed.get(kind, [])}
            for kind in ("excluded", "differs")
        }
        assert all(reason for table in tables.values() for reason in table.values())
        return cls(**tables)


def run_module(
    module: str,
    env: Mapping[str, str],
    *,
    resources: str = "",
    excluded: Sequence[str] = (),
    timeout_s: float = TEST_TIMEOUT_S,
) -> Run:
    """Run `module` to its end, going on after tests that kill or hang the interpreter; `timeout_s` is for each test.

    Its directory has a short name: the module's sockets are named after it, and a name of 108 bytes is skipped.
    """
    run = Run()
    first = 0
    for _ in range(RESTARTS_MAX):
        # what a test has started may be dying yet, and write
        with tempfile.TemporaryDirectory(prefix="py-", ignore_cleanup_errors=True) as cwd:
            last = _run_from(first, [module, resources, str(timeout_s), *excluded], env, Path(cwd), run, timeout_s)
        if last is None:
            return run
        first = last + 1
    raise AssertionError(f"{module} was killed or hung {RESTARTS_MAX} times; the last: {list(run.outcomes)[-1]}")


def _run_from(
    first: int, options: Sequence[str], env: Mapping[str, str], cwd: Path, run: Run, timeout_s: float
) -> int | None:
    """Run from test `first` on; None at the end of the module, else the index of the test that ended the process."""
    reader, writer = os.pipe()
    log = cwd / "recorder.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "recorder.py"), str(writer), str(first), *options],
            cwd=cwd, env={**env, "PYTHONHASHSEED": "0"}, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            pass_fds=[writer], start_new_session=True,
        )  # fmt: skip
    os.close(writer)
    running: tuple[int, str] | None = None
    done = False
    try:
        with open(reader, "rb", buffering=0) as pipe, selectors.DefaultSelector() as ready:
            ready.register(pipe, selectors.EVENT_READ)
            unread = b""
            # The recorder times its tests itself; this is for one that cannot even do that.
            while ready.select(timeout_s * 1.5) and (piece := pipe.read(65536)):
                *lines, unread = (unread + piece).split(b"\n")
                for line in lines:
                    match json.loads(line):
                        case ["start", index, test]:
                            running = index, test
                        case ["end", test, verdict, detail]:
                            run.outcomes[test] = Outcome(verdict, detail)
                            running = None
                        case ["done", altered]:
                            run.environment_altered |= altered
                            done = True
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if done:
        return None
    tail = log.read_bytes()[-6000:].decode(errors="replace")
    assert running, f"{options[0]}: the recorder ended outside of any test\n{tail}"
    index, test = running
    verdict = "hang" if "Timeout (" in tail or process.returncode == -signal.SIGKILL else "crash"
    run.outcomes[test] = Outcome(verdict, f"exit status {process.returncode}\n{tail}")
    return index


def differences(native: Run, shimmed: Run, exceptions: Exceptions) -> list[str]:
    """A paragraph for each test that differs and is not listed, and for each entry that lists nothing that differs."""
    found = []
    used = set()
    for test in sorted(native.outcomes.keys() | shimmed.outcomes.keys()):
        before, after = (run.outcomes.get(test, Outcome("absent")) for run in (native, shimmed))
        if before.verdict == after.verdict:
            continue
        listed = [pattern for pattern in exceptions.differs if fnmatchcase(test, pattern)]
        used.update(listed)
        if not listed:
            found.append(
                f"{test}: natively {before.verdict}, under sidestep {after.verdict}\n{before.detail}{after.detail}"
            )
    found += [
        f"exceptions.toml lists {pattern}, which does not differ"
        for pattern in exceptions.differs
        if pattern not in used and any(fnmatchcase(test, pattern) for test in native.outcomes)
    ]
    if shimmed.environment_altered and not native.environment_altered:
        found.append("under sidestep the tests left threads or processes behind, natively they did not")
    return found
