"""The provider's workers: processes that carry connections with other hosts, so that these share several processors.

Theory of operation. A worker (`worker`) runs the same protocol as the provider, with a loop, devices and connections of
its own. The provider keeps all that concerns clients: offers and claims, policy, proof, budget and the port mapper. Of
a connection that a program here has opened it lends the worker the application's end of the channel, descriptors and
all; the worker reaches out and answers whether it carries it. Other hosts are told, for one connection at a time, the
port of the worker with the least to do; it asks for the end that accepted the connection, and is lent that. What other
hosts say of a connection later, such as how far it has come when its link is broken, goes to the same port, and so to
the worker that carried it.

A worker is told that it is to leave, and ends once nothing depends on it. One that ends otherwise takes its connections
with it, which are reset as with a provider that is killed; another takes its place, after a pause that grows. A worker
whose provider has ended brings its connections back to TCP and ends.

While none works, the provider carries connections by itself.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from sidestep import limits
from sidestep.config import ENV_DISABLE, ENV_LOG, RemoteSettings
from sidestep.counters import Counters
from sidestep.errors import PeerViolation, Unavailable
from sidestep.provider import memory
from sidestep.provider.proof.lookup import endpoint_of, mapped_address
from sidestep.provider.rpc import Descriptors
from sidestep.provider.workers import messages as worker_wire
from sidestep.provider.workers.delegate import Lent
from sidestep.provider.workers.ipc import Line
from sidestep.provider.workers.messages import Record
from sidestep.routing import Address
from sidestep.switch.protocol import Awaited, Incoming, NotYet, OffloadProtocol, Outgoing, PortMapper

if TYPE_CHECKING:
    from sidestep.provider.carry.services import ProviderServices
    from sidestep.provider.clients import Client

Row: TypeAlias = tuple[int, dict[str, Any]]  # the user of a connection, and how it is
ShowAnswer: TypeAlias = Callable[[list[Row], bool], None]  # rows, and whether there are more


class Lendable(Protocol):
    """What the provider's own ends can do beside being `Outgoing` or `Incoming`."""

    def lend(self) -> Lent:
        """A worker carries it, or refuses it; raises Unavailable."""


@dataclass(slots=True)
class _Process:
    """One worker that runs."""

    process: subprocess.Popen[bytes]
    pidfd: int
    line: Line
    began_at: float
    doorbell_id: bytes = b""  # of the doorbell that applications ring; empty: it is not ready
    doorbell: Descriptors = field(default_factory=Descriptors)
    lent: dict[int, Lent] = field(default_factory=dict)
    sought: dict[int, Awaited] = field(default_factory=dict)  # by its own numbers
    ports: dict[bytes, int | None] = field(default_factory=dict)  # by address; None: asked for
    tickets: deque[float] = field(default_factory=deque)  # until when a port that was told counts as a connection
    asked: dict[int, ShowAnswer] = field(default_factory=dict)
    leaving: bool = False

    def load(self, now: float) -> int:
        """Connections that it has, or may get soon."""
        while self.tickets and self.tickets[0] <= now:
            self.tickets.popleft()
        return len(self.lent) + len(self.sought) + len(self.tickets)


