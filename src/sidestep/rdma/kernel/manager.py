"""The connection manager of a device of the kernel: rdma_cm, by its event channel.

    here                        rdma_cm, active                          rdma_cm, passive
    connect                     resolve_addr, resolve_route, connect
                                                                         CONNECT_REQUEST -> handler(request)
    check_reply, Established    CONNECT_RESPONSE, establish (IB)         accept -> ESTABLISHED
                                ESTABLISHED (iWARP)

The low 16 bits of a service id are the port, in rdma_cm's TCP port space; the rest is not on the wire, so services of
one port are told apart by matches only. Port 0 is any that is free.

Queue pairs are made before there is a connection, so rdma_cm is told their numbers (`rdma_conn_param.qp_num`) and they
are moved here, by what `rdma_init_qp_attr` says: on InfiniBand and RoCE to RTR and RTS; on iWARP the kernel does it.
An identifier is asked for its error at once: each event is copied and acknowledged before anybody hears of it.

What rdma_cm cannot say: a rejection has no reason but the consumer's. On iWARP a connection exists when its Reply is
here, so one whose `check_reply` fails is made and ended: the other end is told Established and Disconnected.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from ctypes import POINTER, byref, c_void_p, cast
from errno import EACCES, EADDRINUSE, EADDRNOTAVAIL, ENODEV, ENOENT, EPERM
from typing import TYPE_CHECKING, Any, Final

from sidestep import limits
from sidestep.errors import Misuse, SidestepError, Unavailable
from sidestep.rdma.cm import REJECT_INVALID_SERVICE_ID, CmState
from sidestep.rdma.kernel import abi
from sidestep.rdma.kernel.abi import CmKind
from sidestep.rdma.kernel.connection import KernelConnection, KernelRequest
from sidestep.rdma.kernel.libraries import told
from sidestep.rdma.kernel.notes import CmNote, address_of, copied, sockaddr
from sidestep.rdma.kernel.qp import KernelQueuePair
from sidestep.rdma.soft.manager import ListenerTable, SoftListener
from sidestep.rdma.verbs import QpState

if TYPE_CHECKING:
    from sidestep.rdma.cm import ConnectionHandler
    from sidestep.rdma.kernel.device import KernelDevice
    from sidestep.rdma.verbs import QueuePair

_PORT: Final = 0xFFFF


class _Port:
    """A listening identifier."""

    def __init__(self, manager: KernelManager, number: int) -> None:
        self._manager = manager
        self.id = manager.create_id()
        libraries = manager.libraries
        try:
            libraries.rdma_bind_addr(self.id, sockaddr(manager.device.address, number))
            libraries.rdma_listen(self.id, limits.VERBS_BACKLOG)
        except OSError as error:
            libraries.rdma_destroy_id(self.id)
            if error.errno == EADDRINUSE:
                raise Unavailable(
                    f"somebody has port {number} of {manager.device.address} already", remedy="choose another port"
                ) from error
            raise told(error, f"port {number} of {manager.device.address} cannot be listened on") from error
        self.number = socket.ntohs(libraries.rdma_get_src_port(self.id))
        self.address = address_of(self.id)

    def close(self) -> None:
        self._manager.libraries.rdma_destroy_id(self.id)


class KernelManager(ListenerTable):
    """The connection manager of one device."""

    def __init__(self, device: KernelDevice) -> None:
        super().__init__()
        self.device = device
        self.libraries = device.libraries
        self.connections: set[KernelConnection] = set()
        self.requests: set[KernelRequest] = set()  # without an answer
        self.heard_by: dict[int, KernelConnection | KernelRequest] = {}  # by address of the identifier
        self._ports: dict[int, _Port] = {}
        try:
            self._channel: Any = self.libraries.rdma_create_event_channel()
        except OSError as error:
            raise _no_manager(error) from error
        self._fd: int = self._channel.contents.fd
        os.set_blocking(self._fd, False)
        device.loop.on_readable(self._fd, self._read_events)

    def open_context(self) -> tuple[int, int, str]:
        """A context of the RDMA device that has the address, its port, and the device's name; raises Unavailable."""
        address = self.device.address
        identifier = self.create_id()
        try:
            self.libraries.rdma_bind_addr(identifier, sockaddr(address, 0))
            found = identifier.contents
            if not found.verbs:
                raise Unavailable(f"{address} is of no one device", remedy="give an address of one interface")
            info = found.verbs.contents.device
            name = info.contents.name.decode()
            context = self.libraries.ibv_open_device(cast(info, c_void_p))
            return context, found.port_num, name
        except OSError as error:
            raise _no_device(address, error) from error
        finally:
            self.libraries.rdma_destroy_id(identifier)

    # ---- the user's side ----

    def open_service(self, service_id: int) -> int:
        self.device.check_open()
        number = service_id & _PORT
        if number in self._ports:
            return service_id
        port = _Port(self, number)
        self._ports[port.number] = port
        return service_id & ~_PORT | port.number

    def connect(
        self,
        address: str,
        service_id: int,
        qp: QueuePair,
        private_data: bytes,
        handler: ConnectionHandler,
        *,
        check_reply: Callable[[bytes], bool] | None = None,
    ) -> KernelConnection:
        self.device.check_open()
        self.check_private_data(private_data, self.device.attributes.request_private_data_max)
        port = service_id & _PORT
        if not port:
            raise Misuse(f"service id {service_id:#x} names no port", remedy="its low 16 bits are the port")
        try:
            there = sockaddr(address, port)
        except (ValueError, OSError) as error:
            raise Misuse(f"{address!r} is no IP address") from error
        own = self.check_qp(qp)
        connection = KernelConnection(self, own, address, handler, CmState.REQUEST_SENT)
        connection.ask(there, private_data, check_reply)
        return connection

    def listener_closed(self, listener: SoftListener) -> None:
        super().listener_closed(listener)
        number = listener.service_id & _PORT
        if not any(each.service_id & _PORT == number for each in self.listeners):
            self._ports.pop(number).close()

    @property
    def ports(self) -> list[int]:
        return sorted(self._ports)

    def end_connections(self) -> None:
        """Ends everything, without waiting for anybody."""
        for listener in list(self.listeners):
            listener.close()
        for request in list(self.requests):
            request.drop()
        for connection in list(self.connections):
            connection.drop()

    def close(self) -> None:
        """Gives the channel back."""
        self.device.loop.forget(self._fd)
        self.libraries.rdma_destroy_event_channel(self._channel)

    # ---- for connections and requests ----

    def create_id(self) -> Any:
        """A new identifier; raises OSError."""
        identifier = POINTER(abi.CmId)()
        self.libraries.rdma_create_id(self._channel, byref(identifier), None, abi.PS_TCP)
        return identifier

    def check_qp(self, qp: QueuePair) -> KernelQueuePair:
        """A queue pair that can be connected; raises Misuse."""
        if not isinstance(qp, KernelQueuePair) or qp.device is not self.device:
            raise Misuse("a queue pair of another device")
        if qp.state is not QpState.INIT or qp.connection is not None:
            raise Misuse(f"a queue pair in {qp.state.name} that was used before cannot be connected")
        return qp

    def find(self, port: int, private_data: bytes) -> SoftListener | int:
        """Whom a request is for, whatever the high bits of his service id are."""
        reason = REJECT_INVALID_SERVICE_ID
        for service_id in {each.service_id: None for each in self.listeners if each.service_id & _PORT == port}:
            found = self.find_listener(service_id, private_data)
            if isinstance(found, SoftListener):
                return found
            reason = found
        return reason

    # ---- the channel's side ----

    def _read_events(self) -> None:
        while not self.device.closed:
            event = POINTER(abi.CmEvent)()
            try:
                self.libraries.rdma_get_cm_event(self._channel, byref(event))
            except OSError:  # EAGAIN
                return
            note = copied(event.contents)
            self.libraries.rdma_ack_cm_event(event)
            self._note(note)

    def _note(self, note: CmNote) -> None:
        if note.kind == CmKind.CONNECT_REQUEST:
            self._requested(note)
        elif (who := self.heard_by.get(note.id)) is not None:
            who.note(note)

    def _requested(self, note: CmNote) -> None:
        port = next((each.number for each in self._ports.values() if each.address == note.listen_id), 0)
        identifier = cast(note.id, POINTER(abi.CmId))
        listener = self.find(port, note.private_data)
        if isinstance(listener, int):
            self.reject(identifier, b"")
            self.libraries.rdma_destroy_id(identifier)
            return
        KernelRequest(self, identifier, note, listener)

    def reject(self, identifier: Any, private_data: bytes) -> None:
        """Says no, if the other end still listens."""
        try:
            self.libraries.rdma_reject(identifier, private_data, len(private_data))
        except OSError as error:
            self.device.log.debug("a rejection could not be sent: %s", error)


def _no_manager(error: OSError) -> SidestepError:
    if error.errno in (ENOENT, ENODEV):
        return Unavailable("the kernel has no RDMA connection manager", remedy="load the module rdma_ucm")
    if error.errno in (EACCES, EPERM):
        return Unavailable(
            "the RDMA connection manager may not be used", remedy="open /dev/infiniband/rdma_cm to this user"
        )
    return told(error, "the RDMA connection manager cannot be used")


def _no_device(address: str, error: OSError) -> SidestepError:
    if error.errno == EADDRNOTAVAIL:
        return Unavailable(f"{address} is no address of this host", remedy="'ip address' shows them")
    if error.errno == ENODEV:
        return Unavailable(f"no RDMA device has the address {address}", remedy="'sidestep rdma list' shows the devices")
    return told(error, f"the RDMA device of {address} cannot be opened")
