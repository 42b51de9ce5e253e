"""The ends on our software RNIC."""

from __future__ import annotations

from typing import Final

from rnic.method import (
    DEVICE_PORT,
    READS,
    RECV_WR,
    REGION,
    SEND_WR,
    SMALL,
    TARGET,
    WINDOW,
    Client,
    NoConnection,
    Replies,
)
from sidestep.rdma.cm import Connection, ConnectionEvent, ConnectionRequest, Disconnected, Established
from sidestep.rdma.iwarp.device import IwarpDevice, IwarpSettings
from sidestep.rdma.iwarp.startup.terms import MpaSettings
from sidestep.rdma.verbs import QpCapabilities
from sidestep.rdma.work import Access, Completion, Opcode, RdmaRead, RdmaWrite, Receive, RKey, Send

_QUEUES: Final = QpCapabilities(
    max_send_wr=SEND_WR, max_recv_wr=RECV_WR, initiator_depth=READS, responder_resources=READS
)


def _device(address: str, *, crc: bool) -> IwarpDevice:
    return IwarpDevice(address, settings=IwarpSettings(startup=MpaSettings(peer_to_peer=True, crc=crc)))


class DeviceServer:
    """Serves any number of clients; whether there is a CRC is up to them."""

    def __init__(self, address: str) -> None:
        self.device = _device(address, crc=False)
        self.device.cm.listen(DEVICE_PORT, self._asked)

    def _asked(self, request: ConnectionRequest) -> None:
        device = self.device
        domain = device.alloc_pd()
        everything = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ
        region = domain.register(bytearray(REGION), everything)
        rooms = domain.register(bytearray(SMALL * WINDOW), Access.LOCAL_WRITE)
        replies = Replies()

        def arrived(batch: list[Completion]) -> None:
            for each in batch:
                if not each.ok or each.opcode is not Opcode.RECEIVE:
                    continue
                room = rooms.view[each.wr_id * SMALL : (each.wr_id + 1) * SMALL]
                if length := replies.length(room[0]):
                    qp.post_send(Send(each.wr_id, (bytes(room[:length]),), signaled=length == SMALL))
                qp.post_recv(Receive(each.wr_id, (room,)))

        queue = device.create_cq(SEND_WR, arrived)
        qp = domain.create_qp(queue, queue, _QUEUES)
        for index in range(WINDOW):
            qp.post_recv(Receive(index, (rooms.view[index * SMALL : (index + 1) * SMALL],)))

        def told(connection: Connection, event: ConnectionEvent) -> None:
            if isinstance(event, Disconnected):
                qp.destroy()
                region.deregister()
                rooms.deregister()

        request.accept(qp, TARGET.pack(region.va, region.rkey), told)

    def run(self) -> None:
        while True:
            self.device.loop.turn()


class DeviceClient(Client):
    """Of a server on our device, or on another one that speaks iWARP."""

    def __init__(self, local: str, remote: str, port: int, *, crc: bool) -> None:
        self.device = _device(local, crc=crc)
        self.domain = self.device.alloc_pd()
        self.queue = self.device.create_cq(SEND_WR)
        self.qp = self.domain.create_qp(self.queue, self.queue, _QUEUES)
        self.region = self.domain.register(bytearray(REGION), Access.LOCAL_WRITE)
        self.rooms = self.domain.register(bytearray(SMALL * WINDOW), Access.LOCAL_WRITE)
        for index in range(WINDOW):
            self._room(index)
        events: list[ConnectionEvent] = []
        self.connection = self.device.cm.connect(remote, port, self.qp, b"", lambda _, event: events.append(event))
        self.device.loop.run_until(lambda: bool(events), 20)
        if not events or not isinstance(events[0], Established):
            self.device.close()
            raise NoConnection(f"to {remote}, port {port}: {events}")
        va, key = TARGET.unpack(events[0].private_data)
        self.va, self.key = va, RKey(key)

    def _room(self, index: int) -> None:
        self.qp.post_recv(Receive(index, (self.rooms.view[index * SMALL : (index + 1) * SMALL],)))

    def write(self, size: int) -> None:
        self.qp.post_send(RdmaWrite(0, (self.region.view[:size],), self.va, self.key))

    def read(self, size: int) -> None:
        self.qp.post_send(RdmaRead(0, (self.region.view[:size],), self.va, self.key))

    def send(self, letter: str, *, signaled: bool) -> None:
        self.qp.post_send(Send(0, (letter.encode() * SMALL,), signaled=signaled))

    def completions(self) -> tuple[int, int]:
        while not (found := self.queue.poll(SEND_WR)):
            self.device.loop.turn()
        arrived = 0
        for each in found:
            if not each.ok:
                raise SystemExit(f"{each.opcode.name} failed: {each.status.name}")
            if each.opcode is Opcode.RECEIVE:
                self._room(each.wr_id)
                arrived += 1
        return len(found) - arrived, arrived

    def close(self) -> None:
        self.connection.disconnect()
        self.device.loop.run_until(lambda: not self.device.cm.connections, 5)
        self.device.close()
