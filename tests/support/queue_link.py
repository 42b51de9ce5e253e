"""A link between two ends of one process: words and data wait in a queue until somebody has them delivered."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress

from sidestep.errors import PeerViolation
from sidestep.loop import nothing
from sidestep.switch.link import Carried, Control


class QueueLink:
    """Link of one end; `later` has `deliver` called, to the other end, `pace` bytes at a time."""

    other: Carried  # the end that it leads to
    rounds = False
    spacers = True
    plain = buffered = False
    under_way = 0
    room = 1

    def __init__(self, later: Callable[[Callable[[], object]], object] = lambda _: None, pace: int = 1 << 30) -> None:
        self.later, self.pace = later, pace
        self.queue: deque[tuple[Control, int | memoryview]] = deque()
        self.asked = self.finished = False
        self.on_gone: Callable[[], object] = nothing

    def send_control(self, control: Control, count: int = 0) -> None:
        self.queue.append((control, count))
        self.ask()

    def send(self, piece: memoryview) -> None:
        self.queue.append((Control.DATA, piece))
        self.ask()

    def finish(self, on_gone: Callable[[], object]) -> None:
        self.finished, self.on_gone = True, on_gone
        self.ask()

    def ask(self) -> None:
        if not self.asked:
            self.asked = True
            self.later(self.deliver)

    def deliver(self) -> None:
        """Words, and so many bytes behind them, as the other end takes them."""
        self.asked, left = False, self.pace
        with suppress(PeerViolation):  # an application's, which has been reset for it
            while self.queue and left and not self.other.lost:
                control, what = self.queue.popleft()
                if isinstance(what, int):
                    self.other.handle_control(control, what)
                    continue
                if what[left:]:
                    self.queue.appendleft((control, what[left:]))
                self.put(what[:left])
                left -= len(what[:left])
        if self.other.lost:
            self.queue.clear()
        if self.queue:
            self.ask()
        elif self.finished:
            on_gone, self.on_gone = self.on_gone, nothing
            self.other.handle_farewell()
            self.other.handle_arrived(None)
            on_gone()

    def put(self, piece: memoryview) -> None:
        for room in self.other.data_room(len(piece)) or ():
            room[:], piece = piece[: len(room)], piece[len(room) :]
            self.other.handle_data(len(room))

    def lend(self, record: dict[str, int]) -> None:
        """Never."""

    def take_back(self, record: dict[str, int], error: int) -> None:
        """Never called."""

    def details(self) -> dict[str, object]:
        return {}


def joined(ends: tuple[Carried, Carried], links: tuple[QueueLink, QueueLink]) -> None:
    """Leads each link to the end of the other."""
    links[0].other, links[1].other = ends[1], ends[0]
