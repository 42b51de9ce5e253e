"""``python -m sidestep.provider.workers.worker``: one of a provider's workers, see `pool`.

It has no clients: its provider lends it all connections. When the provider ends, for any reason, everything goes back
to TCP and the worker ends.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from functools import partial
from ipaddress import IPv6Address
from itertools import count
from typing import Any, Final

from sidestep import gain, limits
from sidestep.counters import Counters
from sidestep.errors import PeerViolation, SidestepError, Unavailable
from sidestep.gain import Profile
from sidestep.loop import Loop
from sidestep.native import _channel
from sidestep.provider import memory
from sidestep.provider.carry import remote_relay
from sidestep.provider.carry.hub import End, Hub, NewDoorbell
from sidestep.provider.carry.lending import made
from sidestep.provider.carry.polling import Waiting
from sidestep.provider.carry.remote_relay import RemoteRelay
from sidestep.provider.proof.lookup import SocketProver, endpoint_of, mapped_address
from sidestep.provider.rpc import Descriptors
from sidestep.provider.workers import messages
from sidestep.provider.workers.ipc import IpcChannel
from sidestep.provider.workers.messages import Record
from sidestep.routing import Route, plain_address
from sidestep.settings import RemoteSettings, parse_cpus
from sidestep.switch.link import Link
from sidestep.switch.modules import PROTOCOLS_GROUP, Modules, installed
from sidestep.switch.offers import ConnectionKey
from sidestep.switch.protocol import Endpoint, Incoming, OffloadProtocol, Request, Services
from sidestep.switch.transports import TRANSPORTS_GROUP, Transports


class Worker:
    """One worker, at its end of the line."""

    def __init__(self, sock: socket.socket, protocol: str, remote: RemoteSettings) -> None:
        self.loop = Loop(self._failed)
        self.ipc = IpcChannel(sock, self.loop, self._handle_record, self._orphaned)
        self.counters = _Reported(self.ipc)
        self.prover = SocketProver()
        self.hub = Hub(self.loop, self.counters, relays_max=_connections_max(), engine=made(remote))
        self._waiting = Waiting(self.loop, self.hub)
        self._mapper = Mapper(self.ipc)
        services = Services(loop=self.loop, log=self._tell, remote=remote, port_mapper=self._mapper)
        services.await_end = self._await_end
        services.transports = self._transports = Transports(
            partial(installed, TRANSPORTS_GROUP), services, self._on_broken, order=remote.transports, route=_no_route,
            on_stopped=lambda _name: self._leave(),
        )  # fmt: skip
        self._modules: Modules[OffloadProtocol] = Modules(
            OffloadProtocol,  # type: ignore[type-abstract]  # a base class, never instantiated
            partial(installed, PROTOCOLS_GROUP), services, self._on_broken,
        )  # fmt: skip
        self.protocol = protocol
        self._delegated: dict[int, DelegatedHere] = {}
        self._sought: dict[int, tuple[Callable[[Incoming], None], Callable[[str], None]]] = {}  # found, and failed
        self._numbers = count(1)
        self._leave_until: float | None = None

    def run(self) -> None:
        """Works until everything that depends on it is back on TCP."""
        if self._modules.get(self.protocol) is None:
            raise Unavailable(f"{self.protocol} does not work here")
        self.ipc.send(messages.Ready(self.hub.doorbell_id), self.hub.descriptors())
        while not self._done:
            self._turn()
        self._modules.stop()
        self._transports.stop()
        self.hub.close()
        self.prover.close()
        self._waiting.close()
        self.ipc.close()
        self.loop.close()

    @property
    def _done(self) -> bool:
        if self._leave_until is None:
            return False
        return self.hub.settled() or self.loop.now >= self._leave_until

    def _turn(self) -> None:
        left_s = None if self._leave_until is None else max(0.0, self._leave_until - self.loop.now)
        self.loop.run(self._waiting.wait(left_s))
        self.hub.handle_turn()

    def _failed(self, error: Exception) -> None:
        """One connection's fault must not take the others down."""
        self.counters.add("internal_error", "worker")
        self._tell("".join(traceback.format_exception(error)))

    def _tell(self, text: str) -> None:
        self.ipc.send(messages.Tell(text.encode()[: limits.WORKER_TEXT_MAX]))

    # ---- the end ----

    def _leave(self) -> None:
        if self._leave_until is None:
            self._leave_until = self.loop.now + limits.RELAY_LEAVE_S
            self.hub.leave()

    def _on_broken(self, _name: str, error: BaseException) -> None:
        """The protocol has failed: nothing can be carried here any more, and the next worker begins anew."""
        self._tell("".join(traceback.format_exception(error)))
        self._leave()

    def _orphaned(self, _why: str) -> None:
        """Leaves, as the provider has ended or cannot be reached: no message would report clients that go."""
        for delegated in self._delegated.values():
            delegated.client_open = False
        self._mapper.close()
        self.hub.handle_disconnect()
        self._leave()

    # ---- for the protocol ----

    def _await_end(
        self,
        _carrier: OffloadProtocol,
        transport: str,
        local: Endpoint,
        remote: Endpoint,
        on_found: Callable[[Incoming], None],
        on_failed: Callable[[str], None],
    ) -> Callable[[], object]:
        if self._leave_until is not None:
            raise Unavailable("the provider is going away")
        if len(self._sought) >= limits.REMOTE_SOUGHT_MAX:
            raise Unavailable(f"{limits.REMOTE_SOUGHT_MAX} connections are looked for already")
        number = next(self._numbers)
        self._sought[number] = on_found, on_failed
        self.ipc.send(messages.Await(number, *_ways(local, remote), transport.encode()))
        return partial(self._forget, number)

    def _forget(self, number: int) -> None:
        if self._sought.pop(number, None) is not None:
            self.ipc.send(messages.Forget(number))

    def over(self, number: int) -> None:
        """That end is not carried any more."""
        if self._delegated.pop(number, None) is not None:
            self.ipc.send(messages.Over(number))

    def refused(self, number: int) -> None:
        """That end gets no link."""
        if self._delegated.pop(number, None) is not None:
            self.ipc.send(messages.Refused(number))

    # ---- messages of the provider ----

    def _handle_record(self, record: Record, descriptors: Descriptors) -> None:
        handler = self._HANDLERS.get(type(record))
        if handler is None:
            raise PeerViolation(f"{type(record).__name__} is not for workers", rule="malformed")
        handler(self, record, descriptors)

    def _on_delegate(self, record: messages.Delegate, descriptors: Descriptors) -> None:
        segment, doorbell, page = descriptors.numbers
        memory.sealed_size(segment, "segment")
        memory.check_eventfd(doorbell, "doorbell")
        memory.sealed_size(page, "doorbell page")
        delegated = DelegatedHere(self, record, descriptors.take())
        self._delegated[record.number] = delegated
        try:
            self._begin(delegated)
        except Unavailable as why:
            delegated.refuse(why.message)
        except Exception:
            delegated.refuse("the protocol failed")
            raise

    def _begin(self, delegated: DelegatedHere) -> None:
        if not delegated.record.search:
            protocol = self._modules.get(self.protocol)
            if protocol is None or self._leave_until is not None:
                raise Unavailable("it does not work any more")
            protocol.connect(delegated)
            return
        sought = self._sought.pop(delegated.record.search, None)
        if sought is not None:
            sought[0](delegated)
        if delegated.relay is None:
            delegated.refuse("nobody wants it")

    def _on_announce(self, record: messages.Announce, descriptors: Descriptors) -> None:
        doorbell, page = descriptors.numbers
        memory.check_doorbell(record.doorbell_index, doorbell, page)
        name, index = record.doorbell_name, record.doorbell_index
        self.hub.handle_new_doorbell(NewDoorbell(record.side, record.word, record.alone, name, index, (doorbell, page)))

    def _on_missing(self, record: messages.Missing, _: Descriptors) -> None:
        if (sought := self._sought.pop(record.search, None)) is not None:
            sought[1]("nobody here holds it, or it is idle")

    def _on_drop(self, record: messages.Drop, _: Descriptors) -> None:
        delegated = self._delegated.get(record.number)
        if delegated is not None and delegated.relay is not None:
            self.hub.drop(delegated.relay)

    def _on_gone(self, record: messages.Gone, _: Descriptors) -> None:
        for delegated in self._delegated.values():
            if delegated.record.client == record.client:
                delegated.client_open = False
        self.hub.handle_disconnect()

    def _on_listen(self, record: messages.Listen, _: Descriptors) -> None:
        port = 0
        protocol = self._modules.get(self.protocol)
        if protocol is not None:
            try:
                port = protocol.port_at(plain_address(IPv6Address(record.local_addr)))
            except SidestepError as why:
                self._tell(f"it cannot be reached: {why}")
        self.ipc.send(messages.Listens(record.local_addr, port))

    def _on_port(self, record: messages.Port, _: Descriptors) -> None:
        self._mapper.handle_answer(record.number, record.port or None)

    def _on_show(self, record: messages.Show, _: Descriptors) -> None:
        rows, more = self.hub.links(record.after)
        self.ipc.send(messages.Shown(record.number, more, json.dumps(rows).encode()))

    def _on_leave(self, _record: messages.Leave, _: Descriptors) -> None:
        self._leave()

    _HANDLERS: Final[dict[type[Record], Callable[[Worker, Any, Descriptors], None]]] = {
        messages.Delegate: _on_delegate,
        messages.Announce: _on_announce,
        messages.Missing: _on_missing,
        messages.Drop: _on_drop,
        messages.Gone: _on_gone,
        messages.Listen: _on_listen,
        messages.Port: _on_port,
        messages.Show: _on_show,
        messages.Leave: _on_leave,
    }


