"""A protocol that takes its time: so many bytes a millisecond, so that TCP's end overtakes what it carries."""

from __future__ import annotations

from typing import ClassVar

from sidestep.switch.protocol import Capabilities, OffloadProtocol, Pair
from sidestep.switch.stream import Stream

PIECE = 4000


class Slow(OffloadProtocol):
    """Copies a piece from one ring to the other, and waits."""

    name: ClassVar[str] = "slow"
    capabilities: ClassVar[Capabilities] = Capabilities(self_routing=True)

    def join(self, pair: Pair) -> None:
        a, b = pair.open()
        self.carry(a, b)
        self.carry(b, a)

    def carry(self, source: Stream, target: Stream) -> None:
        """One piece now, the next in a millisecond."""
        for piece in source.readable()[:1]:
            for room in target.writable()[:1]:
                count = min(len(piece), len(room), PIECE)
                room[:count] = piece[:count]
                target.commit(count)
                source.consume(count)
        if source.ended:
            target.end()
        elif not source.lost:
            self.services.loop.call_later(0.001, lambda: self.carry(source, target))
