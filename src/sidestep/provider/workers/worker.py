"""``python -m sidestep.provider.workers.worker``: one of a provider's workers, see `workers`.

It has no clients. What it carries, its provider has lent it; when the provider ends, for whatever reason, everything
goes back to TCP and the worker ends.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from ipaddress import IPv6Address
from typing import Any, Final

from sidestep import limits
from sidestep.config import RemoteSettings
from sidestep.counters import Counters
from sidestep.errors import PeerViolation, SidestepError, Unavailable
from sidestep.native import _channel
from sidestep.provider import memory
from sidestep.provider.carry import links
from sidestep.provider.carry import remote_relay as fars
from sidestep.provider.carry.hub import End, Relays
from sidestep.provider.carry.polling import Waiting
from sidestep.provider.carry.remote_relay import Far
from sidestep.provider.carry.services import ProviderServices
from sidestep.provider.proof.lookup import SocketProver, endpoint_of, mapped_address
from sidestep.provider.rpc import Descriptors
from sidestep.provider.workers import messages as worker_wire
from sidestep.provider.workers.ipc import Line
from sidestep.provider.workers.messages import Record
from sidestep.routing import plain_address
from sidestep.switch.link import Link
from sidestep.switch.modules import PROTOCOLS_GROUP, Modules
from sidestep.switch.offers import ConnectionKey
from sidestep.switch.protocol import Awaited, Endpoint, Incoming, OffloadProtocol, Request


class Worker:
    """One worker, at its end of the line."""

    def __init__(self, sock: socket.socket, protocol: str, remote: RemoteSettings) -> None:
        self._selector = selectors.DefaultSelector()
        self._services = ProviderServices(self._selector, time.monotonic, self._tell)
        self.line = Line(sock, self._services, self._heard, self._orphaned)
        self.counters = _Reported(self.line)
        self.prover = SocketProver()
        self.hub = Relays(self._services, self.counters, relays_max=_connections_max(), guarded=self._call)
        self._waiting = Waiting(self._selector, self._services, self.hub)
        self._mapper = Mapper(self.line)
        self._services.remote = remote
        self._services.port_mapper = self._mapper
        self._services.find_end = self._await_end
        self._modules: Modules[OffloadProtocol] = Modules(
            OffloadProtocol,  # type: ignore[type-abstract]  # what must be derived from it, not made
            lambda: {point.name: point for point in entry_points(group=PROTOCOLS_GROUP)},
            self._services, self._on_broken,
        )  # fmt: skip
        self.protocol = protocol
        self._lent: dict[int, LentHere] = {}
        self._sought: dict[int, _Sought] = {}
        self._numbers = 0
        self._leave_until: float | None = None

    def run(self) -> None:
        """Works until everything that depends on it is back on TCP."""
        if self._modules.get(self.protocol) is None:
            raise Unavailable(f"{self.protocol} does not work here")
        self.line.send(worker_wire.Ready(self.hub.doorbell_id), self.hub.descriptors())
        while not self._done:
            self._turn()
        self._modules.stop()
        self.hub.close()
        self.prover.close()
        self._waiting.close()
        self.line.close()
        self._selector.close()

    @property
    def _done(self) -> bool:
        if self._leave_until is None:
            return False
        return self.hub.settled() or self._services.now() >= self._leave_until

    def _turn(self) -> None:
        for key, _ in self._waiting.wait(self._timeout()):
            self._call(key.data)
        self.hub.handle_turn()
        while callback := self._services.poll_due(self._services.now()):
            self._call(callback)
        for driven in self._services.driven_due():
            self._call(lambda driven=driven: driven.turn(0))  # type: ignore[misc]  # a default binds it

    def _timeout(self) -> float | None:
        known = [at for at in (self._services.next_deadline(), self._leave_until) if at is not None]
        return max(0.0, min(known) - self._services.now()) if known else None

    def _call(self, callback: Callable[[], object]) -> None:
        """One connection's fault must not take the others down."""
        try:
            callback()
        except Exception:
            self.counters.add("internal_error", "worker")
            self._tell(traceback.format_exc())

    def _tell(self, text: str) -> None:
        self.line.send(worker_wire.Tell(text.encode()[: limits.WORKER_TEXT_MAX]))

    # ---- the end ----

    def _leave(self) -> None:
        if self._leave_until is None:
            self._leave_until = self._services.now() + limits.RELAY_LEAVE_S
            self.hub.leave()

    def _on_broken(self, _name: str, error: BaseException) -> None:
        """The protocol has failed: nothing can be carried here any more, and the next worker begins anew."""
        self._tell("".join(traceback.format_exception(error)))
        self._leave()

    def _orphaned(self, _why: str) -> None:
        """The provider has ended, or hears nothing any more: nobody tells of clients that go."""
        for lent in self._lent.values():
            lent.client_open = False
        self._mapper.close()
        self.hub.handle_disconnect()
        self._leave()

    # ---- for the protocol ----

    def _await_end(
        self,
        _carrier: OffloadProtocol,
        local: Endpoint,
        remote: Endpoint,
        on_found: Callable[[Incoming], None],
        on_failed: Callable[[str], None],
    ) -> Awaited:
        if self._leave_until is not None:
            raise Unavailable("the provider is going away")
        if len(self._sought) >= limits.REMOTE_SOUGHT_MAX:
            raise Unavailable(f"{limits.REMOTE_SOUGHT_MAX} connections are looked for already")
        self._numbers += 1
        self._sought[self._numbers] = sought = _Sought(self, self._numbers, on_found, on_failed)
        self.line.send(worker_wire.Await(self._numbers, *_ways(local, remote)))
        return sought

    def forget(self, number: int) -> None:
        if self._sought.pop(number, None) is not None:
            self.line.send(worker_wire.Forget(number))

    def over(self, number: int) -> None:
        """That end is not carried any more."""
        if self._lent.pop(number, None) is not None:
            self.line.send(worker_wire.Over(number))

    def refused(self, number: int) -> None:
        """That end gets no link."""
        if self._lent.pop(number, None) is not None:
            self.line.send(worker_wire.Refused(number))

    # ---- what the provider says ----

    def _heard(self, record: Record, descriptors: Descriptors) -> None:
        handler = self._HANDLERS.get(type(record))
        if handler is None:
            raise PeerViolation(f"{type(record).__name__} is not for workers", rule="malformed")
        handler(self, record, descriptors)

    def _on_lend(self, record: worker_wire.Lend, descriptors: Descriptors) -> None:
        segment, doorbell, page = descriptors.numbers
        memory.sealed_size(segment, "segment")
        memory.check_eventfd(doorbell, "doorbell")
        memory.sealed_size(page, "doorbell page")
        lent = LentHere(self, record, descriptors.take())
        self._lent[record.number] = lent
        try:
            self._begin(lent)
        except Unavailable as why:
            lent.refuse(why.message)
        except Exception:
            lent.refuse("the protocol failed")
            raise

    def _begin(self, lent: LentHere) -> None:
        if not lent.record.search:
            protocol = self._modules.get(self.protocol)
            if protocol is None or self._leave_until is not None:
                raise Unavailable("it does not work any more")
            protocol.connect(lent)
            return
        sought = self._sought.pop(lent.record.search, None)
        if sought is not None:
            sought.on_found(lent)
        if lent.far is None:
            lent.refuse("nobody wants it")

    def _on_missing(self, record: worker_wire.Missing, _: Descriptors) -> None:
        if (sought := self._sought.pop(record.search, None)) is not None:
            sought.on_failed("nobody here holds it, or it is idle")

    def _on_drop(self, record: worker_wire.Drop, _: Descriptors) -> None:
        lent = self._lent.get(record.number)
        if lent is not None and lent.far is not None:
            self.hub.drop(lent.far)

    def _on_gone(self, record: worker_wire.Gone, _: Descriptors) -> None:
        for lent in self._lent.values():
            if lent.record.client == record.client:
                lent.client_open = False
        self.hub.handle_disconnect()

    def _on_listen(self, record: worker_wire.Listen, _: Descriptors) -> None:
        port = 0
        protocol = self._modules.get(self.protocol)
        if protocol is not None:
            try:
                port = protocol.port_at(plain_address(IPv6Address(record.local_addr)))
            except SidestepError as why:
                self._tell(f"it cannot be reached: {why}")
        self.line.send(worker_wire.Listens(record.local_addr, port))

    def _on_port(self, record: worker_wire.Port, _: Descriptors) -> None:
        self._mapper.handle_answer(record.number, record.port or None)

    def _on_show(self, record: worker_wire.Show, _: Descriptors) -> None:
        rows, more = links.page(self.hub, record.after)
        self.line.send(worker_wire.Shown(record.number, more, json.dumps(rows).encode()))

    def _on_leave(self, _record: worker_wire.Leave, _: Descriptors) -> None:
        self._leave()

    _HANDLERS: Final[dict[type[Record], Callable[[Worker, Any, Descriptors], None]]] = {
        worker_wire.Lend: _on_lend,
        worker_wire.Missing: _on_missing,
        worker_wire.Drop: _on_drop,
        worker_wire.Gone: _on_gone,
        worker_wire.Listen: _on_listen,
        worker_wire.Port: _on_port,
        worker_wire.Show: _on_show,
        worker_wire.Leave: _on_leave,
    }


