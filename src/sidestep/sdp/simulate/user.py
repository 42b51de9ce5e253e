"""The program at one end: it sends, receives, changes its mind, and keeps a book of what it was told.

A user acts when it is told something and when a pause of its own is over. It knows nothing of what goes on beneath; the
two books together say what must have happened (`checks`).

Memory is watched: a send is scribbled over once it has ended, so that whatever still reads it sends rubbish, and a
receive that has ended must never change again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Final

from sidestep.errors import Misuse, SidestepError, Unavailable
from sidestep.sdp.requests import SdpEvent, SdpEventKind, StreamEvent, StreamReceive, StreamSend
from sidestep.sdp.states import OPEN, SdpState

if TYPE_CHECKING:
    from sidestep.sdp.connection import SdpConnection
    from sidestep.sdp.endpoint import SdpStream
    from sidestep.sdp.simulate.plan import Habits

_SCRIBBLE: Final = 0xEE
_READABLE: Final = SdpEvent(SdpEventKind.READABLE)
_LONG_PAUSES_MAX: Final = 10  # what waits for a user must not run into a timeout for that
_REQUESTS_MAX: Final = 400  # sends, and as many receives: then the rest is asked for in one piece


class Surprise(AssertionError):
    """What must not happen, seen by a user or by a check."""


@dataclass(slots=True)
class Sent:
    """One send in the book."""

    request: StreamSend
    start: int  # offset in what this user meant to send
    content: bytes


@dataclass(slots=True)
class Received:
    """One receive in the book, once it has ended."""

    start: int  # offset in the stream
    length: int
    memory: bytearray
    content: bytes  # of all the memory, when it ended


@dataclass(slots=True)
class Book:
    """What one user did and was told."""

    sent: list[Sent] = field(default_factory=list)
    received: list[Received] = field(default_factory=list)
    stream: bytearray = field(default_factory=bytearray)  # bytes received, in order
    peeked: list[tuple[int, bytes]] = field(default_factory=list)  # offset, bytes
    marks: list[tuple[int, int | None]] = field(default_factory=list)  # offset of an urgent byte, and its value if had
    events: list[SdpEventKind] = field(default_factory=list)
    error: SidestepError | None = None

    def count(self, kind: SdpEventKind) -> int:
        """How often that was told."""
        return self.events.count(kind)


class User:
    """The program at one end of a conversation."""

    def __init__(
        self,
        name: str,
        rng: Random,
        habits: Habits,
        later: Callable[[float, Callable[[], None]], object],
        told: Callable[[], None],
        clock: Callable[[], float],
        *,
        gentle: bool,
        note: Callable[[str], None] | None = None,
    ) -> None:
        self.name = name
        self.book = Book()
        self.stream: SdpStream | None = None
        self.closed = False  # the connection has said its last word
        self.ends_gracefully = True
        self._rng = rng
        self._habits = habits
        self._call_later = later
        self._told = told
        self._now = clock
        self._note = note  # what happens, for people
        self._gentle = gentle  # nothing is to go wrong: errors are surprises
        self._pristine = rng.randbytes(habits.total)
        self._memory = bytearray(self._pristine)
        self._position = 0
        self._long_pauses_left = _LONG_PAUSES_MAX
        self._open_sends: dict[int, Sent] = {}
        self._open_receives: dict[int, tuple[StreamReceive, bytearray]] = {}
        self._parked: list[Callable[[], None]] = []  # what it would do if it were not moving
        self._left: list[SdpStream] = []  # streams that it moved away from
        self._farewell: Callable[[SdpConnection], None] | None = None  # how it ended the connection, if it did
        self._started = False
        self._write_waits = False  # a pause is under way
        self._read_waits = False
        self._write_over = False  # shutdown_write() or close() was called
        self._read_over = False  # the end of the stream was received
        self._over = False  # close() or abort() was called, or the connection ended

    # --- what the conversation calls ---

    @property
    def connection(self) -> SdpConnection:
        assert self.stream is not None
        return self.stream.connection

    def join(self, stream: SdpStream) -> None:
        self.stream = stream
        if self._habits.starts_early:
            self._start()
            stream.run()

    @property
    def may_move(self) -> bool:
        """Whether its socket may go to another process now."""
        return self.stream is not None and not self._over and self.connection.state is SdpState.ESTABLISHED

    def move(self, stream: SdpStream) -> None:
        """It goes on with this stream: what it would have done meanwhile is done now."""
        self.stream = stream
        if self._write_over:
            self.connection.shutdown_write(self._now())
        parked, self._parked = self._parked, []
        for action in parked:
            self._later(0.0, action)

    def _settle(self) -> None:
        """At its new place: if it had ended the connection while the socket was moving, it does so again."""
        if self._left and self._farewell is not None:
            self._later(0.0, self._leave_again)

    def _leave_again(self) -> None:
        assert self._farewell is not None
        self._farewell(self.connection)

    def lose(self) -> None:
        """It has moved, and the other end never came: nothing is left of the connection."""
        self.say("gives up waiting at its new place")
        error = Unavailable("the other end did not come to the new place")
        for sent in self._open_sends.values():
            sent.request.done, sent.request.error = True, error
        self._open_sends.clear()
        self.book.error = error
        self.book.events.append(SdpEventKind.CLOSED)
        self.closed = self._over = True

    def tell(self, stream: SdpStream, told: StreamEvent) -> None:
        if self._note is not None:
            self._note(f"told: {_in_words(told)}")
        if isinstance(told, SdpEvent) and stream in self._left:
            if told.kind is not SdpEventKind.CLOSED:
                raise Surprise(f"{self.name} has moved, and is told {told}")
            return
        if self.closed and not isinstance(told, StreamReceive) and told != _READABLE:
            raise Surprise(f"{self.name} is told {told} after CLOSED")
        if isinstance(told, StreamSend):
            self._on_sent(stream.connection, told)
        elif isinstance(told, StreamReceive):
            self._on_received(stream.connection, told)
        else:
            self._on_event(told)
        self._told()

    @property
    def done(self) -> bool:
        """Whether it does nothing more: what had arrived before the end may be read after it."""
        return self.closed and (self._over or self._read_over)

    @property
    def open_receives(self) -> int:
        """Receives that have not ended."""
        return len(self._open_receives)

    @property
    def waits_for_bytes(self) -> bool:
        """Whether it has asked for bytes and has not got them."""
        return any(not receive.cancelled for receive, _ in self._open_receives.values())

    # --- being told ---

    def _on_event(self, event: SdpEvent) -> None:
        kind = event.kind
        self.book.events.append(kind)
        if kind is SdpEventKind.ESTABLISHED:
            self._start()
            self._settle()
        elif kind is SdpEventKind.READABLE:
            if self._habits.waits_for_readable and not self._read_waits:
                self._maybe_later(self._read_on)
        elif kind is SdpEventKind.BROKEN:
            self.book.error = event.error
            self._over = True
            if self._gentle:
                raise Surprise(f"{self.name} is told of an error: {event.error!r}")
        elif kind is SdpEventKind.SUSPENDED:
            assert self.stream is not None
            self._left.append(self.stream)
            self.stream = None
        elif kind is SdpEventKind.CLOSED:
            self.closed = True
            self._write_over = True
            if self.book.error is None and not self.ends_gracefully:
                self._over = True
            if self._open_sends:
                raise Surprise(f"{self.name}: {len(self._open_sends)} sends never end")

    def _on_sent(self, connection: SdpConnection, request: StreamSend) -> None:
        sent = self._open_sends.pop(id(request), None)
        if sent is None:
            raise Surprise(f"{self.name}: a send ends that did not begin, or twice")
        if not request.done or (request.pending and not connection._flow.gone):
            raise Surprise(f"{self.name}: a send ends with done {request.done} and {request.pending} pieces pending")
        if not 0 <= request.passed <= request.length:
            raise Surprise(f"{self.name}: {request.passed} of {request.length} bytes have passed")
        if request.error is None and request.passed < request.length and not request.cancelled:
            raise Surprise(f"{self.name}: {request.passed} of {request.length} bytes have passed, nobody cancelled")
        if request.error is not None and self._gentle:
            raise Surprise(f"{self.name}: a send fails: {request.error!r}")
        self._memory[sent.start : sent.start + request.length] = bytes((_SCRIBBLE,)) * request.length
        if not self._over:
            self._maybe_later(self._write_on)

    def _on_received(self, connection: SdpConnection, request: StreamReceive) -> None:
        found = self._open_receives.pop(id(request), None)
        if found is None:
            raise Surprise(f"{self.name}: a receive ends that did not begin, or twice")
        _, memory = found
        book, filled = self.book, request.filled
        if not request.done or request.reads or request.advert:
            raise Surprise(
                f"{self.name}: a receive ends with done {request.done}, {request.reads} reads, {request.advert}"
            )
        if not 0 <= filled <= request.length:
            raise Surprise(f"{self.name}: {filled} of {request.length} bytes were filled")
        book.received.append(Received(len(book.stream), filled, memory, bytes(memory)))
        book.stream += memory[:filled]
        if request.error is not None:
            if self._gentle:
                raise Surprise(f"{self.name}: a receive fails: {request.error!r}")
            self._read_over = True
            self._over = True
        elif not filled and not request.cancelled:
            self._read_over = True
        elif filled and self._read_over:
            raise Surprise(f"{self.name}: bytes after the end of the stream")
        self._look_for_mark(connection)
        if self._read_over:
            self._maybe_finish()
        elif not self._over and not self._habits.waits_for_readable:
            self._maybe_later(self._read_on)

    def _look_for_mark(self, connection: SdpConnection) -> None:
        if not connection.at_mark or connection.events:  # other receives have ended before that byte
            return
        offset = len(self.book.stream) + sum(receive.filled for receive, _ in self._open_receives.values())
        if not self.book.marks or self.book.marks[-1][0] != offset:
            self.book.marks.append((offset, connection.take_urgent()))

    # --- acting ---

    def _start(self) -> None:
        if self._started:
            return
        self._started = True
        if not self._habits.waits_for_readable:
            self._maybe_later(self._read_on)
        self._maybe_later(self._write_on)

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        def act() -> None:
            if self.stream is None:
                self._parked.append(action)
                return
            action()
            if self.stream is not None:
                self.stream.run()

        self._call_later(delay_s, act)

    def _maybe_later(self, action: Callable[[], None]) -> None:
        """Now, from inside of what called us, or when everything has settled."""
        waits = "_read_waits" if action == self._read_on else "_write_waits"
        if getattr(self, waits):
            return
        if self.stream is not None and self._rng.random() < self._habits.reenters:
            action()
        else:
            setattr(self, waits, True)
            self._later(0.0, action)

    def _pause(self) -> float:
        rng, habits = self._rng, self._habits
        long = rng.random() < habits.long_pauses and self._long_pauses_left > 0
        self._long_pauses_left -= long
        span = habits.long_pause_s if long else habits.pause_s
        return rng.uniform(*span)

    def _write_on(self) -> None:
        self._write_waits = False
        if self._over or self._write_over:
            return
        assert self.stream is not None
        rng, habits = self._rng, self._habits
        self._wish()
        while self._position < habits.total and len(self._open_sends) < habits.send_window:
            if rng.random() < habits.send_gap:
                self._write_waits = True
                self._later(self._pause(), self._send_and_go_on)
                return
            if not self._send():
                return
        if self._position >= habits.total and (not self._open_sends or rng.random() < 0.3):
            self._end_writing()

    def _send_and_go_on(self) -> None:
        self._write_waits = False
        if not self._over and not self._write_over and self._position < self._habits.total and not self._send():
            return
        self._write_on()

    def _send(self) -> bool:
        assert self.stream is not None
        rng, habits, start = self._rng, self._habits, self._position
        size = min(rng.choice(habits.send_sizes), habits.total - start)
        if len(self.book.sent) > _REQUESTS_MAX:
            size = habits.total - start
        view = memoryview(self._memory)[start : start + size]
        urgent = rng.random() < habits.urgent
        try:
            request = self.connection.send(
                view, self._now(), urgent=urgent, bcopy_only=rng.random() < habits.bcopy_only
            )
        except SidestepError as error:
            if self.connection.suspended is not None:  # not told yet
                self._parked.append(self._write_on)
                return False
            if self._gentle:
                raise Surprise(f"{self.name} may not send: {error!r}") from error
            return False
        sent = Sent(request, start, self._pristine[start : start + size])
        self._position += size
        self.book.sent.append(sent)
        self._open_sends[id(request)] = sent
        self.say(
            f"sends {size}{', urgent' if urgent else ''}{', by Bcopy' if request.bcopy_only and not urgent else ''}"
        )
        if rng.random() >= habits.batches:
            self.stream.run()
        if rng.random() < habits.cancel_send:
            self._later(self._pause(), lambda: self._cancel_send(request))
        return True

    def _cancel_send(self, request: StreamSend) -> None:
        assert self.stream is not None
        self.say(f"cancels the send of {request.length}")
        self.connection.cancel_send(request, self._now())
        self.stream.run()

    def _end_writing(self) -> None:
        assert self.stream is not None
        if self._write_over or self._over:
            return
        self._write_over = True
        if self._read_over and self._habits.closes_at_once:
            self._close()
            return
        self.say("shuts down writing")
        self.connection.shutdown_write(self._now())
        self.stream.run()
        self._maybe_finish()

    def _read_on(self) -> None:
        self._read_waits = False
        if self._over or self._read_over:
            return
        rng, habits = self._rng, self._habits
        self._wish()
        window = 1 if habits.waits_for_readable else habits.receive_window
        while len(self._open_receives) < window and self._wants_bytes():
            if rng.random() < habits.receive_gap:
                self._read_waits = True
                self._later(self._pause(), self._receive_and_go_on)
                return
            if not self._receive() or habits.waits_for_readable:
                return

    def _wants_bytes(self) -> bool:
        return not (self._over or self._read_over)

    def _receive_and_go_on(self) -> None:
        self._read_waits = False
        if self._over or self._read_over:
            return
        if self._receive() and not self._habits.waits_for_readable:
            self._read_on()

    def _receive(self) -> bool:
        assert self.stream is not None
        rng, habits, connection = self._rng, self._habits, self.connection
        if not self._open_receives and rng.random() < habits.peek:
            peeked = bytes(connection.peek(self._now()))
            if peeked:
                self.book.peeked.append((len(self.book.stream), peeked))
            self.stream.run()
        size = rng.choice(habits.receive_sizes)
        if len(self.book.received) > _REQUESTS_MAX:
            size = 1 << 17
        memory = bytearray(size)
        waitall = rng.random() < habits.waitall
        if connection.suspended is not None:  # not told yet
            self._parked.append(self._read_on)
            return False
        request = connection.receive(memoryview(memory), self._now(), waitall=waitall)
        self._open_receives[id(request)] = (request, memory)
        self.say(f"receives {size}{', all of it' if waitall else ''}")
        if rng.random() >= habits.batches:
            self.stream.run()
        if rng.random() < habits.cancel_receive:
            self._later(self._pause(), lambda: self._cancel_receive(request))
        return True

    def _cancel_receive(self, request: StreamReceive) -> None:
        assert self.stream is not None
        self.say(f"cancels the receive of {request.length}")
        self.connection.cancel_receive(request, self._now())
        self.stream.run()

    def _wish(self) -> None:
        """For another mode, or other buffers at the other end."""
        assert self.stream is not None
        rng, habits, connection, now = self._rng, self._habits, self.connection, self._now()
        if connection.state not in OPEN:
            return
        if rng.random() < habits.wish:
            if rng.random() < 0.3:
                self.say("wants to receive in Combined mode")
                connection.want_combined(now)
            else:
                mode = rng.choice(habits.modes)
                self.say(f"wants to send in mode {mode.name}")
                connection.want_send_mode(mode, now)
            self.stream.run()
        if habits.resizes and rng.random() < 0.2:
            size = rng.choice(habits.resizes)
            try:
                connection.resize_remote(size, now)
            except Misuse:
                return
            self.say(f"asks for private buffers of {size}")
            self.stream.run()

    def _maybe_finish(self) -> None:
        if self._read_over and self._write_over and not self._over:
            if self.stream is not None and self._rng.random() < 0.5:
                self._close()
            else:
                self._later(self._pause(), self._close)

    def _close(self) -> None:
        assert self.stream is not None
        if self._over:
            return
        if (
            self.connection.state is SdpState.REP_SENT
        ):  # at its new place: a connection that is not there yet is refused
            self._later(self._pause(), self._close)
            return
        self._over = True
        self.say("closes")
        self._farewell = lambda connection: connection.close(self._now())
        self.connection.close(self._now())
        self.stream.run()

    def say(self, what: str) -> None:
        """Notes what it does."""
        if self._note is not None:
            self._note(what)

    # --- leaving before the time ---

    def abort(self) -> None:
        assert self.stream is not None
        self._over = True
        self.ends_gracefully = False
        self.say("aborts")
        self._farewell = lambda connection: connection.abort(self._now())
        self.connection.abort(self._now())
        self.stream.run()

    def close(self, linger_s: float | None) -> None:
        """Closes, whatever is still to come."""
        assert self.stream is not None
        self._over = True
        self.ends_gracefully = False
        self.say(f"closes, linger {linger_s}")
        self._farewell = lambda connection: connection.close(self._now(), linger_s)
        self.connection.close(self._now(), linger_s)
        self.stream.run()


def _in_words(told: StreamEvent) -> str:
    if isinstance(told, StreamSend):
        return f"the send of {told.length} has ended, {told.passed} passed, error {told.error!r}"
    if isinstance(told, StreamReceive):
        return f"the receive of {told.length} has ended, {told.filled} filled, error {told.error!r}"
    return f"{told.kind.value}{'' if told.error is None else f': {told.error!r}'}"
