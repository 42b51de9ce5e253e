"""Plugin of pytest: a test that its own timeout does not end costs itself, not the run.

pytest-timeout raises once, in the test's main thread. A test whose clean-up waits again, or that stands in C, then
stands for good, and the run with it. So each worker writes down what it runs, and the controller looks: a worker that
is far over the timeout is shown with its processes and ended by SIGABRT, at which faulthandler prints its stack. xdist
counts the test as failed and goes on in a new worker. Without workers nothing is watched: who runs one test sees it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest

GRACE_S: Final = 60.0  # beyond the timeout: what the clean-up may take
LONGEST_S: Final = 1800.0  # of an item without a timeout
LOOK_S: Final = 5.0


def _limit_s(item: pytest.Item) -> float:
    """The seconds that an item may take, with its clean-up."""
    mark = item.get_closest_marker("timeout")
    if mark:
        limit = float(mark.args[0] if mark.args else mark.kwargs["timeout"])
    else:
        limit = float(item.config.getini("timeout") or 0)
    return (limit or LONGEST_S) + GRACE_S


class Running:
    """In a worker: keeps one small file that names the item that runs."""

    def __init__(self, place: Path) -> None:
        self._file = place / str(os.getpid())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """From set-up to tear-down, fixtures included."""
        self._file.write_text(json.dumps([item.nodeid, time.time() + _limit_s(item)]), encoding="utf-8")
        try:
            return (yield)
        finally:
            self._file.unlink(missing_ok=True)


class Watching:
    """In the controller: ends workers that stand."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def pytest_sessionstart(self) -> None:
        """Begins to look; what an earlier run left behind goes."""
        self._place.mkdir(parents=True, exist_ok=True)
        for old in self._place.iterdir():
            old.unlink()
        self._thread.start()

    def pytest_sessionfinish(self) -> None:
        """The workers have ended."""
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(LOOK_S):
            for file in self._place.iterdir():
                with suppress(OSError, ValueError):  # the item ends now, or begins
                    name, until = json.loads(file.read_text(encoding="utf-8"))
                    if time.time() > until:
                        file.unlink()
                        self._end(int(file.name), name)

    def _end(self, pid: int, name: str) -> None:
        asked = ["ps", "-e", "-ww", "--forest", "-o", "pid,stat,wchan:20,etime,time,args"]
        with suppress(OSError):  # a machine without ps
            shown = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
            print(*(line[:200] for line in shown.splitlines()), sep="\n", file=sys.stderr)
        print(f"stuck: {name} in process {pid}, far over its timeout", file=sys.stderr, flush=True)
        # The main thread's stack is wanted: if another thread took the signal, that one would run meanwhile.
        ctypes.CDLL(None).tgkill(pid, pid, signal.SIGABRT)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def plugin(config: pytest.Config, place: Path) -> Running | Watching | None:
    """What this process has to do; None where no workers are asked for."""
    if hasattr(config, "workerinput"):
        return Running(place)
    return Watching(place) if config.getoption("numprocesses", None) else None
