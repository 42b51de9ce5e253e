"""A user that checks each event, watches its memory, and whose socket may move.

A send is scribbled over once it has ended, so that a late reader of it sends rubbish. A receive that has ended must
never change again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Final

from sidestep.errors import SidestepError, Unavailable
from sidestep.sdp.connection import SdpConnection
from sidestep.sdp.endpoint import SdpStream
from sidestep.sdp.requests import SdpEvent, SdpEventKind, StreamEvent, StreamReceive, StreamSend
from sidestep.sdp.simulate.conversation import Surprise
from sidestep.sdp.simulate.plan import Habits, PlanKind
from sidestep.sdp.simulate.user import User, in_words
from sidestep.sdp.states import SdpState

if TYPE_CHECKING:
    from simulate.conversation import CheckedConversation

_SCRIBBLE: Final = b"\xee"
_READABLE: Final = SdpEvent(SdpEventKind.READABLE)


@dataclass(slots=True)
class Received:
    """A receive that has ended."""

    start: int  # offset in the stream
    length: int
    memory: bytearray
    content: bytes  # of all the memory, when it ended


class CheckedUser(User):
    """The program at one end of a conversation."""

    def __init__(self, name: str, rng: Random, habits: Habits, conversation: CheckedConversation) -> None:
        super().__init__(name, rng, habits, conversation)
        self.records: list[Received] = []
        self.met = False  # there is a connection at this end, or was
        self._gentle = conversation.plan.kind is PlanKind.CLEAN  # nothing is to go wrong: errors are surprises
        self._parked: list[Callable[[], None]] = []  # actions that wait for the end of a move
        self._left: list[SdpStream] = []  # streams that it moved away from
        self._farewell: Callable[[SdpConnection], None] | None = None  # how it ended the connection, if it did

    def join(self, stream: SdpStream) -> None:
        self.met = True
        super().join(stream)

    @property
    def waits_for_bytes(self) -> bool:
        """True if it has asked for bytes and has not got them."""
        return any(not receive.cancelled for receive, _ in self.receives.values())

    # --- events ---

    def tell(self, stream: SdpStream, told: StreamEvent) -> None:
        if isinstance(told, SdpEvent) and stream in self._left:
            self.say(f"told: {in_words(told)}")
            self._need(told.kind is SdpEventKind.CLOSED, f"has moved, and is told {told}")
            return
        late = self.closed and not isinstance(told, StreamReceive) and told != _READABLE
        self._need(not late, f"is told {told} after CLOSED")
        super().tell(stream, told)

    def on_event(self, event: SdpEvent) -> None:
        super().on_event(event)
        if event.kind is SdpEventKind.ESTABLISHED and self._left and self._farewell is not None:
            self.later(0.0, self._leave_again)  # it ended the connection while the socket was moving
        elif event.kind is SdpEventKind.BROKEN:
            self._need(not self._gentle, f"is told of an error: {event.error!r}")
        elif event.kind is SdpEventKind.SUSPENDED:
            self._left.append(self.stream)
            del self.stream
        elif event.kind is SdpEventKind.CLOSED:
            self._need(not self.sends, f"{len(self.sends)} sends never end")

    def on_sent(self, connection: SdpConnection, request: StreamSend) -> None:
        passed, length = request.passed, request.length
        self._need(id(request) in self.sends, "a send ends that did not begin, or twice")
        ended = request.done and (not request.pending or connection._flow.gone)
        self._need(ended, f"a send ends with done {request.done} and {request.pending} pieces pending")
        self._need(0 <= passed <= length, f"{passed} of {length} bytes have passed")
        whole = request.error is not None or passed == length or request.cancelled
        self._need(whole, f"{passed} of {length} bytes have passed, nobody cancelled")
        self._need(request.error is None or not self._gentle, f"a send fails: {request.error!r}")
        _, start = self.sends[id(request)]
        self.memory[start : start + length] = _SCRIBBLE * length
        super().on_sent(connection, request)

    def on_received(self, connection: SdpConnection, request: StreamReceive) -> None:
        self._need(id(request) in self.receives, "a receive ends that did not begin, or twice")
        ended = request.done and not request.reads and not request.advert
        self._need(ended, f"a receive ends with done {request.done}, {request.reads} reads, {request.advert}")
        self._need(0 <= request.filled <= request.length, f"{request.filled} of {request.length} bytes were filled")
        self._need(request.error is None or not self._gentle, f"a receive fails: {request.error!r}")
        late = request.error is None and request.filled and self.read_over
        self._need(not late, "bytes after the end of the stream")
        _, memory = self.receives[id(request)]
        self.records.append(Received(len(self.received), request.filled, memory, bytes(memory)))
        super().on_received(connection, request)

    def handle_refused(self, error: SidestepError) -> None:
        if self.connection.suspended is not None:  # not told yet
            self._parked.append(self.write_on)
        else:
            self._need(not self._gentle, f"may not send: {error!r}")

    def may_receive(self) -> bool:
        if self.connection.suspended is None:
            return True
        self._parked.append(self.read_on)  # not told yet
        return False

    def _need(self, truth: bool, what: str) -> None:
        if not truth:
            raise Surprise(f"{self.name}: {what}")

    # --- moving ---

    def act(self, action: Callable[[], None]) -> None:
        if not self.joined:
            self._parked.append(action)
            return
        action()
        if self.joined:
            self.stream.run()

    @property
    def may_move(self) -> bool:
        """True if its socket may go to another process now."""
        return self.joined and not self.over and self.connection.state is SdpState.ESTABLISHED

    def move(self, stream: SdpStream) -> None:
        """Goes on with this stream, and acts as it would have meanwhile."""
        self.stream = stream
        if self.write_over:
            self.connection.shutdown_write(self.now)
        parked, self._parked = self._parked, []
        for action in parked:
            self.later(0.0, action)

    def lose(self) -> None:
        """It has moved, and the other end never came: nothing is left of the connection."""
        self.say("gives up waiting at its new place")
        self.error = Unavailable("the other end did not come to the new place")
        for request, _ in self.sends.values():
            request.done, request.error = True, self.error
        self.sends.clear()
        self.events.append(SdpEventKind.CLOSED)
        self.closed = self.over = True

    def leave(self) -> None:
        if not self.over and self.connection.state is SdpState.REP_SENT:
            self.later(self.pause_s(), self.leave)  # at its new place: a connection that is not there yet is refused
        else:
            super().leave()

    def end(self, how: Callable[[SdpConnection], None]) -> None:
        self._farewell = how
        super().end(how)

    def _leave_again(self) -> None:
        assert self._farewell is not None
        self._farewell(self.connection)