class LentHere:
    """An application's end that was lent (`sidestep.switch.protocol.Outgoing` and `Incoming`)."""

    def __init__(self, worker: Worker, record: worker_wire.Lend, descriptors: Descriptors) -> None:
        self._worker = worker
        self.record = record
        self._descriptors = descriptors
        self.client_open = True
        self.wanted = True
        self.far: Far | None = None

    @property
    def request(self) -> Request:
        record = self.record
        return Request(
            endpoint_of(record.local_addr, record.local_port), endpoint_of(record.remote_addr, record.remote_port), None
        )

    def carry(self, link: Link) -> Far:
        if not self.wanted:
            raise Unavailable("the connection does not wait any more")
        worker, record = self._worker, self.record
        key = ConnectionKey(
            record.netns_cookie, record.local_addr, record.local_port, record.remote_addr, record.remote_port
        )
        segment, doorbell, page = self._descriptors.numbers
        try:
            end = End(
                _channel.map(segment, record.side), record.doorbell_name, record.doorbell_index, doorbell, page,
                held=lambda: worker.prover.holds(key, record.cookie),
                received=lambda: worker.prover.received(key, record.cookie), client_open=lambda: self.client_open,
            )  # fmt: skip
        except OSError as error:
            raise Unavailable(f"the channel cannot be mapped: {error.strerror}") from error
        self.far = fars.enter(
            worker.hub, end, protocol=worker.protocol, on_drop=lambda: worker.over(record.number), link=link,
            segment_id=record.segment_id, uid=record.uid,
        )  # fmt: skip
        self._end()
        worker.line.send(worker_wire.Carried(record.number))
        return self.far

    def refuse(self, _why: str) -> None:
        if self.wanted:
            self._end()
            self._worker.refused(self.record.number)

    def _end(self) -> None:
        self.wanted = False
        self._descriptors.close()


