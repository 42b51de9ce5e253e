"""The provider's workers: processes that carry connections with other hosts, so that these share several processors.

Theory of operation. A worker (`worker`) runs the same protocol as the provider, with a loop, devices and connections of
its own. The provider keeps all that concerns clients: offers and claims, policy, proof, budget and the port mapper. For
a connection that a program here has opened it lends the worker the application's end of the channel, descriptors and
all. The worker reaches out and answers whether it carries it. For each connection of another host the provider answers
with the port of the worker with the least to do. That worker asks for the end that accepted the connection, and is lent
it. Later messages of other hosts about a connection, such as the state of a broken link, go to the same port. So
they reach the worker that carried it.

The provider orders a worker to leave, and the worker ends once nothing depends on it. A worker that ends otherwise
takes its connections with it, which are reset as with a provider that is killed. Another takes its place, after a pause
that grows. A worker whose provider has ended brings its connections back to TCP and ends.

While none works, the provider carries connections by itself.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from sidestep import limits
from sidestep.config import ENV_DISABLE, ENV_LOG
from sidestep.counters import Counters
from sidestep.errors import PeerViolation, Unavailable
from sidestep.provider import memory
from sidestep.provider.carry.hub import NewDoorbell
from sidestep.provider.proof.lookup import endpoint_of, mapped_address
from sidestep.provider.rpc import Descriptors
from sidestep.provider.workers import messages
from sidestep.provider.workers.ipc import IpcChannel
from sidestep.provider.workers.messages import Record
from sidestep.routing import Address
from sidestep.settings import RemoteSettings
from sidestep.switch.protocol import Incoming, NotYet, OffloadProtocol, Outgoing, PortMapper, Row, Services

if TYPE_CHECKING:
    from sidestep.provider.clients import Client
    from sidestep.switch.offers import ConnectionKey

ShowAnswer: TypeAlias = Callable[[list[Row], bool], None]  # rows, and whether there are more


@dataclass(frozen=True, slots=True, eq=False)
class Delegated:
    """An end of a connection with another host that a worker is to carry, or refuse.

    The provider has the client, and its offer or claim; the worker gets descriptors and the facts that a `RemoteRelay`
    wants. Its application gets no answer until the worker has carried the end: it may withdraw or go, and is not
    `taken` then.
    """

    key: ConnectionKey
    cookie: int
    side: int  # the carrier's side of the segment
    segment_id: bytes
    doorbell_name: bytes
    doorbell_index: int
    client: Client
    uid: int  # the client's user
    fds: tuple[int, ...]  # the application's segment, doorbell and its page, until `taken` or `refuse` was called
    taken: Callable[[bytes, Sequence[int]], bool]  # gives the doorbell to ring from now on; False: it is not wanted
    refuse: Callable[[], object]  # leaves it on TCP; does nothing once it has been `taken`
    over: Callable[[], object]  # the end was carried and is not any more, or was not `taken`


class Delegable(Protocol):
    """Ability of the provider's own ends beside being `Outgoing` or `Incoming`."""

    def delegate(self) -> Delegated:
        """A worker carries it, or refuses it; raises Unavailable."""


@dataclass(slots=True)
class _Process:
    """One worker that runs."""

    process: subprocess.Popen[bytes]
    pidfd: int
    ipc: IpcChannel
    began_at: float
    doorbell_id: bytes = b""  # id of the doorbell that applications ring; empty: it is not ready
    doorbell: Descriptors = field(default_factory=Descriptors)
    delegated: dict[int, Delegated] = field(default_factory=dict)
    sought: dict[int, Callable[[], object]] = field(default_factory=dict)  # the call that ends each, by its own numbers
    ports: dict[bytes, int | None] = field(default_factory=dict)  # ports by address; None: asked for
    tickets: deque[float] = field(default_factory=deque)  # times until which a given port counts as used
    asked: dict[int, ShowAnswer] = field(default_factory=dict)
    leaving: bool = False

    def load(self, now: float) -> int:
        """Connections that it has, or may get soon."""
        while self.tickets and self.tickets[0] <= now:
            self.tickets.popleft()
        return len(self.delegated) + len(self.sought) + len(self.tickets)


