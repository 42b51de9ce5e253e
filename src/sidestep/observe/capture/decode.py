"""All SDP of a capture, in the order of its frames."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from sidestep.errors import Unavailable
from sidestep.observe.capture.events import Event
from sidestep.observe.capture.files import read_frames
from sidestep.observe.capture.frame import CapturedFrame
from sidestep.observe.capture.iwarp import IwarpConnections
from sidestep.observe.capture.layers import Segment, Transport, dissect, known_link
from sidestep.observe.capture.reliable import ReliableConnections


class Decoder:
    """Reads a capture once; afterwards it can say how much there was."""

    def __init__(self, stream: BinaryIO, name: str, start: bytes = b"") -> None:
        self._frames = read_frames(stream, name, start)
        self.frames = 0
        self.begin_ns = 0  # of the first frame, since the epoch
        self.unknown_links: set[int] = set()  # LINKTYPEs of frames that could not be read

    def events(self) -> Iterator[Event]:
        """Everything that was found; errors are those of `read_frames`, raised after what comes before them."""
        reliable, iwarp = ReliableConnections(), IwarpConnections()
        last: CapturedFrame | None = None
        damage: Unavailable | None = None
        try:
            for frame in self._frames:
                if last is None:
                    self.begin_ns = frame.time_ns
                last = frame
                self.frames += 1
                layer = dissect(frame)
                if isinstance(layer, Transport):
                    yield from reliable.feed(frame, layer)
                elif isinstance(layer, Segment):
                    yield from iwarp.feed(frame, layer)
                elif not known_link(frame.link_type):
                    self.unknown_links.add(frame.link_type)
        except Unavailable as found:
            damage = found
        yield from iwarp.finish(last)
        if damage is not None:
            raise damage