class Seat:
    """The place of one worker, taken again when it has died."""

    def __init__(self, crew: Crew, index: int) -> None:
        self._crew = crew
        self.index = index
        self.running: _Process | None = None
        self.chosen_at = 0  # the crew's count of choices at the last time
        self._failures = 0  # in a row
        self._numbers = 0
        self._ended: list[_Process] = []  # told to, and not yet gone

    @property
    def ready(self) -> _Process | None:
        """The worker, if it can be given something."""
        running = self.running
        return running if running is not None and running.doorbell_id and not running.leaving else None

    # ---- life ----

    def start(self) -> None:
        crew = self._crew
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The provider itself never runs under a shim, and neither does a worker.
        module = [sys.executable, "-P", "-m", "sidestep.provider.workers.worker"]
        env = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", ENV_DISABLE, ENV_LOG)}
        try:
            process = subprocess.Popen(
                [*module, *crew.arguments, f"--line-fd={theirs.fileno()}"],
                pass_fds=[theirs.fileno()], env=env, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )  # fmt: skip
        except OSError as error:
            ours.close()
            crew.log(f"a worker cannot be started: {error.strerror}")
            self._start_later(0.0)
            return
        finally:
            theirs.close()
        pidfd = os.pidfd_open(process.pid)
        line = Line(ours, crew.services, self._heard, self._line_ended)
        self.running = running = _Process(process, pidfd, line, crew.services.now())
        crew.services.watch(pidfd, partial(self._died, running))
        crew.counters.add("worker_started")

    def _start_later(self, lived_s: float) -> None:
        self._failures = 1 if lived_s > limits.WORKER_LIVED_S else self._failures + 1
        pause_s = min(limits.WORKER_PAUSE_S * 2 ** (self._failures - 1), limits.WORKER_PAUSE_MAX_S)
        self._crew.services.call_later(pause_s, self._start_again)

    def _start_again(self) -> None:
        if self.running is None and not self._crew.dismissed:
            self.start()

    def leave(self) -> None:
        """Everything that it carries goes back to TCP, then it ends."""
        running = self.running
        if running is not None and not running.leaving:
            running.leaving = True
            running.line.send(worker_wire.Leave())

    def kill(self, why: str) -> None:
        """It has broken a rule, or does not answer."""
        if self.running is not None:
            self._crew.log(f"worker {self.running.process.pid} is killed: {why}")
            self.running.process.kill()

    def _line_ended(self, why: str) -> None:
        """Its process ends by itself, if it has not yet: it has nobody to talk to."""
        running = self.running
        if running is not None and not running.line.open and not running.leaving:
            self.kill(why)

    def _died(self, running: _Process) -> None:
        code = running.process.wait()
        crew = self._crew
        self._let_go(running)
        self.running = None
        if running.leaving or crew.dismissed:
            return
        crew.counters.add("worker_ended", f"signal_{-code}" if code < 0 else f"exit_{code}")
        crew.log(f"worker {running.process.pid} has ended by itself ({code}): its connections are reset")
        self._start_later(crew.services.now() - running.began_at)

    def _let_go(self, running: _Process) -> None:
        self._crew.services.unwatch(running.pidfd)
        os.close(running.pidfd)
        running.line.close()
        running.doorbell.close()
        for sought in running.sought.values():
            sought.cancel()
        for lent in list(running.lent.values()):
            lent.refuse()
            lent.over()
        asked, running.asked = running.asked, {}
        for answer in asked.values():
            answer([], False)

    def close(self, until: float) -> None:
        """The provider ends: whatever still runs at that time is killed."""
        running, self.running = self.running, None
        if running is None:
            return
        running.line.close()  # which tells it to leave, if nothing else has
        try:
            running.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            running.process.kill()
            running.process.wait()
        self._let_go(running)

    # ---- what it is given ----

    def lend(self, running: _Process, lendable: Lendable, search: int = 0) -> None:
        """Gives it an end to carry; raises Unavailable."""
        lent = lendable.lend()
        end, key = lent.end, lent.end.key
        self._numbers += 1
        running.lent[self._numbers] = lent
        record = worker_wire.Lend(
            self._numbers, search, lent.client.client_id, lent.uid, key.local_addr, key.local_port, key.remote_addr,
            key.remote_port, key.netns_cookie, end.cookie, end.side, end.segment_id, end.doorbell_name,
            end.doorbell_index,
        )  # fmt: skip
        running.line.send(record, lent.fds)

    def show(self, after: int, answer: ShowAnswer) -> None:
        """Asks what it carries; the answer comes in any case, and soon."""
        running = self.ready
        if running is None:
            answer([], False)
            return
        number = self._crew.next_question()
        running.asked[number] = answer
        running.line.send(worker_wire.Show(number, after))

        def give_up() -> None:
            if (late := running.asked.pop(number, None)) is not None:
                late([], False)

        self._crew.services.call_later(limits.WORKER_ASKED_S, give_up)

    # ---- what it says ----

    def _heard(self, record: Record, descriptors: Descriptors) -> None:
        running = self.running
        if running is None:
            return
        handler = self._HANDLERS.get(type(record))
        if handler is None or (not running.doorbell_id and not isinstance(record, _BEFORE_READY)):
            raise PeerViolation(f"{type(record).__name__} is not for it to say now", rule="malformed")
        handler(self, running, record, descriptors)

    def _on_ready(self, running: _Process, record: worker_wire.Ready, descriptors: Descriptors) -> None:
        if running.doorbell_id or not any(record.doorbell_id):
            raise PeerViolation("ready twice, or with no name", rule="malformed")
        doorbell, page, _ = descriptors.numbers
        memory.check_eventfd(doorbell, "doorbell")
        memory.sealed_size(page, "doorbell page")
        running.doorbell, running.doorbell_id = descriptors.take(), record.doorbell_id

    def _on_carried(self, running: _Process, record: worker_wire.Carried, _: Descriptors) -> None:
        lent = _known(running, record.number)
        if not lent.taken(running.doorbell_id, running.doorbell.numbers):
            running.line.send(worker_wire.Drop(record.number))

    def _on_refused(self, running: _Process, record: worker_wire.Refused, _: Descriptors) -> None:
        lent = _known(running, record.number)
        del running.lent[record.number]
        lent.refuse()
        lent.over()

    def _on_over(self, running: _Process, record: worker_wire.Over, _: Descriptors) -> None:
        lent = _known(running, record.number)
        del running.lent[record.number]
        lent.over()

    def _on_await(self, running: _Process, record: worker_wire.Await, _: Descriptors) -> None:
        if record.number in running.sought or not record.number:
            raise PeerViolation("a search of that number is under way", rule="malformed")
        if running.tickets:
            running.tickets.popleft()
        number, line = record.number, running.line

        def failed(_why: str) -> None:
            if running.sought.pop(number, None) is not None:
                line.send(worker_wire.Missing(number))

        def found(incoming: Incoming) -> None:
            if running.sought.pop(number, None) is None:
                return
            try:
                self.lend(running, _lendable(incoming), number)
            except Unavailable as why:
                self._crew.log(f"a connection stays on TCP: {why}")
                line.send(worker_wire.Missing(number))

        try:
            running.sought[number] = self._crew.services.await_end(
                self._crew.carrier, endpoint_of(record.local_addr, record.local_port),
                endpoint_of(record.remote_addr, record.remote_port), found, failed,
            )  # fmt: skip
        except Unavailable:
            line.send(worker_wire.Missing(number))

    def _on_forget(self, running: _Process, record: worker_wire.Forget, _: Descriptors) -> None:
        if (sought := running.sought.pop(record.search, None)) is not None:
            sought.cancel()

    def _on_ask(self, running: _Process, record: worker_wire.Ask, _: Descriptors) -> None:
        local = endpoint_of(record.local_addr, record.local_port)
        remote = endpoint_of(record.remote_addr, record.remote_port)

        def answered(port: int | None) -> None:
            running.line.send(worker_wire.Port(record.number, port or 0))

        self._crew.mapper.ask(local, remote, answered)

    def _on_doubt(self, _running: _Process, record: worker_wire.Doubt, _: Descriptors) -> None:
        self._crew.mapper.doubt(endpoint_of(record.remote_addr, record.remote_port), record.port)

    def _on_listens(self, running: _Process, record: worker_wire.Listens, _: Descriptors) -> None:
        if running.ports.get(record.local_addr, 0) is not None:
            raise PeerViolation("a port that nobody asked for", rule="malformed")
        running.ports[record.local_addr] = record.port
        self._crew.handle_listens()

    def _on_counted(self, _running: _Process, record: worker_wire.Counted, _: Descriptors) -> None:
        text = record.text.decode("ascii", "replace")
        name, reason = text[: record.name_len], text[record.name_len :]
        if name not in _COUNTED or len(reason) > limits.WHY_MAX:
            raise PeerViolation(f"a counter {name!r}", rule="malformed")
        self._crew.counters.add(name, reason)

    def _on_tell(self, running: _Process, record: worker_wire.Tell, _: Descriptors) -> None:
        self._crew.log(f"worker {running.process.pid}: {record.text.decode(errors='replace')}")

    def _on_shown(self, running: _Process, record: worker_wire.Shown, _: Descriptors) -> None:
        answer = running.asked.pop(record.number, None)
        if answer is not None:
            answer(_rows(record.text), record.more)

    _HANDLERS: Final[dict[type[Record], Callable[[Seat, _Process, Any, Descriptors], None]]] = {
        worker_wire.Ready: _on_ready,
        worker_wire.Carried: _on_carried,
        worker_wire.Refused: _on_refused,
        worker_wire.Over: _on_over,
        worker_wire.Await: _on_await,
        worker_wire.Forget: _on_forget,
        worker_wire.Ask: _on_ask,
        worker_wire.Doubt: _on_doubt,
        worker_wire.Listens: _on_listens,
        worker_wire.Counted: _on_counted,
        worker_wire.Tell: _on_tell,
        worker_wire.Shown: _on_shown,
    }


