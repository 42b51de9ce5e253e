"""The link of one connection between two providers: words and data in an SDP stream.

The stream begins with nothing but this: each word is 16 bytes, its number first and its count last, big-endian; behind
DATA so many bytes of the connection follow. Data goes out from where the application wrote it and comes in where the
other application reads it: no byte of it is copied here, but for some that are as short as the words.

Words that come together go out together, with the data behind them.

An end that has said all waits for the other's end, and reads until then: a close with words unread would be a reset,
which overtakes what was said last.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import suppress
from struct import Struct
from typing import TYPE_CHECKING, Final

from sidestep import limits
from sidestep.errors import PeerViolation, SidestepError
from sidestep.loop import nothing
from sidestep.rdma.work import Access
from sidestep.sdp.requests import SdpEvent, SdpEventKind, StreamEvent, StreamReceive, StreamSend
from sidestep.switch.link import Carried, Control

if TYPE_CHECKING:
    from sidestep.loop import Loop, Timer
    from sidestep.rdma.verbs import Lent, MemoryRegion
    from sidestep.sdp.endpoint import SdpStream

CONTROL: Final = Struct(">B7xQ")
_ENDS: Final = frozenset({SdpEventKind.BROKEN, SdpEventKind.CLOSED})  # after END_OF_STREAM there may be words to read
_TOGETHER: Final = 224  # bytes of words, and short data behind one of them, that go inline
_LARGE: Final = 4  # messages of the present size: data that would fill more of them asks for larger ones
_SCRATCH: Final = 4096  # bytes read at once that nobody wants


class SdpLink:
    """One link. `stream.tell` is its own from now on.

    Args:
        loop: Drives the stream.
        on_lost: The stream is over, and the connection was not; or it was reset, and that may not have got through.
        log: Hears of rules that the other provider broke.
        rounds: The other provider knows the word ROUNDS.
    """

    def __init__(
        self,
        stream: SdpStream,
        loop: Loop,
        on_lost: Callable[[Carried], None],
        log: Callable[[str], None],
        *,
        rounds: bool = False,
    ) -> None:
        self.rounds: Final = rounds
        self.spacers = False
        self._stream = stream
        self._loop = loop
        self._on_lost = on_lost
        self._log = log
        self._relay: Carried | None = None
        self._out: list[bytes | memoryview] = []  # in order; words of one piece stand together
        self._pieces = 0  # of data, in `_out` and on their way
        self._on_way: dict[StreamSend, int] = {}  # the words that each brings; 0: it is data
        self._controls = 0  # queued and on their way
        self._header = memoryview(bytearray(CONTROL.size))
        self._due: list[int] = []  # bytes of data that each receive still brings; none: a header is awaited
        self._shown = 0  # bytes of the first of them that the relay has already
        self._established = self._finishing = self._ended = self._over = self._lost = False
        self._on_gone: Callable[[], object] = nothing
        self.buffered = False
        self._large = False  # larger private buffers have been asked for
        self._region: MemoryRegion | None = None  # the memory that data goes out from
        self._gone = False  # the stream is no more
        self._patience: Timer | None = None  # for the other's end
        stream.tell = self._handle_event

    # ---- for the connection ----

    @property
    def stream(self) -> SdpStream:
        return self._stream

    @property
    def room(self) -> int:
        """How many more pieces of data it takes now; none also while many words wait."""
        if not self._established or self._ending or self._controls > limits.LINK_WORDS_MAX // 2:
            return 0
        most = limits.LINK_PIECES_BUFFERED if self.buffered else limits.LINK_PIECES_MAX
        return max(0, most - self._pieces)  # which may just have become fewer

    @property
    def _ending(self) -> bool:
        return self._finishing or self._over

    def send_control(self, control: Control, count: int = 0) -> None:
        if self._ending:
            return
        self._out.append(CONTROL.pack(control, count))
        self._controls += 1
        self._loop.soon(self._flush if self._controls <= limits.LINK_WORDS_MAX else self._overflow)

    def send(self, piece: memoryview) -> None:
        if self._ending:
            return
        self.send_control(Control.DATA, len(piece))
        self._out.append(piece)
        self._pieces += 1

    def finish(self, on_gone: Callable[[], object]) -> None:
        """Nothing more is said or sent; `on_gone` is called once the other end has all of it, or will never have."""
        if self._gone:
            on_gone()
            return
        self._on_gone = on_gone
        if not self._ending:
            self._finishing = True
            self._loop.soon(self._flush)
            self._patience = self._loop.call_later(limits.LINK_FINISH_S, self.abandon)

    def abandon(self) -> None:
        """Everything ends at once."""
        if self._relay is not None:
            self._relay.reclaim()
        if not self._over:
            self._over = True
            self._out.clear()
            self._stream.abort()

    def _overflow(self) -> None:
        """The other end takes nothing, and yet has us say more and more."""
        if self._relay is not None and not self._over:
            self._break(self._relay, PeerViolation(f"it takes none of {self._controls} words", rule="link_words"))

    def details(self) -> dict[str, object]:
        return self._stream.details()

    # ---- lending it to the engine ----

    @property
    def under_way(self) -> int:
        return len(self._out) + len(self._on_way)

    @property
    def plain(self) -> bool:
        return self._established and not self._ending and self._stream.plain

    def lend(self, record: dict[str, int]) -> Lent | None:
        relay = self._relay
        if not self._established or relay is None or not self._show_filled(relay):
            return None
        if self._ending or self._out or self._on_way:  # also what that has had us say
            return None
        record |= {"grows": not self._large, "data_left": sum(self._due)}
        return self._stream.lend(record, relay.reclaim, lambda: relay.ring)

    def _show_filled(self, far: Carried) -> bool:
        """Data that has come in part is the relay's at once. False: part of a word has come, or nobody wants more."""
        new = self._stream.filled - self._shown
        if new and self._due:
            self._shown += new
            self._due[0] -= new
            far.handle_data(new)
        return not far.lost and bool(not new or self._due)

    def take_back(self, record: dict[str, int], error: int) -> None:
        self._due, self._shown = [], 0
        self._stream.take_back(record, error)
        self._contained(self._go_on, record["data_left"])

    def _go_on(self, data_left: int) -> None:
        far = self._relay
        if far is None or self._over:
            return
        if not data_left:
            self._read_on()
            return
        try:
            self._await_data(far, data_left)
        except PeerViolation as why:
            self._break(far, why)

    # ---- for whoever made the stream ----

    def carry(self, far: Carried) -> None:
        self._relay = far
        if self._gone:
            return
        stack = self._stream.stack
        # Pages that the application gives back, once all is read, are not those any more that a device has pinned. So
        # there each piece is registered by itself: until it was read its pages stay.
        if not stack.device.attributes.pins_memory:
            with suppress(SidestepError):  # likewise
                self._region = stack.register(far.memory, Access.LOCAL_READ)

    def handle_established(self) -> None:
        self._established = True
        self._stream.use_large_frames()
        self._flush()
        if self._over:
            return
        self._read_on()
        if self._relay is not None and not self._finishing:
            self._relay.handle_room()

    # ---- out ----

    def _flush(self) -> None:
        if self._over or not self._established:
            return
        self._contained(self._send_all)

    def _send_all(self) -> None:
        out, self._out = self._out, []
        parts: list[bytes | memoryview] = []
        counts: list[int] = []  # words in each part; 0: it is data
        controls: list[bytes] = []
        room = _TOGETHER
        full = not self.room
        for each in out:
            if isinstance(each, bytes):
                controls.append(each)
                room -= len(each)
            elif len(each) <= room:  # a copy costs less than a place of its own in a message
                controls[-1] += each
                room -= len(each)
                self._pieces -= 1
            else:
                parts += b"".join(controls), each
                counts += len(controls), 0
                controls, room = [], _TOGETHER
                if not self._large and len(each) > _LARGE * self._stream.connection.remote_size:
                    self._large = True
                    with suppress(SidestepError):  # it may have such buffers, or its request be on its way
                        self._stream.resize_remote(limits.REMOTE_RECEIVE_SIZE_MAX)
        if controls:
            parts.append(b"".join(controls))
            counts.append(len(controls))
        if parts:
            if self._stream.connection.error is not None:
                return  # the request for buffers has found it broken, which is told next
            sends = self._stream.send_together(map(memoryview, parts), bcopy_only=self.buffered)
            for send, count in zip(sends, counts, strict=True):
                self._on_way[send] = count
                if send.done:  # it was told before we knew it
                    self._sent(send)
        if full and self.room and self._relay is not None:
            self._relay.handle_room()
        if self._finishing and not (self._ended or self._over):
            self._ended = True
            self._stream.shutdown_write()

    def _sent(self, send: StreamSend) -> None:
        controls = self._on_way.pop(send, None)
        full = not self.room
        if controls:
            self._controls -= controls
        elif controls is not None:
            self._pieces -= 1
        if full and self.room and self._relay is not None:
            self._relay.handle_room()

    # ---- in ----

    def _received(self, receive: StreamReceive) -> None:
        far = self._relay
        if self._over or far is None:
            return
        if receive.filled < (receive.length if receive.waitall else 1):
            if not self._finishing:
                far.handle_farewell()
            if self._finishing:
                self._close()
            else:
                self._lose()
            return
        try:
            if self._due:
                length, self._shown = self._due.pop(0), 0
                if not self._finishing:
                    far.handle_data(length)
            elif not self._finishing:
                self._take_control(far)
        except PeerViolation as why:
            self._break(far, why)
        if not (self._due or self._over):
            self._read_on()

    def _read_on(self) -> None:
        """Nothing is outstanding: the next word, or what nobody wants any more."""
        if self._finishing:
            self._stream.receive(memoryview(bytearray(_SCRATCH)))
        else:
            self._stream.receive(self._header, waitall=True)

    def _take_control(self, far: Carried) -> None:
        number, count = CONTROL.unpack(self._header)
        if number == Control.DATA:
            self._await_data(far, count)
            return
        try:
            control = Control(number)
        except ValueError:
            raise PeerViolation(f"word {number} of a link", rule="link_word") from None
        far.handle_control(control, count)

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

    def _handle_event(self, _stream: SdpStream, event: StreamEvent) -> None:
        self._contained(self._take, event)

    def _take(self, event: StreamEvent) -> None:
        if type(event) is StreamReceive:
            self._received(event)
        elif type(event) is StreamSend:
            self._sent(event)
        elif isinstance(event, SdpEvent):
            if event.kind is SdpEventKind.ESTABLISHED:
                self.handle_established()
            elif event.kind in _ENDS:
                self._lose(broken=event.kind is SdpEventKind.BROKEN)
                if event.kind is SdpEventKind.CLOSED:
                    self._go()

    def _contained(self, call: Callable[..., object], *arguments: object) -> None:
        """We are called in the midst of what other streams are told: what we raise would keep that from them."""
        try:
            call(*arguments)
        except Exception:
            self._log(f"a connection is reset, by a fault of ours: {traceback.format_exc()}")
            if self._relay is not None:
                self._relay.reset("fault")
            self.abandon()

    def _close(self) -> None:
        """All has been said and heard."""
        self._over = True
        self._stream.close()

    def _go(self) -> None:
        self._gone = True
        if self._region is not None:
            self._stream.stack.deregister(self._region)
            self._region = None
        if self._patience is not None:
            self._patience.cancel()
        on_gone, self._on_gone = self._on_gone, nothing
        on_gone()

    def _lose(self, *, broken: bool = False) -> None:
        """The stream is over: that was to be, or the connection goes on without it."""
        far = self._relay
        if far is None or self._lost or (self._over and not (broken and self._finishing)):
            return
        self._lost = True
        if not self._over:
            self._out.clear()
            self._close()
        if far.break_off() is not None or far.failed:
            self._on_lost(far)
