"""The connection manager of a device of the kernel: rdma_cm, by its event channel.

    here                        rdma_cm, active                          rdma_cm, passive
    connect                     resolve_addr, resolve_route, connect
                                                                         CONNECT_REQUEST -> handler(request)
    check_reply, Established    CONNECT_RESPONSE, establish (IB)         accept -> ESTABLISHED
                                ESTABLISHED (iWARP)

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
from typing import TYPE_CHECKING, Any

from sidestep import limits
from sidestep.errors import Misuse, SidestepError, Unavailable
from sidestep.rdma.cm import PortManager
from sidestep.rdma.kernel import abi
from sidestep.rdma.kernel.abi import RdmaCmEvent
from sidestep.rdma.kernel.connection import KernelConnection, KernelRequest
from sidestep.rdma.kernel.libraries import told
from sidestep.rdma.kernel.notes import CmNote, address_of, copied, sockaddr

if TYPE_CHECKING:
    from sidestep.rdma.cm import ConnectionHandler
    from sidestep.rdma.kernel.device import KernelDevice
    from sidestep.rdma.kernel.qp import KernelQueuePair


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


class KernelManager(PortManager):
    """The connection manager of one device."""

    device: KernelDevice

    def __init__(self, device: KernelDevice) -> None:
        super().__init__(device)
        self.libraries = device.libraries
        self.heard_by: dict[int, KernelConnection | KernelRequest] = {}  # by address of the identifier
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

    # ---- for the connection manager ----

    def make_connection(
        self, qp: KernelQueuePair, remote_address: str, handler: ConnectionHandler,
        check_reply: Callable[[bytes], bool] | None,
    ) -> KernelConnection:  # fmt: skip
        return KernelConnection(self, qp, remote_address, handler, check_reply)

    def check_target(self, address: str, service_id: int) -> str:
        try:
            sockaddr(address, 0)
        except (ValueError, OSError) as error:
            raise Misuse(f"{address!r} is no IP address") from error
        return super().check_target(address, service_id)

    def open_port(self, number: int) -> _Port:
        return _Port(self, number)

    def release(self) -> None:
        """Gives the channel back."""
        self.device.loop.forget(self._fd)
        self.libraries.rdma_destroy_event_channel(self._channel)

    # ---- for connections and requests ----

    def create_id(self) -> Any:
        """A new identifier; raises OSError."""
        identifier = POINTER(abi.CmId)()
        self.libraries.rdma_create_id(self._channel, byref(identifier), None, abi.PS_TCP)
        return identifier

    def destroy(self, identifier: Any) -> None:
        """Gives it back: nothing more is heard of it."""
        self.heard_by.pop(address_of(identifier), None)
        self.libraries.rdma_destroy_id(identifier)

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
        if note.kind == RdmaCmEvent.CONNECT_REQUEST:
            port = next((number for number, each in self._ports.items() if each.address == note.listen_id), 0)
            KernelRequest(self, cast(note.id, POINTER(abi.CmId)), note, port)
        elif (who := self.heard_by.get(note.id)) is not None:
            who.note(note)

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
