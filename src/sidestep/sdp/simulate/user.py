"""The program at one end: it sends, receives, changes its mind, and keeps what was sent and received.

A user acts when it is told something and when a pause of its own is over. It knows nothing of what goes on beneath.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Final

from sidestep.errors import Misuse, SidestepError
from sidestep.sdp.requests import SdpEvent, SdpEventKind, StreamEvent, StreamReceive, StreamSend
from sidestep.sdp.states import OPEN

if TYPE_CHECKING:
    from sidestep.sdp.connection import SdpConnection
    from sidestep.sdp.endpoint import SdpStream
    from sidestep.sdp.simulate.conversation import Conversation
    from sidestep.sdp.simulate.plan import Habits

_LONG_PAUSES_MAX: Final = 10  # what waits for a user must not run into a timeout for that
_REQUESTS_MAX: Final = 400  # sends, and as many receives: then the remainder is asked for in one piece


class User:
    """The program at one end of a conversation."""

    stream: SdpStream

    def __init__(self, name: str, rng: Random, habits: Habits, conversation: Conversation) -> None:
        self.name = name
        self.closed = False  # the connection has said its last word
        self.graceful = True
        self.sent: list[tuple[StreamSend, bytes]] = []
        self.received = bytearray()
        self.peeked: list[tuple[int, bytes]] = []  # offset, bytes
        self.marks: list[tuple[int, int | None]] = []  # offset of an urgent byte, and its value if had
        self.events: list[SdpEventKind] = []
        self.error: SidestepError | None = None
        self.receives: dict[int, tuple[StreamReceive, bytearray]] = {}  # open ones
        self.sends: dict[int, tuple[StreamSend, int]] = {}  # likewise, with their offsets in the memory
        self.memory = bytearray(rng.randbytes(habits.total))
        self.over = False  # close() or abort() was called, or the connection ended
        self.read_over = False  # the end of the stream was received
        self.write_over = False  # shutdown_write() or close() was called
        self._rng, self._habits, self._conversation = rng, habits, conversation
        self._position = self._received_count = 0
        self._long_pauses_left = _LONG_PAUSES_MAX
        self._waits: set[Callable[[], None]] = set()  # actions that a pause is under way for
        self._started = False

    @property
    def connection(self) -> SdpConnection:
        return self.stream.connection

    @property
    def joined(self) -> bool:
        """True if it has a stream."""
        return hasattr(self, "stream")

    @property
    def now(self) -> float:
        return self._conversation.fabric.now

    @property
    def done(self) -> bool:
        """True if it does nothing more: what had arrived before the end may be read after it."""
        return self.closed and (self.over or self.read_over)

    def join(self, stream: SdpStream) -> None:
        self.stream = stream
        stream.tell = self.tell
        if self._habits.starts_early:
            self._start()
            stream.run()

    def say(self, what: str) -> None:
        """Notes an action or an event."""
        self._conversation.note(self, what)

    # --- events ---

    def tell(self, stream: SdpStream, told: StreamEvent) -> None:
        self.say(f"told: {in_words(told)}")
        if isinstance(told, StreamSend):
            self.on_sent(stream.connection, told)
        elif isinstance(told, StreamReceive):
            self.on_received(stream.connection, told)
        else:
            self.on_event(told)
        self._conversation.handle_told()

    def on_event(self, event: SdpEvent) -> None:
        kind = event.kind
        self.events.append(kind)
        if kind is SdpEventKind.ESTABLISHED:
            self._start()
        elif kind is SdpEventKind.READABLE and self._habits.waits_for_readable and self.read_on not in self._waits:
            self._maybe_later(self.read_on)
        elif kind is SdpEventKind.BROKEN:
            self.error, self.over = event.error, True
        elif kind is SdpEventKind.CLOSED:
            self.closed = self.write_over = True
            self.over |= self.error is None and not self.graceful

    def on_sent(self, _connection: SdpConnection, request: StreamSend) -> None:
        del self.sends[id(request)]
        if not self.over:
            self._maybe_later(self.write_on)

    def on_received(self, connection: SdpConnection, request: StreamReceive) -> None:
        _, memory = self.receives.pop(id(request))
        self._received_count += 1
        self.received += memory[: request.filled]
        self.over |= request.error is not None
        self.read_over |= request.error is not None or not (request.filled or request.cancelled)
        if connection.at_mark and not connection.events:  # else other receives have ended before that byte
            offset = len(self.received) + sum(receive.filled for receive, _ in self.receives.values())
            if not self.marks or self.marks[-1][0] != offset:
                self.marks.append((offset, connection.take_urgent()))
        if self.read_over:
            self._maybe_finish()
        elif not self.over and not self._habits.waits_for_readable:
            self._maybe_later(self.read_on)

    # --- actions ---

    def _start(self) -> None:
        if not self._started:
            self._started = True
            if not self._habits.waits_for_readable:
                self._maybe_later(self.read_on)
            self._maybe_later(self.write_on)

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        self._conversation.later(delay_s, partial(self.act, action))

    def act(self, action: Callable[[], None]) -> None:
        action()
        self.stream.run()

    def _maybe_later(self, action: Callable[[], None]) -> None:
        """Acts now, from inside of the call, or when everything has settled."""
        if action not in self._waits:
            if self.joined and self._rng.random() < self._habits.reenters:
                action()
            else:
                self._waits.add(action)
                self.later(0.0, action)

    def pause_s(self) -> float:
        rng, habits = self._rng, self._habits
        long = rng.random() < habits.long_pauses and self._long_pauses_left > 0
        self._long_pauses_left -= long
        return rng.uniform(*(habits.long_pause_s if long else habits.pause_s))

    def write_on(self) -> None:
        self._waits.discard(self.write_on)
        rng, habits = self._rng, self._habits
        if self.over or self.write_over:
            return
        self._wish()
        while self._position < habits.total and len(self.sends) < habits.send_window:
            if rng.random() < habits.send_gap:
                self._waits.add(self.write_on)
                self.later(self.pause_s(), self._send_and_go_on)
                return
            if not self._send():
                return
        if self._position >= habits.total and (not self.sends or rng.random() < 0.3):
            self._end_writing()

    def _send_and_go_on(self) -> None:
        self._waits.discard(self.write_on)
        if self.over or self.write_over or self._position >= self._habits.total or self._send():
            self.write_on()

    def _send(self) -> bool:
        rng, habits, start = self._rng, self._habits, self._position
        size = min(rng.choice(habits.send_sizes), habits.total - start)
        if len(self.sent) > _REQUESTS_MAX:
            size = habits.total - start
        view, urgent = memoryview(self.memory)[start : start + size], rng.random() < habits.urgent
        try:
            request = self.connection.send(view, self.now, urgent=urgent, bcopy_only=rng.random() < habits.bcopy_only)
        except SidestepError as error:
            self.handle_refused(error)
            return False
        self._position += size
        self.sent.append((request, bytes(view)))
        self.sends[id(request)] = request, start
        how = ", urgent" if urgent else ", by Bcopy" if request.bcopy_only else ""
        self.say(f"sends {size}{how}")
        if rng.random() >= habits.batches:
            self.stream.run()
        if rng.random() < habits.cancel_send:
            self.later(self.pause_s(), partial(self._cancel, request))
        return True

    def handle_refused(self, error: SidestepError) -> None:
        """The connection takes no send."""

    def _cancel(self, request: StreamSend | StreamReceive) -> None:
        if isinstance(request, StreamSend):
            self.say(f"cancels the send of {request.length}")
            self.connection.cancel_send(request, self.now)
        else:
            self.say(f"cancels the receive of {request.length}")
            self.connection.cancel_receive(request, self.now)
        self.stream.run()

    def _end_writing(self) -> None:
        if self.write_over or self.over:
            return
        self.write_over = True
        if self.read_over and self._habits.closes_at_once:
            self.leave()
            return
        self.say("shuts down writing")
        self.connection.shutdown_write(self.now)
        self.stream.run()
        self._maybe_finish()

    def read_on(self) -> None:
        self._waits.discard(self.read_on)
        rng, habits = self._rng, self._habits
        if not (self.over or self.read_over):
            self._wish()
        window = 1 if habits.waits_for_readable else habits.receive_window
        while len(self.receives) < window and not (self.over or self.read_over):
            if rng.random() < habits.receive_gap:
                self._waits.add(self.read_on)
                self.later(self.pause_s(), self._receive_and_go_on)
                return
            if not self._receive() or habits.waits_for_readable:
                return

    def _receive_and_go_on(self) -> None:
        self._waits.discard(self.read_on)
        if not (self.over or self.read_over) and self._receive() and not self._habits.waits_for_readable:
            self.read_on()

    def _receive(self) -> bool:
        rng, habits, connection = self._rng, self._habits, self.connection
        if not self.receives and rng.random() < habits.peek:
            if peeked := bytes(connection.peek(self.now)):
                self.peeked.append((len(self.received), peeked))
            self.stream.run()
        size = rng.choice(habits.receive_sizes)
        memory = bytearray(1 << 17 if self._received_count > _REQUESTS_MAX else size)
        waitall = rng.random() < habits.waitall
        if not self.may_receive():
            return False
        request = connection.receive(memoryview(memory), self.now, waitall=waitall)
        self.receives[id(request)] = request, memory
        self.say(f"receives {len(memory)}{', all of it' if waitall else ''}")
        if rng.random() >= habits.batches:
            self.stream.run()
        if rng.random() < habits.cancel_receive:
            self.later(self.pause_s(), partial(self._cancel, request))
        return True

    def may_receive(self) -> bool:
        """True unless its socket is moving."""
        return True

    def _wish(self) -> None:
        """For another mode, or other buffers at the other end."""
        rng, habits, connection = self._rng, self._habits, self.connection
        if connection.state not in OPEN:
            return
        if rng.random() < habits.wish:
            if rng.random() < 0.3:
                self.say("wants to receive in Combined mode")
                connection.want_combined(self.now)
            else:
                mode = rng.choice(habits.modes)
                self.say(f"wants to send in mode {mode.name}")
                connection.want_send_mode(mode, self.now)
            self.stream.run()
        if habits.resizes and rng.random() < 0.2:
            size = rng.choice(habits.resizes)
            try:
                connection.resize_remote(size, self.now)
            except Misuse:
                return
            self.say(f"asks for private buffers of {size}")
            self.stream.run()

    def _maybe_finish(self) -> None:
        if self.read_over and self.write_over and not self.over:
            if self.joined and self._rng.random() < 0.5:
                self.leave()
            else:
                self.later(self.pause_s(), self.leave)

    def leave(self) -> None:
        """Closes, as both directions have ended."""
        if not self.over:
            self.over = True
            self.say("closes")
            self.end(lambda connection: connection.close(self.now))

    def end(self, how: Callable[[SdpConnection], None]) -> None:
        how(self.connection)
        self.stream.run()

    def abort(self) -> None:
        self.over, self.graceful = True, False
        self.say("aborts")
        self.end(lambda connection: connection.abort(self.now))

    def close(self, linger_s: float | None) -> None:
        """Closes, whatever is still to come."""
        self.over, self.graceful = True, False
        self.say(f"closes, linger {linger_s}")
        self.end(lambda connection: connection.close(self.now, linger_s))


def in_words(told: StreamEvent) -> str:
    if isinstance(told, StreamSend):
        return f"the send of {told.length} has ended, {told.passed} passed, error {told.error!r}"
    if isinstance(told, StreamReceive):
        return f"the receive of {told.length} has ended, {told.filled} filled, error {told.error!r}"
    return f"{told.kind.value}{'' if told.error is None else f': {told.error!r}'}"
