"""Three offload protocols, installed as a distribution of their own: they tell the test what the switch tells them.

`guided` is given the kernel's route with each request, `pathfinder` finds its own. `blind` cannot bear any change.
"""

from __future__ import annotations

import inspect
import json
import os
import select
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from sidestep.routing import NetworkEvent
from sidestep.switch.protocol import Capabilities, OffloadProtocol, Pair, Request, Services

_WHERE = "SIDESTEP_TEST_TRAVELLERS"


class Guided(OffloadProtocol):
    """Needs a route."""

    name: ClassVar[str] = "guided"
    capabilities: ClassVar[Capabilities] = Capabilities(remote=True)

    def start(self, services: Services) -> None:
        super().start(services)
        self._teller = os.open(os.environ[_WHERE], os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def stop(self) -> None:
        os.close(self._teller)

    def handle_network(self, event: NetworkEvent) -> None:
        self._tell(event=str(event))

    def refusal(self, request: Request) -> str | None:
        self._tell(route=str(request.route), remote=str(request.remote))
        return None

    def join(self, pair: Pair) -> None:
        self._tell(joined=str(pair.request.route))
        pair.attach()

    def _tell(self, **what: str) -> None:
        os.write(self._teller, json.dumps({"from": self.name, **what}).encode() + b"\n")


class Pathfinder(Guided):
    """Does not want one."""

    name: ClassVar[str] = "pathfinder"
    capabilities: ClassVar[Capabilities] = Capabilities(self_routing=True, remote=True)


class Blind(Guided):
    """Fails at its first change."""

    name: ClassVar[str] = "blind"

    def handle_network(self, event: NetworkEvent) -> None:
        if "10.66." in str(event):
            raise RuntimeError("what is a route?")


class Listener:
    """The test's side."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._fifo = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._told = b""

    def next(self) -> dict[str, Any]:
        """What is told next; TimeoutError if nothing is."""
        while b"\n" not in self._told:
            if not select.select([self._fifo], [], [], 10)[0]:
                raise TimeoutError("nothing more is told")
            self._told += os.read(self._fifo, 65536)
        line, _, self._told = self._told.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def until(self, **wanted: str) -> list[dict[str, Any]]:
        """What is told up to and with the first that says this."""
        told = [self.next()]
        while not wanted.items() <= told[-1].items():
            told.append(self.next())
        return told

    def close(self) -> None:
        os.close(self._fifo)


def install(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Listener:
    """Installs them into `directory`, for every provider that is started from now on."""
    (directory / "sidestep_travellers.py").write_text(inspect.getsource(sys.modules[__name__]), encoding="utf-8")
    info = directory / "sidestep_travellers-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sidestep-travellers\nVersion: 1\n", encoding="ascii")
    points = [f"{name.lower()} = sidestep_travellers:{name}\n" for name in ("Guided", "Pathfinder", "Blind")]
    (info / "entry_points.txt").write_text("[sidestep.protocols]\n" + "".join(points), encoding="ascii")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(directory), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv(_WHERE, str(directory / "told"))
    return Listener(directory / "told")