@dataclass(slots=True, eq=False)
class _Sought:
    """An accepting end that is looked for (`sidestep.switch.protocol.Awaited`)."""

    worker: Worker
    number: int
    on_found: Callable[[Incoming], None]
    on_failed: Callable[[str], None]

    def cancel(self) -> None:
        self.worker.forget(self.number)


class Mapper:
    """The provider's port mapper, asked by the line (`sidestep.switch.protocol.PortMapper`)."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._asked: dict[int, Callable[[int | None], None]] = {}
        self._numbers = 0

    def ask(self, local: Endpoint, remote: Endpoint, answer: Callable[[int | None], None]) -> None:
        """Calls `answer` with the port for that service there."""
        if not self._line.open or len(self._asked) >= limits.PEERS_WAITING_MAX:
            answer(None)
            return
        self._numbers += 1
        self._asked[self._numbers] = answer
        self._line.send(worker_wire.Ask(self._numbers, *_ways(local, remote)))

    def handle_answer(self, number: int, port: int | None) -> None:
        if (answer := self._asked.pop(number, None)) is not None:
            answer(port)

    def doubt(self, remote: Endpoint, port: int) -> None:
        """Nobody answers at that port."""
        self._line.send(worker_wire.Doubt(mapped_address(str(remote.address)), remote.port, port))

    def close(self) -> None:
        asked, self._asked = self._asked, {}
        for answer in asked.values():
            answer(None)


class _Reported(Counters):
    """Counters that the provider adds up."""

    def __init__(self, line: Line) -> None:
        super().__init__()
        self._line = line

    def add(self, name: str, reason: str = "") -> None:
        """Adds one, here and there."""
        super().add(name, reason)
        self._line.send(worker_wire.Counted(len(name), (name + reason).encode()))


def _ways(local: Endpoint, remote: Endpoint) -> tuple[bytes, int, bytes, int]:
    return mapped_address(str(local.address)), local.port, mapped_address(str(remote.address)), remote.port


def _connections_max() -> int:
    """As many as descriptors allow."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = (1 << 20 if soft == resource.RLIM_INFINITY else soft) - limits.DESCRIPTORS_SPARE
    return max(1, min(limits.RELAYS_MAX, free // limits.RELAY_DESCRIPTORS))


def main() -> int:
    """Works as the arguments say; 0 after an orderly end, 1 if it could not begin."""
    parser = argparse.ArgumentParser(prog="python -m sidestep.provider.workers.worker")
    parser.add_argument("--line-fd", type=int, required=True)
    parser.add_argument("--protocol", required=True)
    parser.add_argument("--remote", required=True)
    parser.add_argument("--remote-key")
    given = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):  # they are for the provider, which tells us
        signal.signal(number, signal.SIG_IGN)
    os.set_inheritable(given.line_fd, False)
    try:
        worker = Worker(
            socket.socket(fileno=given.line_fd), given.protocol, RemoteSettings.parse(given.remote, given.remote_key)
        )
        worker.run()
    except SidestepError as error:
        print(f"sidestep worker: {error}", file=sys.stderr)  # noqa: T201 - nobody else may be there to hear it
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