class DelegatedHere:
    """An application's end that was lent (`sidestep.switch.protocol.Outgoing` and `Incoming`)."""

    def __init__(self, worker: Worker, record: messages.Delegate, descriptors: Descriptors) -> None:
        self._worker = worker
        self.record = record
        self._descriptors = descriptors
        self.client_open = True
        self.wanted = True
        self.relay: RemoteRelay | None = None

    @property
    def request(self) -> Request:
        record = self.record
        return Request(
            endpoint_of(record.local_addr, record.local_port), endpoint_of(record.remote_addr, record.remote_port), None
        )

    def carry(self, link: Link, profile: Profile | None = None) -> RemoteRelay:  # the provider has answered already
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
        self.relay = remote_relay.enter(
            worker.hub, end, protocol=worker.protocol, on_drop=lambda: worker.over(record.number), link=link,
            segment_id=record.segment_id, uid=record.uid,
        )  # fmt: skip
        self._end()
        worker.ipc.send(messages.Carried(record.number))
        return self.relay

    @property
    def uid(self) -> int:
        return self.record.uid

    def refuse(self, _why: str, *, full: bool = False) -> None:
        if self.wanted:
            self._end()
            self._worker.refused(self.record.number)

    def _end(self) -> None:
        self.wanted = False
        self._descriptors.close()


