"""Offload protocols for tests, and what stands around them: services that nobody asks, and entry points."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from typing import Any, ClassVar

from sidestep.loop import Loop
from sidestep.routing import NetworkEvent
from sidestep.switch.modules import Modules
from sidestep.switch.protocol import (
    Capabilities,
    OffloadProtocol,
    Pair,
    Services,
)


class Told(OffloadProtocol):
    """Writes down what it is told."""

    name: ClassVar[str] = "told"
    capabilities: ClassVar[Capabilities] = Capabilities()

    def __init__(self) -> None:
        self.heard: list[object] = []

    def start(self, services: Services) -> None:
        super().start(services)
        self.heard.append("start")

    def stop(self) -> None:
        self.heard.append("stop")

    def handle_network(self, event: NetworkEvent) -> None:
        self.heard.append(event)

    def join(self, pair: Pair) -> None:
        pair.attach()


def no_services() -> Services:
    """Modules under test ask for nothing."""
    return Services(loop=Loop(), log=lambda text: None, remote=None)


class Point(EntryPoint):
    """One that gives what it was made with, or raises it, and counts."""

    found: object
    loads: int

    def __init__(self, name: str, found: object, value: str = "somewhere:Something") -> None:
        super().__init__(name, value, "")
        vars(self).update(found=found, loads=0)

    def load(self) -> Any:
        vars(self)["loads"] += 1
        if isinstance(self.found, BaseException):
            raise self.found
        return self.found


@dataclass
class World:
    points: dict[str, Point]
    broken: list[tuple[str, BaseException]] = field(default_factory=list)

    def find(self) -> Mapping[str, Point]:
        return self.points

    def modules(self, services: Services | None = None) -> Modules[OffloadProtocol]:
        kind: Any = OffloadProtocol
        return Modules(
            kind, self.find, services or no_services(), lambda name, error: self.broken.append((name, error))
        )
