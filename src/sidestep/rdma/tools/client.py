"""The side that asks: connecting with errors that say what to do, then pinging or measuring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, TypeVar

from sidestep.errors import PeerViolation, Unavailable
from sidestep.rdma.cm import (
    REJECT_INVALID_SERVICE_ID,
    Connection,
    ConnectionEvent,
    Disconnected,
    Established,
    Rejected,
    Unreachable,
)
from sidestep.rdma.roce.ip_cm import TCP_SERVICE
from sidestep.rdma.tools.bandwidth import Bandwidth
from sidestep.rdma.tools.devices import HostPort
from sidestep.rdma.tools.talk import Pinger, Talk
from sidestep.rdma.tools.terms import Note, NoteKind, Op, Terms

if TYPE_CHECKING:
    from sidestep.loop import Loop

TalkT = TypeVar("TalkT", bound=Talk)


@dataclass(slots=True)
class Session:
    """What became of a conversation so far."""

    established: bool = False
    remote: Terms | None = None
    error: Unavailable | None = None
    stopped: bool = False  # by the user

    def failed(self, why: str) -> None:
        if self.error is None:
            self.error = Unavailable(f"the conversation has ended: {why}", remedy="does the server still run?")

    @property
    def over(self) -> bool:
        return self.error is not None or self.stopped


class NobodyListens(Unavailable):
    """At this address; perhaps at another one."""


def connect(loop: Loop, talk: TalkT, place: HostPort, session: Session, timeout_s: float) -> TalkT:
    """Makes the connection; raises Unavailable with what stood against it."""
    private_data = talk.terms.encode()

    def handle(connection: Connection, event: ConnectionEvent) -> None:
        del connection
        if isinstance(event, Established):
            try:
                session.remote = Terms.decode(event.private_data)
            except PeerViolation as error:
                session.error = Unavailable(
                    f"{place} is no server of these tools: {error.message}", remedy="start 'sidestep rdma server' there"
                )
            session.established = True
        else:
            session.error = session.error or _problem(place, event)

    talk.connection = talk.device.cm.connect(place.host, TCP_SERVICE + place.port, talk.qp, private_data, handle)
    if not loop.run_until(lambda: session.established or session.over, timeout_s):
        talk.connection.disconnect()
        raise Unavailable(
            f"{place} does not answer within {timeout_s:g} seconds",
            remedy="is it the right host, and a firewall between?",
        )
    if session.error is not None:
        raise session.error
    if not session.established:
        talk.connection.disconnect()
        raise Unavailable(f"{place} has not answered before it was stopped")
    return talk


def _problem(place: HostPort, event: ConnectionEvent) -> Unavailable:
    if isinstance(event, Rejected):
        if event.reason == REJECT_INVALID_SERVICE_ID:
            return NobodyListens(f"nobody listens at {place}", remedy="start 'sidestep rdma server' there")
        said = event.private_data.decode("utf-8", "replace").strip("\0")
        return Unavailable(f"{place} rejected the connection{': ' + said if said else ''}")
    if isinstance(event, Unreachable):
        return Unavailable(
            f"{place} cannot be reached, or does not speak RDMA", remedy="is 'sidestep rdma server' running there?"
        )
    if isinstance(event, Disconnected):
        return Unavailable(f"{place} ended the connection" + ("" if event.confirmed else ": it broke"))
    return Unavailable(f"{place} ended the connection")


@dataclass(slots=True)
class Pings:
    """What came of pinging."""

    sent: int = 0
    round_trips_ns: list[int] = field(default_factory=list)
    wrong: int = 0
    error: Unavailable | None = None

    def summary(self) -> dict[str, float]:
        """Microseconds: min, median, p99, max; empty if nothing came back."""
        found = sorted(self.round_trips_ns)
        if not found:
            return {}
        p99 = found[min(len(found) - 1, -(-len(found) * 99 // 100) - 1)]
        return {"min": found[0] / 1e3, "median": median(found) / 1e3, "p99": p99 / 1e3, "max": found[-1] / 1e3}


@dataclass(frozen=True, slots=True)
class Pinging:
    """How to ping."""

    count: int  # 0: until the user stops it
    size: int
    interval_s: float
    timeout_s: float
    verify: bool = True


def ping(
    loop: Loop, talk: Pinger, wanted: Pinging, session: Session, tell: Callable[[int, int, bool], object]
) -> Pings:
    """Asks and waits, one after the other; `tell` gets number, nanoseconds and whether it was wrong."""
    pings = Pings()
    while not session.over and (not wanted.count or pings.sent < wanted.count):
        if pings.sent and wanted.interval_s:
            loop.run_until(lambda: session.over, wanted.interval_s)
            if session.over:
                break
        talk.ask()
        pings.sent += 1
        if not loop.run_until(lambda: not talk.waiting or session.over, wanted.timeout_s):
            session.failed(f"no answer within {wanted.timeout_s:g} seconds")
        if not talk.waiting:
            pings.round_trips_ns.append(talk.round_trip_ns)
            pings.wrong += talk.wrong
            tell(pings.sent, talk.round_trip_ns, talk.wrong)
    pings.error = session.error
    return pings


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of measuring bandwidth."""

    seconds: float
    messages: int  # of this end
    remote_messages: int  # of the other end, with `both`
    wrong: int
    cpu_s: float
    remote_cpu_s: float
    complete: bool  # the other end has said that it has everything


def measure(loop: Loop, talk: Bandwidth, session: Session, duration_s: float, timeout_s: float) -> Measured:
    """Goes on for so long, or until the user stops it; raises Unavailable if the conversation breaks."""
    assert session.remote is not None
    begun = loop.now
    talk.begin(session.remote)
    loop.run_until(lambda: session.over, duration_s)
    session.stopped = False  # what is under way is still waited for
    talk.stop()
    loop.run_until(lambda: talk.done is not None or session.over, timeout_s)
    seconds, cpu_s = loop.now - begun, talk.cpu_s
    if session.error is not None:
        raise session.error
    done = talk.done or Note(NoteKind.DONE)
    # What this end read, or the other end has seen of what was sent or written there; and the other way with `both`.
    wrong = talk.out.wrong if talk.terms.op is Op.READ else done.wrong
    wrong += talk.back.wrong if talk.terms.both else 0
    remote_messages = talk.back.messages if talk.terms.both else 0
    return Measured(seconds, talk.out.messages, remote_messages, wrong, cpu_s, done.cpu_us / 1e6, talk.done is not None)
