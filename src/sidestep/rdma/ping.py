"""Pings over RDMA: what `rping` of rdma-core does, on any device and with rping itself at the other end.

    client                                          server
    Send: where the text is                     ->
                                                <-  RDMA Read of the text
                                                <-  Send: go on
    Send: where it may be written               ->
                                                <-  RDMA Write of the text
                                                <-  Send: done

A round uses Send, Read and Write once each way, and the client compares what it wrote with what came back. Each Send
has 16 bytes; those of the server mean nothing. The text ends with a zero byte, as rping's server takes it for one of
C's. Both sides are driven by whatever drives the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from struct import Struct
from typing import TYPE_CHECKING, ClassVar, Final, Self

from sidestep.errors import Misuse
from sidestep.rdma.cm import Disconnected, Established, Rejected, TimewaitExit, Unreachable
from sidestep.rdma.verbs import QpCapabilities
from sidestep.rdma.work import Access, Opcode, RdmaRead, RdmaWrite, Receive, RKey, Send, Status

if TYPE_CHECKING:
    from sidestep.rdma.cm import Connection, ConnectionEvent, ConnectionRequest, Listener
    from sidestep.rdma.verbs import AsyncEvent, Device
    from sidestep.rdma.work import Completion

TEXT_MAX: Final = 1 << 30  # bytes; a server that is told of more ends the connection
_CLIENTS_MAX: Final = 256  # of a server; the next one is refused
_ERRORS_MAX: Final = 16
_PREFIX: Final = "rdma-ping-{}: "
_FIRST, _LAST = ord("A"), ord("z")
_CAPABILITIES: Final = QpCapabilities(max_send_wr=8, max_recv_wr=2, initiator_depth=1, responder_resources=1)
_REMOTE: Final = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE


@dataclass(frozen=True, slots=True)
class Advertisement:
    """Memory that the other side may use."""

    va: int
    rkey: int
    length: int  # bytes

    _LAYOUT: ClassVar[Struct] = Struct("!QII")
    LENGTH: ClassVar[int] = 16

    def encode(self) -> bytes:
        """Its 16 bytes."""
        return self._LAYOUT.pack(self.va, self.rkey, self.length)

    @classmethod
    def decode(cls, payload: bytes | memoryview) -> Self | None:
        """Read it; None if it is none."""
        return cls(*cls._LAYOUT.unpack(payload)) if len(payload) == cls.LENGTH else None


def text_of(number: int, size: int) -> bytes:
    """What a client sends in that round: different in each, `size` bytes, the last one zero."""
    prefix = _PREFIX.format(number).encode()[: size - 1]
    letters = bytes(range(_FIRST, _LAST + 1))
    start = number % len(letters)
    filler = (letters[start:] + letters[:start]) * (size // len(letters) + 1)
    return prefix + filler[: size - 1 - len(prefix)] + b"\0"


class _Side:
    """One queue pair, and how it has ended."""

    def __init__(self, device: Device, size: int) -> None:
        self.device = device
        self.ended = False
        self.error = ""  # why it failed; empty after an orderly end
        self.rounds_done = 0
        self.connection: Connection | None = None
        self._domain = device.alloc_pd()
        self._cq = device.create_cq(64, self._completed)
        self.qp = self._domain.create_qp(self._cq, self._cq, _CAPABILITIES, on_event=self._happened)
        self._text = self._domain.register(bytearray(size), _REMOTE)
        self._inbox = self._domain.register(bytearray(Advertisement.LENGTH), Access.LOCAL_WRITE)
        self._post_receive()

    def close(self) -> None:
        """Gives everything back; a connection that is still there is reset."""
        self.ended = True
        self.qp.destroy()
        self._text.deregister()
        self._inbox.deregister()
        self._cq.destroy()
        self._domain.deallocate()

    def connection_event(self, connection: Connection, event: ConnectionEvent) -> None:
        """What the connection manager tells."""
        self.connection = connection
        match event:
            case Established():
                self._established()
            case Rejected():
                self._note(f"the other end said no ({event.reason})")
                self.ended = True
            case Unreachable():
                self._note("the other end does not answer")
                self.ended = True
            case Disconnected():
                if not event.confirmed:
                    self._note("the connection broke")
                self.ended = True
            case TimewaitExit():
                pass

    def _established(self) -> None:
        """The first round may begin."""

    def _told(self, advertised: Advertisement) -> None:
        raise NotImplementedError

    def _done(self, opcode: Opcode) -> None:
        """A request of ours other than a Send is done."""

    def _completed(self, batch: list[Completion]) -> None:
        for each in batch:
            if self.error or each.status is Status.FLUSHED:
                continue  # it is over, and there is a reason or needs none
            if not each.ok:
                self._fail(f"{each.opcode.name} ended with {each.status.name}")
            elif each.opcode is not Opcode.RECEIVE:
                self._done(each.opcode)
            elif (advertised := Advertisement.decode(self._inbox.view[: each.byte_len])) is None:
                self._fail(f"a message of {each.byte_len} bytes")
            else:
                self._post_receive()
                self._told(advertised)

    def _happened(self, event: AsyncEvent) -> None:
        self._note(f"{event.kind.name}: {event.why}")

    def _note(self, why: str) -> None:
        """The first reason counts."""
        self.error = self.error or why

    def _fail(self, why: str) -> None:
        self._note(why)
        if self.connection is not None:
            self.connection.disconnect()

    def _post_receive(self) -> None:
        self.qp.post_recv(Receive(0, (self._inbox.view,)))

    def _send(self, advertised: Advertisement) -> None:
        self.qp.post_send(Send(0, (advertised.encode(),)))


class PingClient(_Side):
    """Makes so many rounds and disconnects.

    Args:
        device: The one to use.
        address: Of the server.
        service_id: On which the server listens.
        rounds: How many.
        size: Bytes of the text, 2 at least.
        on_round: Called after each with its number, from 0.
    """

    def __init__(
        self,
        device: Device,
        address: str,
        service_id: int,
        *,
        rounds: int = 1,
        size: int = 64,
        on_round: Callable[[int], object] | None = None,
    ) -> None:
        if size < 2 or rounds < 1:
            raise Misuse(f"{rounds} rounds of {size} bytes", remedy="at least one round of two bytes")
        super().__init__(device, size)
        self._rounds = rounds
        self._size = size
        self._on_round = on_round
        self._sink = self._domain.register(bytearray(size), _REMOTE)
        self._written = False  # whether the server has been told where to write
        self.connection = device.cm.connect(address, service_id, self.qp, b"", self.connection_event)

    def close(self) -> None:
        """Gives everything back."""
        self._sink.deregister()
        super().close()

    def _established(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._written = False
        self._text.view[:] = text_of(self.rounds_done, self._size)
        self._send(Advertisement(self._text.va, self._text.rkey, self._size))

    def _told(self, advertised: Advertisement) -> None:
        if not self._written:
            self._written = True
            self._sink.view[:] = bytes(self._size)
            self._send(Advertisement(self._sink.va, self._sink.rkey, self._size))
            return
        if self._sink.view != self._text.view:
            self._fail(f"what came back in round {self.rounds_done} is not what was sent")
            return
        if self._on_round is not None:
            self._on_round(self.rounds_done)
        self.rounds_done += 1
        if self.rounds_done < self._rounds:
            self._begin()
        else:
            assert self.connection is not None
            self.connection.disconnect()


class _Served(_Side):
    """One client of a server."""

    def __init__(self, server: PingServer, request: ConnectionRequest) -> None:
        super().__init__(server.device, server.size_max)
        self._server = server
        self._told_length: int | None = None  # bytes of the text that was read
        self.connection = request.accept(self.qp, b"", self.connection_event)

    def _told(self, advertised: Advertisement) -> None:
        if self._told_length is None:
            if not 0 < advertised.length <= self._text.length:
                self._fail(f"a text of {advertised.length} bytes; {self._text.length} have room")
                return
            self._told_length = advertised.length
            into = self._text.view[: advertised.length]
            self.qp.post_send(RdmaRead(0, (into,), advertised.va, RKey(advertised.rkey)))
        elif advertised.length < self._told_length:
            self._fail(f"{self._told_length} bytes are to be written and {advertised.length} have room")
        else:
            text = self._text.view[: self._told_length]
            self.qp.post_send(RdmaWrite(0, (text,), advertised.va, RKey(advertised.rkey)))

    def _done(self, opcode: Opcode) -> None:
        if opcode is Opcode.SEND:
            return
        if opcode is Opcode.RDMA_READ:
            self._server.read(bytes(self._text.view[: self._told_length]))
        else:
            self._told_length = None
            self.rounds_done += 1
        self._send(Advertisement(0, 0, 0))


class PingServer:
    """Answers clients, any number at a time.

    Args:
        device: The one to use.
        service_id: On which to listen; `service_id` of the server says which it was if any would do.
        size_max: Bytes of the longest text.
        on_text: Called with each text.
    """

    def __init__(
        self,
        device: Device,
        service_id: int,
        *,
        size_max: int = 1 << 20,
        on_text: Callable[[bytes], object] | None = None,
    ) -> None:
        if not 0 < size_max <= TEXT_MAX:
            raise Misuse(f"texts of {size_max} bytes", remedy=f"1 to {TEXT_MAX}")
        self.device = device
        self.size_max = size_max
        self._on_text = on_text
        self._clients: list[_Served] = []
        self._left = 0  # rounds of clients that were closed
        self.errors: list[str] = []  # of those, the last ones
        self._listener: Listener = device.cm.listen(service_id, self._asked)
        self.service_id = self._listener.service_id

    @property
    def rounds_done(self) -> int:
        """Of all clients."""
        return self._left + sum(client.rounds_done for client in self._clients)

    @property
    def clients(self) -> int:
        """That are connected."""
        return sum(not client.ended for client in self._clients)

    def read(self, text: bytes) -> None:
        """A client's text is here."""
        if self._on_text is not None:
            self._on_text(text)

    def reap(self) -> None:
        """Gives back what clients had that have left."""
        for client in [client for client in self._clients if client.ended]:
            self._remove(client)

    def close(self) -> None:
        """Ends everything."""
        self._listener.close()
        for client in list(self._clients):
            self._remove(client)

    def _remove(self, client: _Served) -> None:
        self._clients.remove(client)
        client.close()
        self._left += client.rounds_done
        if client.error:
            self.errors = [*self.errors, client.error][-_ERRORS_MAX:]

    def _asked(self, request: ConnectionRequest) -> None:
        self.reap()
        if len(self._clients) < _CLIENTS_MAX:
            self._clients.append(_Served(self, request))
        else:
            request.reject()
