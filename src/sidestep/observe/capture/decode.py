"""What `sidestep sdp decode` reads: all SDP of a capture, in the order of its frames, and messages written in hex."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import BinaryIO, Final

from sidestep import limits
from sidestep.errors import Misuse, Unavailable
from sidestep.observe.capture.events import Event
from sidestep.observe.capture.files import read_frames
from sidestep.observe.capture.frame import CapturedFrame
from sidestep.observe.capture.iwarp import IwarpConnections
from sidestep.observe.capture.layers import Segment, Transport, dissect, known_link
from sidestep.observe.capture.reliable import ReliableConnections

_OFFSET: Final = re.compile(r"\s*([0-9a-fA-F]{4,8})(:|(?=\s\s))")
_TEXT_COLUMN: Final = re.compile(r"\|.*\|\s*$")  # hexdump -C
_REPEATED: Final = re.compile(r"([0-9a-fA-F]{2})\*([0-9]{1,4})(?![0-9])")
_SEPARATORS: Final = re.compile(r"0x|[\s,:;-]")


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


def looks_like_hex(text: str) -> bool:
    """Whether a word of a command line is hex rather than the name of a file."""
    return re.fullmatch(r"[0-9a-fA-Fx*\s,:;-]+", text) is not None


def messages_in(text: str, name: str) -> Iterator[tuple[int, bytes]]:
    """The messages of a text in hex, each with the line where it begins: plain, a hex dump, or as in docs/wire/sdp.md.

    A blank line stands between two, and `#` begins a comment. `00*24` is 24 zero bytes. An offset at the start of a
    line and characters at its end, as dumps have them, are left out. `Misuse` names the line that is not hex, after the
    messages before it.
    """
    repeated = sum(2 * int(found[2]) for found in _REPEATED.finditer(text))
    if len(text) + repeated > limits.CAPTURE_HEX_MAX:
        raise Misuse(f"{name}: more than {limits.CAPTURE_HEX_MAX} characters of hex", remedy="split it")
    block, begin = bytearray(), 0
    for number, line in enumerate([*text.splitlines(), ""], 1):
        content = line.split("#")[0].strip()
        if content:
            begin = begin if block else number
            block += _bytes_of(content, len(block), f"{name}, line {number}")
        elif not line.strip() and block:
            yield begin, bytes(block)
            block.clear()


def _bytes_of(line: str, offset: int, where: str) -> bytes:
    if (found := _OFFSET.match(line)) is not None and int(found[1], 16) == offset:
        line = line[found.end() :].lstrip()
        if found[2]:
            line = re.split(r"\s\s", line)[0]  # xxd
        line = _TEXT_COLUMN.sub("", line)
    digits = _SEPARATORS.sub("", _REPEATED.sub(lambda match: match[1] * int(match[2]), line))
    try:
        return bytes.fromhex(digits)
    except ValueError as error:
        raise Misuse(
            f"{where} is not hex: {line[:60]!r}", remedy="write two digits a byte; a file is given by its name"
        ) from error
