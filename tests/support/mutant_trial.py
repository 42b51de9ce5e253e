"""Runs test items on a tree until the first that fails, and says whether a failure may be believed."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import mutant_events
from source_copy import SourceCopy, source_files

BATCH_S: Final = (15.0, 60.0, 240.0, 600.0)  # of items run by one pytest; the last for all further ones
BATCH_MAX: Final = 400
LONG_S: Final = 20.0  # from here on two workers
GRACE_S: Final = 600.0  # beyond what the items should take: start of pytest, builds, and one test beside a load


@dataclass
class Outcome:
    """What became of a batch."""

    ended: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # the end of what each said


class Trial:
    """Items on one copy of the tree."""

    def __init__(self, copy: SourceCopy) -> None:
        self._copy = copy

    def run(self, nodeids: Sequence[str], expected_s: float) -> Outcome:
        """Runs until the first failure. An item that hangs, or takes pytest with it, has failed."""
        with tempfile.TemporaryDirectory() as scratch:
            events, listed = Path(scratch) / "events", Path(scratch) / "items"
            events.touch()
            listed.write_text("\n".join(nodeids) + "\n")
            workers = ["-n", "2"] if expected_s > LONG_S and len(nodeids) > 4 else []
            command = [
                str(self._copy.python),
                "-m",
                "pytest",
                "-x",
                "-q",
                "-p",
                "mutant_events",
                *workers,
                f"@{listed}",
            ]
            said, ended_itself = self._run(command, events, expected_s + GRACE_S)
            return _outcome(events, nodeids, said, ended_itself)

    def _run(self, command: list[str], events: Path, limit_s: float) -> tuple[str, bool]:
        env = self._copy.environment(
            PYTHONPATH=str(self._copy.root / "tests" / "support"), **{mutant_events.NAME: str(events)}
        )
        with subprocess.Popen(
            command, cwd=self._copy.root, env=env, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        ) as process:  # fmt: skip
            try:
                return process.communicate(timeout=limit_s)[0], process.returncode in (0, 1, 2, 5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return process.communicate()[0], False


def _outcome(events: Path, nodeids: Sequence[str], said: str, ended_itself: bool) -> Outcome:
    outcome, begun = Outcome(), dict.fromkeys(nodeids, False)
    for line in events.read_text(encoding="utf-8").splitlines():
        nodeid, what, text = json.loads(line)
        if what == "started":
            begun[nodeid] = True
        elif what == "failed":
            outcome.failed.setdefault(nodeid, text)
        elif nodeid not in outcome.failed:
            outcome.ended.append(nodeid)
    if not outcome.failed and len(outcome.ended) < len(nodeids):
        open_ones = [nodeid for nodeid, started in begun.items() if started and nodeid not in outcome.ended]
        why = "pytest ended with it" if ended_itself else "it hung"
        left = open_ones or [nodeid for nodeid in nodeids if nodeid not in outcome.ended]
        outcome.failed[left[0]] = f"{why}\n{said[-600:]}"
    return outcome


def batches(nodeids: Sequence[str], costs: dict[str, float]) -> Iterator[list[str]]:
    """Parts of the list, short ones first: most mutants are found by the first few items."""
    limits = iter(BATCH_S)
    limit, spent = next(limits), 0.0
    batch: list[str] = []
    for nodeid in nodeids:
        if batch and (spent + costs[nodeid] > limit or len(batch) >= BATCH_MAX):
            yield batch
            batch, spent, limit = [], 0.0, next(limits, BATCH_S[-1])
        batch.append(nodeid)
        spent += costs[nodeid]
    if batch:
        yield batch


def options_of(name: str, row: str | None) -> list[str]:
    """The options of pytest that choose a set of tests, and a row of it."""
    return [f"--set={name}"] + ([f"--row={row}"] if row is not None else [])


def items_of(copy: SourceCopy, options: Sequence[str]) -> list[str]:
    """Items that a run with these options takes; asked of the tree once, which takes pytest half a minute."""
    kept, digest = copy.root.parent / "sets.json", _digest(copy)
    found = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    known: dict[str, list[str]] = found.get(digest, {})
    key = " ".join(options)
    if key not in known:
        said = _said(copy, "--collect-only", "-q", *options).splitlines()
        known[key] = [line for line in said if line.startswith("tests/") and "::" in line]
        kept.write_text(json.dumps({digest: known}), encoding="utf-8")
    return known[key]


def _digest(copy: SourceCopy) -> str:
    """Of what tests are made from: collection looks at the library as well."""
    found = hashlib.sha256()
    for path in source_files(copy.root):
        if path.suffix in {".py", ".toml", ".c", ".h"}:
            found.update(str(path).encode() + (copy.root / path).read_bytes())
    return found.hexdigest()[:16]


def _said(copy: SourceCopy, *options: str) -> str:
    command = [str(copy.python), "-m", "pytest", *options]
    done = subprocess.run(command, cwd=copy.root, env=copy.environment(), capture_output=True, text=True, check=False)
    if done.returncode not in (0, 5):
        raise RuntimeError(f"pytest {' '.join(options)} in {copy.root}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout
