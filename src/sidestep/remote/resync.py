"""What becomes of connections whose link has broken while TCP lives: both ends agree where TCP goes on.

The end that made the link asks, by connection requests that are never accepted, or by the control link of a wire whose
requests have no room for questions, without a queue pair:

    SETTLE, so many bytes have arrived here   -->  its application sends by TCP what follows them
    our application sends what follows these  <--  ARRIVED, so many here; or nothing: it is reset there, or not known
    SETTLED (or FAILED: it is reset)          -->  its application reads TCP behind what has arrived
                                              <--  HEARD

Each side lets its application read TCP only when it knows that the other one sends there all that is missing
(`RemoteRelay.handle_resynced`). Every question may be asked again: the answers are kept for a while.

Until then the connection stands still, as a TCP connection does over a link that is down, and for as long at most. A
host that does not know the link, or where nobody listens any more, says so at once: then nobody knows which bytes the
other application has, and the connection is reset.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from sidestep import limits
from sidestep.errors import PeerViolation, SidestepError
from sidestep.loop import Loop, Timer, nothing
from sidestep.rdma.cm import Connection, ConnectionEvent, Rejected, Unreachable
from sidestep.remote.promotion import Promotion, Purpose
from sidestep.sdp.wire import service_id
from sidestep.switch.link import Carried

if TYPE_CHECKING:
    from sidestep.remote.link import SdpLink
    from sidestep.sdp.stack import Stack

_PAUSES_S: Final = (0.0, 0.2, 1.0, 2.0, 5.0)  # between two questions; the last one again and again


# of an answer; None: none has come, or the peer was not reached
AnswerHandler = Callable[[bytes | None], None]


@dataclass(frozen=True, slots=True)
class Route:
    """Where the other end of a link is asked."""

    hello: bytes  # that the link began with
    ask: Callable[[bytes, AnswerHandler], Callable[[], None]]  # the call that it gives takes the question back


class _RequestQuestion:
    """A question as a connection request."""

    def __init__(self, stack: Stack, address: str, port: int, question: bytes, heard: AnswerHandler) -> None:
        self._heard: AnswerHandler | None = heard
        self._qp = stack.domain.create_qp(stack.send_cq, stack.recv_cq)
        try:
            self._asked = stack.manager.connect(
                address, service_id(port), self._qp, question, self._handle_event, check_reply=lambda _reply: False
            )
        except SidestepError:
            self._qp.destroy()
            raise

    def _handle_event(self, _connection: Connection, event: ConnectionEvent) -> None:
        if not isinstance(event, Rejected | Unreachable):
            return
        heard, self._heard = self._heard, None
        if heard is not None:
            self._qp.destroy()
            heard(event.private_data if isinstance(event, Rejected) else None)

    def take_back(self) -> None:
        if self._heard is not None:
            self._heard = None
            self._asked.disconnect()
            self._qp.destroy()


def by_request(stack: Stack, address: str, port: int, question: bytes, heard: AnswerHandler) -> Callable[[], None]:
    """`Route.ask` by connection requests; raises SidestepError if there is no queue pair left for now."""
    return _RequestQuestion(stack, address, port, question, heard).take_back


class Resync:
    """Asks about one connection until it is settled; `on_over` is called then, if nobody closes it before."""

    def __init__(
        self, loop: Loop, route: Route, promotion: Promotion, key: bytes | None, far: Carried,
        on_over: Callable[[Resync], None],
    ) -> None:  # fmt: skip
        self._loop = loop
        self._on_over = on_over
        self._timer: Timer | None = None
        self._take_back: Callable[[], None] = nothing  # the question that waits for its answer
        self._route = route
        self._key = key
        self._relay = far
        self._promotion = promotion
        self._until = loop.now + limits.SETTLE_S
        arrived = far.break_off()
        if arrived is None:
            self._begin(replace(promotion, purpose=Purpose.FAILED), self._received_end)
        else:
            self._begin(replace(promotion, purpose=Purpose.RESYNC, arrived=arrived), self._received_arrived)

    def close(self) -> None:
        """Asks no more: its stack is about to be closed."""
        if self._timer is not None:
            self._timer.cancel()
        take_back, self._take_back = self._take_back, nothing
        take_back()

    def _begin(self, question: Promotion, answered: Callable[[Promotion | None], None]) -> None:
        self._question, self._answered = question, answered
        if question.purpose is not Purpose.RESYNC:
            self._until = self._loop.now + limits.SETTLED_KEPT_S
        self._tries = 0
        self._again()

    def _again(self) -> None:
        pause_s = _PAUSES_S[min(self._tries, len(_PAUSES_S) - 1)]
        self._tries += 1
        self._timer = self._loop.call_later(pause_s, self._ask)

    def _ask(self) -> None:
        if self._question.purpose is Purpose.RESYNC and self._relay.break_off() is None:  # it has been reset meanwhile
            self._begin(replace(self._promotion, purpose=Purpose.FAILED), self._received_end)
            return
        if self._loop.now > self._until:
            self._answered(None)
            return
        hello = self._route.hello
        try:
            self._take_back = self._route.ask(hello + self._question.encode(hello, self._key), self._handle_answer)
        except SidestepError:
            self._again()

    def _handle_answer(self, answer: bytes | None) -> None:
        self._take_back = nothing
        if answer is None:
            self._again()
            return
        try:
            found = Promotion.find(self._route.hello + answer, self._key)
        except PeerViolation:
            found = None
        self._answered(found if found is not None and found.name == self._promotion.name else None)

    def _received_arrived(self, answer: Promotion | None) -> None:
        known = answer is not None and answer.purpose is Purpose.ARRIVED
        if self._relay.handle_arrived(answer.arrived if known and answer is not None else None):
            self._relay.handle_resynced()
            purpose = Purpose.RESYNCED
        else:
            purpose = Purpose.FAILED
        if known:  # it waits for this
            self._begin(replace(self._promotion, purpose=purpose), self._received_end)
        else:
            self._on_over(self)

    def _received_end(self, _answer: Promotion | None) -> None:
        self._on_over(self)


@dataclass(slots=True)
class _Pending:
    """A link of another host's."""

    hello: bytes  # that it began with
    link: SdpLink
    far: Carried
    until: float | None = None  # it is broken, and its maker is waited for
    timer: Timer | None = None
    answered: bool = False  # he knows what has arrived here, and we what there


class ResyncResponder:
    """What the other hosts may ask about: links of theirs, and those that were settled not long ago."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._links: dict[bytes, _Pending] = {}  # by name
        self._settled: OrderedDict[bytes, tuple[bytes, float]] = OrderedDict()  # by name: Hello, until
        self._inbound: OrderedDict[bytes, None] = OrderedDict()  # names

    def check(self, name: bytes) -> None:
        """Raises PeerViolation for a name that is taken."""
        if name in self._links or name in self._settled:
            raise PeerViolation("a second link of that name", rule="promotion_name")

    def note_inbound(self, name: bytes) -> None:
        """Raises PeerViolation for the name of a visit that was made already: no TCP connection stands behind one."""
        if name in self._inbound:
            raise PeerViolation("a second visit of that name", rule="promotion_name")
        self._inbound[name] = None
        if len(self._inbound) > limits.VISITS_REMEMBERED_MAX:
            self._inbound.popitem(last=False)

    def add(self, name: bytes, hello: bytes, link: SdpLink, far: Carried) -> None:
        self._links[name] = _Pending(hello, link, far)

    def remove(self, name: bytes) -> None:
        resyncing = self._links.pop(name, None)
        if resyncing is not None and resyncing.timer is not None:
            resyncing.timer.cancel()

    def handle_broken(self, name: bytes) -> None:
        """The link is gone: its maker is waited for, as long as he would ask."""
        if (resyncing := self._links.get(name)) is not None:
            self._wait(resyncing)

    def _wait(self, resyncing: _Pending) -> None:
        """Gives it up when its time is over, or sooner if TCP has been reset meanwhile."""
        if resyncing.until is None:
            resyncing.until = self._loop.now + limits.SETTLE_S
            self._look_after(resyncing)

    def _look_after(self, resyncing: _Pending) -> None:
        assert resyncing.until is not None
        if self._loop.now > resyncing.until:
            resyncing.far.handle_arrived(None)
        elif resyncing.far.break_off() is not None:
            resyncing.timer = self._loop.call_later(limits.SETTLE_LOOK_S, lambda: self._look_after(resyncing))

    def answer(self, asked: Promotion, hello: bytes, key: bytes | None) -> bytes:
        """The answer to one question; none to one that makes no sense, or is of an unknown link."""
        answer = self._answer(asked, hello)
        return answer.encode(hello, key) if answer is not None else b""

    def _answer(self, asked: Promotion, hello: bytes) -> Promotion | None:
        now = self._loop.now
        while self._settled and next(iter(self._settled.values()))[1] <= now:
            self._settled.popitem(last=False)
        resyncing = self._links.get(asked.name)
        if resyncing is None or resyncing.hello != hello:
            settled = self._settled.get(asked.name)
            if settled is not None and settled[0] == hello and asked.purpose is not Purpose.RESYNC:
                return replace(asked, purpose=Purpose.HEARD)
            return None
        far = resyncing.far
        if asked.purpose is Purpose.RESYNC:
            resyncing.link.abandon()  # nothing more arrives
            self._wait(resyncing)
            arrived = far.break_off()
            if arrived is None or not far.handle_arrived(asked.arrived):
                return None
            resyncing.answered = True
            return replace(asked, purpose=Purpose.ARRIVED, arrived=arrived)
        if asked.purpose is Purpose.RESYNCED and resyncing.answered:
            far.handle_resynced()
        else:
            resyncing.link.abandon()
            far.handle_arrived(None)
        self._settled[asked.name] = hello, now + limits.SETTLED_KEPT_S
        while len(self._settled) > limits.SETTLED_MAX:
            self._settled.popitem(last=False)
        return replace(asked, purpose=Purpose.HEARD)
