"""The link of one connection between two providers: words and data in an SDP stream.

The stream begins with nothing but this: each word is 16 bytes, its number first and its count last, big-endian; behind
DATA so many bytes of the connection follow. Data goes out from where the application wrote it and comes in where the
other application reads it: no byte of it is copied here.

Words that come together go out together, with the data behind them.
"""

from __future__ import annotations

import traceback
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
        on_lost: The stream is over, and the connection was not; or it was reset, and that may not have got through.
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
        self._words_on_way: dict[StreamSend, int] = {}  # how many each brings
        self._words = 0  # queued and on their way
        self._header = memoryview(bytearray(_WORD.size))
        self._due: list[int] = []  # bytes of data that each outstanding receive brings; empty: a header is awaited
        self._established = self._finishing = self._over = self._lost = False
        stream.tell = self._told

    # ---- for the connection ----

    @property
    def stream(self) -> Stream:
        """What it goes over."""
        return self._stream

    @property
    def room(self) -> int:
        """How many more pieces of data it takes now."""
        return limits.LINK_PIECES_MAX - self._pieces if self._established and not self._ending else 0

    @property
    def _ending(self) -> bool:
        return self._finishing or self._over

    def say(self, word: Say, count: int = 0) -> None:
        """Queues a word."""
        if self._ending:
            return
        self._out.append(_WORD.pack(word, count))
        self._words += 1
        self._soon(self._flush if self._words <= limits.LINK_WORDS_MAX else self._overflow)

    def send(self, piece: memoryview) -> None:
        """Queues a piece of data."""
        if self._ending:
            return
        self.say(Say.DATA, len(piece))
        self._out.append(piece)
        self._pieces += 1

    def finish(self) -> None:
        """Nothing more is said or sent."""
        if not self._ending:
            self._finishing = True
            self._soon(self._flush)

    def abandon(self) -> None:
        """Everything ends at once."""
        if not self._over:
            self._over = True
            self._out.clear()
            self._stream.abort()

    def _overflow(self) -> None:
        """The other end takes nothing, and yet has us say more and more."""
        if self._far is not None and not self._over:
            self._break(self._far, PeerViolation(f"it takes none of {self._words} words", rule="link_words"))

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
        if self._ending:
            return
        self._await_word()
        if self._far is not None:
            self._far.handle_room()

    # ---- out ----

    def _flush(self) -> None:
        if self._over or not self._established:
            return
        self._contained(self._send_all)

    def _send_all(self) -> None:
        out, self._out = self._out, []
        words: list[bytes] = []
        for each in out:
            if isinstance(each, bytes):
                words.append(each)
                continue
            self._send_words(words)
            words.clear()
            send = self._stream.send(each)
            self._sending.add(send)
            if send.done:  # it was told before we knew it
                self._sent(send)
        if words:
            self._send_words(words)
        if self._finishing and not self._over:
            self._over = True
            self._stream.close()

    def _send_words(self, words: list[bytes]) -> None:
        send = self._stream.send(memoryview(b"".join(words)))
        self._words_on_way[send] = len(words)
        if send.done:
            self._sent(send)

    def _sent(self, send: StreamSend) -> None:
        if send in self._sending:
            self._sending.discard(send)
            full = self._pieces >= limits.LINK_PIECES_MAX
            self._pieces -= 1
            if full and self._far is not None:
                self._far.handle_room()
        else:
            self._words -= self._words_on_way.pop(send, 0)

    # ---- in ----

    def _await_word(self) -> None:
        self._stream.receive(self._header, waitall=True)

    def _received(self, receive: StreamReceive) -> None:
        far = self._far
        if self._ending or far is None:
            return
        if receive.filled < receive.length:
            self._lose()
            return
        try:
            if self._due:
                length = self._due.pop(0)
                far.handle_data(length)
                if not (self._due or self._ending):
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
        if not self._ending:
            self._await_word()

    def _await_data(self, far: Carried, length: int) -> None:
        if not 0 < length <= limits.RING_SIZE_MAX:
            raise PeerViolation(f"{length} bytes of data at once", rule="link_data")
        room = far.data_room(length)
        if room is None:
            if far.lost:
                return
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
        self._contained(self._take, event)

    def _take(self, event: Told) -> None:
        if type(event) is StreamReceive:
            self._received(event)
        elif type(event) is StreamSend:
            self._sent(event)
        elif isinstance(event, Event):
            if event.kind is EventKind.ESTABLISHED:
                self.handle_established()
            elif event.kind in _ENDS:
                self._lose(broken=event.kind is EventKind.BROKEN)

    def _contained(self, call: Callable[..., object], *arguments: object) -> None:
        """We are called in the midst of what other streams are told: what we raise would keep that from them."""
        try:
            call(*arguments)
        except Exception:
            self._log(f"a connection is reset, by a fault of ours: {traceback.format_exc()}")
            if self._far is not None:
                self._far.reset("fault")
            self.abandon()

    def _lose(self, *, broken: bool = False) -> None:
        """The stream is over: that was to be, or the connection goes on without it."""
        far = self._far
        if far is None or self._lost or (self._over and not (broken and self._finishing)):
            return
        self._lost = True
        if not self._over:
            self._over = True
            self._out.clear()
            self._stream.close()
        if far.break_off() is not None or far.failed:
            self._on_lost(far)
