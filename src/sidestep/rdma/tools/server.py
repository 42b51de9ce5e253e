"""The side that is asked: serves ping, bandwidth and rping, several clients at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeAlias

from sidestep import limits
from sidestep.errors import LimitReached, PeerViolation, SidestepError
from sidestep.rdma.cm import Connection, ConnectionEvent, ConnectionRequest, Established
from sidestep.rdma.tools.bandwidth import Bandwidth
from sidestep.rdma.tools.rping import Rping
from sidestep.rdma.tools.talk import Echo
from sidestep.rdma.tools.terms import Op, Terms, speaks

if TYPE_CHECKING:
    from sidestep.loop import Loop
    from sidestep.rdma.cm import Listener
    from sidestep.rdma.verbs import Device

Served: TypeAlias = Echo | Bandwidth | Rping
_BUSY: Final = f"{limits.RDMA_TOOL_CLIENTS_MAX} clients are served already".encode()


class ToolServer:
    """Listens at one device.

    Args:
        device: Any.
        loop: What drives it.
        service_id: Its low 16 bits are a port; 0 for any that is free, see `port`.
        log: Gets a line for each client that comes or goes.
    """

    def __init__(self, device: Device, loop: Loop, service_id: int, log: Callable[[str], object]) -> None:
        self._device = device
        self._loop = loop
        self._log = log
        self._served: set[Served] = set()
        self.listener: Listener = device.cm.listen(service_id, self._requested)

    @property
    def port(self) -> int:
        return self.listener.service_id & 0xFFFF

    def close(self) -> None:
        self.listener.close()
        for talk in list(self._served):
            self._end(talk, "the server ends")

    def _requested(self, request: ConnectionRequest) -> None:
        if len(self._served) >= limits.RDMA_TOOL_CLIENTS_MAX:
            request.reject(private_data=_BUSY)
            return
        try:
            self._check_memory(request)
            talk, reply = self._talk(request)
        except PeerViolation as error:
            self._log(f"{request.remote_address}: rejected: {error.message}")
            request.reject(private_data=error.message.encode())
            return
        except (SidestepError, MemoryError) as error:  # of this end: memory, keys
            why = error.message if isinstance(error, SidestepError) else "no memory"
            self._log(f"{request.remote_address}: rejected: {why}")
            request.reject(private_data=b"the server has no room")
            return
        self._served.add(talk)

        def handle(connection: Connection, event: ConnectionEvent) -> None:
            del connection
            if isinstance(event, Established):
                self._log(f"{request.remote_address}: {_name(talk)}")
                if isinstance(talk, Bandwidth):
                    talk.begin(asked_terms(request))
            else:
                self._end(talk, "")

        talk.connection = request.accept(talk.qp, reply, handle)

    def _check_memory(self, request: ConnectionRequest) -> None:
        """Raises LimitReached if there would be too much."""
        wanted = asked_terms(request).memory_len if speaks(request.private_data) else limits.RDMA_TOOL_MESSAGE_MAX
        taken = sum(
            limits.RDMA_TOOL_MESSAGE_MAX if isinstance(talk, Rping) else talk.terms.memory_len for talk in self._served
        )
        if taken + wanted > limits.RDMA_TOOL_SERVER_MEMORY_MAX:
            raise LimitReached(f"{taken} bytes are in use, and {wanted} wanted")

    def _talk(self, request: ConnectionRequest) -> tuple[Served, bytes]:
        def failed(why: str) -> None:
            self._loop.soon(lambda: self._end(talk, why))

        talk: Served
        if not speaks(request.private_data):
            talk = Rping(self._device, failed)
            return talk, b""
        asked = asked_terms(request)
        if asked.op is Op.PING:
            talk = Echo(self._device, asked, failed)
            return talk, asked.encode()
        talk = Bandwidth(self._device, asked, failed, active=False)
        return talk, replace(asked, rkey=talk.terms.rkey, va=talk.terms.va).encode()

    def _end(self, talk: Served, why: str) -> None:
        if talk not in self._served:
            return
        self._served.discard(talk)
        messages = talk.back.messages if isinstance(talk, Bandwidth) else talk.messages
        where = talk.connection.remote_address if talk.connection is not None else "somebody"
        self._log(f"{where}: {_name(talk)} has ended, {messages} messages{': ' + why if why else ''}")
        talk.close()


def asked_terms(request: ConnectionRequest) -> Terms:
    """What a client asks for; raises PeerViolation."""
    return Terms.decode(request.private_data)


def _name(talk: Served) -> str:
    if isinstance(talk, Rping):
        return "rping"
    terms = talk.terms
    return f"{terms.op.name.lower()}, {terms.size} bytes, {terms.depth} at a time{', both ways' if terms.both else ''}"