class WorkerSlot:
    """The place of one worker, taken again when it has died."""

    def __init__(self, pool: WorkerPool, index: int) -> None:
        self._pool = pool
        self.index = index
        self.running: _Process | None = None
        self.chosen_at = 0  # the crew's count of choices at the last time
        self._failures = 0  # failures in a row
        self._numbers = itertools.count(1)
        self._ended: list[_Process] = []  # ordered to end, and not yet gone

    @property
    def ready(self) -> _Process | None:
        """The worker, if it can be given something."""
        running = self.running
        return running if running is not None and running.doorbell_id and not running.leaving else None

    # ---- life ----

    def start(self) -> None:
        pool = self._pool
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The provider itself never runs under a shim, and neither does a worker.
        module = [sys.executable, "-P", "-m", "sidestep.provider.workers.worker"]
        env = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", ENV_DISABLE, ENV_LOG)}
        try:
            process = subprocess.Popen(
                [*module, *pool.arguments, f"--ipc-fd={theirs.fileno()}"],
                pass_fds=[theirs.fileno()], env=env, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )  # fmt: skip
        except OSError as error:
            ours.close()
            pool.services.log(f"a worker cannot be started: {error.strerror}")
            self._start_later(0.0)
            return
        finally:
            theirs.close()
        pidfd = os.pidfd_open(process.pid)
        ipc = IpcChannel(ours, pool.services.loop, self._handle_record, self._ipc_ended)
        self.running = running = _Process(process, pidfd, ipc, pool.services.loop.now)
        pool.services.loop.on_readable(pidfd, partial(self._died, running))
        pool.counters.add("worker_started")

    def _start_later(self, lived_s: float) -> None:
        self._failures = 1 if lived_s > limits.WORKER_LIVED_S else self._failures + 1
        pause_s = min(limits.WORKER_PAUSE_S * 2 ** (self._failures - 1), limits.WORKER_PAUSE_MAX_S)
        self._pool.services.loop.call_later(pause_s, self._start_again)

    def _start_again(self) -> None:
        if self.running is None and not self._pool.stopped:
            self.start()

    def leave(self) -> None:
        """Orders the worker to take everything back to TCP and to end."""
        running = self.running
        if running is not None and not running.leaving:
            running.leaving = True
            running.ipc.send(messages.Leave())

    def kill(self, why: str) -> None:
        """Kills the worker, which has broken a rule or does not answer."""
        if self.running is not None:
            self._pool.services.log(f"worker {self.running.process.pid} is killed: {why}")
            self.running.process.kill()

    def _ipc_ended(self, why: str) -> None:
        """Kills the worker, unless it is leaving: without a line to the provider it is of no use."""
        running = self.running
        if running is not None and not running.ipc.open and not running.leaving:
            self.kill(why)

    def _died(self, running: _Process) -> None:
        code = running.process.wait()
        pool = self._pool
        self._let_go(running)
        self.running = None
        if running.leaving or pool.stopped:
            return
        pool.counters.add("worker_ended", f"signal_{-code}" if code < 0 else f"exit_{code}")
        pool.services.log(f"worker {running.process.pid} has ended by itself ({code}): its connections are reset")
        self._start_later(pool.services.loop.now - running.began_at)

    def _let_go(self, running: _Process) -> None:
        self._pool.services.loop.forget(running.pidfd)
        os.close(running.pidfd)
        running.ipc.close()
        running.doorbell.close()
        for end in running.sought.values():
            end()
        for delegated in list(running.delegated.values()):
            delegated.refuse()
            delegated.over()
        asked, running.asked = running.asked, {}
        for answer in asked.values():
            answer([], False)

    def close(self, until: float) -> None:
        """Ends with the provider: a worker that still runs at `until` is killed."""
        running, self.running = self.running, None
        if running is None:
            return
        running.ipc.close()  # this makes it leave, if it does not already
        try:
            running.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            running.process.kill()
            running.process.wait()
        self._let_go(running)

    # ---- what it is given ----

    def delegate(self, running: _Process, delegable: Delegable, search: int = 0) -> None:
        """Gives it an end to carry; raises Unavailable."""
        delegated = delegable.delegate()
        key = delegated.key
        number = next(self._numbers)
        running.delegated[number] = delegated
        record = messages.Delegate(
            number, search, delegated.client.client_id, delegated.uid, key.local_addr, key.local_port,
            key.remote_addr, key.remote_port, key.netns_cookie, delegated.cookie, delegated.side,
            delegated.segment_id, delegated.doorbell_name, delegated.doorbell_index,
        )  # fmt: skip
        running.ipc.send(record, delegated.fds)

    def show(self, after: int, answer: ShowAnswer) -> None:
        """Asks what it carries; the answer comes in any case, and soon."""
        running = self.ready
        if running is None:
            answer([], False)
            return
        number = next(self._pool.questions)
        running.asked[number] = answer
        running.ipc.send(messages.Show(number, after))

        def give_up() -> None:
            if (late := running.asked.pop(number, None)) is not None:
                late([], False)

        self._pool.services.loop.call_later(limits.WORKER_ASKED_S, give_up)

    # ---- messages of the worker ----

    def _handle_record(self, record: Record, descriptors: Descriptors) -> None:
        running = self.running
        if running is None:
            return
        handler = self._HANDLERS.get(type(record))
        if handler is None or (not running.doorbell_id and not isinstance(record, _BEFORE_READY)):
            raise PeerViolation(f"{type(record).__name__} is not for it to say now", rule="malformed")
        handler(self, running, record, descriptors)

    def _on_ready(self, running: _Process, record: messages.Ready, descriptors: Descriptors) -> None:
        if running.doorbell_id or not any(record.doorbell_id):
            raise PeerViolation("ready twice, or with no name", rule="malformed")
        doorbell, page, _ = descriptors.numbers
        memory.check_eventfd(doorbell, "doorbell")
        memory.sealed_size(page, "doorbell page")
        running.doorbell, running.doorbell_id = descriptors.take(), record.doorbell_id

    def _on_carried(self, running: _Process, record: messages.Carried, _: Descriptors) -> None:
        delegated = _known(running, record.number)
        if not delegated.taken(running.doorbell_id, running.doorbell.numbers):
            running.ipc.send(messages.Drop(record.number))

    def _on_refused(self, running: _Process, record: messages.Refused, _: Descriptors) -> None:
        delegated = _known(running, record.number)
        del running.delegated[record.number]
        delegated.refuse()
        delegated.over()

    def _on_over(self, running: _Process, record: messages.Over, _: Descriptors) -> None:
        delegated = _known(running, record.number)
        del running.delegated[record.number]
        delegated.over()

    def _on_await(self, running: _Process, record: messages.Await, _: Descriptors) -> None:
        if record.number in running.sought or not record.number:
            raise PeerViolation("a search of that number is under way", rule="malformed")
        if running.tickets:
            running.tickets.popleft()
        number, ipc = record.number, running.ipc

        def failed(_why: str) -> None:
            if running.sought.pop(number, None) is not None:
                ipc.send(messages.Missing(number))

        def found(incoming: Incoming) -> None:
            if running.sought.pop(number, None) is None:
                return
            try:
                self.delegate(running, _delegable(incoming), number)
            except Unavailable as why:
                self._pool.services.log(f"a connection stays on TCP: {why}")
                ipc.send(messages.Missing(number))

        try:
            running.sought[number] = self._pool.services.await_end(
                self._pool.carrier, record.transport.decode(errors="replace"),
                endpoint_of(record.local_addr, record.local_port),
                endpoint_of(record.remote_addr, record.remote_port), found, failed,
            )  # fmt: skip
        except Unavailable:
            ipc.send(messages.Missing(number))

    def _on_forget(self, running: _Process, record: messages.Forget, _: Descriptors) -> None:
        if (end := running.sought.pop(record.search, None)) is not None:
            end()

    def _on_ask(self, running: _Process, record: messages.Ask, _: Descriptors) -> None:
        local = endpoint_of(record.local_addr, record.local_port)
        remote = endpoint_of(record.remote_addr, record.remote_port)

        def answered(port: int | None) -> None:
            running.ipc.send(messages.Port(record.number, port or 0))

        self._pool.mapper.ask(local, remote, answered)

    def _on_doubt(self, _running: _Process, record: messages.Doubt, _: Descriptors) -> None:
        self._pool.mapper.doubt(endpoint_of(record.remote_addr, record.remote_port), record.port)

    def _on_listens(self, running: _Process, record: messages.Listens, _: Descriptors) -> None:
        if running.ports.get(record.local_addr, 0) is not None:
            raise PeerViolation("a port that nobody asked for", rule="malformed")
        running.ports[record.local_addr] = record.port
        self._pool.handle_listens()

    def _on_counted(self, _running: _Process, record: messages.Counted, _: Descriptors) -> None:
        text = record.text.decode("ascii", "replace")
        name, reason = text[: record.name_len], text[record.name_len :]
        if name not in _COUNTED or len(reason) > limits.WHY_MAX:
            raise PeerViolation(f"a counter {name!r}", rule="malformed")
        self._pool.counters.add(name, reason)

    def _on_tell(self, running: _Process, record: messages.Tell, _: Descriptors) -> None:
        self._pool.services.log(f"worker {running.process.pid}: {record.text.decode(errors='replace')}")

    def _on_shown(self, running: _Process, record: messages.Shown, _: Descriptors) -> None:
        answer = running.asked.pop(record.number, None)
        if answer is not None:
            answer(_rows(record.text), record.more)

    _HANDLERS: Final[dict[type[Record], Callable[[WorkerSlot, _Process, Any, Descriptors], None]]] = {
        messages.Ready: _on_ready,
        messages.Carried: _on_carried,
        messages.Refused: _on_refused,
        messages.Over: _on_over,
        messages.Await: _on_await,
        messages.Forget: _on_forget,
        messages.Ask: _on_ask,
        messages.Doubt: _on_doubt,
        messages.Listens: _on_listens,
        messages.Counted: _on_counted,
        messages.Tell: _on_tell,
        messages.Shown: _on_shown,
    }


