"""A protocol that takes its time: so many bytes a millisecond, so that TCP's end overtakes what it carries."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from queue_link import QueueLink, joined

from sidestep.switch.protocol import Capabilities, OffloadProtocol, Pair

PIECE = 4000


class Slow(OffloadProtocol):
    """Brings a piece from one ring to the other, and waits."""

    name: ClassVar[str] = "slow"
    capabilities: ClassVar[Capabilities] = Capabilities(self_routing=True)

    def join(self, pair: Pair) -> None:
        links = QueueLink(self.later, PIECE), QueueLink(self.later, PIECE)
        joined(pair.carry(*links), links)

    def later(self, call: Callable[[], object]) -> None:
        self.services.loop.call_later(0.001, call)
