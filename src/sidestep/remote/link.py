"""The link of one connection between two providers: words and data in an SDP stream.

The stream begins with nothing but this: each word is 16 bytes, its number first and its count last, big-endian; behind
DATA so many bytes of the connection follow. Data goes out from where the application wrote it and comes in where the
other application reads it: no byte of it is copied here.

Words that come together go out together, with the data behind them.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import TYPE_CHECKING, Final

from sidestep import limits
from sidestep.errors import PeerViolation
from sidestep.sdp.requests import Event, EventKind, StreamReceive, StreamSend, Told
from sidestep.switch.link import Carried, Say

if TYPE_CHECKING:
    from sidestep.sdp.endpoint import Stream

_WORD: Final = Struct(">B7xQ")
_ENDS: Final = frozenset({EventKind.BROKEN, EventKind.CLOSED})  # after END_OF_STREAM there may be words to read


class SdpLink:
    """One link. `stream.tell` is its own from now on.

    Args:
        soon: Makes a call at the end of this turn or the next, once however often it is asked to.
        on_lost: The stream is over, and the connection was not.
        log: Hears of rules that the other provider broke.
        device: The name of the one that it goes over.
    """

    def __init__(
        self,
        stream: Stream,
        soon: Callable[[Callable[[], object]], None],
        on_lost: Callable[[Carried], None],
        log: Callable[[str], None],
        device: str = "",
    ) -> None:
        self._stream = stream
        self._soon = soon
        self._on_lost = on_lost
        self._log = log
        self._device = device
        self._far: Carried | None = None
        self._out: list[bytes | memoryview] = []  # in order; words of one piece stand together
        self._pieces = 0  # of data, in `_out` and on their way
        self._sending: set[StreamSend] = set()  # those of data
        self._header = memoryview(bytearray(_WORD.size))
        self._due: list[int] = []  # bytes of data that each outstanding receive brings; empty: a header is awaited
        self._established = self._finishing = self._over = False
        stream.tell = self._told

    # ---- for the connection ----

    @property
    def stream(self) -> Stream:
        """What it goes over."""
        return self._stream

    @property
    def room(self) -> int:
        """How many more pieces of data it takes now."""
        return limits.LINK_PIECES_MAX - self._pieces if self._established else 0

    def say(self, word: Say, count: int = 0) -> None:
        """Queues a word."""
        if not (self._finishing or self._over):
            self._out.append(_WORD.pack(word, count))
            self._soon(self._flush)

    def send(self, piece: memoryview) -> None:
        """Queues a piece of data."""
        self.say(Say.DATA, len(piece))
        self._out.append(piece)
        self._pieces += 1

    def finish(self) -> None:
        """Nothing more is said or sent."""
        if not (self._finishing or self._over):
            self._finishing = True
            self._soon(self._flush)

    def abandon(self) -> None:
        """Everything ends at once."""
        if not self._over:
            self._over = True
            self._out.clear()
            self._stream.abort()

    def details(self) -> dict[str, object]:
        """How it is now, for people."""
        return {"device": self._device, "peer": self._stream.address, **self._stream.connection.details()}

    # ---- for whoever made the stream ----

    def carry(self, far: Carried) -> None:
        """Belongs to that connection from now on."""
        self._far = far

    def handle_established(self) -> None:
        """The stream stands."""
        self._established = True
        self._flush()
        self._await_word()
        if self._far is not None:
            self._far.handle_room()

    # ---- out ----

    def _flush(self) -> None:
        if self._over or not self._established:
            return
        out, self._out = self._out, []
        words: list[bytes] = []
        for each in out:
            if isinstance(each, bytes):
                words.append(each)
                continue
            self._stream.send(memoryview(b"".join(words)))
            words.clear()
            self._sending.add(self._stream.send(each))
        if words:
            self._stream.send(memoryview(b"".join(words)))
        if self._finishing and not self._over:
            self._over = True
            self._stream.close()

    def _sent(self, send: StreamSend) -> None:
        if send in self._sending:
            self._sending.discard(send)
            full = self._pieces >= limits.LINK_PIECES_MAX
            self._pieces -= 1
            if full and self._far is not None:
                self._far.handle_room()

    # ---- in ----

    def _await_word(self) -> None:
        self._stream.receive(self._header, waitall=True)

    def _received(self, receive: StreamReceive) -> None:
        if self._over:
            return
        if receive.filled < receive.length:
            self._lose()
            return
        far = self._far
        assert far is not None
        try:
            if self._due:
                length = self._due.pop(0)
                far.handle_data(length)
                if not self._due:
                    self._await_word()
                return
            number, count = _WORD.unpack(self._header)
            if number == Say.DATA:
                self._await_data(far, count)
                return
            try:
                word = Say(number)
            except ValueError:
                raise PeerViolation(f"word {number} of a link", rule="link_word") from None
            far.handle_word(word, count)
        except PeerViolation as why:
            self._break(far, why)
            return
        if not self._over:
            self._await_word()

    def _await_data(self, far: Carried, length: int) -> None:
        if not 0 < length <= limits.RING_SIZE_MAX:
            raise PeerViolation(f"{length} bytes of data at once", rule="link_data")
        room = far.data_room(length)
        if room is None:
            room = (memoryview(bytearray(length)),)
        self._due = [len(piece) for piece in room]
        for piece in room:
            self._stream.receive(piece, waitall=True)

    def _break(self, far: Carried, why: PeerViolation) -> None:
        self._log(f"a connection is reset, for what {self._stream.address or 'another host'} says of it: {why}")
        far.reset("violation")
        self.abandon()

    # ---- what the stream tells ----

    def _told(self, _stream: Stream, event: Told) -> None:
        if type(event) is StreamReceive:
            self._received(event)
        elif type(event) is StreamSend:
            self._sent(event)
        elif isinstance(event, Event):
            if event.kind is EventKind.ESTABLISHED:
                self.handle_established()
            elif event.kind in _ENDS:
                self._lose()

    def _lose(self) -> None:
        """The stream is over: that was to be, or the connection goes on without it."""
        if self._over:
            return
        self._over = True
        self._out.clear()
        self._stream.close()
        if self._far is not None and not self._far.lost:
            self._far.handle_broken()
            self._on_lost(self._far)