_BEFORE_READY: Final = (messages.Ready, messages.Tell, messages.Counted)
_COUNTED: Final = frozenset(
    {"relay_opened", "relay_dropped", "relay_left", "relay_reset", "internal_error", "engine_lent", "engine_given_back"}
)


class WorkerPool:
    """The workers of one protocol (`sidestep.switch.protocol.Workers`)."""

    def __init__(
        self, carrier: OffloadProtocol, mapper: PortMapper, count: int, remote: RemoteSettings, services: Services,
        counters: Counters,
    ) -> None:  # fmt: skip
        self.carrier = carrier
        self.mapper = mapper
        self.services = services
        self.counters = counters
        self.stopped = False
        self.arguments = [f"--protocol={carrier.name}", *remote.arguments()]
        self.slots = [WorkerSlot(self, index) for index in range(count)]
        self.questions = itertools.count(1)
        self._choices = itertools.count(1)
        self._waiting: list[Callable[[], None]] = []  # calls that wait for a port
        for slot in self.slots:
            slot.start()

    @property
    def runs(self) -> bool:
        return any(slot.running is not None for slot in self.slots)

    @property
    def connections(self) -> int:
        return sum(len(slot.running.delegated) for slot in self.slots if slot.running is not None)

    # ---- for the protocol ----

    def hand_over(self, outgoing: Outgoing) -> bool:
        """The worker with the least to do carries it, or refuses it; False: there is none."""
        if (slot := self._least_loaded(self.slots)) is None or slot.ready is None:
            return False
        slot.delegate(slot.ready, _delegable(outgoing))
        return True

    def port(self, local: Address) -> int | None:
        """Port at which the worker with the least to do takes a connection; None: none works there."""
        packed = mapped_address(str(local))
        ready = [slot for slot in self.slots if slot.ready is not None]
        for each in ready:
            _ask_to_listen(each, packed)
        slot = self._least_loaded([each for each in ready if each.running and each.running.ports.get(packed)])
        if slot is None or slot.running is None:
            if any(each.running is not None and each.running.ports.get(packed, 0) is None for each in ready):
                raise NotYet("the workers are asked where they listen", self._wait)
            return None
        slot.running.tickets.append(self.services.loop.now + limits.WORKER_TICKET_S)
        return slot.running.ports[packed]

    def _wait(self, call: Callable[[], None]) -> None:
        if len(self._waiting) < limits.PEERS_ASKING_MAX:
            self._waiting.append(call)

    def handle_listens(self) -> None:
        """Makes the calls that wait for a worker's port, as one has given it."""
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()

    def stop(self) -> None:
        self.stopped = True
        self.leave()

    def _least_loaded(self, slots: list[WorkerSlot]) -> WorkerSlot | None:
        now = self.services.loop.now
        ready = [(slot.ready.load(now), slot.chosen_at, slot.index) for slot in slots if slot.ready is not None]
        if not ready:
            return None
        chosen = self.slots[min(ready)[2]]
        chosen.chosen_at = next(self._choices)
        return chosen

    # ---- for the provider ----

    def leave(self) -> None:
        """All connections go back to TCP."""
        for slot in self.slots:
            slot.leave()

    @property
    def settled(self) -> bool:
        """True if all workers that were ordered to leave have left."""
        return not any(slot.running is not None and slot.running.leaving for slot in self.slots)

    def handle_disconnect(self, client: Client) -> None:
        """Informs the workers that have ends of a client that has gone."""
        for slot in self.slots:
            running = slot.running
            if running is not None and any(delegated.client is client for delegated in running.delegated.values()):
                running.ipc.send(messages.Gone(client.client_id))


