"""Offload protocols for tests, and what stands around them: services that nobody asks, and entry points."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from sidestep.config import RemoteSettings
from sidestep.loop import Loop
from sidestep.routing import NetworkEvent
from sidestep.switch.modules import Modules
from sidestep.switch.protocol import (
    Awaited,
    Capabilities,
    Endpoint,
    Ends,
    Incoming,
    ListenerLease,
    OffloadProtocol,
    OffloadTransport,
    Pair,
    PortMapper,
    Services,
    Workers,
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


class NoServices:
    """Modules under test ask for nothing."""

    remote: RemoteSettings | None = None
    port_mapper: PortMapper | None = None

    @property
    def loop(self) -> Loop:
        raise AssertionError

    def start_workers(self, carrier: OffloadProtocol, mapper: PortMapper) -> Workers | None:
        raise AssertionError

    def await_end(
        self,
        carrier: OffloadProtocol,
        local: Endpoint,
        remote: Endpoint,
        on_found: Callable[[Incoming], None],
        on_failed: Callable[[str], None],
    ) -> Awaited:
        raise AssertionError

    def check_listener(self, carrier: OffloadProtocol, local: Endpoint) -> None:
        raise AssertionError

    def lease_listener(self, carrier: OffloadProtocol, local: Endpoint) -> ListenerLease:
        raise AssertionError

    def map_addresses(self, ends: Ends, names: Ends) -> Callable[[], None]:
        raise AssertionError

    def transports(self) -> Iterator[OffloadTransport]:
        raise AssertionError

    def log(self, text: str) -> None:
        raise AssertionError


@dataclass
class Point:
    """An entry point, as importlib.metadata has them."""

    name: str
    found: object
    value: str = "somewhere:Something"
    loads: int = 0

    def load(self) -> Any:
        self.loads += 1
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
        return Modules(kind, self.find, services or NoServices(), lambda name, error: self.broken.append((name, error)))