class Mapper:
    """The provider's port mapper, asked by the line (`sidestep.switch.protocol.PortMapper`)."""

    def __init__(self, ipc: IpcChannel) -> None:
        self._ipc = ipc
        self._asked: dict[int, Callable[[int | None], None]] = {}
        self._numbers = count(1)

    def ask(self, local: Endpoint, remote: Endpoint, answer: Callable[[int | None], None]) -> None:
        """Calls `answer` with the port for that service there."""
        if not self._ipc.open or len(self._asked) >= limits.PEERS_WAITING_MAX:
            answer(None)
            return
        number = next(self._numbers)
        self._asked[number] = answer
        self._ipc.send(messages.Ask(number, *_ways(local, remote)))

    def handle_answer(self, number: int, port: int | None) -> None:
        if (answer := self._asked.pop(number, None)) is not None:
            answer(port)

    def doubt(self, remote: Endpoint, port: int) -> None:
        """Reports that no host answers at that port."""
        self._ipc.send(messages.Doubt(mapped_address(str(remote.address)), remote.port, port))

    def close(self) -> None:
        asked, self._asked = self._asked, {}
        for answer in asked.values():
            answer(None)


class _Reported(Counters):
    """Counters that the provider adds up."""

    def __init__(self, ipc: IpcChannel) -> None:
        super().__init__()
        self._ipc = ipc

    def add(self, name: str, reason: str = "") -> None:
        """Adds one, here and there."""
        super().add(name, reason)
        self._ipc.send(messages.Counted(len(name), (name + reason).encode()))


def _no_route(*_to: object, **_how: object) -> Route:
    """A worker does not follow the network."""
    raise Unavailable("it needs a route, which a worker does not know")


def _ways(local: Endpoint, remote: Endpoint) -> tuple[bytes, int, bytes, int]:
    return mapped_address(str(local.address)), local.port, mapped_address(str(remote.address)), remote.port


def _connections_max() -> int:
    """Number of connections that descriptors allow."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = (1 << 20 if soft == resource.RLIM_INFINITY else soft) - limits.DESCRIPTORS_SPARE
    return max(1, min(limits.RELAYS_MAX, free // limits.RELAY_DESCRIPTORS))


def main() -> int:
    """Works as the arguments say; 0 after an orderly end, 1 if it could not begin."""
    parser = argparse.ArgumentParser(prog="python -m sidestep.provider.workers.worker")
    parser.add_argument("--ipc-fd", type=int, required=True)
    parser.add_argument("--protocol", required=True)
    parser.add_argument("--remote", required=True)
    parser.add_argument("--remote-key")
    parser.add_argument("--engine", choices=("on", "off"), default="on")
    parser.add_argument("--remote-promote", default=gain.ALWAYS)
    parser.add_argument("--remote-transports", default="")
    parser.add_argument("--remote-pinned", type=int, default=limits.REMOTE_PINNED_BYTES)
    parser.add_argument("--remote-connections", type=int, default=limits.RELAYS_MAX)
    parser.add_argument("--engine-cpu", type=parse_cpus, default=())
    given = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):  # signals for the provider, which orders us to leave
        signal.signal(number, signal.SIG_IGN)
    os.set_inheritable(given.ipc_fd, False)
    try:
        remote = RemoteSettings.parse(
            given.remote,
            given.remote_key,
            engine=given.engine == "on",
            engine_cpus=given.engine_cpu,
            promote=given.remote_promote,
            transports=given.remote_transports,
            pinned_max=given.remote_pinned,
            connections_max=given.remote_connections,
        )
        worker = Worker(socket.socket(fileno=given.ipc_fd), given.protocol, remote)
        worker.run()
    except SidestepError as error:
        print(f"sidestep worker: {error}", file=sys.stderr)  # noqa: T201 - the provider may be gone
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