_BEFORE_READY: Final = (worker_wire.Ready, worker_wire.Tell, worker_wire.Counted)
_COUNTED: Final = frozenset({"relay_opened", "relay_dropped", "relay_left", "relay_reset", "internal_error"})


class Crew:
    """The workers of one protocol (`sidestep.switch.protocol.Workers`)."""

    def __init__(
        self, carrier: OffloadProtocol, mapper: PortMapper, count: int, remote: RemoteSettings,
        services: ProviderServices, counters: Counters, log: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.carrier = carrier
        self.mapper = mapper
        self.services = services
        self.counters = counters
        self.log = log
        self.dismissed = False
        self.arguments = [f"--protocol={carrier.name}", f"--remote={remote}"]
        if remote.key_file is not None:
            self.arguments.append(f"--remote-key={remote.key_file}")
        self.seats = [Seat(self, index) for index in range(count)]
        self._choices = 0
        self._questions = 0
        self._waiting: list[Callable[[], None]] = []  # for a port
        for seat in self.seats:
            seat.start()

    def next_question(self) -> int:
        self._questions += 1
        return self._questions

    @property
    def runs(self) -> bool:
        return any(seat.running is not None for seat in self.seats)

    @property
    def connections(self) -> int:
        return sum(len(seat.running.lent) for seat in self.seats if seat.running is not None)

    # ---- for the protocol ----

    def hand_over(self, outgoing: Outgoing) -> bool:
        """The worker with the least to do carries it, or refuses it; False: there is none."""
        seat = self._least_loaded(self.seats)
        if seat is None or seat.ready is None:
            return False
        seat.lend(seat.ready, _lendable(outgoing))
        return True

    def port(self, local: Address) -> int | None:
        """Where the worker with the least to do takes a connection; None: none works there."""
        packed = mapped_address(str(local))
        ready = [seat for seat in self.seats if seat.ready is not None]
        for each in ready:
            _ask_to_listen(each, packed)
        seat = self._least_loaded([each for each in ready if each.running and each.running.ports.get(packed)])
        if seat is None or seat.running is None:
            if any(each.running is not None and each.running.ports.get(packed, 0) is None for each in ready):
                raise NotYet("the workers are asked where they listen", self._wait)
            return None
        seat.running.tickets.append(self.services.now() + limits.WORKER_TICKET_S)
        return seat.running.ports[packed]

    def _wait(self, call: Callable[[], None]) -> None:
        if len(self._waiting) < limits.PEERS_ASKING_MAX:
            self._waiting.append(call)

    def handle_listens(self) -> None:
        """A worker has told where it listens."""
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()

    def dismiss(self) -> None:
        self.dismissed = True
        self.leave()

    def _least_loaded(self, seats: list[Seat]) -> Seat | None:
        now = self.services.now()
        ready = [(seat.ready.load(now), seat.chosen_at, seat.index) for seat in seats if seat.ready is not None]
        if not ready:
            return None
        chosen = self.seats[min(ready)[2]]
        self._choices += 1
        chosen.chosen_at = self._choices
        return chosen

    # ---- for the provider ----

    def leave(self) -> None:
        """All connections go back to TCP."""
        for seat in self.seats:
            seat.leave()

    @property
    def settled(self) -> bool:
        """Whether all workers that were told to leave have."""
        return not any(seat.running is not None and seat.running.leaving for seat in self.seats)

    def handle_disconnect(self, client: Client) -> None:
        """A client has gone: workers that have ends of it are told."""
        for seat in self.seats:
            running = seat.running
            if running is not None and any(lent.client is client for lent in running.lent.values()):
                running.line.send(worker_wire.Gone(client.client_id))


class Crews:
    """The workers of all protocols of one provider."""

    def __init__(
        self, count: int, remote: RemoteSettings | None, services: ProviderServices, counters: Counters,
        log: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._count = count
        self._remote = remote
        self._services = services
        self._counters = counters
        self._log = log
        self._crews: list[Crew] = []  # dismissed ones as well, as long as one of their workers runs

    def hire(self, carrier: OffloadProtocol, mapper: PortMapper) -> Crew | None:
        """Workers that run this protocol, too; None: there are to be none."""
        self._crews = [crew for crew in self._crews if not crew.dismissed or crew.runs]
        if not self._count or self._remote is None:
            return None
        crew = Crew(carrier, mapper, self._count, self._remote, self._services, self._counters, self._log)
        self._crews.append(crew)
        return crew

    @property
    def seats(self) -> list[Seat]:
        """All places of workers."""
        return [seat for crew in self._crews for seat in crew.seats]

    @property
    def connections(self) -> int:
        return sum(crew.connections for crew in self._crews)

    def leave(self, protocol: str | None = None) -> None:
        """The connections of a protocol, or all, go back to TCP, and the workers end."""
        for crew in self._named(protocol):
            crew.leave()

    def settled(self, protocol: str | None = None) -> bool:
        return all(crew.settled for crew in self._named(protocol))

    def handle_disconnect(self, client: Client) -> None:
        for crew in self._crews:
            crew.handle_disconnect(client)

    def as_json(self) -> list[dict[str, int]]:
        found = [seat.ready for seat in self.seats]
        return [{"pid": each.process.pid, "connections": len(each.lent)} for each in found if each is not None]

    def close(self) -> None:
        until = time.monotonic() + limits.WORKER_END_S
        for crew in self._crews:
            crew.dismissed = True
        for seat in self.seats:
            seat.close(until)

    def _named(self, protocol: str | None) -> Iterator[Crew]:
        return (crew for crew in self._crews if protocol in (None, crew.carrier.name))


def _known(running: _Process, number: int) -> Lent:
    lent = running.lent.get(number)
    if lent is None:
        raise PeerViolation(f"end {number} was not lent to it", rule="malformed")
    return lent


def _ask_to_listen(seat: Seat, local_addr: bytes) -> None:
    running = seat.running
    if running is not None and local_addr not in running.ports:
        if len(running.ports) >= limits.REMOTE_ADDRESSES_MAX:
            running.ports[local_addr] = 0
            return
        running.ports[local_addr] = None
        running.line.send(worker_wire.Listen(local_addr))


def _lendable(end: Outgoing | Incoming) -> Lendable:
    """Ends are the provider's own: it made them."""
    if not hasattr(end, "lend"):
        raise AssertionError("an end that is not the provider's")
    return end  # type: ignore[return-value]  # as was just looked


def _rows(text: bytes) -> list[Row]:
    """What a worker carries, in its own words; raises PeerViolation."""
    try:
        rows = [(int(uid), dict(details)) for uid, details in json.loads(text)]
    except (ValueError, TypeError, RecursionError) as error:
        raise PeerViolation(f"connections that cannot be read: {error}", rule="malformed") from error
    return rows
