"""A conversation over the loopback device in virtual time, by sockets and by streams (docs/internals/sdp.md)."""

from __future__ import annotations

import asyncio
from random import Random

from virtual_time import LoopbackPump, OneHost, VirtualTime

from sidestep.api.sockets import MSG_WAITALL, SdpSocket
from sidestep.api.streams import SdpReader, SdpWriter, open_connection, start_server
from sidestep.rdma.loopback import Fabric
from sidestep.sdp.host import Host
from sidestep.sdp.stack import stack_on


def test_sockets() -> None:
    fabric = Fabric(Random(1))
    driver = VirtualTime(fabric)
    left, right = (OneHost(Host(stack_on(fabric, fabric.device(ip)), [ip])) for ip in ("10.0.0.1", "10.0.0.2"))

    listener = SdpSocket(driver=driver, hosts=right)
    listener.bind(("10.0.0.2", 5001))
    listener.listen()
    data, room = bytearray(b"sidestep" * 100_000), bytearray(800_000)

    def server() -> None:
        conn, _ = listener.accept()
        with conn, listener:
            conn.recv_into(room, flags=MSG_WAITALL)  # read by RDMA from the other end's buffer into this one
            conn.sendall(b"thanks")

    def client() -> None:
        with SdpSocket(driver=driver, hosts=left) as conn:
            conn.connect(("10.0.0.2", 5001))
            conn.sendall(data)
            assert conn.recv(100) == b"thanks"

    driver.together(server, client)
    assert room == data


def test_streams() -> None:
    async def main() -> None:
        fabric = Fabric(Random(1))
        pump = LoopbackPump(fabric)
        stacks = {ip: stack_on(fabric, fabric.device(ip)) for ip in ("10.0.0.1", "10.0.0.2")}
        left, right = (OneHost(Host(stack, [ip], kick=pump.kick)) for ip, stack in stacks.items())

        async def echo(reader: SdpReader, writer: SdpWriter) -> None:
            while part := await reader.read(65536):
                await writer.sendall(part)
            writer.close()

        async with await start_server(echo, "10.0.0.2", 5001, hosts=right):
            reader, writer = await open_connection("10.0.0.2", 5001, hosts=left)
            requests = [bytearray(300_000) for _ in range(4)]
            await asyncio.gather(*(writer.sendall(each) for each in requests), reader.readexactly(1_200_000))
            writer.close()
            await writer.wait_closed()

    asyncio.run(main())