class WorkerPools:
    """The workers of all protocols of one provider."""

    def __init__(self, count: int, services: Services, counters: Counters) -> None:
        self._count = count
        self._services = services
        self._counters = counters
        self._pools: list[WorkerPool] = []  # dismissed ones as well, as long as one of their workers runs

    def start_workers(self, carrier: OffloadProtocol, mapper: PortMapper) -> WorkerPool | None:
        """Workers that run this protocol, too; None: there are to be none."""
        self._pools = [pool for pool in self._pools if not pool.stopped or pool.runs]
        if not self._count or self._services.remote is None:
            return None
        pool = WorkerPool(carrier, mapper, self._count, self._services.remote, self._services, self._counters)
        self._pools.append(pool)
        return pool

    @property
    def slots(self) -> list[WorkerSlot]:
        """All places of workers."""
        return [slot for pool in self._pools for slot in pool.slots]

    @property
    def connections(self) -> int:
        return sum(pool.connections for pool in self._pools)

    def leave(self, protocol: str | None = None) -> None:
        """The connections of a protocol, or all, go back to TCP, and the workers end."""
        for pool in self._named(protocol):
            pool.leave()

    def settled(self, protocol: str | None = None) -> bool:
        return all(pool.settled for pool in self._named(protocol))

    def handle_disconnect(self, client: Client) -> None:
        for pool in self._pools:
            pool.handle_disconnect(client)

    def pass_new_doorbell(self, hub_id: bytes, new_doorbell: NewDoorbell) -> bool:
        """Gives a doorbell to the worker whose hub it is for; False: there is none."""
        for slot in self.slots:
            running = slot.running
            if running is not None and running.doorbell_id == hub_id != b"":
                record = messages.Announce(
                    new_doorbell.number,
                    new_doorbell.word,
                    new_doorbell.alone,
                    new_doorbell.doorbell_name,
                    new_doorbell.doorbell_index,
                )
                running.ipc.send(record, new_doorbell.fds)
                return True
        return False

    def as_json(self) -> list[dict[str, int]]:
        found = [slot.ready for slot in self.slots]
        return [{"pid": each.process.pid, "connections": len(each.delegated)} for each in found if each is not None]

    def close(self) -> None:
        until = time.monotonic() + limits.WORKER_END_S
        for pool in self._pools:
            pool.stopped = True
        for slot in self.slots:
            slot.close(until)

    def _named(self, protocol: str | None) -> Iterator[WorkerPool]:
        return (pool for pool in self._pools if protocol in (None, pool.carrier.name))


def _known(running: _Process, number: int) -> Delegated:
    delegated = running.delegated.get(number)
    if delegated is None:
        raise PeerViolation(f"end {number} was not lent to it", rule="malformed")
    return delegated


def _ask_to_listen(slot: WorkerSlot, local_addr: bytes) -> None:
    running = slot.running
    if running is not None and local_addr not in running.ports:
        if len(running.ports) >= limits.REMOTE_ADDRESSES_MAX:
            running.ports[local_addr] = 0
            return
        running.ports[local_addr] = None
        running.ipc.send(messages.Listen(local_addr))


def _delegable(end: Outgoing | Incoming) -> Delegable:
    """Ends are the provider's own: it made them."""
    if not hasattr(end, "delegate"):
        raise AssertionError("an end that is not the provider's")
    return end  # type: ignore[return-value]  # as was just looked


def _rows(text: bytes) -> list[Row]:
    """Rows about a worker's connections, as the worker gives them; raises PeerViolation."""
    try:
        rows = [(int(uid), dict(details)) for uid, details in json.loads(text)]
    except (ValueError, TypeError, RecursionError) as error:
        raise PeerViolation(f"connections that cannot be read: {error}", rule="malformed") from error
    return rows
